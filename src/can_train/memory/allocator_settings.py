"""Decides whether the segments of the caching allocator expand, on CUDA and on the simulated GPU alike: they do, unless
the user has settings of their own. Ragged batches ask for sizes that never come back, and fixed segments are left with
slivers of them.
"""

import os
import re
from collections.abc import Mapping
from typing import Final

import torch

_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The user's own settings, the first that is set before the others; torch reads the first since 2.9."""

_SETTING: Final = "expandable_segments:True"


def segments_expand(environment: Mapping[str, str] = os.environ) -> bool:
    """Tells whether segments expand under the user's settings, or under can-train's where there are none."""
    own = _own_settings(environment)
    return own is None or re.search(r"\bexpandable_segments\s*:\s*True\b", own) is not None


def settings_in_force(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the user's settings, or can-train's where there are none."""
    own = _own_settings(environment)
    return _SETTING if own is None else own


def expand_cuda_segments(environment: Mapping[str, str] = os.environ) -> None:
    """Makes CUDA's segments expand unless the user has settings of their own; comes before the first allocation.

    Only this process is changed: the variables would be inherited by whatever it starts.
    """
    if _own_settings(environment) is None:
        # The first is torch 2.9's and later; the second warns there that it is deprecated.
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        apply = newer or torch.cuda.memory._set_allocator_settings
        apply(_SETTING)


def _own_settings(environment: Mapping[str, str]) -> str | None:
    return next((environment[name] for name in _VARIABLES if name in environment), None)
