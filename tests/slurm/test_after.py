from dataclasses import replace
from typing import Any

import pytest

from can_train.config.settings import ClusterSettings
from can_train.io.records import utc_now
from can_train.slurm.job import Resubmit
from can_train.slurm.restart import next_cluster, resubmits
from can_train.training.run_folder import JobRecord

CLUSTER = ClusterSettings(executor="slurm", mem="400M", exclude="n9")
MORE = Resubmit("host out-of-memory: 600M instead of 400M", memory_mib=600)
ELSEWHERE = Resubmit("CUDA out-of-memory: others held 5 MiB; another node", elsewhere=True)
AGAIN = replace(ELSEWHERE, elsewhere=False)


def job(reason: str = "") -> JobRecord:
    return JobRecord(run_id="r", executor="slurm", job_id="1", time=utc_now(), host="h", log_path="", reason=reason)


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
    assert resubmits([job(reason) for reason in reasons]) == count
