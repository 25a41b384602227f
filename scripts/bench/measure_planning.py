"""Compares the time that planning takes with that of the first epoch, on the simulated GPU: a search that takes its
time, one that keeps to a tenth of an epoch or 30 s, and one that confirms the limit of an earlier run.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any, Final

from bench.results_file import environment, markdown, write_section
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import ResolvedRun
from can_train.factors.store import factor_rule
from can_train.fit.explore import SEARCH_SECONDS, SEARCH_SHARE
from can_train.fit.planner import Planner, Planners, RunPlan
from can_train.io.records import write_json_atomic
from can_train.io.units import size_text
from can_train.memory.meters import open_meter
from can_train.reporter import SilentReporter
from can_train.runs.attempts import StopRequests
from can_train.runs.run_folder import RunFolder
from can_train.training.loading import fresh_model, load_task
from can_train.training.session import Parts
from can_train.training.train import make_session, recording_observation, take_step

CASES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("sim:512MiB", "the preset's batch (64)", {}),
    ("sim:2GiB", "the preset's batch (64)", {}),
    ("sim:2GiB", "batches of 1,024", {"training.batch_size": 1024}),
    ("sim:6GiB", "batches of 2,048", {"training.batch_size": 2048}),
    (
        "sim:2GiB",
        "`max`, 5 steps an epoch",
        {"training.find_batch_size": "max", "training.min_steps_per_epoch": 5},
    ),
)

BEFORE: Final = "unlimited, as before"
FRESH: Final = "fresh"
STORED: Final = "with an earlier run's limit"

LATE_SECONDS: Final = 10.0
"""Goal: a search ends at most so much later than it should: trials take longer than was estimated, and preparations are
not counted."""

NOTES: Final = f"""\
The GAT teacher on the default synthetic bus. *Planning*: all that happens before the first step, from probes
to the plan; in seconds of the process itself, as the search counts them on the host. *Epochs*: planning over the first
epoch, which was then trained by the fresh plan. *Unlimited*: the search without a limit of time, which was the only one
before; *fresh*: it keeps to {SEARCH_SHARE:.0%} of an epoch or {SEARCH_SECONDS:g} s, whichever is more; *with an earlier
run's limit*: the limit that the trained epoch left in the store is confirmed by one trial; a search that was cut short
leaves none, and is made again. *Not tried*: a larger batch that the search had no time for."""


@dataclass(frozen=True)
class Planned:
    """A plan, and the seconds that it took."""

    seconds: float
    plan: RunPlan


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if a search takes too long."""
    parser = argparse.ArgumentParser(prog="scripts/bench/planning", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first case alone, and write nothing")
    quick = parser.parse_args().quick
    rows = [["GPU", "batch", "search", "planning, s", "epochs", "trials/OOMs", "tuned limit", "not tried"]]
    late = False
    for device, batch, values in CASES[:1] if quick else CASES:
        epoch_seconds, planned = measure(device, values)
        for name, one in planned.items():
            rows.append([device, batch, name, *cells(one, epoch_seconds)])
            print(" | ".join(rows[-1]), flush=True)
        allowed = max(SEARCH_SECONDS, SEARCH_SHARE * epoch_seconds) + LATE_SECONDS
        late = late or any(planned[name].seconds > allowed for name in (FRESH, STORED))
    if not quick:
        head = environment({"torch": version("torch"), "torch_geometric": version("torch_geometric")})
        write_section("planning", "Planning against the first epoch (`scripts/bench/planning`)",
                      "\n\n".join([head, markdown(rows), NOTES]))  # fmt: skip
    if late:
        sys.exit("a search took too long")


def measure(device: str, values: Mapping[str, Any]) -> tuple[float, dict[str, Planned]]:
    """Plans a run in three ways; returns the seconds of its first epoch, and the plans."""
    with tempfile.TemporaryDirectory() as name:
        folder, reporter = Path(name), SilentReporter()
        run = resolved(folder, device, values)
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


def resolved(folder: Path, device: str, values: Mapping[str, Any]) -> ResolvedRun:
    """Resolves a run that keeps its state in a folder."""
    folders = {"paths.runs_dir": str(folder / "runs"), "paths.state_dir": str(folder / "state")}
    return resolve(
        RunRequest(model="gat", size="teacher", dataset="synthetic", device=device, values={**values, **folders})
    )


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


if __name__ == "__main__":
    main()
