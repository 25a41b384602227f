"""Which run is best: in the direction of the metric, over one test set or all of them."""

import math
from typing import Any

import pytest

from can_train.errors import ConfigError
from can_train.report.scores import metric_values
from can_train.report.scores import rank as ranked_by


def result(loss: float, **mcc: float) -> dict[str, Any]:
    """A result with an mcc, and as many false alarms, for each test set."""
    tests = {
        name: {"model": {"mcc": value, "false_alarms_per_hour": value, "windows": 9}} for name, value in mcc.items()
    }
    return {"best_validation_loss": loss, "judgement": {"validation": {"mcc": loss}, "test": tests}}


def rank(results: list[dict[str, Any]], metric: str) -> list[Any]:
    return ranked_by([metric_values(each) for each in results], metric)


RESULTS = [result(0.3, easy=0.9, hard=0.1), result(0.2, easy=0.6, hard=0.6), result(0.4)]


@pytest.mark.parametrize(
    ("metric", "order"),
    [
        ("best_validation_loss", [1, 0, 2]),
        ("mcc", [1, 0]),
        ("easy.mcc", [0, 1]),
        ("validation.mcc", [2, 0, 1]),
        ("easy.false_alarms_per_hour", [1, 0]),
    ],
)
def test_the_best_comes_first(metric: str, order: list[int]) -> None:
    assert [ranked.index for ranked in rank(RESULTS, metric)] == order


def test_over_several_test_sets_the_mean_counts() -> None:
    ranked = rank(RESULTS, "mcc")[1]
    assert ranked.value == pytest.approx(0.5)
    assert ranked.parts == {"easy": 0.9, "hard": 0.1}


def test_a_figure_that_is_none_ranks_nothing() -> None:
    assert [ranked.index for ranked in rank([result(math.nan), result(0.5)], "best_validation_loss")] == [1]


@pytest.mark.parametrize("metric", ["mmc", "window", "easy.mmc", ""])
def test_an_unknown_metric_lists_those_there_are(metric: str) -> None:
    with pytest.raises(ConfigError, match=r"Unknown metric(.|\n)*mcc(.|\n)*SET\.METRIC: easy, hard, validation"):
        rank(RESULTS, metric)


@pytest.mark.parametrize("odd", [{}, {"judgement": None}, {"judgement": {"test": {"easy": {}}, "validation": 3}}])
def test_a_result_of_another_form_ranks_nothing(odd: dict[str, Any]) -> None:
    assert [ranked.index for ranked in rank([odd, *RESULTS], "mcc")] == [2, 1]


def test_a_metric_whose_name_tells_no_direction_is_ranked_by_a_given_one() -> None:
    results = [result(0.3, easy=0.9), result(0.2, easy=0.6)]
    for number, each in enumerate(results):
        each["judgement"]["test"]["easy"]["model"]["windows"] = number
    values = [metric_values(each) for each in results]
    assert [[each.index for each in ranked_by(values, name, direction)]
            for name, direction in (("windows", "max"), ("easy.windows", "min"))] == [[1, 0], [0, 1]]  # fmt: skip
    with pytest.raises(ConfigError, match="--best windows:max, or :min"):
        rank(results, "windows")
