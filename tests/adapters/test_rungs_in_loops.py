"""A sample that does not fit in a step of Lightning's or transformers' loop is computed on the next rung, to the same
weights.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from can_train import LoopSettings, MicroBatchCallback
from can_train.errors import DoesNotFitError
from fakes.lightning_warnings import QUIET_LIGHTNING
from fakes.transformers_trainers import trainer_of

pytestmark = QUIET_LIGHTNING
lightning = pytest.importorskip("lightning")

QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Blocks(nn.Module):
    """Ten blocks, which take 82 MiB a sample, and 21 MiB where they are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1))
                for _ in range(10)
            ]
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"loss": x.square().mean()}


class Network(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """The blocks as a module of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Blocks()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[0])["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(device: str, fit: str) -> dict[str, Tensor]:
    """Trains in single samples."""
    torch.manual_seed(0)
    network, data = Network(), TensorDataset(torch.randn(4, 3000, 64))
    fits = MicroBatchCallback(LoopSettings(device=device, limits=1, fit=fit, learn=False))
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[fits], **QUIET)
    trainer.fit(network, DataLoader(data, batch_size=2))
    return dict(network.state_dict())


@pytest.mark.filterwarnings("ignore:A few samples could not be computed both at once and split")
def test_lightning_trains_a_sample_that_does_not_fit_by_splitting_to_the_same_bits() -> None:
    alone, climbed = trained("sim:400MiB", "split"), trained("sim:60MiB", "auto")
    assert all(torch.equal(alone[key], climbed[key]) for key in alone)
    with pytest.raises(DoesNotFitError):
        trained("sim:60MiB", "split")


@pytest.mark.filterwarnings("ignore:A few samples could not be computed both at once and split")
def test_a_trainer_trains_a_sample_that_does_not_fit_by_splitting_to_the_same_bits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    samples = [{"x": one} for one in torch.randn(4, 3000, 64)]

    def trained_by_trainer(device: str, fit: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        settings = LoopSettings(device=device, limits=1, fit=fit, learn=False)
        trainer = trainer_of(transformers, tmp_path / device, Blocks(), settings, train_dataset=samples,
                             data_collator=torch.utils.data.default_collate, per_device_train_batch_size=2,
                             num_train_epochs=1, optim="sgd", learning_rate=0.1)  # fmt: skip
        trainer.train()
        return dict(trainer.model.state_dict())

    alone, climbed = trained_by_trainer("sim:400MiB", "split"), trained_by_trainer("sim:60MiB", "auto")
    assert all(torch.equal(alone[key], climbed[key]) for key in alone)
    with pytest.raises(DoesNotFitError):
        trained_by_trainer("sim:60MiB", "split")
