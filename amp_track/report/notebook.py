"""Progress in a notebook: one output of the cell, updated in place."""

from __future__ import annotations

import html
import time
from typing import Any

_SECONDS_BETWEEN_UPDATES = 0.3
_LINES_IN_SIGHT = 10
"""Earlier lines are collapsed."""
_STYLE = "margin: 0; color: inherit; background: transparent; white-space: pre-wrap"


class CellOutput:
    """The output of the running cell: permanent lines, and below them one that changes."""

    def __init__(self) -> None:
        self._execution: int | None = None
        self._handle: Any = None
        self._lines: list[str] = []
        self._current = ""
        self._shown_at = 0.0

    def say(self, line: str) -> None:
        """Add a permanent line."""
        self._begin_if_new_cell()
        self._lines.append(line)
        self._show()

    def change(self, line: str) -> None:
        """Replace the changing line; an empty one removes it. Frequent updates are dropped."""
        self._begin_if_new_cell()
        if line == self._current:
            return
        self._current = line
        if not line or time.monotonic() - self._shown_at >= _SECONDS_BETWEEN_UPDATES:
            self._show()

    def _begin_if_new_cell(self) -> None:
        from IPython.core.getipython import get_ipython  # exists: this code runs in its kernel

        execution = getattr(get_ipython(), "execution_count", None)
        if execution != self._execution:
            self._execution, self._handle, self._lines, self._current = execution, None, [], ""

    def _show(self) -> None:
        from IPython.display import display

        data = {"text/plain": "\n".join([*self._lines, self._current]).rstrip(), "text/html": self._html()}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._shown_at = time.monotonic()

    def _html(self) -> str:
        earlier, lines = self._lines[:-_LINES_IN_SIGHT], self._lines[-_LINES_IN_SIGHT:]
        if self._current:
            lines = [*lines, self._current]
        folded = ""
        if earlier:
            folded = f"<details><summary>{len(earlier)} earlier lines</summary>{_pre(earlier)}</details>"
        return folded + _pre(lines)


def _pre(lines: list[str]) -> str:
    return f'<pre style="{_STYLE}">{html.escape(chr(10).join(lines))}</pre>'
