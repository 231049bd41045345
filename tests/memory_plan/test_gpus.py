"""Cards are found by what people call them."""

from __future__ import annotations

import pytest

from amp_track.memory_plan.gpus import GPUS, blas_workspace_bytes, device_kernels, gpu_named
from amp_track.records.errors import BadInput
from amp_track.records.hardware import Hardware


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090", "GeForce RTX 4090"),
        ("4090", "GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("t4", "Tesla T4"),
        ("a100 80gb", "NVIDIA A100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB"),
        ("A100 40 GiB", "NVIDIA A100 40GB"),
        ("H100", "NVIDIA H100 80GB"),
        ("l40", "NVIDIA L40"),
        ("l40s", "NVIDIA L40S"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "GeForce RTX 4060 Laptop"),
        ("RTX4090", "GeForce RTX 4090"),
        ("rtx 4090 24gb", "GeForce RTX 4090"),
        ("RTX3080Ti", "GeForce RTX 3080 Ti"),
        ("2080 Ti 11GB", "GeForce RTX 2080 Ti"),
        ("T4 16GB", "Tesla T4"),
        ("A100-80G", "NVIDIA A100 80GB"),
        ("H200", "NVIDIA H200 141GB"),
        ("B200", "NVIDIA B200"),
        ("RTX PRO 6000", "RTX PRO 6000 Blackwell"),
        ("H100 94GB", "NVIDIA H100 NVL 94GB"),
    ],
)
def test_a_name(text: str, name: str) -> None:
    assert gpu_named(text).name == name


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu(gpu) -> None:
    assert gpu_named(gpu.name) is gpu
    assert 0 < gpu.context_gib[0] <= gpu.context_gib[1] < 1 < gpu.memory_gib[0] <= gpu.memory_gib[1]
    assert "#" in gpu.source or "public logs" in gpu.source


def test_an_unknown_gpu_is_told_the_nearest_ones_first() -> None:
    with pytest.raises(
        BadInput, match=r"^--gpu: got 'RTX 4091', expected a GPU such as GeForce RTX 4090, .*--memory-budget"
    ):
        gpu_named("RTX 4091")


@pytest.mark.parametrize("text", ["RTX 4050", "RTX 4060", "RTX 6000", "RTX 3080", "H100 96GB"])
def test_another_model_of_the_same_number_is_not_taken(text: str) -> None:
    with pytest.raises(BadInput, match=f"got '{text}', expected a GPU such as"):
        gpu_named(text)


def test_a_name_that_two_gpus_have_is_told_both_and_no_other() -> None:
    with pytest.raises(BadInput) as raised:
        gpu_named("A100")
    assert "A100 80GB" in str(raised.value)
    assert "A100 40GB" in str(raised.value)
    assert "T4" not in str(raised.value)


def test_what_a_gpu_lacks() -> None:
    turing, ampere = gpu_named("T4"), gpu_named("A100 40GB")
    assert turing.lacks("bf16") == "needs compute capability 8.0 or newer; Tesla T4 has 7.5"
    assert not turing.lacks("amp")
    assert not ampere.lacks("tf32")


@pytest.mark.parametrize(
    ("hardware", "size_bytes"),
    [
        (Hardware(kind="cpu", name="A CPU"), 0),
        (Hardware(kind="cuda", name="A GPU", capability="compute capability 8.6"), 8_519_680),
        (Hardware(kind="cuda", name="A GPU", capability="compute capability 9.0"), 32 * 2**20),
    ],
)
def test_cublas_on_a_device_that_is_here(hardware: Hardware, size_bytes: int) -> None:
    assert device_kernels(hardware).blas_workspace_bytes == size_bytes
    assert [blas_workspace_bytes(), gpu_named("H100").target().kernels.blas_workspace_bytes] == [8_519_680, 32 * 2**20]


def test_the_memory_of_a_gpu_depends_on_driver_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    target = gpu_named("RTX 3090").target()
    assert target.range_bytes is not None
    least, most = (size / 2**30 for size in target.range_bytes)
    assert (least, most) == pytest.approx((23.12, 23.41))
    assert target.capacity_bytes / 2**30 == pytest.approx((least + most) / 2)
    assert (target.safe_bytes / 2**30, target.most_bytes / 2**30) == pytest.approx((0.96 * least, most))
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    eager = gpu_named("RTX 3090").target()
    assert 1.2 < (target.capacity_bytes - eager.capacity_bytes) / 2**30 < 1.6
