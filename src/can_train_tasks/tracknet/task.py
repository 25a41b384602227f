"""Ball tracking: where the ball is in each picture of a video, as the peak of a heatmap.

Shapes: B samples of a batch; R samples of a set; H, W height and width of the heatmap; D height and width of the
neighbourhood of a peak. Positions are in pixels from the first one's centre: of the heatmap, unless another size is
named.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import DataError, StateError
from can_train.io.records import write_bytes_atomic
from can_train.task import Feature
from can_train.training.sample_judging import TEST, TRAIN, VALIDATION
from can_train.training.sample_task import Losses, Task
from can_train_tasks.tracknet import clips as reading
from can_train_tasks.tracknet.clips import ABSENT, EASY, HARD, OCCLUDED, Clip, Floats, FrameReader
from can_train_tasks.tracknet.rendering import png_bytes, render_missing, simulated_clips, synthetic_folder
from can_train_tasks.tracknet.settings import TrackNetDatasetSettings, TrackNetSettings, UNetSettings
from can_train_tasks.tracknet.unet import make_unet

TERM: Final = "heatmap"

_TOLERANCE_WIDTH: Final = 256  # Of the picture that `tolerance_px` belongs to
_REFINED: Final = 2  # Pixels around a peak whose heights refine its position
# Grey levels of 256, averaged over 3 × 3 pixels, by which a picture must differ from the one before for its largest
# change to be called a ball: four standard deviations of what noise leaves.
_MOTION: Final = 12.0
_MARK: Final = 4  # Half the side of a mark in a preview, in pixels
_TRUE, _REPORTED = (0, 255, 0), (255, 0, 0)  # Colours of the marks


@dataclass(frozen=True, kw_only=True, eq=False)
class Moment:
    """One picture of a clip, whose ball is looked for. The pixels are read when a batch is made of it."""

    clip: Clip
    position: int  # in the clip
    size: tuple[int, int]  # width and height of the heatmap

    @property
    def visibility(self) -> int:
        """As in the label file."""
        return int(self.clip.visibility[self.position])

    @property
    def is_visible(self) -> bool:
        """Whether the ball can be seen; other pictures teach nothing."""
        return self.visibility in (EASY, HARD)

    @property
    def ball(self) -> tuple[float, float]:
        """Position of the ball in the heatmap."""
        x, y = self.clip.x[self.position], self.clip.y[self.position]
        (width, height), (of_width, of_height) = self.size, self.clip.size
        return (x + 0.5) * width / of_width - 0.5, (y + 0.5) * height / of_height - 0.5

    @property
    def label_px(self) -> Floats:
        """[2] pixels of the labelled picture that a pixel of the heatmap measures, across and down."""
        return np.divide(self.clip.size, self.size, dtype=np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What a method says of R pictures: positions [R, 2], and whether it reports a ball [R]."""

    positions: Floats
    reported: NDArray[np.bool_]


class TrackNetTask(Task):
    """Learns heatmaps of the ball from three pictures each."""

    Settings = TrackNetSettings
    DatasetSettings = TrackNetDatasetSettings
    settings: TrackNetSettings
    dataset: TrackNetDatasetSettings
    model_settings: UNetSettings

    def datasets(self) -> Mapping[str, Sequence[Moment]]:
        """Reads the labels, and prepares the pictures in the cache."""
        self.frames.cache = self.context.cache / "tracknet"
        dataset, render = self.dataset, render_missing
        if dataset.is_synthetic:
            folder = synthetic_folder(self.frames.cache, dataset.synthetic, self.context.reporter)
            clips = reading.read_clips(_at(dataset, folder), render)
        else:
            clips = reading.read_clips(dataset, render)
        self.frames.prepare(clips, self.context.reporter)
        return self._moments(clips)

    def sample_datasets(self) -> Mapping[str, Sequence[Moment]]:
        """Reads the labels; pictures are read, or drawn, when they are needed."""
        simulated = self.dataset.is_synthetic
        clips = (
            simulated_clips(self.dataset.synthetic) if simulated else reading.read_clips(self.dataset, render_missing)
        )
        return self._moments(clips)

    @cached_property
    def frames(self) -> FrameReader:
        """Reads pictures at the heatmap's size."""
        return FrameReader(self.dataset.width, self.dataset.height)

    def _moments(self, clips: Sequence[Clip]) -> dict[str, list[Moment]]:
        dataset = self.dataset
        parts = reading.split_clips(clips, validation=dataset.validation_share, test=dataset.test_share)
        size = (dataset.width, dataset.height)
        sets = {name: [Moment(clip=clip, position=position, size=size)
                       for clip, start, stop in spans for position in range(start, stop)]
                for name, spans in parts.items()}  # fmt: skip
        for name in (TRAIN, VALIDATION, TEST):
            if not any(one.is_visible for one in sets[name]):
                found = f"{name}: {len(sets[name])} pictures, none with a visible ball"
                remedy = "Add clips, or change dataset.validation_share and dataset.test_share"
                raise DataError("Training, validation and test each see a ball", value=found, remedy=remedy)
        return sets

    @classmethod
    def files(cls, dataset: TrackNetDatasetSettings, data_root: Path) -> Sequence[Path]:
        """Lists the folder of labels, and that of pictures where it is another."""
        return [Path(path) for path in (dataset.path, dataset.frames) if path]

    def describe(self, row: int) -> str:
        """Names a sample by its clip and picture."""
        moment: Moment = self.sample(row)
        return f"picture {moment.position} of {moment.clip.name}"

    def notices(self) -> Sequence[str]:
        """Returns how many training pictures teach nothing, and whether pictures are generated."""
        training = self.sets[TRAIN]
        counted = sum(map(self._is_counted, training))
        found = [
            f"{counted:,} of {len(training):,} training pictures have a loss: the ball is not visible in the others"
        ]
        if self.dataset.render_missing_frames:
            found.append("Missing pictures are generated from the labels, and scores are those of generated video")
        return found

    def model(self) -> nn.Module:
        """Makes the network."""
        return make_unet(self.model_settings, self.dataset)

    def features(self, sample: Moment) -> Mapping[str | Feature, float]:
        """All pictures have one size, so memory grows with their number."""
        return {"samples": 1.0}

    def collate(self, samples: Sequence[Moment]) -> dict[str, Tensor]:
        """Reads the pictures: bytes [B, H, W, 9], which become numbers on the device, and the balls' positions."""
        pictures = np.stack([np.concatenate(self.frames.read(one.clip, one.position), axis=-1) for one in samples])
        balls = torch.tensor([one.ball for one in samples], dtype=torch.float64)
        seen, counted = (torch.tensor([of(one) for one in samples]) for of in (_is_visible, self._is_counted))
        return {"pictures": torch.from_numpy(pictures), "balls": balls, "seen": seen, "counted": counted}

    def _is_counted(self, one: Moment) -> bool:
        # A ball that is hidden may still be reported: its picture says neither yes nor no.
        return one.is_visible or (self.settings.learn_absent and one.visibility == ABSENT)

    def heatmaps(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Computes the logits [B, H, W] of a batch."""
        # Channels stay last in memory, by which convolutions are twice as fast on a CPU.
        channels = batch["pictures"].permute(0, 3, 1, 2).to(batch["balls"].dtype)
        logits: Tensor = model(channels.div_(255))
        # Heights near 0 and 1 have no digits left in half precision.
        return logits.to(batch["balls"].dtype)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Losses:
        """Sums the loss of the pixels in pictures that teach something; their number is the denominator."""
        logits = self.heatmaps(model, batch)
        target = ball_heatmaps(batch["balls"], self.settings.sigma, logits.shape[1:]) * batch["seen"][:, None, None]
        each = pixel_losses(logits, target, self.settings).sum(dim=(1, 2))
        counted = batch["counted"].to(each.dtype)
        # Not a mean over this batch: parts of a batch see different numbers of balls.
        return {TERM: ((each * counted).sum(), counted.sum() * logits[0].numel())}

    def denominators(self, samples: Sequence[Moment]) -> Mapping[str, float]:
        """Counts the pixels of the pictures that teach something."""
        return {TERM: float(sum(map(self._is_counted, samples)) * self.dataset.width * self.dataset.height)}

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns [B, 3]: position and height of the highest peak."""
        return peaks(torch.sigmoid(self.heatmaps(model, batch)))

    def measure(self, samples: Sequence[Moment], predictions: Sequence[Any]) -> Mapping[str, float]:
        """Computes the metrics of predictions; writes previews if a folder for them is named."""
        values = torch.as_tensor(np.stack([np.asarray(one, dtype=np.float64) for one in predictions])).numpy()
        found = Found(positions=values[:, :2], reported=values[:, 2] >= self.settings.threshold)
        if self.settings.preview_dir:
            self.write_previews(Path(self.settings.preview_dir), samples, found)
        return self._metrics(samples, found)

    def baselines(self, samples: Sequence[Moment]) -> Mapping[str, Mapping[str, float]]:
        """Returns the metrics of three methods without a network."""
        methods: dict[str, Callable[[Sequence[Moment]], Found]] = {
            "median position in training": self._constant,
            "largest change since the picture before": self._largest_change,
            "true position one picture before": _last_known,
        }
        return {name: self._metrics(samples, method(samples)) for name, method in methods.items()}

    def _metrics(self, samples: Sequence[Moment], found: Found) -> dict[str, float]:
        return detection_metrics(samples, found, self.settings.tolerance_px * self.dataset.width / _TOLERANCE_WIDTH)

    def _constant(self, samples: Sequence[Moment]) -> Found:
        known = [one.ball for one in self.sets[TRAIN] if one.is_visible]
        return Found(positions=np.tile(np.median(known, axis=0), (len(samples), 1)),
                     reported=np.ones(len(samples), np.bool_))  # fmt: skip

    def _largest_change(self, samples: Sequence[Moment]) -> Found:
        found = np.array([_change(self.frames.read(one.clip, one.position)) for one in samples])
        return Found(positions=found[:, :2], reported=found[:, 2] > _MOTION)

    def write_previews(self, folder: Path, samples: Sequence[Moment], found: Found) -> None:
        """Writes pictures, at equal distances through a set: the ball's true position in green, a reported one in red.

        Raises:
            StateError: The folder cannot be written.
        """
        chosen = np.unique(np.linspace(0, len(samples) - 1, min(self.settings.previews, len(samples))).astype(np.int64))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for row in chosen.tolist():
                one = samples[row]
                picture = self.frames.read(one.clip, one.position)[-1].copy()
                if one.is_visible:
                    _mark(picture, one.ball, _TRUE)
                if found.reported[row]:
                    _mark(picture, tuple(found.positions[row]), _REPORTED)
                name = f"{one.clip.name.replace('/', '-')}-{one.position:04d}.png"
                write_bytes_atomic(folder / name, png_bytes(picture))
        except OSError as error:
            raise StateError("Previews are written into the folder task.preview_dir", value=f"{folder}: {error}",
                             remedy="Make room, or name another folder") from error  # fmt: skip


def _is_visible(one: Moment) -> bool:
    return one.is_visible


def _at(dataset: TrackNetDatasetSettings, folder: Path) -> TrackNetDatasetSettings:
    return TrackNetDatasetSettings(path=str(folder), width=dataset.width, height=dataset.height)


def ball_heatmaps(balls: Tensor, sigma: float, size: Sequence[int]) -> Tensor:
    r"""Computes the target :math:`\exp(-d^2 / 2\sigma^2)` at the distance d from the ball.

    Args:
        balls: [B, 2] their positions.
        sigma: Standard deviation in pixels.
        size: H and W.

    Returns:
        [B, H, W]: 1 at the ball.
    """
    down, across = (torch.arange(length, dtype=balls.dtype, device=balls.device) for length in size)
    # A product of two factors, so that no tensor of distances is kept beside the result.
    by_row = torch.exp(-((down - balls[:, 1:]) ** 2) / (2 * sigma**2))
    by_column = torch.exp(-((across - balls[:, :1]) ** 2) / (2 * sigma**2))
    return by_row[:, :, None] * by_column[:, None, :]


def pixel_losses(logits: Tensor, target: Tensor, settings: TrackNetSettings) -> Tensor:
    r"""Computes :math:`w\,|\sigma(z) - y|^\gamma\,\mathrm{BCE}(z, y)` of each pixel, with w = 1 + (ball_weight − 1)·y.

    Without the weight the few pixels of the ball drown in the background; with the power, those that are right already
    leave the gradient to the others.

    Args:
        logits: [B, H, W] z.
        target: [B, H, W] y.
        settings: Weight and γ.

    Source: the quality focal loss of Li et al. 2020, arXiv:2006.04388, which takes targets between 0 and 1.
    """
    weight = 1 + (settings.ball_weight - 1) * target
    each = F.binary_cross_entropy_with_logits(logits, target, weight, reduction="none")
    if settings.focal_gamma == 0:
        return each
    return each * (torch.sigmoid(logits) - target).abs() ** settings.focal_gamma


def peaks(heights: Tensor) -> Tensor:
    """Finds the highest pixel of each heatmap, and refines its position by those around it.

    Args:
        heights: [B, H, W] in [0, 1].

    Returns:
        [B, 3]: the mean position of the pixels around the peak, weighted by their heights, and the peak's height.
    """
    batch, height, width = heights.shape
    top, place = heights.flatten(1).max(dim=1)
    steps = torch.arange(-_REFINED, _REFINED + 1, device=heights.device)
    # [B, D, D], also of places outside, which weigh nothing.
    rows = (place // width)[:, None, None] + steps[:, None]
    columns = (place % width)[:, None, None] + steps
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    each = torch.arange(batch, device=heights.device)[:, None, None]
    weights = heights[each, rows.clamp(0, height - 1), columns.clamp(0, width - 1)] * inside
    # Above 0 also where every height has underflowed.
    total = weights.sum(dim=(1, 2)).clamp_min(torch.finfo(heights.dtype).tiny)
    x, y = ((weights * places).sum(dim=(1, 2)) / total for places in (columns, rows))
    return torch.stack([x, y, top], dim=1)


def detection_metrics(samples: Sequence[Moment], found: Found, tolerance: float) -> dict[str, float]:
    """Computes precision, recall, F1 and position error.

    A reported ball is right within the tolerance of a visible one. Precision is the share of right ones among those
    reported, recall that among visible ones: a ball reported elsewhere is wrong and missed. Pictures whose ball is
    hidden are left out: their label is a guess.

    Args:
        samples: R pictures.
        found: What was reported of them.
        tolerance: In pixels of the heatmap.

    Returns:
        Also `position_error_px`, in pixels of the labelled pictures, over all visible balls of which a position was
        reported, right or wrong; without it where there are none.
    """
    visibility = np.array([one.visibility for one in samples])
    visible = np.isin(visibility, (EASY, HARD))
    offsets = found.positions - np.array([one.ball for one in samples])
    right = found.reported & visible & (np.hypot(*offsets.T) <= tolerance)
    reported = found.reported & (visibility != OCCLUDED)
    precision, recall = _share(right.sum(), reported.sum()), _share(right.sum(), visible.sum())
    metrics = {"precision": precision, "recall": recall, "f1": _share(2 * precision * recall, precision + recall)}
    given = reported & visible
    if given.any():
        px = offsets[given] * np.array([one.label_px for one, is_given in zip(samples, given, strict=True) if is_given])
        metrics["position_error_px"] = float(np.hypot(*px.T).mean())
    return metrics


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def _last_known(samples: Sequence[Moment]) -> Found:
    """Reports the position that the labels have for the picture before, or earlier if it was not visible then."""
    positions, reported = np.zeros((len(samples), 2)), np.zeros(len(samples), np.bool_)
    for row, one in enumerate(samples):
        clip, start = one.clip, int(one.clip.starts[one.position])
        earlier = np.flatnonzero(np.isin(clip.visibility[start : one.position], (EASY, HARD)))
        if earlier.size:
            before = Moment(clip=clip, position=start + int(earlier[-1]), size=one.size)
            positions[row], reported[row] = before.ball, True
    return Found(positions=positions, reported=reported)


def _change(pictures: NDArray[np.uint8]) -> tuple[float, float, float]:
    """Returns where a picture has brightened most since the one before it, averaged over 3 × 3 pixels, and by how much
    in grey levels. `pictures` is [3, H, W, 3], the last one last.
    """
    before, now = pictures[-2:].mean(axis=-1)
    padded = np.pad(now - before, 1)
    height, width = now.shape
    mean = np.mean([padded[i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=0)
    y, x = np.unravel_index(int(np.argmax(mean)), mean.shape)
    return float(x), float(y), float(mean[y, x])


def _mark(picture: NDArray[np.uint8], at: Sequence[float], color: tuple[int, int, int]) -> None:
    """Draws a square around a position into a picture [H, W, 3]."""
    height, width, _ = picture.shape
    x, y = (round(min(max(one, 0.0), length - 1.0)) for one, length in zip(at, (width, height), strict=True))
    rows, columns = (slice(max(middle - _MARK, 0), middle + _MARK + 1) for middle in (y, x))
    for edge in (y - _MARK, y + _MARK):
        if 0 <= edge < height:
            picture[edge, columns] = color
    for edge in (x - _MARK, x + _MARK):
        if 0 <= edge < width:
            picture[rows, edge] = color
