"""The progress bar of one job on a terminal: progress, steps/s, memory, the GradScaler's scale, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from amp_track.config.values import PRECISION_COLORS
from amp_track.records.events import EpochEnded, Event, Noted, Started, StepsDone, StepsRecorded
from amp_track.records.units import format_bytes

_NARROW = 80
"""Columns. A narrower terminal shows no bar, and the scale on the second line."""
_LONGEST_TITLE, _LONGEST_NARROW_TITLE = 60, 24
"""Columns of a title; longer titles are truncated."""


class LiveBar:
    """A progress bar that follows the events of one job.

    Args:
        progress: the rich `Progress` that draws it.
        title: the name of the job.
        where: the state of the search, such as its bracket.
        precision: the precision that colors the title.
        epoch_line: returns the line to print at the end of an epoch; empty for none.
    """

    def __init__(
        self, progress: Progress, title: str, where: str, precision: str, epoch_line: Callable[[EpochEnded], str]
    ) -> None:
        self._progress = progress
        self._epoch_line = epoch_line
        self._scale: float | None = None
        self._memory_bytes: int | None = None
        self._first: tuple[int, float] | None = None
        """The first reported step and its time; earlier steps are warm-up."""
        self._steps_per_second: float | None = None
        self._is_narrow = progress.console.width < _NARROW
        self._where = where
        shown = Text(title, style=PRECISION_COLORS[precision])
        self._task: TaskID = progress.add_task("", total=None, title=shown, state="", below=self._below())

    def show(self, event: Event) -> None:
        """Update the bar by one event."""
        match event:
            case Started(scale=scale):
                self._scale = scale
            case StepsRecorded(scale_changes=changes) if changes:
                self._scale = changes[-1][1]
            case StepsDone(step=step, total_steps=total, memory_bytes=memory_bytes):
                self._memory_bytes = memory_bytes
                self._time(step)
                state, below = self._state(), self._below()
                self._progress.update(self._task, completed=step, total=total, state=state, below=below)
            case Noted(text=text):
                self._progress.console.print(text, markup=False)
            case EpochEnded() if line := self._epoch_line(event):
                self._progress.console.print(line, markup=False)

    def _time(self, step: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
            return
        steps, seconds = step - self._first[0], now - self._first[1]
        if steps > 0 and seconds > 0:
            self._steps_per_second = steps / seconds

    def _state(self) -> str:
        parts = []
        if self._steps_per_second is not None:
            parts.append(f"{self._steps_per_second:,.3g} steps/s")
        if self._memory_bytes is not None:
            parts.append(format_bytes(self._memory_bytes))
        if self._scale is not None and not self._is_narrow:
            parts.append(self._scale_text())
        return "  ".join(parts)

    def _below(self) -> Text | None:
        """Return the second line; None if it would be empty."""
        parts = [self._scale_text()] if self._is_narrow and self._scale is not None else []
        parts += [self._where] if self._where else []
        return Text("  ".join(parts), style="dim", no_wrap=True, overflow="ellipsis") if parts else None

    def _scale_text(self) -> str:
        return f"scale {self._scale:,g}"


class _Lines(Progress):
    """One line for the job, and one below it for the state of the search."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the lines from top to bottom."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.fields["below"]:
                yield task.fields["below"]


class _Title(ProgressColumn):
    """The colored title of a job."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self._longest = longest

    def render(self, task: Task) -> Text:
        title: Text = task.fields["title"].copy()
        title.truncate(self._longest, overflow="ellipsis")
        return title


@contextmanager
def live_bar(
    console: Console, title: str, where: str, precision: str, epoch_line: Callable[[EpochEnded], str]
) -> Iterator[Callable[[Event], None]]:
    """Draw a bar until the block ends. Yield the function that shows an event; see `LiveBar`."""
    is_narrow = console.width < _NARROW
    columns: list[ProgressColumn] = [_Title(_LONGEST_NARROW_TITLE if is_narrow else _LONGEST_TITLE)]
    if not is_narrow:
        columns.append(BarColumn(bar_width=20))
    columns += [
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[state]}", markup=False),
        TimeRemainingColumn(),
    ]
    with _Lines(*columns, console=console, transient=True) as progress:
        yield LiveBar(progress, title, where, precision, epoch_line).show
