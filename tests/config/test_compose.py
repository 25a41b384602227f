import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from can_train.config.compose import RunRequest, expand, from_plain, resolve, with_changes
from can_train.config.resolved import PathSettings, ResolvedRun, plain_from_yaml, plain_to_yaml, presets
from can_train.errors import ConfigError, DeviceError


def resolved(**request: Any) -> ResolvedRun:
    return resolve(RunRequest(**{"model": "gat", "dataset": "synthetic"} | request))


def test_a_bare_request_has_the_defaults_of_model_and_mode() -> None:
    run = resolved()
    assert (run.task, run.size, run.mode.name, run.device) == ("can", "student", "normal", "auto")
    assert run.key == "synthetic_gat_student_normal"
    assert asdict(run.model) == {
        "hidden": 24, "layers": 2, "heads": 4, "embedding": 8, "dropout": 0.1, "head_layers": 2,
    }  # fmt: skip
    assert resolved(model="vgae").model.hidden == [80, 40]


def test_a_teacher_differs_by_its_preset() -> None:
    teacher = resolved(size="teacher").model
    assert (teacher.hidden, teacher.layers, teacher.heads, teacher.embedding) == (64, 5, 8, 32)


def test_a_mode_of_one_size_needs_no_flag_for_it() -> None:
    assert resolve(RunRequest(model="gat", dataset="synthetic", mode="knowledge_distillation")).size == "student"


def test_flags_set_and_model_args_override() -> None:
    run = resolved(sets=("dataset.window=50",), model_args="hidden=32", values={"training.lr": 0.5})
    assert (run.dataset.window, run.model.hidden, run.training.lr) == (50, 32, 0.5)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("betas", "[0.9,0.999]", [0.9, 0.999]),
        ("betas", "0.9, 0.999", [0.9, 0.999]),
        ("lr_factors", "[backbone=0.1]", ["backbone=0.1"]),
        ("freeze", "[0]", ["0"]),
        ("freeze", "[ab]*.weight,x[01]", ["[ab]*.weight", "x[01]"]),
        ("no_decay", '["*.bias", norm]', ["*.bias", "norm"]),
        ("optimizer_args", "{momentum=0.5,nesterov=true}", {"momentum": 0.5, "nesterov": True}),
        ("optimizer_args", "{momentum: 0.5}", {"momentum": 0.5}),
    ],
)
def test_a_flag_of_a_list_or_a_dict_may_have_brackets(name: str, text: str, value: Any) -> None:
    assert getattr(resolved(values={f"training.{name}": text}).training, name) == value


@pytest.mark.parametrize(
    ("request_", "window", "stride"),
    [
        ({}, 100, 100),
        ({"sets": ("dataset.window=50",)}, 50, 50),
        ({"values": {"dataset.window": 50}}, 50, 50),
        ({"sets": ("dataset.window=50", "dataset.stride=100")}, 50, 100),
        ({"sets": ("dataset.window=50", "dataset.stride=0")}, 50, 50),
        ({"sets": ("dataset.stride=25",)}, 100, 25),
        ({"dataset": "hcrl_ch", "sets": ("dataset.window=50",)}, 50, 50),
    ],
)
def test_the_stride_follows_the_window_unless_it_is_given(request_: dict[str, Any], window: int, stride: int) -> None:
    run = resolved(**request_)
    assert (run.dataset.window, run.dataset.stride) == (window, stride)
    assert from_plain(run.config).dataset == run.dataset, "a resumed run keeps its stride"


def test_each_window_of_a_sweep_has_its_own_stride() -> None:
    swept = RunRequest(model="gat", dataset="synthetic", sets=("dataset.window=50,200",))
    assert [resolve(request).dataset.stride for request in expand([swept])] == [50, 200]


@pytest.mark.parametrize(("sets", "stride"), [((), 50), (("dataset.stride=25",), 25), (("dataset.stride=100",), 50)])
def test_the_stride_follows_the_window_of_a_changed_run(sets: tuple[str, ...], stride: int) -> None:
    # A stride equal to the window in config.yaml may have been given or not: it follows.
    config = resolved(sets=sets).config
    assert with_changes(config, ["dataset.window=50"], {}).dataset.stride == stride
    assert with_changes(config, ["dataset.window=50", "dataset.stride=10"], {}).dataset.stride == 10


ODD_NAMES = ("a,b (c)=d.csv", "we ird/ünï'\"code.log", "$HOME.csv", "{x}[y].csv", "${oc.env:HOME}.csv", "\\${x}.csv")


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_path_survives_whatever_is_in_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    run = resolved(dataset=str(path))
    assert run.dataset.path == str(path)
    assert from_plain(plain_from_yaml(plain_to_yaml(run.config))) == run


def test_a_log_is_named_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "My Drive-3.csv.gz"
    path.touch()
    assert resolved(dataset=str(path)).key == "my_drive_3_gat_student_normal"


@pytest.mark.parametrize("name", presets("dataset"))
def test_every_data_set_preset_composes(name: str) -> None:
    assert resolved(dataset=name).dataset.name in (name, "synthetic")


def test_hyphens_in_a_data_sets_name_are_underscores() -> None:
    assert resolved(dataset="hcrl-ch").dataset.name == "hcrl_ch"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"model": "gta"}, r"Unknown model: 'gta'.*\n.*first: gat.*\n(.*\n)*.*--model +--mode"),
        ({"dataset": "synthetc"}, r"Unknown data set: 'synthetc'.*\n.*of 12: synthetic"),
        ({"mode": "nomal"}, r"no mode 'nomal'.*\n.*normal"),
        ({"mode": "autoencoder"}, r"no mode 'autoencoder'"),
        ({"mode": "knowledge_distillation", "size": "teacher"}, r"one size only: --size teacher.*\n.*--size student\n"),
        ({"size": "big"}, r"Unknown size: 'big'.*\n.*student"),
        ({"cluster": "locl"}, r"Unknown cluster.*\n.*local"),
        ({"task": "cann"}, r"Unknown task.*\n.*can"),
        ({"sets": ("training.lr=abc",)}, r"training.lr must be a number: 'abc'"),
        ({"sets": ("training.lr=-1",)}, r"training.lr must be greater than 0"),
        ({"sets": ("training.epochs=1.5",)}, r"training.epochs must be a whole number: '1.5'"),
        ({"sets": ("training.lrr=1",)}, r"Unknown setting: 'training.lrr'.*\n.*training.lr,"),
        ({"sets": ("trainin.lr=1",)}, r"Unknown setting.*\n.*training.lr"),
        ({"sets": ("training.precision=fp8",)}, r"training.precision.*'fp8'.*\n.*fp16"),
        ({"sets": ("training.lr=[1",)}, r"A value cannot be read.*\n.*Write it as"),
        ({"sets": ("dataset.identity=maybe",)}, r"dataset.identity.*maybe"),
        ({"values": {"training.epochs": 0}}, r"--epochs must be at least 1"),
        ({"values": {"training.epochs": 2}, "sets": ("training.epochs=3",)}, r"given twice"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**request_)


@pytest.mark.parametrize("model", ["gat", "vgae"])
def test_a_saved_configuration_is_the_same_run(model: str, tmp_path: Path) -> None:
    run = resolved(model=model, dataset=str(tmp_path), sets=("dataset.columns.id=can_id",), values={"training.seed": 7})
    assert from_plain(plain_from_yaml(plain_to_yaml(run.config))) == run


@pytest.mark.parametrize(
    ("group", "values"), [("training", {"epochs": "many"}), ("training", {"unheard_of": 1}), ("model", {"hidden": -1})]
)
def test_a_saved_configuration_that_does_not_fit_is_an_error(group: str, values: dict[str, Any]) -> None:
    plain = dict(resolved().config)
    with pytest.raises(ConfigError):
        from_plain({**plain, group: {**plain[group], **values}})


@pytest.mark.parametrize("text", ["[1]", "a: [", ""])
def test_text_that_is_no_configuration_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"mapping|expected"):
        plain_from_yaml(text)


_NINES = (f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
_ENDLESS = ["a: &a [*a]", "a: &a [*a, *a]", "a: &a {b: *a}", "[" * 2000, "\n".join(["a0: &a0 1", *_NINES])]


@pytest.mark.parametrize("text", _ENDLESS)
def test_text_that_would_be_read_for_ever_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"brackets|part of itself|more than 100,000 values"):
        plain_from_yaml(text)


@pytest.mark.parametrize("text", _ENDLESS)
def test_a_preset_that_would_be_read_for_ever_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "mine.yaml").write_text(f"defaults:\n  - /dataset/synthetic@_here_\n{text}\n")
    with pytest.raises(ConfigError, match=r"dataset/mine\.yaml: "):
        resolved(dataset="mine", config_dir=str(tmp_path))


def test_aliases_in_a_preset_stand_for_what_they_name(tmp_path: Path) -> None:
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "mine.yaml").write_text(
        "defaults:\n  - /dataset/synthetic@_here_\nwindow: &frames 60\nstride: *frames\n"
    )
    assert resolved(dataset="mine", config_dir=str(tmp_path)).dataset.stride == 60


def test_a_saved_configuration_without_folders_does_not_fit() -> None:
    plain = {name: value for name, value in resolved().config.items() if name != "paths"}
    assert from_plain(plain).paths == PathSettings()
    with pytest.raises(ConfigError, match="does not fit this version"):
        from_plain({**plain, "paths": 3})


def test_a_run_saved_before_there_was_a_monitor_has_its_defaults() -> None:
    plain = dict(resolved(sets=("monitor.interval=10", "monitor.warmup=0")).config)
    assert asdict(from_plain(plain).monitor) == plain.pop("monitor") == {"interval": 10, "warmup": 0}
    assert asdict(from_plain(plain).monitor) == {"interval": 50, "warmup": 20}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("monitor.interval=0", "monitor.interval must be at least 1: 0"),
        ("monitor.warmup=-1", "monitor.warmup must be at least 0: -1"),
        ("monitor.intervall=5", r"Unknown setting: 'monitor.intervall'.*\n.*Nearest: monitor.interval,"),
    ],
)
def test_a_monitor_that_makes_no_sense_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(sets=(setting,))


# A second composition


def composed_lr(folder: Path) -> float:
    return resolve(RunRequest(model="gat", dataset="mine", config_dir=str(folder))).training.lr


def test_a_preset_that_has_changed_is_read_again(tmp_path: Path) -> None:
    preset = tmp_path / "dataset" / "mine.yaml"
    preset.parent.mkdir()
    for lr in (0.1, 0.2, 0.3):
        preset.write_text(f"defaults: [synthetic]\ntraining: {{lr: {lr}}}\n")
        assert composed_lr(tmp_path) == lr
    (tmp_path / "mode").mkdir()
    preset.write_text("defaults: [synthetic]\n")
    before = composed_lr(tmp_path)
    (tmp_path / "mode" / "normal.yaml").write_text("training: {lr: 0.7}\n")
    assert (before, composed_lr(tmp_path)) == (pytest.approx(before), 0.7)


def test_a_preset_that_refers_to_the_environment_is_read_again(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "mine.yaml").write_text(
        "defaults: [synthetic]\ntraining: {lr: '${oc.decode:${oc.env:MY_LR}}'}\n"
    )
    for lr in (0.1, 0.2):
        monkeypatch.setenv("MY_LR", str(lr))
        assert composed_lr(tmp_path) == lr


def test_a_run_does_not_change_the_next_one() -> None:
    first = resolve(RunRequest(model="gat", dataset="synthetic", sets=("training.lr=0.5", "training.betas=[0.5,0.6]")))
    second = resolve(RunRequest(model="gat", dataset="synthetic"))
    assert first.training.lr == 0.5
    assert second.training.lr != 0.5
    assert list(second.training.betas) != [0.5, 0.6]


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "sim:much"])
def test_a_device_without_a_meaning_is_refused_before_a_job_is_submitted(device: str) -> None:
    with pytest.raises(DeviceError, match=r"Unknown device|sim:<size>"):
        resolve(RunRequest(model="gat", dataset="synthetic", device=device))


def test_a_data_folder_whose_name_is_not_utf_8_is_refused_before_the_run_has_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"d\xe9ta")
    folder.mkdir()
    (folder / "log.csv").write_text("")
    with pytest.raises(ConfigError, match=r"must be UTF-8: path .*\\udce9ta"):
        resolve(RunRequest(model="gat", dataset=str(folder)))
    with pytest.raises(ConfigError, match=r"must be UTF-8: runs_dir"):
        resolve(RunRequest(model="gat", dataset="synthetic", values={"paths.runs_dir": str(folder)}))
