"""Which result is best by a metric."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from can_train.errors import ConfigError, unknown_name

_HIGHER_IS_BETTER: Final = frozenset(
    ("f1", "precision", "recall", "mcc", "pr_auc", "roc_auc", "recall_at_fpr_1pct", "accuracy")
)

_LOWER_IS_BETTER: Final = frozenset(("best_validation_loss", "false_positive_rate", "false_alarms_per_hour"))
"""What is in neither set (counts, thresholds, shares) ranks nothing."""


@dataclass(frozen=True, kw_only=True)
class RankedResult:
    """The metric of one of several results: the mean over its test sets, and by test set."""

    index: int
    value: float
    parts: Mapping[str, float]


def rank(results: Sequence[Mapping[str, Any]], metric: str) -> list[RankedResult]:
    """Orders results by a metric, the best first; results without it are left out.

    Args:
        results: Contents of `result.json`.
        metric: `best_validation_loss`; `mcc`, the mean over all test sets; `validation.mcc`, or that of one test set,
            `test_05_suppress.mcc`.

    Raises:
        ConfigError: No result has such a metric; the message lists those there are, nearest first.
    """
    values = [_values(result) for result in results]
    known = {name for each in values for name in each}
    if metric not in known:
        # The metrics of every single test set would fill a page.
        error = unknown_name("metric", metric, {name.rpartition(".")[2] for name in known})
        sets = ", ".join(sorted({name.rpartition(".")[0] for name in known} - {""}))
        of_set = f"; of one set as SET.METRIC: {sets}" if sets else ""
        raise ConfigError(error.rule, value=error.value, remedy=f"{error.remedy}{of_set}")
    ranked = [
        RankedResult(index=index, value=sum(parts.values()) / len(parts), parts=parts)
        for index, each in enumerate(values)
        if (parts := each.get(metric))
    ]
    return sorted(ranked, key=lambda one: one.value, reverse=metric.rpartition(".")[2] in _HIGHER_IS_BETTER)


def by_test_set(result: Mapping[str, Any], metric: str) -> dict[str, float]:
    """Returns a metric's value for each test set of a result that defines it."""
    return _values(result).get(metric, {})


def _values(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the values by test set of each metric, and of each metric of a single set."""
    found: dict[str, dict[str, float]] = {}
    judgement = _mapping(result.get("judgement"))
    for set_name, test in _mapping(judgement.get("test")).items():
        for name, value in _ranking_metrics(_mapping(test).get("model")):
            found.setdefault(name, {})[set_name] = value
            found[f"{set_name}.{name}"] = {set_name: value}
    for name, value in _ranking_metrics(judgement.get("validation")):
        found[f"validation.{name}"] = {"validation": value}
    return found | {name: {"": value} for name, value in _ranking_metrics(result)}


def _ranking_metrics(metrics: Any) -> Iterator[tuple[str, float]]:
    for name, value in _mapping(metrics).items():
        if name in _HIGHER_IS_BETTER | _LOWER_IS_BETTER and isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    """A result of another version may have anything in place of an object."""
    return value if isinstance(value, Mapping) else {}
