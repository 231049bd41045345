"""A transformers Trainer with a small BERT made from a configuration: nothing is downloaded.

python transformers_trainer.py     (needs the extra transformers: docs/install.md)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from amp_track.integrations import transformers as amp_transformers


class Texts(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(index, index + 32) % 100, "labels": index % 2}


def make_trainer(batch_size: int, arguments: dict[str, Any]) -> Trainer:
    """Return a trainer; `arguments` select the precision and leave nothing behind. They override yours."""
    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )  # fmt: skip
    mine: dict[str, Any] = {"per_device_train_batch_size": batch_size, "num_train_epochs": 1}
    settings = TrainingArguments(**(mine | arguments))
    return Trainer(BertForSequenceClassification(config), settings, train_dataset=Texts())


if __name__ == "__main__":
    found = amp_transformers.max_batch(
        "transformers_trainer:make_trainer",
        precision=["fp32", "bf16"],
        device="cpu",  # on a GPU leave out this line and the next: its kernels alone need more
        memory_budget="64MiB",
    )
    print(found)
