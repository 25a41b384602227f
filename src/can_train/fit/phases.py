"""Which of a model's parameters are trained: by the names in settings, and phase by phase.

A name stands for a module with all that is in it, or for a parameter; a pattern (`*.bias`) for those whose names match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING

from can_train.errors import ConfigError, nearest_first
from can_train.task import Phase

if TYPE_CHECKING:
    from torch import nn

    from can_train.config.settings import TrainingSettings

_SUGGESTIONS = 5


def named_by(model: nn.Module, names: Sequence[str], setting: str) -> set[str]:
    """Returns the names of the parameters that some names or patterns stand for.

    Args:
        model: The model.
        names: Of modules or parameters, or patterns of them.
        setting: Where they were given, for the error.

    Raises:
        ConfigError: A name stands for no parameter; the message lists the nearest names.
    """
    parameters = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for name in names:
        # A parameter goes by its own name and by the modules' that it is in: a, a.b, a.b.weight.
        own = {one for one in parameters if any(part == name or fnmatchcase(part, name)
               for part in accumulate(one.split("."), "{}.{}".format))}  # fmt: skip
        if not own:
            modules = [one for one, _ in model.named_modules() if one]
            nearest = ", ".join(nearest_first(name, [*modules, *parameters])[:_SUGGESTIONS])
            raise ConfigError(f"{setting} names parts of the model", value=repr(name), remedy=f"Nearest: {nearest}")
        found |= own
    return found


def freeze(model: nn.Module, training: TrainingSettings, *, epoch: int) -> None:
    """Freezes the parameters that `training.freeze` names, or thaws them once its epochs are over."""
    if training.freeze:
        names = named_by(model, training.freeze, "training.freeze")
        is_trained = 0 < training.thaw_epoch <= epoch
        for name, parameter in model.named_parameters():
            if name in names and (parameter.is_floating_point() or parameter.is_complex()):
                parameter.requires_grad_(is_trained)


def phase_parameters(model: nn.Module, phase: Phase) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters of a phase with their names, frozen ones too; integers, which nothing trains, are left
    out.
    """
    named = [(name, one) for name, one in model.named_parameters() if one.is_floating_point() or one.is_complex()]
    if not phase.parameters:
        return named
    names = named_by(model, phase.parameters, f"phase {phase.name}")
    return [(name, parameter) for name, parameter in named if name in names]


def phase_training(training: TrainingSettings, phase: Phase) -> TrainingSettings:
    """Returns the training settings of a phase."""
    return replace(training, **phase.training) if phase.training else training


@contextmanager
def only_trained(model: nn.Module, phase: Phase) -> Iterator[None]:
    """Freezes the parameters of all other phases for the block."""
    if not phase.parameters:
        yield
        return
    own = {id(parameter) for _, parameter in phase_parameters(model, phase)}
    others = [one for one in model.parameters() if one.requires_grad and id(one) not in own]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
