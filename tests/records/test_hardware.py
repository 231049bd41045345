from amp_track.records.hardware import Hardware


def test_a_title_tells_machines_of_one_name_apart() -> None:
    with_units = Hardware(kind="cpu", name="AMD EPYC", capability="AVX512, avx512_bf16")
    without = Hardware(kind="cpu", name="AMD EPYC", capability="AVX2")
    assert with_units.title == "AMD EPYC (AVX512, avx512_bf16)"
    assert without.title == "AMD EPYC (AVX2)"


def test_a_gpus_title_has_what_decides_its_memory() -> None:
    gpu = Hardware(
        kind="cuda", name="A GPU", capability="compute capability 9.0", memory_bytes=80 * 2**30, driver="570.86"
    )
    assert gpu.title == "A GPU (compute capability 9.0, 80 GiB, driver 570.86)"
    assert Hardware(kind="mps", name="arm (mps)").title == "arm (mps)"
