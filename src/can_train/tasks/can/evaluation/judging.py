"""Judges detectors folder by folder, compares them, and writes the judgement as tables.

All that is decided about a detector, its threshold and the units of its errors, comes from validation windows.

Shapes: R rows (windows).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NotRequired, TypedDict

import numpy as np

from can_train.config.resolved import ResolvedRun
from can_train.errors import RunError
from can_train.io.units import shortened
from can_train.tasks.can.data.graphs import FlatGraphs, Floats, Ints
from can_train.tasks.can.evaluation import metrics
from can_train.tasks.can.evaluation.baselines import Baselines, fit_baselines

if TYPE_CHECKING:
    from can_train.tasks.can.data.graphs import Split

# Share of flagged windows from which a remark says that a detector flags everything.
FLAGS_EVERYTHING_SHARE: Final = 0.99
# False-positive rate below which that remark is left out: where nearly all windows are attacks, a good detector flags
# nearly all of them.
INDISCRIMINATE_FPR: Final = 0.5
SECONDS_PER_HOUR: Final = 3600.0

TRAINED: Final = "model"  # name of the model that the run trained, in results and tables
UNDEFINED: Final = "-"  # cell of a figure that the folder does not define
_YES: Final = "yes"
_NO: Final = "NO"  # in capitals, so that it is seen in a column of `yes`
MANY_ALARMS: Final = 100.0  # per hour, from which a decimal is noise

# Figures of a table by heading. The headings are short because the widest row must fit 80 columns: `r@1%` is recall at
# 1 % false positives, `alarm/h` are false alarms per hour.
_RATES: Final = {
    "f1": "f1", "prec": "precision", "recall": "recall", "mcc": "mcc", "pr_auc": "pr_auc", "roc_auc": "roc_auc",
    "r@1%": "recall_at_fpr_1pct",
}  # fmt: skip
COLUMNS: Final = ("detector", *_RATES, "alarm/h")

# The same for the summary, which has a row for each test folder.
_SUMMARY_RATES: Final = {"MCC": "mcc", "PR-AUC": "pr_auc", "recall@1%": "recall_at_fpr_1pct"}
SUMMARY_COLUMNS: Final = ("folder", *_SUMMARY_RATES, "alarms/h", "best baseline", "its MCC", "beaten")
_LONGEST_NAME: Final = 15  # characters; longer ones are cut at their beginning
_SUMMARY_LEGEND: Final = (
    "MCC: 1 is perfect, 0 no better than chance; a baseline with less is beaten",
    "PR-AUC: area under the precision-recall curve",
    "recall@1%: attack windows found where 1 % of the benign ones are flagged",
    "alarms/h: false alarms in an hour of benign traffic",
)
_NOT_BEATEN: Final = "does not beat"  # begins the remark that the summary has as a column

# Scores windows: `score(rows)` with the trained model, `score(rows, role)` with the reference model of that role.
Score = Callable[..., Floats]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelScores:
    """A detector's final scores, higher is more attack-like, aligned with the rows of a `Split`.

    Attributes:
        validation: [R] float64, one for each validation row; empty where the split has none.
        test: The same for each test folder.
        error_units: Units of an autoencoder's error terms, which the scores are made with.
    """

    validation: Floats
    test: Mapping[str, Floats]
    error_units: list[float] | None = None


@dataclass(frozen=True)
class Detector:
    """A detector's scores and its threshold."""

    scores: ModelScores
    threshold: metrics.Threshold

    def record(self) -> ThresholdRecord:
        """Returns what validation decided about the detector, as strict JSON."""
        record = ThresholdRecord(threshold=self.threshold.value, threshold_rule=self.threshold.rule)
        if self.scores.error_units is not None:
            record["error_units"] = self.scores.error_units
        return record


@dataclass(frozen=True, kw_only=True)
class JudgingOptions:
    """How a model is judged.

    Attributes:
        supervised: Whether it learned from attacks, which decides the threshold's rule.
        validation_fpr: Share of the benign validation windows that an anomaly detector may flag.
        baselines: Whether the baselines are computed, with `seed`.
    """

    supervised: bool
    validation_fpr: float
    baselines: bool
    seed: int

    @classmethod
    def of(cls, run: ResolvedRun, *, supervised: bool) -> JudgingOptions:
        """Takes the options from the settings of a run."""
        mode, seed = run.mode, run.training.seed
        return cls(supervised=supervised, validation_fpr=mode.validation_fpr, baselines=mode.baselines, seed=seed)


class FolderJudgement(TypedDict):
    """Figures of one test folder, by detector."""

    model: metrics.Metrics
    references: dict[str, metrics.Metrics]
    baselines: dict[str, metrics.Metrics]
    recall_by_kind: dict[str, metrics.KindRecall]
    remarks: list[str]


class ThresholdRecord(TypedDict):
    """What validation decided about a detector; `error_units` are those of an autoencoder."""

    threshold: float
    threshold_rule: str
    error_units: NotRequired[list[float]]


class Judgement(ThresholdRecord):
    """The `judgement` of a run's result: strict JSON.

    `references` are the models and mixes that the model is compared with; `absent` has the reason for each missing
    detector. Data that no run was trained on have no validation part.
    """

    validation: NotRequired[metrics.Metrics]
    test: dict[str, FolderJudgement]
    references: dict[str, ThresholdRecord]
    absent: dict[str, str]


def judge(
    flat: FlatGraphs, split: Split, scores: ModelScores, options: JudgingOptions, references: Mapping[str, ModelScores]
) -> Judgement:
    """Judges a model on every test folder, together with references by name; one rule chooses all thresholds.

    Raises:
        RunError: A score is not a finite number.
        DataError: Validation allows no threshold.
    """
    is_attack = flat.label[split.validation] > 0

    def with_threshold(one: ModelScores) -> Detector:
        check_scores(one)
        validation, fpr = one.validation, options.validation_fpr
        threshold = metrics.choose_threshold(is_attack, validation, supervised=options.supervised, fpr=fpr)
        return Detector(one, threshold)

    model = with_threshold(scores)
    others = {name: with_threshold(one) for name, one in references.items()}
    return judge_at(flat, split, model, own_baselines(flat, split, options), others)


def own_baselines(flat: FlatGraphs, split: Split, options: JudgingOptions) -> Baselines:
    """Fits the baselines on the training windows of a split, if the options ask for them.

    Raises:
        DataError: Validation allows no threshold.
    """
    if not options.baselines:
        return Baselines()
    return fit_baselines(flat, split.train, split.validation, seed=options.seed, fpr=options.validation_fpr)


def judge_at(
    flat: FlatGraphs, split: Split, model: Detector, baselines: Baselines, references: Mapping[str, Detector]
) -> Judgement:
    """Judges a model whose threshold is known. The split's validation part may be empty.

    Raises:
        RunError: A score is not a finite number.
    """
    for detector in (model, *references.values()):
        check_scores(detector.scores)
    detectors = {TRAINED: model, **references}
    judgement = Judgement(
        threshold=model.threshold.value,
        threshold_rule=model.threshold.rule,
        test={folder: _judge_folder(flat, split, folder, detectors, baselines) for folder in split.test},
        references={name: other.record() for name, other in references.items()},
        absent=baselines.absent,
    )
    if model.scores.error_units is not None:
        judgement["error_units"] = model.scores.error_units
    if len(split.validation):
        judgement["validation"] = _metrics(flat, split.validation, model.scores.validation, model.threshold)
    return judgement


def check_scores(scores: ModelScores) -> None:
    """Checks that all scores of a detector are finite.

    Raises:
        RunError: One is not.
    """
    for part, values in {"validation": scores.validation, **scores.test}.items():
        broken = int(np.count_nonzero(~np.isfinite(values)))
        if broken:
            raise RunError(
                "Every window's score must be a finite number",
                value=f"{broken} of {len(values)} in {part} are not",
                remedy="The model has diverged: lower the learning rate, clip gradients, or train in fp32",
            )


def _judge_folder(
    flat: FlatGraphs, split: Split, folder: str, detectors: Mapping[str, Detector], baselines: Baselines
) -> FolderJudgement:
    rows = split.test[folder]
    references = {name: _metrics(flat, rows, one.scores.test[folder], one.threshold) for name, one in detectors.items()}
    model = references.pop(TRAINED)
    simple = {one.name: _metrics(flat, rows, one.score(flat, rows), one.threshold) for one in baselines.fitted}
    trained = detectors[TRAINED]
    flagged = trained.scores.test[folder] > trained.threshold.value
    labelled = np.array([source.labelled for source in flat.sources])[flat.source[rows]]
    return FolderJudgement(
        model=model,
        references=references,
        baselines=simple,
        recall_by_kind=metrics.recall_by_kind(flat.label[rows], flagged, flat.kinds),
        remarks=remarks(model, {**references, **simple}, unlabelled_windows=int(np.count_nonzero(~labelled))),
    )


def _metrics(flat: FlatGraphs, rows: Ints, score: Floats, threshold: metrics.Threshold) -> metrics.Metrics:
    hours = benign_hours(flat, rows)
    return metrics.detector_metrics(flat.label[rows] > 0, score, score > threshold.value, benign_hours=hours)


def benign_hours(flat: FlatGraphs, rows: Ints) -> float:
    """Computes how long [R] chosen windows, ascending, observed benign traffic, in hours.

    A window lasts until the next chosen one begins, if that overlaps it or follows without a frame between them;
    otherwise until its own last frame. So no time counts twice, and none between chosen parts of a log counts.
    """
    start, end = flat.start_time[rows], flat.end_time[rows]
    adjoining = (np.diff(flat.source[rows]) == 0) & (np.diff(flat.first_frame[rows]) <= flat.window)
    until = np.append(np.where(adjoining, start[1:], end[:-1]), end[-1:])
    # Some logs step back in time between windows.
    seconds = np.maximum(until - start, 0.0)
    return float(seconds[flat.label[rows] == 0].sum()) / SECONDS_PER_HOUR


def remarks(model: metrics.Metrics, others: Mapping[str, metrics.Metrics], *, unlabelled_windows: int) -> list[str]:
    """Writes sentences about what the figures of a folder hide; `others` are those of the compared detectors."""
    windows, attacks = model["windows"], model["attack_windows"]
    share, fpr, mcc = model["flagged_share"], model["false_positive_rate"], model["mcc"]
    found = []
    if unlabelled_windows == windows:
        found.append("labels absent: all windows are presumed benign, only false-alarm figures are defined")
    else:
        if unlabelled_windows:
            found.append(f"{unlabelled_windows} of {windows} windows have no labels and are presumed benign")
        if not attacks:
            found.append("no attacks: only false-alarm figures are defined")
        if attacks == windows:
            found.append("all windows are attacks: false-alarm figures are not defined")
    if share == 0 and attacks:
        found.append("flags nothing: every attack is missed")
    elif share is not None and share >= FLAGS_EVERYTHING_SHARE and (fpr is None or fpr >= INDISCRIMINATE_FPR):
        why = "(recall 1.0 says nothing; accuracy = attack share)"
        found.append(f"flags everything {why}" if attacks else "flags everything: every alarm is a false one")
    if mcc is not None:
        rivals = {name: other["mcc"] for name, other in others.items()}
        unbeaten = [f"{name} ({rival:.3f})" for name, rival in rivals.items() if rival is not None and mcc <= rival]
        if unbeaten:
            found.append(f"{_NOT_BEATEN} {', '.join(unbeaten)} on MCC ({mcc:.3f})")
    return found


class TimedScore:
    """Scores windows and measures how long that takes.

    The first call for each model is not counted: in it the model is moved to the device and its limits are found.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._counted: dict[str, tuple[int, float]] = {}

    def __call__(self, rows: Ints, *role: str) -> Floats:
        """Scores windows with the trained model, or with the reference model of a role."""
        name = "".join(role)
        started = time.perf_counter()
        scores = self._score(rows, *role)
        seconds = time.perf_counter() - started
        windows, before = self._counted.get(name, (-len(rows), -seconds))
        self._counted[name] = windows + len(rows), before + seconds
        return scores

    def speed(self, role: str = "") -> float | None:
        """Returns windows a second; None where nothing was counted."""
        windows, seconds = self._counted.get(role, (0, 0.0))
        return round(windows / seconds, 1) if seconds > 0 else None


@dataclass(frozen=True, kw_only=True)
class JudgementTable:
    """A table of a judgement, as text."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    columns: tuple[str, ...] = COLUMNS


def judgement_tables(judgement: Mapping[str, Any]) -> list[JudgementTable]:
    """Writes a judgement as one table for each test folder, and one of sizes and speeds where it has them.

    In a table of a folder the model comes first, then the references, then the baselines.
    """
    tables = [_folder_table(folder, judged) for folder, judged in judgement["test"].items()]
    return [*tables, _comparison_table(judgement)] if "compared" in judgement else tables


def _folder_table(folder: str, judged: FolderJudgement) -> JudgementTable:
    model = judged["model"]
    detectors: Mapping[str, Mapping[str, Any]] = {TRAINED: model, **judged["references"], **judged["baselines"]}
    rows = []
    for name, figures in detectors.items():
        rates = (_cell(figures[rate], ".3f") for rate in _RATES.values())
        rows.append((name, *rates, _alarms_cell(figures["false_alarms_per_hour"])))
    by_kind = judged["recall_by_kind"].items()
    kinds = ", ".join(f"{kind} {found['recall']:.3f} of {found['windows']:,}" for kind, found in by_kind)
    title = f"{folder}: {model['windows']:,} windows, {model['attack_windows']:,} attacks"
    notes = (*([f"recall by kind: {kinds}"] if kinds else []), *judged["remarks"])
    return JudgementTable(title=title, rows=tuple(rows), notes=notes)


def summary_tables(judgement: Mapping[str, Any]) -> list[JudgementTable]:
    """Writes a judgement as one table: the model's figures in each test folder, and the best baseline there."""
    folders: Mapping[str, FolderJudgement] = judgement["test"]
    short = _short_names([*folders])
    rows = tuple(_summary_row(short[folder], judged) for folder, judged in folders.items())
    beaten = [row[-1] for row in rows if row[-1] != UNDEFINED]
    notes = [f"The model beats the best baseline in {beaten.count(_YES)} of {len(beaten)} test folders."] * bool(beaten)
    names_by_remark: dict[str, list[str]] = {}
    for folder, judged in folders.items():
        for remark in judged["remarks"]:
            names_by_remark.setdefault(remark, []).append(short[folder])
    remarks = {remark: names for remark, names in names_by_remark.items() if not remark.startswith(_NOT_BEATEN)}
    notes += [f"{', '.join(names)}: {remark}." for remark, names in remarks.items()]
    notes += _SUMMARY_LEGEND
    if any(short[folder] != folder for folder in folders):
        notes.append(", ".join(folders))
    title = "How well the model finds attacks in each test folder"
    return [JudgementTable(title=title, columns=SUMMARY_COLUMNS, rows=rows, notes=tuple(notes))]


def _short_names(folders: Sequence[str]) -> dict[str, str]:
    """Shortens the names of folders so that the summary stays a table on 80 columns."""
    short = shortened(folders)
    for number, name in enumerate(folders, start=1):
        if len(short[name]) > _LONGEST_NAME:
            label = f"{number}:…" if len(folders) > 1 else "…"
            short[name] = label + short[name][len(label) - _LONGEST_NAME :]
    return short


def _summary_row(name: str, judged: FolderJudgement) -> tuple[str, ...]:
    model: Mapping[str, Any] = judged["model"]
    rates = (_cell(model[rate], ".3f") for rate in _SUMMARY_RATES.values())
    rivals = {rival: figures["mcc"] for rival, figures in judged["baselines"].items() if figures["mcc"] is not None}
    best = max(rivals, key=lambda rival: rivals[rival], default=None)
    alarms = _alarms_cell(model["false_alarms_per_hour"])
    if best is None or model["mcc"] is None:
        return (name, *rates, alarms, UNDEFINED, UNDEFINED, UNDEFINED)
    return (name, *rates, alarms, best, _cell(rivals[best], ".3f"), _YES if model["mcc"] > rivals[best] else _NO)


def _alarms_cell(alarms: float | None) -> str:
    return _cell(alarms, ".1f" if alarms is not None and alarms < MANY_ALARMS else ",.0f")


def _cell(value: float | None, spec: str) -> str:
    return UNDEFINED if value is None else format(value, spec)


def _comparison_table(judgement: Mapping[str, Any]) -> JudgementTable:
    compared: Mapping[str, Mapping[str, Any]] = judgement["compared"]
    remedy = "no student without a teacher is compared with it: --without-teacher RUN"
    return JudgementTable(
        title="size and speed, windows a second as they were judged",
        columns=("detector", "parameters", "windows/s", "run"),
        rows=tuple(
            (name, _cell(one["parameters"], ","), _cell(one["windows_per_second"], ",.0f"), one["run"] or "")
            for name, one in compared.items()
        ),
        notes=() if "without_teacher" in {*compared, *judgement["absent"]} else (remedy,),
    )
