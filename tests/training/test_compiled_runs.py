"""A run whose model is compiled: bit by bit the same when it is split, rescued or resumed, and it goes on without."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from can_train.factors.store import memory_fingerprint
from can_train.memory.meters import SimulatedMeter
from can_train.training.session import Session
from can_train.training.train import make_session, train
from fakes.line_fit import LineTask, StoppedTask, fixed, line_parts, line_run, train_line

pytestmark = [
    # PyTorch's tracer looks at tensors that are no leaves; it is silent elsewhere, and tests turn warnings into errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Its compiler still scripts some of its own methods.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a processor")
SETTINGS: dict[str, Any] = {"batch_size": 40, "micro_batch_size": 40, "epochs": 2, "checkpoint_every": 1}


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def trained(folder: Path, task: LineTask | None = None, **training: Any) -> Session:
    return train_line(folder, task, **{**SETTINGS, "compile": "default", **training})


def weights(session: Session) -> list[Tensor]:
    return [parameter.detach() for parameter in session.model.parameters()]


def assert_same(one: Session, other: Session) -> None:
    assert all(torch.equal(*pair) for pair in zip(weights(one), weights(other), strict=True))


def assert_close(one: Session, other: Session) -> None:
    torch.testing.assert_close(weights(one), weights(other), rtol=1e-4, atol=1e-6)


def told(session: Session) -> str:
    return "\n".join(session.reporter.texts)  # type: ignore[attr-defined]


@needs_compiler
@pytest.mark.slow
def test_a_compiled_run_that_is_rescued_ends_with_the_weights_of_one_that_is_split_from_the_start(
    tmp_path: Path,
) -> None:
    rescued = trained(tmp_path / "rescued", LineTask(fail_above=10), regrow=False)
    planned = trained(tmp_path / "planned", micro_batch_size=10)
    assert rescued.ooms_rescued > 0
    assert rescued.compiled is not None
    assert not rescued.compiled.is_given_up
    assert rescued.model._compiled_call_impl is not None
    assert_same(rescued, planned)
    assert_close(rescued, trained(tmp_path / "eager", compile="off"))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("before", ["default", "off"])
@pytest.mark.parametrize("after", ["default", "off"])
def test_a_run_goes_on_from_a_checkpoint_with_or_without_the_compiler(tmp_path: Path, before: str, after: str) -> None:
    whole = trained(tmp_path / "whole", compile=after)
    with pytest.raises(SystemExit):
        trained(tmp_path / "stopped", StoppedTask(after=2), compile=before)
    torch._dynamo.reset()
    resumed = trained(tmp_path / "stopped", compile=after)
    assert resumed.progress.step == whole.progress.step == 4
    (assert_same if before == after else assert_close)(resumed, whole)


def test_without_a_compiler_of_c_a_run_trains_as_it_would_without_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", ("/nowhere/g++",))
    monkeypatch.setattr(inductor, "fx_graph_cache", False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    session = trained(tmp_path)
    assert session.compiled is not None
    assert session.compiled.is_given_up
    assert told(session).count("the compiler failed") == 1
    assert "No working C++ compiler found" in told(session)
    assert_same(session, trained(tmp_path / "eager", compile="off"))


def test_on_a_simulated_gpu_nothing_is_compiled_and_that_is_told(tmp_path: Path) -> None:
    parts = replace(line_parts(tmp_path, **SETTINGS, compile="default"), meter=SimulatedMeter(2**26))
    with parts.meter.active():
        session = make_session(parts, fixed(0.5))
        train(session)
    assert session.compiled is None
    assert "training.compile=default has no effect on a simulated GPU" in told(session)


def test_runs_that_are_compiled_learn_apart_from_those_that_are_not(tmp_path: Path) -> None:
    runs = [line_run(tmp_path, compile=mode) for mode in ("off", "default", "max-autotune", "cudagraphs")]
    assert [memory_fingerprint(run)["compiled"] for run in runs] == [False, "default", "max-autotune", "cudagraphs"]
