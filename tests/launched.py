"""Small programs that replace search workers in the tests of launchers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from amp_track.workers.launchers.base import Ended, Launcher, Worker, run

SAYS = """
import os, sys
print("a result")
sys.stderr.write(f"from {os.environ['WHERE']} in {os.getcwd()}\\n\\nwith no end of its line")
sys.exit(int(sys.argv[1]))
"""
ENDS_WHEN_TOLD = """
import os, signal, sys, time
def end(number, _):
    signal.signal(number, signal.SIG_IGN)  # SLURM and the launcher may both send it
    print("ended its runs", file=sys.stderr)
    sys.exit(130)
if os.path.exists("was here"):
    print("resumed", file=sys.stderr)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open("was here", "w").close()
print("up", file=sys.stderr, flush=True)
time.sleep(600)
"""
"""Ends at SIGTERM; started again in the same folder, it resumes and exits successfully."""
_STARTER = """
import sys
from pathlib import Path
from amp_track.workers import interrupts
from amp_track.workers.launchers import base
launcher = base.named(sys.argv[1])
launcher.cluster = "local"  # of SLURM
worker = base.Worker(command=[sys.executable, "-c", sys.argv[2]], environment={}, output=Path("worker-1.err"))
try:
    with interrupts.deferred(owns_process=True):
        base.run(launcher(), [worker], lambda number, line: print(line, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


def worker(code: str, *arguments: str, number: int = 1, where: str = "here") -> Worker:
    command = [sys.executable, "-c", code, *arguments]
    return Worker(command=command, environment={"WHERE": where}, output=Path(f"worker-{number}.err"))


def run_two(launcher: Launcher) -> dict[int, list[str]]:
    """Run two search workers, check what every launcher keeps of them, and return what each has said."""
    said: dict[int, list[str]] = {0: [], 1: []}
    workers = [worker(SAYS, "0", where="one"), worker(SAYS, "3", number=2, where="two")]
    ended = run(launcher, workers, lambda number, line: said[number].append(line))
    assert ended == [Ended(exit_code=code, last_line="with no end of its line") for code in (0, 3)]
    for number, name in enumerate(("one", "two"), start=1):
        written = f"from {name} in {Path.cwd()}\n\nwith no end of its line"
        assert Path(f"worker-{number}.err").read_text() == written
        assert Path(f"worker-{number}.out").read_text() == "a result\n"
        assert said[number - 1][-2:] == [line for line in written.split("\n") if line]
    return said


def start(launcher: str, code: str) -> subprocess.Popen[bytes]:
    """Run a search worker with a launcher in another process, which prints what it says."""
    command = [sys.executable, "-c", _STARTER, launcher, code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
