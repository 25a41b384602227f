"""What a person meets who types something: help, errors, exit codes. In this process, on real commands."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from can_train.cli import train_options
from can_train.cli.main import _COMMANDS, main
from can_train.cli.train_options import OPTIONS
from can_train.config.settings import TrainingSettings
from can_train.errors import ConfigError

TRAIN = ("--model", "gat", "--dataset", "synthetic")


def errors(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a line that is wrong; returns what it says."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert not said.out
    return said.err


@pytest.mark.parametrize("arguments", [(), ("--help",), ("train", "--help")])
def test_help_shows_the_first_line_to_type_and_the_everyday_flags_in_groups(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "can-train --model gat --dataset synthetic" in text
    titles = ("What is trained", "How it is trained", "Device and memory", "Plan and output", "SLURM, with --submit")
    places = [text.index(f"\n{title}:\n") for title in titles]
    assert places == sorted(places)
    assert len(re.findall(r"^  (?:-\w, )?--", text, flags=re.MULTILINE)) <= 25
    assert "--min-steps-per-epoch" not in text
    assert "--help-all shows all of them" in text
    assert "factors [KEY]" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_help_of_a_setting_ends_with_its_default_or_with_the_words_for_none() -> None:
    brackets = {name: text.rpartition("[")[2].removesuffix("]")
                for name, (_, _, text) in train_options._options_of(TrainingSettings).items()}  # fmt: skip
    assert len(brackets) > 40
    told = {
        name: value
        for name, value in vars(TrainingSettings()).items()
        if isinstance(value, str | int | float) and value
    }
    shown = {name: "yes" if value is True else str(value) for name, value in told.items()}
    assert {name: brackets[name] for name in told} == shown


@pytest.mark.parametrize("name", ["train", *_COMMANDS])
def test_each_help_writes_values_in_capitals_and_defaults_in_brackets(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main((name, "--help-all")) == 0
    text = capsys.readouterr().out
    usage = text.partition("\n\n")[0]
    assert not re.search(r"[{}]|\.\.\.\.|\[\[", usage)
    assert not re.search(r"<\w|\[default|\[required\]|\[True\]|\[False\]|x>=", text)


def test_help_all_shows_every_option_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("--help-all",)) == 0
    text = capsys.readouterr().out
    flags = {f"--{name.replace('_', '-')}" for name in (*OPTIONS, *(field.name for field in fields(TrainingSettings)))}
    assert [flag for flag in sorted(flags) if flag not in text] == []
    # A setting that has no group of its own would stand beside --help.
    alone = text.partition("\nOptions:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  (\S+)", alone, flags=re.MULTILINE) == ["-h,"]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bath-size", "3"), "--batch-size"),
        ((*TRAIN, "foo"), "foo"),
        (("factrs",), "factors"),
        (("--model", "gat"), "--dataset is missing"),
        (("--dataset", "synthetic"), "--model is missing"),
        ((*TRAIN, "--epochs", "abc"), "abc"),
        ((*TRAIN, "--epochs", "0"), "--epochs must be at least 1"),
        ((*TRAIN, "--max_epochs", "3", "--epochs", "4"), "--epochs has two different values"),
        ((*TRAIN, "--accum_steps=2", "--accumulate-grad-batches", "3"), "two different values"),
        ((*TRAIN, "--set", "training.lr"), "--set takes group.key=value"),
        ((*TRAIN, "--submit", "--cluster", "nowhere"), "Unknown cluster"),
        ((*TRAIN, "--device", "gpu", "--dry-run"), "Unknown device"),
        (("--model", "gat", "--dataset", "/no/such/file.csv"), "/no/such/file.csv"),
        (("--model", "gat,vgea", "--dataset", "synthetic"), "vgea"),
        (("resume", "no-such-run"), "no-such-run"),
        ((*TRAIN, "--state-dir", ""), "--state-dir is empty"),
        ((*TRAIN, "--target-gpu", ""), "--target-gpu is empty"),
        ((*TRAIN, "--dry-run", "--target-gpu", ","), "--target-gpu names no GPU"),
        ((*TRAIN, "--show-config"), "--show-config has no effect without --dry-run"),
        ((*TRAIN, "-q", "-v"), "--quiet and --verbose cannot be combined"),
        ((*TRAIN, "--submit", "-v"), "Leave --verbose out"),
        ((*TRAIN, "--target-gpu", "t4"), "--target-gpu has no effect without --dry-run"),
        ((*TRAIN, "--dry-run", "--target-gpu", "a100"), "Say a100-40gb or a100-80gb"),
        ((*TRAIN, "--dry-run", "--target-memory", "16"), "A size is a number above zero with its unit"),
        (
            (*TRAIN, "--dry-run", "--target-memory", "600MiB"),
            "cannot use 2.24 GiB of a GPU's memory, and this GPU has less in all: 600MiB",
        ),
    ],
)
def test_what_is_wrong_is_said_in_words_with_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    assert message in errors(capsys, *arguments)
    assert not (tmp_path / "runs").exists(), "nothing half-written is left"


def test_debug_shows_where_an_error_comes_from() -> None:
    with pytest.raises(ConfigError):
        main(("--model", "gta", "--dataset", "synthetic", "--debug"))


def test_underscores_and_aliases_in_flags_reach_their_setting(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--batch_size", "8", "--max-epochs=3", "--gradient_clip_val", "0.5", "--state_dir", str(tmp_path))
    assert main((*TRAIN, *flags, "--dry-run", "--show-config")) == 0
    shown = capsys.readouterr().out
    assert all(line in shown for line in ("batch_size: 8", "epochs: 3", "grad_clip_norm: 0.5"))


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    assert main((*TRAIN, "--device", "cpu", "--dry-run")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("synthetic_gat_student_normal: ")
    assert any(line.startswith("Plan: 64 samples a step (the preset's batch), ") for line in lines)
    assert any(line.startswith("Memory is predicted to peak at ") for line in lines)
    assert not any("safety factor" in line or "hidden: 24" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_configuration_and_what_the_plan_rests_on_where_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main((*TRAIN, "--device", "cpu", "--dry-run", "--show-config", "-v", "--state-dir", str(tmp_path))) == 0
    shown = capsys.readouterr().out
    assert "hidden: 24" in shown
    assert "safety factor  1: from the probes: (90.0% − " in shown
    assert "target         a peak of 90.0%" in shown


def test_a_dry_run_leaves_nothing_of_the_libraries_in_the_temporary_folder(tmp_path: Path) -> None:
    # In a process of its own: a library that has written once does not write again.
    line = [sys.executable, "-m", "can_train", *TRAIN, "--device", "cpu", "--dry-run", "--state-dir", str(tmp_path),
            "--set", "dataset.synthetic.seconds=5"]  # fmt: skip
    subprocess.run(line, env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=tmp_path, check=True, capture_output=True)
    assert list(tmp_path.iterdir()) == []


def test_lists_make_one_run_of_each_combination(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    datasets = "synthetic,synthetic_large"
    line = ("--model", "gat,vgae", "--size", "student", "--dataset", datasets, "--state-dir", str(tmp_path))
    assert main((*line, "--set", "dataset.synthetic.seconds=5", "--dry-run")) == 0
    keys = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("synthetic_")]
    assert keys == [
        "synthetic_gat_student_normal", "synthetic_large_gat_student_normal",
        "synthetic_vgae_student_autoencoder", "synthetic_large_vgae_student_autoencoder",
    ]  # fmt: skip


def test_a_log_that_is_none_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_bytes(bytes(range(256)) * 40)
    said = errors(capsys, "--model", "gat", "--dataset", "log.csv", "--device", "cpu", "--state-dir", "state")
    assert "log.csv" in said
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("state/cache/*"))


def test_a_full_disk_is_said_in_words_with_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "can_train", "runs", "--json", "--state-dir", str(tmp_path)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2,
        "error: A file cannot be written for lack of space: No space left on device.",
    )
    assert done.stderr.splitlines()[1:] == ["Free some space."], "nothing was trained that could go on"


def test_a_command_whose_reader_has_gone_ends_as_by_the_signal_and_silently(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-P", "-m", "can_train", "runs", "--runs-dir", str(tmp_path), "--state-dir", str(tmp_path)]
    # Unbuffered, so that the first line that is printed fails, rather than the flush at the end.
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    ended = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, env=unbuffered, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + 13, b"")


def test_the_list_of_commands_has_a_column_for_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    _, _, listed = capsys.readouterr().out.partition("Other commands, each with its own --help:")
    lines = [line for line in listed.splitlines() if line.startswith("    ")]
    assert any(line.startswith("    archive RUNS PLACE copy runs") for line in lines)
    assert {len(line) - len(line[4:].lstrip()) for line in lines} == {4}
    assert all(line[22] == " " and line[23] != " " for line in lines), lines
