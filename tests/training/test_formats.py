"""Formats of images and of products change round-off alone, and are in force for the run that asks for them."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.settings import TrainingSettings
from can_train.errors import ConfigError
from can_train.fit.optimizer import make_optimizer
from can_train.fit.planner import Planner
from can_train.fit.precision import Precision, tf32, use_channels_last
from can_train.fit.run_plan import RunPlan
from can_train.memory.catalogue import find_card, usable
from can_train.memory.meters import AbsentGpuMeter, CpuMeter, Meter, SimulatedMeter
from can_train.reporter import SilentReporter
from can_train.training.report import plan_details
from can_train.training.session import Session
from fakes.line_fit import LineBatch, LineTask, StoppedTask, fixed, line_run, train_line

SETTINGS: dict[str, Any] = {
    "batch_size": 20, "micro_batch_size": 20, "epochs": 2, "precision": "fp64", "checkpoint_every": 1,
}  # fmt: skip
GPU = torch.device("cuda")


class ImageBatch(LineBatch):
    """Points that are repeated as small images."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x, 10**9)
        # A point is the mean of its image, which the network is compared with.
        self._x = x[:, :3, None, None].repeat(1, 1, 6, 7)

    def losses(self, model: nn.Module, start: int, stop: int) -> Any:
        x = self._x[start:stop]
        return {"error": ((model(x) - x[:, :1, 0, 0]).square().sum(), float(stop - start))}


class ImageTask(LineTask):
    """Small images; `formats` has the format of each convolution's input in training."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.formats: list[bool] = []

    def build_model(self) -> nn.Module:
        first = nn.Conv2d(3, 8, 3)
        first.register_forward_pre_hook(lambda _, given: self.formats.append(is_last(given[0])))
        return nn.Sequential(first, nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 2 * 3, 1))

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        # A signal may arrive with it.
        super().logical_batch(rows, device, dtype, generator)
        return ImageBatch(self._x[rows].to(device, dtype))


class StoppedImageTask(ImageTask, StoppedTask):
    """The same, sent a SIGTERM while it prepares some training batch."""


def is_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def trained(folder: Path, task: LineTask, **training: Any) -> Session:
    return train_line(folder, task, **{**SETTINGS, **training})


def assert_close(one: Session, other: Session) -> None:
    torch.testing.assert_close(
        [parameter.detach() for parameter in one.model.parameters()],
        [parameter.detach() for parameter in other.model.parameters()], rtol=1e-9, atol=1e-11,
    )  # fmt: skip


def test_images_with_the_channels_last_train_the_same_weights_up_to_round_off(tmp_path: Path) -> None:
    task = ImageTask()
    last = trained(tmp_path / "last", task, channels_last=True)
    assert task.formats
    assert all(task.formats)
    assert is_last(last.model[2].weight)  # type: ignore[index, arg-type, union-attr]
    plain = ImageTask()
    assert_close(last, trained(tmp_path / "first", plain))
    assert not any(plain.formats)
    assert_close(last, trained(tmp_path / "split", ImageTask(), channels_last=True, micro_batch_size=7))


@pytest.mark.parametrize("before", [True, False])
def test_a_run_goes_on_in_the_other_format(tmp_path: Path, before: bool) -> None:
    with pytest.raises(SystemExit):
        trained(tmp_path / "stopped", StoppedImageTask(after=3), channels_last=before)
    resumed = trained(tmp_path / "stopped", ImageTask(), channels_last=not before)
    assert resumed.progress.step == 6
    assert_close(resumed, trained(tmp_path / "whole", ImageTask()))


def test_the_memory_of_the_other_format_is_planned(tmp_path: Path) -> None:
    """The copy of the images in their new format takes memory beside the images as they come."""
    plans = [trained(tmp_path / name, ImageTask(), micro_batch_size=0, channels_last=name == "last").own_plan
             for name in ("first", "last")]  # fmt: skip
    costs = [plan.limits.training.model.coefficients[-1] for plan in plans if plan.limits is not None]
    image_bytes = 3 * 6 * 7 * 8
    assert costs[1] - costs[0] >= 0.9 * image_bytes


def notices(folder: Path, meter: Meter, task: LineTask | None = None, **training: Any) -> str:
    run, task = line_run(folder, batch_size=20, **training), task or LineTask()
    model = task.build_model().to(Precision.named(run.training.precision).dtype)
    if run.training.channels_last:
        use_channels_last(model)
    planner = Planner(run=run, task=task, model=model, meter=meter, reporter=SilentReporter(), verify=False)
    return "\n".join(planner.make(fixed(0.5)).all_notices)


def card(name: str) -> AbsentGpuMeter:
    return AbsentGpuMeter(usable(find_card(name)))


def test_a_model_without_images_says_that_their_format_has_no_effect(tmp_path: Path) -> None:
    assert "training.channels_last has no effect" in notices(tmp_path, CpuMeter(), channels_last=True)
    assert "channels_last" not in notices(tmp_path, CpuMeter(), ImageTask(), channels_last=True)


def test_the_plan_says_where_tf32_acts(tmp_path: Path) -> None:
    assert "training.tf32 has no effect on a processor" in notices(tmp_path, CpuMeter(), tf32=True)
    assert "training.tf32 has no effect on a simulated GPU" in notices(tmp_path, SimulatedMeter(2**28), tf32=True)
    assert "training.tf32 has no effect in fp64" in notices(tmp_path, card("h100-80gb"), tf32=True, precision="fp64")
    assert "NVIDIA GPUs have it from Ampere on" in notices(tmp_path, card("v100-16gb"), tf32=True)
    assert "with 10 of their 23 bits" in notices(tmp_path, card("h100-80gb"), tf32=True)
    assert "tf32" not in notices(tmp_path, card("h100-80gb"))


@pytest.fixture
def _flags_restored() -> Iterator[None]:
    before = flags()
    yield
    torch.backends.cuda.matmul.fp32_precision = "tf32" if before[0] else "ieee"
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_the_plan_of_a_compiled_run_says_that_it_takes_less_than_predicted(tmp_path: Path) -> None:
    intervals = []
    for mode in ("off", "default", "cudagraphs"):
        run, task = line_run(tmp_path, batch_size=20, compile=mode), LineTask()
        planner = Planner(run=run, task=task, model=task.build_model(), meter=card("h100-80gb"),
                          reporter=SilentReporter(), verify=False)  # fmt: skip
        plan = planner.make(fixed(0.5))
        assert plan.limits is not None
        peak, cost = plan.predicted_peak_bytes or 0.0, plan.phase_plan.largest_cost
        least, most = plan.limits.peak_interval(peak, cost)
        intervals.append(((peak - least) / peak, (most - peak) / peak))
        told = "\n".join(plan.all_notices)
        assert ("compiled, it takes up to 20% less" in told) == (mode != "off")
        assert ("the memory that CUDA graphs keep is not predicted" in told) == (mode == "cudagraphs")
        assert RunPlan.from_plain(plan.to_plain()).limits == plan.limits
        (text,) = [text for name, text in plan_details(plan) if name == "predicted peak"]
        assert "of what is usable" in text
        assert plan.limits.saved_share == (0.0 if mode == "off" else 0.2)
    # What is stated is never less than nothing; the upper end stays as it is.
    assert len({above for _, above in intervals}) == 1
    assert all(below == 1.0 for below, _ in intervals)


def flags() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("before", [(False, True), (False, False), (True, True)])
@pytest.mark.usefixtures("_flags_restored")
def test_tf32_is_in_force_in_the_block_alone(before: tuple[bool, bool]) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    with suppress(ValueError), tf32(TrainingSettings(tf32=True), GPU):
        assert flags() == (True, True)
        raise ValueError
    assert flags() == before
    for training, device in ((TrainingSettings(), GPU), (TrainingSettings(tf32=True), torch.device("cpu"))):
        with tf32(training, device):
            assert flags() == before


@pytest.mark.usefixtures("_flags_restored")
def test_tf32_beside_the_newer_names_for_it_is_refused() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with (
        pytest.raises(ConfigError, match=r"training\.tf32 cannot be combined with fp32_precision"),
        tf32(TrainingSettings(tf32=True), GPU),
    ):
        pass


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_on_a_gpu_one_kernel_updates_all_parameters(name: str) -> None:
    training = TrainingSettings(optimizer=name)
    parameters = [nn.Parameter(torch.zeros(3))]
    assert make_optimizer(parameters, training, 0.1, GPU).defaults["fused"] is True
    assert not make_optimizer(parameters, training, 0.1, torch.device("cpu")).defaults["fused"]
    chosen = TrainingSettings(optimizer=name, optimizer_args={"fused": False})
    assert make_optimizer(parameters, chosen, 0.1, GPU).defaults["fused"] is False
    # Its kernel refuses sparse gradients.
    assert make_optimizer(parameters, training, 0.1, GPU, is_sparse=True).defaults["fused"] is False
