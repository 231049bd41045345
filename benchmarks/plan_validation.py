"""Compare the memory plan with published batch sizes of timm models: benchmarks/data/README.md.

    pip install --no-deps --target build/timm-2022 timm==0.6.7
    PYTHONPATH=build/timm-2022 python -m benchmarks.plan_validation [--models 40] [--processes 2] [--traces FOLDER]

timm 0.6.7 has the published models, and runs with today's torch. Each prediction is appended to
benchmarks/results/plan-validation.csv, and rows that the file has are skipped, so that a stopped run can be continued;
remove the file to begin anew. All rows take some hours on two cores. `--models` predicts only that many models, drawn
by a hash of their names, so that they are a random sample. `--traces` keeps what was traced, to predict again after a
change of the simulated allocator or of a GPU's memory without tracing.

The true max batch lies from the published batch size up to below the next of the ladder. A prediction within is inside.
Writes a summary to benchmarks/results/plan-validation.json, and prints it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import functools
import hashlib
import math
import multiprocessing
import os
import pickle
import statistics
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from scipy import optimize, stats

from benchmarks import markdown, provenance

DATA = Path(__file__).parent / "data" / "timm_train_amp_rtx3090.csv"
PREDICTIONS = provenance.RESULTS / "plan-validation.csv"
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
GPU = "RTX 3090"
RELEASE = "0.6.7"
"""The release of timm that has the published models, all but one of 798."""
_ROWS_OF_A_PROCESS = 20
"""timm and torch keep objects of each model: a fresh process frees them."""
_MANY_MISSES = 0.85
"""Families with at most this fraction of rows inside are named."""


@dataclass(frozen=True)
class _Trained:
    """A model as it was trained."""

    model: str
    image_size: int
    layout: str

    @property
    def key(self) -> tuple[str, int, str]:
        return self.model, self.image_size, self.layout


@dataclass(frozen=True)
class Published(_Trained):
    """A row of the published table."""

    batch_size: int
    samples_per_second: float
    parameters_millions: float

    @property
    def failed_batch_size(self) -> int | None:
        """The next batch size of the ladder, which failed; None at its end."""
        place = LADDER.index(self.batch_size) + 1
        return LADDER[place] if place < len(LADDER) else None


@dataclass(frozen=True)
class Predicted(_Trained):
    """The prediction for a row; with an error, none."""

    family: str
    expected: int = 0
    safe: int = 0
    at_most: int = 0
    hole: int | None = None
    error: str = ""


def published() -> list[Published]:
    """Return the rows of the table in a fixed random order of their models."""
    with DATA.open() as file:
        rows = [
            Published(
                model=row["model"],
                image_size=int(row["img_size"]),
                layout=row["layout"],
                batch_size=int(row["largest_batch_of_ladder"]),
                samples_per_second=float(row["samples_per_s"]),
                parameters_millions=float(row["param_count_m"]),
            )
            for row in csv.DictReader(file)
        ]
    return sorted(rows, key=lambda row: (hashlib.sha1(row.model.encode()).hexdigest(), row.key))


def wrong_release() -> str | None:
    """Return why the models cannot be the published ones, and what to do; None if timm has the release of 2022."""
    release = provenance.versions("timm")["timm"]
    if release == RELEASE:
        return None
    return (
        f"timm {RELEASE} is required, this is {release}. Run `pip install --no-deps --target build/timm-2022 "
        f"timm=={RELEASE}`, and set PYTHONPATH=build/timm-2022."
    )


def family_of(model: str) -> str:
    """Return the module of timm that defines a model."""
    import timm

    return str(timm.model_entrypoint(model).__module__.removeprefix("timm.models."))


def predict(row: Published, traces: Path | None = None) -> Predicted:
    """Predict a row, on the published software: also eager kernels, and attention in separate operations.

    Call `run_as_in_2022` before.
    """
    os.environ |= {"CUDA_MODULE_LOADING": "EAGER", "TIMM_FUSED_ATTN": "0", "CUDA_VISIBLE_DEVICES": ""}
    warnings.simplefilter("ignore")  # of timm, about names of models
    import torch

    torch.set_num_threads(1)
    found = Predicted(
        model=row.model, image_size=row.image_size, layout=row.layout, family=family_of(row.model)
    )  # fmt: skip
    try:
        max_batch = _max_batch(row, traces)
    except Exception as error:  # of any model of timm
        return dataclasses.replace(found, error=f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return dataclasses.replace(
        found,
        expected=max_batch.batch_size,
        safe=max_batch.safe_batch_size,
        at_most=max_batch.most_batch_size or 0,
        hole=max_batch.hole,
    )


def _max_batch(row: Published, traces: Path | None) -> Any:
    from amp_track.config.job import Job
    from amp_track.memory_plan.fake_step import FakeStep
    from amp_track.memory_plan.gpus import gpu_named
    from amp_track.memory_plan.predict import Prediction
    from amp_track.memory_plan.replay import on_device
    from benchmarks.timm_2022 import PublishedModel, TrainedIn2022

    target = gpu_named(GPU).target()
    workload = PublishedModel(
        name=row.model,
        image_size=row.image_size,
        parameters_millions=row.parameters_millions,
        optimizer_name="sgd",
    )
    job = Job(
        workload=row.model, learning_rate=1e-3, batch_size=8, channels_last=row.layout == "channels_last"
    )  # fmt: skip
    trained: Any = TrainedIn2022(workload)
    step = FakeStep(job, trained, workload.example(2), as_cuda=True)
    known: dict[int, Any] = {}

    def trace_at(batch_size: int) -> Any:
        if batch_size not in known:
            file = traces and traces / f"{row.model}-{row.image_size}-{row.layout}-{batch_size}.pickle.z"
            if file and file.exists():
                trace = pickle.loads(zlib.decompress(file.read_bytes()))
            else:
                trace = step.trace("amp", batch_size)
                if file:
                    file.write_bytes(zlib.compress(pickle.dumps(trace), 3))
            if trace.recurrent:
                raise ValueError("a model with recurrent layers has no plan")
            known[batch_size] = on_device(trace.with_next_step(), target.kernels)
        return known[batch_size]

    return Prediction(trace_at).max_batch(target, most=4096)


def predictions() -> dict[tuple[str, int, str], Predicted]:
    """Return the predictions made so far."""
    if not PREDICTIONS.exists():
        return {}
    with PREDICTIONS.open() as file:
        rows = [row | {"hole": row["hole"] or None} for row in csv.DictReader(file)]
    return {each.key: each for each in TypeAdapter(list[Predicted]).validate_python(rows)}


def run(rows: Sequence[Published], *, processes: int, traces: Path | None) -> None:
    """Predict rows, and append each to the file."""
    from benchmarks.timm_2022 import run_as_in_2022

    names = [field.name for field in dataclasses.fields(Predicted)]
    is_new = not PREDICTIONS.exists()
    with PREDICTIONS.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if is_new:
            writer.writeheader()
        # Not a ProcessPoolExecutor, which waits for ever after max_tasks_per_child tasks (python/cpython#115634).
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(processes, run_as_in_2022, maxtasksperchild=_ROWS_OF_A_PROCESS) as pool:
            found = pool.imap_unordered(functools.partial(predict, traces=traces), rows)
            for done, each in enumerate(found, 1):
                writer.writerow(dataclasses.asdict(each))
                file.flush()
                print(f"{done}/{len(rows)} {each.model}", flush=True)


@dataclass(frozen=True)
class Compared:
    """A published row with its prediction."""

    row: Published
    found: Predicted

    @property
    def is_bracketed(self) -> bool:
        """Whether the table says that a batch failed."""
        return self.row.failed_batch_size is not None

    @property
    def verdict(self) -> str:
        """Return `inside`, `too low` or `too high`."""
        failed = self.row.failed_batch_size
        if self.found.expected < self.row.batch_size:
            return "too low"
        return "too high" if failed is not None and self.found.expected >= failed else "inside"


def summarize(compared: Sequence[Compared]) -> dict[str, Any]:
    """Return the shares of models that are inside, too high or too low, and the error rates of safe batches.

    A model counts once: its two memory layouts have nearly the same plan. It is wrong if one of its rows is.
    """
    known = [each for each in compared if each.is_bracketed and not each.found.error]
    models: dict[str, list[Compared]] = defaultdict(list)
    families: dict[str, list[Compared]] = defaultdict(list)
    for each in known:
        models[each.row.model].append(each)
        families[each.found.family].append(each)

    def rate(is_wrong: Callable[[Compared], bool]) -> dict[str, Any]:
        return _rate(sum(any(map(is_wrong, rows)) for rows in models.values()), len(models))

    positive = [each for each in known if each.found.expected]
    mean, spread = _error(positive) if positive else (None, None)
    lower_bounds = [each for each in compared if not each.is_bracketed and not each.found.error]
    return {
        "rows": len(known),
        "models": len(models),
        "rows_inside": sum(each.verdict == "inside" for each in known),
        "expected_too_high": rate(lambda each: each.verdict == "too high"),
        "expected_too_low": rate(lambda each: each.verdict == "too low"),
        "mean_ln_error": mean,
        "spread_ln_error": spread,
        "safe_fails": rate(lambda each: each.found.safe >= (each.row.failed_batch_size or math.inf)),
        "safe_more_than_10_percent_below_a_batch_that_ran": rate(
            lambda each: each.found.safe < 0.9 * each.row.batch_size
        ),
        "safe_below_85_percent_of_a_batch_that_ran": rate(lambda each: each.found.safe < 0.85 * each.row.batch_size),
        "at_most_exceeded": rate(lambda each: each.found.at_most < each.row.batch_size),
        "safe_by_expected": statistics.median(each.found.safe / each.found.expected for each in positive)
        if positive
        else None,
        "rows_with_holes": sum(each.found.hole is not None for each in known),
        "rows_at_512": len(lower_bounds),
        "of_those_predicted_below_512": sum(each.verdict == "too low" for each in lower_bounds),
        "not_planned": sorted({f"{each.row.model}: {each.found.error}" for each in compared if each.found.error}),
        "families": {
            family: [sum(each.verdict == "inside" for each in of_family), len(of_family)]
            for family, of_family in sorted(families.items())
        },
        "misses": [
            [
                *each.row.key,
                each.row.batch_size,
                each.row.failed_batch_size,
                each.found.expected,
                each.found.safe,
                each.found.family,
            ]
            for each in known
            if each.verdict != "inside"
        ],
    }


def _rate(count: int, total: int) -> dict[str, Any]:
    """Return a share with its exact 95 % confidence interval (Clopper and Pearson, 1934)."""
    if not total:
        return {"count": 0, "of": 0, "low": 0.0, "high": 1.0}
    interval = stats.binomtest(count, total).proportion_ci(0.95, method="exact")
    return {"count": count, "of": total, "low": round(interval.low, 4), "high": round(interval.high, 4)}


def _error(known: Sequence[Compared]) -> tuple[float, float]:
    """Return mean and standard deviation of ln(predicted / true), a normal variable known within brackets.

    By maximum likelihood. A bracket that is missed for another cause than the plan's error would dominate a normal
    distribution, so each row has a chance of 5 % of any error.
    """
    upper = [math.log(each.found.expected / each.row.batch_size) for each in known]
    lower = [math.log(each.found.expected / (each.row.failed_batch_size or math.inf)) for each in known]

    def cost(values: Any) -> float:
        mean, spread = values[0], math.exp(values[1])
        inside = stats.norm.cdf(upper, mean, spread) - stats.norm.cdf(lower, mean, spread)
        return float(-sum(math.log(0.95 * each + 0.05 * 0.1) for each in inside))

    found = optimize.minimize(cost, [0.0, math.log(0.03)], method="Nelder-Mead")
    return round(float(found.x[0]), 4), round(math.exp(float(found.x[1])), 4)


def rows_to_predict(models: int | None) -> Iterator[Published]:
    """Yield the rows whose model timm has, of all models or of the first ones."""
    import timm

    chosen: dict[str, None] = {}
    for row in published():
        if timm.is_model(row.model) and (models is None or len(chosen | {row.model: None}) <= models):
            chosen[row.model] = None
            yield row


def table(summary: dict[str, Any]) -> str:
    """Return the error rates of predictions, and the rest of the summary in sentences."""
    names = {
        "expected_too_high": "expected batch too high",
        "expected_too_low": "expected batch too low",
        "safe_fails": "safe batch that failed",
        "safe_more_than_10_percent_below_a_batch_that_ran": "safe batch more than 10 % below one that ran",
        "safe_below_85_percent_of_a_batch_that_ran": "safe batch more than 15 % below one that ran",
        "at_most_exceeded": "at-most batch below one that ran",
    }
    rates = [(shown, summary[name]) for name, shown in names.items()]
    rows = [
        [shown, f"{found['count']} of {found['of']}", f"{found['low']:.1%} to {found['high']:.1%}"]
        for shown, found in rates
    ]
    torch = summary["versions"]["torch"].partition("+")[0]
    mean, spread = f"{math.exp(summary['mean_ln_error']) - 1:+.1%}", f"{summary['spread_ln_error']:.1%}"
    safe = f"{summary['safe_by_expected']:.0%}"
    text = (
        f"\n\n*timm {summary['versions']['timm']}, torch {torch}, {summary['date']}*\n\n"
        f"In {summary['rows_inside']} of {summary['rows']} rows the expected batch lies between the one that ran and "
        f"the one that failed.\nIt differs from the true one by {mean} on average, with a spread of {spread} (maximum "
        f"likelihood, from the brackets).\nA safe batch is {safe} of the expected one in the median. "
        f"{summary['rows_with_holes']} rows have a batch within a tenth below that is\npredicted not to fit."
    )
    if at_the_end := summary["rows_at_512"]:
        below = summary["of_those_predicted_below_512"]
        text += f"\n\nOf {at_the_end} rows at the end of the ladder, 512, {below} are predicted below it."
    return markdown.table(["at one of two memory layouts", "models", "95 % interval"], rows) + text


def misses(summary: dict[str, Any]) -> str:
    """Return how far the predictions outside of their brackets are off, and the families with the most of them."""
    above = [expected / failed - 1 for *_, failed, expected, _, _ in summary["misses"] if expected >= failed]
    below = [1 - expected / ran for *_, ran, _, expected, _, _ in summary["misses"] if expected < ran]
    near, far = sum(each <= 0.04 for each in above), sum(each > 0.2 for each in above)
    most_above, most_below = (max(each, default=0.0) for each in (above, below))
    families = [
        f"{family} {inside} of {total}"
        for family, (inside, total) in sorted(summary["families"].items(), key=lambda one: one[1][0] / one[1][1])
        if inside <= _MANY_MISSES * total
    ]
    return (
        f"Of {len(above)} rows that are too high, {near} are at most 4 % above the batch that failed, {far} by more\n"
        f"than 20 % ({most_above:.0%} at most). Of {len(below)} that are too low, "
        f"{sum(each <= 0.06 for each in below)} are at most 6 % below the one that ran ({most_below:.0%} at most).\n"
        f"Fewest rows inside, by module of timm: {', '.join(families)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=int, help="predict only this many models; writes no summary")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--traces", type=Path, help="keep traces in this folder")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of timm, about names of models
    if (problem := wrong_release()) is not None:
        parser.error(problem)
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    rows = list(rows_to_predict(options.models))
    known = predictions()
    missing = [row for row in rows if row.key not in known]
    missing.sort(key=lambda row: row.failed_batch_size is None)  # those say less
    run(missing, processes=options.processes, traces=options.traces)
    known = predictions()
    summary = summarize([Compared(row, known[row.key]) for row in rows if row.key in known])
    record = {
        "date": datetime.date.today().isoformat(),
        "versions": provenance.versions("torch", "timm"),
        "published": f"{len(published())} rows",
        **summary,
    }
    if options.models is None:
        provenance.write("plan-validation", record)
    print(table(record), misses(record), sep="\n\n")


if __name__ == "__main__":
    main()
