"""A plan as a file that a later plan is compared with, and the peaks, safe batches and layers that have moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, RootModel, TypeAdapter, ValidationError

from amp_track.config.values import Tolerance
from amp_track.records.errors import BadInput
from amp_track.records.plan import Category, PlannedMaxBatch
from amp_track.records.units import format_bytes
from amp_track.results.plan import PlanResult

_LAYERS_NAMED = 10
_MOST_TIMES = 10
"""Beyond this factor, or if nothing is left, a change is shown without a percentage."""
_Bytes = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class PlannedPeak:
    """The predicted peak of a precision, with what each layer holds of it."""

    batch_size: int
    peak_allocated_bytes: _Bytes
    layers: Mapping[str, _Bytes]

    @property
    def tensors_bytes(self) -> int:
        """The peak without workspaces of libraries, which would hide a change of a small model."""
        return self.peak_allocated_bytes - self.layers.get(f"({Category.WORKSPACES})", 0)


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """The numbers of a plan to compare, and how they were made."""

    format: Literal[2] = 2
    settings: Mapping[str, str]
    """The target, the given flags and environment variables, by name."""
    torch: str
    peaks: Mapping[str, PlannedPeak]
    """By precision."""
    safe_batches: Mapping[str, Mapping[str, int]]
    """By GPU or budget, then by precision."""

    @classmethod
    def of(cls, result: PlanResult, *, settings: Mapping[str, str], torch: str) -> PlanRecord:
        """Return the record of a plan without its variants."""
        first = result.variants[0]
        peaks = {
            plan.precision: PlannedPeak(
                batch_size=plan.batch_size,
                peak_allocated_bytes=plan.peak.allocated_bytes,
                layers=dict(sorted(plan.peak.by_layer)),
            )
            for plan in first.report.precisions
        }
        found = {
            target.name: {name: result.max_batch(first, name, target) for name in peaks} for target in result.targets
        }
        return cls(
            settings=settings,
            torch=torch,
            peaks=peaks,
            safe_batches={
                target: {name: each.safe_batch_size for name, each in of.items() if isinstance(each, PlannedMaxBatch)}
                for target, of in found.items()
            },
        )

    @classmethod
    def from_json(cls, text: bytes, name: str) -> PlanRecord:
        """Return the record in a file. Raises BadInput if it is not one of this version."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise BadInput(
                f"{name} is not a memory plan of this version of amp_track: {where}: {first['msg']}. Write it again "
                "with --update."
            ) from None

    def check_settings(self, settings: Mapping[str, str], name: str) -> None:
        """Raise BadInput if a plan with other settings was written to the file with that name."""
        for flag in {**self.settings, **settings}:
            earlier, value = (each.get(flag, "none") for each in (self.settings, settings))
            if value != earlier:
                raise BadInput(
                    f"{flag}: {value} here, but {earlier} for {name}. Plan with the same flags, or write the file "
                    "again with --update."
                )

    def to_json(self) -> bytes:
        return RootModel[PlanRecord](self).model_dump_json(indent=1).encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A peak or a safe batch that differs by more than the tolerance."""

    name: str
    before: int
    now: int
    is_size: bool
    layers: tuple[str, ...] = ()
    """The layers that moved most, each with its sizes; of a precision only in its first entry."""

    def __str__(self) -> str:
        return f"{self.name}: {_change(self.before, self.now, is_size=self.is_size)}"


def moves(before: PlanRecord, now: PlanRecord, tolerance: Tolerance, name: str) -> list[Moved]:
    """Return the peaks and safe batches that have moved since an earlier plan.

    Raises:
        BadInput: the two have other precisions.
    """
    for precision in sorted(before.peaks.keys() ^ now.peaks.keys()):
        has = "has no" if precision in now.peaks else "also has"
        raise BadInput(f"{name} {has} {precision}. Write it again with --update.")
    found = []
    layers = {precision: tuple(_moved_layers(before.peaks[precision], peak)) for precision, peak in now.peaks.items()}

    def add(precision: str, what: str, earlier: int, later: int, *, is_size: bool) -> None:
        if abs(later - earlier) > tolerance.of(earlier):
            named = layers.pop(precision, ())
            found.append(Moved(name=f"{precision}, {what}", before=earlier, now=later, is_size=is_size, layers=named))

    for precision, peak in now.peaks.items():
        earlier = before.peaks[precision]
        what = f"peak of tensors at batch {earlier.batch_size:,}"
        what += f" before, {peak.batch_size:,} now" if peak.batch_size != earlier.batch_size else ""
        add(precision, what, earlier.tensors_bytes, peak.tensors_bytes, is_size=True)
    for target, batches_now in now.safe_batches.items():
        for precision, batch in batches_now.items():
            earlier_batch = before.safe_batches.get(target, {}).get(precision, 0)
            add(precision, f"safe batch on {target}", earlier_batch, batch, is_size=False)
    return found


def _moved_layers(before: PlannedPeak, now: PlannedPeak) -> Iterator[str]:
    """Yield the layers that moved most, largest first."""
    both = {layer: (before.layers.get(layer, 0), now.layers.get(layer, 0)) for layer in {*before.layers, *now.layers}}
    moved = [(abs(new - old), layer, old, new) for layer, (old, new) in both.items() if new != old]
    for _, layer, old, new in sorted(moved, key=lambda each: (-each[0], each[1]))[:_LAYERS_NAMED]:
        yield f"{layer}: {_change(old, new, is_size=True)}"


def _change(before: int, now: int, *, is_size: bool) -> str:
    earlier, later = (format_bytes(number) if is_size else f"{number:,}" for number in (before, now))
    is_telling = 0 < now <= _MOST_TIMES * before
    return f"{earlier} before, {later} now" + (f" ({now / before - 1:+.1%})" if is_telling else "")
