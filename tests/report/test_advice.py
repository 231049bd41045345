import math

import pytest

from amp_track.records.diagnosis import Diagnosis, LayerSummary, NonFinite
from amp_track.records.outcome import NonFiniteLosses, Outcome, ScaleReport, Verdict
from amp_track.report.advice import explain


def outcome(steps: int = 1000, **settings: object) -> Outcome:
    return Outcome(verdict=Verdict.FITS, steps=steps, train_seconds=10.0, **settings)


def scale(*history: tuple[int, float]) -> ScaleReport:
    return ScaleReport(initial=history[0][1], final=history[-1][1], history=history)


def layers(*summaries: LayerSummary, first: NonFinite | None = None, seconds: float = 0.1) -> Diagnosis:
    return Diagnosis(every=100, steps=10, seconds=seconds, layers=summaries, first_non_finite=first)


def layer(name: str, underflowing: float = 0.0, largest_output: float = 1.0) -> LayerSummary:
    return LayerSummary(
        layer=name, has_gradients=True, non_finite=0.0, underflowing=underflowing, zero=0.0,
        largest_output=largest_output,
    )  # fmt: skip


def one_line(found: Outcome, precision: str = "amp") -> str:
    (line,) = explain(found, precision)
    return line


def test_there_is_nothing_to_say_of_a_training_without_an_event() -> None:
    assert explain(outcome(), "fp32") == []
    assert explain(outcome(scale=scale((0, 65536.0), (1000, 65536.0))), "amp") == []


def test_overflows_at_the_start_are_normal() -> None:
    history = scale((0, 65536.0), (1, 32768.0), (2, 16384.0), (40, 8192.0), (1000, 8192.0))
    line = one_line(outcome(scale=history, skipped_steps=3))
    assert line.startswith(
        "3 of the first 40 steps overflowed and were skipped, until the scale was down from 65,536 to"
    )
    assert "normal" in line


def test_a_scale_that_still_falls_late_is_not_called_normal() -> None:
    history = scale((0, 65536.0), (100, 32768.0), (450, 16384.0), (930, 8192.0), (1000, 8192.0))
    line = one_line(outcome(scale=history, skipped_steps=3))
    assert line.startswith("3 of the first 930 steps overflowed")
    assert "normal" not in line


def test_a_step_skipped_for_its_loss_is_no_overflow_of_gradients() -> None:
    losses = NonFiniteLosses(batches=1, first_step=500, first_batch=1)
    history = scale((0, 65536.0), (500, 32768.0), (1000, 32768.0))
    line = one_line(outcome(scale=history, skipped_steps=1, non_finite_losses=losses))
    assert line.startswith("the loss was inf or NaN in 1 batches")


def test_trials_of_a_larger_scale_are_not_remarked_on() -> None:
    history = scale((0, 1024.0), (2000, 2048.0), (2001, 1024.0), (4001, 2048.0), (4002, 1024.0), (5000, 1024.0))
    assert explain(outcome(steps=5000, scale=history, skipped_steps=2), "amp") == []


def test_overflows_again_and_again_are() -> None:
    changes = [(0, 2.0**14), (100, 2.0**15), *((100 + 10 * n, 2.0 ** (15 - n)) for n in range(1, 15)), (1000, 2.0)]
    line = one_line(outcome(scale=scale(*changes), skipped_steps=14))
    assert line.startswith(
        "14 steps after that overflowed, and made no update, though the scale was tried higher only 1"
    )
    assert "bf16" in line


@pytest.mark.parametrize(
    ("losses", "what"),
    [
        (
            NonFiniteLosses(batches=9, first_step=800, first_batch=1),
            "the loss itself overflows float16",
        ),
        (None, "gradients overflow unscaled, so the backward pass overflows float16"),
    ],
)
def test_a_scale_that_never_came_back(losses: NonFiniteLosses | None, what: str) -> None:
    history = scale((0, 4.0), (810, 2.0), (811, 1.0), (812, 0.5), (813, 0.25), (1000, 0.25))
    lines = explain(outcome(scale=history, skipped_steps=9, non_finite_losses=losses), "amp")
    assert f"the scale fell below 1 at step 812 and never recovered: {what}; try bf16" in lines


def test_a_scale_that_came_back_is_another_matter() -> None:
    history = scale((0, 2.0), (5, 1.0), (6, 0.5), (500, 1.0), (1000, 1.0))
    assert not any("never recovered" in line for line in explain(outcome(scale=history, skipped_steps=2), "amp"))


def test_a_loss_that_is_not_finite_is_no_overflow_of_gradients() -> None:
    losses = NonFiniteLosses(batches=2, first_step=812, first_batch=3)
    line = one_line(outcome(non_finite_losses=losses), "fp32")
    assert line.startswith("the loss was inf or NaN in 2 batches, first at step 812, batch 3 of it")
    assert "no precision cures it" in line
    assert "try bf16" in one_line(outcome(non_finite_losses=losses), "amp")


def test_weights_that_are_not_finite_come_first() -> None:
    losses = NonFiniteLosses(batches=500, first_step=500, first_batch=1)
    lines = explain(outcome(non_finite_weights="fc.weight", non_finite_losses=losses), "bf16")
    assert "fc.weight" in lines[0]
    assert len(lines) == 2


def test_layers() -> None:
    found = layers(layer("a", 0.1), layer("b", 0.4), first=NonFinite(step=3, layer="a", in_pass="forward"))
    first, underflow, cost = explain(outcome(diagnosis=found), "amp")
    assert first == "an output of layer a was the first that was not finite, at step 3"
    assert underflow.startswith("in layer b 40% of the gradient values lie below float16's smallest normal number")
    assert cost == "diagnosing every 100 steps (10 in all) took 0.1 s, 1.0% of the training"


def test_what_float16_would_do_to_a_training_without_it() -> None:
    found = layers(layer("a", 0.9, largest_output=1e5))
    underflow, overflow, _ = explain(outcome(diagnosis=found), "fp32")
    assert "amp needs its GradScaler" in underflow
    assert overflow.startswith("layer a puts out up to 1e+05, above float16's largest number, 65,504")
    assert not any("puts out" in line for line in explain(outcome(diagnosis=layers(layer("a", 0, math.inf))), "fp32"))


@pytest.mark.parametrize(
    ("workers", "try_this"),
    [(0, "try --loader-workers, which load it meanwhile"), (3, "try more --loader-workers than 3, or data that")],
)
def test_a_training_that_waits_for_data_is_told_so(workers: int, try_this: str) -> None:
    (line,) = explain(outcome(waited_seconds=6.3), "fp32", loader_workers=workers)
    assert line.startswith("the training waited for data 63% of its time (6.3 s)")
    assert try_this in line


@pytest.mark.parametrize(
    "found", [outcome(waited_seconds=1.9), Outcome(verdict=Verdict.FITS, train_seconds=1, waited_seconds=0.9)]
)
def test_little_waiting_is_not_worth_a_word(found: Outcome) -> None:
    assert explain(found, "fp32", loader_workers=0) == []
