"""Puts the cases to the peers of can-train's search, each called as its own documentation does, and prints what they
did as JSON. `scripts/bench/finder` runs this with the Python of `.venv-peers`.
"""

import gc
import json
import logging
import platform
import sys
import tempfile
import warnings
from functools import partial
from importlib.metadata import version
from typing import Final

import torch
from accelerate.utils import find_executable_batch_size
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.tuner.tuning import Tuner
from torch.utils.data import DataLoader, Dataset

from bench.finder_laws import DATA_SET, Case, Law, Search, Trial, measure

LIGHTNING_START: Final = 2
LIGHTNING_MAX: Final = 8_192
"""Lightning's own `init_val` and `max_val`."""

PACKAGES: Final = ("lightning", "accelerate", "torch")


def main() -> None:
    """Measures every peer and prints {"versions": ..., "results": {tool: results}}."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Both collect garbage around every trial. What the imports have left would be looked through each time.
    gc.collect()
    gc.freeze()
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, search in peers(folder).items():
            print(f"{name} ...", file=sys.stderr, flush=True)
            measured[name] = measure(search, Law())
    versions = {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    json.dump({"versions": versions, "results": measured}, sys.stdout)


def peers(folder: str) -> dict[str, Search]:
    """Names what is measured; Lightning leaves files in `folder`."""
    lightning = partial(lightning_search, folder=folder)
    return {
        "Lightning, power": partial(lightning, mode="power", max_val=LIGHTNING_MAX),
        "Lightning, binsearch": partial(lightning, mode="binsearch", max_val=LIGHTNING_MAX),
        "Lightning, binsearch, `max_val` raised": partial(lightning, mode="binsearch", max_val=DATA_SET),
        "accelerate, from 128": partial(accelerate_search, start=128),
        "accelerate, from 8192": partial(accelerate_search, start=8_192),
    }


class Samples(Dataset[torch.Tensor]):
    """A data set of ones that lie nowhere."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        """Makes a whole batch at once."""
        return torch.ones(len(indices), 1)


class Model(LightningModule):
    """A model of one weight, whose training step is the trial."""

    def __init__(self, trial: Trial, batch_size: int) -> None:
        super().__init__()
        self.trial = trial
        self.batch_size = batch_size
        self.weight = torch.nn.Parameter(torch.ones(1))

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Makes the loader that the tuner asks for anew with each size."""
        return DataLoader(Samples(self.trial.case.data_set), batch_size=self.batch_size, collate_fn=lambda batch: batch)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Runs the trial and a step that means nothing."""
        self.trial(len(batch))
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Makes the optimizer that a module must have."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lightning_search(trial: Trial, case: Case, *, mode: str, max_val: int, folder: str) -> int:
    """Tunes the batch size of a real trainer, at one step a trial instead of three: all steps are alike here."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    start = case.start or LIGHTNING_START
    # Its first trial runs the batch size that the model came with and takes it for `init_val`. Here the two are equal.
    model = Model(trial, batch_size=start)
    size = Tuner(trainer).scale_batch_size(model, mode=mode, steps_per_trial=1, init_val=start, max_val=max_val)
    assert size is not None
    return size


def accelerate_search(trial: Trial, case: Case, *, start: int) -> int:
    """Runs a function that is decorated for it, and returns the size that it ran with at last."""

    @find_executable_batch_size(starting_batch_size=case.start or start)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        trial(batch_size)
        return batch_size

    return int(train())


if __name__ == "__main__":
    main()
