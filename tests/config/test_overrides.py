import pytest
from hypothesis import given
from hypothesis import strategies as st

from can_train.config.overrides import check_contradictions, from_model_args, from_set
from can_train.config.settings import ALIASES, TrainingSettings, canonical_name, split_list
from can_train.errors import ConfigError
from can_train_tasks.can.settings import CanModeSettings, GatSettings

GROUPS = {"training": TrainingSettings, "model": GatSettings, "mode": CanModeSettings}


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_is_a_training_setting_however_it_is_hyphenated(alias: str) -> None:
    assert canonical_name(alias) in TrainingSettings.__dataclass_fields__
    assert canonical_name(alias.replace("_", "-")) == canonical_name(alias)


def test_choices_may_be_written_with_underscores() -> None:
    assert TrainingSettings(scheduler="one_cycle") == TrainingSettings(scheduler="one-cycle")
    assert TrainingSettings(fit="offload_optimizer").fit == "offload-optimizer"
    with pytest.raises(ConfigError, match=r"training.scheduler: 'one_circle'"):
        TrainingSettings(scheduler="one_circle")


def test_set_resolves_aliases_of_training_settings_only() -> None:
    assert from_set("training.max_epochs=3").key == "training.epochs"
    assert from_set("other.max_epochs=3").key == "other.max_epochs"


def test_set_keeps_everything_after_the_first_equals_sign() -> None:
    assert from_set("dataset.path=a=b,(c)").value == "a=b,(c)"


@pytest.mark.parametrize("text", ["foo", "=3", ""])
def test_set_without_a_key_and_a_value_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--set takes group.key=value"):
        from_set(text)


def test_the_older_scheduler_switch_names_the_interval() -> None:
    assert from_set("training.scheduler_after_batch=True").value == "step"
    assert from_set("training.scheduler-after-batch=false").value == "epoch"


def test_model_args_go_to_whoever_knows_them() -> None:
    given = from_model_args("hidden=32,lr=0.01,max_epochs=4", GROUPS)
    keys = {override.key: override.value for override in given}
    assert keys == {"model.hidden": "32", "training.lr": "0.01", "training.epochs": "4"}


def test_model_args_keep_lists_whole() -> None:
    assert [override.value for override in from_model_args("hidden=[80,40],lr=1", GROUPS)] == ["[80,40]", "1"]


def test_an_unknown_model_arg_lists_the_nearest_first() -> None:
    with pytest.raises(ConfigError, match=r"'hiden'.*\n.*Nearest of [0-9]+: hidden"):
        from_model_args("hiden=3", GROUPS)


def test_two_spellings_with_different_values_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"training.epochs is given twice"):
        check_contradictions([from_set("training.epochs=3"), from_set("training.max_epochs=4")])


def test_two_spellings_with_the_same_value_are_none() -> None:
    check_contradictions([from_set("training.epochs=3"), from_set("training.max_epochs=3")])


def test_the_same_spelling_twice_means_the_last() -> None:
    check_contradictions([from_set("training.epochs=3"), from_set("training.epochs=4")])


@given(st.lists(st.from_regex(r"[a-z][a-z *.=:-]*[a-z0-9]", fullmatch=True)))
def test_a_list_is_split_at_commas(parts: list[str]) -> None:
    assert list(split_list(",".join(parts))) == list(split_list(f"[{','.join(parts)}]")) == parts


def test_brackets_within_a_list_stay() -> None:
    assert list(split_list("[ab]*.we,head[0]")) == ["[ab]*.we", "head[0]"]
    assert list(split_list("[[ab]*.we,head]")) == ["[ab]*.we", "head"]
    assert list(split_list("[,]]")) == ["[", "]]"]


def test_a_path_that_exists_is_not_split() -> None:
    assert list(split_list("a,b.csv", existing=["a,b.csv"])) == ["a,b.csv"]
