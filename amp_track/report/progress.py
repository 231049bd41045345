"""Progress of a command: a bar on a terminal, one output in a notebook, plain lines elsewhere.

Everything goes to stderr, except in a notebook.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.text import Text

from amp_track.config.job import Job
from amp_track.config.values import PRECISION_COLORS
from amp_track.records.events import EpochEnded, Event, Noted, StepsDone
from amp_track.records.masking import masked_within
from amp_track.records.result import JobResult
from amp_track.records.units import format_bytes
from amp_track.report.notebook import CellOutput
from amp_track.report.progress_bar import live_bar
from amp_track.report.text import counted


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Stop printing: rich would otherwise end the program in the middle of its runs."""
        self.quiet = True


console = _Console(stderr=True, highlight=False, soft_wrap=True)
_cell_output = CellOutput()

Show = Callable[[Event], None]


def say(text: str, *, precision: str = "") -> None:
    """Print a permanent line. On a terminal, its first word gets the color of `precision`, if given."""
    text = masked_within(text)
    if console.is_jupyter:
        _cell_output.say(text)
    else:
        line = Text(text)
        if precision:
            line.stylize(PRECISION_COLORS[precision], 0, len(precision))
        with contextlib.suppress(OSError):  # the terminal may be closed
            console.print(line)


def working(text: str) -> AbstractContextManager[object]:
    """Show that work without events is running: a spinner on a terminal, a line in a notebook."""
    if console.is_jupyter:
        return _line_in_notebook(text)
    spinner = "line" if console.options.ascii_only else "dots"
    return console.status(text, spinner=spinner) if console.is_terminal else nullcontext()


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


def following(
    job: Job, title: str, metric_name: str, *, epoch_lines: bool, where: str = ""
) -> AbstractContextManager[Show]:
    """Show one job as its events arrive.

    Args:
        job: the running job.
        title: the text next to the bar.
        metric_name: the name of the metric in `EpochEnded`.
        epoch_lines: whether to print a line at the end of each epoch; in a notebook, of the last epoch.
        where: the state of the search that the job belongs to.
    """

    def epoch_line(event: EpochEnded) -> str:
        if not epoch_lines:
            return ""
        of = f"/{job.epochs}" if job.epochs else ""
        metric = f"  {metric_name} {event.metric:.4f}" if event.metric is not None else ""
        evaluated = f"  eval loss {event.eval_loss:.4f}" if event.eval_loss is not None else ""
        return f"epoch {event.epoch}{of}  loss {event.train_loss:.4f}{evaluated}{metric}"

    if console.is_jupyter:
        return _following_in_notebook(title, epoch_line)
    if console.is_terminal:
        return live_bar(console, title, where, job.precision, epoch_line)
    return _following_in_lines(epoch_line)


@contextmanager
def _following_in_lines(epoch_line: Callable[[EpochEnded], str]) -> Iterator[Show]:
    def show(event: Event) -> None:
        match event:
            case EpochEnded() if line := epoch_line(event):
                say(line)
            case Noted(text=text):
                say(text)

    yield show


@contextmanager
def _following_in_notebook(title: str, epoch_line: Callable[[EpochEnded], str]) -> Iterator[Show]:
    last_epoch = ""

    def show(event: Event) -> None:
        nonlocal last_epoch
        match event:
            case StepsDone(step=step, total_steps=total):
                _cell_output.change("  ".join(filter(None, (f"{title}  {step / total:.0%}", last_epoch))))
            case Noted(text=text):
                _cell_output.say(text)
            case EpochEnded():
                last_epoch = epoch_line(event)

    with _line_in_notebook(title):
        yield show
    if last_epoch:
        _cell_output.say(last_epoch)


@contextmanager
def _line_in_notebook(text: str) -> Iterator[None]:
    _cell_output.change(text)
    try:
        yield
    finally:
        _cell_output.change("")


def job_result_line(job: Job, job_result: JobResult, *, metric_name: str | None = None, why: str = "") -> str:
    """Return a job as one line: `bf16 batch 949  fits  61.2 MiB  12,345 samples/s  (predicted to use the budget)`."""
    parts = [f"{job.precision:<4} batch {job.batch_size:<6} {job_result.status}"]
    if job_result.peak_bytes is not None and job_result.fits:
        parts.append(format_bytes(job_result.peak_bytes))
    if job_result.samples_per_second is not None:
        parts.append(f"{job_result.samples_per_second:,.0f} samples/s")
    if job_result.waits_for_data:
        parts.append(f"{job_result.waited_fraction:.0%} of the time waiting for data")
    if metric_name is not None and job_result.metric is not None:
        parts.append(
            f"{metric_name} {job_result.metric:.4f} after {counted(job_result.optimizer_steps, 'optimizer step')}"
        )
    if not job_result.fits and job_result.phase:
        parts.append(f"in {job_result.phase}")
    if why:
        parts.append(f"({why})")
    return "  ".join(parts)
