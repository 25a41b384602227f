"""Where a companion's answers come from: from its copy on the device, from the model itself on the host, or from disk,
where they were written down once. Which of them is used is decided elsewhere.

Shapes: R rows (samples).
"""

import zlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.memory.meters import Meter
from can_train.policy.ragged import members
from can_train.reporter import Reporter
from can_train.state.array_folder import ArrayWriter, FolderDamageError, discard_folder, read_arrays
from can_train.training.task import Companion

_HOST = torch.device("cpu")


class FromDevice:
    """Answers of a companion that stays on the device.

    Args:
        companion: The companion.
        meter: Of the device.
        dtype: Of its weights there.

    Attributes:
        model: Its copy on the device.
    """

    def __init__(self, companion: Companion, meter: Meter, dtype: torch.dtype) -> None:
        self._companion = companion
        self._device = meter.device
        self._dtype = dtype
        # A copy even where the device is the host: memory that a simulated GPU sees is memory that is made.
        with meter.active():
            self.model: nn.Module = deepcopy(companion.model).to(meter.device, dtype)

    @property
    def resident(self) -> Sequence[Tensor]:
        """What stays on the device."""
        return [*self.model.parameters(), *self.model.buffers()]

    def __call__(self, rows: NDArray[np.int64]) -> Mapping[str, Tensor]:
        """Asks the model on the device; in full precision, so that answers are the same wherever they come from."""
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return self._companion.answer(self.model, rows, self._device, self._dtype)


class FromHost:
    """Answers of a companion that stays, and computes, on the host.

    Args:
        companion: The companion.
        meter: Of the device that the answers go to.
    """

    resident: Sequence[Tensor] = ()

    def __init__(self, companion: Companion, meter: Meter) -> None:
        self._companion = companion
        self._meter = meter
        # As its run trained it: weights of double precision take no features of single precision.
        self._dtype = next(companion.model.parameters()).dtype

    def __call__(self, rows: NDArray[np.int64]) -> Mapping[str, Tensor]:
        """Asks the model on the host."""
        with self._meter.host(), torch.no_grad(), torch.autocast(self._meter.device.type, enabled=False):
            answers = self._companion.answer(self._companion.model, rows, _HOST, self._dtype)
        return {name: answer.to(self._meter.device, copy=True) for name, answer in answers.items()}


class FromTable:
    """Answers that are looked up.

    Args:
        companion: The companion.
        device: Where they go to.
        table: By output, one row after another for each of the companion's samples.

    Attributes:
        table: As given.
    """

    resident: Sequence[Tensor] = ()

    def __init__(self, companion: Companion, device: torch.device, table: Mapping[str, NDArray[np.float32]]) -> None:
        self._companion = companion
        self._device = device
        self.table = table
        self._rows = companion.rows
        self._ptr = {
            name: np.concatenate([[0], np.cumsum(lengths)])
            for name, lengths in companion.lengths(companion.rows).items()
        }

    @classmethod
    def blank(cls, companion: Companion, device: torch.device) -> "FromTable":
        """Answers of the right shape that say nothing, for a plan."""
        lengths = companion.lengths(companion.rows)
        # One zero that is seen everywhere: no memory is taken.
        table = {
            name: np.broadcast_to(np.float32(0), (int(lengths[name].sum()), width))
            for name, width in companion.widths.items()
        }
        return cls(companion, device, table)

    def __call__(self, rows: NDArray[np.int64]) -> Mapping[str, Tensor]:
        """Looks up the answers for some of the companion's samples."""
        positions = np.searchsorted(self._rows, rows)
        return {name: self._taken(name, positions).to(self._device, copy=True) for name in self.table}

    def with_table(self, table: Mapping[str, NDArray[np.float32]]) -> "FromTable":
        """Returns other answers for the same samples."""
        return FromTable(self._companion, self._device, table)

    def checksum(self) -> int:
        """Returns a number that other answers, most likely, do not have."""
        checksum = 0
        for name in sorted(self.table):
            checksum = zlib.crc32(np.ascontiguousarray(self.table[name]).data, checksum)
        return checksum

    def _taken(self, name: str, positions: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.table[name].take(members(self._ptr[name], positions).positions, axis=0))


def read_answers(folder: Path, companion: Companion, reporter: Reporter) -> dict[str, Any] | None:
    """Maps answers that were written down; None where there are none, or damaged ones, which are removed."""
    if not folder.is_dir():
        return None
    try:
        table, _ = read_arrays(folder, list(companion.widths))
    except FolderDamageError as damage:
        reporter.notice(f"The {companion.role}'s answers in {folder} are damaged and are made again: {damage}")
        discard_folder(folder)
        return None
    return table


class AnswerBook:
    """Writes answers down, sample after sample, as a context manager.

    Args:
        folder: Where they will be; it appears when they are complete.
        companion: Whose they are.
    """

    def __init__(self, folder: Path, companion: Companion) -> None:
        kinds = {name: ("float32", (width,)) for name, width in companion.widths.items()}
        self._writer = ArrayWriter(folder, kinds)

    def __enter__(self) -> "AnswerBook":
        self._writer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(*error)

    def add(self, answers: Mapping[str, Tensor]) -> None:
        """Adds the answers for the samples that follow.

        Raises:
            StateError: The folder cannot be written.
        """
        self._writer.append({name: answer.float().cpu().numpy() for name, answer in answers.items()})

    def finish(self) -> dict[str, Any]:
        """Completes them and maps them.

        Raises:
            StateError: The folder cannot be written.
        """
        return self._writer.finish({})
