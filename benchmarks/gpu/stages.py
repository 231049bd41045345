"""The stages, the most informative first, and their measurements. Small sizes (`smoke`) run the same code on a CPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from amp_track.config.inspection import Inspection, resolve
from amp_track.config.job import Job
from amp_track.memory_plan import gpus
from amp_track.records.plan import PlanTask
from amp_track.records.result import JobResult, JobStatus
from amp_track.runner.runner import JobRunner
from benchmarks.finder_results import LIGHTNING, OURS
from benchmarks.gpu.results import Machine
from benchmarks.peers import GPU_BUDGETS_MIB, Case

_FP32_FIRST, _AMP_FIRST = ["fp32", "amp", "tf32", "bf16"], ["amp", "bf16", "fp32", "tf32"]
_MODELS = ["ResNet18", "Transformer", "Cnn", "UNet", "Lstm"]
_NETS = ("resnet50", "vit_b_16", "convnext_tiny", "unet", "resnet18", "swin_t", "transformer")
_STORES = ("mlflow", "optuna")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of a stage. It needs these packages and programs; measurements of the same `process` share one."""

    key: str
    run: Callable[[], Mapping[str, Any]]
    precision: str = "fp32"
    needs: Sequence[str] = ()
    limit_seconds: float = 120.0
    process: str = ""
    n: int = 1


def _ratio(first: float | None, second: float | None) -> float | None:
    return first / second if first and second else None


def _values(job_result: JobResult) -> dict[str, Any]:
    numbers = {name: value for name, value in vars(job_result).items() if isinstance(value, int | float)}
    return {"status": job_result.status, "message": job_result.message[:200], "phase": job_result.phase, **numbers}


class _Jobs:
    """Runs jobs of one workload, each in a job process. Jobs with the same options share one inspection."""

    def __init__(self, device: str, workload: str) -> None:
        self._device, self._workload, self._runner = device, workload, JobRunner(workload)
        self._inspections: dict[tuple[object, ...], Inspection] = {}

    def run(self, **settings: Any) -> JobResult:
        """Raises RuntimeError unless the job fits or reaches a limit of the device."""
        job_result = self._runner.run(self._prepare(settings)[0])
        if job_result.status not in (JobStatus.FITS, JobStatus.OOM, JobStatus.KERNEL_LIMIT):
            raise RuntimeError(f"{job_result.status}: {job_result.message}")
        return job_result

    def compare_with_plan(self, **settings: Any) -> dict[str, Any]:
        """Return the ratio of predicted to measured peaks of a job."""
        job, inspection = self._prepare(settings)
        assert job.batch_size is not None
        size, kernels = job.batch_size, gpus.device_kernels(inspection.hardware)
        task = PlanTask(
            precisions=(job.precision,), targets=(), batch_size=size, max_batch_size=size, kernels=kernels
        )  # fmt: skip
        plan, job_result = self._runner.plan(job, task).precisions[0], self.run(**settings)
        peaks = {
            "allocated": (plan.peak.allocated_bytes, job_result.train_peak_allocated_bytes),
            "reserved": (plan.peak.reserved_bytes, job_result.peak_bytes),
            "reserved_with_workspaces": (plan.peak_with_workspaces.reserved_bytes, job_result.peak_bytes),
        }
        ratios = {f"{name}_over_measured": _ratio(*both) for name, both in peaks.items()}
        return {**ratios, "predicted_bytes": {name: both[0] for name, both in peaks.items()}, **_values(job_result)}

    def compare_probe(self, **settings: Any) -> dict[str, Any]:
        """Return the ratio of a probe's peaks to those of 12 steps: an epoch, an evaluation, part of another epoch."""
        probe, training = self.run(probe=True, epochs=2, **settings), self.run(steps=12, **settings)
        return {
            "allocated_by_probe_over_training": _ratio(
                probe.train_peak_allocated_bytes, training.train_peak_allocated_bytes
            ),
            "reserved_by_probe_over_training": _ratio(probe.peak_bytes, training.peak_bytes),
            "reserved_over_allocated": _ratio(training.peak_bytes, training.train_peak_allocated_bytes),
            "probe": _values(probe),
            "training": _values(training),
        }

    def _prepare(self, settings: Mapping[str, Any]) -> tuple[Job, Inspection]:
        job = Job(workload=self._workload, device=self._device, **settings)
        same = (job.options, job.synthetic, job.memory_budget_bytes)
        if same not in self._inspections:
            self._inspections[same] = self._runner.inspect(job)
        return resolve(job, self._inspections[same]), self._inspections[same]


def tests(machine: Machine) -> list[Measurement]:
    """Run the tests that need a GPU."""
    return []  # pytest collects them


def max_batch(machine: Machine) -> list[Measurement]:
    """Search the max batch of five models in 6 GiB and in all memory, and compare with Lightning."""
    models, (small, full), every = _MODELS, GPU_BUDGETS_MIB, _FP32_FIRST
    rounds: list[tuple[int | None, int, Sequence[str], list[str]]]
    rounds = [(small, 1, (OURS, LIGHTNING), ["amp", "fp32"]), (small, 1, (OURS,), ["tf32", "bf16"])]
    rounds += [(full, 1, (OURS,), every), *((small, run, (LIGHTNING, OURS), ["amp", "fp32"]) for run in (2, 3))]
    if machine.smoke:
        models, rounds = ["Mlp"], [(16, 1, (OURS, LIGHTNING), ["fp32"]), (None, 1, (OURS,), ["amp"])]
    found = []
    for budget, run, finders, precisions in rounds:
        for precision, model, finder in itertools.product(precisions, models, finders):
            memory = f"{budget / 1024:g} GiB" if budget else "all memory"
            case = Case(model, precision, budget, machine.device)
            found.append(Measurement(
                key=f"{model} {precision} {memory}: {finder}{f', run {run}' * (run > 1)}",
                run=partial(_find, case, finder, smoke=machine.smoke), precision=precision,
                needs=("lightning",) if finder == LIGHTNING else _STORES, limit_seconds=300.0,
            ))  # fmt: skip
    return found


def _find(case: Case, finder: str, *, smoke: bool) -> dict[str, Any]:
    """Run a finder as a command. An error of another finder counts as measured, because it would occur again.

    Raises RuntimeError if amp-track finds no max batch.
    """
    from benchmarks.finders import run_ours, run_peer

    # Eight steps are enough for what takes memory; an epoch of every model takes too long.
    flags = ("--confirm-steps", "2", "--max-batch-size", "4") if smoke else ("--confirm-steps", "8")
    run = run_ours([case], *flags) if finder == OURS else run_peer(case, finder)
    name = case.precision
    if finder == OURS and not run.has_answer:
        raise RuntimeError(run.errors[name])
    return {
        "max_batch": run.answers.get(name), "probes": run.probes.get(name), "processes": run.processes.get(name),
        "seconds_to_the_answer": run.answer_seconds, "command_seconds": run.command_seconds,
        "plan_seconds": run.plan_seconds, "phase_seconds": run.phases, "part_seconds": run.parts,
        "trials": run.trials, "error": run.errors.get(name),
    }  # fmt: skip


def step(machine: Machine) -> list[Measurement]:
    """Compare TrainStep and EvalStep with bare loops, on ResNet-50 and a tiny MLP, and whether the host waits."""
    models, precisions = (["Cnn", "Mlp"], ["fp32", "bf16"]) if machine.smoke else (["ResNet50", "Mlp"], _AMP_FIRST)
    found, ways = [], [(models[0], False), (models[1], False), (models[0], True)]
    for name, (model, compiled) in itertools.product(precisions, ways):
        key = f"{model} {name}{', compiled' * compiled}"
        found.append(Measurement(
            key=key, precision=name, process=key, run=partial(_compare_steps, machine, model, name, compiled), n=5,
            needs=("cc",) if compiled else (), limit_seconds=300.0 if compiled else 120.0,
        ))  # fmt: skip
    return found


def _compare_steps(machine: Machine, model: str, precision: str, compiled: bool) -> dict[str, Any]:
    from benchmarks.step import Comparison, compare, ratios

    size, seconds, pairs = (4, 0.1, 3) if machine.smoke else (64 if model == "Mlp" else 256, 1.0, 5)
    found = compare(Comparison(model, precision, size, compiled, machine.device, turn_seconds=seconds, pairs=pairs))
    training, evaluation = found["training"], found["evaluation"]
    return {
        "bare_samples_per_second": statistics.median(training["bare"]),
        "TrainStep_samples_per_second": statistics.median(training["ours"]),
        "ratio": statistics.median(ratios(training)), "waits": found["waits"],
        "evaluation_ratio": statistics.median(ratios(evaluation)),
        "EvalStep_samples_per_second": statistics.median(evaluation["ours"]), "batch_size": size,
        "rounds": training, "evaluation_rounds": evaluation,
    }  # fmt: skip


def probe(machine: Machine) -> list[Measurement]:
    """Compare peak memory of a probe and a training, and reserved with allocated memory."""
    jobs, found = {model: _Jobs(machine.device, f"benchmarks.models:{model}") for model in (*_MODELS, "Mlp")}, []
    cases = itertools.product((1024, 64), ("fp32", "amp"), _MODELS)
    for batch, name, model in [(4, "fp32", "Mlp")] if machine.smoke else cases:
        options = (("samples", str(batch * 8 + batch // 2)), ("distinct", "64"), ("eval_samples", str(batch)))
        run = partial(jobs[model].compare_probe, precision=name, batch_size=batch, options=options)
        found.append(Measurement(key=f"{model} {name} batch {batch}", precision=name, run=run))
    return found


def memory_plan(machine: Machine) -> list[Measurement]:
    """Compare predicted peak memory with that of real steps."""
    cases = list(itertools.product(_NETS, _AMP_FIRST, (128, 32, 8), ("adamw", "sgd"), (False, True)))
    random.Random(0).shuffle(cases)  # so that all models and batch sizes come early
    cases.sort(key=lambda case: case[4] or case[1] in ("tf32", "bf16"))
    if machine.smoke:
        cases = [("mlp", "fp32", 8, "adamw", False), ("mlp", "bf16", 8, "sgd", True)]
    jobs, found = _Jobs(machine.device, "benchmarks.planned:Planned"), []
    for net, name, batch, optimizer, frozen in cases:
        key = f"{net} {name} batch {batch}, {optimizer}, {'head' if frozen else 'all'}"
        options = (("net", net), ("optimizer_name", optimizer), ("frozen", str(frozen)))
        # Under amp the first steps overflow, and many optimizers have no state before an update.
        steps = 12 if name == "amp" else 3
        settings: dict[str, Any] = {"batch_size": batch, "synthetic": True, "steps": steps, "options": options}
        run = partial(jobs.compare_with_plan, precision=name, **settings)
        found.append(Measurement(key=key, precision=name, run=run))
    return found


def costs(machine: Machine) -> list[Measurement]:
    """Measure the cost of loading, of tracking, of a trial and of a fresh process."""
    from benchmarks import input_pipeline, overhead, trials

    smoke, device = machine.smoke, machine.device
    trial_repeats, tracking_repeats = (1, 1) if smoke else (15, 2)

    @functools.cache
    def prepared() -> tuple[JobRunner, Job]:
        images, batch_size, options = (24, 8, {"image_size": "32"}) if smoke else (1024, 128, {})
        folder, runner = Path("images").absolute(), JobRunner(input_pipeline.CALTECH256)
        folder.mkdir()
        input_pipeline.write_images(folder, images)
        return runner, input_pipeline.job_on(runner, folder, device, batch_size, **options)[0]

    def load() -> dict[str, Any]:
        counts = input_pipeline.worker_counts()
        speeds = {count: input_pipeline.loading_images_per_second(prepared()[1], count) for count in counts}
        return {"loading_images_per_second_by_workers": speeds}

    def train(precision: str) -> dict[str, Any]:
        runner, job = prepared()
        return {"training": input_pipeline.training_of(runner, dataclasses.replace(job, precision=precision), 1)}

    def trial() -> dict[str, Any]:
        found = trials.measure(trial_repeats, device)
        names = ("trial_overhead", "fresh_process", "empty_process", "device_process")
        return {"seconds": {name: found[f"{name}_seconds_median"] for name in names}}

    def track(way: str) -> dict[str, Any]:
        case = overhead.CASES["cuda"][0]
        case = dataclasses.replace(case, device=device, steps=30 if smoke else case.steps)
        runs = [overhead.in_own_process(case, way)["steps_per_second"] for _ in range(tracking_repeats)]
        return {"steps_per_second": statistics.median(runs), "runs": runs}

    add, lightning = partial(Measurement, needs=_STORES), (*_STORES, "lightning")
    return [
        Measurement(key="loading", run=load),
        *(Measurement(key=f"training {name}", precision=name, run=partial(train, name))
          for name in (["bf16"] if smoke else _AMP_FIRST)),
        add(key="a trial and a fresh process", run=trial, process="trial", n=trial_repeats),
        *(add(key=f"a tiny MLP: {way}", run=partial(track, way), n=tracking_repeats, process="tracking",
              needs=lightning if "Lightning" in way else _STORES)
          for way in list(overhead.WAYS)[: 3 if smoke else None]),
    ]  # fmt: skip


STAGES = {stage.__name__: stage for stage in (tests, max_batch, step, probe, memory_plan, costs)}
