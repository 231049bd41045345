"""Progress of a command: a bar on a terminal, one output in a notebook, plain lines elsewhere.

Everything goes to stderr, except in a notebook.
"""

from __future__ import annotations

import contextlib
import html
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from amp_track.config.job import Job
from amp_track.config.precisions import PRECISION_COLORS
from amp_track.records.events import EpochEnded, Event, Noted, Started, StepsDone, StepsRecorded
from amp_track.records.masking import masked_within
from amp_track.records.result import JobResult
from amp_track.records.units import format_bytes
from amp_track.report.table import is_tty
from amp_track.report.wording import counted, metric_text, speed_text

_NARROW = 80
"""Columns. A narrower terminal shows no bar, and the scale on the second line."""
_LONGEST_TITLE, _LONGEST_NARROW_TITLE = 60, 24
"""Columns of a title; longer titles are truncated."""
_SECONDS_BETWEEN_UPDATES = 0.3
_LINES_IN_SIGHT = 10
"""Earlier lines are collapsed in a notebook."""
_STYLE = "margin: 0; color: inherit; background: transparent; white-space: pre-wrap"

Update = Callable[[StepsDone, str], None]
"""Shows the state of a job, and the GradScaler's scale."""


_LONG_SECONDS = 20.0
"""Work without events that takes longer has a line in a log."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Stop printing: rich would otherwise end the program in the middle of its runs."""
        self.quiet = True


class CellOutput:
    """The output of a notebook's running cell: permanent lines, and below them one that changes."""

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
        is_due = not line or time.monotonic() - self._shown_at >= _SECONDS_BETWEEN_UPDATES
        if line != self._current:
            self._current = line
            if is_due:
                self._show()

    def _begin_if_new_cell(self) -> None:
        from IPython.core.getipython import get_ipython  # exists: this code runs in its kernel

        execution = getattr(get_ipython(), "execution_count", None)
        if execution != self._execution:
            self._execution, self._handle, self._lines, self._current = execution, None, [], ""

    def _show(self) -> None:
        from IPython.display import display

        def pre(lines: list[str]) -> str:
            return f'<pre style="{_STYLE}">{html.escape(chr(10).join(lines))}</pre>'

        lines = [*self._lines, self._current] if self._current else self._lines
        hidden = max(len(self._lines) - _LINES_IN_SIGHT, 0)
        folded = f"<details><summary>{hidden} earlier lines</summary>{pre(lines[:hidden])}</details>" if hidden else ""
        data = {"text/plain": "\n".join(lines), "text/html": folded + pre(lines[hidden:])}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._shown_at = time.monotonic()


console = _Console(stderr=True, highlight=False, soft_wrap=True)
_cell_output = CellOutput()


def say(text: str, *, precision: str = "") -> None:
    """Print a permanent line. On a terminal, its first word gets the color of `precision`, if given."""
    text = masked_within(text)
    if console.is_jupyter:
        _cell_output.say(text)
        return
    line = Text(text)
    if precision:
        line.stylize(PRECISION_COLORS[precision], 0, len(precision))
    with contextlib.suppress(OSError):  # the terminal may be closed
        console.print(line)


def working(text: str) -> AbstractContextManager[object]:
    """Show that work without events is running: a spinner on a terminal, else a line, in a log only if it is long."""
    if console.is_jupyter:
        return _line_in_notebook(text)
    spinner = "line" if console.options.ascii_only else "dots"
    return console.status(text, spinner=spinner) if is_tty(console) else saying_after(_LONG_SECONDS, text)


@contextmanager
def saying_after(seconds: float, text: str) -> Iterator[None]:
    """Print a line if the block takes longer."""
    timer = threading.Timer(seconds, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # no line may appear after the block


@contextmanager
def following(
    job: Job, title: str, metric_name: str, *, epoch_lines: bool, where: str = ""
) -> Iterator[Callable[[Event], None]]:
    """Show one job as its events arrive.

    Args:
        job: the running job.
        title: the text next to the bar.
        metric_name: the name of the metric in `EpochEnded`.
        epoch_lines: whether to print a line at the end of each epoch; in a notebook, of the last epoch.
        where: the state of the search that the job belongs to.
    """
    scale = last_epoch = ""
    bar: AbstractContextManager[Update | None] = nullcontext()
    if console.is_jupyter:
        bar = _line_in_notebook(title)
    elif is_tty(console):
        bar = _bar(title, where, PRECISION_COLORS[job.precision])

    def show(event: Event) -> None:
        nonlocal scale, last_epoch
        match event:
            case Started(scale=number) if number is not None:
                scale = f"scale {number:,g}"
            case StepsRecorded(scale_changes=changes) if changes:
                scale = f"scale {changes[-1][1]:,g}"
            case StepsDone() if console.is_jupyter:
                part = f"{title}  {event.step / event.total_steps:.0%}"
                _cell_output.change(f"{part}  {last_epoch}".rstrip())
            case StepsDone() if update is not None:
                update(event, scale)
            case Noted(text=text):
                say(text)
            case EpochEnded() if epoch_lines:
                last_epoch = _epoch_line(event, job, metric_name)
                if not console.is_jupyter:
                    say(last_epoch)

    with bar as update:
        yield show
    if last_epoch and console.is_jupyter:
        say(last_epoch)


def _epoch_line(event: EpochEnded, job: Job, metric_name: str) -> str:
    of = f"/{job.epochs}" if job.epochs else ""
    metric = f"  {metric_name} {metric_text(event.metric)}" if event.metric is not None else ""
    evaluated = f"  eval loss {metric_text(event.eval_loss)}" if event.eval_loss is not None else ""
    return f"epoch {event.epoch}{of}  loss {metric_text(event.train_loss)}{evaluated}{metric}"


@contextmanager
def _line_in_notebook(text: str) -> Iterator[None]:
    _cell_output.change(text)
    try:
        yield
    finally:
        _cell_output.change("")


@contextmanager
def _bar(title: str, where: str, color: str) -> Iterator[Update]:
    """Draw a bar until the block ends: progress, steps/s, memory, the GradScaler's scale, time left."""
    is_narrow = console.width < _NARROW
    shown = Text(title)
    shown.truncate(_LONGEST_NARROW_TITLE if is_narrow else _LONGEST_TITLE, overflow="ellipsis")
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", style=color, markup=False),
        *([] if is_narrow else [BarColumn(bar_width=20)]),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[state]}", markup=False),
        TimeRemainingColumn(),
    ]
    first = (0, 0.0)
    with _Lines(*columns, console=console, transient=True) as progress:
        task = progress.add_task(shown.plain, total=None, state="", below=where)

        def update(event: StepsDone, scale: str) -> None:
            nonlocal first
            now = time.monotonic()
            first = first if first[0] else (event.step, now)  # the steps before the first event are warm-up
            steps, seconds = event.step - first[0], now - first[1]
            speed = f"{steps / seconds:,.3g} steps/s" if steps > 0 and seconds > 0 else ""
            memory = format_bytes(event.memory_bytes) if event.memory_bytes is not None else ""
            state = "  ".join(filter(None, (speed, memory, "" if is_narrow else scale)))
            below = "  ".join(filter(None, (scale if is_narrow else "", where)))
            progress.update(task, completed=event.step, total=event.total_steps, state=state, below=below)

        yield update


class _Lines(Progress):
    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if below := task.fields["below"]:
                yield Text(below, style="dim", no_wrap=True, overflow="ellipsis")


def job_result_line(job: Job, job_result: JobResult, *, metric_name: str | None = None, why: str = "") -> str:
    """Return a job as one line: `bf16 batch 949  fits  61.2 MiB  12,345 samples/s  (predicted to use the budget)`."""
    parts = [f"{job.precision:<4} batch {job.batch_size:<6} {job_result.status}"]
    if job_result.peak_bytes is not None and job_result.fits:
        parts.append(format_bytes(job_result.peak_bytes))
    if job_result.samples_per_second is not None:
        parts.append(f"{speed_text(job_result.samples_per_second)} samples/s")
    if job_result.waits_for_data:
        parts.append(f"{job_result.waited_fraction:.0%} of the time waiting for data")
    if metric_name is not None and job_result.metric is not None:
        steps = counted(job_result.optimizer_steps, "optimizer step")
        parts.append(f"{metric_name} {metric_text(job_result.metric)} after {steps}")
    if not job_result.fits and job_result.phase:
        parts.append(f"in {job_result.phase}")
    if why:
        parts.append(f"({why})")
    return "  ".join(parts)


class Pace:
    """Estimates the remaining time from the trainings that have ended; none starts after `deadline` (monotonic)."""

    def __init__(self, deadline: float = math.inf) -> None:
        self._deadline = deadline
        self._first: tuple[int, float] | None = None
        """The number of finished trainings when the first one started here, and the time."""

    def next(self, made: int, total: int) -> str:
        """Return the position of the next training: `training 7 of 30, about 0:03:10 left`.

        `made` counts the trainings finished by all search workers, including earlier commands. The time is omitted
        until one has ended since the first call.
        """
        now = time.monotonic()
        first, since = self._first = self._first or (made, now)
        text = f"training {made + 1} of {total}"
        if made == first or made >= total:
            return text
        left_seconds = min((now - since) / (made - first) * (total - made), max(self._deadline - now, 0))
        return f"{text}, about {timedelta(seconds=round(left_seconds))} left"
