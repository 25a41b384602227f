"""A training with the Trainer of transformers: a model, sentences of different length, and the Trainer."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train import LoopSettings, MicroBatchTrainerMixin

WORDS, WIDTH = 11, 8


class Tagger(nn.Module):
    """A user's model: a mean over labelled tokens, or their sum by the Trainer's number."""

    accepts_loss_kwargs = True

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, WORDS)).double()
        self.words.double()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        logits = self.layers(self.words(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": self.loss(logits, labels, **options), "logits": logits}

    def loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


class TaggerWithoutNumber(Tagger):
    """A tagger whose loss is always a mean over tokens, although it accepts any argument."""

    def loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Sentences(torch.utils.data.Dataset):
    """Sentences of 2 to 9 words, without padding."""

    def __init__(self, size: int = 26) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.words = [torch.randint(1, WORDS, (2 + 5 * i % 8,), generator=drawn) for i in range(size)]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[row], "labels": self.words[row].flip(0)}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([one["input_ids"] for one in samples], batch_first=True),
        "labels": pad([one["labels"] for one in samples], batch_first=True, padding_value=-100),
    }


def trainer_of(
    transformers: Any, folder: Path, model: nn.Module, settings: LoopSettings | None = None, **options: Any
) -> Any:
    """A user's Trainer, of the class `base`; with settings, a Trainer with the mixin."""
    mine = {
        name: options.pop(name) for name in ("compute_loss_func", "compute_metrics", "optimizers") if name in options
    }
    base: Any = options.pop("base", transformers.Trainer)
    collator, data = options.pop("data_collator", padded), options.pop("train_dataset", None) or Sentences()
    # transformers 4 leaves the precision of one Trainer there, for all that follow.
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        **({"per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 0.05} | options),
    )
    common = {"model": model, "args": arguments, "train_dataset": data, "eval_dataset": data, "data_collator": collator}
    if settings is None:
        return base(**common, **mine)

    class MicroBatchTrainer(MicroBatchTrainerMixin, base):  # type: ignore[misc]  # a class that is chosen
        pass

    return MicroBatchTrainer(**common, **mine, loop_settings=settings)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def difference(plain: nn.Module, cut: nn.Module) -> float:
    return float((weights(plain) - weights(cut)).abs().max())


def trained_on_ranks(rank: int, size: int, port: int, folder: Path) -> None:
    """Trains and evaluates on one of several processes, without the mixin and with it; saves the weights of both, and
    the losses.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    for steps in (1, 2):
        for name, settings in (("plain", None), ("cut", LoopSettings(limits=3 - rank, learn=False))):
            model = Tagger()
            options = {"ddp_backend": "gloo", "per_device_train_batch_size": 4, "gradient_accumulation_steps": steps}
            trainer = trainer_of(import_module("transformers"), folder, model, settings, **options)
            trainer.train()
            losses = [trainer.evaluate()["eval_loss"] for _ in range(2)]
            torch.save([weights(model), torch.tensor(losses)], folder / f"{name}-{steps}-{rank}.pt")
