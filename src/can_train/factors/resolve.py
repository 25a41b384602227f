"""Which safety factor a run uses: static, pinned, learned, or of a first run."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from can_train.config.resolved import ResolvedRun, state_dir
from can_train.config.task_settings import load_task_settings
from can_train.errors import StateError
from can_train.factors.observations import read_observations
from can_train.factors.policies import make_policy
from can_train.factors.store import FactorStore
from can_train.fit.factor_rule import NO_AIM, Aim, FactorChoice, FactorRule
from can_train.memory.meters import allocator_settings
from can_train.reporter import Reporter


def experience_factor(base: float, base_reason: str, adjustments: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Multiplies a base factor by its adjustments.

    >>> experience_factor(0.65, "small dataset", [(0.95, "reconstruction")])
    (0.6175, 'small dataset 0.65 × reconstruction 0.95 = 0.6175')
    >>> experience_factor(0.6, "other dataset", [])
    (0.6, 'other dataset 0.6')

    Args:
        base: Share of the tuned limit, in (0, 1].
        base_reason: What the base stands for.
        adjustments: (multiplier in (0, 1], its reason).

    Returns:
        The factor and its reason.
    """
    factor = base
    terms = [f"{base_reason} {base:g}"]
    for multiplier, reason in adjustments:
        factor *= multiplier
        terms.append(f"{reason} {multiplier:g}")
    # Rounded, so that the factor recorded is the one that the reason states.
    factor = round(factor, 4)
    result = f" = {factor:g}" if adjustments else ""
    return factor, " × ".join(terms) + result


def factor_rule(run: ResolvedRun, device_key: str, reporter: Reporter, *, run_id: str = "") -> FactorRule:
    """Finds the rule that decides the safety factor of a run. Where the store cannot be read, it is that of a first
    run, and the reporter gets a notice.

    Args:
        run: The resolved run.
        device_key: Kind of device that it trains on.
        reporter: Where the notice goes.
        run_id: Name of the run; empty where it has none yet.
    """
    try:
        return read_factor_rule(run, device_key, run_id=run_id)
    except StateError as error:
        reporter.notice(f"What earlier runs taught cannot be read. {error}")
        return _first_rule(run)


def read_factor_rule(run: ResolvedRun, device_key: str, *, run_id: str = "") -> FactorRule:
    """Finds the rule that decides the safety factor of a run; arguments as of `factor_rule`.

    Raises:
        StateError: The store cannot be read.
    """
    training, first = run.training, _first_rule(run)
    if not training.use_adaptive_batch_size_factor:
        static = FactorChoice(training.graph_memory_safety_factor, "static, nothing is learned")
        return FactorRule(known=static, aim=NO_AIM)
    known = store_of(run).known(run.key, device_key, memory_fingerprint(run), size=run.size)
    if known.choice is None:
        # What another device has measured says more than an experience table.
        return replace(first, other_device=known.other_device, known=None if known.other_device else first.known)
    # An import has no aim of its own, so the target stands until the limits lower it.
    is_learned = known.aim not in (None, NO_AIM)
    return replace(
        first,
        known=known.choice,
        aim=known.aim or first.aim,
        aim_is_learned=is_learned,
        after_oom=_died_of_memory(state_dir(run.paths), run_id),
    )


def store_of(run: ResolvedRun) -> FactorStore:
    """Opens the factor store with the policy of the run's settings."""
    return FactorStore(state_dir(run.paths), make_policy(run.factor.policy, policy_options(run)))


def policy_options(run: ResolvedRun) -> dict[str, float]:
    """Returns the attributes that the settings give the run's policy."""
    factor = run.factor
    return {"target": factor.target, "momentum": factor.momentum, "oom_cut": factor.oom_cut, "minimum": factor.min,
            "maximum": factor.max}  # fmt: skip


def memory_fingerprint(run: ResolvedRun) -> dict[str, Any]:
    """Returns the settings that change how a configuration's memory grows; runs that differ in them learn apart."""
    training = run.training
    return {
        "model": asdict(run.model),
        "precision": training.precision,
        "optimizer": training.optimizer,
        "deterministic": training.deterministic,
        "allocator": allocator_settings(),
        # This version compiles nothing; runs of a version that does must not be mixed with its runs.
        "compiled": False,
    }


def _first_rule(run: ResolvedRun) -> FactorRule:
    factor = run.factor
    known = None
    if factor.from_table:
        table = load_task_settings(run.task).experience(run.dataset.name, run.mode.name)
        known = FactorChoice(*experience_factor(*table))
    return FactorRule(known=known, aim=Aim(factor.target), minimum=factor.min, maximum=factor.max)


def _died_of_memory(state: Path, run_id: str) -> bool:
    """Whether the last attempt of a run ended by an out-of-memory, on any of its ranks."""
    attempts = [run for run in read_observations(state).finished if run.run_id == run_id] if run_id else []
    last = max((run.attempt for run in attempts), default=0)
    return any(run.outcome == "oom" for run in attempts if run.attempt == last)
