"""Short runs on simulated GPUs of any size, with samples of any size and neighbours that come and go: none dies, none
computes another gradient, and what memory there is gets used.

Shapes: R samples of a batch, F inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.resolved import ResolvedRun
from can_train.errors import DoesNotFitError
from can_train.fit.optimizer import make_optimizer
from can_train.memory.meters import SimulatedMeter
from can_train.memory.simulated.allocator import EXPANDABLE
from can_train.reporter import SilentReporter
from can_train.runs.attempts import StopRequests
from can_train.runs.run_folder import RunFolder
from can_train.task import BatchTask, Feature
from can_train.training import train as training_loop
from can_train.training.session import Parts, Session
from can_train.training.train import make_session
from fakes.costly import Costly
from fakes.line_fit import fixed, line_run

MIB = 2**20
RUNS = 12
SAMPLES, BATCH, EPOCHS = 600, 200, 2
EXACT = 1e-10
"""Relative L2 distance of the weights after all steps, in float64."""


@dataclass(kw_only=True)
class Scenario:
    """What one run is up against.

    Attributes:
        capacity_bytes: Of the GPU.
        sizes: [SAMPLES + 10, 2] nodes and edges of each sample.
        bytes_a_unit: [2] what a node and an edge take.
        lie: [SAMPLES + 10] what a sample really takes ÷ what its nodes and edges say.
        factor: The safety factor that was learned.
        restless: Probability that another process takes or gives back memory before a micro-batch.
        early: Whether that happens during the search already.
        draw: Of everything that happens.
    """

    capacity_bytes: int
    sizes: NDArray[np.float64]
    bytes_a_unit: NDArray[np.float64]
    lie: NDArray[np.float64]
    factor: float
    restless: float
    early: bool
    draw: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> "Scenario":
        draw = np.random.default_rng(seed)
        nodes = np.minimum(2 + draw.pareto(1.5, SAMPLES + 10) * 5, 40)
        edges = nodes * draw.uniform(1, 3, len(nodes))
        capacity = int(np.exp(draw.uniform(np.log(512), np.log(3072)))) * MIB
        bytes_a_unit = draw.uniform(0.2, 1, 2)
        # A batch takes from half of the GPU to ten GPUs; in some runs, single samples take more than there is.
        mean_batch = float((nodes * bytes_a_unit[0] + edges * bytes_a_unit[1]).mean()) * BATCH
        share, is_too_large = np.exp(draw.uniform(np.log(0.5), np.log(10))), draw.random() < 0.05
        if is_too_large:
            # Such samples are copied to the host while further rungs are tried.
            share, capacity = 10 * share, capacity // 4
        bytes_a_unit *= share * capacity / mean_batch
        return cls(
            capacity_bytes=capacity,
            sizes=np.floor(np.stack([nodes, edges], axis=1)),
            bytes_a_unit=bytes_a_unit,
            lie=np.exp(float(draw.choice([0.0, 0.0, 0.1, 0.3])) * draw.standard_normal(len(nodes))),
            factor=float(draw.choice([0.95, 1.0])),
            restless=float(draw.choice([0.0, 0.2, 0.4, 0.4])),
            early=bool(draw.random() < 0.05),
            draw=draw,
        )

    def pieces(self, rows: NDArray[np.int64]) -> tuple[int, int]:
        """Bytes that samples as one part take forward, in two pieces; each takes as much again for a while on the way
        back, the second one first.
        """
        nodes, edges = self.lie[rows] @ self.sizes[rows] * self.bytes_a_unit / 2
        return int(nodes), int(edges)

    def need(self, rows: NDArray[np.int64]) -> float:
        """Bytes that samples as one part take at their peak."""
        nodes, edges = self.pieces(rows)
        return max(2 * nodes, nodes + 2 * edges)

    @property
    def largest(self) -> float:
        """Bytes that the largest training sample takes."""
        return max(self.need(np.asarray([row])) for row in range(SAMPLES))


class HeavyNet(nn.Module):
    """Two layers, and between them all the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, pieces: Sequence[int]) -> Tensor:
        hidden = self.inner(x)
        for piece in pieces:
            hidden = Costly.apply(hidden, piece)
        out: Tensor = self.outer(torch.tanh(hidden))
        return out


class HeavyTask(BatchTask):
    """A regression on ragged samples whose error counts by their nodes."""

    memory_features: Sequence[Feature] = (Feature("nodes"), Feature("edges"))
    loss_weights: Mapping[str, float] = {"error": 1.0}

    def __init__(self, scenario: Scenario, stir: Callable[[], None]) -> None:
        self.train_rows = np.arange(SAMPLES)
        self.validation_rows = np.arange(SAMPLES, SAMPLES + 10)
        self.scenario = scenario
        self.stir = stir
        self.rows = np.arange(0)
        self.x = torch.from_numpy(np.random.default_rng(1).standard_normal((SAMPLES + 10, 4)))

    def build_model(self) -> nn.Module:
        return HeavyNet()

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.scenario.sizes[rows]

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> "HeavyBatch":
        self.rows = rows
        return HeavyBatch(self, rows)


@dataclass
class HeavyBatch:
    """Some of the samples."""

    task: HeavyTask
    rows: NDArray[np.int64]
    denominators: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.denominators = {"error": float(self.task.scenario.sizes[self.rows, 0].sum())}

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        scenario, rows = self.task.scenario, self.rows[start:stop]
        self.task.stir()
        x, nodes = self.task.x[rows], torch.from_numpy(scenario.sizes[rows, 0])
        error = (model(x, scenario.pieces(rows)) - x[:, :1]).square().squeeze(1)
        return {"error": ((error * nodes).sum(), float(nodes.sum()))}


class Neighbours:
    """Other processes on the same GPU: they take what is free, and leave some day."""

    def __init__(self, meter: SimulatedMeter, scenario: Scenario) -> None:
        self.allocator = meter.gpu.allocator
        self.scenario = scenario
        self.awake = scenario.early

    def stir(self) -> None:
        """Leaves room for the largest sample: what lies beyond that is the named error's."""
        if not self.awake or self.scenario.draw.random() >= self.scenario.restless:
            return
        if self.allocator.foreign_bytes:
            self.allocator.foreign_bytes = 0
            return
        spare = self.allocator.free_bytes - 1.5 * self.scenario.largest
        self.allocator.foreign_bytes = int(max(spare, 0) * self.scenario.draw.uniform(0, 1))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step.

    Attributes:
        need: Bytes that its batch takes whole.
        available: Bytes that this process could have throughout.
        peak: Bytes that it took at most.
        parts: Micro-batches.
    """

    need: float
    available: int
    peak: int
    parts: int

    @property
    def ideal_parts(self) -> float:
        return np.ceil(self.need / self.available)

    @property
    def fill(self) -> float:
        return min(self.peak / self.available, 1.0)

    @property
    def binds(self) -> bool:
        return self.need > self.available


@dataclass(kw_only=True)
class Told:
    """What became of a run."""

    steps: list[Step] = field(default_factory=list)
    ooms: int = 0
    refused: bool = False
    rightly_refused: bool = True
    distance: float = 0.0


def live(seed: int, run: ResolvedRun, folder: Path) -> Told:
    """Trains one run to its end."""
    scenario, told = Scenario.of(seed), Told()
    meter = SimulatedMeter(scenario.capacity_bytes, settings=EXPANDABLE)
    neighbours = Neighbours(meter, scenario)
    task = HeavyTask(scenario, neighbours.stir)
    run = replace(run, training=replace(run.training, seed=seed))
    created = RunFolder.create(folder, run.key, run.config)
    parts = Parts(run=run, folder=created, task=task, meter=meter, reporter=SilentReporter(), stops=StopRequests())
    with meter.active():
        try:
            session = make_session(parts, fixed(scenario.factor))
            neighbours.awake = True
            watch(session, meter, task, told)
            training_loop.train(session)
        except DoesNotFitError:
            told.refused = True
            told.rightly_refused = scenario.largest > 0.8 * meter.available_bytes()
            return told
    told.ooms = session.engine.batcher.ooms_rescued
    told.distance = distance(session, task)
    return told


def watch(session: Session, meter: SimulatedMeter, task: HeavyTask, told: Told) -> None:
    """Notes what each step took."""
    run = session.engine.batcher.add_share

    def noted(*arguments: Any, **keywords: Any) -> Any:
        before = meter.available_bytes()
        meter.reset_peak()
        result = run(*arguments, **keywords)
        # Neighbours may have come in the middle of it, or left.
        available = min(before, meter.available_bytes())
        need, parts = task.scenario.need(task.rows), len(result.micro_batches)
        told.steps.append(Step(need=need, available=available, peak=meter.peak_bytes(), parts=parts))
        return result

    session.engine.batcher.add_share = noted  # type: ignore[method-assign]


def distance(session: Session, task: HeavyTask) -> float:
    """How far the weights are from those that a bare loop over whole batches leads to."""
    torch.manual_seed(session.training.seed)
    model = task.build_model().double()
    optimizer = make_optimizer(list(model.parameters()), session.training, session.training.lr, torch.device("cpu"))
    for epoch in range(EPOCHS):
        for rows in session.epochs.steps(epoch):
            error = (model(task.x[rows], ()) - task.x[rows, :1]).square().squeeze(1)
            nodes = torch.from_numpy(task.scenario.sizes[rows, 0])
            optimizer.zero_grad()
            ((error * nodes).sum() / nodes.sum()).backward()
            optimizer.step()
    reached, exact = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (session.model, model))
    return float((reached - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def run_before(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Imports what all runs need, before the tests' own garbage collections (`imports_are_no_garbage`)."""
    folder = tmp_path_factory.mktemp("before")
    live(0, line_run(folder, batch_size=BATCH, epochs=EPOCHS, precision="fp64", scheduler="constant"), folder)


@pytest.mark.slow
@pytest.mark.usefixtures("run_before")
def test_no_run_dies_and_what_memory_there_is_gets_used(tmp_path: Path) -> None:
    run = line_run(tmp_path, batch_size=BATCH, epochs=EPOCHS, precision="fp64", scheduler="constant")
    told = [live(seed, run, tmp_path / str(seed)) for seed in range(RUNS)]
    finished = [one for one in told if not one.refused]
    binding = [step for one in finished for step in one.steps if step.binds]
    assert all(one.rightly_refused for one in told)
    assert max(one.distance for one in finished) <= EXACT
    assert len(finished) >= 0.8 * RUNS
    assert sum(one.ooms > 0 for one in finished) >= 0.3 * RUNS
    assert np.mean([step.fill for step in binding]) >= 0.85
    assert sum(step.parts for step in binding) <= 1.2 * sum(step.ideal_parts for step in binding)
