"""A task of one's own in processes of their own: killed and resumed, submitted, evaluated."""

import json
import time
from pathlib import Path

import pytest
import torch

from can_train.cli.main import main
from can_train.config.resolved import plain_from_yaml
from fakes.bitwise import assert_same, final_state, losses
from fakes.killed_runs import TIMEOUT_S, finish, finish_killed, only_run
from fakes.own_tasks import write_task

pytestmark = pytest.mark.slow


def line(task: Path) -> tuple[str, ...]:
    return ("--task", f"{task}:MyTask", "--device", "sim:512MiB", "--epochs", "4", "--checkpoint-every", "5")


def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    task = write_task(tmp_path / "mine")
    finish(tmp_path / "whole", tmp_path / "state", *line(task))
    finish_killed(tmp_path / "killed", tmp_path / "other", line(task), at=(5, 15))
    whole, killed = only_run(tmp_path / "whole"), only_run(tmp_path / "killed")
    assert_same(final_state(whole), final_state(killed))
    assert losses(whole) == losses(killed)


SPECTRAL = """
import torch
from torch import nn
import can_train


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
        self.register_buffer("least", torch.zeros(0))

    def forward(self, x):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen += self.training * len(x)
        if not len(self.least):
            self.least.resize_(x.shape[1]).fill_(torch.inf)
        self.least.copy_(torch.minimum(self.least, x.amin(dim=0)))
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8)


class MyTask(can_train.Task):
    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        return {name: list(torch.randn(60, 8, generator=generator)) for name in ("train", "validation", "test")}

    def model(self):
        return Filter()

    def loss(self, model, batch):
        return {"error": ((model(batch) - batch.roll(1, 1)).square().sum(), len(batch))}
"""


def test_complex_weights_and_buffers_of_the_first_pass_are_resumed_and_evaluated(tmp_path: Path) -> None:
    task = write_task(tmp_path / "mine", SPECTRAL)
    words = (*line(task), "--set", "training.batch_size=16", "--keep", "last")
    finish(tmp_path / "whole", tmp_path / "state", *words)
    finish_killed(tmp_path / "killed", tmp_path / "other", words, at=(5, 10))
    whole, killed = only_run(tmp_path / "whole"), only_run(tmp_path / "killed")
    assert_same(final_state(whole), final_state(killed))
    weights = final_state(whole)["model"]
    assert (weights["weight"].dtype, int(weights["seen"])) == (torch.complex64, 4 * 60)
    assert weights["least"].shape == (8,)
    finish(tmp_path / "whole", tmp_path / "state", "evaluate", whole.name)


def test_a_submitted_run_has_the_code_as_it_was_and_is_evaluated_with_it(tmp_path: Path) -> None:
    task, state = write_task(tmp_path / "mine"), tmp_path / "state"
    (task.parent / "data.csv").write_text("1,2,3\n")
    finish(tmp_path, state, *line(task), "--submit", "--cluster", "local")
    # The job has not imported it yet: it would fail.
    task.write_text("raise RuntimeError('edited')\n")
    run = only_run(tmp_path)
    limit = time.monotonic() + TIMEOUT_S
    while not (run / "result.json").exists():
        assert time.monotonic() < limit
        time.sleep(0.2)
    code = Path(plain_from_yaml((run / "config.yaml").read_text())["paths"]["code_dir"])
    assert sorted(path.name for path in code.iterdir() if path.is_file()) == ["helpers.py", "my_file.py"]
    finish(tmp_path, state, "evaluate", run.name)
    finish(tmp_path, state, "resubmit", run.name, "--set", "task.hidden=8", "--cluster", "debug")
    configs = [plain_from_yaml(path.read_text()) for path in (tmp_path / "runs").glob("*/config.yaml")]
    assert sorted(config["settings"]["hidden"] for config in configs) == [8, 32]


def test_a_module_travels_as_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write_task(tmp_path / "package" / "inside")
    task.write_text(task.read_text().replace("from helpers", "from package.inside.helpers"))
    for folder in (task.parent, task.parent.parent):
        (folder / "__init__.py").touch()
    (tmp_path / "beside.py").write_text("raise RuntimeError\n")
    monkeypatch.chdir(tmp_path)
    words = ("--task", "package.inside.my_file:MyTask", "--device", "cpu", "--epochs", "1")
    finish(tmp_path, tmp_path / "state", *words, "--submit", "--cluster", "debug")
    config = plain_from_yaml((only_run(tmp_path) / "config.yaml").read_text())
    assert sorted(path.name for path in Path(config["paths"]["code_dir"]).iterdir()) == ["package"]
    assert json.loads((only_run(tmp_path) / "result.json").read_text())["status"] == "finished"


WIDE = """
import torch
from torch import nn
import can_train


class MyTask(can_train.Task):
    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        make = lambda: (torch.randn(1024, generator=generator), torch.randn(8, generator=generator))
        return {"train": [make() for _ in range(128)], "validation": [make()]}

    def model(self):
        layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())]
        return nn.Sequential(*layers, nn.Linear(1024, 8))

    def loss(self, model, batch):
        x, y = batch
        return {"error": ((model(x) - y).square().mean(1).sum(), len(x))}
"""


def test_a_batch_fits_at_once_where_no_sample_fits_beside_the_gradients_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path / "mine", WIDE)
    # Weights and their gradients take 32 MiB each, the optimizer's state 64; a batch in parts has gradients twice.
    line = ("--task", f"{task}:MyTask", "--device", "sim:160MiB", "--epochs", "1", "--batch-size", "64")
    line += ("--micro-batch", "fastest")
    finish(tmp_path / "runs", tmp_path / "state", *line)
    result = json.loads((only_run(tmp_path / "runs") / "result.json").read_text())
    assert (result["plan"]["rung"], result["ooms_rescued"]) == (
        result["plan"]["rung"] | {"offload_optimizer": False},
        0,
    )
    # No step tries smaller micro-batches, which would not fit.
    assert (result["plan"]["plan"]["most_parts"], result["plan"]["micro_batch"]) == (1, None)
    assert result["predicted_peak_bytes"] == pytest.approx(result["peak_memory_bytes"], rel=0.01)
    assert main((*line, "--dry-run", "--state-dir", str(tmp_path / "other"))) == 0
    planned = capsys.readouterr().out
    assert "A step is computed at once, in one micro-batch." in planned
    assert "waits on the host" not in planned
