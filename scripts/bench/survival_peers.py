"""Replays graphs with batches as Lightning, accelerate, transformers and torch_geometric choose them, called as in
their documentation, as a person does, and as can-train does. `scripts/bench/survival` calls `main` with the Python of
`.venv-peers`, which has all tools.
"""

import gc
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from accelerate.utils import find_executable_batch_size
from lightning.pytorch import LightningModule
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torch_geometric.loader import DynamicBatchSampler

from bench.equivalence_peers import quiet_arguments
from bench.finder_peers import quiet_trainer
from bench.harness import say, versions_of
from bench.survival_tools import by_plan, by_prediction, by_search, fixed, look, of_size, sweep
from bench.survival_world import (
    SEED,
    Choice,
    Graphs,
    Machine,
    ModelledMachine,
    Outcome,
    Replay,
    Rows,
    draw_graphs,
    measure,
    replay,
    shuffled,
    simulated,
)

TRIAL_STEPS: Final = 3
"""Steps of a trial: Lightning's default."""
LIGHTNING_START: Final = 2
"""Lightning's default of `init_val`."""

MODELLED_GRAPHS: Final = 20_000
MODELLED_BATCH: Final = 512
SIMULATED_GRAPHS: Final = 4_000
SIMULATED_BATCH: Final = 768
"""Graphs of the data sets, and of the batches that are asked for: three to four times the largest that fits."""

Tools = Mapping[str, Callable[[Machine], Choice]]


def main(modelled_steps: str, simulated_steps: str) -> dict[str, Any]:
    """Replays the graphs with every tool; returns the versions, and the outcomes of each part by tool."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # The tools collect garbage around trials and restarts, which would scan the objects of all imports each time.
    gc.collect()
    gc.freeze()
    torch.manual_seed(SEED)
    steps = int(modelled_steps)
    with tempfile.TemporaryDirectory() as folder:
        graphs = draw_graphs(MODELLED_GRAPHS, median_nodes=100, most_nodes=12_000)
        outcomes: dict[str, Any] = {
            "modelled": {
                name: measure(ModelledMachine(graphs), choose, steps)
                for name, choose in announced(modelled_tools(folder))
            },
            "swept": sweep(graphs, steps),
        }
        graphs = draw_graphs(SIMULATED_GRAPHS, median_nodes=30, most_nodes=1_000)
        outcomes["simulated"] = on_simulated_gpu(graphs, simulated_tools(folder), int(simulated_steps))
    packages = ("lightning", "accelerate", "transformers", "torch_geometric", "torch")
    return {"versions": versions_of("Python", *packages), **outcomes}


def on_simulated_gpu(graphs: Graphs, tools: Tools, steps: int) -> dict[str, Outcome]:
    """Runs each tool on a simulated GPU of its own."""
    outcomes = {}
    for name, choose in announced(tools):
        with simulated(graphs) as machine:
            outcomes[name] = measure(machine, choose, steps)
    return outcomes


def announced(tools: Tools) -> Iterator[tuple[str, Callable[[Machine], Choice]]]:
    """Yields tools, and prints their names."""
    for name, choose in tools.items():
        say(name)
        yield name, choose


def modelled_tools(folder: str) -> Tools:
    """Returns the tools of the modelled part by name."""
    return {
        "can-train, as its command line does": partial(by_plan, logical=MODELLED_BATCH),
        "can-train, `MicroBatcher(limits=find_max_size(…))`": partial(by_search, logical=MODELLED_BATCH),
        "by hand, an average batch fills 90 %": partial(fixed, share=0.9),
        "by hand, an average batch fills 70 %": partial(fixed, share=0.7),
        **peers(folder, MODELLED_BATCH, share=0.9),
    }


def simulated_tools(folder: str) -> Tools:
    """Returns the tools of the part with real steps by name. Beyond 70 %, this GPU's memory is too fragmented."""
    return {
        "can-train, `MicroBatcher(limits=predict_peak(…))`": partial(by_prediction, logical=SIMULATED_BATCH),
        "can-train, `MicroBatcher(limits=find_max_size(…))`": partial(by_search, logical=SIMULATED_BATCH),
        "by hand, an average batch fills 70 %": partial(fixed, share=0.7),
        **peers(folder, SIMULATED_BATCH, share=0.7),
    }


def peers(folder: str, asked: int, *, share: float) -> Tools:
    """Returns the other tools, asked for batches of some size. torch_geometric's limit is chosen by hand, so that an
    average batch fills a share of the capacity.
    """
    return {
        "Lightning, power": partial(lightning, folder=folder, mode="power"),
        "Lightning, binsearch": partial(lightning, folder=folder, mode="binsearch"),
        "accelerate, around three steps": partial(accelerate_first, asked=asked),
        "accelerate, around the training": partial(accelerate_whole, asked=asked),
        "transformers, `auto_find_batch_size`": partial(by_trainer, folder=folder, asked=asked),
        "torch_geometric, nodes": partial(dynamic, mode="node", share=share),
        "torch_geometric, edges": partial(dynamic, mode="edge", share=share),
    }


# Lightning


class Module(LightningModule):
    """A model whose steps a machine computes."""

    def __init__(self, machine: Machine, batch_size: int) -> None:
        super().__init__()
        self.machine, self.batch_size = machine, batch_size
        self.model = machine.model

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the graphs' positions in batches of the size that the tuner sets."""
        rows = range(len(self.machine.graphs.nodes))
        return DataLoader(rows, batch_size=self.batch_size, shuffle=True, collate_fn=np.array)  # type: ignore[arg-type]

    def training_step(self, rows: Rows) -> Tensor:
        """Computes the mean loss of a batch."""
        return self.machine.loss(rows) / len(rows)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Computes the gradient as Lightning does; the machine is told of an out-of-memory."""
        try:
            super().backward(loss, *args, **kwargs)
        except torch.OutOfMemoryError:
            self.machine.failed()
            raise

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the machine's."""
        return self.machine.optimizer


def lightning(machine: Machine, *, folder: str, mode: str) -> Choice:
    """Searches with Lightning's tuner, and trains with batches of the size found."""
    trainer = quiet_trainer(folder)
    size = Tuner(trainer).scale_batch_size(Module(machine, LIGHTNING_START), mode=mode, init_val=LIGHTNING_START)
    assert size is not None
    return of_size(machine, size=size)


# accelerate


def accelerate_first(machine: Machine, *, asked: int) -> Choice:
    """Finds the size of three steps with accelerate's decorator, and trains with it."""

    @find_executable_batch_size(starting_batch_size=asked)  # type: ignore[untyped-decorator]
    def few_steps(batch_size: int) -> int:
        batches = shuffled(machine.graphs, batch_size)
        for _ in range(TRIAL_STEPS):
            machine.compute(next(batches))
        return batch_size

    return of_size(machine, size=few_steps())


class Attempt(NamedTuple):
    """A training with one size."""

    size: int
    steps: int  # Computed before it ran out of memory, or to the end


def accelerate_whole(machine: Machine, *, asked: int) -> Choice:
    """Puts accelerate's decorator around the training, as its guide does."""
    attempts: list[Attempt] = []

    def train(steps: int) -> Replay:
        @find_executable_batch_size(starting_batch_size=asked)  # type: ignore[untyped-decorator]
        def training(batch_size: int) -> None:
            done = 0
            try:
                for batch in islice(shuffled(machine.graphs, batch_size), steps):
                    machine.compute(batch)
                    done += 1
            finally:
                attempts.append(Attempt(batch_size, done))

        training()
        return replay_of(attempts)

    return Choice(f"{asked} graphs", train)


def replay_of(attempts: Sequence[Attempt]) -> Replay:
    """Returns the replay of a training whose last attempt alone counts."""
    *failed, last = attempts
    return Replay(
        restarts=len(failed),
        repeated=sum(attempt.steps for attempt in failed),
        wasted=sum(attempt.size * attempt.steps for attempt in failed),
        size=f"{attempts[0].size} to {last.size} graphs",
    )


# transformers


class MeanLoss(nn.Module):
    """A model that returns the loss for the Trainer; a machine computes it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self.model = machine, machine.model

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        """Computes the mean loss of the graphs at some positions."""
        return {"loss": self.machine.loss(rows.numpy()) / len(rows)}


class ToldTrainer(transformers.Trainer):
    """The Trainer; the machine is told of an out-of-memory in the backward pass."""

    def training_step(self, model: Any, *arguments: Any, **options: Any) -> Tensor:
        """Computes the gradient of a batch as the Trainer does."""
        try:
            return super().training_step(model, *arguments, **options)
        except torch.OutOfMemoryError:
            model.machine.failed()
            raise


class AttemptCounter(transformers.TrainerCallback):
    """Counts the steps of each attempt."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins an attempt."""
        self.attempts.append(Attempt(state.train_batch_size, 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts a step."""
        last = self.attempts[-1]
        self.attempts[-1] = last._replace(steps=last.steps + 1)


def by_trainer(machine: Machine, *, folder: str, asked: int) -> Choice:
    """Trains with transformers' Trainer, which begins anew with a smaller batch where memory runs out."""

    def train(steps: int) -> Replay:
        arguments = quiet_arguments(
            folder,
            auto_find_batch_size=True,
            per_device_train_batch_size=asked,
            max_steps=steps,
            dataloader_drop_last=True,
        )
        counter = AttemptCounter()
        ToldTrainer(
            model=MeanLoss(machine),
            args=arguments,
            train_dataset=range(len(machine.graphs.nodes)),
            data_collator=lambda rows: {"rows": torch.tensor(rows)},
            optimizers=(machine.optimizer, LambdaLR(machine.optimizer, lambda step: 1.0)),
            callbacks=[counter],
        ).train()
        return replay_of(counter.attempts)

    return Choice(f"{asked} graphs", train)


# torch_geometric


class Sizes(NamedTuple):
    """The sizes of a graph that torch_geometric's sampler reads."""

    num_nodes: int
    num_edges: int


def dynamic(machine: Machine, *, mode: str, share: float) -> Choice:
    """Fills batches up to a number of nodes or edges with torch_geometric's sampler."""
    most = look(machine, share).most(machine.graphs, mode)
    sizes = [Sizes(*graph) for graph in np.stack(machine.graphs, axis=1).tolist()]
    sampler = DynamicBatchSampler(sizes, max_num=most, mode=mode, shuffle=True)

    def batches() -> Iterator[Rows]:
        while True:
            for rows in sampler:
                yield np.array(rows)

    return Choice(f"{most:,} {mode}s", partial(replay, machine, batches()))
