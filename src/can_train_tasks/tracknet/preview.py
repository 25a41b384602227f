"""Previews of predictions: the pictures of clips with the reported ball and its way, as PNG files or as a video.

Shapes: H, W height and width of a picture.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from can_train.errors import ConfigError
from can_train_tasks.tracknet.clips import Clip, Picture, VideoPictures, load_av, load_pillow
from can_train_tasks.tracknet.rendering import png_bytes

Place = tuple[float, float]
"""Position (x, y) in pixels of a picture."""

VIDEO: Final = ".mp4"
_RATE: Final = 30  # Pictures of a second, where a clip is no video that has a rate
_CODECS: Final = ("libx264", "mpeg4")  # The first one that PyAV was built with
_CRF: Final = "20"  # Quality of libx264: small balls stay sharp
_RADIUS: Final = 0.008  # Radius of the newest mark as a share of the width: around the ball, not over it
_SMALLEST: Final = 2.0  # Pixels
_BALL_COLOR, _TRAIL_COLOR = (255, 0, 0), (255, 220, 0)


class Sheet(Protocol):
    """Receives the pictures of clips, in order."""

    def size(self, clip: Clip) -> tuple[int, int]:
        """Returns width and height of the pictures that `write` takes for a clip."""

    def write(self, picture: Picture, clip: Clip, position: int) -> None:
        """Writes picture `position` of a clip."""


class BallPreview:
    """Draws the ball of each picture, and the positions before it.

    Args:
        sheet: Receives the pictures.
        trail: Positions in a picture: of the ball in it, and in the pictures before.
    """

    def __init__(self, sheet: Sheet, trail: int) -> None:
        self._sheet = sheet
        self._places: deque[Place | None] = deque(maxlen=trail)
        self._sequence: tuple[Clip, int] | None = None

    def draw(self, clip: Clip, position: int, ball: Place | None) -> None:
        """Draws the next picture.

        Args:
            clip: The clip.
            position: Number of the picture in the clip.
            ball: Position of the ball in pixels of `clip.size`; None: no ball is reported.
        """
        # A ball does not fly from clip to clip, nor over missing pictures.
        if self._sequence != (sequence := (clip, int(clip.starts[position]))):
            self._places.clear()
            self._sequence = sequence
        width, height = self._sheet.size(clip)
        scales = width / clip.size[0], height / clip.size[1]
        self._places.append(ball and ((ball[0] + 0.5) * scales[0] - 0.5, (ball[1] + 0.5) * scales[1] - 0.5))
        picture = clip.pictures.read(position, width, height)
        self._sheet.write(marked(picture, self._places), clip, position)


def marked(picture: Picture, places: Sequence[Place | None]) -> Picture:
    """Returns a picture with a red ring around the last position, and a yellow dot, the older the smaller, at each
    position before it; None is not marked.
    """
    from PIL import ImageDraw

    image = load_pillow().fromarray(picture)
    draw = ImageDraw.Draw(image)
    radius = max(_SMALLEST, _RADIUS * image.width)
    *before, ball = places
    for number, place in enumerate(before, start=1):
        if place is not None:
            draw.ellipse(_box(place, 0.6 * radius * number / len(places)), fill=_TRAIL_COLOR)
    if ball is not None:
        draw.ellipse(_box(ball, radius), outline=_BALL_COLOR, width=max(1, round(radius / 4)))
    return np.asarray(image, dtype=np.uint8)


def _box(place: Place, radius: float) -> tuple[float, float, float, float]:
    x, y = place
    return x - radius, y - radius, x + radius, y + radius


@contextmanager
def open_sheet(path: Path, *, is_one_clip: bool) -> Iterator[Sheet]:
    """Opens a folder for pictures, or a video.

    Args:
        path: The empty folder, or the file.
        is_one_clip: Whether there is a single clip.

    Raises:
        ConfigError: The file is no video, or a package that writes it is not installed.
        OSError: It cannot be written.
    """
    if path.is_dir():
        yield PictureFolder(path, is_one_clip=is_one_clip)
        return
    if path.suffix.lower() != VIDEO:
        raise ConfigError(f"A preview is a folder of pictures or a video ({VIDEO})", value=f"--preview {path.name}",
                          remedy=f"Name a folder, {path.stem}/, or a video, {path.stem}{VIDEO}")  # fmt: skip
    with VideoFile(path) as video:
        yield video


class PictureFolder:
    """PNG files as the reader takes them: `0.png`, `1.png`, …, in a folder for each clip where there are several."""

    def __init__(self, folder: Path, *, is_one_clip: bool) -> None:
        self._folder, self._is_one_clip = folder, is_one_clip

    def size(self, clip: Clip) -> tuple[int, int]:
        """Returns the size of the clip's pictures."""
        return clip.size

    def write(self, picture: Picture, clip: Clip, position: int) -> None:
        """Writes a picture under its number in the clip."""
        folder = self._folder if self._is_one_clip else self._folder / clip.name
        folder.mkdir(parents=True, exist_ok=True)
        # Not flushed file by file, which would take ten times as long.
        (folder / f"{clip.numbers[position]}.png").write_bytes(png_bytes(picture))


class VideoFile:
    """A video. Clips follow each other; all have the size and the rate of the first one."""

    def __init__(self, path: Path) -> None:
        self._av = load_av()
        self._path = path
        # Opened with the first picture, which has their size.
        self._container: Any = None
        self._stream: Any = None
        self._size: tuple[int, int] | None = None

    def __enter__(self) -> "VideoFile":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._container is None:
            return
        if error[0] is not None:
            # On a full disk the end cannot be written either: the first error counts.
            with suppress(self._av.error.FFmpegError):
                self._container.close()
            return
        with self._writing():
            self._mux(None)
            self._container.close()

    def size(self, clip: Clip) -> tuple[int, int]:
        """Returns the size of the video."""
        self._size = self._size or clip.size
        return self._size

    def write(self, picture: Picture, clip: Clip, position: int) -> None:
        """Appends a picture."""
        # Colours are stored for squares of 2 × 2 pixels.
        height, width = (length // 2 * 2 for length in picture.shape[:2])
        with self._writing():
            if self._container is None:
                self._open(width, height, _rate(clip))
            even = np.ascontiguousarray(picture[:height, :width])
            self._mux(self._av.VideoFrame.from_ndarray(even, format="rgb24"))

    def _open(self, width: int, height: int, rate: Fraction) -> None:
        codec = next(name for name in _CODECS if name in self._av.codecs_available)
        self._container = self._av.open(str(self._path), "w")
        self._stream = self._container.add_stream(codec, rate=rate, options={"crf": _CRF})
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"

    def _mux(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns errors of PyAV into OSError: not all of its errors are."""
        try:
            yield
        except self._av.error.FFmpegError as error:
            raise OSError(error.errno, error.strerror) from error


def _rate(clip: Clip) -> Fraction:
    """Returns the pictures of a second."""
    rate = clip.pictures.rate() if isinstance(clip.pictures, VideoPictures) else None
    return rate or Fraction(_RATE)
