"""plan --check and --against: compare a plan with one in a file, or of another commit."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from amp_track.config.options import Request
from amp_track.records.errors import BadInput, PlanMoved, summary
from amp_track.results.plan import PlanResult
from amp_track.results.plan_check import PlanRecord, moves

_MOST_BYTES = 2**26


def check_options(request: Request) -> None:
    """Raise BadInput if the options of a comparison contradict each other, or its file cannot be read."""
    options, target = request.plan_check_options, request.job.workload
    if options.update and options.check is None:
        raise BadInput("--update requires --check.")
    if options.check is not None and options.against is not None:
        raise BadInput("--check and --against exclude each other. Omit one of the two.")
    if options.against is not None and not Path(target).is_file():
        raise BadInput(f"--against: {target} is not a file, so git has no other version of it. Use --check instead.")
    if options.check is not None and not options.update:
        PlanRecord.from_json(_content(options.check), options.check)


def compared(result: PlanResult, request: Request, plan: Callable[[Request], PlanResult], *, torch: str) -> PlanResult:
    """Return the result if nothing has moved, or after it has been written with `--update`.

    `plan` plans the target of another commit.

    Raises:
        PlanMoved: a peak or a safe batch has moved by more than the tolerance.
        BadInput: the revision does not exist or has no such file, or the file cannot be written.
    """
    options, now = request.plan_check_options, PlanRecord.of(result, torch=torch)
    if options.check is not None:
        name = options.check
        if options.update:
            try:
                Path(name).write_bytes(now.to_json())
            except OSError as error:
                raise BadInput(f"--check: {name} cannot be written: {summary(error)}") from error
            return dataclasses.replace(result, unmoved_since=name)
        before = PlanRecord.from_json(_content(name), name)
    else:
        assert options.against is not None
        name = options.against
        with tempfile.TemporaryDirectory(prefix="amp_track-") as folder:
            file = _file_at(name, Path(request.job.workload), Path(folder))
            job = dataclasses.replace(request.job, workload=str(file))
            before = PlanRecord.of(plan(dataclasses.replace(request, job=job)), torch=torch)
    moved = moves(before, now, options.tolerance, name)
    if not moved:
        return dataclasses.replace(result, unmoved_since=name)
    remedy = " If that is intended, write the file again with --update." if options.check is not None else ""
    software = f" (torch {before.torch} before, {torch} now)" if before.torch != torch else ""
    raise PlanMoved(
        f"The plan has moved by more than {options.tolerance} since {name}{software}: {moved[0]}.{remedy}",
        "\n".join(line for each in moved for line in (str(each), *(f"  {layer}" for layer in each.layers))),
        {**result.as_json(), "moved": [{**dataclasses.asdict(each), "layers": list(each.layers)} for each in moved]},
    )


def _content(name: str) -> bytes:
    file = Path(name)
    if not file.exists():
        raise BadInput(f"--check: {name} does not exist. Write it with --update.")
    try:
        with file.open("rb") as opened:
            return opened.read(_MOST_BYTES)
    except OSError as error:
        raise BadInput(f"--check: {name} cannot be read: {summary(error)}") from error


def _file_at(revision: str, file: Path, folder: Path) -> Path:
    """Write the files of a git revision into a folder, and return the target's there. Raises BadInput."""

    def git(*arguments: str) -> bytes:
        try:
            done = subprocess.run(["git", "-C", str(file.resolve().parent), *arguments], capture_output=True)
        except FileNotFoundError as error:
            raise BadInput("--against requires git, which is not installed.") from error
        if done.returncode:
            *_, reason = ["git failed", *done.stderr.decode(errors="replace").splitlines()]
            raise BadInput(f"--against {revision}: {reason.removeprefix('fatal: ')}")
        return done.stdout

    root = Path(git("rev-parse", "--show-toplevel").decode().strip())
    archive = git("-C", str(root), "archive", "--format=tar", revision)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    earlier = folder / file.resolve().relative_to(root.resolve())
    if not earlier.is_file():
        raise BadInput(f"--against {revision}: that revision has no {earlier.relative_to(folder)}.")
    return earlier
