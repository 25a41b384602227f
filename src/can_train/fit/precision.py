"""Number formats of a run, and the order of the numbers of images in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from can_train.errors import ConfigError, first_sentence

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings

_BEYOND_HALF: Final = 65_520.0  # numbers from here on are rounded to infinity in float16
_LOOKED_AT: Final = 256  # numbers of a gradient that tell its format
_MOST_LOOKS: Final = 8  # at the gradients of a parameter: each makes the host wait
_AUTOCAST: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_IMAGE_DIMS: Final = 4  # Samples, channels, height and width; a convolution's weights have as many


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats of a run: of weights and inputs, and of matrix products where precision is mixed."""

    dtype: torch.dtype
    autocast: torch.dtype | None

    @classmethod
    def named(cls, name: str) -> Precision:
        """Returns the precision that `training.precision` names."""
        return cls(dtype=torch.float64 if name == "fp64" else torch.float32, autocast=_AUTOCAST.get(name))

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Opens the span of a forward pass."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)


class HalfGradients:
    """Gradients that autocast computes in float16 and casts to float32.

    The gradient of a whole batch is infinite where its sum leaves the range of float16, so that the gradient scaler
    skips the step. The gradients of parts are added up in float32, where the sum is finite: the step would be taken.
    """

    def __init__(self) -> None:
        self._is_half = WeakIdKeyDictionary()  # parameters whose gradients tell their format
        self._looks = WeakIdKeyDictionary()  # number of looks at the gradients of others

    @contextmanager
    def of_parts(self, parameters: Sequence[nn.Parameter], sizes: Sequence[int]) -> Iterator[None]:
        """Opens a span in which the gradient of a batch is computed.

        Args:
            parameters: Parameters; those that have a gradient already are left alone.
            sizes: Sizes of the parts, once the span ends.
        """
        fresh = [one for one in parameters if one.requires_grad and one.grad is None and one.dtype is torch.float32]
        handles = [one.register_post_accumulate_grad_hook(self._look) for one in fresh if one not in self._is_half]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        gradients = [one.grad for one in fresh if self._is_half.get(one) and one.grad is not None]
        if len(sizes) > 1 and gradients:
            norms = torch._foreach_norm(gradients, torch.inf)
            highest = torch.stack([norm.to(gradients[0].device) for norm in norms]).max()
            # Nothing is read: the host does not wait.
            gradients[0].add_(torch.where(highest >= _BEYOND_HALF, torch.inf, 0.0))

    def _look(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if parameter in self._is_half or type(gradient) is not Tensor or gradient.layout is not torch.strided:
            return
        few = gradient.flatten()[:_LOOKED_AT] if gradient.is_contiguous() else gradient[:1].flatten()[:_LOOKED_AT]
        # Infinite numbers may come from anywhere. A scaler begins with a scale at which most are, for a few steps.
        if not few.isfinite().all():
            return
        self._looks[parameter] = self._looks.get(parameter, 0) + 1
        # Numbers of a few bits, as zeros, are numbers of every format.
        if not torch.equal(few.bfloat16().to(few.dtype), few):
            self._is_half[parameter] = torch.equal(few.half().to(few.dtype), few)
        elif self._looks[parameter] >= _MOST_LOOKS:
            self._is_half[parameter] = False


def are_finite(gradients: Sequence[Tensor]) -> bool:
    """Tells whether all numbers of gradients are finite; the host waits for the answer."""
    dense = (one.coalesce().values() if one.is_sparse else one for one in gradients)
    # An empty tensor, as the shard of a small bias may be, has no largest number.
    filled = [one for one in dense if one.numel()]
    if not filled:
        return True
    norms = torch._foreach_norm(filled, torch.inf)
    return bool(torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all())


def is_inexact(tensor: Tensor) -> bool:
    """Tells whether a tensor has floating-point numbers, real or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def number_format(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the number format of a tensor where real floating-point numbers have the format `dtype`."""
    if tensor.is_complex():
        # Half precision has no complex type that operations support.
        return torch.complex128 if dtype == torch.float64 else torch.complex64
    return dtype if tensor.is_floating_point() else tensor.dtype


def convert(model: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> nn.Module:
    """Converts the weights and buffers of a model to a number format, and moves them to a device.

    Complex numbers stay complex: `model.to(dtype)` discards their imaginary part.
    """
    if not any(tensor.is_complex() for tensor in (*model.parameters(), *model.buffers())):
        return model.to(device, dtype)
    converted: nn.Module = model._apply(lambda tensor: tensor.to(device, number_format(tensor, dtype)))
    return converted


@contextmanager
def tf32(training: TrainingSettings, device: torch.device) -> Iterator[None]:
    """Lets products of single precision run in TF32 on a GPU in the block, if `training.tf32` is on.

    Raises:
        ConfigError: Other code has set the precision of products by PyTorch's newer names for it.
    """
    if not training.tf32 or device.type != "cuda":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        before = products.allow_tf32, convolutions.allow_tf32
    except RuntimeError as error:
        raise ConfigError("training.tf32 cannot be combined with fp32_precision of torch.backends, which is set",
                          value=first_sentence(error), remedy="Leave out --tf32") from error  # fmt: skip
    products.allow_tf32 = convolutions.allow_tf32 = True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def use_channels_last(model: nn.Module) -> nn.Module:
    """Lays the weights of a model's convolutions out with the channels last, and from now on the images that it is
    called with; returns the model.
    """
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_forward_pre_hook(_with_channels_last, with_kwargs=True, prepend=True)
    return model


def has_images(model: nn.Module) -> bool:
    """Tells whether `use_channels_last` changes anything of a model's weights."""
    return any(parameter.dim() == _IMAGE_DIMS for parameter in model.parameters())


def _with_channels_last(model: nn.Module, args: Any, kwargs: Any) -> Any:
    def convert(given: Tensor) -> Tensor:
        return given.contiguous(memory_format=torch.channels_last) if given.dim() == _IMAGE_DIMS else given

    return tree_map_only(Tensor, convert, (args, kwargs))
