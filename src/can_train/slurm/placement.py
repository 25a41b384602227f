"""Places for a run on a cluster: a partition with a kind of GPU, and which of them is the best.

`--partition auto` takes the place where the run is predicted to end first. A place counts if the limits of the cluster
allow the job, SLURM would take it (`sbatch --test-only`), and the plan of the run fits the GPU. The functions here
decide; `cli/submit.py` plans, prints and asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from can_train.config.settings import ClusterSettings
from can_train.errors import ConfigError, RunError
from can_train.io.records import is_file
from can_train.memory.catalogue import bandwidth_gb_s, cards_named
from can_train.runs.run_folder import RunFolder
from can_train.slurm.client import node_names

if TYPE_CHECKING:
    from can_train.runs.registry import RunRecord
    from can_train.slurm.client import Node, Partition

_MAX_RUNS_READ: Final = 20  # finished runs whose figures are read: their folders may lie on a slow file system
_MOST_REASONS: Final = 3  # that an error lists
_MOST_NAMES: Final = 2  # places that an error names beside a reason
_NOW_S: Final = 120.0  # a start within so many seconds is shown as "now": SLURM schedules once or twice a minute


@dataclass(frozen=True, kw_only=True)
class EpochTime:
    """Predicted time of an epoch, and the earlier run that it follows from."""

    seconds: float
    source: str  # in words


@dataclass(frozen=True, kw_only=True)
class Place:
    """A partition, with a kind of its GPUs, for a job.

    Attributes:
        cluster: Request of the job there.
        gpu: Kind of the GPUs by the cluster's name; empty: no GPU, or GPUs without a name.
        cards: Keys in the catalogue of the GPUs that the job may get.
        refusal: Reason why the job cannot be sent there; empty: it can.
        remedy: What would let it be sent there, or make it fit; empty: it can, and fits.
        does_not_fit: Reason why no plan fits there; empty: a plan fits, or no plan was made.
        plan: Rung, micro-batches and peak as in a dry run's table; empty: no plan was made.
        start: Time when SLURM expects the job to start; None: SLURM does not tell.
        epoch: Time of an epoch; None: nothing tells it.
        epochs: Epochs of the run.
        on_host_bytes: Bytes of a rank that wait in the memory of the host, by the plan.
    """

    cluster: ClusterSettings
    gpu: str = ""
    cards: tuple[str, ...] = ()
    refusal: str = ""
    remedy: str = ""
    does_not_fit: str = ""
    plan: tuple[str, str, str] | None = None
    start: datetime | None = None
    epoch: EpochTime | None = None
    epochs: int = 1
    on_host_bytes: int = 0

    @property
    def name(self) -> str:
        """The partition and its GPUs: `gpu with 2 × a100`, `gpu of beta with a100`."""
        number = self.cluster.gpus_per_node
        gpus = f"{number} × {self.gpu or 'GPU'}" if number > 1 else self.gpu or "a GPU"
        return f"{self.partition} with {gpus}" if number else self.partition

    @property
    def partition(self) -> str:
        """The partition, and its cluster if the request names one: `gpu of beta`."""
        return " of ".join(filter(None, (self.cluster.partition, self.cluster.clusters)))

    @property
    def is_usable(self) -> bool:
        """Whether the job can be sent there, and no plan says that it does not fit."""
        return not (self.refusal or self.does_not_fit)

    @property
    def end(self) -> datetime | None:
        """Time when the run is predicted to end, if it needs no second job; None: unknown."""
        if self.start is None or self.epoch is None:
            return None
        return self.start + timedelta(seconds=self.epochs * self.epoch.seconds)

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth of the slowest of the GPUs, GB/s; 0: unknown."""
        return min((bandwidth_gb_s(key) for key in self.cards), default=0)


# Places of a cluster


def list_places(cluster: ClusterSettings, partitions: Sequence[Partition], *, wants_gpu: bool) -> list[Place]:
    """Lists the partitions that are up, each with each kind of its GPUs.

    Args:
        cluster: Request of the job, whose number and kind of GPUs, and nodes, are kept.
        partitions: The partitions of one cluster.
        wants_gpu: Whether the run trains on a GPU. Partitions without GPUs are then left out, if any has GPUs.
    """
    partitions = [partition for partition in partitions if partition.is_up]
    has_gpus = wants_gpu and any(node.num_gpus() for partition in partitions for node in partition.nodes)
    places = []
    for partition in partitions:
        there = replace(cluster, partition=partition.name)
        if not has_gpus or cluster.names_gpus:
            places.append(Place(cluster=there))
            continue
        for kind, nodes in _by_kind(partition.nodes, cluster).items():
            if cluster.gpu_type in ("", kind):
                places.append(_with_gpus(there, kind, nodes))
    return places


def _by_kind(nodes: Sequence[Node], cluster: ClusterSettings) -> dict[str, list[Node]]:
    """Returns the nodes that the job may use by the kinds of their GPUs."""
    excluded, listed = node_names(cluster.exclude), node_names(cluster.nodelist)
    by_kind: dict[str, list[Node]] = {}
    for node in nodes:
        if node.name not in excluded and (not listed or node.name in listed):
            for kind, number in node.gpus.items():
                if number:
                    by_kind.setdefault(kind, []).append(node)
    return by_kind


def _with_gpus(cluster: ClusterSettings, kind: str, nodes: Sequence[Node]) -> Place:
    number = cluster.num_gpus or 1
    asked = replace(cluster, gpus=f"{kind}:{number}" if kind else str(number))
    # A site without kinds of GPUs usually names them in features.
    features = [name for node in nodes for name in node.features if cards_named(name)]
    cards = dict.fromkeys(card.key for name in ([kind] if kind else features) for card in cards_named(name))
    return Place(cluster=asked, gpu=kind or "/".join(dict.fromkeys(features)), cards=tuple(cards))


# The time of an epoch

_MEMORY_SETTINGS: Final = ("precision", "optimizer", "optimizer_args", "deterministic")
"""Training settings that change a run's memory, in addition to the settings of the model."""


def alike_in_memory(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two configurations of one key agree in the settings that decide memory and speed."""
    return _memory_settings(one) == _memory_settings(other)


def _memory_settings(config: Mapping[str, Any]) -> list[Any]:
    training = config.get("training", {})
    return [config.get("model"), *(training.get(name) or None for name in _MEMORY_SETTINGS)]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Samples a second of a finished run, on a device."""

    run_id: str
    device: str  # key, as in the factor store
    samples_per_second: float  # of one rank


def finished_folders(key: str, runs: Sequence[RunRecord]) -> Iterator[RunFolder]:
    """Yields the folders of the newest finished runs with a key, the newest first; `runs` has the oldest run first."""
    folders = (RunFolder(Path(run.path)) for run in reversed(runs) if run.key == key)
    # A look for the result is cheap; runs without one must not hide those with one.
    return islice((folder for folder in folders if is_file(folder.result_path)), _MAX_RUNS_READ)


def read_speeds(key: str, config: Mapping[str, Any], runs: Sequence[RunRecord]) -> list[Speed]:
    """Reads the speeds of the last epochs of finished runs with a key and the same settings of memory.

    Returns:
        The speed of the newest run on each device.
    """
    speeds: dict[str, Speed] = {}
    for folder in finished_folders(key, runs):
        # A run may have been removed, or written by another version.
        with suppress(RunError, KeyError, TypeError, ValueError, IndexError):
            result, earlier = folder.result(), folder.config()
            if result is None or not alike_in_memory(earlier, config):
                continue
            rates = [rate for row in folder.metrics() if (rate := row.get("samples_per_second"))]
            speed = Speed(run_id=folder.run_id, device=result["device"], samples_per_second=rates[-1] / _ranks(earlier))
            speeds.setdefault(speed.device, speed)
    return list(speeds.values())


def _ranks(config: Mapping[str, Any]) -> int:
    """Returns the ranks of a job, as its configuration asked for them."""
    cluster = ClusterSettings(**config.get("cluster", {}))
    return cluster.num_ranks if cluster.executor == "slurm" else 1


def epoch_time(cards: Sequence[str], ranks: int, samples: int, speeds: Sequence[Speed]) -> EpochTime | None:
    """Predicts the time of an epoch on the slowest of `cards`.

    A speed on the same card counts as it is. A speed on another card is multiplied by the ratio of the memory
    bandwidths: a training is seldom faster than that. Ranks are taken to share the work evenly.

    Args:
        cards: Keys of the GPUs that a job may get.
        ranks: Processes that train the run together.
        samples: Training samples of an epoch.
        speeds: From `read_speeds`.
    """
    times = [_time_on(key, ranks, samples, speeds) for key in cards]
    if not times or None in times:
        return None
    return max((time for time in times if time is not None), key=lambda time: time.seconds)


def _time_on(key: str, ranks: int, samples: int, speeds: Sequence[Speed]) -> EpochTime | None:
    for speed in speeds:
        if speed.device == key:
            seconds = samples / (speed.samples_per_second * ranks)
            return EpochTime(seconds=seconds, source=f"as {speed.run_id} took on {key}")
    here = bandwidth_gb_s(key)
    for speed in speeds:
        there = bandwidth_gb_s(speed.device)
        if here and there:
            seconds = samples / (speed.samples_per_second * ranks * here / there)
            return EpochTime(seconds=seconds, source=f"{speed.run_id} on {speed.device}, by memory bandwidth")
    return None


# The best place

SHOW_PARTITIONS: Final = "Compare the request with the partitions: sinfo -o '%P %a %T %l %c %m %G %f'"
"""Remedy for a refusal whose words do not tell which request is refused. The columns: partition, whether it is up,
state of its nodes, time limit, processors, memory in MiB, GPUs and features.
"""


def best_first(places: Sequence[Place]) -> list[Place]:
    """Sorts places: first the usable ones by their predicted ends, then places where nothing fits, then refused ones.

    If the end of a usable place is unknown, usable places are sorted by the minutes until their starts, and then by the
    bandwidth of their GPUs.
    """
    usable = [place for place in places if place.is_usable]
    by_end = all(place.end is not None for place in usable)
    late = _minutes_late(places, by_end=by_end)

    def order(number: int) -> tuple[Any, ...]:
        place = places[number]
        return bool(place.refusal), bool(place.does_not_fit), place.plan is None, late[number], -place.bandwidth

    return [places[number] for number in sorted(range(len(places)), key=order)]


def _minutes_late(places: Sequence[Place], *, by_end: bool = False) -> list[float]:
    """Returns the whole minutes by which each place starts, or ends, after the earliest one; inf: it is unknown.

    SLURM is asked about one place after another, so that equal starts are seconds apart.
    """
    moments = [place.end if by_end else place.start for place in places]
    known = [moment for moment in moments if moment is not None]
    return [math.inf if moment is None else (moment - min(known)) // timedelta(minutes=1) for moment in moments]


def reason(places: Sequence[Place]) -> str:
    """Tells in a sentence why the first of sorted places is the best.

    Raises:
        ConfigError: No place is usable.
    """
    usable = [place for place in places if place.is_usable]
    if not usable:
        raise _no_place(places)
    first = usable[0]
    if len(usable) == 1:
        return f"Only {first.name} takes the run"
    if all(place.end is not None for place in usable):
        return f"The run is predicted to end first on {first.name}"
    if len({*_minutes_late(usable)}) > 1:
        return f"The run is expected to start first on {first.name}; no earlier run tells the time of an epoch"
    if first.bandwidth:
        return f"{first.name} has the GPU with the highest memory bandwidth; no earlier run tells the time of an epoch"
    return f"{first.name} is the first partition; nothing tells which one is faster"


def _no_place(places: Sequence[Place]) -> ConfigError:
    if not places:
        return ConfigError("No partition of the cluster is up, or none has GPUs of the kind that the run asks for",
                           remedy="Name a partition: --partition NAME; sinfo lists them")  # fmt: skip
    by_reason = _names_by([(place.refusal or place.does_not_fit, place) for place in places])
    by_remedy = _names_by([(place.remedy or SHOW_PARTITIONS, place) for place in places])
    return ConfigError("No partition takes the run", value=_with_names(by_reason), remedy=_with_names(by_remedy))


def _names_by(places: Sequence[tuple[str, Place]]) -> dict[str, list[str]]:
    """Groups the names of places by their texts."""
    names: dict[str, list[str]] = {}
    for text, place in places:
        names.setdefault(text, []).append(place.name)
    return names


def _with_names(names: Mapping[str, Sequence[str]]) -> str:
    """Lists texts, each after the names of its places; a text that holds for all places needs no names."""
    if len(names) == 1:
        return next(iter(names))
    listed = [f"{_shortened(of_text)}: {text}" for text, of_text in names.items()][:_MOST_REASONS]
    more = [f"and {len(names) - len(listed)} more"] if len(names) > len(listed) else []
    return "; ".join([*listed, *more])


def _shortened(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_MOST_NAMES])} and {more} more"


COLUMNS: Final = ("partition", "GPU", "rung", "micro-batches", "peak", "epoch", "starts", "ends")


def table_rows(places: Sequence[Place], now: datetime) -> list[tuple[str, ...]]:
    """Writes sorted places as rows with the columns `COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for place in places:
        number = place.cluster.gpus_per_node
        gpu = "–" if not number else f"{number} × {place.gpu or '?'}"
        if place.refusal or place.does_not_fit:
            plan = ("refused" if place.refusal else "does not fit", "–", "–")
        else:
            plan = place.plan or ("no plan", "–", "–")
        epoch = "–" if place.epoch is None else _span(place.epoch.seconds)
        rows.append((place.partition, gpu, *plan, epoch, _moment(place.start, now), _moment(place.end, now)))
    return rows


def notes(places: Sequence[Place]) -> list[str]:
    """Writes the reasons behind rows, in sentences."""
    refused = [place.does_not_fit or f"{place.name}: {place.refusal}" for place in places if not place.is_usable]
    sources = [f"Epoch on {place.gpu}: {place.epoch.source}" for place in places if place.epoch is not None]
    return list(dict.fromkeys([*refused, *sources]))


def _moment(moment: datetime | None, now: datetime) -> str:
    if moment is None:
        return "–"
    if moment <= now + timedelta(seconds=_NOW_S):
        return "now"
    return moment.strftime("%H:%M" if moment.date() == now.date() else "%d %b %H:%M")


def _span(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}" if seconds < 10 * length else f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"


def to_plain(places: Sequence[Place]) -> Iterator[dict[str, Any]]:
    """Yields places as strict JSON; times are ISO 8601 in the time zone of the machine."""
    for place in places:
        yield {
            "partition": place.cluster.partition, "cluster": place.cluster.clusters or None,
            "gpu": place.gpu or None, "gpus": place.cluster.gpus_per_node,
            "cards": list(place.cards), "fits": None if place.plan is None and not place.does_not_fit
                                                else not place.does_not_fit,
            "refusal": place.refusal or place.does_not_fit or None,
            "rung": place.plan and place.plan[0], "micro_batches": place.plan and place.plan[1],
            "start": place.start and place.start.isoformat(),
            "epoch_seconds": place.epoch and round(place.epoch.seconds, 1),
            "end": place.end and place.end.isoformat(),
        }  # fmt: skip
