"""max-batch: find the max batch at every precision, prove it with one more sample, and confirm it with a longer run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from amp_track.commands import interrupted_safely
from amp_track.config.inspection import Support
from amp_track.config.job import Job, steps_per_epoch
from amp_track.config.options import Request
from amp_track.config.precisions import PRECISIONS, REFERENCE, Precision
from amp_track.records.errors import BadInput, NothingFits
from amp_track.records.result import AS_AT_FP32, IN_16_BITS, IN_FLOAT32, JobResult, JobStatus
from amp_track.records.units import format_bytes
from amp_track.report import progress
from amp_track.report.summary import proof
from amp_track.results.max_batch import NOT_ASKED_FOR, MaxBatchResult, PrecisionResult
from amp_track.runner.runner import ignore
from amp_track.session import probe_jobs, publish, study_manifest
from amp_track.session.run_job import limit_in_words, raise_on_crash, run_trial, why_nothing_fits
from amp_track.session.session import Runner, Session
from amp_track.session.study_session import Studies, StudyRun, TrackedStudy, tracked

if TYPE_CHECKING:
    from amp_track.study.batch_sampler import BatchSampler
    from amp_track.study.types import Study
    from amp_track.tracking import Tracker


_TRIED_SAMPLES, _MANY_TRIED_SAMPLES = 2, 2048
"""The batch of the first run of a function or a command, and of another one if no DataLoader has shown its batches."""
_FAILED = "the training failed: "
_MUCH_LARGER, _NO_GROWTH_BYTES = 256, 2**16
"""If the batch grows by this factor, any training needs more additional memory than this."""
_LARGER, _GROWTH_BYTES = 3, 2**20
"""The same where memory has grown by this before: an optimizer step that takes most hides only the first growth."""


@interrupted_safely
def max_batch(request: Request, *, runner: Runner | None = None) -> MaxBatchResult:
    """Find the max batch at every precision.

    Raises:
        BadInput: before anything is written.
        TargetFailed, NothingFits, KeyboardInterrupt: after runs and trials have ended with that status.
    """
    session = Session.prepare(request, request.max_batch_options.precisions, runner=runner)
    studies = Studies(session)
    studies.check("max-batch")
    if session.inspection.kind != "workload":
        studies.session = _try_out(session, _known_supports(studies))
    from amp_track import tracking

    return max_batch_in(studies, session.open_tracker(), given_run_id=tracking.run_id_of_environment(), recommends=True)


def _known_supports(studies: Studies) -> dict[str, Support]:
    """Return what the same command has found out before about the precisions of a study.

    One that failed runs again, and so does one with a caution, which may have been named by another command.
    """
    asked, study = studies.session.request.max_batch_options.precisions, studies.existing("max-batch")
    manifest = study_manifest.stored(study) if study is not None else None
    if manifest is None or manifest.max_batch_options.precisions != asked:
        return {}
    known = {
        name: support
        for name, support in manifest.inspection.precisions
        if not support.reason.startswith(_FAILED) and not (support.has_caution and asked is None)
    }
    if "tf32" not in known:  # which is compared with fp32
        known.pop(REFERENCE, None)
    return known


def _try_out(session: Session, known: Mapping[str, Support]) -> Session:
    """Run a function or a command on a small batch at each precision that is not known, before anything is written.

    Return the session without the precisions at which it fails or seems to compute in float32; the latter stay, with a
    caution, if they were asked for, as do fp32 and tf32 if they seem to compute in 16 bits. Raises BadInput, and
    TargetFailed if all fail or if it was asked for.
    """
    found: dict[str, Support] = {}
    is_asked_for = session.request.max_batch_options.precisions is not None
    shown: tuple[Job, JobResult] | None = None
    kernels_of_fp32: str | None = None
    for precision in session.precisions:
        if precision in known:
            found[precision] = known[precision]
            continue
        job = dataclasses.replace(session.job, precision=precision, batch_size=_TRIED_SAMPLES, probe=True)
        with progress.working(f"trying {session.job.short_name} with {_TRIED_SAMPLES} samples at {precision}"):
            job_result = session.runner.run(job, ignore)
        if job_result.status in (JobStatus.CRASHED, JobStatus.TIMED_OUT):
            left_out = sum(not support.supported for support in found.values())
            if is_asked_for or left_out + 1 == len(session.precisions):
                raise_on_crash(job, job_result)
            found[precision] = Support(supported=False, reason=_why_left_out(job_result))
        elif job_result.ignores_precision:
            autocasts = Precision.named(precision).autocasts
            is_kept = is_asked_for or not autocasts
            found[precision] = _ignored(IN_FLOAT32 if autocasts else IN_16_BITS, is_kept=is_kept)
        elif precision == "tf32" and job_result.float32_kernels == kernels_of_fp32:
            found[precision] = _ignored(AS_AT_FP32, is_kept=is_asked_for)
        if precision == REFERENCE:
            kernels_of_fp32 = job_result.float32_kernels or None
        if job_result.fits:
            shown = job, job_result
    if shown is not None and shown[1].training_samples is None:
        job, job_result = shown
        job = dataclasses.replace(job, batch_size=_MANY_TRIED_SAMPLES)
        with progress.working(f"trying {session.job.short_name} with {_MANY_TRIED_SAMPLES} samples"):
            many_result = None
            with contextlib.suppress(BadInput):  # its data may have no such batch
                many_result = session.runner.run(job, ignore)
        if many_result is not None:
            _check_growth(job, many_result, [(_TRIED_SAMPLES, job_result)])
    supports = tuple((name, found.get(name, support)) for name, support in session.inspection.precisions)
    inspection = dataclasses.replace(session.inspection, precisions=supports)
    left = tuple(name for name in session.precisions if inspection.support(name).supported)
    return Session(session.request, session.runner, inspection, left)


def _ignored(reason: str, *, is_kept: bool) -> Support:
    """Return the support of a precision that a training ignores: it is left out, or kept with a caution."""
    reason += "" if is_kept else "; name it with --precision to measure it all the same"
    return Support(supported=is_kept, reason=reason, has_caution=is_kept)


def _why_left_out(job_result: JobResult) -> str:
    """Return why a precision is left out, with the last line that a script has printed."""
    message, said = job_result.message, "".join(job_result.traceback.strip().splitlines()[-1:])
    return f"{_FAILED}{message}" + (f": {said}" if said not in ("", message) else "")


def max_batch_in(
    studies: Studies, tracker: Tracker, *, given_run_id: str | None, recommends: bool = False
) -> MaxBatchResult:
    """Find the max batches of a prepared session, in a separate study; with `recommends` also time some batches."""
    study, sampler = open_study(studies, recommends=recommends)
    with tracked(studies, study, tracker, given_run_id=given_run_id) as tracked_study:
        known = study_manifest.keep(tracked_study, "max-batch")
        limit_seconds = studies.session.request.search_options.time_limit_seconds
        result = find_max_batches(tracked_study, sampler, limit_seconds=limit_seconds)
        if page := publish.page_of_search(study, tracked_study.parent):  # it has more
            return dataclasses.replace(result, report=page)
        whole = result
        if known.precisions != studies.session.precisions:  # an earlier command has searched others
            whole_session = known.session(studies.session.request.stores)
            whole = stored_result(whole_session, study, studies.free_bytes(study), run=tracked_study.run)
        return dataclasses.replace(result, report=publish.publish(tracked_study, whole, "max-batch"))


def open_study(studies: Studies, *, recommends: bool = False) -> tuple[Study, BatchSampler]:
    """Open the study NAME/max-batch, new or resumed, with the sampler that proposes the next probe."""
    from amp_track.study.batch_sampler import BatchSampler

    study = studies.open("max-batch")
    goal = probe_jobs.goal_of(studies.session, studies.free_bytes(study), recommends=recommends)
    study.sampler = sampler = BatchSampler(goal)
    return study, sampler


def find_max_batches(
    tracked_study: TrackedStudy, sampler: BatchSampler, *, limit_seconds: float | None = None
) -> MaxBatchResult:
    """Probe until every max batch is proven and confirmed, and log them to the study's run.

    After `limit_seconds` no second probe starts, and none if other search workers run all that is left. The max batches
    that are not proven yet are missing then.

    Raises:
        NothingFits: not even one sample fits, at any precision.
    """
    from amp_track.study import max_batches, trials
    from amp_track.study.max_batch_jobs import Proposal

    session, study, goal = tracked_study.session, tracked_study.study, sampler.goal
    limit, memory_bytes = limit_in_words(session.job), session.inspection.hardware.memory_bytes
    if session.job.memory_budget_bytes is None and memory_bytes is not None:  # other processes may hold most of it
        limit += f" ({format_bytes(goal.budget_bytes)} of {format_bytes(memory_bytes)})"
    progress.say(f"finding the max batch within {limit} at {', '.join(session.precisions)}")
    for name, reason in session.skipped.items():
        progress.say(f"{name} skipped: {reason}")
    session.say_cautions()

    deadline = sampler.deadline = time.monotonic() + (limit_seconds if limit_seconds is not None else math.inf)
    has_probed, recommends, shown = False, False, {*max_batches.proven(study, sampler)}
    while max_batches.is_anything_left(study, sampler, deadline):
        if has_probed and time.monotonic() > deadline:
            progress.say("--time-limit is reached; the same command goes on with what is left")
            break
        has_probed = True
        with trials.next_trial(study) as asked:  # Optuna asks the sampler for the job
            proposal = sampler.suggest(asked.trial)
            if proposal.kind in ("headroom", "timing") and not recommends:
                recommends = True
                _say_proofs(max_batches.proven(study, sampler), shown)  # another search worker may have found the last
                progress.say("every max batch is proven; timing batches to recommend one (Ctrl-C keeps what is proven)")
            known = study.get_trials(deepcopy=False)
            probed = max_batches.probes_of(known, proposal)
            if not probed:  # the max batch of the previous precision is final
                publish.show_max_batches(tracked_study.studies, study, goal)
            budget = probe_jobs.budget_of(session, goal, proposal.kind)
            job = probe_jobs.job_of(session, proposal, budget, probed, recommends=goal.recommends)
            where = _bracket_in_words(*max_batches.bracket_of(known, proposal.precision))
            job_result, run_id = run_trial(tracked_study, asked.trial, job, proposal=proposal, where=where)
            if session.inspection.kind != "workload":
                # A few of the largest samples may take as much memory as many drawn ones.
                same = [row for row in max_batches.probe_results(known) if row.precision == job.precision]
                rows = [row for row in same if (row.kind == "typical") == (proposal.kind == "typical")]
                _check_growth(job, job_result, [(row.batch_size, row.job_result) for row in rows])
            asked.value = max_batches.record(asked.trial, proposal, job_result, run_id, goal.budget_bytes)
        if shown < {*goal.precisions}:  # else only timings of batches to recommend are left
            _say_proofs(max_batches.proven(study, sampler), shown)
    publish.show_max_batches(tracked_study.studies, study, goal)

    fits = max_batches.proven(study, sampler)
    for precision, fitted in fits.items():  # without a limit, measure the memory of one sample that does not fit
        if not fitted.max_batch.batch_size and fitted.why_unsupported is None and time.monotonic() <= deadline:
            budget = probe_jobs.budget_of(session, goal)
            one_sample = probe_jobs.job_of(session, Proposal(precision, 1, "beyond", ""), budget)
            wanted = fitted.failure.wanted_bytes if fitted.failure is not None else None
            needed = max(session.bytes_needed(one_sample) or 0, wanted or 0)
            fits[precision] = dataclasses.replace(fitted, bytes_needed=needed or None)
    tracked_study.tracker.settle()
    result = result_of(session, study, sampler, fits, run=tracked_study.run)
    publish.keep_max_batches(tracked_study, result)
    if fits.keys() >= {*session.precisions} and not any(fitted.max_batch.batch_size for fitted in fits.values()):
        raise NothingFits(why_nothing_fits(session.job, goal.budget_bytes, fits), result=result.as_json())
    return result


def _say_proofs(proven: Mapping[str, PrecisionResult], shown: set[str]) -> None:
    """Print the proofs that were not shown yet, and add their precisions to `shown`."""
    for precision, fitted in proven.items():
        if precision not in shown:
            shown.add(precision)
            progress.say(proof(precision, fitted))


def _check_growth(job: Job, job_result: JobResult, known: Sequence[tuple[int, JobResult]]) -> None:
    """Raise BadInput if a larger batch takes no more memory.

    A function or command that takes the same at a much larger one ignores its batch size. One whose memory grew before
    has no more samples.
    """
    assert job.batch_size is not None
    if not job_result.fits:
        return
    smaller = sorted((size, _taken_bytes(each)) for size, each in known if each.fits and size < job.batch_size)
    for index, (batch_size, taken_bytes) in enumerate(smaller):
        if _taken_bytes(job_result) - taken_bytes >= _NO_GROWTH_BYTES:
            continue
        factor = job.batch_size / batch_size
        no_more = f"{job.workload}: batch {job.batch_size} takes no more memory than batch {batch_size}, so"
        if factor >= _MUCH_LARGER:
            raise BadInput(f"{no_more} it seems to ignore its batch size. Make each step train on batch_size samples.")
        if factor >= _LARGER and any(taken_bytes - earlier >= _GROWTH_BYTES for _, earlier in smaller[:index]):
            raise BadInput(
                f"{no_more} the training seems to have fewer samples. Give their number with --max-batch-size."
            )


def _taken_bytes(job_result: JobResult) -> int:
    return job_result.peak_allocated_bytes or job_result.peak_bytes or 0


def result_of(
    session: Session, study: Study, sampler: BatchSampler, fits: Mapping[str, PrecisionResult], *, run: StudyRun
) -> MaxBatchResult:
    """Return the result of a study with the proven max batches `fits`; other precisions are skipped with a reason."""
    from amp_track.study import max_batches

    trials = study.get_trials(deepcopy=False)
    others = (name for name in PRECISIONS if name not in session.precisions)
    skipped = {name: session.skipped.get(name, NOT_ASKED_FOR) for name in others}
    unproven = {}
    for precision in session.precisions:
        if precision not in fits:
            known = _bracket_in_words(*max_batches.bracket_of(trials, precision)) or "no probe has run"
            unproven[precision] = f"not proven yet: {known}; run the command again"
    options, inspection = session.request.max_batch_options, session.inspection
    probes = max_batches.probe_results(trials)
    return MaxBatchResult(
        study=run.name,
        run_id=run.run_id,
        experiment_id=run.experiment_id,
        job=session.job,
        target_recipe=inspection.recipe,
        asked=session.request.job,
        hardware=inspection.hardware,
        precisions={
            precision: dataclasses.replace(
                fitted,
                run_id=run.id_of(fitted.run_id) if fitted.run_id is not None else None,
                epoch_steps=_steps_of_an_epoch(session, fitted.max_batch.batch_size),
            )
            for precision, fitted in fits.items()
        },
        skipped=skipped | unproven,
        unproven=tuple(unproven),
        cautions=session.cautions,
        probes=tuple(dataclasses.replace(probe, run_id=run.id_of(probe.run_id)) for probe in probes),
        training_samples=_training_samples(session, [probe.job_result for probe in probes]),
        drops_last=any(probe.job_result.drops_last for probe in probes),
        workload_batch_size=inspection.batch_size if inspection.kind == "workload" else None,
        limit_bytes=sampler.goal.budget_bytes,
        recommended_bytes=sampler.goal.recommended_bytes,
        headroom_bytes=sampler.goal.headroom_bytes,
        multiple_of=options.multiple_of,
        grad_accum=probe_jobs.accumulation_of(session),
        effective_batch_size=options.effective_batch_size,
        plan_seconds=sampler.goal.forecasts.seconds if sampler.goal.forecasts is not None else None,
    )


def stored_result(session: Session, study: Study, free_bytes: int, *, run: StudyRun) -> MaxBatchResult:
    """Return what the trials of a study prove so far; `free_bytes` were free when it began."""
    from amp_track.study.batch_sampler import BatchSampler
    from amp_track.study.max_batches import proven

    # A memory plan would start torch and the workload only to propose the next probe.
    sampler = BatchSampler(dataclasses.replace(probe_jobs.goal_of(session, free_bytes), forecasts=None))
    return result_of(session, study, sampler, proven(study, sampler), run=run)


def _bracket_in_words(fits: int, fails: int | None) -> str:
    """Return `batch 512 fits, 1024 does not`, or the known part of it."""
    if not fits:
        return f"batch {fails} does not fit" if fails is not None else ""
    return f"batch {fits} fits" + (f", {fails} does not" if fails is not None else "")


def _training_samples(session: Session, job_results: Sequence[JobResult]) -> int | None:
    """Return the training samples of an epoch; those of a function or a command as its DataLoader has shown them."""
    if session.inspection.kind == "workload":
        return session.inspection.training_samples if session.inspection.knows_samples(session.job) else None
    of_each_process = max((job_result.training_samples or 0 for job_result in job_results), default=0)
    return of_each_process * session.job.nproc or None


def _steps_of_an_epoch(session: Session, batch_size: int) -> int:
    from amp_track.study.max_batch_jobs import Proposal

    if not batch_size or session.inspection.kind != "workload":
        return 0
    job = probe_jobs.job_of(session, Proposal("fp32", batch_size, "probe", ""), None)
    return steps_per_epoch(job, session.training_samples(job))
