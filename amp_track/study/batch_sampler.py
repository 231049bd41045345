"""Sample the max-batch study: choose the next job and its precision for each search worker.

A search worker is one of several processes that run the same command on the same study at the same time.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from amp_track.batch_search import recommended_batch
from amp_track.batch_search.search import (
    FromAbove,
    Hint,
    Limit,
    MaxBatch,
    Next,
    Probe,
    SimulatedMemory,
    explore,
    line_of,
)
from amp_track.config.job import micro_batch
from amp_track.config.precisions import PRECISIONS
from amp_track.memory_plan.predict import ReplayedMemory
from amp_track.memory_plan.replay import TraceFamily
from amp_track.records.plan import Forecast
from amp_track.records.result import JobStatus
from amp_track.study import optuna_internals, storage
from amp_track.study.database import WORKER
from amp_track.study.max_batch_jobs import (
    CLAIM,
    EVAL,
    TYPICAL,
    Done,
    Proposal,
    as_probes,
    best_speed,
    by_precision,
    done_jobs,
    largest_with_headroom,
    read_claim,
    size_ratio,
    speed_readings,
    was_refuted,
)
from amp_track.workers import liveness

_SHORT = ("probe", "multiple", "repeat", "headroom", "timing")
_MEASURED = (*_SHORT, "confirm")
"""The kinds of jobs whose memory shows how it grows with the batch."""
_DRAWN_FACTOR = 9 / 8
"""The first probe of batches as drawn is larger than the max batch by this factor: most have a very large sample too.
"""
_MOST_RUNS_AT_THE_MAX_BATCH = 5
"""Number of fresh processes in which a max batch runs, with the confirmation run, if no two of them take equal memory.
"""
_TIMED = ("probe", "multiple", "timing")
"""The kinds of jobs whose speed is compared between precisions on an accelerator. Runs at a max batch are not: an
allocator without memory to spare may make them several times slower."""
_MOST_HEADROOM_PROBES = 3
_HEADROOM_STEP = 1 / 128
"""Fraction of the budget by which a first wrong prediction is corrected; the second one by three times as much."""
_RIVAL = 0.8
"""A precision below this fraction of the best speed is not recommended, so its batches are not timed."""


class Busy(Exception):
    """Every remaining job depends on one that another search worker is running."""


class Forecasting(Protocol):
    """Makes memory plans by precision on the first call; none if the memory cannot be predicted."""

    @property
    def seconds(self) -> float | None:
        """The duration of making the plans; None if they were not needed."""

    def __call__(self) -> Mapping[str, Forecast]: ...


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal of a max-batch study."""

    precisions: tuple[str, ...]
    """In the order in which they are searched."""
    limit: Limit
    budget_bytes: int
    """The target of the memory model; the job process enforces the real budget."""
    headroom_bytes: int = 0
    """The memory that is left free beside it."""
    first_batch: int
    """The batch to start from without any knowledge."""
    first_batch_reason: str = "the workload's batch size"
    multiple_of: int
    """The largest multiple of this up to the max batch is probed, too."""
    most_evaluated: Limit | None = None
    """The largest batch of an evaluation to probe, if its max batch is to be found."""
    confirm: bool
    """Whether a confirmation run follows at each max batch."""
    confirms_soon: bool = True
    """Whether it is the first run at a planned max batch, before one sample more has failed."""
    whole_probes: bool = True
    """Whether probes include the end of the epoch; otherwise only the confirmation run does."""
    recommends: bool = False
    """Whether to time batches, after the max batches are proven, and to recommend one."""
    recommended_bytes: int | None = None
    """The memory that the recommended batch may take; None for the budget."""
    sure_bytes: int | None = None
    """A max batch whose runs took at most this memory is not repeated; None to repeat each."""
    forecasts: Forecasting | None = None
    """Without them, the search starts at the first batch."""
    beyond: int = 0
    """Number of batches above the first failing one that are probed, too. With workspaces and allocator segments, a
    larger batch may fit although a smaller one does not. A simulated allocator saves these probes."""

    effective_batch_size: int | None = None
    """The samples of an optimizer step per process, if the recommended batch is to be accumulated to it."""

    @property
    def largest_batch(self) -> int:
        """The largest batch of any probe: evaluation data may have more samples than a training may use."""
        return max(limit.batch_size for limit in (self.limit, self.most_evaluated) if limit is not None)

    def candidates(self, largest: int) -> tuple[int, ...]:
        """Return the batches up to `largest` of which one is recommended; none if no batch is what was asked for."""
        if not largest:
            return ()
        return recommended_batch.candidates(largest, multiple_of=self.multiple_of, divisor_of=self.effective_batch_size)

    def multiple_up_to(self, max_batch: int) -> int:
        """Return the largest multiple of `multiple_of` up to `max_batch`; 0 if there is none."""
        return max_batch // self.multiple_of * self.multiple_of

    def batch_to_train(self, max_batch: int) -> tuple[int, str]:
        """Return the batch that is trained at, if batches are not timed first, and what it is; 0 if there is none."""
        if self.effective_batch_size is None or self.recommends:
            return self.multiple_up_to(max_batch), f"largest multiple of {self.multiple_of} up to the max batch"
        parts = micro_batch(self.effective_batch_size, max_batch, multiple_of=self.multiple_of)
        batch_size = parts[0] if parts is not None else 0
        return batch_size, f"largest divisor of {self.effective_batch_size} up to the max batch"


class BatchSampler(optuna.samplers.BaseSampler):
    """Chooses the next job from the trials in the storage. It is stateless, so a study can be resumed.

    Search workers take turns: the one with the lowest trial number chooses first and claims its job in a system
    attribute, so that no two run the same job. While a probe of one precision is running, another search worker takes
    another precision, or assumes that the running probe ends as predicted.
    """

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.deadline = math.inf
        """When a trial no longer waits for jobs of other search workers, by the monotonic clock."""
        self._memories: dict[str, ReplayedMemory] = {}

    def max_batch(self, done: Mapping[str, list[Done]], precision: str) -> MaxBatch | None:
        """Return the max batch of one precision, or None until it is proven and, if required, confirmed."""
        step = self._explore(done, precision, [])
        return step if isinstance(step, MaxBatch) else None

    def next(self, trials: Sequence[FrozenTrial]) -> Proposal | None:
        """Return the next job that no search worker is running; None when every max batch is proven.

        Raises:
            Busy: every remaining job depends on a running one.
        """
        running = defaultdict[str, list[Proposal]](list)
        for trial in trials:
            if trial.state is TrialState.RUNNING and (claim := read_claim(trial)) is not None:
                running[claim.precision].append(claim)
        jobs = done_jobs(trials)
        done, others = by_precision(jobs), {kind: by_precision(jobs, kind) for kind in (TYPICAL, EVAL)}

        def next_of(precision: str, running: Sequence[Proposal]) -> Proposal | None:
            if (proposal := self._next_of(done, precision, running)) is not None:
                return proposal
            steps = (self.other_max_batch(kind, done, others[kind], precision, running) for kind in others)
            return next((step for step in steps if isinstance(step, Proposal)), None)

        proposals = [job for name in self.goal.precisions if (job := next_of(name, [])) is not None]
        if not proposals:
            return (
                self._next_to_recommend(done, by_precision(jobs, "headroom"), running) if self.goal.recommends else None
            )
        for proposal in proposals:
            if proposal.precision not in running:
                return proposal
        for proposal in proposals:
            claims = running[proposal.precision]
            ahead = next_of(proposal.precision, claims)
            if ahead is not None and (ahead.batch_size, ahead.kind) not in {(c.batch_size, c.kind) for c in claims}:
                return ahead
        raise Busy

    def _next_of(self, done: Mapping[str, list[Done]], precision: str, running: Sequence[Proposal]) -> Proposal | None:
        """Return the next job of one precision, assuming that the running ones end as predicted."""
        step = self._explore(done, precision, running)
        if isinstance(step, Proposal):
            return step
        (trained, what), is_refuted = self.goal.batch_to_train(step.batch_size), was_refuted(done[precision])
        jobs = [*done[precision], *running]
        confirmed = {job.batch_size for job in jobs if job.kind == "confirm"}
        whole = {job.batch_size for job in jobs if job.includes_the_end or self.goal.whole_probes}
        if trained and trained not in (confirmed if is_refuted else whole):
            return Proposal(precision, trained, "confirm" if is_refuted else "multiple", what)
        if step.bound != "memory" or not step.batch_size or step.first_failing_batch is None:
            return None
        # A batch above the first one that ran out of memory may fit. If a confirmation run has refuted the probes, only
        # another one can tell: with one sample more, the remainder of the data set differs.
        above, most = step.first_failing_batch + 1, self.goal.limit.batch_size
        why = f"checking whether a batch above {step.first_failing_batch} fits"
        if is_refuted:
            known = confirmed | {job.batch_size for job in done[precision] if not job.fits}
            is_open = above not in known and above <= most
            return Proposal(precision, above, "confirm", why, should_fit=False) if is_open else None
        if any(job.larger_fail_too for job in jobs if job.batch_size == step.first_failing_batch):
            return None
        tried = {job.batch_size for job in jobs}
        for batch_size in range(above, min(above + self.goal.beyond, most + 1)):
            if batch_size not in tried:
                line = line_of(as_probes(done[precision], _MEASURED))
                predicted = round(line.at(batch_size)) if line is not None else None
                return Proposal(precision, batch_size, "beyond", why, predicted, should_fit=False)
        return None

    def other_max_batch(
        self,
        kind: str,
        done: Mapping[str, list[Done]],
        others: Mapping[str, list[Done]],
        precision: str,
        running: Sequence[Proposal] = (),
    ) -> Proposal | MaxBatch | None:
        """Return the max batch of another kind of job at one precision, or the next job towards its proof.

        Return None if it is not to be found, or before the max batch itself is proven. `others` are the finished jobs
        of this kind.
        """
        proven = self.max_batch(done, precision)
        if proven is None or not proven.batch_size:
            return None
        search = {TYPICAL: self._explore_typical, EVAL: self._explore_evaluation}[kind]
        step = search(proven, done[precision], others[precision], running)
        if not isinstance(step, Next):
            return step
        is_evaluation = kind == EVAL
        what = f"evaluation with batches of {step.batch_size}" if is_evaluation else "batches as drawn"
        return Proposal(
            precision,
            step.batch_size,
            kind,
            f"{what}: {step.reason}",
            step.predicted_bytes,
            step.should_fit,
            training_batch_size=proven.batch_size if is_evaluation else 0,
        )

    def _explore_typical(
        self, proven: MaxBatch, done: list[Done], typical: list[Done], running: Sequence[Proposal]
    ) -> Next | MaxBatch | None:
        """Return the max batch with batches as they are drawn, or its next probe; None if all samples have one size."""
        if size_ratio(done) is None:
            return None
        goal, line = self.goal, line_of(as_probes(done, _MEASURED))
        probes = as_probes(typical, (TYPICAL,)) + _as_predicted(running, (TYPICAL,))
        if not probes and proven.first_failing_batch is not None:
            slightly_more = math.ceil(proven.batch_size * _DRAWN_FACTOR)
            return Next(min(slightly_more, goal.limit.batch_size), "slightly above the max batch", should_fit=False)
        if all(not probe.fits and probe.batch_size != proven.batch_size for probe in probes):
            return Next(proven.batch_size, "the max batch")
        hint = Hint(proven.batch_size, fixed_bytes=line.fixed_bytes if line is not None else None)
        return explore(probes, goal.limit, budget_bytes=goal.budget_bytes, hint=hint)

    def _explore_evaluation(
        self, proven: MaxBatch, done: list[Done], evaluated: list[Done], running: Sequence[Proposal]
    ) -> Next | MaxBatch | None:
        """Return the max batch of an evaluation after training at the max batch, or its next probe.

        It leaves the recommended headroom, as the batch of the training does. Return None if it is not to be found.
        """
        limit = self.goal.most_evaluated
        if limit is None:
            return None
        most_bytes = self.goal.recommended_bytes or self.goal.budget_bytes
        probes = []
        for job in evaluated:
            if job.training_batch_size == proven.batch_size and job.fits:
                # Memory that the training takes, too, says nothing about the evaluation.
                peak_bytes = job.job_result.eval_peak_allocated_bytes
                status = JobStatus.OOM if (peak_bytes or 0) > most_bytes else JobStatus.FITS
                probes.append(Probe(job.batch_size, status, peak_bytes))
            elif job.training_batch_size == proven.batch_size:
                probes += as_probes([job], (EVAL,))
        probes += _as_predicted(running, (EVAL,))
        hint = Hint(min(2 * proven.batch_size, limit.batch_size), "twice the max batch of the training")
        return explore(probes, limit, budget_bytes=most_bytes, hint=hint)

    def _next_to_recommend(
        self,
        done: Mapping[str, list[Done]],
        headroom: Mapping[str, list[Done]],
        running: Mapping[str, Sequence[Proposal]],
    ) -> Proposal | None:
        """Return the next probe of a batch to recommend, after the max batches: of the precisions that may be fastest.

        Two search workers never time the same precision.

        Raises:
            Busy: every remaining probe is of a precision that another search worker is timing.
        """
        found = {
            name: max_batch
            for name in self.goal.precisions
            if (max_batch := self.max_batch(done, name)) and max_batch.batch_size
        }
        # On a CPU a run at the limit is as fast as others.
        kinds = _TIMED if self.goal.recommended_bytes is not None else (*_TIMED, "confirm", "repeat")
        speeds = {name: best_speed(done[name], kinds) for name in found}
        fastest = max((speed for speed in speeds.values() if speed is not None), default=0.0)

        def readings(names: Iterable[str]) -> list[Proposal]:
            steps = (self._reading(name, done, headroom[name], found[name]) for name in names)
            return [step for step in steps if step is not None]

        # Precisions without a speed come first, to see whether they are rivals.
        untimed = readings(name for name, speed in speeds.items() if speed is None)
        free = [proposal for proposal in untimed if proposal.precision not in running]
        if free:
            return free[0]
        rivals = readings(name for name, speed in speeds.items() if speed is not None and speed >= _RIVAL * fastest)
        free = [proposal for proposal in rivals if proposal.precision not in running]
        if (untimed or rivals) and not free:
            raise Busy

        def timings(proposal: Proposal) -> int:
            return sum(job.kind == "timing" for job in done[proposal.precision])

        return min(free, key=timings, default=None)  # in turn: the speed of a machine drifts

    def _reading(
        self, precision: str, done: Mapping[str, list[Done]], headroom: list[Done], max_batch: MaxBatch
    ) -> Proposal | None:
        """Return the next probe for the batch to recommend at one precision; None if it is known."""
        own = done[precision]
        largest = largest_with_headroom(own, max_batch.batch_size, self.goal.recommended_bytes)
        readings, line = speed_readings(own), line_of(as_probes(own, _MEASURED))

        def proposal(batch_size: int, kind: str, reason: str) -> Proposal:
            predicted = round(line.at(batch_size)) if line is not None else None
            return Proposal(precision, batch_size, kind, reason, predicted)

        is_timing = any(job.kind == "timing" for job in own)
        tried = {job.batch_size for job in headroom}
        if not is_timing and len(tried) < _MOST_HEADROOM_PROBES and largest not in tried:
            above = self._with_headroom(own, headroom, max_batch)
            # Only then a memory plan, which takes seconds in a process that has made none.
            if above > largest and (memory := self._hint(done, precision).memory) is not None:
                above = self._with_headroom(own, headroom, max_batch, memory=memory)
            if above > largest:
                return proposal(above, "headroom", "within a smaller budget, to leave headroom")
        batches = self.goal.candidates(largest or max_batch.batch_size)
        batch_size = recommended_batch.next_to_time(readings, batches) if self.goal.confirm else None
        if batch_size is not None:
            number = len(readings.get(batch_size, ())) + 1
            is_again = any(job.kind == "timing" and job.batch_size == batch_size for job in own)
            why = f"reading {number} of at most {recommended_batch.READINGS}" if is_again else "it may be recommended"
            return proposal(batch_size, "timing", f"to time it: {why}")
        if batches and batches[0] not in readings:
            return proposal(batches[0], "multiple", "to recommend it")
        return None

    def _with_headroom(
        self, done: list[Done], headroom: list[Done], max_batch: MaxBatch, *, memory: SimulatedMemory | None = None
    ) -> int:
        """Return the candidate that is predicted to take the recommended memory; 0 if there is none.

        Each failure asks for more spare memory, and for a smaller batch.
        """
        room_bytes = self.goal.recommended_bytes
        if room_bytes is None:
            return 0
        goal, line = self.goal, line_of(as_probes(done, _MEASURED))
        below = min([max_batch.batch_size + 1, *(job.batch_size for job in headroom)])
        spare_bytes = (2 ** len(headroom) - 1) * int(_HEADROOM_STEP * goal.budget_bytes)
        is_full = max_batch.bound == "memory"  # whatever a meter says of its memory
        if is_full:
            spare_bytes += goal.budget_bytes - room_bytes
        if memory is not None:
            taken_bytes = memory.needed_bytes(max_batch.batch_size) if is_full else room_bytes
            batch_size = memory.largest_within(taken_bytes - spare_bytes, below=below)
        elif line is not None:
            taken_bytes = round(line.at(max_batch.batch_size)) if is_full else room_bytes
            batch_size = min(line.reaches(taken_bytes - spare_bytes), below - 1)
        else:  # only one batch ran: as if all memory were proportional to the batch
            batch_size = min(int(max_batch.batch_size * (1 - spare_bytes / goal.budget_bytes)), below - 1)
        found = next(iter(goal.candidates(max(batch_size, 0))), 0)
        return found if found > 1 or max_batch.batch_size == 1 else 0  # a training may reject a single sample

    def _explore(
        self, done: Mapping[str, list[Done]], precision: str, running: Sequence[Proposal]
    ) -> Proposal | MaxBatch:
        """Return the max batch of one precision, or the next job towards its proof.

        Short probes come first, then a confirmation run at their max batch. It needs no short probe of this batch if
        one sample more does not fit, or if a memory plan predicts it. If a confirmation run fails where a probe fits,
        confirmation runs below it follow, until one fits and one more sample does not.
        """
        goal = self.goal
        short, long = (
            as_probes(done[precision], kinds) + _as_predicted(running, kinds) for kinds in (_SHORT, ("confirm",))
        )
        failed_long = _first_failure(long)
        short += [  # above a failed confirmation run they would only ask for more of them
            Probe(job.batch_size, job.job_result.status)
            for job in done[precision]
            if job.kind == TYPICAL and job.batch_size < failed_long
        ]
        over = [job for jobs in done.values() for job in jobs if job.job_result.status is JobStatus.OVER_DATASET]
        failed_short = _first_failure(short)
        fitting = (probe.batch_size for probe in short if probe.fits)
        largest = max((batch_size for batch_size in fitting if batch_size < failed_short), default=0)
        # A confirmation run proves as much as a probe, unless it fails where a probe fits.
        known = [*short, *(probe for probe in long if probe.fits or probe.batch_size > largest)]
        known += as_probes(over, _MEASURED)  # the data set is the same at each precision
        long = [probe for probe in long if probe.fits or probe.batch_size <= largest]
        step = explore(known, goal.limit, budget_bytes=goal.budget_bytes)
        if isinstance(step, Next):  # make a memory plan only now: it takes seconds
            hint = self._hint(done, precision)
            # Without a pace, the confirmation run of a workload would be a whole epoch, whatever it takes.
            confirms = goal.confirm and any(job.fits for job in done[precision])
            above: FromAbove = "unplanned" if confirms and goal.confirms_soon else "always" if goal.confirm else "never"
            step = explore(known, goal.limit, budget_bytes=goal.budget_bytes, hint=hint, from_above=above)
            assert isinstance(step, Next), "a hint proves nothing"
            is_planned = hint.slope_bytes is not None and not any(probe.fits for probe in known)
            one_more_fails = any(probe.batch_size == step.batch_size + 1 and not probe.fits for probe in known)
            kind, reason = "probe", step.reason
            if confirms and one_more_fails:
                kind, reason = "confirm", "confirmation run"
            elif step.may_be_confirmed:
                kind, reason = "confirm", f"confirmation run: {step.reason}"
            return Proposal(
                precision,
                step.batch_size,
                kind,
                reason,
                step.predicted_bytes,
                step.should_fit,
                is_planned,
                not step.should_fit and self._larger_need_as_much(step.batch_size, hint.memory),
            )
        if not goal.confirm or not step.batch_size:
            return step
        if not all(probe.fits for probe in long):
            step = _step_down(short, long, goal)
            if isinstance(step, Next):
                return Proposal(precision, step.batch_size, "confirm", step.reason, step.predicted_bytes)
        elif all(probe.batch_size != step.batch_size for probe in long):
            at_max_batch = next(probe for probe in known if probe.batch_size == step.batch_size)
            return Proposal(precision, step.batch_size, "confirm", "confirmation run", at_max_batch.peak_bytes)
        peaks = [probe.peak_bytes for probe in (*short, *long) if probe.batch_size == step.batch_size and probe.fits]
        if not step.batch_size or not _needs_repeat(done[precision], peaks, goal.sure_bytes):
            return step
        return Proposal(precision, step.batch_size, "repeat", "repeat, because memory may vary", peaks[0])

    def _larger_need_as_much(self, batch_size: int, memory: SimulatedMemory | None) -> bool:
        if memory is None:
            return False
        less_bytes = memory.needed_bytes(batch_size) - 1
        larger = range(batch_size + 1, batch_size + 1 + self.goal.beyond)
        return not any(memory.fits(each, less_bytes) for each in larger)

    def _hint(self, done: Mapping[str, list[Done]], precision: str) -> Hint:
        """Return the first batch: from a memory plan, another precision's max batch, or the goal's."""
        first = Hint(self.goal.first_batch, self.goal.first_batch_reason)
        forecasts = self.goal.forecasts() if self.goal.forecasts is not None else {}
        if (planned := forecasts.get(precision)) is not None:
            return Hint(
                max(planned.batch_size, 1),
                "predicted to use most of the budget",
                predicted_bytes=planned.allocated_bytes,
                slope_bytes=planned.slope_bytes,
                memory=self._memory_of(precision, planned),
            )
        hints = []
        for other in PRECISIONS:  # includes those of an earlier command
            probes = as_probes(done[other], ("probe", "confirm")) if other != precision else []
            max_batch = explore(probes, self.goal.limit, budget_bytes=self.goal.budget_bytes, hint=first)
            if isinstance(max_batch, MaxBatch) and max_batch.batch_size and (line := line_of(probes)) is not None:
                hints.append(Hint(max_batch.batch_size, f"start from the max batch of {other}", line.fixed_bytes))
        return min(hints, key=lambda hint: hint.batch_size, default=first)

    def _memory_of(self, precision: str, planned: Forecast) -> ReplayedMemory | None:
        """Return the step in a simulated allocator. It is kept, with its replays."""
        if planned.traces is None:
            return None
        if precision not in self._memories:
            family = TraceFamily(*planned.traces)
            self._memories[precision] = ReplayedMemory(family, most=self.goal.limit.batch_size)
        return self._memories[precision]

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        batch_sizes = IntDistribution(1, self.goal.largest_batch, log=True)
        return {"precision": CategoricalDistribution(PRECISIONS), "batch_size": batch_sizes}

    def suggest(self, trial: optuna.Trial) -> Proposal:
        """Return the job that `sample_relative` has claimed for this trial; prune the trial if no job is left."""
        with storage.one_commit(trial):
            trial.suggest_categorical("precision", PRECISIONS)
            trial.suggest_int("batch_size", 1, self.goal.largest_batch, log=True)
        # The trial itself has read its attributes before the claim was written.
        proposal = read_claim(trial.storage.get_trial(optuna_internals.id_of(trial)))
        assert proposal is not None, "its params are those of a claim"
        shown = ("kind", "reason", "predicted_bytes")
        storage.set_attributes(trial, {name: getattr(proposal, name) for name in shown})
        return proposal

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        shared, trial_id = optuna_internals.storage_of(study), optuna_internals.id_of(trial)
        shared.set_trial_user_attr(trial_id, WORKER, liveness.this_process())
        proposal = self._wait_for_turn(study, trial.number)
        if proposal is None:
            return {}
        shared.set_trial_system_attr(trial_id, CLAIM, dataclasses.asdict(proposal))
        return {"precision": proposal.precision, "batch_size": proposal.batch_size}

    def _wait_for_turn(self, study: optuna.Study, number: int) -> Proposal | None:
        """Return the job of a trial; None if none is left, or if other search workers run all until the deadline."""
        for _ in storage.polls(self.deadline):
            trials = storage.end_stale_trials(study)
            earlier = [trial for trial in trials if trial.number < number and trial.state is TrialState.RUNNING]
            if all(CLAIM in trial.system_attrs for trial in earlier):
                try:
                    return self.next([trial for trial in trials if trial.number != number])
                except Busy:
                    pass
        return None

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        # No job was claimed: another search worker has proven the last max batch since this trial was created.
        raise optuna.TrialPruned("nothing is left to probe")


def _first_failure(probes: Iterable[Probe]) -> int:
    """Return the smallest batch that did not fit; if all did, a larger one than any."""
    return min((probe.batch_size for probe in probes if not probe.fits), default=sys.maxsize)


def _needs_repeat(done: Iterable[Done], peaks: Sequence[int | None], sure_bytes: int | None) -> bool:
    """Return whether a max batch should run once more; `peaks` is the memory of its runs that fitted.

    Two runs that took the same memory to the byte are enough, and one if all took at most `sure_bytes`. Memory that
    varies takes more runs to tell whether it always fits.
    """
    if len(peaks) >= _MOST_RUNS_AT_THE_MAX_BATCH:
        return False
    if any(job.kind == "repeat" and not job.fits for job in done):
        return True
    known = [peak for peak in peaks if peak is not None]
    is_sure = sure_bytes is not None and len(known) == len(peaks) and max(known) <= sure_bytes
    return len(set(known)) == len(known) and not is_sure


def _as_predicted(running: Iterable[Proposal], kinds: Sequence[str]) -> list[Probe]:
    """Return the running jobs of other search workers as probes that end as predicted."""
    statuses = {True: JobStatus.FITS, False: JobStatus.OOM}
    return [
        Probe(job.batch_size, statuses[job.should_fit], job.predicted_bytes, job.predicted_bytes)
        for job in running
        if job.kind in kinds and job.predicted_bytes is not None
    ]


def _step_down(short: list[Probe], long: list[Probe], goal: Goal) -> Next | MaxBatch:
    """Return the next confirmation run after one ran out of memory, or the max batch that they prove.

    Until one fits, the batch is reduced by the missing memory along the line through the probes, doubled each time.
    """
    lowest = min((probe for probe in long if not probe.fits), key=lambda probe: probe.batch_size)
    line = line_of(short)
    if any(probe.fits for probe in long) or lowest.batch_size == 1 or line is None:
        failed = [probe for probe in short if not probe.fits]  # a confirmation run would fail there, too
        return explore([*long, *failed], goal.limit, budget_bytes=goal.budget_bytes)
    lacking = max((lowest.peak_bytes or 0) - line.at(lowest.batch_size), line.slope_bytes)
    guess = line.reaches(goal.budget_bytes - lacking * 2 ** (len(long) - 1))
    reason = f"the confirmation run at {lowest.batch_size} ran out of memory; reduced by the missing memory"
    # One sample comes last: a training with BatchNorm may reject it.
    return Next(min(max(guess, 2), lowest.batch_size - 1), reason)
