"""The types of Optuna that the commands hold, so that only this folder imports optuna."""

from __future__ import annotations

from optuna import Study, Trial
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import RDBStorage

__all__ = [
    "BaseDistribution",
    "CategoricalDistribution",
    "FloatDistribution",
    "IntDistribution",
    "RDBStorage",
    "Study",
    "Trial",
]
