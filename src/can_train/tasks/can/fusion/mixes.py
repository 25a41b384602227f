"""Simple mixes of the two scores, and the agent judged beside them."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from can_train.tasks.can.data.dataset import CanData, Split
from can_train.tasks.can.data.graphs import FlatGraphs
from can_train.tasks.can.evaluation.baselines import sample_by_class
from can_train.tasks.can.evaluation.judging import FolderJudgement, Judgement, JudgingOptions, ModelScores, judge
from can_train.tasks.can.evaluation.metrics import choose_threshold, detector_metrics
from can_train.tasks.can.fusion.agent import FUSED, WEIGHT, MixingProblem
from can_train.tasks.can.fusion.scores import WindowScores, logistic

BEST_MIX: Final = "best_mix"
"""Name of the constant mix whose weight is the best one on validation."""


EVEN_WEIGHT: Final = 0.5


MAX_FITTED_WINDOWS: Final = 20_000
"""Training windows that a small model is fitted on: seconds, and far more than seven numbers need."""


HIDDEN: Final = (32,)
"""Widths of the small network."""


LOGISTIC_ROUNDS: Final = 1000


NETWORK_ROUNDS: Final = 100
"""Most iterations of each fit; on this few inputs both have settled long before."""


class Mix(Protocol):
    """Makes one score of two."""

    def score(self, table: WindowScores, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R] scores of chosen windows, in [0, 1]."""

    def plain(self) -> dict[str, Any]:
        """Returns it as strict JSON."""


@dataclass(frozen=True)
class ConstantMix:
    """The same mixing weight for every window."""

    weight: float

    def score(self, table: WindowScores, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R] fused scores."""
        return table.fused(rows, self.weight)

    def plain(self) -> dict[str, Any]:
        """Returns it as strict JSON."""
        return {"weight": self.weight}


@dataclass(frozen=True, eq=False)
class FittedMix:
    """A small network's probability of an attack, from the seven numbers that the agent sees. Without a hidden layer it
    is a logistic regression.

    Attributes:
        layers: Weights [inputs, outputs] and biases [outputs] of each layer.
    """

    layers: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]

    @classmethod
    def fit(
        cls, model: LogisticRegression | MLPClassifier, states: NDArray[np.float32], is_attack: NDArray[np.bool_]
    ) -> Self:
        """Fits scikit-learn's model to [R, 7] states of windows of both classes."""
        scaler = StandardScaler()
        inputs = scaler.fit_transform(states.astype(np.float64))
        with warnings.catch_warnings():
            # That the last digits still move is of no account.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(inputs, is_attack)
        if isinstance(model, MLPClassifier):
            (first, bias), *rest = zip(model.coefs_, model.intercepts_, strict=True)
        else:
            first, bias, rest = model.coef_.T, model.intercept_, []
        weights = first / scaler.scale_[:, None]
        return cls([(weights, bias - scaler.mean_ @ weights), *rest])

    def score(self, table: WindowScores, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R] probabilities."""
        values = table.states(rows).astype(np.float64)
        *hidden, (weights, bias) = self.layers
        for between, offset in hidden:
            values = np.maximum(values @ between + offset, 0.0)
        return logistic((values @ weights + bias)[:, 0])

    def plain(self) -> dict[str, Any]:
        """Returns it as strict JSON."""
        return {"layers": [[weights.tolist(), bias.tolist()] for weights, bias in self.layers]}


def mix_from_plain(plain: Mapping[str, Any]) -> Mix:
    """Reads what `plain` of a mix made, also after JSON."""
    if "weight" in plain:
        return ConstantMix(plain["weight"])
    return FittedMix([(np.asarray(weights), np.asarray(bias)) for weights, bias in plain["layers"]])


@dataclass(frozen=True, kw_only=True)
class ConstantMixes:
    """Mixes with one weight for all windows.

    Attributes:
        mixes: By name, in the order they are shown.
        best_weight: Of `BEST_MIX`; None where validation cannot tell.
        absent: Why any is missing, by name.
    """

    mixes: Mapping[str, Mix]
    best_weight: float | None
    absent: Mapping[str, str]


def constant_mixes(
    table: WindowScores, flat: FlatGraphs, split: Split, weights: NDArray[np.float64], fpr: float
) -> ConstantMixes:
    """Mixes with one weight for all windows: each score alone, half of each, and the weight that validation likes best.

    Args:
        table: The two scores.
        flat: All windows.
        split: Which of them validate.
        weights: [A] to choose from.
        fpr: Share of the benign validation windows that may be flagged where there are no attacks.
    """
    named = {"autoencoder": 0.0, "classifier": 1.0, "even_mix": EVEN_WEIGHT}
    absent: dict[str, str] = {}
    is_attack = flat.label[split.validation] > 0
    best = None
    if 0 < is_attack.sum() < len(is_attack):
        best = named[BEST_MIX] = best_weight(table, split.validation, is_attack, weights, fpr)
    else:
        absent[BEST_MIX] = "the validation windows are of one class only"
    mixes = {name: ConstantMix(weight) for name, weight in named.items()}
    return ConstantMixes(mixes=mixes, best_weight=best, absent=absent)


def best_weight(
    table: WindowScores,
    rows: NDArray[np.int64],
    is_attack: NDArray[np.bool_],
    weights: NDArray[np.float64],
    fpr: float,
) -> float:
    """Returns the weight with the highest MCC on validation; of equally good ones, the one closest to an even mix.

    Args:
        table: The two scores.
        rows: [R] validation windows.
        is_attack: [R] of both classes.
        weights: [A] to choose from.
        fpr: As for `choose_threshold`.
    """

    def merit(weight: float) -> tuple[float, float]:
        score = table.fused(rows, weight)
        threshold = choose_threshold(is_attack, score, supervised=True, fpr=fpr)
        reached = detector_metrics(is_attack, score, score > threshold.value, benign_hours=0.0)["mcc"]
        return reached or 0.0, -abs(weight - EVEN_WEIGHT)

    return max(map(float, weights), key=merit)


def fitted_mixes(table: WindowScores, flat: FlatGraphs, train: NDArray[np.int64], seed: int) -> dict[str, Mix]:
    """Mixes that small models learn from training windows, of the same seven numbers that the agent sees.

    Args:
        table: What they see.
        flat: All windows.
        train: [R] those that train, of both classes.
        seed: Of sampling and weights.
    """
    rows = sample_by_class(flat, train, most=MAX_FITTED_WINDOWS, seed=seed)
    models = {
        "logistic": LogisticRegression(class_weight="balanced", max_iter=LOGISTIC_ROUNDS),
        "small_mlp": MLPClassifier(HIDDEN, max_iter=NETWORK_ROUNDS, random_state=seed),
    }
    states, is_attack = table.states(rows), flat.label[rows] > 0
    return {name: FittedMix.fit(model, states, is_attack) for name, model in models.items()}


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
        options: How detectors are judged; without baselines the mixes that must be fitted are left out, too.

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
    fitted = fitted_mixes(problem.scores, data.flat, split.train, options.seed) if options.baselines else {}
    named = {**mixes.mixes, **fitted}
    references = {
        name: ModelScores(
            validation=mix.score(problem.scores, split.validation),
            test={folder: mix.score(problem.scores, rows) for folder, rows in split.test.items()},
        )
        for name, mix in named.items()
    }
    judgement = judge(data.flat, split, chosen, options, references)
    judgement["absent"] |= mixes.absent
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
    reached, constant = judged["model"]["mcc"], judged["references"][BEST_MIX]["mcc"]
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
