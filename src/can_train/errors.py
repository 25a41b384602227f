"""The errors a user can cause. Each states a rule, the value that broke it, and a remedy; the command line prints them
without a traceback and exits with `exit_code`.

CanTrainError                                     2
├── ConfigError
│   ├── SettingError
│   └── ArgumentError (also a ValueError)
├── DataError
│   └── MissingDataError
├── CheckpointError
├── RunError
│   ├── EarlierAttemptError
│   └── UntrustedCodeError
├── FailedRunError                                3, as any other error once a run has begun to train
│   ├── DivergedError
│   └── RankGoneError
├── StateError
├── DeviceError
├── TaskError
├── GrewError                                     4
└── DoesNotFitError                               5 of a plan (`--dry-run`)
"""

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

# Least similarity (0 to 1) of a likely misspelling; difflib's 0.6 misses swapped short words.
_SUGGESTION_CUTOFF: Final = 0.5
_SHOWN: Final = 80  # Characters of a wrong value that a message shows
_MAX_SUGGESTIONS: Final = 5  # names that a message lists: more of them nobody reads

# Rule and remedy for the system's errors that a user can do something about.
_REMEDIES: Final = {
    (errno.EACCES, errno.EPERM, errno.EROFS): (
        "A file or folder cannot be read or written", "Change its permissions, or choose another place"),
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): (
        "A file cannot be written for lack of space", "Free some space"),
    # A damaged disk; a network file system that has gone, or was mounted anew.
    (errno.EIO, errno.ESTALE): (
        "A file system does not answer as it should", "Check the disk or the connection"),
    (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL): (
        "A path cannot be used", "Check its spelling, or name another path"),
    (errno.EISDIR, errno.ENOTDIR): (
        "A folder is in the place of a file, or a file in the place of a folder", "Move it away"),
}  # fmt: skip
_LONGEST_PATH: Final = 200  # last characters of a path, which a message shows

_SOURCE_POSITION: Final = re.compile(r"\[?[^\s\[\]]*\.(?:cc|cpp|cu|cuh|c|h|hpp):\d+\]?:?|\[enforce fail at \S+\]")
_SENTENCE_END: Final = re.compile(r"\.\s|\.?$", re.MULTILINE)


RUN_FAILED: Final = 3
"""Exit code of a run that began to train and failed."""

GREW: Final = 4
"""Exit code of `can-train diff` where a peak grew by more than `--fail-above`."""

DOES_NOT_FIT: Final = 5
"""Exit code of a plan whose training fits none of its devices."""


COMMAND_VARIABLE: Final = "CAN_TRAIN_COMMAND"
"""Environment variable that `./can-train` sets to its name."""
_COMMAND: Final = re.compile(r"(?<![\w./-])can-train(?= (?:--\w|-h|[a-z]))")
CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that change the display of a terminal: control characters, marks that turn the direction of writing or end
a line, and bytes of a file's name that are no text. Line ends and tabs are not among them.
"""
_UNDECODED: Final = 0xDC00  # Python's code of a byte in a file name that is no text, less the byte


def with_command_name(text: str) -> str:
    """Replaces `can-train` in the command lines of a text by the command of this process: `./can-train resume RUN` in a
    checkout.
    """
    return _COMMAND.sub(lambda _: command_name(), text)


def printable(text: str) -> str:
    """Writes control characters as text: in a name or a line of a log they could change a terminal."""

    def escaped(control: re.Match[str]) -> str:
        code = ord(control[0])
        byte = code - _UNDECODED if _UNDECODED < code <= _UNDECODED + 0xFF else code
        return f"\\x{byte:02x}" if byte <= 0xFF else f"\\u{byte:04x}"

    return CONTROL.sub(escaped, text)


def command_name() -> str:
    """Returns the command that calls can-train: `can-train`, or `./can-train` in a checkout."""
    return os.environ.get(COMMAND_VARIABLE) or "can-train"


class Stopped(SystemExit):
    """The end of a process that a signal stopped.

    Args:
        status: The exit status, 128 + the number of the signal.
        outcome: What was done before the end, in words.

    Attributes:
        is_told: Whether a notice has said so, and how the run goes on.
    """

    is_told = False

    def __init__(self, status: int, outcome: str = "") -> None:
        super().__init__(status)
        self.outcome = outcome


_SIGNAL_STATUSES: Final = frozenset(
    128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
)


def is_stop(error: BaseException) -> bool:
    """Returns whether a signal has ended the process by a `SystemExit`, and not the code of a task."""
    return isinstance(error, SystemExit) and (isinstance(error, Stopped) or error.code in _SIGNAL_STATUSES)


class CanTrainError(Exception):
    """An error that the user can cause and can put right.

    Args:
        rule: The fact, or the rule that was broken, as a sentence without its full stop.
        value: The wrong value, as text; empty if the rule already has it.
        remedy: A line that works, or the next step, as a sentence without its full stop. All errors of this package
            have one (a guard looks); other packages may leave it out.
    """

    exit_code: int = 2  # a wrong command line or configuration; `RUN_FAILED` once training has begun
    in_json: bool = False  # whether JSON that says so has been printed

    def __init__(self, rule: str, *, value: str = "", remedy: str = "") -> None:
        super().__init__(rule, value, remedy)
        self.rule = rule
        self.value = value
        self.remedy = remedy

    def to_plain(self) -> dict[str, Any]:
        """Returns the error as plain values."""
        return {
            "rule": self.rule,
            "value": self.value,
            "remedy": printable(with_command_name(self.remedy)),
            "exit_code": self.exit_code,
        }

    @property
    def in_short(self) -> str:
        """The message as a run's record keeps it."""
        return str(self)

    def __str__(self) -> str:
        value = f": {self.value}" if self.value else ""
        remedy = f"\n{self.remedy}." if self.remedy else ""
        return printable(with_command_name(f"{self.rule}{value}.{remedy}"))


class ConfigError(CanTrainError):
    """An unknown name, a value of the wrong type, or settings that contradict each other."""


class SettingError(ConfigError):
    """A setting that breaks its rule. A settings class cannot know how the value was given: `config.compose`, which
    does, adds the remedy.
    """


class ArgumentError(ConfigError, ValueError):
    """An argument of the Python API that breaks its rule, which says how to call it."""


class DataError(CanTrainError):
    """Data that cannot be read, or that a task cannot use; names the file and the line, or the sample."""


class MissingDataError(DataError):
    """A data set that is not where it was looked for."""


class CheckpointError(CanTrainError):
    """A checkpoint that is damaged, or was made for something else."""


class RunError(CanTrainError):
    """An unknown run, or a run in a state that forbids the command."""


class EarlierAttemptError(RunError):
    """A run whose job was started again is still trained by an earlier attempt's process."""


class UntrustedCodeError(RunError):
    """A run whose code another user may have written, and which the user has not asked for.

    Args:
        reason: The file, and who may change it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__("The code that this run names is not known to be yours, and was not run", value=reason,
                         remedy="Read the code first; --trust-code runs it")  # fmt: skip

    def with_line(self, line: str) -> "UntrustedCodeError":
        """Returns the error with the command line that runs the code."""
        error = UntrustedCodeError(self.value)
        # The line to paste stands alone, without a full stop.
        error.remedy = f"This line runs it:\n  {line}\nRead the code first"
        return error


class FailedRunError(CanTrainError):
    """A run that began to train and failed."""

    exit_code = RUN_FAILED


class DivergedError(FailedRunError):
    """A loss is no longer finite, and would not be if the run went on: it repeats the same steps. `lower_lr` is a
    learning rate to train anew with.
    """

    def __init__(self, rule: str, *, value: str = "", remedy: str, lower_lr: float) -> None:
        super().__init__(rule, value=value, remedy=remedy)
        self.lower_lr = lower_lr


class RankGoneError(FailedRunError):
    """Another process of the run ended without reporting why."""


class StateError(CanTrainError):
    """The state folder cannot be read or written."""


class DeviceError(CanTrainError):
    """A device that does not exist or cannot be used."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryDetails:
    """The facts of an out-of-memory that decide whether, and where, to try again."""

    one_sample: bool = False  # whether a single sample does not fit even without other processes
    should_fit: bool = False  # whether it should fit: all attempts failed, or none was possible
    of_host: bool = False  # whether it is the host's memory, not a GPU's
    in_evaluation: bool = False  # whether it was evaluated: then the parts of a training step explain nothing
    need_bytes: int | None = None  # None where that is unknown
    capacity_bytes: int | None = None  # memory of the device for one process; None: unknown
    foreign_bytes: int = 0  # memory of the device that other processes held
    held_bytes: int = 0  # memory that something holds from step to step, and no plan counts
    cards: str = ""  # common GPUs that would hold it, in words; empty where that would not help


_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OWN: Final = f"{Path(__file__).resolve().parent}{os.sep}"  # of can-train
_PYTHON: Final = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")


def _lines_of_task(stack: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Returns the lines of a traceback that are a task's own, without those of can-train, of Python's library and of
    libraries that the task calls. If no line is the task's, the last line.
    """
    libraries = [folder for folder in _INSTALLED if folder not in _OWN] + [*_PYTHON]
    lines = [line for line in stack if not line.filename.startswith(_OWN)]
    # A task may be an installed package itself.
    package = _package_of(lines[0].filename) if lines else ""
    mine = [line for line in lines if (package and package in line.filename)
            or not any(folder in line.filename for folder in libraries)]  # fmt: skip
    return mine or lines[-1:]


def _package_of(path: str) -> str:
    """Returns the folder of the installed package of a file; empty where it is not installed, or is a package that
    can-train calls itself, which is no task.
    """
    for folder in _INSTALLED:
        before, found, rest = path.partition(folder)
        name = rest.partition(os.sep)[0]
        if found and name not in ("torch", "numpy"):
            return f"{before}{found}{name}"
    return ""


class TaskError(CanTrainError):
    """An error in the code of a task.

    Args:
        rule: The call that failed, as a sentence.
        error: The exception of its code.
    """

    def __init__(self, rule: str, error: BaseException) -> None:
        message = str(error).rstrip(".")
        super().__init__(rule, value=f"{type(error).__name__}: {message}" if message else type(error).__name__,
                         remedy="")  # fmt: skip
        frames = traceback.TracebackException.from_exception(error)
        frames.stack[:] = _lines_of_task(frames.stack)
        is_told = frames.stack and f"{os.sep}torch{os.sep}" not in frames.stack[-1].filename
        self.traceback = "".join(frames.format(chain=False)).rstrip() if is_told else ""

    @property
    def in_short(self) -> str:
        """The message without the traceback, in one line."""
        return " ".join(super().__str__().split())

    def to_plain(self) -> dict[str, Any]:
        """Returns the error as plain values, with the traceback of the task's own lines."""
        return {**super().to_plain(), "traceback": self.traceback}

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.in_short, self.traceback)))


class GrewError(CanTrainError):
    """A predicted peak grew by more than is allowed."""

    exit_code = GREW


class DoesNotFitError(CanTrainError):
    """A batch, model or sample needs more memory than the device has; `details` has the facts.

    Attributes:
        parts: The largest parts of the step that did not fit, as lines; empty where they are not known.
    """

    parts: Sequence[str] = ()

    def __init__(self, rule: str, *, value: str = "", remedy: str, details: OutOfMemoryDetails | None = None) -> None:
        super().__init__(rule, value=value, remedy=remedy)
        self.details = details or OutOfMemoryDetails()

    def to_plain(self) -> dict[str, Any]:
        """Returns the error as plain values."""
        return {**super().to_plain(), "parts": list(self.parts)} if self.parts else super().to_plain()

    @property
    def in_short(self) -> str:
        """The message without the parts."""
        return super().__str__()

    def __str__(self) -> str:
        return printable("\n".join([super().__str__(), *self.parts]))


def without_positions(text: str) -> str:
    """Leaves out of an error of other people's code where in their C++ sources it was raised."""
    # Some libraries begin a message with a pictogram. A shell begins it with a path.
    return re.sub(r"^[^\w'\"(\[/~.]+", "", _SOURCE_POSITION.sub("", text)).strip()


def first_sentence(error: BaseException) -> str:
    """Returns the first sentence of an error of other people's code (see `without_positions`); the error's type where
    it says nothing.
    """
    text = without_positions(str(error))
    return text[: match.start()] if (match := _SENTENCE_END.search(text)) and match.start() else type(error).__name__


def from_os_error(error: OSError) -> StateError | None:
    """Makes the error to show for a system error; None if a user can do nothing about it."""
    # Without a path, an invalid argument is one that the program passed.
    texts = next((pair for numbers, pair in _REMEDIES.items() if error.errno in numbers), None)
    if texts is None or (error.errno == errno.EINVAL and not error.filename):
        return None
    rule, remedy = texts
    # A failed rename has two names; the user knows the second.
    path = str(error.filename2 or error.filename or "")[-_LONGEST_PATH:]
    return StateError(rule, value=": ".join(filter(None, (path, error.strerror))), remedy=remedy)


def remedy_for(error: Exception, otherwise: str) -> str:
    """Returns the remedy for a full disk or a failing file system, which is the same wherever it is noticed; of another
    error, `otherwise`.
    """
    number = error.errno if isinstance(error, OSError) else None
    same = (remedy for numbers, (_, remedy) in _REMEDIES.items() if {errno.ENOSPC, errno.EIO} & {*numbers}
            and number in numbers)  # fmt: skip
    return next(same, otherwise)


def from_import_error(error: ImportError | OSError) -> ConfigError | None:
    """Makes the error to show where PyTorch cannot be imported; None: the import of another package failed."""
    is_missing = isinstance(error, ImportError) and error.name == "torch"
    places = [Path(frame.filename).parts[-2:] for frame in traceback.extract_tb(error.__traceback__)]
    # Python takes a package whose import failed out of its modules again.
    if "torch" in sys.modules or not (is_missing or ("torch", "__init__.py") in places):
        return None
    return ConfigError("PyTorch cannot be imported", value=" ".join(str(error).split()),
                       remedy="Install a PyTorch that works here, or name a Python that has one: "
                              "export CAN_TRAIN_PYTHON=/path/to/python")  # fmt: skip


# Files of PyTorch, the functions that run a part of a training step, and the name of that part.
_STEP_PARTS: Final = (
    (f"{os.sep}torch{os.sep}autograd{os.sep}", "_engine_run_backward", "The backward pass failed"),
    (f"{os.sep}torch{os.sep}optim{os.sep}", "", "The step of the optimizer failed"),
)


@contextmanager
def errors_of_steps() -> Iterator[None]:
    """Turns an error of a task's own method, and an error that PyTorch raises of its model, or of a setting, in a
    backward pass or an optimizer's step, into a `TaskError`; errors of can-train's own code stay.
    """
    try:
        yield
    except CanTrainError:
        raise
    except Exception as error:
        # Without this function's own frame.
        frames = traceback.extract_tb(error.__traceback__)[1:]
        is_own = [frame.filename.startswith(_OWN) for frame in frames]
        for folder, function, rule in _STEP_PARTS if not is_own[-1] else ():
            if any(folder in frame.filename and function in frame.name for frame in frames):
                raise TaskError(rule, error) from error
        # The first line below can-train's last one.
        called = frames[len(frames) - is_own[::-1].index(True)] if any(is_own) and not is_own[-1] else None
        libraries = (*_INSTALLED, *_PYTHON)
        if called is not None and not any(folder in called.filename for folder in libraries):
            raise TaskError(f"{called.name} of the task failed", error) from error
        raise


def nearest_first(name: str, valid: Iterable[str]) -> list[str]:
    """Returns the valid names, those most like `name` first, the others after them in alphabetical order."""
    close, rest = _by_likeness(name, valid)
    return close + rest


def near_or_newest(name: str, newest_first: Iterable[str]) -> str:
    """Returns the head of a list of known names and the names: those most like `name`, else the newest ones."""
    names = list(newest_first)
    close, _ = _by_likeness(name, names)
    title = "The nearest names" if close else "The newest"
    # One name a line: two ids of runs are too long for a line.
    return "\n  ".join([f"{title}:", *(close or names)[:_MAX_SUGGESTIONS]])


def _by_likeness(name: str, valid: Iterable[str]) -> tuple[list[str], list[str]]:
    names = sorted(set(valid))
    close = get_close_matches(str(name), names, n=len(names) or 1, cutoff=_SUGGESTION_CUTOFF)
    return close, [each for each in names if each not in close]


def unknown_name(what: str, name: str, valid: Iterable[str], *, more: str = "") -> ConfigError:
    """Returns the error for an unknown name; it lists the nearest valid ones, and ends with `more`."""
    close, rest = _by_likeness(name, valid)
    names = close + rest
    how_many = "Valid, nearest first" if close else "Valid"
    if len(names) > _MAX_SUGGESTIONS:
        how_many = f"Nearest of {len(names)}" if close else f"The first of {len(names)}"
    listed = ", ".join(names[:_MAX_SUGGESTIONS]) or "none so far"
    return ConfigError(f"Unknown {what}", value=repr(name), remedy=f"{how_many}: {listed}{more}")


def check_kinds(what: str, kinds: Any, remedy: str, **arguments: object) -> None:
    """Raises ArgumentError unless each of some arguments of the Python API is of a kind. True and False are no numbers.

    Args:
        what: The kind in words, as the message has it: `a path`.
        kinds: The class, or a tuple of classes.
        remedy: How to give the arguments.
        arguments: The arguments by name.
    """
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ArgumentError(f"{name} is {what}", value=shown(value), remedy=remedy)


def check_flags(**flags: object) -> None:
    """Raises ArgumentError unless each argument of the Python API is True or False."""
    for name, value in flags.items():
        # NumPy, which this module leaves alone, has a class of its own for them.
        if type(value).__name__ not in ("bool", "bool_"):
            raise ArgumentError(
                f"{name} is True or False", value=shown(value), remedy=f"Give {name}=True, or leave it out"
            )


def check_functions(call: str, **functions: object) -> None:
    """Raises ArgumentError unless each argument of the Python API is a function; `call` is an example of one."""
    check_kinds("a function", Callable, f"Give a function: {call}", **functions)


def shown(value: object) -> str:
    """Returns a value as an error shows it: in one line, and cut to some length."""
    return f"{' '.join(repr(value).split()):.{_SHOWN}}"
