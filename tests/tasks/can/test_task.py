"""The CAN task as training sees it: what it trains on, how it weighs, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from can_train.config.compose import RunRequest, resolve
from can_train.errors import DataError
from can_train.reporter import SilentReporter
from can_train_tasks.can.data.graphs import Frames
from can_train_tasks.can.losses import AutoencoderBatch, ClassifierBatch
from can_train_tasks.can.task import make_task
from fakes.random_bus import random_frames, write_log

CPU = torch.device("cpu")
WINDOW = 20
WINDOWS = 150


def task_of(folder: Path, frames: Frames, model: str = "gat") -> Any:
    log = write_log(folder / "drive.csv", frames)
    values = {"dataset.window": WINDOW, "dataset.stride": WINDOW, "mode.baselines": False}
    run = resolve(RunRequest(model=model, size="student", dataset=str(log), values=values))
    return make_task(run, {}, folder, folder / "cache", SilentReporter())


@pytest.fixture
def frames() -> Frames:
    return random_frames(WINDOWS * WINDOW)


def is_attack(frames: Frames) -> NDArray[np.bool_]:
    attacks: NDArray[np.bool_] = frames.label.reshape(-1, WINDOW).any(axis=1)
    return attacks


def test_both_classes_weigh_the_same_in_training(tmp_path: Path, frames: Frames) -> None:
    task = task_of(tmp_path, frames)
    rows, attacks = task.train_rows, is_attack(frames)[task.train_rows]

    def weight(rows: NDArray[np.int64]) -> float:
        return task.logical_batch(rows, CPU, torch.float32, None).denominators["classification"]

    assert weight(rows[attacks]) == pytest.approx(weight(rows[~attacks]))
    assert weight(rows) == pytest.approx(len(rows))


def test_an_autoencoder_trains_on_benign_windows_only(tmp_path: Path, frames: Frames) -> None:
    task = task_of(tmp_path, frames, "vgae")
    supervised = task_of(tmp_path / "other", frames)
    rows = np.concatenate([task.train_rows, task.validation_rows])
    assert not is_attack(frames)[rows].any()
    assert set(rows) < set(np.concatenate([supervised.train_rows, supervised.validation_rows]))
    assert task.loss_weights == {"node": 1.0, "edge": 1.0, "can_id": 0.1, "kl": 0.01}


@pytest.mark.parametrize(
    ("label", "missing", "remedy"),
    # An autoencoder learns from benign windows, so it is no way out where there are none.
    [(0, "no attack", "or train an autoencoder: --model vgae"), (1, "no benign", "also has attack-free driving")],
)
def test_a_one_sided_log_cannot_train_a_classifier(
    tmp_path: Path, frames: Frames, label: int, missing: str, remedy: str
) -> None:
    with pytest.raises(DataError, match=rf"one-sided: {missing} window among \d+\.\n.*{remedy}"):
        task_of(tmp_path, replace(frames, label=np.full_like(frames.label, label)))


def test_a_log_without_a_benign_window_cannot_train_an_autoencoder(tmp_path: Path, frames: Frames) -> None:
    with pytest.raises(
        DataError, match=r"benign windows, and the training part has none\.\nUse a log that also has attack-free"
    ):
        task_of(tmp_path, replace(frames, label=np.ones_like(frames.label)), "vgae")


@pytest.mark.parametrize(
    ("model", "kind", "width"), [("gat", ClassifierBatch, 1), ("vgae", AutoencoderBatch, 5)], ids=["gat", "vgae"]
)
def test_a_task_gives_its_model_batches_and_scores(
    tmp_path: Path, frames: Frames, model: str, kind: type[Any], width: int
) -> None:
    task = task_of(tmp_path, frames, model)
    network = task.build_model().double()
    rows = task.train_rows[:7]
    batch = task.logical_batch(rows, CPU, torch.float64, torch.Generator().manual_seed(0))
    assert isinstance(batch, kind)
    losses = batch.losses(network, 2, 5)
    assert set(losses) == set(task.loss_weights)
    assert all(total.dtype == torch.float64 for total, _ in losses.values())
    assert task.scores(network.eval(), rows, CPU, torch.float64).shape == (7, width)
    assert task.batch_features(rows).shape == (7, 3)


def test_the_metric_of_an_epoch_is_the_mean_of_the_recalls_of_both_classes(tmp_path: Path, frames: Frames) -> None:
    task = task_of(tmp_path, frames)
    network, rows = task.build_model().eval(), task.validation_rows
    sums = np.zeros(2)
    # In two parts, as where memory is short.
    for part in (rows[:3], rows[3:]):
        batch = task.logical_batch(part, CPU, torch.float32, None)
        with torch.inference_mode():
            batch.losses(network, 0, len(part))
            sums += task.metric_sums(network, batch, len(part))["mean recall"]
    with torch.inference_mode():
        called = network(task.gather_to(CPU, torch.float32)(rows)).argmax(dim=1).numpy() > 0
    attacks = is_attack(frames)[rows]
    assert sums[0] / sums[1] == pytest.approx((called[attacks].mean() + (~called[~attacks]).mean()) / 2)


def test_the_noise_of_a_step_is_that_of_its_generator(tmp_path: Path, frames: Frames) -> None:
    task = task_of(tmp_path, frames, "vgae")

    def noise(seed: int) -> Any:
        batch = task.logical_batch(task.train_rows[:5], CPU, torch.float32, torch.Generator().manual_seed(seed))
        return batch.noise if isinstance(batch, AutoencoderBatch) else None

    assert np.array_equal(noise(1), noise(1))
    assert not np.array_equal(noise(1), noise(2))


def test_validation_decodes_the_mean(tmp_path: Path, frames: Frames) -> None:
    task = task_of(tmp_path, frames, "vgae")
    network = task.build_model().eval()
    batch = task.logical_batch(task.validation_rows, CPU, torch.float32, None)
    one, other = (batch.losses(network, 0, len(task.validation_rows)) for _ in range(2))
    assert all(torch.equal(one[term][0], other[term][0]) for term in one)


@pytest.mark.parametrize("model", ["gat", "vgae"])
def test_judging_never_looks_at_training_windows(tmp_path: Path, frames: Frames, model: str) -> None:
    task = task_of(tmp_path, frames, model)
    network = task.build_model().eval()
    asked: set[int] = set()

    def score(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        asked.update(rows.tolist())
        with torch.inference_mode():
            scores: NDArray[np.float64] = task.scores(network, rows, CPU, torch.float32).double().numpy()
        return scores

    judgement = task.judge(score)
    assert not asked & set(task.train_rows.tolist())
    assert len(task.tables(judgement)) == 2  # one of the figures, one of the bursts
    for name, one in task.predictions(judgement, score).items():
        model, hits = judgement["test"][name]["model"], int((one.flagged & one.positive).sum())
        assert (len(one.score), hits / int(one.positive.sum())) == (model["windows"], model["recall"])


def test_a_task_trains_on_the_same_losses_where_memory_is_too_small_to_prepare_inputs(
    tmp_path: Path, frames: Frames, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(model: str) -> tuple[str, float]:
        task = task_of(tmp_path, frames, model)
        torch.manual_seed(0)
        network = task.build_model()
        batch = task.logical_batch(task.train_rows[:20], CPU, torch.float32, torch.Generator().manual_seed(0))
        kind = type(batch.gather(task.train_rows[:1])).__name__
        return kind, sum(float(total.detach()) for total, _ in batch.losses(network, 3, 17).values())

    prepared = {model: losses(model) for model in ("gat", "vgae")}
    monkeypatch.setattr("can_train_tasks.can.modes.windows._PREPARED_SHARE", 0.0)
    for model, (kind, total) in prepared.items():
        assert kind == "PreparedBatch"
        assert losses(model) == ("GraphBatch", total)
