"""Judges detectors folder by folder, compares them, and writes the judgement as tables.

The threshold of a detector and the units of its errors come from validation windows only.

Shapes: R rows (windows).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NotRequired, TypedDict, cast

import numpy as np

from can_train.config.resolved import ResolvedRun
from can_train.errors import RunError
from can_train.io.units import counted, shortened
from can_train.reporter import TextTable
from can_train_tasks.can.data.graphs import FlatGraphs, Floats, Ints
from can_train_tasks.can.evaluation import metrics
from can_train_tasks.can.evaluation.baselines import FOREST_SEEDS, BaselineOptions, Baselines, fit_baselines
from can_train_tasks.can.evaluation.bursts import (
    SECONDS_PER_HOUR,
    USUAL_HOLD,
    Blocks,
    BurstFigures,
    MccDifference,
    Timeline,
    burst_figures,
    mean_burst_figures,
)
from can_train_tasks.can.evaluation.calibration import BenignScores
from can_train_tasks.can.evaluation.options import Hold
from can_train_tasks.can.evaluation.rules import RareWindows, Rules, RuleScale, learned, learned_notes
from can_train_tasks.can.evaluation.self_check import clock_step_us, highest_load
from can_train_tasks.can.inputs import rare_id_notes, rare_ids, training_bases
from can_train_tasks.can.settings import BEHAVIOUR_FEATURES, NOTHING_TESTED

if TYPE_CHECKING:
    from can_train_tasks.can.data.dataset import CanData
    from can_train_tasks.can.data.graphs import Split

# Share of flagged windows: above it, a remark says that a detector flags everything.
FLAGS_EVERYTHING_SHARE: Final = 0.99
# With a lower false-positive rate, that remark is left out: where nearly all windows are attacks, a good detector flags
# nearly all windows.
INDISCRIMINATE_FPR: Final = 0.5

TRAINED: Final = "model"  # name of the model that the run trained, in results and tables
UNDEFINED: Final = "-"  # cell of a figure that the folder does not define
_YES: Final = "yes"
_NO: Final = "NO"  # in capitals, so that it is seen in a column of `yes`
_OPEN: Final = "open"  # the interval of the difference has both signs, or there is none
MANY_ALARMS: Final = 100.0  # per hour: decimals of larger figures are noise

# Figures of a table by heading. The headings are short because the widest row must fit 80 columns: `r@1%` is recall at
# 1 % false positives, `alarm/h` are false alarms per hour.
_RATES: Final = {
    "f1": "f1", "prec": "precision", "recall": "recall", "mcc": "mcc", "pr_auc": "pr_auc", "roc_auc": "roc_auc",
    "r@1%": "recall_at_fpr_1pct",
}  # fmt: skip
COLUMNS: Final = ("detector", *_RATES, "alarm/h")
BURST_COLUMNS: Final = ("detector", "found", "latency s", "false/h", "in alarm", "MCC ahead", "95 % interval")
BURST_SUMMARY_COLUMNS: Final = ("folder", "bursts found", "latency s", "false events/h", "in alarm")

# Columns of the summary, which has a row for each test folder.
_SUMMARY_RATES: Final = {"MCC": "mcc", "PR-AUC": "pr_auc", "recall@1%": "recall_at_fpr_1pct"}
SUMMARY_COLUMNS: Final = ("folder", *_SUMMARY_RATES, "alarms/h", "best baseline", "its MCC", "beaten")
_LONGEST_NAME: Final = 15  # characters; longer ones are cut at their beginning
_SUMMARY_LEGEND: Final = (
    "MCC: 1 is perfect, 0 no better than chance",
    "beaten: the 95 % interval of the MCC difference is above 0; open: around 0",
    "PR-AUC: area under the precision-recall curve",
    "recall@1%: attack windows found where 1 % of the benign ones are flagged",
    "alarms/h: false alarms in an hour of benign traffic",
)
_NOT_BEATEN: Final = "does not surely beat"  # begins the remark that the summary has as a column

# Scores windows: `score(rows)` with the trained model, `score(rows, role)` with the reference model of that role.
Score = Callable[..., Floats]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelScores:
    """A detector's final scores, higher is more attack-like, aligned with the rows of a `Split`.

    Attributes:
        validation: [R] float64, one for each validation row; empty where the split has none.
        test: [F] float64 for each test folder.
        error_units: Units of an autoencoder's error terms in the scores; None for other detectors.
        rule_scale: The place of the rules on the scale of the scores; None where no rules have raised the scores.
    """

    validation: Floats
    test: Mapping[str, Floats]
    error_units: list[float] | None = None
    rule_scale: RuleScale | None = None


@dataclass(frozen=True)
class Detector:
    """A detector's scores and its threshold."""

    scores: ModelScores
    threshold: metrics.Threshold

    def record(self) -> ThresholdRecord:
        """Returns the decisions of validation about the detector, as strict JSON."""
        record = ThresholdRecord(threshold=self.threshold.value, threshold_rule=self.threshold.rule)
        if self.scores.error_units is not None:
            record["error_units"] = self.scores.error_units
        if self.scores.rule_scale is not None:
            record["rule_scale"] = self.scores.rule_scale.plain()
        return record


@dataclass(frozen=True, kw_only=True)
class JudgingOptions:
    """Options of the judgement of a model.

    Attributes:
        supervised: Whether the model learned from attacks, which decides the threshold's rule.
        validation_fpr: Share of the benign validation windows that an anomaly detector may flag.
        rules: Whether rules raise the scores of networks (see `Rules`).
        baselines: Whether the baselines are computed, with `seed`, on the model's `features`.
        hold: Flagged windows that raise an alarm, for burst-level figures.
        prepared: Folder of the prepared data, which keeps scores of baselines; None: they are not kept.
    """

    supervised: bool
    validation_fpr: float
    rules: bool
    baselines: bool
    seed: int
    features: str = BEHAVIOUR_FEATURES
    hold: Hold = USUAL_HOLD
    prepared: Path | None = None

    @classmethod
    def of(cls, run: ResolvedRun, data: CanData, *, supervised: bool) -> JudgingOptions:
        """Takes the options from the settings of a run."""
        mode, seed = run.mode, run.training.seed
        return cls(supervised=supervised, validation_fpr=mode.validation_fpr, rules=mode.rules,
                   baselines=mode.baselines, seed=seed, features=run.dataset.features,
                   prepared=data.folder)  # fmt: skip


class FolderJudgement(TypedDict):
    """Figures of one test folder, by detector.

    Figures of a baseline that is fitted several times are means; `ranges` has the lowest and highest of each figure.
    `differences` compares the model with each other detector.
    """

    model: metrics.Metrics
    references: dict[str, metrics.Metrics]
    baselines: dict[str, metrics.Metrics]
    ranges: dict[str, dict[str, list[float]]]
    bursts: dict[str, BurstFigures]
    differences: dict[str, MccDifference]
    recall_by_kind: dict[str, metrics.KindRecall]
    remarks: list[str]


class ThresholdRecord(TypedDict):
    """The decisions of validation about a detector; an autoencoder has `error_units`, a network with rules has
    `rule_scale` (see `RuleScale`).
    """

    threshold: float
    threshold_rule: str
    error_units: NotRequired[list[float]]
    rule_scale: NotRequired[dict[str, float | None]]


class Judgement(ThresholdRecord):
    """The `judgement` of a run's result: strict JSON.

    `references` are the models and mixes that the model is compared with; `absent` has the reason for each missing
    detector. Data that no run was trained on have no validation part. `benign` is the distribution of scores over the
    benign validation windows (see `BenignScores`), `rare_ids` names the CAN IDs whose timing training was too short to
    tell (see `inputs.rare_ids`), `bases` has the number bases of the training data (see `training_bases`), `bus_load`
    is the highest number of frames a second in benign training drives (see `highest_load`), `clock_us` the coarsest
    steps of a clock in training (see `clock_step_us`), `rules` has the rules that raise the scores of networks (see
    `Rules`), `learned` what training had for them (see `rules.learned`).
    """

    validation: NotRequired[metrics.Metrics]
    benign: NotRequired[dict[str, Any]]
    rare_ids: NotRequired[dict[str, Any]]
    bases: NotRequired[dict[str, str]]
    bus_load: NotRequired[float | None]
    clock_us: NotRequired[int | None]
    rules: NotRequired[dict[str, Any]]
    learned: NotRequired[dict[str, int]]
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
    rules = Rules.fit(flat, split) if options.rules else None
    parts = {"": split.validation, **split.test}
    rare = {} if rules is None else {part: rules.windows(flat, rows) for part, rows in parts.items()}

    def threshold_of(detector: ModelScores) -> metrics.Threshold:
        fpr = options.validation_fpr
        return metrics.choose_threshold(is_attack, detector.validation, supervised=options.supervised, fpr=fpr)

    detectors = {}
    for name, detector_scores in {TRAINED: scores, **references}.items():
        check_scores(detector_scores)
        detector = Detector(detector_scores, threshold_of(detector_scores))
        if rules is not None:
            scale = RuleScale.of(detector_scores.validation[~is_attack], detector.threshold.value)
            threshold = threshold_of(raised(detector_scores, scale, rare))
            # On the vehicles of training, checks and jumps find so many attacks that a threshold for the other windows
            # would miss attacks on other vehicles. So a broken check does not count for the threshold, which flags it
            # anyway, and other vehicles are judged by the network's own threshold.
            scale = replace(scale, chosen=threshold.value)
            detector = Detector(raised(detector_scores, scale, rare), threshold)
        detectors[name] = detector
    judgement = judge_at(flat, split, detectors, own_baselines(flat, split, options), options.hold)
    judgement["rare_ids"] = rare_ids(flat, split.train)
    judgement["bus_load"] = highest_load(flat, split.train)
    judgement["clock_us"] = clock_step_us(flat, split.train)
    judgement["bases"] = training_bases(flat, split.train)
    if not is_attack.all():
        timeline = Timeline.of(flat, split.validation[~is_attack])
        validation = detectors[TRAINED].scores.validation
        judgement["benign"] = BenignScores.of(timeline, validation[~is_attack]).plain()
    if options.rules:
        judgement["learned"] = learned(rules, flat, split)
    if rules is not None:
        judgement["rules"] = rules.plain()
    return judgement


def raised(scores: ModelScores, scale: RuleScale, rare: Mapping[str, RareWindows]) -> ModelScores:
    """Raises a network's scores of the windows of validation ("") and of each test folder."""
    return replace(
        scores,
        validation=scale.raised(scores.validation, rare[""]),
        test={folder: scale.raised(score, rare[folder]) for folder, score in scores.test.items()},
        rule_scale=scale,
    )


def own_baselines(flat: FlatGraphs, split: Split, options: JudgingOptions) -> Baselines:
    """Fits the baselines on the training windows of a split, if the options ask for them.

    Raises:
        DataError: Validation allows no threshold.
    """
    if not options.baselines:
        return Baselines()
    wanted = BaselineOptions(seed=options.seed, fpr=options.validation_fpr, features=options.features,
                             prepared=options.prepared)  # fmt: skip
    return fit_baselines(flat, split, wanted)


def judge_at(
    flat: FlatGraphs, split: Split, detectors: Mapping[str, Detector], baselines: Baselines, hold: Hold
) -> Judgement:
    """Judges the model `TRAINED`, other detectors and baselines by their known thresholds.

    The split's validation part may be empty.

    Raises:
        RunError: A score is not a finite number.
    """
    for detector in detectors.values():
        check_scores(detector.scores)
    model = detectors[TRAINED]
    references = {name: other.record() for name, other in detectors.items() if name != TRAINED}
    plain = {**model.record(), "test": {}, "references": references, "absent": baselines.absent}
    judgement = cast(Judgement, plain)
    for folder, rows in split.test.items():
        fits = {name: [_Fit(detector.scores.test[folder], detector.threshold.value, False)]
                for name, detector in detectors.items()}  # fmt: skip
        for baseline in baselines.fitted:
            fit = _Fit(baseline.score(flat, rows), baseline.threshold.value, True)
            fits.setdefault(baseline.name, []).append(fit)
        judgement["test"][folder] = _judge_folder(flat, rows, fits, hold)
    if len(split.validation):
        judgement["validation"] = _metrics(flat, split.validation, model.scores.validation, model.threshold.value)
    return judgement


def check_scores(scores: ModelScores) -> None:
    """Checks that all scores of a detector are finite.

    Raises:
        RunError: A score is not finite.
    """
    for part, values in {"validation": scores.validation, **scores.test}.items():
        if broken := int(np.count_nonzero(~np.isfinite(values))):
            raise RunError(f"{broken} of {len(values)} scores in {part} are not finite numbers", remedy="The model has "
                           "diverged: lower the learning rate, clip gradients, or train in fp32")  # fmt: skip


class _Fit(NamedTuple):
    """A detector on one folder; a baseline that is fitted several times has one `_Fit` for each fit."""

    score: Floats
    threshold: float
    is_baseline: bool


def _judge_folder(flat: FlatGraphs, rows: Ints, fits: Mapping[str, Sequence[_Fit]], hold: Hold) -> FolderJudgement:
    timeline = Timeline.of(flat, rows)
    every = {name: [_metrics(flat, rows, fit.score, fit.threshold) for fit in several]
             for name, several in fits.items()}  # fmt: skip
    compared, ranges = {}, {}
    for name, several in every.items():
        compared[name], ranges[name] = metrics.means_and_ranges(several)
    model = compared.pop(TRAINED)
    flagged = {name: [fit.score > fit.threshold for fit in several] for name, several in fits.items()}
    (model_flagged,) = flagged.pop(TRAINED)
    # One seed for all runs: the same blocks are drawn, so that the intervals of runs can be compared.
    differences = Blocks(timeline, seed=0).differences(model_flagged, flagged)
    labelled = np.array([source.labelled for source in flat.sources])[flat.source[rows]]
    unlabelled = int(np.count_nonzero(~labelled))
    return FolderJudgement(
        model=model,
        references={name: figures for name, figures in compared.items() if not fits[name][0].is_baseline},
        baselines={name: figures for name, figures in compared.items() if fits[name][0].is_baseline},
        ranges={name: bounds for name, bounds in ranges.items() if len(fits[name]) > 1},
        bursts={
            name: mean_burst_figures([burst_figures(timeline, fit.score, fit.threshold, hold) for fit in several])
            for name, several in fits.items()
        },
        differences=differences,
        recall_by_kind=metrics.recall_by_kind(flat.label[rows], model_flagged, flat.kinds),
        remarks=remarks(model, compared, differences, unlabelled_windows=unlabelled),
    )


def _metrics(flat: FlatGraphs, rows: Ints, score: Floats, threshold: float) -> metrics.Metrics:
    hours = benign_hours(flat, rows)
    return metrics.detector_metrics(flat.label[rows] > 0, score, score > threshold, benign_hours=hours)


def benign_hours(flat: FlatGraphs, rows: Ints) -> float:
    """Computes the hours of benign traffic in windows `rows` [R], ascending.

    Time in two windows counts once, and time between two stretches of windows does not count (see `Timeline.of`).
    """
    return float(Timeline.of(flat, rows).benign_s.sum()) / SECONDS_PER_HOUR


def remarks(
    model: metrics.Metrics,
    others: Mapping[str, metrics.Metrics],
    differences: Mapping[str, MccDifference],
    *,
    unlabelled_windows: int,
) -> list[str]:
    """Writes remarks about a folder that its figures alone hide; `others` has the figures of compared detectors."""
    windows, attacks = model["windows"], model["attack_windows"]
    share, fpr, mcc = model["flagged_share"], model["false_positive_rate"], model["mcc"]
    sentences = []
    if unlabelled_windows == windows:
        sentences.append("labels absent: all windows are presumed benign, only false-alarm figures are defined")
    else:
        if unlabelled_windows:
            sentences.append(f"{unlabelled_windows} of {windows} windows have no labels and are presumed benign")
        if not attacks:
            sentences.append("no attacks: only false-alarm figures are defined")
        if attacks == windows:
            sentences.append("all windows are attacks: false-alarm figures are not defined")
    if share == 0 and attacks:
        sentences.append("flags nothing: every attack is missed")
    elif share is not None and share >= FLAGS_EVERYTHING_SHARE and (fpr is None or fpr >= INDISCRIMINATE_FPR):
        why = "(recall 1.0 says nothing; accuracy = attack share)"
        sentences.append(f"flags everything {why}" if attacks else "flags everything: every alarm is a false one")
    unbeaten = [f"{name} ({others[name]['mcc']:.3f})" for name, lead in differences.items() if _is_unbeaten(lead)]
    if mcc is not None and unbeaten:
        unsure = any(lead["low"] is None for lead in differences.values())
        why = ", with too few bursts for an interval" if unsure else ""
        sentences.append(f"{_NOT_BEATEN} {', '.join(unbeaten)} on MCC ({mcc:.3f}){why}")
    return sentences


def _is_unbeaten(difference: MccDifference) -> bool:
    return (difference["mcc"] if difference["low"] is None else difference["low"]) <= 0


class TimedScore:
    """Scores windows and measures the time.

    The first call for each model is not counted: it moves the model to the device and finds the model's batch limit.
    `first` scores the windows of this call; None: as `score` does.
    """

    def __init__(self, score: Score, first: Score | None = None) -> None:
        self._score, self._first = score, first or score
        self._counted: dict[str, tuple[int, float]] = {}

    def __call__(self, rows: Ints, *role: str) -> Floats:
        """Scores windows with the trained model, or with the reference model of a role."""
        name = "".join(role)
        started = time.perf_counter()
        scores = (self._score if name in self._counted else self._first)(rows, *role)
        seconds = time.perf_counter() - started
        windows, before = self._counted.get(name, (-len(rows), -seconds))
        self._counted[name] = windows + len(rows), before + seconds
        return scores

    def speed(self, role: str = "") -> float | None:
        """Returns windows per second; None without a counted call."""
        windows, seconds = self._counted.get(role, (0, 0.0))
        return round(windows / seconds, 1) if seconds > 0 else None


def judgement_tables(judgement: Mapping[str, Any]) -> list[TextTable]:
    """Writes a judgement as two tables for each test folder, and a table of sizes and speeds if it has them.

    In the tables of a folder the model comes first, then the references, then the baselines.
    """
    tables = []
    for folder, judged in judgement["test"].items():
        tables += [_folder_table(folder, judged), *([_burst_table(folder, judged)] if judged.get("bursts") else [])]
    return [*tables, _comparison_table(judgement)] if "compared" in judgement else tables


def _folder_table(folder: str, judged: FolderJudgement) -> TextTable:
    model = judged["model"]
    detectors: Mapping[str, Mapping[str, Any]] = {TRAINED: model, **judged["references"], **judged["baselines"]}
    rows = []
    for name, figures in detectors.items():
        rates = (_cell(figures[rate], ".3f") for rate in _RATES.values())
        rows.append((name, *rates, _alarms_cell(figures["false_alarms_per_hour"])))
    by_kind = judged["recall_by_kind"].items()
    kinds = ", ".join(f"{kind} {recall['recall']:.3f} of {recall['windows']:,}" for kind, recall in by_kind)
    title = f"{folder}: {counted(model['windows'], 'window')}, {counted(model['attack_windows'], 'attack')}"
    ranges = [f"{name}: the mean of {FOREST_SEEDS} seeds, MCC {bounds['mcc'][0]:.3f} to {bounds['mcc'][1]:.3f}"
              for name, bounds in judged.get("ranges", {}).items() if "mcc" in bounds]  # fmt: skip
    notes = (*([f"recall by kind: {kinds}"] if kinds else []), *ranges, *judged["remarks"])
    return TextTable(title, COLUMNS, tuple(rows), notes)


def _burst_table(folder: str, judged: FolderJudgement) -> TextTable:
    rows = []
    for name, figures in judged["bursts"].items():
        difference = judged["differences"].get(name)
        low, high = (difference["low"], difference["high"]) if difference else (None, None)
        interval = UNDEFINED if low is None else f"{low:+.3f} to {high:+.3f}"
        gained = UNDEFINED if difference is None else f"{difference['mcc']:+.3f}"
        rows.append((name, *_burst_cells(figures), gained, interval))
    hold = judged["bursts"][TRAINED]["hold"]
    return TextTable(
        title=f"{folder}: bursts of attacks, alarms with --hold {hold}", columns=BURST_COLUMNS, rows=tuple(rows)
    )


def _burst_cells(figures: BurstFigures) -> tuple[str, str, str, str]:
    share = f"{figures['bursts_found']:.3g} of {figures['bursts']}" if figures["bursts"] else UNDEFINED
    events = _alarms_cell(figures["false_events_per_hour"])
    return share, _cell(figures["latency_s"], ".3g"), events, _cell(figures["false_alarm_share"], ".1%")


def burst_summary(judgement: Mapping[str, Any]) -> TextTable:
    """Writes the model's burst-level figures as a table, a row for each test folder."""
    folders: Mapping[str, FolderJudgement] = judgement["test"]
    short = _short_names([*folders])
    by_name = {short[folder]: judged["bursts"][TRAINED] for folder, judged in folders.items()}
    needed, _, of = next(iter(by_name.values()))["hold"].partition("/")
    return TextTable(
        title="How soon an alarm finds each burst of attacks",
        columns=BURST_SUMMARY_COLUMNS,
        rows=tuple((name, *_burst_cells(figures)) for name, figures in by_name.items()),
        notes=(
            f"An alarm is raised when {needed} of the last {of} windows are flagged (--hold {needed}/{of})",
            "latency: seconds from the start of a burst's first window to the alarm, median",
            "false events/h: alarms in an hour of benign traffic; those less than 1 s apart are one",
            "in alarm: share of the benign time; an alarm that never ends is one event",
        ),
    )


def summary_tables(judgement: Mapping[str, Any]) -> list[TextTable]:
    """Writes a judgement as one table: the model's figures in each test folder, and the best baseline there."""
    folders: Mapping[str, FolderJudgement] = judgement["test"]
    if not folders:
        why = f"{NOTHING_TESTED}: evaluate judges the run on another log."
        return [TextTable(title="Nothing was judged", columns=(), rows=(), notes=(why, *_learned_notes(judgement)))]
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
    if timed := {short[folder]: judged["bursts"][TRAINED] for folder, judged in folders.items() if "bursts" in judged}:
        alarmed = [f"{name} {bursts['bursts_found']:g} of {bursts['bursts']}"
                   for name, bursts in timed.items() if bursts["bursts"]]  # fmt: skip
        notes += [f"Bursts of attacks in which an alarm is raised: {', '.join(alarmed)}."] * bool(alarmed)
    notes += _SUMMARY_LEGEND
    notes += _learned_notes(judgement)
    if any(short[folder] != folder for folder in folders):
        notes.append(", ".join(folders))
    title = "How well the model finds attacks in each test folder"
    return [TextTable(title=title, columns=SUMMARY_COLUMNS, rows=rows, notes=tuple(notes))]


def _learned_notes(judgement: Mapping[str, Any]) -> list[str]:
    learned = learned_notes(judgement["learned"]) if "learned" in judgement else []
    return [f"{note}." for note in (*rare_id_notes(judgement), *learned)]


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
    difference, beaten = judged.get("differences", {}).get(best), _OPEN
    if difference is not None and difference["high"] is not None:
        beaten = _YES if not _is_unbeaten(difference) else _NO if difference["high"] < 0 else _OPEN
    return (name, *rates, alarms, best, _cell(rivals[best], ".3f"), beaten)


def _alarms_cell(alarms: float | None) -> str:
    return _cell(alarms, ".1f" if alarms is not None and alarms < MANY_ALARMS else ",.0f")


def _cell(value: float | None, spec: str) -> str:
    return UNDEFINED if value is None else format(value, spec)


def _comparison_table(judgement: Mapping[str, Any]) -> TextTable:
    compared: Mapping[str, Mapping[str, Any]] = judgement["compared"]
    remedy = "no student without a teacher is compared with it: --without-teacher RUN"
    return TextTable(
        title="size and speed, windows a second as they were judged",
        columns=("detector", "parameters", "windows/s", "run"),
        rows=tuple(
            (name, _cell(size["parameters"], ","), _cell(size["windows_per_second"], ",.0f"), size["run"] or "")
            for name, size in compared.items()
        ),
        notes=() if "without_teacher" in {*compared, *judgement["absent"]} else (remedy,),
    )
