"""`can-train completion`: what may stand at the cursor, and the three shells that ask for it."""

import json
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
from can_train.factors.observations import write_record
from fakes.finished_runs import Shelf
from fakes.own_tasks import write_task
from fakes.samples import observation

TABLE = [
    ("ev", "evaluate"),
    ("predict last --format ", "csv jsonl parquet"),
    ("--mod", "--model --mode --model-args"),
    ("--model ", "gat vgae fusion"),
    ("--model gat,v", "gat,vgae"),
    ("--model=fu", "--model=fusion"),
    ("--size ", "student teacher"),
    ("--mode know", "knowledge_distillation"),
    ("--dataset syn", "syncan synthetic synthetic_large"),
    ("--device s", "sim:"),
    ("--memory ", "muon tight tracknet"),
    ("--precision ", " ".join(CHOICES["precision"])),
    ("--target-gpu v100", "v100-16gb v100-32gb"),
    ("--target-gpu 100-32", "v100-32gb"),
    ("--set training.optim", "training.optimizer= training.optimizer_args="),
    ("--set dataset.synthetic.se", "dataset.synthetic.seed= dataset.synthetic.seconds="),
    ("factors --replay a", "affine"),
    ("pipeline --preset ", "standard"),
    ("completion ", "bash zsh fish"),
    ("export --format p", "pt pt2"),
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


HOSTILE = ["y$(touch MARK)", "x$(touch MARK)",
           "x`touch MARK`", "x;touch MARK", "x|touch MARK", "x y", "x*", "x'y", 'x"y', "x\\y", "~x",
           "-x", "=x", "x\ny", "x\x1b[31m", "x&", "x{a,b}", "x>MARK", "x!", "x#"]  # fmt: skip


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs, presets and keys of factors with names that a shell reads otherwise; returns the flags that name them."""
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate([*HOSTILE, "x1"]):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("task: can\n")
        for group in ("dataset", "pipeline", "cluster", "memory"):
            (tmp_path / "own" / "configs" / group).mkdir(parents=True, exist_ok=True)
            (tmp_path / "own" / "configs" / group / f"{name}.yaml").write_text("{}")
        write_record(tmp_path / "state", observation(number, run_id=f"run-{number}", key=name))
    return f"--runs-dir {tmp_path / 'runs'}"


def test_a_name_from_the_disk_that_a_shell_reads_otherwise_is_not_offered(
    capsys: pytest.CaptureFixture[str], hostile: str, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "own")
    for line in (f"show {hostile} x", f"--model gat {hostile} --start-from x", f"compare {hostile} x",
                 f"--task {task}:MyTask --dataset x", "factors x"):  # fmt: skip
        assert answers(capsys, line) == ["x1"], line
        assert main(("complete-line", "bash", f"can-train {line}")) == 0
        assert capsys.readouterr().out == "x1\n"


def test_a_folder_with_a_name_that_no_run_has_is_no_run(capsys: pytest.CaptureFixture[str], hostile: str) -> None:
    assert main(("runs", "--json", *hostile.split())) == 0
    printed = capsys.readouterr()
    assert [run["run_id"] for run in json.loads(printed.out)] == ["x1"]
    assert " ".join(printed.err.split()) == (
        f"note: -x and {len(HOSTILE) - 1} more are not listed: the name of a run has letters, digits and _-.+=@%, alone"
    )


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
        os.write(terminal, b"can-train --model ga\t --set training.bet\t")
        # The end of `training.betas=`, which only the shell can have written.
        read_until(terminal, b"as=")
        process.kill()
    os.close(terminal)


@pytest.mark.slow
@pytest.mark.usefixtures("with_command", "hostile")
@pytest.mark.parametrize(
    ("shell", "setup"),
    [("bash --norc --noprofile -i", 'eval "$(can-train completion bash)"'),
     ("zsh -f -i", 'autoload -Uz compinit; compinit -u -D; eval "$(can-train completion zsh)"'),
     ("fish --no-config -i", "can-train completion fish | source")],
)  # fmt: skip
def test_no_shell_runs_what_a_name_says_after_tab_and_enter(tmp_path: Path, shell: str, setup: str) -> None:
    name, *flags = shell.split()
    terminal, inside = pty.openpty()
    # Fish asks for a terminal that controls its session.
    command = ["setsid", "--ctty", installed(name), *flags]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, cwd=tmp_path) as process:
        os.close(inside)
        try:
            os.write(terminal, f"{setup}; echo set''up\r".encode())
            read_until(terminal, b"setup")
            for word in ("show x", "show y", "factors y", "--model gat --start-from y"):
                os.write(terminal, f"can-train {word}\t\recho do''ne\r".encode())
                read_until(terminal, b"done")
        finally:
            process.kill()
    os.close(terminal)
    assert not (tmp_path / "MARK").exists()


def read_until(terminal: int, text: bytes, *, timeout_s: float = 60.0) -> None:
    """Reads what a terminal shows until a text is there; TimeoutError: it does not come."""
    shown, end = b"", time.monotonic() + timeout_s
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], end - time.monotonic())
        if not ready:
            raise TimeoutError(shown)
        shown += os.read(terminal, 4096)
