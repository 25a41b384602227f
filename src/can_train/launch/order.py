"""What a submission comes to, decided before anything is written: the runs with everything settled and checked, those
that need not be submitted, and what they wait for.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from can_train.config.cluster import ClusterSettings
from can_train.config.resolved import ResolvedRun
from can_train.errors import RunError
from can_train.launch.checks import check_device, check_disk, check_job, find_partitions, waits
from can_train.launch.cluster_info import Partition
from can_train.launch.identity import ENDED, FINISHED, RunStates, Twin, data_files, find_twin, identity
from can_train.launch.sbatch import check_folder, with_own_defaults
from can_train.launch.shares import settled
from can_train.launch.survey import find_run, known_runs
from can_train.state.registry import Registry, RunRecord
from can_train.training.folders import state_dir
from can_train.training.run_folder import RunFolder

_SETTLED: Final = ("partition", "account", "qos", "constraint", "gpus", "time", "cpus", "mem")
"""Settings that a submission decides where a person leaves them open."""

_SAME_MODEL: Final = ("task", "model_name", "size", "model")
"""What runs have in common whose weights fit each other; whether they really do, the job sees."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a person wants of a submission, beside the runs.

    Attributes:
        after: Runs that they wait for, by any of their names.
        force: Whether to submit also what is there already.
    """

    after: Sequence[str] = ()
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class Ordered:
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
class Order:
    """A submission.

    Attributes:
        groups: Runs to be submitted, those together that ask for the same.
        twins: Runs that are there already, and would do the same as others that were asked for.
        after: Ids of the runs that they wait for.
        dependency: The same as sbatch writes it; empty where there is nothing to wait for any more.
        notices: What a person should know, as sentences.
    """

    groups: Sequence[Sequence[Ordered]]
    twins: Sequence[Twin] = ()
    after: Sequence[str] = ()
    dependency: str = ""
    notices: Sequence[str] = ()


def make_order(runs: Sequence[ResolvedRun], wanted: Wanted, code: str, partitions: Sequence[Partition]) -> Order:
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
    known, states = registry.runs(), RunStates(registry)
    parents = _parents(wanted.after, registry, runs[0].runs_dir)
    ordered, twins, notices = [], [], []
    for index, run in enumerate(runs):
        ready, said = _ready(starting_from(run, parents), partitions)
        notices += said
        digest = identity(ready, code, data_files(ready))
        twin = None if wanted.force else find_twin(digest, known, states)
        if twin is None:
            ordered.append(Ordered(index=index, run=ready, identity=digest))
        else:
            twins.append(twin)
    return Order(
        groups=_grouped(ordered),
        twins=twins,
        after=[parent.run_id for parent in parents],
        dependency=",".join(filter(None, (_dependency(one, states, runs[0].cluster.executor) for one in parents))),
        notices=list(dict.fromkeys(notices)),
    )


def starting_from(run: ResolvedRun, parents: Sequence[RunRecord]) -> ResolvedRun:
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


def _parents(names: Sequence[str], registry: Registry, runs_dir: Path) -> list[RunRecord]:
    known = known_runs(registry, runs_dir) if names else []
    return [find_run(known, name).record for name in names]


def _ready(run: ResolvedRun, partitions: Sequence[Partition]) -> tuple[ResolvedRun, list[str]]:
    check_disk(run.runs_dir, "--runs-dir")
    check_disk(state_dir(run.paths), "--state-dir")
    if run.cluster.executor != "slurm":
        return run, []
    check_folder(run.runs_dir)
    cluster = with_own_defaults(run.cluster, os.environ)
    places = find_partitions(cluster.partition, partitions) if partitions else []
    cluster = settled(cluster, places[0] if places else None, run.device)
    check_job(cluster, places)
    notices = [check_device(run.device, cluster), waits(places)]
    return _with_cluster(run, cluster), [notice for notice in notices if notice]


def _with_cluster(run: ResolvedRun, cluster: ClusterSettings) -> ResolvedRun:
    decided = {name: getattr(cluster, name) for name in _SETTLED}
    return replace(run, cluster=cluster, config={**run.config, "cluster": {**run.config["cluster"], **decided}})


def _grouped(ordered: Sequence[Ordered]) -> list[list[Ordered]]:
    groups: list[list[Ordered]] = []
    for one in ordered:
        group = next((group for group in groups if group[0].run.cluster == one.run.cluster), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return groups


def _dependency(parent: RunRecord, states: RunStates, executor: str) -> str:
    """What waits for a run: nothing where it has finished.

    Raises:
        RunError: It will not finish, or nobody can wait for it.
    """
    state = states(parent)
    if state == FINISHED:
        return ""
    if state == ENDED:
        raise RunError(
            "The run to wait for has ended without finishing",
            value=parent.run_id,
            remedy=f"See why: can-train status {parent.run_id}; then: can-train resume {parent.run_id}",
        )
    job = states.live_job(parent.run_id)
    if not job or executor != "slurm":
        raise RunError(
            "Only a job of SLURM can wait, and only for another one",
            value=f"{parent.run_id} is {state}",
            remedy="Submit when that run has finished, or submit both to SLURM",
        )
    return f"afterok:{job}"
