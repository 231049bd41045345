import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from amp_track.training.timing import InputWait


def slow(batches: int, seconds: float) -> Iterator[list[int]]:
    for number in range(batches):
        time.sleep(seconds)
        yield [number]


def test_a_cpu_waits_for_all_the_time_that_batches_take() -> None:
    wait = InputWait(None)
    trained_on = []
    steps_seconds = 0.0
    begun = time.perf_counter()
    for batch in wait.timed(slow(4, 0.02)):
        started = time.perf_counter()
        time.sleep(0.02)  # the step
        wait.step_submitted()
        trained_on += batch
        steps_seconds += time.perf_counter() - started
    assert trained_on == [0, 1, 2, 3]
    assert 0.08 <= wait.seconds <= time.perf_counter() - begun - steps_seconds


def test_no_batch_is_kept_while_the_next_is_loaded() -> None:
    alive: list[Any] = []

    class Batch:
        def __del__(self) -> None:
            alive.remove(id(self))

    def batches() -> Iterator[Batch]:
        for _ in range(3):
            assert not alive
            batch = Batch()
            alive.append(id(batch))
            yield batch
            del batch

    seen = 0
    for batch in InputWait(None).timed(batches()):
        seen += 1
        del batch
    assert seen == 3


@pytest.mark.gpu
def test_a_gpu_that_is_still_computing_does_not_wait(cuda: torch.device) -> None:
    wait = InputWait(cuda)
    matrix = torch.randn(8192, 8192, device=cuda)
    for _ in wait.timed(slow(5, 0.001)):
        for _ in range(20):
            matrix = torch.tanh(matrix @ matrix)  # longer than a batch takes to come
        wait.step_submitted()
    torch.cuda.synchronize(cuda)
    assert wait.seconds < 0.005, "only the first batch was waited for"
    idle = InputWait(cuda)
    for _ in idle.timed(slow(5, 0.02)):
        torch.tanh(matrix[:8, :8])
        idle.step_submitted()
    assert idle.seconds >= 0.09
