"""ResNet-50 transfer learning on Caltech-256, after a public article on mixed precision.

The article's claims, for 10 epochs on a GPU with 6 GB:

* 26,081,576 parameters, 524,544 of them trainable: torchvision's ResNet-50 with its 1,000-class `fc` (25,557,032), plus
  a Linear(2048, 256). Here the head replaces `fc`: 24,032,576 parameters, with the same 524,544 trainable.
* fp32 at batch 256 fits in about 3.9 GB. At 512 it runs out of memory when allocating 1.53 GiB, the size of its largest
  feature maps: the first convolution's, 512 × 64 × 112 × 112 × 4 bytes, or those of the first blocks, 512 × 256 × 56 ×
  56 × 4. amp at 512 fits in about 4 GB.
* fp32 takes 68.05 minutes and reaches 80.86 %, amp takes 61.67 minutes and reaches 83.11 %.

The article's mistakes, corrected here: a new GradScaler every epoch (here one for the training), losses divided by the
wrong count (here means over samples), no seed (of the split, the weights, the order and the augmentation), and images
that are not normalised as the pretrained backbone expects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from amp_track import BadInput, BadOption, Workload
from image_folder import ImageIndex, LabelledImages, OnBadImages, default_num_workers, open_index, stratified_split
from resnet50 import check_image_size, evaluation_transform, example, normalised_tensor, resnet50

CLASSES = 256
CLUTTER = "257.clutter"
FOLDER = "256_ObjectCategories"
SOURCE = "https://data.caltech.edu/records/nyy15-4j048"

SHIFT, SCALE, DEGREES = 0.3, 0.3, 15.0
"""The article's ShiftScaleRotate: fractions of the image's sides, fraction of its size, and degrees, both ±."""


@dataclass(frozen=True)
class Caltech256(Workload):
    """ResNet-50 with a new head on the 29,780 images of Caltech-256's 256 classes: nine tenths to train on."""

    data_dir: str = f"data/{FOLDER}"
    """The folder 256_ObjectCategories, with its NNN.name/*.jpg, or its parent folder."""
    weights: str = "imagenet"
    """imagenet, none, or a file with a state dict."""
    finetune: Literal["head", "all"] = "head"
    """The layers to train: only the head, with all others frozen, or all."""
    image_size: int = 224
    """Side length in pixels."""
    bad_images: OnBadImages = "refuse"
    """Files that cannot be decoded, and classes without images: refuse stops with an error, skip leaves them out."""
    split_seed: int = 0
    """Selects the tenth of the images to evaluate on."""

    learning_rate: float = 1e-4
    batch_size: int = 256
    epochs: int = 10
    num_workers: int = default_num_workers()

    def model(self) -> nn.Module:
        return resnet50(CLASSES, self.weights, frozen=self.finetune == "head")

    def optimizer(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return super().optimizer((parameter for parameter in parameters if parameter.requires_grad), lr)

    def train_data(self) -> LabelledImages:
        index = self._index()
        training, _ = stratified_split(index.images, seed=self.split_seed)
        return LabelledImages(index.root, training, training_transform(self.image_size))

    def eval_data(self) -> LabelledImages:
        index = self._index()
        _, evaluation = stratified_split(index.images, seed=self.split_seed)
        return LabelledImages(index.root, evaluation, evaluation_transform(self.image_size))

    def example(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return example(batch_size, self.image_size, CLASSES)

    def without_data(self) -> Caltech256:
        """Return the workload without images and pretrained weights."""
        return dataclasses.replace(self, data_dir="", weights="none")

    def check(self) -> None:
        """Check the image folder, then the weights, then every image: the cheapest check first."""
        check_image_size(self.image_size)
        if not 0 <= self.split_seed < 2**32:
            raise BadOption("split_seed", f"got {self.split_seed}, expected a whole number from 0 to 4,294,967,295")
        if self.data_dir:
            self._folder()
        if self.weights != "none":
            self.model()
        if self.data_dir:
            self._index().report_bad_images()

    def _index(self) -> ImageIndex:
        """Return the index. Raises BadInput if there are no images, or bad ones with bad_images=refuse."""
        index = open_index(self._folder(), leave_out=[CLUTTER])
        if len(index.classes) > CLASSES:
            raise BadInput(
                f"{index.root}: contains {len(index.classes)} class folders; at most {CLASSES} are supported."
            )
        if self.bad_images == "refuse":
            index.reject_bad_images()
        if not index.images:
            raise BadInput(f"{index.root}: contains no images that can be decoded. {_HINT}")
        return index

    def _folder(self) -> Path:
        given = Path(self.data_dir).expanduser()
        for folder in (given / FOLDER, given):
            if next(folder.glob("[0-9][0-9][0-9].*/"), None) is not None:
                return folder
        missing = f"contains no {FOLDER} with NNN.name/*.jpg" if given.is_dir() else "is not a folder"
        raise BadOption("data_dir", f"{given} {missing}. {_HINT}")


_HINT = f"Download Caltech-256 from {SOURCE} and unpack it there."


def training_transform(image_size: int) -> v2.Compose:
    """Return the article's augmentation, with normalisation: from a PIL image to (3, image_size, image_size)."""
    return v2.Compose(
        [
            v2.Resize((image_size, image_size)),
            v2.RandomHorizontalFlip(0.5),
            v2.RandomApply([shift_scale_rotate(image_size)], 0.5),
            normalised_tensor(),
        ]
    )


def shift_scale_rotate(image_size: int) -> v2.Compose:
    """Return albumentations' ShiftScaleRotate(0.3, 0.3, 15) of a square image, always applied.

    Each parameter is drawn uniformly from its range. The image is rotated and scaled about its center, then shifted;
    the border is its mirror image. Two differences: shifts are integer pixels, and PIL's bilinear resize before it is
    anti-aliased, unlike OpenCV's.
    """
    # torchvision's affine fills only with a colour. So the image is first padded with its mirror image, as far as the
    # largest shift at the smallest scale and largest angle reaches (0.9 of its side).
    angle = math.radians(DEGREES)
    reach = (1 + 2 * SHIFT) * (math.cos(angle) + math.sin(angle)) / (1 - SCALE)
    padding = math.ceil(image_size / 2 * (reach - 1))
    shift = SHIFT * image_size / (image_size + 2 * padding)  # torchvision's is a fraction of the padded side
    return v2.Compose(
        [
            v2.Pad(padding, padding_mode="reflect"),
            v2.RandomAffine(
                DEGREES,
                translate=(shift, shift),
                scale=(1 - SCALE, 1 + SCALE),
                interpolation=v2.InterpolationMode.BILINEAR,
            ),
            v2.CenterCrop(image_size),
        ]
    )
