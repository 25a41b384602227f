"""What is measured of one configuration: predicted and measured peaks well beyond the probes' size, how far the
finder's limit is from the true one, and how fast the plan's micro-batch is beside the best.

Shapes: R rows (samples) of a batch.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.fit.features import batch_totals
from can_train.fit.search import pack_worst_case
from gpu.configurations import Configuration
from gpu.trainer import Explored, Trainer, open_trainer

BEYOND_PROBES: Final = 5
"""Multiple of the largest probe's cost from which a prediction is judged."""

PLAN_SHARE: Final = 0.9
"""Share of the tuned limit that a plan fills once the safety factor has been learned: its target."""

SHARES: Final = (0.25, 0.5, PLAN_SHARE)
"""Shares of the tuned limit at which peaks are measured; a quick run takes the last."""

SWEEP: Final = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, PLAN_SHARE, 1.0)
"""Shares of the tuned limit whose speed is measured; a quick run takes the last three."""

STEP: Final = 0.03
"""Relative step in which the true limit is first looked for; it should be near the tuned one."""

MOST_STEPS: Final = 12
"""Steps of that search: to 1.4 times the tuned limit, or 0.7 times."""

CLOSE: Final = 0.005
"""Relative distance between what fits and what does not at which the true limit is known."""

TIMED_S: Final = 1.0
"""Shortest time that a size is timed for."""

FEWEST_STEPS: Final = 3


def measure(configuration: Configuration) -> Iterator[dict[str, Any]]:
    """Explores a configuration, then trains at several sizes, at last compiled.

    Yields:
        What is known so far, as plain figures, sizes in bytes.
    """
    with open_trainer(configuration) as trainer:
        explored = trainer.explore()
        shares = SHARES[-1:] if configuration.quick else SHARES
        row = {
            "configuration": asdict(configuration),
            **_found(explored),
            "points": points(trainer, explored, shares),
            "true_limit_bytes": true_limit(trainer, explored),
        }
        if configuration.swept:
            row["speeds"] = _speeds(trainer, explored, SWEEP[-3:] if configuration.quick else SWEEP)
        yield row
        # Nothing is compiled under a dispatch mode, which a simulated GPU is.
        if not configuration.simulated:
            trainer.model.compile()
            yield row | {"compiled_points": points(trainer, explored, shares)}


def true_limit(trainer: Trainer, explored: Explored) -> float | None:
    """Finds, by whole optimizer steps on worst-case batches, the largest cost that fits: in small steps away from the
    tuned limit, then by halves. None where no limit was met.
    """

    def fits(cost: float) -> bool:
        return trainer.fits(trainer.task.train_rows[pack_worst_case(explored.costs, cost)])

    cost = explored.limits.training.tuned_limit
    tuned_fits = fits(cost)
    for _ in range(MOST_STEPS):
        before, cost = cost, cost * (1 + STEP if tuned_fits else 1 - STEP)
        if fits(cost) != tuned_fits:
            break
    else:
        return None
    low, high = min(before, cost), max(before, cost)
    while high - low > CLOSE * low:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _found(explored: Explored) -> dict[str, Any]:
    limits, training = explored.limits, explored.limits.training
    return {
        "capacity_bytes": limits.capacity_bytes,
        "probe_cost_bytes": explored.probe_cost,
        "base_bytes": training.model.base_bytes,
        "relative_residual": training.model.relative_residual,
        "tuned_limit_bytes": training.tuned_limit,
        "capped": training.capped,
        "measured_ratio": training.measured_ratio,
        "optimizer_peak_bytes": limits.optimizer_peak_bytes,
        "trials": training.trials,
        "ooms": training.ooms,
        "evaluation_trials": limits.evaluation.trials,
        "evaluation_ooms": limits.evaluation.ooms,
    }


def _rows(trainer: Trainer, explored: Explored, share: float) -> NDArray[np.int64]:
    """Chooses ordinary samples in random order, again and again, up to a share of the tuned limit."""
    limit = share * explored.limits.training.tuned_limit
    most = int(limit / max(float(explored.costs.each().min()), 1.0)) + 1
    order = np.random.default_rng(0).permutation(np.resize(np.arange(len(explored.costs)), most))
    rows: NDArray[np.int64] = trainer.task.train_rows[order[: explored.costs.chosen(order).reach(0, limit)]]
    return rows


def points(trainer: Trainer, explored: Explored, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """Measures batches at some shares of the tuned limit; those that are too near to the probes' size are left out."""
    found = [_point(trainer, explored, _rows(trainer, explored, share)) for share in shares]
    return [point for point in found if point["beyond_probes"] >= BEYOND_PROBES]


def _point(trainer: Trainer, explored: Explored, rows: NDArray[np.int64]) -> dict[str, Any]:
    training, optimizer_peak = explored.limits.training, float(explored.limits.optimizer_peak_bytes)
    counts = trainer.task.batch_features(rows)
    cost = training.model.cost(counts)
    peak = trainer.peak(rows)
    return {
        "samples": len(rows),
        "cost_bytes": cost,
        "beyond_probes": cost / explored.probe_cost,
        "predicted_bytes": max(training.model.base_bytes + cost, optimizer_peak),
        "corrected_bytes": max(training.peak_bytes(cost), optimizer_peak),
        "half_width_bytes": training.model.half_width(batch_totals(training.model.features, counts)),
        "measured_bytes": None if peak is None else max(peak.passes, peak.optimizer),
        "measured_optimizer_bytes": None if peak is None else peak.optimizer,
        "reserved_bytes": None if peak is None else peak.reserved,
    }


def _speeds(trainer: Trainer, explored: Explored, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    batches = {share: _rows(trainer, explored, share) for share in shares}
    return [
        {"share": share, "samples": len(rows), "samples_per_second": _speed(trainer, rows)}
        for share, rows in batches.items()
        if len(rows)
    ]


def _speed(trainer: Trainer, rows: NDArray[np.int64]) -> float | None:
    """Samples a second in steps of one micro-batch; None where memory runs out."""
    if not trainer.fits(rows):
        return None
    trainer.step(rows)
    _wait(trainer.meter.device)
    started, steps = time.perf_counter(), 0
    while steps < FEWEST_STEPS or time.perf_counter() - started < TIMED_S:
        trainer.step(rows)
        # Steps are queued; without waiting for each, many would be queued before the clock is read.
        _wait(trainer.meter.device)
        steps += 1
    return steps * len(rows) / (time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
