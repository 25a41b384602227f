"""What share of the memory that a GPU's allocator holds is in use when a batch takes most: the rest are gaps between
blocks, which decide how full a GPU gets before memory runs out. Replayed in the simulated GPU, so none need be there.
"""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from torch import Tensor

from can_train.memory.allocator_settings import segments_expand
from can_train.memory.meters import SimulatedMeter
from can_train.memory.out_of_memory import OutOfMemoryEndsQuietly

GAP_PROBE_BYTES: Final = 256 * 2**20
"""Largest cost of a batch that shows the gaps: larger ones take longer to show about the same share. Of much smaller
ones they are mostly the last page of 20 MiB, as they are on a device that holds no more."""

_ENDLESS: Final = 2**50


class Held(NamedTuple):
    """Bytes at the peak of a batch.

    Attributes:
        allocated: In use.
        reserved: Held by the allocator for them.
    """

    allocated: int
    reserved: int


def measure_held(run: Callable[[], None], resident: Iterable[Tensor]) -> Held:
    """Runs a batch on an endless simulated GPU.

    Args:
        run: Runs the batch on the host.
        resident: Tensors that are there before.
    """
    meter = SimulatedMeter(_ENDLESS, expandable=segments_expand())
    with meter.measuring(resident):
        run()
    return Held(meter.peak_bytes(), meter.peak_reserved_bytes())


def fits(run: Callable[[], None], resident: Iterable[Tensor], capacity_bytes: int) -> bool:
    """Tells whether a batch runs on a simulated GPU of a capacity, also once its allocator's cache is full.

    Args:
        run: Runs the batch on the host.
        resident: Tensors that are there before.
        capacity_bytes: What the allocator may use.
    """
    with OutOfMemoryEndsQuietly():
        meter = SimulatedMeter(capacity_bytes, expandable=segments_expand())
        with meter.measuring(resident):
            run()
            run()
        return True
    return False
