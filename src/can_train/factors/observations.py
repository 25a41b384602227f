"""What one attempt of a run measured, as immutable JSON files: one is written when the attempt begins (`Started`), one
when it ends (`Observation`). Nobody rewrites them, so there is nothing to lock. What they mean for the next run is
decided elsewhere (`can_train.factors.summary`).
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from can_train.io.processes import AttemptStart
from can_train.io.records import (
    DOCUMENT_SUFFIX,
    Count,
    SetAside,
    check_time,
    list_names,
    read_documents,
    time_stamp,
    write_document,
)

_FOLDER: Final = "observations"

_STARTED_SUFFIX: Final = f".started{DOCUMENT_SUFFIX}"

# Characters of a run's id that a portable file name may not have.
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]+")

# Largest file that is taken for an observation; they have a few thousand bytes.
_MOST_BYTES: Final = 2**20

# Share of the capacity that may go without another process: libraries load kernels outside the allocator when they are
# first used.
FOREIGN_SHARE: Final = 0.01

Outcome = Literal["ok", "rescued", "oom", "interrupted", "error"]

Factor = Annotated[float, Meta(gt=0, le=1)]

# Squares of larger shares lose their meaning in the regression.
# A share of the tuned limit; what ran may exceed the limit.
Share = Annotated[float, Meta(ge=0, le=1e6)]


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of an attempt."""

    key: str  # kind of device, one name for all cards alike: v100-16gb
    name: str  # the driver's name for it
    total_bytes: int
    driver: str = ""  # version


@dataclass(frozen=True, kw_only=True)
class Started(AttemptStart):
    """An attempt that began. Without an observation of it, it still runs, or was killed before it could write one."""

    run_id: str
    key: str  # configuration key
    device: Device
    # Narrower than the base class: these come from files.
    attempt: Count
    rank: Count = 0
    pid: Count = 0

    def __post_init__(self) -> None:
        check_time("start_time", self.start_time)

    @property
    def started(self) -> datetime:
        """When the attempt began."""
        return datetime.fromisoformat(self.start_time)

    def is_lost(self, host: str | None = None) -> bool:
        """Whether its process is known to have ended; False where this machine cannot know.

        Args:
            host: Name of this machine; None asks it.
        """
        return self.is_running(host) is False


@dataclass(frozen=True, kw_only=True)
class Observation:
    """An attempt that ended. Costs are in bytes, shares of the capacity or of the tuned limit have no unit."""

    run_id: str
    attempt: Count  # 1 for the first attempt of the run
    key: str  # configuration key
    device: Device
    start_time: str  # ISO 8601 with a time zone (`next_time`)
    end_time: str
    outcome: Outcome
    rank: Count = 0  # which of the run's processes; each has a device of its own
    size: str = ""  # the model's size in the key; empty where it has only one
    factor: Factor  # safety factor in force
    factor_reason: str
    capacity_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    peak_allocated_bytes: Count | None  # None where the attempt ended before anything was measured
    peak_reserved_bytes: Count | None = None  # recorded, never learned from
    predicted_peak_bytes: Count | None = None  # of the plan
    predicted_base_bytes: int | None = None  # the part of it for weights, gradients and optimizer state
    # Predicted peak of a micro-batch at the tuned limit; None where the search stopped before memory ended it.
    predicted_full_bytes: int | None = None
    tuned_limit: Count | None  # largest cost that fits; None without a search
    safe_limit: Count | None  # largest cost that the plan allowed; None without a search
    used: Share | None  # cost of the largest micro-batch that was run ÷ tuned limit; None without a search
    logical_batch: Count  # samples of one optimizer step
    largest_micro_batch: Count  # samples
    binding_limit: str  # what decided the logical batch
    oom_used: Share | None = None  # cost of the smallest micro-batch that ran out of memory ÷ tuned limit
    # The largest micro-batch that ran after the last out-of-memory, and the peak since then; None where none ran.
    used_after_rescue: Share | None = None
    peak_bytes_after_rescue: Count | None = None
    ooms_rescued: Count = 0  # out-of-memories at a cost within the safe limit, after which the micro-batch was split
    allocator_retries: Count = 0  # times that the allocator emptied its cache to serve a request
    foreign_bytes: Count = 0  # most memory that other processes took after the capacity was read
    torch_version: str = ""
    fingerprint: dict[str, Any] = field(default_factory=dict)  # the settings that change memory
    policy: dict[str, Any] = field(default_factory=dict)  # name and options of the policy in the run's settings

    def __post_init__(self) -> None:
        check_time("start_time", self.start_time)
        check_time("end_time", self.end_time)

    @cached_property
    def started(self) -> datetime:
        """When the attempt began."""
        return datetime.fromisoformat(self.start_time)

    @cached_property
    def ended(self) -> datetime:
        """When it ended; never before it began, though the clock may have been set back in between."""
        return max(datetime.fromisoformat(self.end_time), self.started)

    @property
    def key_without_size(self) -> str:
        """The key as people shorten it."""
        return without_size(self.key, self.size)

    @property
    def peak(self) -> float | None:
        """Peak memory ÷ capacity; None where nothing was measured."""
        return None if self.peak_allocated_bytes is None else self.peak_allocated_bytes / self.capacity_bytes

    @property
    def predicted_line(self) -> tuple[float, float] | None:
        """Predicted peaks ÷ capacity of a run that uses nothing, and of one that uses the whole tuned limit."""
        if self.predicted_base_bytes is None or self.predicted_full_bytes is None:
            return None
        return self.predicted_base_bytes / self.capacity_bytes, self.predicted_full_bytes / self.capacity_bytes

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether memory ran out, rescued or not, while no other process held some of it."""
        failed = self.outcome == "oom" or self.ooms_rescued > 0
        return failed and self.foreign_bytes <= FOREIGN_SHARE * self.capacity_bytes

    @property
    def teaches_out_of_memory(self) -> bool:
        """Whether memory ran out although a search had found that the cost fits."""
        return self.ran_out_of_memory and self.tuned_limit is not None


def without_size(key: str, size: str) -> str:
    """Returns a configuration key without the model's size in it; the key itself where it has none.

    >>> without_size("hcrl_ch_gat_teacher_normal", "teacher")
    'hcrl_ch_gat_normal'
    """
    # From the right: a data set may be named like a size, a mode is not.
    before, _, after = key.rpartition(f"_{size}_")
    return f"{before}_{after}" if size and before else key


@dataclass(frozen=True)
class ObservationLog:
    """All attempts in a state folder, by the time they began."""

    finished: list[Observation]
    unfinished: list[Started]  # without an observation
    set_aside: list[SetAside]  # files that could not be read


def write_started(state: Path, started: Started) -> Path:
    """Records that an attempt began.

    Raises:
        StateError: The file cannot be written. No reason to stop a training.
    """
    return _write(state, started, _STARTED_SUFFIX)


def write_observation(state: Path, observation: Observation) -> Path:
    """Records what an attempt measured. Once this returns, a crash no longer loses it.

    Raises:
        StateError: The file cannot be written, or exists. No reason to stop a training.
    """
    return _write(state, observation, DOCUMENT_SUFFIX)


def read_observations(state: Path) -> ObservationLog:
    """Reads a state folder, which need not exist. Writes nothing.

    Raises:
        StateError: The folder cannot be listed.
    """
    folder = state / _FOLDER
    names = [name for name in list_names(folder) if name.endswith(DOCUMENT_SUFFIX)]
    finished = [name for name in names if not name.endswith(_STARTED_SUFFIX)]
    ended = {name.removesuffix(DOCUMENT_SUFFIX) for name in finished}
    begun = [name for name in names if name.endswith(_STARTED_SUFFIX)]
    unfinished = [name for name in begun if name.removesuffix(_STARTED_SUFFIX) not in ended]
    set_aside: list[SetAside] = []
    return ObservationLog(
        sorted(
            read_documents(folder, finished, Observation, set_aside, most_bytes=_MOST_BYTES), key=lambda o: o.started
        ),
        sorted(read_documents(folder, unfinished, Started, set_aside, most_bytes=_MOST_BYTES), key=lambda s: s.started),
        set_aside,
    )


def _write(state: Path, record: Observation | Started, suffix: str) -> Path:
    # Unique without a counter or a lock: two attempts alike in all parts are the same process of the same attempt.
    stamp = time_stamp(record.start_time)
    process = f"{record.attempt}.{record.rank}" if record.rank else f"{record.attempt}"
    path = state / _FOLDER / f"{stamp}-{_UNSAFE.sub('-', record.run_id)[:150]}-{process}{suffix}"
    write_document(path, record)
    return path
