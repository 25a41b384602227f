"""Reads and writes amounts of memory as people spell them: `512MiB`, `1.5GiB`, `2GB`. A decimal prefix (MB) counts in
thousands, a binary one (MiB) and a bare letter (M) in 1,024s.
"""

import re
from fractions import Fraction
from typing import Final

from can_train.errors import ConfigError

_PREFIXES: Final = ("k", "m", "g", "t")
_UNIT_BYTES: Final = {
    **{prefix: 1024**power for power, prefix in enumerate(_PREFIXES, start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(_PREFIXES, start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(_PREFIXES, start=1)},
}

_THREE_DIGITS: Final = 100
"""MiB from which a fraction of one is no longer worth a digit."""

_SIZE: Final = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{0,15})?)\s*([a-z]+)\s*", re.IGNORECASE)
_RULE: Final = "A size is a number above zero with its unit"
_REMEDY: Final = "Write it as 512MiB, 1.5GiB or 2GB"


def parse_size(text: str) -> int:
    """Reads a size as whole bytes, a fraction of a byte dropped; upper and lower case are the same.

    >>> parse_size("1.5GiB"), parse_size("2gb")
    (1610612736, 2000000000)

    Raises:
        ConfigError: It has no number, no unit or an unknown one, or is less than a byte.
    """
    found = _SIZE.fullmatch(text)
    unit_bytes = _UNIT_BYTES.get(found[2].lower(), 0) if found else 0
    size_bytes = int(Fraction(found[1]) * unit_bytes) if found else 0
    if size_bytes < 1:
        raise ConfigError(_RULE, value=repr(text), remedy=_REMEDY)
    return size_bytes


def exact_size(size_bytes: int) -> str:
    """Writes a size in the largest binary unit that divides it: equal sizes read alike, however they were spelt.

    >>> exact_size(3 * 2**29), exact_size(2**31), exact_size(1000)
    ('1536mib', '2gib', '1000b')
    """
    for power in range(len(_PREFIXES), 0, -1):
        if size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{_PREFIXES[power - 1]}ib"
    return f"{size_bytes}b"


def size_text(size_bytes: float) -> str:
    """Writes a size for people, to three digits or a hundredth of a GiB.

    >>> size_text(3 * 2**29), size_text(2**28), size_text(2**24)
    ('1.50 GiB', '256 MiB', '16.0 MiB')
    """
    if size_bytes >= _UNIT_BYTES["gib"]:
        return f"{size_bytes / _UNIT_BYTES['gib']:.2f} GiB"
    size_mib = size_bytes / _UNIT_BYTES["mib"]
    return f"{size_mib:.0f} MiB" if size_mib >= _THREE_DIGITS else f"{size_mib:.1f} MiB"
