"""Which safety factor a run would use here and now: static, pinned, learned, or of a first run. Asks the factor store,
and the device where the answer follows from what it holds.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from can_train.config.compose import from_plain
from can_train.config.resolved import ResolvedRun
from can_train.config.task_settings import load_task_settings
from can_train.errors import StateError
from can_train.memory.allocator_settings import settings_in_force
from can_train.memory.meters import Meter, open_meter
from can_train.policy.experience import experience_factor
from can_train.policy.first_factor import ANY_PEAK, Aim
from can_train.policy.policies import make_policy
from can_train.reporter import Reporter, SilentReporter
from can_train.state.factor_store import FactorChoice, FactorStore
from can_train.state.observations import read_observations
from can_train.training import randomness
from can_train.training.factor_rule import FactorRule
from can_train.training.folders import state_dir
from can_train.training.loading import fresh_model, load_task
from can_train.training.planning import Planner, RunPlan


def get_effective_safety_factor(config: ResolvedRun | Mapping[str, Any]) -> float:
    """Returns the safety factor that a run of this configuration would use here and now.

    Where it follows from what the device holds (a first run), data is prepared and the device is tried, as the run
    would.

    Args:
        config: A resolved run, or the plain values of its `config.yaml`.

    Raises:
        CanTrainError: The configuration, the device or the state folder is at fault; nothing falls back silently.
    """
    run = config if isinstance(config, ResolvedRun) else from_plain(config)
    meter = open_meter(run.device)
    rule = _rule(run, meter.key)
    if rule.known is not None:
        return rule.known.factor
    return _planned(run, meter, rule).factor.factor


def _planned(run: ResolvedRun, meter: Meter, rule: FactorRule) -> RunPlan:
    """Makes the plan that a run would make now; generators stay as they were."""
    task, generators = load_task(run, SilentReporter()), randomness.capture()
    with meter.active():
        model = fresh_model(run, task, meter)
        plan = Planner(run=run, task=task, model=model, meter=meter, reporter=SilentReporter()).make(rule)
    randomness.restore(generators)
    return plan


def factor_rule(run: ResolvedRun, device_key: str, reporter: Reporter, *, run_id: str = "") -> FactorRule:
    """Looks up how the safety factor of a run is decided; where the store cannot be read, as in a first run, with a
    notice.

    Args:
        run: The resolved run.
        device_key: Kind of device that it trains on.
        reporter: Where the notice goes.
        run_id: Name of the run; empty where it has none yet.
    """
    try:
        return _rule(run, device_key, run_id=run_id)
    except StateError as error:
        reporter.notice(f"What earlier runs taught cannot be read. {error}")
        return _first(run)


def store_of(run: ResolvedRun) -> FactorStore:
    """Opens the factor store as the run's settings have it."""
    return FactorStore(state_dir(run.paths), make_policy(run.factor.policy, policy_options(run)))


def policy_options(run: ResolvedRun) -> dict[str, float]:
    """Returns the attributes that the settings give the run's policy."""
    factor = run.factor
    return {"target": factor.target, "momentum": factor.momentum, "oom_cut": factor.oom_cut, "minimum": factor.min,
            "maximum": factor.max}  # fmt: skip


def memory_fingerprint(run: ResolvedRun) -> dict[str, Any]:
    """Returns what changes how a configuration's memory grows: runs that differ in it teach each other nothing."""
    training = run.training
    return {
        "model": asdict(run.model),
        "precision": training.precision,
        "optimizer": training.optimizer,
        "deterministic": training.deterministic,
        "allocator": settings_in_force(),
        # This version compiles nothing; runs of one that does must not be mixed with its runs.
        "compiled": False,
    }


def _rule(run: ResolvedRun, device_key: str, *, run_id: str = "") -> FactorRule:
    training = run.training
    if not training.use_adaptive_batch_size_factor:
        static = FactorChoice(training.graph_memory_safety_factor, "static, nothing is learned")
        return FactorRule(known=static, aim=ANY_PEAK)
    known = store_of(run).known(run.key, device_key, memory_fingerprint(run))
    first = _first(run)
    if known.choice is None:
        return replace(first, elsewhere=known.elsewhere, known=None if known.elsewhere else first.known)
    rule = replace(first, known=known.choice, after_oom=_died_of_memory(state_dir(run.paths), run_id))
    if known.pinned:
        return replace(rule, aim=ANY_PEAK)
    return rule if known.aim is None else replace(rule, aim=Aim(known.aim, known.aim_reason), aim_is_learned=True)


def _first(run: ResolvedRun) -> FactorRule:
    """How the factor of a first run is decided."""
    factor = run.factor
    known = None
    if factor.from_table:
        table = load_task_settings(run.task).experience(run.dataset.name, run.mode.name)
        known = FactorChoice(*experience_factor(*table))
    return FactorRule(known=known, aim=Aim(factor.target), minimum=factor.min, maximum=factor.max)


def _died_of_memory(state: Path, run_id: str) -> bool:
    """Tells whether the last attempt of a run ended by an out-of-memory, on any of its ranks."""
    attempts = [run for run in read_observations(state).finished if run.run_id == run_id] if run_id else []
    last = max((run.attempt for run in attempts), default=0)
    return any(run.outcome == "oom" for run in attempts if run.attempt == last)
