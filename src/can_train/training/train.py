"""Trains one run, top to bottom: prepare, plan, epochs, steps, validation, checkpoints, judgement, observation.

`session.ranks` stands for the processes that train the run together. With one process each of its methods just does
the work: `gather(work)` is `[work()]`, `on_rank0(work)` and `on_every_rank(work)` are `work()`.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from can_train.config.resolved import ResolvedRun, cache_folder
from can_train.errors import CanTrainError, DoesNotFitError
from can_train.factors.resolve import factor_rule
from can_train.fit import random_state
from can_train.fit.factor_rule import FactorRule
from can_train.fit.micro_batcher import BatchResult, Losses, check_denominators, combine_shares, sum_by_term
from can_train.fit.planner import Planner, RunPlan
from can_train.fit.random_state import Snapshot
from can_train.fit.rescue import describe_out_of_memory
from can_train.io.atomic import write_json_atomic
from can_train.memory.meters import Meter, open_meter
from can_train.memory.out_of_memory import headline, is_host_memory, is_out_of_memory
from can_train.reporter import Reporter, SilentReporter
from can_train.task import Table, Task, TaskInEpoch
from can_train.training.attempts import StopRequests
from can_train.training.distributed import RankFailedError, Ranks, rank_device
from can_train.training.inference import BatchedInference, InferenceDevice, Rows, with_samples
from can_train.training.loading import check_inputs_unchanged, fresh_model, load_task, start_from
from can_train.training.observe import Attempt
from can_train.training.reference_models import ReferenceModels
from can_train.training.report import plan_lines, reference_model_lines
from can_train.training.run_folder import RunFolder, make_run
from can_train.training.session import (
    Parts,
    Session,
    build_session,
    load_checkpoint,
    resolve_plans,
    restore,
    rewind_metrics,
    save,
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is shown of a finished run: its judgement as text, and one sentence."""

    folder: RunFolder
    tables: Sequence[Table]
    summary: str


def train_new(run: ResolvedRun, reporter: Reporter, ranks: Ranks | None = None) -> Outcome:
    """Trains a run from its beginning and judges it. Its folder is made once its data has been read.

    Raises:
        CanTrainError: The run cannot be trained as it is configured.
        SystemExit: A signal ended it; a checkpoint was saved.
    """
    stops, ranks = StopRequests(), ranks or Ranks()
    reporter = reporter if ranks.is_first else SilentReporter()
    with stops.installed():
        meter = _open_meter(run, ranks)
        task = ranks.on_rank0_first(lambda: load_task(run, reporter))
        # After the data has been read: a run whose data are missing leaves no folder behind.
        folder = RunFolder(ranks.on_rank0(lambda: make_run(run, reporter).path))
        reporter.notice(f"run {folder.run_id}")
        parts = Parts(run=run, folder=folder, task=task, meter=meter, reporter=reporter, stops=stops, ranks=ranks)
        with _locked(folder, ranks), folder.attempts.recorded(stops, rank=ranks.rank):
            return _train_and_judge(parts)


def train_on(
    run: ResolvedRun, folder: RunFolder, reporter: Reporter, stops: StopRequests, ranks: Ranks | None = None
) -> Outcome:
    """Trains a run that has a folder to its end, from its last checkpoint if it has one; shows one that has ended.

    Raises:
        CanTrainError: The run cannot be trained as it is configured.
        SystemExit: A signal ended it; a checkpoint was saved.
    """
    ranks = ranks or Ranks()
    reporter = reporter if ranks.is_first else SilentReporter()
    with stops.installed(), _locked(folder, ranks):
        meter = _open_meter(run, ranks)
        task = ranks.on_rank0_first(lambda: load_task(run, reporter))
        finished = ranks.on_rank0(folder.result)
        if finished is not None:
            return _outcome(task, folder, finished)
        parts = Parts(run=run, folder=folder, task=task, meter=meter, reporter=reporter, stops=stops, ranks=ranks)
        with folder.attempts.recorded(stops, rank=ranks.rank):
            return _train_and_judge(parts)


@contextmanager
def _locked(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Keeps all processes but the run's ranks out of its folder."""
    with ExitStack() as stack:
        ranks.on_rank0(lambda: stack.enter_context(folder.locked()))
        yield


def _open_meter(run: ResolvedRun, ranks: Ranks) -> Meter:
    meter = ranks.on_every_rank(lambda: open_meter(rank_device(run.device, ranks)))
    if meter.is_host:
        # All ranks of a machine share its memory.
        meter.capacity_bytes //= ranks.sharing_host()
    return meter


def _train_and_judge(parts: Parts) -> Outcome:
    """Trains and judges; an out-of-memory that could not be rescued becomes a `DoesNotFitError` with the device's
    state.
    """
    try:
        return _run_attempt(parts)
    except DoesNotFitError as error:
        if error.details.capacity_bytes is None:
            error.details = describe_out_of_memory(parts.meter, error.details.need_bytes, known=error.details)
        raise
    except Exception as error:
        # Within micro-batches it is rescued; what runs out elsewhere (weights, a copy of them) cannot be.
        if not is_out_of_memory(error):
            raise
        message, of_host = headline(error), is_host_memory(error)
    # After the except clause, which keeps the tensors of what failed alive.
    details = describe_out_of_memory(parts.meter, None)
    raise DoesNotFitError(
        "What a run keeps on the device must fit beside its micro-batches",
        value=message,
        remedy="Another process may hold the memory (nvidia-smi); else choose a smaller model or a larger device",
        details=replace(details, of_host=details.of_host or of_host),
    )


def _run_attempt(parts: Parts) -> Outcome:
    run, folder = parts.run, parts.folder
    torch.use_deterministic_algorithms(run.training.deterministic)
    parts.ranks.on_rank0(lambda: check_inputs_unchanged(folder, parts.task))
    rule = factor_rule(run, parts.meter.key, parts.reporter, run_id=folder.run_id)
    with parts.meter.active():
        session = make_session(parts, rule)
        # Writes the observation, from which later runs learn, when the block is left.
        with Attempt(run=run, folder=folder, session=session):
            train(session)
            # Only rank 0 judges; the others end here and free their devices.
            parts.ranks.close()
            if not parts.ranks.is_first:
                summary = f"rank {parts.ranks.rank} trained; rank 0 judges"
                return Outcome(folder=folder, tables=(), summary=summary)
            result = _result(session, folder)
    write_json_atomic(folder.result_path, result)
    return _outcome(parts.task, folder, result)


def make_session(parts: Parts, factor: FactorRule) -> Session:
    """Builds the model, makes or reads the plan, and restores the last checkpoint.

    Args:
        parts: What the attempt is made with.
        factor: How the safety factor of a plan that is made here is decided.
    """
    run, ranks, reporter = parts.run, parts.ranks, parts.reporter
    checkpoint = load_checkpoint(parts)
    model = ranks.on_every_rank(lambda: _initial_model(parts, begins=checkpoint is None))
    # The same seed may give other bits on another processor.
    ranks.broadcast([*model.parameters(), *model.buffers()])
    reference_models = ReferenceModels(
        task=parts.task,
        training=run.training,
        meter=parts.meter,
        reporter=reporter,
        cache=cache_folder(run.paths),
        ranks=ranks,
    )
    resident = reference_models.prepare(model, parts.folder.reference_models_path)
    planner = Planner(
        run=run,
        task=parts.task,
        model=model,
        meter=parts.meter,
        reporter=reporter,
        ranks=ranks.size,
        reference_tensors=resident,
    )
    plans = resolve_plans(planner, ranks, factor, parts.folder.plan_path)
    _report_plan(parts, plans[ranks.rank], reference_models)
    random_state.seed_rank(seed=run.training.seed, rank=ranks.rank, step=0)
    steps_done = 0 if checkpoint is None else checkpoint["progress"]["step"]
    session = build_session(parts, planner, plans, reference_models, steps_done=steps_done)
    if checkpoint is None:
        rewind_metrics(session, 0)
    else:
        restore(session, checkpoint)
        reporter.notice(f"Continuing at step {session.progress.step}")
    return session


def _initial_model(parts: Parts, *, begins: bool) -> nn.Module:
    model = fresh_model(parts.run, parts.task, parts.meter)
    if begins and parts.run.training.start_from:
        start_from(model, Path(parts.run.training.start_from))
    return model


def _report_plan(parts: Parts, plan: RunPlan, reference_models: ReferenceModels) -> None:
    lines = plan_lines(plan, parts.meter.key, parts.meter.capacity_bytes)
    parts.reporter.notice("\n".join(lines + reference_model_lines(reference_models.plans)))
    for notice in (*plan.plan.notices, *plan.notices):
        parts.reporter.notice(notice)


def train(session: Session) -> None:
    """Trains until the last epoch or until patience ends; the best weights are in `session.best` afterwards.

    Raises:
        SystemExit: SIGTERM or SIGINT arrived; a checkpoint was saved first.
    """
    progress, ranks = session.progress, session.ranks
    epochs, patience = session.training.epochs, session.training.patience
    ranks.on_every_rank(session.reserve.hold)
    # A signal inside the block is only noted: the step ends and is saved before the process does.
    with session.stops.deferred(), session.reporter.stage("training", total=session.total_steps, unit="steps") as stage:
        stage.advance(progress.step)
        while not progress.trained:
            _train_epoch(session, stage)
            if progress.epoch % session.training.val_interval == 0 or progress.epoch == epochs:
                _validate(session)
            stopped_early = bool(patience) and progress.epochs_without_gain >= patience
            progress.trained = progress.epoch >= epochs or stopped_early
            save(session)
            session.stop_signal = _first(ranks.gather(lambda: session.stops.received))
            _exit_if_stopped(session)
            if stopped_early:
                session.reporter.notice(
                    f"No better validation loss in {patience} epochs: stopping after {progress.epoch}"
                )
    # Judging has a peak of its own, from which nothing is learned.
    session.monitor.pause()
    session.ooms_elsewhere = sum(ranks.gather(lambda: session.batcher.ooms_rescued)) - session.batcher.ooms_rescued


def _train_epoch(session: Session, stage: Any) -> None:
    progress, training = session.progress, session.training
    task = session.task.in_epoch(progress.epoch, training.epochs)
    steps = session.epochs.steps(progress.epoch)
    started, samples_before = time.perf_counter(), progress.epoch_samples
    session.model.train()
    while progress.step_in_epoch < len(steps):
        ends_epoch = progress.step_in_epoch + 1 == len(steps)
        means = take_step(session, steps[progress.step_in_epoch], ends_epoch=ends_epoch, task=task)
        stage.advance(1, loss=_weighted(means, session.task.loss_weights))
        if session.stop_signal or progress.step % training.checkpoint_every == 0:
            save(session)
        _exit_if_stopped(session)
    seconds, peak = time.perf_counter() - started, session.monitor.peak_share
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
    progress.end_epoch()


def _exit_if_stopped(session: Session) -> None:
    """Ends the process for a signal that arrived on some rank; the caller has just saved."""
    if session.stop_signal:
        session.stops.received = session.stops.received or session.stop_signal
        session.reporter.notice(f"Stopped by a signal; saved at step {session.progress.step}")
        session.stops.exit()


def _first(signals: Sequence[int | None]) -> int | None:
    return next((signal for signal in signals if signal is not None), None)


def take_step(session: Session, rows: Rows, *, ends_epoch: bool, task: TaskInEpoch | None = None) -> dict[str, float]:
    """Takes one optimizer step on one logical batch; returns the means of the loss terms.

    Args:
        session: The session.
        rows: [R] samples of the batch.
        ends_epoch: Whether it is the last step of its epoch.
        task: As it is in the epoch; None: the session's task.
    """
    progress = session.progress
    snapshot, trainable = Snapshot(session.model, session.meter.device), session.optimization.trainable
    try:
        # On all ranks or on none: an error on one must not leave the others waiting in a later exchange.
        session.ranks.on_every_rank(lambda: _call_before_step(session, rows))
        # Before the monitored step: planning runs probes, whose memory is not the step's.
        session.replan_if_thawed()
        # The reserve's own list, not a copy: it is emptied within the step, and nobody else may keep what was in it.
        held = session.reserve.tensors, session.planner.reference_tensors, snapshot.copies
        with session.monitor.step(session.model, session.optimization.optimizer, *held) as counted:
            own, result = _optimizer_step(session, task or session.task, rows, ends_epoch=ends_epoch)
    except (DoesNotFitError, RankFailedError) as error:
        if isinstance(error, DoesNotFitError) or error.did_not_fit:
            # A later attempt takes the step again, perhaps with more memory.
            session.optimization.optimizer.zero_grad(set_to_none=True)
            snapshot.restore()
            session.optimization.set_trainable(trainable)
            save(session)
        raise
    progress.add_step(result, len(rows))
    session.note_run(own, counted=counted)
    _release_and_report(session, result)
    return result.means


def _call_before_step(session: Session, rows: Rows) -> None:
    seed, step = session.training.seed, session.progress.step
    generator = random_state.before_step_generator(seed=seed, step=step)
    session.task.before_step(session.model, rows, step / session.total_steps, generator)


def _optimizer_step(
    session: Session, task: TaskInEpoch, rows: Rows, *, ends_epoch: bool
) -> tuple[BatchResult, BatchResult]:
    """Accumulates the gradient of a logical batch and updates the weights.

    Returns:
        What this rank computed of the batch, and the whole.
    """
    ranks = session.ranks
    shares = ranks.gather(lambda: _accumulate(session, task, rows))
    own, denominators = shares[ranks.rank]
    result = combine_shares([share for share, _ in shares])
    # Parts whose denominators do not add up to the batch's would silently train with another gradient.
    check_denominators(result, denominators, size=len(rows))
    if not all(math.isfinite(mean) for mean in result.means.values()):
        raise CanTrainError(
            "The loss is no longer finite", value=f"step {session.progress.step}: {result.means}",
            remedy="Lower training.lr, set training.grad_clip_norm, or use training.precision=fp32",
        )  # fmt: skip
    ranks.reduce_gradients(session.optimization.parameters)
    session.stop_signal = _first(ranks.gather(lambda: _update_weights(session, ends_epoch=ends_epoch)))
    ranks.broadcast_buffers(session.model)
    return own, result


def _accumulate(session: Session, task: TaskInEpoch, rows: Rows) -> tuple[BatchResult, dict[str, float]]:
    """Accumulates the gradient of this rank's share of a logical batch, and makes room for the optimizer.

    Returns:
        The result of the share, and the denominators of the whole logical batch.
    """
    optimization, device = session.optimization, session.meter.device
    # A function of seed and step: a resumed or repeated step draws the same numbers.
    generator = random_state.step_generator(seed=session.training.seed, step=session.progress.step)
    # The whole batch, so that what couples its samples is drawn alike on all ranks; it computes what is asked of it.
    batch = task.logical_batch(rows, device, session.precision.dtype, generator)
    share = session.ranks.share(len(rows), lambda: session.shared_plan.training_costs(session.task, rows))

    def losses_of(start: int, stop: int) -> Losses:
        with session.precision.context(device):
            return batch.losses(session.model, share.start + start, share.start + stop)

    if share.start == share.stop:
        # A scaler that has never scaled refuses to step.
        optimization.scaler.scale(torch.zeros((), device=device))
    try:
        result = session.batcher.run_share(
            losses_of,
            session.run_plan.training_costs(session.task, rows[share]),
            denominators=batch.denominators,
            weights=session.task.loss_weights,
            scale=optimization.scaler.scale,
        )
    except DoesNotFitError as error:
        raise with_samples(error, session.task.describe, rows[share]) from None
    session.reserve.before_step()
    return result, dict(batch.denominators)


def _update_weights(session: Session, *, ends_epoch: bool) -> int | None:
    """Moves weights and schedule; returns the signal that this rank has received."""
    moved = session.optimization.step()
    session.batcher.stepped()
    # The schedule moves within the step, by epoch too, so that a checkpoint has both or neither.
    if ends_epoch if session.training.scheduler_interval == "epoch" else moved:
        session.optimization.scheduler.step()
    return session.stops.received


def _release_and_report(session: Session, result: BatchResult) -> None:
    """Between steps: releases the allocator's cache in time, and reports a rescue or a leak."""
    training, meter, step = session.training, session.meter, session.progress.step
    interval, threshold = training.cuda_empty_cache_interval, training.free_threshold_mib * 2**20
    too_full = threshold < math.inf and meter.free_bytes() < threshold
    if too_full or (interval and step % interval == 0):
        meter.release()
    if result.ooms_rescued:
        splits = f"memory ran out {result.ooms_rescued} times; finished in {len(result.micro_batches)} micro-batches"
        session.reporter.notice(f"step {step}: {splits}, with the same gradient")
    rise = session.leak_watch.after_step(meter.allocated_bytes())
    if rise:
        leak = f"step {step}: the memory in use between steps has risen by {rise / 2**20:.1f} MiB without falling"
        session.reporter.notice(f"{leak}: something keeps tensors from step to step (losses never detached, say)")


def _validate(session: Session) -> None:
    """Computes the validation loss; keeps the weights if they are the best so far."""
    progress = session.progress
    loss = validation_loss(session)
    session.log(step=progress.step, epoch=progress.epoch, validation_loss=loss)
    if loss < progress.best_loss or progress.best_epoch == 0:
        progress.best_loss, progress.best_epoch, progress.epochs_without_gain = loss, progress.epoch, 0
        if session.ranks.is_first:
            # On the host: a second copy on the device would take room from the batch.
            with session.meter.host():
                weights = session.model.state_dict()
                session.best = {name: value.detach().cpu().clone() for name, value in weights.items()}
    else:
        progress.epochs_without_gain += 1


def validation_loss(session: Session) -> float:
    """Returns the weighted loss over the validation samples, of which each rank computes a share."""
    task, device = session.task, session.meter.device
    rows = task.validation_rows
    share = session.ranks.share(len(rows), lambda: session.shared_plan.evaluation_costs(task, rows))
    session.model.eval()

    def losses_of(part: Rows) -> dict[str, tuple[float, float]]:
        batch = task.logical_batch(part, device, session.precision.dtype, None)
        with torch.inference_mode(), session.precision.context(device):
            losses = batch.losses(session.model, 0, len(part))
        return {term: (float(total), denominator) for term, (total, denominator) in losses.items()}

    def sums() -> tuple[dict[str, float], dict[str, float]]:
        parts = _inference(session).run(rows[share], losses_of) if share.stop > share.start else []
        totals = sum_by_term([{term: total for term, (total, _) in part.items()} for part in parts])
        return totals, sum_by_term([{term: denominator for term, (_, denominator) in part.items()} for part in parts])

    totals, denominators = (sum_by_term(terms) for terms in zip(*session.ranks.gather(sums), strict=True))
    return _weighted({term: totals[term] / (denominators[term] or 1.0) for term in totals}, task.loss_weights)


def _inference(session: Session) -> BatchedInference:
    """Makes what runs the session's model without gradients, by the limits of its plan."""
    plan, task = session.run_plan, session.task
    return BatchedInference(
        batcher=session.batcher,
        model=session.model,
        device=InferenceDevice(meter=session.meter, precision=session.precision),
        costs_of=lambda rows: plan.evaluation_costs(task, rows),
        limit=plan.evaluation_limit,
        describe=task.describe,
    )


def _weighted(means: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return sum(weights[term] * mean for term, mean in means.items())


def _result(session: Session, folder: RunFolder) -> dict[str, Any]:
    """Judges the best weights; returns what `result.json` holds."""
    # Judging needs neither optimizer state nor gradients.
    session.optimization.optimizer.state.clear()
    session.optimization.optimizer.zero_grad(set_to_none=True)
    session.meter.release()
    session.model.load_state_dict(session.best)
    session.model.eval()
    inference = _inference(session)
    with session.reporter.stage("judging", unit="samples") as stage:

        def score(rows: Rows, role: str = "") -> NDArray[np.float64]:
            scores = session.reference_models.score(role, rows) if role else inference.scores(session.task, rows)
            stage.advance(len(rows))
            return scores

        judgement = session.task.judge(score)
    progress, monitor = session.progress, session.monitor
    return {
        "run_id": folder.run_id,
        "key": session.planner.run.key,
        "status": "finished",
        "epochs": progress.epoch,
        "steps": progress.step,
        "best_epoch": progress.best_epoch,
        "best_validation_loss": progress.best_loss,
        "parameters": sum(parameter.numel() for parameter in session.model.parameters() if parameter.requires_grad),
        "device": session.meter.key,
        "plan": session.run_plan.to_plain(),
        "reference_models": [asdict(plan) for plan in session.reference_models.plans],
        "ooms_rescued": session.batcher.ooms_rescued + session.ooms_elsewhere,
        "micro_batch_size": session.largest_micro_batch or None,
        "predicted_peak_bytes": session.run_plan.predicted_peak_bytes,
        "peak_memory_bytes": monitor.peak_bytes or None,
        "peak_memory_pct": monitor.peak_share,
        "judgement": judgement,
    }


def _outcome(task: Task, folder: RunFolder, result: Mapping[str, Any]) -> Outcome:
    best = f"best validation loss {result['best_validation_loss']:.4g} after epoch {result['best_epoch']}"
    return Outcome(
        folder=folder,
        tables=task.tables(result["judgement"]),
        summary=f"{result['epochs']} epochs, {result['steps']} steps, {result['parameters']:,} parameters, {best}",
    )
