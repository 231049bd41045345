"""Real studies in real SQLite, with real probes. tests/commands/test_fit.py has the same on a simulated device."""

import dataclasses
import mmap

import mlflow
import optuna
import pytest
from support import DIGITS, MEBIBYTE, WORKLOADS, request, stores

from amp_track.commands.dtypes import dtypes
from amp_track.commands.max_batch import max_batch
from amp_track.commands.train import train
from amp_track.config.job import Job
from amp_track.records.errors import BadInput, NothingFits

URL = "sqlite:///optuna.db"
GROWS, STREAMED = str(WORKLOADS / "grows.py"), str(WORKLOADS / "streamed.py")


def digits(**settings: object) -> Job:
    return Job(**{"workload": DIGITS, "memory_budget_bytes": 64 * MEBIBYTE} | settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "budget_mib"),
    [
        pytest.param("fp32", 64, marks=pytest.mark.slow),
        pytest.param("amp", 32, marks=pytest.mark.slow),  # float16 is emulated on most CPUs
        pytest.param("bf16", 64, marks=pytest.mark.nightly),
    ],
)
def test_the_max_batch_trains_and_one_more_does_not(precision: str, budget_mib: int) -> None:
    job = digits(epochs=2, memory_budget_bytes=budget_mib * MEBIBYTE)
    result = max_batch(request(job, precisions=(precision,)))
    found = result.precisions[precision].max_batch
    for trial in optuna.load_study(study_name=f"{result.study}/max-batch", storage=URL).trials:
        taken = mlflow.MlflowClient(stores()["tracking_uri"]).get_run(trial.user_attrs["mlflow_run_id"]).data.metrics
        # A plan does not know what libraries take: a third of this budget, or nothing.
        is_planned = "most of the budget" in trial.user_attrs["reason"]
        if trial.value and trial.user_attrs["predicted_bytes"] is not None and not is_planned:
            assert taken["memory/max_reserved_mib"] == pytest.approx(taken["memory/predicted_mib"], rel=0.1)
    assert found.first_failing_batch == found.batch_size + 1
    assert found.bound == "memory"
    assert bytes_taken(job, precision, found.batch_size) is not None
    # A training now and then gets by with one page less than its probe (amp at 1269 with two threads: 3 of 6), where
    # the end of the heap holds what the system refused.
    one_more_bytes = bytes_taken(job, precision, found.first_failing_batch)
    assert one_more_bytes is None or one_more_bytes > budget_mib * MEBIBYTE - mmap.PAGESIZE, (
        "it fits with a page to spare"
    )


@pytest.mark.slow
def test_the_max_batch_of_a_stream_of_samples_is_exact() -> None:
    job = Job(workload=STREAMED, memory_budget_bytes=16 * MEBIBYTE, steps=20)
    found = max_batch(request(job, precisions=("fp32",))).precisions["fp32"]
    most = found.max_batch.batch_size
    assert (found.max_batch.first_failing_batch, found.max_batch.bound) == (most + 1, "memory")
    assert found.confirmation is not None
    assert found.confirmation.steps == 20
    assert bytes_taken(job, "fp32", most) is not None
    assert bytes_taken(job, "fp32", most + 1) is None


@pytest.mark.nightly
def test_a_workload_with_its_own_batches_trains_at_its_max_batch() -> None:
    options = (("samples", "300"), ("by_length", "true"))
    job = Job(workload=str(WORKLOADS / "texts.py"), memory_budget_bytes=48 * MEBIBYTE, options=options, epochs=1)
    result = max_batch(request(job, precisions=("fp32",), confirm_steps="epoch"))
    found = result.precisions["fp32"]
    assert found.max_batch.batch_size > 8
    assert found.typical_max_batch is None
    assert "batch_sampler() decides" in found.why_as_drawn
    assert bytes_taken(job, "fp32", found.max_batch.batch_size) is not None


@pytest.mark.slow
def test_a_stream_that_ends_limits_the_batch_and_one_without_steps_is_rejected() -> None:
    job = Job(workload=STREAMED, memory_budget_bytes=64 * MEBIBYTE, steps=2, options=(("samples", "30"),))
    found = max_batch(request(job, precisions=("fp32",), confirm_steps=0)).precisions["fp32"]
    assert (found.max_batch.batch_size, found.max_batch.bound) == (30, "dataset")
    found = max_batch(request(dataclasses.replace(job, nproc=2), precisions=("fp32",), confirm_steps=0))
    assert found.max_batch == {"fp32": 15}
    with pytest.raises(BadInput, match=r"train_data\(\) is an IterableDataset.* Add --steps"):
        max_batch(request(Job(workload=STREAMED)))
    assert dtypes(request(Job(workload=STREAMED))).operations, "one batch needs no steps"


@pytest.mark.nightly
def test_samples_of_different_size_train_in_any_order_at_the_max_batch() -> None:
    job = Job(
        workload=str(WORKLOADS / "texts.py"),
        memory_budget_bytes=64 * MEBIBYTE,
        options=(("samples", "1000"),),
        epochs=2,
    )
    fitted = max_batch(request(job, precisions=("fp32",))).precisions["fp32"]
    largest, drawn = fitted.max_batch.batch_size, fitted.typical_max_batch
    assert drawn is not None
    assert drawn.first_failing_batch is not None
    for seed in range(1, 4):
        other_order = dataclasses.replace(job, seed=seed)
        assert bytes_taken(other_order, "fp32", largest) is not None
        assert bytes_taken(other_order, "fp32", drawn.first_failing_batch + largest // 4) is None


def bytes_taken(job: Job, precision: str, batch_size: int) -> int | None:
    """The memory that a training takes; None if it does not fit."""
    job = dataclasses.replace(job, precision=precision, batch_size=batch_size)
    try:
        return train(request(job)).job_result.peak_bytes
    except NothingFits as error:
        if f": {precision} at batch {batch_size} does not fit the budget of" not in str(error):
            raise
        return None


@pytest.mark.nightly
@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize(
    ("model", "precision", "budget_mib", "samples"),
    [
        ("Cnn", "fp32", 512, 2048),
        ("Transformer", "fp32", 256, 1000),
        ("Transformer", "bf16", 256, 1500),
        ("Lstm", "fp32", 128, 1700),
        ("UNet", "fp32", 512, 512),
        ("ResNet18", "fp32", 512, 1000),
    ],
)
def test_where_the_confirmation_is_cut_short_the_max_batch_trains_the_whole_job_and_one_more_does_not(
    model: str, precision: str, budget_mib: int, samples: int, epochs: int
) -> None:
    """A confirmation of four steps, of the six or more that an epoch has."""
    job = Job(
        workload=f"benchmarks.models:{model}",
        options=(("samples", str(samples)),),
        precision=precision,
        epochs=epochs,
        memory_budget_bytes=budget_mib * MEBIBYTE,
    )
    found = max_batch(request(job, precisions=(precision,), confirm_steps=4)).precisions[precision]
    assert found.confirmation is not None
    assert found.confirmation.steps == 4 < found.epoch_steps
    assert found.max_batch.bound == "memory"
    assert train(request(dataclasses.replace(job, batch_size=found.max_batch.batch_size))).job_result.fits
    assert found.max_batch.first_failing_batch == found.max_batch.batch_size + 1
    with pytest.raises(NothingFits, match="out of memory"):
        train(request(dataclasses.replace(job, batch_size=found.max_batch.first_failing_batch)))


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "amp", "bf16"])
def test_the_max_batch_on_a_gpu_trains_and_one_more_does_not(precision: str) -> None:
    job = digits(device="cuda", synthetic=True, epochs=1, memory_budget_bytes=512 * MEBIBYTE)
    fitted = max_batch(request(job, precisions=(precision,))).precisions[precision]
    assert fitted.max_batch.first_failing_batch == fitted.max_batch.batch_size + 1
    assert fitted.probes <= 10
    job = dataclasses.replace(job, precision=precision)
    assert train(request(dataclasses.replace(job, batch_size=fitted.max_batch.batch_size))).job_result.fits
    with pytest.raises(NothingFits, match="out of memory"):
        train(request(dataclasses.replace(job, batch_size=fitted.max_batch.first_failing_batch)))


def grows(**settings: object) -> Job:
    options = settings.pop("options", ())
    return Job(**{"workload": GROWS, "options": options, "memory_budget_bytes": 8 * MEBIBYTE} | settings)  # type: ignore[arg-type]


@pytest.mark.nightly
def test_a_max_batch_in_evaluation_is_named_as_such_and_the_same_if_no_probe_evaluates() -> None:
    """In a training of one epoch the evaluation comes last; only the confirming training makes it, if there is one."""
    job = grows(options=(("evaluates_large", "True"), ("more_after", "100000")), epochs=1)
    probed = max_batch(request(job, precisions=("fp32",), confirm_steps=0, study="probed")).precisions["fp32"]
    confirmed = max_batch(request(job, precisions=("fp32",), study="confirmed")).precisions["fp32"]
    assert probed.max_batch == confirmed.max_batch
    for found in (probed, confirmed):
        assert found.failure is not None
        assert found.failure.phase == "evaluation"
        assert found.also_fits == [], "full steps alone ran above the edge"
