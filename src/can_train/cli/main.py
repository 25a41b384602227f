"""The command line: finds the command, and turns errors into messages and exit codes."""

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import typer

from can_train.cli.command import Command
from can_train.errors import CanTrainError, of_system, unknown_name

_HELP: Final = """Launches PyTorch training that fits in GPU memory. A command line that starts with an option trains:

\b
  can-train --model gat --dataset synthetic
"""

_OTHER_COMMANDS: Final = """Other commands, each with its own --help:

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

_NAMES: Final = (
    "train", "factors", "runs", "status", "logs", "cancel", "resume", "evaluate", "resubmit", "pipeline",
)  # fmt: skip

# Only jobs give it.
_JOB_COMMAND: Final = "after-job"


def run() -> None:
    """Entry point of the console script."""
    # Torch's threads wait actively for each other by default: with two cores and other processes on both, training is
    # five times slower. OpenMP reads the variable when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An encoding without `±` (PYTHONIOENCODING=ascii, a bare C locale) costs a character, not the table.
        sys.stdout.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Runs one command line.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code: 0; 2 for an error that the user can correct; 128 + the number of a signal.
    """
    debug = "--debug" in arguments
    try:
        status = _run_command([argument for argument in arguments if argument != "--debug"])
        # A full disk, or a reader that has gone, may show only now.
        sys.stdout.flush()
    except CanTrainError as error:
        if debug:
            raise
        return _print_error(error)
    except BrokenPipeError:
        # The reader of the output has gone (`| head`): nobody is left to tell.
        _discard_output()
        return 1
    except OSError as error:
        correctable = of_system(error)
        if debug or correctable is None:
            raise
        return _print_error(correctable)
    return status


def _run_command(arguments: Sequence[str]) -> int:
    words = list(arguments) or ["--help"]
    name = "train" if words[0].startswith("-") else words.pop(0)
    if name not in (*_NAMES, _JOB_COMMAND):
        raise unknown_name("command", name, _NAMES)
    training: dict[str, Any] = {"help": _HELP, "epilog": _OTHER_COMMANDS} if name == "train" else {}
    # Rich's tables cut long flags off at 80 columns, and importing it doubles the time of --help.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=Command, **training)(_load_command(name))
    try:
        app(words, prog_name="can-train" if name == "train" else f"can-train {name}")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _load_command(name: str) -> Callable[..., None]:
    """Imports one command: importing all of them takes longer than most of them run."""
    match name:
        case "factors":
            from can_train.cli.factors import factors

            return factors
        case "runs" | "status":
            from can_train.cli.runs import make_runs_command, status

            return status if name == "status" else make_runs_command()
        case "logs":
            from can_train.cli.logs import logs

            return logs
        case "cancel":
            from can_train.cli.cancel import cancel

            return cancel
        case "resume" | "resubmit":
            from can_train.cli.resume import make_resubmit_command, resume

            return resume if name == "resume" else make_resubmit_command()
        case "evaluate":
            from can_train.cli.evaluate import make_evaluate_command

            return make_evaluate_command()
        case "pipeline":
            from can_train.cli.pipeline import make_pipeline_command

            return make_pipeline_command()
        case "after-job":
            from can_train.cli.attempt import after_job

            return after_job
        case _:
            from can_train.cli.train import make_train_command

            return make_train_command()


def _print_error(error: CanTrainError) -> int:
    print(f"error: {error}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return error.exit_code


def _discard_output() -> None:
    """Discards what was printed and cannot be written: Python would try once more when it exits, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
