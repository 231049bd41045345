"""Memory plans, as in their own process: each trace collects garbage, which the objects of other tests slow down."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
