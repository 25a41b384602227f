"""What another policy would have done with the same runs: before each of them, and next."""

from collections.abc import Sequence
from dataclasses import dataclass

from can_train.policy.factors import FactorPolicy
from can_train.state.history import history_of
from can_train.state.observations import Observation
from can_train.state.records import FactorRecord


@dataclass(frozen=True)
class Replay:
    """One configuration's runs under another policy.

    Attributes:
        record: The configuration, with its runs and the factors that they had.
        factors: What the policy would have set before each of the runs.
        next_factor: What it would set now; None where no run is left to learn from.
    """

    record: FactorRecord
    factors: tuple[float, ...]
    next_factor: float | None


def replay(record: FactorRecord, policy: FactorPolicy) -> Replay:
    """Asks a policy for every run's factor, from what was known when the run began.

    Args:
        record: Runs that did happen: what the policy's own factors would have led to, nobody measured.
        policy: The other policy.
    """
    runs = record.runs
    if not runs:
        return Replay(record, (), None)
    start = runs[0].factor
    factors = tuple(policy.next_factor(history_of(_before(run, runs)), first=start) for run in runs)
    return Replay(record, factors, policy.next_factor(history_of(runs), first=start))


def _before(run: Observation, runs: Sequence[Observation]) -> list[Observation]:
    return [other for other in runs if other.ended <= run.started and other is not run]
