"""Ball tracking as a task: its data, exact gradients under any cut, and its memory."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from can_train.config.settings import TrainingSettings
from can_train.errors import ConfigError, DataError
from can_train.fit.collate import to_device
from can_train.fit.prediction import predict_peak
from can_train.memory.simulated.gpu import LiveStorageTracker
from can_train.reporter import SilentReporter
from can_train.task import LogicalBatch
from can_train.training.sample_task import TaskContext
from can_train_tasks.tracknet.rendering import synthetic_folder
from can_train_tasks.tracknet.settings import TrackNetDatasetSettings, TrackNetSettings, UNetSettings
from can_train_tasks.tracknet.task import TrackNetTask
from tasks.tracknet.conftest import DATASET, RALLIES, MakeTask, needs_rallies

CPU, EXACT, ENDLESS = torch.device("cpu"), 1e-12, 2**62
CUTS = ((13,), (1,) * 13, (5, 1, 7), (12, 1))
TERM = "heatmap"


def batch_of(task: TrackNetTask, size: int = 13) -> LogicalBatch:
    # Of the sets, so that parts see different numbers of balls.
    hidden = [row for row in range(72) if not task.sample(row).is_visible][: size // 3]
    seen = [row for row in range(72) if task.sample(row).is_visible][: size - len(hidden)]
    return task.logical_batch(np.array(hidden + seen), CPU, torch.float64, torch.Generator().manual_seed(0))


def model_of(task: TrackNetTask) -> nn.Module:
    torch.manual_seed(0)
    return task.build_model().double()


def gradient(model: nn.Module, batch: LogicalBatch, cut: Sequence[int], *, mean_of_means: bool = False) -> Tensor:
    assert batch.denominators is not None
    model.zero_grad()
    for start, stop in pairwise(np.cumsum([0, *cut]).tolist()):
        total, own = batch.losses(model, start, stop)[TERM]
        whole = len(cut) * max(own, 1) if mean_of_means else batch.denominators[TERM]
        (total / whole).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("learn_absent", [False, True])
def test_any_cut_has_the_gradient_of_the_whole_batch(make_task: MakeTask, learn_absent: bool) -> None:
    task = make_task(learn_absent=learn_absent)
    model, batch = model_of(task), batch_of(task)
    whole = gradient(model, batch, (13,))
    assert max(error(gradient(model, batch, cut), whole) for cut in CUTS) <= EXACT
    # The mutant: a masked mean of each part, averaged over parts that see different numbers of balls.
    assert error(gradient(model, batch, (5, 1, 7), mean_of_means=True), whole) > 1e-3


def test_batch_normalisation_would_not_be_exact(make_task: MakeTask) -> None:
    task = make_task()
    model, batch = model_of(task), batch_of(task)
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, nn.BatchNorm2d(child.num_channels).double())
    assert error(gradient(model, batch, (5, 1, 7)), gradient(model, batch, (13,))) > 1e-3


def test_denominators_are_the_pixels_of_visible_balls(make_task: MakeTask) -> None:
    task = make_task()
    batch, model = batch_of(task), model_of(task)
    assert batch.denominators is not None
    parts = [batch.losses(model, start, stop)[TERM][1] for start, stop in ((0, 4), (4, 5), (5, 13))]
    assert parts[0] == 0
    assert batch.denominators[TERM] == sum(parts) == 9 * 32 * 16
    assert (
        make_task(learn_absent=True).denominators(task.sets["train"])[TERM]
        > task.denominators(task.sets["train"])[TERM]
    )


def test_a_picture_without_a_visible_ball_has_no_gradient(make_task: MakeTask) -> None:
    task = make_task()
    model, batch = model_of(task), batch_of(task)
    total, _ = batch.losses(model, 0, 4)[TERM]
    total.backward()
    assert total.item() == 0
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def test_no_set_shares_a_game(make_task: MakeTask) -> None:
    sets = make_task().sets
    games = [{one.clip.group for one in samples} for samples in sets.values()]
    assert list(sets) == ["train", "validation", "test"]
    assert games == [{"game1"}, {"game2"}, {"game3"}]


def test_a_sample_holds_no_pixels(make_task: MakeTask, tmp_path: Path) -> None:
    task = make_task()
    batch = task.logical_batch(task.train_rows, CPU, torch.float32, torch.Generator())
    assert all(not isinstance(value, Tensor | np.ndarray) for value in vars(batch.samples(0, 1)[0]).values())


def test_planning_reads_the_same_without_writing(make_task: MakeTask, tmp_path: Path) -> None:
    task = make_task()
    context = replace(task.context, cache=tmp_path / "cache", sampling=True)
    sampled = TrackNetTask(context)
    for name, samples in task.sets.items():
        one, other = (each.collate(list(each.sets[name])[:5]) for each in (task, sampled))
        assert torch.equal(one["balls"], other["balls"])
        # One is drawn small, the other drawn large and made smaller.
        pixels = np.stack([each["pictures"].numpy().ravel() for each in (one, other)])
        assert np.corrcoef(pixels)[0, 1] > 0.7
        assert len(samples) == len(sampled.sets[name])
    assert not (tmp_path / "cache").exists()


def test_a_set_without_a_visible_ball_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one_ball.csv").write_text(
        "Frame,Visibility,X,Y\n" + "".join(f"{n},{int(n < 20)},9,9\n" for n in range(40))
    )
    dataset = TrackNetDatasetSettings(path=str(tmp_path), render_missing_frames=True, width=32, height=16)
    context = TaskContext(settings=TrackNetSettings(), dataset=dataset, model=UNetSettings(), cache=tmp_path)
    with pytest.raises(DataError, match=r"validation: 6 pictures"):
        _ = TrackNetTask(context).sets


def judged(task: TrackNetTask, path: Path) -> dict[str, list[str]]:
    """The games of each set where a run of `task` is evaluated on other data."""
    dataset = TrackNetDatasetSettings(path=str(path), width=32, height=16)
    sets = TrackNetTask(replace(task.context, dataset=dataset, state=task.state())).sets
    return {name: sorted({one.clip.group for one in moments}) for name, moments in sets.items()}


def test_clips_that_a_run_never_saw_are_judged_as_a_whole(make_task: MakeTask, tmp_path: Path) -> None:
    task = make_task()
    games = synthetic_folder(tmp_path, DATASET.synthetic, SilentReporter())
    new = synthetic_folder(tmp_path, replace(DATASET.synthetic, seed=8), SilentReporter())
    assert judged(task, games) == {"train": ["game1"], "validation": ["game2"], "test": ["game3"]}
    assert judged(task, new)["test"] == ["game1", "game2", "game3"]
    # Beside a game of the training, and with corrected labels of another one.
    for number, name in enumerate(("game1", "game2", "game3"), start=4):
        shutil.copytree(games / name, new / f"game{number}")
    labels = new / "game4" / "Clip1" / "Label.csv"
    labels.write_text(labels.read_text().replace(",1,", ",2,"))
    assert judged(task, new) == {
        "train": ["game4"], "validation": ["game5"], "test": ["game1", "game2", "game3", "game6"],
    }  # fmt: skip
    with pytest.raises(DataError, match="all 1 clips are such"):
        judged(task, games / "game1")


def test_a_clip_that_was_cut_into_sets_keeps_its_parts_beside_a_new_clip(make_task: MakeTask, tmp_path: Path) -> None:
    games = synthetic_folder(tmp_path, DATASET.synthetic, SilentReporter())
    (tmp_path / "both").mkdir()
    shutil.copytree(games / "game1", tmp_path / "both" / "game1")
    task = make_task(replace(DATASET, path=str(tmp_path / "both")))
    own = {name: len(moments) for name, moments in task.sets.items()}
    shutil.copytree(games / "game2", tmp_path / "both" / "game2")
    more = TrackNetTask(replace(task.context, state=task.state())).sets
    assert {name: len(moments) for name, moments in more.items()} == {**own, "test": own["test"] + 24}


def test_new_clips_with_a_test_set_are_judged_on_it(make_task: MakeTask, tmp_path: Path) -> None:
    (match,) = (path.parent for path in synthetic_folder(
        tmp_path, replace(DATASET.synthetic, games=1, seed=9), SilentReporter()).glob("*/Clip1"))  # fmt: skip
    for number, name in enumerate(("train/match1", "test/match1")):
        shutil.copytree(match / "Clip1", tmp_path / "data" / name / "csv" / "1",
                        ignore=shutil.ignore_patterns("*.csv"))  # fmt: skip
        rows = "".join(f"{at},1,{at + number},9\n" for at in range(24))
        (tmp_path / "data" / name / "csv" / "1_ball.csv").write_text(f"Frame,Visibility,X,Y\n{rows}")
    assert judged(make_task(), tmp_path / "data")["test"] == ["test/match1"]


def test_a_size_that_cannot_be_halved_is_refused(make_task: MakeTask) -> None:
    with pytest.raises(ConfigError, match=r"multiples of 2: dataset.width 33"):
        make_task(replace(DATASET, width=33)).build_model()


def test_samples_are_named_by_clip_and_picture(make_task: MakeTask) -> None:
    assert make_task().describe(25) == "picture 1 of game2/Clip1"


def test_a_few_steps_lower_the_loss(make_task: MakeTask) -> None:
    task = make_task()
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = task.logical_batch(task.train_rows[:8], CPU, torch.float32, torch.Generator())
    losses = []
    for _ in range(8):
        total, own = batch.losses(model, 0, 8)[TERM]
        (total / own).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / own)
    assert losses[-1] < 0.85 * losses[0]


# Memory


def measured(model: nn.Module, step: Callable[[], Any]) -> int:
    """The peak of a warm training step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    optimizer.zero_grad()
    tracker = LiveStorageTracker(ENDLESS, [*model.parameters(), *model.buffers(), *state])
    with tracker:
        step().backward()
        optimizer.step()
    return tracker.peak_bytes


def step_of(task: TrackNetTask, model: nn.Module, rows: np.ndarray) -> Callable[[], Tensor]:
    batch = task.logical_batch(rows, CPU, torch.float32, torch.Generator())
    return lambda: batch.losses(model, 0, len(rows))[TERM][0]


def test_predicted_and_simulated_peaks_agree(make_task: MakeTask) -> None:
    task = make_task()
    model = task.build_model()
    for size in (100, 300):
        rows = np.resize(task.train_rows, size)
        found = predict_peak(task, size, training=TrainingSettings())
        assert found.explains
        assert found.peak_bytes == pytest.approx(measured(model, step_of(task, model, rows)), rel=0.03)


def test_a_frozen_backbone_takes_less_and_each_is_predicted(make_task: MakeTask) -> None:
    task, size = make_task(), 200
    peaks = {}
    for is_frozen in (True, False):
        model = task.build_model()
        model.get_submodule("backbone").requires_grad_(not is_frozen)
        found = predict_peak(
            model, size, loss_of=lambda rows, model=model: step_of(task, model, task.train_rows[rows % 24])()
        )
        rows = np.resize(task.train_rows, size)
        peaks[is_frozen] = measured(model, step_of(task, model, rows))
        assert found.peak_bytes == pytest.approx(peaks[is_frozen], rel=0.03)
    assert peaks[True] < 0.8 * peaks[False]


def test_half_precision_on_the_device_leaves_the_loss_in_full(make_task: MakeTask) -> None:
    task = make_task()
    model, samples = task.build_model(), task.sets["train"][:3]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = task.loss(model, to_device(task.collate(samples), CPU, torch.float32))[TERM]
    assert total.dtype == torch.float32


@pytest.mark.slow
@needs_rallies
def test_real_rallies_train_against_generated_pictures(make_task: MakeTask) -> None:
    task = make_task(TrackNetDatasetSettings(path=str(RALLIES), render_missing_frames=True, width=32, height=16))
    assert {name: len(samples) for name, samples in task.sets.items()} == {
        "train": 1948,
        "validation": 558,
        "test": 814,
    }
    model, batch = model_of(task), batch_of(task)
    assert error(gradient(model, batch, (5, 1, 7)), gradient(model, batch, (13,))) <= EXACT
