"""The training loop: epochs of logical batches, validation, early stopping, checkpoints. Reads from top to bottom; how
a batch is computed belongs to the engine, what it is to the task.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.errors import DoesNotFitError
from can_train.training import randomness
from can_train.training.state import Progress, Session, save
from can_train.training.step import take_step, with_samples

T = TypeVar("T")


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
    # Judging has a peak of its own, from which nothing is learned.
    session.monitor.pause()


def _leave_if_asked(session: Session) -> None:
    """Ends the process for a signal that arrived; the caller has just saved."""
    if session.stops.received:
        session.reporter.notice(f"Stopped by a signal; saved at step {session.progress.step}")
        session.stops.exit()


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
    session.reserve.expect(session.planner.optimizer_memory(), held_bytes=session.optimization.state_bytes)
    session.batcher.load_state_dict(state["micro_batches"])
    session.progress = Progress(**state["progress"])
    randomness.restore(state["randomness"])
    session.metrics.rewind(state["metrics_lines"])


def _train_epoch(session: Session, stage: Any) -> None:
    progress, training = session.progress, session.training
    steps = session.epochs.steps(progress.epoch)
    started, samples_before = time.perf_counter(), progress.epoch_samples
    session.model.train()
    while progress.step_in_epoch < len(steps):
        ends_epoch = progress.step_in_epoch + 1 == len(steps)
        means = take_step(session, steps[progress.step_in_epoch], ends_epoch=ends_epoch)
        stage.advance(1, loss=_weighted(means, session.task.loss_weights))
        if session.stops.received or progress.step % training.checkpoint_every == 0:
            save(session)
        _leave_if_asked(session)
    seconds, peak = time.perf_counter() - started, session.peak_share
    session.metrics.append(
        step=progress.step,
        epoch=progress.epoch + 1,
        train={term: total / progress.epoch_samples for term, total in progress.epoch_sums.items()},
        lr=session.optimization.lr,
        samples_per_second=round((progress.epoch_samples - samples_before) / seconds, 1) if seconds else None,
        peak_memory_pct=None if peak is None else round(peak, 5),
        batch_size_safety_factor=session.plan.safety_factor,
        micro_batch_size=progress.epoch_largest,
        micro_batches=progress.epoch_parts,
        ooms_rescued=progress.epoch_ooms,
    )
    progress.epoch += 1
    progress.step_in_epoch, progress.epoch_sums, progress.epoch_samples = 0, {}, 0
    progress.epoch_parts, progress.epoch_largest, progress.epoch_ooms = 0, 0, 0


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
            scores = session.task.scores(session.model, rows[start:stop], device, dtype)
        return np.asarray(scores.double().cpu())

    return np.concatenate(_in_parts(session, rows, scores_of))


def _in_parts(session: Session, rows: NDArray[np.int64], compute: Callable[[int, int], T]) -> list[T]:
    """Computes something of samples, without gradients, in parts that fit; names those that do not."""
    plan = session.run_plan
    try:
        return session.batcher.evaluate(compute, plan.evaluation_costs(session.task, rows), plan.evaluation_limit)
    except DoesNotFitError as error:
        raise with_samples(error, session.task, rows) from None


def _weighted(means: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return sum(weights[term] * mean for term, mean in means.items())
