"""Measures the time of commands after years of use: on state folders of up to 100,000 observations and 20,000 runs,
with and without can-train's index of them.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from bench.harness import Benchmark, Table, call_apart, run_measured
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import plain_to_yaml
from can_train.factors.observations import Device, Event, Observation, next_time
from can_train.factors.store import FactorStore
from can_train.io.index import SETTLED_S, index_folder
from can_train.io.records import SCHEMA, json_text, time_stamp, utc_text
from can_train.runs.past_runs import PastRuns
from can_train.runs.registry import RunRecord
from can_train.slurm import client as slurm

CONFIGURATIONS: Final = 50
DEVICES: Final = ("v100-16gb", "v100-32gb", "a100-40gb", "h100-80gb")
DATA_SETS: Final = ("synthetic", "hcrl_ch", "hcrl_sa", "set_01", "set_02")
EVENTS: Final = 100
_FIRST: Final = datetime(2023, 1, 1, tzinfo=UTC)
_APART: Final = timedelta(minutes=5)  # between two attempts
_TEST_SETS: Final = 4
_METRICS: Final = ("f1", "precision", "recall", "mcc", "pr_auc", "roc_auc", "false_positive_rate")


def key_of(number: int) -> str:
    """Returns the configuration key of an attempt."""
    return f"set_{number % CONFIGURATIONS:02d}_gat_student_normal"


def run_id_of(number: int) -> str:
    """Returns the id of an attempt's run."""
    return f"{_FIRST + number * _APART:%Y%m%d-%H%M%S}-{key_of(number)}-{number % 65536:04x}"


def observation_of(number: int) -> Observation:
    """Makes one attempt's observation; its peaks scatter by a few percent."""
    device = Device(key=DEVICES[number // CONFIGURATIONS % len(DEVICES)], name="a GPU", total_bytes=17 * 10**9)
    began = _FIRST + number * _APART
    used = 0.7 + 0.2 * (number * 7919 % 1000) / 1000
    peak = used * (0.93 + 0.04 * (number * 104729 % 997) / 997)
    return Observation(
        run_id=run_id_of(number), attempt=1, key=key_of(number), device=device, start_time=utc_text(began),
        end_time=utc_text(began + _APART / 2), outcome="ok", size="student", factor=used,
        factor_reason="learned from 10 runs", capacity_bytes=16 * 10**9, peak_allocated_bytes=int(peak * 16e9),
        peak_reserved_bytes=int(peak * 16.4e9), predicted_peak_bytes=int(used * 16e9),
        predicted_base_bytes=2**26, predicted_full_bytes=16 * 10**9, tuned_limit=15 * 10**9,
        safe_limit=int(used * 15e9), used=used, logical_batch=1024, largest_micro_batch=512, binding_limit="memory",
        torch_version="2.13.0", fingerprint={
            "model": {"hidden": 24, "layers": 2, "heads": 4, "embedding": 8, "dropout": 0.1, "head_layers": 2},
            "precision": "fp32", "optimizer": "adamw", "deterministic": False,
            "allocator": "expandable_segments:True", "compiled": False},
        policy={"name": "affine", "options": {"target": 0.9, "momentum": 0.3, "oom_cut": 0.15, "minimum": 0.05,
                                              "maximum": 1.0}})  # fmt: skip


def add_observations(state: Path, numbers: range) -> None:
    """Writes the observations of attempts."""
    folder = state / "observations"
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        record = observation_of(number)
        path = folder / f"{time_stamp(record.start_time)}-{record.run_id}-1.json"
        path.write_bytes(_document(record))


def add_events(state: Path) -> None:
    """Writes pins that were removed again, on configurations without observations."""
    folder = state / "events"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(EVENTS):
        pin = Event(kind="pin", time=utc_text(_FIRST + number * _APART), key=f"other_{number}", value=0.5)
        unpin = replace(pin, kind="unpin", time=utc_text(_FIRST + (number + 0.5) * _APART), value=None)
        for event in (pin, unpin):
            name = f"{time_stamp(event.time)}-{event.kind}-{number:08x}.json"
            (folder / name).write_bytes(_document(event))


def add_runs(runs_dir: Path, state: Path, numbers: range) -> None:
    """Writes finished runs, and their entries in the registry."""
    lists = [RunRequest(model="gat", size="student", dataset=name, sets=(f"training.lr=0.{number}",))
             for name in DATA_SETS for number in range(1, CONFIGURATIONS // len(DATA_SETS) + 1)]  # fmt: skip
    texts = [plain_to_yaml(resolve(request).config) for request in lists]
    for number in numbers:
        path, began = runs_dir / run_id_of(number), utc_text(_FIRST + number * _APART)
        record = RunRecord(run_id=path.name, path=str(path), key=key_of(number), time=began)
        start = {"attempt": 1, "start_time": began, "host": "node", "pid": 1, "rank": 0, "job_id": "", "restarts": 0}
        end = {"attempt": 1, "ending": "finished", "message": "", "details": {}, "rank": 0, "host": "node",
               "time": utc_text(_FIRST + (number + 0.5) * _APART)}  # fmt: skip
        files = {
            path / "config.yaml": texts[number % CONFIGURATIONS].encode(),
            path / "result.json": json_text(_result(path.name, number)).encode(),
            path / "attempts" / "0001-began.json": json.dumps(start).encode(),
            path / "attempts" / "0001-ended.json": json.dumps(end).encode(),
            path / "checkpoints" / "manifest.json": b"{}",
            state / "runs" / path.name / "run.json": _document(record),
        }
        for file, data in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)


def _result(run_id: str, number: int) -> Mapping[str, Any]:
    values = {name: 0.5 + (number * 31 + index * 17) % 1000 / 2000 for index, name in enumerate(_METRICS)}
    tests = {f"test_{index:02d}": {"model": values, "baselines": {f"rule_{rule}": values for rule in range(3)}}
             for index in range(_TEST_SETS)}  # fmt: skip
    return {
        "run_id": run_id,
        "status": "finished",
        "epochs": 4,
        "steps": 40,
        "best_epoch": 2,
        "device": "v100-16gb",
        "best_validation_loss": 0.5,
        "peak_memory_pct": 0.6,
        "judgement": {"test": tests, "validation": values},
    }


def _document(record: Any) -> bytes:
    return json_text({"schema": SCHEMA, **asdict(record)}).encode()


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


def run_look_up(state: Path, runs: Path) -> Seconds:
    """Looks up the records that a training needs at its start, in a process of its own."""
    cpu_s, wall_s = call_apart(__name__, "look_up", str(state), str(runs))
    return cpu_s, wall_s


def look_up(state: str, runs: str) -> Seconds:
    """Does the work of a training with the state folder before it trains; returns its seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    PastRuns(Path(state), Path(runs), slurm)
    learned = FactorStore(Path(state)).learned_rule(
        key_of(0), DEVICES[0], observation_of(0).fingerprint, size="student"
    )
    next_time(Path(state))
    seconds = time.process_time() - cpu, time.perf_counter() - wall
    if learned.decided is None:
        raise AssertionError("a factor was learned")
    return seconds


def text(seconds: Seconds) -> str:
    """Writes CPU and wall seconds."""
    return f"{seconds[0]:.2f} ({seconds[1]:.2f})"
