"""Values that steps of a LightningModule keep and log are those of whole batches where batches are split."""

import warnings
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from can_train import LoopSettings, MicroBatchCallback
from fakes.lightning_warnings import QUIET_LIGHTNING

CLASSES, SAMPLES = 3, 40
LOGGED = ("mean", "sum", "sum of means", "hits")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}

pytestmark = [pytest.mark.slow, QUIET_LIGHTNING]


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    return import_module("lightning.pytorch")


def keeping_module(lightning: Any) -> Any:
    """A module whose steps add up what they see, in every way that people have."""

    class Keeping(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
            self.seen, self.loss_sum, self.least = 0, 0.0, float("inf")
            self.most, self.latest_size = -1e9, 0
            self.total = torch.zeros((), dtype=torch.float64)
            self.confusion = torch.zeros(CLASSES, CLASSES)
            self.losses, self.latest = list[float](), deque[float](maxlen=2)
            self.labels, self.of_label = list[int](), Counter[int]()
            self.by_stage: dict[str, dict[str, Any]] = {"all": {"n": 0, "losses": []}}
            self.numbers, self.by_class = set[float](), [0] * CLASSES
            self.histogram, self.array_sum = np.zeros(CLASSES, dtype=np.int32), np.zeros(2)
            self.array_most, self.hits_of_array = np.full(2, -1e9), np.int64(0)
            self.counts = {"samples": 0, "hits": torch.zeros(()), "loss": 0.0}
            self.register_buffer("average", torch.zeros((), dtype=torch.float64))
            self.register_buffer("sum_of_losses", torch.zeros((), dtype=torch.float64))
            self.register_buffer("highest", torch.full((CLASSES,), -1e9, dtype=torch.float64))

        def keep(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.layers(x)
            loss = F.cross_entropy(logits, y)
            value, right = loss.detach(), logits.argmax(1) == y
            self.seen += len(y)
            self.loss_sum += float(value) * len(y)
            self.losses.append(float(value))
            self.latest.append(float(value))
            self.total += value * len(y)
            self.confusion += F.one_hot(y, CLASSES).float().T @ F.one_hot(logits.argmax(1), CLASSES).float()
            self.counts["samples"] += len(y)
            self.counts["hits"] += right.sum()
            self.counts["loss"] += float(value) * len(y)
            self.least = min(self.least, float(logits.detach().min()))
            self.most = max(self.most, float(logits.detach().max()))
            self.highest: Tensor = torch.maximum(self.highest, logits.detach().amax(0))
            self.latest_size = len(y)
            self.labels.extend(y.tolist())
            self.of_label.update(y.tolist())
            self.by_stage["all"]["n"] += len(y)
            self.by_stage["all"]["losses"].append(float(value))
            self.numbers.update(x[:, 0].tolist())
            array, of_class = x[:, :2].numpy(), logits.detach().argmax(1).numpy()
            self.histogram += np.bincount(y.numpy(), minlength=CLASSES).astype(np.int32)
            self.array_sum = self.array_sum + array.sum(0)
            self.array_most = np.maximum(self.array_most, array.max(0))
            self.hits_of_array += (of_class == y.numpy()).sum()
            for label in y.tolist():
                self.by_class[label] += 1
            self.average.mul_(0.9).add_(0.1 * value)
            self.sum_of_losses += value * len(y)
            self.log("mean", value)
            self.log("sum", value * len(y))
            self.log("sum of means", value, reduce_fx="sum")
            self.log("hits", (of_class == y.numpy()).sum(), reduce_fx="sum")
            return loss

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.keep(*batch)

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.keep(*batch)

        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.keep(*batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def kept(self) -> dict[str, Any]:
            return {"seen": self.seen, "losses": self.losses, "latest": list(self.latest),
                    "loss_sum": self.loss_sum, "total": self.total, "confusion": self.confusion,
                    **self.counts, "average": self.average, "sum_of_losses": self.sum_of_losses,
                    "least": self.least, "most": self.most, "highest": self.highest, "latest_size": self.latest_size,
                    "labels": self.labels, **self.by_stage["all"], "numbers": sorted(self.numbers),
                    "histogram": self.histogram, "array_sum": self.array_sum, "array_most": self.array_most,
                    "hits_of_array": self.hits_of_array,
                    "of_label": [self.of_label[label] for label in range(CLASSES)], "by_class": self.by_class,
                    "weights": torch.cat([one.detach().flatten() for one in self.parameters()])}  # fmt: skip

    return Keeping()


def data(size: int, labels: Tensor | None = None) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, 6, generator=drawn).double(), torch.randint(CLASSES, (SAMPLES,), generator=drawn)
    return DataLoader(TensorDataset(x, y if labels is None else labels), batch_size=size)


def trainer_of(lightning: Any, folder: Path, *, limit_val_batches: float = 0, **limits: Any) -> Any:
    callbacks = [MicroBatchCallback(LoopSettings(learn=False, **limits))] if limits else []
    return lightning.Trainer(
        accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, max_epochs=2, limit_val_batches=limit_val_batches,
    )  # fmt: skip


def run(trainer: Any, stage: str, module: Any, loader: DataLoader[Any]) -> None:
    """Runs a stage of a trainer; the loader of the validation that `fit` looks for is not read."""
    loaders = [loader, loader] if stage == "fit" else [loader]
    getattr(trainer, stage)(module, *loaders)


# Parts of unequal and of equal sizes, which alone would not tell a count of samples from a count of steps.
@pytest.mark.parametrize(("size", "limit"), [(13, 5), (20, 10), (40, 7)])
@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_what_steps_add_up_is_of_whole_batches(
    lightning: ModuleType, tmp_path: Path, stage: str, size: int, limit: int
) -> None:
    found = []
    for limits in ({}, {"limits": limit}):
        module, trainer = (
            keeping_module(lightning),
            trainer_of(lightning, tmp_path, limit_val_batches=1.0 * (stage == "validate"), **limits),
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Of a batch that is split")
            run(trainer, stage, module, data(size))
        found.append((module.kept(), dict(trainer.callback_metrics)))
    for plain, split in zip(*found, strict=True):
        assert split.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(split[name], value, **({"rtol": 1e-6, "atol": 1e-6} if name in LOGGED
                                                              else CLOSE), msg=name)  # fmt: skip


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_a_value_that_is_no_mean_of_its_parts_is_named(lightning: ModuleType, tmp_path: Path, stage: str) -> None:
    class Spread(type(keeping_module(lightning))):  # type: ignore[misc] # a class that is made in a function
        def keep(self, x: Tensor, y: Tensor) -> Tensor:
            self.log("spread", x.sum().square())
            loss: Tensor = super().keep(x, y)
            return loss

    module = Spread()
    with pytest.warns(
        UserWarning, match=r"means of its parts' values, and not the whole batch's: 'spread'\."
    ) as caught:
        run(trainer_of(lightning, tmp_path, limits=7), stage, module, data(20))
    assert len([one for one in caught if "spread" in str(one.message)]) == 1


def drawing(draw: Callable[[Tensor], Tensor], *, tells_samples: bool = False) -> Any:
    """A module whose steps draw other random numbers for parts than for the whole batch."""

    class Drawing(type(keeping_module(import_module("lightning.pytorch")))):  # type: ignore[misc] # made in a function
        def keep(self, x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = super().keep(x + 0.1 * draw(x), y)
            return loss

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            loss = self.keep(*batch)
            return {"loss": loss, "denominator": len(batch[1])} if tells_samples else loss

    return Drawing()


def normalizing() -> Any:
    module = keeping_module(import_module("lightning.pytorch"))
    module.layers.insert(0, nn.BatchNorm1d(6, dtype=torch.float64))
    return module


@pytest.mark.filterwarnings("ignore:Samples depend on:UserWarning", "ignore:The step draws random:UserWarning")
@pytest.mark.parametrize("stage", ["fit", "test"])
@pytest.mark.parametrize("how", ["drawing", "normalizing"])
def test_what_steps_add_up_is_of_whole_batches_where_parts_have_other_values(
    lightning: ModuleType, tmp_path: Path, how: str, stage: str
) -> None:
    make = normalizing if how == "normalizing" else partial(drawing, torch.randn_like)
    plain, split = make(), make()
    run(trainer_of(lightning, tmp_path), stage, plain, data(20))
    run(trainer_of(lightning, tmp_path, limits=10), stage, split, data(20))
    expected = plain.kept()
    for name, value in split.kept().items():
        if name in ("seen", "samples", "of_label", "by_class", "labels", "latest_size", "n", "histogram"):
            assert np.array_equal(value, expected[name]), name
        elif name in ("loss_sum", "total", "loss", "average", "sum_of_losses", "least", "most", "highest"):
            # Twice as much, or half, would be a total for a mean.
            torch.testing.assert_close(value, expected[name], rtol=0.3, atol=0.2, msg=name)


@pytest.mark.filterwarnings("ignore:The step draws random:UserWarning")
def test_totals_of_random_numbers_that_cannot_be_repeated_are_added_up_and_named(
    lightning: ModuleType, tmp_path: Path
) -> None:
    generator = np.random.default_rng(0)
    noise = partial(drawing, lambda x: torch.from_numpy(generator.standard_normal(x.shape)), tells_samples=True)
    plain, split = noise(), noise()
    run(trainer_of(lightning, tmp_path), "fit", plain, data(20))
    with pytest.warns(UserWarning, match="Of a batch that is split, these values") as caught:
        run(trainer_of(lightning, tmp_path, limits=10), "fit", split, data(20))
    told = next(str(one.message) for one in caught if "'loss_sum'" in str(one.message))
    assert "it is not certain whether they are totals, means or extremes" in told
    assert split.loss_sum == pytest.approx(plain.loss_sum, rel=0.3)
    assert split.seen == plain.seen


def test_a_best_loss_that_some_parts_alone_reach_is_named(lightning: ModuleType, tmp_path: Path) -> None:
    class Best(type(keeping_module(lightning))):  # type: ignore[misc] # a class that is made in a function
        best = float("inf")

        def keep(self, x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = super().keep(x, y)
            self.best = min(self.best, float(loss.detach()))
            return loss

    with pytest.warns(UserWarning, match="Of a batch that is split, these values .*: 'best'"):
        run(trainer_of(lightning, tmp_path, limits=10), "fit", Best(), data(20))


def test_a_mean_over_weights_that_the_first_batch_has_none_of_is_noticed_later(
    lightning: ModuleType, tmp_path: Path
) -> None:
    """All samples of the first batch are of one class, so that their weighted mean is a plain one."""

    class Weighted(type(keeping_module(lightning))):  # type: ignore[misc] # a class that is made in a function
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            weights = torch.tensor([1.0, 20.0, 5.0], dtype=torch.float64)
            return F.cross_entropy(self.layers(batch[0]), batch[1], weight=weights)

    labels = torch.cat([torch.zeros(10, dtype=torch.long), torch.arange(30) % CLASSES])
    plain, split = Weighted(), Weighted()
    run(trainer_of(lightning, tmp_path), "fit", plain, data(10, labels))
    with pytest.warns(UserWarning, match="Batches are not split: cutting one changes its gradient by"):
        run(trainer_of(lightning, tmp_path, limits=4), "fit", split, data(10, labels))
    torch.testing.assert_close(split.kept()["weights"], plain.kept()["weights"], **CLOSE)


def test_centers_that_a_step_moves_are_no_random_numbers(lightning: ModuleType, tmp_path: Path) -> None:
    class Centered(type(keeping_module(lightning))):  # type: ignore[misc] # a class that is made in a function
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centers", torch.ones(CLASSES, CLASSES, dtype=torch.float64))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            logits = self.layers(x)
            with torch.no_grad():
                self.centers.index_add_(0, y, logits - self.centers[y], alpha=0.5)
            loss: Tensor = F.cross_entropy(logits, y) + (logits - self.centers[y]).square().mean()
            return loss

    with pytest.warns(UserWarning, match="Batches are not split: cutting one changes its gradient by"):
        run(trainer_of(lightning, tmp_path, limits=7), "fit", Centered(), data(20))


def series(lightning: Any) -> Any:
    """A module in PyTorch's layout of sequences [time, samples, features], with a state of [layers, samples, width]."""

    class Series(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.out = nn.GRU(6, 8, num_layers=2).double(), nn.Linear(8, CLASSES).double()
            self.features: Any = None
            self.state: Any = None
            self.seen: Any = None

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            x = batch[0].expand(5, *batch[0].shape)
            features, state = self.rnn(x)
            self.features, self.state = features.detach(), (state.detach(), state.detach() * 2)
            return F.cross_entropy(self.out(features[-1]), batch[1])

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.seen = self.rnn(batch[0].expand(5, *batch[0].shape))[0]

        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            sequences: Tensor = self.out(self.rnn(batch[0].expand(5, *batch[0].shape))[0])
            return sequences

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Series()


@pytest.mark.parametrize("limits", [{"limits": 10}, {"limits": 7}, {"limits": 1}])
def test_rows_along_another_dimension_are_those_of_whole_batches(
    lightning: ModuleType, tmp_path: Path, limits: dict[str, Any]
) -> None:
    plain, split = series(lightning), series(lightning)
    kept, predicted = [], []
    for module, given in ((plain, {}), (split, limits)):
        run(trainer_of(lightning, tmp_path, **given), "fit", module, data(20))
        run(trainer_of(lightning, tmp_path, limit_val_batches=1.0, **given), "validate", module, data(20))
        kept.append([module.features, *module.state, module.seen])
        predicted.append(trainer_of(lightning, tmp_path, **given).predict(module, data(20)))
    for one, other in zip([*kept[0], *predicted[0]], [*kept[1], *predicted[1]], strict=True):
        torch.testing.assert_close(other, one, **CLOSE)


def test_predictions_that_compare_all_samples_are_computed_whole(lightning: ModuleType, tmp_path: Path) -> None:
    class Similarities(type(series(lightning))):  # type: ignore[misc] # a class that is made in a function
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return batch[0] @ batch[0].T

    found = trainer_of(lightning, tmp_path).predict(Similarities(), data(20))
    with pytest.warns(UserWarning, match=r"not split: the output of its parts cannot be joined \(shapes") as caught:
        split = trainer_of(lightning, tmp_path, limits=10).predict(Similarities(), data(20))
    assert len([one for one in caught if "not split" in str(one.message)]) == 1
    assert all(torch.equal(one, other) for one, other in zip(found, split, strict=True))


def test_a_step_that_keeps_what_parts_do_not_make_up_is_not_split(lightning: ModuleType, tmp_path: Path) -> None:
    class Comparing(type(series(lightning))):  # type: ignore[misc] # a class that is made in a function
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.similar = batch[0] @ batch[0].T
            loss: Tensor = super().training_step(batch, batch_idx)
            return loss

    plain, split = Comparing(), Comparing()
    run(trainer_of(lightning, tmp_path), "fit", plain, data(20))
    with pytest.warns(UserWarning, match="Batches are not split: 'similar' of its parts cannot be joined"):
        run(trainer_of(lightning, tmp_path, limits=10), "fit", split, data(20))
    assert torch.equal(split.similar, plain.similar)
    assert torch.equal(split.out.weight, plain.out.weight)


def test_a_queue_of_the_latest_outputs_is_not_split(lightning: ModuleType, tmp_path: Path) -> None:
    """As MoCo has it: a part writes where the part before it has written."""

    def queueing(*, as_buffer: bool) -> Any:
        class Queueing(type(keeping_module(lightning))):  # type: ignore[misc] # a class that is made in a function
            def __init__(self) -> None:
                super().__init__()
                queue = torch.ones(32, CLASSES, dtype=torch.float64)
                if as_buffer:
                    self.register_buffer("queue", queue)
                else:
                    self.queue = queue
                self.place = 0

            def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
                out = self.layers(batch[0])
                negatives = self.queue.clone()
                places = (self.place + torch.arange(len(out))) % 32
                self.queue[places] = out.detach()
                self.place = int(places[-1]) + 1
                return F.cross_entropy(torch.cat([out, out @ negatives.T], 1), batch[1])

        return Queueing()

    for as_buffer in (True, False):
        plain, split = queueing(as_buffer=as_buffer), queueing(as_buffer=as_buffer)
        run(trainer_of(lightning, tmp_path), "fit", plain, data(10))
        with pytest.warns(UserWarning, match="Batches are not split: 'queue', which its step keeps, is no total"):
            run(trainer_of(lightning, tmp_path, limits=5), "fit", split, data(10))
        assert torch.equal(split.queue, plain.queue)
        assert torch.equal(split.kept()["weights"], plain.kept()["weights"])


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("keeps", ["a tensor", "a tuple", "a dict", "a list"])
def test_a_part_begins_with_its_rows_of_the_state_that_the_batch_before_has_left(
    lightning: ModuleType, tmp_path: Path, first: int, keeps: str
) -> None:
    """Memory runs out in the first batch, or in the third, when a state is there."""

    class Stateful(type(series(lightning))):  # type: ignore[misc] # a class that is made in a function
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.fails and batch_idx >= first and len(batch[0]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            if self.state is None:
                self.state: Any = {"a dict": {}, "a list": [None]}.get(keeps)
            key = "hidden" if keeps == "a dict" else 0
            state: Any = self.state.get(key) if keeps == "a dict" else self.state
            if keeps in ("a tuple", "a list") and state is not None:
                state = state[0]
            state = state if state is not None and state.shape[1] == len(batch[0]) else None
            features, state = self.rnn(batch[0].expand(5, *batch[0].shape), state)
            if keeps in ("a dict", "a list"):
                self.state[key] = state.detach()
            else:
                self.state = (state.detach(), state.detach().square()) if keeps == "a tuple" else state.detach()
            return F.cross_entropy(self.out(features[-1]), batch[1])

    weights = []
    for fails in (False, True):
        module = Stateful()
        module.fails = fails
        callbacks = [MicroBatchCallback(LoopSettings(learn=False))] if fails else []
        trainer = trainer_of(lightning, tmp_path)
        trainer.callbacks += callbacks
        run(trainer, "fit", module, data(8))
        weights.append(torch.cat([one.detach().flatten() for one in module.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], **CLOSE)


def metric_module(lightning: Any, most: int, *, is_manual: bool = False) -> Any:
    """A module that gives numbers, rows and both to metrics; more than `most` samples do not fit."""
    from torchmetrics import MaxMetric, MeanMetric, SumMetric
    from torchmetrics.classification import MulticlassAccuracy
    from torchmetrics.wrappers import MinMaxMetric, Running

    class Measured(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = not is_manual
            self.layer = nn.Linear(6, CLASSES).double()
            self.metrics = nn.ModuleDict({
                "mean": MeanMetric(), "sum": SumMetric(), "largest mean": MaxMetric(), "largest": MaxMetric(),
                "weighted": MeanMetric(), "samples": SumMetric(), "of rows": MeanMetric(), "each": SumMetric(),
                "by class": MeanMetric(), "root": MeanMetric(), "running": Running(MeanMetric(), window=2),
                "range": MinMaxMetric(MeanMetric()), "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
                "late": MulticlassAccuracy(CLASSES, average="micro"), "sometimes": MeanMetric(), "begun": MeanMetric(),
            }).double()  # fmt: skip

        def measure(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.layer(x)
            losses = F.cross_entropy(logits, y, reduction="none")
            loss, metrics = losses.mean(), self.metrics
            metrics["mean"](loss)
            metrics["sum"].update(value=loss.item())
            metrics["largest mean"](np.float32(loss.item()))
            metrics["largest"](losses.max())
            metrics["weighted"](loss, weight=len(y))
            metrics["samples"](len(y))
            metrics["of rows"](losses)
            for own in losses:
                metrics["each"].update(own)
            metrics["by class"].update(logits.mean(0))
            metrics["root"].update(loss.sqrt())
            metrics["running"](loss)
            metrics["range"].update(loss)
            metrics["accuracy"](logits, y)
            self.batches = getattr(self, "batches", 0) + 1
            if self.batches % 3 == 0:
                metrics["sometimes"].update(loss)
                metrics["begun"].reset()
            metrics["begun"].update(loss)
            for name in ("mean", "largest mean", "weighted", "accuracy"):
                self.log(name, metrics[name], on_step=True, on_epoch=True)
            if len(y) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return loss

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = self.measure(*batch)
            if is_manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.metrics["mean"](loss)
                self.metrics["late"].update(self.layer(batch[0]), batch[1])
            return loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.measure(*batch)

        def on_train_epoch_end(self) -> None:
            self.counted = {name: (metric.compute(), metric._update_count) for name, metric in self.metrics.items()}

        on_validation_epoch_end = on_train_epoch_end

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Measured()


LATE = (
    "Of a batch that is split in manual optimization, training_step ends for its last part alone: "
    "the values metrics.late are of that part. Compute them before manual_backward."
)


@pytest.mark.filterwarnings("ignore:.*`forward`.*:UserWarning")
@pytest.mark.parametrize("how", ["training", "validation", "manual"])
def test_metrics_that_are_given_numbers_of_a_batch_have_those_of_whole_batches(
    lightning: ModuleType, tmp_path: Path, how: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(26, 6, generator=generator).double(), torch.randint(0, CLASSES, (26,), generator=generator)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    results: list[Any] = []
    for most, callbacks in ((99, []), (3, [MicroBatchCallback(LoopSettings(learn=False))])):
        module = metric_module(lightning, most, is_manual=how == "manual")
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                                    enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
                                    default_root_dir=tmp_path)  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if how == "validation":
                trainer.validate(module, loader, verbose=False)
            else:
                trainer.fit(module, loader)
        told = [str(one.message) for one in caught if "of a batch that is split" in str(one.message).lower()]
        results.append((module.counted, dict(trainer.callback_metrics)))
    # The root of a mean is none of its parts' roots.
    assert told[-1].endswith("are means of its parts' values, and not the whole batch's: 'root'.")
    assert told[:-1] == ([LATE] if how == "manual" else [])
    root, root_in_parts = (counted.pop("root") for counted, _ in results)
    late, late_in_parts = (counted.pop("late") for counted, _ in results)
    assert (late != late_in_parts) == (how == "manual")
    assert abs(root[0] - root_in_parts[0]) < 0.1
    assert root[1] == root_in_parts[1]
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)
