"""Plans a run with the whole model on each rank, or with shards of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from can_train.errors import ConfigError, DoesNotFitError
from can_train.fit.planner import Planner, Planners, on_no_rung
from can_train.fit.rungs import SPLIT_ALONE, Rung
from can_train.fit.sharding import Shards, fits_whole, unshardable_because
from can_train.memory.meters import CpuMeter
from can_train.memory.out_of_memory import forget_frames
from can_train.reporter import SilentReporter
from can_train.training.distributed import ConnectedRanks, RankFailedError, check_alike
from can_train.training.loading import fresh_model, start_from

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings
    from can_train.fit.batch_dependence import BatchDependence
    from can_train.memory.meters import Meter
    from can_train.training.distributed import Ranks
    from can_train.training.session import Parts

T = TypeVar("T")


class WholeModel:
    """What is known of a model before it is sharded: afterwards no rank could compute with it alone.

    Args:
        parts: Parts of the run.
        model: The model, on the host.
    """

    def __init__(self, parts: Parts, model: nn.Module) -> None:
        planners = Planners.of_phases(
            Planner(run=parts.run, task=parts.task, model=model, meter=CpuMeter(), reporter=SilentReporter(),
                    verify=False, ranks=parts.ranks.size)
        )  # fmt: skip
        seen = [planner.explorer.called_modules() for planner in planners.phases]
        self.called = list(dict.fromkeys(module for called, _ in seen for module in called))
        self.used = list(dict.fromkeys(parameter for _, used in seen for parameter in used))
        self.dependences: list[BatchDependence] = [planner.batch_dependence for planner in planners.phases]

    def tell(self, planners: Planners) -> None:
        """Tells planners how samples of a batch depend on each other."""
        for planner, dependence in zip(planners.phases, self.dependences, strict=True):
            planner.batch_dependence = dependence


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A sharded model."""

    shards: Shards
    whole: WholeModel


def may_shard(training: TrainingSettings, ranks: Ranks) -> bool:
    """Tells whether a run may share its model out to its ranks; raises ConfigError where it must and cannot."""
    refusal = unshardable_because(training)
    if not isinstance(ranks, ConnectedRanks):
        refusal = ConfigError("training.fit=shard shares a model out to the ranks of a run", value="this run has one",
                              remedy="Submit it with --gpus 2, start it with torchrun, or give --fit auto")  # fmt: skip
    if training.fit == "shard" and refusal is not None:
        raise refusal
    return training.fit in ("auto", "shard") and refusal is None


def may_climb_to_shards(parts: Parts) -> bool:
    """Tells whether a run whose samples fit on no other rung any more may go on with shards of its model."""
    training = parts.training
    is_free = training.fit == "auto" and training.adaptive_micro_batch and may_shard(training, parts.ranks)
    # Shards make no room for the models that the task consults.
    return is_free and not parts.task.reference_models()


def plan_model(
    parts: Parts,
    make: Callable[[nn.Module, Sharded | None], T],
    *,
    is_new: bool,
    was_sharded: Callable[[], bool],
) -> T:
    """Builds the model of a run and plans it: with the whole model on each rank where that fits, else with shards.

    Args:
        parts: The parts that the attempt is made from.
        make: Makes or reads the plan, together with the other ranks.
        is_new: Whether the run has no checkpoint.
        was_sharded: Tells, on rank 0, whether an earlier attempt or run of the configuration needed shards.

    Raises:
        DoesNotFitError: A sample fits in neither way.
    """
    ranks, training = parts.ranks, parts.training
    if not may_shard(training, ranks):
        return _with_whole(parts, make, _initial_model(parts, is_new=is_new))
    model = _model_on_host(parts, is_new=is_new)
    if training.fit == "shard" or ranks.on_rank0(was_sharded):
        return _with_shards(parts, make, model)
    # The optimizer is measured on a few weights, which are not the device's.
    with parts.meter.host():
        fits = ranks.gather(lambda: fits_whole(model, training, parts.meter.capacity_bytes))
    error = None
    if all(fits):
        made, error = _with_whole_or_error(parts, make, model)
        if made is not None:
            return made
        if error is not None and parts.task.reference_models():
            # Shards make no room for the models that the task consults, which may be what did not fit.
            raise error
        # Its weights are not on the host any more, and planning may have changed its buffers.
        model = _model_on_host(parts, is_new=is_new)
        parts.meter.release()
    try:
        return _with_shards(parts, make, model)
    except DoesNotFitError as on_shards:
        if not isinstance(error, DoesNotFitError):
            raise
        raise on_no_rung({SPLIT_ALONE: error, Rung(ranks=ranks.size): on_shards}) from on_shards


def _with_whole_or_error(
    parts: Parts, make: Callable[[nn.Module, Sharded | None], T], model: nn.Module
) -> tuple[T | None, Exception | None]:
    """Plans with the whole model on each rank, to whose device it is moved; returns the error where memory is too small
    on one of them.
    """
    ranks = parts.ranks
    try:
        ranks.on_every_rank(lambda: _move(model, parts.meter))
        return _with_whole(parts, make, model), None
    except Exception as error:
        # All ranks come here, since each exchanges its plan with the others.
        if not all(ranks.exchange(_did_not_fit(error))):
            raise
        # Its frames hold tensors of the device.
        forget_frames(error)
        return None, error


def _did_not_fit(error: Exception) -> bool:
    return isinstance(error, DoesNotFitError) or (isinstance(error, RankFailedError) and error.did_not_fit)


def _initial_model(parts: Parts, *, is_new: bool, on_host: bool = False) -> nn.Module:
    def make() -> nn.Module:
        model = fresh_model(parts.run, parts.task, parts.meter, on_host=on_host)
        if is_new and parts.training.start_from:
            start_from(model, Path(parts.training.start_from))
        return model

    model = parts.ranks.on_every_rank(make)
    if parts.ranks.size > 1:
        check_alike(parts.ranks, lambda: {name: tuple(one.shape) for name, one in model.named_parameters()},
                    "The ranks of a run must build the same model",
                    "Make Task.model depend on the settings and the data alone")  # fmt: skip
    return model


def _model_on_host(parts: Parts, *, is_new: bool) -> nn.Module:
    with parts.meter.host():
        return _initial_model(parts, is_new=is_new, on_host=True)


def _with_whole(parts: Parts, make: Callable[[nn.Module, Sharded | None], T], model: nn.Module) -> T:
    # The same seed may give other bits on another processor.
    parts.ranks.broadcast([*model.parameters(), *model.buffers()])
    return make(model, None)


def _with_shards(parts: Parts, make: Callable[[nn.Module, Sharded | None], T], model: nn.Module) -> T:
    """Plans with shards of a model that is on the host of each rank."""
    ranks = parts.ranks
    ranks.broadcast([*model.parameters(), *model.buffers()])
    with parts.meter.host():
        whole = ranks.on_every_rank(lambda: WholeModel(parts, model))
    assert isinstance(ranks, ConnectedRanks), "a rank alone shards nothing"
    shards = Shards(model, ranks, parts.meter.device, whole.called, whole.used)
    return make(model, Sharded(shards=shards, whole=whole))


def _move(model: nn.Module, meter: Meter) -> None:
    model.to(meter.device)
    with meter.measuring([*model.parameters(), *model.buffers()]):
        """A simulated GPU counts them from now on."""
