"""What the loops of training frameworks may be given, and what they are told otherwise."""

from typing import Any

import numpy as np
import pytest
import torch

from can_train import CanTrainError, LoopSettings, MemoryMonitorCallback, MicroBatchCallback, MicroBatchTrainerMixin
from can_train.errors import ArgumentError

WRONG: tuple[Any, ...] = (3, 2.5, [3], torch.ones(3), object())
FIELDS = ("device", "limits", "select", "counts", "key", "learn", "state_dir", "search", "fit")


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_setting_is_told_where_it_is_written(name: str) -> None:
    for wrong in WRONG[name == "limits" :]:
        with pytest.raises(CanTrainError, match=r"\n"):
            LoopSettings(**{name: wrong})


@pytest.mark.parametrize("field", [{"device": torch.device("cpu")}, {"limits": np.int64(4)}, {"fit": "offload"}])
def test_a_setting_is_taken_as_micro_batcher_takes_it(field: dict[str, Any]) -> None:
    LoopSettings(**field)


@pytest.mark.parametrize("fit", ["offload-optimizer", "offload-all"])
def test_the_remedy_for_a_state_that_stays_on_the_device_works(fit: str) -> None:
    with pytest.raises(ArgumentError, match=r"A framework steps its optimizer itself.*\nGive fit='offload', or leave"):
        LoopSettings(fit=fit)


class Trainer:
    """Stands for the Trainer of transformers."""

    def __init__(self, model: Any = None) -> None:
        self.model = model

    def training_step(self, model: Any, inputs: Any) -> None:
        """Is there."""


class Splitting(MicroBatchTrainerMixin, Trainer):
    """A Trainer whose batches fit."""


@pytest.mark.parametrize(
    ("settings", "inside"),
    [
        ("sim:64MiB", 'device="sim:64MiB"'),
        (torch.device("cuda", 1), 'device="cuda:1"'),
        (64, "limits=64"),
        (True, ""),
        ({"limits": 64}, ""),
        (LoopSettings, ""),
    ],
    ids=str,
)
def test_settings_that_are_none_are_answered_with_a_line_that_works(settings: Any, inside: str) -> None:
    with pytest.raises(ArgumentError, match=r"The settings of a loop are a LoopSettings") as of_lightning:
        MicroBatchCallback(settings)
    assert of_lightning.value.remedy == f"Give MicroBatchCallback(LoopSettings({inside}))"
    with pytest.raises(ArgumentError) as of_trainer:
        Splitting(None, loop_settings=settings)
    assert of_trainer.value.remedy == f"Give Splitting(..., loop_settings=LoopSettings({inside}))"


@pytest.mark.parametrize("name", ["interval", "warmup", "device", "safety_factor"])
def test_a_wrong_argument_of_the_monitors_callback_is_told(name: str) -> None:
    for wrong in ([3], "x" if name != "device" else 3, torch.ones(3), object()):
        with pytest.raises(ArgumentError, match=r"\nGive "):
            MemoryMonitorCallback(**{name: wrong})
