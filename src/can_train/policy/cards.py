"""Which common GPUs would hold what does not fit here. What is usable of a card is a rule of thumb, and said to be."""

from typing import Final

GIB: Final = 2**30

_CARDS: Final = (
    ("rtx-3060-12gb", 12), ("t4-16gb", 16), ("v100-16gb", 16), ("a30-24gb", 24), ("rtx-4090-24gb", 24), ("l4-24gb", 24),
    ("v100-32gb", 32), ("rtx-5090-32gb", 32), ("a100-40gb", 40), ("l40s-48gb", 48), ("a6000-48gb", 48),
    ("a100-80gb", 80), ("h100-80gb", 80), ("h200-141gb", 141), ("b200-180gb", 180),
)  # fmt: skip
"""(name, nominal gigabytes), smallest first. Source: the vendor's data sheets."""

_USABLE: Final = 0.92
"""Share of the nominal size that a training can count on: the rest goes to the context and to the driver."""

_NAMED: Final = 3


def cards_that_hold(need_bytes: float) -> str:
    """Names the smallest common GPUs that would hold `need_bytes`, in words."""
    names = [name for name, size in _CARDS if size * GIB * _USABLE >= need_bytes]
    return ", ".join(names[:_NAMED]) if names else "no common GPU"
