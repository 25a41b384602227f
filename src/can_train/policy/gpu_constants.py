"""What was measured of real GPUs beside tensors: how much of the memory never reaches PyTorch's allocator, and how much
of what does is the libraries'. Measured figures replace the assumed ones in `cards`; scripts/gpu-check measures them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class GpuConstants:
    """One measurement of one kind of GPU.

    Attributes:
        key: The kind, `h100-80gb`.
        total_bytes: What the driver shows of it.
        outside_bytes: In use beside the allocator once all libraries are: the context, their kernels, the driver.
        workspace_bytes: What the libraries keep inside the allocator.
        date: Day of the measurement, `2026-01-31`.
        driver: Version of the driver; empty where it is not known.
        torch: Version of torch.
    """

    key: str
    total_bytes: int
    outside_bytes: int
    workspace_bytes: int
    date: str
    driver: str
    torch: str

    @property
    def source(self) -> str:
        """Where the figures come from, in words."""
        return f"measured on {self.date} with driver {self.driver or 'unknown'}, torch {self.torch}"

    @classmethod
    def from_gpu_check(cls, device: Mapping[str, Any], steps: list[Mapping[str, Any]], *, date: str) -> "GpuConstants":
        """Reads what scripts/gpu-check found.

        Args:
            device: The card, driver and versions.
            steps: What the libraries took, one after another.
            date: Day of the measurement.
        """
        return cls(
            key=device["key"],
            total_bytes=device["total_bytes"],
            outside_bytes=max(step["outside_bytes"] for step in steps),
            workspace_bytes=sum(max(step["kept_bytes"], 0) for step in steps),
            date=date,
            driver=device["driver"],
            torch=device["torch"],
        )


MEASURED: Final[Mapping[str, GpuConstants]] = {}
"""Measurements that come with can-train, by key. There is none yet: every plan for a card that nobody has measured on
the same cluster rests on assumed figures, and says so."""
