"""Keep what optuna-dashboard shows of a study beside its trials: notes, pictures, the edges of each precision apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from amp_track.report.page.render import dashboard_markdown
from amp_track.report.summary import Result, proof
from amp_track.results.compare import CompareResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult
from amp_track.session.study_session import Studies

if TYPE_CHECKING:
    from amp_track.study.types import Study


def show_max_batches(studies: Studies, study: Study, *, limit_bytes: int, most: int) -> None:
    """Show the search of each precision, as far as it has come, as a study of its own.

    Args:
        studies: of the command.
        study: NAME/max-batch.
        limit_bytes: the memory that a job may take.
        most: the largest batch worth trying.
    """
    from amp_track.study import views

    with studies.alone("views"):
        views.show_by_precision(study, most=most, limit_bytes=limit_bytes)


def note_proofs(studies: Studies, fitted: MaxBatchResult) -> None:
    """Write on each precision's study how its edge is proven."""
    _note(studies, {f"max-batch/{name}": proof(name, found) for name, found in fitted.precisions.items()})


def note_answer(studies: Studies, result: Result, *, parts: tuple[str, ...]) -> None:
    """Write the answer as the note on parts of a study, and on its precisions, each with its proof first."""
    text = dashboard_markdown(result, ui=studies.session.ui)
    texts = dict.fromkeys(parts, text)
    if not isinstance(result, CompareResult):
        fitted = result.limits if isinstance(result, SearchResult) else result
        of_view = dashboard_markdown(result, ui=studies.session.ui, is_view=True)
        texts |= {
            f"max-batch/{name}": f"{proof(name, found)}\n\n{of_view}" for name, found in fitted.precisions.items()
        }
    _note(studies, texts)


def _note(studies: Studies, texts: Mapping[str, str]) -> None:
    """Write notes on parts of a study, by their name; a part that is not there gets none."""
    from amp_track.study import notes

    with studies.alone("views"):  # else the pieces of two search workers' notes may mix
        for part, text in texts.items():
            study = studies.existing(part)
            if study is not None:
                notes.note_on(study, text)


def show_plots(studies: Studies, part: str, run_id: str, *, trials: Mapping[int, str]) -> None:
    """Show the picture of a study and those of its best trainings, which are in MLflow.

    Args:
        studies: of the command.
        part: `train` or `compare`.
        run_id: of the run that stands for the study.
        trials: those of the trainings, by the number of their trial. What a server has yet to make is left to the next
            command.
    """
    from amp_track.study import notes
    from amp_track.tracking.outbox_sender import is_key

    study = studies.existing(part)
    if study is not None and not is_key(run_id):
        made = {number: of_trial for number, of_trial in trials.items() if not is_key(of_trial)}
        with studies.alone("views"):
            notes.show_plots(study, run_id, made)
