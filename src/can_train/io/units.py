"""Amounts of memory and time in the notation of people and of SLURM: `512MiB`, `2GB`, `16G`, `1:30:00`. Names of
devices: `cuda:1`, `sim:2GiB`. Times, values of settings and short names as text, and numbers as JSON values.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

from can_train.errors import ConfigError, DeviceError, nearest_first

_PREFIXES: Final = ("k", "m", "g", "t")

_UNIT_BYTES: Final = {
    prefix + end: base**power
    for power, prefix in enumerate(_PREFIXES, start=1)
    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))
}

_SIZE: Final = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{0,15})?)\s*([a-z]+)\s*", re.IGNORECASE)
_WORDED: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h|d)", re.IGNORECASE)
_COLONS: Final = re.compile(r"(?:(?P<days>\d{1,6})-)?(?P<parts>\d{1,9}(?::\d{1,9}){0,2})", re.ASCII)
_MEMORY: Final = re.compile(r"(\d{1,12})([KMGT]?)B?", re.IGNORECASE | re.ASCII)

_DEVICE: Final = re.compile(r"auto|cpu|cuda(?::([0-9]{1,9}))?")
_DEVICES: Final = ("auto", "cpu", "cuda", "cuda:1", "sim:2GiB")  # an example of each form of `--device`

_SINGULAR: Final = {"are": "is", "were": "was", "have": "has", "mark": "marks"}

_LONGEST_VALUE: Final = 200  # characters; a value may be a file's content
_BEGINNING: Final = 24  # characters of a longer value that are shown

_DAY_S: Final = 24 * 3600
_UNIT_S: Final = {"s": 1, "min": 60, "h": 3600, "d": _DAY_S}
_DURATION_UNITS_S: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_UNIT_KIB: Final = {"K": 1, "": 2**10, "M": 2**10, "G": 2**20, "T": 2**30}


def parse_size(text: str, name: str = "This", *, or_zero: bool = False) -> int:
    """Reads a size as whole bytes, rounded down; case does not matter. 0MiB is a size only with `or_zero`.

    >>> parse_size("1.5GiB"), parse_size("2gb")
    (1610612736, 2000000000)

    Raises:
        ConfigError: The number or the unit is missing or wrong, or it is less than a byte.
    """
    match = _SIZE.fullmatch(text)
    size_bytes = int(Fraction(match[1]) * _UNIT_BYTES.get(match[2].lower(), 0)) if match else 0
    is_zero = or_zero and match is not None and match[2].lower() in _UNIT_BYTES and not float(match[1])
    if size_bytes < 1 and not is_zero:
        number = "a number" if or_zero else "a number above zero"
        remedy = f"A size is {number} with its unit. Write it as 512MiB, 1.5GiB or 2GB"
        raise ConfigError(f"{name} is no size", value=repr(text), remedy=remedy)
    return size_bytes


def exact_size(size_bytes: int) -> str:
    """Writes a size in the largest binary unit that divides it, so that equal sizes get equal texts.

    >>> exact_size(3 * 2**29), exact_size(2**31), exact_size(1000)
    ('1536mib', '2gib', '1000b')
    """
    for power in range(len(_PREFIXES), 0, -1):
        if size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{_PREFIXES[power - 1]}ib"
    return f"{size_bytes}b"


def size_text(size_bytes: float) -> str:
    """Writes a size to three digits, or to a hundredth of a GiB.

    >>> size_text(3 * 2**29), size_text(2**28), size_text(2**24), size_text(5000), size_text(0)
    ('1.50 GiB', '256 MiB', '16.0 MiB', '4.9 KiB', '0 KiB')
    """
    if size_bytes >= _UNIT_BYTES["gib"]:
        return f"{size_bytes / _UNIT_BYTES['gib']:.2f} GiB"
    unit, name = ("mib", "MiB") if size_bytes >= _UNIT_BYTES["mib"] else ("kib", "KiB")
    size = size_bytes / _UNIT_BYTES[unit]
    return f"{size:.0f} {name}" if size >= 100 or not size else f"{size:.1f} {name}"


def parse_device(text: str) -> tuple[str, int]:
    """Reads the name of a device: its kind, and the number of a GPU or the bytes of a simulated GPU, else 0.

    >>> parse_device("auto"), parse_device("cuda:1"), parse_device("sim:2GiB")
    (('auto', 0), ('cuda', 1), ('sim', 2147483648))

    Raises:
        DeviceError: No device has such a name, or the size of a simulated GPU cannot be read.
    """
    kind, _, size = text.partition(":")
    if kind == "sim":
        try:
            return kind, parse_size(size)
        except ConfigError:
            raise DeviceError("The memory of a simulated GPU, sim:<size>, cannot be read", value=repr(text),
                              remedy="Give it memory: sim:512MiB, sim:2GiB") from None  # fmt: skip
    # Not by torch.device, which keeps 8 bits of the number: cuda:256 would be cuda:0.
    if (match := _DEVICE.fullmatch(text)) is None:
        valid = ", ".join(nearest_first(text, _DEVICES))
        raise DeviceError("Unknown device", value=repr(text), remedy=f"Valid: {valid}")
    return kind, int(match[1] or 0)


def parse_time_min(text: str) -> int:
    """Reads a time limit as `parse_time_s` does, as whole minutes, rounded up as SLURM rounds.

    >>> parse_time_min("90"), parse_time_min("1:30:00"), parse_time_min("2-12"), parse_time_min("12h")
    (90, 90, 3600, 720)
    """
    return math.ceil(parse_time_s(text) / 60)


def parse_time_s(text: str) -> float:
    """Reads a time limit in seconds.

    Args:
        text: Minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
            days-hours:minutes:seconds; beyond SLURM also a number with its unit: 90s, 90min, 12h, 2d.

    Raises:
        ConfigError: It is none of these, or zero.
    """
    total_s = 0.0
    if worded := _WORDED.fullmatch(text.strip()):
        total_s = float(worded[1]) * _UNIT_S[worded[2].lower()]
    elif colons := _COLONS.fullmatch(text.strip()):
        parts = [int(part) for part in colons["parts"].split(":")]
        if colons["days"] is not None:
            hours, minutes, seconds = [*parts, 0, 0][:3]
        else:
            hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
        total_s = int(colons["days"] or 0) * _DAY_S + hours * 3600 + minutes * 60 + seconds
    if total_s == 0:
        remedy = ("A time limit is a number of minutes, or as SLURM writes it. Write it as 90, 1:30:00 or 2-12 "
                  "(days-hours), or with a unit: 90min, 12h, 2d")  # fmt: skip
        raise ConfigError("This is no time limit", value=repr(text), remedy=remedy)
    return total_s


def time_text(minutes: int) -> str:
    """Writes a time limit as SLURM does.

    >>> time_text(90), time_text(3600)
    ('1:30:00', '2-12:00:00')
    """
    days, rest = divmod(minutes, 24 * 60)
    clock = f"{rest // 60}:{rest % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


def parse_memory_mib(text: str) -> int:
    """Reads memory as SLURM counts it, in whole MiB, rounded up; 0 stands for a node's whole memory.

    >>> parse_memory_mib("900"), parse_memory_mib("16G"), parse_memory_mib("1K")
    (900, 16384, 1)

    Raises:
        ConfigError: It is not a whole number, or has another unit than K, M, G or T.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        remedy = "Memory is a whole number of MiB, or has K, M, G or T behind it. Write it as 900M or 16G"
        raise ConfigError("This is no amount of memory", value=repr(text), remedy=remedy)
    return math.ceil(int(match[1]) * _UNIT_KIB[match[2].upper()] / 2**10)


def memory_text(mib: int) -> str:
    """Writes memory as SLURM does.

    >>> memory_text(16384), memory_text(2000)
    ('16G', '2000M')
    """
    return f"{mib // 2**10}G" if mib and mib % 2**10 == 0 else f"{mib}M"


def shortened(names: Sequence[str]) -> dict[str, str]:
    """Shortens names to as many of their first words as tell them all apart.

    Example:
        >>> shortened(["test_01_known_vehicle", "test_02_unknown_vehicle"])
        {'test_01_known_vehicle': 'test_01', 'test_02_unknown_vehicle': 'test_02'}
    """
    words = {name: name.split("_") for name in names}
    for count in range(1, max(map(len, words.values()), default=0)):
        short = {name: "_".join(each[:count]) for name, each in words.items()}
        if 1 < len({*short.values()}) == len(names):
            return short
    return {name: name for name in names}


def counted(count: int, noun: str, verb: str = "") -> str:
    """Writes a count with its noun, and with the verb that is given for several.

    >>> counted(1, "run"), counted(12345, "run"), counted(1, "row", "are"), counted(2, "row", "are")
    ('1 run', '12,345 runs', '1 row is', '2 rows are')
    """
    if count != 1:
        return f"{count:,} {noun}s {verb}".rstrip()
    return f"1 {noun} {_SINGULAR.get(verb, verb)}".rstrip()


def count_of(environment: Mapping[str, str], name: str, default: int) -> int:
    """Reads a variable that holds a count. Where it is missing or no whole number, the default is returned: launchers
    and job scripts set such variables, which are no mistakes of a command.

    >>> count_of({"SLURM_PROCID": "3"}, "SLURM_PROCID", 0), count_of({"SLURM_PROCID": ""}, "SLURM_PROCID", 0)
    (3, 0)
    """
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default


def count_range(fewest: int, most: int, between: str = " to ") -> str:
    """Writes a count, or its range where it varies."""
    return f"{most}" if fewest == most else f"{fewest}{between}{most}"


def finite(value: Any) -> Any:
    """Copies a value for JSON; NaN and infinity become null, and a number of NumPy or PyTorch one of Python."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(inner) for name, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def duration(seconds: float) -> str:
    """Writes a duration in its largest unit, followed by the next smaller unit if the number is below ten.

    Example:
        >>> duration(8), duration(754), duration(7 * 3600 + 299), duration(200_000)
        ('8 s', '12 min', '7 h 4 min', '2 d 7 h')
    """
    whole = max(0, int(seconds))
    for (size, unit), (smaller, smaller_unit) in pairwise(_DURATION_UNITS_S):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if whole < 10 * size and rest else "")
    return f"{whole} s"


def local_time(time: str) -> str:
    """Writes an ISO 8601 time in this machine's time zone, to the second."""
    return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M:%S}"


def seconds_between(start: str, end: str = "") -> float:
    """Returns the seconds between two ISO 8601 times; without an end, until now."""
    last = datetime.fromisoformat(end) if end else datetime.now(UTC)
    return (last - datetime.fromisoformat(start)).total_seconds()


def value_text(value: Any) -> str:
    """Writes the value of a setting; an empty one is `none`, and a very long one is cut."""
    text = "none" if value is None or value == "" else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_BEGINNING]}…"


def number_or_none(value: Any) -> float | None:
    """Returns a finite number unchanged, and None for anything else, which a damaged or edited file may hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < math.inf else None
