import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from amp_track.workers import interrupts


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = {number: signal.getsignal(number) for number in before if number is not signal.SIGINT}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == {number: handler for number, handler in before.items() if number in after}, "put back"


def interrupt(number: signal.Signals = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.001)  # the handler runs between two lines


def test_without_a_block_it_is_raised_where_it_comes() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    interrupts.check()


def test_a_signal_is_kept_until_the_next_wait() -> None:
    done = []

    @interrupts.deferred(owns_process=False)
    def body() -> None:
        interrupt()
        done.append("written")
        with interrupts.waiting():
            done.append("waited")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert done == ["written"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_is_kept_until_the_next_check() -> None:
    with interrupts.deferred(owns_process=False):
        interrupts.check()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()  # it is raised once


def test_a_signal_is_not_lost_when_nothing_waits_any_more() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.deferred(owns_process=False):
        interrupt()


def test_a_wait_ends_at_once() -> None:
    begun = time.monotonic()
    threading.Timer(0.05, interrupt).start()
    with pytest.raises(KeyboardInterrupt), interrupts.deferred(owns_process=False):
        interrupts.sleep(30)
    assert time.monotonic() - begun < 10


def test_what_cleans_up_is_not_interrupted_by_a_second_signal() -> None:
    cleaned = []

    @interrupts.deferred(owns_process=False)
    def body() -> None:
        try:
            with interrupts.waiting():
                interrupt()
        finally:
            interrupt()
            with interrupts.waiting():
                cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        body()
    assert cleaned == [True]


def test_the_third_signal_is_raised_wherever_it_comes() -> None:
    with interrupts.deferred(owns_process=False):
        interrupt()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


THREE = """
import os, signal
from amp_track.workers import interrupts
with interrupts.deferred(owns_process=True):
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    print("went on")
"""


def test_the_third_signal_ends_a_process_of_ones_own_and_the_second_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", THREE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "amp-track: ending its runs; once more stops at once and leaves that to the next start\n"


def test_an_exception_swallowed_on_the_way_is_raised_again() -> None:
    @interrupts.waiting()
    def wait() -> None:
        try:
            interrupt()
        except KeyboardInterrupt:
            pass  # as Python does in a callback of its garbage collector

    with interrupts.deferred(owns_process=False):
        with pytest.raises(KeyboardInterrupt):
            wait()
        interrupts.check()


def test_ignored_and_deadly_signals_stay_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.deferred(owns_process=False):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        interrupt()


def test_other_threads_and_blocks_within_blocks_change_nothing() -> None:
    raised = []

    def body() -> None:
        with interrupts.deferred(owns_process=False), interrupts.waiting():
            interrupts.check()
            raised.append(False)

    with interrupts.deferred(owns_process=False):
        handler = signal.getsignal(signal.SIGINT)
        with interrupts.deferred(owns_process=True):
            assert signal.getsignal(signal.SIGINT) == handler
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert raised == [False]
