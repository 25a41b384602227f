"""CAN frames as parallel arrays, in the order of the file: what every reader produces and the graph builder consumes.

Shapes: M frames.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

MAX_PAYLOAD_BYTES: Final = 8  # of a classical CAN frame; CAN FD has up to 64
BENIGN: Final = "benign"  # the kind of label code 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Frames:
    """Consecutive frames of a CAN log.

    Attributes:
        timestamp: [M] seconds, float64.
        can_id: [M] identifier, 11 or 29 bits, uint32.
        length: [M] payload bytes, 0 to 8, uint8; 0 for a remote frame.
        payload: [M, 8] bytes, zero beyond `length`, uint8.
        label: [M] uint8, index into the reader's `kinds`; 0 is benign.
    """

    timestamp: NDArray[np.float64]
    can_id: NDArray[np.uint32]
    length: NDArray[np.uint8]
    payload: NDArray[np.uint8]
    label: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.timestamp)

    def __getitem__(self, part: slice) -> Self:
        """Returns a view of a contiguous part."""
        return type(self)(**{field.name: getattr(self, field.name)[part] for field in fields(self)})

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Joins at least one part, in order."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})
