"""Tests many short runs on a real SLURM while some are killed, requeued or preempted at random (a soak test), and times
the commands for submitted runs. Every run must finish with the weights of an undisturbed run, and leave an observation.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.harness import Benchmark, Table, median_time
from can_train.runs.run_folder import RunFolder

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "submitit"))
SANDBOX: Final = Path(__file__).resolve().parents[1] / "slurm-sandbox"

TRAINING: Final = (
    "--size", "student", "--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5", "--no-baselines",
    "--epochs", "2", "--min-steps-per-epoch", "20", "--checkpoint-every", "5", "--device", "cpu", "--mem", "1200M",
    "--cpus", "1", "--time", "30",
)  # fmt: skip
"""A short run. Most of its time is spent on imports."""

MODELS: Final = ("gat", "vgae")

DISTURBANCES: Final = ("kill", "requeue", "preempt")

PREEMPTING: Final = (
    "--partition=main", "--nodes=1", "--cpus-per-task=3", "--mem=3000M", "--time=1", "--output=/dev/null",
    "--wrap=sleep 3",
)  # fmt: skip
"""A job of higher priority than the jobs of the preemptible partition."""

PAUSE_S: Final = 3.0
"""Time between two disturbances."""

POLL_S: Final = 5.0
"""Time between two queries of all runs, which take processor time from the runs."""

REPEATS: Final = 5
"""How often each command is timed."""

FOLLOWED: Final = 4
"""Number of runs that are repeated undisturbed, to compare the weights."""

IMPORTS: Final[Mapping[str, str]] = {
    "submit": "import typer, submitit, can_train.cli.submit, can_train.config.compose",
    "runs": "import typer, rich.table, can_train.cli.runs, can_train.runs.status",
    "status": "import typer, rich.table, can_train.cli.main, can_train.runs.status",
}
"""The imports of each command, which are timed separately."""


@dataclass
class Cluster:
    """The runs of the soak test.

    Attributes:
        folder: Contains the run folders and the state.
        done: Number of disturbances of each kind.
    """

    folder: Path
    done: Counter[str] = field(default_factory=Counter)

    def can_train(self, *arguments: str) -> str:
        """Runs a can-train command and returns its output.

        Raises:
            RuntimeError: It failed.
        """
        places = ["--runs-dir", str(self.folder / "runs"), "--state-dir", str(self.folder / "state")]
        command = [sys.executable, "-P", "-m", "can_train", *arguments, *places]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{ran.stdout}{ran.stderr}")
        return ran.stdout

    def runs(self) -> list[dict[str, Any]]:
        """Returns every run, as listed by `can-train runs --json`."""
        listed: list[dict[str, Any]] = json.loads(self.can_train("runs", "--json", "--limit", "0"))
        return listed

    def disturb(self, kind: str, running: Sequence[Mapping[str, Any]], rng: random.Random) -> None:
        """Disturbs one of the running runs."""
        if not running:
            return
        run = rng.choice(running)
        acts = {
            "kill": lambda: self._kill(Path(run["path"])),
            "requeue": lambda: _succeeds("scontrol", "requeue", run["job_id"]),
            "preempt": lambda: _succeeds("sbatch", *PREEMPTING),
        }
        self.done[kind] += acts[kind]()

    @staticmethod
    def _kill(path: Path) -> bool:
        began = sorted((path / "attempts").glob("*-began.json"))
        if not began:
            return False
        pid = json.loads(began[-1].read_text())["pid"]
        try:
            # The process may have ended, and another one may have its id.
            if b"submitit" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                return False
            os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return True


def submit(cluster: Cluster, count: int) -> None:
    """Submits the runs: one job array for each model, in different partitions."""
    for index, model in enumerate(MODELS):
        seeds = f"training.seed=range(0,{count // len(MODELS)})"
        partition = ("main", "scavenge")[index % 2]
        cluster.can_train("--model", model, *TRAINING, "--set", seeds, "--submit", "--partition", partition)


def soak(cluster: Cluster, options: argparse.Namespace) -> float:
    """Submits runs and disturbs them until all have ended. Returns the seconds until then."""
    rng, started = random.Random(options.seed), time.monotonic()
    submit(cluster, options.runs)
    disturbed = 0.0
    while (live := [run for run in cluster.runs() if run["state"] in ("queued", "running")]) and (
        time.monotonic() - started < options.minutes * 60
    ):
        running = [run for run in live if run["state"] == "running"]
        if sum(cluster.done.values()) < options.disturbances and time.monotonic() - disturbed > PAUSE_S:
            cluster.disturb(rng.choice(DISTURBANCES), running, rng)
            disturbed = time.monotonic()
        left = options.disturbances - sum(cluster.done.values())
        counts = f"{len(live)} of {options.runs} not ended, {len(running)} running"
        print(f"{counts}, {left} disturbances to come", flush=True)
        time.sleep(POLL_S)
    return time.monotonic() - started


def undisturbed_equal(cluster: Cluster, runs: Sequence[Mapping[str, Any]]) -> Iterator[bool]:
    """Repeats the runs with most attempts without disturbances, and yields whether the weights are equal."""
    for run in sorted(runs, key=attempts_of, reverse=True)[:FOLLOWED]:
        again = Cluster(Path(tempfile.mkdtemp(dir=cluster.folder)))
        config = RunFolder(Path(run["path"])).config()
        model, seed = config["model_name"], config["training"]["seed"]
        local = [word for word in TRAINING if word not in ("--mem", "1200M", "--cpus", "1", "--time", "30")]
        again.can_train("--model", model, *local, "--seed", str(seed))
        (path,) = (again.folder / "runs").iterdir()
        disturbed, whole = _weights(Path(run["path"])), _weights(path)
        yield disturbed.keys() == whole.keys() and all(disturbed[name].equal(whole[name]) for name in whole)


def attempts_of(run: Mapping[str, Any]) -> int:
    """Counts the attempts of a run."""
    return len(list((Path(run["path"]) / "attempts").glob("*-began.json")))


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _weights(path: Path) -> dict[str, Any]:
    # Imported late, because nothing else here needs it.
    import torch

    manifest = json.loads((path / "checkpoints" / "manifest.json").read_text())
    newest = path / "checkpoints" / manifest["checkpoints"][0]["file"]
    weights: dict[str, Any] = torch.load(newest, weights_only=True)["model"]
    return weights


def recorded(cluster: Cluster, runs: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Returns the number of finished runs with an observation, and the number of finished runs."""
    folder = cluster.folder / "state" / "observations"
    observed = {json.loads(path.read_text())["run_id"] for path in folder.glob("*.json")
                if not path.name.endswith(".started.json")}  # fmt: skip
    return len(observed & {run["run_id"] for run in runs}), len(runs)


def beyond_imports(cluster: Cluster) -> list[tuple[str, float, float]]:
    """Times the commands. Returns name, seconds, and seconds beyond the imports."""
    lines = {
        "submit": ("--model", "gat", *TRAINING, "--submit", "--force", "--set", "cluster.additional.hold=true"),
        "runs": ("runs",),
        "status": ("status", cluster.runs()[0]["run_id"]),
    }
    times = []
    for name, line in lines.items():
        imports = [sys.executable, "-P", "-c", IMPORTS[name]]
        whole_s = median_time(partial(cluster.can_train, *line), REPEATS)
        imports_s = median_time(partial(subprocess.run, imports, check=True), REPEATS)
        times.append((name, whole_s, whole_s - imports_s))
    for run in cluster.runs()[:REPEATS]:
        cluster.can_train("cancel", run["run_id"])
    return times


def report(cluster: Cluster, seconds: float, times: Sequence[tuple[str, float, float]]) -> tuple[Table, bool]:
    """Returns the table, and whether every run met the expectations."""
    runs = [run for run in cluster.runs() if run["sweep"]]
    states = Counter(run["state"] for run in runs)
    attempts = [attempts_of(run) for run in runs]
    finished = [run for run in runs if run["state"] == "finished"]
    equal = list(undisturbed_equal(cluster, finished))
    written, expected = recorded(cluster, finished)
    table = Table("figure", "seen")
    table.add("runs submitted", str(len(runs)))
    table.add("disturbances", ", ".join(f"{count} × {kind}" for kind, count in sorted(cluster.done.items())))
    table.add("attempts", f"{sum(attempts)}, at most {max(attempts)} a run")
    table.add("ended as", ", ".join(f"{count} {state}" for state, count in states.items()))
    table.add("observations of finished runs", f"{written} of {expected}")
    table.add("most disturbed runs equal to undisturbed ones, bitwise", f"{sum(equal)} of {len(equal)}")
    table.add("time", f"{seconds / 60:.1f} min")
    for name, whole_s, beyond_s in times:
        table.add(f"`{name}`", f"{whole_s:.2f} s, beyond imports {beyond_s:.2f} s")
    return table, len(finished) == len(runs) and written == expected and all(equal)


def start_sandbox() -> None:
    """Starts the SLURM sandbox, unless a SLURM answers already."""
    if subprocess.run(["scontrol", "ping"], capture_output=True, check=False).returncode == 0:
        return
    subprocess.run([SANDBOX, "start"], check=True)
    line = subprocess.run([SANDBOX, "env"], capture_output=True, text=True, check=True).stdout
    os.environ["SLURM_CONF"] = line.strip().partition("=")[2]


def main() -> None:
    """Measures, prints the section and writes it into RESULTS.md; exit status 1 if a run did not meet expectations."""
    parser = BENCHMARK.parser()
    parser.add_argument("--runs", type=int, default=50, help="number of runs (default: %(default)s)")
    parser.add_argument("--disturbances", type=int, default=40, help="of all kinds (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the disturbances (default: %(default)s)")
    options = parser.parse_args()
    # Each run has one processor, where several threads would be several times slower.
    os.environ["OMP_NUM_THREADS"] = "1"
    start_sandbox()
    with tempfile.TemporaryDirectory(prefix="can-train-soak-") as folder:
        cluster = Cluster(Path(folder))
        seconds = soak(cluster, options)
        table, good = report(cluster, seconds, beyond_imports(cluster))
    BENCHMARK.finish(options, [] if good else ["a run did not meet the expectations"], table=table)
