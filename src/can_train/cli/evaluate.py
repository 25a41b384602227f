"""`can-train evaluate RUN`: judges a finished run once more, on its own data or on others."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Final

import typer

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

    from can_train.task import Alarm, AlarmRule

MOST_ALARMS: Final = 20  # that are printed, two to four lines each
# Options that `can-train detect` has, too: when a finished model raises alarms.
_LONGEST_HOLD: Final = 1000  # of the last samples: as many are kept, and compared at each one
_SECONDS: Final = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "ms": 0.001}

Threshold = Annotated[
    float | None,
    typer.Option(help="Flag what scores more than this. [what the run chose in validation]", metavar="NUMBER"),
]
Calibrate = Annotated[
    str | None,
    typer.Option(help="Take the first seconds for benign and adapt to them; they are not judged: 10s.", metavar="TIME"),
]
AlarmsPerHour = Annotated[
    float | None,
    typer.Option(help="Choose the threshold for about so many false alarms an hour.", metavar="NUMBER"),
]
HoldOption = Annotated[
    str | None,
    typer.Option(
        "--hold", help="Raise an alarm when M of the last N samples are flagged: 2/3. [of detect: 1/1]", metavar="M/N"
    ),
]


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


def alarm_rule(
    *, threshold: float | None, calibrate: str | None, alarms_per_hour: float | None, hold: str | None
) -> AlarmRule:
    """Checks the options and reads them.

    Raises:
        ConfigError: A value is wrong, or two of them choose the threshold.
    """
    if threshold is not None and not math.isfinite(threshold):
        raise ConfigError("--threshold is a finite number", value=str(threshold))
    calibrate_s = None if calibrate is None else _parse_seconds("calibrate", calibrate)
    for flag, value in {"calibrate": calibrate_s, "alarms-per-hour": alarms_per_hour}.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{flag} is more than 0", value=f"{value:g}", remedy="Give a positive number")
        if value is not None and threshold is not None:
            raise ConfigError(f"--threshold and --{flag} both choose the threshold", remedy="Give one of them")
    held = None if hold is None else _parse_hold(hold)
    # Torch, which a line that is wrong does not wait for.
    from can_train.task import AlarmRule

    return AlarmRule(threshold=threshold, calibrate_s=calibrate_s, alarms_per_hour=alarms_per_hour, hold=held)


def _parse_seconds(flag: str, text: str) -> float:
    """Reads a time such as 10s, 2min or 90."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text)
    if found is None or found[2] not in _SECONDS:
        raise ConfigError(f"--{flag} is a time", value=repr(text), remedy=f"Write it like --{flag} 10s")
    return float(found[1]) * _SECONDS[found[2]]


def _parse_hold(text: str) -> tuple[int, int]:
    """Reads `2/3`."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= _LONGEST_HOLD:
        raise ConfigError("--hold is M/N: an alarm is raised when M of the last N samples are flagged",
                          value=repr(text), remedy=f"Write it like --hold 2/3, with M ≤ N ≤ {_LONGEST_HOLD}"
                          )  # fmt: skip
    return int(found[1]), int(found[2])
