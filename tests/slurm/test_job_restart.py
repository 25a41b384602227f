"""What happens after a job: how its training ended, whether its run starts again, and what the next job asks for."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError
from can_train.io.records import utc_now
from can_train.runs.registry import JobRecord
from can_train.runs.run_folder import RunFolder
from can_train.slurm.job import (
    MEMORY_GROWTH,
    EndOnNode,
    JobOutcome,
    NoRestart,
    Requeue,
    Resubmit,
    count_oom_resubmits,
    count_retries,
    decide_restart,
    failing_nodes,
    grown_memory_mib,
    infer_ending,
    is_oom_reason,
    next_cluster,
    node_fault,
    notify,
    without_cause,
)

LIMITS = ClusterSettings(max_restarts=3, oom_resubmits=2)
HOST_OOM = JobOutcome(ending="host_oom", memory_mib=400, most_memory_mib=4000)
GPU_OOM = JobOutcome(ending="gpu_oom", should_fit=True, foreign_bytes=200 * 2**20, has_other_nodes=True)

endings = st.sampled_from(
    ["finished", "failed", "gpu_oom", "host_oom", "time_limit", "terminated", "interrupted", "killed"]
)
counts = st.integers(0, 5)
amounts = st.none() | st.integers(1, 2**40)
aftermaths = st.builds(
    JobOutcome, ending=endings, restarts=counts, resubmits=counts, one_sample=st.booleans(), should_fit=st.booleans(),
    foreign_bytes=st.integers(0, 2**40), memory_mib=amounts, most_memory_mib=amounts, has_other_nodes=st.booleans(),
)  # fmt: skip


@given(aftermaths, st.builds(ClusterSettings, max_restarts=counts, oom_resubmits=counts))
def test_nothing_is_started_again_more_often_than_is_allowed(facts: JobOutcome, limits: ClusterSettings) -> None:
    decision = decide_restart(facts, limits)
    assert not isinstance(decision, Requeue) or facts.restarts < limits.max_restarts
    assert not isinstance(decision, Resubmit) or facts.resubmits < limits.oom_resubmits


@given(aftermaths)
def test_what_ended_well_or_by_a_person_or_by_its_own_fault_is_left(facts: JobOutcome) -> None:
    if facts.ending in ("finished", "failed", "terminated", "interrupted") and not facts.node_fault:
        assert decide_restart(facts, LIMITS) == NoRestart()


@given(aftermaths)
def test_a_new_job_asks_for_more_memory_or_for_another_node_for_its_own_reason_only(facts: JobOutcome) -> None:
    decision = decide_restart(facts, LIMITS)
    if isinstance(decision, Resubmit):
        assert (decision.memory_mib is not None) == (facts.ending == "host_oom")
        assert not decision.elsewhere or (facts.has_other_nodes and facts.ending == "gpu_oom")
        assert is_oom_reason(decision.reason)


@given(st.integers(1, 2**30), st.none() | st.integers(1, 2**31))
def test_memory_grows_by_the_factor_in_round_figures_within_the_nodes(had: int, most: int | None) -> None:
    if most is not None and most <= had:
        return
    grown = grown_memory_mib(had, most_mib=most)
    assert grown > had
    assert most is None or grown <= most
    if most is None or grown < most:
        assert MEMORY_GROWTH * had <= grown <= MEMORY_GROWTH * had + (100 if grown <= 4096 else 1024)
        assert grown % (100 if MEMORY_GROWTH * had <= 4096 else 1024) == 0


@pytest.mark.parametrize("ending", ["time_limit", "killed"])
def test_a_job_whose_time_is_up_or_that_was_killed_is_put_back_until_the_bound(ending: str) -> None:
    assert isinstance(decide_restart(JobOutcome(ending=ending, restarts=2), LIMITS), Requeue)
    left = decide_restart(JobOutcome(ending=ending, restarts=3), LIMITS)
    assert isinstance(left, NoRestart)
    assert "3 times" in left.reason


def test_host_out_of_memory_asks_for_more() -> None:
    assert decide_restart(HOST_OOM, LIMITS) == Resubmit("host out-of-memory: 600M instead of 400M", memory_mib=600)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"memory_mib": 4000}, "no node of the partition has more"),
        ({"memory_mib": None}, "not known"),
        ({"resubmits": 2}, r"2 times submitted again \(cluster.oom_resubmits\)"),
    ],
)
def test_host_out_of_memory_that_more_memory_cannot_mend_is_left_with_a_reason(
    changed: dict[str, int], why: str
) -> None:
    left = decide_restart(replace(HOST_OOM, **changed), LIMITS)
    assert isinstance(left, NoRestart)
    assert re.search(why, left.reason)


@pytest.mark.parametrize(
    ("outcome", "setting", "whole", "beside_state"),
    [
        (replace(HOST_OOM, resubmits=2), {},
         "host out-of-memory, after 2 times submitted again (cluster.oom_resubmits)",
         "after 2 times submitted again (cluster.oom_resubmits)"),
        (HOST_OOM, {"oom_resubmits": 0}, "host out-of-memory, and cluster.oom_resubmits is 0",
         "cluster.oom_resubmits is 0"),
        (JobOutcome(ending="time_limit"), {"max_restarts": 0}, "the time limit, and cluster.max_restarts is 0",
         "cluster.max_restarts is 0"),
        (JobOutcome(ending="killed"), {"max_restarts": 0}, "a killed process, and cluster.max_restarts is 0",
         "a killed process, and cluster.max_restarts is 0"),
    ],
)  # fmt: skip
def test_a_state_does_not_name_its_cause_twice(
    outcome: JobOutcome, setting: dict[str, int], whole: str, beside_state: str
) -> None:
    left = decide_restart(outcome, replace(LIMITS, **setting))
    assert left == NoRestart(whole)
    assert without_cause(whole, outcome.ending) == beside_state


def test_a_gpu_that_others_filled_is_avoided() -> None:
    decision = decide_restart(GPU_OOM, LIMITS)
    assert decision == Resubmit("CUDA out-of-memory: others held 200 MiB; another node", elsewhere=True)


def test_for_want_of_another_node_the_same_one_is_tried() -> None:
    decision = decide_restart(replace(GPU_OOM, has_other_nodes=False), LIMITS)
    assert isinstance(decision, Resubmit)
    assert not decision.elsewhere


@pytest.mark.parametrize("changed", [{"one_sample": True}, {"should_fit": False}])
def test_what_fits_on_no_such_gpu_is_left(changed: dict[str, bool]) -> None:
    assert decide_restart(replace(GPU_OOM, **changed), LIMITS) == NoRestart()


@pytest.mark.parametrize(
    ("said", "status", "host_oom", "ending"),
    [
        ("finished", 0, False, "finished"),
        ("finished", 1, True, "finished"),
        ("", 1, True, "host_oom"),
        ("failed", 1, True, "host_oom"),  # a worker process was killed
        ("terminated", 137, False, "killed"),  # of one rank, which took the others with it
        ("rank_gone", 137, False, "killed"),  # as another rank noticed
        ("rank_gone", 143, False, "killed"),  # while srun terminated a third one
        ("rank_gone", 139, False, "failed"),
        ("rank_gone", 3, False, "failed"),
        ("gpu_oom", 137, False, "gpu_oom"),
        ("", 137, False, "killed"),
        ("", 140, False, "time_limit"),  # before its handlers were in
        ("", 143, False, "terminated"),
        ("", 1, False, "failed"),
        ("", 139, False, "failed"),
        ("time_limit", 140, False, "time_limit"),
    ],
)
def test_how_a_training_ended(said: str, status: int, host_oom: bool, ending: str) -> None:
    assert infer_ending(said, status=status, host_oom=host_oom) == ending


CLUSTER = ClusterSettings(executor="slurm", mem="400M", exclude="n9")
MORE = Resubmit("host out-of-memory: 600M instead of 400M", memory_mib=600)
ELSEWHERE = Resubmit("CUDA out-of-memory: others held 5 MiB; another node", elsewhere=True)
AGAIN = replace(ELSEWHERE, elsewhere=False)


def job(reason: str = "") -> JobRecord:
    return JobRecord(run_id="r", executor="slurm", job_id="1", time=utc_now(), host="h", log_path="", reason=reason,
                     cluster="alpha")  # fmt: skip


@pytest.mark.parametrize(
    ("decision", "last", "mem", "exclude"),
    [
        (MORE, {}, "600M", "n9"),
        (MORE, {"mem": "400M", "exclude": "n9,n1"}, "600M", "n9,n1"),
        (ELSEWHERE, {"mem": "600M"}, "600M", "n9"),
        (AGAIN, {"mem": "600M", "exclude": "n9,n1"}, "600M", "n9"),
    ],
)
def test_the_next_job_asks_for_what_the_last_one_did_but_for_what_failed_it(
    decision: Resubmit, last: dict[str, Any], mem: str, exclude: str
) -> None:
    cluster = next_cluster(CLUSTER, last, decision)
    assert (cluster.mem, cluster.exclude) == (mem, exclude)


def test_a_run_that_has_begun_is_not_kept_waiting_until_it_may_begin() -> None:
    assert next_cluster(replace(CLUSTER, begin="now+2hours"), {}, MORE).begin == ""


def test_memory_that_was_asked_for_in_another_way_is_asked_for_once() -> None:
    cluster = replace(CLUSTER, mem="", additional={"mem_per_cpu": "400M", "comment": "x"})
    assert next_cluster(cluster, {"mem-per-cpu": "400M"}, MORE).additional == {"comment": "x"}


@pytest.mark.parametrize(
    ("reasons", "count"),
    [
        ([""], 0),
        (["", MORE.reason], 1),
        (["", MORE.reason, ELSEWHERE.reason], 2),
        (["", MORE.reason, "resumed"], 0),
        (["", MORE.reason, "resumed", ELSEWHERE.reason], 1),
    ],
)
def test_submissions_for_memory_count_since_a_person_submitted_last(reasons: list[str], count: int) -> None:
    assert count_oom_resubmits([job(reason) for reason in reasons]) == count


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("RuntimeError: No CUDA GPUs are available", True),
        ("Failed to initialize NVML: Driver/library version mismatch", True),
        ("OSError: [Errno 116] Stale file handle: '/data/x'", True),
        ("OSError: [Errno 5] Input/output error", True),
        ("error: cluster.setup ended with exit status 1: ls; it printed: ls: /scratch: Stale file handle", True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("ValueError: expected 3 channels", False),
        ("OSError: [Errno 28] No space left on device", False),
        ("", False),
    ],
)
def test_the_fault_of_a_node_is_told_from_the_error_of_a_user(error: str, is_fault: bool) -> None:
    assert bool(node_fault(error)) == is_fault


def test_a_run_leaves_a_node_with_a_fault_as_often_as_is_allowed() -> None:
    outcome = JobOutcome(ending="failed", node_fault="ECC error on n1", has_other_nodes=True)
    assert decide_restart(outcome, LIMITS) == Resubmit(
        "fault of the node: ECC error on n1; another node", elsewhere=True
    )
    lonely = decide_restart(replace(outcome, has_other_nodes=False), LIMITS)
    assert isinstance(lonely, Resubmit)
    assert not lonely.elsewhere
    last = decide_restart(replace(outcome, retries=2), LIMITS)
    assert isinstance(last, NoRestart)
    assert "(cluster.retries)" in last.reason
    assert isinstance(decide_restart(outcome, ClusterSettings(retries=0)), NoRestart)


def test_submissions_after_out_of_memory_and_after_faults_count_apart() -> None:
    reasons = ["fault of the node: x", "resumed", "host out-of-memory: x", "fault of the node: x"]
    jobs = [job(reason) for reason in reasons]
    assert (count_oom_resubmits(jobs), count_retries(jobs)) == (1, 1)


def test_a_node_fails_where_several_runs_fail_on_it_alone() -> None:
    def on(node: str, failed: int, well: int) -> list[EndOnNode]:
        return [EndOnNode(node=node, has_failed=index < failed) for index in range(failed + well)]

    assert failing_nodes([*on("n1", 2, 0), *on("n2", 0, 1)]) == {"n1": 2}
    assert failing_nodes([*on("n1", 1, 0), *on("n2", 0, 1)]) == {}
    assert failing_nodes([*on("n1", 3, 1), *on("n2", 0, 1)]) == {}
    assert failing_nodes([*on("n1", 3, 0), *on("n2", 3, 0)]) == {}


def test_a_command_of_ones_own_gets_the_words_of_a_run_as_arguments(tmp_path: Path) -> None:
    folder, out = RunFolder(tmp_path / "run-1"), tmp_path / "out"
    settings = ClusterSettings(notify=["sh", "-c", f'echo "$1|$2" >> {out}', "sh", "{run} {label}", "{state}: {why}"])
    assert notify(folder, settings, "gpu_oom", "$(touch x);\x1b[2J\n`y`", label="lr=1") == ""
    assert out.read_text() == "run-1 lr=1|gpu oom: $(touch x);\\x1b[2J `y`\n"
    assert notify(folder, replace(settings, notify_on="failure"), "finished") == ""
    assert out.read_text().count("\n") == 1
    folder.path.mkdir()
    folder.result_path.write_text(json.dumps({"best_validation_loss": 0.25, "best_epoch": 3}))
    assert notify(folder, settings, "finished") == ""
    assert out.read_text().splitlines()[-1] == "run-1 |finished: best validation loss 0.25 after epoch 3"
    assert "failed" in notify(folder, ClusterSettings(notify=["/nowhere/at/all"]), "finished")
    assert "status 1" in notify(folder, ClusterSettings(notify=["false"]), "finished")


@pytest.mark.parametrize(
    "command",
    ["tell", ["sh", "-c", "echo {why}"], ["bash", "-ec", "echo {run}"], ["{run}"], ["tell", "{wyh}"],
     ["python", "-c", "print('{why}')"]],
)  # fmt: skip
def test_a_command_that_would_run_the_words_of_a_run_is_refused(command: Any) -> None:
    with pytest.raises(ConfigError, match="notify"):
        ClusterSettings(notify=command)
