"""The augmentation of Caltech-256: what happens to an image."""

import sys

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_trees import CALTECH256
from PIL import Image

from amp_track.targets.workload import load_workload
from resnet50 import IMAGENET, evaluation_transform

workload_module = sys.modules[type(load_workload(CALTECH256)).__module__]


def inverse_map(image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a moved `ramps()`: how the source's place (x, y) changes with the place in the image, (2, 2), and the source
    of its middle, in parts of the side from the middle."""
    places = torch.tensor(numpy.asarray(image), dtype=torch.float64)[..., :2] / 255
    middle, step = image.size[0] // 2, 10
    rows = places[middle - step : middle + step + 1, middle - step : middle + step + 1]
    across = (rows[:, -1] - rows[:, 0]).mean(0) / (2 * step)
    down = (rows[-1] - rows[0]).mean(0) / (2 * step)
    return torch.stack([across, down], dim=1) * image.size[0], rows.mean((0, 1)) - 0.5


def ramps(size: int) -> Image.Image:
    """Red says how far right, green how far down."""
    ramp = (torch.arange(size, dtype=torch.float64) + 0.5) / size * 255
    pixels = torch.stack([ramp.expand(size, size), ramp[:, None].expand(size, size), torch.zeros(size, size)], dim=-1)
    return Image.fromarray(pixels.round().to(torch.uint8).numpy())


@pytest.mark.nightly
def test_shifts_scales_and_angles_fill_their_ranges() -> None:
    torch.manual_seed(0)
    image = ramps(255)
    transform = workload_module.shift_scale_rotate(255)
    found = [inverse_map(transform(image)) for _ in range(150)]
    found = [(matrix, source) for matrix, source in found if source.abs().max() < 0.42]  # the middle is no mirror image
    assert len(found) > 100
    scales = torch.stack([1 / matrix.det().sqrt() for matrix, _ in found])
    angles = torch.stack([torch.atan2(matrix[1, 0] - matrix[0, 1], matrix.trace()).rad2deg() for matrix, _ in found])
    # The source of the middle is where the shift, turned and scaled back, came from.
    shifts = torch.stack([torch.linalg.solve(matrix, -source) for matrix, source in found])
    for values, low, high, tolerance in (
        (scales, 0.7, 1.3, 0.01),
        (angles, -15, 15, 0.5),
        (shifts[:, 0], -0.3, 0.3, 0.01),
        (shifts[:, 1], -0.3, 0.3, 0.01),
    ):
        reach = 0.05 * (high - low)
        assert low - tolerance <= values.min() <= low + reach + tolerance
        assert high + tolerance >= values.max() >= high - reach - tolerance
        assert values.median() == pytest.approx((low + high) / 2, abs=0.15 * (high - low))


@given(size=st.integers(32, 80), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_what_comes_into_sight_is_mirrored_not_black(size: int, seed: int) -> None:
    torch.manual_seed(seed)
    moved = workload_module.shift_scale_rotate(size)(Image.new("RGB", (size, size), (200, 10, 90)))
    assert moved.size == (size, size)
    assert moved.getextrema() == ((200, 200), (10, 10), (90, 90))


def test_half_of_the_images_are_flipped_and_half_are_moved() -> None:
    torch.manual_seed(0)
    image = ramps(64)
    transform = workload_module.training_transform(64)
    deviation = torch.tensor(IMAGENET.transforms().std)[:, None, None]
    still = evaluation_transform(64)(image)
    outputs = [transform(image) for _ in range(200)]
    flipped = sum(bool(output[0, 32, 40] < output[0, 32, 24]) for output in outputs)
    unmoved = sum(
        any(((output - like) * deviation).abs().max() < 1e-6 for like in (still, still.flip(-1))) for output in outputs
    )
    assert 75 <= flipped <= 125
    assert 75 <= unmoved <= 125


def test_images_are_resized_and_normalised() -> None:
    image = Image.new("RGB", (90, 40), (255, 0, 51))
    for transform in (evaluation_transform(48), workload_module.training_transform(48)):
        output = transform(image)
        assert (output.shape, output.dtype) == ((3, 48, 48), torch.float32)
        expected = [(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]
        assert output.mean((1, 2)).tolist() == pytest.approx(expected, abs=1e-5)
