"""Values that steps of a LightningModule keep and log are those of whole batches where batches are split."""

import warnings
from collections import deque
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from can_train import LoopSettings, MicroBatchCallback
from fakes.lightning_warnings import QUIET_LIGHTNING

CLASSES, SAMPLES = 3, 40
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
            self.seen, self.loss_sum, self.best = 0, 0.0, float("inf")
            self.total = torch.zeros((), dtype=torch.float64)
            self.confusion = torch.zeros(CLASSES, CLASSES)
            self.losses, self.latest = list[float](), deque[float](maxlen=2)
            self.counts = {"samples": 0, "hits": torch.zeros(()), "loss": 0.0}
            self.register_buffer("average", torch.zeros((), dtype=torch.float64))
            self.register_buffer("sum_of_losses", torch.zeros((), dtype=torch.float64))

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
            self.best = min(self.best, float(value))
            self.average.mul_(0.9).add_(0.1 * value)
            self.sum_of_losses += value * len(y)
            self.log("mean", value)
            self.log("sum", value * len(y))
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
            warnings.filterwarnings("error", message=".*of its parts")
            run(trainer, stage, module, data(size))
        # No difference from infinity is a number.
        assert module.best < 10
        found.append((module.kept(), dict(trainer.callback_metrics)))
    for plain, split in zip(*found, strict=True):
        assert split.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(split[name], value, **({"rtol": 1e-6, "atol": 1e-6} if name in ("mean", "sum")
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
