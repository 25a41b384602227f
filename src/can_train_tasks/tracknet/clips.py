"""Reads clips of video with the ball's position in each picture, and splits them into training, validation and test.

A label file has one of two layouts: `TrackNet`, or `rally` with one CSV file for each rally.

Shapes: T pictures of a clip; H, W height and width of resized pictures.
"""

import csv
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from can_train.errors import ConfigError, DataError, MissingDataError
from can_train.io.arrays import ArrayWriter, FolderDamageError, discard_folder, read_arrays
from can_train.io.records import is_file, is_folder
from can_train.reporter import Reporter
from can_train_tasks.tracknet.settings import TrackNetDatasetSettings

FRAMES_OF_INPUT: Final = 3
"""Pictures in one input of the network: the two pictures before, then the picture that is searched for the ball."""

ABSENT, EASY, HARD, OCCLUDED = range(4)
"""Values of `visibility`: not in the picture, visible, visible with difficulty (blurred), behind something."""

# Names of the four columns, in lower case: picture, visibility, x, y.
_COLUMNS: Final = {
    "TrackNet": ("file name", "visibility", "x-coordinate", "y-coordinate"),
    "rally": ("frame", "visibility", "x", "y"),
}
# Patterns of label files. The files of all patterns of the first line with a file are read.
_LABEL_FILES: Final = (
    ("game*/Clip*/Label.csv", "Clip*/Label.csv"),
    ("Label.csv",),
    ("*/match*/csv/*_ball.csv", "match*/csv/*_ball.csv"),
    ("csv/*_ball.csv",),
    ("*.csv",),
)
_SUFFIXES: Final = (".png", ".jpg", ".jpeg")
VIDEO_SUFFIXES: Final = (".mp4", ".avi", ".mov", ".mkv", ".webm")
_MATCH_FOLDERS: Final = ("csv", "corrected_csv")  # of the label files of a match
_SET_FOLDERS: Final = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation",
                       "test": "test"}  # fmt: skip
_FEWEST_PARTS: Final = 3  # fewest games or clips that can be split: training, validation and test take one each
_PICTURES_KEPT: Final = 64  # pictures kept in memory when they are read without a cache, for a plan

# Raise it whenever the prepared bytes of a picture change, so that folders of an earlier version are not used.
_CACHE_VERSION: Final = 2

Picture = NDArray[np.uint8]
"""[H, W, 3] red, green and blue."""
Floats = NDArray[np.float64]


class Pictures(Protocol):
    """The T pictures of a clip."""

    def read(self, position: int, width: int, height: int) -> Picture:
        """Returns picture `position`, resized to [height, width, 3]."""

    def identity(self) -> Iterator[str]:
        """Yields texts that together identify the pictures, for the name of their cache folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Clip:
    """Consecutive pictures of one camera.

    Attributes:
        name: Name of the clip in its data set.
        group: Name of the clip's game. The clips of a game are alike and belong to one set.
        size: Width and height in pixels of the labelled pictures, which `x` and `y` refer to.
        visibility: [T] `ABSENT`, `EASY`, `HARD` or `OCCLUDED`.
        x, y: [T] position of the ball in pixels, 0 where the ball has no position.
        starts: [T] first picture of the unbroken sequence that a picture belongs to.
        pictures: The T pictures.
        numbers: [T] number of each picture in its video.
        belongs_to: Name of the set that the clip's folder stands for; empty: the clip is in the folder of no set.
    """

    name: str
    group: str
    size: tuple[int, int]
    visibility: NDArray[np.int64]
    x: Floats
    y: Floats
    starts: NDArray[np.int64]
    pictures: Pictures
    numbers: NDArray[np.int64]
    belongs_to: str = ""

    def __len__(self) -> int:
        return len(self.visibility)


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """The rows of one label file: arrays [T]. `lines` has the number of each row's line in the file."""

    numbers: NDArray[np.int64]
    visibility: NDArray[np.int64]
    x: Floats
    y: Floats
    lines: NDArray[np.int64]
    layout: str = "TrackNet"

    def clip(self, *, name: str, group: str, size: tuple[int, int], pictures: Pictures, belongs_to: str = "") -> Clip:
        """Makes a clip with these labels."""
        breaks = np.flatnonzero(np.diff(self.numbers, prepend=self.numbers[0] - 1) != 1)
        starts = np.zeros(len(self.numbers), np.int64)
        starts[breaks] = breaks
        return Clip(name=name, group=group, size=size, visibility=self.visibility, x=self.x, y=self.y,
                    starts=np.maximum.accumulate(starts), pictures=pictures, numbers=self.numbers,
                    belongs_to=belongs_to)  # fmt: skip


@dataclass(frozen=True, eq=False)
class FilePictures:
    """Pictures of a clip, each in a file."""

    paths: Sequence[Path]

    def read(self, position: int, width: int, height: int) -> Picture:
        """Returns picture `position`, resized to [height, width, 3].

        Raises:
            DataError: The file is not a picture, or has another size than the first picture.
        """
        Image, path, expected = load_pillow(), self.paths[position], self._size
        try:
            with Image.open(path) as image:
                if image.size != expected:
                    # Positions are in pixels of the first picture.
                    raise DataError("All pictures of a clip have the same size", value=f"{path}: {image.size[0]} × "
                                    f"{image.size[1]}, {self.paths[0].name} {expected[0]} × {expected[1]}",
                                    remedy="Extract them from the video once more, in one size")  # fmt: skip
                # Where half or a quarter of its size is enough, a JPEG file is decoded at that size.
                image.draft("RGB", (2 * width, 2 * height))
                small = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        except (OSError, ValueError, SyntaxError) as error:
            raise _no_picture(path, error) from error
        return np.asarray(small, dtype=np.uint8)

    def size(self) -> tuple[int, int]:
        """Returns width and height of the first picture, in pixels."""
        return self._size

    @cached_property
    def _size(self) -> tuple[int, int]:
        try:
            with load_pillow().open(self.paths[0]) as image:
                size: tuple[int, int] = image.size
        except (OSError, ValueError, SyntaxError) as error:
            raise _no_picture(self.paths[0], error) from error
        return size

    def identity(self) -> Iterator[str]:
        """Yields path, size in bytes and modification time of each file."""
        for path in self.paths:
            status = path.stat()
            yield f"{path.absolute()} {status.st_size} {status.st_mtime_ns}"


@dataclass(frozen=True, eq=False)
class VideoPictures:
    """Pictures of a video file, as a decoder shows them, decoded when they are read. A picture is found by its time,
    from the key picture before it; where packets do not tell the times of pictures, by counting from the first picture.
    Pictures in order are decoded once.

    Attributes:
        path: The file.
        numbers: [T] numbers of the pictures in the video; empty: all of them.
    """

    path: Path
    numbers: tuple[int, ...] = ()
    _open: list[Any] = field(default_factory=list, repr=False)  # Decoder, and the time of its next picture

    def __len__(self) -> int:
        return len(self.numbers) or len(self._times)

    @cached_property
    def _times(self) -> Sequence[int]:
        """Time of each picture of the video, in the stream's unit; its number where pictures are counted."""
        if self._packet_times:
            return sorted(self._packet_times)
        with _decoding(self.path), load_av().open(str(self.path)) as container:
            pictures = sum(1 for _ in container.decode(video=0))
        if not pictures:
            raise _no_video(self.path, "it has no pictures")
        return range(pictures)

    @cached_property
    def _packet_times(self) -> list[int]:
        """Times of the packets, in the order of the file; empty where a packet need not be a picture at its time."""
        with _decoding(self.path), load_av().open(str(self.path)) as container:
            is_avi = container.format.name == "avi"
            packets = [(packet.pts, packet.is_keyframe, packet.is_discard)
                       for packet in container.demux(video=0) if packet.size]  # fmt: skip
        times = [time for time, *_ in packets]
        # AVI numbers packets in the order of the file, in which pictures that are decoded early come too early. A
        # decoder does not show pictures that need others before the first key picture.
        if is_avi or None in times or len({*times}) < len(times) or not packets[0][1] or min(times) < times[0]:
            return []
        # An editor that cuts a video without encoding it leaves pictures before the cut, which no player shows.
        return [time for time, _, is_discarded in packets if not is_discarded]

    def read(self, position: int, width: int, height: int) -> Picture:
        """Returns picture `position`, resized to [height, width, 3].

        Raises:
            DataError: The video cannot be decoded.
        """
        number = self.numbers[position] if self.numbers else position
        with _decoding(self.path):
            image = self._decode(number).to_image()
        small = image.resize((width, height), load_pillow().Resampling.BILINEAR)
        return np.asarray(small.convert("RGB"), dtype=np.uint8)

    def _decode(self, number: int) -> Any:
        times, time = self._times, self._times[number]
        is_near = self._open and 0 <= time - self._open[0] <= _FORWARD * (times[-1] - times[0]) / len(times)
        decoders: list[Callable[[], Iterator[tuple[int, Any]]]] = [self._decoded_from_start]
        if self._packet_times:
            decoders.insert(0, lambda: self._decoded_from(time))
        if is_near or (self._open and not self._packet_times and self._open[0] <= time):
            decoders.insert(0, lambda: self._open[1])
        for decoder in decoders:
            for of_frame, frame in (later := decoder()):
                if of_frame == time:
                    self._open[:] = [time + 1, later]
                    return frame
                if of_frame > time:
                    break
        self._open.clear()
        raise _no_video(self.path, f"picture {number} cannot be decoded")

    def _decoded_from(self, time: int) -> Iterator[tuple[int, Any]]:
        """Decodes the pictures from the key picture before a time on. The pictures before a key picture may be missing
        there: in open groups they need pictures of the group before.
        """
        container = load_av().open(str(self.path))
        container.seek(time, stream=container.streams.video[0], backward=True)
        return ((frame.pts, frame) for frame in container.decode(video=0) if frame.pts is not None)

    def _decoded_from_start(self) -> Iterator[tuple[int, Any]]:
        """Decodes all pictures, each with its time, or its number where pictures are counted."""
        frames = load_av().open(str(self.path)).decode(video=0)
        return ((frame.pts, frame) for frame in frames) if self._packet_times else enumerate(frames)

    def size(self) -> tuple[int, int]:
        """Returns width and height of a picture, in pixels."""
        with _decoding(self.path), load_av().open(str(self.path)) as container:
            stream = container.streams.video[0]
            return stream.width, stream.height

    def rate(self) -> Fraction | None:
        """Returns the pictures of a second; None where the file does not say."""
        with _decoding(self.path), load_av().open(str(self.path)) as container:
            rate: Fraction | None = container.streams.video[0].average_rate
        return rate

    def identity(self) -> Iterator[str]:
        """Yields path, size in bytes, modification time and numbers of the pictures."""
        status = self.path.stat()
        yield f"{self.path.absolute()} {status.st_size} {status.st_mtime_ns} {self.numbers}"

    def __getstate__(self) -> dict[str, Any]:
        # A decoder stays in its process.
        return {"path": self.path, "numbers": self.numbers, "_open": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


_FORWARD: Final = 60  # Pictures that are decoded to come to a later one, rather than to look for a key picture


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Turns errors of the decoder in the block into a DataError that names the file."""
    try:
        yield
    except Exception as error:
        # Some of PyAV's errors are of no class of Python's.
        if not isinstance(error, OSError | ValueError | IndexError) and not type(error).__module__.startswith("av."):
            raise
        raise _no_video(path, str(error)) from error


def _no_video(path: Path, why: str) -> DataError:
    remedy = f"Check the file, or encode it anew: ffmpeg -i {path.name} -c:v libx264 new.mp4"
    return DataError("A video cannot be read", value=f"{path}: {why}", remedy=remedy)


def load_av() -> Any:
    """Imports PyAV; raises ConfigError if it is not installed."""
    try:
        import av
    except ImportError as error:
        raise ConfigError("Videos are read and written by PyAV, which is not installed",
                          remedy="Install it: pip install 'can-train[video]'") from error  # fmt: skip
    return av


def load_pillow() -> Any:
    """Imports `PIL.Image`; raises ConfigError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("Pictures are read and written by Pillow, which is not installed",
                          remedy="Install it: pip install 'can-train[tracknet]'") from error  # fmt: skip
    return Image


def _no_picture(path: Path, error: Exception) -> DataError:
    return DataError("A picture cannot be read", value=f"{path}: {error}", remedy="Extract it from the video once more")


def label_files(path: Path) -> list[Path]:
    """Lists the label files of a data set in the order of their names; numbers in names are ordered by value.

    Raises:
        MissingDataError: The path holds no label files.
    """
    if is_file(path):
        return [path]

    def by_numbers(path: Path) -> list[tuple[int, str]]:  # Clip10 comes after Clip9
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]

    for patterns in _LABEL_FILES:
        if files := sorted((file for pattern in patterns for file in path.glob(pattern)), key=by_numbers):
            return [_corrected(file) for file in files]
    raise MissingDataError("A data set of clips has label files", value=f"none in {path}",
                           remedy="Give a folder of game*/Clip*/Label.csv or of train/match*/csv/*_ball.csv, or CSV"
                           " files with the columns Frame,Visibility,X,Y; or --dataset synthetic")  # fmt: skip


def _corrected(path: Path) -> Path:
    """Returns the label file with corrections, which TrackNetV3 has for its test matches; else the file itself."""
    corrected = path.parent.parent / _MATCH_FOLDERS[1] / path.name
    return corrected if path.parent.name == _MATCH_FOLDERS[0] and is_file(corrected) else path


def read_labels(path: Path) -> Labels:
    """Reads a label file of either layout.

    Raises:
        DataError: A row does not fit the layout; the message names file and line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            layout, columns = _layout(path, next(rows, []))
            parsed = [(*_parsed(path, rows.line_num, [row[c] if c < len(row) else "" for c in columns]), rows.line_num)
                      for row in rows if any(cell.strip() for cell in row)]  # fmt: skip
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError("A label file cannot be read", value=f"{path}: {error}", remedy="Check the file") from error
    if not parsed:
        raise DataError("A label file has rows", value=f"{path}: only a header", remedy="Leave the file out")
    numbers, visibility, x, y, lines = (np.array(column) for column in zip(*parsed, strict=True))
    for row in np.flatnonzero(np.diff(numbers) <= 0)[:1]:
        raise _malformed(path, int(lines[row + 1]), "Pictures are numbered in ascending order",
                         f"{numbers[row + 1]} after {numbers[row]}")  # fmt: skip
    return Labels(numbers=numbers, visibility=visibility, x=x, y=y, lines=lines, layout=layout)


def _layout(path: Path, header: Sequence[str]) -> tuple[str, list[int]]:
    names = [name.strip().lower() for name in header]
    for layout, columns in _COLUMNS.items():
        if set(columns) <= set(names):
            return layout, [names.index(column) for column in columns]
    remedy = "Name them file name,visibility,x-coordinate,y-coordinate; or Frame,Visibility,X,Y"
    text = f"{','.join(header):.80}"
    raise _malformed(path, 1, "A label file begins with the names of its columns", text, remedy=remedy)


def _parsed(path: Path, line: int, cells: Sequence[str]) -> tuple[int, int, float, float]:
    """Returns picture number, visibility, x and y of one row."""
    picture, visibility, *position = (cell.strip() for cell in cells)
    # As a file's name, or as pandas writes a column of numbers with gaps: 0001.jpg, 1, 1.0.
    number = re.fullmatch(r"(\d{1,9})(\.0+|\.[A-Za-z]\w*)?", Path(picture).name, re.ASCII)
    if number is None:
        raise _malformed(path, line, "A row names its picture by a number", repr(picture))
    if visibility not in ("0", "1", "2", "3"):
        raise _malformed(path, line, "The visibility is 0, 1, 2 or 3", repr(visibility))
    if visibility == "0":
        return int(number[1]), ABSENT, 0.0, 0.0
    try:
        x, y = map(float, position)
    except ValueError:
        x = y = math.nan
    # A hidden ball may lack a position.
    if int(visibility) == OCCLUDED and position == ["", ""]:
        x = y = 0.0
    if not (math.isfinite(x) and math.isfinite(y)):
        raise _malformed(path, line, "A visible ball has two coordinates", ",".join(position))
    return int(number[1]), int(visibility), x, y


def _malformed(path: Path, line: int, rule: str, value: str, *, remedy: str = "Correct the row") -> DataError:
    return DataError(rule, value=f"{path}:{line}: {value}", remedy=remedy)


def read_clips(
    dataset: TrackNetDatasetSettings, render: Callable[[str, Labels, tuple[int, int]], Pictures]
) -> list[Clip]:
    """Reads the labels of the clips of a data set of files; the pictures are not read yet.

    Args:
        dataset: Settings of the data set.
        render: `render(name, labels, size)` makes the pictures of a clip without picture files.

    Raises:
        MissingDataError: There are no label files, or pictures are missing.
        DataError: A label file does not fit its layout, or a ball is outside the picture.
    """
    clips = []
    for path in label_files(Path(dataset.path)):
        labels = read_labels(path)
        size = (dataset.label_width, dataset.label_height)
        place = _picture_place(path, labels.layout, dataset)
        name, group, belongs_to = _place_of(path, labels.layout, Path(dataset.path))
        if place is None:
            size = size if all(size) else RENDERED_SIZE
            pictures: Pictures = render(name, labels, size)
        else:
            found = _labelled_pictures(path, labels, place)
            pictures, size = found, size if all(size) else found.size()
        outside = (labels.x < 0) | (labels.y < 0) | (labels.x > size[0]) | (labels.y > size[1])
        # The position of a hidden ball is a guess that nothing uses, so it may lie outside.
        for row in np.flatnonzero(outside & np.isin(labels.visibility, (EASY, HARD)))[:1]:
            raise _malformed(path, int(labels.lines[row]), "A visible ball is inside its picture of "
                             f"{size[0]} × {size[1]}", f"{labels.x[row]:g},{labels.y[row]:g}",
                             remedy="Correct the row, or say to which size coordinates belong: --set"
                             " dataset.label_width=1280 --set dataset.label_height=720")  # fmt: skip
        clips.append(labels.clip(name=name, group=group, size=size, pictures=pictures, belongs_to=belongs_to))
    return clips


def _place_of(path: Path, layout: str, root: Path) -> tuple[str, str, str]:
    """Returns the name of a label file's clip, the clip's game, and the set that its folder stands for."""
    if layout == "TrackNet":
        return "/".join(path.parts[-3:-1]), path.parts[-3] if len(path.parts) > 2 else "", ""
    if path.parent.name not in _MATCH_FOLDERS:
        return path.stem, path.stem, ""
    match = path.parent.parent
    belongs_to = _SET_FOLDERS.get(match.parent.name.lower(), "")
    # Matches of different folders have the same names.
    game = f"{match.parent.name}/{match.name}" if belongs_to or match.parent.parent == root else match.name
    return f"{game}/{path.stem}", game, belongs_to


def _labelled_pictures(path: Path, labels: Labels, place: Path) -> "FilePictures | VideoPictures":
    """Returns the picture of each row of a label file, from a folder or a video."""
    if is_file(place):
        video = VideoPictures(place)
        missing, remedy = labels.numbers >= len(video), "Remove the row, or bring the whole video"
        pictures: FilePictures | VideoPictures = replace(video, numbers=tuple(labels.numbers.tolist()))
    else:
        files = picture_files(place)
        missing = ~np.isin(labels.numbers, [*files])
        remedy = "Extract it from the video once more, as PNG or JPEG, or remove the row"
        pictures = FilePictures([files[number] for number in labels.numbers.tolist() if number in files])
    for row in np.flatnonzero(missing)[:1]:
        raise MissingDataError("Every row of a label file has its picture",
                               value=f"{path}:{labels.lines[row]}: {place} has no picture {labels.numbers[row]}",
                               remedy=remedy)  # fmt: skip
    return pictures


def picture_files(folder: Path) -> dict[int, Path]:
    """Lists the pictures of a folder by their numbers, which are their names."""
    return {int(file.stem): file for file in sorted(folder.iterdir())
            if file.suffix.lower() in _SUFFIXES and re.fullmatch(r"\d{1,9}", file.stem, re.ASCII)}  # fmt: skip


def unlabelled_clips(dataset: TrackNetDatasetSettings) -> list[Clip]:
    """Finds clips without labels: a video, a folder with numbered pictures, or such folders below a folder, else the
    videos below it.

    Raises:
        MissingDataError: There are no pictures.
        DataError: A file is not a picture.
    """
    place, clips = Path(dataset.frames or dataset.path), list[Clip]()
    if is_file(place) and place.suffix.lower() in VIDEO_SUFFIXES:
        return [_unlabelled_video(place, place.stem, dataset)]
    folders = [place, *sorted(folder for folder in place.rglob("*") if folder.is_dir())] if place.is_dir() else []
    clip_files = {folder: files for folder in folders if (files := dict(sorted(picture_files(folder).items())))}
    names = Counter(folder.name for folder in clip_files)
    for folder, files in clip_files.items():
        name = folder.relative_to(place).as_posix() if names[folder.name] > 1 else folder.resolve().name
        clips.append(_unlabelled(np.array([*files]), name, FilePictures([*files.values()]), dataset))
    if not clips and place.is_dir():
        videos = [file for file in sorted(place.rglob("*")) if file.suffix.lower() in VIDEO_SUFFIXES and is_file(file)]
        stems = Counter(file.stem for file in videos)
        for file in videos:
            name = file.relative_to(place).as_posix() if stems[file.stem] > 1 else file.stem
            clips.append(_unlabelled_video(file, name, dataset))
    if not clips:
        kinds = ", ".join(suffix[1:] for suffix in VIDEO_SUFFIXES)
        raise MissingDataError("There are no pictures to predict", value=f"{place} holds no 0.png, 1.png or 0.jpg, …",
                               remedy=f"Give their folder, or a video ({kinds}): --dataset VIDEO.mp4")  # fmt: skip
    return clips


def _unlabelled_video(path: Path, name: str, dataset: TrackNetDatasetSettings) -> Clip:
    video = VideoPictures(path)
    return _unlabelled(np.arange(len(video)), name, video, dataset)


def _unlabelled(
    numbers: NDArray[np.int64], name: str, pictures: "FilePictures | VideoPictures", dataset: TrackNetDatasetSettings
) -> Clip:
    nothing, size = np.zeros(len(numbers)), (dataset.label_width, dataset.label_height)
    labels = Labels(numbers=numbers, visibility=np.full(len(numbers), ABSENT), x=nothing, y=nothing,
                    lines=np.zeros(len(numbers), np.int64))  # fmt: skip
    return labels.clip(name=name, group="", size=size if all(size) else pictures.size(), pictures=pictures)


BACKGROUND_PICTURES: Final = 120
"""Pictures of a game whose median is its background."""

_DIGEST_PICTURES: Final = 8  # pictures that tell a clip from others

RENDERED_SIZE: Final = (1280, 720)
"""Width and height in pixels of the broadcasts behind published label files without pictures."""


def _picture_place(path: Path, layout: str, dataset: TrackNetDatasetSettings) -> Path | None:
    """Finds the folder of a label file's pictures, or their video; None where the pictures should be rendered.

    Raises:
        MissingDataError: There is neither, and the settings do not ask for rendered pictures.
    """
    if layout == "TrackNet":
        return path.parent
    stems = (path.stem, path.stem.removesuffix("_ball"))
    # TrackNetV3 has match1/csv/1_01_00_ball.csv, match1/frame/1_01_00/0.png and match1/video/1_01_00.mp4.
    match = path.parent.parent
    bases = [Path(dataset.frames)] if dataset.frames else [path.parent, match / "frame", match / "video"]
    folders = (base / stem for base in bases for stem in stems)
    videos = (base / f"{stem}{suffix}" for base in bases for stem in stems for suffix in VIDEO_SUFFIXES)
    place = next(filter(is_folder, folders), None) or next(filter(is_file, videos), None)
    if place is None and not dataset.render_missing_frames:
        raise MissingDataError(
            "The pictures of a label file lie in a folder of its name, or in a video",
            value=f"there is no {bases[0] / stems[-1]} and no {stems[-1]}.mp4",
            remedy="Bring the video, extract its pictures (0.png, 1.png, …), name their folder with --set"
            " dataset.frames=DIR, or train on generated ones: --set dataset.render_missing_frames=true",
        )  # fmt: skip
    return place


def split_clips(
    clips: Sequence[Clip], *, validation: float, test: float
) -> Mapping[str, Sequence[tuple[Clip, int, int]]]:
    """Divides clips into training, validation and test.

    Clips in the folders of sets are divided as they lie there; a set without a folder gets its share of the training
    folder. Else games stay whole. With fewer than three games, clips stay whole. With fewer than three clips, each clip
    is cut by time, without the pictures where inputs of two sets would overlap. Successive pictures are nearly equal,
    so with a random choice among pictures the test set would repeat the training set.

    Returns:
        For each set its parts of clips: (clip, first picture, picture after the last).
    """
    if any(clip.belongs_to == _SETS[0] for clip in clips):
        return _sets_of_folders(clips, validation=validation, test=test)
    return _divided(clips, validation=validation, test=test)


def _divided(clips: Sequence[Clip], *, validation: float, test: float) -> Mapping[str, Sequence[tuple[Clip, int, int]]]:
    """Divides clips whose folders are of no set, or of one."""
    groups = list(dict.fromkeys(clip.group for clip in clips))
    units = [[clip for clip in clips if clip.group == group] for group in groups]
    if len(units) < _FEWEST_PARTS:
        units = [[clip] for clip in clips]
    if len(units) < _FEWEST_PARTS:
        cut: dict[str, list[tuple[Clip, int, int]]] = {name: [] for name in _SETS}
        for clip in clips:
            length, gap = len(clip), FRAMES_OF_INPUT - 1
            first, second = round((1 - validation - test) * length), round((1 - test) * length)
            spans = ((0, first), (first + gap, second), (second + gap, length))
            for name, (start, stop) in zip(_SETS, spans, strict=True):
                cut[name] += [(clip, start, stop)] if start < stop else []
        return cut
    kept, tested = (max(1, round(share * len(units))) for share in (validation, test))
    chosen = dict(zip(_SETS, (units[: -kept - tested], units[-kept - tested : -tested], units[-tested:]), strict=True))
    return {name: [(clip, 0, len(clip)) for unit in part for clip in unit] for name, part in chosen.items()}


_SETS: Final = ("train", "validation", "test")


def _sets_of_folders(
    clips: Sequence[Clip], *, validation: float, test: float
) -> Mapping[str, Sequence[tuple[Clip, int, int]]]:
    if astray := [clip.name for clip in clips if not clip.belongs_to]:
        raise DataError("Beside the folder train, each match is in the folder of a set",
                        value=f"{len(astray)} of {len(clips)} clips are not, such as {astray[0]}",
                        remedy="Name their folder train, val or test, or move it out of the data set")  # fmt: skip
    by_set = {name: [clip for clip in clips if clip.belongs_to == name] for name in _SETS}
    if by_set["validation"] and by_set["test"]:
        return {name: [(clip, 0, len(clip)) for clip in part] for name, part in by_set.items()}
    divided = _divided(by_set["train"], validation=validation, test=test)
    sets = {name: [(clip, 0, len(clip)) for clip in by_set[name]] or [*divided[name]] for name in _SETS[1:]}
    # A set that has a folder leaves its share to training.
    more = [part for name in _SETS[1:] if by_set[name] for part in divided[name]]
    return {"train": [*divided["train"], *more], **sets}


@dataclass(eq=False)
class FrameReader:
    """Reads resized pictures.

    The pictures are prepared once, in files that are mapped into memory, so that the memory of the host does not grow
    with the number of clips.

    Args:
        width: Width of resized pictures, in pixels.
        height: Height of resized pictures, in pixels.
        cache: Folder of prepared data; None: every picture is decoded when it is read.
    """

    width: int
    height: int
    cache: Path | None = None
    _backgrounds: dict[str, Picture] = field(default_factory=dict)
    _prepared: dict[Clip, NDArray[np.uint8]] = field(default_factory=dict)
    _decoded: Callable[[Clip, int], Picture] = field(init=False)

    def __post_init__(self) -> None:
        # Each picture is part of three successive inputs, so decoded pictures are kept.
        self._decoded = lru_cache(_PICTURES_KEPT)(self._decode)

    def prepare(self, clips: Sequence[Clip], reporter: Reporter) -> None:
        """Prepares the pictures of clips, unless the cache has them already.

        Raises:
            DataError: A picture cannot be read.
            StateError: The cache cannot be written.
        """
        total = sum(map(len, clips))
        with reporter.stage("reading pictures", total=total, unit="pictures") as stage:
            for clip in clips:
                self._prepared[clip] = self._mapped(clip)
                stage.advance(len(clip))

    def read(self, clip: Clip, position: int) -> NDArray[np.uint8]:
        """Returns the input for picture `position`, [3, H, W, 3]: the two pictures before it, then the picture.

        At the start of an unbroken sequence, its first picture takes the place of the missing pictures.
        """
        earliest = clip.starts[position]
        positions = [max(position - back, int(earliest)) for back in reversed(range(FRAMES_OF_INPUT))]
        if clip in self._prepared:
            return self._prepared[clip][positions]
        return np.stack([self._decoded(clip, each) for each in positions])

    def prepare_backgrounds(self, clips: Sequence[Clip], *, most: int = BACKGROUND_PICTURES) -> None:
        """Computes the background of each game: the median of `most` of its pictures, evenly spread."""
        for group in dict.fromkeys(clip.group for clip in clips):
            of_group = [clip for clip in clips if clip.group == group]
            places = [(clip, position) for clip in of_group for position in range(len(clip))]
            chosen = np.unique(np.linspace(0, len(places) - 1, min(most, len(places))).astype(np.int64))
            pictures = np.stack([self.read(*places[number])[-1] for number in chosen])
            self._backgrounds[group] = np.median(pictures, axis=0).astype(np.uint8)

    def background(self, clip: Clip) -> Picture:
        """Returns the background of a clip's game, [H, W, 3]; `prepare_backgrounds` computed it."""
        return self._backgrounds[clip.group]

    def digest(self, clip: Clip) -> str:
        """Returns a digest of pictures of a clip, evenly spread, which stays when its files move or its labels are
        corrected.
        """
        chosen = np.unique(np.linspace(0, len(clip) - 1, min(_DIGEST_PICTURES, len(clip))).astype(np.int64))
        return hashlib.sha256(b"".join(self.read(clip, position)[-1].tobytes() for position in chosen)).hexdigest()

    def _mapped(self, clip: Clip) -> NDArray[np.uint8]:
        assert self.cache is not None
        shape = (self.height, self.width, 3)
        identity = "\n".join([f"{_CACHE_VERSION} {shape}", *clip.pictures.identity()])
        folder = self.cache / f"pictures-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        try:
            return read_arrays(folder, ["pictures"])[0]["pictures"]
        except FolderDamageError:
            discard_folder(folder)
        with ArrayWriter(folder, {"pictures": ("uint8", shape)}) as writer:
            for position in range(len(clip)):
                writer.append({"pictures": clip.pictures.read(position, self.width, self.height)[None]})
            return writer.finish({})["pictures"]

    def _decode(self, clip: Clip, position: int) -> Picture:
        return clip.pictures.read(position, self.width, self.height)
