"""CIFAR-10 from real pickles in its format, small ones; and what a user meets where it is missing."""

import functools
import math
import pickle
import tarfile
import urllib.request
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy
import pytest
import torch
from image_trees import CIFAR10, job_of, job_result_in
from torch import nn
from torchvision import datasets
from torchvision.datasets.utils import calculate_md5

from amp_track import BadInput
from amp_track.config.job import Job
from amp_track.records.result import JobStatus
from amp_track.runner.runner import JobRunner
from amp_track.targets.workload import load_workload

IN_A_FILE = 4
TRAINING = 5 * IN_A_FILE


def write_cifar10(root: Path) -> Path:
    """The python version's files, with four images each. Every pixel of training image n is n."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for number, name in enumerate(names):
        first = number * IN_A_FILE
        batch = {
            "batch_label": name,
            "labels": [index % 10 for index in range(first, first + IN_A_FILE)],
            "data": numpy.repeat(
                numpy.arange(first, first + IN_A_FILE, dtype=numpy.uint8)[:, None], 3 * 32 * 32, axis=1
            ),
            "filenames": [f"{index}.png" for index in range(first, first + IN_A_FILE)],
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {"num_cases_per_batch": IN_A_FILE, "num_vis": 3072, "label_names": [f"class {n}" for n in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cifar10(tmp_path_factory.mktemp("cifar"))


def cifar10(**options: object):
    return load_workload(CIFAR10, [(name, str(value)) for name, value in options.items()])


def test_the_first_samples_are_taken_resized_and_normalised(data: Path) -> None:
    workload = cifar10(data_dir=data, checksum=False, samples=7, image_size=40)
    training, evaluation = workload.train_data(), workload.eval_data()
    assert (len(training), len(evaluation)) == (7, 4)
    assert len(training.data) == 7, "the others' memory is freed"
    image, label = training[6]
    assert (image.shape, image.dtype, label) == ((3, 40, 40), torch.float32, 6)
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(image, ((6 / 255 - mean) / deviation)[:, None, None].expand(3, 40, 40), atol=1e-6)
    assert evaluation[0][1] == TRAINING % 10


@pytest.mark.nightly
def test_model_and_optimizer_are_the_write_ups() -> None:
    workload = cifar10()
    with torch.device("meta"):  # counting needs no weights
        model = workload.model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032 - 990 * 2049
    optimizer = workload.optimizer([nn.Parameter(torch.zeros(1))], workload.learning_rate)
    settings = optimizer.param_groups[0]
    assert (settings["lr"], settings["momentum"], settings["fused"]) == (0.01, 0.9, True)
    assert (workload.batch_size, workload.epochs, workload.samples, workload.image_size) == (64, 5, 1000, 224)
    assert [tuple(part.shape) for part in workload.example(2)] == [(2, 3, 224, 224), (2,)]


@pytest.mark.parametrize("samples", [0, TRAINING + 1])
def test_samples_there_are_not_are_rejected(data: Path, samples: int) -> None:
    workload = cifar10(data_dir=data, checksum=False, samples=samples)
    with pytest.raises(BadInput, match=f"--set samples: got {samples}, expected 1 to 20, the number of"):
        workload.train_data()


def test_files_that_are_not_the_original_are_rejected_and_kept(data: Path) -> None:
    workload = cifar10(data_dir=data, samples=7)
    with pytest.raises(BadInput, match=r"is incomplete or damaged.*--set checksum=false"):
        workload.train_data()
    assert len(list((data / "cifar-10-batches-py").iterdir())) == 7


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"\x80\2")])
def test_incomplete_and_damaged_files_are_rejected(tmp_path: Path, damage) -> None:
    damage(write_cifar10(tmp_path) / "cifar-10-batches-py" / "data_batch_3")
    with pytest.raises(BadInput, match="is incomplete or damaged"):
        cifar10(data_dir=tmp_path, checksum=False, samples=7).train_data()


@pytest.mark.parametrize(
    ("folder", "download", "why"),
    [
        ("deep/data", True, "fetching it: URLError"),
        ("here", True, "fetching it"),
        ("here", False, "--set download=false"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_data_that_cannot_be_fetched_leaves_nothing_behind(
    tmp_path: Path, folder: str, download: bool, why: str
) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(BadInput, match=f"{folder} contains no cifar-10-batches-py .{why}.*www.cs.toronto.edu/~kriz"):
        cifar10(data_dir=tmp_path / folder, download=download).train_data()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["here"]


@pytest.fixture
def archive(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What torchvision fetches: a real archive on a real server, with its own checksums."""
    folder = data / "cifar-10-batches-py"
    file = tmp_path / "server" / "cifar-10-python.tar.gz"
    file.parent.mkdir()
    with tarfile.open(file, "w:gz") as content:
        content.add(folder, folder.name)

    def with_checksums(files: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(name, calculate_md5(folder / name)) for name, _ in files]

    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(file.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(datasets.CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/{file.name}")
        monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", calculate_md5(file))
        for name in ("train_list", "test_list"):
            monkeypatch.setattr(datasets.CIFAR10, name, with_checksums(getattr(datasets.CIFAR10, name)))
        meta = datasets.CIFAR10.meta | {"md5": calculate_md5(folder / "batches.meta")}
        monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers the proxies
        yield file
        server.shutdown()


def test_missing_data_is_fetched(archive: Path, tmp_path: Path) -> None:
    workload = cifar10(data_dir=tmp_path / "data", samples=7)
    assert (len(workload.train_data()), len(workload.eval_data())) == (7, 4)


def test_a_damaged_download_is_rejected_and_removed(archive: Path, tmp_path: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-10])
    with pytest.raises(BadInput, match="fetching it: RuntimeError: File not found or corrupted"):
        cifar10(data_dir=tmp_path / "deep" / "data").train_data()
    assert not (tmp_path / "deep").exists()


@pytest.mark.nightly
def test_synthetic_needs_no_data(runner: JobRunner) -> None:
    options = {"image_size": 32, "weights": "nowhere.pt"}
    job_result = job_result_in(runner, job_of(runner, CIFAR10, options, synthetic=True), "fp32")
    assert (job_result.status, job_result.steps, job_result.metric) == (JobStatus.FITS, 2, None)


@pytest.mark.parametrize(("option", "value"), [("image_size", 16), ("weights", "nowhere.pt")])
def test_what_the_model_needs_is_checked(option: str, value: object) -> None:
    with pytest.raises(BadInput, match=f"--set {option}: got {value}"):
        cifar10(**{option: value}).check()


@pytest.fixture(scope="module")
def job(runner: JobRunner, data: Path) -> Job:
    return job_of(runner, CIFAR10, {"data_dir": data, "checksum": False, "samples": 8, "image_size": 32})


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "amp", "bf16"])
def test_it_trains_in_every_precision(runner: JobRunner, job: Job, precision: str) -> None:
    job_result = job_result_in(runner, job, precision)
    assert job_result.status is JobStatus.FITS, job_result.traceback
    assert job_result.steps == 2
    assert math.isfinite(job_result.train_loss)
    assert job_result.metric is not None
