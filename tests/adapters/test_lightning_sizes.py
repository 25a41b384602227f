"""`scale_batch_size` in place of Lightning's tuner: what Lightning's own tests ask of that, as far as it applies."""

import logging
from collections import namedtuple
from collections.abc import Iterator
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from can_train import scale_batch_size
from can_train.errors import ArgumentError, CanTrainError
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


# Data


def test_data_may_be_made_in_setup_of_a_copy(lightning: ModuleType, tmp_path: Path) -> None:
    class Data(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
        batch_size = 4

        def prepare_data(self) -> None:
            self.log.append("prepare_data")

        def setup(self, stage: str) -> None:
            self.log.append(stage)
            self.samples = TensorDataset(torch.ones(60, 4))

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.samples, batch_size=self.batch_size)

    model, data = module(lightning, batch_size=None), Data()
    data.log = []
    used = trainer(lightning, tmp_path, limit_train_batches=0.5, limit_val_batches=0.1)
    assert scale_batch_size(used, model, datamodule=data) == 60
    assert (data.log, hasattr(data, "samples"), data.batch_size) == ([], False, 60)
    assert (used.limit_train_batches, used.limit_val_batches) == (0.5, 0.1)


class Stream(IterableDataset[Any]):
    """Samples of a few rows each."""

    def __init__(self, samples: int, rows: int = 1) -> None:
        self.samples, self.rows, self.reads = samples, rows, 0
        self.lines: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        self.reads += 1
        return (torch.ones(self.rows, 4) for _ in range(self.samples))


def rows_of(samples: list[Tensor]) -> list[Tensor]:
    return [torch.cat(samples)]


@pytest.mark.parametrize(
    ("samples", "rows", "drop_last", "size"),
    [
        (40, 1, False, 40),
        (5, 1, False, 5),
        (40, 2, False, 40),
        (40, 1, True, 40),
    ],
)
def test_a_stream_gives_no_larger_batch_than_it_has_samples(
    lightning: ModuleType, tmp_path: Path, samples: int, rows: int, drop_last: bool, size: int
) -> None:
    class Streamed(type(module(lightning))):  # type: ignore[misc]
        def train_dataloader(self) -> DataLoader[Any]:
            options = {"collate_fn": rows_of, "drop_last": drop_last}
            return DataLoader(Stream(samples, rows), batch_size=self.batch_size, **options)

    model = Streamed(2)
    assert 0.93 * size <= scale_batch_size(trainer(lightning, tmp_path), model) <= size
    assert model.batch_size >= 0.93 * size


def test_a_stream_that_is_given_is_not_used_up(lightning: ModuleType, tmp_path: Path) -> None:
    stream = Stream(30)
    given = DataLoader(stream, batch_size=2, collate_fn=rows_of)
    assert scale_batch_size(trainer(lightning, tmp_path), module(lightning, batch_size=None), given) == 30
    assert stream.reads == 0


def test_the_largest_size_may_be_bounded(lightning: ModuleType, tmp_path: Path) -> None:
    model = module(lightning)
    assert scale_batch_size(trainer(lightning, tmp_path), model, upper=50) == 50
    assert scale_batch_size(trainer(lightning, tmp_path), model, upper=3) == 3


def test_a_sampler_decides_the_number_of_samples(lightning: ModuleType, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    given = loader(4, sampler=SubsetRandomSampler(range(70), generator=generator))
    before = generator.get_state()
    assert scale_batch_size(trainer(lightning, tmp_path), module(lightning, batch_size=None), given) == 70
    assert torch.equal(generator.get_state(), before)


def test_batches_of_a_sampler_of_the_module_are_counted_by_rows(lightning: ModuleType, tmp_path: Path) -> None:
    class Batches:
        def __init__(self, size: int) -> None:
            self.batches = list(BatchSampler(SequentialSampler(range(90)), size, drop_last=False))

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.batches)

        def __len__(self) -> int:
            return len(self.batches)

    class Sampled(type(module(lightning))):  # type: ignore[misc]
        def train_dataloader(self) -> DataLoader[Any]:
            return loader(0, batch_sampler=Batches(self.batch_size))

    assert scale_batch_size(trainer(lightning, tmp_path), Sampled(2)) == 90


@pytest.mark.parametrize("share", [1, 2])
def test_a_loader_may_take_a_share_of_the_size(lightning: ModuleType, tmp_path: Path, share: int) -> None:
    class Shared(type(module(lightning))):  # type: ignore[misc]
        def train_dataloader(self) -> DataLoader[Any]:
            return loader(self.batch_size // share)

    assert scale_batch_size(trainer(lightning, tmp_path), Shared(2)) == SAMPLES * share


@pytest.mark.parametrize("stream", [False, True])
def test_batches_that_do_not_follow_are_refused(lightning: ModuleType, tmp_path: Path, stream: bool) -> None:
    class Fixed(type(module(lightning))):  # type: ignore[misc]
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader([[torch.ones(16, 4)]] * 9, batch_size=None) if stream else loader(16)

    model = Fixed(2)
    with pytest.raises(ArgumentError, match=r"'batch_size': it is 16 at 8 and at 16.\nMake the loader with it"):
        scale_batch_size(trainer(lightning, tmp_path), model)
    assert model.batch_size == 2


def test_samples_that_cannot_be_counted_need_a_bound(lightning: ModuleType, tmp_path: Path) -> None:
    class Texts(type(module(lightning))):  # type: ignore[misc]
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Stream(100), batch_size=self.batch_size, collate_fn=len)

        def training_step(self, batch: int, batch_idx: int) -> Tensor:
            return self.layer(torch.ones(batch, 4)).mean()

    with pytest.raises(ArgumentError, match=r"differ or are missing.\nGive the size of the largest batch \(upper=\)"):
        scale_batch_size(trainer(lightning, tmp_path), Texts(2))
    assert scale_batch_size(trainer(lightning, tmp_path), Texts(2), upper=20) == 20


def test_several_loaders_are_refused(lightning: ModuleType, tmp_path: Path) -> None:
    class Several(type(module(lightning))):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return {"left": loader(self.batch_size), "right": loader(self.batch_size)}

    used = trainer(lightning, tmp_path)
    with pytest.raises(ArgumentError, match=r"there are 2.\nSearch with each by itself \(train_dataloaders=\)"):
        scale_batch_size(used, Several(2))
    with pytest.raises(ArgumentError, match=r"there are 3.\nSearch with each by itself \(dataloaders=\)"):
        scale_batch_size(used, Several(2), method="test", dataloaders=[loader(2)] * 3)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`", "ignore:Found `dataloader_iter`")
def test_a_step_may_take_its_batches_from_the_loader(lightning: ModuleType, tmp_path: Path) -> None:
    class Takes(type(module(lightning))):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return super().training_step(batch, 0)

    used = trainer(lightning, tmp_path)
    assert scale_batch_size(used, Takes(2)) == SAMPLES


@pytest.mark.parametrize("settings", [{"limit_train_batches": 0}, {"limit_train_batches": 0.0}])
def test_a_training_without_batches_is_refused(lightning: ModuleType, tmp_path: Path, settings: Any) -> None:
    with pytest.raises(ArgumentError, match=r"it gave none.\nGive it samples"):
        scale_batch_size(trainer(lightning, tmp_path, **settings), module(lightning))


# Methods


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
@pytest.mark.parametrize("is_given", [False, True])
def test_a_size_is_found_for_each_method(lightning: ModuleType, tmp_path: Path, method: str, is_given: bool) -> None:
    name = {"validate": "validation"}.get(method, method)

    def step(self: Any, batch: list[Tensor], batch_idx: int) -> list[Tensor] | None:
        if len(batch[0]) > 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return [] if method == "predict" else None

    def own_loader(self: Any) -> DataLoader[Any]:
        return loader(self.batch_size)

    hooks = {f"{name}_step": step, f"{name.removesuffix('idation')}_dataloader": own_loader}
    model = type("Evaluated", (type(module(lightning, fits=0)),), hooks)(2)
    given = {"dataloaders": loader(4)} if is_given else {}
    used = trainer(lightning, tmp_path, **{f"limit_{name.removesuffix('idation')}_batches": 0.1})
    assert 28 <= scale_batch_size(used, model, method=method, **given) <= 30
    assert scale_batch_size(used, model, method=method, upper=7, **given) == 7


def test_validation_loaders_are_used_as_they_are(lightning: ModuleType, tmp_path: Path) -> None:
    class Validated(type(module(lightning))):  # type: ignore[misc]
        def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int) -> None:
            assert len(batch[0]) == 5

    model = Validated(None)
    assert scale_batch_size(trainer(lightning, tmp_path), model, loader(2), [loader(5), loader(5)]) == SAMPLES


def test_the_optimizers_state_counts_where_an_epoch_is_one_batch(lightning: ModuleType, tmp_path: Path) -> None:
    class Second(type(module(lightning))):  # type: ignore[misc]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.global_step and len(batch[0]) > 150:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().training_step(batch, batch_idx)

    used = trainer(lightning, tmp_path)
    used.fit_loop.max_epochs = 5
    assert scale_batch_size(used, Second(2)) <= 150


def test_a_trial_is_a_few_steps_and_then_a_validation(lightning: ModuleType, tmp_path: Path) -> None:
    steps = []

    class Counted(type(module(lightning))):  # type: ignore[misc]
        def val_dataloader(self) -> DataLoader[Any]:
            return loader(self.batch_size)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            steps.append("train")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            steps.append("validate")

    assert scale_batch_size(trainer(lightning, tmp_path, accumulate_grad_batches=2), Counted(2), upper=1) == 1
    assert steps == 3 * [*6 * ["train"], *3 * ["validate"]]


def test_a_schedule_sees_the_epochs_of_the_training(lightning: ModuleType, tmp_path: Path) -> None:
    class Scheduled(type(module(lightning))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            rest = self.trainer.max_epochs - 2
            decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / rest)
            return [optimizer], [decay]

    used = trainer(lightning, tmp_path)
    used.fit_loop.max_epochs = 2
    with pytest.raises(ZeroDivisionError):
        scale_batch_size(used, Scheduled(2))
    used.fit_loop.max_epochs = 10
    assert scale_batch_size(used, Scheduled(2)) == SAMPLES


# Places of the size


@pytest.mark.parametrize("name", ["config.batch_size", "hparams.data.size", "inner.batch_size"])
def test_the_size_may_be_nested(lightning: ModuleType, tmp_path: Path, name: str) -> None:
    class Nested(type(module(lightning))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(None)
            self.save_hyperparameters({"data": {"size": 2}})
            self.config = {"batch_size": 2}
            self.inner = module(lightning)

        def own_size(self) -> int:
            sizes = (self.config["batch_size"], self.hparams["data"]["size"], self.inner.batch_size)
            return max(sizes)

    model = Nested()
    assert scale_batch_size(trainer(lightning, tmp_path), model, batch_arg_name=name) == SAMPLES
    assert model.own_size() == SAMPLES


def test_an_attribute_that_follows_hyper_parameters_is_not_set(lightning: ModuleType, tmp_path: Path) -> None:
    class Follows(type(module(lightning, hyper=True))):  # type: ignore[misc]
        @property
        def batch_size(self) -> int:
            return int(self.hparams["batch_size"])

    model = Follows(2)
    assert scale_batch_size(trainer(lightning, tmp_path), model) == SAMPLES == model.batch_size


def test_a_datamodule_may_have_the_size_as_hyper_parameter_and_come_first(
    lightning: ModuleType, tmp_path: Path
) -> None:
    class Data(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
        def __init__(self, size: int) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> DataLoader[Any]:
            return loader(self.hparams["size"])

        def test_dataloader(self) -> DataLoader[Any]:
            return loader(self.hparams["size"])

    class Tested(type(module(lightning))):  # type: ignore[misc]
        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            assert len(batch[0]) <= 120

    model, data, used = Tested(None), Data(3), trainer(lightning, tmp_path)
    size = scale_batch_size(used, model, dataloaders=data, method="test", upper=120, batch_arg_name="size")
    assert size == data.hparams["size"] == 120
    assert scale_batch_size(used, model, data, batch_arg_name="size") == SAMPLES
    assert data.hparams["size"] == SAMPLES


# What stays as it was


def test_no_callback_or_logger_of_the_user_takes_part(lightning: ModuleType, tmp_path: Path) -> None:
    calls = []

    class Noted(lightning.Callback):  # type: ignore[misc, name-defined]
        def setup(self, *arguments: Any, **options: Any) -> None:
            calls.append("setup")

    class Logger(import_module("lightning.pytorch.loggers").CSVLogger):  # type: ignore[misc]
        def log_metrics(self, *arguments: Any, **options: Any) -> None:
            calls.append("log")

    class Logs(type(module(lightning))):  # type: ignore[misc]
        def configure_callbacks(self) -> Any:
            return Noted()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.log("x", 1.0)
            self.logger.experiment.add_scalar("x", 1.0)
            self.mine.log_metrics({"x": 1.0})
            return super().training_step(batch, batch_idx)

    model, logger = Logs(2), Logger(tmp_path / "logs")
    model.mine = logger
    used = lightning.Trainer(accelerator="cpu", default_root_dir=tmp_path, logger=logger, callbacks=[Noted()])
    callbacks = list(used.callbacks)
    assert scale_batch_size(used, model) == SAMPLES
    assert (calls, used.callbacks, used.loggers, list(tmp_path.iterdir())) == ([], callbacks, [logger], [])


def test_a_copy_does_not_reach_the_trainer(lightning: ModuleType, tmp_path: Path) -> None:
    seen = []

    class Outer(type(module(lightning))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(2)
            self.inner = module(lightning)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            seen.extend([self.trainer, self.inner.trainer, self.held])
            return super().training_step(batch, batch_idx)

    model, used = Outer(), trainer(lightning, tmp_path)
    model.held = None
    used.fit(model)
    model.held = used
    seen.clear()
    assert scale_batch_size(used, model) == SAMPLES
    assert used not in seen
    assert len({id(each) for each in seen[:3]}) == 2
    assert (model.trainer, model.inner.trainer, model.held) == (used, used, used)


@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_an_error_in_a_trial_leaves_everything_as_it_was(lightning: ModuleType, tmp_path: Path, error: type) -> None:
    class Fails(type(module(lightning))):  # type: ignore[misc]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            torch.rand(1)
            self.seen = batch
            if len(batch[0]) > 20:
                raise error("of the user")
            return super().training_step(batch, batch_idx)

    model, used = Fails(2), trainer(lightning, tmp_path)
    generator = torch.Generator().manual_seed(1)
    given = loader(4, shuffle=True, generator=generator)
    state, drawn, attributes = generator.get_state(), torch.get_rng_state(), set(vars(model))
    with pytest.raises(error, match="of the user"):
        scale_batch_size(used, model, given)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (set(vars(model)), model.batch_size, given.batch_size) == (attributes, 2, 4)
    assert (used.global_step, used.train_dataloader, used.model) == (0, None, None)


def test_what_cannot_be_copied_is_named_with_a_remedy_that_works(lightning: ModuleType, tmp_path: Path) -> None:
    class Locked(type(module(lightning))):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            self.lock = Lock()

    model = Locked(2)
    assert scale_batch_size(trainer(lightning, tmp_path), model) == SAMPLES
    model.lock = Lock()
    with pytest.raises(CanTrainError, match=r"Locked.lock cannot be copied \(TypeError: .*\nMake it in setup\(\)"):
        scale_batch_size(trainer(lightning, tmp_path), model)


# Trainers


def test_the_older_name_of_lightning_works(tmp_path: Path) -> None:
    older = import_module("pytorch_lightning")
    assert 28 <= scale_batch_size(trainer(older, tmp_path), module(older, fits=30)) <= 30


def test_a_trainer_of_a_class_with_other_arguments_is_used(lightning: ModuleType, tmp_path: Path) -> None:
    class Own(lightning.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, folder: Path) -> None:
            super().__init__(accelerator="cpu", default_root_dir=folder, logger=False, max_epochs=1)

    assert scale_batch_size(Own(tmp_path), module(lightning)) == SAMPLES


def test_trials_run_on_the_accelerator_device_and_precision_of_the_trainer(
    lightning: ModuleType, tmp_path: Path
) -> None:
    class Chip(import_module("lightning.pytorch.accelerators").CPUAccelerator):  # type: ignore[misc]
        pass

    class Double(import_module("lightning.pytorch.plugins.precision").DoublePrecision):  # type: ignore[misc]
        pass

    seen = set()

    class Seen(type(module(lightning))):  # type: ignore[misc]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            plugin = type(self.trainer.precision_plugin)
            seen.add((type(self.trainer.accelerator), plugin, self.device.index, batch[0].dtype))
            return super().training_step(batch, batch_idx)

    strategy = import_module("lightning.pytorch.strategies").SingleDeviceStrategy(device=torch.device("cpu", 0))
    settings = {"accelerator": Chip(), "strategy": strategy, "plugins": Double(), "logger": False}
    used = lightning.Trainer(default_root_dir=tmp_path, max_epochs=1, **settings)
    assert scale_batch_size(used, Seen(2)) == SAMPLES
    assert seen == {(Chip, Double, 0, torch.float64)}


def test_with_fast_dev_run_nothing_is_searched(lightning: ModuleType, tmp_path: Path) -> None:
    model = module(lightning)
    used = trainer(lightning, tmp_path, fast_dev_run=True)
    with pytest.warns(UserWarning, match="No batch size is searched with fast_dev_run=True: batch_size stays 2"):
        assert scale_batch_size(used, model) == 2
    assert model.batch_size == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "prediction"}, r"'prediction'.\nValid, nearest first: predict"),
        ({"upper": 0}, r"upper=0.\nLeave upper out"),
        ({"upper": 2.5}, r"upper=2.5"),
        ({"batch_arg_name": None}, r'batch_arg_name=None.\nLeave it out, or name it: batch_arg_name="batch_size"'),
        ({"datamodule": object(), "train_dataloaders": loader(2)}, "both.\nLeave out the datamodule or the loaders"),
        ({"model": nn.Linear(1, 1)}, r"model is a LightningModule of Lightning: Linear.\nCall scale_batch_size\(tr"),
        ({"trainer": "gpu"}, "trainer is a Trainer of Lightning: str"),
        ({"batch_arg_name": "size"}, "as 'size': neither has"),
        ({"dataloaders": loader(2)}, "fit takes loaders as train_dataloaders and val_dataloaders"),
        ({"method": "test", "train_dataloaders": loader(2)}, "test takes loaders as dataloaders"),
        ({"method": "test", "val_dataloaders": loader(2)}, "test takes loaders as dataloaders"),
    ],
)
def test_wrong_arguments_are_refused(lightning: ModuleType, tmp_path: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        scale_batch_size(**{"trainer": trainer(lightning, tmp_path), "model": module(lightning), **arguments})


def test_a_trainer_of_several_devices_is_refused(lightning: ModuleType, tmp_path: Path) -> None:
    used = trainer(lightning, tmp_path, devices=2, strategy="ddp")
    with pytest.raises(ArgumentError, match=r"the trainer has 2.\nSearch with Trainer\(devices=1\)"):
        scale_batch_size(used, module(lightning))


def test_a_compiled_module_that_was_trained_computes_nothing_in_trials(lightning: ModuleType, tmp_path: Path) -> None:
    model, used = module(lightning), trainer(lightning, tmp_path)
    compiled = torch.compile(model, backend="eager")
    used.fit(compiled)
    model.zero_grad()
    assert scale_batch_size(used, compiled) == SAMPLES == model.batch_size
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_no_copy_is_kept(lightning: ModuleType, tmp_path: Path) -> None:
    copies = []

    class Counted(type(module(lightning))):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            copies.append(ref(self))

    scale_batch_size(trainer(lightning, tmp_path), Counted(2))
    assert copies
    assert [copied() for copied in copies if copied() is not None] == []


def test_trials_leave_out_the_notes_of_each_trainer(lightning: ModuleType, tmp_path: Path) -> None:
    notes, logger = [], import_module("lightning.pytorch.utilities.rank_zero").rank_zero_module.log
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    model, used = module(lightning), trainer(lightning, tmp_path)
    logger.addHandler(handler)
    try:
        scale_batch_size(used, model)
        assert notes == []
        used.fit(model)
        assert "max_epochs=1" in notes[-1]
    finally:
        logger.removeHandler(handler)


def test_a_size_that_cannot_be_set_is_refused(lightning: ModuleType, tmp_path: Path) -> None:
    model = module(lightning)
    model.config = namedtuple("Config", "size")(2)
    with pytest.raises(ArgumentError, match=r"Config.size cannot \(can't set attribute\).\nName another attribute"):
        scale_batch_size(trainer(lightning, tmp_path), model, batch_arg_name="config.size")


def test_a_stream_that_cannot_be_copied_is_named(lightning: ModuleType, tmp_path: Path) -> None:
    stream = Stream(9)
    stream.lines = iter([]), (line for line in [1])
    given = DataLoader(stream, batch_size=2, collate_fn=rows_of)
    with pytest.raises(CanTrainError, match=r"Stream.lines cannot be copied .*\n.*of a stream: in __iter__"):
        scale_batch_size(trainer(lightning, tmp_path), module(lightning, batch_size=None), given)
