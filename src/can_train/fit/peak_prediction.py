"""The predicted peak of a training step: its terms with their intervals, and of a recorded step the memory that its
allocations take of a card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from can_train.errors import ArgumentError, DoesNotFitError, check_kinds
from can_train.fit.cost_model import Spread
from can_train.io.units import size_text
from can_train.memory.catalogue import (
    ALL_KERNELS,
    CUBLAS_KERNELS,
    CUDNN_KERNELS,
    FRAGMENTATION,
    ROCM,
    Card,
    context_bytes,
    screen_bytes,
)
from can_train.memory.cuda_workspaces import CUBLAS, CUDNN, TENSORS
from can_train.memory.meters import cudnn_notices
from can_train.memory.simulated.allocator import AllocatorSettings, CachingAllocator

if TYPE_CHECKING:
    from can_train.fit.cost_model import DeviceLimits
    from can_train.memory.allocation_trace import AllocationTrace, MemoryPart
    from can_train.memory.cuda_library import NoCudaDispatchError

_MATRIX_DIMS: Final = 2
_UNLIMITED: Final = 2**50


ATTENTION: Final = "attention"
PRODUCTS: Final = "matrix products"
RECURRENT: Final = "recurrent layers"
DENSE_CONVOLUTIONS: Final = "3 × 3 convolutions"
OTHER_CONVOLUTIONS: Final = "other convolutions"
# `scripts/bench/prediction measured` remakes the shares and says how many rows there are. Recurrent layers have no
# published peaks and are given the shares of matrix products; what cuDNN works with there is a term of its own.
SPREADS: Final[Mapping[str, Spread]] = {
    PRODUCTS: Spread(less=0.035, more=0.045),
    ATTENTION: Spread(less=0.07, more=0.07),
    RECURRENT: Spread(less=0.035, more=0.045),
    DENSE_CONVOLUTIONS: Spread(less=0.2, more=0.27),
    OTHER_CONVOLUTIONS: Spread(less=0.1, more=0.15),
}
_FEW_KNOWN: Final = (ATTENTION, RECURRENT)
# Most working memory of cuDNN in recurrent layers, as a multiple of the assumed bytes: cautious, and not measured.
_RECURRENT_MOST: Final = 3
_IMAGE_FILTER_DIMS: Final = 4
_CONVOLUTIONS: Final = ("convolution", "convolution_backward")
_COPIES: Final = 3  # of the largest tensor that a convolution makes: the two images and the filters are no larger each
_FLASH_ATTENTION: Final = ("_scaled_dot_product_flash_attention_backward",)
_PREFER_CUDNN: Final = ("hopper", "blackwell")
_FEW_CONVOLUTIONS: Final = 0.2  # share of the layers: a transformer has one for the patches of its images
# Of the same step on CUDA around the prediction from small batches on the CPU: operators without a table keep somewhat
# less, and workspaces of cuDNN come on top (CNNs, 95 of 100 published peaks).
NOT_RECORDED: Final = Spread(less=0.1, more=0.4)
# Most gaps without a replay, as a multiple of the usual ones, where segments do not expand: cautious, and not measured.
_PLAIN_GAPS_MOST: Final = 4


@dataclass(frozen=True, kw_only=True)
class MemoryTerm:
    """A part of a training's memory on a GPU, with the interval that it is expected in; in bytes."""

    what: str
    num_bytes: float
    least_bytes: float
    most_bytes: float


_NO_GAPS: Final = MemoryTerm(what="fragmentation", num_bytes=0, least_bytes=0, most_bytes=0)
_NO_SPREAD: Final = MemoryTerm(what="", num_bytes=0, least_bytes=0, most_bytes=0)
_NO_CONTEXT: Final = MemoryTerm(what="CUDA context", num_bytes=0, least_bytes=0, most_bytes=0)


@dataclass(frozen=True, kw_only=True)
class PeakPrediction:
    """The predicted memory of a training step on a batch that is not split. Without a card it is the peak of the
    allocated bytes alone.
    """

    tensors: MemoryTerm  # weights, gradients, optimizer state and the batch's tensors, at their peak
    workspaces: tuple[MemoryTerm, ...] = ()  # of libraries, inside PyTorch's allocator; as far as they raise the peak
    fragmentation: MemoryTerm = _NO_GAPS  # bytes that the allocator reserves beyond the peak
    spread: MemoryTerm = _NO_SPREAD  # interval of measured peaks around what the allocator is predicted to reserve
    context: MemoryTerm = _NO_CONTEXT  # bytes of CUDA and of the loaded libraries' kernels, outside the allocator
    card: Card | None = None
    # Whether the allocations fit, one after the other, beside the largest context, or a screen; None without a card
    fits_card: bool | None = None
    explains: bool = (
        True  # Whether the features explain the memory of the batches that were run; if not, it says little
    )
    limits: DeviceLimits | None = field(default=None, repr=False)  # Of small batches, for a device that any batch fits
    parts: tuple[MemoryPart, ...] = field(default=(), repr=False)  # of `peak_bytes`, whose sum it is; largest first
    notices: tuple[str, ...] = ()  # sentences without a full stop
    assumptions: tuple[str, ...] = ()  # on the allocator and the loop: sentences without a full stop

    def __str__(self) -> str:
        least, most = (size_text(num_bytes) for num_bytes in self.interval_bytes)
        lines = [f"{size_text(self.device_bytes)}, between {least} and {most}"]
        sentences = (*self.assumptions, self.spread.what, *self.notices)
        if self.card is not None:
            lines = [f"{self.card.key}: {lines[0]}: {'it fits' if self.fits_card else 'it does not fit'}"]
            lines += [f"  {term.what}: {size_text(term.num_bytes)}" for term in self.terms if term != self.spread]
        return "\n".join([*lines, *(f"{sentence}." for sentence in sentences if sentence)])

    @property
    def terms(self) -> tuple[MemoryTerm, ...]:
        """All terms, which add up to the memory that the driver shows."""
        return (*self._in_allocator, self.context)

    @property
    def _in_allocator(self) -> tuple[MemoryTerm, ...]:
        return (self.tensors, *self.workspaces, self.fragmentation, self.spread)

    @property
    def peak_bytes(self) -> float:
        """The peak of allocated bytes, `torch.cuda.max_memory_allocated`."""
        return self.tensors.num_bytes + sum(term.num_bytes for term in self.workspaces)

    @property
    def reserved_bytes(self) -> float:
        """The peak of reserved bytes on the card, `torch.cuda.max_memory_reserved`; of a step that does not fit, the
        bytes that it would take.
        """
        return self.peak_bytes + self.fragmentation.num_bytes

    @property
    def device_bytes(self) -> float:
        """The memory of the process in `nvidia-smi`; without a card `peak_bytes`."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def interval_bytes(self) -> tuple[float, float]:
        """The interval around `device_bytes`."""
        return sum(term.least_bytes for term in self.terms), sum(term.most_bytes for term in self.terms)

    def fits(self, capacity_bytes: float) -> bool | None:
        """Tells whether the step surely fits into bytes that PyTorch's allocator may use; None where the features do
        not explain the memory.
        """
        check_kinds("a number of bytes", Real, "Give found.fits(16 * 2**30)", capacity_bytes=capacity_bytes)
        return sum(term.most_bytes for term in self._in_allocator) <= capacity_bytes if self.explains else None

    def on_device(self, device_key: str, capacity_bytes: int, room_bytes: float) -> DeviceLimits:
        """Returns the limits of a device, within which the upper end of the interval fits into the room that its
        capacity is predicted to have for tensors.

        Raises:
            ArgumentError: The features do not explain the memory, or the prediction is of one batch on a card.
            DoesNotFitError: Not even the optimizer's step fits.
        """
        if self.limits is None:
            raise ArgumentError(
                "Limits follow from small batches, and a prediction for a card is of one batch",
                value="" if self.card is None else f"target={self.card.key!r}",
                remedy="Leave target out of predict_peak: the limits are then the device's own",
            )  # fmt: skip
        if not self.explains:
            raise ArgumentError(
                "Limits follow from a prediction whose features explain the memory", value="they do not",
                remedy="Give predict_peak the counts that memory grows with, or limits that find_max_size found",
            )  # fmt: skip
        training = self.limits.training
        widest = training.half_width(training.cost_within(room_bytes))
        limits = self.limits.predicted_on(device_key, capacity_bytes, room_bytes - widest)
        if limits.optimizer_peak_bytes > capacity_bytes or not limits.training.tuned_limit:
            raise DoesNotFitError(
                "Weights, gradients and optimizer state must fit on the device",
                value=f"they take {size_text(max(training.model.base_bytes, limits.optimizer_peak_bytes))} of "
                f"{size_text(capacity_bytes)}",
                remedy="Take a larger device or a smaller model",
            )
        return limits


def of_any(predictions: Mapping[str, PeakPrediction]) -> PeakPrediction:
    """Returns the prediction of the generation that takes most, with an interval that covers all their intervals."""
    ordered = sorted(predictions, key=lambda generation: predictions[generation].device_bytes)
    most, least = predictions[ordered[-1]], predictions[ordered[0]]
    if len(ordered) == 1:
        return most

    told = "A GPU that is named by its memory may be of any generation"
    if saved := most.device_bytes - least.device_bytes:
        told = f"{told}: {ordered[-1]} takes most, and {ordered[0]} takes {size_text(saved)} less"
    fits_card = all(prediction.fits_card for prediction in predictions.values())
    return replace(_spanning(most, tuple(predictions.values())), fits_card=fits_card, assumptions=(told,))


def of_compiled(plain: PeakPrediction, fused: PeakPrediction, unfused: PeakPrediction) -> PeakPrediction:
    """Returns the prediction of a compiled step: the step as it is, or the graphs without fusion where these take less.
    Its interval begins with full fusion.
    """
    likely = min(plain, unfused, key=lambda prediction: prediction.device_bytes)
    least, most = (size_text(prediction.peak_bytes) for prediction in (fused, unfused))
    told = f"torch.compile's graphs peak at {least} if all that can be fused is, and at {most} if nothing is"
    told = f"{told}; the model as it is peaks at {size_text(plain.peak_bytes)}"
    return replace(_spanning(likely, (plain, fused, unfused)), assumptions=(*plain.assumptions, told))


def _spanning(likely: PeakPrediction, predictions: Sequence[PeakPrediction]) -> PeakPrediction:
    """Returns a prediction whose intervals have the intervals of all."""
    tensors, *workspaces, fragmentation, spread, context = (
        replace(
            terms[0],
            least_bytes=min(term.least_bytes for term in terms),
            most_bytes=max(term.most_bytes for term in terms),
        )
        for terms in zip(likely.terms, *(prediction.terms for prediction in predictions), strict=True)
    )
    terms = {"tensors": tensors, "fragmentation": fragmentation, "spread": spread, "context": context}
    return replace(likely, workspaces=tuple(workspaces), **terms)


def loaded_kernels(model: nn.Module) -> str:
    """Returns which libraries' kernels a training of a model loads."""
    modules = list(model.modules())
    norms = [module for module in modules if isinstance(module, _BatchNorm)]
    # A parameter of three dimensions or more may be a convolution's filters, in a module of any class. PyTorch
    # normalizes vectors, which BatchNorm1d is called with elsewhere, without cuDNN.
    if (
        any(parameter.dim() > _MATRIX_DIMS for parameter in model.parameters())
        or any(isinstance(module, nn.RNNBase) for module in modules)
        or any(not isinstance(norm, nn.BatchNorm1d) for norm in norms)
    ):
        return ALL_KERNELS if norms else CUDNN_KERNELS
    return CUBLAS_KERNELS


def operations_of(model: nn.Module) -> str:
    """Returns the operations, of `SPREADS`, that decide how surely the memory of a model's training is known."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() >= _MATRIX_DIMS]
    filters = [each for each in weights if each.dim() > _MATRIX_DIMS]
    dense = [each for each in filters if each.shape[2:] == (3, 3) and each.shape[1] > 1]
    if len(filters) > _FEW_CONVOLUTIONS * len(weights):
        return DENSE_CONVOLUTIONS if 2 * len(dense) >= len(filters) else OTHER_CONVOLUTIONS
    if any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules()):
        return RECURRENT
    names = " ".join(f"{name} {type(module).__name__}" for name, module in model.named_modules()).lower()
    return ATTENTION if "attention" in names or "attn" in names else PRODUCTS


def price_trace(
    trace: AllocationTrace,
    card: Card,
    settings: AllocatorSettings,
    kernels: str = ALL_KERNELS,
    operations: str = OTHER_CONVOLUTIONS,
) -> PeakPrediction:
    """Predicts a card's memory from the allocations of a program, under settings of PyTorch's allocator, the kernels
    that it loads, and its operations (`operations_of`).
    """
    peaks, reserved = [], 0
    for kinds in ((TENSORS,), (TENSORS, CUBLAS), (TENSORS, CUBLAS, CUDNN)):
        allocator = _replayed(trace, settings, kinds)
        peaks.append(allocator.peak_allocated_bytes)
        reserved = allocator.peak_reserved_bytes
    with_all = peaks[-1]
    # A library's block may change how the allocator splits others: the peak with it is not always the higher one.
    with_cublas = min(peaks[1], with_all)
    tensors = min(peaks[0], with_cublas)
    cublas, cudnn = with_cublas - tensors, with_all - with_cublas
    context = _context(card, kernels)
    taken_bytes = max(context.most_bytes, context.num_bytes + screen_bytes(card))
    on_card = CachingAllocator(int(card.total_bytes - taken_bytes), settings=settings)
    fits_card = trace.replay(on_card)
    if fits_card:
        # Where memory runs out, the cache is released.
        reserved = max(with_all, min(reserved, on_card.peak_reserved_bytes))
    less, more = SPREADS[operations].around(reserved)
    scratch = _exactly(CUDNN, cudnn)
    if operations == RECURRENT:
        scratch = replace(scratch, least_bytes=0, most_bytes=_RECURRENT_MOST * cudnn)
    return PeakPrediction(
        card=card,
        tensors=_exactly(TENSORS, tensors),
        workspaces=(_exactly(CUBLAS, cublas), scratch),
        fragmentation=_exactly("fragmentation", reserved - with_all),
        spread=MemoryTerm(what=_spread_text(operations), num_bytes=0, least_bytes=less, most_bytes=more),
        context=context,
        fits_card=fits_card,
        parts=trace.parts(settings) if trace.labels else (),
        notices=cudnn_notices(),
    )


def _exactly(what: str, num_bytes: float) -> MemoryTerm:
    return MemoryTerm(what=what, num_bytes=num_bytes, least_bytes=num_bytes, most_bytes=num_bytes)


def _spread_text(operations: str) -> str:
    spread = SPREADS[operations]
    around = f"{spread.less:.1%} below to {spread.more:.1%} above"
    known = "of which few are known, are expected" if operations in _FEW_KNOWN else "lie, but for 1 in 20,"
    return f"Measured peaks of networks whose memory {operations} decide {known} {around} the prediction"


def with_unmeasured(
    found: PeakPrediction, trace: AllocationTrace, model: nn.Module, *, is_half: bool
) -> PeakPrediction:
    """Widens the interval by workspaces that nobody has measured.

    Of convolutions in half precision, and in one or three dimensions: where images have another format than cuDNN's
    kernels, it copies input, result and filters of one convolution at a time. Of cuDNN's attention, which PyTorch
    prefers on some cards: once more the largest tensor of flash attention's backward pass.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_prefer_cudnn_attention`.
    """
    filters = [parameter for parameter in model.parameters() if parameter.dim() > _MATRIX_DIMS]
    has_unknown = is_half or any(each.dim() != _IMAGE_FILTER_DIMS for each in filters)
    prefers_cudnn = found.card is not None and found.card.generation in _PREFER_CUDNN
    told, more = [found.spread.what], 0
    if has_unknown and (largest := _largest_of(trace, _CONVOLUTIONS)):
        told.append("workspaces of convolutions in half precision, one or three dimensions are not measured")
        more += _COPIES * largest
    if prefers_cudnn and (largest := _largest_of(trace, _FLASH_ATTENTION)):
        told.append("cuDNN's attention, which PyTorch may prefer there, is not measured")
        more += largest
    spread = replace(found.spread, what="; ".join(told), most_bytes=found.spread.most_bytes + more)
    return replace(found, spread=spread)


def _largest_of(trace: AllocationTrace, operations: Sequence[str]) -> int:
    """Returns the bytes of the largest tensor that some operations make; 0 where they make none."""
    labels = trace.labels
    return max(
        (size for number, size in trace.events if number in labels and labels[number].operation in operations),
        default=0,
    )


def _replayed(
    trace: AllocationTrace, settings: AllocatorSettings, kinds: Sequence[str] = (TENSORS, CUBLAS, CUDNN)
) -> CachingAllocator:
    allocator = CachingAllocator(_UNLIMITED, settings=settings)
    trace.replay(allocator, kinds)
    return allocator


def _context(card: Card, kernels: str) -> MemoryTerm:
    least, assumed, most = context_bytes(card, kernels)
    runtime = "HIP" if card.generation == ROCM else "CUDA"
    return MemoryTerm(what=f"{runtime} context with {kernels}", num_bytes=assumed, least_bytes=least, most_bytes=most)


def from_small_batches(
    found: PeakPrediction, card: Card, error: NoCudaDispatchError, kernels: str, settings: AllocatorSettings
) -> PeakPrediction:
    """Predicts a card's memory from probes on the CPU where CUDA's dispatch cannot be had, with an interval that says
    so.
    """
    peak, context = found.peak_bytes, _context(card, kernels)
    margin = found.tensors.most_bytes - peak
    gaps, most_tensors = FRAGMENTATION * peak, (1 + NOT_RECORDED.more) * peak + margin
    most_gaps = gaps * (2 if settings.expandable_segments else _PLAIN_GAPS_MOST)
    return replace(
        found,
        card=card,
        tensors=replace(found.tensors, least_bytes=(1 - NOT_RECORDED.less) * peak - margin, most_bytes=most_tensors),
        fragmentation=MemoryTerm(what="fragmentation", num_bytes=gaps, least_bytes=0, most_bytes=most_gaps),
        context=context,
        fits_card=most_tensors + gaps + context.num_bytes + screen_bytes(card) <= card.total_bytes,
        notices=(
            f"Predicted from small batches on the CPU, which show no workspaces: {error.rule}: {error.value}"
            + (f". {error.remedy}" if error.remedy else ""),
            *(() if found.explains else ("The counts do not explain the memory of the batches that were run",)),
        ),
    )  # fmt: skip
