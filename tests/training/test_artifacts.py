"""What a training leaves for people; and that it is whole whatever becomes of that."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from support import MEBIBYTE, WORKLOADS

from amp_track.config.inspection import resolve
from amp_track.config.job import Job, JobFolder
from amp_track.records.events import Event, FileWritten, Noted
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner.runner import JobRunner
from amp_track.targets.workload import load_workload

PAINTER = str(WORKLOADS / "painter.py")


def trained(
    runner: JobRunner, folder: Path, *, spoils: str = "", keep_weights: bool = False, probe: bool = False
) -> tuple[JobResult, list[Event]]:
    asked = Job(
        workload=PAINTER,
        precision="fp32",
        options=(("spoils", spoils),),
        memory_budget_bytes=64 * MEBIBYTE,
        probe=probe,
    )
    events: list[Event] = []
    job = resolve(asked, runner.inspect(asked))
    job_result = runner.run(job, events.append, folder=JobFolder(path=str(folder), keep_weights=keep_weights))
    return job_result, [event for event in events if isinstance(event, FileWritten | Noted)]


def test_weights_and_plots(runner: JobRunner, tmp_path: Path) -> None:
    job_result, left = trained(runner, tmp_path, keep_weights=True)
    assert job_result.status is JobStatus.FITS
    files = [(Path(event.file).name, event.folder) for event in left if isinstance(event, FileWritten)]
    assert files == [("weights.pt", ""), ("learnt.png", "pictures"), ("target.png", "pictures")]
    load_workload(PAINTER).model().load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    with Image.open(tmp_path / "target.png") as plot:
        assert (plot.size, plot.mode) == ((16, 16), "L")


def test_a_probe_leaves_nothing(runner: JobRunner, tmp_path: Path) -> None:
    assert trained(runner, tmp_path, keep_weights=True, probe=True)[1] == []


@pytest.mark.parametrize(
    ("spoils", "said"),
    [
        ("raises", "ValueError: no paint"),
        ("memory", "can't allocate memory"),
        ("shape", "plots() returned learnt of shape (256, 1); it must be"),
    ],
)
def test_a_spoilt_plot_is_said_and_the_training_is_whole(
    runner: JobRunner, tmp_path: Path, spoils: str, said: str
) -> None:
    job_result, (note,) = trained(runner, tmp_path, spoils=spoils)
    assert job_result.status is JobStatus.FITS
    assert job_result.metric is not None
    assert isinstance(note, Noted)
    assert said in note.text
