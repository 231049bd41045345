from pathlib import Path

import pytest
import torch

from amp_track.config.job import ALONE, JobFolder
from amp_track.records.errors import BadInput
from amp_track.records.events import CheckpointWritten
from amp_track.training import checkpoint
from amp_track.training.process_group import RankGroup


def test_what_is_saved_is_loaded(clean_folder: Path) -> None:
    file = clean_folder / "a.pt"
    checkpoint.save({"weights": torch.arange(3.0), "counts": [(1, 2.0)], "best": None}, file)
    state = checkpoint.load(file)
    assert state["weights"].tolist() == [0, 1, 2]
    assert (state["counts"], state["best"]) == ([(1, 2.0)], None)
    assert [path.name for path in clean_folder.iterdir()] == ["a.pt"], "no temporary file is left"


def test_a_file_that_is_not_whole_is_rejected(clean_folder: Path) -> None:
    file = clean_folder / "a.pt"
    checkpoint.save({"weights": torch.arange(1000.0)}, file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadInput, match="cannot be read"):
        checkpoint.load(file)


class Harmful:
    def __reduce__(self) -> object:
        return Path.touch, (Path("harm"),)


def test_code_in_a_file_is_not_run(clean_folder: Path) -> None:
    file = clean_folder / "a.pt"
    torch.save({"format": 2, "weights": Harmful()}, file)
    with pytest.raises(BadInput, match="cannot be read"):
        checkpoint.load(file)
    assert not Path("harm").exists()


def test_another_format_is_rejected(clean_folder: Path) -> None:
    file = clean_folder / "a.pt"
    torch.save({"format": 99}, file)
    with pytest.raises(BadInput, match="format 99; this version reads format 3"):
        checkpoint.load(file)


class Tracking:
    """Notes each file as it is sent, and fetches it at once."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bool, bool]] = []

    def __call__(self, written: CheckpointWritten) -> None:
        file = Path(written.file)
        checkpoint.load(file)
        file.unlink()
        self.sent.append((file.name, written.is_last, written.is_best))


@pytest.mark.parametrize(("higher_is_better", "metrics"), [(True, [0.5, 0.4, 0.6]), (False, [1.0, 2.0, 0.5])])
def test_when_a_training_writes_one(clean_folder: Path, higher_is_better: bool, metrics: list[float]) -> None:
    tracking = Tracking()
    checkpoints = checkpoint.Checkpoints(
        4, JobFolder(path=str(clean_folder)), higher_is_better=higher_is_better, send=tracking
    )
    for step in range(1, 10):
        if checkpoints.is_due(step):
            checkpoints.after_step(step, {})
        if step % 3 == 0:
            checkpoints.after_epoch(step, dict, metric=metrics[step // 3 - 1], is_over=step == 9)
    assert tracking.sent == [
        ("step-000000003-evaluated.pt", False, True),
        ("step-000000004.pt", True, False),
        ("step-000000008.pt", True, False),
        ("step-000000009-evaluated.pt", True, True),
    ]


def test_the_best_so_far_is_remembered_over_a_resume(clean_folder: Path) -> None:
    kept: list[CheckpointWritten] = []
    first = checkpoint.Checkpoints(
        1, JobFolder(path=str(clean_folder)), higher_is_better=True, send=kept.append
    )  # fmt: skip
    first.after_epoch(1, dict, metric=0.9, is_over=False)
    tracking = Tracking()
    second = checkpoint.Checkpoints(
        1, JobFolder(path=str(clean_folder), resume_from=kept[0].file), higher_is_better=True, send=tracking
    )
    assert second.load_resume_state(RankGroup(ALONE)) is not None
    second.after_epoch(2, dict, metric=0.8, is_over=False)
    second.after_epoch(3, dict, metric=float("nan"), is_over=False)
    assert tracking.sent == []


def test_without_an_interval_there_are_none(clean_folder: Path) -> None:
    tracking = Tracking()
    checkpoints = checkpoint.Checkpoints(
        None, JobFolder(path=str(clean_folder)), higher_is_better=True, send=tracking
    )  # fmt: skip
    checkpoints.after_epoch(1, dict, metric=0.9, is_over=True)
    assert not checkpoints.is_due(1)
    assert tracking.sent == []
