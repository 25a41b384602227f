"""One optimizer step: the gradient of a logical batch, computed in micro-batches that fit, and what memory asks for
around it. Where samples do not fit, the run is saved as it was before the step.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.engine.batch_result import BatchResult, check_denominators, whole
from can_train.engine.micro_batcher import Losses
from can_train.engine.ranks import RankFailedError
from can_train.engine.rescue import PartDoesNotFitError
from can_train.engine.snapshot import Snapshot
from can_train.errors import CanTrainError, DoesNotFitError
from can_train.training import randomness
from can_train.training.state import Session, save
from can_train.training.task import Task


def take_step(session: Session, rows: NDArray[np.int64], *, ends_epoch: bool) -> dict[str, float]:
    """Takes one optimizer step on one logical batch; returns the terms' means."""
    progress = session.progress
    session.renew_if_thawed()
    # The reserve's own list, not a copy: it is emptied within the step, and nobody else may keep what was in it.
    held = session.model, session.optimization.optimizer, session.reserve.tensors, session.planner.beside
    with session.monitor.step(*held) as counted:
        own, result = _guarded_step(session, rows, ends_epoch=ends_epoch)
    for term, mean in result.means.items():
        progress.epoch_sums[term] = progress.epoch_sums.get(term, 0.0) + mean * len(rows)
    progress.epoch_samples += len(rows)
    progress.epoch_parts += len(result.micro_batches)
    progress.epoch_largest = max((progress.epoch_largest, *result.micro_batches))
    progress.epoch_ooms += result.ooms
    progress.step_in_epoch += 1
    progress.step += 1
    session.note_run(own, counted=counted)
    _tend_memory(session, result)
    return result.means


def _guarded_step(session: Session, rows: NDArray[np.int64], *, ends_epoch: bool) -> tuple[BatchResult, BatchResult]:
    """Takes the step, or saves the run as it was before it and names the samples that do not fit."""
    snapshot = Snapshot(session.model, session.meter.device)
    try:
        return _optimizer_step(session, rows, ends_epoch=ends_epoch)
    except DoesNotFitError as error:
        _save_as_before(session, snapshot)
        raise with_samples(error, session.task, rows[session.training_share(rows)]) from None
    except RankFailedError as error:
        if error.did_not_fit:
            _save_as_before(session, snapshot)
        raise


def _save_as_before(session: Session, snapshot: Snapshot) -> None:
    session.optimization.optimizer.zero_grad(set_to_none=True)
    snapshot.restore()
    save(session)


def _optimizer_step(session: Session, rows: NDArray[np.int64], *, ends_epoch: bool) -> tuple[BatchResult, BatchResult]:
    """Accumulates the gradient of a logical batch and moves the weights.

    Returns:
        What this rank computed of the batch, and the whole.
    """
    ranks = session.ranks
    reports = ranks.together(lambda: _own_share(session, rows))
    own, denominators = reports[ranks.rank]
    result = whole([share for share, _ in reports])
    check_denominators(result, denominators, size=len(rows))
    _check_finite(result.means, session.progress.step)
    ranks.reduce_gradients(session.optimization.parameters)
    session.hear(ranks.together(lambda: _move(session, ends_epoch=ends_epoch)))
    ranks.broadcast_buffers(session.model)
    return own, result


def _own_share(session: Session, rows: NDArray[np.int64]) -> tuple[BatchResult, dict[str, float]]:
    """Accumulates the gradient of this rank's share, and makes room for the step.

    Returns:
        What came of it, and the denominators of the whole logical batch.
    """
    optimization, device = session.optimization, session.meter.device
    _prepare(session, rows)
    generator = randomness.step_generator(seed=session.training.seed, step=session.progress.step)
    # The whole batch, so that what couples its samples is drawn alike on all ranks; it gathers what is asked of it.
    batch = session.task_in_epoch.logical_batch(rows, device, session.precision.dtype, generator)
    share = session.training_share(rows)

    def losses_of(start: int, stop: int) -> Losses:
        with session.precision.context(device):
            return batch.losses(session.model, share.start + start, share.start + stop)

    if share.start == share.stop:
        # A scaler that has never scaled refuses to step.
        optimization.scaler.scale(torch.zeros((), device=device))
    result = session.batcher.run_share(
        losses_of,
        session.run_plan.training_costs(session.task, rows[share]),
        denominators=batch.denominators,
        weights=session.task.loss_weights,
        scale=optimization.scaler.scale,
    )
    session.reserve.before_step()
    return result, dict(batch.denominators)


def _prepare(session: Session, rows: NDArray[np.int64]) -> None:
    """Lets the task do what it wants done before each step, alike on all ranks."""
    before_step = getattr(session.task, "before_step", None)
    if before_step is not None:
        seed, step = session.training.seed, session.progress.step
        generator = randomness.before_step_generator(seed=seed, step=step)
        before_step(session.model, rows, step / session.total_steps, generator)


def _move(session: Session, *, ends_epoch: bool) -> int | None:
    """Moves weights and schedule; returns the signal that this rank has received."""
    moved = session.optimization.step()
    session.batcher.stepped()
    # The schedule moves within the step, by epoch too, so that a checkpoint has both or neither.
    if ends_epoch if session.training.scheduler_interval == "epoch" else moved:
        session.optimization.scheduler.step()
    return session.stops.received


def with_samples(error: DoesNotFitError, task: Task, rows: NDArray[np.int64]) -> DoesNotFitError:
    """Says which samples a part of the batch held; the run was saved before its step."""
    value = error.value
    if isinstance(error, PartDoesNotFitError):
        start, stop = error.part
        more = f" and {stop - start - 1} more" if stop - start > 1 else ""
        value = f"{task.describe(int(rows[start]))}{more}; {value}"
    return DoesNotFitError(error.rule, value=value, remedy=error.remedy, shortage=error.shortage)


def _tend_memory(session: Session, result: BatchResult) -> None:
    """What memory asks for between steps: the cache released in time, a rescue said, a leak noticed."""
    training, meter, step = session.training, session.meter, session.progress.step
    interval, threshold = training.cuda_empty_cache_interval, training.free_threshold_mib * 2**20
    too_full = threshold < math.inf and meter.free_bytes() < threshold
    if too_full or (interval and step % interval == 0):
        meter.release()
    if result.ooms:
        splits = (
            f"step {step}: memory ran out {result.ooms} times; finished in {len(result.micro_batches)} micro-batches"
        )
        session.reporter.notice(f"{splits}, with the same gradient")
    rise = session.leak_watch.after_step(meter.allocated_bytes())
    if rise:
        leak = f"step {step}: the memory in use between steps has risen by {rise / 2**20:.1f} MiB without falling"
        session.reporter.notice(f"{leak}: something keeps tensors from step to step (losses never detached, say)")


def _check_finite(means: Mapping[str, float], step: int) -> None:
    if not all(math.isfinite(mean) for mean in means.values()):
        raise CanTrainError(
            "The loss is no longer finite", value=f"step {step}: {dict(means)}",
            remedy="Lower training.lr, set training.grad_clip_norm, or use training.precision=fp32",
        )  # fmt: skip
