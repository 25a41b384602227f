"""Evaluates a finished run of a `Task`, on its own test sets or on other data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from can_train.config.resolved import EvaluationData, FinishedModel
from can_train.errors import CanTrainError
from can_train.fit.pass_state import load_weights
from can_train.fit.precision import convert, is_inexact
from can_train.reporter import SilentReporter, TextTable
from can_train.task import UpcomingBatch
from can_train.training.evaluate import Evaluation, Scorer, Verdict
from can_train.training.sample_task import SampleBatch, Task, make_task, tables
from can_train.training.task_values import VALIDATION


class SampleEvaluation(Evaluation):
    """A finished model of a task, and its test sets; on data without test sets, all samples.

    Args:
        finished: The model.
        task: The task with the data that are evaluated.
        trained: The task with the data that the model was trained on, for the baselines; None: they are left out.
        data: The data, and how they are evaluated.
    """

    def __init__(self, finished: FinishedModel, task: Task, trained: Task | None, data: EvaluationData) -> None:
        self._trained = trained
        self.dataset = data.dataset.path or data.dataset.name or finished.run.task
        self.own_split, self._task = data.own, task
        # Other data without a test set are judged as a whole: nothing was trained on them.
        has_no_test = not data.own and set(task.test_sets) == {VALIDATION}
        self._sets = {"all": np.sort(np.concatenate(list(task.set_rows.values())))} if has_no_test else task.test_sets
        self.counted = {"samples": sum(map(len, self._sets.values()))}
        self.rows = np.concatenate(list(self._sets.values()))
        model = task.build_model()
        load_weights(model, finished.weights, finished.made_buffers)
        # A run in double precision is scored in it.
        self.model = convert(model, _dtype_of(finished.weights)).eval()
        self._judged = SimpleNamespace(model=model, outcome=task.outcome, describe=task.describe)

    def evaluate(self, score: Scorer) -> Verdict:
        """Judges the model on each set."""
        with score.stage("scoring"):
            with self._task.read_ahead(UpcomingBatch(rows=rows) for rows in self._sets.values()):
                parts = {name: score.parts(self._judged, rows) for name, rows in self._sets.items()}
            tests = {name: self._task.judge_rows(rows, parts[name], self._trained) for name, rows in self._sets.items()}
        predictions = [each for name in self._sets for part in parts[name] for each in part.predictions or ()]
        columns = {
            "set": [name for name, rows in self._sets.items() for _ in rows],
            "sample": [self._task.describe(int(row)) for rows in self._sets.values() for row in rows],
            "prediction": [_cell(prediction) for prediction in predictions],
        }
        return Verdict(judgement={"test": tests}, samples=columns if predictions else {})

    def call_model(self, rows: NDArray[np.int64]) -> None:
        """Calls the model with some samples, as the task says."""
        batch = SampleBatch(self._task, rows, torch.device("cpu"), _dtype_of(self.model.state_dict()), None)
        with self._task.asked("call_model"):
            self._task.call_model(self.model, batch.collated(0, len(rows)))

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[TextTable]:
        """Writes a judgement as a table."""
        return tables(judgement)


def evaluator(
    finished: FinishedModel, finished_model: Callable[[str], FinishedModel], data: EvaluationData
) -> Evaluation:
    """Prepares data for the evaluation of a finished run."""
    roles = [needed.role for needed in finished.run.prerequisites if getattr(finished.run.mode, needed.role)]
    models = {role: finished_model(role) for role in roles}
    # With other data, perhaps.
    task = make_task(replace(finished.run, dataset=data.dataset), models, data.data_root, data.cache, data.reporter,
                     state=finished.state, evaluation=data.options)  # fmt: skip
    trained = task if data.own or type(task).baselines is Task.baselines else _trained(finished, models, data)
    return SampleEvaluation(finished, task, trained, data)


def _trained(finished: FinishedModel, models: Mapping[str, FinishedModel], data: EvaluationData) -> Task | None:
    """Makes the task with the run's own data: baselines that learned from the data that are evaluated would know the
    answers. None where the data are gone.
    """
    try:
        return make_task(finished.run, models, data.data_root, data.cache, SilentReporter(), state=finished.state)
    except CanTrainError as error:
        why = f"{error.rule}{f': {error.value}' if error.value else ''}"
        data.reporter.notice(f"The baselines are left out, since the run's training data cannot be read: {why}")
        return None


def _dtype_of(weights: Mapping[str, Tensor]) -> torch.dtype:
    return next((weight.dtype.to_real() for weight in weights.values() if is_inexact(weight)), torch.float32)


def _cell(prediction: Any) -> Any:
    """Returns a prediction as a number or as text."""
    if isinstance(prediction, torch.Tensor):
        return prediction.item() if prediction.numel() == 1 else str(prediction.tolist())
    return prediction if isinstance(prediction, int | float | str) else str(prediction)
