"""Classes of different sizes are balanced in training, and the loss stays exact where it is split."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from can_train.errors import ConfigError
from can_train_tasks.bendr.settings import RecordingSettings
from can_train_tasks.bendr.task import Bendr
from fakes.eeg import CLASSIFY, PRETRAIN, eeg_task, noise, write_recording

HZ, SECONDS = 32, 200
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> RecordingSettings:
    """A recording in which every tenth second is of class 1, and every fiftieth of class 2."""
    second = np.arange(SECONDS * HZ) // HZ
    labels = np.where(second % 50 == 7, 2, np.where(second % 10 == 3, 1, 0))
    path = tmp_path_factory.mktemp("balance") / "night.csv"
    write_recording(path, noise(len(labels), 3), labels)
    return RecordingSettings(path=str(path), sampling_hz=HZ, window_s=1.0, gap_s=0.0)


def task_of(dataset: RecordingSettings, cache: Path, balance: str) -> Bendr:
    return eeg_task(CLASSIFY, cache, replace(dataset, balance=balance))


def counts(task: Bendr, epoch: int, seed: int = 1) -> tuple[list[int], list[int]]:
    """The windows of each class in an epoch, and how often the windows come that come least and most often."""
    rows = task.epoch_order(task.train_rows, seed=seed, epoch=epoch)
    labels = [int(task.sample(int(row))["label"]) for row in rows]
    times = np.unique(rows, return_counts=True)[1]
    return np.bincount(labels, minlength=3).tolist(), [int(times.min()), int(times.max())]


def test_undersampling_draws_as_many_windows_of_each_class_as_the_rarest_has(
    dataset: RecordingSettings, tmp_path: Path
) -> None:
    task = task_of(dataset, tmp_path, "undersample")
    whole = np.bincount([int(task.sample(int(row))["label"]) for row in task.train_rows]).tolist()
    assert whole == [105, 12, 3]
    assert counts(task, 0) == ([3, 3, 3], [1, 1])
    orders = [task.epoch_order(task.train_rows, seed=1, epoch=epoch).tolist() for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_oversampling_draws_as_many_windows_of_each_class_as_the_most_frequent_has(
    dataset: RecordingSettings, tmp_path: Path
) -> None:
    task = task_of(dataset, tmp_path, "oversample")
    assert counts(task, 0) == ([105, 105, 105], [1, 35])


@pytest.mark.parametrize("balance", ["none", "weights"])
def test_without_sampling_an_epoch_has_each_window_once(
    dataset: RecordingSettings, tmp_path: Path, balance: str
) -> None:
    assert counts(task_of(dataset, tmp_path, balance), 0) == ([105, 12, 3], [1, 1])


def test_pretraining_is_not_balanced(dataset: RecordingSettings, tmp_path: Path) -> None:
    task = eeg_task(replace(PRETRAIN, mask_span=2), tmp_path, replace(dataset, balance="undersample"))
    assert sorted(task.epoch_order(task.train_rows, seed=1, epoch=0)) == task.train_rows.tolist()


def test_a_weighted_loss_counts_each_class_alike_and_does_not_depend_on_its_parts(
    dataset: RecordingSettings, tmp_path: Path
) -> None:
    task = task_of(dataset, tmp_path, "weights")
    weights = torch.tensor(task.state()["class_weights"], dtype=torch.float64)
    assert (weights * torch.tensor([105.0, 12.0, 3.0])).tolist() == pytest.approx([40.0] * 3)
    torch.manual_seed(0)
    model = task.build_model().double().eval().requires_grad_(False)
    batch = task.logical_batch(task.train_rows, CPU, torch.float64, torch.Generator().manual_seed(0))
    ((whole, count),) = batch.losses(model, 0, 120).values()
    assert batch.denominators == {"class": 120.0}
    assert float(count) == 120
    collated = batch.collated(0, 120)  # type: ignore[attr-defined]
    wanted = functional.cross_entropy(model(collated["signal"]), collated["label"], weights, reduction="sum")
    assert float(whole) == pytest.approx(float(wanted), rel=1e-12)
    parts = [batch.losses(model, start, stop)["class"][0] for start, stop in ((0, 7), (7, 50), (50, 120))]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)
    plain = task_of(dataset, tmp_path, "none").logical_batch(task.train_rows, CPU, torch.float64, None)
    assert float(plain.losses(model, 0, 120)["class"][0]) != pytest.approx(float(whole), rel=1e-3)


def test_a_finished_run_is_evaluated_with_the_weights_of_its_training(
    dataset: RecordingSettings, tmp_path: Path
) -> None:
    state = {"channels": ["E0", "E1", "E2"], "classes": [0, 1, 2], "class_weights": [1.0, 2.0, 4.0]}
    task = eeg_task(CLASSIFY, tmp_path, replace(dataset, balance="weights"), state=state)
    sample = task.sample(int(task.set_rows["test"][3]))
    assert sample["weight"] == state["class_weights"][sample["label"]]  # type: ignore[index]


def test_a_plan_of_a_balanced_run_has_the_steps_of_the_whole_data(dataset: RecordingSettings, tmp_path: Path) -> None:
    task = task_of(dataset, tmp_path, "undersample")
    task.context = replace(task.context, sampling=True)
    rows = np.resize(task.train_rows, 10 * len(task.train_rows))
    assert len(task.planned_order(rows, seed=0, epoch=0)) == 10 * 9
    assert len(task.planned_order(task.train_rows, seed=0, epoch=0)) == 9


def test_another_balance_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Unknown value of dataset\.balance: 'under'"):
        RecordingSettings(balance="under")
