"""A script with the arguments, loaders, loss scaler and processes of timm's train.py, on a folder of images."""

import argparse
import contextlib

import timm
import torch
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from timm.utils import NativeScaler, init_distributed_device

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir")
parser.add_argument("--model", default="resnet18")
parser.add_argument("-b", "--batch-size", type=int, default=32)
parser.add_argument("--img-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--amp-dtype", default="float16")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--device", default="cpu")


def main():
    arguments = parser.parse_args()
    device = init_distributed_device(arguments)
    torch.manual_seed(42)
    model = timm.create_model(arguments.model, num_classes=2).to(device)
    if arguments.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01, momentum=0.9)
    kind = getattr(torch, arguments.amp_dtype)
    scaler = NativeScaler(device=device.type) if arguments.amp and kind is torch.float16 else None
    casts = torch.autocast(device.type, kind) if arguments.amp else contextlib.nullcontext()

    def loader_of(split, is_training):
        data = create_dataset("", root=arguments.data_dir, split=split, is_training=is_training)
        return create_loader(
            data, input_size=(3, arguments.img_size, arguments.img_size), batch_size=arguments.batch_size,
            is_training=is_training, num_workers=arguments.workers, use_prefetcher=False, device=device,
            distributed=arguments.distributed,
        )  # fmt: skip

    train, evaluation = loader_of("train", True), loader_of("val", False)
    for _ in range(arguments.epochs):
        model.train()
        for images, labels in train:
            with casts:
                loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            if scaler is not None:
                scaler(loss, optimizer, parameters=model.parameters())
            else:
                loss.backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            for images, _ in evaluation:
                model(images.to(device))


if __name__ == "__main__":
    main()
