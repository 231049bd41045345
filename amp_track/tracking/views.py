"""Define charts of a study's trainings in MLflow's UI, as a "shared view" with a URL.

A shared view is a tag of the experiment, and not part of MLflow's API. Its names are the same in the UI of all releases
from 3.10 to 3.18. If they change, the URL shows the default charts of all runs. A URL with a filter shows no view, so
the filter is part of the view, and each study has one view.
"""

from __future__ import annotations

import json
from typing import Any

from amp_track.records import metrics

_TAG = "mlflow.sharedViewState."
_SECTION = "amp_track"
_MOST_RUNS = 100
"""Maximum number of runs in one chart."""
_SPEED, _MEMORY, _SECONDS = "throughput/samples_per_s", "memory/max_reserved_mib", "time/wall_s"


def tag_name(run_id: str) -> str:
    """Return the name of the tag that holds the view of a study."""
    return _TAG + run_id


def of_trainings(run_id: str, *, batches_differ: bool) -> str:
    """Return the view of the trainings under a study's run: speed and memory first, then the loss.

    Args:
        run_id: the id of the study's run.
        batches_differ: whether to plot over the batch size instead of bars.
    """
    batch_size = {"key": "batch_size", "type": "PARAM"}
    over_batches = [_scatter(batch_size, _metric(_SPEED)), _scatter(batch_size, _metric(_MEMORY))]
    alike = [_bars(_SPEED), _bars(_MEMORY)]
    charts = [*(over_batches if batches_differ else alike), _scatter(_metric(_SECONDS), _metric(metrics.EVAL_LOSS))]
    return json.dumps(
        {
            "searchFilter": f"tags.`mlflow.parentRunId` = '{run_id}' AND tags.`amp_track.kind` = 'train'",
            "orderByKey": f"metrics.`{_SPEED}`",  # by time, the UI folds children under their parent
            "orderByAsc": False,
            "runsHiddenMode": "SHOWALL",  # the default is ten
            "compareRunCharts": [_placed(number, chart) for number, chart in enumerate(charts)],
            "compareRunSections": [
                {"uuid": _SECTION, "name": "Speed, memory, loss", "display": True, "isReordered": False}
            ],
            "isAccordionReordered": True,
        }
    )


def _placed(number: int, chart: dict[str, Any]) -> dict[str, Any]:
    shown = {"deleted": False, "isGenerated": False, "runsCountToCompare": _MOST_RUNS}
    return {"uuid": f"{_SECTION}-{number}", "metricSectionId": _SECTION, **shown, **chart}


def _metric(name: str) -> dict[str, str]:
    return {"key": name, "type": "METRIC"}


def _scatter(across: dict[str, str], up: dict[str, str]) -> dict[str, Any]:
    return {"type": "SCATTER", "xaxis": across, "yaxis": up}


def _bars(metric: str) -> dict[str, Any]:
    return {"type": "BAR", "metricKey": metric}
