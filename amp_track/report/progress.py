"""What the user sees while a command works: a bar on a terminal, plain lines elsewhere. All of it on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from amp_track.records.events import EpochEnded, Event, Noted, StepsDone
from amp_track.records.job import Job
from amp_track.records.outcome import Outcome
from amp_track.records.values import format_bytes

console = Console(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line that stays."""
    console.print(text, markup=False)


def working(text: str) -> AbstractContextManager[object]:
    """On a terminal, a line with a spinner for as long as something takes that has no events."""
    return console.status(text) if console.is_terminal else nullcontext()


@contextmanager
def following(job: Job, title: str, quality_name: str, *, epoch_lines: bool) -> Iterator[Callable[[Event], None]]:
    """Show one job as its events arrive.

    Args:
        job: what runs.
        title: shown beside the bar.
        quality_name: of the number that `EpochEnded` carries.
        epoch_lines: print a line at the end of each epoch.
    """

    def epoch_line(event: EpochEnded) -> str:
        of = f"/{job.epochs}" if job.epochs else ""
        quality = f"  {quality_name} {event.quality:.4f}" if event.quality is not None else ""
        evaluated = f"  eval loss {event.eval_loss:.4f}" if event.eval_loss is not None else ""
        return f"epoch {event.epoch}{of}  loss {event.train_loss:.4f}{evaluated}{quality}"

    if not console.is_terminal:

        def plain(event: Event) -> None:
            match event:
                case EpochEnded() if epoch_lines:
                    say(epoch_line(event))
                case Noted(text=text):
                    say(text)

        yield plain
        return

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def moving(event: Event) -> None:
            match event:
                case StepsDone(step=step, total_steps=total):
                    bar.update(task, completed=step, total=total)
                case Noted(text=text):
                    bar.console.print(text, markup=False)
                case EpochEnded() if epoch_lines:
                    bar.console.print(epoch_line(event), markup=False)

        yield moving


def outcome_line(job: Job, outcome: Outcome, *, quality_name: str | None = None, why: str = "") -> str:
    """One job in one line: `bf16 batch 949  fits  61.2 MiB  12,345 samples/s  (where the budget should end)`."""
    parts = [f"{job.precision:<4} batch {job.batch_size:<6} {outcome.verdict}"]
    if outcome.max_memory_bytes is not None and outcome.fits:
        parts.append(format_bytes(outcome.max_memory_bytes))
    if outcome.samples_per_second is not None:
        parts.append(f"{outcome.samples_per_second:,.0f} samples/s")
    if outcome.waits_for_data:
        parts.append(f"{outcome.waited_fraction:.0%} of the time waiting for data")
    if quality_name is not None and outcome.quality is not None:
        parts.append(f"{quality_name} {outcome.quality:.4f} after {outcome.updates:,} updates")
    if not outcome.fits and outcome.phase:
        parts.append(f"in {outcome.phase}")
    if why:
        parts.append(f"({why})")
    return "  ".join(parts)
