"""A plain PyTorch loop and a Lightning training as people have them, before and after adopting can-train: few lines
change, and the weights do not, on a GPU that the batches do not fit on.
"""

import difflib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from can_train import simulated_gpu
from fakes.lightning_warnings import QUIET_LIGHTNING

GPU = "64MiB"
EXACT = 1e-10

DATA = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
hidden = [layer for _ in range(16) for layer in (nn.Linear(64, 64), nn.Tanh())]
network = nn.Sequential(nn.Linear(6, 64), *hidden, nn.Linear(64, 3))
loader = DataLoader(TensorDataset(torch.randn(9000, 6), torch.randint(3, (9000,))), batch_size=7000)
"""

LOOP = (
    DATA
    + """\
model = network
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)

ADOPTED_LOOP = (
    DATA
    + """\
from can_train import MicroBatcher
model = network
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batcher = MicroBatcher(model, meter=GPU)
for x, y in loader:
    batcher.run(lambda a, b: {"loss": (F.cross_entropy(model(x[a:b]), y[a:b], reduction="sum"), b - a)}, len(x))
    optimizer.step()
    optimizer.zero_grad()
    batcher.stepped()
"""
)

TRAINING = (
    DATA
    + """\
import lightning

class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = network

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **QUIET)
trainer.fit(Network(), loader)
"""
)

ADOPTED_TRAINING = TRAINING.replace(
    'trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **QUIET)',
    "from can_train import MicroBatchCallback\n"
    'trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[MicroBatchCallback(SETTINGS)], **QUIET)',
)

pytestmark = [pytest.mark.slow, QUIET_LIGHTNING]


def run(script: str, folder: Path) -> torch.Tensor:
    from can_train import LoopSettings

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "default_root_dir": folder}  # fmt: skip
    settings = LoopSettings(device=f"sim:{GPU}", state_dir=folder)
    space: dict[str, Any] = {"QUIET": quiet, "SETTINGS": settings, "GPU": f"sim:{GPU}"}
    try:
        exec(compile(script, "script", "exec"), space)
    finally:
        torch.set_default_dtype(torch.float32)
    network: nn.Module = space["network"]
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [(LOOP, ADOPTED_LOOP, 4), (TRAINING, ADOPTED_TRAINING, 2)],
    ids=["plain PyTorch", "Lightning"],
)
def test_a_script_that_adopts_it_ends_with_the_same_weights(
    before: str, after: str, changed: int, tmp_path: Path
) -> None:
    added = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line.startswith("+")]
    assert len(added) == changed, "three lines of a loop, one of a Lightning script, and the import"
    with simulated_gpu(GPU), pytest.raises(torch.OutOfMemoryError):
        run(before, tmp_path)
    torch.testing.assert_close(run(after, tmp_path), run(before, tmp_path), rtol=0, atol=EXACT)
