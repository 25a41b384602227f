"""Judges a finished run again: on its test windows, or on all windows of other logs.

Shapes: R rows (windows), F windows of a test folder, S columns of raw scores, W judged windows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.config.resolved import EvaluationData, FinishedModel
from can_train.errors import CanTrainError, CheckpointError
from can_train.io.units import counted
from can_train.reporter import SilentReporter, TextTable
from can_train.training.evaluate import Evaluation, Scorer, Verdict
from can_train_tasks.can.data.database import Database
from can_train_tasks.can.data.dataset import (
    CanData,
    find_prepared,
    leave_out_known,
    prepare,
)
from can_train_tasks.can.data.graphs import Floats, Ints, Split, id_text
from can_train_tasks.can.data.layout import LOG, TEST, find_logs
from can_train_tasks.can.data.reading import LogReader, decide_bases
from can_train_tasks.can.evaluation import judging
from can_train_tasks.can.evaluation.alarms import (
    USUAL_NOTE,
    Alarm,
    Cause,
    Explainer,
    FlaggedLog,
    list_alarms,
    usual_windows,
)
from can_train_tasks.can.evaluation.baselines import Baselines, constant_baselines, vocabulary_lookup
from can_train_tasks.can.evaluation.bursts import USUAL_HOLD, alarm_hold
from can_train_tasks.can.evaluation.calibration import BenignScores, Calibration, calibrate_logs, calibration_notes
from can_train_tasks.can.evaluation.metrics import Threshold
from can_train_tasks.can.evaluation.options import AlarmRule, EvaluationOptions, Hold
from can_train_tasks.can.evaluation.rules import RuleScale
from can_train_tasks.can.evaluation.scored_windows import log_ranks, window_columns, windows_of
from can_train_tasks.can.evaluation.self_check import coarse_clock_notes
from can_train_tasks.can.fusion.agent import FinishedFusion
from can_train_tasks.can.fusion.mixes import BEST_MIX, mix_from_plain, with_choices
from can_train_tasks.can.fusion.mixing import WEIGHT, WindowScores, as_log_odds
from can_train_tasks.can.inputs import known_ids, new_id_gaps, new_id_notes
from can_train_tasks.can.reference_models import AUTOENCODER, CLASSIFIER, FinishedNetwork, WindowModel
from can_train_tasks.can.settings import CanDatasetSettings, FusionAgentSettings, VgaeSettings
from can_train_tasks.can.synthetic.writing import synthetic_folder_name

# Final scores [F], or raw scores [F, S], of each test folder.
FolderScores = Mapping[str, Floats]
# Loads a run's prerequisite model by role; raises RunError if the model is gone.
LoadModel = Callable[[str], FinishedModel]
# Compute a model's raw scores [R, S] of windows, and the contributions to the scores, in batches that fit into memory.
Score = Callable[[WindowModel, Ints], Floats]
Contribute = Callable[[WindowModel, Ints], Floats]

_MAX_NAMED_LOGS: Final = 3  # logs that a notice names; an ellipsis stands for the rest
_MAX_NAMED_IDS: Final = 5

# Baselines that need training windows. Other logs have no training windows: all of their windows are judged.
FITTED_BASELINES: Final = ("gap_lookup", "silence", "random_forest")
_NOT_CALIBRATED: Final = "not calibrated"
_NOT_FITTED: Final = "they learn from training windows, and here all windows are judged"


def make_evaluation(finished: FinishedModel, load_model: LoadModel, request: EvaluationData) -> WindowEvaluation:
    """Prepares the windows that are judged; `load_model` loads the run's prerequisite models.

    Raises:
        ConfigError: The request changes a setting that the model or its split depends on.
        DataError: A log cannot be read, or is too short.
        RunError: A model that scoring needs is gone.
        CheckpointError: The weights do not fit the run's settings, or its result has no threshold.
    """
    if "threshold" not in finished.result.get("judgement", ()):
        raise CheckpointError(f"The result of {finished.run_id} has no threshold", remedy="Train anew")
    if request.options.channel is not None:
        request = replace(request, dataset=replace(request.dataset, channel=request.options.channel))
    data, request = _judged_data(finished, request)
    model: WindowModel
    if isinstance(finished.run.model, FusionAgentSettings):
        model = FinishedFusion(finished, data.flat, {role: load_model(role) for role in (AUTOENCODER, CLASSIFIER)})
    else:
        model = FinishedNetwork(finished, data.flat)
    return WindowEvaluation(model, data, load_model, request)


def _judged_data(finished: FinishedModel, request: EvaluationData) -> tuple[CanData, EvaluationData]:
    """Loads the windows, and completes the request.

    `own` becomes True if the windows are the run's, split as for training; otherwise `dataset` gets the number bases.
    """
    trained: CanDatasetSettings = finished.run.dataset
    data, request = windows_of(finished, request)
    return data if request.own else _without_training_windows(trained, request, data), request


def _without_training_windows(trained: CanDatasetSettings, request: EvaluationData, data: CanData) -> CanData:
    """Leaves out windows that the run was trained or validated on, also where another file has them; adds a notice.

    Raises:
        DataError: No window is left to judge.
    """
    if trained.is_synthetic:
        trained = replace(trained, path=str(request.cache / synthetic_folder_name(trained.synthetic)))
    try:
        logs = find_logs(trained, request.data_root)
        trained_data = find_prepared(trained, logs, request.cache, SilentReporter())
        if trained_data is None:
            training = [log for log in logs if log.role != TEST]
            trained_data = prepare(trained, training, request.cache, SilentReporter())
    except (CanTrainError, OSError) as error:  # The logs are gone, or on another machine.
        why = ": ".join(filter(None, (error.rule, error.value))) if isinstance(error, CanTrainError) else str(error)
        request.reporter.notice(f"Whether the run was trained on these logs cannot be told: {why}")
        return data
    flat = data.flat
    split, _ = leave_out_known(
        flat, data.split, trained_data.flat, np.concatenate([trained_data.split.train, trained_data.split.validation])
    )
    before, after = (np.concatenate([*part.test.values()]) for part in (data.split, split))
    if len(unseen := _held_out_ids(trained_data, flat.ids)):
        request.reporter.notice(
            f"{counted(len(unseen), 'CAN ID')} of these logs ({_named_ids(unseen)}) occurred in no training window, "
            "but in those that were kept for validation and test; dataset.test_share=0 trains on more of the log"
        )
    if len(after) == len(before):
        return data
    paths = [flat.sources[index].path for index in np.unique(flat.source[np.setdiff1d(before, after)])]
    named = ", ".join(paths[:_MAX_NAMED_LOGS]) + (", …" if len(paths) > _MAX_NAMED_LOGS else "")
    are = "is" if len(before) - len(after) == 1 else "are"
    several = f"{len(paths)} of these {len(flat.sources)} logs or a part of them"
    trained_on = several if len(flat.sources) > 1 else "this log or a part of it"
    request.reporter.notice(
        f"The run was trained on {trained_on}: "
        f"{len(before) - len(after):,} of {counted(len(before), 'window')} {are} left out: {named}"
    )
    return replace(data, split=split)


def _held_out_ids(trained: CanData, ids: Ints) -> Ints:
    """Returns the CAN IDs among `ids` that were in the run's logs, but only in windows for validation and test."""
    flat, split = trained.flat, trained.split
    cut = {source.group for source in flat.sources if source.role == LOG}
    held_out = [rows for group, rows in split.test.items() if group in cut]
    if not held_out:
        return ids[:0]
    kept = np.unique(np.concatenate([split.validation, *held_out]))
    own = np.setdiff1d(known_ids(flat, kept), known_ids(flat, split.train))
    return ids[np.isin(ids, own)]


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedWindows:
    """The outcome of an evaluation."""

    judgement: Mapping[str, Any]  # as in a run's result; strict JSON
    samples: Mapping[str, Sequence[Any] | NDArray[Any]]  # columns of [W] cells, by name: windows with times and scores
    rows: Ints  # [W] the windows
    threshold: float
    hold: Hold | None  # the requested hold for alarms; None: each flagged window raises an alarm
    notes: Sequence[str]  # sentences about the judgement


class WindowEvaluation(Evaluation):
    """Windows that are judged by the threshold that a run chose in validation.

    Attributes:
        own_split: Whether the windows are split as for training; otherwise all windows are judged.
    """

    def __init__(self, model: WindowModel, data: CanData, load_model: LoadModel, request: EvaluationData) -> None:
        self._model = model
        self._data = data
        self._request = request
        self._run = model.finished.run
        self._result = model.finished.result["judgement"]
        self.own_split = request.own
        self.dataset = request.dataset.path or request.dataset.name
        self._rows = self.rows = np.concatenate([*data.split.test.values()])
        self.model = model.trained
        self.counted = self._count()
        # References of a student: its teacher, and the same student without a teacher, if their runs still exist.
        self._references: dict[str, FinishedNetwork] = {}
        self._absent: dict[str, str] = {}
        if "mixing" in self._result:
            self._absent = {name: why for name, why in self._result["absent"].items() if name == BEST_MIX}
        if "compared" in self._result:
            for role, record in self._result["references"].items():
                with self._absent_on_error(role):
                    # The threshold and the units come from the result of the student's run, as at the end of that run.
                    known = {**record, **{name: self._result[name] for name in ("rules",) if name in self._result}}
                    finished = replace(load_model(role), result={"judgement": known})
                    self._references[role] = FinishedNetwork(finished, data.flat, full_precision=True)

    def call_model(self, rows: Ints) -> None:
        """Scores some windows with the network."""
        dtype = next(weight.dtype for weight in self.model.parameters())
        self._model.scores(self._model.model, rows, torch.device("cpu"), dtype)

    @contextmanager
    def _absent_on_error(self, role: str) -> Iterator[None]:
        try:
            yield
        except CanTrainError as error:
            self._absent[role] = ": ".join(filter(None, (error.rule, error.value)))

    def _count(self) -> dict[str, int]:
        """Counts judged windows and frames; a frame that several windows share counts once."""
        flat, rows = self._data.flat, np.unique(self._rows)
        # A window adds the frames since the start of the previous window; the first window of a log adds all frames.
        steps = np.diff(flat.first_frame[rows])
        fresh = np.where(np.diff(flat.source[rows]) == 0, np.minimum(steps, flat.window), flat.window)
        return {"windows": len(self._rows), "frames": flat.window + int(fresh.sum())}

    def evaluate(self, score: Scorer) -> Verdict:
        """Judges the windows; explains the flagged windows if the options ask for it."""
        options: EvaluationOptions = self._request.options
        with score.stage("scoring"):
            windows = self.judge(score, options, first=score.again)
        judgement, samples = windows.judgement, windows.samples
        record = {name: judgement[name] for name in ("threshold", "threshold_rule")}
        if not (options.flagged_only or options.explain):
            return Verdict(judgement=judgement, samples=samples, notes=windows.notes, record=record)
        scoring_s, began = score.seconds, time.perf_counter()
        writes = self._request.writes_samples
        with score.stage("explaining"):
            # Only the file of scores has reasons for windows that are not flagged.
            every = options.explain and writes and not options.flagged_only
            alarms, explained = self._explain(score.contributions, windows, every=every)
        explaining_s = time.perf_counter() - began
        usual = any("(usually " in reason for reason in explained["reason"] if reason)
        columns = {**samples, **explained}
        if options.flagged_only:
            flagged = np.flatnonzero(samples["flagged"])
            columns = {name: [cells[index] for index in flagged] for name, cells in columns.items()}
        lists = options.flagged_only or not writes
        return Verdict(
            judgement=judgement,
            samples=columns,
            notes=[*windows.notes, *([USUAL_NOTE] if usual else [])],
            record={**record, "alarms": [alarm.record for alarm in alarms]},
            seconds={"scoring": round(scoring_s, 3), "explaining": round(explaining_s, 3)},
            paragraphs=list_alarms(alarms, every=self._request.verbose) if lists else (),
            has_tables=self._request.verbose or not options.flagged_only,
        )

    def judge(self, score: Score, rule: AlarmRule, first: Score | None = None) -> EvaluatedWindows:
        """Judges each folder separately, together with baselines and references, by the threshold of `rule` or the run.

        `first` scores a window of each model before the time is measured; None: as `score` does.

        Raises:
            ConfigError: The run's result lacks a figure that the rule needs.
            DataError: There are too few windows to calibrate on.
            RunError: A score is not a finite number.
        """
        data, model, hold = self._data, self._model, Hold(*(rule.hold or USUAL_HOLD))
        models, begin = {"": model, **self._references}, first or score
        timed = judging.TimedScore(lambda rows, role="": score(models[role], rows),
                                   first=lambda rows, role="": begin(models[role], rows))  # fmt: skip
        raw = self._folder_scores(timed)
        scores = self._final_scores(model, raw)
        if len(validation := data.split.validation):
            scores = replace(scores, validation=model.combine(timed(validation), validation))
        chosen = self._threshold(rule, hold)
        detectors = {judging.TRAINED: judging.Detector(scores, chosen)}
        detectors |= {
            name: judging.Detector(each, self._known(self._result["references"][name]))
            for name, each in (self._reference_scores(timed) | self._mix_scores(raw)).items()
        }
        split, notes = data.split, list[str]()
        if rule.calibrate_s is not None:
            split, detectors, raw, notes = self._calibrate(rule.calibrate_s, detectors, raw, timed)
        if self.own_split:
            supervised = not isinstance(self._run.model, VgaeSettings)
            options = judging.JudgingOptions.of(self._run, data, supervised=supervised)
            baselines = judging.own_baselines(data.flat, data.split, options)
        else:
            lookup = vocabulary_lookup(model.vocabulary)
            baselines = Baselines((*constant_baselines(), lookup), dict.fromkeys(FITTED_BASELINES, _NOT_FITTED))
        judgement = judging.judge_at(data.flat, split, detectors, baselines, hold)
        judgement["absent"] |= self._absent
        for name in ("benign", "rare_ids", "bases", "bus_load", "clock_us", "rules", "learned"):
            if self.own_split and name in self._result:
                judgement[name] = self._result[name]
        samples, rows = self._samples(split, detectors[judging.TRAINED].scores.test, chosen.value)
        return EvaluatedWindows(
            judgement=self._complete(judgement, raw, timed),
            samples=samples,
            rows=rows,
            threshold=chosen.value,
            hold=alarm_hold(rule),
            notes=[*notes, *self._bus_notes(), *_notes(chosen, judgement["absent"])],
        )

    def _final_scores(self, model: WindowModel, raw: FolderScores) -> judging.ModelScores:
        rows = self._data.split.test
        test = {folder: model.combine(columns, rows[folder]) for folder, columns in raw.items()}
        return judging.ModelScores(validation=np.empty(0), test=test, error_units=model.error_units,
                                   rule_scale=model.rule_scale)  # fmt: skip

    def _threshold(self, rule: AlarmRule, hold: Hold) -> Threshold:
        if rule.threshold is not None:
            return Threshold(value=rule.threshold, rule="as given")
        if rule.alarms_per_hour is None:
            return self._known(self._result)
        return BenignScores.from_result(self._result, self._model.finished.run_id).threshold(rule.alarms_per_hour, hold)

    def _calibrate(
        self, seconds: float, detectors: Mapping[str, judging.Detector], raw: FolderScores, timed: judging.TimedScore
    ) -> tuple[Split, dict[str, judging.Detector], FolderScores, list[str]]:
        """Adapts the model's scores to the beginning of each log, and does not judge the windows of the beginning.

        Other detectors are left out, too: a run's result lacks the distribution of their benign scores.
        """
        model, flat, split = detectors[judging.TRAINED], self._data.flat, self._data.split
        benign = BenignScores.from_result(self._result, self._model.finished.run_id)
        make = partial(Calibration, seconds, benign, threshold=model.threshold.value, vocabulary=self._model.vocabulary)
        calibrated = {
            folder: calibrate_logs(
                flat, rows, model.scores.test[folder], make, lambda of_log: self._model.combine(timed(of_log), of_log)
            )
            for folder, rows in split.test.items()
        }
        test = {folder: rows[calibrated[folder].judged] for folder, rows in split.test.items()}
        scores = replace(model.scores, test={folder: each.score[each.judged] for folder, each in calibrated.items()})
        self._absent |= dict.fromkeys((name for name in detectors if name != judging.TRAINED), _NOT_CALIBRATED)
        notes = calibration_notes(flat, [*calibrated.values()], tested=self._rows, threshold=model.threshold.value)
        self._rows = np.concatenate([*test.values()])
        self.counted = self._count()
        kept = {folder: columns[calibrated[folder].judged] for folder, columns in raw.items()}
        return replace(split, test=test), {judging.TRAINED: replace(model, scores=scores)}, kept, notes

    def _explain(
        self, contribute: Contribute, verdict: EvaluatedWindows, *, every: bool
    ) -> tuple[list[Alarm], dict[str, Any]]:
        """Names the CAN IDs and properties that drove the scores.

        Args:
            contribute: Computes the contributions to the scores of windows.
            verdict: The windows.
            every: Whether windows that are not flagged are explained, too.

        Returns:
            The alarms, in the order of the windows; and columns of the file of scores: the windows' lines, and reasons,
            with None where a window is not explained.
        """
        flat, rows = self._data.flat, verdict.rows
        reasons: list[str | None] = [None] * len(rows)
        lines = np.empty((2, len(rows)), np.int64)
        alarms: list[Alarm] = []
        for source in dict.fromkeys(flat.source[rows].tolist()):
            of_log = np.flatnonzero(flat.source[rows] == source)
            log = self._explain_log(partial(contribute, self._model), verdict, of_log, every=every)
            lines[:, of_log] = log.lines
            for position, place in enumerate(of_log):
                reasons[place] = log.reason(position)
            alarms += log.alarms()
        return alarms, {"first_line": lines[0], "last_line": lines[1], "reason": reasons}

    def _explain_log(
        self, contribute: Callable[[Ints], Floats], verdict: EvaluatedWindows, of_log: Ints, *, every: bool
    ) -> FlaggedLog:
        """Explains the windows of one log, at the positions `of_log` of a verdict."""
        flat, rows = self._data.flat, verdict.rows[of_log]
        flagged = np.asarray(verdict.samples["flagged"])[of_log]
        wanted = np.flatnonzero(flagged | every)
        causes: dict[int, Sequence[Cause]] = {}
        if len(wanted):
            explainer = Explainer(flat=flat, contribute=contribute, vocabulary=self._model.vocabulary,
                                  usual_rows=usual_windows(rows, flagged), expect=self._model.expected,
                                  database=Database.unpack(self._request.dataset.dbc))  # fmt: skip
            causes = dict(zip(wanted.tolist(), explainer.causes(rows[wanted]), strict=True))
        first = flat.first_frame[rows]
        paths = [Path(source.path) for source in flat.sources]
        path = paths[flat.source[rows[0]]]
        reader = LogReader(path, decide_bases(paths, self._request.dataset)[0][path])
        lines = reader.line_numbers(np.concatenate([first, first + flat.window - 1])).reshape(2, -1)
        return FlaggedLog(
            flat=flat,
            rows=rows,
            score=np.asarray(verdict.samples["score"])[of_log],
            flagged=flagged,
            threshold=verdict.threshold,
            lines=lines,
            causes=causes,
            decimal=reader.id_base == "dec",
            hold=verdict.hold,
        )

    def _reference_scores(self, timed: judging.TimedScore) -> dict[str, judging.ModelScores]:
        """Returns the final scores of the reference models, by role; a model that fails is absent."""
        by_role = {}
        for role, model in self._references.items():
            with self._absent_on_error(role):
                scores = self._final_scores(model, self._folder_scores(timed, role))
                judging.check_scores(scores)
                by_role[role] = scores
        return by_role

    def _mix_scores(self, raw: FolderScores) -> dict[str, judging.ModelScores]:
        """Returns the scores of the simple mixes that the agent's run has fitted, by name."""
        if "mixing" not in self._result:
            return {}
        # The last five columns of a finished agent's scores.
        tables = {
            folder: WindowScores(anomaly=columns[:, -5], attack=columns[:, -4], errors=columns[:, -3:])
            for folder, columns in raw.items()
        }
        flat, raised, parts = self._data.flat, self._model.raised, {"": self._rows[:0], **self._data.split.test}
        # One look at the windows for all mixes.
        rare = {} if raised is None else {part: raised.rules.windows(flat, rows) for part, rows in parts.items()}
        scores = {}
        for name, plain in self._result["mixing"]["mixes"].items():
            mix, record = mix_from_plain(plain), self._result["references"][name]
            test = {folder: mix.score(table, np.arange(len(table.anomaly))) for folder, table in tables.items()}
            scores[name] = as_log_odds(judging.ModelScores(validation=np.empty(0), test=test))
            if raised is not None:
                scores[name] = judging.raised(scores[name], RuleScale.from_plain(record["rule_scale"]), rare)
        return scores

    def _complete(self, judgement: judging.Judgement, raw: FolderScores, timed: judging.TimedScore) -> dict[str, Any]:
        """Adds to a judgement a student's sizes and speeds, or the weights that an agent chose."""
        if "mixing" in self._result:
            weights = {folder: columns[:, WEIGHT] for folder, columns in raw.items()}
            return with_choices(judgement, self._result["mixing"], weights)
        if "compared" not in self._result:
            return dict(judgement)
        compared = {
            name: {**figures, "windows_per_second": timed.speed("" if name == judging.TRAINED else name)}
            for name, figures in self._result["compared"].items()
            if name == judging.TRAINED or name in judgement["references"]
        }
        return {**judgement, "compared": compared}

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[TextTable]:
        """Writes each test folder as a table of all detectors."""
        return judging.judgement_tables(judgement)

    def summary_tables(self, judgement: Mapping[str, Any]) -> Sequence[TextTable]:
        """Writes a judgement as two tables, of windows and of bursts, with a row for each test folder."""
        return [*judging.summary_tables(judgement), judging.burst_summary(judgement)]

    def _folder_scores(self, timed: judging.TimedScore, *role: str) -> FolderScores:
        # The first call for a model is not timed; one window makes it short.
        timed(self._rows[:1], *role)
        return {folder: timed(rows, *role) for folder, rows in self._data.split.test.items()}

    def _known(self, record: judging.ThresholdRecord) -> Threshold:
        where = "" if self.own_split else f", in {self._run.dataset.name}"
        return Threshold(value=record["threshold"], rule=f"{record['threshold_rule']}{where}")

    def _bus_notes(self) -> list[str]:
        """Counts the IDs that are new to a model with an ID embedding, and names the IDs that training may have missed.

        Names the logs with a coarser clock than in training, too.
        """
        flat, weights, notes = self._data.flat, self._model.finished.weights, list[str]()
        if self.own_split:
            return notes
        vocabulary = np.asarray(weights.get("inputs.vocabulary", flat.ids))
        unknown = flat.ids[~np.isin(flat.ids, vocabulary)]
        if self._run.dataset.identity and len(unknown):
            known = f"{len(flat.ids) - len(unknown)} of the {len(flat.ids)}"
            knows = f"The model knows {known} CAN IDs, not {_named_ids(unknown)}"
            notes.append(f"{knows}; a model that is trained with dataset.identity=false needs to know none")
        notes += coarse_clock_notes(flat, self._rows, self._result.get("clock_us"))
        return [*notes, *new_id_notes(self._result, new_id_gaps(flat, self._rows, self._model.vocabulary))]

    def _samples(
        self, split: Split, scores: FolderScores, threshold: float
    ) -> tuple[dict[str, Sequence[Any] | NDArray[Any]], Ints]:
        """Lists the judged windows log by log, in the order of each log; also returns their rows."""
        flat, rows = self._data.flat, np.concatenate([*split.test.values()])
        score = np.concatenate([*scores.values()])
        folder = np.repeat(np.arange(len(scores)), [len(each) for each in scores.values()])
        folders = list(scores)
        order = np.lexsort((folder, flat.first_frame[rows], log_ranks(flat)[flat.source[rows]]))
        rows, score, folder = rows[order], score[order], folder[order]
        labels = [
            flat.kinds[label] if flat.sources[index].labelled else None
            for label, index in zip(flat.label[rows], flat.source[rows], strict=True)
        ]
        columns = window_columns(flat, rows, [folders[index] for index in folder], score, threshold)
        return {**columns, "label": labels}, rows


def _named_ids(ids: Ints) -> str:
    return ", ".join(map(id_text, ids[:_MAX_NAMED_IDS])) + (", …" if len(ids) > _MAX_NAMED_IDS else "")


def _notes(threshold: Threshold, absent: Mapping[str, str]) -> list[str]:
    notes = [threshold.text]
    for reason in dict.fromkeys(absent.values()):
        names = ", ".join(name for name, why in absent.items() if why == reason)
        notes.append(f"Missing from the tables: {names} ({reason})")
    return notes
