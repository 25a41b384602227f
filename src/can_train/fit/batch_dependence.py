"""Measures whether a model couples the samples of a batch (BatchNorm does): one small batch, whole and split, dropout
off, gradients compared. Where they differ, no split is exact, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from can_train.fit.random_state import Snapshot

if TYPE_CHECKING:
    from can_train.fit.micro_batcher import Losses

SPLIT: Final = (3, 5)
"""Samples of the two parts of the batch."""


TOLERANCE: Final = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative L2 difference of the gradients above which samples are coupled; round-off is 1e-16 and 1e-7 an operation.
Mixed precision is compared with the tolerance of float16."""


_HALF_TOLERANCE: Final = 3e-2


_DROPOUTS: Final = frozenset(
    ("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_",
     "feature_alpha_dropout", "feature_alpha_dropout_", "dropout1d", "dropout2d", "dropout3d")
)  # fmt: skip
"""Functions that drop activations, in torch and torch.nn.functional."""


_WITH_DROPOUT: Final = {
    "scaled_dot_product_attention": ("dropout_p", 4),
    "multi_head_attention_forward": ("dropout_p", 10),
    "lstm": ("dropout", 6),
    "gru": ("dropout", 6),
    "rnn_tanh": ("dropout", 6),
    "rnn_relu": ("dropout", 6),
}
"""Functions that also drop activations: the argument's name and its position. Recurrent layers are given packed
sequences with one argument less in front."""


@dataclass(frozen=True, kw_only=True)
class BatchDependence:
    """What a split changes.

    Attributes:
        terms: Loss terms whose gradient a split changes, with the relative L2 difference.
        modules: Normalising layers that couple samples, by name.
        drops: Whether the model drops activations: their masks depend on the split.
        measured: Whether memory allowed to find out; where it did not, nothing is known.
    """

    terms: Mapping[str, float]
    modules: tuple[str, ...]
    drops: bool
    measured: bool = True

    def sentences(self, *, split: bool) -> list[str]:
        """What a plan says of it; of dropout only where batches are split, which most never are."""
        said = []
        if not self.measured:
            said.append(f"Not enough memory for {sum(SPLIT)} samples at once: whether they are coupled is not known")
        if self.terms:
            by = f" by {', '.join(self.modules)}" if self.modules else ""
            largest = ", ".join(f"{term} {difference:.1%}" for term, difference in self.terms.items())
            said.append(f"Samples of a batch are coupled{by}: micro-batches change the gradient of {largest}")
        if self.drops and split:
            said.append(
                "Dropout draws other masks for other micro-batches; apart from it their gradient is the batch's"
            )
        return said


def measure_batch_dependence(
    model: nn.Module,
    losses_of: Callable[[int, int], Losses],
    denominators: Mapping[str, float],
    *,
    device: torch.device,
    half: bool = False,
) -> BatchDependence:
    """Compares the gradients of a batch computed whole and in parts; leaves the model as it was.

    Args:
        model: In training mode.
        losses_of: Computes the loss terms of samples `start:stop` of a batch of `sum(SPLIT)`.
        denominators: Per term, of the whole batch.
        device: Of the model.
        half: Whether matrix products run in half precision.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    snapshot = Snapshot(model, device)
    tolerance = _HALF_TOLERANCE if half else TOLERANCE.get(parameters[0].dtype, _HALF_TOLERANCE)
    try:
        with NoDropout() as no_dropout:
            whole = _gradients(parameters, losses_of, (sum(SPLIT),), denominators)
            snapshot.restore()
            split = _gradients(parameters, losses_of, SPLIT, denominators)
    finally:
        snapshot.restore()
    differences = {term: _relative(split[term], whole[term]) for term in whole}
    coupled = {term: difference for term, difference in differences.items() if difference > tolerance}
    modules = tuple(name for name, module in model.named_modules() if _normalises(module)) if coupled else ()
    return BatchDependence(terms=coupled, modules=modules, drops=no_dropout.seen)


class NoDropout(TorchFunctionMode):
    """Turns dropout off wherever it is called, as a layer or as a function, and leaves all else in training mode.

    Attributes:
        seen: Whether any activation would have been dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            share = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
            self.seen |= bool(training and share)
            return args[0] if args else kwargs["input"]
        if name in _WITH_DROPOUT:
            args = self._without_dropout(name, args, kwargs)
        return func(*args, **kwargs)

    def _without_dropout(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        keyword, position = _WITH_DROPOUT[name]
        if keyword in kwargs:
            self.seen |= bool(kwargs[keyword])
            kwargs[keyword] = 0.0
        # The probability is the only float among the positional arguments of these functions.
        places = [i for i, value in enumerate(args) if isinstance(value, float) and i >= position - 2]
        self.seen |= any(args[i] for i in places)
        return tuple(0.0 if i in places else value for i, value in enumerate(args))


def _gradients(
    parameters: list[nn.Parameter],
    losses_of: Callable[[int, int], Losses],
    sizes: Sequence[int],
    denominators: Mapping[str, float],
) -> dict[str, list[Tensor | None]]:
    """Each term's own gradient, added up over the parts."""
    sums: dict[str, list[Tensor | None]] = {}
    start = 0
    for size in sizes:
        losses = losses_of(start, start + size)
        for term, (total, _) in losses.items():
            loss = total / (denominators[term] or 1.0)
            found = _gradient(loss, parameters)
            known = sums.get(term, [None] * len(parameters))
            sums[term] = [_plus(a, b) for a, b in zip(known, found, strict=True)]
        start += size
    return sums


def _gradient(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor | None]:
    if not loss.requires_grad:
        return [None] * len(parameters)
    return list(torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True))


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _relative(one: list[Tensor | None], other: list[Tensor | None]) -> float:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    size = sum(float(b.double().square().sum()) for _, b in pairs)
    return (difference / size) ** 0.5 if size > 0 else 0.0


def _normalises(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.modules.batchnorm._NormBase)
        and module.training
        and not isinstance(module, nn.modules.instancenorm._InstanceNorm)
    )
