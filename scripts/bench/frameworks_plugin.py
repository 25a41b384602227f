"""A plugin of pytest that puts an adapter of can-train into the trainers of a framework's own tests:
`pytest -p bench.frameworks_plugin --can-train-adapter NAME`.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any, Final

import pytest

from can_train.adapters.framework_loop import LoopSettings

OPTION: Final = "--can-train-adapter"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    parser.addoption(OPTION, choices=sorted(ADAPTERS))
    parser.addoption("--can-train-position", choices=("first", "last"), default="last")
    parser.addoption("--can-train-split", type=int, default=0)


def pytest_configure(config: pytest.Config) -> None:
    """Replaces the trainer before a module of tests imports it."""
    split = config.getoption("--can-train-split")
    # Nothing is learned or recorded: a test must not depend on the one before it.
    settings = LoopSettings(learn=False, limits=split or None)
    ADAPTERS[config.getoption(OPTION)](settings, config.getoption("--can-train-position"))


def add_callback(settings: LoopSettings, position: str) -> None:
    """Gives each `Trainer` of Lightning a `MicroBatchCallback`, before or behind the callbacks that a test gives it."""
    callback = import_module("can_train.adapters.lightning_callback").MicroBatchCallback
    trainer: Any = import_module("lightning.pytorch").Trainer
    make: Callable[..., None] = trainer.__init__

    @wraps(make)
    def make_with_callback(self: Any, *arguments: Any, callbacks: Any = None, **options: Any) -> None:
        given = callbacks if isinstance(callbacks, Sequence) else [] if callbacks is None else [callbacks]
        ours = callback(settings)
        make(self, *arguments, callbacks=[ours, *given] if position == "first" else [*given, ours], **options)

    trainer.__init__ = make_with_callback


def replace_sizes(settings: LoopSettings, position: str) -> None:
    """Replaces the search for a batch size of Lightning's `Tuner` by that of can-train."""
    scale = import_module("can_train.adapters.lightning_sizes").scale_batch_size
    tuner = import_module("lightning.pytorch.tuner.tuning").Tuner
    search = inspect.signature(tuner.scale_batch_size)
    taken = inspect.signature(scale).parameters

    @wraps(tuner.scale_batch_size)
    def scale_batch_size(*arguments: Any, **options: Any) -> Any:
        given = search.bind(*arguments, **options).arguments
        # Arguments that say how to search (mode, trials) have no counterpart.
        own, given["upper"] = given.pop("self"), given.pop("max_val", None)
        return scale(own._trainer, **{name: value for name, value in given.items() if name in taken})

    tuner.scale_batch_size = scale_batch_size


def mix_in(settings: LoopSettings, position: str) -> None:
    """Puts `MicroBatchTrainerMixin` before the Trainers of transformers."""
    mixin = import_module("can_train.adapters.transformers_trainer").MicroBatchTrainerMixin
    modules = {"Trainer": "transformers.trainer", "Seq2SeqTrainer": "transformers.trainer_seq2seq"}
    # Both are taken before one is replaced: the one derives from the other.
    trainers = {name: getattr(import_module(module), name) for name, module in modules.items()}
    package = import_module("transformers")  # Another object since these modules were imported
    for name, trainer in trainers.items():
        mixed = _mixed(mixin, trainer, settings)
        setattr(package, name, mixed)
        setattr(import_module(modules[name]), name, mixed)


def _mixed(mixin: Any, trainer: Any, settings: LoopSettings) -> type:
    class Mixed(mixin, trainer):  # type: ignore[misc]  # depends on the installed transformers
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, loop_settings=settings, **options)

    Mixed.__name__ = Mixed.__qualname__ = trainer.__name__
    return Mixed


ADAPTERS: Final[dict[str, Callable[[LoopSettings, str], None]]] = {
    "callback": add_callback,
    "sizes": replace_sizes,
    "mixin": mix_in,
}
