"""Run the stages of `make gpu` in real processes, from a bare copy of the tree, without an installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from benchmarks.gpu.results import Row, Status, append_row, read_rows
from benchmarks.gpu.stages import STAGES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="budgets of main memory are Linux's")
COPIED_VERSION = "0.0.0+copy"


@pytest.fixture(scope="module")
def bare_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files, with a version of its own, so that a row says whose code it ran."""
    tree = tmp_path_factory.mktemp("bare") / "amp_track"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    init = tree / "amp_track" / "_version.py"
    own, count = re.subn(r'__version__ = ".*"', f'__version__ = "{COPIED_VERSION}"', init.read_text())
    assert count == 1
    init.write_text(own)
    return tree


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--smoke", *arguments]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
    kept["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool of them takes longer to start than to compile
    return subprocess.run(command, cwd=tree, env=kept, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    "stages",
    [pytest.param(("memory_plan",), marks=pytest.mark.slow), pytest.param(tuple(STAGES), marks=pytest.mark.nightly)],
)
def test_every_stage_leaves_its_rows_once(bare_tree: Path, tmp_path: Path, stages: tuple[str, ...]) -> None:
    asked = ["--out", str(tmp_path), *(word for name in stages for word in ("--stage", name))]
    done = run(bare_tree, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    assert {file.stem for file in folder.iterdir()} == set(stages)
    for name in stages:
        rows = read_rows(folder / f"{name}.jsonl")
        assert rows
        assert {row.status for row in rows} <= {Status.MEASURED, Status.UNSUPPORTED, Status.MISSING}
        assert name == "tests" or Status.MEASURED in {row.status for row in rows}
        for row in rows:
            assert row.provenance["versions"]["amp_track"] == COPIED_VERSION, "it was not the copy that ran"
            assert row.reason or row.status is Status.MEASURED
            assert {"device", "driver", "date", "cores"} <= set(row.provenance)
            assert row.status is Status.UNSUPPORTED or "tf32" not in row.key
    before = {file.name: file.read_text() for file in folder.iterdir()}
    assert str(bare_tree) not in "".join(before.values()), "a folder of this machine is in a row"

    again = run(bare_tree, *asked)
    assert again.returncode == 0, again.stdout + again.stderr
    assert {file.name: file.read_text() for file in folder.iterdir()} == before


def test_rows_survive_a_torn_line_and_count_for_their_own_driver(tmp_path: Path) -> None:
    file, old, new = tmp_path / "step.jsonl", {"driver": "1", "source": "a"}, {"driver": "2", "source": "a"}
    append_row(file, Row(key="amp", status=Status.FAILED, provenance=old))
    append_row(file, Row(key="bf16", status=Status.MEASURED, provenance=new))
    file.write_text(file.read_text() + '{"key": "tf32", "sta')
    append_row(file, Row(key="amp", status=Status.MEASURED, values={"ratio": 1.0}, provenance=old))
    assert [(row.key, row.status) for row in read_rows(file)] == [("bf16", "measured"), ("amp", "measured")]
    assert [row.key for row in read_rows(file, new)] == ["bf16"]
    assert [row.key for row in read_rows(file, old | {"source": "b"})] == ["amp"], "only tests depend on the code"


def test_a_row_that_takes_too_long_ends_its_process_and_is_recorded(tmp_path: Path) -> None:
    file = tmp_path / "step.jsonl"
    machine = 'Machine("cpu", "cpu", "CPU", {}, {"run": "1"}, True)'
    code = f"""
import re
from benchmarks.gpu.stage_process import Machine, Path, Recorder
Recorder(Path({str(file)!r}), {machine}, float("inf")).start("amp", 0.2)
re.match("(a*)*b", "a" * 99)  # holds the GIL for years
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Timeout" in done.stderr) == (1, True), done.stderr
    (row,) = read_rows(file)
    assert (row.key, row.status) == ("amp", Status.FAILED)
    assert "0.2 s" in row.reason
