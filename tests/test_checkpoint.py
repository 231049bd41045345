from pathlib import Path

import pytest
import torch

from amp_track import checkpoint
from amp_track.errors import BadInput


def test_what_is_saved_is_loaded(clean_folder: Path) -> None:
    file = clean_folder / "a.pt"
    checkpoint.save({"weights": torch.arange(3.0), "counts": [(1, 2.0)], "best": None}, file)
    state = checkpoint.load(file)
    assert state["weights"].tolist() == [0, 1, 2]
    assert (state["counts"], state["best"]) == ([(1, 2.0)], None)
    assert [path.name for path in clean_folder.iterdir()] == ["a.pt"], "no temporary file is left"


def test_a_file_that_is_not_whole_is_refused(clean_folder: Path) -> None:
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
    torch.save({"format": 1, "weights": Harmful()}, file)
    with pytest.raises(BadInput, match="cannot be read"):
        checkpoint.load(file)
    assert not Path("harm").exists()


def test_another_format_is_refused(clean_folder: Path) -> None:
    file = clean_folder / "a.pt"
    torch.save({"format": 2}, file)
    with pytest.raises(BadInput, match="got a checkpoint of format 2, expected 1"):
        checkpoint.load(file)
