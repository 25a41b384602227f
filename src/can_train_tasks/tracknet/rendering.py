"""Draws video of a ball: a textured court, moving players, bright distractors that are not the ball, and noise.

The ball's positions come from a label file or are simulated. Simulated clips can be written as TrackNet's folders.

Every picture is a function of its scene and its number: it can be drawn alone and at any size, with equal bytes each
time.

Shapes: T pictures of a clip; H, W height and width of a picture; D distractors; P poles.
"""

import hashlib
import io
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from can_train.io.arrays import writing_folder
from can_train.reporter import Reporter
from can_train_tasks.tracknet.clips import ABSENT, EASY, HARD, OCCLUDED, Clip, Floats, Labels, Picture, load_pillow
from can_train_tasks.tracknet.settings import SyntheticVideoSettings

# Raise it whenever the same scene gives another picture, so that files of an earlier version are not used.
GENERATOR_VERSION: Final = 1

DISTRACTORS: Final = 4
"""Number of distractors in a clip that is drawn from a label file."""

# Lengths are shares of the picture's width. A shuttlecock in a broadcast is 0.6 to 1 % of its width.
_BALL: Final = 0.005
_PLAYERS: Final = 2
_PLAYER: Final = 0.022
_GLINT: Final = (0.003, 0.014)  # Radius of a distractor: smaller or larger than the ball, like shoes and rackets
_SPEED: Final = (0.002, 0.02)  # Way of a distractor from picture to picture
_POLE: Final = (0.015, 0.03)  # Half-width of a pole, which hides the ball in simulated clips
_OCTAVES: Final = (6, 17, 47)  # Cells of the background's texture across the picture
_TEXTURE: Final = (26.0, 14.0, 9.0)  # Strength of each octave of the texture, in grey levels of 256
_NOISE: Final = 4.0  # Standard deviation of a sensor's noise, in grey levels
_FLICKER: Final = 0.02  # Standard deviation of the brightness from picture to picture, relative
_BALL_COLOR: Final = np.array((250.0, 250.0, 225.0), np.float32)
_GLINT_COLOR: Final = np.array((200.0, 200.0, 190.0), np.float32)  # Small distractors are darker than the ball
_BLUR_STEPS: Final = 5  # Positions where a moving ball is drawn, along its way in half of a picture's time
_REACH: Final = 3.0  # A spot is drawn up to this many standard deviations from its centre
_SMALLEST: Final = 0.6  # Pixels; a smaller spot would fall between pixels

_FLIGHT: Final = (14, 30)  # Pictures between two strokes of a simulated ball
_BLURRED: Final = 0.04  # Share of the width; a ball that moves farther from picture to picture is hard to see
_COMPRESSION: Final = 1  # PNG level: higher levels take several times as long, and noise does not compress


def _rng(*key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(key))


@dataclass(frozen=True, kw_only=True, eq=False)
class RenderedPictures:
    """The pictures of a clip, drawn when they are read.

    Attributes:
        seed: Seed of the players, the distractors and the noise.
        court: Seed of the background, which clips of one game share.
        size: Width and height in pixels of the labelled pictures, which `x` and `y` refer to.
        visible: [T] whether the ball is drawn.
        x, y: [T] position of the ball.
        poles: [P, 2] centre and half-width of each pole, as shares of the width. Poles stand in front of the ball.
        distractors: Number D.
    """

    seed: int
    court: int
    size: tuple[int, int]
    visible: NDArray[np.bool_]
    x: Floats
    y: Floats
    poles: Floats
    distractors: int = DISTRACTORS

    def identity(self) -> Iterator[str]:
        """Yields texts that together identify the pictures, for the name of their cache folder."""
        drawn = zlib.crc32(b"".join(array.tobytes() for array in (self.visible, self.x, self.y, self.poles)))
        yield f"rendered {GENERATOR_VERSION} {self.seed} {self.court} {self.size} {self.distractors} {drawn}"

    def read(self, position: int, width: int, height: int) -> Picture:
        """Draws picture `position` as [height, width, 3]."""
        noise = _rng(self.seed, 1, position)
        if (width, height) not in self._backgrounds:
            self._backgrounds[width, height] = _court(self.court, width, height)
        image = self._backgrounds[width, height] * np.float32(1 + _FLICKER * noise.standard_normal())
        shirt, rng = _rng(self.seed, 2).uniform(60, 240, 3).astype(np.float32), _rng(self.seed, 3)
        middle, reach, pace, phase = (rng.uniform(low, high, (_PLAYERS, 2)) for low, high in
                                      ((0.3, 0.7), (0.05, 0.2), (0.02, 0.08), (0, 2 * np.pi)))  # fmt: skip
        for x, y in middle + reach * np.sin(pace * position + phase):
            _spot(image, (x * width, y * height), (_PLAYER * width, 2.5 * _PLAYER * width), shirt)
        for x, y, radius in self._glints(position):
            color = _GLINT_COLOR if radius < 2 * _BALL else _BALL_COLOR
            _spot(image, (x * width, y * height), (radius * width, radius * width), color)
        if self.visible[position]:
            self._ball(image, position)
        for centre, half in self.poles * width:
            image[:, max(round(centre - half), 0) : round(centre + half)] = 70.0
        image += np.float32(_NOISE) * noise.standard_normal(image.shape, dtype=np.float32)
        return np.asarray(np.clip(image, 0, 255), dtype=np.uint8)

    @cached_property
    def _backgrounds(self) -> dict[tuple[int, int], NDArray[np.float32]]:
        return {}

    def _glints(self, position: int) -> Floats:
        """Returns x, y and radius of the distractors [D, 3]; a distractor that leaves the picture enters it again."""
        rng = _rng(self.seed, 4)
        start, angle = rng.uniform(0, 1, (self.distractors, 2)), rng.uniform(0, 2 * np.pi, self.distractors)
        speed, radius = (rng.uniform(*span, self.distractors) for span in (_SPEED, _GLINT))
        way = (speed * position)[:, None] * np.column_stack([np.cos(angle), np.sin(angle)])
        return np.column_stack([(start + way) % 1.0, radius])

    def _ball(self, image: NDArray[np.float32], position: int) -> None:
        height, width, _ = image.shape
        before = max(position - 1, 0)
        if not self.visible[before]:
            before = position
        radius = max(_BALL * width, _SMALLEST)
        for share in np.linspace(-0.25, 0.25, _BLUR_STEPS):
            # The ball is blurred by motion around its labelled position, over half of a picture's time.
            x = self.x[position] + share * (self.x[position] - self.x[before])
            y = self.y[position] + share * (self.y[position] - self.y[before])
            # Position 0 is the centre of the first pixel.
            centre = ((x + 0.5) * width / self.size[0], (y + 0.5) * height / self.size[1])
            _spot(image, centre, (radius, radius), _BALL_COLOR)


def _spot(
    image: NDArray[np.float32], centre: tuple[float, float], radii: tuple[float, float], color: NDArray[np.float32]
) -> None:
    """Draws a soft ellipse into `image`; `centre` is in pixels from the upper left corner of the picture."""
    spans = []
    for middle, radius, length in zip(centre, radii, image.shape[1::-1], strict=True):
        low, high = int(middle - _REACH * radius), int(middle + _REACH * radius) + 2
        spans.append(np.arange(min(max(low, 0), length), min(max(high, 0), length)))
    columns, rows = spans
    if not (columns.size and rows.size):
        return
    dx, dy = (columns + 0.5 - centre[0]) / radii[0], (rows + 0.5 - centre[1]) / radii[1]
    cover = np.exp(-0.5 * (dx[None, :] ** 2 + dy[:, None] ** 2)).astype(np.float32)[..., None]
    part = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    part += cover * (color - part)


def _court(seed: int, width: int, height: int) -> NDArray[np.float32]:
    """Draws a background [H, W, 3]: a coloured floor with texture, lines, and the bright spots of a crowd."""
    rng = _rng(seed, 5)
    image = np.empty((height, width, 3), np.float32)
    image[:] = rng.uniform(50, 130, 3)
    for cells, strength in zip(_OCTAVES, _TEXTURE, strict=True):
        grid = rng.standard_normal((cells * 9 // 16 + 2, cells + 2, 1)).astype(np.float32)
        image += np.float32(strength) * _stretched(grid, width, height)
    for share in rng.uniform(0.3, 0.95, 3):
        image[int(share * height)] += 80
    for share in rng.uniform(0.1, 0.9, 3):
        image[height // 3 :, int(share * width)] += 80
    for x, y in rng.uniform((0, 0), (1, 0.3), (20, 2)):
        _spot(image, (x * width, y * height), (_BALL * width, _BALL * width), _GLINT_COLOR)
    return image


def _stretched(grid: NDArray[np.float32], width: int, height: int) -> NDArray[np.float32]:
    """Interpolates a grid [h, w, 1] linearly to [H, W, 1]."""
    y, x = (np.linspace(0, length - 1.001, number) for length, number in zip(grid.shape, (height, width), strict=False))
    top, left = y.astype(int), x.astype(int)
    down, right = (y - top)[:, None, None].astype(np.float32), (x - left)[None, :, None].astype(np.float32)
    upper = grid[top][:, left] * (1 - right) + grid[top][:, left + 1] * right
    lower = grid[top + 1][:, left] * (1 - right) + grid[top + 1][:, left + 1] * right
    return np.asarray(upper * (1 - down) + lower * down, dtype=np.float32)


def render_missing(name: str, labels: Labels, size: tuple[int, int]) -> RenderedPictures:
    """Makes pictures for a label file without pictures. The file gives the ball's positions, `name` seeds the rest.

    Args:
        name: Name of the clip.
        labels: [T] rows of the file.
        size: Width and height in pixels of the labelled pictures, which the labels refer to.
    """
    seed = zlib.crc32(name.encode())
    visible = np.isin(labels.visibility, (EASY, HARD))
    return RenderedPictures(seed=seed, court=seed, size=size, visible=visible, x=labels.x, y=labels.y,
                            poles=np.zeros((0, 2)))  # fmt: skip


def simulate_clip(settings: SyntheticVideoSettings, game: int, clip: int) -> Clip:
    """Simulates a rally and its pictures: the ball flies in arcs between strokes, at times outside or behind poles."""
    rng = _rng(settings.seed, 6, game, clip)
    x, y = _arcs(rng, settings.frames)
    poles = np.column_stack([rng.uniform(0.2, 0.8, 2), rng.uniform(*_POLE, 2)])
    step = np.hypot(np.diff(x, prepend=x[0]), np.diff(y, prepend=y[0]) * 9 / 16)
    visibility = np.where(step > _BLURRED, HARD, EASY)
    visibility[(np.abs(x[:, None] - poles[:, 0]) < poles[:, 1] + _BALL).any(axis=1)] = OCCLUDED
    absent = (y < 0) | (y >= 1) | (x < 0) | (x >= 1)
    visibility[absent] = ABSENT
    size = (settings.width, settings.height)
    # Positions are whole pixels, as in labels made by people; an absent ball has position 0.
    pixels = [np.where(absent, 0.0, np.minimum(np.floor(share * length), length - 1))
              for share, length in zip((x, y), size, strict=True)]  # fmt: skip
    labels = Labels(numbers=np.arange(settings.frames), visibility=visibility, x=pixels[0], y=pixels[1],
                    lines=np.arange(settings.frames) + 2)  # fmt: skip
    # A ball behind a pole is drawn, and the pole is drawn over it.
    seed, court = (int(_rng(settings.seed, 7, game, part).integers(2**31)) for part in (clip + 1, 0))
    pictures = RenderedPictures(seed=seed, court=court, size=size, visible=visibility != ABSENT, x=labels.x, y=labels.y,
                                poles=poles, distractors=settings.distractors)  # fmt: skip
    return labels.clip(name=f"game{game + 1}/Clip{clip + 1}", group=f"game{game + 1}", size=size, pictures=pictures)


def _arcs(rng: np.random.Generator, frames: int) -> tuple[Floats, Floats]:
    """Returns x and y, [T] each, as shares of width and height: parabolas from one side to the other."""
    x: list[float] = []
    y: list[float] = []
    side = rng.integers(2)
    here = np.array([rng.uniform(0.1, 0.4) + 0.5 * side, rng.uniform(0.5, 0.9)])
    while len(x) < frames:
        side = 1 - side
        there = np.array([rng.uniform(0.1, 0.4) + 0.5 * side, rng.uniform(0.5, 0.9)])
        share = np.arange(length := rng.integers(*_FLIGHT)) / length
        x += list(here[0] + share * (there[0] - here[0]))
        y += list(here[1] + share * (there[1] - here[1]) - 4 * rng.uniform(0.3, 0.85) * share * (1 - share))
        here = there
    return np.array(x[:frames]), np.array(y[:frames])


def simulated_clips(settings: SyntheticVideoSettings) -> list[Clip]:
    """Simulates the clips of all games; a picture is drawn when it is read."""
    return [simulate_clip(settings, game, clip) for game in range(settings.games) for clip in range(settings.clips)]


def synthetic_folder(cache: Path, settings: SyntheticVideoSettings, reporter: Reporter) -> Path:
    """Returns the folder of the synthetic data set in `cache`; simulates and writes it if it is missing.

    Raises:
        StateError: The folder cannot be written.
    """
    identity = hashlib.sha256(f"{GENERATOR_VERSION} {sorted(asdict(settings).items())}".encode())
    folder = cache / f"synthetic-games-{identity.hexdigest()[:12]}"
    if not folder.is_dir():
        write_games(folder, simulated_clips(settings), reporter)
    return folder


def write_games(folder: Path, clips: list[Clip], reporter: Reporter) -> None:
    """Writes clips in TrackNet's layout: `game1/Clip1/` with Label.csv, 0000.png, 0001.png, …

    The folder appears complete or not at all.

    Raises:
        StateError: The folder cannot be written.
    """
    with (
        writing_folder(folder) as staged,
        reporter.stage("drawing clips", total=sum(map(len, clips)), unit="pictures") as stage,
    ):
        for clip in clips:
            _write_clip(staged / clip.name, clip)
            stage.advance(len(clip))


def _write_clip(folder: Path, clip: Clip) -> None:
    folder.mkdir(parents=True)
    width, height = clip.size
    lines = ["file name,visibility,x-coordinate,y-coordinate,status"]
    for position, visibility in enumerate(clip.visibility.tolist()):
        at = f"{clip.x[position]:.0f},{clip.y[position]:.0f},0" if visibility != ABSENT else ",,"
        lines.append(f"{position:04d}.png,{visibility},{at}")
        # Not flushed file by file, which would take ten times as long. A file that a power failure has emptied fails
        # when it is read, with an error that names it.
        (folder / f"{position:04d}.png").write_bytes(png_bytes(clip.pictures.read(position, width, height)))
    (folder / "Label.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def png_bytes(picture: Picture) -> bytes:
    """Encodes a picture [H, W, 3] as PNG."""
    buffer = io.BytesIO()
    load_pillow().fromarray(picture).save(buffer, "PNG", compress_level=_COMPRESSION)
    return buffer.getvalue()
