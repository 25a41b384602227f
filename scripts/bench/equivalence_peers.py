"""Trains with Lightning's, accelerate's and transformers' gradient accumulation, called as in their documentation, and
measures how far each is from training with whole batches. `scripts/bench/equivalence` calls `main` with the Python of
`.venv-peers`.
"""

import logging
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from bench.finder_peers import quiet_trainer
from bench.harness import say, versions_of
from bench.measure_equivalence import (
    MICRO_BATCH,
    NOT_COUNTED,
    PARTS,
    Batch,
    Loop,
    NextWord,
    RecordingSGD,
    Settings,
    Trained,
    by_hand,
    collate,
    draw_sentences,
    errors,
    trained,
    whole,
)


def main(epochs: str) -> dict[str, Any]:
    """Measures every tool; returns the versions, and the errors by tool."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sentences = draw_sentences()
    reference = partial(by_hand, sentences, accumulate=whole)
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, loop in loops(sentences, folder).items():
            say(name)
            measured[name] = errors(loop, reference, int(epochs))
    return {"versions": versions_of("Python", "lightning", "accelerate", "transformers", "torch"), "errors": measured}


def loops(sentences: Sequence[Tensor], folder: str) -> dict[str, Loop]:
    """Returns the tools by name. Some write files into `folder`."""
    hugging_face = partial(transformers_loop, sentences, folder)
    return {
        "Lightning, `accumulate_grad_batches=4`": partial(lightning_loop, sentences, folder),
        "accelerate, `accumulate()`": partial(accelerate_loop, sentences),
        "accelerate, the loop of its guide for sentences": partial(accelerate_guide_loop, sentences),
        "transformers `Trainer`, a model that returns its mean loss": partial(hugging_face, model=MeanLoss),
        "transformers `Trainer`, a model that takes `num_items_in_batch`": partial(hugging_face, model=CountedLoss),
    }


def loader(sentences: Sequence[Tensor]) -> DataLoader[Any]:
    """Returns the micro-batches of an epoch, always in the same order."""
    return DataLoader(sentences, batch_size=MICRO_BATCH, collate_fn=collate)  # type: ignore[arg-type]


class Module(LightningModule):
    """A LightningModule that returns its batch's mean loss."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.net = NextWord()
        self.optimizer = RecordingSGD(self.net.parameters(), lr=lr)

    def training_step(self, batch: Batch) -> Tensor:
        """Computes the loss of a micro-batch."""
        return self.net.token_loss(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer, which Lightning steps after every fourth micro-batch."""
        return self.optimizer


def lightning_loop(sentences: Sequence[Tensor], folder: str, settings: Settings) -> Trained:
    """Trains with Lightning's Trainer."""
    trainer = quiet_trainer(folder, max_epochs=settings.epochs, accumulate_grad_batches=PARTS)
    module = Module(settings.lr)
    trainer.fit(module, loader(sentences))
    return trained(module.net, module.optimizer)


def accelerate_loop(sentences: Sequence[Tensor], settings: Settings) -> Trained:
    """Trains with the loop of accelerate's guide to gradient accumulation."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    net = NextWord()
    recording = RecordingSGD(net.parameters(), lr=settings.lr)
    model, optimizer, parts = accelerator.prepare(net, recording, loader(sentences))
    for _ in range(settings.epochs):
        for part in parts:
            with accelerator.accumulate(model):
                accelerator.backward(model.token_loss(**part))
                optimizer.step()
                optimizer.zero_grad()
    return trained(net, recording)


def accelerate_guide_loop(sentences: Sequence[Tensor], settings: Settings) -> Trained:
    """Trains with the loop of accelerate's guide for samples of different lengths, which reads all parts of a batch
    before it computes them, and divides sums by the tokens of all parts.
    """
    accelerator = Accelerator(cpu=True)
    net = NextWord()
    recording = RecordingSGD(net.parameters(), lr=settings.lr)
    model, optimizer, parts = accelerator.prepare(net, recording, loader(sentences))
    for _ in range(settings.epochs):
        read = list(parts)
        for start in range(0, len(read), PARTS):
            batch = read[start : start + PARTS]
            tokens = sum(int(part["labels"].ne(NOT_COUNTED).sum()) for part in batch)
            for part in batch:
                accelerator.backward(model.token_loss(**part, reduction="sum") / tokens)
            optimizer.step()
            optimizer.zero_grad()
    return trained(net, recording)


class MeanLoss(NextWord):
    """A model as people write it, which returns the mean loss of its batch."""

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the loss for transformers' Trainer."""
        return {"loss": self.token_loss(tokens, labels)}


class CountedLoss(NextWord):
    """A model that takes the number of tokens of the whole batch, as transformers' models do."""

    def forward(self, tokens: Tensor, labels: Tensor, **counts: Any) -> dict[str, Tensor]:
        """Returns the loss for transformers' Trainer."""
        return {"loss": self.token_loss(tokens, labels, "sum") / counts["num_items_in_batch"]}


def quiet_arguments(folder: str, **options: Any) -> transformers.TrainingArguments:
    """Returns arguments of a Trainer on the CPU that writes and prints nothing, and keeps all columns."""
    return transformers.TrainingArguments(
        output_dir=folder,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )


def transformers_loop(
    sentences: Sequence[Tensor], folder: str, settings: Settings, *, model: type[nn.Module]
) -> Trained:
    """Trains with transformers' Trainer, without its clipping, decay of the rate, and shuffling."""
    net = model()
    optimizer = RecordingSGD(net.parameters(), lr=settings.lr)
    arguments = quiet_arguments(
        folder,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PARTS,
        num_train_epochs=settings.epochs,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
    )
    trainer = transformers.Trainer(
        model=net,
        args=arguments,
        train_dataset=sentences,
        data_collator=collate,  # type: ignore[arg-type]
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.train()
    return trained(net, optimizer)
