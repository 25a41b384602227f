"""Facts about runs, for the tests of what is decided on them; SLURM's answers are recorded ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from can_train.io.records import AttemptStart, JobId
from can_train.runs.attempts import AttemptEnd
from can_train.runs.registry import JobRecord, RunRecord
from can_train.runs.run_state import AttemptFacts, RunFacts
from can_train.runs.scheduler import SchedulerAnswer
from can_train.slurm.client import parse_sacct, parse_squeue

RECORDED = Path(__file__).parents[1] / "fixtures" / "slurm"
CLUSTER = "alpha"
JOBS = dict(line.split() for line in (RECORDED / "jobs.txt").read_text().splitlines())
RUN = RunRecord(run_id="r", path="/runs/r", key="k", time="2026-01-01T00:00:00+00:00")


def slurm_job(number: str, cluster: str = CLUSTER) -> JobId:
    return JobId(number=number, cluster=cluster)


def minute(number: int) -> str:
    return f"2026-01-01T00:{number:02d}:00+00:00"


def job(job_id: str, at: int = 1, executor: str = "slurm", **values: Any) -> JobRecord:
    cluster = CLUSTER if executor == "slurm" else ""
    facts = {"time": minute(at), "host": "here", "log_path": "/runs/r/log", "cluster": cluster}
    return JobRecord(run_id="r", executor=executor, job_id=job_id, **{**facts, **values})


def attempt(number: int, job_id: str = "", ending: str | None = None, **values: Any) -> AttemptFacts:
    """An attempt; `values` are fields of its start, its end's `message` and `details`, and `alive`."""
    ended = None
    if ending is not None:
        ended = AttemptEnd(
            attempt=number,
            ending=ending,
            message=values.pop("message", ""),
            details=values.pop("details", {}),
            time=minute(10 * number + 5),
        )
    alive = values.pop("alive", None)
    began = {
        "attempt": number,
        "job_id": job_id,
        "cluster": CLUSTER if job_id else "",
        "restarts": 0,
        "host": "here",
        "pid": 7,
        "start_time": minute(10 * number),
    }
    return AttemptFacts(start=AttemptStart(**{**began, **values}), end=ended, alive=alive)


def recorded(example: str, *, sacct: bool = True, squeue: bool = True) -> SchedulerAnswer:
    """SLURM's answer about a recorded job, from both programs or only one."""
    job = slurm_job(JOBS[example])
    queue = parse_squeue((RECORDED / "squeue.txt").read_text(), CLUSTER) if squeue else []
    accounts = parse_sacct((RECORDED / "sacct.txt").read_text(), CLUSTER) if sacct else []
    return SchedulerAnswer(
        queue=[row for row in queue if row.job == job],
        accounts=[row for row in accounts if row.job == job],
        local=CLUSTER,
    )


def of_job(example: str, *attempts: AttemptFacts, **values: Any) -> RunFacts:
    """The facts of a run that was submitted as a recorded job."""
    answer: Mapping[str, Any] = {"answer": recorded(example)} if "answer" not in values else {}
    return RunFacts(run=RUN, jobs=[job(JOBS[example])], attempts=attempts, **answer, **values)


def text_of(example: str) -> str:
    return (RECORDED / f"{example}.log").read_text()
