"""Reads factors that other tools, or other state folders, have exported. Four shapes, key by key: the export of today,
the same without `devices`, `{key: {device: factor}}` and `{key: factor}`. A file is taken whole or not at all.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from can_train.errors import DataError
from can_train.state.documents import check_depth
from can_train.state.events import ANY_DEVICE, Imported

_FACTOR: Final = "safety_factor"
_DEVICES: Final = "devices"
_KEPT: Final = ("initial_factor_reason", "runs")
"""What is taken over beside the factor."""

_SHAPES: Final = (
    "Give what can-train factors --export writes, or {key: {device: factor}}, or {key: factor}, factors in (0, 1]"
)

Entries = dict[str, dict[str, Imported]]
"""Configuration key → kind of device, or `ANY_DEVICE` → what the file says."""


def read_import(file: Path) -> Entries:
    """Reads a file of factors.

    Raises:
        DataError: It cannot be read, or not all of it is factors; the message names key and value.
    """
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        rule, remedy = "The file to import must be readable", "Name a file that can-train factors --export wrote"
        raise DataError(rule, value=f"{file}: {error.strerror or error}", remedy=remedy) from error
    except ValueError as error:
        raise _wrong(file, str(error)) from error
    try:
        return parse_import(json.loads(text))
    except RecursionError as error:
        raise _wrong(file, "nested too deeply") from error
    except ValueError as error:
        raise _wrong(file, str(error)) from error


def parse_import(values: Any) -> Entries:
    """Understands the content of such a file.

    Raises:
        ValueError: Not all of it is factors.
    """
    if not isinstance(values, dict) or not values:
        raise ValueError(f"{_shown(values)} is no object of configuration keys with factors")
    check_depth(values)
    # Half of a pair of escapes is text to JSON and cannot be written again.
    json.dumps(values, ensure_ascii=False).encode()
    return {key: _of_key(key, value) for key, value in values.items()}


def _of_key(key: str, value: Any) -> dict[str, Imported]:
    if not key:
        raise ValueError("a configuration key is empty")
    if not isinstance(value, dict):
        return {ANY_DEVICE: _entry(key, value)}
    devices = value.get(_DEVICES)
    if devices is not None and not isinstance(devices, dict):
        raise ValueError(f"{key}: {_DEVICES} is {_shown(devices)}, no object")
    if _FACTOR in value or devices is not None:
        return _of_devices(key, devices) if devices else {ANY_DEVICE: _entry(key, value)}
    return _of_devices(key, value)


def _of_devices(key: str, devices: Mapping[str, Any]) -> dict[str, Imported]:
    if not devices:
        raise ValueError(f"{key}: no factor")
    return {device: _entry(f"{key}, {device or 'any device'}", value) for device, value in devices.items()}


def _entry(where: str, value: Any) -> Imported:
    fields = value if isinstance(value, dict) else {_FACTOR: value}
    if _FACTOR not in fields:
        raise ValueError(f"{where}: no {_FACTOR}")
    factor = fields[_FACTOR]
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        raise ValueError(f"{where}: {_FACTOR} is {_shown(factor)}, not a number")
    kept = {name: fields[name] for name in _KEPT if fields.get(name) is not None}
    if not _is_finite(kept):
        raise ValueError(f"{where}: a figure of its runs is not finite")
    try:
        return Imported(safety_factor=factor, **kept)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_finite(inner) for inner in value.values())
    if isinstance(value, list):
        return all(_is_finite(inner) for inner in value)
    return not isinstance(value, float) or math.isfinite(value)


def _shown(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=False):.60}"


def _wrong(file: Path, found: str) -> DataError:
    return DataError("A file of factors can be read whole, or nothing of it is taken", value=f"{file}: {found}",
                     remedy=_SHAPES)  # fmt: skip
