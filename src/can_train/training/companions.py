"""The companions of a run: decides where the answers of each come from, asks those that are asked once, through the
engine and within limits of their own, and scores with them. What is asked is the task's matter.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.training import TrainingSettings
from can_train.engine.ranks import Ranks
from can_train.errors import DoesNotFitError, StateError
from can_train.memory.meters import CpuMeter, Meter, TargetMeter
from can_train.memory.out_of_memory import OutOfMemoryEndsQuietly
from can_train.policy.placement import PlacementCost, choose_placement
from can_train.reporter import Reporter
from can_train.state.atomic import write_json_atomic
from can_train.training import randomness
from can_train.training.answers import AnswerBook, FromDevice, FromHost, FromTable, read_answers
from can_train.training.asking import BLOCK, Place, Question, asking, where_it_fits
from can_train.training.exploring import Explorer
from can_train.training.optimization import Precision
from can_train.training.passes import probe, seconds_a_sample
from can_train.training.scoring import Scoring
from can_train.training.task import Companion, Task

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
        generators = randomness.capture()
        plans = [self._decided(companion, model) for companion in companions_of(self.task) if companion.placements]
        randomness.restore(generators)
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
