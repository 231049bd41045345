"""Compare the estimated training speed with published ones: of timm models, and of four nets by NVIDIA.

    PYTHONPATH=build/timm-2022 python -m benchmarks.plan_speed --traces FOLDER

**timm, RTX 3090, amp** (benchmarks/data/README.md): `FOLDER` is what `python -m benchmarks.plan_validation --traces
FOLDER` keeps, which says how to install that timm; rows without traces are left out. Takes some seconds per model, to
find its grouped convolutions. Each estimate has one factor, which is fitted on other models: half of the families
(modules of timm) predict the other half, and the other way around. An estimate's error is the larger of measured /
estimated and estimated / measured. Estimates by the flops and operands of every operation, which a trace does not have,
were no better for 43 of the models.

**NVIDIA, V100 and A100, amp, fp32 and tf32**: the tables of one GPU in NVIDIA's DeepLearningExamples
(PyTorch/Classification/ConvNets; PyTorch of 2020 and 2021), compared with the estimate as it is shipped, and that of
tf32 by its peak rate.

Writes benchmarks/results/plan-speed.json, and prints it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import os
import pickle
import re
import statistics
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from amp_track.memory_plan.gpus import RATES
from amp_track.memory_plan.speed import EFFICIENCY, MOVED_PER_ALLOCATED, allocated_bytes, samples_per_second
from amp_track.records.plan import StepTrace
from benchmarks import markdown, provenance
from benchmarks.plan_validation import Published, family_of, published, wrong_release
from benchmarks.timm_2022 import PublishedModel, run_as_in_2022

PEAK = RATES["GeForce RTX 3090"]
A100_80, A100_40, V100 = "NVIDIA A100 80GB", "NVIDIA A100 40GB", "Tesla V100 16GB"
NVIDIA = (
    ("resnet50", 224, A100_80, "tf32", 256, 938),
    ("resnet50", 224, A100_80, "amp", 256, 2470),
    ("resnet50", 224, V100, "fp32", 128, 367),
    ("resnet50", 224, V100, "amp", 256, 1200),
    ("resnext101_32x4d", 224, A100_40, "tf32", 128, 300.42),
    ("resnext101_32x4d", 224, A100_40, "amp", 128, 908.4),
    ("resnext101_32x4d", 224, V100, "fp32", 64, 150.05),
    ("resnext101_32x4d", 224, V100, "amp", 128, 534.91),
    ("efficientnet_b0", 224, A100_80, "tf32", 256, 1078),
    ("efficientnet_b0", 224, A100_80, "amp", 256, 2489),
    ("efficientnet_b0", 224, V100, "fp32", 128, 655),
    ("efficientnet_b0", 224, V100, "amp", 256, 1301),
    ("efficientnet_b4", 380, A100_80, "tf32", 80, 157),
    ("efficientnet_b4", 380, A100_80, "amp", 160, 331),
    ("efficientnet_b4", 380, V100, "fp32", 32, 83),
    ("efficientnet_b4", 380, V100, "amp", 64, 204),
)
"""Net of timm with its image size, GPU, precision, batch size, and samples per second. Some batch sizes are not stated:
those are about what fits, and hardly change the estimate."""
NVIDIA_PARAMETERS_MILLIONS = {
    "resnet50": 25.56, "resnext101_32x4d": 44.18, "efficientnet_b0": 5.29, "efficientnet_b4": 19.34,
}  # fmt: skip
TF32_TFLOPS = 156  # of an A100
GROUPED, DEPTHWISE, ORDINARY = "with grouped convolutions", "with depthwise, no other grouped", "with neither"


@dataclass(frozen=True)
class Work:
    """The work of a row's step, and its measured time."""

    row: Published
    family: str
    convolutions: str
    arithmetic_s: float  # at the peak rate
    traffic_s: float  # at the peak bandwidth
    storages: float  # allocated by the step: about the number of its kernels

    @property
    def measured_s(self) -> float:
        return self.row.batch_size / self.row.samples_per_second

    @property
    def half(self) -> int:
        return hashlib.sha1(self.family.encode()).digest()[0] % 2


MODELS: dict[str, Callable[[Work], float]] = {
    "arithmetic": lambda work: work.arithmetic_s,
    "memory traffic": lambda work: work.traffic_s,
    "sum (in use)": lambda work: work.arithmetic_s + work.traffic_s,
    "larger of both": lambda work: max(work.arithmetic_s, work.traffic_s),
    "sum, and 5 µs per kernel": lambda work: work.arithmetic_s + work.traffic_s + 5e-6 * work.storages,
}
"""Seconds of a step before the factor."""
IN_USE = "sum (in use)"


def traced(folder: Path) -> Iterator[Work]:
    """Yield the work of every row with two traces."""
    files: dict[tuple[str, int, str], list[tuple[int, Path]]] = {}
    for file in folder.glob("*.pickle.z"):
        if found := re.fullmatch(r"(.+)-(\d+)-(\w+)-(\d+)\.pickle\.z", file.name):
            files.setdefault((found[1], int(found[2]), found[3]), []).append((int(found[4]), file))
    known: dict[str, str] = {}
    for row in published():
        if len(files.get(row.key, [])) < 2:
            continue
        if row.model not in known:
            known[row.model] = _convolutions(row.model)
        (start, first), *_, (end, last) = sorted(files[row.key])
        ends = zip(_work(first), _work(last), strict=True)
        at_row = [low + (high - low) * (row.batch_size - start) / (end - start) for low, high in ends]
        yield Work(row, family_of(row.model), known[row.model], *at_row)


def _work(file: Path) -> tuple[float, float, float]:
    trace = pickle.loads(zlib.decompress(file.read_bytes())).with_next_step()
    single, half = PEAK.fp32_tflops * 1e12, (PEAK.half_tflops or 0) * 1e12
    arithmetic = (trace.flops - trace.half_flops) / single + trace.half_flops / half
    traffic = MOVED_PER_ALLOCATED * allocated_bytes(trace) / (PEAK.gb_per_s * 1e9)
    start = trace.last_step[0].first_event
    return arithmetic, traffic, sum(event >= 0 for event in trace.events[start:])


def _convolutions(model: str) -> str:
    import timm
    import torch

    modules = timm.create_model(model).modules()
    groups = [(each.groups, each.in_channels) for each in modules if isinstance(each, torch.nn.Conv2d)]
    if any(1 < count < channels for count, channels in groups):
        return GROUPED
    return DEPTHWISE if any(count > 1 for count, _ in groups) else ORDINARY


def factor(works: Sequence[Work], model: str) -> float:
    """Return the median of measured / estimated."""
    return statistics.median(each.measured_s / MODELS[model](each) for each in works)


def tested(works: Sequence[Work], model: str) -> list[tuple[Work, float]]:
    """Return each row with its estimated seconds, whose factor is that of the other half of the families."""
    factors = [factor([each for each in works if each.half != half], model) for half in (0, 1)]
    return [(each, factors[each.half] * MODELS[model](each)) for each in works]


def errors_of(ratios: Sequence[float]) -> list[float]:
    """Return the errors of ratios of measured to estimated values, in ascending order."""
    return sorted(max(ratio, 1 / ratio) for ratio in ratios)


def summarize(found: Sequence[tuple[Work, float]]) -> dict[str, Any]:
    """Return the errors of rows with their estimated seconds, and the rank correlation of samples per second."""
    ratios = [work.measured_s / seconds for work, seconds in found]
    errors = errors_of(ratios)
    speeds = [work.row.batch_size / seconds for work, seconds in found]
    return {
        "rows": len(found),
        "models": len({work.row.model for work, _ in found}),
        "median_error": round(statistics.median(errors), 3),
        "p90_error": round(errors[int(0.9 * len(errors))], 2),
        "within_1.5": round(sum(error <= 1.5 for error in errors) / len(errors), 3),
        "median_measured_by_estimated_time": round(statistics.median(ratios), 3),
        "rank_correlation": round(float(stats.spearmanr(speeds, [w.row.samples_per_second for w, _ in found])[0]), 3),
    }


def figures(works: Sequence[Work]) -> dict[str, Any]:
    """Return the summary of each model by layout, and that of the model in use by kind of convolution."""
    result: dict[str, Any] = {}
    for model in MODELS:
        found = tested(works, model)
        halves = [factor([each for each in works if each.half == half], model) for half in (0, 1)]
        by_layout = {
            layout: summarize([each for each in found if each[0].row.layout == layout])
            for layout in ("channels_last", "contiguous")
        }
        result[model] = {
            "factor_of_each_half": [round(each, 2) for each in halves],
            "all": summarize(found),
        } | by_layout
        if model == IN_USE:
            kinds = {work.convolutions for work in works}
            for kind in sorted(kinds):
                result[model][kind] = summarize([each for each in found if each[0].convolutions == kind])
    return result


def nvidia() -> Iterator[dict[str, Any]]:
    """Yield the readings of NVIDIA with their estimates."""
    from amp_track.config.job import Job
    from amp_track.memory_plan.fake_step import FakeStep

    for model, image_size, gpu, precision, batch_size, measured in NVIDIA:
        millions = NVIDIA_PARAMETERS_MILLIONS[model]
        workload = PublishedModel(
            name=model, image_size=image_size, parameters_millions=millions, optimizer_name="sgd"
        )  # fmt: skip
        job = Job(workload=model, learning_rate=1e-3, batch_size=8, channels_last=precision == "amp")
        step = FakeStep(job, workload, workload.example(2), as_cuda=True)
        rates = RATES[gpu]
        if precision == "tf32":
            rates = dataclasses.replace(rates, fp32_tflops=TF32_TFLOPS)

        def trace_at(size: int, step: FakeStep = step, precision: str = precision) -> StepTrace:
            return step.trace(precision, size).with_next_step()

        estimated = samples_per_second(trace_at, batch_size, rates)
        assert estimated is not None
        yield {
            "model": model,
            "gpu": gpu,
            "precision": precision,
            "measured": measured,
            "estimated": round(estimated),
            "measured_by_estimated_speed": round(measured / estimated, 2),
        }


def table(result: dict[str, Any]) -> str:
    headings = ["estimate", "rows of", "rows", "models", "median error", "90 %", "within 1.5 ×", "rank correlation"]
    rows = [
        [
            model, part, str(each["rows"]), str(each["models"]), f"{each['median_error']:.2f} ×",
            f"{each['p90_error']:.2f} ×", f"{each['within_1.5']:.0%}", f"{each['rank_correlation']:.2f}",
        ]
        for model, parts in result.items()
        for part, each in parts.items()
        if isinstance(each, dict)
    ]  # fmt: skip
    return markdown.table(headings, rows)


def summary_table(record: dict[str, Any]) -> str:
    """Return the errors of the estimate in use, for docs/plan-speed.md."""
    found = record["timm, RTX 3090, amp"][IN_USE]
    of_all, grouped = found["all"], found["with grouped convolutions"]
    release = record["versions"]["timm"]
    rows = [
        [
            f"timm {release}, RTX 3090, amp, torch 1.12: {of_all['models']} models in both memory formats, "
            "constant fitted on other families",
            f"{of_all['median_error']:.2f}", f"{of_all['within_1.5']:.0%}",
        ],
        [
            "of those, with grouped (and not only depthwise) convolutions, which cuDNN computes slowly",
            f"{grouped['median_error']:.2f}", f"{grouped['within_1.5']:.0%}",
        ],
    ]  # fmt: skip
    for shown, precision in (
        ("NVIDIA's four convolutional nets, V100 and A100, amp, 2021", "amp"),
        ("the same nets, V100, fp32", "fp32"),
    ):
        of_nets = [each for each in record["NVIDIA"] if each["precision"] == precision]
        errors = errors_of([each["measured"] / each["estimated"] for each in of_nets])
        within = sum(error <= 1.5 for error in errors)
        rows.append([shown, f"{statistics.median(errors):.2f}", f"{within} of {len(errors)}"])
    ranks = f"The rank correlation of timm's models is {of_all['rank_correlation']:.2f}."
    return f"{markdown.table(['compared with', 'factor in the median', 'within 1.5 ×'], rows)}\n\n{ranks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, help="the folder of plan_validation's traces")
    options = parser.parse_args()
    if (problem := wrong_release()) is not None:
        parser.error(problem)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")  # of timm, about names of models
    run_as_in_2022()
    works = list(traced(options.traces))
    result = figures(works)
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": provenance.versions("torch", "timm"),
        "efficiency_in_use": EFFICIENCY,
        "efficiency_by_all_rows": round(1 / factor(works, IN_USE), 2),
        "timm, RTX 3090, amp": result,
        "NVIDIA": list(nvidia()),
    }
    provenance.write("plan-speed", record)
    print(table(result))
    for key in ("efficiency_in_use", "efficiency_by_all_rows"):
        print(key, record[key])
    for each in record["NVIDIA"]:
        print(*each.values())


if __name__ == "__main__":
    main()
