"""The `Trainer` of transformers, with batches that are computed in parts that fit. can-train itself does not need
`transformers`.

Shapes: R samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from can_train.adapters.framework_loop import LOSS, FrameworkLoop, LoopSettings, Part
from can_train.errors import ArgumentError
from can_train.factors.observations import Outcome
from can_train.factors.observing import outcome_of
from can_train.fit.micro_batcher import Losses
from can_train.training.distributed import add_gradients

_LOG: Final = logging.getLogger("can_train")
_Trainer: Final[Any] = object  # The Trainer itself stands behind the mixin among the bases of a class
_IGNORED_LABEL: Final = -100  # Label that a loss leaves out, in PyTorch and transformers
_ROUND_OFF: Final = 1e-9  # Difference of two weights that is round-off
_MEASURED_SAMPLES: Final = (5, 8)  # Fewest and most samples that show how losses add up

# How the loss of a batch follows from its parts' losses: it is their sum, where each is divided by the number of items
# in the whole batch, or their mean over samples, over labels, or over all labels but the first one of each sample.
_SUM: Final = "sum"
_SAMPLES: Final = "samples"
_LABELS: Final = "labels"
_LATER_LABELS: Final = "labels but the first"


class MicroBatchTrainerMixin(_Trainer):  # type: ignore[misc]  # depends on the class that it is mixed into
    """Makes the batches of a training with transformers fit, in place of `auto_find_batch_size`:
    `class MicroBatchTrainer(MicroBatchTrainerMixin, Trainer): ...`.

    Each batch of the loader is computed in parts, where it must be, and the gradient is the whole batch's: nothing is
    started again, and the batch stays as it is. Limits are found with the first batch, in trial steps that leave
    nothing behind; a part that runs out of memory is undone and split; and an observation is recorded for the next
    run. Evaluation and prediction are split, too.

    Where a loss is divided by the Trainer's `num_items_in_batch`, the parts' losses add up to the batch's. Any other
    one is a mean over samples or over labels. Which of these it is is measured when a batch is split for the first
    time; a warning says where it is none of them.

    Args:
        loop_settings: Limits, key in the factor store, how batches are cut; None: the defaults of `LoopSettings`. All
            other arguments are the Trainer's.

    Attributes:
        loop: Computes the batches, during a training or an evaluation; None before and after.

    Raises:
        ArgumentError: A class has its bases in another order; when a training begins: something else changes batches,
            or spreads the model over devices.
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
        super().__init__(*arguments, **options)
        self.loop: FrameworkLoop | None = None
        self._loop_settings = loop_settings or LoopSettings()
        self._closing: Any = None  # Undoes changes after a training or an evaluation, while there is one
        self._ways: list[str] = []  # How losses of parts may make up their batch's loss, the likeliest first

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Trains as the Trainer does."""
        with self._open():
            self._ways.clear()
            return super().train(*arguments, **options)

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Evaluates or predicts as the Trainer does."""
        with self._open():
            return super().evaluation_loop(*arguments, **options)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Adds a batch's gradient to `.grad`, in parts that fit; returns its loss. Outside a training it computes the
        batch as the Trainer does.
        """
        step = super().training_step
        if self._closing is None:
            return step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]  # the Trainer's
        loop = self._loop()
        is_parallel = isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)
        # Ranks need not have as many parts, so that no pass may wait for other ranks.
        own_model = self.model if is_parallel else model
        own_model.train()
        items = self._items(inputs)

        def loss_of_few(rows: NDArray[np.int64]) -> Tensor:
            few = self._prepare_inputs(self._loop_settings.select(inputs, rows))
            with self.compute_loss_context_manager():
                loss: Tensor = self.compute_loss(own_model, few, num_items_in_batch=num_items_in_batch)
            return loss

        def loss_of(part: Part) -> tuple[Tensor, None]:
            weight = 1.0
            if part.share < 1.0 and not part.is_trial:
                self._find_way(items, part, loss_of_few)
                weight = items.weight(self._ways[0], part)
            with self._weighted_backward(weight):
                loss = step(own_model, part.batch, num_items_in_batch)
            # The mean of no labels is not a number.
            weighted = loss * weight if weight else torch.zeros_like(loss)
            return weighted / part.share, None

        if not self._ways:
            self._ways = [_SUM] * (num_items_in_batch is not None) + items.means
        loss: Tensor = loop.step(
            inputs,
            lambda: step(model, inputs, num_items_in_batch),
            lambda: loop.run_parts(inputs, loss_of)[0],
            tries_whole=not is_parallel,
        )
        if is_parallel and self.accelerator.sync_gradients:
            # As DistributedDataParallel averages them, once a batch.
            parameters = list(self.model.parameters())
            add_gradients(parameters, parameters[0].device)
            torch._foreach_div_([one.grad for one in parameters if one.grad is not None], float(dist.get_world_size()))
        return loss

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Returns the loss, the outputs and the labels of a batch, which are computed in parts that fit. Outside an
        evaluation it computes the batch as the Trainer does.
        """
        step = super().prediction_step
        if self._closing is None:
            return step(model, inputs, prediction_loss_only, ignore_keys)
        loop, arguments = self._loop(), (prediction_loss_only, ignore_keys)
        in_parts = partial(self._predict_parts, loop, inputs, lambda part: step(model, part.batch, *arguments))
        return loop.step(inputs, lambda: step(model, inputs, *arguments), in_parts, trains=False)

    def _predict_parts(self, loop: FrameworkLoop, inputs: Any, compute: Callable[[Part], Any]) -> Any:
        parts = loop.evaluate_parts(inputs, compute)
        if len(parts) == 1:
            return parts[0][1]
        items = self._items(inputs)
        # The Trainer counts the items of each part by itself, so that no sum is left.
        way = next(way for way in [*self._ways, *items.means] if way != _SUM)
        weighted = [(loss, items.weight(way, part)) for part, (loss, *_) in parts]
        loss = None if weighted[0][0] is None else sum(loss * weight for loss, weight in weighted if weight)
        # As the Trainer joins the outputs of batches.
        join = import_module("transformers.trainer_pt_utils").nested_concat
        of_parts = [[one[place] for _, one in parts] for place in (1, 2)]
        return (loss, *(None if outputs[0] is None else reduce(join, outputs) for outputs in of_parts))

    def _items(self, inputs: Any) -> _Items:
        # Trainers before transformers 5 do not tell: they look the model's class up in this list.
        named = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        is_causal = type(self.model).__name__ in named.values()
        return _Items(inputs, shifts_labels=getattr(self, "_loss_shifts_labels", is_causal))

    def _find_way(self, items: _Items, part: Part, loss_of: Callable[[NDArray[np.int64]], Tensor]) -> None:
        """Drops the ways that do not hold, where the weight of a part depends on the way."""
        weights = [items.weight(way, part) for way in self._ways]
        if max(weights) - min(weights) <= _ROUND_OFF:
            return
        engine = self._loop().engine
        assert engine is not None, "a batch was split"
        measure, few = engine.batcher.measure_dependence, len(items.few(part))
        found = {way: measure(items.losses(way, part, loss_of), (few,)) for way in self._ways}
        differences = {way: one.terms.get(LOSS, math.inf if one.means else 0.0) for way, one in found.items()}
        nearest = min(self._ways, key=differences.__getitem__)
        self._ways = [way for way in self._ways if differences[way] == 0.0] or [nearest]
        is_none = differences[nearest] and not found[nearest].modules
        found[nearest].warn(_NO_WAY.format(difference=differences[nearest]) if is_none else "")

    @contextmanager
    def _weighted_backward(self, weight: float) -> Iterator[None]:
        """Multiplies the loss that the Trainer runs backward with in the block."""
        own = self.accelerator.backward

        def backward(loss: Tensor, **options: Any) -> None:
            if weight:
                own(loss if weight == 1.0 else loss * weight, **options)

        self.accelerator.backward = backward
        try:
            yield
        finally:
            del self.accelerator.backward

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Closes the loop after a training, or after an evaluation that is not part of one."""
        if self._closing is not None:
            yield
            return
        _refuse_conflicts(self)
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
                self.loop = self._closing = None

    def _loop(self) -> FrameworkLoop:
        if self.loop is None:
            # Accelerate wraps the optimizer; an evaluation has none.
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            self.loop = loop = FrameworkLoop(
                framework="transformers",
                model=self.model,
                optimizers=[] if optimizer is None else [optimizer],
                settings=self._loop_settings,
                compares=False,
                notice=lambda text: _LOG.info("%s", text) if self.is_world_process_zero() else None,
            )
            if optimizer is not None:
                hook = optimizer.register_step_pre_hook(lambda *_: loop.before_optimizer_step())
                self._closing.callback(hook.remove)
        return self.loop


_NO_WAY: Final = (
    "The loss of a batch is neither the sum of its parts' losses nor their mean over samples or labels: micro-batches"
    " change its gradient by {difference:.1%}. Give the Trainer the sum over the batch, divided by its number of items:"
    " compute_loss_func=lambda outputs, labels, num_items_in_batch: total(outputs, labels) / num_items_in_batch"
)


class _Items:
    """The items that the loss of a batch may be the mean over: its labels or its samples."""

    def __init__(self, inputs: Any, *, shifts_labels: bool) -> None:
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        # Numbers are targets of a regression: each sample has as many.
        is_counted = isinstance(labels, Tensor) and not labels.is_floating_point()
        self._labels: Tensor = labels if is_counted else torch.tensor(0)  # type: ignore[assignment]
        self._counts: dict[str, NDArray[np.int64]] = {}  # Of each sample, [R], by way
        by_label = [_LABELS, _LATER_LABELS][: self._labels.dim()]
        # Kinds of means that the loss may be, the likeliest first.
        self.means = [*(reversed(by_label) if shifts_labels else by_label), _SAMPLES]

    def weight(self, way: str, part: Part) -> float:
        """Returns the weight of a part's loss in the batch's."""
        if way == _SUM:
            return 1.0
        counts = self._counted(way, part.samples)
        return float(counts[part.start : part.stop].sum() / counts.sum()) if counts.any() else part.share

    def few(self, part: Part) -> NDArray[np.int64]:
        """Chooses samples that have any labels, from those with the fewest to those with the most."""
        counts = self._counted(self.means[0], part.samples)
        order = np.argsort(counts, kind="stable")[np.count_nonzero(counts == 0) :]
        # Not many more than a part has: they must fit.
        size = min(max(part.stop - part.start, _MEASURED_SAMPLES[0]), _MEASURED_SAMPLES[1], len(order))
        return order[np.linspace(0, len(order) - 1, size).round().astype(np.int64)]

    def losses(
        self, way: str, part: Part, loss_of: Callable[[NDArray[np.int64]], Tensor]
    ) -> Callable[[int, int], Losses]:
        """Returns a function that computes the loss of `few` samples start:stop, as a sum with its denominator."""
        rows, counts = self.few(part), self._counted(way, part.samples)

        def losses(start: int, stop: int) -> Losses:
            items = 1.0 if way == _SUM else float(counts[rows[start:stop]].sum())
            return {LOSS: (loss_of(rows[start:stop]) * items, items)}

        return losses

    def _counted(self, way: str, samples: int) -> NDArray[np.int64]:
        if way not in self._counts:
            self._counts[way] = np.ones(samples, dtype=np.int64)
            if way != _SAMPLES and way in self.means:
                labels = self._labels if way == _LABELS else self._labels[:, 1:]
                self._counts[way] = labels.ne(_IGNORED_LABEL).reshape(samples, -1).sum(1).cpu().numpy()
        return self._counts[way]


def _refuse_conflicts(trainer: Any) -> None:
    """Raises ArgumentError where something else changes batches, or the model is not wholly on each device."""
    arguments, whole = trainer.args, "Keep the whole model on each GPU"
    launched = "Start one process a GPU (torchrun), or show one GPU (CUDA_VISIBLE_DEVICES=0)"
    conflicts = {
        "auto_find_batch_size=True": (arguments.auto_find_batch_size, "Leave it out: batches are made to fit"),
        f"n_gpu={arguments.n_gpu}, on which DataParallel spreads each batch": (arguments.n_gpu > 1, launched),
        "FSDP, in which each pass waits for those of other ranks": (
            trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled, f"{whole} (leave fsdp out)"),
        "DeepSpeed, which accumulates gradients by itself": (
            trainer.is_deepspeed_enabled, f"{whole} (leave deepspeed out)"),
        "parallelism_config, which spreads the model or its samples over GPUs": (
            getattr(trainer.accelerator, "parallelism_config", None) is not None, f"{whole} (leave it out)"),
        f"optim={str(arguments.optim)!r}, which steps in the midst of backward": (
            "lomo" in str(arguments.optim).lower(), "Choose an optimizer that steps after it, such as adamw_torch"),
    }  # fmt: skip
    for found, (is_found, remedy) in conflicts.items():
        if is_found:
            rule = "MicroBatchTrainerMixin computes the gradient of a loader's whole batch, in parts"
            raise ArgumentError(rule, value=found, remedy=remedy)
