"""The files of `can-train export`: the weights that validation chose, as other programs read them."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import BertForSequenceClassification

import can_train
from can_train.cli.main import main
from can_train.runs.run_folder import RunFolder
from can_train.training import export
from can_train.training.exported_call import Call
from can_train.training.exported_program import Program, onnx_program, trace
from can_train.training.loading import load_finished
from fakes.own_tasks import write_task

Line = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of a task of one's own."""
    folder = tmp_path_factory.mktemp("exported")
    task = write_task(folder / "code")
    line = ["--task", f"{task}:MyTask", "--device", "cpu", "--epochs", "2", "--quiet", "--keep", "1",
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
        (["FOLDER"], "has no model of transformers in it"),
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


def test_a_program_is_written_after_it_was_compared_on_batches_of_other_sizes(line: Line, tmp_path: Path) -> None:
    text = " ".join(line(tmp_path / "model.pt2").split())
    assert "input input float32 batch × 16 output output float32 batch × 2" in text
    assert "on 3 samples, with which it was traced, and on batches of 5, 1, 4, 2, 6: the largest difference" in text
    program = torch.export.load(tmp_path / "model.pt2", extra_files=(extra := {"can_train.json": ""})).module()
    assert program(torch.zeros(7, 16))[0].shape == (7, 2)
    assert json.loads(extra["can_train.json"])["inputs"] == [
        {"name": "input", "dtype": "float32", "shape": ["batch", 16]}
    ]


def test_an_onnx_file_computes_the_model_and_describes_the_run(line: Line, tmp_path: Path, run: Path) -> None:
    document = json.loads(line(tmp_path / "model.onnx", "--json"))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert session.get_inputs()[0].shape == ["batch", 16]
    assert json.loads(session.get_modelmeta().custom_metadata_map["can_train"])["run_id"] == run.name
    assert document["largest_difference"] <= 1e-5
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    model.load_state_dict(load_finished(run, RunFolder.config).weights)
    points = torch.randn(9, 16)
    (result,) = session.run(None, {"input": points.numpy()})
    assert torch.allclose(torch.from_numpy(result), model(points), atol=1e-5)


def test_a_program_that_differs_is_not_written(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(*arguments: Any) -> Any:
        data, compute = onnx_program(*arguments)
        return data, lambda tensors: [value * 1.001 for value in compute(tensors)]

    monkeypatch.setattr(export, "onnx_program", scaled)
    text = line(tmp_path / "model.onnx", code=2)
    assert "it differs by 1.0e-03 of the largest result, more than 1e-05.\nAllow it with --tolerance 2e-03" in text
    assert list(tmp_path.iterdir()) == []
    line(tmp_path / "model.onnx", "--tolerance", "0.1")


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "Install it: pip install 'can-train[export]'" in line(tmp_path / "model.onnx", code=2)
    assert list(tmp_path.iterdir()) == []


PRETRAINED = """
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import can_train


class Texts(can_train.Task):
    training = {"epochs": 1, "lr_batch_size": 8}

    def datasets(self):
        drawn = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 9, (24,), generator=drawn).tolist()
        samples = [{"input_ids": torch.randint(1, 20, (size,), generator=drawn), "label": size % 2} for size in lengths]
        return {"train": samples[:16], "validation": samples[16:]}

    def model(self):
        config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                            intermediate_size=16, num_labels=2)
        return nn.ModuleDict({"language model": BertForSequenceClassification(config)})

    def loss(self, model, batch):
        out = model["language model"](input_ids=batch["input_ids"], attention_mask=(batch["input_ids"] > 0).long())
        return {"class": (nn.functional.cross_entropy(out.logits, batch["label"], reduction="sum"), len(out.logits))}
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run whose model has one of transformers in it."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "texts.py").write_text(PRETRAINED)
    folders = ["--runs-dir", str(folder / "runs"), "--state-dir", str(folder / "state")]
    assert main(["--task", f"{folder / 'texts.py'}:Texts", "--device", "cpu", "--quiet", *folders]) == 0
    (made,) = (folder / "runs").iterdir()
    return made


def test_a_model_of_transformers_is_written_as_a_folder_that_it_loads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, texts: Path
) -> None:
    line = ["export", str(texts), "--state-dir", str(texts.parents[1] / "state")]
    assert main([*line, f"{tmp_path}/model/"]) == 0
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "model").state_dict()
    chosen = load_finished(texts, RunFolder.config).weights
    assert all(torch.equal(loaded[name], chosen[f"language model.{name}"]) for name in loaded)
    assert json.loads((tmp_path / "model" / "can_train.json").read_text())["run_id"] == texts.name
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    capsys.readouterr()
    assert main([*line, str(tmp_path / "model")]) == 2
    assert "is not empty: a model of transformers needs a folder of its own" in capsys.readouterr().err


def test_a_model_of_transformers_is_exported_with_dynamic_lengths(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, texts: Path
) -> None:
    line = [
        "export",
        str(texts),
        str(tmp_path / "model.onnx"),
        "--state-dir",
        str(texts.parents[1] / "state"),
        "--json",
    ]
    assert main(line) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["part"] == "language model"
    assert [(each["name"], each["shape"]) for each in document["inputs"]] == [
        ("input_ids", ["batch", "input_ids_length"]), ("attention_mask", ["batch", "input_ids_length"]),
    ]  # fmt: skip
    assert document["largest_difference"] <= 1e-5


def test_a_model_without_one_of_transformers_is_no_folder(line: Line, tmp_path: Path) -> None:
    text = line(f"{tmp_path}/model/", code=2)
    assert "The run's model has no model of transformers in it: Sequential" in text
    assert list(tmp_path.iterdir()) == []


SMALL_GAMES = ("--precision fp32 --set dataset.synthetic.frames=12 --set dataset.synthetic.width=64 --set "
               "dataset.width=32 --set dataset.height=16 --set model.width=4 --set model.levels=2")  # fmt: skip
BUILT_IN = {
    "gat": "--model gat --set dataset.synthetic.seconds=5 --set model.layers=2 --set model.hidden=16 --no-baselines",
    "vgae": "--model vgae --set dataset.synthetic.seconds=5 --set model.hidden=[16,8] --no-baselines",
    "bendr": "--task bendr --mode classify",
    "bendr pretrain": "--task bendr",
    "muon": "--task muon --set dataset.synthetic.showers=40",
    "seq2seq": "--task seq2seq --set model.hidden=16 --set model.embedding=8 --set dataset.synthetic.words=100",
    "transformer": "--task seq2seq --model transformer --set model.hidden=16 --set model.embedding=8 "
                   "--set model.heads=2 --set model.layers=1 --set dataset.synthetic.words=100",
    "encoder of features": "--task seq2seq --set model.hidden=16 --set model.embedding=8 "
                           "--set model.features_encoder=true --set dataset.synthetic.words=100",
    "transformer of features": "--task seq2seq --model transformer --set model.hidden=16 --set model.embedding=8 "
                               "--set model.heads=2 --set model.layers=1 --set model.features_encoder=true "
                               "--set model.share_embeddings=false --set dataset.synthetic.words=100",
    "tracknet": f"--task tracknet {SMALL_GAMES}",
}  # fmt: skip


@pytest.mark.slow
def test_after_pretraining_each_part_of_bendr_is_exported_without_a_mask(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folders = ["--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path / "state")]
    words = ["--task", "bendr", "--dataset", "synthetic", "--device", "cpu", "--epochs", "1", "--quiet"]
    assert main([*words, *folders]) == 0
    names = []
    for part in ([], ["--part", "contextualizer"]):
        capsys.readouterr()
        assert main(["export", "last", str(tmp_path / "model.pt2"), "--json", *part, *folders]) == 0
        document = json.loads(capsys.readouterr().out)
        names.append((document["part"], [slot["name"] for slot in document["inputs"]]))
    assert names == [("encoder", ["input"]), ("contextualizer", ["encoded"])]


def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has both formats of a model written from one trace, which takes most of the time."""
    programs: list[Program] = []

    def traced(calls: Sequence[Call]) -> Program:
        programs.extend([trace(calls)] if not programs else [])
        return programs[0]

    monkeypatch.setattr(export, "trace", traced)


@pytest.mark.slow
@pytest.mark.parametrize("task", BUILT_IN)
def test_each_built_in_task_is_exported_within_the_tolerance(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str
) -> None:
    traced_once(monkeypatch)
    folders = ["--runs-dir", str(tmp_path / "runs"), "--state-dir", str(tmp_path / "state")]
    words = [
        *BUILT_IN[task].split(),
        "--dataset",
        "synthetic",
        "--device",
        "cpu",
        "--epochs",
        "1",
        "--quiet",
        "--set",
        "training.find_batch_size=off",
    ]
    assert main([*words, *folders]) == 0
    for ending in ("onnx", "pt2"):
        capsys.readouterr()
        assert main(["export", "last", str(tmp_path / f"model.{ending}"), "--json", *folders]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["largest_difference"] <= 1e-5
        assert any("batch" in slot["shape"] for slot in document["inputs"])
        assert (tmp_path / f"model.{ending}").stat().st_size == document["bytes"]


def test_weights_of_an_epoch_are_written_evaluated_and_loaded_by_its_number(
    line: Line, tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run / "weights"
    files = {name: torch.load(weights / f"{name}.pt", weights_only=True) for name in ("epoch-0001", "epoch-0002")}
    for given, name in (("epoch-1", "epoch-0001"), ("epoch-0002", "epoch-0002"), ("epoch-2.pt", "epoch-0002")):
        told = " ".join(line(tmp_path / "model.pt", "--weights", given).split())
        assert f"Weights of run {run.name}, {given}:" in told
        written = torch.load(tmp_path / "model.pt", weights_only=True)
        assert all(torch.equal(written[key], value) for key, value in files[name].items())
        loaded = can_train.load(run, weights=given, state_dir=run.parents[1] / "state").module.state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in files[name].items())
    scores = []
    for given in ((), ("--weights", "epoch-1")):
        capsys.readouterr()
        assert main(["evaluate", str(run), *given, "--json", "--state-dir", str(run.parents[1] / "state")]) == 0
        scores.append(json.loads(capsys.readouterr().out)["judgement"])
    assert scores[0] != scores[1]


def test_weights_that_are_not_there_are_told_with_those_that_are(line: Line, tmp_path: Path, run: Path) -> None:
    said = line(tmp_path / "model.pt", "--weights", "epoch-3", code=2)
    places = run / "weights"
    assert f"error: Unknown file of weights: epoch-3 in {places}.\n" in said
    assert said.splitlines()[-1] == "Valid, nearest first: epoch-0002, epoch-0001."
    damaged = places / "epoch-0009.pt"
    damaged.write_bytes(b"PK\x03\x04 no weights")
    assert f"A file of weights is damaged: {damaged}" in line(tmp_path / "m.pt", "--weights", "epoch-9", code=2)
    damaged.unlink()
