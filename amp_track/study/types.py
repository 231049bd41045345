"""The types of Optuna that the commands hold, so that only this folder imports optuna."""

from __future__ import annotations

from optuna import Study, Trial
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from amp_track.study.opening import Storage
from amp_track.study.storage import Direction

__all__ = [
    "BaseDistribution",
    "CategoricalDistribution",
    "Direction",
    "FloatDistribution",
    "IntDistribution",
    "Storage",
    "Study",
    "Trial",
]
