"""Shards the model of a run over its ranks, and joins it again for the judgement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from can_train.errors import ConfigError
from can_train.fit.micro_batcher import MicroBatcher
from can_train.fit.planner import Planner, Planners
from can_train.fit.sharding import Shards, fits_whole, unshardable_because
from can_train.memory.meters import CpuMeter
from can_train.memory.sharded_tensors import shard_of
from can_train.reporter import SilentReporter
from can_train.training.distributed import ConnectedRanks
from can_train.training.inference import rescue_settings
from can_train.training.loading import fresh_model

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings
    from can_train.fit.batch_dependence import BatchDependence
    from can_train.memory.meters import Meter
    from can_train.training.distributed import Ranks
    from can_train.training.session import Parts, Session


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


def may_shard(training: TrainingSettings, ranks: Ranks) -> bool:
    """Tells whether a run may share its model out to its ranks; raises ConfigError where it must and cannot."""
    refusal = unshardable_because(training)
    if not isinstance(ranks, ConnectedRanks):
        refusal = ConfigError("training.fit=shard shares a model out to the ranks of a run", value="this run has one",
                              remedy="Submit it with --gpus 2, start it with torchrun, or give --fit auto")  # fmt: skip
    if training.fit == "shard" and refusal is not None:
        raise refusal
    return training.fit in ("auto", "shard") and refusal is None


def shard_if_needed(parts: Parts, model: nn.Module) -> tuple[Shards, WholeModel] | None:
    """Shards a model that is on the host of each rank; moves it to the device, and returns None, where the run need not
    share it out.
    """
    ranks, meter, training = parts.ranks, parts.meter, parts.training
    # The optimizer is measured on a few weights, which are not the device's.
    with meter.host():
        fits = ranks.gather(lambda: training.fit != "shard" and fits_whole(model, training, meter.capacity_bytes))
    if all(fits):
        ranks.on_every_rank(lambda: _move(model, meter))
        ranks.broadcast([*model.parameters(), *model.buffers()])
        return None
    # The same seed may give other bits on another processor.
    ranks.broadcast([*model.parameters(), *model.buffers()])
    with meter.host():
        known = ranks.on_every_rank(lambda: WholeModel(parts, model))
    assert isinstance(ranks, ConnectedRanks), "a rank alone shards nothing"
    return Shards(model, ranks, meter.device, known.called, known.used), known


def _move(model: nn.Module, meter: Meter) -> None:
    model.to(meter.device)
    with meter.measuring([*model.parameters(), *model.buffers()]):
        """A simulated GPU counts them from now on."""


def join_for_judgement(session: Session) -> None:
    """Gives rank 0 the whole model on its device, in place of its shards, once the other ranks have ended."""
    for parameter in session.model.parameters():
        shard_of(parameter).untyped_storage().resize_(0)
    session.shards = None
    session.model = fresh_model(session.run, session.task, session.meter)
    rescue = rescue_settings(session.training)
    for engine in session.engines:
        engine.batcher = MicroBatcher(session.model, meter=session.meter, rescue=rescue)
