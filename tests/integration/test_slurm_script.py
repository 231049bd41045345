"""deploy/slurm.sbatch on a real SLURM of one node: two workers of one study, one of which is told to end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from held_workers import in_state, runs, wait_for
from optuna.trial import TrialState
from slurm_cluster import cluster, without_delay  # noqa: F401  # a fixture
from support import DIGITS, ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("cluster", "fresh_stores")]
SEARCH = [DIGITS, "--study", "s", "--precision", "fp32", "--memory-budget", "40MiB", "--trials", "4", "--epochs", "1"]


def test_a_job_whose_time_is_up_is_queued_again_and_the_study_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    # The node has no GPU, and two cores at least.
    command = ["sbatch", "--parsable", "--array=1-2", "--gpus=0", str(ROOT / "deploy" / "slurm.sbatch"), *SEARCH]
    array = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    first, second = (Path(f"amp-track-{array}-{task}.log") for task in (1, 2))

    def said(log: Path) -> str:
        return log.read_text() if log.exists() else ""

    with without_delay(180):
        wait_for(lambda: "fp32 batch" in said(first))
        subprocess.run(["scancel", "--signal=TERM", f"{array}_1"], check=True)
        wait_for(lambda: "amp-track: interrupted" in said(first))
        while subprocess.run(["squeue", "--noheader", "--format=%i"], capture_output=True).stdout:
            time.sleep(0.2)
    for log in (first, second):
        assert "Report of study s: " in said(log), said(log)
    assert said(first).count("finding the max batch") == 2, "it resumes"
    assert len(in_state(TrialState.COMPLETE, "s/train")) == 4
    assert in_state(TrialState.RUNNING, "s/max-batch") == in_state(TrialState.RUNNING, "s/train") == []
    assert "RUNNING" not in {run.info.status for run in runs()}
