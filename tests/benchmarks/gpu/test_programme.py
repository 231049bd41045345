"""The programme: rows are measured in real processes, each once; time limits stop it, and nothing is lost."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from amp_track.records.errors import BadInput
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import marked_tests, programme, stages
from benchmarks.gpu.machine import folder_of
from benchmarks.gpu.parts import Machine
from benchmarks.gpu.programme import Deadlines, Report, StageRun
from benchmarks.gpu.rows import RowFile, Status

FAULTY = stages.Stage("faulty", "", 1, "tests.workloads.faulty_stage")
MACHINE = Machine(
    device="cpu",
    kind="cpu",
    precisions={"fp32": "", "tf32": "needs an NVIDIA GPU", "amp": "", "bf16": ""},
    provenance={"device": "a CPU", "driver": None, "versions": {"torch": "2", "lightning": None}, "tiny": True},
    tiny=True,
)
FOREVER = Deadlines(soft=float("inf"), hard=float("inf"))


class Clock:
    """A clock that moves by so much whenever it is read."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def run(folder: Path, deadlines: Deadlines = FOREVER, **settings: Any) -> Report:
    settings = {"clock": programme.time.monotonic, "say": lambda line: None} | settings
    return StageRun(FAULTY, MACHINE, folder, deadlines, **settings).run()


@pytest.fixture(autouse=True)
def _the_root_can_be_imported_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX's")
def test_each_row_ends_in_its_own_way_and_costs_no_other(tmp_path: Path) -> None:
    report = run(tmp_path)
    rows = RowFile(tmp_path / "faulty.jsonl").read()
    assert {key: row.status for key, row in rows.items()} == {
        "good": Status.MEASURED,
        "raises": Status.FAILED,
        "dies": Status.FAILED,
        "needs a package": Status.MISSING,
        "hangs": Status.FAILED,
        "last": Status.MEASURED,
        "tf32": Status.IMPOSSIBLE,
        "a peer": Status.MISSING,
    }
    assert rows["raises"].reason == "ValueError: what it met in two lines"
    assert "_values" in rows["raises"].values["traceback"]
    assert rows["dies"].reason.startswith("its process ended with code 7")
    assert rows["hangs"].reason.startswith("gave up after 1 s")
    assert rows["a peer"].reason == "lightning is not installed"
    assert len({rows[key].values["pid"] for key in ("good", "last")}) == 2
    assert str(ROOT) not in (tmp_path / "faulty.jsonl").read_text()
    assert report.left == []
    assert not report.is_complete

    again = run(tmp_path)
    assert again.kept == 5
    assert {row.key for row in again.made} == {"raises", "dies", "hangs"}, "failed rows alone are tried again"


def test_after_the_soft_deadline_no_row_is_started(tmp_path: Path) -> None:
    report = run(tmp_path, Deadlines(soft=5.0, hard=100.0), clock=Clock(tick=5.0))
    assert report.made == []
    assert report.left == ["good", "raises", "dies", "needs a package", "hangs", "last", "tf32", "a peer"]
    assert not report.is_complete


def test_at_the_hard_deadline_what_is_in_flight_is_left_and_not_failed(tmp_path: Path) -> None:
    report = run(tmp_path, Deadlines(soft=2.0, hard=3.0), clock=Clock(tick=0.9))
    assert report.made == []
    assert report.left[0] == "good"
    assert not (tmp_path / "faulty.jsonl").exists()


def test_a_stage_ends_after_its_minutes_or_with_the_programme() -> None:
    limit = stages.LIMIT_MINUTES * 60
    assert Deadlines.of_stage(100.0, float("inf")) == Deadlines(soft=100.0 + limit, hard=float("inf"))
    assert Deadlines.of_stage(100.0, 160.0) == Deadlines(soft=160.0, hard=160.0)


# ------------------------------------------------------------------------------------------- arguments


NO_SUCH_DEVICE = [["--device", "cuda:99"], ["--device", "toaster"]]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--stage", "edgy"], ["--minutes", "soon"], ["--minutes", "0"], ["--minutes", "-3"], ["--minutes", "inf"],
        ["--minutes", "nan"], ["--bogus"], ["--out"], ["--out", __file__],
        *(pytest.param(arguments, marks=pytest.mark.slow) for arguments in NO_SUCH_DEVICE),
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == BadInput.exit_code
    said = capfd.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"error: .*\bexpected .*\n", said.err), said.err
    assert "got" in said.err


def test_the_list_names_every_stage_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == list(stages.NAMES)
    assert all(stage.minutes <= stages.LIMIT_MINUTES for stage in stages.STAGES)


def test_small_sizes_have_a_folder_of_their_own() -> None:
    assert folder_of(MACHINE) == "a-cpu-tiny"


@pytest.mark.parametrize("tiny", [True, False])
@pytest.mark.parametrize("stage", stages.STAGES, ids=lambda stage: stage.name)
def test_a_stages_keys_are_unique_and_what_a_device_cannot_do_has_a_reason(stage: stages.Stage, tiny: bool) -> None:
    parts = stage.load().parts(dataclasses.replace(MACHINE, tiny=tiny), {})
    rows = [row for part in parts for row in part.rows]
    assert len({row.key for row in rows}) == len(rows) > 0
    assert len({part.name for part in parts}) == len(parts)
    assert all(row.impossible for row in rows if "tf32" in row.key)
    assert all(row.limit_seconds <= 300 for row in rows)


def test_tests_that_need_a_gpu_begin_with_the_budget() -> None:
    places = [marked_tests.place(str(file.relative_to(ROOT))) for file in marked_tests.files()]
    assert len(places) >= 6
    assert places == sorted(places)
    assert marked_tests.files()[0].parent.name == "devices"


def test_another_folder_begins_with_the_rows_there_are(tmp_path: Path) -> None:
    known, folder = tmp_path / "known", tmp_path / "out" / "a-gpu"
    known.mkdir()
    for name in ("tests.jsonl", "edges.jsonl", "notes.txt"):
        (known / name).write_text(f"{name} of before\n")
    command.bring_rows_over(known, folder)
    assert sorted(file.name for file in folder.iterdir()) == ["edges.jsonl", "tests.jsonl"]
    (folder / "edges.jsonl").write_text("edges of now\n")
    command.bring_rows_over(known, folder)
    assert (folder / "edges.jsonl").read_text() == "edges of now\n"
    command.bring_rows_over(tmp_path / "nothing", tmp_path / "untouched")
    assert not (tmp_path / "untouched").exists()


def test_a_part_that_is_asked_for_nothing_ends(tmp_path: Path) -> None:
    """The programme was killed between starting it and asking."""
    command_line = [sys.executable, "-m", "benchmarks.gpu.part"]
    done = subprocess.run(command_line, input="", capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "the programme ended before it asked for a row\n"
