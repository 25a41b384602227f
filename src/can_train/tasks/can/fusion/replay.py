"""The fusion agent's memory of what it did, kept in buffers: checkpoints hold it, and a step that is undone takes it
back.

Shapes: R choices, C the memory's capacity.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class ReplayMemory(nn.Module):
    """The last C choices: which window, which mixing weight. State, reward and next state are functions of the two.

    Args:
        capacity: C.
    """

    rows: Tensor
    actions: Tensor
    pushed: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(capacity, dtype=torch.int64))
        self.register_buffer("actions", torch.zeros(capacity, dtype=torch.int64))
        self.register_buffer("pushed", torch.zeros((), dtype=torch.int64))

    def __len__(self) -> int:
        return min(int(self.pushed), len(self.rows))

    def push(self, rows: NDArray[np.int64], actions: NDArray[np.int64]) -> None:
        """Remembers choices, each in the place of the oldest one where the memory is full.

        Args:
            rows: [R] windows.
            actions: [R] which mixing weight was chosen for each.
        """
        pushed, capacity = int(self.pushed), len(self.rows)
        # Those that the same push would overwrite are left out: the order of writing to one place is not defined.
        kept = np.arange(max(0, len(rows) - capacity), len(rows))
        places = torch.from_numpy((pushed + kept) % capacity).to(self.rows.device)
        self.rows[places] = torch.from_numpy(rows[kept]).to(self.rows)
        self.actions[places] = torch.from_numpy(actions[kept]).to(self.actions)
        self.pushed.add_(len(rows))

    def recall(self, uniform: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns remembered choices, [R] windows and [R] mixing weights.

        A memory without any has the first weight for the first window, so that what a batch takes can be seen before
        the first step.

        Args:
            uniform: [R] numbers in [0, 1), each naming a choice by its share of the memory.
        """
        known = max(len(self), 1)
        # Of a double below 1, the product stays below: it is more than half a unit in the last place away.
        at = torch.from_numpy((uniform * known).astype(np.int64)).to(self.rows.device)
        return self.rows[at].cpu().numpy(), self.actions[at].cpu().numpy()
