"""What a login node can know to be wrong before a job waits for ever, or dies unseen: a partition that is not there,
limits over the partition's, a warning that comes before the job has started, a full disk. Decisions on what was read.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from can_train.config.resolved import ResolvedRun, plain_from_yaml, state_dir
from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError, RunError, nearest_first, unknown_name
from can_train.io.units import memory_text, parse_memory_mib, parse_time_min, size_text, time_text
from can_train.slurm.client import Partition
from can_train.slurm.duplicates import DuplicateRun, data_files, find_duplicate_run, identity
from can_train.slurm.run_state import FINISHED, live_row
from can_train.slurm.script import check_folder, wants_gpu, with_cluster_defaults, with_sbatch_defaults
from can_train.slurm.status import RunStatus, find_run, known_runs, run_statuses
from can_train.training.run_folder import Registry, RunFolder, RunRecord

EARLY_S: Final = 60
"""Seconds that SLURM may send its warning too early."""


START_S: Final = 30
"""Seconds from a job's start until Python can take a warning: imports from a network file system."""


LEAST_DELAY_S: Final = 10
"""Shortest warning that is worth having: a checkpoint takes seconds."""


LEAST_FREE_BYTES: Final = 2**30
"""Free disk that a run needs: checkpoints and prepared data."""


def find_partitions(name: str, partitions: Sequence[Partition]) -> list[Partition]:
    """Finds the partitions that a job may go to; none where it names none and the cluster has no default.

    Args:
        name: As asked for, several by comma; empty: the default.
        partitions: Of the cluster.

    Raises:
        ConfigError: There is none of that name; the message lists them, nearest first.
    """
    if not name:
        return [partition for partition in partitions if partition.is_default]
    known = {partition.name: partition for partition in partitions}
    for part in name.split(","):
        if part not in known:
            raise unknown_name("partition", part, known)
    return [known[part] for part in name.split(",")]


def check_job(cluster: ClusterSettings, partitions: Sequence[Partition]) -> None:
    """Checks that a job could start in one of the partitions, and be warned before its end.

    Args:
        cluster: What it asks for, settled.
        partitions: Where it may go; none: nothing is known.

    Raises:
        ConfigError: It could not.
    """
    check_warning(parse_time_min(cluster.time), cluster.signal_delay_s)
    refusals = []
    for partition in partitions:
        try:
            _check_partition(cluster, partition)
        except ConfigError as error:
            refusals.append(error)
    if refusals and len(refusals) == len(partitions):
        raise refusals[0]


def _check_partition(cluster: ClusterSettings, partition: Partition) -> None:
    _check_time(cluster, partition)
    _check_nodes(cluster, partition)
    if partition.nodes:
        _check_processors(cluster, partition)
        _check_memory(cluster, partition)
        _check_gpus(cluster, partition)


def waiting_notice(partitions: Sequence[Partition]) -> str:
    """Says where a job waits for a partition that takes or starts none at the moment; empty: nowhere."""
    down = [partition.name for partition in partitions if not partition.is_up]
    if not down or len(down) < len(partitions):
        return ""
    return f"Partition {', '.join(down)} is not up: the job waits until it is"


def check_warning(time_min: int, delay_s: int) -> None:
    """Checks that a job has started before it is warned of its end.

    Raises:
        ConfigError: It could be warned before it can save anything.
    """
    spare_s = time_min * 60 - EARLY_S - START_S
    if delay_s < spare_s:
        return
    shorter = f"--set cluster.signal_delay_s={min(spare_s // 2, delay_s)}, or " if spare_s // 2 >= LEAST_DELAY_S else ""
    least = -(-(delay_s + EARLY_S + START_S + 1) // 60)
    raise ConfigError(
        f"A job must have started ({START_S} s) before it is warned of its end, up to {EARLY_S} s earlier than asked",
        value=f"time limit {time_text(time_min)}, warning {delay_s} s before it",
        remedy=f"Give {shorter}--time {least} or more",
    )


def check_device(device: str, cluster: ClusterSettings) -> str:
    """Checks that a run's device and the GPUs of its job belong together.

    Returns:
        What a person should know; empty: nothing.

    Raises:
        ConfigError: The device is a GPU that the job does not have.
    """
    gpus = cluster.num_gpus or (cluster.ranks_per_node if "gpu" in cluster.gres else 0)
    if not wants_gpu(device):
        return f"The job asks for GPUs, and trains on {device}: they stay idle" if gpus else ""
    if device.startswith("cuda") and not gpus:
        raise ConfigError("A run on a GPU needs a job with one", value=f"--device {device}", remedy="Give --gpus 1")
    if device.startswith("cuda:"):
        raise ConfigError(
            "A job's ranks take its GPUs one each", value=f"--device {device}", remedy="Give --device cuda"
        )
    return ""


def check_disk(folder: Path, flag: str, free_bytes: Callable[[Path], int] | None = None) -> None:
    """Checks that there is room in a folder, or where it will be made.

    Args:
        folder: It need not exist.
        flag: What names it.
        free_bytes: Measures; None: asks the system.

    Raises:
        RunError: There is not.
    """
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = (free_bytes or _free_bytes)(there)
    if free < LEAST_FREE_BYTES:
        raise RunError(
            f"A run needs {size_text(LEAST_FREE_BYTES)} of disk for checkpoints and prepared data",
            value=f"{size_text(free)} free in {there}",
            remedy=f"Free some, or give another folder with {flag}",
        )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _check_time(cluster: ClusterSettings, partition: Partition) -> None:
    limit = partition.max_time_min
    if limit is not None and parse_time_min(cluster.time) > limit:
        raise _over("Its time limit is", time_text(limit), partition, asked=cluster.time, remedy="--time")


def _check_nodes(cluster: ClusterSettings, partition: Partition) -> None:
    most = min(partition.max_nodes or len(partition.nodes), len(partition.nodes) or cluster.nodes)
    if cluster.nodes > most:
        raise _over("A job has at most", f"{most} nodes", partition, asked=str(cluster.nodes), remedy="--nodes")


def _check_processors(cluster: ClusterSettings, partition: Partition) -> None:
    wanted = max(1, cluster.cpus) * cluster.ranks_per_node
    most = max(node.cpus for node in partition.nodes)
    if wanted > most:
        asked = (
            f"{wanted}: {cluster.ranks_per_node} of {cluster.cpus} each" if cluster.ranks_per_node > 1 else f"{wanted}"
        )
        raise _over("A node has at most", f"{most} processors", partition, asked=asked, remedy="--cpus")


def _check_memory(cluster: ClusterSettings, partition: Partition) -> None:
    most = max(node.memory_mib for node in partition.nodes)
    if cluster.mem and parse_memory_mib(cluster.mem) > most:
        raise _over("A node has at most", memory_text(most), partition, asked=cluster.mem, remedy="--mem")


def _check_gpus(cluster: ClusterSettings, partition: Partition) -> None:
    kind, wanted = cluster.gpu_type, cluster.num_gpus
    if not wanted or any(node.num_gpus(kind) >= wanted for node in partition.nodes):
        return
    kinds = {name for node in partition.nodes for name in node.gpus if name}
    if kind and kind not in kinds:
        named = f"Of this partition: {', '.join(nearest_first(kind, kinds))}" if kinds else "It has no kinds of GPUs"
        raise ConfigError(f"Partition {partition.name} has no GPU of this kind", value=repr(kind), remedy=named)
    most = max(node.num_gpus(kind) for node in partition.nodes)
    raise _over("A node has at most", f"{most} GPUs", partition, asked=cluster.gpus, remedy="--gpus")


def _over(what: str, limit: str, partition: Partition, *, asked: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"Partition {partition.name} would never start this job. {what} {limit}",
        value=f"asked for {asked}",
        remedy=f"Give {remedy} less, or another --partition",
    )


_LOOKED_AT: Final = 5
"""Runs of the same key whose files are read, the newest first."""


_MEMORY: Final = ("precision", "optimizer", "deterministic")
"""Training settings by which memory differs, beside the model."""


UNKNOWN: Final = "No such run has finished yet: the job plans it on its device"


def expectation(run: ResolvedRun, runs: Sequence[RunRecord]) -> str:
    """Says in one sentence what an earlier run of the same key and memory measured.

    Args:
        run: The new run.
        runs: Of the registry, the oldest first.
    """
    same = [earlier for earlier in reversed(runs) if earlier.key == run.key]
    for earlier in same[:_LOOKED_AT]:
        result = _result(Path(earlier.path))
        if result is not None and _memory(_config(Path(earlier.path))) == _memory(run.config):
            return _sentence(earlier.run_id, result)
    return UNKNOWN


def _sentence(run_id: str, result: Mapping[str, Any]) -> str:
    batch = result["plan"]["plan"]["logical_batch"]
    micro, peak = result.get("micro_batch_size"), result.get("peak_memory_bytes")
    parts = [f"batch {batch:,}"]
    if micro and micro < batch:
        parts.append(f"micro-batches of up to {micro:,}")
    if peak:
        parts.append(f"peak {size_text(peak)} on {result['device']}")
    return f"{run_id} had {', '.join(parts)}"


def _memory(config: Mapping[str, Any]) -> list[Any]:
    training = config.get("training", {})
    return [config.get("model"), *(training.get(name) for name in _MEMORY)]


def _config(path: Path) -> dict[str, Any]:
    try:
        return plain_from_yaml((path / "config.yaml").read_text())
    except (OSError, ValueError):
        return {}


def _result(path: Path) -> dict[str, Any] | None:
    """Reads a result; None where there is none, or one of another version."""
    try:
        result: dict[str, Any] = json.loads((path / "result.json").read_text())
        _sentence("", result)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result


_SETTLED: Final = ("partition", "account", "qos", "constraint", "gpus", "time", "cpus", "mem")
"""Settings that a submission decides where a person leaves them open."""


_SAME_MODEL: Final = ("task", "model_name", "size", "model")
"""What runs have in common whose weights fit each other; whether they really do, the job sees."""


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """What a person wants of a submission, beside the runs.

    Attributes:
        after: Runs that they wait for, by any of their names.
        force: Whether to submit also what is there already.
    """

    after: Sequence[str] = ()
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run to be submitted.

    Attributes:
        index: Its place among those asked for.
        run: Its settings, those of the cluster settled.
        identity: Its digest.
    """

    index: int
    run: ResolvedRun
    identity: str


@dataclass(frozen=True, kw_only=True)
class SubmissionPlan:
    """A submission.

    Attributes:
        groups: Runs to be submitted, those together that ask for the same.
        duplicate runs: Runs that are there already, and would do the same as others that were asked for.
        after: Ids of the runs that they wait for.
        dependency: The same as sbatch writes it; empty where there is nothing to wait for any more.
        notices: What a person should know, as sentences.
    """

    groups: Sequence[Sequence[PlannedRun]]
    duplicate_runs: Sequence[DuplicateRun] = ()
    after: Sequence[str] = ()
    dependency: str = ""
    notices: Sequence[str] = ()


def plan_submission(
    runs: Sequence[ResolvedRun], wanted: SubmitOptions, code: str, partitions: Sequence[Partition]
) -> SubmissionPlan:
    """Settles and checks runs that are to be submitted.

    Args:
        runs: Of one state folder.
        wanted: What else is wanted.
        code: Digest of the code that they are to run.
        partitions: Of the cluster; none: nothing is known of one.

    Raises:
        ConfigError: A run asks for what it would never get.
        DataError: Its data are not there.
        RunError: There is no room, or a run to wait for will not finish.
    """
    registry = Registry(state_dir(runs[0].paths))
    known = known_runs(registry, runs[0].runs_dir)
    parents = [find_run(known, name) for name in wanted.after]
    candidates, notices = [], []
    for index, run in enumerate(runs):
        ready, said = _ready(with_start_weights(run, [parent.record for parent in parents]), partitions)
        notices += said
        candidates.append(PlannedRun(index=index, run=ready, identity=identity(ready, code, data_files(ready))))
    digests = set() if wanted.force else {one.identity for one in candidates}
    identical = [earlier for earlier in known if earlier.record.identity in digests]
    # One survey for both questions, so that SLURM is asked once.
    found = run_statuses([*identical, *parents], registry)
    duplicates = {one.index: find_duplicate_run(one.identity, found[: len(identical)]) for one in candidates}
    waited_for = (_dependency(one, runs[0].cluster.executor) for one in found[len(identical) :])
    return SubmissionPlan(
        groups=_grouped([one for one in candidates if duplicates[one.index] is None]),
        duplicate_runs=[duplicate for duplicate in duplicates.values() if duplicate is not None],
        after=[parent.run_id for parent in parents],
        dependency=",".join(filter(None, waited_for)),
        notices=list(dict.fromkeys(notices)),
    )


def with_start_weights(run: ResolvedRun, parents: Sequence[RunRecord]) -> ResolvedRun:
    """Has a run start from the weights of the first one that it waits for and that trains the same model; not from one
    that it builds on.

    Raises:
        RunError: The configuration of a run to wait for cannot be read.
    """
    built_on = {getattr(run.mode, needed.role) for needed in run.prerequisites}
    for parent in parents:
        config = RunFolder(Path(parent.path)).config()
        same = all(config.get(name) == run.config[name] for name in _SAME_MODEL)
        if same and not run.training.start_from and str(Path(parent.path).resolve()) not in built_on:
            plain = {**run.config, "training": {**run.config["training"], "start_from": parent.path}}
            return replace(run, training=replace(run.training, start_from=parent.path), config=plain)
    return run


def _ready(run: ResolvedRun, partitions: Sequence[Partition]) -> tuple[ResolvedRun, list[str]]:
    check_disk(run.runs_dir, "--runs-dir")
    check_disk(state_dir(run.paths), "--state-dir")
    if run.cluster.executor != "slurm":
        return run, []
    check_folder(run.runs_dir)
    cluster = with_sbatch_defaults(run.cluster, os.environ)
    places = find_partitions(cluster.partition, partitions) if partitions else []
    cluster = with_cluster_defaults(cluster, places[0] if places else None, run.device)
    check_job(cluster, places)
    notices = [check_device(run.device, cluster), waiting_notice(places)]
    return _with_cluster(run, cluster), [notice for notice in notices if notice]


def _with_cluster(run: ResolvedRun, cluster: ClusterSettings) -> ResolvedRun:
    decided = {name: getattr(cluster, name) for name in _SETTLED}
    return replace(run, cluster=cluster, config={**run.config, "cluster": {**run.config["cluster"], **decided}})


def _grouped(ordered: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    groups: list[list[PlannedRun]] = []
    for one in ordered:
        group = next((group for group in groups if group[0].run.cluster == one.run.cluster), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return groups


def _dependency(parent: RunStatus, executor: str) -> str:
    """What waits for a run: nothing where it has finished.

    Raises:
        RunError: It will not finish, or nobody can wait for it.
    """
    run_id, state, row = parent.known.run_id, parent.state, live_row(parent.facts)
    if state.state == FINISHED:
        return ""
    if not state.live:
        raise RunError(
            "The run to wait for has ended without finishing",
            value=run_id,
            remedy=f"See why: can-train status {run_id}; then: can-train resume {run_id}",
        )
    if row is None or executor != "slurm":
        raise RunError(
            "Only a job of SLURM can wait, and only for another one",
            value=f"{run_id} is {state.state}",
            remedy="Submit when that run has finished, or submit both to SLURM",
        )
    return f"afterok:{row.job_id}"
