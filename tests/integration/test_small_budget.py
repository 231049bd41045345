"""A max batch within a very small budget is the same on a quiet machine and beside other work."""

from __future__ import annotations

import os

import pytest
from support import MEBIBYTE, WORKLOADS, request

from amp_track.commands.max_batch import max_batch
from amp_track.config.job import Job
from benchmarks.processes import busy_loops


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_stores")
def test_three_fits_agree_one_quiet_and_two_beside_busy_loops() -> None:
    """It once gave 668 on a quiet machine and 773 to 875 beside other work."""
    job = Job(workload=str(WORKLOADS / "small_mlp.py"), memory_budget_bytes=3 * MEBIBYTE)
    found = []
    for name, loops in (("quiet", 0), ("busy", os.cpu_count() or 1), ("busier", 2 * (os.cpu_count() or 1))):
        with busy_loops(loops):
            found.append(max_batch(request(job, precisions=("fp32",), study=name)).precisions["fp32"])
    assert len({fitted.max_batch.batch_size for fitted in found}) == 1, [fitted.max_batch for fitted in found]
    assert all(fitted.runs_at_max_batch == 2 for fitted in found), "the meter is exact: two equal runs are enough"
    assert found[0].max_batch.bound == "memory"
