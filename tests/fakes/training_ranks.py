"""Functions that each rank runs in the tests of training: the ranks train together, and one rank may fail."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train import Task
from can_train.config.compose import RunRequest, resolve
from can_train.fit.optimizer import Optimization
from can_train.fit.random_state import capture_generators, restore_generators
from can_train.fit.sharding import Shards
from can_train.memory.sharded_tensors import whole
from can_train.runs.attempts import StopRequests
from can_train.runs.run_folder import RunFolder
from can_train.task import BatchTask
from can_train.training import train as training_loop
from can_train.training.attempt_record import recording_observation
from can_train.training.distributed import ConnectedRanks, Ranks
from can_train.training.train import make_session, take_step, train_new, train_on
from fakes.line_fit import SAMPLES, LineBatch, LineTask, Notices, fixed, line_parts

MIB = 2**20


class FaultyLineTask(LineTask):
    """Points on a line, with dropout; once armed, the fault `how` happens at batch number `at`."""

    def __init__(self, *, dropout: float, norm: bool, how: str, at: int, deep: bool = False,
                 in_place: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.deep, self.in_place = deep, in_place
        self.dropout, self.norm, self.how, self.at = dropout, norm, how, at
        self.armed = False
        self.asked = 0
        self.validated = 0

    def build_model(self) -> nn.Module:
        if self.deep:
            return deep_model(self.dropout, in_place=self.in_place)
        return nn.Sequential(
            nn.BatchNorm1d(4) if self.norm else nn.Identity(), super().build_model(), nn.Dropout(self.dropout)
        )

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        self.asked += 1
        if self.armed and generator is None:
            self.validated += len(rows)
        elif self.armed:
            self.at -= 1
            if self.at == 0:
                self._fail()
        return super().logical_batch(rows, device, dtype, generator)

    def _fail(self) -> None:
        if self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "bug":
            raise ValueError("a bug")
        elif self.how == "little memory":
            self.fail_above = 2
        elif self.how == "no memory":
            self.fail_above = 0
        elif self.how in ("forward", "backward"):
            Failing.at = self.how


class Failing(nn.Module):
    """Returns its input; a pass runs out of memory `at` this module once, forward or backward."""

    at = ""

    def forward(self, x: Tensor) -> Tensor:
        self.fail("forward")
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda gradient: self.fail("backward"))
        return y

    @staticmethod
    def fail(at: str) -> None:
        if Failing.at == at:
            Failing.at = ""
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


class Block(nn.Sequential):
    """A residual block."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return x + y


class Slice(Block):
    """A residual block whose output is a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:]


class InPlace(nn.Sequential):
    """Modules whose outputs it changes in place; its own output is a view."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
            x *= 0.9
        return x[:]


def deep_model(dropout: float, *, in_place: bool) -> nn.Module:
    """Makes a model of three blocks, and of weights outside of them; few sizes can be divided by a number of ranks."""
    block, model = (Slice, InPlace) if in_place else (Block, nn.Sequential)
    blocks = [block(nn.Linear(9, 7), nn.Tanh(), Failing(), nn.Linear(7, 9), nn.Dropout(dropout)) for _ in range(3)]
    return model(nn.Linear(4, 9), *blocks, nn.Linear(9, 1))


class GrowingTask(FaultyLineTask):
    """Points on a line; each epoch has more points."""

    def in_epoch(self, epoch: int, epochs: int) -> SimpleNamespace:
        return SimpleNamespace(
            train_rows=self.train_rows[: SAMPLES * (epoch + 1) // epochs], logical_batch=self.logical_batch
        )


class AllocatingLineTask(FaultyLineTask):
    """Points that allocate 1 MiB each; on odd ranks the size depends on the position of the point."""

    def __init__(self, *, odd: bool, **given: Any) -> None:
        super().__init__(**given)
        self.odd = odd

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        points = super().logical_batch(rows, device, dtype, generator)
        return AllocatingLineBatch(points._x, (rows + 1) / SAMPLES * 2 if self.odd else np.ones(len(rows)))


class AllocatingLineBatch(LineBatch):
    """Some points, and the MiB that each allocates."""

    def __init__(self, x: Tensor, mib: NDArray[np.float64]) -> None:
        super().__init__(x, 10**9)
        self._mib = mib

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        held = torch.ones(int(self._mib[start:stop].sum() * MIB / 4), requires_grad=True)
        total, denominator = super().losses(model, start, stop)["error"]
        return {"error": (total + 0 * held.square().sum(), denominator)}


def _fail_in_step(optimization: Optimization, at: int) -> None:
    """Lets an optimizer fail in its step number `at`, counted from 1."""
    left = at

    def fail(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise ValueError("a bug of the optimizer")

    optimization.optimizer.register_step_pre_hook(fail)


def messages_of_steps(ranks: Ranks, folder: Path, *, norm: bool, **training: Any) -> None:
    """Writes down how many messages each step took."""
    parts = ranks.on_rank0_first(lambda: line_parts(folder, FaultyLineTask(dropout=0.0, norm=norm, how="", at=0),
                                                    **training))  # fmt: skip
    assert isinstance(ranks, ConnectedRanks)
    session, messages, run = make_session(replace(parts, ranks=ranks), fixed(0.5)), 0, ranks._calls.run

    def counted(call: Any, **options: Any) -> Any:
        nonlocal messages
        messages += 1
        return run(call, **options)

    session.model.train()
    ranks._calls.run = counted  # type: ignore[method-assign]
    for rows in session.epochs.steps(0):
        take_step(session, rows, ends_epoch=False)
        with (folder / f"messages-{ranks.rank}.txt").open("a") as file:
            file.write(f"{messages}\n")
        messages = 0
    ranks._calls.run = run  # type: ignore[method-assign]
    ranks.close()


def fit_line(
    ranks: Ranks,
    folder: Path,
    *,
    fault: tuple[int, str, int] = (0, "", 0),
    dropout: float = 0.0,
    norm: bool = False,
    capacities_mib: tuple[int, ...] = (),
    odd: bool = False,
    growing: bool = False,
    deep: bool = False,
    in_place: bool = False,
    broken: str = "",
    **training: Any,
) -> None:
    """Trains as a run does, from the plan to the last step.

    Args:
        ranks: The ranks of the training.
        folder: Folder of the run; each rank writes its results to `rank-<rank>.pt`.
        fault: A rank, its fault, and the number of the batch.
        dropout: Dropout of the model.
        norm: Whether the model has a BatchNorm.
        capacities_mib: Capacity of each rank's device, on which points allocate memory.
        odd: Whether points allocate other sizes on odd ranks.
        growing: Whether each epoch has more points.
        deep: Whether the model has blocks, which can be sharded one by one.
        in_place: Whether the outputs of these blocks are views, which the model changes in place.
        broken: A fault of the passes on shards.
        training: Training settings.
    """
    torch.use_deterministic_algorithms(True)
    if broken == "stale gradients":
        Shards.reset = lambda self: [root.reset_iter_state() for root in self._roots]  # type: ignore[method-assign]
    elif broken == "lost gradients":
        Shards._add_gradients = lambda self, parameters, summed: None  # type: ignore[method-assign]
    faulty_rank, how, at = fault
    given = {"dropout": dropout, "norm": norm, "how": how if faulty_rank == ranks.rank else "", "at": at,
             "deep": deep, "in_place": in_place}  # fmt: skip
    plain = GrowingTask if growing else FaultyLineTask
    task = AllocatingLineTask(odd=odd and ranks.rank % 2 == 1, **given) if capacities_mib else plain(**given)
    parts = ranks.on_rank0_first(lambda: line_parts(folder, task, **training))
    parts = replace(parts, ranks=ranks)
    if capacities_mib:
        parts.meter.capacity_bytes = capacities_mib[ranks.rank] * MIB
    session = make_session(parts, fixed(0.5))
    if how == "optimizer" and faulty_rank == ranks.rank:
        _fail_in_step(session.engine.optimization, at)
    planning, generators = task.asked, capture_generators()
    drawn = torch.rand(3)
    restore_generators(generators)
    task.armed = True
    with parts.stops.installed(), recording_observation(session):
        training_loop.train(session)
    assert isinstance(parts.reporter, Notices)
    told = {
        "weights": whole_weights(session.model),
        "buffers": dict(session.model.named_buffers()),
        "best": session.best,
        "step": session.progress.step,
        "ooms": (session.engine.batcher.ooms_rescued, session.ooms_elsewhere),
        "plan": session.engine.run_plan.to_plain(),
        "notices": parts.reporter.texts,
        "asked in planning": planning,
        "validated": task.validated,
        "drawn": drawn,
    }
    torch.save(told, folder / f"rank-{ranks.rank}.pt")
    ranks.close()


def whole_weights(model: nn.Module) -> Tensor:
    """Joins the weights of a model, which may be shards on several ranks: all of them call it alike."""
    return torch.cat([weight.flatten() for weight in whole([one.detach() for one in model.parameters()], keep=True)])


class FewSamplesTask(BatchTask):
    """A mixin: more than `most` samples at once run out of memory."""

    most = 10**9

    def collate(self, samples: Sequence[Any]) -> Any:
        if len(samples) > self.most and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return super().collate(samples)  # type: ignore[misc]


def fit_samples(
    ranks: Ranks, folder: Path, *, kind: type[Task], limited_rank: int | None = None, **training: Any
) -> None:
    """Trains a task that is described by its samples, as `fit_line` does a line.

    Args:
        ranks: The ranks of the training.
        folder: Folder of the run; each rank writes its results to `rank-<rank>.pt`.
        kind: The task's class.
        limited_rank: The rank whose device has room for two samples at a time.
        training: Training settings.
    """
    torch.use_deterministic_algorithms(True)
    task = type(kind.__name__, (FewSamplesTask, kind), {})()
    parts = ranks.on_rank0_first(lambda: line_parts(folder, task, **training))
    session = make_session(replace(parts, ranks=ranks), fixed(0.5))
    # Of the class: each phase has a copy of the task.
    type(task).most = 2 if limited_rank == ranks.rank else task.most
    training_loop.train(session)
    assert isinstance(parts.reporter, Notices)
    told = {
        "weights": whole_weights(session.model),
        "ooms": (session.ooms_rescued, session.ooms_elsewhere),
        "best": session.progress.best_loss,
        "notices": parts.reporter.texts,
    }
    torch.save(told, folder / f"rank-{ranks.rank}.pt")
    ranks.close()


def train_windows(ranks: Ranks, folder: Path, *, model: str, state: Path, cache: Path) -> None:
    """Trains a small model on simulated windows, from the data to the judgement."""
    values = {
        "dataset.synthetic.seconds": 5,
        "training.epochs": 1,
        "training.precision": "fp64",
        "training.batch_size": 40,
        "model.dropout": 0.0,
        "mode.baselines": False,
        "paths.runs_dir": str(folder / "runs"),
        "paths.state_dir": str(state),
        "paths.cache": str(cache),
    }
    _train(ranks, folder, RunRequest(model=model, dataset="synthetic", size="student", device="cpu", values=values))


def train_mode(ranks: Ranks, folder: Path, *, model: str, mode: str, log: Path, values: Mapping[str, Any]) -> None:
    """Trains a mode on the windows of a log, from the data to the judgement."""
    paths = {"paths.runs_dir": str(folder / "runs"), "paths.state_dir": str(folder / "state")}
    _train(
        ranks,
        folder,
        RunRequest(model=model, mode=mode, dataset=str(log), size="student", device="cpu", values={**values, **paths}),
    )


def _train(ranks: Ranks, folder: Path, request: RunRequest) -> None:
    reporter = Notices()
    outcome = train_new(resolve(request), reporter, ranks)
    torch.save((outcome.summary, reporter.texts), folder / f"outcome-{ranks.rank}.pt")


def train_task(ranks: Ranks, folder: Path, *, task: str, devices: Sequence[str] = ("cpu",), **values: Any) -> None:
    """Trains a task of a file, from the data to the judgement, each rank on a device of its own; a run that is there
    goes on. `values` are settings of the training.
    """
    paths = {"paths.runs_dir": str(folder / "runs"), "paths.state_dir": str(folder / "state")}
    named = {f"training.{name}": value for name, value in values.items()}
    device = devices[ranks.rank % len(devices)]
    reporter = Notices()
    run = resolve(RunRequest(task=task, device=device, values=paths | named))
    there = sorted((folder / "runs").glob("*/config.yaml"))
    if there:
        outcome = train_on(run, RunFolder(there[0].parent), reporter, StopRequests(), ranks)
    else:
        outcome = train_new(run, reporter, ranks)
    torch.save((outcome.summary, reporter.texts), folder / f"outcome-{ranks.rank}.pt")
