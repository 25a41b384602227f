"""Settings of the muon task: its data sets, its generator and critic, and their training."""

from dataclasses import dataclass, field
from typing import Final

from can_train.config.settings import check_choice, check_range
from can_train.config.task_settings import ModelSpec, TaskSettings
from can_train.errors import ConfigError, unknown_name

POSITIONS: Final = ("x", "y")
VARIABLES: Final = (*POSITIONS, "energy", "time")
FORMATS: Final = ("parquet", "hdf5")
_SEA_LEVEL_G_CM2: Final = 1036.0  # Depth of the atmosphere above sea level


@dataclass(frozen=True, kw_only=True)
class SyntheticShowerSettings:
    """The simulated showers behind `--dataset synthetic`."""

    seed: int = 0
    """Seed of the showers."""
    showers: int = 600
    """Showers in all files."""
    files: int = 4
    """Files that the showers are written to."""
    format: str = "parquet"
    """Format of the files: parquet or hdf5."""
    muons_per_pev: float = 100.0
    """Muons of a vertical proton shower of 1 PeV at sea level, on average."""
    min_energy_gev: float = 1e5
    """Lowest energy of a primary particle."""
    max_energy_gev: float = 3e6
    """Highest energy; showers are spread evenly in its logarithm."""

    def __post_init__(self) -> None:
        check_range("dataset.synthetic.seed", self.seed, low=0)
        check_range("dataset.synthetic.files", self.files, low=1, high=1000)
        check_range("dataset.synthetic.showers", self.showers, low=max(self.files, 10), high=10_000_000)
        check_choice("dataset.synthetic.format", self.format, FORMATS)
        check_range("dataset.synthetic.muons_per_pev", self.muons_per_pev, above=0.0, high=1e5)
        check_range("dataset.synthetic.min_energy_gev", self.min_energy_gev, low=1e3)
        check_range("dataset.synthetic.max_energy_gev", self.max_energy_gev, low=self.min_energy_gev, high=1e9)


@dataclass(frozen=True, kw_only=True)
class ShowerDatasetSettings:
    """One data set of air showers, and how its showers become events."""

    name: str = "synthetic"
    """Name in keys and run ids; `synthetic` is simulated."""
    path: str = ""
    """File, or folder of files: parquet, HDF5 or CSV; empty: `name` under the data root."""
    variables: list[str] = field(default_factory=list)
    """Variables of each muon that the model learns: x and y, then energy and time; []: those that the files have."""
    depth_g_cm2: float = _SEA_LEVEL_G_CM2
    """Depth of the atmosphere above the observer in g/cm², for files that do not give it."""
    max_muons_per_event: int = 0
    """Showers with more muons are left out of training and tests, and are written to a file; 0: all are kept."""
    outliers: str = ""
    """File of the showers that are left out, .parquet; empty: one beside the prepared data."""
    parts: int = 0
    """Events that each shower is cut into, by dealing out its muons at random; 0: 1, but enough to train on where the
    data have few showers."""
    validation_share: float = 0.1
    """Share of the showers (of the events, where there are few showers) that is kept for validation."""
    test_share: float = 0.2
    """Share of the showers (of the events, where there are few showers) that is kept for testing."""
    synthetic: SyntheticShowerSettings = field(default_factory=SyntheticShowerSettings)
    """Size and seed of the simulated showers; used by `synthetic` only."""

    def __post_init__(self) -> None:
        for name in self.variables:
            if name not in VARIABLES:
                raise unknown_name("variable of a muon", name, VARIABLES)
        wanted = [name for name in VARIABLES if name in (*POSITIONS, *self.variables)]
        if self.variables and list(self.variables) != wanted:
            rule = "dataset.variables are x and y, then energy and time if they are learned, each once"
            raise ConfigError(rule, value=f"{list(self.variables)}", remedy="Write dataset.variables=[x,y,energy]")
        check_range("dataset.depth_g_cm2", self.depth_g_cm2, above=0.0, high=50_000)
        check_range("dataset.max_muons_per_event", self.max_muons_per_event, low=0)
        if self.outliers and not self.outliers.endswith(".parquet"):
            raise ConfigError("dataset.outliers must be a file that ends in .parquet", value=repr(self.outliers),
                              remedy="Write it as --set dataset.outliers=outliers.parquet")  # fmt: skip
        check_range("dataset.parts", self.parts, low=0, high=100_000)
        check_range("dataset.validation_share", self.validation_share, above=0.0, high=0.4)
        check_range("dataset.test_share", self.test_share, above=0.0, high=0.4)

    @property
    def is_synthetic(self) -> bool:
        """Whether the showers are simulated."""
        return self.name.startswith("synthetic") and not self.path


@dataclass(frozen=True, kw_only=True)
class MuonGanSettings:
    """Generator and critic."""

    hidden: int = 64
    """Width of both networks."""
    layers: int = 2
    """Hidden layers that process each muon separately, in both networks."""
    noise: int = 8
    """Random numbers that a generated muon is made of."""
    shower_noise: int = 4
    """Random numbers that all muons of an event share: they make showers with equal conditions differ."""
    bound: float = 1.5
    """Most muons that an event is given, as a multiple of the number expected from its conditions (plus three standard
    deviations of a Poisson distribution). A batch takes memory for this bound, even if fewer muons are generated."""
    max_generated: int = 100_000
    """Most muons that an event is given under any conditions."""

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "shower_noise"):
            check_range(f"model.{name}", getattr(self, name), low=1)
        check_range("model.noise", self.noise, low=len(VARIABLES))
        check_range("model.bound", self.bound, low=1.0, high=100.0)
        # The energy distance of an event needs at least two generated muons.
        check_range("model.max_generated", self.max_generated, low=2)


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """Training of generator and critic against each other."""

    critic_steps: int = 3
    """Steps of the critic for each step of the generator."""
    gradient_penalty: float = 10.0
    """Weight λ of the gradient penalty."""
    draw_seed: int = 0
    """Seed of the showers that `can-train predict` draws; 0: the random numbers of `evaluate`."""

    def __post_init__(self) -> None:
        check_range("task.critic_steps", self.critic_steps, low=1, high=1000)
        check_range("task.gradient_penalty", self.gradient_penalty, low=0.0)
        check_range("task.draw_seed", self.draw_seed, low=0)


TASK = TaskSettings(
    task_class="can_train_tasks.muon.task:MuonTask",
    settings=MuonSettings,
    dataset=ShowerDatasetSettings,
    # Adam without momentum: momentum would move the critic on towards the generator's earlier output.
    # A constant learning rate, as in the WGAN-GP paper: critic and generator have no common minimum to settle in.
    training={"optimizer": "adam", "lr": 1e-4, "betas": [0.0, 0.9], "weight_decay": 0.0, "scheduler": "constant",
              "warmup_share": 0.0, "epochs": 100, "lr_batch_size": 32},
    aliases={"gradient_accumulation_steps": "accumulation_splits"},
    inputs=("name", "variables", "depth_g_cm2", "max_muons_per_event", "parts", "validation_share", "test_share",
            "synthetic"),
    inherited=("variables", "depth_g_cm2", "max_muons_per_event", "parts", "validation_share", "test_share"),
    models={"": ModelSpec(settings=MuonGanSettings, modes=("",))},
    files="can_train_tasks.muon.showers:shower_files",
)  # fmt: skip
