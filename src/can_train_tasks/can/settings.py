"""Settings of the CAN task: its data sets, models and modes, and their first safety factors from experience."""

from dataclasses import dataclass, field
from typing import Final

from can_train.config.settings import check_choice, check_range
from can_train.config.task_settings import ModelSpec, Prerequisite, TaskSettings
from can_train.errors import ConfigError

# (names, share of the tuned limit, reason). Larger data sets have larger graphs.
_DATASETS: Final = (
    (("set_02", "set_03", "set_04"), 0.45, "large dataset (set_02/03/04)"),
    (("hcrl_sa",), 0.55, "medium dataset (hcrl_sa)"),
    (("hcrl_ch", "set_01"), 0.65, "small dataset (hcrl_ch/set_01)"),
)
_OTHER_DATASET: Final = (0.60, "other dataset")

# Multiplier and reason for each mode that takes more memory than a trial step shows.
_MODES: Final = {
    "knowledge_distillation": (0.75, "knowledge distillation (teacher caching)"),
    "fusion": (0.80, "fusion (two models in memory)"),
    "curriculum": (0.90, "curriculum (VGAE scoring)"),
    "autoencoder": (0.95, "autoencoder (reconstruction)"),
}


def experience(dataset: str, mode: str) -> tuple[float, str, list[tuple[float, str]]]:
    """Returns the base share of a data set, its reason in words, and the adjustments of a mode."""
    base, reason = next(((share, why) for names, share, why in _DATASETS if dataset in names), _OTHER_DATASET)
    return base, reason, [_MODES[mode]] if mode in _MODES else []


# Formats of text logs, and of binary ones; `auto` recognises them by the content.
RECORDINGS = ("blf", "mf4", "parquet", "pcap", "sqlite")
FORMATS = (
    "busmaster", "syncan",
    "can_train_and_test", "car_hacking", "hcrl_text", "hcrl_challenge",
    "candump", "candump_labelled", "whitespace", "asc", "trc", "python_can", "savvycan", "columns",
)  # fmt: skip
# The last two are set by `read_as_trained` for logs of a finished run: `auto`, with hexadecimal or decimal where a log
# does not tell its base.
NUMBER_BASES = ("auto", "hex", "dec", "auto_hex", "auto_dec")
BEHAVIOUR_FEATURES = "behaviour"
FEATURES = (BEHAVIOUR_FEATURES, "classic")
NOTHING_TESTED = "No part of the log was kept for a test (dataset.test_share)"
TIME_UNITS = ("auto", "s", "ms", "us", "ns")
SIZES = ("student", "teacher")  # the first is the default
# Label values that mean: no attack. Blanks, hyphens and underscores are alike; `state`, `message` and such may follow.
BENIGN_WORDS: Final = (
    "0", "r", "n", "no", "false", "none", "normal", "benign", "regular", "attack free", "attackfree", "free", "ambient",
    "no attack", "non attack", "not attack", "noattack", "legitimate", "legit", "genuine", "clean", "ok",
)  # fmt: skip
# Cells that hold no label. A row without a label is benign, where other rows have labels.
MISSING_WORDS: Final = frozenset({"", "-", "--", "?", "na", "n/a", "nan", "<na>", "null", "nil"})


@dataclass(frozen=True, kw_only=True)
class ColumnSettings:
    """Names of the columns of a CSV file with a header. An empty name: recognised by the header."""

    timestamp: str = ""
    """Seconds, another unit that the name tells (`time_ms`), or dates (ISO 8601)."""
    id: str = ""
    """CAN identifier."""
    dlc: str = ""
    """Payload length in bytes; derived from the payload where there is no such column."""
    data: str = ""
    """Payload in hexadecimal, with or without separators; or several columns of one byte each, separated by spaces."""
    label: str = ""
    """Attack label; a log without one is unlabelled."""
    channel: str = ""
    """Interface (bus) of a frame."""


DRIVE_SECONDS: Final = {1: 20.0, 2: 60.0, 3: 60.0}  # default length of a drive by version


@dataclass(frozen=True, kw_only=True)
class SyntheticSettings:
    """The simulated bus behind `--dataset synthetic`."""

    version: int = 2
    """3: as 2, but signals of different IDs are as loosely tied as in logged vehicles. 2: traffic as in logged
    vehicles, and attacks as rare as in published logs. 1: the first, simpler bus."""
    seed: int = 0
    """Seed of vehicles, traffic and attacks."""
    seconds: float = 0.0
    """Length of each drive in seconds (a test drive of version 1 is half as long); the data grow linearly with it. 0:
    the version's default length, 60 or 20."""

    def __post_init__(self) -> None:
        check_range("dataset.synthetic.version", self.version, low=min(DRIVE_SECONDS), high=max(DRIVE_SECONDS))
        check_range("dataset.synthetic.seed", self.seed, low=0)
        check_range("dataset.synthetic.seconds", self.drive_s, low=5.0, high=3600.0)

    @property
    def drive_s(self) -> float:
        """Length of each drive in seconds; of each training drive in version 1."""
        return float(self.seconds or DRIVE_SECONDS[self.version])


@dataclass(frozen=True, kw_only=True)
class CanDatasetSettings:
    """One CAN data set and its conversion into graphs."""

    name: str = "synthetic"
    """Name in keys and run ids."""
    path: str = ""
    """A log, or a folder of logs; empty: the published layout of `name` under the data root."""
    format: str = "auto"
    """A name of `FORMATS` or `RECORDINGS`, or `auto`."""
    columns: ColumnSettings = field(default_factory=ColumnSettings)
    """Column names of a CSV file with a header, or of a parquet file."""
    id_base: str = "auto"
    """Whether IDs of a CSV file with a header are written in hexadecimal or decimal."""
    byte_base: str = "auto"
    """Whether payload bytes of a CSV file with a header are written in hexadecimal or decimal."""
    time_unit: str = "auto"
    """Unit of the times: s, ms, us or ns; auto: by the format, by the column's name, or by how often IDs repeat."""
    channel: str = ""
    """The one interface whose frames are read (`can0`), where a log has several; empty: all of them, as one bus."""
    benign_values: list[str] = field(default_factory=lambda: [*BENIGN_WORDS])
    """Label values (in any letter case) that mean: no attack. Any other is an attack; a word names its kind."""
    dbc: str = ""
    """A CAN database (DBC), which names the signals in alarms. A run keeps its messages, and needs the file once."""
    max_malformed: float = 0.01
    """A log is refused if a larger share of its rows is malformed, runs backwards in time or disagrees with its DLC."""
    window: int = 100
    """Frames in a window."""
    stride: int = 0
    """Frames from one window's start to the next one's; 0: the window's length, so that windows do not overlap."""
    features: str = BEHAVIOUR_FEATURES
    """Inputs of models about an ID: the window and a comparison with the ID's earlier behaviour (behaviour), or the
    window alone (classic)."""
    identity: bool = True
    """Whether models see which CAN ID a node is; off, they see behaviour only."""
    id_dropout: float = 0.5
    """Share of the training windows whose IDs are hidden, as if the vehicle were unknown."""
    validation_share: float = 0.2
    """Share of the training time that is kept for validation: thresholds and early stopping."""
    test_share: float | None = None
    """Share of a single log's time that is kept for testing, where the data set has no test folders: 0.2, but 0 for
    benign logs that are too short; 0 trains on all of it, for a test on other logs."""
    synthetic: SyntheticSettings = field(default_factory=SyntheticSettings)
    """Size and seed of the simulated bus; used by `synthetic` only."""

    def __post_init__(self) -> None:
        check_choice("dataset.format", self.format, ("auto", *FORMATS, *RECORDINGS))
        check_choice("dataset.id_base", self.id_base, NUMBER_BASES)
        check_choice("dataset.byte_base", self.byte_base, NUMBER_BASES)
        check_choice("dataset.features", self.features, FEATURES)
        check_range("dataset.id_dropout", self.id_dropout, low=0.0, high=1.0)
        check_choice("dataset.time_unit", self.time_unit, TIME_UNITS)
        if self.dbc:
            from can_train_tasks.can.data.database import packed

            object.__setattr__(self, "dbc", packed(self.dbc))
        check_range("dataset.max_malformed", self.max_malformed, low=0.0, high=1.0)
        check_range("dataset.window", self.window, low=2)
        check_range("dataset.stride", self.stride, low=0)
        if not self.stride:
            object.__setattr__(self, "stride", self.window)
        check_range("dataset.validation_share", self.validation_share, above=0.0, high=0.5)
        if self.test_share is not None:
            check_range("dataset.test_share", self.test_share, low=0.0, high=0.5)

    @property
    def is_synthetic(self) -> bool:
        """Whether the logs are simulated."""
        return self.name.startswith("synthetic") and not self.path


@dataclass(frozen=True, kw_only=True)
class GatSettings:
    """Graph attention network with jumping knowledge; the defaults are the teacher."""

    hidden: int = 64
    """Channels per attention head."""
    layers: int = 5
    """Attention layers; the outputs of all layers are concatenated before pooling."""
    heads: int = 8
    """Attention heads per layer."""
    embedding: int = 32
    """Width of the CAN-ID embedding."""
    dropout: float = 0.2
    """Dropout of features and attention."""
    head_layers: int = 1
    """Linear layers of the classifier after pooling."""

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "embedding", "head_layers"):
            check_range(f"model.{name}", getattr(self, name), low=1)
        check_range("model.dropout", self.dropout, low=0.0, high=0.99)


@dataclass(frozen=True, kw_only=True)
class VgaeSettings:
    """Variational graph autoencoder; the defaults are the teacher."""

    hidden: list[int] = field(default_factory=lambda: [480, 240])
    """Widths of the encoder's attention layers; the decoder mirrors them."""
    latent: int = 48
    """Width of a node's latent."""
    heads: int = 4
    """Attention heads of the encoder's layers; each width must be a multiple of the number of heads."""
    embedding: int = 32
    """Width of the CAN-ID embedding."""
    dropout: float = 0.1
    """Dropout of features and attention."""

    def __post_init__(self) -> None:
        for name in ("latent", "heads", "embedding"):
            check_range(f"model.{name}", getattr(self, name), low=1)
        check_range("model.dropout", self.dropout, low=0.0, high=0.99)
        check_range("The number of widths in model.hidden", len(self.hidden), low=1)
        for width in self.hidden:
            check_range("Every width in model.hidden", width, low=1)
            if width % self.heads:
                raise ConfigError("A width in model.hidden is no multiple of model.heads",
                                  value=f"{width} with {self.heads} heads",
                                  remedy=f"Write {width + self.heads - width % self.heads} in its place")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FusionAgentSettings:
    """Network that values mixing weights; the defaults are the teacher."""

    hidden: int = 576
    """Units of a hidden layer."""
    layers: int = 3
    """Hidden layers."""

    def __post_init__(self) -> None:
        check_range("model.hidden", self.hidden, low=1)
        check_range("model.layers", self.layers, low=1)


@dataclass(frozen=True, kw_only=True)
class CanModeSettings:
    """The objective of training, and the threshold of alarms."""

    name: str = "normal"
    """normal: supervised; autoencoder: benign windows only."""
    validation_fpr: float = 0.01
    """False-positive rate on validation that sets an anomaly threshold."""
    can_id_weight: float = 0.1
    """Weight of the CAN-ID term in the autoencoder's loss."""
    kl_weight: float = 0.01
    """Weight of the KL divergence in the autoencoder's loss."""
    rules: bool = True
    """Raise the model's scores by rules: a known ID is silent or late, a known bus has a new ID, a counter or a
    checksum is wrong, or a value jumps or disagrees with other IDs."""
    baselines: bool = True
    """Compute the simple detectors that a result is compared with."""

    def __post_init__(self) -> None:
        check_range("mode.validation_fpr", self.validation_fpr, above=0.0, high=0.5)
        check_range("mode.can_id_weight", self.can_id_weight, low=0.0)
        check_range("mode.kl_weight", self.kl_weight, low=0.0)


# Source of a teacher's outputs. `device`: the teacher stays on the device; `cache`: the outputs are computed once and
# cached on disk; `offload`: the teacher stays and computes on the host. `auto`: the fastest that fits, as measured.
PLACEMENTS = ("auto", "device", "cache", "offload")


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(CanModeSettings):
    """A student learns from a teacher's outputs in addition to its usual loss."""

    name: str = "knowledge_distillation"
    teacher: str = ""
    """Folder of the teacher's run."""
    without_teacher: str = ""
    """Folder of a run of the same student without a teacher, for a comparison; may be empty."""
    alpha: float = 0.7
    """Weight of the teacher's term in the classifier's loss."""
    temperature: float = 4.0
    """Softening of both models' logits in the classifier's loss."""
    teacher_placement: str = "auto"
    """auto, device, cache or offload."""
    offload_teacher_to_cpu: bool = False
    """Another way to write `teacher_placement=offload`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("mode.alpha", self.alpha, low=0.0, high=1.0)
        check_range("mode.temperature", self.temperature, above=0.0)
        check_choice("mode.teacher_placement", self.teacher_placement, PLACEMENTS)
        if self.offload_teacher_to_cpu and self.teacher_placement not in ("auto", "offload"):
            both = f"offload_teacher_to_cpu and teacher_placement={self.teacher_placement}"
            raise ConfigError("The teacher has two placements", value=both, remedy="Leave one option out")


@dataclass(frozen=True, kw_only=True)
class CurriculumSettings(CanModeSettings):
    """Supervised: from all attacks and the hardest benign windows to more and more benign windows."""

    name: str = "curriculum"
    autoencoder: str = ""
    """Folder of the run whose reconstruction errors rank the benign windows by difficulty."""
    start_ratio: float = 1.0
    """Benign windows for each attack in the first epochs."""
    end_ratio: float = 10.0
    """Benign windows for each attack in the last epoch."""
    ratio_warmup: float = 0.1
    """Share of the training before the ratio begins to rise."""
    ratio_smoothing: float = 0.9
    """Momentum of the ratio's moving average, for each thousandth of the training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("mode.start_ratio", self.start_ratio, above=0.0)
        check_range("mode.end_ratio", self.end_ratio, low=self.start_ratio)
        check_range("mode.ratio_warmup", self.ratio_warmup, low=0.0, high=0.9)
        check_range("mode.ratio_smoothing", self.ratio_smoothing, low=0.0, high=0.99)


@dataclass(frozen=True, kw_only=True)
class FusionSettings(CanModeSettings):
    """An agent (DQN) mixes an autoencoder's anomaly score and a classifier's attack probability."""

    name: str = "fusion"
    autoencoder: str = ""
    """Folder of the run whose anomaly score is mixed in."""
    classifier: str = ""
    """Folder of the run whose attack probability is mixed in."""
    mixing_weights: int = 21
    """Mixing weights that the agent chooses from, evenly spaced in [0, 1]."""
    discount: float = 0.9
    """Discount factor of the next window's value."""
    epsilon_start: float = 0.9
    """Share of random choices in the first step."""
    epsilon_end: float = 0.2
    """Share of random choices in the last step."""
    replay_size: int = 100_000
    """Choices in the replay memory."""
    target_every: int = 50
    """Steps after which the target network becomes a copy of the trained one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("mode.mixing_weights", self.mixing_weights, low=2, high=1001)
        check_range("mode.discount", self.discount, low=0.0, high=0.999)
        check_range("mode.epsilon_end", self.epsilon_end, low=0.0, high=1.0)
        check_range("mode.epsilon_start", self.epsilon_start, low=self.epsilon_end, high=1.0)
        check_range("mode.replay_size", self.replay_size, low=1)
        check_range("mode.target_every", self.target_every, low=1)


def _teacher(model: str, modes: tuple[str, ...]) -> Prerequisite:
    return Prerequisite(role="teacher", what="a teacher", models=(model,), modes=modes, sizes=("teacher",))


def _without_teacher(model: str, mode: str) -> Prerequisite:
    return Prerequisite(
        role="without_teacher", what="the same student without a teacher", models=(model,), modes=(mode,),
        same_model=True, required=False,
    )  # fmt: skip


_SUPERVISED = ("normal", "curriculum")
_DISTILLED = "knowledge_distillation"
_AUTOENCODER = Prerequisite(
    role="autoencoder", what="an autoencoder", models=("vgae",), modes=("autoencoder", _DISTILLED)
)
_CLASSIFIER = Prerequisite(role="classifier", what="a classifier", models=("gat",), modes=(*_SUPERVISED, _DISTILLED))

TASK = TaskSettings(
    dataset=CanDatasetSettings,
    key_prefix="",
    example="--model gat --dataset synthetic",
    inputs=("name", "window", "features", "identity", "validation_share", "test_share", "synthetic"),
    follows={"stride": "window"},
    inherited=("window", "stride", "features", "identity", "dbc", "validation_share", "test_share"),
    modes={
        "normal": CanModeSettings,
        "autoencoder": CanModeSettings,
        "curriculum": CurriculumSettings,
        "knowledge_distillation": DistillationSettings,
        "fusion": FusionSettings,
    },
    models={
        "gat": ModelSpec(
            settings=GatSettings,
            modes=("normal", "curriculum", _DISTILLED),
            sizes=SIZES,
            needs={"curriculum": "an autoencoder", _DISTILLED: "a teacher; comes as student only"},
            only_sizes={_DISTILLED: ("student",)},
            prerequisites={
                "curriculum": (_AUTOENCODER,),
                _DISTILLED: (_teacher("gat", _SUPERVISED), _without_teacher("gat", "normal")),
            },
        ),
        "vgae": ModelSpec(
            settings=VgaeSettings,
            modes=("autoencoder", _DISTILLED),
            sizes=SIZES,
            needs={_DISTILLED: "a teacher"},
            prerequisites={_DISTILLED: (_teacher("vgae", ("autoencoder",)), _without_teacher("vgae", "autoencoder"))},
        ),
        "fusion": ModelSpec(
            settings=FusionAgentSettings,
            modes=("fusion",),
            sizes=SIZES,
            needs={"fusion": "an autoencoder and a classifier"},
            prerequisites={"fusion": (_AUTOENCODER, _CLASSIFIER)},
        ),
    },
    factory="can_train_tasks.can.task:make_task",
    sampler="can_train_tasks.can.task:sample_task",
    evaluator="can_train_tasks.can.evaluation.evaluate:make_evaluation",
    predictor="can_train_tasks.can.evaluation.predict:WindowDetector",
    evaluation="can_train_tasks.can.evaluation.options:EvaluationOptions",
    files="can_train_tasks.can.data.layout:data_files",
    digest="can_train_tasks.can.data.layout:data_digest",
    signals="can_train_tasks.can.signals:training_signals",
    experience=experience,
)
