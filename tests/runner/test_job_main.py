"""The job process."""

import pytest
import torch

from amp_track.runner.job_main import remember_that_there_is_no_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, of which torch keeps the number itself")
def test_a_missing_gpu_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: asked.append(1) or -1)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    remember_that_there_is_no_gpu()
    before = len(asked)
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert len(asked) == before
