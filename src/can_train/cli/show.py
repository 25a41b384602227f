"""`can-train show`, `compare` and `report`: one run, several runs side by side, and an HTML page of runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from can_train.cli.output import (
    make_reporter,
    print_aside,
    print_json,
    print_tables,
    print_text,
    print_wrapped,
    writing,
)
from can_train.cli.run_locator import AsJson, RunLocator, RunOrSweep, Runs, RunsDir, StateDir
from can_train.config.resolved import plain_to_yaml
from can_train.config.task_settings import described_tasks, load_task_settings
from can_train.errors import ConfigError, with_command_name
from can_train.io.records import write_text_atomic
from can_train.io.units import value_text
from can_train.report import run_facts as facts
from can_train.reporter import COLUMNS, wrapped
from can_train.runs.run_folder import RunFolder
from can_train.runs.status import run_statuses
from can_train.slurm import client as slurm

_REPORT: Final = "report.html"


def show(  # noqa: PLR0913 - Typer makes an option of each argument
    run: RunOrSweep,
    *,
    config: Annotated[
        bool, typer.Option("--config", help="Print all of its settings, as a file for can-train --config.")
    ] = False,
    signals: Annotated[
        bool, typer.Option("--signals", help="Show the signals found in the data that it was trained on.")
    ] = False,
    as_json: AsJson = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Show a run: scores, plan, memory, settings that are not the defaults, and the commands that continue it. Of a
    sweep, a row for each run, the best first.
    """
    locator = RunLocator(runs_dir, state_dir)
    sweep, (record, *more) = locator.find_any(run)
    if sweep and not (config or signals):
        compared = facts.compared_runs(run_statuses([record, *more], locator.registry, slurm))
        if as_json:
            print_json({"sweep": sweep, **facts.comparison_json(compared)})
            return
        print_text(f"sweep   {sweep}")
        print_tables([facts.sweep_table(compared)], pipe_columns=COLUMNS)
        print_text(with_command_name(f"\nStates and failures: can-train status {sweep}"))
        return
    if sweep:
        flag = "--config" if config else "--signals"
        raise ConfigError(f"{flag} goes with a single run", value=sweep, remedy="Name one of its runs")
    if config:
        settings = record.folder.config()
        print_json(settings) if as_json else print_text(plain_to_yaml(settings), end="")
        return
    if signals:
        _print_signals(record.folder, as_json=as_json)
        return
    status = locator.status(record)
    if as_json:
        print_json(facts.run_facts(status))
        return
    folder, result = status.known.folder, facts.result_of(status)
    plain, commands = folder.config(), facts.next_commands(status)
    print_text(with_command_name("\n".join(f"{name:<8}{text}" for name, text in facts.head_facts(status, plain))))
    print_tables(facts.score_tables(result))
    device = str(result.get("device") or plain.get("device"))
    sentences, figures, notices = facts.full_plan(facts.read_plan(folder), device)
    _print_part("Plan", [*sentences, *(f"{name:<14} {text}" for name, text in figures), *notices])
    memory = facts.memory_lines(facts.memory_facts(folder, result))
    _print_part("Memory", [f"{name:<13}  {text}" for name, text in memory])
    if explained := facts.read_memory_parts(folder):
        from can_train.training.report import part_lines

        _print_part("Parts of the memory", part_lines(explained))
    _print_part("Settings that differ from the defaults", _settings_lines(folder.changed_settings()))
    # Not wrapped: a command that is broken into two lines cannot be typed.
    print_text("".join(["\nTo go on", *(f"\n  {command}" for command in commands)]) if commands else "")


def _print_signals(folder: RunFolder, *, as_json: bool) -> None:
    """Prints the signals in the data of a run.

    Raises:
        ConfigError: Its task has no signals.
        MissingDataError: Its data are gone.
        RunError: Its data have changed.
    """
    task = str(folder.config().get("task"))
    # The code of somebody's own task is not run here.
    shown = [name for name in described_tasks() if load_task_settings(name).signals]
    if task not in shown:
        raise ConfigError("The data of this task have no signals", value=task,
                          remedy=f"--signals goes with runs of: {', '.join(shown)}")  # fmt: skip
    # Imported late: it imports torch.
    from can_train.training.loading import data_signals

    table, sentences, plain = data_signals(folder, make_reporter())
    if as_json:
        print_json(plain)
        return
    print_tables([table])
    for sentence in sentences:
        print_aside(wrapped(sentence, COLUMNS, hang="  "))


def _print_part(title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    print_text(f"\n{title}")
    for line in lines:
        print_text(wrapped(f"  {line.strip()}", COLUMNS, hang="    "))


def _settings_lines(changed: Mapping[str, Mapping[str, Any]] | None) -> list[str]:
    if changed is None:
        return ["not known: the run's changed_settings.json is missing or damaged, or it had no presets"]
    if not changed:
        return ["none"]
    width = max(map(len, changed))
    return [f"{name:<{width}}  {value_text(setting['value'])}  (default: {value_text(setting['default'])})"
            for name, setting in changed.items()]  # fmt: skip


def compare(
    runs: Runs,
    as_json: AsJson = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Show runs side by side: settings that differ, scores by test set, time and memory. Of more than five runs, as of
    a sweep, each has a row, the best first.
    """
    statuses = RunLocator(runs_dir, state_dir).statuses(runs)
    if len(statuses) < 2:
        raise ConfigError("Only one run to compare", value=" ".join(runs),
                          remedy="Name two runs or more; can-train runs lists them")  # fmt: skip
    compared = facts.compared_runs(statuses)
    if as_json:
        print_json(facts.comparison_json(compared))
    elif len(compared) > facts.SIDE_BY_SIDE:
        print_tables([facts.sweep_table(compared)], pipe_columns=COLUMNS)
    else:
        print_tables(facts.comparison_tables(compared), pipe_columns=COLUMNS)


def report(
    runs: Runs,
    output: Annotated[
        Path | None,
        typer.Option(help=f"The file. [{_REPORT} in the run's folder; of several runs here]", metavar="FILE"),
    ] = None,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Write an HTML file about runs: scores and curves, loss, memory, factors, settings. It needs no network."""
    from can_train.report.page import page_html, read_run

    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError("A report can only be written as HTML", value=str(output),
                          remedy="Name a file that ends in .html")  # fmt: skip
    locator = RunLocator(runs_dir, state_dir)
    compared = facts.compared_runs(locator.statuses(runs))
    path = output or (Path(_REPORT) if len(compared) > 1 else compared[0].status.known.folder.path / _REPORT)
    tables = facts.comparison_tables(compared)
    if len(compared) > facts.SIDE_BY_SIDE:
        tables = [facts.sweep_table(compared)]
    page = page_html([read_run(run, locator.state_folder) for run in compared], tables)
    with writing("report", path, "Name a file in a folder that you may write to: --output FILE"):
        write_text_atomic(path, page)
    print_wrapped(f"Report: {path}")
