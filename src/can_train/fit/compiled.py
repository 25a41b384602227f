"""Compiles the modules that a loss calls, in place, and computes them as they are where the compiler fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from can_train.errors import CanTrainError, TaskError
from can_train.memory.meters import Meter, SimulatedMeter
from can_train.memory.out_of_memory import error_chain, forget_frames, is_out_of_memory

if TYPE_CHECKING:
    from can_train.fit.rungs import Rung

T = TypeVar("T")

SAVED_SHARE: Final = 0.2
"""Largest share of its peak that a model took less once it was compiled, of eight on an H100; the least was 2.6 %."""

_MODES: Final = MappingProxyType({
    "default": None,
    # PyTorch's own max-autotune captures CUDA graphs too, whose memory a rescue cannot release.
    "max-autotune": "max-autotune-no-cudagraphs",
    "cudagraphs": "reduce-overhead",
})  # fmt: skip
"""PyTorch's name for each value of `training.compile`."""

# Versions of a module's code before it counts as a loop of compilations. Training, evaluation, a part of one sample and
# phases that freeze other parameters have one each.
_MOST_VERSIONS: Final = 16
# Samples of the batch that modules are compiled for: the first of these that fits. Primes, since sizes that are equal
# once are taken to be equal always.
SAMPLES: Final = (67, 31, 19, 11, 5, 2)
FEW: Final = 11  # Samples of a second batch: convolutions have other kernels below 16
# Lines that say nothing of the reason, which follows: the compiler's name, and the setting that made it an error.
_EMPTY: Final = re.compile(r"\s*$|.* raised:$|Hard failure due to ")
_LONGEST: Final = 160  # Characters of a reason


class Repeatable(Protocol):
    """A block that may have to be run once more."""

    again: bool


@dataclass
class _Call:
    again: bool = False


@dataclass
class CompiledModel:
    """A model whose modules may be compiled; `mode` is a value of `training.compile` other than off.

    Compiled code keeps a share of its activations for the backward pass, `memory_budget`, and computes the rest again.
    Only the modules' calls change: parameters, hooks and state dicts stay as they are. `notice` is told why a compiler
    was given up.
    """

    model: nn.Module
    mode: str
    notice: Callable[[str], object]
    backend: Any = "inductor"
    memory_budget: float = 1.0
    is_given_up: bool = False
    _calls: dict[nn.Module, Callable[..., Any]] = field(default_factory=dict)  # By module, its compiled call
    _reasons: list[str] = field(default_factory=list)  # Why the compiler was given up, until the notice is out

    @property
    def is_in_use(self) -> bool:
        """Whether any module is compiled."""
        return bool(self._calls)

    def on_rung(self, rung: Rung) -> Rung:
        """Returns the rung of a pass: compiled code computes activations again by itself."""
        is_compiled = bool(self._calls) and not torch._C._len_torch_dispatch_stack()
        return replace(rung, recompute=()) if is_compiled and self.memory_budget < 1 else rung

    def compile_called(self, compute: Callable[[], object]) -> None:
        """Compiles the modules of the model that `compute` calls from outside of any other."""
        if self.is_given_up:
            return
        with self._as_it_is():
            called = outermost_calls(self.model, compute)
        if self.memory_budget < 1:
            # `compiler_limits` puts it back. Code that is compiled later, for other shapes, keeps the same share.
            torch._functorch.config.activation_memory_budget = self.memory_budget
        try:
            for module in called:
                if module not in self._calls:
                    self._calls[module] = _compiled_call(module, _MODES[self.mode], self.backend)
        except Exception as error:  # noqa: BLE001 - the compiler is imported here, with all that it needs
            self.stop()
            self._reasons.append(_reason(error))
            self._tell()
        self._install()

    def attempt(self, compute: Callable[[], T]) -> T:
        """Returns the result of `compute`, which is called once more where the compiler fails."""
        with self.trying(first := _Call()):
            result = compute()
        if not first.again:
            return result
        with self.trying(_Call()):
            return compute()

    @contextmanager
    def trying(self, part: Repeatable) -> Iterator[None]:
        """Opens a block that uses the compiled modules. Where the compiler fails, the modules are computed as they are
        from then on, and the block ends: `part.again` tells that it is to be run once more. A batch that does not fit
        is the caller's; but one that fails in CUDA graphs, whose memory cannot be released, ends their use.
        """
        # PyTorch would never compile again a module that it has met in a dispatch mode (a span that is measured).
        is_compiled = bool(self._calls) and not torch._C._len_torch_dispatch_stack()
        has_graphs = is_compiled and self.mode == "cudagraphs"
        if has_graphs and torch.cuda.is_available():
            torch.compiler.cudagraph_mark_step_begin()
        try:
            with nullcontext() if is_compiled else self._as_it_is():
                yield
        except Exception as error:
            is_memory = is_out_of_memory(error)
            fits = not is_memory or has_graphs or _is_compilers(error)
            # A task's own code may have called the compiler, and others cannot: their errors say what is wrong.
            is_told = isinstance(error, CanTrainError) and not isinstance(error, TaskError)
            if not is_compiled or is_told or not fits:
                # Any other error than memory is the task's: the compiler had nothing to do with an earlier one.
                self._tell() if is_memory else self._reasons.clear()
                raise
            self.stop()
            self._reasons.append(_reason(error))
            part.again = True
            # The failed pass would hold its tensors while the block runs once more.
            forget_frames(error)
        else:
            self._tell()

    def keep_gradients(self) -> None:
        """Copies the gradients of a part, which the next run of CUDA graphs would overwrite."""
        if self._calls and self.mode == "cudagraphs":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def _tell(self) -> None:
        failed = "training.compile: the model is computed as it is from here on, for the compiler failed"
        while self._reasons:
            self.notice(f"{failed}: {self._reasons.pop()}")

    def stop(self) -> None:
        """Computes the modules as they are from now on."""
        self.is_given_up = True
        for module in self._calls:
            module._compiled_call_impl = None
        if self._calls and self.mode == "cudagraphs":
            # Graphs hold memory that no split of a batch would release.
            torch.compiler.reset()
        self._calls = {}

    def _install(self) -> None:
        for module, call in self._calls.items():
            module._compiled_call_impl = call

    @contextmanager
    def _as_it_is(self) -> Iterator[None]:
        """Computes the modules as they are in the block."""
        for module in self._calls:
            module._compiled_call_impl = None
        try:
            yield
        finally:
            self._install()


@contextmanager
def compiler_limits() -> Iterator[None]:
    """Makes an error of a module that is compiled again and again in the block, and keeps the compiler's budget."""
    # Once for a run: PyTorch takes a tenth of a millisecond to change its settings.
    budget = torch._functorch.config.patch(activation_memory_budget=torch._functorch.config.activation_memory_budget)
    with torch._dynamo.config.patch(recompile_limit=_MOST_VERSIONS, fail_on_recompile_limit_hit=True), budget:
        yield


def compile_in_place(modules: Iterable[nn.Module]) -> None:
    """Compiles modules for the shapes that they are called with, in a process that may change them."""
    for module in modules:
        module._compiled_call_impl = _compiled_call(module, None, "inductor", dynamic=False)


def _compiled_call(module: nn.Module, mode: str | None, backend: Any, *, dynamic: bool = True) -> Callable[..., Any]:
    # `nn.Module.compile` compiles nothing of a module whose class is PyTorch's own (`nn.Sequential`).
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return torch.compile(call, dynamic=dynamic, mode=mode, backend=backend)


def outermost_calls(model: nn.Module, compute: Callable[[], object]) -> list[nn.Module]:
    """Returns the modules of a model that `compute` calls from outside of any other, in the order of their calls."""
    inside, called, modules = 0, dict[nn.Module, None](), set(model.modules())

    def before(module: nn.Module, _: Any) -> None:
        nonlocal inside
        if module in modules:
            if not inside:
                called[module] = None
            inside += 1

    def after(module: nn.Module, *_: Any) -> None:
        nonlocal inside
        inside -= module in modules

    hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
    try:
        compute()
    finally:
        for hook in hooks:
            hook.remove()
    return list(called)


class WeightsOutside(TorchFunctionMode):
    """Sees the weights that a block computes with outside of calls of some modules.

    Attributes:
        seen: Ids of the weights.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self._modules, self._inside = modules, 0

    def __enter__(self) -> Self:
        """Watches from now on."""
        self._hooks = [hook for module in self._modules for hook in (
            module.register_forward_pre_hook(lambda *_: self._step(1)),
            module.register_forward_hook(lambda *_: self._step(-1), always_call=True),
        )]  # fmt: skip
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends the watch."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _step(self, change: int) -> None:
        self._inside += change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the weights that an operation computes with, if its result has a gradient."""
        result = func(*args, **(kwargs or {}))
        if not self._inside and isinstance(result, Tensor) and result.requires_grad:
            self.seen |= {id(one) for one in tree_leaves((args, kwargs)) if isinstance(one, nn.Parameter)}
        return result


def _is_compilers(error: BaseException) -> bool:
    """Tells whether an error passed through PyTorch's compiler, and not only through the code that it made."""
    return any(isinstance(link, torch._dynamo.exc.TorchDynamoException) for link in error_chain(error))


def _reason(error: BaseException) -> str:
    """Returns the first line of an error that says why."""
    texts = [str(link) or type(link).__name__ for link in error_chain(error) if not isinstance(link, CanTrainError)]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return next((line[:_LONGEST] for line in lines if not _EMPTY.match(line)), type(error).__name__)


def compiles_on(meter: Meter) -> bool:
    """Tells whether a model is compiled on a device: a simulated GPU counts no memory of compiled code."""
    return not isinstance(meter, SimulatedMeter)


def compile_notices(mode: str, meter: Meter) -> list[str]:
    """Says how a value of `training.compile`, other than off, acts on a device and on the plan, as sentences without a
    full stop.
    """
    setting = f"training.compile={mode}"
    if not compiles_on(meter):
        return [f"{setting} has no effect on a simulated GPU, which cannot count the memory of compiled code"]
    if meter.is_host:
        told = [f"{setting}: the memory of compiled steps is not measured on a processor, so this run teaches nothing"]
        return [*told, f"{setting} captures no CUDA graphs on a processor"] if mode == "cudagraphs" else told
    told = [f"{setting}: memory is predicted for the model as it is; compiled, it takes up to {SAVED_SHARE:.0%} less"]
    if mode == "cudagraphs":
        told.append(f"{setting}: the memory that CUDA graphs keep is not predicted")
    return told
