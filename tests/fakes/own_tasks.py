"""A task as a person writes it, in a folder of their own."""

from pathlib import Path

CLASSIFIER = """
from dataclasses import dataclass

import torch
from torch import nn

import can_train
from helpers import WIDTH


class MyTask(can_train.Task):
    training = {"lr": 0.01, "lr_batch_size": 32, "epochs": 2}

    @dataclass(frozen=True, kw_only=True)
    class Settings:
        hidden: int = 32

    def datasets(self):
        points = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(0))
        samples = [(point, int(point[0] > 0)) for point in points]
        return {"train": samples[:200], "validation": samples[200:250], "test": samples[250:]}

    def model(self):
        return nn.Sequential(nn.Linear(WIDTH, self.settings.hidden), nn.ReLU(), nn.Linear(self.settings.hidden, 2))

    def loss(self, model, batch):
        points, labels = batch
        return {"class": (nn.functional.cross_entropy(model(points), labels, reduction="sum"), len(labels))}

    def metrics(self, model, batch):
        points, labels = batch
        return {"accuracy": ((model(points).argmax(1) == labels).sum(), len(labels))}
"""
"""At most 40 lines: a classifier whose width is a module's beside it."""

TAILED = """
import torch
from torch import nn

import can_train


class MyTask(can_train.Task):
    training = {"lr_batch_size": 16, "epochs": 6}

    def datasets(self):
        lengths = (20 * torch.randn(200, generator=torch.Generator().manual_seed(1)).mul(1.2).exp()).int() + 1
        samples = [torch.ones(int(length), 64) for length in lengths]
        return {"train": samples, "validation": samples[:4]}

    def model(self):
        return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))

    def collate(self, samples):
        return torch.cat(samples)

    def loss(self, model, batch):
        return {"square": (model(batch).square().sum(), len(batch))}
"""
"""Lengths with a heavy tail: the largest batches of the epochs differ by more than a third."""

PADDED = """
import torch
from torch import nn

import can_train


class MyTask(can_train.Task):
    training = {"lr_batch_size": 16, "epochs": 1}

    def datasets(self):
        lengths = LENGTHS
        samples = [torch.arange(length) % 50 for length in lengths]
        return {"train": samples, "validation": samples[:20]}

    def model(self):
        return nn.Embedding(50, 8)

    def loss(self, model, batch):
        return {"square": (model(batch).mean(1).square().sum(), len(batch))}
"""
"""A mean over padded lengths, which the caller names in place of LENGTHS."""


def write_task(folder: Path, text: str = CLASSIFIER) -> Path:
    """Writes the task and the module that it imports; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "helpers.py").write_text("WIDTH = 16\n")
    (folder / "my_file.py").write_text(text)
    return folder / "my_file.py"
