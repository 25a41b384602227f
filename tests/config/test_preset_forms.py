"""A preset of one's own says what it sets as flags do: with aliases, and with a plain block of training settings."""

from pathlib import Path

import pytest

from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import ResolvedRun
from can_train.errors import ConfigError

CHOICES = {"dataset": "synthetic", "model": "gat_student", "mode": "normal", "cluster": "mine", "memory": "mine"}


def resolved(folder: Path, group: str, text: str) -> ResolvedRun:
    (folder / group).mkdir(parents=True)
    (folder / group / f"{CHOICES[group]}.yaml").write_text(text)
    chosen = {group: "mine"} if group in ("cluster", "memory") else {}
    return resolve(
        RunRequest(model="gat", size="student", dataset="synthetic", mode="normal", config_dir=str(folder), **chosen)
    )


@pytest.mark.parametrize("group", list(CHOICES))
def test_a_plain_training_block_and_its_aliases_work_in_presets_of_every_group(group: str, tmp_path: Path) -> None:
    block = (
        "training:\n  mb_backoff_factor: 3\n  max_epochs: 9\n  scheduler_after_batch: false\nfactor: {target: 0.7}\n"
    )
    defaults = "" if group == "memory" else "defaults: [schema, _self_]\n"
    run = resolved(tmp_path, group, defaults + block)
    made = run.training
    assert (made.backoff_factor, made.epochs, made.scheduler_interval) == (3, 9, "epoch")
    assert run.factor.target == 0.7
    assert (run.dataset.name, run.mode.name) == ("synthetic", "normal")


@pytest.mark.parametrize("head", ["# @package training\n", ""])
def test_aliases_work_in_a_preset_of_memory_with_and_without_its_package(head: str, tmp_path: Path) -> None:
    training = resolved(tmp_path, "memory", f"{head}mb-backoff-factor: 3\ngradient_clip_val: 0.5\n").training
    assert (training.backoff_factor, training.grad_clip_norm) == (3, 0.5)


def test_what_a_group_has_itself_stays_beside_the_block(tmp_path: Path) -> None:
    text = "defaults: [schema]\nhidden: 7\ntraining: {accumulate_grad_batches: 2}\n"
    run = resolved(tmp_path, "model", text)
    assert (run.model.hidden, run.training.gradient_accumulation_steps) == (7, 2)
    text = "# @package _global_\ndefaults: [schema@mode, _self_]\nmode: {name: normal}\ntraining: {accum_steps: 2}\n"
    assert resolved(tmp_path / "global", "mode", text).training.gradient_accumulation_steps == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training: {mb_backoff_factor: 3, backoff_factor: 4}\n", "training.backoff_factor is given twice, as 3 and 4"),
        ("training: {epoch: 3}\n", "training.epoch: there is no such setting"),
    ],
)
def test_a_block_that_is_wrong_is_refused_by_the_name_of_its_setting(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        resolved(tmp_path, "memory", text)
    assert said in str(refused.value)


@pytest.mark.parametrize("block", ["training:\n", "training: {}\n", "training:\n#  epochs: 3\nfactor:\n"])
def test_a_block_whose_lines_are_all_comments_sets_nothing(block: str, tmp_path: Path) -> None:
    assert resolved(tmp_path, "memory", f"oom_retries: 5\n{block}").training.oom_retries == 5
    model = resolved(tmp_path / "model", "model", f"defaults: [schema]\nhidden: 7\n{block}").model
    assert model.hidden == 7
