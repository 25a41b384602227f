"""The errors a user can cause. Each states a rule, the value that broke it, and a remedy; the command line prints them
without a traceback and exits with `exit_code`.

CanTrainError
├── ConfigError
│   └── ArgumentError (also a ValueError)
├── DataError
│   └── MissingDataError
├── CheckpointError
├── RunError
├── StateError
├── DeviceError
└── DoesNotFitError
"""

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

# Similarity (0 to 1) from which a name counts as a likely misspelling; difflib's 0.6 misses swapped short words.
_SUGGESTION_CUTOFF: Final = 0.5

_PERMISSION: Final = ("A file or folder cannot be read or written", "Change its permissions, or choose another place")

_NO_SPACE: Final = (
    "A file cannot be written for lack of space",
    "Free some space; a run goes on with can-train resume RUN",
)

# Rule and remedy for the system's errors that a user can do something about.
_REMEDIES: Final = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: _PERMISSION,
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: _NO_SPACE,
}


class CanTrainError(Exception):
    """An error that the user can cause and can put right.

    Args:
        rule: The rule that was broken, as a sentence without its full stop.
        value: What was found instead, as text; empty where the rule already says it.
        remedy: What to do about it, as a sentence without its full stop.
    """

    exit_code = 2

    def __init__(self, rule: str, *, value: str = "", remedy: str = "") -> None:
        super().__init__(rule, value, remedy)
        self.rule = rule
        self.value = value
        self.remedy = remedy

    def __str__(self) -> str:
        found = f": {self.value}" if self.value else ""
        remedy = f"\n{self.remedy}." if self.remedy else ""
        return f"{self.rule}{found}.{remedy}"


class ConfigError(CanTrainError):
    """An unknown name, a value of the wrong type, or settings that contradict each other."""


class ArgumentError(ConfigError, ValueError):
    """An argument of the Python API that breaks its rule."""


class DataError(CanTrainError):
    """A log that cannot be read as CAN frames; names file and line."""


class MissingDataError(DataError):
    """A data set that is not where it was looked for."""


class CheckpointError(CanTrainError):
    """A checkpoint that is damaged, or was made for something else."""


class RunError(CanTrainError):
    """An unknown run, or a run in a state that forbids the command."""


class StateError(CanTrainError):
    """The state folder cannot be read or written."""


class DeviceError(CanTrainError):
    """A device that does not exist or cannot be used."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryDetails:
    """What is known of an out-of-memory, for the decision whether, and where, to try again.

    Attributes:
        one_sample: Whether what cannot be split further does not fit even without other processes on the device.
        should_fit: Whether it should fit: all attempts failed, or none was possible.
        of_host: Whether it is the host's memory, not a GPU's.
        need_bytes: What is needed; None where that is unknown.
        capacity_bytes: What the device has for one process; None where that is unknown.
        foreign_bytes: What other processes held of the device.
        cards: Common GPUs that would hold it, in words; empty where that would not help.
    """

    one_sample: bool = False
    should_fit: bool = False
    of_host: bool = False
    need_bytes: int | None = None
    capacity_bytes: int | None = None
    foreign_bytes: int = 0
    cards: str = ""


class DoesNotFitError(CanTrainError):
    """What was asked for needs more memory than the device has; `details` says what is known of it."""

    def __init__(
        self, rule: str, *, value: str = "", remedy: str = "", details: OutOfMemoryDetails | None = None
    ) -> None:
        super().__init__(rule, value=value, remedy=remedy)
        self.details = details or OutOfMemoryDetails()


def of_system(error: OSError) -> StateError | None:
    """Returns the error to show for a system error; None where a user can do nothing about it."""
    if error.errno not in _REMEDIES:
        return None
    rule, remedy = _REMEDIES[error.errno]
    return StateError(rule, value=": ".join(filter(None, (str(error.filename or ""), error.strerror))), remedy=remedy)


def nearest_first(name: str, valid: Iterable[str]) -> list[str]:
    """Returns the valid names, those most like `name` first, the others after them in alphabetical order."""
    names = sorted(set(valid))
    close = get_close_matches(name, names, n=len(names) or 1, cutoff=_SUGGESTION_CUTOFF)
    return close + [other for other in names if other not in close]


def unknown_name(what: str, name: str, valid: Iterable[str]) -> ConfigError:
    """Returns the error for an unknown name; it lists the valid ones, nearest first."""
    names = nearest_first(name, valid)
    return ConfigError(f"Unknown {what}", value=repr(name), remedy=f"Valid, nearest first: {', '.join(names)}")
