"""A task of one's own, in a folder outside the checkout: named on the command line, trained, and its errors."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import pytest

from can_train.cli.main import main
from can_train.config.compose import RunRequest, changed_settings, from_plain, resolve, with_changes
from can_train.config.resolved import ResolvedRun, plain_from_yaml, plain_to_yaml
from can_train.errors import ConfigError
from can_train.io.records import open_to_append
from can_train.runs import recording
from fakes.own_tasks import CLASSIFIER, PADDED, TAILED, write_task


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    return write_task(tmp_path / "mine")


def only_config(folder: Path) -> dict:
    (run,) = (folder / "runs").iterdir()
    return plain_from_yaml((run / "config.yaml").read_text())


LINE = ("--device", "sim:512MiB", "--epochs", "1")


def test_a_class_in_a_file_trains_under_a_key_of_its_own(own: Path, tmp_path: Path, capsys) -> None:
    assert main(("--task", "mine/my_file.py:MyTask", *LINE, "--set", "model.hidden=8", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    config = only_config(tmp_path)
    assert config["task"] == "my_file.py:MyTask"
    assert config["paths"]["code_dir"] == str(tmp_path / "mine")
    assert (config["settings"], config["training"]["lr_batch_size"]) == ({"hidden": 8}, 32)
    assert "-my_task-" in result["run_id"]
    assert main(("show", "last")) == 0
    assert "accuracy" in capsys.readouterr().out


def test_a_plan_of_it_names_no_model_and_no_data_set(own: Path, tmp_path: Path, capsys) -> None:
    assert main(("--task", f"{own}:MyTask", "--device", "sim:512MiB", "--dry-run", "--target-gpu", "t4")) == 0
    assert "my_task: 200 training samples" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("seed", ["0", "1"])
def test_the_predicted_peak_is_that_of_all_epochs(own: Path, tmp_path: Path, seed: str) -> None:
    write_task(own.parent, TAILED)
    assert main(("--task", "mine/my_file.py:MyTask", "--device", "sim:512MiB", "--seed", seed)) == 0
    (finished,) = tmp_path.glob("runs/*/result.json")
    result = json.loads(finished.read_text())
    assert result["peak_memory_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.01)


@pytest.mark.parametrize(
    ("lengths", "depends"),
    [("[8 + number % 33 for number in range(1000)]", True), ("[600, *[8] * 255]", True), ("[8] * 256", False)],
    ids=["many of each length", "one long sample", "one length"],
)
def test_a_loss_that_depends_on_the_padding_is_told(own: Path, capsys, lengths: str, depends: bool) -> None:
    write_task(own.parent, PADDED.replace("LENGTHS", lengths))
    line = ("--task", "mine/my_file.py:MyTask", "--device", "sim:1GiB", "--accumulation-splits", "2", "--dry-run")
    assert main(line) == 0
    said = capsys.readouterr()
    assert ("change the gradient of square" in " ".join((said.out + said.err).split())) == depends


def test_samples_of_different_length_that_live_on_the_device_are_resumed(own: Path, tmp_path: Path) -> None:
    write_task(own.parent, PADDED.replace("LENGTHS", "[3 + number % 7 for number in range(200)]"))
    line = ("--task", "mine/my_file.py:MyTask", "--device", "sim:64MiB", "--epochs", "1", "--quiet")
    losses, lives_there = [], []
    for place in ("auto", "off"):
        runs = tmp_path / place
        assert main((*line, "--set", f"training.data_on_device={place}", "--runs-dir", str(runs))) == 0
        assert main(("resume", "last", "--epochs", "3", "--runs-dir", str(runs), "--quiet")) == 0
        (run,) = runs.glob("*/result.json")
        losses.append(json.loads(run.read_text())["best_validation_loss"])
        lives_there.append(json.loads((run.parent / "plan.json").read_text())["data"]["on_device"])
    assert lives_there == [True, False]
    assert losses[0] == losses[1]


def test_a_run_whose_code_is_gone_is_still_listed_and_shown(own: Path, tmp_path: Path, capsys) -> None:
    assert main(("--task", f"{own}:MyTask", *LINE)) == 0
    own.unlink()
    (tmp_path / "mine" / "helpers.py").unlink()
    capsys.readouterr()
    for words in (("runs",), ("show", "last"), ("status", "last")):
        assert main(words) == 0, capsys.readouterr().err
    assert "my_task" in capsys.readouterr().out
    assert main(("resume", "last", "--epochs", "3")) == 2
    assert "error: There is no such file: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "before", "after", "status"),
    [
        ("datasets", "points = torch.randn(300, ", "points = torch.rondn(300, ", 2),
        ("model", "return nn.Sequential(", "return nn.Sequentiel(", 2),
        ("loss", "reduction=", "reduktion=", 2),
    ],
)
def test_an_error_in_it_comes_with_its_own_lines(
    own: Path, capsys, method: str, before: str, after: str, status: int
) -> None:
    own.write_text(CLASSIFIER.replace(before, after))
    assert main(("--task", f"{own}:MyTask", *LINE)) == status
    said = capsys.readouterr().err
    first, *others = said[said.index("error: ") :].splitlines()
    assert first.startswith(f"error: MyTask.{method} failed: ")
    assert others[0] == "Traceback (most recent call last):"
    assert (
        f'my_file.py", line {1 + own.read_text()[: own.read_text().index(after)].count(chr(10))}, in {method}' in said
    )
    assert all(f'File "{own}"' in line for line in others if line.startswith("  File "))


BODY = 'return {"class": (nn.functional.cross_entropy(model(points), labels, reduction="sum"), len(labels))}'
IN_PLACE = """out = model(points).exp()
        squares = out.square().sum()
        out += 1
        return {"class": (squares, len(labels))}"""
HOOK = """out = model(points)
        out.register_hook(lambda gradient: gradient.no_such_method()) if out.requires_grad else None
        return {"class": (out.square().sum(), len(labels))}"""


def error_of(words: Sequence[str], capsys) -> str:
    assert main(words) in (2, 3)
    told = capsys.readouterr().err
    return told[told.index("error: ") :]


@pytest.mark.parametrize(
    "more", [(), ("--find-batch-size", "off"), ("--dry-run",), ("--dry-run", "--target-gpu", "t4")], ids=" ".join
)
def test_an_error_of_the_backward_pass_comes_without_lines_of_pytorch(own: Path, capsys, more: tuple[str, ...]) -> None:
    own.write_text(CLASSIFIER.replace(BODY, IN_PLACE))
    error = error_of(("--task", f"{own}:MyTask", *LINE, *more), capsys)
    told = "error: The backward pass failed: RuntimeError: one of the variables needed for gradient"
    assert " ".join(error.split()).startswith(told)
    assert "Traceback" not in error


def test_an_error_of_its_own_in_the_backward_pass_comes_with_its_line(own: Path, capsys) -> None:
    own.write_text(CLASSIFIER.replace(BODY, HOOK))
    first, *others = error_of(("--task", f"{own}:MyTask", *LINE), capsys).splitlines()
    assert first.startswith("error: The backward pass failed: AttributeError: 'Tensor' object has no attribute")
    assert [line for line in others if line.startswith("  File ")] == [f'  File "{own}", line 29, in <lambda>']


def test_an_error_of_the_optimizer_comes_without_lines_of_pytorch(own: Path, capsys) -> None:
    layers = "nn.Linear(WIDTH, self.settings.hidden), nn.ReLU()"
    text = CLASSIFIER.replace(layers, "nn.Embedding(2, self.settings.hidden)")
    # After the plan, which would be refused.
    late = "(setattr(model[0], 'sparse', True), model((points[:, 0] > 0).long()))[1]"
    own.write_text(text.replace("model(points)", late))
    decays = ("--optimizer", "sgd", "--set", "training.weight_decay=0.1")
    error = error_of(("--task", f"{own}:MyTask", *LINE, *decays), capsys)
    assert " ".join(error.split()) == (
        "error: The step of the optimizer failed: RuntimeError: add(sparse, dense) is not supported. "
        "Use add(dense, sparse) instead."
    )


LATE = """
        MyTask.calls += 1
        assert MyTask.calls < 200, "too late"
"""


def test_an_error_while_it_trains_ends_a_run_with_three_and_is_told(own: Path, tmp_path: Path, capsys) -> None:
    text = CLASSIFIER.replace('labels = batch\n        return {"class', f'labels = batch{LATE}        return {{"class')
    own.write_text(text + "\n    calls = 0\n")
    assert main(("--task", f"{own}:MyTask", "--device", "cpu", "--epochs", "60", "--json")) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 3
    assert "AssertionError: too late" in error["traceback"]
    (run,) = (tmp_path / "runs").iterdir()
    assert "AssertionError: too late" in (run / "log.txt").read_text()


def test_a_disk_that_is_full_while_it_trains_is_said_with_the_run_and_the_remedy(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "open_to_append", lambda _: Path("/dev/full").open("a"))  # noqa: SIM115
    assert main(("--task", f"{own}:MyTask", "--device", "cpu", "--epochs", "2")) == 3
    error = capsys.readouterr().err
    (run,) = (tmp_path / "runs").iterdir()
    for text in (error, (run / "log.txt").read_text()):
        said = " ".join(text.split())
        assert f"error: A file cannot be written for lack of space: {run}: No space left on device. " in said
        assert f"Free some space; the run goes on with can-train resume {run.name}." in said
        assert "Traceback" not in said


def test_a_run_whose_folder_goes_while_it_trains_is_told_and_its_sweep_goes_on(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = list[Path]()

    def delete_first(path: Path) -> TextIO:
        if not gone:
            gone.append(path.parent)
            shutil.rmtree(path.parent)
        return open_to_append(path)

    monkeypatch.setattr(recording, "open_to_append", delete_first)
    line = ("--task", f"{own}:MyTask", "--device", "cpu", "--epochs", "1", "--set", "training.lr=0.01,0.001", "--json")
    assert main(line) == 3
    (run,) = (tmp_path / "runs").iterdir()
    printed = capsys.readouterr()
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
    error, finished = json.loads(printed.out)
    assert error["error"]["value"] == str(gone[0])
    assert finished["run_id"] == run.name
    said = " ".join(printed.err.split())
    assert f"error: The folder of the run was moved or deleted while it trained: {gone[0]}. Bring it back, " in said
    assert f"can-train resume {gone[0].name}; or train anew." in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("my_fil.py:MyTask", "", "Unknown file in"),
        ("my_file.py", "", "Write my_file.py:MyTask"),
        ("my_file.py:MyTsk", CLASSIFIER, "Valid, nearest first: MyTask"),
        ("my_file.py:MyTask", "class MyTask: pass", "does not derive from can_train.Task"),
        ("my_file.py:MyTask", "import nothing_of_this_name", "my_file.py failed when it was imported: ModuleNotFound"),
        ("my_file.py:MyTask", "def broken(:\n    pass", "my_file.py failed when it was imported: SyntaxError"),
        ("my_file.py:MyTask", "from .beside import x", ": --task mine.my_file:MyTask"),
        ("my_file.py:MyTask", "raise SystemExit(0)", "my_file.py failed when it was imported: SystemExit"),
        ("my_file.py:MyTask", CLASSIFIER.replace("def loss", "def los"), "that every task has: loss"),
        ("my_file.py:MyTask", CLASSIFIER.replace("(frozen=True, kw_only=True)", ""), "Settings must be a frozen"),
        ("my_file.py:MyTask", CLASSIFIER.replace("hidden: int = 32", "hidden: int"), "must have a default: hidden"),
        ("my_file.py:MyTask", CLASSIFIER.replace('"lr"', '"lrr"'), "'lrr'. Nearest of"),
        *(
            ("my_file.py:MyTask", CLASSIFIER.replace("hidden: int = 32", f"hidden: int = 32\n        {line}"), message)
            for line, message in (
                ("q: int = 'abc'", "MyTask.Settings does not fit its type: q: int = 'abc'. Write a default of"),
                ("q: int = 0.5", "MyTask.Settings does not fit its type: q: int = 0.5. Write a default of"),
                ("q: list[int] = __import__('dataclasses').field(default_factory=lambda: ['a'])",
                 "MyTask.Settings does not fit its type: q: list[int] = ['a']. Write a default of"),
                ("q: torch.dtype = torch.float32", "or dataclass: q: torch.dtype = torch.float32. Keep it as text"),
                ("q: __import__('typing').Any = nn.Linear(1, 1)", "or dataclass: q: typing.Any = Linear(in_features=1"),
            )
        ),
        ("mine.my_fil:MyTask", "", "mine.my_fil failed when it was imported: ModuleNotFoundError"),
        ("no_such_package.module:MyTask", "", "There is no such module: 'no_such_package'"),
        ("cann", "", "Unknown task: 'cann'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_task_is_said(own: Path, capsys, monkeypatch, task: str, text: str, message: str) -> None:
    if text:
        own.write_text(text)
    if ".py" in task:
        monkeypatch.chdir(own.parent)
    assert main(("--task", task, "--device", "cpu", "--dry-run")) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_presets_beside_the_file_and_in_a_folder_of_ones_own_are_found(own: Path, tmp_path: Path, capsys) -> None:
    preset = "# @package _global_\ndefaults: [schema@dataset, _self_]\ndataset: {{name: {}}}\ntraining: {{seed: {}}}\n"
    for folder, seed in ((own.parent / "configs", 7), (tmp_path / "others", 8)):
        for name in ("small", "large"):
            (folder / "dataset").mkdir(parents=True, exist_ok=True)
            (folder / "dataset" / f"{name}.yaml").write_text(preset.format(name, seed))
    line = ("--task", f"{own}:MyTask", "--device", "cpu", "--dry-run", "--show-config", "--json")
    assert main(line) == 2
    assert "--dataset is missing" in capsys.readouterr().err
    assert main((*line, "--dataset", "small")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["config"]["dataset"]["name"], plan["config"]["training"]["seed"]) == ("small", 7)
    assert main((*line, "--dataset", "large", "--config-dir", str(tmp_path / "others"))) == 0
    assert json.loads(capsys.readouterr().out)["config"]["training"]["seed"] == 8
    assert main((*line, "--dataset", "small", "--config-dir", "nowhere")) == 2


def test_a_setting_of_the_task_is_named_with_task(own: Path, capsys) -> None:
    line = ("--task", f"{own}:MyTask", "--device", "cpu", "--dry-run", "--json")
    for words in (("--set", "task.hidden=8"), ("--model-args", "hidden=8"), ("--set", "model.hidden=8")):
        assert main((*line, *words)) == 0
        assert json.loads(capsys.readouterr().out)["config"]["settings"] == {"hidden": 8}
    for words in (("--set", "task.hiden=8"), ("--set", "task.hidden=many")):
        assert main((*line, *words)) == 2
        assert "task.hidden" in capsys.readouterr().err


TYPED = CLASSIFIER.replace("hidden: int = 32", """hidden: int = 32
        kind: Literal["gcn", "gat"] = "gcn"
        depth: Literal[1, 2] | None = None
        rates: tuple[float, ...] = (0.1, 0.2)
        table: dict[str, int] = field(default_factory=lambda: {"a": 1})""").replace(
    "import dataclass", "import dataclass, field\nfrom typing import Literal"
)  # fmt: skip


def typed(own: Path, *sets: str) -> ResolvedRun:
    own.write_text(TYPED)
    return resolve(RunRequest(task=f"{own}:MyTask", sets=sets))


def test_settings_have_the_types_of_their_fields_also_once_they_are_read_back(own: Path) -> None:
    for sets in (("task.table={a:3,b:2}",), ("task.table.a=3", "task.table.b=2")):
        run = typed(own, *sets, "task.kind=gat", "task.rates=[0.5]", "task.depth=2")
        for settings in (run.settings, from_plain(plain_from_yaml(plain_to_yaml(run.config))).settings):
            assert (settings.kind, settings.rates, settings.depth) == ("gat", (0.5,), 2)
            assert settings.table == {"a": 3, "b": 2}
        again = with_changes(run.config, ("task.table.c=4",), {})
        assert again.settings.table == {"a": 3, "b": 2, "c": 4}
    assert {"value": 2, "default": None} in (changed_settings(run.config) or {}).values()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("task.kind=xyz", "Unknown value of task.kind: 'xyz'. Valid: gat, gcn"),
        ("task.depth=3", "Unknown value of task.depth: '3'. Valid: 1, 2"),
        ("task.table={b:x}", "task.table.b must be a whole number: 'x'"),
        ("task.tabel.b=2", "Unknown setting: 'task.tabel.b'"),
        ("task.table.b.c=2", "Unknown setting: 'task.table.b.c'"),
    ],
)
def test_a_setting_of_another_value_than_its_type_has_is_refused(own: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        typed(own, setting)
    assert message in " ".join(str(raised.value).split())


def test_a_task_without_pipelines_is_told_so(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("pipeline", "--task", f"{own}:MyTask")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "This task has no pipelines: there is no preset pipeline/standard.yaml. Train it without" in said


def test_a_sweep_of_its_settings_is_several_runs(own: Path, tmp_path: Path, capsys) -> None:
    assert main(("--task", f"{own}:MyTask", *LINE, "--set", "task.hidden=4,8", "--quiet")) == 0
    hidden = sorted(plain_from_yaml((run / "config.yaml").read_text())["settings"]["hidden"]
                    for run in (tmp_path / "runs").iterdir())  # fmt: skip
    assert hidden == [4, 8]
    capsys.readouterr()
    assert main(("runs",)) == 0
    assert "hidden=4" in capsys.readouterr().out


def test_a_task_with_one_model_is_not_asked_for_it_and_can_is(capsys) -> None:
    assert main(("--dataset", "synthetic")) == 2
    assert "--model is missing" in capsys.readouterr().err


def test_a_negative_denominator_is_not_trained(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own.write_text(CLASSIFIER.replace('="sum"), len(labels))', '="sum"), -len(labels))'))
    assert main(("--task", f"{own}:MyTask", "--device", "cpu")) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "The denominator of a loss term must not be negative: 'class' has -32 in " in said
