"""Lightning callbacks: one that makes batches fit, and one that measures peak memory. can-train itself needs neither
`lightning` nor `pytorch_lightning`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from copy import deepcopy
from functools import partial, wraps
from importlib import import_module
from numbers import Real
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from can_train.adapters.framework_loop import LESS, FrameworkLoop, LoopSettings
from can_train.adapters.lightning_steps import (
    OWN_BATCHES,
    STEPPED,
    Calls,
    Closure,
    ManualStep,
    PartComputedError,
    fetching_error,
    logged_by,
    loss_in,
    module_of,
    part_size,
    quiet_loggers,
)
from can_train.adapters.part_values import Combination, Part
from can_train.adapters.step_state import replaced
from can_train.errors import CanTrainError, DoesNotFitError, check_kinds
from can_train.factors.observations import Outcome
from can_train.factors.observing import outcome_of
from can_train.fit.collate import leaves
from can_train.fit.rescue import fatal_out_of_memory
from can_train.memory.meters import device_name
from can_train.memory.monitor import INTERVAL, WARMUP, MemoryMonitor, check_steps

# Two names of Lightning, whose classes are not interchangeable.
_LIGHTNINGS: Final = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> type:
    """Finds the `Callback` of the Lightning that is imported already, else of one that is installed, else `object`."""
    for name in sorted(_LIGHTNINGS, key=lambda name: name not in sys.modules):
        try:
            found: type = import_module(name).Callback
        except ModuleNotFoundError as error:
            # An installed Lightning that lacks a module of its own must not pass for a missing one.
            if error.name not in (name, name.partition(".")[0]):
                raise
        else:
            return found
    return object


_Callback: Final[Any] = _callback_class()


def _check_installed(name: str, instead: str) -> None:
    if _Callback is object:
        found = "neither lightning nor pytorch_lightning is installed"
        remedy = f"pip install lightning; in a loop of your own {instead} does the same"
        raise CanTrainError(f"{name} needs Lightning", value=found, remedy=remedy)


class MicroBatchCallback(_Callback):  # type: ignore[misc]  # depends on the installed Lightning
    """Makes the batches of a Lightning training fit: `Trainer(callbacks=[MicroBatchCallback()])`.

    Each step runs as it is written. When memory runs out in it, the step is undone, the batch is computed in parts and
    stepped once, with the gradient of the whole batch. From then on batches of its cost are cut in advance, and an
    observation is recorded for the next run. Validation, test and prediction are split, too, and values that a step
    logs describe the whole batch. The first batch that is split is compared with the whole.

    A `training_step` that returns the mean over the batch's samples, or their sum, needs no change. One that returns a
    mean over something else (tokens, masked positions) returns their number beside it,
    `{"loss": loss, "denominator": tokens}`. In manual optimization a step that calls `manual_backward` once is split;
    one that calls it more often (a GAN) must fit, or cut its batches with `MicroBatcher`.

    Args:
        settings: Limits, key in the factor store, how batches are cut; None: the defaults of `LoopSettings`.

    Attributes:
        loop: Computes the batches, during a training; None before and after.

    Raises:
        ArgumentError: The settings are no `LoopSettings`.
        CanTrainError: Lightning is not installed.
        DoesNotFitError: Memory ran out in training, and the batch is not split.
    """

    def __init__(self, settings: LoopSettings | None = None) -> None:
        _check_installed("MicroBatchCallback", "MicroBatcher")
        super().__init__()
        self.loop: FrameworkLoop | None = None
        self._settings = LoopSettings.given(settings, "MicroBatchCallback({})")
        self._patches = ExitStack()  # Gives the trainer its own functions back
        self._others: tuple[Any, ...] = ()  # Arguments of the step beside its batch
        self._backward_calls = 0  # Backward passes of the whole step that ran last
        self._manual_step: ManualStep | None = None  # The step that runs now
        # Why batches of an evaluation's step are not split, and its remedy, by the step's name.
        self._whole: dict[str, tuple[str, str]] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wraps the trainer's calls of the module's steps. Nothing is changed on the module, which may be copied."""
        self._patches.close()
        strategy = trainer.strategy
        for name in _EVALUATIONS:
            self._wrap(strategy, name, partial(self._evaluate, trainer, pl_module, name))
        if stage == "fit":
            self._wrap(strategy.precision_plugin, "pre_backward", partial(self._before_backward, trainer))
            self._wrap(strategy.precision_plugin, "backward", self._backward)
            if not pl_module.automatic_optimization:
                self._wrap(strategy, "optimizer_step", self._check_step)
                self._wrap(strategy, "training_step", partial(self._train_manually, trainer, pl_module))
            automatic = trainer.fit_loop.epoch_loop.automatic_optimization
            self._wrap(automatic, "_make_closure", partial(self._make_closure, trainer, pl_module))
            self._wrap(automatic, "_optimizer_step", self._step_optimizer)

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replaces a function of an object by `wrapper`, which is given that function first."""
        native = getattr(owner, name)
        self._patches.enter_context(replaced(owner, name, wraps(native)(partial(wrapper, native))))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Gives the trainer its own functions back."""
        self._close("ok")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Makes room for the state that the optimizer makes in its first step, once memory ran out."""
        if self.loop is not None:
            if not pl_module.automatic_optimization:
                self.loop.cannot_undo(STEPPED)
            self.loop.before_optimizer_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Records how the training ended. Lightning calls `teardown` only where there was no error."""
        self._close(outcome_of(exception))

    def _close(self, outcome: Outcome) -> None:
        self._patches.close()
        if self.loop is not None:
            self.loop.close(outcome)
        self.loop, self._backward_calls = None, 0
        # Another training may be of another module.
        self._whole.clear()

    def _loop_of(self, trainer: Any, pl_module: Any) -> FrameworkLoop:
        if self.loop is None:
            # Made with the first batch: the module is on its device by then.
            refused = _refusal_of(trainer)
            self.loop = FrameworkLoop(
                framework="lightning",
                model=pl_module,
                optimizers=trainer.optimizers,
                settings=self._settings,
                remedy=OWN_BATCHES if refused else _REMEDY,
                notice=module_of(trainer, "utilities.rank_zero").rank_zero_info,
                objects=partial(logged_by, trainer, is_automatic=pl_module.automatic_optimization),
                trial_scope=partial(quiet_loggers, trainer),
                search_loss=partial(self._search_loss, trainer, pl_module),
                clears=not pl_module.automatic_optimization,
                refused=refused,
            )
        return self.loop

    # Automatic optimization

    def _make_closure(
        self, trainer: Any, pl_module: Any, make: Callable[..., Any], kwargs: Any, *others: Any, **options: Any
    ) -> Any:
        """Makes the closure that computes a batch's gradient for the optimizer."""
        closure = make(kwargs, *others, **options)
        if "batch" not in kwargs:
            closure.closure = torch.enable_grad()(fatal_out_of_memory(fetching_error)(closure.closure))
        elif closure._backward_fn is not None:
            loop = self._loop_of(trainer, pl_module)
            # The optimizer calls the closure in its step, which could no longer be watched.
            loop.prepare()
            step = Closure(trainer, pl_module, loop, closure, kwargs)
            # A closure that refers to itself would keep its batch until garbage is collected.
            closure.closure = partial(self._train, step, ref(closure))
        return closure

    def _train(self, step: Closure, closure: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
        """Computes a batch's gradient, in parts where it does not fit."""
        native = partial(type(closure()).closure, closure())
        batch, *others = step.kwargs.values()
        self._others, self._backward_calls = tuple(others), 0
        loop = step.loop
        step.begin()
        if isinstance(step.trainer.strategy.model, DistributedDataParallel) and not loop.refused:
            # Ranks need not have as many parts: the wrapped model sees one pass forward and one backward.
            inside = partial(step.inside_wrapper, step.module.training_step)
            backward = partial(step.backward_of_wrapper, step.precision.backward)
            with replaced(step.module, "training_step", inside), replaced(step.precision, "backward", backward):
                return native(*arguments, **options)
        return loop.step(batch, partial(native, *arguments, **options), partial(step.in_parts, batch))

    def _step_optimizer(self, native: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Steps the optimizer, whose own memory cannot be had by splitting a batch."""
        with fatal_out_of_memory(_optimizer_error):
            return native(*arguments, **options)

    def _before_backward(self, trainer: Any, native: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls the hooks before a backward pass; callbacks' hooks run once a batch, though the step is undone."""
        loop = self.loop
        if loop is None or loop.in_whole:
            self._backward_calls += 1
            return native(*arguments, **options)
        with replaced(trainer, "callbacks", []) if self._backward_calls else nullcontext():
            return native(*arguments, **options)

    def _backward(self, native: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Runs the backward pass of a whole batch, so that it can be undone."""
        with nullcontext() if self.loop is None else self.loop.gradients_aside():
            return native(*arguments, **options)

    # Manual optimization

    def _train_manually(self, trainer: Any, pl_module: Any, native: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a `training_step` that optimizes by hand, in parts where it does not fit."""
        batch, *others = arguments
        self._others, loop = tuple(others), self._loop_of(trainer, pl_module)
        calls, self._backward_calls = self._backward_calls, 0
        if not loop.refused and (reason := self._manual_refusal(trainer, pl_module, calls)):
            loop.refused, loop.remedy = reason, OWN_BATCHES
        step = ManualStep(trainer, pl_module, native, tuple(others))
        self._manual_step = step
        try:
            return loop.step(batch, partial(native, *arguments), partial(step.in_parts, loop, batch))
        finally:
            self._manual_step = None

    def _manual_refusal(self, trainer: Any, pl_module: Any, calls: int) -> str:
        """Returns why the batches of a module are not split, as a clause; `calls` of the step before are known."""
        if len(trainer.optimizers) > 1:
            return f"its training_step has {len(trainer.optimizers)} optimizers"
        if calls > 1:
            return f"its training_step calls manual_backward {calls} times"
        if trainer.strategy.model is not pl_module:
            return "its training_step calls manual_backward in a pass that waits for other ranks"
        return ""

    def _check_step(
        self, native: Callable[..., Any], optimizer: Any, closure: Callable[[], Any], *arguments: Any, **options: Any
    ) -> Any:
        """Steps an optimizer by hand, once the gradient was checked. The closure may compute it."""

        def checked() -> Any:
            result = closure()
            if self._manual_step is not None:
                self._manual_step.check_gradient()
            return result

        return native(optimizer, checked, *arguments, **options)

    # Evaluation

    def _evaluate(self, trainer: Any, pl_module: Any, name: str, native: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a step of validation, test or prediction, in parts where it does not fit."""
        batch, *others = arguments
        loop = self._loop_of(trainer, pl_module)
        context = getattr(trainer.precision_plugin, _CONTEXTS[name])

        def in_parts() -> Any:
            calls = Calls(pl_module, loop.kinds)

            def compute(part: Part) -> Any:
                # Not through a wrapped model, whose passes wait for other ranks.
                with context(), calls.of(part):
                    return getattr(pl_module, name)(part.batch, *others)

            parts = loop.evaluate_parts(batch, compute, name)
            weights = {part.start: part.share for part, _ in parts}
            combination = Combination([part_size(part) for part, _ in parts], list(weights.values()), loop.kinds)
            with loop.joining():
                joined = combination.combine([output for _, output in parts], (name,))
            calls.write(weights)
            return joined

        loop.prepare()
        of_training = loop.refused, loop.remedy
        if not loop.refused:
            loop.refused, loop.remedy = self._whole.get(name, of_training)
        try:
            return loop.step(batch, partial(native, *arguments), in_parts, trains=False)
        finally:
            self._whole[name] = loop.refused, loop.remedy
            # What cannot be joined in evaluation may be in training.
            loop.refused, loop.remedy = of_training

    # Search

    def _search_loss(self, trainer: Any, pl_module: Any) -> tuple[nn.Module, Callable[[Any], Tensor]]:
        """Copies the module without its trainer, and returns the copy with a function that computes a loss with it."""
        with ExitStack() as stack:
            for module in pl_module.modules():
                if "_trainer" in vars(module):
                    stack.enter_context(replaced(module, "_trainer", None))
            model = deepcopy(pl_module)
        model.log = model.log_dict = lambda *arguments, **options: None
        losses: list[Tensor] = []

        def manual_backward(loss: Tensor, *arguments: Any, **options: Any) -> None:
            losses.append(loss)
            raise PartComputedError

        model.manual_backward = manual_backward

        def loss_of(batch: Any) -> Tensor:
            losses.clear()
            with trainer.precision_plugin.train_step_context(), suppress(PartComputedError):
                losses.append(loss_in(model.training_step(batch, *self._others), model.device)[0])
            return losses[0]

        return model, loss_of


_EVALUATIONS: Final = ("validation_step", "test_step", "predict_step")

_CONTEXTS: Final = dict(
    zip(_EVALUATIONS, ("val_step_context", "test_step_context", "predict_step_context"), strict=True)
)

_REMEDY: Final = (
    "Return the number of items beside a loss that is a mean over tokens or masked positions "
    '({"loss": loss, "denominator": tokens}); for a loss that compares samples, take a smaller batch, or recompute '
    "activations (torch.utils.checkpoint)"
)

_SHARDED: Final = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


def _refusal_of(trainer: Any) -> str:
    """Returns why the batches of a trainer are not split, as a clause; empty where they are."""
    if type(trainer.strategy).__name__ in _SHARDED:
        return f"each pass of a {type(trainer.strategy).__name__} waits for other ranks"
    loaders = getattr(getattr(trainer.fit_loop, "_combined_loader", None), "flattened", ())  # None before training
    if len(loaders) > 1:
        return f"its rows come from {len(loaders)} loaders"
    return ""


def _optimizer_error(error: BaseException) -> DoesNotFitError:
    message = str(error).partition("\n")[0]
    return DoesNotFitError("The optimizer's step must fit beside weights and gradients",
                           value=f"the device said: {message}", remedy=f"{LESS[0].upper()}{LESS[1:]}")  # fmt: skip


class MemoryMonitorCallback(_Callback):  # type: ignore[misc]  # depends on the installed Lightning
    """Measures peak memory in a Lightning training: `Trainer(callbacks=[MemoryMonitorCallback()])`.

    After each measured batch and at the end it logs `peak_memory_pct`, the largest peak so far as a share of the
    capacity, and `batch_size_safety_factor` where one is given. On a GPU validation between batches counts too.

    Args:
        interval: Batches from one measured batch to the next.
        warmup: Batches before the first measured one; in a shorter training the last one is measured.
        device: `auto` (the trainer's), `cpu`, `cuda[:i]` or `sim:<size>`; or a `torch.device`.
        safety_factor: The share of the limit that batches were chosen by.

    Attributes:
        monitor: Has the peaks, during training and after it; None before.

    Raises:
        ArgumentError: An argument has the wrong type.
        CanTrainError: Lightning is not installed.
    """

    def __init__(
        self,
        interval: int = INTERVAL,
        warmup: int = WARMUP,
        device: str | torch.device = "auto",
        safety_factor: float | None = None,
    ) -> None:
        _check_installed("MemoryMonitorCallback", "MemoryMonitor")
        check_steps(interval, warmup)
        if safety_factor is not None:
            check_kinds(
                "a share of the limit", Real, "Give safety_factor=0.5, or leave it out", safety_factor=safety_factor
            )
        super().__init__()
        self.monitor: MemoryMonitor | None = None
        self._interval, self._warmup = interval, warmup
        self._device, self._safety_factor = device_name(device), safety_factor
        self._batch = ExitStack()
        self._due = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes the monitor, unless this is a second training."""
        if self.monitor is None:
            # At most as many as batches; Lightning may not know them.
            steps = trainer.estimated_stepping_batches
            self.monitor = MemoryMonitor(
                pl_module.device if self._device == "auto" else self._device,
                interval=self._interval,
                warmup=self._warmup,
                total_steps=None if math.isinf(steps) else int(steps) - trainer.global_step,
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Opens a step."""
        # Lightning does not call on_train_batch_end for a batch that the module skipped.
        self._batch.close()
        assert self.monitor is not None, "training starts before its batches"
        self._due = self.monitor.due
        self._batch.enter_context(self.monitor.step(pl_module, *trainer.optimizers, leaves(batch)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Closes the step, and logs the peak where it was a measured one."""
        self._batch.close()
        if self._due:
            self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Takes the last reading and logs it."""
        self._batch.close()
        if self.monitor is not None:
            self.monitor.pause()
            self._log(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Takes the last reading of a training that failed."""
        self.on_train_end(trainer, pl_module)

    def _log(self, trainer: Any) -> None:
        assert self.monitor is not None, "there is something to log"
        if (share := self.monitor.peak_share) is None:
            return
        metrics = {"peak_memory_pct": share}
        if self._safety_factor is not None:
            metrics["batch_size_safety_factor"] = self._safety_factor
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
