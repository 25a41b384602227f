"""Sizes of memory as people write them."""

import re
from typing import Final

from can_train.errors import ArgumentError

_BINARY: Final = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_size(text: str) -> int:
    """Reads a size; letters of any case.

    >>> parse_size("2GiB"), parse_size("1.5g"), parse_size("16GB")
    (2147483648, 1610612736, 16000000000)

    Args:
        text: A positive number and a unit: KiB, MiB, GiB, TiB (powers of 1024; the letter alone means the same), or kB,
            MB, GB, TB (powers of 1000).

    Raises:
        ArgumentError: It is not of this form, or below one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt])(i?b)?\s*", text.lower())
    units = _DECIMAL if found is not None and found[3] == "b" else _BINARY
    size = int(float(found[1]) * units[found[2]]) if found is not None else 0
    if size < 1:
        raise ArgumentError(
            "A size of memory is a positive number with a unit", value=repr(text), remedy="Try 2GiB, 512MiB, 16GB"
        )
    return size
