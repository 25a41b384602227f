"""`can_train.plan`: the figures of a dry run, from Python."""

import json
import random
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

import can_train
from can_train.cli.main import main
from can_train.config.settings import TrainingSettings
from can_train.errors import ConfigError
from fakes.own_tasks import write_task
from fakes.sample_tasks import Words

CARDS = ("sim:64MiB", "sim:1KiB")


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A training line of a task of one's own, in the folder of its file."""
    monkeypatch.chdir(write_task(tmp_path / "work").parent)
    return f"--task my_file.py:MyTask --state-dir {tmp_path / 'state'}"


def test_a_line_has_the_figures_of_its_dry_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    planned = can_train.plan(f"can-train {line} -v", CARDS)
    assert main([*shlex.split(line), "--dry-run", "--json", "--target-gpu", ",".join(CARDS)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert json.loads(json.dumps(planned.to_plain())) == shown
    first, second = planned.cards
    assert (planned.key, planned.fits, first.name, first.fits) == ("my_task", True, "sim-64mib", True)
    figures = shown["plans"][0]
    assert (first.batch, first.binding_limit) == (figures["logical_batch"], figures["binding_limit"]) == (32, "preset")
    assert first.micro_batches == (figures["micro_batches"]["fewest"], figures["micro_batches"]["most"]) == (1, 1)
    assert first.peak_bytes == first.whole_batch_peak_bytes == pytest.approx(figures["predicted_peak_bytes"], abs=1)
    assert first.interval_bytes == pytest.approx(figures["predicted_peak_interval_bytes"], abs=1)
    assert first.largest_batch == figures["largest_batch"]
    assert first.largest_batch is not None
    assert first.largest_batch > 10_000
    assert (second.fits, second.batch, second.micro_batches, second.peak_bytes) == (False, None, None, None)
    assert (second.interval_bytes, second.largest_batch, second.binding_limit) == (None, None, None)


def test_a_line_names_its_devices_itself_where_no_others_are_given(line: str) -> None:
    words = [*shlex.split(line), "--target-gpu", "sim:32MiB", "--target-memory", "8GiB"]
    assert [card.name for card in can_train.plan(words).cards] == ["sim-32mib", "gpu-8gb"]
    assert [card.name for card in can_train.plan(f"{line} --device sim:16MiB").cards] == ["sim-16mib"]


def test_a_batch_that_is_split_has_the_peak_of_the_whole_batch_beside_its_own(line: str) -> None:
    (card,) = can_train.plan(f"{line} --batch-size 200 --set task.hidden=4096", ["sim:6MiB"]).cards
    assert card.micro_batches is not None
    assert card.micro_batches[1] > 1
    assert card.peak_bytes is not None
    assert card.whole_batch_peak_bytes is not None
    assert card.peak_bytes < card.target.capacity_bytes < card.whole_batch_peak_bytes


@pytest.mark.parametrize("task", [Words, Words()], ids=["class", "instance"])
def test_a_task_at_hand_is_planned_with_the_given_training(
    task: "type[Words] | Words", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path))
    planned = can_train.plan(task, ["sim:64MiB"], training=TrainingSettings(batch_size=7))
    assert (planned.key, planned.cards[0].batch, planned.cards[0].binding_limit) == ("words", 7, "requested")
    assert json.loads(json.dumps(planned.to_plain()))["config"]["training"]["batch_size"] == 7


def test_a_program_that_plans_twice_is_left_as_it_was(line: str, tmp_path: Path) -> None:
    files, hydra = sorted(tmp_path.rglob("*")), object()
    GlobalHydra.instance().hydra = hydra  # type: ignore[assignment]
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(3)
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index,union-attr]  # noqa: NPY002
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        first, second = (can_train.plan(line, ["sim:64MiB"]).to_plain() for _ in range(2))
        assert torch.get_num_threads() == threads + 1
        assert GlobalHydra.instance().hydra is hydra
    finally:
        torch.set_num_threads(threads)
        GlobalHydra.instance().clear()
    assert first == second
    assert drawn == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index,union-attr]  # noqa: NPY002
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == files


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (" --batch-size 8,16", "2 runs"),
        (" --submit", "--submit"),
        (" --trials 3", "--trials"),
        (" --help", "no training line"),
        (" --target-gpu h1000", "Unknown GPU"),
        (" --no-such-flag 3", "Unknown flag: --no-such-flag"),
    ],
)
def test_a_line_that_is_no_single_training_is_refused(line: str, more: str, said: str) -> None:
    sweep = more.replace("--batch-size 8,16", "--set training.batch_size=8,16")
    with pytest.raises(ConfigError, match=said):
        can_train.plan(line + sweep)


@pytest.mark.parametrize(
    ("task", "targets", "said"),
    [
        ("runs --json", (), "no training line, which begins with an option: runs --json"),
        ("", (), "no training line"),
        (3, (), "a training line, or a task: 3"),
        (Words, "t4", r"Targets are a list of names: 't4'\.\nGive \['t4'\]"),
        (Words, ["h1000"], "Unknown GPU"),
        (Words, [16], r"A device is its name, or a torch\.device: 16\.\nGive \"t4\""),
        (Words, 16, r"targets is a list of names: 16\.\nGive targets="),
        (Words, [torch.device("meta")], "Unknown GPU"),
        ("--task 'a.py:B", (), "as a shell does it: .*No closing quotation"),
        (Words, ["2400MiB", "16MiB"], "and this GPU has less in all: 16MiB"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said(task: object, targets: "str | list[str]", said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        can_train.plan(task, targets)  # type: ignore[arg-type]


def test_a_plan_is_for_devices_here_too() -> None:
    by_name, as_device = (can_train.plan(Words, [device]).cards[0] for device in ("cpu", torch.device("cpu")))
    assert by_name.name == as_device.name == can_train.plan(Words).cards[0].name
    with pytest.raises(ConfigError, match="training is a TrainingSettings"):
        can_train.plan(Words, ["t4"], training={"batch_size": 3})
