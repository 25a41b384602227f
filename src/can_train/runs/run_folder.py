"""The folder of one run with its attempts, the signals that end an attempt, the registry of all runs, and whether the
code that a run names may run.
"""

import json
import os
import platform
import re
import secrets
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from threading import Timer, get_ident
from types import FrameType
from typing import Any, Final, TypeVar

import msgspec

from can_train.config.resolved import ResolvedRun, plain_from_yaml, plain_to_yaml, state_dir, state_folder
from can_train.config.task_loading import task_names
from can_train.errors import (
    CanTrainError,
    DoesNotFitError,
    EarlierAttemptError,
    RankGoneError,
    RunError,
    StateError,
    UntrustedCodeError,
    without_positions,
)
from can_train.io import records
from can_train.io.index import INDEX_FROM, Kind, index_folder, read_folder, write_index
from can_train.io.ownership import Account, other_writer, places_on_the_way
from can_train.io.records import (
    AttemptStart,
    JobId,
    SetAside,
    is_file,
    read_text,
    text_or_nothing,
    this_host,
    utc_now,
    write_json_atomic,
    write_text_atomic,
)
from can_train.memory.out_of_memory import is_host_memory, is_out_of_memory
from can_train.reporter import Reporter
from can_train.runs.run_lock import holder_in_words, read_holder, try_lock, wait_for_lock, write_holder

CONFIG: Final = "config.yaml"
"""The file that makes a folder a run's."""
_FOLDER_MODE: Final = 0o755  # also with a umask of 002: a group that may write decides which code a run names

RESULT: Final = "result.json"
"""In a run's folder: the result of a finished run."""

INPUTS: Final = "built_on.json"
"""In a run's folder: the digests of its data and of each model that it builds on, by role."""

WARNED: Final = 128 + signal.SIGUSR2
"""Exit status of a process that left because its time is nearly up: SIGUSR2 is submitit's warning."""

TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status of a process that was asked to leave."""

ENDING_BY_STATUS: Final = {TERMINATED: "terminated", 128 + signal.SIGINT: "interrupted", WARNED: "time_limit"}
"""What an exit status of 128 + a signal means."""

RESTARTED: Final = ("time_limit", "killed", "in_use")
"""Endings after which can-train requeues a job."""

_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_POSTPONED_S: Final = 0.05  # until a signal that arrives while an extension module is initialized is looked at again
_MAX_POSTPONED: Final = 60  # times: 3 s, since SLURM kills what does not leave

# Endings, the most informative first: a rank that runs out of memory takes the others with it, which are then
# terminated, or fail because it is gone.
_BY_SIGNIFICANCE: Final = (
    "host_oom", "gpu_oom", "killed", "in_use", "failed", "rank_gone", "time_limit", "interrupted", "terminated",
    "finished",
)  # fmt: skip

# A run id is a time, a key, and four hexadecimal digits.
_STAMP: Final = "%Y%m%d-%H%M%S"
_STAMP_LENGTH: Final = 15
_YEAR_LENGTH: Final = 4
_TAIL_LENGTH: Final = 4
_ID: Final = re.compile(r"\w[\w@%+=,.-]*")  # neither a shell nor a terminal reads anything else into it
_NOT_IN_ID: Final = re.compile(r"[^\w@%+=,.-]+")

_CHANGES: Final = "changes.json"  # in a run's folder: what `resume` changed of its configuration
_CHANGED: Final = "changed_settings.json"  # in a run's folder: its settings that are not the presets'
_EPOCHS: Final = "training.epochs"

_MESSAGE_LENGTH: Final = 500  # characters of an error that are kept; some of torch's fill pages
_LONGEST_NAME: Final = 255  # characters of a file's name, on most file systems
_RUNS: Final = "runs"  # the registry's folder in the state folder, and its index
_MAX_ENTRY_BYTES: Final = 2**20  # largest file that is read as an entry of the registry
T = TypeVar("T")
Changed = Mapping[str, Mapping[str, Any]] | None  # by setting: its `value` and the `default`; None: not known
_LIBRARIES: Final = ("can-train", "torch", "numpy", "hydra-core")
"""Packages whose versions a run notes, beside those of tasks."""


class StopRequests:
    """Turns signals into `SystemExit(128 + signal)`: 143 for SIGTERM, 130 for SIGINT, 140 for SIGUSR2.

    One that arrives while an extension module is initialized does so after it.

    Attributes:
        received: The first signal; None: none yet.
        terminated: Whether SIGTERM arrived, first or later.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.terminated = False
        self._deferring = False
        self._has_interrupted = False
        self._postponed: list[Timer] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handles the signals inside the block, and restores the previous handlers after it."""
        previous: dict[signal.Signals, Any] = {number: signal.signal(number, self._handle) for number in _HANDLED}
        try:
            yield
        finally:
            for timer in self._postponed:
                timer.cancel()
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only notes a signal inside the block, and raises `SystemExit` for it at the end of the block."""
        before, outer = self.received, self._deferring
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = outer
        if self.received != before and not outer:
            self.exit()

    def exit(self) -> None:
        """Raises `SystemExit` with 128 + the number of the signal received."""
        raise SystemExit(128 + (self.received or 0))

    def cause_of(self, error: BaseException) -> BaseException:
        """Returns the `SystemExit` that an error follows from: what a signal interrupts may fail as it cleans up. Any
        other error is returned as it is.
        """
        if self._has_interrupted and isinstance(error, Exception):
            return SystemExit(128 + (self.received or 0))
        return error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._deferring and len(self._postponed) < _MAX_POSTPONED and _is_initializing_extension(frame):
            # Extension modules turn what is raised meanwhile into an ImportError, or lose it.
            timer = Timer(_POSTPONED_S, signal.pthread_kill, (get_ident(), number))
            timer.daemon = True
            timer.start()
            self._postponed.append(timer)
            return
        first = self.received is None
        if first:
            self.received = number
        self.terminated |= number == signal.SIGTERM
        if first and not self._deferring:
            self._has_interrupted = True
            self.exit()
        # SLURM sends SIGTERM twice, and again after its warning. The second one must not cut short what the first one
        # made the process save; SLURM kills a process that takes too long. Only a person sends SIGINT, and means it.
        if not first and number == signal.SIGINT:
            raise SystemExit(128 + number)


def _is_initializing_extension(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_qualname.startswith("ExtensionFileLoader."):
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended: finished, failed, gpu_oom, host_oom, time_limit (it was warned and saved its state),
    terminated (by SIGTERM, and saved its state), interrupted (by SIGINT, and saved its state), rank_gone (another
    process of the run ended without a report), in_use (an earlier attempt's process trains on), or killed, which only
    others can find out.
    """

    attempt: int
    ending: str
    message: str  # the error, in one line; empty where there is none
    details: Mapping[str, Any]  # the fields of `OutOfMemoryDetails` after an out-of-memory
    time: str
    rank: int | None = 0  # which of the run's processes recorded this; None: it was found out after the job
    host: str = ""  # by the scheduler's name where it has one


@dataclass(frozen=True, kw_only=True)
class SlurmContext:
    """Which SLURM job and rank a process is; outside of jobs the job is None."""

    job: JobId | None = None
    restarts: int = 0
    rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "SlurmContext":
        """Reads SLURM's variables."""
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        # Inside an array SLURM_JOB_ID is a number of its own, by which squeue and sacct list no element.
        number = f"{array}_{task}" if array else environment.get("SLURM_JOB_ID", "")
        return cls(
            job=JobId(number=number, cluster=environment.get("SLURM_CLUSTER_NAME", "")) if number else None,
            restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
            rank=int(environment.get("SLURM_PROCID", "0")),
        )


class Attempts:
    """The attempts of the run in a folder, as seen from a job and rank: by default those of the environment."""

    def __init__(self, run_path: Path, context: SlurmContext | None = None) -> None:
        self._folder = run_path / "attempts"
        self._context = context or SlurmContext.from_environment()
        self._current: int | None = None
        self._is_recorded = False

    def starts(self, *, after: int = 0) -> list[AttemptStart]:
        """Reads the starts of all attempts after one, the first one first; a damaged record hides nothing but
        itself.
        """
        paths = [path for path in sorted(self._folder.glob("*-began.json")) if path.name > f"{after:04d}-began.json"]
        starts = [_read_record(path, AttemptStart) for path in paths]
        return [start for start in starts if start is not None and _is_time(start.start_time)]

    def end(self, attempt: int) -> AttemptEnd | None:
        """Reads how an attempt ended; of several records the most informative, None where there is none."""
        paths = self._folder.glob(f"{attempt:04d}-ended*.json")
        ends = [_read_record(path, AttemptEnd) for path in paths]
        known = [end for end in ends if end is not None and end.ending in _BY_SIGNIFICANCE and _is_time(end.time)]
        return min(known, key=_significance, default=None)

    def end_in(self, context: SlurmContext) -> AttemptEnd | None:
        """Reads how the last attempt of a job ended; None where none began or no record was written."""
        return None if (attempt := self._last_in(context)) is None else self.end(attempt)

    def count_restarts(self, job: JobId | None) -> int:
        """Counts how often can-train requeued a job; a requeue by SLURM or by a person does not count."""
        attempts = [start.attempt for start in self.starts() if start.slurm_job == job]
        ends = [self.end(attempt) for attempt in attempts[:-1]]
        return sum(end is not None and end.ending in RESTARTED for end in ends)

    def is_superseded(self) -> bool:
        """Returns whether this attempt's job was started again, or another one: its process is to train no more."""
        own = self._current or self._last_in(self._context) or 0
        return any(self._is_in_other_job(start) for start in self.starts(after=own))

    def supersedes(self, earlier: AttemptStart) -> bool:
        """Returns whether this attempt, begun by a job, has the run in place of an earlier one in another job, or in
        this one before it was started again. One outside of jobs is a person's, and stays.
        """
        return earlier.attempt < (self._current or 0) and self._is_in_other_job(earlier)

    def _is_in_other_job(self, start: AttemptStart) -> bool:
        own = (self._context.job, self._context.restarts)
        return bool(self._context.job and start.slurm_job) and (start.slurm_job, start.restarts) != own

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Records what this attempt waits for in the block."""
        path = self._folder / f"{self.current:04d}-waits.txt"
        write_text_atomic(path, what)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def waits_for(self, attempt: int) -> str:
        """Reads what an attempt waits for; empty: nothing."""
        return text_or_nothing(self._folder / f"{attempt:04d}-waits.txt")

    @property
    def current(self) -> int:
        """The number of this process's attempt; the first access begins it."""
        if self._current is None:
            self._current = self._begin()
        return self._current

    @contextmanager
    def recorded(self, stops: StopRequests, *, rank: int | None = None) -> Iterator[None]:
        """Records the block as an attempt, whatever ends it; a nested block records nothing.

        Args:
            stops: Signals of the process, deferred while a record is written.
            rank: Of the process; None: as the environment says.
        """
        if self._is_recorded:
            yield
            return
        if rank is not None:
            self._context = replace(self._context, rank=rank)
        self._is_recorded = True
        error: BaseException | None = None
        try:
            with stops.deferred():
                # The other ranks take part in the attempt that the first one begins.
                if self._context.rank == 0:
                    self._current = self._begin()
            yield
        except BaseException as raised:
            error = stops.cause_of(raised)
            if error is raised:
                raise
            raise error from None
        finally:
            with stops.deferred():
                self.record_end(*_describe_end(error), rank=self._context.rank)

    def record_end(self, ending: str, message: str, details: Mapping[str, Any], *, rank: int | None = None) -> None:
        """Records how the attempt of this job ended; without a rank, as was found out after it."""
        # A process may end before it has begun an attempt: it was killed while it imported torch.
        attempt = self._current or self._last_in(self._context) or self._begin()
        end = AttemptEnd(attempt=attempt, ending=ending, message=message, details=details, time=utc_now(), rank=rank,
                         host=slurm_node_name())  # fmt: skip
        writer = "-job" if rank is None else f"-rank{rank}" if rank else ""
        write_json_atomic(self._folder / f"{attempt:04d}-ended{writer}.json", asdict(end))

    def _last_in(self, context: SlurmContext) -> int | None:
        own = (context.job, context.restarts)
        attempts = [start.attempt for start in self.starts() if (start.slurm_job, start.restarts) == own]
        return max(attempts, default=None)

    def this_process(self, attempt: int | None = None) -> AttemptStart:
        """Describes this process, as it begins an attempt or is in one; its number is 0 before that."""
        job = self._context.job
        return AttemptStart(attempt=attempt or self._current or 0, start_time=utc_now(), host=this_host(),
                            pid=os.getpid(), job_id=job.number if job else "", restarts=self._context.restarts,
                            cluster=job.cluster if job else "")  # fmt: skip

    def _begin(self) -> int:
        self._folder.mkdir(exist_ok=True)
        while True:
            attempt = len(list(self._folder.glob("*-began.json"))) + 1
            try:
                data = records.json_text(asdict(self.this_process(attempt))).encode()
                records.write_new_atomic(self._folder / f"{attempt:04d}-began.json", data)
            except FileExistsError:
                # Another process of the same run took this number in the meantime.
                continue
            return attempt


def _packages_of_tasks() -> list[str]:
    """Lists the packages in the extras of can-train, as `polars>=1.34 ; extra == 'all'` names them."""
    try:
        needed = requires("can-train") or []
    except PackageNotFoundError:
        return []
    return sorted({re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in needed if "extra ==" in one} - {*_LIBRARIES})


def slurm_node_name() -> str:
    """Returns this machine's name as SLURM has it, else its own: `exclude` of the next job must name the node."""
    return os.environ.get("SLURMD_NODENAME") or this_host()


def _read_record(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(records.read_bytes(path), type=kind)
    except (ValueError, RecursionError):
        return None


def _is_time(text: str) -> bool:
    try:
        records.check_time("time", text)
    except ValueError:
        return False
    return True


def _significance(end: AttemptEnd) -> tuple[int, bool, str]:
    # What was found out after the job counts before what one of its ranks recorded.
    return _BY_SIGNIFICANCE.index(end.ending), end.rank is not None, end.time


def _describe_end(error: BaseException | None) -> tuple[str, str, dict[str, Any]]:
    """Returns how an error ends an attempt, its message in one line, and the details of an out-of-memory."""
    if error is None:
        return "finished", "", {}
    if isinstance(error, SystemExit):
        # A job turns an error that it has printed into an exit status, and keeps it as the cause.
        ending, message, details = _describe_end(error.__cause__)
        by_signal = ENDING_BY_STATUS.get(error.code) if isinstance(error.code, int) else None
        return by_signal or (ending if error.__cause__ else "failed"), message, details
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "", {}
    ending, details = "failed", {}
    if isinstance(error, DoesNotFitError):
        ending, details = "host_oom" if error.details.of_host else "gpu_oom", asdict(error.details)
    elif isinstance(error, RankGoneError):
        ending = "rank_gone"
    elif isinstance(error, EarlierAttemptError):
        ending = "in_use"
    elif is_out_of_memory(error):
        ending = "host_oom" if is_host_memory(error) else "gpu_oom"
    text = error.in_short if isinstance(error, CanTrainError) else without_positions(str(error))
    text = " ".join(line.strip() for line in text.splitlines() if line.strip())
    # The text of a CanTrainError is written for users; any other needs its type.
    if not isinstance(error, CanTrainError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return ending, text if len(text) <= _MESSAGE_LENGTH else f"{text[:_MESSAGE_LENGTH]} …", details


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
        self._holder: AttemptStart | None = None  # what this process has written into the lock

    @classmethod
    def create(cls, runs_dir: Path, key: str, config: Mapping[str, Any], changed: Changed = None) -> "RunFolder":
        """Creates the folder of a new run (see `make`)."""
        folder = cls(runs_dir / new_run_id(key))
        folder.make(config, changed)
        return folder

    def make(self, config: Mapping[str, Any], changed: Changed = None) -> None:
        """Creates the folder and writes the run's configuration and environment.

        Args:
            config: The resolved configuration.
            changed: The settings in it that are not the presets' (`compose.changed_settings`); None: not known.

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
        """Reads the settings in which the run differed from the presets of its model, mode and data when it was
        configured, each with its `value` and the `default`; None where that is not known.
        """
        try:
            found = msgspec.convert(json.loads(read_text(self.path / _CHANGED)), dict[str, dict[str, Any]])
        except (OSError, ValueError, RecursionError):
            return None
        return found if all({"value", "default"} <= one.keys() for one in found.values()) else None

    def changes(self) -> list[dict[str, Any]]:
        """Reads what `resume` changed of the configuration, the first change first: `time`, `step` of the checkpoint
        that the run went on from, and `settings`, each with its value `before` and `after`; none if that is damaged.
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
        """Replaces the configuration, and records the settings that changed (see `changes`). A result that more epochs
        make out of date is kept under another name.
        """
        record = {"time": utc_now(), "step": step, "settings": settings}
        # The record first: a kill in between leaves one of a change that the same line then makes.
        write_json_atomic(self.path / _CHANGES, {"changes": [*self.changes(), record]})
        self._write_config(config, changed)
        if _EPOCHS in settings and is_file(self.result_path):
            self.result_path.replace(self.path / f"result-at-step-{step}.json")

    def goes_on_for_longer(self, step: int) -> bool:
        """Returns whether more epochs were asked for when the checkpoint of a step was the last one."""
        return any(one.get("step") == step and _EPOCHS in one.get("settings", {}) for one in self.changes())

    def result(self) -> dict[str, Any] | None:
        """Reads the result; None where the run has not finished.

        Raises:
            RunError: It cannot be read.
        """
        try:
            result = json.loads(read_text(self.result_path))
            # Written whole or not at all; but a person may have copied or edited it.
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
        """Makes the error for a result that says something else than the run wrote."""
        # The last checkpoint has the weights, so a resumed run has only to be judged once more.
        again = f"rm {shlex.quote(str(self.result_path))}; can-train resume {shlex.quote(str(self.path))}"
        # The line to paste stands alone, without a full stop.
        remedy = f"This has the run judged again:\n  {again}\nIts weights are in other files"
        return RunError("The run's result is damaged", value=str(self.result_path), remedy=remedy)

    @contextmanager
    def locked(self, *, doing: str = "trained") -> Iterator[None]:
        """Keeps a second process from training the run, or from what else is to be done once (`doing`).

        Raises:
            RunError: Another process is at it.
        """
        path = self._lock_path if doing == "trained" else self.path / f"{doing}.lock"
        # Not emptied when it is opened: it names the process that has it.
        with records.open_to_append(path, reads=True) as file:
            if not try_lock(file):
                raise self._in_use(doing, read_holder(path))
            write_holder(file, self.attempts.this_process())
            yield

    @contextmanager
    def locked_to_train(self, reporter: Reporter) -> Iterator[None]:
        """Keeps a second process from training the run. In a job that SLURM has started again, it waits until the
        process of an earlier attempt has ended (see `wait_for_lock`).

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
        """Returns whether another process has the lock that this one had: some file systems (NFS without its lock
        service, Lustre) let one have it on each machine.
        """
        holder = read_holder(self._lock_path)
        return None not in (self._holder, holder) and holder != self._holder

    def _in_use(self, doing: str, holder: AttemptStart | None) -> RunError:
        who = f": {holder_in_words(holder)}" if holder else ""
        return RunError(f"The run is being {doing} by another process", value=f"{self.run_id}{who}")


def new_run_id(key: str) -> str:
    """Makes the id of a new run: time, key, and four digits that distinguish it from others of the same second."""
    return f"{datetime.now():{_STAMP}}-{_NOT_IN_ID.sub('_', key)}-{secrets.token_hex(_TAIL_LENGTH // 2)}"


def is_run_id(name: str) -> bool:
    """Returns whether a run may have a name: it needs no quotes in a shell."""
    return _ID.fullmatch(name) is not None


def split_run_id(run_id: str) -> tuple[datetime | None, str]:
    """Reads the time and the key from a run id; no time, and all of it, where can-train did not make the name."""
    if len(run_id) <= _STAMP_LENGTH + _TAIL_LENGTH + 2:
        return None, run_id
    try:
        time = datetime.strptime(run_id[:_STAMP_LENGTH], _STAMP)
    except ValueError:
        return None, run_id
    return time, run_id[_STAMP_LENGTH + 1 : -_TAIL_LENGTH - 1]


def short_name(run_id: str) -> str:
    """Shortens a run id to day, time and last digits, which distinguish it from others of the same second.

    Example:
        >>> short_name("20260728-101500-hcrl_ch_gat_student_normal-3fa9")
        '0728-101500-3fa9'
    """
    time, _ = split_run_id(run_id)
    return _shortened(run_id) if time else run_id


def _shortened(run_id: str) -> str:
    return f"{run_id[_YEAR_LENGTH:_STAMP_LENGTH]}-{run_id[-_TAIL_LENGTH:]}"


def may_be_called(run_id: str, part: str) -> bool:
    """Returns False where neither a run's id nor its short name contains a text; fast, for thousands of runs."""
    return part in run_id or part in _shortened(run_id)


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = 0

    def append(self, **record: Any) -> None:
        """Adds a line."""
        with records.open_to_append(self._path) as handle:
            handle.write(json.dumps(record) + "\n")
        self.lines += 1

    def rewind(self, lines: int) -> None:
        """Keeps the first `lines` lines: steps after the last checkpoint are trained, and logged, once more."""
        kept = records.text_or_nothing(self._path).splitlines(keepends=True)[:lines]
        write_text_atomic(self._path, "".join(kept))
        self.lines = len(kept)


def _unreadable(what: str, path: Path, error: OSError | ValueError) -> RunError:
    why = f": {error.strerror}" if isinstance(error, OSError) else ""
    return RunError(f"The run's {what} cannot be read", value=f"{path}{why}",
                    remedy="Mend its permissions, copy the run once more, or train anew")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run in the registry."""

    run_id: str
    path: str  # absolute path of its folder, whose name is the run id
    key: str  # its configuration's key in the factor store
    time: str
    identity: str = ""  # digest of resolved configuration, code and data, equal for runs that would do the same
    after: str = ""  # ids of the runs that it waits for, separated by commas
    sweep: str = ""  # name that the runs of one sweep share; empty: it belongs to none

    def __post_init__(self) -> None:
        if self.run_id != Path(self.run_id).name or len(self.run_id) > _LONGEST_NAME:
            raise ValueError("run_id is no name of a folder")
        records.check_time("time", self.time)


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job that was started for a run: a scheduler's, or a process of a machine."""

    run_id: str
    executor: str  # slurm, local or debug
    job_id: str  # as the executor numbers it: 123, 123_4 for an element of an array, or a process id
    time: str
    host: str  # machine that it was submitted from
    log_path: str
    reason: str = ""  # why, in words, unless it is the first: "host out-of-memory: 600M instead of 400M"
    resources: dict[str, Any] = field(default_factory=dict)  # what was asked for, by sbatch's names
    cluster: str = ""  # whose SLURM counts the job; empty: a process, or not recorded

    def __post_init__(self) -> None:
        records.check_time("time", self.time)

    @property
    def slurm_job(self) -> JobId | None:
        """The job, where it is one of SLURM."""
        return JobId(number=self.job_id, cluster=self.cluster) if self.executor == "slurm" else None


@dataclass(frozen=True, kw_only=True)
class CancelRecord:
    """When a person asked to cancel a run."""

    run_id: str
    time: str

    def __post_init__(self) -> None:
        records.check_time("time", self.time)


_Record = TypeVar("_Record", RunRecord, JobRecord, CancelRecord)
_RUN_KIND: Final = Kind(RunRecord, group=lambda record: "", latest=lambda record: datetime.fromisoformat(record.time))


class Registry:
    """The runs of a state folder, which need not exist: one immutable file an entry, so that nothing needs a lock."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / _RUNS
        self._index = index_folder(state_dir) / _RUNS

    def add(self, record: RunRecord | JobRecord | CancelRecord) -> None:
        """Writes an entry.

        Raises:
            StateError: It cannot be written.
        """
        name = "run"
        if not isinstance(record, RunRecord):
            kind = "job" if isinstance(record, JobRecord) else "cancel"
            # Two machines may write in the same microsecond, and process ids repeat between machines.
            name = f"{kind}-{records.time_stamp(record.time)}-{os.getpid()}-{secrets.token_hex(2)}"
        records.write_document(self.folder / record.run_id / f"{name}{records.DOCUMENT_SUFFIX}", record)

    def has(self, run_id: str) -> bool:
        """Returns whether there is an entry of a run."""
        return (self.folder / run_id).is_dir()

    def entry(self, run_id: str) -> Path:
        """Returns the path of the entry of a run."""
        return self.folder / run_id / f"run{records.DOCUMENT_SUFFIX}"

    def run(self, run_id: str) -> RunRecord | None:
        """Reads the entry of a run; None: there is none, or it is damaged."""
        return next((one for one in self._read(run_id, "run", RunRecord, []) if one.run_id == run_id), None)

    def runs(self, *, index_from: int = INDEX_FROM) -> list[RunRecord]:
        """Reads all runs, the oldest first; adds those to an index that are at least so many."""
        index, names = read_folder(self.folder, self._index, _RUN_KIND)
        certain, doubtful = dict[str, RunRecord](), list[RunRecord]()
        for run_id in names:
            aside: list[SetAside] = []
            for record in self._read(run_id, "run", RunRecord, aside):
                if aside or run_id in certain:
                    doubtful.append(record)
                else:
                    certain[run_id] = record
        if index.is_worth_extending(len(certain), index_from):
            write_index(index, certain)
        found = [*index.records(index.groups).values(), *certain.values(), *doubtful]
        return sorted(found, key=lambda record: (record.time, record.run_id))

    def jobs(self, run_id: str) -> list[JobRecord]:
        """Reads the jobs of a run, the first one first."""
        return sorted(self._read(run_id, "job-", JobRecord, []), key=lambda record: record.time)

    def cancels(self, run_id: str) -> list[CancelRecord]:
        """Reads when persons asked to cancel a run, the first time first."""
        return sorted(self._read(run_id, "cancel-", CancelRecord, []), key=lambda record: record.time)

    def _read(self, run_id: str, prefix: str, kind: type[_Record], aside: list[SetAside]) -> list[_Record]:
        folder = self.folder / run_id
        if not folder.is_dir():
            return []
        names, end = records.list_names(folder), records.DOCUMENT_SUFFIX
        names = [name for name in names if name.startswith(prefix) and name.endswith(end)]
        # A damaged entry hides nothing but itself.
        return list(records.read_documents(folder, names, kind, aside, most_bytes=_MAX_ENTRY_BYTES).values())


# Whether the code that a run names may run for the user who types a command. It may for the runs in the user's own
# registry, as long as no other user can change which code that is; else the user must ask for it.

_PLACES: Final = {"code_dir": (".py", ".pyc", ".so"), "config_dir": (".yaml",)}
"""Settings that name folders of code and of presets, and the endings of the files that are read from there."""
_REQUESTS: Final = frozenset(
    ("executor", "partition", "account", "qos", "time", "nodes", "gpus", "cpus", "mem", "constraint", "gres", "exclude",
     "nodelist", "reservation", "exclusive", "comment", "job_name", "mail_user", "mail_type", "signal_delay_s",
     "max_restarts", "oom_resubmits", "max_parallel")
)  # fmt: skip
"""Cluster settings that name resources and numbers. Any other one may be a command, or an option that has an effect of
its own.
"""


@dataclass(frozen=True, kw_only=True)
class CodeTrust:
    """Decides for one user.

    Attributes:
        state: The user's state folder, with the registry.
        trusts_all: Whether the user has asked for the code of any run.
    """

    state: Path = field(default_factory=state_folder)
    trusts_all: bool = False

    def config(self, folder: RunFolder, *, submits: bool = False, has_code: bool = False) -> dict[str, Any]:
        """Reads the configuration of a run whose code is about to run.

        Args:
            folder: Of the run.
            submits: Whether the cluster settings of the run are about to be sent to a scheduler.
            has_code: Whether a file in the folder names can-train's own code, as that of a submitted run does.

        Raises:
            UntrustedCodeError: Another user may have decided which code that is.
            RunError: The configuration cannot be read.
        """
        config = folder.config()
        if not self.trusts_all and (has_code or _runs_own_code(config, submits=submits)):
            self._check(folder, config)
        return config

    def _check(self, folder: RunFolder, config: Mapping[str, Any]) -> None:
        account, path = Account.current(), Path(os.path.realpath(folder.path))
        for place in (path, path / CONFIG):
            _check_place(place, account)
        registry = Registry(self.state)
        record = registry.run(path.name)
        if record is None or not _is_place_of(record, path):
            code = f"; it names {', '.join(named)}" if (named := _names_of_code(config)) else ""
            raise UntrustedCodeError(f"{path} is not in your list of runs, {registry.folder}{code}")
        _check_place(registry.entry(path.name), account)
        for name, endings in _PLACES.items():
            for place in _named(config, name):
                for passed in places_on_the_way(place):
                    _check_place(passed, account, is_passed=True)
                for file in _read_from(place, endings):
                    _check_place(file, account)


def _runs_own_code(config: Mapping[str, Any], *, submits: bool) -> bool:
    """Whether the configuration of a run names a task, presets or commands that are not part of can-train."""
    cluster = config.get("cluster")
    requests = cluster if submits and isinstance(cluster, Mapping) else {}
    has_commands = any(value for name, value in requests.items() if name not in _REQUESTS)
    return config.get("task") not in task_names() or any(_named(config, name) for name in _PLACES) or has_commands


def _named(config: Mapping[str, Any], name: str) -> list[Path]:
    paths = config.get("paths")
    place = paths.get(name) if isinstance(paths, Mapping) else ""
    return [Path(str(place))] if place else []


def _names_of_code(config: Mapping[str, Any]) -> list[str]:
    """Names the file or the module of a run's own task, and its folder of presets."""
    task = str(config.get("task", ""))
    file = task.rpartition(":")[0]
    own = [str(place / file) for place in _named(config, "code_dir")] if file.endswith(".py") else [task]
    return [*(own if task not in task_names() else []), *map(str, _named(config, "config_dir"))]


def _is_place_of(record: RunRecord, path: Path) -> bool:
    """Whether a run lies where it was made, or was moved from there."""
    return os.path.realpath(record.path) == str(path) or not Path(record.path).exists()


def _read_from(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """Lists a folder, and below it the files with some endings and the folders that lead to them."""
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
    """Raises UntrustedCodeError where another user may change a file, a folder, or where a link leads."""
    try:
        statuses = [place.lstat(), place.stat()]
    except FileNotFoundError:
        return
    for status in statuses:
        if who := other_writer(status, account, is_passed=is_passed):
            raise UntrustedCodeError(f"{place}: {who}")


def make_run(run: ResolvedRun, reporter: Reporter, changed: Changed = None) -> RunFolder:
    """Creates the folder of a run that trains here and now, and registers it; without a registry, with a notice.

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
    """Returns what a command line calls a run, ready to be typed."""
    # A run that is not in the registry that the line will ask is known by its folder alone.
    is_known = Registry(state_folder()).has(folder.run_id)
    return short_name(folder.run_id) if is_known else shlex.quote(str(folder.path))


def resume_hint(folder: RunFolder) -> str:
    """Returns the notice for a person who has stopped a run."""
    return f"This continues the run:\n  can-train resume {name_to_type(folder)}"


def relocate_prerequisites(run: ResolvedRun, folder: Path) -> ResolvedRun:
    """Looks for prerequisites that are no longer where they were beside the folder where the run is now."""
    moved = {}
    for needed in run.prerequisites:
        path = Path(getattr(run.mode, needed.role))
        # Who copies a folder of runs to another machine brings them along.
        beside = folder.resolve().parent / path.name
        if path.name and not is_file(path / CONFIG) and is_file(beside / CONFIG):
            moved[needed.role] = str(beside)
    return replace(run, mode=replace(run.mode, **moved)) if moved else run


def without_missing_prerequisites(run: ResolvedRun) -> tuple[ResolvedRun, list[str]]:
    """Drops the optional prerequisites of a run that are gone; returns also notices that say so."""
    optional = {needed.role: getattr(run.mode, needed.role) for needed in run.prerequisites if not needed.required}
    gone = {role: name for role, name in optional.items() if name and not is_file(Path(name) / CONFIG)}
    notices = [f"{role.replace('_', ' ')}: {name} is gone, so the run goes on without" for role, name in gone.items()]
    return replace(run, mode=replace(run.mode, **dict.fromkeys(gone, ""))) if gone else run, notices
