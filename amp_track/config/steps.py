"""Compute the samples, batches and optimizer steps of a job."""

from __future__ import annotations

import math

from amp_track.config.job import Job


def steps_per_epoch(job: Job, training_samples: int) -> int:
    """Return the optimizer steps of an epoch, which may be shortened; the last step may have fewer samples."""
    assert job.batch_size is not None
    steps = math.ceil(math.ceil(training_samples / (job.batch_size * job.nproc)) / job.grad_accum)
    return steps if job.epoch_steps is None else min(steps, job.epoch_steps)


def total_steps(job: Job, training_samples: int) -> int:
    """Return the number of optimizer steps of a job."""
    return job.steps if job.steps is not None else (job.epochs or 1) * steps_per_epoch(job, training_samples)


def synthetic_samples(job: Job) -> int:
    """Return the samples of an epoch of synthetic data: 16 batches per process."""
    assert job.batch_size is not None
    return 16 * job.batch_size * job.nproc


def micro_batch(effective_batch_size: int, max_batch: int, *, multiple_of: int = 1) -> tuple[int, int] | None:
    """Return the largest batch that fits and divides the effective batch, and the batches per optimizer step.

    Return None if no multiple of `multiple_of` divides the effective batch.
    """
    low = [number for number in range(1, math.isqrt(effective_batch_size) + 1) if not effective_batch_size % number]
    divisors = [*low, *(effective_batch_size // number for number in low)]
    sizes = [size for size in divisors if size <= max_batch and not size % multiple_of]
    return (max(sizes), effective_batch_size // max(sizes)) if sizes else None


def scaled_learning_rate(job: Job, reference_batch_size: int) -> float:
    """Return the learning rate, scaled from the batch size of the workload to that of the job.

    `lr_scaling` is linear for SGD (Goyal et al., 1706.02677), a square root for Adam (Malladi et al., 2205.10287).
    """
    assert job.learning_rate is not None and job.batch_size is not None
    ratio = job.batch_size * job.nproc * job.grad_accum / reference_batch_size
    exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[job.lr_scaling]
    return float(job.learning_rate * ratio**exponent)
