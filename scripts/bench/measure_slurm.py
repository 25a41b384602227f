"""Tests one sweep of many short runs on a real SLURM (a soak test): a node is broken for a while, the controller is
stopped and started again, and runs are killed, requeued and preempted at random. Some runs fail by a person's error,
which two commands find and run again. No run may be lost, trained twice at once, or shown in a wrong state; the weights
are those of undisturbed runs. Times the commands for submitted runs, too.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench.harness import Benchmark, Table, median_time
from can_train.runs.run_state import LIVE
from sandbox import daemons
from sandbox.cluster import Cluster as Sandbox

BENCHMARK: Final = Benchmark(__name__, packages=("torch", "submitit"))
TASK: Final = Path(__file__).with_name("soak_task.py")

FILES: Final = 10
"""Files of data, one for each value of the sweep. The last is missing at first: a person's error."""

POINTS: Final = 56

TRAINING: Final = ("--task", f"{TASK.name}:Points", "--checkpoint-every", "5", "--device", "cpu")
"""A short run. Most of its time is spent on imports."""

REQUEST: Final = ("--partition", "scavenge", "--mem", "900M", "--cpus", "1", "--time", "30")

SETUP: Final = "[ ! -e lost-$SLURMD_NODENAME ] || (echo 'ls: cannot access /scratch: Stale file handle' >&2; exit 2)"
"""Line of the jobs' setup, which fails on a node that has lost a file system."""

DISTURBANCES: Final = ("kill", "requeue", "preempt")

PREEMPTING: Final = (
    "--partition=main", "--nodes=1", "--cpus-per-task=3", "--mem=3000M", "--time=1", "--output=/dev/null",
    "--job-name=preempting", "--wrap=sleep 3",
)  # fmt: skip
"""A job of higher priority than the jobs of the preemptible partition."""

PAUSE_S: Final = 3.0
"""Time between two disturbances."""

POLL_S: Final = 8.0
"""Time between two queries of all runs, which take processor time from the runs."""

BROKEN_S: Final = 30.0
"""Time that a fault of the node lasts."""

DOWN_S: Final = 30.0
"""Time without a controller."""

ACCOUNTED_S: Final = 15.0
"""Time until the accounting has heard of the last job's end."""

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

Runs = Sequence[Mapping[str, Any]]


@dataclass
class Soak:
    """The sweep of the soak test.

    Attributes:
        folder: Working folder of the commands and jobs, with the run folders and the state.
        sandbox: The cluster.
        began: Local time of its beginning.
        done: Number of disturbances of each kind.
        states: State of each run when it was last asked for, as far as it was certain.
        taken_back: Ends of runs that were shown although the run went on by itself, in words.
    """

    folder: Path
    sandbox: Sandbox
    began: datetime = field(default_factory=datetime.now)
    done: Counter[str] = field(default_factory=Counter)
    states: dict[str, str] = field(default_factory=dict)
    taken_back: list[str] = field(default_factory=list)

    def can_train(self, *arguments: str) -> str:
        """Runs a can-train command and returns its output.

        Raises:
            RuntimeError: It failed.
        """
        places = ["--runs-dir", str(self.folder / "runs"), "--state-dir", str(self.folder / "state")]
        command = [sys.executable, "-P", "-m", "can_train", *arguments, *places]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder)
        if ran.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{ran.stdout}{ran.stderr}")
        return ran.stdout

    def runs(self) -> Runs:
        """Returns every run of the sweep, as `can-train runs --json` lists it, and notes ends that are taken back."""
        listed: list[dict[str, Any]] = json.loads(self.can_train("runs", "--json", "--limit", "0"))
        runs = [run for run in listed if run["sweep"]]
        for run in (run for run in runs if run["certain"]):
            before = self.states.get(run["run_id"], LIVE[0])
            if before not in LIVE and run["state"] != before:
                self.taken_back.append(f"{run['run_id']}: {before}, then {run['state']}")
            self.states[run["run_id"]] = run["state"]
        return runs

    @property
    def node(self) -> str:
        """The node that is broken for a while."""
        return self.sandbox.nodes[-1]

    def write_data(self, *numbers: int) -> None:
        """Writes files of data."""
        # Imported late, because little else here needs it.
        import torch

        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            torch.save(torch.randn(POINTS, 4, generator=generator), self.folder / f"points-{number}.pt")

    # Disturbances

    def disturb(self, kind: str, running: Runs, rng: random.Random) -> None:
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

    def restart_controller(self) -> None:
        """Stops slurmctld, which saves its state, and starts it again."""
        print("the controller is stopped", flush=True)
        # After SIGKILL, SLURM itself starts the jobs of the last seconds a second time, and drains their nodes.
        os.kill(daemons.running(self.sandbox)["slurmctld"], signal.SIGTERM)
        down_until = time.monotonic() + DOWN_S
        # The files of the runs answer.
        self.runs()
        time.sleep(max(0.0, down_until - time.monotonic()))
        daemons.start(self.sandbox)
        self.done["controller restart"] += 1


def submit(soak: Soak, count: int) -> str:
    """Submits the sweep, as an array; returns its name."""
    files = ",".join(f"points-{number}.pt" for number in range(FILES))
    axes = ("--set", f"task.data={files}", "--set", f"training.seed=range(0,{count // FILES})")
    soak.can_train(*TRAINING, *REQUEST, *axes, "--set", f'cluster.setup=["{SETUP}"]', "--submit")
    (sweep,) = {str(run["sweep"]) for run in soak.runs()}
    return sweep


def wait_for_end(soak: Soak, options: argparse.Namespace, faults: Sequence["Fault"]) -> None:
    """Waits until all runs have ended, and disturbs them."""
    rng, disturbed, until = random.Random(options.seed), 0.0, time.monotonic() + options.minutes * 60
    while True:
        runs = soak.runs()
        live = [run for run in runs if run["live"]]
        if not live or time.monotonic() > until:
            return
        ended = 1 - len(live) / len(runs)
        for fault in faults:
            fault.update(ended)
        if ended > 1 / 3 and not soak.done["controller restart"]:
            soak.restart_controller()
            continue
        running = [run for run in live if run["state"] == "running"]
        left = options.disturbances - soak.done.total()
        if left > 0 and time.monotonic() - disturbed > PAUSE_S:
            soak.disturb(rng.choice(DISTURBANCES), running, rng)
            disturbed = time.monotonic()
        print(f"{len(live)} of {len(runs)} not ended, {len(running)} running, {left} disturbances to come", flush=True)
        time.sleep(POLL_S)


@dataclass
class Fault:
    """A fault of the node, which there is while a file exists.

    Attributes:
        file: The file.
        begins: Share of the runs that have ended when it begins.
        began: Time of its beginning; None: not yet.
    """

    file: Path
    begins: float
    began: float | None = None

    def update(self, ended: float) -> None:
        """Begins or ends the fault, if it is time."""
        if self.began is None and ended >= self.begins:
            self.began = time.monotonic()
            self.file.touch()
        elif self.began is not None and time.monotonic() - self.began > BROKEN_S:
            self.file.unlink(missing_ok=True)


# The truth, from SLURM's accounting and the files of the runs


def wrong_states(soak: Soak, runs: Runs) -> list[str]:
    """Lists the runs whose state is not the one that SLURM and the result file say, in words."""
    lines = [line.split("|") for line in _sacct(soak, "JobID,State")]
    accounts = {number: state.split()[0] for number, state in lines}  # the last attempt of each job
    wrong = []
    for run in runs:
        has_result, job = (Path(run["path"]) / "result.json").exists(), accounts.get(run["job_id"], "no account")
        # SLURM may start the job of a finished run again, which then fails.
        state = "finished" if has_result else {"FAILED": "failed"}.get(job)
        if state != run["state"]:
            wrong.append(f"{run['run_id']}: {run['state']}; job {run['job_id']} {job}, result {has_result}")
    return wrong


def strange_jobs(soak: Soak, runs: Runs) -> list[str]:
    """Lists the jobs of SLURM that belong to no run, or to several, in words."""
    owners: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        for job in run["jobs"]:
            owners[job["job_id"]].append(run["run_id"])
    names = dict(line.split("|") for line in _sacct(soak, "JobID,JobName"))
    numbers = [number for number, name in names.items() if name != "preempting"]
    return [f"job {number} of {owners[number] or 'no run'}" for number in numbers if len(owners[number]) != 1]


def _sacct(soak: Soak, columns: str) -> list[str]:
    command = ("sacct", "--duplicates", "--noheader", "--parsable2", "--allocations")
    since = f"--starttime={soak.began:%Y-%m-%dT%H:%M:%S}"
    done = subprocess.run([*command, since, "-o", columns], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def trained_twice(runs: Runs) -> list[str]:
    """Lists the runs of which two attempts trained at once, or to the end. SLURM may start a job again whose end it has
    not heard of; such an attempt of a finished run trains nothing.
    """
    twice = []
    for run in runs:
        attempts, log = run["attempts"], Path(run["path"]) / "log.txt"
        overlaps = any(one["ended"] and one["ended"] > other["time"] for one, other in pairwise(attempts))
        if overlaps or log.read_text().count("\nResult: ") > 1:
            twice.append(f"{run['run_id']} was trained twice")
    return twice


def undisturbed_equal(soak: Soak, runs: Runs) -> Iterator[bool]:
    """Repeats the runs with most attempts without disturbances, and yields whether the weights are equal."""
    for run in sorted(runs, key=lambda run: len(run["attempts"]), reverse=True)[:FOLLOWED]:
        again = Soak(Path(tempfile.mkdtemp(dir=soak.folder)), soak.sandbox)
        for file in soak.folder.glob("points-*.pt"):
            (again.folder / file.name).symlink_to(file)
        shutil.copy(TASK, again.folder)
        label = dict(part.split("=") for part in run["label"].split())
        again.can_train(*TRAINING, "--set", f"task.data={label['data']}", "--seed", label["seed"])
        (path,) = (again.folder / "runs").iterdir()
        disturbed, whole = _weights(Path(run["path"])), _weights(path)
        yield disturbed.keys() == whole.keys() and all(disturbed[name].equal(whole[name]) for name in whole)


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _weights(path: Path) -> dict[str, Any]:
    import torch

    manifest = json.loads((path / "checkpoints" / "manifest.json").read_text())
    newest = path / "checkpoints" / manifest["checkpoints"][0]["file"]
    weights: dict[str, Any] = torch.load(newest, weights_only=True)["model"]
    return weights


def num_recorded(soak: Soak, runs: Runs) -> int:
    """Counts the finished runs with an observation."""
    folder = soak.folder / "state" / "observations"
    observed = {json.loads(path.read_text())["run_id"] for path in folder.glob("*.json")
                if not path.name.endswith(".started.json")}  # fmt: skip
    return len(observed & {run["run_id"] for run in runs})


def beyond_imports(soak: Soak) -> list[tuple[str, float, float]]:
    """Times the commands. Returns name, seconds, and seconds beyond the imports."""
    synthetic = ("--model", "gat", "--dataset", "synthetic", "--no-baselines", "--device", "cpu")
    lines = {
        "submit": (*synthetic, *REQUEST, "--submit", "--force", "--set", "cluster.additional.hold=true"),
        "runs": ("runs",),
        "status": ("status", soak.runs()[0]["run_id"]),
    }
    times = []
    for name, line in lines.items():
        imports = [sys.executable, "-P", "-c", IMPORTS[name]]
        whole_s = median_time(partial(soak.can_train, *line), REPEATS)
        imports_s = median_time(partial(subprocess.run, imports, check=True), REPEATS)
        times.append((name, whole_s, whole_s - imports_s))
    subprocess.run(["scancel", "--me"], check=True)
    return times


# The test and its table


def run_soak(soak: Soak, options: argparse.Namespace, table: Table) -> list[str]:
    """Runs the sweep, and its failed runs again. Returns the expectations that were missed."""
    soak.write_data(*range(FILES - 1))
    sweep = submit(soak, options.runs)
    faults = [Fault(soak.folder / f"broken-{soak.node}", 0.0), Fault(soak.folder / f"lost-{soak.node}", 0.5)]
    wait_for_end(soak, options, faults)
    time.sleep(ACCOUNTED_S)
    runs = soak.runs()
    missed = wrong_states(soak, runs)
    table.add("runs of the sweep", f"{len(runs)}, each a job of its own")
    table.add("disturbances", _counted(soak.done.elements()))
    table.add("after them", _counted(run["state"] for run in runs))
    missed += run_again(soak, sweep, table)
    options.disturbances = 0
    wait_for_end(soak, options, [])
    time.sleep(ACCOUNTED_S)
    return missed + add_checks(soak, soak.runs(), options.runs, table)


def run_again(soak: Soak, sweep: str, table: Table) -> list[str]:
    """Finds the failed runs by a command, and runs them again by another. Returns the expectations that were missed."""
    shown = soak.can_train("status", sweep)
    print(shown, flush=True)
    causes = json.loads(soak.can_train("status", sweep, "--json"))["failures"]
    texts = [f"{len(cause['run_ids'])} {cause['state']}: {cause['why']}" for cause in causes]
    table.add("`can-train status SWEEP`", "; ".join(texts))
    soak.write_data(FILES - 1)
    soak.states.clear()
    line = ("resume", sweep, "--all-failed")
    submitted = json.loads(soak.can_train(*line, "--json"))["submitted"]
    table.add("`can-train resume SWEEP --all-failed`", f"{len(submitted)} runs go on")
    tells = " ".join(line) in shown and all(cause["why"] for cause in causes)
    return [] if tells else ["status does not tell the causes and the next command"]


def add_checks(soak: Soak, runs: Runs, submitted: int, table: Table) -> list[str]:
    """Adds the checks of the ended runs to the table. Returns the expectations that were missed."""
    jobs, attempts = [job for run in runs for job in run["jobs"]], [len(run["attempts"]) for run in runs]
    retries = [job["reason"] for job in jobs if job["reason"] not in ("", "resumed")]
    finished = [run for run in runs if run["state"] == "finished"]
    equal = list(undisturbed_equal(soak, finished))
    table.add("ended as", _counted(run["state"] for run in runs))
    table.add("attempts", f"{sum(attempts)}, at most {max(attempts)} a run")
    table.add("submitted again by can-train", _counted(re.sub(r" on n[\d-]+|\d+ ", "", reason) for reason in retries))
    checks = {"states that SLURM or the result file contradicts": wrong_states(soak, runs),
              "ends that were shown, and taken back": soak.taken_back,
              "runs trained twice at once": trained_twice(runs),
              "jobs of no run, or of several": strange_jobs(soak, runs)}  # fmt: skip
    for name, wrong in checks.items():
        table.add(name, str(len(wrong)))
    table.add("observations of finished runs", f"{(recorded := num_recorded(soak, finished))} of {len(finished)}")
    table.add("most disturbed runs equal to undisturbed ones, bitwise", f"{sum(equal)} of {len(equal)}")
    missed = [text for wrong in checks.values() for text in wrong]
    is_whole = len(finished) == len(runs) == submitted and recorded == submitted and all(equal)
    return missed if is_whole else [*missed, "a run did not finish, left no observation, or has other weights"]


def _counted(words: Iterable[str]) -> str:
    return ", ".join(f"{count} × {word}" for word, count in sorted(Counter(words).items()))


@contextmanager
def running_sandbox() -> Iterator[Sandbox]:
    """Starts the SLURM sandbox, and stops it afterwards, unless it runs already."""
    sandbox = Sandbox.named_by(os.environ)
    is_new = "slurmctld" not in daemons.running(sandbox)
    daemons.start(sandbox)
    os.environ |= daemons.environment(sandbox)
    try:
        yield sandbox
    finally:
        if is_new:
            daemons.stop(sandbox)


def main() -> None:
    """Measures, prints the section and writes it into RESULTS.md; exit status 1 if a run did not meet expectations."""
    parser = BENCHMARK.parser()
    parser.add_argument("--runs", type=int, default=200, help=f"runs, a multiple of {FILES} (default: %(default)s)")
    parser.add_argument("--disturbances", type=int, default=40, help="of all kinds (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=90.0, help="time limit (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the disturbances (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="keep runs and state in this new folder")
    options = parser.parse_args()
    # Each run has one processor, where several threads would be several times slower.
    os.environ["OMP_NUM_THREADS"] = "1"
    table, started = Table("figure", "seen"), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="can-train-soak-") as folder, running_sandbox() as sandbox:
        soak = Soak(options.folder or Path(folder), sandbox)
        soak.folder.mkdir(exist_ok=True)
        shutil.copy(TASK, soak.folder)
        missed = run_soak(soak, options, table)
        table.add("time", f"{(time.monotonic() - started) / 60:.1f} min")
        for name, whole_s, beyond_s in beyond_imports(soak):
            table.add(f"`{name}`", f"{whole_s:.2f} s, beyond imports {beyond_s:.2f} s")
    BENCHMARK.finish(options, missed, table=table)
