"""Commands of many options: the options are the fields of a dataclass, and the command is made of it."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

_Request = TypeVar("_Request")


def command_of(request: type[_Request], act: Callable[[_Request], None]) -> Callable[..., None]:
    """Makes a command for Typer.

    Args:
        request: A dataclass whose fields are annotated as parameters of a command would be.
        act: Does what is asked for; its docstring is the command's help.
    """

    def command(**given: Any) -> None:
        act(request(**given))

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
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = act.__doc__
    return command
