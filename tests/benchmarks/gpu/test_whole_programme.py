"""The programme as on the day: from a bare copy of the tree, without an installation, in real processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from benchmarks.gpu.rows import RowFile, Status
from benchmarks.gpu.stages import NAMES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="budgets of main memory are Linux's")
COPIED_VERSION = "0.0.0+copy"
TINY = ["--device", "cpu", "--tiny"]


@pytest.fixture(scope="module")
def bare_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files, with a version of its own, so that a row says whose code it ran."""
    tree = tmp_path_factory.mktemp("bare") / "amp_track"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    init = tree / "amp_track" / "__init__.py"
    own, count = re.subn(r'__version__ = ".*"', f'__version__ = "{COPIED_VERSION}"', init.read_text())
    assert count == 1
    init.write_text(own)
    return tree


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", *TINY, *arguments]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
    return kept | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # a pool of them takes longer to start than this to compile


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=tree, env=environment(), capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    "stages", [pytest.param(("sinusoid",), marks=pytest.mark.slow), pytest.param(NAMES, marks=pytest.mark.nightly)]
)
def test_every_stage_leaves_its_rows_once(bare_tree: Path, tmp_path: Path, stages: tuple[str, ...]) -> None:
    asked = ["--out", str(tmp_path), *(word for name in stages for word in ("--stage", name))]
    done = run(bare_tree, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    assert {file.stem for file in folder.iterdir()} == set(stages)
    for name in stages:
        rows = RowFile(folder / f"{name}.jsonl").read()
        statuses = {row.status for row in rows.values()}
        assert Status.MEASURED in statuses
        assert Status.FAILED not in statuses
        for row in rows.values():
            assert row.provenance["versions"]["amp_track"] == COPIED_VERSION, "it was not the copy that ran"
            assert row.reason or row.status is Status.MEASURED
            assert {"device", "driver", "date", "cores"} <= set(row.provenance)
            assert row.status is Status.IMPOSSIBLE or "tf32" not in row.key
    before = {file.name: file.read_text() for file in folder.iterdir()}
    assert str(bare_tree) not in "".join(before.values()), "a folder of this machine is in a row"

    again = run(bare_tree, *asked)
    assert again.returncode == 0, again.stdout + again.stderr
    assert {file.name: file.read_text() for file in folder.iterdir()} == before
    assert "measured" not in again.stdout
