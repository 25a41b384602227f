"""The folder of one run: its configuration, its result, its lock, and its name."""

import json
import os
import platform
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Final

import msgspec

from can_train.config.resolved import ResolvedRun, plain_from_yaml, plain_to_yaml, state_dir, state_folder
from can_train.errors import RunError, StateError
from can_train.io import records
from can_train.io.records import AttemptStart, is_file, read_text, utc_now, write_json_atomic, write_text_atomic
from can_train.reporter import Reporter
from can_train.runs.attempts import Attempts
from can_train.runs.registry import Registry, RunRecord
from can_train.runs.run_lock import holder_in_words, read_holder, try_lock, wait_for_lock, write_holder

CONFIG: Final = "config.yaml"
"""The file that makes a folder a run's."""
_FOLDER_MODE: Final = 0o755  # also with a umask of 002: a group that may write decides which code a run names

RESULT: Final = "result.json"
"""In a run's folder: the result of a finished run."""

INPUTS: Final = "built_on.json"
"""In a run's folder: the digests of its data and of each model that it builds on, by role."""


# A run id is a time, a key, and four hexadecimal digits.
_STAMP: Final = "%Y%m%d-%H%M%S"
_STAMP_LENGTH: Final = 15
_YEAR_LENGTH: Final = 4
_TAIL_LENGTH: Final = 4
_ID: Final = re.compile(r"\w[\w@%+=,.-]*")  # no character is special to a shell or a terminal
_NOT_IN_ID: Final = re.compile(r"[^\w@%+=,.-]+")

_CHANGES: Final = "changes.json"  # in a run's folder: changes that `resume` made to the configuration
_CHANGED: Final = "changed_settings.json"  # in a run's folder: settings that differ from the presets
_EPOCHS: Final = "training.epochs"


Changed = Mapping[str, Mapping[str, Any]] | None  # by setting: its `value` and the `default`; None: not known
_LIBRARIES: Final = ("can-train", "torch", "numpy", "hydra-core")
"""Packages whose versions a run records; the packages of tasks are added."""


def _packages_of_tasks() -> list[str]:
    """Lists the packages in the extras of can-train, as `polars>=1.34 ; extra == 'all'` names them."""
    try:
        requirements = requires("can-train") or []
    except PackageNotFoundError:
        return []
    names = {re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements if "extra ==" in text}
    return sorted(names - {*_LIBRARIES})


class RunFolder:
    """Paths and files of one run, whose id is the folder's name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints_path = path / "checkpoints"
        self.result_path = path / RESULT
        self.plan_path = path / "plan.json"
        self.log_path = path / "log.txt"
        self.predictions_path = path / "predictions"
        self.reference_models_path = path / "reference_models.json"
        self.attempts = Attempts(path)
        self._lock_path = path / "lock"
        self._holder: AttemptStart | None = None  # the entry of this process in the lock file

    @classmethod
    def create(cls, runs_dir: Path, key: str, config: Mapping[str, Any], changed: Changed = None) -> "RunFolder":
        """Creates the folder of a new run (`make`)."""
        folder = cls(runs_dir / new_run_id(key))
        folder.make(config, changed)
        return folder

    def make(self, config: Mapping[str, Any], changed: Changed = None) -> None:
        """Creates the folder and writes the run's configuration and environment.

        Args:
            config: The resolved configuration.
            changed: The settings that differ from the presets (`compose.changed_settings`); None: unknown.

        Raises:
            RunError: It cannot be written.
        """
        libraries = dict.fromkeys(_LIBRARIES, "")
        for name in (*_LIBRARIES, *_packages_of_tasks()):
            with suppress(PackageNotFoundError):
                libraries[name] = version(name)
        environment = {"python": platform.python_version(), "platform": platform.platform(),
                       "processors": os.cpu_count(), "libraries": libraries, "command": sys.argv}  # fmt: skip
        try:
            self.path.mkdir(mode=_FOLDER_MODE, parents=True)
            self._write_config(config, changed)
            write_json_atomic(self.path / "environment.json", environment)
        except OSError as error:
            raise RunError("The run folder cannot be written", value=f"{self.path}: {error.strerror}",
                           remedy="Give another place with --runs-dir") from error  # fmt: skip

    def config(self) -> dict[str, Any]:
        """Reads the resolved configuration.

        Raises:
            RunError: It cannot be read.
        """
        try:
            return plain_from_yaml(read_text(self.path / CONFIG))
        except (OSError, ValueError) as error:
            raise _unreadable("configuration", self.path / CONFIG, error) from error

    def _write_config(self, config: Mapping[str, Any], changed: Changed) -> None:
        write_text_atomic(self.path / CONFIG, plain_to_yaml(config))
        write_text_atomic(self.path / _CHANGED, json.dumps(changed, indent=2, default=str) + "\n")

    def changed_settings(self) -> dict[str, dict[str, Any]] | None:
        """Reads the settings that differed from the presets when the run was configured, each with its `value` and the
        `default`; None if the file is missing or damaged.
        """
        try:
            settings = msgspec.convert(json.loads(read_text(self.path / _CHANGED)), dict[str, dict[str, Any]])
        except (OSError, ValueError, RecursionError):
            return None
        return settings if all({"value", "default"} <= setting.keys() for setting in settings.values()) else None

    def changes(self) -> list[dict[str, Any]]:
        """Reads the changes that `resume` made to the configuration, in order: `time`, `step` of the checkpoint that
        the run continued from, and `settings`, each with its value `before` and `after`. A damaged file has no changes.
        """
        try:
            return msgspec.convert(json.loads(read_text(self.path / _CHANGES))["changes"], list[dict[str, Any]])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []

    def change(
        self,
        config: Mapping[str, Any],
        settings: Mapping[str, Mapping[str, Any]],
        *,
        step: int,
        changed: Changed = None,
    ) -> None:
        """Replaces the configuration, and records the changed settings (see `changes`). A result that more epochs make
        out of date is renamed.
        """
        record = {"time": utc_now(), "step": step, "settings": settings}
        # The record first: after a kill in between, the same command line makes the recorded change.
        write_json_atomic(self.path / _CHANGES, {"changes": [*self.changes(), record]})
        self._write_config(config, changed)
        if _EPOCHS in settings and is_file(self.result_path):
            self.result_path.replace(self.path / f"result-at-step-{step}.json")

    def goes_on_for_longer(self, step: int) -> bool:
        """Returns whether `resume` raised the number of epochs at the checkpoint of a step."""
        return any(change.get("step") == step and _EPOCHS in change.get("settings", {}) for change in self.changes())

    def result(self) -> dict[str, Any] | None:
        """Reads the result; None where the run has not finished.

        Raises:
            RunError: It cannot be read.
        """
        try:
            result = json.loads(read_text(self.result_path))
            # The file is written atomically, but a person may have edited it.
            if not isinstance(result, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, OSError):
                raise _unreadable("result", self.result_path, error) from error
            raise self.damaged_result() from error
        return result

    def damaged_result(self) -> RunError:
        """Makes the error for a damaged result."""
        # The last checkpoint has the weights, so a resumed run is only judged again.
        again = f"rm {shlex.quote(str(self.result_path))}; can-train resume {shlex.quote(str(self.path))}"
        # The command stands on a line without a full stop, because it will be pasted.
        remedy = f"This has the run judged again:\n  {again}\nIts weights are in other files"
        return RunError("The run's result is damaged", value=str(self.result_path), remedy=remedy)

    @contextmanager
    def locked(self, *, doing: str = "trained") -> Iterator[None]:
        """Locks the run against other processes in the block.

        Args:
            doing: The locked activity, as a participle; each activity has a lock.

        Raises:
            RunError: Another process has the lock.
        """
        path = self._lock_path if doing == "trained" else self.path / f"{doing}.lock"
        # Opened without truncation: the file names the process that has the lock.
        with records.open_to_append(path, reads=True) as file:
            if not try_lock(file):
                raise self._in_use(doing, read_holder(path))
            write_holder(file, self.attempts.this_process())
            yield

    @contextmanager
    def locked_to_train(self, reporter: Reporter) -> Iterator[None]:
        """Locks the run for training. In a job that SLURM has started again, waits until the process of an earlier
        attempt has ended (see `wait_for_lock`).

        Raises:
            RunError: Another process trains it.
            EarlierAttemptError: An earlier attempt's process does not end.
        """
        with records.open_to_append(self._lock_path, reads=True) as file:
            if not try_lock(file):
                holder = read_holder(self._lock_path)
                if holder is None or not self.attempts.supersedes(holder):
                    raise self._in_use("trained", holder)
                with self.attempts.waiting(f"it waits for {holder_in_words(holder)}, which trains the run, to end"):
                    wait_for_lock(file, holder, reporter)
            self._holder = self.attempts.this_process()
            write_holder(file, self._holder)
            yield

    def is_taken_over(self) -> bool:
        """Returns whether another process has taken the lock of this process: some file systems (NFS without its lock
        service, Lustre) give the lock to one process on each machine.
        """
        holder = read_holder(self._lock_path)
        return None not in (self._holder, holder) and holder != self._holder

    def _in_use(self, doing: str, holder: AttemptStart | None) -> RunError:
        who = f": {holder_in_words(holder)}" if holder else ""
        return RunError(f"The run is being {doing} by another process", value=f"{self.run_id}{who}")


def new_run_id(key: str) -> str:
    """Makes the id of a new run: time, key, and four random digits."""
    return f"{datetime.now():{_STAMP}}-{_NOT_IN_ID.sub('_', key)}-{secrets.token_hex(_TAIL_LENGTH // 2)}"


def is_run_id(name: str) -> bool:
    """Returns whether a name is a valid run id, which needs no quotes in a shell."""
    return _ID.fullmatch(name) is not None


def split_run_id(run_id: str) -> tuple[datetime | None, str]:
    """Splits a run id into time and key. For a name that can-train did not make: None and the whole name."""
    if len(run_id) <= _STAMP_LENGTH + _TAIL_LENGTH + 2:
        return None, run_id
    try:
        time = datetime.strptime(run_id[:_STAMP_LENGTH], _STAMP)
    except ValueError:
        return None, run_id
    return time, run_id[_STAMP_LENGTH + 1 : -_TAIL_LENGTH - 1]


def short_name(run_id: str) -> str:
    """Shortens a run id to day, time and last digits.

    Example:
        >>> short_name("20260728-101500-hcrl_ch_gat_student_normal-3fa9")
        '0728-101500-3fa9'
    """
    time, _ = split_run_id(run_id)
    return _shortened(run_id) if time else run_id


def _shortened(run_id: str) -> str:
    return f"{run_id[_YEAR_LENGTH:_STAMP_LENGTH]}-{run_id[-_TAIL_LENGTH:]}"


def may_be_called(run_id: str, part: str) -> bool:
    """Returns whether the id or the short name of a run contains a text. A fast test for thousands of runs."""
    return part in run_id or part in _shortened(run_id)


def _unreadable(what: str, path: Path, error: OSError | ValueError) -> RunError:
    why = f": {error.strerror}" if isinstance(error, OSError) else ""
    return RunError(f"The run's {what} cannot be read", value=f"{path}{why}",
                    remedy="Mend its permissions, copy the run once more, or train anew")  # fmt: skip


def make_run(run: ResolvedRun, reporter: Reporter, changed: Changed = None) -> RunFolder:
    """Creates the folder of a run that trains in this process, and registers the run. If the registry cannot be
    written, the reporter gets a notice.

    Raises:
        RunError: The folder cannot be written.
    """
    folder = RunFolder.create(run.runs_dir, run.key, run.config, changed)
    try:
        register_run(run, folder)
    except StateError as error:
        reporter.notice(f"This run is not listed by `can-train runs`. {error}")
    return folder


def register_run(run: ResolvedRun, folder: RunFolder, *, identity: str = "", after: str = "", sweep: str = "") -> None:
    """Enters a run into the registry.

    Raises:
        StateError: The registry cannot be written.
    """
    Registry(state_dir(run.paths)).add(
        RunRecord(run_id=folder.run_id, path=str(folder.path.resolve()), key=run.key, time=utc_now(),
                  identity=identity, after=after, sweep=sweep)
    )  # fmt: skip


def name_to_type(folder: RunFolder) -> str:
    """Returns the name of a run on a command line, ready to be typed."""
    # A run outside the registry of the command is named by its folder.
    is_known = Registry(state_folder()).has(folder.run_id)
    return short_name(folder.run_id) if is_known else shlex.quote(str(folder.path))


def resume_hint(folder: RunFolder) -> str:
    """Returns the notice with the command that continues a stopped run."""
    return f"This continues the run:\n  can-train resume {name_to_type(folder)}"


def relocate_prerequisites(run: ResolvedRun, folder: Path) -> ResolvedRun:
    """Replaces missing folders of prerequisites by folders of the same name next to the run."""
    moved = {}
    for needed in run.prerequisites:
        path = Path(getattr(run.mode, needed.role))
        # A copied folder of runs contains the prerequisites, too.
        sibling = folder.resolve().parent / path.name
        if path.name and not is_file(path / CONFIG) and is_file(sibling / CONFIG):
            moved[needed.role] = str(sibling)
    return replace(run, mode=replace(run.mode, **moved)) if moved else run


def without_missing_prerequisites(run: ResolvedRun) -> tuple[ResolvedRun, list[str]]:
    """Drops optional prerequisites whose folders are gone; returns the run and a notice for each dropped one."""
    optional = {needed.role: getattr(run.mode, needed.role) for needed in run.prerequisites if not needed.required}
    gone = {role: name for role, name in optional.items() if name and not is_file(Path(name) / CONFIG)}
    notices = [f"{role.replace('_', ' ')}: {name} is gone, so the run goes on without" for role, name in gone.items()]
    return replace(run, mode=replace(run.mode, **dict.fromkeys(gone, ""))) if gone else run, notices
