"""A function as a target: its steps are counted, its memory is limited, and each end has its status."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import MEBIBYTE, OUR_FRAMES, ROOT, WORKLOADS

import amp_track
from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.errors import BadInput
from amp_track.records.result import IN_FLOAT32, JobStatus
from amp_track.runner.runner import JobRunner
from amp_track.targets.base import load_target

FunctionJob = Callable[..., Job]
Options = tuple[tuple[str, str], ...]


@pytest.fixture
def function_job(runner: JobRunner, monkeypatch: pytest.MonkeyPatch) -> FunctionJob:
    """Return a function that makes a resolved probe of a function of `functions.py`."""
    monkeypatch.syspath_prepend(str(WORKLOADS))
    monkeypatch.chdir(WORKLOADS)

    def make(name: str, **settings: object) -> Job:
        asked = {"precision": "fp32", "batch_size": 8, "probe": True, "memory_budget_bytes": 64 * MEBIBYTE} | settings
        job = Job(workload=f"functions:{name}", device="cpu", **asked)
        return resolve(job, runner.inspect(job))

    return make


def test_a_function_is_inspected(runner: JobRunner, function_job: FunctionJob) -> None:
    found = runner.inspect(function_job("generator", options=(("width", "32"),)))
    assert (found.kind, found.workload_name, found.options) == ("function", "generator", (("width", "32"),))
    assert len(found.workload_digest) == 12
    assert dict(found.libraries)["lightning"] == importlib.metadata.version("lightning")


@pytest.mark.parametrize("name", ["generator", "epochs"])
def test_a_probe_ends_by_itself_with_memory_and_speed(runner: JobRunner, function_job: FunctionJob, name: str) -> None:
    job_result = runner.run(function_job(name))
    assert job_result.status is JobStatus.FITS, job_result
    assert 5 <= job_result.steps <= 50
    assert job_result.peak_bytes is not None and 0 < job_result.peak_bytes <= 64 * MEBIBYTE
    assert job_result.samples_per_second
    assert job_result.float32_kernels == "ieee, tf32", "torch's default"


@pytest.mark.parametrize(
    ("name", "precision", "options"),
    [
        ("generator", "bf16", {}),
        ("keeps_a_copy", "fp32", {}),
        ("casts_its_model", "bf16", {"has_optimizer": "yes"}),
        ("casts_its_model", "bf16", {"has_optimizer": "no"}),
        ("train_step", "bf16", {}),
        ("names_its_device", "bf16", {}),
        pytest.param("compiles", "bf16", {"inside": "yes"}, marks=pytest.mark.slow),
        pytest.param("compiles", "bf16", {"inside": "no"}, marks=pytest.mark.slow),
    ],
)
def test_a_training_that_follows_its_precision_is_not_accused(
    runner: JobRunner, function_job: FunctionJob, name: str, precision: str, options: dict[str, str]
) -> None:
    settings = {"options": tuple(options.items()), "memory_budget_bytes": None}  # torch.compile starts threads
    job_result = runner.run(function_job(name, precision=precision, **settings))
    assert job_result.fits and not job_result.ignores_precision, job_result


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["amp", "bf16"])
def test_on_a_gpu_a_loop_that_autocasts_for_the_device_it_is_given_is_not_accused(
    runner: JobRunner, cuda: torch.device, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    folder = ROOT / "experiments" / "bring_your_own"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    job = Job(workload="plain_loop:train_steps", device="cuda", precision=precision, batch_size=8, probe=True)
    job_result = runner.run(resolve(job, runner.inspect(job)))
    assert job_result.fits and not job_result.ignores_precision, job_result


@pytest.mark.parametrize(
    ("name", "precision"), [("generator", "amp"), ("epochs", "amp"), ("casts_its_evaluation", "bf16")]
)
def test_a_training_that_ignores_its_precision_is_noticed(
    runner: JobRunner, function_job: FunctionJob, name: str, precision: str
) -> None:
    job_result = runner.run(function_job(name, precision=precision))
    assert job_result.fits and job_result.ignores_precision


@pytest.mark.parametrize(("name", "options"), [("generator", ()), ("epochs", ()), ("epochs", (("samples", "28"),))])
def test_one_process_reads_a_speed_several_times(
    runner: JobRunner, function_job: FunctionJob, name: str, options: Options
) -> None:
    """Of two epochs of three full batches, none is left out."""
    job_result = runner.run(function_job(name, options=options, speed_readings=3))
    assert len(job_result.speed_readings) == 3


def test_a_skipped_step_does_not_count_as_a_larger_one(runner: JobRunner, function_job: FunctionJob) -> None:
    job_result = runner.run(function_job("overflows", speed_readings=3))
    assert len(job_result.speed_readings) == 3
    assert job_result.steps < 50, "a probe ends as soon as it is timed"


@pytest.mark.slow
def test_an_ignored_precision_is_skipped_or_has_a_caution_if_it_was_asked_for(
    function_job: FunctionJob, tmp_path: Path
) -> None:
    settings = {"storage": f"sqlite:///{tmp_path}/optuna.db", "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    limits: dict[str, Any] = {"memory_budget": "64MiB", "max_batch_size": 16, "confirm_steps": 8}
    asked_for = amp_track.max_batch("functions:generator", precision="fp32,amp", **limits, **settings)
    assert asked_for.max_batch.keys() == {"fp32", "amp"} and asked_for.cautions == {"amp": IN_FLOAT32}
    found = amp_track.max_batch("functions:generator", **limits, **settings)
    assert found.max_batch.keys() == {"fp32", "bf16"}
    assert found.skipped["amp"].startswith(IN_FLOAT32)


def test_the_first_step_of_a_process_is_no_speed(runner: JobRunner, function_job: FunctionJob) -> None:
    """It starts up the device. Of later epochs, a first step is the only one of a full batch."""
    once = {"options": (("samples", "32"), ("count", "1")), "batch_size": 32}
    assert runner.run(function_job("epochs", **once)).samples_per_second is None
    thrice = once | {"options": (("samples", "32"), ("count", "3"))}
    assert runner.run(function_job("epochs", **thrice)).samples_per_second


def test_the_time_that_a_step_waits_for_its_batches_is_measured(runner: JobRunner, function_job: FunctionJob) -> None:
    job_result = runner.run(function_job("loads_slowly", batch_size=4))
    assert job_result.load_seconds is not None and job_result.samples_per_second is not None
    assert 4 * 0.01 <= job_result.load_seconds <= 4 / job_result.samples_per_second


def test_the_speed_is_that_of_full_batches_though_an_epoch_has_only_one(
    runner: JobRunner, function_job: FunctionJob
) -> None:
    job_result = runner.run(function_job("one_full_batch", batch_size=100))
    assert job_result.samples_per_second is not None and job_result.samples_per_second > 50  # the other: 10 in 0.3 s


@pytest.mark.slow
def test_a_loader_that_draws_ahead_in_processes_comes_to_its_last_batch_and_an_evaluation(
    runner: JobRunner, function_job: FunctionJob, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    options = (("log", str(log)),)
    job_result = runner.run(function_job("loads_in_processes", options=options, memory_budget_bytes=None))
    assert job_result.status is JobStatus.FITS
    assert {"train 8", "train 3", "evaluation 8", "evaluation 3"} <= set(log.read_text().splitlines())
    assert job_result.samples_per_second


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "how",
    [
        "evaluates with gradients", "looks first", "passes first", "accumulates", "draws ahead", "endless",
        "persistent", "validates ahead", "makes data anew",
    ],
)  # fmt: skip
def test_a_probe_is_short_and_complete_however_batches_are_loaded(
    runner: JobRunner, function_job: FunctionJob, tmp_path: Path, how: str, workers: int
) -> None:
    log = tmp_path / "log"
    options = (("how", how), ("log", str(log)), ("workers", str(workers)))
    job_result = runner.run(function_job("loads", options=options, memory_budget_bytes=None))
    assert job_result.status is JobStatus.FITS, job_result
    assert job_result.steps >= 2
    drawn = Counter(log.read_text().splitlines())
    assert {"train 8", "train 3"} <= drawn.keys() if how != "endless" else "train 8" in drawn
    assert how == "accumulates" or drawn["train 3"] <= 1 + job_result.steps // 20
    assert drawn["first 8"] <= 20
    if how != "endless":
        evaluated = sum(count for batch, count in drawn.items() if batch.startswith("evaluation"))
        assert evaluated <= 3 * (2 if how == "persistent" else 1) * (1 + drawn["train 3"])
        assert "evaluation 1" in drawn


@pytest.mark.parametrize(("batches", "every"), [(8, 1), (8, 2), (8, 4), (3, 2)])
def test_gradients_may_accumulate_over_batches_drawn_ahead(
    runner: JobRunner, function_job: FunctionJob, batches: int, every: int
) -> None:
    job_result = runner.run(function_job("accumulates", options=(("batches", str(batches)), ("every", str(every)))))
    assert job_result.status is JobStatus.FITS
    assert job_result.steps >= min(2, batches // every)


@pytest.mark.parametrize(
    ("name", "options", "batches"),
    [
        ("accumulates", {"batches": "60", "every": "1"}, 1),
        ("accumulates", {"batches": "60", "every": "4"}, 4),
        ("accumulates", {"batches": "3", "every": "3"}, None),
        ("accumulates", {"batches": "5", "every": "4"}, None),  # the second step of an epoch has one batch
        ("two_loaders", {}, 1),
        ("two_loaders", {"times": "7"}, 1),
        ("generator", {}, None),
    ],
)
@pytest.mark.parametrize("probe", [True, False])
def test_the_batches_of_a_step_are_counted(
    runner: JobRunner, function_job: FunctionJob, name: str, options: dict[str, str], batches: int | None, probe: bool
) -> None:
    job_result = runner.run(function_job(name, options=tuple(options.items()), probe=probe, steps=10))
    assert (job_result.status, job_result.batches_per_step) == (JobStatus.FITS, batches)


@pytest.mark.slow
def test_a_longer_run_goes_on_to_its_steps_or_to_its_end(runner: JobRunner, function_job: FunctionJob) -> None:
    assert runner.run(function_job("generator", probe=False, steps=7)).steps == 7
    assert runner.run(function_job("returns_a_generator", probe=False, steps=7)).steps == 7
    assert runner.run(function_job("epochs", probe=False, steps=7)).steps == 7
    assert runner.run(function_job("epochs", probe=False, batch_size=100)).steps == 2 * 10


@pytest.mark.parametrize("name", ["generator", "epochs"])
def test_a_batch_that_is_too_large_is_out_of_memory(runner: JobRunner, function_job: FunctionJob, name: str) -> None:
    job_result = runner.run(function_job(name, batch_size=900))
    assert job_result.status is JobStatus.OOM
    assert job_result.peak_bytes is not None


def test_out_of_memory_in_a_second_step_tells_what_the_first_one_took(
    runner: JobRunner, function_job: FunctionJob
) -> None:
    """Adam's state exists from the second step on."""
    job = function_job("epochs", batch_size=200)
    fits = runner.run(job)
    assert fits.first_step_peak_bytes < fits.train_peak_allocated_bytes
    less_bytes = (fits.first_step_peak_bytes + fits.train_peak_allocated_bytes) // 2
    fails = runner.run(dataclasses.replace(job, memory_budget_bytes=less_bytes))
    assert (fails.status, fails.first_step_peak_bytes) == (JobStatus.OOM, fits.first_step_peak_bytes)


def test_a_batch_larger_than_the_data_set_is_said_to_be(runner: JobRunner, function_job: FunctionJob) -> None:
    job_result = runner.run(function_job("epochs", options=(("samples", "70"),), batch_size=71))
    assert job_result.status is JobStatus.OVER_DATASET
    assert job_result.message == "batch size 71 exceeds the 70 training samples"


def test_an_evaluation_has_a_batch_of_its_own(runner: JobRunner, function_job: FunctionJob) -> None:
    job_result = runner.run(function_job("evaluates_outside"))
    assert job_result.status is JobStatus.FITS, job_result


def test_a_data_set_without_a_full_batch_is_said_to_be_too_small(runner: JobRunner, function_job: FunctionJob) -> None:
    fits = runner.run(function_job("drops_last", batch_size=50))
    assert (fits.status, fits.drops_last) == (JobStatus.FITS, True)
    assert runner.run(function_job("epochs", batch_size=50)).drops_last is False
    job_result = runner.run(function_job("drops_last", batch_size=101))
    assert (job_result.status, job_result.training_samples) == (JobStatus.OVER_DATASET, 100)


def test_a_schedule_of_an_empty_loader_is_a_data_set_that_is_too_small(
    runner: JobRunner, function_job: FunctionJob
) -> None:
    assert runner.run(function_job("schedules_its_loader", batch_size=50)).status is JobStatus.FITS
    assert runner.run(function_job("schedules_its_loader", batch_size=101)).status is JobStatus.OVER_DATASET
    # Not one of another loader.
    assert runner.run(function_job("makes_an_empty_loader", batch_size=11)).status is JobStatus.FITS
    assert runner.run(function_job("makes_an_empty_loader", batch_size=1000)).status is JobStatus.OOM


@pytest.mark.parametrize("settings", [{}, {"probe": False, "steps": 9}])
def test_an_evaluation_after_a_stream_is_none_of_the_training(
    runner: JobRunner, function_job: FunctionJob, settings: dict[str, object]
) -> None:
    job_result = runner.run(function_job("streams", **settings))
    assert job_result.status is JobStatus.FITS, job_result
    assert runner.run(function_job("streams", batch_size=1000, **settings)).status is JobStatus.OOM


def test_an_evaluation_that_needs_all_batches_is_told_that_a_probe_has_three(
    runner: JobRunner, function_job: FunctionJob
) -> None:
    job_result = runner.run(function_job("compares_with_the_data_set"))
    assert job_result.status is JobStatus.CRASHED
    assert "three batches of an evaluation" in job_result.traceback


def test_a_function_tracks_nothing(runner: JobRunner, function_job: FunctionJob) -> None:
    assert runner.run(function_job("asserts_that_nothing_is_tracked")).status is JobStatus.FITS


LIGHTNING_FIT = "amp_track.integrations.lightning:fit"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("integration", "options"),
    [
        (LIGHTNING_FIT, {"module": "monitored:Net", "data": "monitored:Data"}),
        (LIGHTNING_FIT, {"module": "monitored:Net", "data": "monitored:DataFromProcesses"}),
        (
            LIGHTNING_FIT,
            {
                "module": "monitored:Net",
                "data": "monitored:DataFromProcesses",
                "trainer": '{"accumulate_grad_batches": 4}',
            },
        ),
        ("amp_track.integrations.transformers:train", {"trainer": "monitored:make_trainer"}),
    ],
    ids=["Lightning", "loader processes", "loader processes and accumulated gradients", "transformers"],
)
def test_a_metric_of_the_evaluation_may_be_monitored(
    runner: JobRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, integration: str, options: dict[str, str]
) -> None:
    monkeypatch.syspath_prepend(str(WORKLOADS))
    monkeypatch.chdir(tmp_path)
    asked = {"precision": "fp32", "device": "cpu", "probe": True, "options": tuple(options.items())}
    job = Job(workload=integration, batch_size=10, **asked)  # type: ignore[arg-type]
    job_result = runner.run(resolve(job, runner.inspect(job)))
    assert job_result.status is JobStatus.FITS, job_result
    assert not list(tmp_path.rglob("*.ckpt")), "its checkpoints are left out"
    if integration == LIGHTNING_FIT:
        job = Job(workload=integration, batch_size=101, **asked)  # type: ignore[arg-type]
        assert runner.run(resolve(job, runner.inspect(job))).status is JobStatus.OVER_DATASET


def test_only_simple_defaults_are_options(runner: JobRunner, function_job: FunctionJob) -> None:
    job = function_job("with_defaults", options=(("width", "8"), ("rate", "1")))
    found = runner.inspect(job)
    assert found.options == (("width", "8"), ("rate", "1.0"))
    assert found.recipe == "with_defaults(batch_size={batch_size}, width=8, rate=1.0)"
    assert [name for name, support in found.precisions if support.supported] == ["fp32"]
    assert runner.run(job).status is JobStatus.FITS
    with pytest.raises(BadInput, match="--set loss: got 'mse', expected a parameter"):
        function_job("with_defaults", options=(("loss", "mse"),))


@pytest.mark.parametrize(
    ("ending", "status", "message"),
    [
        ("bug", JobStatus.CRASHED, "expected input"),
        ("exit", JobStatus.FITS, ""),
        ("oom and exit 1", JobStatus.OOM, "allocate"),
        ("oom as another error", JobStatus.OOM, "allocate"),
        ("abort", JobStatus.CRASHED, "SIGABRT"),
        ("two optimizers", JobStatus.FITS, ""),
        ("numpy", JobStatus.OOM, "Unable to allocate"),
    ],
)
def test_each_end_has_its_status(
    runner: JobRunner, function_job: FunctionJob, ending: str, status: JobStatus, message: str
) -> None:
    job_result = runner.run(function_job("ends", options=(("ending", ending),)))
    assert job_result.status is status, job_result
    assert message in job_result.message
    assert OUR_FRAMES not in job_result.traceback
    if ending == "two optimizers":
        assert job_result.steps > 11, "the probe waits for the second optimizer"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("without_batch_size", r"without_batch_size\(\) has no parameter batch_size"),
        ("with_a_path", r"with_a_path\(\) needs path. Set it with --set path=VALUE"),
        ("needs_a_library", "no_such_library is not installed"),
        ("no_such_name", "has no Workload or function named no_such_name"),
    ],
)
def test_a_function_that_cannot_be_called_is_rejected(
    runner: JobRunner, function_job: FunctionJob, name: str, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        runner.run(function_job(name))


def test_a_plan_of_a_function_names_the_call_for_a_model() -> None:
    target = load_target(Job(workload="amp_track.integrations.lightning:fit", device="cpu"))
    with pytest.raises(BadInput, match=r"plan needs a Workload, .* Plan a model with amp_track\.estimate\(model, "):
        target.fake_step(as_cuda=False)


def test_an_option_that_it_does_not_have_is_rejected(function_job: FunctionJob) -> None:
    with pytest.raises(BadInput, match=r"--set depth: got '3', expected a parameter of functions:generator \(width\)"):
        function_job("generator", options=(("depth", "3"),))
    with pytest.raises(BadInput, match="--set width: got 'wide', expected int"):
        function_job("generator", options=(("width", "wide"),))


def test_a_function_without_steps_is_rejected(runner: JobRunner, function_job: FunctionJob) -> None:
    with pytest.raises(BadInput, match="it ended without an optimizer step"):
        runner.run(function_job("without_steps"))


@pytest.mark.slow
def test_a_function_whose_memory_does_not_grow_is_rejected_before_anything_is_written(
    function_job: FunctionJob, tmp_path: Path
) -> None:
    stores = {"storage": f"sqlite:///{tmp_path}/optuna.db", "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    with pytest.raises(BadInput, match="batch 2048 takes no more memory than batch 2"):
        amp_track.max_batch("functions:ignores_its_batch_size", memory_budget="64MiB", **stores)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("function_job")
def test_a_function_whose_memory_stops_growing_has_no_more_samples(tmp_path: Path) -> None:
    stores = {"storage": f"sqlite:///{tmp_path}/optuna.db", "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    with pytest.raises(BadInput, match=r"seems to have fewer samples\. Give their number with --max-batch-size"):
        amp_track.max_batch("functions:slices_its_data", memory_budget="256MiB", precision="fp32", **stores)


@pytest.mark.nightly
def test_the_max_batch_of_a_function_is_found_and_called(function_job: FunctionJob, tmp_path: Path) -> None:
    stores = {"storage": f"sqlite:///{tmp_path}/optuna.db", "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    found = amp_track.max_batch(
        "functions:generator", precision="fp32", memory_budget="32MiB", set={"width": 8}, confirm_steps=8, **stores
    )
    assert found.precisions["fp32"].max_batch.first_failing_batch == found.max_batch["fp32"] + 1
    assert found.recommended is not None
    recommended = found.recommended.batch_size
    assert 0 < recommended <= found.max_batch["fp32"]
    assert found.recommended.command == f"generator(batch_size={recommended}, precision='fp32', width=8)"


def test_a_function_that_ignores_its_batch_size_is_rejected(runner: JobRunner, function_job: FunctionJob) -> None:
    with pytest.raises(BadInput, match="gives batches of 4 for batch_size=8"):
        runner.run(function_job("half_batches"))


def lengths_of(file: Path) -> list[tuple[int, int, int]]:
    """Return the samples, the padded length, and the letters of each batch."""
    rows = [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
    return [(samples, longest, letters) for samples, longest, letters in rows]


def test_a_probe_trains_on_the_largest_samples(runner: JobRunner, function_job: FunctionJob, tmp_path: Path) -> None:
    file = tmp_path / "batches"
    options = ("samples", "90"), ("log", str(file))
    job_result = runner.run(function_job("texts", batch_size=8, worst_batch=True, options=options))
    assert job_result.status is JobStatus.FITS, job_result
    batches = lengths_of(file)
    assert {longest for _, longest, _ in batches} == {40}
    assert {letters for samples, _, letters in batches if samples == 8} == {40 + 7 * 11}
    assert 2 in {samples for samples, _, _ in batches}, "the epoch's last batch"
    assert job_result.size_ratio is not None
    assert 3 < job_result.size_ratio < 6


def test_a_longer_run_alternates_the_largest_samples_with_drawn_ones(
    runner: JobRunner, function_job: FunctionJob, tmp_path: Path
) -> None:
    found = {}
    for worst_batch in (True, False):
        file = tmp_path / str(worst_batch)
        options = ("samples", "90"), ("count", "1"), ("log", str(file))
        runner.run(function_job("texts", probe=False, worst_batch=worst_batch, options=options))
        found[worst_batch] = lengths_of(file)
    assert found[True][1::2] == found[False][1::2], "the order of the training is the same"
    assert {longest for _, longest, _ in found[True][::2]} == {40}
    assert sum(longest == 40 for _, longest, _ in found[False]) == 1


@pytest.mark.parametrize(("drawing", "longest"), [("names", 38), ("pairs", 30), ("subset", 11)])
def test_the_largest_samples_are_those_that_its_sampler_draws(
    runner: JobRunner, function_job: FunctionJob, tmp_path: Path, drawing: str, longest: int
) -> None:
    drawn = {}
    for worst_batch in (True, False):
        file = tmp_path / str(worst_batch)
        options = ("drawing", drawing), ("log", str(file))
        for probe in (True, False):
            job_result = runner.run(
                function_job("unusual_texts", probe=probe, batch_size=4, worst_batch=worst_batch, options=options)
            )
            assert job_result.status is JobStatus.FITS, job_result
            drawn[worst_batch, probe] = lengths_of(file)
            file.unlink()
        assert (job_result.size_ratio is not None) == worst_batch
    assert {length for samples, length, _ in drawn[True, True] if samples == 4} == {longest}
    assert drawn[True, False][1::2] == drawn[False, False][1::2], "the order of the training is the same"


def test_the_batches_of_a_sampler_that_limits_their_tokens_stay_as_they_are_drawn(
    runner: JobRunner, function_job: FunctionJob, tmp_path: Path
) -> None:
    file = tmp_path / "batches"
    options = ("drawing", "by tokens"), ("log", str(file))
    job_result = runner.run(function_job("unusual_texts", worst_batch=True, options=options))
    assert job_result.size_ratio is None
    assert job_result.why_as_drawn == "ByTokens decides which samples form a batch"
    assert {(samples, length) for samples, length, _ in lengths_of(file)} >= {(8, 11), (1, 40)}


def test_the_size_ratio_is_that_of_the_training(runner: JobRunner, function_job: FunctionJob, tmp_path: Path) -> None:
    options = ("drawing", "evaluation"), ("log", str(tmp_path / "batches"))
    job_result = runner.run(function_job("unusual_texts", worst_batch=True, options=options))
    assert job_result.size_ratio == pytest.approx(40 * 200 / sum([40, *(4 + index % 8 for index in range(199))]))


@pytest.mark.slow
def test_loader_processes_measure_the_samples(runner: JobRunner, function_job: FunctionJob, tmp_path: Path) -> None:
    """Without a memory budget, the training's own loader processes run."""
    options = ("drawing", "names"), ("log", str(tmp_path / "batches")), ("workers", "2")
    job = function_job("unusual_texts", worst_batch=True, memory_budget_bytes=None, options=options)
    job_result = runner.run(job)
    assert job_result.status is JobStatus.FITS, job_result
    assert {length for samples, length, _ in lengths_of(tmp_path / "batches") if samples == 8} == {38}


def test_samples_of_one_size_are_trained_as_they_are_drawn(runner: JobRunner, function_job: FunctionJob) -> None:
    assert runner.run(function_job("epochs", worst_batch=True)).size_ratio is None
