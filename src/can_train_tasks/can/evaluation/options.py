"""The rule that flags windows and raises alarms, and the options of `can-train evaluate` for CAN runs."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import typer

from can_train.errors import ConfigError

_LONGEST_HOLD: Final = 1000  # windows of the longest hold: all of them are kept, and compared at each window
_SECONDS: Final = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "ms": 0.001}


class Hold(NamedTuple):
    """An alarm is raised when `needed` of the last `of` windows are flagged."""

    needed: int
    of: int

    def __str__(self) -> str:
        return f"{self.needed}/{self.of}"


def _parse_seconds(text: str) -> float:
    """Reads a time such as 10s, 2min or 90."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text)
    if match is None or match[2] not in _SECONDS:
        raise ConfigError("--calibrate is not a time", value=repr(text), remedy="Write it like --calibrate 10s")
    return float(match[1]) * _SECONDS[match[2]]


def _parse_hold(text: str) -> Hold:
    """Reads `2/3`."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= _LONGEST_HOLD:
        raise ConfigError("--hold is not M/N", value=repr(text),
                          remedy=f"Write it like --hold 2/3, with M ≤ N ≤ {_LONGEST_HOLD}")  # fmt: skip
    return Hold(int(match[1]), int(match[2]))


Threshold = Annotated[
    float | None,
    typer.Option(help="Flag what scores more than this. [what the run chose in validation]", metavar="NUMBER"),
]
Calibrate = Annotated[
    float | None,
    typer.Option(
        "--calibrate",
        help="Take the first seconds for benign and adapt to them; they are not judged: 10s.",
        metavar="TIME",
        parser=_parse_seconds,
    ),
]
AlarmsPerHour = Annotated[
    float | None, typer.Option(help="Choose the threshold for about so many false alarms an hour.", metavar="NUMBER")
]
HoldOption = Annotated[
    Hold | None,
    typer.Option(
        "--hold",
        help="Raise an alarm when M of the last N samples are flagged: 2/3. [detect: 1/1]",
        metavar="M/N",
        parser=_parse_hold,
    ),
]


@dataclass(frozen=True, kw_only=True)
class AlarmRule:
    """The rule that flags windows and raises alarms; an option of None follows the rule of the run's validation.

    Attributes:
        threshold: Windows with higher scores are flagged.
        calibrate_s: Seconds at the beginning of each recording that are taken for benign: the scores are adapted to
            the windows of this time, and these windows are not judged.
        alarms_per_hour: Expected false alarms an hour, which decide the threshold.
        hold: Flagged windows that raise an alarm.

    Raises:
        ConfigError: A value is wrong, or two options choose the threshold.
    """

    threshold: Threshold = None
    calibrate_s: Calibrate = None
    alarms_per_hour: AlarmsPerHour = None
    hold: HoldOption = None

    def __post_init__(self) -> None:
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ConfigError("--threshold is not a finite number", value=str(self.threshold),
                              remedy="Write it as --threshold 0.5")  # fmt: skip
        for flag, value in {"calibrate": self.calibrate_s, "alarms-per-hour": self.alarms_per_hour}.items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{flag} is not more than 0", value=f"{value:g}", remedy="Give a positive number")
            if value is not None and self.threshold is not None:
                raise ConfigError(f"--threshold and --{flag} both choose the threshold", remedy="Leave one out")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(AlarmRule):
    """How a finished run is judged.

    Attributes:
        flagged_only: Whether the alarms are listed in place of the tables, and the file of scores has flagged windows
            alone.
        explain: Whether the alarms are listed, and the file of scores has the reasons of each window.
        channel: The interface whose frames are read; None: all interfaces, as one bus.
    """

    flagged_only: Annotated[
        bool, typer.Option("--flagged-only", help="List what was flagged, and why; --scores writes only that.")
    ] = False
    explain: Annotated[
        bool, typer.Option("--explain", help="List alarms with what drove them; with --scores FILE, of each sample.")
    ] = False
    channel: Annotated[
        str | None,
        typer.Option(help="Read one interface of logs that have several: can0. [all, as one bus]", metavar="NAME"),
    ] = None
