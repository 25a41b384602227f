"""The states a run can be in, the causes an ended one can have, and what is known of a run when they are decided on.
`judge` decides; `survey` finds out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from can_train.launch.slurm_query import Answer
from can_train.state.registry import CancelRecord, JobRecord, RunRecord
from can_train.training.attempts import Began, Ended

QUEUED: Final = "queued"
RUNNING: Final = "running"
FINISHED: Final = "finished"
FAILED: Final = "failed"
GPU_OOM: Final = "CUDA out-of-memory"
HOST_OOM: Final = "host out-of-memory"
TIME_LIMIT: Final = "time limit"
PREEMPTED: Final = "preempted"
NODE_FAILURE: Final = "node failure"
CANCELLED: Final = "cancelled"
NEVER_STARTED: Final = "never started"

LIVE: Final = (QUEUED, RUNNING)
CAUSES: Final = (
    FINISHED, FAILED, GPU_OOM, HOST_OOM, TIME_LIMIT, PREEMPTED, NODE_FAILURE, CANCELLED, NEVER_STARTED,
)  # fmt: skip

REQUEUED: Final = "requeued"
"""Of one attempt only: its job was put back into the queue, by whom SLURM does not say."""


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """One attempt of a run.

    Attributes:
        began: That it began.
        ended: How it ended, as its process said; None: it did not say.
        alive: Whether its process is there; None: it is of another machine, or in a job.
    """

    began: Began
    ended: Ended | None = None
    alive: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a run.

    Attributes:
        run: The registry's entry.
        jobs: Its jobs, the first one first.
        cancels: That a person asked for its end.
        attempts: Its attempts, the first one first.
        result: What `result.json` holds; None: the run has not finished.
        present: Whether its folder is where the registry says, or where it was looked for.
        worked: Whether there are traces of a training that wrote no attempts: one of an older version.
        job_alive: Whether the process that controls its last job is there, where that is one of this machine.
        answer: What SLURM says of its jobs.
        log_tail: The end of what its last job printed.
    """

    run: RunRecord
    jobs: Sequence[JobRecord] = ()
    cancels: Sequence[CancelRecord] = ()
    attempts: Sequence[AttemptFacts] = ()
    result: Mapping[str, Any] | None = None
    present: bool = True
    worked: bool = False
    job_alive: bool | None = None
    answer: Answer = field(default_factory=lambda: Answer(queue=(), accounts=()))
    log_tail: str = ""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run.

    Attributes:
        state: One of `LIVE` or `CAUSES`.
        sentence: More about it, in words.
        certain: Whether it is known, and not only what the files say.
    """

    state: str
    sentence: str = ""
    certain: bool = True

    @property
    def live(self) -> bool:
        """Whether it is queued or running."""
        return self.state in LIVE
