"""Judges the weights of a session: the validation after an epoch, which keeps the best weights so far, and the
judgement of the best weights at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.errors import DoesNotFitError, StateError
from can_train.fit.micro_batcher import check_divisor, sum_by_term
from can_train.memory.sharded_tensors import shard_of
from can_train.reporter import EpochFigures, TextTable
from can_train.runs.recording import write_predictions
from can_train.runs.run_folder import name_to_type
from can_train.task import Predictions
from can_train.training.chosen_weights import AVERAGED, TRAINED, BestWeights, Validation, choose
from can_train.training.inference import BatchedInference, InferenceDevice, Rows
from can_train.training.loading import fresh_model, write_epoch_weights

if TYPE_CHECKING:
    from can_train.training.session import Session

T = TypeVar("T")


def validate(session: Session, figures: EpochFigures) -> EpochFigures:
    """Validates the weights, and their average if there is one, and keeps the best so far; returns the figures of the
    epoch with the validation's figures added.
    """
    progress, criterion = session.progress, session.criterion
    trained = validated(session)
    if not math.isfinite(trained.loss):
        raise session.no_longer_finite(f"epoch {figures.epoch}", {"validation loss": trained.loss})
    # As the validation loss is computed: without dropout, and by the loss that the task validates with. The mean of the
    # epoch's steps has neither.
    training_loss, _ = _evaluated(session, session.compared_rows)
    validations = {TRAINED: trained}
    _keep_best(session, TRAINED, trained, figures.epoch)
    if session.average is not None and session.average.count:
        with session.average.in_model():
            validations[AVERAGED] = validated(session)
            _keep_best(session, AVERAGED, validations[AVERAGED], figures.epoch)
    for validation in validations.values():
        _tell_not_finite(session, validation, figures.epoch)
    for engine in session.engines:
        engine.optimization.validated(trained.loss)
    value = max(criterion.value(validation) for validation in validations.values())
    is_best = value > (-math.inf if progress.best_value is None else progress.best_value)
    progress.best_value = value if is_best or progress.best_value is None else progress.best_value
    progress.epochs_without_gain = 0 if is_best else progress.epochs_without_gain + 1
    best = session.bests[choose(session.bests)]
    progress.best_loss, progress.best_epoch = best.loss, best.epoch
    averaged = validations.get(AVERAGED)
    objective = {} if session.trial is None else {"objective": value if criterion.is_higher_better else -value}
    session.log(epoch=figures.epoch, validation_loss=trained.loss, training_loss=training_loss, **trained.record(),
                **({} if averaged is None else averaged.record(AVERAGED)), **objective)  # fmt: skip
    return replace(figures, training_loss=training_loss, validation_loss=trained.loss, is_best=is_best,
                   averaged_loss=None if averaged is None else averaged.loss,
                   metric=trained.shown(criterion.name))  # fmt: skip


def _tell_not_finite(session: Session, validation: Validation, epoch: int) -> None:
    """Says which metrics of a validation are no finite numbers, once for each: they would go unnoticed."""
    new = {name: value for name, value in validation.not_finite().items() if name not in session.not_finite}
    session.not_finite |= new.keys()
    if not new:
        return
    named, by = ", ".join(f"{name} is {value:g}" for name, value in new.items()), session.criterion.name
    chosen = f". While {by} is none, no epoch is the best by it, and the last weights are kept"
    session.reporter.notice(f"Not a finite number in validation after epoch {epoch}: {named}; metrics.jsonl has null"
                            f"{'' if math.isfinite(validation.figure(by) or 0.0) else chosen}")  # fmt: skip


def _keep_best(session: Session, kind: str, validation: Validation, epoch: int) -> None:
    """Keeps the weights that the model has now, if they are the best of their kind so far, or the last are wanted."""
    value, best = session.criterion.value(validation), session.bests.setdefault(kind, BestWeights())
    # While the figure is never a finite number, no weights are better than the last.
    keeps_last = session.training.keep == "last" or best.value == -math.inf
    if best.value is not None and not (value > best.value or keeps_last):
        return
    session.bests[kind] = BestWeights(value=value, loss=validation.loss, epoch=epoch, weights=_weights_here(session))


def _weights_here(session: Session) -> dict[str, Any]:
    """Copies the weights of the model to the host, on rank 0; none on other ranks, which all call it."""
    if not session.ranks.is_first and session.shards is None:
        return {}
    # On the host: a second copy on the device would take room from the batch.
    with session.meter.host():
        weights = session.whole(session.model.state_dict())
        return {name: value.detach().cpu().clone() for name, value in weights.items()} if session.ranks.is_first else {}


def keep_weights(session: Session) -> None:
    """Writes the weights of the epoch, and their average if there is one, as files of their own, on rank 0."""
    average, epoch = session.average, session.progress.epoch
    write_weights = partial(write_epoch_weights, session.folder, epoch)
    weights = _weights_here(session)
    session.ranks.on_rank0(lambda: write_weights(TRAINED, weights))
    if average is not None and average.count:
        with average.in_model():
            weights = _weights_here(session)
        session.ranks.on_rank0(lambda: write_weights(AVERAGED, weights))


def validation_loss(session: Session) -> float:
    """Returns the weighted loss over the validation samples, as the mean over the validation sets."""
    return validated(session).loss


def validated(session: Session) -> Validation:
    """Validates the weights that the model has now; metrics that do not add up are computed only where one of them
    chooses the best weights.
    """
    sets = session.task.validation_sets
    evaluated = {name: _evaluated(session, rows, with_metrics=True) for name, rows in sets.items()}
    losses = {name: loss for name, (loss, _) in evaluated.items()}
    figures = Validation.of(losses, {name: metrics for name, (_, metrics) in evaluated.items()})
    if figures.figure(session.criterion.name) is not None:
        return figures
    score = _ValidationScores(session)
    measured = {name: session.task.validation_metrics(rows, score) for name, rows in sets.items()}
    return Validation.of(losses, {name: {**metrics, **measured[name]} for name, (_, metrics) in evaluated.items()})


class _ValidationScores:
    """Scores validation samples for a task; each rank computes a share, and all of them have the result."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __call__(self, rows: Rows) -> NDArray[np.float64]:
        """Returns [R, …] scores of the model."""
        task = self._session.task
        return np.concatenate(self._shared(rows, lambda share: [_inference(self._session).scores(task, share)]))

    def parts(self, rows: Rows) -> list[Any]:
        """Returns the task's results for each part of some samples, in their order."""
        task: Any = self._session.task
        return self._shared(rows, lambda share: _inference(self._session).parts(task.outcome, share))

    def _shared(self, rows: Rows, compute: Callable[[Rows], list[T]]) -> list[T]:
        session = self._session
        session.model.eval()
        costs = session.engine.shared_plan.evaluation_costs
        share = session.ranks.share(len(rows), lambda: costs(session.task, rows))
        has_passes = share.stop > share.start or session.shards is not None
        gathered = session.ranks.gather(lambda: compute(rows[share]) if has_passes else [])
        return [result for results in gathered for result in results]


def _evaluated(session: Session, rows: Rows, *, with_metrics: bool = False) -> tuple[float, dict[str, float]]:
    """Returns the weighted loss over some samples, and the task's metrics of them; each rank computes a share."""
    task, device = session.task, session.meter.device
    rows, share = session.evaluation_share(rows)
    session.model.eval()

    def sums_of(part: Rows) -> tuple[dict[str, float], ...]:
        batch = task.logical_batch(part, device, session.precision.dtype, None)
        with torch.no_grad(), session.precision.context(device):
            losses = batch.losses(session.model, 0, len(part))
            metrics = task.metric_sums(session.model, batch, len(part)) if with_metrics else {}
        return tuple({name: float(pair[index]) for name, pair in terms.items()}
                     for terms in (losses, metrics) for index in (0, 1))  # fmt: skip

    def sums() -> tuple[dict[str, float], ...]:
        # On shards, a rank without samples takes part in the passes of the other ranks.
        has_passes = share.stop > share.start or session.shards is not None
        parts = _inference(session).run(rows[share], sums_of) if has_passes else []
        return tuple(map(sum_by_term, zip(*parts, strict=True))) or ({}, {}, {}, {})

    losses, denominators, metrics, counts = map(sum_by_term, zip(*session.ranks.gather(sums), strict=True))
    for term, total in losses.items():
        check_divisor(term, total, denominators[term], f"in {len(rows)} samples from {task.describe(int(rows[0]))} on")
    loss = session.weighted({term: losses[term] / (denominators[term] or 1.0) for term in losses})
    return loss, {name: total / counts[name] for name, total in metrics.items() if counts[name]}


def _inference(session: Session) -> BatchedInference:
    """Makes the inference of the session's model, by the limits of its plan."""
    plan, task = session.engine.run_plan, session.task
    return BatchedInference(
        batcher=session.engine.batcher,
        model=session.model,
        device=InferenceDevice(meter=session.meter, precision=session.precision),
        costs_of=lambda rows: plan.evaluation_costs(task, rows),
        limit=plan.evaluation_limit,
        describe=task.describe,
    )


class _Scores:
    """Scores samples for a judgement, the same ones only once."""

    def __init__(self, session: Session, advance: Callable[[int], object]) -> None:
        self._session, self._advance, self._inference = session, advance, _inference(session)
        self._known: dict[tuple[str, bytes], NDArray[np.float64]] = {}

    def __call__(self, rows: Rows, role: str = "") -> NDArray[np.float64]:
        """Returns scores of the model, or of a reference model."""
        key = role, rows.tobytes()
        if key not in self._known:
            task, references = self._session.task, self._session.reference_models
            self._known[key] = references.score(role, rows) if role else self._inference.scores(task, rows)
            self._advance(len(rows))
        return self._known[key]

    def parts(self, rows: Rows) -> list[Any]:
        """Returns the task's results for each part of some samples."""
        task: Any = self._session.task
        found = self._inference.parts(task.outcome, rows)
        self._advance(len(rows))
        return found


def judge_best(session: Session) -> dict[str, Any]:
    """Judges the best weights; returns the content of `result.json`."""
    try:
        return _judge_best(session)
    except DoesNotFitError as error:
        name = name_to_type(session.folder)
        judges = f"can-train resume {name} --device cpu judges them on the host, or another --device there"
        error.remedy = f"Training is complete, and its weights are kept. {judges}. {error.remedy}"
        raise


def _judge_best(session: Session) -> dict[str, Any]:
    # Judging needs neither optimizer state nor gradients.
    for engine in session.engines:
        engine.optimization.optimizer.state.clear()
        engine.optimization.optimizer.zero_grad(set_to_none=True)
    ooms_rescued = session.ooms_rescued
    if session.shards is not None:
        _join_for_judgement(session)
    session.meter.release()
    if session.compiled is not None:
        # As `evaluate` computes scores: the compiler's round-off would make others.
        session.compiled.stop()
    chosen = choose(session.bests)
    judgement, predictions = _judged(session, chosen)
    beside = {kind: _judged(session, kind)[0] for kind in session.bests if kind != chosen}
    session.model.load_state_dict(session.best)
    try:
        write_predictions(session.folder.predictions_path, predictions)
    except StateError as error:
        session.reporter.notice(f"The run's report will have no curves. {error}")
    progress, monitor, best = session.progress, session.monitor, session.bests[chosen]
    return {
        "run_id": session.folder.run_id,
        "key": session.run.key,
        "status": "finished",
        "epochs": progress.epochs_begun,
        "steps": progress.step,
        # Also in a process that only judges.
        "time_is_up": progress.epoch < session.training.epochs and (session.is_time_up or session.is_late),
        "best_epoch": best.epoch,
        "best_validation_loss": best.loss,
        "best_by": session.criterion.name,
        "best_value": session.criterion.figure(best),
        "weights": chosen,
        "keep": session.training.keep,
        "parameters": sum(parameter.numel() for parameter in session.model.parameters() if parameter.requires_grad),
        "device": session.meter.key,
        "plan": session.own_plan.to_plain(),
        "reference_models": [asdict(plan) for plan in session.reference_models.plans],
        "ooms_rescued": ooms_rescued + session.ooms_elsewhere,
        "micro_batch_size": max(engine.largest_micro_batch for engine in session.engines) or None,
        "predicted_peak_bytes": session.fullest.run_plan.predicted_peak_bytes,
        "peak_memory_bytes": monitor.peak_bytes or None,
        "peak_memory_pct": monitor.peak_share,
        "gpu_utilisation": monitor.utilisation,
        "judgement": judgement,
        # As text, since who lists the run later does not import its task.
        "summary_tables": [_plain_table(table) for table in session.task.summary_tables(judgement)],
        "tables": [_plain_table(table) for table in session.task.tables(judgement)],
        "beside": {
            kind: {
                "best_epoch": session.bests[kind].epoch,
                "best_validation_loss": session.bests[kind].loss,
                "judgement": judged,
            }
            for kind, judged in beside.items()
        },
    }


def _join_for_judgement(session: Session) -> None:
    """Gives rank 0 the whole model on its device, in place of its shards, once the other ranks have ended."""
    for parameter in session.model.parameters():
        shard_of(parameter).untyped_storage().resize_(0)
    session.shards = None
    session.model = fresh_model(session.run, session.task, session.meter)
    for engine in session.engines:
        engine.batcher.go_on_with(session.model)


def _judged(session: Session, kind: str) -> tuple[Mapping[str, Any], Mapping[str, Predictions]]:
    """Judges the best weights of a kind; returns the judgement and the predictions of single samples."""
    session.model.load_state_dict(session.bests[kind].weights)
    session.model.eval()
    title = "judging" if len(session.bests) == 1 else f"judging the {kind} weights"
    with session.reporter.stage(title, unit="samples") as stage:
        score = _Scores(session, stage.advance)
        judgement = session.task.judge(score)
        return judgement, session.task.predictions(judgement, score)


def _plain_table(table: TextTable) -> dict[str, Any]:
    return {"title": table.title, "columns": table.columns, "rows": table.rows, "notes": table.notes}
