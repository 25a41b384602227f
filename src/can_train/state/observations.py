"""What one attempt of a run taught, as one immutable JSON file: written when the attempt begins (*started*) and when it
ends, never rewritten by anybody, so that there is nothing to lock and nothing to lose. What observations mean for the
next run is the factor store's matter.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast, get_args

from can_train.errors import StateError
from can_train.state.atomic import write_json_atomic

SCHEMA: Final = 1
"""Version of the files' shape; raised when a field changes its meaning, not when one with a default is added."""

_FOLDER: Final = "observations"
_FINISHED_SUFFIX: Final = ".json"
_STARTED_SUFFIX: Final = ".started.json"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]+")
"""What a run's id may hold and a portable file name may not."""

Outcome = Literal["ok", "rescued", "oom", "interrupted", "error"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of an attempt."""

    key: str
    """Kind of device, one name for all cards alike: `v100-16gb`."""
    name: str
    """Name as the driver tells it."""
    total_bytes: int
    """Total memory."""
    driver: str = ""
    """Version of the driver."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """An attempt that began. Without an observation beside it, it still goes on, or was killed and taught nothing."""

    run_id: str
    """Name of the run."""
    attempt: int
    """1 for the first attempt of the run."""
    key: str
    """Configuration key."""
    device: Device
    """The device."""
    start_time: str
    """When the attempt began (`utc_now`)."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """An attempt that ended."""

    run_id: str
    """Name of the run."""
    attempt: int
    """1 for the first attempt of the run."""
    key: str
    """Configuration key."""
    device: Device
    """The device."""
    start_time: str
    """When the attempt began (`utc_now`)."""
    end_time: str
    """When it ended."""
    outcome: str
    """A name of `Outcome`."""
    size: str = ""
    """The model's size in the key; empty where it has one only."""
    factor: float
    """Safety factor in force, in (0, 1]."""
    factor_reason: str
    """Where the factor came from, in words."""
    capacity_bytes: int
    """Bytes that PyTorch's allocator could use."""
    peak_allocated_bytes: int | None
    """Measured peak; None where the attempt ended before anything was measured."""
    peak_reserved_bytes: int | None = None
    """Measured peak of what the allocator held. Recorded, never learned from."""
    predicted_peak_bytes: int | None = None
    """Peak that the plan predicted."""
    tuned_limit: int | None
    """Largest cost in bytes that fits; None without a search."""
    safe_limit: int | None
    """Largest cost in bytes of a micro-batch that the plan allowed; None without a search."""
    used: float | None
    """Cost of the largest micro-batch run ÷ tuned limit; None without a search."""
    logical_batch: int
    """Samples that one optimizer step saw."""
    largest_micro_batch: int
    """Samples in the largest micro-batch run."""
    binding_limit: str
    """What decided the logical batch."""
    oom_used: float | None = None
    """Cost of the smallest micro-batch that ran out of memory ÷ tuned limit; None where none did."""
    settled_used: float | None = None
    """Cost of the largest micro-batch run after the last out-of-memory ÷ tuned limit; None where none was."""
    settled_peak_bytes: int | None = None
    """Measured peak since then."""
    ooms_rescued: int = 0
    """Times that memory ran out at a cost within the safe limit, and the micro-batch was split."""
    allocator_retries: int = 0
    """Times that the allocator emptied its cache to serve a request."""
    foreign_bytes: int = 0
    """Most memory that other processes took after the capacity was read."""
    torch_version: str = ""
    """Version of torch."""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """Settings that change memory: of model and training, of the allocator, whether compiled."""
    policy: dict[str, Any] = field(default_factory=dict)
    """How the attempt's user wants factors learned: the policy's name, and its options."""

    def __post_init__(self) -> None:
        if self.outcome not in get_args(Outcome):
            raise ValueError(f"outcome {self.outcome!r} is not one of {', '.join(get_args(Outcome))}")
        if self.capacity_bytes < 1:
            raise ValueError(f"capacity_bytes {self.capacity_bytes} is below 1")
        if not 0 < self.factor <= 1:
            raise ValueError(f"factor {self.factor} is not in (0, 1]")
        if self.used is not None and not 0 <= self.used < math.inf:
            raise ValueError(f"used {self.used} is not a share")
        if self.started.tzinfo is None or self.ended.tzinfo is None:
            raise ValueError("start_time and end_time must name their time zone")

    @property
    def started(self) -> datetime:
        """When the attempt began."""
        return datetime.fromisoformat(self.start_time)

    @property
    def ended(self) -> datetime:
        """When it ended."""
        return datetime.fromisoformat(self.end_time)

    @property
    def key_without_size(self) -> str:
        """The key as people shorten it."""
        # From the right: a data set may be named like a size, a mode is not.
        before, _, after = self.key.rpartition(f"_{self.size}_")
        return f"{before}_{after}" if self.size and before else self.key

    @property
    def peak(self) -> float | None:
        """Peak memory ÷ capacity; None where nothing was measured."""
        return None if self.peak_allocated_bytes is None else self.peak_allocated_bytes / self.capacity_bytes

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether memory ran out, rescued or not, at a cost that a search had shown safe, and by this run's doing."""
        failed = self.outcome == "oom" or self.ooms_rescued > 0
        return failed and self.tuned_limit is not None and self.foreign_bytes == 0


@dataclass(frozen=True)
class SetAside:
    """A file that could not be read as an observation. It stays where it is."""

    path: Path
    reason: str


@dataclass(frozen=True)
class ObservationLog:
    """Everything in a state folder.

    Attributes:
        finished: Observations, by the time their attempts began.
        unfinished: Attempts that began and left no observation, by the same.
        set_aside: Files that could not be read.
    """

    finished: list[Observation]
    unfinished: list[Started]
    set_aside: list[SetAside]


def utc_now() -> str:
    """The time, as the files have it: ISO 8601 in UTC, to the microsecond."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def write_started(state: Path, started: Started) -> Path:
    """Writes that an attempt began.

    Raises:
        StateError: The file cannot be written. No reason to stop a training.
    """
    return _write(state, started, _STARTED_SUFFIX)


def write_observation(state: Path, observation: Observation) -> Path:
    """Writes what an attempt taught; once this returns, a crash no longer loses it.

    Raises:
        StateError: The file cannot be written, or is there already. No reason to stop a training.
    """
    return _write(state, observation, _FINISHED_SUFFIX)


def read_observations(state: Path) -> ObservationLog:
    """Reads a state folder; one that does not exist is empty. Writes nothing.

    Raises:
        StateError: The folder cannot be listed.
    """
    try:
        names = sorted(path.name for path in (state / _FOLDER).iterdir())
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise _unusable("read", state, error) from error
    folder = state / _FOLDER
    log = ObservationLog([], [], [])
    finished_names = {name for name in names if name.endswith(_FINISHED_SUFFIX) and not name.endswith(_STARTED_SUFFIX)}
    for name in sorted(finished_names):
        _read_into(log.finished, log.set_aside, folder / name, Observation)
    for name in names:
        if (
            name.endswith(_STARTED_SUFFIX)
            and name.removesuffix(_STARTED_SUFFIX) + _FINISHED_SUFFIX not in finished_names
        ):
            _read_into(log.unfinished, log.set_aside, folder / name, Started)
    log.finished.sort(key=lambda observation: observation.started)
    log.unfinished.sort(key=lambda started: started.start_time)
    return log


_Record = TypeVar("_Record", Observation, Started)


def _write(state: Path, record: Observation | Started, suffix: str) -> Path:
    # Unique without a counter or a lock: two attempts alike in all three parts are the same attempt.
    stamp = re.sub(r"\D", "", record.start_time)[:20]
    path = state / _FOLDER / f"{stamp}-{_UNSAFE.sub('-', record.run_id)[:150]}-{record.attempt}{suffix}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise FileExistsError("an observation of this attempt exists")
        write_json_atomic(path, {"schema": SCHEMA, **asdict(record)})
    except (OSError, ValueError, TypeError) as error:
        raise _unusable("written", path, error) from error
    return path


def _unusable(verb: str, path: Path, error: Exception) -> StateError:
    remedy = "Choose another state folder with --state-dir, or mend this one"
    return StateError(f"The state folder cannot be {verb}", value=f"{path}: {error}", remedy=remedy)


def _read_into(records: list[_Record], set_aside: list[SetAside], path: Path, kind: type[_Record]) -> None:
    try:
        records.append(_parse(path.read_bytes(), kind))
    except (OSError, ValueError, RecursionError) as error:
        set_aside.append(SetAside(path, str(error)))


def _parse(data: bytes, kind: type[_Record]) -> _Record:
    """Turns a file's content into a record.

    Raises:
        ValueError: It is none, or one of a shape that a newer can-train wrote.
    """
    if not data:
        raise ValueError("empty")
    values = json.loads(data)
    if not isinstance(values, dict) or not isinstance(values.get("schema"), int):
        raise ValueError("not an observation of can-train")
    if values["schema"] > SCHEMA:
        raise ValueError(f"written by a newer can-train (schema {values['schema']}, this one knows {SCHEMA})")
    return _build(kind, values)


_Built = TypeVar("_Built", Observation, Started, Device)


def _build(kind: type[_Built], values: Mapping[str, Any]) -> _Built:
    """Makes a record of plain values; values that it has no field for come from a later version and are passed over."""
    arguments: dict[str, Any] = {}
    for name, expected, required in _expected(cast("Any", kind)):
        if name in values:
            value = values[name]
            # Most are what they should be: thousands of files are read at a time.
            arguments[name] = value if type(value) is expected else _checked(name, value, expected)
        elif required:
            raise ValueError(f"{name} is missing")
    return kind(**arguments)


@cache
def _expected(kind: type[Any]) -> tuple[tuple[str, Any, bool], ...]:
    """Each field's name, type, and whether it must be there."""
    return tuple(
        (item.name, item.type, item.default is MISSING and item.default_factory is MISSING) for item in fields(kind)
    )


def _checked(name: str, value: Any, kind: Any) -> Any:
    if kind is Device and isinstance(value, dict):
        return _build(Device, value)
    if kind in (float, float | None) and isinstance(value, int):
        return float(value)
    if not isinstance(value, dict if kind == dict[str, Any] else kind) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.40}")
    return value
