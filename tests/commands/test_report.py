"""`report` makes the page of a study again from the stores alone; the device that filled them is simulated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import optuna
import pytest
from simulated import SimulatedRunner
from support import DIGITS, MEBIBYTE, client, request, stores

from amp_track.commands.compare import compare
from amp_track.commands.max_batch import max_batch
from amp_track.commands.report import report
from amp_track.commands.search import search
from amp_track.config.job import Job
from amp_track.config.options import CompareOptions, ReportOptions, Request
from amp_track.records.errors import BadInput
from amp_track.records.result import JobResult
from amp_track.results.compare import CompareResult
from amp_track.results.max_batch import MaxBatchResult
from amp_track.results.search import SearchResult

pytestmark = pytest.mark.usefixtures("fresh_stores")
JOB = Job(workload=DIGITS, memory_budget_bytes=8 * MEBIBYTE)
VARY = CompareOptions(vary=("width", ("8", "4")))


def asked(job: Job = JOB, **options: Any) -> Request:
    return request(job, **({"precisions": ("fp32", "bf16"), "study": "mine"} | options))


def reported(study: str = "mine", out: str | None = None) -> MaxBatchResult | SearchResult | CompareResult:
    return report(request(Job(), study=study, report_options=ReportOptions(out=out)))


@pytest.mark.slow
def test_a_search_is_reported_as_it_was() -> None:
    result = search(asked(trials=5, seeds=2, lr_range=(1e-3, 1e-2)), runner=SimulatedRunner())
    assert reported() == result


@pytest.mark.nightly
def test_max_batches_are_reported_as_they_were() -> None:
    found = max_batch(asked(multiple_of=8, max_batch_size=200), runner=SimulatedRunner(longer_bytes=10_000))
    assert reported() == found


@pytest.mark.parametrize(
    "precisions",
    [pytest.param(("fp32", "bf16"), marks=pytest.mark.slow), pytest.param(("fp32",), marks=pytest.mark.nightly)],
)
def test_max_batch_after_a_search_does_not_hide_its_trainings(precisions: tuple[str, ...]) -> None:
    searched = search(asked(trials=2, seeds=2, max_batch_size=64), runner=SimulatedRunner())
    page = Path(searched.report).read_text()
    other = dataclasses.replace(JOB, seed=3)
    max_batch(asked(other, precisions=precisions, max_batch_size=64), runner=SimulatedRunner())
    assert Path(searched.report).read_text() == page
    assert dataclasses.replace(reported(), limits=searched.limits) == searched


@pytest.mark.slow
def test_one_more_precision_later_does_not_hide_the_seeds_of_a_search() -> None:
    searched = search(
        asked(precisions=("fp32", "bf16"), trials=2, seeds=2, max_batch_size=64), runner=SimulatedRunner()
    )
    max_batch(asked(precisions=("amp",), max_batch_size=64), runner=SimulatedRunner())
    assert searched.seeds is not None
    assert reported().seeds == searched.seeds


@pytest.mark.slow
def test_fewer_precisions_later_hide_nothing_of_a_study() -> None:
    found = max_batch(asked(max_batch_size=64), runner=SimulatedRunner())
    page = Path(found.report).read_text()
    for again in (
        asked(precisions=("bf16",), max_batch_size=64),
        asked(precisions=("fp32", "bf16"), max_batch_size=64),
    ):
        device = SimulatedRunner()
        assert max_batch(again, runner=device).report == found.report
        assert not device.jobs
        assert Path(found.report).read_text() == page
        assert reported() == found


@pytest.mark.nightly
def test_a_comparison_is_reported_as_it_was() -> None:
    made = compare(asked(compare_options=VARY, seeds=2), runner=SimulatedRunner())
    assert reported() == made
    searched = search(asked(trials=1), runner=SimulatedRunner())
    assert reported() == searched
    assert reported("mine/compare") == made


def test_neither_workload_nor_tracking_store_is_needed_for_a_file() -> None:
    workload = Path("gone.py")
    workload.write_text(Path(DIGITS).read_text())
    made = max_batch(asked(Job(workload="gone.py"), precisions=("fp32",), max_batch_size=8), runner=SimulatedRunner())
    workload.unlink()
    Path("mlflow.db").unlink()
    assert dataclasses.replace(reported(out="page.md"), report=made.report) == made
    assert Path("page.md").read_text().startswith("# ")


def interrupt_a_search() -> None:
    """When fp32's max batch is proven."""

    def interrupted(job: Job) -> JobResult | None:
        if job.precision == "bf16":
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        search(asked(max_batch_size=64), runner=SimulatedRunner(fails=interrupted))


def test_an_interrupted_search_is_reported() -> None:
    interrupt_a_search()
    found = reported()
    assert isinstance(found, MaxBatchResult)
    assert found.max_batch == {"fp32": 64}
    assert found.skipped["bf16"].startswith("not proven yet: ")
    page = Path(found.report).read_text()
    assert "fp32 at batch 64" in page
    assert "not proven yet" in page


def test_max_batch_after_an_interrupted_search_makes_the_page_that_it_names() -> None:
    interrupt_a_search()
    found = max_batch(asked(max_batch_size=64), runner=SimulatedRunner())
    assert "bf16: batch 64 ran in" in Path(found.report).read_text()


def test_an_interrupted_comparison_shows_the_values_that_are_complete() -> None:
    def interrupted(job: Job) -> JobResult | None:
        if dict(job.options)["width"] == "8" and job.precision == "bf16":
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        compare(asked(compare_options=VARY), runner=SimulatedRunner(fails=interrupted))
    found = reported()
    assert isinstance(found, CompareResult)
    assert (found.values, found.missing) == (("4",), 1)


def test_the_page_says_how_to_open_its_links(found: MaxBatchResult) -> None:
    reported(out="page.html")
    command = f"amp-track ui mine --storage {stores()['storage']} --tracking-uri {stores()['tracking_uri']}"
    for page in (found.report, reported().report, "page.html"):
        assert f"<code>{command}</code>" in Path(page).read_text()


def test_only_the_page_of_an_ended_run_changes(found: MaxBatchResult) -> None:
    before = client().get_run(found.run_id).info
    Path(found.report).unlink()
    reported()
    after = client().get_run(found.run_id).info
    assert (after.status, after.end_time) == (before.status, before.end_time)
    assert Path(found.report).exists()


@pytest.mark.usefixtures("found")
def test_a_study_without_its_command_or_of_another_version_says_what_to_do() -> None:
    study = optuna.load_study(study_name="mine/max-batch", storage=stores()["storage"])
    version = study.user_attrs["amp_track_version"]
    for name, value, message in (
        (
            "amp_track_version",
            version + 1,
            r'^Study "mine/max-batch" was created by another version of amp-track\. Use',
        ),
        ("command", "{}", "cannot read"),
        ("command", None, r"^Study mine/max-batch has no record of its command: .* run its command again"),
    ):
        study._storage.set_study_user_attr(study._study_id, "amp_track_version", version)
        study._storage.set_study_user_attr(study._study_id, name, value)
        with pytest.raises(Exception, match=message):
            reported()


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    ("study", "out", "message"),
    [
        ("mien", None, "^STUDY: got mien, expected a study in sqlite:////.*, such as mine. "),
        ("mine", "page.pdf", r"^--out: got page.pdf, expected a file that ends in .html or .md"),
        ("mine", "there/page.md", "^--out: got there/page.md, expected a file in an existing folder"),
        ("mine", "folder.md", "^--out: got folder.md, expected a writable file"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(study: str, out: str | None, message: str) -> None:
    Path("folder.md").mkdir()
    before = sorted(Path().rglob("*"))
    with pytest.raises(BadInput, match=message):
        reported(study, out)
    assert sorted(Path().rglob("*")) == before


def test_no_store_is_created() -> None:
    Path("optuna.db").unlink()
    with pytest.raises(BadInput, match=r"^--storage: sqlite:////.* holds no studies yet"):
        reported()
    assert not Path("optuna.db").exists()
