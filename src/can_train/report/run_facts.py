"""Runs as facts: state, scores, plan and memory of a run, the commands that continue it, and runs side by side."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import msgspec

from can_train.config.resolved import differences, flat_settings
from can_train.errors import RunError, StateError, command_name, with_command_name
from can_train.io.records import JobId, parse_object, text_or_nothing
from can_train.io.units import duration, finite, local_time, number_or_none, seconds_between, size_text, value_text
from can_train.report.scores import by_test_set, higher_is_better, is_ranked, mapping, score, test_scores
from can_train.reporter import TextTable
from can_train.runs.run_folder import RunFolder, name_to_type, short_name
from can_train.runs.run_state import FINISHED, QUEUED, RUNNING, SUSPENDED, infer_attempt_state, live_row
from can_train.runs.status import RunStatus
from can_train.runs.trials import TrialRun

_UNKNOWN: Final = "unknown"
_METRICS: Final = ("mcc", "pr_auc", "recall_at_fpr_1pct", "false_alarms_per_hour", "best_validation_loss")
_NONE: Final = "-"  # cell of a figure that a run does not have
_MANY: Final = 100.0  # scores from here on are shown without decimals
SIDE_BY_SIDE: Final = 5
"""Runs that are compared side by side; more have a row each."""
_NAMED_SETTINGS: Final = 3  # in a legend
_SHARE_DIGITS: Final = 5  # digits behind the point of `peak_memory_pct` in the metrics; a result has all
_RESCUED: Final = " (times that memory ran out, in validation too, and a micro-batch was split further)"
_BEST: Final = "*"  # marks the best score of a row


def result_of(status: RunStatus) -> Mapping[str, Any]:
    """Returns the contents of a run's `result.json`; empty until the run has finished."""
    return status.facts.result or {}


def device_of(status: RunStatus) -> str:
    """Returns the kind of device that a run was trained on; until it has finished, the requested device."""
    return str(result_of(status).get("device") or status.known.config.get("device") or "")


def seconds_of(status: RunStatus) -> float | None:
    """Returns how long a run has waited in the queue, or has trained in all of its attempts; None: unknown."""
    attempts, jobs, state = status.facts.attempts, status.facts.jobs, status.state.state
    has_nodes = state in (RUNNING, SUSPENDED)
    if jobs and (state == QUEUED or (has_nodes and not attempts)):
        return seconds_between(jobs[-1].time)
    if not attempts:
        return None
    # The hours between a stop and a resume are no work.
    took = [seconds_between(attempt.start.start_time, attempt.end.time) for attempt in attempts if attempt.end]
    if has_nodes and attempts[-1].end is None:
        took.append(seconds_between(attempts[-1].start.start_time))
    return sum(took) if took else None


def run_json(status: RunStatus) -> dict[str, Any]:
    """Makes the JSON object of a run, without its plan and memory (see `run_facts`)."""
    record, facts, config = status.known.record, status.facts, status.known.config
    row, headline = live_row(facts), score(result_of(status))
    restarts: dict[JobId | None, int] = {}
    attempts = []
    for attempt in facts.attempts:
        start, state = attempt.start, infer_attempt_state(attempt, facts)
        restarts[start.slurm_job] = max(restarts.get(start.slurm_job, 0), start.restarts)
        attempts.append({
            **{name: getattr(start, name) for name in ("attempt", "job_id", "cluster", "restarts", "host", "pid")},
            "time": start.start_time,
            "ended": attempt.end.time if attempt.end else None,
            "state": state.state,
            "why": state.sentence,
        })  # fmt: skip
    values = {
        "run_id": record.run_id,
        "short_name": short_name(record.run_id),
        "key": record.key,
        "path": str(status.known.folder.path),
        "made": record.time,
        "after": record.after or None,
        "sweep": record.sweep or None,
        "label": status.known.label or None,
        "dataset": mapping(config.get("dataset")).get("name"),
        "dataset_path": mapping(config.get("dataset")).get("path") or None,
        "model": config.get("model_name"),
        "size": config.get("size") or None,
        "mode": mapping(config.get("mode")).get("name"),
        "device": device_of(status) or None,
        "score": None if headline is None else {"metric": headline[0], "value": headline[1]},
        "state": status.state.state,
        "why": status.state.sentence,
        "certain": status.state.certain,
        "live": status.state.live,
        "seconds": seconds_of(status),
        "job_id": facts.jobs[-1].job_id if facts.jobs else None,
        "cluster": facts.jobs[-1].cluster or None if facts.jobs else None,
        "nodes": row.nodes or None if row else None,
        "restarts": sum(restarts.values()),
        "resubmissions": max(0, len(facts.jobs) - 1),
        **vars(status.progress),
        "jobs": [vars(job) for job in facts.jobs],
        "attempts": attempts,
        "changes": status.known.folder.changes(),
    }
    return {name: finite(value) for name, value in values.items()}


def listed_json(status: RunStatus) -> dict[str, Any]:
    """Makes the JSON object of a run in a list."""
    return {**run_json(status), "changed_settings": finite(status.known.folder.changed_settings())}


def run_facts(status: RunStatus) -> dict[str, Any]:
    """Makes the JSON object of a run with its scores, plan, memory and next commands."""
    folder, result = status.known.folder, result_of(status)
    return {
        **run_json(status),
        "scores": result.get("judgement"),
        "plan": read_plan(folder) or None,
        "memory": memory_facts(folder, result),
        "memory_parts": read_memory_parts(folder) or None,
        "changed_settings": finite(folder.changed_settings()),
        "next_commands": next_commands(status),
    }


def head_facts(status: RunStatus, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Writes the state, progress, time, device, folder and changes of a run, each with its name."""
    progress, seconds = status.progress, seconds_of(status)
    counts = (("epoch", progress.epoch, progress.epochs), ("step", progress.step, progress.steps))
    done = [f"{name} {value}" + (f" of {total}" if total else "") for name, value, total in counts if value is not None]
    lines = {
        "run": status.known.run_id,
        "state": str(status.state),
        "trained": ", ".join(done),
        "time": duration(seconds) if seconds is not None else "",
        "device": str(result_of(status).get("device") or config.get("device")),
        "folder": str(status.known.folder.path),
    }
    changes = [("changed", change_text(change)) for change in status.known.folder.changes()]
    return [*((name, text) for name, text in lines.items() if text), *changes]


def change_text(change: Mapping[str, Any]) -> str:
    """Writes a change that `resume` made to a run's settings (see `RunFolder.changes`)."""
    settings = [f"{name} {values.get('before') or 'none'} → {values.get('after')}"
                for name, values in mapping(change.get("settings")).items()]  # fmt: skip
    return f"{', '.join(settings)} at step {change.get('step')}, {local_time(change['time'])}"


def score_tables(result: Mapping[str, Any], *, summary: bool = False) -> list[TextTable]:
    """Returns the score tables that a run's task wrote, in full or in short; none if the file was damaged."""
    try:
        tables = msgspec.convert(result.get("summary_tables" if summary else "tables"), list[TextTable])
    except msgspec.ValidationError:
        # A person may have edited the file.
        return []
    return [table for table in tables if all(len(row) == len(table.columns) for row in table.rows)]


def read_plan(folder: RunFolder) -> dict[str, Any]:
    """Reads a run's plan as plain values; empty if it is missing or damaged."""
    plan = parse_object(text_or_nothing(folder.plan_path))
    return plan if isinstance(plan.get("plan"), dict) else {}


@dataclass(frozen=True, kw_only=True)
class _Part:  # as `allocation_trace.MemoryPart`, without PyTorch
    kind: str
    module: str
    operation: str
    num_bytes: Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True, kw_only=True)
class _MemoryParts:
    device: str
    samples: int
    basis: str
    peak_bytes: Annotated[float, msgspec.Meta(gt=0)]
    parts: Annotated[list[_Part], msgspec.Meta(min_length=1)]


def read_memory_parts(folder: RunFolder) -> dict[str, Any]:
    """Reads the parts of the peak of a run's step as plain values; empty if they are missing or damaged."""
    with suppress(msgspec.ValidationError):
        return asdict(msgspec.convert(parse_object(text_or_nothing(folder.memory_parts_path)), _MemoryParts))
    return {}


def full_plan(plan: Mapping[str, Any], device: str) -> tuple[list[str], list[tuple[str, str]], Sequence[str]]:
    """Writes a plan of `read_plan` as sentences; the figures that decided it, each with its name; and its notices.
    All are empty for an empty plan.
    """
    if not plan:
        return [], [], ()
    # It imports PyTorch, and `--json` does not wait for that.
    from can_train.fit.run_plan import RunPlan
    from can_train.training.report import plan_details, plan_summary

    try:
        run_plan = RunPlan.from_plain(dict(plan))
    except (KeyError, TypeError, ValueError):
        return ["of another version of can-train"], [], ()
    capacity = 0 if run_plan.limits is None else run_plan.limits.capacity_bytes
    return plan_summary(run_plan, device, capacity), plan_details(run_plan), run_plan.all_notices


def memory_facts(folder: RunFolder, result: Mapping[str, Any]) -> dict[str, Any]:
    """Collects peak, micro-batches and rescues of a run from its metrics, from the steps after its last epoch, and from
    its result, which has those of its last attempt.

    A figure that is not known is None.
    """
    epochs = [_numbers(line) for line in folder.metrics() if "micro_batches" in line]
    epochs += _open_epoch(folder, max((line.get("step") or 0 for line in epochs), default=0))
    result = _numbers(result)
    steps = max((line.get("step") or 0 for line in epochs), default=0)
    parts = sum(line["micro_batches"] or 0 for line in epochs)
    peaks = [peak for line in epochs if (peak := line.get("peak_memory_pct")) is not None]
    sizes = [size for line in epochs if (size := line.get("micro_batch_size"))]
    rescues = sum(line.get("ooms_rescued") or 0 for line in epochs)
    highest, share = max(peaks, default=None), result.get("peak_memory_pct")
    # The metrics have rounded shares.
    is_of_earlier = highest is not None and (share is None or highest > round(share, _SHARE_DIGITS))
    return {
        # An earlier attempt has recorded its highest peak as a share alone.
        "peak_bytes": None if is_of_earlier else result.get("peak_memory_bytes"),
        "peak_share": highest if is_of_earlier else share,
        "predicted_peak_bytes": result.get("predicted_peak_bytes"),
        "micro_batches_per_step": parts / steps if steps else None,
        "largest_micro_batch": max([*sizes, result.get("micro_batch_size") or 0]) or None,
        "rescues": max(rescues, result.get("ooms_rescued") or 0),
    }


def _open_epoch(folder: RunFolder, step: float) -> list[dict[str, float | None]]:
    """Reads the steps after `step` as lines of metrics: a run may have ended within an epoch."""
    lines, capacity = list[dict[str, float | None]](), None
    for line in text_or_nothing(folder.path / "steps.jsonl").splitlines():
        values = _numbers(parse_object(line))
        capacity = values.get("capacity_bytes") or capacity
        if (values.get("step") or 0) > step:
            parts, peak = values.get("micro_batches"), values.get("allocated_bytes")
            share = round(peak / capacity, _SHARE_DIGITS) if peak and capacity else None
            lines.append(
                {**values, "micro_batches": (parts or 0) * (values.get("steps") or 1), "peak_memory_pct": share}
            )
    return lines


def _numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: number_or_none(value) for name, value in values.items()}


def memory_lines(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Writes the facts of `memory_facts` as sentences, each with its name."""
    peak, share, predicted = memory["peak_bytes"], memory["peak_share"], memory["predicted_peak_bytes"]
    of_device = f"{share:.1%} of what is usable" if share is not None else ""
    measured = ", ".join(filter(None, [size_text(peak) if peak else "", of_device])) or _UNKNOWN
    per_step, largest = memory["micro_batches_per_step"], memory["largest_micro_batch"]
    parts = [f"{per_step:.3g} a step on average"] if per_step else []
    parts += [f"of up to {largest} samples"] if largest else []
    rescues = memory["rescues"]
    return [
        ("peak", measured + (f"; predicted: {size_text(predicted)}" if predicted else "")),
        ("micro-batches", ", ".join(parts) or _UNKNOWN),
        ("rescues", f"{rescues}" + (_RESCUED if rescues else "")),
    ]


def next_commands(status: RunStatus) -> Sequence[str]:
    """Lists the command lines that continue, follow, evaluate or repeat a run."""
    name, command = name_to_type(status.known.folder), command_name()
    if status.state.live:
        return [f"{command} logs {name} -f", f"{command} cancel {name}"]
    if status.state.state == FINISHED and status.facts.result is not None:
        # A task without data sets to choose from is evaluated on its own.
        dataset = status.known.folder.config().get("dataset")
        data = " --dataset path/to/data" if isinstance(dataset, Mapping) and dataset.get("name") else ""
        return [f"{command} evaluate {name}{data}", f"{command} resubmit {name} --seed 1"]
    go_on = line_to_go_on(status)
    return [with_command_name(go_on), f"{command} logs {name}"] if go_on else []


def line_to_go_on(status: RunStatus) -> str:
    """Returns the line that continues a run which has ended without a result, or that trains it anew where it would
    repeat its error; empty where there is none.
    """
    facts = status.facts
    if status.state.live or facts.result is not None or not facts.has_folder or facts.is_closed:
        return ""
    name, lr = name_to_type(status.known.folder), status.lower_lr
    return f"can-train resume {name}" if lr is None else f"can-train resubmit {name} --lr {lr:g}"


# Runs side by side


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
    seconds = [seconds_of(run.status) for run in runs]
    course = {
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
    settings = {name: [_NONE if value in (None, "") else value_text(value) for value in values]
                for name, values in differences([run.settings for run in runs]).items()}  # fmt: skip
    tables = [
        _table("Runs", "", runs, course, notes=[f"{run.name}: {run.status.known.record.key}" for run in runs]),
        _table("Settings that differ", "setting", runs, settings, notes=() if settings else ("none",)),
    ]
    for metric, by_run in _scores_by_metric(runs).items():
        names = dict.fromkeys(name for scores in by_run for name in scores)
        differing = incomparable(runs, metric) if is_ranked(metric) else ""
        is_marked = is_ranked(metric) and not differing
        rows = {name or "validation": _score_cells([scores.get(name) for scores in by_run], metric, is_marked=is_marked)
                for name in names}  # fmt: skip
        stars = any(cell.endswith(_BEST) for cells in rows.values() for cell in cells)
        notes = (f"{_BEST} the best of its row",) if stars else ()
        if differing:
            notes = (f"no best value is marked: the runs have different {differing}",)
        tables.append(_table(metric, "test set", runs, rows, notes=notes))
    return tables


def incomparable(runs: Sequence[ComparedRun], metric: str) -> str:
    """Names what differs between runs and makes their values of a metric incomparable; empty: they can be compared. A
    loss depends on the data and on the kind of model, a score on the test samples.
    """
    settings = differences([run.settings for run in runs])
    kinds = {"tasks": ["task"], "data": [name for name in settings if name.startswith("dataset.")]}
    if metric.endswith("loss"):
        kinds |= {"models": ["model_name"], "modes": ["mode.name"]}
    return next((noun for noun, names in kinds.items() if any(name in settings for name in names)), "")


def legend_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Names runs by the settings that differ between them, and by their ids where that leaves two alike."""
    settings = differences([run.settings for run in runs])
    shown = sorted(settings, key=lambda name: -len(set(map(str, settings[name]))))[:_NAMED_SETTINGS]
    names = [" ".join(f"{name.rpartition('.')[2]}={value_text(settings[name][index])}" for name in shown)
             for index in range(len(runs))]  # fmt: skip
    return [name if name and names.count(name) == 1 else f"{name} {run.name}".strip()
            for name, run in zip(names, runs, strict=True)]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Headline:
    """The figure that stands for a run in a list."""

    metric: str
    value: float
    is_higher_better: bool


def sweep_table(runs: Sequence[ComparedRun]) -> TextTable:
    """Makes a table with a row for each run of a sweep or of a search, the best first: for more runs than fit side by
    side.
    """
    trials = [trial_of(run) for run in runs]
    headlines = [_headline(run, trial) for run, trial in zip(runs, trials, strict=True)]
    best = next((each for each in headlines if each is not None), _Headline(metric="", value=0, is_higher_better=True))
    settings, rows = differences([run.settings for run in runs]), []
    has_numbers = any(trial is not None for trial in trials)
    for index, (run, trial, headline) in enumerate(zip(runs, trials, headlines, strict=True)):
        value = headline.value if headline is not None and headline.metric == best.metric else None
        state = run.status.state.label
        if trial is not None and trial.trial.stopped_after and state == FINISHED:
            state = f"ended after {trial.trial.stopped_after}"
        values = [_NONE if each[index] in (None, "") else value_text(each[index]) for each in settings.values()]
        number = (_NONE if trial is None else str(trial.trial.number),) if has_numbers else ()
        rows.append((value, (*number, run.name, state, *values, _cell(run.status.progress.epoch), _cell(value, ".4g"))))
    differing = incomparable(runs, best.metric)
    if not differing:
        sign = -1 if best.is_higher_better else 1
        rows.sort(key=lambda row: (row[0] is None, sign * (row[0] or 0.0)))
    names = [name if name == "training.epochs" else name.rpartition(".")[2] for name in settings]
    columns = (*(("trial",) if has_numbers else ()), "run", "state", *names, "epochs", best.metric or "score")
    note = f"{best.metric}: {'higher' if best.is_higher_better else 'lower'} is better"
    if differing:
        note = f"not ordered by {best.metric or 'score'}: the runs have different {differing}"
    title = f"{len(runs)} {'trials' if has_numbers else 'runs'}{'' if differing else ', the best first'}"
    return TextTable(title, columns, [row for _, row in rows], [note] if best.metric else [])


def trial_of(run: ComparedRun) -> TrialRun | None:
    """Returns the trial of a search that a run is; None: it is none, or its file is damaged."""
    with suppress(RunError):
        return TrialRun.of(run.status.known.folder)
    return None


def _headline(run: ComparedRun, trial: TrialRun | None) -> _Headline | None:
    """Returns the objective of a trial, or the score that stands for a run in a list; None: there is none yet."""
    if trial is not None:
        with suppress(StateError):
            search = trial.search.search
            value = search.best(trial.curve)
            return None if value is None else _Headline(metric=search.objective, value=value,
                                                        is_higher_better=search.is_higher_better)  # fmt: skip
    named = score(run.result)
    return None if named is None else _Headline(metric=named[0], value=named[1],
                                                is_higher_better=higher_is_better(named[0]))  # fmt: skip


def comparison_json(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Makes the JSON object of a comparison."""
    plain = [{**run_json(run.status), "memory": run.memory,
              "scores": {name: by_test_set(run.result, name) for name in _METRICS}} for run in runs]  # fmt: skip
    return {"runs": plain, "settings": differences([run.settings for run in runs])}


def _scores_by_metric(runs: Sequence[ComparedRun]) -> dict[str, list[Mapping[str, float]]]:
    """Returns each compared metric with every run's scores by test set."""
    every: list[Mapping[str, Mapping[str, float]]] = [test_scores(run.result) for run in runs]
    # The usual metrics are enough; a task without any of them shows all of its metrics.
    has_usual = any(metric in scores for scores in every for metric in _METRICS)
    unusual = () if has_usual else dict.fromkeys(metric for scores in every for metric in scores)
    by_metric = {metric: [scores.get(metric, {}) for scores in every] for metric in unusual}
    by_metric |= {metric: [by_test_set(run.result, metric) for run in runs] for metric in _METRICS}
    return {metric: scores for metric, scores in by_metric.items() if any(scores)}


def _score_cells(values: Sequence[float | None], metric: str, *, is_marked: bool) -> list[str]:
    defined = [value for value in values if value is not None]
    best = (max if higher_is_better(metric) else min)(defined)
    # Of equal scores none is the best.
    is_marked = is_marked and defined.count(best) == 1 and len(defined) > 1
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
