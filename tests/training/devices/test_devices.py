"""The CPU's budget and meter, in processes of their own."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from support import DIGITS, MEBIBYTE

from amp_track.config.inspection import resolve
from amp_track.config.job import ALONE, Job, Rank
from amp_track.records.errors import BadInput
from amp_track.records.result import JobStatus
from amp_track.runner.runner import JobRunner
from amp_track.training.devices import accelerator
from amp_track.training.devices.accelerator import AcceleratorDevice, reserve_bytes
from amp_track.training.devices.oom import is_kernel_limit, is_out_of_memory, requested_bytes
from amp_track.training.devices.open import check_budget, check_processes, free_bytes_each, open_device

_OUT_OF_MEMORY = (
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.53 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    RuntimeError("HIP out of memory. Tried to allocate 2 MiB"),
    RuntimeError("std::bad_alloc"),
    OSError(12, "Cannot allocate memory"),
)
_KERNEL_LIMIT = (
    RuntimeError("CUDA error: invalid configuration argument"),
    RuntimeError("integer out of range"),
    RuntimeError("upsample_nearest2d only supports output tensors with less than INT_MAX elements"),
)
_BUGS = (
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA out of memory"),  # the user's own
    RuntimeError("CUDA error: device-side assert triggered"),
    KeyError("memory"),
)


@pytest.mark.parametrize("error", [*_OUT_OF_MEMORY, *_KERNEL_LIMIT, *_BUGS])
def test_out_of_memory_and_kernel_limits_are_told_from_bugs(error: BaseException) -> None:
    assert is_out_of_memory(error) == (error in _OUT_OF_MEMORY)
    assert is_kernel_limit(error) == (error in _KERNEL_LIMIT)


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes.", 2**36),
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has", 3 * 2**29),
        ("something else", None),
    ],
)
def test_requested_bytes(message: str, size: int | None) -> None:
    assert requested_bytes(RuntimeError(message)) == size


@pytest.mark.parametrize(
    ("free", "seconds"),
    [
        ([5], 0.5),  # nothing comes back
        ([1, 1, 4, 4, 9], 0.7),  # it comes back in pieces, the last one at 0.2 s
        (list(range(1000)), 10.0),  # a neighbour gives memory back without end
    ],
)
def test_a_job_after_a_killed_one_waits_until_free_memory_grows_no_more(
    monkeypatch: pytest.MonkeyPatch, free: list[int], seconds: float
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(accelerator, "time", clock)
    device = AcceleratorDevice(torch.device("cuda", 0))
    monkeypatch.setattr(device, "_free_bytes", lambda: free[min(len(slept), len(free) - 1)])
    device.settle()
    assert sum(slept) == pytest.approx(seconds, abs=0.1)


def test_a_job_without_a_budget_leaves_room_for_what_is_not_torchs() -> None:
    assert reserve_bytes(6 * 2**30) == 6 * 2**30 // 16
    assert reserve_bytes(139 * 2**30) == 512 * MEBIBYTE


def test_an_unknown_device_lists_those_there_are() -> None:
    with pytest.raises(BadInput, match=r"--device: got 'xpu:3', expected one of auto, cpu"):
        open_device("xpu:3")


def test_processes_share_the_memory_of_a_cpu() -> None:
    device = open_device("cpu", Rank(index=1, count=4, local_index=1, local_count=4))
    assert device.of_processes(4) == [device]
    assert 0 < free_bytes_each(device, 4) == pytest.approx(device.free_bytes() / 4, rel=0.2)
    half = device.capacity_bytes() // 2
    check_budget(device, half)
    with pytest.raises(BadInput, match=r"for each of 4 processes, expected at most"):
        check_budget(device, half, 4)


def test_each_process_has_an_accelerator_of_its_own() -> None:
    device = AcceleratorDevice(torch.device("cuda", 1))
    assert [str(each.torch_device) for each in device.of_processes(3)] == ["cuda:1", "cuda:2", "cuda:3"]


def test_devices_without_a_way_to_talk_train_alone() -> None:
    device = AcceleratorDevice(torch.device("mps", 0))
    check_processes(device, ALONE)
    with pytest.raises(BadInput, match=r"--nproc: got 2, expected 1 on mps"):
        check_processes(device, Rank(count=2, local_count=2))
    with pytest.raises(BadInput, match=r"torchrun's --nproc-per-node: got 2, expected 1 on mps"):
        check_processes(device, Rank(count=4, local_count=2))


@pytest.fixture(scope="module")
def digits(runner: JobRunner) -> Job:
    found = runner.inspect(Job(workload=DIGITS))
    return resolve(Job(workload=DIGITS, precision="fp32", memory_budget_bytes=64 * MEBIBYTE), found)


def test_a_probe_takes_what_the_training_takes(runner: JobRunner, digits: Job) -> None:
    training = dataclasses.replace(digits, batch_size=300, epochs=2)
    probed, trained = (runner.run(dataclasses.replace(training, probe=probe)) for probe in (True, False))
    assert trained.peak_bytes is not None
    assert probed.peak_bytes == pytest.approx(trained.peak_bytes, rel=0.002)


@pytest.mark.gpu
def test_a_gpu_budget_is_enforced(runner: JobRunner, cuda: torch.device) -> None:
    found = runner.inspect(Job(workload=DIGITS, device="cuda"))
    job = resolve(Job(workload=DIGITS, device="cuda", batch_size=1024, probe=True), found)
    roomy = runner.run(dataclasses.replace(job, memory_budget_bytes=2**30))
    assert roomy.fits
    assert 0 < roomy.peak_bytes <= 2**30
    tight = runner.run(dataclasses.replace(job, memory_budget_bytes=8 * MEBIBYTE))
    assert tight.status is JobStatus.OOM


@pytest.mark.gpu
def test_a_gpu_job_without_a_budget_leaves_a_reserve_free(runner: JobRunner, cuda: torch.device) -> None:
    found = runner.inspect(Job(workload=DIGITS, device="cuda"))
    total = found.hardware.memory_bytes
    assert total == torch.cuda.get_device_properties(cuda).total_memory
    assert found.hardware.capability.startswith("compute capability ")
    assert found.hardware.driver.replace(".", "").isdigit()
    assert 0 < found.free_bytes <= total - reserve_bytes(total)
    job_result = runner.run(resolve(Job(workload=DIGITS, device="cuda", epochs=1), found))
    assert job_result.fits
    assert job_result.allocation_retries == 0
    assert job_result.peak_bytes <= found.free_bytes
