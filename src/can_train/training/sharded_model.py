"""Shards the model of a run over its ranks, and joins it again for the judgement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from can_train.errors import ConfigError
from can_train.fit.micro_batcher import MicroBatcher
from can_train.fit.planner import Planner, Planners
from can_train.fit.sharding import Shards
from can_train.memory.meters import CpuMeter
from can_train.memory.sharded_tensors import shard_of
from can_train.reporter import SilentReporter
from can_train.training.distributed import ConnectedRanks
from can_train.training.inference import rescue_settings
from can_train.training.loading import fresh_model

# Optimizers that update an entry of a weight by the same entry of its gradient and its moments alone.
ELEMENTWISE: Final = ("adamw", "adam", "sgd", "adadelta", "adagrad", "adamax", "nadam", "radam", "rmsprop", "rprop")

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings
    from can_train.fit.batch_dependence import BatchDependence
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
        called = [module for planner in planners.phases for module in planner.explorer.called_modules()]
        self.called = list(dict.fromkeys(called))
        self.dependences: list[BatchDependence] = [planner.batch_dependence for planner in planners.phases]

    def tell(self, planners: Planners) -> None:
        """Tells planners how samples of a batch depend on each other."""
        for planner, dependence in zip(planners.phases, self.dependences, strict=True):
            planner.batch_dependence = dependence


def check_shardable(training: TrainingSettings, ranks: Ranks) -> None:
    """Raises ConfigError where a run cannot train on shards."""
    setting = "training.fit=shard"
    if not isinstance(ranks, ConnectedRanks):
        raise ConfigError(f"{setting} shares a model out to the ranks of a run", value="this run has one",
                          remedy="Submit it with --gpus 2, start it with torchrun, or give --fit auto")  # fmt: skip
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ConfigError(f"{setting} needs fully_shard of torch 2.13", value=f"torch {torch.__version__}",
                          remedy="Install a later torch, or give --fit auto")  # fmt: skip
    if training.optimizer not in ELEMENTWISE:
        raise ConfigError(f"{setting} updates each weight by itself", value=f"--optimizer {training.optimizer}",
                          remedy=f"Take one of {', '.join(ELEMENTWISE)}")  # fmt: skip
    if training.compile != "off":
        raise ConfigError(f"{setting} computes the model as it is", value=f"training.compile={training.compile}",
                          remedy="Leave --compile out")  # fmt: skip
    if training.channels_last:
        raise ConfigError(f"{setting} shares weights out that lie in rows", value="training.channels_last=true",
                          remedy="Leave --channels-last out")  # fmt: skip


def join_for_judgement(session: Session) -> None:
    """Gives rank 0 the whole model on its device, in place of its shards, once the other ranks have ended."""
    for parameter in session.model.parameters():
        shard_of(parameter).untyped_storage().resize_(0)
    session.shards = None
    session.model = fresh_model(session.run, session.task, session.meter)
    rescue = rescue_settings(session.training)
    for engine in session.engines:
        engine.batcher = MicroBatcher(session.model, meter=session.meter, rescue=rescue)


def shard_model(parts: Parts, model: nn.Module, known: WholeModel) -> Shards:
    """Shards a model that is whole on the host of each rank."""
    ranks = parts.ranks
    assert isinstance(ranks, ConnectedRanks), "a rank alone shards nothing"
    return Shards(model, ranks, parts.meter.device, known.called)
