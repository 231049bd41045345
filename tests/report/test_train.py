import dataclasses

from table_samples import TABLES, TRAIN

from amp_track.records.result import JobResult, JobStatus
from amp_track.report.train import blocks


def test_a_training_is_reported_in_order() -> None:
    assert blocks(TRAIN, see_with="mlflow ui", ui="http://ui") == [
        "amp  batch 4096   fits  72 GiB  1,234,567 samples/s  accuracy 0.9200 after 12,328 optimizer steps",
        "scale 65536 -> 16384, 17 of 12345 steps skipped",
        "· lower --lr, the loss is <inf> & rising",
        TABLES["diagnosis"],
        "MLflow run run; see it with: mlflow ui",
        "  http://ui/#/experiments/1/runs/run?workflowType=machine_learning",
    ]


def test_what_there_was_not_is_not_mentioned() -> None:
    job_result = JobResult(status=JobStatus.FITS, steps=10, samples_per_second=5.0)
    plain = dataclasses.replace(TRAIN, job_result=job_result, advice=())
    assert blocks(plain, see_with="http://localhost", ui="http://localhost") == [
        "amp  batch 4096   fits  5 samples/s",
        "MLflow run run; see it with: http://localhost",
        "  http://localhost/#/experiments/1/runs/run?workflowType=machine_learning",
    ]


def test_a_training_that_waited_for_data_says_so_in_its_line() -> None:
    waiting = dataclasses.replace(TRAIN.job_result, waited_seconds=617.25)
    assert "50% of the time waiting for data" in str(
        blocks(dataclasses.replace(TRAIN, job_result=waiting), see_with="", ui="")[0]
    )
    little = dataclasses.replace(TRAIN.job_result, waited_seconds=200.0)
    assert "waiting" not in str(blocks(dataclasses.replace(TRAIN, job_result=little), see_with="", ui="")[0])
