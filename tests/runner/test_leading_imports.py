"""The imports of a workload file that run in advance: none after another statement of the file."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_track.runner.leading_imports import LeadingImports, leading_imports, may_share_server

INSTALLED = ["import torch", "import numpy as np", "from sklearn.datasets import load_digits", "import PIL, torch"]
SKIPPED = ["import os", "from __future__ import annotations", "'a docstring'", "# a comment", "",
           "__all__ = ['Mine', 'Other']",
           "if TYPE_CHECKING:\n    import pandas"]  # fmt: skip
OTHERS = ["os.environ['A'] = '1'", "import helper", "from . import helper", "import torch, helper", "x = f()",
          "import no_such_package_anywhere", "torch.foo = 1", "class A: pass",
          "try:\n    import PIL\nfinally: pass"]  # fmt: skip


def leading(folder: Path, source: str) -> tuple[list[str], str]:
    (folder / "helper.py").write_text("")
    file = folder / "workload.py"
    file.write_text(source)
    found = leading_imports(str(file))
    return list(found.statements), found.stopped_at.removeprefix(f"{file}, ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workload")


@given(
    st.lists(st.sampled_from(INSTALLED + SKIPPED)), st.sampled_from(OTHERS),
    st.lists(st.sampled_from(INSTALLED + SKIPPED + OTHERS)),
)  # fmt: skip
def test_nothing_is_imported_ahead_of_the_first_other_statement(
    folder: Path, before: list[str], other: str, after: list[str]
) -> None:
    statements, stopped_at = leading(folder, "\n".join([*before, other, *after]))
    assert statements == [line for line in before if line in INSTALLED]
    assert stopped_at == f"line {sum(line.count(chr(10)) + 1 for line in before) + 1}"


def test_a_file_that_does_nothing_else_leaves_torch_to_the_fork_server(folder: Path) -> None:
    assert leading(folder, "import os\n") == (["import torch"], "")
    assert leading(folder, "this is no Python") == (["import torch"], "")
    assert leading_imports("no/such/file.py").statements == ("import torch",)


def test_a_module_beside_the_workload_is_not_taken_for_an_installed_one(folder: Path) -> None:
    (folder / "sklearn.py").write_text("")
    try:
        assert leading(folder, "import torch\nimport sklearn\n") == (["import torch"], "line 2")
    finally:
        (folder / "sklearn.py").unlink()


def test_the_packages_of_a_module_are_imported_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trainings"
    package.mkdir()
    (package / "digits.py").write_text("import torch\nx = f()\n")
    monkeypatch.chdir(tmp_path)
    assert leading_imports("trainings.digits:Digits").statements == ("import torch",)
    (package / "__init__.py").write_text("import os\nos.environ['A'] = '1'\nimport torch\n")
    for workload in ("trainings.digits:Digits", "trainings:Digits"):
        found = leading_imports(workload)
        assert (found.statements, found.stopped_at) == ((), f"{package / '__init__.py'}, line 2")
    assert leading_imports("not_there.at_all:Mine").statements == (), "the module does not exist"


def test_a_server_is_shared_only_by_workloads_that_begin_with_all_that_it_has_imported() -> None:
    torch, sklearn = "import torch", "import sklearn"
    with_torch = [[torch], ["from torch import nn"], ["from amp_track import Workload"], [torch, sklearn]]
    for running, wanted in itertools.product(with_torch, with_torch):
        assert may_share_server(running, starting(wanted)) == (sklearn not in running or sklearn in wanted)
        assert may_share_server(running, starting(wanted, is_self_contained=True))
    for without in ([], ["import numpy"], ["import amp_track"], [sklearn]):
        assert may_share_server(without, starting(without))
        assert not may_share_server(without, starting([torch]))
        assert not may_share_server([torch], starting(without))


def starting(statements: list[str], *, is_self_contained: bool = False) -> LeadingImports:
    return LeadingImports(tuple(statements), is_self_contained=is_self_contained)


@pytest.mark.parametrize(
    ("later", "is_self_contained"),
    [("import os", True), ("from torch import nn", True), ("import PIL.Image", True), ("import sklearn", False),
     ("import helper", False), ("def f():\n    import sklearn", False)],
)  # fmt: skip
def test_a_file_is_self_contained_if_it_imports_no_other_package(
    folder: Path, later: str, is_self_contained: bool
) -> None:
    file = folder / "workload.py"
    file.write_text(f"import torch\nimport PIL\nx = f()\n{later}\n")
    assert leading_imports(str(file)).is_self_contained is is_self_contained
