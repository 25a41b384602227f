"""The limits of a cluster's accounting for a job: limits of qualities of service (QOS), users and accounts.

SLURM accepts a job above a limit, which then waits for ever. If several places limit a resource, the first place
counts: the partition's QOS, the job's QOS, the user's association, the associations of the accounts above it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError
from can_train.io.units import memory_text, parse_memory_mib, parse_time_min, time_text
from can_train.slurm.client import Partition

_TIME: Final = "time"  # named like a resource; in minutes
_JOBS: Final = "jobs"

_OF_A_JOB: Final = ("MaxTRES", "MaxTRESPerNode", "MaxTRESMins", "MinTRES")
_OF_ALL_JOBS: Final = ("GrpTRES", "GrpTRESMins", "MaxTRESPU", "MaxTRESPA")
"""sacctmgr's columns of resources: for one job, and for all jobs of a QOS, a user or an account together. A single job
above a limit for all jobs can never start either."""
_SUBMITTED: Final = ("MaxSubmitPU", "MaxSubmitPA", "MaxSubmit", "GrpSubmit")
"""Columns of the number of jobs that wait or run at the same time."""

_NAMES: Final = {"cpu": "processors", "mem": "memory", "node": "nodes", "gres/gpu": "GPUs", _JOBS: "jobs"}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit of one resource."""

    resource: str  # as SLURM names it: cpu, mem (in MiB), node, gres/gpu:a100; or time (in minutes), jobs
    bound: int
    column: str  # of sacctmgr
    source: str  # owner of the limit, in words

    def __str__(self) -> str:
        several = {"PU": "all jobs of a user together", "PA": "all jobs of an account together"}
        is_of_a_job = self.column in (*_OF_A_JOB, "MaxWall")
        owner = "a job" if is_of_a_job else several.get(self.column[-2:], "all jobs together")
        least = "least" if self.column == "MinTRES" else "most"
        where = " on a node" if self.column == "MaxTRESPerNode" else ""
        minutes = ", multiplied by minutes" if self.column.endswith("Mins") else ""
        return f"{self.source} gives {owner} at {least} {_amount(self.resource, self.bound)}{where}{minutes}"


def _amount(resource: str, number: int) -> str:
    if resource == _TIME:
        return time_text(number)
    if resource == "mem":
        return f"{memory_text(number)} of memory"
    kind, _, name = resource.partition(":")
    return " ".join(filter(None, [str(number), name, _NAMES[kind][:-1] if number == 1 else _NAMES[kind]]))


def job_limits(cluster: ClusterSettings, partition: Partition) -> list[Limit]:
    """Lists the limits of a job in a partition; empty if the cluster enforces no limits."""
    qualities, associations = _places(cluster, partition)
    places = [*qualities, *associations]
    limits = {("MaxWall", _TIME): _first(places, "MaxWall")}
    account_limits: list[Limit] = []
    for column in (*_OF_A_JOB, *_OF_ALL_JOBS):
        # Nodes first: a request always has their number, and the other amounts depend on it.
        names = {name for _, row in places for name in _resources(row.get(column, ""))}
        for resource in sorted(names, reverse=True):
            # A limit for all jobs of an account holds in addition to the limit of the account above it.
            several = [] if column in _OF_A_JOB or _first(qualities, column, resource) else associations
            account_limits += [limit for place in several if (limit := _first([place], column, resource))]
            limits[column, resource] = None if several else _first(places, column, resource)
    for column in _SUBMITTED:
        limits[column, _JOBS] = _first(places, column, _JOBS)
    return [*(limit for limit in limits.values() if limit is not None), *account_limits]


_Place = tuple[str, Mapping[str, str]]  # name in words, and sacctmgr's row


def _places(cluster: ClusterSettings, partition: Partition) -> tuple[list[_Place], list[_Place]]:
    """Lists the QOS and the associations of a job, in order of precedence."""
    accounting = partition.accounting
    account = cluster.account or accounting.default_account
    user_rows = [row for row in accounting.associations if row["User"] and row["Account"] == account]
    user = next((row for row in user_rows if row["Partition"] == partition.name), None) or next(
        (row for row in user_rows if not row["Partition"]), None
    )
    associations = [(f"Account {account}, for its user {user['User']},", user)] if user else []
    above = {row["Account"]: row for row in accounting.associations if not row["User"]}
    while account in above:
        row = above.pop(account)
        associations.append((f"Account {account}", row))
        account = row["ParentName"]
    valid = user["QOS"].split(",") if user else []
    only = valid[0] if len(valid) == 1 else ""
    of_job = cluster.qos or (user or {}).get("DefaultQOS") or only or "normal"
    rows = {row["Name"]: row for row in accounting.qualities}
    names = [partition.qos, of_job]
    if "OverPartQOS" in rows.get(of_job, {}).get("Flags", ""):
        names.reverse()
    return [(f"QOS {each}", rows[each]) for each in dict.fromkeys(names) if each in rows], associations


def _first(places: Sequence[_Place], column: str, resource: str = _TIME) -> Limit | None:
    """Returns the limit of a column in the first place with a limit; None without one."""
    for source, row in places:
        text = row.get(column, "")
        if resource == _TIME:
            bound = parse_time_min(text) if text else None
        elif resource == _JOBS:
            bound = int(text) if text.isdecimal() else None
        else:
            bound = _resources(text).get(resource)
        if bound is not None:
            return Limit(resource=resource, bound=bound, column=column, source=source)
    return None


def _resources(text: str) -> dict[str, int]:
    """Reads `cpu=3,gres/gpu=1,mem=3G`, without unknown resources."""
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    return {name: parse_memory_mib(number) if name == "mem" else int(number) for name, number in pairs
            if name.partition(":")[0] in _NAMES and number[:1].isdecimal()}  # fmt: skip


def with_allowed(
    asked: ClusterSettings, completed: ClusterSettings, limits: Sequence[Limit]
) -> tuple[ClusterSettings, list[str]]:
    """Lowers defaults to the limits; returns the request, and a notice for each lowered default.

    Args:
        asked: The settings.
        completed: The settings with defaults.
        limits: From `job_limits`.

    Raises:
        ConfigError: The settings are above a limit, so that the job would never start.
    """
    notices = []
    for limit in limits:
        if limit.resource == _JOBS:
            continue
        amount = _asked_for(limit, completed)
        total = amount * (parse_time_min(completed.time) if limit.column.endswith("Mins") else 1)
        if amount >= limit.bound if limit.column == "MinTRES" else total <= limit.bound:
            continue
        option, value = _allowed_value(limit, completed)
        has_default = option in ("time", "cpus", "mem") and not getattr(asked, option)
        if value is None or limit.column == "MinTRES" or not has_default:
            for_time = f" for {completed.time}" if limit.column.endswith("Mins") else ""
            how = "more" if limit.column == "MinTRES" else "less"
            change = f"Give --{option} {value} or {how}, or another" if value else "Give another"
            raise ConfigError(f"This job can never start. {limit}",
                              value=f"asked for {_amount(limit.resource, amount)}{for_time}",
                              remedy=f"{change} --qos or --account")  # fmt: skip
        completed = replace(completed, **{option: value})
        notices.append(f"{limit}: it asks for --{option} {value}")
    return completed, notices


def check_number_of_jobs(number: int, limits: Sequence[Limit]) -> None:
    """Raises ConfigError if more jobs are submitted than a limit allows."""
    for limit in limits:
        if limit.resource == _JOBS and number > limit.bound:
            raise ConfigError(f"SLURM would not take these jobs. {limit}", value=f"{number} at once",
                              remedy="Sweep fewer values, or give another --qos")  # fmt: skip


def check_array(number: int, partition: Partition) -> None:
    """Raises ConfigError if an array of so many jobs is larger than the cluster allows."""
    if partition.max_array is not None and number > max(partition.max_array, 1):
        raise ConfigError("SLURM would not take an array of so many jobs",
                          value=f"{number}, and the cluster's MaxArraySize is {partition.max_array}",
                          remedy=f"Sweep at most {partition.max_array} values at once")  # fmt: skip


def _asked_for(limit: Limit, cluster: ClusterSettings) -> int:
    """Returns the requested amount of a limited resource, of a node for a limit for a node."""
    if limit.resource == _TIME:
        return parse_time_min(cluster.time)
    amounts = {"cpu": cluster.cpus_per_node, "node": 1, "gres/gpu": cluster.gpus_per_node,
               f"gres/gpu:{cluster.gpu_type}": cluster.gpus_per_node, "mem": cluster.memory_per_node_mib}  # fmt: skip
    return amounts.get(limit.resource, 0) * _nodes(limit, cluster)


def _nodes(limit: Limit, cluster: ClusterSettings) -> int:
    return 1 if limit.column == "MaxTRESPerNode" else cluster.nodes


def _allowed_value(limit: Limit, cluster: ClusterSettings) -> tuple[str, Any]:
    """Returns the setting that a limit bounds, and its extreme value; None: no value is allowed."""
    if limit.resource == _TIME or limit.column.endswith("Mins"):
        time_min = limit.bound if limit.resource == _TIME else limit.bound // _asked_for(limit, cluster)
        return "time", time_text(time_min) if time_min else None
    if limit.resource == "node":
        return "nodes", limit.bound or None
    nodes = _nodes(limit, cluster)
    if limit.resource == "mem":
        return "mem", memory_text(limit.bound // nodes) if limit.bound >= nodes else None
    if limit.resource == "cpu":
        return "cpus", limit.bound // (nodes * cluster.ranks_per_node) or None
    gpus = f"{cluster.gpu_type}:{limit.bound // nodes}".removeprefix(":")
    option, value = ("gpus", gpus) if cluster.num_gpus else ("gres", f"gpu:{gpus}")
    return option, value if limit.bound >= nodes else None


def outranks_partition(cluster: ClusterSettings, partition: Partition) -> bool:
    """Returns whether a job's QOS lets it exceed the time limit of its partition."""
    qualities, _ = _places(cluster, partition)
    return any("PartitionTimeLimit" in row.get("Flags", "") for _, row in qualities)
