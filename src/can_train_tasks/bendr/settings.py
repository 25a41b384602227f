"""Settings of the EEG task: its recordings, its model and its two modes."""

import re
from dataclasses import dataclass, field
from typing import Final

from can_train.config.settings import check_choice, check_range
from can_train.config.task_settings import ModelSpec, Prerequisite, TaskSettings
from can_train.errors import ConfigError

MOST_CLASSES: Final = 100
"""Classes that a recording may have; a column with more values is a signal."""
PRETRAIN: Final = "pretrain"
CLASSIFY: Final = "classify"
OFF: Final = "off"
"""Value of `dataset.subject`: subjects are unknown, and recordings are split by time."""
FOLDER, FILE = "folder", "file"
"""Values of `dataset.subject`: a folder is a subject, or a file is."""
BALANCES: Final = ("none", "undersample", "oversample", "weights")
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
    origin: str = ""
    """Where the files come from and how they lie in their folder, for the error when they are missing."""
    include: list[str] = field(default_factory=list)
    """Patterns of the files that are read, by name or by path inside the folder: [*R04.edf]; empty: all."""
    exclude: list[str] = field(default_factory=list)
    """Patterns of files that are left out: [S088*]."""
    sampling_hz: float = 128.0
    """Samples per second, in all recordings; EDF, BDF and FIF files of another rate are resampled."""
    label: str = ""
    """Column with the class of each sample, a whole number; empty: recognised by its name (label, class, …)."""
    events: list[str] = field(default_factory=list)
    """Annotations of EDF, BDF and FIF files that are classes, with their classes: [T1:0,T2:1]."""
    target: str = ""
    """Regular expression of an annotation that names the target of a recording, in a group: "#Tgt(.)". Annotations that
    do not begin with # are then events: of class 1 where their text contains the target, of class 0 elsewhere."""
    event_column: str = ""
    """Column of CSV files that is not 0 where an event begins; a table *Labels.csv has the classes of the events."""
    event_s: float = 0.0
    """Seconds from an event's beginning that are of its class; 0: as long as the annotation says."""
    aligned: bool = False
    """Cut one window at each event, in place of windows one after the other."""
    offset_s: float = 0.0
    """Seconds from an event to the beginning of its window; negative: the window begins before it."""
    channels: list[str] = field(default_factory=list)
    """Columns that are channels; empty: all columns except the label and columns that count time; the EEG channels."""
    exclude_channels: list[str] = field(default_factory=list)
    """Patterns of columns or EEG channels that are left out where `channels` is empty: [EOG*]."""
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
    subject: str = OFF
    """Subject of a recording: folder, file, or a regular expression whose match in the file's path is the subject (its
    group, if it has one): "S\\d\\d\\d". Subjects are then split into the sets; off: each recording is split by
    time."""
    folds: int = 0
    """Parts of the subjects for cross-validation; 0: `validation_share` and `test_share` decide."""
    fold: int = 0
    """Part of the subjects that is tested, counted from 0; the part before it validates."""
    leave_out: str = ""
    """Subject that is tested; the subject before it validates. Empty: `folds` or the shares decide."""
    test_subjects: list[str] = field(default_factory=list)
    """Subjects that are tested in every fold; the parts of the other subjects validate in turn."""
    balance: str = "none"
    """Balance of the classes in training: none; undersample or oversample draws as many windows of each class in an
    epoch; weights: the loss of a window is weighted by the rarity of its class."""
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
        if self.aligned and not (self.events or self.target or self.event_column):
            raise ConfigError("dataset.aligned cuts windows at events", value="dataset.events is empty",
                              remedy="Name the events: --set 'dataset.events=[T1:0,T2:1]'")  # fmt: skip
        if self.event_column and not self.aligned:
            raise ConfigError("dataset.event_column has the beginnings of events, and windows must be cut there",
                              value="dataset.aligned is false", remedy="Add --set dataset.aligned=true")  # fmt: skip
        _ = self.class_of_event
        check_choice("dataset.balance", self.balance, BALANCES)
        if self.subject.lower() == "false":
            # YAML reads the word off as false.
            object.__setattr__(self, "subject", OFF)
        _check_pattern("dataset.subject", self.subject, groups=(0, 1))
        if self.target:
            _check_pattern("dataset.target", self.target, groups=(1,))
        self._check_folds()

    def _check_folds(self) -> None:
        check_range("dataset.folds", self.folds, low=0)
        check_range("dataset.fold", self.fold, low=0)
        if self.folds and self.folds < 2 + (not self.test_subjects):
            raise ConfigError("dataset.folds must leave subjects to train on", value=str(self.folds),
                              remedy="Three folds test, validate and train: --set dataset.folds=3")  # fmt: skip
        if self.fold >= max(self.folds, 1):
            remedy = (f"Give a fold from 0 to {self.folds - 1}" if self.folds else
                      f"Say how many folds there are: --set dataset.folds={max(self.fold + 1, 3)}")  # fmt: skip
            raise ConfigError("dataset.fold counts the folds of dataset.folds from 0",
                              value=f"{self.fold} of {self.folds} folds", remedy=remedy)  # fmt: skip
        if self.leave_out and (self.fold or self.test_subjects):
            other = "dataset.fold" if self.fold else "dataset.test_subjects"
            raise ConfigError("dataset.leave_out names the subject that is tested", value=f"{other} names others, too",
                              remedy=f"Leave dataset.leave_out or {other} away")  # fmt: skip
        given = [name for name in ("folds", "leave_out", "test_subjects") if getattr(self, name)]
        if given and not self.by_subject:
            raise ConfigError(f"dataset.{given[0]} needs the subjects of recordings", value="dataset.subject is off",
                              remedy="Say which recordings are of a subject: --set dataset.subject=folder")  # fmt: skip

    @property
    def by_subject(self) -> bool:
        """Whether subjects are split into the sets, not the time of each recording."""
        return self.subject != OFF

    @property
    def declared_classes(self) -> list[int]:
        """The classes that the settings name, ascending; empty: recordings have them."""
        has_two = self.target or self.event_column
        return [0, 1] if has_two else sorted({*self.class_of_event.values()})

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


def _check_pattern(name: str, pattern: str, *, groups: tuple[int, ...]) -> None:
    remedy = """Write it as --set 'dataset.subject="S(..)R"'""" if groups[0] == 0 else "Write it as #Tgt(.)"
    try:
        has = re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(f"{name} must be a regular expression", value=f"{pattern!r}: {error}", remedy=remedy
                          ) from error  # fmt: skip
    if not pattern or has not in groups:
        raise ConfigError(f"{name} must be a regular expression with {' or '.join(map(str, groups))} "
                          f"group{'s' if len(groups) > 1 else ''}", value=repr(pattern), remedy=remedy)  # fmt: skip


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
        check_range("The number of strides in model.strides", len(self.strides), low=1)
        for stride in self.strides:
            check_range("Every stride in model.strides", stride, low=1)
        for name in ("heads", "groups"):
            if self.hidden % getattr(self, name):
                raise ConfigError(f"model.hidden must be a multiple of model.{name}",
                                  value=f"{self.hidden} with {getattr(self, name)} {name}",
                                  remedy=f"Write it as --set model.{name}=1, or choose another width")  # fmt: skip
        if self.position_kernel % 2 == 0:
            raise ConfigError("model.position_kernel must be odd", value=str(self.position_kernel),
                              remedy=f"Write it as --set model.position_kernel={self.position_kernel + 1}")  # fmt: skip

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
    role=PRETRAINED, what="a pretrained run", models=("",), modes=(PRETRAIN,), same_model=True, required=False,
    looked_for=False,
)  # fmt: skip

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
    inputs=("sampling_hz", "channels", "exclude_channels"),
    inherited=(
        *("sampling_hz", "label", "events", "target", "event_column", "event_s", "aligned", "offset_s"),
        *("channels", "exclude_channels", "window_s", "stride_s", "cycles", "gap_s", "subject"),
        *("validation_share", "test_share", "balance", "clip"),
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
