r"""A transformers Trainer, which trains as it always does. Run this in the folder of this file:

    amp-track max-batch amp_track.integrations.transformers:train \
        --set trainer=MODULE:make_trainer --memory-budget 64MiB

On a GPU, omit --memory-budget: the limit is then its free memory. The model is made from a configuration, so nothing is
downloaded; from_pretrained() takes the same memory. The last lines of the output are your TrainingArguments. Needs
transformers 5.0 and accelerate 1.15, or newer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

LENGTH, VOCABULARY = 64, 1000


class Texts(Dataset[dict[str, Any]]):
    """Your tokenized data. With a data collator that pads, the max batch is that of the longest texts."""

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(index, index + LENGTH) % VOCABULARY, "labels": index % 2}


def make_trainer(batch_size: int, arguments: dict[str, Any]) -> Trainer:
    """Return a new Trainer. `arguments` select the device and the precision, and override those of your own."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
    )
    mine: dict[str, Any] = {"per_device_train_batch_size": batch_size, "num_train_epochs": 3}
    settings = TrainingArguments(**(mine | arguments))
    return Trainer(BertForSequenceClassification(config), settings, train_dataset=Texts())
