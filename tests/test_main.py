"""The start of the command: a signal ends it without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

SIGNALS_ITSELF = """
import os, time
os.kill(os.getpid(), {number})
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_modules_are_imported_ends_the_command_at_once(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "typer.py").write_text(SIGNALS_ITSELF.format(number=int(number)))
    done = subprocess.run(
        [sys.executable, "-m", "amp_track", "max-batch"], capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, preexec_fn=_hear_signals,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "amp-track: interrupted\n")


def _hear_signals() -> None:
    """Hear Ctrl-C and a closed terminal, though these tests may run under `nohup` or in a shell's background."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
