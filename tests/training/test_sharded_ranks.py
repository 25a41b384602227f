"""Real processes that share a model out as shards: they train the weights of one process, whatever happens."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from fakes.several_ranks import error_text, run_ranks
from fakes.training_ranks import fit_line, train_task

pytestmark = pytest.mark.slow

EXACT: Final = {
    "deep": True,
    "precision": "fp64",
    "batch_size": 20,
    "micro_batch_size": 3,
    "epochs": 2,
    "scheduler": "constant",
}


def fitted(folder: Path, ranks: int, **options: Any) -> list[dict[str, Any]]:
    """Returns what each of so many ranks came to."""
    folder.mkdir(exist_ok=True)
    assert run_ranks(ranks, fit_line, folder, **options) == [0] * ranks
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]


def relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(
    ("ranks", "training"),
    [
        (2, {}),
        (4, {"micro_batch_size": 2, "grad_clip_norm": 0.5, "ema": "0.9"}),
        (3, {"recompute": ["*"], "optimizer": "sgd"}),
        (4, {"batch_size": 3, "micro_batch_size": 1, "epochs": 1}),
        (2, {"freeze": ["1", "4.bias"], "grad_noise": 0.1, "grad_clip_value": 0.3}),
        (2, {"in_place": True}),
    ],
    ids=[
        "two",
        "four, clipped and averaged",
        "three, recomputed",
        "fewer samples than ranks",
        "frozen, with noise",
        "in place",
    ],
)
def test_shards_train_the_weights_of_one_process(tmp_path: Path, ranks: int, training: dict[str, Any]) -> None:
    settings = {**EXACT, **training}
    (alone,) = fitted(tmp_path / "alone", 1, **settings)
    several = fitted(tmp_path / "several", ranks, fit="shard", **settings)
    for rank in several:
        assert relative_error(rank["weights"], alone["weights"]) <= 1e-12
    assert several[0]["best"].keys() == alone["best"].keys()
    for name, weight in alone["best"].items():
        assert torch.allclose(several[0]["best"][name], weight, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_trains_shards_alike_on_all_ranks(tmp_path: Path, precision: str) -> None:
    settings = {**EXACT, "precision": precision, "epochs": 1, "batch_size": 2, "grad_clip_norm": 1.0}
    (alone,) = fitted(tmp_path / "alone", 1, **settings)
    several = fitted(tmp_path / "several", 3, fit="shard", **settings)
    assert all(torch.equal(rank["weights"], several[0]["weights"]) for rank in several)
    assert relative_error(several[0]["weights"], alone["weights"]) <= 0.02


@pytest.mark.parametrize("where", ["forward", "backward", "little memory"])
def test_an_out_of_memory_on_one_rank_is_repeated_by_all_and_changes_nothing(tmp_path: Path, where: str) -> None:
    (alone,) = fitted(tmp_path / "alone", 1, **EXACT)
    several = fitted(tmp_path / "several", 3, fit="shard", fault=(1, where, 2), **EXACT)
    assert relative_error(several[2]["weights"], alone["weights"]) <= 1e-12
    assert [rank["ooms"][0] > 0 for rank in several] == [False, True, False]


@pytest.mark.parametrize("broken", ["stale gradients", "lost gradients"])
def test_gradients_of_failed_passes_and_of_ranks_without_samples_would_change_the_weights(
    tmp_path: Path, broken: str
) -> None:
    (alone,) = fitted(tmp_path / "alone", 1, **EXACT)
    several = fitted(tmp_path / "several", 3, fit="shard", fault=(1, "backward", 2), broken=broken, **EXACT)
    assert relative_error(several[1]["weights"], alone["weights"]) > 1e-6


def test_samples_that_do_not_fit_on_one_rank_end_all_after_a_checkpoint(tmp_path: Path) -> None:
    options = {**EXACT, "oom_retries": 0, "fault": (1, "no memory", 3)}
    assert run_ranks(3, fit_line, tmp_path, fit="shard", **options) == [3, 3, 3]
    assert error_text(tmp_path, 1).startswith("DoesNotFitError: Memory ran out for samples that may not be split")
    assert "rank 1" in error_text(tmp_path, 0)


@pytest.mark.parametrize(("how", "codes"), [("bug", [3, 1, 3]), ("kill", [3, -9, 3])])
def test_a_rank_that_fails_in_a_pass_ends_all(tmp_path: Path, how: str, codes: list[int]) -> None:
    assert run_ranks(3, fit_line, tmp_path, fit="shard", fault=(1, how, 3), **EXACT) == codes


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_shards_goes_on_with_another_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    settings = {**EXACT, "checkpoint_every": 2}
    (alone,) = fitted(tmp_path / "alone", 1, **settings)
    folder = tmp_path / "several"
    folder.mkdir()
    stopped = run_ranks(4, fit_line, folder, fit="shard", fault=(1, "signal", 4), **settings)
    assert stopped == [143] * 4
    resumed = fitted(folder, ranks, fit="shard" if ranks > 1 else "auto", **settings)
    assert any("Continuing at step" in text for text in resumed[0]["notices"])
    assert relative_error(resumed[0]["weights"], alone["weights"]) <= 1e-12


def test_one_process_alone_cannot_shard(tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    assert run_ranks(1, fit_line, folder, fit="shard", **EXACT) == [2]
    assert "shares a model out to the ranks of a run" in error_text(folder, 0)


@pytest.mark.parametrize("device", ["sim:72MiB", "sim:40MiB"], ids=["split", "recomputed"])
def test_the_peak_of_a_sharded_step_is_predicted(tmp_path: Path, device: str) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    task = f"{tmp_path / 'wide.py'}:Wide"
    assert run_ranks(2, train_task, tmp_path, task=task, devices=[device], fit="shard", accumulation_splits=2,
                     num_workers="0") == [0, 0]  # fmt: skip
    (path,) = tmp_path.glob("runs/*/result.json")
    result = json.loads(path.read_text())
    # Which blocks of equal size are computed again hangs on clocks, and with it 1 % of the peak.
    assert result["predicted_peak_bytes"] == pytest.approx(result["peak_memory_bytes"], rel=0.015)
    assert "sharded over 2 ranks" in "\n".join(torch.load(tmp_path / "outcome-0.pt")[1])
    remembered = [json.loads(path.read_text())["limits"] for path in tmp_path.glob("state/observations/*.json")]
    assert [limits[""]["ranks"] for limits in remembered] == [2, 2]


def test_auto_shards_a_model_that_one_device_holds_without_a_sample(tmp_path: Path) -> None:
    (tmp_path / "large_loss.py").write_text(WIDE[: WIDE.index("class Wide")] + LARGE_LOSS)
    settings = {"optimizer": "sgd", "optimizer_args": {"momentum": 0.0}, "num_workers": "0"}
    task = f"{tmp_path / 'large_loss.py'}:LargeLoss"
    assert run_ranks(2, train_task, tmp_path, task=task, devices=["sim:192MiB"], **settings) == [0, 0]
    (path,) = tmp_path.glob("runs/*/plan.json")
    assert json.loads(path.read_text())["rung"]["ranks"] == 2
    assert json.loads(path.with_name("result.json").read_text())["peak_memory_bytes"] < 192 * 2**20


def test_a_part_that_the_loss_calls_after_the_model_is_gathered_again_and_one_process_goes_on(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    settings: dict[str, Any] = {"precision": "fp64", "num_workers": "0", "scheduler": "constant"}
    weights = []
    for ranks, fit in ((1, "auto"), (2, "shard")):
        folder = tmp_path / fit
        folder.mkdir()
        given = {"task": f"{tmp_path / 'parts.py'}:Parts", "devices": ["sim:64MiB"], "fit": fit, **settings}
        if fit == "shard":
            # It goes on in one process, without shards.
            (tmp_path / "stop").touch()
            assert run_ranks(ranks, train_task, folder, **given) == [143] * ranks
            (tmp_path / "stop").unlink()
        assert run_ranks(1, train_task, folder, **given) == [0]
        (path,) = folder.glob("runs/*/checkpoints/manifest.json")
        newest = path.with_name(json.loads(path.read_text())["checkpoints"][0]["file"])
        weights.append(torch.cat([one.flatten() for one in torch.load(newest)["model"].values()]))
    assert relative_error(weights[1], weights[0]) <= 1e-12


def test_memory_that_runs_out_on_the_last_rung_lets_the_run_go_on_as_shards(tmp_path: Path) -> None:
    (tmp_path / "growing.py").write_text(WIDE[: WIDE.index("class Wide")] + GROWING)
    task = f"{tmp_path / 'growing.py'}:Growing"
    settings: dict[str, Any] = {"precision": "fp64", "num_workers": "0", "oom_retries": 0, "accumulation_splits": 2,
                                "scheduler": "constant", "optimizer": "sgd"}  # fmt: skip
    settings["optimizer_args"] = {"momentum": 0.0}
    weights = []
    for name, ranks, device in (("large", 1, "sim:2GiB"), ("small", 2, "sim:168MiB")):
        (tmp_path / name).mkdir()
        assert run_ranks(ranks, train_task, tmp_path / name, task=task, devices=[device], **settings) == [0] * ranks
        (path,) = tmp_path.glob(f"{name}/runs/*/checkpoints/manifest.json")
        newest = path.with_name(json.loads(path.read_text())["checkpoints"][0]["file"])
        weights.append(torch.cat([one.flatten() for one in torch.load(newest)["model"].values()]))
    assert relative_error(weights[1], weights[0]) <= 1e-12
    told = torch.load(tmp_path / "small" / "outcome-0.pt")[1]
    assert any("memory ran out on the last rung; the run goes on from its checkpoint" in text for text in told)
    # A later attempt, and a later run, begin on the rung that worked.
    (plan,) = tmp_path.glob("small/runs/*/plan.json")
    assert json.loads(plan.read_text())["rung"]["ranks"] == 2
    observed = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("small/state/observations/*.json"))]
    assert [one["outcome"] for one in observed] == ["rescued", "rescued", "ok", "ok"]
    assert [one["limits"][""]["ranks"] for one in observed] == [1, 1, 2, 2]


def test_state_of_shards_that_waits_on_the_host_trains_the_same_weights_also_after_a_stop(tmp_path: Path) -> None:
    stopping = GROWING.replace("self.held = 25 * 2**17 if progress > 0.3 else 1", STOP_ONCE)
    assert stopping != GROWING
    (tmp_path / "stopping.py").write_text(WIDE[: WIDE.index("class Wide")] + stopping)
    task = f"{tmp_path / 'stopping.py'}:Growing"
    settings: dict[str, Any] = {"precision": "fp64", "num_workers": "0", "scheduler": "constant"}
    (tmp_path / "stopped").touch()
    weights = []
    for name, ranks, device in (("large", 1, "sim:2GiB"), ("small", 2, "sim:84MiB")):
        (tmp_path / name).mkdir()
        given = {"task": task, "devices": [device], **settings}
        if name == "small":
            (tmp_path / "stopped").unlink()
            assert run_ranks(ranks, train_task, tmp_path / name, **given) == [143] * ranks
        assert run_ranks(ranks, train_task, tmp_path / name, **given) == [0] * ranks
        (path,) = tmp_path.glob(f"{name}/runs/*/checkpoints/manifest.json")
        newest = path.with_name(json.loads(path.read_text())["checkpoints"][0]["file"])
        weights.append(torch.cat([one.flatten() for one in torch.load(newest)["model"].values()]))
    assert relative_error(weights[1], weights[0]) <= 1e-12
    (plan,) = tmp_path.glob("small/runs/*/plan.json")
    rung = json.loads(plan.read_text())["rung"]
    assert (rung["ranks"], rung["offload_optimizer"]) == (2, True)
    result = json.loads(plan.with_name("result.json").read_text())
    assert result["predicted_peak_bytes"] == pytest.approx(result["peak_memory_bytes"], rel=0.01)


STOP_ONCE: Final = """
        marker = Path(__file__).with_name("stopped")
        if progress > 0.3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)
"""

WIDE: Final = """
import os
import signal
from pathlib import Path

import torch
from torch import nn

import can_train


class Block(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Wide(can_train.Task):
    training = {"lr_batch_size": 4, "epochs": 1, "min_steps_per_epoch": 1}

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        samples = [(torch.randn(768, 192, generator=generator),) for _ in range(8)]
        return {"train": samples[:4], "validation": samples[4:6], "test": samples[6:]}

    def model(self):
        blocks = [Block(nn.LayerNorm(192), nn.Linear(192, 384), nn.GELU(), nn.Linear(384, 192)) for _ in range(8)]
        return nn.Sequential(nn.Linear(192, 192), *blocks, nn.Linear(192, 8))

    def loss(self, model, batch):
        return {"square": (model(batch[0]).square().mean((1, 2)).sum(), len(batch[0]))}
"""

# 80 MiB of weights, as many of gradients, and 60 MiB outside of modules.
LARGE_LOSS: Final = """
class LargeLoss(can_train.Task):
    training = {"lr_batch_size": 4, "epochs": 1, "min_steps_per_epoch": 1}

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        samples = [(torch.randn(64, 512, generator=generator),) for _ in range(8)]
        return {"train": samples[:4], "validation": samples[4:6], "test": samples[6:]}

    def model(self):
        blocks = [Block(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(10)]
        return nn.Sequential(*blocks, nn.Linear(512, 8))

    def loss(self, model, batch):
        repeated = model(batch[0]).repeat(1, 1, 10240)
        return {"sine": (repeated.sin().mean((1, 2)).sum(), len(batch[0]))}
"""

# 40 MiB of weights, as many of gradients, and, after a step, 100 MiB a sample outside of modules.
GROWING: Final = """
class Growing(can_train.Task):
    training = {"lr_batch_size": 4, "epochs": 3, "min_steps_per_epoch": 1}
    held = 1

    def before_step(self, model, rows, progress, generator):
        self.held = 25 * 2**17 if progress > 0.3 else 1

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        samples = [(torch.randn(8, 256, generator=generator),) for _ in range(8)]
        return {"train": samples[:4], "validation": samples[4:6], "test": samples[6:]}

    def model(self):
        blocks = [Block(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(10)]
        return nn.Sequential(*blocks, nn.Linear(256, 8))

    def loss(self, model, batch):
        scores = model(batch[0]).mean((1, 2))
        held = (scores.sin()[:, None] * scores.new_ones(self.held)).exp().mean(1)
        return {"sine": ((scores.square() + held).sum(), len(batch[0]))}
"""


PARTS: Final = """
import os
import signal
from pathlib import Path

import torch
from torch import nn

import can_train


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.body(x)


class Parts(can_train.Task):
    training = {"lr_batch_size": 16, "epochs": 2}

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        samples = [(torch.randn(8, generator=generator), i % 2) for i in range(64)]
        return {"train": samples, "validation": samples[:20]}

    def model(self):
        return Net()

    def before_step(self, model, rows, progress, generator):
        if progress > 0.3 and Path(__file__).with_name("stop").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    def loss(self, model, batch):
        x, y = batch
        return {"square": ((model.head(model(x))[:, 0] - y).square().sum(), len(y))}
"""
