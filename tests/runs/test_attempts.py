import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from can_train.errors import (
    CanTrainError,
    ConfigError,
    DivergedError,
    DoesNotFitError,
    EarlierAttemptError,
    OutOfMemoryDetails,
    RankGoneError,
)
from can_train.io import records
from can_train.runs.attempts import TERMINATED, WARNED, Attempts, SlurmContext, StopRequests
from fakes.run_facts import CLUSTER, slurm_job

JOB = SlurmContext(job=slurm_job("7"), restarts=1)


def end_with(folder: Path, error: BaseException, place: SlurmContext = JOB) -> Attempts:
    """An attempt that an error ends."""
    attempts = Attempts(folder, place)
    with pytest.raises(type(error)), attempts.recorded(StopRequests()):
        raise error
    return attempts


def caused(status: int, cause: BaseException) -> SystemExit:
    stop = SystemExit(status)
    stop.__cause__ = cause
    return stop


def test_an_attempt_that_ends_well_says_so(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, JOB)
    with attempts.recorded(StopRequests()):
        assert attempts.end(1) is None
    (began,) = attempts.starts()
    ended = attempts.end(1)
    assert ended is not None
    assert (began.attempt, began.job_id, began.restarts, ended.ending, ended.message) == (1, "7", 1, "finished", "")


@pytest.mark.parametrize(
    ("error", "ending", "message"),
    [
        (ConfigError("A rule", value="x", remedy="Mend it"), "failed", "A rule: x. Mend it."),
        (caused(2, CanTrainError("A rule", remedy="")), "failed", "A rule."),
        (
            caused(3, RankGoneError("Stay", remedy="", value="another one has ended")),
            "rank_gone",
            "Stay: another one has ended.",
        ),
        (caused(2, EarlierAttemptError("One trains", remedy="")), "in_use", "One trains."),
        (RuntimeError("[/__w/pair.cc:537] Closed [/x]"), "failed", "RuntimeError: Closed [/x]"),
        (KeyError("name"), "failed", "KeyError: 'name'"),
        (RuntimeError("two\n  lines"), "failed", "RuntimeError: two lines"),
        (ValueError(), "failed", "ValueError"),
        (SystemExit(3), "failed", "The code called sys.exit(3)"),
        (SystemExit(WARNED), "time_limit", "warned before a checkpoint"),
        (caused(WARNED, CanTrainError("Too often", remedy="")), "time_limit", "Too often."),
        (SystemExit(TERMINATED), "terminated", "by SIGTERM, before a checkpoint"),
        (SystemExit(130), "interrupted", "interrupted (Ctrl-C), before a checkpoint"),
        (KeyboardInterrupt(), "interrupted", "interrupted (Ctrl-C), before a checkpoint"),
        (MemoryError(), "host_oom", "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory."), "gpu_oom", "OutOfMemoryError: CUDA out of memory."),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "host_oom",
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",
        ),
        (DoesNotFitError("It must fit", remedy=""), "gpu_oom", "It must fit."),
        (
            DoesNotFitError("It must fit", remedy="", details=OutOfMemoryDetails(of_host=True)),
            "host_oom",
            "It must fit.",
        ),
    ],
)
def test_what_ended_an_attempt_is_told_in_a_line(
    tmp_path: Path, error: BaseException, ending: str, message: str
) -> None:
    ended = end_with(tmp_path, error).end(1)
    assert ended is not None
    assert (ended.ending, ended.message) == (ending, message)


def test_the_end_of_a_run_that_diverged_has_a_lower_learning_rate(tmp_path: Path) -> None:
    ended = end_with(tmp_path, DivergedError("Not finite", remedy="", lower_lr=0.01)).end(1)
    assert ended is not None
    assert (ended.ending, ended.details) == ("failed", {"lower_lr": 0.01})


def test_a_run_with_a_checkpoint_that_is_stopped_has_saved(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.pt").touch()
    ended = end_with(tmp_path, SystemExit(TERMINATED)).end(1)
    assert ended is not None
    assert (ended.ending, ended.message) == ("terminated", "")


def test_what_is_known_of_a_shortage_is_kept(tmp_path: Path) -> None:
    error = DoesNotFitError(
        "It must fit", remedy="", details=OutOfMemoryDetails(should_fit=True, need_bytes=5, foreign_bytes=3)
    )
    ended = end_with(tmp_path, caused(2, error)).end(1)
    assert ended is not None
    assert {name: ended.details[name] for name in ("should_fit", "one_sample", "need_bytes", "foreign_bytes")} == {
        "should_fit": True, "one_sample": False, "need_bytes": 5, "foreign_bytes": 3,
    }  # fmt: skip


def test_a_block_inside_an_attempt_is_no_other(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, JOB)
    with attempts.recorded(StopRequests()), attempts.recorded(StopRequests()):
        assert attempts.current == 1
    assert len(attempts.starts()) == 1


def test_of_ranks_the_one_that_says_most_is_believed(tmp_path: Path) -> None:
    first = Attempts(tmp_path, JOB)
    assert first.current == 1
    end_with(tmp_path, DoesNotFitError("It must fit", remedy=""), replace(JOB, rank=1))
    end_with(tmp_path, ValueError("the others have gone"), replace(JOB, rank=2))
    first.record_end("terminated", "", {})
    ended = first.end(1)
    assert ended is not None
    assert (len(first.starts()), ended.ending, ended.rank) == (1, "gpu_oom", 1)


def test_who_looks_after_the_job_says_what_its_process_could_not(tmp_path: Path) -> None:
    process, script = Attempts(tmp_path, JOB), Attempts(tmp_path, JOB)
    assert process.current == 1
    script.record_end("killed", "A process was killed", {})
    ended = script.end_in(JOB)
    assert ended is not None
    assert (ended.attempt, ended.ending, ended.rank) == (1, "killed", None)


def test_an_attempt_that_never_came_to_begin_is_entered_by_who_looks_after_it(tmp_path: Path) -> None:
    end_with(tmp_path, SystemExit(WARNED), SlurmContext(job=slurm_job("7")))
    script = Attempts(tmp_path, JOB)
    assert script.end_in(JOB) is None
    script.record_end("time_limit", "", {})
    assert [(record.attempt, record.restarts) for record in script.starts()] == [(1, 0), (2, 1)]


def test_only_what_can_train_put_back_is_counted_and_only_of_the_job(tmp_path: Path) -> None:
    places = [
        SlurmContext(job=slurm_job("6")),
        *(SlurmContext(job=slurm_job("7"), restarts=restarts) for restarts in range(4)),
    ]
    for place, status in zip(places, (WARNED, WARNED, TERMINATED, WARNED, WARNED), strict=True):
        end_with(tmp_path, SystemExit(status), place)
    assert Attempts(tmp_path, JOB).count_restarts(slurm_job("7")) == 2


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, SlurmContext()),
        (
            {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": CLUSTER, "SLURM_RESTART_COUNT": "2", "SLURM_PROCID": "3"},
            SlurmContext(job=slurm_job("7"), restarts=2, rank=3),
        ),
        (
            {"SLURM_JOB_ID": "9", "SLURM_CLUSTER_NAME": CLUSTER, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"},
            SlurmContext(job=slurm_job("7_1")),
        ),
    ],
)
def test_where_a_process_stands_is_read_off_its_variables(environment: dict[str, str], place: SlurmContext) -> None:
    assert SlurmContext.from_environment(environment) == place


def test_an_attempt_that_cannot_begin_leaves_the_record_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = SlurmContext()
    before = end_with(tmp_path, ConfigError("A rule", value="x", remedy="Mend it"), outside).end(1)

    def fill(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as full:
        # Space is freed before the end would be written.
        full.setattr(records, "write_new_atomic", fill)
        with pytest.raises(OSError, match=r"0002-began\.json"), Attempts(tmp_path, outside).recorded(StopRequests()):
            raise AssertionError
    attempts = Attempts(tmp_path, outside)
    assert (attempts.end(1), attempts.end(2)) == (before, None)
