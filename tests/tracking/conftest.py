import mlflow
import pytest
from support import stores


@pytest.fixture
def client(fresh_stores: None) -> mlflow.MlflowClient:
    """Return a client of the tracking store in the folder of the test."""
    return mlflow.MlflowClient(tracking_uri=stores()["tracking_uri"])
