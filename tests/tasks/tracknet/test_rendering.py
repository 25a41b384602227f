"""Generated pictures, and the folders that simulated games are written to."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from can_train.errors import StateError
from can_train.reporter import SilentReporter
from can_train_tasks.tracknet.clips import FilePictures, Labels, read_clips
from can_train_tasks.tracknet.rendering import render_missing, simulated_clips, synthetic_folder, write_games
from can_train_tasks.tracknet.settings import TrackNetDatasetSettings
from tasks.tracknet.conftest import RALLIES, VIDEO, needs_rallies


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_simulated_games_are_written_and_read_back_by_the_reader_of_real_ones(tmp_path: Path) -> None:
    folder = synthetic_folder(tmp_path, VIDEO, SilentReporter())
    clips = read_clips(TrackNetDatasetSettings(path=str(folder)), render_missing)
    simulated = simulated_clips(VIDEO)
    assert [clip.name for clip in clips] == [clip.name for clip in simulated]
    for clip, one in zip(clips, simulated, strict=True):
        assert isinstance(clip.pictures, FilePictures)
        assert (clip.size, clip.group) == (one.size, one.group)
        for name in ("visibility", "x", "y", "starts"):
            assert np.array_equal(getattr(clip, name), getattr(one, name)), name
        with Image.open(clip.pictures.paths[3]) as image:
            assert np.array_equal(np.asarray(image), one.pictures.read(3, *one.size))


def test_equal_settings_give_equal_bytes_and_a_seed_gives_others(tmp_path: Path) -> None:
    for name, settings in (("a", VIDEO), ("b", VIDEO), ("c", replace(VIDEO, seed=1))):
        write_games(tmp_path / name, simulated_clips(settings), SilentReporter())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a").keys() == contents(tmp_path / "c").keys()
    assert contents(tmp_path / "a")["game1/Clip1/Label.csv"] != contents(tmp_path / "c")["game1/Clip1/Label.csv"]


def test_an_existing_folder_is_used_and_another_setting_has_another(tmp_path: Path) -> None:
    folder = synthetic_folder(tmp_path, VIDEO, SilentReporter())
    (folder / "mark").touch()
    assert (synthetic_folder(tmp_path, VIDEO, SilentReporter()) / "mark").exists()
    assert synthetic_folder(tmp_path, replace(VIDEO, distractors=0), SilentReporter()) != folder


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="export CAN_TRAIN_CACHE=FOLDER"):
        synthetic_folder(tmp_path / "file", VIDEO, SilentReporter())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def labels_at(x: list[float], y: list[float], visibility: list[int]) -> Labels:
    numbers = np.arange(len(x))
    return Labels(numbers=numbers, visibility=np.array(visibility), x=np.array(x), y=np.array(y), lines=numbers)


@pytest.mark.parametrize(("width", "height"), [(256, 144), (128, 72), (512, 288)])
def test_the_ball_is_drawn_where_the_label_says_at_any_size(width: int, height: int) -> None:
    x, y = 500.0, 300.0
    pictures = [
        render_missing("one", labels_at([x], [y], [seen]), (1280, 720)).read(0, width, height) for seen in (1, 0)
    ]
    shown, hidden = (picture.astype(float).mean(axis=-1) for picture in pictures)
    change = shown - hidden
    rows, columns = np.indices(change.shape)
    centre = [(change * places).sum() / change.sum() for places in (columns, rows)]
    assert centre == pytest.approx([(x + 0.5) * width / 1280 - 0.5, (y + 0.5) * height / 720 - 0.5], abs=0.1)


def test_simulated_games_have_hidden_blurred_and_absent_balls() -> None:
    seen = np.concatenate([clip.visibility for clip in simulated_clips(replace(VIDEO, games=5, clips=2, frames=40))])
    assert np.bincount(seen, minlength=4).min() > 0


def test_a_picture_does_not_depend_on_those_read_before() -> None:
    one, other = (simulated_clips(VIDEO)[0].pictures for _ in range(2))
    for position in (3, 1, 7):
        one.read(position, 64, 36)
    assert np.array_equal(one.read(5, 64, 36), other.read(5, 64, 36))
    assert not np.array_equal(one.read(5, 64, 36), one.read(6, 64, 36))


@needs_rallies
def test_a_real_rally_without_pictures_is_rendered() -> None:
    path = RALLIES / "match1_1_09_06_ball.csv"
    (clip,) = read_clips(TrackNetDatasetSettings(path=str(path), render_missing_frames=True), render_missing)
    picture = clip.pictures.read(20, 256, 144).astype(float).mean(axis=-1)
    x, y = round(clip.x[20] / 5), round(clip.y[20] / 5)
    assert picture[y - 1 : y + 2, x - 1 : x + 2].max() > 180
