"""MicroBatchCallback in real Lightning trainings: the weights that a training ends with are those of whole batches."""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from can_train import LoopSettings, MicroBatchCallback

EXACT = 1e-12

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:.* does not have many workers"),
    pytest.mark.filterwarnings(r"ignore:The `srun` command is available"),
]


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    return import_module("lightning.pytorch")


def network(lightning: Any) -> Any:
    """A user's module: a mean loss over samples, logged."""

    class Network(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("validation_loss", F.cross_entropy(self.layers(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    return Network()


def data(size: int = 13) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 6, generator=drawn, dtype=torch.float64), torch.randint(3, (40,), generator=drawn)
    return DataLoader(TensorDataset(x, y), batch_size=size)


def fit(lightning: Any, folder: Path, module: Any, *callbacks: Any, **settings: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **({"max_epochs": 3} | settings),
    )
    trainer.fit(module, data(), data(20))
    return trainer


def weights(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_batches_cut_by_a_limit_lead_to_the_same_weights_and_logs(lightning: ModuleType, tmp_path: Path) -> None:
    plain, cut = network(lightning), network(lightning)
    before = fit(lightning, tmp_path, plain)
    after = fit(lightning, tmp_path, cut, MicroBatchCallback(LoopSettings(limits=5)))
    torch.testing.assert_close(weights(cut), weights(plain), rtol=0, atol=EXACT)
    assert after.callback_metrics.keys() == before.callback_metrics.keys()
    for name, value in before.callback_metrics.items():
        torch.testing.assert_close(after.callback_metrics[name], value, rtol=0, atol=1e-6)
