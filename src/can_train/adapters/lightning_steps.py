"""The steps of a Lightning training as they are computed in parts: with automatic and with manual optimization, and
with the values that they log.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from can_train.adapters.part_values import ROW, Combination, Kinds, Part, SplitRefusedError, whole_and_parts
from can_train.adapters.step_state import Attributes, replaced, replaced_method
from can_train.errors import DoesNotFitError
from can_train.fit.rescue import add_to_gradients, fatal_out_of_memory

if TYPE_CHECKING:
    from can_train.adapters.framework_loop import FrameworkLoop

_OUTPUT: Final = "output"
_LOGGED: Final = "logged"
_UPDATED: Final = "metric"  # First name of the places of values that metrics are given
OWN_BATCHES: Final = (
    "Cut its batches with MicroBatcher (docs/python.md), take smaller ones, or recompute activations "
    "(torch.utils.checkpoint)"
)

_RESET: Final = "reset"  # Function of a metric
_MANY: Final = object()  # In place of an argument of a metric that has many rows
_KEPT_NUMBERS: Final = 4096  # Numbers of the largest argument that is kept

STEPPED: Final = "an optimizer has stepped"

_OWN_GRADIENT: Final = "its training_step computes its gradient without one manual_backward"


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
    """Returns a loss whose backward pass gives parameters a gradient of zeros."""

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


class Closure:
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
        with replaced(self.trainer, "callbacks", []) if self._is_cleared else nullcontext():
            self._clear()
        self._is_cleared = True

    def _clear_for_parts(self) -> None:
        """Clears gradients before the first part, so that they take no memory beside it."""
        if self._clear is not None:
            self._clear_once()
            self._is_kept = True
            self.loop.state.read_gradients()
            self.loop.state.read_attributes()

    @torch.enable_grad()
    def in_parts(self, batch: Any) -> Any:
        """Computes the batch in parts, and calls the hooks of the backward pass once, with its whole gradient."""
        self._clear_for_parts()
        call = module_of(self.trainer, "trainer.call")._call_strategy_hook

        def run(part: Part) -> Any:
            arguments = {**self.kwargs, "batch": part.batch}
            return call(self.trainer, "training_step", *arguments.values())

        output = self._compute(batch, run)
        result = self._results.from_training_step_output(output, self.trainer.accumulate_grad_batches)
        if result.closure_loss is not None:
            with replaced(self.precision, "backward", self._install):
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
        module, loop, calls = self.module, self.loop, Calls(self.module, self.loop.kinds)
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
            loss, denominator = loss_in(output, loop.meter.device)
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
            with loop.joining():
                joined = outputs.joined(weights)
            self._gradients = _take_gradients(module.parameters())
        except SplitRefusedError:
            if invalid:
                raise invalid[0] from None
            raise
        finally:
            _put_gradients(earlier)
        with replaced(module, "_current_fx_name", "training_step"):
            calls.write(weights)
        if joined is None:
            return None
        touched = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if getattr(self.trainer.strategy.model, "find_unused_parameters", False):
            # DDP leaves a parameter without a gradient that no rank has used, and the optimizer does not move it.
            touched = [parameter for parameter, gradient in self._gradients if gradient is not None]
        loss = _Touched.apply(mean, *touched)  # type: ignore[no-untyped-call]
        return {**joined, "loss": loss} if isinstance(joined, Mapping) else loss

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
            learn_kinds(self._kinds, (_OUTPUT,), self._trials)
        else:
            self._by_start[part.start] = part_size(part), output

    def joined(self, weights: Mapping[int, float]) -> Any:
        """Returns the output of the whole batch; `weights` has the parts' weights, by their first samples."""
        sizes, outputs = zip(*(self._by_start[start] for start in weights), strict=True)
        return Combination(sizes, list(weights.values()), self._kinds).combine(outputs, (_OUTPUT,))


def learn_kinds(kinds: Kinds, place: tuple[Any, ...], trials: Mapping[tuple[int, int], Any]) -> None:
    """Learns the kinds of values of trials, by the samples that they were computed of."""
    if spans := whole_and_parts(trials):
        whole, *parts = (trials[span] for span in spans)
        kinds.learn(place, whole, parts, [stop - start for start, stop in spans[1:]])


def fetching_error(error: BaseException) -> DoesNotFitError:
    """Makes the error of memory that ran out in a step that fetches its batch by itself."""
    message = str(error).partition("\n")[0]
    return DoesNotFitError("Memory ran out for a batch that is not split: its training_step fetches it by itself",
                           value=f"the device said: {message}", remedy=OWN_BATCHES)  # fmt: skip


def _has_own_backward(module: Any) -> bool:
    # Not the class imported above: the module may be of the other Lightning.
    base = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    return type(module).backward is not vars(base)["backward"]


class PartComputedError(BaseException):
    """Ends a `training_step` whose gradient is there, or whose loss is all that is wanted. No `except Exception` of the
    user's step may catch it.
    """


class ManualStep:
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
            raise loop.refuse(_OWN_GRADIENT, OWN_BATCHES)

    def in_parts(self, loop: FrameworkLoop, batch: Any) -> Any:
        """Computes the batch in parts; returns the output of the last one, with the loss of the batch."""
        calls, output = Calls(self._module, loop.kinds), None
        self._earlier = _take_gradients(self._module.parameters())

        def loss_of(part: Part) -> tuple[Tensor, None]:
            nonlocal output
            # The step itself clears gradients of earlier batches, or keeps them.
            _put_gradients(self._earlier)
            backward = _ManualBackward(self, loop, part)
            stand_in = replaced_method(self._module, "manual_backward", backward)
            fatal = fatal_out_of_memory(lambda error: self._after_step(loop, error))
            self._computes = loop
            with calls.of(part), suppress(PartComputedError), stand_in, fatal, self._checked_steps():
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
        output = with_total(output, self._total)
        if len(weights) > 1:
            self._warn_of(names, output, loop)
        return output

    def _warn_of(self, names: list[str], output: Any, loop: FrameworkLoop) -> None:
        """Warns once of values that the last part alone has computed."""
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
            raise PartComputedError
        assert loop.engine is not None, "a batch was split"
        loop.engine.batcher.merge_gradients()
        add_to_gradients(kept)
        self._total, self._computes = (loss.detach(), total), None
        precision.post_backward(total, module)

    def _after_step(self, loop: FrameworkLoop, error: BaseException) -> DoesNotFitError | None:
        """Makes the error of memory that ran out once gradients were used: before, the part is undone and split."""
        message = str(error).partition("\n")[0]
        failed = DoesNotFitError("Memory ran out after an optimizer's step, which cannot be undone",
                                 value=f"the device said: {message}", remedy=OWN_BATCHES)  # fmt: skip
        return failed if loop.not_undone else None


class _ManualBackward:
    """Stands for `manual_backward` while a part is computed."""

    def __init__(self, step: ManualStep, loop: FrameworkLoop, part: Part) -> None:
        self._step, self._loop, self._part = step, loop, part
        self.calls = 0
        self.loss = torch.zeros(())

    def __call__(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        self.calls += 1
        if self.calls > 1:
            raise self._loop.refuse("its training_step calls manual_backward more than once", OWN_BATCHES)
        if self._part.is_trial:
            self.loss = loss
            raise PartComputedError
        self.loss = loss.detach()
        self._step.run_backward(self._loop, self._part, loss, *arguments, **options)


def loss_in(output: Any, device: torch.device) -> tuple[Tensor, float | None]:
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


def module_of(trainer: Any, name: str) -> Any:
    """Imports a module of the Lightning that a trainer is of."""
    return import_module(f"{type(trainer).__module__.partition('.trainer')[0]}.{name}")


def logged_by(trainer: Any, *, is_automatic: bool) -> Iterator[Any]:
    """Yields the objects in which a trainer keeps the values that steps have logged, and counts steps."""
    if (results := trainer._results) is not None:
        yield results
        yield from results.values()
    loop = trainer.fit_loop.epoch_loop
    if is_automatic:
        progress = loop.automatic_optimization.optim_progress.optimizer.zero_grad
    else:
        progress = loop.manual_optimization.optim_step_progress
        # The step itself steps them.
        yield from (config.scheduler for config in trainer.lr_scheduler_configs)
    yield from (progress.total, progress.current)


@contextmanager
def quiet_loggers(trainer: Any) -> Iterator[None]:
    """Keeps the loggers of a trainer from values that a trial logs to them directly."""
    dummy = module_of(trainer, "loggers.logger").DummyLogger
    with replaced(trainer, "_loggers", [dummy() for _ in trainer.loggers]):
        yield


_Logged = tuple[Part, Any, tuple[Any, ...], dict[str, Any]]  # Of a call of `log`: part, value, arguments, options


class Calls:
    """Values that the parts of a batch log: the whole batch logs each once."""

    def __init__(self, pl_module: Any, kinds: Kinds) -> None:
        self._module, self._kinds = pl_module, kinds
        self._logged: dict[int, list[tuple[str, _Logged]]] = {}
        self._trials: dict[tuple[int, int], list[tuple[str, _Logged]]] = {}
        self._metrics = _MetricUpdates(pl_module, kinds)
        self._sizes: dict[int, int] = {}  # Samples of the parts, by their first samples
        self._rows: dict[int, list[tuple[int, dict[str, Any], tuple[Any, ...], dict[str, Any]]]] = {}  # For loggers

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Opens the span of a part; of a trial nothing is logged."""
        calls: list[tuple[str, _Logged]] = []
        if part.is_trial:
            self._trials[part.start, part.stop] = calls
        else:
            self._logged[part.start] = calls
        if not part.is_trial:
            self._rows[part.start], self._sizes[part.start] = [], part_size(part)

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            calls.append((name, (part, _number_of(value), arguments, options)))

        with ExitStack() as stack:
            stack.enter_context(replaced_method(self._module, "log", log))
            stack.enter_context(self._metrics.of(part))
            for number, logger in enumerate(self._module.trainer.loggers):
                stack.enter_context(replaced(logger, "log_metrics", partial(self._log_metrics, part, number)))
            yield
        if part.is_trial:
            trials = {span: dict(_numbered(calls)) for span, calls in self._trials.items()}
            learn_kinds(self._kinds, (_LOGGED,), trials)

    def _log_metrics(
        self, part: Part, number: int, metrics: Mapping[str, Any], *arguments: Any, **options: Any
    ) -> None:
        """Keeps the numbers that a step gives to a logger by itself."""
        if not part.is_trial:
            self._rows[part.start].append((number, dict(metrics), arguments, options))

    def write(self, weights: Mapping[int, float], total: tuple[Tensor, Tensor] | None = None) -> list[str]:
        """Logs the parts' values once. `weights` has the parts' weights, by their first samples; `total` is the loss of
        the last part, and of the batch, where a step goes on after its backward pass for the last part alone. Returns
        the names of values that are of the last part.
        """
        partial_names = self._metrics.join(weights, self._sizes, total)
        by_call = defaultdict[tuple[str, int], list[tuple[float, _Logged]]](list)
        for start, weight in weights.items():
            for key, (_, logged) in zip(_keys(self._logged[start]), self._logged[start], strict=True):
                by_call[key].append((weight, logged))
        for key, entries in by_call.items():
            _, (_, value, arguments, options) = entries[-1]
            if len(entries) < len(weights):
                of_part, value = value, with_total(value, total)
                if value is of_part and isinstance(value, Tensor):
                    partial_names.append(key[0])
            elif len(weights) > 1:
                value = self._of_batch(key, entries, options)
            if options.get("batch_size"):
                options = {**options, "batch_size": self._batch_size(entries, weights)}
            self._module.log(key[0], value, *arguments, **options)
        self._write_rows(weights)
        self._metrics.count_once()
        return partial_names

    def _batch_size(self, entries: Sequence[tuple[float, _Logged]], weights: Mapping[int, float]) -> Any:
        """Returns the `batch_size` of a value of the whole batch."""
        sizes = [logged[3]["batch_size"] for _, logged in entries]
        last = entries[-1][1]
        if len(entries) < len(weights) and last[3]["batch_size"] == part_size(last[0]):
            return sum(self._sizes[start] for start in weights)
        return sum(sizes)

    def _write_rows(self, weights: Mapping[int, float]) -> None:
        """Writes each row of the parts to its logger once, with the values of the whole batch."""
        of_parts = [self._rows[start] for start in weights]
        combination = Combination([self._sizes[start] for start in weights], list(weights.values()), self._kinds)
        for place, (number, metrics, arguments, options) in enumerate(of_parts[-1]):
            if all(len(rows) == len(of_parts[-1]) and rows[place][1].keys() == metrics.keys() for rows in of_parts):
                metrics = combination.combine([rows[place][1] for rows in of_parts], (ROW, place))
            self._module.trainer.loggers[number].log_metrics(metrics, *arguments, **options)

    def _of_batch(
        self, key: tuple[str, int], entries: Sequence[tuple[float, _Logged]], options: Mapping[str, Any]
    ) -> Any:
        values, sizes = [logged[1] for _, logged in entries], [part_size(logged[0]) for _, logged in entries]
        if isinstance(values[-1], Tensor | float | int):
            combination = Combination(sizes, [weight for weight, _ in entries], self._kinds)
            return _reduced(options.get("reduce_fx", "mean"), values, combination, (_LOGGED, key))
        self._metrics.set_batch_value(values[-1])
        return values[-1]


def _keys(calls: Sequence[tuple[str, _Logged]]) -> list[tuple[str, int]]:
    """Returns the names of calls with the number of earlier calls of that name: a step may log a name twice."""
    names = [name for name, _ in calls]
    return [(name, names[:place].count(name)) for place, name in enumerate(names)]


def _numbered(calls: Sequence[tuple[str, _Logged]]) -> Iterator[tuple[tuple[str, int], Any]]:
    for key, (_, logged) in zip(_keys(calls), calls, strict=True):
        yield key, logged[1]


def part_size(part: Part) -> int:
    """Returns the number of samples of a part."""
    return part.stop - part.start


def _number_of(value: Any) -> Any:
    """Returns a value without its graph; NumPy's numbers behave as Python's do."""
    if isinstance(value, np.generic):
        return value.item()
    return value.detach() if isinstance(value, Tensor) else value


# A call of a metric: `forward`, `update` or `reset`, arguments, options.
_Update = tuple[str, tuple[Any, ...], dict[str, Any]]


class _MetricUpdates:
    """Updates of torchmetrics' metrics by the parts of a batch.

    A metric that is given rows, such as predictions and labels, is updated once a part: its states add up. One that is
    given numbers of the batch, such as the mean of its losses, is updated once, with the numbers of the whole batch.
    """

    def __init__(self, pl_module: nn.Module, kinds: Kinds) -> None:
        self._kinds = kinds
        named = pl_module.named_modules()
        self._metrics: dict[str, Any] = {name: module for name, module in named if hasattr(module, "_reductions")}
        # As metrics began the batch, and their states.
        self._before = {id(one): (Attributes(one), _states_of(one)) for one in self._metrics.values()}
        self._last_counts: dict[int, int] = {}  # Updates of the metrics before the last part
        self._by_start: dict[int, dict[str, list[_Update]]] = {}  # Of each part, by its first sample
        self._trials: dict[tuple[int, int], dict[str, list[_Update]]] = {}
        self._is_inside = False  # Whether a metric runs, which may update others
        self._joined: set[int] = set()  # Metrics that were updated as with the whole batch

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Opens the span of a part."""
        updates = defaultdict[str, list[_Update]](list)
        if part.is_trial:
            self._trials[part.start, part.stop] = updates
        else:
            self._by_start[part.start] = updates
            self._last_counts = {id(metric): metric._update_count for metric in self._metrics.values()}
        with ExitStack() as stack:
            for name, metric in self._metrics.items():
                for function in ("forward", _RESET):
                    noted = partial(self._note, updates[name], function, getattr(metric, function))
                    stack.enter_context(replaced_method(metric, function, noted))
                # Which torchmetrics wraps in each object.
                noted = partial(self._note, updates[name], "update", metric.update)
                stack.enter_context(replaced(metric, "update", noted))
            yield
        if part.is_trial and (spans := whole_and_parts(self._trials)):
            sizes = [stop - start for start, stop in spans[1:]]
            for name in self._metrics:
                whole, *parts = ([_numbers_in(update) for update in self._trials[span][name]] for span in spans)
                self._kinds.learn_entries((_UPDATED, *name.split(".")), whole, parts, sizes)

    def _note(
        self, updates: list[_Update], name: str, native: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        if self._is_inside:
            return native(*arguments, **options)
        self._is_inside = True
        try:
            result = native(*arguments, **options)
        finally:
            self._is_inside = False
        updates.append((name, tuple(map(_noted, arguments)), {key: _noted(value) for key, value in options.items()}))
        return result

    def join(
        self, weights: Mapping[int, float], sizes: Mapping[int, int], total: tuple[Tensor, Tensor] | None
    ) -> list[str]:
        """Updates metrics once that were given numbers of the batch. `weights` and `sizes` have the parts' weights and
        samples, by their first samples; for `total` see `Calls.write`. Returns the names of metrics that have the last
        part's numbers.
        """
        partial_names = []
        for name, metric in self._metrics.items() if len(weights) > 1 else ():
            of_parts = [self._by_start[start][name] for start in weights]
            last, place = of_parts[-1], (_UPDATED, *name.split("."))
            # The end of a manual step runs for the last part alone.
            common = len(last) if total is None else len(of_parts[0])
            if not any(of_parts):
                continue
            if not all(self._are_of_batch(updates, place) for updates in of_parts):
                partial_names += [name] if common < len(last) else []
                continue
            entries = [[_numbers_in(update) for update in updates[:common]] for updates in of_parts]
            if any(len({frozenset(one) for one in peers}) > 1 for peers in zip(*entries, strict=False)):
                # An argument is a number in some parts alone.
                continue
            combination = Combination([sizes[start] for start in weights], list(weights.values()), self._kinds)
            numbers = combination.entries(entries, place)
            if len(numbers) != common:
                # Each part has updates of its own samples.
                self._joined.add(id(metric))
                continue
            of_last = [_numbers_in(update) for update in last[common:]]
            numbers += (of_batch := [with_total(own, total) for own in of_last])
            if any(new[key] is value for new, own in zip(of_batch, of_last, strict=True) for key, value in own.items()):
                partial_names.append(name)
            self._update_again(metric, last, numbers)
        return partial_names

    def _are_of_batch(self, updates: Sequence[_Update], place: tuple[Any, ...]) -> bool:
        """Tells whether a metric was given numbers, and nothing that may have rows."""
        for position, update in enumerate(updates):
            name, arguments, options = update
            if name == _RESET:
                continue
            numbers = _numbers_in(update)
            constants = [value for value in (*arguments, *options.values()) if not _is_number(value)]
            if not numbers or not all(isinstance(value, bool | str | NoneType) for value in constants):
                return False
            for key, value in numbers.items():
                if isinstance(value, Tensor) and value.dim() and not self._kinds.is_of_batch((*place, position, key)):
                    return False
        return True

    def _update_again(self, metric: Any, updates: Sequence[_Update], numbers: Sequence[Mapping[Any, Any]]) -> None:
        """Updates a metric with the numbers of the whole batch, in place of its parts' updates."""
        for module in metric.modules():
            if id(module) in self._before:
                self._before[id(module)][0].restore()
                self._joined.add(id(module))
        for (name, arguments, options), own in zip(updates, numbers, strict=True):
            given = [own.get(position, value) for position, value in enumerate(arguments)]
            getattr(metric, name)(*given, **{key: own.get(key, value) for key, value in options.items()})

    def count_once(self) -> None:
        """Counts the updates of the batch's parts as one: a batch is one update, in however many parts."""
        for metric in self._metrics.values():
            if id(metric) not in self._joined:
                first = self._before[id(metric)][0].values["_update_count"]
                metric._update_count -= self._last_counts[id(metric)] - first

    def set_batch_value(self, metric: Any) -> None:
        """Gives a metric that is logged the value of the whole batch in place of the last part's, where its states add
        up or are lists.
        """
        if id(metric) not in self._before or id(metric) in self._joined or metric._forward_cache is None:
            return
        before, whole = self._before[id(metric)][1], Attributes(metric)
        states = {name: getattr(metric, name) for name in metric._reductions}
        sums = {name for name, reduction in metric._reductions.items()
                if getattr(reduction, "__name__", "") == "dim_zero_sum"}  # fmt: skip
        if not states or not all(name in sums or isinstance(state, list) for name, state in states.items()):
            return
        for name, state in states.items():
            setattr(metric, name, state[len(before[name]) :] if isinstance(state, list) else state - before[name])
        metric._computed, metric._to_sync, metric._update_count = None, False, 1
        of_batch = metric.compute()
        whole.restore()
        metric._forward_cache = of_batch


def _states_of(metric: Any) -> dict[str, Any]:
    """Copies the states of one of torchmetrics' metrics."""
    states = {name: getattr(metric, name) for name in metric._reductions}
    return {name: list(value) if isinstance(value, list) else value.clone() for name, value in states.items()}


def _noted(value: Any) -> Any:
    """Returns an argument of a metric without its graph. Rows of many samples are not kept, since few metrics do."""
    value = _number_of(value)
    return _MANY if isinstance(value, Tensor) and value.numel() > _KEPT_NUMBERS else value


def _numbers_in(update: _Update) -> dict[Any, Any]:
    """Returns the numbers and tensors among the arguments of a metric, by position or name."""
    _, arguments, options = update
    given: dict[Any, Any] = {**dict(enumerate(arguments)), **options}
    return {key: value for key, value in given.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor | int | float) and not isinstance(value, bool)


def _reduced(how: Any, values: Sequence[Any], combination: Combination, place: tuple[Any, ...]) -> Any:
    """Combines the values of a batch's parts by their kind; where it is not known, as Lightning's `reduce_fx` says."""
    name = getattr(how, "__name__", how)
    if name not in ("sum", "min", "max") or combination.kinds.by_place.get(place):
        return combination.number(values, place)
    if name == "sum":
        return combination.count(values)
    return getattr(torch.stack([torch.as_tensor(value) for value in values]), name)()


def with_total(value: Any, total: tuple[Tensor, Tensor] | None) -> Any:
    """Replaces the loss of the last part by the loss of the batch."""
    if isinstance(value, Mapping):
        return {name: with_total(entry, total) for name, entry in value.items()}
    if total is None or not isinstance(value, Tensor) or value.shape != total[0].shape:
        return value
    return total[1] if torch.equal(value.detach(), total[0]) else value
