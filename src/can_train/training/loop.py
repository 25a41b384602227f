"""The training loop: epochs of logical batches, validation, early stopping, checkpoints. Reads from top to bottom; how
a batch is computed belongs to the engine, what it is to the task.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from can_train.config.training import TrainingSettings
from can_train.engine.micro_batcher import BatchResult, Losses, MicroBatcher
from can_train.engine.rescue import PartDoesNotFitError
from can_train.engine.reserve import OptimizerReserve
from can_train.engine.snapshot import Snapshot
from can_train.errors import CanTrainError, DoesNotFitError
from can_train.memory.meters import Meter
from can_train.policy.leak import LeakWatch
from can_train.policy.plan import Plan
from can_train.reporter import Reporter
from can_train.training import randomness
from can_train.training.checkpoints import Checkpoints
from can_train.training.epochs import Epochs
from can_train.training.optimization import Optimization, Precision
from can_train.training.planning import RunPlan
from can_train.training.run_folder import MetricsLog
from can_train.training.signals import StopRequests
from can_train.training.task import Task

MEASURE_WARMUP: Final = 20
"""Steps of an attempt before its first measured one, fewer where fewer are left: lazily made state (the optimizer's,
say) is there by then."""

MEASURE_INTERVAL: Final = 50
"""Steps between measured ones; on the CPU a measured step costs about a fifth more."""


T = TypeVar("T")


@dataclass(kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        epoch: Epochs completed.
        step_in_epoch: Optimizer steps done in the current epoch.
        step: Optimizer steps done in all.
        best_loss: Lowest validation loss.
        best_epoch: The epoch it belongs to.
        epochs_without_gain: Validations since then.
        epoch_sums: Per term, Σ mean × samples over the current epoch.
        epoch_samples: Samples of the current epoch so far.
        epoch_parts: Micro-batches of the current epoch so far.
        epoch_largest: Samples of the largest of them.
        epoch_ooms: Out-of-memories survived in the current epoch.
        trained: Whether training has ended.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    best_loss: float = math.inf
    best_epoch: int = 0
    epochs_without_gain: int = 0
    epoch_sums: dict[str, float] = field(default_factory=dict)
    epoch_samples: int = 0
    epoch_parts: int = 0
    epoch_largest: int = 0
    epoch_ooms: int = 0
    trained: bool = False


@dataclass(kw_only=True)
class Session:
    """Everything one attempt of a run trains with.

    Attributes:
        best: Weights of the lowest validation loss.
        first_step: The run's steps when the attempt began.
        peak_bytes: Largest peak of the attempt's measured steps; 0 before the first.
        peak_reserved_bytes: Likewise, of what the allocator held.
        largest_cost, largest_micro_batch: Of the attempt's costliest micro-batch, in bytes and of its largest, in
            samples.
        foreign_bytes: Most memory that other processes took meanwhile, as far as it was looked at.
    """

    task: Task
    model: nn.Module
    optimization: Optimization
    precision: Precision
    training: TrainingSettings
    run_plan: RunPlan
    epochs: Epochs
    meter: Meter
    batcher: MicroBatcher
    reserve: OptimizerReserve
    checkpoints: Checkpoints
    metrics: MetricsLog
    stops: StopRequests
    reporter: Reporter
    progress: Progress = field(default_factory=Progress)
    best: dict[str, Any] = field(default_factory=dict)
    leak_watch: LeakWatch = field(default_factory=LeakWatch)
    first_step: int = 0
    peak_bytes: int = 0
    peak_reserved_bytes: int = 0
    largest_cost: float = 0.0
    largest_micro_batch: int = 0
    foreign_bytes: int = 0

    @property
    def plan(self) -> Plan:
        """The decision that the attempt trains by."""
        return self.run_plan.plan

    @property
    def peak_share(self) -> float | None:
        """Peak ÷ capacity; None before the first measured step."""
        return self.peak_bytes / self.meter.capacity_bytes if self.peak_bytes else None


def train(session: Session) -> None:
    """Trains until the last epoch or until patience ends; the best weights are in `session.best` afterwards.

    Raises:
        SystemExit: SIGTERM or SIGINT arrived; a checkpoint was saved first.
    """
    progress = session.progress
    epochs = session.training.epochs
    total = session.epochs.total_steps(epochs)
    session.reserve.hold()
    with session.stops.deferred(), session.reporter.stage("training", total=total, unit="steps") as stage:
        stage.advance(progress.step)
        while not progress.trained:
            _train_epoch(session, stage)
            validated = progress.epoch % session.training.val_interval == 0 or progress.epoch == epochs
            if validated:
                _validate(session)
            patience = session.training.patience
            stopped_early = bool(patience) and progress.epochs_without_gain >= patience
            progress.trained = progress.epoch >= epochs or stopped_early
            save(session)
            _leave_if_asked(session)
            if stopped_early:
                session.reporter.notice(
                    f"No better validation loss in {patience} epochs: stopping after {progress.epoch}"
                )


def _leave_if_asked(session: Session) -> None:
    """Ends the process for a signal that arrived; the caller has just saved."""
    if session.stops.received:
        session.reporter.notice(f"Stopped by a signal; saved at step {session.progress.step}")
        session.stops.exit()


def save(session: Session) -> None:
    """Writes a checkpoint of everything that the next step depends on."""
    state = {
        "model": session.model.state_dict(),
        "best": session.best,
        "optimization": session.optimization.state_dict(),
        "randomness": randomness.capture(),
        "progress": asdict(session.progress),
        "metrics_lines": session.metrics.lines,
        "logical_batch": session.plan.logical_batch,
        "micro_batches": session.batcher.state_dict(),
    }
    session.checkpoints.save(state, step=session.progress.step)


def release_training_memory(session: Session) -> None:
    """Drops optimizer state and gradients, which judging does not need."""
    session.optimization.optimizer.state.clear()
    session.optimization.optimizer.zero_grad(set_to_none=True)
    session.meter.release()


def restore(session: Session, state: Mapping[str, Any]) -> None:
    """Continues from a checkpoint's state, bit by bit."""
    session.model.load_state_dict(state["model"])
    session.best = state["best"]
    session.optimization.load_state_dict(state["optimization"])
    session.batcher.load_state_dict(state["micro_batches"])
    session.progress = Progress(**state["progress"])
    session.first_step = session.progress.step
    randomness.restore(state["randomness"])
    session.metrics.rewind(state["metrics_lines"])


def _train_epoch(session: Session, stage: Any) -> None:
    progress, training = session.progress, session.training
    steps = session.epochs.steps(progress.epoch)
    total = session.epochs.total_steps(training.epochs)
    started, samples_before = time.perf_counter(), progress.epoch_samples
    session.model.train()
    while progress.step_in_epoch < len(steps):
        ends_epoch = progress.step_in_epoch + 1 == len(steps)
        measured = _is_measured(progress.step - session.first_step, total - session.first_step)
        means = _step(session, steps[progress.step_in_epoch], ends_epoch=ends_epoch, measured=measured)
        stage.advance(1, loss=_weighted(means, session.task.loss_weights))
        if session.stops.received or progress.step % training.checkpoint_every == 0:
            save(session)
        _leave_if_asked(session)
    # Where the device counts by itself, the steps since the last measured one have their say.
    _note_peak(session)
    seconds = time.perf_counter() - started
    session.metrics.append(
        step=progress.step,
        epoch=progress.epoch + 1,
        train={term: total / progress.epoch_samples for term, total in progress.epoch_sums.items()},
        lr=session.optimization.lr,
        samples_per_second=round((progress.epoch_samples - samples_before) / seconds, 1) if seconds else None,
        peak_memory_pct=None if session.peak_share is None else round(session.peak_share, 5),
        batch_size_safety_factor=session.plan.safety_factor,
        micro_batch_size=progress.epoch_largest,
        micro_batches=progress.epoch_parts,
        ooms_rescued=progress.epoch_ooms,
    )
    progress.epoch += 1
    progress.step_in_epoch, progress.epoch_sums, progress.epoch_samples = 0, {}, 0
    progress.epoch_parts, progress.epoch_largest, progress.epoch_ooms = 0, 0, 0


def _step(session: Session, rows: NDArray[np.int64], *, ends_epoch: bool, measured: bool) -> dict[str, float]:
    """Takes one optimizer step on one logical batch, measured where it is its turn; returns the terms' means."""
    progress = session.progress
    if measured:
        with session.meter.measuring(
            [*resident_tensors(session.model, session.optimization), *session.reserve.tensors]
        ):
            result = _guarded_step(session, rows, ends_epoch=ends_epoch)
        _note_peak(session)
    else:
        result = _guarded_step(session, rows, ends_epoch=ends_epoch)
    for term, mean in result.means.items():
        progress.epoch_sums[term] = progress.epoch_sums.get(term, 0.0) + mean * len(rows)
    progress.epoch_samples += len(rows)
    progress.epoch_parts += len(result.micro_batches)
    progress.epoch_largest = max(progress.epoch_largest, *result.micro_batches)
    progress.epoch_ooms += result.ooms
    progress.step_in_epoch += 1
    progress.step += 1
    session.largest_cost = max(session.largest_cost, result.largest_cost)
    session.largest_micro_batch = max(session.largest_micro_batch, *result.micro_batches)
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
        raise _with_samples(error, session.task, rows) from None


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


def _with_samples(error: DoesNotFitError, task: Task, rows: NDArray[np.int64]) -> DoesNotFitError:
    """Says which samples a part of the batch held; the run was saved before its step."""
    value = error.value
    if isinstance(error, PartDoesNotFitError):
        start, stop = error.part
        more = f" and {stop - start - 1} more" if stop - start > 1 else ""
        value = f"{task.describe(int(rows[start]))}{more}; {value}"
    return DoesNotFitError(error.rule, value=value, remedy=error.remedy)


def _tend_memory(session: Session, result: BatchResult) -> None:
    """What memory asks for between steps: the cache released in time, a leak noticed, others' use remembered."""
    training, meter, step = session.training, session.meter, session.progress.step
    interval, threshold = training.cuda_empty_cache_interval, training.free_threshold_mib * 2**20
    too_full = threshold < math.inf and meter.capacity_bytes - meter.allocated_bytes() < threshold
    if too_full or (interval and step % interval == 0):
        meter.release()
    if result.ooms:
        session.foreign_bytes = max(session.foreign_bytes, meter.foreign_bytes())
        splits = (
            f"step {step}: memory ran out {result.ooms} times; finished in {len(result.micro_batches)} micro-batches"
        )
        session.reporter.notice(f"{splits}, with the same gradient")
    rise = session.leak_watch.after_step(meter.allocated_bytes())
    if rise:
        leak = f"step {step}: the memory in use between steps has risen by {rise / 2**20:.1f} MiB without falling"
        session.reporter.notice(f"{leak}: something keeps tensors from step to step (losses never detached, say)")


def _note_peak(session: Session) -> None:
    session.peak_bytes = max(session.peak_bytes, session.meter.peak_bytes())
    session.peak_reserved_bytes = max(session.peak_reserved_bytes, session.meter.peak_reserved_bytes())


def resident_tensors(model: nn.Module, optimization: Optimization) -> list[torch.Tensor]:
    """Lists what is on the device between steps: weights, buffers, gradients, optimizer state."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for state in optimization.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors


def _validate(session: Session) -> None:
    """Computes the validation loss; keeps the weights if they are the best so far."""
    progress = session.progress
    loss = validation_loss(session)
    session.metrics.append(step=progress.step, epoch=progress.epoch, validation_loss=loss)
    if loss < progress.best_loss or not session.best:
        progress.best_loss, progress.best_epoch, progress.epochs_without_gain = loss, progress.epoch, 0
        with session.meter.host():
            session.best = {name: value.detach().cpu().clone() for name, value in session.model.state_dict().items()}
    else:
        progress.epochs_without_gain += 1


def validation_loss(session: Session) -> float:
    """Returns the weighted loss over the validation samples, computed in parts that fit."""
    rows, device = session.task.validation_rows, session.meter.device
    session.model.eval()

    def losses_of(start: int, stop: int) -> dict[str, tuple[float, float]]:
        batch = session.task.logical_batch(rows[start:stop], device, session.precision.dtype, None)
        with torch.inference_mode(), session.precision.context(device):
            losses = batch.losses(session.model, 0, stop - start)
        return {term: (float(total), denominator) for term, (total, denominator) in losses.items()}

    sums: dict[str, float] = {}
    denominators: dict[str, float] = {}
    for losses in _in_parts(session, rows, losses_of):
        for term, (total, denominator) in losses.items():
            sums[term] = sums.get(term, 0.0) + total
            denominators[term] = denominators.get(term, 0.0) + denominator
    return _weighted({term: sums[term] / (denominators[term] or 1.0) for term in sums}, session.task.loss_weights)


def score(session: Session, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Scores samples with the model as it is, in parts that fit."""
    session.model.eval()
    device, dtype = session.meter.device, session.precision.dtype

    def scores_of(start: int, stop: int) -> NDArray[np.float64]:
        with torch.inference_mode(), session.precision.context(device):
            return session.task.scores(session.model, rows[start:stop], device, dtype).double().cpu().numpy()

    return np.concatenate(_in_parts(session, rows, scores_of))


def _in_parts(session: Session, rows: NDArray[np.int64], compute: Callable[[int, int], T]) -> list[T]:
    """Computes something of samples, without gradients, in parts that fit; names those that do not."""
    plan = session.run_plan
    try:
        return session.batcher.evaluate(compute, plan.evaluation_costs(session.task, rows), plan.evaluation_limit)
    except DoesNotFitError as error:
        raise _with_samples(error, session.task, rows) from None


def _weighted(means: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return sum(weights[term] * mean for term, mean in means.items())


def _is_measured(step: int, total_steps: int) -> bool:
    """Decides for the `step`th of an attempt's `total_steps`, from 0."""
    warmup = min(MEASURE_WARMUP, total_steps - 1)
    return step >= warmup and (step - warmup) % MEASURE_INTERVAL == 0


def _check_finite(means: Mapping[str, float], step: int) -> None:
    if not all(math.isfinite(mean) for mean in means.values()):
        raise CanTrainError(
            "The loss is no longer finite", value=f"step {step}: {dict(means)}",
            remedy="Lower training.lr, set training.grad_clip_norm, or use training.precision=fp32",
        )  # fmt: skip
