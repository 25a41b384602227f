"""Finds the largest batch that a Lightning module runs with, in trials on copies of it."""

import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from numbers import Integral
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from can_train.errors import ArgumentError, CanTrainError, DataError, nearest_first
from can_train.fit.collate import samples_in
from can_train.fit.random_state import capture_generators, restore_generators
from can_train.fit.search import find_max_size
from can_train.memory.meters import meter_of
from can_train.memory.out_of_memory import is_out_of_memory

_STEPS: Final = 3  # Steps of a trial: the second one has the optimizer's state
_START: Final = 8  # First size that is tried
_UPPER: Final = 2**20  # Largest batch that is tried where nobody knows the number of samples
# Each method of a trainer that has batches, with the trainer's attribute that has their loaders.
_LOADERS: Final = {
    "fit": "train_dataloader",
    "validate": "val_dataloaders",
    "test": "test_dataloaders",
    "predict": "predict_dataloaders",
}


def scale_batch_size(  # noqa: PLR0913 - the arguments of Lightning's method, in its order
    trainer: Any,
    model: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    dataloaders: Any = None,
    datamodule: Any = None,
    method: str = "fit",
    *,
    batch_arg_name: str = "batch_size",
    upper: int | None = None,
) -> int:
    """Finds the largest batch that a Lightning module runs with, as `Tuner(trainer).scale_batch_size(model)` does.

    It is never larger than a batch that a loader gave and that was seen to fit. A trial runs a few steps, in `fit` with
    validation, of copies on the trainer's device, where `prepare_data` and `setup` run too. No callback and no logger
    takes part. Model, datamodule, trainer, loaders and random generators stay as they are.

    Args:
        trainer: The `Trainer` that will run, on one device. With `fast_dev_run` nothing is searched, with a warning.
        model: The `LightningModule`.
        train_dataloaders: A loader that `fit` would be given, in place of one that the model or datamodule makes; or
            the datamodule.
        val_dataloaders: Loaders that `fit` would be given. Their batches stay as they are.
        dataloaders: A loader that `validate`, `test` or `predict` would be given; or the datamodule.
        datamodule: The `LightningDataModule`, where there is one.
        method: The trainer's method that the batch is for: `fit`, `validate`, `test` or `predict`.
        batch_arg_name: Attribute or hyper-parameter of the model or datamodule that has the batch size, with dots where
            it is nested (`config.batch_size`). It is set to the size that was found.
        upper: Largest size to try; None: the number of samples.

    Returns:
        The largest batch size that was seen to fit; 0 where nothing fits.

    Raises:
        ArgumentError: Nothing has a batch size that could be set, or the batches do not follow it; an argument is
            wrong.
        CanTrainError: Something cannot be copied.
    """
    _check(trainer, model, method, batch_arg_name, upper)
    if hasattr(train_dataloaders, "prepare_data"):
        train_dataloaders, datamodule = None, train_dataloaders
    if hasattr(dataloaders, "prepare_data"):
        dataloaders, datamodule = None, dataloaders
    _check_loaders(method, (train_dataloaders, val_dataloaders, dataloaders), datamodule)
    given = _Given(train_dataloaders, val_dataloaders) if method == "fit" else _Given(dataloaders)
    # Trials run uncompiled: each size would be compiled anew.
    model = getattr(model, "_orig_mod", model)
    holders = list(_holders((model, datamodule), batch_arg_name))
    if not holders and given.loader is None:
        raise ArgumentError(
            f"The model or the datamodule has the batch size as {batch_arg_name!r}", value="neither has",
            remedy=f"Name it (batch_arg_name=), or give the loader ({_argument(method)}=)",
        )  # fmt: skip
    if trainer.fast_dev_run:
        size: int = holders[-1].size if holders else given.loader.batch_size
        warn = import_module(f"{_package(trainer)}.utilities.rank_zero").rank_zero_warn
        warn(f"No batch size is searched with fast_dev_run={trainer.fast_dev_run!r}: {batch_arg_name} stays {size}.")
        return size
    size = _Trials(trainer, method, batch_arg_name, (model, datamodule, given), upper).search()
    for holder in holders if size else ():
        holder.set(size)
    return size


@dataclass(frozen=True)
class _Given:
    """Loaders that a trainer's method would be given; None: it makes them."""

    loader: Any  # whose batches are resized
    validation: Any = None


def _check(trainer: Any, model: Any, method: str, name: str, upper: int | None) -> None:
    """Raises ArgumentError where an argument is of the wrong kind, or cannot be searched with."""
    for argument, value, kind in (("trainer", trainer, "Trainer"), ("model", model, "LightningModule")):
        value = getattr(value, "_orig_mod", value)
        if kind not in [base.__name__ for base in type(value).__mro__]:
            raise ArgumentError(f"{argument} is a {kind} of Lightning", value=type(value).__name__,
                                remedy="Call scale_batch_size(trainer, model)")  # fmt: skip
    if method not in _LOADERS:
        valid = ", ".join(nearest_first(str(method), _LOADERS))
        raise ArgumentError("Unknown method of a trainer", value=repr(method), remedy=f"Valid, nearest first: {valid}")
    if not isinstance(name, str):
        raise ArgumentError("The attribute that has the batch size is named", value=f"batch_arg_name={name!r}",
                            remedy='Leave it out, or name it: batch_arg_name="batch_size"')  # fmt: skip
    if upper is not None and (not isinstance(upper, Integral) or upper < 1):
        raise ArgumentError("The largest size to try is a whole number of at least 1", value=f"upper={upper!r}",
                            remedy="Leave upper out to try up to the number of samples")  # fmt: skip
    if trainer.world_size > 1:
        raise ArgumentError(
            "A batch size is searched on one device", value=f"the trainer has {trainer.world_size}",
            remedy="Search with Trainer(devices=1), and give each device that size; MicroBatchCallback splits a "
                   "batch that does not fit beside the buckets of DDP",
        )  # fmt: skip


def _argument(method: str) -> str:
    return "train_dataloaders" if method == "fit" else "dataloaders"


def _check_loaders(method: str, loaders: tuple[Any, Any, Any], datamodule: Any) -> None:
    """Raises ArgumentError where loaders are given that the method does not take, or whose batches have no size."""
    train, validation, evaluation = loaders
    fits = method == "fit"
    if (evaluation if fits else (train if validation is None else validation)) is not None:
        names = "train_dataloaders and val_dataloaders" if fits else "dataloaders"
        raise ArgumentError(f"{method} takes loaders as {names}", value="another argument has some",
                            remedy=f"Give them as {names}, or name the method that they are for (method=)")  # fmt: skip
    if datamodule is not None and any(loader is not None for loader in loaders):
        raise ArgumentError("A datamodule makes loaders, or they are given", value="both",
                            remedy="Leave out the datamodule or the loaders")  # fmt: skip
    given = train if fits else evaluation
    if given is not None:
        _refuse_several(method, list(_loaders_in(given)))
        _resized(given, 1)


def _refuse_several(method: str, loaders: Sequence[Any]) -> None:
    if len(loaders) > 1:
        raise ArgumentError(f"A size is searched with one loader of {method}", value=f"there are {len(loaders)}",
                            remedy=f"Search with each by itself ({_argument(method)}=)")  # fmt: skip


class _DataEndError(Exception):
    """Ends a search at a size that is larger than the largest batch."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size  # Of the largest batch


@dataclass
class _Batches:
    """The batches of a trial."""

    rows: int = 0  # In the largest of them
    number: int = 0
    are_counted: bool = True  # Whether their rows could be counted
    asked: int | None = None  # Batch size that the loader says; None where it says none
    samples: int | None = None  # Of the loader; None where nobody knows

    def add(self, batch: Any, loader: Any) -> None:
        """Counts a batch, and reads the sizes of its loader."""
        self.number += 1
        try:
            self.rows = max(self.rows, samples_in(batch))
        except DataError:
            self.are_counted = False
        self.read(loader)

    def read(self, loader: Any) -> None:
        """Reads the sizes of a loader."""
        sampler: Any = getattr(loader, "batch_sampler", None)
        size = getattr(sampler, "batch_size", None)
        if not isinstance(size, int):
            return
        self.asked = size
        with suppress(AttributeError, TypeError):
            # The sampler of a stream has no length.
            self.samples = len(sampler.sampler)
        if not self.are_counted and self.samples is not None:
            self.rows = min(self.asked, self.samples)


@dataclass
class _Trials:
    """Runs of a few steps of copies, whose batches have the size that is tried."""

    trainer: Any
    method: str
    name: str
    of_user: tuple[Any, Any, _Given]  # Model, datamodule, loaders
    upper: int | None
    most: int = _UPPER  # Size of the largest batch, as far as anybody knows
    first: tuple[int, _Batches] | None = None  # The first size that fitted, with its batches

    def __post_init__(self) -> None:
        device = self.trainer.strategy.root_device
        # Other devices give no readings: their sizes are searched by doubling and halves.
        self.meter = meter_of(None, str(device) if device.type == "cuda" else "cpu")
        self.generators = capture_generators()

    def search(self) -> int:
        """Returns the largest size that fits and that a batch had; 0 where nothing fits."""
        capacity = self.meter.capacity_bytes if self.meter.counts_always else None
        upper = int(self.upper or _UPPER)
        start = min(_START, upper)
        with self._left_as_it_was():
            while True:
                try:
                    return find_max_size(self, start=start, upper=upper, capacity=capacity).size
                except _DataEndError as end:
                    start = upper = end.size

    @contextmanager
    def _left_as_it_was(self) -> Iterator[None]:
        """Gives back, after the block, random generators and memory; Lightning's notes of each trainer are left out."""
        notes = import_module(f"{_package(self.trainer)}.utilities.rank_zero").rank_zero_module.log
        level = notes.level
        drawn = [(generator, generator.get_state()) for generator in _generators_of(self.of_user[2])]
        notes.setLevel(logging.WARNING)
        try:
            yield
        finally:
            notes.setLevel(level)
            restore_generators(self.generators)
            for generator, state in drawn:
                generator.set_state(state)
            self.meter.release()

    def __call__(self, size: int) -> int | None:
        """Runs a size; returns the peak of its memory where the device tells it."""
        if size > self.most:
            raise _DataEndError(self.most)
        restore_generators(self.generators)
        self.meter.release()
        model, datamodule, given = _copied(self.trainer, self.of_user)
        for holder in _holders((model, datamodule), self.name):
            holder.set(size)
        loader = None if given.loader is None else _resized(given.loader, size)
        batches = _Batches()
        self.meter.reset_peak()
        trainer = _quick(self.trainer, self.method, batches)
        self._run(trainer, model, datamodule, replace(given, loader=loader))
        if batches.number:
            self.first = self.first or (size, batches)
            self._check_filled(size, batches)
        else:
            batches.read(_loader_of(trainer, self.method))
            self._refuse_empty(size, batches)
        return self.meter.peak_bytes() if self.meter.counts_always else None

    def _run(self, trainer: Any, model: Any, datamodule: Any, given: _Given) -> None:
        if self.method == "fit":
            trainer.fit(model, given.loader, given.validation, datamodule=datamodule)
            return
        options = {} if self.method == "predict" else {"verbose": False}
        getattr(trainer, self.method)(model, given.loader, datamodule=datamodule, **options)

    def _refuse_empty(self, size: int, batches: _Batches) -> None:
        """Raises an error where there was no batch at all: a loader may leave out the last samples."""
        self._check_samples(size, batches)
        if size == 1 or not self.most:
            raise ArgumentError(f"A size is tried with a batch of {self.method}", value="it gave none",
                                remedy="Give it samples, and the trainer a limit of batches and epochs that is not "
                                       "0")  # fmt: skip
        # A stream does not tell how many samples it has: the search goes on as where memory ends.
        raise MemoryError(f"no batch of {size} samples")

    def _check_filled(self, size: int, batches: _Batches) -> None:
        """Raises `_DataEndError` where no batch had so many samples, ArgumentError where none ever will."""
        first_size, first = self.first or (size, batches)
        is_same = batches.rows == first.rows > first_size if batches.asked is None else batches.asked == first.asked
        if size != first_size and is_same:
            raise ArgumentError(
                f"The size of a batch follows {self.name!r}",
                value=f"it is {batches.asked or batches.rows} at {first_size} and at {size}",
                remedy=f"Make the loader with it: DataLoader(..., batch_size=self.{self.name})",
            )  # fmt: skip
        self._check_samples(size, batches)
        if not batches.rows and self.upper is None:
            raise ArgumentError(
                "The samples of a batch are counted by the rows of its tensors", value="they differ or are missing",
                remedy="Give the size of the largest batch (upper=)",
            )  # fmt: skip
        # A sample may be several rows (views), and a loader may take a share of the size.
        rows = max(first.rows, first.asked or first_size)
        if batches.rows and batches.rows < rows * size // first_size:
            raise _DataEndError(max(1, batches.rows * first_size // rows))

    def _check_samples(self, size: int, batches: _Batches) -> None:
        if batches.samples is not None and batches.asked:
            self.most = batches.samples * size // batches.asked
            if size > self.most > 0:
                raise _DataEndError(self.most)


def _copied(trainer: Any, of_user: tuple[Any, Any, _Given]) -> Any:
    """Copies model, datamodule and loaders, not the trainer, loggers and samples that they know.

    Raises:
        CanTrainError: Something cannot be copied.
    """
    model, datamodule, given = of_user
    memo: dict[int, Any] = {id(generator): generator for generator in _generators_of(given)}
    logger = import_module(f"{_package(trainer)}.loggers.logger").DummyLogger()
    for owner in (trainer, *_trainers_of(model, datamodule)):
        memo |= {id(owner): None, id(owner.strategy): None} | dict.fromkeys(map(id, owner.loggers), logger)
    for loader in _loaders_in(given):
        # A stream would be used up.
        memo |= {} if isinstance(loader.dataset, IterableDataset) else {id(loader.dataset): loader.dataset}
        memo[id(getattr(loader, "_iterator", None))] = None
    owners = (model, datamodule, *(loader.dataset for loader in _loaders_in(given)))
    try:
        copies = deepcopy(of_user, memo)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CanTrainError(
            "A size is tried with copies of the model, the datamodule and streams",
            value=f"{_uncopied(owners, memo)} cannot be copied ({type(error).__name__}: {error})",
            remedy="Make it in setup(), which runs on each copy (of a stream: in __iter__), or say how to copy it "
                   "(__deepcopy__)",
        ) from error  # fmt: skip
    if getattr(copies[0], "_compiler_ctx", None):
        # It would run the steps of the user's module.
        import_module(f"{_package(trainer)}.utilities.compile").to_uncompiled(copies[0])
    # A module may bring callbacks along.
    copies[0].configure_callbacks = list
    return copies


def _uncopied(owners: tuple[Any, ...], memo: Mapping[int, Any]) -> str:
    """Names the attribute that cannot be copied."""
    for owner in owners:
        for name, value in getattr(owner, "__dict__", {}).items():
            try:
                deepcopy(value, dict(memo))
            except Exception:  # noqa: BLE001 - as above, of any kind
                return f"{type(owner).__name__}.{name}"
    return "something"


def _trainers_of(model: Any, datamodule: Any) -> list[Any]:
    """Returns the trainers that a model, modules in it and a datamodule know."""
    trainers = [vars(module).get("_trainer") for module in model.modules()]
    trainers.append(getattr(datamodule, "trainer", None))
    return [trainer for trainer in trainers if hasattr(trainer, "strategy")]


def _loaders_in(given: Any) -> Iterator[Any]:
    """Yields the `DataLoader`s among given ones."""
    if isinstance(given, _Given):
        given = (given.loader, given.validation)
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, DataLoader):
        yield given
    elif isinstance(given, list | tuple):
        for member in given:
            yield from _loaders_in(member)


def _generators_of(given: _Given) -> list[torch.Generator]:
    """Returns the random generators that given loaders draw from."""
    places = [place for loader in _loaders_in(given) for place in (loader, getattr(loader, "sampler", None))]
    drawn_from = [getattr(place, "generator", None) for place in places]
    return [generator for generator in drawn_from if isinstance(generator, torch.Generator)]


def _package(trainer: Any) -> str:
    """Returns the name of the package whose trainer it is: `lightning.pytorch` or `pytorch_lightning`."""
    return str(_trainer_class(trainer).__module__).partition(".trainer")[0]


def _trainer_class(trainer: Any) -> Any:
    """Returns Lightning's class: one of the user's may take other arguments."""
    return next(base for base in type(trainer).__mro__[::-1] if base.__name__ == "Trainer")


def _loader_of(trainer: Any, method: str) -> Any:
    """Returns the loader whose batches are resized, or raises ArgumentError where there are several."""
    loaders = getattr(trainer, _LOADERS[method])
    members = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    if not isinstance(members, list | tuple):
        return members
    _refuse_several(method, members)
    return members[0] if members else None


def _quick(trainer: Any, method: str, batches: _Batches) -> Any:
    """Makes a trainer of a few steps, which computes as another one does, writes nothing, and counts its batches."""
    package, strategy = _package(trainer), trainer.strategy
    device = strategy.root_device
    is_single = "SingleDeviceStrategy" in [base.__name__ for base in type(strategy).__mro__]
    logger = import_module(f"{package}.loggers.logger").DummyLogger()
    trains = trainer.limit_train_batches
    limits = {f"limit_{kind}_batches": getattr(trainer, f"limit_{kind}_batches") for kind in ("val", "test", "predict")}
    quick = _trainer_class(trainer)(
        accelerator=trainer.accelerator,
        strategy=type(strategy)(device=device) if is_single else "auto",
        devices=1 if is_single or device.index is None else [device.index],
        plugins=deepcopy(trainer.precision_plugin),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        # Schedules that are made for them would fail with fewer. A callback ends the training instead.
        max_epochs=1000 if trainer.max_epochs is None and trainer.max_steps == -1 else trainer.max_epochs,
        max_steps=trainer.max_steps,
        # A share of a few large batches is less than a batch.
        limit_train_batches=trains if isinstance(trains, int) else float(trains > 0),
        **{name: min(_STEPS, most) if isinstance(most, int) else _STEPS * (most > 0) for name, most in limits.items()},
        num_sanity_val_steps=0,
        inference_mode=trainer.validate_loop.inference_mode,
        detect_anomaly=getattr(trainer, "_detect_anomaly", False),
        default_root_dir=trainer.default_root_dir,
        # A module may write to its logger.
        logger=logger if trainer.loggers else False, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    # Installed packages may have added some of their own.
    quick.callbacks = [_watch(package, method, batches, _STEPS * trainer.accumulate_grad_batches)]
    return quick


def _watch(package: str, method: str, batches: _Batches, steps: int) -> Any:
    """Makes a callback that counts the batches of a method, and ends a training after some steps."""

    class Watch(import_module(f"{package}.callbacks").Callback):  # type: ignore[misc]  # of the trainer's Lightning
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            trainer.should_stop = trainer.should_stop or batches.number >= steps

    def count(trainer: Any, module: Any, batch: Any, *arguments: Any) -> None:
        batches.add(batch, _loader_of(trainer, method))

    kind = {"fit": "train", "validate": "validation"}.get(method, method)
    watch = Watch()
    setattr(watch, f"on_{kind}_batch_start", count)
    return watch


@dataclass(frozen=True)
class _Holder:
    """Has a batch size: an object by an attribute, or a mapping of hyper-parameters."""

    owner: Any
    name: str

    @property
    def is_mapping(self) -> bool:
        """Whether the name is a key, not an attribute."""
        return isinstance(self.owner, MutableMapping) and self.name in self.owner

    @property
    def has_it(self) -> bool:
        """Whether there is a batch size that can be set."""
        attribute = getattr(type(self.owner), self.name, None)
        is_fixed = isinstance(attribute, property) and attribute.fset is None
        return self.is_mapping or (hasattr(self.owner, self.name) and not is_fixed)

    @property
    def size(self) -> Any:
        """The batch size as it is."""
        return self.owner[self.name] if self.is_mapping else getattr(self.owner, self.name)

    def set(self, size: int) -> None:
        """Sets the batch size."""
        try:
            if self.is_mapping:
                self.owner[self.name] = size
            else:
                setattr(self.owner, self.name, size)
        except Exception as error:
            raise ArgumentError(
                "A batch size can be set", value=f"{type(self.owner).__name__}.{self.name} cannot ({error})",
                remedy="Name another attribute that decides it (batch_arg_name=)",
            ) from error  # fmt: skip


def _holders(owners: tuple[Any, ...], name: str) -> Iterator[_Holder]:
    """Yields the places that have a batch size."""
    *path, last = name.split(".")
    for owner in owners:
        # Without this question Lightning gives the owner hyper-parameters.
        for place in (owner, owner.hparams if hasattr(owner, "_hparams") else None):
            for part in path:
                holder = _Holder(place, part)
                place = holder.size if holder.is_mapping else getattr(place, part, None)
            if (holder := _Holder(place, last)).has_it:
                yield holder


def _resized(loader: Any, size: int) -> Any:
    """Returns a loader of the same samples in batches of another size."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(batch_sampler) is not BatchSampler:
        raise ArgumentError(
            "A loader whose batch size can be changed is a DataLoader without a batch sampler of its own",
            value=type(loader).__name__ if not isinstance(loader, DataLoader) else type(batch_sampler).__name__,
            remedy="Leave its batches as they are: MicroBatchCallback computes them in parts that fit",
        )  # fmt: skip
    sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
    return DataLoader(loader.dataset, batch_size=size, sampler=sampler, collate_fn=loader.collate_fn)
