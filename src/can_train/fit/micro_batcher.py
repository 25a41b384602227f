"""Computes one logical batch in micro-batches that fit."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from can_train.errors import ArgumentError
from can_train.fit.cost_model import DeviceLimits
from can_train.fit.packing import BatchCosts, PartLimit, SplitRules
from can_train.fit.random_state import Snapshot
from can_train.fit.rescue import Backoff, Rescue, RescueSettings
from can_train.memory.meters import Meter, open_meter

_DENOMINATOR_TOLERANCE: Final = 1e-6
"""Relative difference of the parts' denominators from the whole batch's that is round-off."""


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What computing a logical batch, or a share of one, gave beside its gradient.

    Attributes:
        means: Each term's sum ÷ the whole logical batch's denominator: its mean, or the share's contribution to it.
        denominators: Each term's own denominator.
        micro_batches: Sizes in samples, in order, as they were run in the end.
        largest_cost: Cost of the costliest of them.
        settled_cost: Cost of the costliest of those that were run after the last out-of-memory.
        ooms: Out-of-memories that were survived.
    """

    means: dict[str, float] = field(default_factory=dict)
    denominators: dict[str, float] = field(default_factory=dict)
    micro_batches: tuple[int, ...] = ()
    largest_cost: float = 0.0
    cost_after_rescue: float = 0.0
    ooms: int = 0

    @property
    def loss(self) -> float:
        """Sum of the means, unweighted: the loss, where there is one term."""
        return sum(self.means.values())


def whole(shares: Sequence[BatchResult]) -> BatchResult:
    """Puts a logical batch's shares together, in order."""
    return BatchResult(
        means=added([share.means for share in shares]),
        denominators=added([share.denominators for share in shares]),
        micro_batches=tuple(size for share in shares for size in share.micro_batches),
        largest_cost=max(share.largest_cost for share in shares),
        cost_after_rescue=max(share.cost_after_rescue for share in shares),
        ooms=sum(share.ooms for share in shares),
    )


def added(terms: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Adds numbers up by term, in the order given: the same bits wherever it is done."""
    totals: dict[str, float] = {}
    for one in terms:
        for term, number in one.items():
            totals[term] = totals[term] + number if term in totals else number
    return totals


def check_denominators(result: BatchResult, denominators: Mapping[str, float] | None, *, size: int) -> None:
    """Checks that the parts' denominators are the whole batch's.

    Args:
        result: Of the whole batch.
        denominators: Per term, of the whole batch; None: its size, for every term.
        size: Samples of the batch.

    Raises:
        ArgumentError: They do not add up to it.
    """
    for term, own in result.denominators.items():
        needed = float(size) if denominators is None else denominators[term]
        if not math.isclose(own, needed, rel_tol=_DENOMINATOR_TOLERANCE, abs_tol=_DENOMINATOR_TOLERANCE):
            raise ArgumentError(
                f"The parts' denominators of {term!r} must add up to the whole batch's",
                value=f"{own:g} against {needed:g}",
                remedy="Compute denominators on the logical batch, before it is split",
            )


class Sums:
    """Adds up the terms of some samples on the device: reading a number from it would make the host wait.

    Args:
        denominators: Per term, of the whole logical batch; None: `size`, for every term.
        size: Samples of the logical batch.

    Attributes:
        own: Per term, the denominators of what was added.
    """

    def __init__(self, denominators: Mapping[str, float] | None, size: int) -> None:
        self._given = denominators
        self._size = float(size)
        self._means: dict[str, Tensor] = {}
        self.own: dict[str, float] = {}

    def denominator(self, term: str) -> float:
        """A term whose denominator is zero has nothing in this batch: its sum is zero too."""
        if self._given is None:
            return self._size
        if term not in self._given:
            raise ArgumentError("Every term has a denominator", value=f"{term!r} is not in {sorted(self._given)}")
        return self._given[term] or 1.0

    def add(self, means: Mapping[str, Tensor], own: Mapping[str, float]) -> None:
        """Adds a part: its sums ÷ the whole's denominators, and its own denominators."""
        for term, mean in means.items():
            self._means[term] = self._means[term] + mean if term in self._means else mean
            self.own[term] = self.own.get(term, 0.0) + own[term]

    def means(self) -> dict[str, float]:
        """Reads what was added up."""
        return {term: float(mean) for term, mean in self._means.items()}


Losses = Mapping[str, tuple[Tensor, float]]
"""Loss terms of a part: the sum over the part, and the part's own denominator."""


_Added = tuple[dict[str, Tensor], dict[str, float]]
"""What a part adds: per term, its sum ÷ the whole's denominator, and its own denominator."""


T = TypeVar("T")


class MicroBatcher:
    r"""Accumulates :math:`\nabla \sum_t w_t \cdot S_t / D_t` over micro-batches, where the denominators D belong to the
    whole logical batch; a micro-batch that runs out of memory is undone, split and run again.

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
        model: Whose parameters' gradients are accumulated.
        meter: Of the device that the model is on; None opens one.
        rules: How batches are cut; nothing is cut before memory runs out where none are given.
        rescue: What may be done about an out-of-memory.
        limits: What is known of batches on the device; None: nothing.
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
        self._model = model
        self._parameters = list(model.parameters())
        if not self._parameters:
            raise ArgumentError("A model to be trained has parameters", value=type(model).__name__)
        self._meter = meter or open_meter(str(self._parameters[0].device))
        self._settings = rescue or RescueSettings()
        self.rules = rules or SplitRules()
        self._rescue = Rescue(self._meter, self._settings)
        # Evaluation costs less a sample, so what training learned of sizes says nothing of its own.
        self._evaluation = Rescue(self._meter, self._settings)
        self._trainable = _trainable(self._parameters)
        self._planned = 0.0
        self._pressure = _Pressure(self._meter)
        self.use(self.rules, limits)

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
            batch: What the samples cost; a number of samples that all cost the same.
            denominators: Per term, of the whole batch; None: the number of samples, for every term.
            weights: Per term; None: 1 each.
            scale: Applied to each part's loss before backward (a gradient scaler).

        Raises:
            DoesNotFitError: One sample is too much, or nothing may be split.
            ArgumentError: The parts' denominators do not add up to the whole batch's, or something given is not of the
                shape that is asked for. After any error `.grad` holds, beside what was there, the parts that were
                computed before it.
        """
        costs = _as_costs(batch)
        result = self.run_share(losses_of, costs, denominators=denominators, weights=weights, scale=scale)
        check_denominators(result, denominators, size=len(costs))
        return result

    def run_share(
        self,
        losses_of: Callable[[int, int], Losses],
        costs: BatchCosts,
        *,
        denominators: Mapping[str, float] | None,
        weights: Mapping[str, float] | None = None,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> BatchResult:
        """Adds the gradient of some samples of a logical batch to `.grad`; others run elsewhere, or none do.

        Args:
            losses_of: As for `run`; the share's first sample is 0.
            costs: What the share's samples cost; it may have none.
            denominators: Per term, of the whole logical batch. That the shares' own add up to them is for
                `check_denominators` to see, once all are there.
            weights: As for `run`.
            scale: Likewise.

        Raises:
            DoesNotFitError: As `run` does.
            ArgumentError: Likewise.
        """
        if not len(costs):
            return BatchResult()
        self._renew_if_thawed()
        sums = Sums(denominators, len(costs))

        def attempt(start: int, stop: int) -> _Added:
            losses = _checked(losses_of(start, stop), weights)
            parts = {term: total / sums.denominator(term) for term, (total, _) in losses.items()}
            weighted = [part if weights is None else weights[term] * part for term, part in parts.items()]
            scale(sum(weighted[1:], start=weighted[0])).backward()
            own = {term: denominator for term, (_, denominator) in losses.items()}
            return {term: part.detach() for term, part in parts.items()}, own

        return self._in_parts(costs, attempt, sums)

    def _in_parts(self, costs: BatchCosts, attempt: Callable[[int, int], _Added], sums: Sums) -> BatchResult:
        """Runs samples in parts that fit, and adds up what they give."""
        limit = self.rules.limit_for(costs)
        before = ooms = self._rescue.ooms
        sizes: list[int] = []
        largest = settled = 0.0
        for part in self._rescue.run(costs, limit, attempt, self._undoable):
            sums.add(*part.result)
            sizes.append(part.stop - part.start)
            cost = costs.cost(part.start, part.stop)
            settled = cost if self._rescue.ooms > ooms else max(settled, cost)
            largest, ooms = max(largest, cost), self._rescue.ooms
        self._planned = max(self._planned, min(limit.cost, costs.cost(0, len(costs))))
        self._pressure.largest_cost = largest
        return BatchResult(
            means=sums.means(),
            denominators=sums.own,
            micro_batches=tuple(sizes),
            largest_cost=largest,
            cost_after_rescue=settled,
            ooms=ooms - before,
        )

    def evaluate(
        self,
        compute: Callable[[int, int], T],
        batch: BatchCosts | Sequence[float] | int,
        limit: PartLimit | None = None,
    ) -> list[T]:
        """Computes something without gradients, in parts that fit.

        Args:
            compute: Computes samples `start:stop`.
            batch: What they cost.
            limit: What a part may hold; None: anything, until memory runs out.

        Returns:
            The parts' results, in order.
        """
        costs, limit = _as_costs(batch), limit or PartLimit()
        rescue = self._evaluation
        parts = list(rescue.run(costs, limit, compute, lambda: _Restored(self._model, self._meter.device)))
        if self._settings.regrow:
            planned = min(limit.cost, costs.cost(0, len(costs)))
            rescue.backoff = rescue.backoff.after_step(planned=planned, factor=self._settings.factor)
        return [part.result for part in parts]

    def stepped(self) -> None:
        """Says that an optimizer step was taken; micro-batches grow back after enough of them."""
        backoff = self._rescue.backoff
        if self._pressure.rose_twice():
            backoff = backoff.after_pressure(self._pressure.largest_cost)
        elif self._settings.regrow:
            backoff = backoff.after_step(planned=self._planned, factor=self._settings.factor)
        self._rescue.backoff = backoff

    def watch(self, on_oom: Callable[[], object]) -> None:
        """Has something called after each out-of-memory of training, once what failed is undone and its memory released
        (`MemoryMonitor.rescued`, say).
        """
        self._rescue.on_oom = on_oom

    @property
    def oom_cost(self) -> float | None:
        """Smallest cost that ran out of memory in training, though within the plan and alone; None where none did."""
        return self._rescue.oom_cost if self._rescue.oom_cost < math.inf else None

    @property
    def ooms(self) -> int:
        """Out-of-memories survived so far, in training and evaluation."""
        return self._rescue.ooms + self._evaluation.ooms

    def state_dict(self) -> dict[str, Any]:
        """The limits in force, for a checkpoint."""
        return {"backoff": asdict(self._rescue.backoff), "planned": self._planned, "ooms": self._rescue.ooms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._rescue.backoff = Backoff(**state["backoff"])
        self._planned = state["planned"]
        self._rescue.ooms = state["ooms"]

    def use(self, rules: SplitRules, limits: DeviceLimits | None) -> None:
        """Takes other rules and limits from now on: the device was looked at anew."""
        self.rules = rules
        self._rescue.phase = None if limits is None else limits.training
        self._rescue.oom_cost = math.inf
        self._evaluation.phase = None if limits is None else limits.evaluation

    def _undoable(self) -> "_GradientsAside":
        return _GradientsAside(self._model, self._meter.device, self._parameters)

    def _renew_if_thawed(self) -> None:
        """Forgets what was learned of memory when other parameters are trained than before: activations differ."""
        # Once a batch, for the attempts too: walking a model's modules is what the engine takes most time for.
        self._parameters = list(self._model.parameters())
        trainable = _trainable(self._parameters)
        if trainable != self._trainable:
            self._trainable = trainable
            self._rescue.backoff = Backoff()
            self._planned = 0.0


class _Restored:
    """Undoes a pass without gradients."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._snapshot = Snapshot(model, device)

    def keep(self) -> None:
        """Nothing is left to do."""

    def undo(self) -> None:
        self._snapshot.restore()


class _GradientsAside(_Restored):
    """Sets the gradients so far aside, so that a failed backward cannot leave half of its own in them."""

    def __init__(self, model: nn.Module, device: torch.device, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(model, device)
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._aside = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def keep(self) -> None:
        pairs = []
        for parameter, aside in zip(self._parameters, self._aside, strict=True):
            if aside is None:
                continue
            if parameter.grad is not None:
                pairs.append((aside, parameter.grad))
            parameter.grad = aside
        if pairs:
            torch._foreach_add_([aside for aside, _ in pairs], [own for _, own in pairs])

    def undo(self) -> None:
        for parameter, aside in zip(self._parameters, self._aside, strict=True):
            parameter.grad = aside
        super().undo()


def _checked(losses: Any, weights: Mapping[str, float] | None) -> Losses:
    """Makes sure of the shape of what a loop of one's own computes."""
    pairs = losses.values() if isinstance(losses, Mapping) else ()
    if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ArgumentError(
            "losses_of returns {term: (sum over the samples, denominator)}", value=f"{type(losses).__name__}"
        )
    if weights is not None and not set(losses) <= set(weights):
        raise ArgumentError("Every term has a weight where any has", value=f"{sorted(set(losses) - set(weights))}")
    checked: Losses = losses
    return checked


def _trainable(parameters: Sequence[nn.Parameter]) -> tuple[bool, ...]:
    return tuple(parameter.requires_grad for parameter in parameters)


class _Pressure:
    """Notices that the allocator released its cache to serve an allocation, step after step."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._retries = meter.retries()
        self._rose = False
        self.largest_cost = math.inf

    def rose_twice(self) -> bool:
        """Tells, once a step, whether it did so in this step and the one before."""
        retries = self._meter.retries()
        rose, self._retries = retries > self._retries, retries
        twice, self._rose = rose and self._rose, rose
        return twice


def _as_costs(batch: BatchCosts | Sequence[float] | int) -> BatchCosts:
    """Prices what a loop of one's own gives: prices already, a cost a sample, or a number of samples."""
    if not isinstance(batch, BatchCosts):
        batch = _priced(batch)
    if len(batch) < 1:
        raise ArgumentError("A logical batch has at least one sample", value="it has none")
    return batch


def _priced(batch: Any) -> BatchCosts:
    if isinstance(batch, Sequence | np.ndarray) and not isinstance(batch, str) and np.ndim(batch) == 1:
        costs = np.asarray(batch, dtype=np.float64)
        if not (np.isfinite(costs) & (costs >= 0)).all():
            raise ArgumentError("Costs of samples are finite and not negative", value=f"{batch!r:.80}")
        return BatchCosts.of_samples(costs)
    try:
        return BatchCosts.uniform(max(operator.index(batch), 0))
    except TypeError:
        raise ArgumentError(
            "A batch is a number of samples, or a cost for each of them", value=f"{batch!r:.80}"
        ) from None
