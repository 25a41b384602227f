"""Gathers the numbers of a plan: the safety factor from the store, the tuned limit from trials on the device. The
decision itself is a pure function in `policy`.
"""

import copy
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import nn

from can_train.config.resolved import ResolvedRun
from can_train.engine.accumulate import Losses, accumulate_gradients
from can_train.engine.finder import find_max_size
from can_train.memory.meters import Meter
from can_train.policy.plan import Plan, PlanRequest, resolve_mode, resolve_plan, search_upper
from can_train.training import randomness
from can_train.training.loop import resident_tensors
from can_train.training.optimization import Optimization, Precision, make_optimization
from can_train.training.task import Task


def plan_request(run: ResolvedRun, *, factor: float, dataset_size: int) -> PlanRequest:
    """Writes down what a run asks of its plan."""
    training = run.training
    requested = training.batch_size * training.gradient_accumulation_steps
    return PlanRequest(
        mode=resolve_mode(training.find_batch_size, batch_size_given=training.batch_size > 0),
        requested_batch=requested or None,
        preset_batch=training.lr_batch_size,
        dataset_size=dataset_size,
        min_steps_per_epoch=training.min_steps_per_epoch,
        divisor=training.accumulation == "divisor",
        micro_batch_size=training.micro_batch_size,
        lr_scale=training.lr_scale,  # type: ignore[arg-type]  # checked against the same names by the settings
        factor=factor,
    )


def make_plan(request: PlanRequest, trial: Callable[[int], int], capacity_bytes: int) -> Plan:
    """Searches for the largest batch that fits where the plan depends on it, and resolves the plan.

    Args:
        request: What was asked for.
        trial: Runs a batch of some size; returns its peak in bytes.
        capacity_bytes: Of the device.

    Raises:
        DoesNotFitError: Not even one sample fits.
    """
    if not request.searches:
        return resolve_plan(request, tuned_limit=None)
    found = find_max_size(trial, upper=search_upper(request), capacity=capacity_bytes)
    return resolve_plan(request, tuned_limit=found.size)


class Trial:
    """The trial of the search: a few whole steps of a copy of the model on the costliest samples there are.

    Args:
        run: The resolved run.
        task: Whose samples.
        model: On the meter's device; left as it is.
        meter: Of the device.
    """

    def __init__(self, run: ResolvedRun, task: Task, model: nn.Module, meter: Meter) -> None:
        self._training = run.training
        self._task = task
        self._model = model
        self._meter = meter
        self._precision = Precision.named(run.training.precision)
        self._costliest = _costliest_first(task)

    def __call__(self, size: int) -> int:
        """Runs `size` samples as one micro-batch; returns the peak in bytes."""
        self._meter.release()
        self._meter.reset_peak()
        model = copy.deepcopy(self._model).train()
        optimization = make_optimization(model, self._training, lr=0.0, steps_per_epoch=1, device=self._meter.device)
        # More samples than there are: the costliest come again, so that the trial stays a worst case.
        rows = np.resize(self._costliest, size)
        for _ in range(self._training.find_batch_size_steps_per_trial):
            with self._meter.measuring(resident_tensors(model, optimization)):
                self._step(model, optimization, rows)
        return self._meter.peak_bytes()

    def _step(self, model: nn.Module, optimization: Optimization, rows: NDArray[np.int64]) -> None:
        device = self._meter.device
        generator = randomness.step_generator(seed=self._training.seed, step=0)
        batch = self._task.logical_batch(rows, device, self._precision.dtype, generator)

        def losses_of(start: int, stop: int) -> Losses:
            with self._precision.context(device):
                return batch.losses(model, start, stop)

        weights = self._task.loss_weights
        accumulate_gradients(losses_of, (len(rows),), batch.denominators, weights, optimization.scaler.scale)
        optimization.step()


def _costliest_first(task: Task) -> NDArray[np.int64]:
    """Orders the training samples by their share of the data set's features, all features counting the same."""
    features = task.batch_features(task.train_rows)
    shares = features / np.maximum(features.sum(axis=0), 1.0)
    return task.train_rows[np.argsort(-shares.sum(axis=1), kind="stable")]
