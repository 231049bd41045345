"""A job as the command that trains it: what is printed means the same job."""

from __future__ import annotations

import shlex

from hypothesis import given
from hypothesis import strategies as st

from amp_track.config.commands import FLAGS, request_of
from amp_track.config.job import Job
from amp_track.config.precisions import PRECISIONS
from amp_track.results.recommendation import train_command

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="=,\0", exclude_categories=("C", "Z")), min_size=1)
JOBS = st.builds(
    Job,
    workload=NAMES.filter(lambda name: not name.startswith("-")),
    precision=st.sampled_from(PRECISIONS),
    batch_size=st.integers(1, 2**40),
    epochs=st.none() | st.integers(1, 1000),
    learning_rate=st.none() | st.floats(1e-30, 1e30),
    lr_scaling=st.sampled_from(("none", "linear", "sqrt")),
    seed=st.integers(0, 2**31 - 1),
    memory_budget_bytes=st.none() | st.integers(2**20, 2**62),
    max_grad_norm=st.none() | st.floats(1e-3, 1e3),
    channels_last=st.booleans(),
    num_workers=st.none() | st.integers(0, 64),
    job_timeout_seconds=st.none() | st.floats(1e-3, 1e6),
    options=st.lists(st.tuples(st.from_regex("[a-z]{1,9}", fullmatch=True), NAMES), max_size=3).map(tuple),
)


@given(JOBS)
def test_the_command_means_the_job(job: Job) -> None:
    words = shlex.split(train_command(job))
    assert words[:2] == ["amp-track", "train"]
    flags = {flag.name: flag for flag in FLAGS["train"]}
    taken: dict[str, object] = {}
    rest = words[3:]
    while rest:
        flag = flags[rest.pop(0)]
        if flag.is_switch:
            taken[flag.parameter] = True
        elif flag.setting.repeatable:
            taken[flag.parameter] = [*taken.get(flag.parameter, []), rest.pop(0)]  # type: ignore[misc]
        else:
            taken[flag.parameter] = rest.pop(0)
    assert request_of("train", words[2], taken).job == job


def test_a_plain_job_is_a_short_command() -> None:
    job = Job(workload="experiments/digits.py", precision="bf16", batch_size=945, memory_budget_bytes=64 * 2**20)
    assert train_command(job) == (
        "amp-track train experiments/digits.py --precision bf16 --batch-size 945 --memory-budget 64MiB"
    )


def test_a_model_by_name_has_no_data() -> None:
    job = Job(workload="timm:resnet18", precision="bf16", batch_size=8, synthetic=True)
    assert train_command(job) == "amp-track train timm:resnet18 --precision bf16 --batch-size 8 --synthetic"
