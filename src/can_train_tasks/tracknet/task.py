"""Ball tracking: finds the position of the ball in each picture of a video, as the peak of a heatmap.

Shapes: B samples of a batch; R samples of a set; H, W height and width of the heatmap; D height and width of the
neighbourhood of a peak. Positions are in pixels of the heatmap, unless another size is named; the centre of the first
pixel is 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from can_train.training.sample_task import Task
from can_train.training.task_values import TEST, TRAIN, VALIDATION, Losses
from can_train_tasks.tracknet import clips as reading
from can_train_tasks.tracknet.clips import ABSENT, EASY, HARD, OCCLUDED, Clip, Floats, FrameReader
from can_train_tasks.tracknet.preview import BallPreview, open_sheet
from can_train_tasks.tracknet.rendering import png_bytes, render_missing, simulated_clips, synthetic_folder
from can_train_tasks.tracknet.settings import (
    CONCAT,
    OFF,
    SUBTRACT,
    TrackNetDatasetSettings,
    TrackNetSettings,
    UNetSettings,
)
from can_train_tasks.tracknet.unet import make_unet

TERM: Final = "heatmap"
Part = tuple[Clip, int, int]
"""Part of a clip: the clip, its first picture, the picture after its last."""

_CLIPS: Final = "clips"  # Key of the state of a run: the clips of its training
_PLANNED_PICTURES: Final = 8  # Pictures of a game whose median stands for its background in a plan
_TOLERANCE_WIDTH: Final = 256  # Width in pixels of the picture that `tolerance_px` refers to
_REFINED: Final = 2  # Pixels on each side of a peak whose heights refine its position
# Least change between two pictures that the baseline reports as a ball, in grey levels of 256, averaged over 3 × 3
# pixels: four standard deviations of the noise that this mean leaves.
_MOTION: Final = 12.0
_MARK: Final = 4  # Half the side of a mark in a preview, in pixels
_TRUE, _REPORTED = (0, 255, 0), (255, 0, 0)  # Colours of the marks


@dataclass(frozen=True, kw_only=True, eq=False)
class Moment:
    """One picture of a clip, whose ball the task looks for. `collate` reads the pixels."""

    clip: Clip
    position: int  # number of the picture in the clip, from 0
    size: tuple[int, int]  # width and height of the heatmap

    @property
    def visibility(self) -> int:
        """Visibility in the label file: `ABSENT`, `EASY`, `HARD` or `OCCLUDED`."""
        return int(self.clip.visibility[self.position])

    @property
    def is_visible(self) -> bool:
        """Whether the ball can be seen."""
        return self.visibility in (EASY, HARD)

    @property
    def ball(self) -> tuple[float, float]:
        """Position (x, y) of the ball in pixels of the heatmap."""
        x, y = self.clip.x[self.position], self.clip.y[self.position]
        (width, height), (of_width, of_height) = self.size, self.clip.size
        return (x + 0.5) * width / of_width - 0.5, (y + 0.5) * height / of_height - 0.5

    def in_picture(self, x: float, y: float) -> tuple[float, float]:
        """Returns a position in pixels of the heatmap as one in pixels of the picture, and inside it."""
        scaled = [((value + 0.5) * length / of_length - 0.5, length) for value, of_length, length in
                  zip((x, y), self.size, self.clip.size, strict=True)]  # fmt: skip
        across, down = (float(min(max(value, 0.0), length - 1.0)) for value, length in scaled)
        return across, down


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """Detections in R pictures: positions [R, 2], and whether a ball is reported [R]."""

    positions: Floats
    reported: NDArray[np.bool_]


class TrackNetTask(Task):
    """Learns a heatmap of the ball from a picture and the two pictures before it."""

    Settings = TrackNetSettings
    DatasetSettings = TrackNetDatasetSettings
    prediction_parts = ("Clip", "{}_ball")
    settings: TrackNetSettings
    dataset: TrackNetDatasetSettings
    model_settings: UNetSettings
    _is_one_clip = False

    def datasets(self) -> Mapping[str, Sequence[Moment]]:
        """Reads the labels, and prepares the pictures in the cache."""
        self.frames.cache = self.context.cache / "tracknet"
        dataset = self.dataset
        if dataset.is_synthetic:
            folder = synthetic_folder(self.frames.cache, dataset.synthetic, self.context.reporter)
            dataset = TrackNetDatasetSettings(path=str(folder), width=dataset.width, height=dataset.height)
        clips = reading.read_clips(dataset, render_missing)
        self.frames.prepare(clips, self.context.reporter)
        self._prepare_backgrounds(clips)
        return self._moments(clips, trained=self.context.state.get(_CLIPS, ()))

    def state(self) -> Mapping[str, Any]:
        """Returns the pictures of each clip that train, validate and test, so that an evaluation on other data knows
        which of them the run never saw.
        """
        return {_CLIPS: self._clips_of_sets}

    @cached_property
    def _clips_of_sets(self) -> list[Any]:
        spans: dict[Clip, dict[str, list[int]]] = {}
        for name, moments in self.sets.items():
            for moment in moments:
                span = spans.setdefault(moment.clip, {}).setdefault(name, [moment.position, 0])
                span[1] = moment.position + 1
        return [[self.frames.digest(clip), of_sets] for clip, of_sets in spans.items()]

    def _prepare_backgrounds(self, clips: Sequence[Clip], *, most: int = reading.BACKGROUND_PICTURES) -> None:
        if self.dataset.background != OFF:
            self.frames.prepare_backgrounds(clips, most=most)

    def sample_datasets(self) -> Mapping[str, Sequence[Moment]]:
        """Reads the labels; pictures are read or drawn later, when a batch needs them."""
        if self.dataset.is_synthetic:
            clips = simulated_clips(self.dataset.synthetic)
        else:
            clips = reading.read_clips(self.dataset, render_missing)
        self._prepare_backgrounds(clips, most=_PLANNED_PICTURES)
        return self._moments(clips)

    @cached_property
    def frames(self) -> FrameReader:
        """Reader of pictures at the heatmap's size."""
        return FrameReader(self.dataset.width, self.dataset.height)

    def _moments(self, clips: Sequence[Clip], trained: Sequence[Any] = ()) -> dict[str, list[Moment]]:
        dataset = self.dataset
        parts = reading.split_clips(clips, validation=dataset.validation_share, test=dataset.test_share)
        if trained:
            parts = self._judged(clips, parts, trained)
        size = (dataset.width, dataset.height)
        sets = {name: [Moment(clip=clip, position=position, size=size)
                       for clip, start, stop in spans for position in range(start, stop)]
                for name, spans in parts.items()}  # fmt: skip
        if trained:
            # Where other data are evaluated, tested pictures stand for the pictures of sets that need not be there.
            sets = {name: sets[name] or sets[TEST] for name in sets}
        for name in (TRAIN, VALIDATION, TEST):
            if not any(moment.is_visible for moment in sets[name]):
                value = f"{name}: {len(sets[name])} pictures, none with a visible ball"
                remedy = "Add clips, or change dataset.validation_share and dataset.test_share"
                raise DataError("Training, validation and test each see a ball", value=value, remedy=remedy)
        return sets

    def _judged(
        self, clips: Sequence[Clip], parts: Mapping[str, Sequence[Part]], trained: Sequence[Any]
    ) -> Mapping[str, Sequence[Part]]:
        """Returns the parts of each set where a finished run is evaluated: clips of its training as they were divided
        there; clips that it never saw are a test, or keep their sets where they have a test set of their own.

        Args:
            clips: The clips that are evaluated.
            parts: The sets into which a training would divide them.
            trained: Of each clip of the run's training, `FrameReader.digest` and the pictures of each set.
        """
        digests = {clip: self.frames.digest(clip) for clip in clips}
        earlier = dict(trained)
        if sorted(digests.values()) == sorted(digest for digest, _ in trained):
            return parts
        new = [clip for clip in clips if digests[clip] not in earlier]
        has_test = any(clip.belongs_to == TEST for clip in new)
        judged = {name: [(clip, *earlier[digests[clip]][name]) for clip in clips
                         if name in earlier.get(digests[clip], ())] for name in parts}  # fmt: skip
        for name in parts:
            judged[name] += [(clip, 0, len(clip)) for clip in new if name == ((has_test and clip.belongs_to) or TEST)]
        if not judged[TEST]:
            raise DataError("Clips that trained or validated a model do not test it",
                            value=f"all {len(clips)} clips are such", remedy="Evaluate on other clips")  # fmt: skip
        return judged

    @classmethod
    def files(cls, dataset: TrackNetDatasetSettings, data_root: Path) -> Sequence[Path]:
        """Lists the path of the labels, and the folder of the pictures if the settings name it."""
        return [Path(path) for path in (dataset.path, dataset.frames) if path]

    def describe(self, row: int) -> str:
        """Names a sample by its clip and picture."""
        moment: Moment = self.sample(row)
        return f"picture {moment.position} of {moment.clip.name}"

    def notices(self) -> Sequence[str]:
        """Returns the number of training pictures that have a loss, and whether pictures are generated."""
        training = self.sets[TRAIN]
        counted = sum(map(self._is_counted, training))
        told = []
        if counted < len(training):
            told.append(f"{counted:,} of {len(training):,} training pictures have a loss: the ball is not visible in "
                        "the others")  # fmt: skip
        if self.dataset.render_missing_frames:
            told.append("Missing pictures are generated from the labels, and scores are those of generated video")
        return told

    def model(self) -> nn.Module:
        """Makes the network."""
        return make_unet(self.model_settings, self.dataset)

    def features(self, sample: Moment) -> Mapping[str | Feature, float]:
        """Counts samples only: all pictures have one size."""
        return {"samples": 1.0}

    def collate(self, samples: Sequence[Moment]) -> dict[str, Tensor]:
        """Reads the pictures as bytes [B, H, W, 9], with a background [B, H, W, 12], which `heatmaps` turns into floats
        on the device.

        The batch also has the balls' positions [B, 2], whether each ball is visible [B], and whether each picture has a
        loss [B].
        """
        pictures = [np.concatenate(self._input(moment), axis=-1) for moment in samples]
        return {
            "pictures": torch.from_numpy(np.stack(pictures)),
            "balls": torch.tensor([moment.ball for moment in samples], dtype=torch.float64),
            "seen": torch.tensor([moment.is_visible for moment in samples]),
            "counted": torch.tensor([self._is_counted(moment) for moment in samples]),
        }

    def _input(self, moment: Moment) -> Sequence[NDArray[np.uint8]]:
        """Returns the pictures [H, W, 3] that the network sees for a moment."""
        pictures = self.frames.read(moment.clip, moment.position)
        if self.dataset.background == CONCAT:
            return [*pictures, self.frames.background(moment.clip)]
        if self.dataset.background == SUBTRACT:
            background = self.frames.background(moment.clip).astype(np.int16)
            return [*np.abs(pictures - background).astype(np.uint8)]
        return [*pictures]

    def _is_counted(self, moment: Moment) -> bool:
        # A picture with a hidden ball has no loss: to report the ball is neither right nor wrong.
        return moment.is_visible or (self.settings.learn_absent and moment.visibility == ABSENT)

    def heatmaps(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Computes the logits [B, H, W] of a batch."""
        # The channels-last memory layout makes convolutions twice as fast on a CPU.
        channels = batch["pictures"].permute(0, 3, 1, 2).to(batch["balls"].dtype)
        logits: Tensor = model(channels.div_(255))
        # Not in half precision, which has no digits left for heights near 0 and 1.
        return logits.to(batch["balls"].dtype)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Losses:
        """Sums the loss over the pixels of the pictures that have a loss; the denominator is the number of pixels."""
        logits = self.heatmaps(model, batch)
        target = ball_heatmaps(batch["balls"], self.settings.sigma, logits.shape[1:]) * batch["seen"][:, None, None]
        each = pixel_losses(logits, target, self.settings).sum(dim=(1, 2))
        counted = batch["counted"].to(each.dtype)
        # Not the mean over this batch: the parts of a logical batch have different numbers of visible balls.
        return {TERM: ((each * counted).sum(), counted.sum() * logits[0].numel())}

    def denominators(self, samples: Sequence[Moment]) -> Mapping[str, float]:
        """Counts the pixels of the pictures that have a loss."""
        return {TERM: float(sum(map(self._is_counted, samples)) * self.dataset.width * self.dataset.height)}

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns [B, 3]: x, y and height of the highest peak of each heatmap."""
        return peaks(torch.sigmoid(self.heatmaps(model, batch)))

    def samples_to_predict(self) -> Sequence[Moment]:
        """Finds pictures without labels, which are decoded as they are predicted."""
        size = (self.dataset.width, self.dataset.height)
        clips = reading.unlabelled_clips(self.dataset)
        if self.dataset.background != OFF:
            # Each clip is a game of its own here.
            clips = [replace(clip, group=clip.name) for clip in clips]
            self._prepare_backgrounds(clips)
        self._is_one_clip = len(clips) == 1
        self.only_part = _file_name(clips[0]) if self._is_one_clip else type(self).only_part
        return [Moment(clip=clip, position=position, size=size) for clip in clips for position in range(len(clip))]

    def columns(self, samples: Sequence[Moment], predictions: Sequence[Any]) -> Mapping[str, Sequence[Any]]:
        """Returns rows as those of published label files, in pixels of the picture; with several clips their names,
        too.
        """
        values = np.stack([np.asarray(prediction, dtype=np.float64) for prediction in predictions])
        reported = values[:, 2] >= self.settings.threshold
        places = [moment.in_picture(x, y) if seen else (0, 0)
                  for moment, (x, y), seen in zip(samples, values[:, :2], reported, strict=True)]  # fmt: skip
        clips = {} if self._is_one_clip else {"Clip": [_file_name(moment.clip) for moment in samples]}
        return {
            **clips,
            "Frame": [int(moment.clip.numbers[moment.position]) for moment in samples],
            "Visibility": reported.astype(np.int64).tolist(),
            "X": [x for x, _ in places],
            "Y": [y for _, y in places],
        }

    @contextmanager
    def preview(self, path: Path) -> Iterator[Callable[[Sequence[Moment], Sequence[Any]], None]]:
        """Opens a folder of pictures, or a video, with the reported ball and its last positions."""
        with open_sheet(path, is_one_clip=self._is_one_clip) as sheet:
            drawn = BallPreview(sheet, self.settings.preview_trail)

            def draw(samples: Sequence[Moment], predictions: Sequence[Any]) -> None:
                rows = self.columns(samples, predictions)
                for moment, seen, x, y in zip(samples, rows["Visibility"], rows["X"], rows["Y"], strict=True):
                    drawn.draw(moment.clip, moment.position, (x, y) if seen else None)

            yield draw

    def measure(self, samples: Sequence[Moment], predictions: Sequence[Any]) -> Mapping[str, float]:
        """Computes the metrics of predictions; writes previews if `task.preview_dir` names a folder."""
        values = np.stack([np.asarray(prediction, dtype=np.float64) for prediction in predictions])
        found = Found(positions=values[:, :2], reported=values[:, 2] >= self.settings.threshold)
        if self.settings.preview_dir:
            self.write_previews(Path(self.settings.preview_dir), samples, found)
        return self._metrics(samples, found)

    def baselines(self, samples: Sequence[Moment]) -> Mapping[str, Mapping[str, float]]:
        """Returns the metrics of three methods without a network."""
        trained = [moment.ball for moment in self.sets[TRAIN] if moment.is_visible]
        detections = {
            "median position in training": Found(
                positions=np.tile(np.median(trained, axis=0), (len(samples), 1)),
                reported=np.ones(len(samples), np.bool_),
            ),
            "largest change since the picture before": self._largest_change(samples),
            "true position one picture before": _last_known(samples),
        }
        return {name: self._metrics(samples, found) for name, found in detections.items()}

    def _metrics(self, samples: Sequence[Moment], found: Found) -> dict[str, float]:
        return detection_metrics(samples, found, self.settings.tolerance_px * self.dataset.width / _TOLERANCE_WIDTH)

    def _largest_change(self, samples: Sequence[Moment]) -> Found:
        changes = np.array([_change(self.frames.read(moment.clip, moment.position)) for moment in samples])
        return Found(positions=changes[:, :2], reported=changes[:, 2] > _MOTION)

    def write_previews(self, folder: Path, samples: Sequence[Moment], found: Found) -> None:
        """Writes pictures, evenly spread over a set, with the true position in green and a reported position in red.

        Raises:
            StateError: The folder cannot be written.
        """
        chosen = np.unique(np.linspace(0, len(samples) - 1, min(self.settings.previews, len(samples))).astype(np.int64))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for row in chosen.tolist():
                moment = samples[row]
                picture = self.frames.read(moment.clip, moment.position)[-1].copy()
                if moment.is_visible:
                    _mark(picture, moment.ball, _TRUE)
                if found.reported[row]:
                    _mark(picture, tuple(found.positions[row]), _REPORTED)
                name = f"{moment.clip.name.replace('/', '-')}-{moment.position:04d}.png"
                write_bytes_atomic(folder / name, png_bytes(picture))
        except OSError as error:
            raise StateError("Previews are written into the folder task.preview_dir", value=f"{folder}: {error}",
                             remedy="Make room, or name another folder") from error  # fmt: skip


def _file_name(clip: Clip) -> str:
    # Not twice `_ball` in the name of a file: the clip of a label file has its name.
    return clip.name.removesuffix("_ball")


def ball_heatmaps(balls: Tensor, sigma: float, size: Sequence[int]) -> Tensor:
    r"""Computes the target heatmaps: :math:`\exp(-d^2 / 2\sigma^2)` at the distance d from the ball.

    Args:
        balls: [B, 2] positions of the balls.
        sigma: Standard deviation in pixels.
        size: H and W.

    Returns:
        [B, H, W]: 1 at the ball's position.
    """
    down, across = (torch.arange(length, dtype=balls.dtype, device=balls.device) for length in size)
    # A product of two factors, so that no tensor of distances takes memory in addition to the result.
    by_row = torch.exp(-((down - balls[:, 1:]) ** 2) / (2 * sigma**2))
    by_column = torch.exp(-((across - balls[:, :1]) ** 2) / (2 * sigma**2))
    return by_row[:, :, None] * by_column[:, None, :]


def pixel_losses(logits: Tensor, target: Tensor, settings: TrackNetSettings) -> Tensor:
    r"""Computes :math:`w\,|\sigma(z) - y|^\gamma\,\mathrm{BCE}(z, y)` of each pixel, with w = 1 + (ball_weight − 1)·y.

    Without the weight, the background would outweigh the few pixels of the ball. The power gives pixels that are nearly
    right less of the gradient.

    Args:
        logits: [B, H, W] z.
        target: [B, H, W] y.
        settings: `ball_weight`, and `focal_gamma` for γ.

    Source: the quality focal loss of Li et al. 2020, arXiv:2006.04388, which takes targets between 0 and 1.
    """
    weight = 1 + (settings.ball_weight - 1) * target
    each = F.binary_cross_entropy_with_logits(logits, target, weight, reduction="none")
    if settings.focal_gamma == 0:
        return each
    return each * (torch.sigmoid(logits) - target).abs() ** settings.focal_gamma


def peaks(heights: Tensor) -> Tensor:
    """Finds the highest pixel of each heatmap, and refines its position with the heights of the pixels around it.

    Args:
        heights: [B, H, W] in [0, 1].

    Returns:
        [B, 3]: x and y, the mean position of the pixels around the peak weighted by their heights; the peak's height.
    """
    batch, height, width = heights.shape
    top, place = heights.flatten(1).max(dim=1)
    steps = torch.arange(-_REFINED, _REFINED + 1, device=heights.device)
    # [B, D, D] places; a place outside the heatmap has the weight 0.
    rows = (place // width)[:, None, None] + steps[:, None]
    columns = (place % width)[:, None, None] + steps
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    each = torch.arange(batch, device=heights.device)[:, None, None]
    weights = heights[each, rows.clamp(0, height - 1), columns.clamp(0, width - 1)] * inside
    # The sum must not be 0, not even where every height has underflowed.
    total = weights.sum(dim=(1, 2)).clamp_min(torch.finfo(heights.dtype).tiny)
    x, y = ((weights * places).sum(dim=(1, 2)) / total for places in (columns, rows))
    return torch.stack([x, y, top], dim=1)


def detection_metrics(samples: Sequence[Moment], found: Found, tolerance: float) -> dict[str, float]:
    """Computes precision, recall, F1 and position error.

    A reported ball is right if a visible ball is within the tolerance. Precision is the share of right balls among
    reported balls, recall the share of right balls among visible balls: a ball reported elsewhere lowers both. Pictures
    whose ball is hidden are left out: their label is a guess.

    Args:
        samples: R pictures.
        found: Detections in the pictures.
        tolerance: In pixels of the heatmap.

    Returns:
        `precision`, `recall`, `f1`; and `position_error_px`, the mean error in pixels of the labelled pictures over all
        pictures with a visible and a reported ball, right or wrong. Without such pictures it is absent.
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
        # Width and height of a heatmap pixel, in pixels of the labelled picture.
        scales = np.array([np.divide(moment.clip.size, moment.size) for moment in samples])
        metrics["position_error_px"] = float(np.hypot(*(offsets * scales)[given].T).mean())
    return metrics


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def _last_known(samples: Sequence[Moment]) -> Found:
    """Reports the ball's last labelled position before each picture; no ball where no earlier picture shows it."""
    positions, reported = np.zeros((len(samples), 2)), np.zeros(len(samples), np.bool_)
    for row, one in enumerate(samples):
        clip, start = one.clip, int(one.clip.starts[one.position])
        earlier = np.flatnonzero(np.isin(clip.visibility[start : one.position], (EASY, HARD)))
        if earlier.size:
            before = Moment(clip=clip, position=start + int(earlier[-1]), size=one.size)
            positions[row], reported[row] = before.ball, True
    return Found(positions=positions, reported=reported)


def _change(pictures: NDArray[np.uint8]) -> tuple[float, float, float]:
    """Returns x and y of the place that has brightened most since the previous picture, and its change in grey levels.

    The change is a mean over 3 × 3 pixels. `pictures` is [3, H, W, 3] in order of time.
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
