"""The options that say when a finished model raises alarms, which evaluating and live detection have in common."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Final

import typer

from can_train.errors import ConfigError

if TYPE_CHECKING:
    from can_train.task import AlarmRule

_LONGEST_HOLD: Final = 1000  # of the last samples: as many are kept, and compared at each one
_SECONDS: Final = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "ms": 0.001}

Threshold = Annotated[
    float | None,
    typer.Option(help="Flag what scores more than this. [what the run chose in validation]", metavar="NUMBER"),
]
Calibrate = Annotated[
    str | None,
    typer.Option(help="Take the first seconds for benign and adapt to them; they are not judged: 10s.", metavar="TIME"),
]
AlarmsPerHour = Annotated[
    float | None,
    typer.Option(help="Choose the threshold for about so many false alarms an hour.", metavar="NUMBER"),
]
HoldOption = Annotated[
    str | None,
    typer.Option("--hold", help="Raise an alarm when M of the last N samples are flagged: 2/3.", metavar="M/N"),
]


def alarm_rule(
    *, threshold: float | None, calibrate: str | None, alarms_per_hour: float | None, hold: str | None
) -> AlarmRule:
    """Checks the options and reads them.

    Raises:
        ConfigError: A value is wrong, or two of them choose the threshold.
    """
    if threshold is not None and not math.isfinite(threshold):
        raise ConfigError("--threshold is a finite number", value=str(threshold))
    calibrate_s = None if calibrate is None else _parse_seconds("calibrate", calibrate)
    for flag, value in {"calibrate": calibrate_s, "alarms-per-hour": alarms_per_hour}.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{flag} is more than 0", value=f"{value:g}", remedy="Give a positive number")
        if value is not None and threshold is not None:
            raise ConfigError(f"--threshold and --{flag} both choose the threshold", remedy="Give one of them")
    held = None if hold is None else _parse_hold(hold)
    # Torch, which a line that is wrong does not wait for.
    from can_train.task import AlarmRule

    return AlarmRule(threshold=threshold, calibrate_s=calibrate_s, alarms_per_hour=alarms_per_hour, hold=held)


def _parse_seconds(flag: str, text: str) -> float:
    """Reads a time such as 10s, 2min or 90."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text)
    if found is None or found[2] not in _SECONDS:
        raise ConfigError(f"--{flag} is a time", value=repr(text), remedy=f"Write it like --{flag} 10s")
    return float(found[1]) * _SECONDS[found[2]]


def _parse_hold(text: str) -> tuple[int, int]:
    """Reads `2/3`."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= _LONGEST_HOLD:
        raise ConfigError("--hold is M/N: an alarm is raised when M of the last N samples are flagged",
                          value=repr(text), remedy=f"Write it like --hold 2/3, with M ≤ N ≤ {_LONGEST_HOLD}"
                          )  # fmt: skip
    return int(found[1]), int(found[2])
