"""What scontrol prints, as SLURM 22.05 and 21.08 have it, is understood."""

from pathlib import Path

import pytest

from can_train.slurm.client import NoControllerError, Partition, parse_partitions, query_cluster


@pytest.fixture
def partitions(repository: Path) -> dict[str, Partition]:
    texts = [
        (repository / "tests" / "fixtures" / "slurm" / f"{name}.txt").read_text() for name in ("partitions", "nodes")
    ]
    return {partition.name: partition for partition in parse_partitions(*texts)}


def test_partitions_have_their_limits_and_nodes(partitions: dict[str, Partition]) -> None:
    assert [*partitions] == ["main", "scavenge", "short", "big"]
    assert [p.is_default for p in partitions.values()] == [True, False, False, False]
    assert [p.max_time_min for p in partitions.values()] == [None, None, 2, 2880]
    assert [p.max_nodes for p in partitions.values()] == [None, None, None, 4]
    assert [p.is_up for p in partitions.values()] == [True, True, True, False]
    assert [node.name for node in partitions["main"].nodes] == ["n1", "n2"]


def test_nodes_have_what_jobs_may_use_whatever_their_descriptions_say(partitions: dict[str, Partition]) -> None:
    first, second = partitions["big"].nodes
    assert (first.cpus, first.memory_mib, first.gpus) == (126, 509952, {"a100": 4})
    assert (second.cpus, second.memory_mib, second.gpus) == (128, 256000, {"a100": 2, "v100": 2})
    assert (second.num_gpus(), second.num_gpus("v100"), second.num_gpus("t4")) == (4, 2, 0)


def test_nobody_who_answers_is_an_error_that_names_the_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoControllerError, match="not both installed") as error:
        query_cluster("scontrol", "ping")
    assert "--cluster local" in error.value.remedy
    for name, script in {
        "sbatch": "",
        "scontrol": "echo 'Unable to contact' >&2; exit 1",
        "sinfo": "/bin/sleep 9",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(NoControllerError, match="Unable to contact"):
        query_cluster("scontrol", "ping")
    with pytest.raises(NoControllerError, match=r"no answer after 0\.2 s"):
        query_cluster("sinfo", seconds=0.2)
