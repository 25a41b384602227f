"""The command line: which command an argument list means, and how errors reach a person."""

import os
import sys
from collections.abc import Sequence
from typing import Final

import typer

from can_train.cli.factors import factors
from can_train.cli.flags import canonical_arguments
from can_train.cli.resume import resume
from can_train.cli.train import make_train_command
from can_train.errors import CanTrainError

_HELP: Final = """Launches PyTorch training that fits.

A line that starts with an option trains:

  can-train --model gat --dataset synthetic
"""

_COMMANDS: Final = """Commands: factors [KEY] (what was learned), resume RUN; each has its own --help."""


def make_app() -> typer.Typer:
    """Builds the application; `train` is its hidden default command."""
    app = typer.Typer(help=_HELP, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command("train", hidden=True, epilog=_COMMANDS, help=_HELP)(make_train_command())
    app.command("factors")(factors)
    app.command("resume")(resume)
    return app


def main(arguments: Sequence[str]) -> int:
    """Runs one command line.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code: 0, 2 for an error that the user can mend, 128 + the number of a signal.
    """
    debug = "--debug" in arguments
    try:
        words = canonical_arguments([argument for argument in arguments if argument != "--debug"])
        make_app()(_with_command(words), prog_name="can-train")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except CanTrainError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main(sys.argv[1:]))


def _with_command(words: list[str]) -> list[str]:
    """Finds the command: no words and a bare --help ask for the training help, a leading option trains."""
    if not words or words[0] in ("--help", "-h"):
        return ["train", "--help"]
    return ["train", *words] if words[0].startswith("-") else words
