"""Shared by the tests of what runs inside a job's process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny tensors are computed by one thread: more of them spend their time waiting for each other.

    Jobs are forked from a server that has not seen this, and compute on every core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
