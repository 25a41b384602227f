"""Computes one logical batch in micro-batches that fit."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from can_train.errors import ArgumentError, DoesNotFitError
from can_train.fit.batch_dependence import SPLIT, UNKNOWN, BatchDependence, measure_batch_dependence
from can_train.fit.optimizer import Snapshot
from can_train.fit.packing import BatchCosts, PartLimit, SplitRules
from can_train.fit.rescue import Backoff, Rescue, RescueSettings
from can_train.memory.meters import Meter, open_meter
from can_train.memory.out_of_memory import CatchOutOfMemory

if TYPE_CHECKING:
    from can_train.fit.cost_model import DeviceLimits
    from can_train.task import LogicalBatch

# Relative difference of the parts' denominators from the whole batch's that is round-off.
_DENOMINATOR_TOLERANCE: Final = 1e-6
# Samples of the two parts of the smallest batch that is measured both whole and split.
_SMALLEST_SPLIT: Final = (2, 3)
# Loss terms of a part: the sum over the part, and the part's own denominator.
Losses = Mapping[str, tuple[Tensor, float]]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The numbers that come with the gradient of a logical batch, or of a share of one.

    Attributes:
        means: Each term's sum ÷ the whole logical batch's denominator: its mean, or the share's contribution to it.
    """

    means: dict[str, float] = field(default_factory=dict)
    denominators: dict[str, float] = field(default_factory=dict)  # Each term's own
    micro_batches: tuple[int, ...] = ()  # Sizes in samples, in order, as they were run in the end
    largest_cost: float = 0.0  # Cost of the costliest micro-batch
    cost_after_rescue: float = 0.0  # The same of those that ran after the last out-of-memory
    ooms_rescued: int = 0  # Out-of-memories on the way

    @property
    def loss(self) -> float:
        """Sum of the means, unweighted: the loss, where there is one term."""
        return sum(self.means.values())

    def scaled(self, factor: float) -> BatchResult:
        """Returns the result with other means."""
        return replace(self, means={term: mean * factor for term, mean in self.means.items()})


@dataclass
class Denominators:
    """The denominators of a whole logical batch, or what they are taken to be until the batch is computed."""

    by_term: dict[str, float]
    size: int = 0  # Samples of the batch, where the denominators of its terms are taken to be that

    @classmethod
    def of(cls, batch: LogicalBatch, size: int) -> Denominators:
        """Asks a batch; one that cannot tell before it is computed is taken to have its number of samples."""
        known = batch.denominators
        return cls({}, size) if known is None else cls(dict(known))

    @property
    def is_estimate(self) -> bool:
        """Whether they are not those of the batch for certain."""
        return self.size > 0

    def learn(self, losses: Losses, *, is_whole: bool) -> None:
        """Sees the losses of a part, or of the whole batch, which has the denominators that are needed."""
        for term, (_, own) in losses.items() if self.is_estimate else ():
            self.by_term.setdefault(term, float(self.size))
            if is_whole:
                self.by_term[term] = own

    def factors(self, actual: Mapping[str, float]) -> dict[str, float]:
        """Returns, by term, what a gradient that was computed with these must be multiplied by."""
        # A term without anything in the batch has no gradient.
        return {
            term: self.by_term.get(term, float(self.size)) / own if own else 1.0 for term, own in actual.items()
        } or {"": 1.0}


def combine_shares(shares: Sequence[BatchResult]) -> BatchResult:
    """Returns the result of a logical batch from those of its shares, in order."""
    return BatchResult(
        means=sum_by_term([share.means for share in shares]),
        denominators=sum_by_term([share.denominators for share in shares]),
        micro_batches=tuple(size for share in shares for size in share.micro_batches),
        largest_cost=max(share.largest_cost for share in shares),
        cost_after_rescue=max(share.cost_after_rescue for share in shares),
        ooms_rescued=sum(share.ooms_rescued for share in shares),
    )


def combine_updates(updates: Sequence[BatchResult]) -> BatchResult:
    """Returns the result of a step from those of its optimizer updates: means are those over the updates that have the
    term.
    """
    if len(updates) == 1:
        return updates[0]
    counts = sum_by_term([dict.fromkeys(update.means, 1.0) for update in updates])
    combined = combine_shares(updates)
    return replace(combined, means={term: total / counts[term] for term, total in combined.means.items()})


def sum_by_term(terms: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Adds numbers up by term, in the order given: every rank that does it gets the same bits."""
    totals: dict[str, float] = {}
    for one in terms:
        for term, number in one.items():
            totals[term] = totals[term] + number if term in totals else number
    return totals


def check_denominators(result: BatchResult, denominators: Mapping[str, float] | None, *, size: int) -> None:
    """Checks that the parts' denominators add up to those of the whole batch, or to its size where those are None."""
    for term, own in result.denominators.items():
        needed = float(size) if denominators is None else denominators[term]
        if not math.isclose(own, needed, rel_tol=_DENOMINATOR_TOLERANCE, abs_tol=_DENOMINATOR_TOLERANCE):
            raise ArgumentError(
                f"The parts' denominators of {term!r} must add up to the whole batch's",
                value=f"{own:g} against {needed:g}",
                remedy="Compute denominators on the logical batch, before it is split",
            )


class MicroBatcher:
    r"""Accumulates :math:`\nabla \sum_t w_t \cdot S_t / D_t` over micro-batches, where the denominators D belong to the
    whole logical batch. A micro-batch that runs out of memory is undone, split and run again.

    In a loop of your own:

    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> batcher = MicroBatcher(model)
    >>> x = torch.zeros(8, 3)
    >>> result = batcher.run(lambda start, stop: {"loss": (model(x[start:stop]).square().sum(), stop - start)}, 8)
    >>> optimizer.step(); optimizer.zero_grad(); batcher.stepped()
    >>> result.micro_batches
    (8,)

    Args:
        model: Model whose parameters' gradients are accumulated.
        meter: Meter of the device that the model is on; None opens one.
        rules: How batches are cut; without rules, nothing is cut before memory runs out.
        rescue: What may be done about an out-of-memory.
        limits: What a search found of batches on the device; None where there was none.

    Attributes:
        batch_dependence: Whether samples depend on the rest of their batch, so that no split has the batch's gradient
            (BatchNorm, contrastive losses). Measured, and warned of, when `run` splits a batch for the first time; None
            until then.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        meter: Meter | None = None,
        rules: SplitRules | None = None,
        rescue: RescueSettings | None = None,
        limits: DeviceLimits | None = None,
    ) -> None:
        _refuse_unsplittable(model)
        self._model = model
        self._parameters = list(model.parameters())
        if not self._parameters:
            raise ArgumentError("A model to be trained has parameters", value=type(model).__name__)
        self._meter = meter or open_meter(str(self._parameters[0].device))
        self._settings = rescue or RescueSettings()
        self._rescue = Rescue(self._meter, self._settings)
        # Evaluation costs less a sample, so what training learned of sizes says nothing of its own.
        self._evaluation = Rescue(self._meter, self._settings)
        self._trainable = [parameter.requires_grad for parameter in self._parameters]
        self._largest_planned = 0.0
        self._retries, self._retries_rose = self._meter.retries(), False
        self._last_largest_cost = math.inf
        self.batch_dependence: BatchDependence | None = None
        self.use(rules or SplitRules(), limits)

    def run(
        self,
        losses_of: Callable[[int, int], Losses],
        batch: BatchCosts | Sequence[float] | int,
        *,
        denominators: Mapping[str, float] | None = None,
        weights: Mapping[str, float] | None = None,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> BatchResult:
        """Adds a logical batch's gradient to `.grad`.

        Args:
            losses_of: Computes the loss terms of samples `start:stop`: sums, with their own denominators.
            batch: Costs of the samples, or a number of samples that all cost the same.
            denominators: Denominator of each term for the whole batch; None: the number of samples, for every term.
            weights: Weight of each term; None: 1 each.
            scale: Applied to each part's loss before backward (a gradient scaler).

        Raises:
            DoesNotFitError: One sample is too much, or nothing may be split.
            ArgumentError: The parts' denominators do not add up to the whole batch's, or an argument has the wrong
                shape. After any error `.grad` holds, beside what was there, the parts that were computed before it.
        """
        costs = _whole_batch(batch)
        result = self.run_share(losses_of, costs, denominators=denominators, weights=weights, scale=scale)
        check_denominators(result, denominators, size=len(costs))
        if len(result.micro_batches) > 1 and self.batch_dependence is None:
            self.batch_dependence = self._measure_dependence(losses_of, result.micro_batches)
            # Without the sentence about dropout, which is true of most models.
            for sentence in self.batch_dependence.sentences(split=False):
                warnings.warn(f"{sentence}.", stacklevel=2)
        return result

    def _measure_dependence(
        self, losses_of: Callable[[int, int], Losses], micro_batches: tuple[int, ...]
    ) -> BatchDependence:
        # Not more samples than have fitted at once, but enough for two parts of two: a single sample has no variance.
        samples = min(max(*micro_batches, sum(_SMALLEST_SPLIT)), sum(SPLIT), sum(micro_batches))
        first = max(samples * SPLIT[0] // sum(SPLIT), min(_SMALLEST_SPLIT[0], samples - 1))
        half = torch.is_autocast_enabled(self._meter.device.type)
        try:
            with CatchOutOfMemory():
                return measure_batch_dependence(self._model, losses_of, None, half=half, sizes=(first, samples - first))
        except Exception:  # noqa: BLE001 - a look at the loop must not end it
            return UNKNOWN
        self._meter.release()
        return UNKNOWN

    def run_share(
        self,
        losses_of: Callable[[int, int], Losses],
        batch: BatchCosts | Sequence[float] | int,
        *,
        denominators: Mapping[str, float] | None,
        weights: Mapping[str, float] | None = None,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> BatchResult:
        """Adds the gradient of one rank's share of a logical batch to `.grad`, as `run` does; a share may be empty.

        Sample 0 is the share's first, but `denominators` are the whole batch's: the gradients of all ranks add up to
        that of the batch. They are added up once a batch, by the caller, since ranks need not have as many parts.
        """
        costs = _as_costs(batch)
        if not len(costs):
            return BatchResult()
        # Once a batch, for the attempts too: walking a model's modules is what the engine takes most time for.
        self._parameters = list(self._model.parameters())
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._trainable:
            # Activations differ, so what was learned of memory says nothing now.
            self._trainable, self._rescue.backoff, self._largest_planned = trainable, Backoff(), 0.0

        def attempt(start: int, stop: int) -> Losses:
            losses = _check_losses(losses_of(start, stop), denominators, weights)
            # A term whose denominator is zero has nothing in this batch: its sum is zero too.
            whole = {term: float(len(costs)) if denominators is None else denominators[term] or 1.0 for term in losses}
            means = {term: total / whole[term] for term, (total, _) in losses.items()}
            weighted = [mean if weights is None else weights[term] * mean for term, mean in means.items()]
            scale(sum(weighted[1:], start=weighted[0])).backward()
            return {term: (mean.detach(), losses[term][1]) for term, mean in means.items()}

        return self._run_parts(costs, attempt)

    def _run_parts(self, costs: BatchCosts, attempt: Callable[[int, int], Losses]) -> BatchResult:
        limit, rescue = self.rules.limit_for(costs), self._rescue
        ooms_before = ooms = rescue.ooms
        # The sums stay on the device: reading a number from it would make the host wait for it after every part.
        means: dict[str, Tensor] = {}
        denominators: dict[str, float] = {}
        sizes: list[int] = []
        largest = after_rescue = 0.0
        undone = partial(_undone_on_error, self._model, self._meter, self._parameters)
        for start, stop, losses in rescue.run(costs, limit, attempt, undone):
            for term, (mean, denominator) in losses.items():
                # In place: nothing undoes an out-of-memory here.
                means[term] = means[term].add_(mean) if term in means else mean
                denominators[term] = denominators.get(term, 0.0) + denominator
            sizes.append(stop - start)
            cost = costs.cost(start, stop)
            after_rescue = cost if rescue.ooms > ooms else max(after_rescue, cost)
            largest, ooms = max(largest, cost), rescue.ooms
        self._largest_planned = max(self._largest_planned, min(limit.cost, costs.cost(0, len(costs))))
        self._last_largest_cost = largest
        return BatchResult(
            means={term: float(mean) for term, mean in means.items()},
            denominators=denominators,
            micro_batches=tuple(sizes),
            largest_cost=largest,
            cost_after_rescue=after_rescue,
            ooms_rescued=ooms - ooms_before,
        )

    def evaluate(
        self,
        compute: Callable[[int, int], T],
        batch: BatchCosts | Sequence[float] | int,
        limit: PartLimit | None = None,
    ) -> list[T]:
        """Computes something of samples `start:stop` without gradients, and returns the results of the parts in order.
        Without a limit, a part may hold anything until memory runs out.
        """
        costs, limit, rescue = _whole_batch(batch), limit or PartLimit(), self._evaluation
        parts = list(rescue.run(costs, limit, compute, partial(_undone_on_error, self._model, self._meter)))
        if self._settings.regrow:
            planned = min(limit.cost, costs.cost(0, len(costs)))
            rescue.backoff = rescue.backoff.after_step(planned=planned, factor=self._settings.factor)
        return [result for _, _, result in parts]

    def stepped(self) -> None:
        """Counts an optimizer step; micro-batches grow back after enough of them."""
        backoff, retries = self._rescue.backoff, self._meter.retries()
        rose = retries > self._retries
        # The allocator released its cache to serve an allocation, and again in the next step: it works at its limit,
        # where every step is slow and memory too fragmented to last.
        if rose and self._retries_rose:
            backoff = backoff.after_pressure(self._last_largest_cost)
        elif self._settings.regrow:
            backoff = backoff.after_step(planned=self._largest_planned, factor=self._settings.factor)
        self._retries, self._retries_rose = retries, rose
        self._rescue.backoff = backoff

    def watch(self, on_oom: Callable[[], object]) -> None:
        """Registers what is called after each out-of-memory of training, such as `MemoryMonitor.rescued`."""
        self._rescue.on_oom = on_oom

    @property
    def oom_cost(self) -> float | None:
        """Smallest cost that ran out of memory in training, though within the plan and alone; None where none did."""
        return self._rescue.oom_cost if self._rescue.oom_cost < math.inf else None

    @property
    def foreign_bytes(self) -> int:
        """Most memory that other processes held when training ran out of it."""
        return self._rescue.foreign_bytes

    @property
    def ooms_rescued(self) -> int:
        """Out-of-memories survived so far, in training and evaluation."""
        return self._rescue.ooms_rescued + self._evaluation.ooms_rescued

    def state_dict(self) -> dict[str, Any]:
        """Returns the limits in force, for a checkpoint."""
        return {
            "backoff": asdict(self._rescue.backoff), "largest_planned": self._largest_planned,
            "trainable": list(self._trainable), "ooms_rescued": self._rescue.ooms_rescued,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], *, same_device: bool = True) -> None:
        """Restores what `state_dict` returned; what another device ran out of memory at limits nothing on this one."""
        self._rescue.backoff = Backoff(**state["backoff"]) if same_device else Backoff()
        self._largest_planned = state["largest_planned"]
        # Those that the limits belong to: the model may have been made with others, of an earlier epoch.
        self._trainable = list(state["trainable"])
        self._rescue.ooms_rescued = state["ooms_rescued"]

    def use(self, rules: SplitRules, limits: DeviceLimits | None) -> None:
        """Replaces rules and limits after the device was explored again."""
        self.rules = rules
        self._rescue.phase = None if limits is None else limits.training
        self._rescue.oom_cost = math.inf
        self._evaluation.phase = None if limits is None else limits.evaluation


def _refuse_unsplittable(model: nn.Module) -> None:
    """Raises ArgumentError for a model whose passes wait for those of other ranks, which may have fewer parts, or do
    what must be done once a batch.
    """
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    rule = (
        "Each rank cuts its share of a batch into parts of its own, so that no pass may wait for those of other ranks"
    )
    if "DistributedDataParallel" in kinds:
        lines = "call run_share with the whole batch's denominators, and add up gradients once a batch (docs/python.md)"
        raise ArgumentError(
            rule, value="DistributedDataParallel", remedy=f"Give the module inside (model.module), {lines}"
        )
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        raise ArgumentError(rule, value="FSDP", remedy="Keep the whole model on each rank (docs/python.md)")
    if hooked := [name for name, parameter in model.named_parameters() if parameter._post_accumulate_grad_hooks]:
        raise ArgumentError(
            "A hook that sees gradients as they accumulate would run in each micro-batch, and an optimizer in it would "
            "step in each of them",
            value=f"a hook of {hooked[0]}", remedy="Step once the batch's gradient is there, after `run`",
        )  # fmt: skip


@contextmanager
def _undone_on_error(model: nn.Module, meter: Meter, parameters: Sequence[nn.Parameter] = ()) -> Iterator[None]:
    """Undoes a pass that fails; the gradients that `parameters` have from earlier parts are set aside meanwhile."""
    # A backward that fails half-way has added to some of the gradients: where that stayed, weights were 23 to 95 % off.
    snapshot = Snapshot(model, meter.device)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    try:
        yield
        pairs = []
        for parameter, earlier in zip(trained, gradients, strict=True):
            if earlier is not None:
                if parameter.grad is not None:
                    pairs.append((earlier, parameter.grad))
                parameter.grad = earlier
        _add_gradients(pairs, meter)
    except BaseException:
        for parameter, earlier in zip(trained, gradients, strict=True):
            parameter.grad = earlier
        snapshot.restore()
        raise


def _add_gradients(pairs: list[tuple[Tensor, Tensor]], meter: Meter) -> None:
    """Adds gradients into the earlier sums, the first of each pair, as autograd accumulates: the same bits, and no
    memory beside the two.
    """
    plain = [pair for pair in pairs if _adds_in_place(*pair)]
    others = [pair for pair in pairs if not _adds_in_place(*pair)]
    if plain:
        torch._foreach_add_([earlier for earlier, _ in plain], [own for _, own in plain])
    for earlier, own in others:
        # Sums of sparse gradients take memory. Undoing the part would leave those that are added already.
        with CatchOutOfMemory() as caught:
            earlier.add_(own)
        if not caught.message:
            continue
        meter.release()
        with CatchOutOfMemory() as caught:
            earlier.add_(own)
        if caught.message:
            raise DoesNotFitError(
                "Gradients of micro-batches are added up wholly or not at all",
                value=f"the device said: {caught.message}", remedy="Take the step again, with more memory",
            )  # fmt: skip


def _adds_in_place(into: Tensor, more: Tensor) -> bool:
    return into.layout == more.layout == torch.strided and into.dtype == more.dtype and type(more) is Tensor


def _check_losses(losses: Any, denominators: Mapping[str, float] | None, weights: Mapping[str, float] | None) -> Losses:
    """Checks the shape of what somebody else's loop computes."""
    pairs = losses.values() if isinstance(losses, Mapping) else ()
    if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ArgumentError(
            "losses_of returns {term: (sum over the samples, denominator)}", value=f"{type(losses).__name__}"
        )
    if weights is not None and not set(losses) <= set(weights):
        raise ArgumentError("Every term has a weight where any has", value=f"{sorted(set(losses) - set(weights))}")
    for term in losses:
        if denominators is not None and term not in denominators:
            raise ArgumentError("Every term has a denominator", value=f"{term!r} is not in {sorted(denominators)}")
    checked: Losses = losses
    return checked


def _as_costs(batch: Any) -> BatchCosts:
    """Prices what somebody else's loop gives: prices already, a cost a sample, or a number of samples."""
    if not isinstance(batch, BatchCosts):
        if isinstance(batch, Sequence | np.ndarray) and not isinstance(batch, str) and np.ndim(batch) == 1:
            each = np.asarray(batch, dtype=np.float64)
            if not (np.isfinite(each) & (each >= 0)).all():
                raise ArgumentError("Costs of samples are finite and not negative", value=f"{batch!r:.80}")
            batch = BatchCosts.of_samples(each)
        else:
            try:
                batch = BatchCosts.uniform(max(operator.index(batch), 0))
            except TypeError:
                rule = "A batch is a number of samples, or a cost for each of them"
                raise ArgumentError(rule, value=f"{batch!r:.80}") from None
    costs: BatchCosts = batch
    return costs


def _whole_batch(batch: Any) -> BatchCosts:
    costs = _as_costs(batch)
    if len(costs) < 1:
        raise ArgumentError("A logical batch has at least one sample", value="it has none")
    return costs
