"""What a finished run's model says of logs: of the run's own test windows once more, or of any other logs, all of whose
windows are judged. How scores are computed in parts that fit is left to the caller.

Shapes: R windows of one call, F windows of a folder, W judged windows, S columns of raw scores.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from can_train.config.judged import JudgedData
from can_train.config.resolved import FinishedModel
from can_train.errors import CheckpointError, DataError
from can_train.tasks.can.anomaly import error_units
from can_train.tasks.can.beside import Alone, Scores, beside_of
from can_train.tasks.can.comparison import TimedScore, tables_of
from can_train.tasks.can.dataset import CanData
from can_train.tasks.can.floors import Floors, constant_floors
from can_train.tasks.can.judged_data import read_asked, read_own
from can_train.tasks.can.judgement_table import FolderTable
from can_train.tasks.can.judging import Decided, Detector, JudgingOptions, ModelScores, judge_at, own_floors
from can_train.tasks.can.scoring import Companion, Windows, scorer_of
from can_train.tasks.can.settings import CanDatasetSettings, VgaeSettings
from can_train.tasks.can.thresholds import Threshold

Score = Callable[[Windows, NDArray[np.int64]], NDArray[np.float64]]
"""Scores windows, [R, S], in parts that fit."""

AS_GIVEN: Final = "as given"
"""The rule of a threshold that a person chose."""

FITTED_FLOORS: Final = ("id_lookup", "random_forest")
"""Floors that learn from training windows."""

_NOT_FITTED: Final = "fitted on training windows, and all of these are judged"


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """What came of an evaluation.

    Attributes:
        judgement: As in a run's result; strict JSON.
        samples: Columns of W cells, by name: the judged windows with their times, scores and labels.
        notes: How it was judged, in sentences.
    """

    judgement: Mapping[str, Any]
    samples: Mapping[str, Sequence[Any] | NDArray[Any]]
    notes: Sequence[str]


def make_evaluation(finished: FinishedModel, companion: Companion, asked: JudgedData) -> "Evaluation":
    """Prepares the windows that are judged.

    Args:
        finished: What the run has trained.
        companion: Reads the models that the run builds on.
        asked: The data.

    Raises:
        ConfigError: The model is bound to other settings.
        DataError: A log cannot be read, or is too short.
        RunError: A model that scoring needs is gone.
        CheckpointError: The weights are not those of the run's settings, or its result lacks what scoring needs.
    """
    if "threshold" not in finished.result.get("judgement", ()):
        raise CheckpointError("A run's result holds its threshold", value=finished.run_id, remedy="Train anew")
    data, own = read_asked(finished.run.dataset, asked)
    windows, beside = Windows(data, scorer_of(finished, data, companion)), beside_of(finished, data, companion)
    if own or not _lacks_units(finished):
        return Evaluation(windows, windows, beside, replace(asked, own=own))
    reference = _own_data(finished, asked)
    return Evaluation(windows, Windows(reference, scorer_of(finished, reference, companion)), beside, asked)


def _lacks_units(finished: FinishedModel) -> bool:
    """Whether an older version made the result of an autoencoder, without the units of its errors."""
    return isinstance(finished.run.model, VgaeSettings) and "error_units" not in finished.result["judgement"]


def _own_data(finished: FinishedModel, asked: JudgedData) -> CanData:
    try:
        return read_own(finished.run.dataset, asked)
    except DataError as error:
        raise CheckpointError(
            "The run's result lacks the units of its errors, and its own data are not there to find them",
            value=f"{finished.run_id}: {error.rule}: {error.value}",
            remedy="Bring its data back (--data-root names their folder), or train anew",
        ) from error


class Evaluation:
    """Windows that are judged by the threshold that a run chose in validation.

    Args:
        windows: Those that are judged.
        reference: The run's own, where its result lacks what only they tell; else the same.
        beside: What the model is judged beside, other than floors.
        asked: How the judged ones were asked for.

    Attributes:
        own_split: Whether they are split as they were for training; else all of them are judged.
    """

    def __init__(self, windows: Windows, reference: Windows, beside: Alone, asked: JudgedData) -> None:
        self._windows = windows
        self._reference = reference
        self._beside = beside
        self._finished = windows.scorer.finished
        self._data = windows.data
        self._asked = asked
        self.own_split = asked.own
        self._rows = np.concatenate([*self._data.split.test.values()])

    @property
    def dataset(self) -> str:
        """Name of the data, or the path of what was given by path."""
        asked: CanDatasetSettings = self._asked.dataset
        return asked.path or asked.name

    @cached_property
    def counted(self) -> Mapping[str, int]:
        """How many windows are judged, and of how many frames: those that windows share count once."""
        flat, rows = self._data.flat, np.unique(self._rows)
        steps = np.diff(flat.first_frame[rows])
        fresh = np.where(np.diff(flat.source[rows]) == 0, np.minimum(steps, flat.window), flat.window)
        return {"windows": len(self._rows), "frames": flat.window + int(fresh.sum())}

    def judge(self, score: Score, threshold: float | None) -> Verdict:
        """Judges each group of windows by itself, beside floors and what the run was judged beside.

        Args:
            score: Scores windows.
            threshold: Above which windows are flagged; None: the run's own.

        Raises:
            RunError: A score is not a finite number.
        """
        flat, split, scorer = self._data.flat, self._data.split, self._windows.scorer
        if _lacks_units(self._finished):
            scorer.finished = self._with_units(score)
        asked = {"": self._windows, **self._beside.asked}
        timed = TimedScore(lambda rows, role="": score(asked[role], rows))
        told = self._told(timed)
        own = ModelScores(
            validation=scorer.combine(timed(split.validation)) if len(split.validation) else np.empty(0),
            test={folder: scorer.combine(raw) for folder, raw in told.items()},
        )
        decided = self._threshold(threshold)
        judgement = judge_at(flat, split, Detector(own, decided), self._floors(), self._others(told, timed))
        judgement["absent_floors"] |= self._beside.absent
        units = {name: value for name, value in scorer.finished.result["judgement"].items() if name == "error_units"}
        return Verdict(
            judgement={**self._beside.completed(judgement, told, timed), **units},
            samples=self._samples(own.test, decided.value),
            notes=[*self._unknown_ids(), *_notes(decided, judgement["absent_floors"])],
        )

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[FolderTable]:
        """Writes a judgement as one table a group, and one of sizes and speeds where they are compared."""
        return tables_of(judgement)

    def _told(self, timed: TimedScore, *role: str) -> Scores:
        """Scores the windows of each folder: [F, S]."""
        timed.warm_up(self._rows, *role)
        return {folder: timed(rows, *role) for folder, rows in self._data.split.test.items()}

    def _others(self, told: Scores, timed: TimedScore) -> dict[str, Detector]:
        """Scores what the model is judged beside; each flags by the threshold that it had in the run's validation."""
        scores = self._beside.scores(told, lambda role: self._told(timed, role))
        decided = self._finished.result["judgement"].get("beside", {})
        return {
            name: Detector(ModelScores(validation=np.empty(0), test=test), self._known_threshold(decided[name]))
            for name, test in scores.items()
        }

    def _with_units(self, score: Score) -> FinishedModel:
        """Adds the units of errors to the result."""
        flat, rows = self._reference.data.flat, self._reference.data.split.validation
        units = error_units(score(self._reference, rows[flat.label[rows] == 0]))
        result = self._finished.result
        return replace(self._finished, result={**result, "judgement": {**result["judgement"], "error_units": units}})

    def _threshold(self, given: float | None) -> Threshold:
        if given is not None:
            return Threshold(value=given, rule=AS_GIVEN)
        return self._known_threshold(self._finished.result["judgement"])

    def _known_threshold(self, decided: Decided) -> Threshold:
        where = "" if self.own_split else f", in {self._finished.run.dataset.name}"
        return Threshold(value=decided["threshold"], rule=f"{decided['threshold_rule']}{where}")

    def _unknown_ids(self) -> list[str]:
        """Says how many of the CAN IDs are new to a model that sees which is which."""
        flat, finished = self._data.flat, self._finished
        if self.own_split or not finished.run.dataset.identity or "inputs.vocabulary" not in finished.weights:
            return []
        known = int(np.isin(flat.ids, np.asarray(finished.weights["inputs.vocabulary"])).sum())
        if known == len(flat.ids):
            return []
        need_none = "a model that is trained with dataset.identity=false needs to know none"
        return [f"The model knows {known} of the {len(flat.ids)} CAN IDs; {need_none}"]

    def _floors(self) -> Floors:
        run, data = self._finished.run, self._data
        if not self.own_split:
            return Floors(tuple(constant_floors()), dict.fromkeys(FITTED_FLOORS, _NOT_FITTED))
        options = JudgingOptions.of(run, supervised=not isinstance(run.model, VgaeSettings))
        return own_floors(data.flat, data.split, options)

    def _samples(
        self, scores: Mapping[str, NDArray[np.float64]], threshold: float
    ) -> dict[str, Sequence[Any] | NDArray[Any]]:
        """Lists the judged windows log by log, each log's in their order."""
        flat, rows = self._data.flat, self._rows
        score = np.concatenate([*scores.values()])
        folder = np.repeat(np.arange(len(scores)), [len(each) for each in scores.values()])
        paths, folders = [source.path for source in flat.sources], list(scores)
        by_path = np.argsort(np.argsort(np.array(paths), kind="stable"))
        order = np.lexsort((folder, flat.first_frame[rows], by_path[flat.source[rows]]))
        rows, score, folder = rows[order], score[order], folder[order]
        source = flat.source[rows]
        return {
            "log": [paths[index] for index in source],
            "folder": [folders[index] for index in folder],
            "window": rows - np.searchsorted(flat.source, source),
            "first_frame": flat.first_frame[rows],
            "start_time": flat.start_time[rows],
            "end_time": flat.end_time[rows],
            "score": score,
            "flagged": score > threshold,
            "label": [
                flat.kinds[label] if flat.sources[index].labelled else None
                for label, index in zip(flat.label[rows], source, strict=True)
            ],
        }


def _notes(threshold: Threshold, absent: Mapping[str, str]) -> list[str]:
    """Says how windows were flagged, and which floors are missing and why."""
    said = [f"A window is flagged if it scores more than {threshold.value:.6g}: {threshold.rule}"]
    for reason in dict.fromkeys(absent.values()):
        names = ", ".join(name for name, why in absent.items() if why == reason)
        said.append(f"Not beside it: {names} ({reason})")
    return said
