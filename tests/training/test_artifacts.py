"""What a training leaves for people; and that it is whole whatever becomes of that."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from support import MEBIBYTE, WORKLOADS

from amp_track.config.inspection import resolve
from amp_track.config.job import Job, JobFolder
from amp_track.records.events import Event, FileWritten, Noted
from amp_track.records.result import Outcome, Verdict
from amp_track.runner.runner import Sandbox
from amp_track.workload import load_workload

PAINTER = str(WORKLOADS / "painter.py")


def trained(
    sandbox: Sandbox, folder: Path, *, spoils: str = "", keep_weights: bool = False, probe: bool = False
) -> tuple[Outcome, list[Event]]:
    asked = Job(
        workload=PAINTER,
        precision="fp32",
        options=(("spoils", spoils),),
        memory_budget_bytes=64 * MEBIBYTE,
        probe=probe,
    )
    events: list[Event] = []
    job = resolve(asked, sandbox.inspect(asked))
    outcome = sandbox.run(job, events.append, folder=JobFolder(path=str(folder), keep_weights=keep_weights))
    return outcome, [event for event in events if isinstance(event, FileWritten | Noted)]


def test_weights_and_pictures(sandbox: Sandbox, tmp_path: Path) -> None:
    outcome, left = trained(sandbox, tmp_path, keep_weights=True)
    assert outcome.verdict is Verdict.FITS
    files = [(Path(event.file).name, event.folder) for event in left if isinstance(event, FileWritten)]
    assert files == [("weights.pt", ""), ("learnt.png", "pictures"), ("target.png", "pictures")]
    load_workload(PAINTER).model().load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    with Image.open(tmp_path / "target.png") as picture:
        assert (picture.size, picture.mode) == ((16, 16), "L")


def test_a_probe_leaves_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    assert trained(sandbox, tmp_path, keep_weights=True, probe=True)[1] == []


@pytest.mark.parametrize(
    ("spoils", "said"),
    [
        ("raises", "ValueError: no paint"),
        ("memory", "can't allocate memory"),
        ("shape", "learnt: got a picture of shape (256, 1), expected"),
    ],
)
def test_a_spoilt_picture_is_said_and_the_training_is_whole(
    sandbox: Sandbox, tmp_path: Path, spoils: str, said: str
) -> None:
    outcome, (note,) = trained(sandbox, tmp_path, spoils=spoils)
    assert outcome.verdict is Verdict.FITS
    assert outcome.quality is not None
    assert isinstance(note, Noted)
    assert said in note.text
