"""Label files of both layouts, the pictures beside them, and the sets that clips are divided into."""

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from can_train.errors import DataError, MissingDataError
from can_train.reporter import SilentReporter
from can_train_tasks.tracknet.clips import FrameReader, Labels, read_clips, read_labels, split_clips
from can_train_tasks.tracknet.rendering import render_missing
from can_train_tasks.tracknet.settings import TrackNetDatasetSettings
from tasks.tracknet.conftest import RALLIES, needs_rallies

TRACKNET = "file name,visibility,x-coordinate,y-coordinate,status\n"
RALLY = "Frame,Visibility,X,Y\n"


def write_clip(folder: Path, rows: str, pictures: int, suffix: str = ".jpg") -> Path:
    folder.mkdir(parents=True)
    for number in range(pictures):
        Image.fromarray(np.full((36, 64, 3), number * 20, np.uint8)).save(folder / f"{number:04d}{suffix}")
    (folder / "Label.csv").write_text(TRACKNET + rows)
    return folder


def read(path: Path, **settings: object) -> list:
    return read_clips(TrackNetDatasetSettings(path=str(path), **settings), render_missing)


def test_the_folders_of_tracknet_are_read(tmp_path: Path) -> None:
    rows = "0000.jpg,1,10,20,0\n0001.jpg,0,,,\n0002.jpg,2,12.5,21,1\n0003.jpg,3,,,\n0004.jpg,3,99,21,2\n"
    for name in ("game1/Clip10", "game1/Clip9", "game10/Clip1", "game2/Clip1"):
        write_clip(tmp_path / name, rows, 5)
    clips = read(tmp_path)
    assert [clip.name for clip in clips] == ["game1/Clip9", "game1/Clip10", "game2/Clip1", "game10/Clip1"]
    assert [clip.group for clip in clips] == ["game1", "game1", "game2", "game10"]
    clip = clips[0]
    assert clip.size == (64, 36)
    assert clip.visibility.tolist() == [1, 0, 2, 3, 3]
    assert clip.x.tolist()[:3] == [10.0, 0.0, 12.5]
    assert clip.y.tolist()[:3] == [20.0, 0.0, 21.0]


def test_a_clip_beside_the_folders_of_games_is_read(tmp_path: Path) -> None:
    for name in ("game1/Clip1", "Clip2"):
        write_clip(tmp_path / name, "0000.jpg,0,,,\n", 1)
    assert [clip.name for clip in read(tmp_path)] == [f"{tmp_path.name}/Clip2", "game1/Clip1"]


def test_pictures_may_be_png_where_labels_say_jpg(tmp_path: Path) -> None:
    write_clip(tmp_path / "game1/Clip1", "0000.jpg,1,10,20,0\n", 1, suffix=".png")
    assert read(tmp_path)[0].pictures.read(0, 32, 16).shape == (16, 32, 3)


@pytest.mark.parametrize("folder", ["one_ball", "one"])
def test_pictures_of_a_rally_lie_in_a_folder_of_its_name_beside_it_or_elsewhere(tmp_path: Path, folder: str) -> None:
    (tmp_path / "one_ball.csv").write_text(RALLY + "3,1,10,20\n4,0,0,0\n")
    for place, settings in ((tmp_path, {}), (tmp_path / "else", {"frames": str(tmp_path / "else")})):
        pictures = place / folder
        pictures.mkdir(parents=True)
        for number in (3, 4):
            Image.new("RGB", (64, 36), (number, 0, 0)).save(pictures / f"{number}.png")
        (clip,) = read(tmp_path / "one_ball.csv", **settings)
        assert (clip.name, clip.size, len(clip)) == ("one_ball", (64, 36), 2)
        assert clip.pictures.read(1, 4, 4)[0, 0].tolist() == [4, 0, 0]
        shutil.rmtree(pictures)


def test_coordinates_may_belong_to_larger_pictures(tmp_path: Path) -> None:
    write_clip(tmp_path / "game1/Clip1", "0000.jpg,1,640,360,0\n", 1)
    with pytest.raises(DataError, match=r"Label.csv:2: 640,360"):
        read(tmp_path)
    (clip,) = read(tmp_path, label_width=1280, label_height=720)
    assert clip.size == (1280, 720)


BROKEN = [
    ("x.jpg,1,1,1,0\n", 2, "by a number"),
    ("0.0,0,,,\n1.5,1,1,1,0\n", 3, "by a number"),
    ("0000.jpg,4,1,1,0\n", 2, "0, 1, 2 or 3"),
    ("0000.jpg,,1,1,0\n", 2, "0, 1, 2 or 3"),
    ("0000.jpg,1,1\n", 2, "two coordinates"),
    ("0000.jpg,0,,,\n0001.jpg,2,a,1,0\n", 3, "two coordinates"),
    ("0000.jpg,1,nan,1,0\n", 2, "two coordinates"),
    ("0001.jpg,0,,,\n\n0001.jpg,0,,,\n", 4, "ascending"),
    ("0000.jpg,1,-1,3,0\n", 2, "inside"),
    ("0000.jpg,1,1,37,0\n", 2, "inside"),
    ("0000.jpg,0,,,\n0009.jpg,0,,,\n", 3, "has its picture"),
]


@pytest.mark.parametrize(("rows", "line", "rule"), BROKEN, ids=[rule for *_, rule in BROKEN])
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, rows: str, line: int, rule: str) -> None:
    folder = write_clip(tmp_path / "game1/Clip1", rows, 2)
    with pytest.raises(DataError) as found:
        read(tmp_path)
    assert rule in found.value.rule
    assert found.value.value.startswith(f"{folder / 'Label.csv'}:{line}: ")
    assert found.value.remedy


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", TRACKNET])
def test_a_file_that_is_no_label_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "Label.csv").write_text(text)
    with pytest.raises(DataError, match=r"Label\.csv"):
        read_labels(tmp_path / "Label.csv")


def test_missing_data_are_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="--dataset synthetic"):
        read(tmp_path)
    (tmp_path / "one_ball.csv").write_text(RALLY + "0,1,10,20\n")
    with pytest.raises(MissingDataError, match="render_missing_frames=true"):
        read(tmp_path)
    (clip,) = read(tmp_path, render_missing_frames=True)
    assert clip.size == (1280, 720)


def test_a_file_that_is_no_picture_is_named(tmp_path: Path) -> None:
    folder = write_clip(tmp_path / "game1/Clip1", "0000.jpg,0,,,\n0001.jpg,0,,,\n", 2)
    (folder / "0001.jpg").write_bytes(b"no picture")
    (clip,) = read(tmp_path)
    with pytest.raises(DataError, match=r"0001\.jpg"):
        clip.pictures.read(1, 8, 8)


def test_pictures_of_several_sizes_in_a_clip_are_refused(tmp_path: Path) -> None:
    folder = write_clip(tmp_path / "game1/Clip1", "0000.jpg,1,2,3,1\n0001.jpg,1,2,3,1\n", 2)
    Image.new("RGB", (128, 72)).save(folder / "0001.jpg")
    (clip,) = read(tmp_path)
    with pytest.raises(DataError, match=r"0001\.jpg: 128 × 72, 0000\.jpg 64 × 36"):
        clip.pictures.read(1, 8, 8)


ROW = st.one_of(
    st.tuples(st.just(0), st.none(), st.none()),
    st.tuples(st.integers(1, 3), st.integers(0, 1280), st.integers(0, 720)),
)


@given(rows=st.lists(ROW, min_size=1, max_size=20), gaps=st.lists(st.integers(1, 3), min_size=20, max_size=20))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list, gaps: list[int]) -> None:
    numbers = np.cumsum(gaps)[: len(rows)].tolist()
    files = tmp_path_factory.mktemp("labels")
    cells = [("", "") if x is None else (x, y) for _, x, y in rows]
    tracknet = [f"{n:04d}.jpg,{v},{x},{y}," for n, (v, *_), (x, y) in zip(numbers, rows, cells, strict=True)]
    rally = [f"{n},{v},{x or 0},{y or 0}" for n, (v, *_), (x, y) in zip(numbers, rows, cells, strict=True)]
    for name, head, lines in (("a.csv", TRACKNET, tracknet), ("b.csv", RALLY, rally)):
        (files / name).write_text(head + "\r\n".join(lines))
        labels = read_labels(files / name)
        assert labels.numbers.tolist() == numbers
        assert labels.visibility.tolist() == [v for v, *_ in rows]
        assert labels.x.tolist() == [x or 0 for _, x, _ in rows]
        assert labels.y.tolist() == [y or 0 for *_, y in rows]
        assert labels.lines.tolist() == list(range(2, len(rows) + 2))


@pytest.mark.parametrize("cached", [True, False])
def test_an_input_is_a_picture_after_the_two_before_it_in_its_sequence(tmp_path: Path, cached: bool) -> None:
    rows = "".join(f"{number:04d}.jpg,0,,,\n" for number in (0, 1, 2, 5, 6))
    write_clip(tmp_path / "game1/Clip1", rows, 7, suffix=".png")
    (clip,) = read(tmp_path)
    reader = FrameReader(8, 4, cache=tmp_path / "cache")
    if cached:
        reader.prepare([clip], SilentReporter())
    seen = [(reader.read(clip, position)[:, 0, 0, 0] // 20).tolist() for position in range(5)]
    assert seen == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [5, 5, 5], [5, 5, 6]]


def test_prepared_pictures_are_found_again_and_those_that_changed_made_anew(tmp_path: Path) -> None:
    folder = write_clip(tmp_path / "game1/Clip1", "0000.jpg,0,,,\n", 1, suffix=".png")
    for color in (0, 0, 90):
        if color:
            Image.new("RGB", (64, 36), (color, 0, 0)).save(folder / "0000.png")
        reader = FrameReader(8, 4, cache=tmp_path / "cache")
        (clip,) = read(tmp_path)
        reader.prepare([clip], SilentReporter())
        assert reader.read(clip, 0).max() == color
    assert len(list((tmp_path / "cache").iterdir())) == 2


def clips_of(tmp_path: Path, names: list[str], length: int = 3) -> list:
    rows = "".join(f"{number:04d}.jpg,0,,,\n" for number in range(length))
    for name in names:
        write_clip(tmp_path / name, rows, length)
    return read(tmp_path)


def test_games_stay_whole_where_there_are_three_and_clips_otherwise(tmp_path: Path) -> None:
    games = clips_of(tmp_path / "a", [f"game{game}/Clip{clip}" for game in (1, 2, 3, 4) for clip in (1, 2)])
    parts = split_clips(games, validation=0.2, test=0.2)
    assert {name: [clip.name for clip, *_ in part] for name, part in parts.items()} == {
        "train": ["game1/Clip1", "game1/Clip2", "game2/Clip1", "game2/Clip2"],
        "validation": ["game3/Clip1", "game3/Clip2"],
        "test": ["game4/Clip1", "game4/Clip2"],
    }
    clips = clips_of(tmp_path / "b", [f"game1/Clip{clip}" for clip in (1, 2, 3)])
    parts = split_clips(clips, validation=0.2, test=0.2)
    assert [[clip.name for clip, *_ in part] for part in parts.values()] == [[f"game1/Clip{n}"] for n in (1, 2, 3)]


@given(length=st.integers(60, 400), shares=st.tuples(*[st.floats(0.05, 0.3)] * 2))
def test_a_single_clip_is_cut_so_that_no_input_reaches_into_another_set(
    length: int, shares: tuple[float, float]
) -> None:
    column = np.arange(length)
    labels = Labels(numbers=column, visibility=0 * column, x=0.0 * column, y=0.0 * column, lines=column)
    clip = labels.clip(name="a", group="a", size=(64, 36), pictures=render_missing("a", labels, (64, 36)))
    parts = split_clips([clip], validation=shares[0], test=shares[1])
    spans = [(start, stop) for part in parts.values() for _, start, stop in part]
    assert spans[0][0] == 0
    assert spans[-1][1] == length
    assert all(after - 2 >= before for (_, before), (after, _) in pairwise(spans))


@needs_rallies
def test_real_rallies_are_read() -> None:
    clips = read(RALLIES, render_missing_frames=True)
    assert len(clips) == 8
    assert sum(map(len, clips)) == 3_320
    assert sum(int((clip.visibility == 1).sum()) for clip in clips) == 2_872
