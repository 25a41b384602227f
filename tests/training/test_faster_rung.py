"""Runs that learn whether a further rung is faster, on a simulated GPU whose clock is moved by what is computed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import with_absolute_paths
from can_train.factors.observations import read_records
from can_train.factors.store import replay_sizes
from can_train.factors.summary import summarize
from can_train.fit.run_plan import RunPlan
from can_train.fit.rungs import SPLIT_ALONE, rung_of
from can_train.fit.step_time import MicroBatchChoice
from can_train.memory.meters import SimulatedMeter
from can_train.reporter import SilentReporter
from can_train.training.report import detail_lines, plan_summary
from can_train.training.train import train_new
from fakes.bitwise import final_state

pytestmark = pytest.mark.slow
BLOCKS: Final = 4
RECOMPUTED: Final = f"recompute, {BLOCKS} modules"
CLOCKED: Final = f"""
import torch
from torch import nn

import can_train
from can_train.memory.meters import SimulatedMeter


class Block(nn.Sequential):
    def forward(self, x):
        SimulatedMeter.moved += SimulatedMeter.fixed + len(x)
        return x + super().forward(x)


class Deep(can_train.Task):
    training = {{"lr_batch_size": 8, "epochs": 6, "min_steps_per_epoch": 1, "optimizer": "sgd"}}

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        samples = [(torch.randn(400, 16, generator=generator),) for _ in range(12)]
        return {{"train": samples[:8] * 42, "validation": samples[8:10], "test": samples[10:]}}

    def model(self):
        return nn.Sequential(*[
            Block(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range({BLOCKS})
        ])

    def loss(self, model, batch):
        # The backward pass takes twice as long as the forward pass.
        SimulatedMeter.moved += 2 * {BLOCKS} * (SimulatedMeter.fixed + len(batch[0]))
        return {{"square": (model(batch[0]).square().mean((1, 2)).sum(), len(batch[0]))}}
"""
DEVICE: Final = "8MiB"


def train_clocked(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fixed: float, **settings: Any) -> Path:
    monkeypatch.setattr(SimulatedMeter, "moved", 0.0, raising=False)
    monkeypatch.setattr(SimulatedMeter, "fixed", fixed, raising=False)
    monkeypatch.setattr(SimulatedMeter, "moment", lambda meter: meter.moved)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "deep.py").write_text(CLOCKED)
    values = {
        "paths.runs_dir": str(folder / "runs"), "paths.state_dir": str(folder / "state"),
        "training.micro_batch": "fastest", "training.num_workers": "0",
    }  # fmt: skip
    named = {f"training.{name}": value for name, value in settings.items()}
    request = RunRequest(task=f"{folder / 'deep.py'}:Deep", device=f"sim:{DEVICE}", values=values | named)
    return train_new(with_absolute_paths(resolve(request)), SilentReporter()).folder.path


def read(run: Path) -> RunPlan:
    return RunPlan.from_plain(json.loads((run / "plan.json").read_text()))


def choice_of(plan: RunPlan) -> MicroBatchChoice:
    assert plan.micro_batch is not None
    return plan.micro_batch


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Two runs whose micro-batches have large fixed costs."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("runs")
        yield [train_clocked(folder, monkeypatch, fixed=200.0) for _ in range(2)]


def told(run: Path) -> str:
    plan = read(run)
    return "\n".join([*plan_summary(plan, "sim-8MiB", 8 * 2**20), *detail_lines(plan)])


def test_the_first_run_tries_a_rung_on_which_larger_micro_batches_fit(runs: list[Path]) -> None:
    plan = read(runs[0])
    assert plan.rung == SPLIT_ALONE
    assert plan.other_rung is not None
    assert len(plan.other_rung.rung.recompute) == BLOCKS
    tried = {(trial.rung, trial.samples): trial.steps for trial in choice_of(plan).trials}
    assert tried[RECOMPUTED, 8.0] == 3
    words = f"3 steps of the run try micro-batches of up to 8 samples, where {BLOCKS} modules (*) are computed again"
    assert f"To learn which is faster, {words}" in told(runs[0])


def test_the_next_run_takes_the_rung_that_took_less_time(runs: list[Path]) -> None:
    plan = read(runs[1])
    choice = choice_of(plan)
    assert (plan.rung.name, choice.first_rung, choice.samples) == ("recompute", "split", 8.0)
    assert plan.phase_plan.most_parts == 1
    # Two micro-batches take 3 forward passes each, and one takes 4.
    assert choice.gain == pytest.approx(1 - 4 * 208 / (2 * 3 * 204), abs=0.06)
    assert f"Larger micro-batches by {RECOMPUTED} are faster: 8 samples on average, against" in told(runs[1])
    assert f"So that it is faster, {BLOCKS} modules (*) are computed again in the backward pass" in told(runs[1])


@pytest.mark.parametrize("number", [0, 1])
def test_the_peak_is_as_predicted_whichever_rungs_are_tried(runs: list[Path], number: int) -> None:
    result = json.loads((runs[number] / "result.json").read_text())
    assert result["peak_memory_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.01)


def test_the_weights_are_the_same_on_both_rungs(runs: list[Path]) -> None:
    one, other = (final_state(run)["model"] for run in runs)
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-4, atol=1e-6)


def test_a_later_run_begins_its_comparison_with_the_first_rung_that_fits(runs: list[Path]) -> None:
    (summary,) = summarize(read_records(runs[0].parent.parent / "state").finished)
    *_, last = summary.runs
    assert [rung_of(limits) for limits in last.limits.values()] == [SPLIT_ALONE]
    (replayed,) = replay_sizes(summary)[-1]
    assert (replayed.own_rung, replayed.rung, replayed.samples) == (RECOMPUTED,) * 2 + (8.0,)
