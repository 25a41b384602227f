"""Runs side by side: settings that differ, scores by test set, time and memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from can_train.config.resolved import differences, flat_settings
from can_train.io.units import size_text
from can_train.report.run_facts import memory_facts, result_of, run_json, seconds_of
from can_train.report.scores import by_test_set, higher_is_better, is_ranked, test_scores
from can_train.report.text import TextTable, duration, number_or_none
from can_train.runs.run_folder import short_name
from can_train.runs.status import RunStatus

_METRICS: Final = ("mcc", "pr_auc", "recall_at_fpr_1pct", "false_alarms_per_hour", "best_validation_loss")
_NONE: Final = "-"  # cell of a figure that a run does not have
_MANY: Final = 100.0  # scores from here on are shown without decimals
_BEST: Final = "*"  # marks the best score of a row


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run in a comparison.

    Attributes:
        name: Heading of its column.
        status: Its status.
        settings: Its settings by dotted name, without folders, cluster and device.
        memory: Its `memory_facts`.
    """

    name: str
    status: RunStatus
    settings: Mapping[str, Any]
    memory: Mapping[str, Any]

    @property
    def result(self) -> Mapping[str, Any]:
        """The contents of its `result.json`; empty until it has finished."""
        return result_of(self.status)


def compared_runs(statuses: Iterable[RunStatus]) -> list[ComparedRun]:
    """Reads the settings and the memory figures of runs.

    Raises:
        RunError: A run's configuration cannot be read.
    """
    return [
        ComparedRun(
            name=short_name(status.known.run_id),
            status=status,
            settings=flat_settings(status.known.folder.config()),
            memory=memory_facts(status.known.folder, result_of(status)),
        )
        for status in statuses
    ]


def comparison_tables(runs: Sequence[ComparedRun]) -> list[TextTable]:
    """Makes the tables of a comparison: course, settings that differ, and a table for each metric."""
    return [_course_table(runs), _settings_table(runs), *_score_tables(runs)]


def comparison_json(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Makes the JSON object of a comparison."""
    plain = [
        {
            **run_json(run.status),
            "memory": run.memory,
            "scores": {name: by_test_set(run.result, name) for name in _METRICS},
        }
        for run in runs
    ]
    return {"runs": plain, "settings": differences([run.settings for run in runs])}


def _course_table(runs: Sequence[ComparedRun]) -> TextTable:
    """Makes the table of state, time, steps, device and memory."""
    seconds = [seconds_of(run.status) for run in runs]
    rows = {
        "state": [run.status.state.label for run in runs],
        "time": [_NONE if time_s is None else duration(time_s) for time_s in seconds],
        "epochs": [_cell(run.status.progress.epoch) for run in runs],
        "steps": [_cell(run.status.progress.step) for run in runs],
        "parameters": [_cell(number_or_none(run.result.get("parameters")), ",") for run in runs],
        "device": [str(run.result.get("device") or run.settings.get("device") or _NONE) for run in runs],
        "peak memory": [size_text(peak) if (peak := run.memory["peak_bytes"]) else _NONE for run in runs],
        "of what is usable": [_cell(run.memory["peak_share"], ".1%") for run in runs],
        "largest micro-batch": [_cell(run.memory["largest_micro_batch"]) for run in runs],
        "rescues": [_cell(run.memory["rescues"]) for run in runs],
    }
    keys = [f"{run.name}: {run.status.known.record.key}" for run in runs]
    return _table("Runs", "", runs, rows, notes=keys)


def _settings_table(runs: Sequence[ComparedRun]) -> TextTable:
    differing = differences([run.settings for run in runs])
    rows = {name: [_NONE if value in (None, "") else str(value) for value in values]
            for name, values in differing.items()}  # fmt: skip
    return _table("Settings that differ", "setting", runs, rows, notes=() if rows else ("none",))


def _score_tables(runs: Sequence[ComparedRun]) -> list[TextTable]:
    """Makes a table for each metric that a run has, with a row for each test set."""
    tables = []
    for metric, by_run in _scores_by_metric(runs).items():
        rows = {}
        for name in dict.fromkeys(name for scores in by_run for name in scores):
            rows[name or "validation"] = _score_cells([scores.get(name) for scores in by_run], metric)
        notes = (f"{_BEST} the best of its row",) if is_ranked(metric) else ()
        tables.append(_table(metric, "test set", runs, rows, notes=notes))
    return tables


def _scores_by_metric(runs: Sequence[ComparedRun]) -> dict[str, list[Mapping[str, float]]]:
    """Returns each compared metric with every run's scores by test set."""
    every: list[Mapping[str, Mapping[str, float]]] = [test_scores(run.result) for run in runs]
    # The usual metrics are enough; a task without any of them shows all of its metrics.
    has_usual = any(metric in scores for scores in every for metric in _METRICS)
    unusual = () if has_usual else dict.fromkeys(metric for scores in every for metric in scores)
    by_metric: dict[str, list[Mapping[str, float]]] = {
        metric: [scores.get(metric, {}) for scores in every] for metric in unusual
    }
    by_metric |= {metric: [by_test_set(run.result, metric) for run in runs] for metric in _METRICS}
    return {metric: scores for metric, scores in by_metric.items() if any(scores)}


def _score_cells(values: Sequence[float | None], metric: str) -> list[str]:
    defined = [value for value in values if value is not None]
    best = (max if higher_is_better(metric) else min)(defined)
    # Of equal scores none is the best.
    is_marked = is_ranked(metric) and defined.count(best) == 1 and len(defined) > 1
    # Most scores are shares; rates an hour run into the thousands.
    spec = ".4f" if max(defined) <= 1 else ".4g" if max(defined) < _MANY else ",.0f"
    return [_cell(value, spec) + (_BEST if is_marked and value == best else "") for value in values]


def _table(
    title: str, heading: str, runs: Sequence[ComparedRun], rows: Mapping[str, Sequence[str]], notes: Sequence[str]
) -> TextTable:
    columns = (heading, *(run.name for run in runs))
    return TextTable(title, columns, [(name, *cells) for name, cells in rows.items()], notes)


def _cell(value: float | None, spec: str = "") -> str:
    return _NONE if value is None else format(value, spec)
