import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.slurm.job import (
    MEMORY_GROWTH,
    Aftermath,
    Leave,
    Limits,
    Requeue,
    Resubmit,
    decide,
    ending_of,
    grown_mib,
    is_after_oom,
)

LIMITS = Limits(max_restarts=3, oom_resubmits=2)
HOST_OOM = Aftermath(ending="host_oom", memory_mib=400, most_memory_mib=4000)
GPU_OOM = Aftermath(ending="gpu_oom", should_fit=True, foreign_bytes=200 * 2**20, has_other_nodes=True)

endings = st.sampled_from(
    ["finished", "failed", "gpu_oom", "host_oom", "time_limit", "terminated", "interrupted", "killed"]
)
counts = st.integers(0, 5)
amounts = st.none() | st.integers(1, 2**40)
aftermaths = st.builds(
    Aftermath, ending=endings, restarts=counts, resubmits=counts, one_sample=st.booleans(), should_fit=st.booleans(),
    foreign_bytes=st.integers(0, 2**40), memory_mib=amounts, most_memory_mib=amounts, has_other_nodes=st.booleans(),
)  # fmt: skip


@given(aftermaths, st.builds(Limits, max_restarts=counts, oom_resubmits=counts))
def test_nothing_is_started_again_more_often_than_is_allowed(facts: Aftermath, limits: Limits) -> None:
    decision = decide(facts, limits)
    assert not isinstance(decision, Requeue) or facts.restarts < limits.max_restarts
    assert not isinstance(decision, Resubmit) or facts.resubmits < limits.oom_resubmits


@given(aftermaths)
def test_what_ended_well_or_by_a_person_or_by_its_own_fault_is_left(facts: Aftermath) -> None:
    if facts.ending in ("finished", "failed", "terminated", "interrupted"):
        assert decide(facts, LIMITS) == Leave()


@given(aftermaths)
def test_a_new_job_asks_for_more_memory_or_for_another_node_for_its_own_reason_only(facts: Aftermath) -> None:
    decision = decide(facts, LIMITS)
    if isinstance(decision, Resubmit):
        assert (decision.memory_mib is not None) == (facts.ending == "host_oom")
        assert not decision.elsewhere or (facts.has_other_nodes and facts.ending == "gpu_oom")
        assert is_after_oom(decision.reason)


@given(st.integers(1, 2**30), st.none() | st.integers(1, 2**31))
def test_memory_grows_by_the_factor_in_round_figures_within_the_nodes(had: int, most: int | None) -> None:
    if most is not None and most <= had:
        return
    grown = grown_mib(had, most_mib=most)
    assert grown > had
    assert most is None or grown <= most
    if most is None or grown < most:
        assert MEMORY_GROWTH * had <= grown <= MEMORY_GROWTH * had + (100 if grown <= 4096 else 1024)
        assert grown % (100 if MEMORY_GROWTH * had <= 4096 else 1024) == 0


@pytest.mark.parametrize("ending", ["time_limit", "killed"])
def test_a_job_whose_time_is_up_or_that_was_killed_is_put_back_until_the_bound(ending: str) -> None:
    assert isinstance(decide(Aftermath(ending=ending, restarts=2), LIMITS), Requeue)
    left = decide(Aftermath(ending=ending, restarts=3), LIMITS)
    assert isinstance(left, Leave)
    assert "3 times" in left.reason


def test_host_out_of_memory_asks_for_more() -> None:
    assert decide(HOST_OOM, LIMITS) == Resubmit("host out-of-memory: 600M instead of 400M", memory_mib=600)


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
    left = decide(replace(HOST_OOM, **changed), LIMITS)
    assert isinstance(left, Leave)
    assert re.search(why, left.reason)


def test_a_gpu_that_others_filled_is_avoided() -> None:
    decision = decide(GPU_OOM, LIMITS)
    assert decision == Resubmit("CUDA out-of-memory: others held 200 MiB; another node", elsewhere=True)


def test_for_want_of_another_node_the_same_one_is_tried() -> None:
    decision = decide(replace(GPU_OOM, has_other_nodes=False), LIMITS)
    assert isinstance(decision, Resubmit)
    assert not decision.elsewhere


@pytest.mark.parametrize("changed", [{"one_sample": True}, {"should_fit": False}])
def test_what_fits_on_no_such_gpu_is_left(changed: dict[str, bool]) -> None:
    assert decide(replace(GPU_OOM, **changed), LIMITS) == Leave()


@pytest.mark.parametrize(
    ("said", "status", "host_oom", "ending"),
    [
        ("finished", 0, False, "finished"),
        ("finished", 1, True, "finished"),
        ("", 1, True, "host_oom"),
        ("failed", 1, True, "host_oom"),  # a worker process was killed
        ("terminated", 137, False, "killed"),  # of one rank, which took the others with it
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
    assert ending_of(said, status=status, host_oom=host_oom) == ending
