"""Run tests and benchmarks on a machine with a GPU, with its Python, in stages.

Each row is written as soon as it is measured, and skipped if it exists for the same device, driver and versions: repeat
the command to continue. Exit codes: 0 all rows are measured; 1 rows failed or are missing; 2 bad input;
130 interrupted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try:
    from amp_track.config.values import duration_seconds
    from amp_track.records.errors import INTERRUPTED_EXIT_CODE, AmpTrackError
    from benchmarks.gpu.results import Machine, Status, describe, read_rows
    from benchmarks.gpu.stage_process import TIME_IS_UP
    from benchmarks.gpu.stages import STAGES
    from benchmarks.processes import ENVIRONMENT, ROOT
except ModuleNotFoundError as error:
    print(f"error: {sys.executable} has no {error.name}. Use another one: make gpu PYTHON=…", file=sys.stderr)
    sys.exit(2)

RESULTS = ROOT / "benchmarks" / "results" / "gpu"


def run_stage(stage: str, machine: Machine, file: Path, end: float) -> int:
    """Run processes until all rows are done, time is up or one writes no row. Return the exit code of the last one."""
    until = min(time.time() + 8 * 60, end)  # no row starts later: GPU machines are borrowed for minutes
    request = json.dumps([stage, str(file), until, dataclasses.asdict(machine)])
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.stage_process", request]
    while True:
        size = file.stat().st_size
        with tempfile.TemporaryDirectory(prefix="amp_track-gpu-", ignore_cleanup_errors=True) as folder:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=sys.stderr, cwd=folder, env=os.environ | ENVIRONMENT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(None if end == math.inf else max(end - time.time(), 0))
            except subprocess.TimeoutExpired:
                code = TIME_IS_UP
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the fork server and the jobs
                process.communicate()
        if code in (0, TIME_IS_UP) or size == file.stat().st_size:
            return code


def main() -> int:
    stages = "\n".join(f"  {name:<12}{stage.__doc__}" for name, stage in STAGES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, epilog=f"stages:\n{stages}", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu, … (default cuda)")
    parser.add_argument("--stage", action="append", choices=STAGES, help="may be given several times (default all)")
    parser.add_argument("--time-limit", type=duration_seconds, default=math.inf, help="end after this time: 9m")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (default benchmarks/results/gpu)")
    parser.add_argument("--smoke", action="store_true", help="small sizes: the same code in minutes on a CPU")
    given = parser.parse_args()
    end, is_complete = time.time() + given.time_limit, True
    try:
        machine = describe(given.device, smoke=given.smoke)
        name = re.sub(r"[^a-z0-9]+", "-", machine.name.lower()).strip("-") + "-smoke" * machine.smoke
        folder = given.out.absolute() / name
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{machine.provenance['device']}: rows in {folder}", file=sys.stderr)
        for stage in given.stage or STAGES:
            print(f"{stage}: {STAGES[stage].__doc__}", file=sys.stderr, flush=True)
            file, started = folder / f"{stage}.jsonl", time.time()
            file.touch()
            code = run_stage(stage, machine, file, end) if started < end else TIME_IS_UP
            counts = collections.Counter(row.status for row in read_rows(file, machine.provenance))
            is_complete &= code == 0 and not counts[Status.FAILED]
            state = {0: "complete", TIME_IS_UP: "rows are left"}.get(code, f"its process ended with code {code}")
            listed = "".join(f", {count} {status}" for status, count in counts.items())
            print(f"{stage:<12}{state}{listed} ({time.time() - started:.0f} s)", flush=True)
    except KeyboardInterrupt:
        print("Interrupted. Repeat the command to continue.", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    except (AmpTrackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
