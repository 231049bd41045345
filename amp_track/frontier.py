"""Where to probe next for the largest batch that fits. Pure Python: no torch, no optuna, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from amp_track.job import Verdict


@dataclass(frozen=True)
class Probe:
    """One batch size that was tried."""

    batch_size: int
    verdict: Verdict

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.FITS


@dataclass(frozen=True)
class Limit:
    """The largest batch worth trying, and what sets it: `dataset` or `max_batch_size`."""

    batch_size: int
    bound: str


@dataclass(frozen=True)
class Edge:
    """The largest batch that fits, with its proof: it ran whole, and `first_failing_batch` did not.

    `largest_batch` is 0 where not even one sample fits. `first_failing_batch` is None where a limit, not the device,
    ends the search. `bound` says what does: `memory`, `kernel` (of the device), `dataset` or `max_batch_size`.
    """

    largest_batch: int
    first_failing_batch: int | None
    bound: str


def explore(probes: Iterable[Probe], limit: Limit) -> int | Edge:
    """The next batch size to probe, or the edge once it is proven. Doubling, then bisection: 2·log2(edge) probes.

    A batch that both ran and failed counts as failed: an edge is what can be relied on.
    """
    probes = list(probes)
    failing = [probe for probe in probes if not probe.fits]
    first_failure = min(failing, key=lambda probe: probe.batch_size, default=None)
    ceiling = limit.batch_size + 1 if first_failure is None else first_failure.batch_size
    largest_fit = max((p.batch_size for p in probes if p.fits and p.batch_size < ceiling), default=0)
    if ceiling - largest_fit == 1:
        if first_failure is None:
            return Edge(largest_fit, None, limit.bound)
        bound = "kernel" if first_failure.verdict is Verdict.KERNEL_LIMIT else "memory"
        return Edge(largest_fit, ceiling, bound)
    if first_failure is None:
        return min(max(2 * largest_fit, 1), limit.batch_size)
    return (largest_fit + ceiling) // 2
