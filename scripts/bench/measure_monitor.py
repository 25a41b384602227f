"""Measures the time that the memory monitor adds to an optimizer step. Steps without a monitor alternate with steps
that it measures; empty steps show the cost of a step that it does not measure.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Final, NamedTuple

import torch

from bench.harness import Benchmark, Table, seconds_of
from bench.steps import engine_step, timed_pairs
from can_train.config.compose import RunRequest, resolve
from can_train.memory.meters import Meter, Resident, open_meter
from can_train.memory.monitor import INTERVAL, MemoryMonitor
from can_train.reporter import SilentReporter
from can_train.training.loading import load_task

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "torch_geometric"), quick="a tenth, by processor time")
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

EMPTY_STEPS: Final = 2000
"""Empty steps that are timed together: the monitor adds too little to one to see it next to a real step."""

NEVER: Final = 10**9
"""A warm-up of so many steps does not end, so no step is measured."""

GOAL: Final = 0.01
"""Largest share of a step that the monitor may add, over an interval."""


class Added(NamedTuple):
    """The time that the monitor adds to a step, as shares of the step without it."""

    step_s: float
    unmeasured: float
    measured: float

    @property
    def amortised(self) -> float:
        """The share that it adds on average, when it measures one step of an interval."""
        return (self.measured + (INTERVAL - 1) * self.unmeasured) / INTERVAL


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if the goal is missed."""
    options = BENCHMARK.parser().parse_args()
    torch.set_num_threads(1)
    table, worst = Table("GAT", "device", "step, ms", "not measured", "measured", "amortised"), 0.0
    # Processor time hardly grows with other work on the machine.
    clock = time.thread_time if options.quick else time.perf_counter
    for size, device, pairs in STUDENTS if options.quick else CASES:
        added = measure(size, device, pairs // 10 if options.quick else pairs, clock)
        worst = max(worst, added.amortised)
        shares = [f"{added.unmeasured:.3%}", f"{added.measured:.1%}", f"{added.amortised:.2%}"]
        table.add(size, device, f"{added.step_s * 1e3:.1f}", *shares)
    missed = [f"the monitor adds up to {worst:.2%}, more than {GOAL:.0%}"] if worst > GOAL else []
    BENCHMARK.finish(options, missed, table=table)


def measure(size: str, device: str, pairs: int, clock: Callable[[], float]) -> Added:
    """Times pairs of steps and empty steps."""
    meter = open_meter(device)
    with meter.active():
        steps, held = make_steps(size, meter)
        bare_s, measured_s = timed_pairs(steps, pairs, clock)
        never = MemoryMonitor(meter=meter, warmup=NEVER)

        def take_empty_steps() -> None:
            for _ in range(EMPTY_STEPS):
                with never.step(*held):
                    pass

        unmeasured_s = seconds_of(take_empty_steps, clock) / EMPTY_STEPS
    step_s = median(bare_s)
    added_s = median(measured - bare for bare, measured in zip(bare_s, measured_s, strict=True))
    return Added(step_s, unmeasured_s / step_s, added_s / step_s)


def make_steps(size: str, meter: Meter) -> tuple[tuple[Callable[[], None], Callable[[], None]], tuple[Resident, ...]]:
    """Makes a step without a monitor and a measured step of one model. Returns the model and its optimizer, too."""
    run = resolve(RunRequest(model="gat", dataset="synthetic", size=size))
    with meter.host():
        task = load_task(run, SilentReporter())
    torch.manual_seed(0)
    model = task.build_model().train()
    step, optimizer = engine_step(run, task, model, task.train_rows[:BATCH], meter)
    monitor = MemoryMonitor(meter=meter, interval=1, warmup=0)

    def measured_step() -> None:
        with monitor.step(model, optimizer):
            step()

    return (step, measured_step), (model, optimizer)
