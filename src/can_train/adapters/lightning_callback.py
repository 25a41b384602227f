"""Lightning callbacks: one that makes batches fit, and one that measures peak memory. can-train itself needs neither
`lightning` nor `pytorch_lightning`.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import partial, wraps
from importlib import import_module
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from can_train.adapters.framework_loop import (
    LESS,
    FrameworkLoop,
    LoopSettings,
    Part,
    SplitRefusedError,
)
from can_train.adapters.part_values import ROW, Combination, Kinds, whole_and_parts
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
        self._backward_calls = 0  # Backward passes of the whole step that ran last
        self._manual_step: _ManualStep | None = None  # The step that runs now

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
        if "batch" not in kwargs:
            closure.closure = torch.enable_grad()(fatal_out_of_memory(_fetching_error)(closure.closure))
        elif closure._backward_fn is not None:
            step = _Closure(trainer, pl_module, self._loop_of(trainer, pl_module), closure, kwargs)
            # A closure that refers to itself would keep its batch until garbage is collected.
            closure.closure = partial(self._train, step, ref(closure))
        return closure

    def _train(self, step: _Closure, closure: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
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
            with _replaced(step.module, "training_step", inside), _replaced(step.precision, "backward", backward):
                return native(*arguments, **options)
        with torch.enable_grad():
            return loop.step(batch, partial(native, *arguments, **options), partial(step.in_parts, batch))

    def _step_optimizer(self, native: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Steps the optimizer, whose own memory cannot be had by splitting a batch."""
        with fatal_out_of_memory(_optimizer_error):
            return native(*arguments, **options)

    def _before_backward(self, trainer: Any, native: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls the hooks before a backward pass; those of callbacks once a batch, though the step is undone."""
        loop = self.loop
        if loop is None or loop.in_whole:
            self._backward_calls += 1
            return native(*arguments, **options)
        with _replaced(trainer, "callbacks", []) if self._backward_calls else nullcontext():
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
            loop.refused, loop.remedy = reason, _OWN_BATCHES
        step = _ManualStep(trainer, pl_module, native, tuple(others))
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
            calls = _Calls(pl_module, loop.kinds)

            def compute(part: Part) -> Any:
                # Not through a wrapped model, whose passes wait for those of other ranks.
                with context(), calls.of(part):
                    return getattr(pl_module, name)(part.batch, *others)

            parts = loop.evaluate_parts(batch, compute)
            weights = {part.start: part.share for part, _ in parts}
            calls.write(weights)
            combination = Combination([_size(part) for part, _ in parts], list(weights.values()))
            return combination.combine([output for _, output in parts])

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
_OWN_GRADIENT: Final = "its training_step computes its gradient without one manual_backward"
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
    """Yields the objects in which a trainer keeps the values that steps have logged, and counts steps."""
    if (results := trainer._results) is not None:
        yield results
        yield from results.values()
    loop = trainer.fit_loop.epoch_loop
    counted = loop.automatic_optimization.optim_progress.optimizer.zero_grad
    for progress in (counted, loop.manual_optimization.optim_step_progress):
        yield from (progress.total, progress.current)


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
        self.precision = trainer.precision_plugin
        self._backward, self._clear = closure._backward_fn, closure._zero_grad_fn
        self._is_cleared = self._is_kept = False  # Whether gradients were cleared, and whether that is not undone
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] | None = None  # Of the batch
        if self._clear is not None:
            closure._zero_grad_fn = self._clear_once

    def begin(self) -> None:
        """Begins the step, or, with some optimizers, another computation of it."""
        self._is_cleared = self._is_kept = False

    def _clear_once(self) -> None:
        """Clears gradients as the trainer does; callbacks see it once, though the step is undone."""
        if self._is_kept:
            return
        with _replaced(self.trainer, "callbacks", []) if self._is_cleared else nullcontext():
            self._clear()
        self._is_cleared = True
        # What is undone of the step is what follows.
        self.loop.state.read_gradients()

    def _clear_for_parts(self) -> None:
        """Clears gradients before the first part, so that they take no memory beside it."""
        if self._clear is not None:
            self._clear_once()
            self._is_kept = True
            self.loop.state.read_attributes()

    def in_parts(self, batch: Any) -> Any:
        """Computes the batch in parts, and calls the hooks of the backward pass once, with its whole gradient."""
        self._clear_for_parts()
        call = _module_of(self.trainer, "trainer.call")._call_strategy_hook

        def run(part: Part) -> Any:
            arguments = {**self.kwargs, "batch": part.batch}
            return call(self.trainer, "training_step", *arguments.values())

        output = self._compute(batch, run)
        result = self._results.from_training_step_output(output, self.trainer.accumulate_grad_batches)
        if result.closure_loss is not None:
            with _replaced(self.precision, "backward", self._install):
                self._backward(result.closure_loss)
        return result

    @property
    def _results(self) -> Any:
        return self.trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls

    def inside_wrapper(self, native: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """Computes the batch in parts within the one pass of a wrapped model, in place of the module's step."""

        def in_parts() -> Any:
            with torch.autocast(self.loop.meter.device.type, enabled=False):
                return self._compute(batch, lambda part: self._native_step(native, part, others))

        return self.loop.step(batch, partial(native, batch, *others), in_parts, tries_whole=False)

    def backward_of_wrapper(self, native: Callable[..., Any], loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Runs the one backward pass of a wrapped model. It averages `.grad` once each parameter has had a gradient, in
        parts of zeros.
        """
        if self._gradients is not None:
            self._install()
            loss.backward()
        else:
            native(loss, *arguments, **options)

    def _native_step(self, native: Callable[..., Any], part: Part, others: Sequence[Any]) -> Any:
        with self.trainer.precision_plugin.train_step_context():
            return native(part.batch, *others)

    def _compute(self, batch: Any, run: Callable[[Part], Any]) -> Any:
        """Computes the gradient of the batch in parts and keeps it; returns the output of the whole batch."""
        module, loop, calls = self.module, self.loop, _Calls(self.module, self.loop.kinds)
        outputs = _Outputs(loop.kinds)
        scale = _scale_of(self.trainer.precision_plugin, self.trainer.accumulate_grad_batches)
        invalid: list[Exception] = []

        def loss_of(part: Part) -> tuple[Tensor, float | None]:
            with calls.of(part):
                output = run(part)
            try:
                self._results.from_training_step_output(output)
            except Exception as error:  # noqa: BLE001 - raised again, in the words of Lightning
                invalid.append(error)
                raise SplitRefusedError from None
            loss, denominator = _loss_in(output, loop.meter.device)
            outputs.add(part, _detached(output))
            if part.is_trial:
                return loss, denominator
            if _has_own_backward(module) and loss.requires_grad:
                module.backward(scale(loss * loop.share_of(part, denominator)))
                loss = loss.detach()
            return loss, denominator

        earlier = _take_gradients(module.parameters())
        try:
            mean, weights = loop.run_parts(batch, loss_of, scale=scale)
            self._gradients = _take_gradients(module.parameters())
        except SplitRefusedError:
            if invalid:
                raise invalid[0] from None
            raise
        finally:
            _put_gradients(earlier)
        with _replaced(module, "_current_fx_name", "training_step"):
            calls.write(weights)
        output = outputs.joined(weights)
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


class _Outputs:
    """The outputs of the parts of a batch."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._by_start: dict[int, tuple[int, Any]] = {}  # Samples and output of a part, by its first sample
        self._trials: dict[tuple[int, int], Any] = {}

    def add(self, part: Part, output: Any) -> None:
        """Adds the output of a part, or of a trial."""
        if part.is_trial:
            self._trials[part.start, part.stop] = output
            _learn(self._kinds, (_OUTPUT,), self._trials)
        else:
            self._by_start[part.start] = _size(part), output

    def joined(self, weights: Mapping[int, float]) -> Any:
        """Returns the output of the whole batch; `weights` are those of the parts, by their first samples."""
        sizes, outputs = zip(*(self._by_start[start] for start in weights), strict=True)
        return Combination(sizes, list(weights.values()), self._kinds).combine(outputs, (_OUTPUT,))


_OUTPUT: Final = "output"


def _learn(kinds: Kinds, place: tuple[Any, ...], trials: Mapping[tuple[int, int], Any]) -> None:
    """Learns the kinds of values of trials, by the samples that they were computed of."""
    if spans := whole_and_parts(trials):
        whole, *parts = (trials[span] for span in spans)
        kinds.learn(place, whole, parts, [stop - start for start, stop in spans[1:]])


def _fetching_error(error: BaseException) -> DoesNotFitError:
    message = str(error).partition("\n")[0]
    return DoesNotFitError("Memory ran out for a batch that is not split: its training_step fetches it by itself",
                           value=f"the device said: {message}", remedy=_OWN_BATCHES)  # fmt: skip


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
        self._computes: FrameworkLoop | None = None  # Whose part is computed, up to its backward pass

    def check_gradient(self) -> None:
        """Checks before an optimizer steps that the gradient is the batch's."""
        if self._computes is not None:
            loop, self._computes = self._computes, None
            raise loop.refuse(_OWN_GRADIENT, _OWN_BATCHES)

    def in_parts(self, loop: FrameworkLoop, batch: Any) -> Any:
        """Computes the batch in parts; returns the output of the last one, with the loss of the batch."""
        calls, output = _Calls(self._module, loop.kinds), None
        self._earlier = _take_gradients(self._module.parameters())

        def loss_of(part: Part) -> tuple[Tensor, None]:
            nonlocal output
            # The step itself clears gradients of earlier batches, or keeps them.
            _put_gradients(self._earlier)
            backward = _ManualBackward(self, loop, part)
            replaced = _replaced_method(self._module, "manual_backward", backward)
            fatal = fatal_out_of_memory(lambda error: self._after_step(loop, error))
            self._computes = loop
            with suppress(_PartComputedError), calls.of(part), replaced, fatal, self._checked_steps():
                output = self._native(part.batch, *self._others)
            if self._computes is not None and not backward.calls and self._has_gradient():
                self.check_gradient()
            return backward.loss, None

        try:
            _, weights = loop.run_parts(batch, loss_of)
        except SplitRefusedError:
            _put_gradients(self._earlier)
            raise
        finally:
            self._computes = None
        names = calls.write(weights, self._total)
        output = _with_total(output, self._total)
        if len(weights) > 1:
            self._warn_of(names, output, loop)
        return output

    def _warn_of(self, names: list[str], output: Any, loop: FrameworkLoop) -> None:
        """Warns once of values that are those of the last part."""
        total = None if self._total is None else self._total[1]
        if isinstance(output, Mapping):
            names = [*names, *(str(name) for name, value in output.items() if value is not total)]
        if names and _OUTPUT not in loop.told:
            loop.told.add(_OUTPUT)
            warnings.warn(
                f"Of a batch that is split in manual optimization, training_step ends for its last part alone: "
                f"the values {', '.join(names)} are of that part. Compute them before manual_backward.", stacklevel=2,
            )  # fmt: skip

    @contextmanager
    def _checked_steps(self) -> Iterator[None]:
        """Checks the gradient before the trainer's optimizers step, those that Lightning has not wrapped, too."""

        def check(optimizer: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
            # A closure may compute the gradient.
            if not arguments and options.get("closure") is None:
                self.check_gradient()

        with ExitStack() as stack:
            for optimizer in self._trainer.optimizers:
                stack.callback(optimizer.register_step_pre_hook(check).remove)
            yield

    def _has_gradient(self) -> bool:
        """Tells whether a part has computed gradients, or changed parameters, by other means."""
        before = {id(parameter): gradient for parameter, gradient in self._earlier}
        return any(parameter.grad is not None and parameter.grad is not before.get(id(parameter))
                   for parameter in self._module.parameters())  # fmt: skip

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
        self._total, self._computes = (loss.detach(), total), None
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
        self.calls = 0
        self.loss = torch.zeros(())

    def __call__(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        self.calls += 1
        if self.calls > 1:
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


@contextmanager
def _replaced_method(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of one object for the block, in its class: the object can be copied and pickled meanwhile."""
    native = getattr(type(owner), name)

    @wraps(native)
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return value(*arguments, **options) if self is owner else native(self, *arguments, **options)

    with _replaced(type(owner), name, method):
        yield


_Logged = tuple[Part, Any, tuple[Any, ...], dict[str, Any]]  # Of a call of `log`: part, value, arguments, options


class _Calls:
    """Values that the parts of a batch log: the whole batch logs each once."""

    def __init__(self, pl_module: Any, kinds: Kinds) -> None:
        self._module, self._kinds = pl_module, kinds
        self._logged: dict[int, list[tuple[str, _Logged]]] = {}
        self._trials: dict[tuple[int, int], list[tuple[str, _Logged]]] = {}
        self._metrics: dict[int, dict[str, Any]] = {}  # States that metrics began the batch with
        self._first_counts: list[int] = []  # Updates of the metrics before the batch
        self._last_counts: list[int] = []  # The same before the last part
        self._sizes: dict[int, int] = {}  # Samples of the parts, by their first samples
        self._rows: dict[int, list[tuple[int, dict[str, Any], tuple[Any, ...], dict[str, Any]]]] = {}  # For loggers

    def _all_metrics(self) -> list[Any]:
        return [module for module in self._module.modules() if hasattr(module, "_reductions")]

    def _update_counts(self) -> list[int]:
        return [metric._update_count for metric in self._all_metrics()]

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Opens the span of a part; of a trial nothing is logged."""
        calls: list[tuple[str, _Logged]] = []
        if part.is_trial:
            self._trials[part.start, part.stop] = calls
        else:
            self._logged[part.start] = calls
        if not self._metrics:
            self._metrics = {id(metric): _states_of(metric) for metric in self._all_metrics()}
            self._first_counts = self._update_counts()
        if not part.is_trial:
            self._last_counts = self._update_counts()
            self._rows[part.start], self._sizes[part.start] = [], _size(part)

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            calls.append((name, (part, value.detach() if isinstance(value, Tensor) else value, arguments, options)))

        with ExitStack() as stack:
            stack.enter_context(_replaced_method(self._module, "log", log))
            for number, logger in enumerate(self._module.trainer.loggers):
                stack.enter_context(_replaced(logger, "log_metrics", partial(self._log_metrics, part, number)))
            yield
        if part.is_trial:
            trials = {span: dict(_numbered(calls)) for span, calls in self._trials.items()}
            _learn(self._kinds, (_LOGGED,), trials)

    def _log_metrics(
        self, part: Part, number: int, metrics: Mapping[str, Any], *arguments: Any, **options: Any
    ) -> None:
        """Keeps the numbers that a step gives to a logger by itself."""
        if not part.is_trial:
            self._rows[part.start].append((number, dict(metrics), arguments, options))

    def write(self, weights: Mapping[int, float], total: tuple[Tensor, Tensor] | None = None) -> list[str]:
        """Logs the parts' values once. `weights` are those of the parts, by their first samples; `total` is the loss of
        the last part, and of the batch, where a step goes on after its backward pass for the last part alone. Returns
        the names of values that are of the last part.
        """
        partial_names = []
        by_call = defaultdict[tuple[str, int], list[tuple[float, _Logged]]](list)
        for start, weight in weights.items():
            for key, (_, logged) in zip(_keys(self._logged[start]), self._logged[start], strict=True):
                by_call[key].append((weight, logged))
        for key, entries in by_call.items():
            _, (_, value, arguments, options) = entries[-1]
            if len(entries) < len(weights):
                of_part, value = value, _with_total(value, total)
                if value is of_part and isinstance(value, Tensor):
                    partial_names.append(key[0])
            elif len(weights) > 1:
                value = self._of_batch(key, entries, options)
            if options.get("batch_size"):
                options = {**options, "batch_size": self._batch_size(entries, weights)}
            self._module.log(key[0], value, *arguments, **options)
        self._write_rows(weights)
        for metric, first, last in zip(self._all_metrics(), self._first_counts, self._last_counts, strict=True):
            # A batch is one update, in however many parts.
            metric._update_count -= last - first
        return partial_names

    def _batch_size(self, entries: Sequence[tuple[float, _Logged]], weights: Mapping[int, float]) -> Any:
        """Returns the `batch_size` of a value of the whole batch."""
        sizes = [logged[3]["batch_size"] for _, logged in entries]
        last = entries[-1][1]
        if len(entries) < len(weights) and last[3]["batch_size"] == _size(last[0]):
            return sum(self._sizes[start] for start in weights)
        return sum(sizes)

    def _write_rows(self, weights: Mapping[int, float]) -> None:
        """Gives the loggers what the parts have given to them, once."""
        of_parts = [self._rows[start] for start in weights]
        combination = Combination([self._sizes[start] for start in weights], list(weights.values()), self._kinds)
        for place, (number, metrics, arguments, options) in enumerate(of_parts[-1]):
            if all(len(rows) == len(of_parts[-1]) and rows[place][1].keys() == metrics.keys() for rows in of_parts):
                metrics = combination.combine([rows[place][1] for rows in of_parts], (ROW, place))
            self._module.trainer.loggers[number].log_metrics(metrics, *arguments, **options)

    def _of_batch(
        self, key: tuple[str, int], entries: Sequence[tuple[float, _Logged]], options: Mapping[str, Any]
    ) -> Any:
        values, sizes = [logged[1] for _, logged in entries], [_size(logged[0]) for _, logged in entries]
        if isinstance(values[-1], Tensor | float | int):
            combination = Combination(sizes, [weight for weight, _ in entries], self._kinds)
            return _reduced(options.get("reduce_fx", "mean"), values, combination, (_LOGGED, key))
        if id(values[-1]) in self._metrics:
            _set_batch_value(values[-1], self._metrics[id(values[-1])])
        return values[-1]


_LOGGED: Final = "logged"


def _keys(calls: Sequence[tuple[str, _Logged]]) -> list[tuple[str, int]]:
    """Returns the names of calls with the number of earlier calls of that name: a step may log a name twice."""
    names = [name for name, _ in calls]
    return [(name, names[:place].count(name)) for place, name in enumerate(names)]


def _numbered(calls: Sequence[tuple[str, _Logged]]) -> Iterator[tuple[tuple[str, int], Any]]:
    for key, (_, logged) in zip(_keys(calls), calls, strict=True):
        yield key, logged[1]


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


def _reduced(how: Any, values: Sequence[Any], combination: Combination, place: tuple[Any, ...]) -> Any:
    """Combines the values of a batch's parts, as Lightning's `reduce_fx` says, else their mean."""
    name, kind = getattr(how, "__name__", how), combination.kinds.by_place.get(place, "")
    if name == "sum":
        return combination.count(values, kind)
    if name in ("min", "max"):
        return getattr(torch.stack([torch.as_tensor(value) for value in values]), name)()
    return combination.mean(values, kind)


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
