"""Keeps what scripts/gpu-check measured of the GPUs here, a file for each kind in the state folder: a plan made where
there is no GPU, on a login node, then rests on measurements of this cluster's own cards.
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Final

from can_train.errors import StateError
from can_train.policy.gpu_constants import MEASURED, GpuConstants
from can_train.reporter import Reporter
from can_train.state.atomic import write_json_atomic

SCHEMA: Final = 1
"""Raised when a field's meaning changes; what a newer can-train wrote is not read."""

_FOLDER: Final = "gpus"


def write_gpu_constants(state: Path, constants: GpuConstants) -> Path:
    """Writes a measurement in place of an earlier one of the same kind of GPU, and returns where.

    Raises:
        StateError: The file cannot be written.
    """
    path = _path(state, constants.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, {"schema": SCHEMA, **asdict(constants)})
    except OSError as error:
        remedy = "Choose another state folder with $CAN_TRAIN_HOME, or mend this one"
        raise StateError("The state folder cannot be written", value=f"{path}: {error}", remedy=remedy) from error
    return path


def read_gpu_constants(state: Path, key: str, reporter: Reporter) -> GpuConstants | None:
    """Finds what was measured of a kind of GPU: by this user, else what comes with can-train. Writes nothing.

    Args:
        state: The state folder, which need not exist.
        key: The kind, `h100-80gb`.
        reporter: Is told of a file that cannot be read; it is passed over.

    Returns:
        The measurement; None where there is none.
    """
    path = _path(state, key)
    try:
        return _parse(path.read_bytes(), key)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        reporter.notice(f"The measurement of {key} in {path} is passed over: {error}")
    return MEASURED.get(key)


def _path(state: Path, key: str) -> Path:
    return state / _FOLDER / f"{key}.json"


def _parse(data: bytes, key: str) -> GpuConstants:
    """Turns a file's content into a measurement.

    Raises:
        ValueError: It is none, or none that can be.
    """
    values = json.loads(data)
    if not isinstance(values, dict) or not isinstance(values.get("schema"), int):
        raise ValueError("it is no measurement of can-train")
    if values["schema"] > SCHEMA:
        raise ValueError(f"a newer can-train wrote it (schema {values['schema']}, this one knows {SCHEMA})")
    wanted = {field.name: field.type for field in fields(GpuConstants)}
    wrong = [name for name, kind in wanted.items() if type(values.get(name)) is not kind]
    if wrong:
        raise ValueError(f"{wrong[0]} is {values.get(wrong[0])!r:.40}")
    constants = GpuConstants(**{name: values[name] for name in wanted})
    if constants.key != key:
        raise ValueError(f"it is of {constants.key}")
    if min(constants.outside_bytes, constants.workspace_bytes) < 0 or constants.total_bytes <= constants.outside_bytes:
        raise ValueError("its sizes cannot be")
    return constants
