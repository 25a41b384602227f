"""`can-train completion SHELL`: the script that makes a shell complete commands, flags, values and runs, and the
answers to that script.

At each press of the tab key the script runs the command as it was typed, so that `./can-train` is completed too:
`can-train complete-line SHELL WORD...`, with the words up to the cursor. Each line of the answer has a word, a tab and
a description of the word.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from can_train.cli.output import print_text
from can_train.cli.train_options import named_task
from can_train.config import resolved
from can_train.config.settings import CHOICES, ClusterSettings, FactorSettings, MonitorSettings, TrainingSettings
from can_train.config.task_settings import TaskSettings, task_names
from can_train.errors import unknown_name
from can_train.factors.policies import POLICIES

_SHELLS: Final = ("bash", "zsh", "fish")  # each has its script in a file beside this one
_PLAIN: Final = re.compile(r"\w[\w@%+=:,./-]*")
"""A value that each shell takes as it is. Names of files and of records may hold anything, and bash inserts an answer
without quotes: `x$(touch y)` would be a command. A value that needs quotes is not offered.
"""


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", metavar="SHELL")],
) -> None:
    """Print the script that completes can-train's commands, flags, values and runs in a shell.

    In bash and zsh: eval "$(can-train completion bash)"

    In fish: can-train completion fish | source
    """
    if shell not in _SHELLS:
        raise unknown_name("shell", shell, _SHELLS)
    print_text(Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8").strip())


def complete_line(words: Sequence[str], commands: Mapping[str, str], load: Callable[[str, Sequence[str]], Any]) -> None:
    """Prints the words that complete the word at the cursor.

    Args:
        words: The shell, then the words behind the program's name up to the cursor; the last word may be empty or
            unfinished. Bash splits words at `=` and `:`, so it passes the whole line instead.
        commands: A description of each command, by name.
        load: Returns the parser of a command, from its name and the words that follow.
    """
    shell, *typed = words or ("",)
    if shell == "bash":
        typed = _words(typed[0])[1:]
    typed = typed or [""]
    word = typed[-1]
    for answer, text in _answers(typed, commands, load):
        # Bash replaces only the part after the last `=` or `:` of the word.
        shown = answer[max(word.rfind("="), word.rfind(":")) + 1 :] if shell == "bash" else answer
        print_text(shown if shell == "bash" or not text else f"{shown}\t{text}")


def _words(line: str) -> list[str]:
    """Splits a line as a shell does; the last word may have an open quote."""
    for closing in ("", "'", '"'):
        with suppress(ValueError):
            words = shlex.split(line + closing)
            return [*words, ""] if line[-1:].isspace() and not closing else words
    return [""]


def _answers(
    typed: Sequence[str], commands: Mapping[str, str], load: Callable[[str, Sequence[str]], Any]
) -> Iterable[tuple[str, str]]:
    """Returns the words that complete the line, each with a description; none where the shell completes files."""
    *before, word = typed
    if not before and not word.startswith("-"):
        return [(name, text) for name, text in commands.items() if name.startswith(word)]
    name = before[0] if before and not before[0].startswith("-") else "train"
    if name not in commands and name != "train":
        return []
    parameters = load(name, before if name == "train" else before[1:]).params
    flags = {flag: option for option in parameters for flag in (*option.opts, *option.secondary_opts)
             if flag.startswith("-")}  # fmt: skip
    flag, equals, value = word.partition("=")
    if equals and flag in flags:
        return _matching(_values(flags[flag], before), f"{flag}=", value)
    if before and (given := flags.get(before[-1])) is not None and not getattr(given, "is_flag", False):
        return _matching(_values(given, before), "", word)
    if word.startswith("-"):
        texts = {flag: " ".join((parameter.help or "").split()) for flag, parameter in flags.items()}
        return [(flag, text) for flag, text in texts.items() if flag.startswith(word)]
    argument = next((parameter for parameter in parameters if parameter.param_type_name == "argument"), None)
    return _matching(_values(argument, before), "", word) if argument is not None else []


def _matching(values: Iterable[str], start: str, typed: str) -> list[tuple[str, str]]:
    """Returns the values that begin with the typed text, else the values that contain it. A comma ends a value."""
    done, comma, word = typed.rpartition(",")
    plain = [value for value in values if _PLAIN.fullmatch(value)]
    matching = [value for value in plain if value.startswith(word)] or [value for value in plain if word in value]
    return [(f"{start}{done}{comma}{value}", "") for value in matching]


def _values(parameter: Any, before: Sequence[str]) -> Iterable[str]:
    """Returns the values of a flag or an argument; none if it is a number, a file or free text."""
    name = parameter.name.rstrip("_")
    if "RUN" in (parameter.metavar or "") or name in ("after", "start_from"):
        return _run_ids(before)
    if "|" in (parameter.metavar or ""):
        return str(parameter.metavar).split("|")
    if name in _OF_TASK:
        return _OF_TASK[name](*named_task(before))
    return CHOICES[name] if name in CHOICES else _SOURCES.get(name, tuple)()


def _run_ids(before: Sequence[str]) -> list[str]:
    from can_train.cli.run_locator import RunLocator
    from can_train.runs.status import LAST

    runs = RunLocator.of_words(before).runs()
    return [*([LAST] if runs else []), *(known_run.run_id for known_run in runs)]


def _keys() -> set[str]:
    from can_train.factors.observations import read_records

    return {run.key for run in read_records(resolved.state_folder()).finished}


def _cards() -> list[str]:
    from can_train.memory.catalogue import AMD_CARDS, CARDS, SLICES

    return [card.key for card in (*CARDS, *SLICES, *AMD_CARDS)]


def _presets(group: str, name: str, task: TaskSettings) -> Iterable[str]:
    return resolved.presets(group, resolved.preset_folders(task.derived_from or name, task.configs))


def _settings(_: str, task: TaskSettings) -> Iterable[str]:
    """Returns the settings that `--set` takes, each with its equals sign."""
    groups: list[tuple[str, Any]] = [("training", TrainingSettings), ("factor", FactorSettings),
                                     ("monitor", MonitorSettings), ("cluster", ClusterSettings),
                                     ("task", task.settings), ("dataset", task.dataset)]  # fmt: skip
    groups += [("mode", mode) for mode in task.modes.values()]
    groups += [("model", model.settings) for model in task.models.values()]
    return dict.fromkeys(name for group, settings in groups for name in _fields(group, settings))


def _fields(group: str, settings: Any) -> Iterator[str]:
    for field, kind in get_type_hints(settings).items():
        if is_dataclass(kind):
            yield from _fields(f"{group}.{field}", kind)
        else:
            yield f"{group}.{field}="


# Where the values of a parameter come from, by its name.
_SOURCES: Final[Mapping[str, Callable[[], Iterable[str]]]] = {
    "task": task_names,
    "memory": lambda: resolved.presets("memory"),
    "cluster": lambda: resolved.presets("cluster"),
    "device": lambda: ("auto", "cpu", "cuda", "sim:"),
    "target_gpu": _cards,
    "tracker": lambda: (*resolved.TRACKERS, resolved.NO_TRACKER),
    "key": _keys,
    "replay": lambda: POLICIES,
    "shell": lambda: _SHELLS,
}

# Where the values of a parameter come from if the task of the line decides them, by name and description of the task.
_OF_TASK: Final[Mapping[str, Callable[[str, TaskSettings], Iterable[str]]]] = {
    "model": lambda _, task: filter(None, task.models),
    "mode": lambda _, task: filter(None, task.modes),
    "size": lambda _, task: sorted({size for model in task.models.values() for size in model.sizes}),
    "dataset": partial(_presets, "dataset"),
    "preset": partial(_presets, "pipeline"),
    "set": _settings,
}
