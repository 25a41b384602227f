"""One attempt of a run, from the resolved configuration to the judged result: data, plan, training, judgement, and
what the attempt taught.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.config.resolved import ResolvedRun
from can_train.engine.ranks import Ranks, rank_device
from can_train.errors import DoesNotFitError
from can_train.memory.meters import CpuMeter, Meter, open_meter
from can_train.memory.out_of_memory import headline, is_host_memory, is_out_of_memory
from can_train.memory.shortage import shortage_on
from can_train.reporter import Reporter, SilentReporter
from can_train.state.atomic import write_json_atomic
from can_train.training import loop
from can_train.training.built_on import hold_to_beginning
from can_train.training.effective_factor import factor_rule
from can_train.training.learning import Attempt
from can_train.training.loading import load_task
from can_train.training.new_run import make_run
from can_train.training.run_folder import RunFolder
from can_train.training.session import Parts, make_session
from can_train.training.signals import StopRequests
from can_train.training.state import Session
from can_train.training.task import Table, Task


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
        task = ranks.first_then_others(lambda: load_task(run, reporter))
        folder = RunFolder(ranks.first(lambda: make_run(run, reporter).path))
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
        task = ranks.first_then_others(lambda: load_task(run, reporter))
        finished = ranks.first(folder.result)
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
        ranks.first(lambda: stack.enter_context(folder.locked()))
        yield


def _meter(run: ResolvedRun, ranks: Ranks) -> Meter:
    """Opens the meter of this rank's device; the host's memory is for all that run there."""
    meter = ranks.each(lambda: open_meter(rank_device(run.device, ranks)))
    if isinstance(meter, CpuMeter):
        meter.capacity_bytes //= ranks.sharing_host()
    return meter


def _train(parts: Parts) -> Outcome:
    try:
        return _attempt(parts)
    except DoesNotFitError as error:
        if error.shortage.capacity_bytes is None:
            error.shortage = shortage_on(parts.meter, error.shortage.need_bytes, known=error.shortage)
        raise
    except Exception as error:
        # Within micro-batches it is rescued; what runs out elsewhere (weights, a copy of them) cannot be.
        if not is_out_of_memory(error):
            raise
        message, of_host = headline(error), is_host_memory(error)
    shortage = shortage_on(parts.meter, None)
    raise DoesNotFitError(
        "What a run keeps on the device must fit beside its micro-batches",
        value=message,
        remedy="Another process may hold the memory (nvidia-smi); else choose a smaller model or a larger device",
        shortage=replace(shortage, of_host=shortage.of_host or of_host),
    )


def _attempt(parts: Parts) -> Outcome:
    run = parts.run
    torch.use_deterministic_algorithms(run.training.deterministic)
    parts.ranks.first(lambda: hold_to_beginning(parts.folder, parts.task))
    rule = factor_rule(run, parts.meter.key, parts.reporter, run_id=parts.folder.run_id)
    with parts.meter.active():
        session = make_session(parts, rule)
        with Attempt(run=run, folder=parts.folder, session=session):
            loop.train(session)
            parts.ranks.close()
            if not parts.ranks.is_first:
                return Outcome(
                    folder=parts.folder, tables=(), summary=f"rank {parts.ranks.rank} trained; rank 0 judges"
                )
            loop.release_training_memory(session)
            result = _result(run, parts.folder, session)
    write_json_atomic(parts.folder.result_path, result)
    return _outcome(parts.task, parts.folder, result)


def _result(run: ResolvedRun, folder: RunFolder, session: Session) -> dict[str, Any]:
    """Judges the best weights; returns what `result.json` holds."""
    session.model.load_state_dict(session.best)
    with session.reporter.stage("judging", unit="samples") as stage:

        def score(rows: NDArray[np.int64], role: str = "") -> NDArray[np.float64]:
            scores = loop.score(session, rows, role)
            stage.advance(len(rows))
            return scores

        judgement = session.task.judge(score)
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
        "companions": [asdict(asked) for asked in session.asked],
        "ooms_rescued": session.batcher.ooms + session.ooms_elsewhere,
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
