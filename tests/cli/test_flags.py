import inspect
from typing import Any

import pytest
import typer

from can_train.cli.main import Command
from can_train.cli.train_options import OPTIONS, make_command
from can_train.config.settings import TrainingSettings
from can_train.errors import ConfigError


def given(*arguments: str) -> dict[str, Any]:
    """Returns the flags that a training command gets from its arguments."""
    found: list[dict[str, Any]] = []
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=Command)(make_command(OPTIONS, found.append))
    app(list(arguments), standalone_mode=False)
    return {name: value for name, value in found[0].items() if value is not None}


def test_every_training_setting_is_a_flag_with_help() -> None:
    parameters = inspect.signature(make_command({}, print)).parameters
    assert set(parameters) == set(TrainingSettings.__dataclass_fields__)
    assert all(parameter.annotation.__metadata__[0].help for parameter in parameters.values())


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--batch_size", "3"], "batch_size", "3"),
        (["--max_epochs=3"], "epochs", "3"),
        (["--accumulate-grad-batches", "2"], "gradient_accumulation_steps", "2"),
        (["--dataset", "a_b--c_d"], "dataset", "a_b--c_d"),
        (["--dataset=a_b=c_d"], "dataset", "a_b=c_d"),
    ],
)
def test_flags_have_several_spellings_and_values_are_as_given(arguments: list[str], name: str, value: str) -> None:
    assert given(*arguments)[name] == value


def test_what_follows_two_hyphens_is_no_flag() -> None:
    found: list[str] = []

    def command(key: str) -> None:
        found.append(key)

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=Command)(command)
    app(["--", "--max_epochs"], standalone_mode=False)
    assert found == ["--max_epochs"]


def test_two_spellings_with_the_same_value_are_fine() -> None:
    assert given("--epochs", "3", "--max-epochs=3")["epochs"] == "3"


def test_the_same_spelling_twice_means_the_last() -> None:
    assert given("--epochs", "3", "--epochs=4")["epochs"] == "4"


def test_two_spellings_with_different_values_are_not() -> None:
    with pytest.raises(ConfigError, match=r"--epochs 3 and --max-epochs 4"):
        given("--epochs", "3", "--max-epochs", "4")


def test_an_unknown_flag_lists_the_nearest_five() -> None:
    with pytest.raises(ConfigError, match=r"Unknown flag: --bath_size\.\nNearest: --batch-size(, --[a-z-]+){4}\.$"):
        given("--bath_size", "3")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--regrow=false", {"regrow": False}),
        ("--regrow=TRUE", {"regrow": True}),
        ("--adaptive_micro_batch=0", {"adaptive_micro_batch": False}),
        ("--no-baselines", {"baselines": False}),
        ("--batch-size=1", {"batch_size": "1"}),
    ],
)
def test_switches_take_the_values_that_presets_have(written: str, meant: dict[str, Any]) -> None:
    found = given(written)
    assert {name: found[name] for name in meant} == meant


def test_a_switch_is_on_or_off() -> None:
    with pytest.raises(ConfigError, match=r"--regrow is on or off: maybe\.\nGive --regrow, or --no-regrow"):
        given("--regrow=maybe")
