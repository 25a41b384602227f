"""The measurements of one configuration: predicted and measured peaks of batches that are much larger than the probes,
the tuned limit against the true one, and the speed at several micro-batch sizes.

Shapes: R rows (samples) of a batch.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from can_train.fit.packing import batch_totals
from can_train.fit.search import RecordedPhase, pack_worst_case
from gpu.configurations import NOT_COMPILED, Configuration
from gpu.processes import measure as run_job
from gpu.trainer import Explored, Trainer, open_trainer

BEYOND_PROBES: Final = 5
"""A prediction counts only for batches of at least this many times the largest probe's cost."""

PLAN_SHARE: Final = 0.9
"""Share of the tuned limit that a plan uses once the safety factor has been learned."""

SHARES: Final = (0.25, 0.5, PLAN_SHARE)
"""Peaks are measured at these shares of the tuned limit. A quick run measures only the last."""

SWEEP: Final = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, PLAN_SHARE, 1.0)
"""The speed is measured at these shares of the tuned limit. A quick run measures only the last three."""

STEP: Final = 0.03
"""Relative step of the search for the true limit. It is small because the limit should be near the tuned one."""

MOST_STEPS: Final = 12
"""Most steps of that search: up to 1.4 times the tuned limit, or down to 0.7 times."""

CLOSE: Final = 0.005
"""The search ends when the smallest cost that fails is this close, relatively, to the largest that fits."""

TIMED_S: Final = 1.0
"""Shortest time over which a speed is measured."""

FEWEST_STEPS: Final = 3


def measure(configuration: Configuration) -> Iterator[dict[str, Any]]:
    """Searches the limits of a configuration, then trains with several batch sizes: first as it is, then compiled.

    Yields:
        The results so far, as plain numbers; sizes in bytes.
    """
    with open_trainer(configuration) as trainer:
        explored = trainer.explore()
        shares = SHARES[-1:] if configuration.quick else SHARES
        at_shares, limit = points(trainer, explored, shares), true_limit(trainer, explored)
        row = {
            "configuration": asdict(configuration),
            **_found(explored),
            "points": at_shares,
            "true_limit_bytes": limit,
            "ceiling_bytes": None if limit is None else _ceiling(trainer, explored, limit),
        }
        row["recorded"] = _recorded(trainer, explored, limit)
        if configuration.swept:
            row["speeds"] = _speeds(trainer, explored, SWEEP[-3:] if configuration.quick else SWEEP)
        yield row
        # The simulated GPU is a dispatch mode, and nothing is compiled under one.
        if not configuration.simulated and configuration.model not in NOT_COMPILED:
            trainer.model.compile()
            yield row | {"compiled_points": points(trainer, explored, shares)}


def _recorded(trainer: Trainer, explored: Explored, limit: float | None) -> dict[str, Any]:
    """Records the configuration in a process that sees no GPU, and confirms its lines by one trial, as a run does."""
    job = {"part": "record", "configuration": asdict(trainer.configuration), "key": trainer.meter.key}
    answer = run_job(job, environment={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    if "error" in answer:
        return {"error": answer["error"]}
    limits, reasons = trainer.confirm(msgspec.convert(answer["lines"], RecordedPhase))
    training, counts = limits.training, trainer.task.batch_features(trainer.task.train_rows)
    largest = None if limit is None else training.model.cost(counts[pack_worst_case(explored.costs, limit)])
    return {
        "seconds": answer["seconds"],
        "base_bytes": training.model.base_bytes,
        "room_share": answer["lines"]["training"]["room_share"],
        "peak_bytes": training.peak_bytes(training.tuned_limit),
        "measured_share": training.recorded_share,
        "tuned_limit_bytes": training.tuned_limit,
        "true_limit_bytes": largest,
        "trials": training.trials,
        "ooms": training.ooms,
        "reasons": reasons,
    }


def true_limit(trainer: Trainer, explored: Explored) -> float | None:
    """Finds the largest cost that fits, by whole optimizer steps on worst-case batches.

    It goes away from the tuned limit in small steps, then bisects. Returns None if that meets no limit.
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


def _ceiling(trainer: Trainer, explored: Explored, limit: float) -> int | None:
    """Measures the peak of the largest worst-case batch that fits. Returns None if it does not fit again."""
    peak = trainer.peak(trainer.task.train_rows[pack_worst_case(explored.costs, limit)])
    return None if peak is None else max(peak.passes, peak.optimizer)


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


def draw_rows(trainer: Trainer, explored: Explored, share: float) -> NDArray[np.int64]:
    """Draws samples in random order, repeatedly if necessary, up to a share of the tuned limit."""
    limit = share * explored.limits.training.tuned_limit
    most = int(limit / max(float(explored.costs.each().min()), 1.0)) + 1
    order = np.random.default_rng(0).permutation(np.resize(np.arange(len(explored.costs)), most))
    rows: NDArray[np.int64] = trainer.task.train_rows[order[: explored.costs.chosen(order).reach(0, limit)]]
    return rows


def points(trainer: Trainer, explored: Explored, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """Measures batches at shares of the tuned limit. Leaves out those that are too near to the probes' size."""
    measured = [_point(trainer, explored, draw_rows(trainer, explored, share)) for share in shares]
    return [point for point in measured if point["beyond_probes"] >= BEYOND_PROBES]


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
    batches = {share: draw_rows(trainer, explored, share) for share in shares}
    return [
        {"share": share, "samples": len(rows), "samples_per_second": _speed(trainer, rows)}
        for share, rows in batches.items()
        if len(rows)
    ]


def _speed(trainer: Trainer, rows: NDArray[np.int64]) -> float | None:
    """Measures samples per second in steps of one micro-batch. Returns None if memory runs out."""
    if trainer.peak(rows) is None:
        return None
    _wait(trainer.meter.device)
    started, steps = time.perf_counter(), 0
    while steps < FEWEST_STEPS or time.perf_counter() - started < TIMED_S:
        trainer.step(rows)
        # CUDA only queues a step. Without waiting, many would be queued before the clock is read.
        _wait(trainer.meter.device)
        steps += 1
    return steps * len(rows) / (time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
