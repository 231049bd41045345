"""A script like those of transformers: argument parser, Trainer, a model from a configuration, an evaluation."""

import sys
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class DataArguments:
    samples: int = 600
    length: int = 32


class Texts(Dataset):
    def __init__(self, samples, length):
        self.samples, self.length = samples, length

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return {"input_ids": torch.arange(index, index + self.length) % 100, "labels": index % 2}


if __name__ == "__main__":
    data, settings = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses(sys.argv[1:])
    torch.manual_seed(settings.seed)
    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )
    trainer = Trainer(
        BertForSequenceClassification(config), settings,
        train_dataset=Texts(data.samples, data.length), eval_dataset=Texts(data.samples // 4, data.length),
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
