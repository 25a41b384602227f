import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from can_train.errors import RunError, StateError
from can_train.slurm.snapshot import Code, code_of, describe, keep, read_code

FILES = {
    ".gitignore": "*.log\n",
    "src/pack/__init__.py": "",
    "src/pack/a.py": "x = 1\n",
    "configs/one.yaml": "a: 1\n",
    "README.md": "words\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for words in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"),
    ):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    return root


def taken(root: Path) -> Code:
    return read_code(root / "src" / "pack")


def test_the_working_tree_is_taken_as_it_is(checkout: Path) -> None:
    clean = taken(checkout)
    assert sorted(clean.files) == ["configs/one.yaml", "src/pack/__init__.py", "src/pack/a.py"]
    assert (len(clean.revision), clean.difference, clean.untracked) == (40, "", ())
    (checkout / "src/pack/a.py").write_text("x = 2\n")
    (checkout / "src/pack/new ü.py").write_text("y = 1\n")
    (checkout / "src/pack/a.log").write_text("ignored")
    (checkout / "configs/one.yaml").unlink()
    code = taken(checkout)
    assert code.files == {"src/pack/__init__.py": b"", "src/pack/a.py": b"x = 2\n", "src/pack/new ü.py": b"y = 1\n"}
    assert code.revision == clean.revision
    assert code.untracked == ("src/pack/new ü.py",)
    assert "+x = 2" in code.difference
    assert code.digest != clean.digest


def test_only_what_a_job_reads_makes_another_snapshot(checkout: Path) -> None:
    before = taken(checkout).digest
    (checkout / "README.md").write_text("other words\n")
    assert taken(checkout).digest == before
    (checkout / "src/pack/a.py").rename(checkout / "src/pack/b.py")
    assert taken(checkout).digest != before


def test_without_git_the_files_are_taken_without_what_python_makes(checkout: Path) -> None:
    (checkout / ".git").rename(checkout / "gone")
    (checkout / "src/pack/__pycache__").mkdir()
    (checkout / "src/pack/__pycache__/a.pyc").write_bytes(b"")
    code = taken(checkout)
    assert (min(code.files), len(code.files), code.revision) == ("configs/one.yaml", 3, "")


def test_of_an_installation_the_package_is_taken(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "pack"
    (package / "configs").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "configs" / "one.yaml").write_text("a: 1\n")
    (tasks := tmp_path / "site-packages" / "pack_tasks").mkdir()
    (tasks / "task.py").write_text("")
    files = sorted(read_code(package, tasks).files)
    assert files == ["src/pack/__init__.py", "src/pack/configs/one.yaml", "src/pack_tasks/task.py"]


def test_a_copy_is_kept_once_and_mended_where_files_were_cleared_away(checkout: Path, tmp_path: Path) -> None:
    code = taken(checkout)
    folder = keep(code, tmp_path / "state")
    first = (folder / "src/pack/a.py").stat().st_ino
    (folder / "configs/one.yaml").unlink()
    assert keep(code, tmp_path / "state") == folder == code.folder(tmp_path / "state")
    assert (folder / "src/pack/a.py").stat().st_ino == first
    assert (folder / "configs/one.yaml").read_text() == "a: 1\n"


def test_a_copy_is_what_was_submitted_whatever_was_put_into_it(checkout: Path, tmp_path: Path) -> None:
    code = taken(checkout)
    folder, outside = keep(code, tmp_path / "state"), tmp_path / "outside"
    (folder / "src/pack/a.py").write_text("x = 2\n")  # of the same size
    (folder / "src/json.py").write_text("in the way of Python's own")
    (folder / "src/pack/__pycache__").mkdir()
    (folder / "src/pack/__pycache__/a.cpython-311.pyc").write_bytes(b"bytecode")
    outside.mkdir()
    (outside / "__init__.py").write_text("")
    (folder / "src/re").symlink_to(outside)
    (folder / "configs/one.yaml").unlink()
    (folder / "configs/one.yaml").symlink_to(outside / "__init__.py")
    assert keep(code, tmp_path / "state") == folder
    assert {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == {
        **code.files
    }
    assert not (folder / "src/re").exists()
    assert (outside / "__init__.py").read_text() == ""


def test_no_group_may_write_to_a_copy(checkout: Path, tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        folder = keep(taken(checkout), tmp_path / "state")
    finally:
        os.umask(before)
    assert [place for place in (folder, *folder.rglob("*")) if place.stat().st_mode & 0o022] == []


@pytest.mark.parametrize("name", ["src/pack/a.py", "src/json.py", "task/mine.py"])
def test_a_run_does_not_go_on_with_a_copy_that_was_changed(checkout: Path, tmp_path: Path, name: str) -> None:
    code, run = taken(checkout), tmp_path / "run-1"
    run.mkdir()
    describe(code, tmp_path / "state", run)
    folder = keep(code, tmp_path / "state")
    (folder / "src/pack/__pycache__").mkdir()
    (folder / "src/pack/__pycache__/a.cpython-311.pyc").touch()
    assert code_of(run) == folder
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x = 2\n")
    with pytest.raises(RunError) as caught:
        code_of(run)
    assert str(caught.value) == (
        f"The code of the run's submission was changed: {folder}.\n"
        "Start a new run with today's code: can-train resubmit run-1."
    )


def test_of_several_submissions_at_once_each_has_the_whole_copy(checkout: Path, tmp_path: Path) -> None:
    code = taken(checkout)
    with ThreadPoolExecutor(8) as pool:
        folders = {*pool.map(lambda _: keep(code, tmp_path / "state"), range(8))}
    (folder,) = folders
    assert [path.name for path in (tmp_path / "state" / "code").iterdir()] == [folder.name]
    assert {name: (folder / name).read_bytes() for name in code.files} == code.files


def test_a_state_folder_that_cannot_be_written_is_said(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StateError, match="cannot be written"):
        keep(taken(checkout), tmp_path / "state")


def test_a_run_says_which_code_it_has(checkout: Path, tmp_path: Path) -> None:
    (checkout / "src/pack/a.py").write_text("x = 3\n")
    code, run = taken(checkout), tmp_path / "run"
    run.mkdir()
    with pytest.raises(RunError, match="was not submitted"):
        code_of(run)
    describe(code, tmp_path / "state", run)
    with pytest.raises(RunError, match="is gone"):
        code_of(run)
    keep(code, tmp_path / "state")
    assert code_of(run) == code.folder(tmp_path / "state")
    said = json.loads((run / "code.json").read_text())
    assert (said["revision"], said["modified"], said["root"]) == (code.revision, True, str(checkout))
    subprocess.run(["git", "-C", str(checkout), "checkout", "-q", "."], check=True)
    subprocess.run(["git", "-C", str(checkout), "apply", str(run / "code.diff")], check=True)
    assert (checkout / "src/pack/a.py").read_text() == "x = 3\n"


def test_a_kept_copy_of_this_package_runs(tmp_path: Path) -> None:
    folder = keep(read_code(), tmp_path)
    text = (
        "import can_train; from can_train.config.resolved import presets; print(can_train.__file__, presets('cluster'))"
    )
    variables = {"PYTHONPATH": str(folder / "src"), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", text], env=variables, capture_output=True, text=True, check=True)
    presets = ["apptainer", "debug", "local", "pyxis", "slurm"]
    assert done.stdout.strip() == f"{folder / 'src/can_train/__init__.py'} {presets}"
