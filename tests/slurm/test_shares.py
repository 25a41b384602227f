from typing import Any

import pytest

from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError
from can_train.slurm.client import Node, Partition
from can_train.slurm.script import with_cluster_defaults

GPU_NODE = Node(name="g", cpus=64, memory_mib=512_000, gpus={"a100": 4})
SMALL_NODE = Node(name="s", cpus=16, memory_mib=60_000, gpus={"t4": 2})
CPU_NODE = Node(name="c", cpus=48, memory_mib=192_000)


def asked(device: str = "auto", nodes: tuple[Node, ...] = (GPU_NODE,), **settings: Any) -> ClusterSettings:
    partition = Partition(name="p", nodes=nodes, max_time_min=settings.pop("limit", None))
    return with_cluster_defaults(ClusterSettings(**settings), partition, device)


@pytest.mark.parametrize(
    ("device", "nodes", "settings", "gpus"),
    [
        ("auto", (GPU_NODE,), {}, "1"),
        ("cuda", (GPU_NODE,), {}, "1"),
        ("cpu", (GPU_NODE,), {}, "0"),
        ("sim:1GiB", (GPU_NODE,), {}, "0"),
        ("auto", (CPU_NODE,), {}, "0"),
        ("auto", (GPU_NODE,), {"gpus": "a100:2"}, "a100:2"),
        ("auto", (GPU_NODE,), {"gres": "gpu:a100:2"}, "0"),
        ("auto", (GPU_NODE,), {"gres": "gpu:1"}, "0"),
        ("auto", (GPU_NODE,), {"gres": "nvme:1"}, "1"),
        ("auto", (GPU_NODE,), {"gres": "nogpu:1,gpufs:2"}, "1"),
        ("auto", (GPU_NODE,), {"gres": "nvme:1,shard:2"}, "0"),
        ("cuda", (GPU_NODE,), {"gres": "mps:50"}, "0"),
        ("auto", (GPU_NODE,), {"additional": {"gpus": 2}}, "0"),
        ("auto", (GPU_NODE,), {"additional": {"gpus": None, "gpus_per_task": False}}, "1"),
        ("auto", (GPU_NODE,), {"additional": {"gpus_per_task": "a100:1"}}, "0"),
        ("auto", (GPU_NODE,), {"additional": {"gpus-per-socket": "1", "sockets-per-node": 1}}, "0"),
        ("auto", (GPU_NODE,), {"additional": {"tres_per_task": "cpu=4,gres/gpu=1"}}, "0"),
        ("auto", (GPU_NODE,), {"additional": {"tres-per-node": ["gres:gpu:a100:2"]}}, "0"),
        ("auto", (GPU_NODE,), {"additional": {"tres-per-node": "license/matlab:1", "gpu-bind": "none"}}, "1"),
    ],
)
def test_a_gpu_is_asked_for_where_the_run_can_use_one_and_there_are_some(
    device: str, nodes: tuple[Node, ...], settings: dict[str, Any], gpus: str
) -> None:
    assert asked(device, nodes, **settings).gpus == gpus


def test_a_rank_gets_its_gpus_share_of_the_node_up_to_a_limit() -> None:
    assert (asked().cpus, asked().mem) == (8, "32G")
    two = asked(gpus="2")
    assert (two.cpus, two.mem) == (8, "64G")
    small = asked(nodes=(SMALL_NODE,))
    assert (small.cpus, small.mem) == (8, "30000M")


def test_the_smallest_node_that_has_the_gpus_decides() -> None:
    assert asked(nodes=(GPU_NODE, SMALL_NODE)).mem == "30000M"
    assert asked(nodes=(GPU_NODE, SMALL_NODE), gpus="a100:1").mem == "32G"


def test_a_rank_without_a_gpu_leaves_room_for_others() -> None:
    run = asked("cpu", (CPU_NODE,))
    assert (run.cpus, run.mem) == (8, "32000M")


def test_processes_that_read_samples_have_processors_and_memory() -> None:
    place = Partition(name="p", nodes=(Node(name="c", cpus=128, memory_mib=512 * 1024),))
    asks = [with_cluster_defaults(ClusterSettings(), place, "cpu", workers) for workers in (0, 12)]
    assert [(run.cpus, run.mem) for run in asks] == [(8, "32G"), (13, "44G")]


def test_a_run_that_offloads_has_its_whole_share_of_the_memory_of_a_node() -> None:
    place = Partition(name="p", nodes=(Node(name="g", cpus=64, memory_mib=512 * 1024, gpus={"a100": 4}),))
    asks = [with_cluster_defaults(ClusterSettings(), place, "cuda", offloads=offloads) for offloads in (False, True)]
    assert [run.mem for run in asks] == ["32G", "128G"]


def test_what_was_said_stays() -> None:
    run = asked(cpus=3, mem="7G", time="5")
    assert (run.cpus, run.mem, run.time) == (3, "7G", "5")
    assert asked(additional={"mem_per_cpu": "1G"}).mem == ""
    assert asked(additional={"cpus-per-gpu": 4}).cpus == 0


def test_a_job_that_has_its_nodes_alone_has_their_memory() -> None:
    """SLURM leaves it at the default memory of a processor."""
    for settings in ({"exclusive": True}, {"additional": {"exclusive": True}}):
        alone = asked(nodes=(GPU_NODE, SMALL_NODE), **settings)
        assert (alone.cpus, alone.mem) == (0, "60000M")
    assert asked(exclusive=True, mem_per_gpu="4G").mem == ""


def test_a_job_has_a_day_or_what_the_partition_allows() -> None:
    assert asked().time == "1-0:00:00"
    assert asked(limit=90).time == "1:30:00"
    assert asked(limit=5000).time == "1-0:00:00"


def test_where_nothing_is_known_nothing_is_asked_for() -> None:
    run = with_cluster_defaults(ClusterSettings(), None, "auto")
    assert (run.gpus, run.cpus, run.mem, run.time) == ("0", 0, "", "1-0:00:00")
    assert with_cluster_defaults(ClusterSettings(), None, "cuda").gpus == "1"


def test_runs_that_share_a_gpu_share_its_part_of_the_node() -> None:
    place = Partition(name="p", nodes=(Node(name="g", cpus=64, memory_mib=512 * 1024, gpus={"a100": 4}),))
    alone, packed = (with_cluster_defaults(ClusterSettings(pack=pack), place, "cuda") for pack in ("", "4"))
    assert [(run.cpus, run.mem, run.gpus_per_node) for run in (alone, packed)] == [(8, "32G", 1), (2, "128G", 1)]
    assert (packed.num_ranks, packed.tasks_per_node) == (1, 4)
    assert with_cluster_defaults(ClusterSettings(pack="4", mem="64G"), place, "cuda").cpus == 2


@pytest.mark.parametrize("settings", [{"pack": "0"}, {"pack": "many"}, {"pack": "99"}, {"pack": "2", "gpus": "2"}])
def test_a_gpu_is_shared_by_runs_of_one_process(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.pack"):
        ClusterSettings(**settings)  # type: ignore[arg-type]
