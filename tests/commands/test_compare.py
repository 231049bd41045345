"""What `compare` makes of a device: one training per precision, value and seed; the device is simulated."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import pytest
from simulated import SimulatedRunner
from support import DIGITS, MEBIBYTE, client, request

from amp_track.commands.compare import compare
from amp_track.config.job import Job
from amp_track.config.options import CompareOptions, Request
from amp_track.records.errors import BadInput, NothingFits
from amp_track.records.result import JobResult, JobStatus

pytestmark = pytest.mark.usefixtures("fresh_stores")


def asked(
    *precisions: str,
    vary: tuple[str, tuple[str, ...]] | None = None,
    job: dict[str, Any] | None = None,
    **options: Any,
) -> Request:
    return request(
        Job(workload=DIGITS, **(job or {})),
        precisions=precisions or ("fp32", "bf16"),
        compare_options=CompareOptions(vary=vary),
        **options,
    )


@pytest.mark.slow
def test_values_are_trained_in_order_and_added_to_what_is_known() -> None:
    runner = SimulatedRunner(streams=True)
    first = compare(asked(vary=("width", ("8", "4")), study="w"), runner=runner)
    assert [(cell.value, cell.precision) for cell in first.cells] == [
        ("4", "fp32"), ("4", "bf16"), ("8", "fp32"), ("8", "bf16"),
    ]  # fmt: skip
    assert [dict(job.options)["width"] for job in runner.jobs] == ["4", "4", "8", "8"]
    assert first.speedups("bf16") == [3.0, 3.0]
    assert first.answers == ("bf16 is faster than fp32 from width=4 on (3 ×; 3 × at width=8)",)

    more = SimulatedRunner()
    second = compare(asked(vary=("width", ("4", "8", "016")), seeds=2, study="w"), runner=more)
    assert second.run_id == first.run_id
    known = {(dict(job.options)["width"], job.precision, job.seed) for job in runner.jobs}
    new = [(dict(job.options)["width"], job.precision, job.seed) for job in more.jobs]
    assert len(new) == len(set(new)) == 12 - 4
    assert not known & set(new)
    assert second.values == ("4", "8", "16")

    for cell in first.cells:
        kept = client().list_artifacts(cell.trainings[0].run_id)
        assert [item.path for item in kept] == ["curves.png"]
    artifacts = {item.path for item in client().list_artifacts(first.run_id)}
    assert artifacts == {"compare.json", "compare.png", "report.html", "report.md"}


def test_out_of_memory_is_a_result_and_nothing_else_is_none() -> None:
    tight = {"memory_budget_bytes": 4 * MEBIBYTE, "batch_size": 80}
    result = compare(asked(job=tight), runner=SimulatedRunner())
    assert {cell.precision: cell.status for cell in result.cells} == {"fp32": "oom", "bf16": "fits"}
    with pytest.raises(NothingFits, match=r"no training of this comparison fits at batch 4000 \(oom\)"):
        compare(asked(job=tight | {"batch_size": 4000}), runner=SimulatedRunner())


def test_a_training_given_up_is_tried_again_with_more_time() -> None:
    def hangs(job: Job) -> JobResult | None:
        slow = job.precision == "bf16" and job.job_timeout_seconds == 1.0
        return JobResult(status=JobStatus.TIMED_OUT, message="gave up", wall_seconds=1.0) if slow else None

    short = compare(asked(job={"job_timeout_seconds": 1.0}, study="t"), runner=SimulatedRunner(fails=hangs))
    assert [cell.status for cell in short.cells] == ["fits", "timed_out"]
    idle = SimulatedRunner(fails=hangs)
    compare(asked(job={"job_timeout_seconds": 1.0}, study="t"), runner=idle)
    assert idle.jobs == [], "as much time as before changes nothing"
    longer = SimulatedRunner(fails=hangs)
    result = compare(asked(job={"job_timeout_seconds": 9.0}, study="t"), runner=longer)
    assert [job.precision for job in longer.jobs] == ["bf16"]
    assert [cell.status for cell in result.cells] == ["fits", "fits"]


def test_a_bad_value_that_set_gave_is_not_named_by_vary() -> None:
    with pytest.raises(BadInput, match="--set depth: got '8', expected an option of"):
        compare(asked(vary=("width", ("4",)), job={"options": (("depth", "8"),)}), runner=SimulatedRunner())


@pytest.mark.parametrize("state", [pytest.param("FAIL", marks=pytest.mark.nightly), "RUNNING"])
def test_a_training_whose_command_was_killed_before_its_trial_ended_is_made_again(state: str) -> None:
    first = compare(asked(study="k"), runner=SimulatedRunner())
    with closing(sqlite3.connect("optuna.db")) as connection:
        number = connection.execute("SELECT number FROM trials ORDER BY number LIMIT 1").fetchone()[0]
        connection.execute("UPDATE trials SET state = ? WHERE number = ?", (state, number))
        connection.execute("DELETE FROM trial_values WHERE trial_id = (SELECT trial_id FROM trials ORDER BY number)")
        connection.execute(
            "UPDATE trial_user_attributes SET value_json = json_set(value_json, '$.pid', 1, '$.started', 1.0, "
            "'$.start_ticks', 1) WHERE key = 'worker'"
        )
        connection.commit()
    runner = SimulatedRunner()
    second = compare(asked(study="k"), runner=runner)
    assert [job.precision for job in runner.jobs] == ["fp32"]
    assert second.answers == first.answers
    (killed,) = {training.run_id for cell in first.cells for training in cell.trainings} - {
        training.run_id for cell in second.cells for training in cell.trainings
    }
    assert client().get_run(killed).info.status == "KILLED"
