"""The `Trainer` of transformers, with batches that are computed in parts where they do not fit. can-train itself does
not need `transformers`.

Shapes: R samples.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from importlib import import_module
from typing import Any, ClassVar, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from can_train.adapters.framework_loop import LOSS, FrameworkLoop, LoopSettings, sample_counts
from can_train.adapters.loss_ways import SUM, Comparison, ComparisonResult, Items, Numbers, Rows, Way
from can_train.adapters.part_values import Combination, Part, SplitRefusedError
from can_train.adapters.step_state import PartStates, StepState, replaced
from can_train.adapters.trainer_batches import (
    TrainerRows,
    modules_of,
    refuse_conflicts,
    remedy_of,
    remedy_of_sample,
    why_whole,
)
from can_train.adapters.trainer_state import (
    LogCall,
    collected_logs,
    gradient_numbers,
    join_metrics,
    joined_logs,
    learn_logs,
    metric_lengths,
    scale_gradients,
    undone,
    untraced,
    without_gathering,
)
from can_train.errors import ArgumentError, DoesNotFitError
from can_train.factors.observations import Outcome
from can_train.factors.observing import outcome_of
from can_train.fit.batch_dependence import OTHER_DRAWS, UNKNOWN, UNREPEATABLE, UNREPLACED, BatchDependence, Comparisons
from can_train.fit.collate import leaves, select_samples
from can_train.fit.packing import counts_of
from can_train.fit.pass_state import Generators
from can_train.fit.rescue import PartDoesNotFitError, fatal_out_of_memory
from can_train.memory.out_of_memory import CatchOutOfMemory, headline
from can_train.training.distributed import add_gradients

_LOG: Final = logging.getLogger("can_train")
_Trainer: Final[Any] = object  # The Trainer itself stands behind the mixin among the bases of a class

_TRAINER: Final = "transformers.trainer"  # Module of the Trainer
_LOSS: Final = "loss"
_SMALL_CHANGE: Final = 5e-4  # Relative change below which a percentage has no digit
_LABELS: Final = ("labels", "label")  # Names of labels in transformers and in sentence-transformers
_LEAST: Final = 2  # Fewest samples that are cut
_COUNT_ITEMS: Final = "_get_num_items_in_batch"  # The Trainer's function that counts the items of a batch
_MORE_ITEMS: Final = 2.0  # Factor of their number that shows whether a loss is divided by it
_SAME: Final = 1e-2  # Relative difference of two losses that is round-off, also in half precision
_FORWARD_SAMPLES: Final = 8  # Samples whose losses are compared where a single one fits in a whole step


class MicroBatchTrainerMixin(_Trainer):  # type: ignore[misc]  # depends on the class that it is mixed into
    """Makes the batches of a training with transformers fit, in place of `auto_find_batch_size`:
    `class MicroBatchTrainer(MicroBatchTrainerMixin, Trainer): ...`.

    The Trainer's own step runs as it is written. When memory runs out in it, the step is undone, and the batch is
    computed in parts, as later batches of its size are; the gradient is the whole batch's. Evaluation and prediction
    are split, too.

    How the losses of parts make up the loss of their batch is measured in some of the batches that are split: as
    their sum, where they are divided by the Trainer's `num_items_in_batch`, or as their mean over samples or labels. A
    batch whose samples depend on each other is not split; a warning says so.

    Args:
        loop_settings: Limits, key in the factor store, how batches are cut; None: the defaults of `LoopSettings`. All
            other arguments are the Trainer's.

    Attributes:
        loop: Computes the batches, during a training or an evaluation; None before and after.

    Raises:
        ArgumentError: A class has its bases in another order; when a training begins: something else changes batches,
            or limits are given for batches that cannot be split.
        DoesNotFitError: Memory ran out for a batch that cannot be split, or for a single sample.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(super(), "training_step"):
            raise ArgumentError(
                "MicroBatchTrainerMixin stands before a Trainer among the bases of a class",
                value=f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})",
                remedy=f"class {cls.__name__}(MicroBatchTrainerMixin, Trainer)",
            )

    def __init__(self, *arguments: Any, loop_settings: LoopSettings | None = None, **options: Any) -> None:
        # Before the Trainer, which takes its time.
        self._loop_settings = LoopSettings.given(loop_settings, f"{type(self).__name__}(..., loop_settings={{}})")
        super().__init__(*arguments, **options)
        self.loop: FrameworkLoop | None = None
        self._closing: Any = None  # Undoes changes after a training or an evaluation, while there is one
        self._kinds: dict[Any, _BatchKind] = {}
        self._rows = TrainerRows(self, sample_counts)
        self._whole_reason: str | None = None  # Why no batch is split, as a clause; None: not yet known
        self._remedies: dict[bool, str] = {}  # For batches that are not split, in training and in evaluation
        self._outputs: list[Any] = []  # Containers of an evaluation's outputs

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Trains as the Trainer does."""
        with self._open():
            self._kinds.clear()
            return super().train(*arguments, **options)

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Evaluates or predicts as the Trainer does. Outputs that no longer fit on the device move to the host."""
        with self._open(), self._movable_outputs(), fatal_out_of_memory(self._evaluation_error):
            return super().evaluation_loop(*arguments, **options)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs the Trainer's own step. Where memory runs out in it, and for batches of that size from then on, adds the
        batch's gradient to `.grad` in parts that fit; returns its loss.
        """
        step = super().training_step
        if self._closing is None:
            return step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]  # the Trainer's
        if self._whole_only():
            with fatal_out_of_memory(self._training_error):
                return step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        is_parallel = isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)
        # A rank that runs out of memory in mid-backward would leave the others waiting in DDP's hooks.
        own_model = self.model if is_parallel else model
        # A step may take entries out of its inputs.
        batch = copy(inputs) if isinstance(inputs, Mapping) else inputs

        total_items = _TotalItems(number=num_items_in_batch)

        def run(part: Any) -> Tensor:
            loss: Tensor = step(own_model, part, total_items())
            return loss

        loop, kind = self._loop(), self._kind(inputs, trains=True)
        if any(group.get("train_mode") is False for group in getattr(self.optimizer, "param_groups", ())):
            # A schedule-free optimizer changes the weights here, which a step that is undone must find changed.
            self.optimizer.train()
        loop.refused, loop.remedy = kind.refused, self._remedy(trains=True)
        in_parts = _TrainingParts(self, kind, batch, run, total_items)
        with self._remedied_samples(kind, trains=True):
            loss = loop.step(batch, lambda: self._whole(run, inputs), lambda: in_parts.compute(is_parallel=is_parallel))
        if is_parallel and self.accelerator.sync_gradients:
            # As DistributedDataParallel averages them, once a batch.
            parameters = list(self.model.parameters())
            add_gradients(parameters, parameters[0].device)
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            torch._foreach_div_(gradients, float(dist.get_world_size()))
        return loss

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Returns the loss, the outputs and the labels of a batch, which is computed in parts where it does not fit.
        Outside an evaluation it computes the batch as the Trainer does.
        """
        step = super().prediction_step
        if self._closing is None or self._whole_only():
            return step(model, inputs, prediction_loss_only, ignore_keys)

        def run(part: Any, loss_only: bool = prediction_loss_only) -> Any:
            return step(model, part, loss_only, ignore_keys)

        loop, kind = self._loop(), self._kind(inputs, trains=False)
        loop.refused, loop.remedy = kind.refused, self._remedy(trains=False)
        count, gather = getattr(self, _COUNT_ITEMS, None), self.accelerator.gather

        def counted() -> Any:
            """Counts the batch's items, and waits for the other ranks, which may have other parts."""
            with replaced(self.accelerator, "gather", gather):
                return None if count is None else count([inputs], self.args.device)

        total_items = _TotalItems(counted)
        in_parts = _EvaluationParts(self, kind, inputs, run, total_items)
        compute = partial(in_parts.compute, is_parallel=self.args.world_size > 1)
        once = nullcontext() if count is None else replaced(self, _COUNT_ITEMS, total_items)
        with self._remedied_samples(kind, trains=False), once:
            return loop.step(inputs, lambda: self._whole_evaluation(run, inputs), compute, trains=False)

    # The whole step

    def _whole(self, run: Callable[[Any], Tensor], inputs: Any) -> Tensor:
        """Runs the Trainer's step with all samples; where memory runs out, the Trainer is as it was."""
        loop = self._loop()
        backward = self.accelerator.backward

        def protected(loss: Tensor, **options: Any) -> None:
            with loop.gradients_aside():
                backward(loss, **options)

        with undone(self, only_out_of_memory=True), replaced(self.accelerator, "backward", protected):
            return run(inputs)

    def _whole_evaluation(self, run: Callable[[Any], Any], inputs: Any) -> Any:
        """Evaluates all samples at once; where memory runs out, outputs of earlier batches move to the host first."""
        if any(outputs.tensors is not None for outputs in self._outputs):
            with CatchOutOfMemory() as caught, undone(self, only_out_of_memory=True):
                return run(inputs)
            self._move_outputs()
            _LOG.info("Outputs of evaluated batches were moved to the host (%s).", caught.message)
        with undone(self, only_out_of_memory=True):
            return run(inputs)

    # Outputs of an evaluation

    @contextmanager
    def _movable_outputs(self) -> Iterator[None]:
        """Lets an evaluation keep its outputs so that they can move to the host when memory runs out, as
        `eval_accumulation_steps` moves them.
        """
        module = import_module(_TRAINER)
        container: Any = getattr(module, "EvalLoopContainer", None)
        if container is None:
            yield
            return
        trainer = self

        class MovableContainer(container):  # type: ignore[misc]  # depends on transformers
            is_moving = False

            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                trainer._outputs.append(self)

            def add(self, tensors: Any) -> None:
                with CatchOutOfMemory() as caught:
                    super().add(tensors)
                if caught.message:
                    trainer._move_outputs()
                    super().add(tensors)
                if self.is_moving:
                    self.to_cpu_and_numpy()

        # The Trainer's loop makes its containers by this name, and keeps them in local variables.
        with replaced(module, "EvalLoopContainer", MovableContainer):
            try:
                yield
            finally:
                self._outputs.clear()

    def _move_outputs(self) -> None:
        for container in self._outputs:
            container.is_moving = True
            container.to_cpu_and_numpy()
        if self.loop is not None:
            self.loop.meter.release()

    # Errors

    @contextmanager
    def _remedied_samples(self, kind: _BatchKind, *, trains: bool) -> Iterator[None]:
        """Adds remedies of the Trainer to the error of a single sample that does not fit. Batches of a kind that the
        loop refuses to split stay whole.
        """
        try:
            yield
        except PartDoesNotFitError as error:
            engine = self._loop().engine
            recomputes = engine is not None and bool(engine.batcher.ladder.rung.recompute)
            error.remedy = remedy_of_sample(self, error.remedy, trains=trains, recomputes=recomputes)
            raise
        finally:
            kind.refused = self._loop().refused

    def _training_error(self, error: BaseException) -> DoesNotFitError:
        rule = f"Memory ran out for a batch that is not split: {self._whole_only()}"
        return DoesNotFitError(rule, value=f"the device said: {headline(error)}", remedy=remedy_of(self))

    def _evaluation_error(self, error: BaseException) -> DoesNotFitError:
        size = f"per_device_eval_batch_size={max(self.args.per_device_eval_batch_size // 2, 1)}"
        remedy = size if self.args.eval_accumulation_steps else f"eval_accumulation_steps=1, {size}"
        return DoesNotFitError("Memory ran out between the batches of an evaluation, which keeps their outputs",
                               value=f"the device said: {headline(error)}",
                               remedy=f"Give the TrainingArguments {remedy}")  # fmt: skip

    # The loop

    def _kind(self, inputs: Any, *, trains: bool) -> _BatchKind:
        columns = tuple(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
        # sentence-transformers has a loss for each of its data sets.
        dataset = inputs.get("dataset_name") if isinstance(inputs, Mapping) else None
        kind = self._kinds.get((trains, columns, dataset))
        if kind is None:
            reason = "" if "position_ids" in columns else self._reason(inputs)
            kind = self._kinds[trains, columns, dataset] = _BatchKind(refused=reason)
        if "position_ids" in columns and (reason := self._reason(inputs)):
            # Only this batch: another one with the same columns may hold one sequence a row.
            return _BatchKind(refused=reason)
        if not trains and (trained := self._kinds.get((True, columns, dataset))) is not None:
            kind.refused = kind.refused or trained.refused
        return kind

    def _reason(self, inputs: Any) -> str:
        """Returns why rows are not samples; functions of the user's own may know samples in them."""
        return self._rows.reason(inputs) if self._loop_settings.select is select_samples else ""

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Closes the loop after a training, or after an evaluation that is not part of one."""
        if self._closing is not None:
            yield
            return
        refuse_conflicts(self)
        outcome: Outcome = "ok"
        with ExitStack() as self._closing:
            try:
                yield
            except BaseException as error:
                outcome = outcome_of(error)
                raise
            finally:
                if self.loop is not None:
                    self.loop.close(outcome)
                self.loop = self._closing = self._whole_reason = None
                self._remedies.clear()

    def _remedy(self, *, trains: bool) -> str:
        """Returns a sentence with all that makes a batch fit that is not split; it is made once."""
        if trains not in self._remedies:
            self._remedies[trains] = remedy_of(self, trains=trains)
        return self._remedies[trains]

    def _whole_only(self) -> str:
        """Returns why no batch is split, as a clause; empty: batches are split."""
        if self._whole_reason is None:
            self._whole_reason = why_whole(self)
        return self._whole_reason

    def _loop(self) -> FrameworkLoop:
        if self.loop is None:
            # Accelerate wraps the optimizer; an evaluation has none.
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            has_scaler = getattr(self.optimizer, "scaler", None) is not None
            losses = modules_of(getattr(self, "loss", None))
            settings = self._loop_settings
            samples_of = None
            if settings.select is select_samples:
                samples_of = self._rows.samples
                counts = self._rows.counts if settings.counts is sample_counts else settings.counts
                settings = replace(settings, select=self._rows.select, counts=counts)
            key = settings.key or f"transformers_{type(self.model).__name__}".lower()
            self.loop = loop = FrameworkLoop(
                framework="transformers",
                model=_trained_module(self.model, optimizer),
                optimizers=[] if optimizer is None else [optimizer],
                settings=replace(settings, key=key),
                samples_of=samples_of,
                notice=lambda text: _LOG.info("%s", text) if self.is_world_process_zero() else None,
                objects=lambda: losses,
                search_loss=self._search_loss,
                compares=False,
                # It puts the step that the optimizer had before back in its place.
                state_stays="accelerate's gradient scaler calls a step of its own" if has_scaler else "",
            )
            if optimizer is not None:
                hook = optimizer.register_step_pre_hook(lambda *_: loop.before_optimizer_step())
                self._closing.callback(hook.remove)
        return self.loop

    def _search_loss(self) -> tuple[nn.Module, Callable[[Any], Tensor]]:
        """Copies the model, and returns the copy with a function that computes the model's own loss with it."""
        is_own = self.compute_loss.__module__ == _TRAINER
        if not is_own or self.compute_loss_func is not None or self.label_smoother is not None:
            raise ArgumentError("The loss is computed by the Trainer, not by the model alone",
                                value=f"compute_loss of {type(self).__name__}")  # fmt: skip
        model = deepcopy(self.model)
        model.train()

        def loss_of(batch: Any) -> Tensor:
            with self.compute_loss_context_manager():
                outputs = model(**self._prepare_inputs(batch))
            loss: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
            return loss

        return model, loss_of


@dataclass
class _TotalItems:
    """The number of items in a batch and in those of the other ranks, which a loss may be divided by.

    Attributes:
        count: Counts them, when the Trainer asks for their number first; None: they are known.
        number: The number; None: not counted, or the Trainer gives none to the loss.
        factor: Factor of the number that the Trainer is told.
    """

    count: Callable[[], Any] | None = None
    number: Any = None
    factor: float = 1.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Returns the number of items in the whole batch, also for a part of it."""
        if self.count is not None:
            self.number, self.count = self.count(), None
        return self.number if self.number is None or self.factor == 1 else self.number * self.factor


@dataclass
class _BatchKind:
    """Batches with the same columns and the same loss: all of them are split in one way, or none is."""

    ways: list[Way] = field(default_factory=list)  # How losses of parts may make up their batch's, the likeliest first
    comparisons: Comparisons = field(default_factory=Comparisons)
    is_open: bool = True  # Whether later batches are compared; what cannot be measured in one is not tried again
    is_told: bool = False  # Whether a normalising layer was told
    draws: bool = False  # Whether random numbers were told
    refused: str = ""  # Why these batches are not split, as a clause


@dataclass
class _Parts:
    """Computes one batch in parts.

    Attributes:
        run: The Trainer's step.
        total_items: The number of items that losses are divided by, in the whole batch; it may have none.
        trains: Whether a gradient is computed.
    """

    trains: ClassVar = True
    trainer: Any
    kind: _BatchKind
    batch: Any
    run: Callable[..., Any]
    total_items: _TotalItems
    is_counted: bool = False  # Whether the comparisons know of the batch
    is_undecidable: bool = False  # Whether all ways hold for the samples that were compared
    states: PartStates | None = None  # Of the samples that were compared
    logs: dict[int, tuple[Part, list[LogCall]]] = field(default_factory=dict)  # Of each part, by its first sample

    @property
    def loop(self) -> FrameworkLoop:
        loop: FrameworkLoop = self.trainer.loop
        return loop

    @cached_property
    def items(self) -> Items:
        # Trainers before transformers 5 do not tell: they look the model's class up in this list.
        listed = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        is_causal = type(self.trainer.model).__name__ in listed.values()
        shifts = getattr(self.trainer, "_loss_shifts_labels", is_causal)
        names = [*(self.trainer.label_names or ()), *_LABELS]
        samples = len(counts_of(self.loop.settings.counts(self.batch))[1])
        return Items(self.batch, names, samples, shifts_labels=shifts)

    def weight(self, part: Part, largest: int) -> float:
        """Returns the weight of the loss of a part in the loss of the batch. Measures it in the first, second, fourth,
        eighth (and so on) batch that is split, and where ways that held are told apart by no batch before this one.

        Raises:
            SplitRefusedError: No way holds.
        """
        kind, rows = self.kind, slice(part.start, part.stop)
        is_sum = self.total_items.number is not None
        ways = kind.ways or [*([SUM] if is_sum else []), *self.items.means, SUM]
        kind.ways = list(dict.fromkeys(ways))
        is_due = not self.is_counted and kind.comparisons.is_due()
        self.is_counted = True
        # Until the first comparison nothing holds.
        is_undecided = not (is_due or self.is_undecidable or self.items.agree(kind.ways, rows))
        if kind.is_open and (is_due or is_undecided):
            with self.loop.noticing_rows(part.samples), self._gradients_on_host():
                self._settle(self._measured(largest), decides=is_undecided)
        return self.items.weight(kind.ways[0], rows)

    @contextmanager
    def _gradients_on_host(self) -> Iterator[None]:
        """Keeps the gradients of the part on the host, for trials that may need their memory."""
        kept = []
        for parameter in () if self.loop.may_have_room else self.loop.model.parameters():
            if parameter.grad is not None:
                with self.loop.meter.host():
                    kept.append((parameter, parameter.grad.to("cpu", copy=True)))
                parameter.grad = None
        yield
        # What a trial that ran out of memory has left.
        self.loop.meter.release()
        for parameter, gradient in kept:
            parameter.grad = gradient.to(parameter.device, copy=True)

    def _settle(self, result: ComparisonResult, *, decides: bool) -> None:
        kind = self.kind
        if not result.is_known and result.draws and self.trains:
            self.refuse(UNREPEATABLE)
        elif not result.is_known:
            kind.ways = [self._likeliest()]
            kind.is_open = False
            cause = UNREPLACED.unknown_because if result.draws else result.failure
            unknown = (
                f"{cause or UNKNOWN.unknown_because}: whether samples of a batch depend on each other is not known"
            )
            UNKNOWN.warn(f"{unknown}. {kind.ways[0].sentence}")
        elif result.ways:
            # A gradient of nothing but round-off adds up in each way.
            self.is_undecidable = len(result.ways) == len(kind.ways) > 1
            kind.ways = [result.ways[0]] if decides and not self.is_undecidable else list(result.ways)
            if result.draws and not kind.draws:
                kind.draws = True
                UNKNOWN.warn(OTHER_DRAWS)
            if result.through and not kind.is_told:
                kind.is_told = True
                # A part of one sample has no variance, and no gradient to compare.
                terms = {LOSS: result.difference} if math.isfinite(result.difference) else {}
                through = f"Samples depend on the rest of their batch through {', '.join(result.through)}"
                dependence = BatchDependence(terms=terms, modules=result.through, drops=False)
                dependence.warn("" if terms else f"{through}: micro-batches change the gradient")
        else:
            change = f"{result.difference:.1%}" if result.difference >= _SMALL_CHANGE else f"{result.difference:.1e}"
            self.refuse(f"cutting it changes its {result.of} by {change}")

    def _likeliest(self) -> Way:
        """Returns the likeliest way where no samples could be compared: one sample shows whether its loss is divided by
        the number of items in the batch.
        """
        ways = [way for way in self.kind.ways if not way.is_sum]
        if self.total_items.number is None or not ways:
            return self.kind.ways[0]
        seeds, losses = Generators(self.loop.meter.device), list[float]()
        try:
            with self.untraced():
                for factor in (1.0, _MORE_ITEMS):
                    seeds.restore()
                    with replaced(self.total_items, "factor", factor), collected_logs(self.trainer), CatchOutOfMemory():
                        losses.append(float(self._losses(self.items.telling(1))[0][0]))
        except Exception:  # noqa: BLE001 - a look at the loop must not end it
            losses.clear()
        if len(losses) < 2 or not losses[0]:
            return self.kind.ways[0]
        is_whole, is_part = (math.isclose(losses[1], losses[0] / factor, rel_tol=_SAME) for factor in (1, _MORE_ITEMS))
        if not is_whole and not is_part:
            self.refuse("its loss depends on num_items_in_batch, but is not divided by it")
        return ways[0] if is_whole else SUM

    def refuse(self, reason: str) -> None:
        """Ends the parts: batches of this kind are not split from now on."""
        self.kind.refused = self.loop.refused = reason
        of_all = reason.replace("cutting it ", "cutting one ").replace("its outputs", "their outputs")
        warnings.warn(f"Batches are not split: {of_all}. {self.loop.remedy}.", stacklevel=2)
        raise SplitRefusedError

    def _measured(self, largest: int) -> ComparisonResult:
        """Compares samples, computed whole and in two parts: all of the batch where memory never ran out, else no more
        than have fitted at once, or as fit without a backward pass, where only one has fitted.
        """
        try:
            for of, compute, most in self._computations(self.items.samples if self.loop.may_have_room else largest):
                rows = self.items.telling(most)
                while len(rows) > 1:
                    with CatchOutOfMemory():
                        return replace(self._compared(compute, rows, of == _LOSS), of=of)
                    self.loop.meter.release()
                    rows = self.items.telling(len(rows) // 2)
        except Exception as error:  # noqa: BLE001 - a look at the loop must not end it
            failure = f"A few samples could not be computed ({type(error).__name__}: {headline(error)})"
            return ComparisonResult(is_known=False, failure=failure)
        return ComparisonResult(is_known=False)

    def _computations(self, largest: int) -> Iterator[tuple[str, Callable[[Rows], Numbers], int]]:
        raise NotImplementedError

    def _losses(self, rows: Rows) -> Numbers:
        raise NotImplementedError

    def _compared(self, compute: Callable[[Rows], Numbers], rows: Rows, is_of_losses: bool) -> ComparisonResult:
        """Compares some samples, and leaves no trace."""
        loop = self.loop
        seeds, self.states = Generators(loop.meter.device), PartStates(loop.state, len(rows))
        logs: dict[tuple[int, int], list[LogCall]] = {}

        def computed(some: Rows) -> Numbers:
            """Computes some of the samples; records what a step keeps and logs of them."""
            assert self.states is not None, "they are made before"
            start = rows.tolist().index(int(some[0]))
            self.states.begin(start, metrics_too=False)
            with collected_logs(self.trainer) as logs[start, start + len(some)]:
                numbers = compute(some)
            self.states.end(start, start + len(some))
            return numbers

        comparison = Comparison(compute=computed, seeded=seeds.restore, model=self.trainer.model,
                                is_of_losses=is_of_losses, is_on_gpu=loop.meter.device.type == "cuda")  # fmt: skip
        loop.kinds.forget()
        with self.untraced():
            result = comparison.result(self.items, self.kind.ways, rows)
        self.states.learn(loop.kinds)
        spans = self.states.spans[1:]
        way = result.ways[0] if result.ways else None
        weights = [self.items.weight(way, rows[start:stop], rows) for start, stop in spans] if way else None
        loop.kinds.judge(None if way is None or way.is_sum else weights, is_random=not result.is_known)
        if spans:
            learn_logs(loop.kinds, [logs[span] for span in self.states.spans], [stop - start for start, stop in spans])
            loop.kinds.judge([self.items.weight(self._mean, rows[start:stop], rows) for start, stop in spans])
        return result

    @property
    def _mean(self) -> Way:
        """What a mean that a step logs is most probably taken over."""
        return next(way for way in (*self.kind.ways, *self.items.means) if not way.is_sum)

    @contextmanager
    def logging_apart(self, part: Part) -> Iterator[None]:
        """Opens the span of a part, whose logged values wait for those of the other parts."""
        with collected_logs(self.trainer) as logged, undone(self.trainer):
            yield
        self.logs[part.start] = part, logged

    def log_once(self, starts: Iterable[int]) -> None:
        """Logs the values of the whole batch; `starts` has the first samples of its parts."""
        parts, calls = zip(*(self.logs[start] for start in starts), strict=True)
        if not any(calls):
            return
        sizes = [part.stop - part.start for part in parts]
        weights = [self.items.weight(self._mean, slice(part.start, part.stop)) for part in parts]
        combination = Combination(sizes, weights if sum(weights) else sizes, self.loop.kinds)
        for arguments, options in joined_logs(calls, combination) if len(parts) > 1 else calls[0]:
            self.trainer.log(*arguments, **options)

    def alone(self, *, is_parallel: bool) -> AbstractContextManager[None]:
        """Opens the span of parts: where other ranks have other parts, nothing may wait for them."""
        size = f"per_device_{'train' if self.trains else 'eval'}_batch_size"
        return without_gathering(self.trainer.accelerator, size) if is_parallel else nullcontext()

    @contextmanager
    def untraced(self) -> Iterator[None]:
        """Opens the span of a trial: model, generators and Trainer are left as they were."""
        state = StepState(self.loop.model, self.loop.meter.device, self.loop.objects)
        state.read()
        try:
            with untraced(self.trainer):
                yield
        finally:
            state.restore()

    def selected(self, rows: Rows) -> Any:
        """Returns the batch of some samples."""
        return self.loop.settings.select(self.batch, rows)


class _TrainingParts(_Parts):
    """Computes the gradient of one batch in parts."""

    def compute(self, *, is_parallel: bool) -> Tensor:
        """Adds the gradient of the batch to `.grad`; returns its loss. `is_parallel`: other ranks have other parts."""
        metrics = getattr(self.trainer, "_metrics", None)
        before = metric_lengths(metrics)
        with undone(self.trainer), self.alone(is_parallel=is_parallel):
            loss, weights = self.loop.run_parts(self.batch, self._loss_of)
            self.log_once(weights)
        join_metrics(metrics, before, list(weights.values()))
        return loss

    def _loss_of(self, part: Part) -> tuple[Tensor, None]:
        with self.logging_apart(part):
            loss: Tensor = self.run(part.batch)
            if part.is_whole:
                return loss, None
            # Before the passes of a comparison change them, too.
            self.loop.check_parameters(part)
            weight = self.weight(part, largest=part.stop - part.start)
            if self.states is not None:
                self.loop.refuse_unless_made(self.states)
        scale_gradients(self.loop.model, weight)
        # The mean of no labels is not a number.
        weighted = loss * weight if weight else torch.zeros_like(loss)
        return weighted / part.share, None

    def _computations(self, largest: int) -> Iterator[tuple[str, Callable[[Rows], Numbers], int]]:
        yield "gradient", self._gradients, largest
        yield _LOSS, self._losses, _FORWARD_SAMPLES

    def _gradients(self, rows: Rows) -> Numbers:
        parameters = [parameter for parameter in self.loop.model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            parameter.grad = None
        self.run(self.selected(rows))
        with self.loop.meter.host():
            numbers = [gradient_numbers(parameter) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return numbers

    def _losses(self, rows: Rows) -> Numbers:
        parameters = [parameter for parameter in self.loop.model.parameters() if parameter.requires_grad]

        def backward(loss: Tensor, **options: Any) -> None:
            """Gives the parameters zeros, which take no memory: the step may look at its gradient."""
            for parameter in parameters:
                parameter.grad = parameter.new_zeros(()).expand(parameter.shape)

        try:
            with torch.no_grad(), replaced(self.trainer.accelerator, "backward", backward):
                return [np.array([float(self.run(self.selected(rows)))])]
        finally:
            for parameter in parameters:
                parameter.grad = None


class _EvaluationParts(_Parts):
    """Evaluates one batch in parts."""

    trains: ClassVar = False

    def compute(self, *, is_parallel: bool) -> Any:
        """Returns loss, outputs and labels of the batch. `is_parallel`: other ranks have other parts."""
        with undone(self.trainer), self.alone(is_parallel=is_parallel):
            parts = self.loop.evaluate_parts(self.batch, self._part)
            self.log_once(part.start for part, _ in parts)
            return parts[0][1] if len(parts) == 1 else self._joined(parts)

    def _part(self, part: Part) -> Any:
        with self.logging_apart(part):
            return self.run(part.batch)

    def _joined(self, parts: list[tuple[Part, Any]]) -> Any:
        if not self._has_rows(parts):
            self.refuse("its outputs have no row for each sample")
        loss = None
        if parts[0][1][0] is not None:
            largest = max(part.stop - part.start for part, _ in parts)
            weighted = [(mean, self.weight(part, largest)) for part, (mean, *_) in parts]
            loss = sum(mean * weight for mean, weight in weighted if weight)
        # As the Trainer joins the outputs of batches.
        join = import_module("transformers.trainer_pt_utils").nested_concat
        of_parts = [[results[place] for _, results in parts] for place in (1, 2)]
        return (loss, *(None if outputs[0] is None else reduce(join, outputs) for outputs in of_parts))

    def _has_rows(self, parts: list[tuple[Part, Any]]) -> bool:
        """Tells whether outputs of parts can be joined: they have a row for each sample, and nothing else grows."""
        sizes = [part.stop - part.start for part, _ in parts]
        shapes = [[leaf.shape for leaf in leaves(outputs[1:])] for _, outputs in parts]
        for size, of_part in zip(sizes, shapes, strict=True):
            if any(not shape or shape[0] != size for shape in of_part):
                return False
        if sizes[0] < _LEAST or not any(sizes[0] in shape[1:] for shape in shapes[0]):
            return True
        # Each sample may be compared with all others: one sample less shows it.
        with self.untraced():
            fewer = [leaf.shape for leaf in leaves(self.run(self.selected(np.arange(sizes[0] - 1)))[1:])]
        return [shape[1:] for shape in fewer] == [shape[1:] for shape in shapes[0]]

    def _computations(self, largest: int) -> Iterator[tuple[str, Callable[[Rows], Numbers], int]]:
        yield _LOSS, self._losses, max(largest, _LEAST)

    def _losses(self, rows: Rows) -> Numbers:
        loss, *_ = self.run(self.selected(rows), True)
        return [np.array([float(loss)])]


def _trained_module(model: nn.Module, optimizer: Any) -> nn.Module:
    """Returns a module with all parameters that are trained: a loss may have parameters, too."""
    inside = set(map(id, model.parameters()))
    groups = optimizer.param_groups if optimizer is not None else ()
    outside = [parameter for group in groups for parameter in group["params"] if id(parameter) not in inside]
    return nn.ModuleList([model, nn.ParameterList(outside)]) if outside else model
