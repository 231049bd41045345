"""Watch a training that is not ours from outside, through torch's hooks, and end it after enough optimizer steps.

A probe is a shortened epoch, as in `amp_track.training.trainer`: two full batches, the epoch's own last batch, an
evaluation of two batches and its own last one, then full batches again. Three full steps alone are not enough: four of
five max batches found with them ran out of memory later, three at the epoch's smaller last batch. If samples differ in
size, the batches of a probe consist of the largest ones, and so does every second batch of a longer run. A probe with
several readings of the speed makes full steps only.

Uses private names of torch: `Optimizer.__init__`, `Module._apply`, `autocast._enabled`, `device` and `fast_dtype`, and
`__next__`, `_next_index`, `_sampler_iter`, `_index_sampler`, `_dataset_kind`, `_dataset`, `_num_workers`, `_rcvd_idx`,
`_send_idx`, `_num_yielded` and `_collate_fn` of `torch.utils.data.dataloader._BaseDataLoaderIter`. If torch renames
them, the first probe raises AttributeError.
`_WRAPPED` has private names of three libraries: if one is renamed, its batches stay as they are drawn, and the result
says so.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from threading import current_thread, main_thread
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    dataloader,
    default_collate,
)

from amp_track.config.job import Job, loads_in_its_own_process
from amp_track.config.precisions import Precision
from amp_track.records.errors import BadInput, chain, summary
from amp_track.records.events import Event, Started, StepsDone
from amp_track.records.result import JobResult, JobStatus
from amp_track.training import lightning_loop, sample_sizes
from amp_track.training.amp import random_state
from amp_track.training.amp.precision import float32_kernels
from amp_track.training.devices import oom
from amp_track.training.devices.base import Device
from amp_track.training.devices.cpu import peak_resident_bytes
from amp_track.training.sample_sizes import SampleSizes, SizesUnknown
from amp_track.training.timing import reading_seconds

_PROBE_STEPS = 5
"""Two full steps, the smaller last one of the epoch, and two after the evaluation: fragmentation grows over the first
steps. A training without a DataLoader makes as many full ones."""
_FULL = 2
"""The optimizer steps of a shortened epoch, or the batches of an evaluation, before its last batch."""
_MOST_STEPS, _MOST_QUEUED_STEPS = 50, 500
"""The most steps of a probe, without and with a queue, if its timed steps do not take `reading_seconds` before."""
_PROGRESS_SECONDS = 0.2
_PATIENCE = 10
"""An optimizer that has made no step after this many times the steps of another one is not waited for."""
_SHORT_EVALUATION = (
    "A probe draws three batches of an evaluation: compare its outputs with the targets in these batches, not in the "
    "data set."
)
_MOST_INDICES = 1_000_000
"""The most indices that are drawn from a sampler of another kind, to learn which ones it draws."""
_WRAPPED = {
    "BatchSamplerShard": "batch_sampler", "SkipBatchSampler": "batch_sampler",  # accelerate
    "_IndexBatchSamplerWrapper": "_batch_sampler",  # Lightning
    "_RepeatSampler": "sampler",  # timm
}  # fmt: skip
"""The attribute with the batch sampler within one that leaves its batches as they are, by the name of the type."""

_16_BIT = (torch.float16, torch.bfloat16)


class _Made(NamedTuple):
    """An optimizer step, with the part of its time in which it waited for its batches."""

    seconds: float
    samples: int
    load_seconds: float


Send = Callable[[Event | JobResult | BadInput], None]
"""Sends an event to the command; a training that ends its process sends its result too."""


class TrainingWatch:
    """Counts optimizer steps, limits memory from the first parameter on, shortens epochs, and measures.

    Args:
        job: the resolved job. `steps` limits a longer run; a probe ends by itself.
        device: where the training computes.
        send: called with each event; with the result too if the watch ends the process, after the last step.
        enforce_budget: limit memory to the job's budget, instead of only measuring it.
        is_alone: whether no other process trains with this one. Several have to end after the same step, not by time.
    """

    def __init__(
        self,
        job: Job,
        device: Device,
        send: Send,
        *,
        enforce_budget: bool,
        is_alone: bool = True,
    ) -> None:
        assert job.batch_size is not None
        self._job, self._batch_size = job, job.batch_size
        self._device, self._send = device, send
        self._enforce_budget = enforce_budget
        self.ends_process = True
        """False if the caller counts steps and asks `is_done`, because the training yields after each."""
        most_steps = _MOST_QUEUED_STEPS if device.has_queue else _MOST_STEPS
        self._most_steps = most_steps if is_alone else _PROBE_STEPS
        self._process = os.getpid()  # data-loading processes inherit the hooks
        self._loads_alone = loads_in_its_own_process(device.kind, job.memory_budget_bytes)
        self._steps_of: Counter[int] = Counter()
        self._optimizers: list[int] = []
        self._autocasts = Precision.named(job.precision).autocasts
        self._has_16_bits = False
        """Whether the training has had a 16-bit parameter, such as a copy that it casts its weights to."""
        self._steps_in_16_bits = False
        """Whether it has entered an autocast to 16 bits, or an optimizer has a 16-bit parameter."""
        self._float32_kernels = ""
        self._looked_at: set[int] = set()
        """The optimizers whose parameters have been looked at, in their first step."""
        self.has_begun = False
        """Whether the training has a parameter, so that its memory is limited."""
        self._started = self._last_progress = time.perf_counter()
        self._ends: list[float] = []
        self._intervals: list[_Made] = []
        """Each step that followed another one directly."""
        self._first_steps: list[_Made] = []
        """The first step of each epoch but the first one, from its first draw on."""
        self._load_seconds = 0.0
        """The time that the training has waited for batches since the last step."""
        self._is_loading = False
        self._epoch_began: float | None = None
        """When the first batch of an epoch was drawn, until its first step."""
        self._steps_needed = _PROBE_STEPS
        self._has_workers = False
        """Whether the training's last loader has worker processes."""
        self._last_draw: tuple[int, int, float | None] = (0, 0, None)
        """The samples of the largest batch since the last step and of its data set, and the ratio of their sizes.

        Of several loaders, the one that gives the job's batches counts, else the last one.
        """
        self._has_drawn_full = False
        """Whether the job's batch has been drawn since the last step."""
        self._samples_since_step = 0
        self._batches_since_step = 0
        """The batches of the loader that has given the most since the last step."""
        self._batches_of_steps: Counter[int] = Counter()
        self._is_at_end = False
        """Whether the last batch of the training's loader has been drawn."""
        self._is_interrupted = True
        """Whether an evaluation or a new epoch has begun since the last step."""
        self._drops_last = False
        """Whether the training's last loader leaves out a last batch that is not full."""
        self._samples_without_a_batch: int | None = None
        """The samples of a data set that is smaller than its loader's batch (`drop_last`)."""
        self._samples_of_empty = 0
        """The most samples of a data set whose loader has no batch: nobody may draw from it, as Lightning."""
        self._has_drawn = False
        """Whether the training has drawn from a loader."""
        self._has_shortened_epoch = False
        self._trained_on: set[int] = set()
        """The data sets whose batches came before an optimizer step, by id."""
        self._drawn_from: set[int] = set()
        """Those drawn from since the last step."""
        self._is_in_training_mode = True
        """Whether a model was last set to training, and not to evaluation."""
        self._largest_draw = 0
        self._dataset_samples = 0
        self._sizes: dict[tuple[int, int], SampleSizes | None] = {}
        """The sizes of each data set's samples, if they differ."""
        self._size_ratio: float | None = None
        self._why_as_drawn = ""
        self.phase = "data"

    def install(self) -> None:
        """Install the hooks in this process."""
        self._send(Started(settings=(("memory_meter", self._device.meter),), scale=None))
        register_module_parameter_registration_hook(self._parameter_registered)
        torch_optimizer.register_optimizer_step_pre_hook(self._before_step)
        torch_optimizer.register_optimizer_step_post_hook(self._after_step)
        make, load = torch_optimizer.Optimizer.__init__, DataLoader.__init__
        enter, convert, set_mode = torch.autocast.__enter__, nn.Module._apply, nn.Module.train
        draw, load_batch = dataloader._BaseDataLoaderIter._next_index, dataloader._BaseDataLoaderIter.__next__
        watch = self

        @functools.wraps(make)
        def make_optimizer(self: Any, *arguments: Any, **keywords: Any) -> None:
            watch._begin()
            make(self, *arguments, **keywords)
            watch._optimizers.append(id(self))

        def next_index(self: Any) -> Any:
            return watch._drawn(self, lambda: draw(self))  # type: ignore[no-untyped-call]

        def next_batch(self: Any) -> Any:
            batch = load_timed(self)
            if self._num_yielded == getattr(self, "amp_track_last", 0):
                lightning_loop.end_epoch()
            return batch

        def load_timed(self: Any) -> Any:
            # The training waits for the outermost of nested loaders, and not for one in a thread.
            if watch._is_loading or not torch.is_grad_enabled() or current_thread() is not main_thread():
                return load_batch(self)
            watch._is_loading, asked = True, time.perf_counter()
            try:
                return load_batch(self)
            finally:
                watch._is_loading = False
                watch._load_seconds += time.perf_counter() - asked

        @functools.wraps(load)  # Lightning reads its signature, to make a loader for each rank
        def make_loader(self: Any, *arguments: Any, **keywords: Any) -> None:
            if watch._loads_alone and watch._is_here:
                arguments = (*arguments[:5], 0, *arguments[6:]) if len(arguments) > 5 else arguments
                keywords |= {"num_workers": 0} if "num_workers" in keywords else {}
                keywords |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
                keywords |= {"multiprocessing_context": None}
            load(self, *arguments, **keywords)
            watch._samples_of_empty = max(watch._samples_of_empty, _samples_of_empty(self))

        @functools.wraps(enter)  # torch.jit reads its source
        def enter_autocast(self: Any) -> Any:
            # An evaluation may autocast on its own, and a context for another kind of device changes nothing.
            is_in_training = torch.device(self.device).type == watch._device.kind and torch.is_grad_enabled()
            watch._steps_in_16_bits |= is_in_training and self._enabled and self.fast_dtype in _16_BIT
            return enter(self)  # type: ignore[no-untyped-call]

        @functools.wraps(convert)
        def convert_module(self: Any, *arguments: Any, **keywords: Any) -> Any:
            converted = convert(self, *arguments, **keywords)  # type: ignore[no-untyped-call]
            watch._has_16_bits |= any(each is not None and each.dtype in _16_BIT for each in self._parameters.values())
            return converted

        @functools.wraps(set_mode)
        def train(self: Any, mode: bool = True) -> Any:
            watch._is_in_training_mode = mode
            return set_mode(self, mode)

        torch_optimizer.Optimizer.__init__ = make_optimizer  # type: ignore[method-assign]
        dataloader._BaseDataLoaderIter._next_index = next_index  # type: ignore[method-assign]
        dataloader._BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign]
        DataLoader.__init__ = make_loader  # type: ignore[method-assign]
        torch.autocast.__enter__ = enter_autocast  # type: ignore[method-assign]
        nn.Module._apply = convert_module  # type: ignore[method-assign]
        nn.Module.train = train  # type: ignore[method-assign]

    @property
    def steps(self) -> int:
        """The steps of the optimizer that has made the most."""
        return len(self._ends)

    @property
    def _is_timing(self) -> bool:
        """Whether this probe is to be timed and not to reach the peak: then it makes full steps only."""
        return self._job.speed_readings > 1

    @property
    def is_done(self) -> bool:
        """Whether the job needs no more steps."""
        if not self._job.probe:
            return self._job.steps is not None and self.steps >= self._job.steps
        if self.steps < self._steps_needed:
            return False
        full, readings = self._full_steps(), self._job.speed_readings
        wanted = reading_seconds(self._device) * readings
        is_timed = len(full) >= readings and sum(made.seconds for made in full) >= wanted
        return is_timed or self.steps >= self._most_steps

    def result(self) -> JobResult:
        """Return the result of a training that made enough steps or has ended.

        Raises:
            BadInput: it made no step, or its batches have another size.
        """
        if (over := self._over_dataset()) is not None:
            return over
        if not self.steps:
            raise BadInput(
                f"{self._job.workload}: it ended without an optimizer step. Call step() of a torch optimizer, or yield "
                "after each step."
            )
        drawn = self._largest_draw
        if drawn and drawn != self._batch_size:
            if drawn == self._dataset_samples < self._batch_size:
                return self._over(drawn)
            raise BadInput(
                f"{self._job.workload}: its data loader gives batches of {drawn} for batch_size={self._batch_size}. "
                "Use batch_size as the size of the loader's batches."
            )
        peak = self._device.peak() if self.has_begun else None
        return JobResult(
            status=JobStatus.FITS,
            steps=self.steps,
            size_ratio=self._size_ratio,
            why_as_drawn=self._why_as_drawn,
            wall_seconds=time.perf_counter() - self._started,
            train_seconds=self._ends[-1] - self._started,
            train_peak_allocated_bytes=peak.allocated_bytes if peak is not None else None,
            peak_bytes=peak.reserved_bytes if peak is not None else None,
            first_step_peak_bytes=self._device.first_step_peak_bytes,
            peak_resident_bytes=peak_resident_bytes(),
            allocation_retries=self._device.allocation_retries(),
            samples_per_second=_speed(self._timed_steps()),
            load_seconds=_mean_load_seconds(self._timed_steps()),
            speed_readings=self._speed_readings(),
            training_samples=self._dataset_samples or None,
            drops_last=self._drops_last,
            ignores_precision=not (self._has_16_bits or self._steps_in_16_bits)
            if self._autocasts
            else self._steps_in_16_bits,
            float32_kernels=self._float32_kernels,
            batches_per_step=next((batches for batches, _ in self._batches_of_steps.most_common(1)), None),
        )

    def result_after(self, error: BaseException) -> JobResult:
        """Return the result if a data set without a full batch explains an exception; else raise `cause(error)`."""
        cause = self.cause(error)
        if (over := self._over_dataset(is_limit=_is_limit(cause))) is not None:
            return over
        raise cause from None

    def _over_dataset(self, *, is_limit: bool = False) -> JobResult | None:
        """Return the result of a training without a step because the data set is smaller than a batch; else None.

        `is_limit`: it ran into a limit of memory or of a kernel, which an unused loader does not explain.
        """
        samples = self._samples_without_a_batch
        if samples is None and self._samples_of_empty and not self._has_drawn and not is_limit:
            samples = self._samples_of_empty
        return self._over(samples) if samples is not None and not self.steps and samples < self._batch_size else None

    def _over(self, samples: int) -> JobResult:
        return JobResult(
            status=JobStatus.OVER_DATASET,
            message=f"batch size {self._batch_size} exceeds the {samples} training samples",
            training_samples=samples,
        )

    def cause(self, error: BaseException) -> BaseException:
        """Return the out-of-memory error that led to an exception, such as a caught one before `sys.exit(1)`, or it.

        An exception of a shortened evaluation gets a note.
        """
        cause = next(filter(_is_limit, chain(error)), None)
        if cause is None and self._job.probe and self.phase == "evaluation":
            error.add_note(_SHORT_EVALUATION)
        return cause or error

    @property
    def _is_here(self) -> bool:
        return os.getpid() == self._process

    def _begin(self) -> None:
        """Start the budget: imports and data that came before do not count."""
        if not self.has_begun and self._is_here:
            self.has_begun, self.phase = True, "model"
            self._device.begin(self._job.memory_budget_bytes, enforce=self._enforce_budget)

    def _parameter_registered(self, module: Any, name: str, parameter: Any) -> None:
        self._begin()
        self._has_16_bits |= parameter is not None and parameter.dtype in _16_BIT

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        self._begin()
        self.phase = "optimizer"
        if id(optimizer) not in self._looked_at:
            self._looked_at.add(id(optimizer))
            self._float32_kernels = self._float32_kernels or float32_kernels()
            kind = self._device.kind
            autocasts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) in _16_BIT
            parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
            self._steps_in_16_bits |= autocasts or any(each.dtype in _16_BIT for each in parameters)

    def _after_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        self.phase = "training"
        if not self.ends_process or not self._is_here:
            return
        self._steps_of[id(optimizer)] += 1
        if self._steps_of[id(optimizer)] > self.steps:
            self.count_step()
        has_idle = len(self._steps_of) < len(self._optimizers)
        if self.is_done and not (has_idle and self.steps < _PATIENCE * (self._job.steps or _PROBE_STEPS)):
            self._finish()

    def count_step(self) -> None:
        """Count a step: called by torch's hooks, or for a training that yields after each."""
        if self._job.probe:
            self._device.synchronize()
        now = time.perf_counter()
        counts_draws = self._last_draw[0] > 0 and not self._has_workers  # they draw many batches ahead
        samples = self._samples_since_step or (0 if counts_draws else self._batch_size)
        batches, self._samples_since_step, self._batches_since_step = self._batches_since_step, 0, 0
        load_seconds, self._load_seconds = self._load_seconds, 0.0
        if samples and self._ends and not self._is_interrupted:  # without samples, its batch was drawn ahead
            self._intervals.append(_Made(now - self._ends[-1], samples, load_seconds))
            if batches and not self._is_at_end:  # the last step of an epoch may have fewer
                self._batches_of_steps[batches] += 1
        elif samples and self._epoch_began is not None and self._ends:  # the process's first step also starts it up
            self._first_steps.append(_Made(now - self._epoch_began, min(samples, self._batch_size), load_seconds))
        self._is_interrupted, self._epoch_began = False, None
        self._ends.append(now)
        if self.steps == 1 and self.has_begun and samples >= self._batch_size:
            self._device.note_first_step()
        self._trained_on |= self._drawn_from
        self._drawn_from = set()
        self._has_drawn_full = False
        is_found = self._largest_draw == self._batch_size  # larger ones are those of another loader
        # The last batch before a step is one of the training.
        if self._last_draw[0] > self._largest_draw and not is_found:
            self._largest_draw, self._dataset_samples, _ = self._last_draw
        self._size_ratio = self._last_draw[2] if self._last_draw[2] is not None else self._size_ratio
        if now - self._last_progress > _PROGRESS_SECONDS:
            self._last_progress = now
            total = self._job.steps if self._job.steps is not None and not self._job.probe else _PROBE_STEPS
            memory_bytes = self._device.peak().reserved_bytes if self.has_begun else 0
            self._send(StepsDone(step=self.steps, total_steps=max(total, self.steps), memory_bytes=memory_bytes))

    def _drawn(self, iterator: Any, draw: Callable[[], Any]) -> Any:
        """Return the indices of a batch; in a probe, go on to the last ones after the first two of the first epoch."""
        is_measured = isinstance(iterator._dataset, sample_sizes.ShapesOfSamples)
        if not self._is_here or is_measured:
            return draw()
        trains = self._trains_on(iterator._dataset)
        self._has_drawn |= trains
        self.phase = ("training" if trains else "evaluation") if self.has_begun else self.phase
        if iterator._dataset_kind != 0:  # 0: a map-style data set
            return draw()
        if getattr(iterator, "amp_track_pass", None) is not iterator._sampler_iter:  # persistent workers keep iterators
            iterator.amp_track_pass, iterator.amp_track_drawn = iterator._sampler_iter, 0
            iterator.amp_track_has_skipped, iterator.amp_track_last = False, 0
        count = iterator.amp_track_drawn = iterator.amp_track_drawn + 1
        if count == 1 and trains and not self.steps:
            self._has_shortened_epoch = False  # that of another loader, whose batches made no step
        if count == 1 or not trains:
            self._is_interrupted = True
            self._epoch_began = time.perf_counter() if trains else None
            self._samples_since_step = 0
        has_all_phases = count == 1 and self.steps >= self._steps_needed and not self._is_timing
        if self.ends_process and self._job.probe and has_all_phases:
            self._finish()
        try:
            index = draw()
        except StopIteration:
            # Loader processes have drawn a shortened epoch before its first step. If gradients accumulate over more
            # batches than it has, so that more came than one that is drawn ahead, it begins again.
            received = getattr(iterator, "_rcvd_idx", 0)
            is_too_short = iterator.amp_track_has_skipped and trains and self.steps < _FULL < received - self.steps
            if is_too_short and received < _length(iterator._index_sampler):
                iterator._sampler_iter, self._has_shortened_epoch = iter(iterator._index_sampler), False
                return self._drawn(iterator, draw)
            if count == 1:
                self._samples_without_a_batch = _length(iterator._dataset)
            raise
        if trains:
            self._has_workers = iterator._num_workers > 0
            self._drops_last = bool(getattr(iterator._index_sampler, "drop_last", False))
        if is_last := self._job.probe and self._ends_epoch(count, trains):
            own, index = index, _last(iterator, index)
            iterator.amp_track_has_skipped = index is not own
            if trains and iterator.amp_track_has_skipped:
                iterator.amp_track_last = getattr(iterator, "_send_idx", iterator._num_yielded) + 1
        if isinstance(index, list):
            samples, sizes = _length(iterator._dataset), None
            if self._job.worst_batch and (self._job.probe or count % 2):
                sizes = self._sizes_of(iterator, trains)
            if trains:
                # Several batches of one loader make a step if gradients accumulate, or if it draws ahead as
                # accelerate's.
                is_another = getattr(iterator, "amp_track_step", None) == self.steps
                iterator.amp_track_step = self.steps
                iterator.amp_track_batches = 1 + (iterator.amp_track_batches if is_another else 0)
                self._is_at_end = is_last or count == _length(iterator._index_sampler)
                self._batches_since_step = max(self._batches_since_step, iterator.amp_track_batches)
                iterator.amp_track_largest = max(len(index), iterator.amp_track_largest if is_another else 0)
                is_full = iterator.amp_track_largest == self._batch_size
                if is_full or not self._has_drawn_full:
                    self._last_draw = iterator.amp_track_largest, samples, sizes.ratio if sizes is not None else None
                self._has_drawn_full |= is_full
                self._samples_since_step += len(index)
            index = sizes.largest(len(index)) if sizes is not None else index
        return index

    def _trains_on(self, dataset: Any) -> bool:
        """Return whether a batch is one of the training, and not of an evaluation, before it is drawn.

        Some evaluations switch gradients off only later, for the model. They have another data set than the training,
        and have set their model to evaluation.
        """
        if not torch.is_grad_enabled():
            return False
        trains = self._is_in_training_mode or not self._trained_on or id(dataset) in self._trained_on
        if trains:
            self._drawn_from.add(id(dataset))
        return trains

    def _ends_epoch(self, count: int, trains: bool) -> bool:
        """Return whether a probe goes on to the last batch: of an evaluation, or once of an epoch with enough steps."""
        if not trains:
            return count == _FULL + 1
        if self._has_shortened_epoch or count <= _FULL or (self.steps < _FULL and not self._has_workers):
            return False
        if self._is_timing:
            return False
        self._has_shortened_epoch = True
        if self._has_workers:  # all batches up to the last one are drawn before the first step
            return True
        draws_ahead = count - 1 > self.steps
        self._steps_needed = max(_PROBE_STEPS, self.steps + 3 + draws_ahead)
        return True

    def _sizes_of(self, iterator: Any, trains: bool) -> SampleSizes | None:
        """Return the sizes of the samples that an iterator draws, if they differ and any may form a batch."""
        dataset = iterator._dataset
        if iterator._collate_fn is default_collate:  # it makes batches of samples of one size only
            return None
        key = id(dataset), _length(dataset)  # an id may be used again
        if key not in self._sizes:
            self._sizes[key] = self._measure(iterator, trains)
        return self._sizes[key]

    def _measure(self, iterator: Any, trains: bool) -> SampleSizes | None:
        """Return the sizes of the samples that an iterator draws. If there are none, note the reason for a training."""
        sampler = iterator._index_sampler
        while (inner := getattr(sampler, _WRAPPED.get(type(sampler).__name__, ""), None)) is not None:
            sampler = inner
        try:
            if type(sampler) is not BatchSampler:  # it may make smaller batches of larger samples
                raise SizesUnknown(f"{type(sampler).__name__} decides which samples form a batch")
            indices = _drawn_by(sampler.sampler, iterator._dataset)
            return sample_sizes.measure(iterator._dataset, indices=indices, workers=iterator._num_workers)
        except Exception as error:  # the training itself loads samples in another way
            if oom.is_out_of_memory(error):
                raise
            is_unknown = isinstance(error, SizesUnknown)
            if trains:
                self._why_as_drawn = str(error) if is_unknown else f"measuring samples raised {summary(error)}"
            return None

    def _finish(self) -> NoReturn:
        """Send the result and end the process: no callback, checkpoint or tracker of the training runs any more."""
        try:
            self._device.synchronize()
            message: JobResult | BadInput = self.result()
        except BadInput as error:
            message = error
        self._send(message)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _full_steps(self) -> list[_Made]:
        """Return the steps of the full batch, without the first one if there are later ones.

        A step that begins an epoch counts only if an epoch has no other full one: it also starts loading.
        """
        counts = Counter(made.samples for made in self._intervals)
        # A step that GradScaler skips without torch's hooks leaves its samples to the next one.
        of_steps = [(count, samples) for samples, count in counts.items() if samples >= self._batch_size]
        most = max(of_steps)[1] if of_steps else max(counts, default=0)
        full = [made for made in self._intervals if made.samples == most]
        if most < self._batch_size:
            full = [made for made in self._first_steps if made.samples == self._batch_size] or full
        return full[1:] or full

    def _timed_steps(self) -> list[_Made]:
        """Return the full steps whose speed counts: with a queue the last half, when a GPU's clock has risen."""
        full, readings = self._full_steps(), self._job.speed_readings
        return full[min(len(full) // 2, max(len(full) - readings, 0)) :] if self._device.has_queue else full

    def _speed_readings(self) -> tuple[float, ...]:
        """Return the samples per second of as many equal parts of the full steps as the job wants readings."""
        full, readings = self._timed_steps(), self._job.speed_readings
        length = len(full) // readings
        if readings == 1 or not length:
            return ()
        parts = (full[length * number : length * (number + 1)] for number in range(readings))
        return tuple(speed for part in parts if (speed := _speed(part)) is not None)


def _is_limit(error: BaseException) -> bool:
    return oom.is_out_of_memory(error) or oom.is_kernel_limit(error)


def _speed(steps: Sequence[_Made]) -> float | None:
    seconds = sum(made.seconds for made in steps)
    return sum(made.samples for made in steps) / seconds if seconds else None


def _mean_load_seconds(steps: Sequence[_Made]) -> float | None:
    return sum(made.load_seconds for made in steps) / len(steps) if steps else None


def _last(iterator: Any, index: Any) -> Any:
    """Return the last indices of an iterator's sampler: the epoch's own, smaller batch.

    Return the given ones for a sampler that never ends. Its length, if it has one, may be that of its data set.
    """
    left = _length(iterator._index_sampler) - iterator.amp_track_drawn
    if left > _MOST_INDICES:
        return index
    for index in itertools.islice(iterator._sampler_iter, max(left, 0)):  # noqa: B007
        pass
    return index


def _length(dataset: Any) -> int:
    """Return the number of samples; 0 if the data set does not tell, because its sampler knows."""
    try:
        return len(dataset)
    except TypeError:
        return 0


def _samples_of_empty(loader: Any) -> int:
    """Return the number of samples of a loader that has no batch because of `drop_last`; else 0."""
    if isinstance(loader.dataset, IterableDataset) or not getattr(loader.batch_sampler, "drop_last", False):
        return 0
    try:
        return _length(loader.dataset) if not len(loader.batch_sampler) else 0
    except Exception:  # the sampler has no length
        return 0


def _drawn_by(sampler: Any, dataset: Any) -> Sequence[Any]:
    """Return the indices that a sampler draws, which may be of any type.

    It draws the same ones afterwards if its random numbers come from torch's default generator or from one in its
    attribute `generator`, as those of torch do.
    """
    if isinstance(sampler, Iterator):  # it would be used up
        raise SizesUnknown(f"{type(sampler).__name__} can be iterated only once")
    if isinstance(sampler, RandomSampler | SequentialSampler) or type(sampler) is DistributedSampler:
        return range(len(dataset))
    again = copy.copy(sampler)
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        again.generator = torch.Generator(generator.device).set_state(generator.get_state())
    with random_state.seeded(0):
        return list(dict.fromkeys(itertools.islice(again, _MOST_INDICES)))
