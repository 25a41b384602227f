"""The harness of the benchmarks: command lines, sections of RESULTS.md, tables, timing, and child processes.

The text of a section is a template in `sections/`: a heading, a blank line and the body, with `str.format` fields.
Fields in capitals are constants of the benchmark's module.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from can_train import __version__

BENCH: Final = Path(__file__).resolve().parent
ROOT: Final = BENCH.parent.parent
RESULTS: Final = BENCH / "RESULTS.md"
SECTIONS: Final = BENCH / "sections"
REAL_LOGS: Final = ROOT.parent / "shared" / "data" / "can"
"""Folder of real CAN logs, which are not in the repository."""


@dataclass(frozen=True)
class Benchmark:
    """The command line and the section of a benchmark.

    Attributes:
        module: `bench.measure_NAME`; NAME is also the name of the section and of `scripts/bench/NAME`.
        packages: Packages whose versions the section names.
        quick: Help of --quick; empty if the benchmark has no quick run.
    """

    module: str
    packages: Sequence[str] = ()
    quick: str = ""

    @property
    def name(self) -> str:
        """The name of the section."""
        return self.module.removeprefix("bench.measure_")

    def parser(self) -> argparse.ArgumentParser:
        """Makes the parser, with --no-write, and with --quick if the benchmark has a quick run."""
        parser = argparse.ArgumentParser(
            prog=f"scripts/bench/{self.name}", description=sys.modules[self.module].__doc__
        )
        parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
        if self.quick:
            # argparse formats a help text with %.
            text = f"{self.quick}; writes nothing".replace("%", "%%")
            parser.add_argument("--quick", action="store_true", help=text)
        return parser

    def finish(self, options: argparse.Namespace, missed: Sequence[str] = (), *, write: bool = True,
               versions: Mapping[str, str] | None = None, **fields: object) -> None:  # fmt: skip
        """Prints the section and writes it into RESULTS.md; exits with status 1 if goals were missed.

        Args:
            options: The parsed command line; nothing is written with --quick or --no-write.
            missed: The goals that were missed.
            write: Whether the run is one that RESULTS.md may show.
            versions: Versions of the packages of another environment.
            fields: Fields of the template.
        """
        head = environment(versions or versions_of(*self.packages))
        text = render(self.name, {**vars(sys.modules[self.module]), "environment": head, **fields})
        print(text, flush=True)
        if write and not options.no_write and not getattr(options, "quick", False):
            write_section(self.name, text)
        if missed:
            sys.exit(f"missed: {'; '.join(missed)}")


class Table(list[Sequence[str]]):
    """The rows of a table, the head first. Each added row is printed, as progress."""

    def __init__(self, *head: str) -> None:
        super().__init__([head])

    def add(self, *cells: str) -> None:
        """Adds a row."""
        self.append(cells)
        print(" | ".join(cells), file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return markdown(self)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, with the first row as its head."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def render(section: str, fields: Mapping[str, object]) -> str:
    """Returns the body of a section's template with its fields filled in."""
    return template(section)[1].format_map(fields)


def template(section: str) -> tuple[str, str]:
    """Reads a section's template. Returns its heading and its body."""
    heading, _, body = (SECTIONS / f"{section}.md").read_text(encoding="utf-8").partition("\n\n")
    return heading, body.rstrip("\n")


def write_section(name: str, text: str) -> None:
    """Replaces the text between `<!-- name:begin -->` and `<!-- name:end -->` in RESULTS.md; adds a missing section."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    document = RESULTS.read_text(encoding="utf-8")
    if begin not in document:
        document += f"\n{template(name)[0]}\n\n{begin}\n{end}\n"
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    RESULTS.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def versions_of(*packages: str) -> dict[str, str]:
    """Returns the versions of packages; `Python` is the interpreter."""
    return {name: platform.python_version() if name == "Python" else version(name) for name in packages}


def environment(versions: Mapping[str, str]) -> str:
    """Returns a line with the machine and the versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    cpu = next(models, platform.machine())
    return f"CPU ({cpu}), {os.cpu_count()} cores; can-train {__version__}, {packages}."


def say(text: str) -> None:
    """Prints the name of a measurement that begins."""
    print(f"{text} ...", file=sys.stderr, flush=True)


# Timing


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Times one call."""
    started = clock()
    work()
    return clock() - started


def best_time(work: Callable[[], object], rounds: int) -> float:
    """Returns the seconds of the fastest of several calls."""
    return min(seconds_of(work) for _ in range(rounds))


def median_time(work: Callable[[], object], rounds: int) -> float:
    """Returns the median seconds of several calls."""
    return median(seconds_of(work) for _ in range(rounds))


# Child processes


class Usage(NamedTuple):
    """Processor time of all threads, elapsed time, and peak memory of a process."""

    cpu_s: float
    wall_s: float
    peak_mib: float


def run_measured(command: Sequence[str], **options: Any) -> Usage:
    """Runs a command without its standard output. Exits with its error output if the command fails.

    Args:
        command: The command.
        options: Options of `subprocess.Popen`.
    """
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=printed, **options)
        # On Linux the peak includes this process's before exec, which is smaller: this process has not imported torch.
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            printed.seek(0)
            sys.exit(f"{printed.read()}{' '.join(command)} ended with {process.returncode}")
    return Usage(used.ru_utime + used.ru_stime, wall_s, used.ru_maxrss / 1024)


def run_python(*arguments: str) -> str:
    """Runs this Python and returns its output."""
    return subprocess.run([sys.executable, "-P", *arguments], check=True, capture_output=True, text=True).stdout


def train(runs: Path, state: Path, *words: str) -> Path:
    """Trains by the command line, and returns the folder of the only run in `runs`."""
    places = ("--runs-dir", str(runs), "--state-dir", str(state))
    run_python("-m", "can_train", *words, *places)
    (run,) = (path.parent for path in runs.glob("*/result.json"))
    return run


_CALL: Final = """
import json, sys
from importlib import import_module
module, function, *arguments = sys.argv[1:]
print("\\n" + json.dumps(getattr(import_module(module), function)(*arguments)))
"""


def call_apart(module: str, function: str, *arguments: str, python: str = sys.executable, **options: Any) -> Any:
    """Calls a function of a module in a process of its own, with text arguments; returns its result by way of JSON.

    Args:
        module: The module.
        function: The function.
        arguments: Arguments of the function.
        python: The interpreter.
        options: Options of `subprocess.run`.
    """
    command = [python, "-P", "-c", _CALL, module, function, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options)
    return json.loads(done.stdout.splitlines()[-1])


# The environment of the other tools, `.venv-peers`, which is made on first use

PEERS: Final = ROOT / ".venv-peers"
REQUIREMENTS: Final = BENCH / "peers.txt"
PEERS_TIMEOUT_S: Final = 1_800
"""Time limit of all other tools together. They take a few minutes."""


def run_peers(module: str, *arguments: str) -> Any:
    """Calls `main` of a module with the Python of the other tools, and returns its result."""
    say("peers")
    # No folder of the caller's PYTHONPATH: its packages would replace the environment's.
    folders = os.pathsep.join([str(ROOT / "scripts"), str(ROOT / "src")])
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders}
    return call_apart(f"bench.{module}", "main", *arguments, python=str(_peers_python()), cwd=BENCH.parent,
                      env=variables, timeout=PEERS_TIMEOUT_S)  # fmt: skip


def _peers_python() -> Path:
    """Returns the Python of the environment, which is made again when its requirements have changed."""
    python, stamp = PEERS / "bin" / "python", PEERS / "installed.txt"
    wanted = REQUIREMENTS.read_text(encoding="utf-8") + (BENCH.parent / "constraints.txt").read_text(encoding="utf-8")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    say(f"installing the peers into {PEERS.name} (with a PyTorch of their own)")
    pip = [str(python), "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
    try:
        subprocess.run([sys.executable, "-I", "-m", "venv", "--clear", str(PEERS)], check=True)
        subprocess.run(pip, check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"scripts/bench: the peers cannot be installed: {error}")
    stamp.write_text(wanted, encoding="utf-8")
    return python
