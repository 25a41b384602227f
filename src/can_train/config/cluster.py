"""Names and defaults of where a submitted run goes."""

from dataclasses import dataclass

from can_train.config.checks import check_choice, check_range

EXECUTORS = ("local",)


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """One place that `--submit` can send a run to."""

    executor: str = "local"
    """How jobs are started: local is a background process of this machine."""
    time_min: int = 7 * 24 * 60
    """Longest run time in minutes."""

    def __post_init__(self) -> None:
        check_choice("cluster.executor", self.executor, EXECUTORS)
        check_range("cluster.time_min", self.time_min, low=1)
