"""The folders of TrackNetV3: matches in sets, corrected labels, videos in place of pictures, backgrounds."""

import pickle
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from can_train.errors import ConfigError, DataError, MissingDataError
from can_train.training.sample_task import TaskContext
from can_train_tasks.tracknet.clips import Clip, FrameReader, VideoPictures, read_clips, split_clips, unlabelled_clips
from can_train_tasks.tracknet.rendering import render_missing
from can_train_tasks.tracknet.settings import TrackNetDatasetSettings, TrackNetSettings, UNetSettings
from can_train_tasks.tracknet.task import TrackNetTask

SIZE = (64, 36)
RALLY = "Frame,Visibility,X,Y\n"


def pictures(count: int, seed: int = 0, step: int = 4) -> list[Image.Image]:
    drawn = np.random.default_rng(seed)
    court = drawn.integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    made = []
    for number in range(count):
        picture = court.copy()
        picture[10:14, step * number % 60 : step * number % 60 + 4] = 255
        made.append(Image.fromarray(picture))
    return made


def write_video(path: Path, frames: list[Image.Image], *, codec: str = "ffv1", **options: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30)
        stream.width, stream.height = SIZE
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        stream.codec_context.gop_size = 5
        stream.options = options
        for image in frames:
            for packet in stream.encode(av.VideoFrame.from_image(image)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def write_labels(path: Path, count: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RALLY + "".join(f"{number},1,{4 * number % 60},12\n" for number in range(count)))
    return path


def write_frames(folder: Path, frames: list[Image.Image]) -> None:
    folder.mkdir(parents=True)
    for number, image in enumerate(frames):
        image.save(folder / f"{number}.png")


def published_tree(folder: Path) -> Path:
    """As the readme of TrackNetV3 draws it; some matches have pictures, the others videos."""
    for name, count in (("train/match1", 12), ("train/match2", 12), ("val/match1", 8), ("test/match1", 8)):
        for rally in ("1_01_00", "1_02_00"):
            write_labels(folder / name / "csv" / f"{rally}_ball.csv", count)
            if name == "train/match1":
                write_frames(folder / name / "frame" / rally, pictures(count))
            else:
                write_video(folder / name / "video" / f"{rally}.mkv", pictures(count))
    return folder


def read(path: Path, **settings: object) -> list[Clip]:
    return read_clips(TrackNetDatasetSettings(path=str(path), **settings), render_missing)  # type: ignore[arg-type]


def test_all_matches_of_the_published_tree_are_read_into_their_sets(tmp_path: Path) -> None:
    clips = read(published_tree(tmp_path))
    assert [(clip.name, clip.group, clip.belongs_to) for clip in clips[:4]] == [
        ("test/match1/1_01_00_ball", "test/match1", "test"),
        ("test/match1/1_02_00_ball", "test/match1", "test"),
        ("train/match1/1_01_00_ball", "train/match1", "train"),
        ("train/match1/1_02_00_ball", "train/match1", "train"),
    ]
    sets = split_clips(clips, validation=0.2, test=0.2)
    assert {name: [clip.group for clip, *_ in parts] for name, parts in sets.items()} == {
        "train": ["train/match1"] * 2 + ["train/match2"] * 2,
        "validation": ["val/match1"] * 2,
        "test": ["test/match1"] * 2,
    }


def test_without_a_folder_for_validation_a_share_of_training_is_kept_and_the_rest_trains(tmp_path: Path) -> None:
    for name in ("train/match1", "train/match2", "train/match3", "train/match4", "test/match1"):
        write_labels(tmp_path / name / "csv" / "1_ball.csv", 9)
    clips = read(tmp_path, render_missing_frames=True)
    sets = split_clips(clips, validation=0.2, test=0.2)
    groups = {name: {clip.group for clip, *_ in parts} for name, parts in sets.items()}
    assert groups["test"] == {"test/match1"}
    assert len(groups["validation"]) == 1
    assert groups["train"] | groups["validation"] == {f"train/match{number}" for number in range(1, 5)}
    assert not groups["train"] & groups["validation"]
    # Not copies, whose prepared pictures a reader would not know.
    assert all(clip in clips for parts in sets.values() for clip, *_ in parts)


def test_the_folders_of_sets_have_several_names_and_a_match_in_another_folder_is_refused(tmp_path: Path) -> None:
    for name in ("Train/match1", "Train/match2", "valid/match3", "test/match4"):
        write_labels(tmp_path / name / "csv" / "1_ball.csv", 9)
    sets = split_clips(read(tmp_path, render_missing_frames=True), validation=0.2, test=0.2)
    assert {name: [clip.group for clip, *_ in parts] for name, parts in sets.items()} == {
        "train": ["Train/match1", "Train/match2"], "validation": ["valid/match3"], "test": ["test/match4"],
    }  # fmt: skip
    write_labels(tmp_path / "extra/match5/csv/1_ball.csv", 9)
    with pytest.raises(DataError, match="1 of 5 clips are not, such as extra/match5/1_ball"):
        split_clips(read(tmp_path, render_missing_frames=True), validation=0.2, test=0.2)


def test_a_match_beside_the_folders_of_matches_is_read_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    for name in ("hall/match1", "park/match1", "match3"):
        write_labels(tmp_path / name / "csv" / "1_ball.csv", 9)
    clips = read(tmp_path, render_missing_frames=True)
    assert [clip.group for clip in clips] == ["hall/match1", "match3", "park/match1"]
    assert len({clip.name for clip in clips}) == 3


def test_one_folder_of_matches_is_divided_by_match(tmp_path: Path) -> None:
    for number in range(1, 4):
        write_labels(tmp_path / f"match{number}" / "csv" / "1_ball.csv", 9)
    clips = read(tmp_path, render_missing_frames=True)
    assert [clip.group for clip in clips] == ["match1", "match2", "match3"]
    assert {name: len(parts) for name, parts in split_clips(clips, validation=0.2, test=0.2).items()} == {
        "train": 1, "validation": 1, "test": 1,
    }  # fmt: skip


def test_corrected_labels_are_read_in_place_of_the_first_ones(tmp_path: Path) -> None:
    write_labels(tmp_path / "match1/csv/1_ball.csv", 9)
    (tmp_path / "match1/corrected_csv").mkdir()
    (tmp_path / "match1/corrected_csv/1_ball.csv").write_text(RALLY + "0,1,7,8\n")
    (clip,) = read(tmp_path, render_missing_frames=True)
    assert (clip.x.tolist(), clip.y.tolist(), clip.group) == ([7.0], [8.0], "match1")


def test_a_video_has_the_pictures_that_are_extracted_from_it(tmp_path: Path) -> None:
    frames = pictures(17)
    video = VideoPictures(write_video(tmp_path / "a.mkv", frames))
    assert len(video) == 17
    assert video.size() == SIZE
    order = [*range(17), 3, 16, 0, 5, 6, 4]
    for position in order:
        wanted = frames[position].resize((32, 18), Image.Resampling.BILINEAR)
        assert np.array_equal(video.read(position, 32, 18), np.asarray(wanted))


def test_pictures_between_key_pictures_are_found_in_any_order(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", pictures(23), codec="mpeg4")
    in_order = [VideoPictures(path).read(0, *SIZE)]
    video = VideoPictures(path)
    in_order = [video.read(position, *SIZE) for position in range(23)]
    assert len({picture.tobytes() for picture in in_order}) > 10
    for position in (22, 7, 8, 0, 14):
        assert np.array_equal(VideoPictures(path).read(position, *SIZE), in_order[position])
        assert np.array_equal(video.read(position, *SIZE), in_order[position])


def as_decoded(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [np.asarray(frame.to_image()) for frame in container.decode(video=0)]


def cut_without_encoding(path: Path, first: int) -> Path:
    """As editors do it: the packets from the key picture on, and the note that the picture `first` is shown first."""
    cut = path.with_name(f"cut{path.suffix}")
    with av.open(str(path)) as whole, av.open(str(cut), "w") as container:
        stream = container.add_stream_from_template(whole.streams.video[0])
        start = sorted(packet.pts for packet in whole.demux(video=0) if packet.pts is not None)[first]
        whole.seek(start, stream=whole.streams.video[0])
        for packet in whole.demux(video=0):
            if packet.dts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - start, packet.dts - start, stream
                container.mux(packet)
    return cut


# In open groups, pictures before a key picture need pictures of the group before.
OPEN = {"bf": "3", "x264-params": "open-gop=1:keyint=6:min-keyint=6:scenecut=0"}
# The file, the encoder, its options, and the picture at which the file is cut.
VIDEOS = {
    "cut inside a group": ("a.mp4", "libx264", {}, 8),
    "AVI": ("a.avi", "libx264", {}, 0),
    "AVI of another encoder": ("a.avi", "mpeg4", {"bf": "2"}, 0),
    "AVI without reordering": ("a.avi", "libx264", {"bf": "0"}, 0),
    "Matroska": ("a.mkv", "libx264", {}, 0),
    "open groups": ("a.mp4", "libx264", OPEN, 0),
    "cut at an open group": ("a.mkv", "libx264", OPEN, 6),
}


@pytest.mark.parametrize("kind", VIDEOS)
def test_a_video_has_the_pictures_that_a_decoder_shows(tmp_path: Path, kind: str) -> None:
    name, codec, options, first = VIDEOS[kind]
    path = write_video(tmp_path / name, pictures(30, step=2), codec=codec, **options)
    path = cut_without_encoding(path, first) if first else path
    shown, video = as_decoded(path), VideoPictures(path)
    assert len(video) == len(shown)
    # The bright square tells the number of a picture in the whole video.
    squares = [int(np.convolve(picture[10:14].sum(axis=(0, 2)), np.ones(4), "valid").argmax()) for picture in shown]
    assert squares == [2 * (number + 30 - len(shown)) for number in range(len(shown))]
    for position in (*range(len(shown)), 9, 3, 12, 0):
        assert np.array_equal(video.read(position, *SIZE), shown[position])
    for position in range(len(shown)):
        assert np.array_equal(VideoPictures(path).read(position, *SIZE), shown[position])


def test_a_video_is_read_by_another_process(tmp_path: Path) -> None:
    video = VideoPictures(write_video(tmp_path / "a.mkv", pictures(4)))
    first = video.read(2, *SIZE)
    assert np.array_equal(pickle.loads(pickle.dumps(video)).read(2, *SIZE), first)


def test_a_file_that_is_no_video_is_named(tmp_path: Path) -> None:
    write_labels(tmp_path / "match1/csv/1_ball.csv", 3)
    broken = tmp_path / "match1/video/1.mp4"
    broken.parent.mkdir()
    broken.write_bytes(b"no video" * 100)
    with pytest.raises(DataError, match=f"A video cannot be read: {broken}: "):
        read(tmp_path)


def test_a_row_behind_the_end_of_a_video_is_named(tmp_path: Path) -> None:
    labels = write_labels(tmp_path / "match1/csv/1_ball.csv", 5)
    video = write_video(tmp_path / "match1/video/1.mkv", pictures(4))
    with pytest.raises(MissingDataError, match=f"{labels}:6: {video} has no picture 4") as caught:
        read(tmp_path)
    assert caught.value.remedy == "Remove the row, or bring the whole video"


def test_labels_with_neither_pictures_nor_video_say_where_both_are_looked_for(tmp_path: Path) -> None:
    write_labels(tmp_path / "match1/csv/1_ball.csv", 3)
    with pytest.raises(MissingDataError, match=r"there is no .*match1/csv/1 and no 1\.mp4"):
        read(tmp_path)


def test_the_background_of_a_game_is_the_median_of_its_pictures(tmp_path: Path) -> None:
    clips = read(published_tree(tmp_path))
    reader = FrameReader(*SIZE)
    reader.prepare_backgrounds(clips)
    court = np.asarray(pictures(1)[0])
    still = np.ones(SIZE[::-1], np.bool_)
    still[10:14] = False
    for clip in clips:
        assert np.array_equal(reader.background(clip)[still], court[still])


def task_on(path: Path, cache: Path, background: str) -> TrackNetTask:
    dataset = TrackNetDatasetSettings(path=str(path), width=32, height=16, background=background)
    model = UNetSettings(width=4, levels=2)
    return TrackNetTask(TaskContext(settings=TrackNetSettings(), dataset=dataset, model=model, cache=cache))


@pytest.mark.parametrize(("background", "channels"), [("off", 9), ("concat", 12), ("subtract", 9)])
def test_a_background_is_an_input_or_taken_from_each_picture(tmp_path: Path, background: str, channels: int) -> None:
    task = task_on(published_tree(tmp_path / "data"), tmp_path / "cache", background)
    moments = task.sets["train"][3:5]
    batch = task.collate(moments)
    assert batch["pictures"].shape == (2, 16, 32, channels)
    assert task.heatmaps(task.build_model().double(), batch).shape == (2, 16, 32)
    seen, court = task.frames.read(moments[0].clip, moments[0].position), task.frames
    wanted = {
        "off": [*seen],
        "concat": [*seen, court.background(moments[0].clip) if background == "concat" else seen[0]],
        "subtract": [np.abs(each.astype(int) - court.background(moments[0].clip).astype(int)) for each in seen]
        if background == "subtract" else [],
    }  # fmt: skip
    assert np.array_equal(batch["pictures"][0].numpy(), np.concatenate(wanted[background], axis=-1))


def test_a_background_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Unknown value of dataset\.background: 'median'"):
        TrackNetDatasetSettings(background="median")


def test_a_video_without_labels_is_one_clip(tmp_path: Path) -> None:
    path = write_video(tmp_path / "rally.mp4", pictures(6), codec="mpeg4")
    (clip,) = unlabelled_clips(TrackNetDatasetSettings(path=str(path)))
    assert (clip.name, clip.numbers.tolist(), clip.size) == ("rally", [0, 1, 2, 3, 4, 5], SIZE)


def test_videos_below_a_folder_without_pictures_are_a_clip_each(tmp_path: Path) -> None:
    for name in ("a/1.mkv", "a/2.mkv", "b/1.mkv"):
        write_video(tmp_path / name, pictures(4))
    clips = unlabelled_clips(TrackNetDatasetSettings(path=str(tmp_path)))
    assert [(clip.name, len(clip)) for clip in clips] == [("a/1.mkv", 4), ("2", 4), ("b/1.mkv", 4)]
    write_frames(tmp_path / "c" / "0", pictures(2))
    assert [clip.name for clip in unlabelled_clips(TrackNetDatasetSettings(path=str(tmp_path)))] == ["0"]
