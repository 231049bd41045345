"""ResNet-50 as the experiments use it: its weights, a frozen backbone, and what it takes for an image."""

from __future__ import annotations

from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import ResNet50_Weights
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.transforms import v2

from amp_track import BadInput, BadOption

IMAGENET = ResNet50_Weights.IMAGENET1K_V1
SMALLEST_IMAGE = 32
"""Pixels on a side: below, nothing is left to see after five halvings."""
_HEAD = ("fc.weight", "fc.bias")
_BLOCKS = [3, 4, 6, 3]
"""Of ResNet-50: table 1 of He et al., Deep Residual Learning for Image Recognition, 2015."""


class FrozenResNet(ResNet):  # type: ignore[misc] # torchvision has no types
    """A ResNet of which only `fc` is trained. The other layers hold still, their batch-norm statistics included, and
    keep no graph: activations are freed as the forward pass goes."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.requires_grad_(False)
        self.fc.requires_grad_(True)

    def train(self, mode: bool = True) -> FrozenResNet:
        super().train(mode)
        for layer in self._backbone():
            layer.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, classes) of images (N, 3, height, width)."""
        with torch.no_grad():
            features = images
            for layer in self._backbone():
                features = layer(features)
        logits: Tensor = self.fc(features.flatten(1))
        return logits

    def _backbone(self) -> list[nn.Module]:
        """All layers but `fc`, which torchvision keeps in the order of the forward pass."""
        return [layer for name, layer in self.named_children() if name != "fc"]


def resnet50(classes: int, weights: str, *, frozen: bool = False) -> nn.Module:
    """torchvision's ResNet-50 with a head `fc` for so many classes.

    Args:
        weights: `imagenet` (from torch.hub's cache, fetched if it is not there), `none` (random ones), or a file with a
            state dict. Its head is loaded too if it is for as many classes; else the head's weights are random.
        frozen: train the head alone.

    Raises:
        BadInput: the weights cannot be fetched, read, or are those of another model.
    """
    model = (FrozenResNet if frozen else ResNet)(Bottleneck, _BLOCKS, num_classes=classes)
    if weights != "none":
        _load(model, _imagenet_weights() if weights == "imagenet" else _weights_in(Path(weights).expanduser()), weights)
    return model


def evaluation_transform(image_size: int) -> v2.Compose:
    """From a PIL image to a tensor (3, image_size, image_size): resized without keeping its aspect, normalised."""
    return v2.Compose([v2.Resize((image_size, image_size)), normalised_tensor()])


def normalised_tensor() -> v2.Compose:
    """From a PIL image in RGB to a float32 tensor (3, height, width) with ImageNet's mean and deviation taken out."""
    preset = IMAGENET.transforms()
    return v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(preset.mean, preset.std)])


def example(batch_size: int, image_size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Random images (N, 3, image_size, image_size) as if normalised, and class numbers (N,)."""
    return torch.randn(batch_size, 3, image_size, image_size), torch.randint(classes, (batch_size,))


def check_image_size(image_size: int) -> None:
    """Raise `BadInput` for one that ResNet-50 cannot use."""
    if image_size < SMALLEST_IMAGE:
        raise BadOption("image_size", f"got {image_size}, expected {SMALLEST_IMAGE} pixels or more")


def _imagenet_weights() -> Any:
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    file = IMAGENET.url.rpartition("/")[2]
    try:
        return IMAGENET.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except (OSError, HTTPException) as error:
        got = f"no {file} in {folder}, and {_first_line(error)} when fetching it"
    except Exception as error:  # a download that is not what it should be, or a damaged file
        got = f"{_first_line(error)} for {file} in {folder}"
    raise BadInput(
        f"--set weights=imagenet: got {got}, expected ImageNet's weights there; put the file from {IMAGENET.url} "
        "there, or use --set weights=none, or --set weights=FILE with a state dict saved by torch.save"
    )


def _weights_in(file: Path) -> Any:
    if not file.is_file():
        raise BadOption("weights", f"got {file}, which is no file, expected imagenet, none or a file; {_HINT}")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each have their own
        raise BadOption(
            "weights",
            f"got {file}, which torch.load(weights_only=True) cannot read ({_first_line(error)}), "
            f"expected a state dict; {_HINT}",
        ) from error


def _load(model: nn.Module, state: Any, weights: str) -> None:
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BadOption("weights", f"got {weights}, which holds no state dict, expected one of tensors; {_HINT}")
    own = model.state_dict()
    if any(name not in state or state[name].shape != own[name].shape for name in _HEAD):
        state = {name: value for name, value in state.items() if name not in _HEAD}
    try:
        keys = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # the same names with other shapes
        raise _of_another_model(weights, str(error).splitlines()[-1].strip()) from error
    wrong = [*(name for name in keys.missing_keys if name not in _HEAD), *keys.unexpected_keys]
    if wrong:
        raise _of_another_model(weights, f"{len(wrong)} names differ, such as {wrong[0]}")


def _of_another_model(weights: str, difference: str) -> BadInput:
    return BadOption("weights", f"got {weights}, which is not of a ResNet-50 ({difference}); {_HINT}")


_HINT = "save one with torch.save(model.state_dict(), FILE) from torchvision's resnet50"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
