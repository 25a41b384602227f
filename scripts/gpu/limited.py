"""A device, real or simulated, with less memory than it has."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from can_train.errors import DeviceError
from can_train.memory.meters import Meter, SimulatedMeter, open_meter, segments_expand
from gpu.configurations import SIMULATED

MIB: Final = 2**20


@contextmanager
def limited_device(device: str, capacity_bytes: int) -> Iterator[Meter]:
    """Opens a device whose allocator may use no more than a capacity; on a simulated one all made inside counts.

    Args:
        device: `cuda`, `cuda:1` or `sim`.
        capacity_bytes: What the allocator may use.

    Raises:
        DeviceError: The device has less.
    """
    if device == SIMULATED:
        simulated = SimulatedMeter(capacity_bytes, expandable=segments_expand())
        with simulated.active():
            yield simulated
        return
    # This first meter chooses how the allocator's segments grow, which must be before CUDA is used at all.
    whole = open_meter(device)
    if capacity_bytes > whole.capacity_bytes:
        raise DeviceError(
            "A capacity is at most what the device has free",
            value=f"{capacity_bytes / MIB:.0f} of {whole.capacity_bytes / MIB:.0f} MiB",
            remedy="Choose others: --capacities",
        )
    torch.cuda.set_per_process_memory_fraction(capacity_bytes / whole.total_bytes, whole.device)
    try:
        limited = open_meter(device)
        if limited.capacity_bytes > capacity_bytes:
            raise DeviceError("This torch does not tell its share of the GPU", value=torch.__version__)
        yield limited
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, whole.device)
