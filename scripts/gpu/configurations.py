"""The configurations of scripts/gpu-check: a model at a capacity. Plain data, which are also passed to the measuring
process and written into the results.
"""

from dataclasses import dataclass
from typing import Final

GIB: Final = 2**30

SIMULATED: Final = "sim"
"""The simulated GPU. Its size is the configuration's capacity."""

CAPACITIES: Final = tuple(gib * GIB for gib in (8, 16, 24, 40))
"""Bytes that PyTorch's allocator may use of a real GPU."""

QUICK_CAPACITIES: Final = (8 * GIB, 24 * GIB)
"""Capacities with `--quick`."""

MODELS: Final = ("gat", "vgae", "unet", "lstm", "transformer", "critic")
"""Models that `gpu.tasks` can make. Listed here because importing that module imports torch."""

NOT_COMPILED: Final = ("critic",)
"""Models whose loss differentiates twice, which PyTorch does not compile."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One training to measure.

    Attributes:
        device: `cuda`, `cuda:1` or `sim`.
        model: One of MODELS.
        capacity_bytes: Memory that PyTorch's allocator may use.
        precision: As for `can-train --precision`.
        quick: Whether to measure fewer batch sizes.
        swept: Whether to measure the speed at several batch sizes too.
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
        """The key of its results."""
        return f"{self.model}, {self.capacity_bytes / GIB:.4g} GiB, {self.precision}"
