"""Measures what the Lightning callback and the Trainer's mixin cost where nothing is split: processor time of a
step with the adapter and without it, in trainings that take turns.

Shapes: B samples of a batch, F features, C classes.
"""

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from bench.equivalence_peers import quiet_arguments
from bench.finder_peers import quiet_trainer
from bench.harness import Benchmark, Table
from can_train import LoopSettings, MicroBatchCallback, MicroBatchTrainerMixin

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "lightning", "transformers"), quick="2 rounds")
ROUNDS: Final = 21
STEPS: Final = 60
"""Steps of a training."""
BATCH: Final = 64
FEATURES: Final = 256
CLASSES: Final = 10
LAYERS: Final = 6
GOAL: Final = 0.02
"""Largest share of a step of about 5 ms."""
FIRST: Final = 10
"""Steps at the beginning of a training that do not count: caches fill, and optimizers make their state."""

Train = Callable[[type[nn.Module], str, str], list[float]]
"""Trains a network in a way, with files in a folder; returns the times at which steps began."""


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if an adapter costs too much."""
    options = BENCHMARK.parser().parse_args()
    rounds = 2 if options.quick else ROUNDS
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    table, missed = Table("training", "a step alone, ms", "with the adapter", "of it, a callback that does nothing"), []
    for name, train, ways in (("Lightning", in_lightning, WAYS), ("Trainer", in_trainer, WAYS[:2])):
        for network in NETWORKS:
            alone_s, shares = compare(train, network, ways, rounds)
            row = f"{name}, {NETWORKS[network]}"
            table.add(row, f"{1000 * alone_s:.1f}", *map("{:+.1%}".format, shares),
                      *["—"] * (len(WAYS) - len(ways)))  # fmt: skip
            if shares[0] > GOAL:
                missed.append(f"{row}: {shares[0]:.1%} > {GOAL:.0%}")
    BENCHMARK.finish(options, missed, table=table)


ALONE: Final = "alone"
ADAPTED: Final = "adapted"
IDLE: Final = "idle"
WAYS: Final = (ALONE, ADAPTED, IDLE)


def compare(train: Train, network: type[nn.Module], ways: Sequence[str], rounds: int) -> tuple[float, list[float]]:
    """Trains in each way, in turns. Returns the seconds of a step alone, and by how much a step in the other ways is
    longer: medians of the rounds' ratios.
    """
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            # The first round warms up, and no way always comes first.
            for way in ways if number % 2 else reversed(ways):
                begins = train(network, way, folder)
                steps = [stop - start for start, stop in pairwise(begins)]
                seconds[way].append(median(steps[FIRST:]))
    ratios = [[other / alone - 1 for other, alone in zip(seconds[way][1:], seconds[ALONE][1:], strict=True)]
              for way in ways if way != ALONE]  # fmt: skip
    return median(seconds[ALONE][1:]), [median(each) for each in ratios]


class Layers(nn.Module):
    """Linear layers."""

    normalizes = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = [nn.Linear, nn.BatchNorm1d] if self.normalizes else [nn.Linear]
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [kind(*[FEATURES] * (2 if kind is nn.Linear else 1)) for kind in block]
            layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Computes the loss: [B, F] and [B] → a number."""
        return {"loss": F.cross_entropy(self.layers(x), labels)}


class NormalizedLayers(Layers):
    """Linear layers with BatchNorm."""

    normalizes = True


NETWORKS: Final[dict[type[nn.Module], str]] = {Layers: "linear layers", NormalizedLayers: "with BatchNorm"}


def samples() -> list[dict[str, Tensor]]:
    """Draws the samples of a training."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * BATCH, FEATURES, generator=draw)
    labels = torch.randint(CLASSES, (len(x),), generator=draw)
    return [{"x": each, "labels": label} for each, label in zip(x, labels, strict=True)]


SAMPLES: Final[Any] = samples()
SETTINGS: Final = LoopSettings(device="cpu", learn=False)


class Module(LightningModule):
    """A network in Lightning, which logs its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Computes the loss."""
        loss: Tensor = self.network(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters())


class Clock(Callback):
    """Notes when steps begin."""

    def __init__(self) -> None:
        self.begins: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        """Notes the time."""
        self.begins.append(time.process_time())


def in_lightning(network: type[nn.Module], way: str, folder: str) -> list[float]:
    """Trains with Lightning's Trainer."""
    clock = Clock()
    more: dict[str, list[Any]] = {ALONE: [], ADAPTED: [MicroBatchCallback(SETTINGS)], IDLE: [Callback()]}
    quiet_trainer(folder, callbacks=[clock, *more[way]]).fit(Module(network()), DataLoader(SAMPLES, batch_size=BATCH))
    return clock.begins


class TrainerClock(TrainerCallback):
    """Notes when steps begin."""

    def __init__(self) -> None:
        self.begins: list[float] = []

    def on_step_begin(self, *arguments: Any, **options: Any) -> None:
        """Notes the time."""
        self.begins.append(time.process_time())


class MicroBatchTrainer(MicroBatchTrainerMixin, Trainer):
    """A Trainer with the mixin."""


def in_trainer(network: type[nn.Module], way: str, folder: str) -> list[float]:
    """Trains with transformers' Trainer."""
    clock, is_adapted = TrainerClock(), way == ADAPTED
    kind: Any = MicroBatchTrainer if is_adapted else Trainer
    arguments = quiet_arguments(folder, per_device_train_batch_size=BATCH, num_train_epochs=1)
    options = {"loop_settings": SETTINGS} if is_adapted else {}
    trainer = kind(model=network(), args=arguments, train_dataset=SAMPLES, callbacks=[clock], **options)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock.begins
