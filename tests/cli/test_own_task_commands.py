"""The task of docs/tasks.md, as a person copies it: every command on its runs works, and fits 80 columns."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from can_train.cli.main import main

Said = Callable[..., str]

_DOCS = Path(__file__).resolve().parents[2] / "docs" / "tasks.md"
_LINE = ("--task", "digits.py:Digits", "--device", "cpu", "--epochs", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example, and two finished runs of a sweep."""
    made = tmp_path_factory.mktemp("digits")
    example = re.search(r"```python\n(# digits\.py.*?)```", _DOCS.read_text(), re.DOTALL)
    assert example is not None
    (made / "digits.py").write_text(example[1])
    return made


@pytest.fixture
def said(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a line in the folder; returns what it printed, of which no line is wider than a terminal."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(folder / "state"))
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(words) == code, capsys.readouterr().err
        out, err = capsys.readouterr()
        wide = [line for line in (out + err).splitlines() if len(line) > 80 and str(folder) not in line]
        assert wide == [] or "--json" in words
        return out + ("" if "--json" in words else err)

    if not (folder / "runs").exists():
        text = run(*_LINE, "--set", "task.hidden=16,32")
        assert "run 1 of 2: digits task.hidden=16\n" in text
        assert "run 2 of 2: digits task.hidden=32\n" in text
    return run


def test_its_runs_are_listed_under_its_name(said: Said) -> None:
    text = said("runs")
    assert text.splitlines()[1] == "digits"
    assert "unknown" not in text
    assert "hidden=32 epochs=1" in text


def test_it_is_shown_with_lines_that_work_for_it(said: Said) -> None:
    text = said("show", "last")
    assert "accuracy" in text
    assert re.search(r"task\.hidden +32 +\(default: 64\)", text)
    assert "--dataset" not in text
    assert re.search(r"can-train evaluate \S+\n", text)


def test_runs_of_it_are_compared_by_its_own_scores(said: Said, folder: Path) -> None:
    one, other = sorted(path.name for path in (folder / "runs").iterdir())[:2]
    text = said("compare", one, other)
    scores = text[text.index("\naccuracy\n") :]
    assert re.search(r"^test +0\.\d{4}\*? +0\.\d{4}\*?$", scores, re.MULTILINE)
    # Which direction is better is known of no loss but the validation's.
    losses = text[text.index("\nclassification loss\n") : text.index("\naccuracy\n")]
    assert "*" not in losses
    # Both began within a second: their names do not tell which was first.
    assert re.search(r"task\.hidden +(16 +32|32 +16)\n", text)
    assert "scores" in json.loads(said("compare", one, other, "--json"))["runs"][0]


def test_its_predictions_are_a_file_of_scores(said: Said, folder: Path) -> None:
    text = said("evaluate", "last", "--scores", "scores.csv")
    assert "accuracy" in text
    head, *rows = (folder / "scores.csv").read_text().splitlines()
    assert head == "set,sample,prediction"
    assert len(rows) == 297
    assert {row.rpartition(",")[2] for row in rows} <= set("0123456789")


def test_its_test_samples_are_predicted(said: Said) -> None:
    head, *rows = said("predict", "last", "--quiet").splitlines()
    assert head == "sample,prediction"
    assert [row.partition(",")[0] for row in rows] == [str(number) for number in range(297)]
    refused = " ".join(said("predict", "last", "--dataset", "./digits.py", code=2).split())
    assert "Digits.datasets does not look at --dataset" in refused


def test_a_report_and_a_status_of_it_are_made(said: Said, folder: Path) -> None:
    said("report", "last")
    (page,) = folder.glob("runs/*/report.html")
    assert "accuracy" in page.read_text()
    assert "step 38/38" in said("status", "last")


def test_its_training_line_prints_one_object_of_json(said: Said, folder: Path) -> None:
    result = json.loads(said(*_LINE, "--set", "task.hidden=8", "--json"))
    assert result["state"] == "finished"
    assert result["scores"]["test"]["test"]["model"].keys() == {"classification loss", "accuracy"}
    assert "dataset" not in " ".join(result["next_commands"])


def test_a_file_of_scores_is_refused_where_a_task_predicts_nothing(said: Said, folder: Path) -> None:
    text = (folder / "digits.py").read_text()
    (folder / "silent.py").write_text(text.replace("def predict(", "def foresee("))
    said("--task", "silent.py:Digits", *_LINE[2:], "--quiet")
    assert "Task.predict" in said("evaluate", "last", "--scores", "none.csv", code=2)
    assert not (folder / "none.csv").exists()
