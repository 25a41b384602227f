"""The flags of a training line: one for each scalar training setting, with the docstring under its field as help, and
the spellings that lead to them.
"""

import ast
import inspect
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from can_train.config import training
from can_train.config.aliases import ALIASES, canonical
from can_train.config.task_settings import load_task_settings, task_names
from can_train.config.training import TrainingSettings
from can_train.errors import ConfigError

_METAVARS: Final = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT"}
"""What help shows for a value. It is passed on as text: composition converts it, and names value and setting if it
cannot."""


_ON: Final = frozenset(("true", "yes", "on", "1"))
_OFF: Final = frozenset(("false", "no", "off", "0"))


def training_parameters() -> list[inspect.Parameter]:
    """Makes a Typer parameter of every scalar field of `TrainingSettings`; absent flags are None."""
    texts = field_texts(Path(training.__file__), "TrainingSettings")
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_flag(_type_name(field.type), f"{texts[field.name]} [{field.default}]"),
        )
        for field in fields(TrainingSettings)
    ]


def _flag(type_name: str, help_text: str) -> Any:
    if type_name == "bool":
        return Annotated[bool | None, typer.Option(help=help_text, show_default=False)]
    return Annotated[str | None, typer.Option(help=help_text, metavar=_METAVARS[type_name], show_default=False)]


def role_texts() -> dict[str, str]:
    """Lists the roles that finished runs have for the tasks' modes, each with its flag's help."""
    needed = [one for task in task_names() for one in load_task_settings(task).prerequisites]
    return {one.role: f"Run that is {one.what}, by name or folder. [the newest that fits]" for one in needed}


def field_texts(module: Path, class_name: str) -> dict[str, str]:
    """Reads the docstrings under a class's fields, which Python itself does not keep."""
    tree = ast.parse(module.read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    texts = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


def canonical_arguments(arguments: Sequence[str]) -> list[str]:
    """Rewrites flags to their canonical spelling: `_` becomes `-`, an alias becomes its setting.

    Raises:
        ConfigError: Two spellings of one setting are given with different values, or a switch with neither yes nor no.
    """
    rewritten: list[str] = []
    seen: dict[str, tuple[str, str]] = {}
    for position, argument in enumerate(arguments):
        if argument == "--":
            return rewritten + list(arguments[position:])
        if not argument.startswith("--"):
            rewritten.append(argument)
            continue
        spelling, equals, value = argument.partition("=")
        flag = _canonical_flag(spelling)
        rewritten.append(_switched(flag, value) if equals and _is_switch(flag) else f"{flag}{equals}{value}")
        given = value if equals else next(iter(arguments[position + 1 : position + 2]), "")
        earlier, earlier_value = seen.setdefault(flag, (spelling, given))
        if earlier != spelling and earlier_value != given:
            given_twice = f"{earlier} {earlier_value} and {spelling} {given}"
            raise ConfigError(f"{flag} has two different values", value=given_twice, remedy="Give it once")
    return rewritten


def _is_switch(flag: str) -> bool:
    name = flag.removeprefix("--").replace("-", "_")
    return any(field.name == name and _type_name(field.type) == "bool" for field in fields(TrainingSettings))


def _switched(flag: str, value: str) -> str:
    """Takes the values that a preset has for a switch: the option's table writes it as true or false."""
    if value.lower() in _ON:
        return flag
    if value.lower() in _OFF:
        return flag.replace("--", "--no-", 1)
    raise ConfigError(f"{flag} is on or off", value=value, remedy=f"Give {flag}, or {flag.replace('--', '--no-', 1)}")


def _canonical_flag(spelling: str) -> str:
    name = spelling.removeprefix("--")
    known = canonical(name) if name.replace("-", "_") in ALIASES else name
    return "--" + known.replace("_", "-")


def _type_name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else annotation.__name__
