"""`can-train show RUN`: what came of a run, its plan, what memory did, what was set, and how it goes on."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from can_train.cli.output import duration, finite, number_or_none, print_json, print_tables, print_text
from can_train.cli.run_locator import AsJson, Run, RunLocator, RunsDir, StateDir
from can_train.cli.runs import change_text, run_json
from can_train.errors import as_typed, command_name
from can_train.io.records import parse_object, text_or_nothing
from can_train.io.units import size_text
from can_train.reporter import COLUMNS, wrapped
from can_train.runs.run_folder import RunFolder, name_to_type
from can_train.slurm.run_state import FINISHED
from can_train.slurm.status import RunStatus

_UNKNOWN: Final = "unknown"


def show(run: Run, as_json: AsJson = False, runs_dir: RunsDir = "runs", state_dir: StateDir = None) -> None:
    """Show a run: scores, plan, what memory did, which settings are not the defaults, and how it goes on."""
    locator = RunLocator(runs_dir, state_dir)
    found = locator.status(locator.find(run))
    if as_json:
        print_json(run_facts(found))
        return
    folder, result = found.known.folder, found.facts.result or {}
    config, commands = folder.config(), next_commands(found)
    print_text(as_typed("\n".join(f"{name:<8}{text}" for name, text in head_facts(found, config))))
    print_tables(score_tables(result))
    _print_part("Plan", full_plan_lines(read_plan(folder), str(result.get("device") or config.get("device"))))
    _print_part("Memory", memory_lines(memory_facts(folder, result)))
    _print_part("Settings that differ from the defaults", _settings_lines(folder.changed_settings()))
    # As they are typed: a line that is broken would not work.
    print_text("".join(["\nTo go on", *(f"\n  {command}" for command in commands)]) if commands else "")


def run_facts(found: RunStatus) -> dict[str, Any]:
    """Makes the JSON object of all that is known of a run."""
    folder, result = found.known.folder, found.facts.result or {}
    return {
        **run_json(found),
        "scores": result.get("judgement"),
        "plan": read_plan(folder) or None,
        "memory": memory_facts(folder, result),
        "changed_settings": finite(folder.changed_settings()),
        "next_commands": next_commands(found),
    }


def _print_part(title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    print_text(f"\n{title}")
    for line in lines:
        print_text(wrapped(f"  {line.strip()}", COLUMNS, hang="    "))


def head_facts(found: RunStatus, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Writes what a run is and how far it has come: names of facts, and what they are."""
    progress, seconds = found.progress, run_json(found)["seconds"]
    done = [
        f"{name} {value}" + (f" of {total}" if total else "")
        for name, value, total in (
            ("epoch", progress.epoch, progress.epochs),
            ("step", progress.step, progress.steps),
        )
        if value is not None
    ]
    lines = {
        "run": found.known.run_id,
        "state": str(found.state),
        "trained": ", ".join(done),
        "time": duration(seconds) if seconds is not None else "",
        "device": str((found.facts.result or {}).get("device") or config.get("device")),
        "folder": str(found.known.folder.path),
    }
    changes = [("changed", change_text(one)) for one in found.known.folder.changes()]
    return [*((name, text) for name, text in lines.items() if text), *changes]


# What came of it


class WrittenTable(msgspec.Struct):
    """A table of a result as `result.json` has it: `can_train.task.Table`."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


def score_tables(result: Mapping[str, Any], *, summary: bool = False) -> list[WrittenTable]:
    """Returns the tables of a run's scores that its task wrote, in full or in short; none where there are none."""
    try:
        tables = msgspec.convert(result.get("summary_tables" if summary else "tables"), list[WrittenTable])
    except msgspec.ValidationError:
        # A person may have edited the file.
        return []
    return [one for one in tables if all(len(row) == len(one.columns) for row in one.rows)]


# The plan, and what memory did


def read_plan(folder: RunFolder) -> dict[str, Any]:
    """Reads a run's plan as plain values; empty where there is none, or none that can be read."""
    plan = parse_object(text_or_nothing(folder.plan_path))
    return plan if isinstance(plan.get("plan"), dict) else {}


def full_plan_lines(plan: Mapping[str, Any], device: str) -> list[str]:
    """Writes a plan that was read, with what it rests on; no lines where there is none."""
    if not plan:
        return []
    # PyTorch is imported with it, for which `--json` does not wait.
    from can_train.fit.planner import RunPlan
    from can_train.training.report import plan_lines

    try:
        run_plan = RunPlan.from_plain(dict(plan))
    except (KeyError, TypeError, ValueError):
        return ["of another version of can-train"]
    capacity = 0 if run_plan.limits is None else run_plan.limits.capacity_bytes
    return [*plan_lines(run_plan, device, capacity), *run_plan.all_notices]


def memory_facts(folder: RunFolder, result: Mapping[str, Any]) -> dict[str, Any]:
    """Collects what memory did in a run, from its result or, while it trains, from its metrics; None: not known."""
    lines = [parse_object(line) for line in text_or_nothing(folder.metrics_path).splitlines()]
    epochs = [_numbers(line) for line in lines if "micro_batches" in line]
    result = _numbers(result)
    steps = max((line.get("step") or 0 for line in epochs), default=0)
    parts = sum(line["micro_batches"] or 0 for line in epochs)
    peaks = [peak for line in epochs if (peak := line.get("peak_memory_pct")) is not None]
    sizes = [size for line in epochs if (size := line.get("micro_batch_size"))]
    rescues = sum(line.get("ooms_rescued") or 0 for line in epochs)
    return {
        "peak_bytes": result.get("peak_memory_bytes"),
        "peak_share": result.get("peak_memory_pct", max(peaks, default=None)),
        "predicted_peak_bytes": result.get("predicted_peak_bytes"),
        "micro_batches_per_step": parts / steps if steps else None,
        "largest_micro_batch": result.get("micro_batch_size", max(sizes, default=None)),
        "rescues": result.get("ooms_rescued", rescues),
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: number_or_none(value) for name, value in values.items()}


def memory_lines(memory: Mapping[str, Any]) -> list[str]:
    """Writes what memory did as lines, each a name and a sentence."""
    peak, share, predicted = memory["peak_bytes"], memory["peak_share"], memory["predicted_peak_bytes"]
    of_device = f"{share:.1%} of what is usable" if share is not None else ""
    measured = ", ".join(filter(None, [size_text(peak) if peak else "", of_device])) or _UNKNOWN
    per_step, largest = memory["micro_batches_per_step"], memory["largest_micro_batch"]
    parts = [f"{per_step:.3g} a step on average"] if per_step else []
    parts += [f"of up to {largest} samples"] if largest else []
    rescues = memory["rescues"]
    return [
        f"peak           {measured}" + (f"; predicted: {size_text(predicted)}" if predicted else ""),
        f"micro-batches  {', '.join(parts) or _UNKNOWN}",
        f"rescues        {rescues}" + (" (steps that ran out of memory and were split further)" if rescues else ""),
    ]


# What was set


def _settings_lines(changed: Mapping[str, Mapping[str, Any]] | None) -> list[str]:
    if changed is None:
        return ["not known: the run's changed_settings.json is missing or damaged, or it had no presets"]
    if not changed:
        return ["none"]
    width = max(map(len, changed))
    return [f"{name:<{width}}  {_text(one['value'])}  (default: {_text(one['default'])})"
            for name, one in changed.items()]  # fmt: skip


def _text(value: Any) -> str:
    return "none" if value is None or value == "" else str(value)


# How it goes on


def next_commands(found: RunStatus) -> list[str]:
    """Lists the lines that somebody who looks at a run may want to type next."""
    name, command = name_to_type(found.known.folder), command_name()
    if found.state.live:
        return [f"{command} logs {name} -f", f"{command} cancel {name}"]
    if found.state.state == FINISHED and found.facts.result is not None:
        # A task without data sets to choose from is evaluated on its own.
        chosen = found.known.folder.config().get("dataset")
        data = " --dataset path/to/data" if isinstance(chosen, Mapping) and chosen.get("name") else ""
        return [f"{command} evaluate {name}{data}", f"{command} resubmit {name} --seed 1"]
    return [f"{command} resume {name}", f"{command} logs {name}"] if found.facts.has_folder else []
