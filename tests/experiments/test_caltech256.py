"""Caltech-256: its data, its model, its augmentation; and what a user meets where something is missing."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from image_trees import CALTECH256, job_of, job_result_in, write_odd_tree, write_tree
from support import Done
from torch import nn
from torchvision import models

from amp_track import BadInput
from amp_track.config.job import Job
from amp_track.records.result import JobStatus
from amp_track.runner.runner import JobRunner
from amp_track.targets.workload import load_workload
from resnet50 import IMAGENET, FrozenResNet, resnet50

TREE = {"001.ak47": 5, "002.american-flag": 5, "003.backpack": 2, "257.clutter": 3}
Command = Callable[..., Done]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("data") / "256_ObjectCategories", TREE)


@pytest.fixture(scope="module")
def state_dict() -> dict[str, torch.Tensor]:
    """Of torchvision's own model, as ImageNet's weights are."""
    torch.manual_seed(0)
    return models.resnet50(weights=None).state_dict()


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> Path:
    """torch.hub's cache, empty, where nothing can be fetched."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def parameters_of(model: nn.Module, *, trainable: bool = False) -> int:
    return sum(item.numel() for item in model.parameters() if item.requires_grad or not trainable)


# The article's numbers


def test_parameters_are_those_of_the_write_up() -> None:
    with torch.device("meta"):  # counting needs no weights
        model = load_workload(CALTECH256, [("weights", "none")]).model()
        as_written = parameters_of(models.resnet50(weights=None)) + parameters_of(nn.Linear(2048, 256))
    assert as_written == 26_081_576
    assert parameters_of(model, trainable=True) == 524_544
    assert parameters_of(model) == as_written - parameters_of(nn.Linear(2048, 1000))
    everything = load_workload(CALTECH256, [("weights", "none"), ("finetune", "all")]).model()
    assert parameters_of(everything, trainable=True) == parameters_of(everything) == 24_032_576


def test_the_write_ups_gpu_ran_out_of_memory_with_one_of_the_largest_maps() -> None:
    with torch.device("meta"):
        model = models.resnet50(weights=None)
        sizes = {}
        for name, module in model.named_modules():
            module.register_forward_hook(lambda _, args, output, name=name: sizes.update({name: output.nbytes}))
        model(torch.empty(512, 3, 224, 224))
    assert f"{max(sizes.values()) / 2**30:.2f} GiB" == "1.53 GiB"
    assert {"conv1", "layer1.0"} <= {name for name, size in sizes.items() if size == max(sizes.values())}


# The model


def test_a_frozen_backbone_holds_still(tree: Path) -> None:
    workload = load_workload(CALTECH256, [("weights", "none"), ("image_size", "32")])
    model = workload.model()
    optimizer = workload.optimizer(model.parameters(), 1e-2)
    assert [parameter.shape for group in optimizer.param_groups for parameter in group["params"]] == [
        (256, 2048), (256,),
    ]  # fmt: skip
    assert optimizer.defaults["fused"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, targets = workload.example(4)
    assert (inputs.shape, targets.shape, targets.dtype) == ((4, 3, 32, 32), (4,), torch.long)
    features: list[torch.Tensor] = []
    model.avgpool.register_forward_hook(lambda module, args, output: features.append(output))
    model.train()
    workload.loss(model(inputs), targets).backward()
    optimizer.step()
    assert model.fc.training and not model.layer4[0].bn1.training
    assert not features[0].requires_grad
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["fc.weight", "fc.bias"]


def test_a_frozen_model_computes_what_torchvisions_does(state_dict: dict[str, torch.Tensor]) -> None:
    with torch.device("meta"):
        theirs = models.resnet50(weights=None)
        ours = FrozenResNet(models.resnet.Bottleneck, [3, 4, 6, 3])
    theirs.load_state_dict(state_dict, assign=True)
    ours.load_state_dict(state_dict, assign=True)
    images = torch.rand(2, 3, 64, 64)
    assert torch.equal(ours.train()(images), theirs.eval()(images))


# Its weights


def test_imagenets_weights_come_from_torch_hubs_cache(hub_cache: Path, state_dict: dict[str, torch.Tensor]) -> None:
    torch.save(state_dict, hub_cache / IMAGENET.url.rpartition("/")[2])
    model = load_workload(CALTECH256).model()
    assert torch.equal(model.conv1.weight, state_dict["conv1.weight"])
    assert model.fc.weight.shape == (256, 2048)


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "is not in .* .URLError"), ("not found", "in .* cannot be read .UnpicklingError")]
)
def test_weights_that_torch_hub_does_not_have_are_rejected(hub_cache: Path, content: str | None, problem: str) -> None:
    if content is not None:
        (hub_cache / IMAGENET.url.rpartition("/")[2]).write_text(content)
    with pytest.raises(BadInput, match=rf"resnet50-0676ba61.pth {problem}.*--set weights=none") as rejected:
        load_workload(CALTECH256, [("data_dir", "")]).check()
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize("classes", [256, 1000])
def test_a_file_gives_its_head_too_if_it_matches(
    tmp_path: Path, state_dict: dict[str, torch.Tensor], classes: int
) -> None:
    saved = state_dict | {"fc.weight": torch.randn(classes, 2048), "fc.bias": torch.randn(classes)}
    torch.save(saved, tmp_path / "weights.pt")
    loaded = resnet50(256, str(tmp_path / "weights.pt"), frozen=True).state_dict()
    assert torch.equal(loaded["layer4.2.conv3.weight"], saved["layer4.2.conv3.weight"])
    assert (classes == 256) == torch.equal(loaded["fc.weight"][:, 0], saved["fc.weight"][:256, 0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: None, "expected imagenet, none or an existing file"),
        (lambda file: file.mkdir(), "expected imagenet, none or an existing file"),
        (lambda file: file.write_text("not found"), r"torch.load\(weights_only=True\) cannot read"),
        (lambda file: file.touch(), r"torch.load\(weights_only=True\) cannot read"),
        (lambda file: torch.save(nn.Linear(1, 1), file), r"torch.load\(weights_only=True\) cannot read"),
        (lambda file: torch.save(torch.zeros(3), file), "contains no state dict"),
        (lambda file: torch.save({"model": {}}, file), "contains no state dict"),
        (lambda file: torch.save(nn.Linear(1, 1).state_dict(), file), "is not a state dict of a ResNet-50"),
        (
            lambda file: torch.save({"conv1.weight": torch.zeros(64, 3, 7, 7)}, file),
            "is not a state dict of a ResNet-50",
        ),
        (
            lambda file: torch.save(models.resnet50().state_dict() | {"conv1.weight": torch.zeros(9, 3, 7, 7)}, file),
            "size mismatch for",
        ),
    ],
)
def test_files_without_its_weights_are_rejected(tmp_path: Path, make, message: str) -> None:
    make(tmp_path / "weights.pt")
    with pytest.raises(BadInput, match=message) as rejected:
        load_workload(CALTECH256, [("weights", "weights.pt"), ("data_dir", "")]).check()
    assert "\n" not in str(rejected.value)
    assert "weights.pt" in str(rejected.value)


# The data


@pytest.mark.parametrize("given", ["itself", "its parent"])
def test_the_split_leaves_clutter_out(tree: Path, given: str) -> None:
    folder = tree if given == "itself" else tree.parent
    workload = load_workload(CALTECH256, [("data_dir", str(folder)), ("image_size", "32")])
    training, evaluation = workload.train_data(), workload.eval_data()
    assert (len(training), len(evaluation)) == (9, 3)
    assert not set(training.images) & set(evaluation.images)
    assert {image.label for image in evaluation.images} <= {0, 1, 2}
    image, label = training[0]
    assert (image.shape, label) == ((3, 32, 32), training.images[0].label)
    other = load_workload(CALTECH256, [("data_dir", str(folder)), ("split_seed", "1")])
    assert set(other.eval_data().images) != set(evaluation.images)


def test_more_classes_than_the_head_has_are_rejected(tmp_path: Path) -> None:
    for number in range(1, 260):
        (tmp_path / f"{number:03}.x").mkdir()
    with pytest.raises(BadInput, match="contains 259 class folders; at most 256"):
        load_workload(CALTECH256, [("data_dir", str(tmp_path)), ("bad_images", "skip")]).train_data()


# What a user meets


def test_missing_images_are_exit_code_2_and_nothing_is_written(amp_track: Command, tmp_path: Path) -> None:
    done = amp_track("train", CALTECH256)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "--set data_dir: data/256_ObjectCategories is not a folder" in line
    assert "https://data.caltech.edu/records/nyy15-4j048" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_bad_images_are_exit_code_2_unless_skipped(
    amp_track: Command, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    odd = write_odd_tree(tmp_path_factory.mktemp("odd"))
    options = ["--set", f"data_dir={odd}", "--set", "weights=none", "--set", "image_size=32"]
    rejected = amp_track("train", CALTECH256, *options)
    assert rejected.returncode == 2, rejected.stderr
    (line,) = rejected.stderr.splitlines()
    assert "4 bad images (002.american-flag/text.jpg: not an image;" in line
    assert list(tmp_path.iterdir()) == []
    more = ["--set", "bad_images=skip", "--batch-size", "4", "--steps", "1", "--precision", "fp32", "--json"]
    # What a job process prints reaches a command that runs alone, not one within this process.
    command = [sys.executable, "-m", "amp_track", "train", CALTECH256, *options, *more]
    skipped = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert skipped.returncode == 0, skipped.stderr
    assert json.loads(skipped.stdout)["status"] == "fits"
    assert skipped.stderr.count("skipped 4 bad images") == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("image_size=31", "--set image_size: got 31, expected 32 pixels or more"),
        ("finetune=tail", "--set finetune: got 'tail', expected one of head, all"),
    ],
)
def test_bad_options_are_rejected(option: str, message: str) -> None:
    with pytest.raises(BadInput) as rejected:
        load_workload(CALTECH256, [tuple(option.split("="))]).check()
    assert message in str(rejected.value)


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_stores")
def test_synthetic_needs_neither_images_nor_weights(amp_track: Command) -> None:
    options = ["--synthetic", "--set", "image_size=32", "--precision", "bf16"]
    done = amp_track("train", CALTECH256, *options, "--batch-size", "8", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["status"], result["steps"], result["metric"]["value"]) == ("fits", 2, None)


# Training


@pytest.fixture(scope="module", params=["head", pytest.param("all", marks=pytest.mark.nightly)])
def job(request: pytest.FixtureRequest, runner: JobRunner, tree: Path) -> Job:
    options = {"data_dir": tree, "weights": "none", "image_size": 32, "finetune": request.param}
    return job_of(runner, CALTECH256, options)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "amp", "bf16"])
def test_it_trains_in_every_precision(runner: JobRunner, job: Job, precision: str) -> None:
    job_result = job_result_in(runner, job, precision)
    assert job_result.status is JobStatus.FITS, job_result.traceback
    assert job_result.steps == 2
    assert math.isfinite(job_result.train_loss)
    assert job_result.metric is not None


@pytest.mark.nightly
def test_a_frozen_backbone_can_be_diagnosed(runner: JobRunner, tree: Path) -> None:
    options = {"data_dir": tree, "weights": "none", "image_size": 32}
    job = job_of(runner, CALTECH256, options, steps=1, precision="fp32", grad_stats_every=1)
    diagnosis = runner.run(job).diagnosis
    assert diagnosis is not None
    has_gradients = {layer.layer: layer.has_gradients for layer in diagnosis.layers}
    assert [layer for layer, has in has_gradients.items() if has] == ["fc"]
    assert "layer4.2.conv3" in has_gradients, "its outputs are looked at"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "batch_size", "status", "gigabytes"),
    [("fp32", 256, JobStatus.FITS, 3.9), ("fp32", 512, JobStatus.OOM, None), ("amp", 512, JobStatus.FITS, 4.0)],
)
def test_the_write_ups_facts_within_six_gibibytes(
    runner: JobRunner, cuda: torch.device, precision: str, batch_size: int, status: JobStatus, gigabytes: float | None
) -> None:
    """Its memory as its GPU's kernels took it: another one's workspaces differ, so a third more or less is the same."""
    limits = {"synthetic": True, "device": "cuda", "memory_budget_bytes": 6 * 2**30}
    job = job_of(runner, CALTECH256, {}, batch_size=batch_size, steps=5, **limits)
    job_result = job_result_in(runner, job, precision)
    assert job_result.status is status, job_result.message
    if gigabytes is None:
        assert job_result.requested_bytes == pytest.approx(1.53 * 2**30, rel=0.01)
    else:
        assert job_result.peak_bytes == pytest.approx(gigabytes * 1e9, rel=1 / 3)
