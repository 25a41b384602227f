"""MicroBatchTrainerMixin in real trainings with transformers: the weights are those of whole batches."""

import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train import CanTrainError, LoopSettings, MicroBatchTrainerMixin, simulated_gpu

EXACT = 1e-10
WORDS, WIDTH = 11, 8

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return import_module("transformers")


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
    """One whose loss is a mean over tokens in any case, though it takes any argument."""

    def loss(self, logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Sentences(torch.utils.data.Dataset):
    """Sentences of 2 to 9 words, each as long as it is."""

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
    """A user's Trainer; with settings, one that has adopted the mixin."""
    mine = {name: options.pop(name) for name in ("compute_loss_func", "compute_metrics") if name in options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        **({"per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 0.05} | options),
    )
    data = Sentences()
    common = {"model": model, "args": arguments, "train_dataset": data, "eval_dataset": data, "data_collator": padded}
    if settings is None:
        return transformers.Trainer(**common, **mine)

    class MicroBatchTrainer(MicroBatchTrainerMixin, transformers.Trainer):
        pass

    return MicroBatchTrainer(**common, **mine, loop_settings=settings)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def difference(plain: nn.Module, cut: nn.Module) -> float:
    return float((weights(plain) - weights(cut)).abs().max())


@pytest.mark.parametrize("kind", [Tagger, TaggerWithoutNumber])
@pytest.mark.parametrize("steps", [1, 2])
def test_batches_cut_by_a_limit_lead_to_the_same_weights(
    transformers: ModuleType, tmp_path: Path, kind: type[Tagger], steps: int
) -> None:
    plain, cut = kind(), kind()
    before = trainer_of(transformers, tmp_path, plain, gradient_accumulation_steps=steps).train()
    settings = LoopSettings(limits=3, learn=False)
    after = trainer_of(transformers, tmp_path, cut, settings, gradient_accumulation_steps=steps).train()
    assert difference(plain, cut) <= EXACT
    assert after.training_loss == pytest.approx(before.training_loss, rel=1e-6)
