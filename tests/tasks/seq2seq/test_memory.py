"""The peak of a batch far larger than the probes, as its features predict it, against the one that is measured."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from can_train.config.settings import TrainingSettings
from can_train.fit.cost_model import DeviceLimits
from can_train.fit.explore import Explorer
from can_train.memory.cuda_workspaces import AMPERE
from can_train.memory.meters import CpuMeter
from can_train.memory.simulated.gpu import LiveStorageTracker
from can_train_tasks.seq2seq.task import Seq2seq
from tasks.seq2seq.conftest import MODELS, MakeTask

ENDLESS = 2**62
WITHIN = {"lstm": 0.06, "transformer": 0.03, "lstm+": 0.08, "transformer+": 0.03}
MANY = 1_000  # pairs of a batch: more than five times the largest probe


def limits_of(task: Seq2seq) -> DeviceLimits:
    explorer = Explorer(task=task, model=task.build_model(), training=TrainingSettings(), meter=CpuMeter(cuda=AMPERE),
                        rows=task.train_rows, verify=False)  # fmt: skip
    return explorer.explore(lambda costs: float(costs.each().sum()))


def predicted(task: Seq2seq, limits: DeviceLimits, rows: NDArray[np.int64]) -> float:
    return limits.step_peak_bytes(limits.training.model.cost(task.batch_features(rows)), 0.0)


def measured(task: Seq2seq, rows: NDArray[np.int64]) -> int:
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state: list[Any] = [one for of in optimizer.state.values() for one in of.values() if isinstance(one, torch.Tensor)]
    tracker = LiveStorageTracker(ENDLESS, [*model.parameters(), *state])
    with tracker:
        batch = task.logical_batch(rows, torch.device("cpu"), torch.float32, torch.Generator())
        total, symbols = batch.losses(model, 0, len(rows))["cross_entropy"]
        (total / symbols).backward()
    return tracker.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_large_batch_is_predicted_whatever_its_lengths(make_task: MakeTask, name: str) -> None:
    task = make_task(name)
    limits, counts = limits_of(task), task.batch_features(task.train_rows)
    ranked = task.train_rows[np.argsort(counts[:, 0], kind="stable")]
    for rows in (task.train_rows, ranked[-60:], ranked[:150]):
        batch = np.resize(rows, MANY)
        assert predicted(task, limits, batch) == pytest.approx(measured(task, batch), rel=WITHIN[name])
    assert limits.training.model.explains


def test_attention_between_the_longest_source_and_the_longest_target_of_different_pairs_is_counted(
    make_task: MakeTask,
) -> None:
    task = make_task()
    position = [feature.name for feature in task.memory_features].index("source × target")
    by_source = int(np.argmax(task.batch_features(task.train_rows)[:, 0]))
    assert task.memory_features[position].factors == ("source symbols", "target symbols")
    source, target, product = task.batch_features(task.train_rows[[by_source]])[0, [0, 1, position]]
    assert product == source * target
