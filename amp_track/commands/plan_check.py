"""plan --check and --against: compare a plan with one in a file, or of another commit."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from amp_track.config.cli_params import flags_of
from amp_track.config.job import library_of_model
from amp_track.config.options import ModelOptions, PlanCheckOptions, Request
from amp_track.memory_plan import gpus
from amp_track.records.errors import BadInput, PlanMoved, summary
from amp_track.records.plan import PlanTarget
from amp_track.results.plan import PlanResult
from amp_track.results.plan_check import PlanRecord, moves

_MOST_BYTES = 2**26


def check_options(request: Request, targets: Sequence[PlanTarget]) -> None:
    """Raise BadInput if a comparison is impossible: by its options, its file or its revision."""
    options, target = request.plan_check_options, request.job.workload
    if options.check is None and options.against is None and not options.update:
        if options.tolerance != PlanCheckOptions().tolerance:
            raise BadInput("--tolerance requires --check or --against.")
        return
    for flag, value in (("--vary", request.plan_options.vary), ("--what-if", request.plan_options.what_if)):
        if value:
            raise BadInput(f"{flag} is not supported with --check or --against, which compare one plan.")
    if options.update and options.check is None:
        raise BadInput("--update requires --check.")
    if options.check is not None and options.against is not None:
        raise BadInput("--check and --against exclude each other. Omit one of the two.")
    if options.against is not None and not os.path.isfile(target):
        raise BadInput(f"--against: {target} is not the name of a file. Name the file of the workload, or use --check.")
    if options.check is not None and options.update:
        check_writable("--check", options.check)
    elif options.check is not None:
        before = PlanRecord.from_json(_content(options.check), options.check)
        before.check_settings(settings_of(request, targets), options.check)
    elif options.against is not None:
        file = Path(target).resolve()
        below = file.relative_to(_repository_of(file, options.against)).as_posix()
        _git(file, options.against, "cat-file", "-e", f"{options.against}:{below}")


def compared(result: PlanResult, request: Request, plan: Callable[[Request], PlanResult]) -> PlanResult:
    """Return the result if nothing has moved, or after it has been written with `--update`.

    `plan` plans the target of another commit.

    Raises:
        PlanMoved: a peak or a safe batch has moved by more than the tolerance.
        BadInput: the revision does not exist or has no such file, or the file cannot be written.
    """
    options, settings = request.plan_check_options, settings_of(request, result.targets)
    torch = importlib.metadata.version("torch").partition("+")[0]
    now = PlanRecord.of(result, settings=settings, torch=torch)
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
        with tempfile.TemporaryDirectory(prefix="amp_track-") as folder, _files_at(name, request, folder) as file:
            job = dataclasses.replace(request.job, workload=str(file))
            untracked = dataclasses.replace(request.plan_options, track=False)
            earlier = plan(dataclasses.replace(request, job=job, plan_options=untracked))
            before = PlanRecord.of(earlier, settings=settings, torch=torch)
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


def check_writable(flag: str, name: str) -> None:
    """Raise BadInput if a file cannot be written."""
    folder = os.path.dirname(os.path.abspath(name))
    if os.path.isdir(name) or not os.access(name if os.path.exists(name) else folder, os.W_OK):
        raise BadInput(f"{flag}: {name} cannot be written. Name a file in a folder that exists.")


def settings_of(request: Request, targets: Sequence[PlanTarget]) -> dict[str, str]:
    """Return the target and what else determines a plan, by flag or environment variable."""
    job, limits = request.job, request.max_batch_options
    is_named = library_of_model(job.workload) is not None
    flags = {flag.field.name: flag.name for flag in flags_of(ModelOptions)} if is_named else {}
    loads_all = request.plan_options.gpus and gpus.loads_all_kernels()
    below = os.path.relpath(job.workload)
    settings = {
        "TARGET": below if os.path.isfile(below) and not below.startswith(os.pardir) else job.workload,
        "--precision": ",".join(sorted(limits.precisions or ())),
        "--gpu": ", ".join(sorted(target.name for target in targets if target.is_gpu)),
        "--memory-budget": ", ".join(target.name for target in targets if not target.is_gpu),
        "--max-batch-size": limits.max_batch_size,
        "--batch-size": job.batch_size,  # not the workload's, whose change is one of the code
        "--grad-accum": job.grad_accum if job.grad_accum > 1 else None,
        "--effective-batch-size": limits.effective_batch_size,
        "--max-grad-norm": job.max_grad_norm,
        "--channels-last": job.channels_last or None,
        "CUDA_MODULE_LOADING": "EAGER" if loads_all else None,
        "TIMM_FUSED_ATTN": os.environ.get("TIMM_FUSED_ATTN"),
    }
    given = {flag: str(value) for flag, value in settings.items() if value not in (None, "")}
    return given | {flags.get(name, f"--set {name}"): value for name, value in job.options}


def _content(name: str) -> bytes:
    try:
        with open(name, "rb") as opened:
            return opened.read(_MOST_BYTES)
    except FileNotFoundError:
        raise BadInput(f"--check: {name} does not exist. Write it with --update.") from None
    except OSError as error:
        raise BadInput(f"--check: {name} cannot be read: {summary(error)}") from error


def _repository_of(file: Path, revision: str) -> Path:
    return Path(_git(file, revision, "rev-parse", "--show-toplevel").decode().strip()).resolve()


def _git(file: Path, revision: str, *arguments: str) -> bytes:
    """Return the output of git in the folder of a file. Raise BadInput about the revision if git fails."""
    try:
        done = subprocess.run(["git", "-C", str(file.parent), *arguments], capture_output=True)
    except FileNotFoundError as error:
        raise BadInput("--against requires git, which is not installed.") from error
    if done.returncode:
        *_, reason = ["git failed", *done.stderr.decode(errors="replace").splitlines()]
        raise BadInput(f"--against {revision}: {reason.removeprefix('fatal: ')}")
    return done.stdout


@contextmanager
def _files_at(revision: str, request: Request, folder: str) -> Iterator[Path]:
    """Write the files of a git revision into a folder, and yield the target's there, whose imports find the others.

    Code that is installed from elsewhere is that of today. Links that lead out of the folder are left out.

    Raises:
        BadInput: git does not have the revision, or its files cannot be written.
    """
    file = Path(request.job.workload).resolve()
    root = _repository_of(file, revision)
    archive = _git(file, revision, "-C", str(root), "archive", "--format=tar", revision)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter=_within)
    except OSError as error:
        raise BadInput(f"--against {revision}: its files cannot be written: {summary(error)}") from error
    with _imports_from(Path(folder), root):
        yield Path(folder) / file.relative_to(root)


def _within(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None


@contextmanager
def _imports_from(copy: Path, root: Path) -> Iterator[None]:
    """Let job processes, which inherit sys.path, import from a copy of a repository instead of from it."""
    before = list(sys.path)
    if Path(__file__).resolve().parents[2] != root:  # or they would import the amp_track of then
        paths = (Path(entry or ".").resolve() for entry in before)
        inside = [path for path in paths if path.is_relative_to(root) and "site-packages" not in path.parts]
        sys.path[:0] = [str(copy), *(str(copy / path.relative_to(root)) for path in inside)]
    try:
        yield
    finally:
        sys.path[:] = before
