"""Typer commands whose parameters are data: the fields of a dataclass, or a table of options."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from typer.core import TyperCommand

from can_train.config.overrides import canonical_name
from can_train.errors import ConfigError, nearest_first

_Request = TypeVar("_Request")

_ON = ("true", "yes", "on", "1")
_OFF = ("false", "no", "off", "0")
_SUGGESTIONS = 5


def make_command(parameters: Sequence[inspect.Parameter], act: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    """Makes a command for Typer.

    Args:
        parameters: Its parameters; keyword-only, annotated for Typer.
        act: Gets the values by parameter name. Its docstring is the command's help.
    """

    def command(**flags: Any) -> None:
        act(flags)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = act.__doc__
    return command


def command_of(request: type[_Request], act: Callable[[_Request], None]) -> Callable[..., None]:
    """Makes a command whose parameters are the fields of a dataclass, annotated for Typer; `act` gets an instance."""

    def act_on(flags: dict[str, Any]) -> None:
        act(request(**flags))

    act_on.__doc__ = act.__doc__
    hints = get_type_hints(request, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(request)  # type: ignore[arg-type]
    ]
    return make_command(parameters, act_on)


def flag_name(name: str) -> str:
    """Returns the canonical name of a flag without its hyphens: `max_epochs` is `epochs`, `dry_run` is `dry-run`."""
    return canonical_name(name).replace("_", "-")


class Command(TyperCommand):
    """A command whose flags may be spelt with `_` or `-`, or as an alias."""

    def __init__(self, name: str | None, *, context_settings: dict[str, Any] | None = None, **options: Any) -> None:
        settings = {**(context_settings or {}), "token_normalize_func": flag_name}
        super().__init__(name, context_settings=settings, **options)

    # Typer's own contexts are of a private class; the public `typer.Context` is a subclass of it.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments after checking their flags."""
        return super().parse_args(ctx, self._checked(args))

    def _checked(self, arguments: Sequence[str]) -> list[str]:
        """Checks the spelling of flags, and writes `--regrow=false` as `--no-regrow`.

        Typer cannot do either: its parser forgets how a flag was spelt, so the last of two values would win silently,
        and a switch of it takes no value, where presets and `--set` write true or false.
        """
        switches = {one.opts[0]: one.secondary_opts[0] for one in self.params if one.secondary_opts}
        known = {name for one in self.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
        checked: list[str] = []
        first: dict[str, tuple[str, str]] = {}
        for position, argument in enumerate(arguments):
            if argument == "--":
                return [*checked, *arguments[position:]]
            if not argument.startswith("--"):
                checked.append(argument)
                continue
            spelling, equals, value = argument.partition("=")
            flag = f"--{flag_name(spelling.removeprefix('--'))}"
            if flag not in known:
                nearest = ", ".join(nearest_first(flag, known)[:_SUGGESTIONS])
                raise ConfigError("Unknown flag", value=spelling, remedy=f"Nearest: {nearest}")
            given = value if equals else next(iter(arguments[position + 1 : position + 2]), "")
            old_spelling, old = first.setdefault(flag, (spelling, given))
            if old_spelling != spelling and old != given:
                both = f"{old_spelling} {old} and {spelling} {given}"
                raise ConfigError(f"{flag} has two different values", value=both, remedy="Give it once")
            checked.append(_switch(flag, switches[flag], value) if equals and flag in switches else argument)
        return checked


def _switch(on: str, off: str, value: str) -> str:
    if value.lower() not in (*_ON, *_OFF):
        raise ConfigError(f"{on} is on or off", value=value, remedy=f"Give {on}, or {off}")
    return on if value.lower() in _ON else off
