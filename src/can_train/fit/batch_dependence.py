"""Measures whether the gradient of a sample depends on the rest of its batch, as it does with BatchNorm, and whether
the sums and denominators of a loss add up.

A small batch is computed whole and split, with dropout off, and the gradients are compared. Where they differ, no split
is exact, and the plan says so; a mean in the place of a sum is an error. A few samples may not tell (a rare class, a
term that begins later), so that batches are compared again and again, ever less often.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import ge
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from can_train.errors import DataError
from can_train.fit.pass_state import Generators, Snapshot, leaves_of
from can_train.memory.cuda_operators import composite, register
from can_train.memory.out_of_memory import CatchOutOfMemory

if TYPE_CHECKING:
    from can_train.fit.micro_batcher import Losses

_aten: Final = torch.ops.aten
# Samples of the two parts of the batch: unequal, since equal parts hide a mean that is taken over each part.
SPLIT: Final = (3, 5)
# Largest relative L2 difference of the gradients that is no dependence of samples on each other. Round-off is 1e-16 and
# 1e-7 per operation.
TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-4}
# Change of a gradient by a split, in changes by another rounding of the weights, that may be round-off, too. The parts'
# gradients may cancel each other within each sample, so that their size does not tell.
ROUNDINGS: Final = 3.0
# Whole numbers with as many bytes. The last place of a weight of 16 bits is up to 0.8 % of it, and no rounding.
_AS_WHOLE: Final = {4: torch.int32, 8: torch.int64}
_HALF_TOLERANCE: Final = 3e-2  # Tolerance of float16, bfloat16 and mixed precision
# Functions that drop activations, in torch and torch.nn.functional, in place or not.
_DROPOUT: Final = re.compile(r"(feature_)?(alpha_)?dropout([123]d)?_?")

# Functions that drop activations among other things: the argument's name and its position. Recurrent layers take packed
# sequences, which have one argument less in front.
_WITH_DROPOUT: Final = {
    "scaled_dot_product_attention": ("dropout_p", 4),
    "multi_head_attention_forward": ("dropout_p", 10),
    "lstm": ("dropout", 6),
    "gru": ("dropout", 6),
    "rnn_tanh": ("dropout", 6),
    "rnn_relu": ("dropout", 6),
}
_MASKS: Final = "apply_spec_augment"  # Switch in the configuration of a speech model of transformers
# Functions whose results are random numbers, in torch and of tensors.
_DRAWS: Final = re.compile(r"(rand|randn|normal|bernoulli|poisson)(_like)?|(normal|uniform|bernoulli|exponential)_")
# Functions whose results are random whole numbers between bounds, such as the steps of a diffusion.
_DRAWS_WHOLE: Final = re.compile(r"randint(_like)?|random_")
_BOUNDS: Final = ("low", "from", "high", "to")  # Names of the bounds, from below
_DRAWN: Final = 0.5  # Takes the place of random numbers where samples must have the same ones in a part as in the whole
OTHER_DRAWS: Final = (
    "The step draws random numbers, and others for micro-batches; apart from that, the gradient is the batch's"
)
UNREPEATABLE: Final = (
    "its step draws random numbers that can-train cannot repeat, such as NumPy's or a permutation, so that no"
    " comparison shows how its loss adds up"
)
_LEAST_SHOWN: Final = 0.001  # Relative difference below which a sentence gives a bound: 0.0% reads as none
_COUNT_TOLERANCE: Final = 1e-6  # Relative difference of two sums of denominators that is round-off
# Kinds of batches that are counted each by itself. A loop that trains other parameters in every step has more.
_MOST_KINDS: Final = 16


@dataclass(frozen=True, kw_only=True)
class LossFault:
    """A loss term whose sum or denominator does not add up over the parts of a batch.

    Attributes:
        sizes: Samples of the two parts.
        sums: The term's sum of either part, and of the whole batch.
        denominators: Its denominators of the same.
        is_mean: Whether the sum is a mean; if not, the denominators alone are wrong.
    """

    sizes: tuple[int, int]
    sums: tuple[float, float, float]
    denominators: tuple[float, float, float]
    is_mean: bool

    def fact(self, term: str, where: str = "") -> str:
        """Returns the fault as a sentence; `where` names the function that returned the term."""
        returned = f"{term!r} that {where} returns" if where else f"{term!r}"
        if self.is_mean:
            return f"The sum of {returned} is a mean, which is as large of a part as of the whole batch"
        return f"The denominators of {returned} do not add up, though the sums do"

    @property
    def numbers(self) -> str:
        """The sums, with their denominators and their numbers of samples."""
        samples = (*(str(size) for size in self.sizes), f"all {sum(self.sizes)}")
        pairs = zip(self.sums, self.denominators, samples, strict=True)
        shown = [f"({total:.4g}, {count:g}) for {number} samples" for total, count, number in pairs]
        return f"{shown[0]}, {shown[1]} and {shown[2]}"

    def remedy(self, term: str) -> str:
        """Returns the line that is right."""
        if self.is_mean:
            weighted = f"the sum of weighted losses and the sum of the weights: {{{term!r}: (total, weight)}}"
            plain = f'Give the sum of n items (reduction="sum") or their mean times n: {{{term!r}: (mean * n, n)}}'
            return f"{plain}. Of a weighted mean, give {weighted}"
        return f"Give the number n of items in the sum: {{{term!r}: (total, n)}}"


def percent(difference: float) -> str:
    """Writes a relative difference that is more than round-off."""
    return f"{difference:.1%}" if difference >= _LEAST_SHOWN else f"less than {_LEAST_SHOWN:.1%}"


@dataclass(frozen=True, kw_only=True)
class BatchDependence:
    """The changes of a gradient by a split."""

    terms: Mapping[str, float]  # Loss terms whose gradient a split changes, with the relative L2 difference
    modules: tuple[str, ...]  # Names of the normalising layers that make samples depend on each other
    drops: bool  # Whether the model drops activations: the masks depend on the split
    faults: Mapping[str, LossFault] = field(default_factory=dict)  # By term, where a loss is not as it should be
    trains: bool = True  # Whether the loss has a gradient of any parameter
    measured: bool = True  # Whether it could be measured, which takes memory; if not, nothing is known
    draws: bool = False  # Whether the step draws random numbers beside dropout; samples then had the same ones
    unknown_because: str = "A few samples could not be computed both at once and split"

    def joined(self, later: BatchDependence) -> BatchDependence:
        """Returns all that is known after a later comparison, too."""
        if not later.measured:
            return self
        if not self.measured:
            return later
        terms = {**self.terms, **{term: max(change, self.terms.get(term, 0.0)) for term, change in later.terms.items()}}
        modules = tuple(dict.fromkeys((*self.modules, *later.modules)))
        faults = {**later.faults, **self.faults}
        return replace(later, terms=terms, modules=modules, drops=self.drops or later.drops, faults=faults)

    def news(self, earlier: BatchDependence | None) -> BatchDependence:
        """Returns of a comparison the dependences and faults that an earlier one did not tell."""
        if earlier is None:
            return self
        terms = {term: change for term, change in self.terms.items() if term not in earlier.terms}
        faults = {term: fault for term, fault in self.faults.items() if term not in earlier.faults}
        return replace(self, terms=terms, modules=self.modules if terms else (), faults=faults, measured=True)

    def sentences(self, *, split: bool, ranks: int = 1) -> list[str]:
        """Returns the sentences of a plan about it; `split` tells whether its batches are split, as most never are, and
        `ranks` on how many processes.
        """
        sentences = []
        if not self.measured:
            unknown = "whether samples of a batch depend on each other is not known"
            sentences.append(f"{self.unknown_because}: {unknown}")
        sentences += [f"{fault.fact(term)}. {fault.remedy(term)}" for term, fault in self.faults.items()]
        if self.terms:
            through = f" through {', '.join(self.modules)}" if self.modules else ""
            largest = ", ".join(f"{term} by {percent(difference)}" for term, difference in self.terms.items())
            depend = f"Samples depend on the rest of their batch{through}"
            parts = f"micro-batches, and the shares of {ranks} processes," if ranks > 1 else "micro-batches"
            sentences.append(f"{depend}: {parts} change the gradient of {largest}")
        if self.drops and ranks > 1:
            sentences.append(
                f"Dropout draws other masks on each of {ranks} processes, and for each micro-batch, than a single"
                " process does: losses differ from those of one; apart from that, the gradient is the batch's"
            )
        elif self.drops and split:
            sentences.append(
                "Dropout draws other masks for micro-batches than for the whole batch; apart from that, the gradient"
                " is the batch's"
            )
        return sentences

    def check(self, where: str) -> None:
        """Raises DataError for a loss that would train something else; `where` names the function that computes it."""
        for term, fault in self.faults.items():
            raise DataError(fault.fact(term, where), value=fault.numbers, remedy=fault.remedy(term))
        if not self.trains:
            raise DataError(f"The loss that {where} returns has no gradient", value="of any parameter that is trained",
                            remedy="Compute it from the outputs of the model that is given, "
                                   "without detach(), item(), argmax() or torch.no_grad()")  # fmt: skip

    def warn(self, instead: str = "", *, stacklevel: int = 3) -> None:
        """Warns of it, but for dropout, which most models have; `instead` is a sentence in place of the usual ones."""
        for sentence in [instead] if instead else self.sentences(split=False):
            warnings.warn(f"{sentence}.", stacklevel=stacklevel)


class Comparisons:
    """Decides which of the batches that are split are compared with the whole. A mean over some samples (classes with
    weights, labels that are not ignored) may be a mean over all in the first batch, and a term may begin with 0.
    """

    def __init__(self) -> None:
        self._batches: Counter[Hashable] = Counter()
        self._terms: dict[Hashable, set[str]] = {}

    def is_due(self, kind: Hashable = "", terms: Iterable[str] = ()) -> bool:
        """Counts a batch; tells whether it is compared: of each kind (the stage of a loop, the parameters that are
        trained) the first, second, fourth, eighth, and so on, and a batch with a loss term that no batch of the kind
        had.
        """
        if kind not in self._batches and len(self._batches) >= _MOST_KINDS:
            kind = None
        known = self._terms.setdefault(kind, set())
        begins = not known.issuperset(terms)
        known.update(terms)
        self._batches[kind] += 1
        return begins or self._batches[kind].bit_count() == 1


# Parameters of a model whose products take a processor seconds: 100 million take 11 s.
_LARGE_MODEL: Final = 10_000_000
_LARGE_WEIGHT: Final = 2**16  # Numbers of a weight: a smaller weight is multiplied in less time than it is folded
_FOLDED: Final = 64  # Most features that are left of those that a product adds up
_LEAST_FOLDED: Final = 8  # Fewer would tell little of them


@contextmanager
def _folded_if_large(model: nn.Module) -> Iterator[None]:
    """Folds the products with a large model's weights in the block, in the whole process: groups of features are added,
    with random signs, before they are multiplied by the sum of their weights.

    The gradient belongs to a smaller model of the same form. Each feature of each sample and each weight still
    contributes to it. Samples depend on each other in it where they do in the model. Its products take a tenth of the
    time.
    """
    # Lazy parameters have no size before the first forward pass.
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    if sum(parameter.numel() for parameter in parameters) <= _LARGE_MODEL or parameters[0].device.type != "cpu":
        yield
        return
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters if parameter.numel() > _LARGE_WEIGHT}
    # Dimensions that a product adds up, of inputs and weights.
    dims = {_aten.linear.default: (-1, 1), _aten.conv1d.default: (1, 1), _aten.conv2d.default: (1, 1)}

    def product(operator: OpOverload, inputs: Tensor, weight: Tensor, *options: Any, **named: Any) -> Tensor:
        of_inputs, of_weight = dims[operator]
        if weight.untyped_storage().data_ptr() in weights and inputs.shape[of_inputs] == weight.shape[of_weight]:
            inputs, weight = _fold(inputs, of_inputs, weight, of_weight)
        result: Tensor = composite(operator)(inputs, weight, *options, **named)
        return result

    library = register("AutogradCPU", {operator: partial(product, operator) for operator in dims})
    try:
        yield
    finally:
        library._destroy()


def _fold(inputs: Tensor, of_inputs: int, weight: Tensor, of_weight: int) -> tuple[Tensor, Tensor]:
    """Adds up groups of the features in a dimension of inputs and weights; leaves few features as they are."""
    features = weight.shape[of_weight]
    left = next(size for size in range(_FOLDED, 0, -1) if features % size == 0)
    if features == left or left < _LEAST_FOLDED:
        return inputs, weight
    groups = (features // left, left)
    generator = torch.Generator().manual_seed(features)
    signs = (2 * torch.randint(2, groups, generator=generator) - 1).to(inputs.dtype) / groups[0] ** 0.5
    of_inputs %= inputs.dim()
    trailing = (1,) * (inputs.dim() - 1 - of_inputs)
    folded = (inputs.unflatten(of_inputs, groups) * signs.reshape(*groups, *trailing)).sum(of_inputs)
    return folded, weight.unflatten(of_weight, groups).sum(of_weight)


Gradients = dict[str, list[Tensor]]  # Of each term, by parameter
UNKNOWN: Final = BatchDependence(terms={}, modules=(), drops=False, measured=False)
UNREPLACED: Final = replace(
    UNKNOWN, draws=True, unknown_because="The step draws random numbers that can-train cannot repeat"
)
ON_META: Final = replace(UNKNOWN, unknown_because="The model is on meta and has no values, so it computes no samples")


@dataclass(frozen=True)
class _Pass:
    """The loss terms of some samples: sums, denominators, and gradients of the sums ÷ the whole batch's denominators.

    Attributes:
        reached: Whether any parameter got a gradient.
        outside: Tensors beside the model's parameters that have gradients, too; these come after the parameters'.
    """

    sums: dict[str, float]
    counts: dict[str, float]
    gradients: Gradients
    reached: bool
    outside: Sequence[Tensor] = ()

    def aligned(self, terms: Iterable[str], parameters: Sequence[Tensor], outside: Sequence[Tensor]) -> _Pass:
        """Returns the pass with all of these terms, and with the gradients of these tensors alone. A term that its loss
        did not return is a sum of 0, of nothing.
        """
        none = dict.fromkeys(terms, 0.0)
        # Expanded zeros take no memory.
        zeros = [_as_real(leaf.new_zeros(()).expand_as(leaf)) for leaf in (*parameters, *outside)]
        places = {id(leaf): place for place, leaf in enumerate(self.outside, len(parameters))}
        gradients = dict.fromkeys(none, zeros)
        for term, own in self.gradients.items():
            of_outside = [own[places[id(leaf)]] if id(leaf) in places else zero
                          for leaf, zero in zip(outside, zeros[len(parameters) :], strict=True)]  # fmt: skip
            gradients[term] = [*own[: len(parameters)], *of_outside]
        return replace(self, sums=none | self.sums, counts=none | self.counts, gradients=gradients, outside=outside)


@dataclass(frozen=True)
class _Passes:
    """A batch that was computed whole, and then in two parts.

    Attributes:
        given: Denominators of the whole batch, where they are known without the loss.
        tolerance: Largest relative difference that is round-off.
    """

    sizes: tuple[int, int]
    whole: _Pass
    first: _Pass
    second: _Pass
    given: Mapping[str, float] | None
    tolerance: float

    def difference(self, term: str, first: float, second: float) -> float:
        """Returns the relative L2 difference of the whole gradient from a sum of the parts' gradients with these
        weights; 0 where there is none.
        """
        difference = size = of_parts = 0.0
        rows = (self.whole.gradients[term], self.first.gradients[term], self.second.gradients[term])
        for whole, one, other in zip(*rows, strict=True):
            difference += _square_sum(first * one + second * other - whole)
            size += _square_sum(whole)
            of_parts += first**2 * _square_sum(one) + second**2 * _square_sum(other)
        # Where a model has learned, the parts' gradients cancel each other, and what is left is their rounding.
        if difference <= self.tolerance**2 * of_parts:
            return 0.0
        return (difference / size) ** 0.5 if size > 0 else 0.0

    @property
    def is_finite(self) -> bool:
        """Whether all numbers of the whole gradient are finite."""
        return all(math.isfinite(_square_sum(each)) for own in self.whole.gradients.values() for each in own)

    @property
    def tells(self) -> bool:
        """Whether the whole gradient is finite and not 0: numbers may mask all samples, and then any way holds."""
        sizes = [_square_sum(each) for own in self.whole.gradients.values() for each in own]
        return 0 < sum(sizes) < math.inf

    def adds_up(self, term: str) -> bool:
        """Tells whether the parts' denominators add up to the whole's."""
        first, second, whole = self._counts(term)
        needed = whole if self.given is None else self.given.get(term, 0.0)
        return math.isclose(first + second, needed, rel_tol=_COUNT_TOLERANCE, abs_tol=_COUNT_TOLERANCE)

    def change(self, term: str) -> float:
        """Returns the change of a term's gradient by the split, as training divides it."""
        if self.given is not None or self.adds_up(term):
            return self.difference(term, 1.0, 1.0)
        # Where only the loss tells denominators, the parts' denominators are added up.
        first, second, whole = self._counts(term)
        factor = whole / (first + second or 1.0)
        return self.difference(term, factor, factor)

    def fault(self, term: str, change: float) -> LossFault | None:
        """Returns the fault of a term whose gradient a split changes by `change`; None where it has none, or depends on
        its batch so that none can be told.
        """
        adds_up = self.adds_up(term)
        if change <= self.tolerance and (adds_up or self.given is None):
            return None
        is_sum = not adds_up and self.difference(term, 1.0, 1.0) <= self.tolerance
        if not is_sum and not any(self._is_mean(term, share) for share in self._shares(term)):
            return None
        sums = (self.first.sums[term], self.second.sums[term], self.whole.sums[term])
        return LossFault(sizes=self.sizes, sums=sums, denominators=self._counts(term), is_mean=not is_sum)

    def _counts(self, term: str) -> tuple[float, float, float]:
        return self.first.counts[term], self.second.counts[term], self.whole.counts[term]

    def _is_mean(self, term: str, share: float) -> bool:
        """Tells whether the whole is the mean of its parts; `share` is the share of the first part."""
        # A gradient that is not finite tells nothing.
        if not self.difference(term, share, 1 - share) <= self.tolerance:
            return False
        first, second, whole = (part.sums[term] for part in (self.first, self.second, self.whole))
        size = max(abs(first), abs(second), abs(whole))
        return abs(share * first + (1 - share) * second - whole) <= self.tolerance * size

    def _shares(self, term: str) -> Iterator[float]:
        """Yields shares that the first part of a mean may have: of the samples, of the denominators, of other items."""
        yield self.sizes[0] / sum(self.sizes)
        first, second, _ = self._counts(term)
        if first + second:
            yield first / (first + second)
        apart, along, numbers = 0.0, 0.0, 0
        rows = (self.whole.gradients[term], self.first.gradients[term], self.second.gradients[term])
        for whole, one, other in zip(*rows, strict=True):
            direction = one.double() - other
            apart += float(direction.square().sum())
            along += float((direction * (whole.double() - other)).sum())
            numbers += whole.numel()
        # Any number lies on a line with two others.
        if numbers > 1 and 0 < along < apart:
            yield along / apart


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _square_sum(tensor: Tensor) -> float:
    numbers = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(torch.linalg.vector_norm(numbers, dtype=torch.float64)) ** 2


def measure_batch_dependence(  # noqa: PLR0913 - two callers, and each gives some of the arguments
    model: nn.Module,
    losses_of: Callable[[int, int], Losses],
    denominators: Mapping[str, float] | None,
    *,
    half: bool = False,
    sizes: Sequence[int] = SPLIT,
    judges: bool = True,
    scale: Callable[[Tensor], Tensor] | None = None,
    draws_alike: bool = False,
) -> BatchDependence:
    """Compares the gradients of the first `sum(sizes)` samples of a batch, computed whole and in parts of these sizes;
    leaves the model, which is in training mode, as it was. On processors the products of a large model are folded.
    Gradients of tensors outside of the model that the loss trains are compared, too.

    Args:
        model: The model.
        losses_of: Computes the loss terms of samples `start:stop`.
        denominators: Denominators of the whole, where they are known without the loss.
        half: Whether matrix products run in half precision.
        sizes: Samples of the two parts.
        judges: Whether sums and denominators are judged, too.
        scale: Applied to losses before backward, so that small gradients in half precision are not 0.
        draws_alike: Whether samples have the same random numbers in their part as in the whole, and normalising layers
            use their running statistics. Where the gradient is then 0, or not finite, nothing is known.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A loss may train a head outside of a model that is frozen.
    any_parameter = next(iter(parameters or model.parameters()))
    if scale is not None and float(scale(torch.ones((), device=any_parameter.device))) == 1:
        scale = None
    snapshot = Snapshot(model, any_parameter.device)
    first, second = sizes
    normalising = {name: module for name, module in model.named_modules() if _normalises(module)}
    faults: dict[str, LossFault] = {}

    numbers = DrawnNumbers(first + second)

    def run(start: int, stop: int, divisors: Mapping[str, float] | None) -> _Pass:
        numbers.begin(start, stop)
        return _pass(parameters, losses_of, (start, stop), divisors, scale)

    def passes(tolerance: float) -> _Passes:
        is_told = False
        while not is_told:
            snapshot.restore()
            whole = run(0, first + second, denominators)
            snapshot.restore()
            divisors = whole.counts if denominators is None else denominators
            one, other = run(0, first, divisors), run(first, first + second, divisors)
            is_told = not numbers.fall_back()
        whole, one, other = _aligned((whole, one, other), parameters)
        return _Passes((first, second), whole, one, other, given=denominators, tolerance=tolerance)

    try:
        alike = _without_statistics(normalising.values()) if draws_alike else nullcontext()
        with _folded_if_large(model), NoDropout(model, numbers if draws_alike else None) as mode, alike:
            computed = passes(0.0)
            if scale is not None and not computed.is_finite:
                # A scaler begins with a scale that is too large, and finds a smaller one.
                scale = None
                computed = passes(0.0)
            if draws_alike and not computed.tells:
                return UNREPLACED
            # A loss may switch to half precision by itself.
            tolerance = tolerance_of(any_parameter.dtype, half=half or mode.half)
            computed = replace(computed, tolerance=tolerance)
            change_of = computed.change if judges else partial(computed.difference, first=1.0, second=1.0)
            changes = {term: change_of(term) for term in computed.whole.sums}
            terms = {term: change for term, change in changes.items() if change > tolerance}
            if terms:
                # The gradient of a student that is still its teacher is nothing but round-off.
                divisors = computed.whole.counts if denominators is None else denominators

                def again(samples: int) -> _Pass:
                    snapshot.restore()
                    return run(0, samples, divisors)

                rounding = _round_off(computed, parameters, terms, again)
                terms = {term: change for term, change in terms.items() if term not in rounding}
                changes = {term: 0.0 if term in rounding else change for term, change in changes.items()}
            trains = computed.whole.reached or not any(computed.whole.counts.values())
            faults = _faults(computed, changes) if judges else {}
            if judges and terms.keys() - faults.keys() and (normalising or mode.draws):
                # A layer that makes samples depend on each other, or random numbers, would hide a mean.
                del computed, change_of
                with NoDropout(model, numbers), _without_statistics(normalising.values()):
                    computed = passes(tolerance)
                    faults |= _faults(computed, {term: computed.change(term) for term in terms})
    finally:
        snapshot.restore()
    terms = {term: change for term, change in terms.items() if term not in faults}
    modules = tuple(normalising if terms else ())
    return BatchDependence(terms=terms, modules=modules, drops=mode.seen, faults=faults, trains=trains)


def _round_off(
    computed: _Passes, parameters: Sequence[Tensor], changes: Mapping[str, float], compute: Callable[[int], _Pass]
) -> set[str]:
    """Returns the terms whose gradient another rounding of the weights changes about as much as a split does; none
    where memory runs out. `compute` computes that many of the samples once more.
    """

    def differences(earlier: _Pass, samples: int) -> dict[str, float]:
        one, other = _aligned((earlier, compute(samples)), parameters)
        twice = _Passes((samples, 0), one, other, other, given=None, tolerance=0.0)
        return {term: twice.difference(term, 1.0, 0.0) for term in changes}

    # The first part takes less memory.
    for earlier, samples in ((computed.whole, sum(computed.sizes)), (computed.first, computed.sizes[0])):
        with CatchOutOfMemory():
            with rounded_otherwise([*parameters, *earlier.outside]):
                rounded = differences(earlier, samples)
            terms = {term for term, change in changes.items() if change <= ROUNDINGS * rounded[term]}
            # Random numbers that cannot be repeated change a gradient without any rounding.
            repeated = differences(earlier, samples) if terms else {}
            return {term for term in terms if ROUNDINGS * repeated[term] < changes[term]}
    return set()


@contextmanager
def rounded_otherwise(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Changes the last place of weights in the block, which takes no memory."""
    # Autograd does not see changes of `data`, and no step has moved the weights. Subclasses may lack such views.
    whole_numbers = [tensor.data.view(_AS_WHOLE[tensor.element_size()]) for tensor in tensors
                     if type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point()
                     and tensor.layout is torch.strided and tensor.element_size() in _AS_WHOLE]  # fmt: skip
    for numbers in whole_numbers:
        numbers.add_(1)
    try:
        yield
    finally:
        for numbers in whole_numbers:
            numbers.sub_(1)


def _faults(computed: _Passes, changes: Mapping[str, float]) -> dict[str, LossFault]:
    faults = {term: computed.fault(term, change) for term, change in changes.items()}
    return {term: fault for term, fault in faults.items() if fault is not None}


def _normalises(module: nn.Module) -> bool:
    is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return is_norm and module.training and not isinstance(module, nn.modules.instancenorm._InstanceNorm)


@contextmanager
def _without_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Lets normalising layers use their running statistics in the block."""
    modules = list(modules)
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


@contextmanager
def no_dependence(model: nn.Module) -> Iterator[None]:
    """Lets a sample have the same values in any part of its batch, in the block: dropout is off, normalising layers use
    their running statistics, and a constant takes the place of random numbers.
    """
    with NoDropout(model, DrawnNumbers(0)), _without_statistics(filter(_normalises, model.modules())):
        yield


def draws_numbers(
    model: nn.Module, losses_of: Callable[[int, int], Losses], samples: int, *, draws_alike: bool = False
) -> bool:
    """Tells whether other random numbers change the gradients of the first samples of a batch; leaves the model, and
    the generators, as they were. Dropout is off; `draws_alike` tells whether both passes have the numbers of the first,
    as far as they can be replaced.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A loss may train a head outside of a model that is frozen.
    any_parameter = next(iter(parameters or model.parameters()))
    snapshot = Snapshot(model, any_parameter.device)
    try:
        numbers = DrawnNumbers(samples)
        with NoDropout(model, numbers if draws_alike else None) as mode:
            numbers.begin(0, samples)
            one = _pass(parameters, losses_of, (0, samples), None)
            # A pass may change buffers, which are no draws.
            drawn = Generators(any_parameter.device)
            snapshot.restore()
            drawn.restore()
            numbers.begin(0, samples, again=True)
            other = _pass(parameters, losses_of, (0, samples), None)
    finally:
        snapshot.restore()
    one, other = _aligned((one, other), parameters)
    tolerance = tolerance_of(any_parameter.dtype, half=mode.half)
    twice = _Passes((samples, 0), one, other, other, given=None, tolerance=0.0)
    return any(twice.difference(term, 1.0, 0.0) > tolerance for term in one.sums)


def tolerance_of(dtype: torch.dtype, *, half: bool) -> float:
    """Returns the largest relative difference of gradients that is round-off; `half` tells whether matrix products run
    in half precision.
    """
    return _HALF_TOLERANCE if half else TOLERANCE.get(dtype, _HALF_TOLERANCE)


class DrawnNumbers:
    """The random numbers of a batch: a sample has the same ones in its part as in the whole batch.

    The numbers of each draw in a pass of the whole batch are kept, and the draws of a pass of samples start:stop have
    these samples' share, along the dimension whose size the samples decide. Where sizes do not tell the share, a
    constant takes the place of all numbers.

    Args:
        num_samples: Samples of the whole batch; 0: the constant is taken from the beginning.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._of_whole: list[Tensor] = []
        self._part: tuple[int, int] | None = None  # None: the pass is of the whole batch, whose numbers are kept
        self._draw = 0  # Number of the next draw of the pass
        self._is_constant = not num_samples
        self._is_unclear = False

    def begin(self, start: int, stop: int, *, again: bool = False) -> None:
        """Begins a pass of samples start:stop; `again`: with the numbers that are kept, also of the whole batch."""
        is_kept = not again and stop - start == self._num_samples
        self._part, self._draw = None if is_kept else (start, stop), 0
        if is_kept:
            self._of_whole.clear()

    def fall_back(self) -> bool:
        """Takes a constant in place of all numbers from now on, if sizes did not tell the numbers of a part; returns
        whether the passes are to be repeated for it.
        """
        is_new = self._is_unclear and not self._is_constant
        self._is_constant |= self._is_unclear
        return is_new

    def replace(self, result: Tensor, constant: float) -> None:
        """Puts the numbers of the samples in the place of those that were drawn."""
        with torch.no_grad():
            if self._is_constant:
                result.fill_(constant)
            elif self._part is None:
                self._of_whole.append(result.detach().clone())
            elif (numbers := self._share(result)) is not None:
                result.copy_(numbers)
            else:
                self._is_unclear = True
                result.fill_(constant)
            self._draw += 1

    def _share(self, result: Tensor) -> Tensor | None:
        """Returns the numbers of this pass's samples in its next draw; None where sizes do not tell them."""
        assert self._part is not None, "the whole batch keeps its numbers"
        start, stop = self._part
        kept = self._of_whole[self._draw] if self._draw < len(self._of_whole) else None
        if kept is None or kept.dim() != result.dim():
            return None
        if kept.shape == result.shape:
            return kept
        for dim, (whole, own) in enumerate(zip(kept.shape, result.shape, strict=True)):
            # Samples that are padded to their batch's longest have fewer numbers in a part.
            each, rest = divmod(whole, self._num_samples)
            others = [size for place, size in enumerate(kept.shape) if place != dim]
            needed = [size for place, size in enumerate(result.shape) if place != dim]
            if each and not rest and own == each * (stop - start) and all(map(ge, others, needed)):
                share = kept.narrow(dim, start * each, own)
                return share[tuple(slice(size) for size in result.shape)]
        return None


class NoDropout(TorchFunctionMode):
    """Turns dropout off wherever it is called, as a layer or as a function, and the masks that speech models of
    transformers draw with NumPy (SpecAugment); everything else stays in training mode.

    Args:
        model: The model.
        numbers: What takes the place of random numbers; None: they are drawn.

    Attributes:
        seen: Whether any activation would have been dropped.
        half: Whether anything was computed in half precision.
        draws: Whether random numbers were drawn by other functions.
    """

    def __init__(self, model: nn.Module, numbers: DrawnNumbers | None = None) -> None:
        super().__init__()
        self.seen = self.half = self.draws = False
        self._numbers = numbers
        configs = [getattr(module, "config", None) for module in model.modules() if module.training]
        self._masking = {id(config): config for config in configs if getattr(config, _MASKS, False) is True}

    def __enter__(self) -> Self:
        for config in self._masking.values():
            self.seen = True
            setattr(config, _MASKS, False)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for config in self._masking.values():
            setattr(config, _MASKS, True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if _DROPOUT.fullmatch(name):
            share = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
            self.seen |= bool(training and share)
            return args[0] if args else kwargs["input"]
        if name in _WITH_DROPOUT:
            keyword, position = _WITH_DROPOUT[name]
            if keyword in kwargs:
                self.seen |= bool(kwargs[keyword])
                kwargs[keyword] = 0.0
            # The probability is the only float among the positional arguments of these functions.
            places = [i for i, value in enumerate(args) if isinstance(value, float) and i >= position - 2]
            self.seen |= any(args[i] for i in places)
            args = tuple(0.0 if i in places else value for i, value in enumerate(args))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.half |= result.dtype in (torch.float16, torch.bfloat16)
            is_whole = _DRAWS_WHOLE.fullmatch(name) is not None
            if is_whole or _DRAWS.fullmatch(name):
                self.draws = True
                if self._numbers is not None and (is_whole or result.is_floating_point()):
                    self._numbers.replace(result, _middle(args, kwargs) if is_whole else _DRAWN)
        return result


def _middle(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Returns the number in the middle of the bounds that a function draws whole numbers from."""
    bounds = [value for value in args if isinstance(value, int)] + [kwargs[name] for name in _BOUNDS if name in kwargs]
    return int(bounds[0] + bounds[-1]) // 2 if len(bounds) > 1 else int(bounds[0]) // 2 if bounds else 0


def _pass(
    parameters: Sequence[Tensor],
    losses_of: Callable[[int, int], Losses],
    ends: tuple[int, int],
    divisors: Mapping[str, float] | None,
    scale: Callable[[Tensor], Tensor] | None = None,
) -> _Pass:
    """Computes the loss terms of samples, and each term's own gradient; without divisors, of its mean. A loss may train
    more than the model.
    """
    losses = losses_of(*ends)
    known = {id(parameter) for parameter in parameters}
    reached = {id(leaf): leaf for total, _ in losses.values() if total.requires_grad for leaf in leaves_of(total)}
    outside = [leaf for key, leaf in reached.items() if key not in known]
    leaves = [*parameters, *outside]
    counts = {term: float(own) for term, (_, own) in losses.items()}
    divisors, is_reached, gradients = divisors or counts, False, dict[str, list[Tensor]]()
    for left, (term, (total, _)) in enumerate(losses.items(), 1 - len(losses)):
        # A term that the whole batch lacks is divided by nothing.
        loss = total / (divisors.get(term) or 1.0)
        # Gradients are compared with each other: they stay scaled.
        loss = loss if scale is None else scale(loss)
        # A compiled model's graph cannot be kept.
        own = _gradient(loss, leaves, retain_graph=left < 0) if loss.requires_grad else [None] * len(leaves)
        is_reached |= any(gradient is not None for gradient in own[: len(parameters)])
        gradients[term] = [_as_real(torch.zeros_like(leaf) if gradient is None else gradient)
                           for gradient, leaf in zip(own, leaves, strict=True)]  # fmt: skip
    sums = {term: float(total.detach()) for term, (total, _) in losses.items()}
    return _Pass(sums, counts, gradients, is_reached, outside)


def _aligned(passes: Sequence[_Pass], parameters: Sequence[Tensor]) -> list[_Pass]:
    """Returns passes with the terms and tensors of each other: a loss may leave out a term that has nothing in some
    samples. Tensors that a single pass has reached are left out: inputs that ask for a gradient are made in each pass.
    """
    terms = dict.fromkeys(term for one in passes for term in one.sums)
    leaves = {id(leaf): leaf for one in passes for leaf in one.outside}
    reached = Counter(id(leaf) for one in passes for leaf in one.outside)
    outside = [leaf for key, leaf in leaves.items() if reached[key] > 1]
    return [one.aligned(terms, parameters, outside) for one in passes]


def _gradient(loss: Tensor, leaves: Sequence[Tensor], *, retain_graph: bool) -> list[Tensor | None]:
    """Computes gradients as `autograd.grad` does, which reentrant checkpoints silently give none."""
    earlier = [(leaf, leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        loss.backward(retain_graph=retain_graph)
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, gradient in earlier:
            leaf.grad = gradient
