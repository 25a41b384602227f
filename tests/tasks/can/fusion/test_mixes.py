"""The simple mixes beside the agent, and what is said of it."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from can_train_tasks.can.data.dataset import CanData
from can_train_tasks.can.data.graphs import Split
from can_train_tasks.can.evaluation.judging import JudgingOptions
from can_train_tasks.can.fusion.agent import MixingProblem
from can_train_tasks.can.fusion.mixes import (
    best_weight,
    constant_mix_remarks,
    constant_mixes,
    fitted_mixes,
    judge_agent,
    summarize_weights,
    weights_remark,
)
from can_train_tasks.can.fusion.mixing import WindowScores, mixing_weights
from fakes.fusion_problems import WEIGHTS, WINDOWS, divided_problem
from fakes.windows_by_hand import windows_of

BASELINES = ["flag_everything", "flag_nothing", "id_lookup", "gap_lookup", "silence", "random_forest"]
OPTIONS = JudgingOptions(supervised=True, validation_fpr=0.01, rules=False, baselines=True, seed=0)
ROWS = np.arange(WINDOWS)
SPLIT = Split(train=ROWS[:200], validation=ROWS[200:400], test={"test_01": ROWS[400:500], "test_02": ROWS[500:]})


def data_of(problem: MixingProblem, is_attack: NDArray[np.bool_] | None = None) -> CanData:
    label = (problem.is_attack if is_attack is None else is_attack).astype(int)
    flat = windows_of([[1, 2, 3]] * WINDOWS, label=label.tolist())
    return CanData(flat=flat, split=SPLIT, notices=())


def judged(problem: MixingProblem, weights: NDArray[np.float64], **options: Any) -> dict[str, Any]:
    """Judges an agent that chose these weights."""

    def score(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.stack([problem.scores.fused(rows, weights[rows]), weights[rows]], axis=1)

    return judge_agent(
        score, data_of(problem), problem.scores, problem.weights, JudgingOptions(**{**vars(OPTIONS), **options})
    )


def knowing_weights(problem: MixingProblem) -> NDArray[np.float64]:
    return np.where(problem.scores.errors[:, 2] > 0.5, 0.0, 1.0)


def test_the_mixes_are_compared_with_the_agent_in_the_same_table() -> None:
    problem = divided_problem()
    told = judged(problem, knowing_weights(problem))["test"]["test_01"]
    named = ["autoencoder", "classifier", "even_mix", "best_mix", "logistic", "small_mlp"]
    assert list(told["references"]) == named
    assert list(told["baselines"]) == BASELINES
    assert told["model"]["mcc"] > max(told["references"][name]["mcc"] for name in named[:4])
    assert not [remark for remark in told["remarks"] if "constant mix" in remark]


def test_an_agent_that_is_no_better_than_a_constant_mix_is_said_to_be() -> None:
    problem = divided_problem()
    judgement = judged(problem, np.full(WINDOWS, 0.5), baselines=False)
    best = judgement["mixing"]["best_mix"]
    for told in judgement["test"].values():
        reached, constant = told["model"]["mcc"], told["references"]["best_mix"]["mcc"]
        (remark,) = [remark for remark in told["remarks"] if "constant mix" in remark]
        expected = f"weight {best:g} for every window: MCC {reached:.3f}, the mix {constant:.3f}"
        assert remark == f"the agent does not beat the best constant mix, {expected}"


def test_without_baselines_nothing_is_fitted() -> None:
    problem = divided_problem()
    told = judged(problem, knowing_weights(problem), baselines=False)["test"]["test_01"]
    assert list(told["references"]) == ["autoencoder", "classifier", "even_mix", "best_mix"]
    assert told["baselines"] == {}


def test_the_judgement_is_strict_json_and_tells_the_weights() -> None:
    problem = divided_problem()
    judgement = judged(problem, knowing_weights(problem))
    assert json.loads(json.dumps(judgement, allow_nan=False)) == judgement
    chosen = judgement["mixing"]["chosen"]["test_02"]
    assert chosen["mean"] == pytest.approx(float(knowing_weights(problem)[500:].mean()))
    assert any(weights_remark(chosen) == remark for remark in judgement["test"]["test_02"]["remarks"])


def test_weights_are_told_by_their_mean_and_the_most_frequent() -> None:
    chosen = summarize_weights(np.array([0.0, 0.75, 0.75, 1.0]))
    assert chosen == {"mean": 0.625, "most_frequent": 0.75, "share": 0.5}
    assert weights_remark(chosen) == "weights chosen for the classifier: 0.62 on average, 0.75 for 50% of the windows"


@pytest.mark.parametrize(("reached", "constant"), [(None, 0.5), (0.5, None), (0.6, 0.5)])
def test_nothing_is_said_where_nothing_can_be_compared_or_the_agent_wins(
    reached: float | None, constant: float | None
) -> None:
    told: Any = {"model": {"mcc": reached}, "references": {"best_mix": {"mcc": constant}}}
    assert constant_mix_remarks(told, 0.5) == []
    assert constant_mix_remarks(SimpleNamespace(), None) == []  # type: ignore[arg-type]


def test_as_good_as_the_constant_mix_is_not_better() -> None:
    told: Any = {"model": {"mcc": 0.5}, "references": {"best_mix": {"mcc": 0.5}}}
    said = "the agent does not beat the best constant mix, weight 0.25 for every window: MCC 0.500, the mix 0.500"
    assert constant_mix_remarks(told, 0.25) == [said]


def scores_of(anomaly: NDArray[np.float64], attack: NDArray[np.float64]) -> WindowScores:
    return WindowScores(anomaly=anomaly, attack=attack, errors=np.zeros((len(attack), 3)))


def test_the_best_constant_weight_is_the_one_that_validation_likes_best() -> None:
    is_attack = np.arange(40) % 2 == 1
    knowing, guessing = np.where(is_attack, 0.9, 0.1), np.random.default_rng(0).random(40)
    rows, weights = np.arange(40), mixing_weights(WEIGHTS)
    # Of the many weights that separate both classes, the one closest to an even mix is taken.
    assert best_weight(scores_of(guessing, knowing), rows, is_attack, np.array([0.0, 0.1, 0.9, 1.0]), 0.01) == 0.9
    assert best_weight(scores_of(knowing, guessing), rows, is_attack, np.array([0.0, 0.1, 0.9, 1.0]), 0.01) == 0.1
    assert best_weight(scores_of(knowing, knowing), rows, is_attack, weights, 0.01) == 0.5


def test_the_best_weight_does_not_look_at_test_windows() -> None:
    problem = divided_problem()
    data = data_of(problem)
    before = constant_mixes(problem.scores, data.flat, SPLIT, problem.weights, 0.01)
    turned = problem.is_attack.copy()
    turned[400:] = ~turned[400:]
    problem.scores.attack[400:] = 0.0
    after = constant_mixes(problem.scores, data_of(problem, turned).flat, SPLIT, problem.weights, 0.01)
    assert before.best_weight == after.best_weight


@pytest.mark.parametrize("attacks", [False, True])
def test_where_validation_has_one_class_only_there_is_no_best_weight(attacks: bool) -> None:
    problem = divided_problem()
    is_attack = problem.is_attack.copy()
    is_attack[200:400] = attacks
    mixes = constant_mixes(problem.scores, data_of(problem, is_attack).flat, SPLIT, problem.weights, 0.01)
    assert mixes.best_weight is None
    assert list(mixes.mixes) == ["autoencoder", "classifier", "even_mix"]
    assert mixes.absent == {"best_mix": "the validation windows are of one class only"}


def test_fitted_mixes_learn_from_training_windows_alone() -> None:
    problem = divided_problem()
    fitted = fitted_mixes(problem.scores, data_of(problem).flat, SPLIT.train, 0)
    turned = problem.is_attack.copy()
    turned[200:] = ~turned[200:]
    again = fitted_mixes(problem.scores, data_of(problem, turned).flat, SPLIT.train, 0)
    for name in ("logistic", "small_mlp"):
        assert fitted[name].plain() == again[name].plain()
    found = fitted["small_mlp"].score(problem.scores, SPLIT.validation) > 0.5
    assert (found == problem.is_attack[200:400]).mean() > 0.75
