"""The batches of a training framework's own loop, computed in parts that fit. Limits are found with the first batch,
and learned for the next run. The callback for Lightning and the Trainer of transformers are built on it.

Shapes: R samples, F features.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from can_train.config.resolved import state_folder
from can_train.config.settings import FactorSettings
from can_train.errors import DataError, DoesNotFitError, StateError
from can_train.factors.observations import ALLOCATOR, Observation, Outcome, next_time
from can_train.factors.observing import AttemptRecord, PlannedMemory, device_of, make_observation, write_observation
from can_train.factors.policies import make_policy
from can_train.factors.store import FactorStore, rule_after
from can_train.fit.collate import Rows, leaves, samples_in, select_samples
from can_train.fit.cost_model import DeviceLimits, PeakPrediction
from can_train.fit.engine import Engine
from can_train.fit.explore import Search, SearchTime, Workload, find_limit, left_as_it_was
from can_train.fit.factor_rule import Aim, FactorRule, SafetyFactor
from can_train.fit.micro_batcher import Counts, Losses, MicroBatcher, Split
from can_train.fit.optimizer import OptimizerMemory, OptimizerReserve, Snapshot, measure_optimizer, state_bytes
from can_train.fit.packing import BatchCosts, SplitRules, counts_of, cut
from can_train.fit.search import SizeSearch
from can_train.io.units import size_text
from can_train.memory.allocator_settings import allocator_settings
from can_train.memory.catalogue import predicted_room
from can_train.memory.meters import Meter, meter_of, tensors_of
from can_train.memory.monitor import MemoryMonitor
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.runs.run_folder import new_run_id

LOSS: Final = "loss"  # The one term that a framework knows
_ROUND_OFF: Final = 1e-9  # Relative difference of a sum of shares from 1 that is round-off
T = TypeVar("T")


def sample_counts(batch: Any) -> Counts:
    """Returns counts of each sample that the memory of a collated batch grows with: nodes and edges in a batch of
    torch_geometric, else the numbers that its tensors hold. Padded samples then count with their padding.
    """
    if hasattr(batch, "num_graphs"):
        edges = torch.bincount(batch.batch[batch.edge_index[0]], minlength=batch.num_graphs)
        return {"nodes": torch.bincount(batch.batch, minlength=batch.num_graphs).cpu(), "edges": edges.cpu()}
    samples = samples_in(batch)
    return {"numbers": np.full(samples, sum(leaf.numel() for leaf in leaves(batch)) / samples)}


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How a framework's loop is made to fit.

    Attributes:
        device: Meter of the device, or its name, as in `--device`; None: the model's.
        limits: Limits of a micro-batch, as in `MicroBatcher`; None: limits are found with the first batch, and from
            earlier runs.
        select: Takes samples out of a collated batch: by a slice, or by their positions.
        counts: Counts of each sample that the memory of a collated batch grows with: [R] by name.
        key: Name in the factor store; empty: the framework's and the model's.
        learn: Whether earlier runs are learned from, and this one is recorded.
        state_dir: State folder of the factor store; None: the user's own.
    """

    device: Meter | str | None = None
    limits: DeviceLimits | PeakPrediction | SizeSearch | Split | int | None = None
    select: Callable[[Any, Rows], Any] = select_samples
    counts: Callable[[Any], Counts] = sample_counts
    key: str = ""
    learn: bool = True
    state_dir: str | Path | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """Samples start:stop of a collated batch."""

    batch: Any
    start: int
    stop: int
    samples: int  # of the whole batch
    is_trial: bool = False  # Whether nothing of it may stay

    @property
    def share(self) -> float:
        """Samples of the part ÷ samples of the batch."""
        return (self.stop - self.start) / self.samples

    @property
    def is_last(self) -> bool:
        """Whether the batch ends with it."""
        return self.stop == self.samples


LossOf = Callable[[Part], tuple[Tensor, float | None]]
"""Computes the mean loss of a part, and the number of items that it is the mean over; None: the part's samples."""


@dataclass
class _Parts:
    """Computes the losses of a batch's parts as `MicroBatcher` wants them; keeps, by their first samples, the weight of
    each in the batch, and its loss times the weight.
    """

    part: Callable[[int, int], Part]
    loss_of: LossOf
    shares: dict[int, float] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, start: int, stop: int) -> Losses:
        part = self.part(start, stop)
        loss, own = self.loss_of(part)
        share = 1.0 if part.share == 1.0 else part.share if own is None else own / part.samples
        # A whole batch's loss stays as it is: its gradient is, bit by bit, the gradient without this class.
        weighted = loss if part.share == 1.0 else loss * share
        self.shares[start], self.losses[start] = share, weighted.detach()
        return {LOSS: (weighted, share)}


@dataclass(kw_only=True)
class FrameworkLoop:
    """Computes the batches of somebody else's loop in parts that fit.

    Attributes:
        framework: Its name, for the factor store.
        model: The module whose parameters are trained, on its device.
        optimizers: The loop's optimizers.
        settings: How it is made to fit.
        remedy_for_means: Sentence that tells how to make a loss exact that is a mean over other items than samples;
            empty: nothing is measured.
        notice: Is given a sentence about the limits that were found.
    """

    framework: str
    model: nn.Module
    optimizers: Sequence[Optimizer]
    settings: LoopSettings
    remedy_for_means: str = ""
    notice: Callable[[str], object] = lambda text: None

    def __post_init__(self) -> None:
        parameters = list(self.model.parameters())
        self.meter = meter_of(self.settings.device, str(parameters[0].device) if parameters else "cpu")
        self.monitor = MemoryMonitor(meter=self.meter, warmup=1)
        self.batcher = MicroBatcher(self.model, meter=self.meter, limits=self.settings.limits)
        self._key = self.settings.key or f"{self.framework}_{type(self.model).__name__}".lower()
        self._limits: DeviceLimits | None = None
        self._factor: SafetyFactor | None = None
        self._engine: Engine | None = None  # Made with the first batch
        self._logical_batch = 0
        state_dir = self.settings.state_dir
        self._state = state_folder(None if state_dir is None else Path(state_dir))
        self._started = next_time(self._state)
        # A simulated GPU holds all that the loop makes from now on.
        self._active = ExitStack()
        self._active.enter_context(self.meter.active(tensors_of([self.model, *self.optimizers])))

    def train(
        self, batch: Any, loss_of: LossOf, *, scale: Callable[[Tensor], Tensor] = lambda loss: loss
    ) -> tuple[Tensor, dict[int, float]]:
        """Adds the gradient of a batch's mean loss to `.grad`, which holds nothing yet where parts name denominators.

        Args:
            batch: A collated batch.
            loss_of: Computes the mean loss of a part. It may run backward by itself, and return a detached loss.
            scale: A gradient scaler's.

        Returns:
            The mean loss, detached, and the weight of each part's mean in it, by the part's first sample.

        Raises:
            DoesNotFitError: One sample is too much.
        """
        counts = self.settings.counts(batch)
        samples = len(counts_of(counts)[1])
        engine = self._engine or self._prepare(batch, counts, loss_of)
        parts = _Parts(lambda start, stop: self._part(batch, start, stop, samples), loss_of)
        with self.monitor.step(self.model, *self.optimizers):
            result = self.batcher.run_share(parts, self._priced(counts), denominators={LOSS: 1.0}, scale=scale)
        if self.remedy_for_means and len(result.micro_batches) > 1 and self.batcher.batch_dependence is None:
            trial = _Parts(lambda start, stop: replace(parts.part(start, stop), is_trial=True), loss_of)
            self.batcher.batch_dependence = dependence = self.batcher.measure_dependence(trial, result.micro_batches)
            # A split changes the gradient, and no layer is the reason.
            is_mean = dependence.terms and not dependence.modules
            changes = f"Cutting a batch changes its gradient by {dependence.terms.get(LOSS, 0.0):.1%}"
            dependence.warn(f"{changes}. {self.remedy_for_means}" if is_mean else "")
        engine.record_result(result)
        self._logical_batch = max(self._logical_batch, samples)
        self.batcher.stepped()
        starts = np.cumsum([0, *result.micro_batches[:-1]]).tolist()
        whole = sum(parts.shares[start] for start in starts)
        if not math.isclose(whole, 1.0, rel_tol=_ROUND_OFF):
            torch._foreach_div_([one.grad for one in self.model.parameters() if one.grad is not None], whole)
        # On the device: reading it would make the host wait for it.
        loss = torch.stack([parts.losses[start] for start in starts]).sum() / whole
        return loss, {start: parts.shares[start] / whole for start in starts}

    def evaluate(self, batch: Any, compute: Callable[[Part], T]) -> list[tuple[Part, T]]:
        """Computes something of a batch without gradients, in parts that fit; returns the parts, in order, with it."""
        try:
            counts = self.settings.counts(batch)
        except DataError:
            # Nobody knows how to split it. It may be anything, since only `compute` looks at it.
            part = Part(batch=batch, start=0, stop=1, samples=1)
            return [(part, compute(part))]
        samples = len(counts_of(counts)[1])

        def computed(start: int, stop: int) -> tuple[Part, T]:
            part = self._part(batch, start, stop, samples)
            return replace(part, batch=None), compute(part)

        return self.batcher.evaluate(computed, self._priced(counts))

    def before_optimizer_step(self) -> None:
        """Makes room for the state that an optimizer makes in its first step; raises DoesNotFitError where there is
        none.
        """
        if self._engine is not None:
            self._engine.reserve.before_step()

    def close(self, outcome: Outcome = "ok") -> None:
        """Ends the loop, and records its observation."""
        self.monitor.pause()
        self._active.close()
        engine, limits, factor = self._engine, self._limits, self._factor
        if self.settings.learn and engine is not None and limits is not None and factor is not None:
            make = partial(self._observation, engine, outcome, limits, factor)
            write_observation(self._store, make, self.notice)
        self._limits = None

    @property
    def _store(self) -> FactorStore:
        return FactorStore(self._state, make_policy(FactorSettings().policy, {}))

    def _part(self, batch: Any, start: int, stop: int, samples: int) -> Part:
        whole = stop - start == samples
        own = batch if whole else self.settings.select(batch, slice(start, stop))
        return Part(batch=own, start=start, stop=stop, samples=samples)

    def _priced(self, counts: Counts) -> BatchCosts | Counts | int:
        if self._limits is not None:
            return self._limits.priced(counts)
        # Limits of the user's own are in samples, or follow from the same counts.
        is_counted = isinstance(self.settings.limits, DeviceLimits | PeakPrediction)
        return counts if is_counted else len(counts_of(counts)[1])

    # Limits

    def _prepare(self, batch: Any, counts: Counts, loss_of: LossOf) -> Engine:
        """Finds limits with the first batch, and holds the memory of the optimizers' first step."""
        with self.meter.host():
            needs = _memory_of(self.optimizers, on_gpu=not self.meter.is_host)
        held_bytes = sum(map(state_bytes, self.optimizers))
        needs = replace(needs, state_bytes=max(needs.state_bytes - held_bytes, 0))
        if self.settings.limits is None:
            with CatchOutOfMemory(), suppress(DoesNotFitError), left_as_it_was(self.model, self.meter) as buffers:
                self._limits = self._find_limits(batch, counts, loss_of, needs, buffers)
            self._use_limits(counts)
        reserve = OptimizerReserve(needs, self.meter)
        self._engine = Engine(meter=self.meter, monitor=self.monitor, batcher=self.batcher, reserve=reserve)
        self.batcher.watch(self._engine.record_rescue)
        reserve.hold()
        return self._engine

    def _use_limits(self, counts: Counts) -> None:
        if self._limits is None:
            self.meter.release()
            # A batch that is never split may still fit, since it needs no room for the gradients of earlier parts.
            self.notice("Weights, state and two sets of gradients leave no room: batches that run out of memory split.")
            return
        rule = FactorRule(decided=None, aim=Aim(FactorSettings().target))
        if self.settings.learn:
            try:
                rule = rule_after(self._store.learned_rule(self._key, self.meter.key, self._fingerprint()), rule)
            except StateError as error:
                self.notice(f"Observations of earlier runs cannot be read. {error}")
        self._factor = rule.decide(self._limits)
        tuned = self._limits.training.tuned_limit
        rules = SplitRules(safe_limit=self._factor.value * tuned, tuned_limit=tuned)
        self.batcher.set_limits(rules, self._limits)
        costs = self._limits.priced(counts)
        sizes = cut(costs, rules.limit_for(costs))
        peak = self._limits.training.peak_bytes(max(part.total for part in costs.parts(sizes)))
        parts = "at once" if len(sizes) == 1 else f"in {len(sizes)} micro-batches of up to {max(sizes)}"
        capacity_bytes = self.meter.capacity_bytes
        share = f"{peak / capacity_bytes:.0%} of the {size_text(capacity_bytes)} of {self.meter.key}"
        self.notice(f"{len(costs)} samples a step are computed {parts}. Memory is predicted to peak at {share}.")

    def _find_limits(
        self, batch: Any, counts: Counts, loss_of: LossOf, needs: OptimizerMemory, buffers: list[Tensor]
    ) -> DeviceLimits:
        features, table = counts_of(counts)
        if len(features) > 1:
            features, table = features[:-1], table[:, :-1]
        samples = len(table)

        def run(rows: NDArray[np.int64]) -> None:
            copies = Snapshot(self.model, self.meter.device)
            try:
                part = Part(batch=self.settings.select(batch, rows), start=0, stop=len(rows), samples=samples,
                            is_trial=True)  # fmt: skip
                loss, _ = loss_of(part)
                if loss.requires_grad:
                    loss.backward()
            finally:
                del copies
                for parameter in self.model.parameters():
                    parameter.grad = None

        state = torch.empty(needs.state_bytes, dtype=torch.uint8, device=self.meter.device)
        gradients = [torch.zeros_like(one) for one in self.model.parameters() if one.requires_grad]
        resident = [*self.model.parameters(), *self.model.buffers(), state, *gradients, *buffers]
        work = Workload(run=run, rows=np.arange(samples), counts=table, features=features, resident=resident,
                        gradient_bytes=needs.parameter_bytes)  # fmt: skip
        search = Search(time=SearchTime(clock=self.meter.seconds))
        training = find_limit(work, self.meter, lambda costs: costs.total, search)
        more = training.cost_within(predicted_room(self.meter.capacity_bytes))
        if training.capped and more > training.tuned_limit:
            # The whole batch fits; how much larger a later one may be is predicted.
            training = replace(training, tuned_limit=more, capped=False)
        model_bytes = sum(tensor.nbytes for tensor in resident)
        return DeviceLimits(
            device_key=self.meter.key,
            capacity_bytes=self.meter.capacity_bytes,
            training=training,
            # Evaluation needs less: memory that runs out all the same splits its batches, too.
            evaluation=training,
            optimizer_peak_bytes=model_bytes + needs.transient_bytes,
            gradient_bytes=needs.parameter_bytes,
        )

    # The observation

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "parameters": [list(one.shape) for one in self.model.parameters()],
            "formats": sorted({str(one.dtype) for one in self.model.parameters()}),
            "optimizers": [type(one).__name__ for one in self.optimizers],
            ALLOCATOR: allocator_settings(),
        }

    def _observation(
        self, engine: Engine, outcome: Outcome, limits: DeviceLimits, factor: SafetyFactor, end_time: str
    ) -> Observation:
        training, cost = limits.training, engine.largest_cost
        begun = AttemptRecord(run_id=new_run_id(self._key), attempt=1, rank=0, key=self._key,
                              device=device_of(self.meter), start_time=self._started)  # fmt: skip
        planned = PlannedMemory(
            factor=factor, limit=training, whole_limit=max(training.tuned_limit, 1.0),
            safe_limit=self.batcher.rules.safe_limit, predicted_peak_bytes=training.peak_bytes(cost),
            logical_batch=self._logical_batch, largest_micro_batch=engine.largest_micro_batch, largest_cost=cost,
            binding_limit="requested",
        )  # fmt: skip
        ooms = self.batcher.ooms_rescued
        is_rescued = outcome == "ok" and ooms and self.batcher.oom_cost is not None
        return make_observation(begun, [engine], planned, "rescued" if is_rescued else outcome, ooms, end_time=end_time,
                                fingerprint=self._fingerprint(),
                                policy={"name": FactorSettings().policy, "options": {}})  # fmt: skip


def _memory_of(optimizers: Sequence[Optimizer], *, on_gpu: bool) -> OptimizerMemory:
    """Measures the optimizers' memory on the host, as they would run on a GPU or not."""
    found = []
    for optimizer in optimizers:
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        try:
            found.append(measure_optimizer(parameters, partial(_alike, optimizer, on_gpu=on_gpu)))
        except (TypeError, ValueError, RuntimeError):
            # One that is made otherwise, or does not run on the host, is taken to keep as much as Adam.
            sizes = tuple(one.nbytes for one in parameters if one.nbytes)
            total = sum(sizes)
            found.append(OptimizerMemory(parameter_bytes=total, state_bytes=2 * total, transient_bytes=total,
                                         tensor_bytes=sizes))  # fmt: skip
    return OptimizerMemory(
        parameter_bytes=sum(one.parameter_bytes for one in found),
        state_bytes=sum(one.state_bytes for one in found),
        transient_bytes=max((one.transient_bytes for one in found), default=0),
        tensor_bytes=tuple(size for one in found for size in one.tensor_bytes),
    )


def _alike(optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, on_gpu: bool) -> Optimizer:
    """Makes an optimizer like another one; PyTorch's take one more copy of the parameters on a GPU (`foreach`)."""
    kind: Callable[..., Optimizer] = type(optimizer)
    taken = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    if on_gpu and "foreach" in options and not options.get("fused"):
        options["foreach"] = options["foreach"] is not False
    return kind(parameters, **options)
