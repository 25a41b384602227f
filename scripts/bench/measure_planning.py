"""Compares the time of planning with the time of the first epoch, on the simulated GPU: a search without a time limit,
a search that keeps to a tenth of an epoch or 30 s, and a search that confirms the limit of an earlier run.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Final

from bench.harness import Benchmark, Table
from bench.steps import resolve_in
from can_train.factors.store import factor_rule
from can_train.fit.planner import Planner, Planners
from can_train.fit.run_plan import RunPlan
from can_train.fit.search import SEARCH_SECONDS, SEARCH_SHARE
from can_train.io.records import write_json_atomic
from can_train.io.units import size_text
from can_train.memory.meters import open_meter
from can_train.reporter import SilentReporter
from can_train.runs.attempts import StopRequests
from can_train.runs.run_folder import RunFolder
from can_train.training.attempt_record import recording_observation
from can_train.training.loading import fresh_model, load_task
from can_train.training.session import Parts
from can_train.training.train import make_session, take_step

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "torch_geometric"), quick="the first case alone")
CASES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("sim:512MiB", "the preset's batch (64)", {}),
    ("sim:2GiB", "the preset's batch (64)", {}),
    ("sim:2GiB", "batches of 1,024", {"training.batch_size": 1024}),
    ("sim:6GiB", "batches of 2,048", {"training.batch_size": 2048}),
    ("sim:2GiB", "`max`, 5 steps an epoch", {"training.find_batch_size": "max", "training.min_steps_per_epoch": 5}),
)

BEFORE: Final = "unlimited, as before"
FRESH: Final = "fresh"
STORED: Final = "with an earlier run's limit"

LATE_SECONDS: Final = 10.0
"""Goal: a search ends at most so much later than it should: trials take longer than was estimated, and preparations are
not counted."""


@dataclass(frozen=True)
class Planned:
    """A plan, and the seconds that it took."""

    seconds: float
    plan: RunPlan


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if a search takes too long."""
    options = BENCHMARK.parser().parse_args()
    table = Table("GPU", "batch", "search", "planning, s", "epochs", "trials/OOMs", "tuned limit", "not tried")
    late = []
    for device, batch, values in CASES[:1] if options.quick else CASES:
        epoch_seconds, planned = measure(device, values)
        for name, plan in planned.items():
            table.add(device, batch, name, *cells(plan, epoch_seconds))
        allowed = max(SEARCH_SECONDS, SEARCH_SHARE * epoch_seconds) + LATE_SECONDS
        late += [f"{device}, {batch}, {name}: the search took too long" for name in (FRESH, STORED)
                 if planned[name].seconds > allowed]  # fmt: skip
    BENCHMARK.finish(options, late, table=table)


def measure(device: str, values: Mapping[str, Any]) -> tuple[float, dict[str, Planned]]:
    """Plans a run in three ways; returns the seconds of its first epoch, and the plans."""
    with tempfile.TemporaryDirectory() as name:
        folder, reporter = Path(name), SilentReporter()
        run = resolve_in(folder, device, values)
        task, meter = load_task(run, reporter), open_meter(run.device)
        with meter.active():
            model = fresh_model(run, task, meter)
            planner = Planner(run=run, task=task, model=model, meter=meter, reporter=reporter)
            rule = factor_rule(run, meter.key, reporter)

            def timed(planner: Planner) -> Planned:
                started = meter.seconds()
                plan = Planners.of_phases(planner).make(rule)
                return Planned(meter.seconds() - started, plan)

            # Libraries are loaded by the first plan.
            Planners.of_phases(planner).first.explorer.step_cost()
            planned = {BEFORE: timed(replace(planner, search_seconds=inf)), FRESH: timed(planner)}
            created = RunFolder.create(folder / "runs", run.key, run.config)
            write_json_atomic(created.plan_path, planned[FRESH].plan.to_plain())
            parts = Parts(run=run, folder=created, task=task, meter=meter, reporter=reporter, stops=StopRequests())
            epoch_seconds = train_epoch(parts)
            rule = factor_rule(run, meter.key, reporter)
            planned[STORED] = timed(planner)
    return epoch_seconds, planned


def train_epoch(parts: Parts) -> float:
    """Trains one epoch, which is recorded in the store; returns its seconds."""
    session = make_session(parts, factor_rule(parts.run, parts.meter.key, parts.reporter))
    steps = session.epochs.steps(0)
    started = parts.meter.seconds()
    with parts.folder.attempts.recorded(parts.stops, rank=0), recording_observation(session):
        for state in session.engines:
            state.reserve.hold()
        for number, rows in enumerate(steps):
            take_step(session, rows, ends_epoch=number + 1 == len(steps))
    return parts.meter.seconds() - started


def cells(planned: Planned, epoch_seconds: float) -> list[str]:
    """Returns the cells of a row about a plan."""
    if planned.plan.limits is None:
        raise AssertionError("a plan that searched has limits")
    training = planned.plan.limits.training
    confirmed = ", confirmed" if training.confirmed else ""
    return [
        f"{planned.seconds:.1f}",
        f"{planned.seconds / epoch_seconds:.2f}",
        f"{training.trials}/{training.ooms}",
        size_text(training.tuned_limit) + confirmed,
        size_text(training.untried) if training.untried else "–",
    ]
