"""Judges a model of a `Task` by its losses, metrics and predictions on the validation and test sets, beside baselines.

Shapes: R samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from can_train.errors import DataError

TRAIN: Final = "train"
VALIDATION: Final = "validation"
TEST: Final = "test"
MODEL: Final = "model"
_LOSS: Final = "{} loss"  # a loss term among the metrics
_DIGITS: Final = 4  # significant ones of a figure that is shown
_MOST_COLUMNS: Final = 4  # of metrics, beside each other within 80 columns

Sums = Mapping[str, tuple[float, float]]
"""Sum and denominator of each metric."""


@dataclass(frozen=True, kw_only=True)
class PartOutcome:
    """Sums and predictions of a model for a part of a set.

    Attributes:
        metrics: Sums that add up over parts.
        predictions: One for each sample, on the CPU; None where the task predicts nothing.
    """

    metrics: Sums
    predictions: Sequence[Any] | None


class JudgedTask(Protocol):
    """A task, as judging calls it."""

    def sample(self, row: int) -> Any:
        """Returns one sample."""

    def measured(self, samples: Sequence[Any], predictions: Sequence[Any]) -> Mapping[str, float]:
        """Computes the metrics of predictions."""

    def compared(self, samples: Sequence[Any]) -> Mapping[str, Mapping[str, float]]:
        """Computes the metrics of baselines, by name."""


class Samples(Sequence[Any]):
    """The samples of some rows, read when they are asked for."""

    def __init__(self, task: JudgedTask, rows: NDArray[np.int64]) -> None:
        self._task, self._rows = task, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Samples(self._task, self._rows[index])
        return self._task.sample(int(self._rows[index]))

    def __iter__(self) -> Iterator[Any]:
        return (self._task.sample(int(row)) for row in self._rows)


def part_outcome(losses: Mapping[str, tuple[Any, Any]], metrics: Any, predictions: Any, size: int) -> PartOutcome:
    """Checks the values that a task returned for a part of `size` samples, and brings them to the CPU.

    Raises:
        DataError: A metric is not (sum, denominator), or predictions are not one for each sample.
    """
    sums = {_LOSS.format(term): (float(total), float(count)) for term, (total, count) in losses.items()}
    for name, pair in metrics.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise DataError("Task.metrics did not return {name: (sum, denominator)}", value=f"{name}: {pair!r:.60}",
                            remedy="Return {'accuracy': (correct.sum(), len(correct))}")  # fmt: skip
        sums[name] = (float(pair[0]), float(pair[1]))
    if predictions is None:
        return PartOutcome(metrics=sums, predictions=None)
    if len(predictions) != size:
        raise DataError(f"Task.predict returned {len(predictions)} predictions for {size} samples",
                        remedy="Return one for each sample")  # fmt: skip
    listed = [value.detach().cpu() if isinstance(value, Tensor) else value for value in predictions]
    return PartOutcome(metrics=sums, predictions=listed)


def set_scores(task: JudgedTask, rows: NDArray[np.int64], parts: Sequence[PartOutcome]) -> dict[str, float]:
    """Returns the figures of a set: sums of its parts ÷ denominators, then the measures of its predictions."""
    totals: dict[str, list[float]] = {}
    for part in parts:
        for name, (total, count) in part.metrics.items():
            sums = totals.setdefault(name, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + total, sums[1] + count
    scores = {name: total / count for name, (total, count) in totals.items() if count}
    predictions = [value for part in parts for value in part.predictions or ()]
    if predictions:
        measured = task.measured(Samples(task, rows), predictions)
        scores |= {name: float(value) for name, value in measured.items()}
    return {name: value for name, value in scores.items() if np.isfinite(value)}


@dataclass(frozen=True)
class ScoreTable:
    """A table of scores, as text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def tables(judgement: Mapping[str, Any]) -> Sequence[ScoreTable]:
    """Writes a judgement as a table: the model on each set, and beside it the baselines that know no model."""
    scored = [(VALIDATION, MODEL, judgement[VALIDATION])] if judgement.get(VALIDATION) else []
    for name, judged in judgement.get("test", {}).items():
        rivals = {MODEL: judged[MODEL], **judged.get("baselines", {})}
        scored += [(name, rival, scores) for rival, scores in rivals.items()]
    metrics = list(dict.fromkeys(metric for *_, scores in scored for metric in scores))
    if len(metrics) <= _MOST_COLUMNS:
        rows = [(name, rival, *(_number(scores.get(metric)) for metric in metrics)) for name, rival, scores in scored]
        return [ScoreTable("Scores", ("set", "", *metrics), rows)] if metrics else []
    # A table for each set, which is not wider than its methods are many.
    sets = dict.fromkeys(name for name, *_ in scored)
    return [_set_table(key, {rival: scores for name, rival, scores in scored if name == key}, metrics) for key in sets]


def _set_table(name: str, by_rival: Mapping[str, Mapping[str, float]], metrics: Sequence[str]) -> ScoreTable:
    rows = [(metric, *(_number(scores.get(metric)) for scores in by_rival.values())) for metric in metrics]
    return ScoreTable(f"Scores on {name}", ("", *by_rival), rows)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.{_DIGITS}g}"
