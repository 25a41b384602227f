"""Measures the time that can-train's micro-batching adds to an optimizer step. Steps of real models alternate with
equal steps in a bare loop.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
from torch import nn

from bench.harness import Benchmark, Table, seconds_of
from bench.steps import engine_step, timed_pairs
from can_train.config.compose import RunRequest, resolve
from can_train.fit import pass_state
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.optimizer import make_optimizer
from can_train.memory.meters import open_meter
from can_train.reporter import SilentReporter
from can_train.training.loading import load_task

BENCHMARK: Final = Benchmark(
    __name__, packages=("torch", "torch_geometric"), quick="the students alone, by processor time"
)
CASES: Final = (("gat", "teacher", 64), ("gat", "student", 64), ("vgae", "teacher", 64), ("vgae", "student", 64))
"""Model, size and logical batch."""
STUDENTS: Final = CASES[1::2]

PAIRS: Final = 60
"""Measured pairs of steps, after the warm-up."""

GOAL: Final = 0.03
"""Largest share of a step that the engine may add."""
QUICK_PAIRS: Final = 30
QUICK_GOAL: Final = 0.05
"""Largest share of a quick run, in processor time, which other work on the machine lengthens unevenly."""

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
    parser = BENCHMARK.parser()
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of steps (default: %(default)s)")
    options = parser.parse_args()
    pairs: int = QUICK_PAIRS if options.quick else options.pairs
    clock, goal = (time.thread_time, QUICK_GOAL) if options.quick else (time.perf_counter, GOAL)
    torch.set_num_threads(1)
    table, worst = Table("model", "batch", "bare loop, ms", "engine, ms", "overhead"), 0.0
    for model, size, batch in STUDENTS if options.quick else CASES:
        timed = measure(model, size, batch, pairs, clock)
        share = timed.added / timed.bare
        worst = max(worst, share)
        milliseconds = (f"{timed.bare * 1e3:.1f}", f"{timed.engine * 1e3:.1f}")
        table.add(f"{model}, {size}", str(batch), *milliseconds, f"{share:.1%}")
    added = tiny_parts()
    tiny = Table("a part of a tiny model", "added, µs")
    for name, micros in added.items():
        tiny.add(name, f"{micros:.0f}")
    missed = []
    if worst > goal or added["engine"] > TINY_GOAL:
        part = f"{added['engine']:.0f} of at most {TINY_GOAL:.0f} µs to a part"
        missed.append(f"the engine adds {worst:.1%} of at most {goal:.0%} to a step, {part}")
    BENCHMARK.finish(options, missed, write=pairs >= PAIRS, table=table, tiny=tiny)


def tiny_parts() -> dict[str, float]:
    """Times batches of a tiny model; returns the microseconds that the engine adds to a part, by variant."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    x, part = torch.randn(4 * PARTS, 3), 4
    batcher = MicroBatcher(model, limits=part)
    batcher.compares = False

    def losses_of(start: int, stop: int) -> Losses:
        return {"loss": (model(x[start:stop]).square().sum(), stop - start)}

    def bare() -> None:
        for start in range(0, len(x), part):
            (losses_of(start, start + part)["loss"][0] / len(x)).backward()

    def engine() -> None:
        batcher.run(losses_of, len(x))

    def whole_snapshots() -> None:
        with mock.patch.object(pass_state, "_numpy_words", return_value=b""):
            engine()

    loops = {"bare": bare, "engine": engine, "engine, whole snapshots": whole_snapshots}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(TINY_ROUNDS):
        for name, loop in loops.items():
            model.zero_grad()
            seconds[name].append(seconds_of(loop))
    # The quickest, since the slower rounds waited for other processes.
    least = {name: min(rounds) for name, rounds in seconds.items()}
    return {name: (best - least["bare"]) / PARTS * 1e6 for name, best in least.items() if name != "bare"}


def measure(model_name: str, size: str, batch_size: int, pairs: int, clock: Callable[[], float]) -> Timed:
    """Times pairs of steps."""
    run = resolve(RunRequest(model=model_name, dataset="synthetic", size=size))
    task = load_task(run, SilentReporter())
    rows = task.train_rows[:batch_size]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(task.build_model().train())
    engine, _ = engine_step(run, task, models[1], rows, open_meter("cpu"))
    bare_s, engine_s = timed_pairs([bare_loop(run, task, models[0], rows), engine], pairs, clock)
    added = median(after - before for before, after in zip(bare_s, engine_s, strict=True))
    return Timed(median(bare_s), median(engine_s), added)


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
