"""Real processes write observations into one folder and are killed at random: what was acknowledged is there."""

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from can_train.factors.observations import read_records, write_record
from fakes.samples import observation

CONTEXT = get_context("fork")


def write_numbers(state: Path, writer: int, first: int, last: int, acknowledge: Connection) -> None:
    for number in range(first, last):
        write_record(state, observation(number, run_id=f"{writer}-{number}"))
        acknowledge.send(number)


class Writer:
    """A process that writes its share, and is started anew where it was killed."""

    def __init__(self, state: Path, name: int, count: int) -> None:
        self.state, self.name, self.count = state, name, count
        self.acknowledged: list[int] = []
        self.next = 0
        self.start()

    def start(self) -> None:
        self.pipe, ours = CONTEXT.Pipe(duplex=False)
        arguments = (self.state, self.name, self.next, self.count, ours)
        self.process = CONTEXT.Process(target=write_numbers, args=arguments)
        self.process.start()
        ours.close()

    def hear(self) -> bool:
        """Takes one acknowledgement; False when the process has ended."""
        try:
            self.acknowledged.append(self.pipe.recv())
        except (EOFError, OSError):
            self.process.join()
            return False
        return True

    def go_on(self) -> bool:
        """Starts again after what may or may not have been written when the process was killed."""
        if self.process.exitcode == 0:
            return False
        assert self.process.exitcode == -signal.SIGKILL
        self.next = max([self.next, *self.acknowledged[-1:]]) + 2
        if self.next < self.count:
            self.start()
        return self.next < self.count


@contextmanager
def writers(state: Path, count: int, each: int) -> Iterator[list[Writer]]:
    started = [Writer(state, name, each) for name in range(count)]
    try:
        yield started
    finally:
        for writer in started:
            writer.process.kill()
            writer.process.join()


@pytest.mark.parametrize(
    ("processes", "each", "danger"),
    [(4, 25, 0.1), pytest.param(32, 120, 0.03, marks=pytest.mark.slow)],
    ids=["small", "full"],
)
def test_nothing_that_was_acknowledged_is_lost_when_writers_are_killed(
    tmp_path: Path, processes: int, each: int, danger: float
) -> None:
    dice = random.Random(7)
    kills = 0
    with writers(tmp_path, processes, each) as started:
        running = {writer.pipe: writer for writer in started}
        while running:
            for pipe in wait(list(running)):
                writer = running[pipe]  # type: ignore[index]
                if not writer.hear():
                    del running[pipe]  # type: ignore[arg-type]
                    if writer.go_on():
                        running[writer.pipe] = writer
                elif dice.random() < danger:
                    writer.process.kill()
                    kills += 1
        acknowledged = {f"{writer.name}-{number}" for writer in started for number in writer.acknowledged}
    log = read_records(tmp_path)
    written = [record.run_id for record in log.finished]
    assert (log.set_aside, len(set(written))) == ([], len(written))
    assert acknowledged <= set(written)
    assert kills > 0
    assert len(written) <= len(acknowledged) + kills
