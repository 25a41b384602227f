"""Runs the cases of an attack in two processes, each in a folder of its own. A case that hangs or ends its process is
a failure with a number, and the others go on.
"""

import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Final

WORKERS: Final = 2
PEAK_MIB: Final = 2048
"""A process with more memory counts as unbounded: torch and polars alone take a quarter of it."""

_CONTEXT: Final = get_context("fork")
_MOST_FAILURES: Final = 50
"""Most failures of an attack that are kept; more of them would have few causes."""


class NoMoreCases(Exception):  # noqa: N818 - not an error
    """Raised by a case beyond the last case of an attack whose number of cases is not known before."""


@dataclass(frozen=True)
class Attack:
    """A kind of attack: cases, each made from a number and a seed, and judged."""

    name: str
    text: str  # its description in the table
    case: Callable[[int, Random, Path], str]  # does and judges one case in a folder; returns the failure, else ""
    count: int  # cases
    quick_count: int
    prepare: Callable[[Path], None] = lambda place: None  # makes the files that all cases share, in a folder
    inputs: int = 1  # of one case
    hang_s: float = 400.0  # after which a case is ended from outside
    # Memory of a process, which begins with the memory of the process that it is forked from.
    most_mib: float = PEAK_MIB


@dataclass
class Progress:
    """The progress of an attack."""

    next_numbers: list[int] = field(default_factory=lambda: [*range(WORKERS)])  # of each process
    done: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)  # number of the case, and the failure
    seconds: float = 0.0
    peak_mib: float = 0.0

    @property
    def is_full(self) -> bool:
        """Whether so many cases failed that more of them say nothing new."""
        return len(self.failures) >= _MOST_FAILURES


@dataclass(frozen=True)
class Bounds:
    """The end of an attack: `count` cases, earlier ones included, or a time of `time.monotonic`."""

    count: int
    until: float


def dice_of(attack: Attack, seed: int, number: int) -> Random:
    """Returns the random numbers of one case."""
    return Random(f"{seed} {attack.name} {number}")


def run_attack(attack: Attack, seed: int, place: Path, progress: Progress, bounds: Bounds) -> Iterator[None]:
    """Runs the remaining cases of an attack, and notes their outcomes in `progress`. Yields about once a second, so
    that the progress can be stored.

    Args:
        attack: The attack.
        seed: Of all cases.
        place: An existing folder, where every process makes a folder.
        progress: The progress so far.
        bounds: The end.
    """
    begun = time.monotonic() - progress.seconds
    workers = [_Worker(attack, seed, place, number) for number in range(WORKERS)]
    try:
        for worker in workers:
            worker.start(progress.next_numbers[worker.number], bounds.count)
        while running := [worker for worker in workers if worker.is_running]:
            heard = wait([worker.pipe for worker in running], timeout=1.0)
            for worker in running:
                was_ended = worker.hear(progress) if worker.pipe in heard else worker.check_time(progress)
                if was_ended:
                    worker.start(progress.next_numbers[worker.number], bounds.count)
            progress.seconds = time.monotonic() - begun
            yield
            if progress.is_full or time.monotonic() > bounds.until:
                return
    finally:
        for worker in workers:
            worker.kill()


class _Worker:
    """A process that does every second case; a new one takes its place when a case has ended it."""

    def __init__(self, attack: Attack, seed: int, place: Path, number: int) -> None:
        self.attack, self.seed, self.number = attack, seed, number
        self.place = place / f"{attack.name}-{number}"
        self.place.mkdir(parents=True, exist_ok=True)
        self.is_running = False

    def start(self, first: int, count: int) -> None:
        self.pipe, theirs = _CONTEXT.Pipe(duplex=False)
        self._case: int | None = None
        self._since = time.monotonic()
        self.is_running = True
        arguments = (self.attack, self.seed, range(first, count, WORKERS), self.place, theirs)
        self.process = _CONTEXT.Process(target=_work, args=arguments)
        self.process.start()
        theirs.close()

    def hear(self, progress: Progress) -> bool:
        """Takes a message; returns whether a case has ended the process, so that a new process has to go on."""
        try:
            number, failure, peak_mib = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            self.is_running = False
            if self._case is None:
                # Ended by itself: it has no more cases, or could not prepare them.
                assert self.process.exitcode == 0, f"{self.attack.name} cannot be prepared"
                return False
            self._note(progress, f"the process ended with exit code {self.process.exitcode}")
            return True
        self._case, self._since = number, time.monotonic()
        if failure is None:
            return False
        progress.peak_mib = max(progress.peak_mib, peak_mib)
        is_too_large = bool(peak_mib > self.attack.most_mib)
        self._note(progress, failure or (f"{peak_mib:.0f} MiB of memory" if is_too_large else ""))
        if is_too_large:
            self.kill()
        return is_too_large

    def check_time(self, progress: Progress) -> bool:
        """Ends a process whose case hangs; returns whether it did."""
        if self._case is None or time.monotonic() - self._since < self.attack.hang_s:
            return False
        self.kill()
        self._note(progress, f"still at work after {self.attack.hang_s:.0f} s")
        return True

    def kill(self) -> None:
        if self.is_running:
            # With the processes that it has started.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid or 0, signal.SIGKILL)
            self.process.kill()
            self.process.join()
            self.is_running = False

    def _note(self, progress: Progress, failure: str) -> None:
        assert self._case is not None
        progress.done += 1
        progress.next_numbers[self.number] = self._case + WORKERS
        if failure:
            progress.failures.append((self._case, failure))
        self._case = None


def _work(attack: Attack, seed: int, numbers: range, place: Path, pipe: Connection) -> None:
    os.setpgid(0, 0)  # so that processes that a case leaves behind can be ended with it
    attack.prepare(place)
    for number in numbers:
        pipe.send((number, None, 0.0))
        try:
            failure = attack.case(number, dice_of(attack, seed, number), place)
        except NoMoreCases:
            pipe.send((None, None, 0.0))  # the case that was begun is none
            break
        # Of this process, or of a process that it started.
        peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        pipe.send((number, failure, max(peaks) / 1024))
    os._exit(0)


def escaped(error: BaseException) -> str:
    """Names an error that can-train should have caught, and the lines of can-train that it came through."""
    lines = [line for line in traceback.extract_tb(error.__traceback__) if "can_train" in line.filename]
    where = " < ".join(f"{Path(line.filename).name}:{line.lineno}" for line in lines[:-5:-1])
    return f"{type(error).__name__}: {str(error)[:200]} ({where})"
