"""Laws of the time that a micro-batch takes, with known optimum, and runs that are timed under them."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from can_train.fit.packing import BatchCosts
from can_train.fit.step_time import MicroBatchChoice, SizeCandidate, StepTimer, TimedSize, choose_size

Law = Callable[[int], float]
"""Returns the seconds of a micro-batch of some samples, in any unit."""

LAWS: dict[str, Law] = {
    "no fixed cost": lambda size: size + 0.5,
    "fixed cost": lambda size: size + 8,
    "launches alone": lambda size: 0.001 * size + 8,
    "cache of 16 samples": lambda size: (size + 1) * (1.0 if size <= 16 else 1.73),
    "cache of 32 samples": lambda size: (size + 2) * (1.0 if size <= 32 else 1.2),
    "convex": lambda size: 6 + size + 0.02 * size**2,
    "steeply convex": lambda size: 2 + size + 0.1 * size**2,
    "occupancy in steps of 8": lambda size: 1 + 8 * math.ceil(size / 8),
}


@dataclass
class LawMeter:
    """A clock that the law moves."""

    now: float = 0.0

    def moment(self) -> float:
        """Reads the clock."""
        return self.now

    def seconds_between(self, begun: float, ended: float) -> float:
        """Returns the seconds between two readings."""
        return ended - begun


def parts_of(batch: int, largest: int) -> list[int]:
    """Returns the sizes of the fewest micro-batches of at most `largest` samples."""
    number = -(-batch // largest)
    small, rest = divmod(batch, number)
    return [small + 1] * rest + [small] * (number - rest)


def candidates_of(batch: int, largest: int, *, rung: str = "split") -> list[SizeCandidate]:
    """Returns the sizes that micro-batches of a batch of equal samples may have, as a plan has them."""
    numbers = {math.ceil(batch / largest * 2 ** (power / 4)) for power in (*range(4), *range(4, 48, 2))}
    sizes = sorted({-(-batch // number) for number in numbers if number <= batch}, reverse=True)
    return [SizeCandidate(cost=size, samples=batch / len(parts_of(batch, size)), rung=rung) for size in sizes]


@dataclass(frozen=True)
class FurtherRung:
    """A rung on which larger micro-batches fit, which take longer than in the law."""

    largest: int
    longer: float = 4 / 3  # Time of a micro-batch ÷ its time in the law
    name: str = "recompute"


@dataclass
class TimedRuns:
    """Runs of one configuration under a law, one after the other, each on a device of its own speed."""

    law: Law
    batch: int
    largest: int  # Samples of the largest micro-batch that fits
    noise: float = 0.1
    seed: int = 0
    history: list[list[TimedSize]] = field(default_factory=list)
    further: FurtherRung | None = None

    def step_time(self, largest: float, rung: str = "split") -> float:
        """Returns the seconds of a step, without noise."""
        longer = self.further.longer if self.further is not None and rung == self.further.name else 1.0
        return longer * sum(map(self.law, parts_of(self.batch, int(largest))))

    @property
    def fastest(self) -> float:
        """The seconds of a step in the best of all sizes that fit, on any rung."""
        times = [self.step_time(size) for size in range(1, self.largest + 1)]
        if self.further is not None:
            times += [self.step_time(size, self.further.name) for size in range(1, self.further.largest + 1)]
        return min(times)

    def candidates(self) -> list[SizeCandidate]:
        """Returns the sizes that fit, as a plan has them."""
        first = candidates_of(self.batch, self.largest)
        if self.further is None:
            return first
        further = candidates_of(self.batch, self.further.largest, rung=self.further.name)
        return [*first, *(one for one in further if one.samples > 1.02 * first[0].samples)]

    def choice(self, steps: int) -> MicroBatchChoice:
        """Returns the choice of the next run."""
        return choose_size(self.candidates(), self.history, total_steps=steps)

    def chosen_time(self, steps: int) -> float:
        """Returns the seconds of a step of the next run, without noise."""
        choice = self.choice(steps)
        return self.step_time(choice.cost, choice.rung)

    def run(self, steps: int, *, choice: MicroBatchChoice | None = None) -> float:
        """Runs some steps by the next choice; returns their time ÷ that of as many in the largest size."""
        choice = choice or self.choice(steps)
        # Another seed for each run, and the same for the same run.
        random_numbers = random.Random(f"{self.seed} {len(self.history)}")
        meter, speed, costs = LawMeter(), math.exp(random_numbers.gauss(0, 0.2)), BatchCosts.uniform(self.batch)
        timer = StepTimer(meter=cast("Any", meter), choice=choice)
        for step in range(steps):
            trial = timer.trial(step)
            tried = choice if trial is None else trial
            size = int(tried.cost)
            with timer.timing(step, costs):
                meter.now += speed * self.step_time(size, tried.rung) * math.exp(random_numbers.gauss(0, self.noise))
            timer.count(step, parts_of(self.batch, size), is_typical=True)
        self.history.append(timer.sizes())
        return meter.now / speed / steps / self.step_time(self.largest)
