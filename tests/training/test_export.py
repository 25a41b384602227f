"""The files of `can-train export`: the weights that validation chose, as other programs read them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from can_train.cli.main import main
from can_train.runs.run_folder import RunFolder
from can_train.training import export
from can_train.training.loading import load_finished
from fakes.own_tasks import write_task

Line = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of a task of one's own."""
    folder = tmp_path_factory.mktemp("exported")
    task = write_task(folder / "code")
    line = ["--task", f"{task}:MyTask", "--device", "cpu", "--epochs", "2", "--quiet",
            "--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state")]  # fmt: skip
    assert main(line) == 0
    (made,) = (folder / "runs").iterdir()
    return made


@pytest.fixture
def line(capsys: pytest.CaptureFixture[str], tmp_path: Path, run: Path) -> Line:
    """Gives the command for the run; returns standard output, or the text of an error."""

    def printed(*words: str | Path, code: int = 0) -> str:
        capsys.readouterr()
        assert main(["export", str(run), *map(str, words), "--state-dir", str(run.parents[1] / "state")]) == code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        wide = [each for each in captured.out.splitlines() if len(each) > 80 and str(tmp_path) not in each]
        assert wide == [] or "--json" in words
        return captured.err if code else captured.out

    return printed


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "MODEL.PT"])
def test_the_file_has_the_weights_that_validation_chose(line: Line, tmp_path: Path, run: Path, name: str) -> None:
    file = tmp_path / name
    text = " ".join(line(file).split())
    assert f"Model: {file}" in text
    assert "4 tensors with 610 numbers" in text
    read = read_weights(file)
    chosen = load_finished(run, RunFolder.config).weights
    assert read.keys() == chosen.keys()
    assert all(torch.equal(read[name], chosen[name]) for name in chosen)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    model.load_state_dict(read)


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix.lower() == ".pt":
        return dict(torch.load(file, weights_only=True))
    with safe_open(str(file), "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict


def test_the_header_of_a_safetensors_file_describes_the_run(line: Line, tmp_path: Path, run: Path) -> None:
    document = json.loads(line(tmp_path / "model.safetensors", "--json"))
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as opened:
        metadata = opened.metadata()
    about = json.loads(metadata["can_train"])
    assert metadata["format"] == "pt"
    assert (about["run_id"], about["task"]) == (run.name, "my_file.py:MyTask")
    assert about["settings"]["task.hidden"] == 32
    assert about["versions"]["torch"] == torch.__version__
    assert about["weights_sha256"] == load_finished(run, RunFolder.config).sha256
    file = tmp_path / "model.safetensors"
    assert document == {**about, "file": str(file), "format": "safetensors", "bytes": file.stat().st_size,
                        "tensors": 4, "numbers": 610}  # fmt: skip


def test_a_file_of_another_ending_gets_the_format_that_is_named(line: Line, tmp_path: Path) -> None:
    line(tmp_path / "model.bin", "--format", "pt")
    assert len(torch.load(tmp_path / "model.bin", weights_only=True)) == 4


def test_an_earlier_file_is_replaced(line: Line, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("an earlier file")
    line(tmp_path / "model.pt")
    assert len(torch.load(tmp_path / "model.pt", weights_only=True)) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["FOLDER/model.bin"], "model.bin has no ending that names a format"),
        (["FOLDER/model.pt", "--format", "safetensor"], "Unknown format: 'safetensor'"),
        (["FOLDER/model.pt", "--format", "safetensors"], "does not go with the ending of the file"),
        (["FOLDER/none/model.pt"], "none is not there: a model needs a file in a writable folder"),
        (["FOLDER"], "has no ending that names a format"),
    ],
)
def test_a_line_that_cannot_work_is_refused_and_leaves_no_file(
    line: Line, tmp_path: Path, words: list[str], expected: str
) -> None:
    text = line(*(word.replace("FOLDER", str(tmp_path)) for word in words), code=2)
    assert expected in text
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_read_back_as_others_are_not_written(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(weights: dict[str, torch.Tensor], file: object) -> None:
        real({name: weight.half() for name, weight in weights.items()}, file)

    real = torch.save
    monkeypatch.setattr(torch, "save", half)
    assert "read back as others" in line(tmp_path / "model.pt", code=2)
    assert list(tmp_path.iterdir()) == []


def test_names_of_wrappers_are_left_out_and_names_of_parts_stay() -> None:
    def names(*given: str) -> list[str]:
        return [*export.plain_weights({name: torch.zeros(1) for name in given})]

    assert names("_orig_mod.a.weight", "_orig_mod.b") == ["a.weight", "b"]
    assert names("module._orig_mod.a", "module.b._checkpoint_wrapped_module.c") == ["a", "b.c"]
    assert names("module.a", "head") == ["module.a", "head"]
    assert names("_orig_mod.a", "a") == ["_orig_mod.a", "a"]


def test_weights_that_share_memory_are_written_each_with_its_own(tmp_path: Path) -> None:
    table = torch.arange(6.0).view(2, 3)
    weights = export.plain_weights({"embedding": table, "output": table, "turned": table.T})
    assert all(weight.is_contiguous() for weight in weights.values())
    assert len({weight.data_ptr() for weight in weights.values()}) == 3
    assert torch.equal(weights["turned"], table.T)
