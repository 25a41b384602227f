"""Runs in a row on a simulated GPU: each starts from what those before it taught."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import DoesNotFitError
from can_train.factors.observations import Observation, read_records
from can_train.factors.store import factor_rule, get_safety_factor_db
from can_train.memory.meters import SimulatedMeter
from can_train.memory.simulated.allocator import EXPANDABLE
from can_train.runs.run_folder import RunFolder
from can_train.task import Feature
from can_train.training import train as training_loop
from can_train.training.attempt_record import recording_observation
from can_train.training.train import make_session
from fakes.costly import CostlyNet
from fakes.line_fit import SAMPLES, LineBatch, LineTask, line_parts

MIB = 2**20
CAPACITY = 400 * MIB
KEY = "synthetic_gat_student_normal"


class CostlyTask(LineTask):
    """Points of which number r takes 6, 12 or 18 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.memory_features = (Feature("units"),)

    def build_model(self) -> nn.Module:
        return CostlyNet()

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return 1.0 + rows[:, None] % 3

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        return CostlyBatch(self._x[rows].to(device, dtype), self.batch_features(rows)[:, 0])


class CostlyBatch(LineBatch):
    """Some points."""

    def __init__(self, x: Tensor, units: NDArray[np.float64]) -> None:
        super().__init__(x, 10**9)
        self._units = units

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        x = self._x[start:stop]
        num_bytes = int(self._units[start:stop].sum()) * 3 * MIB
        error = (model(x, num_bytes) - 3 * x[:, :1]).square().sum()
        return {"error": (error, float(stop - start))}


def train(folder: Path, *, hidden: float = 0.0, settings: Mapping[str, Any] = {}, **training: Any) -> Observation:
    """Trains a run of its own; a share of the GPU is taken once the plan is made. Returns what the run taught."""
    values = {"batch_size": SAMPLES, "oom_retries": 0} | training
    meter = SimulatedMeter(CAPACITY, settings=EXPANDABLE)
    parts = replace(line_parts(folder, CostlyTask(), settings=settings, **values), meter=meter)
    parts = replace(parts, folder=RunFolder.create(folder / "runs", parts.run.key, parts.run.config))
    with meter.active():
        session = make_session(parts, factor_rule(parts.run, meter.key, parts.reporter))
        with parts.stops.installed(), recording_observation(session):
            held = torch.empty(int(hidden * CAPACITY), dtype=torch.uint8)
            training_loop.train(session)
            del held
    return read_records(folder / "state").finished[-1]


def peak(run: Observation) -> float:
    """The peak that a run settled at."""
    return (run.peak_bytes_after_rescue or run.peak_allocated_bytes or 0) / run.capacity_bytes


PROBE = {"factor.prior": "probe"}
MOMENTUM = {"factor.policy": "momentum"}


def test_the_first_run_meets_the_target_and_those_after_it_stay_there(tmp_path: Path) -> None:
    runs = [train(tmp_path, settings=PROBE) for _ in range(4)]
    assert runs[0].factor_reason.startswith("from the probes: (90.0% − ")
    assert [peak(run) for run in runs] == pytest.approx([0.9] * 4, abs=0.03)
    assert not any(run.ooms_rescued for run in runs)


def test_from_the_table_the_third_run_meets_the_target(tmp_path: Path) -> None:
    runs = [train(tmp_path) for _ in range(4)]
    assert runs[0].factor == 0.6
    assert [peak(run) for run in runs[2:]] == pytest.approx([0.9] * 2, abs=0.03)


def test_what_no_probe_sees_is_learned_from_one_rescue(tmp_path: Path) -> None:
    runs = [train(tmp_path, hidden=0.12, settings=PROBE) for _ in range(4)]
    assert runs[0].outcome == "rescued"
    assert runs[0].oom_used is not None
    assert [peak(run) for run in runs[1:]] == pytest.approx([0.9] * 3, abs=0.03)


def test_momentum_cuts_a_factor_after_an_out_of_memory_and_recovers(tmp_path: Path) -> None:
    (tmp_path / "factors.json").write_text(f'{{"{KEY}": 0.427}}')
    get_safety_factor_db(tmp_path / "state").import_file(tmp_path / "factors.json")
    with pytest.raises(DoesNotFitError, match="adaptive_micro_batch is off"):
        train(tmp_path, hidden=0.65, settings=MOMENTUM, adaptive_micro_batch=False)
    factors = [train(tmp_path, settings=MOMENTUM, adaptive_micro_batch=False).factor for _ in range(4)]
    assert factors[0] == pytest.approx(0.277)
    assert factors == sorted(factors)
    assert factors[-1] > 0.35
