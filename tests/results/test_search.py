"""What `search --json` says."""

from amp_track.batch_search.search import MaxBatch
from amp_track.config.job import Job
from amp_track.config.values import Tolerance
from amp_track.records.hardware import Hardware
from amp_track.records.result import JobResult, JobStatus
from amp_track.results.equivalence import SeedsResult
from amp_track.results.max_batch import MaxBatchResult, PrecisionResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow

JOB_RESULT = JobResult(
    status=JobStatus.FITS, metric=0.9, wall_seconds=7.0, samples_per_second=100.0, peak_bytes=60, steps=20,
    skipped_steps=2,
)  # fmt: skip
TRIAL = TrialRow(number=3, precision="amp", batch_size=64, learning_rate=0.1, job_result=JOB_RESULT, run_id="run3")
FIT = MaxBatchResult(
    study="study", run_id="parent", experiment_id="1",
    job=Job(), hardware=Hardware(kind="cpu", name="A CPU"), skipped={},
    precisions={
        "amp": PrecisionResult(
            max_batch=MaxBatch(512, 513, "memory"), probes=5, at_max_batch=JOB_RESULT, run_id="max_batch"
        )
    },
)  # fmt: skip
SEEDS = SeedsResult(
    job=Job(batch_size=8), seeds=1, tolerance=Tolerance(fraction=0.01),
    trainings=(TrialRow(batch_size=16, precision="fp32", seed=0, job_result=JOB_RESULT, run_id="seed0"),),
)  # fmt: skip


def test_the_json_has_the_max_batches_the_trials_and_the_numbers_of_the_best() -> None:
    found = SearchResult(
        limits=FIT,
        metric_name="accuracy",
        higher_is_better=True,
        workload_batch_size=64,
        trials=(TRIAL,),
        pareto=(3,),
        trials_wanted=12,
    )
    trial = {
        "number": 3, "precision": "amp", "batch_size": 64, "status": "fits", "metric": 0.9, "wall_seconds": 7.0,
        "samples_per_second": 100.0, "peak_bytes": 60, "skipped_steps": 2, "run_id": "run3",
    }  # fmt: skip
    assert found.as_json() == FIT.as_json() | {
        "trials": [trial], "trials_wanted": 12, "pareto": [3], "report": "", "seeds": None,
        "recommended": {
            "precision": "amp", "batch_size": 64, "grad_accum": 1,
            "command": "amp-track train experiments/digits.py --precision amp --batch-size 64 --lr 0.1",
        },
    }  # fmt: skip


def test_the_json_has_the_comparison_over_seeds_where_there_was_one() -> None:
    found = SearchResult(
        limits=FIT, metric_name="accuracy", higher_is_better=True, workload_batch_size=64, trials=(), pareto=(),
        seeds=SEEDS, report="report.md",
    )  # fmt: skip
    assert found.as_json() == FIT.as_json() | {
        "trials": [], "trials_wanted": 0, "pareto": [], "report": "report.md", "seeds": SEEDS.as_json(),
    }  # fmt: skip
