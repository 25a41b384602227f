"""The submission of runs before anything is written or sent: the runs, their groups, and the requests of their jobs.

A login node can already find many mistakes that would make a job wait for ever or fail unseen: an unknown partition, a
request above its limits, a warning signal that would arrive before the job has started, a full disk, or a duplicate
run.
"""

import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from can_train.config.resolved import ResolvedRun, cache_folder, state_dir, user_file
from can_train.config.settings import AUTO_PARTITION, ClusterSettings
from can_train.errors import ConfigError, RunError, nearest_first, unknown_name
from can_train.factors.store import last_run_offloaded
from can_train.io.units import memory_text, parse_memory_mib, parse_time_min, size_text, time_text
from can_train.memory.catalogue import cards_named
from can_train.memory.host import HOST_SHARE
from can_train.runs.past_runs import data_files, find_duplicate_run, identity
from can_train.runs.registry import Registry, RunRecord
from can_train.runs.run_folder import SweepRun
from can_train.runs.run_state import FINISHED, live_row, silence_in_words, slurm_jobs
from can_train.runs.status import RunStatus, find_run, known_runs, run_statuses
from can_train.runs.sweep_runs import describe_sweep
from can_train.runs.trackers import check_packages
from can_train.slurm import client
from can_train.slurm.client import Partition, node_names
from can_train.slurm.container import APPTAINER, PYXIS, check_image
from can_train.slurm.limits import check_array, check_number_of_jobs, job_limits, outranks_partition, with_allowed
from can_train.slurm.placement import SHOW_PARTITIONS, alike_in_memory, finished_folders
from can_train.slurm.script import (
    check_folder,
    resources,
    wants_gpu,
    with_cluster_defaults,
    with_sbatch_variables,
)

T = TypeVar("T")

EARLY_S: Final = 60  # SLURM may send its warning signal so much too early (man sbatch, --signal)
START_S: Final = 30  # from a job's start until Python handles the signal: it imports from a network file system
LEAST_DELAY_S: Final = 10  # shortest useful warning: writing a checkpoint takes seconds
LEAST_FREE_BYTES: Final = 2**30  # free disk space that a run needs for checkpoints and prepared data

_PROCESS_GIB: Final = 2  # Memory of a rank beside the tensors of its GPU that wait there: Python, PyTorch, CUDA, data
UNKNOWN: Final = "No such run has finished yet: the job plans it on its device"


_SRUN_BY_CAN_TRAIN: Final = ("output", "error", "input", "ntasks", "ntasks-per-node", "nodes", "multi-prog", "export")
"""Arguments of srun that `cluster.srun_args` may not set."""


# Partitions of a job


def find_partitions(name: str, partitions: Sequence[Partition]) -> list[Partition]:
    """Returns the partitions of a job by their names, which are separated by commas; else the cluster's default.

    Raises:
        ConfigError: A partition does not exist.
    """
    if not name:
        return [partition for partition in partitions if partition.is_default]
    by_name = {partition.name: partition for partition in partitions}
    for part in name.split(","):
        if part == AUTO_PARTITION and part not in by_name:
            raise ConfigError("--partition auto chooses a place for new runs alone",
                              value=name, remedy="Name a partition here")  # fmt: skip
        if part not in by_name:
            raise unknown_name("partition", part, by_name, more=_source("partition", name))
    return [by_name[part] for part in name.split(",")]


def _source(setting: str, value: str) -> str:
    """Returns a sentence about the source of a setting of `cluster` if it is not only the command line: an error about
    a value that nobody has typed is a riddle. Empty: the command line, or a preset.
    """
    variable, file = f"SBATCH_{setting.upper()}", user_file()
    if os.environ.get(variable) == value:
        return f". {variable}={value} names it"
    return f". Your settings file {file.path} names it" if file.values.get(setting) == value else ""


_REFUSED_REQUESTS: Final[Mapping[str, str]] = {
    "Invalid feature specification": "constraint",
    "Invalid generic resource (gres) specification": "gres",
    "Invalid account or account/partition combination": "account",
    "Invalid qos specification": "qos",
    "Access denied to requested reservation": "reservation",
    "Requested reservation is invalid": "reservation",
    "Requested time limit is invalid": "time",
}
"""Settings of `cluster` by the words with which sbatch refuses them (slurm_errno.c). Of other words, as "Requested node
configuration is not available", several settings may be the cause."""


def remedy_of_refusal(refusal: str, cluster: ClusterSettings) -> str:
    """Returns a remedy for sbatch's refusal of a request; empty: sbatch does not refuse it."""
    asked = with_sbatch_variables(cluster, os.environ)[0]
    setting = next((name for words, name in _REFUSED_REQUESTS.items() if words in refusal), "")
    if setting and (value := str(getattr(asked, setting))):
        return f"Change --{setting} {value}, or leave it out{_source(setting, value)}"
    return SHOW_PARTITIONS if refusal else ""


def check_job(
    cluster: ClusterSettings,
    partitions: Sequence[Partition],
    allows_time: Callable[[int], bool] = lambda time_min: True,
) -> None:
    """Checks that a job could start in a partition, if any is known, and be warned before its time limit.

    Args:
        cluster: The complete request.
        partitions: The partitions; empty if they are unknown.
        allows_time: Tells whether the job may have a time limit in minutes.

    Raises:
        ConfigError: The job could not start, or not be warned.
    """
    check_warning(parse_time_min(cluster.time), cluster.signal_delay_s, allows_time)
    _first_allowed(partitions, lambda partition: _check_partition(cluster, partition))


def _first_allowed(partitions: Sequence[Partition], check: Callable[[Partition], T]) -> T | None:
    """Returns the result of a check in the first partition that passes it; None without partitions.

    Raises:
        ConfigError: No partition passes it; the error is the first partition's.
    """
    refusals = []
    for partition in partitions:
        try:
            return check(partition)
        except ConfigError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]
    return None


def _check_partition(cluster: ClusterSettings, partition: Partition) -> None:
    nodes, ranks, max_min = partition.nodes, cluster.ranks_per_node, partition.max_time_min
    max_nodes = min(partition.max_nodes or len(nodes), len(nodes) or cluster.nodes)
    requests = [(cluster.nodes, max_nodes, f"A job has at most {max_nodes} nodes", str(cluster.nodes), "--nodes")]
    if max_min is not None:
        time_min = parse_time_min(cluster.time)
        requests.insert(0, (time_min, max_min, f"Its time limit is {time_text(max_min)}", cluster.time, "--time"))
    if nodes:
        cpus, max_cpus = cluster.cpus_per_node, max(node.cpus for node in nodes)
        per_rank = f"{cpus}: {ranks} of {cpus // ranks} each" if ranks > 1 else f"{cpus}"
        given = (
            "--cpus-per-gpu" if cluster.cpus_per_gpu else "--ranks" if cluster.ranks and cluster.cpus < 2 else "--cpus"
        )
        requests.append((cpus, max_cpus, f"A node has at most {max_cpus} processors", per_rank, given))
        max_gpus = max(node.num_gpus(cluster.gpu_type) for node in nodes)
        gpus, option = (cluster.gpus, "--gpus") if cluster.num_gpus else (cluster.gres, "--gres")
        requests.append((cluster.gpus_per_node, max_gpus, f"A node has at most {max_gpus} GPUs", gpus, option))
        kinds = {name for node in nodes for name in node.gpus if name}
        if cluster.gpus_per_node and cluster.gpu_type and cluster.gpu_type not in kinds:
            remedy = (
                f"It has: {', '.join(nearest_first(cluster.gpu_type, kinds))}" if kinds else "Its GPUs have no kinds"
            )
            rule = f"Partition {partition.name} has no GPU of this kind"
            raise ConfigError(rule, value=repr(cluster.gpu_type), remedy=remedy)
    if nodes:
        mib, max_mib = cluster.memory_per_node_mib, max(node.memory_mib for node in nodes)
        given = "--mem-per-gpu" if cluster.mem_per_gpu else "--mem"
        requests.append((mib, max_mib, f"A node has at most {memory_text(max_mib)}", memory_text(mib), given))
    if nodes and cluster.tmp:
        mib, max_mib = parse_memory_mib(cluster.tmp), max(node.tmp_mib for node in nodes)
        rule = f"A node has at most {memory_text(max_mib)} of temporary disk"
        requests.append((mib, max_mib, rule, cluster.tmp, "--tmp"))
    for value, limit, rule, asked, option in requests:
        if value > limit:
            raise ConfigError(f"Partition {partition.name} would never start this job. {rule}",
                              value=f"asked for {asked}",
                              remedy=f"Give {option} less, or another --partition")  # fmt: skip


def waiting_notice(partitions: Sequence[Partition]) -> str:
    """Returns a sentence if all partitions of the job are down, else an empty string."""
    if not partitions or any(partition.is_up for partition in partitions):
        return ""
    return f"Partition {', '.join(partition.name for partition in partitions)} is not up: the job waits until it is"


def check_warning(time_min: int, delay_s: int, allows_time: Callable[[int], bool] = lambda time_min: True) -> None:
    """Checks that a job has started before SLURM warns it of its time limit.

    Args:
        time_min: The time limit in minutes.
        delay_s: Seconds of the warning before it.
        allows_time: Tells whether the job may have a longer time limit, in minutes: the remedy must not name one that
            is refused.

    Raises:
        ConfigError: The warning could come before the job can save anything.
    """
    spare_s = time_min * 60 - EARLY_S - START_S
    if delay_s < spare_s:
        return
    shorter = f"--set cluster.signal_delay_s={min(spare_s // 2, delay_s)}, or " if spare_s // 2 >= LEAST_DELAY_S else ""
    least_min = -(-(delay_s + EARLY_S + START_S + 1) // 60)
    longer = f"--time {least_min} or more"
    if not allows_time(least_min):
        longer = f"another --qos or --partition, which allows {longer}"
    raise ConfigError("The job may be warned of its end before it has started",
                      value=f"time limit {time_text(time_min)}, warning {delay_s} s before it",
                      remedy=f"A job starts within {START_S} s, and the warning may come {EARLY_S} s early: give "
                             f"{shorter}{longer}")  # fmt: skip


def check_device(device: str, cluster: ClusterSettings) -> str:
    """Checks that a run's device agrees with its job's GPUs; returns a notice for the user, or an empty string.

    Raises:
        ConfigError: The device is a GPU that the job does not have.
    """
    if not wants_gpu(device):
        return f"The job asks for GPUs but trains on {device}: they stay idle" if cluster.requests_gpus else ""
    if device.startswith("cuda") and not cluster.requests_gpus:
        raise ConfigError("The job has no GPU for the run", value=f"--device {device}", remedy="Give --gpus 1")
    if device.startswith("cuda:"):
        raise ConfigError("A job cannot choose the number of its GPU", value=f"--device {device}",
                          remedy="Give --device cuda: each rank of the job takes a GPU")  # fmt: skip
    return ""


@dataclass(frozen=True, kw_only=True)
class JobDevice:
    """The facts about a job's device before the job starts."""

    cards: Sequence[str] = ()  # keys in the catalogue of the GPUs that the job may get; empty: no GPU, or `unknown`
    memory_mib: int = 0  # host memory of a process that trains on the CPU; 0: unknown
    ranks: int = 1
    unknown: str = ""  # reason why a GPU that the job may get is unknown


def job_device(run: ResolvedRun, partitions: Sequence[Partition]) -> JobDevice:
    """Returns the device of a run's job.

    Args:
        run: The run with its complete request.
        partitions: The cluster's partitions; empty if they are unknown.
    """
    cluster = run.cluster
    ranks = cluster.num_ranks
    if not wants_gpu(run.device) or (partitions and not cluster.requests_gpus):
        memory_mib = parse_memory_mib(cluster.mem) // cluster.ranks_per_node if cluster.mem else 0
        return JobDevice(memory_mib=memory_mib, ranks=ranks)
    if not cluster.requests_gpus:
        return JobDevice(ranks=ranks, unknown="SLURM does not answer, and no option names the job's GPU")
    places = find_partitions(cluster.partition, partitions) if partitions else []
    names = _names_of_gpus(cluster, places)
    cards = dict.fromkeys(card.key for name in names for card in cards_named(name))
    strange = [name for name in names if name and not cards_named(name)]
    unknown = f"The catalogue has no GPU called {' or '.join(strange)}" if strange else ""
    if not cards and not strange:
        unknown = (f"Nothing tells which GPUs partition {', '.join(place.name for place in places)} has" if places else
                   "SLURM does not answer, and no option names the kind of the job's GPU")  # fmt: skip
    return JobDevice(cards=[*cards], ranks=ranks, unknown=unknown)


def _names_of_gpus(cluster: ClusterSettings, places: Sequence[Partition]) -> list[str]:
    """Lists possible names of a job's GPUs: from its request, else from features, else from the nodes."""
    features = _features_in(cluster.constraint)
    if names := cluster.gpu_kinds or [name for name in features if cards_named(name)]:
        return names
    excluded, listed = node_names(cluster.exclude), node_names(cluster.nodelist)
    nodes = [node for place in places for node in place.nodes if node.num_gpus() and node.name not in excluded]
    nodes = [node for node in nodes if node.name in listed] or nodes
    if "|" not in cluster.constraint:
        nodes = [node for node in nodes if {*features} <= {*node.features}] or nodes
    # A site without kinds of GPUs usually names them in features.
    named = [[kind for kind in node.gpus if cards_named(kind)] or [*filter(cards_named, node.features)] or [*node.gpus]
             for node in nodes]  # fmt: skip
    return list(dict.fromkeys(name for names in named for name in names))


def check_disk(
    folder: Path, option: str, free_bytes: Callable[[Path], int] = lambda p: shutil.disk_usage(p).free
) -> None:
    """Checks that a folder, which need not exist yet, has room for a run.

    Raises:
        RunError: It has no room.
    """
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = free_bytes(existing)
    if free < LEAST_FREE_BYTES:
        raise RunError("The disk has too little room for a run", value=f"{size_text(free)} free in {existing}",
                       remedy=f"Free {size_text(LEAST_FREE_BYTES)} for checkpoints and prepared data, or give another "
                              f"folder with {option}")  # fmt: skip


# Measurements of earlier runs


def expectation(run: ResolvedRun, runs: Sequence[RunRecord]) -> str:
    """Returns the measurements of the newest finished run with the same key and memory settings, in words.

    `runs` has the oldest run first.
    """
    for folder in finished_folders(run.key, runs):
        try:
            config, result = folder.config(), folder.result()
            if result is not None and alike_in_memory(config, run.config):
                batch = result["plan"]["plan"]["logical_batch"]
                micro, peak = result.get("micro_batch_size"), result.get("peak_memory_bytes")
                parts = [f"batch {batch:,}"]
                parts += [f"micro-batches of up to {micro:,}"] if micro and micro < batch else []
                parts += [f"peak {size_text(peak)} on {result['device']}"] if peak else []
                return f"{folder.run_id} had {', '.join(parts)}"
        except (RunError, KeyError, TypeError):
            continue  # The run was removed, or written by another version.
    return UNKNOWN


# The submission


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run to be submitted, with its complete settings."""

    index: int  # among the requested runs
    run: ResolvedRun
    identity: str  # digest of configuration, code and data


@dataclass(frozen=True, kw_only=True)
class SubmissionPlan:
    """The runs of a submission, and its notices."""

    groups: Sequence[Sequence[PlannedRun]]  # the runs of a group have equal requests and become an array
    duplicate_runs: Sequence[RunStatus]  # existing runs with the identity of a requested run
    after: Sequence[str]  # ids of the runs to wait for
    dependency: str  # value of sbatch's --dependency; empty without a dependency
    notices: Sequence[str]
    sweep: Sequence[SweepRun] = ()  # place of each requested run in its sweep; empty: a single run


def plan_submission(  # noqa: PLR0913 - the runs, their code, and what is known of cluster, runs and plans
    runs: Sequence[ResolvedRun],
    code: str,
    partitions: Sequence[Partition],
    *,
    after: Sequence[str] = (),
    force: bool = False,
    on_host: Sequence[int] = (),
) -> SubmissionPlan:
    """Completes and checks the runs of a submission.

    Args:
        runs: Runs that share a state folder.
        code: Digest of the jobs' code.
        partitions: The cluster's partitions; empty if they are unknown.
        after: Runs to wait for, by id, part of an id, or folder.
        force: Whether duplicates are submitted, too.
        on_host: For each run, the bytes of a rank that wait in the memory of the host, by its plan; empty: unknown.

    Raises:
        ConfigError: The request of a run can never be met.
        DataError: A run's data do not exist.
        RunError: The disk is full, or a run to wait for will not finish.
    """
    registry = Registry(state_dir(runs[0].paths))
    known = known_runs(registry, runs[0].runs_dir)
    parents = [find_run(known, name, registry.set_aside) for name in after]
    candidates, notices, checked = [], [], list[ClusterSettings]()
    for index, run in enumerate(runs):
        ready, run_notices = complete(run, partitions, on_host[index] if on_host else 0)
        # The runs of a sweep mostly ask for the same, and each check starts SLURM's programs.
        if ready.cluster not in checked:
            check_options(ready.cluster)
            checked.append(ready.cluster)
        notices += run_notices
        candidates.append(PlannedRun(index=index, run=ready, identity=identity(ready, code, data_files(ready))))
    digests = set() if force else {candidate.identity for candidate in candidates}
    identical = [earlier for earlier in known if earlier.record.identity in digests]
    # Both lists in one call, so that SLURM is asked once.
    statuses = run_statuses([*identical, *parents], registry, client)
    duplicates = {each.index: find_duplicate_run(each.identity, statuses[: len(identical)]) for each in candidates}
    # Settings hold lists, so they are compared rather than hashed.
    groups: list[list[PlannedRun]] = []
    for candidate in [each for each in candidates if duplicates[each.index] is None]:
        alike = next((group for group in groups if group[0].run.cluster == candidate.run.cluster), None)
        if alike is None:
            groups.append(alike := [])
        alike.append(candidate)
    cluster = candidates[0].run.cluster
    if cluster.executor == "slurm":
        for place in find_partitions(cluster.partition, partitions)[:1] if partitions else []:
            jobs = [math.ceil(len(group) / group[0].run.cluster.runs_per_job) for group in groups]
            check_number_of_jobs(sum(jobs), job_limits(cluster, place))
            check_array(max(jobs, default=0), place)
    dependency = dependency_on(statuses[len(identical) :], cluster.executor, cluster.clusters)
    duplicate_runs = [duplicate for duplicate in duplicates.values() if duplicate is not None]
    return SubmissionPlan(groups=groups, duplicate_runs=duplicate_runs, after=[parent.run_id for parent in parents],
                          dependency=dependency, notices=list(dict.fromkeys(notices)),
                          sweep=describe_sweep([run.config for run in runs]) if len(runs) > 1 else ())  # fmt: skip


def complete(
    run: ResolvedRun, partitions: Sequence[Partition], on_host_bytes: int = 0
) -> tuple[ResolvedRun, list[str]]:
    """Completes and checks the request of a run's job, except for its options (`check_options`); returns notices, too.

    `on_host_bytes` of each rank wait in the memory of the host, as far as a plan tells.

    Raises:
        ConfigError: The request can never be met.
        RunError: The disk is full.
    """
    check_packages(run.paths.trackers)
    check_disk(run.runs_dir, "--runs-dir")
    check_disk(state_dir(run.paths), "--state-dir")
    check_disk(cache_folder(run.paths), "--cache")
    if run.cluster.executor != "slurm":
        return run, []
    check_folder(run.runs_dir)
    asked, notices = with_sbatch_variables(run.cluster, os.environ)
    places = find_partitions(asked.partition, partitions) if partitions else []
    _check_names(asked, places, partitions)
    # Without a plan, the last run of a configuration shows on which rung it fits.
    has_offloaded = run.training.fit == "auto" and not asked.mem and not on_host_bytes and last_run_offloaded(run)
    offloads = bool(on_host_bytes) or has_offloaded or run.training.fit.startswith("offload")
    cluster, cuts = _request(run, asked, places, offloads=offloads)
    if on_host_bytes:
        cuts.append(host_memory_notice(on_host_bytes, cluster))
    elif has_offloaded and cluster.mem:
        cuts.append(
            f"The last run of this configuration kept tensors on the host: the job asks for --mem {cluster.mem}"
        )
    cluster = _contained(cluster)
    notices += [*cuts, check_device(run.device, cluster), waiting_notice(places), _kinds_notice(cluster, places),
                _mounts_notice(cluster)]  # fmt: skip
    return replace(run, cluster=cluster), [notice for notice in notices if notice]


def check_requests(runs: Sequence[ResolvedRun], partitions: Sequence[Partition]) -> None:
    """Checks that a cluster could start the jobs of runs.

    Raises:
        ConfigError: It has no partition of the name, or none of its partitions could start the job of a run.
    """
    checked: list[ClusterSettings] = []
    for run in runs:
        if run.cluster not in checked:
            asked = with_sbatch_variables(run.cluster, os.environ)[0]
            _request(run, asked, find_partitions(asked.partition, partitions), offloads=False)
            checked.append(run.cluster)


def host_memory_notice(on_host_bytes: int, cluster: ClusterSettings) -> str:
    """Compares the memory of a job with the bytes of each of its ranks that wait in the memory of the host.

    >>> host_memory_notice(8 * 2**30, ClusterSettings(mem="32G"))
    'Each process needs 8.00 GiB of the host for tensors of its GPU: the job asks for --mem 32G'
    >>> host_memory_notice(40 * 2**30, ClusterSettings(mem="32G", gpus="2"))
    'Each process needs 40.00 GiB of the host for tensors of its GPU: the job asks for --mem 32G. Give --mem 104G'
    """
    needed_mib = math.ceil(on_host_bytes / HOST_SHARE / 2**30 + _PROCESS_GIB) * 2**10 * cluster.ranks_per_node
    fact = f"Each process needs {size_text(on_host_bytes)} of the host for tensors of its GPU"
    had_mib = cluster.memory_per_node_mib
    request = f"--mem {cluster.mem}" if cluster.mem or not had_mib else f"--mem-per-gpu {cluster.mem_per_gpu}"
    asks = f"the job asks for {request}" if had_mib else "the job asks for no amount of memory"
    return f"{fact}: {asks}" + ("" if had_mib >= needed_mib else f". Give --mem {memory_text(needed_mib)}")


def _request(
    run: ResolvedRun, asked: ClusterSettings, places: Sequence[Partition], *, offloads: bool
) -> tuple[ClusterSettings, list[str]]:
    """Completes a request by the least default among the partitions that allow it; returns notices, too. `offloads`
    tells whether tensors of the GPU wait in the memory of the host.

    Raises:
        ConfigError: No partition allows it. The error is the first partition's.
    """
    workers = int(run.training.num_workers) if run.training.num_workers.isdecimal() else 0
    completed = partial(with_cluster_defaults, device=run.device, workers=workers, offloads=offloads)
    if not places:
        cluster = completed(asked, None)
        check_job(cluster, [])
        return cluster, []
    requests: list[tuple[ClusterSettings, list[str]]] = []
    refusals: list[tuple[Partition, ConfigError]] = []
    for place in places:
        limited = replace(place, max_time_min=None) if outranks_partition(asked, place) else place
        allowed = partial(_allowed, completed=completed, limited=limited)
        try:
            cluster, cuts = allowed(asked)
            check_job(cluster, [limited], partial(_allows_time, asked, allowed=allowed, limited=limited))
            requests.append((cluster, cuts))
        except ConfigError as error:
            refusals.append((place, error))
    if not requests:
        raise refusals[0][1]
    clusters = [cluster for cluster, _ in requests]
    time = min((cluster.time for cluster in clusters), key=parse_time_min)
    mem = min((cluster.mem for cluster in clusters), key=lambda text: parse_memory_mib(text or "0"))
    least = replace(clusters[0], time=time, mem=mem, cpus=min(cluster.cpus for cluster in clusters))
    without = [f"Partition {place.name} cannot take this job: {error.rule.rpartition('. ')[2]} ({error.value})"
               for place, error in refusals]  # fmt: skip
    return least, [*dict.fromkeys(cut for _, cuts in requests for cut in cuts), *without]


def _allowed(
    asked: ClusterSettings, *, completed: Callable[[ClusterSettings, Partition], ClusterSettings], limited: Partition
) -> tuple[ClusterSettings, list[str]]:
    return with_allowed(asked, completed(asked, limited), job_limits(asked, limited))


def _allows_time(
    asked: ClusterSettings,
    time_min: int,
    *,
    allowed: Callable[[ClusterSettings], tuple[ClusterSettings, list[str]]],
    limited: Partition,
) -> bool:
    """Returns whether the request could have a time limit in a partition."""
    try:
        _check_partition(allowed(replace(asked, time=str(time_min)))[0], limited)
    except ConfigError:
        return False
    return True


def _contained(cluster: ClusterSettings) -> ClusterSettings:
    """Chooses the program that runs the container.

    Raises:
        ConfigError: The image does not exist, or none is given although the cluster's preset names the program, or the
            cluster's srun has no Pyxis.
    """
    if not cluster.container and cluster.container_runtime != "auto":
        remedy = "Give --container my.sif, or for no container --set cluster.container_runtime=auto"
        value = f"cluster.container_runtime={cluster.container_runtime}, and no --container"
        raise ConfigError("A job in a container needs an image", value=value, remedy=remedy)
    if not cluster.container:
        return cluster
    runtime, has_pyxis = cluster.container_runtime, client.has_pyxis()
    if runtime == PYXIS and has_pyxis is False:
        raise ConfigError("srun of this cluster has no --container-image: Pyxis is not installed", value=runtime,
                          remedy="Give --set cluster.container_runtime=apptainer")  # fmt: skip
    chosen = (PYXIS if has_pyxis else APPTAINER) if runtime == "auto" else runtime
    return replace(cluster, container=check_image(cluster.container), container_runtime=chosen)


def _mounts_notice(cluster: ClusterSettings) -> str:
    """Returns a sentence if a preset mounts folders in a container that the job does not have, else an empty string."""
    if cluster.container or not cluster.container_mounts:
        return ""
    return "cluster.container_mounts has no effect without --container: the job runs in no container"


def check_options(cluster: ClusterSettings) -> None:
    """Raises ConfigError if sbatch or srun of the cluster does not know an option, or refuses its value, or if no shell
    can read `cluster.setup` or `cluster.teardown`.
    """
    if cluster.executor != "slurm":
        return
    for name in ("setup", "teardown"):
        _check_syntax(name, getattr(cluster, name))
    for argument in cluster.srun_args:
        name = argument.removeprefix("--").partition("=")[0]
        if not argument.startswith("--") or name in _SRUN_BY_CAN_TRAIN:
            remedy = "Write it as --cpu-bind=none. can-train sets the files and the number of ranks"
            raise ConfigError("srun may not get an item of cluster.srun_args", value=repr(argument), remedy=remedy)
    if refusal := client.refused_option(client.SRUN, cluster.srun_args):
        raise ConfigError("srun of this cluster refuses cluster.srun_args", value=refusal,
                          remedy="Arguments: srun --help. Values: man srun")  # fmt: skip
    options = [f"--{name}" if value is True else f"--{name}={value}" for name, value in resources(cluster).items()]
    if refusal := client.refused_option(client.SBATCH, options):
        raise ConfigError("sbatch of this cluster refuses an option of the job", value=refusal,
                          remedy="Options: sbatch --help. Values: man sbatch")  # fmt: skip


def _check_syntax(name: str, lines: Sequence[str]) -> None:
    # An `if` that is not closed would end the job, or what is done after the training, only when the job runs.
    syntax = client.run_command("bash", "-n", "-c", "\n".join(lines)) if lines else None
    if syntax is not None and syntax.status not in (0, None):
        error = re.sub(r"^bash: (?:-c: )?", "", syntax.errors.strip().partition("\n")[0])
        raise ConfigError(f"cluster.{name} is no script that bash can read", value=error,
                          remedy="Its items are the lines of the script, in order")  # fmt: skip


def _check_names(cluster: ClusterSettings, places: Sequence[Partition], partitions: Sequence[Partition]) -> None:
    """Raises ConfigError if a node, a feature of nodes, a reservation, a QOS or an account is not in the cluster's
    lists.
    """
    if not partitions:
        return
    known = {node.name for partition in partitions for node in partition.nodes}
    for option in ("exclude", "nodelist"):
        text = getattr(cluster, option)
        for name in node_names(text) if "/" not in text else ():
            if known and name not in known:
                raise unknown_name("node", name, known)
    features = {name for partition in partitions for node in partition.nodes for name in node.features}
    for name in _features_in(cluster.constraint):
        if features and name not in features:
            raise unknown_name("feature of nodes (--constraint)", name, features,
                               more=_source("constraint", cluster.constraint))  # fmt: skip
    reservations = client.read_reservations(cluster.clusters) if cluster.reservation else None
    for name in cluster.reservation.split(",") if reservations is not None else ():
        if not reservations:
            source = _source("reservation", cluster.reservation)
            raise ConfigError("The cluster has no reservation", value=repr(name),
                              remedy=f"Leave out --reservation{source}")  # fmt: skip
        if name not in reservations:
            raise unknown_name("reservation", name, reservations, more=_source("reservation", cluster.reservation))
    accounting = partitions[0].accounting
    qualities = {row["Name"] for row in accounting.qualities}
    if cluster.qos and qualities and cluster.qos not in qualities:
        raise unknown_name("QOS", cluster.qos, qualities, more=_source("qos", cluster.qos))
    accounts = {row["Account"] for row in accounting.associations if row["User"]}
    if cluster.account and accounts and cluster.account not in accounts:
        raise unknown_name("account", cluster.account, accounts, more=_source("account", cluster.account))


def _features_in(constraint: str) -> list[str]:
    """Lists the names in a constraint on features.

    >>> _features_in("ib&[a100*2|v100*4]")
    ['ib', 'a100', 'v100']
    """
    return [name for part in re.split(r"[][&|,()\s]+", constraint) if (name := re.sub(r"\*\d*$", "", part))]


def _kinds_notice(cluster: ClusterSettings, places: Sequence[Partition]) -> str:
    """Returns a sentence if the nodes of one job may have different GPUs, else an empty string."""
    kinds = sorted({kind for place in places for node in place.nodes for kind in node.gpus})
    if cluster.nodes == 1 or not cluster.requests_gpus or cluster.gpu_kinds or cluster.constraint or len(kinds) < 2:
        return ""
    return (f"The nodes of the job may have different GPUs ({', '.join(kinds)}), and each batch waits for the slowest. "
            f"One kind: --gpus {kinds[0]}:{cluster.gpus_per_node}")  # fmt: skip


def dependency_on(parents: Sequence[RunStatus], executor: str, cluster: str = "") -> str:
    """Returns sbatch's condition to wait for runs, empty if all runs have finished.

    Args:
        parents: The runs to wait for.
        executor: Where the waiting run goes: slurm, local or debug.
        cluster: Cluster of SLURM that gets its job; empty: this machine's.

    Raises:
        RunError: A run will not finish, or cannot be waited for.
    """
    conditions = []
    for parent in parents:
        run_id, state, row = parent.known.run_id, parent.state, live_row(parent.facts)
        if state.state == FINISHED:
            continue
        if not state.live:
            raise RunError("The run to wait for has ended without finishing", value=run_id,
                           remedy=f"See why: can-train status {run_id}; then: can-train resume {run_id}")  # fmt: skip
        jobs, answer = slurm_jobs(parent.facts), parent.facts.answer
        if row is None and jobs and jobs[-1].cluster in answer.silent:
            where = f"a login node of {jobs[-1].cluster}" if jobs[-1].cluster else "its cluster"
            silence = silence_in_words(jobs[-1], answer)
            raise RunError("The cluster of the run to wait for does not answer",
                           value=f"{run_id} is {state.state} as far as its files say; {silence}",
                           remedy=f"Submit on {where}, or when that run has finished")  # fmt: skip
        if row is None or executor != "slurm":
            raise RunError("The run cannot be waited for", value=f"{run_id} is {state.state}",
                           remedy="Submit when that run has finished, or submit both to SLURM")  # fmt: skip
        if row.job.cluster != (cluster or answer.local):
            place = f"with --clusters {row.job.cluster}" if cluster else f"on a login node of {row.job.cluster}"
            remedy = f"Submit {place}, or when that run has finished"
            raise RunError(
                "The run to wait for is on another cluster", value=f"{run_id} is job {row.job}", remedy=remedy
            )
        conditions.append(f"afterok:{row.job.number}")
    return ",".join(conditions)
