"""The command line: finds the command, checks how its flags are spelt, turns errors into messages and exit codes."""

import io
import os
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise, takewhile
from textwrap import shorten
from typing import Any, Final

import typer
from typer.core import TyperCommand

from can_train import __version__
from can_train.cli.output import data_alone, print_aside, print_error, print_json, print_text, with_default
from can_train.config.resolved import default_task
from can_train.config.settings import canonical_name
from can_train.config.task_settings import (
    command_entries,
    command_usage,
    load_object,
    load_task_settings,
    locate,
    task_names,
)
from can_train.errors import (
    CanTrainError,
    ConfigError,
    Stopped,
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
_EPILOG: Final = """Other commands, each with its own --help:

\b
{listed}

-h is short for --help; --version prints the version; --debug shows the traceback of an error.
"""

_COMMANDS: Final = {
    "demo": "see in a minute what happens when memory runs short",
    "doctor": "check what a training needs: GPU, SLURM, data, versions",
    "factors": "what earlier runs taught; reset, pin, export, import it",
    "runs": "runs by data set, with scores; --best METRIC ranks them",
    "top": "watch runs that train or wait: progress, loss, time left",
    "explain": "which modules and operations take the memory of a step",
    "diff": "the memory of two trainings, or of one at two commits",
    "show": "its scores, plan, memory and settings, and how to go on",
    "compare": "two runs or more side by side: settings, scores, memory",
    "report": "one HTML file about runs: curves, loss, memory, settings",
    "status": "the state of a run or sweep and why; jobs and attempts",
    "logs": "what a run prints; -f follows it to its end",
    "cancel": "stop runs or a sweep; they save themselves first",
    "resume": "continue runs (--all-failed), also longer: --epochs N",
    "evaluate": "judge a finished run on its own data or others: --dataset",
    "export": "write its model as a file: weights, PyTorch program, ONNX",
    "predict": "what its model says of data without labels: --dataset",
    "resubmit": "a new run like it with other settings: --lr 0.01",
    "tag": "words on a run, which runs --tag finds",
    "note": "a sentence on a run",
    "sync": "copy runs by rsync, to be listed there as here",
    "archive": "copy runs by rsync, then delete them here; asks first",
    "delete": "delete runs that ended, with their folders; asks first",
    "pipeline": "several runs, each building on those before it",
    "completion": "make bash, zsh or fish complete commands, flags and runs",
}
# Files of commands that are not in a file of their name.
_MODULES: Final = {"status": "runs", "compare": "show", "report": "show", "resubmit": "train", "after-job": "train",
             "tag": "labels", "note": "labels", "archive": "sync"}  # fmt: skip
_ARGUMENTS: Final = {
    "factors": "[KEY]", "compare": "RUNS", "report": "RUNS", "completion": "SHELL", "export": "RUN FILE",
    **dict.fromkeys(("show", "status", "logs", "cancel", "resume", "evaluate", "predict", "resubmit"), "RUN"),
    "explain": "RUN", "diff": "LINE LINE", "tag": "RUN TAGS", "note": "RUN TEXT", "delete": "RUNS",
    "sync": "RUNS PLACE", "archive": "RUNS PLACE",
}  # fmt: skip

# Commands of scripts, which no help shows: of jobs, and of shells that complete a line.
_JOB_COMMAND: Final = "after-job"
_COMPLETE: Final = "complete-line"

# Commands that several processes of a launcher would each do for themselves. Training forms one run of them.
_OF_ONE_PROCESS: Final = ("demo", "diff", "evaluate", "explain", "export", "predict", "pipeline")

_ON: Final = ("true", "yes", "on", "1")
_OFF: Final = ("false", "no", "off", "0")
# Base of the parser's errors. Its module is Click's or, in newer versions, a private one of Typer's.
_UsageError: Final[Any] = typer.BadParameter.__base__
_HELP_ALL: Final = "--help-all"
_HELPS: Final = frozenset(("--help", "-h", _HELP_ALL))
_SUGGESTIONS: Final = 5
_UNEXPECTED: Final = "Unexpected argument"
_LINE: Final = 80  # columns of the list of commands
_STOPPED: Final = "interrupted"
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
        The exit code: 0; 2 for a wrong command line or configuration; 3 for a run that failed; 4 for a `diff` that
        found too large a growth; 5 for a plan that fits no device; 128 + the number of a signal.
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


def _unknown_command(name: str, words: Sequence[str], of_tasks: Iterable[str]) -> ConfigError:
    """Makes the error for an unknown command; a word of another tool's lines leads to the line that was meant."""
    meant = {"help": "--help", "version": "--version", "list": "runs", "ls": "runs"}.get(name, "")
    if not meant:
        models = {model for task in task_names() for model in load_task_settings(*locate(task)).models}
        meant = " ".join(["--model", name, *words]) if name in models else ""
    if meant:
        return ConfigError("Unknown command", value=repr(name), remedy=f"Write: {command_name()} {meant}")
    return unknown_name("command", name, ("train", *_COMMANDS, *of_tasks))


def _run_command(arguments: Sequence[str]) -> int:
    words = list(arguments) or ["--help"]
    if words[0] == "--version":
        print_text(f"can-train {__version__}")
        return 0
    name = "train" if words[0].startswith("-") else words.pop(0)
    if name == _COMPLETE:
        from can_train.cli.completion import complete_line

        # A shell that completes a line gets nothing where can-train would print an error.
        with suppress(CanTrainError):
            complete_line(words, {command: text for command, (_, text) in _usages().items()}, _parser)
        return 0
    of_tasks = command_entries()
    if name not in ("train", *_COMMANDS, _JOB_COMMAND, *of_tasks):
        raise _unknown_command(name, words, of_tasks)
    if name in _OF_ONE_PROCESS or name in of_tasks:
        check_started_once(f"`can-train {name}`")
    # Of a package's command it is not known how it prints its data.
    is_data = "--json" in words and _HELPS.isdisjoint(words) and name not in of_tasks
    try:
        # Reading the flags imports the task, which may print.
        with data_alone(wanted=is_data):
            _parser(name, words)(words, prog_name=command_name() if name == "train" else f"{command_name()} {name}")
    except SystemExit as stop:
        # Click ends a command with 1 where the reader of its output has gone.
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        if isinstance(stop, Stopped) and not stop.is_told:
            print_aside(": ".join(filter(None, (_STOPPED, with_command_name(stop.outcome)))))
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _parser(name: str, words: Sequence[str] = ()) -> Any:
    """Makes the parser of one command, which runs it; the words after it may name a task."""
    texts: dict[str, Any] = {}
    if name == "train":
        listed = "\n".join(f"  {f'{command} {arguments}':<19}{shorten(text, _LINE - 21, placeholder=' …')}"
                           for command, (arguments, text) in _usages().items())  # fmt: skip
        texts = {"help": _HELP.format(example=load_task_settings(default_task()).example),
                 "epilog": _EPILOG.format(listed=listed)}  # fmt: skip
    return make_parser(_load_command(name, words), **texts)


def make_parser(command: Any, **texts: Any) -> Any:
    """Makes the parser of a command, which calls it with the flags of a line; `texts` has its help and epilog."""
    # Rich's tables cut long flags off at 80 columns, and importing it doubles the time of --help.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(cls=Command, **texts)(command)
    return typer.main.get_command(app)


def _usages() -> dict[str, tuple[str, str]]:
    """Returns arguments and help of the launcher's commands, then of those that packages of tasks declare."""
    usages = {name: (_ARGUMENTS.get(name, ""), text) for name, text in _COMMANDS.items()}
    for name, entry in command_entries().items():
        if name not in _COMMANDS:
            arguments, text = command_usage(entry)
            usages[name] = (arguments, text[:1].lower() + text[1:].removesuffix("."))
    return usages


def _load_command(name: str, words: Sequence[str]) -> Any:
    """Imports one command: importing all of them takes longer than most of them run. A command whose options depend on
    the line has a function `make_NAME_command`.
    """
    if name not in ("train", *_COMMANDS, _JOB_COMMAND):
        return load_object(command_entries()[name].value)
    module = import_module(f"can_train.cli.{_MODULES.get(name, name)}")
    make = getattr(module, f"make_{name}_command", None)
    return make(words) if make is not None else getattr(module, name.replace("-", "_"))


def _training_flags() -> Collection[str]:
    from can_train.cli.train_options import OPTIONS

    return OPTIONS.keys()


def _print_error(error: CanTrainError, *, as_json: bool) -> int:
    print_error(error)
    try:
        if as_json and not error.in_json:
            # A command may print an object a line before.
            print_json({"error": error.to_plain()}, in_one_line=True)
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return error.exit_code


def _discard_output() -> None:
    """Discards output that cannot be written: Python would try once more when it exits, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _name(parameter: Any) -> str:
    """Returns an argument, or the spellings of an option and its value, as the help shows them."""
    metavar = parameter.metavar or parameter.name.replace("_", "-").upper()
    if parameter.param_type_name == "argument":
        return str(metavar)
    spellings = " / ".join(
        ", ".join(sorted(names, key=len)) for names in (parameter.opts, parameter.secondary_opts) if names
    )
    return spellings if parameter.is_flag else f"{spellings} {metavar}"


def _described(parameter: Any) -> str:
    """Returns the help of a parameter with its default, which the texts of settings have already."""
    default = parameter.default
    if default in (None, False, "") or not parameter.show_default:
        return str(parameter.help)
    return with_default(str(parameter.help), default)


class Command(TyperCommand):
    """A command whose flags may be spelt with `_` or `-`, or as an alias."""

    def __init__(self, name: str | None, **options: Any) -> None:
        options["context_settings"] = {"help_option_names": ["-h", "--help"], "token_normalize_func": _flag_name}
        # Before Click breaks the lines, since it reads the control character \b.
        texts = {key: with_command_name(options.get(key) or "") for key in ("help", "epilog")}
        super().__init__(name, **{**options, **texts})

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
        given: dict[str, tuple[str, str]] = {}
        checked = list(args)
        for position, (argument, following) in enumerate(pairwise([*args, ""])):
            if argument == "--":
                break
            if argument.startswith("--"):
                checked[position] = self._check_flag(argument, following, given, ctx.command_path)
        try:
            rest = super().parse_args(ctx, checked)
        except _UsageError as error:
            values = {flag: value for flag, (_, value) in given.items()}
            told = self._in_own_words(error, values, ctx.command_path)
            if told.rule.startswith(_UNEXPECTED):
                told.remedy = self._quoted_value(args) or told.remedy
            raise told from error
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            # An unset variable of a script gives an empty value; `--model-args` may well have one.
            if parameter.name != "model_args" and (value == "" or (isinstance(value, list | tuple) and "" in value)):
                source = ctx.get_parameter_source(parameter.name)
                if source is not None and source.name == "COMMANDLINE":
                    raise ConfigError(f"{_shown(parameter)} is empty", remedy="Give a value, or leave it out")
        return rest

    def _check_flag(self, argument: str, following: str, given: dict[str, tuple[str, str]], command: str) -> str:
        """Returns a flag as Typer's parser takes it, and enters its spelling and value into `given`.

        Raises:
            ConfigError: The flag is unknown, lacks a value, or has two different values.
        """
        spelling, equals, value = argument.partition("=")
        flag, options = _canonical_flag(spelling), self._options()
        if flag not in options:
            raise self._unknown_flag(flag, spelling)
        option = options[flag]
        has_value = not getattr(option, "is_flag", True)
        if not equals and has_value and following.startswith("--") and _canonical_flag(following) in options:
            raise ConfigError(f"{flag} needs a value", value=f"{following} is a flag", remedy=f"See {command} --help")
        new = (spelling, value if equals else following)
        old = given.setdefault(flag, new)
        if old[0] != new[0] and old[1] != new[1]:
            both = f"{' '.join(old)} and {' '.join(new)}"
            raise ConfigError(f"{flag} has two different values", value=both, remedy="Give it once")
        if not equals or option is None or not option.secondary_opts or flag != option.opts[0]:
            return argument
        off: str = option.secondary_opts[0]
        if value.lower() not in (*_ON, *_OFF):
            raise ConfigError(f"{flag} is on or off", value=value, remedy=f"Give {flag}, or {off}")
        return flag if value.lower() in _ON else off

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the words of the usage, in which an argument that may be left out has brackets."""
        arguments = [parameter for parameter in self.get_params(ctx) if parameter.param_type_name == "argument"]
        return ["[OPTIONS]", *(_name(each) if each.required else f"[{_name(each)}]" for each in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments and options in their groups (Typer does it only with Rich)."""
        groups = defaultdict(list)
        for parameter in self.get_params(ctx):
            if not getattr(parameter, "hidden", False):
                title = "Arguments" if parameter.param_type_name == "argument" else "Options"
                title = getattr(parameter, "rich_help_panel", None) or title
                groups[title].append((_name(parameter), with_command_name(_described(parameter))))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if any(getattr(parameter, "hidden", False) for parameter in self.params):
            formatter.write_paragraph()
            formatter.write_text("These are the everyday flags; --help-all shows all of them.")

    def get_help(self, ctx: Any) -> str:
        """Returns the help with control characters of a task's texts as text."""
        return printable(super().get_help(ctx))

    def _options(self) -> dict[str, Any]:
        """Returns the option of each flag; None: a flag that prints help."""
        options = {name: option for option in self.params for name in (*option.opts, *option.secondary_opts)}
        flags = {name: option for name, option in options.items() if name.startswith("-")}
        return {**dict.fromkeys(("--help", "-h", _HELP_ALL)), **flags}

    def _unknown_flag(self, flag: str, spelling: str) -> ConfigError:
        if (command := flag.removeprefix("--")) in _COMMANDS and flag not in self._options():
            return ConfigError("Unknown flag", value=spelling, remedy=f"Write: {command_name()} {command} --help")
        if (
            (words := spelling.split(maxsplit=1))
            and words[0] != spelling
            and _canonical_flag(words[0]) in self._options()
        ):
            return ConfigError("A flag and its value are two words", value=repr(spelling),
                               remedy=f"Leave out the quotes: {spelling}")  # fmt: skip
        nearest = ", ".join(nearest_first(flag, self._options())[:_SUGGESTIONS])
        if self.name == "resume" and command.replace("-", "_") in _training_flags():
            nearest += f"; with other settings, a new run: {command_name()} resubmit RUN {flag} ..."
        return ConfigError("Unknown flag", value=spelling, remedy=f"Nearest: {nearest}")

    def _quoted_value(self, args: Sequence[str]) -> str:
        """Returns the remedy for a value of several words without quotes; empty where no flag has one."""
        options = self._options()
        for flag, *words in zip(args, args[1:], args[2:], strict=False):
            takes_value = not getattr(options.get(_canonical_flag(flag)), "is_flag", True)
            if flag.startswith("--") and "=" not in flag and takes_value and not any(w.startswith("-") for w in words):
                value = " ".join(takewhile(lambda word: not word.startswith("-"), args[args.index(flag) + 1 :]))
                return f"A value of several words has quotes: {flag} {shlex.quote(value)}; else leave it out"
        return ""

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
            return ConfigError(f"{_UNEXPECTED}{'s' if ' ' in words else ''} '{words}'",
                               remedy=f"Leave it out. {see_help}")  # fmt: skip
        name = _shown(parameter)
        if not error.message:
            more = ": can-train runs lists them" if name == "RUN" else f". {see_help}"
            return ConfigError(f"{name} is missing", remedy=f"Name one{more}")
        # With Click's parser, which older versions of Typer have, the value comes first.
        rule = re.sub(r"^'.*' is not (?=a valid )", "must be ", error.message.partition(",")[0].rstrip("."))
        for theirs, ours in _WORDINGS.items():
            rule = rule.replace(theirs, ours)
        return ConfigError(f"{name} {rule}", value=repr(given.get(name, "")), remedy=see_help)


def _shown(parameter: Any) -> str:
    flag: str = parameter.opts[0]
    return flag if flag.startswith("-") else (parameter.metavar or flag.upper()).strip("[].")


def _canonical_flag(argument: str) -> str:
    return f"--{_flag_name(argument.partition('=')[0].removeprefix('--'))}"


def _flag_name(name: str) -> str:
    """Returns the canonical name of a flag without its hyphens: `max_epochs` is `epochs`, `dry_run` is `dry-run`."""
    return canonical_name(name).replace("_", "-")
