"""Names and defaults of what measures the memory that a run takes."""

from dataclasses import dataclass

from can_train.config.checks import check_range


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """Which training steps have their memory measured."""

    interval: int = 50
    """Steps from one measured step to the next; on the CPU one costs about a fifth more."""
    warmup: int = 20
    """Steps before the first measured one; a shorter run has its last one measured."""

    def __post_init__(self) -> None:
        check_range("monitor.interval", self.interval, low=1)
        check_range("monitor.warmup", self.warmup, low=0)
