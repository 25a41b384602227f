"""Lightning callbacks: one that makes batches fit, and one that measures peak memory. can-train itself needs neither
`lightning` nor `pytorch_lightning`.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from functools import partial, wraps
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from can_train.adapters.framework_loop import FrameworkLoop, LoopSettings, Part
from can_train.errors import ArgumentError, CanTrainError, DoesNotFitError
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

    Each batch of a loader is computed in parts, where it must be, and stepped once: the gradient is the whole batch's.
    Limits are found with the first batch, in trial steps that leave nothing behind; a part that runs out of memory is
    undone and split; and an observation is recorded for the next run. Validation, test and prediction are split,
    too, and values that a step logs are the whole batch's.

    A `training_step` that returns the mean over the batch's samples needs no change. One that returns a mean over
    something else (tokens, masked positions) returns their number beside it, `{"loss": loss, "denominator": tokens}`.
    In manual optimization a step that calls `manual_backward` once is split; one that calls it more often (a GAN) must
    fit, or cut its batches with `MicroBatcher`.

    Args:
        settings: Limits, key in the factor store, how batches are cut; None: the defaults of `LoopSettings`.

    Attributes:
        loop: Computes the batches, during a training; None before and after.

    Raises:
        CanTrainError: Lightning is not installed; when a training begins: something else changes its gradients.
    """

    def __init__(self, settings: LoopSettings | None = None) -> None:
        _check_installed("MicroBatchCallback", "MicroBatcher")
        super().__init__()
        self.loop: FrameworkLoop | None = None
        self._settings = settings or LoopSettings()
        self._steps = ExitStack()  # Gives the module its own steps back
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._stepped = False  # Whether gradients were used since the last batch began (manual optimization)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Takes the module's steps over."""
        steps: dict[str, Callable[..., Any]] = dict.fromkeys(_EVALUATIONS, self._evaluate)
        if stage == "fit":
            _refuse_conflicts(trainer, pl_module)
            automatic = pl_module.automatic_optimization
            steps["training_step"] = self._train if automatic else self._train_manually
            if automatic:
                steps["backward"] = self._backward
        for name, own in steps.items():
            replaced = getattr(pl_module, name)
            # Lightning asks the function that is wrapped for its arguments, and whether it is the module's own.
            step = wraps(replaced)(partial(own, trainer, pl_module, replaced))
            self._steps.enter_context(_replaced(pl_module, name, step))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Gives the module its steps back."""
        self._close("ok")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Makes room for the state that the optimizer makes in its first step."""
        self._stepped = True
        if self.loop is not None:
            self.loop.before_optimizer_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Records how the training ended. Lightning calls `teardown` only where there was no error."""
        self._close(outcome_of(exception))

    def _close(self, outcome: Outcome) -> None:
        self._steps.close()
        if self.loop is not None:
            self.loop.close(outcome)
        self.loop = None

    def _loop_of(self, trainer: Any, pl_module: Any) -> FrameworkLoop:
        if self.loop is None:
            package = type(trainer).__module__.partition(".trainer")[0]
            # Made with the first batch: the module is on its device by then.
            self.loop = FrameworkLoop(
                framework="lightning",
                model=pl_module,
                optimizers=trainer.optimizers,
                settings=self._settings,
                remedy_for_means=_MEANS,
                notice=import_module(f"{package}.utilities.rank_zero").rank_zero_info,
            )
        return self.loop

    def _train(self, trainer: Any, pl_module: Any, step: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """Computes a batch's gradient in place of `training_step`, and keeps it for `_backward`."""
        loop, calls, outputs = self._loop_of(trainer, pl_module), _Calls(pl_module), dict[int, Any]()
        precision, parameters = trainer.precision_plugin, list(pl_module.parameters())
        _clear_gradients(parameters)

        def loss_of(part: Part) -> tuple[Tensor, float | None]:
            with precision.train_step_context(), calls.of(part):
                output = step(part.batch, *others)
            loss, denominator = _loss_in(output, loop.meter.device)
            if not part.is_trial:
                outputs[part.start] = _detached(output)
            return loss, denominator

        # Lightning calls a step within autocast, and backward outside of it.
        with torch.autocast(loop.meter.device.type, enabled=False):
            mean, weights = loop.train(batch, loss_of, scale=_scale_of(precision))
        calls.write(weights)
        self._gradients = [(one, one.grad) for one in parameters if one.grad is not None]
        # Lightning clears gradients before it calls backward.
        _clear_gradients(parameters)
        output = _combined([outputs[start] for start in weights], [*weights.values()])
        if output is None:
            return None
        trained = [one for one in parameters if one.requires_grad]
        loss = _Touched.apply(mean, *trained)  # type: ignore[no-untyped-call]
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _backward(self, trainer: Any, pl_module: Any, backward: Callable[..., Any], loss: Tensor, *others: Any) -> None:
        """Puts a batch's gradient into place."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            # It averages `.grad` once each parameter has had a gradient, here of zeros.
            backward(loss, *others)

    def _train_manually(self, trainer: Any, pl_module: Any, step: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """Runs `training_step` up to its backward pass for each part, and to its end for the last one."""
        loop, calls, output = self._loop_of(trainer, pl_module), _Calls(pl_module), None
        if self._stepped:
            # The step itself clears gradients that were used, in the midst of a part.
            _clear_gradients(pl_module.parameters())
        self._stepped = False

        def loss_of(part: Part) -> tuple[Tensor, None]:
            nonlocal output
            backward = _ManualBackward(pl_module.manual_backward, part, loop.batcher.merge_gradients)
            replaced = _replaced(pl_module, "manual_backward", backward)
            with suppress(_PartComputedError), calls.of(part), replaced, fatal_out_of_memory(self._after_step):
                output = step(part.batch, *others)
            return backward.loss, None

        _, weights = loop.train(batch, loss_of)
        calls.write(weights)
        return output

    def _after_step(self, error: BaseException) -> DoesNotFitError | None:
        """Makes the error of memory that ran out once gradients were used: before, the part is undone and split."""
        message = str(error).partition("\n")[0]
        failed = DoesNotFitError("Memory ran out after an optimizer's step, which cannot be undone",
                                 value=f"the device said: {message}", remedy=_OWN_BATCHES)  # fmt: skip
        return failed if self._stepped else None

    def _evaluate(self, trainer: Any, pl_module: Any, step: Callable[..., Any], batch: Any, *others: Any) -> Any:
        """Runs a step of validation, test or prediction in parts."""
        loop, calls = self._loop_of(trainer, pl_module), _Calls(pl_module)

        def compute(part: Part) -> Any:
            with calls.of(part):
                return step(part.batch, *others)

        parts = loop.evaluate(batch, compute)
        calls.write({part.start: part.share for part, _ in parts})
        return _combined([output for _, output in parts], [part.share for part, _ in parts])


_EVALUATIONS: Final = ("validation_step", "test_step", "predict_step")
_MEANS: Final = (
    "Where the loss is a mean over something else than samples (tokens, masked positions), return its number, too: "
    'return {"loss": loss, "denominator": tokens}'
)
_OWN_BATCHES: Final = "Cut its batches with MicroBatcher (docs/python.md), or take smaller ones"


def _refuse_conflicts(trainer: Any, pl_module: Any) -> None:
    """Raises ArgumentError where something else cuts batches or changes gradients."""
    rule = "MicroBatchCallback computes the gradient of a loader's whole batch"
    schedulers = [one for one in trainer.callbacks if type(one).__name__ == "GradientAccumulationScheduler"]
    if trainer.accumulate_grad_batches != 1 or any(set(one.scheduling.values()) != {1} for one in schedulers):
        raise ArgumentError(
            rule, value=f"accumulate_grad_batches={trainer.accumulate_grad_batches}, a mean of means",
            remedy="Let the loader make the batch that you want, and leave accumulate_grad_batches out",
        )  # fmt: skip
    if type(trainer.strategy).__name__ in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
        found = f"{type(trainer.strategy).__name__}, in which each pass waits for those of other ranks"
        raise ArgumentError(rule, value=found, remedy='Keep the whole model on each rank (strategy="ddp")')
    # Not the class imported above: the module may be of the other Lightning.
    base = next(one for one in type(pl_module).__mro__ if one.__name__ == "LightningModule")
    if pl_module.automatic_optimization and type(pl_module).backward is not vars(base)["backward"]:
        found = f"a backward of its own in {type(pl_module).__name__}"
        raise ArgumentError(rule, value=found, remedy="Leave it out, or use manual optimization")


def _scale_of(precision: Any) -> Callable[[Tensor], Tensor]:
    scaler = getattr(precision, "scaler", None)
    return (lambda loss: loss) if scaler is None else scaler.scale


def _clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


class _Touched(torch.autograd.Function):
    """Returns a loss whose backward pass gives every parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        """Returns the loss."""
        ctx.shapes = [(one.shape, one.dtype, one.device) for one in parameters]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns zeros, each of one number that is seen as many."""
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.shapes)
        return None, *zeros


class _PartComputedError(Exception):
    """Ends a `training_step` whose gradient is there, or whose loss is all that is wanted."""


class _ManualBackward:
    """Stands for `manual_backward` while a part is computed; `merge` adds the gradients of earlier parts."""

    def __init__(self, backward: Callable[..., None], part: Part, merge: Callable[[], None]) -> None:
        self._backward, self._part, self._merge = backward, part, merge
        self._calls = 0
        self.loss = torch.zeros(())

    def __call__(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        part = self._part
        self._calls += 1
        if self._calls > 1:
            if part.share < 1.0:
                fact = "training_step calls manual_backward more than once, and its batch does not fit at once"
                raise CanTrainError(fact, remedy=_OWN_BATCHES)
            self._backward(loss, *arguments, **options)
            return
        if part.is_trial:
            self.loss = loss
            raise _PartComputedError
        self.loss = loss.detach()
        self._backward(loss * part.share if part.share < 1.0 else loss, *arguments, **options)
        if not part.is_last:
            raise _PartComputedError
        self._merge()


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an object for the block."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


class _Calls:
    """Values that the parts of a batch log, and their updates of metrics of torchmetrics: a part that is computed again
    leaves it once, and the whole batch logs a value once.
    """

    def __init__(self, pl_module: Any) -> None:
        self._module = pl_module
        self._metrics = [one for one in pl_module.modules() if hasattr(one, "metric_state")]
        self._logged: dict[int, list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]] = {}
        self._before: dict[int, list[dict[str, Any]]] = {}

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Opens the span of a part; of a trial nothing stays."""
        calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        before = [
            _copied({name: getattr(metric, name) for name in (*metric.metric_state, "_update_count", "_computed")})
            for metric in self._metrics
        ]
        if not part.is_trial:
            self._logged[part.start] = calls
            # As they were before a first try, which they may have counted wholly.
            self._restore(self._before.setdefault(part.start, before))

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            calls.append((name, value.detach() if isinstance(value, Tensor) else value, arguments, options))

        try:
            with _replaced(self._module, "log", log):
                yield
        finally:
            if part.is_trial:
                self._restore(before)

    def _restore(self, states: list[dict[str, Any]]) -> None:
        for metric, state in zip(self._metrics, states, strict=True):
            vars(metric).update(_copied(state))

    def write(self, weights: Mapping[int, float]) -> None:
        """Logs the parts' values once; `weights` are the parts', by their first samples."""
        by_name = defaultdict[str, list[tuple[float, Any, tuple[Any, ...], dict[str, Any]]]](list)
        for start, weight in weights.items():
            for name, value, arguments, options in self._logged[start]:
                by_name[name].append((weight, value, arguments, options))
        for name, found in by_name.items():
            _, value, arguments, options = found[-1]
            if len(found) > 1 and isinstance(value, Tensor | float | int):
                value = _reduced(options.get("reduce_fx", "mean"), [one[1] for one in found], [one[0] for one in found])
            if options.get("batch_size"):
                options = {**options, "batch_size": sum(one[3]["batch_size"] for one in found)}
            self._module.log(name, value, *arguments, **options)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one.clone() if isinstance(one, Tensor) else copy(one) for name, one in state.items()}


def _reduced(how: Any, values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Combines the values of a batch's parts, as Lightning's `reduce_fx` says, else their mean."""
    name = getattr(how, "__name__", how)
    if name in ("sum", "min", "max"):
        return getattr(torch.stack([torch.as_tensor(value) for value in values]), name)()
    return sum(value * (weight / sum(weights)) for value, weight in zip(values, weights, strict=True))


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
        return {name: _detached(one) for name, one in output.items()}
    return output.detach() if isinstance(output, Tensor) else output


def _combined(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """Combines the outputs of parts into the whole batch's: means of numbers, and rows one after the other."""
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return outputs[-1]
    if isinstance(first, Mapping):
        return {name: _combined([one[name] for one in outputs], weights) for name in first}
    if isinstance(first, tuple) or (isinstance(first, list) and any(isinstance(one, Tensor) for one in first)):
        return type(first)(_combined(list(members), weights) for members in zip(*outputs, strict=True))
    if isinstance(first, list):
        return [one for output in outputs for one in output]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(outputs))
    return _reduced("mean", outputs, weights) if isinstance(first, Tensor | float) else first


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
