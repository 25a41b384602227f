"""Values that the methods of a task return: losses, metrics, the choice of a sampler, predictions. Each is checked, and
an error names the method and the value.

Shapes: R samples of a call.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Signature, getattr_static, signature
from types import FunctionType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import ConfigError, DataError
from can_train.task import Feature, Predictions

Rows = NDArray[np.int64]

TRAIN: Final = "train"
VALIDATION: Final = "validation"
TEST: Final = "test"
_MOST_SHARES: Final = 10_000  # Of a prediction that is read as shares
_SHARES_ATOL: Final = 1e-2  # By which shares miss a sum of 1 in half precision

Losses = Mapping[str, tuple[Tensor, float | Tensor]]
"""Sum and denominator of each loss term."""


@dataclass(frozen=True)
class PartOutcome:
    """Sums and predictions of a model for a part of a set.

    Attributes:
        metrics: Sum and denominator of each metric, which add up over parts.
        predictions: One for each sample, on the CPU; None where the task predicts nothing.
    """

    metrics: Mapping[str, tuple[float, float]]
    predictions: Sequence[Any] | None


_PRIVATE: Final = "_Task__"  # Python's prefix of the private names of a class of this name
_METHODS: Final = (FunctionType, staticmethod, classmethod)
_PROPERTIES: Final = (property, cached_property)
_OF_INSTANCES: Final = ("context", "settings", "dataset", "model_settings", "mode")  # Which `Task.__init__` sets


def check_names(task: type, base: type) -> None:
    """Raises ConfigError where a class that derives from `base` has a helper or a value with a name of `base`, which
    can-train would call as the method of `base`, or read as its attribute.
    """
    for owner in task.__mro__[: task.__mro__.index(base)]:
        for name, value in vars(owner).items():
            own, is_method = getattr_static(base, name, None), isinstance(value, _METHODS)
            if name in _OF_INSTANCES and (is_method or isinstance(value, _PROPERTIES)):
                raise name_taken(task, name)
            if name.startswith("__") or own is None:
                continue
            if name.startswith(_PRIVATE):
                fact, own_name = "A class named Task has a private name of can_train.Task", name[len("_Task") :]
                raise ConfigError(fact, value=own_name, remedy="Give the class another name")
            if isinstance(own, _METHODS):
                check_method(task, name, value, base)
            elif is_method:
                # A value may be computed: by a property, and not by a method.
                raise name_taken(task, name)


def check_method(task: type, name: str, value: Any, base: type) -> None:
    """Raises ConfigError unless a value of a task's class, or of its object, can be called as a method of `base`."""
    # A property may return a function.
    if isinstance(value, _PROPERTIES):
        return
    if not (callable(value) or isinstance(value, _METHODS)) or isinstance(value, nn.Module):
        raise name_taken(task, name)
    wanted = signature(getattr(base, name))
    if isinstance(value, _METHODS) and not _takes(value, wanted):
        arguments = ", ".join(each for each in wanted.parameters if each != "self")
        raise ConfigError(f"{task.__name__}.{name} does not take the arguments that can-train calls it with",
                          value=f"{name}({arguments})",
                          remedy="Take these arguments, or give a helper another name")  # fmt: skip


def name_taken(task: type, name: str) -> ConfigError:
    """Returns the error that a class or an object of a task has a value with a name of `can_train.Task`."""
    return ConfigError(f"{task.__name__}.{name} takes the place of can_train.Task.{name}, which can-train needs",
                       remedy="Give yours another name")  # fmt: skip


def _takes(method: Any, wanted: Signature) -> bool:
    """Tells whether a function of a class takes the arguments that are always given of a signature without `self`."""
    function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    always = [each for each in wanted.parameters.values() if each.default is each.empty and each.name != "self"]
    named = {each.name: None for each in always if each.kind is each.KEYWORD_ONLY}
    places = [None] * (len(always) - len(named) + (not isinstance(method, staticmethod)))
    try:
        # A decorator may give arguments itself: its function is called, and not the function inside of it.
        of_function = signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # Functions of extensions have no signature
        return True
    try:
        of_function.bind(*places, **named)
    except TypeError:
        return False
    return True


def sampled_rows(numbers: NDArray[Any], first: int, size: int, rows: Rows, *, seed: int) -> Rows:
    """Returns the rows that a sampler has chosen by numbers or weights of the `size` samples from row `first` on."""
    rule = "Task.sampler did not return the numbers of training samples, nor a weight for each"
    remedy = f"Return numbers from 0 to {size - 1}, or {size} weights that are not negative"
    if not numbers.size:
        raise DataError(rule, value="it returned none", remedy=remedy)
    if np.issubdtype(numbers.dtype, np.floating):
        if numbers.shape != (size,) or not np.isfinite(numbers).all() or (numbers < 0).any():
            raise DataError(
                rule, value=f"{numbers.size} numbers from {numbers.min():g} to {numbers.max():g}", remedy=remedy
            )
        weights = numbers[rows - first].astype(np.float64)
        if not weights.sum():
            raise DataError("Task.sampler returned a weight of 0 for each training sample", remedy=remedy)
        drawn = np.random.default_rng(seed).choice(len(rows), size=len(rows), p=weights / weights.sum())
        sampled: Rows = rows[drawn]
        return sampled
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise DataError(rule, value=f"{numbers!r:.60}", remedy=remedy)
    if numbers.min() < 0 or numbers.max() >= size:
        raise DataError(rule, value=f"numbers from {numbers.min()} to {numbers.max()}", remedy=remedy)
    ordered: Rows = (first + numbers).astype(np.int64)
    ordered = ordered[np.isin(ordered, rows)]
    if not len(ordered):
        raise DataError("Task.sampler chose no training sample that is not kept for validation", remedy=remedy)
    return ordered


def checked_terms(where: str, terms: Any) -> dict[str, tuple[Tensor, float | Tensor]]:
    """Returns the loss terms that the method `where` returned; raises DataError where they are none."""
    remedy = "Return {'loss': (losses.sum(), len(losses))}"
    if not isinstance(terms, Mapping) or not terms:
        raise DataError(f"{where} did not return {{term: (sum, denominator)}}", value=_shown(terms), remedy=remedy)
    checked = {}
    for term, pair in terms.items():
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], Tensor) or pair[0].ndim:
            raise DataError(f"{where} did not return a scalar tensor and a number for each term",
                            value=f"{term!r} is {_shown(pair)}", remedy=remedy)  # fmt: skip
        total, denominator = pair
        # A number that the device counted stays there: reading it would make the host wait for each micro-batch.
        stays = isinstance(denominator, Tensor) and denominator.device == total.device and not denominator.ndim
        checked[str(term)] = (total, denominator.detach() if stays else float(denominator))
    return checked


def checked_denominators(where: str, denominators: Any) -> dict[str, float | Tensor] | None:
    """Returns the denominators that the method `where` returned; raises DataError where they are none."""
    if denominators is None:
        return None
    rule = f"{where} did not return {{term: number}}"
    remedy = "Return {'loss': len(samples)}, with the terms that the loss returns, or leave the method out"
    if not isinstance(denominators, Mapping):
        raise DataError(rule, value=type(denominators).__name__, remedy=remedy)
    checked: dict[str, float | Tensor] = {}
    for term, value in denominators.items():
        # Reading a number of the device would make the host wait.
        stays = isinstance(value, Tensor) and value.device.type != "cpu" and not value.ndim
        number = value if stays else _as_number(value)
        if number is None or (not stays and not np.isfinite(number)):
            raise DataError(rule, value=f"{term!r} is {_shown(value)}", remedy=remedy)
        checked[str(term)] = number
    return checked


def check_named(where: str, terms: Iterable[str], denominators: Mapping[str, Any], method: str) -> None:
    """Raises DataError where the method `method` names no denominator of a loss term that `where` returned."""
    for term in terms:
        if term not in denominators:
            named = ", ".join(map(repr, denominators)) or "none"
            raise DataError(f"{method} names no denominator of {term!r}, a term that {where} returns",
                            value=f"it names {named}",
                            remedy=f"Return {{{term!r}: number}}, with all terms of the loss")  # fmt: skip


def checked_counts(where: str, counts: Any, sample: str) -> Mapping[str | Feature, float]:
    """Returns the counts of a sample that the method `where` returned; raises DataError where they are none."""
    rule, remedy = (
        f"{where} must return finite numbers of 0 or more by name",
        "Return {'nodes': 5}: sizes of the sample",
    )
    if not isinstance(counts, Mapping):
        raise DataError(rule, value=f"{_shown(counts)} for {sample}", remedy=remedy)
    checked = {}
    for kind, count in counts.items():
        number = _as_number(count)
        if not isinstance(kind, str | Feature) or number is None or not 0 <= number < np.inf:
            name = kind.name if isinstance(kind, Feature) else kind
            raise DataError(rule, value=f"{name!r} is {_shown(count)} for {sample}", remedy=remedy)
        checked[kind] = number
    return checked


def class_numbers(where: str, labels: Any) -> NDArray[np.int64]:
    """Returns the classes that the method `where` returned; raises DataError where one of them is no class."""
    rule = f"{where} must return a whole number for each sample, the number of its class from 0"
    remedy = "Leave samples without a class out of the set; return None in place of the list where there are no classes"
    if not isinstance(labels, Iterable) or isinstance(labels, str | bytes | Mapping):
        raise DataError(rule, value=_shown(labels), remedy=remedy)
    numbers = []
    for position, label in enumerate(labels):
        number = _as_number(label)
        if number is None or not number.is_integer():
            raise DataError(rule, value=f"{_shown(label)} for sample {position}", remedy=remedy)
        numbers.append(int(number))
    return np.asarray(numbers, np.int64)


def metric_numbers(where: str, metrics: Any) -> dict[str, tuple[float, float]]:
    """Returns sum and denominator of each metric as numbers; raises DataError where they are none."""
    rule = f"{where} did not return {{name: (sum, denominator)}}"
    remedy = "Return {'accuracy': (correct.sum(), len(correct))}, or {} without metrics"
    if not isinstance(metrics, Mapping):
        raise DataError(rule, value=type(metrics).__name__, remedy=remedy)
    numbers = {}
    for name, pair in metrics.items():
        total, count = map(_as_number, pair) if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
        if total is None or count is None:
            raise DataError(rule, value=f"{name!r} is {_shown(pair)}", remedy=remedy)
        numbers[str(name)] = (total, count)
    return numbers


def measure_numbers(where: str, measures: Any) -> dict[str, float]:
    """Returns the measures that the method `where` returned as numbers; raises DataError where they are none."""
    rule, remedy = f"{where} did not return {{name: number}}", "Return {'f1': 0.5}, or {} without measures"
    if not isinstance(measures, Mapping):
        raise DataError(rule, value=type(measures).__name__, remedy=remedy)
    numbers = {}
    for name, value in measures.items():
        if (number := _as_number(value)) is None:
            raise DataError(rule, value=f"{name!r} is {_shown(value)}", remedy=remedy)
        numbers[str(name)] = number
    return numbers


def baseline_numbers(where: str, baselines: Any) -> dict[str, dict[str, float]]:
    """Returns the metrics of baselines as numbers; raises DataError where they are none."""
    if not isinstance(baselines, Mapping):
        raise DataError(f"{where} did not return {{baseline: {{metric: number}}}}", value=type(baselines).__name__,
                        remedy="Return {'mean': {'f1': 0.5}}, or {} without baselines")  # fmt: skip
    return {str(name): measure_numbers(f"{where}[{name!r}]", scores) for name, scores in baselines.items()}


def _as_number(value: Any) -> float | None:
    """Converts a number of Python, numpy or torch; None: it is none."""
    try:
        return None if isinstance(value, str | bytes) else float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(_shown(part) for part in value)})"
    return f"{value!r:.60}"


def prediction_numbers(prediction: Any) -> NDArray[np.float64]:
    """Returns the numbers of a prediction in a row."""
    # NumPy has no bfloat16.
    return np.ravel(np.asarray(prediction.double() if isinstance(prediction, Tensor) else prediction, np.float64))


def class_shares(where: str, predictions: Sequence[Any]) -> list[NDArray[np.float64]]:
    """Returns the numbers of each prediction that the method `where` made of samples with classes."""
    shares = []
    for prediction in predictions:
        try:
            shares.append(prediction_numbers(prediction))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"{where} must return a probability of each class where samples have labels",
                            value=_shown(prediction),
                            remedy="Return model(batch).softmax(1), or leave out Task.labels") from error  # fmt: skip
    return shares


def scored(parts: Sequence[PartOutcome]) -> Predictions | None:
    """Scores samples without classes: by their predictions where these are single numbers, by the largest share where
    these are shares that add up to 1; None where they are neither.
    """
    predictions = [value for part in parts for value in part.predictions or ()]
    try:
        sizes = {each.numel() if isinstance(each, Tensor) else np.size(each) for each in predictions}
        if len(sizes) != 1 or not 0 < min(sizes) <= _MOST_SHARES or isinstance(predictions[0], str | bytes):
            return None
        numbers = np.stack([prediction_numbers(each) for each in predictions])
    except (TypeError, ValueError):
        return None
    are_shares = (numbers >= 0).all() and np.allclose(numbers.sum(1), 1, atol=_SHARES_ATOL)
    if not np.isfinite(numbers).all() or (numbers.shape[1] > 1 and not are_shares):
        return None
    return Predictions(score=numbers.max(1), positive=np.empty(0, bool), flagged=np.empty(0, bool), time_s=np.empty(0),
                       score_name="prediction" if numbers.shape[1] == 1 else "probability")  # fmt: skip
