"""Common GPUs by name: their memory as torch reports it, the size of a CUDA context, and their compute capability.

The numbers are from out-of-memory messages of PyTorch on these GPUs: "GPU 0 has a total capacity of …" is the memory,
and the context is the memory that the process used beyond allocated and reserved memory. A context's size also depends
on driver and libraries: 0.1 to 0.6 GiB in these messages. A desktop usually uses 0.3 to 1 GiB more on the GPU that
draws it, which is not part of the table.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from amp_track.config.precisions import BY_NAME, PRECISIONS
from amp_track.config.values import byte_size
from amp_track.records.errors import BadInput
from amp_track.records.hardware import Hardware
from amp_track.records.plan import PlanTarget

_GIB = 2**30
_USUAL_CONTEXT_GIB = 0.5
"""For GPUs whose message does not contain it: near the upper end of the others."""


@dataclass(frozen=True)
class Gpu:
    """A GPU model."""

    name: str
    memory_gib: float
    """As torch reports it: less than the nominal size."""
    context_gib: float
    """Memory that driver and libraries use for one process."""
    compute_capability: tuple[int, int]
    source: str
    """The GitHub issue with the message."""

    @property
    def capacity_bytes(self) -> int:
        """Memory available to PyTorch's allocator."""
        return round((self.memory_gib - self.context_gib) * _GIB)

    @property
    def blas_workspace_bytes(self) -> int:
        return blas_workspace_bytes(self.compute_capability)

    def lacks(self, precision: str) -> str:
        """Return why the GPU does not support this precision, or ""."""
        needed = BY_NAME[precision].compute_capability
        if self.compute_capability >= needed:
            return ""
        least, own = (".".join(map(str, capability)) for capability in (needed, self.compute_capability))
        return f"needs compute capability {least} or newer; {self.name} has {own}"

    def target(self) -> PlanTarget:
        """Return the GPU as a target of a memory plan."""
        return PlanTarget(
            name=self.name,
            capacity_bytes=self.capacity_bytes,
            blas_workspace_bytes=self.blas_workspace_bytes,
            is_gpu=True,
            lacks=tuple((name, reason) for name in PRECISIONS if (reason := self.lacks(name))),
        )


def target_of_size(text: str) -> PlanTarget:
    """Return the target for a size such as `6GiB`, on most GPUs. Raises ValueError if it is none."""
    return PlanTarget(name=text, capacity_bytes=byte_size(text), blas_workspace_bytes=blas_workspace_bytes())


def blas_workspace_bytes(compute_capability: tuple[int, int] | None = None) -> int:
    """Return the size of cuBLAS's workspace for each calling thread, for a compute capability or for most GPUs.

    Source: `getChosenWorkspaceSize` in torch's aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    is_hopper = compute_capability is not None and compute_capability >= (9, 0)
    return 32 * 2**20 if is_hopper else 4096 * 1024 * 2 + 16 * 1024 * 8


def blas_workspace_of(hardware: Hardware) -> int:
    """Return that size for a device of this machine; 0 without CUDA."""
    if hardware.kind != "cuda":
        return 0
    found = re.search(r"compute capability (\d+)\.(\d+)", hardware.capability)
    return blas_workspace_bytes((int(found[1]), int(found[2])) if found else None)


CARDS = (
    Gpu("Tesla T4", 14.56, 0.13, (7, 5), "Zheng-Chong/CatVTON#133"),
    Gpu("Tesla V100 32GB", 31.74, 0.41, (7, 0), "haotian-liu/LLaVA#812"),
    Gpu("NVIDIA A10", 21.99, 0.22, (8, 6), "zai-org/CogVLM#236"),
    Gpu("NVIDIA L4", 22.03, 0.23, (8, 9), "ArcInstitute/evo2#190"),
    Gpu("NVIDIA L40", 44.40, 0.49, (8, 9), "QwenLM/Qwen3-VL#2097"),
    Gpu("NVIDIA L40S", 44.42, 0.41, (8, 9), "stepfun-ai/Step-Video-T2V#8"),
    Gpu("NVIDIA A100 40GB", 39.50, 0.49, (8, 0), "TianheWu/CoSeR#10"),
    Gpu("NVIDIA A100 80GB", 79.25, 0.40, (8, 0), "HiDream-ai/VAREdit#6"),
    Gpu("NVIDIA H100 80GB", 79.11, _USUAL_CONTEXT_GIB, (9, 0), "vllm-project/vllm#27508"),
    Gpu("RTX A4000", 15.61, 0.21, (8, 6), "DengKaiCQ/VGGT-Long#6"),
    Gpu("RTX A6000", 47.54, _USUAL_CONTEXT_GIB, (8, 6), "google-research/semivl#18"),
    Gpu("RTX 6000 Ada", 44.43, 0.42, (8, 9), "DINGYANB/MTVCrafter#21"),
    Gpu("GeForce RTX 3060 12GB", 11.75, _USUAL_CONTEXT_GIB, (8, 6), "smy20011/dreambooth-gui#78"),
    Gpu("GeForce RTX 3070", 7.78, _USUAL_CONTEXT_GIB, (8, 6), "akshitac8/OW-DETR#46"),
    Gpu("GeForce RTX 3090", 23.59, 0.30, (8, 6), "bytedance/X-Portrait#7"),
    Gpu("GeForce RTX 4060 Laptop", 7.75, 0.11, (8, 9), "ESRSchao/MaxBatchRegNet#2"),
    Gpu("GeForce RTX 4070 Ti", 11.70, 0.33, (8, 9), "Kwai-Kolors/Kolors#11"),
    Gpu("GeForce RTX 4090", 23.64, 0.49, (8, 9), "3DTopia/Phidias-Diffusion#8"),
    Gpu("GeForce RTX 5090", 31.36, 0.60, (12, 0), "TrajectoryCrafter/TrajectoryCrafter#20"),
)


def gpu_named(text: str, *, flag: str = "--gpu", otherwise: str = "use --memory-budget") -> Gpu:
    """Return the GPU that a text names: `RTX 4090`, `a100 80gb`, `NVIDIA GeForce RTX 4090`.

    Words that do not distinguish GPUs may be missing: manufacturers, RTX, and the memory size if there is only one.
    Raises BadInput if the text matches no GPU or several; the message lists GPUs, the most similar first.

    Args:
        text: the name.
        flag: the flag or argument that has it.
        otherwise: what to do for a GPU that is not in the table.
    """
    wanted = set(_words(text))
    found = [gpu for gpu in CARDS if wanted and wanted <= set(_words(gpu.name)) and _may_lack(gpu, wanted)]
    chosen = [gpu for gpu in found if wanted == set(_words(gpu.name))] or found
    if len(chosen) == 1:
        return chosen[0]
    by_words = {" ".join(_words(gpu.name)): gpu.name for gpu in (found or CARDS)}
    nearest = difflib.get_close_matches(" ".join(_words(text)), by_words, n=len(by_words), cutoff=0.0)
    listed = ", ".join(by_words[words] for words in nearest)
    raise BadInput(f"{flag}: got {text!r}, expected one of {listed}. For any other GPU {otherwise}.")


def _may_lack(gpu: Gpu, wanted: set[str]) -> bool:
    """Return True if only RTX or the memory size is missing in the text: `4070` is not a 4070 Ti."""
    return all(re.fullmatch(r"rtx|\d{1,3}", word) for word in set(_words(gpu.name)) - wanted)


def _words(text: str) -> list[str]:
    """Return the words that distinguish GPUs: `80GB` and `80 gb` become `80`; manufacturers and sockets are dropped."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(\d+)\s*gi?b\b", r" \1 ", text.lower()))
    return [word for word in words if not re.fullmatch(r"nvidia|tesla|geforce|sxm\d?|pcie", word)]
