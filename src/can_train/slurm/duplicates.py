"""Which runs would do the same: the digest of a run's settings, code and data, and the search for a duplicate."""

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

_LOCATIONS: Final = ("paths", "cluster")
"""Groups of settings that say where a run happens, not what it does."""

_DIGITS: Final = 32
"""Hexadecimal digits of an identity."""


@dataclass(frozen=True, kw_only=True)
class DuplicateRun:
    """A run that is there already and would do the same; it is finished, running or queued."""

    run: RunRecord
    state: str


def data_files(run: ResolvedRun) -> list[Path]:
    """Lists the files of a run's data set.

    Raises:
        MissingDataError: They do not exist.
    """
    files: list[Path] = load_object(load_task_settings(run.task).files)(run.dataset, data_root(run.paths))
    return files


def identity(run: ResolvedRun, code: str, files: Sequence[Path]) -> str:
    """Computes the digest that is equal for runs that would do the same, from settings, code digest and data files."""
    config = identity_config(run.config, [needed.role for needed in run.prerequisites])
    common = Path(os.path.commonpath([file.parent for file in files])) if files else Path()
    # Size and modification time stand for the content, which may be gigabytes.
    stats = [(file.relative_to(common).as_posix(), file.stat()) for file in files]
    data = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    text = json.dumps([config, code, data], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def identity_config(config: Mapping[str, Any], roles: Iterable[str]) -> dict[str, Any]:
    """Returns a configuration without what says where a run happens.

    Args:
        config: Plain values.
        roles: Settings of the mode that are folders of other runs; their run ids take the place of the paths.
    """
    mode = dict(config.get("mode") or {})
    named = {role: _run_id_in(Path(mode[role])) for role in roles if mode.get(role)}
    return {name: value for name, value in config.items() if name not in _LOCATIONS} | {"mode": {**mode, **named}}


def find_duplicate_run(digest: str, statuses: Sequence[RunStatus]) -> DuplicateRun | None:
    """Finds the first run of an identity that is queued, running or finished."""
    for status in statuses:
        if status.known.record.identity == digest and (status.state.live or status.state.state == FINISHED):
            return DuplicateRun(run=status.known.record, state=status.state.state)
    return None


def _run_id_in(path: Path) -> str:
    try:
        result = RunFolder(path).result()
    except (RunError, OSError):
        result = None
    # A copied folder may have any name; the result in it keeps the run's.
    return str(result["run_id"]) if result and "run_id" in result else path.name
