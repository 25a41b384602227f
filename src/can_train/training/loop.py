"""The training loop: epochs of logical batches, validation, early stopping, checkpoints. Reads from top to bottom; how
a batch is computed belongs to the engine, what it is to the task.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.engine.batch_result import added
from can_train.errors import DoesNotFitError
from can_train.training import randomness
from can_train.training.epochs import in_epoch
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
    session.ranks.each(session.reserve.hold)
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
            session.hear(session.ranks.together(lambda: session.stops.received))
            _leave_if_asked(session)
            if stopped_early:
                session.reporter.notice(
                    f"No better validation loss in {patience} epochs: stopping after {progress.epoch}"
                )
    # Judging has a peak of its own, from which nothing is learned.
    session.monitor.pause()
    ooms = session.ranks.together(lambda: session.batcher.ooms)
    session.ooms_elsewhere = sum(ooms) - session.batcher.ooms


def _leave_if_asked(session: Session) -> None:
    """Ends the process for a signal that arrived on some rank; the caller has just saved."""
    if session.stop_signal:
        session.stops.received = session.stops.received or session.stop_signal
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
    session.best = state["best"] if session.ranks.is_first else {}
    session.optimization.load_state_dict(state["optimization"])
    session.reserve.expect(session.planner.optimizer_memory(), held_bytes=session.optimization.state_bytes)
    session.progress = Progress(**state["progress"])
    of_ranks = [state, *state.get("other_ranks", ())]
    if len(of_ranks) == session.ranks.size:
        own = of_ranks[session.ranks.rank]
        session.batcher.load_state_dict(own["micro_batches"])
        randomness.restore(own["randomness"])
    elif session.ranks.is_first:
        randomness.restore(state["randomness"])
    else:
        rank, step = session.ranks.rank, session.progress.step
        randomness.seed_rank(seed=session.training.seed, rank=rank, step=step)
    session.rewind_metrics(state["metrics_lines"])


def _train_epoch(session: Session, stage: Any) -> None:
    progress, training = session.progress, session.training
    session.task_in_epoch = in_epoch(session.task, progress.epoch, training.epochs)
    steps = session.epochs.steps(progress.epoch)
    started, samples_before = time.perf_counter(), progress.epoch_samples
    session.model.train()
    while progress.step_in_epoch < len(steps):
        ends_epoch = progress.step_in_epoch + 1 == len(steps)
        means = take_step(session, steps[progress.step_in_epoch], ends_epoch=ends_epoch)
        stage.advance(1, loss=_weighted(means, session.task.loss_weights))
        if session.stop_signal or progress.step % training.checkpoint_every == 0:
            save(session)
        _leave_if_asked(session)
    seconds, peak = time.perf_counter() - started, session.peak_share
    session.log(
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
    session.log(step=progress.step, epoch=progress.epoch, validation_loss=loss)
    if loss < progress.best_loss or progress.best_epoch == 0:
        progress.best_loss, progress.best_epoch, progress.epochs_without_gain = loss, progress.epoch, 0
        if session.ranks.is_first:
            session.best = _on_host(session)
    else:
        progress.epochs_without_gain += 1


def _on_host(session: Session) -> dict[str, Any]:
    """Copies the weights off the device."""
    with session.meter.host():
        return {name: value.detach().cpu().clone() for name, value in session.model.state_dict().items()}


def validation_loss(session: Session) -> float:
    """Returns the weighted loss over the validation samples, of which each rank computes a share."""
    rows = session.task.validation_rows
    share = session.share(rows, session.shared_plan.evaluation_costs)
    of_ranks = session.ranks.together(lambda: _validation_sums(session, rows[share]))
    sums, denominators = (added(terms) for terms in zip(*of_ranks, strict=True))
    return _weighted({term: sums[term] / (denominators[term] or 1.0) for term in sums}, session.task.loss_weights)


def _validation_sums(session: Session, rows: NDArray[np.int64]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns each term's sum and denominator over some samples, computed in parts that fit."""
    device = session.meter.device
    session.model.eval()

    def losses_of(start: int, stop: int) -> dict[str, tuple[float, float]]:
        batch = session.task.logical_batch(rows[start:stop], device, session.precision.dtype, None)
        with torch.inference_mode(), session.precision.context(device):
            losses = batch.losses(session.model, 0, stop - start)
        return {term: (float(total), denominator) for term, (total, denominator) in losses.items()}

    parts = _in_parts(session, rows, losses_of) if len(rows) else []
    sums, denominators = (
        added([{term: pair[which] for term, pair in part.items()} for part in parts]) for which in (0, 1)
    )
    return sums, denominators


def score(session: Session, rows: NDArray[np.int64], role: str = "") -> NDArray[np.float64]:
    """Scores samples with the model as it is, or with the companion of a role, in parts that fit."""
    if role:
        assert session.companions is not None, "a task that asks for a role has companions"
        return session.companions.score(role, rows)
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
