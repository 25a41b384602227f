"""Starts jobs through SLURM or on this machine."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn, TextIO, TypeVar

import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError, JobPaths

from can_train.config.settings import ClusterSettings
from can_train.errors import CanTrainError, RunError, Stopped
from can_train.io.records import JobId, text_or_nothing, this_host, utc_now, write_text_atomic
from can_train.runs.attempts import SlurmContext
from can_train.runs.registry import JobRecord, Registry
from can_train.runs.run_folder import RunFolder
from can_train.runs.scheduler import NoControllerError
from can_train.slurm.client import SUBMIT_TIMEOUT_S, cancel_jobs, cluster_names, find_jobs, limited, local_cluster
from can_train.slurm.container import needed_paths
from can_train.slurm.job import Entry, Job, PackedJob
from can_train.slurm.script import (
    GPU_VARIABLES,
    Submission,
    check_folder,
    job_environment,
    parameters,
    python_command,
    resources,
)
from can_train.slurm.snapshot import code_of

T = TypeVar("T")
Recording = Callable[[Sequence[JobRecord]], object]
"""Function that enters jobs, and what belongs to them, into the registry."""

_LOST_ANSWER: Final = re.compile(r"timed out|Zero Bytes were transmitted")
"""Errors of sbatch after which SLURM may have taken the job all the same."""
_SENT_TO: Final = ".cluster"
"""File in the folder of submitit's files: name of the cluster of the last submission."""


def _record(folder: RunFolder, executor: str, job_id: str, log_path: str, **more: Any) -> JobRecord:
    return JobRecord(run_id=folder.run_id, executor=executor, job_id=job_id, time=utc_now(), host=this_host(),
                     log_path=log_path, **more)  # fmt: skip


# Through SLURM


def submit_job(entry: Entry, folder: RunFolder, cluster: ClusterSettings, submission: Submission) -> JobRecord:
    """Submits the job of one run, as `start_jobs` does, and enters it into the registry.

    Raises:
        RunError: SLURM refused.
        ConfigError: A value cannot be written into a script.
        StateError: The registry cannot be written.
    """
    registry = Registry(submission.state_dir)
    (job,) = start_jobs(entry, [folder], cluster, submission, lambda jobs: registry.add(jobs[0]))
    return job


def start_jobs(
    entry: Entry, folders: Sequence[RunFolder], cluster: ClusterSettings, submission: Submission, record: Recording
) -> list[JobRecord]:
    """Submits a job for a run, or an array for several runs with equal requests, whose jobs may train several runs each
    (`cluster.pack`). Signals wait until the jobs are recorded; jobs that cannot be recorded are cancelled.

    Args:
        entry: Function that trains the run in a folder.
        folders: Folders of the runs, which have a snapshot of the code.
        cluster: Request of each job.
        submission: Description of the jobs.
        record: Enters the jobs into the registry.

    Raises:
        RunError: SLURM refused, or has a job that can be neither recorded nor cancelled.
        Stopped: A signal arrived.
        NoControllerError: SLURM does not answer.
        ConfigError: A value cannot be written into a script, or SLURM cannot write into a folder of this name.
    """
    cluster = unpacked(cluster) if len(folders) == 1 else cluster
    packs = in_packs(folders, cluster)
    folder = submission_folder(folders, submission)
    code = code_of(folders[0].path)
    paths: list[Path] = []
    if cluster.container:
        runs = folders[0].path.parent
        paths = needed_paths([folder.config() for folder in folders], code, submission.state_dir, runs)
    job_parameters = parameters(cluster, submission, code, paths)
    check_folder(folder)
    executor = _Executor(folder, python=python_command(cluster, code, paths))
    try:
        # SLURM chooses among several clusters, and its answer names the choice if it is not this machine's.
        named = cluster_names(cluster.clusters)
        executor.job_cluster = named[0] if len(named) == 1 else local_cluster()
    except NoControllerError:
        # In a job that submits its run again, PATH may lack scontrol.
        job = SlurmContext.from_environment().job
        if job is None or not job.cluster:
            raise
        executor.job_cluster, named = job.cluster, []
    executor.sent_to = ",".join(named) or executor.job_cluster
    _take_back_unseen(str(job_parameters["job_name"]), folder, executor.sent_to)
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(folder / _SENT_TO, executor.sent_to)
    executor.parameters.update(job_parameters)
    tasks: list[Job | PackedJob] = [
        Job(entry, str(pack[0].path)) if cluster.runs_per_job == 1
        else PackedJob(entry, tuple(str(run.path) for run in pack)) for pack in packs
    ]  # fmt: skip
    name = str(job_parameters["job_name"])
    doubt = f"a job {name} may be in the queue. Look: squeue --me --name={name}. Take it out: scancel JOBID"
    with _signals_deferred(doubt) as deferral:
        jobs = _sent(executor, tasks)
        try:
            # Each process of a job has a log of its own.
            records = [
                _record(run, "slurm", job.job_id, str(JobPaths(folder, job.job_id, task).stdout),
                        reason=submission.reason, resources=resources(cluster), cluster=executor.job_cluster,
                        packed_with=len(pack))
                for pack, job in zip(packs, jobs, strict=True) for task, run in enumerate(pack)
            ]  # fmt: skip
            record(records)
        except Exception as error:
            _cancel_unrecorded(executor.taken, error)
            raise
        deferral.has_started(records, submission.state_dir)
    return records


def _sent(executor: "_Executor", tasks: "Sequence[Job | PackedJob]") -> list[submitit.Job[Any]]:
    try:
        # submitit prints sbatch's output; the error contains it, too.
        with job_environment(), redirect_stderr(io.StringIO()):
            return list(executor.submit_array(tasks))
    except (FailedJobError, FailedSubmissionError) as error:
        # The lines of sbatch, without the lines of Python.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        texts = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines if line.startswith("sbatch:")]
        reason = "; ".join(texts) or [*lines, "no reason given"][-1]
        if _LOST_ANSWER.search(reason):
            _take_back_lost(executor, reason)
        remedy = "Change what the job asks for; can-train doctor shows what the partitions grant"
        raise RunError("SLURM refused the job", value=reason, remedy=remedy) from error
    except Exception as error:
        # A disk that is full: submitit moves its files after sbatch has answered.
        _cancel_unrecorded(executor.taken, error)
        raise


def _take_back_lost(executor: "_Executor", reason: str) -> NoReturn:
    """Cancels the jobs that SLURM may have taken before its answer was lost; raises RunError."""
    try:
        jobs = find_jobs(str(executor.parameters["job_name"]), Path(executor.folder), executor.sent_to)
    except NoControllerError as error:
        raise _unanswered(f"whether it took the job is not known ({error.value})", reason) from error
    lost = _unanswered("it took the job, which was cancelled again" if jobs else "it did not take the job", reason)
    _cancel_unrecorded(jobs, lost)
    raise lost


def _cancel_unrecorded(taken: Sequence[JobId], error: Exception) -> None:
    """Cancels the jobs that SLURM took before an error, so that none waits that no run knows.

    Raises:
        RunError: SLURM does not cancel them.
    """
    if not taken:
        return
    try:
        refusal = cancel_jobs(taken)
    except NoControllerError as silence:
        refusal = silence.value
    if refusal:
        numbers = " ".join(job.number for job in taken)
        raise RunError("SLURM took a job that could be neither recorded nor cancelled",
                       value=f"job {', '.join(map(str, taken))}: {_in_a_line(error)}; {refusal}",
                       remedy=f"Cancel it: scancel {numbers}") from error  # fmt: skip


def in_packs(items: Sequence[T], cluster: ClusterSettings) -> list[Sequence[T]]:
    """Returns the runs of each job.

    >>> in_packs([1, 2, 3, 4, 5], ClusterSettings(pack="2"))
    [[1, 2], [3, 4], [5]]
    """
    return [items[start : start + cluster.runs_per_job] for start in range(0, len(items), cluster.runs_per_job)]


def unpacked(cluster: ClusterSettings) -> ClusterSettings:
    """Returns the request of a job that trains one run."""
    return replace(cluster, pack="") if cluster.pack else cluster


class _Executor(submitit.SlurmExecutor):
    """submitit's executor, with a limited wait for sbatch.

    Attributes:
        job_cluster: Name of the cluster of the jobs.
        sent_to: Clusters that may take the jobs, separated by commas.
        taken: Jobs that SLURM took; an array is one job.
    """

    job_cluster = ""
    sent_to = ""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.taken: list[JobId] = []

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[submitit.Job[Any]]:
        if len(delayed_submissions) == 1:
            return super()._internal_process_submissions(delayed_submissions)
        # Like submitit's method, which makes an executor of submitit's class for an array.
        self.folder.mkdir(parents=True, exist_ok=True)
        pickles = [self.folder / f"{uuid.uuid4().hex}.pkl" for _ in delayed_submissions]
        for delayed, pickle in zip(delayed_submissions, pickles, strict=True):
            delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            delayed.dump(pickle)
        array = _Executor(self.folder, self.max_num_timeout)
        array.job_cluster, array.sent_to, array.taken = self.job_cluster, self.sent_to, self.taken
        array.parameters = {**self.parameters, "map_count": len(pickles)}
        first = array._submit_command(self._submitit_command_str)
        self.job_cluster = array.job_cluster or self.job_cluster
        tasks = list(range(first.num_tasks))
        jobs: list[submitit.Job[Any]] = [
            submitit.SlurmJob(self.folder, f"{first.job_id}_{index}", tasks) for index in range(len(pickles))
        ]
        for job, pickle in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(pickle, "submitted_pickle")
        return jobs

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return limited(super()._make_submission_command(submission_file_path))

    # A static method in submitit, which calls it as a method.
    def _get_job_id_from_submission_command(self, string: bytes | str) -> str:  # type: ignore[override]
        # `cluster.clusters` sends jobs to another cluster, and sbatch prints its name.
        answer = string if isinstance(string, str) else string.decode()
        if named := re.search(r" on cluster (\S+)", answer):
            self.job_cluster = named[1]
        if answer:
            number = str(submitit.SlurmExecutor._get_job_id_from_submission_command(answer))
            self.taken.append(JobId(number=number, cluster=self.job_cluster))
            return number
        try:
            jobs = find_jobs(str(self.parameters["job_name"]), Path(self.folder), self.sent_to)
        except NoControllerError as error:
            raise _unanswered(f"whether it took the job is not known ({error.value})") from error
        if not jobs:
            raise _unanswered("it did not take the job")
        self.job_cluster = jobs[-1].cluster
        self.taken.append(jobs[-1])
        return jobs[-1].number


def _unanswered(outcome: str, reason: str = "") -> RunError:
    why = reason or f"no answer within {SUBMIT_TIMEOUT_S:g} s"
    return RunError("SLURM did not answer sbatch", value=f"{why}; {outcome}",
                    remedy="Try again in a minute. A job that was taken all the same is taken back then")  # fmt: skip


def _take_back_unseen(name: str, folder: Path, clusters: str) -> None:
    """Cancels the jobs of an earlier submission whose answer never arrived.

    Raises:
        RunError: SLURM refuses, or the submission went to another cluster.
        NoControllerError: SLURM does not answer.
    """
    # submitit replaces the script by a link when it knows the job's id.
    unconfirmed = [script for script in folder.glob(".submission_file_*") if not script.is_symlink()]
    if not unconfirmed:
        return
    sent_to = text_or_nothing(folder / _SENT_TO) or clusters
    if not {*sent_to.split(",")} <= {*clusters.split(",")}:
        raise RunError("Another cluster may have taken a job for the run without an answer", value=sent_to,
                       remedy=f"Submit on a login node of {sent_to}, where that job is taken back" if "," not in sent_to
                       else f"Submit with --clusters {sent_to}: a job is taken back there")  # fmt: skip
    jobs = find_jobs(name, folder.absolute(), sent_to)
    if jobs and (refusal := cancel_jobs(jobs)):
        raise RunError("SLURM refuses to cancel a job that it took without an answer", value=refusal,
                       remedy=f"Cancel job {', '.join(map(str, jobs))} with scancel, then try again")  # fmt: skip
    for script in unconfirmed:
        script.unlink(missing_ok=True)


def submission_folder(folders: Sequence[RunFolder], submission: Submission) -> Path:
    """Returns the folder of submitit's files: in the run's folder, or for an array in the folder of runs."""
    if len(folders) == 1:
        return folders[0].path / "slurm"
    return folders[0].path.parent / "sweeps" / submission.sweep


# On this machine, in the background or in this process


def start_process(entry: Entry, run: RunFolder, record: Recording) -> JobRecord:
    """Starts a process for a run that outlives this process and its terminal. Signals wait until it is recorded.

    Args:
        entry: Function that trains the run in a folder.
        run: Folder of the run, which has a snapshot of the code.
        record: Enters the process into the registry.

    Raises:
        RunError: The process could not be started.
        Stopped: A signal arrived.
    """
    doubt = f"a process of run {run.run_id} may train in the background: ps -f"
    with _signals_deferred(doubt) as deferral:
        job = _process(entry, run)
        record([job])
        deferral.has_started([job])
    return job


def _process(entry: Entry, run: RunFolder) -> JobRecord:
    folder = run.path / "submitit"
    # Read before the variables of an enclosing job are removed: the process stays in that job. submitit sets
    # CUDA_VISIBLE_DEVICES to other numbers, or to none: ids of GPUs (GPU-…) and of their parts (MIG-…), and GPUs that
    # no driver lists, would be hidden from the job.
    hidden = [word for name in GPU_VARIABLES if name not in os.environ for word in ("-u", name)]
    visible = [f"{name}={os.environ[name]}" for name in GPU_VARIABLES if name in os.environ]
    command = ["env", *hidden, *visible, sys.executable]
    source = code_of(run.path) / "src"
    reading, writing = os.pipe()
    # submitit starts its controller in the session of this process, which ends with the terminal: a child that has left
    # the session starts the controller instead.
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            with job_environment(source):
                _start_detached(Job(entry, str(run.path)), folder, command, writing)
        finally:
            # Not sys.exit: the parent's cleanup must not run twice.
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        job_id = pipe.read()
    os.waitpid(child, 0)
    if not job_id:
        raise RunError("The job could not be started", value=str(folder),
                       remedy="Train in the foreground: leave out --submit")  # fmt: skip
    return _record(run, "local", job_id, str(folder / f"{job_id}_0_log.out"))


def _start_detached(job: Job, folder: Path, python: Sequence[str], writing: int) -> None:
    """Runs in the child: leaves the session, submits, and reports the job id through the pipe."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    # Also standard error: a reader of its pipe would wait for the run's end.
    for standard_stream in (0, 1, 2):
        os.dup2(null, standard_stream)
    executor = submitit.LocalExecutor(folder, python=shlex.join(python))
    # submitit needs a limit: a week.
    executor.update_parameters(timeout_min=7 * 24 * 60, stderr_to_stdout=True)
    os.write(writing, executor.submit(job).job_id.encode())


def run_here(entry: Entry, folder: RunFolder, submission: Submission) -> JobRecord:
    """Runs a job in this process; enters it into the registry first.

    Raises:
        SystemExit: As in a job.
        StateError: The registry cannot be written.
    """
    job = _record(folder, "debug", str(os.getpid()), "", reason=submission.reason)
    Registry(submission.state_dir).add(job)
    Job(entry, str(folder.path))()
    return job


# Signals

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""Signals of a person, of a closing terminal and of a scheduler."""
_STOP_STATUSES: Final = frozenset(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2))
"""Exit statuses of a training that was stopped and has saved its state."""


class _Deferral:
    """The outcome of a block whose signals wait.

    Attributes:
        outcome: The jobs that the block has started, in words; empty: none.
    """

    def __init__(self) -> None:
        self.outcome = ""

    def has_started(self, jobs: Sequence[JobRecord], state_dir: Path | None = None) -> None:
        """Notes the recorded jobs of the block; `state_dir` has the names of their sweeps."""
        ids = [job.run_id for job in jobs]
        sweeps = {run.sweep if (run := Registry(state_dir).run(each)) else "" for each in ids} if state_dir else {""}
        # A sweep that is resumed in part has other jobs beside these.
        whole_sweep = "" if jobs[0].reason or len(ids) == 1 or len(sweeps) > 1 else next(iter(sweeps))
        started = f"job {jobs[0].job_id}" if len(ids) == 1 else f"jobs {jobs[0].job_id} to {jobs[-1].job_id}"
        verb = "were" if len(ids) > 1 else "was"
        self.outcome = (
            f"{started} {verb} submitted first. To take back: can-train cancel {whole_sweep or ' '.join(ids)}"
        )


@contextmanager
def _signals_deferred(doubt: str) -> Iterator[_Deferral]:
    """Delays the end by a signal until the end of the block, which sends a job and records it: an interruption between
    the two would leave a job that no run knows.

    Args:
        doubt: Line about the job, for a second Ctrl-C: it ends the process at once.

    Raises:
        Stopped: A signal arrived in the block.
    """
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        # Only a person sends SIGINT, and means it; other signals may come twice.
        if len(received) > 1 and number == signal.SIGINT:
            _write_line(f"interrupted: {doubt}")
            # An exception would wait for sbatch's end.
            os._exit(128 + number)
        if len(received) == 1:
            _write_line("the job is being submitted: this command ends when it is recorded, after seconds")

    # The handler of a second Ctrl-C cannot.
    sys.stdout.flush()
    numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before: Mapping[int, Any] = {number: signal.signal(number, handle) for number in numbers}
    deferral, error = _Deferral(), None
    try:
        yield deferral
    except Exception as raised:
        error = raised
        if not received:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise Stopped(128 + received[0], deferral.outcome or (_in_a_line(error) if error else "")) from error


def _in_a_line(error: Exception) -> str:
    if not isinstance(error, CanTrainError):
        return str(error)
    return f"{error.rule}: {error.value}" if error.value else error.rule


def _write_line(text: str) -> None:
    # In a handler, print may find sys.stderr in the middle of another line.
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


# A command of can-train in a child process


def run_line(arguments: Sequence[str], output: TextIO | None = None) -> tuple[int, bool]:
    """Runs `can-train` with arguments, forwards signals to it, and waits for its end.

    Args:
        arguments: Arguments without the program's name.
        output: File for the results; None: standard output of this process.

    Returns:
        The exit status, or 128 + the number of a signal that killed the child or arrived at its end; and whether
        somebody stopped the child.
    """
    sys.stdout.flush()
    command = [sys.executable, "-P", "-m", "can_train", *arguments]
    signals = _Signals()
    # Not the signals that this process ignores (nohup).
    numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before: Mapping[int, Any] = {number: signal.signal(number, signals.handle) for number in numbers}
    try:
        # In another process group: the terminal's Ctrl-C would reach the child twice, and the second does not wait.
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, process_group=0) as child:
            signals.child = child
            signals.forward()
            status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    status = status if status >= 0 else 128 - status
    if signals.first is not None:
        return status or 128 + signals.first, True
    return status, status in _STOP_STATUSES


class _Signals:
    """Received signals, and the process that they are forwarded to."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._waiting: deque[int] = deque()
        self.child: subprocess.Popen[bytes] | None = None

    def handle(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or number
        self._waiting.append(number)
        self.forward()

    def forward(self) -> None:
        """Empties the queue. A signal in between may empty it first: each signal is taken once."""
        with suppress(IndexError):
            while self.child is not None:
                self.child.send_signal(self._waiting.popleft())
