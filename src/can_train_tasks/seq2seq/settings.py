"""Settings of the seq2seq task: its data sets, models and decoding."""

from dataclasses import dataclass, field

from can_train.config.settings import check_range
from can_train.config.task_settings import ModelSpec, TaskSettings
from can_train.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
    """The made-up language behind `--dataset synthetic`."""

    seed: int = 0
    """Seed of its words and of their inflected forms."""
    words: int = 2000
    """Training pairs; development and test pairs are a tenth as many each."""

    def __post_init__(self) -> None:
        check_range("dataset.synthetic.seed", self.seed, low=0)
        check_range("dataset.synthetic.words", self.words, low=20, high=1_000_000)


@dataclass(frozen=True, kw_only=True)
class Seq2seqDatasetSettings:
    """Tables of tab-separated values, one pair of source and target a line, without a header."""

    name: str = "synthetic"
    """Name in keys and run ids."""
    path: str = ""
    """The training table, or a folder that holds one `…train….tsv`; empty: `name` under the data root."""
    dev: str = ""
    """The validation table; empty: the table beside the training table with `dev` or `valid` in place of `train` in its
    name, else a tenth of the training pairs."""
    test: str = ""
    """The test table; empty: the table beside the training table with `test` in place of `train` in its name, if it
    exists."""
    source_col: int = 1
    """Column of the source, counted from 1."""
    target_col: int = 2
    """Column of the target."""
    features_col: int = -1
    """Column of the features, which the model reads beside the source; 0: there are none; -1: column 3, where the
    training table has three columns."""
    source_sep: str = ""
    """Separator between the symbols of a source: text, or the word space; empty: every character is a symbol."""
    target_sep: str = ""
    """Separator between the symbols of a target."""
    features_sep: str = ";"
    """Separator between features."""
    synthetic: LanguageSettings = field(default_factory=LanguageSettings)
    """Size and seed of the made-up language; used by `synthetic` only."""

    def __post_init__(self) -> None:
        check_range("dataset.source_col", self.source_col, low=1)
        check_range("dataset.target_col", self.target_col, low=1)
        check_range("dataset.features_col", self.features_col, low=-1)
        if self.source_col == self.target_col:
            raise ConfigError("Source and target are different columns", value=f"both are column {self.source_col}",
                              remedy="Set dataset.source_col and dataset.target_col")  # fmt: skip

    @property
    def is_synthetic(self) -> bool:
        """Whether the tables come from the generator of the made-up language."""
        return self.name.startswith("synthetic") and not self.path


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """How a trained model writes targets."""

    beam_width: int = 1
    """Hypotheses that are kept for each target while it is written; 1: the likeliest symbol is taken (greedy)."""
    n_best: int = 1
    """Targets that `can-train predict` writes for each source, the likeliest first; at most `beam_width`."""
    label_smoothing: float = 0.0
    """Share of the probability that training gives to symbols that are not the target's."""

    def __post_init__(self) -> None:
        check_range("task.beam_width", self.beam_width, low=1, high=100)
        check_range("task.n_best", self.n_best, low=1)
        if self.n_best > self.beam_width:
            raise ConfigError("task.n_best is at most task.beam_width",
                              value=f"n_best {self.n_best}, beam_width {self.beam_width}",
                              remedy=f"Give --set task.beam_width={self.n_best}")  # fmt: skip
        check_range("task.label_smoothing", self.label_smoothing, low=0.0, high=0.5)


@dataclass(frozen=True, kw_only=True)
class LstmSettings:
    """A bidirectional LSTM reads the source, another one writes the target and attends to it at every symbol."""

    embedding: int = 128
    """Width of the symbols' embeddings."""
    hidden: int = 512
    """Units of each LSTM layer and direction."""
    layers: int = 1
    """LSTM layers of the encoder; the decoder has one."""
    dropout: float = 0.2
    """Dropout of embeddings and outputs."""
    features_encoder: bool = False
    """Whether an LSTM of their own reads the features; else the source's LSTM reads them before the source."""
    share_embeddings: bool = True
    """Whether a symbol has one embedding in sources and targets; else a second table is for targets."""

    def __post_init__(self) -> None:
        for name in ("embedding", "hidden", "layers"):
            check_range(f"model.{name}", getattr(self, name), low=1)
        check_range("model.dropout", self.dropout, low=0.0, high=0.99)


@dataclass(frozen=True, kw_only=True)
class TransformerSettings:
    """An encoder-decoder transformer that normalises before each sublayer."""

    embedding: int = 128
    """Width of the symbols' embeddings, and of the model."""
    hidden: int = 512
    """Width of its feed-forward layers."""
    layers: int = 4
    """Layers of the encoder, and of the decoder."""
    heads: int = 4
    """Attention heads of each layer."""
    dropout: float = 0.2
    """Dropout of embeddings, attention and sublayers."""
    features_encoder: bool = False
    """Whether an encoder of their own reads the features, as a set; else the source's encoder reads them before the
    source."""
    share_embeddings: bool = True
    """Whether a symbol has one embedding in sources and targets; else a second table is for targets."""

    def __post_init__(self) -> None:
        for name in ("embedding", "hidden", "layers", "heads"):
            check_range(f"model.{name}", getattr(self, name), low=1)
        check_range("model.dropout", self.dropout, low=0.0, high=0.99)
        if self.embedding % (2 * self.heads):
            # Positions are pairs of sine and cosine, and the heads divide the width between them.
            raise ConfigError("model.embedding is a multiple of twice model.heads",
                              value=f"embedding {self.embedding}, heads {self.heads}",
                              remedy=f"Take --set model.embedding="
                                     f"{(self.embedding // (2 * self.heads) + 1) * 2 * self.heads}")  # fmt: skip


TASK = TaskSettings(
    task_class="can_train_tasks.seq2seq.task:Seq2seq",
    settings=DecodingSettings,
    dataset=Seq2seqDatasetSettings,
    training={"lr_batch_size": 32, "lr": 1e-3, "epochs": 30},
    inputs=(
        "name",
        "source_col",
        "target_col",
        "features_col",
        "source_sep",
        "target_sep",
        "features_sep",
        "synthetic",
    ),
    inherited=("source_col", "target_col", "features_col", "source_sep", "target_sep", "features_sep"),
    models={
        "lstm": ModelSpec(settings=LstmSettings, modes=("",)),
        "transformer": ModelSpec(settings=TransformerSettings, modes=("",)),
    },
    default_model="lstm",
    files="can_train_tasks.seq2seq.pair_tables:data_files",
    digest="can_train_tasks.seq2seq.pair_tables:data_digest",
)
