"""Every table of a report, as wide as it gets: long names, large numbers, every optional column."""

from __future__ import annotations

import dataclasses

from amp_track.batch_search.search import MaxBatch
from amp_track.config.inspection import Inspection
from amp_track.config.job import Job
from amp_track.config.values import Tolerance
from amp_track.records.dtypes import CAST, LOSS, DtypesReport, OperationDtypes
from amp_track.records.hardware import Hardware
from amp_track.records.result import Diagnosis, JobResult, JobStatus, LayerSummary, ScaleReport
from amp_track.report.compare import table
from amp_track.report.dtypes import dtypes_table
from amp_track.report.max_batch import max_batch_table
from amp_track.report.search import search_table, seeds_table
from amp_track.report.train import diagnosis_table
from amp_track.results.compare import Cell, CompareResult
from amp_track.results.equivalence import SeedsResult
from amp_track.results.max_batch import MaxBatchResult, PrecisionResult
from amp_track.results.search import SearchResult
from amp_track.results.train import TrainResult
from amp_track.results.trial_row import TrialRow

GIBIBYTE = 2**30
CPU = "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"
TF32 = "needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer; this is a CPU"
LAYER = "encoder.layers.encoder_layer_{}.self_attention.out_proj"
QUALITIES = {"fp32": 0.9, "tf32": 0.91, "amp": 0.92, "bf16": 0.89}
SPREAD = {"fp32": 0.0, "tf32": 0.0, "amp": 0.001, "bf16": 0.02}
SCALE = ScaleReport(initial=65536, final=16384, history=((0, 65536), (1, 32768), (2, 16384), (1380, 16384)))
JOB = Job(
    workload="experiments/caltech256.py", batch_size=4096, epochs=12, learning_rate=0.1,
    memory_budget_bytes=79 * GIBIBYTE,
)  # fmt: skip


def training(precision: str, *, seed: int = 0) -> JobResult:
    return JobResult(
        status=JobStatus.FITS, steps=12_345, skipped_steps=17, samples_per_second=1_234_567.0 + 100 * seed,
        eval_samples_per_second=2_345_678.0, train_seconds=1234.5, train_peak_allocated_bytes=71 * GIBIBYTE,
        peak_bytes=72 * GIBIBYTE, eval_peak_allocated_bytes=int(1.53 * GIBIBYTE),
        metric=QUALITIES[precision] + (0.001 + SPREAD[precision]) * seed, scale=SCALE if precision == "amp" else None,
    )  # fmt: skip


def fitted(batch_size: int, phase: str) -> PrecisionResult:
    return PrecisionResult(
        max_batch=MaxBatch(batch_size, batch_size + 1, "memory"), probes=31, at_max_batch=training("amp"), run_id="run",
        confirmation=training("amp"), failure=JobResult(status=JobStatus.OOM, phase=phase),
        max_multiple=batch_size // 24 * 24, readings={512: (1_230_000.0,), 4096: (1_234_567.0,)},
    )  # fmt: skip


FIT = MaxBatchResult(
    study="digits", run_id="parent", experiment_id="1",
    job=JOB, hardware=Hardware(kind="cpu", name=CPU), skipped={"tf32": TF32},
    precisions={
        "fp32": fitted(10_949, "evaluation"),
        "amp": dataclasses.replace(
            fitted(13_333, "backward"), max_batch=MaxBatch(13_333, None, "max_batch_size"), failure=None
        ),
        "bf16": PrecisionResult(
            max_batch=MaxBatch(0, 1, "memory"), probes=1, at_max_batch=None, run_id=None, bytes_needed=GIBIBYTE
        ),
    },
    multiple_of=24, effective_batch_size=109_440, headroom_bytes=GIBIBYTE,
)  # fmt: skip
SEEDS = SeedsResult(
    job=JOB, seeds=3, tolerance=Tolerance(fraction=0.01),
    trainings=tuple(
        TrialRow(batch_size=16,
            precision=precision, seed=seed, job_result=training(precision, seed=seed), run_id=f"{precision}{seed}"
        )
        for precision in ("fp32", "amp", "bf16") for seed in range(3)
    ),
)  # fmt: skip
SEARCH = SearchResult(
    limits=FIT, metric_name="accuracy", higher_is_better=True, workload_batch_size=64, pareto=(0,), seeds=SEEDS,
    trials=tuple(
        TrialRow(
            number=number, precision=precision, batch_size=batch_size, learning_rate=0.1, run_id=f"trial{number}",
            job_result=dataclasses.replace(training(precision), steps=steps),
        )
        for number, (precision, batch_size, steps) in enumerate(
            [("fp32", 64, 138_000), ("fp32", 10_949, 900), ("amp", 128, 69_000)]
        )
    ),
)  # fmt: skip


def comparison(option: str | None) -> CompareResult:
    values = ("16", "1024") if option is not None else ("",)
    return CompareResult(
        study="s", run_id="parent", experiment_id="1", job=JOB, hardware=Hardware(kind="cpu", name=CPU),
        metric_name="accuracy", option=option,
        values=values, precisions=tuple(QUALITIES), skipped={}, seeds=3, tolerance=Tolerance(fraction=0.01),
        cells=tuple(
            Cell(
                value=value, precision=precision,
                trainings=tuple(
                    TrialRow(batch_size=16,
                        precision=precision, seed=seed, run_id=f"{value}{precision}{seed}",
                        job_result=JobResult(status=JobStatus.OOM, phase="evaluation")
                        if (value, precision, seed) == ("1024", "bf16", 2) else training(precision, seed=seed),
                    )
                    for seed in range(3)
                ),
            )
            for value in values for precision in QUALITIES
        ),
    )  # fmt: skip


COMPARE = comparison("activation_width")
DTYPES = DtypesReport(
    workload="experiments/caltech256.py", precision="amp", batch_size=2, hardware=Hardware(kind="cpu", name=CPU),
    operations=tuple(
        OperationDtypes(
            layer=layer, in_pass=in_pass, operation=operation, parameter="weight" if operation == CAST else "",
            inputs=("bfloat16", "float32"), output="bfloat16", count=count,
        )
        for layer, in_pass, operation, count in [
            *((LAYER.format(number), in_pass, operation, 1) for number in range(12) for in_pass, operation in
              [("forward", CAST), ("forward", "addmm"), ("backward", "mm"), ("backward", "native_norm_backward")]),
            ("features.denseblock1.denselayer1.norm1", "forward", "_scaled_dot_product_flash_attention_for_cpu", 1200),
            (LOSS, "loss", "nll_loss", 1),
        ]
    ),
)  # fmt: skip
DIAGNOSIS = Diagnosis(
    every=100, steps=12, seconds=0.1,
    layers=(
        LayerSummary(layer=LAYER.format(11), has_gradients=True, non_finite=0.0123, underflowing=1.0, zero=0.5,
                     largest_output=123456.0),
        LayerSummary(layer="features.denseblock1.denselayer1.norm1", has_gradients=False, non_finite=0.0,
                     underflowing=0.0, zero=0.0),
    ),
)  # fmt: skip
TRAIN = TrainResult(
    run_id="run", experiment_id="1", job=dataclasses.replace(JOB, precision="amp"),
    job_result=dataclasses.replace(training("amp"), diagnosis=DIAGNOSIS),
    inspection=Inspection(
        device="cpu", hardware=Hardware(kind="cpu", name=CPU), free_bytes=1, budget_support=None, precisions=(),  # type: ignore[arg-type]
        workload_name="Caltech", workload_digest="", batch_size=64, epochs=1, learning_rate=0.1, num_workers=0,
        options=(), metric_name="accuracy", higher_is_better=True, training_samples=1, evaluation_samples=1,
        dataset_digest="", versions=(),
    ),
    advice=("lower --lr, the loss is <inf> & rising",),
)  # fmt: skip

TABLES = {
    "max-batch": max_batch_table(FIT),
    "search": search_table(SEARCH),
    "seeds": seeds_table(SEEDS, "accuracy", where="activation_width=1024"),
    "compare": table(COMPARE),
    "compare without an option": table(comparison(None)),
    "dtypes": dtypes_table(DTYPES),
    "diagnosis": diagnosis_table(DIAGNOSIS),
}
