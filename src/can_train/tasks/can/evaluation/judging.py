"""Judges a detector, and writes the judgement as tables."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from can_train.config.resolved import ResolvedRun
from can_train.errors import RunError
from can_train.tasks.can.data.dataset import Split
from can_train.tasks.can.data.graphs import FlatGraphs
from can_train.tasks.can.evaluation.baselines import Baselines, fit_baselines
from can_train.tasks.can.evaluation.metrics import (
    KindRecall,
    Metrics,
    Threshold,
    choose_threshold,
    detector_metrics,
    recall_by_kind,
)

Score = Callable[..., NDArray[np.float64]]
"""Scores windows, `score(rows)`; `score(rows, role)` asks the reference model of that role."""


FLAGS_EVERYTHING_SHARE: Final = 0.99
"""Share of a folder's windows from which a detector is said to flag everything."""


INDISCRIMINATE_FPR: Final = 0.5
"""Share of the benign windows below which even that is not said: where nearly all windows are attacks, a good detector
flags nearly all of them too."""


SECONDS_PER_HOUR: Final = 3600.0


Judged = tuple[NDArray[np.float64], Threshold]
"""Scores of some windows, and the threshold of the detector that they are from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelScores:
    """A model's scores, higher is more attack-like, aligned with the rows of a `Split`.

    Attributes:
        validation: [R] float64, one for each validation row.
        test: The same for each test folder.
    """

    validation: NDArray[np.float64]
    test: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Detector:
    """A detector's scores, and its threshold."""

    scores: ModelScores
    threshold: Threshold

    def on(self, folder: str) -> Judged:
        """Returns its scores in a test folder, with the threshold."""
        return self.scores.test[folder], self.threshold


@dataclass(frozen=True, kw_only=True)
class JudgingOptions:
    """How a model is judged.

    Attributes:
        supervised: Whether it learned from attacks; decides the threshold's rule.
        validation_fpr: Share of the benign validation windows an anomaly detector may flag.
        baselines: Whether the baselines are computed.
        seed: Seed of the baselines.
    """

    supervised: bool
    validation_fpr: float
    baselines: bool
    seed: int

    @classmethod
    def of(cls, run: ResolvedRun, *, supervised: bool) -> "JudgingOptions":
        """Reads them from a run's settings."""
        mode, seed = run.mode, run.training.seed
        return cls(supervised=supervised, validation_fpr=mode.validation_fpr, baselines=mode.baselines, seed=seed)


class FolderJudgement(TypedDict):
    """What one test folder says about the model, about detectors that it is to be seen beside, and about the baselines."""

    model: Metrics
    references: dict[str, Metrics]
    baselines: dict[str, Metrics]
    recall_by_kind: dict[str, KindRecall]
    remarks: list[str]


class Decided(TypedDict):
    """What validation windows decided about a detector; of an autoencoder also the units of its errors."""

    threshold: float
    threshold_rule: str
    error_units: NotRequired[list[float]]


class Judgement(Decided):
    """The whole judgement, as it stands in a run's result: strict JSON. Data that no run was trained on have no
    validation part; `references` has the detectors that the model is seen beside, `absent` why any is missing.
    """

    validation: NotRequired[Metrics]
    test: dict[str, FolderJudgement]
    references: dict[str, Decided]
    absent: dict[str, str]


def judge(
    flat: FlatGraphs,
    split: Split,
    scores: ModelScores,
    options: JudgingOptions,
    references: Mapping[str, ModelScores] = MappingProxyType({}),
) -> Judgement:
    """Judges a model on every test folder.

    Args:
        flat: All windows.
        split: Which of them validate and are judged.
        scores: The model's.
        options: How it is judged.
        references: Scores of other detectors that it is to be seen beside, by name; each gets a threshold by the same rule,
            from validation scores of its own.

    Raises:
        RunError: A score is not a finite number.
        DataError: Validation allows no threshold.
    """
    model = Detector(scores, _threshold(flat, split, scores, options))
    others = {name: Detector(other, _threshold(flat, split, other, options)) for name, other in references.items()}
    return judge_at(flat, split, model, own_baselines(flat, split, options), others)


def own_baselines(flat: FlatGraphs, split: Split, options: JudgingOptions) -> Baselines:
    """Fits the baselines on a split's own training windows, where they are wanted.

    Raises:
        DataError: Validation allows no threshold.
    """
    if not options.baselines:
        return Baselines()
    return fit_baselines(flat, split.train, split.validation, seed=options.seed, fpr=options.validation_fpr)


def judge_at(
    flat: FlatGraphs,
    split: Split,
    model: Detector,
    baselines: Baselines,
    references: Mapping[str, Detector] = MappingProxyType({}),
) -> Judgement:
    """Judges a model whose threshold is known; validation, too, where the split has such a part.

    Args:
        flat: All windows.
        split: Which of them validate and are judged.
        model: The model.
        baselines: The baselines, fitted.
        references: Other detectors that it is to be seen beside, by name.

    Raises:
        RunError: A score is not a finite number.
    """
    for detector in (model, *references.values()):
        check_scores(detector.scores)
    threshold = model.threshold
    judgement = Judgement(
        threshold=threshold.value,
        threshold_rule=threshold.rule,
        test={
            folder: _judge_folder(
                flat, rows, model.on(folder), {name: other.on(folder) for name, other in references.items()}, baselines
            )
            for folder, rows in split.test.items()
        },
        references={
            name: Decided(threshold=other.threshold.value, threshold_rule=other.threshold.rule)
            for name, other in references.items()
        },
        absent=baselines.absent,
    )
    if len(split.validation):
        judgement["validation"] = _metrics(flat, split.validation, model.scores.validation, threshold)
    return judgement


def _threshold(flat: FlatGraphs, split: Split, scores: ModelScores, options: JudgingOptions) -> Threshold:
    """Chooses a detector's threshold from validation, once all of its scores are seen to be numbers."""
    check_scores(scores)
    return choose_threshold(
        flat.label[split.validation] > 0,
        scores.validation,
        supervised=options.supervised,
        fpr=options.validation_fpr,
    )


def check_scores(scores: ModelScores) -> None:
    """Checks that a detector's scores are numbers.

    Raises:
        RunError: One is not finite.
    """
    for name, values in {"validation": scores.validation, **scores.test}.items():
        _check_finite(name, values)


def _check_finite(name: str, score: NDArray[np.float64]) -> None:
    broken = int(np.count_nonzero(~np.isfinite(score)))
    if broken:
        raise RunError(
            "Every window's score must be a finite number",
            value=f"{broken} of {len(score)} in {name} are not",
            remedy="The model has diverged: lower the learning rate, clip gradients, or train in fp32",
        )


def _judge_folder(
    flat: FlatGraphs, rows: NDArray[np.int64], judged: Judged, others: Mapping[str, Judged], baselines: Baselines
) -> FolderJudgement:
    score, threshold = judged
    model = _metrics(flat, rows, score, threshold)
    references = {name: _metrics(flat, rows, *other) for name, other in others.items()}
    below = {
        baseline.name: _metrics(flat, rows, baseline.scorer.score(flat, rows), baseline.threshold)
        for baseline in baselines.fitted
    }
    labelled = np.array([source.labelled for source in flat.sources])[flat.source[rows]]
    return FolderJudgement(
        model=model,
        references=references,
        baselines=below,
        recall_by_kind=recall_by_kind(flat.label[rows], score > threshold.value, flat.kinds),
        remarks=remarks(model, {**references, **below}, unlabelled_windows=int(np.count_nonzero(~labelled))),
    )


def _metrics(flat: FlatGraphs, rows: NDArray[np.int64], score: NDArray[np.float64], threshold: Threshold) -> Metrics:
    return detector_metrics(flat.label[rows] > 0, score, score > threshold.value, benign_hours=benign_hours(flat, rows))


def benign_hours(flat: FlatGraphs, rows: NDArray[np.int64]) -> float:
    """Computes how long chosen windows watched benign traffic, in hours.

    A window lasts until the next chosen one begins, if that overlaps it or follows without a frame between them;
    otherwise until its own last frame. So no time counts twice, and none between chosen parts of a log counts.

    Args:
        flat: All windows.
        rows: [R] ascending.
    """
    start, end = flat.start_time[rows], flat.end_time[rows]
    adjoining = (np.diff(flat.source[rows]) == 0) & (np.diff(flat.first_frame[rows]) <= flat.window)
    until = np.append(np.where(adjoining, start[1:], end[:-1]), end[-1:])
    # Some logs step back in time between windows.
    seconds = np.maximum(until - start, 0.0)
    return float(seconds[flat.label[rows] == 0].sum()) / SECONDS_PER_HOUR


def remarks(model: Metrics, baselines: Mapping[str, Metrics], *, unlabelled_windows: int) -> list[str]:
    """Says in words what the figures of a folder hide.

    Args:
        model: The model's figures.
        baselines: The baselines' figures, by name.
        unlabelled_windows: How many of the windows come from logs that do not say what is an attack.
    """
    return [
        *_remarks_on_labels(model, unlabelled_windows),
        *_remarks_on_flags(model),
        *_remarks_on_baselines(model, baselines),
    ]


def _remarks_on_labels(model: Metrics, unlabelled_windows: int) -> list[str]:
    windows, attacks = model["windows"], model["attack_windows"]
    if unlabelled_windows == windows:
        return ["labels absent: all windows are presumed benign, only false-alarm figures are defined"]
    said = []
    if unlabelled_windows:
        said.append(f"{unlabelled_windows} of {windows} windows have no labels and are presumed benign")
    if not attacks:
        said.append("no attacks: only false-alarm figures are defined")
    if attacks == windows:
        said.append("all windows are attacks: false-alarm figures are not defined")
    return said


def _remarks_on_flags(model: Metrics) -> list[str]:
    share, attacks, fpr = model["flagged_share"], model["attack_windows"], model["false_positive_rate"]
    if share == 0 and attacks:
        return ["flags nothing: every attack is missed"]
    if share is None or share < FLAGS_EVERYTHING_SHARE:
        return []
    if fpr is not None and fpr < INDISCRIMINATE_FPR:
        return []
    if not attacks:
        return ["flags everything: every alarm is a false one"]
    return ["flags everything (recall 1.0 says nothing; accuracy = attack share)"]


def _remarks_on_baselines(model: Metrics, baselines: Mapping[str, Metrics]) -> list[str]:
    reached = model["mcc"]
    if reached is None:
        return []
    unbeaten = [
        f"{name} ({mcc:.3f})"
        for name, baseline in baselines.items()
        if (mcc := baseline["mcc"]) is not None and reached <= mcc
    ]
    return [f"does not beat {', '.join(unbeaten)} on MCC ({reached:.3f})"] if unbeaten else []


COLUMNS: Final = ("detector", "f1", "prec", "recall", "mcc", "pr_auc", "roc_auc", "r@1%", "alarm/h")
"""Headings; `r@1%` is recall at 1 % false positives, `alarm/h` are false alarms per hour."""


UNDEFINED: Final = "-"
"""What stands for a figure that the folder does not define."""


_MANY: Final = 100.0
"""Alarms per hour from which a decimal is noise."""


@dataclass(frozen=True, kw_only=True)
class FolderTable:
    """One test folder's figures as text.

    Attributes:
        title: The folder and what is in it.
        rows: Cells under `COLUMNS`, the model first, then what it is to be seen beside, then the baselines.
        notes: Recall by attack kind, and remarks.
        columns: The headings.
    """

    title: str
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    columns: tuple[str, ...] = COLUMNS


def judgement_table(judgement: Judgement) -> list[FolderTable]:
    """Writes a judgement as one table a test folder."""
    return [_folder_table(folder, judged) for folder, judged in judgement["test"].items()]


def _folder_table(folder: str, judged: FolderJudgement) -> FolderTable:
    model = judged["model"]
    # Results of older versions have nothing beside the model.
    detectors = {"model": model, **judged.get("references", {}), **judged["baselines"]}
    kinds = [f"{kind} {told['recall']:.3f} of {told['windows']:,}" for kind, told in judged["recall_by_kind"].items()]
    return FolderTable(
        title=f"{folder}: {model['windows']:,} windows, {model['attack_windows']:,} attacks",
        rows=tuple((name, *_cells(figures)) for name, figures in detectors.items()),
        notes=(*([f"recall by kind: {', '.join(kinds)}"] if kinds else []), *judged["remarks"]),
    )


def _cells(figures: Metrics) -> tuple[str, ...]:
    return (
        _rate(figures["f1"]),
        _rate(figures["precision"]),
        _rate(figures["recall"]),
        _rate(figures["mcc"]),
        _rate(figures["pr_auc"]),
        _rate(figures["roc_auc"]),
        _rate(figures["recall_at_fpr_1pct"]),
        _alarms(figures["false_alarms_per_hour"]),
    )


def _rate(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:.3f}"


def _alarms(value: float | None) -> str:
    if value is None:
        return UNDEFINED
    return f"{value:.1f}" if value < _MANY else f"{value:,.0f}"


STUDENT: Final = "model"
"""Name of what was trained, in tables and results."""


class TimedScore:
    """Scores windows, and sees how long that takes; the first time for each model is not counted, in which it is moved
    to the device and its limits are found.

    Args:
        score: Scores windows.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._taken: dict[str, tuple[int, float]] = {}

    def __call__(self, rows: NDArray[np.int64], *role: str) -> NDArray[np.float64]:
        """Scores windows with the model, or with the reference model of a role."""
        name = "".join(role)
        started = time.perf_counter()
        scores = self._score(rows, *role)
        seconds = time.perf_counter() - started
        windows, before = self._taken.get(name, (-len(rows), -seconds))
        self._taken[name] = windows + len(rows), before + seconds
        return scores

    def warm_up(self, rows: NDArray[np.int64], *role: str) -> None:
        """Scores the first of some windows, so that none that follow are the first time."""
        self(rows[:1], *role)

    def speed(self, role: str) -> float | None:
        """Returns windows a second; None where nothing was timed."""
        windows, seconds = self._taken.get(role, (0, 0.0))
        return round(windows / seconds, 1) if seconds > 0 else None


def tables_of(judgement: Mapping[str, Any]) -> list[FolderTable]:
    """Writes a judgement as one table a test folder, and one of sizes and speeds where they are compared."""
    tables = judgement_table(judgement)  # type: ignore[arg-type]
    return [*tables, comparison_table(judgement)] if "compared" in judgement else tables


def comparison_table(judgement: Mapping[str, Any]) -> FolderTable:
    """Writes sizes and speeds as a table."""
    compared: Mapping[str, Mapping[str, Any]] = judgement["compared"]
    rows = tuple(
        (
            name,
            UNDEFINED if told["parameters"] is None else f"{told['parameters']:,}",
            UNDEFINED if told["windows_per_second"] is None else f"{told['windows_per_second']:,.0f}",
            told["run"] or "",
        )
        for name, told in compared.items()
    )
    alone = "no student without a teacher is beside it: --without-teacher RUN"
    return FolderTable(
        title="size and speed, windows a second as they were judged",
        columns=("detector", "parameters", "windows/s", "run"),
        rows=rows,
        notes=() if "without_teacher" in {*compared, *judgement["absent"]} else (alone,),
    )
