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
from can_train.errors import ArgumentError, DoesNotFitError
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


class Deep(nn.Module):
    """Weights of 16 MiB, whose gradients take as much and whose AdamW twice as much."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(16)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


class DeepNetwork(Network):
    """Deep as a module of Lightning, which steps its optimizer itself where it is asked to."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.model = Deep()
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.001)


class Rungs(lightning.Callback):  # type: ignore[misc, name-defined]
    """Notes the rung of each step."""

    def __init__(self, fits: MicroBatchCallback) -> None:
        self.fits = fits
        self.names: list[str] = []

    def on_train_batch_end(self, *others: Any) -> None:
        loop = self.fits.loop
        assert loop is not None
        assert loop.engine is not None
        self.names.append(loop.engine.batcher.ladder.rung.name)


def trained_deep(
    device: str, fit: str, *, automatic: bool = True, sizes: tuple[int, ...] = (64, 64, 64)
) -> tuple[dict[str, Tensor], list[str]]:
    """Trains in batches of some sizes; returns the weights and the rung of each step."""
    torch.manual_seed(0)
    network, batches = DeepNetwork(automatic), [[torch.randn(size, 512)] for size in sizes]
    fits = MicroBatchCallback(LoopSettings(device=device, fit=fit, learn=False))
    rungs = Rungs(fits)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[fits, rungs], **QUIET)
    trainer.fit(network, DataLoader(batches, batch_size=None))
    return dict(network.state_dict()), rungs.names


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
@pytest.mark.parametrize(("device", "fit"), [("sim:64MiB", "auto"), ("sim:80MiB", "offload-optimizer")])
def test_the_state_of_lightnings_optimizer_waits_on_the_host_to_the_same_bits(
    device: str, fit: str, automatic: bool
) -> None:
    alone, _ = trained_deep("sim:400MiB", "split", automatic=automatic)
    left, rungs = trained_deep(device, fit, automatic=automatic)
    assert rungs == ["offload-optimizer"] * 3
    assert all(torch.equal(alone[key], left[key]) for key in alone)
    with pytest.raises((DoesNotFitError, torch.OutOfMemoryError)):
        trained_deep("sim:64MiB", "split", automatic=automatic)


@pytest.mark.filterwarnings("ignore:A few samples could not be computed both at once and split")
@pytest.mark.parametrize(("device", "size"), [("sim:80MiB", 600), ("sim:52MiB", 300)])
def test_a_batch_that_runs_out_leaves_room_for_the_state_on_the_host(device: str, size: int) -> None:
    sizes = (size,) * 3
    alone, _ = trained_deep("sim:400MiB", "split", sizes=sizes)
    left, rungs = trained_deep(device, "auto", sizes=sizes)
    assert rungs[-1] == "offload-optimizer"
    assert all(torch.allclose(alone[key], left[key], atol=1e-7) for key in alone)


@pytest.mark.filterwarnings("ignore:A few samples could not be computed both at once and split")
def test_state_that_is_there_is_not_held_again_where_a_later_batch_runs_out() -> None:
    sizes = (8, 8, 8, 1500)
    alone, _ = trained_deep("sim:400MiB", "split", sizes=sizes)
    # Weights, gradients, state and the batch take 67 MiB.
    split, rungs = trained_deep("sim:100MiB", "split", sizes=sizes)
    assert rungs == ["split"] * 4
    assert all(torch.allclose(alone[key], split[key], atol=1e-7) for key in alone)


@pytest.mark.parametrize(("device", "fit"), [("sim:64MiB", "auto"), ("sim:80MiB", "offload-optimizer")])
def test_the_state_of_a_trainers_optimizer_waits_on_the_host_to_the_same_bits(
    tmp_path: Path, device: str, fit: str
) -> None:
    transformers = pytest.importorskip("transformers")
    samples = [{"x": one} for one in torch.randn(128, 512)]
    rungs = []

    def trained_by_trainer(device: str, fit: str) -> dict[str, Tensor]:
        torch.manual_seed(0)

        class Noting(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
            def on_step_end(self, *others: Any, **given: Any) -> None:
                rungs.append(trainer.loop.engine.batcher.ladder.rung.name)

        settings = LoopSettings(device=device, fit=fit, learn=False)
        trainer = trainer_of(transformers, tmp_path / device, Deep(), settings, train_dataset=samples,
                             data_collator=torch.utils.data.default_collate, per_device_train_batch_size=64,
                             num_train_epochs=1, optim="adamw_torch", learning_rate=0.001)  # fmt: skip
        trainer.add_callback(Noting())
        trainer.train()
        return dict(trainer.model.state_dict())

    alone, left = trained_by_trainer("sim:400MiB", "split"), trained_by_trainer(device, fit)
    assert rungs == ["split"] * 2 + ["offload-optimizer"] * 2
    assert all(torch.equal(alone[key], left[key]) for key in alone)


def test_a_trainer_whose_scaler_steps_the_optimizer_keeps_its_state_on_the_device(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Scaled(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        """Gives the optimizer a scaler, as accelerate does on a GPU in half precision."""

        def on_train_begin(self, *others: Any, **given: Any) -> None:
            trainer.optimizer.scaler = torch.amp.GradScaler("cpu", enabled=False)

    settings = LoopSettings(device="sim:80MiB", fit="offload-optimizer", learn=False)
    trainer = trainer_of(transformers, tmp_path, Deep(), settings, train_dataset=[{"x": torch.ones(512)}] * 64,
                         data_collator=torch.utils.data.default_collate, num_train_epochs=1)  # fmt: skip
    trainer.add_callback(Scaled())
    with pytest.raises(
        ArgumentError, match="stays on the device: accelerate's gradient scaler calls a step of its own"
    ):
        trainer.train()
