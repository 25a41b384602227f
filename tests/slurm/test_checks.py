from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError, RunError
from can_train.slurm.client import Node, Partition
from can_train.slurm.submission_plan import (
    EARLY_S,
    START_S,
    check_device,
    check_disk,
    check_job,
    check_warning,
    find_partitions,
    waiting_notice,
)

NODES = (
    Node(name="a", cpus=8, memory_mib=4000, gpus={"t4": 2}),
    Node(name="b", cpus=4, memory_mib=8000, gpus={"v100": 4}),
)
MAIN = Partition(name="main", is_default=True, max_time_min=600, max_nodes=2, nodes=NODES)
WIDE = Partition(name="wide", nodes=NODES * 4, is_up=False)


def job(**settings: Any) -> ClusterSettings:
    return ClusterSettings(**{"time": "60", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time": "601"}, "Its time limit is 10:00:00: asked for 601"),
        ({"nodes": 3}, "at most 2 nodes: asked for 3"),
        ({"mem": "8001M"}, "at most 8000M: asked for 8001M"),
        ({"cpus": 9}, "at most 8 processors: asked for 9"),
        ({"cpus": 5, "gpus": "2"}, "at most 8 processors: asked for 10: 2 of 5 each"),
        ({"gpus": "5"}, "at most 4 GPUs: asked for 5"),
        ({"gpus": "t4:3"}, "at most 2 GPUs: asked for t4:3"),
        ({"gpus": "V100:1"}, "no GPU of this kind: 'V100'"),
    ],
)
def test_what_a_partition_would_never_start_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_job(job(**settings), [MAIN])


@pytest.mark.parametrize(
    "settings", [{}, {"nodes": 2, "gpus": "v100:4", "mem": "8000M", "cpus": 2, "time": "10:00:00"}]
)
def test_what_fits_the_partition_is_let_pass(settings: dict[str, Any]) -> None:
    check_job(job(**settings), [MAIN])


def test_one_of_several_partitions_is_enough() -> None:
    check_job(job(time="700"), [MAIN, WIDE])
    with pytest.raises(ConfigError, match="main would never start"):
        check_job(job(cpus=9), [MAIN, WIDE])


def test_partitions_are_found_by_name_or_as_the_default() -> None:
    assert find_partitions("", [WIDE, MAIN]) == [MAIN]
    assert find_partitions("wide,main", [MAIN, WIDE]) == [WIDE, MAIN]
    with pytest.raises(ConfigError, match="Valid, nearest first: main, wide"):
        find_partitions("mian", [MAIN, WIDE])


def test_a_partition_that_is_down_is_said() -> None:
    assert waiting_notice([MAIN]) == waiting_notice([MAIN, WIDE]) == waiting_notice([]) == ""
    assert "Partition wide is not up" in waiting_notice([WIDE])


def test_no_time_is_advised_that_the_job_may_not_have() -> None:
    with pytest.raises(ConfigError) as error:
        check_warning(3, 120, lambda time_min: time_min < 4)
    assert error.value.remedy.endswith("or another --qos or --partition, which allows --time 4 or more")
    with pytest.raises(ConfigError) as error:
        check_warning(3, 120, lambda time_min: time_min < 5)
    assert error.value.remedy.endswith("or --time 4 or more")


@example(5, 300 - EARLY_S - START_S)
@given(st.integers(1, 3000), st.integers(0, 10**5))
def test_a_warning_comes_after_the_start_or_is_refused_with_a_remedy_that_works(time_min: int, delay_s: int) -> None:
    try:
        check_warning(time_min, delay_s)
    except ConfigError as error:
        assert delay_s + EARLY_S + START_S >= time_min * 60
        check_warning(int(error.remedy.split("--time ")[1].split()[0]), delay_s)
        if "signal_delay_s=" in error.remedy:
            check_warning(time_min, int(error.remedy.split("signal_delay_s=")[1].split(",")[0]))
    else:
        assert delay_s + EARLY_S + START_S < time_min * 60


@pytest.mark.parametrize(
    ("device", "gpus", "message"), [("cuda", "0", "Give --gpus 1"), ("cuda:1", "2", "Give --device cuda")]
)
def test_a_device_that_the_job_does_not_have_is_refused(device: str, gpus: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_device(device, job(gpus=gpus))


def test_gpus_that_stay_idle_are_said() -> None:
    assert "they stay idle" in check_device("cpu", job(gpus="2"))
    assert "they stay idle" in check_device("sim:1GiB", job(gpus="0", gres="gpu:2"))
    for request in ({"gres": "shard:2"}, {"additional": {"gpus": 1}}, {"additional": {"tres-per-task": "gres/gpu:1"}}):
        assert check_device("cuda", job(gpus="0", **request)) == ""
    assert check_device("cuda", job(gpus="2")) == check_device("cpu", job(gpus="0")) == ""


def test_a_full_disk_is_said_for_the_folder_that_will_be_made(tmp_path: Path) -> None:
    asked = []

    def free(folder: Path) -> int:
        asked.append(folder)
        return 2**29

    with pytest.raises(RunError, match=r"(?s)512 MiB free in .*--runs-dir") as error:
        check_disk(tmp_path / "runs" / "deep", "--runs-dir", free)
    assert asked == [tmp_path]
    assert error.value.exit_code == 2
    check_disk(tmp_path, "--runs-dir", lambda _: 2**31)
