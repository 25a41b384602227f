"""Trains scripts of several kinds with `MicroBatcher`, with the Lightning callback and with the Trainer's mixin, where
nothing needs to be split and where memory runs out, and compares them with the same scripts without can-train.

Shapes: R samples, T tokens, F features, H hidden, C classes.
"""

import logging
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer

from bench.equivalence_peers import quiet_arguments
from bench.finder_peers import quiet_trainer
from bench.harness import say
from bench.measure_equivalence import BITWISE, REFUSED, TOLD
from can_train import LoopSettings, MicroBatchCallback, MicroBatcher, MicroBatchTrainerMixin
from can_train.errors import DoesNotFitError

SAMPLES: Final = 16
"""Samples of a batch."""
FIT: Final = 6
"""Memory runs out for more samples than this, where it does."""
BATCHES: Final = 4
EPOCHS: Final = 2
FEATURES: Final = 6
HIDDEN: Final = 8
CLASSES: Final = 5
TOKENS: Final = 9
PADDING: Final = -100
"""Label of padded tokens."""
LEARNING_RATE: Final = 0.1
_CHANGE: Final = re.compile(r"(?:gradient|loss) (?:by )?([\d.]+%)")


def main() -> dict[str, list[list[str]]]:
    """Trains every script with every door. Returns pairs of cells by script, in the order of DOORS: where nothing is
    split, and where memory runs out.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for script in SCRIPTS:
            say(script.name)
            rows[script.name] = [pair(partial(door, script, folder)) for door in DOORS.values()]
    return rows


class Network(nn.Module):
    """A network with the loss of a script; `most` samples fit."""

    def __init__(self, loss: Callable[[nn.Module, Tensor, Tensor], Tensor], *, normalizes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        normalization = [nn.BatchNorm1d(HIDDEN)] if normalizes else []
        self.layers = nn.Sequential(nn.Linear(FEATURES, HIDDEN), *normalization, nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
        self.double()
        self.most = math.inf
        self.loss = partial(loss, self.layers)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Returns the loss, as transformers' Trainer wants it."""
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return {"loss": self.loss(x, labels)}


class CountingNetwork(Network):
    """A network that takes the Trainer's number of tokens of the whole batch."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **others: Any) -> dict[str, Tensor]:
        """Returns the sum of the tokens' losses over their number."""
        (mean,) = super().forward(x, labels).values()
        tokens = labels.ne(PADDING).sum()
        return {"loss": mean if num_items_in_batch is None else mean * tokens / num_items_in_batch}


def mean_loss(layers: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean over samples, [R, F] and [R], or over tokens that count, [R, T, F] and [R, T]."""
    return F.cross_entropy(layers(x).flatten(0, -2), labels.flatten(), ignore_index=PADDING)


def sum_loss(layers: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum over samples."""
    return F.cross_entropy(layers(x), labels, reduction="sum") / SAMPLES


def contrastive_loss(layers: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Returns a loss that compares each sample with all others of the batch."""
    first = F.normalize(layers(x), dim=1)
    second = F.normalize(layers(x.flip(1)), dim=1)
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(x)))


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script that a person may have.

    Attributes:
        name: Its row.
        loss: What it computes of a batch.
        tokens: Whether a sample is a padded sentence.
        tells: Whether the number of tokens is told.
        normalizes: Whether it has BatchNorm.
        is_sum: Whether losses of parts add up.
        accumulated: Batches to an optimizer step.
        by_hand: Whether it runs its own backward pass and steps its optimizer itself.
    """

    name: str
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = mean_loss
    tokens: bool = False
    tells: bool = False
    normalizes: bool = False
    is_sum: bool = False
    accumulated: int = 1
    by_hand: bool = False

    def network(self, most: float, *, counts: bool = False) -> Network:
        """Makes the network, in which `most` samples fit."""
        made = (CountingNetwork if counts else Network)(self.loss, normalizes=self.normalizes)
        made.most = most
        return made

    def samples(self) -> list[dict[str, Tensor]]:
        """Draws the samples of an epoch."""
        draw = torch.Generator().manual_seed(1)
        shape = (BATCHES * SAMPLES, TOKENS) if self.tokens else (BATCHES * SAMPLES,)
        x = torch.randn(*shape, FEATURES, generator=draw, dtype=torch.float64)
        labels = torch.randint(CLASSES, shape, generator=draw)
        if self.tokens:
            lengths = torch.randint(1, TOKENS + 1, (len(x), 1), generator=draw)
            labels = labels.where(torch.arange(TOKENS) < lengths, PADDING)
        return [{"x": each, "labels": label} for each, label in zip(x, labels, strict=True)]


SCRIPTS: Final = (
    Script(name="mean over samples"),
    Script(name="sum over samples", loss=sum_loss, is_sum=True),
    Script(name="mean over tokens, their number told", tokens=True, tells=True),
    Script(name="mean over tokens, their number not told", tokens=True),
    Script(name="two batches to a step", accumulated=2),
    Script(name="a step written by hand", by_hand=True),
    Script(name="BatchNorm", normalizes=True),
    Script(name="contrastive loss", loss=contrastive_loss),
)


class Result(NamedTuple):
    """All that a training has left: tensors of the network, the last loss, the state of the generator."""

    weights: Tensor
    state: dict[str, Tensor]
    loss: float
    generator: Tensor


def result_of(network: Network, loss: float) -> Result:
    """Reads what a training has left."""
    weights = nn.utils.parameters_to_vector(network.parameters()).detach().clone()
    return Result(weights, dict(network.state_dict()), loss, torch.get_rng_state())


def optimizer_of(network: nn.Module) -> torch.optim.Optimizer:
    """Makes the optimizer of all scripts."""
    return torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=0.9)


# The doors: each trains a script, with can-train or without it, in batches of which `most` samples fit.


def with_micro_batcher(script: Script, folder: str, *, most: float, fits: bool) -> Result:
    """Trains in a plain loop."""
    network = script.network(most)
    optimizer, batcher, last = optimizer_of(network), MicroBatcher(network), 0.0
    for _ in range(EPOCHS):
        read = iter(loader(script))
        while batches := list(islice(read, script.accumulated)):
            optimizer.zero_grad()
            for batch in batches:
                if fits:
                    last = run_batch(script, network, batcher, batch)
                    continue
                loss = network(**batch)["loss"]
                (loss / script.accumulated).backward()
                last = float(loss.detach())
            optimizer.step()
            batcher.stepped()
    return result_of(network, last)


def run_batch(script: Script, network: Network, batcher: MicroBatcher, batch: Mapping[str, Tensor]) -> float:
    """Adds the gradient of a batch by `MicroBatcher`; returns its loss."""

    def items(labels: Tensor) -> float:
        if script.is_sum:
            return len(labels) / SAMPLES
        return float(labels.ne(PADDING).sum()) if script.tells else len(labels)

    def losses_of(start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        x, labels = batch["x"][start:stop], batch["labels"][start:stop]
        loss = network(x, labels)["loss"]
        return {"loss": (loss if script.is_sum else loss * items(labels), items(labels))}

    whole = items(batch["labels"])
    done = batcher.run(losses_of, len(batch["x"]), denominators={"loss": whole},
                       weights={"loss": 1 / script.accumulated})  # fmt: skip
    return float(done.means["loss"])


class Module(LightningModule):
    """A script in Lightning."""

    def __init__(self, script: Script, most: float) -> None:
        super().__init__()
        self.script, self.network = script, script.network(most)
        self.automatic_optimization = not script.by_hand

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        """Computes the loss, and takes the step itself where the script does."""
        loss = self.network(**batch)["loss"]
        if self.script.by_hand:
            optimizer = self.optimizers()
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            optimizer.step()  # type: ignore[union-attr]
        self.log("loss", loss)
        return {"loss": loss, "denominator": batch["labels"].ne(PADDING).sum()} if self.script.tells else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return optimizer_of(self.network)


def with_lightning(script: Script, folder: str, *, most: float, fits: bool) -> Result:
    """Trains with Lightning's Trainer."""
    callbacks = [MicroBatchCallback(LoopSettings(learn=False))] if fits else []
    trainer = quiet_trainer(folder, max_epochs=EPOCHS, callbacks=callbacks,
                            accumulate_grad_batches=script.accumulated)  # fmt: skip
    module = Module(script, most)
    trainer.fit(module, loader(script))
    return result_of(module.network, float(trainer.callback_metrics["loss"]))


class OwnStep(Trainer):
    """A Trainer with a step of its own."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Computes the loss and runs its backward pass."""
        loss: Tensor = model(**inputs)["loss"]
        self.accelerator.backward(loss)
        return loss.detach()


def with_transformers(script: Script, folder: str, *, most: float, fits: bool) -> Result:
    """Trains with transformers' Trainer, without its clipping, decay of the rate, and shuffling."""
    network = script.network(most, counts=script.tells)
    optimizer = optimizer_of(network)
    arguments = quiet_arguments(folder, per_device_train_batch_size=SAMPLES, num_train_epochs=EPOCHS, max_grad_norm=0.0,
                                gradient_accumulation_steps=script.accumulated,
                                train_sampling_strategy="sequential")  # fmt: skip
    kind: Any = OwnStep if script.by_hand else Trainer
    options: dict[str, Any] = {}
    if fits:
        kind = type("MicroBatchTrainer", (MicroBatchTrainerMixin, kind), {})
        options = {"loop_settings": LoopSettings(learn=False)}
    trainer = kind(model=network, args=arguments, train_dataset=script.samples(),
                   optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)), **options)  # fmt: skip
    return result_of(network, trainer.train().training_loss)


DOORS: Final[Mapping[str, Callable[..., Result]]] = {
    "`MicroBatcher`": with_micro_batcher,
    "Lightning callback": with_lightning,
    "Trainer mixin": with_transformers,
}


def loader(script: Script) -> DataLoader[Any]:
    """Returns the batches of an epoch, always in the same order."""
    samples: Any = script.samples()
    return DataLoader(samples, batch_size=SAMPLES)


# The cells


def pair(train: Callable[..., Result]) -> list[str]:
    """Returns the cells of a script and a door: where nothing is split, and where memory runs out."""
    plain, still = train(most=math.inf, fits=False), train(most=math.inf, fits=True)
    return [unsplit_text(plain, still), split_text(train, plain)]


def unsplit_text(plain: Result, still: Result) -> str:
    """Tells whether a training is, bit by bit, the training without can-train."""
    is_same = plain.loss == still.loss and torch.equal(plain.generator, still.generator)
    is_same &= all(torch.equal(tensor, still.state[name]) for name, tensor in plain.state.items())
    return BITWISE if is_same else share(plain, still)


def split_text(train: Callable[..., Result], plain: Result) -> str:
    """Tells how far the weights are off where memory runs out, and whether that is told, or the batch refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            split = train(most=FIT, fits=True)
        except DoesNotFitError as error:
            return " ".join([REFUSED, *changes(str(error))])
    told = changes(" ".join(str(warning.message) for warning in caught))
    return f"{share(plain, split)}, {TOLD} {told[0]}" if told else share(plain, split)


def changes(text: str) -> list[str]:
    """Returns the changes of a gradient that a text tells."""
    return _CHANGE.findall(text)


def share(plain: Result, other: Result) -> str:
    """Writes the difference of the weights over their change by the plain training."""
    start = nn.utils.parameters_to_vector(Network(mean_loss).parameters()).detach()
    begin = start if start.shape == plain.weights.shape else torch.zeros_like(plain.weights)
    difference = float((other.weights - plain.weights).norm() / (plain.weights - begin).norm())
    return f"{difference:.1%}" if difference > 1e-4 else f"{difference:.0e}"
