"""Decides where a reference model's answers come from: the fastest way that fits, by what was measured of each."""

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
from can_train.fit.explore import Explorer, probe, seconds_per_sample
from can_train.fit.features import members
from can_train.fit.optimizer import Precision
from can_train.io.arrays import ArrayWriter, FolderDamageError, discard_folder, read_arrays
from can_train.io.atomic import write_json_atomic
from can_train.memory.meters import Meter
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.reporter import Reporter
from can_train.task import ReferenceModel, Task
from can_train.training.distributed import Ranks
from can_train.training.inference import BLOCK, BatchedInference, Place, Scoring, asking, with_host_fallback

ALIKE: Final = 0.05
"""Relative difference of two times that says nothing: they were measured on a machine that does other things too."""


@dataclass(frozen=True, kw_only=True)
class PlacementCost:
    """What one way of getting a reference model's answers costs.

    Attributes:
        placement: `device`, `cache` or `offload`.
        base_bytes: What is on the device beside a batch: weights, gradients, optimizer state, and the reference model.
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
    """Answers of a reference model that stays on the device.

    Args:
        reference model: The reference model.
        meter: Of the device.
        dtype: Of its weights there.

    Attributes:
        model: Its copy on the device.
    """

    def __init__(self, reference_model: ReferenceModel, meter: Meter, dtype: torch.dtype) -> None:
        self._reference_model = reference_model
        self._device = meter.device
        self._dtype = dtype
        # A copy even where the device is the host: memory that a simulated GPU sees is memory that is made.
        with meter.active():
            self.model: nn.Module = deepcopy(reference_model.model).to(meter.device, dtype)

    @property
    def resident(self) -> Sequence[Tensor]:
        """What stays on the device."""
        return [*self.model.parameters(), *self.model.buffers()]

    def __call__(self, rows: NDArray[np.int64]) -> Mapping[str, Tensor]:
        """Asks the model on the device; in full precision, so that answers are the same wherever they come from."""
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return self._reference_model.outputs(self.model, rows, self._device, self._dtype)


class FromHost:
    """Answers of a reference model that stays, and computes, on the host.

    Args:
        reference model: The reference model.
        meter: Of the device that the answers go to.
    """

    resident: Sequence[Tensor] = ()

    def __init__(self, reference_model: ReferenceModel, meter: Meter) -> None:
        self._reference_model = reference_model
        self._meter = meter
        # As its run trained it: weights of double precision take no features of single precision.
        self._dtype = next(reference_model.model.parameters()).dtype

    def __call__(self, rows: NDArray[np.int64]) -> Mapping[str, Tensor]:
        """Asks the model on the host."""
        with self._meter.host(), torch.no_grad(), torch.autocast(self._meter.device.type, enabled=False):
            answers = self._reference_model.outputs(self._reference_model.model, rows, _HOST, self._dtype)
        return {name: answer.to(self._meter.device, copy=True) for name, answer in answers.items()}


class CachedOutputs:
    """Answers that are looked up.

    Args:
        reference model: The reference model.
        device: Where they go to.
        table: By output, one row after another for each of the reference model's samples.

    Attributes:
        table: As given.
    """

    resident: Sequence[Tensor] = ()

    def __init__(
        self, reference_model: ReferenceModel, device: torch.device, table: Mapping[str, NDArray[np.float32]]
    ) -> None:
        self._reference_model = reference_model
        self._device = device
        self.table = table
        self._rows = reference_model.rows
        self._ptr = {
            name: np.concatenate([[0], np.cumsum(lengths)])
            for name, lengths in reference_model.lengths(reference_model.rows).items()
        }

    @classmethod
    def blank(cls, reference_model: ReferenceModel, device: torch.device) -> "CachedOutputs":
        """Answers of the right shape that say nothing, for a plan."""
        lengths = reference_model.lengths(reference_model.rows)
        # One zero that is seen everywhere: no memory is taken.
        table = {
            name: np.broadcast_to(np.float32(0), (int(lengths[name].sum()), width))
            for name, width in reference_model.widths.items()
        }
        return cls(reference_model, device, table)

    def __call__(self, rows: NDArray[np.int64]) -> Mapping[str, Tensor]:
        """Looks up the answers for some of the reference model's samples."""
        positions = np.searchsorted(self._rows, rows)
        return {name: self._taken(name, positions).to(self._device, copy=True) for name in self.table}

    def with_table(self, table: Mapping[str, NDArray[np.float32]]) -> "CachedOutputs":
        """Returns other answers for the same samples."""
        return CachedOutputs(self._reference_model, self._device, table)

    def checksum(self) -> int:
        """Returns a number that other answers, most likely, do not have."""
        checksum = 0
        for name in sorted(self.table):
            checksum = zlib.crc32(np.ascontiguousarray(self.table[name]).data, checksum)
        return checksum

    def _taken(self, name: str, positions: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self.table[name].take(members(self._ptr[name], positions).positions, axis=0))


def read_answers(folder: Path, reference_model: ReferenceModel, reporter: Reporter) -> dict[str, Any] | None:
    """Maps answers that were written down; None where there are none, or damaged ones, which are removed."""
    if not folder.is_dir():
        return None
    try:
        table, _ = read_arrays(folder, list(reference_model.widths))
    except FolderDamageError as damage:
        reporter.notice(f"The {reference_model.role}'s answers in {folder} are damaged and are made again: {damage}")
        discard_folder(folder)
        return None
    return table


class AnswerBook:
    """Writes answers down, sample after sample, as a context manager.

    Args:
        folder: Where they will be; it appears when they are complete.
        reference model: Whose they are.
    """

    def __init__(self, folder: Path, reference_model: ReferenceModel) -> None:
        kinds = {name: ("float32", (width,)) for name, width in reference_model.widths.items()}
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


Source = FromDevice | FromHost | CachedOutputs
"""What answers for a reference model."""


@dataclass(frozen=True, kw_only=True)
class ReferenceModelPlan:
    """How a reference model is asked.

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

    def on(self, capacity_bytes: float, *, samples: int) -> "ReferenceModelPlan":
        """Chooses anew where the answers come from, for a device of another capacity (see `choose_placement`)."""
        if not self.costs:
            return self
        chosen = choose_placement(self.costs, capacity_bytes=capacity_bytes, samples=samples)
        return replace(self, placement=chosen.placement)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "ReferenceModelPlan":
        """Reads what `dataclasses.asdict` made, also after JSON."""
        return cls(**{**plain, "costs": tuple(PlacementCost(**cost) for cost in plain["costs"])})


@dataclass(kw_only=True)
class ReferenceModels:
    """A task's reference models on one device.

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

    def decide(self, model: nn.Module) -> list[ReferenceModelPlan]:
        """Decides where the answers of each come from; measures where there is a choice.

        Args:
            model: That is to be trained, on the device.
        """
        generators = random_state.capture()
        plans = [
            self._decided(reference_model, model)
            for reference_model in self.task.reference_models()
            if reference_model.placements
        ]
        random_state.restore(generators)
        return plans

    def bind_outputs(self, plans: Sequence[ReferenceModelPlan]) -> tuple[list[ReferenceModelPlan], list[Tensor]]:
        """Has the task told the answers, from where the plans say, on all ranks.

        Returns:
            The plans, with what asking was predicted to take; and the tensors that stay on the device.

        Raises:
            DoesNotFitError: A single sample does not fit.
            StateError: Answers can be kept nowhere.
            RankFailedError: So it is on another rank.
        """
        # What rank 0 has written down the others need not ask.
        asked = self.ranks.on_rank0_first(lambda: [self._answering(plan) for plan in plans])
        if self.ranks.size > 1:
            asked = [(plan, self._same_on_all(answers)) for plan, answers in asked]
        return self.ranks.on_every_rank(lambda: self._tell(asked))

    def rehearse(self, plans: Sequence[ReferenceModelPlan]) -> list[Tensor]:
        """Has the task told answers from where the plans say, in a plan: those from disk say nothing.

        Returns:
            The tensors that stay on the device.
        """
        return self._tell([(plan, self._source(self._of(plan.role), plan.placement)) for plan in plans])[1]

    def score(self, role: str, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Scores samples with a reference model, in parts that fit."""
        reference_model = self._of(role)
        if role in self._scoring:
            return self._scoring[role](reference_model, rows)

        def scored(place: Place) -> tuple[Scoring, NDArray[np.float64]]:
            scoring = Scoring(self.training, place, lambda samples: None)
            return scoring, scoring(reference_model, rows)

        self._scoring[role], scores = with_host_fallback(self._place, scored, lambda: self._say_host(reference_model))
        return scores

    def _answering(self, plan: ReferenceModelPlan) -> tuple[ReferenceModelPlan, Source]:
        """Makes what answers from where a plan says; adds to the plan what asking was predicted to take."""
        reference_model = self._of(plan.role)
        if plan.placement != "cache":
            return plan, self._source(reference_model, plan.placement)
        table, peak_bytes = self._table(reference_model)
        # In a run that goes on, an earlier attempt may have asked.
        return replace(plan, peak_bytes=peak_bytes or plan.peak_bytes), CachedOutputs(
            reference_model, self.meter.device, table
        )

    def _same_on_all(self, answers: Source) -> Source:
        """Takes rank 0's answers where another rank has others: where they cannot be kept for all, each asks by itself,
        and devices differ by rounding.
        """
        if not isinstance(answers, CachedOutputs) or len(set(self.ranks.gather(answers.checksum))) == 1:
            return answers
        return answers.with_table(self.ranks.on_rank0(lambda: answers.table))

    def _tell(
        self, asked: Sequence[tuple[ReferenceModelPlan, Source]]
    ) -> tuple[list[ReferenceModelPlan], list[Tensor]]:
        resident: list[Tensor] = []
        for plan, answers in asked:
            self.task.bind_outputs(plan.role, answers)
            resident += answers.resident
        return [plan for plan, _ in asked], resident

    def _of(self, role: str) -> ReferenceModel:
        return next(one for one in self.task.reference_models() if one.role == role)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of models on the device."""
        return Precision.named(self.training.precision).dtype

    def _decided(self, reference_model: ReferenceModel, model: nn.Module) -> ReferenceModelPlan:
        # On the host itself a reference model that stays there is one that stays on the device.
        ways = [
            way for way in reference_model.placements if way != "offload" or not self.meter.is_host
        ] or reference_model.placements
        plan = ReferenceModelPlan(role=reference_model.role, name=reference_model.name, placement=ways[0])
        if len(ways) == 1:
            return plan
        with self.reporter.stage(f"placing the {reference_model.role}", unit="ways") as stage:
            costs: list[PlacementCost] = []
            for placement in ways:
                costs += self._cost_if_it_fits(reference_model, placement, model)
                stage.advance(1)
        if not costs:
            # Planning says what does not fit, of the way that needs least.
            return replace(plan, placement="cache" if "cache" in ways else plan.placement)
        measured = replace(plan, costs=tuple(costs))
        return measured.on(self.meter.capacity_bytes, samples=len(self.task.train_rows) * self.training.epochs)

    def _cost_if_it_fits(
        self, reference_model: ReferenceModel, placement: str, model: nn.Module
    ) -> list[PlacementCost]:
        """Measures what one way costs; nothing where it does not fit."""
        with CatchOutOfMemory():
            try:
                return [self._cost(reference_model, placement, model)]
            except DoesNotFitError:
                pass
        self.meter.release()
        return []

    def _cost(self, reference_model: ReferenceModel, placement: str, model: nn.Module) -> PlacementCost:
        """Measures what one way costs."""
        answers = self._source(reference_model, placement)
        self.task.bind_outputs(reference_model.role, answers)
        rows = self.task.train_rows
        explorer = Explorer(
            task=self.task, model=model, training=self.training, meter=self.meter, rows=rows,
            verify=self.verify, reference_tensors=answers.resident,
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
        return self._with_asking(reference_model, cost) if placement == "cache" else cost

    def _with_asking(self, reference_model: ReferenceModel, cost: PlacementCost) -> PlacementCost:
        """Adds what it takes to write answers down, where that is still to be done."""
        lengths = reference_model.lengths(reference_model.rows)
        num_bytes = sum(4 * width * int(lengths[name].sum()) for name, width in reference_model.widths.items())
        if self._folder(reference_model).is_dir():
            return replace(cost, disk_bytes=num_bytes)
        source = FromDevice(reference_model, self.meter, self.dtype)
        work = asking(reference_model, source.model, source)
        seconds = seconds_per_sample(work, probe(work, self.meter).model, self.meter)
        # What a sample of the data stands for is asked about, too.
        asked = max(len(reference_model.rows), len(self.task.train_rows))
        return replace(cost, disk_bytes=num_bytes, once_seconds=seconds * asked)

    def _source(self, reference_model: ReferenceModel, placement: str) -> Source:
        """Makes what answers in one way; from disk, what has the shape of an answer."""
        if placement == "device":
            return FromDevice(reference_model, self.meter, self.dtype)
        if placement == "offload":
            return FromHost(reference_model, self.meter)
        return CachedOutputs.blank(reference_model, self.meter.device)

    def _folder(self, reference_model: ReferenceModel) -> Path:
        return self.cache / "answers" / reference_model.digest

    @property
    def _place(self) -> Place:
        return Place(meter=self.meter, dtype=self.dtype)

    def _say_host(self, reference_model: ReferenceModel) -> None:
        self.reporter.notice(f"The {reference_model.role} does not fit on the device and is asked on the host")

    def _table(self, reference_model: ReferenceModel) -> tuple[Mapping[str, Any], float | None]:
        """Reads the answers from disk, or asks and writes them down; where they cannot be kept, for this run alone."""
        folder = self._folder(reference_model)
        table = read_answers(folder, reference_model, self.reporter)
        if table is not None:
            return table, None
        try:
            return self._asked_somewhere(reference_model, folder)
        except StateError as error:
            self.reporter.notice(f"The {reference_model.role}'s answers are not kept. {error}")
        # They are mapped: they stay readable after their files are gone.
        with TemporaryDirectory(prefix="can-train-") as scratch:
            return self._asked_somewhere(reference_model, Path(scratch) / folder.name)

    def _asked_somewhere(self, reference_model: ReferenceModel, folder: Path) -> tuple[Mapping[str, Any], float]:
        asked = with_host_fallback(
            self._place,
            lambda place: self._asked(place, reference_model, folder),
            lambda: self._say_host(reference_model),
        )
        self.meter.release()
        return asked

    def _asked(self, place: Place, reference_model: ReferenceModel, folder: Path) -> tuple[Mapping[str, Any], float]:
        source = FromDevice(reference_model, place.meter, place.dtype)
        question = BatchedInference(place, reference_model, source.model, source)
        rows = reference_model.rows
        stage = self.reporter.stage(f"asking the {reference_model.role}", total=len(rows), unit="samples")
        with AnswerBook(folder, reference_model) as book, stage as shown:
            for start in range(0, len(rows), BLOCK):
                block = rows[start : start + BLOCK]
                for answers in question.answers(block):
                    book.add(answers)
                shown.advance(len(block))
            return book.finish(), question.peak_bytes


def keep(path: Path, plans: Sequence[ReferenceModelPlan]) -> None:
    """Writes plans down for later attempts."""
    write_json_atomic(path, [asdict(plan) for plan in plans])


def kept(path: Path, task: Task) -> list[ReferenceModelPlan] | None:
    """Reads the plans of an earlier attempt; None where there are none, or of other reference models."""
    try:
        plans = [ReferenceModelPlan.from_plain(plain) for plain in json.loads(path.read_text())]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    asked = [(one.role, one.name) for one in task.reference_models() if one.placements]
    return plans if [(plan.role, plan.name) for plan in plans] == asked else None
