"""The result of one training as lines and tables."""

from __future__ import annotations

from amp_track.records.diagnosis import Diagnosis
from amp_track.report import links, progress
from amp_track.report.table import Column, Table
from amp_track.report.wording import UNKNOWN, counted
from amp_track.results.train import TrainResult


def blocks(result: TrainResult, *, see_with: str, ui: str) -> list[str | Table]:
    """Return the output of `train` in order: lines, advice, the diagnosis table, and the links to MLflow.

    Args:
        result: the result of the training.
        see_with: the command that starts MLflow's UI.
        ui: the URL of that UI.
    """
    advice = [f"· {line}" for line in result.advice]
    where = f"MLflow run {result.run_id}; see it with: {see_with}"
    page = f"  {links.run(ui, result.experiment_id, result.run_id)}"
    return [*lines(result), *advice, *tables(result), where, page]


def lines(result: TrainResult) -> list[str]:
    """Return one line for the job result, and one for the GradScaler if there was one."""
    job_result = result.job_result
    shown = [progress.job_result_line(result.job, job_result, metric_name=result.inspection.metric_name)]
    if (scale := job_result.scale) is not None:
        skipped = f"{job_result.skipped_steps} of {job_result.steps} steps skipped"
        shown.append(f"scale {scale.initial:g} -> {scale.final:g}, {skipped}")
    return shown


def tables(result: TrainResult) -> list[Table]:
    """Return the diagnosis table, if there is one."""
    diagnosis = result.job_result.diagnosis
    return [diagnosis_table(diagnosis)] if diagnosis is not None else []


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """Return a table with one row per layer, over all diagnosed steps."""
    headings = ("non-finite", "underflowing", "zero", "largest\noutput")
    rows = []
    for layer in diagnosis.layers:
        fractions = [f"{fraction:.2%}" for fraction in (layer.non_finite, layer.underflowing, layer.zero)]
        largest = f"{layer.largest_output:.4g}" if layer.largest_output is not None else UNKNOWN
        rows.append((layer.layer, *(fractions if layer.has_gradients else [UNKNOWN] * 3), largest))
    return Table(
        title=f"gradient statistics by layer, over {counted(diagnosis.steps, 'step')} (one in {diagnosis.every})",
        columns=(Column("layer", key=True), *(Column(heading, right=True) for heading in headings)),
        sections=(tuple(rows),),
    )
