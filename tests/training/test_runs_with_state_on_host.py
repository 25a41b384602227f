"""Trainings whose optimizer state does not fit on the device: it waits on the host, and the weights are the same."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest

import can_train
from can_train.config.compose import RunRequest, from_plain, resolve
from can_train.config.resolved import with_absolute_paths
from can_train.errors import DoesNotFitError
from can_train.factors.observations import read_records
from can_train.fit.rungs import Rung
from can_train.reporter import Reporter, SilentReporter
from can_train.runs.attempts import StopRequests
from can_train.runs.run_folder import RunFolder
from can_train.training.train import train_new, train_on
from fakes.bitwise import assert_same, final_state, losses
from fakes.killed_runs import command, finish, finish_killed, only_run

WIDE: Final = """
import torch
from torch import nn

import can_train


class Wide(can_train.Task):
    training = {"lr_batch_size": 4, "epochs": 2, "min_steps_per_epoch": 1}

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        samples = [(torch.randn(256, generator=generator),) for _ in range(12)]
        return {"train": samples[:8], "validation": samples[8:10], "test": samples[10:]}

    def model(self):
        return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(20)])

    def loss(self, model, batch):
        return {"square": (model(batch[0]).square().mean(1).sum(), len(batch[0]))}
"""
"""Weights take 5 MiB, as do gradients and each moment of AdamW."""

ALONE, LITTLE = "40MiB", "16MiB"


def task_file(folder: Path, text: str = WIDE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wide.py").write_text(text)
    return folder / "wide.py"


def train(folder: Path, device: str, text: str = WIDE, reporter: Reporter | None = None, **settings: Any) -> Path:
    """Trains, and returns the folder of the run."""
    values = {"paths.runs_dir": str(folder / "runs"), "paths.state_dir": str(folder / "state"),
              "training.num_workers": "0", "training.accumulation_splits": 4}  # fmt: skip
    named = {f"training.{name}": value for name, value in settings.items()}
    request = RunRequest(task=f"{task_file(folder, text)}:Wide", device=f"sim:{device}", values=values | named)
    return train_new(with_absolute_paths(resolve(request)), reporter or SilentReporter()).folder.path


def plan_of(run: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return plan


def assert_same_training(one: Path, other: Path) -> None:
    states = [final_state(path) for path in (one, other)]
    for part in ("model", "optimization", "randomness"):
        assert_same(states[0][part], states[1][part])
    assert [line["train"] for line in losses(one)] == [line["train"] for line in losses(other)]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_whose_state_does_not_fit_trains_to_the_same_weights(tmp_path: Path, optimizer: str) -> None:
    alone, on_host = (train(tmp_path / size, size, optimizer=optimizer) for size in (ALONE, LITTLE))
    assert not plan_of(alone)["rung"]["offload_optimizer"]
    assert plan_of(on_host)["rung"] == {**asdict(Rung(offload_optimizer=True)), "recompute": []}
    assert_same_training(alone, on_host)
    result = json.loads((on_host / "result.json").read_text())
    assert result["peak_memory_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.01)


class Flag(SilentReporter):
    """Makes a file once training begins, for the code of a task."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def stage(self, title: str, **options: Any) -> Any:
        if title == "training":
            self.path.parent.mkdir(exist_ok=True)
            self.path.touch()
        return super().stage(title, **options)


HUNGRY: Final = WIDE.replace(
    '        return {"square"',
    "        from pathlib import Path\n"
    "        grows = Path(__file__).with_name('flag').exists() and model.training\n"
    "        held = [torch.empty(2**18, dtype=torch.uint8) for _ in range(88 * grows)]\n"
    '        return {"square"',
)
"""Holds 22 MiB in each forward pass, once training has begun."""


def test_a_sample_that_runs_out_of_memory_in_mid_run_sends_the_state_to_the_host(tmp_path: Path) -> None:
    alone, reporter = train(tmp_path / "alone", ALONE), Flag(tmp_path / "hungry" / "flag")
    run = train(tmp_path / "hungry", ALONE, HUNGRY, reporter)
    assert not plan_of(run)["rung"]["offload_optimizer"]
    assert [text for text in reporter.notices if "the optimizer's state waits on the host" in text]
    assert_same_training(alone, run)


@pytest.mark.slow
def test_a_run_that_climbed_goes_on_where_it_was(tmp_path: Path) -> None:
    reporter, runs = Flag(tmp_path / "hungry" / "flag"), list[Path]()
    for name, text in (("alone", WIDE), ("hungry", HUNGRY)):
        run = train(tmp_path / name, ALONE, text, reporter, epochs=1)
        with command(tmp_path / name, tmp_path / name / "state", "resume", run.name, "--epochs", "2") as process:
            assert process.wait() == 0, process.stderr
            assert "memory ran out" not in process.stderr
        runs.append(run)
    assert_same_training(*runs)


def test_without_the_rung_the_run_ends_for_lack_of_memory(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError):
        train(tmp_path, ALONE, HUNGRY, Flag(tmp_path / "flag"), fit="offload")


@pytest.mark.parametrize("settings", [
    {"precision": "fp16", "grad_clip_norm": 0.5, "ema": 0.9, "optimizer": "adamw"},
    {"optimizer": "adagrad", "grad_noise": 0.1, "scheduler": "plateau", "grad_clip_value": 0.01},
], ids=["fp16", "adagrad"])  # fmt: skip
def test_scalers_clipping_averages_and_schedules_are_those_of_a_plain_run(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    alone, on_host = (train(tmp_path / fit, "64MiB", fit=fit, **settings) for fit in ("split", "offload-optimizer"))
    assert plan_of(on_host)["rung"]["offload_optimizer"]
    assert_same_training(alone, on_host)


def test_where_the_host_has_too_little_memory_the_state_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("can_train.fit.planner.room_bytes", lambda share: share * 2**20)
    with pytest.raises(DoesNotFitError, match=r"it takes 10\.0 MiB, 819 KiB may be used") as refused:
        train(tmp_path, LITTLE)
    # A job is submitted again with more memory of the host.
    assert refused.value.details.of_host


@pytest.mark.parametrize(("device", "told"), [
    ("8MiB", r"they need 20\.6 MiB, the device has 8\.0 MiB; about 11\.1 MiB with --fit offload-optimizer"),
    ("12MiB", r"they need 20\.6 MiB, the device has 12\.0 MiB; with --fit offload-all a batch of one sample"),
])  # fmt: skip
def test_where_the_state_leaves_in_vain_the_error_says_what_the_rung_takes(
    tmp_path: Path, device: str, told: str
) -> None:
    with pytest.raises(DoesNotFitError, match=told):
        train(tmp_path, device)


def test_a_step_that_does_not_fit_with_its_state_on_the_host_is_told_before_it(tmp_path: Path) -> None:
    """A large weight is stepped in one piece: 8.6 MiB of it, as much of gradients and each moment."""
    one_layer = "nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(20)])"
    large = WIDE.replace(one_layer, "nn.Linear(1500, 1500)").replace("randn(256", "randn(1500")
    with pytest.raises(DoesNotFitError, match=r"with --fit offload-optimizer they need 51\.5 MiB, the device"):
        train(tmp_path, "40MiB", large)


def test_a_dry_run_says_for_each_device_where_the_state_waits(tmp_path: Path) -> None:
    plans = can_train.plan(f"--task {task_file(tmp_path)}:Wide --accumulation-splits 4",
                           targets=["sim:18MiB", f"sim:{ALONE}"])  # fmt: skip
    little, alone = (plan["rung"] for plan in plans.to_plain()["plans"])
    assert [little["name"], alone["name"]] == ["offload-optimizer", "split"]
    # The moments of the weights; those of biases are small and stay.
    assert little["state_on_host_bytes"] == 2 * 20 * 2**18


PHASES: Final = """
import torch
from torch import nn

import can_train


class Wide(can_train.Task):
    training = {"lr_batch_size": 4, "epochs": 2, "min_steps_per_epoch": 1}

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        samples = [(torch.randn(256, generator=generator),) for _ in range(12)]
        return {"train": samples[:8], "validation": samples[8:10], "test": samples[10:]}

    def model(self):
        return nn.ModuleDict({name: nn.Sequential(*[nn.Linear(256, 256) for _ in range(10)]) for name in "ab"})

    def phases(self):
        return (can_train.Phase(name="a", parameters=("a",), loss=self.loss_of_a, steps=2),
                can_train.Phase(name="b", parameters=("b",), loss=self.loss, training={"optimizer": "sgd"}))

    def loss_of_a(self, model, batch):
        return {"a": (model["b"](model["a"](batch[0])).square().mean(1).sum(), len(batch[0]))}

    def loss(self, model, batch):
        return {"square": (model["a"](model["b"](batch[0])).square().mean(1).sum(), len(batch[0]))}
"""
"""Two phases with halves of the weights, 2.5 MiB each, and optimizers of different kinds."""


def test_the_state_of_all_phases_waits_on_the_host(tmp_path: Path) -> None:
    alone, on_host = (train(tmp_path / size, size, PHASES) for size in (ALONE, "14MiB"))
    plan = plan_of(on_host)
    assert [phase["rung"]["offload_optimizer"] for phase in (plan, *plan["later"])] == [True, True]
    assert_same_training(alone, on_host)


@pytest.mark.slow
def test_a_killed_run_resumes_with_its_state_on_the_host_to_the_same_bits(tmp_path: Path) -> None:
    words = ("--task", f"{task_file(tmp_path)}:Wide", "--device", f"sim:{LITTLE}", "--epochs", "4",
             "--accumulation-splits", "4", "--checkpoint-every", "1")  # fmt: skip
    finish(tmp_path / "whole", tmp_path / "state", *words)
    finish_killed(tmp_path / "killed", tmp_path / "other", words, at=(2, 5))
    whole, killed = only_run(tmp_path / "whole"), only_run(tmp_path / "killed")
    assert plan_of(whole)["rung"]["offload_optimizer"]
    assert_same_training(whole, killed)
    assert json.loads((killed / "result.json").read_text())["peak_memory_bytes"] <= 16 * 2**20


@pytest.mark.slow
def test_a_run_goes_on_where_its_state_no_longer_fits_to_the_same_bits(tmp_path: Path) -> None:
    runs = [train(tmp_path / size, ALONE, epochs=1) for size in (ALONE, LITTLE)]
    for run, device in zip(runs, (ALONE, LITTLE), strict=True):
        words = ("resume", run.name, "--epochs", "2", "--device", f"sim:{device}")
        with command(run.parent.parent, run.parent.parent / "state", *words) as process:
            assert process.wait() == 0, process.stderr
    assert plan_of(runs[1])["rung"]["offload_optimizer"]
    assert_same_training(*runs)


LATE: Final = """
import torch


class LateOpt(torch.optim.Optimizer):
    def __init__(self, parameters, lr=1e-3, weight_decay=0.0):
        super().__init__(parameters, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                for number in range(6 * (state["steps"] > 2)):
                    state.setdefault(f"average{number}", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                parameter.add_(parameter.grad, alpha=-group["lr"])
"""
"""Keeps six averages of each gradient, 30 MiB, from its third step on."""


def train_late(folder: Path, device: str, reporter: Reporter | None = None, **settings: Any) -> Path:
    # A module of its own: each process imports `wide` once.
    optimizer = task_file(folder).with_name("late_optimizer.py")
    optimizer.write_text(LATE)
    return train(folder, device, reporter=reporter, optimizer=f"{optimizer}:LateOpt", **settings)


def test_after_a_death_in_the_optimizers_step_its_state_waits_on_the_host(tmp_path: Path) -> None:
    alone = train_late(tmp_path / "alone", "64MiB")
    with pytest.raises(DoesNotFitError, match="in the optimizer's step, which cannot be undone: step 2") as died:
        train_late(tmp_path / "late", "30MiB")
    assert "with that state on the host" in died.value.remedy
    resumed = RunFolder(only_run(tmp_path / "late"))
    train_on(from_plain(resumed.config()), resumed, SilentReporter(), StopRequests())
    following = train_late(tmp_path / "late", "30MiB")
    for path in (resumed.path, following):
        assert plan_of(path)["rung"]["offload_optimizer"]
        assert_same_training(alone, path)
    finished = read_records(tmp_path / "late" / "state").finished
    assert [run.outcome for run in finished] == ["oom", "ok", "ok"]
    assert not any(run.teaches_out_of_memory for run in finished)


def test_where_the_state_may_not_leave_the_error_says_how_it_may(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError) as died:
        train_late(tmp_path, "30MiB", fit="split")
    assert died.value.remedy.startswith("Train with --fit offload-optimizer, or take --optimizer sgd")
    assert "MiB by now, 0 KiB were planned" in died.value.value
