"""Names and defaults of the learned safety factor."""

from dataclasses import dataclass

from can_train.config.checks import check_choice, check_range

POLICIES = ("affine", "momentum")
PRIORS = ("auto", "probe", "table")


@dataclass(frozen=True, kw_only=True)
class FactorSettings:
    """How the safety factor is learned from run to run."""

    policy: str = "affine"
    """How observations become the next factor: a straight line through them, or a share of the way to the target."""
    prior: str = "auto"
    """Where the first run's factor comes from: what the probes predict, or the experience table; auto is probe, and
    table under momentum."""
    target: float = 0.90
    """Share of the capacity that a run's peak should reach."""
    momentum: float = 0.3
    """Share of an adjustment that is applied at once (policy momentum)."""
    oom_cut: float = 0.15
    """What an out-of-memory takes off the factor (policy momentum)."""
    min: float = 0.05
    """Smallest factor."""
    max: float = 1.0
    """Largest factor."""

    def __post_init__(self) -> None:
        check_choice("factor.policy", self.policy, POLICIES)
        check_choice("factor.prior", self.prior, PRIORS)
        check_range("factor.target", self.target, above=0.0, high=1.0)
        check_range("factor.momentum", self.momentum, above=0.0, high=1.0)
        check_range("factor.oom_cut", self.oom_cut, low=0.0, high=1.0)
        check_range("factor.min", self.min, above=0.0, high=1.0)
        check_range("factor.max", self.max, low=self.min, high=1.0)

    @property
    def from_table(self) -> bool:
        """Whether the first run's factor comes from the experience table."""
        return self.prior == "table" or (self.prior == "auto" and self.policy == "momentum")
