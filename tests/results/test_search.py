"""What `search --json` says."""

from amp_track.batch_search.search import Edge
from amp_track.config.job import Job
from amp_track.config.values import Margin
from amp_track.records.hardware import Hardware
from amp_track.records.result import Outcome, Verdict
from amp_track.results.max_batch import FitResult, PrecisionFit
from amp_track.results.search import SearchResult, TrialResult
from amp_track.results.seeds import SeedResult, SeedsResult

OUTCOME = Outcome(
    verdict=Verdict.FITS, quality=0.9, wall_seconds=7.0, samples_per_second=100.0, max_memory_bytes=60, steps=20,
    skipped_steps=2,
)  # fmt: skip
TRIAL = TrialResult(number=3, precision="amp", batch_size=64, learning_rate=0.1, outcome=OUTCOME, run_id="run3")
FIT = FitResult(
    study="study", run_id="parent", experiment_id="1",
    job=Job(), hardware=Hardware(kind="cpu", name="A CPU"), skipped={},
    precisions={"amp": PrecisionFit(edge=Edge(512, 513, "memory"), probes=5, at_edge=OUTCOME, run_id="edge")},
)  # fmt: skip
SEEDS = SeedsResult(
    job=Job(batch_size=8), seeds=1, margin=Margin(fraction=0.01),
    trainings=(SeedResult(precision="fp32", seed=0, outcome=OUTCOME, run_id="seed0"),),
)  # fmt: skip


def test_the_json_has_the_edges_the_trials_and_the_numbers_of_the_best() -> None:
    found = SearchResult(
        fit=FIT,
        quality_name="accuracy",
        higher_is_better=True,
        workload_batch_size=64,
        trials=(TRIAL,),
        pareto=(3,),
        trials_wanted=12,
    )
    trial = {
        "number": 3, "precision": "amp", "batch_size": 64, "verdict": "fits", "quality": 0.9, "wall_seconds": 7.0,
        "samples_per_second": 100.0, "max_memory_bytes": 60, "skipped_steps": 2, "run_id": "run3",
    }  # fmt: skip
    assert found.as_json() == FIT.as_json() | {
        "trials": [trial], "trials_wanted": 12, "pareto": [3], "report": "", "seeds": None,
    }  # fmt: skip


def test_the_json_has_the_comparison_over_seeds_where_there_was_one() -> None:
    found = SearchResult(
        fit=FIT, quality_name="accuracy", higher_is_better=True, workload_batch_size=64, trials=(), pareto=(),
        seeds=SEEDS, report="report.md",
    )  # fmt: skip
    assert found.as_json() == FIT.as_json() | {
        "trials": [], "trials_wanted": 0, "pareto": [], "report": "report.md", "seeds": SEEDS.as_json(),
    }  # fmt: skip
