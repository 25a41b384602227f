"""What share of the memory that a GPU's allocator holds is in use when a batch takes most: the rest are gaps between
blocks, which decide how full a GPU gets before memory runs out. Replayed in the simulated GPU, so none need be there.
"""

from collections.abc import Callable, Iterable
from typing import Final

from torch import Tensor

from can_train.memory.allocator_settings import segments_expand
from can_train.memory.meters import SimulatedMeter

GAP_PROBE_BYTES: Final = 256 * 2**20
"""Cost of a batch that shows the gaps: of much smaller ones they are mostly the last page of 20 MiB, and larger ones
take longer to show about the same."""

_ENDLESS: Final = 2**50


def share_in_use(run: Callable[[], None], resident: Iterable[Tensor]) -> float:
    """Runs a batch and returns allocated ÷ reserved bytes, each at its peak.

    Args:
        run: Runs the batch on the host.
        resident: Tensors that are there before.
    """
    meter = SimulatedMeter(_ENDLESS, expandable=segments_expand())
    with meter.measuring(resident):
        run()
    return meter.peak_bytes() / max(meter.peak_reserved_bytes(), 1)
