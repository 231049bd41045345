"""Whatever a function is given, it raises BadInput or TypeError, by the argument's name, or returns a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fuzz import strategies
from fuzz.conftest import each_case
from hypothesis import given
from hypothesis import strategies as st

from amp_track import BadInput, api
from amp_track.config.commands import FLAGS
from amp_track.targets import source

pytestmark = pytest.mark.nightly

ARGUMENTS = st.sampled_from(
    [(command, flag) for command, flags in FLAGS.items() if command not in ("dtypes", "ui") for flag in flags]
)


def rejection(function: Callable[[], object]) -> str:
    """Return why a call is refused, "" if it is not. Any other error is the test's."""
    try:
        function()
    except BadInput as error:
        return str(error)
    return ""


@given(ARGUMENTS, strategies.VALUES)
@each_case
def test_any_keyword_argument(argument: tuple[str, Any], value: Any) -> None:
    command, flag = argument
    name = api.argument_name(flag)
    message = rejection(lambda: api._request(command, strategies.TINY, {name: value}))
    assert not message or message.startswith((f"{name}: got ", f"--{name.replace('_', '-')}: got "))


@given(strategies.VALUES)
@each_case
def test_any_workload(workload: Any) -> None:
    message = rejection(lambda: source.check_reference(api._request("max-batch", workload, {}).job.workload))
    assert not message or "expected" in message
