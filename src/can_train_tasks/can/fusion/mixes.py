"""Simple mixes of the two scores, and the judgement of the agent in comparison with the mixes.

Shapes: R rows (windows), A mixing weights.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from can_train_tasks.can.data.dataset import CanData
from can_train_tasks.can.data.graphs import Bools, FlatGraphs, Floats, Ints, Split
from can_train_tasks.can.evaluation.baselines import sample_by_class
from can_train_tasks.can.evaluation.judging import FolderJudgement, Judgement, JudgingOptions, ModelScores, judge
from can_train_tasks.can.evaluation.metrics import choose_threshold, detector_metrics
from can_train_tasks.can.fusion.mixing import FUSED, WEIGHT, WindowScores, as_log_odds, logistic

BEST_MIX: Final = "best_mix"  # name of the constant mix whose weight is the best on validation
EVEN_WEIGHT: Final = 0.5
MAX_FITTED_WINDOWS: Final = 20_000  # training windows of a fit: it takes seconds, and seven inputs need no more
HIDDEN: Final = (32,)  # widths of the small network
# Most iterations of each fit; with seven inputs both fits converge earlier, except for the last digits.
LOGISTIC_ROUNDS: Final = 1000
NETWORK_ROUNDS: Final = 100


class ConstantMix(NamedTuple):
    """One mixing weight for all windows."""

    weight: float

    def score(self, table: WindowScores, rows: Ints) -> Floats:
        """Returns fused scores [R]."""
        return table.fused(rows, self.weight)

    def plain(self) -> dict[str, Any]:
        """Returns the mix as strict JSON."""
        return {"weight": self.weight}


@dataclass(frozen=True, eq=False)
class FittedMix:
    """A small network that predicts attacks from the agent's inputs; without a hidden layer, a logistic regression.

    Attributes:
        layers: Weights [inputs, outputs] and biases [outputs] of each layer.
    """

    layers: Sequence[tuple[Floats, Floats]]

    @classmethod
    def fit(cls, model: LogisticRegression | MLPClassifier, states: NDArray[np.float32], is_attack: Bools) -> Self:
        """Fits scikit-learn's model to states [R, 7] of windows of both classes."""
        scaler = StandardScaler()
        inputs = scaler.fit_transform(states.astype(np.float64))
        with warnings.catch_warnings():
            # The warning is about the last digits; no judgement depends on these.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(inputs, is_attack)
        if isinstance(model, MLPClassifier):
            (first, bias), *rest = zip(model.coefs_, model.intercepts_, strict=True)
        else:
            first, bias, rest = model.coef_.T, model.intercept_, []
        # The first layer includes the scaling, so a mix is its layers alone.
        weights = first / scaler.scale_[:, None]
        return cls([(weights, bias - scaler.mean_ @ weights), *rest])

    def score(self, table: WindowScores, rows: Ints) -> Floats:
        """Returns attack probabilities [R]."""
        values = table.states(rows).astype(np.float64)
        *hidden, (weights, bias) = self.layers
        for hidden_weights, hidden_bias in hidden:
            values = np.maximum(values @ hidden_weights + hidden_bias, 0.0)
        return logistic((values @ weights + bias)[:, 0])

    def plain(self) -> dict[str, Any]:
        """Returns the mix as strict JSON."""
        return {"layers": [[weights.tolist(), bias.tolist()] for weights, bias in self.layers]}


Mix = ConstantMix | FittedMix


def mix_from_plain(plain: Mapping[str, Any]) -> Mix:
    """Reads the result of `plain`, also after JSON."""
    if "weight" in plain:
        return ConstantMix(plain["weight"])
    return FittedMix([(np.asarray(weights), np.asarray(bias)) for weights, bias in plain["layers"]])


class ConstantMixes(NamedTuple):
    """The mixes with one weight for all windows."""

    mixes: Mapping[str, Mix]  # by name, in the order of the tables
    best_weight: float | None  # weight of `BEST_MIX`; None where validation has one class only
    absent: Mapping[str, str]  # the reason for each missing mix, by name


def constant_mixes(table: WindowScores, flat: FlatGraphs, split: Split, weights: Floats, fpr: float) -> ConstantMixes:
    """Makes the mixes with one weight: each score alone, the even mix, and the best of `weights` [A] on validation."""
    named = {"autoencoder": 0.0, "classifier": 1.0, "even_mix": EVEN_WEIGHT}
    is_attack = flat.label[split.validation] > 0
    best, absent = None, {BEST_MIX: "the validation windows are of one class only"}
    if 0 < is_attack.sum() < len(is_attack):
        best, absent = best_weight(table, split.validation, is_attack, weights, fpr), {}
        named[BEST_MIX] = best
    return ConstantMixes({name: ConstantMix(weight) for name, weight in named.items()}, best, absent)


def best_weight(table: WindowScores, rows: Ints, is_attack: Bools, weights: Floats, fpr: float) -> float:
    """Returns the weight with the highest MCC on validation windows `rows` [R] of both classes.

    Among equally good weights, the weight closest to an even mix wins. `fpr` is an argument of `choose_threshold`.
    """

    def merit(weight: float) -> tuple[float, float]:
        score = table.fused(rows, weight)
        threshold = choose_threshold(is_attack, score, supervised=True, fpr=fpr)
        mcc = detector_metrics(is_attack, score, score > threshold.value, benign_hours=0.0)["mcc"]
        return mcc or 0.0, -abs(weight - EVEN_WEIGHT)

    return max(map(float, weights), key=merit)


def fitted_mixes(table: WindowScores, flat: FlatGraphs, train: Ints, seed: int) -> dict[str, Mix]:
    """Fits small models to the agent's inputs on training windows `train` of both classes."""
    rows = sample_by_class(flat, train, most=MAX_FITTED_WINDOWS, seed=seed)
    models = {
        "logistic": LogisticRegression(class_weight="balanced", max_iter=LOGISTIC_ROUNDS),
        "small_mlp": MLPClassifier(HIDDEN, max_iter=NETWORK_ROUNDS, random_state=seed),
    }
    states, is_attack = table.states(rows), flat.label[rows] > 0
    return {name: FittedMix.fit(model, states, is_attack) for name, model in models.items()}


def judge_agent(
    score: Callable[[Ints], Floats], data: CanData, table: WindowScores, weights: Floats, options: JudgingOptions
) -> dict[str, Any]:
    """Judges the agent and the mixes, each with a threshold from validation; without baselines, no mix is fitted.

    Args:
        score: Returns fused scores and chosen mixing weights of windows, [R, 2].
        data: The windows.
        table: The two scores of all windows.
        weights: [A] mixing weights that the agent chooses from.
        options: Options of the judgement.

    Returns:
        The judgement, with `mixing`: the mixes, and the chosen weights.

    Raises:
        RunError: A score is not a finite number.
        DataError: Validation allows no threshold.
    """
    flat, split = data.flat, data.split
    validation = score(split.validation)[:, FUSED]
    test = {folder: score(rows) for folder, rows in split.test.items()}
    agent = ModelScores(validation=validation, test={folder: columns[:, FUSED] for folder, columns in test.items()})
    constant = constant_mixes(table, flat, split, weights, options.validation_fpr)
    fitted = fitted_mixes(table, flat, split.train, options.seed) if options.baselines else {}
    mixes = {**constant.mixes, **fitted}
    references = {}
    for name, mix in mixes.items():
        test_scores = {folder: mix.score(table, rows) for folder, rows in split.test.items()}
        references[name] = as_log_odds(ModelScores(validation=mix.score(table, split.validation), test=test_scores))
    judgement = judge(flat, split, as_log_odds(agent), options, references)
    judgement["absent"] |= constant.absent
    mixing = {BEST_MIX: constant.best_weight, "mixes": {name: mix.plain() for name, mix in mixes.items()}}
    return with_choices(judgement, mixing, {folder: columns[:, WEIGHT] for folder, columns in test.items()})


def with_choices(judgement: Judgement, mixing: Mapping[str, Any], weights: Mapping[str, Floats]) -> dict[str, Any]:
    """Adds the agent's mixing weights [R] in each folder to its judgement: as figures, and in the remarks."""
    chosen = {folder: summarize_weights(each) for folder, each in weights.items()}
    for folder, judged in judgement["test"].items():
        judged["remarks"] += [*constant_mix_remarks(judged, mixing[BEST_MIX]), weights_remark(chosen[folder])]
    return {**judgement, "mixing": {**mixing, "chosen": chosen}}


def constant_mix_remarks(judged: FolderJudgement, best_weight: float | None) -> list[str]:
    """Returns a remark if the agent's MCC in a folder does not exceed the best constant mix's, where that exists."""
    if best_weight is None or BEST_MIX not in judged["references"]:
        return []
    reached, constant = judged["model"]["mcc"], judged["references"][BEST_MIX]["mcc"]
    if reached is None or constant is None or reached > constant:
        return []
    figures = f"MCC {reached:.3f}, the mix {constant:.3f}"
    return [f"the agent does not beat the best constant mix, weight {best_weight:g} for every window: {figures}"]


def summarize_weights(weights: Floats) -> dict[str, float]:
    """Returns the mean of the chosen weights [R], the most frequent weight, and its share."""
    values, counts = np.unique(weights, return_counts=True)
    largest = int(np.argmax(counts))
    share = float(counts[largest] / len(weights))
    return {"mean": float(weights.mean()), "most_frequent": float(values[largest]), "share": share}


def weights_remark(chosen: Mapping[str, float]) -> str:
    """Writes the result of `summarize_weights` as a sentence."""
    frequent = f"{chosen['most_frequent']:g} for {chosen['share']:.0%} of the windows"
    return f"weights chosen for the classifier: {chosen['mean']:.2f} on average, {frequent}"
