"""A run whose model is compiled: bit by bit the same when it is split, rescued or resumed, and it goes on without."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.factors.store import memory_fingerprint
from can_train.memory.meters import SimulatedMeter
from can_train.task import Feature
from can_train.training.sample_task import TaskContext
from can_train.training.session import Session
from can_train.training.train import make_session, train
from fakes.line_fit import LineBatch, LineTask, StoppedTask, fixed, line_parts, line_run, train_line
from fakes.sample_tasks import Words
from fakes.several_ranks import run_ranks
from fakes.training_ranks import fit_line

pytestmark = [
    # PyTorch's tracer looks at tensors that are no leaves; it is silent elsewhere, and tests turn warnings into errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Its compiler still scripts some of its own methods.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a processor")
SETTINGS: dict[str, Any] = {"batch_size": 40, "micro_batch_size": 40, "epochs": 2, "checkpoint_every": 1}


class OnDisk(Words):
    """Its samples are read one by one, and drawn from."""

    def datasets(self) -> Mapping[str, Sequence[Any]]:
        return {name: Drawn(samples) for name, samples in super().datasets().items()}


class Drawn:
    """Samples with noise."""

    def __init__(self, samples: Sequence[Tensor]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Tensor:
        if index >= len(self):
            raise IndexError(index)
        return (self._samples[index] + torch.rand(())).float()


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
    assert rescued.monitor.peak_bytes == 0
    assert_same(rescued, planned)
    assert_close(rescued, trained(tmp_path / "eager", compile="off"))


class ImageBatch(LineBatch):
    """Points as images. Memory runs out once the model has seen a part that is too large."""

    def __init__(self, x: Tensor, fail_above: int) -> None:
        super().__init__(x, 10**9)
        self._x, self._most = x[:, :3, None, None].repeat(1, 1, 6, 7), fail_above

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        x = self._x[start:stop]
        error = (model(x) - x[:, :1, 0, 0]).square().sum()
        if stop - start > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return {"error": (error, float(stop - start))}


class ImageTask(LineTask):
    """Small images, with dropout and convolutions."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.memory_features = (Feature("points"),)

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.ones((len(rows), 1))

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 8, 3), nn.Flatten(),
            nn.Linear(8 * 2 * 3, 1),
        )  # fmt: skip

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        # A signal may arrive with it.
        super().logical_batch(rows, device, dtype, generator)
        return ImageBatch(self._x[rows].to(device, dtype), self.fail_above)


class StoppedImageTask(ImageTask, StoppedTask):
    """The same, sent a SIGTERM while it prepares some training batch."""


@needs_compiler
@pytest.mark.slow
def test_kernels_do_not_depend_on_the_batches_that_a_run_has_seen_before(tmp_path: Path) -> None:
    planned = trained(tmp_path / "planned", ImageTask(fail_above=10), micro_batch_size=10)
    torch._dynamo.reset()
    # Of 40 images each convolution is another kernel than of 10.
    rescued = trained(tmp_path / "rescued", ImageTask(fail_above=10), regrow=False)
    assert rescued.ooms_rescued > 0
    assert_same(rescued, planned)
    torch._dynamo.reset()
    stopped = StoppedImageTask(after=2)
    stopped.fail_above = 10
    with pytest.raises(SystemExit):
        trained(tmp_path / "stopped", stopped, micro_batch_size=10)
    torch._dynamo.reset()
    assert_same(trained(tmp_path / "stopped", ImageTask(fail_above=10), micro_batch_size=10), planned)


class OwnNetwork(nn.Sequential):
    """A class that is not PyTorch's own."""


class OwnLine(LineTask):
    def build_model(self) -> nn.Module:
        return OwnNetwork(*super().build_model().children())


@needs_compiler
@pytest.mark.slow
def test_a_model_of_a_class_of_ones_own_stays_compiled(tmp_path: Path) -> None:
    session = trained(tmp_path, OwnLine(), epochs=1)
    assert session.compiled is not None
    assert session.compiled.is_in_use
    assert session.model._compiled_call_impl is not None


@needs_compiler
@pytest.mark.slow
def test_a_layer_that_is_thawed_is_compiled_anew(tmp_path: Path) -> None:
    settings = {"freeze": ["0"], "thaw_epoch": 1, "epochs": 2}
    thawed = trained(tmp_path / "compiled", **settings)
    assert thawed.compiled is not None
    assert thawed.compiled.is_in_use
    assert_close(thawed, trained(tmp_path / "off", compile="off", **settings))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("default", "default"), ("off", "default"), ("default", "off")])
def test_a_run_goes_on_from_a_checkpoint_with_or_without_the_compiler(tmp_path: Path, before: str, after: str) -> None:
    whole = trained(tmp_path / "whole", compile=after)
    with pytest.raises(SystemExit):
        trained(tmp_path / "stopped", StoppedTask(after=2), compile=before)
    torch._dynamo.reset()
    resumed = trained(tmp_path / "stopped", compile=after)
    assert resumed.progress.step == whole.progress.step == 4
    (assert_same if before == after else assert_close)(resumed, whole)


@needs_compiler
@pytest.mark.slow
def test_processes_that_read_samples_are_forked_beside_the_compiler_and_give_the_same_bits(tmp_path: Path) -> None:
    sessions = []
    for workers in ("0", "2"):
        task: Any = OnDisk(TaskContext(settings=OnDisk.Settings(), num_workers=workers))
        sessions.append(trained(tmp_path / workers, task, batch_size=16, micro_batch_size=5, regrow=False))
        assert sessions[-1].compiled is not None
        assert sessions[-1].compiled.is_in_use
    assert_same(*sessions)


@needs_compiler
@pytest.mark.slow
def test_ranks_that_compile_train_the_weights_of_one_process_that_does_not(tmp_path: Path) -> None:
    options = {**SETTINGS, "precision": "fp64", "batch_size": 20, "micro_batch_size": 7}
    weights_of = {}
    for ranks, mode in ((1, "off"), (2, "default")):
        folder = tmp_path / mode
        folder.mkdir()
        assert run_ranks(ranks, fit_line, folder, **options, compile=mode) == [0] * ranks
        weights_of[mode] = [torch.load(folder / f"rank-{rank}.pt")["weights"] for rank in range(ranks)]
    one, other = weights_of["default"]
    assert torch.equal(one, other)
    torch.testing.assert_close(one, weights_of["off"][0], rtol=1e-9, atol=1e-12)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["max-autotune", "cudagraphs"])
def test_the_other_modes_train_on_a_processor_too(tmp_path: Path, mode: str) -> None:
    session = trained(tmp_path / mode, compile=mode)
    assert session.compiled is not None
    assert session.compiled.is_in_use
    assert_close(session, trained(tmp_path / "off", compile="off"))
    assert ("captures no CUDA graphs" in told(session)) == (mode == "cudagraphs")


def test_a_loss_that_calls_no_module_says_that_nothing_is_compiled(tmp_path: Path) -> None:
    class Plain(LineTask):
        def build_model(self) -> nn.Module:
            return Called()

    assert "no effect: the loss calls no module" in told(trained(tmp_path, Plain()))


class Called(nn.Linear):
    """A linear layer whose call is not PyTorch's."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


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
