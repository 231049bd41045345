"""worker: join a study with one search worker, or start several with a launcher. The study has all settings."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from amp_track.commands import compare, interrupted_safely, max_batch, report, search
from amp_track.config.options import Request
from amp_track.records.errors import BadInput, StoreFailed, WorkersFailed
from amp_track.report import progress
from amp_track.report.summary import Result
from amp_track.session import checks, study_manifest
from amp_track.session.checks import StoredWorkload
from amp_track.session.session import Runner
from amp_track.session.study_manifest import Remembered
from amp_track.session.study_session import name_for_commands
from amp_track.stores import store_checks
from amp_track.stores.addresses import STORAGE_VARIABLE, StoreAddress
from amp_track.workers import interrupts, processes, servers
from amp_track.workers.launchers import base
from amp_track.workers.launchers.base import Ended, Launcher, Worker

_COMMANDS: Mapping[str, Callable[..., Result]] = {
    "max-batch": max_batch.max_batch,
    "search": search.search,
    "compare": compare.compare,
}
_ANY_DEVICE = "auto"
_FOR_MANY_MACHINES = {
    "--storage": "a database that they reach: postgresql+psycopg://user:password@host/name, or a journal in a folder "
    "that they share: /shared/optuna.log",
    "--tracking-uri": "a server that they reach: http://host:5000",
}
"""The required store address for search workers on several machines, by flag."""


@interrupted_safely
def work(request: Request, *, runner: Runner | None = None) -> Result:
    """Run search workers until the study is finished, and return its result.

    `runner` runs the jobs of a search worker in this process; by default fresh processes on this machine.
    """
    options = request.work_options
    is_this_process = options.launcher == "local" and options.workers == 1
    _check_options(request, is_this_process=is_this_process)
    launcher = base.named(options.launcher)
    launcher.check()
    name, whole_name, known, workload = _remembered(request)
    if is_this_process:
        return _COMMANDS[known.command](_joining(request, name, known, workload), runner=runner)
    environments = launcher.environments(options.workers, known.inspection.hardware.kind, each=known.job.nproc)
    # Several machines may share the working folder.
    folder = Path(options.logs or f"amp_track-workers/{name}/{socket.gethostname()}-{os.getpid()}")
    with base.made_for_output(folder):
        devices = known.job.nproc if known.inspection.hardware.kind != "cpu" else 0
        started = launcher(devices=devices, options=dict(options.sbatch))
        _run(started, _workers(request, environments, folder, whole_name), says_so_at_once=options.launcher == "local")
    try:  # a new page: the pages of the workers were written while others worked
        return report.report(dataclasses.replace(request, stores=dataclasses.replace(request.stores, study=whole_name)))
    except BadInput as error:
        later = request.stores.command("amp-track", "report", shlex.quote(whole_name))
        raise StoreFailed(
            f"The search workers have finished, but the page cannot be written: {error} Run {later} later."
        ) from None


def _check_options(request: Request, *, is_this_process: bool) -> None:
    """Raise BadInput for options that contradict each other."""
    options = request.work_options
    if options.logs is not None and is_this_process:
        raise BadInput("--logs requires --workers 2 or more, or another --launcher: one local worker prints here.")
    if options.sbatch and options.launcher != "slurm":
        raise BadInput("--sbatch requires --launcher slurm.")
    if request.job.device != _ANY_DEVICE and not is_this_process:
        raise BadInput("--device cannot be used with several workers or a launcher: each worker gets its own device.")
    if options.launcher != "local":
        for flag, store in (("--storage", request.stores.optuna), ("--tracking-uri", request.stores.mlflow)):
            if not _is_reachable(store):
                raise BadInput(
                    f"{flag}: got {store} with --launcher {options.launcher} on other machines, expected "
                    f"{_FOR_MANY_MACHINES[flag]}"
                )


def _is_reachable(store: StoreAddress) -> bool:
    """Return False for a store that only this machine reaches. Other checks reject invalid addresses."""
    if store.kind == "journal":  # its folder may be shared by all machines
        return True
    try:
        host = urlsplit(store.url).hostname
    except ValueError:
        return True
    return store.kind not in ("sqlite", "memory") and host is not None and not servers.is_loopback(host)


def _remembered(request: Request) -> tuple[str, str, Remembered, str]:
    """Return the study's name, the name that commands take, its command, and the workload to run."""
    with interrupts.nothing_to_end(), interrupts.waiting():  # servers may not respond
        store_checks.check_stores(request.stores.mlflow, request.stores.optuna)
    from amp_track.study import opening

    with opening.reading(request.stores.storage) as shared:
        name, _, study, known = study_manifest.load(request.stores, shared)
        whole_name = name_for_commands(study)
    stored = StoredWorkload(
        owner=f"Study {name}",
        reference=known.job.workload,
        digest=known.inspection.workload_digest,
        imports=known.inspection.workload_imports,
        trains_itself=bool(known.job.command) or known.job.workload.startswith("amp_track."),
        with_workload=f"amp-track worker {shlex.quote(whole_name)} WORKLOAD",
        if_changed=f"Restore that version, or give amp-track {known.command} another --study for this one.",
    )
    return name, whole_name, known, checks.trusted_workload(stored, request)


def _joining(request: Request, name: str, known: Remembered, workload: str) -> Request:
    """Return the study's request for this machine, with a device of this machine."""
    asked = request.job.device
    device = asked if asked != _ANY_DEVICE else known.job.device.partition(":")[0]
    vary = known.compare_options.vary if known.compare_options is not None else None
    # A comparison stores the job of its first value.
    options = tuple(option for option in known.job.options if vary is None or option[0] != vary[0])
    stores = dataclasses.replace(request.stores, study=name, experiment=known.experiment)
    joined = known.request(stores, owns_process=request.owns_process)
    job = dataclasses.replace(joined.job, workload=workload, device=device, options=options)
    return dataclasses.replace(joined, job=job, joins=True)


def _workers(request: Request, environments: Sequence[dict[str, str]], folder: Path, name: str) -> list[Worker]:
    """Return the search workers to start, each with its environment."""
    storage = request.stores.optuna
    environment = {
        STORAGE_VARIABLE: str(storage.file.absolute()) if storage.kind == "journal" and storage.file else storage.url,
        "MLFLOW_TRACKING_URI": request.stores.mlflow.url,
        "MLFLOW_RUN_ID": "",  # the run of `mlflow run` belongs to this command
    }
    command = [*processes.command("amp_track.__main__", "main()"), "worker", name]
    command += [request.job.workload] if "workload" in request.given else []
    command += ["--trust-store"] if request.trust.trust_store else []
    return [
        Worker(command=command, environment=environment | device, output=folder / f"worker-{number}.err")
        for number, device in enumerate(environments, start=1)
    ]


def _run(launcher: Launcher, workers: Sequence[Worker], *, says_so_at_once: bool) -> None:
    """Run search workers and print their progress. Raises WorkersFailed if all of them fail."""
    several = f"{len(workers)} search workers" if len(workers) > 1 else "a search worker"
    is_announced = False

    def announce() -> None:
        nonlocal is_announced
        if not is_announced:
            progress.say(f"starting {several}; their output is in {shlex.quote(str(workers[0].output.parent))}")
        is_announced = True

    def say(number: int, line: str) -> None:
        announce()  # only after SLURM or Ray has accepted the first worker; an error before is bad input
        progress.say(f"worker {number + 1}: {line}")

    if says_so_at_once:
        announce()
    ended = base.run(launcher, workers, say)
    announce()  # if no worker has printed anything
    failed = [(number, worker) for number, worker in enumerate(ended, start=1) if worker.exit_code]
    for number, worker in failed:
        progress.say(f"worker {number} failed with exit code {worker.exit_code}: {_why(worker)}")
    if len(failed) == len(workers):
        codes = {worker.exit_code for worker in ended}
        problem = f"all {several} failed. The error of the first" if len(workers) > 1 else "the search worker failed"
        exit_code = codes.pop() if len(codes) == 1 else WorkersFailed.exit_code
        raise WorkersFailed(f"{problem}: {_why(ended[0])}", exit_code=exit_code)


def _why(ended: Ended) -> str:
    return ended.last_line.removeprefix("amp-track: ") or "no output"
