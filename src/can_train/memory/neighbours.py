"""Other processes on a simulated GPU: what they hold of it stands in a file, so that whoever writes the file plays
them, on the machine that is to be crowded and at the moment that it is to be.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from can_train.errors import ConfigError, DeviceError
from can_train.policy.sizes import parse_size

FOREIGN: Final = "CAN_TRAIN_SIM_FOREIGN"
"""Variable that names the file. It holds a size, `200MiB`; none, or an empty one, means that nobody else is there."""


def nobody() -> int:
    """Returns what others hold of a device that this process has to itself."""
    return 0


def neighbours(environment: Mapping[str, str] = os.environ) -> Callable[[], int]:
    """Returns what tells, whenever it is asked, how many bytes other processes hold of the simulated GPU."""
    path = environment.get(FOREIGN)
    return (lambda: _held_bytes(Path(path))) if path else nobody


def _held_bytes(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return 0
    try:
        return parse_size(text) if text else 0
    except ConfigError as error:
        raise DeviceError(f"The file that {FOREIGN} names holds a size", value=f"{path}: {text[:50]!r}") from error
