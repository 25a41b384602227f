"""The command line: which command a line names, and how its errors are shown."""

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from can_train.cli.options import canonical_arguments
from can_train.errors import CanTrainError, of_system


def after_job(
    state_dir: Annotated[Path, typer.Option(help="State folder, where the registry is.")],
    status: Annotated[int, typer.Option(help="Exit status of the job step.")],
) -> None:
    """Record how a job ended, and have its run go on where that makes sense.

    Standard input has the variables that the job began with.
    """
    from can_train.cli.attempt import go_on_in_job
    from can_train.slurm.after_job import after_job as restart_after_job

    message = restart_after_job(go_on_in_job, state_dir, status=status, environment=sys.stdin.buffer.read())
    if message:
        print(f"can-train: {message}", flush=True)


_HELP: Final = """Launches PyTorch training that fits. A line that starts with an option trains:

\b
  can-train --model gat --dataset synthetic
"""

_COMMANDS: Final = """Other commands, each with its own --help:

\b
  factors [KEY]  what earlier runs taught; reset, pin, export, import it
  runs           all runs with their states; --best METRIC ranks them
  status RUN     what state a run is in and why; its jobs and attempts
  logs RUN       what a run prints; -f follows it to its end
  cancel RUN     stop a run, which saves itself first
  resume RUN     continue a run from its last checkpoint
  evaluate RUN   judge a finished run on its own data, or on others: --dataset
  resubmit RUN   a new run with other settings: --set training.lr=0.01
  pipeline       several runs, each building on those before it
"""

_STYLE: Final[dict[str, Any]] = {
    "add_completion": False,
    # Rich's tables cut long flags off at 80 columns, and importing it doubles the time of --help.
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}

_PATIENT_THREADS: Final = ("OMP_WAIT_POLICY", "passive")
"""Torch's threads sleep while they wait for each other: where other processes keep two cores busy, threads that spin
are five times slower. OpenMP reads it when torch is imported."""


def make_commands() -> typer.Typer:
    """Builds the application of named commands; `train` is there too, hidden."""
    app = typer.Typer(help=_HELP, **_STYLE)
    app.command("train", hidden=True, epilog=_COMMANDS, help=_HELP)(_training())
    for name, make in _NAMED.items():
        app.command(name, hidden=name in _HIDDEN)(make())
    return app


def make_command(name: str) -> typer.Typer:
    """Builds the application of one named command: the others' parameters take longer to build than it does to run."""
    app = typer.Typer(**_STYLE)
    app.command()(_NAMED[name]())
    return app


def make_training() -> typer.Typer:
    """Builds the application of a line without a command name."""
    app = typer.Typer(**_STYLE)
    app.command(epilog=_COMMANDS, help=_HELP)(_training())
    return app


def _training() -> Callable[..., None]:
    from can_train.cli.train import make_train_command

    return make_train_command()


def _factors() -> Callable[..., None]:
    from can_train.cli.factors import factors

    return factors


def _runs() -> Callable[..., None]:
    from can_train.cli.runs import make_runs_command

    return make_runs_command()


def _status() -> Callable[..., None]:
    from can_train.cli.runs import status

    return status


def _logs() -> Callable[..., None]:
    from can_train.cli.logs import logs

    return logs


def _cancel() -> Callable[..., None]:
    from can_train.cli.cancel import cancel

    return cancel


def _resume() -> Callable[..., None]:
    from can_train.cli.resume import resume

    return resume


def _resubmit() -> Callable[..., None]:
    from can_train.cli.resume import make_resubmit_command

    return make_resubmit_command()


def _pipeline() -> Callable[..., None]:
    from can_train.cli.pipeline import make_pipeline_command

    return make_pipeline_command()


def _evaluate() -> Callable[..., None]:
    from can_train.cli.evaluate import make_evaluate_command

    return make_evaluate_command()


def _after_job() -> Callable[..., None]:

    return after_job


_NAMED: Final[Mapping[str, Callable[[], Callable[..., None]]]] = {
    "factors": _factors,
    "runs": _runs,
    "status": _status,
    "logs": _logs,
    "cancel": _cancel,
    "resume": _resume,
    "evaluate": _evaluate,
    "resubmit": _resubmit,
    "pipeline": _pipeline,
    "after-job": _after_job,
}
"""What makes each command; a line of one of them does not import the others."""

_HIDDEN: Final = ("after-job",)
"""Commands that no person gives."""


def main(arguments: Sequence[str]) -> int:
    """Runs one command line.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code: 0, 2 for an error that the user can mend, 128 + the number of a signal.
    """
    debug = "--debug" in arguments
    try:
        status = _exit_status([argument for argument in arguments if argument != "--debug"])
        # A disk that is full, and a reader that has gone, may say so only now.
        sys.stdout.flush()
    except CanTrainError as error:
        if debug:
            raise
        return _told(error)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nobody is left to tell.
        _drop_output()
        return 1
    except OSError as error:
        mendable = of_system(error)
        if debug or mendable is None:
            raise
        return _told(mendable)
    return status


def _exit_status(arguments: Sequence[str]) -> int:
    try:
        words = canonical_arguments(arguments)
        if words and words[0] in _NAMED:
            make_command(words[0])(words[1:], prog_name=f"can-train {words[0]}")
        names_command = bool(words) and not words[0].startswith("-")
        app = make_commands() if names_command else make_training()
        app(words or ["--help"], prog_name="can-train")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _told(error: CanTrainError) -> int:
    print(f"error: {error}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
    return error.exit_code


def _drop_output() -> None:
    """Has what was printed and cannot be written forgotten: Python would try once more at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run() -> None:
    """Entry point of the console script."""
    os.environ.setdefault(*_PATIENT_THREADS)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An encoding without `±` (PYTHONIOENCODING=ascii, a bare C locale) costs a character, not the table.
        sys.stdout.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))
