"""The answer in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from table_samples import COMPARE, FIT, SEARCH, comparison

from amp_track.batch_search.search import MaxBatch
from amp_track.config.job import Job
from amp_track.records.hardware import Hardware
from amp_track.records.result import JobResult, JobStatus
from amp_track.report.max_batch import max_batch_notes, max_batch_table
from amp_track.report.summary import answer, proof
from amp_track.report.table import render_text
from amp_track.results.compare import CompareResult
from amp_track.results.max_batch import NOT_ASKED_FOR, PrecisionResult
from amp_track.results.search import SearchResult
from amp_track.results.trial_row import TrialRow


def test_a_search_says_what_to_train_with_and_how_it_compares() -> None:
    said = answer(SEARCH)
    assert said.headline == (
        "amp at batch 128: as fast as fp32 (within 3 %), accuracy differs by +0.0210 over 3 seeds at batch 4096"
    )
    assert said.more[0] == "The max batch at amp is 13,333, 1.2 × fp32's."
    assert said.command == "amp-track train experiments/digits.py --precision amp --batch-size 128"
    assert any("on a CPU" in line for line in said.caveats)


def test_max_batches_alone_say_how_they_are_proven() -> None:
    said = answer(FIT)
    assert said.headline == "amp at batch 10,944: as fast as fp32 (within 3 %)"
    assert said.more[1] == (
        "amp: batch 13,333 ran in 1 fresh process (a confirmation run of 12,345 steps) with a peak of 72\u00a0GiB; "
        "larger batches were not tried (limit: --max-batch-size)."
    )
    all_samples = dataclasses.replace(FIT.precisions["amp"], max_batch=MaxBatch(13_333, None, "dataset"))
    assert proof("amp", all_samples).endswith("; larger batches exceed the training set.")
    assert 'Lightning: Trainer(precision="16-mixed", accumulate_grad_batches=10)' in said.in_tools
    assert proof("fp32", FIT.precisions["fp32"]).endswith("batch 10,950 ran out of memory in evaluation.")
    assert proof("bf16", FIT.precisions["bf16"]).startswith("bf16: one sample needs")


def test_a_batch_below_the_max_batch_has_its_reason() -> None:
    amp = dataclasses.replace(
        FIT.precisions["amp"], recommended_batch=6664, compared=(13_328, 6664), leaves_headroom=True,
        readings={6664: (99.0, 98.0, 50.0), 13_328: (100.0, 100.0), 13_333: (101.0,)},
    )  # fmt: skip
    limit = {"limit_bytes": 1000, "recommended_bytes": 950, "multiple_of": 1, "effective_batch_size": None}
    said = answer(dataclasses.replace(FIT, precisions={"amp": amp}, **limit))
    assert said.more[-1] == (
        "Batch 6,664 leaves at least 5% of the memory free and is a multiple of 8 and is the smallest timed one within "
        "3 % of the best speed (median; 6,664: 98 samples/s in 3 readings, 13,328: 100 samples/s in 2 readings)."
    )


def test_a_recommended_batch_with_few_steps_an_epoch_has_a_note_first() -> None:
    found = dataclasses.replace(FIT, effective_batch_size=None, training_samples=50_000, asked=Job(epochs=2))
    few = [line for line in answer(found).caveats if "Few optimizer steps" in line]
    assert few == [
        "Few optimizer steps: at batch 13,320 an epoch of 50,000 samples has only 4 optimizer steps, so the model may "
        "stay undertrained. To avoid that, train for more epochs, raise the learning rate, or use a smaller batch "
        "with --max-batch-size."
    ]
    assert max_batch_notes(found)[0] == few[0]
    assert answer(found).headline.endswith(", but only 4 optimizer steps per epoch")
    full_only = dataclasses.replace(found, drops_last=True)
    assert "has only 3 optimizer steps" in max_batch_notes(full_only)[0]
    workload = dataclasses.replace(found, training_samples=2_000_000, workload_batch_size=4096)
    assert workload.recommended is not None and not workload.recommended.makes_few_steps
    assert max_batch_notes(dataclasses.replace(workload, workload_batch_size=64))[0].startswith(
        "Few optimizer steps: at batch 13,320 an epoch has 151 optimizer steps, at the workload's batch 64 it has"
    )
    for no_note in ({"effective_batch_size": 109_440}, {"asked": Job(steps=100)}, {"training_samples": None}):
        assert "Few optimizer steps" not in "".join(max_batch_notes(dataclasses.replace(found, **no_note)))
        assert "optimizer step" not in answer(dataclasses.replace(found, **no_note)).headline


def test_a_training_that_accumulates_itself_has_fewer_steps_and_a_note_with_an_effective_batch() -> None:
    def ran(batch_size: int, own: int | None) -> TrialRow:
        job_result = JobResult(status=JobStatus.FITS, batches_per_step=own)
        return TrialRow(precision="amp", batch_size=batch_size, run_id="", job_result=job_result)

    probes = (ran(2, 8), ran(4, 8), ran(10_944, None))
    alone = dataclasses.replace(FIT, effective_batch_size=None, training_samples=500_000, asked=Job(), probes=probes)
    choice = alone.recommended
    assert choice is not None
    assert choice.epoch_steps == math.ceil(math.ceil(500_000 / 13_320) / 8) == 5
    assert max_batch_notes(alone)[0].startswith(
        "Few optimizer steps: at batch 13,320 × 8 an epoch of 500,000 samples has"
    )
    assert choice.in_tools["transformers"].endswith("fp16=True, gradient_accumulation_steps=8)")
    assert choice.in_tools["timm"].endswith("--grad-accum-steps 8")
    kept = dataclasses.replace(alone, probes=(*probes, ran(13_320, 2))).recommended
    assert kept is not None and kept.as_json()["batches_per_step"] == 2, "that at the recommended batch counts"

    effective = dataclasses.replace(FIT, probes=probes)
    assert max_batch_notes(effective)[0] == (
        "The training itself takes 8 batches for each optimizer step. Change that number to 10 at batch 10,944: "
        "else a step does not have the 109,440 samples of --effective-batch-size."
    )
    assert effective.recommended is not None
    assert "accumulate_grad_batches=10" in effective.recommended.in_tools["lightning"]
    for own in (1, 10):
        assert "itself" not in "".join(max_batch_notes(dataclasses.replace(FIT, probes=(ran(10_944, own),))))


def test_loading_that_limits_the_speed_has_a_note() -> None:
    def noted(load_seconds: float, **changes: object) -> str:
        job_result = JobResult(status=JobStatus.FITS, samples_per_second=10_944.0, load_seconds=load_seconds)
        row = TrialRow(precision="amp", batch_size=10_944, run_id="", job_result=job_result, kind="timing")
        found = dataclasses.replace(FIT, probes=(row,), **changes)
        return "".join(line for line in max_batch_notes(found) if "oading" in line)

    no_budget = dataclasses.replace(FIT.job, memory_budget_bytes=None)
    assert noted(0.6, job=no_budget).startswith(
        "Loading takes 60% of a step at amp and batch 10,944, so the speeds are"
    )
    assert not noted(0.4, job=no_budget)
    assert not noted(0.6), "within a budget of a CPU no process loads beside the training"

    gpu = {"hardware": Hardware(kind="cuda", name="a GPU"), "workload_batch_size": 64, "job": no_budget}
    assert noted(2.5, **gpu) == (
        "Loading a batch takes 2.5 s in one process, a step 1 s (at amp and batch 10,944): a training waits for its "
        "data, which these speeds do not count. Use --num-workers 3 or more."
    )
    assert not noted(0.9, **gpu)
    assert not noted(2.5, **(gpu | {"job": dataclasses.replace(no_budget, num_workers=3)}))
    assert not noted(2.5, workload_batch_size=64), "a CPU computes on the cores that would load"


def test_max_batches_that_say_nothing_about_memory_have_a_note() -> None:
    def noted(bound: str, **changes: object) -> list[str]:
        of_all = {"max_batch": MaxBatch(10_949, None, bound)}
        precisions = {name: dataclasses.replace(FIT.precisions[name], **of_all) for name in ("fp32", "amp")}
        found = dataclasses.replace(FIT, precisions=precisions, **changes)
        return [line for line in max_batch_notes(found) if "not memory" in line]

    assert noted("dataset")[0].endswith(". With more samples, memory would.")
    assert noted("dataset", workload_batch_size=64)[0].endswith(". --synthetic finds what memory allows.")
    assert not noted("max_batch_size")


def test_readings_that_disagree_have_a_note() -> None:
    def noted(*own: float) -> list[str]:
        fp32 = dataclasses.replace(FIT.precisions["fp32"], compared=(784,), readings={392: (1.0, 9.0), 784: own})
        return [line for line in max_batch_notes(dataclasses.replace(FIT, precisions={"fp32": fp32})) if "vary" in line]

    assert noted(161.0, 170.0, 105.0) == [
        "The speeds of one batch vary by up to 38 % between readings (fp32 at batch 784: 161, 170, 105 samples/s), so "
        "the recommended precision and batch are uncertain. Repeat with another --study when the machine is idle."
    ]
    assert noted(100.0, 71.0) == noted(100.0, 0.0) == []


def test_peaks_of_one_batch_that_disagree_are_named() -> None:
    largest = FIT.precisions["amp"].max_batch.batch_size

    def noted(*peaks: int) -> str:
        rows = [
            TrialRow(precision="amp", batch_size=largest, run_id="", job_result=fits)
            for fits in (JobResult(status=JobStatus.FITS, peak_bytes=peak) for peak in peaks)
        ]
        amp = dataclasses.replace(FIT.precisions["amp"], runs_at_max_batch=len(peaks))
        found = dataclasses.replace(FIT, precisions={"amp": amp}, probes=tuple(rows))
        return next(line for line in max_batch_notes(found) if "fresh processes" in line)

    varied = noted(132 * 2**20, 149 * 2**20)
    assert varied == "Each max batch ran in 2 fresh processes. Their memory varied, at amp from 132 MiB to 149 MiB."
    assert "is measured in" in noted(132 * 2**20, 132 * 2**20)


def test_a_max_batch_that_a_single_step_confirms_has_a_note() -> None:
    amp = FIT.precisions["amp"]
    assert amp.confirmation is not None and amp.confirmation.steps > 1
    assert not any("one full optimizer step" in line for line in max_batch_notes(FIT))
    single = dataclasses.replace(amp, confirmation=dataclasses.replace(amp.confirmation, steps=1), epoch_steps=1)
    cut_short = max_batch_notes(
        dataclasses.replace(FIT, precisions={"amp": dataclasses.replace(single, epoch_steps=9)})
    )
    assert not any("one full optimizer step" in line for line in cut_short)
    notes = max_batch_notes(dataclasses.replace(FIT, precisions={"amp": single}))
    batch = f"{amp.max_batch.batch_size:,}"
    said = f"Only one full optimizer step confirms the max batch (amp at batch {batch})"
    assert any(said in line for line in notes)
    two = dataclasses.replace(amp, confirmation=dataclasses.replace(amp.confirmation, steps=2), epoch_steps=2)
    of_two = 2 * amp.max_batch.batch_size
    for samples, accumulated, is_said in ((of_two - 1, 1, True), (of_two, 1, False), (of_two, 2, True)):
        found = dataclasses.replace(FIT, precisions={"amp": two}, training_samples=samples, grad_accum=accumulated)
        assert any(said in line for line in max_batch_notes(found)) is is_said, "the second step is a smaller one"


@pytest.mark.parametrize(
    ("runs", "said"),
    [((2, 4), "in at least 2 fresh processes"), ((1, 5), "in at least 1 fresh process."), ((1, 1), None)],
)
def test_processes_are_counted_for_all_max_batches(runs: tuple[int, int], said: str | None) -> None:
    amp = FIT.precisions["amp"]
    of_each = {
        name: dataclasses.replace(amp, runs_at_max_batch=count)
        for name, count in zip(("fp32", "amp"), runs, strict=True)
    }
    text = " ".join(max_batch_notes(dataclasses.replace(FIT, precisions=of_each)))
    assert said in text if said else "fresh process" not in text


def test_a_precision_that_was_not_asked_for_has_no_row_and_no_note() -> None:
    found = dataclasses.replace(FIT, skipped={"tf32": "needs another GPU", "bf16": NOT_ASKED_FOR})
    text = render_text([max_batch_table(found)], []) + "".join(max_batch_notes(found))
    assert "tf32" in text and "not asked for" not in text


def test_where_nothing_is_proven_to_fit_there_is_no_command() -> None:
    nothing = PrecisionResult(max_batch=MaxBatch(0, 1, "memory"), probes=1, at_max_batch=None, run_id=None)
    said = answer(dataclasses.replace(FIT, precisions={"fp32": nothing}))
    assert said.headline.startswith("Nothing fits")
    assert said.command is None
    known = "not proven yet: batch 8 fits; run the command again"
    said = answer(dataclasses.replace(FIT, precisions={}, skipped={"fp32": known}, unproven=("fp32",)))
    assert said.caveats[0] == f"fp32 is {known}"
    assert said.headline == "No max batch is proven yet (fp32): run the same command again"


def test_the_reference_says_that_nothing_is_faster() -> None:
    said = answer(dataclasses.replace(FIT, precisions={"fp32": FIT.precisions["fp32"]}))
    assert said.headline.startswith("fp32 at batch 10,944: no other precision was trained, 1,234,567 samples/s")


def test_a_comparison_answers_with_its_own_sentences() -> None:
    names = {"16": "16", "1024": "adam"}
    cells = tuple(dataclasses.replace(cell, value=names[cell.value]) for cell in COMPARE.cells)
    by_name = dataclasses.replace(comparison("optimizer"), values=("16", "adam"), answers=("one", "two"), cells=cells)
    said = answer(by_name)
    assert (said.headline, said.more, said.command) == ("one", ("two",), None), (
        "which of two names is not for us to say"
    )


def test_a_comparison_says_how_to_train_at_its_last_value() -> None:
    asked = Job(options=(("depth", "2"), ("activation_width", "16")))
    said = answer(dataclasses.replace(COMPARE, asked=asked))
    assert said.headline == (
        "amp at activation_width=1024: as fast as fp32 (within 3 %), the same memory, accuracy differs by +0.0210 "
        "over 3 seeds"
    )
    assert said.to_train == "To train with it at activation_width=1024"
    assert said.command == (
        "amp-track train experiments/digits.py --precision amp --set depth=2 --set activation_width=1024"
    )
    without_option = answer(comparison(None))
    assert without_option.to_train == "To train with it"
    assert without_option.command == "amp-track train experiments/digits.py --precision amp"


def searched(*metrics: tuple[str, float, float]) -> SearchResult:
    """Return a search with one training for each precision, speed and metric."""
    trials = [
        dataclasses.replace(
            trial,
            precision=precision,
            job_result=dataclasses.replace(trial.job_result, samples_per_second=speed, metric=metric),
        )
        for trial, (precision, speed, metric) in zip(SEARCH.trials, metrics, strict=False)
    ]
    return dataclasses.replace(SEARCH, seeds=None, trials=tuple(trials))


def test_trainings_that_diverged_are_no_answer() -> None:
    said = answer(searched(("fp32", 1.0, math.nan), ("amp", 2.0, math.inf)))
    assert said.headline.startswith("Every training diverged, so no accuracy is finite")
    assert said.command is None


def test_a_precision_that_is_fast_and_worse_is_not_said_to_be_slow() -> None:
    said = answer(searched(("fp32", 700.0, 0.9), ("amp", 1900.0, 0.5)))
    assert said.headline.startswith("fp32 at batch 64: faster with amp, but at a worse accuracy")
    slow = answer(searched(("fp32", 700.0, 0.9), ("amp", 500.0, 0.9)))
    assert slow.headline.startswith("fp32 at batch 64: no faster with amp on this device")


def changed(change: Callable[[TrialRow], JobResult], **settings: object) -> CompareResult:
    """Return the comparison with other results of its trainings."""
    cells = tuple(
        dataclasses.replace(
            cell, trainings=tuple(dataclasses.replace(each, job_result=change(each)) for each in cell.trainings)
        )
        for cell in COMPARE.cells
    )
    return dataclasses.replace(COMPARE, cells=cells, **settings)


def test_seeds_that_one_precision_lacks_are_not_counted() -> None:
    def lose_one(each: TrialRow) -> JobResult:
        is_lost = each.run_id == "1024fp320"
        return dataclasses.replace(each.job_result, metric=math.nan) if is_lost else each.job_result

    assert answer(changed(lose_one)).headline.endswith("over 2 seeds")


def test_a_faster_precision_of_which_one_training_failed_is_not_said_to_be_worse() -> None:
    def lose_one(each: TrialRow) -> JobResult:
        if each.run_id.endswith("0") and each.precision != "fp32":
            return JobResult(status=JobStatus.TIMED_OUT)
        speed = 100.0 if each.precision == "fp32" else 200.0
        return dataclasses.replace(each.job_result, samples_per_second=speed)

    said = answer(changed(lose_one)).headline
    assert said.endswith(": faster with tf32 and amp and bf16, but not all of these trainings completed")


def test_made_up_data_has_no_loss_and_is_not_trained_on() -> None:
    made_up = changed(
        lambda each: dataclasses.replace(each.job_result, metric=None),
        asked=Job(synthetic=True), precisions=("fp32", "bf16"), values=("1024",),
    )  # fmt: skip
    cells = tuple(cell for cell in made_up.cells if cell.precision in made_up.precisions)
    said = answer(dataclasses.replace(made_up, cells=cells))
    assert said.headline == "fp32 at activation_width=1024: no faster with bf16"
    assert said.command is not None
    assert "--synthetic" not in said.command
