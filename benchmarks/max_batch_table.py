"""Predict the max batches of common models of timm and torchvision on every GPU that `amp-track plan` knows.

    python -m benchmarks.max_batch_table [--models 50] [--processes 2]

Trained with AdamW on images of the model's own size. Writes benchmarks/results/max-batches.csv: a row for each model
and precision, a column for each GPU with the expected and the safe batch, `231 / 220`. Models that the file has are
skipped, so that a stopped run can be continued; remove the file to begin anew (75 minutes on two cores). Predicted, not
measured; tf32 is as fp32.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import warnings

from amp_track.memory_plan.gpus import GPUS
from benchmarks import provenance

FILE = provenance.RESULTS / "max-batches.csv"
PRECISIONS = ("fp32", "amp", "bf16")
MODELS = (
    "torchvision:resnet50", "timm:vit_base_patch16_224", "torchvision:resnet18", "timm:convnext_tiny",
    "torchvision:efficientnet_b0", "timm:swin_tiny_patch4_window7_224", "torchvision:mobilenet_v3_large",
    "timm:vit_large_patch16_224", "torchvision:vgg16", "timm:efficientnetv2_rw_s", "torchvision:densenet121",
    "timm:deit_small_patch16_224", "torchvision:resnet101", "timm:vit_small_patch16_224", "torchvision:inception_v3",
    "timm:convnext_base", "torchvision:mobilenet_v2", "timm:vit_tiny_patch16_224", "torchvision:resnet34",
    "timm:swin_base_patch4_window7_224", "torchvision:efficientnet_v2_s", "timm:resnext50_32x4d", "torchvision:alexnet",
    "timm:tf_efficientnet_b4", "torchvision:resnet152", "timm:convnextv2_tiny", "torchvision:vit_b_16",
    "timm:maxvit_tiny_tf_224", "torchvision:regnet_y_400mf", "timm:eva02_base_patch14_224",
    "torchvision:squeezenet1_1", "timm:mobilevit_s", "torchvision:wide_resnet50_2", "timm:beit_base_patch16_224",
    "torchvision:shufflenet_v2_x1_0", "timm:regnety_032", "torchvision:googlenet", "timm:mixer_b16_224",
    "torchvision:convnext_small", "timm:efficientformer_l1", "torchvision:swin_v2_t", "timm:coatnet_0_rw_224",
    "torchvision:mnasnet1_0", "timm:hrnet_w18", "torchvision:resnext101_32x8d", "timm:volo_d1_224",
    "torchvision:maxvit_t", "timm:ghostnet_100", "timm:xception41", "timm:seresnet50",
)  # fmt: skip
"""Common models, those that most people use first."""


def rows_of(model: str) -> list[dict[str, str]]:
    """Return the rows of a model."""
    warnings.simplefilter("ignore")  # of timm, about names of models
    import torch

    from amp_track.config.job import Job
    from amp_track.memory_plan.fake_step import FakeStep
    from amp_track.memory_plan.predict import plan_precision
    from amp_track.records.plan import Kernels, PlanTask
    from amp_track.targets.workload import load_workload

    torch.set_num_threads(1)
    workload = load_workload(model)
    step = FakeStep(Job(workload=model, learning_rate=1e-3, batch_size=32), workload, workload.example(2), as_cuda=True)
    found = []
    for precision in PRECISIONS:
        targets = tuple(gpu.target() for gpu in GPUS if not gpu.lacks(precision))
        task = PlanTask(precisions=(precision,), batch_size=32, targets=targets, kernels=Kernels())
        plan = plan_precision(step, precision, task)
        batches = {each.target: f"{each.batch_size} / {each.safe_batch_size}" for each in plan.max_batches}
        found.append({"model": model, "precision": precision} | {gpu.name: batches.get(gpu.name, "") for gpu in GPUS})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=int, default=len(MODELS))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    known = set()
    if FILE.exists():
        with FILE.open() as file:
            reader = csv.DictReader(file)
            known = {row["model"] for row in reader}
        if reader.fieldnames != ["model", "precision", *(gpu.name for gpu in GPUS)]:
            parser.error(f"{FILE} has other GPUs than amp_track: remove it")
    missing = [model for model in MODELS[: options.models] if model not in known]
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=3) as pool:
        for rows in pool.imap(rows_of, missing):
            is_new = not FILE.exists()
            with FILE.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                if is_new:
                    writer.writeheader()
                writer.writerows(rows)
            print(rows[0]["model"], flush=True)
    print(provenance.versions("torch", "torchvision", "timm"))


if __name__ == "__main__":
    main()
