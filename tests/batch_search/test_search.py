"""Simulated devices: what fits is decided by a formula, the search sees only what a real meter would show."""

import dataclasses
import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from batch_search.devices import FAMILIES, bent, flat_at_first, jumping, line, plateau
from hypothesis import given
from hypothesis import strategies as st
from simulated_memory import UNLIMITED, Device

from amp_track.batch_search.memory_line import Line, Point
from amp_track.batch_search.search import Hint, Limit, MaxBatch, Next, Probe, explore, line_of
from amp_track.records.result import JobStatus

MEBIBYTE = 2**20


def tried(text: str) -> list[Probe]:
    """Read `8=40M/35M 16=64M 40!90M 50! 60x`: what fits with its bytes (and those of the finer meter), what fails with
    those that it needs, if known, and what a kernel does not take."""

    def size(text: str) -> int | None:
        return int(float(text.removesuffix("M")) * (MEBIBYTE if text.endswith("M") else 1)) if text else None

    probes = []
    for batch, mark, peak, allocated in re.findall(r"(\d+)([=!x])([\d.]*M?)/?([\d.]*M?)", text):
        status = {"=": JobStatus.FITS, "!": JobStatus.OOM, "x": JobStatus.KERNEL_LIMIT}[mark]
        probes.append(Probe(int(batch), status, size(peak), size(allocated)))
    return probes


# fmt: off
STEPS: list[tuple[str, int | None, dict[str, Any], Next]] = [
    # Before anything fits: the hint, then far less; half of it where another precision's line is known.
    ("", 1000, {}, Next(8, "first probe")),
    ("", 1000, {"limit": 5}, Next(5, "upper limit of the search (dataset)")),
    ("8!", 1000, {}, Next(2, "8 does not fit; trying far less")),
    ("500!", 1000, {"hint": Hint(500, "fp32's edge", 100.0)}, Next(250, "half of 500, which does not fit")),
    ("250!", 1000, {"hint": Hint(500, "fp32's edge", 100.0)}, Next(15, "250 does not fit; trying far less")),
    # Without a meter: it doubles, and bisects.
    ("8=100", None, {}, Next(16, "twice 8, which fits")),
    ("8=100 15!", None, {}, Next(11, "bisecting between 8, which fits, and 15, which does not")),
    ("4= 8=100", 1000, {}, Next(16, "twice 8, which fits")),
    # One measurement: what samples alone would take is an upper bound.
    ("8=100", 1000, {}, Next(80, "80 would fit if memory were proportional to the batch size")),
    ("8=300", 1000, {}, Next(26, "26 would fit if memory were proportional to the batch size")),
    ("8=800", 1000, {}, Next(10, "10 would fit if memory were proportional to the batch size")),
    ("8=900", 1000, {}, Next(16, "twice 8: one measurement does not show the memory per sample")),
    ("5=800", 1000, {}, Next(10, "twice 5: one measurement does not show the memory per sample")),
    ("8=900 16!", 1000, {}, Next(9, "8 would fit if memory were proportional to the batch size")),
    ("8=900 20!", 1000, {}, Next(16, "twice 8: one measurement does not show the memory per sample")),
    ("8=10 50!", 10000, {}, Next(29, "8000 would fit if memory were proportional to the batch size")),
    ("8=0", 100, {}, Next(16, "twice 8: one measurement does not show the memory per sample")),
    ("8=180", 1000, {"hint": Hint(8, "fp32's edge", 100.0)},
     Next(83, "slightly below 90, the predicted max batch", 930)),
    # A line: a far crossing is approached from below, unless a failure or a straight line guards it.
    ("8=181 16=261", 1001, {}, Next(84, "slightly below 90, the predicted max batch", 941)),
    ("8=180 16=260", 860, {}, Next(76, "predicted max batch", 860)),
    ("8=180 16=260", 7700, {}, Next(698, "slightly below 760, the predicted max batch", 7080)),
    ("8=180 16=260", 1000, {"limit": 88}, Next(84, "predicted max batch 90 is above the upper limit", 940)),
    ("8=180 16=260", 1000, {"limit": 80}, Next(80, "upper limit of the search (dataset)", 900)),
    ("8=8100 80=80100 170!", 152100, {}, Next(152, "predicted max batch", 152100)),
    ("8=180 16=260 164!", 1000, {}, Next(84, "slightly below 90, the predicted max batch", 940)),
    ("100=100100 400=400100", 500100, {}, Next(500, "predicted max batch", 500100)),
    ("100=100100 400=400100", 550100, {}, Next(538, "slightly below 550, the predicted max batch", 538100)),
    ("1=1100 8=8100 80=80100", 1000000, {}, Next(922, "slightly below 999, the predicted max batch", 922100)),
    ("1=1079 8=8100 80=80100", 1000000, {}, Next(922, "slightly below 999, the predicted max batch", 922100)),
    # Which line: the nearest measurement that is exact enough and no noise.
    ("8=180000 12=180000 16=260000", 400000, {}, Next(30, "predicted max batch", 400000)),
    ("8=180000 12=240000 16=260000", 400000, {}, Next(30, "predicted max batch", 400000)),
    ("187=392900 291=391800 380=477800", 512000, {}, Next(415, "predicted max batch", 511620)),
    ("187=392900 317=391800 380=477800", 512000, {},
     Next(451, "slightly below 457, the predicted max batch", 509033)),
    ("187=392900 220=391800 300=477800", 512000, {}, Next(331, "predicted max batch", 511125)),
    ("100=400000 200=390000 280=477800", 512000, {}, Next(311, "predicted max batch", 511822)),
    ("8=300000 400=390000 480=477800", 512000, {}, Next(570, "predicted max batch", 511703)),
    ("4=130 8=180 16=260", 360, {}, Next(26, "predicted max batch", 360)),
    ("4=130 8=180 16=260", 380, {}, Next(27, "predicted max batch", 379)),
    ("8=100M 64=160M 76=180M", 400 * MEBIBYTE, {},
     Next(247, "slightly below 263, the predicted max batch", 399692499)),
    # Blocks: what is left of the last block cannot be had, nor what lies unused.
    ("8=40M/35M 16=60M/55M", 101 * MEBIBYTE, {}, Next(34, "predicted max batch", 104857600)),
    ("8=42M/41M 16=64M/58M", 105 * MEBIBYTE, {}, Next(34, "predicted max batch", 100925440)),
    ("8=42M/37.5M 16=64M/58M", 105 * MEBIBYTE, {}, Next(31, "predicted max batch", 101122048)),
    ("8=40M/44M 16=60M/64M", 110 * MEBIBYTE, {}, Next(30, "predicted max batch", 103809024)),
    ("8=42M 16=64M/57M", 105 * MEBIBYTE, {}, Next(30, "predicted max batch", 107479040)),
    ("8=0 16=40M", 110 * MEBIBYTE, {}, Next(28, "predicted max batch", 104857600)),
    ("8=40960 16=49152", 99999, {}, Next(64, "predicted max batch", 98304)),
    # At the end of the line: one more proves the edge, unless the line was wrong already.
    ("8=8100 80=80100", 81100, {}, Next(81, "predicted max batch", 81100)),
    ("8=8100 80=80100", 80500, {},
     Next(81, "one more than 80, to prove the max batch", 81100, should_fit=False)),
    ("8=8100 16=16100 20=18900", 19100, {},
     Next(22, "20 fits although predicted not to; trying more", 20300, should_fit=False)),
    ("8=8100 16=16100 20=18000 30!", 18100, {},
     Next(24, "20 fits although predicted not to; trying more", 19900, should_fit=False)),
    ("8=8100 16=16100 20=17050 30!", 17100, {},
     Next(25, "20 fits although predicted not to; trying more", 20779, should_fit=False)),
    ("8=8100 16=16100 20=17050 60!", 17100, {},
     Next(26, "20 fits although predicted not to; trying more", 21525, should_fit=False)),
    # A surprise: a failure that the line does not explain.
    ("8=180 16=260 50x", 10000, {}, Next(33, "bisecting between 16 and 50, which exceeds a kernel limit", 430)),
    ("8=180 16=260 80!", 10000, {},
     Next(36, "80 ran out of memory although predicted to fit; bisecting between 16 and 80", 460)),
    ("8=180 16=260 86!", 10000, {},
     Next(65, "86 ran out of memory although predicted to fit from much smaller batches", 750)),
    ("8=180 16=260 500!", 10000, {},
     Next(355, "500 ran out of memory although predicted to fit from much smaller batches", 3650)),
    ("8=180 16=260 400! 500!", 10000, {},
     Next(80, "400 ran out of memory although predicted to fit from much smaller batches", 900)),
    ("8=8100 80=80100 140!", 140100, {},
     Next(139, "140 ran out of memory although predicted to fit; trying slightly less", 139100)),
    ("8=8100 80=80100 140!", 144100, {},
     Next(139, "140 ran out of memory although predicted to fit; trying slightly less", 139100)),
    ("8=8100 80=80100 141! 263!", 144100, {},
     Next(139, "141 ran out of memory although predicted to fit; trying slightly less again", 139100)),
    ("8=8100 80=80100 141! 264!", 144100, {},
     Next(140, "141 ran out of memory although predicted to fit; trying slightly less", 140100)),
    ("8=8100 80=80100 141! 142! 143!", 144100, {},
     Next(110, "141 ran out of memory although predicted to fit; bisecting between 80 and 141", 110100)),
    ("8=8100 80=80100 142! 143!", 145100, {},
     Next(111, "142 ran out of memory although predicted to fit; bisecting between 80 and 142", 111100)),
    ("100=100100 10000=10000100 26000!", 26384100, {},
     Next(25872, "26000 ran out of memory although predicted to fit; trying slightly less", 25872100)),
    ("4=4100 8=8100 80=80100 138!", 142100, {},
     Next(109, "138 ran out of memory although predicted to fit; bisecting between 80 and 138", 109100)),
    ("8=8100 80=80100 138!142100", 142100, {},
     Next(109, "138 ran out of memory although predicted to fit; bisecting between 80 and 138", 109100)),
    ("8=8100 80=80100 138!150000", 142100, {},
     Next(127, "138 ran out of memory although predicted to fit; reduced by the missing memory", 127100)),
]
# fmt: on


@pytest.mark.parametrize(("known", "budget_bytes", "given", "step"), STEPS)
def test_each_rule_by_example(known: str, budget_bytes: int | None, given: dict[str, Any], step: Next) -> None:
    limit = Limit(given.get("limit", UNLIMITED.batch_size), "dataset")
    assert explore(tried(known), limit, budget_bytes=budget_bytes, hint=given.get("hint")) == step


@pytest.mark.parametrize("hint", [Hint(slope_bytes=1.0), None], ids=["planned", "measured"])
@pytest.mark.parametrize(
    ("failure", "step"),
    [
        # Later steps took 30 more at 100 samples, so 171 need 205, and 167 up to 201: 168 proves it, or more fit.
        (Probe(171, JobStatus.OOM, 999, first_step_bytes=175), 168),
        # It should have fitted according to its first step, or there was none.
        (Probe(171, JobStatus.OOM, 999, first_step_bytes=171), 170),
        (Probe(171, JobStatus.OOM, 999), 170),
        # Not less than half way.
        (Probe(171, JobStatus.OOM, 999, first_step_bytes=900), 135),
    ],
)
def test_what_failed_after_its_first_step_shows_how_much_less_fits(
    hint: Hint | None, failure: Probe, step: int
) -> None:
    fitting = [Probe(count, JobStatus.FITS, 30 + count, 30 + count, count) for count in (10, 100)]
    guess = explore([*fitting, failure], UNLIMITED, budget_bytes=201, hint=hint)
    assert isinstance(guess, Next)
    assert guess.batch_size == step


def test_two_search_workers_may_fail_at_the_same_batch_after_its_first_step() -> None:
    probes = [Probe(count, JobStatus.FITS, 30 + count, 30 + count, count) for count in (10, 100)]
    probes += [Probe(171, JobStatus.OOM, 999, first_step_bytes=175)] * 2
    guess = explore(probes, UNLIMITED, budget_bytes=201)
    assert isinstance(guess, Next) and guess.batch_size == 168


def test_a_failure_of_a_resnet_is_explained_by_its_first_step() -> None:
    """A ResNet-18 in bf16 on a CPU, whose kernels take more from some batch on than the plan says (2026-11-29)."""
    probes = [
        Probe(254, JobStatus.FITS, 479_580_160, 479_580_160, 368_738_304),
        Probe(311, JobStatus.OOM, 545_313_156, first_step_bytes=431_218_688),
    ]

    def guess() -> Next:
        hint = Hint(254, slope_bytes=1_003_844)
        step = explore(probes, UNLIMITED, budget_bytes=512 * MEBIBYTE, hint=hint, from_above="unplanned")
        assert isinstance(step, Next)
        return step

    # If the line is right, 307 fails, which proves 306.
    assert (guess().batch_size, guess().may_be_confirmed, guess().should_fit) == (307, True, False)
    probes.append(Probe(307, JobStatus.OOM, 545_313_156, first_step_bytes=426_834_100))
    assert (guess().batch_size, guess().should_fit) == (306, True)


def test_a_jump_that_first_steps_show_costs_few_probes() -> None:
    """From 110 samples on a kernel takes 40 more: a line from below the jump predicts too much each time."""
    device = Device(lambda count: 30 + count + 40 * (count >= 110), 201, later_bytes=10)
    max_batch, probes = device.search(hint=Hint(100, slope_bytes=1.0))
    assert max_batch.batch_size == 131
    assert len(probes) <= 6


@pytest.mark.parametrize(
    ("known", "limit", "max_batch"),
    [
        ("1!", 9, MaxBatch(0, 1, "memory")), ("5=100", 5, MaxBatch(5, None, "dataset")),
        ("2=1 3x 4!", 9, MaxBatch(2, 3, "kernel")),
        ("2=1 3! 4x", 9, MaxBatch(2, 3, "memory")), ("4=40 5! 6=60", 9, MaxBatch(4, 5, "memory")),
        ("4=40 5=50 5!", 9, MaxBatch(4, 5, "memory")),  # a batch that ran and failed counts as failed
    ],
)  # fmt: skip
def test_a_max_batch_is_between_a_batch_that_ran_and_the_next_one(known: str, limit: int, max_batch: MaxBatch) -> None:
    assert explore(tried(known), Limit(limit, "dataset"), budget_bytes=1000) == max_batch


def test_after_twelve_probes_every_second_one_bisects() -> None:
    steps = [
        explore([Probe(batch, JobStatus.FITS, batch) for batch in range(1, count + 1)], UNLIMITED, budget_bytes=1000)
        for count in range(11, 16)
    ]
    below = "slightly below 1000, the predicted max batch"
    assert [step.reason for step in steps if isinstance(step, Next)] == [
        below, "twice 12, which fits", below, "twice 14, which fits", below,
    ]  # fmt: skip


def test_the_line_goes_through_the_smallest_and_the_largest_that_fit() -> None:
    line = line_of(tried("20=1500 8=300 40!9000 16=200"))
    assert line == Line(8, Point(20, 1500.0), 100.0)
    assert (line.at(10), line.reaches(1650), line.fixed_bytes) == (500, 21, 0.0)
    assert line_of(tried("8=700 16=1500")) == Line(8, Point(16, 1500.0), 100.0)
    assert Line(8, Point(16, 1700.0), 100.0).fixed_bytes == 100.0
    for nothing_to_draw in ("", "8=100", "8=100 16=100", "8=200 16=100", "8=100 8=200"):
        assert line_of(tried(nothing_to_draw)) is None


MAX_BATCHES = st.one_of(st.integers(1, 64), st.floats(0, 6).map(lambda power: int(10**power)))
"""From 1 to a million, as many small as large."""
BUDGETS = st.integers(2**28, 2**37)
SHARES = st.floats(0, 0.95)
"""Of the budget: what no batch at all takes."""
FIRST = st.integers(8, 32).map(Hint)
"""The workload's own batch size."""


@given(max_batch=MAX_BATCHES, budget=BUDGETS, share=SHARES | st.just(0.99), hint=FIRST)
def test_an_exactly_linear_device_takes_five_probes(max_batch: int, budget: int, share: float, hint: Hint) -> None:
    fixed, each = line(max_batch, budget, share)
    found, probes = Device(lambda batch: fixed + each * batch, budget).search(hint=hint)
    assert found == MaxBatch(max_batch, max_batch + 1, "memory")
    # Meters count whole bytes: on a device full of parameters, at a million samples, that is worth one more.
    assert len(probes) <= (5 if share <= 0.95 else 6)


@pytest.mark.parametrize("block", [2 * MEBIBYTE, 20 * MEBIBYTE])
@given(max_batch=MAX_BATCHES, budget=BUDGETS, share=SHARES, hint=FIRST)
def test_a_device_that_takes_memory_in_blocks_takes_eight(
    block: int, max_batch: int, budget: int, share: float, hint: Hint
) -> None:
    usable = budget // block * block
    fixed, each = line(max_batch, usable, share)
    found, probes = Device(lambda batch: fixed + each * batch, budget, block).search(hint=hint)
    assert found.batch_size == max_batch
    assert len(probes) <= 8


@pytest.mark.parametrize(("make", "sizes"), [(bent, st.floats(2 / 3, 1.5)), (jumping, st.floats(0, 0.3))])
@given(st.data(), MAX_BATCHES, BUDGETS, SHARES, FIRST, st.floats(0, 1))
def test_a_bend_or_a_jump_is_found_exactly(
    make: Callable[..., Device], sizes: st.SearchStrategy[float], data: st.DataObject,
    max_batch: int, budget: int, share: float, hint: Hint, at: float,
) -> None:  # fmt: skip
    found, _ = make(max_batch, budget, share, at, data.draw(sizes)).search(hint=hint)
    assert found.batch_size == max_batch


@given(max_batch=st.integers(0, 64), hint=st.integers(1, 4096).map(Hint), has_meter=st.booleans())
def test_one_sample_is_tried_only_where_two_do_not_fit(max_batch: int, hint: Hint, has_meter: bool) -> None:
    """A training with BatchNorm may reject a single sample."""
    probes: list[Probe] = []
    budget = 1000 * max_batch + 500
    while isinstance(step := explore(probes, UNLIMITED, budget_bytes=budget if has_meter else None, hint=hint), Next):
        fits = step.batch_size <= max_batch
        assert step.batch_size > 1 or any(probe.batch_size == 2 and not probe.fits for probe in probes)
        status = JobStatus.FITS if fits else JobStatus.OOM
        probes.append(Probe(step.batch_size, status, 1000 * step.batch_size))
    assert step.batch_size == max_batch


@given(max_batch=MAX_BATCHES, budget=BUDGETS, share=SHARES, hint=FIRST, part=st.floats(0, 0.05))
def test_a_device_of_whims_ends_with_a_proof(
    max_batch: int, budget: int, share: float, hint: Hint, part: float
) -> None:
    fixed, each = line(max_batch, budget, share)
    device = Device(lambda b: (fixed + each * b) * (1 + part * (random.Random(b).random() - 0.5)), budget)
    found, probes = device.search(hint=hint)
    assert found.first_failing_batch == found.batch_size + 1
    assert len(probes) <= 12 + 2 * math.log2(2**24)


@pytest.mark.parametrize("part", [None, 0.1], ids=["", "first steps are measured"])
@pytest.mark.parametrize("make", FAMILIES)
def test_most_devices_that_are_not_linear_take_eight_probes(
    make: Callable[[random.Random, int, int, float], Device], part: float | None
) -> None:
    """Some must take more: which of n batches is the one where memory jumps cannot be told in less than log2(n)."""
    counts = []
    for seed in range(1000):
        chance = random.Random(seed)
        max_batch, budget = int(10 ** chance.uniform(0, 6)), int(2 ** chance.uniform(28, 37))
        later_bytes = int(part * budget) if part is not None else None
        device = dataclasses.replace(make(chance, max_batch, budget, chance.uniform(0, 0.95)), later_bytes=later_bytes)
        _, probes = device.search(hint=Hint(chance.randint(8, 32)))
        counts.append(len(probes))
    counts.sort()
    assert counts[500] <= 7
    assert counts[939] <= 8, "94 % take at most 8, as docs/probes.md says"
    assert counts[-1] <= 14


@pytest.mark.parametrize("noise", [0, 1e-4, 1e-2])
def test_memory_that_is_flat_at_small_batches_takes_at_most_18_probes_for_94_percent(noise: float) -> None:
    counts = []
    for seed in range(1000):
        chance = random.Random(seed)
        max_batch, budget = int(10 ** chance.uniform(1, 4)), int(2 ** chance.uniform(28, 37))
        device = flat_at_first(chance, max_batch, budget, chance.uniform(0, 0.95), noise)
        _, probes = device.search(hint=Hint(chance.randint(8, 32)))
        counts.append(len(probes))
    counts.sort()
    assert counts[939] <= 18, "it took 21 to 24, when it extrapolated from flat readings and bisected arithmetically"
    assert counts[-1] <= 26


@given(truth=st.integers(0, 10**6), limit=st.integers(1, 10**6))
def test_a_limit_is_named(truth: int, limit: int) -> None:
    device = Device(lambda batch: 1000 * batch, 1000 * truth + 500)
    max_batch, _ = device.search(limit=Limit(limit, "max_batch_size"))
    if truth < limit:
        assert max_batch == MaxBatch(truth, truth + 1, "memory")
    else:
        assert max_batch == MaxBatch(limit, None, "max_batch_size")


def test_all_of_a_small_data_set_is_tried_at_once_when_it_should_fit() -> None:
    _, probes = Device(lambda batch: 1000 + batch, 10**6).search(limit=Limit(500, "dataset"))
    assert [probe.batch_size for probe in probes][-1] == 500
    assert len(probes) <= 3


def test_a_kernel_limit_is_named_and_found_by_bisection() -> None:
    device = Device(lambda batch: 1000.0 * batch if batch <= 777 else 10**9, 10**8, failure=JobStatus.KERNEL_LIMIT)
    max_batch, probes = device.search()
    assert max_batch == MaxBatch(777, 778, "kernel")
    assert len(probes) <= 20


@given(truth=st.integers(1, 10**6))
def test_without_a_meter_it_doubles_and_bisects(truth: int) -> None:
    probes: list[Probe] = []
    while not isinstance(step := explore(probes, UNLIMITED, hint=Hint(1)), MaxBatch):
        probes.append(Probe(step.batch_size, JobStatus.FITS if step.batch_size <= truth else JobStatus.OOM))
    assert step.batch_size == truth
    assert len(probes) <= 2 * math.log2(truth + 1) + 2


@given(st.permutations([Probe(b, JobStatus.FITS if b <= 20 else JobStatus.OOM, 10 * b) for b in (1, 2, 8, 19, 22, 32)]))
def test_the_order_of_probes_does_not_matter(probes: list[Probe]) -> None:
    assert explore(probes, UNLIMITED, budget_bytes=205) == Next(20, "predicted max batch", 200)


def test_another_precisions_line_spares_a_probe() -> None:
    """bf16 begins at the edge of fp32, with its line's fixed part."""
    full = Device(lambda batch: 10_000 + 100 * batch, 100_000)
    max_batch, probes = full.search()
    taught = line_of(probes)
    assert taught is not None
    assert taught.fixed_bytes == pytest.approx(10_000)
    half = Device(lambda batch: 12_000 + 50 * batch, 100_000)
    found, with_hint = half.search(hint=Hint(max_batch.batch_size, "fp32's edge", taught.fixed_bytes))
    assert found.batch_size == 1760
    assert len(with_hint) <= 4
    assert with_hint[0].batch_size == max_batch.batch_size == 900


@given(max_batch=st.integers(1000, 100_000), width=st.integers(1, 400))
def test_what_fits_beyond_the_line_is_followed_in_growing_steps(max_batch: int, width: int) -> None:
    found, probes = plateau(max_batch, width).search()
    assert found.batch_size == max_batch
    assert len(probes) <= 40


def test_twelve_samples_beyond_the_line_are_found_quickly() -> None:
    found, probes = plateau(2799, 12).search(limit=Limit(20_000, "dataset"), hint=Hint(32))
    assert found.batch_size == 2799
    assert len(probes) <= 17, "it took 34"


def test_a_batch_above_the_data_set_lowers_the_limit() -> None:
    probes = [Probe(8, JobStatus.FITS, 1000), Probe(101, JobStatus.OVER_DATASET)]
    step = explore(probes, Limit(2**20, "max_batch_size"), budget_bytes=10**6)
    assert isinstance(step, Next) and step.batch_size <= 100
    assert explore([*probes, Probe(100, JobStatus.FITS, 2000)], Limit(2**20, "max_batch_size")) == MaxBatch(
        100, None, "dataset"
    )


def test_a_failure_above_a_limit_that_is_learned_later_does_not_count() -> None:
    """A buffer made for the asked batch size fails before the loader tells that there are fewer samples."""
    probes = [Probe(1000, JobStatus.FITS), Probe(4000, JobStatus.OOM), Probe(2001, JobStatus.OVER_DATASET)]
    step = explore(probes, UNLIMITED)
    assert isinstance(step, Next) and step.batch_size == 2000
    assert explore([*probes, Probe(2000, JobStatus.FITS)], UNLIMITED) == MaxBatch(2000, None, "dataset")
