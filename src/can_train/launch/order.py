"""What a submission comes to, decided before anything is written: the runs with everything settled and checked, those
that need not be submitted, and what they wait for.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from can_train.config.cluster import ClusterSettings
from can_train.config.resolved import ResolvedRun
from can_train.errors import RunError, nearest_first
from can_train.launch.checks import check_device, check_disk, check_job, find_partitions, waits
from can_train.launch.cluster_info import Partition
from can_train.launch.identity import ENDED, FINISHED, RunStates, Twin, data_files, find_twin, identity
from can_train.launch.sbatch import check_folder, with_own_defaults
from can_train.launch.shares import settled
from can_train.state.registry import Registry, RunRecord
from can_train.training.folders import state_dir

_NAMED: Final = 5
"""Runs that a message names."""

_SETTLED: Final = ("partition", "account", "qos", "constraint", "gpus", "time", "cpus", "mem")
"""Settings that a submission decides where a person leaves them open."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a person wants of a submission, beside the runs.

    Attributes:
        after: Run that they wait for, by its id or a beginning of it; empty: none.
        force: Whether to submit also what is there already.
    """

    after: str = ""
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
        after: Run id that they wait for; empty: none.
        dependency: The same as sbatch writes it; empty where there is nothing to wait for any more.
        notices: What a person should know, as sentences.
    """

    groups: Sequence[Sequence[Ordered]]
    twins: Sequence[Twin] = ()
    after: str = ""
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
        RunError: There is no room, or the run to wait for will not finish.
    """
    registry = Registry(state_dir(runs[0].paths))
    known, states = registry.runs(), RunStates(registry)
    ordered, twins, notices = [], [], []
    for index, run in enumerate(runs):
        ready, said = _ready(run, partitions)
        notices += said
        digest = identity(ready, code, data_files(ready))
        twin = None if wanted.force else find_twin(digest, known, states)
        if twin is None:
            ordered.append(Ordered(index=index, run=ready, identity=digest))
        else:
            twins.append(twin)
    parent = find_run(wanted.after, known) if wanted.after else None
    return Order(
        groups=_grouped(ordered),
        twins=twins,
        after=parent.run_id if parent else "",
        dependency=_dependency(parent, states, runs[0].cluster.executor) if parent else "",
        notices=list(dict.fromkeys(notices)),
    )


def find_run(name: str, runs: Sequence[RunRecord]) -> RunRecord:
    """Finds a run in the registry by its id or an unambiguous beginning of it.

    Raises:
        RunError: There is no such run, or several begin like this.
    """
    known = {run.run_id: run for run in runs}
    matching = [name] if name in known else [run_id for run_id in known if run_id.startswith(name)]
    if len(matching) == 1:
        return known[matching[0]]
    if matching:
        raise RunError("Several runs begin like this", value=repr(name), remedy=_listed(matching))
    raise RunError("There is no such run", value=repr(name), remedy=_listed(nearest_first(name, known)))


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


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "The registry knows none yet; --state-dir names another"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"Runs: {', '.join(names[:_NAMED])}{more}"
