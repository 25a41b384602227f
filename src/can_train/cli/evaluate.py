"""`can-train evaluate RUN`: judges a finished run once more, on its own data or on others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from can_train.cli.alarm_options import AlarmsPerHour, Calibrate, HoldOption, Threshold, alarm_rule
from can_train.cli.output import (
    Quiet,
    Verbose,
    Verbosity,
    make_reporter,
    print_json,
    print_judgement,
    print_text,
    print_wrapped,
)
from can_train.cli.run_locator import AsJson, Run, RunLocator, RunsDir, StateDir, TrustCode
from can_train.errors import ConfigError, RunError
from can_train.io.records import expanded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from can_train.task import Alarm

MOST_ALARMS: Final = 20  # that are printed, two to four lines each


def evaluate(  # noqa: PLR0913 - Typer makes an option of each argument
    run: Run,
    *,
    dataset: Annotated[
        str | None,
        typer.Option(help="Other data: a known data set, a log or a folder of logs. [the run's own test part]"),
    ] = None,
    threshold: Threshold = None,
    calibrate: Calibrate = None,
    alarms_per_hour: AlarmsPerHour = None,
    hold: HoldOption = None,
    flagged_only: Annotated[
        bool, typer.Option("--flagged-only", help="List what was flagged, and why; --scores writes only that.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="List alarms with what drove them; with --scores FILE, of each sample.")
    ] = False,
    scores: Annotated[
        str | None, typer.Option(help="Write each sample's score to a .csv or .parquet file.", metavar="FILE")
    ] = None,
    channel: Annotated[
        str | None,
        typer.Option(help="Read one interface of logs that have several: can0. [all, as one bus]", metavar="NAME"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, or a simulated GPU: sim:2GiB.")] = "auto",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="How the data are read: dataset.columns.id=ID. Repeatable.", metavar="KEY=VALUE"),
    ] = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    data_root: Annotated[
        str | None, typer.Option(help="Folder of the published data sets. [the run's]", metavar="FOLDER")
    ] = None,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Judge a finished run once more: on its own test data, or on other data."""
    # An unset variable of a script leaves a flag empty.
    given = {"dataset": dataset, "device": device, "scores": scores, "data-root": data_root, "channel": channel}
    for name, value in given.items():
        if value == "":
            raise ConfigError(f"--{name} is empty", remedy="Give a value, or leave the flag out")
    rule = alarm_rule(threshold=threshold, calibrate=calibrate, alarms_per_hour=alarms_per_hour, hold=hold)
    verbosity = Verbosity.of(quiet=quiet, verbose=verbose)
    locator = RunLocator(runs_dir, state_dir)
    known = locator.find(run)
    if known.folder.result() is None and (status := locator.status(known)).state.live:
        raise RunError("A run is evaluated once it has finished", value=str(status.state),
                       remedy=f"Wait for its end: can-train logs {run} -f")  # fmt: skip
    # Hydra and torch: a line that is wrong does not wait for them.
    from can_train.config.resolved import PathSettings
    from can_train.training.evaluate import EvaluationRequest
    from can_train.training.evaluate import evaluate as evaluate_run

    request = EvaluationRequest(
        run=known.folder.path,
        dataset=dataset,
        sets=(*(set_ or ()), *([f"dataset.channel='{channel}'"] if channel else [])),
        rule=rule,
        flagged_only=flagged_only,
        explain=explain,
        scores=expanded(scores) if scores else None,
        device=device,
        paths=PathSettings(data_root=data_root or "", state_dir=state_dir or ""),
        trust=locator.trust(trusts_all=trust_code),
    )
    evaluated = evaluate_run(request, make_reporter(verbosity))
    document = evaluated.document
    if as_json:
        print_json(document)
        return
    if not flagged_only or verbosity == Verbosity.VERBOSE:
        print_judgement(evaluated.summary_tables, evaluated.tables, verbosity)
    if flagged_only or (explain and not scores):
        _print_alarms(evaluated.alarms, most=len(evaluated.alarms) if verbosity == Verbosity.VERBOSE else MOST_ALARMS)
    print_text("")
    for note in evaluated.notes:
        print_wrapped(f"{note}.")
    seconds = document["seconds"]
    part = ", of which only the run's own test part is judged" if document["own_split"] else ""
    counted = " of ".join(f"{count:,} {what}" for what, count in evaluated.counted.items())
    print_wrapped(
        f"Run {document['run_id']} on {document['dataset']}{part}: {counted}; "
        f"reading took {seconds['reading']:.1f} s, scoring {seconds['scoring']:.1f} s"
    )
    if document["scores"]:
        print_text(f"Scores: {document['scores']}")


def _print_alarms(alarms: Sequence[Alarm], most: int) -> None:
    """Prints alarms log by log; where there are more than `most`, those with the highest scores."""
    highest = sorted(range(len(alarms)), key=lambda index: alarms[index].score, reverse=True)[:most]
    shown = [alarms[index] for index in sorted(highest)]
    if not alarms:
        print_text("\nNothing was flagged.")
    for source in dict.fromkeys(alarm.source for alarm in shown):
        print_text(f"\n{source}")
        for alarm in shown:
            if alarm.source == source:
                print_wrapped(f"  {alarm.place}\n    {alarm.reason}")
    if len(shown) < len(alarms):
        print_text("")
        print_wrapped(f"These are the {len(shown)} highest of {len(alarms):,} alarms; "
                      "-v prints all, --scores FILE writes them")  # fmt: skip
