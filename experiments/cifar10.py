"""ResNet-50 on a thousand images of CIFAR-10 at 224 × 224, after a public article on mixed precision.

The article's claims: amp trains 1.5 to 3 times as fast as fp32 and needs 20 to 40 % less memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tarfile import TarError
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10

from amp_track import BadInput, BadOption, Workload
from image_folder import default_num_workers
from resnet50 import check_image_size, evaluation_transform, example, resnet50

CLASSES = 10
SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True)
class Cifar10(Workload):
    """ResNet-50 on CIFAR-10's first 1,000 training images, evaluated on the first 1,000 of its test set."""

    data_dir: str = "data"
    """The folder that contains cifar-10-batches-py."""
    download: bool = True
    """Download CIFAR-10 (170 MB) if it is missing."""
    checksum: bool = True
    """Accept only the original files; False accepts any of the same format."""
    samples: int = 1000
    """Number of training images, and of test images (at most the test set)."""
    image_size: int = 224
    """Side length in pixels, to which the images are enlarged from 32."""
    weights: str = "none"
    """imagenet, none, or a file with a state dict."""

    learning_rate: float = 0.01
    batch_size: int = 64
    epochs: int = 5
    num_workers: int = default_num_workers()

    def model(self) -> nn.Module:
        return resnet50(CLASSES, self.weights)

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        parameters = list(parameters)
        fused = all(parameter.device.type in ("cpu", "cuda", "xpu", "mps") for parameter in parameters)
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=fused)

    def train_data(self) -> Dataset[Any]:
        data = self._part(train=True)
        if not 1 <= self.samples <= len(data.targets):
            raise BadOption(
                "samples", f"got {self.samples}, expected 1 to {len(data.targets):,}, the number of training images"
            )
        return self._first_samples(data)

    def eval_data(self) -> Dataset[Any]:
        return self._first_samples(self._part(train=False))

    def example(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return example(batch_size, self.image_size, CLASSES)

    def without_data(self) -> Cifar10:
        """Return the workload without pretrained weights."""
        return dataclasses.replace(self, weights="none")

    def check(self) -> None:
        check_image_size(self.image_size)
        if self.samples < 1:
            raise BadOption("samples", f"got {self.samples}, expected 1 or more")
        if self.weights != "none":
            self.model()

    def _part(self, *, train: bool) -> Any:
        """Return the training or test set, downloaded if it is missing.

        Raises:
            BadInput: it cannot be downloaded or read, or is not the original. Such files are not changed.
        """
        root = Path(self.data_dir).expanduser()
        if not (root / CIFAR10.base_folder).exists():
            if not self.download:
                raise _missing(root, "--set download=false")
            _fetch(root)
        kind = CIFAR10 if self.checksum else _AnyOfTheFormat
        try:
            return kind(root, train=train, transform=evaluation_transform(self.image_size))
        except (MemoryError, PermissionError):
            raise
        except Exception as error:  # torchvision's RuntimeError, or any exception of pickle
            otherwise = ", or accept other files with --set checksum=false" if self.checksum else ""
            raise BadOption(
                "data_dir",
                f"{root / CIFAR10.base_folder} is incomplete or damaged ({type(error).__name__}). Remove it to "
                f"download it again from {SOURCE}{otherwise}.",
            ) from error

    def _first_samples(self, data: Any) -> Dataset[Any]:
        """Return the first samples, copied, so that the memory of the others is freed."""
        data.data, data.targets = data.data[: self.samples].copy(), data.targets[: self.samples]
        found: Dataset[Any] = data
        return found


class _AnyOfTheFormat(CIFAR10):  # type: ignore[misc] # torchvision has no types
    """CIFAR-10 without checksums of its files."""

    train_list = [(file, None) for file, _ in CIFAR10.train_list]
    test_list = [(file, None) for file, _ in CIFAR10.test_list]
    meta = {**CIFAR10.meta, "md5": None}


def _fetch(root: Path) -> None:
    """Download CIFAR-10 atomically, in one process while others wait. Raises BadInput if it fails, and cleans up."""
    made = [path for path in (root, *root.parents) if not path.exists()]
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir()) / f"amp_track-cifar10-{name}.lock"):
        if (root / CIFAR10.base_folder).exists():
            return
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=".cifar10-") as folder:
                CIFAR10(folder, download=True)
                Path(folder, CIFAR10.base_folder).rename(root / CIFAR10.base_folder)
        except (OSError, HTTPException, RuntimeError, TarError) as error:
            for path in made:
                _remove_if_empty(path)
            raise _missing(root, f"fetching it: {type(error).__name__}: {error}") from error


def _missing(root: Path, why: str) -> BadInput:
    return BadOption(
        "data_dir",
        f"{root} contains no {CIFAR10.base_folder} ({why}). Download CIFAR-10's python version from {SOURCE} and "
        "unpack it there.",
    )


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        pass  # another process has put something into it
