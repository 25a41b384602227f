"""Predicts the peak of one batch on a GPU that is not there: `predict_peak`. Small batches on the CPU show how memory
grows; the allocations of CUDA are recorded for a card of the catalogue.

Shapes: R samples, F features.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from can_train.config.settings import TrainingSettings, is_code
from can_train.config.task_settings import import_from, load_optimizer, locate_optimizer
from can_train.errors import ArgumentError, ConfigError, check_flags, check_functions, check_kinds, shown
from can_train.fit.compiled import SAVED_SHARE, compile_in_place, outermost_calls
from can_train.fit.cost_model import EXPLAINED, CostModel, DeviceLimits, ProbeFit, SearchResult, fit_cost_model
from can_train.fit.explore import (
    Explorer,
    Workload,
    left_as_it_was,
    others_of,
    probe,
    weighted_loss,
)
from can_train.fit.micro_batcher import untrainable_because
from can_train.fit.offloaded_state import OffloadedState
from can_train.fit.optimizer import (
    coalesce_gradients,
    make_optimizer,
    only_trained,
    phase_parameters,
    phase_training,
    sparse_weights,
)
from can_train.fit.optimizer_memory import LowBitOptimizer, measure_optimizer
from can_train.fit.packing import ROUNDING, BatchCosts, batch_totals, counts_of, growing_totals
from can_train.fit.pass_state import leaves_of
from can_train.fit.peak_prediction import (
    MemoryTerm,
    PeakPrediction,
    from_small_batches,
    loaded_kernels,
    of_any,
    of_compiled,
    operations_of,
    price_trace,
    with_unmeasured,
)
from can_train.fit.precision import Precision, convert, use_channels_last
from can_train.fit.random_state import step_generator
from can_train.fit.recorded_limits import on_generations, read_sizes
from can_train.fit.repetitions import Repetitions
from can_train.fit.rescue import gradients_aside
from can_train.fit.rungs import SPLIT_ALONE, Rung, computed_on
from can_train.io.units import counted, parse_size, size_text
from can_train.memory.allocation_trace import FIXED, GROWING, AllocationRecorder, AllocationTrace, MemoryPart
from can_train.memory.allocator_settings import (
    OWN_SETTINGS,
    SETTINGS_VARIABLES,
    allocator_settings,
    check_known,
    read_allocator_settings,
    settings_variable,
)
from can_train.memory.catalogue import ROCM, ROCM_CAVEAT, Card, find_card, other_card
from can_train.memory.cuda_dispatch import FLEX_ATTENTION, record_on_cuda
from can_train.memory.cuda_library import NoCudaDispatchError, ValuesNeededError
from can_train.memory.cuda_workspaces import AMPERE, TENSORS
from can_train.memory.meters import CpuMeter, is_on_meta
from can_train.memory.out_of_memory import CatchOutOfMemory, is_out_of_memory
from can_train.memory.simulated.allocator import AllocatorSettings
from can_train.memory.value_sizes import ValueSizes
from can_train.task import BatchTask, Feature, Phase

# Samples of a uniform batch that probes choose from: they are all alike, and a batch may be larger than the data.
_PROBED: Final = 256
_PRECISIONS: Final = ("fp32", "bf16", "fp16")
_OF_DTYPES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_HALF: Final = (torch.float16, torch.bfloat16)
_GPU: Final = torch.device("cuda")
# Samples, channels, then height and width of images, or depth, height and width of volumes.
_DIMS_OF_FORMATS: Final = {torch.channels_last: 4, torch.channels_last_3d: 5}
_RECORDED_STEPS: Final = 2  # the optimizer makes its state in the first one
_CLEARED: Final = ("before", "after")
_TOLD_SHARE: Final = 0.01  # of the peak: smaller gradients that are alive are not told
_ANY_LR: Final = 1e-3  # a learning rate decides no memory
_SIZES_SHARE: Final = 0.1  # of the peak: the change that other values may cause; not measured
_COMPUTED: Final = "Some sizes depend on values: they are the sizes of small batches that are computed"
# Cost of a batch unlike the probes that tells whether the line holds for it: so many costs of the largest probe, and
# again so many, up to some bytes, as far as running it is expected to take no more than some seconds. Above the probes
# another instant of the step may decide the peak, whose memory grows faster.
_CHECKED: Final = 4
_CHECKED_BYTES: Final = 64 * 2**20
_CHECKED_SECONDS: Final = 2.0
_LINE_SHARES: Final = (0.4, 0.6, 0.8, 1.0)  # Of a batch that is off the line: the parts that another line is fitted to


Counts = Sequence[float] | NDArray[Any] | Tensor
BatchCounts = int | Counts | Mapping[str | Feature, Counts]
"""A number of samples, or counts of each sample that memory grows with."""

LossOf = Callable[[NDArray[np.int64]], Tensor]
"""Computes the loss of the samples at some positions."""


MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]
"""Makes an optimizer of some parameters: a class, or a function."""


def predict_peak(  # noqa: PLR0913 - the entrance for people with a loop of their own
    task_or_model: BatchTask | nn.Module,
    batch: BatchCounts,
    *,
    loss_of: LossOf | None = None,
    optimizer: str | MakeOptimizer | None = None,
    training: TrainingSettings | None = None,
    precision: str | torch.dtype = "fp32",
    memory_format: torch.memory_format = torch.preserve_format,
    zero_grad: str = "before",
    accumulation_steps: int = 1,
    keep_gradients: bool = False,
    compile: bool = False,  # noqa: A002 - as `torch.compile`
    target: str | None = None,
    allocator: str | None = None,
) -> PeakPrediction:
    """Predicts the peak of a training step without a GPU: from small ones, or for a card from the step itself.

    For a model of your own, here with a batch far larger than the data at hand:

    >>> model, x = nn.Linear(100, 100), torch.zeros(64, 100)
    >>> found = predict_peak(model, 100_000, loss_of=lambda rows: model(x[rows % 64]).square().sum())
    >>> round(found.peak_bytes / 1e6)
    200

    Args:
        task_or_model: A model on the CPU, which is left as it was; or a task, whose model is made. Of a task with
            several phases, the one with the highest peak is predicted.
        batch: Number of samples; or, for samples that differ, [R] or [R, F] counts that their memory grows with
            (nodes and edges, tokens); or such counts [R] by feature, where samples are padded: `{Feature("tokens",
            padding=1): lengths}`. For a task: number of samples, the costliest ones being taken; or [R] rows.
        loss_of: For a model: computes the loss of the samples at some positions of `batch`.
        optimizer: For a model: a name as on the command line (`"adamw"`, `"torch.optim.NAdam"`, `"package.Lion"`), a
            class, or a function that makes it; None: AdamW. It is measured as it runs on a GPU, where most optimizers
            update many parameters at once (`foreach`). `"sgd"` has a momentum of 0.9, as on the command line;
            `"torch.optim.SGD"` has none, as the class. The state of bitsandbytes' optimizers is known by their names
            (`"paged_adamw_8bit"`, `"bitsandbytes.optim.Lion8bit"`).
        training: For a task: precision, optimizer, format of images and `compile`; None: the defaults.
        precision: For a model: `fp32`, or `bf16` or `fp16` (`amp-bf16`, `amp-fp16`) for autocast around `loss_of`; or
            the `torch.dtype`. A model whose weights have 64 bits is `fp64`.
        memory_format: For a model: format of the images that it is called with, `torch.channels_last`, or of volumes,
            `torch.channels_last_3d`.
        zero_grad: For a model: whether its loop clears gradients `"before"` the forward pass of a step, or `"after"`
            it: then gradients of the step before are alive in the forward pass.
        accumulation_steps: For a model: batches, each as large as `batch`, whose gradients make one optimizer step.
        keep_gradients: For a model: whether gradients are filled with zeros and not freed, as
            `zero_grad(set_to_none=False)` does.
        compile: For a model: whether its loop compiles it with `torch.compile`; a model that is compiled already is
            predicted so. For a card the compiler's graphs are recorded.
        target: A card or a slice of one, `rtx3090`, `a100_3g.40gb`, or the memory of another one, `16GiB`. Two steps on
            the whole batch are recorded as CUDA would run them, with tensors that have no values; a model of your own
            may be on any device, `meta` included.
        allocator: For a card: settings of PyTorch's allocator, as PYTORCH_CUDA_ALLOC_CONF has them; empty: PyTorch's
            defaults. None: the settings in this process's variables; without any, can-train's for a task, and PyTorch's
            defaults for a model, whose loop sets no others.

    Returns:
        The prediction; of a target with terms for workspaces, fragmentation and the context.

    Raises:
        ArgumentError: An argument has the wrong type or shape; or a model on `meta` has no target, or one whose step
            cannot be recorded here.
        ConfigError: The catalogue has no such card.
        DoesNotFitError: Not even the probes fit on this machine.
    """
    check_flags(keep_gradients=keep_gradients, compile=compile)
    card = _card(target, allocator)
    loop = _Loop(zero_grad=zero_grad, accumulation_steps=accumulation_steps, keep_gradients=keep_gradients)
    if not isinstance(task_or_model, nn.Module):
        check_kinds("a model, or a task", BatchTask, "Give a torch.nn.Module and loss_of=, or an instance of a task",
                    task_or_model=task_or_model)  # fmt: skip
        if compile:
            raise ArgumentError("A task is compiled by a setting of its training", value="compile=True",
                                remedy='Give training=TrainingSettings(compile="default")')  # fmt: skip
        if loop != _Loop():
            raise ArgumentError("A task is trained by can-train's loop", value=f"{loop}",
                                remedy="Leave zero_grad, accumulation_steps and keep_gradients out")  # fmt: skip
        _refuse_of_models(loss_of=loss_of, optimizer=optimizer, precision=precision, memory_format=memory_format)
        of_task = TaskStep(task=task_or_model, batch=batch, training=_training_of(training))
        if card is not None:
            return _of_target(of_task, card, allocator, OWN_SETTINGS)
        return _widened(of_task.on_cpu()) if of_task.is_compiled else of_task.on_cpu()
    _check_model(task_or_model, training)
    check_functions("loss_of=lambda rows: loss(model(x[rows]), y[rows])", loss_of=loss_of)
    check_kinds("a format of images", torch.memory_format, "Give memory_format=torch.channels_last, or leave it out",
                memory_format=memory_format)  # fmt: skip
    low_bit = LowBitOptimizer.named(optimizer, task_or_model) if isinstance(optimizer, str) else None
    has_compiled = any(_is_compiled(module) for module in task_or_model.modules())
    step = _Step(
        model=task_or_model, batch=_counted(batch), loss_of=cast("LossOf", loss_of),
        precision=_precision(precision, task_or_model),
        make=low_bit or _maker(optimizer), memory_format=memory_format, loop=loop, is_compiled=compile or has_compiled,
    )  # fmt: skip
    if card is not None:
        found = _of_target(step, card, allocator, "")
    else:
        # PyTorch would never compile again a module that was called in a dispatch mode.
        with torch.compiler.set_stance("force_eager") if has_compiled else nullcontext():
            found = step.on_cpu()
        found = _widened(found) if step.is_compiled else found
        # The operations that are recorded for a card have the gradients as they are.
        if sparse_bytes := sum(weight.nbytes for weight in {*sparse_weights(task_or_model).values()}):
            found = _with_sparse(found, sparse_bytes)
    if low_bit is not None:
        found = low_bit.stated(found, step.trained)
    gradient_bytes = sum(parameter.nbytes for parameter in step.trained)
    if told := loop.told(gradient_bytes, found.peak_bytes):
        found = replace(found, assumptions=(*found.assumptions, told))
    return found


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _widened(found: PeakPrediction, reason: str = "") -> PeakPrediction:
    """Widens the interval of a step that was predicted as it is, and is compiled."""
    tensors = replace(found.tensors, least_bytes=(1 - SAVED_SHARE) * found.tensors.least_bytes)
    limits = None if found.limits is None else replace(found.limits, saved_share=SAVED_SHARE)
    told = f"The model is predicted as it is; compiled, it takes up to {SAVED_SHARE:.0%} less"
    notice = f"{told}. Its graphs cannot be recorded: {reason}" if reason else told
    return replace(found, tensors=tensors, limits=limits, notices=(*found.notices, notice))


def _with_sparse(found: PeakPrediction, sparse_bytes: int) -> PeakPrediction:
    """Widens the interval of a step with sparse gradients, which are predicted as dense ones."""
    tensors = replace(found.tensors, least_bytes=max(found.tensors.least_bytes - sparse_bytes, 0.0))
    notice = f"Sparse gradients are predicted as dense ones: they may take {size_text(sparse_bytes)} less"
    return replace(found, tensors=tensors, notices=(*found.notices, notice))


def _refuse_of_models(**arguments: Any) -> None:
    """Raises ArgumentError where an argument is given for a task that only a model's prediction reads."""
    defaults = {"precision": "fp32", "memory_format": torch.preserve_format}
    settings = {"optimizer": 'optimizer="sgd"', "precision": 'precision="bf16"', "memory_format": "channels_last=True"}
    for name, value in arguments.items():
        if value is None or value is defaults.get(name) or (name, value) == ("precision", "fp32"):
            continue
        rule, remedy = (
            f"A task's {name} is a setting of its training",
            f"Give training=TrainingSettings({settings.get(name)})",
        )
        if name == "loss_of":
            rule, remedy = "A task computes its loss by itself", "Leave loss_of out"
        raise ArgumentError(rule, value=shown(value), remedy=remedy)


def _training_of(training: object) -> TrainingSettings:
    """Returns the settings of a task's training, which are the defaults where none are given."""
    if training is None:
        return TrainingSettings()
    check_kinds(
        "a TrainingSettings", TrainingSettings, 'Give training=TrainingSettings(precision="bf16")', training=training
    )
    return cast("TrainingSettings", training)


def _check_model(model: nn.Module, training: object) -> None:
    """Raises ArgumentError where a model cannot be trained, or is given the settings of a task."""
    if training is not None:
        raise ArgumentError("A model has no settings of a training", value=f"training={shown(training)}",
                            remedy="Give optimizer=, precision=, memory_format= and compile=")  # fmt: skip
    if (error := untrainable_because(model)) is not None:
        raise error
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ArgumentError("A training step has parameters that are trained", value="all of them are frozen",
                            remedy="Thaw some: model.requires_grad_()")  # fmt: skip


def _precision(given: object, model: nn.Module) -> Precision:
    """Returns the precision that a model of a caller's own is predicted in."""
    text = _OF_DTYPES.get(given, "") if isinstance(given, torch.dtype) else given
    name = text.removeprefix("amp-") if isinstance(text, str) else ""
    if name == "fp64" and all(one.dtype == torch.float64 for one in model.parameters() if one.is_floating_point()):
        # Its weights have the format already, and autocast has none.
        name = "fp32"
    if name not in _PRECISIONS:
        more = "; convert the weights where they have another format: model.double()"
        raise ArgumentError("A model's precision must be a precision of autocast", value=shown(given),
                            remedy=f"Valid: {', '.join(_PRECISIONS)}{more}")  # fmt: skip
    return Precision.named(name)


def _card(target: object, allocator: object) -> Card | None:
    """Returns the card that a step is predicted for; None: none is given. `allocator` has settings for it."""
    if allocator is not None:
        check_kinds("a text", str, "Give allocator='expandable_segments:True', or leave it out", allocator=allocator)
        if target is None:
            raise ArgumentError("Settings of the allocator count for a card", value=f"allocator={allocator!r}",
                                remedy="Give one, target='a100-80gb'")  # fmt: skip
    if target is None:
        return None
    check_kinds("the name of a card, or its memory", str, "Give target='a100-80gb' or target='16GiB'", target=target)
    with suppress(ConfigError):
        return other_card(parse_size(cast("str", target)))
    return find_card(cast("str", target), by_memory="target='16GiB'")


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """What a caller's loop does with gradients."""

    zero_grad: str = "before"
    accumulation_steps: int = 1
    keep_gradients: bool = False

    def __post_init__(self) -> None:
        if self.zero_grad not in _CLEARED:
            raise ArgumentError("Gradients are cleared before the forward pass of a step, or after it",
                                value=f"zero_grad={self.zero_grad!r}", remedy='Give "before" or "after"')  # fmt: skip
        steps: Any = self.accumulation_steps
        if not isinstance(steps, int | np.integer) or isinstance(steps, bool) or steps < 1:
            raise ArgumentError("A step has one batch or more", value=f"accumulation_steps={steps!r}",
                                remedy="Give accumulation_steps=1 where each batch is a step")  # fmt: skip

    def __str__(self) -> str:
        given = (f"{key}={value!r}" for key, value in vars(self).items() if value != getattr(_Loop, key))
        return ", ".join(given)

    @property
    def keeps_alive(self) -> bool:
        """Whether gradients are alive in some forward pass."""
        return self != _Loop()

    def backward(self, loss: Callable[[], Tensor], parameters: Sequence[nn.Parameter], *, is_first: bool) -> None:
        """Computes the gradients of a batch, which may be the first one of a step."""
        if is_first and self.zero_grad == "before":
            self._clear(parameters)
        computed = loss()
        if is_first and self.zero_grad == "after":
            self._clear(parameters)
        _check_loss(computed)
        computed.backward()

    def _clear(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if self.keep_gradients and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None

    def told(self, gradient_bytes: int, peak_bytes: float) -> str:
        """Returns the sentence on gradients, without a full stop; empty where they are too small to matter."""
        if gradient_bytes < _TOLD_SHARE * peak_bytes:
            return ""
        size = size_text(gradient_bytes)
        if self.keeps_alive:
            return f"Gradients of {size} are alive in the forward pass ({self})"
        return (
            f"Gradients are cleared before the forward pass; a loop that clears them after it (zero_grad='after'), "
            f"accumulates or keeps them takes up to {size} more"
        )


def _check_loss(loss: object) -> None:
    """Raises ArgumentError where there is no gradient of the loss that a caller's function computed."""
    example = "Return the sum or the mean of the samples' losses, as model(x[rows]).square().mean()"
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
        raise ArgumentError("loss_of(rows) returns the loss, a tensor of one number", value=got, remedy=example)
    if not loss.requires_grad:
        raise ArgumentError("The loss that loss_of(rows) returns has a gradient", value="it needs none",
                            remedy="Compute it from the model's parameters, and do not detach it")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The training step of a model that is predicted."""

    model: nn.Module
    batch: _Batch
    loss_of: LossOf
    precision: Precision
    make: MakeOptimizer
    memory_format: torch.memory_format
    loop: _Loop
    is_compiled: bool = False

    @property
    def is_half(self) -> bool:
        return self.precision.autocast in _HALF

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def loss(self, rows: NDArray[np.int64], device: str) -> Tensor:
        """Returns the loss of the samples at some positions."""
        if self.memory_format is torch.preserve_format:
            return self._computed(rows, device)
        # Weights take as much in any format, and convolutions follow their inputs.
        hook = self.model.register_forward_pre_hook(self._with_format, with_kwargs=True, prepend=True)
        try:
            return self._computed(rows, device)
        finally:
            hook.remove()

    def _computed(self, rows: NDArray[np.int64], device: str) -> Tensor:
        with self.precision.context(torch.device(device)):
            return self.loss_of(rows)

    def _with_format(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        def convert(given: Tensor) -> Tensor:
            has_format = given.dim() == _DIMS_OF_FORMATS.get(self.memory_format, given.dim())
            return given.contiguous(memory_format=self.memory_format) if has_format else given

        return tree_map_only(Tensor, convert, (args, kwargs))

    def on_cpu(self) -> PeakPrediction:
        """Predicts from small batches on the CPU."""
        return _of_model(self)

    def train_compiled(self) -> None:
        """Trains as `train_on_gpu` does, in a process that may change the model; it is compiled where it is not."""
        if not any(_is_compiled(module) for module in self.model.modules()):
            compile_in_place([self.model])
        self.train_on_gpu()

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        # The last feature counts them.
        return round(float(self.batch.totals[-1]))

    def run_on_cpu(self, num_samples: int) -> None:
        """Computes the loss of the first samples on the CPU."""
        self.loss(np.arange(num_samples), "cpu")

    def train_on_gpu(self) -> None:
        """Trains for some steps on the whole batch, once the model is on a GPU."""
        optimizer = _as_on_a_gpu(self.make)(self.trained)
        rows = np.arange(self.num_samples)
        for _ in range(_RECORDED_STEPS):
            # Gradients are alive from the second batch of a step on: further ones take as much.
            for number in range(min(self.loop.accumulation_steps, _RECORDED_STEPS)):
                self.loop.backward(partial(self.loss, rows, "cuda"), self.trained, is_first=number == 0)
            optimizer.step()


@dataclass(frozen=True, kw_only=True)
class TaskStep:
    """The training step of a task that is predicted."""

    task: BatchTask
    batch: Any
    training: TrainingSettings
    device: torch.device = _GPU
    num_parts: int = 1  # Micro-batches of a step, each of them this batch: gradients are alive from the second one on
    rung: Rung = SPLIT_ALONE  # That it is computed on
    loss_chunks: int = 1  # Parts that each cross entropy is computed in, one after the other in the backward pass too

    @property
    def is_half(self) -> bool:
        """Whether autocast computes in half precision."""
        return self.training.precision in ("bf16", "fp16")

    @property
    def is_compiled(self) -> bool:
        """Whether its training compiles it."""
        return self.training.compile != "off"

    @cached_property
    def model(self) -> nn.Module:
        """The task's model, on the CPU."""
        return _model_of(self.task, self.training)

    def on_cpu(self) -> PeakPrediction:
        """Predicts from small batches on the CPU."""
        return _of_task(self.task, self.batch, self.training)

    def on_card(self, card: Card) -> PeakPrediction:
        """Predicts from the step itself; raises NoCudaDispatchError where it cannot be recorded."""
        settings, told = _allocator(None, OWN_SETTINGS)
        found = _priced(self, card, settings)
        return replace(found, assumptions=(told, *found.assumptions))

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return len(self._rows)

    def run_on_cpu(self, num_samples: int) -> None:
        """Computes the loss of the first samples on the CPU, in every phase."""
        here = replace(self, batch=self._rows[:num_samples], device=torch.device("cpu"))
        # The same model, and not another one of it.
        here.__dict__["model"] = self.model
        for phase in self.task.phases():
            with only_trained(self.model, phase):
                here._loss(phase, phase_training(self.training, phase))

    def parts_on_host(self) -> tuple[MemoryPart, ...]:
        """Runs the step on the CPU, and returns the parts of the peak that the simulated GPU counts."""
        recorder = AllocationRecorder(self.model, cuda=AMPERE)
        recorder.seed_resident([*self.model.parameters(), *self.model.buffers()])
        with recorder, recorder.following():
            self.train_on_gpu()
        return recorder.trace.parts(_allocator(None, OWN_SETTINGS)[0])

    def train_on_gpu(self) -> None:
        """Trains every phase for some steps on the whole batch, once the model is on a GPU."""
        phases = [(phase, phase_training(self.training, phase)) for phase in self.task.phases()]
        trained = [[parameter for _, parameter in phase_parameters(self.model, phase)] for phase, _ in phases]
        optimizers = [self._maker(training)(own) for (_, training), own in zip(phases, trained, strict=True)]
        for optimizer in optimizers if self.rung.offload_optimizer else ():
            OffloadedState(optimizer).begin()
        for _ in range(_RECORDED_STEPS):
            for (phase, training), own, optimizer in zip(phases, trained, optimizers, strict=True):
                with only_trained(self.model, phase):
                    for _ in range(min(self.num_parts, _RECORDED_STEPS)):
                        with (
                            gradients_aside(own),
                            computed_on(self.rung, self.model, repetitions=Repetitions(compares=False)),
                        ):
                            self._loss(phase, training).backward()
                coalesce_gradients(own)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def train_compiled(self) -> None:
        """Trains as `train_on_gpu` does, in a process that may change the model: what a loss calls is compiled."""
        with torch.no_grad():
            for phase in self.task.phases():
                compute = partial(self._loss, phase, phase_training(self.training, phase))
                compile_in_place(outermost_calls(self.model, compute))
        self.train_on_gpu()

    def _maker(self, training: TrainingSettings) -> MakeOptimizer:
        make = partial(make_optimizer, training=training, lr=training.lr, device=self.device,
                       is_sparse=bool(sparse_weights(self.model)))  # fmt: skip
        return _as_on_a_gpu(make) if self.device.type == "cuda" else make

    def _loss(self, phase: Phase, training: TrainingSettings) -> Tensor:
        task, precision = self.task.in_phase(phase), Precision.named(training.precision)
        rows, seed = self._rows, training.seed
        batch = task.logical_batch(rows, self.device, precision.dtype, step_generator(seed=seed, step=0))
        chunked = nullcontext() if self.loss_chunks == 1 else ChunkedCrossEntropy(self.loss_chunks)
        with precision.context(self.device), chunked:
            losses = batch.losses(self.model, 0, len(rows))
        return weighted_loss(losses, task.loss_weights)

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        """Samples of the batch; of a number of samples, the ones whose counts are largest."""
        if np.ndim(self.batch):
            return np.asarray(self.batch, dtype=np.int64)
        rows = self.task.train_rows
        counts = self.task.batch_features(rows)
        each = (counts / np.maximum(counts.mean(axis=0), 1e-12)).sum(axis=1)
        return np.resize(rows[np.argsort(-each, kind="stable")], _size(self.batch))


class ChunkedCrossEntropy(TorchFunctionMode):
    """Computes cross entropies in parts of their rows, and each part again in the backward pass, so that only one part
    has its logarithms in memory. Sums and gradients are the same; losses with weights, smoothing or probabilities as
    targets stay whole.
    """

    def __init__(self, num_chunks: int) -> None:
        super().__init__()
        self._num_chunks = num_chunks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.cross_entropy:
            return func(*args, **(kwargs or {}))
        call = _CROSS_ENTROPY.bind(*args, **(kwargs or {}))
        call.apply_defaults()
        given = call.arguments
        logits, target, reduction = given["input"], given["target"], given["reduction"]
        is_plain = given["weight"] is None and not given["label_smoothing"] and given["reduce"] is None
        if not is_plain or given["size_average"] is not None or target.is_floating_point() or not target.dim():
            return func(*args, **(kwargs or {}))
        each = partial(F.cross_entropy, ignore_index=given["ignore_index"],
                       reduction="none" if reduction == "none" else "sum")  # fmt: skip
        size = -(-len(target) // self._num_chunks)
        parts = [checkpoint(each, *pair, use_reentrant=False, preserve_rng_state=False)
                 for pair in zip(logits.split(size), target.split(size), strict=True)]  # fmt: skip
        if reduction == "none":
            return torch.cat(parts)
        total = torch.stack(parts).sum()
        return total if reduction == "sum" else total / (target != given["ignore_index"]).sum()


_CROSS_ENTROPY: Final = inspect.signature(F.cross_entropy)


def _of_target(step: _Step | TaskStep, card: Card, allocator: str | None, default: str) -> PeakPrediction:
    settings, told = _allocator(allocator, default)
    found = _recorded(step, card, settings)
    notices = found.notices
    if settings.ignored:
        notices = (*notices, f"Settings of the allocator that no prediction knows: {', '.join(settings.ignored)}")
    return replace(found, notices=notices, assumptions=(told, *found.assumptions))


def _allocator(given: str | None, default: str) -> tuple[AllocatorSettings, str]:
    """Returns the allocator's settings that a step is predicted with, and a sentence that says them."""
    variable = settings_variable() if given is None else ""
    environment = os.environ if given is None else {SETTINGS_VARIABLES[0]: given}
    try:
        settings = read_allocator_settings(environment, default)
        if given is not None:
            # PyTorch refuses a name that it does not know. Variables may be meant for a later PyTorch.
            check_known(settings)
    except ConfigError as error:
        if given is None:
            raise
        listed = f"{error.remedy}. " if error.rule.startswith("Unknown") else ""
        raise ArgumentError(
            error.rule,
            value=error.value,
            remedy=f"{listed}Give allocator='expandable_segments:True', or '' for the defaults",
        ) from error
    text = allocator_settings(environment, default).strip()
    source = f"from ${variable}" if variable else "as given"
    if given is None and not variable:
        source = "which can-train sets" if default else f"as ${SETTINGS_VARIABLES[0]} is not set"
    what = f"the settings {text}" if text else "its default settings"
    return replace(settings, memory_fraction=1.0), f"PyTorch's allocator has {what}, {source}"


def _recorded(step: _Step | TaskStep, card: Card, settings: AllocatorSettings) -> PeakPrediction:
    try:
        return _priced(step, card, settings)
    except NoCudaDispatchError as error:
        if is_on_meta(step.model):
            raise ArgumentError(
                "A model on meta is predicted from the allocations of CUDA", value=f"{error.rule}: {error.value}",
                remedy=error.remedy or "Give a model on the CPU",
            ) from error  # fmt: skip
        try:
            found = step.on_cpu()
        except NotImplementedError as missing:
            raise ArgumentError(
                "A step that can neither be recorded as CUDA would run it nor run on the CPU cannot be predicted",
                value=f"{error.value}; {missing}".rstrip("."),
                remedy="Make tensors on the device of the model's inputs, as torch.arange(n, device=x.device)",
            ) from missing
        return from_small_batches(found, card, error, loaded_kernels(step.model), settings)


def _priced(step: _Step | TaskStep, card: Card, settings: AllocatorSettings) -> PeakPrediction:
    if card.generation == ROCM:
        raise NoCudaDispatchError(ROCM_CAVEAT, value=card.key)
    plain = _recorded_with(step, card, settings, fused=None)
    if not step.is_compiled:
        return plain
    try:
        fused, unfused = (_recorded_with(step, card, settings, fused=fused) for fused in (True, False))
    except NoCudaDispatchError as error:
        return _widened(plain, error.value)
    return of_compiled(plain, fused, unfused)


def _recorded_with(
    step: _Step | TaskStep, card: Card, settings: AllocatorSettings, *, fused: bool | None
) -> PeakPrediction:
    # A task reads real samples, and may compute with their values before they are on the device.
    record = partial(
        record_on_cuda,
        step.model,
        step.train_on_gpu if fused is None else step.train_compiled,
        resident_threads=card.resident_threads,
        real_host=isinstance(step, TaskStep),
        fused=fused,
    )
    sizes = None
    try:
        traces = on_generations(card.generation, record)
    except ValuesNeededError:
        sizes = read_sizes(step.model, step.run_on_cpu, step.num_samples)
        if sizes is None:
            raise
        traces = on_generations(card.generation, partial(record, sizes=sizes))
    kernels, operations = loaded_kernels(step.model), operations_of(step.model)
    is_half = step.is_half or any(each.dtype in _HALF for each in step.model.parameters())
    found = of_any(
        {
            gpu: with_unmeasured(
                price_trace(trace, card, settings, kernels, operations), trace, step.model, is_half=is_half
            )
            for gpu, trace in traces.items()
        }
    )
    return _with_assumptions(found if sizes is None else _of_sizes(found, sizes), next(iter(traces.values())))


def _with_assumptions(found: PeakPrediction, trace: AllocationTrace) -> PeakPrediction:
    told = [f"{optimizer} reads numbers from tensors on the GPU, which are taken as 1" for optimizer in trace.assuming]
    if any(label.operation == FLEX_ATTENTION for label in trace.labels.values()):
        told.append("Flex attention is computed by the kernels that torch.compile makes of it, which keep no scores")
    return replace(found, assumptions=(*found.assumptions, *told))


def _of_sizes(found: PeakPrediction, sizes: ValueSizes) -> PeakPrediction:
    """Widens the interval of a step whose sizes depend on values, and says which step they are of."""
    of_step = counted(sizes.largest_step, "sample")
    told = f"Some sizes depend on values: they are the sizes of a step of {of_step} on the CPU"
    if sizes.largest_step < sizes.num_samples:
        told = f"{told}, in proportion"
    return _of_values(found, told)


def _of_values(found: PeakPrediction, told: str) -> PeakPrediction:
    """Widens the interval of a step whose sizes depend on values, by the change that other values may cause."""
    tensors = replace(
        found.tensors,
        least_bytes=(1 - _SIZES_SHARE) * found.tensors.least_bytes,
        most_bytes=(1 + _SIZES_SHARE) * found.tensors.most_bytes,
    )
    return replace(found, tensors=tensors, assumptions=(*found.assumptions, told))


def _model_of(task: BatchTask, training: TrainingSettings) -> nn.Module:
    model = convert(task.build_model(), Precision.named(training.precision).dtype)
    return use_channels_last(model) if training.channels_last else model


def _of_task(task: BatchTask, batch: Any, training: TrainingSettings) -> PeakPrediction:
    model, meter = _model_of(task, training), CpuMeter(cuda=AMPERE)
    explorers = [
        Explorer(task=task.in_phase(phase), model=model, training=phase_training(training, phase), meter=meter,
                 rows=task.train_rows, verify=False, phase=phase)
        for phase in task.phases()
    ]  # fmt: skip
    for explorer, others in zip(explorers, others_of(explorers), strict=True):
        explorer.other_phases = others
        explorer.count_others_state()
    found = max((_of_phase(explorer, batch) for explorer in explorers), key=lambda found: found.peak_bytes)
    return _of_values(found, _COMPUTED) if meter.values_decide else found


def _of_phase(explorer: Explorer, batch: Any) -> PeakPrediction:
    task = explorer.task
    limits = explorer.explore(lambda costs: float(costs.each().sum()))
    # Of a device that any batch fits.
    training, evaluation = (
        replace(result, tuned_limit=math.inf, capped=True) for result in (limits.training, limits.evaluation)
    )
    limits, phase = replace(limits, training=training, evaluation=evaluation), training
    if np.ndim(batch) == 0:
        each = BatchCosts.priced(phase.model, task.batch_features(task.train_rows)).each()
        rows = np.resize(task.train_rows[np.argsort(-each, kind="stable")], _size(batch))
    else:
        rows = np.asarray(batch, dtype=np.int64)
    cost = phase.model.cost(task.batch_features(rows))
    peak_bytes = limits.step_peak_bytes(cost, 0.0)
    return PeakPrediction(
        tensors=_around(peak_bytes, phase.half_width(cost)),
        parts=_line_parts(peak_bytes, phase.model.base_bytes),
        explains=phase.model.explains,
        limits=limits,
    )


def _line_parts(peak_bytes: float, base_bytes: float) -> tuple[MemoryPart, ...]:
    """Returns the base and the cost of a line as parts. A whole number of bytes is taken off without rounding."""
    base = min(int(base_bytes), peak_bytes)
    parts = ((FIXED, base), (GROWING, peak_bytes - base))
    ordered = sorted(parts, key=lambda part: -part[1])
    return tuple(MemoryPart(kind=kind, module="", operation="", num_bytes=size) for kind, size in ordered if size)


def _around(peak_bytes: float, half_width_bytes: float) -> MemoryTerm:
    least, most = peak_bytes - half_width_bytes, peak_bytes + half_width_bytes
    return MemoryTerm(what=TENSORS, num_bytes=peak_bytes, least_bytes=least, most_bytes=most)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The batch that is predicted."""

    counts: NDArray[np.float64]  # [R, F] of samples that probes choose from; the last feature counts samples
    features: Sequence[Feature]
    totals: NDArray[np.float64]  # [F] of the whole batch

    @property
    def size(self) -> int:
        """Samples of the whole batch."""
        return round(float(self.totals[-1]))

    def unlike_probes(self, cost_of: NDArray[np.float64], cost: float) -> NDArray[np.int64]:
        """Returns positions of samples that cost about as much: the smallest and the largest in turn, as no probe has
        them: a probe's samples are alike or in order. Where the batch is only a number, samples come several times.
        """
        ranked = np.argsort(self.counts[:, 0], kind="stable")
        mixed = np.stack([ranked, ranked[::-1]], axis=1).ravel()[: len(ranked)]
        if len(mixed) < self.size:
            each = float(self.totals @ cost_of) / self.size
            mixed = np.resize(mixed, min(self.size, math.ceil(cost / max(each, 1.0)) + 1))
        within = growing_totals(self.features, self.counts[mixed]) @ cost_of <= cost * (1 + ROUNDING)
        chosen: NDArray[np.int64] = mixed[: max(int(within.sum()), 1)]
        return chosen


@dataclass(kw_only=True)
class _Reached:
    """Tensors that steps on the CPU reach."""

    # Positions of parameters that get a gradient, and of those that have it after the backward pass: hooks may step and
    # clear it before.
    with_gradient: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    beside: dict[int, Tensor] = field(default_factory=dict)  # by identity: of modules beside the model, or of none
    _gradients: dict[int, Tensor | None] = field(default_factory=dict, compare=False)  # That these had before

    def note(self, loss: Tensor, trained: Sequence[nn.Parameter]) -> Tensor:
        """Notes the parameters of a loss, which it returns; their gradients must not be added up over steps."""
        known = set(map(id, trained))
        if isinstance(loss, Tensor) and not self._gradients:
            self.beside.update(
                (id(leaf), leaf) for leaf in leaves_of(loss) if isinstance(leaf, nn.Parameter) and id(leaf) not in known
            )
            self._gradients = {key: tensor.grad for key, tensor in self.beside.items()}
            self.clear()
        return loss

    def clear(self) -> None:
        """Clears the gradients of tensors beside the model."""
        for tensor in self.beside.values():
            tensor.grad = None

    @contextmanager
    def following(self, model: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[None]:
        """Follows steps in the block."""
        known = set(model.modules())

        def called(module: nn.Module, _inputs: Any) -> None:
            if module not in known:
                known.update(module.modules())
                self.beside.update((id(tensor), tensor) for tensor in (*module.parameters(), *module.buffers()))

        def add(position: int) -> Callable[[Any], None]:
            return lambda _parameter: self.with_gradient.add(position)

        # A hook of the caller's, which runs first, may have cleared the gradient already.
        handles = [register_module_forward_pre_hook(called)]
        handles += [each.register_post_accumulate_grad_hook(add(position)) for position, each in enumerate(trained)]
        try:
            with warnings.catch_warnings():
                # Modules that are compiled warn of hooks that fire once more, which follow the same module twice here.
                warnings.filterwarnings(
                    "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
                )
                yield
        finally:
            for handle in handles:
                handle.remove()
            for key, gradient in self._gradients.items():
                self.beside[key].grad = gradient


def _of_model(of: _Step) -> PeakPrediction:
    if is_on_meta(of.model):
        raise ArgumentError(
            "Small batches run on the CPU, where a model on meta has no memory", value="parameters on meta",
            remedy="Give a card, target='a100-80gb', or a model on the CPU",
        )  # fmt: skip
    everything = set(range(len(of.trained)))
    expected = _Reached(with_gradient=everything, kept=everything)
    with _weights_as_they_were(of.trained):
        found, reached = _from_probes(of, expected)
        if reached != expected:
            found, _ = _from_probes(of, reached)
    if unused := everything - reached.with_gradient:
        size = size_text(sum(of.trained[position].nbytes for position in unused))
        told = f"Parameters of {size} get no gradient in small batches, and are counted without one"
        found = replace(found, notices=(*found.notices, f"{told}, and without state of the optimizer"))
    return found


@contextmanager
def _weights_as_they_were(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Restores parameters that hooks of a caller's may step in a backward pass."""
    hooked = [each for each in parameters if each._post_accumulate_grad_hooks]
    copies = [each.detach().clone() for each in hooked]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(hooked, copies, strict=True):
                parameter.copy_(value)


def _from_probes(of: _Step, expected: _Reached) -> tuple[PeakPrediction, _Reached]:
    """Predicts from small batches that are expected to reach some tensors; returns those that they reached, too."""
    meter, model, batch, reached = CpuMeter(cuda=AMPERE), of.model, of.batch, _Reached()
    unused = set(range(len(of.trained))) - expected.with_gradient
    try:
        make = partial(_made_for, model, of.trained, _as_on_a_gpu(of.make))
        optimizer = measure_optimizer(of.trained, make, unused=unused)
    except (TypeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        # LBFGS steps with a closure, SparseAdam on sparse gradients.
        raise ArgumentError(
            "An optimizer is measured in steps on dense gradients, without a closure", value=f"{error}",
            remedy="Give optimizer=torch.optim.SGD, and add the memory of its state",
        ) from error  # fmt: skip

    sparse = set(map(id, sparse_weights(model).values()))

    def step(rows: NDArray[np.int64]) -> None:
        try:
            if of.loop.keeps_alive:
                for position, parameter in enumerate(of.trained):
                    is_alive = position in expected.kept and id(parameter) not in sparse
                    parameter.grad = torch.zeros_like(parameter) if is_alive else None
            is_first = of.loop.accumulation_steps == 1
            # Sparse gradients grow with each batch that they are added up over.
            for _ in range(max(of.loop.accumulation_steps, 2) if sparse and of.loop.keeps_alive else 1):
                of.loop.backward(lambda: reached.note(of.loss(rows, "cpu"), of.trained), of.trained, is_first=is_first)
        finally:
            reached.clear()
            kept = (position for position, parameter in enumerate(of.trained) if parameter.grad is not None)
            reached.kept.update(kept)
            for parameter in model.parameters():
                parameter.grad = None

    resident = [*model.parameters(), *model.buffers(), *expected.beside.values()]
    resident_bytes = sum(tensor.nbytes for tensor in resident)
    work = Workload(
        run=step,
        rows=np.arange(len(batch.counts)),
        counts=batch.counts,
        features=batch.features,
        # As in the middle of a run: the optimizer's state is there.
        resident=[*resident, torch.empty(optimizer.state_bytes, dtype=torch.uint8)],
        gradient_bytes=optimizer.parameter_bytes,
    )
    explains = False
    with left_as_it_was(model, meter), reached.following(model, of.trained):
        fit = probe(work, meter)
        law, cost = fit.model, float(batch.totals @ fit.model.coefficients)
        peak = law.base_bytes + cost
        if cost <= fit.largest_cost:
            # Gradients decide the peak of a batch no larger than the probes, which no line tells: it is run. The last
            # feature counts samples.
            positions = np.arange(round(batch.totals[-1]))
            with CatchOutOfMemory():
                peak = float(replace(work, rows=positions).peak(meter, positions).allocated)
                explains = law.explains
        else:
            with CatchOutOfMemory():
                law, peak, explains = _beyond_probes(work, meter, batch, fit)
    optimizer_step = resident_bytes + optimizer.state_bytes
    if expected.kept:
        optimizer_step += optimizer.parameter_bytes + optimizer.transient_bytes
    means = tuple(batch.counts.mean(axis=0).tolist())
    phase = SearchResult(model=law, tuned_limit=math.inf, capped=True, mean_totals=means)
    peak = max(peak, float(optimizer_step))
    reached.kept &= reached.with_gradient
    found = PeakPrediction(
        tensors=_around(peak, law.half_width(batch.totals)),
        parts=_line_parts(peak, law.base_bytes),
        explains=explains,
        limits=DeviceLimits(
            device_key=meter.key, capacity_bytes=meter.capacity_bytes, training=phase, evaluation=phase,
            optimizer_peak_bytes=optimizer_step, gradient_bytes=optimizer.parameter_bytes,
        ),
    )  # fmt: skip
    return (_of_values(found, _COMPUTED) if meter.values_decide else found), reached


def _beyond_probes(work: Workload, meter: CpuMeter, batch: _Batch, fit: ProbeFit) -> tuple[CostModel, float, bool]:
    """Predicts a batch that is larger than the probes, and runs larger ones, up to the batch itself, that tell whether
    their line holds. Where it does not, and samples are alike, a line through the larger ones takes its place.

    Returns:
        The cost model, the batch's peak, and whether the model explains the memory of larger batches.
    """
    law, cost_of = fit.model, np.asarray(fit.model.coefficients)
    cost, limit = float(batch.totals @ cost_of), _CHECKED * fit.largest_cost
    while True:
        began = meter.seconds()
        positions = batch.unlike_probes(cost_of, min(limit, cost))
        found = work.peak(meter, positions).allocated
        grown, larger = found - law.base_bytes, min(_CHECKED * limit, _CHECKED_BYTES)
        seconds = (meter.seconds() - began) * larger / max(limit, 1.0)
        # Step by step: where gradients hide the memory of the probes, their line may promise far too little.
        if limit >= min(larger, cost) or grown > _CHECKED_BYTES or seconds > _CHECKED_SECONDS:
            break
        limit = larger
    checked = law.cost(batch.counts[positions])
    agrees = abs(grown - checked) <= EXPLAINED * max(grown, checked) or checked <= fit.largest_cost
    explains = law.explains and agrees
    # Where samples differ, their counts may be the reason.
    is_uniform = bool((batch.counts == batch.counts[:1]).all())
    if not explains and is_uniform and (steeper := _line_of_parts(work, meter, batch, positions)).explains:
        law, explains = replace(steeper, below=((fit.largest_cost, fit.largest_peak),)), True
    is_whole = len(positions) == batch.size
    return law, float(found) if is_whole else law.base_bytes + float(batch.totals @ law.coefficients), explains


def _line_of_parts(work: Workload, meter: CpuMeter, batch: _Batch, positions: NDArray[np.int64]) -> CostModel:
    """Fits a line to some samples and to shares of them."""
    parts = [positions[: max(round(share * len(positions)), 1)] for share in _LINE_SHARES]
    totals = np.stack([batch_totals(batch.features, batch.counts[part]) for part in parts])
    return fit_cost_model(batch.features, totals, np.array([work.peak(meter, part).allocated for part in parts]))


def _maker(optimizer: str | MakeOptimizer | None) -> MakeOptimizer:
    """Returns the function that makes an optimizer from its name, its class or a function.

    Raises:
        ArgumentError: It is none of these, or cannot train here.
    """
    if isinstance(optimizer, str):
        return _named_maker(optimizer)
    make: Any = torch.optim.AdamW if optimizer is None else optimizer
    if isinstance(make, Optimizer) or not callable(make):
        raise ArgumentError(
            "An optimizer is a name, a class, or a function that makes one from parameters", value=f"{make!r:.80}",
            remedy="Give optimizer='adamw', optimizer=torch.optim.AdamW or optimizer=lambda parameters: ...",
        )  # fmt: skip
    if isinstance(make, type):
        if not any(base is Optimizer for base in make.__mro__):
            raise ArgumentError("The class of an optimizer derives from torch.optim.Optimizer", value=make.__name__,
                                remedy="Give optimizer=torch.optim.AdamW, or a function of the parameters")  # fmt: skip
        lr = inspect.signature(make).parameters.get("lr")
        if lr is not None and lr.default is inspect.Parameter.empty:
            make = partial(make, lr=_ANY_LR)
    return cast("MakeOptimizer", make)


def _named_maker(name: str) -> MakeOptimizer:
    try:
        name, folder = locate_optimizer(name, "", "")
        import_from(folder)
        # PyTorch's own default for most optimizers is no decay, which takes less of some.
        training = TrainingSettings(optimizer=name, weight_decay=0.0)
        of_torch = getattr(torch.optim, name.removeprefix("torch.optim."), None)
        if name.startswith("torch.optim.") and isinstance(of_torch, type):
            # The class as it is: only the name of the command line, `sgd`, has defaults of can-train's own.
            return _maker(of_torch)
        if is_code(training.optimizer) and not isinstance(make := load_optimizer(training.optimizer), type):
            return _maker(make)
        named = partial(make_optimizer, training=training, lr=_ANY_LR, device=torch.device("cpu"))
        named([nn.Parameter(torch.zeros(1))])
    except ConfigError as error:
        rule, remedy = error.rule.replace("training.optimizer", "optimizer"), error.remedy
        remedy = re.sub(r"--optimizer (\S+)", r"optimizer='\1'", remedy)
        raise ArgumentError(rule, value=error.value, remedy=remedy) from error
    return named


def _as_on_a_gpu(make: MakeOptimizer) -> MakeOptimizer:
    def made(parameters: Sequence[nn.Parameter]) -> Optimizer:
        optimizer: Any = make(parameters)
        if not hasattr(optimizer, "param_groups"):
            raise ArgumentError("A function that makes an optimizer returns it", value=shown(optimizer),
                                remedy="Give optimizer=lambda parameters: torch.optim.AdamW(parameters)")  # fmt: skip
        given = {id(parameter) for parameter in parameters}
        if not any(id(parameter) in given for group in optimizer.param_groups for parameter in group["params"]):
            raise ArgumentError(
                "An optimizer is made for the parameters that its function is given, or that the model has then",
                value="it steps none of them",
                remedy="Make it in the function: optimizer=lambda parameters: torch.optim.AdamW(parameters)",
            )
        for group in optimizer.param_groups:
            # PyTorch's own default for parameters on a GPU; on a CPU it is a loop, which takes less.
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
        return cast("Optimizer", optimizer)

    return made


def _made_for(
    model: nn.Module, trained: Sequence[nn.Parameter], make: MakeOptimizer, shadows: Sequence[nn.Parameter]
) -> Optimizer:
    """Makes an optimizer for the shadows of parameters, which are the model's meanwhile: the function that makes it may
    read them there.
    """
    of_parameter = {id(parameter): shadow for parameter, shadow in zip(trained, shadows, strict=True)}
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    held = [(module, dict(module._parameters)) for module in modules]
    try:
        for module, parameters in held:
            module._parameters.update(
                {name: of_parameter.get(id(parameter), parameter) for name, parameter in parameters.items()}
            )
        return make(shadows)
    finally:
        for module, parameters in held:
            module._parameters.update(parameters)


def _counted(batch: Any) -> _Batch:
    if np.ndim(batch) == 0 and not isinstance(batch, Mapping):
        size = _size(batch)
        features, counts = counts_of(min(size, _PROBED))
        return _Batch(counts=counts, features=features, totals=np.array([float(size)]))
    features, counts = counts_of(batch)
    if not len(counts):
        raise ArgumentError("A batch has at least one sample", value=shown(batch),
                            remedy="Give len(x), or counts for each sample")  # fmt: skip
    return _Batch(counts=counts, features=features, totals=batch_totals(features, counts))


def _size(batch: Any) -> int:
    if not isinstance(batch, int | np.integer) or isinstance(batch, bool) or batch < 1:
        raise ArgumentError("A batch is a number of samples, or counts for each of them", value=shown(batch),
                            remedy="Give len(x), or counts for each sample")  # fmt: skip
    return int(batch)
