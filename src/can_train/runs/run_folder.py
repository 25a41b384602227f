"""The folder of one run: its configuration, its result, its lock, and its name.

An attempt in a job waits for the lock while the process of an earlier attempt still trains although SLURM has given up
its job: the slurmd of the node has died, or the network, but not the node.
"""

import fcntl
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Final, TextIO

import msgspec

from can_train.config.resolved import ResolvedRun, plain_from_yaml, plain_to_yaml, state_dir, state_folder
from can_train.errors import EarlierAttemptError, RunError, StateError, remedy_for
from can_train.io import records
from can_train.io.records import AttemptStart, is_file, is_folder, utc_now
from can_train.reporter import Reporter
from can_train.runs.attempts import CHECKPOINTS, Attempts, read_record
from can_train.runs.registry import Registry, RunRecord

CONFIG: Final = "config.yaml"
"""The resolved configuration. A folder without this file is no run."""
_FOLDER_MODE: Final = 0o755  # also with a umask of 002: a group that may write decides which code a run names

RESULT: Final = "result.json"
"""In a run's folder: the result of a finished run."""

INPUTS: Final = "built_on.json"
"""In a run's folder: the digests of its data and of each model that it builds on, by role."""
BEGUN_WITH: Final = "A run goes on with the data that it began with"
"""The rule that other digests of data break."""


# A run id is a time, a key, and four hexadecimal digits.
_STAMP: Final = "%Y%m%d-%H%M%S"
_STAMP_LENGTH: Final = 15
_YEAR_LENGTH: Final = 4
_TAIL_LENGTH: Final = 4
_ID: Final = re.compile(r"\w[\w@%+=,.-]*")  # no character is special to a shell or a terminal
_NOT_IN_ID: Final = re.compile(r"[^\w@%+=,.-]+")
_NOT_IN_JOB_NAME: Final = re.compile(r"[^\w@%+=.-]+")
_MOST_LABEL: Final = 80  # characters of a label in the name of a job

_ENVIRONMENT: Final = "environment.json"  # in a run's folder: the versions and the command that made it
_CHANGES: Final = "changes.json"  # in a run's folder: changes that `resume` made to the configuration
_CHANGED: Final = "changed_settings.json"  # in a run's folder: settings that differ from the presets
EPOCHS: Final = "training.epochs"
MAX_TIME: Final = "training.max_time"
_TRAINED: Final = "trained"  # the activity whose lock a training keeps

WAIT_S: Final = 900.0
"""Longest wait for an earlier attempt, which ends at its next checkpoint; meanwhile the job's nodes do nothing."""
SAVE_S: Final = 120.0
"""Time for a process that was asked to end; a job is warned as long before its time limit."""
_LOOK_INTERVAL_S: Final = 1.0

Changed = Mapping[str, Mapping[str, Any]] | None  # by setting: its `value` and the `default`; None: not known
_LIBRARIES: Final = ("can-train", "torch", "numpy", "hydra-core")
"""Packages whose versions a run records; the packages of tasks are added."""


class RunFolder:
    """Paths and files of one run, whose id is the folder's name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name
        self.metrics_path = path / "metrics.jsonl"
        self.checkpoints_path = path / CHECKPOINTS
        self.weights_path = path / "weights"
        self.result_path = path / RESULT
        self.plan_path = path / "plan.json"
        self.memory_parts_path = path / "memory_parts.json"
        self.trial_path = path / "trial.json"
        self.log_path = path / "log.txt"
        self.predictions_path = path / "predictions.npz"
        self.reference_models_path = path / "reference_models.json"
        self._lock_path = path / "lock"
        self._holder: AttemptStart | None = None  # the entry of this process in the lock file

    @cached_property
    def attempts(self) -> Attempts:
        """The attempts of the run. Not with the folder: a listing of thousands of runs needs few."""
        return Attempts(self.path)

    @classmethod
    def create(
        cls, runs_dir: Path, key: str, config: Mapping[str, Any], changed: Changed = None, *, run_id: str = ""
    ) -> "RunFolder":
        """Creates the folder of a run (`make`); without a run id, of a new one."""
        while True:
            folder = cls(runs_dir / (run_id or new_run_id(key)))
            try:
                folder.make(config, changed)
            except RunError as error:
                # Another process drew the same digits in the same second.
                if run_id or not isinstance(error.__cause__, FileExistsError):
                    raise
            else:
                return folder

    def make(self, config: Mapping[str, Any], changed: Changed = None) -> None:
        """Creates the folder and writes the run's configuration and environment.

        Args:
            config: The resolved configuration.
            changed: The settings that differ from the presets (`compose.changed_settings`); None: unknown.

        Raises:
            RunError: It cannot be written, or exists; nothing is left behind.
        """
        environment = {"python": platform.python_version(), "platform": platform.platform(),
                       "processors": os.cpu_count(), "libraries": _libraries(), "command": sys.argv}  # fmt: skip
        try:
            self.path.mkdir(mode=_FOLDER_MODE, parents=True)
            self.configure(config, changed)
            records.write_json_atomic(self.path / _ENVIRONMENT, environment)
        except OSError as error:
            is_taken = isinstance(error, FileExistsError)
            if not is_taken:
                shutil.rmtree(self.path, ignore_errors=True)
            remedy = remedy_for(error, "Give another place with --runs-dir")
            remedy = "Give the same line again" if is_taken else remedy
            raise RunError("The run folder cannot be written", value=f"{self.path}: {error.strerror}",
                           remedy=remedy) from error  # fmt: skip

    def config(self) -> dict[str, Any]:
        """Reads the resolved configuration.

        Raises:
            RunError: It cannot be read.
        """
        try:
            return plain_from_yaml(records.read_text(self.path / CONFIG))
        except (OSError, ValueError) as error:
            raise _unreadable("configuration", self.path / CONFIG, error) from error

    def configure(self, config: Mapping[str, Any], changed: Changed) -> None:
        """Writes the resolved configuration, and the settings that differ from the presets."""
        records.write_text_atomic(self.path / CONFIG, plain_to_yaml(config))
        records.write_text_atomic(self.path / _CHANGED, json.dumps(changed, indent=2, default=str) + "\n")

    def changed_settings(self) -> dict[str, dict[str, Any]] | None:
        """Reads the settings that differed from the presets when the run was configured, each with its `value` and the
        `default`; None if the file is missing or damaged.
        """
        try:
            settings = msgspec.convert(json.loads(records.read_text(self.path / _CHANGED)), dict[str, dict[str, Any]])
        except (OSError, ValueError, RecursionError):
            return None
        return settings if all({"value", "default"} <= setting.keys() for setting in settings.values()) else None

    def environment(self) -> dict[str, Any]:
        """Reads the versions of Python and of libraries with which the run was made; empty if they are not known."""
        known = records.parse_object(records.text_or_nothing(self.path / _ENVIRONMENT))
        return {name: known[name] for name in ("python", "libraries") if name in known}

    def changes(self) -> list[dict[str, Any]]:
        """Reads the changes that `resume` made to the configuration, in order: `time`, `step` of the checkpoint that
        the run continued from, and `settings`, each with its value `before` and `after`. A damaged file has no changes.
        """
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return msgspec.convert(json.loads(records.read_text(self.path / _CHANGES))["changes"], list[dict[str, Any]])
        return []

    def change(
        self,
        config: Mapping[str, Any],
        settings: Mapping[str, Mapping[str, Any]],
        *,
        step: int,
        changed: Changed = None,
    ) -> None:
        """Replaces the configuration, and records the changed settings (see `changes`). A result that more epochs,
        or more time, make out of date is renamed.
        """
        record = {"time": utc_now(), "step": step, "settings": settings}
        # The record first: after a kill in between, the same command line makes the recorded change.
        records.write_json_atomic(self.path / _CHANGES, {"changes": [*self.changes(), record]})
        self.configure(config, changed)
        if {EPOCHS, MAX_TIME} & settings.keys() and is_file(self.result_path):
            self.result_path.replace(self.path / f"result-at-step-{step}.json")

    def goes_on_for_longer(self, step: int, settings: Collection[str] = (EPOCHS, MAX_TIME)) -> bool:
        """Returns whether `resume` changed the number of epochs, or the time of training, at the checkpoint of a step;
        or any other of some settings.
        """
        changed = (change.get("settings", {}) for change in self.changes() if change.get("step") == step)
        return any(name in names for names in changed for name in settings)

    def result(self) -> dict[str, Any] | None:
        """Reads the result; None where the run has not finished.

        Raises:
            RunError: It cannot be read.
        """
        try:
            result = json.loads(records.read_text(self.result_path))
            # The file is written atomically, but a person may have edited it.
            if not isinstance(result, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable("result", self.result_path, error) from error
        except (ValueError, RecursionError) as error:
            raise self.damaged_result() from error
        return result

    def metrics(self) -> list[dict[str, Any]]:
        """Reads the lines of metrics so far, in the order of the epochs; a damaged line is empty."""
        return [records.parse_object(line) for line in records.text_or_nothing(self.metrics_path).splitlines()]

    def damaged_result(self) -> RunError:
        """Makes the error for a damaged result."""
        # The last checkpoint has the weights, so a resumed run is only judged again.
        again = f"rm {shlex.quote(str(self.result_path))}; can-train resume {shlex.quote(str(self.path))}"
        # The command stands on a line without a full stop, because it will be pasted.
        remedy = f"This has the run judged again:\n  {again}\nIts weights are in other files"
        return RunError("The run's result is damaged", value=str(self.result_path), remedy=remedy)

    @contextmanager
    def locked(self, *, doing: str = _TRAINED) -> Iterator[None]:
        """Locks the run against other processes in the block.

        Args:
            doing: The locked activity, as a participle; each activity has a lock.

        Raises:
            RunError: Another process has the lock.
        """
        with self._held(doing, lambda file, holder: False):
            yield

    @contextmanager
    def locked_to_train(self, reporter: Reporter) -> Iterator[None]:
        """Locks the run for training. In a job that SLURM has started again, waits until the process of an earlier
        attempt has ended (see `wait_for_lock`).

        Raises:
            RunError: Another process trains it.
            EarlierAttemptError: An earlier attempt's process does not end.
        """

        def wait(file: TextIO, holder: AttemptStart | None) -> bool:
            if holder is None or not self.attempts.supersedes(holder):
                return False
            with self.attempts.waiting(f"it waits for {holder_in_words(holder)}, which trains the run, to end"):
                wait_for_lock(file, holder, reporter)
            return True

        with self._held(_TRAINED, wait):
            yield

    @contextmanager
    def _held(self, doing: str, wait: Callable[[TextIO, AttemptStart | None], bool]) -> Iterator[None]:
        """Locks an activity in the block; `wait` returns whether it has waited for the holder and got the lock."""
        path = self._lock_path if doing == _TRAINED else self.path / f"{doing}.lock"
        # Opened without truncation: the file names the process that has the lock.
        with records.open_to_append(path, reads=True) as file:
            if not try_lock(file) and not wait(file, holder := read_holder(path)):
                raise self._in_use(doing, holder)
            this_process = self.attempts.this_process()
            write_holder(file, this_process)
            if doing == _TRAINED:
                self._holder = this_process
            yield

    def is_taken_over(self) -> bool:
        """Returns whether another process has taken the lock of this process: some file systems (NFS without its lock
        service, Lustre) give the lock to one process on each machine.
        """
        holder = read_holder(self._lock_path)
        return None not in (self._holder, holder) and holder != self._holder

    def _in_use(self, doing: str, holder: AttemptStart | None) -> RunError:
        who = f": {holder_in_words(holder)}" if holder else ""
        return RunError(f"The run is being {doing} by another process", value=f"{self.run_id}{who}",
                        remedy=f"Wait for it: can-train status {self.run_id}")  # fmt: skip


# The lock


def try_lock(file: TextIO) -> bool:
    """Locks a file without waiting; returns whether this process has the lock."""
    try:
        # The kernel's lock, not the existence of the file: a killed process leaves no lock behind. Not filelock: its
        # releases up to 3.24 empty the file as they open it, even without getting the lock, and the holder's name is
        # lost.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write_holder(file: TextIO, holder: AttemptStart) -> None:
    """Writes the process that has a lock into the lock file."""
    file.truncate(0)
    file.write(records.json_text(asdict(holder)))
    file.flush()


def read_holder(path: Path) -> AttemptStart | None:
    """Reads the process that has a lock or had it last; None if the file is empty or damaged."""
    with suppress(OSError):
        return read_record(path, AttemptStart)
    return None


def holder_in_words(holder: AttemptStart) -> str:
    """Names the process that has a lock."""
    job = f" (job {holder.slurm_job})" if holder.slurm_job else ""
    return f"process {holder.pid} of {holder.host}{job}"


def wait_for_lock(
    file: TextIO, holder: AttemptStart, reporter: Reporter, *, wait_s: float = WAIT_S, save_s: float = SAVE_S
) -> None:
    """Locks a file after the process of an earlier attempt has released it. A process on this machine gets SIGTERM, and
    later SIGKILL; a process on another machine ends by itself (`Attempts.is_superseded`).

    Args:
        file: The open lock file.
        holder: The process that has the lock.
        reporter: Gets a notice about the wait.
        wait_s: Longest wait in seconds.
        save_s: Seconds after which a process of this machine is killed.

    Raises:
        EarlierAttemptError: The process still has the lock after `wait_s`.
    """
    who, began, is_asked = holder_in_words(holder), time.monotonic(), _send(signal.SIGTERM, holder, file)
    ends = "it was asked to save and to end" if is_asked else "it ends at its next checkpoint"
    reporter.notice(f"An earlier attempt, {who}, still trains this run, whose job was started again: {ends}")
    while not try_lock(file):
        waited_s = time.monotonic() - began
        if waited_s > wait_s:
            raise EarlierAttemptError("An earlier attempt still trains the run",
                                      value=f"{who} did not end within {wait_s / 60:.0f} min",
                                      remedy="End it where it runs, or wait until it has saved")  # fmt: skip
        if is_asked and waited_s > save_s:
            is_asked = False
            if _send(signal.SIGKILL, holder, file):
                reporter.notice(f"It did not within {save_s:.0f} s, and was killed")
        time.sleep(_LOOK_INTERVAL_S)


def _send(number: int, holder: AttemptStart, file: TextIO) -> bool:
    """Sends a signal to the holder of a lock if that process is on this machine and has the lock file open."""
    # Imported here: few commands look for processes.
    import psutil

    if holder.host != records.this_host():
        return False
    try:
        process = records.find_process(holder.pid, holder.start_time)
        # Machines may share a name, and a process id may be reused: the holder of the lock has the lock file open.
        has_file = process and str(Path(file.name).resolve()) in {opened.path for opened in process.open_files()}
        if process is None or not has_file:
            return False
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


# The name


def new_run_id(key: str) -> str:
    """Makes the id of a new run: time, key, and four random digits."""
    return new_run_ids([key])[0]


def new_run_ids(keys: Sequence[str]) -> list[str]:
    """Makes the ids of new runs of one second; their short names differ, too."""
    stamp = f"{datetime.now():{_STAMP}}"
    tails = secrets.SystemRandom().sample(range(16**_TAIL_LENGTH), len(keys))
    return [
        f"{stamp}-{_NOT_IN_ID.sub('_', key)}-{tail:0{_TAIL_LENGTH}x}" for key, tail in zip(keys, tails, strict=True)
    ]


def new_folders(runs: Sequence[ResolvedRun]) -> list[RunFolder]:
    """Names a new folder for each of several runs, and makes none."""
    while True:
        ids = new_run_ids([run.key for run in runs])
        folders = [RunFolder(run.runs_dir / run_id) for run, run_id in zip(runs, ids, strict=True)]
        # Another submission of this second may have the same digits.
        if not any(folder.path.exists() for folder in folders):
            return folders


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


@cache
def _libraries() -> dict[str, str]:
    """The versions of the packages that a run depends on; read once in a process, since that takes 0.1 s."""
    libraries, packages = dict.fromkeys(_LIBRARIES, ""), list(_LIBRARIES)
    with suppress(PackageNotFoundError):
        # The extras of can-train are the packages of tasks, as `polars>=1.34 ; extra == 'all'`.
        extras = [text for text in requires("can-train") or [] if "extra ==" in text]
        packages += sorted({re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in extras} - {*_LIBRARIES})
    for name in packages:
        with suppress(PackageNotFoundError):
            libraries[name] = version(name)
    return libraries


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """The place of a run in a sweep or search; empty for a run that is in none.

    Attributes:
        name: Name of the sweep.
        label: The run's values of the settings that vary.
    """

    name: str = ""
    label: str = ""

    @property
    def job_name(self) -> str:
        """Name of the run's job in the queue, the label first: `squeue` shows 8 characters by default. Empty: no label.

        >>> SweepRun(name="sweep-lr-seed-1a2b", label="lr=0.01 seed=2").job_name
        'lr=0.01_seed=2_sweep-lr-seed-1a2b'
        """
        # A comma separates names in `squeue --name`.
        label = _NOT_IN_JOB_NAME.sub("_", self.label)[:_MOST_LABEL]
        return f"{label}_{self.name}" if label else ""


_NO_SWEEP: Final = SweepRun()


def place_in_sweep(record: RunRecord, folder: RunFolder) -> SweepRun:
    """Returns the place of a run in its sweep or search. The label of a trial is its values, once they are chosen."""
    label, values = record.label, None
    if record.sweep and not label:
        # Not by `trials.Trial`: all that knows a run's status would import the search.
        values = records.parse_object(records.text_or_nothing(folder.trial_path)).get("values")
    return SweepRun(name=record.sweep, label=label_of(values) if isinstance(values, dict) else label)


def label_of(values: Mapping[str, Any]) -> str:
    """Writes values of settings as the label of a run.

    >>> label_of({"training.lr": 0.01, "task.hidden": 8})
    'lr=0.01 hidden=8'
    """
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in values.items())


def make_run(
    run: ResolvedRun, reporter: Reporter, changed: Changed = None, *, run_id: str = "", sweep: SweepRun = _NO_SWEEP
) -> RunFolder:
    """Creates the folder of a run that trains in this process, and registers the run. If the registry cannot be
    written, the reporter gets a notice.

    Args:
        run: The run.
        reporter: Gets the notice.
        changed: The settings that differ from the presets; None: unknown.
        run_id: Its id; empty: a new one.
        sweep: Its place in a sweep or search.

    Raises:
        RunError: The folder cannot be written.
    """
    folder = RunFolder.create(run.runs_dir, run.key, run.config, changed, run_id=run_id)
    try:
        register_run(run, folder, sweep=sweep)
    except StateError as error:
        reporter.notice(f"This run is not listed by `can-train runs`. {error}")
    return folder


def register_run(
    run: ResolvedRun, folder: RunFolder, *, identity: str = "", after: str = "", sweep: SweepRun = _NO_SWEEP
) -> None:
    """Enters a run into the registry.

    Raises:
        StateError: The registry cannot be written.
    """
    Registry(state_dir(run.paths)).add(
        RunRecord(run_id=folder.run_id, path=str(folder.path.resolve()), key=run.key, time=utc_now(),
                  identity=identity, after=after, sweep=sweep.name, label=sweep.label)
    )  # fmt: skip


def name_to_type(folder: RunFolder) -> str:
    """Returns the name of a run on a command line, ready to be typed."""
    # A run outside the registry of the command, or of one that another person has closed, is named by its folder.
    is_listed = is_folder(Registry(state_folder()).entry(folder.run_id).parent)
    return short_name(folder.run_id) if is_listed else shlex.quote(str(folder.path))


def resume_hint(folder: RunFolder, *, ranks: int = 1) -> str:
    """Returns the notice with the command that continues a stopped run of so many ranks."""
    how = f" in one process, and its launcher starts it in {ranks} again" if ranks > 1 else ""
    return f"This continues the run{how}:\n  can-train resume {name_to_type(folder)}"


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
