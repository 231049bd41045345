"""The commands as functions: their arguments are the flags, their errors exceptions."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import DIGITS, FAULTS, WORKLOADS, stores

import amp_track
from amp_track import BadInput, NothingFits, TargetFailed, Workload, api
from amp_track.config.commands import FLAGS, request_of
from amp_track.config.options import CompareOptions, Request
from amp_track.config.values import Headroom, Tolerance


def test_the_keyword_arguments_are_the_flags() -> None:
    commands = ("train", "max-batch", "search", "compare", "plan")
    assert set(api.Settings.__annotations__) == {api.argument_name(flag) for name in commands for flag in FLAGS[name]}


def test_help_shows_the_keyword_arguments() -> None:
    parameters = inspect.signature(amp_track.max_batch).parameters
    assert next(iter(parameters)) == "workload"
    assert set(parameters) - {"workload"} == {api.argument_name(flag) for flag in FLAGS["max-batch"]}
    assert "max_batch" in dir(amp_track)


def asked(command: str, workload: object = DIGITS, **settings: Any) -> Request:
    return api._request(command, workload, settings)


def test_values_are_those_of_the_flags() -> None:
    by_text = request_of(
        "max-batch",
        DIGITS,
        {
            "maxbatchoptions_precisions": "fp32,bf16",
            "maxbatchoptions_headroom": "5%",
            "job_memory_budget_bytes": "64MiB",
            "job_learning_rate": "0.001",
            "job_channels_last": True,
            "job_options": ["width=32"],
        },
    )
    by_value = asked(
        "max-batch",
        precision=["fp32", "bf16"],
        headroom="5%",
        memory_budget=64 * 2**20,
        lr=1e-3,
        channels_last=True,
        set={"width": 32},
    )
    assert by_value == by_text
    assert by_value.max_batch_options.headroom == Headroom(fraction=0.05)
    assert by_value.job.memory_budget_bytes == 64 * 2**20


def test_fp16_is_stored_as_amp() -> None:
    assert asked("train", precision="fp16").job == asked("train", precision="amp").job
    assert asked("max-batch", precision=["fp16", "fp32"]).max_batch_options.precisions == ("fp32", "amp")


def test_lists_and_mappings_become_what_the_flags_take() -> None:
    request = asked("compare", vary={"width": [16, 64]}, set=["depth=3"], tolerance=0.005)
    assert request.compare_options is not None
    assert request.compare_options.vary == ("width", ("16", "64"))
    assert request.job.options == (("depth", "3"),)
    assert request.search_options.tolerance == Tolerance(absolute=0.005)
    assert asked("compare", vary={"width": range(8, 32, 8)}).compare_options == CompareOptions(
        vary=("width", ("8", "16", "24"))
    )
    assert asked("search", lr_range=[1e-4, 1e-2]).search_options.lr_range == (1e-4, 1e-2)


def test_none_is_the_flags_default() -> None:
    assert asked("max-batch", memory_budget=None, seed=None) == asked("max-batch")


def test_auto_finds_the_batch_size() -> None:
    assert asked("train", batch_size="auto").find_batch_size
    assert asked("train", batch_size=32).job.batch_size == 32


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        ("max-batch", {"memory_budget": "lots"}, "memory_budget: got 'lots', expected a size of 1MiB or more"),
        ("max-batch", {"precision": ["fp32", "fp8"]}, r"precision: got \['fp32', 'fp8'\], expected names from"),
        ("train", {"batch_size": 0}, "batch_size: got 0, expected a whole number of 1 or more, or auto"),
        ("train", {"compile": "yes"}, "compile: got 'yes', expected True or False"),
        ("train", {"set": {"wi dth": 3}}, "set: got {'wi dth': 3}, expected option=value"),
        ("train", {"set": 5}, "set: got 5, expected option=value"),
        ("train", {"set": [("width", 3)]}, r"set: got \[\('width', 3\)\], expected option=value"),
        ("train", {"grad_accum": "auto"}, "grad_accum: got 'auto', expected a whole number"),
        ("max-batch", {"precision": []}, r"precision: got \[\], expected names from"),
        ("compare", {"vary": {}}, "vary: got {}, expected option=value,value"),
        ("compare", {"vary": {"width": [1], "depth": [2]}}, "vary: got .*, expected option=value,value"),
        ("compare", {"vary": {"size": [(1, 2), (3, 4)]}}, "vary: got .*, expected option=value,value"),
        ("compare", {"batch_size": "auto"}, "batch_size: got 'auto', expected a whole number"),
        ("train", {"memory_budget": 1.5}, r"memory_budget: got 1\.5, expected a size of 1MiB or more"),
        ("train", {"batch_size": [64]}, r"batch_size: got \[64\], expected a whole number of 1 or more, or auto"),
        ("train", {"lr": [0.1]}, r"lr: got \[0\.1\], expected a number above 0"),
        ("train", {"precision": ["fp32"]}, r"precision: got \['fp32'\], expected one of"),
        ("max-batch", {"precision": [b"fp32"]}, r"precision: got \[b'fp32'\], expected names from"),
        ("max-batch", {"storage": b"sqlite:///x.db"}, "storage: got b'sqlite:///x.db', expected a database address"),
        ("max-batch", {"study": ["mine"]}, r"study: got \['mine'\], expected a name"),
        ("max-batch", {"device": object()}, "device: got <object object at .*>, expected auto"),
        ("max-batch", {"set": b"width=3"}, "set: got b'width=3', expected option=value"),
        ("max-batch", {"set": {"width": b"3"}}, "set: got {'width': b'3'}, expected option=value"),
        ("plan", {"memory_budget": [b"6GiB"]}, r"memory_budget: got \[b'6GiB'\], expected a size of 1MiB or more"),
        ("plan", {"vary": {"width": [b"3"]}}, r"vary: got {'width': \[b'3'\]}, expected option=value,value"),
        ("search", {"lr_range": b"1"}, "lr_range: got b'1', expected two numbers above 0"),
    ],
)
def test_bad_values_are_bad_input(command: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        asked(command, **settings)


def test_a_value_of_several_lines_is_shown_in_one() -> None:
    with pytest.raises(BadInput) as raised:
        asked("train", batch_size=np.zeros((100, 100)))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("workload", ["", b"mine.py", ["mine.py"], None, 5])
def test_what_names_no_workload_is_bad_input(workload: object) -> None:
    with pytest.raises(BadInput, match=r"^workload: got .*, expected a file, package\.module:Class, a class"):
        asked("max-batch", workload)


def test_numbers_of_numpy_and_paths_are_taken() -> None:
    assert asked("train", batch_size=np.int64(32), lr=np.float64(0.5)).job == asked("train", batch_size=32, lr=0.5).job
    assert asked("max-batch", storage=Path("x.log")).stores.storage == "x.log"


def test_an_unknown_argument_is_a_type_error_that_says_which_was_meant() -> None:
    with pytest.raises(TypeError, match=r"max_batch\(\) got an unexpected keyword .*'memory_bugdet'; did you mean"):
        asked("max-batch", memory_bugdet="64MiB")
    with pytest.raises(TypeError, match="expected one of"):
        asked("max-batch", colour="red")


def test_a_class_of_a_module_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WORKLOADS))
    import faults

    assert asked("max-batch", faults.Faults).job.workload == "faults:Faults"
    loaded = amp_track.load_workload(DIGITS)
    assert asked("max-batch", type(loaded)).job.workload == DIGITS
    assert asked("max-batch", Path(DIGITS)).job.workload == DIGITS


def test_a_class_that_no_fresh_process_can_import_is_rejected() -> None:
    class Inner(Workload):
        """Defined in a function."""

    with pytest.raises(BadInput, match="defined in a function or a class"):
        asked("max-batch", Inner)
    with pytest.raises(BadInput, match="pass options as set="):
        asked("max-batch", amp_track.load_workload(DIGITS))


def test_fit_finds_the_max_batch_and_train_trains_at_it() -> None:
    result = amp_track.max_batch(FAULTS, precision="fp32", max_batch_size=9, study="small", **stores())
    assert result.max_batch == {"fp32": 9}
    assert "fp32: batch 9 ran in" in str(result)
    assert result.as_json()["precisions"]["fp32"]["bound"] == "max_batch_size"
    trained = amp_track.train(FAULTS, precision="fp32", batch_size="auto", max_batch_size=9, study="small", **stores())
    assert (trained.job.batch_size, trained.job_result.fits) == (9, True)
    assert "batch 9" in (trained._repr_html_() or "")


@pytest.mark.slow
def test_search_and_compare_return_what_a_notebook_shows() -> None:
    small = {"precision": ["fp32", "bf16"], "epochs": 1, **stores()}
    searched = amp_track.search(FAULTS, trials=2, max_batch_size=8, study="small", **small)
    assert searched.limits.max_batch == {"fp32": 8, "bf16": 8}
    assert len(searched.as_json()["trials"]) == 2
    compared = amp_track.compare(FAULTS, vary={"fault": ["none"]}, batch_size=4, study="small", **small)
    assert [cell.status for cell in compared.cells] == ["fits", "fits"]
    for result in (searched, compared):
        shown = result._repr_html_()
        assert shown is not None
        assert shown.count("<table") == 1
        assert "bf16" in shown


@pytest.mark.nightly
def test_errors_are_exceptions() -> None:
    with pytest.raises(TargetFailed, match="the labels are off by one"):
        amp_track.train(FAULTS, precision="fp32", set={"fault": "raise"}, **stores())
    with pytest.raises(NothingFits, match="does not fit the budget of 1 MiB") as raised:
        amp_track.train(DIGITS, precision="fp32", memory_budget="1MiB", batch_size=1, **stores())
    assert raised.value.result is not None
    assert raised.value.result["status"] == "oom"
    with pytest.raises(BadInput, match=r"nowhere\.py: file not found"):
        amp_track.max_batch("nowhere.py", **stores())


SCRIPT = """
import amp_track, json
result = amp_track.train({workload!r}, precision="fp32", steps=3)
print(json.dumps(result.as_json()))
try:
    class Own(amp_track.Workload):
        "Of this script."
    amp_track.max_batch(Own)
except amp_track.BadInput as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.nightly
def test_a_script_needs_no_guard_around_its_calls() -> None:
    Path("script.py").write_text(SCRIPT.format(workload=FAULTS))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    trained, rejected = map(json.loads, done.stdout.splitlines())
    assert trained["steps"] == 3
    assert rejected.startswith("workload: the class Own exists only in this notebook or script")
