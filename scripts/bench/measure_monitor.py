"""Measures what the memory monitor adds to an optimizer step. Steps without a monitor alternate with steps that it
measures, so that other work on the machine affects both; empty steps show the cost of a step that it does not measure.
"""

import argparse
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import torch

from bench.results_file import environment, markdown, write_section
from can_train.config.compose import RunRequest, resolve
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.optimizer import make_optimizer
from can_train.fit.packing import BatchCosts
from can_train.memory.meters import INTERVAL, MemoryMonitor, Meter, Resident, open_meter
from can_train.reporter import SilentReporter
from can_train.training.loading import load_task

CASES: Final = (
    ("teacher", "cpu", 40),
    ("student", "cpu", 200),
    ("teacher", "sim:4GiB", 40),
    ("student", "sim:4GiB", 200),
)
"""Size of the GAT, device, and measured pairs of steps."""
STUDENTS: Final = CASES[1::2]

BATCH: Final = 64
"""Samples in a logical batch."""

WARM_PAIRS: Final = 5

EMPTY_STEPS: Final = 2000
"""Empty steps that are timed together. What the monitor adds to one is too small to see next to a real step."""

NEVER: Final = 10**9
"""A warm-up of so many steps does not end, so no step is measured."""

GOAL: Final = 0.01
"""Largest share of a step that the monitor may add, over an interval."""

NOTES: Final = f"""\
GAT's steps through the engine, {BATCH} windows per batch, on the CPU or on a GPU simulated on it. Medians over pairs of
steps, one without a monitor and one that it measures. *Measured*: the median difference within a pair over the median
step without a monitor. *Not measured*: the mean of {EMPTY_STEPS:,} empty steps. *Amortised*: over an interval of
{INTERVAL} steps, of which one is measured. One thread."""


class Added(NamedTuple):
    """What the monitor adds to a step, as shares of the step without it."""

    step_s: float
    unmeasured: float
    measured: float

    @property
    def amortised(self) -> float:
        """The share that it adds on average, when it measures one step of an interval."""
        return (self.measured + (INTERVAL - 1) * self.unmeasured) / INTERVAL


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench/monitor", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth, by processor time; writes nothing")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows, worst = [["GAT", "device", "step, ms", "not measured", "measured", "amortised"]], 0.0
    # Processor time hardly grows with other work on the machine.
    clock = time.thread_time if quick else time.perf_counter
    for size, device, pairs in STUDENTS if quick else CASES:
        added = measure(size, device, pairs // 10 if quick else pairs, clock)
        worst = max(worst, added.amortised)
        shares = [f"{added.unmeasured:.3%}", f"{added.measured:.1%}", f"{added.amortised:.2%}"]
        rows.append([size, device, f"{added.step_s * 1e3:.1f}", *shares])
        print(" | ".join(rows[-1]), flush=True)
    head = environment({"torch": version("torch"), "torch_geometric": version("torch_geometric")})
    text = "\n\n".join([head, markdown(rows), NOTES])
    if not quick:
        write_section("monitor", "What looking at memory adds to a step (`scripts/bench/monitor`)", text)
    if worst > GOAL:
        sys.exit(f"missed: the monitor adds up to {worst:.2%}, more than {GOAL:.0%}")


def measure(size: str, device: str, pairs: int, clock: Callable[[], float]) -> Added:
    """Times pairs of steps, in alternating order, and empty steps."""
    meter = open_meter(device)
    with meter.active():
        steps, held = make_steps(size, meter)
        seconds = []
        for pair in range(WARM_PAIRS + pairs):
            order = (0, 1) if pair % 2 else (1, 0)
            timed = {index: _timed(steps[index], clock) for index in order}
            seconds.append((timed[0], timed[1]))
        never = MemoryMonitor(meter=meter, warmup=NEVER)
        unmeasured_s = _timed(lambda: _take_empty_steps(never, held), clock) / EMPTY_STEPS
    counted = seconds[WARM_PAIRS:]
    step_s = median(bare for bare, _ in counted)
    return Added(step_s, unmeasured_s / step_s, median(measured - bare for bare, measured in counted) / step_s)


def _take_empty_steps(monitor: MemoryMonitor, held: tuple[Resident, ...]) -> None:
    for _ in range(EMPTY_STEPS):
        with monitor.step(*held):
            pass


def _timed(step: Callable[[], None], clock: Callable[[], float]) -> float:
    started = clock()
    step()
    return clock() - started


def make_steps(size: str, meter: Meter) -> tuple[tuple[Callable[[], None], Callable[[], None]], tuple[Resident, ...]]:
    """Makes a step without a monitor and a measured one of the same model, and returns what they hold too."""
    run = resolve(RunRequest(model="gat", dataset="synthetic", size=size))
    with meter.host():
        task = load_task(run, SilentReporter())
    rows = task.train_rows[:BATCH]
    torch.manual_seed(0)
    model = task.build_model().train()
    optimizer = make_optimizer(list(model.parameters()), run.training, run.training.lr, meter.device)
    batcher = MicroBatcher(model, meter=meter)
    costs = BatchCosts(task.batch_features(rows), task.memory_features, np.ones(len(task.memory_features)))

    def step() -> None:
        batch = task.logical_batch(rows, meter.device, torch.float32, torch.Generator().manual_seed(0))

        def losses_of(start: int, stop: int) -> Losses:
            return batch.losses(model, start, stop)

        batcher.run(losses_of, costs, denominators=batch.denominators, weights=task.loss_weights)
        optimizer.step()
        batcher.stepped()
        optimizer.zero_grad()

    monitor = MemoryMonitor(meter=meter, interval=1, warmup=0)

    def measured_step() -> None:
        with monitor.step(model, optimizer):
            step()

    return (step, measured_step), (model, optimizer)


if __name__ == "__main__":
    main()
