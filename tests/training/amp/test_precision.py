import pytest
import torch

from amp_track.config.precisions import PRECISIONS, Precision
from amp_track.training.amp.precision import float32_precision, support


def test_fp16_is_the_mode_amp() -> None:
    assert Precision.named("fp16") is Precision.named("amp")
    with float32_precision("fp16") as settings:
        assert settings["cudnn.conv"] == "ieee"


def test_a_cpu_says_why_it_has_no_tf32() -> None:
    found = support("tf32", torch.device("cpu"))
    assert not found.supported
    assert found.reason == "needs an NVIDIA GPU of compute capability 8.0 or newer; this is a CPU"
    assert all(support(name, torch.device("cpu")).supported for name in ("fp32", "amp", "bf16"))


@pytest.mark.parametrize("name", PRECISIONS)
def test_float32_kernels_are_set_read_back_and_restored(name: str) -> None:
    before = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    with float32_precision(Precision.named(name)) as settings:
        expected = "tf32" if name == "tf32" else "ieee"
        assert {settings[key] for key in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")} == {expected}
        assert settings["mkldnn.matmul"] == "ieee"
    assert torch.backends.cudnn.conv.fp32_precision == before  # type: ignore[attr-defined]


def test_a_setting_that_something_else_changed_is_no_result() -> None:
    before = torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]
    with (
        pytest.raises(RuntimeError, match=r"cuda.matmul.fp32_precision changed from ieee to tf32"),
        float32_precision(Precision.named("fp32")),
    ):
        torch.set_float32_matmul_precision("high")
    assert torch.backends.cuda.matmul.fp32_precision == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["fp32", "tf32"])
@pytest.mark.parametrize("matmul_before", ["highest", "high", "medium"])
def test_older_readers_and_blocks_work_within_and_after(name: str, matmul_before: str) -> None:
    """torch raises in them where older and newer settings disagree; Lightning calls them."""
    torch.set_float32_matmul_precision(matmul_before)
    of_mkldnn = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    try:
        with float32_precision(Precision.named(name)) as settings:
            assert torch.get_float32_matmul_precision() == ("high" if name == "tf32" else "highest")
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == (name == "tf32")
            with torch.backends.cudnn.flags(benchmark=True):
                pass
            assert torch.backends.cudnn.conv.fp32_precision == settings["cudnn.conv"]  # type: ignore[attr-defined]
        assert torch.get_float32_matmul_precision() == matmul_before
        assert torch.backends.mkldnn.matmul.fp32_precision == of_mkldnn  # type: ignore[attr-defined]
        assert torch.backends.cudnn.allow_tf32, "as it is unless someone has set it"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_settings_that_disagree_before_are_left_so() -> None:
    switch = torch.backends.cuda.matmul
    switch.fp32_precision = "tf32"  # type: ignore[attr-defined]
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        with float32_precision(Precision.named("fp32")):
            assert torch.get_float32_matmul_precision() == "highest"
        assert switch.fp32_precision == "tf32"  # type: ignore[attr-defined]
    finally:
        switch.fp32_precision = "none"  # type: ignore[attr-defined]
