"""The scores in a run's `result.json`: by metric and test set, and which run has the best."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from can_train.config.settings import metric_direction
from can_train.errors import ConfigError, unknown_name

_HEADLINE_METRICS: Final = ("mcc", "best_validation_loss")
"""The first of these metrics in a result is its score in a list."""


ValuesByMetric = Mapping[str, Mapping[str, float]]
"""Values by test set, by the name of a metric."""


@dataclass(frozen=True, kw_only=True)
class RankedResult:
    """A result's value of a metric: the mean over its test sets, and the value by test set."""

    index: int
    value: float
    parts: Mapping[str, float]


def rank(values: Sequence[ValuesByMetric], metric: str, direction: str = "") -> list[RankedResult]:
    """Orders results by a metric, the best first; results without the metric are left out.

    Args:
        values: The `metric_values` of each result.
        metric: `best_validation_loss`; `mcc`, the mean over all test sets; `validation.mcc`; or the value on one test
            set, `test_05_suppress.mcc`.
        direction: `max` where a higher value is better, else `min`; empty: the metric's name tells it.

    Raises:
        ConfigError: No result has the metric; the message lists the metrics of the results, nearest first. Or its name
            does not tell a direction.
    """
    if not any(metric in by_name for by_name in values):
        names = {name for by_name in values for name in by_name}
        # The metrics of every single test set would fill a page.
        error = unknown_name("metric", metric, {name.rpartition(".")[2] for name in names})
        sets = ", ".join(sorted({name.rpartition(".")[0] for name in names} - {""}))
        of_set = f"; of one set as SET.METRIC: {sets}" if sets else ""
        raise ConfigError(error.rule, value=error.value, remedy=f"{error.remedy}{of_set}")
    if not (direction := direction or direction_of(metric)):
        raise ConfigError(
            "The name of the metric does not tell whether a higher or a lower value is better",
            value=f"--best {metric}",
            remedy=f"Write --best {metric}:max, or :min in place of :max",
        )
    ranked = [
        RankedResult(index=index, value=sum(parts.values()) / len(parts), parts=parts)
        for index, by_name in enumerate(values)
        if (parts := by_name.get(metric))
    ]
    return sorted(ranked, key=lambda result: result.value, reverse=direction == "max")


def higher_is_better(metric: str) -> bool:
    """Returns whether a higher value of a metric is better; `SET.METRIC` counts as its metric."""
    return direction_of(metric) == "max"


def direction_of(metric: str) -> str:
    """Returns `max`, `min`, or an empty text where a metric's name does not tell; `SET.METRIC` counts as its metric."""
    return metric_direction(metric.rpartition(".")[2])


def is_ranked(metric: str) -> bool:
    """Returns whether a metric's name tells if a higher or a lower value is better; counts and shares rank nothing."""
    return bool(metric_direction(metric))


def score(result: Mapping[str, Any]) -> tuple[str, float] | None:
    """Returns the metric that stands for a result in a list, and its mean over the test sets."""
    return headline(metric_values(result))


def headline(values: ValuesByMetric) -> tuple[str, float] | None:
    """Returns the metric that stands for a result in a list, and its mean over the test sets."""
    for metric in _HEADLINE_METRICS:
        if parts := values.get(metric):
            return metric, sum(parts.values()) / len(parts)
    return None


def by_test_set(result: Mapping[str, Any], metric: str) -> dict[str, float]:
    """Returns the value of a metric on each test set whose result defines it."""
    return metric_values(result).get(metric, {})


def test_scores(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the model's finite scores on the test sets, by metric, including metrics that rank nothing."""
    scores: dict[str, dict[str, float]] = {}
    for set_name, test in mapping(mapping(result.get("judgement")).get("test")).items():
        for name, value in mapping(mapping(test).get("model")).items():
            if isinstance(value, int | float) and math.isfinite(value):
                scores.setdefault(name, {})[set_name] = float(value)
    return scores


def metric_values(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the values in a `result.json` of each metric, by test set, as `METRIC`, `SET.METRIC` and
    `validation.METRIC`. Of the result's own figures, those are metrics that rank.
    """
    values: dict[str, dict[str, float]] = {}
    judgement = mapping(result.get("judgement"))
    for set_name, test in mapping(judgement.get("test")).items():
        for name, value in _finite_values(mapping(test).get("model")):
            values.setdefault(name, {})[set_name] = value
            values[f"{set_name}.{name}"] = {set_name: value}
    for name, value in _finite_values(judgement.get("validation")):
        values[f"validation.{name}"] = {"validation": value}
    return values | {name: {"": value} for name, value in _finite_values(result) if is_ranked(name)}


def _finite_values(metrics: Any) -> Iterator[tuple[str, float]]:
    for name, value in mapping(metrics).items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def mapping(value: Any) -> Mapping[str, Any]:
    """Returns an object of a JSON file, or an empty one: a result of another version may have anything in its place."""
    return value if isinstance(value, Mapping) else {}
