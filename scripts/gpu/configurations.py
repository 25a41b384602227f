"""What is measured: which model at which capacity. Plain data that travels to a process of its own and into results."""

from dataclasses import dataclass
from typing import Final

GIB: Final = 2**30

SIMULATED: Final = "sim"
"""The device that is a simulated GPU; its size is the capacity."""

CAPACITIES: Final = tuple(gib * GIB for gib in (8, 16, 24, 40))
"""Bytes that the allocator may use, on a real GPU."""

QUICK_CAPACITIES: Final = (8 * GIB, 24 * GIB)
"""Those of a quick run."""

MODELS: Final = ("gat", "vgae", "unet", "lstm", "transformer")
"""What `gpu.tasks` makes, which is not imported here: it needs torch."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One training.

    Attributes:
        device: `cuda`, `cuda:1` or `sim`.
        model: Name of a task.
        capacity_bytes: What the allocator may use.
        precision: As `--precision` of can-train.
        quick: Whether fewer sizes are enough.
        swept: Whether the speed is measured too.
    """

    device: str
    model: str
    capacity_bytes: int
    precision: str
    quick: bool
    swept: bool

    @property
    def simulated(self) -> bool:
        """Whether the device is a simulated GPU."""
        return self.device == SIMULATED

    @property
    def label(self) -> str:
        """Names it."""
        return f"{self.model}, {self.capacity_bytes / GIB:.4g} GiB, {self.precision}"
