"""The picture that a run is known by."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
from support import stores

from amp_track.tracking.lookup import open_plot


@pytest.mark.usefixtures("fresh_stores")
def test_a_study_is_known_by_its_search_and_a_training_by_its_curves(tmp_path: Path) -> None:
    uri = stores()["tracking_uri"]
    client = mlflow.MlflowClient(tracking_uri=uri)
    run_id = client.create_run("0").info.run_id
    with pytest.raises(FileNotFoundError, match="has no plot"):
        open_plot(uri, run_id)
    for name in ("curves.png", "search.png"):
        (tmp_path / name).write_bytes(name.encode())
        client.log_artifact(run_id, str(tmp_path / name))
        assert open_plot(uri, run_id).read() == name.encode()
    with pytest.raises(FileNotFoundError, match="has no plot"):
        open_plot(uri, "f" * 32)
