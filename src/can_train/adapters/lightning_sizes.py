"""Finds the largest batch that a Lightning module trains with, in trainings on copies of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, Final

from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from can_train.errors import ArgumentError
from can_train.fit.optimizer import capture_generators, restore_generators
from can_train.fit.search import find_max_size
from can_train.memory.meters import meter_of

_STEPS: Final = 3  # Steps of a trial: the second one has the optimizer's state
_UPPER: Final = 2**20  # Largest batch that is tried where nobody knows the number of samples


def scale_batch_size(
    trainer: Any,
    model: Any,
    train_dataloaders: Any = None,
    *,
    datamodule: Any = None,
    batch_arg_name: str = "batch_size",
) -> int:
    """Finds the largest batch that a Lightning module trains with, as `Tuner(trainer).scale_batch_size(model)` does.

    It is never larger than one that was seen to fit, nor than the data set. Trials are short trainings, with
    validation, of copies on the trainer's device: model, trainer and random generators stay as they are.

    Args:
        trainer: The `Trainer` that will train.
        model: The `LightningModule`.
        train_dataloaders: A loader that `fit` would be given, in place of one that the model or datamodule makes.
        datamodule: The `LightningDataModule`, where there is one.
        batch_arg_name: Attribute or hyper-parameter of the model or datamodule that has the batch size. It is set to
            the size that was found.

    Returns:
        The largest batch size that was seen to fit; 0 where nothing fits.

    Raises:
        ArgumentError: Nothing has a batch size that could be set.
    """
    holders = list(_holders((model, datamodule), batch_arg_name))
    if not holders and train_dataloaders is None:
        raise ArgumentError(
            f"The model or the datamodule has the batch size as {batch_arg_name!r}", value="neither has",
            remedy="Name it (batch_arg_name=), or give the loader (train_dataloaders=)",
        )  # fmt: skip
    meter = meter_of(None, str(trainer.strategy.root_device))
    generators = capture_generators()

    def trial(size: int) -> int | None:
        with _detached(model, datamodule):
            own, data = deepcopy((model, datamodule))
        for holder in _holders((own, data), batch_arg_name):
            _set(holder, batch_arg_name, size)
        loader = None if train_dataloaders is None else _resized(train_dataloaders, size)
        meter.release()
        meter.reset_peak()
        try:
            _quick(trainer).fit(own, loader, datamodule=data)
        finally:
            restore_generators(generators)
        return meter.peak_bytes() if meter.counts_always else None

    upper = _samples(train_dataloaders, model, datamodule)
    size = find_max_size(trial, upper=upper, capacity=meter.capacity_bytes if meter.counts_always else None).size
    for holder in holders if size else ():
        _set(holder, batch_arg_name, size)
    return size


def _quick(trainer: Any) -> Any:
    """Makes a trainer of a few steps, which computes as another one does and writes nothing."""
    device = trainer.strategy.root_device
    return type(trainer)(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1 if device.index is None else [device.index],
        precision=trainer.precision,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        # Not max_steps, which would end it before the validation.
        max_epochs=1,
        limit_train_batches=_STEPS * trainer.accumulate_grad_batches,
        limit_val_batches=min(_STEPS, trainer.limit_val_batches),
        num_sanity_val_steps=0,
        default_root_dir=trainer.default_root_dir,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def _holders(owners: tuple[Any, ...], name: str) -> Iterator[Any]:
    """Yields the holders of a batch size: objects with an attribute, and mappings of hyper-parameters."""
    for owner in owners:
        if hasattr(owner, name):
            yield owner
        if name in getattr(owner, "hparams", ()):
            yield owner.hparams


def _set(holder: Any, name: str, size: int) -> None:
    if name in getattr(holder, "keys", tuple)():
        holder[name] = size
    else:
        setattr(holder, name, size)


@contextmanager
def _detached(*owners: Any) -> Iterator[None]:
    """Takes models and datamodules off their trainer for the block: a copy must not copy that."""
    with ExitStack() as stack:
        for owner in owners:
            for name in ("_trainer", "trainer"):
                if name in getattr(owner, "__dict__", {}):
                    stack.callback(setattr, owner, name, vars(owner)[name])
                    vars(owner)[name] = None
        yield


def _samples(loader: Any, model: Any, datamodule: Any) -> int:
    if loader is None:
        loader = (model if datamodule is None else datamodule).train_dataloader()
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        # Several loaders, or a stream.
        return _UPPER


def _resized(loader: Any, size: int) -> Any:
    """Returns a loader of the same samples in batches of another size."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(sampler) is not BatchSampler:
        raise ArgumentError(
            "A loader whose batch size can be changed is a DataLoader without a batch sampler of its own",
            value=type(loader).__name__ if not isinstance(loader, DataLoader) else type(sampler).__name__,
            remedy="Leave its batches as they are: MicroBatchCallback computes them in parts that fit",
        )  # fmt: skip
    shuffle = isinstance(loader.sampler, RandomSampler)
    return DataLoader(loader.dataset, batch_size=size, shuffle=shuffle, collate_fn=loader.collate_fn)
