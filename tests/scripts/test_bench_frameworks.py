"""How `scripts/bench/frameworks` reads and compares reports of tests, and where it puts the adapters."""

import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench import measure_frameworks
from bench.frameworks_plugin import add_callback, mix_in, replace_sizes
from bench.measure_frameworks import (
    CANNOT_HOLD,
    SUITES,
    Outcome,
    Run,
    different,
    error_line,
    listed,
    outcomes,
    run_to_its_end,
)
from can_train.adapters.framework_loop import LoopSettings

TESTS = '''
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError("left behind")

def test_passes(): pass
def test_fails(): assert [1] == [2], "the reason"
def test_is_skipped(): pytest.skip("not here")
def test_ends_badly(broken): pass
def test_fails_and_ends_badly(broken): assert 1 == 2
@pytest.mark.xfail
def test_is_expected_to_fail(): assert 0
'''  # fmt: skip
OF_A_CHILD = """E   torch.multiprocessing.spawn.ProcessRaisedException:
E
E   -- Process 1 terminated with the following error:
E   Traceback (most recent call last):
E     File "spawn.py", line 87, in _wrap
E       fn(i, *args)
E   ValueError: the child's
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    folder = tmp_path_factory.mktemp("reported")
    (folder / "test_them.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", "--color=no", "-p", "no:cacheprovider",
               "--rootdir=.", "--junitxml=report.xml", "test_them.py"]  # fmt: skip
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    return outcomes(folder / "report.xml")


@pytest.mark.slow
def test_a_report_gives_each_test_once_with_its_error(report: Mapping[str, Outcome]) -> None:
    assert {name.removeprefix("test_them::test_"): outcome.status for name, outcome in report.items()} == {
        "passes": "passed", "fails": "failed", "is_skipped": "skipped", "ends_badly": "failed",
        "fails_and_ends_badly": "failed", "is_expected_to_fail": "skipped"}  # fmt: skip
    assert report["test_them::test_fails"].error == "AssertionError: the reason"
    assert report["test_them::test_ends_badly"].error == "ValueError: left behind"
    assert report["test_them::test_fails_and_ends_badly"].error == "assert 1 == 2"


def test_the_error_of_a_child_process_is_the_childs() -> None:
    assert error_line("torch.multiprocessing...", OF_A_CHILD) == "ValueError: the child's"


def test_a_test_whose_worker_died_has_the_message() -> None:
    assert error_line("worker 'gw0' crashed while running 't'", "") == "worker 'gw0' crashed while running 't'"


def test_tests_that_only_pass_plainly_differ() -> None:
    good, bad = Outcome("passed"), Outcome("failed", "why")
    plain = {"both": good, "adapter": good, "skipped": good, "lost": good, "plain": bad, "neither": bad}
    adapted = {"both": good, "adapter": bad, "skipped": Outcome("skipped"), "plain": good, "neither": bad, "new": bad}
    assert {name: outcome.status for name, outcome in different(plain, adapted).items()} == {
        "adapter": "failed", "skipped": "skipped", "lost": "absent"}  # fmt: skip


def test_a_test_that_cannot_hold_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {SUITES[0].adapter: {"*::test_list_of_callbacks*": "it compares the list"}}
    monkeypatch.setattr(measure_frameworks, "CANNOT_HOLD", reasons)
    bad = Outcome("failed", "assert 2 == 1")
    run = Run(SUITES[0], "first", dict.fromkeys(["a::test_list_of_callbacks[1]", "a::test_loss"], Outcome("passed")),
              dict.fromkeys(["a::test_list_of_callbacks[1]", "a::test_loss"], bad))  # fmt: skip
    assert run.excused() == {"a::test_list_of_callbacks[1]": "it compares the list"}
    assert run.differing() == {"a::test_loss": bad}


def test_a_test_is_listed_once_with_the_runs_in_which_it_fails_alike() -> None:
    plain, bad = {"a::test_loss": Outcome("passed")}, {"a::test_loss": Outcome("failed", "assert 2 == 1")}
    lines = listed([Run(SUITES[0], name, plain, bad) for name in ("first", "last")]).splitlines()
    assert lines[2:] == ["| `a::test_loss` | `assert 2 == 1` | callback, first; callback, last |"]
    assert listed([Run(SUITES[0], "first", plain, plain)]) == "No test differs."


def test_every_suite_has_its_adapter_and_a_folder_without_its_tests_has_no_files(tmp_path: Path) -> None:
    (tmp_path / "tests" / "trainer").mkdir(parents=True)
    (tmp_path / "tests" / "trainer" / "test_trainer_data.py").touch()
    assert [suite.framework for suite in SUITES if suite.files(tmp_path)] == ["transformers"]
    assert {suite.adapter for suite in SUITES} == set(CANNOT_HOLD)


@pytest.mark.slow
def test_a_suite_ends_with_the_processes_that_it_started(tmp_path: Path) -> None:
    program = "import subprocess, sys; subprocess.Popen(['sleep', '61.75']); print('left')"
    with (tmp_path / "printed.txt").open("wb") as stream:
        run_to_its_end([sys.executable, "-c", program], stream.fileno(), cwd=str(tmp_path), env={})
    holders = subprocess.run(["pgrep", "-f", "^sleep 61.75$"], capture_output=True, text=True, check=False).stdout
    assert holders == ""


@pytest.mark.filterwarnings("ignore")  # Of Lightning, of the machine that it runs on
@pytest.mark.parametrize(("position", "place"), [("first", 0), ("last", 1)])
def test_a_callback_stands_first_or_last(monkeypatch: pytest.MonkeyPatch, position: str, place: int) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    monkeypatch.setattr(lightning.Trainer, "__init__", lightning.Trainer.__init__)
    add_callback(LoopSettings(learn=False), position)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for given in ([lightning.Callback()], lightning.Callback()):
        names = [type(one).__name__ for one in lightning.Trainer(callbacks=given, **options).callbacks]
        assert names.index("MicroBatchCallback") == place
    assert "MicroBatchCallback" in [type(one).__name__ for one in lightning.Trainer(**options).callbacks]


def test_a_search_for_a_batch_size_gets_the_arguments_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = pytest.importorskip("lightning.pytorch.tuner.tuning")

    def scale(trainer: Any, model: Any, *, batch_arg_name: str = "") -> tuple[Any, Any, str]:
        return trainer, model, batch_arg_name

    monkeypatch.setattr("can_train.adapters.lightning_sizes.scale_batch_size", scale)
    monkeypatch.setattr(tuning.Tuner, "scale_batch_size", tuning.Tuner.scale_batch_size)
    replace_sizes(LoopSettings(), "last")
    tuner = tuning.Tuner.__new__(tuning.Tuner)
    tuner._trainer = "trainer"
    assert tuner.scale_batch_size("model", mode="power", batch_arg_name="size") == ("trainer", "model", "size")


def test_trainers_of_transformers_are_mixed_with_the_mixin(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.trainer_seq2seq")
    transformers = import_module("transformers")
    for name in ("Trainer", "Seq2SeqTrainer"):
        trainer = getattr(transformers, name)
        monkeypatch.setattr(transformers, name, trainer)
        monkeypatch.setattr(sys.modules[trainer.__module__], name, trainer)
    mix_in(LoopSettings(learn=False), "last")
    for name in ("Trainer", "Seq2SeqTrainer"):
        mixed = getattr(transformers, name)
        assert mixed.__name__ == name
        assert [base.__name__ for base in mixed.__mro__[1:3]] == ["MicroBatchTrainerMixin", name]
