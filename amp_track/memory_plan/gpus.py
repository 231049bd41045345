"""Common GPUs by name: their memory as torch reports it, the size of a CUDA context, and their compute capability.

The numbers are from public messages and logs of PyTorch on these GPUs, mostly out-of-memory errors: "GPU 0 has a total
capacity of …" is the memory, and the context is the memory that the process used beyond allocated and reserved memory.
Both are ranges. The same GPU has up to 0.2 GiB less with newer drivers, and a context depends on the kernels that are
loaded. Messages of trainings on several GPUs were left out: communication takes another GiB. A desktop usually takes
0.3 to 1 GiB of the GPU that draws it, which is not part of the table.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
from dataclasses import dataclass

from amp_track.config.precisions import BY_NAME
from amp_track.config.values import memory_budget
from amp_track.records.errors import BadInput
from amp_track.records.hardware import Hardware
from amp_track.records.plan import Kernels, PeakRates, PlanTarget

_GIB = 2**30
_UNSEEN, _UNSEEN_HOPPER, _UNSEEN_BLACKWELL = (0.1, 0.55), (0.5, 0.75), (0.15, 0.9)
"""Contexts of GPUs without such a message: the range of all GPUs before Hopper, that of Hopper, and a guess."""
_EAGER_GIB = 1.3, 1.6
"""Memory that the kernels of all libraries take beyond a context, if CUDA loads them eagerly: before torch 1.13 and
CUDA 11.7, or with CUDA_MODULE_LOADING=EAGER. On an RTX 3090 a context of torch alone then took 1.45 GiB (pytorch#49877)
to 1.65 (pytorch#55277), and in trainings 1.6 (huggingface.co/blog/zero-deepspeed-fairscale) to 1.9 GiB were in use."""

_FEWER_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""The resident threads of a multiprocessor by compute capability, where they are fewer than 2048."""
THREADS_PER_BLOCK = 128


@dataclass(frozen=True)
class Gpu:
    """A GPU model."""

    name: str
    memory_gib: tuple[float, float]
    """The least and the most that torch reports: less than the nominal size."""
    context_gib: tuple[float, float]
    """The least and the most that driver and libraries use for one process."""
    compute_capability: tuple[int, int]
    source: str
    """A GitHub issue with such a message, or "public logs" if its repository is unknown."""

    def target(self) -> PlanTarget:
        """Return the GPU as a target of a memory plan, with the memory that is available to PyTorch's allocator.

        The middle of its range is expected.
        """
        kernels = _EAGER_GIB if loads_all_kernels() else (0.0, 0.0)
        least_gib = self.memory_gib[0] - self.context_gib[1] - kernels[1]
        most_gib = self.memory_gib[1] - self.context_gib[0] - kernels[0]
        range_bytes = round(least_gib * _GIB), round(most_gib * _GIB)
        return PlanTarget(
            name=self.name,
            capacity_bytes=sum(range_bytes) // 2,
            range_bytes=range_bytes,
            kernels=self.kernels(),
            is_gpu=True,
            lacks=tuple((name, reason) for name in BY_NAME if (reason := self.lacks(name))),
            rates=RATES.get(self.name),
        )

    def kernels(self) -> Kernels:
        """Return its kernels.

        The threads of a multiprocessor are those of the CUDA programming guide's table of compute capabilities.
        """
        threads = _FEWER_THREADS.get(self.compute_capability, 2048)
        blocks = MULTIPROCESSORS[self.name] * threads // THREADS_PER_BLOCK
        return kernels_of(self.compute_capability, blocks)

    def lacks(self, precision: str) -> str:
        """Return why the GPU does not support this precision, or ""."""
        needed = BY_NAME[precision].compute_capability
        if self.compute_capability >= needed:
            return ""
        least, own = (".".join(map(str, capability)) for capability in (needed, self.compute_capability))
        return f"needs compute capability {least} or newer; {self.name} has {own}"


def loads_all_kernels() -> bool:
    """Return whether CUDA is to load all kernels when it starts, not each when it is needed."""
    return os.environ.get("CUDA_MODULE_LOADING") == "EAGER"


def target_of_size(text: str) -> PlanTarget:
    """Return the target for a size such as `6GiB`, on most GPUs. Raises ValueError if it is none."""
    return PlanTarget(name=text, capacity_bytes=memory_budget(text), kernels=USUAL_KERNELS)


def blas_workspace_bytes(compute_capability: tuple[int, int] | None = None) -> int:
    """Return the size of cuBLAS's workspace for each calling thread, for a compute capability or for most GPUs.

    Source: `getChosenWorkspaceSize` in torch's aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    is_hopper = compute_capability is not None and compute_capability >= (9, 0)
    return 32 * 2**20 if is_hopper else 4096 * 1024 * 2 + 16 * 1024 * 8


def _blas_lt_workspace_bytes() -> int:
    """Return the size of cuBLASLt's own workspace: newer releases of torch share that of cuBLAS.

    It was 1 MiB with torch 2.11. The documentation of 2.14 says that it is shared; what lies between is assumed to.
    """
    return 2**20 if _torch_release() <= (2, 11) else 0


def _prefers_cudnn_attention(compute_capability: tuple[int, int] | None) -> bool:
    """Return whether torch prefers cuDNN's attention to flash attention, given a cuDNN from 9.15 on.

    Seen with torch 2.11 (`check_prefer_cudnn_attention` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    return compute_capability is not None and compute_capability[0] in (9, 10) and _torch_release() >= (2, 11)


def _torch_release() -> tuple[int, int]:
    """Return (major, minor) of the installed torch, without importing it."""
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    return int(major), int(minor)


def kernels_of(compute_capability: tuple[int, int] | None, thread_blocks: int) -> Kernels:
    """Return the kernels of a compute capability, or of most GPUs, and of the installed torch."""
    return Kernels(
        blas_workspace_bytes=blas_workspace_bytes(compute_capability),
        blas_lt_workspace_bytes=_blas_lt_workspace_bytes(),
        thread_blocks=thread_blocks,
        uses_cudnn_attention=_prefers_cudnn_attention(compute_capability),
    )


USUAL_KERNELS = kernels_of(None, thread_blocks=1536)
"""Of a GPU that is not known. The number of thread blocks is that of an RTX 4090."""


def device_kernels(hardware: Hardware) -> Kernels:
    """Return the kernels of a device of this machine; without CUDA, kernels that need no memory.

    The thread blocks of a GPU that the table lacks are those of most GPUs.
    """
    if hardware.kind != "cuda":
        return Kernels()
    found = re.search(r"compute capability (\d+)\.(\d+)", hardware.capability)
    try:
        blocks = gpu_named(hardware.name).kernels().thread_blocks
    except BadInput:
        blocks = USUAL_KERNELS.thread_blocks
    return kernels_of((int(found[1]), int(found[2])) if found else None, blocks)


GPUS = (
    Gpu("Tesla T4", (14.56, 14.75), (0.12, 0.15), (7, 5), "Zheng-Chong/CatVTON#133, facebookresearch/tribev2#28"),
    Gpu("Tesla P100 16GB", (15.89, 15.90), (0.31, 0.31), (6, 0), "public logs"),
    Gpu("Tesla V100 16GB", (15.75, 15.78), (0.37, 0.41), (7, 0), "public logs"),
    Gpu("Tesla V100 32GB", (31.73, 31.75), (0.37, 0.41), (7, 0), "haotian-liu/LLaVA#812"),
    Gpu("NVIDIA A10", (21.99, 21.99), (0.22, 0.30), (8, 6), "zai-org/CogVLM#236"),
    Gpu("NVIDIA A30", (23.53, 23.60), _UNSEEN, (8, 0), "google/RB-Modulation#5"),
    Gpu("NVIDIA A40", (44.35, 44.42), _UNSEEN, (8, 6), "public logs"),
    Gpu("NVIDIA L4", (22.03, 22.16), (0.23, 0.30), (8, 9), "ArcInstitute/evo2#190"),
    Gpu("NVIDIA L40", (44.40, 44.42), (0.41, 0.50), (8, 9), "QwenLM/Qwen3-VL#2097"),
    Gpu(
        "NVIDIA L40S",
        (44.42, 44.52),
        (0.41, 0.50),
        (8, 9),
        "stepfun-ai/Step-Video-T2V#8, huggingface/sentence-transformers#3214",
    ),
    Gpu("NVIDIA A100 40GB", (39.43, 39.59), (0.41, 0.49), (8, 0), "TianheWu/CoSeR#10"),
    Gpu("NVIDIA A100 80GB", (79.15, 79.25), (0.40, 0.50), (8, 0), "HiDream-ai/VAREdit#6"),
    Gpu("NVIDIA H20 96GB", (95.00, 95.00), (0.50, 0.75), (9, 0), "public logs"),
    Gpu("NVIDIA H100 80GB", (79.10, 79.19), (0.50, 0.76), (9, 0), "vllm-project/vllm#27508, benchmarks/results/gpu"),
    Gpu("NVIDIA H100 NVL 94GB", (92.63, 93.11), (0.59, 0.75), (9, 0), "ali-vilab/VACE#56"),
    Gpu("NVIDIA GH200 96GB", (94.50, 94.50), _UNSEEN_HOPPER, (9, 0), "vllm-project/vllm#9630"),
    Gpu("NVIDIA H200 141GB", (139.72, 139.81), _UNSEEN_HOPPER, (9, 0), "public logs"),
    Gpu("NVIDIA B200", (178.35, 178.36), _UNSEEN_BLACKWELL, (10, 0), "public logs"),
    Gpu("NVIDIA GB200", (184.31, 184.31), _UNSEEN_BLACKWELL, (10, 0), "public logs"),
    Gpu("RTX A2000 12GB", (11.74, 11.74), _UNSEEN, (8, 6), "public logs"),
    Gpu("RTX A4000", (15.61, 15.74), (0.21, 0.30), (8, 6), "DengKaiCQ/VGGT-Long#6"),
    Gpu("RTX A5000", (23.55, 23.68), _UNSEEN, (8, 6), "public logs, ECC off"),
    Gpu("RTX A6000", (47.40, 47.54), (0.29, 0.46), (8, 6), "google-research/semivl#18, public logs"),
    Gpu(
        "RTX 6000 Ada",
        (44.42, 44.43),
        (0.42, 0.42),
        (8, 9),
        "DINGYANB/MTVCrafter#21, unslothai/unsloth-zoo#1053; ECC on",
    ),
    Gpu("RTX PRO 6000 Blackwell", (94.97, 95.01), _UNSEEN_BLACKWELL, (12, 0), "public logs"),
    Gpu("Quadro RTX 8000", (47.25, 47.46), _UNSEEN, (7, 5), "Victarry/stable-dreambooth#8"),
    Gpu("Titan RTX", (23.64, 23.64), _UNSEEN, (7, 5), "public logs"),
    Gpu("GeForce GTX 1080 Ti", (10.91, 10.92), _UNSEEN, (6, 1), "public logs"),
    Gpu("GeForce RTX 2080 Ti", (10.57, 10.76), (0.18, 0.26), (7, 5), "djukicn/loca#12, lllyasviel/FramePack#369"),
    Gpu("GeForce RTX 3060 12GB", (11.62, 11.77), _UNSEEN, (8, 6), "smy20011/dreambooth-gui#78, public logs"),
    Gpu("GeForce RTX 3060 Ti", (7.65, 7.65), _UNSEEN, (8, 6), "public logs"),
    Gpu("GeForce RTX 3070", (7.57, 7.79), _UNSEEN, (8, 6), "akshitac8/OW-DETR#46, public logs"),
    Gpu("GeForce RTX 3080 10GB", (9.77, 9.78), (0.21, 0.30), (8, 6), "bcmi/libcom#54, zai-org/CogVideo#34"),
    Gpu("GeForce RTX 3080 12GB", (11.83, 11.83), _UNSEEN, (8, 6), "public logs"),
    Gpu("GeForce RTX 3080 Ti", (11.63, 11.77), _UNSEEN, (8, 6), "public logs"),
    Gpu("GeForce RTX 3090", (23.58, 23.70), (0.29, 0.46), (8, 6), "bytedance/X-Portrait#7, public logs"),
    Gpu("GeForce RTX 3090 Ti", (23.54, 23.65), _UNSEEN, (8, 6), "public logs"),
    Gpu("GeForce RTX 4060 Laptop", (7.62, 7.75), (0.11, 0.19), (8, 9), "ESRSchao/EdgeRegNet#2"),
    Gpu("GeForce RTX 4060 Ti 8GB", (7.62, 7.62), _UNSEEN, (8, 9), "public logs"),
    Gpu("GeForce RTX 4070", (11.71, 11.72), _UNSEEN, (8, 9), "public logs"),
    Gpu("GeForce RTX 4070 Ti", (11.70, 11.73), (0.33, 0.40), (8, 9), "Kwai-Kolors/Kolors#11"),
    Gpu("GeForce RTX 4070 Ti SUPER", (15.69, 15.69), _UNSEEN, (8, 9), "public logs"),
    Gpu("GeForce RTX 4080", (15.67, 15.67), _UNSEEN, (8, 9), "public logs"),
    Gpu("GeForce RTX 4080 SUPER", (15.57, 15.57), _UNSEEN, (8, 9), "public logs"),
    Gpu(
        "GeForce RTX 4090", (23.51, 23.65), (0.43, 0.55), (8, 9), "3DTopia/Phidias-Diffusion#8, pytorch/torchchat#1341"
    ),
    Gpu("GeForce RTX 5060 Ti 16GB", (15.45, 15.48), (0.15, 0.34), (12, 0), "Luce-Org/lucebox#407"),
    Gpu("GeForce RTX 5070 Ti", (15.46, 15.46), (0.15, 0.34), (12, 0), "public logs"),
    Gpu("GeForce RTX 5080", (15.47, 15.47), (0.15, 0.34), (12, 0), "public logs"),
    Gpu(
        "GeForce RTX 5090",
        (31.35, 31.37),
        (0.58, 0.60),
        (12, 0),
        "TrajectoryCrafter/TrajectoryCrafter#20, Wan-Video/Wan2.1#465",
    ),
)

MULTIPROCESSORS = {
    "Tesla T4": 40, "Tesla P100 16GB": 56, "Tesla V100 16GB": 80, "Tesla V100 32GB": 80,
    "NVIDIA A10": 72, "NVIDIA A30": 56, "NVIDIA A40": 84, "NVIDIA L4": 58, "NVIDIA L40": 142, "NVIDIA L40S": 142,
    "NVIDIA A100 40GB": 108, "NVIDIA A100 80GB": 108, "NVIDIA H20 96GB": 78, "NVIDIA H100 80GB": 132,
    "NVIDIA H100 NVL 94GB": 132, "NVIDIA GH200 96GB": 132, "NVIDIA H200 141GB": 132, "NVIDIA B200": 148,
    "NVIDIA GB200": 152, "RTX A2000 12GB": 26, "RTX A4000": 48, "RTX A5000": 64, "RTX A6000": 84,
    "RTX 6000 Ada": 142, "RTX PRO 6000 Blackwell": 188, "Quadro RTX 8000": 72, "Titan RTX": 72,
    "GeForce GTX 1080 Ti": 28, "GeForce RTX 2080 Ti": 68, "GeForce RTX 3060 12GB": 28, "GeForce RTX 3060 Ti": 38,
    "GeForce RTX 3070": 46, "GeForce RTX 3080 10GB": 68, "GeForce RTX 3080 12GB": 70, "GeForce RTX 3080 Ti": 80,
    "GeForce RTX 3090": 82, "GeForce RTX 3090 Ti": 84, "GeForce RTX 4060 Laptop": 24, "GeForce RTX 4060 Ti 8GB": 34,
    "GeForce RTX 4070": 46, "GeForce RTX 4070 Ti": 60, "GeForce RTX 4070 Ti SUPER": 66, "GeForce RTX 4080": 76,
    "GeForce RTX 4080 SUPER": 80, "GeForce RTX 4090": 128, "GeForce RTX 5060 Ti 16GB": 36,
    "GeForce RTX 5070 Ti": 70, "GeForce RTX 5080": 84, "GeForce RTX 5090": 170,
}  # fmt: skip
"""Multiprocessors by NVIDIA's data sheets; of two versions, the larger number (H100: SXM)."""


def _rates(gb_per_s: float, fp32_tflops: float, half_tflops: float | None = None) -> PeakRates:
    return PeakRates(gb_per_s=gb_per_s, fp32_tflops=fp32_tflops, half_tflops=half_tflops)


RATES = {
    "Tesla P100 16GB": _rates(732, 10.6),
    "Tesla V100 16GB": _rates(900, 15.7, 125),  # SXM2; PCIe: 14 and 112
    "Tesla V100 32GB": _rates(900, 15.7, 125),
    "Tesla T4": _rates(320, 8.1, 65),
    "Titan RTX": _rates(672, 16.3, 130.5),
    "GeForce GTX 1080 Ti": _rates(484, 11.3),
    "GeForce RTX 2080 Ti": _rates(616, 13.4, 53.8),
    "NVIDIA A10": _rates(600, 31.2, 125),
    "NVIDIA A30": _rates(933, 10.3),
    "NVIDIA A40": _rates(696, 37.4, 149.7),
    "NVIDIA A100 40GB": _rates(1555, 19.5, 312),
    "NVIDIA A100 80GB": _rates(2039, 19.5, 312),  # SXM
    "RTX A6000": _rates(768, 38.7, 154.8),
    "GeForce RTX 3090": _rates(936, 35.6, 71),
    "NVIDIA L40": _rates(864, 90.5, 181.05),
    "GeForce RTX 4090": _rates(1008, 82.6, 165.2),
    "NVIDIA H100 80GB": _rates(3350, 67, 989.5),  # SXM
    "NVIDIA H100 NVL 94GB": _rates(3900, 60, 835.5),
    "NVIDIA H200 141GB": _rates(4800, 67, 989),
    "GeForce RTX 5080": _rates(960, 56.28, 112.6),
    "GeForce RTX 5090": _rates(1792, 104.8, 209.5),
}
"""Peak rates by NVIDIA's data sheets and architecture whitepapers; of two versions of a GPU, those of the faster one.

Other GPUs have no such source, or one that gives rates only with sparsity or float16 accumulation. torch's own data
sheets (`torch._inductor.analysis.device_info`, 2.14) are not used: the L4 has the memory bandwidth of an H100 there.
"""


_NEAREST = 5
_NO_DIFFERENCE = re.compile(r"nvidia|tesla|geforce|sxm\d?|pcie|hbm\d?e?|gpu|generation|server|workstation|edition")
"""Words of a GPU's name that distinguish no two of the table."""


def gpu_named(text: str, *, flag: str = "--gpu", otherwise: str = "use --memory-budget") -> Gpu:
    """Return the GPU that a text names: `RTX 4090`, `a100 80gb`, `NVIDIA GeForce RTX 4090`.

    Words that do not distinguish GPUs may be missing: manufacturers, RTX, and the memory size if there is only one;
    NVL and Blackwell too, if no other GPU has that name.
    Raises BadInput if the text matches no GPU or several; the message lists GPUs, the most similar first.

    Args:
        text: the name.
        flag: the flag or argument that has it.
        otherwise: what to do for a GPU that is not in the table.
    """
    wanted = set(_words(text))
    found = [gpu for gpu in GPUS if _is_named(gpu, wanted)]
    more = r"rtx|\d{1,3}|nvl|blackwell"
    found = found or [gpu for gpu in GPUS if wanted <= {*_words(gpu.name)} and _is_named(gpu, wanted, may_lack=more)]
    chosen = [gpu for gpu in found if wanted == set(_words(gpu.name))] or found
    if len(chosen) == 1:
        return chosen[0]
    by_words = {" ".join(_words(gpu.name)): gpu.name for gpu in (found or GPUS)}
    nearest = difflib.get_close_matches(" ".join(_words(text)), by_words, n=_NEAREST, cutoff=0.0)
    listed = ", ".join(by_words[words] for words in nearest)
    raise BadInput(f"{flag}: got {text!r}, expected a GPU such as {listed}. For any other GPU {otherwise}.")


def _is_named(gpu: Gpu, wanted: set[str], *, may_lack: str = r"rtx|\d{1,3}") -> bool:
    """Return whether all words are those of the GPU, or its nominal memory in GB.

    Only words that match `may_lack` may be missing: `4070` is not a 4070 Ti.
    """
    words = set(_words(gpu.name))
    memory = {
        word for word in wanted - words if word.isdigit() and gpu.memory_gib[1] <= int(word) < 1.1 * gpu.memory_gib[1]
    }
    is_whole = all(re.fullmatch(may_lack, word) for word in words - wanted)
    return bool(wanted & words) and wanted - memory <= words and is_whole


def _words(text: str) -> list[str]:
    """Return the words that distinguish GPUs: `80GB` and `80 gb` become `80`; manufacturers and sockets are dropped."""
    text = re.sub(r"(\d+)\s*g(i?b)?\b", r" \1 ", text.lower())
    text = re.sub(r"\b(rtx|gtx)(?=\d)|(?<=\d)(ti|super)\b", r" \1\2 ", text)  # RTX3080Ti
    return [word for word in re.findall(r"[a-z0-9]+", text) if not _NO_DIFFERENCE.fullmatch(word)]
