"""Measures what commands take after years of use: on state folders of up to 100,000 observations and 20,000 runs, with
and without what can-train remembers of them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final

from bench.history_store import DEVICES, add_events, add_observations, add_runs, key_of, observation_of, run_id_of
from bench.results_file import environment, markdown, write_section
from can_train.factors.store import FactorStore, next_time
from can_train.io.index import SETTLED_S, index_folder
from can_train.runs.past_runs import PastRuns
from can_train.slurm import client as slurm

SIZES: Final = ((1_000, 200), (20_000, 5_000), (100_000, 20_000))  # observations and runs
PLANNED_FROM: Final = 100_000  # observations: a plan takes seconds without any
QUICK_CALLS: Final = ("`factors`", "a training's look-up")
LATER: Final = 3  # calls of which the median is taken
GOAL_S: Final = {"`factors`": 0.5, "`factors KEY --show`": 0.5, "`runs`": 0.5, "`runs --best mcc`": 3.0,
                 "`status RUN`": 0.5, "a training's look-up": 0.3}  # fmt: skip
"""CPU seconds of a later call that none of these is to exceed."""

NOTES: Final = """\
Seconds: CPU (wall). The process's start is part of every command; the look-up is that of a process that has imported
all: `FactorStore.known`, `next_time` and the list of earlier runs (`PastRuns`). `--dry-run` plans a training: what that
takes above the same with an empty state folder, a small difference of two times of seconds that scatter. *First*:
nothing is remembered; *later*: the median of three calls; *one more*: the first call after another attempt has ended.
50 configurations on 4 devices, so that a KEY has 2 % of the observations; results of runs have 4 test sets and 3
baselines. The goals are CPU seconds: the machine has other work."""

Seconds = tuple[float, float]  # CPU and wall


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if a later call takes too long."""
    parser = argparse.ArgumentParser(prog="scripts/bench/history", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two calls at the smallest size; writes nothing")
    parser.add_argument("--look-up", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look_up:
        print(json.dumps(look_up(*options.look_up)))
        return
    rows, late = [["observations", "runs", "call", "first", "later", "one more"]], []
    for observations, runs in SIZES[:1] if options.quick else SIZES:
        with tempfile.TemporaryDirectory() as name:
            fill(Path(name), observations, runs)
            for number, (call, measure) in enumerate(calls(Path(name), plans=observations >= PLANNED_FROM).items()):
                if options.quick and call not in QUICK_CALLS:
                    continue
                # Each call is followed by one more observation.
                first, later, more = measure_call(Path(name), measure, observations + number)
                rows.append([f"{observations:,}", f"{runs:,}", call, text(first), text(later), text(more)])
                print(" | ".join(rows[-1]), flush=True)
                late += [call] if later[0] > GOAL_S.get(call, later[0]) else []
    if not options.quick:
        write_section("history", "Years of use (`scripts/bench/history`)",
                      "\n\n".join([environment({"msgspec": version("msgspec")}), markdown(rows), NOTES]))  # fmt: skip
    if late:
        sys.exit(f"too slow: {', '.join(late)}")


def fill(folder: Path, observations: int, runs: int) -> None:
    """Makes the state folder and the folder of runs."""
    add_observations(folder / "state", range(observations))
    add_events(folder / "state")
    add_runs(folder / "runs", folder / "state", range(runs))


def calls(folder: Path, *, plans: bool) -> dict[str, Callable[[], Seconds]]:
    """Returns what is measured, by name; the plan of a training with `plans` only."""
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
    measured["a training's look-up"] = lambda: run_look_up(folder / "state", folder / "runs")
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
    """Runs can-train; returns the seconds that it took."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-P", "-m", "can_train", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise AssertionError(f"can-train {' '.join(words)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - started


def run_plan(folder: Path) -> Seconds:
    """Plans a training; returns the seconds above those that it takes with an empty state folder."""
    line = ("--model", "gat", "--dataset", "synthetic", "--device", "cpu", "--batch-size", "32", "--dry-run", "--quiet")
    empty, full = (
        run_command((*line, "--state-dir", str(each / "state"), "--runs-dir", str(each / "runs")))
        for each in (folder / "empty", folder)
    )
    return full[0] - empty[0], full[1] - empty[1]


def run_look_up(state: Path, runs: Path) -> Seconds:
    """Looks up what a training asks for at its start, in a process of its own."""
    words = [sys.executable, "-P", "-m", "bench.measure_history", "--look-up", str(state), str(runs)]
    cpu, wall = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return cpu, wall


def look_up(state: Path, runs: Path) -> Seconds:
    """Does what a training does with the state folder before it trains; returns the seconds that it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    PastRuns(state, runs, slurm)
    known = FactorStore(state).known(key_of(0), DEVICES[0], observation_of(0).fingerprint, size="student")
    next_time(state)
    seconds = time.process_time() - cpu, time.perf_counter() - wall
    if known.factor is None:
        raise AssertionError("a factor was learned")
    return seconds


def text(seconds: Seconds) -> str:
    """Writes CPU and wall seconds."""
    return f"{seconds[0]:.2f} ({seconds[1]:.2f})"


if __name__ == "__main__":
    main()
