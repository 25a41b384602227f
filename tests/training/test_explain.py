"""The parts of the peak of a run's training step, and the changes that shrink it."""

import json
import os
import re
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from can_train.cli.main import main
from can_train.config.compose import RunRequest, resolve
from can_train.config.settings import TrainingSettings
from can_train.errors import RUN_FAILED, ConfigError
from can_train.fit.prediction import ChunkedCrossEntropy, TaskStep
from can_train.memory.allocation_trace import DATA, FIXED, GROWING, SAVED, AllocationTrace
from can_train.memory.catalogue import find_card
from can_train.memory.cuda_library import NoCudaDispatchError, compiled_library
from can_train.reporter import SilentReporter
from can_train.runs.run_folder import RunFolder
from can_train.training.explain import _update_in_place, explain_attempt
from can_train.training.loading import sample_task
from can_train.training.report import part_lines
from fakes.trained_runs import finished_run

LINE = ("explain", "--model", "gat", "--size", "student", "--dataset", "synthetic", "--batch-size", "64")
SIMULATED = (*LINE, "--device", "sim:64MiB")


@pytest.fixture
def dispatched() -> None:
    try:
        compiled_library()
    except NoCudaDispatchError as error:
        pytest.skip(f"CUDA's dispatch cannot be had here: {error.value}")


@pytest.fixture
def explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def explain(*line: str) -> dict[str, Any]:
        assert main((*line, "--state-dir", str(tmp_path), "--json")) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return explain


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A line explained on the simulated GPU, for tests that only read it."""
    printed = StringIO()
    with redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAN_TRAIN_CONFIG", os.devnull)
        assert main((*SIMULATED, "--state-dir", str(tmp_path_factory.mktemp("simulated")), "--json")) == 0
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def check(found: dict[str, Any]) -> None:
    assert sum(part["num_bytes"] for part in found["parts"]) == found["peak_bytes"] == sum(found["kinds"].values())
    assert not {FIXED, GROWING} & found["kinds"].keys()
    assert found["savings"]
    assert all(0 < saving["num_bytes"] < found["peak_bytes"] for saving in found["savings"])


TASKS = {
    "can": {"model": "gat", "size": "student"},
    "seq2seq": {"task": "seq2seq"},
    "bendr": {"task": "bendr"},
    "tracknet": {"task": "tracknet"},
    "muon": {"task": "muon"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_the_parts_of_every_tasks_step_add_up(name: str, dispatched: None, tmp_path: Path) -> None:
    request: dict[str, Any] = TASKS[name]
    run = resolve(RunRequest(dataset="synthetic", values={"paths.state_dir": str(tmp_path)}, **request))
    task = sample_task(run, SilentReporter())
    step = TaskStep(task=task, batch=np.resize(task.train_rows, 2), training=run.training, num_parts=2)
    found = step.on_card(find_card("a100-40gb"))
    assert sum(part.num_bytes for part in found.parts) == found.peak_bytes
    assert len({part.module for part in found.parts}) > 3


def test_a_line_is_explained_on_the_simulated_gpu(simulated: dict[str, Any]) -> None:
    found = simulated
    check(found)
    assert (found["device"], found["micro_batches"]) == ("sim-64mib", 1)
    assert any(part["module"].startswith("layers.") for part in found["parts"] if part["kind"] == SAVED)
    changes = {saving["change"]: saving for saving in found["savings"]}
    assert changes["--fit recompute"]["keeps_gradient"]
    assert changes["--fit offload"]["keeps_gradient"]
    assert not changes["--precision bf16"]["keeps_gradient"]


def test_a_change_saves_as_much_as_the_step_takes_less_with_it(explained: Any, simulated: dict[str, Any]) -> None:
    plain, half = simulated, explained(*SIMULATED, "--precision", "bf16")
    (saving,) = (each for each in plain["savings"] if each["change"] == "--precision bf16")
    # Each plan packs samples of its own.
    per_sample = half["peak_bytes"] / half["samples"] * plain["samples"]
    assert plain["peak_bytes"] - per_sample == pytest.approx(saving["num_bytes"], rel=0.1)
    assert "--precision bf16" not in {each["change"] for each in half["savings"]}


def test_a_line_is_explained_for_a_card_that_is_not_there(explained: Any, dispatched: None) -> None:
    found = explained(*LINE, "--target-gpu", "t4")
    check(found)
    assert found["device"] == "t4-16gb"
    assert found["kinds"]["workspaces"] > 0


def test_the_table_fits_a_narrow_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*SIMULATED, "--state-dir", str(tmp_path), "--quiet")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("saved activations") for line in lines)


def test_a_trained_run_is_explained_by_its_plan(
    explained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ("--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path))
    short = ("--set", "dataset.synthetic.seconds=5", "--epochs", "1", "--no-baselines", "--quiet")
    assert main((*SIMULATED[1:], *short, *runs)) == 0
    capsys.readouterr()
    found = explained("explain", "last", "--runs-dir", str(tmp_path / "runs"), "--quiet")
    check(found)
    assert found["device"] == "sim-64mib"


@pytest.mark.parametrize("flags", [("--submit",), ("--dry-run",), ("--after", "last"), ("--target-memory", "16GiB")])
def test_a_flag_that_explains_nothing_is_refused(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*SIMULATED, *flags)) == ConfigError.exit_code
    assert "has no effect with can-train explain" in " ".join(capsys.readouterr().err.split())


WORDS = """
from dataclasses import dataclass
import can_train, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

class Words(can_train.Task):
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        chunked: bool = False

    def datasets(self):
        words = [torch.randint(0, 2000, (33,), generator=torch.Generator().manual_seed(seed)) for seed in range(60)]
        return {"train": words[:40], "validation": words[40:50], "test": words[50:]}

    def model(self):
        return nn.Sequential(nn.Embedding(2000, 64), nn.Linear(64, 2000))

    def loss(self, model, batch):
        logits, target = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        size = -(-len(target) // 8)
        pairs = list(zip(logits.split(size), target.split(size))) if self.settings.chunked else [(logits, target)]

        def loss(logits, target):
            return F.cross_entropy(logits, target, reduction="sum")

        if self.settings.chunked:
            losses = [checkpoint(loss, *pair, use_reentrant=False) for pair in pairs]
        else:
            losses = [loss(*pair) for pair in pairs]
        return {"word": (torch.stack(losses).sum(), float(len(target)))}
"""


def words(folder: Path) -> Path:
    """Writes the task."""
    path = folder / "words.py"
    path.write_text(WORDS)
    return path


def test_a_loss_in_chunks_saves_as_much_as_it_does_in_the_tasks_code(explained: Any, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(WORDS)
    line = ("explain", "--task", f"{tmp_path / 'words.py'}:Words", "--batch-size", "32", "--micro-batch-size", "32",
            "--device", "sim:512MiB")  # fmt: skip
    plain = explained(*line)
    (saving,) = (each for each in plain["savings"] if each["change"].startswith("cross entropy in 8 chunks"))
    assert saving["keeps_gradient"]
    chunked = explained(*line, "--no-changes", "--set", "task.chunked=true")
    assert plain["peak_bytes"] - saving["num_bytes"] == pytest.approx(chunked["peak_bytes"], rel=0.002)


@pytest.mark.parametrize(
    ("optimizer", "args", "found"),
    [
        ("adamw", {}, {}),
        ("adamw", {"amsgrad": True}, {}),
        ("adamw", {"foreach": True}, {"foreach": False, "fused": True}),
        ("radam", {}, {"foreach": False}),
    ],
)
def test_an_optimizer_that_copies_parameters_may_do_without(
    optimizer: str, args: dict[str, bool], found: dict[str, bool], dispatched: None
) -> None:
    assert _update_in_place(TrainingSettings(optimizer=optimizer, optimizer_args=args)) == found


def test_a_fused_step_is_predicted_to_save_the_copies(explained: Any, tmp_path: Path, dispatched: None) -> None:
    (tmp_path / "words.py").write_text(WORDS)
    line = ("explain", "--task", f"{tmp_path / 'words.py'}:Words", "--batch-size", "1", "--target-gpu", "t4")
    before = explained(*line, "--set", "training.optimizer_args.foreach=true")
    flags = "--set training.optimizer_args.foreach=false --set training.optimizer_args.fused=true"
    (saving,) = (each for each in before["savings"] if each["change"] == flags)
    after = explained(*line, "--no-changes", *flags.split())
    assert before["peak_bytes"] - saving["num_bytes"] == after["peak_bytes"]


def loss_and_gradient(
    logits: torch.Tensor, target: torch.Tensor, num_chunks: int, **options: Any
) -> list[torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    with ChunkedCrossEntropy(num_chunks) if num_chunks > 1 else nullcontext():
        loss = F.cross_entropy(leaf, target, **options)
    loss.sum().backward()
    assert leaf.grad is not None
    return [loss.detach(), leaf.grad]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(21, 7), (5, 7, 4)])
@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.1}, {"weight": torch.ones(7, dtype=torch.float64)}])
def test_a_cross_entropy_in_chunks_has_the_same_gradient(
    reduction: str, shape: tuple[int, ...], more: dict[str, Any]
) -> None:
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=drawn, dtype=torch.float64)
    target = torch.randint(0, 7, (shape[0], *shape[2:]), generator=drawn)
    # Chunks ignore different numbers of targets.
    target[:3] = -100
    whole, chunked = (loss_and_gradient(logits, target, chunks, reduction=reduction, **more) for chunks in (1, 4))
    for first, second in zip(whole, chunked, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)


def test_a_mean_over_chunks_would_be_another_gradient() -> None:
    logits, target = torch.randn(8, 3, dtype=torch.float64), torch.tensor([-100, -100, -100, 0, 1, 2, 0, 1])
    _, whole = loss_and_gradient(logits, target, 1)
    leaf = logits.clone().requires_grad_()
    pairs = zip(leaf.split(4), target.split(4), strict=True)
    torch.stack([F.cross_entropy(*pair) for pair in pairs]).mean().backward()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(leaf.grad, whole)


TITLE = "Its largest parts:"


def test_a_plan_with_v_names_the_largest_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*SIMULATED[1:], "--dry-run", "-v", "--state-dir", str(tmp_path))) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.endswith(TITLE))
    assert all("MiB  " in line for line in lines[first + 1 : first + 6])
    # The plan predicts the peak whose parts these are.
    (peak,) = (float(line.split()[2]) for line in lines if line.strip().startswith("predicted peak"))
    assert float(lines[first].split(" peaks at ")[1].split()[0]) == pytest.approx(peak, rel=0.05)


ROWS = """
import torch
from torch import nn
import can_train

class Rows(can_train.Task):
    training = {"lr_batch_size": 32, "epochs": 1}

    def datasets(self):
        generator = torch.Generator().manual_seed(0)
        rows = [*torch.randn(1000, 1024, generator=generator)]
        return {"train": rows[:900], "validation": rows[900:]}

    def model(self):
        return nn.Linear(1024, 2)

    def loss(self, model, batch):
        return {"error": (model(batch).square().sum(), len(batch))}
"""


def test_data_that_live_on_the_device_are_a_part_of_the_peak_that_a_plan_predicts(
    tmp_path: Path, explained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.py").write_text(ROWS)
    line = ("--task", f"{tmp_path / 'rows.py'}:Rows", "--device", "sim:64MiB")
    on_device = explained("explain", *line)
    off = explained("explain", *line, "--set", "training.data_on_device=off")
    data_bytes = 1000 * 1024 * 4
    check(on_device)
    assert on_device["parts"][0] == {"kind": DATA, "module": "", "operation": "", "num_bytes": data_bytes}
    assert on_device["savings"][0] == {
        "change": "--set training.data_on_device=off", "num_bytes": data_bytes, "keeps_gradient": True
    }  # fmt: skip
    assert DATA not in off["kinds"]
    assert on_device["peak_bytes"] - off["peak_bytes"] == data_bytes
    runs = tmp_path / "runs"
    assert main((*line, "-v", "--runs-dir", str(runs), "--state-dir", str(tmp_path))) == 0
    printed = capsys.readouterr().err
    assert f"  {data_bytes / 2**20:.1f} MiB  {DATA}" in printed
    predicted, parts = (
        re.findall(rf"{words} ([0-9.]+) MiB", printed) for words in ("predicted to peak at", "peaks at")
    )
    assert float(parts[0]) == pytest.approx(float(predicted[0]), rel=0.02)
    (run,) = runs.iterdir()
    written = json.loads((run / "memory_parts.json").read_text())
    assert written["peak_bytes"] == on_device["peak_bytes"]


PADDED = """
import can_train, torch
from torch import nn

class Padded(can_train.Task):
    training = {"lr_batch_size": 24, "epochs": 1}

    def datasets(self):
        samples = [torch.ones(200 if row == 5 else 14 + row % 4, 64) for row in range(80)]
        return {"train": samples[:72], "validation": samples[72:]}

    def model(self):
        return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))

    def loss(self, model, batch):
        return {"error": (model(batch).square().sum(), len(batch))}
"""


def test_the_costliest_micro_batch_of_padded_samples_is_the_one_that_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "padded.py").write_text(PADDED)
    line = ("--task", f"{tmp_path / 'padded.py'}:Padded", "--device", "sim:24MiB", "--batch-size", "24", "-v")
    folders = ("--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path), "--accumulation-target-mib", "1")
    assert main((*line, *folders)) == 0
    printed = capsys.readouterr().err
    (predicted,) = re.findall(r"predicted to peak at ([0-9.]+) MiB", printed)
    (explained,) = re.findall(r"peaks at ([0-9.]+) MiB", printed)
    assert float(explained) == pytest.approx(float(predicted), rel=0.02)


def test_an_out_of_memory_that_ends_a_run_names_the_largest_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (*LINE[1:-1], "256", "--micro-batch-size", "256", "--no-adaptive-micro-batch", "--device", "sim:24MiB",
            "--set", "dataset.synthetic.seconds=5", "--runs-dir", str(tmp_path / "runs"), "--json")  # fmt: skip
    assert main((*line, "--state-dir", str(tmp_path))) == RUN_FAILED
    found = capsys.readouterr()
    error = json.loads(found.out)["error"]
    assert error["parts"][0].endswith(TITLE)
    assert len(error["parts"]) == 1 + 5
    assert error["parts"][1] in found.err
    (run,) = (tmp_path / "runs").iterdir()
    written = json.loads((run / "memory_parts.json").read_text())
    assert written["samples"] == 256
    assert sum(part["num_bytes"] for part in written["parts"]) == written["peak_bytes"] > 24 * 2**20
    # The record of the attempt has the error in one line.
    (ended,) = (run / "attempts").glob("*-ended*.json")
    assert TITLE not in ended.read_text()


def test_a_step_that_fits_nowhere_is_explained_on_each_rung(explained: Any, tmp_path: Path) -> None:
    deep = "[nn.Embedding(2000, 64), *[nn.Linear(64, 64) for _ in range(6)], nn.Linear(64, 2000)]"
    code = WORDS.replace("nn.Embedding(2000, 64), nn.Linear(64, 2000)", f"*{deep}").replace("(33,)", "(330,)")
    (tmp_path / "words.py").write_text(code)
    line = ("explain", "--task", f"{tmp_path / 'words.py'}:Words", "--batch-size", "2", "--no-changes", "--device")
    fitting, larger = explained(*line, "sim:64MiB"), explained(*line, "sim:4MiB")
    assert fitting["rungs"] == {}
    assert (fitting["rung"], fitting["computed"]) == ("split", "batches are split")
    rungs, peak = larger["rungs"], larger["peak_bytes"]
    assert [*rungs] == ["recompute", "offload", "offload-optimizer", "offload-all"]
    assert rungs["offload-all"] < rungs["offload"] <= rungs["recompute"] < peak
    assert part_lines(larger)[-1].endswith(" MiB  offload-all")


def test_the_rung_of_a_plan_and_no_change_without_a_saving_are_told(
    explained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words.py").write_text(WORDS.replace("(33,)", "(330,)"))
    line = ("explain", "--task", f"{tmp_path / 'words.py'}:Words", "--batch-size", "2", "--device", "sim:64MiB")
    line = (*line, "--fit", "offload-optimizer")
    found = explained(*line)
    assert (found["rung"], found["rung_is_asked"]) == ("offload-optimizer", True)
    # Nothing is shown as 0.00 MiB.
    assert min(saving["num_bytes"] for saving in found["savings"]) >= 0.005 * 2**20
    assert main((*line, "--no-changes", "--state-dir", str(tmp_path))) == 0
    assert "It is on rung offload-optimizer: the optimizer's state waits on the host." in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_weights_are_explained_in_the_precision_that_trains(explained: Any, tmp_path: Path, precision: str) -> None:
    task = tmp_path / "dense.py"
    task.write_text(
        "import can_train, torch\n"
        "class Dense(can_train.Task):\n"
        "    def datasets(self): return {'train': [(torch.ones(8), 1.0)] * 16}\n"
        "    def model(self): return torch.nn.Linear(8, 100, bias=False)\n"
        "    def loss(self, model, batch): return {'loss': (model(batch[0]).square().sum(), len(batch[1]))}\n"
    )
    found = explained("explain", "--task", f"{task}:Dense", "--device", "sim:64MiB", "--precision", precision)
    assert found["kinds"]["weights"] == 800 * (8 if precision == "fp64" else 4)


def test_the_gradients_of_a_part_are_alive_beside_those_of_earlier_parts(
    explained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.py").write_text(ROWS.replace("nn.Linear(1024, 2)", "nn.Linear(1024, 1024)"))
    settings = ("training.data_on_device=off", "training.optimizer_args={momentum:0}")
    line = ("--task", f"{tmp_path / 'rows.py'}:Rows", "--device", "sim:64MiB", "--micro-batch-size", "16",
            "--optimizer", "sgd", *(word for setting in settings for word in ("--set", setting)),
            "--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path))  # fmt: skip
    assert main((*line, "--quiet")) == 0
    capsys.readouterr()
    (path,) = tmp_path.glob("runs/*/result.json")
    found = explained("explain", *line[:-4])
    check(found)
    assert found["peak_bytes"] == pytest.approx(json.loads(path.read_text())["peak_memory_bytes"], rel=0.01)
    assert found["kinds"]["gradients"] >= 2 * 1024 * 1024 * 4


@pytest.mark.slow
def test_a_run_that_starts_with_v_trains_to_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = (*SIMULATED[1:], "--epochs", "1", "--set", "dataset.synthetic.seconds=5")
    results = []
    for name, more in (("plain", ()), ("verbose", ("-v",))):
        runs = tmp_path / name
        assert main((*line, *more, "--runs-dir", str(runs), "--state-dir", str(tmp_path / f"{name}-state"))) == 0
        (run,) = runs.iterdir()
        results.append(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["validation_loss"])
        assert (run / "memory_parts.json").is_file() == (name == "verbose")
        assert (TITLE in capsys.readouterr().err) == (name == "verbose")
    assert results[0] == results[1]


@pytest.mark.slow
def test_the_step_of_a_run_on_a_gpu_is_recorded_in_another_process(dispatched: None) -> None:
    folder = RunFolder(finished_run("gat"))
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), key="t4-16gb")
    untouched: Any = None
    lines = explain_attempt(untouched, folder, untouched, on_gpu)
    assert lines[0].endswith(TITLE)
    # A process that fails is no error of the run.
    unknown: Any = SimpleNamespace(device=torch.device("cuda"), key="nobodys-gpu")
    assert explain_attempt(untouched, folder, untouched, unknown) == []


def test_parts_that_do_not_add_up_are_noticed(explained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("explain", "--task", f"{words(tmp_path)}:Words", "--batch-size", "8", "--device", "sim:512MiB")
    check(explained(*line))
    monkeypatch.setattr(AllocationTrace, "_at_peak", lambda self, settings: iter(()))
    with pytest.raises(AssertionError):
        check(explained(*line))
