"""Inject every known fault into real processes, and check that nothing is lost.

    python -m benchmarks.faults [--times 20] [--only NAME] [--seconds BUDGET] [--at-once 2]

Each fault is tried at least `--times` times, and once in each phase of each command; then the same command runs again.
Writes benchmarks/results/faults.json, row by row, so that another run can continue. The exit code is 1 if anything was
lost.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from amp_track.runner import fork_server
from benchmarks import provenance
from benchmarks.faults import case, faults, results, works
from benchmarks.faults.case import Case, Fault
from benchmarks.faults.check import Undisturbed
from benchmarks.faults.command import Place
from benchmarks.faults.results import Results
from benchmarks.faults.works import Work


def where() -> dict[str, Any]:
    """Return device, versions and code."""
    made = provenance.of_device(works.FIT.arguments[1], precision="fp32") | {"code": results.code_digest()}
    fork_server.stop()
    return made | {"versions": made["versions"] | provenance.versions("optuna")}


def tries(wanted: Sequence[Fault], times: int) -> Iterator[tuple[str, Fault, int]]:
    """Yield all tries with their keys: the first try of every fault, then the second, and so on."""
    numbers = {fault.name: max(times, len(fault.cases)) for fault in wanted}
    for index in range(max(numbers.values())):
        for fault in wanted:
            if index < numbers[fault.name]:
                yield f"{fault.name} {index:03}", fault, index


class Programme:
    """Tries faults and keeps the rows."""

    def __init__(self, folder: Path, kept: Results, deadline: float) -> None:
        self._folder = folder
        self._kept = kept
        self._deadline = deadline
        self._normal: dict[Work, Undisturbed] = {}
        self._lock = threading.Lock()

    def normal(self, work: Work) -> Undisturbed:
        """Return the result of a command without a fault, which is measured once."""
        with self._lock:
            if work not in self._normal:
                self._normal[work] = case.undisturbed(work, Place(self._folder / f"undisturbed-{len(self._normal)}"))
            return self._normal[work]

    def attempt(self, key: str, fault: Fault, index: int) -> None:
        """Try a fault once, unless that try is done or time is up."""
        if key in self._kept.rows or time.monotonic() > self._deadline:
            return
        cases = random.Random(fault.name).sample(fault.cases, len(fault.cases))
        work, moment = cases[index % len(cases)]
        normal = self.normal(work)
        place = Place(Path(tempfile.mkdtemp(dir=self._folder)))  # the path of a socket is limited to 107 characters
        row = case.attempt(fault, Case(work, moment, seed=index, place=place), normal)
        with self._lock:
            self._kept.add(key, row)
        shutil.rmtree(place.folder, ignore_errors=True)
        print(f"{key}: {row['case']}: {'LOST ' + str(row) if 'detail' in row else 'nothing lost'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="how often each fault is tried at least (default 20)")
    parser.add_argument(
        "--only", action="append", help="the faults whose name contains this; may be given several times"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no try after this time")
    parser.add_argument("--at-once", type=int, default=2, help="how many are tried at a time (default 2)")
    parser.add_argument("--file", type=Path, default=results.FILE, help="where the rows are kept")
    arguments = parser.parse_args()
    wanted = [fault for fault in faults.ALL if any(name in fault.name for name in arguments.only or [""])]
    for fault in wanted:
        if reason := fault.impossible():
            print(f"{fault.name}: not tried: {reason}")
    wanted = [fault for fault in wanted if not fault.impossible()]
    kept = Results(arguments.file, where())
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.at_once) as pool:
        programme = Programme(Path(folder), kept, time.monotonic() + arguments.seconds)
        try:
            list(pool.map(lambda each: programme.attempt(*each), tries(wanted, arguments.times)))
        except BaseException:  # Ctrl-C: finish running tries and start no others
            pool.shutdown(cancel_futures=True)
            raise
    print(results.table(faults.ALL, kept.provenance | {"rows": list(kept.rows.values())}))
    sys.exit(int(any("detail" in row for row in kept.rows.values())))


if __name__ == "__main__":
    main()
