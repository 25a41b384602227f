"""A run as a file: written and read again it is the same run, and a mistake in it is named with its line."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from can_train.config.compose import RunRequest, from_file, resolve
from can_train.config.resolved import UserFile, flat, plain_to_yaml
from can_train.errors import ConfigError
from fakes.own_tasks import write_task

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(str.strip)
NUMBER = st.floats(1e-9, 10.0, exclude_max=True)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "training.lr": NUMBER,
        "training.epochs": st.integers(1, 10**6),
        "training.seed": st.integers(0, 2**31 - 1),
        "training.batch_size": st.integers(1, 999),
        "training.deterministic": st.booleans(),
        "training.freeze": st.lists(st.sampled_from(["a", "b.*", "off", "1", "null", "- x", "a: b"]), max_size=2),
        "training.optimizer_args": st.dictionaries(st.sampled_from(["momentum", "nesterov"]), NUMBER, max_size=2),
        "factor.target": st.floats(0.5, 0.95),
        "dataset.window": st.integers(10, 400),
        "dataset.synthetic.seconds": st.floats(5, 600),
        "model.dropout": st.floats(0, 0.9),
        "mode.baselines": st.booleans(),
        "paths.data_root": TEXT,
        "paths.runs_dir": TEXT,
    },
)
REQUESTS = st.sampled_from([
    {"model": "gat"}, {"model": "gat", "size": "teacher", "mode": "curriculum"}, {"model": "vgae", "memory": "tight"},
])  # fmt: skip


def resolved_run(request: dict[str, Any], values: dict[str, Any]) -> Any:
    return resolve(RunRequest(dataset="synthetic", **request, values=values))


@settings(max_examples=10)
@given(REQUESTS, VALUES)
@example({"model": "gat"}, {"paths.runs_dir": "a\x85b"})
def test_a_run_that_is_written_and_read_is_the_same(request: dict[str, Any], values: dict[str, Any]) -> None:
    run = resolved_run(request, values)
    text = plain_to_yaml(run.config)
    again = from_file(text, "run.yaml")
    assert again == run
    assert again.key == run.key
    assert plain_to_yaml(again.config) == text


@settings(max_examples=8)
@given(REQUESTS.filter(lambda request: "memory" not in request), st.data())
def test_a_setting_that_the_file_leaves_out_is_the_presets(request: dict[str, Any], data: st.DataObject) -> None:
    run = resolved_run(request, {"training.seed": 7})
    names = [name for name, _ in flat(run.config)]
    kept = {"model_name", "size", "mode.name", "dataset.name", "training.seed"}
    gone = data.draw(st.sets(st.sampled_from([name for name in names if name not in kept])))
    assert from_file(plain_to_yaml(without(run.config, gone)), "run.yaml") == run


def without(plain: Any, gone: set[str], before: str = "") -> dict[str, Any]:
    return {name: without(value, gone, f"{before}{name}.") if isinstance(value, dict) and value else value
            for name, value in plain.items() if f"{before}{name}" not in gone}  # fmt: skip


def test_a_file_of_a_few_lines_is_a_run() -> None:
    run = from_file("model_name: gat\ndataset: {name: synthetic}\ntask: can\ntraining:\n  lr: 0.5\n", "run.yaml")
    assert run == resolved_run({"model": "gat"}, {"training.lr": 0.5})


FILE = """task: can
model_name: gat
size: student
dataset:
  name: synthetic
  window: 50
training:
  lr: 0.01
  epochs: 3
task_settings: {}
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "  lr: 0.01",
            "  learning_rate: 0.01",
            "run.yaml line 8: Unknown setting: 'training.learning_rate'.\nNearest: ",
        ),
        ("  lr: 0.01", "  lr: fast", "run.yaml line 8: training.lr must be a number: 'fast'."),
        ("  epochs: 3", "  epochs: 0", "run.yaml line 9: training.epochs must be at least 1: 0."),
        ("  window: 50", "  windw: 50", "run.yaml line 6: Unknown setting: 'dataset.windw'.\nNearest: dataset.window,"),
        ("  lr: 0.01", "  lr: [0.01", "run.yaml is no configuration of a run: "),
        ("model_name: gat", "model_name: gta", "run.yaml line 2: Unknown model: 'gta'.\nValid, nearest first: gat,"),
        ("task: can", "task: cn", "run.yaml line 1: Unknown task: 'cn'"),
        ("size: student", "size: small", "run.yaml line 3: Unknown size: 'small'"),
        ("task: can", "- can", "run.yaml is no configuration of a run: "),
        ("  epochs: 3", "  epochs: {a: 1}", "run.yaml line 9: Unknown setting: 'training.epochs.a'"),
        ("training:\n  lr: 0.01\n  epochs: 3", "training: 3", "run.yaml line 7: training must be settings"),
        ("dataset:", "dataset: *x #", "run.yaml is no configuration of a run: "),
    ],
)
def test_a_mistake_is_named_with_its_line(old: str, new: str, expected: str) -> None:
    text = FILE.replace("task_settings: {}\n", "")
    assert from_file(text, "run.yaml").training.epochs == 3
    with pytest.raises(ConfigError) as caught:
        from_file(text.replace(old, new), "run.yaml")
    assert expected in str(caught.value)


def test_an_unknown_group_is_named() -> None:
    with pytest.raises(ConfigError, match=r"line 10: Unknown setting: 'task_settings\.a'"):
        from_file(FILE.replace("{}", "{a: 1}"), "run.yaml")


def test_a_persons_own_defaults_do_not_change_a_file(tmp_path: Path) -> None:
    own = UserFile(tmp_path / "config.yaml", {"tracker": "mlflow", "runs_dir": "mine"})
    run = resolve(RunRequest(model="gat", dataset="synthetic", user_file=own))
    assert run.paths.tracker == "mlflow"
    assert from_file(plain_to_yaml(run.config), "run.yaml") == run
    assert from_file(FILE.replace("task_settings: {}\n", ""), "run.yaml").paths.tracker == "off"


def test_the_code_of_a_task_is_looked_for_beside_the_file_where_its_folder_is_gone(tmp_path: Path) -> None:
    path = write_task(tmp_path / "code")
    run = resolve(RunRequest(task=f"{path}:MyTask", values={"settings.hidden": 8}))
    text = plain_to_yaml(run.config)
    assert from_file(text, "run.yaml") == run
    (tmp_path / "code").rename(tmp_path / "moved")
    moved = from_file(text, "run.yaml", beside=tmp_path / "moved")
    assert moved.paths.code_dir == str(tmp_path / "moved")
    assert moved.settings.hidden == 8
    assert yaml.safe_load(plain_to_yaml(moved.config))["task"] == "my_file.py:MyTask"


SETTINGS = """
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import can_train


class Norm(Enum):
    none = 0
    group = 1


class Kinds(can_train.Task):
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        root: Path = Path("/tmp")
        norm: Norm = Norm.none
        places: list[Path] = field(default_factory=lambda: [Path("a")])

    def datasets(self): ...
    def model(self): ...
    def loss(self, model, batch): ...
"""


def test_paths_and_enumerations_are_written_and_read(tmp_path: Path) -> None:
    (tmp_path / "kinds.py").write_text(SETTINGS)
    sets = ("task.norm=group", "task.root=/data", "task.places=[b,c]")
    run = resolve(RunRequest(task=f"{tmp_path / 'kinds.py'}:Kinds", sets=sets))
    text = plain_to_yaml(run.config)
    assert yaml.safe_load(text)["settings"] == {"root": "/data", "norm": "group", "places": ["b", "c"]}
    read = from_file(text, "run.yaml")
    assert read.config == run.config
    assert (read.settings.root, read.settings.norm.value) == (Path("/data"), 1)
    assert read.settings.places == [Path("b"), Path("c")]
