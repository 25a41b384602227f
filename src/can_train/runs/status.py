"""The list of runs, and their status: the state and the progress that follow from the files of a run, the processes of
this machine and the scheduler.
"""

import os
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final

from can_train.errors import RunError, near_or_newest
from can_train.io import records
from can_train.io.index import without_collections
from can_train.io.records import JobId, SetAside
from can_train.runs.registry import JobRecord, Registry, RunRecord
from can_train.runs.run_folder import (
    CONFIG,
    RunFolder,
    is_run_id,
    may_be_called,
    place_in_sweep,
    short_name,
    split_run_id,
)
from can_train.runs.run_state import CAUSES, LIVE, AttemptFacts, RunFacts, RunState, infer_run_state, slurm_jobs
from can_train.runs.scheduler import AccountRow, NoControllerError, QueueRow, Scheduler

LAST: Final = "last"
"""Name of the newest run on a command line."""

_SUGGESTIONS: Final = 5  # run ids in an error message
_LOG_TAIL_BYTES: Final = 2**16  # searched for the reason of a run's end: some thousand lines
_EPOCHS: Final = re.compile(r"^training:\n(?:  .*\n)*?  epochs: (\d+)$", re.MULTILINE)
"""The setting in config.yaml, as `plain_to_yaml` writes it."""


COPY: Final = "copied.json"
"""In the folder of a copied run: facts that are in no file of the run, from the machine that it was copied from."""
_MOST_COPY_BYTES: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class CopyRecord:
    """The facts about a run that its folder does not have, at the time of a copy (`can-train sync`)."""

    run_id: str
    key: str
    made: str
    state: str
    sentence: str
    time: str
    host: str
    sweep: str = ""
    label: str = ""
    tags: list[str] = field(default_factory=list)
    note: str = ""

    def __post_init__(self) -> None:
        if self.state not in (*LIVE, *CAUSES):
            raise ValueError("state is none of a run")
        for name in ("made", "time"):
            records.check_time(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A run of the registry or of a folder of runs. `record` of an unregistered run comes from the folder's name."""

    record: RunRecord
    path: str  # of the run's folder, which may differ from the record's
    copied: CopyRecord | None = None  # of a run that another machine has registered

    @cached_property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(Path(self.path))

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The run's configuration, read once; empty if it is damaged."""
        with suppress(RunError):
            return self.folder.config()
        return {}

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.record.run_id

    @cached_property
    def label(self) -> str:
        """The run's values of the settings that vary in its sweep or search; empty: it is in none."""
        return place_in_sweep(self.record, self.folder).label


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The progress of a run. Unknown values are None.

    Attributes:
        step: Optimizer steps done.
        steps: Optimizer steps of the whole run.
        epoch: Epochs begun.
        epochs: Epochs of the whole run.
        saved_step: Step of the newest checkpoint.
        peak_share: Memory peak ÷ capacity.
    """

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    saved_step: int | None = None
    best_validation_loss: float | None = None
    peak_share: float | None = None
    safety_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run: the facts about it, the state that follows from them, and the progress."""

    known: KnownRun
    facts: RunFacts
    state: RunState
    progress: RunProgress

    @property
    def lower_lr(self) -> float | None:
        """The learning rate to train a run anew with that has diverged, and would again if it went on; None: it has not
        diverged.
        """
        end = self.facts.attempts[-1].end if self.facts.attempts else None
        return _number(end.details, "lower_lr") if end is not None else None


def run_statuses(runs: Iterable[KnownRun], registry: Registry, scheduler: Scheduler) -> list[RunStatus]:
    """Returns the status of many runs, in order, with one question to each cluster.

    Args:
        runs: The runs.
        registry: The registry with their jobs.
        scheduler: The scheduler of the jobs. Its `logs_into` is called for a job whose record names no cluster, and for
            a job whose name differs from the run's.

    Raises:
        StateError: The registry cannot be read.
    """
    on_disk = [(known, _facts_on_disk(known, registry)) for known in runs]
    answer = scheduler.query_jobs(job for _, facts in on_disk if facts.result is None for job in slurm_jobs(facts))
    # Grouped once: among hundreds of runs, searching all rows for each would be quadratic.
    queue: dict[JobId, list[QueueRow]] = defaultdict(list)
    accounts: dict[JobId, list[AccountRow]] = defaultdict(list)
    for queued in answer.queue:
        queue[queued.job].append(queued)
    for account in answer.accounts:
        accounts[account.job].append(account)
    answered, statuses = {*queue, *accounts}, []
    for known, facts in on_disk:
        if facts.result is None and slurm_jobs(facts):
            facts = _with_clusters(facts, answer.local, answered, scheduler)
            # SLURM reuses numbers after its state was lost, or above its largest number: a job of the number may belong
            # to somebody else. A person may have renamed the job.
            foreign = {job for record in facts.jobs if (job := record.slurm_job) is not None
                       and any(not _is_named_for(facts.run, row.name) for row in queue.get(job, ()))
                       and not _is_own(job, record, scheduler, otherwise=True)}  # fmt: skip
            jobs = [job for job in slurm_jobs(facts) if job not in foreign]
            silent, unnamed = dict(answer.silent), [job.number for job in jobs if not job.cluster]
            if unnamed and answer.local:
                which = f"{answer.local} has no job {unnamed[-1]} of this run"
                silent[""] = f"its record does not name the cluster, and {which}"
            rows = [row for job in jobs for row in queue.get(job, ())]
            ended = [row for job in jobs for row in accounts.get(job, ())]
            facts = replace(facts, answer=replace(answer, queue=rows, accounts=ended, silent=silent))
        progress = read_progress(known.folder, facts.result)
        statuses.append(RunStatus(known=known, facts=facts, state=_state(known, facts), progress=progress))
    return statuses


def _state(known: KnownRun, facts: RunFacts) -> RunState:
    """Returns the state of a run; of a copied run that had no result, its state at the time of the copy."""
    copied, state = known.copied, infer_run_state(facts)
    # An attempt that began after the copy is this machine's.
    if (
        copied is None
        or facts.result is not None
        or any(each.start.start_time > copied.time for each in facts.attempts)
    ):
        return state
    sentence = "; ".join(filter(None, [copied.sentence, f"as of {copied.time[:16]} UTC on {copied.host}"]))
    return RunState(copied.state, sentence, certain=copied.state not in LIVE)


def _with_clusters(facts: RunFacts, local: str, answered: Collection[JobId], scheduler: Scheduler) -> RunFacts:
    """Adds this machine's cluster to records without a cluster, if that cluster has the job and the job logs into the
    run's folder.
    """
    here = {record.slurm_job for record in facts.jobs if record.slurm_job is not None and not record.cluster
            and (job := replace(record.slurm_job, cluster=local)) in answered
            and _is_own(job, record, scheduler)}  # fmt: skip
    jobs = [replace(record, cluster=local) if record.slurm_job in here else record for record in facts.jobs]
    attempts = [replace(attempt, start=replace(attempt.start, cluster=local)) if attempt.start.slurm_job in here
                else attempt for attempt in facts.attempts]  # fmt: skip
    return replace(facts, jobs=jobs, attempts=attempts)


def _is_named_for(run: RunRecord, name: str) -> bool:
    """Returns whether a job has a name that can-train gives a job of a run (`SweepRun.job_name`)."""
    return name in ("", run.key, run.sweep) or bool(run.sweep and name.endswith(f"_{run.sweep}"))


def _is_own(job: JobId, record: JobRecord, scheduler: Scheduler, *, otherwise: bool = False) -> bool:
    with suppress(NoControllerError):
        return scheduler.logs_into(job, Path(record.log_path).parent)
    return otherwise


def _facts_on_disk(known: KnownRun, registry: Registry) -> RunFacts:
    """Collects the facts from the files and from the processes of this machine."""
    folder, jobs = known.folder, registry.jobs(known.run_id)
    is_damaged = is_closed = False
    try:
        result = folder.result()
    except (RunError, OSError) as error:
        is_closed = isinstance(error.__cause__, PermissionError)
        result, is_damaged = None, not is_closed
    # A finished run needs no log, which takes long to read.
    last = jobs[-1] if jobs and result is None else None
    is_seen = last and last.executor != "slurm" and last.host == records.this_host() and last.job_id.isdecimal()
    attempts: list[AttemptFacts] = []
    # Unreadable attempts must not hide the run: the other facts decide.
    with suppress(OSError):
        starts = folder.attempts.starts()
        attempts = [AttemptFacts(start=start, end=folder.attempts.end(start.attempt)) for start in starts]
    if attempts and attempts[-1].end is None:
        start = attempts[-1].start
        alive = None if start.job_id else start.is_running()
        attempts[-1] = replace(attempts[-1], alive=alive, waits_for=folder.attempts.waits_for(start.attempt))
    return RunFacts(
        run=known.record, jobs=jobs, cancels=registry.cancels(known.run_id), attempts=attempts, result=result,
        is_damaged=is_damaged, is_closed=is_closed, has_folder=records.is_folder(folder.path),
        job_alive=records.is_running(int(last.job_id), last.time) if last and is_seen else None,
        log_tail=read_tail(log_path(last, known)) if last and last.log_path else "",
    )  # fmt: skip


def log_path(job: JobRecord, known: KnownRun) -> Path:
    """Returns the path of a job's log. A log in the run's folder moves with the folder."""
    path, before = Path(job.log_path), Path(known.record.path)
    return known.folder.path / path.relative_to(before) if path.is_relative_to(before) else path


def run_logs(facts: RunFacts, known: KnownRun) -> list[Path]:
    """Lists the logs of a run's jobs, in order; and the run's log, if the run was later trained outside jobs."""
    logs = [log_path(job, known) for job in facts.jobs if job.log_path]
    last = facts.jobs[-1] if logs else None
    # A process makes one attempt. A job of SLURM may make several, which have the id of the job.
    first_outside = 1 if last is not None and last.executor != "slurm" else 0
    since = [attempt.start for attempt in facts.attempts if last is None or attempt.start.start_time > last.time]
    outside = [start for start in since if not start.job_id][first_outside:]
    is_newest = bool(outside) and outside[-1] is since[-1]
    return [*logs, known.folder.log_path] if is_newest or not logs else logs


def read_tail(log: Path) -> str:
    """Reads the end of a log; empty if the log cannot be read."""
    with suppress(OSError), records.open_regular(log) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""


# The list of runs, and their names


@without_collections()
def known_runs(registry: Registry, runs_dir: Path) -> list[KnownRun]:
    """Lists the runs of the registry and the unregistered runs in `runs_dir`, the newest first. Folders whose name is
    no run id (`is_run_id`) are left out; `registry.set_aside` gets those of runs that cannot be read.

    Raises:
        StateError: The registry cannot be read.
    """
    registered = {record.run_id: record for record in registry.runs() if is_run_id(record.run_id)}
    names = set(_names_in(runs_dir, registry.set_aside))
    real = os.path.realpath(runs_dir)
    runs = list[KnownRun]()
    for name in names - registered.keys():
        try:
            if is_run_id(name) and S_ISREG((runs_dir / name / CONFIG).stat().st_mode):
                runs.append(_unregistered(runs_dir / name))
        except (FileNotFoundError, NotADirectoryError):
            # No run, or one that is deleted meanwhile.
            continue
        except OSError as error:
            # Another person's. Without a time in its name it need not be a run.
            if split_run_id(name)[0] is not None:
                registry.set_aside.append(SetAside(runs_dir / name, error.strerror or str(error)))
    for run_id, record in registered.items():
        path = record.path
        # A person may move the folder of runs and give the new path: the registry has the old path.
        may_have_moved = run_id in names and path != f"{real}{os.sep}{run_id}"
        if may_have_moved and not records.is_folder(Path(path)) and records.is_file(runs_dir / run_id / CONFIG):
            path = str(runs_dir / run_id)
        runs.append(KnownRun(record=record, path=path))
    return sorted(runs, key=lambda known: (known.record.time, known.run_id), reverse=True)


def misnamed_runs(runs_dir: Path) -> list[str]:
    """Lists the folders that contain a configuration, but whose name is no run id."""
    return sorted(
        name for name in _names_in(runs_dir, []) if not is_run_id(name) and records.is_file(runs_dir / name / CONFIG)
    )


def _names_in(folder: Path, aside: list[SetAside]) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - making twenty thousand paths costs more than all else
    except PermissionError as error:
        aside.append(SetAside(folder, error.strerror or str(error)))
    except OSError:
        pass
    return []


def find_run(runs: Sequence[KnownRun], name: str, set_aside: Sequence[SetAside] = ()) -> KnownRun:
    """Finds a run by its id, a unique part of its id, its folder or a file in its folder; `last` is the newest run.

    Args:
        runs: All runs, the newest first.
        name: Name of the run on the command line.
        set_aside: What could not be read of the registry and of the folder of runs (`Registry.set_aside`).

    Raises:
        RunError: No run or several runs have this name; the message lists some. Or the run cannot be read.
    """
    if name == LAST and runs:
        return runs[0]
    if (folder := _run_folder(name)) is not None:
        here = folder.resolve()
        # Resolving paths takes time, and most folders have the name of their run: these are compared first.
        by_name = sorted(runs, key=lambda known: known.run_id != here.name)
        return next((known for known in by_name if known.folder.path.resolve() == here), None) or _unregistered(here)
    likely = [(known, (known.run_id, short_name(known.run_id))) for known in runs if may_be_called(known.run_id, name)]
    matching = [known for known, names in likely if name in names]
    if not matching and name:
        matching = [known for known, names in likely if any(name in each for each in names)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise RunError(f"{len(matching)} runs match this name", value=repr(name),
                       remedy=f"The newest of them:{_listed(known.run_id for known in matching)}\n"
                              "Give a part of a name that a single run has")  # fmt: skip
    if (closed := _closed_run(name, set_aside)) is not None:
        raise RunError("The run cannot be read", value=f"{closed.shown}: {closed.reason}",
                       remedy="Ask its owner for the right to read it, or name another run")  # fmt: skip
    remedy = "There are no runs yet; --runs-dir and --state-dir name other folders"
    if runs:
        sweeps = (known.record.sweep for known in runs if known.record.sweep)
        remedy = f"{near_or_newest(name, (*(known.run_id for known in runs), *sweeps))}\ncan-train runs lists all runs"
    raise RunError("There is no such run", value=repr(name), remedy=remedy)


def find_runs(runs: Sequence[KnownRun], name: str, set_aside: Sequence[SetAside] = ()) -> tuple[str, list[KnownRun]]:
    """Finds a run as `find_run` does, or all runs of a sweep or search by its name or a part that no other name has.

    Returns:
        The name of the sweep, empty for a run; and the runs, of a sweep the oldest first.

    Raises:
        RunError: No run and no sweep has this name, or several have.
    """
    sweeps = dict.fromkeys(known.record.sweep for known in runs if known.record.sweep and name in known.record.sweep)
    if name not in sweeps:
        try:
            return "", [find_run(runs, name, set_aside)]
        except RunError as error:
            is_run = any(may_be_called(known.run_id, name) for known in runs) or _closed_run(name, set_aside)
            if not name or not sweeps or os.sep in name or is_run:
                raise
            try:
                name = find_sweep(name, sweeps)
            except RunError as of_sweeps:
                raise of_sweeps from error
    return name, [known for known in reversed(runs) if known.record.sweep == name]


def _closed_run(name: str, set_aside: Sequence[SetAside]) -> SetAside | None:
    named = (each for each in set_aside if name and may_be_called(each.path.name, name))
    return next((each for each in named if split_run_id(each.path.name)[0] is not None), None)


def find_sweep(name: str, sweeps: Iterable[str]) -> str:
    """Returns the name of a sweep or search by the name, or a part that no other name has.

    Raises:
        RunError: There is none, or there are several; the message lists names.
    """
    known = list(dict.fromkeys(filter(None, sweeps)))
    matching = [name] if name in known else [sweep for sweep in known if name in sweep]
    if len(matching) == 1:
        return matching[0]
    if matching:
        remedy = f"The newest of them:{_listed(matching)}\nGive a part of a name that a single sweep has"
        raise RunError(f"{len(matching)} sweeps match this name", value=repr(name), remedy=remedy)
    remedy = near_or_newest(name, known) if known else "can-train runs lists all runs"
    raise RunError("There is no such sweep", value=repr(name), remedy=remedy)


def _listed(run_ids: Iterable[str]) -> str:
    # One id a line: two are too long for a line.
    return "".join(f"\n  {run_id}" for run_id in [*run_ids][:_SUGGESTIONS])


def _run_folder(name: str) -> Path | None:
    """Returns the folder of the run that a path leads to or into; None if `name` is no path.

    Raises:
        RunError: The path exists but belongs to no run, or cannot be read.
    """
    # A bare name is never a file in a run's folder: a person who works in such a folder may name other runs.
    is_path = os.sep in name
    try:
        path = Path(name).expanduser()
        if not name or not path.exists():
            return None
        folders = (path, *path.absolute().parents[:2]) if is_path else (path,)
        run = next((each for each in folders if (each / CONFIG).is_file()), None)
    except RuntimeError:  # the user of a `~user` does not exist
        return None
    except OSError as error:
        raise RunError("The folder of a run cannot be read", value=f"{name}: {error.strerror}",
                       remedy="Change its permissions, or name another run") from error  # fmt: skip
    if run is None and is_path:
        raise RunError("This path is not in the folder of a run", value=name,
                       remedy=f"Name a folder with a {CONFIG}: a checkpoint alone does not name its data")  # fmt: skip
    return run


def _unregistered(path: Path) -> KnownRun:
    run_id, copied = path.name, _read_copy(path)
    time, key = split_run_id(run_id)
    if copied is not None:
        record = RunRecord(run_id=run_id, path=str(path.resolve()), key=copied.key, time=copied.made,
                           sweep=copied.sweep, label=copied.label)  # fmt: skip
        return KnownRun(record=record, path=str(path), copied=copied)
    began: list[records.AttemptStart] = []
    with suppress(OSError):
        began = RunFolder(path).attempts.starts()
    # A name has the local time of where the run was made; a renamed folder has none.
    created = datetime.fromisoformat(began[0].start_time) if began else time
    created = created or datetime.fromtimestamp((path / CONFIG).stat().st_mtime)
    record = RunRecord(run_id=run_id, path=str(path.resolve()), key=key, time=records.utc_text(created.astimezone()))
    return KnownRun(record=record, path=str(path))


def _read_copy(path: Path) -> CopyRecord | None:
    found = records.read_documents(path, [COPY], CopyRecord, [], most_bytes=_MOST_COPY_BYTES)
    copied = found.get(COPY)
    # Of a folder that was renamed, or whose file is another run's, it tells nothing.
    return copied if copied is not None and copied.run_id == path.name else None


# Progress


def read_progress(folder: RunFolder, result: Mapping[str, Any] | None) -> RunProgress:
    """Reads the progress of a run: of a finished run from `result`, else from its files. Values from a missing or
    damaged file are unknown.
    """
    if result is not None:
        steps, epochs = _integer(result, "steps"), _integer(result, "epochs")
        return RunProgress(step=steps, steps=steps, saved_step=steps, epoch=epochs, epochs=epochs,
                           best_validation_loss=_number(result, "best_validation_loss"),
                           peak_share=_number(result, "peak_memory_pct"),
                           safety_factor=_number(result, "plan", "plan", "safety_factor"))  # fmt: skip
    metrics = folder.metrics()
    plan = records.parse_object(records.text_or_nothing(folder.plan_path)).get("plan")
    manifest = records.parse_object(records.text_or_nothing(folder.checkpoints_path / "manifest.json"))
    saved_step = _integer(manifest, "checkpoints", 0, "step")
    steps_per_epoch = _number(plan, "mean_steps_per_epoch") or _number(plan, "steps_per_epoch")
    # A regular expression: parsing the configuration takes as long as all else about a run.
    setting = _EPOCHS.search(records.text_or_nothing(folder.path / CONFIG)) if plan else None
    epochs = int(setting[1]) if setting else None
    last: Mapping[str, Any] = next((line for line in reversed(metrics) if line), {})
    done = [step for step in (_integer(last, "step"), saved_step) if step is not None]
    losses = [loss for line in metrics if (loss := _number(line, "validation_loss")) is not None]
    peaks = [peak for line in metrics if (peak := _number(line, "peak_memory_pct")) is not None]
    return RunProgress(step=max(done, default=None), epoch=_integer(last, "epoch"), epochs=epochs,
                       steps=round(steps_per_epoch * epochs) if steps_per_epoch and epochs else None,
                       saved_step=saved_step, best_validation_loss=min(losses, default=None),
                       peak_share=peaks[-1] if peaks else None,
                       safety_factor=_number(plan, "safety_factor"))  # fmt: skip


def _number(values: Any, *path: str | int) -> float | None:
    """Returns the number at a path of keys and indices; None if there is no number."""
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    if not isinstance(values, int | float) or isinstance(values, bool):
        return None
    # JSON has numbers above the largest float, and a person's file may have NaN.
    return float(values) if abs(values) <= sys.float_info.max else None


def _integer(values: Any, *path: str | int) -> int | None:
    number = _number(values, *path)
    return int(number) if number is not None and number.is_integer() else None
