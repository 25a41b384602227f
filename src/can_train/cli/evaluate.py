"""`can-train evaluate RUN`: judges a finished run once more, on its own data or on others."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from can_train.cli.command import command_of
from can_train.cli.output import make_reporter, print_tables
from can_train.cli.run_locator import AsJson, Run, RunLocator, RunsDir, StateDir
from can_train.errors import ConfigError

if TYPE_CHECKING:
    from can_train.training.evaluate import Evaluated

_FILLED: Final = ("dataset", "device", "scores", "data_root")
"""Flags that an unset variable of a script would leave empty."""


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """What is asked for."""

    run: Run
    dataset: Annotated[
        str | None,
        typer.Option(help="Other data: a known data set, a log or a folder of logs. [the run's own test part]"),
    ] = None
    threshold: Annotated[
        float | None,
        typer.Option(help="Flag what scores more than this. [what the run chose in validation]", metavar="NUMBER"),
    ] = None
    scores: Annotated[
        str | None, typer.Option(help="Write each window's score to a .csv or .parquet file.", metavar="FILE")
    ] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, or a simulated GPU: sim:2GiB.")] = "auto"
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="How the data are read: dataset.columns.id=ID. Repeatable.", metavar="KEY=VALUE"),
    ] = None
    as_json: AsJson = False
    data_root: Annotated[
        str | None, typer.Option(help="Folder of the published data sets. [the run's]", metavar="FOLDER")
    ] = None
    runs_dir: RunsDir = "runs"
    state_dir: StateDir = None


def make_evaluate_command() -> Callable[..., None]:
    """Makes the command."""
    return command_of(EvaluateRequest, _evaluate)


def _evaluate(request: EvaluateRequest) -> None:
    """Judge a finished run once more: on its own test data, or on other logs."""
    _check(request)
    known = RunLocator(request.runs_dir, request.state_dir).find(request.run)
    # Hydra and torch: a line that is wrong does not wait for them.
    from can_train.config.resolved import PathSettings
    from can_train.training.evaluate import EvaluationRequest, evaluate

    evaluated = evaluate(
        EvaluationRequest(
            run=known.folder.path,
            dataset=request.dataset,
            sets=tuple(request.set_ or ()),
            threshold=request.threshold,
            scores=Path(request.scores).expanduser() if request.scores else None,
            device=request.device,
            paths=PathSettings(data_root=request.data_root or "", state_dir=request.state_dir or ""),
        ),
        make_reporter(),
    )
    if request.as_json:
        print(json.dumps(evaluated.document, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        _show(evaluated)


def _check(request: EvaluateRequest) -> None:
    for name in _FILLED:
        if getattr(request, name) == "":
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is empty", remedy="Give a value, or leave the flag out")
    if request.threshold is not None and not math.isfinite(request.threshold):
        raise ConfigError("--threshold is a finite number", value=str(request.threshold))


def _show(evaluated: "Evaluated") -> None:
    print_tables(evaluated.tables)
    print()
    for note in evaluated.notes:
        print(f"{note}.")
    print(_summary(evaluated.document))
    if evaluated.document["scores"]:
        print(f"Scores: {evaluated.document['scores']}")


def _summary(document: Mapping[str, Any]) -> str:
    seconds = document["seconds"]
    return (
        f"Run {document['run_id']} on {document['dataset']}: {document['windows']:,} windows of "
        f"{document['frames']:,} frames; reading took {seconds['reading']:.1f} s, scoring {seconds['scoring']:.1f} s"
    )
