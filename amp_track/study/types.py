"""Export the types of Optuna that other packages need, so that only study/ imports optuna."""

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
