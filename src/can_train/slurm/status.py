"""Finds out what is known of runs."""

import codecs
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from can_train.errors import ConfigError, RunError, nearest_first, unknown_name
from can_train.io.atomic import is_file, is_folder
from can_train.io.processes import is_running, terminate, this_host
from can_train.io.records import utc_text
from can_train.slurm.client import AT_WORK, WAITING, Answer, cancel_jobs, query_jobs, tail
from can_train.slurm.run_state import AttemptFacts, RunFacts, RunState, infer_run_state, slurm_jobs
from can_train.training.attempts import Attempts
from can_train.training.run_folder import CONFIG, JobRecord, Registry, RunFolder, RunRecord

_EPOCHS: Final = re.compile(r"^training:\n(?:  .*\n)*?  epochs: (\d+)$", re.MULTILINE)
"""The setting, as `plain_to_yaml` writes it."""


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """How far a run has come; None: not known.

    Attributes:
        step: Optimizer steps done.
        steps: Of how many.
        epoch: Epochs done, the one at work among them.
        epochs: Of how many.
        saved_step: Step of the newest checkpoint.
        best_validation_loss: So far.
        peak_share: Memory peak ÷ capacity.
        safety_factor: Of the plan.
    """

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    saved_step: int | None = None
    best_validation_loss: float | None = None
    peak_share: float | None = None
    safety_factor: float | None = None


def read_progress(folder: RunFolder, result: Mapping[str, Any] | None) -> RunProgress:
    """Reads how far a run has come.

    Args:
        folder: Of the run.
        result: What its `result.json` holds; None: it has not finished.
    """
    if result is not None:
        return _of_result(result)
    metrics = [line for line in _lines(folder.metrics_path) if isinstance(line, dict)]
    last = metrics[-1] if metrics else {}
    measured = next((line for line in reversed(metrics) if "peak_memory_pct" in line), {})
    losses = [loss for line in metrics if (loss := _number(line.get("validation_loss"))) is not None]
    plan = _nested(_read(folder.plan_path), "plan")
    saved = _saved_step(folder.checkpoints_path)
    done = [step for step in (_whole(last.get("step")), saved) if step is not None]
    epochs = _epochs(folder) if plan else None
    per_epoch = _number(plan.get("mean_steps_per_epoch", plan.get("steps_per_epoch")))
    return RunProgress(
        step=max(done, default=None),
        steps=round(per_epoch * epochs) if per_epoch and epochs else None,
        epoch=_whole(last.get("epoch")),
        epochs=epochs,
        saved_step=saved,
        best_validation_loss=min(losses, default=None),
        peak_share=_number(measured.get("peak_memory_pct")),
        safety_factor=_number(plan.get("safety_factor")),
    )


def _of_result(result: Mapping[str, Any]) -> RunProgress:
    steps, epochs = _whole(result.get("steps")), _whole(result.get("epochs"))
    return RunProgress(
        step=steps,
        steps=steps,
        epoch=epochs,
        epochs=epochs,
        saved_step=steps,
        best_validation_loss=_number(result.get("best_validation_loss")),
        peak_share=_number(result.get("peak_memory_pct")),
        safety_factor=_number(_nested(result.get("plan"), "plan").get("safety_factor")),
    )


def _epochs(folder: RunFolder) -> int | None:
    """Finds the one number in the configuration; reading all of it takes as long as all else of a run together."""
    try:
        found = _EPOCHS.search((folder.path / CONFIG).read_text())
    except (OSError, ValueError):
        return None
    return int(found[1]) if found else None


def _saved_step(checkpoints: Path) -> int | None:
    entries = _read(checkpoints / "manifest.json")
    listed = entries.get("checkpoints") if isinstance(entries, dict) else None
    newest = listed[0] if isinstance(listed, list) and listed else None
    return _whole(newest.get("step")) if isinstance(newest, dict) else None


def _lines(path: Path) -> Iterator[Any]:
    """Reads JSON lines; the last may be half-written."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _nested(values: Any, name: str) -> Mapping[str, Any]:
    inner = values.get(name) if isinstance(values, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


_STAMP: Final = "%Y%m%d-%H%M%S"


_STAMP_LENGTH: Final = 15


_YEAR_LENGTH: Final = 4


_TAIL_LENGTH: Final = 4
"""A run id is a time, a key, and four digits."""


_NAMED: Final = 5
"""Runs that a message names."""


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A run that the registry or a folder of runs knows.

    Attributes:
        record: The registry's entry, or one made of its folder's name.
        folder: Where it is, or was.
    """

    record: RunRecord
    folder: RunFolder

    @property
    def run_id(self) -> str:
        """Its name."""
        return self.record.run_id


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """All about a run.

    Attributes:
        known: The run.
        facts: What is known of it.
        state: What that means.
        progress: How far it has come.
    """

    known: KnownRun
    facts: RunFacts
    state: RunState
    progress: RunProgress


def known_runs(registry: Registry, runs_dir: Path) -> list[KnownRun]:
    """Lists the registry's runs and those of a folder that it does not know, the newest first.

    Raises:
        StateError: The registry cannot be read.
    """
    records = {record.run_id: record for record in registry.runs()}
    folders = {path.parent.name: path.parent for path in runs_dir.glob(f"*/{CONFIG}")}
    found = [_registered(record, folders) for record in records.values()]
    found += [_unregistered(path) for run_id, path in folders.items() if run_id not in records]
    return sorted(found, key=lambda known: (known.record.time, known.run_id), reverse=True)


def short_name(run_id: str) -> str:
    """Shortens a run id to the day, the time and its last digits, which tell it from others of the same second.

    Example:
        >>> short_name("20260728-101500-hcrl_ch_gat_student_normal-3fa9")
        '0728-101500-3fa9'
    """
    return f"{run_id[_YEAR_LENGTH:_STAMP_LENGTH]}-{run_id[-_TAIL_LENGTH:]}" if _made(run_id) else run_id


def find_run(runs: Sequence[KnownRun], name: str) -> KnownRun:
    """Finds a run by its id, its short name, an unambiguous beginning of its id, or its folder.

    Raises:
        RunError: There is no such run, or several begin like this; the message lists them, nearest first.
    """
    path = Path(name)
    if (path / CONFIG).is_file():
        here = path.resolve()
        return next((known for known in runs if known.folder.path.resolve() == here), None) or _unregistered(here)
    exact = [known for known in runs if name in (known.run_id, short_name(known.run_id))]
    matching = exact or [known for known in runs if name and known.run_id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        listed = ", ".join(sorted(known.run_id for known in matching))
        raise RunError("Several runs begin like this", value=repr(name), remedy=f"One of: {listed}")
    nearest = ", ".join(nearest_first(name, (known.run_id for known in runs))[:_NAMED])
    remedy = f"Nearest: {nearest}" if nearest else "No run is there yet; --runs-dir and --state-dir name other folders"
    raise RunError("There is no such run", value=repr(name), remedy=remedy)


def run_statuses(
    runs: Iterable[KnownRun], registry: Registry, asking: Callable[[Iterable[str]], Answer] = query_jobs
) -> list[RunStatus]:
    """Finds out about runs, in their order.

    Args:
        runs: From `known_runs`.
        registry: Where their jobs are.
        asking: Asks SLURM about jobs.

    Raises:
        StateError: The registry cannot be read.
    """
    gathered = [(known, _gathered(known, registry)) for known in runs]
    open_jobs = [job_id for _, facts in gathered if facts.result is None for job_id in slurm_jobs(facts)]
    answer = _by_job(asking(open_jobs))
    return [_surveyed(known, _answered(facts, answer)) for known, facts in gathered]


def log_of(job: JobRecord, known: KnownRun) -> Path:
    """Names the log of a job; where the run's folder has moved, it has moved with it."""
    path, before = Path(job.log_path), Path(known.record.path)
    return known.folder.path / path.relative_to(before) if path.is_relative_to(before) else path


def _registered(record: RunRecord, folders: dict[str, Path]) -> KnownRun:
    path = Path(record.path)
    moved = folders.get(record.run_id)
    # One run whose folder cannot be read does not hide all others.
    return KnownRun(record=record, folder=RunFolder(moved if moved and not is_folder(path) else path))


def _unregistered(path: Path) -> KnownRun:
    run_id = path.name
    time = datetime.strptime(run_id[:_STAMP_LENGTH], _STAMP) if _made(run_id) else None
    if time is None:
        time = datetime.fromtimestamp((path / CONFIG).stat().st_mtime)
    key = run_id[_STAMP_LENGTH + 1 : -_TAIL_LENGTH - 1] if _made(run_id) else run_id
    record = RunRecord(run_id=run_id, path=str(path.resolve()), key=key, time=utc_text(time.astimezone()))
    return KnownRun(record=record, folder=RunFolder(path))


def _made(run_id: str) -> bool:
    """Whether a name is one that can-train makes."""
    try:
        datetime.strptime(run_id[:_STAMP_LENGTH], _STAMP)
    except ValueError:
        return False
    return len(run_id) > _STAMP_LENGTH + _TAIL_LENGTH + 2


def _gathered(known: KnownRun, registry: Registry) -> RunFacts:
    """Collects what the files and the processes of this machine say."""
    folder = known.folder
    jobs = registry.jobs(known.run_id)
    result = _result(folder)
    last = jobs[-1] if jobs else None
    return RunFacts(
        run=known.record,
        jobs=jobs,
        cancels=registry.cancels(known.run_id),
        attempts=_attempts(folder),
        result=result,
        present=is_folder(folder.path),
        worked=is_file(folder.path / "attempts.jsonl"),
        job_alive=_job_alive(last) if last is not None and result is None else None,
        log_tail=tail(log_of(last, known)) if last is not None and last.log_path and result is None else "",
    )


def _attempts(folder: RunFolder) -> list[AttemptFacts]:
    attempts = Attempts(folder.path)
    try:
        facts = [AttemptFacts(start=began, end=attempts.end(began.attempt)) for began in attempts.starts()]
    except (OSError, ValueError, TypeError):
        # Damaged, or of another version: what the others say must do.
        return []
    if not facts or facts[-1].end is not None or facts[-1].start.job_id:
        return facts
    return [*facts[:-1], replace(facts[-1], alive=facts[-1].start.is_running())]


def _job_alive(job: JobRecord) -> bool | None:
    """Tells whether the process of a job is there; None: it is of SLURM, or of another machine."""
    if job.executor == "slurm" or job.host != this_host() or not job.job_id.isdecimal():
        return None
    return is_running(int(job.job_id), job.time)


def _result(folder: RunFolder) -> dict[str, Any] | None:
    try:
        result = folder.result()
    except (RunError, OSError):
        return None
    return result if isinstance(result, dict) else None


def _by_job(answer: Answer) -> Callable[[str], Answer]:
    """Orders what SLURM said by jobs: of hundreds of runs nobody looks through everything for each."""
    queue, accounts = defaultdict(list), defaultdict(list)
    for row in answer.queue or ():
        queue[row.job_id].append(row)
    for account in answer.accounts or ():
        accounts[account.job_id].append(account)
    return lambda job_id: Answer(
        queue=None if answer.queue is None else queue.get(job_id, ()),
        accounts=None if answer.accounts is None else accounts.get(job_id, ()),
    )


def _answered(facts: RunFacts, answer: Callable[[str], Answer]) -> RunFacts:
    """Gives a run what SLURM said of its own jobs."""
    mine = [answer(job_id) for job_id in slurm_jobs(facts)]
    if any(each.queue is None for each in mine):
        return replace(facts, answer=Answer())
    queue = [row for each in mine for row in each.queue or ()]
    accounts = [row for each in mine for row in each.accounts or ()]
    return replace(facts, answer=Answer(queue=queue, accounts=accounts))


def _surveyed(known: KnownRun, facts: RunFacts) -> RunStatus:
    progress = read_progress(known.folder, facts.result)
    return RunStatus(known=known, facts=facts, state=infer_run_state(facts), progress=progress)


_RANK: Final = re.compile(r"_(\d+)_log\.(out|err)$")
"""submitit's names of logs end in the rank."""


_READ_BYTES: Final = 2**20


class GrowingLog:
    """A file that something else appends to.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def new_text(self) -> str:
        """Returns what has been appended since the last call; empty: nothing."""
        try:
            with self.path.open("rb") as handle:
                handle.seek(self._read)
                data = handle.read(_READ_BYTES)
        except OSError:
            return ""
        self._read += len(data)
        return self._decoder.decode(data)


def logs_of(jobs: Sequence[JobRecord], known: KnownRun, rank: int) -> list[Path]:
    """Names the logs of a run's jobs, the first one first, as one rank writes them.

    Raises:
        RunError: No job of the run has a log, or none has this rank.
    """
    paths = [log_of(job, known) for job in jobs if job.log_path]
    if not paths:
        raise RunError(
            "Only a submitted run has a log",
            value=known.run_id,
            remedy="What a run prints that trains in a terminal stays there; can-train status shows its state",
        )
    if not rank:
        return paths
    ranks = ranks_of(paths[-1])
    if rank not in ranks:
        listed = ", ".join(map(str, ranks)) or "0"
        raise RunError("No such rank has written a log yet", value=str(rank), remedy=f"Those that have: {listed}")
    return [path.with_name(_RANK.sub(rf"_{rank}_log.\2", path.name)) for path in paths]


def ranks_of(path: Path) -> list[int]:
    """Lists the ranks that write logs beside that of rank 0, and that one where it is there."""
    found = _RANK.search(path.name)
    if found is None:
        return [0] if path.is_file() else []
    beginning = path.name[: found.start()]
    others = [each.name for each in path.parent.glob("*_log.*") if each.name.startswith(f"{beginning}_")]
    matches = [_RANK.fullmatch(name.removeprefix(beginning)) for name in others]
    return sorted({int(match[1]) for match in matches if match})


_HIGHER: Final = frozenset(("f1", "precision", "recall", "mcc", "pr_auc", "roc_auc", "recall_at_fpr_1pct", "accuracy"))
"""Metrics of which more is better."""


_LOWER: Final = frozenset(("best_validation_loss", "false_positive_rate", "false_alarms_per_hour"))
"""Metrics of which less is better. What is in neither (counts, thresholds, shares) ranks nothing."""


@dataclass(frozen=True, kw_only=True)
class RankedResult:
    """A run's value of a metric.

    Attributes:
        index: Which of the results.
        value: The metric; of several test sets their mean.
        parts: By test set, where there are several.
    """

    index: int
    value: float
    parts: Mapping[str, float]


def rank(results: Sequence[Mapping[str, Any]], metric: str) -> list[RankedResult]:
    """Orders results by a metric, the best first; results without it are left out.

    Args:
        results: What `result.json` holds, of finished runs.
        metric: `best_validation_loss`; `mcc`, the mean over all test sets; `validation.mcc`, or that of one test set,
            `test_05_suppress.mcc`.

    Raises:
        ConfigError: No result has such a metric; the message lists those there are, nearest first.
    """
    values = [_values(result) for result in results]
    known = {name for each in values for name in each}
    if metric not in known:
        # Those of single test sets would be a page.
        error = unknown_name("metric", metric, {name.rpartition(".")[2] for name in known})
        sets = ", ".join(sorted({name.rpartition(".")[0] for name in known} - {""}))
        of_set = f"; of one set as SET.METRIC: {sets}" if sets else ""
        raise ConfigError(error.rule, value=error.value, remedy=f"{error.remedy}{of_set}")
    found = [
        RankedResult(index=index, value=sum(parts.values()) / len(parts), parts=parts)
        for index, each in enumerate(values)
        if (parts := each.get(metric))
    ]
    return sorted(found, key=lambda ranked: ranked.value, reverse=metric.rpartition(".")[2] in _HIGHER)


def by_test_set(result: Mapping[str, Any], metric: str) -> dict[str, float]:
    """Returns a metric's value for each test set of a result that defines it."""
    return _values(result).get(metric, {})


def _values(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns each metric's values by test set."""
    found: dict[str, dict[str, float]] = {}
    judgement = result.get("judgement")
    tests = judgement.get("test") if isinstance(judgement, Mapping) else None
    sets = {name: test.get("model") for name, test in tests.items()} if isinstance(tests, Mapping) else {}
    for set_name, metrics in sets.items():
        for name, value in _ranking(metrics).items():
            found.setdefault(name, {})[set_name] = value
            found[f"{set_name}.{name}"] = {set_name: value}
    validation = judgement.get("validation") if isinstance(judgement, Mapping) else None
    for name, value in _ranking(validation).items():
        found[f"validation.{name}"] = {"validation": value}
    found |= {name: {"": value} for name, value in _ranking(result).items()}
    return found


def _ranking(metrics: Any) -> dict[str, float]:
    """Picks the metrics that rank, where they are numbers."""
    if not isinstance(metrics, Mapping):
        return {}
    return {
        name: float(value)
        for name, value in metrics.items()
        if name in _HIGHER | _LOWER and isinstance(value, int | float) and math.isfinite(value)
    }


def stop(
    facts: RunFacts,
    cancelling: Callable[[Sequence[str]], str] = cancel_jobs,
    terminating: Callable[[int, str], bool] = terminate,
) -> bool:
    """Asks everything that works on a run to end.

    Args:
        facts: What is known of the run.
        cancelling: Cancels jobs of SLURM; returns what went wrong.
        terminating: Sends SIGTERM to a process that was there at a time; returns whether there was one.

    Returns:
        Whether anything was asked.

    Raises:
        RunError: It is another machine's, another user's, or SLURM's that refuses or does not answer.
    """
    jobs = slurm_jobs(facts)
    queue = facts.answer.queue
    if jobs and queue is None:
        raise RunError(
            "SLURM does not answer here", value=f"job {jobs[-1]}", remedy="Cancel the run where squeue works"
        )
    live = [row.job_id for row in queue or () if row.state in WAITING | AT_WORK]
    if live:
        refused = cancelling(live)
        if refused:
            raise RunError("SLURM refuses to cancel the job", value=refused)
        return True
    found = _process(facts)
    if found is None:
        return False
    host, pid, noted = found
    if host != this_host():
        raise RunError("The run is a process of another machine", value=f"process {pid} of {host}",
                       remedy=f"Cancel it there: can-train cancel {facts.run.run_id}")  # fmt: skip
    return terminating(pid, noted)


def _process(facts: RunFacts) -> tuple[str, int, str] | None:
    """Finds the process that trains, else the one that is about to: its machine, its number, and when it was noted."""
    job = facts.jobs[-1] if facts.jobs else None
    last = facts.attempts[-1] if facts.attempts else None
    if last is not None and last.end is None and not last.start.job_id:
        return last.start.host, last.start.pid, last.start.start_time
    newer = job is not None and (last is None or last.start.start_time < job.time)
    if job is not None and newer and job.executor != "slurm" and job.job_id.isdecimal():
        return job.host, int(job.job_id), job.time
    return None
