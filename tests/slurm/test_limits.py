"""What an accounting gives one job: which of several limits counts, and what becomes of a job above it. The rows are
those that `sacctmgr` of SLURM 22.05 prints.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError
from can_train.slurm.client import Accounting, Partition
from can_train.slurm.limits import check_number_of_jobs, job_limits, outranks_partition, with_allowed

COLUMNS = ("MaxWall", "MaxTRES", "MaxTRESPerNode", "MaxTRESMins", "GrpTRES", "GrpTRESMins")


MINUTES = ", multiplied by minutes"
AN_HOUR = "Give --time 1:00:00 or less"
TWO_NODES = "Give --nodes 2 or less"


def quality(name: str, **limits: str) -> Mapping[str, str]:
    return dict.fromkeys(("Flags", *COLUMNS, "MinTRES", "MaxTRESPU", "MaxTRESPA"), "") | {"Name": name, **limits}


def association(account: str, user: str = "", **limits: str) -> Mapping[str, str]:
    names = (*COLUMNS, "Partition", "ParentName", "QOS", "DefaultQOS", "MaxSubmit", "GrpSubmit")
    return dict.fromkeys(names, "") | {"Account": account, "User": user, **limits}


def partition(*rows: Mapping[str, str], qos: str = "") -> Partition:
    return Partition(
        name="main",
        qos=qos,
        accounting=Accounting(
            qualities=[row for row in rows if "Name" in row],
            associations=[row for row in rows if "Account" in row],
            default_account="lab",
        ),
    )


def allowed(place: Partition, **asked: Any) -> tuple[ClusterSettings, list[str]]:
    """What is sent of a request, whose defaults are a day, eight processors and 32 GiB on each node."""
    cluster = ClusterSettings(**asked)
    defaults = {"time": "1-0:00:00", "cpus": 8, "mem": "32G", **asked}
    return with_allowed(cluster, ClusterSettings(**defaults), job_limits(cluster, place))


def refusal(place: Partition, **asked: Any) -> str:
    with pytest.raises(ConfigError) as error:
        allowed(place, **asked)
    return str(error.value)


def test_a_default_is_cut_to_what_a_job_may_have_and_each_cut_is_said() -> None:
    short = quality("short", MaxWall="02:00:00", MaxTRES="cpu=6,mem=4G,billing=1,gres/gpu=2")
    cluster, notices = allowed(partition(short), qos="short", gpus="2")
    assert (cluster.time, cluster.cpus, cluster.mem) == ("2:00:00", 3, "4G")
    assert notices == [
        "QOS short gives a job at most 2:00:00: it asks for --time 2:00:00",
        "QOS short gives a job at most 4G of memory: it asks for --mem 4G",
        "QOS short gives a job at most 6 processors: it asks for --cpus 3",
    ]
    assert allowed(partition(short), time="30")[1] == [], "the QOS is another one"


@pytest.mark.parametrize(
    ("limits", "asked", "message"),
    [
        ({"MaxWall": "02:00:00"}, {"time": "3:00:00"},
         "QOS q gives a job at most 2:00:00: asked for 3:00:00.\nGive --time 2:00:00 or less, or another"),
        ({"MaxTRES": "cpu=16"}, {"cpus": 8, "gpus": "2", "nodes": 2},
         "QOS q gives a job at most 16 processors: asked for 32 processors.\nGive --cpus 4 or less, or another"),
        ({"MaxTRES": "mem=4096M"}, {"mem": "3G", "nodes": 2},
         "QOS q gives a job at most 4G of memory: asked for 6G of memory.\nGive --mem 2G or less, or another"),
        ({"MaxTRES": "node=1"}, {"nodes": 2},
         "QOS q gives a job at most 1 node: asked for 2 nodes.\nGive --nodes 1 or less, or another"),
        ({"MaxTRES": "gres/gpu=0"}, {"gpus": "1"},
         "QOS q gives a job at most 0 GPUs: asked for 1 GPU.\nGive another"),
        ({"MaxTRES": "gres/gpu=1"}, {"gres": "nvme:1,gpu:a100:2"},
         "QOS q gives a job at most 1 GPU: asked for 2 GPUs.\nGive --gres gpu:a100:1 or less, or another"),
        ({"MaxTRES": "gres/gpu:a100=2"}, {"gpus": "a100:4"},
         "QOS q gives a job at most 2 a100 GPUs: asked for 4 a100 GPUs.\nGive --gpus a100:2 or less, or another"),
        ({"MaxTRESPerNode": "gres/gpu=1"}, {"gpus": "2", "nodes": 4},
         "QOS q gives a job at most 1 GPU on a node: asked for 2 GPUs.\nGive --gpus 1 or less, or another"),
        ({"MaxTRESMins": "cpu=240"}, {"cpus": 4, "time": "120"},
         f"QOS q gives a job at most 240 processors{MINUTES}: asked for 4 processors for 120.\n{AN_HOUR}, or another"),
        ({"MinTRES": "gres/gpu=2"}, {"gpus": "1"},
         "QOS q gives a job at least 2 GPUs: asked for 1 GPU.\nGive --gpus 2 or more, or another"),
        ({"GrpTRES": "gres/gpu=2"}, {"gpus": "4"},
         "QOS q gives all jobs together at most 2 GPUs: asked for 4 GPUs.\nGive --gpus 2 or less, or another"),
        ({"MaxTRESPU": "node=2"}, {"nodes": 3},
         f"QOS q gives all jobs of a user together at most 2 nodes: asked for 3 nodes.\n{TWO_NODES}, or another"),
        ({"MaxTRESPA": "node=2"}, {"nodes": 3},
         f"QOS q gives all jobs of an account together at most 2 nodes: asked for 3 nodes.\n{TWO_NODES}, or another"),
    ],
)  # fmt: skip
def test_what_a_limit_will_never_let_start_is_refused_with_a_remedy_that_it_allows(
    limits: dict[str, str], asked: dict[str, Any], message: str
) -> None:
    place = partition(quality("q", **limits))
    assert refusal(place, qos="q", **asked) == f"This job can never start. {message} --qos or --account."


def test_the_first_place_that_has_a_limit_decides() -> None:
    rows = [
        quality("part", MaxWall="03:00:00"), quality("mine", MaxWall="02:00:00"), quality("none"),
        association("lab", "me", MaxWall="01:00:00", QOS="mine,none", DefaultQOS="mine"),
    ]  # fmt: skip
    assert allowed(partition(*rows, qos="part"))[0].time == "3:00:00"
    assert allowed(partition(*rows))[0].time == "2:00:00"
    assert allowed(partition(*rows), qos="none")[0].time == "1:00:00"
    assert allowed(partition(*rows), qos="none", account="other")[0].time == "1-0:00:00"
    over = quality("over", Flags="DenyOnLimit,OverPartQOS", MaxWall="04:00:00")
    assert allowed(partition(*rows, over, qos="part"), qos="over")[0].time == "4:00:00"


def test_a_users_own_row_for_the_partition_comes_before_the_one_for_all() -> None:
    rows = [
        association("lab", "me", MaxWall="01:00:00"),
        association("lab", "me", MaxWall="05:00:00", Partition="main"),
    ]
    assert allowed(partition(*rows))[0].time == "5:00:00"


def test_all_accounts_above_a_user_limit_their_jobs_together() -> None:
    rows = [association("lab", "me"), association("lab", ParentName="uni", GrpTRES="node=8"),
            association("uni", ParentName="root", GrpTRES="node=2"), association("root")]  # fmt: skip
    assert "Account uni gives all jobs together at most 2 nodes" in refusal(partition(*rows), nodes=4)
    assert allowed(partition(*rows, quality("q", GrpTRES="node=9")), nodes=4, qos="q")[1] == []


def test_more_jobs_than_may_be_submitted_are_refused_before_the_first() -> None:
    limits = job_limits(ClusterSettings(qos="q"), partition(quality("q", MaxSubmitPU="3")))
    check_number_of_jobs(3, limits)
    with pytest.raises(ConfigError, match="QOS q gives all jobs of a user together at most 3 jobs: 4 at once"):
        check_number_of_jobs(4, limits)


def test_a_quality_of_service_may_exceed_the_partitions_time() -> None:
    place = partition(quality("long", Flags="PartitionTimeLimit"), quality("normal"))
    assert outranks_partition(ClusterSettings(qos="long"), place)
    assert not outranks_partition(ClusterSettings(), place)
