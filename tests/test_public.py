import inspect
import subprocess
import sys

import pytest

import amp_track


def test_every_public_name_can_be_imported_and_says_what_it_is() -> None:
    assert sorted(amp_track.__all__) == amp_track.__all__
    for name in amp_track.__all__:
        public = getattr(amp_track, name)
        words = (inspect.getdoc(public) or "none").splitlines()[0]
        assert words.endswith((".", ":")) and len(words.split()) > 2, f"{name}: {words}"
        assert not words.startswith(f"{name}("), f"{name} has the docstring that dataclass makes"


def test_nothing_else_is_offered() -> None:
    with pytest.raises(AttributeError, match="module 'amp_track' has no attribute 'Trainer'"):
        amp_track.Trainer  # noqa: B018
    importable = {name for names in amp_track._HOMES.values() for name in names}
    assert importable == set(amp_track.__all__)


def test_importing_the_package_and_its_commands_imports_neither_torch_nor_mlflow() -> None:
    program = (
        "import sys, amp_track.api, amp_track.cli, amp_track.runner.runner; "
        "from amp_track.commands import compare, dtypes, max_batch, plan, search, train; "
        "print([name for name in ('torch', 'mlflow', 'optuna') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
