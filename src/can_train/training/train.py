"""Trains one run: prepare, plan, epochs, steps, validation, checkpoints, judgement."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.config.resolved import ResolvedRun
from can_train.errors import CanTrainError, DoesNotFitError
from can_train.factors.resolve import factor_rule
from can_train.fit import random_state
from can_train.fit.micro_batcher import BatchResult, Losses, check_denominators, combine_shares, sum_by_term
from can_train.fit.random_state import Snapshot
from can_train.fit.rescue import PartDoesNotFitError, describe_out_of_memory
from can_train.io.atomic import write_json_atomic
from can_train.memory.meters import Meter, open_meter
from can_train.memory.out_of_memory import headline, is_host_memory, is_out_of_memory
from can_train.reporter import Reporter, SilentReporter
from can_train.task import Table, Task
from can_train.training.attempts import StopRequests
from can_train.training.distributed import RankFailedError, Ranks, rank_device
from can_train.training.loading import load_task
from can_train.training.observe import Attempt
from can_train.training.run_folder import RunFolder, make_run
from can_train.training.session import Parts, Session, check_inputs_unchanged, make_session, save


def take_step(session: Session, rows: NDArray[np.int64], *, ends_epoch: bool) -> dict[str, float]:
    """Takes one optimizer step on one logical batch; returns the terms' means."""
    progress = session.progress
    session.renew_if_thawed()
    # The reserve's own list, not a copy: it is emptied within the step, and nobody else may keep what was in it.
    held = session.model, session.optimization.optimizer, session.reserve.tensors, session.planner.reference_tensors
    with session.monitor.step(*held) as counted:
        own, result = _guarded_step(session, rows, ends_epoch=ends_epoch)
    for term, mean in result.means.items():
        progress.epoch_sums[term] = progress.epoch_sums.get(term, 0.0) + mean * len(rows)
    progress.epoch_samples += len(rows)
    progress.epoch_parts += len(result.micro_batches)
    progress.epoch_largest = max((progress.epoch_largest, *result.micro_batches))
    progress.epoch_ooms += result.ooms_rescued
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
    reports = ranks.gather(lambda: _own_share(session, rows))
    own, denominators = reports[ranks.rank]
    result = combine_shares([share for share, _ in reports])
    check_denominators(result, denominators, size=len(rows))
    _check_finite(result.means, session.progress.step)
    ranks.reduce_gradients(session.optimization.parameters)
    session.hear(ranks.gather(lambda: _move(session, ends_epoch=ends_epoch)))
    ranks.broadcast_buffers(session.model)
    return own, result


def _own_share(session: Session, rows: NDArray[np.int64]) -> tuple[BatchResult, dict[str, float]]:
    """Accumulates the gradient of this rank's share, and makes room for the step.

    Returns:
        What came of it, and the denominators of the whole logical batch.
    """
    optimization, device = session.optimization, session.meter.device
    _prepare(session, rows)
    generator = random_state.step_generator(seed=session.training.seed, step=session.progress.step)
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
    seed, step = session.training.seed, session.progress.step
    generator = random_state.before_step_generator(seed=seed, step=step)
    session.task.before_step(session.model, rows, step / session.total_steps, generator)


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
    return DoesNotFitError(error.rule, value=value, remedy=error.remedy, details=error.details)


def _tend_memory(session: Session, result: BatchResult) -> None:
    """What memory asks for between steps: the cache released in time, a rescue said, a leak noticed."""
    training, meter, step = session.training, session.meter, session.progress.step
    interval, threshold = training.cuda_empty_cache_interval, training.free_threshold_mib * 2**20
    too_full = threshold < math.inf and meter.free_bytes() < threshold
    if too_full or (interval and step % interval == 0):
        meter.release()
    if result.ooms_rescued:
        splits = f"step {step}: memory ran out {result.ooms_rescued} times; finished in {len(result.micro_batches)} micro-batches"
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


T = TypeVar("T")


def train(session: Session) -> None:
    """Trains until the last epoch or until patience ends; the best weights are in `session.best` afterwards.

    Raises:
        SystemExit: SIGTERM or SIGINT arrived; a checkpoint was saved first.
    """
    progress = session.progress
    epochs = session.training.epochs
    total = session.epochs.total_steps(epochs)
    session.ranks.on_every_rank(session.reserve.hold)
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
            session.hear(session.ranks.gather(lambda: session.stops.received))
            _leave_if_asked(session)
            if stopped_early:
                session.reporter.notice(
                    f"No better validation loss in {patience} epochs: stopping after {progress.epoch}"
                )
    # Judging has a peak of its own, from which nothing is learned.
    session.monitor.pause()
    ooms = session.ranks.gather(lambda: session.batcher.ooms_rescued)
    session.ooms_elsewhere = sum(ooms) - session.batcher.ooms_rescued


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


def _train_epoch(session: Session, stage: Any) -> None:
    progress, training = session.progress, session.training
    session.task_in_epoch = session.task.in_epoch(progress.epoch, training.epochs)
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
    of_ranks = session.ranks.gather(lambda: _validation_sums(session, rows[share]))
    sums, denominators = (sum_by_term(terms) for terms in zip(*of_ranks, strict=True))
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
        sum_by_term([{term: pair[which] for term, pair in part.items()} for part in parts]) for which in (0, 1)
    )
    return sums, denominators


def score(session: Session, rows: NDArray[np.int64], role: str = "") -> NDArray[np.float64]:
    """Scores samples with the model as it is, or with the reference model of a role, in parts that fit."""
    if role:
        assert session.reference_models is not None, "a task that asks for a role has reference models"
        return session.reference_models.score(role, rows)
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run.

    Attributes:
        folder: Where everything about it is.
        tables: The judgement as text.
        summary: The run in one sentence.
    """

    folder: RunFolder
    tables: Sequence[Table]
    summary: str


def train_new(run: ResolvedRun, reporter: Reporter, ranks: Ranks | None = None) -> Outcome:
    """Trains a run from its beginning and judges it. Its folder is made once its data has been read.

    Args:
        run: The resolved run.
        reporter: Where rank 0 says what it does; the others are silent.
        ranks: The processes that train it; None: this one.

    Raises:
        CanTrainError: Something that the user can mend.
        SystemExit: A signal ended it; what was trained is saved.
    """
    stops, ranks = StopRequests(), ranks or Ranks()
    reporter = reporter if ranks.is_first else SilentReporter()
    with stops.installed():
        meter = _meter(run, ranks)
        task = ranks.on_rank0_first(lambda: load_task(run, reporter))
        folder = RunFolder(ranks.on_rank0(lambda: make_run(run, reporter).path))
        reporter.notice(f"run {folder.run_id}")
        with _locked(folder, ranks), folder.attempts.recorded(stops, rank=ranks.rank):
            return _train(
                Parts(run=run, folder=folder, task=task, meter=meter, reporter=reporter, stops=stops, ranks=ranks)
            )


def train_on(
    run: ResolvedRun, folder: RunFolder, reporter: Reporter, stops: StopRequests, ranks: Ranks | None = None
) -> Outcome:
    """Trains a run that has a folder to its end, from its last checkpoint if it has one; shows one that has ended.

    Args:
        run: The resolved run.
        folder: Its folder.
        reporter: Where rank 0 says what it does; the others are silent.
        stops: Of the process.
        ranks: The processes that train it; None: this one.

    Raises:
        CanTrainError: Something that the user can mend.
        SystemExit: A signal ended it; what was trained is saved.
    """
    ranks = ranks or Ranks()
    reporter = reporter if ranks.is_first else SilentReporter()
    with stops.installed(), _locked(folder, ranks):
        meter = _meter(run, ranks)
        task = ranks.on_rank0_first(lambda: load_task(run, reporter))
        finished = ranks.on_rank0(folder.result)
        if finished is not None:
            return _outcome(task, folder, finished)
        with folder.attempts.recorded(stops, rank=ranks.rank):
            return _train(
                Parts(run=run, folder=folder, task=task, meter=meter, reporter=reporter, stops=stops, ranks=ranks)
            )


@contextmanager
def _locked(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Keeps other processes than the run's ranks out of it."""
    with ExitStack() as stack:
        ranks.on_rank0(lambda: stack.enter_context(folder.locked()))
        yield


def _meter(run: ResolvedRun, ranks: Ranks) -> Meter:
    """Opens the meter of this rank's device; the host's memory is for all that run there."""
    meter = ranks.on_every_rank(lambda: open_meter(rank_device(run.device, ranks)))
    if meter.is_host:
        meter.capacity_bytes //= ranks.sharing_host()
    return meter


def _train(parts: Parts) -> Outcome:
    try:
        return _attempt(parts)
    except DoesNotFitError as error:
        if error.details.capacity_bytes is None:
            error.details = describe_out_of_memory(parts.meter, error.details.need_bytes, known=error.details)
        raise
    except Exception as error:
        # Within micro-batches it is rescued; what runs out elsewhere (weights, a copy of them) cannot be.
        if not is_out_of_memory(error):
            raise
        message, of_host = headline(error), is_host_memory(error)
    details = describe_out_of_memory(parts.meter, None)
    raise DoesNotFitError(
        "What a run keeps on the device must fit beside its micro-batches",
        value=message,
        remedy="Another process may hold the memory (nvidia-smi); else choose a smaller model or a larger device",
        details=replace(details, of_host=details.of_host or of_host),
    )


def _attempt(parts: Parts) -> Outcome:
    run = parts.run
    torch.use_deterministic_algorithms(run.training.deterministic)
    parts.ranks.on_rank0(lambda: check_inputs_unchanged(parts.folder, parts.task))
    rule = factor_rule(run, parts.meter.key, parts.reporter, run_id=parts.folder.run_id)
    with parts.meter.active():
        session = make_session(parts, rule)
        with Attempt(run=run, folder=parts.folder, session=session):
            train(session)
            parts.ranks.close()
            if not parts.ranks.is_first:
                return Outcome(
                    folder=parts.folder, tables=(), summary=f"rank {parts.ranks.rank} trained; rank 0 judges"
                )
            release_training_memory(session)
            result = _result(run, parts.folder, session)
    write_json_atomic(parts.folder.result_path, result)
    return _outcome(parts.task, parts.folder, result)


def _result(run: ResolvedRun, folder: RunFolder, session: Session) -> dict[str, Any]:
    """Judges the best weights; returns what `result.json` holds."""
    session.model.load_state_dict(session.best)
    with session.reporter.stage("judging", unit="samples") as stage:

        def scored(rows: NDArray[np.int64], role: str = "") -> NDArray[np.float64]:
            scores = score(session, rows, role)
            stage.advance(len(rows))
            return scores

        judgement = session.task.judge(scored)
    progress = session.progress
    return {
        "run_id": folder.run_id,
        "key": run.key,
        "status": "finished",
        "epochs": progress.epoch,
        "steps": progress.step,
        "best_epoch": progress.best_epoch,
        "best_validation_loss": progress.best_loss,
        "parameters": sum(parameter.numel() for parameter in session.model.parameters() if parameter.requires_grad),
        "device": session.meter.key,
        "plan": session.run_plan.to_plain(),
        "reference_models": [asdict(asked) for asked in session.asked],
        "ooms_rescued": session.batcher.ooms_rescued + session.ooms_elsewhere,
        "micro_batch_size": session.largest_micro_batch or None,
        "predicted_peak_bytes": session.run_plan.predicted_peak_bytes,
        "peak_memory_bytes": session.peak_bytes or None,
        "peak_memory_pct": session.peak_share,
        "judgement": judgement,
    }


def _outcome(task: Task, folder: RunFolder, result: Mapping[str, Any]) -> Outcome:
    best = f"best validation loss {result['best_validation_loss']:.4g} after epoch {result['best_epoch']}"
    return Outcome(
        folder=folder,
        tables=task.tables(result["judgement"]),
        summary=f"{result['epochs']} epochs, {result['steps']} steps, {result['parameters']:,} parameters, {best}",
    )
