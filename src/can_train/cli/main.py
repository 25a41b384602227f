"""The command line: finds the command, checks how its flags are spelt, turns errors into messages and exit codes."""

import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from textwrap import shorten
from typing import Any, Final

import typer
from typer.core import TyperCommand

from can_train import __version__
from can_train.cli.output import print_aside, print_json, print_text
from can_train.config.resolved import default_task
from can_train.config.settings import canonical_name
from can_train.config.task_settings import command_entries, command_usage, load_object, load_task_settings
from can_train.errors import (
    CanTrainError,
    ConfigError,
    UntrustedCodeError,
    command_name,
    from_import_error,
    from_os_error,
    nearest_first,
    printable,
    unknown_name,
    with_command_name,
)
from can_train.slurm.launchers import check_started_once

_HELP: Final = """Launches PyTorch training that fits in GPU memory. A command line that starts with an option trains:

\b
  can-train {example}
  can-train --task my_file.py:MyTask
"""

_COMMANDS: Final = {
    "demo": "see in a minute what happens when memory runs short",
    "doctor": "check what a training needs: GPU, SLURM, data, versions",
    "factors": "what earlier runs taught; reset, pin, export, import it",
    "runs": "runs by data set, with scores; --best METRIC ranks them",
    "show": "its scores, plan, memory and settings, and how to go on",
    "compare": "two runs or more side by side: settings, scores, memory",
    "report": "one HTML file about runs: curves, loss, memory, settings",
    "status": "what state a run is in and why; its jobs and attempts",
    "logs": "what a run prints; -f follows it to its end",
    "cancel": "stop a run, which saves itself first",
    "resume": "continue a run, also beyond its end: --epochs N",
    "evaluate": "judge a finished run on its own data or others: --dataset",
    "resubmit": "a new run like it with other settings: --lr 0.01",
    "pipeline": "several runs, each building on those before it",
    "completion": "make bash, zsh or fish complete commands, flags and runs",
}
_ARGUMENTS: Final = {"factors": "[KEY]", "compare": "RUNS", "report": "RUNS", "completion": "SHELL"} | dict.fromkeys(
    ("show", "status", "logs", "cancel", "resume", "evaluate", "resubmit"), "RUN"
)

# Commands of scripts, which no help shows: of jobs, and of shells that complete a line.
_JOB_COMMAND: Final = "after-job"
_COMPLETE: Final = "complete-line"

# Commands that several processes of a launcher would each do for themselves. Training forms one run of them.
_OF_ONE_PROCESS: Final = ("demo", "evaluate", "pipeline")

_ON: Final = ("true", "yes", "on", "1")
_OFF: Final = ("false", "no", "off", "0")
# Base of the parser's errors. Its module is Click's or, in newer versions, a private one of Typer's.
_UsageError: Final[Any] = typer.BadParameter.__base__
_HELP_ALL: Final = "--help-all"
_SUGGESTIONS: Final = 5
_LINE: Final = 80  # columns of the list of commands
_BROKEN_PIPE: Final = 128 + 13  # the exit code of a process that SIGPIPE ends

# Typer's words for a value of the wrong type, and can-train's.
_WORDINGS: Final = {"Input should be": "must be", "a valid integer range": "a whole number",
                    "a valid integer": "a whole number", "a valid number": "a number",
                    "greater than or equal to": "at least", "less than or equal to": "at most"}  # fmt: skip


def run() -> None:
    """Entry point of the console script."""
    # Torch's threads wait actively for each other by default: with two cores and other processes on both, training is
    # five times slower. OpenMP reads the variable when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # No Python that this process starts imports from the current folder, whichever library starts it.
    os.environ["PYTHONSAFEPATH"] = "1"
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An encoding without `±` (PYTHONIOENCODING=ascii, a bare C locale) costs a character, not the table.
        sys.stdout.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Runs one command line.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code: 0; 2 for a wrong command line or configuration; 3 for a run that failed; 128 + the number of
        a signal.
    """
    debug = "--debug" in arguments
    try:
        status = _run_command([argument for argument in arguments if argument != "--debug"])
        # A full disk, or a reader that has gone, may show only now.
        sys.stdout.flush()
    except CanTrainError as error:
        if debug:
            raise
        if isinstance(error, UntrustedCodeError):
            error = error.with_line(shlex.join([command_name(), *arguments, "--trust-code"]))
        return _print_error(error, as_json="--json" in arguments)
    except BrokenPipeError:
        # The reader of the output has gone (`| head`): nobody is left to tell.
        _discard_output()
        return _BROKEN_PIPE
    except (ImportError, OSError) as error:
        correctable = from_import_error(error) or (from_os_error(error) if isinstance(error, OSError) else None)
        if debug or correctable is None:
            raise
        return _print_error(correctable, as_json="--json" in arguments)
    return status


def _run_command(arguments: Sequence[str]) -> int:
    words = list(arguments) or ["--help"]
    if words[0] == "--version":
        print_text(f"can-train {__version__}")
        return 0
    name = "train" if words[0].startswith("-") else words.pop(0)
    if name == _COMPLETE:
        return _complete(words)
    of_tasks = command_entries()
    if name not in ("train", *_COMMANDS, _JOB_COMMAND, *of_tasks):
        raise unknown_name("command", name, ("train", *_COMMANDS, *of_tasks))
    if name in _OF_ONE_PROCESS or name in of_tasks:
        check_started_once(f"`can-train {name}`")
    try:
        _parser(name, words)(words, prog_name=command_name() if name == "train" else f"{command_name()} {name}")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _parser(name: str, words: Sequence[str] = ()) -> Any:
    """Makes the parser of one command, which runs it; the words after it may name a task."""
    training: dict[str, Any] = {}
    if name == "train":
        example = load_task_settings(default_task()).example
        training = {"help": _HELP.format(example=example), "epilog": _list_commands()}
    # Rich's tables cut long flags off at 80 columns, and importing it doubles the time of --help.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=Command, **training)(_load_command(name, words))
    return typer.main.get_command(app)


def _complete(words: Sequence[str]) -> int:
    """Answers a shell that completes a line; it gets nothing where can-train would print an error."""
    from can_train.cli.completion import complete_line

    with suppress(CanTrainError):
        complete_line(words, _COMMANDS | {name: text for name, (_, text) in _commands_of_tasks().items()}, _parser)
    return 0


def _list_commands() -> str:
    """Lists the commands for help: those of the launcher, then those that packages of tasks declare."""
    usages = {name: (_ARGUMENTS.get(name, ""), text) for name, text in _COMMANDS.items()} | _commands_of_tasks()
    listed = "\n".join(f"  {f'{name} {arguments}':<17}{shorten(text, _LINE - 19, placeholder=' …')}"
                       for name, (arguments, text) in usages.items())  # fmt: skip
    return (f"Other commands, each with its own --help:\n\n\b\n{listed}\n\n"
            "-h is short for --help; --version prints the version.\n")  # fmt: skip


def _commands_of_tasks() -> dict[str, tuple[str, str]]:
    """Returns the arguments and the first line of help of each command that a package of tasks declares."""
    usages = {name: command_usage(entry) for name, entry in command_entries().items() if name not in _COMMANDS}
    return {name: (arguments, text[:1].lower() + text[1:]) for name, (arguments, text) in usages.items()}


def _load_command(name: str, words: Sequence[str]) -> Callable[..., None]:
    """Imports one command: importing all of them takes longer than most of them run."""
    match name:
        case "completion":
            from can_train.cli.completion import completion

            return completion
        case "demo":
            from can_train.cli.demo import demo

            return demo
        case "doctor":
            from can_train.cli.doctor import make_doctor_command

            return make_doctor_command(words)
        case "factors":
            from can_train.cli.factors import factors

            return factors
        case "runs" | "status":
            from can_train.cli.runs import runs, status

            return runs if name == "runs" else status
        case "show" | "compare" | "report":
            from can_train.cli.show import compare, report, show

            return show if name == "show" else compare if name == "compare" else report
        case "logs":
            from can_train.cli.logs import logs

            return logs
        case "cancel":
            from can_train.cli.cancel import cancel

            return cancel
        case "resume":
            from can_train.cli.resume import resume

            return resume
        case "evaluate":
            from can_train.cli.evaluate import make_evaluate_command

            return make_evaluate_command(words)
        case "pipeline":
            from can_train.cli.pipeline import make_pipeline_command

            return make_pipeline_command()
        case "after-job":
            from can_train.cli.attempt import after_job

            return after_job
        case _ if name in command_entries():
            command: Callable[..., None] = load_object(command_entries()[name].value)
            return command
        case _:
            from can_train.cli.train import make_resubmit_command, make_train_command

            return make_resubmit_command() if name == "resubmit" else make_train_command(words)


def _print_error(error: CanTrainError, *, as_json: bool) -> int:
    print_aside(f"error: {error}")
    try:
        if as_json and not error.in_json:
            print_json({"error": error.to_plain()})
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return error.exit_code


def _discard_output() -> None:
    """Discards output that cannot be written: Python would try once more when it exits, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Command(TyperCommand):
    """A command whose flags may be spelt with `_` or `-`, or as an alias."""

    def __init__(self, name: str | None, *, context_settings: dict[str, Any] | None = None, **options: Any) -> None:
        settings = {"help_option_names": ["-h", "--help"], **(context_settings or {})}
        settings["token_normalize_func"] = _flag_name
        # Before Click breaks the lines, since it reads the control character \b.
        texts = {key: with_command_name(options[key]) for key in ("help", "epilog") if options.get(key)}
        super().__init__(name, context_settings=settings, **{**options, **texts})

    # Typer's own contexts are of a private class; the public `typer.Context` is a subclass of it.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses arguments after checking the spelling of their flags, with `--regrow=false` as `--no-regrow`.

        Typer can do neither: its parser forgets the spelling of a flag, so the last of two values would win silently,
        and its switches take no value, although presets and `--set` write true or false.
        """
        if _HELP_ALL in args:
            for parameter in self.params:
                parameter.hidden = False  # type: ignore[attr-defined]  # arguments are never hidden
            args = ["--help"]
        checked: list[str] = []
        given: dict[str, tuple[str, str]] = {}
        for position, argument in enumerate(args):
            if argument == "--":
                checked += args[position:]
                break
            if argument.startswith("--"):
                following = next(iter(args[position + 1 : position + 2]), "")
                argument = self._check_flag(argument, following, given, ctx.command_path)
            checked.append(argument)
        try:
            return super().parse_args(ctx, checked)
        except _UsageError as error:
            values = {flag: value for flag, (_, value) in given.items()}
            raise self._in_own_words(error, values, ctx.command_path) from error

    def _check_flag(self, argument: str, following: str, given: dict[str, tuple[str, str]], command: str) -> str:
        """Returns a flag as Typer's parser takes it, and enters its spelling and value into `given`.

        Raises:
            ConfigError: The flag is unknown, lacks a value, or has two different values.
        """
        spelling, equals, value = argument.partition("=")
        flag, flags = _canonical_flag(spelling), self._flags()
        if flag not in flags:
            raise self._unknown_flag(flag, spelling)
        has_value = any(flag in option.opts and not getattr(option, "is_flag", False) for option in self.params)
        if not equals and has_value and following.startswith("--") and _canonical_flag(following) in flags:
            raise ConfigError(f"{flag} needs a value", value=f"{following} is a flag", remedy=f"See {command} --help")
        new = (spelling, value if equals else following)
        old = given.setdefault(flag, new)
        if old[0] != new[0] and old[1] != new[1]:
            both = f"{' '.join(old)} and {' '.join(new)}"
            raise ConfigError(f"{flag} has two different values", value=both, remedy="Give it once")
        off = next((option.secondary_opts[0] for option in self.params
                    if option.secondary_opts and option.opts[0] == flag), "")  # fmt: skip
        if not (equals and off):
            return argument
        if value.lower() not in (*_ON, *_OFF):
            raise ConfigError(f"{flag} is on or off", value=value, remedy=f"Give {flag}, or {off}")
        return flag if value.lower() in _ON else off

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments and options in their groups (Typer does it only with Rich)."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                title = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).append(
                    (record[0], with_command_name(record[1]))
                )
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if any(getattr(parameter, "hidden", False) for parameter in self.params):
            formatter.write_paragraph()
            formatter.write_text("These are the everyday flags; --help-all shows all of them.")

    def get_help(self, ctx: Any) -> str:
        """Returns the help with control characters of a task's texts as text."""
        return printable(super().get_help(ctx))

    def _flags(self) -> set[str]:
        names = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        return {name for name in names | {"--help", "-h", _HELP_ALL} if name.startswith("-")}

    def _unknown_flag(self, flag: str, spelling: str) -> ConfigError:
        nearest = ", ".join(nearest_first(flag, self._flags())[:_SUGGESTIONS])
        return ConfigError("Unknown flag", value=spelling, remedy=f"Nearest: {nearest}")

    def _in_own_words(self, error: Any, given: Mapping[str, str], command: str) -> ConfigError:
        """Rewrites an error of Typer's parser as rule, value and remedy; `given` has the values by flag."""
        parameter, flag = getattr(error, "param", None), str(getattr(error, "option_name", ""))
        see_help = f"See {command} --help"
        if "No such option" in error.format_message():
            return self._unknown_flag(flag, flag)
        if flag:
            takes = "takes no value" if "does not take" in error.message else "needs a value"
            return ConfigError(f"{flag} {takes}", remedy=see_help)
        if parameter is None:
            # `Got unexpected extra argument(s) (foo bar)`
            words = error.message.partition(" (")[2].rstrip(")") or error.message
            return ConfigError(f"Unexpected argument{'s' if ' ' in words else ''} '{words}'",
                               remedy=f"Leave it out. {see_help}")  # fmt: skip
        name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar or parameter.name.upper()
        if not error.message:
            more = ": can-train runs lists them" if name == "RUN" else f". {see_help}"
            return ConfigError(f"{name} is missing", remedy=f"Name one{more}")
        # With Click's parser, which older versions of Typer have, the value comes first.
        rule = re.sub(r"^'.*' is not (?=a valid )", "must be ", error.message.partition(",")[0].rstrip("."))
        for theirs, ours in _WORDINGS.items():
            rule = rule.replace(theirs, ours)
        return ConfigError(f"{name} {rule}", value=repr(given.get(name, "")), remedy=see_help)


def _canonical_flag(argument: str) -> str:
    return f"--{_flag_name(argument.partition('=')[0].removeprefix('--'))}"


def _flag_name(name: str) -> str:
    """Returns the canonical name of a flag without its hyphens: `max_epochs` is `epochs`, `dry_run` is `dry-run`."""
    return canonical_name(name).replace("_", "-")
