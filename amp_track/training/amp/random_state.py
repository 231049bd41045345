"""Save and restore the random generators of a training, in types that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

_TENSORS = ("torch", "device")
"""The entries of a state that are tensors of bytes."""


def seed(number: int) -> None:
    """Seed torch's generators (CPU and devices), Python's and numpy's with the same number."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number % 2**32)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed the CPU's generators within the block, and restore their states afterwards."""
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    torch.default_generator.manual_seed(number)  # torch.manual_seed would seed every device's
    random.seed(number)
    numpy.random.seed(number % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        numpy.random.set_state(before[2])


def capture(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's generators on the CPU and on `device`, of Python's and of numpy's."""
    version, numbers, next_gaussian = random.getstate()
    numpy_state = numpy.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "torch": torch.get_rng_state(),
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(*_which(device)),
        "python": (version, list(numbers), next_gaussian),
        "numpy": {
            "key": [int(number) for number in numpy_state["state"]["key"]],
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set every generator to the state that `capture` returned."""
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], *_which(device))
    version, numbers, next_gaussian = state["python"]
    random.setstate((version, tuple(numbers), next_gaussian))
    kept = state["numpy"]
    numpy.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": numpy.array(kept["key"], dtype=numpy.uint32), "pos": kept["pos"]},
            "has_gauss": kept["has_gauss"],
            "gauss": kept["gauss"],
        }
    )


def to_json(state: dict[str, Any]) -> Any:
    """Convert a state from `capture` to JSON types."""
    return state | {name: state[name].tolist() for name in _TENSORS if state[name] is not None}


def from_json(known: Any) -> dict[str, Any]:
    """Convert JSON types from `to_json` back to a state."""
    tensors = {name: torch.tensor(known[name], dtype=torch.uint8) for name in _TENSORS if known[name] is not None}
    return {**known, **tensors}


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """Return the device argument of a device module's functions; those of MPS take none."""
    return () if device.type == "mps" else (device,)
