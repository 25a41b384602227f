"""Heatmaps, their loss and their peaks; metrics and baselines."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from can_train.errors import ConfigError, StateError
from can_train_tasks.tracknet.clips import Labels
from can_train_tasks.tracknet.rendering import render_missing
from can_train_tasks.tracknet.settings import TrackNetSettings
from can_train_tasks.tracknet.task import Found, Moment, ball_heatmaps, detection_metrics, peaks, pixel_losses
from tasks.tracknet.conftest import DATASET, MakeTask

PLACE = st.tuples(st.floats(0, 31), st.floats(0, 15))


@given(ball=PLACE, sigma=st.floats(0.5, 4))
def test_a_heatmap_is_a_gaussian_around_the_ball(ball: tuple[float, float], sigma: float) -> None:
    rows, columns = np.indices((16, 32))
    expected = np.exp(-((columns - ball[0]) ** 2 + (rows - ball[1]) ** 2) / (2 * sigma**2))
    found = ball_heatmaps(torch.tensor([ball], dtype=torch.float64), sigma, (16, 32))
    assert found.shape == (1, 16, 32)
    assert np.allclose(found[0].numpy(), expected, rtol=1e-12, atol=1e-300)


@given(balls=st.lists(st.tuples(st.floats(3, 28), st.floats(3, 12)), min_size=1, max_size=5))
def test_the_peak_of_a_heatmap_is_the_ball(balls: list[tuple[float, float]]) -> None:
    found = peaks(ball_heatmaps(torch.tensor(balls, dtype=torch.float64), 2.0, (16, 32)))
    # The neighbourhood is symmetric around a pixel, not around the ball: a fifth of a pixel is lost at most.
    assert np.allclose(found[:, :2].numpy(), balls, atol=0.3)
    assert found[:, 2].min() > 0.87


@given(ball=PLACE)
def test_a_peak_lies_inside_the_heatmap(ball: tuple[float, float]) -> None:
    (x, y, _), = peaks(ball_heatmaps(torch.tensor([ball]), 2.0, (16, 32))).tolist()  # fmt: skip
    assert 0 <= x <= 31
    assert 0 <= y <= 15


def test_a_heatmap_of_nothing_has_a_peak_without_height() -> None:
    assert peaks(torch.zeros(2, 4, 4)).isfinite().all()
    assert peaks(torch.zeros(2, 4, 4))[:, 2].tolist() == [0, 0]


@given(
    logit=st.floats(-8, 8), target=st.floats(0, 1), weight=st.floats(1, 50), gamma=st.sampled_from([0.0, 1.0, 2.0, 3.5])
)
def test_the_loss_of_a_pixel_is_its_formula(logit: float, target: float, weight: float, gamma: float) -> None:
    settings = TrackNetSettings(ball_weight=weight, focal_gamma=gamma)
    z, y = (torch.tensor([[[value]]], dtype=torch.float64) for value in (logit, target))
    p = 1 / (1 + np.exp(-logit))
    entropy = -target * np.log(p) - (1 - target) * np.log(1 - p)
    expected = (1 + (weight - 1) * target) * abs(p - target) ** gamma * entropy
    assert pixel_losses(z, y, settings).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_pixel_that_is_right_has_a_gradient_of_zero() -> None:
    z = torch.zeros(1, 1, 1, dtype=torch.float64, requires_grad=True)
    pixel_losses(z, torch.full((1, 1, 1), 0.5, dtype=torch.float64), TrackNetSettings()).sum().backward()
    assert z.grad is not None
    assert z.grad.item() == 0


@pytest.mark.parametrize(
    "setting", [{"sigma": 0.0}, {"ball_weight": 0.5}, {"focal_gamma": 0.5}, {"threshold": 0.0}, {"previews": -1}]
)
def test_settings_out_of_range_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        TrackNetSettings(**setting)


def moments(visibility: list[int], x: list[float]) -> list[Moment]:
    """Pictures of 64 × 32 of a ball that moves along y = 10, whose heatmap is half as large."""
    labels = Labels(numbers=np.arange(len(x)), visibility=np.array(visibility), x=np.array(x), y=np.full(len(x), 10.0),
                    lines=np.arange(len(x)))  # fmt: skip
    pictures = render_missing("a", labels, (64, 32))
    clip = labels.clip(name="a", group="a", size=(64, 32), pictures=pictures)
    return [Moment(clip=clip, position=position, size=(32, 16)) for position in range(len(clip))]


def test_positions_are_scaled_by_the_centres_of_pixels() -> None:
    (one,) = moments([1], [31.5])
    # The middle of 64 pixels, whose first one's centre is 0, is the middle of 32.
    assert one.ball == pytest.approx((15.5, (10 + 0.5) / 2 - 0.5))
    assert np.divide(one.clip.size, one.size).tolist() == [2.0, 2.0]


def test_metrics_by_hand() -> None:
    samples = moments([1, 2, 1, 0, 0, 3, 1], [10.0] * 7)
    x, y = samples[0].ball
    # Right; right at the edge; too far; false alarm; rightly silent; hidden, which does not count; missed.
    positions = np.array([(x, y), (x + 1, y), (x, y + 1.5), (0, 0), (0, 0), (0, 0), (x, y)])
    reported = np.array([True, True, True, True, False, True, False])
    found = detection_metrics(samples, Found(positions=positions, reported=reported), 1.0)
    assert found["precision"] == pytest.approx(2 / 4)
    assert found["recall"] == pytest.approx(2 / 4)
    assert found["f1"] == pytest.approx(0.5)
    assert found["position_error_px"] == pytest.approx((0 + 2 + 3) / 3)


def test_metrics_of_nothing_reported_are_zero_without_a_position_error() -> None:
    silent = Found(positions=np.zeros((2, 2)), reported=np.zeros(2, np.bool_))
    assert detection_metrics(moments([1, 0], [3, 3]), silent, 1.0) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}


def test_baselines_know_what_they_say_they_know(make_task: MakeTask) -> None:
    task = make_task()
    samples = moments([1, 1, 0, 1], [10.0, 12.0, 0.0, 50.0])
    scores = task.baselines(samples)
    # The first has no earlier picture, the second is one pixel off, and the last one 19: none within half a pixel.
    last = scores["true position one picture before"]
    assert last["position_error_px"] == pytest.approx((2 + 38) / 2)
    assert last["recall"] == 0
    assert set(scores) == {
        "median position in training",
        "largest change since the picture before",
        "true position one picture before",
    }


def test_the_largest_change_is_a_ball_that_appears(make_task: MakeTask) -> None:
    task = make_task(replace(DATASET, width=64, height=32))
    samples = [replace(one, size=(64, 32)) for one in moments([0, 1], [0.0, 40.0])]
    found = task._largest_change(samples)
    assert found.reported[1]
    assert found.positions[1] == pytest.approx([40, 10], abs=1)


def test_the_model_that_knows_the_answer_scores_one(make_task: MakeTask) -> None:
    task = make_task()
    samples = task.sets["test"]
    known = [torch.tensor([*one.ball, float(one.is_visible)]) for one in samples]
    found = task.measure(samples, known)
    assert found == pytest.approx({"precision": 1, "recall": 1, "f1": 1, "position_error_px": 0}, abs=1e-5)


def test_previews_show_both_balls(make_task: MakeTask, tmp_path: Path) -> None:
    task = make_task(replace(DATASET, width=64, height=32), preview_dir=str(tmp_path / "shown"), previews=3)
    samples = task.sets["test"]
    task.measure(samples, [torch.tensor([40.0, 20.0, 0.9])] * len(samples))
    pictures = sorted((tmp_path / "shown").iterdir())
    assert [path.name for path in pictures] == ["game3-Clip1-0000.png", "game3-Clip1-0011.png", "game3-Clip1-0023.png"]
    for path, position in zip(pictures, (0, 11, 23), strict=True):
        with Image.open(path) as image:
            picture = np.asarray(image)
        assert picture[16, 40].tolist() == [255, 0, 0]
        is_green = (picture == (0, 255, 0)).all(axis=-1).any()
        assert is_green == samples[position].is_visible


def test_a_folder_for_previews_that_cannot_be_written_is_told(make_task: MakeTask, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    task = make_task(preview_dir=str(tmp_path / "file" / "folder"))
    with pytest.raises(StateError, match=r"task\.preview_dir"):
        task.measure(task.sets["test"][:1], [torch.zeros(3)])
