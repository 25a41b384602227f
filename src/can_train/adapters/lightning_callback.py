"""Lightning callbacks: one that makes batches fit, and one that measures peak memory. can-train itself needs neither
`lightning` nor `pytorch_lightning`.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from can_train.adapters.framework_loop import (
    LESS,
    FrameworkLoop,
    LoopSettings,
    Part,
    SplitRefusedError,
    combine_outputs,
    weighted_mean,
)
from can_train.adapters.step_state import add_to_gradients
from can_train.errors import CanTrainError, DoesNotFitError
from can_train.factors.observations import Outcome
from can_train.factors.observing import outcome_of
from can_train.fit.collate import leaves
from can_train.fit.rescue import fatal_out_of_memory
from can_train.memory.monitor import INTERVAL, WARMUP, MemoryMonitor

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
    logs are those of the whole batch. The first batch that is split is compared with the whole.

    A `training_step` that returns the mean over the batch's samples, or their sum, needs no change. One that returns a
    mean over something else (tokens, masked positions) returns their number beside it,
    `{"loss": loss, "denominator": tokens}`. In manual optimization a step that calls `manual_backward` once is split;
    one that calls it more often (a GAN) must fit, or cut its batches with `MicroBatcher`.

    Args:
        settings: Limits, key in the factor store, how batches are cut; None: the defaults of `LoopSettings`.

    Attributes:
        loop: Computes the batches, during a training; None before and after.

    Raises:
        CanTrainError: Lightning is not installed.
        DoesNotFitError: Memory ran out in training, and the batch is not split.
    """

    def __init__(self, settings: LoopSettings | None = None) -> None:
        _check_installed("MicroBatchCallback", "MicroBatcher")
        super().__init__()
        self.loop: FrameworkLoop | None = None
        self._settings = settings or LoopSettings()
        self._patches = ExitStack()  # Gives the trainer its own functions back
        self._others: tuple[Any, ...] = ()  # Arguments of the step beside its batch
        self._backward_calls = 0  # Calls of `manual_backward` in the step that runs now

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wraps the trainer's calls of the module's steps. Nothing is changed on the module, which may be copied."""
        self._patches.close()
        strategy = trainer.strategy
        for name in _EVALUATIONS:
            self._wrap(strategy, name, partial(self._evaluate, trainer, pl_module, name))
        if stage == "fit":
            if not pl_module.automatic_optimization:
                self._wrap(strategy, "backward", self._backward)
                self._wrap(strategy, "training_step", partial(self._train_manually, trainer, pl_module))
            automatic = trainer.fit_loop.epoch_loop.automatic_optimization
            self._wrap(automatic, "_make_closure", partial(self._make_closure, trainer, pl_module))
            self._wrap(automatic, "_optimizer_step", self._step_optimizer)

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replaces a function of an object by `wrapper`, which is given that function first."""
        native = getattr(owner, name)
        self._patches.enter_context(_replaced(owner, name, wraps(native)(partial(wrapper, native))))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Gives the trainer its own functions back."""
        self._close("ok")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Makes room for the state that the optimizer makes in its first step, once memory ran out."""
        if self.loop is not None:
            if not pl_module.automatic_optimization:
                self.loop.cannot_undo(_STEPPED)
            self.loop.before_optimizer_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Records how the training ended. Lightning calls `teardown` only where there was no error."""
        self._close(outcome_of(exception))

    def _close(self, outcome: Outcome) -> None:
        self._patches.close()
        if self.loop is not None:
            self.loop.close(outcome)
        self.loop = None

    def _loop_of(self, trainer: Any, pl_module: Any) -> FrameworkLoop:
        if self.loop is None:
            # Made with the first batch: the module is on its device by then.
            refused = _refusal_of(trainer)
            self.loop = FrameworkLoop(
                framework="lightning",
                model=pl_module,
                optimizers=trainer.optimizers,
                settings=self._settings,
                remedy=_OWN_BATCHES if refused else _REMEDY,
                notice=_module_of(trainer, "utilities.rank_zero").rank_zero_info,
                objects=partial(_logged_by, trainer),
                trial_scope=partial(_quiet_loggers, trainer),
                search_loss=partial(self._search_loss, trainer, pl_module),
                refused=refused,
            )
        return self.loop

    # Automatic optimization

    def _make_closure(
        self, trainer: Any, pl_module: Any, make: Callable[..., Any], kwargs: Any, *others: Any, **options: Any
    ) -> Any:
        """Makes the closure that computes a batch's gradient for the optimizer."""
        closure = make(kwargs, *others, **options)
        if closure._backward_fn is not None and "batch" in kwargs:
            step = _Closure(trainer, pl_module, self._loop_of(trainer, pl_module), closure, kwargs)
            closure._backward_fn = partial(self._backward, closure._backward_fn)
            closure.closure = partial(self._train, step, closure.closure)
        return closure

    def _train(self, step: _Closure, native: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
        """Computes a batch's gradient, in parts where it does not fit."""
        batch, *others = step.kwargs.values()
        self._others = tuple(others)
        loop = step.loop
        if isinstance(step.trainer.strategy.model, DistributedDataParallel) and not loop.refused:
            # Ranks need not have as many parts: the wrapped model sees one pass forward and one backward.
            with _replaced(step.module, "training_step", partial(step.inside_wrapper, step.module.training_step)):
                return native(*arguments, **options)
        with torch.enable_grad():
            return loop.step(batch, partial(native, *arguments, **options), partial(step.in_parts, batch))

    def _step_optimizer(self, native: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Steps the optimizer, whose own memory cannot be had by splitting a batch."""
        with fatal_out_of_memory(_optimizer_error):
            return native(*arguments, **options)

    def _backward(self, native: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Runs the backward pass of a whole batch, so that it can be undone."""
        self._backward_calls += 1
        with nullcontext() if self.loop is None else self.loop.gradients_aside():
            return native(*arguments, **options)

    # Manual optimization

    def _train_manually(self, trainer: Any, pl_module: Any, native: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a `training_step` that optimizes by hand, in parts where it does not fit."""
        batch, *others = arguments
        self._others, loop = tuple(others), self._loop_of(trainer, pl_module)
        calls, self._backward_calls = self._backward_calls, 0
        if not loop.refused and (reason := self._manual_refusal(trainer, pl_module, calls)):
            loop.refused, loop.remedy = reason, _OWN_BATCHES
        step = _ManualStep(trainer, pl_module, native, tuple(others))
        return loop.step(batch, partial(native, *arguments), partial(step.in_parts, loop, batch))

    def _manual_refusal(self, trainer: Any, pl_module: Any, calls: int) -> str:
        """Returns why the batches of a module are not split, as a clause; `calls` of the step before are known."""
        if len(trainer.optimizers) > 1:
            return f"its training_step has {len(trainer.optimizers)} optimizers"
        if calls > 1:
            return f"its training_step calls manual_backward {calls} times"
        if trainer.strategy.model is not pl_module:
            return "its training_step calls manual_backward in a pass that waits for other ranks"
        return ""

    # Evaluation

    def _evaluate(self, trainer: Any, pl_module: Any, name: str, native: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a step of validation, test or prediction, in parts where it does not fit."""
        batch, *others = arguments
        loop = self._loop_of(trainer, pl_module)
        context = getattr(trainer.precision_plugin, _CONTEXTS[name])

        def in_parts() -> Any:
            calls = _Calls(pl_module)

            def compute(part: Part) -> Any:
                # Not through a wrapped model, whose passes wait for those of other ranks.
                with context(), calls.of(part):
                    return getattr(pl_module, name)(part.batch, *others)

            parts = loop.evaluate_parts(batch, compute)
            weights = {part.start: part.share for part, _ in parts}
            calls.write(weights)
            return combine_outputs([output for _, output in parts], [part for part, _ in parts], weights)

        return loop.step(batch, partial(native, *arguments), in_parts, trains=False)

    # Search

    def _search_loss(self, trainer: Any, pl_module: Any) -> tuple[nn.Module, Callable[[Any], Tensor]]:
        """Copies the module without its trainer, and returns the copy with a function that computes a loss with it."""
        with ExitStack() as stack:
            for module in pl_module.modules():
                if "_trainer" in vars(module):
                    stack.enter_context(_replaced(module, "_trainer", None))
            model = deepcopy(pl_module)
        model.log = model.log_dict = lambda *arguments, **options: None
        losses: list[Tensor] = []

        def manual_backward(loss: Tensor, *arguments: Any, **options: Any) -> None:
            losses.append(loss)
            raise _PartComputedError

        model.manual_backward = manual_backward

        def loss_of(batch: Any) -> Tensor:
            losses.clear()
            with trainer.precision_plugin.train_step_context(), suppress(_PartComputedError):
                losses.append(_loss_in(model.training_step(batch, *self._others), model.device)[0])
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
_OWN_BATCHES: Final = (
    "Cut its batches with MicroBatcher (docs/python.md), take smaller ones, or recompute activations "
    "(torch.utils.checkpoint)"
)
_STEPPED: Final = "an optimizer has stepped"
_SHARDED: Final = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


def _module_of(trainer: Any, name: str) -> Any:
    """Imports a module of the Lightning that a trainer is of."""
    return import_module(f"{type(trainer).__module__.partition('.trainer')[0]}.{name}")


def _refusal_of(trainer: Any) -> str:
    """Returns why the batches of a trainer are not split, as a clause; empty where they are."""
    if type(trainer.strategy).__name__ in _SHARDED:
        return f"each pass of a {type(trainer.strategy).__name__} waits for those of other ranks"
    loaders = getattr(getattr(trainer.fit_loop, "_combined_loader", None), "flattened", ())  # None before training
    if len(loaders) > 1:
        return f"its rows come from {len(loaders)} loaders"
    return ""


def _logged_by(trainer: Any) -> Iterator[Any]:
    """Yields the objects in which a trainer keeps the values that steps have logged."""
    if (results := trainer._results) is not None:
        yield results
        yield from results.values()


@contextmanager
def _quiet_loggers(trainer: Any) -> Iterator[None]:
    """Keeps the loggers of a trainer from what a trial logs to them by itself."""
    dummy = _module_of(trainer, "loggers.logger").DummyLogger
    with _replaced(trainer, "_loggers", [dummy() for _ in trainer.loggers]):
        yield


def _scale_of(precision: Any, divisor: int = 1) -> Callable[[Tensor], Tensor]:
    """Returns the function that is applied to a loss before its backward pass."""
    scaler = getattr(precision, "scaler", None)
    scale = (lambda loss: loss) if scaler is None else scaler.scale
    return scale if divisor == 1 else lambda loss: scale(loss / divisor)


def _take_gradients(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor | None]]:
    """Takes the gradients of parameters away, and returns them."""
    taken = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in taken:
        parameter.grad = None
    return taken


def _put_gradients(gradients: Iterable[tuple[nn.Parameter, Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


class _Touched(torch.autograd.Function):
    """Returns a loss whose backward pass gives every parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        """Returns the loss."""
        ctx.shapes = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns zeros, each of one number that is seen as many."""
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.shapes)
        return None, *zeros


class _Closure:
    """A step of automatic optimization, as it is computed in parts."""

    def __init__(self, trainer: Any, module: Any, loop: FrameworkLoop, closure: Any, kwargs: Mapping[str, Any]) -> None:
        self.trainer, self.module, self.loop, self.kwargs = trainer, module, loop, kwargs
        self._closure, self._clear = closure, closure._zero_grad_fn
        self._cleared: list[tuple[nn.Parameter, Tensor | None]] | None = None  # Gradients once they were cleared
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] | None = None  # Of the batch
        if self._clear is not None:
            closure._zero_grad_fn = self._clear_once

    def _clear_once(self) -> None:
        """Clears gradients as the trainer does. The hooks of it run once, though the step is undone."""
        if self._cleared is None:
            self._clear()
            self._cleared = [(parameter, parameter.grad) for parameter in self.loop.state.parameters]
        else:
            _put_gradients(self._cleared)

    def in_parts(self, batch: Any) -> Any:
        """Computes the batch in parts, and calls the hooks of the backward pass once, with its whole gradient."""
        if self._clear is not None:
            self._clear_once()
        call = _module_of(self.trainer, "trainer.call")._call_strategy_hook

        def run(part: Part) -> Any:
            arguments = {**self.kwargs, "batch": part.batch}
            return call(self.trainer, "training_step", *arguments.values())

        output = self._compute(batch, run)
        results = self.trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls
        result = results.from_training_step_output(output, self.trainer.accumulate_grad_batches)
        if result.closure_loss is not None:
            with _replaced(self.module, "backward", self._install):
                self._closure._backward_fn(result.closure_loss)
        return result

    def inside_wrapper(self, native: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """Computes the batch in parts within the one pass of a wrapped model, in place of the module's step."""
        native_backward = self.module.backward

        def backward(loss: Tensor, *arguments: Any, **options: Any) -> None:
            if self._gradients is not None:
                self._install()
            # The wrapper averages `.grad` once each parameter has had a gradient, here of zeros.
            native_backward(loss, *arguments, **options)

        def in_parts() -> Any:
            with torch.autocast(self.loop.meter.device.type, enabled=False):
                output = self._compute(batch, lambda part: self._native_step(native, part, others))
            self.module.backward = backward
            return output

        return self.loop.step(batch, partial(native, batch, *others), in_parts, tries_whole=False)

    def _native_step(self, native: Callable[..., Any], part: Part, others: Sequence[Any]) -> Any:
        with self.trainer.precision_plugin.train_step_context():
            return native(part.batch, *others)

    def _compute(self, batch: Any, run: Callable[[Part], Any]) -> Any:
        """Computes the gradient of the batch in parts and keeps it; returns the output of the whole batch."""
        module, calls, outputs, loop = self.module, _Calls(self.module), dict[int, Any](), self.loop
        scale = _scale_of(self.trainer.precision_plugin, self.trainer.accumulate_grad_batches)
        parts = dict[int, Part]()

        def loss_of(part: Part) -> tuple[Tensor, float | None]:
            with calls.of(part):
                output = run(part)
            loss, denominator = _loss_in(output, loop.meter.device)
            if part.is_trial:
                return loss, denominator
            outputs[part.start], parts[part.start] = _detached(output), replace(part, batch=None)
            if _has_own_backward(module) and loss.requires_grad:
                module.backward(scale(loss * loop.share_of(part, denominator)))
                loss = loss.detach()
            return loss, denominator

        earlier = _take_gradients(module.parameters())
        try:
            mean, weights = loop.run_parts(batch, loss_of, scale=scale)
            self._gradients = _take_gradients(module.parameters())
        finally:
            _put_gradients(earlier)
        with _replaced(module, "_current_fx_name", "training_step"):
            calls.write(weights)
        output = combine_outputs([outputs[start] for start in weights], [parts[start] for start in weights], weights)
        if output is None:
            return None
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        loss = _Touched.apply(mean, *trained)  # type: ignore[no-untyped-call]
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _install(self, *arguments: Any, **options: Any) -> None:
        """Adds the gradient of the batch to the gradients that are there, as a backward pass does."""
        earlier = _take_gradients(self.module.parameters())
        _put_gradients(self._gradients or ())
        self._gradients = None
        add_to_gradients(earlier)


def _optimizer_error(error: BaseException) -> DoesNotFitError:
    message = str(error).partition("\n")[0]
    return DoesNotFitError("The optimizer's step must fit beside weights and gradients",
                           value=f"the device said: {message}", remedy=f"{LESS[0].upper()}{LESS[1:]}")  # fmt: skip


def _has_own_backward(module: Any) -> bool:
    # Not the class imported above: the module may be of the other Lightning.
    base = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    return type(module).backward is not vars(base)["backward"]


class _PartComputedError(BaseException):
    """Ends a `training_step` whose gradient is there, or whose loss is all that is wanted. No `except Exception` of the
    user's step may catch it.
    """


class _ManualStep:
    """A step of manual optimization, as it is computed in parts: up to its backward pass for each part, and to its end
    for the last part.
    """

    def __init__(self, trainer: Any, module: Any, native: Callable[..., Any], others: tuple[Any, ...]) -> None:
        self._trainer, self._module, self._native, self._others = trainer, module, native, others
        self._earlier: list[tuple[nn.Parameter, Tensor | None]] = []  # Gradients that the batch began with
        self._losses: dict[int, Tensor] = {}  # Weighted losses of parts, by their first samples
        self._total: tuple[Tensor, Tensor] | None = None  # Loss of the last part, and of the batch

    def in_parts(self, loop: FrameworkLoop, batch: Any) -> Any:
        """Computes the batch in parts; returns the output of the last one, with the loss of the batch."""
        calls, output = _Calls(self._module), None
        self._earlier = _take_gradients(self._module.parameters())

        def loss_of(part: Part) -> tuple[Tensor, None]:
            nonlocal output
            # The step itself clears gradients of earlier batches, or keeps them.
            _put_gradients(self._earlier)
            backward = _ManualBackward(self, loop, part)
            replaced = _replaced(self._module, "manual_backward", backward)
            fatal = fatal_out_of_memory(lambda error: self._after_step(loop, error))
            with suppress(_PartComputedError), calls.of(part), replaced, fatal:
                output = self._native(part.batch, *self._others)
            return backward.loss, None

        try:
            _, weights = loop.run_parts(batch, loss_of)
        except SplitRefusedError:
            _put_gradients(self._earlier)
            raise
        calls.write(weights, self._total)
        return _with_total(output, self._total)

    def run_backward(self, loop: FrameworkLoop, part: Part, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Runs the backward pass of a part. Hooks run in the last one, with the loss and gradient of the batch."""
        precision, module = self._trainer.precision_plugin, self._module
        kept = _take_gradients(module.parameters())  # As the step has left the gradients of earlier batches
        weighted = loss * loop.share_of(part, None)
        self._losses = {start: earlier for start, earlier in self._losses.items() if start < part.start}
        self._losses[part.start] = weighted.detach()
        total = torch.stack(list(self._losses.values())).sum()
        if part.is_last:
            precision.pre_backward(total, module)
        precision.backward(_scale_of(precision)(weighted), module, None, *arguments, **options)
        if not part.is_last:
            raise _PartComputedError
        assert loop.engine is not None, "a batch was split"
        loop.engine.batcher.merge_gradients()
        add_to_gradients(kept)
        self._total = (loss.detach(), total)
        precision.post_backward(total, module)

    def _after_step(self, loop: FrameworkLoop, error: BaseException) -> DoesNotFitError | None:
        """Makes the error of memory that ran out once gradients were used: before, the part is undone and split."""
        message = str(error).partition("\n")[0]
        failed = DoesNotFitError("Memory ran out after an optimizer's step, which cannot be undone",
                                 value=f"the device said: {message}", remedy=_OWN_BATCHES)  # fmt: skip
        return failed if loop.not_undone else None


class _ManualBackward:
    """Stands for `manual_backward` while a part is computed."""

    def __init__(self, step: _ManualStep, loop: FrameworkLoop, part: Part) -> None:
        self._step, self._loop, self._part = step, loop, part
        self._calls = 0
        self.loss = torch.zeros(())

    def __call__(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        self._calls += 1
        if self._calls > 1:
            fact = "training_step calls manual_backward more than once, and its batch does not fit at once"
            raise CanTrainError(fact, remedy=_OWN_BATCHES)
        if self._part.is_trial:
            self.loss = loss
            raise _PartComputedError
        self.loss = loss.detach()
        self._step.run_backward(self._loop, self._part, loss, *arguments, **options)


_MISSING: Final = object()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an object for the block."""
    earlier = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if earlier is not _MISSING:
            setattr(owner, name, earlier)
        elif name in vars(owner):
            delattr(owner, name)


_Logged = tuple[Part, Any, tuple[Any, ...], dict[str, Any]]  # Of a call of `log`: part, value, arguments, options


class _Calls:
    """Values that the parts of a batch log: the whole batch logs each once."""

    def __init__(self, pl_module: Any) -> None:
        self._module = pl_module
        self._logged: dict[int, list[tuple[str, _Logged]]] = {}
        self._metrics: dict[int, dict[str, Any]] = {}  # States that metrics began the batch with

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Opens the span of a part; of a trial nothing is logged."""
        calls: list[tuple[str, _Logged]] = []
        if not part.is_trial:
            self._logged[part.start] = calls
        if not self._metrics:
            metrics = [module for module in self._module.modules() if hasattr(module, "_reductions")]
            self._metrics = {id(metric): _states_of(metric) for metric in metrics}

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            calls.append((name, (part, value.detach() if isinstance(value, Tensor) else value, arguments, options)))

        with _replaced(self._module, "log", log):
            yield

    def write(self, weights: Mapping[int, float], total: tuple[Tensor, Tensor] | None = None) -> None:
        """Logs the parts' values once. `weights` are those of the parts, by their first samples; `total` is the loss of
        the last part, and of the batch, where a step goes on after its backward pass for the last part alone.
        """
        by_name = defaultdict[str, list[tuple[float, _Logged]]](list)
        for start, weight in weights.items():
            for name, logged in self._logged[start]:
                by_name[name].append((weight, logged))
        for name, entries in by_name.items():
            _, (_, value, arguments, options) = entries[-1]
            if len(entries) < len(weights):
                value = _with_total(value, total)
            elif len(weights) > 1:
                value = self._of_batch(entries, options)
            if options.get("batch_size"):
                options = {**options, "batch_size": sum(logged[3]["batch_size"] for _, logged in entries)}
            self._module.log(name, value, *arguments, **options)

    def _of_batch(self, entries: Sequence[tuple[float, _Logged]], options: Mapping[str, Any]) -> Any:
        values, sizes = [logged[1] for _, logged in entries], [_size(logged[0]) for _, logged in entries]
        if isinstance(values[-1], Tensor | float | int):
            return _reduced(options.get("reduce_fx", "mean"), values, [weight for weight, _ in entries], sizes)
        if id(values[-1]) in self._metrics:
            _set_batch_value(values[-1], self._metrics[id(values[-1])])
        return values[-1]


def _size(part: Part) -> int:
    return part.stop - part.start


def _states_of(metric: Any) -> dict[str, Any]:
    """Copies the states of one of torchmetrics' metrics."""
    states = {name: getattr(metric, name) for name in metric._reductions}
    return {name: list(value) if isinstance(value, list) else value.clone() for name, value in states.items()}


def _set_batch_value(metric: Any, before: Mapping[str, Any]) -> None:
    """Gives a metric, whose last value is that of the last part, the value of the whole batch, where its states add up
    or are lists.
    """
    if metric._forward_cache is None:
        return
    batch = deepcopy(metric)
    for name, reduction in metric._reductions.items():
        state = getattr(metric, name)
        if isinstance(state, list):
            setattr(batch, name, state[len(before[name]) :])
        elif getattr(reduction, "__name__", "") == "dim_zero_sum":
            setattr(batch, name, state - before[name])
        else:
            return
    batch._computed, batch._to_sync, batch._update_count = None, False, 1
    metric._forward_cache = batch.compute()


def _reduced(how: Any, values: Sequence[Any], weights: Sequence[float], sizes: Sequence[int]) -> Any:
    """Combines the values of a batch's parts, as Lightning's `reduce_fx` says, else their mean."""
    name = getattr(how, "__name__", how)
    if name == "sum" and not isinstance(values[0], Tensor) and len(set(values)) == 1 and list(values) != list(sizes):
        # A number that no part's samples change, such as a count of steps.
        return values[0]
    if name in ("sum", "min", "max"):
        return getattr(torch.stack([torch.as_tensor(value) for value in values]), name)()
    return weighted_mean(values, weights)


def _with_total(value: Any, total: tuple[Tensor, Tensor] | None) -> Any:
    """Replaces the loss of the last part by the loss of the batch."""
    if isinstance(value, Mapping):
        return {name: _with_total(entry, total) for name, entry in value.items()}
    if total is None or not isinstance(value, Tensor) or value.shape != total[0].shape:
        return value
    return total[1] if torch.equal(value.detach(), total[0]) else value


def _loss_in(output: Any, device: torch.device) -> tuple[Tensor, float | None]:
    """Returns the loss in the output of a `training_step`, and its denominator; None skips the part."""
    if output is None:
        return torch.zeros((), device=device), None
    if not isinstance(output, Mapping):
        return output, None
    denominator = output.get("denominator")
    return output["loss"], None if denominator is None else float(denominator)


def _detached(output: Any) -> Any:
    if isinstance(output, Mapping):
        return {name: _detached(value) for name, value in output.items()}
    return output.detach() if isinstance(output, Tensor) else output


class MemoryMonitorCallback(_Callback):  # type: ignore[misc]  # depends on the installed Lightning
    """Measures peak memory in a Lightning training: `Trainer(callbacks=[MemoryMonitorCallback()])`.

    After each measured batch and at the end it logs `peak_memory_pct`, the largest peak so far as a share of the
    capacity, and `batch_size_safety_factor` where one is given. On a GPU validation between batches counts too.

    Args:
        interval: Batches from one measured batch to the next.
        warmup: Batches before the first measured one; in a shorter training the last one is measured.
        device: `auto` (the trainer's), `cpu`, `cuda[:i]` or `sim:<size>`.
        safety_factor: The share of the limit that batches were chosen by.

    Attributes:
        monitor: Has the peaks, during training and after it; None before.

    Raises:
        CanTrainError: Lightning is not installed.
    """

    def __init__(
        self, interval: int = INTERVAL, warmup: int = WARMUP, device: str = "auto", safety_factor: float | None = None
    ) -> None:
        _check_installed("MemoryMonitorCallback", "MemoryMonitor")
        super().__init__()
        self.monitor: MemoryMonitor | None = None
        self._interval, self._warmup = interval, warmup
        self._device, self._safety_factor = device, safety_factor
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
