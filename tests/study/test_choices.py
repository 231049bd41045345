"""A study made with other precisions is rejected in one line. Real studies in real SQLite."""

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from amp_track.config.job import Job
from amp_track.config.precisions import PRECISIONS
from amp_track.records.errors import BadInput
from amp_track.study.grid import Grid, Point
from amp_track.study.search import Space, TrainingSearch

URL = "sqlite:///optuna.db"
FEWER = PRECISIONS[:-1]
REJECTED = r'^Study "old/[a-z-]+" was created with the choices {} of precision, .* needs {}\. Use another --study\.$'


def made_with(part: str, choices: tuple[str, ...], *, objectives: int = 1) -> optuna.Study:
    """A study that holds one finished trial, drawn from `choices`."""
    study = optuna.create_study(study_name=f"old/{part}", storage=URL, directions=["maximize"] * objectives)
    study.add_trial(
        create_trial(
            state=TrialState.COMPLETE,
            values=[1.0] * objectives,
            params={"precision": choices[0]},
            distributions={"precision": CategoricalDistribution(choices)},
        )
    )
    return study


def test_optuna_alone_raises_a_bare_value_error() -> None:
    """Should Optuna change this, the check can go."""
    study = made_with("max-batch", FEWER)
    with pytest.raises(ValueError, match="does not support dynamic value space"):
        study.ask().suggest_categorical("precision", PRECISIONS)


def test_a_search_inside_other_max_batches_is_rejected() -> None:
    study = made_with("train", ("fp32",), objectives=2)
    space = Space(max_batches={"fp32": 8, "bf16": 16}, reference_batch_size=4)
    with pytest.raises(BadInput, match=REJECTED.format("fp32", "fp32, bf16")):
        TrainingSearch(study=study, space=space, job=Job(), trials=2, higher_is_better=True).check_choices()
    assert len(study.trials) == 1


def test_seeds_at_other_precisions_are_rejected() -> None:
    study = made_with("seeds", ("fp32",))
    points: list[Point] = [{"precision": name, "seed": 0} for name in ("fp32", "bf16")]
    distributions = {"precision": CategoricalDistribution(("fp32", "bf16")), "seed": IntDistribution(0, 0)}
    with pytest.raises(BadInput, match=REJECTED.format("fp32", "fp32, bf16")):
        Grid(study=study, points=points, distributions=distributions, objective="metric").check_choices()
    assert len(study.trials) == 1
