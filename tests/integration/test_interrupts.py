"""Searches that are stopped at any moment: each ends its runs and trials, and the next one goes on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

SEARCHES = Path(__file__).parent / "interrupted_searches.py"


pytestmark = pytest.mark.nightly


def stopped_searches(times: int, storage: str, signals: str) -> list[dict[str, Any]]:
    """Stop searches on a simulated device, where all the time goes into the stores, and search again.

    One process per search, on stores of its own.
    """
    done = subprocess.run(
        [sys.executable, str(SEARCHES), str(times), storage, signals],
        capture_output=True, text=True, timeout=300, cwd=Path.cwd(),
        env={"PATH": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "MLFLOW_DISABLE_TELEMETRY": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ends) == times
    for end in ends:
        assert end["resumed"] == 0, end
        assert set(end["trials_after"]) <= {"COMPLETE", "FAIL"}, end
        assert set(end["runs_after"]) <= {"FINISHED", "KILLED"}, end
    moments = {(len(end["trials"]), len(end["runs"])) for end in ends}
    assert len(moments) > 2, "they were stopped at different moments"
    return ends


@pytest.mark.parametrize("storage", ["sqlite:///optuna.db", "optuna.log"])
def test_a_search_stopped_at_any_moment_leaves_nothing_running(storage: str) -> None:
    ends = stopped_searches(10, storage, "SIGINT,SIGTERM")
    for end in ends:
        assert end["interrupted"] in (130, 0), end  # 0: it was over before
        assert "RUNNING" not in end["trials"] + end["runs"], end
    assert [end["interrupted"] for end in ends].count(130) > 5


@pytest.mark.parametrize("storage", [pytest.param("sqlite:///optuna.db", marks=pytest.mark.slow), "optuna.log"])
def test_a_search_killed_at_five_moments_resumes(storage: str) -> None:
    ends = stopped_searches(5, storage, "SIGKILL")
    assert [end["interrupted"] for end in ends].count(-9) >= 3  # 0: it was over before
