"""Measures whether the gradient of a sample depends on the rest of its batch, as it does with BatchNorm.

A small batch is computed whole and split, with dropout off, and the gradients are compared. Where they differ, no split
is exact, and the plan says so.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from can_train.fit.optimizer import Snapshot

if TYPE_CHECKING:
    from can_train.fit.micro_batcher import Losses

# Samples of the two parts of the batch: unequal, since equal parts hide a mean that is taken over each part.
SPLIT: Final = (3, 5)
# Largest relative L2 difference of the gradients that is no dependence of samples on each other. Round-off is 1e-16 and
# 1e-7 per operation.
TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-4}
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


@dataclass(frozen=True, kw_only=True)
class BatchDependence:
    """The changes of a gradient by a split."""

    terms: Mapping[str, float]  # Loss terms whose gradient a split changes, with the relative L2 difference
    modules: tuple[str, ...]  # Names of the normalising layers that make samples depend on each other
    drops: bool  # Whether the model drops activations: the masks depend on the split
    means: tuple[str, ...] = ()  # Loss terms whose sums are means
    measured: bool = True  # Whether it could be measured, which takes memory; if not, nothing is known

    def sentences(self, *, split: bool, ranks: int = 1) -> list[str]:
        """Returns the sentences of a plan about it; `split` tells whether its batches are split, as most never are, and
        `ranks` on how many processes.
        """
        sentences = []
        if not self.measured:
            unknown = "whether samples of a batch depend on each other is not known"
            sentences.append(f"A few samples could not be computed both at once and split: {unknown}")
        sentences += [self.sentence_of_mean(term) for term in self.means]
        if self.terms:
            through = f" through {', '.join(self.modules)}" if self.modules else ""
            largest = ", ".join(f"{term} {difference:.1%}" for term, difference in self.terms.items())
            depend = f"Samples depend on the rest of their batch{through}"
            sentences.append(f"{depend}: micro-batches change the gradient of {largest}")
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

    def warn(self, instead: str = "") -> None:
        """Warns of it, but for dropout, which most models have; `instead` is a sentence in place of the usual ones."""
        for sentence in [instead] if instead else self.sentences(split=False):
            warnings.warn(f"{sentence}.", stacklevel=3)

    @staticmethod
    def sentence_of_mean(term: str) -> str:
        """Returns the sentence about a loss term whose sum is a mean."""
        cure = 'give the sum (reduction="sum"), or the mean times its denominator'
        return f"The sum of {term!r} is a mean, which is as large of a part as of the whole batch: {cure}"


Gradients = dict[str, list[Tensor]]  # Of each term, by parameter
UNKNOWN: Final = BatchDependence(terms={}, modules=(), drops=False, measured=False)


def measure_batch_dependence(
    model: nn.Module,
    losses_of: Callable[[int, int], Losses],
    denominators: Mapping[str, float] | None,
    *,
    half: bool = False,
    sizes: Sequence[int] = SPLIT,
) -> BatchDependence:
    """Compares the gradients of the first `sum(sizes)` samples of a batch, computed whole and in parts of these sizes;
    leaves the model, which is in training mode, as it was. `denominators` are theirs; `half` tells whether matrix
    products run in half precision.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    snapshot = Snapshot(model, parameters[0].device)

    def gradients_of(computed: Callable[[int, int], Losses], parts: Sequence[int]) -> Gradients:
        snapshot.restore()
        return _gradients(parameters, computed, parts, denominators or {})

    def means_of(start: int, stop: int) -> Losses:
        whole = denominators or {}
        return {
            term: (own / (whole[term] or 1.0) * total, own) for term, (total, own) in losses_of(start, stop).items()
        }

    try:
        with NoDropout() as no_dropout:
            if denominators is None:
                denominators = {term: own for term, (_, own) in losses_of(0, sum(sizes)).items()}
            whole, split = gradients_of(losses_of, (sum(sizes),)), gradients_of(losses_of, sizes)
            # A loss may switch to half precision by itself.
            half = half or no_dropout.half
            tolerance = tolerance_of(parameters[0].dtype, half=half)
            terms = _differences(split, whole, tolerance)
            # Where the parts' gradients have the mean that their sum should be, the loss is a mean.
            averaged = _differences(gradients_of(means_of, sizes), whole, tolerance) if terms else {}
    finally:
        snapshot.restore()
    means = tuple(term for term in terms if term not in averaged)
    terms = {term: difference for term, difference in terms.items() if term not in means}
    normalising = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        and module.training
        and not isinstance(module, nn.modules.instancenorm._InstanceNorm)
    ]
    modules = tuple(normalising if terms else ())
    return BatchDependence(terms=terms, modules=modules, drops=no_dropout.seen, means=means)


def change_by_draws(model: nn.Module, losses_of: Callable[[int, int], Losses], samples: int) -> float:
    """Returns the largest relative difference of gradients of the first samples of a batch, computed twice, with other
    random numbers each time; leaves the model, and the generators, as they were. Dropout is off.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    snapshot = Snapshot(model, parameters[0].device)
    try:
        with NoDropout():
            denominators = {term: own for term, (_, own) in losses_of(0, samples).items()}
            one, other = (_gradients(parameters, losses_of, (samples,), denominators) for _ in range(2))
    finally:
        snapshot.restore()
    return max(_differences(one, other, tolerance=0.0).values(), default=0.0)


def tolerance_of(dtype: torch.dtype, *, half: bool) -> float:
    """Returns the largest relative difference of gradients that is round-off; `half` tells whether matrix products run
    in half precision.
    """
    return _HALF_TOLERANCE if half else TOLERANCE.get(dtype, _HALF_TOLERANCE)


def _differences(split: Gradients, whole: Gradients, tolerance: float) -> dict[str, float]:
    """Returns the terms whose gradients differ, with the relative L2 difference."""
    terms = {}
    for term, gradients in whole.items():
        pairs = list(zip(split[term], gradients, strict=True))
        difference = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
        size = sum(float(other.double().square().sum()) for _, other in pairs)
        if size > 0 and (difference / size) ** 0.5 > tolerance:
            terms[term] = (difference / size) ** 0.5
    return terms


class NoDropout(TorchFunctionMode):
    """Turns dropout off wherever it is called, as a layer or as a function; everything else stays in training mode.

    Attributes:
        seen: Whether any activation would have been dropped.
        half: Whether anything was computed in half precision.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.half = False

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
        self.half |= isinstance(result, Tensor) and result.dtype in (torch.float16, torch.bfloat16)
        return result


def _gradients(
    parameters: list[nn.Parameter],
    losses_of: Callable[[int, int], Losses],
    sizes: Sequence[int],
    denominators: Mapping[str, float],
) -> Gradients:
    """Returns each term's own gradient, added up over the parts."""
    sums: Gradients = {}
    start = 0
    for size in sizes:
        losses = losses_of(start, start + size)
        for left, (term, (total, _)) in enumerate(losses.items(), 1 - len(losses)):
            loss = total / (denominators[term] or 1.0)
            known = sums.setdefault(term, [torch.zeros_like(parameter) for parameter in parameters])
            if loss.requires_grad:
                # A compiled model's graph cannot be kept.
                torch._foreach_add_(known, _gradient(loss, parameters, retain_graph=left < 0))
        start += size
    return sums


def _gradient(loss: Tensor, parameters: list[nn.Parameter], *, retain_graph: bool) -> list[Tensor]:
    """Computes gradients as `autograd.grad` does, which reentrant checkpoints silently give none."""
    earlier = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        loss.backward(retain_graph=retain_graph)
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    finally:
        for parameter, gradient in zip(parameters, earlier, strict=True):
            parameter.grad = gradient
