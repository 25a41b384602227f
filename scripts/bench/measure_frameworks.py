"""Runs the tests of Lightning and transformers twice, plainly and with an adapter of can-train in every trainer, and
names the tests that pass plainly and not with the adapter. Nothing is fetched: the tests lie in a checkout of each
framework, of the installed version:

git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers
pip install pytest-timeout pytest-rerunfailures parameterized datasets

(The source distributions on PyPI do not have these tests.)
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree

from bench.harness import ROOT, Benchmark, Table, markdown, say

BENCHMARK: Final = Benchmark(
    __name__, packages=("torch", "lightning", "transformers"), quick="hooks of Lightning, callbacks of transformers"
)
TEST_TIMEOUT_S: Final = 120
"""Time limit of a test. The slowest ones take half a minute plainly."""

SUITE_TIMEOUT_S: Final = 3_600
"""Time limit of a suite, for a hang that no signal ends."""

POSITIONS: Final = ("first", "last")


class Suite(NamedTuple):
    """Tests that are run together.

    Attributes:
        framework: Name of the option that has the checkout's folder.
        adapter: Name of the adapter in `bench.frameworks_plugin`.
        folder: Folder of the checkout that has the tests.
        tests: Files and folders, as patterns.
        quick: Those of a quick run; empty: it has none.
    """

    framework: str
    adapter: str
    folder: str
    tests: Sequence[str]
    quick: Sequence[str] = ()

    def files(self, checkout: Path, *, quick: bool = False) -> list[str]:
        """Returns the files and folders of the tests in a checkout."""
        folder = checkout.resolve() / self.folder
        return [str(path) for pattern in (self.quick if quick else self.tests) for path in sorted(folder.glob(pattern))]


SUITES: Final = (
    Suite(
        "lightning", "callback", "tests/tests_pytorch",
        ("loops", "models/test_hooks.py", "callbacks/test_*weight_av*.py", "trainer/optimization", "trainer/flags",
         "trainer/logging_", "tuner"),
        ("models/test_hooks.py",),
    ),
    Suite("lightning", "sizes", "tests/tests_pytorch", ("tuner/test_scale_batch_size.py",)),
    Suite("transformers", "mixin", "tests/trainer", ("test_trainer*.py",), ("test_trainer_callback.py",)),
)  # fmt: skip

_SEARCH: Final = "the size follows from the mode, the first size or the number of trials of Tuner's search"
_LEFT: Final = "it looks at what Tuner's trials leave in the trainer; those of can-train run with copies"
_ERRORS: Final = "it asks for an error of Lightning's class and words"
CANNOT_HOLD: Final[Mapping[str, Mapping[str, str]]] = {
    "callback": {},
    "sizes": {
        "*::test_scale_batch_size_method_with_model_or_datamodule*": _SEARCH,
        "*::test_scale_batch_size_max_trials_modes*": _SEARCH,
        "*::test_scale_batch_size_no_trials": _SEARCH,
        "*::test_tuner_with_evaluation_methods*": _SEARCH,
        "*::test_scale_batch_size_fails_with_unavailable_mode": _SEARCH,
        "*::test_scale_batch_size_margin_and_max_val*": "the margin of the search of Tuner has no counterpart",
        "*::test_auto_scale_batch_size_set_*": _LEFT,
        "*::test_dataloader_reset_with_scale_batch_size*": _LEFT,
        "*::test_dataloader_batch_size_updated_on_failure*": "a patch of Lightning makes any error an out-of-memory",
        "*::test_auto_scale_batch_size_duplicate_attribute_warning": "its loader does not follow the batch size",
        "*::test_error_on_dataloader_passed_to_fit": "can-train searches with a loader that is passed",
        "*::test_error_if_*_passed_with_*_method": _ERRORS,
        "*::test_invalid_method_in_tuner": _ERRORS,
        "*::test_batch_size_finder_with_multiple_eval_dataloaders": _ERRORS,
    },
    "mixin": {
        "*::test_auto_batch_size*": "auto_find_batch_size is refused: it would start again with another batch",
    },
}
"""Tests that no adapter can pass, as patterns of names, with the reason; by adapter."""


class Outcome(NamedTuple):
    """The outcome of a test: `passed`, `failed`, `skipped` or `absent`, and the line that says why it failed."""

    status: str
    error: str = ""


class Run(NamedTuple):
    """The outcomes of a suite's tests with an adapter, beside those of the plain run."""

    suite: Suite
    name: str  # Where a callback stands, or the size of the parts; empty: there is one way only
    plain: Mapping[str, Outcome]
    adapted: Mapping[str, Outcome]

    @property
    def way(self) -> str:
        """The adapter, and how it is put in."""
        return ", ".join(filter(None, [self.suite.adapter, self.name]))

    def differing(self) -> dict[str, Outcome]:
        """Returns the tests that pass plainly alone, but for those that cannot hold."""
        differing = different(self.plain, self.adapted)
        return {name: outcome for name, outcome in differing.items() if not self._reason(name)}

    def excused(self) -> dict[str, str]:
        """Returns the tests that cannot hold and pass plainly alone, with the reason."""
        return {name: reason for name in different(self.plain, self.adapted) if (reason := self._reason(name))}

    def _reason(self, test: str) -> str:
        reasons = CANNOT_HOLD[self.suite.adapter].items()
        return next((reason for pattern, reason in reasons if fnmatchcase(test, pattern)), "")


def main() -> None:
    """Runs the suites, prints the table and the tests that differ; exit status 1 if a test differs."""
    options = _options()
    suites = [suite for suite in SUITES if getattr(options, suite.framework) and (suite.quick or not options.quick)]
    runs = [run for suite in suites for run in runs_of(suite, options)]
    if options.json:
        options.json.write_text(json.dumps([as_json(run) for run in runs], indent=1), encoding="utf-8")
    table = Table("tests of", "adapter", "passed plainly", "passed with it", "differ", "cannot hold")
    for run in runs:
        numbers = (passed(run.plain), passed(run.adapted), len(run.differing()), len(run.excused()))
        table.add(run.suite.framework, run.way, *map(str, numbers))
    whole = len(suites) == len(SUITES) and not options.only and not options.split
    # Parts of a given size change what a test counts, such as the calls of a step.
    missed = [f"{run.way}: {len(run.differing())} tests differ"
              for run in runs if run.differing() and not run.name.startswith("parts")]  # fmt: skip
    BENCHMARK.finish(options, missed, write=whole, table=table, differing=listed(runs))


def _options() -> argparse.Namespace:
    parser = BENCHMARK.parser()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--lightning", type=Path, metavar="DIR", help="a checkout of Lightning")
    parser.add_argument("--transformers", type=Path, metavar="DIR", help="a checkout of transformers")
    parser.add_argument("--position", choices=POSITIONS, help="of the callback of Lightning; else both, in turn")
    parser.add_argument("--only", metavar="EXPR", default="", help="the tests that pytest -k EXPR chooses")
    parser.add_argument("--split", type=int, default=0, metavar="N", help="a further run, in parts of N samples")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="tests at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the outcomes of the tests that differ")
    parser.add_argument("--python", default=sys.executable, help="the Python with the frameworks; else the project's")
    options = parser.parse_args()
    if not options.lightning and not options.transformers:
        parser.error("name a checkout: --lightning DIR, --transformers DIR (--help says how to get one)")
    for suite in SUITES:
        checkout: Path | None = getattr(options, suite.framework)
        if checkout and not suite.files(checkout):
            parser.error(f"{checkout} has no {suite.folder}/{suite.tests[0]} (--help says how to get a checkout)")
    return options


def runs_of(suite: Suite, options: argparse.Namespace) -> Iterator[Run]:
    """Runs a suite plainly, and then in each way with its adapter."""
    tests = suite.files(getattr(options, suite.framework), quick=options.quick)
    plain = run_tests(f"{suite.framework}, plainly", tests, options)
    positions = [options.position] if options.position else POSITIONS
    # Only a callback stands among others.
    ways = {name: ["--can-train-position", name] for name in positions} if suite.adapter == "callback" else {"": []}
    if options.split and suite.adapter != "sizes":
        ways[f"parts of {options.split}"] = ["--can-train-split", str(options.split)]
    for name, way in ways.items():
        plugin = ["-p", "bench.frameworks_plugin", "--can-train-adapter", suite.adapter, *way]
        yield Run(suite, name, plain, run_tests(f"{suite.adapter} {name}", [*plugin, *tests], options))


def run_tests(name: str, arguments: Sequence[str], options: argparse.Namespace) -> dict[str, Outcome]:
    """Runs pytest in a folder of its own and returns the outcomes of the tests by name."""
    say(name)
    # A worker of pytest-xdist that crashes ends one test.
    command = [options.python, "-P", "-m", "pytest", "-q", "--color=no", "--tb=short", "-p", "no:cacheprovider",
               f"--timeout={TEST_TIMEOUT_S}", f"--numprocesses={options.jobs}", *arguments]  # fmt: skip
    folders = os.pathsep.join([str(ROOT / "scripts"), str(ROOT / "src")])
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
    variables = {**os.environ, **offline, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders}
    with tempfile.TemporaryDirectory() as folder:
        report, printed = Path(folder) / "report.xml", Path(folder) / "printed.txt"
        command += [f"--junitxml={report}", f"-k={options.only}"]
        with printed.open("wb") as stream:
            run_to_its_end(command, stream.fileno(), cwd=folder, env=variables)
        if not report.exists():
            sys.exit(f"{printed.read_text(errors='replace')}\n{' '.join(command)} left no report")
        return outcomes(report)


def run_to_its_end(command: Sequence[str], output: int, *, cwd: str, env: Mapping[str, str]) -> None:
    """Runs a command, and ends it with all processes that it started when its time is over."""
    process = subprocess.Popen(command, stdout=output, stderr=output, cwd=cwd, env=env, start_new_session=True)
    with suppress(subprocess.TimeoutExpired):
        process.wait(SUITE_TIMEOUT_S)
    # Some tests leave processes of their own behind, too.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# Outcomes


def outcomes(report: Path) -> dict[str, Outcome]:
    """Reads the outcomes of tests from a report in JUnit's XML. An error of a fixture is a failure of its test."""
    read: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, outcome = f"{case.get('classname')}::{case.get('name')}", Outcome("passed")
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = Outcome("failed", error_line(child.get("message") or "", child.text or ""))
            elif child.tag == "skipped":
                outcome = Outcome("skipped")
        # A test whose fixture fails at its end is there twice.
        if name not in read or read[name].status != "failed":
            read[name] = outcome
    return read


def error_line(message: str, text: str) -> str:
    """Returns the line of a failure that names the error: in a child process, the child's error."""
    marked = [line[1:].removeprefix("   ") for line in text.splitlines() if line.startswith("E ")]
    lines = marked or message.splitlines()
    # Lines of a traceback are indented, and the error follows them.
    begins = [place for place, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after = lines[begins[-1] + 1 :] if begins else lines
    return next((line for line in after if line.strip() and not line.startswith(" ")), "")


def different(plain: Mapping[str, Outcome], adapted: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Returns the tests that pass plainly and not with an adapter."""
    absent = Outcome("absent", "it did not run")
    passing = (name for name, outcome in plain.items() if outcome.status == "passed")
    return {name: outcome for name in passing if (outcome := adapted.get(name, absent)).status != "passed"}


def passed(results: Mapping[str, Outcome]) -> int:
    """Counts the tests that passed."""
    return sum(outcome.status == "passed" for outcome in results.values())


def listed(runs: Sequence[Run]) -> str:
    """Returns a table of the tests that differ, each with its error and the runs in which it differs."""
    errors: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for test, outcome in run.differing().items():
            errors.setdefault((test, outcome.error or outcome.status), []).append(run.way)
    # A bar would end the cell.
    rows = [(f"`{test}`", f"`{error.replace('|', '¦')}`", "; ".join(ways)) for (test, error), ways in errors.items()]
    return markdown([("test that differs", "error", "adapter"), *rows]) if rows else "No test differs."


def as_json(run: Run) -> dict[str, object]:
    """Returns what `--json` writes of a run."""
    return {
        "adapter": run.way, "plain": passed(run.plain), "adapted": passed(run.adapted), "cannot hold": run.excused(),
        "differing": {test: outcome._asdict() for test, outcome in run.differing().items()},
    }  # fmt: skip
