"""What makes two runs the same."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from can_train.config.resolved import ResolvedRun, data_root
from can_train.config.task_settings import load_object, load_task_settings
from can_train.errors import RunError
from can_train.slurm.run_state import FINISHED
from can_train.slurm.status import RunStatus
from can_train.training.run_folder import RunFolder, RunRecord

_ELSEWHERE: Final = ("paths", "cluster")
"""Groups of settings that say where a run happens, not what it does."""


_DIGITS: Final = 32
"""Hexadecimal digits of an identity."""


@dataclass(frozen=True, kw_only=True)
class DuplicateRun:
    """A run that is the same.

    Attributes:
        run: The run.
        state: Its state: finished, running or queued.
    """

    run: RunRecord
    state: str


def data_files(run: ResolvedRun) -> list[Path]:
    """Lists the files of a run's data set.

    Raises:
        MissingDataError: They are not there.
    """
    files: list[Path] = load_object(load_task_settings(run.task).files)(run.dataset, data_root(run.paths))
    return files


def identity(run: ResolvedRun, code: str, files: Sequence[Path]) -> str:
    """Makes the digest that runs share which would do the same.

    Args:
        run: Its settings.
        code: Digest of the code.
        files: Of its data set.
    """
    config = what_it_does(run.config, [needed.role for needed in run.prerequisites])
    common = Path(os.path.commonpath([file.parent for file in files])) if files else Path()
    data = [(file.relative_to(common).as_posix(), *_stamp(file)) for file in files]
    text = json.dumps([config, code, data], sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGITS]


def what_it_does(config: Mapping[str, Any], roles: Iterable[str]) -> dict[str, Any]:
    """Leaves out of a configuration where a run happens; the runs that it builds on are named, wherever they lie.

    Args:
        config: Plain values.
        roles: Settings of the mode that hold the folders of such runs.
    """
    mode = dict(config.get("mode") or {})
    named = {role: _run_named(Path(mode[role])) for role in roles if mode.get(role)}
    return {name: value for name, value in config.items() if name not in _ELSEWHERE} | {"mode": {**mode, **named}}


def find_duplicate_run(digest: str, surveyed: Sequence[RunStatus]) -> DuplicateRun | None:
    """Finds the first run of an identity that is queued, running or finished."""
    for found in surveyed:
        if found.known.record.identity == digest and (found.state.live or found.state.state == FINISHED):
            return DuplicateRun(run=found.known.record, state=found.state.state)
    return None


def _run_named(path: Path) -> str:
    """Names the run in a folder: as its result says, since a copy's folder may be called anything."""
    try:
        result = RunFolder(path).result()
    except (RunError, OSError):
        result = None
    return str(result["run_id"]) if isinstance(result, dict) and "run_id" in result else path.name


def _stamp(file: Path) -> tuple[Any, ...]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
