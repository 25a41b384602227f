"""The batches of a training framework's own loop. A step runs as it is written; when memory runs out in it, the step is
undone and the batch is computed in parts. The callback for Lightning and the Trainer of transformers are built on it.

Shapes: R samples, F features.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from can_train.adapters.part_values import Kinds, Part, SplitRefusedError, UnjoinableError
from can_train.adapters.step_state import CHANGED, PartStates, StepState, versions_of
from can_train.config.resolved import state_folder
from can_train.config.settings import CHOICES, FactorSettings, check_choice
from can_train.errors import (
    ArgumentError,
    CanTrainError,
    DataError,
    DoesNotFitError,
    StateError,
    check_flags,
    check_functions,
    check_kinds,
    shown,
)
from can_train.factors.observations import ALLOCATOR, Observation, Outcome, next_time
from can_train.factors.observing import AttemptRecord, PlannedMemory, device_of, make_observation, write_observation
from can_train.factors.policies import make_policy
from can_train.factors.store import FactorStore, rule_after
from can_train.fit.batch_dependence import (
    OTHER_DRAWS,
    SPLIT,
    UNREPEATABLE,
    UNREPLACED,
    BatchDependence,
    Comparisons,
    draws_numbers,
    no_dependence,
    percent,
)
from can_train.fit.collate import Rows, leaves, numbers_in, samples_in, select_samples
from can_train.fit.cost_model import DeviceLimits, SearchResult
from can_train.fit.engine import Engine
from can_train.fit.explore import Search, SearchTime, Workload, find_limit
from can_train.fit.factor_rule import UNUSED, Aim, FactorRule, RememberedLimit, RememberedLimits, SafetyFactor
from can_train.fit.micro_batcher import (
    BatchResult,
    Counts,
    Losses,
    MicroBatcher,
    Split,
    rules_of,
    unsplittable_because,
)
from can_train.fit.observed_peaks import ObservedPeaks
from can_train.fit.optimizer_memory import expected_memory
from can_train.fit.packing import BatchCosts, MicroBatchLimit, SplitRules, counts_of, cut
from can_train.fit.pass_state import Snapshot
from can_train.fit.peak_prediction import PeakPrediction
from can_train.fit.rescue import OptimizerReserve, add_to_gradients
from can_train.fit.rungs import Rung
from can_train.fit.search import SizeSearch
from can_train.io.units import size_text
from can_train.memory.allocator_settings import allocator_settings
from can_train.memory.catalogue import predicted_room
from can_train.memory.meters import Meter, device_name, meter_of, tensors_of
from can_train.memory.monitor import INTERVAL, MemoryMonitor
from can_train.memory.out_of_memory import CatchOutOfMemory, is_out_of_memory
from can_train.runs.run_folder import new_run_id

LOSS: Final = "loss"  # The one term that a framework knows
_ROUND_OFF: Final = 1e-9  # Relative difference of a sum of shares from 1 that is round-off
_PHASE: Final = "train"  # Name of a framework's one phase in an observation
_FIRST_READ: Final = 3  # Steps at the beginning whose peaks are all read
_NEWS: Final = 1.05  # A batch of so many times the largest cost that was read is read, too
_BELOW_FAILED: Final = 0.95  # Share of a cost that ran out of memory that micro-batches keep to
_FOREIGN_SHARE: Final = 0.01  # Share of the capacity that may be missing though no other process runs
_LEAK_SHARE: Final = 0.1  # Share of the capacity by which the memory before a batch grows only through a leak
_DREW: Final = 1e-5  # Relative difference of a loss from its parts' losses that is no round-off
# How far the step of a framework's loop may go to fit.
_FITS: Final = [fit for fit in CHOICES["fit"] if fit != "shard"]
_SAME_LIMIT: Final = 0.02  # Relative difference of limits that are not worth a change
_UNLIMITED: Final = "limits that are not kept"  # Told once
LESS: Final = "take an optimizer that keeps less state, a smaller model, or a larger device"
_SMALLER: Final = "Take a smaller batch, or recompute activations in the backward pass (torch.utils.checkpoint)"
# Sentence on parameters that a step changes by itself, such as a moving teacher's.
_MOVES: Final = (
    "Change them once a batch, outside of the step (on_train_batch_end in Lightning, on_step_end of a callback in "
    f"transformers). Or {_SMALLER[0].lower()}{_SMALLER[1:]}"
)
_IN_ROWS: Final = f"Give the tensor a row for each sample, along one dimension. Or {_SMALLER[0].lower()}{_SMALLER[1:]}"
_OWN_FUNCTIONS: Final = (
    "Give LoopSettings(select=..., counts=...): select(batch, rows) takes samples out of a batch, and counts(batch) "
    f"counts them. Or {_SMALLER[0].lower()}{_SMALLER[1:]}"
)

T = TypeVar("T")


def sample_counts(batch: Any) -> Counts:
    """Returns counts of each sample that the memory of a collated batch grows with: nodes and edges in a batch of
    torch_geometric, else the numbers that its tensors hold. Padded samples then count with their padding.
    """
    if hasattr(batch, "num_graphs"):
        edges = torch.bincount(batch.batch[batch.edge_index[0]], minlength=batch.num_graphs)
        return {"nodes": torch.bincount(batch.batch, minlength=batch.num_graphs).cpu(), "edges": edges.cpu()}
    return {"numbers": numbers_in(batch)}


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How a framework's loop is made to fit.

    Attributes:
        device: Meter of the device, or the device: its name, as in `--device`, or a `torch.device`; None: the model's.
        limits: Limits of a micro-batch, as in `MicroBatcher`; None: limits follow from the first out-of-memory, and
            from earlier runs.
        select: Takes samples out of a collated batch: by a slice, or by their positions.
        counts: Counts of each sample that the memory of a collated batch grows with: [R] by name.
        key: Name in the factor store; empty: the framework's and the model's.
        learn: Whether earlier runs are learned from, and this one is recorded.
        state_dir: State folder of the factor store; None: the user's own.
        search: Whether limits are searched for before the first step, with steps of a copy of the model.
        fit: How far a step goes to fit where one sample runs out of memory, as in `MicroBatcher`. The state of the
            framework's optimizers may wait on the host, too.

    Raises:
        ArgumentError: An argument has the wrong type.
        ConfigError: There is no such `fit`.
    """

    device: Meter | str | torch.device | None = None
    limits: DeviceLimits | PeakPrediction | SizeSearch | Split | int | None = None
    select: Callable[[Any, Rows], Any] = select_samples
    counts: Callable[[Any], Counts] = sample_counts
    key: str = ""
    learn: bool = True
    state_dir: str | Path | None = None
    search: bool = False
    fit: str = "auto"

    def __post_init__(self) -> None:
        if self.device is not None and not isinstance(self.device, Meter):
            device_name(self.device)
        if not isinstance(self.limits, PeakPrediction):
            rules_of(self.limits)
        check_functions("select=lambda batch, rows: batch[rows]", select=self.select)
        check_functions('counts=lambda batch: {"tokens": batch["lengths"]}', counts=self.counts)
        check_kinds("a text", str, 'Give key="my_model", or leave it out', key=self.key)
        check_flags(learn=self.learn, search=self.search)
        if self.state_dir is not None:
            check_kinds(
                "a path", (str, os.PathLike), "Give a text or a Path, or leave it out", state_dir=self.state_dir
            )
        check_choice("fit", self.fit, _FITS)

    @classmethod
    def given(cls, settings: object, call: str) -> LoopSettings:
        """Returns the settings that a framework's loop was given, or the defaults where it was given None.

        Args:
            settings: The argument.
            call: How the loop is given settings, with a place for them, for the message.

        Raises:
            ArgumentError: They are something else.
        """
        if settings is None or isinstance(settings, LoopSettings):
            return settings or cls()
        inside = ""
        if isinstance(settings, str | torch.device):
            inside = f"device={json.dumps(str(settings))}"
        elif isinstance(settings, int) and not isinstance(settings, bool):
            inside = f"limits={settings}"
        raise ArgumentError("The settings of a loop are a LoopSettings", value=shown(settings),
                            remedy=f"Give {call.format(f'LoopSettings({inside})')}")  # fmt: skip


LossOf = Callable[[Part], tuple[Tensor, float | None]]
"""Computes the mean loss of a part, and the number of items that it is the mean over; None: the part's samples."""


@dataclass(kw_only=True)
class FrameworkLoop:
    """Computes the batches of somebody else's loop, in parts where they do not fit.

    Attributes:
        framework: Its name, for the factor store.
        model: The module whose parameters are trained, on its device.
        optimizers: The loop's optimizers.
        settings: How it is made to fit.
        remedy: Sentence that tells how to make a batch fit, or its loss exact, where the batch is not split.
        notice: Is given a sentence about the limits that were found.
        objects: Returns objects of the loop that a step changes, whose attributes are undone, too.
        trial_scope: Opens the span of a trial: the loop may record nothing meanwhile.
        search_loss: Makes a copy of the model, and returns it with a function that computes the loss of a batch with
            it; None: the loop cannot search.
        clears: Whether a step may clear gradients at any time: they are not held then, so that their memory is free.
        compares: Whether the first batch that is split is compared with the whole; if not, the adapter does it.
        refused: Why batches are not split, as a clause; empty: they are.
        samples_of: Returns the number of samples that the default `select` sees in a batch; None: `select` is the
            user's own, and the counts define the samples.
        state_stays: Why the state of the optimizers stays on the device, as a clause; empty: it may wait on the host.
    """

    framework: str
    model: nn.Module
    optimizers: Sequence[Optimizer]
    settings: LoopSettings
    remedy: str = ""
    notice: Callable[[str], object] = lambda text: None
    objects: Callable[[], Iterable[Any]] = lambda: ()
    trial_scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    search_loss: Callable[[], tuple[nn.Module, Callable[[Any], Tensor]]] | None = None
    clears: bool = False
    compares: bool = True
    refused: str = ""
    samples_of: Callable[[Any], int] | None = None
    state_stays: str = ""

    def __post_init__(self) -> None:
        if self.settings.select is select_samples:
            self.samples_of = samples_in
        parameters = list(self.model.parameters())
        self.meter = meter_of(self.settings.device, parameters[0].device if parameters else "cpu")
        self.monitor = MemoryMonitor(meter=self.meter, warmup=1)
        self.peaks = ObservedPeaks()
        # A step that clears gradients clears them again when it is computed in parts.
        self.state = StepState(self.model, self.meter.device, self.objects, holds_gradients=not self.clears)
        self.batch_dependence: BatchDependence | None = None
        self.is_sum = False  # Whether the losses of parts add up to the batch's, in place of their mean
        self._engine: Engine | None = None
        self._key = self.settings.key or f"{self.framework}_{type(self.model).__name__}".lower()
        self._limits: DeviceLimits | None = None  # That were searched for
        self._factor: SafetyFactor | None = None
        self._rule = FactorRule(decided=None, aim=Aim(FactorSettings().target))
        self._logical_batch = self._steps = 0
        self._reading: tuple[float, int] | None = None  # Cost and first bytes of the micro-batch that is measured now
        self._first_bytes = 0  # In use before an early step, which has the optimizer's state, without gradients
        self._first_states: list[int] = []  # Bytes of each optimizer's state by then
        self._in_step = False  # Whether `whole` runs now
        self._comparisons = Comparisons()
        self._optimizer_steps = 0
        self._not_undone = ""  # Why a step cannot be undone, as a clause
        self._uncounted = ""  # Why nobody knows the samples of the batch that was counted last, as a clause
        self.told: set[str] = set()  # Warnings of the adapter that were given
        self.kinds = Kinds()  # Of values that the comparison has computed whole and in parts
        state_dir = self.settings.state_dir
        self._store_folder = state_folder(None if state_dir is None else Path(state_dir))
        self._started = next_time(self._store_folder)
        # A simulated GPU holds all that the loop makes from now on.
        self._active = ExitStack()
        self._active.enter_context(self.meter.active(tensors_of([self.model, *self.optimizers])))

    @property
    def engine(self) -> Engine | None:
        """The engine; None while no batch can be split, since the model's passes wait for other ranks, or
        its parameters are not there yet.
        """
        if self._engine is None and not self.refused and not any(map(is_lazy, self.model.parameters())):
            if next(self.model.parameters(), None) is None:
                self.refused, self.remedy = "its model has no parameters", _SMALLER
            elif (refusal := unsplittable_because(self.model)) is None:
                self._engine = self._make_engine()
            else:
                self.refused = f"{refusal.rule[0].lower()}{refusal.rule[1:]} ({refusal.value})"
        return self._engine

    def prepare(self) -> None:
        """Makes the engine before the first batch. Steps of optimizers that begin from now on may keep their state on
        the host.
        """
        _ = self.engine

    def step(
        self,
        batch: Any,
        whole: Callable[[], T],
        in_parts: Callable[[], T],
        *,
        trains: bool = True,
        tries_whole: bool = True,
    ) -> T:
        """Runs the framework's own step. When memory runs out in it, all that it changed is undone, and the batch is
        computed in parts. A batch that is known not to fit is computed in parts at once.

        Args:
            batch: A collated batch.
            whole: Runs the step as it is written, forward and backward.
            in_parts: Computes the batch by `run_parts`, or by `evaluate_parts` where nothing is trained.
            trains: Whether the step trains.
            tries_whole: Whether memory that runs out in `whole` is caught. Where other ranks wait in its passes, it
                cannot be undone; `in_parts` computes all batches then, as long as they may be split.

        Raises:
            DoesNotFitError: Memory ran out, and the batch is not split; or one sample is too much.
        """
        if trains:
            if not self._steps:
                self._begin(batch)
            self._steps += 1
            if self.refused and self.compares:
                self._tell_unlimited(self.refused)
        ran_out, self._not_undone = "", ""
        if not trains:
            # The limits are those of training, and so are the peaks.
            self._end_reading()
            self.monitor.pause()
        if self.refused or (tries_whole and self._fits(batch, trains)):
            tensors = list(leaves(batch))
            versions = versions_of(tensors)
            failed = _WholeStep(self, self._read(batch, trains))
            with failed:
                return whole()
            ran_out = failed.message
            if versions_of(tensors) != versions:
                self._not_undone = "it has changed its batch in place"
            self._record_failure(batch, ran_out, trains)
        else:
            self.state.read()
        while True:
            try:
                result = in_parts()
            except DoesNotFitError as error:
                if (leak := self._leak(error.value)) is not None:
                    raise leak from error
                raise
            except SplitRefusedError as refusal:
                not_undone = self.state.restore()
                if not_undone or (self.refused and ran_out):
                    raise self._refusal(ran_out, not_undone) from refusal.__cause__
                if self.refused:
                    return self.step(batch, whole, in_parts, trains=trains)
            else:
                self._after_parts(trains, failed=bool(ran_out))
                return result

    def _tell_unlimited(self, reason: str) -> None:
        """Tells once that batches stay whole, though limits were given."""
        if self.settings.limits is not None and _UNLIMITED not in self.told:
            self.told.add(_UNLIMITED)
            self.notice(f"Batches are not split, in spite of limits: {reason}.")

    def gradients_aside(self) -> AbstractContextManager[None]:
        """Opens the backward pass of a whole step: gradients of earlier batches are set aside, so that they can be
        restored when memory runs out.
        """
        is_safe = self._in_step and not self.refused
        return self.state.gradients_aside() if is_safe else nullcontext()

    def run_parts(
        self, batch: Any, loss_of: LossOf, *, scale: Callable[[Tensor], Tensor] = lambda loss: loss
    ) -> tuple[Tensor, dict[int, float]]:
        """Adds the gradient of a batch's mean loss to `.grad`, in parts that fit.

        Args:
            batch: A collated batch.
            loss_of: Computes the mean loss of a part. It may run backward by itself, and return a detached loss.
            scale: A gradient scaler's.

        Returns:
            The mean loss, detached, and the weight of each part's mean in it, by the part's first sample.

        Raises:
            DoesNotFitError: One sample is too much.
            SplitRefusedError: The batch depends on being whole; for `step`.
        """
        engine = self.engine
        assert engine is not None, "a batch that is refused is not computed in parts"
        costs = self._costs(self._counts(batch))
        parts = _Parts(self, lambda start, stop: self._part(batch, start, stop, len(costs)), loss_of, costs)
        parameters = list(self.model.parameters())
        # Shares are known once all parts are: the gradient is corrected before earlier batches' is added.
        earlier = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        is_cut = len(engine.batcher.sizes(costs)) > 1
        is_looked_at = is_cut and self._is_looked_at("")
        if is_looked_at:
            with self.meter.host():
                # In manual optimization the optimizers step before all is compared.
                self.state.copy_parameters(self.optimizers if self.clears else ())
        try:
            result = engine.batcher.add_share(parts, costs, denominators={LOSS: 1.0}, scale=scale)
            starts = np.cumsum([0, *result.micro_batches[:-1]]).tolist()
            self._end_reading()
            if len(result.micro_batches) > 1 and not is_cut:
                is_looked_at = self._is_looked_at("")
            if is_looked_at and self.compares:
                with self.noticing_rows(len(costs)):
                    self._compare(parts, result.micro_batches, scale)
        except BaseException:
            for parameter, gradient in earlier:
                parameter.grad = gradient
            raise
        whole = 1.0 if self.is_sum else sum(parts.shares[start] for start in starts)
        shares = dict(zip(starts, result.micro_batches, strict=True)) if self.is_sum else parts.shares
        weights = {start: shares[start] / (len(costs) if self.is_sum else whole) for start in starts}
        try:
            with self.joining():
                parts.states.join(weights, self.kinds)
        except SplitRefusedError:
            for parameter, gradient in earlier:
                parameter.grad = gradient
            raise
        engine.record_result(result, is_counted=self.meter.counts_always)
        self._logical_batch = max(self._logical_batch, len(costs))
        if not math.isclose(whole, 1.0, rel_tol=_ROUND_OFF):
            torch._foreach_div_([one.grad for one in parameters if one.grad is not None], whole)
        add_to_gradients(earlier)
        # On the device: reading it would make the host wait for it.
        loss = torch.stack([parts.losses[start] for start in starts]).sum() / whole
        return loss, weights

    def check_parameters(self, part: Part) -> None:
        """Looks whether the first part of a batch has changed parameters by itself, as steps do that move a teacher:
        every part would change them.

        Raises:
            SplitRefusedError: It has, and the change can be undone. If not, later batches are not split.
        """
        if part.start or part.is_last or part.is_trial:
            return
        with self.meter.host():
            if not self.state.parameters_changed():
                return
        if self.state.has_copies:
            raise self.refuse("its step changes parameters by itself", _MOVES)
        self.refuse("its step has changed parameters by itself, in every part of this batch", _MOVES)

    def share_of(self, part: Part, items: float | None) -> float:
        """Returns the factor of a part's loss, which is a mean over `items` (None: over its samples), in the batch."""
        # Of a trial, the whole and its parts are weighted alike, so that they can be compared.
        if self.is_sum or (part.is_whole and not part.is_trial):
            return 1.0
        return part.share if items is None else items / part.samples

    def evaluate_parts(self, batch: Any, compute: Callable[[Part], T], stage: str = "") -> list[tuple[Part, T]]:
        """Computes something of a batch without gradients, in parts that fit; returns the parts, in order, with it.
        In the first, second, fourth, eighth (and so on) batch of a `stage` that is split, some samples are computed
        whole and in two parts, which shows the kinds of its values. Places of outputs begin with the stage.
        """
        engine = self.engine
        assert engine is not None, "a batch that is refused is not computed in parts"
        costs = self._costs(self._counts(batch))
        states = PartStates(self.state, len(costs))

        def computed(start: int, stop: int) -> tuple[Part, T]:
            part = self._part(batch, start, stop, len(costs))
            states.begin(start)
            states.take_rows(start, stop, self.kinds)
            result = compute(part)
            states.end(start, stop)
            return replace(part, batch=None), result

        parts = engine.batcher.evaluate(computed, costs, self._evaluation_limit(costs))
        if stage and len(parts) > 1 and self._is_looked_at(stage):
            with self.noticing_rows(len(costs)):
                self._look_at(batch, compute, stage, [part for part, _ in parts])
        with self.joining():
            states.join({part.start: part.share for part, _ in parts}, self.kinds)
        return parts

    @contextmanager
    def noticing_rows(self, samples: int) -> Iterator[None]:
        """Opens a span in which values are compared. Where it shows that an attribute has a row for each sample, and it
        had them before the batch, the parts began with the rows of other samples: the batch is computed again.
        """
        known = set(self.kinds.row_dims)
        yield
        if self.kinds.row_dims.keys() - known and self.state.kept_rows(self.kinds, slice(0, 1), samples):
            raise SplitRefusedError

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Opens a span in which values of parts are joined: where they cannot be, batches are not split."""
        try:
            yield
        except UnjoinableError as error:
            raise self.refuse(str(error), _IN_ROWS) from None

    def _look_at(self, batch: Any, compute: Callable[[Part], Any], stage: str, parts: Sequence[Part]) -> None:
        """Learns the kinds of an evaluation's values from as many samples as the largest part has, which fit; from all
        where memory never ran out.
        """
        after = StepState(self.model, self.meter.device, self.objects)
        after.read()
        of_all, outputs = parts[0].samples, dict[tuple[int, int], Any]()
        states = PartStates(self.state, of_all)

        def computed(start: int, stop: int) -> None:
            part = replace(self._part(batch, start, stop, of_all), is_trial=True)
            states.begin(start, metrics_too=False)
            states.take_rows(start, stop, self.kinds)
            outputs[start, stop] = compute(part)
            states.end(start, stop)

        try:
            with self.trial_scope(), torch.no_grad():
                largest = of_all if self.may_have_room else max(part.stop - part.start for part in parts)
                spans = self._learn_kinds(computed, states, largest)
        finally:
            after.restore()
        if spans:
            whole, *others = (outputs[span] for span in spans)
            self.kinds.learn((stage,), whole, others, [stop - start for start, stop in spans[1:]])
            self.kinds.judge()

    def _learn_kinds(
        self, compute: Callable[[int, int], object], states: PartStates, samples: int
    ) -> tuple[tuple[int, int], ...]:
        """Learns the kinds of values from some samples that are computed whole and in two parts, where nothing but
        their kind tells whole and parts apart; fewer, where memory runs out. Returns the spans of whole and parts;
        nothing, where that failed. The values are not judged yet.
        """
        self.kinds.forget()
        tried = [samples >> power for power in range(samples.bit_length() - 1)]
        # Unequal parts, since equal ones hide a mean.
        cuts = ((size, max(size * SPLIT[0] // sum(SPLIT), 1)) for size in tried)
        try:
            for spans in [states.spans] if states.spans else [((0, size), (0, cut), (cut, size)) for size, cut in cuts]:
                with CatchOutOfMemory(), self.meter.active(), no_dependence(self.model):
                    for start, stop in spans:
                        compute(start, stop)
                    states.learn(self.kinds)
                    return spans
                self.meter.release()
        except Exception:  # noqa: BLE001 - a look at the loop must not end it
            pass
        self.kinds.forget()
        return ()

    def before_optimizer_step(self) -> None:
        """Makes room for the state that an optimizer makes in its first step, or keeps it on the host; raises
        DoesNotFitError where there is no room. Where memory never ran out, only states that are known not to fit are
        noticed.
        """
        if (engine := self._engine) is None:
            return
        self._optimizer_steps += 1
        is_first = self._optimizer_steps <= len(self.optimizers)
        if is_first and not engine.reserve.tensors and self._exceeds_room(engine):
            self._leave_state(engine)
        if not (engine.reserve.tensors or engine.batcher.ladder.rung.offload_optimizer):
            return
        try:
            engine.reserve.before_step()
        except DoesNotFitError:
            if not self._leave_state(engine):
                raise
            engine.reserve.before_step()

    def _exceeds_room(self, engine: Engine) -> bool:
        """Tells whether the state of the optimizers, which are PyTorch's, is larger than the room that is left."""
        if not all(type(optimizer).__module__.startswith("torch.optim") for optimizer in self.optimizers):
            return False
        self._expect_state(engine)
        room_bytes = self.meter.capacity_bytes - self.meter.allocated_bytes()
        return self.meter.counts_always and engine.reserve.missing_bytes > room_bytes

    def _expect_state(self, engine: Engine) -> None:
        """Expects the memory that the optimizers will take beside the state that they have by now."""
        on_host = engine.batcher.ladder.rung.offload_optimizer
        engine.reserve.expect(expected_memory(self.optimizers, on_host=on_host), held_bytes=0)

    def _leave_state(self, engine: Engine) -> bool:
        """Keeps the state of the optimizers on the host from now on; tells whether that can be done."""
        ladder = engine.batcher.ladder
        return ladder.leave_state() and self._use_rung(ladder.rung)

    def _use_rung(self, rung: Rung) -> bool:
        """Keeps the state of the optimizers where a rung has it; tells whether there is room for it."""
        engine = self._engine
        assert engine is not None, "a rung is an engine's"
        if rung.offload_optimizer:
            # The ballast stands for the state.
            engine.reserve.tensors.clear()
        if not engine.batcher.keep_states(rung):
            return False
        self._expect_state(engine)
        return True

    def close(self, outcome: Outcome = "ok") -> None:
        """Ends the loop, and records its observation."""
        self._end_reading()
        self.monitor.pause()
        self._active.close()
        engine, self._engine = self._engine, None
        has_measured = self._limits is not None or bool(self.peaks.readings)
        if self.settings.learn and engine is not None and has_measured:
            write_observation(self._store, partial(self._observation, engine, outcome), self.notice)
        self._limits = None

    # The step

    def _begin(self, batch: Any) -> None:
        """Takes over the limit of earlier runs, or searches for one where that was asked for."""
        engine = self.engine
        if engine is None or self.settings.limits is not None or self._counted(batch) is None:
            return
        if self.settings.learn:
            try:
                learned = self._store.learned_rule(self._key, self.meter.key, self._fingerprint())
                self._rule = rule_after(learned, self._rule)
            except StateError as error:
                self.notice(f"Observations of earlier runs cannot be read. {error}")
        if self.settings.search:
            self._search(batch, engine)
        elif self._rule.earlier is not None and _PHASE in self._rule.earlier.phases:
            self.peaks.remembered = self._rule.earlier.phases[_PHASE].training
            self._set_limit()

    def _counted(self, batch: Any) -> Counts | None:
        """Returns the counts of a batch's samples; None where nobody knows its samples."""
        try:
            return self._counts(batch)
        except DataError as error:
            self._uncounted = f"its tensors have no common rows ({error.value})"
        except (AttributeError, TypeError, IndexError, KeyError) as error:
            # Counts of the user's own may know training batches only.
            self._uncounted = f"counts(batch) failed ({type(error).__name__}: {error})"
        return None

    def _counts(self, batch: Any) -> Counts:
        """Returns the counts of a batch's samples; raises ArgumentError where they are of other samples than those that
        the default `select` takes: other rows would be trained on.
        """
        counts = self.settings.counts(batch)
        if self.settings.counts is sample_counts:
            return counts
        example = 'counts=lambda batch: {"tokens": batch["lengths"]}'
        try:
            counted = len(counts_of(counts)[1])
        except ArgumentError as error:
            raise ArgumentError("counts(batch) returns the counts of each sample, by name", value=error.value,
                                remedy=f"Give LoopSettings({example})") from error  # fmt: skip
        if self.samples_of is not None and counted != (samples := self.samples_of(batch)):
            raise ArgumentError(
                f"counts(batch) counts {counted} samples of a batch in which select finds {samples}",
                remedy="Return a count for each sample, by the first dimension of the batch; or give select= as well: "
                       "LoopSettings(select=lambda batch, rows: ..., counts=...)",
            )  # fmt: skip
        return counts

    def _costs(self, counts: Counts) -> BatchCosts:
        """Prices a batch by the counts of its samples."""
        if self._limits is not None:
            return self._limits.priced(counts)
        features, table = counts_of(counts)
        limits = self.settings.limits
        if isinstance(limits, DeviceLimits | PeakPrediction):
            assert self.engine is not None, "limits are of an engine"
            return self.engine.batcher.costs_of(counts)
        if limits is not None or len(features) == 1:
            return BatchCosts.uniform(len(table))
        return BatchCosts(table[:, :-1], features[:-1], np.ones(len(features) - 1))

    def _fits(self, batch: Any, trains: bool) -> bool:
        """Tells whether nothing says that a batch must be split."""
        engine = self.engine
        if engine is None or self.refused or not engine.batcher.is_limited(trains=trains):
            return True
        if (counts := self._counted(batch)) is None:
            self._tell_unlimited(self._uncounted)
            return True
        costs = self._costs(counts)
        limit = None if trains else self._evaluation_limit(costs)
        return len(engine.batcher.sizes(costs, limit, trains=trains)) == 1

    def _evaluation_limit(self, costs: BatchCosts) -> MicroBatchLimit:
        """Returns the limit of a part in evaluation. One that training found does not hold there."""
        is_given = self.settings.limits is not None and self.engine is not None
        return self.engine.batcher.limit_for(costs) if is_given and self.engine is not None else MicroBatchLimit()

    def _read(self, batch: Any, trains: bool) -> int:
        """Reads the state before a whole step, and begins to measure the step where its peak is news; returns the
        samples of the batch, 0 where they are not counted.
        """
        self.state.read()
        is_measured = trains and self.engine is not None and not self.refused and self.meter.counts_always
        if not is_measured or (counts := self._counted(batch)) is None:
            return 0
        costs = self._costs(counts)
        is_news = costs.total > _NEWS * self.peaks.largest_cost
        if is_news or self._steps <= _FIRST_READ or self._steps % INTERVAL == 0:
            self.begin_reading(costs.total)
        self._logical_batch = max(self._logical_batch, len(costs))
        return len(costs)

    def _end_whole(self, samples: int, error: BaseException | None) -> None:
        """Ends a whole step, which is undone where memory ran out in it."""
        self._in_step = False
        if error is None:
            if self._reading is not None and self._engine is not None:
                self._engine.record_result(BatchResult(micro_batches=(samples,), largest_cost=self._reading[0]))
            self._end_reading()
            return
        self._reading = None
        if is_out_of_memory(error):
            self._not_undone = self._not_undone or self.state.restore()

    @property
    def in_whole(self) -> bool:
        """Whether a whole step runs now."""
        return self._in_step

    @property
    def not_undone(self) -> str:
        """Something that the step that runs now has done and that cannot be undone, as a clause; else empty."""
        return self._not_undone

    def cannot_undo(self, reason: str) -> None:
        """Notes that the step that runs now has done something that cannot be undone, as a clause."""
        self._not_undone = reason

    def _record_failure(self, batch: Any, message: str, trains: bool) -> None:
        """Records that memory ran out for a whole batch; raises DoesNotFitError where it cannot be split."""
        engine, self._not_undone, not_undone = self.engine, "", self._not_undone
        counts = self._counted(batch)
        if engine is None or self.refused or not_undone or counts is None:
            self.meter.release()
            raise self._leak(message) or self._refusal(message, not_undone, is_known=counts is not None)
        costs = self._costs(counts)
        engine.batcher.record_failure(costs, trains=trains)
        if trains:
            if self.peaks.failed == math.inf:
                # Peaks that were read until now belong to no limit.
                self.monitor = engine.monitor = MemoryMonitor(meter=self.meter, warmup=1)
                engine.largest_cost = engine.cost_after_rescue = 0.0
                engine.largest_micro_batch = 0
            if self.meter.foreign_bytes() <= _FOREIGN_SHARE * self.meter.capacity_bytes:
                self.peaks.failed = min(self.peaks.failed, costs.total)
            # The optimizer has stepped since the engine was made, and has some of its state or all of it.
            self._expect_state(engine)
            try:
                engine.reserve.hold()
            except DoesNotFitError:
                if not self._leave_state(engine):
                    raise

    def _refusal(self, message: str, not_undone: str = "", *, is_known: bool = True) -> DoesNotFitError:
        """Makes the error of a batch that does not fit and is not split."""
        because, remedy = self.refused or "its model has lazy parameters", self.remedy if self.refused else ""
        if not is_known and not self.refused:
            because, is_own = self._uncounted, self.samples_of is None and self.settings.counts is not sample_counts
            remedy = f"Mend the counts of LoopSettings. {_SMALLER}" if is_own else _OWN_FUNCTIONS
        if not_undone == CHANGED:
            remedy = _MOVES
        if not message:
            return DoesNotFitError(f"A batch that was split cannot be computed again: {not_undone}",
                                   value=f"it is not split: {because}", remedy=remedy or _SMALLER)  # fmt: skip
        rule = f"Memory ran out for a batch that is not split: {because}"
        if not_undone:
            rule = f"Memory ran out in a step that cannot be undone: {not_undone}"
        return DoesNotFitError(rule, value=f"the device said: {message}", remedy=remedy or _SMALLER)

    def _leak(self, message: str) -> DoesNotFitError | None:
        """Makes the error of a loop that keeps more and more memory; None where it does not."""
        self.meter.release()
        if not self._first_bytes:
            return None
        self._add_first_states()
        growths = [now - then for now, then in zip(self._state_bytes(), self._first_states, strict=True)]
        growth_bytes = self.meter.allocated_bytes() - self._gradient_bytes() - self._first_bytes - sum(growths)
        least_bytes = _LEAK_SHARE * self.meter.capacity_bytes
        if max(growths, default=0) > max(least_bytes, growth_bytes):
            grown = int(np.argmax(growths))
            return _state_growth(self.optimizers[grown], growths[grown], self._steps, message)
        if growth_bytes <= least_bytes:
            return None
        hoard = self.state.largest_hoard()
        keeps = f"; {hoard}" if hoard else ""
        return DoesNotFitError(
            f"The memory in use before a batch has grown by {size_text(growth_bytes)} in {self._steps} steps{keeps}",
            value=message, remedy="Keep numbers in place of tensors: loss.item(), or loss.detach().cpu()",
        )  # fmt: skip

    def _add_first_states(self) -> None:
        """Takes state that an optimizer has made in its first step, which may be a late one, for no growth."""
        for place, (now, then) in enumerate(zip(self._state_bytes(), self._first_states, strict=True)):
            if not then:
                self._first_states[place] = now
                self._first_bytes += now

    def _gradient_bytes(self) -> int:
        """Returns the bytes of gradients of earlier batches, which accumulate."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        # A sparse gradient has no bytes of its own.
        dense = [part for one in gradients for part in ((one._indices(), one._values()) if one.is_sparse else (one,))]
        return sum(part.nbytes for part in dense if part.device.type == self.meter.device.type)

    def _state_bytes(self) -> list[int]:
        """Returns the bytes of each optimizer's state on the device, its history included."""
        kind = self.meter.device.type
        states = [leaves(list(optimizer.state.values())) for optimizer in self.optimizers]
        return [sum(tensor.nbytes for tensor in state if tensor.device.type == kind) for state in states]

    def _after_parts(self, trains: bool, *, failed: bool) -> None:
        engine = self.engine
        assert engine is not None, "a batch was split"
        if failed:
            engine.batcher.count_rescue(trains=trains)
        if names := self.kinds.newly_averaged():
            warnings.warn(
                "Of a batch that is split, these values are means of its parts' values, and not the whole batch's: "
                f"{', '.join(names)}.", stacklevel=2,
            )  # fmt: skip
        if names := self.kinds.newly_guessed():
            warnings.warn(
                "Of a batch that is split, these values may not be the whole batch's, since it is not certain whether "
                f"they are totals, means or extremes: {', '.join(names)}.", stacklevel=2,
            )  # fmt: skip
        if trains:
            self._set_limit()
            engine.batcher.stepped()

    def _part(self, batch: Any, start: int, stop: int, samples: int) -> Part:
        whole = stop - start == samples
        try:
            selected = batch if whole else self.settings.select(batch, slice(start, stop))
        except Exception as error:
            if self.samples_of is None or is_out_of_memory(error):
                raise
            # A class of tensors or containers that the default function does not know.
            reason = (
                f"its samples cannot be taken out ({type(error).__name__}: {str(error).partition(chr(10))[0]:.100})"
            )
            raise self.refuse(reason, _OWN_FUNCTIONS) from error
        return Part(batch=selected, start=start, stop=stop, samples=samples)

    def _is_looked_at(self, stage: str) -> bool:
        """Counts a batch of a stage (empty: training) that is split; tells whether it is compared with the whole."""
        return self._comparisons.is_due(stage)

    def _compare(self, parts: _Parts, micro_batches: tuple[int, ...], scale: Callable[[Tensor], Tensor]) -> None:
        """Compares the batch with its parts: the whole batch where memory never ran out, else the largest part, cut in
        two. Gradients are compared as long as they were equal, and the values that a step logs and keeps. Raises
        SplitRefusedError where the batch is not split, or is computed in another way.
        """
        trial = _Parts(self, lambda start, stop: replace(parts.part(start, stop), is_trial=True), parts.loss_of,
                       parts.costs, is_trial=True)  # fmt: skip
        after = StepState(self.model, self.meter.device, self.objects)
        after.read()
        self.monitor.pause()
        earlier, was_sum = self.batch_dependence, self.is_sum
        is_open = earlier is None or (earlier.measured and not earlier.terms)
        losses: list[float] = []

        def compute(start: int, stop: int) -> None:
            losses.append(float(trial(start, stop)[LOSS][0].detach()))

        try:
            with self.trial_scope():
                dependence = self._measured(trial, micro_batches, scale) if is_open or earlier is None else earlier
                if is_open and dependence.measured and not dependence.terms and not dependence.draws:
                    trial.states.learn(self.kinds)
                elif dependence.draws or dependence.modules or not dependence.measured:
                    self._learn_kinds(compute, trial.states, max(micro_batches))
        finally:
            after.restore()
        self.batch_dependence = dependence
        if is_open:
            self._tell(dependence, has_items=trial.has_items)
        if self.is_sum != was_sum:
            raise SplitRefusedError
        is_weighted = len(trial.shares) == len(SPLIT) and not self.is_sum
        # Constants cannot take the place of numbers that NumPy has drawn.
        is_random = len(losses) >= len(SPLIT) + 1 and not math.isclose(
            losses[-3], losses[-2] + losses[-1], rel_tol=_DREW
        )
        self.kinds.judge(list(trial.shares.values()) if is_weighted else None, is_random=is_random)
        self.refuse_unless_made(trial.states)

    def _tell(self, dependence: BatchDependence, *, has_items: bool) -> None:
        """Tells what a comparison has shown; raises SplitRefusedError where the batch is not split. `has_items`: the
        step tells the number of items that its loss is a mean over.
        """
        if dependence is UNREPLACED and not has_items:
            raise self.refuse(UNREPEATABLE)
        if dependence.terms and not dependence.modules:
            # No layer is the reason.
            raise self.refuse(f"cutting it changes its gradient by {percent(dependence.terms[LOSS])}")
        if not dependence.draws or not dependence.measured:
            dependence.warn()
        elif OTHER_DRAWS not in self.told:
            self.told.add(OTHER_DRAWS)
            dependence.warn(OTHER_DRAWS)

    def refuse_unless_made(self, states: PartStates) -> None:
        """Raises SplitRefusedError where later steps may need a tensor that no arithmetic makes of its parts, such as a
        queue of the latest outputs.
        """
        if name := states.not_made(self.kinds):
            raise self.refuse(f"{name}, which its step keeps, is no total, mean or extreme of its parts", _SMALLER)

    def _measured(
        self, trial: _Parts, micro_batches: tuple[int, ...], scale: Callable[[Tensor], Tensor]
    ) -> BatchDependence:
        """Measures the dependence of samples on each other; takes a loss for a sum where that explains it. Where random
        numbers or normalising layers hide how a loss adds up, samples have the same numbers in their part as in the
        batch, and running statistics take the place of the batch's.
        """
        assert self.engine is not None, "a batch was split"
        measure = partial(self.engine.batcher.measure_dependence, trial, micro_batches, scale=scale,
                          has_room=self.may_have_room)  # fmt: skip
        dependence = self._as_mean_or_sum(measure)
        draws = bool(dependence.terms) and self._draws(trial)
        if not draws and not dependence.modules:
            return dependence
        alike = self._as_mean_or_sum(partial(measure, draws_alike=True))
        if draws and (not alike.measured or (alike.terms and self._draws(trial, draws_alike=True))):
            return UNREPLACED
        # A layer that normalises is told, and not its random numbers.
        return dependence if dependence.modules else replace(alike, draws=True)

    def _as_mean_or_sum(self, measure: Callable[[], BatchDependence]) -> BatchDependence:
        """Returns what a comparison measures; takes the loss for a sum where it is no mean."""
        dependence = measure()
        if dependence.terms and not self.is_sum:
            self.is_sum = True
            summed = measure()
            if summed.measured and not summed.terms:
                return summed
            self.is_sum = False
        return dependence

    @property
    def may_have_room(self) -> bool:
        """Whether a whole batch may fit: a limit of the user's own need not be where memory ends."""
        return self.settings.limits is not None and self._engine is not None and not self._engine.batcher.ooms_rescued

    def _draws(self, trial: _Parts, *, draws_alike: bool = False) -> bool:
        """Tells whether other random numbers change the gradient of a trial's samples."""
        samples = trial.largest
        while samples > 1:
            with CatchOutOfMemory():
                return draws_numbers(self.model, trial, samples, draws_alike=draws_alike)
            # Two gradients are there at once.
            self.meter.release()
            samples //= 2
        return False

    def refuse(self, reason: str, remedy: str = "") -> SplitRefusedError:
        """Ends the splitting of batches, and tells why; returns the error that ends the parts of the batch."""
        self.refused, self.remedy = reason, remedy or self.remedy
        self.told.add(_UNLIMITED)
        subject = reason.replace("it ", "one ", 1) if reason.startswith("cutting it ") else reason
        warnings.warn(f"Batches are not split: {subject}. {self.remedy or _SMALLER}.", stacklevel=2)
        return SplitRefusedError()

    # Limits

    def _make_engine(self) -> Engine:
        fit = self.settings.fit
        if self.state_stays and fit in ("offload-optimizer", "offload-all"):
            raise ArgumentError(f"The optimizer's state stays on the device: {self.state_stays}",
                                value=f"fit={fit!r}", remedy="Give LoopSettings(fit='offload')")  # fmt: skip
        batcher = MicroBatcher(self.model, meter=self.meter, limits=self.settings.limits, fit=fit,
                               optimizers=() if self.state_stays else self.optimizers)  # fmt: skip
        batcher.use_rung = self._use_rung
        needs = expected_memory(self.optimizers, on_host=batcher.ladder.rung.offload_optimizer)
        reserve = OptimizerReserve(needs, self.meter)
        reserve.remedy = LESS
        engine = Engine(meter=self.meter, monitor=self.monitor, batcher=batcher, reserve=reserve)
        batcher.watch(self._after_oom)
        return engine

    def _after_oom(self) -> None:
        # What others hold may be gone for the next batch.
        is_alone = self.meter.foreign_bytes() <= _FOREIGN_SHARE * self.meter.capacity_bytes
        if self._reading is not None and is_alone:
            self.peaks.failed = min(self.peaks.failed, self._reading[0])
        self._reading = None
        if self._engine is not None:
            self._engine.record_rescue()

    def begin_reading(self, cost: float) -> None:
        """Begins to measure a micro-batch, and ends the measurement of the one before it."""
        self._end_reading()
        if self.meter.counts_always:
            # Opens the monitor's run at the first step, and keeps the peaks so far.
            with self.monitor.step():
                self._reading = (cost, self.meter.allocated_bytes())
            if self._steps == _FIRST_READ and not self._first_bytes:
                self._first_states = self._state_bytes()
                self._first_bytes = self._reading[1] - self._gradient_bytes()
            elif not all(self._first_states):
                self._add_first_states()

    def _end_reading(self) -> None:
        if self._reading is not None:
            (cost, start_bytes), self._reading = self._reading, None
            self.peaks.add(cost, peak_bytes=self.meter.peak_bytes(), start_bytes=start_bytes)

    def _set_limit(self) -> None:
        """Sets the limit that follows from the peaks so far, once memory ran out, here or in an earlier run."""
        has_failed = self.peaks.failed < math.inf or self.peaks.remembered is not None
        engine, limit = self.engine, self.peaks.limit(self.meter.capacity_bytes)
        if engine is None or limit is None or not has_failed or self._limits or self.settings.limits is not None:
            return
        limits = self._device_limits(limit)
        decided = self._rule.decide(limits)
        self._factor = replace(decided, reason=decided.reason.replace("from the probes", "from the steps so far"))
        # The line may promise that a batch fits that did not.
        safe = min(self._factor.value * limit.tuned_limit, _BELOW_FAILED * self.peaks.failed)
        earlier = engine.batcher.rules.safe_limit
        if safe > 0 and not math.isclose(safe, earlier, rel_tol=_SAME_LIMIT):
            engine.batcher.set_limits(SplitRules(safe_limit=safe, tuned_limit=max(limit.tuned_limit, safe)), limits)
            engine.batcher.forget_failures()
            if earlier == math.inf:
                share = f"{limit.peak_bytes(safe) / self.meter.capacity_bytes:.0%}"
                capacity = f"{size_text(self.meter.capacity_bytes)} of {self.meter.key}"
                self.notice(f"Batches are computed in parts that are predicted to peak at {share} of the {capacity}.")

    def _device_limits(self, limit: SearchResult) -> DeviceLimits:
        return DeviceLimits(device_key=self.meter.key, capacity_bytes=self.meter.capacity_bytes, training=limit,
                            evaluation=limit, optimizer_peak_bytes=0)  # fmt: skip

    def _search(self, batch: Any, engine: Engine) -> None:
        """Searches for limits with steps of a copy of the model, and says where that cannot be done."""
        if self.search_loss is None:
            return
        counts = self._counts(batch)
        after = StepState(self.model, self.meter.device, self.objects)
        after.read()
        try:
            with CatchOutOfMemory(), suppress(DoesNotFitError), self.trial_scope():
                model, loss_of = self.search_loss()
                self._limits = self._find_limits(model, loss_of, batch, counts)
        except Exception as error:  # noqa: BLE001 - a copy may lack anything that the step needs
            self.notice(f"No limits were searched for: a copy of the model cannot be trained. {error}")
        finally:
            after.restore()
            self.meter.release()
        if self._limits is None:
            return
        self._factor = self._rule.decide(self._limits)
        tuned = self._limits.training.tuned_limit
        rules = SplitRules(safe_limit=self._factor.value * tuned, tuned_limit=tuned)
        engine.batcher.set_limits(rules, self._limits)
        costs = self._limits.priced(counts)
        sizes = cut(costs, rules.limit_for(costs))
        peak = self._limits.training.peak_bytes(max(part.total for part in costs.parts(sizes)))
        parts = "at once" if len(sizes) == 1 else f"in {len(sizes)} micro-batches of up to {max(sizes)}"
        capacity_bytes = self.meter.capacity_bytes
        share = f"{peak / capacity_bytes:.0%} of the {size_text(capacity_bytes)} of {self.meter.key}"
        self.notice(f"{len(costs)} samples a step are computed {parts}. Memory is predicted to peak at {share}.")

    def _find_limits(
        self, model: nn.Module, loss_of: Callable[[Any], Tensor], batch: Any, counts: Counts
    ) -> DeviceLimits:
        features, table = counts_of(counts)
        if len(features) > 1:
            features, table = features[:-1], table[:, :-1]
        needs = expected_memory(self.optimizers)

        def run(rows: NDArray[np.int64]) -> None:
            copies = Snapshot(model, self.meter.device)
            try:
                loss = loss_of(self.settings.select(batch, rows))
                if loss.requires_grad:
                    loss.backward()
            finally:
                del copies
                for parameter in model.parameters():
                    parameter.grad = None

        state = torch.empty(needs.state_bytes, dtype=torch.uint8, device=self.meter.device)
        gradients = [torch.zeros_like(parameter) for parameter in model.parameters() if parameter.requires_grad]
        resident = [*model.parameters(), *model.buffers(), state, *gradients]
        work = Workload(run=run, rows=np.arange(len(table)), counts=table, features=features, resident=resident,
                        gradient_bytes=needs.parameter_bytes)  # fmt: skip
        search = Search(time=SearchTime(clock=self.meter.seconds), looks_beyond=True)
        training = find_limit(work, self.meter, lambda costs: costs.total, search)
        more = training.cost_within(predicted_room(self.meter.capacity_bytes))
        if training.capped and not training.model.hidden and more > training.tuned_limit:
            # The whole batch fits; how much larger a later one may be is predicted.
            training = replace(training, tuned_limit=more, capped=False)
        # Evaluation needs less: memory that runs out all the same splits its batches, too.
        return replace(self._device_limits(training), gradient_bytes=needs.parameter_bytes)

    # The observation

    @property
    def _store(self) -> FactorStore:
        return FactorStore(self._store_folder, make_policy(FactorSettings().policy, {}))

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "parameters": [list(parameter.shape) for parameter in self.model.parameters()],
            "formats": sorted({str(parameter.dtype) for parameter in self.model.parameters()}),
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            ALLOCATOR: allocator_settings(),
        }

    def _observation(self, engine: Engine, outcome: Outcome, end_time: str) -> Observation:
        cost = engine.largest_cost
        limit = self._limits.training if self._limits else self.peaks.limit(self.meter.capacity_bytes)
        assert limit is not None, "an observation is of something that was measured"
        has_limit = self._factor is not None
        remembered = {}
        if has_limit and self._limits is None:
            kept = RememberedLimit(tuned_limit=limit.tuned_limit, capped=False, base_bytes=limit.model.base_bytes,
                                   measured_ratio=limit.measured_ratio)  # fmt: skip
            remembered = {_PHASE: RememberedLimits(training=kept, evaluation=kept)}
        begun = AttemptRecord(run_id=new_run_id(self._key), attempt=1, rank=0, key=self._key,
                              device=device_of(self.meter), start_time=self._started)  # fmt: skip
        planned = PlannedMemory(
            # A run whose batches all fitted does not show where a share of its limit leads.
            factor=self._factor or UNUSED, limit=limit if has_limit else replace(limit, capped=True),
            whole_limit=max(limit.tuned_limit, 1.0) if has_limit else None,
            safe_limit=engine.batcher.rules.safe_limit if has_limit else limit.tuned_limit,
            predicted_peak_bytes=limit.peak_bytes(cost),
            logical_batch=self._logical_batch, largest_micro_batch=engine.largest_micro_batch, largest_cost=cost,
            binding_limit="requested", remembered=remembered,
        )  # fmt: skip
        ooms = engine.batcher.ooms_rescued
        is_rescued = outcome == "ok" and ooms and engine.batcher.oom_cost is not None
        return make_observation(begun, [engine], planned, "rescued" if is_rescued else outcome, ooms, end_time=end_time,
                                fingerprint=self._fingerprint(),
                                policy={"name": FactorSettings().policy, "options": {}})  # fmt: skip


class _WholeStep(CatchOutOfMemory):
    """The span of a whole step, which is undone where memory runs out in it; `samples` are measured."""

    def __init__(self, loop: FrameworkLoop, samples: int) -> None:
        self._loop, self._samples = loop, samples

    def __enter__(self) -> Self:
        self._loop._in_step = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._loop._end_whole(self._samples, error)
        return super().__exit__(kind, error, traceback)


def _state_growth(optimizer: Optimizer, growth_bytes: int, steps: int, message: str) -> DoesNotFitError:
    """Makes the error of an optimizer whose state grows, as the history of LBFGS does."""
    remedy = f"{LESS[:1].upper()}{LESS[1:]}"
    if "history_size" in optimizer.defaults:
        # Each step of LBFGS keeps a direction and a change of the gradient.
        held = max((len(state.get("old_dirs", ())) for state in optimizer.state.values()), default=0)
        remedy = f"Give it history_size={max(held // 2, 1)}, in place of {optimizer.defaults['history_size']}"
    grown = f"has grown by {size_text(growth_bytes)} in {steps} steps"
    return DoesNotFitError(
        f"The state of the optimizer {type(optimizer).__name__} {grown}", value=message, remedy=remedy
    )


@dataclass
class _Parts:
    """Computes the losses of a batch's parts as `MicroBatcher` wants them; keeps, by their first samples, the weight of
    each in the batch, and its loss times the weight.
    """

    loop: FrameworkLoop
    part: Callable[[int, int], Part]
    loss_of: LossOf
    costs: BatchCosts
    is_trial: bool = False
    has_items: bool = False  # Whether the step tells the number of items that its loss is a mean over
    shares: dict[int, float] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = PartStates(self.loop.state, len(self.costs))

    def __call__(self, start: int, stop: int) -> Losses:
        loop = self.loop
        self.states.begin(start, metrics_too=not self.is_trial)
        self.states.take_rows(start, stop, loop.kinds)
        if not self.is_trial:
            loop.begin_reading(self.costs.cost(start, stop))
        part = self.part(start, stop)
        loss, items = self._computed(part)
        self.has_items |= items is not None
        if loop.compares:
            loop.check_parameters(part)
        share = loop.share_of(part, items)
        # A whole batch's loss stays as it is: its gradient is, bit by bit, the gradient without this class.
        weighted = loss if share == 1.0 else loss * share
        self.shares[start], self.losses[start] = share, weighted.detach()
        self.states.end(start, stop)
        return {LOSS: (weighted, part.share if loop.is_sum else share)}

    @property
    def largest(self) -> int:
        """Samples of the trial that were computed whole and in two parts; 0: none were."""
        return self.states.spans[0][1] if self.states.spans else 0

    def _computed(self, part: Part) -> tuple[Tensor, float | None]:
        """Computes the loss of a part. An error is the batch's own where the whole batch raises it, too."""
        try:
            return self.loss_of(part)
        except (CanTrainError, SplitRefusedError):
            raise
        except Exception as error:
            if self.is_trial or part.is_whole or not self.loop.compares or is_out_of_memory(error):
                raise
            message = str(error).partition("\n")[0]
            fails = f"{part.stop - part.start} of its {part.samples} samples fail alone ({message:.100})"
            raise self.loop.refuse(fails, _SMALLER) from error
