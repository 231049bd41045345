"""The examples of trainings that are already written: each is probed with its real library."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import MEBIBYTE, ROOT

from amp_track.config.inspection import resolve
from amp_track.config.job import Job
from amp_track.records.result import JobStatus
from amp_track.runner.runner import JobRunner

EXAMPLES = ROOT / "experiments" / "bring_your_own"
LIGHTNING = {"module": "lightning_module:Classifier", "data": "lightning_module:Images"}
TRANSFORMERS = {"trainer": "transformers_trainer:make_trainer"}


def probe(runner: JobRunner, reference: str, options: dict[str, str], **settings: object) -> Job:
    asked = {"precision": "fp32", "batch_size": 8, "probe": True, "memory_budget_bytes": 256 * MEBIBYTE} | settings
    job = Job(workload=reference, device="cpu", options=tuple(options.items()), **asked)
    return resolve(job, runner.inspect(job))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("reference", "options", "most"),
    [
        ("plain_loop:train_steps", {"width": "8"}, 2000),
        ("gan:train", {}, 10**6),
        ("variable_length:train", {}, 2000),
        ("timm_model:train_steps", {"model": "resnet18", "image_size": "32", "classes": "10"}, 10**5),
        ("amp_track.integrations.lightning:fit", LIGHTNING, 2000),
        ("amp_track.integrations.transformers:train", TRANSFORMERS, 3000),
    ],
)
def test_an_example_fits_and_a_huge_batch_does_not(
    runner: JobRunner,
    monkeypatch: pytest.MonkeyPatch,
    reference: str,
    options: dict[str, str],
    most: int,
    precision: str,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(EXAMPLES)
    job_result = runner.run(probe(runner, reference, options, precision=precision))
    assert job_result.status is JobStatus.FITS, job_result
    assert job_result.steps >= 3
    small = {"batch_size": most, "memory_budget_bytes": 128 * MEBIBYTE}
    assert runner.run(probe(runner, reference, options, precision=precision, **small)).status is JobStatus.OOM


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_a_budget_too_small_for_a_gpu_is_given_with_the_cpu(file: Path) -> None:
    text = file.read_text()
    assert "64MiB" not in text or "--device cpu" in text or 'device="cpu",' in text


@pytest.mark.nightly
def test_an_integration_is_identified_by_the_users_files(runner: JobRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    job = probe(runner, "amp_track.integrations.transformers:train", TRANSFORMERS)
    found = runner.inspect(job)
    assert found.workload_imports is not None
    assert any(name.endswith("transformers_trainer.py") for name in found.workload_imports)
