"""Training scripts of Lightning users, as small as they can be; `train` trains one and reads all that it leaves."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

SAMPLES, BATCH, FEATURES, CLASSES = 41, 9, 6, 3


@dataclass
class Room:
    """The memory of a device that does not exist: passes of more samples through a `Net` run out of it.

    Attributes:
        samples: Samples that fit.
        where: `forward`, `backward`, or `second`: each second pass of a batch that does not fit.
    """

    samples: float = float("inf")
    where: str = "forward"
    passes: int = 0

    def check(self, samples: int, where: str) -> None:
        """Raises the error of CUDA where the samples do not fit."""
        if samples <= self.samples:
            return
        if where == "forward" and self.where == "second":
            self.passes += 1
            if self.passes % 2:
                return
        elif where != self.where:
            return
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


ROOM = Room()


@contextmanager
def room_for(samples: float, where: str = "forward") -> Iterator[None]:
    """Lets memory run out where more samples pass a layer."""
    earlier = vars(ROOM).copy()
    vars(ROOM).update(samples=samples, where=where, passes=0)
    try:
        yield
    finally:
        vars(ROOM).update(earlier)


class Bounded(torch.autograd.Function):
    """Passes its input on, where it fits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Passes the input on."""
        ROOM.check(len(x), "forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Passes the gradient on."""
        ROOM.check(len(gradients[0]), "backward")
        return gradients[0]


class Net(nn.Module):
    """Layers with bounded room between them."""

    def __init__(self, out: int = CLASSES, *between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(FEATURES, 8), nn.Sequential(*between), nn.Linear(8, out)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the logits."""
        hidden: Tensor = self.last(Bounded.apply(self.between(torch.tanh(self.first(x)))))
        return hidden


def tensors(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Features and labels of some samples."""
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(samples, FEATURES, generator=drawn), torch.randint(CLASSES, (samples,), generator=drawn)


def loader(samples: int = SAMPLES, batch: int = BATCH, **options: Any) -> DataLoader[Any]:
    """Batches of features and labels."""
    return DataLoader(TensorDataset(*tensors(samples)), batch_size=batch, **options)


class Records(Dataset[Any]):
    """Samples of any shape: `make` makes one of a number, its features and its label."""

    def __init__(self, make: Callable[[int, Tensor, Tensor], Any]) -> None:
        self.make, (self.x, self.y) = make, tensors()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return self.make(number, self.x[number], self.y[number])


@dataclass
class Script:
    """A training.

    Attributes:
        module: The module.
        loaders: Those that `fit` is given.
        options: Of the trainer.
        callbacks: Of the script.
        run: What is done with the trainer; None: `fit`.
    """

    module: Any
    loaders: list[Any] = field(default_factory=lambda: [loader(), loader(batch=16)])
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    run: Callable[[Any, Script], Any] | None = None


Make = Callable[[ModuleType, Path], Script]
SCRIPTS: dict[str, Make] = {}
BASES: dict[str, type] = {}


def script(make: Make) -> Make:
    """Registers a script under the name of its function."""
    SCRIPTS[make.__name__] = make
    return make


_LEFT_OUT = ("on_gpu", "on_before_batch_transfer", "on_after_batch_transfer")


def hooks_of(kind: type) -> list[str]:
    """The names of the hooks of a class."""
    return [name for name in dir(kind) if name.startswith("on_") and name not in _LEFT_OUT]


def base(lightning: Any) -> Any:
    """A module that trains, validates, tests and predicts, and keeps the names of the hooks that were called."""
    if "module" in BASES:
        return BASES["module"]

    class Base(lightning.LightningModule):
        def __init__(self, net: nn.Module | None = None) -> None:
            super().__init__()
            self.trace: list[str] = []
            self.net = Net() if net is None else net

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", self.loss(batch))

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    for name in [*hooks_of(lightning.LightningModule), "optimizer_zero_grad", "optimizer_step"]:
        setattr(Base, name, traced(name, getattr(lightning.LightningModule, name)))
    BASES["module"] = Base
    return Base


def traced(name: str, native: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a module that keeps its name."""

    def hook(self: Any, *arguments: Any, **options: Any) -> Any:
        self.trace.append(name)
        return native(self, *arguments, **options)

    return hook


def gradients(module: nn.Module) -> list[float | None]:
    """The sum of the absolute gradient of each parameter."""
    return [None if one.grad is None else float(one.grad.abs().sum()) for one in module.parameters()]


def recorder(lightning: Any) -> Any:
    """A callback that keeps the hooks that were called, with the gradient or the outputs, and the attributes of the
    module.
    """
    if "recorder" not in BASES:
        kind = type("Recorder", (lightning.Callback,), {name: recorded(name) for name in hooks_of(lightning.Callback)})
        BASES["recorder"] = kind
    callback = BASES["recorder"]()
    callback.names, callback.values, callback.attributes = [], [], []
    return callback


_GRADIENT_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


def recorded(name: str) -> Callable[..., None]:
    """A hook of the recording callback."""

    def hook(self: Any, trainer: Any, module: Any, *arguments: Any, **options: Any) -> None:
        if name in ("on_save_checkpoint", "on_load_checkpoint"):
            return
        self.names.append(name)
        self.attributes.append(tuple(sorted(vars(module))))
        if name in _GRADIENT_HOOKS[2:]:
            self.values.append((name, gradients(module)))
        if name == "on_before_backward":
            self.values.append((name, arguments[0].detach().clone()))
        if name.endswith("batch_end"):
            self.values.append((name, copy.deepcopy(arguments[0])))
            self.values.append(("metrics", {key: one.clone() for key, one in trainer.logged_metrics.items()}))

    return hook


def memory_logger(lightning: Any) -> Any:
    """A logger that keeps what it is given."""
    if "logger" not in BASES:

        class MemoryLogger(lightning.loggers.logger.DummyLogger):
            def __init__(self) -> None:
                super().__init__()
                self.rows: list[Any] = []

            def log_metrics(self, metrics: Any, step: Any = None) -> None:
                self.rows.append((dict(metrics), step))

        BASES["logger"] = MemoryLogger
    return BASES["logger"]()


@dataclass
class Facts:
    """All that a training leaves."""

    numbers: dict[str, Any]  # Weights, logged values, states, that a split may round otherwise
    exact: dict[str, Any]  # Names, counts, flags
    error: tuple[str, str] | None  # Class and text of the error that it ended with
    attributes: set[str]  # Of the module, at any hook
    hooks: list[str]


_FRAMEWORK = ("_", "training", "trace", "prepare_data_per_node", "allow_zero_length", "compiled", "configs")


def train(
    lightning: Any,
    name: str,
    folder: Path,
    *ours: Any,
    first: bool = False,
    catches: tuple[type[BaseException], ...] = (),
) -> Facts:
    """Trains a script, with callbacks before its callbacks or after them."""
    random.seed(3), np.random.seed(3), torch.manual_seed(3)  # noqa: NPY002
    made = SCRIPTS[name](lightning, folder)
    watch, logger = recorder(lightning), memory_logger(lightning)
    callbacks = [*ours, watch, *made.callbacks] if first else [*made.callbacks, watch, *ours]
    options = {"max_epochs": 2, "logger": logger, "enable_checkpointing": False} | made.options
    trainer = lightning.Trainer(
        accelerator="cpu", callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=1, default_root_dir=folder, **options,
    )  # fmt: skip
    error, result = None, None
    try:
        result = made.run(trainer, made) if made.run else trainer.fit(made.module, *made.loaders)
    except catches as caught:
        error = (type(caught).__name__, str(caught))
    return facts_of(trainer, made, watch, logger, result, error)


def facts_of(trainer: Any, made: Script, watch: Any, logger: Any, result: Any, error: Any) -> Facts:
    """Reads all that a training leaves."""
    module, loop = made.module, trainer.fit_loop
    state = {
        key: value for key, value in vars(module).items()
        if not key.startswith(_FRAMEWORK) and not callable(value)
    }  # fmt: skip
    metrics = {
        f"{key}.{state_name}": getattr(one, state_name)
        for key, one in module.named_modules() for state_name in getattr(one, "_reductions", ())
    }  # fmt: skip
    counts = {
        f"{key}._update_count": one._update_count for key, one in module.named_modules() if hasattr(one, "_reductions")
    }
    numbers = {
        "weights": {key: value.detach().clone() for key, value in module.state_dict().items()},
        "gradients": gradients(module),
        "logged": dict(trainer.logged_metrics), "callback": dict(trainer.callback_metrics),
        "logger": logger.rows, "result": result, "values": watch.values, "state": state, "metrics": metrics,
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
    }  # fmt: skip
    exact = {
        "random": (torch.rand(2).tolist(), random.random(), float(np.random.rand())),  # noqa: NPY002
        "requires_grad": [one.requires_grad for one in module.parameters()],
        "training": [one.training for one in module.modules()],
        "global_step": trainer.global_step, "epoch": trainer.current_epoch, "counts": counts,
        "fit": loop.state_dict(), "batches": loop.epoch_loop.batch_progress.state_dict(),
        "names": watch.names, "trace": module.trace,
        "hooks": [len(one._forward_hooks) + len(one._backward_hooks) for one in module.modules()],
        "callbacks": sorted({type(one).__name__ for one in trainer.callbacks} - {"MicroBatchCallback"}),
    }  # fmt: skip
    return Facts(numbers, exact, error, {one for each in watch.attributes for one in each}, watch.names)


def differences(one: Any, other: Any, tolerance: float = 0.0, path: str = "") -> Iterator[str]:
    """Yields where two records differ by more than a tolerance, relative where numbers are larger than 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            yield f"{path}: {sorted(map(str, one))} for {sorted(map(str, other))}"
            return
        for key in one:
            yield from differences(one[key], other[key], tolerance, f"{path}.{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield f"{path}: {len(one)} entries for {len(other)}: {one!s:.200} for {other!s:.200}"
            return
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, tolerance, f"{path}[{place}]")
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            yield f"{path}: {one.dtype} {tuple(one.shape)} for {other.dtype} {tuple(other.shape)}"
        elif not tolerance:
            if not torch.equal(one.nan_to_num(7), other.nan_to_num(7)):
                yield f"{path}: {one!s:.80} for {other!s:.80}"
        elif not torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            yield f"{path}: {one!s:.80} for {other!s:.80}"
    elif isinstance(one, float) and isinstance(other, float) and tolerance:
        if abs(one - other) > tolerance * max(1.0, abs(other)):
            yield f"{path}: {one} for {other}"
    elif isinstance(one, float) and one != one and isinstance(other, float) and other != other:
        return
    elif type(one) is not type(other) or (isinstance(one, int | float | str | bool | type(None)) and one != other):
        yield f"{path}: {one!s:.200} for {other!s:.200}"


# Automatic optimization


@script
def automatic(lightning: Any, folder: Path) -> Script:
    """A mean loss over samples."""
    return Script(base(lightning)())


@script
def summed_loss(lightning: Any, folder: Path) -> Script:
    """A loss that is a sum over samples."""

    class Summed(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")
            self.log("loss", loss / 100, on_step=True, on_epoch=True)
            return loss / 10

    return Script(Summed())


@script
def token_mean(lightning: Any, folder: Path) -> Script:
    """A mean over some of the samples, whose number is returned."""

    class Tokens(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kept = batch[1] != 1
            loss = F.cross_entropy(self.net(batch[0])[kept], batch[1][kept])
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=int(kept.sum()))
            return {"loss": loss, "denominator": kept.sum()}

    return Script(Tokens())


@script
def zero_grad_of_ones_own(lightning: Any, folder: Path) -> Script:
    """Gradients that stay as zeros, and are counted."""

    class Own(base(lightning)):
        cleared = 0

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            self.trace.append("optimizer_zero_grad")
            self.cleared += 1
            optimizer.zero_grad(set_to_none=False)

    return Script(Own())


@script
def gradients_never_cleared(lightning: Any, folder: Path) -> Script:
    """Gradients that nobody clears."""

    class Never(base(lightning)):
        def optimizer_zero_grad(self, *arguments: Any) -> None:
            self.trace.append("optimizer_zero_grad")

    return Script(Never())


@script
def gradients_cleared_every_second_batch(lightning: Any, folder: Path) -> Script:
    """Gradients that are cleared now and then."""

    class Second(base(lightning)):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx % 2 == 0:
                optimizer.zero_grad()

    return Script(Second())


@script
def backward_of_ones_own(lightning: Any, folder: Path) -> Script:
    """A backward pass of twice the loss, which is counted."""

    class Own(base(lightning)):
        calls = 0

        def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
            self.calls += 1
            (2 * loss).backward()

    return Script(Own())


@script
def optimizer_step_of_ones_own(lightning: Any, folder: Path) -> Script:
    """A warm-up of the learning rate in the optimizer's step."""

    class Own(base(lightning)):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            self.trace.append("optimizer_step")
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (batch_idx + 1)
            optimizer.step(closure=optimizer_closure)

    return Script(Own())


@script
def steps_that_are_skipped(lightning: Any, folder: Path) -> Script:
    """An optimizer that steps every second batch; between, the closure runs alone."""

    class Skipping(base(lightning)):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    return Script(Skipping())


@script
def lbfgs(lightning: Any, folder: Path) -> Script:
    """An optimizer that computes a batch several times."""

    class Several(base(lightning)):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=3)

    return Script(Several())


@script
def accumulation_over_2(lightning: Any, folder: Path) -> Script:
    """Gradients of two batches a step."""
    return Script(base(lightning)(), options={"accumulate_grad_batches": 2})


@script
def accumulation_over_3(lightning: Any, folder: Path) -> Script:
    """Gradients of three batches a step, the last of fewer."""
    return Script(base(lightning)(), options={"accumulate_grad_batches": 3})


@script
def accumulation_scheduler(lightning: Any, folder: Path) -> Script:
    """More batches a step from the second epoch on."""
    schedule = lightning.callbacks.GradientAccumulationScheduler(scheduling={0: 1, 1: 2})
    return Script(base(lightning)(), callbacks=[schedule])


@script
def clipping_by_norm(lightning: Any, folder: Path) -> Script:
    """Gradients that are clipped."""
    return Script(base(lightning)(), options={"gradient_clip_val": 0.1})


@script
def clipping_of_ones_own(lightning: Any, folder: Path) -> Script:
    """Gradients that are clipped by value, in the module's own way."""

    class Clipping(base(lightning)):
        def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **options: Any) -> None:
            self.trace.append("configure_gradient_clipping")
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")

    return Script(Clipping())


@script
def averaged_weights(lightning: Any, folder: Path) -> Script:
    """An exponential moving average of the weights."""
    from torch.optim.swa_utils import get_ema_avg_fn

    averaging = lightning.callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.7))
    return Script(base(lightning)(), callbacks=[averaging], options={"max_epochs": 3})


@script
def stochastic_weight_averaging(lightning: Any, folder: Path) -> Script:
    """Weights averaged over epochs, with BatchNorm that is updated at the end."""
    averaging = lightning.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    return Script(base(lightning)(), callbacks=[averaging], options={"max_epochs": 3})


@script
def scheduled_and_stopped(lightning: Any, folder: Path) -> Script:
    """A schedule that follows a validated value, and a stop."""

    class Plateau(base(lightning)):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    stop = lightning.callbacks.EarlyStopping("val_loss", patience=1)
    return Script(Plateau(), callbacks=[stop], options={"max_epochs": 4})


@script
def backbone_that_is_frozen_first(lightning: Any, folder: Path) -> Script:
    """Layers that begin to train in the second epoch."""

    class Frozen(base(lightning)):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)

    class Unfreeze(lightning.callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net.first)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net.first, optimizer)

    return Script(Frozen(), callbacks=[Unfreeze()])


@script
def none_for_some_batches(lightning: Any, folder: Path) -> Script:
    """Batches that the step skips."""

    class Skipping(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (1, 4) else loss

    return Script(Skipping())


@script
def outputs_of_all_kinds(lightning: Any, folder: Path) -> Script:
    """A mapping with rows, vectors, numbers and text."""

    class Telling(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch[0])
            hits = logits.argmax(1) == batch[1]
            return {
                "loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach(), "size": len(batch[0]),
                "hits": hits.sum(), "number": batch_idx + 10, "share": hits.double().mean(), "name": "train",
                "mean_logits": logits.detach().mean(0), "weights": self.net.first.weight.detach()[:2, :3].clone(),
                "labels": batch[1].tolist(), "counts": torch.bincount(batch[1], minlength=CLASSES),
                "kinds": torch.tensor([3, 5]), "fixed": torch.tensor(4), "sizes": (len(batch[0]), 2),
            }  # fmt: skip

    return Script(Telling())


@script
def mapping_without_a_loss(lightning: Any, folder: Path) -> Script:
    """An error of Lightning."""

    class Lossless(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"lost": super().training_step(batch, batch_idx)}

    return Script(Lossless())


@script
def float_in_place_of_a_loss(lightning: Any, folder: Path) -> Script:
    """Another error of Lightning."""

    class Floats(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return float(super().training_step(batch, batch_idx))

    return Script(Floats())


@script
def key_logged_twice(lightning: Any, folder: Path) -> Script:
    """Two values a step under one name."""

    class Twice(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("loss", 2 * loss, on_step=True, on_epoch=True)
            return loss

    return Script(Twice())


@script
def key_logged_in_two_ways(lightning: Any, folder: Path) -> Script:
    """An error of Lightning: one name with two reductions."""

    class Twice(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("loss", loss, on_step=True, on_epoch=True, reduce_fx="max")
            return loss

    return Script(Twice())


@script
def metric_objects(lightning: Any, folder: Path) -> Script:
    """Metrics that are logged as objects, and one that is only updated."""
    from torchmetrics import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    class Measured(base(lightning)):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy, self.updated = (MulticlassAccuracy(CLASSES, average="micro") for _ in range(2))
            self.val_accuracy, self.seen = MulticlassAccuracy(CLASSES), MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch[0])
            self.accuracy(logits, batch[1])
            self.updated.update(logits, batch[1])
            self.seen.update(logits.detach().abs().amax(1))
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.log("updated", self.updated, on_step=False, on_epoch=True)
            return F.cross_entropy(logits, batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_accuracy(self.net(batch[0]), batch[1])
            self.log("val_accuracy", self.val_accuracy)

    return Script(Measured())


@script
def metric_collection(lightning: Any, folder: Path) -> Script:
    """Several metrics in one."""
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

    class Measured(base(lightning)):
        def __init__(self) -> None:
            super().__init__()
            kinds = (MulticlassAccuracy, MulticlassPrecision, MulticlassF1Score)
            self.scores = MetricCollection([kind(CLASSES) for kind in kinds], prefix="train/")
            self.val_scores = self.scores.clone(prefix="val/")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch[0])
            self.scores.update(logits, batch[1])
            self.log_dict(self.scores, on_step=False, on_epoch=True)
            return F.cross_entropy(logits, batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.val_scores.update(self.net(batch[0]), batch[1])
            self.log_dict(self.val_scores, on_step=False, on_epoch=True)

    return Script(Measured())


@script
def metric_collection_by_step(lightning: Any, folder: Path) -> Script:
    """Several metrics, whose values of the batch are logged."""
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

    class Measured(base(lightning)):
        def __init__(self) -> None:
            super().__init__()
            self.scores = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassRecall(CLASSES, average="micro")])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch[0])
            self.scores(logits, batch[1])
            self.log_dict(self.scores, on_step=True, on_epoch=True)
            return F.cross_entropy(logits, batch[1])

    return Script(Measured())


@script
def reductions(lightning: Any, folder: Path) -> Script:
    """Values that are added up, or whose largest counts."""

    class Reduced(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch[0])
            hits = (logits.argmax(1) == batch[1]).sum().double()
            self.log("samples", len(batch[0]), reduce_fx="sum", on_step=True, on_epoch=True)
            self.log("steps", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
            self.log("hits", hits, reduce_fx="sum", on_step=True, on_epoch=True)
            self.log("largest", logits.max(), reduce_fx="max", on_step=True, on_epoch=True)
            self.log("smallest", logits.min(), reduce_fx=torch.min, on_step=True, on_epoch=True)
            self.log("rate", 0.25, on_step=True, on_epoch=True)
            self.log("number", batch_idx, on_step=True, on_epoch=True)
            self.log("constant", torch.tensor(2.0), reduce_fx="sum", on_step=True, on_epoch=True)
            return F.cross_entropy(logits, batch[1])

    return Script(Reduced())


@script
def log_dict(lightning: Any, folder: Path) -> Script:
    """Values that are logged together."""

    class Together(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch[0])
            loss, share = F.cross_entropy(logits, batch[1]), (logits.argmax(1) == batch[1]).double().mean()
            self.log_dict({"loss": loss, "share": share}, on_step=True, on_epoch=True, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log_dict({"val_loss": loss, "val_double": 2 * loss}, batch_size=len(batch[0]))
            return {"val_loss": loss, "logits": self.net(batch[0])}

    return Script(Together())


@script
def logger_in_the_step(lightning: Any, folder: Path) -> Script:
    """A step that writes to the logger by itself."""

    class Writing(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.logger.log_metrics({"number": batch_idx, "raw_loss": float(loss)}, step=self.global_step)
            return loss

    return Script(Writing())


@script
def lists_and_counters(lightning: Any, folder: Path) -> Script:
    """Lists, counters and sets that a step fills; the epoch's end reads them."""

    class Keeping(base(lightning)):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []
            self.logits: list[Tensor] = []
            self.by_class: dict[int, int] = {}
            self.indices: set[int] = set()
            self.history: list[float] = []
            self.steps = 0
            self.samples = 0
            self.average = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch[0])
            loss = F.cross_entropy(logits, batch[1])
            self.losses.append(loss.detach())
            self.logits.append(logits.detach())
            self.by_class[batch_idx] = self.by_class.get(batch_idx, 0) + 1
            self.indices.add(batch_idx)
            self.steps += 1
            self.samples += len(logits)
            self.last, self.average = logits.detach(), 0.9 * self.average + 0.1 * float(loss)
            return loss

        def on_train_epoch_end(self) -> None:
            self.trace.append("on_train_epoch_end")
            self.history.append(float(torch.stack(self.losses).mean()))
            self.log("rows", float(len(torch.cat(self.logits))))
            self.losses.clear()
            self.logits = []

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.losses.append(self.loss(batch))

    return Script(Keeping())


@script
def buffers_and_generators(lightning: Any, folder: Path) -> Script:
    """A step that draws, augments and keeps a moving average."""

    class Drawing(base(lightning)):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("drawn", torch.zeros(1))
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("of_class", torch.zeros(CLASSES, dtype=torch.int64))
            self.rate = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.drawn.copy_(torch.rand(1) + random.random() + float(np.random.rand()))  # noqa: NPY002
            self.count += 1
            self.of_class += torch.bincount(batch[1], minlength=CLASSES)
            self.rate *= 0.9
            return self.loss(batch)

    return Script(Drawing())


@script
def augmented(lightning: Any, folder: Path) -> Script:
    """Noise on the features."""

    class Noisy(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss((batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]))

    return Script(Noisy())


@script
def hidden_state(lightning: Any, folder: Path) -> Script:
    """A state for each row that one batch hands to the next."""

    class Recurrent(base(lightning)):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.hidden = nn.GRUCell(FEATURES, FEATURES), None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.cell(batch[0], self.hidden)
            self.hidden = hidden.detach()
            loss = F.cross_entropy(self.net(hidden), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    return Script(Recurrent(), loaders=[loader(36)])


@script
def dropout(lightning: Any, folder: Path) -> Script:
    """Activations that are dropped."""
    return Script(base(lightning)(Net(CLASSES, nn.Dropout(0.3))))


@script
def batch_norm(lightning: Any, folder: Path) -> Script:
    """Samples that are normalised by their batch."""
    return Script(base(lightning)(Net(CLASSES, nn.BatchNorm1d(8))), loaders=[loader(40, 8), loader()])


@script
def contrastive(lightning: Any, folder: Path) -> Script:
    """Samples that are compared with each other."""

    class Contrastive(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            one, other = (F.normalize(self.net(x)) for x in (batch[0], batch[0] + 0.1))
            loss = F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    return Script(Contrastive())


@script
def lazy_layers(lightning: Any, folder: Path) -> Script:
    """Parameters that the first batch makes."""

    class Lazy(base(lightning)):
        def __init__(self) -> None:
            super().__init__(Net(CLASSES, nn.LazyLinear(8)))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    # Of sanity batches of validation, the first makes them.
    return Script(Lazy(), options={"num_sanity_val_steps": 0})


@script
def module_of_configure_model(lightning: Any, folder: Path) -> Script:
    """Layers that are made once the trainer is there."""

    class Late(base(lightning)):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def configure_model(self) -> None:
            self.add_module("net", Net())

    return Script(Late())


@script
def gradient_penalty(lightning: Any, folder: Path) -> Script:
    """A gradient within the step."""

    class Penalised(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0].requires_grad_()
            losses = F.cross_entropy(self.net(x), batch[1], reduction="none")
            (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
            return losses.mean() + 0.1 * gradient.square().sum(1).mean()

    return Script(Penalised())


@script
def copies_in_hooks(lightning: Any, folder: Path) -> Script:
    """Callbacks that copy and pickle the module."""

    class Copying(lightning.Callback):
        def copied(self, module: Any) -> None:
            trainer, module._trainer = module._trainer, None
            try:
                pickle.loads(pickle.dumps(copy.deepcopy(module).state_dict()))
                assert copy.deepcopy(module).net is not module.net
            finally:
                module._trainer = trainer

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
            self.copied(pl_module)

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            self.copied(pl_module)

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.copied(pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
            self.copied(pl_module)

    return Script(base(lightning)(), callbacks=[Copying()], options={"max_epochs": 1})


# Manual optimization


def by_hand(lightning: Any) -> Any:
    """A module that is optimized by hand."""

    class ByHand(base(lightning)):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.automatic_optimization = False

    return ByHand


@script
def manual(lightning: Any, folder: Path) -> Script:
    """One optimizer, clipped and scheduled."""

    class Manual(by_hand(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            self.lr_schedulers().step()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    return Script(Manual())


@script
def manual_with_a_mapping(lightning: Any, folder: Path) -> Script:
    """Values that are logged after the step, and outputs."""

    class Manual(by_hand(lightning)):
        stepped = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            logits = self.net(batch[0])
            loss = F.cross_entropy(logits, batch[1])
            self.log("before", loss, on_step=True, on_epoch=True)
            self.manual_backward(loss)
            optimizer.step()
            self.stepped += 1
            self.log("loss", loss, on_step=True, on_epoch=True)
            return {"loss": loss, "logits": logits.detach(), "size": len(logits)}

    return Script(Manual())


@script
def manual_log_after_the_step(lightning: Any, folder: Path) -> Script:
    """A share of hits that is logged after the step, and the loss with its number of samples."""

    class Manual(by_hand(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            logits = self.net(batch[0])
            loss = F.cross_entropy(logits, batch[1])
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(logits))
            self.log("share", (logits.argmax(1) == batch[1]).double().mean(), on_step=True, on_epoch=True)

    return Script(Manual())


@script
def manual_accumulation(lightning: Any, folder: Path) -> Script:
    """Gradients of two batches, cleared first."""

    class Manual(by_hand(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            if batch_idx % 2 == 0:
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch) / 2)
            if batch_idx % 2:
                optimizer.step()

    return Script(Manual())


@script
def manual_gradients_never_cleared(lightning: Any, folder: Path) -> Script:
    """Gradients that add up."""

    class Manual(by_hand(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    return Script(Manual())


@script
def manual_zeros(lightning: Any, folder: Path) -> Script:
    """Gradients that become zeros, and an optimizer that Lightning has not wrapped."""

    class Manual(by_hand(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return Script(Manual())


@script
def manual_plain_backward(lightning: Any, folder: Path) -> Script:
    """A backward pass without `manual_backward`."""

    class Manual(by_hand(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.loss(batch).backward()
            optimizer.step()

    return Script(Manual())


@script
def manual_closure(lightning: Any, folder: Path) -> Script:
    """An optimizer that is given a closure."""

    class Manual(by_hand(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    return Script(Manual())


@script
def manual_skips(lightning: Any, folder: Path) -> Script:
    """Batches without a backward pass."""

    class Manual(by_hand(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.log("loss", loss, on_epoch=True)
            if batch_idx % 2:
                return
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

    return Script(Manual())


@script
def gan(lightning: Any, folder: Path) -> Script:
    """Generator and critic, with `toggle_optimizer`."""

    class Gan(by_hand(lightning)):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.critic = Net(FEATURES), Net(1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            of_net, of_critic = self.optimizers()
            self.toggle_optimizer(of_net)
            fake = self.net(torch.randn_like(batch[0]))
            loss = -self.critic(fake).mean()
            self.log("g_loss", loss, on_step=True, on_epoch=True)
            self.manual_backward(loss)
            of_net.step()
            of_net.zero_grad()
            self.untoggle_optimizer(of_net)
            if batch_idx % 2:
                self.toggle_optimizer(of_critic)
                loss = self.critic(fake.detach()).mean() - self.critic(batch[0]).mean()
                self.log("d_loss", loss, on_step=True, on_epoch=True)
                self.manual_backward(loss)
                of_critic.step()
                of_critic.zero_grad()
                self.untoggle_optimizer(of_critic)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters(), lr=0.02), torch.optim.SGD(self.critic.parameters(), lr=0.1)

    return Script(Gan(), loaders=[loader()])


@script
def two_optimizers_of_one_loss(lightning: Any, folder: Path) -> Script:
    """Two optimizers at different rates, one backward pass."""

    class Manual(by_hand(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            one, other = self.optimizers()
            one.zero_grad()
            self.manual_backward(self.loss(batch))
            one.step()
            if batch_idx % 2:
                other.step()
                other.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(self.net.first.parameters(), lr=0.02),
                    torch.optim.SGD(self.net.last.parameters(), lr=0.1)]  # fmt: skip

    return Script(Manual())


# Batches and loaders


@script
def loaders_in_a_dict(lightning: Any, folder: Path) -> Script:
    """Batches of two loaders of different lengths."""

    class Two(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = [self.loss(one) for one in batch.values() if one is not None]
            return sum(losses)

    both = lightning.utilities.CombinedLoader({"a": loader(), "b": loader(24, 5)}, "max_size_cycle")
    return Script(Two(), loaders=[both])


@script
def loaders_in_a_list(lightning: Any, folder: Path) -> Script:
    """Batches of two loaders, as long as both have some, of the same size."""

    class Two(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch[0]) + self.loss((-batch[1][0], batch[1][1]))

    return Script(Two(), loaders=[[loader(), loader()]])


@script
def loaders_one_after_the_other(lightning: Any, folder: Path) -> Script:
    """Two loaders of training, one after the other."""

    class Two(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self.loss(batch if not isinstance(batch, list) or len(batch) == 2 else batch[0])

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log("val_loss", self.loss(batch))

    return Script(Two(), loaders=[loader(), [loader(batch=16), loader(20)]])


@script
def dataloader_iter(lightning: Any, folder: Path) -> Script:
    """A step that fetches its batch by itself."""

    class Fetching(base(lightning)):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, *_ = next(dataloader_iter)
            loss = self.loss(batch)
            self.log("loss", loss, batch_size=len(batch[0]))
            return loss

    return Script(Fetching(), loaders=[loader()])


@script
def batches_without_tensors(lightning: Any, folder: Path) -> Script:
    """Batches of numbers of samples."""

    class Numbers(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = tensors()
            return self.loss((x[batch], y[batch]))

    numbers = DataLoader(range(SAMPLES), batch_size=BATCH, collate_fn=list)  # type: ignore[arg-type]
    return Script(Numbers(), loaders=[numbers])


@script
def batches_of_dicts(lightning: Any, folder: Path) -> Script:
    """Dicts with names and nested values."""

    class Named(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss((batch["x"], batch["labels"]["y"])) + 0.0 * len(batch["name"])
            self.log("loss", loss, on_epoch=True)
            return {"loss": loss, "names": batch["name"]}

    records = Records(lambda number, x, y: {"x": x, "labels": {"y": y}, "name": f"n{number}"})
    return Script(Named(), loaders=[DataLoader(records, batch_size=BATCH)])


class Pair(NamedTuple):
    """Features and label."""

    x: Tensor
    y: Tensor


@dataclass
class Record:
    """Features and label."""

    x: Tensor
    y: Tensor
    scale: float = 1.0


@script
def batches_of_named_tuples(lightning: Any, folder: Path) -> Script:
    """Named tuples."""

    class Named(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss((batch.x, batch.y))

    return Script(Named(), loaders=[DataLoader(Records(lambda number, x, y: Pair(x, y)), batch_size=BATCH)])


def as_record(samples: Sequence[Pair]) -> Record:
    """Collates into a dataclass."""
    return Record(torch.stack([one.x for one in samples]), torch.stack([one.y for one in samples]), 2.0)


@script
def batches_of_dataclasses(lightning: Any, folder: Path) -> Script:
    """Objects of a class of one's own."""

    class Named(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss((batch.x * batch.scale, batch.y))

    records = Records(lambda number, x, y: Pair(x, y))
    return Script(Named(), loaders=[DataLoader(records, batch_size=BATCH, collate_fn=as_record)])


@script
def samples_of_different_lengths(lightning: Any, folder: Path) -> Script:
    """Lists of tensors that no collation joins."""

    class Bags(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = torch.stack([self.net(x).mean(0) for x, _ in batch])
            return F.cross_entropy(logits, torch.stack([y for _, y in batch]))

    records = Records(lambda number, x, y: (x.repeat(number % 3 + 1, 1), y))
    return Script(Bags(), loaders=[DataLoader(records, batch_size=BATCH, collate_fn=list)])


@script
def compiled_layers(lightning: Any, folder: Path) -> Script:
    """Layers that are compiled."""

    class Compiled(base(lightning)):
        def __init__(self) -> None:
            super().__init__()
            self.net.between = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="eager")

    return Script(Compiled(), options={"max_epochs": 1})


@script
def bf16_mixed(lightning: Any, folder: Path) -> Script:
    """Mixed precision with a loss in float32."""

    class Mixed(base(lightning)):
        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0].float()).float(), batch[1])

    return Script(Mixed().float(), options={"precision": "bf16-mixed"})


# Runs of other kinds


@script
def everything(lightning: Any, folder: Path) -> Script:
    """Fit, validate, test and predict with one trainer."""

    def run(trainer: Any, made: Script) -> Any:
        trainer.fit(made.module, *made.loaders)
        results = [
            trainer.validate(made.module, loader(), verbose=False),
            trainer.test(made.module, loader(), verbose=False),
        ]
        return [*results, trainer.predict(made.module, loader())]

    return Script(base(lightning)(), run=run)


@script
def module_without_parameters(lightning: Any, folder: Path) -> Script:
    """Validation and prediction of a module that has nothing to train."""

    class Empty(base(lightning)):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            ROOM.check(len(batch[0]), "forward")
            self.log("mean", batch[0].mean())

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            ROOM.check(len(batch[0]), "forward")
            return batch[0] * 2

    def run(trainer: Any, made: Script) -> Any:
        return [trainer.validate(made.module, loader(), verbose=False), trainer.predict(made.module, loader())]

    return Script(Empty(), run=run)


@script
def several_test_loaders(lightning: Any, folder: Path) -> Script:
    """Two loaders of test and prediction, and outputs of every kind."""

    class Several(base(lightning)):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.log("test_loss", self.loss(batch))
            self.log("samples", float(len(batch[0])), reduce_fx="sum")

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            logits = self.net(batch[0])
            return {"logits": logits, "best": logits.argmax(1).tolist(), "loader": dataloader_idx}

    def run(trainer: Any, made: Script) -> Any:
        loaders = [loader(), loader(20, 6)]
        return [trainer.test(made.module, loaders, verbose=False), trainer.predict(made.module, loaders)]

    return Script(Several(), run=run)


@script
def error_in_a_step(lightning: Any, folder: Path) -> Script:
    """A step that fails."""

    class Failing(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                raise ValueError("nothing left")
            return loss

    return Script(Failing())


@script
def interrupted(lightning: Any, folder: Path) -> Script:
    """A step that is interrupted."""

    class Interrupted(base(lightning)):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                raise KeyboardInterrupt
            return loss

    return Script(Interrupted())


@script
def resumed(lightning: Any, folder: Path) -> Script:
    """A training that goes on from a checkpoint."""

    def run(trainer: Any, made: Script) -> Any:
        path = folder / "resumed.ckpt"
        options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        begun = lightning.Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, **options)
        torch.manual_seed(5)
        with room_for(float("inf")):
            begun.fit(base(lightning)(), *made.loaders)
        begun.save_checkpoint(path)
        return trainer.fit(made.module, *made.loaders, ckpt_path=path)

    return Script(base(lightning)(), run=run, options={"max_epochs": 3})


@script
def checkpointed(lightning: Any, folder: Path) -> Script:
    """Checkpoints of the best epochs."""

    class Keeping(lightning.callbacks.ModelCheckpoint):
        pass

    keeping = Keeping(folder / "kept", monitor="val_loss", save_top_k=2)

    def run(trainer: Any, made: Script) -> Any:
        trainer.fit(made.module, *made.loaders)
        return sorted(float(score) for score in keeping.best_k_models.values())

    return Script(base(lightning)(), run=run, callbacks=[keeping], options={"enable_checkpointing": True})


@script
def fast_dev_run(lightning: Any, folder: Path) -> Script:
    """Two batches of everything."""
    return Script(base(lightning)(), options={"fast_dev_run": 2})


@script
def overfit_batches(lightning: Any, folder: Path) -> Script:
    """The first batches again and again."""
    return Script(base(lightning)(), options={"overfit_batches": 2})


@script
def validation_within_epochs(lightning: Any, folder: Path) -> Script:
    """Validation after every second batch, and few of them."""
    return Script(base(lightning)(), options={"val_check_interval": 2, "limit_val_batches": 0.5, "max_steps": 8})
