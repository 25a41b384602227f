"""Optimizer steps of real models, for the benchmarks that time the engine and the monitor, and runs for the benchmarks
that plan.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from bench.harness import seconds_of
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import ResolvedRun
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.optimizer import make_optimizer
from can_train.fit.packing import BatchCosts
from can_train.memory.meters import Meter

WARM_PAIRS: Final = 5


def timed_pairs(
    steps: Sequence[Callable[[], None]], pairs: int, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Times two steps in pairs, after a warm-up. The order within a pair alternates, so that other work on the machine
    affects both steps.

    Returns:
        The seconds of each step, one for each pair.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(WARM_PAIRS + pairs):
        for index in (0, 1) if pair % 2 else (1, 0):
            seconds[index].append(seconds_of(steps[index], clock))
    return seconds[0][WARM_PAIRS:], seconds[1][WARM_PAIRS:]


def engine_step(
    run: ResolvedRun, task: Any, model: nn.Module, rows: Any, meter: Meter
) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    """Returns an optimizer step with can-train's micro-batching, and its optimizer."""
    optimizer = make_optimizer(list(model.parameters()), run.training, run.training.lr, meter.device)
    batcher = MicroBatcher(model, meter=meter)
    coefficients = np.ones(len(task.memory_features))

    def step() -> None:
        batch = task.logical_batch(rows, meter.device, torch.float32, torch.Generator().manual_seed(0))

        def losses_of(start: int, stop: int) -> Losses:
            return dict(batch.losses(model, start, stop))

        costs = BatchCosts(task.batch_features(rows), task.memory_features, coefficients)
        batcher.run(losses_of, costs, denominators=batch.denominators, weights=task.loss_weights)
        optimizer.step()
        batcher.stepped()
        optimizer.zero_grad()

    return step, optimizer


def resolve_in(
    folder: Path, device: str, values: Mapping[str, Any], *, model: str = "gat", size: str = "teacher"
) -> ResolvedRun:
    """Resolves a run on the synthetic bus whose run and state folders lie in a folder."""
    folders = {"paths.runs_dir": str(folder / "runs"), "paths.state_dir": str(folder / "state")}
    request = RunRequest(model=model, size=size, dataset="synthetic", device=device, values={**values, **folders})
    return resolve(request)
