import itertools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support import written_on_a_terminal

from amp_track.config.job import Job
from amp_track.records.events import EpochEnded, Event, Noted, Started, StepsDone
from amp_track.records.result import JobResult, JobStatus
from amp_track.report import progress

JOB = Job(precision="bf16", batch_size=949, epochs=2)
EVENTS: list[Event] = [
    Started(settings=()),
    StepsDone(step=1, total_steps=4),
    Noted(text="[bold] is text"),
    EpochEnded(epoch=1, step=2, train_loss=0.5, eval_loss=0.25, metric=0.75),
    EpochEnded(epoch=2, step=4, train_loss=0.125),
]


@pytest.mark.parametrize("epoch_lines", [True, False])
def test_elsewhere_than_on_a_terminal_events_are_lines(capsys: pytest.CaptureFixture[str], epoch_lines: bool) -> None:
    with progress.following(JOB, "a title", "accuracy", epoch_lines=epoch_lines) as show:
        for event in EVENTS:
            show(event)
    with progress.working("something"):
        progress.say("said")
    lines = ["epoch 1/2  loss 0.5000  eval loss 0.2500  accuracy 0.7500", "epoch 2/2  loss 0.1250"]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == ["[bold] is text", *(lines if epoch_lines else []), "said"]


def test_nobody_reads_what_is_said_and_the_program_goes_on() -> None:
    program = """
from amp_track.report import progress
for _ in range(2):
    progress.say("said")
print("went on")
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writer, text=True)
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, "went on\n")


PROGRAM = """
import time
from amp_track.records.events import EpochEnded, Noted, Started, StepsDone, StepsRecorded
from amp_track.config.job import Job
from amp_track.report import progress
job = Job(epochs=2, precision="amp")
with progress.following(job, "a [title]", "accuracy", epoch_lines=True, where="batch 64 fits") as show:
    show(Started(settings=(), scale=65536.0))
    show(StepsDone(step=1, total_steps=4, memory_bytes=3 * 2**20))
    show(StepsRecorded(first_step=1, losses=(0.5, 0.5), scale_changes=((1, 32768.0),)))
    time.sleep(0.2)
    show(StepsDone(step=3, total_steps=4, memory_bytes=5 * 2**20))
    time.sleep(0.2)
    show(Noted(text="[bold] is text"))
    show(EpochEnded(epoch=1, step=3, train_loss=0.5))
progress.say("amp  batch 3 fits", precision="amp")
"""


def test_on_a_terminal_there_is_a_bar_that_goes_away() -> None:
    text = written_on_a_terminal(PROGRAM, 120)
    assert "[bold] is text\r\n" in text and "epoch 1/2  loss 0.5000\r\n" in text
    assert all(part in text for part in ("a [title]", "75%", "batch 64 fits", "5 MiB", "scale 32,768", " steps/s"))
    after_last_bar = text[text.rindex("a [title]") :]
    assert "\x1b[2K" in after_last_bar, "its line is cleared"
    assert "\x1b[38;2;213;94;0mamp" in text or "\x1b[38;5;166mamp" in text, "a precision has its color"
    assert not re.search(r"\x1b\[[0-9;]*38;", written_on_a_terminal(PROGRAM, 120, NO_COLOR="1"))


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_log_with_colors_is_not_animated_and_has_wide_tables(variable: str) -> None:
    program = f"""{PROGRAM}
with progress.working("something"):
    time.sleep(0.2)
from amp_track.report.table import Column, print_table, table_of
print_table(table_of("title", [Column("heading")], [("word " * 18,)]))
"""
    environment = os.environ | {variable: "1", "TERM": "xterm-256color"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    noted, epoch, fits = done.stderr.splitlines()
    assert (noted, epoch) == ("[bold] is text", "epoch 1/2  loss 0.5000")
    assert re.fullmatch(r"\x1b\[[0-9;]+mamp\x1b\[0m  batch 3 fits", fits), "colors are kept"
    assert "word " * 17 in done.stdout


@pytest.mark.parametrize("columns", [60, 79])
def test_a_narrow_terminal_shows_the_same_in_two_lines(columns: int) -> None:
    text = written_on_a_terminal(PROGRAM, columns)
    lines = [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", text)) if line]
    assert all(len(line) <= columns for line in lines), lines
    bars = [(bar, below) for bar, below in itertools.pairwise(lines) if "a [title]" in bar]
    assert any("75%" in bar and "5 MiB" in bar for bar, _ in bars)
    assert any(below.startswith("scale 32,768  batch 64 fits") for _, below in bars)


TRAINED = JobResult(
    status=JobStatus.FITS, metric=0.98765, steps=1235, skipped_steps=1, train_seconds=10, waited_seconds=4
)  # fmt: skip


@pytest.mark.parametrize(
    ("job_result", "expected"),
    [
        (JobResult(status=JobStatus.FITS, peak_bytes=64_172_851, samples_per_second=12_345.4),
         "fits  61.2 MiB  12,345 samples/s"),
        (JobResult(status=JobStatus.OOM, phase="backward", peak_bytes=64_172_851), "oom  in backward"),
        (TRAINED, "fits  40% of the time waiting for data  accuracy 0.9877 after 1,234 optimizer steps"),
    ],
)  # fmt: skip
def test_a_job_in_one_line(job_result: JobResult, expected: str) -> None:
    line = f"bf16 batch 949    {expected}"
    assert progress.job_result_line(JOB, job_result, metric_name="accuracy", why="why") == f"{line}  (why)"
    assert progress.job_result_line(JOB, job_result).startswith(line.split("  accuracy")[0])


@pytest.mark.parametrize(
    ("deadline", "total", "calls"),
    [
        (1e9, 7, [(0, 4, "5 of 7"), (90, 5, "6 of 7, about 0:03:00 left"), (120, 6, "7 of 7, about 0:01:00 left"),
                  (180, 7, "8 of 7")]),  # the first four by another command, the last by another worker too
        (1e9, 12, [(0, 0, "1 of 12"), (60, 4, "5 of 12, about 0:02:00 left")]),  # other workers count
        (90, 10, [(0, 0, "1 of 10"), (60, 1, "2 of 10, about 0:00:30 left"), (120, 2, "3 of 10, about 0:00:00 left")]),
    ],
)  # fmt: skip
def test_the_time_left_is_told_from_the_trainings_that_have_ended(
    deadline: float, total: int, calls: list[tuple[float, int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = progress.Pace(deadline)
    for now, made, expected in calls:
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda now=now: now))
        assert pace.next(made, total) == f"training {expected}"
