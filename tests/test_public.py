import subprocess
import sys

import amp_track


def test_every_public_name_can_be_imported() -> None:
    assert sorted(amp_track.__all__) == amp_track.__all__
    for name in amp_track.__all__:
        assert getattr(amp_track, name).__doc__


def test_importing_the_package_and_its_commands_imports_neither_torch_nor_mlflow() -> None:
    program = (
        "import sys, amp_track.cli, amp_track.commands, amp_track.sandbox; "
        "print([name for name in ('torch', 'mlflow', 'optuna') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
