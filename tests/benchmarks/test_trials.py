"""The aim of a fresh process leaves out what starting a GPU takes."""

from benchmarks.trials import FRESH_PROCESS_AIM_SECONDS, fresh_process_aim


def test_the_aim_on_a_cpu_is_the_same_whatever_its_device_takes() -> None:
    assert fresh_process_aim("cpu", 9.0) == (FRESH_PROCESS_AIM_SECONDS, "≤ 0.15 s")


def test_the_aim_on_a_gpu_is_what_starting_it_takes_and_the_same_on_top() -> None:
    aim, text = fresh_process_aim("cuda:1", 0.5)
    assert aim == 0.65
    assert text.startswith("≤ 0.65 s")
