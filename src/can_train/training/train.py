"""Trains one run, top to bottom: prepare, plan, epochs, steps, validation, checkpoints, judgement, observation.

`session.ranks` stands for the processes that train the run together. With one process each of its methods just does
the work: `gather(work)` is `[work()]`, `on_rank0(work)` and `on_every_rank(work)` are `work()`.
"""

import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from can_train.config.resolved import ResolvedRun, cache_folder, state_dir
from can_train.errors import RUN_FAILED, CanTrainError, DoesNotFitError, FailedRunError, OutOfMemoryDetails, StateError
from can_train.factors.observations import Device, Observation, Started, write_record
from can_train.factors.observations import Outcome as AttemptOutcome
from can_train.factors.store import factor_rule, memory_fingerprint, next_time, policy_options, store_of
from can_train.fit.factor_rule import FactorRule
from can_train.fit.micro_batcher import BatchResult, Losses, check_denominators, combine_shares, sum_by_term
from can_train.fit.optimizer import Snapshot, seed_rank, step_generator
from can_train.fit.planner import Planner, RunPlan
from can_train.fit.rescue import describe_out_of_memory
from can_train.io.records import this_host, write_json_atomic
from can_train.memory.meters import Meter, open_meter
from can_train.memory.out_of_memory import headline, is_host_memory, is_out_of_memory, without_others
from can_train.reporter import LoggedReporter, Reporter, SilentReporter
from can_train.task import Table, Task, TaskInEpoch
from can_train.training.distributed import RankFailedError, RankGoneError, Ranks, rank_device
from can_train.training.inference import BatchedInference, InferenceDevice, Rows, with_samples
from can_train.training.loading import check_inputs_unchanged, fresh_model, load_task, start_from
from can_train.training.recording import rewind_steps, write_predictions
from can_train.training.reference_models import ReferenceModels
from can_train.training.report import plan_details, plan_summary, reference_model_lines
from can_train.training.run_folder import RunFolder, SlurmContext, StopRequests, make_run, resume_hint
from can_train.training.session import Parts, Session, load_checkpoint, resolve_plans
from can_train.training.trackers import TrackedRun, Tracker, check_packages, scores, tracked


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is shown of a finished run: its judgement as text, in short and in full, and one sentence."""

    folder: RunFolder
    summary_tables: Sequence[Table]
    tables: Sequence[Table]
    summary: str


def train_new(
    run: ResolvedRun,
    reporter: Reporter,
    ranks: Ranks | None = None,
    *,
    made: Callable[[RunFolder], object] = lambda folder: None,
) -> Outcome:
    """Trains a run from its beginning and judges it. Its folder is made once its data has been read; `made` is called
    with it then.

    Raises:
        CanTrainError: The run cannot be trained as it is configured.
        SystemExit: A signal ended it; a checkpoint was saved.
    """
    stops, ranks = StopRequests(), ranks or Ranks()
    ranks.on_rank0(lambda: _check_trackers(run))
    log = LoggedReporter(reporter)
    reporter = log if ranks.is_first else SilentReporter()
    with stops.installed(), ExitStack() as lock:
        meter, task = _prepare(run, reporter, ranks)
        # After the data has been read: a run whose data are missing leaves no folder behind.
        folder = RunFolder(ranks.on_rank0(lambda: make_run(run, reporter).path))
        made(folder)
        reporter.notice(f"This is run {folder.run_id}")
        # Keeps all processes but the run's ranks out of its folder.
        ranks.on_rank0(lambda: lock.enter_context(folder.locked()))
        ranks.on_rank0(lambda: lock.enter_context(logged(folder, log, stops)))
        return _train_and_judge(Parts(run=run, folder=folder, task=task, meter=meter, reporter=reporter,
                                      stops=stops, ranks=ranks))  # fmt: skip


def train_on(
    run: ResolvedRun, folder: RunFolder, reporter: Reporter, stops: StopRequests, ranks: Ranks | None = None
) -> Outcome:
    """Trains a run that has a folder to its end, from its last checkpoint if it has one; shows one that has ended.

    Raises:
        CanTrainError: The run cannot be trained as it is configured.
        SystemExit: A signal ended it; a checkpoint was saved.
    """
    ranks = ranks or Ranks()
    log = LoggedReporter(reporter)
    reporter = log if ranks.is_first else SilentReporter()
    with stops.installed(), ExitStack() as lock:
        ranks.on_rank0(lambda: lock.enter_context(folder.locked()))
        finished = ranks.on_rank0(folder.result)
        if finished is None:
            ranks.on_rank0(lambda: _check_trackers(run))
            ranks.on_rank0(lambda: lock.enter_context(logged(folder, log, stops)))
        meter, task = _prepare(run, reporter, ranks)
        if finished is not None:
            return _outcome(task, folder, finished)
        return _train_and_judge(Parts(run=run, folder=folder, task=task, meter=meter, reporter=reporter,
                                      stops=stops, ranks=ranks))  # fmt: skip


@contextmanager
def logged(folder: RunFolder, log: LoggedReporter, stops: StopRequests) -> Iterator[None]:
    """Writes to the run's log what is reported in the block, and the error that ends it; says how the run goes on where
    a person stopped it.
    """
    job = SlurmContext.from_environment().job_id
    process = f"process {os.getpid()} of {this_host()}" + (f", job {job}" if job else "")
    with log.writing_to(folder.log_path, f"--- {datetime.now():%Y-%m-%d %H:%M:%S}, {process}"):
        try:
            yield
        except CanTrainError as error:
            log.write(f"error: {error}")
            raise
        except Exception:
            log.write(traceback.format_exc())
            raise
        except SystemExit:
            # In a job it is mostly the scheduler that sends SIGTERM, and the job starts again by itself.
            by_person = (signal.SIGINT,) if job else (signal.SIGINT, signal.SIGTERM)
            if stops.received in by_person:
                log.notice(resume_hint(folder))
            raise


def _prepare(run: ResolvedRun, reporter: Reporter, ranks: Ranks) -> tuple[Meter, Task]:
    """Opens the device and reads the data."""
    meter = ranks.on_every_rank(lambda: open_meter(rank_device(run.device, ranks)))
    if meter.is_host:
        # All ranks of a machine share its memory.
        meter.capacity_bytes //= ranks.sharing_host()
    return meter, ranks.on_rank0_first(lambda: load_task(run, reporter))


def _train_and_judge(parts: Parts) -> Outcome:
    """Trains and judges; an out-of-memory that could not be rescued becomes a `DoesNotFitError` with the device's
    state.
    """
    # The trackers are waited for last, when all that matters is on the disk.
    with _tracked(parts) as parts.trackers, parts.folder.attempts.recorded(parts.stops, rank=parts.ranks.rank):
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
        smaller = "choose a smaller model (--size student) or a larger device"
        remedy = without_others(details.foreign_bytes, smaller)
        raise DoesNotFitError("What a run keeps on the device must fit beside its micro-batches", value=message,
                              remedy=remedy, details=replace(details, of_host=details.of_host or of_host))  # fmt: skip


def _check_trackers(run: ResolvedRun) -> None:
    if run.paths.trackers:
        check_packages(run.paths.trackers)


def _tracked(parts: Parts) -> AbstractContextManager[Sequence[Tracker]]:
    """Shows the block in the trackers that the run has, on rank 0."""
    run, folder = parts.run, parts.folder
    if not (run.paths.trackers and parts.ranks.is_first):
        return nullcontext(())
    about = TrackedRun(run_id=folder.run_id, folder=str(folder.path.resolve()), dataset=run.dataset.name, key=run.key,
                       settings=run.config)  # fmt: skip
    return tracked(about, run.paths.trackers, parts.reporter)


def _run_attempt(parts: Parts) -> Outcome:
    folder = parts.folder
    torch.use_deterministic_algorithms(parts.training.deterministic)
    parts.ranks.on_rank0(lambda: check_inputs_unchanged(folder, parts.task))
    rule = factor_rule(parts.run, parts.meter.key, parts.reporter, run_id=folder.run_id)
    with parts.meter.active():
        session = make_session(parts, rule)
        # Writes the observation, from which later runs learn, when the block is left.
        with observe(session):
            train(session)
            # Only rank 0 judges; the others end here and free their devices.
            parts.ranks.close()
            if not parts.ranks.is_first:
                summary = f"rank {parts.ranks.rank} trained; rank 0 judges"
                return Outcome(folder=folder, summary_tables=(), tables=(), summary=summary)
            result = _result(session)
            session.track(scores(result["judgement"]))
    write_json_atomic(folder.result_path, result)
    return _outcome(parts.task, folder, result)


def make_session(parts: Parts, factor: FactorRule) -> Session:
    """Builds the model, makes or reads the plan, and restores the last checkpoint.

    Args:
        parts: What the attempt is made with.
        factor: How the safety factor of a plan that is made here is decided.
    """
    run, task, meter, reporter, ranks = parts.run, parts.task, parts.meter, parts.reporter, parts.ranks
    checkpoint = load_checkpoint(parts)

    def initial_model() -> nn.Module:
        model = fresh_model(run, task, meter)
        if checkpoint is None and run.training.start_from:
            start_from(model, Path(run.training.start_from))
        return model

    model = ranks.on_every_rank(initial_model)
    # The same seed may give other bits on another processor.
    ranks.broadcast([*model.parameters(), *model.buffers()])
    references = ReferenceModels(task=task, training=run.training, meter=meter, reporter=reporter,
                                 cache=cache_folder(run.paths), ranks=ranks)  # fmt: skip
    resident = references.prepare(model, parts.folder.reference_models_path)
    planner = Planner(run=run, task=task, model=model, meter=meter, reporter=reporter, ranks=ranks.size,
                      reference_tensors=resident)  # fmt: skip
    plans = resolve_plans(planner, ranks, factor, parts.folder.plan_path)
    _show_plan(parts, plans[ranks.rank], references)
    seed_rank(seed=run.training.seed, rank=ranks.rank, step=0)
    steps_done = 0 if checkpoint is None else checkpoint["progress"]["step"]
    session = Session(**vars(parts), planner=planner, plans=plans, steps_done=steps_done, reference_models=references)
    if checkpoint is not None:
        session.restore(checkpoint)
        reporter.notice(f"Continuing at step {session.progress.step}")
        if parts.folder.goes_on_for_longer(session.progress.step):
            epochs, lr = parts.training.epochs, session.optimization.lr
            text = f"The run now has {epochs} epochs; from here on its learning rate, now {lr:.3g}, is that of a run"
            reporter.notice(f"{text} of {epochs}")
    if ranks.is_first:
        # What followed the checkpoint is trained, and logged, once more.
        session.metrics.rewind(0 if checkpoint is None else checkpoint["metrics_lines"])
        rewind_steps(session.folder.path, steps_done)
    return session


def _show_plan(parts: Parts, plan: RunPlan, references: ReferenceModels) -> None:
    meter, reporter = parts.meter, parts.reporter
    reporter.notice("\n".join(plan_summary(plan, meter.key, meter.capacity_bytes)))
    reporter.detail("\n".join([*plan_details(plan), *reference_model_lines(references.plans)]))
    for notice in (*plan.plan.notices, *plan.notices):
        reporter.notice(notice)


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
            # A run that goes on may have come to its new end already.
            if progress.epoch < epochs:
                _train_epoch(session, stage)
            if progress.epoch % session.training.val_interval == 0 or progress.epoch == epochs:
                _validate(session)
            stopped_early = bool(patience) and progress.epochs_without_gain >= patience
            progress.trained = progress.epoch >= epochs or stopped_early
            session.save()
            session.stop_signal = _first_signal(ranks.gather(lambda: session.stops.received))
            _exit_if_stopped(session)
            if stopped_early:
                text = f"No better validation loss in {patience} epochs: stopping after {progress.epoch}"
                session.reporter.notice(text)
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
            session.save()
        _exit_if_stopped(session)
    seconds, peak = time.perf_counter() - started, session.monitor.peak_share
    session.log(
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


def _first_signal(received: Sequence[int | None]) -> int | None:
    return next(filter(None, received), None)


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
        share, seed = progress.step / session.total_steps, session.training.seed
        generator = step_generator(seed=seed, step=progress.step, before=True)
        # On all ranks or on none: an error on one must not leave the others waiting in a later exchange.
        session.ranks.on_every_rank(lambda: session.task.before_step(session.model, rows, share, generator))
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
            session.save()
        raise
    progress.add_step(result, len(rows))
    session.note_run(own, counted=counted)
    session.record_step(result, loss=_weighted(result.means, session.task.loss_weights))
    _release_and_report(session, result)
    return result.means


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
        raise _no_longer_finite(session, f"step {session.progress.step}", result.means)
    ranks.reduce_gradients(session.optimization.parameters)
    session.stop_signal = _first_signal(ranks.gather(lambda: _update_weights(session, ends_epoch=ends_epoch)))
    ranks.broadcast_buffers(session.model)
    return own, result


def _no_longer_finite(session: Session, where: str, losses: Mapping[str, float]) -> FailedRunError:
    training = session.training
    half = " or full precision, --precision fp32" if training.precision in ("fp16", "bf16") else ""
    return FailedRunError(
        "The loss is no longer finite",
        value=", ".join([where, *(f"{term} {loss:g}" for term, loss in losses.items())]),
        remedy=f"Train anew with a lower learning rate, --lr {training.lr / 10:g}, or with clipped gradients, "
        f"--grad-clip-norm 1{',' if half else ''}{half}",
    )


def _accumulate(session: Session, task: TaskInEpoch, rows: Rows) -> tuple[BatchResult, dict[str, float]]:
    """Accumulates the gradient of this rank's share of a logical batch, and makes room for the optimizer.

    Returns:
        The result of the share, and the denominators of the whole logical batch.
    """
    optimization, device = session.optimization, session.meter.device
    # A function of seed and step: a resumed or repeated step draws the same numbers.
    generator = step_generator(seed=session.training.seed, step=session.progress.step)
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
    if not math.isfinite(loss):
        raise _no_longer_finite(session, f"epoch {progress.epoch}", {"validation loss": loss})
    session.log(epoch=progress.epoch, validation_loss=loss)
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

    def losses_of(part: Rows) -> tuple[dict[str, float], dict[str, float]]:
        batch = task.logical_batch(part, device, session.precision.dtype, None)
        with torch.inference_mode(), session.precision.context(device):
            losses = batch.losses(session.model, 0, len(part))
        totals = {term: float(total) for term, (total, _) in losses.items()}
        return totals, {term: denominator for term, (_, denominator) in losses.items()}

    def sums() -> tuple[dict[str, float], dict[str, float]]:
        parts = _inference(session).run(rows[share], losses_of) if share.stop > share.start else []
        return sum_by_term([totals for totals, _ in parts]), sum_by_term([denominators for _, denominators in parts])

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


def _result(session: Session) -> dict[str, Any]:
    """Judges the best weights; returns what `result.json` holds."""
    # Judging needs neither optimizer state nor gradients.
    session.optimization.optimizer.state.clear()
    session.optimization.optimizer.zero_grad(set_to_none=True)
    session.meter.release()
    session.model.load_state_dict(session.best)
    session.model.eval()
    inference = _inference(session)
    known: dict[tuple[str, bytes], NDArray[np.float64]] = {}
    with session.reporter.stage("judging", unit="samples") as stage:

        def score(rows: Rows, role: str = "") -> NDArray[np.float64]:
            scores = session.reference_models.score(role, rows) if role else inference.scores(session.task, rows)
            stage.advance(len(rows))
            known[role, rows.tobytes()] = scores
            return scores

        def known_score(rows: Rows, role: str = "") -> NDArray[np.float64]:
            scores = known.get((role, rows.tobytes()))
            return score(rows, role) if scores is None else scores

        judgement = session.task.judge(score)
        predictions = session.task.predictions(judgement, known_score)
    try:
        write_predictions(session.folder.predictions_path, predictions)
    except StateError as error:
        session.reporter.notice(f"The run's report will have no curves. {error}")
    progress, monitor = session.progress, session.monitor
    return {
        "run_id": session.folder.run_id,
        "key": session.run.key,
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
    counts = ((result["epochs"], "epoch"), (result["steps"], "step"), (result["parameters"], "parameter"))
    done = ", ".join(f"{count:,} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    best = f"best validation loss {result['best_validation_loss']:.4g} after epoch {result['best_epoch']}"
    judgement = result["judgement"]
    return Outcome(folder=folder, summary_tables=task.summary_tables(judgement), tables=task.tables(judgement),
                   summary=f"{done}, {best}")  # fmt: skip


@contextmanager
def observe(session: Session) -> Iterator[None]:
    """Records the block as an attempt, for later runs to learn from: that it began, how it ended and what memory it
    took. An out-of-memory leaves the block as `DoesNotFitError`.
    """
    run, meter, state = session.run, session.meter, state_dir(session.run.paths)
    # The batcher of a resumed run also counts those of earlier attempts.
    ooms_before = session.batcher.ooms_rescued
    begun: dict[str, Any] = {
        "run_id": session.folder.run_id,
        "attempt": session.ranks.on_rank0(lambda: session.folder.attempts.current),
        "rank": session.ranks.rank,
        "key": run.key,
        "device": Device(key=meter.key, name=meter.name, total_bytes=meter.total_bytes, driver=meter.driver),
        "start_time": next_time(state),
    }
    started = Started(**begun, host=this_host(), pid=os.getpid())
    _try_to_write(session, lambda: write_record(state, started))
    outcome: AttemptOutcome = "error"
    try:
        yield
        outcome = "rescued" if session.batcher.ooms_rescued > ooms_before else "ok"
    except (SystemExit, KeyboardInterrupt, RankFailedError, RankGoneError):
        # A failure of another rank says nothing of the device here.
        outcome = "interrupted"
        raise
    except CanTrainError as error:
        error.exit_code = RUN_FAILED
        outcome = "oom" if isinstance(error, DoesNotFitError) else outcome
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        outcome = "oom"
        rule = "Memory ran out where nothing could be undone (an optimizer step, or code outside the micro-batches)"
        found = f"step {session.progress.step}, micro-batches of up to {session.plan.largest_micro_batch} samples"
        remedy = f"The run goes on from its last checkpoint: can-train resume {session.folder.run_id}"
        failed = DoesNotFitError(rule, value=found, remedy=remedy, details=OutOfMemoryDetails(should_fit=True))
        failed.exit_code = RUN_FAILED
        raise failed from error
    finally:
        # What remains of the record serves the report alone: the error, if there is one, says more.
        with suppress(OSError):
            session.steps.flush()

        def write() -> None:
            write_record(state, _observation(session, begun, outcome, session.batcher.ooms_rescued - ooms_before))
            store_of(run).refresh_export()

        _try_to_write(session, write)


def _observation(session: Session, begun: Mapping[str, Any], outcome: AttemptOutcome, ooms: int) -> Observation:
    run, run_plan, plan, monitor = session.run, session.run_plan, session.plan, session.monitor
    predicted, oom_cost = run_plan.predicted_peak_bytes, session.batcher.oom_cost
    cost_after_oom = 0.0 if oom_cost is None else session.cost_after_rescue
    searched = run_plan.limits.training if run_plan.limits is not None and plan.safety_factor is not None else None
    # A capped search does not know where a share of its limit leads.
    line = None if searched is None or searched.capped else searched
    return Observation(
        **begun,
        size=run.size,
        end_time=next_time(state_dir(run.paths)),
        outcome=outcome,
        factor=run_plan.factor.factor,
        factor_reason=run_plan.factor.reason,
        capacity_bytes=session.meter.capacity_bytes,
        peak_allocated_bytes=monitor.peak_bytes or None,
        peak_reserved_bytes=monitor.peak_reserved_bytes or None,
        predicted_peak_bytes=None if predicted is None else round(predicted),
        predicted_base_bytes=None if line is None else round(line.model.base_bytes),
        predicted_full_bytes=None if line is None else round(line.peak_bytes(line.tuned_limit)),
        tuned_limit=None if searched is None else round(searched.tuned_limit),
        safe_limit=None if searched is None else round(plan.rules.safe_limit),
        used=run_plan.used(session.largest_cost or plan.largest_cost),
        logical_batch=plan.logical_batch,
        largest_micro_batch=session.largest_micro_batch or plan.largest_micro_batch,
        binding_limit=plan.binding_limit,
        oom_used=None if oom_cost is None else run_plan.used(oom_cost),
        used_after_rescue=run_plan.used(cost_after_oom) if cost_after_oom else None,
        peak_bytes_after_rescue=session.peak_bytes_after_rescue if cost_after_oom else None,
        # One in evaluation, or while other processes held the memory, shows nothing of the plan's limit.
        ooms_rescued=0 if oom_cost is None else ooms,
        allocator_retries=session.meter.retries(),
        foreign_bytes=session.foreign_bytes,
        torch_version=torch.__version__,
        fingerprint=memory_fingerprint(run),
        policy={"name": run.factor.policy, "options": policy_options(run)},
    )


def _try_to_write(session: Session, write: Callable[[], object]) -> None:
    # A failure to write what a run teaches never stops a training.
    if session.training.use_adaptive_batch_size_factor:
        try:
            write()
        except (StateError, ValueError) as error:
            session.reporter.notice(f"This run teaches nothing. {error}")
