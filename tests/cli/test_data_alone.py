"""Data on standard output: whatever a task, its libraries and its processes print there goes to standard error."""

import json
from pathlib import Path

import pytest

from can_train.cli.output import data_alone, print_json, print_text
from fakes.own_tasks import CLASSIFIER, write_task
from fakes.processes import Command

TALK = """
import ctypes, os, subprocess

def talk(place):
    print("print", place)
    os.write(1, f"descriptor {place}\\n".encode())
    subprocess.run(["echo", "child", place], check=True)
    ctypes.CDLL(None).puts(f"C {place}".encode())

talk("import")
"""
PREDICT = """
    def predict(self, model, batch):
        talk("predict")
        return model(batch[0]).softmax(1)
"""
SPEAKERS = ("print", "descriptor", "child", "C")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    method = "    def loss(self, model, batch):\n"
    return write_task(tmp_path, TALK + CLASSIFIER.replace(method, f'{method}        talk("loss")\n') + PREDICT)


def printed(folder: Path, *words: str) -> tuple[str, str]:
    """What a line prints to standard output and to standard error."""
    with Command(*words, folder=folder) as done:
        assert done.wait() == 0, done.stderr
        return done.stdout, done.stderr


def test_nothing_that_a_task_prints_is_in_json_or_predictions(own: Path, tmp_path: Path) -> None:
    out, said = printed(tmp_path, "--task", f"{own}:MyTask", "--device", "sim:512MiB", "--epochs", "1", "--json")
    assert json.loads(out)["state"] == "finished"
    assert {f"{speaker} {place}" for speaker in SPEAKERS for place in ("import", "loss")} <= {*said.splitlines()}
    out, said = printed(tmp_path, "predict", "last", "--trust-code")
    header, *rows = out.splitlines()
    assert header.startswith("sample,")
    assert [row.partition(",")[0] for row in rows] == [str(number) for number in range(50)]
    assert {f"{speaker} predict" for speaker in SPEAKERS} <= {*said.splitlines()}


def test_a_person_who_wants_no_data_sees_what_a_task_prints(own: Path, tmp_path: Path) -> None:
    out, _ = printed(tmp_path, "--task", f"{own}:MyTask", "--device", "sim:512MiB", "--dry-run")
    assert "print import" in out


@pytest.mark.parametrize("word", ["--help", "-h", "--help-all"])
def test_help_is_no_data(tmp_path: Path, word: str) -> None:
    assert printed(tmp_path, "runs", "--json", word)[0].startswith("Usage:")


def test_standard_output_without_a_descriptor_is_kept_too(capsys: pytest.CaptureFixture[str]) -> None:
    with data_alone():
        print("from a task")
        print_text("from can-train")
        with data_alone():
            print_json([1])
    print_text("afterwards")
    said = capsys.readouterr()
    assert "".join(said.out.split()) == "[1]afterwards"
    assert said.err.splitlines() == ["from a task", "from can-train"]
