"""`can-train compare RUN RUN...`: settings that differ, scores by test set, time and memory, side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from can_train.cli.output import TextTable, duration, number_or_none, print_json, print_tables
from can_train.cli.run_locator import AsJson, RunLocator, RunsDir, StateDir
from can_train.cli.runs import by_test_set, higher_is_better, is_ranked, run_json, test_scores
from can_train.cli.show import memory_facts
from can_train.config.resolved import differences, flat_settings
from can_train.errors import ConfigError
from can_train.io.units import size_text
from can_train.runs.run_folder import short_name
from can_train.slurm.status import RunStatus, run_statuses

_METRICS: Final = ("mcc", "pr_auc", "recall_at_fpr_1pct", "false_alarms_per_hour", "best_validation_loss")
_NONE: Final = "-"  # cell of what a run does not have
_MANY: Final = 100.0  # from here on, a score's decimals say nothing
_BEST: Final = "*"  # after the best of several scores


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run beside others.

    Attributes:
        name: Its column's heading.
        found: All about it.
        settings: Its settings by their dotted names, without those that say where it happened.
        memory: As `memory_facts` has it.
    """

    name: str
    found: RunStatus
    settings: Mapping[str, Any]
    memory: Mapping[str, Any]

    @property
    def result(self) -> Mapping[str, Any]:
        """What came of it; nothing where it has not finished."""
        return self.found.facts.result or {}


def compare(
    runs: Annotated[list[str], typer.Argument(help="Two runs or more, each as in can-train show.", metavar="RUN...")],
    as_json: AsJson = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Show runs side by side: settings that differ, scores by test set, time and memory."""
    locator = RunLocator(runs_dir, state_dir)
    known = {one.run_id: one for one in map(locator.find, runs)}
    if len(known) < 2:
        raise ConfigError("A run is compared with others", value=" ".join(runs),
                          remedy="Name two runs or more; can-train runs lists them")  # fmt: skip
    compared = compared_runs(run_statuses(known.values(), locator.registry))
    if as_json:
        print_json(_json(compared))
    else:
        print_tables(comparison_tables(compared))


def compared_runs(runs: Iterable[RunStatus]) -> list[ComparedRun]:
    """Reads what runs are compared by.

    Raises:
        RunError: A run's configuration cannot be read.
    """
    return [
        ComparedRun(
            name=short_name(found.known.run_id),
            found=found,
            settings=flat_settings(found.known.folder.config()),
            memory=memory_facts(found.known.folder, found.facts.result or {}),
        )
        for found in runs
    ]


def comparison_tables(compared: Sequence[ComparedRun]) -> list[TextTable]:
    """Makes the tables that show runs side by side."""
    return [_course_table(compared), _settings_table(compared), *_score_tables(compared)]


def _json(compared: Sequence[ComparedRun]) -> dict[str, Any]:
    runs = [
        {
            **run_json(one.found),
            "memory": one.memory,
            "scores": {name: by_test_set(one.result, name) for name in _METRICS},
        }
        for one in compared
    ]
    return {"runs": runs, "settings": differences([one.settings for one in compared])}


def _course_table(compared: Sequence[ComparedRun]) -> TextTable:
    """Makes the table of what the runs are, and what time and memory they took."""
    facts = [run_json(one.found) for one in compared]
    peaks = [one.memory["peak_bytes"] for one in compared]
    shares = [one.memory["peak_share"] for one in compared]
    rows = {
        "state": [one.found.state.label for one in compared],
        "time": [_NONE if each["seconds"] is None else duration(each["seconds"]) for each in facts],
        "epochs": [_cell(one.found.progress.epoch) for one in compared],
        "steps": [_cell(one.found.progress.step) for one in compared],
        "parameters": [_cell(number_or_none(one.result.get("parameters")), ",") for one in compared],
        "device": [str(one.result.get("device") or one.settings.get("device") or _NONE) for one in compared],
        "peak memory": [size_text(peak) if peak else _NONE for peak in peaks],
        "of what is usable": [_cell(share, ".1%") for share in shares],
        "largest micro-batch": [_cell(one.memory["largest_micro_batch"]) for one in compared],
        "rescues": [_cell(one.memory["rescues"]) for one in compared],
    }
    keys = [f"{one.name}: {one.found.known.record.key}" for one in compared]
    return _table("Runs", "", compared, rows, notes=keys)


def _settings_table(compared: Sequence[ComparedRun]) -> TextTable:
    differing = differences([one.settings for one in compared])
    rows = {name: [_NONE if value in (None, "") else str(value) for value in values]
            for name, values in differing.items()}  # fmt: skip
    return _table("Settings that differ", "setting", compared, rows, notes=() if rows else ("none",))


def _score_tables(compared: Sequence[ComparedRun]) -> list[TextTable]:
    """Makes a table of each metric that a run has: a row for each test set."""
    by_metric = _scores_by_metric(compared)
    tables = []
    for metric, scores in by_metric.items():
        rows = {}
        for name in dict.fromkeys(name for each in scores for name in each):
            values = [each.get(name) for each in scores]
            rows[name or "validation"] = _score_cells(values, metric)
        notes = (f"{_BEST} the best of its row",) if is_ranked(metric) else ()
        tables.append(_table(metric, "test set", compared, rows, notes=notes))
    return tables


def _scores_by_metric(compared: Sequence[ComparedRun]) -> dict[str, list[Mapping[str, float]]]:
    """Returns the metrics that runs are compared by, each with every run's value by test set."""
    own: list[Mapping[str, Mapping[str, float]]] = [test_scores(one.result) for one in compared]
    # Metrics that are known by name say enough; of a task that has none of them, all are shown.
    has_known = any(metric in each for each in own for metric in _METRICS)
    others = () if has_known else dict.fromkeys(metric for each in own for metric in each)
    found: dict[str, list[Mapping[str, float]]] = {metric: [each.get(metric, {}) for each in own] for metric in others}
    found |= {metric: [by_test_set(one.result, metric) for one in compared] for metric in _METRICS}
    return {metric: scores for metric, scores in found.items() if any(scores)}


def _score_cells(values: Sequence[float | None], metric: str) -> list[str]:
    found = [value for value in values if value is not None]
    best = (max if higher_is_better(metric) else min)(found)
    # Of equal scores none is the best.
    marked = is_ranked(metric) and found.count(best) == 1 and len(found) > 1
    # Most scores are shares; rates an hour run into the thousands.
    spec = ".4f" if max(found) <= 1 else ".4g" if max(found) < _MANY else ",.0f"
    return [_cell(value, spec) + (_BEST if marked and value == best else "") for value in values]


def _table(
    title: str, heading: str, compared: Sequence[ComparedRun], rows: Mapping[str, Sequence[str]], notes: Sequence[str]
) -> TextTable:
    columns = (heading, *(one.name for one in compared))
    return TextTable(title, columns, [(name, *cells) for name, cells in rows.items()], notes)


def _cell(value: float | None, spec: str = "") -> str:
    return _NONE if value is None else format(value, spec)
