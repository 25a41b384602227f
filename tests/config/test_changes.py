"""A resolved configuration with changes: in Hydra's grammar, of settings that there are."""

from typing import Any

import pytest

from can_train.config.compose import RunRequest, resolve, with_changes
from can_train.errors import ConfigError


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return dict(resolve(RunRequest(model="gat", dataset="synthetic", size="student", cluster="slurm")).config)


def test_settings_are_changed_and_the_others_stay(plain: dict[str, Any]) -> None:
    sets = ["training.lr=0.01", "cluster.setup=['module load x','echo ${HOME}']", "cluster.additional.nice=5"]
    run = with_changes(plain, sets, {"cluster.mem": "2G"})
    assert (run.training.lr, run.cluster.mem, run.cluster.additional) == (0.01, "2G", {"nice": 5})
    assert list(run.cluster.setup) == ["module load x", "echo ${HOME}"]
    assert run.model == with_changes(plain, [], {}).model
    assert plain["training"]["lr"] != 0.01, "the configuration that was given stays as it was"


def test_an_alias_is_its_setting(plain: dict[str, Any]) -> None:
    assert with_changes(plain, ["training.max_epochs=2"], {}).training.epochs == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training.lrr=1", r"Unknown setting: 'training.lrr'(.|\n)*training\.lr,"),
        ("model=vgae", "Unknown setting: 'model'"),
        ("task=x", "Unknown setting: 'task'"),
        ("training.lr=1,2", "one value of each setting"),
        ("training.lr=range(1,3)", "one value of each setting"),
        ("training.lr=[", "cannot be read"),
        ("training.lr=fast", "training.lr"),
        ("training.epochs=0", "training.epochs must be at least 1"),
        ("lr", "--set takes group.key=value"),
        ("training=3", "Unknown setting: 'training'"),
    ],
)
def test_what_is_wrong_is_said(plain: dict[str, Any], text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_changes(plain, [text], {})


def test_a_setting_given_twice_is_an_error(plain: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        with_changes(plain, ["cluster.mem=1G"], {"cluster.mem": "2G"})
