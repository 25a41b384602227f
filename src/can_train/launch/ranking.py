"""Which of several finished runs is best by a metric of their results, and which metrics there are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from can_train.errors import ConfigError, unknown_name

_HIGHER: Final = frozenset(("f1", "precision", "recall", "mcc", "pr_auc", "roc_auc", "recall_at_fpr_1pct", "accuracy"))
"""Metrics of which more is better."""

_LOWER: Final = frozenset(("best_validation_loss", "false_positive_rate", "false_alarms_per_hour"))
"""Metrics of which less is better. What is in neither (counts, thresholds, shares) ranks nothing."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A run's value of a metric.

    Attributes:
        index: Which of the results.
        value: The metric; of several test sets their mean.
        parts: By test set, where there are several.
    """

    index: int
    value: float
    parts: Mapping[str, float]


def rank(results: Sequence[Mapping[str, Any]], metric: str) -> list[Ranked]:
    """Orders results by a metric, the best first; results without it are left out.

    Args:
        results: What `result.json` holds, of finished runs.
        metric: `best_validation_loss`; `mcc`, the mean over all test sets; `validation.mcc`, or that of one test set,
            `test_05_suppress.mcc`.

    Raises:
        ConfigError: No result has such a metric; the message lists those there are, nearest first.
    """
    values = [_values(result) for result in results]
    known = {name for each in values for name in each}
    if metric not in known:
        # Those of single test sets would be a page.
        error = unknown_name("metric", metric, {name.rpartition(".")[2] for name in known})
        sets = ", ".join(sorted({name.rpartition(".")[0] for name in known} - {""}))
        of_set = f"; of one set as SET.METRIC: {sets}" if sets else ""
        raise ConfigError(error.rule, value=error.value, remedy=f"{error.remedy}{of_set}")
    found = [
        Ranked(index=index, value=sum(parts.values()) / len(parts), parts=parts)
        for index, each in enumerate(values)
        if (parts := each.get(metric))
    ]
    return sorted(found, key=lambda ranked: ranked.value, reverse=metric.rpartition(".")[2] in _HIGHER)


def by_test_set(result: Mapping[str, Any], metric: str) -> dict[str, float]:
    """Returns a metric's value for each test set of a result that defines it."""
    return _values(result).get(metric, {})


def _values(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns each metric's values by test set."""
    found: dict[str, dict[str, float]] = {}
    judgement = result.get("judgement")
    tests = judgement.get("test") if isinstance(judgement, Mapping) else None
    sets = {name: test.get("model") for name, test in tests.items()} if isinstance(tests, Mapping) else {}
    for set_name, metrics in sets.items():
        for name, value in _ranking(metrics).items():
            found.setdefault(name, {})[set_name] = value
            found[f"{set_name}.{name}"] = {set_name: value}
    validation = judgement.get("validation") if isinstance(judgement, Mapping) else None
    for name, value in _ranking(validation).items():
        found[f"validation.{name}"] = {"validation": value}
    found |= {name: {"": value} for name, value in _ranking(result).items()}
    return found


def _ranking(metrics: Any) -> dict[str, float]:
    """Picks the metrics that rank, where they are numbers."""
    if not isinstance(metrics, Mapping):
        return {}
    return {
        name: float(value)
        for name, value in metrics.items()
        if name in _HIGHER | _LOWER and isinstance(value, int | float) and math.isfinite(value)
    }
