"""The trust in the code that a run names. The code may run for a run in the registry of the user, as long as no other
user can change the code or the choice of the code. Otherwise the user must ask for it (`--trust-code`).
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from can_train.config.resolved import state_folder
from can_train.config.settings import is_code
from can_train.config.task_settings import task_names
from can_train.errors import UntrustedCodeError
from can_train.io.ownership import Account, other_writer, places_on_the_way
from can_train.runs.registry import Registry
from can_train.runs.run_folder import CONFIG, RunFolder

_PLACES: Final = {"code_dir": (".py", ".pyc", ".so"), "config_dir": (".yaml",)}
"""Settings that name folders of code and of presets, and the endings of the files that are read from there."""
_REQUESTS: Final = frozenset(
    ("executor", "partition", "account", "qos", "time", "nodes", "gpus", "cpus", "mem", "constraint", "gres", "exclude",
     "nodelist", "reservation", "exclusive", "comment", "job_name", "mail_user", "mail_type", "signal_delay_s",
     "max_restarts", "oom_resubmits", "retries", "max_parallel")
)  # fmt: skip
"""Cluster settings that name resources and numbers. Other settings may contain commands or options with side effects.
"""


@dataclass(frozen=True, kw_only=True)
class CodeTrust:
    """Decides whether the code of a run may run for a user.

    Attributes:
        state: The user's state folder, with the registry.
        trusts_all: Whether the user trusts the code of every run.
    """

    state: Path = field(default_factory=state_folder)
    trusts_all: bool = False

    def config(self, folder: RunFolder, *, submits: bool = False, has_code: bool = False) -> dict[str, Any]:
        """Reads the configuration of a run whose code is about to run.

        Args:
            folder: Folder of the run.
            submits: Whether the cluster settings of the run are about to be sent to a scheduler.
            has_code: Whether the folder names a copy of can-train's code, as the folder of a submitted run does.

        Raises:
            UntrustedCodeError: Another user may have chosen the code.
            RunError: The configuration cannot be read.
        """
        config = folder.config()
        cluster = config.get("cluster")
        requests = cluster if submits and isinstance(cluster, Mapping) else {}
        has_commands = any(value for name, value in requests.items() if name not in _REQUESTS)
        # A task, an optimizer, presets or commands from outside can-train.
        is_foreign = config.get("task") not in task_names() or any(_named(config, name) for name in _PLACES)
        is_foreign = is_foreign or is_code(_optimizer(config))
        if not self.trusts_all and (has_code or is_foreign or has_commands):
            self._check(folder, config)
        return config

    def _check(self, folder: RunFolder, config: Mapping[str, Any]) -> None:
        account, path = Account.current(), Path(os.path.realpath(folder.path))
        for place in (path, path / CONFIG):
            _check_place(place, account)
        registry = Registry(self.state)
        record = registry.run(path.name)
        # A run lies in its registered folder, or was moved from there.
        if record is None or (os.path.realpath(record.path) != str(path) and Path(record.path).exists()):
            # The file or the module of the run's own task, and its folder of presets.
            task, named = str(config.get("task", "")), [*map(str, _named(config, "config_dir"))]
            if task not in task_names():
                module = task.rpartition(":")[0]
                files = [str(place / module) for place in _named(config, "code_dir")]
                named = [*(files if module.endswith(".py") else [task]), *named]
            named = [optimizer, *named] if is_code(optimizer := _optimizer(config)) else named
            code = f"; it names {', '.join(named)}" if named else ""
            raise UntrustedCodeError(f"{path} is not in your list of runs, {registry.folder}{code}")
        _check_place(registry.entry(path.name), account)
        for name, endings in _PLACES.items():
            for place in _named(config, name):
                for passed in places_on_the_way(place):
                    _check_place(passed, account, is_passed=True)
                for file in _read_from(place, endings):
                    _check_place(file, account)


def _optimizer(config: Mapping[str, Any]) -> str:
    training = config.get("training")
    return str(training.get("optimizer", "")) if isinstance(training, Mapping) else ""


def _named(config: Mapping[str, Any], name: str) -> list[Path]:
    paths = config.get("paths")
    place = paths.get(name) if isinstance(paths, Mapping) else ""
    return [Path(str(place))] if place else []


def _read_from(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """Lists a folder, the files below it with certain endings, and the folders that lead to these files."""
    yield folder
    seen = {str(folder)}
    for place, folders, files in os.walk(folder):
        # No import reaches a folder with another name.
        folders[:] = [name for name in folders if name.isidentifier()]
        for name in files:
            if not name.endswith(endings):
                continue
            yield Path(place, name)
            way = place
            while way not in seen:
                seen.add(way)
                yield Path(way)
                way = os.path.dirname(way)  # noqa: PTH120 - of thousands of files, paths cost more


def _check_place(place: Path, account: Account, *, is_passed: bool = False) -> None:
    """Raises UntrustedCodeError if another user may change a file, a folder or a link."""
    try:
        statuses = [place.lstat(), place.stat()]
    except FileNotFoundError:
        return
    for status in statuses:
        if who := other_writer(status, account, is_passed=is_passed):
            raise UntrustedCodeError(f"{place}: {who}")
