"""Trains one run, top to bottom: prepare, plan, epochs, steps, validation, checkpoints, judgement.

`session.ranks` stands for the processes that train the run together. With one process each of its methods just does
the work: `gather(work)` is `[work()]`, `on_rank0(work)` and `on_every_rank(work)` are `work()`.
"""

import gc
import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial, reduce
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from can_train.config.compose import changed_settings
from can_train.config.resolved import ResolvedRun, cache_folder, state_dir
from can_train.errors import (
    CanTrainError,
    DoesNotFitError,
    FailedRunError,
    StateError,
    Stopped,
    errors_of_steps,
    remedy_for,
)
from can_train.factors.store import factor_rule
from can_train.fit.batch_dependence import BatchDependence
from can_train.fit.compiled import compiler_limits
from can_train.fit.factor_rule import FactorRule
from can_train.fit.micro_batcher import MOVES_WEIGHTS, BatchResult, Denominators, Losses, combine_shares
from can_train.fit.optimizer import freeze
from can_train.fit.packing import BatchCosts
from can_train.fit.pass_state import Snapshot
from can_train.fit.planner import PROBED, Planner, Planners
from can_train.fit.precision import Precision, are_finite, number_format, tf32
from can_train.fit.random_state import seed_rank, step_generator
from can_train.fit.rescue import describe_out_of_memory, fatal_out_of_memory
from can_train.fit.run_plan import RunPlan
from can_train.fit.search import NO_RECORDING
from can_train.fit.sharding import Shards
from can_train.io.records import check_writable, is_file, is_folder, open_to_append, this_host, write_json_atomic
from can_train.io.units import counted, finite, size_text
from can_train.memory.allocator_settings import read_allocator_settings
from can_train.memory.meters import Meter, open_meter, tensors_of
from can_train.memory.out_of_memory import forget_frames, headline, is_host_memory, without_others
from can_train.memory.sharded_tensors import shard_of
from can_train.memory.simulated.allocator import reserved_for
from can_train.reporter import (
    DemotingReporter,
    EpochFigures,
    LoggedReporter,
    Pace,
    Reporter,
    SilentReporter,
    Stage,
    TextTable,
    figure_text,
)
from can_train.runs.attempts import SlurmContext, StopRequests
from can_train.runs.run_folder import EPOCHS, Changed, RunFolder, make_run, resume_hint
from can_train.runs.run_state import best_text
from can_train.runs.trackers import TrackedRun, Tracker, check_packages, scores, tracked
from can_train.task import BatchTask
from can_train.training.attempt_record import outcome_of_attempt, recording_observation
from can_train.training.chosen_weights import LOSS, AveragedWeights, averaged_weights
from can_train.training.distributed import Forms, RankFailedError, Ranks, check_alike, rank_device
from can_train.training.inference import Rows, with_samples
from can_train.training.judgement import judge_best, keep_weights, validate, validated
from can_train.training.limit_recorder import LimitRecorder
from can_train.training.loading import ResidentData, check_inputs_unchanged, describe_data, load_task
from can_train.training.reference_models import ReferenceModels
from can_train.training.report import detail_lines, plan_summary
from can_train.training.session import Parts, Session, load_checkpoint, read_plan, resolve_plans
from can_train.training.sharded_model import Sharded, may_climb_to_shards, may_shard, plan_model

# Share of the predicted memory of a batch that must be there before it is computed whole for a comparison.
_ROOM: Final = 1.5

UpdateResult = tuple[BatchResult, Denominators]
"""The result of an optimizer update, of all ranks, with the denominators of the batch that it was computed with."""


@dataclass(frozen=True, kw_only=True)
class ShareReport:
    """All that the ranks tell one another about their shares of a logical batch, in one message.

    Attributes:
        result: The result of the share.
        forms: Which gradients and buffers the rank has.
        received: The signal that the rank has received so far; None: none.
        is_late: Whether the time of training is up by the rank's clock.
        is_finite: Whether the gradients are, where they were computed in float16 with denominators that are estimates.
        dependence: The dependences of samples on their batch that a comparison of the share has shown, for the first
            time; None: it was not compared.
    """

    result: BatchResult
    forms: Forms
    received: int | None
    is_late: bool
    is_finite: bool
    dependence: BatchDependence | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The text about a finished run: its judgement, in short and in full, and one sentence."""

    folder: RunFolder
    summary_tables: Sequence[TextTable]
    tables: Sequence[TextTable]
    summary: str


def train_new(
    run: ResolvedRun,
    reporter: Reporter,
    ranks: Ranks | None = None,
    *,
    make_folder: Callable[[ResolvedRun, Reporter, Changed], RunFolder] = make_run,
) -> Outcome:
    """Trains a run from its beginning and judges it.

    Args:
        run: The run.
        reporter: Gets stages, figures and notices.
        ranks: The processes that train it; None: this one.
        make_folder: Makes its folder, once its data has been read; called by rank 0.

    Raises:
        CanTrainError: The run cannot be trained as it is configured.
        SystemExit: A signal ended it; a checkpoint was saved.
    """
    stops, ranks = StopRequests(), ranks or Ranks()
    ranks.on_rank0(lambda: check_packages(run.paths.trackers))
    log = LoggedReporter(reporter)
    with stops.installed(), ExitStack() as stack:
        reporter = _with_state(run, log if ranks.is_first else SilentReporter(), ranks)
        # Before a folder is made: a run that cannot be shared out leaves none behind.
        may_shard(run.training, ranks)
        meter = _open_meter(run, ranks)
        recorder = stack.enter_context(closing(LimitRecorder(run, meter)))
        ranks.on_rank0(recorder.start)
        task = _load_task(run, reporter, ranks)
        # After the data has been read: a run whose data are missing leaves no folder behind.
        folder = RunFolder(ranks.on_rank0(lambda: make_folder(run, reporter, changed_settings(run.config)).path))
        reporter.notice(f"This is run {folder.run_id}")
        # Keeps all processes but the run's ranks out of its folder.
        ranks.on_rank0(lambda: stack.enter_context(folder.locked()))
        ranks.on_rank0(lambda: stack.enter_context(logged(folder, log, stops, ranks=ranks.size)))
        return _train_and_judge(Parts(run=run, folder=folder, task=task, meter=meter, reporter=reporter,
                                      stops=stops, ranks=ranks, recorder=recorder))  # fmt: skip


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
    with stops.installed(), ExitStack() as stack:
        ranks.on_rank0(lambda: stack.enter_context(folder.locked_to_train(reporter)))
        finished = ranks.on_rank0(folder.result)
        if finished is None:
            reporter = _with_state(run, reporter, ranks)
            ranks.on_rank0(lambda: check_packages(run.paths.trackers))
            ranks.on_rank0(lambda: stack.enter_context(logged(folder, log, stops, ranks=ranks.size)))
            if run.training.fit == "shard" and ranks.size == 1 and is_file(folder.plan_path):
                run = replace(run, training=replace(run.training, fit="auto"))
                reporter.notice(
                    "The run goes on in one process, which has the whole model: shards need several processes"
                )
        meter = _open_meter(run, ranks)
        recorder = stack.enter_context(closing(LimitRecorder(run, meter)))
        if finished is None:
            ranks.on_rank0(lambda: None if is_file(folder.plan_path) else recorder.start())
        task = _load_task(run, reporter, ranks)
        if finished is not None:
            try:
                return _outcome(task, folder, finished)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise folder.damaged_result() from error
        return _train_and_judge(Parts(run=run, folder=folder, task=task, meter=meter, reporter=reporter,
                                      stops=stops, ranks=ranks, recorder=recorder))  # fmt: skip


def _with_state(run: ResolvedRun, reporter: Reporter, ranks: Ranks) -> Reporter:
    """Reports that a state folder cannot be written; returns a reporter that does not repeat it."""
    folder = state_dir(run.paths)
    try:
        check_writable(folder)
    except OSError as error:
        if ranks.is_first:
            remedy = remedy_for(error, "Choose another folder with --state-dir, or make this one writable")
            data = ", and its prepared data are not kept" if folder in cache_folder(run.paths).parents else ""
            reporter.notice(
                f"The state folder {folder} cannot be written: {error.strerror}. This run teaches later ones nothing, "
                f"`can-train runs` does not list it{data}. {remedy}."
            )
        return DemotingReporter(reporter, folder)
    return reporter


@contextmanager
def logged(folder: RunFolder, log: LoggedReporter, stops: StopRequests, *, ranks: int = 1) -> Iterator[None]:
    """Writes the block's reports to the run's log, and the error that ends it; says how the run, of so many ranks, goes
    on where a person stopped it.
    """
    job = SlurmContext.from_environment().job
    process = f"process {os.getpid()} of {this_host()}" + (f", job {job}" if job else "")
    with log.writing_to(lambda: open_to_append(folder.log_path), f"--- {datetime.now():%Y-%m-%d %H:%M:%S}, {process}"):
        try:
            yield
        except CanTrainError as error:
            log.write(f"error: {error}")
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not is_folder(folder.path):
                # Its log is gone, too.
                raise FailedRunError("The folder of the run was moved or deleted while it trained",
                                     value=str(folder.path), remedy="Bring it back, and the run goes on with "
                                     f"can-train resume {folder.run_id}; or train anew") from error  # fmt: skip
            log.write(traceback.format_exc())
            raise
        except SystemExit as stop:
            # In a job it is mostly the scheduler that sends SIGTERM, and the job starts again by itself.
            by_person = (signal.SIGINT,) if job else (signal.SIGINT, signal.SIGTERM)
            if stops.received in by_person:
                log.notice(resume_hint(folder, ranks=ranks))
                if isinstance(stop, Stopped):
                    stop.is_told = True
            raise


def _open_meter(run: ResolvedRun, ranks: Ranks) -> Meter:
    meter = ranks.on_every_rank(lambda: open_meter(rank_device(run.device, ranks)))
    if meter.is_host:
        # All ranks of a machine share its memory.
        meter.capacity_bytes //= ranks.sharing_host()
    return meter


def _load_task(run: ResolvedRun, reporter: Reporter, ranks: Ranks) -> BatchTask:
    return ranks.on_rank0_first(lambda: load_task(run, reporter))


def _train_and_judge(parts: Parts) -> Outcome:
    """Trains and judges; an out-of-memory that could not be rescued becomes a `DoesNotFitError` with the device's
    state.
    """

    def does_not_fit(error: BaseException) -> DoesNotFitError:
        # Within micro-batches it is rescued; memory that runs out elsewhere (for weights, a copy of them) is not.
        details = describe_out_of_memory(parts.meter, None)
        smaller = "choose a smaller model by its settings (--set), or a larger device"
        (weight_bytes, page_bytes), capacity_bytes = _weight_bytes(parts), parts.meter.capacity_bytes
        if page_bytes > capacity_bytes and not parts.meter.is_host:
            pages = f", {size_text(page_bytes)} in pages of the allocator" if weight_bytes <= capacity_bytes else ""
            value = f"the weights alone take {size_text(weight_bytes)}{pages}, the device has"
            return DoesNotFitError("The weights of the model must fit on the device",
                                   value=f"{value} {size_text(capacity_bytes)}",
                                   remedy=without_others(details.foreign_bytes, smaller),
                                   details=replace(details, need_bytes=page_bytes))  # fmt: skip
        return DoesNotFitError("Memory ran out outside of the micro-batches",
                               value=headline(error), remedy=without_others(details.foreign_bytes, smaller),
                               details=replace(details, of_host=details.of_host or is_host_memory(error)))  # fmt: skip

    # The trackers are waited for last, when all that matters is on the disk.
    with _tracked(parts) as parts.trackers, parts.folder.attempts.recorded(parts.stops, rank=parts.ranks.rank):
        try:
            with errors_of_steps(), fatal_out_of_memory(does_not_fit):
                return _run_attempt(parts)
        except DoesNotFitError as error:
            if error.details.capacity_bytes is None:
                error.details = describe_out_of_memory(parts.meter, error.details.need_bytes, known=error.details)
            # Of a leak, and of an evaluation, the parts of a step explain nothing.
            details = error.details
            if not (details.of_host or details.held_bytes or details.in_evaluation):
                error.parts = _largest_parts(parts)
            raise


def _weight_bytes(parts: Parts) -> tuple[int, int]:
    """Returns the size of the model in the run's precision, and of the pages that its tensors lie in; 0 where it is not
    built without values.
    """
    dtype = Precision.named(parts.training.precision).dtype
    try:
        with torch.device("meta"):
            model = parts.task.build_model()
    except Exception:  # noqa: BLE001 - a task may load weights; the error that is told must not be another one
        return 0, 0
    tensors = [*model.parameters(), *model.buffers()]
    sizes = [one.numel() * number_format(one, dtype).itemsize for one in tensors]
    return sum(sizes), reserved_for(sizes, read_allocator_settings())


def _largest_parts(parts: Parts) -> list[str]:
    # Most runs need none of it.
    from can_train.training.explain import explain_attempt

    return explain_attempt(parts.run, parts.folder, parts.task, parts.meter)


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
    training = parts.training
    limits = nullcontext() if training.compile == "off" else compiler_limits()
    with parts.meter.active(), tf32(training, parts.meter.device), limits:
        result = _attempt_result(parts, rule)
    if result is None:
        summary = f"rank {parts.ranks.rank} trained; rank 0 judges"
        return Outcome(folder=folder, summary_tables=(), tables=(), summary=summary)
    write_json_atomic(folder.result_path, finite(result))
    return _outcome(parts.task, folder, result)


def _attempt_result(parts: Parts, rule: FactorRule) -> dict[str, Any] | None:
    """Trains, and judges on rank 0: returns its result, None on other ranks. A run that ends for lack of memory on the
    last rung goes on from its checkpoint with shards of the model.
    """
    session = make_session(parts, rule)
    try:
        return _trained_and_judged(session, may_go_on=True)
    except (DoesNotFitError, RankFailedError) as error:
        if not session.may_go_on_as_shards:
            raise
        failed = error
    record_end, ended = session.record_end, outcome_of_attempt(failed)
    ranks = parts.ranks.size
    text = f"step {session.progress.step}: memory ran out on the last rung; the run goes on from its checkpoint with"
    parts.reporter.notice(f"{text} weights, gradients and optimizer state as shards on {ranks} ranks")
    session.data.move_to_host()
    # The model and the state of its optimizers leave the device, which shards are to fit into.
    forget_frames(failed)
    del session
    parts.meter.release()
    try:
        session = make_session(parts, rule, as_shards=True)
    except (DoesNotFitError, RankFailedError) as error:
        record_end(ended)
        if not isinstance(error, DoesNotFitError) and not error.did_not_fit:
            raise
        failed.value = f"{failed.value}, also with --fit shard"
        raise failed from error
    record_end("rescued" if ended == "oom" else "ok")
    return _trained_and_judged(session)


def _trained_and_judged(session: Session, *, may_go_on: bool = False) -> dict[str, Any] | None:
    # Writes the observation, which later runs learn from, when the block is left.
    with recording_observation(session, may_go_on=may_go_on):
        train(session)
        # Only rank 0 judges; the others end here and free their devices.
        session.ranks.close()
        if not session.ranks.is_first:
            return None
        result = judge_best(session)
        session.track(scores(result["judgement"]))
    return result


@dataclass(frozen=True, kw_only=True)
class _PlannedModel:
    """The model of a run, whole on this rank or sharded, with its plan."""

    planners: Planners
    plans: list[RunPlan]  # Of all ranks
    references: ReferenceModels
    resident: list[Tensor]  # That stay on the device beside the model
    average: AveragedWeights | None
    shards: Shards | None  # None: each rank has the whole model


def make_session(parts: Parts, factor: FactorRule, *, as_shards: bool = False) -> Session:
    """Builds the model, makes or reads the plan, and restores the last checkpoint.

    Args:
        parts: The parts that the attempt is made from.
        factor: How the safety factor of a plan that is made here is decided.
        as_shards: Whether each rank has a shard of the model, whatever the plan says.
    """
    task, meter, reporter, ranks = parts.task, parts.meter, parts.reporter, parts.ranks
    _keep_imports_from_collections()
    if ranks.size > 1:
        check_alike(ranks, lambda: describe_data(task), "The ranks of a run must read the same data",
                    "Seed what datasets() draws, and see that all nodes read the same files")  # fmt: skip
    checkpoint = load_checkpoint(parts)
    planned = plan_model(parts, partial(_planned, parts, factor), is_new=checkpoint is None,
                         was_sharded=lambda: as_shards or _was_sharded(parts, factor))  # fmt: skip
    plans, references, average = planned.plans, planned.references, planned.average
    _show_plan(parts, plans[ranks.rank], references)
    # After the plan, whose limits count them; each rank decides for its own device.
    data = ResidentData(task=task, meter=meter, tensors=planned.resident)
    if plans[ranks.rank].data.on_device and not data.move_to_device():
        reporter.notice("The data stay on the host: they could not be moved to the device")
    seed_rank(seed=parts.training.seed, rank=ranks.rank, step=0)
    steps_done = 0 if checkpoint is None else checkpoint["progress"]["step"]
    session = Session(**vars(parts), planners=planned.planners, plans=plans, steps_done=steps_done,
                      reference_models=references, data=data, average=average, shards=planned.shards)  # fmt: skip
    if is_file(parts.folder.trial_path):
        from can_train.runs.trials import TrialRun

        session.trial = TrialRun.of(parts.folder)
    if average is not None:
        average.first_step = int(parts.training.ema_start * session.total_steps)
    if checkpoint is None:
        # Now rather than after the first epoch.
        session.criterion.check(lambda: validated(session))
        if any(parts.folder.metrics()):
            reporter.notice("No checkpoint of this run is left: it trains from its first step again")
    else:
        checkpoint = session.restore(checkpoint)
        reporter.notice(f"Continuing at step {session.progress.step}")
        if parts.folder.goes_on_for_longer(session.progress.step, [EPOCHS]):
            epochs, lr = parts.training.epochs, session.engine.optimization.lr
            rate = f"from here on its learning rate, now {lr:.3g}, is that of a run of {epochs}"
            reporter.notice(f"The run now has {counted(epochs, 'epoch')}; {rate}")
    ranks.on_rank0(lambda: session.rewind_records(0 if checkpoint is None else checkpoint["metrics_lines"]))
    return session


def _planned(parts: Parts, factor: FactorRule, model: nn.Module, sharded: Sharded | None) -> _PlannedModel:
    run, ranks, meter, reporter = parts.run, parts.ranks, parts.meter, parts.reporter
    references = ReferenceModels(task=parts.task, training=run.training, meter=meter, reporter=reporter,
                                 cache=cache_folder(run.paths), ranks=ranks)  # fmt: skip
    resident = references.prepare(model, parts.folder.reference_models_path)
    # Before the plan, which leaves room for it.
    average = ranks.on_every_rank(lambda: averaged_weights(model, run.training))
    resident = [*resident, *([] if average is None else average.tensors)]
    recording = NO_RECORDING if parts.recorder is None or sharded else ranks.on_rank0(parts.recorder.result)
    if recording.reason:
        reporter.detail(f"{PROBED}: {recording.reason}")
    shards = None if sharded is None else sharded.shards
    planners = Planners.of_phases(Planner(run=run, task=parts.task, model=model, meter=meter, reporter=reporter,
                                          ranks=ranks.size, reference_tensors=resident, recording=recording,
                                          shards=shards))  # fmt: skip
    if sharded is not None:
        sharded.whole.tell(planners)
    plans = resolve_plans(planners, ranks, factor, parts.folder.plan_path)
    return _PlannedModel(planners=planners, plans=plans, references=references, resident=resident, average=average,
                         shards=shards)  # fmt: skip


def _was_sharded(parts: Parts, factor: FactorRule) -> bool:
    """Tells whether the plan of the run, or else the last run of its configuration, has shards on as many ranks."""
    ranks, earlier = parts.ranks.size, factor.earlier
    if (plan := read_plan(parts.folder.plan_path)) is not None:
        return plan.rung.ranks == ranks
    if earlier is None or not earlier.is_of(parts.meter.capacity_bytes, torch.__version__):
        return False
    return any(limits.ranks == ranks for limits in earlier.phases.values())


@cache
def _keep_imports_from_collections() -> None:
    """Imported modules are no garbage: the collection after each trial and out-of-memory would take 0.2 s for them.

    Once in a process: to count the frozen objects takes 0.1 s.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def _show_plan(parts: Parts, plan: RunPlan, references: ReferenceModels) -> None:
    meter, reporter = parts.meter, parts.reporter
    reporter.notice("\n".join(plan_summary(plan, meter.key, meter.capacity_bytes)))
    details = detail_lines(plan, references.plans)
    if reporter.verbose:
        details += [f"  {line}" for line in _largest_parts(parts)]
    reporter.detail("\n".join(details))
    for notice in plan.all_notices:
        reporter.notice(notice)


def train(session: Session) -> None:
    """Trains until the last epoch or until patience ends; the best weights are in `session.best` afterwards.

    Raises:
        SystemExit: SIGTERM or SIGINT arrived; a checkpoint was saved first.
    """
    progress, ranks = session.progress, session.ranks
    epochs, patience = session.training.epochs, session.training.patience
    session.start_clock()
    session.compile()
    for engine in session.engines:
        ranks.on_every_rank(partial(session.with_room, engine, engine.reserve.hold))
    # A signal inside the block is only noted: the step ends and is saved before the process does.
    total, done = session.total_steps, progress.step
    pace = Pace(total, done)
    with (
        session.stops.deferred(),
        session.task.read_ahead(session.upcoming()),
        session.reporter.stage("training", total=total, unit="steps", done=done) as stage,
    ):
        while not progress.trained:
            figures = EpochFigures(epoch=progress.epoch, epochs=epochs)
            # A run that goes on may have come to its new end already.
            if progress.epoch < epochs:
                figures = _train_epoch(session, stage)
            if session.training.validates_after(figures.epoch) or session.is_time_up:
                figures = validate(session, figures)
            # An epoch that the time has cut short has not ended.
            if (
                (every := session.training.keep_every)
                and figures.epoch == progress.epoch
                and not progress.epoch % every
            ):
                keep_weights(session)
            stopped_early = bool(patience) and progress.epochs_without_gain >= patience
            lost = _lost(session, figures.epoch) if session.trial and figures.validation_loss is not None else ""
            progress.trained = progress.epoch >= epochs or stopped_early or bool(lost) or session.is_time_up
            seconds_left = 0.0 if progress.trained else pace.seconds_left(progress.step)
            session.reporter.epoch(replace(figures, seconds_left=seconds_left))
            session.save()
            session.stop_signal = _first_signal(ranks.gather(lambda: session.stops.received))
            _exit_if_stopped(session)
            if lost:
                session.reporter.notice(lost)
            elif stopped_early:
                figure = session.criterion.name
                better = "validation loss" if figure == LOSS else f"{figure} in validation"
                unit = "epochs" if session.training.val_interval == 1 else "validations"
                text = f"No better {better} in {patience} {unit}: stopping after epoch {progress.epoch}"
                session.reporter.notice(text)
            elif session.is_time_up and progress.epoch < epochs:
                text = f"The training time of {session.training.max_time} is up: stopping at step {progress.step}"
                session.reporter.notice(f"{text}, in epoch {figures.epoch} of {epochs}")
    for sentence in (sentence for engine in session.engines for sentence in engine.timer.sentences()):
        session.reporter.detail(sentence)
    # Judging has a peak of its own, and nothing is learned from it.
    session.monitor.pause()
    session.ooms_elsewhere = sum(ranks.gather(lambda: session.ooms_rescued)) - session.ooms_rescued


def _lost(session: Session, epoch: int) -> str:
    """Decides on rank 0 whether the trial of a search ends after an epoch; returns the reason, empty if it goes on."""

    def decide() -> str:
        try:
            return session.trial.stop_if_losing(epoch) if session.trial is not None else ""
        except StateError as error:
            session.reporter.notice(f"The trial goes on, since its search cannot be read: {error}")
            return ""

    return session.ranks.on_rank0(decide)


def _train_epoch(session: Session, stage: Stage) -> EpochFigures:
    """Trains to the end of the current epoch; returns its figures, without the figures of a validation."""
    progress, training = session.progress, session.training
    freeze(session.model, training, epoch=progress.epoch)
    steps = session.epochs.steps(progress.epoch)
    started, samples_before = time.perf_counter(), progress.epoch_samples
    session.model.train()
    session.has_moved = False
    while progress.step_in_epoch < len(steps):
        ends_epoch = progress.step_in_epoch + 1 == len(steps)
        take_step(session, steps[progress.step_in_epoch], ends_epoch=ends_epoch)
        if ends_epoch:
            session.read_losses()
        rate = (progress.epoch_samples - samples_before) / (time.perf_counter() - started)
        stage.advance(1, **_step_figures(session, rate))
        if session.stop_signal or progress.step % training.checkpoint_every == 0:
            session.save()
        _exit_if_stopped(session)
        if session.is_time_up and not ends_epoch:
            session.read_losses()
            break
    seconds, peak = time.perf_counter() - started, session.monitor.peak_share
    # None were trained where a run is resumed at the end of an epoch.
    trained = progress.epoch_samples - samples_before
    per_second = round(trained / seconds, 1) if seconds and trained else None
    if trained and not session.has_moved:
        overflow = f"All gradients of epoch {progress.epoch + 1} left the range of float16, and no step was taken"
        session.reporter.notice(f"{overflow}: give --precision bf16 or fp32, or a loss with smaller gradients")
    session.log(
        epoch=progress.epoch + 1,
        train=progress.epoch_means,
        lr=session.engine.optimization.lr,
        samples_per_second=per_second,
        peak_memory_pct=None if peak is None else round(peak, 5),
        batch_size_safety_factor=session.engine.run_plan.phase_plan.safety_factor,
        micro_batch_size=progress.epoch_largest,
        micro_batches=progress.epoch_parts,
        ooms_rescued=progress.epoch_ooms,
    )
    figures = EpochFigures(
        epoch=progress.epoch + 1, epochs=training.epochs, samples_per_second=per_second, peak=_peak(session)
    )
    # An epoch that the time has cut short goes on where the run is resumed for longer.
    if progress.step_in_epoch == len(steps):
        progress.begin_epoch(progress.epoch + 1)
    return figures


def _step_figures(session: Session, samples_per_second: float) -> dict[str, float | str]:
    """Returns the figures beside the progress of a training; the loss is the epoch's mean, without the step that
    is computed now.
    """
    progress = session.progress
    loss = {"step loss": session.weighted(progress.epoch_means)} if progress.epoch_sums else {}
    return {
        "epoch": f"epoch {progress.epoch + 1}/{session.training.epochs}",
        **loss,
        "rate": f"{figure_text('', samples_per_second).strip()}/s",
        "peak": _peak(session),
    }


def _peak(session: Session) -> str:
    peak_bytes = session.monitor.last_known_peak_bytes
    return size_text(peak_bytes) if peak_bytes else ""


def _exit_if_stopped(session: Session) -> None:
    """Ends the process for a signal that arrived on some rank; the caller has just saved."""
    if session.stop_signal:
        session.stops.received = session.stops.received or session.stop_signal
        session.reporter.notice(f"Stopped by a signal; saved at step {session.progress.step}")
        session.stops.exit()


def _first_signal(received: Sequence[int | None]) -> int | None:
    return next(filter(None, received), None)


def take_step(session: Session, rows: Rows, *, ends_epoch: bool) -> None:
    """Takes the optimizer steps of all phases on one logical batch. Its losses are read after the next step, so that
    the host does not wait for the device.

    Args:
        session: The session.
        rows: [R] samples of the batch.
        ends_epoch: Whether it is the last step of its epoch.
    """
    progress, engines = session.progress, session.engines
    snapshot, trainable = Snapshot(session.model, session.meter.device), session.trainable
    updates = [(engine, repetition) for engine in engines for repetition in range(1, engine.phase.steps + 1)]
    results = []
    try:
        generator = step_generator(seed=session.training.seed, step=progress.step, before=True)
        share = progress.step / session.total_steps
        if type(session.task).before_step is not BatchTask.before_step:
            # On all ranks or on none: an error on one must not leave the others waiting in a later exchange.
            session.ranks.on_every_rank(lambda: _before_step(session, rows, share, generator))
        # Before the monitored step: planning runs probes, whose memory is not the step's.
        session.replan_if_thawed()
        # A run that is resumed within a step goes on after the updates that are done.
        for number, (engine, repetition) in list(enumerate(updates))[progress.updates :]:
            ends = ends_epoch and repetition == engine.phase.steps
            with session.in_phase(engine):
                results.append(_update(session, rows, snapshot, ends_epoch=ends))
            progress.updates = number + 1
            if progress.updates < len(updates):
                snapshot = Snapshot(session.model, session.meter.device)
    except (DoesNotFitError, RankFailedError) as error:
        if isinstance(error, DoesNotFitError) or error.did_not_fit:
            # A later attempt takes the step again, perhaps with more memory.
            for engine, flags in zip(engines, trainable, strict=True):
                engine.optimization.optimizer.zero_grad(set_to_none=True)
                engine.optimization.set_trainable(flags)
            snapshot.restore()
            is_leak = session.leak.held_bytes > 0
            if is_leak:
                # The next process has that memory again.
                session.forget_failures()
            session.save()
            session.may_go_on_as_shards = session.shards is None and not is_leak and may_climb_to_shards(session)
        raise
    if session.average is not None:
        session.average.after_step(progress.step + 1)
    session.read_losses()
    counts = combine_shares([result.counts() for result, _ in results])
    progress.add_step(counts, len(rows))
    session.record_step(counts, rows, results)
    _release_and_report(session, counts)


def _before_step(session: Session, rows: Rows, share: float, generator: torch.Generator) -> None:
    # Here, so that the other ranks are told of the method, too.
    with errors_of_steps():
        session.task.before_step(session.model, rows, share, generator)


def _update(session: Session, rows: Rows, snapshot: Snapshot, *, ends_epoch: bool) -> UpdateResult:
    """Takes one optimizer step of the current phase: its gradient, the sum over the ranks, the weights; `snapshot` was
    taken before it. Returns the result of all ranks.
    """
    # The reserves' own lists, not copies: one is emptied within the step, and nobody else may keep its tensors.
    reserved = [engine.reserve.tensors for engine in session.engines]
    held = *reserved, session.data.tensors, snapshot.copies
    optimizers = [engine.optimization.optimizer for engine in session.engines]
    ranks, optimization = session.ranks, session.engine.optimization
    with session.monitor.step(session.model, *optimizers, *held) as step_is_counted:
        shares, denominators = _accumulate(session, rows)
        result, earlier_ooms = combine_shares([share.result for share in shares]), 0
        factors = denominators.factors(result)
        has_overflowed = min(factors.values()) < 1 and not all(share.is_finite for share in shares)
        if has_overflowed or len(set(factors.values())) > 1:
            # Each term needs a factor of its own, and their gradients have been added up; or denominators that were
            # taken to be too small made them leave the range of float16. Once more, with the denominators that the
            # first pass has found. Memory ran out in the first pass mostly; the second one begins with smaller
            # micro-batches.
            optimization.optimizer.zero_grad(set_to_none=True)
            snapshot.restore()
            earlier_ooms, factor = result.ooms_rescued, 1.0
            denominators = Denominators(dict(result.denominators))
            shares, _ = _accumulate(session, rows, denominators)
            result = combine_shares([share.result for share in shares])
        else:
            factor = next(iter(factors.values()))
            gradients = [one.grad for one in optimization.parameters if one.grad is not None]
            if factor != 1.0 and gradients:
                torch._foreach_mul_(gradients, factor)
        result = replace(result.corrected(factor), ooms_rescued=earlier_ooms + result.ooms_rescued)
        result.start_copies()
        # Gradients of shards are added up in the backward pass.
        whole = [one for one in optimization.parameters if shard_of(one) is one]
        ranks.reduce_gradients(whole, alike=len({share.forms.gradients for share in shares}) == 1)
        # Before the optimizer steps: where that fails, the other ranks hear of it in their next message.
        ranks.broadcast_buffers(session.model, alike=len({share.forms.buffers for share in shares}) == 1)
        with ranks.reporting_failure():
            session.in_optimizer_step = True
            moved = optimization.step(session.progress.step, session.progress.updates)
            session.in_optimizer_step = False
            session.has_moved |= moved
            session.engine.batcher.stepped()
            # The schedule moves within the step, by epoch too, so that a checkpoint has both or neither.
            if ends_epoch if session.training.scheduler_interval == "epoch" else moved:
                optimization.move_schedule()
        # All ranks stop after the same step.
        received = [share.received for share in shares] if ranks.size > 1 else [session.stops.received]
        session.stop_signal = _first_signal(received)
        session.is_time_up = any(share.is_late for share in shares)
    _tell_dependence(session, [share.dependence for share in shares if share.dependence is not None])
    own, engine = shares[ranks.rank].result, session.engine
    engine.record_step(session.progress.step, own, is_counted=step_is_counted)
    # A step that is measured on the host takes longer, a shorter batch has other shares of fixed costs.
    is_plain = (session.meter.counts_always or not step_is_counted) and len(rows) == session.epochs.logical_batch
    engine.count_timed(session.progress.step, own, is_typical=is_plain)
    if session.training.log_splits and len(result.micro_batches) > 1:
        session.reporter.detail(_split_text(session, rows, result))
    return result, denominators


def _split_text(session: Session, rows: Rows, result: BatchResult) -> str:
    """Says how a batch was split: into how many parts, their sizes and the peak."""
    task, (allocated, _) = session.task, session.monitor.last_step
    units, stops = task.batch_features(rows)[:, 0], np.cumsum(result.micro_batches)
    largest = max(float(part.sum()) for part in np.split(units, stops[:-1]))
    phase = f", {session.engine.phase.name}" if session.engine.phase.name else ""
    total = f"{units.sum():,.0f} {task.memory_features[0].name}, the largest part {largest:,.0f}"
    peak = f", peak {size_text(allocated)}" if allocated else ""
    return f"step {session.progress.step}{phase}: {len(stops)} micro-batches, {total}{peak}"


def _accumulate(
    session: Session, rows: Rows, known: Denominators | None = None
) -> tuple[list[ShareReport], Denominators]:
    """Accumulates the gradient of this rank's share of a logical batch, and makes room for the optimizer.

    Args:
        session: The session.
        rows: [R] samples of the batch.
        known: Denominators of the whole batch, where they are known.

    Returns:
        The reports of all ranks, and the denominators of the whole logical batch that this rank computed with.
    """
    engine, device, progress, ranks = session.engine, session.meter.device, session.progress, session.ranks
    with ranks.reporting_failure():
        # A function of seed, step and update: a resumed or repeated step draws the same numbers.
        generator = step_generator(seed=session.training.seed, step=progress.step, update=progress.updates)
        task = engine.in_epoch(progress.epoch, session.training.epochs)
        # The whole batch, so that couplings of its samples are drawn alike on all ranks; it computes only the samples
        # that it is asked for.
        batch = task.logical_batch(rows, device, session.precision.dtype, generator)
        share = session.share(engine, rows)
        denominators = known or Denominators.of(batch, len(rows))

        def losses_of(start: int, stop: int) -> Losses:
            with session.precision.context(device):
                return batch.losses(session.model, share.start + start, share.start + stop)

        def learned_losses_of(start: int, stop: int) -> Losses:
            losses = losses_of(start, stop)
            # Of several ranks, all must take the batch to have the same denominators.
            denominators.learn(losses, is_whole=ranks.size == 1 and stop - start == len(rows))
            return losses

        if share.start == share.stop:
            # A scaler that has never scaled refuses to step.
            engine.optimization.scaler.scale(torch.zeros((), device=device))
        try:
            with engine.timed(progress.step, rows[share]) as (batcher, costs):
                result = batcher.add_share(
                    learned_losses_of,
                    costs,
                    denominators=denominators.by_term,
                    weights=session.task.loss_weights or None,
                    scale=engine.optimization.scaler.scale,
                )
        except DoesNotFitError as error:
            raise with_samples(error, session.task.describe, rows[share]) from None
        # A step that tries another rung, or is computed twice, is compared at another time.
        is_compared = known is None and batcher is engine.batcher and batcher.is_compared(result)
        dependence = None
        if is_compared and _has_room_to_compare(session, result):
            dependence = _compare(session, losses_of, costs, result)
        session.with_room(engine, engine.reserve.before_step)
        forms = ranks.forms(engine.optimization.parameters, session.model)
        is_guessed = engine.optimization.scaler.is_enabled() and not denominators.is_exact
        is_finite = not is_guessed or are_finite(
            [shard_of(one.grad) for one in engine.optimization.parameters if one.grad is not None]
        )
    report = ShareReport(result=result, forms=forms, received=session.stops.received, is_late=session.is_late,
                         is_finite=is_finite, dependence=dependence)  # fmt: skip
    return ranks.exchange(report), denominators


def _has_room_to_compare(session: Session, result: BatchResult) -> bool:
    """Tells whether a part and the gradients of three passes fit beside all that is there: a comparison that ran out of
    memory would give the device's memory back, for other processes to take before the next step.
    """
    engine, meter = session.engine, session.meter
    gradients_bytes = sum(one.nbytes for one in engine.optimization.parameters if one.requires_grad)
    free_bytes = meter.available_bytes() - meter.allocated_bytes()
    return _ROOM * (result.largest_cost + 3 * gradients_bytes) <= free_bytes


def _compare(
    session: Session, losses_of: Callable[[int, int], Losses], costs: BatchCosts, result: BatchResult
) -> BatchDependence:
    """Compares a share that was split with its parts, on this rank alone: the plan compares eight samples, which may
    lack a rare class. First as many samples as a part had are compared, whose peak tells whether the whole share fits.

    Returns:
        The dependences that no earlier comparison has shown.

    Raises:
        DataError: In the run's first step, a mean is in the place of a sum, or denominators do not add up. Later, also
            in an attempt that resumes the run, it is told: a training is not lost for it.
    """
    engine, meter, batcher = session.engine, session.meter, session.engine.batcher
    if batcher.batch_dependence is None:
        batcher.batch_dependence = engine.planner.batch_dependence
    scale = engine.optimization.scaler.scale
    measure = partial(batcher.measure_dependence, losses_of, result.micro_batches, scale=scale, judges=True)

    def compared() -> BatchDependence:
        with meter.measuring(tensors_of([session.model, engine.optimization.optimizer])):
            measured = measure()
        whole_bytes = meter.peak_bytes() * costs.cost(0, len(costs)) / result.largest_cost
        if not (measured.terms or measured.faults) and _ROOM * whole_bytes <= meter.available_bytes():
            whole = measure(has_room=True)
            measured = whole if whole.measured else measured
        return measured

    # The memory of a comparison is not the step's.
    session.monitor.pause()
    held, data = engine.task.objects_of_loss()
    measured = batcher.leaving_no_trace(compared, held, left_out=data)
    meter.release()
    if batcher.moves_weights:
        session.reporter.notice(f"step {session.progress.step}: {MOVES_WEIGHTS[0].lower()}{MOVES_WEIGHTS[1:]}")
    if not session.progress.step:
        # The loss of some samples may be a constant.
        engine.planner.check_loss(replace(measured, trains=True))
    return batcher.learn_dependence(measured)


def _tell_dependence(session: Session, shares: Sequence[BatchDependence]) -> None:
    """Tells of dependences on some rank that are new."""
    if not shares:
        return
    news = reduce(BatchDependence.joined, shares)
    session.engine.batcher.learn_dependence(news)
    for sentence in news.sentences(split=False):
        session.reporter.notice(f"step {session.progress.step}: {sentence[0].lower()}{sentence[1:]}")


def _release_and_report(session: Session, result: BatchResult) -> None:
    """Between steps: releases the allocator's cache in time, and reports a rescue or a leak."""
    training, meter, step = session.training, session.meter, session.progress.step
    interval, threshold = training.cuda_empty_cache_interval, training.free_threshold_mib * 2**20
    too_full = threshold < math.inf and meter.free_bytes() < threshold
    if too_full or (interval and step % interval == 0):
        meter.release()
    if result.ooms_rescued:
        times = "once" if result.ooms_rescued == 1 else f"{result.ooms_rescued} times"
        splits = f"memory ran out {times}; finished in {len(result.micro_batches)} micro-batches"
        session.reporter.notice(f"step {step}: {splits}, with the same gradient")
    for changed in session.changed_rungs():
        session.reporter.notice(f"step {step}: from here on {changed}, with the same gradient")
    rise = session.leak_watch.after_step(meter.allocated_bytes())
    if rise:
        leak = f"step {step}: the memory in use between steps has risen by {size_text(rise)} without falling"
        session.reporter.notice(f"{leak}: something keeps tensors from step to step (losses never detached, say)")


def _outcome(task: BatchTask, folder: RunFolder, result: Mapping[str, Any]) -> Outcome:
    counts = ((result["epochs"], "epoch"), (result["steps"], "step"), (result["parameters"], "parameter"))
    done = ", ".join(counted(count, noun) for count, noun in counts)
    judgement, beside = result["judgement"], result["beside"]
    summary_tables, tables = [*task.summary_tables(judgement)], [*task.tables(judgement)]
    for kind, other in beside.items():
        for every, of_kind in ((summary_tables, task.summary_tables), (tables, task.tables)):
            every += [replace(table, title=f"{table.title}, {kind} weights") for table in of_kind(other["judgement"])]
    return Outcome(folder=folder, summary_tables=summary_tables, tables=tables, summary=f"{done}, {best_text(result)}")
