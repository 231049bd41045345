"""Memory plans, as in the process that makes them: each trace collects garbage, which the objects of tests slow down."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
