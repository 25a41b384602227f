"""Settings of ball tracking: its data sets, its network, its heatmaps and their loss and metrics."""

from dataclasses import dataclass, field
from typing import Final

from can_train.config.settings import check_choice, check_range
from can_train.config.task_settings import ModelSpec, TaskSettings
from can_train.errors import ConfigError

OFF, CONCAT, SUBTRACT = BACKGROUNDS = ("off", "concat", "subtract")


@dataclass(frozen=True, kw_only=True)
class SyntheticVideoSettings:
    """The simulated games behind `--dataset synthetic`."""

    seed: int = 0
    """Seed of backgrounds, ball and distractors."""
    games: int = 5
    """Games, each with another background; the last game is the test set."""
    clips: int = 2
    """Clips of each game."""
    frames: int = 40
    """Frames of each clip; time and disk grow linearly with them."""
    width: int = 320
    """Width of the pictures in pixels; the height is 9/16 of the width."""
    distractors: int = 4
    """Moving objects in each clip that are not the ball."""

    def __post_init__(self) -> None:
        check_range("dataset.synthetic.seed", self.seed, low=0)
        for name in ("games", "clips"):
            check_range(f"dataset.synthetic.{name}", getattr(self, name), low=1, high=100)
        check_range("dataset.synthetic.frames", self.frames, low=3, high=10_000)
        check_range("dataset.synthetic.width", self.width, low=32, high=1920)
        check_range("dataset.synthetic.distractors", self.distractors, low=0, high=100)

    @property
    def height(self) -> int:
        """Height of the pictures in pixels."""
        return round(self.width * 9 / 16)


@dataclass(frozen=True, kw_only=True)
class TrackNetDatasetSettings:
    """One data set of video clips with a ball, and the reading of its pictures."""

    name: str = "synthetic"
    """Name in keys and run ids."""
    path: str = ""
    """A folder of game*/Clip*/Label.csv or train/match*/csv/*_ball.csv, a CSV file of Frame,Visibility,X,Y, or a folder
    of these."""
    frames: str = ""
    """Folder that holds the picture folder, or the video, of each CSV file; empty: they lie beside the CSV files."""
    background: str = "off"
    """Median of a game's pictures: concat: a further input beside the pictures; subtract: from each picture; or off."""
    render_missing_frames: bool = False
    """Draw generated pictures for a CSV file without pictures, with the ball at its labelled positions."""
    label_width: int = 0
    """Width in pixels of the labelled pictures, which coordinates refer to; 0: width of the picture files, or 1280 for
    generated pictures."""
    label_height: int = 0
    """Height in pixels of the labelled pictures, which coordinates refer to; 0: height of the picture files, or 720 for
    generated pictures."""
    width: int = 256
    """Width of resized pictures and of the heatmap, in pixels."""
    height: int = 144
    """Height of resized pictures and of the heatmap, in pixels."""
    validation_share: float = 0.2
    """Share of the games that is kept for validation; of the clips if there are fewer than three games; of each clip's
    time if there are fewer than three clips."""
    test_share: float = 0.2
    """Share that is kept for testing, counted like `validation_share`: the last games, clips or pictures."""
    synthetic: SyntheticVideoSettings = field(default_factory=SyntheticVideoSettings)
    """Size and seed of the simulated games; used by `synthetic` only."""

    def __post_init__(self) -> None:
        check_choice("dataset.background", self.background, BACKGROUNDS)
        for name in ("label_width", "label_height"):
            check_range(f"dataset.{name}", getattr(self, name), low=0)
        for name in ("width", "height"):
            check_range(f"dataset.{name}", getattr(self, name), low=8, high=4096)
        for name in ("validation_share", "test_share"):
            check_range(f"dataset.{name}", getattr(self, name), above=0.0, high=0.3)
        if bool(self.label_width) != bool(self.label_height):
            found = f"dataset.label_width {self.label_width}, dataset.label_height {self.label_height}"
            raise ConfigError("The size that coordinates belong to has a width and a height", value=found,
                              remedy="Give both, or neither")  # fmt: skip

    @property
    def is_synthetic(self) -> bool:
        """Whether the clips are simulated."""
        return not self.path


@dataclass(frozen=True, kw_only=True)
class UNetSettings:
    """The network: an encoder (its `backbone`) and a decoder, joined on each level."""

    width: int = 32
    """Channels of the first level; each level below has twice as many."""
    levels: int = 4
    """Levels; each level has half the width and height of the level above."""
    groups: int = 8
    """Most groups of a group normalisation."""

    def __post_init__(self) -> None:
        check_range("model.width", self.width, low=1, high=1024)
        check_range("model.levels", self.levels, low=2, high=8)
        check_range("model.groups", self.groups, low=1)


@dataclass(frozen=True, kw_only=True)
class TrackNetSettings:
    """Target heatmaps, their loss, and the metrics of reported balls."""

    sigma: float = 2.0
    """Standard deviation of the ball in the heatmap, in pixels of the heatmap."""
    ball_weight: float = 10.0
    """Weight of a pixel at the ball's centre; a pixel far away has weight 1."""
    focal_gamma: float = 2.0
    """Power of the difference between heatmap and target, a factor of the loss; nearly right pixels weigh less; 0: no
    such factor."""
    learn_absent: bool = False
    """Learn also from pictures without a ball, with an empty heatmap; off, only pictures with a visible ball have a
    loss."""
    threshold: float = 0.5
    """Least height of the heatmap's peak for a ball to be reported."""
    tolerance_px: float = 4.0
    """Largest distance of a right reported ball from the true ball, in pixels of a picture 256 wide and 144 high."""
    preview_dir: str = ""
    """Folder for pictures with the true and the reported ball, written when a model is judged; empty: no pictures are
    written."""
    previews: int = 6
    """Pictures that are written for each set."""
    preview_trail: int = 8
    """Positions in a picture of `predict --preview`: of the ball in it, and in the pictures before."""

    def __post_init__(self) -> None:
        check_range("task.sigma", self.sigma, above=0.0)
        check_range("task.ball_weight", self.ball_weight, low=1.0)
        if self.focal_gamma:
            # Below 1 the loss's derivative is infinite where a pixel is right.
            check_range("task.focal_gamma", self.focal_gamma, low=1.0)
        check_range("task.threshold", self.threshold, above=0.0, high=1.0)
        check_range("task.tolerance_px", self.tolerance_px, above=0.0)
        check_range("task.previews", self.previews, low=0, high=1000)
        check_range("task.preview_trail", self.preview_trail, low=1, high=1000)


TRAINING: Final = {
    "lr": 5e-4,
    "lr_batch_size": 16,
    "weight_decay": 0.05,
    "epochs": 20,
    "warmup_share": 0.15,  # three of twenty epochs
    "precision": "fp16",
    "freeze": ["backbone"],
    "thaw_epoch": 10,
}
"""Training settings of TrackNet that differ from the defaults of all tasks."""

TASK = TaskSettings(
    task_class="can_train_tasks.tracknet.task:TrackNetTask",
    settings=TrackNetSettings,
    dataset=TrackNetDatasetSettings,
    inputs=("width", "height", "background"),
    inherited=("width", "height", "background"),
    models={"": ModelSpec(settings=UNetSettings, modes=("",))},
    training=TRAINING,
)
