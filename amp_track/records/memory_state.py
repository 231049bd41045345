"""The memory of a device at one moment, such as that of a failed allocation, and ways to use less. Plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from amp_track.records.plan import LARGEST_SHOWN, OPTIMIZER, Category, Holding

_BY_BATCH = Category.ACTIVATIONS, Category.BATCH, Category.TEMPORARIES
"""Categories whose allocations may grow with the batch size; those of convolutions do, and have a constant part."""


@dataclass(frozen=True, kw_only=True)
class MemoryState:
    """The memory when an allocation failed; if none failed, when most was allocated."""

    holdings: tuple[Holding, ...]
    """Everything allocated, grouped, largest first."""
    failed: Holding | None
    phase: str = ""
    """The phase of the step: `forward`, `backward` or `optimizer`; empty if unknown."""
    allocated_bytes: int  # in blocks of the allocator
    reserved_bytes: int  # in segments of the allocator
    largest_free_bytes: int = 0  # the largest free piece of a segment
    capacity_bytes: int | None = None  # what the allocator could reserve at most; None if unknown
    outside_bytes: int | None = None
    """Memory outside of this allocator: of other processes, the CUDA context, or libraries on a CPU."""
    missing: tuple[tuple[Category, int], ...] = ()
    """Bytes that the step allocates later whatever its batch size: gradients."""
    batch_size: int | None = None
    precision: str = ""  # empty if unknown
    has_16_bit_weights: bool = False
    expandable_segments: bool = False

    @property
    def by_category(self) -> dict[Category, int]:
        """Bytes per category, largest first."""
        sizes: Counter[Category] = Counter()
        for holding in self.holdings:
            sizes[holding.category] += holding.size_bytes
        return dict(sizes.most_common())

    def largest_by_layer(self) -> tuple[Holding, ...]:
        """Return the bytes per layer and category, the largest ten first."""
        sizes: dict[tuple[str, Category], Holding] = {}
        for holding in self.holdings:
            key = holding.layer, holding.category
            known = sizes.get(key)
            sizes[key] = Holding(
                layer=holding.layer,
                operation="",
                category=holding.category,
                size_bytes=holding.size_bytes + (known.size_bytes if known else 0),
                count=holding.count + (known.count if known else 0),
            )
        return tuple(sorted(sizes.values(), key=lambda holding: -holding.size_bytes)[:LARGEST_SHOWN])

    @property
    def unused_bytes(self) -> int:
        """Reserved memory that nothing is allocated in. The failed allocation found no sufficient piece in it."""
        return self.reserved_bytes - self.allocated_bytes

    def bytes_of(self, *categories: Category) -> int:
        """Return the bytes of categories, including what is missing and what has failed."""
        sizes = Counter(self.by_category) + Counter(dict(self.missing))
        if self.failed is not None:
            sizes[self.failed.category] += self.failed.size_bytes
        return sum(sizes[category] for category in categories)

    @property
    def sample_bytes(self) -> float:
        """The bytes of each sample of the batch, as far as they are allocated; 0 if the batch size is unknown."""
        return self._growing_bytes / (self.batch_size or 1)

    @property
    def _growing_bytes(self) -> int:
        """The bytes that grow with the batch size: sizes of some categories that are multiples of it.

        That of the failed allocation is rounded, so its category must be enough.
        """
        if not self.batch_size:
            return 0
        convolutions = sum(one.size_bytes for one in self.holdings if one.category is Category.CONVOLUTIONS)
        grows = [one for one in self.holdings if one.size_bytes // one.count % self.batch_size == 0]
        grows += [self.failed] if self.failed is not None else []
        sizes = (one.size_bytes for one in grows if one.category in _BY_BATCH and one.layer != OPTIMIZER)
        return convolutions + sum(sizes)

    def max_batch(self, *, saved_bytes: float = 0, saved_sample_bytes: float = 0) -> int | None:
        """Return the batch size at which all this fits, if sizes grow linearly; None if too little is known.

        The rest of a step may need more memory: it is an upper bound unless the state is that of the peak.
        """
        per_sample = self.sample_bytes - saved_sample_bytes
        if self.capacity_bytes is None or self.sample_bytes <= 0 or per_sample <= 0:
            return None
        fixed = sum(holding.size_bytes for holding in self.holdings) - self._growing_bytes
        fixed += self.failed.size_bytes if self.failed is not None else 0
        fixed += sum(size for _, size in self.missing)
        return max(int((self.capacity_bytes - fixed + saved_bytes) // per_sample), 0)


@dataclass(frozen=True, kw_only=True)
class WayOut:
    """A change of the training after which more fits, with its estimated gain."""

    change: str
    cost: str
    saved_bytes: int  # at the batch size that ran out of memory
    max_batch: int | None = None  # with this change; None if unknown
