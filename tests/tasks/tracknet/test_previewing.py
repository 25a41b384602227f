"""`can-train predict --preview`: pictures and videos of the reported ball and its last positions."""

import csv
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from can_train.cli.main import main
from can_train.errors import StateError
from can_train.training.prediction_files import open_preview
from can_train_tasks.tracknet.clips import Clip, FilePictures, Labels, Picture
from can_train_tasks.tracknet.preview import BallPreview, Place, marked, open_sheet

SIZE = (96, 54)
RED, YELLOW = (255, 0, 0), (255, 220, 0)
GREY = 90


class Sheets(list[Picture]):
    """Keeps the pictures that it receives."""

    def size(self, clip: Clip) -> tuple[int, int]:
        return clip.size

    def write(self, picture: Picture, clip: Clip, position: int) -> None:
        self.append(picture)


def write_pictures(folder: Path, count: int, *, size: tuple[int, int] = SIZE) -> list[Path]:
    """Grey pictures with a bright ball that flies to the right."""
    folder.mkdir(parents=True)
    paths = [folder / f"{number}.png" for number in range(count)]
    for number, path in enumerate(paths):
        picture = np.full((size[1], size[0], 3), GREY, np.uint8)
        picture[26:30, 4 * number % 90 : 4 * number % 90 + 4] = 255
        Image.fromarray(picture).save(path)
    return paths


def clip_of(folder: Path, numbers: Sequence[int], name: str = "rally") -> Clip:
    paths, nothing = write_pictures(folder / name, len(numbers)), np.zeros(len(numbers))
    labels = Labels(numbers=np.array(numbers), visibility=nothing.astype(np.int64), x=nothing, y=nothing,
                    lines=nothing.astype(np.int64))  # fmt: skip
    return labels.clip(name=name, group="", size=SIZE, pictures=FilePictures(paths))


def places_of(picture: Picture, color: tuple[int, int, int]) -> tuple[float, float] | None:
    """The middle of the pixels of a colour."""
    rows, columns = np.nonzero((picture == color).all(axis=-1))
    return (float(columns.mean()), float(rows.mean())) if len(rows) else None


def drawn(clips: Sequence[Clip], balls: Sequence[Place | None], trail: int = 8) -> list[Picture]:
    sheet = Sheets()
    preview, left = BallPreview(sheet, trail), iter(balls)
    for clip in clips:
        for position in range(len(clip)):
            preview.draw(clip, position, next(left))
    return sheet


def test_a_ring_is_around_the_ball_and_dots_are_at_the_positions_before(tmp_path: Path) -> None:
    first, second, third = drawn([clip_of(tmp_path, range(3))], [(20, 15), (40, 15), (60, 20)])
    assert places_of(first, RED) == pytest.approx((20, 15), abs=0.5)
    assert places_of(first, YELLOW) is None
    assert places_of(second, RED) == pytest.approx((40, 15), abs=0.5)
    assert places_of(second, YELLOW) == pytest.approx((20, 15), abs=0.5)
    assert places_of(third, RED) == pytest.approx((60, 20), abs=0.5)


def test_a_picture_without_a_ball_has_no_ring_and_the_dots_go_on(tmp_path: Path) -> None:
    _, second, third = drawn([clip_of(tmp_path, range(3))], [(20, 15), None, None], trail=2)
    assert places_of(second, RED) is None
    assert places_of(second, YELLOW) == pytest.approx((20, 15), abs=0.5)
    assert (third == np.asarray(Image.open(tmp_path / "rally" / "2.png"))).all()


@pytest.mark.parametrize("numbers", [(0, 1, 7, 8), (3, 4, 9, 10)])
def test_dots_end_where_pictures_are_missing(tmp_path: Path, numbers: Sequence[int]) -> None:
    pictures = drawn([clip_of(tmp_path, numbers)], [(20, 15), (40, 15), (60, 15), (80, 15)])
    assert [places_of(picture, YELLOW) is not None for picture in pictures] == [False, True, False, True]


def test_dots_do_not_go_from_clip_to_clip(tmp_path: Path) -> None:
    clips = [clip_of(tmp_path, range(2), name) for name in ("a", "b")]
    pictures = drawn(clips, [(20, 15), (40, 15), (60, 15), (80, 15)])
    assert [places_of(picture, YELLOW) is not None for picture in pictures] == [False, True, False, True]


def test_a_mark_at_the_edge_stays_in_the_picture() -> None:
    grey = np.full((SIZE[1], SIZE[0], 3), GREY, np.uint8)
    assert marked(grey, [(0.0, 0.0)]).shape == grey.shape
    assert (grey == GREY).all()


def test_a_video_of_clips_of_two_sizes_has_the_size_of_the_first(tmp_path: Path) -> None:
    small, large = clip_of(tmp_path, range(2), "small"), clip_of(tmp_path, range(2), "large")
    write_pictures(tmp_path / "wide", 2, size=(192, 108))
    large = Clip(**{**vars(large), "size": (192, 108), "pictures": FilePictures([*(tmp_path / "wide").iterdir()])})
    with open_sheet(tmp_path / "out.mp4", is_one_clip=False) as sheet:
        preview = BallPreview(sheet, 8)
        for clip, ball in ((small, (20.0, 15.0)), (large, (40.5, 30.5))):
            preview.draw(clip, 0, ball)
    pictures = decoded(tmp_path / "out.mp4")
    assert [picture.shape for picture in pictures] == [(54, 96, 3)] * 2
    for picture in pictures:
        assert reddest(picture) == pytest.approx((20, 15), abs=3)


def test_clips_of_like_names_have_a_folder_each(tmp_path: Path) -> None:
    clips = [clip_of(tmp_path, range(1), name) for name in ("a/b", "a-b")]
    (tmp_path / "out").mkdir()
    with open_sheet(tmp_path / "out", is_one_clip=False) as sheet:
        for clip in clips:
            BallPreview(sheet, 8).draw(clip, 0, (20.0, 15.0))
    files = sorted(file.relative_to(tmp_path / "out").as_posix() for file in (tmp_path / "out").rglob("*.png"))
    assert files == ["a-b/0.png", "a/b/0.png"]


def decoded(path: Path) -> list[Picture]:
    with av.open(str(path)) as container:
        return [np.asarray(frame.to_image()) for frame in container.decode(video=0)]


def reddest(picture: Picture) -> tuple[float, float]:
    """The middle of the pixels that are redder than green; compression blurs a ring."""
    red = np.clip(picture[..., 0].astype(float) - picture[..., 1] - 40, 0, None)
    rows, columns = np.indices(red.shape)
    return float((columns * red).sum() / red.sum()), float((rows * red).sum() / red.sum())


# The command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on simulated games, which reports a ball in nearly every picture."""
    folder = tmp_path_factory.mktemp("previews")
    settings = {"dataset.synthetic.games": 3, "dataset.synthetic.clips": 1, "dataset.synthetic.frames": 12,
                "dataset.synthetic.width": 64, "dataset.width": 32, "dataset.height": 18, "model.width": 4,
                "model.levels": 2, "model.groups": 2, "task.threshold": 1e-6}  # fmt: skip
    line = ["--task", "tracknet", "--dataset", "synthetic", "--epochs", "1", "--batch-size", "4", "--precision", "fp32",
            "--device", "cpu", "-q", "--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state"),
            *(word for name, value in settings.items() for word in ("--set", f"{name}={value}"))]  # fmt: skip
    assert main(line) == 0
    (made,) = (folder / "runs").iterdir()
    return made


def predict(run: Path, *words: str | Path, code: int = 0) -> None:
    assert main(["predict", str(run), *map(str, words), "--device", "cpu", "-q"]) == code


def positions(file: Path) -> list[tuple[float, float] | None]:
    with file.open() as lines:
        return [(float(row["X"]), float(row["Y"])) if row["Visibility"] == "1" else None
                for row in csv.DictReader(lines)]  # fmt: skip


def test_a_folder_has_each_picture_with_the_ball_of_the_file(run: Path, tmp_path: Path) -> None:
    write_pictures(tmp_path / "rally", 6)
    predict(run, "--dataset", tmp_path / "rally", "--out", tmp_path / "balls.csv", "--preview", tmp_path / "seen",
            "--set", "task.preview_trail=1")  # fmt: skip
    balls = positions(tmp_path / "balls.csv")
    assert sorted(path.name for path in (tmp_path / "seen").iterdir()) == [f"{number}.png" for number in range(6)]
    for number, ball in enumerate(balls):
        given, shown = (np.asarray(Image.open(folder / f"{number}.png")) for folder in
                        (tmp_path / "rally", tmp_path / "seen"))  # fmt: skip
        assert shown.shape == given.shape
        assert ball is not None
        assert (shown == marked(given, [ball])).all()


def test_nothing_is_marked_where_no_ball_is_reported(run: Path, tmp_path: Path) -> None:
    write_pictures(tmp_path / "rally", 4)
    predict(run, "--dataset", tmp_path / "rally", "--out", tmp_path / "balls.csv", "--preview", f"{tmp_path}/seen/",
            "--set", "task.threshold=1.0")  # fmt: skip
    assert positions(tmp_path / "balls.csv") == [None] * 4
    for number in range(4):
        given, shown = (np.asarray(Image.open(tmp_path / folder / f"{number}.png")) for folder in ("rally", "seen"))
        assert (shown == given).all()


def test_a_preview_may_lie_in_the_folder_of_predictions(run: Path, tmp_path: Path) -> None:
    write_pictures(tmp_path / "rally", 3)
    predict(run, "--dataset", tmp_path / "rally", "--out", f"{tmp_path}/out/", "--preview", tmp_path / "out" / "seen")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rally_ball.csv", "seen"]
    assert len([*(tmp_path / "out" / "seen").iterdir()]) == 3


def test_clips_have_a_folder_each_which_the_reader_takes(run: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_pictures(tmp_path / "rallies" / name, 3)
    predict(run, "--dataset", tmp_path / "rallies", "--preview", tmp_path / "seen", "--out", tmp_path / "out.csv")
    assert sorted(str(path.relative_to(tmp_path / "seen")) for path in (tmp_path / "seen").rglob("*.png")) == [
        f"{name}/{number}.png" for name in ("a", "b") for number in range(3)
    ]
    predict(run, "--dataset", tmp_path / "seen", "--out", tmp_path / "again.csv")
    assert len((tmp_path / "again.csv").read_text().splitlines()) == 7


def test_a_video_is_previewed_as_a_video_of_its_size_and_rate(run: Path, tmp_path: Path) -> None:
    frames = write_pictures(tmp_path / "rally", 10)
    with av.open(str(tmp_path / "rally.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(25))
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        for path in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(Image.open(path))))
        container.mux(stream.encode())
    (tmp_path / "seen.mp4").write_text("an earlier file")
    predict(run, "--dataset", tmp_path / "rally.mp4", "--out", tmp_path / "balls.csv",
            "--preview", tmp_path / "seen.mp4", "--batch-size", "4", "--set", "task.preview_trail=1")  # fmt: skip
    with av.open(str(tmp_path / "seen.mp4")) as container:
        assert container.streams.video[0].average_rate == 25
    pictures, balls = decoded(tmp_path / "seen.mp4"), positions(tmp_path / "balls.csv")
    assert len(pictures) == len(balls) == 10
    for picture, ball in zip(pictures, balls, strict=True):
        assert picture.shape == (54, 96, 3)
        assert ball is not None
        # Rings at an edge are cut off.
        if 5 < ball[0] < 90 and 5 < ball[1] < 48:
            assert reddest(picture) == pytest.approx(ball, abs=3)


def test_the_own_test_pictures_of_a_run_are_previewed(run: Path, tmp_path: Path) -> None:
    predict(run, "--out", tmp_path / "out.csv", "--preview", tmp_path / "seen")
    assert [path.name for path in (tmp_path / "seen").glob("*/*")] == ["Clip1"]
    assert len([*(tmp_path / "seen").rglob("*.png")]) == 12


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ("seen.gif", "A preview is a folder of pictures or a video (.mp4)"),
        ("full", "The folder of the preview has files, which are not replaced"),
        ("full/", "The folder of the preview has files, which are not replaced"),
        ("full/0.png/", "The place of the preview is a file"),
        ("rally/seen", "The preview would lie in the data"),
        ("out.csv", "A preview needs a place of its own"),
        ("nowhere/seen", "Make its folder, or name another place with --preview"),
        ("nowhere/seen.mp4", "Make its folder, or name another place with --preview"),
    ],
)
def test_a_place_that_will_not_do_is_refused_and_nothing_is_written(
    run: Path, tmp_path: Path, place: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rally", "full"):
        write_pictures(tmp_path / name, 2)
    before = sorted(tmp_path.rglob("*"))
    predict(run, "--dataset", tmp_path / "rally", "--out", tmp_path / "out.csv", "--preview", f"{tmp_path}/{place}",
            code=2)  # fmt: skip
    assert rule in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_picture_that_cannot_be_read_leaves_no_preview(run: Path, tmp_path: Path) -> None:
    (*_, last) = write_pictures(tmp_path / "rally", 5)
    last.write_bytes(b"no picture")
    for place in ("seen", "seen.mp4"):
        predict(run, "--dataset", tmp_path / "rally", "--out", tmp_path / "out.csv", "--preview", tmp_path / place,
                "--batch-size", "2", code=2)  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["rally"]


@pytest.mark.parametrize("pictures", [2, 300])
def test_a_video_that_finds_no_room_is_told_and_leaves_nothing(tmp_path: Path, pictures: int, no_room: None) -> None:
    clip, place, noise = clip_of(tmp_path, range(1)), tmp_path / "seen.mp4", np.random.default_rng(0)

    @contextmanager
    def opens(path: Path) -> Iterator[Callable[..., object]]:
        with open_sheet(path, is_one_clip=True) as sheet:
            yield lambda *_: sheet.write(noise.integers(0, 256, (54, 96, 3), np.uint8), clip, 0)

    def previewed() -> None:
        with open_preview(str(place), opens) as draw:
            for _ in range(pictures):
                draw([], [])

    # Two pictures are encoded at the end, and 300 on the way.
    with pytest.raises(StateError, match=r"(?s)The preview cannot be written.*seen\.mp4.*--preview"):
        previewed()
    assert [path.name for path in tmp_path.iterdir()] == ["rally"]


@pytest.fixture
def no_room() -> Iterator[None]:
    """No file gets larger than 4 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


STOPS = """
import os, signal, sys
from can_train.cli.main import main
from can_train_tasks.tracknet import preview
draws = []
def draw(self, *arguments, drawn=preview.BallPreview.draw):
    draws.append(0)
    if len(draws) == 9:
        os.kill(os.getpid(), int(sys.argv[1]))
    drawn(self, *arguments)
preview.BallPreview.draw = draw
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "place"),
    [(signal.SIGKILL, "seen"), (signal.SIGKILL, "seen.mp4"), (signal.SIGTERM, "seen"), (signal.SIGINT, "seen.mp4")],
)
def test_a_killed_prediction_leaves_no_half_preview(
    run: Path, tmp_path: Path, number: signal.Signals, place: str
) -> None:
    write_pictures(tmp_path / "rally", 12)
    line = [sys.executable, "-P", "-c", STOPS, str(int(number)), "predict", str(run), "--dataset",
            str(tmp_path / "rally"), "--out", str(tmp_path / "out.csv"), "--preview", str(tmp_path / place),
            "--device", "cpu", "--batch-size", "4"]  # fmt: skip
    ended = subprocess.run(line, capture_output=True, check=False)
    assert ended.returncode in (-number, 128 + number), ended.stderr.decode()
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert left == ["rally"]
    if number != signal.SIGKILL:
        assert len([*tmp_path.iterdir()]) == 1


PEAK = """
import re, sys
from pathlib import Path
from can_train.cli.main import main
assert main(sys.argv[1:]) == 0
# `ru_maxrss` would be at least that of the process that started this one.
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["seen", "seen.mp4"])
def test_a_long_video_takes_the_memory_of_a_short_one(run: Path, tmp_path: Path, place: str) -> None:
    peaks, size = [], (640, 360)
    for count in (60, 200):
        with av.open(str(tmp_path / f"{count}.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=30)
            stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
            for number in range(count):
                picture = np.full((size[1], size[0], 3), number % 256, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        line = [sys.executable, "-P", "-c", PEAK, "predict", str(run), "--dataset", str(tmp_path / f"{count}.mp4"),
                "--out", str(tmp_path / f"{count}.csv"), "--preview", str(tmp_path / f"{count}-{place}"),
                "--batch-size", "32", "--device", "cpu", "--quiet"]  # fmt: skip
        ended = subprocess.run(line, capture_output=True, check=True, text=True, env={**os.environ})
        peaks.append(int(ended.stdout))
    # Several portions of both; 140 pictures of 675 KiB would be 92 MiB.
    assert peaks[1] - peaks[0] < 48 * 1024, f"{peaks[0]:,} KiB, then {peaks[1]:,} KiB"
