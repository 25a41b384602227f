"""Evaluates a finished run of a `Task`, on its own test sets or on other data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from can_train.config.resolved import EvaluationData, FinishedModel
from can_train.task import Table
from can_train.training.evaluate import Evaluation, Scorer, Verdict
from can_train.training.sample_judging import VALIDATION, PartOutcome, tables
from can_train.training.sample_task import Rows, Task, make_trained_task


@dataclass(frozen=True, eq=False)
class _Judged:
    """A finished model with the task that asks for its outcomes."""

    model: nn.Module
    task: Task

    def outcome(self, model: nn.Module, rows: Rows, device: torch.device, dtype: torch.dtype) -> PartOutcome:
        return self.task.outcome(model, rows, device, dtype)

    def describe(self, row: int) -> str:
        return self.task.describe(row)


class SampleEvaluation(Evaluation):
    """A finished model of a task, and its test sets; on data without test sets, all samples."""

    def __init__(self, finished: FinishedModel, task: Task, data: EvaluationData) -> None:
        self.dataset = data.dataset.path or data.dataset.name or finished.run.task
        self.own_split, self._task = data.own, task
        # Other data without a test set are judged as a whole: nothing was trained on them.
        has_no_test = not data.own and set(task.test_sets) == {VALIDATION}
        self._sets = {"all": np.sort(np.concatenate(list(task.set_rows.values())))} if has_no_test else task.test_sets
        self.counted = {"samples": sum(map(len, self._sets.values()))}
        model = task.build_model()
        model.load_state_dict(finished.weights)
        self._judged = _Judged(model.eval(), task)

    def evaluate(self, score: Scorer) -> Verdict:
        """Judges the model on each set."""
        with score.stage("scoring"):
            parts = {name: score.parts(self._judged, rows) for name, rows in self._sets.items()}
            tests = {name: self._task.judge_rows(rows, parts[name]) for name, rows in self._sets.items()}
        predictions = [each for name in self._sets for part in parts[name] for each in part.predictions or ()]
        columns = {
            "set": [name for name, rows in self._sets.items() for _ in rows],
            "sample": [self._task.describe(int(row)) for rows in self._sets.values() for row in rows],
            "prediction": [_cell(prediction) for prediction in predictions],
        }
        return Verdict(judgement={"test": tests}, samples=columns if predictions else {})

    def tables(self, judgement: Mapping[str, Any]) -> Sequence[Table]:
        """Writes a judgement as a table."""
        return tables(judgement)


def evaluator(
    finished: FinishedModel, finished_model: Callable[[str], FinishedModel], data: EvaluationData
) -> Evaluation:
    """Prepares data for the evaluation of a finished run."""
    roles = [needed.role for needed in finished.run.prerequisites if getattr(finished.run.mode, needed.role)]
    models = {role: finished_model(role) for role in roles}
    return SampleEvaluation(finished, make_trained_task(finished, models, data), data)


def _cell(prediction: Any) -> Any:
    """Returns a prediction as a number or as text."""
    if isinstance(prediction, torch.Tensor):
        return prediction.item() if prediction.numel() == 1 else str(prediction.tolist())
    return prediction if isinstance(prediction, int | float | str) else str(prediction)
