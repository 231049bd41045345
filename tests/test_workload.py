import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import DIGITS, FAULTS, OUR_FRAMES, ROOT, WORKLOADS

from amp_track.records.errors import BadInput
from amp_track.targets import source
from amp_track.targets.workload import load_workload, option_choices, option_values, source_files


def test_options_have_their_fields_types() -> None:
    workload = load_workload(DIGITS, [("width", "32")])
    assert workload.width == 32  # type: ignore[attr-defined]
    assert option_values(workload) == (("width", "32"),)


def test_options_of_every_type_read_back_from_the_text_that_a_job_has() -> None:
    tiny = str(WORKLOADS / "tiny.py")
    for changes in ([], [("label", "None"), ("limit", "None"), ("depth", "2"), ("bias", "no"), ("factor", "1e3")]):
        values = option_values(load_workload(tiny, changes))
        assert option_values(load_workload(tiny, values)) == values
    assert dict(values)["label"] == "None"
    with pytest.raises(BadInput, match="--set sizes: got '3', expected tuple"):
        load_workload(tiny, [("sizes", "3")])


def test_choices_are_those_of_options_that_list_their_values() -> None:
    assert option_choices(load_workload(str(ROOT / "experiments" / "cifar10.py"))) == (
        ("download", ("False", "True")),
        ("checksum", ("False", "True")),
    )
    assert option_choices(load_workload(str(ROOT / "experiments" / "caltech256.py"), [("weights", "none")])) == (
        ("finetune", ("head", "all")),
        ("bad_images", ("refuse", "skip")),
    )
    assert option_choices(load_workload(DIGITS)) == ()


def test_a_listed_number_is_read_from_its_text(tmp_path: Path) -> None:
    (tmp_path / "layered.py").write_text(
        """
from dataclasses import dataclass
from typing import Literal
from amp_track import Workload

@dataclass(frozen=True)
class Layered(Workload):
    depth: Literal[18, 50] = 18

    def model(self):
        return None

    train_data = eval_data = model
"""
    )
    workload = load_workload("layered.py", [("depth", "50")])
    assert workload.depth == 50  # type: ignore[attr-defined]
    assert option_choices(workload) == (("depth", ("18", "50")),)
    with pytest.raises(BadInput, match="--set depth: got '51', expected"):
        load_workload("layered.py", [("depth", "51")])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("empty.py", r"defines no subclass of Workload"),
        ("two.py", r"defines 2 subclasses of Workload \(One, Two\)"),
        ("broken.py", "its import raised ModuleNotFoundError: No module named 'no_such_package_anywhere'"),
        ("missing.py", "file not found"),
    ],
)
def test_files_without_a_workload_are_rejected(file: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_workload(str(WORKLOADS / file))


def test_a_script_is_offered_to_max_batch_and_init_names_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('trains')\n")
    with pytest.raises(BadInput) as raised:
        load_workload("train.py")
    assert str(raised.value) == (
        "train.py: the file defines no subclass of Workload. Pass a script to max-batch as it is (amp-track max-batch "
        "-- python train.py --batch-size {batch_size}), write a Workload to start from (amp-track init mine.py), or "
        "plan a model with amp_track.estimate(model, example, optimizer), or by name: timm:NAME, torchvision:NAME, "
        "transformers:CONFIG.json."
    )


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "torch.nn:Linear",
            "torch.nn:Linear: a torch.nn.Module, not a Workload. Plan it with amp_track.estimate(model, example, "
            "optimizer), or pass a function that trains it to max-batch, as module:function.",
        ),
        (
            "lightning.pytorch:LightningModule",
            "lightning.pytorch:LightningModule: a LightningModule, not a Workload. Plan it with amp_track.estimate("
            "model, example, optimizer), or pass it to amp_track.integrations.lightning.max_batch, or amp-track "
            "max-batch amp_track.integrations.lightning:fit --set module=lightning.pytorch:LightningModule --set "
            "data=MODULE:DATA.",
        ),
    ],
)
def test_a_model_in_place_of_a_workload_has_other_ways(reference: str, message: str) -> None:
    with pytest.raises(BadInput) as raised:
        load_workload(reference)
    assert str(raised.value) == message


def test_an_unknown_library_of_models_is_named_beside_those_that_are_known() -> None:
    with pytest.raises(BadInput) as raised:
        load_workload("hf:bert")
    assert str(raised.value) == (
        "hf:bert: no module hf is in this folder or installed. Models by name are timm:NAME, torchvision:NAME, "
        "transformers:CONFIG.json."
    )


def test_a_broken_file_shows_its_own_traceback_only() -> None:
    with pytest.raises(BadInput) as raised:
        load_workload(str(WORKLOADS / "broken.py"))
    assert "import no_such_package_anywhere" in raised.value.detail
    assert OUR_FRAMES not in raised.value.detail
    assert "importlib" not in raised.value.detail


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("depth", "3"), r"--set depth: got '3', expected an option of .*digits.py \(width\)"),
        (("width", "wide"), "--set width: got 'wide', expected int"),
        (("learning_rate", "1"), "use --lr"),
    ],
)
def test_bad_options_are_named(option: tuple[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_workload(DIGITS, [option])


def test_a_class_in_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WORKLOADS)
    assert type(load_workload("faults:Faults")).__name__ == "Faults"
    with pytest.raises(BadInput, match="has no Workload or function named Nothing"):
        load_workload("faults:Nothing")


@given(st.integers(1, 200))
def test_the_default_example_has_the_shapes_of_a_batch(size: int) -> None:
    inputs, targets = load_workload(FAULTS).example(size)
    assert inputs.shape == (size, 8)
    assert targets.shape == (size, 1)


def test_digits_are_real_and_split_by_class() -> None:
    workload = load_workload(DIGITS)
    train, evaluation = workload.train_data(), workload.eval_data()
    assert (len(train), len(evaluation)) == (1437, 360)  # type: ignore[arg-type]
    digits = torch.stack([target for _, target in evaluation])  # type: ignore[attr-defined]
    assert digits.bincount().min() >= 34
    assert train[0][0].shape == (1, 16, 16)


def test_scores_default_to_the_top_class() -> None:
    workload = load_workload(DIGITS)
    output = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    assert workload.score(output, torch.tensor([1, 1])).tolist() == [1.0, 0.0]


def test_the_digest_is_of_the_workload_and_of_what_it_imports_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper_of_digest.py").write_text("WIDTH = 1")
    file = tmp_path / "wide.py"
    file.write_text(Path(FAULTS).read_text() + "\nimport helper_of_digest\n")
    monkeypatch.setattr(sys, "path", list(sys.path))

    def digest(name: str = str(file)) -> str | None:
        for module in ("amp_track_workload_wide", "helper_of_digest"):  # as a new process would know neither
            sys.modules.pop(module, None)
        return source.digest(*source_files(name, load_workload(name)))

    digests = [digest()]
    (tmp_path / "helper_of_digest.py").write_text("WIDTH = 2")
    digests.append(digest())
    (tmp_path / "unrelated.py").write_text("")
    digests.append(digest())
    assert digests[0] != digests[1] == digests[2]
    (tmp_path / "below").mkdir()
    for folder, name in ((tmp_path, "wide.py"), (tmp_path / "below", "../wide.py")):
        monkeypatch.chdir(folder)
        digests.append(digest(name))
    assert digests[2:] == digests[2:3] * 3, "however it is named"


@pytest.mark.nightly
def test_the_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    file = str(shutil.copy(FAULTS, tmp_path / "alone.py"))  # beside files that this process has not imported
    program = (
        "import sys; from amp_track.targets.workload import load_workload, source_files; "
        "print(*source_files(sys.argv[1], load_workload(sys.argv[1])))"
    )
    other = subprocess.check_output([sys.executable, "-c", program, file], text=True)
    assert source_files(file, load_workload(file)) == (Path(file), ())
    assert other.strip() == f"{file} ()"
