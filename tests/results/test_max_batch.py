"""What `fit` reports, to a script (`--json`) and to the other commands."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.batch_search.search import MaxBatch
from amp_track.config.job import Job
from amp_track.records.hardware import Hardware
from amp_track.records.result import JobResult, JobStatus
from amp_track.results.max_batch import MaxBatchResult, PrecisionResult

AT_MAX_BATCH = JobResult(status=JobStatus.FITS, peak_bytes=60, train_peak_allocated_bytes=40, samples_per_second=500.0)
CONFIRMED = JobResult(status=JobStatus.FITS, steps=40, peak_bytes=61, samples_per_second=450.0)
FITTED = PrecisionResult(
    max_batch=MaxBatch(512, 513, "memory"), probes=5, at_max_batch=AT_MAX_BATCH, run_id="max_batch",
    confirmation=CONFIRMED, epoch_steps=38,
    failure=JobResult(status=JobStatus.OOM, phase="evaluation"), max_multiple=504,
    readings={64: (200.0,), 256: (490.0,), 512: (500.0,)}, plan_error=0.012,
)  # fmt: skip
AS_JSON = {
    "max_batch": 512, "first_failing_batch": 513, "bound": "memory", "also_fits": [],
    "why_unsupported": None,
    "fails_in": "evaluation", "probes": 5, "plan_error": 0.012, "runs_at_max_batch": 1, "confirmed_steps": 40,
    "epoch_steps": 38,
    "max_multiple": 504,
    "typical_max_batch": None, "eval_max_batch": None, "size_ratio": None,
    "efficient_batch": 256, "recommended_batch": None,
    "readings": {"64": [200.0], "256": [490.0], "512": [500.0]}, "peak_bytes": 61,
    "peak_allocated_bytes": 40, "samples_per_second": 500.0, "run_id": "max_batch",
}  # fmt: skip
NOTHING = PrecisionResult(max_batch=MaxBatch(0, 1, "memory"), probes=1, at_max_batch=None, run_id=None, bytes_needed=70)


def max_batch(precisions: dict[str, PrecisionResult], *, processes: int = 1, **settings: Any) -> MaxBatchResult:
    return MaxBatchResult(
        study="study", run_id="parent", experiment_id="1", job=Job(memory_budget_bytes=64, nproc=processes),
        hardware=Hardware(kind="cpu", name="A CPU"), precisions=precisions,
        skipped={"tf32": "needs another GPU"}, **settings,
    )  # fmt: skip


def test_the_json_of_a_precision_at_which_nothing_fits() -> None:
    assert NOTHING.as_json() == dict.fromkeys(AS_JSON) | {
        "max_batch": 0, "first_failing_batch": 1, "bound": "memory", "probes": 1, "confirmed_steps": 0,
        "runs_at_max_batch": 1, "epoch_steps": 0, "also_fits": [], "peak_bytes": 70, "readings": {},
    }  # fmt: skip


def test_a_precision_without_kernels_is_told_from_one_that_does_not_fit() -> None:
    failure = JobResult(status=JobStatus.UNSUPPORTED, message="no kernel for it")
    impossible = dataclasses.replace(NOTHING, max_batch=MaxBatch(0, 1, "unsupported"), failure=failure)
    assert impossible.why_unsupported == "no kernel for it"
    assert NOTHING.why_unsupported is None


def test_without_a_confirmation_the_probe_at_the_max_batch_says_what_it_costs() -> None:
    fitted = dataclasses.replace(FITTED, confirmation=None, failure=None, max_multiple=None)
    assert fitted.as_json() == AS_JSON | {
        "fails_in": None, "confirmed_steps": 0, "max_multiple": None, "peak_bytes": 60,
    }  # fmt: skip


def test_the_speed_at_the_max_batch_is_that_of_its_probes_as_for_other_batches() -> None:
    assert FITTED.samples_per_second == 500.0
    untimed = dataclasses.replace(FITTED, readings={64: (200.0,)})
    assert untimed.samples_per_second == 450.0, "that of the confirmation run"
    assert dataclasses.replace(untimed, confirmation=None).samples_per_second == 500.0


def test_the_peak_is_the_larger_of_those_that_are_known() -> None:
    shorter = dataclasses.replace(FITTED, confirmation=dataclasses.replace(CONFIRMED, peak_bytes=None))
    assert shorter.peak_bytes == 60
    neither = dataclasses.replace(shorter, at_max_batch=dataclasses.replace(AT_MAX_BATCH, peak_bytes=None))
    assert neither.peak_bytes is None


SPEEDS = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=8)


@given(SPEEDS)
def test_no_smaller_batch_than_the_efficient_one_is_within_3_per_cent_of_the_best(speeds: list[float]) -> None:
    fitted = dataclasses.replace(FITTED, readings={8 * place: (speed,) for place, speed in enumerate(speeds, 1)})
    assert fitted.efficient_batch is not None
    batch, speed = fitted.efficient_batch
    assert speed == speeds[batch // 8 - 1]
    assert speed >= 0.97 * max(speeds)
    assert all(smaller < 0.97 * max(speeds) for smaller in speeds[: batch // 8 - 1])


@pytest.mark.parametrize(("speed", "efficient"), [(97.0, 8), (96.9, 16)])
def test_exactly_3_per_cent_less_is_as_good_as_the_best(speed: float, efficient: int) -> None:
    fitted = dataclasses.replace(FITTED, readings={8: (speed,), 16: (100.0,)})
    assert fitted.efficient_batch is not None
    assert fitted.efficient_batch[0] == efficient


def test_a_batch_without_a_speed_is_not_called_efficient() -> None:
    assert dataclasses.replace(FITTED, readings={8: (0.0,)}).efficient_batch is None
    some = dataclasses.replace(FITTED, readings={8: (200.0,), 16: (0.0,)})
    assert (some.efficient_batch, some.throughput) == ((8, 200.0), ((8, 200.0),))


def test_a_single_step_is_no_speed_of_a_max_batch() -> None:
    single = dataclasses.replace(CONFIRMED, steps=1)
    untimed = dataclasses.replace(FITTED, readings={}, confirmation=single)
    assert untimed.samples_per_second == 500.0, "that of the probe"
    assert dataclasses.replace(untimed, at_max_batch=single).samples_per_second is None


def test_the_json_of_a_fit_has_accumulation_and_the_reason_of_those_left_out() -> None:
    found = max_batch(
        {"amp": FITTED, "fp32": NOTHING}, headroom_bytes=3, effective_batch_size=1008, multiple_of=24, plan_seconds=1.5
    )
    shown = found.as_json()
    assert (shown["headroom_bytes"], shown["effective_batch_size"], shown["plan_seconds"]) == (3, 1008, 1.5)
    timm = "train.py --batch-size 504 --amp --amp-dtype float16 --grad-accum-steps 2"
    assert shown["recommended"].pop("in_tools")["timm"] == timm, "tests/results/test_in_tools.py runs the others"
    assert shown["recommended"] == {
        "precision": "amp", "batch_size": 504, "grad_accum": 2, "batches_per_step": 1, "samples_per_second": 500.0,
        "readings": 1, "epoch_steps": None, "workload_epoch_steps": None, "makes_few_steps": False,
        "command": "amp-track train experiments/digits.py --precision amp --batch-size 504 --grad-accum 2",
    }  # fmt: skip
    assert shown["precisions"] == {
        "amp": AS_JSON | {"micro_batch": 504, "grad_accum": 2, "caution": None},
        "fp32": NOTHING.as_json() | {"micro_batch": None, "grad_accum": None, "caution": None},
        "tf32": {"skipped": "needs another GPU"},
    }
    assert found.max_batch == {"amp": 512}


def test_nothing_is_left_free_and_no_batch_is_divided_unless_asked_for() -> None:
    found = max_batch({"amp": FITTED})
    assert (found.headroom_bytes, found.multiple_of, found.effective_batch_size) == (0, 1, None)
    assert found.accumulation("amp") is None
    assert max_batch({"amp": FITTED}, effective_batch_size=513).accumulation("amp") == (171, 3), "513 = 171 × 3"
    recommended = dataclasses.replace(FITTED, recommended_batch=128)
    assert max_batch({"amp": recommended}, effective_batch_size=1024).accumulation("amp") == (128, 8)


def test_the_effective_batch_is_shared_by_the_processes() -> None:
    assert max_batch({"amp": FITTED}, effective_batch_size=1024).accumulation("amp") == (512, 2)
    assert max_batch({"amp": FITTED}, effective_batch_size=1024, processes=2).accumulation("amp") == (512, 1)
    assert max_batch({"amp": FITTED}, effective_batch_size=1024, processes=4).accumulation("amp") == (256, 1)


def test_an_evaluation_at_which_nothing_fits_gives_no_batch() -> None:
    fitted = {
        name: dataclasses.replace(FITTED, eval_max_batch=MaxBatch(batch_size, batch_size + 1, "memory"))
        for name, batch_size in (("fp32", 0), ("bf16", 700))
    }
    result, job = max_batch(fitted), Job(eval_batch_size="auto")
    assert result.with_eval_batch_size(job, "fp32", "bf16").eval_batch_size == 700
    assert result.with_eval_batch_size(job, "fp32").eval_batch_size is None, "that of the training"
