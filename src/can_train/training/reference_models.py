"""Decides where a companion's answers come from: the fastest way that fits, by what was measured of each."""

import json
import zlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.settings import TrainingSettings
from can_train.errors import DoesNotFitError, StateError
from can_train.fit import random_state
from can_train.fit.explore import Explorer, probe, seconds_a_sample
from can_train.fit.features import members
from can_train.fit.optimizer import Precision
from can_train.io.arrays import ArrayWriter, FolderDamageError, discard_folder, read_arrays
from can_train.io.atomic import write_json_atomic
from can_train.memory.meters import CpuMeter, Meter, TargetMeter
from can_train.memory.out_of_memory import OutOfMemoryEndsQuietly
from can_train.reporter import Reporter
from can_train.task import Companion, Task
from can_train.training.distributed import Ranks
from can_train.training.inference import BLOCK, Place, Question, Scoring, asking, where_it_fits

ALIKE: Final = 0.05
"""Relative difference of two times that says nothing: they were measured on a machine that does other things too."""


@dataclass(frozen=True, kw_only=True)
class PlacementCost:
    """What one way of getting a companion's answers costs.

    Attributes:
        placement: `device`, `cache` or `offload`.
        base_bytes: What is on the device beside a batch: weights, gradients, optimizer state, and the companion.
        sample_bytes: What the mean sample of a micro-batch adds.
        largest_bytes: What the largest sample adds.
        step_seconds: Of a step, for one sample.
        once_seconds: Of what is done once, before training.
        disk_bytes: What is kept on disk.
    """

    placement: str
    base_bytes: float
    sample_bytes: float
    largest_bytes: float
    step_seconds: float
    once_seconds: float = 0.0
    disk_bytes: int = 0

    def seconds(self, samples: int) -> float:
        """Returns how long a training takes in which so many samples are seen, repetitions counted."""
        return self.once_seconds + self.step_seconds * samples

    def fits(self, capacity_bytes: float) -> bool:
        """Tells whether the largest sample fits by itself."""
        return self.base_bytes + self.largest_bytes <= capacity_bytes


def choose_placement(costs: Sequence[PlacementCost], *, capacity_bytes: float, samples: int) -> PlacementCost:
    """Chooses the fastest placement that fits; of those that are about as fast, the first; where none fits, the one
    that needs least.

    >>> near = PlacementCost(placement="device", base_bytes=80, sample_bytes=1, largest_bytes=9, step_seconds=1.0)
    >>> disk = PlacementCost(placement="cache", base_bytes=8, sample_bytes=1, largest_bytes=2, step_seconds=0.5,
    ...                      once_seconds=40.0)
    >>> [choose_placement([near, disk], capacity_bytes=100, samples=n).placement for n in (10, 1000)]
    ['device', 'cache']
    >>> choose_placement([near, disk], capacity_bytes=20, samples=10).placement
    'cache'

    Args:
        costs: At least one.
        capacity_bytes: Of the device.
        samples: That the training sees, repetitions counted.
    """
    fitting = [cost for cost in costs if cost.fits(capacity_bytes)]
    if not fitting:
        return min(costs, key=lambda cost: cost.base_bytes + cost.largest_bytes)
    quickest = min(cost.seconds(samples) for cost in fitting)
    return next(cost for cost in fitting if cost.seconds(samples) <= quickest * (1 + ALIKE))


_HOST = torch.device("cpu")


class FromDevice:
    """Answers of a companion that stays on the device.

    Args:
        companion: The companion.
        meter: Of the device.
        dtype: Of its weights there.

    Attributes:
        model: Its copy on the device.
    """

    def __init__(self, companion: Companion, meter: Meter, dtype: torch.dtype) -> None:
        self._companion = companion
        self._device = meter.device
        self._dtype = dtype
        # A copy even where the device is the host: memory that a simulated GPU sees is memory that is made.
        with meter.active():
            self.model: nn.Module = deepcopy(companion.model).to(meter.device, dtype)

    @property
    def resident(self) -> Sequence[Tensor]:
        """What stays on the device."""
        return [*self.model.parameters(), *self.model.buffers()]

    def __call__(self, rows: NDArray[np.int64]) -> Mapping[str, Tensor]:
        """Asks the model on the device; in full precision, so that answers are the same wherever they come from."""
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return self._companion.answer(self.model, rows, self._device, self._dtype)


class FromHost:
    """Answers of a companion that stays, and computes, on the host.

    Args:
        companion: The companion.
        meter: Of the device that the answers go to.
    """

    resident: Sequence[Tensor] = ()

    def __init__(self, companion: Companion, meter: Meter) -> None:
        self._companion = companion
        self._meter = meter
        # As its run trained it: weights of double precision take no features of single precision.
        self._dtype = next(companion.model.parameters()).dtype

    def __call__(self, rows: NDArray[np.int64]) -> Mapping[str, Tensor]:
        """Asks the model on the host."""
        with self._meter.host(), torch.no_grad(), torch.autocast(self._meter.device.type, enabled=False):
            answers = self._companion.answer(self._companion.model, rows, _HOST, self._dtype)
        return {name: answer.to(self._meter.device, copy=True) for name, answer in answers.items()}


class FromTable:
    """Answers that are looked up.

    Args:
        companion: The companion.
        device: Where they go to.
        table: By output, one row after another for each of the companion's samples.

    Attributes:
        table: As given.
    """

    resident: Sequence[Tensor] = ()

    def __init__(self, companion: Companion, device: torch.device, table: Mapping[str, NDArray[np.float32]]) -> None:
        self._companion = companion
        self._device = device
        self.table = table
        self._rows = companion.rows
        self._ptr = {
            name: np.concatenate([[0], np.cumsum(lengths)])
            for name, lengths in companion.lengths(companion.rows).items()
        }

    @classmethod
    def blank(cls, companion: Companion, device: torch.device) -> "FromTable":
        """Answers of the right shape that say nothing, for a plan."""
        lengths = companion.lengths(companion.rows)
        # One zero that is seen everywhere: no memory is taken.
        table = {
            name: np.broadcast_to(np.float32(0), (int(lengths[name].sum()), width))
            for name, width in companion.widths.items()
        }
        return cls(companion, device, table)

    def __call__(self, rows: NDArray[np.int64]) -> Mapping[str, Tensor]:
        """Looks up the answers for some of the companion's samples."""
        positions = np.searchsorted(self._rows, rows)
        return {name: self._taken(name, positions).to(self._device, copy=True) for name in self.table}

    def with_table(self, table: Mapping[str, NDArray[np.float32]]) -> "FromTable":
        """Returns other answers for the same samples."""
        return FromTable(self._companion, self._device, table)

    def checksum(self) -> int:
        """Returns a number that other answers, most likely, do not have."""
        checksum = 0
        for name in sorted(self.table):
            checksum = zlib.crc32(np.ascontiguousarray(self.table[name]).data, checksum)
        return checksum

    def _taken(self, name: str, positions: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.table[name].take(members(self._ptr[name], positions).positions, axis=0))


def read_answers(folder: Path, companion: Companion, reporter: Reporter) -> dict[str, Any] | None:
    """Maps answers that were written down; None where there are none, or damaged ones, which are removed."""
    if not folder.is_dir():
        return None
    try:
        table, _ = read_arrays(folder, list(companion.widths))
    except FolderDamageError as damage:
        reporter.notice(f"The {companion.role}'s answers in {folder} are damaged and are made again: {damage}")
        discard_folder(folder)
        return None
    return table


class AnswerBook:
    """Writes answers down, sample after sample, as a context manager.

    Args:
        folder: Where they will be; it appears when they are complete.
        companion: Whose they are.
    """

    def __init__(self, folder: Path, companion: Companion) -> None:
        kinds = {name: ("float32", (width,)) for name, width in companion.widths.items()}
        self._writer = ArrayWriter(folder, kinds)

    def __enter__(self) -> "AnswerBook":
        self._writer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._writer.__exit__(*error)

    def add(self, answers: Mapping[str, Tensor]) -> None:
        """Adds the answers for the samples that follow.

        Raises:
            StateError: The folder cannot be written.
        """
        self._writer.append({name: answer.float().cpu().numpy() for name, answer in answers.items()})

    def finish(self) -> dict[str, Any]:
        """Completes them and maps them.

        Raises:
            StateError: The folder cannot be written.
        """
        return self._writer.finish({})


_STEERING: Final = ("in_epoch", "before_step")
"""What a task has where answers steer what all ranks do alike, not only what each computes of its share."""


Source = FromDevice | FromHost | FromTable
"""What answers for a companion."""


@dataclass(frozen=True, kw_only=True)
class CompanionPlan:
    """How a companion is asked.

    Attributes:
        role: What it is to the task.
        name: The run that trained it.
        placement: Where its answers come from.
        costs: What each way costs that was measured.
        peak_bytes: Predicted peak of asking it once; None where it is not.
    """

    role: str
    name: str
    placement: str
    costs: tuple[PlacementCost, ...] = ()
    peak_bytes: float | None = None

    def on(self, capacity_bytes: float, *, samples: int) -> "CompanionPlan":
        """Chooses anew where the answers come from, for a device of another capacity (see `choose_placement`)."""
        if not self.costs:
            return self
        chosen = choose_placement(self.costs, capacity_bytes=capacity_bytes, samples=samples)
        return replace(self, placement=chosen.placement)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "CompanionPlan":
        """Reads what `dataclasses.asdict` made, also after JSON."""
        return cls(**{**plain, "costs": tuple(PlacementCost(**cost) for cost in plain["costs"])})


def companions_of(task: Task) -> Sequence[Companion]:
    """Lists a task's companions."""
    return getattr(task, "companions", ())


@dataclass(kw_only=True)
class Companions:
    """A task's companions on one device.

    Attributes:
        task: Whose they are; it is told their answers.
        training: Settings of the run.
        meter: Of the device.
        reporter: Where progress and notices go.
        cache: Folder where answers are kept for later runs.
        verify: Whether the device is at hand; else all is predicted and nobody is asked.
        ranks: The processes that train the run.
    """

    task: Task
    training: TrainingSettings
    meter: Meter
    reporter: Reporter
    cache: Path
    verify: bool = True
    ranks: Ranks = field(default_factory=Ranks)
    _scoring: dict[str, Scoring] = field(default_factory=dict)

    def decide(self, model: nn.Module) -> list[CompanionPlan]:
        """Decides where the answers of each come from; measures where there is a choice.

        Args:
            model: That is to be trained, on the device.
        """
        generators = random_state.capture()
        plans = [self._decided(companion, model) for companion in companions_of(self.task) if companion.placements]
        random_state.restore(generators)
        return plans

    def listen(self, plans: Sequence[CompanionPlan]) -> tuple[list[CompanionPlan], list[Tensor]]:
        """Has the task told the answers, from where the plans say, on all ranks.

        Returns:
            The plans, with what asking was predicted to take; and the tensors that stay on the device.

        Raises:
            DoesNotFitError: A single sample does not fit.
            StateError: Answers can be kept nowhere.
            RankFailedError: So it is on another rank.
        """
        # What rank 0 has written down the others need not ask.
        asked = self.ranks.first_then_others(lambda: [self._answering(plan) for plan in plans])
        if self.ranks.size > 1 and any(hasattr(self.task, name) for name in _STEERING):
            asked = [(plan, self._same_on_all(answers)) for plan, answers in asked]
        return self.ranks.each(lambda: self._tell(asked))

    def rehearse(self, plans: Sequence[CompanionPlan]) -> list[Tensor]:
        """Has the task told answers from where the plans say, in a plan: those from disk say nothing.

        Returns:
            The tensors that stay on the device.
        """
        return self._tell([(plan, self._source(self._of(plan.role), plan.placement)) for plan in plans])[1]

    def score(self, role: str, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Scores samples with a companion, in parts that fit."""
        companion = self._of(role)
        if role in self._scoring:
            return self._scoring[role](companion, rows)

        def scored(place: Place) -> tuple[Scoring, NDArray[np.float64]]:
            scoring = Scoring(self.training, place, lambda samples: None)
            return scoring, scoring(companion, rows)

        self._scoring[role], scores = where_it_fits(self._place, scored, lambda: self._say_host(companion))
        return scores

    def _answering(self, plan: CompanionPlan) -> tuple[CompanionPlan, Source]:
        """Makes what answers from where a plan says; adds to the plan what asking was predicted to take."""
        companion = self._of(plan.role)
        if plan.placement != "cache":
            return plan, self._source(companion, plan.placement)
        table, peak_bytes = self._table(companion)
        # In a run that goes on, an earlier attempt may have asked.
        return replace(plan, peak_bytes=peak_bytes or plan.peak_bytes), FromTable(companion, self.meter.device, table)

    def _same_on_all(self, answers: Source) -> Source:
        """Takes rank 0's answers where another rank has others: where they cannot be kept for all, each asks by itself,
        and devices differ by rounding.
        """
        if not isinstance(answers, FromTable) or len(set(self.ranks.together(answers.checksum))) == 1:
            return answers
        return answers.with_table(self.ranks.first(lambda: answers.table))

    def _tell(self, asked: Sequence[tuple[CompanionPlan, Source]]) -> tuple[list[CompanionPlan], list[Tensor]]:
        resident: list[Tensor] = []
        for plan, answers in asked:
            self.task.listen(plan.role, answers)  # type: ignore[attr-defined]
            resident += answers.resident
        return [plan for plan, _ in asked], resident

    def _of(self, role: str) -> Companion:
        return next(one for one in companions_of(self.task) if one.role == role)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of models on the device."""
        return Precision.named(self.training.precision).dtype

    def _decided(self, companion: Companion, model: nn.Module) -> CompanionPlan:
        # On the host itself a companion that stays there is one that stays on the device.
        is_host = isinstance(self.meter, CpuMeter) and not isinstance(self.meter, TargetMeter)
        ways = [way for way in companion.placements if way != "offload" or not is_host] or companion.placements
        plan = CompanionPlan(role=companion.role, name=companion.name, placement=ways[0])
        if len(ways) == 1:
            return plan
        with self.reporter.stage(f"placing the {companion.role}", unit="ways") as stage:
            costs: list[PlacementCost] = []
            for placement in ways:
                costs += self._cost_if_it_fits(companion, placement, model)
                stage.advance(1)
        if not costs:
            # Planning says what does not fit, of the way that needs least.
            return replace(plan, placement="cache" if "cache" in ways else plan.placement)
        measured = replace(plan, costs=tuple(costs))
        return measured.on(self.meter.capacity_bytes, samples=len(self.task.train_rows) * self.training.epochs)

    def _cost_if_it_fits(self, companion: Companion, placement: str, model: nn.Module) -> list[PlacementCost]:
        """Measures what one way costs; nothing where it does not fit."""
        with OutOfMemoryEndsQuietly():
            try:
                return [self._cost(companion, placement, model)]
            except DoesNotFitError:
                pass
        self.meter.release()
        return []

    def _cost(self, companion: Companion, placement: str, model: nn.Module) -> PlacementCost:
        """Measures what one way costs."""
        answers = self._source(companion, placement)
        self.task.listen(companion.role, answers)  # type: ignore[attr-defined]
        rows = self.task.train_rows
        explorer = Explorer(
            task=self.task, model=model, training=self.training, meter=self.meter, rows=rows,
            tried=lambda cost: None, verify=self.verify, beside=answers.resident,
        )  # fmt: skip
        cost_model, seconds = explorer.step_cost()
        each = self.task.batch_features(rows) @ np.asarray(cost_model.coefficients)
        cost = PlacementCost(
            placement=placement,
            base_bytes=cost_model.base_bytes,
            sample_bytes=float(each.mean()),
            largest_bytes=float(each.max()),
            step_seconds=seconds,
        )
        return self._with_asking(companion, cost) if placement == "cache" else cost

    def _with_asking(self, companion: Companion, cost: PlacementCost) -> PlacementCost:
        """Adds what it takes to write answers down, where that is still to be done."""
        lengths = companion.lengths(companion.rows)
        num_bytes = sum(4 * width * int(lengths[name].sum()) for name, width in companion.widths.items())
        if self._folder(companion).is_dir():
            return replace(cost, disk_bytes=num_bytes)
        source = FromDevice(companion, self.meter, self.dtype)
        work = asking(companion, source.model, source)
        seconds = seconds_a_sample(work, probe(work, self.meter)[0].model, self.meter)
        # What a sample of the data stands for is asked about, too.
        asked = max(len(companion.rows), len(self.task.train_rows))
        return replace(cost, disk_bytes=num_bytes, once_seconds=seconds * asked)

    def _source(self, companion: Companion, placement: str) -> Source:
        """Makes what answers in one way; from disk, what has the shape of an answer."""
        if placement == "device":
            return FromDevice(companion, self.meter, self.dtype)
        if placement == "offload":
            return FromHost(companion, self.meter)
        return FromTable.blank(companion, self.meter.device)

    def _folder(self, companion: Companion) -> Path:
        return self.cache / "answers" / companion.digest

    @property
    def _place(self) -> Place:
        return Place(meter=self.meter, dtype=self.dtype)

    def _say_host(self, companion: Companion) -> None:
        self.reporter.notice(f"The {companion.role} does not fit on the device and is asked on the host")

    def _table(self, companion: Companion) -> tuple[Mapping[str, Any], float | None]:
        """Reads the answers from disk, or asks and writes them down; where they cannot be kept, for this run alone."""
        folder = self._folder(companion)
        table = read_answers(folder, companion, self.reporter)
        if table is not None:
            return table, None
        try:
            return self._asked_somewhere(companion, folder)
        except StateError as error:
            self.reporter.notice(f"The {companion.role}'s answers are not kept. {error}")
        # They are mapped: they stay readable after their files are gone.
        with TemporaryDirectory(prefix="can-train-") as scratch:
            return self._asked_somewhere(companion, Path(scratch) / folder.name)

    def _asked_somewhere(self, companion: Companion, folder: Path) -> tuple[Mapping[str, Any], float]:
        asked = where_it_fits(
            self._place, lambda place: self._asked(place, companion, folder), lambda: self._say_host(companion)
        )
        self.meter.release()
        return asked

    def _asked(self, place: Place, companion: Companion, folder: Path) -> tuple[Mapping[str, Any], float]:
        source = FromDevice(companion, place.meter, place.dtype)
        question = Question(place, companion, source.model, source)
        rows = companion.rows
        stage = self.reporter.stage(f"asking the {companion.role}", total=len(rows), unit="samples")
        with AnswerBook(folder, companion) as book, stage as shown:
            for start in range(0, len(rows), BLOCK):
                block = rows[start : start + BLOCK]
                for answers in question.answers(block):
                    book.add(answers)
                shown.advance(len(block))
            return book.finish(), question.peak_bytes


def keep(path: Path, plans: Sequence[CompanionPlan]) -> None:
    """Writes plans down for later attempts."""
    write_json_atomic(path, [asdict(plan) for plan in plans])


def kept(path: Path, task: Task) -> list[CompanionPlan] | None:
    """Reads the plans of an earlier attempt; None where there are none, or of other companions."""
    try:
        plans = [CompanionPlan.from_plain(plain) for plain in json.loads(path.read_text())]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    asked = [(one.role, one.name) for one in companions_of(task) if one.placements]
    return plans if [(plan.role, plan.name) for plan in plans] == asked else None
