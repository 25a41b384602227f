"""Measures what can-train's micro-batching adds to an optimizer step. Steps of real models alternate with the same
steps in a bare loop, so that other work on the machine affects both.
"""

import argparse
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn

from bench.results_file import environment, markdown, write_section
from can_train.config.compose import RunRequest, resolve
from can_train.fit import optimizer
from can_train.fit.batch_dependence import UNKNOWN
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.optimizer import make_optimizer
from can_train.fit.packing import BatchCosts
from can_train.reporter import SilentReporter
from can_train.training.loading import load_task

CASES: Final = (("gat", "teacher", 64), ("gat", "student", 64), ("vgae", "teacher", 64), ("vgae", "student", 64))
"""Model, size and logical batch."""
STUDENTS: Final = CASES[1::2]

PAIRS: Final = 60
"""Measured pairs of steps, after the warm-up."""

WARM_PAIRS: Final = 5

GOAL: Final = 0.03
"""Largest share of a step that the engine may add."""
QUICK_PAIRS: Final = 30
QUICK_GOAL: Final = 0.05
"""The same for the processor time of a quick run, which other work on the machine lengthens, but not evenly."""

NOTES: Final = """\
Both do the same forward pass, backward pass and optimizer step on the same windows. The engine also computes the cost
of the batch, sets gradients aside, takes a snapshot of generators and buffers, and sums the loss terms. Medians over
pairs of steps; the overhead is the median difference within a pair over the bare step's median. One thread.

The second table is of a model of 21 parameters in 16 parts, whose passes take next to nothing: what a part adds. *Whole
snapshots* reads numpy's generator for every part, also where nothing was drawn from it since the part before. The
quickest of 300 rounds each."""

PARTS: Final = 16
TINY_ROUNDS: Final = 300
TINY_GOAL: Final = 150.0
"""Largest number of microseconds that a part may add."""

CPU: Final = torch.device("cpu")


class Timed(NamedTuple):
    """The results of one model, in seconds per step. `added` is the median difference within a pair."""

    bare: float
    engine: float
    added: float


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench/engine", description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of steps (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="the students alone, by processor time; writes nothing")
    options = parser.parse_args()
    pairs: int = QUICK_PAIRS if options.quick else options.pairs
    clock, goal = (time.thread_time, QUICK_GOAL) if options.quick else (time.perf_counter, GOAL)
    torch.set_num_threads(1)
    rows, worst = [["model", "batch", "bare loop, ms", "engine, ms", "overhead"]], 0.0
    for model, size, batch in STUDENTS if options.quick else CASES:
        timed = measure(model, size, batch, pairs, clock)
        share = timed.added / timed.bare
        worst = max(worst, share)
        rows.append(
            [f"{model}, {size}", str(batch), f"{timed.bare * 1e3:.1f}", f"{timed.engine * 1e3:.1f}", f"{share:.1%}"]
        )
        print(" | ".join(rows[-1]), flush=True)
    head = environment({"torch": version("torch"), "torch_geometric": version("torch_geometric")})
    added = tiny_parts()
    tiny = [["a part of a tiny model", "added, µs"], *([name, f"{micros:.0f}"] for name, micros in added.items())]
    for row in tiny[1:]:
        print(" | ".join(row), flush=True)
    text = "\n\n".join([head, markdown(rows), markdown(tiny), NOTES])
    if pairs >= PAIRS and not options.quick:
        write_section("engine", "What the engine adds to a step (`scripts/bench/engine`)", text)
    if worst > goal or added["engine"] > TINY_GOAL:
        part = f"{added['engine']:.0f} of at most {TINY_GOAL:.0f} µs to a part"
        sys.exit(f"missed: the engine adds {worst:.1%} of at most {goal:.0%} to a step, {part}")


def tiny_parts() -> dict[str, float]:
    """Times batches of a tiny model; returns the microseconds that the engine adds to a part, by variant."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    x, part = torch.randn(4 * PARTS, 3), 4
    batcher = MicroBatcher(model, limits=part)
    batcher.batch_dependence = UNKNOWN

    def losses_of(start: int, stop: int) -> Losses:
        return {"loss": (model(x[start:stop]).square().sum(), stop - start)}

    def bare() -> None:
        for start in range(0, len(x), part):
            (losses_of(start, start + part)["loss"][0] / len(x)).backward()

    def engine() -> None:
        batcher.run(losses_of, len(x))

    def whole_snapshots() -> None:
        with mock.patch.object(optimizer, "_numpy_words", return_value=b""):
            engine()

    loops = {"bare": bare, "engine": engine, "engine, whole snapshots": whole_snapshots}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(TINY_ROUNDS):
        for name, loop in loops.items():
            model.zero_grad()
            seconds[name].append(timed(loop))
    # The quickest: the others waited for other processes.
    least = {name: min(own) for name, own in seconds.items()}
    return {name: (own - least["bare"]) / PARTS * 1e6 for name, own in least.items() if name != "bare"}


def measure(model_name: str, size: str, batch_size: int, pairs: int, clock: Callable[[], float]) -> Timed:
    """Times pairs of steps. The order within a pair alternates."""
    run = resolve(RunRequest(model=model_name, dataset="synthetic", size=size))
    task = load_task(run, SilentReporter())
    rows = task.train_rows[:batch_size]
    loops: list[Callable[[], None]] = []
    for make in (bare_loop, engine_loop):
        torch.manual_seed(0)
        loops.append(make(run, task, task.build_model().train(), rows))
    bare, engine = [], []
    for pair in range(WARM_PAIRS + pairs):
        order = (0, 1) if pair % 2 else (1, 0)
        seconds = {index: timed(loops[index], clock) for index in order}
        if pair >= WARM_PAIRS:
            bare.append(seconds[0])
            engine.append(seconds[1])
    added = median(two - one for one, two in zip(bare, engine, strict=True))
    return Timed(median(bare), median(engine), added)


def timed(step: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    """Times one step."""
    started = clock()
    step()
    return clock() - started


def bare_loop(run: Any, task: Any, model: nn.Module, rows: Any) -> Callable[[], None]:
    """Returns a step as one would write it by hand."""
    optimizer = make_optimizer(list(model.parameters()), run.training, run.training.lr, CPU)

    def step() -> None:
        batch = task.logical_batch(rows, CPU, torch.float32, torch.Generator().manual_seed(0))
        losses = batch.losses(model, 0, len(rows))
        terms = [task.loss_weights[term] * total / batch.denominators[term] for term, (total, _) in losses.items()]
        torch.stack(terms).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_loop(run: Any, task: Any, model: nn.Module, rows: Any) -> Callable[[], None]:
    """Returns the same step with can-train's micro-batching."""
    optimizer = make_optimizer(list(model.parameters()), run.training, run.training.lr, CPU)
    batcher = MicroBatcher(model)
    coefficients = np.ones(len(task.memory_features))

    def step() -> None:
        batch = task.logical_batch(rows, CPU, torch.float32, torch.Generator().manual_seed(0))

        def losses_of(start: int, stop: int) -> Losses:
            return dict(batch.losses(model, start, stop))

        costs = BatchCosts(task.batch_features(rows), task.memory_features, coefficients)
        batcher.run(losses_of, costs, denominators=batch.denominators, weights=task.loss_weights)
        optimizer.step()
        batcher.stepped()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
