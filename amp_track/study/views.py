"""Copy the study `NAME/max-batch` into one study per precision, such as `NAME/max-batch/bf16`.

optuna-dashboard shows one best value and one history per study. They are only useful for a single precision, where they
show how its bracket closes. amp_track never reads these copies.
"""

from __future__ import annotations

import optuna
from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, TrialState

from amp_track.results.trial_row import TrialRow
from amp_track.study import optuna_internals
from amp_track.study.max_batches import memory_violation, probe_results
from amp_track.study.notes import mebibytes

_TRIAL = "trial of the search"


def show_by_precision(study: optuna.Study, *, most: int, limit_bytes: int) -> None:
    """Copy the finished trials of a max-batch study that have not been copied yet.

    Args:
        study: NAME/max-batch. No other search worker may copy at the same time.
        most: the largest batch size to try.
        limit_bytes: the memory that a job may take.
    """
    found = probe_results(study.get_trials(deepcopy=False))
    for precision in dict.fromkeys(probe.precision for probe in found):
        view = optuna.create_study(
            study_name=f"{study.study_name}/{precision}",
            storage=optuna_internals.storage_of(study),
            direction="maximize",
            load_if_exists=True,
        )
        if view.metric_names is None:
            view.set_metric_names(["max batch"])
        known = {trial.user_attrs.get(_TRIAL) for trial in view.get_trials(deepcopy=False)}
        own = [probe for probe in found if probe.precision == precision and probe.number not in known]
        view.add_trials([_copy(probe, most=most, limit_bytes=limit_bytes) for probe in own])


def _copy(probe: TrialRow, *, most: int, limit_bytes: int) -> FrozenTrial:
    """Return a probe as a trial with columns for display."""
    job_result = probe.job_result
    columns: dict[str, str | float | int | None] = {
        _TRIAL: probe.number,
        "kind": probe.kind,
        "reason": probe.reason,
        "status": job_result.ended,
        "predicted MiB": mebibytes(probe.predicted_bytes),
        "peak MiB": mebibytes(job_result.peak_bytes),
        "samples/s": round(job_result.samples_per_second) if job_result.samples_per_second else None,
        "message": job_result.message.partition("\n")[0] or None,
        "MLflow run": probe.run_id,
    }
    return optuna.trial.create_trial(
        state=TrialState.COMPLETE,
        value=float(probe.batch_size if job_result.fits else 0),
        params={"batch_size": probe.batch_size},
        distributions={"batch_size": IntDistribution(1, max(most, probe.batch_size), log=True)},
        user_attrs=columns,
        system_attrs=optuna_internals.dashboard_constraint(memory_violation(job_result, limit_bytes)),
    )
