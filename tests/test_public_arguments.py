"""No argument of the Python API ends in a raw error, or is ignored, where it is of a wrong type."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import can_train
from can_train import CanTrainError, Feature, MicroBatcher

X = torch.ones(8, 4)
MODEL = nn.Linear(4, 2)
POINT = can_train.FactorPoint(used=0.5, peak=0.6)


def losses(start: int, stop: int) -> Any:
    return {"loss": (MODEL(X[start:stop]).square().sum(), stop - start)}


def loss_of(rows: Any) -> Any:
    return MODEL(X[rows % 8]).square().sum()


def doors(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Functions of the Python API by name, with arguments that are right where they have no default."""
    batcher, store = MicroBatcher(MODEL), can_train.get_safety_factor_db(folder)
    return {
        "AffinePolicy": (can_train.AffinePolicy, {}),
        "AffinePolicy.next_factor": (can_train.AffinePolicy().next_factor, {"history": [POINT], "first": 0.5}),
        "FactorPoint": (can_train.FactorPoint, {"used": 0.5, "peak": 0.6}),
        "Feature": (Feature, {"name": "tokens"}),
        "LoopSettings": (can_train.LoopSettings, {}),
        "MemoryMonitor": (can_train.MemoryMonitor, {"device": "cpu"}),
        "MemoryMonitorCallback": (can_train.MemoryMonitorCallback, {}),
        "MicroBatchCallback": (can_train.MicroBatchCallback, {}),
        "MicroBatcher": (MicroBatcher, {"model": MODEL}),
        "MicroBatcher.evaluate": (batcher.evaluate, {"compute": lambda start, stop: 0, "batch": 8}),
        "MicroBatcher.load_state_dict": (batcher.load_state_dict, {"state": batcher.state_dict()}),
        "MicroBatcher.run": (batcher.run, {"losses_of": losses, "batch": 8}),
        "MicroBatcher.run_share": (batcher.run_share, {"losses_of": losses, "batch": 8, "denominators": None}),
        "MicroBatcher.watch": (batcher.watch, {"on_oom": lambda: None}),
        "MomentumPolicy": (can_train.MomentumPolicy, {}),
        "MomentumPolicy.next_factor": (can_train.MomentumPolicy().next_factor, {"history": [POINT], "first": 0.5}),
        "find_max_size": (can_train.find_max_size, {"trial": lambda size: size, "upper": 9}),
        "get_effective_safety_factor": (can_train.get_effective_safety_factor, {"config": {}}),
        "get_safety_factor_db": (can_train.get_safety_factor_db, {}),
        "get_safety_factor_db().get_factor": (store.get_factor, {"key": "a"}),
        "get_safety_factor_db().get_stats": (store.get_stats, {"key": "a"}),
        "get_safety_factor_db().pin": (store.pin, {"key": "a", "value": 0.5}),
        "get_safety_factor_db().reset": (store.reset, {"key": "a"}),
        "get_safety_factor_db().unpin": (store.unpin, {"key": "a"}),
        "load": (can_train.load, {"run": folder}),
        "plan": (can_train.plan, {"task_or_line": "--model"}),
        "predict_peak": (partial(can_train.predict_peak), {"task_or_model": MODEL, "batch": 8, "loss_of": loss_of}),
        "scale_batch_size": (can_train.scale_batch_size, {"trainer": None, "model": None}),
        "simulated_gpu": (lambda memory: can_train.simulated_gpu(memory).__enter__(), {"memory": "1MiB"}),
        "solve_accumulation": (can_train.solve_accumulation, {"desired": 8, "limit": 4}),
    }


NAMES = tuple(doors(Path("unused")))
# Results, and classes that users derive from or that others make; and what takes any object.
NO_DOORS = {"BatchResult", "CanTrainError", "CardPlan", "LoadedModel", "MemoryPart", "PeakPrediction", "Plans",
            "SizeSearch", "Task", "TaskContext", "Phase", "MicroBatchTrainerMixin", "is_out_of_memory"}  # fmt: skip
# can-train gives these itself, or a regression whose fields are its own.
INTERNAL = {"shards", "limit", "prior", "same_device"}


class Other:
    """An object that no argument takes."""


def test_every_public_function_is_among_the_doors() -> None:
    assert {name.partition(".")[0].partition("(")[0] for name in NAMES} == {*can_train.__all__} - NO_DOORS


@pytest.mark.parametrize("name", NAMES)
def test_an_object_of_another_type_is_refused_for_every_argument(name: str, tmp_path: Path) -> None:
    call, right = doors(tmp_path)[name]
    for argument in inspect.signature(call).parameters.keys() - INTERNAL:
        with pytest.raises(CanTrainError) as told:
            call(**{**right, argument: Other()})
        assert told.value.remedy, (argument, told.value)
