"""Runs Lightning's and accelerate's searches on the cases, called as in their documentation. `scripts/bench/finder`
calls `main` with the Python of `.venv-peers`.
"""

import gc
import logging
import tempfile
import warnings
from functools import partial
from typing import Any, Final

import torch
from accelerate.utils import find_executable_batch_size
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.tuner.tuning import Tuner
from torch.utils.data import DataLoader, Dataset

from bench.harness import say, versions_of
from bench.measure_finder import DATA_SET, Case, Law, Search, Trial, measure

LIGHTNING_START: Final = 2
LIGHTNING_MAX: Final = 8_192
"""Lightning's defaults of `init_val` and `max_val`."""


def main() -> dict[str, Any]:
    """Runs every tool; returns the versions, and the results by tool."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Both tools collect garbage around every trial, which would scan the objects of all imports each time.
    gc.collect()
    gc.freeze()
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, search in peers(folder).items():
            say(name)
            measured[name] = measure(search, Law())
    return {"versions": versions_of("Python", "lightning", "accelerate", "torch"), "results": measured}


def peers(folder: str) -> dict[str, Search]:
    """Returns the searches by name. Lightning writes files into `folder`."""
    lightning = partial(lightning_search, folder=folder)
    return {
        "Lightning, power": partial(lightning, mode="power", max_val=LIGHTNING_MAX),
        "Lightning, binsearch": partial(lightning, mode="binsearch", max_val=LIGHTNING_MAX),
        "Lightning, binsearch, `max_val` raised": partial(lightning, mode="binsearch", max_val=DATA_SET),
        "accelerate, from 128": partial(accelerate_search, start=128),
        "accelerate, from 8192": partial(accelerate_search, start=8_192),
    }


class Samples(Dataset[torch.Tensor]):
    """A data set of ones that are not stored."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        """Returns a whole batch at once."""
        return torch.ones(len(indices), 1)


class Model(LightningModule):
    """A model with one weight whose training step is the trial."""

    def __init__(self, trial: Trial, batch_size: int) -> None:
        super().__init__()
        self.trial = trial
        self.batch_size = batch_size
        self.weight = torch.nn.Parameter(torch.ones(1))

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Returns a new loader, which the tuner asks for with each size."""
        return DataLoader(Samples(self.trial.case.data_set), batch_size=self.batch_size, collate_fn=lambda batch: batch)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Runs the trial, and returns some loss."""
        self.trial(len(batch))
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer that a LightningModule must have."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def quiet_trainer(folder: str, **options: Any) -> Trainer:
    """Makes a trainer on the CPU, by default of one epoch, which prints nothing and writes into a folder."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **{"max_epochs": 1, **silent, **options})


def lightning_search(trial: Trial, case: Case, *, mode: str, max_val: int, folder: str) -> int:
    """Runs Lightning's tuner with one step per trial instead of three, since all steps are alike here."""
    trainer = quiet_trainer(folder)
    start = case.start or LIGHTNING_START
    # The first trial runs the model's own batch size but records it as `init_val`, so the two are made equal.
    model = Model(trial, batch_size=start)
    size = Tuner(trainer).scale_batch_size(model, mode=mode, steps_per_trial=1, init_val=start, max_val=max_val)
    assert size is not None
    return size


def accelerate_search(trial: Trial, case: Case, *, start: int) -> int:
    """Runs a function with accelerate's decorator, and returns the size of its last call."""

    @find_executable_batch_size(starting_batch_size=case.start or start)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        trial(batch_size)
        return batch_size

    return int(train())
