"""Parts of an optimizer step other than the batch: random generators, number formats, the parameters that are trained,
the optimizer and its schedule, and the memory that it takes.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import random
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate, cycle
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map_only

from can_train.config.settings import CLOSURE_REASON, SPARSE_REASON, is_code
from can_train.config.task_settings import load_optimizer
from can_train.errors import (
    CanTrainError,
    ConfigError,
    DataError,
    DoesNotFitError,
    OutOfMemoryDetails,
    TaskError,
    first_sentence,
    nearest_first,
    unknown_name,
)
from can_train.fit.offloaded_state import OffloadedState, parameters_on_host
from can_train.io.units import size_text
from can_train.memory.out_of_memory import FIRST_WAIT_S, CatchOutOfMemory, without_others
from can_train.memory.sharded_tensors import load_sharded_optimizer, shard_like, shard_of
from can_train.task import Phase

if TYPE_CHECKING:
    from can_train.config.settings import TrainingSettings
    from can_train.memory.meters import Meter

_AUTOCAST: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {"sgd": {"momentum": 0.9}}  # that differ from the class's defaults
_BETAS: Final = [0.9, 0.999]  # of `training.betas`: PyTorch's own; an optimizer of another package may have others
_FUSED: Final = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)  # that PyTorch has a kernel of on GPUs
_UNLIMITED: Final = 2**62
_NORM_ROUNDING: Final = 1e-6  # That `clip_grad_norm_` adds to a norm, against a division by zero
_SAMPLE_WEIGHTS: Final = 2**18  # Whose state is measured: what an optimizer counts beside it is a small part
_SUGGESTIONS: Final = 5  # Names that an error lists
_MT19937_BYTES: Final = 4 * (624 + 1)  # 624 words of state, and the position in them
_COMPARED_BYTES: Final = 4 * (16 + 1)  # The position and the 16 words next to it: they differ wherever two states do


def seed_everything(seed: int) -> None:
    """Seeds Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - third parties draw from the global generator
    torch.manual_seed(seed)


def seed_rank(*, seed: int, rank: int, step: int) -> None:
    """Seeds the global generators of a rank so that each rank drops other units; rank 0's are left as they are."""
    # By the steps done so far as well: a rank that joins later must not repeat earlier draws.
    if rank:
        seed_everything(int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint32)[0]))


def capture_generators() -> dict[str, Any]:
    """Returns the state of every global generator in types that `torch.load(weights_only=True)` accepts."""
    version, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": (str(version), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_generators(state: dict[str, Any]) -> None:
    """Restores states of `capture_generators`; GPU generators only where there are as many GPUs."""
    version, internal, gauss = state["python"]
    # A checkpoint may have made lists of the tuples that Python's generator insists on.
    random.setstate((version, tuple(internal), gauss))
    version, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((version, keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def step_generator(
    *, seed: int, step: int, update: int = 0, before: bool = False, noise: bool = False
) -> torch.Generator:
    """Returns the generator of a step's randomness that samples share, in one of its optimizer updates, of the work
    that a task does `before` the step, or of an update's gradient `noise`: pure functions of these numbers, and draws
    from one generator change nothing in another.
    """
    key = (1,) if before else (3, update) if noise else (2, update) if update else ()
    sequence = np.random.SeedSequence([seed, step], spawn_key=key)
    mixed = sequence.generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(mixed[0]) << 32 | int(mixed[1]))


class Generators:
    """The generators of the host and of a device, as they are now; `since` is an earlier reading, whose states are
    shared where they have not changed.
    """

    # Read for every micro-batch: `capture_generators` converts to types that can be saved, which takes longer.

    def __init__(self, device: torch.device, *, since: Generators | None = None) -> None:
        self._device = device
        # Reading a whole state takes longer than all the rest: an earlier one is shared where no word has changed.
        self._python_words = _python_words()
        is_same = since is not None and self._python_words[0] and self._python_words == since._python_words
        self._python: Any = since._python if since is not None and is_same else random.getstate()
        self._numpy_words = _numpy_words()
        # No word changes when a second normal number is used that was drawn with an earlier one, where the state holds
        # such a number.
        if since is not None and self._numpy_words and self._numpy_words == since._numpy_words and not since._numpy[3]:
            self._numpy: Any = since._numpy
        else:
            self._numpy = np.random.get_state(legacy=True)  # noqa: NPY002 - models may draw from the global generator
        self._host = torch.default_generator.get_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Restores them, bit by bit."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class Snapshot:
    """The generators of the host and of a device, and a model's buffers, as they are now; `since` is an earlier one of
    the same model, which shares everything that has not changed.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, since: Snapshot | None = None) -> None:
        earlier = None if since is None else since._generators
        self._generators: Generators = Generators(device, since=earlier)
        self._modules: list[nn.Module] = modules_of(model) if since is None else since._modules
        # A module may replace a buffer rather than write into it, so module and name are kept beside the tensor. A
        # buffer that is None may be made in the first pass.
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in self._modules
            for name, buffer in module._buffers.items()
        ]

    @property
    def copies(self) -> list[Tensor]:
        """Copies of the buffers, which take memory on the model's device."""
        return [value for *_, value in self._buffers if value is not None]

    def release(self) -> None:
        """Frees the copies of the buffers; the rest is for `since`."""
        self._buffers.clear()

    def restore(self) -> None:
        """Restores everything, bit by bit."""
        self._generators.restore()
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = None if buffer is None or value is None else buffer.copy_(value)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model in the order of `model.modules()`, which takes ten times as long."""
    modules: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        if id(module) not in modules:
            modules[id(module)] = module
            for child in module._modules.values():
                if child is not None:
                    visit(child)

    visit(model)
    return list(modules.values())


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a model in the order of `model.parameters()`, as quickly."""
    parameters = [parameter for module in modules_of(model) for parameter in module._parameters.values()]
    return list({id(parameter): parameter for parameter in parameters if parameter is not None}.values())


def _python_words() -> tuple[bytes, float | None]:
    """Returns words of Python's global generator that change with every number that is drawn, and its second normal
    number; no words where they cannot be read from memory.
    """
    generator: Any = random._inst  # The generator behind the module's functions
    return _python_memory(generator).tobytes(), generator.gauss_next


# A view is read several times faster than `ctypes.string_at`, whose code has left the processor's caches by each step.
@lru_cache(maxsize=1)
def _python_memory(generator: Any) -> memoryview:
    """Returns the memory of a generator's position and of the words behind it, as long as it lives; none where Python
    keeps them elsewhere.
    """
    offset, kind = object.__basicsize__, type(generator)
    if kind is not random.Random or kind.__basicsize__ < offset + _MT19937_BYTES:
        return memoryview(b"")
    known = random.Random(1)
    *words, position = known.getstate()[1]
    in_memory = ctypes.string_at(id(known) + offset, _MT19937_BYTES)
    if in_memory != struct.pack("=625I", position, *words):
        return memoryview(b"")
    return _memory_at(id(generator) + offset)[:_COMPARED_BYTES]


def _numpy_words() -> bytes:
    """Returns words of numpy's global generator that change with every number that is drawn; empty for a generator
    other than numpy's own.
    """
    return _numpy_memory(np.random.mtrand.get_bit_generator()).tobytes()


@lru_cache(maxsize=1)
def _numpy_memory(generator: Any) -> memoryview:
    if not isinstance(generator, np.random.MT19937):
        return memoryview(b"")
    # The position is behind the words.
    return _memory_at(int(generator.ctypes.state_address))[-_COMPARED_BYTES:]


def _memory_at(address: int) -> memoryview:
    """Returns the memory of a Mersenne Twister at an address."""
    return memoryview((ctypes.c_char * _MT19937_BYTES).from_address(address)).cast("B")


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


_IMAGE_DIMS: Final = 4  # Samples, channels, height and width; a convolution's weights have as many


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


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Gaussian noise of the gradients: in step t, counted from 0, of standard deviation σ / (1 + t)^(γ / 2).

    Source: Neelakantan et al., Adding Gradient Noise Improves Learning for Very Deep Networks, 2015: variance
    η / (1 + t)^γ, with γ = 0.55 and η = σ² among 0.01, 0.3 and 1.
    """

    deviation: float  # σ; 0: no noise
    decay: float  # γ; 0: the same in all steps
    seed: int

    def add(self, parameters: Iterable[nn.Parameter], *, step: int, update: int) -> None:
        """Adds the noise of a step's optimizer update to all gradients.

        Raises:
            ConfigError: A gradient is sparse.
        """
        # On the host: the numbers that a GPU draws depend on its kind, and all ranks need equal numbers.
        generator = step_generator(seed=self.seed, step=step, update=update, noise=True)
        deviation = self.deviation / (1 + step) ** (self.decay / 2)
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise ConfigError("Gradient noise is added to dense gradients, and one of the model is sparse",
                                  value=f"of shape {tuple(gradient.shape)}", remedy="Give --grad-noise 0")  # fmt: skip
            drawn = torch.randn(gradient.shape, dtype=gradient.dtype, generator=generator)
            if shard_of(gradient) is not gradient:
                gradient, drawn = shard_of(gradient), shard_of(shard_like(drawn, gradient))
            gradient.add_(drawn.to(gradient.device), alpha=deviation)


@dataclass(kw_only=True)
class Optimization:
    """Optimizer, schedule and gradient scaler, which step together."""

    optimizer: Optimizer
    scheduler: LRScheduler  # The schedule of the settings, or a task's own
    ticks: int  # Moves of the schedule in the whole run
    scaler: torch.amp.GradScaler  # Scales losses under fp16; otherwise disabled
    clip_norm: float  # Largest gradient norm; 0: gradients are not clipped
    clip_value: float  # Largest absolute value of an entry of the gradient; 0: as above
    noise: GradientNoise
    plateau: Plateau | None  # Of the schedule `plateau`
    is_lazy: bool  # Whether the first step of a parameter makes its state; Adagrad makes it at once, and never again
    # Of the phase. A frozen one has no gradient, so the optimizer passes over it until it is thawed.
    parameters: list[nn.Parameter]
    offloaded: OffloadedState | None = None  # The state that waits on the host; None: it never has

    @property
    def device_state_bytes(self) -> int:
        """Bytes of the optimizer's state that are on the device."""
        return state_bytes(self.optimizer) if self.offloaded is None else self.offloaded.device_bytes

    def keep_state(self, on_host: bool) -> None:
        """Keeps the optimizer's state on the host from now on, or on the device, where memory may run out."""
        if on_host:
            self.offloaded = self.offloaded or OffloadedState(self.optimizer)
        if self.offloaded is not None:
            self.offloaded.keep(on_host)

    def step(self, number: int = 0, update: int = 0) -> bool:
        """Unscales and clips the gradients, adds noise, steps, and clears them; the caller moves the schedule.

        Args:
            number: Steps of the run that are done; the noise of the gradients depends on it.
            update: Optimizer steps of this step that are done, where it has several.

        Returns:
            Whether the weights moved: under fp16 the scaler skips a step whose gradients overflowed.
        """
        scale = self.scaler.get_scale()
        if self.clip_norm > 0 or self.clip_value > 0 or self.noise.deviation > 0:
            self.scaler.unscale_(self.optimizer)
        if self.clip_value > 0:
            torch.nn.utils.clip_grad_value_(self.parameters, self.clip_value)
        if self.clip_norm > 0:
            clip_norm(self.parameters, self.clip_norm)
        if self.noise.deviation > 0:
            self.noise.add(self.parameters, step=number, update=update)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return self.scaler.get_scale() >= scale

    @property
    def trainable(self) -> tuple[bool, ...]:
        """For each parameter, whether it is trained now."""
        return tuple(parameter.requires_grad for parameter in self.parameters)

    def set_trainable(self, trainable: Iterable[bool]) -> None:
        """Freezes and thaws the parameters, in the order of `trainable`."""
        for parameter, is_trained in zip(self.parameters, trainable, strict=True):
            parameter.requires_grad_(is_trained)

    def forget_frozen(self) -> None:
        """Drops the state of frozen parameters: old moments would push into an old direction once these are thawed."""
        state = self.optimizer.state
        for parameter in list(state):
            if self.is_lazy and not parameter.requires_grad:
                del state[parameter]

    @property
    def lr(self) -> float:
        """The current learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def move_schedule(self) -> None:
        """Moves the schedule by a step, or by an epoch."""
        # Validations move it.
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
            self._keep_plain()

    def validated(self, loss: float) -> None:
        """Tells a schedule that follows the validation loss about it; does nothing for any other."""
        if self.plateau is not None:
            self.plateau.validated(loss)
            self.follow_schedule()
        elif isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
            self._keep_plain()

    def _keep_plain(self) -> None:
        # A scheduler of somebody's own may compute with numpy, whose numbers no checkpoint is read back with.
        for group in self.optimizer.param_groups:
            group["lr"] = as_plain(group["lr"])

    def follow_schedule(self) -> None:
        """Sets the learning rate to the schedule's at the current tick: a restored state may have been trained by
        another schedule.
        """
        if type(self.scheduler) is not LambdaLR:
            return
        for group, base_lr, share in zip(
            self.optimizer.param_groups, self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base_lr * share(self.scheduler.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a resumed run needs to continue bit by bit."""
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._parts.items()}
        return {**state, "scheduler": as_plain(state["scheduler"]), "ticks": self.ticks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state from `state_dict`.

        Raises:
            ValueError: It belongs to other parameters, or a part of it is something else.
        """
        with nullcontext() if self.offloaded is None else self.offloaded.loading():
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        own = {name: part.state_dict() for name, part in self._parts.items()}
        fresh = [{**group, "params": None} for group in self.optimizer.param_groups]
        for name, part in self._parts.items():
            if part is self.scheduler and type(part) is not LambdaLR:
                self._restore_own_schedule(state, fresh)
                continue
            if part is self.optimizer:
                load_sharded_optimizer(self.optimizer, state[name])
            else:
                part.load_state_dict(state[name])
            # PyTorch copies most of it unseen, and fails in the next step.
            now = part.state_dict()
            _check_form(own[name].get("param_groups", own[name]), now.get("param_groups", now))
        saved = state["optimizer"]["state"]
        is_torch = type(self.optimizer).__module__.startswith("torch.optim.")
        # A state numbers the parameters in the order of the groups.
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            values = self.optimizer.state.get(parameter, {})
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    continue
                # Adafactor's means of rows and columns have 1 in the place of a size.
                if is_torch and not _broadcasts(value.shape, parameter.shape):
                    raise ValueError(f"a moment is {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")
                # PyTorch gives each number the type of its parameter: NAdam's product of momenta would be rounded in
                # another way from here on, and moments of 8 bits would become floats.
                before = saved.get(number, {}).get(name)
                if isinstance(before, Tensor) and before.dtype != value.dtype:
                    values[name] = before.to(value.device, copy=True)

    def _restore_own_schedule(self, state: dict[str, Any], fresh: Sequence[dict[str, Any]]) -> None:
        """Restores a task's own scheduler, whose state knows the length of its run. Where the run is longer by now, the
        new scheduler is moved from the start, where the groups of the optimizer were `fresh`.
        """
        saved = state["scheduler"]
        if state["ticks"] == self.ticks or isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.load_state_dict(saved)
            return
        for group, before in zip(self.optimizer.param_groups, fresh, strict=True):
            group.update({name: value for name, value in before.items() if name != "params"})
        with warnings.catch_warnings():
            # The steps of the optimizer were taken in an earlier process.
            warnings.simplefilter("ignore")
            for _ in range(saved["last_epoch"]):
                self.move_schedule()

    @property
    def _parts(self) -> dict[str, Any]:
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        return parts if self.plateau is None else {**parts, "plateau": self.plateau}


def clip_norm(parameters: Sequence[nn.Parameter], most: float) -> None:
    """Clips the norm of the gradients, as `clip_grad_norm_` does; gradients may be shards on the ranks of a run."""
    sharded: list[Any] = [one.grad for one in parameters if one.grad is not None and shard_of(one) is not one]
    if not sharded:
        torch.nn.utils.clip_grad_norm_(parameters, most)
        return
    whole = [one.grad for one in parameters if one.grad is not None and shard_of(one) is one]
    shards = [shard_of(gradient) for gradient in sharded]
    square = torch.nn.utils.get_total_norm(shards).square()
    torch.distributed.all_reduce(square, group=sharded[0].device_mesh.get_group())
    if whole:
        square += torch.nn.utils.get_total_norm(whole).square()
    torch._foreach_mul_([*shards, *whole], (most / (square.sqrt() + _NORM_ROUNDING)).clamp(max=1.0))


def state_bytes(optimizer: Optimizer) -> int:
    """Returns the bytes of an optimizer's state."""
    states = optimizer.state.values()
    return sum(shard_of(value).nbytes for state in states for value in state.values() if isinstance(value, Tensor))


def _broadcasts(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, whole) for size, whole in pairs)


def _check_form(own: Any, found: Any) -> None:
    """Raises ValueError where a restored setting is missing, or is no number in place of one."""
    if isinstance(own, dict):
        for name, value in own.items():
            _check_form(value, found[name])
    elif isinstance(own, list | tuple):
        for one, other in zip(own, found, strict=True):
            _check_form(one, other)
    elif isinstance(own, int | float) and not isinstance(found, int | float):
        raise ValueError(f"{found!r} is in the place of {own}")


# The parameters that are trained: by the names in settings, and phase by phase. A name stands for a module with all
# that is in it, or for a parameter; a pattern (`*.bias`) for those whose names match.


def named_by(model: nn.Module, names: Sequence[str], setting: str) -> set[str]:
    """Returns the names of the parameters that some names or patterns stand for.

    Args:
        model: The model.
        names: Of modules or parameters, or patterns of them.
        setting: Where they were given, for the error.

    Raises:
        ConfigError: A name stands for no parameter; the message lists the nearest names.
    """
    parameters = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for name in names:
        # A parameter goes by its own name and by the modules' that it is in: a, a.b, a.b.weight.
        own = {one for one in parameters if any(part == name or fnmatchcase(part, name)
               for part in accumulate(one.split("."), "{}.{}".format))}  # fmt: skip
        if not own:
            modules = [one for one, _ in model.named_modules() if one]
            nearest = ", ".join(nearest_first(name, [*modules, *parameters])[:_SUGGESTIONS])
            raise ConfigError(f"{setting} names parts of the model", value=repr(name), remedy=f"Nearest: {nearest}")
        found |= own
    return found


def freeze(model: nn.Module, training: TrainingSettings, *, epoch: int) -> None:
    """Freezes the parameters that `training.freeze` names, or thaws them once its epochs are over."""
    if training.freeze:
        names = named_by(model, training.freeze, "training.freeze")
        is_trained = 0 < training.thaw_epoch <= epoch
        for name, parameter in model.named_parameters():
            if name in names and (parameter.is_floating_point() or parameter.is_complex()):
                parameter.requires_grad_(is_trained)


def phase_parameters(model: nn.Module, phase: Phase) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters of a phase with their names, frozen ones too; integers, which nothing trains, are left
    out.
    """
    named = [(name, one) for name, one in model.named_parameters() if one.is_floating_point() or one.is_complex()]
    if not phase.parameters:
        return named
    names = named_by(model, phase.parameters, f"phase {phase.name}")
    return [(name, parameter) for name, parameter in named if name in names]


def phase_training(training: TrainingSettings, phase: Phase) -> TrainingSettings:
    """Returns the training settings of a phase."""
    return replace(training, **phase.training) if phase.training else training


@contextmanager
def only_trained(model: nn.Module, phase: Phase) -> Iterator[None]:
    """Freezes the parameters of all other phases for the block."""
    if not phase.parameters:
        yield
        return
    own = {id(parameter) for _, parameter in phase_parameters(model, phase)}
    others = [one for one in model.parameters() if one.requires_grad and id(one) not in own]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def by_settings(optimizer: Optimizer, steps: int) -> object:
    """Stands for a task that has no schedule of its own."""


def make_optimization(  # noqa: PLR0913 - the settings of a phase, and a task's own schedule
    model: nn.Module,
    training: TrainingSettings,
    *,
    lr: float,
    total_steps: int,
    phase: Phase = Phase(),  # noqa: B008 - frozen
    schedule_of: Callable[[Optimizer, int], object] = by_settings,
    offloaded: bool = False,
) -> Optimization:
    """Makes optimizer, schedule and scaler for all parameters of a phase, also those that are frozen now and thawed
    later. `lr` is the learning rate at the plan's logical batch, `total_steps` counts optimizer steps, not
    micro-batches. `schedule_of` is `Task.schedule`; `offloaded` tells whether the state waits on the host.
    """
    named = phase_parameters(model, phase)
    groups, device = parameter_groups(model, named, training, lr), named[0][1].device
    with parameters_on_host([parameter for _, parameter in named]) if offloaded else nullcontext():
        optimizer = make_optimizer(groups, training, lr, device)
    state = OffloadedState(optimizer) if offloaded else None
    if state is not None:
        state.begin()
    ticks = total_steps if training.scheduler_interval == "step" else training.epochs
    is_lazy = not optimizer.state
    scheduler, plateau = _task_schedule(schedule_of, optimizer, ticks), None
    if scheduler is None:
        if training.scheduler == "plateau":
            plateau = Plateau(factor=training.schedule_factor, patience=training.schedule_patience)
        scheduler = LambdaLR(optimizer, schedule(training, ticks, plateau))
    return Optimization(
        optimizer=optimizer,
        scheduler=scheduler,
        ticks=ticks,
        scaler=torch.amp.GradScaler(device.type, enabled=training.precision == "fp16"),
        clip_norm=training.grad_clip_norm,
        clip_value=training.grad_clip_value,
        noise=GradientNoise(deviation=training.grad_noise, decay=training.grad_noise_decay, seed=training.seed),
        plateau=plateau,
        is_lazy=is_lazy,
        parameters=[parameter for _, parameter in named],
        offloaded=state,
    )


def parameter_groups(
    model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], training: TrainingSettings, lr: float
) -> list[dict[str, Any]]:
    """Groups parameters, given with their names, by learning rate and weight decay, as optimizers take them.

    Where `training.lr_factors` names a parameter more than once, the last one counts.
    """
    without_decay = named_by(model, training.no_decay, "training.no_decay")
    factors: dict[str, float] = {}
    for pattern, factor in training.lr_factor_of.items():
        factors |= dict.fromkeys(named_by(model, [pattern], "training.lr_factors"), factor)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        decay = 0.0 if name in without_decay else training.weight_decay
        groups.setdefault((factors.get(name, 1.0), decay), []).append(parameter)
    # The learning rate that is reported is the first group's.
    ordered = sorted(groups.items(), key=lambda group: group[0][0] != 1.0)
    return [{"params": own, "lr": lr * factor, "weight_decay": decay} for (factor, decay), own in ordered]


def make_optimizer(parameters: Sequence[Any], training: TrainingSettings, lr: float, device: torch.device) -> Optimizer:
    """Makes the optimizer alone, for parameters or groups of them.

    Raises:
        ConfigError: There is no such optimizer, it does not train as batches are computed here, or it has no such
            argument.
        TaskError: The code of an optimizer that is not PyTorch's failed.
    """
    name, given = training.optimizer, training.optimizer_args
    kind = _optimizer_class(name)
    taken = inspect.signature(kind).parameters
    takes_any = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in taken.values())
    if unknown := [key for key in given if key not in taken and not takes_any]:
        raise unknown_name(f"argument of {kind.__name__}", unknown[0], [key for key in taken if key != "params"])
    arguments = {"lr": lr, "weight_decay": training.weight_decay, **_DEFAULTS.get(name, {})}
    if kind in _FUSED or training.betas != _BETAS:
        arguments["betas"] = tuple(training.betas)
    if device.type == "cuda" and not given.keys() & {"fused", "foreach", "differentiable"}:
        # PyTorch's default on a GPU (foreach) copies the parameters for a moment in every step, which the batch could
        # have used. Where there is nothing else, it is asked for: what is measured on the host then does the same.
        arguments["fused" if kind in _FUSED else "foreach"] = True
    if _is_partly_sharded(parameters) and not given.keys() & {"fused", "foreach", "differentiable"}:
        # Its kernels take either shards or whole weights.
        arguments |= {"fused": False, "foreach": False}
    arguments = {key: value for key, value in arguments.items() if key in taken}
    arguments |= {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        optimizer: Optimizer = kind(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"training.optimizer: {kind.__name__} cannot be made", value=first_sentence(error),
                          remedy="Correct its arguments, or name another: --optimizer adamw") from error  # fmt: skip
    except Exception as error:
        raise TaskError(f"{kind.__name__} failed when it was made", error) from error
    return optimizer


def _is_partly_sharded(parameters: Sequence[Any]) -> bool:
    """Tells whether some parameters, or parameters of groups, are shards and others are whole."""
    groups = [one["params"] if isinstance(one, dict) else [one] for one in parameters]
    return len({shard_of(one) is one for group in groups for one in group}) > 1


def _optimizer_class(name: str) -> Any:
    """Returns the class that `training.optimizer` names; raises ConfigError where it cannot train here."""
    if is_code(name):
        kind = load_optimizer(name)
    else:
        kinds = {key.lower(): kind for key, kind in vars(torch.optim).items() if isinstance(kind, type)}
        kind = kinds.get(name)
        if kind is None:
            raise ConfigError(f"PyTorch {torch.__version__} has no optimizer {name}", remedy="Take a later one")
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError(f"training.optimizer: {name} does not derive from torch.optim.Optimizer",
                          remedy="Name one of torch.optim (adamw), or a class: package.module.Class")  # fmt: skip
    closure = inspect.signature(kind.step).parameters.get("closure")
    reason = ""
    if closure is not None and closure.default is inspect.Parameter.empty:
        reason = CLOSURE_REASON
    elif issubclass(kind, torch.optim.SparseAdam):
        reason = SPARSE_REASON
    elif hasattr(kind, "eval"):
        reason = "its weights differ in training and evaluation, between which nothing here switches it"
    if reason:
        raise ConfigError(f"training.optimizer cannot be {name}: {reason}", remedy="Try --optimizer adamw")
    return kind


def _task_schedule(compute: Callable[[Optimizer, int], object], optimizer: Optimizer, ticks: int) -> LRScheduler | None:
    """Returns the scheduler that a task makes for a run of some moves; None where it leaves the settings alone.

    Raises:
        DataError: It returned something else, or a scheduler that no checkpoint can hold.
        TaskError: Its code failed.
    """
    where = getattr(compute, "__qualname__", "schedule")
    try:
        made = compute(optimizer, ticks)
        if callable(made) and not isinstance(made, LRScheduler | type):
            made = LambdaLR(optimizer, _factor_of(made, where))
    except CanTrainError:
        raise
    except Exception as error:
        raise TaskError(f"{where} failed", error) from error
    if made is None:
        return None
    remedy = "Return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, steps), or lambda step: 1 - step / steps"
    if not isinstance(made, LRScheduler):
        raise DataError(f"{where} returned neither a scheduler of PyTorch nor a function of the step",
                        value=f"{made!r:.60}", remedy=remedy)  # fmt: skip
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise DataError(f"{where} returned a scheduler of another optimizer than it was given",
                        value=type(made).__name__, remedy=remedy)  # fmt: skip
    for name, value in as_plain(made.state_dict()).items():
        if (kind := _not_plain(value)) is not None:
            raise DataError(f"{where} returned a scheduler whose state no checkpoint can hold",
                            value=f"{name} has a {kind} in it",
                            remedy=f"Leave {name} out of {type(made).__name__}.state_dict()")  # fmt: skip
    return made


def _factor_of(compute: Callable[[int], Any], where: str) -> Callable[[int], float]:
    """Returns a task's function of the step, with its results checked."""

    def factor(step: int) -> float:
        value = compute(step)
        with suppress(TypeError, ValueError):
            if 0 <= (number := float(value)) < math.inf:
                return number
        raise DataError(f"The function that {where} returned gives no factor of the learning rate",
                        value=f"{value!r:.60} at step {step}", remedy="Return a number of at least 0")  # fmt: skip

    return factor


def as_plain(value: Any) -> Any:
    """Returns a value with Python's numbers in the place of numpy's."""
    if isinstance(value, dict):
        return {name: as_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(as_plain, value)) if type(value) in (list, tuple) else value
    return value.item() if isinstance(value, np.generic) else value


def _not_plain(value: Any) -> str | None:
    """Returns the type of a value, or of a part of it, that a checkpoint cannot hold; None where there is none."""
    if isinstance(value, dict):
        return next(filter(None, (_not_plain(part) for part in value.values())), None)
    if type(value) in (list, tuple):
        return next(filter(None, map(_not_plain, value)), None)
    is_plain = value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str)
    return None if is_plain else type(value).__name__


@dataclass(kw_only=True)
class Plateau:
    """The state of the schedule `plateau`: it multiplies the learning rate by `factor` after `patience` validations in
    a row without a better loss.
    """

    factor: float
    patience: int
    share: float = 1.0
    best_loss: float = math.inf
    waited: int = 0  # Validations since the last better one, or since the rate was lowered

    def validated(self, loss: float) -> None:
        """Counts a validation."""
        if loss < self.best_loss:
            self.best_loss, self.waited = loss, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.share, self.waited = self.share * self.factor, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns its state, without the settings."""
        return {"share": self.share, "best_loss": self.best_loss, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state from `state_dict`."""
        self.share, self.best_loss, self.waited = state["share"], state["best_loss"], state["waited"]


def schedule(training: TrainingSettings, ticks: int, plateau: Plateau | None = None) -> Callable[[int], float]:
    """Returns the share of the learning rate at each tick t: a linear rise over the first w = warmup_share · n of the
    n ticks, up to the first share of the schedule and then the schedule. With x = (t - w) / (n - w) it is

        constant    1
        cosine      (1 + cos πx) / 2
        linear      1 - x
        one-cycle   as `torch.optim.lr_scheduler.OneCycleLR` has it: half a cosine from 1 / start_divisor to 1 over
                    rise_share · (n - w) - 1 ticks, and half a cosine down to 1 / (start_divisor · end_divisor) at the
                    last tick
        step        factor^⌊e / schedule_epochs⌋ in epoch e, counted from 0, of n / epochs ticks
        wsd         1, and over the last decay_share · n ticks a line down to 0 at t = n
        plateau     the factor to the power of the times that the validation loss has stopped to fall (`Plateau`)

    Past the end the share stays as it was there.

    Args:
        training: The name of the schedule, and its settings.
        ticks: Its length n: the moves of the schedule, by step or by epoch.
        plateau: The state of the schedule `plateau`.
    """
    warmup, last = round(ticks * training.warmup_share), max(ticks - 1, 0)
    length, decay = max(ticks - warmup, 1), max(round(ticks * training.schedule_decay_share), 1)
    top = training.schedule_rise_share * length - 1
    start = 1 / training.schedule_start_divisor
    end = start / training.schedule_end_divisor

    def one_cycle(tick: int) -> float:
        since = min(tick, last) - warmup
        if since <= top:
            return _half_cosine(start, 1.0, since / top if top > 0 else 1.0)
        return _half_cosine(1.0, end, (since - top) / max(length - 1 - top, 1e-9))

    bodies: dict[str, Callable[[int], float]] = {
        "constant": lambda tick: 1.0,
        "cosine": lambda tick: 0.5 * (1 + math.cos(math.pi * min((tick - warmup) / length, 1.0))),
        "linear": lambda tick: 1.0 - min((tick - warmup) / length, 1.0),
        "one-cycle": one_cycle,
        "step": lambda tick: (
            training.schedule_factor ** (min(tick, last) * training.epochs // max(ticks, 1) // training.schedule_epochs)
        ),
        "wsd": lambda tick: min(1.0, max(ticks - tick, 0) / decay),
        "plateau": lambda tick: 1.0 if plateau is None else plateau.share,
    }
    body = bodies[training.scheduler]

    def share(tick: int) -> float:
        if tick < warmup:
            return (tick + 1) / (warmup + 1) * body(warmup)
        return body(tick)

    return share


def _half_cosine(first: float, last: float, done: float) -> float:
    return last + (first - last) / 2 * (1 + math.cos(math.pi * min(done, 1.0)))


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """Bytes that an optimizer takes of the device."""

    parameter_bytes: int  # Size of the trained parameters; their gradients take as much
    state_bytes: int  # State that the optimizer keeps from its first step on
    transient_bytes: int  # Temporary memory of a step
    # Size of each trained parameter that is not empty: the pieces that an optimizer works in.
    tensor_bytes: tuple[int, ...]
    host_bytes: int = 0  # State that waits on the host between steps


def measure_optimizer(
    parameters: Iterable[Tensor], make: Callable[[Sequence[nn.Parameter]], Optimizer], *, offloaded: bool = False
) -> OptimizerMemory:
    """Measures two steps of the optimizer that `make` returns, on zeros of the trained parameters' shapes; `offloaded`
    tells whether its state waits on the host.
    """
    # Only planning measures: whoever evaluates a finished run needs this module's precision, and no simulated GPU.
    from can_train.memory.simulated.gpu import LiveStorageTracker

    shards = [shard_of(parameter) for parameter in parameters]
    # A model on meta may be larger than the host.
    fake = FakeTensorMode() if any(shard.is_meta for shard in shards) else nullcontext()
    with fake, LiveStorageTracker(_UNLIMITED) as tracker:
        shadows = [nn.Parameter(torch.zeros(shard.shape, dtype=shard.dtype, device="cpu")) for shard in shards]
        parameter_bytes = tracker.live_bytes
        for shadow in shadows:
            shadow.grad = torch.zeros_like(shadow)
        before = tracker.live_bytes
        # Adagrad makes its state here.
        with parameters_on_host(shadows) if offloaded else nullcontext():
            optimizer = make(shadows)
        if offloaded:
            OffloadedState(optimizer).begin()
        optimizer.step()
        state_bytes = tracker.live_bytes - before
        # State is made in the first step, so only the second has the temporary memory of all later ones.
        optimizer.step()
        transient_bytes = tracker.peak_bytes - tracker.live_bytes
    return OptimizerMemory(
        parameter_bytes=parameter_bytes,
        state_bytes=max(state_bytes, 0),
        transient_bytes=max(transient_bytes, 0),
        tensor_bytes=tuple(shadow.nbytes for shadow in shadows if shadow.nbytes),
        host_bytes=tracker.host_bytes,
    )


def state_share(training: TrainingSettings, dtype: torch.dtype) -> float:
    """Returns the size of the state that the optimizer of some settings keeps ÷ the size of the weights; no weights are
    needed for it.
    """
    sample = [torch.empty(_SAMPLE_WEIGHTS, dtype=dtype, device="cpu")]
    needs = measure_optimizer(sample, lambda shadows: make_optimizer(shadows, training, training.lr, sample[0].device))
    return needs.state_bytes / needs.parameter_bytes


class OptimizerReserve:
    """Reserves the memory of the optimizer's step on one device. Of its state, `held_bytes` are there already (all of
    it, once resumed).

    The optimizer makes its state in the first step, and a step that runs out of memory half-way cannot be undone:
    retrying it made a silent error of 4 to 5 %. So its memory is held as ballast until then, and checked before every
    step.

    Attributes:
        tensors: The ballast, in a list that is emptied once it is freed.
        remedy: The end of the sentence that an error gives as its remedy.
    """

    remedy = "take smaller micro-batches, --optimizer sgd, which needs less, or a larger device"

    def __init__(
        self,
        needs: OptimizerMemory,
        meter: Meter,
        *,
        held_bytes: int = 0,
        retries: int = 3,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._meter = meter
        self._retries = retries
        self._wait = wait
        self.tensors: list[Tensor] = []
        self.expect(needs, held_bytes=held_bytes)

    def expect(self, needs: OptimizerMemory, *, held_bytes: int) -> None:
        """Replaces the memory that the optimizer will take: other parameters may be trained than before."""
        self._tensor_bytes = needs.tensor_bytes
        self._transient_bytes = needs.transient_bytes
        self._missing_bytes = max(needs.state_bytes - held_bytes, 0)

    def hold(self) -> None:
        """Allocates ballast in place of the state that the next step will make, or raises `DoesNotFitError`."""
        if self._missing_bytes and not self.tensors:
            self.tensors = self._allocate(self._missing_bytes)

    def before_step(self) -> None:
        """Frees the ballast and checks that the step's memory can be allocated.

        Raises:
            DoesNotFitError: It cannot; nothing has been stepped.
        """
        # Emptied rather than replaced: whoever has asked for `tensors` must not keep them.
        self.tensors.clear()
        self._allocate(self._transient_bytes + self._missing_bytes)
        self._missing_bytes = 0

    def _allocate(self, need: int) -> list[Tensor]:
        for retry in range(self._retries + 1):
            if (held := allocate_ballast(need, self._tensor_bytes, self._meter.device)) is not None:
                return held
            self._meter.release()
            # After the first failure, the released cache may be enough.
            if retry:
                self._wait(FIRST_WAIT_S * 2 ** (retry - 1))
        raise DoesNotFitError(
            "The optimizer's step must fit beside weights and gradients",
            value=f"{size_text(need)} cannot be had",
            remedy=without_others(self._meter.foreign_bytes_at_start + self._meter.foreign_bytes(), self.remedy),
            # Smaller micro-batches leave room for it when the run is resumed.
            details=OutOfMemoryDetails(should_fit=True),
        )


def allocate_ballast(need: int, tensor_bytes: Sequence[int], device: torch.device) -> list[Tensor] | None:
    """Allocates as many bytes as an optimizer's state and step need, for parameters of `tensor_bytes` each; returns
    None where the device has no room for them.
    """
    # One piece is quick. Where memory is fragmented, the pieces that the optimizer will ask for still fit.
    for sizes in ([need], [*_pieces(need, tensor_bytes)]):
        with CatchOutOfMemory():
            return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    return None


def _pieces(need: int, tensor_bytes: Sequence[int]) -> Iterator[int]:
    """Yields the sizes of the parameters, over and over until they add up to `need`."""
    for size in cycle(tensor_bytes or (need,)):
        if need <= 0:
            break
        yield min(size, need)
        need -= size
