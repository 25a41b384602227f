"""Computes one logical batch in micro-batches that fit."""

from __future__ import annotations

import math
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from can_train.config.settings import CHOICES, check_choice
from can_train.errors import ArgumentError, check_functions, check_kinds, shown
from can_train.fit.batch_dependence import SPLIT, UNKNOWN, BatchDependence, Comparisons, measure_batch_dependence
from can_train.fit.cost_model import DeviceLimits
from can_train.fit.offloaded_state import OffloadedState, keep_states, refusal_of
from can_train.fit.packing import BatchCosts, MicroBatchLimit, SplitRules, counts_of
from can_train.fit.pass_state import HeldState, leaves_of, modules_of, parameters_of
from can_train.fit.peak_prediction import PeakPrediction
from can_train.fit.precision import HalfGradients
from can_train.fit.repetitions import NOT_REPEATABLE, Repetitions, is_not_repeatable
from can_train.fit.rescue import Backoff, Ladder, RepeatedError, Rescue, RescueSettings, Try, Undo
from can_train.fit.rungs import Rung, computed_on, rungs_of
from can_train.fit.search import SizeSearch
from can_train.memory.catalogue import predicted_room
from can_train.memory.meters import Meter, meter_of, tensors_of
from can_train.memory.out_of_memory import CatchOutOfMemory, forget_frames

if TYPE_CHECKING:
    from can_train.fit.compiled import CompiledModel
    from can_train.fit.sharding import Shards
    from can_train.task import LogicalBatch


_NO_RULES: Final = SplitRules()
# Relative difference of the parts' denominators from the whole batch's that is round-off.
_DENOMINATOR_TOLERANCE: Final = 1e-6
MOVES_WEIGHTS: Final = "Computing the loss changes trained weights or large tensors: no further batch is compared"
_LOSSES: Final = "losses_of returns {term: (sum over the samples, denominator)}"
# Samples of the smaller part of a batch that is measured both whole and split.
_LEAST_PART: Final = 2
# Loss terms of a part: the sum over the part, and the part's own denominator, a tensor where the device counted it.
Losses = Mapping[str, tuple[Tensor, float | Tensor]]
Counts = Sequence[float] | NDArray[Any] | Tensor | Mapping[Any, Any]  # As `counts_of` reads them
Split = Callable[[int], Sequence[int]]  # Returns the sizes of the micro-batches of a batch of so many samples
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """The numbers that come with the gradient of a logical batch, or of a share of one.

    Attributes:
        means: Each term's sum ÷ the whole logical batch's denominator: its mean, or the share's contribution to it.
    """

    means: Mapping[str, float] = field(default_factory=dict)
    denominators: Mapping[str, float] = field(default_factory=dict)  # Each term's own
    micro_batches: tuple[int, ...] = ()  # Sizes in samples, in order, as they were run in the end
    largest_cost: float = 0.0  # Cost of the costliest micro-batch
    cost_after_rescue: float = 0.0  # Cost of the costliest one after the last out-of-memory
    ooms_rescued: int = 0  # Out-of-memories on the way

    @property
    def loss(self) -> float:
        """Sum of the means, unweighted: the loss, where there is one term."""
        return sum(self.means.values())

    def corrected(self, factor: float) -> BatchResult:
        """Returns the result with its means multiplied by a factor."""
        if factor == 1.0:
            return self
        if isinstance(self.means, LateNumbers):
            return replace(self, means=self.means.times(factor))
        return replace(self, means={term: mean * factor for term, mean in self.means.items()})

    def start_copies(self) -> None:
        """Begins to bring numbers that are on the device to the host, without waiting for them."""
        for numbers in (self.means, self.denominators):
            if isinstance(numbers, LateNumbers):
                numbers.start_copy()

    def counts(self) -> BatchResult:
        """Returns the result without means and denominators, which may be on the device yet."""
        return replace(self, means={}, denominators={})


class LateNumbers(Mapping[str, float]):
    """Numbers by term. Tensors among them stay on the device until one is looked at: reading makes the host wait."""

    def __init__(self, numbers: Mapping[str, float | Tensor], factor: float = 1.0) -> None:
        # None stands for a tensor that is copied already, whose memory is free again.
        self._given: dict[str, float | Tensor | None] = dict(numbers)
        self._factor = factor
        self._copy: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._read: dict[str, float] = {}

    def start_copy(self) -> None:
        """Begins to bring the tensors to the host, in one transfer, without waiting for it: to be called where the
        device has been given their computation, so that reading them later does not wait for later work.
        """
        # Terms may differ in type.
        tensors = {term: number.double() for term, number in self._given.items() if isinstance(number, Tensor)}
        if tensors:
            stacked = torch.stack([*tensors.values()])
            self._copy = stacked.to("cpu", non_blocking=True)
            self._given = self._given | dict.fromkeys(tensors)
            if stacked.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record(torch.cuda.current_stream(stacked.device))

    def times(self, factor: float) -> LateNumbers:
        """Returns the numbers multiplied by a factor."""
        product = LateNumbers({}, self._factor * factor)
        product._given, product._copy, product._copied = self._given, self._copy, self._copied
        return product

    def __getitem__(self, term: str) -> float:
        if not self._read:
            self.start_copy()
            if self._copied is not None:
                self._copied.synchronize()
            copied = iter(() if self._copy is None else self._copy.tolist())
            for name, number in self._given.items():
                self._read[name] = self._factor * float(next(copied) if number is None else number)
        return self._read[term]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[type[dict[str, float]], tuple[dict[str, float]]]:
        # Other ranks are sent numbers.
        return dict, (dict(self),)


@dataclass
class Denominators:
    """The denominators of a whole logical batch, or estimates of them until the batch is computed."""

    by_term: dict[str, float | Tensor]
    size: int = 0  # Samples of the batch, where the denominators of its terms are taken to be that; 0: they are known
    is_exact: bool = True  # Whether they are the batch's own, and no estimates

    @classmethod
    def of(cls, batch: LogicalBatch, size: int) -> Denominators:
        """Asks a batch; one that cannot tell before it is computed is taken to have its number of samples."""
        known = batch.denominators
        return cls({}, size, is_exact=False) if known is None else cls(dict(known))

    def learn(self, losses: Losses, *, is_whole: bool) -> None:
        """Sees the losses of a part, or of the whole batch, which has the denominators that are needed."""
        for term, (_, own) in losses.items() if self.size else ():
            self.by_term.setdefault(term, float(self.size))
            if is_whole:
                self.by_term[term], self.is_exact = own, True

    def factors(self, result: BatchResult) -> dict[str, float]:
        """Returns, by term, the factor that corrects the gradient of a whole batch, which was computed with these
        denominators: 1 where they are the batch's own.
        """
        if self.is_exact:
            return {"": 1.0}
        # A term without anything in the batch has no gradient.
        return {term: float(self.by_term.get(term, self.size)) / own if own else 1.0
                for term, own in result.denominators.items()} or {"": 1.0}  # fmt: skip

    def check(self, result: BatchResult, where: str) -> None:
        """Checks the denominators of a batch, which `where` names: a term that has a sum has one, and those that were
        known before the batch was computed are the sum of the parts' denominators. Otherwise the gradient is another.
        """
        for term, own in result.denominators.items():
            if own <= 0:
                check_divisor(term, result.means[term] * (float(self.by_term.get(term, self.size)) or 1.0), own, where)
        if not self.size:
            check_denominators(result, self.by_term, size=0)


@dataclass(frozen=True)
class _BatchLoss:
    """How the loss of one logical batch is computed, a micro-batch at a time."""

    losses_of: Callable[[int, int], Losses]
    size: int  # Samples of the batch, or of this rank's share
    denominators: Mapping[str, float | Tensor] | None  # Of the whole batch, by term; None: `size`
    weights: Mapping[str, float] | None  # By term; None: 1 each
    scale: Callable[[Tensor], Tensor]  # A gradient scaler's

    def mean(self, term: str, total: Tensor) -> Tensor:
        """Divides a term's sum by the whole batch's denominator."""
        denominator = float(self.size) if self.denominators is None else self.denominators[term]
        # A term whose denominator is zero has nothing in this batch: its sum is zero too, or is refused later on, since
        # reading it here would make the host wait.
        if isinstance(denominator, Tensor):
            denominator = denominator.to(total.dtype)
            return total / torch.where(denominator == 0, 1, denominator)
        return total / (denominator or 1.0)

    def scaled(self, loss: Tensor) -> Tensor:
        """Applies the gradient scaler to a part's loss."""
        scaled: Any = self.scale(loss)
        if not isinstance(scaled, Tensor):
            raise ArgumentError("scale returns the loss that it was given, scaled", value=shown(scaled),
                                remedy="Give scale=scaler.scale of a torch.amp.GradScaler")  # fmt: skip
        return scaled

    def weighted(self, means: Mapping[str, Tensor]) -> Tensor:
        """Returns the weighted sum of the terms' means."""
        parts = [mean if self.weights is None else self.weights[term] * mean for term, mean in means.items()]
        return sum(parts[1:], start=parts[0])


class _Totals:
    """Sums over the micro-batches of a batch."""

    def __init__(self) -> None:
        # They stay on the device: reading a number from it would make the host wait for it after every micro-batch.
        self._means: dict[str, Tensor] = {}
        self._denominators: dict[str, float | Tensor] = {}
        self.sizes: list[int] = []
        self.largest_cost = self._cost_after_rescue = 0.0

    def add(self, losses: Losses, part: Try, cost: float, *, rescued: bool) -> None:
        """Adds a micro-batch; `rescued` tells whether memory ran out since the one before it."""
        for term, (mean, denominator) in losses.items():
            # In place: nothing undoes an out-of-memory here.
            self._means[term] = self._means[term].add_(mean) if term in self._means else mean
            earlier = self._denominators.get(term)
            self._denominators[term] = denominator if earlier is None else earlier + denominator
        self.sizes.append(part.stop - part.start)
        self._cost_after_rescue = cost if rescued else max(self._cost_after_rescue, cost)
        self.largest_cost = max(self.largest_cost, cost)

    def result(self, ooms: int) -> BatchResult:
        """Returns the result of the batch, during which memory ran out `ooms` times."""
        numbers = {term: own for term, own in self._denominators.items() if not isinstance(own, Tensor)}
        all_known = len(numbers) == len(self._denominators)
        return BatchResult(
            means=LateNumbers(self._means),
            denominators=numbers if all_known else LateNumbers(self._denominators),
            micro_batches=tuple(self.sizes),
            largest_cost=self.largest_cost,
            cost_after_rescue=self._cost_after_rescue,
            ooms_rescued=ooms,
        )


def combine_shares(shares: Sequence[BatchResult]) -> BatchResult:
    """Combines the results of a logical batch's shares, given in order."""
    if len(shares) == 1:
        return shares[0]
    return BatchResult(
        means=sum_by_term([share.means for share in shares]),
        denominators=sum_by_term([share.denominators for share in shares]),
        micro_batches=tuple(size for share in shares for size in share.micro_batches),
        largest_cost=max(share.largest_cost for share in shares),
        cost_after_rescue=max(share.cost_after_rescue for share in shares),
        ooms_rescued=sum(share.ooms_rescued for share in shares),
    )


def combine_updates(updates: Sequence[BatchResult]) -> BatchResult:
    """Combines the results of a step's optimizer updates: the mean of a term is taken over the updates that have the
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


def check_denominators(result: BatchResult, denominators: Mapping[str, float | Tensor] | None, *, size: int) -> None:
    """Checks that the parts' denominators add up to the whole batch's, or to its size where `denominators` is None."""
    for term, own in result.denominators.items():
        needed = float(size if denominators is None else denominators[term])
        if not math.isclose(own, needed, rel_tol=_DENOMINATOR_TOLERANCE, abs_tol=_DENOMINATOR_TOLERANCE):
            raise ArgumentError(
                f"The parts' denominators of {term!r} must add up to the whole batch's",
                value=f"{own:g} against {needed:g}",
                remedy="Compute denominators on the logical batch, before it is split",
            )


def check_divisor(term: str, total: float, denominator: float, where: str) -> None:
    """Checks that a denominator is not negative, which would maximize the loss, and that the sum of a term whose
    denominator is 0 is 0, too: there is nothing to divide it by.
    """
    if denominator < 0:
        raise ArgumentError(
            "The denominator of a loss term must not be negative",
            value=f"{term!r} has {denominator:g} {where}",
            remedy="Give as denominator the number of all items that the sum adds up; to maximize a term, return the "
            "negative sum",
        )
    if total and not denominator:
        raise ArgumentError(
            "A loss term whose denominator is 0 must have the sum 0",
            value=f"{term!r} has the sum {total:g} {where}",
            remedy="Give as denominator the number of all items that the sum adds up, or leave the other items out of "
            "the sum; weights as denominators must not add up to 0",
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
        meter: Meter of the device that the model is on, or the device: its name, as in `--device`, or a
            `torch.device`; None opens one.
        limits: Limit of a micro-batch: a number of samples, or the result of `find_max_size` or `predict_peak`
            (costs are then the counts of each sample that the prediction was given); or a function that returns the
            sizes of the micro-batches of a batch of `size` samples. Without limits, nothing is cut before memory runs
            out, and with them memory that runs out all the same splits further.
        rescue: The measures that are allowed after an out-of-memory.
        rules: How batches are cut, in place of rules that follow from `limits`.
        fit: How far a step goes to fit where a part of one sample runs out of memory, as in `--fit`: `auto`, `split`,
            `recompute`, `offload`, `offload-optimizer` or `offload-all`. The gradient is the same.
        optimizers: Optimizers of the model, or its one optimizer, whose state may wait on the host between their steps.
        shards: The model's shards on the ranks of a run; None: each rank has the whole model.

    Raises:
        ArgumentError: An argument has the wrong type; the model has no parameters, lazy ones, or is wrapped by DDP or
            FSDP; hooks step as gradients accumulate; or limits say nothing of a batch.
        DoesNotFitError: A prediction says that no sample fits.

    Attributes:
        batch_dependence: Whether samples depend on the rest of their batch, so that no split has the batch's gradient
            (BatchNorm, contrastive losses). Measured, and each term warned of once, when `run` or `run_share` splits
            the first, second, fourth, eighth (and so on) batch; anew when other parameters are trained, modules switch
            between training and evaluation, or a term begins; None until then.
        compares: Whether `run` and `run_share` compare batches that are split with the whole, and judge their sums and
            denominators; if not, the caller does.
        moves_weights: Whether the comparison, which is the last then, has left other weights than it met: computing the
            loss changes weights that are trained, or large ones.
        compiled: The compiler of the model, which a part that it fails for is computed without; None: there is none.
        ladder: The rungs that a step may be computed on.
        other: Computes the steps that try another rung; None: there are none.
        use_rung: Called with a rung before a part is computed on it for the first time; tells whether it can be.
    """

    def __init__(  # noqa: PLR0913 - the entrance for people with a loop of their own
        self,
        model: nn.Module,
        *,
        meter: Meter | str | torch.device | None = None,
        limits: DeviceLimits | PeakPrediction | SizeSearch | Split | int | None = None,
        rescue: RescueSettings | None = None,
        rules: SplitRules | None = None,
        fit: str = "auto",
        optimizers: Sequence[Optimizer] | Optimizer = (),
        shards: Shards | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError("MicroBatcher computes the steps of a torch.nn.Module", value=type(model).__name__,
                                remedy="Give the model that is trained: MicroBatcher(model)")  # fmt: skip
        if shards is None and (refusal := unsplittable_because(model)) is not None:
            raise refusal
        for kind, given in ((RescueSettings, {"rescue": rescue}), (SplitRules, {"rules": rules})):
            if None not in given.values():
                check_kinds(f"a {kind.__name__}", kind, f"Leave it out, or give {kind.__name__}()", **given)
        self._model = model
        self._parameters = list(model.parameters())
        self._meter = meter_of(meter, self._parameters[0].device)
        self._settings = rescue or RescueSettings()
        # Only the ranks of a run share a model out.
        check_choice("fit", fit, [choice for choice in CHOICES["fit"] if choice != "shard"])
        self._states: list[OffloadedState] = []
        self._repetitions = Repetitions()
        self.ladder = Ladder(self._rungs(fit, _listed(optimizers)))
        self.use_rung: Callable[[Rung], bool] = self.keep_states
        self._rescue = Rescue(self._meter, self._settings, climb=self.climb)
        # Evaluation costs less a sample, so limits that training learned do not hold for evaluation.
        self._evaluation = Rescue(self._meter, self._settings)
        self._trainable = [parameter.requires_grad for parameter in self._parameters]
        self._largest_planned = 0.0
        self._retries, self._retries_rose = self._meter.retries(), False
        self._last_largest_cost = math.inf
        self._takes_least = False  # Whether the last batch would take more memory in parts
        self._undo: Undo | None = None  # Of the batch that is computed now, or was computed last
        self._had_gradient = False  # Whether any part of the batch had one
        # Tensors beside the model's parameters that a backward pass gave gradients to, and the losses looked through.
        self._outside: list[weakref.ref[Tensor]] = []
        self._looked_through: set[tuple[str, ...]] = set()
        self._halves = HalfGradients()
        self._trains_outside = False  # Whether there ever was such a tensor
        self.batch_dependence: BatchDependence | None = None
        self.compares = True
        self._comparisons = Comparisons()
        self.moves_weights = False
        self._leaves_traces = False  # Whether a comparison changed something that cannot be put back, or may have
        self._whole_fits = True  # Whether memory never ran out for a whole batch in a comparison
        self.compiled: CompiledModel | None = None
        self.other: MicroBatcher | None = None
        self.shards = shards
        if self.ladder.rung.offload_optimizer:
            self.keep_states(self.ladder.rung)
        if isinstance(limits, PeakPrediction):
            capacity_bytes = self._meter.capacity_bytes
            limits = limits.on_device(self._meter.key, capacity_bytes, predicted_room(capacity_bytes))
        of_device = limits if isinstance(limits, DeviceLimits) else None
        self._split = limits if callable(limits) else None
        self._price = of_device.priced if of_device is not None and rules is None else _as_costs
        self.set_limits(rules or rules_of(limits), of_device)

    def __reduce__(self) -> Any:
        raise ArgumentError(
            "A MicroBatcher belongs to its model and its device, and cannot be copied or pickled alone",
            value="copy or pickle", remedy="Save batcher.state_dict(), and load it into a new MicroBatcher(model)",
        )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> MicroBatcher:
        # A copy of a model that has a batcher among its attributes has one of its own.
        made = memo[id(self)] = object.__new__(type(self))
        try:
            vars(made).update(deepcopy(vars(self), memo))
        except TypeError:
            self.__reduce__()
        return made

    def _rungs(self, fit: str, optimizers: Sequence[Optimizer]) -> tuple[Rung, ...]:
        """Returns the rungs of somebody else's loop, and prepares its optimizers for them."""
        names_state = fit in ("offload-optimizer", "offload-all")
        self._optimizers = optimizers
        if names_state and (not optimizers or self._refusal):
            give = "Give optimizers=[optimizer] to MicroBatcher, or fit='offload'"
            raise ArgumentError("The state of the optimizers that are given waits on the host",
                                value=f"fit={fit!r}: {self._refusal or 'none is given'}",
                                remedy="Give fit='offload', or another optimizer" if self._refusal else give
                                )  # fmt: skip
        if names_state or (fit == "auto" and not self._meter.is_host):
            self._states = [OffloadedState(optimizer) for optimizer in optimizers]
        return rungs_of(self._model, fit, is_host=self._meter.is_host, state_can_leave=bool(self._states))

    @cached_property
    def _refusal(self) -> str:
        """Why the state of the given optimizers cannot wait on the host, as a clause; empty where it can. Steps of such
        optimizers are tried, so that nobody is asked before memory has run out.
        """
        return next(filter(None, map(refusal_of, self._optimizers)), "")

    def keep_states(self, rung: Rung) -> bool:
        """Keeps the state of the given optimizers where a rung has it; tells whether it can be there, and whether there
        is room for it.
        """
        if not self._states:
            return True
        if rung.offload_optimizer and self._refusal:
            return False
        with self._meter.active(tensors_of([self._model])):
            keep = [state.keep for state in self._states]
            return keep_states(keep, on_host=rung.offload_optimizer, meter=self._meter)

    def run(
        self,
        losses_of: Callable[[int, int], Losses],
        batch: BatchCosts | Counts | int,
        *,
        denominators: Mapping[str, float] | None = None,
        weights: Mapping[str, float] | None = None,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> BatchResult:
        """Adds a logical batch's gradient to `.grad`.

        Args:
            losses_of: Computes the loss terms of samples `start:stop`: sums, with their own denominators.
            batch: Costs of the samples, or a number of samples that all cost the same; under the limits of a
                prediction, the counts of each sample.
            denominators: Denominator of each term for the whole batch; None: the number of samples, for every term.
            weights: Weight of each term; None: 1 each.
            scale: Applied to each part's loss before backward (a gradient scaler).

        Raises:
            DoesNotFitError: One sample is too much, or nothing may be split.
            ArgumentError: The parts' denominators do not add up to the whole batch's, a sum is a mean, or an argument
                has the wrong shape. After any error `.grad` has also the gradients of the parts that were computed
                before it.
        """
        costs = self._whole_batch(batch)
        # Hooks may be registered after the batcher was made.
        if (refusal := _hooked_because(self._model)) is not None:
            raise refusal
        result = self.add_share(losses_of, costs, denominators=denominators, weights=weights, scale=scale)
        check_denominators(result, denominators, size=len(costs))
        _check_divisors(result, f"in a batch of {len(costs)} samples")
        self._judge(losses_of, result, scale)
        return result

    def _judge(
        self, losses_of: Callable[[int, int], Losses], result: BatchResult, scale: Callable[[Tensor], Tensor]
    ) -> None:
        """Compares a batch or a share with the whole, where that is due. The first comparison raises where the loss
        would train something else; a later one warns, as of a split that changes the gradient: hours may be lost.
        """
        if not self._had_gradient and any(result.denominators.values()):
            raise ArgumentError(
                "At least one loss term needs a gradient", value=f"none of {sorted(result.means)} does",
                remedy="Compute them from the model's parameters, and not under torch.no_grad()",
            )  # fmt: skip
        if not self.compares or not self.is_compared(result):
            return
        is_first, has_room = self.batch_dependence is None, self._whole_fits and not self._rescue.ooms
        measure = partial(self.measure_dependence, losses_of, result.micro_batches, scale=scale, has_room=has_room,
                          judges=True)  # fmt: skip
        measured = self.leaving_no_trace(measure, [losses_of, scale])
        if self.moves_weights:
            warnings.warn(f"{MOVES_WEIGHTS}.", stacklevel=3)
        news = self.learn_dependence(measured)
        for term, fault in measured.faults.items() if is_first else ():
            raise ArgumentError(fault.fact(term), value=fault.numbers, remedy=fault.remedy(term))
        # At the line that called `run` or `run_share`.
        news.warn(stacklevel=4)

    def is_compared(self, result: BatchResult) -> bool:
        """Counts a batch or a share that was split; tells whether it is compared with the whole."""
        # Passes of shards wait for other ranks, and a compiler chooses kernels by the batches that it sees.
        if len(result.micro_batches) < 2 or self.shards is not None or self.compiled is not None:
            return False
        modes = (module.training for module in modules_of(self._model))
        if self._leaves_traces:
            return False
        is_due = self._comparisons.is_due((*self._trainable, *modes), result.means)
        told = () if self.batch_dependence is None else self.batch_dependence.terms
        return is_due and not all(term in told for term in result.means)

    def learn_dependence(self, measured: BatchDependence) -> BatchDependence:
        """Joins a comparison to those before; returns its news."""
        earlier = self.batch_dependence
        self.batch_dependence = measured if earlier is None else earlier.joined(measured)
        return measured.news(earlier)

    def leaving_no_trace(
        self, measure: Callable[[], BatchDependence], held: Iterable[Any], *, left_out: Iterable[Any] = ()
    ) -> BatchDependence:
        """Compares a batch with its parts, and puts back all that it has changed: gradients that a loss writes by
        itself, and the state of objects (metrics, counters, modules outside the model). Where something may not have
        been put back, this comparison is the last.

        Args:
            measure: Compares them.
            held: Functions and objects that a loss uses.
            left_out: Objects that are not looked into.
        """
        state: HeldState | None = None
        # Objects may be anybody's, and fail where they are looked at.
        with suppress(Exception), CatchOutOfMemory(), self._meter.active():
            state = HeldState(held, self._model, self._meter.device, left_out=left_out)
        if state is None:
            return UNKNOWN
        outside = [leaf for one in self._outside if (leaf := one()) is not None]
        weights = [parameter for module in state.modules for parameter in parameters_of(module)]
        leaves = {id(leaf): leaf for leaf in (*weights, *outside)}.values()
        gradients = [(leaf, leaf.grad) for leaf in leaves if leaf.is_leaf]
        for leaf, gradient in gradients:
            # Passes would add to it in place.
            if gradient is not None:
                leaf.grad = None
        try:
            return measure()
        finally:
            for leaf, gradient in gradients:
                # A tensor that was given another shape takes no gradient of the earlier shape.
                with suppress(RuntimeError):
                    leaf.grad = gradient
            state.restore()
            self._leaves_traces |= not state.is_whole
            self.moves_weights |= state.has_moved

    def measure_dependence(  # noqa: PLR0913 - two callers, and each gives some of the arguments
        self,
        losses_of: Callable[[int, int], Losses],
        micro_batches: tuple[int, ...],
        *,
        scale: Callable[[Tensor], Tensor] | None = None,
        has_room: bool = False,
        judges: bool = False,
        draws_alike: bool = False,
    ) -> BatchDependence:
        """Measures whether the losses of parts add up to the loss of their batch, which was cut into `micro_batches`.
        `judges` tells whether a mean in the place of a sum is an error, and not a dependence. `scale` is applied to
        losses before backward (a gradient scaler). `draws_alike` tells whether samples have the same random
        numbers in their part as in the batch, and running statistics take the place of the batch's.
        The first samples are computed whole and in two parts: as many as the largest micro-batch has, since these have
        fitted; where there is room, the whole batch. Where memory runs out, half as many are tried.
        """
        half = torch.is_autocast_enabled(self._meter.device.type)
        samples, retries = max(micro_batches), self._meter.retries()
        tried = [
            *([sum(micro_batches)] if has_room else []),
            *(samples >> power for power in range(samples.bit_length())),
        ]
        try:
            for samples in takewhile(lambda size: size > 1, tried):
                # Unequal parts, since equal ones hide a mean; but of two samples, since a single one has no variance.
                first = max(samples * SPLIT[0] // sum(SPLIT), min(_LEAST_PART, samples - 1))
                on_rung = computed_on(self._rung, self._model)
                with CatchOutOfMemory(), self._meter.active(), _without_compiler(), on_rung:
                    sizes = (first, samples - first)
                    return measure_batch_dependence(
                        self._model, losses_of, None, half=half, sizes=sizes, judges=judges, scale=scale,
                        draws_alike=draws_alike,
                    )  # fmt: skip
                self._meter.release()
                self._whole_fits &= samples < sum(micro_batches)
        except Exception:  # noqa: BLE001 - a look at the loop must not end it
            return UNKNOWN
        finally:
            # The comparison may run out of memory, which says nothing of the steps.
            self._meter.forgive_retries(since=retries)
        return UNKNOWN

    def run_share(
        self,
        losses_of: Callable[[int, int], Losses],
        batch: BatchCosts | Counts | int,
        *,
        denominators: Mapping[str, float | Tensor] | None,
        weights: Mapping[str, float] | None = None,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> BatchResult:
        """Adds the gradient of one rank's share of a logical batch to `.grad`, as `run` does; a share may be empty.

        Sample 0 is the share's first, but `denominators` are the whole batch's: the gradients of all ranks add up to
        the batch's gradient. The caller adds them up once a batch, since ranks need not have as many parts. A rank that
        splits its share compares the share with its parts as `run` does, by itself.

        Raises:
            ArgumentError: A sum is a mean, the denominators of parts are not those of the share, or an argument has the
                wrong shape.
        """
        result = self.add_share(losses_of, batch, denominators=denominators, weights=weights, scale=scale)
        if result.micro_batches and self.compares:
            # Reading denominators that are on the device makes the host wait.
            if not isinstance(result.denominators, LateNumbers):
                _check_divisors(result, f"in a share of {sum(result.micro_batches)} samples")
            self._judge(losses_of, result, scale)
        return result

    def add_share(
        self,
        losses_of: Callable[[int, int], Losses],
        batch: BatchCosts | Counts | int,
        *,
        denominators: Mapping[str, float | Tensor] | None,
        weights: Mapping[str, float] | None = None,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> BatchResult:
        """Adds the gradient of a share as `run_share` does, and compares nothing: for callers that do it."""
        self._had_gradient = False
        _check_call(losses_of, denominators, weights, scale)
        costs = self.costs_of(batch)
        if not len(costs) and self.shards is None:
            return BatchResult()
        self._parameters = parameters_of(self._model)
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._trainable:
            # Activations differ, so limits that were learned before do not hold.
            self._trainable, self._rescue.backoff, self._largest_planned = trainable, Backoff(), 0.0
            self._looked_through.clear()
        self._outside = []
        self._undo = undo = Undo(self._model, self._meter, self._parameters, self._outside)
        batch_loss = _BatchLoss(losses_of, len(costs), denominators, weights, scale)
        compute = partial(self._add_gradient, batch_loss, undo)
        together = nullcontext if self.shards is None else self.shards.together
        limit, rescue, totals = self.limit_for(costs), self._rescue, _Totals()
        ooms_before = ooms = rescue.ooms
        with self._meter.active(tensors_of([self._model])), self._half_gradients(scale, totals.sizes):
            for part in self._rounds(rescue.tries(costs, limit), compute, undo, ("training", *trainable)):
                is_repeatable, is_undone = self._repeating(part), undo.undo_scope()
                with part, self._compiler(part), is_repeatable, is_undone, rescue.record_foreign_memory(), together():
                    losses = compute(part.start, part.stop)
                if part.is_done:
                    cost = limit.charged(costs.cost(part.start, part.stop))
                    totals.add(losses, part, cost, rescued=rescue.ooms > ooms)
                    ooms = rescue.ooms
        self._largest_planned = max(self._largest_planned, min(limit.cost, costs.cost(0, len(costs))))
        self._last_largest_cost = totals.largest_cost
        # Two halves take more memory where the gradients of the first take more than half of the batch.
        self._takes_least = len(totals.sizes) == 1 and 2 * self.rules.gradient_cost >= totals.largest_cost
        return totals.result(ooms - ooms_before)

    def _rounds(
        self, tries: Iterator[Try], compute: Callable[[int, int], object], undo: Undo, kind: tuple[object, ...]
    ) -> Iterator[Try]:
        """Yields the parts of a batch; on shards, in rounds with the other ranks."""
        if self.shards is None:
            return tries
        passes = self.shards.passes(kind=(id(self), *kind), run=compute, undo_scope=undo.undo_scope,
                                    model=self._model, meter=self._meter, ladder=self.ladder,
                                    use_rung=self.use_rung)  # fmt: skip
        return self.shards.rounds(tries, passes)

    def limit_for(self, costs: BatchCosts) -> MicroBatchLimit:
        """Returns the limit of a micro-batch of a batch."""
        limit = self.rules.limit_for(costs)
        if self._split is None:
            return limit
        return replace(limit, planned=_planned(self._split(len(costs)), len(costs)))

    def _half_gradients(self, scale: Callable[[Tensor], Tensor], sizes: Sequence[int]) -> AbstractContextManager[None]:
        """Opens a span in which float16 gradients of parts overflow where the gradient of the batch would."""
        scaler = getattr(scale, "__self__", None)
        is_scaled = isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
        return self._halves.of_parts(self._parameters, sizes) if is_scaled and self.shards is None else nullcontext()

    def _compiler(self, part: Try) -> AbstractContextManager[None]:
        return nullcontext() if self.compiled is None else self.compiled.trying(part)

    @contextmanager
    def _repeating(self, part: Try) -> Iterator[None]:
        """Runs a part once more where a module saved other tensors the second time: none is computed again then."""
        try:
            yield
        except RepeatedError as error:
            part.again = True
            forget_frames(error)
        except Exception as error:
            if not self.ladder.rung.recompute or not is_not_repeatable(error):
                raise
            warnings.warn(f"{NOT_REPEATABLE}.", stacklevel=2)
            self.ladder.without_recomputation()
            self.use_rung(self.ladder.rung)
            part.again = True
            forget_frames(error)

    def _add_gradient(self, batch_loss: _BatchLoss, undo: Undo, start: int, stop: int) -> Losses:
        """Computes samples start:stop forward and backward; returns their share of each term's mean, with its
        denominators.
        """
        # The host makes the inputs of a micro-batch while the device computes the one before: a GPU works through its
        # queue by itself. A thread would draw random numbers in another order, and inputs that are made before
        # the part is known to fit would have to be dropped after a rescue.
        self._meter.begin_part()
        with computed_on(self._rung, self._model, repetitions=self._repetitions):
            computed = batch_loss.losses_of(start, stop)
            losses = _check_losses(computed, batch_loss.denominators, batch_loss.weights)
            means = {term: batch_loss.mean(term, total) for term, (total, _) in losses.items()}
            loss = batch_loss.weighted(means)
            # A micro-batch whose terms are all constant needs no gradient.
            if loss.requires_grad:
                # Looking takes a twentieth of the host's time of a pass. Parts keep the device busy for longer.
                may_be_new = self._trains_outside or stop - start < batch_loss.size
                self._look_outside(loss, tuple(means), undo, may_be_new=may_be_new)
                batch_loss.scaled(loss).backward()
                if self.compiled is not None:
                    self.compiled.keep_gradients()
                self._had_gradient = True
        return {term: (mean.detach(), losses[term][1]) for term, mean in means.items()}

    def _look_outside(self, loss: Tensor, terms: tuple[str, ...], undo: Undo, *, may_be_new: bool) -> None:
        """Finds the tensors beside the model's parameters that a loss gives gradients to, so that a failed part is
        undone there too: once for every set of terms, and wherever they `may_be_new`. Gathered weights are not among
        them: shards get their gradients.
        """
        if self.shards is None:
            undo.will_run_backward(loss)
        if terms in self._looked_through and not may_be_new:
            return
        self._looked_through.add(terms)
        known = {id(parameter) for parameter in self._parameters} | {id(leaf()) for leaf in self._outside}
        for leaf in leaves_of(loss):
            if id(leaf) not in known and not (self.shards is not None and isinstance(leaf, nn.Parameter)):
                undo.protect(leaf)
                self._outside.append(weakref.ref(leaf))
                self._trains_outside = True

    def merge_gradients(self) -> None:
        """Adds the gradients of a batch's earlier parts to the gradients of the current part. For a `losses_of`
        that runs backward and steps the optimizer by itself, in the last part; a part cannot be undone after it.
        """
        if self._undo is not None:
            self._undo.merge()

    def evaluate(
        self, compute: Callable[[int, int], T], batch: BatchCosts | Counts | int, limit: MicroBatchLimit | None = None
    ) -> list[T]:
        """Computes something of samples `start:stop` without gradients, and returns the results of the parts in order.
        Without a limit, parts are as large as those in training.
        """
        check_functions("lambda start, stop: model(x[start:stop])", compute=compute)
        costs, rescue = self.costs_of(batch) if self.shards else self._whole_batch(batch), self._evaluation
        together: Callable[[], AbstractContextManager[None]] = nullcontext
        if self.shards is not None:
            # What is computed may call other modules than at the last time.
            self.shards.forget((id(self), "evaluation"))
            together = self.shards.together
        limit = limit or replace(self.rules.limit_for(costs), alone=0.0)
        undo = Undo(self._model, self._meter)
        results: list[T] = []
        with self._meter.active(tensors_of([self._model])), torch.no_grad():
            for part in self._rounds(rescue.tries(costs, limit), compute, undo, ("evaluation",)):
                is_repeatable, is_undone = self._repeating(part), undo.undo_scope()
                with part, self._compiler(part), is_repeatable, is_undone, rescue.record_foreign_memory(), together():
                    result = compute(part.start, part.stop)
                if part.is_done:
                    results.append(result)
        if self._settings.regrow:
            planned = min(limit.cost, costs.cost(0, len(costs)))
            rescue.backoff = rescue.backoff.after_step(planned=planned, factor=self._settings.factor)
        return results

    def is_limited(self, *, trains: bool = True) -> bool:
        """Tells whether anything bounds micro-batches: limits, or an out-of-memory."""
        rescue = self._rescue if trains else self._evaluation
        return self._split is not None or self.rules != _NO_RULES or rescue.backoff.limit < math.inf

    def sizes(self, costs: BatchCosts, limit: MicroBatchLimit | None = None, *, trains: bool = True) -> tuple[int, ...]:
        """Returns the sizes of the micro-batches that a batch would be cut into now."""
        rescue = self._rescue if trains else self._evaluation
        return rescue.cut(costs, 0, limit or self.limit_for(costs))

    def record_failure(self, costs: BatchCosts, *, trains: bool = True) -> None:
        """Records that memory ran out for a batch that somebody else's step computed at once: later ones are cut."""
        (self._rescue if trains else self._evaluation).record_failure(costs, self.limit_for(costs))

    def count_rescue(self, *, trains: bool = True) -> None:
        """Counts a batch that was computed in parts after a recorded failure."""
        (self._rescue if trains else self._evaluation).ooms_rescued += 1

    def forget_failures(self) -> None:
        """Lets new limits alone decide the sizes of micro-batches in training."""
        self._rescue.backoff = Backoff()

    def costs_of(self, batch: Any) -> BatchCosts:
        """Prices a batch as `run` takes it, by the limits."""
        return batch if isinstance(batch, BatchCosts) else self._price(batch)

    def _whole_batch(self, batch: Any) -> BatchCosts:
        costs = self.costs_of(batch)
        if len(costs) < 1:
            raise ArgumentError("A logical batch has at least one sample", value="it has none",
                                remedy="Leave empty batches out")  # fmt: skip
        return costs

    def stepped(self) -> None:
        """Counts an optimizer step; micro-batches grow back after enough of them."""
        backoff, retries = self._rescue.backoff, self._meter.retries()
        rose = retries > self._retries
        # The allocator released its cache to serve an allocation, and again in the next step: it works at its limit,
        # where every step is slow and memory too fragmented to last.
        if rose and self._retries_rose and not self._takes_least:
            backoff = backoff.after_pressure(self._last_largest_cost)
        elif self._settings.regrow:
            backoff = backoff.after_step(planned=self._largest_planned, factor=self._settings.factor)
        self._retries, self._retries_rose = retries, rose
        self._rescue.backoff = backoff
        if self._settings.regrow and self.ladder.after_step() and not self.use_rung(self.ladder.rung):
            self.ladder.climb()

    def climb(self) -> bool:
        """Goes on to the next rung; tells whether there is one."""
        # A compiled model is traced once, on one rung.
        return self.compiled is None and self.ladder.climb() and self.use_rung(self.ladder.rung)

    @property
    def _rung(self) -> Rung:
        """The rung that a pass is computed on."""
        return self.ladder.rung if self.compiled is None else self.compiled.on_rung(self.ladder.rung)

    @property
    def is_undisturbed(self) -> bool:
        """Whether nothing but the limits decides how training batches are computed: no out-of-memory so far does."""
        return self._rescue.backoff.limit == math.inf and not self._rescue.contention_level and self.ladder.level == 0

    def watch(self, on_oom: Callable[[], object]) -> None:
        """Registers a function that is called after each out-of-memory of training, such as `MemoryMonitor.rescued`."""
        check_functions("batcher.watch(monitor.rescued)", on_oom=on_oom)
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
        elsewhere = 0 if self.other is None else self.other.ooms_rescued
        return self._rescue.ooms_rescued + self._evaluation.ooms_rescued + elsewhere

    def state_dict(self) -> dict[str, Any]:
        """Returns the limits in force, for a checkpoint."""
        return {
            "backoff": asdict(self._rescue.backoff), "largest_planned": self._largest_planned,
            "trainable": list(self._trainable), "ooms_rescued": self._rescue.ooms_rescued,
            "ladder": self.ladder.state_dict(), "other": None if self.other is None else self.other.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], *, same_device: bool = True) -> None:
        """Restores a state of `state_dict`, but for the ladder's; out-of-memories of another device limit nothing on
        this one.

        Raises:
            ArgumentError: It is no such state.
        """
        try:
            backoff, planned, rescued = Backoff(**state["backoff"]), state["largest_planned"], state["ooms_rescued"]
            trainable, other = list(state["trainable"]), state["other"]
        except (KeyError, TypeError, IndexError) as error:
            remedy = "Save batcher.state_dict() in the checkpoint, and load that"
            rule = "The state of a MicroBatcher is what its state_dict() returned"
            raise ArgumentError(rule, value=shown(state), remedy=remedy) from error
        self._rescue.backoff = backoff if same_device else Backoff()
        self._largest_planned = planned
        # Those that the limits belong to: the model may have been made with others, of an earlier epoch.
        self._trainable = trainable
        self._rescue.ooms_rescued = rescued
        if self.other is not None and other is not None:
            self.other.load_state_dict(other, same_device=same_device)

    def go_on_with(self, model: nn.Module) -> None:
        """Computes with a whole model from now on, in place of its shards; its out-of-memories stay known."""
        self._model, self._parameters, self.shards, self._undo = model, parameters_of(model), None, None
        self._evaluation = Rescue(self._meter, self._settings)

    def set_limits(self, rules: SplitRules, limits: DeviceLimits | None) -> None:
        """Replaces rules and limits after the device was explored again."""
        self.rules = rules
        self._rescue.phase = None if limits is None else limits.training
        self._rescue.oom_cost = math.inf
        self._evaluation.phase = None if limits is None else limits.evaluation


def unsplittable_because(model: nn.Module) -> ArgumentError | None:
    """Returns the error of a model whose passes wait for other ranks, which may have fewer parts, whose hooks act once
    a batch, or that has no parameters yet; None where its batches can be split.
    """
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    rule = (
        "Each rank cuts its share of a batch into parts of its own, so that no pass may wait for those of other ranks"
    )
    if "DistributedDataParallel" in kinds:
        lines = "call run_share with the whole batch's denominators, and add up gradients once a batch (docs/python.md)"
        return ArgumentError(
            rule, value="DistributedDataParallel", remedy=f"Give the module inside (model.module), {lines}"
        )
    if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        return ArgumentError(rule, value="FSDP", remedy="Keep the whole model on each rank (docs/python.md)")
    if "SyncBatchNorm" in kinds and dist.is_initialized() and dist.get_world_size() > 1:
        return ArgumentError(rule, value="SyncBatchNorm", remedy="Take a norm that needs no other samples (GroupNorm)")
    if (error := untrainable_because(model)) is not None:
        return error
    return _hooked_because(model)


def untrainable_because(model: nn.Module) -> ArgumentError | None:
    """Returns the error of a model that has no parameters, or not yet; None where it has them all."""
    if any(is_lazy(one) for one in (*model.parameters(), *model.buffers())):
        return ArgumentError(
            "Parameters of lazy modules are there once the model has run", value=type(model).__name__,
            remedy="Run it on one sample before",
        )  # fmt: skip
    if next(model.parameters(), None) is None:
        return ArgumentError("A model to be trained has parameters", value=type(model).__name__,
                             remedy="Give the model whose weights are trained")  # fmt: skip
    return None


def _without_compiler() -> AbstractContextManager[Any]:
    """Lets compiled models compute without their compiler in the block: it compiles a function for a few shapes only,
    which belong to training.
    """
    # Without this module nothing has been compiled, and importing it takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _hooked_because(model: nn.Module) -> ArgumentError | None:
    """Returns the error of a model whose hooks see gradients as they accumulate; None where it has none."""
    if not any(parameter._post_accumulate_grad_hooks for parameter in parameters_of(model)):
        return None
    hooked = next(name for name, parameter in model.named_parameters() if parameter._post_accumulate_grad_hooks)
    return ArgumentError(
        "A hook that sees gradients as they accumulate would run in each micro-batch, and an optimizer in it would "
        "step in each of them",
        value=f"a hook of {hooked}", remedy="Step once the batch's gradient is there, after `run`",
    )  # fmt: skip


def _check_call(losses_of: Any, denominators: Any, weights: Any, scale: Any) -> None:
    """Checks the kinds of the arguments that somebody else's loop gives for a batch."""
    example = 'lambda start, stop: {"loss": (total(start, stop), stop - start)}'
    check_functions(example, losses_of=losses_of)
    check_functions("scale=scaler.scale of a torch.amp.GradScaler", scale=scale)
    for name, numbers in (("denominators", denominators), ("weights", weights)):
        if numbers is None:
            continue
        check_kinds(
            "a number for each term", Mapping, f'Give {name}={{"loss": 1.0}}, or leave it out', **{name: numbers}
        )
        for term, number in numbers.items():
            if not _is_number(number):
                raise ArgumentError(f"{name} is a number for each term", value=f"{term!r} has {shown(number)}",
                                    remedy=f'Give {name}={{"{term}": 1.0}}, or leave it out')  # fmt: skip


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real) and not isinstance(value, bool)


def _check_losses(
    losses: Any, denominators: Mapping[str, float | Tensor] | None, weights: Mapping[str, float] | None
) -> Losses:
    """Checks the shape of the losses of somebody else's loop."""
    pairs = losses.values() if isinstance(losses, Mapping) else ()
    if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ArgumentError(_LOSSES, value=shown(losses),
                            remedy='Return {"loss": (total, stop - start)} of samples start:stop')  # fmt: skip
    for term, (total, own) in losses.items():
        if not isinstance(total, Tensor) or total.dim():
            got = f"of shape {tuple(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
            raise ArgumentError(_LOSSES, value=f"{term!r} is {got}", remedy="A sum is a tensor without dimensions")
        if not _is_number(own) or (isinstance(own, Tensor) and own.dim()):
            raise ArgumentError(_LOSSES, value=f"the denominator of {term!r} is {shown(own)}",
                                remedy="A denominator is a number, or a tensor without dimensions")  # fmt: skip
    if weights is not None and not set(losses) <= set(weights):
        raise ArgumentError("Every term has a weight where any has", value=f"{sorted(set(losses) - set(weights))}",
                            remedy="Name it in weights, or leave weights out")  # fmt: skip
    for term in losses:
        if denominators is not None and term not in denominators:
            raise ArgumentError("Every term has a denominator", value=f"{term!r} is not in {sorted(denominators)}",
                                remedy="Name it in denominators, or leave denominators out")  # fmt: skip
    checked: Losses = losses
    return checked


def _as_costs(batch: Any) -> BatchCosts:
    """Prices the batch of somebody else's loop: a cost for each sample, or a number of samples."""
    _, counts = counts_of(batch)
    if isinstance(batch, Mapping) or np.ndim(batch) > 1:
        raise ArgumentError("A batch is a number of samples, or a cost for each of them", value=shown(batch),
                            remedy="Give len(x), or a list of costs")  # fmt: skip
    return BatchCosts.of_samples(counts[:, 0])


def _listed(optimizers: Any) -> list[Optimizer]:
    """Returns the optimizers that a loop gave: a list of them, or a single one."""
    listed: list[Any] = (
        [optimizers] if isinstance(optimizers, Optimizer) or not isinstance(optimizers, Iterable) else [*optimizers]
    )
    for optimizer in listed:
        check_kinds("a list of optimizers", Optimizer, "Give optimizers=[optimizer]", optimizers=optimizer)
    # Accelerate's class calls the step of an optimizer inside, unless a gradient scaler calls it.
    return [one.optimizer if type(one).__module__.startswith("accelerate.") and one.scaler is None else one
            for one in listed]  # fmt: skip


def _check_divisors(result: BatchResult, where: str) -> None:
    """Checks the denominators of terms. Reading a mean makes the host wait."""
    for term, own in result.denominators.items():
        if own <= 0:
            check_divisor(term, result.means[term], own, where)


def _planned(sizes: Any, samples: int) -> tuple[int, ...]:
    """Reads the sizes that a function of the loop's own cut a batch into."""
    planned: tuple[int, ...] = ()
    # NumPy and PyTorch have whole numbers of their own; what is no list of whole numbers raises TypeError.
    with suppress(TypeError):
        planned = tuple(operator.index(size) for size in sizes)
    if min(planned, default=0) < 1 or sum(planned) != samples:
        rule = "A split is the sizes of the micro-batches, 1 or more each, which add up to the batch"
        raise ArgumentError(rule, value=f"{shown(sizes)} of {samples} samples",
                            remedy="Return all sizes: limits=lambda size: solve_accumulation(size, 64)")  # fmt: skip
    return planned


def rules_of(limits: Any) -> SplitRules:
    """Returns how batches are cut under limits that a loop gave.

    Raises:
        ArgumentError: They are no limits.
    """
    if isinstance(limits, DeviceLimits):
        tuned = limits.training.tuned_limit
        return SplitRules(safe_limit=tuned, tuned_limit=tuned)
    if limits is None or callable(limits):
        return SplitRules()
    samples = limits.size if isinstance(limits, SizeSearch) else limits
    if isinstance(samples, bool) or not isinstance(samples, Integral):
        raise ArgumentError(
            "limits bound a micro-batch: by samples, by a result of find_max_size or predict_peak, or by a function",
            value=f"limits={shown(limits)}",
            remedy="Give limits=64, or limits=lambda size: solve_accumulation(size, 64)",
        )  # fmt: skip
    if samples < 1:
        raise ArgumentError("A micro-batch holds at least one sample", value=f"limits={shown(limits)}",
                            remedy="Give limits=1 or more, or leave it out")  # fmt: skip
    return SplitRules(samples=int(samples))
