"""`can-train completion`: what may stand at the cursor, and the three shells that ask for it."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from can_train.cli.main import main
from can_train.config.settings import CHOICES
from fakes.finished_runs import Shelf

TABLE = [
    ("ev", "evaluate"),
    ("--mod", "--model --mode --model-args"),
    ("--model ", "gat vgae fusion"),
    ("--model gat,v", "gat,vgae"),
    ("--model=fu", "--model=fusion"),
    ("--size ", "student teacher"),
    ("--mode know", "knowledge_distillation"),
    ("--dataset syn", "synthetic synthetic_large"),
    ("--device s", "sim:"),
    ("--memory ", "muon tight tracknet"),
    ("--precision ", " ".join(CHOICES["precision"])),
    ("--target-gpu v100", "v100-16gb v100-32gb"),
    ("--target-gpu 100-32", "v100-32gb"),
    ("--set training.optim", "training.optimizer="),
    ("--set dataset.synthetic.se", "dataset.synthetic.seed= dataset.synthetic.seconds="),
    ("factors --replay a", "affine"),
    ("pipeline --preset ", "standard"),
    ("completion ", "bash zsh fish"),
    ("--dataset ./no_such", ""),
    ("no-such-command ", ""),
    ("--epochs ", ""),
]


def answers(capsys: pytest.CaptureFixture[str], line: str) -> list[str]:
    assert main(("complete-line", "zsh", *line.split(" "))) == 0
    return [answer.partition("\t")[0] for answer in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(("line", "expected"), TABLE)
def test_a_word_is_completed_by_what_the_command_knows(
    capsys: pytest.CaptureFixture[str], line: str, expected: str
) -> None:
    assert answers(capsys, line) == expected.split()


def test_a_run_is_completed_by_any_part_of_its_id(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shelf = Shelf(tmp_path)
    folder = shelf.put(1, shelf.resolved("gat", "normal"))
    where = f"--runs-dir {folder.path.parent} --state-dir {tmp_path / 'no_state'}"
    assert answers(capsys, f"show {where} ") == ["last", folder.run_id]
    assert answers(capsys, f"show {where} {folder.run_id[5:20]}") == [folder.run_id]
    assert answers(capsys, f"--model gat {where} --start-from la") == ["last"]
    assert answers(capsys, f"show --runs-dir {tmp_path / 'none'} --state-dir {tmp_path / 'no_state'} ") == []


def test_what_cannot_be_read_completes_nothing_and_prints_no_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "config.yaml"
    own.write_text("no_such_setting: 1")
    monkeypatch.setenv("CAN_TRAIN_CONFIG", str(own))
    assert answers(capsys, "show ") == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [("can-train --device si", "sim:"), ("can-train --device=si", "sim:"), ("can-train --device=sim:", ""),
     ("./can-train --model 'ga", "gat"), ("can-train --model gat --set training.lr_s", "training.lr_scale=")],
)  # fmt: skip
def test_bash_is_answered_with_the_part_of_the_word_that_it_replaces(
    capsys: pytest.CaptureFixture[str], line: str, expected: str
) -> None:
    assert main(("complete-line", "bash", line)) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_a_script_that_passes_no_words_is_answered_with_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("complete-line",)) == 0
    assert capsys.readouterr().out.startswith("demo\t")


def test_a_shell_without_a_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("completion", "tcsh")) == 2
    assert "Unknown shell: 'tcsh'" in capsys.readouterr().err


def installed(shell: str) -> str:
    """The path of a shell; the test is skipped where the machine has none."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    return found


@pytest.fixture
def with_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`can-train` of this environment on the path, and a home without settings of shells."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("with_command")
def test_bash_completes() -> None:
    script = """
        eval "$(can-train completion bash)"
        ask() { COMP_WORDS=(can-train); COMP_LINE=$1; COMP_POINT=${#1}; _can_train 2>/dev/null; echo "$COMPREPLY"; }
        ask 'can-train --model g'; ask 'can-train --device=s'
    """
    done = subprocess.run([installed("bash"), "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["gat", "sim:"]


@pytest.mark.slow
@pytest.mark.usefixtures("with_command")
def test_fish_completes_values_and_else_files(tmp_path: Path) -> None:
    (tmp_path / "drive.log").touch()
    script = """
        can-train completion fish | source
        complete -C 'can-train --model g'; complete -C 'can-train --dataset dri'
    """
    done = subprocess.run([installed("fish"), "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["gat", "drive.log"]


@pytest.mark.slow
@pytest.mark.usefixtures("with_command")
def test_zsh_completes() -> None:
    setup = b"PS1=; autoload -Uz compinit; compinit -u -D; eval \"$(can-train completion zsh)\"; echo set''up\n"
    terminal, inside = pty.openpty()
    command = [installed("zsh"), "-f", "-i"]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True) as process:
        os.close(inside)
        os.write(terminal, setup)
        read_until(terminal, b"setup")
        os.write(terminal, b"can-train --model ga\t --set training.optim\t")
        # The end of `training.optimizer=`, which only the shell can have written.
        read_until(terminal, b"izer=")
        process.kill()
    os.close(terminal)


def read_until(terminal: int, text: bytes, *, timeout_s: float = 60.0) -> None:
    """Reads what a terminal shows until a text is there; TimeoutError: it does not come."""
    shown, end = b"", time.monotonic() + timeout_s
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], end - time.monotonic())
        if not ready:
            raise TimeoutError(shown)
        shown += os.read(terminal, 4096)
