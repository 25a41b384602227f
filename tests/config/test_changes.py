"""A resolved configuration with changes: in Hydra's grammar, of settings that there are."""

from typing import Any

import pytest

from can_train.config.compose import RunRequest, changed_settings, resolve, resolve_again, with_changes
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
        ("training.lr=1,2", "several values of a setting"),
        ("training.lr=range(1,3)", "several values of a setting"),
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


SETS = ("training.lr=0.5", "dataset.window=50", "model.hidden=8", "training.oom_retries=9")


def again(chosen: dict[str, str], *sets: str) -> dict[str, Any]:
    """Resolves a run like one with `SETS`; returns what differs from its presets, and what it is."""
    plain = resolve(RunRequest(model="gat", dataset="synthetic", size="student", device="cpu", sets=SETS)).config
    run = resolve_again(plain, RunRequest(model="", dataset="", sets=sets), chosen)
    return {"key": run.key, "device": run.device} | {
        name.rpartition(".")[2]: one["value"] for name, one in (changed_settings(run.config) or {}).items()
    }


@pytest.mark.parametrize(
    ("chosen", "sets", "found"),
    [
        ({}, (), {"key": "synthetic_gat_student_normal", "lr": 0.5, "window": 50, "hidden": 8, "oom_retries": 9}),
        ({"device": "cuda"}, ("training.lr=0.1",), {"device": "cuda", "lr": 0.1, "hidden": 8}),
        ({"size": "teacher"}, (), {"key": "synthetic_gat_teacher_normal", "lr": 0.5, "window": 50}),
        ({"model": "vgae"}, (), {"key": "synthetic_vgae_student_autoencoder", "lr": 0.5, "window": 50}),
        ({}, ("model=vgae", "dataset.window=20"), {"key": "synthetic_vgae_student_autoencoder", "window": 20}),
        ({"dataset": "hcrl_ch"}, (), {"key": "hcrl_ch_gat_student_normal", "window": 50, "hidden": 8}),
        ({"memory": "tight"}, (), {"oom_retries": 5, "backoff_factor": 4.0, "lr": 0.5, "hidden": 8}),
    ],
)
def test_what_was_set_stays_but_for_what_another_preset_replaces(
    chosen: dict[str, str], sets: tuple[str, ...], found: dict[str, Any]
) -> None:
    changed = again(chosen, *sets)
    assert found.items() <= changed.items()
    assert ("hidden" in changed) == (not chosen.keys() & {"size", "model"} and "model=vgae" not in sets)
    assert "stride" not in changed, "it follows the window"


def test_another_model_that_there_is_not_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match="Unknown model: 'gta'"):
        again({"model": "gta"})
