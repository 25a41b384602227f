"""Streams of the samples of small tasks, for tests of what trains on them."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from can_train import Task
from fakes.sample_tasks import Words


class Counted:
    """Words with an augmentation; it does not divide itself, and is shuffled by its epoch."""

    def __init__(self, samples: Sequence[Tensor]) -> None:
        self._samples, self._epoch = list(samples), 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(len(self._samples)))
        random.Random(self._epoch).shuffle(order)
        for number in order:
            yield self._samples[number] + random.random() + torch.rand(())


class Sharded(IterableDataset[Tensor]):
    """Files of different lengths, which are divided among processes and shuffled by a generator of the host."""

    def __init__(self, samples: Sequence[Tensor], files: int = 5) -> None:
        bounds = [number * (number + 1) * len(samples) // (files * (files + 1)) for number in range(files + 1)]
        self._files = [samples[start:stop] for start, stop in pairwise(bounds)]

    def __len__(self) -> int:
        return sum(map(len, self._files))

    def __iter__(self) -> Iterator[Tensor]:
        files, info = list(self._files), get_worker_info()
        random.shuffle(files)
        for file in files if info is None else files[info.id :: info.num_workers]:
            for sample in file:
                yield sample * (1 + torch.rand(()))


class Stateful(Counted):
    """Goes on from a state."""

    def __init__(self, samples: Sequence[Tensor]) -> None:
        super().__init__(samples)
        self._next, self.loaded = 0, list[int]()

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
        LOADED.append(self._next)

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(len(self._samples)))
        random.Random(self._epoch).shuffle(order)
        while self._next < len(order):
            self._next += 1
            yield self._samples[order[self._next - 1]] + random.random()
        self._next = 0


class Refilled(Stateful):
    """Its state leaves out the samples that it holds to shuffle them, so that they do not come back."""

    def __iter__(self) -> Iterator[Tensor]:
        held = list[Tensor]()
        for sample in super().__iter__():
            held.append(sample)
            if len(held) == 4:
                yield held.pop(0)
        yield from held


class Endless:
    """Has no length."""

    def __init__(self, samples: Sequence[Tensor]) -> None:
        self._samples = list(samples)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield from self._samples


LOADED: list[int] = []
"""Places to which streams of the test were brought by their state."""


def streamed(kind: type[Task] = Words, stream: Any = Sharded, times: int = 4) -> type[Task]:
    """Returns a task whose training samples come from a stream; there are `times` as many."""

    class Streamed(kind):  # type: ignore[misc, valid-type]
        def datasets(self) -> Mapping[str, Any]:
            sets = super().datasets()
            return {
                **sets,
                "train": stream([sample + 0.01 * copy for copy in range(times) for sample in sets["train"]]),
            }

    return Streamed


class ShardedWords(streamed(times=1)):  # type: ignore[misc]
    """The words of `Words` as a stream, for other processes."""
