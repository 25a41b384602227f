"""Which windows of which logs a finished model is asked to judge: its run's own test windows, or everything in other
logs; and whether it has seen those logs in training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import EvaluationData, FinishedModel
from can_train.errors import CanTrainError, CheckpointError, ConfigError, DataError
from can_train.reporter import Reporter
from can_train.tasks.can.data.batches import Gatherer
from can_train.tasks.can.data.dataset import CanData, load_data, prepare_for_evaluation, simulate_if_synthetic
from can_train.tasks.can.data.graphs import SourceFile
from can_train.tasks.can.data.layout import TEST, LogFile, find_evaluation_logs, find_logs, hash_logs
from can_train.tasks.can.evaluation.baselines import Baselines, constant_baselines
from can_train.tasks.can.evaluation.judging import (
    STUDENT,
    Decided,
    Detector,
    FolderTable,
    Judgement,
    JudgingOptions,
    ModelScores,
    TimedScore,
    check_scores,
    judge_at,
    own_baselines,
    tables_of,
)
from can_train.tasks.can.evaluation.metrics import Threshold, error_units
from can_train.tasks.can.fusion.agent import WEIGHT, FinishedFusion, seen
from can_train.tasks.can.fusion.mixes import BEST_MIX, mix_from_plain, with_choices
from can_train.tasks.can.reference_models import AUTOENCODER, CLASSIFIER, AskedNetwork, FinishedNetwork
from can_train.tasks.can.settings import (
    CanDatasetSettings,
    DistillationSettings,
    FusionAgentSettings,
    FusionSettings,
    VgaeSettings,
)
from can_train.tasks.can.synthetic.writing import synthetic_folder_name

_OF_THE_MODEL: Final = ("window", "identity")
"""Settings that a trained model is bound to."""


_OF_THE_SPLIT: Final = ("name", "synthetic", "stride", "validation_share", "test_share")
"""Settings that decide which windows of its own data were trained on."""


_MAX_NAMED_LOGS: Final = 3
"""Logs that a notice names before it stops."""


def read_own(trained: CanDatasetSettings, asked: EvaluationData) -> CanData:
    """Prepares data as they were for training."""
    return load_data(trained, asked.data_root, asked.cache, asked.reporter)


def read_asked(trained: CanDatasetSettings, asked: EvaluationData) -> tuple[CanData, bool]:
    """Prepares the windows that a model is asked to judge.

    Args:
        trained: The data that it was trained on.
        asked: Those that it is asked about.

    Returns:
        The windows, and whether they are split as they were for training, so that none of those judged was trained on.

    Raises:
        ConfigError: The model is bound to other settings.
        DataError: A log cannot be read, or is too short.
    """
    own = asked.own or _same_logs(trained, asked.dataset)
    _check_kept(trained, asked.dataset, (*_OF_THE_MODEL, *(_OF_THE_SPLIT if own else ())))
    if own:
        return read_own(asked.dataset, asked), True
    logs = find_evaluation_logs(simulate_if_synthetic(asked.dataset, asked.cache, asked.reporter), asked.data_root)
    data = prepare_for_evaluation(asked.dataset, logs, asked.cache, asked.reporter)
    _tell_of_training(_training_logs(trained, asked), data.flat.sources, asked.reporter)
    return data, False


def _same_logs(trained: CanDatasetSettings, asked: CanDatasetSettings) -> bool:
    if trained.path and asked.path:
        return Path(trained.path).expanduser().resolve() == Path(asked.path).expanduser().resolve()
    return (trained.path, trained.name, trained.synthetic) == (asked.path, asked.name, asked.synthetic)


def _check_kept(trained: CanDatasetSettings, asked: CanDatasetSettings, names: Sequence[str]) -> None:
    for name in names:
        before, now = getattr(trained, name), getattr(asked, name)
        if before != now:
            why = "the model is bound to it" if name in _OF_THE_MODEL else "it tells what the run was trained on"
            raise ConfigError(f"dataset.{name} is the run's own, since {why}", value=f"{now}; the run has {before}",
                              remedy="Leave it out; --dataset names other data")  # fmt: skip


def _tell_of_training(logs: Sequence[LogFile], sources: Sequence[SourceFile], reporter: Reporter) -> None:
    """Says which of the judged logs were trained on, by their content."""
    seen = _hashes(logs, sources, reporter)
    known = [source.path for source in sources if source.sha256 in seen]
    if known:
        named = ", ".join(known[:_MAX_NAMED_LOGS]) + (", …" if len(known) > _MAX_NAMED_LOGS else "")
        reporter.notice(f"The run was trained on {len(known)} of these {len(sources)} logs, which flatters it: {named}")


def _training_logs(trained: CanDatasetSettings, asked: EvaluationData) -> list[LogFile]:
    """Finds what a run was trained on; nothing where that is no longer there."""
    folder = asked.cache / synthetic_folder_name(trained.synthetic)
    here = replace(trained, path=str(folder)) if trained.is_synthetic else trained
    try:
        return [log for log in find_logs(here, asked.data_root) if log.role != TEST]
    except CanTrainError:
        return []


def _hashes(logs: Sequence[LogFile], sources: Sequence[SourceFile], reporter: Reporter) -> set[str]:
    """Hashes those of some logs that are as long as one of the sources: hours of driving take long to read."""
    try:
        sizes = {Path(source.path).stat().st_size for source in sources}
        alike = [log for log in logs if log.path.stat().st_size in sizes]
        return {hashed.sha256 for hashed in hash_logs(alike, reporter)} if alike else set()
    except (CanTrainError, OSError):
        return set()


ReferenceModel = Callable[[str], FinishedModel]
"""Reads the finished model of a role that a run builds on."""


class Scorer(Protocol):
    """A finished run's model on the windows of a data set.

    Attributes:
        finished: What the run has trained; its result says the units of errors.
        model: In evaluation mode, on the CPU.
    """

    finished: FinishedModel
    model: nn.Module

    def scores(self, model: nn.Module, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Returns [R, S] raw scores, by the model or its copy on a device."""

    def combine(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Makes of them [R] final scores, higher is more attack-like."""


def scorer_of(finished: FinishedModel, data: CanData, reference_model: ReferenceModel) -> Scorer:
    """Makes what scores windows as a finished run does.

    Args:
        finished: What the run has trained.
        data: The windows.
        reference_model: Reads the models that the run builds on, for modes that need them to score.

    Raises:
        RunError: A model that is needed is gone.
        CheckpointError: The weights are not those of the run's settings.
    """
    if isinstance(finished.run.model, FusionAgentSettings):
        return FinishedFusion(finished, data.flat, {role: reference_model(role) for role in (AUTOENCODER, CLASSIFIER)})
    return FinishedNetwork(finished, data.flat)


class Windows:
    """The windows of a data set, with what scores them.

    Args:
        data: The windows.
        scorer: What scores them.
    """

    def __init__(self, data: CanData, scorer: Scorer) -> None:
        self.data = data
        self.scorer = scorer
        self.model = scorer.model
        self.scores = scorer.scores
        self._gather = Gatherer(data.flat)

    def describe(self, row: int) -> str:
        """Names a window in a message."""
        flat = self.data.flat
        return f"the window at frame {flat.first_frame[row]:,} of {flat.sources[flat.source[row]].path}"

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns [R, 3]: nodes, edges without self-loops, and one graph."""
        return self._gather.batch_features(rows)


Scores = Mapping[str, NDArray[np.float64]]
"""Of each folder's windows: [R] final scores, or [R, S] raw ones."""


_OLDER: Final = "an older version made the run's result, without their thresholds"


class Alone:
    """A model that is judged beside nothing but baselines.

    Args:
        result: The run's own judgement.
        absent: Why any detector is missing, by name.

    Attributes:
        asked: Windows with other models that score them, by role.
        absent: As given, and what is missed on the way.
    """

    def __init__(self, result: Mapping[str, Any], absent: Mapping[str, str]) -> None:
        self._result = result
        self.asked: dict[str, Windows] = {}
        self.absent = dict(absent)

    def scores(self, told: Scores, ask: Callable[[str], Scores]) -> dict[str, Scores]:
        """Returns the final scores of the detectors that are beside it, by name.

        Args:
            told: Raw scores of the model.
            ask: Returns those of another one, by role.
        """
        return {}

    def completed(self, judgement: Judgement, told: Scores, timed: TimedScore) -> dict[str, Any]:
        """Adds to a judgement what a run's own one has beyond it.

        Args:
            judgement: Of the model and these detectors.
            told: As for `scores`.
            timed: What scored all of them.
        """
        return dict(judgement)


class Taught(Alone):
    """A student, beside its teacher and the same student without one, as far as their runs are still there.

    Args:
        result: The run's own judgement.
        data: The windows.
        reference_model: Reads the other models.
    """

    def __init__(self, result: Mapping[str, Any], data: CanData, reference_model: ReferenceModel) -> None:
        super().__init__(result, {})
        for role, decided in result["references"].items():
            with self._missed(role):
                # Judged as beside the student then, whatever its own run decided.
                finished = replace(reference_model(role), result={"judgement": decided})
                self.asked[role] = Windows(data, AskedNetwork(finished, data.flat))

    def scores(self, told: Scores, ask: Callable[[str], Scores]) -> dict[str, Scores]:
        """Returns the final scores of the others, by role."""
        found: dict[str, Scores] = {}
        for role, windows in self.asked.items():
            with self._missed(role):
                final = {folder: windows.scorer.combine(raw) for folder, raw in ask(role).items()}
                check_scores(ModelScores(validation=np.empty(0), test=final))
                found[role] = final
        return found

    def completed(self, judgement: Judgement, told: Scores, timed: TimedScore) -> dict[str, Any]:
        """Adds everyone's size and speed."""
        references = {
            role: {**self._result["references"][role], **decided} for role, decided in judgement["references"].items()
        }
        compared = {
            name: {**known, "windows_per_second": timed.speed("" if name == STUDENT else name)}
            for name, known in self._result["compared"].items()
            if name == STUDENT or name in references
        }
        return {**judgement, "references": references, "compared": compared}

    @contextmanager
    def _missed(self, role: str) -> Iterator[None]:
        """Goes on without a model that cannot be had."""
        try:
            yield
        except CanTrainError as error:
            self.absent[role] = ": ".join(filter(None, (error.rule, error.value)))


class Mixed(Alone):
    """An agent, beside the simple mixes of the two scores that it sees.

    Args:
        result: The run's own judgement.
    """

    def __init__(self, result: Mapping[str, Any]) -> None:
        super().__init__(result, {name: why for name, why in result["absent"].items() if name == BEST_MIX})

    def scores(self, told: Scores, ask: Callable[[str], Scores]) -> dict[str, Scores]:
        """Returns the scores of the mixes, by name."""
        mixes = {name: mix_from_plain(plain) for name, plain in self._result["mixing"]["mixes"].items()}
        return {
            name: {folder: mix.score(seen(raw), np.arange(len(raw))) for folder, raw in told.items()}
            for name, mix in mixes.items()
        }

    def completed(self, judgement: Judgement, told: Scores, timed: TimedScore) -> dict[str, Any]:
        """Adds which weights the agent chose."""
        return with_choices(judgement, self._result["mixing"], {folder: raw[:, WEIGHT] for folder, raw in told.items()})


def beside_of(finished: FinishedModel, data: CanData, reference_model: ReferenceModel) -> Alone:
    """Makes ready what a run's model was judged beside.

    Args:
        finished: What the run has trained.
        data: The windows.
        reference_model: Reads the models that the run builds on.
    """
    result, mode = finished.result["judgement"], finished.run.mode
    if "references" not in result:
        shown = [name for judged in result.get("test", {}).values() for name in judged.get("references", {})]
        return Alone(result, dict.fromkeys(shown, _OLDER))
    if isinstance(mode, DistillationSettings):
        return Taught(result, data, reference_model)
    return Mixed(result) if isinstance(mode, FusionSettings) else Alone(result, {})


Score = Callable[[Windows, NDArray[np.int64]], NDArray[np.float64]]
"""Scores windows, [R, S], in parts that fit."""


AS_GIVEN: Final = "as given"
"""The rule of a threshold that a person chose."""


FITTED_BASELINES: Final = ("id_lookup", "random_forest")
"""Baselines that learn from training windows."""


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


def make_evaluation(finished: FinishedModel, reference_model: ReferenceModel, asked: EvaluationData) -> "Evaluation":
    """Prepares the windows that are judged.

    Args:
        finished: What the run has trained.
        reference_model: Reads the models that the run builds on.
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
    windows, references = (
        Windows(data, scorer_of(finished, data, reference_model)),
        beside_of(finished, data, reference_model),
    )
    if own or not _lacks_units(finished):
        return Evaluation(windows, windows, references, replace(asked, own=own))
    reference = _own_data(finished, asked)
    return Evaluation(windows, Windows(reference, scorer_of(finished, reference, reference_model)), references, asked)


def _lacks_units(finished: FinishedModel) -> bool:
    """Whether an older version made the result of an autoencoder, without the units of its errors."""
    return isinstance(finished.run.model, VgaeSettings) and "error_units" not in finished.result["judgement"]


def _own_data(finished: FinishedModel, asked: EvaluationData) -> CanData:
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
        references: What the model is judged beside, other than baselines.
        asked: How the judged ones were asked for.

    Attributes:
        own_split: Whether they are split as they were for training; else all of them are judged.
    """

    def __init__(self, windows: Windows, reference: Windows, references: Alone, asked: EvaluationData) -> None:
        self._windows = windows
        self._reference = reference
        self._references = references
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
        """Judges each group of windows by itself, beside baselines and what the run was judged beside.

        Args:
            score: Scores windows.
            threshold: Above which windows are flagged; None: the run's own.

        Raises:
            RunError: A score is not a finite number.
        """
        flat, split, scorer = self._data.flat, self._data.split, self._windows.scorer
        if _lacks_units(self._finished):
            scorer.finished = self._with_units(score)
        asked = {"": self._windows, **self._references.asked}
        timed = TimedScore(lambda rows, role="": score(asked[role], rows))
        told = self._told(timed)
        own = ModelScores(
            validation=scorer.combine(timed(split.validation)) if len(split.validation) else np.empty(0),
            test={folder: scorer.combine(raw) for folder, raw in told.items()},
        )
        decided = self._threshold(threshold)
        judgement = judge_at(flat, split, Detector(own, decided), self._baselines(), self._others(told, timed))
        judgement["absent"] |= self._references.absent
        units = {name: value for name, value in scorer.finished.result["judgement"].items() if name == "error_units"}
        return Verdict(
            judgement={**self._references.completed(judgement, told, timed), **units},
            samples=self._samples(own.test, decided.value),
            notes=[*self._unknown_ids(), *_notes(decided, judgement["absent"])],
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
        scores = self._references.scores(told, lambda role: self._told(timed, role))
        decided = self._finished.result["judgement"].get("references", {})
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

    def _baselines(self) -> Baselines:
        run, data = self._finished.run, self._data
        if not self.own_split:
            return Baselines(tuple(constant_baselines()), dict.fromkeys(FITTED_BASELINES, _NOT_FITTED))
        options = JudgingOptions.of(run, supervised=not isinstance(run.model, VgaeSettings))
        return own_baselines(data.flat, data.split, options)

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
    """Says how windows were flagged, and which baselines are missing and why."""
    said = [f"A window is flagged if it scores more than {threshold.value:.6g}: {threshold.rule}"]
    for reason in dict.fromkeys(absent.values()):
        names = ", ".join(name for name, why in absent.items() if why == reason)
        said.append(f"Not beside it: {names} ({reason})")
    return said
