"""`scale_batch_size` in place of Lightning's tuner: what Lightning's own tests ask of that, as far as it applies."""

from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from can_train import scale_batch_size
from can_train.errors import ArgumentError
from fakes.lightning_warnings import QUIET_LIGHTNING

SAMPLES = 200

pytestmark = [pytest.mark.slow, QUIET_LIGHTNING]


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    return import_module("lightning.pytorch")


def loader(size: int, **options: Any) -> DataLoader[Any]:
    sizes = {} if "batch_sampler" in options else {"batch_size": size}
    return DataLoader(TensorDataset(torch.ones(SAMPLES, 4)), **sizes, **options)


def module(lightning: Any, *, fits: int = 10**9, batch_size: int | None = 2, hyper: bool = False) -> Any:
    """A module of which batches beyond a size run out of memory, in training or in validation."""

    class Module(lightning.LightningModule):
        def __init__(self, batch_size: int | None) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            if hyper:
                self.save_hyperparameters()
            elif batch_size is not None:
                self.batch_size = batch_size

        def own_size(self) -> int:
            return self.hparams.batch_size if hyper else getattr(self, "batch_size", 1)

        def train_dataloader(self) -> DataLoader[Any]:
            return loader(self.own_size(), shuffle=True)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if len(batch[0]) > fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module(batch_size)


def trainer(lightning: Any, folder: Path, **settings: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(accelerator="cpu", default_root_dir=folder, max_epochs=1, **quiet, **settings)


@pytest.mark.parametrize("fits", [1, 37, 199])
@pytest.mark.parametrize("hyper", [False, True])
def test_the_largest_size_that_fits_is_found_and_set(
    lightning: ModuleType, tmp_path: Path, fits: int, hyper: bool
) -> None:
    model = module(lightning, fits=fits, hyper=hyper)
    found = scale_batch_size(trainer(lightning, tmp_path), model)
    assert 0.95 * fits <= found <= fits
    assert model.own_size() == found


def test_the_data_set_is_the_largest_batch(lightning: ModuleType, tmp_path: Path) -> None:
    assert scale_batch_size(trainer(lightning, tmp_path), module(lightning)) == SAMPLES


def test_nothing_fits_and_nothing_is_set(lightning: ModuleType, tmp_path: Path) -> None:
    model = module(lightning, fits=0)
    assert (scale_batch_size(trainer(lightning, tmp_path), model), model.batch_size) == (0, 2)


def test_model_trainer_generators_and_folder_stay_as_they_are(lightning: ModuleType, tmp_path: Path) -> None:
    model, used = module(lightning, fits=20), trainer(lightning, tmp_path)
    before, progress = deepcopy(model.state_dict()), used.fit_loop.state_dict()
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    scale_batch_size(used, model)
    assert torch.equal(torch.rand(1), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (used.global_step, used.fit_loop.state_dict()) == (0, progress)
    assert not list(tmp_path.iterdir())
    used.fit(model)
    assert used.global_step == SAMPLES // 20
    # A model that has been trained is searched with, too.
    assert scale_batch_size(used, model) == 20
    assert model.trainer is used


@pytest.mark.parametrize("of_model", [2, None])
def test_a_datamodule_has_the_batch_size(lightning: ModuleType, tmp_path: Path, of_model: int | None) -> None:
    class Data(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
        batch_size = 4

        def train_dataloader(self) -> DataLoader[Any]:
            return loader(self.batch_size)

    model, data = module(lightning, fits=50, batch_size=of_model), Data()
    assert scale_batch_size(trainer(lightning, tmp_path), model, datamodule=data) == 50
    assert (data.batch_size, getattr(model, "batch_size", None)) == (50, None if of_model is None else 50)


def test_validation_counts_too(lightning: ModuleType, tmp_path: Path) -> None:
    class Validated(type(module(lightning))):  # type: ignore[misc]
        def val_dataloader(self) -> DataLoader[Any]:
            return loader(self.batch_size)

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if len(batch[0]) > 30:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    assert scale_batch_size(trainer(lightning, tmp_path), Validated(2)) == 30


def test_a_loader_that_is_passed_to_fit_is_searched_with(lightning: ModuleType, tmp_path: Path) -> None:
    model = module(lightning, fits=25, batch_size=None)
    assert scale_batch_size(trainer(lightning, tmp_path), model, loader(4, shuffle=True)) == 25


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "as 'batch_size': neither has"),
        (loader(1, batch_sampler=[[0, 1], [2]]), "without a batch sampler of its own: list"),
        ([torch.ones(2, 4)], "without a batch sampler of its own: list"),
    ],
)
def test_what_has_no_size_to_change_is_refused(lightning: ModuleType, tmp_path: Path, given: Any, message: str) -> None:
    model = module(lightning, batch_size=None)
    with pytest.raises(ArgumentError, match=message):
        scale_batch_size(trainer(lightning, tmp_path), model, given)
