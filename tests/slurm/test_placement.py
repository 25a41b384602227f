"""The places of a cluster for a run: which there are, how long an epoch takes there, and which is the best."""

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError
from can_train.runs.run_folder import RunFolder
from can_train.slurm.client import Node, Partition
from can_train.slurm.placement import (
    EpochTime,
    Place,
    Speed,
    best_first,
    epoch_time,
    list_places,
    read_speeds,
    reason,
    table_rows,
)
from fakes.made_runs import CONFIG, KEY, RESULT, Runs

NOW = datetime(2026, 11, 28, 12, 0, 0)
OLD = Node(name="n1", cpus=8, memory_mib=64_000, gpus={"t4": 4})
NEW = Node(name="n2", cpus=8, memory_mib=64_000, gpus={"a100": 2})
PLAIN = Node(name="n3", cpus=8, memory_mib=64_000)
NAMELESS = Node(name="n4", cpus=8, memory_mib=64_000, gpus={"": 2}, features=["ib", "v100"])
PARTITIONS = (
    Partition(name="main", is_default=True, nodes=(OLD, NEW)),
    Partition(name="cpu", nodes=(PLAIN,)),
    Partition(name="gone", nodes=(NEW,), is_up=False),
    Partition(name="other", nodes=(NAMELESS,)),
)
ASKED = ClusterSettings(executor="slurm", partition="auto")


def names(places: list[Place]) -> list[str]:
    return [place.name for place in places]


def usable(partition: str, gpu: str = "t4", **more: object) -> Place:
    cluster = replace(ASKED, partition=partition, gpus=f"{gpu}:1")
    return replace(Place(cluster=cluster, gpu=gpu, cards=("t4-16gb",), plan=("split", "1", "40.0%")), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cluster", "wants_gpu", "found"),
    [
        (ASKED, True, ["main with t4", "main with a100", "other with v100"]),
        (replace(ASKED, gpus="2"), True, ["main with 2 × t4", "main with 2 × a100", "other with 2 × v100"]),
        (replace(ASKED, gpus="a100:1"), True, ["main with a100"]),
        (replace(ASKED, exclude="n1"), True, ["main with a100", "other with v100"]),
        (replace(ASKED, nodelist="n[4-5]"), True, ["other with v100"]),
        (replace(ASKED, gres="gpu:1"), True, ["main with a GPU", "cpu with a GPU", "other with a GPU"]),
        (ASKED, False, ["main", "cpu", "other"]),
    ],
)
def test_each_partition_that_is_up_is_a_place_with_each_kind_of_gpu(
    cluster: ClusterSettings, wants_gpu: bool, found: list[str]
) -> None:
    assert names(list_places(cluster, PARTITIONS, wants_gpu=wants_gpu)) == found


def test_a_place_asks_for_its_kind_and_knows_its_cards() -> None:
    requests = [(place.cluster.partition, place.cluster.gpus, place.cards)
                for place in list_places(ASKED, PARTITIONS, wants_gpu=True)]  # fmt: skip
    assert requests == [
        ("main", "t4:1", ("t4-16gb",)),
        ("main", "a100:1", ("a100-40gb", "a100-80gb")),
        ("other", "1", ("v100-16gb", "v100-32gb")),
    ]


def test_an_epoch_takes_as_long_as_on_the_same_card_else_by_the_ratio_of_bandwidths() -> None:
    speeds = [Speed(run_id="r1", device="t4-16gb", samples_per_second=100.0)]
    same = epoch_time(["t4-16gb"], 1, 6000, speeds)
    assert same == EpochTime(seconds=60.0, source="as r1 took on t4-16gb")
    assert epoch_time(["t4-16gb"], 3, 6000, speeds) == EpochTime(seconds=20.0, source="as r1 took on t4-16gb")
    # Of a T4's 320 GB/s and the 1,555 GB/s of the slower of two A100s.
    other = epoch_time(["a100-80gb", "a100-40gb"], 1, 6000, speeds)
    assert other is not None
    assert other.seconds == pytest.approx(60.0 * 320 / 1555)
    assert other.source == "r1 on t4-16gb, by memory bandwidth"
    assert epoch_time(["cpu-64gb"], 1, 6000, speeds) is None
    assert epoch_time([], 1, 6000, speeds) is None
    assert epoch_time(["t4-16gb"], 1, 6000, []) is None


def test_speeds_are_of_the_newest_finished_run_on_each_device(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for number, (device, rate) in enumerate([("t4-16gb", 10.0), ("t4-16gb", 20.0), ("h100-80gb", 90.0)]):
        path = runs.add(number, {**RESULT, "device": device})
        (path / "metrics.jsonl").write_text(f'{{"samples_per_second": 1.0}}\n{{"samples_per_second": {rate}}}\n{{}}\n')
    unfinished = RunFolder(runs.add(3))
    four_gpus = runs.add(4, {**RESULT, "device": "a100-40gb"})
    (four_gpus / "metrics.jsonl").write_text('{"samples_per_second": 400.0}\n')
    (four_gpus / "config.yaml").write_text(CONFIG + "cluster:\n  executor: slurm\n  gpus: '2'\n  nodes: 2\n")
    config, records = unfinished.config(), runs.registry.runs()
    found = {speed.device: speed.samples_per_second for speed in read_speeds(KEY, config, records)}
    assert found == {"t4-16gb": 20.0, "h100-80gb": 90.0, "a100-40gb": 100.0}
    assert read_speeds("another_key", config, records) == []
    other = {**config, "training": {**config["training"], "precision": "bf16"}}
    assert read_speeds(KEY, other, records) == []


def test_the_place_where_the_run_ends_first_is_the_best_though_another_starts_first() -> None:
    slow = usable("slow", start=NOW, epoch=EpochTime(seconds=3600, source="r"), epochs=10)
    fast = usable("fast", "a100", start=NOW + timedelta(hours=1), epoch=EpochTime(seconds=360, source="r"), epochs=10)
    small = usable("small", does_not_fit="The training does not fit t4-16gb", start=NOW)
    refused = usable("short", refusal="Its time limit is 2 minutes")
    places = best_first([refused, small, slow, fast])
    assert names(places) == ["fast with a100", "slow with t4", "small with t4", "short with t4"]
    assert reason(places) == "The run is predicted to end first on fast with a100"
    assert table_rows(places, NOW) == [
        ("fast", "1 × a100", "split", "1", "40.0%", "6.0 min", "13:00", "14:00"),
        ("slow", "1 × t4", "split", "1", "40.0%", "1.0 h", "now", "22:00"),
        ("small", "1 × t4", "does not fit", "–", "–", "–", "now", "–"),
        ("short", "1 × t4", "refused", "–", "–", "–", "–", "–"),
    ]


def test_without_times_the_earliest_start_counts_and_then_the_bandwidth() -> None:
    late = usable("late", start=NOW + timedelta(hours=2))
    soon = usable("soon", start=NOW + timedelta(seconds=20))
    now = usable("now", "a100", start=NOW + timedelta(seconds=30), cards=("a100-40gb",))
    places = best_first([late, soon, now])
    assert names(places) == ["now with a100", "soon with t4", "late with t4"]
    assert reason(places).startswith("The run is expected to start first on now with a100")
    assert reason(best_first([soon, now])).startswith("now with a100 has the GPU with the highest memory bandwidth")
    # Asked about a second later, across a full minute.
    first, second = datetime(2026, 11, 30, 4, 9, 59), datetime(2026, 11, 30, 4, 10, 0)
    idle = [usable("slow", start=first), usable("fast", "a100", start=second, cards=("a100-40gb",))]
    assert names(best_first(idle)) == ["fast with a100", "slow with t4"]
    assert reason(best_first(idle)).startswith("fast with a100 has the GPU with the highest memory bandwidth")
    assert reason([soon]) == "Only soon with t4 takes the run"


def test_no_usable_place_is_an_error_with_each_reason_once() -> None:
    refused = [usable(name, refusal="Its time limit is 2 minutes") for name in ("a", "b")]
    with pytest.raises(ConfigError, match="No partition takes the run") as caught:
        reason(best_first([*refused, usable("c", does_not_fit="The training does not fit t4-16gb")]))
    assert caught.value.value == (
        "c with t4: The training does not fit t4-16gb; a with t4, b with t4: Its time limit is 2 minutes"
    )
    assert caught.value.remedy.startswith("Compare the request with the partitions: sinfo")
    short = [usable(name, refusal="Its time limit is 1 minute", remedy="Give --time 4 or more") for name in ("a", "b")]
    with pytest.raises(ConfigError) as caught:
        reason(short)
    assert caught.value.remedy == "Give --time 4 or more"
    feature = [usable(name, refusal="Invalid feature", remedy="Leave out --constraint") for name in ("c", "d", "e")]
    with pytest.raises(ConfigError) as caught:
        reason([*feature, *short])
    assert caught.value.value == (
        "c with t4, d with t4 and 1 more: Invalid feature; a with t4, b with t4: Its time limit is 1 minute"
    )
    assert caught.value.remedy == (
        "c with t4, d with t4 and 1 more: Leave out --constraint; a with t4, b with t4: Give --time 4 or more"
    )
    with pytest.raises(ConfigError, match="No partition of the cluster is up"):
        reason([])
