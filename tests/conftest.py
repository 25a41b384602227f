"""What every test shares: none sees the settings of the person who runs it, and Hypothesis does not time it."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("can-train", deadline=None, print_blob=True)
settings.load_profile("can-train")


def pytest_configure(config: pytest.Config) -> None:
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(_FailuresAtOnce(reporter))
    # Two workers on two cores: threads that wait for each other's cores would make every training many times slower.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    # Else each of a thousand processes compiles can-train anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Deterministic algorithms need it on a GPU, and cuBLAS reads it once.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # A shell that starts the tests in the background has them ignore Ctrl-C, and so every process that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _FailuresAtOnce:
    """Prints why a test failed as soon as it has: a run that is cut off would have said no more than an F."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.ensure_newline()
            self._reporter.section(report.nodeid, sep="-")
            self._reporter.write_line(report.longreprtext)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses a name that differs between processes: workers would collect different tests, and none would run."""
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"the name of a test has an address of memory: {named[0]}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds PyTorch: else the weights of a test's model depend on the tests that ran before in its process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_report_header() -> str:
    packages = ("torch", "torch_geometric", "numpy", "polars", "hydra-core", "hydra-zen", "submitit", "typer")
    return ", ".join(f"{package} {version(package)}" for package in packages)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.getreports("skipped") if "slurm" in report.keywords]
    if skipped:
        lack = f"{len(skipped)} tests need a SLURM: skipped, since CAN_TRAIN_SLURM_SANDBOX=1 is not set"
        terminalreporter.write_line(f"{lack} (it installs Debian packages, as root)", yellow=True)
    unseen = [report for report in terminalreporter.getreports("skipped") if "chromium" in report.keywords]
    if unseen:
        lack = f"{len(unseen)} tests look at reports with Chromium: skipped, since it is not installed"
        terminalreporter.write_line(lack, yellow=True)
    if any("mpirun" in report.nodeid for report in terminalreporter.getreports("skipped")):
        terminalreporter.write_line("a test of mpirun: skipped, since openmpi-bin is not installed", yellow=True)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("CAN_TRAIN_") and name != "CAN_TRAIN_SLURM_SANDBOX":
            monkeypatch.delenv(name)
    # Else a person's own settings file would be read.
    monkeypatch.setenv("CAN_TRAIN_CONFIG", os.devnull)


@pytest.fixture(scope="session")
def prepared(shared: Path) -> Path:
    """One cache of prepared data for tests that are not about it: the smallest data set takes 6 s of a processor."""
    return shared / "prepared"


@pytest.fixture
def data_prepared_once(monkeypatch: pytest.MonkeyPatch, prepared: Path) -> None:
    """Has commands take the cache of prepared data that tests share."""
    monkeypatch.setenv("CAN_TRAIN_CACHE", str(prepared))


_MANY_MODULES = 300
"""Imported by one of the large libraries."""

_frozen_modules = 0


def _freeze() -> None:
    """Keeps what lives now out of later garbage collections. One follows each out-of-memory and each trial of a search,
    and would take a second in a process of many tests.
    """
    global _frozen_modules  # noqa: PLW0603
    _frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def earlier_tests_are_no_garbage() -> None:
    _freeze()


@pytest.fixture(autouse=True)
def imports_are_no_garbage() -> None:
    if len(sys.modules) > _frozen_modules + _MANY_MODULES:
        _freeze()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[Path]:
    """In place of Python, where a test is not about the start of a process: modules have been imported there."""
    from fakes.processes import python_with_imports

    with python_with_imports() as program:
        yield program


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder with pyproject.toml in it."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this call of pytest for all of its processes."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
