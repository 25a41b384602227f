"""Lines that a person mistypes: each is answered with rule, value and remedy, exit code 2, and no traceback."""

import io
import random
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - else the first line says that it is loaded
from typer import BadParameter, Typer
from typer.main import get_command

from can_train.cli.main import Command, _parser, main
from can_train.cli.runs import runs
from can_train.config import resolved
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import config_folder
from can_train.config.settings import TrainingSettings
from fakes.made_runs import Runs

TRAIN = ("--model", "gat", "--dataset", "synthetic", "--device", "cpu", "--dry-run")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a line that is wrong; returns its message in one line."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert not output.out
    assert output.err.startswith("error: ")
    assert "Traceback" not in output.err
    return " ".join(output.err.split())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("+training.lrs=1", "Unknown setting: 'training.lrs'. Nearest: training.lr,"),
        ("++training.lrs=1", "Unknown setting: 'training.lrs'. Nearest: training.lr,"),
        ("+dataset.foo=1", "Unknown setting: 'dataset.foo'. Nearest: dataset.format,"),
        ("lr=0.1", "Unknown setting: 'lr'. Nearest: training.lr,"),
        ("hiden=3", "Unknown setting: 'hiden'. Nearest: model.hidden,"),
        ("model.lr=0.1", "Unknown setting: 'model.lr'. Nearest: training.lr,"),
        ("+foo=1", "Unknown setting: 'foo'"),
        ("hydra.run.dir=/tmp", "Unknown setting: 'hydra.run.dir'"),
        ("model_name=vgae", "Unknown setting: 'model_name'"),
        ("~training.lr", "--set takes group.key=value: '~training.lr'. Write it as --set training.lr=0.01"),
        ("training.lr=${foo}", "training.lr must be a number: '${foo}'"),
        ("training.lr=${oc.env:HOME}", "training.lr must be a number: '${oc.env:HOME}'"),
        ("training.lr=glob(*)", "The values of the sweep cannot be listed: training.lr=glob(*)"),
        ("training.lr=range(0,1,0)", "The values of the sweep cannot be listed: training.lr=range(0,1,0)"),
        ("cluster.setup=3", "cluster.setup must be a list, as [1,2]: 3"),
        ("training.freeze=0.*", "must be a list, as [1,2]: '0.*'. Write it as --set 'training.freeze=[0.*]'"),
        ("training.lr=[1", "A value cannot be read: training.lr=[1. Write it as"),
        ("training.lr=", "training.lr must be a number: ''"),
        ("training.lr=inf", "training.lr must be a finite number: inf"),
        ("training.epochs=[1]", "training.epochs must be a whole number: '[1]'"),
        ("training.deterministic=maybe", "training.deterministic must be true or false: 'maybe'"),
        ("mode.name=foo", "Model gat has no mode 'foo'"),
        ("model=1,2", "Unknown model: '1'"),
        ("model=", "--set model is empty"),
        ("dataset.columns=3", "dataset.columns must be settings, as {a:1,b:2}: 3"),
        ("dataset.columns={epochs:1}", "Unknown setting: 'dataset.columns.epochs'"),
        ("cluster.partition=gpu", "--set cluster.partition has no effect with --cluster local"),
        ("cluster.container_mounts=scratch", "cluster.container_mounts must be a list, as [1,2]: 'scratch'"),
        ("cluster.container_mounts=[scratch]", "must list absolute paths, one mount an item: 'scratch'"),
        ("cluster.container_mounts=[/a:/b]", "--set cluster.container_mounts has no effect without --container"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    assert message in said(capsys, *TRAIN, "--set", setting)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*TRAIN, "--epochs", "three"), "--epochs must be a whole number: 'three'"),
        ((*TRAIN, "--epochs"), "--epochs needs a value. See can-train --help"),
        ((*TRAIN, "--epochs", "--lr", "0.1"), "--epochs needs a value: --lr is a flag"),
        ((*TRAIN, "--lr", "inf"), "--lr must be a finite number: inf"),
        ((*TRAIN, "--seed", "99999999999999999999"), "--seed must be at least 0 and at most 4294967295: 9999"),
        ((*TRAIN, "--json=3"), "--json takes no value"),
        ((*TRAIN, "foo", "bar"), "Unexpected arguments 'foo bar'. Leave it out"),
        ((*TRAIN, "-x"), "Unknown flag: -x. Nearest: "),
        ((*TRAIN, "--tracker", ","), "--tracker names nothing: ','. Name one, or several: a,b."),
        (("factors", "--export", ""), "--export is empty. Give a value, or leave it out."),
        ((*TRAIN, "--submit", "--cluster", "local", "--partition", "gpu"), "--partition has no effect with --cluster"),
        (("--model", ",", "--dataset", "synthetic"), "--model names nothing: ','"),
        (("status", "x" * 5000), "File name too long. "),
        (("status",), "RUN is missing. Name one: can-train runs lists them"),
        (("status", "a", "b"), "Unexpected argument 'b'"),
        (("runs", "--limit", "abc"), "--limit must be a whole number: 'abc'. See can-train runs --help"),
        (("runs", "--limit", "-3"), "--limit must be at least 0: '-3'"),
        (("factors", "--pin", "abc"), "--pin must be a number: 'abc'"),
        (("factors", "--reset", "--device", "nope", "--yes"), "Nothing has been learned yet"),
        (("evaluate", "x", "--threshold", "abc"), "--threshold must be a number: 'abc'"),
    ],
)
def test_a_flag_that_is_mistyped_is_named_with_what_it_takes(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in said(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        ((*TRAIN, "--target-gpu", "h10"), "Nearest of 82: h100-94gb, h100-80gb, a10-24gb, a100-40gb, a100-80gb; or"),
        ((*TRAIN, "--model-args", "hiden=3"), "hidden, "),
    ],
)
def test_of_a_long_list_of_names_the_nearest_five_are_shown(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], listed: str
) -> None:
    message = said(capsys, *arguments)
    assert listed in message
    assert message.partition("Nearest of ")[2].partition(";")[0].count(",") == 4


def test_a_tracker_that_is_mistyped_or_not_installed_is_said_before_anything_is_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = TRAIN[:-1]
    mistyped = said(capsys, *line, "--tracker", "mlflow,tensorbord")
    assert mistyped == "error: Unknown tracker: 'tensorbord'. Valid, nearest first: tensorboard, mlflow, wandb."
    monkeypatch.setitem(sys.modules, "wandb", None)
    for place in ((), ("--submit", "--cluster", "local")):
        missing = said(capsys, *line, "--tracker", "wandb", *place)
        assert "-m pip install 'can-train[wandb]' Or leave it out: --tracker off." in missing
    assert list(tmp_path.iterdir()) == []


def test_a_model_beyond_the_machines_memory_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*TRAIN, "--set", "model.hidden=99999999999")) == 2
    assert "error: The model must fit into memory: " in capsys.readouterr().err


def test_a_mode_without_a_preset_has_the_defaults_of_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    presets = tmp_path / "configs"
    shutil.copytree(config_folder(), presets)
    (presets / "can" / "mode" / "curriculum.yaml").unlink()
    monkeypatch.setattr(resolved, "config_folder", lambda: presets)
    run = resolve(RunRequest(model="gat", dataset="synthetic", mode="curriculum", model_args="hidden=8,lr=0.5"))
    assert (run.mode.name, run.model.hidden, run.training.lr) == ("curriculum", 8, 0.5)


def test_a_preset_with_an_unknown_setting_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    presets = tmp_path / "configs"
    shutil.copytree(config_folder(), presets)
    (presets / "memory" / "tight.yaml").write_text("# @package training\nepoch: 3\n")
    monkeypatch.setattr(resolved, "config_folder", lambda: presets)
    message = said(capsys, *TRAIN, "--memory", "tight")
    assert "memory/tight.yaml: training.epoch: there is no such setting. Mend it in" in message
    assert "struct" not in message


@pytest.mark.parametrize("arguments", [("-h",), ("factors", "-h"), ("runs", "-h")])
def test_h_is_short_for_help(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert main(arguments) == 0
    assert "Usage: can-train" in capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("--version",)) == 0
    assert capsys.readouterr().out.startswith("can-train 0.")


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("'abc' is not a valid integer range.", "--limit must be a whole number"),
        ("'abc' is not a valid integer.", "--limit must be a whole number"),
        ("Input should be a valid integer, unable to parse", "--limit must be a whole number"),
    ],
)
def test_the_words_of_older_parsers_are_ours_too(message: str, rule: str) -> None:
    command: Any = get_command(_app())
    limit = next(one for one in command.params if one.name == "limit")
    error = BadParameter(message, param=limit)
    assert command._in_own_words(error, {"--limit": "abc"}, "can-train runs").rule == rule


def _app() -> Typer:
    app = Typer(add_completion=False)
    app.command(cls=Command)(runs)
    return app


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("executor: [", "expected the node content, but found '<stream end>' in"),
        ("executor: !!python/object/apply:os.mkdir [owned]", "could not determine a constructor for the tag"),
        ("executr: slurm", "executr: there is no such setting"),
        ("defaults:\n  - schema\nexecutr: slurm", "executr: there is no such setting"),
        ("- a", "a preset must have a setting on each line"),
        ("5", "Invalid loaded object type: int"),
        ("defaults: 3", "defaults must be a list"),
        ("executor: ${oc.env:NOBODY_SETS_THIS}", "Environment variable 'NOBODY_SETS_THIS' not found"),
        ("executor: slurm\nadditional: 5", "cluster.additional must be settings, as {a:1,b:2}: 5"),
        ("executor: slurm\nsetup: 5", "cluster.setup must be a list, as [1,2]: 5"),
        ("executor: slurm\nnodes: many", "nodes: 'many' is not a whole number"),
        ("executor: slurm\ntime: [1]", "time: Cannot convert 'ListConfig' to string"),
        ("executor: slurm\nexecutor: slurm", "found duplicate key executor"),
        ("a: &a [*a]", "cluster/mine.yaml: *a is part of itself"),
        ("[" * 100_000, "cluster/mine.yaml: more than 1,000 brackets"),
        ("\x00", "special characters are not allowed"),
        ("\udcff", "can't decode byte 0xff"),
    ],
)
def test_a_broken_preset_is_named_with_what_is_wrong_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str, message: str
) -> None:
    (tmp_path / "own" / "cluster").mkdir(parents=True)
    (tmp_path / "own" / "cluster" / "mine.yaml").write_bytes(preset.encode(errors="surrogateescape"))
    line = ("--model", "gat", "--dataset", "synthetic", "--config-dir", "own", "--submit", "--cluster", "mine")
    assert message in said(capsys, *line, "--dry-run")
    assert not (tmp_path / "owned").exists()


def test_a_preset_need_not_begin_with_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("executor: slurm\nmem: 4G\n")
    run = resolve(RunRequest(model="gat", dataset="synthetic", cluster="mine", config_dir=str(tmp_path)))
    assert (run.cluster.executor, run.cluster.mem, run.cluster.nodes) == ("slurm", "4G", 1)


LINES = 400
MOST_SECONDS = 20.0
COMMANDS = ("train", "runs", "status", "logs", "cancel", "resume", "resubmit", "show", "compare", "report", "evaluate",
            "export", "predict", "detect", "pipeline", "factors", "completion")  # fmt: skip
HOSTILE = (
    "", " ", "-1", "0", "1e999", "nan", "x" * 255, "x" * 256, "ü" * 128, "x" * 5000, "a/" * 3000, "../" * 50, "/",
    "/dev/null/x", "\n", "[/x]", "[bold]", "${oc.env:HOME}", "$(touch owned)", "`touch owned`", "a=b", "=",
    "a=" + "b" * 300, "x" * 300 + "=1", "training.lr=" + "9" * 400, "training.seed=" + "9" * 5000, "model.hidden=1e400",
    "dataset.window=-1", "training.epochs=[[[[", "training.epochs=" + "[" * 3000, "'", '"', "{", "%s%n", "\udcff", "~",
    "~nobody/x", "~" + "x" * 300, "last", "-", "--", "cpu", "sim:", "sim:1e999GiB", "sim:-1", "cuda:99999999999", "١٢",
    "1" * 5000, "own:" + "x" * 300, "x" * 300 + ".py:T", "\u202e", "*", "?", "a,b,,", "10s", "2/3",
)  # fmt: skip


def test_random_lines_of_real_flags_with_hostile_values_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # No SLURM, and nobody to answer.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    generator, begun = random.Random(0), time.monotonic()
    flags = {name: _parser(name).params for name in COMMANDS}
    failed = []
    for _ in range(LINES):
        line = random_line(generator, flags)
        with suppress(SystemExit):
            try:
                code = main(line)
            except Exception as error:  # noqa: BLE001 - any at all is what is looked for
                failed.append(f"{shlex.join(line)[:300]}: {type(error).__name__}: {str(error)[:200]}")
                continue
            _, err = capfd.readouterr()
            if code not in (0, 2, 3) or "Traceback" in err or (code and "error: " not in err):
                failed.append(f"{shlex.join(line)[:300]}: {code} {err[-300:]}")
        if time.monotonic() - begun > MOST_SECONDS:
            break
    assert failed == []
    assert not (tmp_path / "owned").exists()


def random_line(generator: random.Random, flags: Mapping[str, Sequence[Any]]) -> list[str]:
    """A line of a command that never gets as far as a training: what it should be of does not exist."""
    command = generator.choice(COMMANDS)
    words = [] if command == "train" else [command]
    if command == "train":
        words += generator.choice(
            [["--dataset", generator.choice(HOSTILE[:12])], ["--model", "nobody"], ["--task", "no"]]
        )
        words.append("--dry-run")
    known = [one for one in flags[command] if one.opts[0] not in ("--help", "--watch", "--follow", "--debug")]
    for one in generator.sample(known, min(len(known), generator.randrange(4))):
        value = [] if getattr(one, "is_flag", False) else [generator.choice(HOSTILE)]
        words += [*(one.opts[:1] if one.opts[0].startswith("-") else []), *value]
    return words


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "gat", "--dataset", "~nobody-at-all"),
        ("--model", "gat", "--dataset", "~nobody-at-all/log.csv", "--dry-run"),
        ("--task", "~nobody-at-all/mine.py:Task"),
        ("--model", "gat", "--dataset", "hcrl_ch", "--data-root", "~nobody-at-all", "--dry-run"),
    ],
)
def test_the_home_of_nobody_is_a_path_that_does_not_exist(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert "~nobody" in said(capsys, *arguments)


TASKS = """
import can_train, torch

class Base(can_train.Task):
    def datasets(self): return {"train": torch.ones(8, 2)}
    def model(self): return torch.nn.Linear(2, 1)
    def loss(self, model, batch): return {"loss": (model(batch).sum(), len(batch))}

class ListOfSamples(Base):
    def datasets(self): return [1, 2]

class NoSamples(Base):
    def datasets(self): return {"train": []}

class NoTraining(Base):
    def datasets(self): return {"test": [1]}

class Helper: pass
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "mine.py"), "a class: it has Base, ListOfSamples, NoSamples, NoTraining. Write mine.py:Base."),
        (("--task", "none.py"), "none.py names a file without a class. Write none.py:MyTask."),
        (("--task", "mine.py:Base", "--model", "gat"), "one model, without a name: --model gat. Leave out --model."),
        (("--task", "mine.py:ListOfSamples"), "ListOfSamples.datasets returned a list, and not a dict of sets."),
        (("--task", "mine.py:NoSamples"), "The training set is empty: NoSamples.datasets returned no sample"),
        (("--task", "mine.py:NoTraining"), "NoTraining.datasets returned no set with the name 'train': ['test']."),
        (("gat", "--dataset", "synthetic"), "command: 'gat'. Write: can-train --model gat --dataset synthetic."),
        (("help",), "Unknown command: 'help'. Write: can-train --help."),
        (("version",), "Unknown command: 'version'. Write: can-train --version."),
        (("--resume", "last"), "Unknown flag: --resume. Write: can-train resume --help."),
    ],
)  # fmt: skip
def test_a_line_that_another_tool_would_take_leads_to_the_line_that_was_meant(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    Path("mine.py").write_text(TASKS)
    assert main(words) == 2
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    assert message in " ".join(told.err.split())


@pytest.mark.parametrize(
    ("folder", "fact"),
    [
        ("file", "--cache must be a folder: {here}/file is a file."),
        # Nobody, not even root, makes a file there.
        ("/proc/can-train", "--cache must be a folder that can be written: /proc/can-train: "),
    ],
)
def test_a_folder_for_prepared_data_that_cannot_be_written_is_said_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: str, fact: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CAN_TRAIN_CACHE", folder)
    message = said(capsys, "--model", "gat", "--dataset", "synthetic", "--submit", "--cluster", "local")
    assert message.startswith(f"error: {fact.format(here=tmp_path)}")
    assert message.endswith("Name another: --cache FOLDER.")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("command", ["runs", "top"])
def test_a_missing_folder_lists_no_runs_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    runs = Runs(tmp_path)
    runs.add(1)
    message = said(capsys, command, "--runs-dir", "./nope", "--state-dir", str(runs.state_dir))
    assert "There is no such folder of runs: --runs-dir nope. Leave it out" in message


def flags_of(command: str) -> list[str]:
    return [one.opts[0] for one in _parser(command).params if one.opts[0].startswith("-")]


def test_a_word_in_place_of_a_number_is_answered_with_a_number_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {each.name for each in fields(TrainingSettings) if each.type in ("int", "float", int, float)}
    flags = [flag for flag in flags_of("train") if flag[2:].replace("-", "_") in settings]
    assert len(flags) > 30
    remedies = {}
    for flag in flags:
        message = said(capsys, *TRAIN, flag, "nonsense")
        assert message.startswith(f"error: {flag} must be a ")
        *_, remedies[flag] = message.partition(f": 'nonsense'. Leave it out, or write it as {flag} ")
    # A person types all of them at once.
    typed = {f"training.{flag[2:].replace('-', '_')}": text[:-1] for flag, text in remedies.items()}
    plain = {key: value for key, value in typed.items() if key != "training.gradient_accumulation_steps"}
    assert resolve(RunRequest(model="gat", dataset="synthetic", values=plain)).training.lr == 0.001


@pytest.mark.parametrize("flag", ["--runs-dir", "--state-dir"])
def test_no_command_takes_a_file_for_a_folder(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    Path("file").touch()
    Path("dangling").symlink_to("nowhere")
    commands = [name for name in COMMANDS if flag in flags_of(name)]
    assert len(commands) > 10
    for command in commands:
        words = TRAIN if command == "train" else (command, *FIRST_WORDS.get(command, ("last",)))
        for folder, reason in (("file", "is a file"), ("dangling", "is a link to a place that is not there")):
            rule = f"error: {flag} must be a folder: {folder} {reason}."
            message = said(capsys, *words, flag, folder).replace("Stage autoencoder. ", "")
            assert message == f"{rule} Name another: {flag} FOLDER."


FIRST_WORDS = {"runs": (), "factors": (), "pipeline": ("--dataset", "synthetic"), "export": ("last", "model.pt"),
               "resubmit": ("last",)}  # fmt: skip


WRONG = {
    ("--betas", "0.9"): "--betas must have two numbers: [0.9].\nLeave it out, or write it as --betas '[0.9,0.999]'.",
    ("--betas", "0.9,2"): "Each of --betas must be at least 0 and at most 0.999999999: 2.0.\n"
    "Leave it out, or write it as --betas '[0.9,0.999]'.",
    ("--set", "training.lr=-1"): "training.lr must be greater than 0: -1.0.\n"
    "Leave it out, or write it as --set training.lr=0.001.",
    ("--model-args", "hidden=x"): "model.hidden must be a whole number: 'x'.\n"
    "Leave it out, or write it as --model-args hidden=24.",
    ("--precision", "16"): "Unknown value of --precision: '16'.\nValid, nearest first: fp16, bf16, fp32, fp64.",
    ("--max-time", "tomorrow"): "--max-time is no time limit: 'tomorrow'.\n"
    "A time limit is a number of minutes, or as SLURM writes it. Write it as 90, 1:30:00 or 2-12 (days-hours), or with "
    "a unit: 90min, 12h, 2d.",
    ("--target-memory", "lots"): "--target-memory is no size: 'lots'.\n"
    "A size is a number above zero with its unit. Write it as 512MiB, 1.5GiB or 2GB.",
    ("--tracker", "tensorboard,"): "--tracker has a comma too many: 'tensorboard,'.\n"
    "Write it as --tracker tensorboard.",
    ("--data-root", "/dev/null"): "--data-root must be a folder: /dev/null is a file.\n"
    "Name another: --data-root FOLDER.",
    ("--submit", "--mail-type", "SOMETIMES"): "Unknown value of --mail-type: 'SOMETIMES'.\n"
    "The first of 13: ALL, ARRAY_TASKS, BEGIN, END, FAIL.",
    ("--epochs 3",): "A flag and its value are two words: '--epochs 3'.\nLeave out the quotes: --epochs 3.",
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_an_error_is_two_lines_the_second_of_which_works(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main((*TRAIN, *words)) == 2
    assert capsys.readouterr().err == f"error: {WRONG[words]}\n"
