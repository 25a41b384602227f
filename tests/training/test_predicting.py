"""Predictions of a finished run of a task of one's own, for data without targets: from the command line and Python."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

import can_train
from can_train.cli.main import main
from can_train.errors import ArgumentError, CanTrainError

Said = Callable[..., str]

TASK = '''
import csv
import errno
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

import can_train


def points(path, *, with_labels):
    with open(path) as file:
        for row in csv.DictReader(file):
            yield torch.tensor([float(row["x"]), float(row["y"])]), int(row["label"]) if with_labels else 0


class Sides(can_train.Task):
    training = {"lr": 0.05, "lr_batch_size": 32, "epochs": 4}

    def datasets(self):
        return {"train": list(points(self.dataset.path, with_labels=True))}

    def model(self):
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))

    def loss(self, model, batch):
        points, labels = batch
        return {"class": (nn.functional.cross_entropy(model(points), labels, reduction="sum"), len(labels))}

    def predict(self, model, batch):
        return model(batch[0]).softmax(dim=1)

    def measure(self, samples, predictions):
        right = [int(shares.argmax()) == label for shares, (_, label) in zip(predictions, samples)]
        return {"accuracy": sum(right) / len(right)}


class Streamed(Sides):
    def samples_to_predict(self):
        return points(self.dataset.path, with_labels=False)


class Listed(Sides):
    def samples_to_predict(self):
        return list(points(self.dataset.path, with_labels=False))


class Indexed(Sides):
    """Reads a sample when it is asked for; the samples draw from the global generators."""

    def samples_to_predict(self):
        return Drawing(list(points(self.dataset.path, with_labels=False)))


class Drawing:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        point, label = self.samples[number]
        return point + torch.randn(2), label


class Killed(Sides):
    """Is killed, or fails, after the first portions."""

    def samples_to_predict(self):
        yield from [(torch.zeros(2), 0)] * 1000
        if os.environ.get("KILLED"):
            os.kill(os.getpid(), int(os.environ["KILLED"]))
        raise RuntimeError("a sample that cannot be read")


class Endless(Sides):
    """As many samples as the file says."""

    def samples_to_predict(self):
        with open(self.dataset.path) as file:
            number = int(file.read())
        return ((torch.tensor([row / number, 0.5]), 0) for row in range(number))


class Large(Streamed):
    """Computes 2 MiB for a sample."""

    def predict(self, model, batch):
        wide = batch[0][:, :1].expand(-1, 1 << 19) * 1.0
        return model(batch[0]).softmax(dim=1) + 0 * wide.sum(dim=1, keepdim=True)


class Deaf(Sides):
    """Makes its data itself, whatever is asked for."""

    def datasets(self):
        return {"train": [(torch.ones(2) * number, number % 2) for number in range(40)]}


class Lazy(Sides):
    """Opens its file when a sample is asked for."""

    def datasets(self):
        return {"train": Rows(self, 40), "validation": Rows(self, 10)}


class Rows:
    def __init__(self, task, number):
        self.task, self.number = task, number

    def __len__(self):
        return self.number

    def __getitem__(self, number):
        return next(islice(points(self.task.dataset.path, with_labels=True), number, None))


class Mute(Sides):
    def predict(self, model, batch):
        return None


class Several(Sides):
    """Has two test sets, one of them a stream where other data are read."""

    def datasets(self):
        read = list(points(self.dataset.path, with_labels=True))
        tests = {"near": read[220:230], "far/out": read[230:]}
        return {"train": read[:200], "validation": read[200:220], "test": tests}

    def samples_to_predict(self):
        read = list(points(self.dataset.path, with_labels=False))
        return {"first": read[:300], "rest": (sample for sample in read[300:])}


class Drawn(Streamed):
    """Its preview has a line for each sample, and fails where it is told to."""

    @contextmanager
    def preview(self, path):
        lines = path / "lines.txt" if path.is_dir() else path
        with open(lines, "w") as file:

            def draw(samples, predictions):
                if os.environ.get("FULL") and file.tell() > 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                if os.environ.get("WRONG"):
                    raise ValueError("this preview is wrong")
                file.writelines(f"{float(shares[1])!r}\\n" for shares in predictions)

            yield draw


class Inward(Streamed):
    """Predicts text, in columns of its own: two rows for a sample."""

    def columns(self, samples, predictions):
        words = [word for shares in predictions for word in ("left", "right")]
        return {"side": words, "share": [float(share) for shares in predictions for share in shares]}
'''


def write_points(path: Path, number: int, *, labelled: bool, seed: int = 0) -> Path:
    generator = random.Random(seed)
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["x", "y", *(["label"] if labelled else [])])
        for _ in range(number):
            x, y = generator.gauss(0, 1), generator.gauss(0, 1)
            lines.writerow([x, y, *([int(x + y > 0.5)] if labelled else [])])
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of each class of the task's file, in folders named like the classes."""
    folder = tmp_path_factory.mktemp("predicting")
    (folder / "sides.py").write_text(TASK)
    write_points(folder / "train.csv", 300, labelled=True)
    write_points(folder / "labelled.csv", 700, labelled=True, seed=1)
    write_points(folder / "bare.csv", 700, labelled=False, seed=1)
    return folder


@pytest.fixture
def run_of(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Path]:
    """Trains a class once for all tests; returns the folder of the run."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(place / "state"))

    def trained(name: str) -> Path:
        runs = place / name
        if not runs.exists():
            line = ("--task", f"sides.py:{name}", "--dataset", "train.csv", "--device", "cpu", "--quiet",
                    "--num-workers", "2" if name == "Indexed" else "0")  # fmt: skip
            assert main((*line, "--runs-dir", str(runs))) == 0
            capsys.readouterr()
        (run,) = runs.iterdir()
        return run

    return trained


@pytest.fixture
def said(run_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> Said:
    """Gives `can-train predict` for the run of a class; returns standard output, or what an error says."""

    def given(name: str, *words: str | Path, code: int = 0) -> str:
        run = run_of(name)
        assert main(["predict", str(run), "--device", "cpu", *map(str, words)]) == code, capsys.readouterr().err
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return given


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


@pytest.mark.parametrize("name", ["Streamed", "Listed"])
def test_predictions_without_labels_have_the_score_of_an_evaluation_with_them(
    name: str, said: Said, run_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said(name, "--dataset", "bare.csv", "--out", tmp_path / "out.csv")
    rows = rows_of((tmp_path / "out.csv").read_text())
    labels = [row["label"] for row in rows_of(Path("labelled.csv").read_text())]
    accuracy = np.mean([row["class"] == label for row, label in zip(rows, labels, strict=True)])
    assert main(["evaluate", str(run_of(name)), "--dataset", "labelled.csv", "--json", "--device", "cpu"]) == 0
    judged = json.loads(capsys.readouterr().out)["judgement"]["test"]["all"]["model"]["accuracy"]
    assert accuracy == judged
    assert 0.5 < judged < 1.0
    assert [int(row["sample"]) for row in rows] == list(range(700))


def test_without_a_data_set_the_own_test_samples_are_predicted(said: Said) -> None:
    # A tenth of the training samples, which validates where there is no test set.
    assert len(rows_of(said("Streamed"))) == 30


def test_each_format_has_the_same_predictions(said: Said, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    outs = [tmp_path / f"out.{ending}" for ending in ("csv", "jsonl", "parquet")]
    for out in outs:
        said("Streamed", "--dataset", "bare.csv", "--out", out)
    by_csv = [float(row["probability_1"]) for row in rows_of(outs[0].read_text())]
    assert by_csv == [json.loads(line)["probability_1"] for line in outs[1].read_text().splitlines()]
    assert by_csv == polars.read_parquet(outs[2])["probability_1"].to_list()
    assert len(by_csv) == 700


def test_standard_input_goes_through_to_standard_output(
    said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Path("bare.csv").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        piped = said("Streamed", "--dataset", "-", "--format", "jsonl")
    said("Streamed", "--dataset", "bare.csv", "--out", tmp_path / "out.jsonl")
    assert piped == (tmp_path / "out.jsonl").read_text()


def test_columns_of_ones_own_may_be_several_rows_a_sample(said: Said) -> None:
    rows = rows_of(said("Inward", "--dataset", "bare.csv"))
    assert [row["side"] for row in rows[:3]] == ["left", "right", "left"]
    assert len(rows) == 1400


def test_each_row_names_its_set_where_there_are_several(said: Said) -> None:
    own = [(row["set"], int(row["sample"])) for row in rows_of(said("Several"))]
    assert own == [("near", number) for number in range(10)] + [("far/out", number) for number in range(70)]
    rows = rows_of(said("Several", "--dataset", "bare.csv"))
    numbers = [("first", number) for number in range(300)] + [("rest", number) for number in range(400)]
    assert [(row["set"], int(row["sample"])) for row in rows] == numbers
    of_listed = rows_of(said("Several", "--dataset", "bare.csv", "--format", "csv", "--batch-size", "7"))
    assert [row["class"] for row in of_listed] == [row["class"] for row in rows]
    assert "set" not in rows_of(said("Listed", "--dataset", "bare.csv"))[0]


def test_a_folder_has_a_file_for_each_of_several_sets(said: Said, tmp_path: Path) -> None:
    said("Several", "--out", f"{tmp_path / 'sets'}/")
    files = {path.name: path.read_text() for path in (tmp_path / "sets").iterdir()}
    assert sorted(files) == ["far-out.csv", "near.csv"]
    assert [len(rows_of(text)) for _, text in sorted(files.items())] == [70, 10]
    assert "set" not in rows_of(files["near.csv"])[0]
    assert "are one file" in said("Listed", "--out", f"{tmp_path / 'one'}/", code=2)


def test_a_dict_of_test_sets_is_judged_set_by_set(
    run_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run_of("Several")), "--json", "--device", "cpu"]) == 0
    judged = json.loads(capsys.readouterr().out)["judgement"]["test"]
    assert {name: scores["samples"] for name, scores in judged.items()} == {"near": 10, "far/out": 70}


@pytest.mark.parametrize("preview", ["seen/", "seen", "seen.txt"])
def test_a_preview_of_ones_own_is_given_all_predictions_in_order(said: Said, tmp_path: Path, preview: str) -> None:
    said("Drawn", "--dataset", "bare.csv", "--out", tmp_path / "out.csv", "--preview", f"{tmp_path}/{preview}")
    lines = tmp_path / preview if preview.endswith(".txt") else tmp_path / preview / "lines.txt"
    shares = [row["probability_1"] for row in rows_of((tmp_path / "out.csv").read_text())]
    assert lines.read_text().splitlines() == shares
    assert len(shares) == 700
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize(
    ("variable", "rule"), [("FULL", "The preview cannot be written"), ("WRONG", "Drawn.preview failed")]
)
def test_a_preview_that_fails_leaves_neither_file(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, rule: str
) -> None:
    monkeypatch.setenv(variable, "1")
    for place in ("seen/", "seen.txt"):
        message = said("Drawn", "--dataset", "bare.csv", "--out", tmp_path / "out.csv",
                       "--preview", f"{tmp_path}/{place}", code=2)  # fmt: skip
        assert rule in message
        assert not [*tmp_path.iterdir()]


def test_a_task_without_a_preview_names_the_tasks_that_have_one(said: Said, tmp_path: Path) -> None:
    message = " ".join(said("Streamed", "--dataset", "bare.csv", "--preview", tmp_path / "seen", code=2).split())
    assert "The task of this run has no preview" in message
    assert "tasks with a preview: tracknet, and a task of your own that has Task.preview" in message


def test_samples_are_the_same_whoever_reads_them(said: Said, run_of: Callable[[str], Path]) -> None:
    # Two processes for the command, as the run has them; this process for Python.
    model = can_train.load(run_of("Indexed"), device="cpu")
    here = [float(shares[0]) for shares in model.predict(model.read("bare.csv"))]
    rows = rows_of(said("Indexed", "--dataset", "bare.csv"))
    assert here == [float(row["probability_0"]) for row in rows]
    assert here != [float(row["probability_0"]) for row in rows_of(said("Streamed", "--dataset", "bare.csv"))]


def test_memory_that_runs_out_costs_no_prediction(
    said: Said, run_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = rows_of(said("Large", "--dataset", "bare.csv"))
    line = ["predict", str(run_of("Large")), "--dataset", "bare.csv", "--device", "sim:64MiB"]
    assert main(line) == 0
    split = rows_of(capsys.readouterr().out)
    assert [row["class"] for row in split] == [row["class"] for row in whole]


def test_data_that_need_labels_name_the_method_that_reads_without(said: Said) -> None:
    message = said("Sides", "--dataset", "bare.csv", code=2)
    assert "KeyError: 'label'" in message
    assert "write Sides.samples_to_predict" in " ".join(message.split())


def test_a_task_that_makes_its_data_itself_does_not_predict_other_data(said: Said) -> None:
    message = " ".join(said("Deaf", "--dataset", "bare.csv", code=2).split())
    assert "Deaf.datasets does not look at --dataset: " in message
    assert "Read self.dataset.path there, or in Deaf.samples_to_predict" in message
    assert len(rows_of(said("Deaf"))) == 4


def test_a_task_that_opens_its_file_late_looks_at_it(said: Said) -> None:
    assert len(rows_of(said("Lazy", "--dataset", "labelled.csv"))) == 50


def test_predictions_are_not_written_over_the_data(said: Said, place: Path) -> None:
    before = (place / "bare.csv").read_text()
    for data in ("bare.csv", "."):
        message = said("Streamed", "--dataset", data, "--out", "bare.csv", code=2)
        assert "The file of the predictions is one of the data files" in message
    assert (place / "bare.csv").read_text() == before


def test_an_empty_file_has_nothing_to_predict(said: Said, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("x,y\n")
    for name in ("Streamed", "Listed"):
        assert "There is nothing to predict" in said(name, "--dataset", tmp_path / "empty.csv", code=2)


def test_a_task_that_predicts_nothing_is_told_apart(said: Said, tmp_path: Path) -> None:
    message = said("Mute", "--dataset", "labelled.csv", "--out", tmp_path / "out.csv", code=2)
    assert "Write Task.predict" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--out", "out.txt"), "The ending of the file names no format"),
        (("--format", "xml"), "There is no such format of predictions: --format xml"),
        (("--format", "parquet"), "Predictions as parquet need a file"),
        (("--set", "training.lr=1"), "A finished run keeps all settings but its data's and its task's"),
        (("--out", "no/such/folder.csv"), "The predictions cannot be written"),
        (("--out", "folder/"), "The predictions of this task are one file"),
        (("--dataset", "nobody.csv"), "There is no such file or folder"),
    ],
)
def test_a_line_that_cannot_be_followed_is_refused(said: Said, words: tuple[str, ...], rule: str) -> None:
    assert rule in " ".join(said("Streamed", "--dataset", "bare.csv", *words, code=2).split())


def test_a_failed_prediction_leaves_the_file_as_it_was(said: Said, tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("before\n")
    assert "a sample that cannot be read" in said(
        "Killed", "--dataset", "bare.csv", "--out", tmp_path / "out.csv", code=2
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    assert (tmp_path / "out.csv").read_text() == "before\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "left", "ending"),
    [
        (signal.SIGKILL, None, "parquet"),
        (signal.SIGTERM, 0, "csv"),
        (signal.SIGTERM, 0, "parquet"),
        (signal.SIGINT, 0, "csv"),
    ],
)
def test_a_killed_prediction_leaves_no_half_file(
    run_of: Callable[[str], Path], tmp_path: Path, number: int, left: int | None, ending: str
) -> None:
    out = tmp_path / f"out.{ending}"
    line = [sys.executable, "-P", "-m", "can_train", "predict", str(run_of("Killed")), "--dataset", "bare.csv",
            "--out", str(out), "--device", "cpu"]  # fmt: skip
    ended = subprocess.run(line, env={**os.environ, "KILLED": str(int(number))}, capture_output=True, check=False)
    assert ended.returncode in (-number, 128 + number)
    assert not out.exists()
    if left is not None:
        assert len(list(tmp_path.iterdir())) == left


PEAK = """
import re, sys
from pathlib import Path
from can_train.cli.main import main
assert main(sys.argv[1:]) == 0
# `ru_maxrss` would be at least that of the process that started this one.
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_hundreds_of_thousands_of_samples_take_the_memory_of_a_few(
    run_of: Callable[[str], Path], tmp_path: Path, ending: str
) -> None:
    run, peaks = run_of("Endless"), []
    for number in (70_000, 210_000):  # Parquet collects 65,536 rows before it writes them.
        data, out = tmp_path / f"{number}.txt", tmp_path / f"{number}.{ending}"
        data.write_text(str(number))
        line = [sys.executable, "-P", "-c", PEAK, "predict", str(run), "--dataset", str(data), "--out", str(out),
                "--device", "cpu", "--quiet"]  # fmt: skip
        peaks.append(int(subprocess.run(line, capture_output=True, check=True, text=True).stdout))
        if ending == "csv":
            with out.open() as file:
                assert sum(1 for _ in file) == number + 1
    few, many = peaks
    assert many - few < 8 * 1024, f"{few:,} KiB, then {many:,} KiB"


# From Python


@pytest.fixture
def unchanged(run_of: Callable[[str], Path], tmp_path: Path) -> Iterator[None]:
    """Trains `Streamed`; fails a test that changes a setting of the process or writes into the current folder."""

    def settings() -> tuple[Any, ...]:
        return (torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
                torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state(legacy=True)),  # noqa: NPY002
                torch.is_grad_enabled(), signal.getsignal(signal.SIGINT), Path.cwd())  # fmt: skip

    run_of("Streamed")  # Training seeds the generators.
    before = settings()
    yield
    assert settings() == before


def files(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_a_loaded_model_predicts_and_changes_nothing(
    run_of: Callable[[str], Path], unchanged: None, said: Said
) -> None:
    run = run_of("Streamed")
    before = files(run.parent.parent)
    model = can_train.load(run, device="cpu")
    samples = [(torch.tensor([1.0, 2.0]), 0), (torch.tensor([-3.0, 0.5]), 0)]
    predictions = model.predict(samples)
    assert files(run.parent.parent) == before
    # The network by itself: no wrapper, ready to be computed.
    assert type(model.module) is torch.nn.Sequential
    assert not model.module.training
    with torch.no_grad():
        logits = model.module(torch.stack([point for point, _ in samples]))
    assert torch.equal(torch.stack(predictions), logits.softmax(dim=1))


def test_a_loaded_model_predicts_as_the_command_does(
    run_of: Callable[[str], Path], said: Said, unchanged: None
) -> None:
    model = can_train.load(run_of("Streamed").name, device="cpu", runs_dir=run_of("Streamed").parent)
    predictions = model.predict(model.read("bare.csv"))
    rows = rows_of(said("Streamed", "--dataset", "bare.csv"))
    assert [float(shares[1]) for shares in predictions] == [float(row["probability_1"]) for row in rows]


@pytest.mark.parametrize("wrong", [None, 5, torch.tensor(1.0)], ids=str)
def test_a_value_that_holds_no_samples_is_told_as_the_argument(run_of: Callable[[str], Path], wrong: Any) -> None:
    run = run_of("Streamed")
    model = can_train.load(run.name, device="cpu", runs_dir=run.parent)
    with pytest.raises(ArgumentError, match=r"Samples are a list.*\n.*predict\(\[sample\]\)"):
        model.predict(wrong)


def test_an_error_of_samples_that_are_given_is_their_own(run_of: Callable[[str], Path]) -> None:
    def broken() -> Iterator[Any]:
        raise KeyError("mine")
        yield

    run = run_of("Streamed")
    with pytest.raises(KeyError, match="mine"):
        can_train.load(run.name, device="cpu", runs_dir=run.parent).predict(broken())


def test_a_run_that_has_not_finished_cannot_be_loaded(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(CanTrainError, match="There is no such run"):
        can_train.load("nobody", runs_dir=tmp_path)
    with pytest.raises(CanTrainError, match=r"There are no runs yet; runs_dir=\.\.\. and state_dir="):
        can_train.load("nobody", runs_dir=tmp_path, state_dir=tmp_path)
    (tmp_path / "config.yaml").write_text((run_of("Streamed") / "config.yaml").read_text())
    with pytest.raises(CanTrainError, match="not known to be yours"):
        can_train.load(tmp_path)


@pytest.mark.parametrize("name", ["", "folder"])
def test_the_runs_are_listed_for_a_folder_that_is_no_run(
    name: str, run_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("Streamed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(CanTrainError, match="The newest:\n  "):
        can_train.load(name, runs_dir=run.parent)


def test_code_of_another_user_runs_when_it_is_asked_for(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run = run_of("Streamed")
    with pytest.raises(CanTrainError, match=r"(?s)not known to be yours.*load\(run, trust_code=True\) runs it"):
        can_train.load(run, state_dir=tmp_path, device="cpu")
    assert can_train.load(run, state_dir=tmp_path, device="cpu", trust_code=True).run_id == run.name


@pytest.mark.slow
def test_a_cell_of_a_notebook_predicts(run_of: Callable[[str], Path], said: Said, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cell = dedent(f"""
        import can_train
        model = can_train.load({str(run_of("Streamed"))!r}, device="cpu")
        shares = model.predict(model.read("bare.csv"))
        print(" ".join(str(int(each.argmax())) for each in shares))
    """)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(Path.cwd())}}).execute()
    (printed,) = [out["text"] for out in notebook.cells[0]["outputs"] if out.get("name") == "stdout"]
    assert printed.split() == [row["class"] for row in rows_of(said("Streamed", "--dataset", "bare.csv"))]


@pytest.mark.parametrize("name", ["run", "device", "weights", "trust_code", "runs_dir", "state_dir", "data_root"])
def test_a_wrong_argument_of_load_is_told_by_its_name(name: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "run": tmp_path,
        "device": torch.device("cpu"),
        "runs_dir": tmp_path,
        "state_dir": tmp_path,
    }
    for wrong in (3, object()):
        with pytest.raises(CanTrainError, match="A device is its name" if name == "device" else f"{name} is "):
            can_train.load(**{**given, name: wrong})
    with pytest.raises(CanTrainError, match=str(tmp_path)):
        can_train.load(**given)
