"""ResNet-50 for the experiments: its weights, a frozen backbone, and its image transforms."""

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
"""Side length in pixels: a smaller image is empty after five halvings."""
_HEAD = ("fc.weight", "fc.bias")
_BLOCKS = [3, 4, 6, 3]
"""Blocks of ResNet-50: table 1 of He et al., Deep Residual Learning for Image Recognition, 2015."""


class FrozenResNet(ResNet):  # type: ignore[misc] # torchvision has no types
    """A ResNet whose layers are frozen except `fc`, including batch-norm statistics.

    Frozen layers keep no graph: their activations are freed during the forward pass.
    """

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
        """Return logits (N, classes) of images (N, 3, height, width)."""
        with torch.no_grad():
            features = images
            for layer in self._backbone():
                features = layer(features)
        logits: Tensor = self.fc(features.flatten(1))
        return logits

    def _backbone(self) -> list[nn.Module]:
        """Return all layers but `fc`; torchvision defines them in the order of the forward pass."""
        return [layer for name, layer in self.named_children() if name != "fc"]


def resnet50(classes: int, weights: str, *, frozen: bool = False) -> nn.Module:
    """Return torchvision's ResNet-50 with a head `fc`.

    Args:
        classes: the number of classes.
        weights: `imagenet` (from torch.hub's cache, downloaded if missing), `none` (random), or a file with a state
            dict. Its head is also loaded if the number of classes matches; otherwise the head's weights are random.
        frozen: train only the head.

    Raises:
        BadInput: the weights cannot be downloaded or read, or are of another model.
    """
    model = (FrozenResNet if frozen else ResNet)(Bottleneck, _BLOCKS, num_classes=classes)
    if weights != "none":
        _load(model, _imagenet_weights() if weights == "imagenet" else _weights_in(Path(weights).expanduser()), weights)
    return model


def evaluation_transform(image_size: int) -> v2.Compose:
    """Return a transform from a PIL image to a tensor (3, image_size, image_size): resized to a square, normalised."""
    return v2.Compose([v2.Resize((image_size, image_size)), normalised_tensor()])


def normalised_tensor() -> v2.Compose:
    """Return a transform from an RGB PIL image to a float32 tensor (3, height, width), normalised as for ImageNet."""
    preset = IMAGENET.transforms()
    return v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(preset.mean, preset.std)])


def example(batch_size: int, image_size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random normalised images (N, 3, image_size, image_size) and class numbers (N,)."""
    return torch.randn(batch_size, 3, image_size, image_size), torch.randint(classes, (batch_size,))


def check_image_size(image_size: int) -> None:
    """Raise `BadInput` if the images are too small for ResNet-50."""
    if image_size < SMALLEST_IMAGE:
        raise BadOption("image_size", f"got {image_size}, expected {SMALLEST_IMAGE} pixels or more")


def _imagenet_weights() -> Any:
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    file = IMAGENET.url.rpartition("/")[2]
    try:
        return IMAGENET.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except (OSError, HTTPException) as error:
        problem = f"{file} is not in {folder}, and its download failed ({_first_line(error)})"
    except Exception as error:  # a wrong or damaged file
        problem = f"{file} in {folder} cannot be read ({_first_line(error)})"
    raise BadInput(
        f"--set weights=imagenet: {problem}. Put the file from {IMAGENET.url} there, or use --set weights=none, or "
        "--set weights=FILE with a state dict saved by torch.save."
    )


def _weights_in(file: Path) -> Any:
    if not file.is_file():
        raise BadOption("weights", f"got {file}, expected imagenet, none or an existing file. {_HINT}")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch each have their own
        raise BadOption(
            "weights",
            f"torch.load(weights_only=True) cannot read {file} ({_first_line(error)}). {_HINT}",
        ) from error


def _load(model: nn.Module, state: Any, weights: str) -> None:
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BadOption("weights", f"{weights} contains no state dict of tensors. {_HINT}")
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
    return BadOption("weights", f"{weights} is not a state dict of a ResNet-50 ({difference}). {_HINT}")


_HINT = "Save one with torch.save(model.state_dict(), FILE) from torchvision's resnet50."


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
