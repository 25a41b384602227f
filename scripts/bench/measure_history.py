"""Measures the time of commands after years of use: on state folders of up to 100,000 observations and 20,000 runs,
with and without can-train's index of them.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.harness import Benchmark, Table, call_apart, run_measured
from bench.history_store import DEVICES, add_events, add_observations, add_runs, key_of, observation_of, run_id_of
from can_train.factors.store import FactorStore, next_time
from can_train.io.index import SETTLED_S, index_folder
from can_train.runs.past_runs import PastRuns
from can_train.slurm import client as slurm

BENCHMARK: Final = Benchmark(__name__, packages=("msgspec",), quick="two calls at the smallest size")
SIZES: Final = ((1_000, 200), (20_000, 5_000), (100_000, 20_000))  # observations and runs
PLANNED_FROM: Final = 100_000  # observations: a plan takes seconds without any
QUICK_CALLS: Final = ("`factors`", "a training's look-up")
LATER: Final = 3  # calls whose median is taken
GOAL_S: Final = {"`factors`": 0.5, "`factors KEY --show`": 0.5, "`runs`": 0.5, "`runs --best mcc`": 3.0,
                 "`status RUN`": 0.5, "a training's look-up": 0.3}  # fmt: skip
"""Most CPU seconds of a later call."""

Seconds = tuple[float, float]  # CPU and wall


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if a later call takes too long."""
    options = BENCHMARK.parser().parse_args()
    table, late = Table("observations", "runs", "call", "first", "later", "one more"), []
    for observations, runs in SIZES[:1] if options.quick else SIZES:
        with tempfile.TemporaryDirectory() as name:
            fill(Path(name), observations, runs)
            for number, (call, measure) in enumerate(calls(Path(name), plans=observations >= PLANNED_FROM).items()):
                if options.quick and call not in QUICK_CALLS:
                    continue
                # Each call is followed by one more observation.
                first, later, more = measure_call(Path(name), measure, observations + number)
                table.add(f"{observations:,}", f"{runs:,}", call, text(first), text(later), text(more))
                late += [f"{call} is too slow"] if later[0] > GOAL_S.get(call, later[0]) else []
    BENCHMARK.finish(options, late, table=table)


def fill(folder: Path, observations: int, runs: int) -> None:
    """Makes the state folder and the folder of runs."""
    add_observations(folder / "state", range(observations))
    add_events(folder / "state")
    add_runs(folder / "runs", folder / "state", range(runs))


def calls(folder: Path, *, plans: bool) -> dict[str, Callable[[], Seconds]]:
    """Returns the measured calls by name; the plan of a training with `plans` only."""
    state, runs = ("--state-dir", str(folder / "state")), ("--runs-dir", str(folder / "runs"))
    commands = {
        "`--help`": ("--help",),
        "`factors`": ("factors", *state),
        "`factors KEY --show`": ("factors", key_of(0), "--show", *state),
        "`runs`": ("runs", *runs, *state),
        "`runs --best mcc`": ("runs", "--best", "mcc", *runs, *state),
        "`status RUN`": ("status", run_id_of(7), *runs, *state),
    }
    measured: dict[str, Callable[[], Seconds]] = {
        name: lambda words=words: run_command(words)  # type: ignore[misc]
        for name, words in commands.items()
    }
    measured["a training's look-up"] = lambda: tuple(
        call_apart(__name__, "look_up", str(folder / "state"), str(folder / "runs"))
    )
    return measured | ({"`--dry-run`": lambda: run_plan(folder)} if plans else {})


def measure_call(folder: Path, measure: Callable[[], Seconds], observations: int) -> tuple[Seconds, Seconds, Seconds]:
    """Measures a call with nothing remembered, later ones, and one after another attempt."""
    shutil.rmtree(index_folder(folder / "state"), ignore_errors=True)
    first = measure()
    # A folder that has just changed is listed anew each time.
    time.sleep(SETTLED_S + 1)
    measure()
    later = sorted(measure() for _ in range(LATER))[LATER // 2]
    add_observations(folder / "state", range(observations, observations + 1))
    return first, later, measure()


def run_command(words: tuple[str, ...]) -> Seconds:
    """Runs can-train; returns its seconds."""
    usage = run_measured([sys.executable, "-P", "-m", "can_train", *words])
    return usage.cpu_s, usage.wall_s


def run_plan(folder: Path) -> Seconds:
    """Plans a training; returns its seconds less the seconds with an empty state folder."""
    line = ("--model", "gat", "--dataset", "synthetic", "--device", "cpu", "--batch-size", "32", "--dry-run", "--quiet")
    empty, full = (
        run_command((*line, "--state-dir", str(each / "state"), "--runs-dir", str(each / "runs")))
        for each in (folder / "empty", folder)
    )
    return full[0] - empty[0], full[1] - empty[1]


def look_up(state: str, runs: str) -> Seconds:
    """Does the work of a training with the state folder before it trains; returns its seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    PastRuns(Path(state), Path(runs), slurm)
    learned = FactorStore(Path(state)).known(key_of(0), DEVICES[0], observation_of(0).fingerprint, size="student")
    next_time(Path(state))
    seconds = time.process_time() - cpu, time.perf_counter() - wall
    if learned.factor is None:
        raise AssertionError("a factor was learned")
    return seconds


def text(seconds: Seconds) -> str:
    """Writes CPU and wall seconds."""
    return f"{seconds[0]:.2f} ({seconds[1]:.2f})"
