"""The command line as a user meets it: exit codes, and what is printed where."""

import json
from collections.abc import Callable

import pytest
from support import FAULTS, OUR_FRAMES, Done

pytestmark = pytest.mark.usefixtures("fresh_stores")
Command = Callable[..., Done]


def test_a_workload_whose_loss_raises_is_exit_code_1(amp_track: Command) -> None:
    done = amp_track("train", FAULTS, "--set", "fault=raise", "--precision", "fp32")
    assert done.returncode == 1
    assert "ValueError: the labels are off by one" in done.stderr
    assert 'raise ValueError("the labels are off by one")' in done.stderr
    assert OUR_FRAMES not in done.stderr


@pytest.mark.nightly
def test_a_job_that_hangs_is_given_up(amp_track: Command) -> None:
    done = amp_track("train", FAULTS, "--set", "fault=hang", "--precision", "fp32", "--job-timeout", "3")
    assert done.returncode == 1
    assert "gave up after 3 s (--job-timeout) at fp32, batch 4" in done.stderr


def test_auto_trains_at_the_largest_batch(amp_track: Command) -> None:
    done = amp_track("train", FAULTS, "--precision", "fp32", "--batch-size", "auto", "--max-batch-size", "9", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["batch_size"] == 9
