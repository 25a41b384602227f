"""Judges a finished run once more: on its own test windows, or on everything in other logs.

Shapes: R rows (windows), F windows of a test folder, S columns of raw scores, W judged windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from can_train.errors import CanTrainError, CheckpointError, ConfigError
from can_train.tasks.can.data.dataset import load_data, prepare_for_evaluation, simulate_if_synthetic
from can_train.tasks.can.data.layout import TEST, LogFile, find_evaluation_logs, find_logs, hash_logs
from can_train.tasks.can.evaluation.baselines import Baselines, constant_baselines
from can_train.tasks.can.evaluation.judging import (
    TRAINED,
    Detector,
    JudgementTable,
    JudgingOptions,
    ModelScores,
    ThresholdRecord,
    TimedScore,
    check_scores,
    judge_at,
    judgement_tables,
    own_baselines,
)
from can_train.tasks.can.evaluation.metrics import Threshold
from can_train.tasks.can.fusion.agent import WEIGHT, FinishedFusion
from can_train.tasks.can.fusion.mixes import BEST_MIX, mix_from_plain, with_choices
from can_train.tasks.can.fusion.scores import WindowScores
from can_train.tasks.can.reference_models import AUTOENCODER, CLASSIFIER, FinishedNetwork, WindowModel
from can_train.tasks.can.settings import (
    CanDatasetSettings,
    DistillationSettings,
    FusionAgentSettings,
    FusionSettings,
    VgaeSettings,
)
from can_train.tasks.can.synthetic.writing import synthetic_folder_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from can_train.config.resolved import EvaluationData, FinishedModel
    from can_train.reporter import Reporter
    from can_train.tasks.can.data.dataset import CanData
    from can_train.tasks.can.data.graphs import SourceFile
    from can_train.tasks.can.evaluation.judging import Judgement

    # By folder: [F] final scores, or [F, S] raw ones.
    FolderScores = Mapping[str, NDArray[np.float64]]

    # Loads the finished model of a role that a run builds on; raises RunError if it is gone.
    LoadModel = Callable[[str], FinishedModel]

    # Computes the [R, S] raw scores of windows by a model, in parts that fit.
    Score = Callable[[WindowModel, NDArray[np.int64]], NDArray[np.float64]]

# Dataset settings that the weights of a model depend on.
_MODEL_SETTINGS: Final = ("window", "identity")

# Dataset settings that decide which of its own windows a run was trained on.
_SPLIT_SETTINGS: Final = ("name", "synthetic", "stride", "validation_share", "test_share")

# Logs that a notice names; the others are an ellipsis.
_MAX_NAMED_LOGS: Final = 3

# Baselines that need training windows. Other logs have none: all of their windows are judged.
FITTED_BASELINES: Final = ("id_lookup", "random_forest")
_NOT_FITTED: Final = "fitted on training windows, and all of these are judged"


def make_evaluation(finished: FinishedModel, load_model: LoadModel, request: EvaluationData) -> WindowEvaluation:
    """Prepares the windows that are judged; `load_model` loads the models that the run builds on.

    Raises:
        ConfigError: A setting is one that the model or its split depends on.
        DataError: A log cannot be read, or is too short.
        RunError: A model that scoring needs is gone.
        CheckpointError: The weights do not fit the run's settings, or its result has no threshold.
    """
    if "threshold" not in finished.result.get("judgement", ()):
        raise CheckpointError("A run's result holds its threshold", value=finished.run_id, remedy="Train anew")
    data, own = _judged_data(finished.run.dataset, request)
    references = _references_of(finished, data, load_model)
    return WindowEvaluation(_model_of(finished, data, load_model), data, references, replace(request, own=own))


def _judged_data(trained: CanDatasetSettings, request: EvaluationData) -> tuple[CanData, bool]:
    """Loads the windows, and returns whether they are the run's own, split as they were for training."""
    own = request.own or _same_logs(trained, request.dataset)
    _check_unchanged(trained, request.dataset, (*_MODEL_SETTINGS, *(_SPLIT_SETTINGS if own else ())))
    if own:
        return load_data(request.dataset, request.data_root, request.cache, request.reporter), True
    logs = find_evaluation_logs(
        simulate_if_synthetic(request.dataset, request.cache, request.reporter), request.data_root
    )
    data = prepare_for_evaluation(request.dataset, logs, request.cache, request.reporter)
    _warn_of_training_logs(_training_logs(trained, request), data.flat.sources, request.reporter)
    return data, False


def _same_logs(trained: CanDatasetSettings, request: CanDatasetSettings) -> bool:
    if trained.path and request.path:
        return Path(trained.path).expanduser().resolve() == Path(request.path).expanduser().resolve()
    return (trained.path, trained.name, trained.synthetic) == (request.path, request.name, request.synthetic)


def _check_unchanged(trained: CanDatasetSettings, request: CanDatasetSettings, names: Sequence[str]) -> None:
    for name in names:
        before, now = getattr(trained, name), getattr(request, name)
        if before != now:
            why = "the model is bound to it" if name in _MODEL_SETTINGS else "it tells what the run was trained on"
            raise ConfigError(f"dataset.{name} is the run's own, since {why}", value=f"{now}; the run has {before}",
                              remedy="Leave it out; --dataset names other data")  # fmt: skip


def _training_logs(trained: CanDatasetSettings, request: EvaluationData) -> list[LogFile]:
    """Finds the logs that the run was trained on; none where they are gone, or on another machine."""
    folder = request.cache / synthetic_folder_name(trained.synthetic)
    here = replace(trained, path=str(folder)) if trained.is_synthetic else trained
    try:
        return [log for log in find_logs(here, request.data_root) if log.role != TEST]
    except CanTrainError:
        return []


def _warn_of_training_logs(logs: Sequence[LogFile], sources: Sequence[SourceFile], reporter: Reporter) -> None:
    """Names the judged logs whose content is that of a log in training, wherever either of them lies."""
    try:
        # Hours of driving take long to read, so only logs of an equal size are hashed.
        sizes = {Path(source.path).stat().st_size for source in sources}
        alike = [log for log in logs if log.path.stat().st_size in sizes]
        hashes = {hashed.sha256 for hashed in hash_logs(alike, reporter)} if alike else set()
    except (CanTrainError, OSError):
        return
    known = [source.path for source in sources if source.sha256 in hashes]
    if known:
        named = ", ".join(known[:_MAX_NAMED_LOGS]) + (", …" if len(known) > _MAX_NAMED_LOGS else "")
        trained = f"The run was trained on {len(known)} of these {len(sources)} logs"
        reporter.notice(f"{trained}, so its figures on them are too good: {named}")


def _model_of(finished: FinishedModel, data: CanData, load_model: LoadModel) -> WindowModel:
    if isinstance(finished.run.model, FusionAgentSettings):
        return FinishedFusion(finished, data.flat, {role: load_model(role) for role in (AUTOENCODER, CLASSIFIER)})
    return FinishedNetwork(finished, data.flat)


class References:
    """The detectors that a finished run is compared with; the base class has none.

    Args:
        result: The run's own judgement.

    Attributes:
        models: Models that score the windows themselves, by role.
        absent: The reason for each detector that is missing, by name.
    """

    def __init__(self, result: Mapping[str, Any]) -> None:
        self._result = result
        self.models: dict[str, WindowModel] = {}
        self.absent: dict[str, str] = {}

    def scores(self, raw: FolderScores, score: Callable[[str], FolderScores]) -> dict[str, ModelScores]:
        """Returns the final scores by name, from the raw scores of the run's model and those of each of `models`."""
        return {}

    def complete(self, judgement: Judgement, raw: FolderScores, timed: TimedScore) -> dict[str, Any]:
        """Adds to a judgement the parts that only such a model has; `timed` has scored all models."""
        return dict(judgement)


class TeacherReferences(References):
    """The teacher of a student and the same student without one, as far as their runs are still there."""

    def __init__(self, result: Mapping[str, Any], data: CanData, load_model: LoadModel) -> None:
        super().__init__(result)
        for role, record in result["references"].items():
            with self._skip_on_error(role):
                # With the threshold and the units that the student's run found, as at the end of that run.
                finished = replace(load_model(role), result={"judgement": record})
                self.models[role] = FinishedNetwork(finished, data.flat, full_precision=True)

    def scores(self, raw: FolderScores, score: Callable[[str], FolderScores]) -> dict[str, ModelScores]:
        """Returns the final scores of both, by role; one that fails is absent."""
        found = {}
        for role, model in self.models.items():
            with self._skip_on_error(role):
                scores = _final_scores(model, score(role))
                check_scores(scores)
                found[role] = scores
        return found

    def complete(self, judgement: Judgement, raw: FolderScores, timed: TimedScore) -> dict[str, Any]:
        """Adds sizes and speeds."""
        compared = {
            name: {**known, "windows_per_second": timed.speed("" if name == TRAINED else name)}
            for name, known in self._result["compared"].items()
            if name == TRAINED or name in judgement["references"]
        }
        return {**judgement, "compared": compared}

    @contextmanager
    def _skip_on_error(self, role: str) -> Iterator[None]:
        try:
            yield
        except CanTrainError as error:
            self.absent[role] = ": ".join(filter(None, (error.rule, error.value)))


class MixReferences(References):
    """The simple mixes of the two scores that an agent sees, as its run fitted them."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        super().__init__(result)
        self.absent = {name: why for name, why in result["absent"].items() if name == BEST_MIX}

    def scores(self, raw: FolderScores, score: Callable[[str], FolderScores]) -> dict[str, ModelScores]:
        """Returns the scores of the mixes, by name."""
        mixes = {name: mix_from_plain(plain) for name, plain in self._result["mixing"]["mixes"].items()}
        tables = {folder: WindowScores.from_columns(columns) for folder, columns in raw.items()}
        return {
            name: ModelScores(
                validation=np.empty(0),
                test={folder: mix.score(table, np.arange(len(table.anomaly))) for folder, table in tables.items()},
            )
            for name, mix in mixes.items()
        }

    def complete(self, judgement: Judgement, raw: FolderScores, timed: TimedScore) -> dict[str, Any]:
        """Adds the weights that the agent chose."""
        weights = {folder: columns[:, WEIGHT] for folder, columns in raw.items()}
        return with_choices(judgement, self._result["mixing"], weights)


def _references_of(finished: FinishedModel, data: CanData, load_model: LoadModel) -> References:
    result, mode = finished.result["judgement"], finished.run.mode
    if isinstance(mode, DistillationSettings):
        return TeacherReferences(result, data, load_model)
    return MixReferences(result) if isinstance(mode, FusionSettings) else References(result)


def _final_scores(model: WindowModel, raw: FolderScores, validation: NDArray[np.float64] | None = None) -> ModelScores:
    return ModelScores(
        validation=np.empty(0) if validation is None else model.combine(validation),
        test={folder: model.combine(columns) for folder, columns in raw.items()},
        error_units=model.error_units,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedWindows:
    """The outcome of an evaluation.

    Attributes:
        judgement: As in a run's result; strict JSON.
        samples: Columns of [W] cells, by name: the judged windows with their times, scores and labels.
        notes: Sentences about how the windows were judged.
    """

    judgement: Mapping[str, Any]
    samples: Mapping[str, Sequence[Any] | NDArray[Any]]
    notes: Sequence[str]


class WindowEvaluation:
    """Windows that are judged by the threshold that a run chose in validation.

    Attributes:
        own_split: Whether the windows are split as they were for training; else all of them are judged.
    """

    def __init__(self, model: WindowModel, data: CanData, references: References, request: EvaluationData) -> None:
        self._model = model
        self._data = data
        self._references = references
        self._request = request
        self._run = model.finished.run
        self._result = model.finished.result["judgement"]
        self.own_split = request.own
        self._rows = np.concatenate([*data.split.test.values()])

    @property
    def dataset(self) -> str:
        """Name of the data, or the path of data that were given by path."""
        dataset: CanDatasetSettings = self._request.dataset
        return dataset.path or dataset.name

    @cached_property
    def counted(self) -> Mapping[str, int]:
        """Numbers of judged windows and frames; a frame that several windows share counts once."""
        flat, rows = self._data.flat, np.unique(self._rows)
        # A window adds the frames since the start of the one before it, or all of its own where a log begins.
        steps = np.diff(flat.first_frame[rows])
        fresh = np.where(np.diff(flat.source[rows]) == 0, np.minimum(steps, flat.window), flat.window)
        return {"windows": len(self._rows), "frames": flat.window + int(fresh.sum())}

    def judge(self, score: Score, threshold: float | None) -> EvaluatedWindows:
        """Judges each folder by itself, together with baselines and references, by a threshold or by the run's own.

        Raises:
            RunError: A score is not a finite number.
        """
        data, model = self._data, self._model
        models = {"": model, **self._references.models}
        timed = TimedScore(lambda rows, role="": score(models[role], rows))
        raw = self._folder_scores(timed)
        validation = timed(data.split.validation) if len(data.split.validation) else None
        scores = _final_scores(model, raw, validation)
        chosen = Threshold(value=threshold, rule="as given") if threshold is not None else self._known(self._result)
        references = {
            name: Detector(one, self._known(self._result["references"][name]))
            for name, one in self._references.scores(raw, lambda role: self._folder_scores(timed, role)).items()
        }
        judgement = judge_at(data.flat, data.split, Detector(scores, chosen), self._baselines(), references)
        judgement["absent"] |= self._references.absent
        return EvaluatedWindows(
            judgement=self._references.complete(judgement, raw, timed),
            samples=self._samples(scores.test, chosen.value),
            notes=[*self._unknown_ids(), *_notes(chosen, judgement["absent"])],
        )

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[JudgementTable]:
        """Writes a judgement as tables of text."""
        return judgement_tables(judgement)

    def _folder_scores(self, timed: TimedScore, *role: str) -> FolderScores:
        # The first call for a model is not timed; one window makes it short.
        timed(self._rows[:1], *role)
        return {folder: timed(rows, *role) for folder, rows in self._data.split.test.items()}

    def _known(self, record: ThresholdRecord) -> Threshold:
        where = "" if self.own_split else f", in {self._run.dataset.name}"
        return Threshold(value=record["threshold"], rule=f"{record['threshold_rule']}{where}")

    def _baselines(self) -> Baselines:
        if not self.own_split:
            return Baselines(tuple(constant_baselines()), dict.fromkeys(FITTED_BASELINES, _NOT_FITTED))
        supervised = not isinstance(self._run.model, VgaeSettings)
        return own_baselines(self._data.flat, self._data.split, JudgingOptions.of(self._run, supervised=supervised))

    def _unknown_ids(self) -> list[str]:
        """Counts the CAN IDs that are new to a model with an ID embedding."""
        flat, weights = self._data.flat, self._model.finished.weights
        if self.own_split or not self._run.dataset.identity or "inputs.vocabulary" not in weights:
            return []
        known = int(np.isin(flat.ids, np.asarray(weights["inputs.vocabulary"])).sum())
        if known == len(flat.ids):
            return []
        alternative = "a model that is trained with dataset.identity=false needs to know none"
        return [f"The model knows {known} of the {len(flat.ids)} CAN IDs; {alternative}"]

    def _samples(self, scores: FolderScores, threshold: float) -> dict[str, Sequence[Any] | NDArray[Any]]:
        """Lists the judged windows log by log, those of each log in their order."""
        flat, rows = self._data.flat, self._rows
        score = np.concatenate([*scores.values()])
        folder = np.repeat(np.arange(len(scores)), [len(each) for each in scores.values()])
        paths, folders = [source.path for source in flat.sources], list(scores)
        # The second argsort turns the order of the paths into the rank of each.
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
    notes = [f"A window is flagged if it scores more than {threshold.value:.6g}: {threshold.rule}"]
    for reason in dict.fromkeys(absent.values()):
        names = ", ".join(name for name, why in absent.items() if why == reason)
        notes.append(f"Missing from the tables: {names} ({reason})")
    return notes
