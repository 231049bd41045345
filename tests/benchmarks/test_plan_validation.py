"""The memory plan beside published batch sizes: six models, and how the comparison counts."""

from __future__ import annotations

import dataclasses
import multiprocessing

import pytest

from benchmarks.plan_validation import Compared, Predicted, Published, predict, published, summarize
from benchmarks.timm_2022 import run_as_in_2022

QUICK = {("vgg19", "contiguous")}
SIX = QUICK | {
    ("resnetblur50d", "channels_last"),
    ("vit_base_patch16_224", "contiguous"),
    ("vit_srelpos_small_patch16_224", "channels_last"),
    ("efficientnet_lite3", "channels_last"),
    ("cspresnet50w", "contiguous"),
}
ROWS = [
    pytest.param(row, id=row.model, marks=() if (row.model, row.layout) in QUICK else pytest.mark.slow)
    for row in published()
    if (row.model, row.layout) in SIX
]


def predicted(row: Published) -> Predicted:
    """Predict a row in a new process, in which torch is changed before timm is imported."""
    with multiprocessing.get_context("spawn").Pool(1, run_as_in_2022) as pool:
        return pool.apply(predict, (row,))


@pytest.mark.parametrize("row", ROWS)
def test_the_expected_batch_is_inside_and_the_safe_one_did_not_fail(row: Published) -> None:
    found = predicted(row)
    assert not found.error
    assert row.failed_batch_size is not None
    assert row.batch_size <= found.expected < row.failed_batch_size
    assert 0.85 * row.batch_size <= found.safe < found.expected <= found.at_most


def compared(ran: int, expected: int, *, safe: int | None = None, model: str = "a") -> Compared:
    row = Published(
        model=model, image_size=224, layout="contiguous", batch_size=ran, samples_per_second=1.0,
        parameters_millions=1.0,
    )  # fmt: skip
    found = Predicted(
        model=model, image_size=224, layout="contiguous", family="vit", expected=expected,
        safe=expected * 9 // 10 if safe is None else safe, at_most=expected + 1,
    )  # fmt: skip
    return Compared(row, found)


def test_a_prediction_is_compared_with_its_bracket() -> None:
    verdicts = [compared(128, expected).verdict for expected in (127, 128, 191, 192)]
    assert verdicts == ["too low", "inside", "inside", "too high"]
    assert compared(512, 5000).verdict == "inside", "the ladder ends there"


def test_the_summary_counts_models_not_rows() -> None:
    rows = [compared(128, 150, model=str(number)) for number in range(19)]
    rows += [compared(128, 192, safe=180, model="b"), compared(128, 200, safe=192, model="c"), compared(512, 600)]
    rows += [compared(128, 150, model="c"), compared(128, 0, model="d")]
    summary = summarize(rows)
    assert (summary["rows"], summary["models"], summary["rows_inside"]) == (23, 22, 20)
    assert [summary[f"expected_{name}"]["count"] for name in ("too_high", "too_low")] == [2, 1]
    assert summary["safe_fails"] == {"count": 1, "of": 22, "low": 0.0012, "high": 0.2284}  # as by R's binom.test
    assert summary["rows_at_512"] == 1
    assert [miss[0] for miss in summary["misses"]] == ["b", "c", "d"]
    assert summarize([compared(512, 600)])["models"] == 0


def test_the_error_within_brackets_is_recovered() -> None:
    """True batches are drawn 5 % below the expected one: the brackets of the ladder tell."""
    from random import Random

    random, rows = Random(0), []
    ladder = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    for number in range(400):
        true = random.uniform(8, 500)
        ran = max(size for size in ladder if size <= true)
        rows.append(compared(ran, round(true * random.lognormvariate(0.05, 0.02)), model=str(number)))
    summary = summarize(rows)
    assert summary["mean_ln_error"] == pytest.approx(0.05, abs=0.01)
    assert summary["spread_ln_error"] == pytest.approx(0.02, abs=0.01)


@pytest.mark.slow
def test_another_model_under_the_published_name_is_not_predicted() -> None:
    """timm 1.0.31 makes resnext101_32x8d of the name ig_resnext101_32x48d."""
    row = next(row for row in published() if row.model == "resnet18")
    found = predicted(dataclasses.replace(row, parameters_millions=2 * row.parameters_millions))
    assert found.error == "ValueError: timm makes another model of this name: 11.69 M parameters"
