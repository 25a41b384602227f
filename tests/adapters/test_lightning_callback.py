"""MemoryMonitorCallback in a real Lightning Trainer, on the CPU and on a simulated GPU."""

import csv
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from can_train.errors import CanTrainError
from fakes.lightning_warnings import QUIET_LIGHTNING

MIB = 2**20
BATCHES = 12

pytestmark = QUIET_LIGHTNING


# Imported by the tests that need them: Lightning takes seconds, also of workers that run none of these.
@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    return import_module("lightning.pytorch")


@pytest.fixture(scope="module")
def module() -> Any:
    return import_module("can_train.adapters.lightning_callback")


def network(lightning: Any, takes_mib: dict[int, int]) -> Any:
    """A module of 1 MiB that takes some more in some batches, and fails where it takes nothing."""

    class Network(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1024, 256, bias=False)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            mib = takes_mib.get(batch_idx, 1)
            if not mib:
                raise ValueError("nothing left")
            torch.empty(mib * MIB, dtype=torch.uint8)
            return self.inner(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Network()


def fit(lightning: ModuleType, folder: Path, callback: Any, takes_mib: dict[int, int], **settings: Any) -> Any:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(BATCHES, 1024)), batch_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=import_module("lightning.pytorch.loggers").CSVLogger(folder, name="", version=""),
        callbacks=callback,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": 1} | settings),
    )
    trainer.fit(network(lightning, takes_mib), data)
    return callback.monitor


def logged(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_trainers_measured_batches_are_logged(lightning: ModuleType, module: Any, tmp_path: Path) -> None:
    callback = module.MemoryMonitorCallback(interval=4, warmup=2, safety_factor=0.5)
    monitor = fit(lightning, tmp_path, callback, {2: 20, 4: 80, 6: 30})
    # Weight, gradient, the batch, and what was taken beside; what was taken by the batches between is not seen.
    assert monitor.peak_bytes == pytest.approx(32 * MIB, abs=0.1 * MIB)
    shares = [round(float(row["peak_memory_pct"]) * monitor.meter.capacity_bytes / MIB) for row in logged(tmp_path)]
    assert shares == [22, 32, 32, 32]
    assert [int(row["step"]) for row in logged(tmp_path)] == [3, 7, 11, 12]
    assert {row["batch_size_safety_factor"] for row in logged(tmp_path)} == {"0.5"}


@pytest.mark.slow
def test_on_a_gpu_every_batch_counts(lightning: ModuleType, module: Any, tmp_path: Path) -> None:
    monitor = fit(lightning, tmp_path, module.MemoryMonitorCallback(device="sim:128MiB"), {4: 80, 6: 30})
    assert monitor.peak_bytes == pytest.approx(82 * MIB, abs=0.1 * MIB)
    assert [row["peak_memory_pct"] for row in logged(tmp_path)][-1] == str(monitor.peak_share)


@pytest.mark.slow
def test_a_training_shorter_than_the_warm_up_is_measured(lightning: ModuleType, module: Any, tmp_path: Path) -> None:
    monitor = fit(lightning, tmp_path, module.MemoryMonitorCallback(), {3: 40}, max_steps=4)
    assert monitor.peak_bytes == pytest.approx(42 * MIB, abs=0.1 * MIB)
    assert "batch_size_safety_factor" not in logged(tmp_path)[0]


@pytest.mark.slow
def test_a_training_that_fails_leaves_its_peak_and_nothing_open(
    lightning: ModuleType, module: Any, tmp_path: Path
) -> None:
    callback = module.MemoryMonitorCallback(interval=1, warmup=0)
    with pytest.raises(ValueError, match="nothing left"):
        fit(lightning, tmp_path, callback, {1: 50, 3: 0})
    torch.empty(90 * MIB, dtype=torch.uint8)
    assert callback.monitor.peak_bytes == pytest.approx(52 * MIB, abs=0.1 * MIB)
    assert callback.monitor.meter.peak_bytes() < 90 * MIB


def test_without_lightning_the_remedy_is_said(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    assert module._callback_class() is object
    monkeypatch.setattr(module, "_Callback", object)
    with pytest.raises(CanTrainError, match=r"needs Lightning: neither .* installed\.\npip install lightning"):
        module.MemoryMonitorCallback()


class Callback:
    """Stands for a Lightning's."""


def test_the_lightning_in_use_is_taken(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", SimpleNamespace(Callback=Callback))
    assert module._callback_class() is Callback


def test_a_lightning_that_lacks_something_is_not_taken_for_a_missing_one(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    (tmp_path / "pytorch_lightning.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        module._callback_class()
