"""The errors a user can cause. Each states a rule, the value that broke it, and a remedy; the command line prints them
without a traceback and exits with `exit_code`.

CanTrainError
├── ConfigError         an unknown name, a value of the wrong type, settings that contradict each other
│   └── ArgumentError       a number given to the Python API that breaks its rule (also a ValueError)
├── DataError           a log that cannot be read as CAN frames (names file and line)
│   └── MissingDataError    a data set that is not where it was looked for
├── CheckpointError     a checkpoint that is damaged, or made for something else
├── RunError            an unknown run, or a run in a state that forbids the command
├── StateError          the state folder cannot be read or written
├── DeviceError         a device that does not exist or cannot be used
└── DoesNotFitError     what was asked for needs more memory than the device has
"""

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

_SUGGESTION_CUTOFF: Final = 0.5
"""Similarity (0 to 1) from which a name counts as a likely misspelling; difflib's 0.6 misses swapped short words."""


_PERMISSION: Final = ("A file or folder must be open to who uses it", "Mend its permissions, or name another place")


_ROOM: Final = ("A disk must have room for what is written", "Make room; a run then goes on: can-train resume RUN")


_MENDABLE: Final = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: _PERMISSION,
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: _ROOM,
}
"""What the system refuses and the user can mend, by its number: rule and remedy."""


class CanTrainError(Exception):
    """An error that the user can cause and can mend.

    Args:
        rule: What must hold, as a sentence without its full stop.
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
    """A number given to the Python API that breaks its rule."""


class DataError(CanTrainError):
    """A log that cannot be read as CAN frames."""


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
    """What is known of memory that ran out, for who decides whether to try again, and where.

    Attributes:
        one_sample: Whether what cannot be split further does not fit even where nobody else uses the device.
        should_fit: Whether by all that is known it fits: tries ran out, or nothing could be tried again.
        of_host: Whether it is the host's memory, not a GPU's.
        need_bytes: What is needed; None: unknown.
        capacity_bytes: What the device has for one process; None: unknown.
        foreign_bytes: What others held of the device.
        cards: Common GPUs that would hold it, in words; empty where that is not the question.
    """

    one_sample: bool = False
    should_fit: bool = False
    of_host: bool = False
    need_bytes: int | None = None
    capacity_bytes: int | None = None
    foreign_bytes: int = 0
    cards: str = ""


class DoesNotFitError(CanTrainError):
    """What was asked for needs more memory than the device has.

    Args:
        rule: As for every error.
        value: Likewise.
        remedy: Likewise.
        details: What is known of it; None: nothing.
    """

    def __init__(
        self, rule: str, *, value: str = "", remedy: str = "", details: OutOfMemoryDetails | None = None
    ) -> None:
        super().__init__(rule, value=value, remedy=remedy)
        self.details = details or OutOfMemoryDetails()


def of_system(error: OSError) -> StateError | None:
    """Makes the error for a file that the system refuses; None where the user cannot mend what the system says."""
    if error.errno not in _MENDABLE:
        return None
    rule, remedy = _MENDABLE[error.errno]
    return StateError(rule, value=": ".join(filter(None, (str(error.filename or ""), error.strerror))), remedy=remedy)


def nearest_first(name: str, valid: Iterable[str]) -> list[str]:
    """Orders the valid names with those most like `name` first, the others in alphabetical order after them."""
    names = sorted(set(valid))
    close = get_close_matches(name, names, n=len(names) or 1, cutoff=_SUGGESTION_CUTOFF)
    return close + [other for other in names if other not in close]


def unknown_name(what: str, name: str, valid: Iterable[str]) -> ConfigError:
    """Makes the error for a name that nobody knows: it lists the valid ones, nearest first."""
    names = nearest_first(name, valid)
    return ConfigError(f"Unknown {what}", value=repr(name), remedy=f"Valid, nearest first: {', '.join(names)}")
