import math

from amp_track.records.result import LayerGradients, NonFinite
from amp_track.training.metrics_accumulator import LayerSums, first_non_finite


def look(layer: str, step: int = 1, **settings: object) -> LayerGradients:
    return LayerGradients(
        **{"step": step, "layer": layer, "values": 100, "non_finite": 0, "underflowing": 0, "zero": 0} | settings
    )


def test_nothing_was_not_finite() -> None:
    assert first_non_finite([look("a"), look("b", largest_output=3.0)]) is None


def test_the_first_step_counts_then_the_forward_pass_then_the_order() -> None:
    later = look("later", 9, largest_output=math.inf, forward_order=0)
    gradients = [
        look("early", 5, non_finite=3, backward_order=2),
        look("late", 5, non_finite=1, backward_order=1),
    ]
    assert first_non_finite([later, *gradients]) == NonFinite(step=5, layer="late", in_pass="backward")
    outputs = [
        look("third", 5, largest_output=math.nan, forward_order=2),
        look("second", 5, largest_output=math.inf, forward_order=1),
    ]
    assert first_non_finite([later, *gradients, *outputs]) == NonFinite(step=5, layer="second", in_pass="forward")


def test_a_summary_is_of_all_values_and_underflow_of_the_finite_ones() -> None:
    sums = LayerSums()
    for found in (
        look("a", 1, non_finite=50, underflowing=10, zero=5, largest_output=2.0),
        look("a", 3, underflowing=20, zero=5, largest_output=math.nan),
        look("a", 5, values=0, largest_output=7.0),
        look("a", 7, values=0),
    ):
        sums.add(found)
    summary = sums.summary("a")
    assert (summary.non_finite, summary.underflowing, summary.zero) == (50 / 200, 30 / 150, 10 / 200)
    assert summary.has_gradients
    assert summary.largest_output is not None
    assert math.isnan(summary.largest_output), "a NaN is not forgotten for a number"
    assert not LayerSums().summary("b").has_gradients
