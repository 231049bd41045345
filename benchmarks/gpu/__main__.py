"""Run the programme for a machine with a GPU, from a bare tree, with the Python at hand and without a network.

    python -m benchmarks.gpu [--device cuda] [--stage NAME] [--minutes N] [--out FOLDER] [--tiny] [--list]

Each row is written as soon as it is measured, and skipped where it is there for the same device and versions: a run
that was killed is continued by the same command. To measure rows again, delete their file.

Exit codes: 0 everything asked for is there; 1 rows failed, or are left because time was up; 2 bad input;
130 interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
from pathlib import Path

from amp_track.records.errors import INTERRUPTED_EXIT_CODE, BadInput
from benchmarks.gpu import machine, programme, stages
from benchmarks.gpu.parts import ROOT
from benchmarks.gpu.rows import Status

RESULTS = ROOT / "benchmarks" / "results" / "gpu"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise BadInput(f"got {message}, expected the flags that python -m benchmarks.gpu --help lists")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Raises BadInput for arguments that cannot be run."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = _Parser(
        prog="python -m benchmarks.gpu", description=summary, epilog=rest[rest.index("Each row") :],
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu, … (default cuda)")
    parser.add_argument(
        "--stage", action="append", metavar="NAME", help=f"{', '.join(stages.NAMES)}; may be repeated (default all)"
    )
    parser.add_argument("--minutes", metavar="N", help="give up what is in flight after N minutes (default no limit)")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        default=str(RESULTS),
        help="where rows are read and written; begins with the rows that are in the results folder",
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes: the same code in a few minutes on a CPU")
    parser.add_argument("--list", action="store_true", help="list the stages, and measure nothing")
    found = parser.parse_args(arguments)
    for name in found.stage or ():
        if name not in stages.NAMES:
            raise BadInput(f"--stage: got {name}, expected one of {', '.join(stages.NAMES)}; see --list")
    found.minutes = _minutes(found.minutes)
    found.out = _folder(found.out)
    return found


def _minutes(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise BadInput(f"--minutes: got {text}, expected a number above 0; leave it out for no limit")
    return minutes


def _folder(text: str) -> Path:
    folder = Path(text).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadInput(f"--out: got {text}, expected a folder to write to, and {there} is none; give another one")
    return folder


def listing() -> str:
    """The stages in their order, a line each."""
    lines = [f"{stage.name:<11}{stage.minutes:>2} min  {stage.purpose}" for stage in stages.STAGES]
    return "\n".join([*lines, f"no stage starts a row after {stages.LIMIT_MINUTES:g} minutes"])


def summary(reports: list[programme.Report]) -> str:
    """What came of each stage, a line each, and what is left."""
    lines = []
    for report in reports:
        counts = [f"{report.count(status)} {status}" for status in Status if report.count(status)]
        before = [f"{report.kept} there before"] if report.kept else []
        left = [f"{len(report.left)} left, next {report.left[0]}"] if report.left else []
        what = "; ".join([*before, *counts, *left] or ["nothing to do"])
        lines.append(f"{report.stage:<11}{what} ({report.seconds:.0f} s)")
    return "\n".join(lines)


def bring_rows_over(known: Path, folder: Path) -> None:
    """Copy the rows of the results folder to another one that has none yet, which then continues them."""
    for file in known.glob("*.jsonl"):
        if not (folder / file.name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / file.name)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    try:
        asked = parse(arguments)
        if asked.list:
            print(listing())
            return 0
        signal.signal(signal.SIGTERM, _interrupt)
        found = machine.describe(asked.device, tiny=asked.tiny)
        folder = asked.out / machine.folder_of(found)
        _say(f"{found.provenance['device']}: rows in {folder}")
        if not asked.tiny:
            bring_rows_over(RESULTS / folder.name, folder)
        chosen = [stage for stage in stages.STAGES if not asked.stage or stage.name in asked.stage]
        reports = programme.run(chosen, found, folder, minutes=asked.minutes, say=_say)
    except BadInput as error:
        _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted: what was measured is kept, and the same command continues")
        return INTERRUPTED_EXIT_CODE
    print(summary(reports))
    return 0 if all(report.is_complete for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
