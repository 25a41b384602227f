import pytest

from can_train.cli.options import canonical_arguments, training_parameters
from can_train.config.settings import TrainingSettings
from can_train.errors import ConfigError


def test_every_training_setting_is_a_flag_with_help() -> None:
    parameters = {parameter.name: parameter for parameter in training_parameters()}
    assert set(parameters) == set(TrainingSettings.__dataclass_fields__)
    assert all(parameter.annotation.__metadata__[0].help for parameter in parameters.values())


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        (["--batch_size", "3"], ["--batch-size", "3"]),
        (["--max_epochs=3"], ["--epochs=3"]),
        (["--accumulate-grad-batches", "2"], ["--gradient-accumulation-steps", "2"]),
        (["--dataset", "a_b--c_d"], ["--dataset", "a_b--c_d"]),
        (["--dataset=a_b=c_d"], ["--dataset=a_b=c_d"]),
        (["factors", "my_key", "--", "--max_epochs"], ["factors", "my_key", "--", "--max_epochs"]),
    ],
)
def test_flags_are_rewritten_and_values_are_not(given: list[str], canonical: list[str]) -> None:
    assert canonical_arguments(given) == canonical


def test_two_spellings_with_the_same_value_are_fine() -> None:
    assert canonical_arguments(["--epochs", "3", "--max-epochs=3"]) == ["--epochs", "3", "--epochs=3"]


def test_two_spellings_with_different_values_are_not() -> None:
    with pytest.raises(ConfigError, match=r"--epochs 3 and --max-epochs 4"):
        canonical_arguments(["--epochs", "3", "--max-epochs", "4"])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--regrow=false", "--no-regrow"),
        ("--regrow=TRUE", "--regrow"),
        ("--adaptive_micro_batch=0", "--no-adaptive-micro-batch"),
        ("--batch-size=1", "--batch-size=1"),
    ],
)
def test_switches_take_the_values_that_presets_have(written: str, meant: str) -> None:
    assert canonical_arguments([written]) == [meant]


def test_a_switch_is_on_or_off() -> None:
    with pytest.raises(ConfigError, match=r"--regrow is on or off: maybe\.\nGive --regrow, or --no-regrow"):
        canonical_arguments(["--regrow=maybe"])
