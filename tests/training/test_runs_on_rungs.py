"""Trainings whose largest sample does not fit by splitting alone: the plan's rung, its peak, and the same weights."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any, Final

import pytest

import can_train
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import with_absolute_paths
from can_train.errors import ConfigError, DoesNotFitError
from can_train.fit.rungs import Rung
from can_train.reporter import Reporter, SilentReporter
from can_train.training.train import train_new
from fakes.bitwise import assert_same, final_state, losses
from fakes.killed_runs import finish, finish_killed, only_run
from fakes.line_fit import Notices

DEEP: Final = """
import torch
from torch import nn

import can_train


class Block(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Deep(can_train.Task):
    training = {"lr_batch_size": 2, "epochs": 1, "min_steps_per_epoch": 1, "optimizer": "sgd"}

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        samples = [(torch.randn(1200, 32, generator=generator),) for _ in range(8)]
        return {"train": samples[:4], "validation": samples[4:6], "test": samples[6:]}

    def model(self):
        return nn.Sequential(*[
            Block(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Dropout(0.1))
            for _ in range(16)
        ])

    def loss(self, model, batch):
        return {"square": (model(batch[0]).square().mean((1, 2)).sum(), len(batch[0]))}
"""
"""A step of one sample takes 26 MiB, 6 MiB if blocks are computed again, 4 MiB if saved tensors are offloaded, too."""

RUNGS: Final = {"split": "40MiB", "recompute": "8MiB", "offload": "7MiB"}


def task_file(folder: Path, text: str = DEEP) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "deep.py").write_text(text)
    return folder / "deep.py"


class Searches(SilentReporter):
    """Counts the searches for what fits."""

    def __init__(self) -> None:
        self.count = 0

    def stage(self, title: str, **options: Any) -> Any:
        self.count += title == "finding what fits in memory"
        return super().stage(title, **options)


def train(folder: Path, device: str, reporter: Reporter | None = None, text: str = DEEP, **settings: Any) -> Path:
    """Trains in single samples, and returns the folder of the run."""
    values = {
        "paths.runs_dir": str(folder / "runs"), "paths.state_dir": str(folder / "state"),
        "training.accumulation_splits": 2, "training.num_workers": "0",
    }  # fmt: skip
    named = {f"training.{name}": value for name, value in settings.items()}
    request = RunRequest(task=f"{task_file(folder, text)}:Deep", device=f"sim:{device}", values=values | named)
    return train_new(with_absolute_paths(resolve(request)), reporter or SilentReporter()).folder.path


def plan_of(run: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return plan


Finished = Callable[[str], tuple[Path, Searches]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Returns the run that is the first on a rung, which tests share, and the searches that it took."""

    @cache
    def run(rung: str) -> tuple[Path, Searches]:
        reporter = Searches()
        return train(tmp_path_factory.mktemp(rung), RUNGS[rung], reporter), reporter

    return run


def name_of(rung: dict[str, Any]) -> str:
    return "offload" if rung["offload"] else "recompute" if rung["recompute"] else "split"


@pytest.mark.parametrize("rung", ["recompute", "offload"])
def test_a_run_trains_on_the_first_rung_that_fits_to_the_same_weights(finished: Finished, rung: str) -> None:
    (run, _), (alone, _) = finished(rung), finished("split")
    assert name_of(plan_of(alone)["rung"]) == "split"
    assert name_of(plan_of(run)["rung"]) == rung
    # The inputs of 16 blocks, and of the loss.
    on_host = 17 * 1200 * 32 * 4 if rung == "offload" else 0
    assert plan_of(run)["saved_on_host_bytes"] == pytest.approx(on_host, rel=0.1)
    one, other = (final_state(path) for path in (run, alone))
    for part in ("model", "optimization", "randomness"):
        assert_same(one[part], other[part])
    # Parts of a validation may be larger on one device.
    assert [line["train"] for line in losses(run)] == [line["train"] for line in losses(alone)]


@pytest.mark.parametrize("rung", ["recompute", "offload"])
def test_the_peak_on_a_rung_is_as_predicted(finished: Finished, rung: str) -> None:
    result = json.loads((finished(rung)[0] / "result.json").read_text())
    assert result["peak_memory_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.01)


def test_no_more_modules_are_computed_again_than_the_largest_sample_needs(tmp_path: Path, finished: Finished) -> None:
    some, every = plan_of(train(tmp_path, "20MiB")), plan_of(finished("recompute")[0])
    assert 0 < len(some["rung"]["recompute"]) < len(every["rung"]["recompute"]) <= 16
    # The tensors of the last block are there when its backward pass begins, in any case.
    assert "15" not in {*some["rung"]["recompute"], *every["rung"]["recompute"]}
    assert 0 < some["rung_saves_bytes"] < every["rung_saves_bytes"]
    assert 0 < some["rung_longer"] < 0.5


def test_the_next_run_begins_on_the_rung_of_the_last_one(tmp_path: Path, finished: Finished) -> None:
    first, searches = finished("recompute")
    copytree(first.parents[1] / "state", tmp_path / "state")
    reporter = Searches()
    assert plan_of(train(tmp_path, RUNGS["recompute"], reporter))["rung"] == plan_of(first)["rung"]
    assert reporter.count == 1 < searches.count


def test_a_model_that_takes_no_single_sample_is_computed_again_as_any_other(tmp_path: Path) -> None:
    means = "model(batch[0]).mean(1), torch.zeros(32), torch.ones(32), None, None, model.training"
    pooled = f"(nn.functional.batch_norm({means}).square().mean(1).sum()"
    text = DEEP.replace("(model(batch[0]).square().mean((1, 2)).sum()", pooled)
    runs = [train(tmp_path / fit, "64MiB", text=text, fit=fit, accumulation_splits=1) for fit in ("split", "recompute")]
    assert name_of(plan_of(runs[1])["rung"]) == "recompute"
    one, other = (final_state(path) for path in runs)
    assert_same(one["model"], other["model"])


SURPRISING: Final = DEEP.replace(
    'return {"square": (model(batch[0])',
    "if model.training and (batch[0][0, 0, 0] == self.datasets()['train'][3][0][0, 0]):\n"
    "            return {'square': (model(batch[0].repeat(1, 2, 1)).square().mean((1, 2)).sum(), len(batch[0]))}\n"
    '        return {"square": (model(batch[0])',
)
"""A sample takes twice as much as its features tell."""


def test_the_next_run_begins_on_the_rung_that_a_run_climbed_to(tmp_path: Path) -> None:
    runs = [train(tmp_path, "36MiB", text=SURPRISING) for _ in range(2)]
    assert [name_of(plan_of(run)["rung"]) for run in runs] == ["split", "recompute"]
    assert [json.loads((run / "result.json").read_text())["ooms_rescued"] for run in runs] == [1, 0]


def test_a_rung_that_was_chosen_by_hand_is_not_the_first_of_later_runs(tmp_path: Path) -> None:
    by_hand, later = (plan_of(train(tmp_path, RUNGS["split"], fit=fit)) for fit in ("offload", "auto"))
    assert [name_of(plan["rung"]) for plan in (by_hand, later)] == ["offload", "split"]


@pytest.mark.parametrize("size", [{}, {"micro_batch_size": 1}], ids=["searched", "fixed"])
def test_a_rung_is_chosen_by_hand(tmp_path: Path, size: dict[str, int]) -> None:
    plan = plan_of(train(tmp_path, RUNGS["split"], fit="recompute", recompute=["[0-3]"], **size))
    assert plan["rung"] == {**asdict(Rung()), "recompute": ["0", "1", "2", "3"]}
    assert plan["rung_is_asked"]


@pytest.mark.parametrize("fit", ["split", "off"])
def test_with_splitting_alone_the_error_names_the_memory(tmp_path: Path, fit: str) -> None:
    with pytest.raises(DoesNotFitError):
        train(tmp_path, RUNGS["recompute"], fit=fit)


WIDE: Final = """
import torch
from torch import nn

import can_train


class Deep(can_train.Task):
    training = {"lr_batch_size": 1, "epochs": 1}

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        samples = [(torch.randn(LENGTH, WIDTH, generator=generator),) for _ in range(24)]
        return {"train": samples[:16], "validation": samples[16:20], "test": samples[20:]}

    def model(self):
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(16)])

    def loss(self, model, batch):
        return {"square": (model(batch[0]).square().mean((1, 2)).sum(), len(batch[0]))}
"""
"""Layers whose weights, and so their gradients and each moment of Adam, take 16 WIDTH² · 4 bytes."""


@pytest.mark.parametrize(
    ("length", "width", "device", "told"),
    [(160, 160, "24MiB", "the data leave the device"), (2, 384, "26MiB", "the optimizer's state waits on the host")],
)
def test_a_run_with_micro_batches_of_a_given_size_makes_room_for_the_optimizers_step(
    tmp_path: Path, length: int, width: int, device: str, told: str
) -> None:
    text = WIDE.replace("LENGTH", str(length)).replace("WIDTH", str(width))
    reporter = Notices()
    one, other = (
        train(tmp_path / size, size, reporter, text, batch_size=1, micro_batch_size=1) for size in ("1GiB", device)
    )
    assert_same(final_state(one)["model"], final_state(other)["model"])
    assert any(told in line for line in reporter.texts)


CHANGING: Final = DEEP.replace(
    "        return x + super().forward(x)",
    "        self.passes = getattr(self, 'passes', iter(range(10**9)))\n"
    "        again = super().forward(x)\n"
    "        return x + again.sigmoid() if next(self.passes) % 2 == 0 else x + again",
)
"""Blocks that save other tensors in each second forward pass."""


def test_where_modules_cannot_be_computed_again_saved_tensors_are_offloaded_alone(tmp_path: Path) -> None:
    run = train(tmp_path, RUNGS["recompute"], text=CHANGING)
    assert plan_of(run)["rung"] == {**asdict(Rung(offload=True)), "recompute": []}


def test_modules_that_were_named_and_cannot_be_computed_again_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save something else the second time"):
        train(tmp_path, RUNGS["split"], text=CHANGING, fit="recompute")


def test_where_no_rung_fits_the_error_says_so(tmp_path: Path) -> None:
    rungs = "recompute and offload and offload-optimizer and offload-all"
    with pytest.raises(DoesNotFitError, match=f"of the device, also with --fit {rungs}"):
        train(tmp_path, "4MiB")


def test_a_dry_run_names_the_rung_for_each_device(tmp_path: Path) -> None:
    plans = can_train.plan(f"--task {task_file(tmp_path)}:Deep --accumulation-splits 2",
                           targets=["sim:40MiB", "sim:8MiB"])  # fmt: skip
    names = [plan["rung"]["name"] for plan in plans.to_plain()["plans"]]
    assert names == ["split", "recompute"]


@pytest.mark.slow
def test_a_killed_run_resumes_on_its_rung_to_the_same_bits(tmp_path: Path) -> None:
    words = ("--task", f"{task_file(tmp_path)}:Deep", "--device", f"sim:{RUNGS['recompute']}", "--epochs", "4",
             "--checkpoint-every", "1")  # fmt: skip
    finish(tmp_path / "whole", tmp_path / "state", *words)
    finish_killed(tmp_path / "killed", tmp_path / "other", words, at=(2, 5))
    whole, killed = only_run(tmp_path / "whole"), only_run(tmp_path / "killed")
    assert_same(final_state(whole), final_state(killed))
    assert losses(whole) == losses(killed)
