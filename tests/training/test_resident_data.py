"""Data that live on the device: counted in the plan, left there only where micro-batches stay as they are, and without
effect on a single bit.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train import Task
from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import with_absolute_paths
from can_train.errors import DoesNotFitError
from can_train.fit.run_plan import DataPlacement, RunPlan
from can_train.memory.meters import SimulatedMeter
from can_train.memory.simulated.allocator import EXPANDABLE
from can_train.reporter import SilentReporter
from can_train.runs.run_folder import RunFolder
from can_train.task import Feature
from can_train.training.session import Session
from can_train.training.train import make_session, train, train_new
from fakes.bitwise import assert_ends_like
from fakes.costly import CostlyNet
from fakes.killed_runs import finish, finish_killed, only_run
from fakes.line_fit import SAMPLES, LineBatch, LineTask, Notices, fixed, line_parts
from fakes.trained_runs import bus_log

MIB = 2**20
DATA_MIB = 8


class ResidentTask(LineTask):
    """Points of 2 MiB each in training, with some MiB of data; the part whose first sample is `fails_at` runs out of
    memory once.
    """

    memory_features = (Feature("points"),)

    def __init__(self, fails_at: int = -1, data_mib: int = DATA_MIB) -> None:
        super().__init__()
        self.memory_features = (Feature("points"),)
        self.fails_at, self.is_trained = fails_at, False
        self.table = np.zeros((SAMPLES + 10, data_mib * MIB // 8 // (SAMPLES + 10)))
        self.table[:, :4] = self._x.numpy()
        self.bound: Mapping[str, Tensor] = {}
        self.gathered: list[bool] = []

    def build_model(self) -> nn.Module:
        return CostlyNet()

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.ones((len(rows), 1))

    def resident_data(self) -> Mapping[str, NDArray[Any]]:
        return {"table": self.table}

    def bind_data(self, data: Mapping[str, Tensor]) -> None:
        self.bound = data

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        return ResidentBatch(self, rows, dtype)


class ResidentBatch(LineBatch):
    """Some points, gathered part by part."""

    def __init__(self, task: ResidentTask, rows: NDArray[np.int64], dtype: torch.dtype) -> None:
        self.task, self.rows, self.dtype = task, rows, dtype
        self.denominators = {"error": float(len(rows))}

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[Tensor, float]]:
        task, rows = self.task, torch.from_numpy(self.rows[start:stop])
        task.gathered.append(bool(task.bound))
        x = (task.bound["table"].index_select(0, rows) if task.bound else torch.from_numpy(task.table)[rows])[:, :4]
        if task.is_trained and torch.is_grad_enabled() and int(rows[0]) == task.fails_at and stop - start > 1:
            task.fails_at = -1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        error = (model(x.to(self.dtype), len(rows) * MIB) - 3 * x[:, :1]).square().sum()
        return {"error": (error, float(stop - start))}


def session_on(
    folder: Path, capacity_mib: int, *, fails_at: int = -1, data_mib: int = DATA_MIB, **training: Any
) -> Session:
    parts = line_parts(folder, ResidentTask(fails_at, data_mib), **({"batch_size": 20, "precision": "fp64"} | training))
    parts = replace(parts, meter=SimulatedMeter(capacity_mib * MIB, settings=EXPANDABLE))
    with parts.meter.active():
        return make_session(parts, fixed(0.9))


def trained(session: Session) -> Session:
    task = session.task
    assert isinstance(task, ResidentTask)
    task.gathered.clear()
    task.is_trained = True
    with session.meter.active():
        train(session)
    return session


def placement(session: Session) -> DataPlacement:
    return session.own_plan.data


def test_small_data_live_on_a_large_device_and_are_counted_in_its_plan(tmp_path: Path) -> None:
    apart, together = (session_on(tmp_path / kind, 256, data_on_device=kind) for kind in ("off", "auto"))
    assert (placement(apart).on_device, placement(together).on_device) == (False, True)
    size = placement(together).num_bytes
    assert size == together.task.resident_data()["table"].nbytes
    assert together.meter.allocated_bytes() - apart.meter.allocated_bytes() >= size
    limits, without = together.own_plan.limits, apart.own_plan.limits
    assert limits is not None
    assert without is not None
    assert limits.training.model.base_bytes - without.training.model.base_bytes == pytest.approx(size)
    assert limits.optimizer_peak_bytes - without.optimizer_peak_bytes == size
    assert together.own_plan.phase_plan.largest_micro_batch == apart.own_plan.phase_plan.largest_micro_batch == 20
    trained(together)
    predicted = together.own_plan.predicted_peak_bytes
    assert predicted == pytest.approx(together.monitor.peak_bytes, rel=0.05)
    assert together.monitor.peak_bytes > size
    assert all(together.task.gathered)  # type: ignore[attr-defined]


def test_data_stay_on_the_host_where_micro_batches_would_be_smaller_beside_them(tmp_path: Path) -> None:
    # A part takes 17 MiB, and all there is beside data of 8 MiB is 9 MiB.
    session = session_on(tmp_path, 28)
    assert placement(session).on_device is False
    assert "smaller" in placement(session).reason
    limits = session.own_plan.limits
    alone = session_on(tmp_path / "off", 28, data_on_device="off").own_plan.limits
    assert limits == alone
    trained(session)
    assert not any(session.task.gathered)  # type: ignore[attr-defined]


class CrowdedTask(ResidentTask):
    """Other processes take 40 MiB of its device once limits have been found."""

    held_bytes = 0

    def resident_bytes(self) -> int:
        self.held_bytes = 40 * MIB
        return super().resident_bytes()


def test_data_stay_on_the_host_where_a_step_that_is_tried_beside_them_does_not_fit(tmp_path: Path) -> None:
    task = CrowdedTask()
    parts = line_parts(tmp_path, task, batch_size=20, precision="fp64")
    parts = replace(parts, meter=SimulatedMeter(100 * MIB, settings=EXPANDABLE, contention=lambda: task.held_bytes))
    with parts.meter.active():
        session = make_session(parts, fixed(0.9))
    assert (placement(session).on_device, placement(session).reason) == (
        False, "a step was tried and does not fit",
    )  # fmt: skip
    assert session.meter.allocated_bytes() < DATA_MIB * MIB


def test_data_that_are_asked_for_make_micro_batches_smaller_and_still_fit(tmp_path: Path) -> None:
    session = session_on(tmp_path, 28, data_on_device="on")
    assert placement(session).on_device
    assert session.own_plan.phase_plan.largest_micro_batch < 20
    trained(session)
    assert session.ooms_rescued == 0
    assert session.monitor.peak_bytes <= session.meter.capacity_bytes


def test_data_that_are_asked_for_and_do_not_fit_are_an_error_with_a_line_that_works(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"17\.0 MiB of 22\.0 MiB(.|\n)*--data-on-device auto"):
        session_on(tmp_path, 22, data_mib=17, data_on_device="on")
    assert "do not fit" in placement(session_on(tmp_path / "auto", 22, data_mib=17)).reason


def test_data_leave_the_device_when_memory_runs_out_and_the_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    # The first sample of the first part that is split is the same in all of them.
    first = int(session_on(tmp_path / "look", 256).epochs.steps(0)[1][0])
    apart, together = (
        trained(session_on(tmp_path / kind, 256, data_on_device=kind, fails_at=first)) for kind in ("off", "auto")
    )
    assert apart.ooms_rescued == together.ooms_rescued == 1
    for one, other in zip(apart.model.parameters(), together.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert isinstance(together.reporter, Notices)
    assert any("the data leave the device, 8.0 MiB" in text for text in together.reporter.texts)
    gathered = together.task.gathered  # type: ignore[attr-defined]
    assert gathered == sorted(gathered, reverse=True)
    assert {*gathered} == {True, False}
    # Nobody keeps the tensors.
    assert not together.data.is_there
    assert together.meter.allocated_bytes() < DATA_MIB * MIB


def test_a_resumed_run_has_its_data_where_its_plan_has_them(tmp_path: Path) -> None:
    first = session_on(tmp_path, 256)
    plan = first.own_plan
    assert RunPlan.from_plain(plan.to_plain()) == plan
    again = session_on(tmp_path, 256)
    assert again.own_plan.data == plan.data
    assert again.data.is_there


def test_limits_without_the_data_are_those_that_were_found(tmp_path: Path) -> None:
    together, apart = (session_on(tmp_path / kind, 256, data_on_device=kind).own_plan for kind in ("auto", "off"))
    found, back = apart.limits, together.without_data("why").limits
    assert found is not None
    assert back is not None
    assert back.optimizer_peak_bytes == found.optimizer_peak_bytes
    for one, other in ((back.training, found.training), (back.evaluation, found.evaluation)):
        assert one.model.base_bytes == pytest.approx(other.model.base_bytes)
        assert one.tuned_limit == pytest.approx(other.tuned_limit)


def test_the_host_has_its_data_already(tmp_path: Path) -> None:
    session = make_session(line_parts(tmp_path, ResidentTask(), batch_size=20), fixed(0.9))
    assert placement(session) == DataPlacement(num_bytes=ResidentTask().table.nbytes, reason="the device is the host")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return bus_log(tmp_path / "drive.csv")


@pytest.mark.parametrize("model", ["gat", "vgae"])
@pytest.mark.parametrize("parts", [0, 16], ids=["whole", "in parts"])
def test_a_detector_comes_to_the_same_bits_with_its_windows_on_the_device(
    model: str, parts: int, log: Path, tmp_path: Path
) -> None:
    apart, together = (bus_run(model, log, tmp_path / kind, kind, parts) for kind in ("off", "on"))
    assert_ends_like(together, apart)
    assert RunFolder(together).result()["judgement"] == RunFolder(apart).result()["judgement"]  # type: ignore[index]


def bus_run(model: str, log: Path, place: Path, kind: str, micro_batch: int) -> Path:
    values = {
        "training.epochs": 2, "training.batch_size": 32, "training.micro_batch_size": micro_batch,
        "training.data_on_device": kind, "dataset.window": 20, "dataset.stride": 20, "mode.baselines": False,
        "paths.runs_dir": str(place / "runs"), "paths.state_dir": str(place / "state"),
    }  # fmt: skip
    request = RunRequest(model=model, dataset=str(log), size="student", device="sim:256MiB", values=values)
    path = train_new(with_absolute_paths(resolve(request)), SilentReporter()).folder.path
    data = RunFolder(path).result()["plan"]["data"]  # type: ignore[index]
    assert data["on_device"] is (kind == "on")
    return path


class Images(Task):
    """Small images with labels, collated as by default."""

    def datasets(self) -> Mapping[str, Any]:
        drawn = torch.Generator().manual_seed(0)
        samples = [{"image": torch.rand(3, 4, generator=drawn), "label": number % 3} for number in range(40)]
        return {"train": samples[:32], "validation": samples[32:]}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(12, 3))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total = nn.functional.cross_entropy(model(batch["image"]), batch["label"], reduction="sum")
        return {"loss": (total, len(batch["label"]))}


class Lists(Images):
    """Tensors of different lengths in tuples, padded as by default."""

    def datasets(self) -> Mapping[str, Any]:
        drawn = torch.Generator().manual_seed(0)
        samples = [
            (torch.rand(1 + number * 7 % 5, 2, generator=drawn), torch.tensor(number % 3)) for number in range(40)
        ]
        return {"train": samples[:32], "validation": samples[32:]}

    def model(self) -> nn.Module:
        return nn.Linear(2, 3)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total = nn.functional.cross_entropy(model(batch[0]).sum(1), batch[1], reduction="sum")
        return {"loss": (total, len(batch[1]))}


def task_run(place: Path, kind: str, words: str) -> Path:
    """A run of a task on a simulated GPU."""
    line = f"{words} --epochs 2 --seed 3 --device sim:256MiB --data-on-device {kind} --quiet"
    # Which micro-batch is the fastest hangs on clocks, and with it the order of sums.
    line += " --micro-batch largest"
    assert main([*line.split(), "--runs-dir", str(place / "runs"), "--state-dir", str(place / "state")]) == 0
    (path,) = (place / "runs").iterdir()
    data = RunFolder(path).result()["plan"]["data"]  # type: ignore[index]
    assert data["on_device"] is (kind == "on")
    assert data["num_bytes"] > 0
    return path


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_data_on_the_device_to_the_same_bits(tmp_path: Path) -> None:
    data = "--dataset synthetic --set dataset.synthetic.seconds=8 --data-on-device"
    line = f"--model gat --size student --no-baselines --epochs 2 --batch-size 32 --device sim:256MiB {data}"
    words = ["--checkpoint-every", "2", *line.split()]
    apart, together, state = tmp_path / "off", tmp_path / "auto", tmp_path / "state"
    finish(apart, state, *words, "off")
    finish_killed(together, state, [*words, "auto"], at=[2, 8])
    result = RunFolder(only_run(together)).result()
    assert result is not None
    assert result["plan"]["data"]["on_device"] is True
    assert_ends_like(only_run(together), only_run(apart))


BENDR = "--task bendr --dataset synthetic --batch-size 8 --set model.hidden=16 --set model.layers=1"
TASKS = {
    "images": f"--task {__file__}:Images --batch-size 8",
    "images in parts": f"--task {__file__}:Images --batch-size 8 --micro-batch-size 3",
    "lists": f"--task {__file__}:Lists --batch-size 8 --accumulation-splits 2",
    "muon": "--task muon --dataset synthetic --set dataset.synthetic.muons_per_pev=5 "
    "--set dataset.synthetic.showers=30 "
    "--batch-size 16 --accumulation-splits 2 --set model.hidden=8",
    "bendr": f"{BENDR} --num-workers 2",
    "bendr classify": f"{BENDR} --mode classify",
}


@pytest.mark.parametrize("words", TASKS.values(), ids=TASKS)
def test_a_task_of_samples_comes_to_the_same_bits_with_its_samples_on_the_device(words: str, tmp_path: Path) -> None:
    apart = task_run(tmp_path / "off", "off", words.replace("--num-workers 2", "--num-workers 0"))
    together = task_run(tmp_path / "on", "on", words)
    assert_ends_like(together, apart)
    assert RunFolder(together).result()["judgement"] == RunFolder(apart).result()["judgement"]  # type: ignore[index]


class Noisy(Images):
    """Draws noise onto the images, which must stay on the host."""

    def draw(self, samples: Any, generator: torch.Generator) -> Any:
        return [{**sample, "image": sample["image"] + torch.rand(4, generator=generator)} for sample in samples]


class Mixed(Images):
    """Its samples differ in their number of columns."""

    def datasets(self) -> Mapping[str, Any]:
        return {"train": [{"image": torch.rand(3, 4 + number % 2), "label": 0} for number in range(8)]}

    def collate(self, samples: Any) -> Any:
        return super().collate([{**sample, "image": sample["image"][:, :4]} for sample in samples])

    def may_live_on_device(self) -> bool:
        return True


def test_samples_that_are_drawn_or_not_built_alike_stay_on_the_host() -> None:
    assert Images().resident_bytes() == 40 * 3 * 4 * 4
    assert Noisy().resident_bytes() == Mixed().resident_bytes() == 0
    assert Lists().resident_bytes() == sum(row.nbytes + label.nbytes for rows in Lists().datasets().values()
                                           for row, label in rows)  # fmt: skip


def test_a_batch_whose_data_leave_the_device_is_read_on_the_host() -> None:
    task = Lists()
    expected = task.collate([task.sample(row) for row in (3, 1, 4)])
    task.bind_data({name: torch.from_numpy(array) for name, array in task.resident_data().items()})
    samples = task.take([3, 1, 4], [0, 0, 0])
    assert not isinstance(samples[0][0], Tensor)
    gathered = task.collate(samples)
    task.bind_data({})
    for one, other, wanted in zip(gathered, task.collate(samples), expected, strict=True):
        assert torch.equal(one, wanted)
        assert torch.equal(other, wanted)
    assert isinstance(task.take([3], [0])[0][0], Tensor)
