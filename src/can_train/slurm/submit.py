"""Starts jobs through SLURM or on this machine."""

import io
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, TextIO

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from can_train.config.settings import ClusterSettings
from can_train.errors import RunError
from can_train.io.records import utc_now
from can_train.slurm.job import Entry, Job
from can_train.slurm.script import ScriptInputs, job_environment, open_executor, parameters, resources, script
from can_train.slurm.snapshot import code_of
from can_train.training.run_folder import JobRecord, Registry, RunFolder


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What is said of jobs that are started together.

    Attributes:
        name: Of the jobs.
        state_dir: State folder, absolute.
        dependency: What they wait for, as sbatch writes it; empty: nothing.
        reason: Why, in words, where these are not the runs' first jobs.
        sweep: Name of the array; empty for one job.
    """

    name: str
    state_dir: Path
    dependency: str = ""
    reason: str = ""
    sweep: str = ""


@dataclass(frozen=True, kw_only=True)
class StartedJob:
    """A job that has been started.

    Attributes:
        executor: slurm, local or debug.
        job_id: As the executor names it.
        log_path: What it prints; empty where that is this terminal.
        resources: What was asked for, by sbatch's names.
    """

    executor: str
    job_id: str
    log_path: str
    resources: dict[str, Any] = field(default_factory=dict)


def enter_job(folder: RunFolder, started: StartedJob, submission: Submission) -> JobRecord:
    """Enters a job into the registry.

    Raises:
        StateError: The registry cannot be written.
    """
    record = JobRecord(
        run_id=folder.run_id,
        executor=started.executor,
        job_id=started.job_id,
        time=utc_now(),
        host=socket.gethostname(),
        log_path=started.log_path,
        reason=submission.reason,
        resources=started.resources,
    )
    Registry(submission.state_dir).add(record)
    return record


_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""What a person, a closing terminal or a scheduler sends."""


_STOPPED: Final = frozenset(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2))
"""Exit statuses of a training that was stopped, and has saved itself."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a line ended.

    Attributes:
        status: Its exit status; 128 + the number of a signal that killed it, or that came as it finished.
        stopped: Whether somebody wished its end.
    """

    status: int
    stopped: bool


def run_line(arguments: Sequence[str], output: TextIO | None = None) -> Ended:
    """Runs `can-train` with arguments, and waits for its end.

    Args:
        arguments: Without the program's name.
        output: Where its results go; None: to this process's standard output.
    """
    sys.stdout.flush()
    command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "can_train", *arguments]
    # In a group of its own: the terminal's Ctrl-C would reach it beside ours, and a second one does not wait.
    with (
        _passing_on() as signals,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, process_group=0) as child,
    ):
        signals.reach(child)
        status = child.wait()
    status = status if status >= 0 else 128 - status
    if signals.first is not None:
        return Ended(status=status or 128 + signals.first, stopped=True)
    return Ended(status=status, stopped=status in _STOPPED)


class _Signals:
    """Signals that came, and the process that they are for."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._waiting: deque[int] = deque()
        self._child: subprocess.Popen[bytes] | None = None

    def handle(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or number
        self._waiting.append(number)
        self._pass_on()

    def reach(self, child: "subprocess.Popen[bytes]") -> None:
        """Passes on those that came while the process was being started, and from now on all."""
        self._child = child
        self._pass_on()

    def _pass_on(self) -> None:
        """Empties the queue: a signal that comes in between is taken from it once, here or there."""
        with suppress(IndexError):
            while self._child is not None:
                self._child.send_signal(self._waiting.popleft())


@contextmanager
def _passing_on() -> Iterator[_Signals]:
    """Takes signals, but for those that this process was told to ignore (nohup)."""
    signals = _Signals()
    heeded = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, signals.handle) for number in heeded}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


BACKGROUND: Final = "local"


FOREGROUND: Final = "debug"


_TIMEOUT_MIN: Final = 7 * 24 * 60
"""Longest run; submitit wants a limit."""


def start_process(entry: Entry, run: RunFolder) -> StartedJob:
    """Starts a process for a run that outlives this one and its terminal.

    Args:
        entry: Trains the run in a folder.
        run: The folder, which has a snapshot of the code.

    Raises:
        RunError: It could not be started.
    """
    folder = run.path / "submitit"
    source = code_of(run.path) / "src"
    reading, writing = os.pipe()
    # submitit starts its controller in our session, where closing the terminal would end it: a child that has left the
    # session starts it instead.
    child = os.fork()
    if child == 0:
        os.close(reading)
        with job_environment(source):
            _start_detached(Job(entry, str(run.path)), folder, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        job_id = pipe.read()
    os.waitpid(child, 0)
    if not job_id:
        raise RunError(
            "The job could not be started", value=str(folder), remedy="Train in the foreground: leave out --submit"
        )
    return StartedJob(executor=BACKGROUND, job_id=job_id, log_path=str(folder / f"{job_id}_0_log.out"))


def run_here(entry: Entry, folder: RunFolder, submission: Submission) -> JobRecord:
    """Does in this process what a job does; enters it into the registry first.

    Raises:
        SystemExit: As in a job.
        StateError: The registry cannot be written.
    """
    job = enter_job(folder, StartedJob(executor=FOREGROUND, job_id=str(os.getpid()), log_path=""), submission)
    Job(entry, str(folder.path))()
    return job


def _start_detached(job: Job, folder: Path, writing: int) -> None:
    """Runs in the child: leaves the session, submits, reports the job id through the pipe, and ends."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        # Also the errors: whoever reads them through a pipe would wait for the run's end.
        for standard_stream in (0, 1, 2):
            os.dup2(null, standard_stream)
        executor = submitit.LocalExecutor(folder)
        gpus = _gpus()
        executor.update_parameters(
            timeout_min=_TIMEOUT_MIN, stderr_to_stdout=True, gpus_per_node=len(gpus), visible_gpus=gpus
        )
        os.write(writing, executor.submit(job).job_id.encode())
    finally:
        # Not sys.exit: the parent's cleanup must not run twice.
        os._exit(0)


def _gpus() -> tuple[int, ...]:
    """Numbers the GPUs that a job may see: those that this process may."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(int(number) for number in visible.split(",") if number.strip().isdigit())
    gpus = Path("/proc/driver/nvidia/gpus")
    return tuple(range(len(list(gpus.iterdir())))) if gpus.is_dir() else ()


EXECUTOR: Final = "slurm"


def submit_jobs(
    entry: Entry, folders: Sequence[RunFolder], cluster: ClusterSettings, submission: Submission
) -> list[JobRecord]:
    """Submits jobs as `start_jobs` does, and enters them into the registry.

    Returns:
        Their jobs, in the order of the folders.

    Raises:
        RunError: SLURM refused.
        ConfigError: A value cannot be written into a script.
        StateError: The registry cannot be written.
    """
    started = start_jobs(entry, folders, cluster, submission)
    return [enter_job(folder, job, submission) for folder, job in zip(folders, started, strict=True)]


def start_jobs(
    entry: Entry, folders: Sequence[RunFolder], cluster: ClusterSettings, submission: Submission
) -> list[StartedJob]:
    """Submits one job for one run, or one array for several that ask for the same.

    Args:
        entry: Trains the run in a folder.
        folders: Of the runs, which have a snapshot of the code.
        cluster: What each job asks for.
        submission: What else is said of them.

    Returns:
        The jobs, in the order of the folders.

    Raises:
        RunError: SLURM refused.
        ConfigError: A value cannot be written into a script.
    """
    wanted = parameters(cluster, _text(submission, code_of(folders[0].path)))
    executor = open_executor(submission_folder(folders, submission.sweep), wanted)
    tasks = [Job(entry, str(folder.path)) for folder in folders]
    try:
        # submitit prints what sbatch says; it is in the error too.
        with job_environment(), redirect_stderr(io.StringIO()):
            jobs = executor.submit_array(tasks)
    except (FailedJobError, FailedSubmissionError) as error:
        raise RunError("SLURM refused the job", value=_said(error)) from error
    asked = resources(cluster)
    return [
        StartedJob(executor=EXECUTOR, job_id=job.job_id, log_path=str(job.paths.stdout), resources=asked)
        for job in jobs
    ]


def script_text(folders: Sequence[RunFolder], cluster: ClusterSettings, submission: Submission, code: Path) -> str:
    """Writes the batch script that `submit_jobs` would send; nothing need be there.

    Args:
        folders: Of the runs.
        cluster: What each job asks for.
        submission: What else is said of them.
        code: Folder of the code's snapshot.

    Raises:
        ConfigError: A value cannot be written into a script.
    """
    folder = submission_folder(folders, submission.sweep)
    return script(folder, parameters(cluster, _text(submission, code)), len(folders))


def submission_folder(folders: Sequence[RunFolder], sweep: str) -> Path:
    """Names the folder where submitit keeps the files of jobs: the run's, or for an array one beside the runs."""
    if len(folders) == 1:
        return folders[0].path / "slurm"
    return folders[0].path.parent / "sweeps" / sweep


def _text(submission: Submission, code: Path) -> ScriptInputs:
    return ScriptInputs(
        name=submission.name, code=code, state_dir=submission.state_dir, dependency=submission.dependency
    )


def _said(error: Exception) -> str:
    """What sbatch said, without what Python says of it."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines if line.startswith("sbatch:")]
    return "; ".join(said) or next((line for line in reversed(lines) if line), "no reason given")
