"""Settings of the EEG task: its recordings, its model and its two modes."""

from dataclasses import dataclass, field
from typing import Final

from can_train.config.settings import check_range
from can_train.config.task_settings import ModelSpec, Prerequisite, TaskSettings
from can_train.errors import ConfigError

MOST_CLASSES: Final = 100
"""Classes that a recording may have; a column with more values is a signal."""
PRETRAIN: Final = "pretrain"
CLASSIFY: Final = "classify"
PRETRAINED: Final = "pretrained"
"""Role of the pretrained run whose weights `classify` starts with."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRecordings:
    """The simulated recordings behind `--dataset synthetic`."""

    seed: int = 0
    """Seed of people and signals."""
    recordings: int = 4
    """Recordings, one file and one person each."""
    seconds: float = 60.0
    """Length of a recording."""
    channels: int = 8
    """Electrodes."""

    def __post_init__(self) -> None:
        check_range("dataset.synthetic.seed", self.seed, low=0)
        check_range("dataset.synthetic.recordings", self.recordings, low=1, high=999)
        check_range("dataset.synthetic.seconds", self.seconds, low=10.0, high=24 * 3600.0)
        check_range("dataset.synthetic.channels", self.channels, low=1, high=256)


@dataclass(frozen=True, kw_only=True)
class RecordingSettings:
    """Recordings as CSV, EDF, BDF or FIF files, one recording in each file, and their cut into windows."""

    name: str = "synthetic"
    """Name in keys and run ids."""
    path: str = ""
    """A recording, or a folder of them; empty: `published` under the data root."""
    published: str = ""
    """File or folder under the data root; empty: `name`."""
    sampling_hz: float = 128.0
    """Samples per second, in all recordings; EDF, BDF and FIF files of another rate are resampled."""
    label: str = ""
    """Column with the class of each sample, a whole number; empty: recognised by its name (label, class, …)."""
    events: list[str] = field(default_factory=list)
    """Annotations of EDF, BDF and FIF files that are classes, with their classes: [T1:0,T2:1]."""
    event_s: float = 0.0
    """Seconds from an event's beginning that are of its class; 0: as long as the annotation says."""
    aligned: bool = False
    """Cut one window at each event, in place of windows one after the other."""
    offset_s: float = 0.0
    """Seconds from an event to the beginning of its window; negative: the window begins before it."""
    channels: list[str] = field(default_factory=list)
    """Columns that are channels; empty: all columns except the label and columns that count time; the EEG channels."""
    window_s: float = 2.0
    """Seconds in a window."""
    stride_s: float = 0.0
    """Seconds from the start of a window to the start of the next; 0: the window's length, without overlap."""
    cycles: int = 1
    """Parts that a recording is cut into; each part has a stretch for training, validation and test. Several parts help
    where a class lasts long in the recording."""
    gap_s: float = 1.0
    """Seconds left out between two stretches, so that neighbouring windows are not in different sets."""
    validation_share: float = 0.2
    """Share of the time that is kept for validation."""
    test_share: float = 0.2
    """Share of the time that is kept for testing."""
    clip: float = 6.0
    """Largest value that models see, in robust standard deviations; artefacts are clipped to it."""
    synthetic: SimulatedRecordings = field(default_factory=SimulatedRecordings)
    """Size and seed of the simulated recordings; used by `synthetic` only."""

    def __post_init__(self) -> None:
        check_range("dataset.sampling_hz", self.sampling_hz, above=0.0, high=1e6)
        check_range("dataset.window_s", self.window_s, low=4 / self.sampling_hz)
        check_range("dataset.stride_s", self.stride_s, low=0.0)
        if not self.stride_s:
            object.__setattr__(self, "stride_s", self.window_s)
        check_range("dataset.stride_s", self.stride_s, low=1 / self.sampling_hz)
        check_range("dataset.cycles", self.cycles, low=1)
        check_range("dataset.gap_s", self.gap_s, low=0.0)
        check_range("dataset.validation_share", self.validation_share, above=0.0, high=0.4)
        check_range("dataset.test_share", self.test_share, above=0.0, high=0.4)
        check_range("dataset.clip", self.clip, above=0.0)
        check_range("dataset.event_s", self.event_s, low=0.0)
        check_range("dataset.offset_s", self.offset_s, low=-3600.0, high=3600.0)
        if self.aligned and not self.events:
            raise ConfigError("dataset.aligned cuts windows at events", value="dataset.events is empty",
                              remedy="Name the events: --set 'dataset.events=[T1:0,T2:1]'")  # fmt: skip
        _ = self.class_of_event

    @property
    def is_synthetic(self) -> bool:
        """Whether the recordings are simulated."""
        return self.name.startswith("synthetic") and not self.path

    @property
    def class_of_event(self) -> dict[str, int]:
        """The class of each annotation that is one, by its text."""
        classes = {}
        for text in self.events:
            name, _, number = text.rpartition(":")
            if not name or not number.strip().isdecimal() or int(number) >= MOST_CLASSES:
                raise ConfigError(f"dataset.events must give each annotation a class from 0 to {MOST_CLASSES - 1}",
                                  value=repr(text), remedy="Write them as [T1:0,T2:1]")  # fmt: skip
            classes[name.strip()] = int(number)
        return classes

    def samples(self, seconds: float) -> int:
        """Returns the number of samples in a duration."""
        return round(seconds * self.sampling_hz)


@dataclass(frozen=True, kw_only=True)
class BendrSettings:
    """Convolutional encoder and transformer.

    BENDR as published: hidden 512, strides [3,2,2,2,2,2], layers 8, heads 8, feedforward 3076.
    """

    hidden: int = 64
    """Width of the encoder and of the transformer."""
    strides: list[int] = field(default_factory=lambda: [2, 2, 2])
    """Stride of each convolution; their product is the number of samples in a step of the encoded sequence."""
    layers: int = 2
    """Transformer layers."""
    heads: int = 4
    """Attention heads."""
    feedforward: int = 128
    """Width between the two linear maps of a transformer layer."""
    groups: int = 8
    """Groups of channels that are normalised together."""
    position_kernel: int = 25
    """Steps that the convolution for positions covers; odd."""
    dropout: float = 0.1
    """Dropout in encoder and transformer."""

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "feedforward", "groups", "position_kernel"):
            check_range(f"model.{name}", getattr(self, name), low=1)
        check_range("model.dropout", self.dropout, low=0.0, high=0.99)
        check_range("number of strides in model.strides", len(self.strides), low=1)
        for stride in self.strides:
            check_range("every stride in model.strides", stride, low=1)
        for name in ("heads", "groups"):
            if self.hidden % getattr(self, name):
                raise ConfigError(f"model.hidden must be a multiple of model.{name}",
                                  value=f"{self.hidden} with {getattr(self, name)} {name}")  # fmt: skip
        if self.position_kernel % 2 == 0:
            raise ConfigError("model.position_kernel must be odd", value=str(self.position_kernel))

    def steps(self, samples: int) -> int:
        """Returns the number of steps that the encoder makes from a window of `samples` samples."""
        for stride in self.strides:
            samples = -(-samples // stride)
        return samples


@dataclass(frozen=True, kw_only=True)
class PretrainSettings:
    """Contrastive pretraining: the model recognises a masked step among other steps of its sequence."""

    name: str = PRETRAIN
    mask_rate: float = 0.065
    """Masked spans that begin, for each step of the sequence."""
    mask_span: int = 10
    """Steps in a masked span; spans may overlap."""
    negatives: int = 20
    """Other steps of its sequence among which a masked step is recognised."""
    temperature: float = 0.1
    """Divisor of the cosine similarities."""

    def __post_init__(self) -> None:
        check_range("mode.mask_rate", self.mask_rate, above=0.0, high=1.0)
        check_range("mode.mask_span", self.mask_span, low=1)
        check_range("mode.negatives", self.negatives, low=1)
        check_range("mode.temperature", self.temperature, above=0.0)


@dataclass(frozen=True, kw_only=True)
class ClassifySettings:
    """Supervised classification: the class that most samples of a window have."""

    name: str = CLASSIFY
    pretrained: str = ""
    """Folder of the pretrained run that training starts from; empty: fresh weights."""


_PRETRAINED: Final = Prerequisite(
    role=PRETRAINED, what="a pretrained run", models=("",), modes=(PRETRAIN,), same_model=True, required=False
)

TASK = TaskSettings(
    task_class="can_train_tasks.bendr.task:Bendr",
    # A batch of 32 in four loader batches, and a learning rate for fine-tuning, as published.
    training={
        "batch_size": 8,
        "lr_batch_size": 32,
        "gradient_accumulation_steps": 4,
        "epochs": 10,
        "lr": 2e-5,
        "optimizer": "adam",
        "betas": [0.9, 0.98],
    },
    dataset=RecordingSettings,
    # Pretraining may use more data and longer windows: only the meaning of a sample must be equal.
    inputs=("sampling_hz", "channels"),
    inherited=(
        *("sampling_hz", "label", "events", "event_s", "aligned", "offset_s", "channels", "window_s", "stride_s"),
        *("cycles", "gap_s"),
        *("validation_share", "test_share", "clip"),
    ),
    follows={"stride_s": "window_s"},
    modes={PRETRAIN: PretrainSettings, CLASSIFY: ClassifySettings},
    models={
        "": ModelSpec(
            settings=BendrSettings,
            modes=(PRETRAIN, CLASSIFY),
            prerequisites={CLASSIFY: (_PRETRAINED,)},
            needs={CLASSIFY: "labels; --pretrained RUN starts from a pretrained one"},
        )
    },
    files="can_train_tasks.bendr.recordings:find_recordings",
    digest="can_train_tasks.bendr.recordings:data_digest",
)
