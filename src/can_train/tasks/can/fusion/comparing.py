"""Judges the fusion agent beside simple mixes of the same scores, and says in words what came of its choices.

Shapes: R windows of a folder, A mixing weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from can_train.tasks.can.dataset import CanData
from can_train.tasks.can.fusion.batch import MixingProblem
from can_train.tasks.can.fusion.finished import FUSED, WEIGHT
from can_train.tasks.can.fusion.mixes import BEST_MIX, constant_mixes, fitted_mixes
from can_train.tasks.can.judging import FolderJudgement, Judgement, JudgingOptions, ModelScores, judge


def judge_agent(
    score: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    data: CanData,
    problem: MixingProblem,
    options: JudgingOptions,
) -> dict[str, Any]:
    """Judges the agent and the mixes, each with a threshold from validation.

    Args:
        score: Returns [R, 2] fused scores and chosen mixing weights of windows.
        data: The windows.
        problem: Their two scores, and the weights that there are.
        options: How detectors are judged; without floors the mixes that must be fitted are left out, too.

    Returns:
        The judgement; `mixing` tells which weights were chosen, and what the mixes are.

    Raises:
        RunError: A score is not a finite number.
        DataError: Validation allows no threshold.
    """
    split = data.split
    validation, test = score(split.validation), {folder: score(rows) for folder, rows in split.test.items()}
    chosen = ModelScores(
        validation=validation[:, FUSED], test={folder: told[:, FUSED] for folder, told in test.items()}
    )
    mixes = constant_mixes(problem.scores, data.flat, split, problem.weights, options.validation_fpr)
    fitted = fitted_mixes(problem.scores, data.flat, split.train, options.seed) if options.floors else {}
    named = {**mixes.mixes, **fitted}
    beside = {
        name: ModelScores(
            validation=mix.score(problem.scores, split.validation),
            test={folder: mix.score(problem.scores, rows) for folder, rows in split.test.items()},
        )
        for name, mix in named.items()
    }
    judgement = judge(data.flat, split, chosen, options, beside)
    judgement["absent_floors"] |= mixes.absent
    mixing = {BEST_MIX: mixes.best_weight, "mixes": {name: mix.plain() for name, mix in named.items()}}
    return with_choices(judgement, mixing, {folder: told[:, WEIGHT] for folder, told in test.items()})


def with_choices(
    judgement: Judgement, mixing: Mapping[str, Any], weights: Mapping[str, NDArray[np.float64]]
) -> dict[str, Any]:
    """Adds to an agent's judgement what came of its choices, in figures and in words.

    Args:
        judgement: Its remarks are added to.
        mixing: What the mixes are.
        weights: [R] those that it chose, by folder.
    """
    chosen = {folder: weights_chosen(each) for folder, each in weights.items()}
    for folder, judged in judgement["test"].items():
        judged["remarks"] += [*verdict(judged, mixing[BEST_MIX]), told_in_words(chosen[folder])]
    return {**judgement, "mixing": {**mixing, "chosen": chosen}}


def verdict(judged: FolderJudgement, best_weight: float | None) -> list[str]:
    """Says where a folder shows that one weight for all windows does as well as the agent.

    Args:
        judged: The folder.
        best_weight: Of the best constant mix; None where there is none.
    """
    if best_weight is None:
        return []
    reached, constant = judged["model"]["mcc"], judged["beside"][BEST_MIX]["mcc"]
    if reached is None or constant is None or reached > constant:
        return []
    of_them = f"MCC {reached:.3f}, the mix {constant:.3f}"
    return [f"the agent does not beat the best constant mix, weight {best_weight:g} for every window: {of_them}"]


def weights_chosen(weights: NDArray[np.float64]) -> dict[str, float]:
    """Describes the [R] mixing weights that the agent chose: their mean, the most frequent one, and its share."""
    values, counts = np.unique(weights, return_counts=True)
    often = int(np.argmax(counts))
    return {
        "mean": float(weights.mean()),
        "most_frequent": float(values[often]),
        "share": float(counts[often] / len(weights)),
    }


def told_in_words(chosen: dict[str, float]) -> str:
    """Writes `weights_chosen` as a sentence."""
    often = f"{chosen['most_frequent']:g} for {chosen['share']:.0%} of the windows"
    return f"weights chosen for the classifier: {chosen['mean']:.2f} on average, {often}"
