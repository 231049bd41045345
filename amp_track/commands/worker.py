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
from amp_track.stores import store_checks
from amp_track.stores.addresses import STORAGE_VARIABLE, StoreAddress
from amp_track.workers import interrupts, launchers, processes, servers
from amp_track.workers.launchers.base import Ended, Worker, made_for_output, run

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

    Args:
        request: the study's name in `stores.study`, the workers in `work_options`, and the workload if it was given.
        runner: runs the jobs of a search worker in this process; by default fresh processes on this machine.

    Raises:
        BadInput: the study does not exist, its workload may not run here, its device, budget or torch version differs,
            or no worker can be started. Nothing is written then.
        WorkersFailed: every search worker has failed.
        TargetFailed, NothingFits, KeyboardInterrupt: as `max_batch`, `search` and `compare`.
    """
    is_this_process = request.work_options.launcher == "local" and request.work_options.workers == 1
    _check_options(request, is_this_process=is_this_process)
    name, known, workload = _remembered(request)
    if is_this_process:
        return _COMMANDS[known.command](_joining(request, name, known, workload), runner=runner)
    environments = _environments(request, known)
    # Several machines may share the working folder.
    folder = Path(request.work_options.logs or f"amp_track-workers/{name}/{socket.gethostname()}-{os.getpid()}")
    with made_for_output(folder):
        _run(request, known, _workers(request, environments, folder, name))
    return _reported(request, name)


def _check_options(request: Request, *, is_this_process: bool) -> None:
    """Raise BadInput for options that contradict each other, or a launcher that is not installed."""
    options, device = request.work_options, request.job.device
    if options.logs is not None and is_this_process:
        raise BadInput("--logs requires --workers 2 or more, or another --launcher: one local worker prints here.")
    if options.sbatch and options.launcher != "slurm":
        raise BadInput("--sbatch requires --launcher slurm.")
    if device != _ANY_DEVICE and not is_this_process:
        raise BadInput("--device cannot be used with several workers or a launcher: each worker gets its own device.")
    if options.launcher != "local":
        for flag, store in _stores(request).items():
            if not _is_reachable(store):
                raise BadInput(
                    f"{flag}: got {store} with --launcher {options.launcher} on other machines, expected "
                    f"{_FOR_MANY_MACHINES[flag]}"
                )
    launchers.named(options.launcher).check()


def _stores(request: Request) -> dict[str, StoreAddress]:
    """Return the store addresses by flag, with an absolute path of a journal."""
    storage = request.stores.optuna
    if storage.kind == "journal" and storage.file is not None:
        storage = StoreAddress.parse(str(storage.file.absolute()))
    return {"--storage": storage, "--tracking-uri": request.stores.mlflow}


def _is_reachable(store: StoreAddress) -> bool:
    """Return False for a store that only this machine reaches. Other checks reject invalid addresses."""
    if store.kind == "journal":  # its folder may be shared by all machines
        return True
    try:
        host = urlsplit(store.url).hostname
    except ValueError:
        return True
    return store.kind not in ("sqlite", "memory") and host is not None and not servers.is_loopback(host)


def _remembered(request: Request) -> tuple[str, Remembered, str]:
    """Return the study's name, its command, and the workload to run."""
    with interrupts.nothing_to_end(), interrupts.waiting():  # servers may not respond
        store_checks.check_stores(request.stores.mlflow, request.stores.optuna)
    from amp_track.study import opening

    with opening.reading(request.stores.storage) as shared:
        name, _, _, known = study_manifest.load(request.stores, shared)
    stored = StoredWorkload(
        owner=f"Study {name}",
        reference=known.job.workload,
        digest=known.inspection.workload_digest,
        imports=known.inspection.workload_imports,
        with_workload=f"amp-track worker {shlex.quote(name)} WORKLOAD",
        if_changed=f"Restore that version, or give amp-track {known.command} another --study for this one.",
    )
    return name, known, checks.trusted_workload(stored, request)


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


def _environments(request: Request, known: Remembered) -> list[dict[str, str]]:
    """Return the environment of each search worker to start. Raises BadInput if a device is missing."""
    options = request.work_options
    launcher = launchers.named(options.launcher)
    devices = launcher.environments(options.workers, known.inspection.hardware.kind, each=known.job.nproc)
    stores = _stores(request)
    environment = {
        STORAGE_VARIABLE: stores["--storage"].url,
        "MLFLOW_TRACKING_URI": stores["--tracking-uri"].url,
        "MLFLOW_RUN_ID": "",  # the run of `mlflow run` belongs to this command
    }
    return [environment | device for device in devices]


def _workers(request: Request, environments: Sequence[Mapping[str, str]], folder: Path, name: str) -> list[Worker]:
    """Return the search workers to start, each with its environment."""
    work = ["worker", name]
    work += [request.job.workload] if "workload" in request.given else []
    work += ["--trust-store"] if request.trust.trust_store else []
    return [
        Worker(
            command=[*processes.command("amp_track.__main__", "main()"), *work],
            environment=environment,
            output=folder / f"worker-{number}.err",
        )
        for number, environment in enumerate(environments, start=1)
    ]


def _run(request: Request, known: Remembered, workers: Sequence[Worker]) -> None:
    """Run search workers and print their progress. Raises WorkersFailed if all of them fail."""
    folder = shlex.quote(str(workers[0].output.parent))
    several = f"{len(workers)} search workers"
    is_announced = False

    def announce() -> None:
        nonlocal is_announced
        if not is_announced:
            progress.say(f"starting {several if len(workers) > 1 else 'a search worker'}; their output is in {folder}")
        is_announced = True

    def say(number: int, line: str) -> None:
        announce()  # only after SLURM or Ray has accepted the first worker; an error before is bad input
        progress.say(f"worker {number + 1}: {line}")

    devices = known.job.nproc if known.inspection.hardware.kind != "cpu" else 0
    if request.work_options.launcher == "local":
        announce()
    launcher = launchers.named(request.work_options.launcher)
    ended = run(launcher(devices=devices, options=dict(request.work_options.sbatch)), workers, say)
    announce()  # if no worker has printed anything
    failed = [(number, worker) for number, worker in enumerate(ended, start=1) if worker.exit_code]
    for number, worker in failed:
        progress.say(f"worker {number} failed with exit code {worker.exit_code}: {_why(worker)}")
    if len(failed) == len(workers):
        codes = {worker.exit_code for worker in ended}
        raise WorkersFailed(
            f"all {several} failed. The error of the first: {_why(ended[0])}"
            if len(workers) > 1
            else f"the search worker failed: {_why(ended[0])}",
            exit_code=codes.pop() if len(codes) == 1 else WorkersFailed.exit_code,
        )


def _why(ended: Ended) -> str:
    return ended.last_line.removeprefix("amp-track: ") or "no output"


def _reported(request: Request, name: str) -> Result:
    """Return the study's result with a new page: the pages of the workers were written while others worked."""
    try:
        return report.report(dataclasses.replace(request, stores=dataclasses.replace(request.stores, study=name)))
    except BadInput as error:
        raise StoreFailed(
            f"The search workers have finished, but the page cannot be written: {error} Run amp-track report "
            f"{shlex.quote(name)} later."
        ) from None
