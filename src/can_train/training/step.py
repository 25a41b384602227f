"""One optimizer step: the gradient of a logical batch, computed in micro-batches that fit, and what memory asks for
around it. Where samples do not fit, the run is saved as it was before the step.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from can_train.engine.micro_batcher import BatchResult, Losses
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
    held = session.model, session.optimization.optimizer, session.reserve.tensors
    with session.monitor.step(*held) as counted:
        result = _guarded_step(session, rows, ends_epoch=ends_epoch)
    for term, mean in result.means.items():
        progress.epoch_sums[term] = progress.epoch_sums.get(term, 0.0) + mean * len(rows)
    progress.epoch_samples += len(rows)
    progress.epoch_parts += len(result.micro_batches)
    progress.epoch_largest = max(progress.epoch_largest, *result.micro_batches)
    progress.epoch_ooms += result.ooms
    progress.step_in_epoch += 1
    progress.step += 1
    session.note_run(result, counted=counted)
    _tend_memory(session, result)
    return result.means


def _guarded_step(session: Session, rows: NDArray[np.int64], *, ends_epoch: bool) -> BatchResult:
    """Takes the step, or saves the run as it was before it and names the samples that do not fit."""
    snapshot = Snapshot(session.model, session.meter.device)
    try:
        return _optimizer_step(session, rows, ends_epoch=ends_epoch)
    except DoesNotFitError as error:
        session.optimization.optimizer.zero_grad(set_to_none=True)
        snapshot.restore()
        save(session)
        raise with_samples(error, session.task, rows) from None


def _optimizer_step(session: Session, rows: NDArray[np.int64], *, ends_epoch: bool) -> BatchResult:
    """Accumulates the gradient of a logical batch and moves the weights."""
    training, optimization, device = session.training, session.optimization, session.meter.device
    generator = randomness.step_generator(seed=training.seed, step=session.progress.step)
    batch = session.task.logical_batch(rows, device, session.precision.dtype, generator)

    def losses_of(start: int, stop: int) -> Losses:
        with session.precision.context(device):
            return batch.losses(session.model, start, stop)

    result = session.batcher.run(
        losses_of,
        session.run_plan.training_costs(session.task, rows),
        denominators=batch.denominators,
        weights=session.task.loss_weights,
        scale=optimization.scaler.scale,
    )
    _check_finite(result.means, session.progress.step)
    session.reserve.before_step()
    moved = optimization.step()
    session.batcher.stepped()
    # The schedule moves within the step, by epoch too, so that a checkpoint has both or neither.
    if ends_epoch if training.scheduler_interval == "epoch" else moved:
        optimization.scheduler.step()
    return result


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
