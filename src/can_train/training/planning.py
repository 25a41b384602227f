"""Gathers the numbers of a plan: the safety factor from the store, the tuned limit from trials on the device. The decision
itself is a pure function in `policy`.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from can_train.config.resolved import ResolvedRun
from can_train.engine.accumulate import accumulate_gradients
from can_train.engine.finder import find_max_size
from can_train.memory.meters import Meter
from can_train.policy.plan import Plan, PlanRequest, resolve_mode, resolve_plan, search_upper
from can_train.reporter import Reporter
from can_train.training import randomness
from can_train.training.loop import resident_tensors
from can_train.training.optimization import Precision, make_optimization
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


def make_plan(run: ResolvedRun, task: Task, model: nn.Module, meter: Meter, *, factor: float, reporter: Reporter) -> Plan:
    """Searches for the largest batch that fits, and resolves the plan.

    Raises:
        DoesNotFitError: Not even one sample fits.
    """
    request = plan_request(run, factor=factor, dataset_size=len(task.train_rows))
    if not request.searches:
        return resolve_plan(request, tuned_limit=None)
    upper = search_upper(request)
    rng = randomness.capture()
    with reporter.stage("finding the batch size", unit="trials") as stage:
        trial = _trial(run, task, model, meter)

        def reported(size: int) -> int:
            stage.advance(1, size=size)
            return trial(size)

        found = find_max_size(reported, upper=upper, capacity=meter.capacity_bytes)
    randomness.restore(rng)
    meter.release()
    meter.reset_peak()
    return resolve_plan(request, tuned_limit=found.size)


def _trial(run: ResolvedRun, task: Task, model: nn.Module, meter: Meter) -> Callable[[int], int]:
    """Makes the trial of the search: a few whole steps of a copy of the model on the costliest samples there are."""
    precision = Precision.named(run.training.precision)
    costliest = _costliest_first(task)

    def trial(size: int) -> int:
        meter.release()
        meter.reset_peak()
        copied = copy.deepcopy(model).to(meter.device).train()
        optimization = make_optimization(copied, run.training, lr=0.0, steps_per_epoch=1, device=meter.device)
        # More samples than there are: the costliest come again, so that the trial stays a worst case.
        rows = np.resize(costliest, size)
        for step in range(run.training.find_batch_size_steps_per_trial):
            with meter.measuring(resident_tensors(copied, optimization)):
                generator = randomness.step_generator(seed=run.training.seed, step=step)
                batch = task.logical_batch(rows, meter.device, precision.dtype, generator)

                def losses_of(start: int, stop: int) -> object:
                    with precision.context(meter.device):
                        return batch.losses(copied, start, stop)

                accumulate_gradients(
                    losses_of, (size,), batch.denominators, task.loss_weights, optimization.scaler.scale
                )
                optimization.step()
        return meter.peak_bytes()

    return trial


def _costliest_first(task: Task) -> NDArray[np.int64]:
    """Orders the training samples by their share of the data set's features, all features counting the same."""
    features = task.batch_features(task.train_rows)
    shares = features / np.maximum(features.sum(axis=0), 1.0)
    return task.train_rows[np.argsort(-shares.sum(axis=1), kind="stable")]
