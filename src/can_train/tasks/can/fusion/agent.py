"""The fusion agent: a network that values mixing weights, a slower copy of it that the values of next states come from,
and the memory of what was chosen.

Shapes: B windows, A mixing weights.
"""

from copy import deepcopy
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.tasks.can.fusion.replay import ReplayMemory
from can_train.tasks.can.fusion.states import STATE_WIDTH
from can_train.tasks.can.settings import FusionAgentSettings


class FusionAgent(nn.Module):
    """A deep Q-network over mixing weights (DQN: Mnih et al., 2015).

    The target network and the memory are buffers: the optimizer has no part in them, and whatever saves, restores or
    undoes a model's buffers takes them along.

    Args:
        settings: Widths.
        mixing_weights: A.
        replay_size: Choices that are remembered.

    Attributes:
        online: The network that is trained: [B, 7] states → [B, A] values.
        target: Its copy.
        memory: What was chosen.

    Shapes:
        [B, 7] states → [B, A] values.
    """

    steps: Tensor

    def __init__(self, settings: FusionAgentSettings, *, mixing_weights: int, replay_size: int) -> None:
        super().__init__()
        self.online = _network([STATE_WIDTH, *[settings.hidden] * settings.layers, mixing_weights])
        self.target = _in_buffers(deepcopy(self.online))
        self.memory = ReplayMemory(replay_size)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @property
    def weight(self) -> Tensor:
        """Some weight of the trained network: states have its type, and are where it is."""
        return next(self.online.parameters())

    def forward(self, states: Tensor) -> Tensor:
        """Values every mixing weight."""
        values: Tensor = self.online(states)
        return values

    @torch.no_grad()
    def begin_step(self, target_every: int) -> None:
        """Counts an optimizer step; every so many, the target network becomes a copy of the trained one."""
        if int(self.steps) % target_every == 0:
            for buffer, parameter in zip(self.target.buffers(), self.online.parameters(), strict=True):
                buffer.copy_(parameter)
        self.steps.add_(1)


def as_agent(model: nn.Module) -> FusionAgent:
    """Takes a model for the agent that the fusion task has made."""
    assert isinstance(model, FusionAgent)
    return model


def best_actions(agent: FusionAgent, states: NDArray[np.float32]) -> NDArray[np.int64]:
    """Returns [B] the mixing weights that an agent values most, by position, for [B, 7] states."""
    values: Tensor = agent(torch.from_numpy(states).to(agent.weight))
    return values.argmax(dim=1).cpu().numpy()


def _network(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, out in pairwise(widths):
        layers += [nn.Linear(wide, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _in_buffers(network: nn.Module) -> nn.Module:
    """Makes every parameter of a network a buffer of the same name."""
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    return network
