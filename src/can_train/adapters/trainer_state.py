"""The state that a step of a Trainer changes beside the model: its attributes, the metrics that TRL's Trainers collect,
and the gradients of one part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.adapters.part_values import Combination, Kinds
from can_train.adapters.step_state import Attributes, replaced, replaced_method
from can_train.errors import DoesNotFitError
from can_train.memory.out_of_memory import is_out_of_memory

_MOST_NUMBERS: Final = 2**16  # Numbers of each parameter's gradient that are compared
# Attributes of the Trainer that no step changes; data sets may be long lists.
_UNCHANGED: Final = frozenset({"train_dataset", "eval_dataset", "label_names", "_signature_columns", "_tr_loss"})
LogCall = tuple[tuple[Any, ...], dict[str, Any]]  # Arguments of a call of a Trainer's `log`
_Key = tuple[tuple[str, ...], int]  # The names that a call logs, and the number of earlier calls with these names
_LOGGED: Final = "log"  # First name of the places of logged values
_GATHERING: Final = ("gather", "gather_for_metrics", "reduce")  # Functions of Accelerate that wait for all ranks


def attributes_of(trainer: Any) -> Attributes:
    """Reads the attributes of a Trainer that its step may change."""
    return Attributes(trainer, skip=_UNCHANGED)


@contextmanager
def undone(trainer: Any, *, only_out_of_memory: bool = False) -> Iterator[None]:
    """Opens the span of a step, or of a part of one. Where it fails, or runs out of memory, the Trainer is as it was,
    and callbacks see nothing of what was logged.
    """
    attributes, logged = attributes_of(trainer), list[LogCall]()
    try:
        with replaced_method(trainer, "log", lambda *arguments, **options: logged.append((arguments, options))):
            yield
    except Exception as error:
        if not only_out_of_memory or is_out_of_memory(error):
            attributes.restore()
            logged.clear()
        raise
    finally:
        for arguments, options in logged:
            trainer.log(*arguments, **options)


@contextmanager
def untraced(trainer: Any) -> Iterator[None]:
    """Opens the span of a trial: the attributes of the Trainer are as they were afterwards, and nothing is logged."""
    attributes = attributes_of(trainer)
    try:
        with replaced_method(trainer, "log", lambda *arguments, **options: None):
            yield
    finally:
        attributes.restore()


@contextmanager
def collected_logs(trainer: Any) -> Iterator[list[LogCall]]:
    """Collects in the block what the step logs, which callbacks do not see."""
    logged: list[LogCall] = []
    with replaced_method(trainer, "log", lambda *arguments, **options: logged.append((arguments, options))):
        yield logged


def learn_logs(kinds: Kinds, of_spans: Sequence[Sequence[LogCall]], sizes: Sequence[int]) -> None:
    """Learns from what was logged of some samples, computed whole and in two parts of `sizes`, which values are totals,
    means or extremes.
    """
    whole, *parts = ({key: _numbers(call) for key, call in _by_key(calls).items()} for calls in of_spans)
    for key, numbers in whole.items():
        if all(key in part for part in parts):
            kinds.learn((_LOGGED, key), numbers, [part[key] for part in parts], sizes)


def joined_logs(of_parts: Sequence[Sequence[LogCall]], combination: Combination) -> list[LogCall]:
    """Makes one call of the calls that log the same names in the parts of a batch, with the values of the whole batch.
    Values that are no numbers are the last part's.
    """
    calls = defaultdict[_Key, dict[int, LogCall]](dict)
    for position, of_part in enumerate(of_parts):
        for key, call in _by_key(of_part).items():
            calls[key][position] = call
    return [_joined(key, list(entries.values()), combination.of(list(entries))) for key, entries in calls.items()]


def _joined(key: _Key, calls: Sequence[LogCall], combination: Combination) -> LogCall:
    arguments, options = calls[-1]
    of_parts = [_numbers(call) for call in calls]
    row = dict(_row(calls[-1]))
    for name in row:
        if all(name in numbers for numbers in of_parts):
            row[name] = combination.combine([numbers[name] for numbers in of_parts], (_LOGGED, key, name))
    return ((row, *arguments[1:]), options) if arguments else ((), {**options, "logs": row})


def _by_key(calls: Sequence[LogCall]) -> dict[_Key, LogCall]:
    by_key: dict[_Key, LogCall] = {}
    for call in calls:
        names = tuple(_row(call))
        by_key[names, sum(earlier == names for earlier, _ in by_key)] = call
    return by_key


def _row(call: LogCall) -> Mapping[str, Any]:
    arguments, options = call
    row: Mapping[str, Any] = arguments[0] if arguments else options["logs"]
    return row


def _numbers(call: LogCall) -> dict[str, Any]:
    """Returns the numbers among the values of a call."""
    # NumPy's numbers behave as Python's do.
    row = {name: value.item() if isinstance(value, np.generic) else value for name, value in _row(call).items()}
    return {name: value for name, value in row.items() if not isinstance(value, bool)
            and (isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim()))}  # fmt: skip


@contextmanager
def without_gathering(accelerator: Any, size: str) -> Iterator[None]:
    """Refuses functions that wait for other ranks, which may have other parts; the remedy names `size`."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise DoesNotFitError(
            "Memory ran out on one of several ranks, in a step that gathers numbers of all ranks",
            value="its batch cannot be split on one rank alone",
            remedy=f"Choose a smaller {size}",
        )

    spans: list[AbstractContextManager[None]] = [replaced(accelerator, name, refuse) for name in _GATHERING]
    with spans[0], spans[1], spans[2]:
        yield


def scale_gradients(model: nn.Module, weight: float) -> None:
    """Multiplies the gradients of one part; the gradients of earlier parts are set aside meanwhile."""
    for parameter in model.parameters() if weight != 1.0 else ():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.mul_(weight) if weight else None


def gradient_numbers(parameter: nn.Parameter) -> NDArray[np.float64]:
    """Returns evenly spaced numbers of a gradient."""
    step = max(-(-parameter.numel() // _MOST_NUMBERS), 1)
    if parameter.grad is None:
        return np.zeros(-(-parameter.numel() // step))
    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    return gradient.detach().flatten()[::step].to("cpu", torch.float64).numpy().copy()


def metric_lengths(metrics: Any) -> dict[tuple[Any, Any], int]:
    """Returns the lengths of the lists that TRL's Trainers collect their metrics in, by mode and name."""
    modes = metrics.items() if isinstance(metrics, Mapping) else ()
    return {(mode, name): len(values) for mode, names in modes if isinstance(names, Mapping)
            for name, values in names.items() if isinstance(values, list)}  # fmt: skip


def join_metrics(metrics: Any, before: Mapping[tuple[Any, Any], int], weights: list[float]) -> None:
    """Gives each list one entry a batch: the mean over its parts, or the largest or smallest one by the list's name."""
    for (mode, name), length in metric_lengths(metrics).items():
        first = before.get((mode, name), 0)
        entries = metrics[mode][name][first:]
        if len(weights) > 1 and length - first == len(weights):
            extreme = {"min_": min, "max_": max}.get(str(name)[:4])
            metrics[mode][name][first:] = [extreme(entries) if extreme else float(np.average(entries, weights=weights))]
