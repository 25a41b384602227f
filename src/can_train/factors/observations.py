"""What one attempt of a run taught, as one immutable JSON file: written when the attempt begins (*started*) and when it
ends, never rewritten by anybody, so that there is nothing to lock and nothing to lose. What observations mean for the
next run is the factor store's matter.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, get_args

from can_train.io.processes import AttemptStart
from can_train.io.records import (
    DOCUMENT_SUFFIX,
    SetAside,
    check_counts,
    check_time,
    list_names,
    read_documents,
    time_stamp,
    write_document,
)

_FOLDER: Final = "observations"


_STARTED_SUFFIX: Final = f".started{DOCUMENT_SUFFIX}"


_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]+")
"""What a run's id may hold and a portable file name may not."""


_MOST_BYTES: Final = 2**20
"""Largest file that is taken for an observation; they have a few thousand bytes."""


_MOST_SHARE: Final = 1e6
"""Largest share of a limit or of the capacity that is believed; beyond it squares lose their meaning."""


FOREIGN_SHARE: Final = 0.01
"""Share of the capacity that may go without anybody else: libraries load kernels beside the allocator when they are
first used."""


Outcome = Literal["ok", "rescued", "oom", "interrupted", "error"]


_OUTCOMES: Final = get_args(Outcome)


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
class Started(AttemptStart):
    """An attempt that began. Without an observation beside it, it still runs, or was killed and taught nothing."""

    run_id: str
    """Name of the run."""
    key: str
    """Configuration key."""
    device: Device
    """The device."""

    def __post_init__(self) -> None:
        check_time("start_time", self.start_time)
        check_counts(attempt=self.attempt, rank=self.rank, pid=self.pid)

    @property
    def started(self) -> datetime:
        """When the attempt began."""
        return datetime.fromisoformat(self.start_time)

    def is_lost(self, host: str | None = None) -> bool:
        """Whether its process is known to be gone; False where nobody here can know.

        Args:
            host: Name of this machine; None asks it.
        """
        return self.is_running(host) is False


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
    """When the attempt began (`next_time`)."""
    end_time: str
    """When it ended."""
    outcome: str
    """A name of `Outcome`."""
    rank: int = 0
    """Which of the run's processes, counted from 0; each has a device of its own."""
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
    predicted_base_bytes: int | None = None
    """Of that, what weights, gradients and optimizer state take."""
    predicted_full_bytes: int | None = None
    """Peak that the plan predicted of a micro-batch at the tuned limit; None where that was not searched for to the
    end."""
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
    used_after_rescue: float | None = None
    """Cost of the largest micro-batch run after the last out-of-memory ÷ tuned limit; None where none was."""
    peak_bytes_after_rescue: int | None = None
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
        if self.outcome not in _OUTCOMES:
            raise ValueError(f"outcome {self.outcome!r} is not one of {', '.join(_OUTCOMES)}")
        if not 0 < self.factor <= 1:
            raise ValueError(f"factor {self.factor} is not in (0, 1]")
        for used in (self.used, self.oom_used, self.used_after_rescue):
            if used is not None and not 0 <= used <= _MOST_SHARE:
                raise ValueError(f"used {used} is not a share")
        check_time("start_time", self.start_time)
        check_time("end_time", self.end_time)
        self._check_counts()

    def _check_counts(self) -> None:
        if self.capacity_bytes < 1:
            raise ValueError(f"capacity_bytes {self.capacity_bytes} is below 1")
        check_counts(
            attempt=self.attempt,
            rank=self.rank,
            capacity_bytes=self.capacity_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            predicted_peak_bytes=self.predicted_peak_bytes,
            tuned_limit=self.tuned_limit,
            safe_limit=self.safe_limit,
            logical_batch=self.logical_batch,
            largest_micro_batch=self.largest_micro_batch,
            peak_bytes_after_rescue=self.peak_bytes_after_rescue,
            ooms_rescued=self.ooms_rescued,
            allocator_retries=self.allocator_retries,
            foreign_bytes=self.foreign_bytes,
        )

    @cached_property
    def started(self) -> datetime:
        """When the attempt began."""
        return datetime.fromisoformat(self.start_time)

    @cached_property
    def ended(self) -> datetime:
        """When it ended; no earlier than it began, though the clock may have been set back in between."""
        return max(datetime.fromisoformat(self.end_time), self.started)

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
    def predicted_line(self) -> tuple[float, float] | None:
        """Predicted peaks ÷ capacity of a run that uses nothing, and of one that uses the whole tuned limit."""
        if self.predicted_base_bytes is None or self.predicted_full_bytes is None:
            return None
        return self.predicted_base_bytes / self.capacity_bytes, self.predicted_full_bytes / self.capacity_bytes

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether memory ran out, rescued or not, by this run's doing."""
        failed = self.outcome == "oom" or self.ooms_rescued > 0
        return failed and self.foreign_bytes <= FOREIGN_SHARE * self.capacity_bytes

    @property
    def teaches_out_of_memory(self) -> bool:
        """Whether memory ran out, by this run's doing, although a search had shown that it fits."""
        return self.ran_out_of_memory and self.tuned_limit is not None


@dataclass(frozen=True)
class ObservationLog:
    """All attempts in a state folder.

    Attributes:
        finished: Observations, by the time their attempts began.
        unfinished: Attempts that began and left no observation, by the same.
        set_aside: Files that could not be read.
    """

    finished: list[Observation]
    unfinished: list[Started]
    set_aside: list[SetAside]


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
    return _write(state, observation, DOCUMENT_SUFFIX)


def read_observations(state: Path) -> ObservationLog:
    """Reads a state folder; one that does not exist is empty. Writes nothing.

    Raises:
        StateError: The folder cannot be listed.
    """
    folder = state / _FOLDER
    names = list_names(folder)
    finished = {name for name in names if name.endswith(DOCUMENT_SUFFIX) and not name.endswith(_STARTED_SUFFIX)}
    unfinished = [
        name
        for name in names
        if name.endswith(_STARTED_SUFFIX) and name.removesuffix(_STARTED_SUFFIX) + DOCUMENT_SUFFIX not in finished
    ]
    set_aside: list[SetAside] = []
    log = ObservationLog(
        read_documents(folder, sorted(finished), Observation, set_aside, most_bytes=_MOST_BYTES),
        read_documents(folder, unfinished, Started, set_aside, most_bytes=_MOST_BYTES),
        set_aside,
    )
    log.finished.sort(key=lambda observation: observation.started)
    log.unfinished.sort(key=lambda started: started.started)
    return log


def _write(state: Path, record: Observation | Started, suffix: str) -> Path:
    # Unique without a counter or a lock: two attempts alike in all parts are the same process of the same attempt.
    stamp = time_stamp(record.start_time)
    process = f"{record.attempt}.{record.rank}" if record.rank else f"{record.attempt}"
    path = state / _FOLDER / f"{stamp}-{_UNSAFE.sub('-', record.run_id)[:150]}-{process}{suffix}"
    write_document(path, record)
    return path
