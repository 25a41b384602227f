"""Older and foreign spellings of settings, each resolving to the one canonical name."""

from collections.abc import Mapping
from typing import Final

ALIASES: Final[Mapping[str, str]] = {
    "max_epochs": "epochs",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "global_accum_steps": "gradient_accumulation_steps",
    "accum_steps": "gradient_accumulation_steps",
    "accumulation_muon_threshold": "accumulation_threshold",
    "preflight_muon_threshold": "preflight_threshold",
    "mb_backoff_factor": "backoff_factor",
    "gradient_clip_val": "grad_clip_norm",
    "scheduler_after_batch": "scheduler_interval",
}
"""Alias to canonical field of `TrainingSettings`; the names come from the projects that can-train unites."""


def canonical(name: str) -> str:
    """Resolves a setting's name: `-` and `_` are equivalent, and an alias gives its canonical name."""
    plain = name.replace("-", "_")
    return ALIASES.get(plain, plain)
