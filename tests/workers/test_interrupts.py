import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from amp_track.workers import interrupts

BOTH = (signal.SIGINT, signal.SIGTERM)


def raises(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Ctrl-C as Python handles it, SIGTERM as the command does."""
    before = {number: signal.getsignal(number) for number in BOTH}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, raises)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(number: signal.Signals = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.001)  # the handler runs between two lines


def interrupted(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = f"import os, signal, sys, time\nfrom amp_track.workers import interrupts\n{program}"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_is_kept_until_the_next_wait(number: signal.Signals) -> None:
    done = []

    @interrupts.deferred(owns_process=True)
    def body() -> None:
        interrupt(number)
        done.append("written")
        with interrupts.waiting():
            done.append("waited")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert done == ["written"]
    assert [signal.getsignal(each) for each in BOTH] == [signal.default_int_handler, raises]


def test_a_signal_is_kept_until_the_next_check_and_raised_once() -> None:
    with interrupts.deferred(owns_process=False):
        interrupts.check()
        assert not interrupts.have_come()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()
        assert interrupts.have_come()


def test_a_signal_is_not_lost_when_the_block_ends() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.deferred(owns_process=False):
        interrupt()

    @interrupts.deferred(owns_process=False)
    def body() -> None:
        interrupt()
        raise ValueError("nothing fits")

    with pytest.raises(KeyboardInterrupt) as raised:
        body()
    assert isinstance(raised.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_wait_ends_at_once() -> None:
    begun = time.monotonic()
    threading.Timer(0.05, interrupt).start()
    with pytest.raises(KeyboardInterrupt), interrupts.deferred(owns_process=False):
        interrupts.sleep(30)
    assert time.monotonic() - begun < 10


def test_what_cleans_up_is_not_interrupted_by_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_APART_SECONDS", 0.0)
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


def test_the_third_signal_is_raised_wherever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_APART_SECONDS", 0.0)
    with interrupts.deferred(owns_process=False):
        interrupt()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        interrupts.check()  # it is raised once


MANY = """
with interrupts.deferred(owns_process=True):
    for _ in range(int(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(float(sys.argv[2]))
    print("went on")
"""
ENDING = (
    "amp-track: shutting down cleanly; a third Ctrl-C, a second after the previous one, forces quit "
    "(runs stay RUNNING in MLflow)\n"
)


@pytest.mark.slow
def test_the_third_signal_ends_a_process_of_ones_own_and_the_second_says_so() -> None:
    done = interrupted(MANY, "3", "1.01")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == 2 * ENDING


def test_a_hand_that_hammers_on_the_keys_counts_once() -> None:
    done = interrupted(MANY, "20", "0.001")
    assert done.stdout == "went on\n"
    assert done.stderr.startswith(ENDING + "Traceback"), "raised at the end of the block"


def test_where_nothing_is_to_be_ended_a_process_of_ones_own_ends_at_once() -> None:
    done = interrupted("""
with interrupts.deferred(owns_process=True), interrupts.nothing_to_end():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        print("cleaned up", flush=True)
""")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "amp-track: interrupted\n")


def test_where_nothing_is_to_be_ended_a_program_of_the_users_goes_on_to_the_next_wait() -> None:
    done = []
    with interrupts.deferred(owns_process=False):
        with interrupts.nothing_to_end():
            interrupt()
            done.append("imported")
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert done == ["imported"]


def test_an_exception_swallowed_on_the_way_is_raised_again() -> None:
    def wait() -> None:
        with interrupts.waiting(), contextlib.suppress(KeyboardInterrupt):  # as Python's garbage collector does
            interrupt()

    with interrupts.deferred(owns_process=False):
        with pytest.raises(KeyboardInterrupt):
            wait()
        interrupts.check()


def test_what_the_user_handles_otherwise_stays_so() -> None:
    """A signal that is ignored, one that kills, and a handler of the user's own program, such as SLURM's requeuing."""
    received = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    with interrupts.deferred(owns_process=False):
        interrupt(signal.SIGINT)
        interrupt(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with interrupts.deferred(owns_process=False):
        assert [signal.getsignal(each) for each in BOTH] == [signal.SIG_IGN, signal.SIG_DFL]


def test_a_process_of_ones_own_hears_all_but_what_is_ignored() -> None:
    """As `nohup` has the closing of the terminal ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with interrupts.deferred(owns_process=True):
        interrupt(signal.SIGINT)
        interrupts.check()
        interrupt(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_whoever_reads_stderr_may_be_gone() -> None:
    done = interrupted("""
read, write = os.pipe()
os.close(read)
os.dup2(write, 2)
try:
    with interrupts.deferred(owns_process=True):
        os.kill(os.getpid(), signal.SIGINT)
        print("written")
except KeyboardInterrupt:
    print("ended")
""")
    assert done.stdout.split() == ["written", "ended"]


def test_other_threads_are_not_interrupted() -> None:
    done = []

    def body() -> None:
        with interrupts.deferred(owns_process=False), interrupts.waiting():
            interrupts.check()
            done.append("thread")

    def in_a_thread() -> None:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()

    @interrupts.deferred(owns_process=False)
    def interrupted() -> None:
        interrupt()
        in_a_thread()

    in_a_thread()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["thread", "thread"]


def test_a_block_within_a_block_changes_nothing() -> None:
    with interrupts.deferred(owns_process=False):
        handler = signal.getsignal(signal.SIGINT)
        with interrupts.deferred(owns_process=True):
            assert signal.getsignal(signal.SIGINT) == handler
        assert signal.getsignal(signal.SIGINT) == handler
