"""Scripts of Lightning users with MicroBatchCallback. Without a split, a training leaves bitwise all that the plain
program leaves. With a split it is equal up to round-off, or the script is told, or refused with a remedy.
"""

import pickle
import re
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from can_train import LoopSettings, MicroBatchCallback
from fakes.lightning_scripts import SCRIPTS, Facts, differences, room_for, train
from fakes.lightning_warnings import QUIET_LIGHTNING

ROUND_OFF = 1e-10
FITS = 4  # Samples, of batches of 9
SPLITS = ["limits", "forward", "backward", "second"]  # How a split comes about: by limits, or where memory runs out

# Scripts whose batches are not split: words of the error where memory runs out, and of its remedy.
REFUSED = {
    "contrastive": ("cutting it changes its gradient by", "for a loss that compares samples, take a smaller batch"),
    "hidden_state": ("of its 9 samples fail alone .*hidden", "Take a smaller batch, or recompute activations"),
    "gan": ("its training_step has 2 optimizers", "Cut its batches with MicroBatcher"),
    "two_optimizers_of_one_loss": ("its training_step has 2 optimizers", "Cut its batches with MicroBatcher"),
    "manual_plain_backward": ("computes its gradient without one manual_backward", "Cut its batches with MicroBatcher"),
    "loaders_in_a_dict": ("its rows come from 2 loaders", "Cut its batches with MicroBatcher"),
    "loaders_in_a_list": ("its rows come from 2 loaders", "Cut its batches with MicroBatcher"),
    "dataloader_iter": ("its training_step fetches it by itself", "Cut its batches with MicroBatcher"),
    "batches_without_tensors": ("its tensors have no common rows", "LoopSettings(select=..., counts=...)"),
    "module_without_parameters": ("its model has no parameters", "Take a smaller batch"),
}
# Scripts whose training differs once it is split: words of the warning.
TOLD = {
    "batch_norm": r"through net\.between\.0: micro-batches change the gradient of loss by \d+\.\d%",
    "augmented": "The step draws random numbers, and others for micro-batches",
    "manual_with_a_mapping": "training_step ends for its last part alone: the values logits, size",
    "manual_log_after_the_step": "training_step ends for its last part alone: the values share",
}
# Dropout draws other masks, and half precision rounds otherwise (docs/python.md).
DIFFERENT = {"dropout", "bf16_mixed"}
# Errors of the script itself.
FAILING = {"mapping_without_a_loss", "float_in_place_of_a_loss", "key_logged_in_two_ways", "error_in_a_step",
           "interrupted"}  # fmt: skip
# Numbers that a split draws more often; of what ran before memory ran out the logger has its row already.
LEFT_OUT = {"buffers_and_generators": ("random", "drawn"), "lazy_layers": ("random",)}
SPLIT = sorted(SCRIPTS.keys() - REFUSED.keys() - TOLD.keys() - DIFFERENT - FAILING)

pytestmark = [pytest.mark.slow, QUIET_LIGHTNING]


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    return import_module("lightning.pytorch")


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    earlier = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(earlier)


@pytest.fixture(scope="module")
def plainly(lightning: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def plain(name: str) -> Facts:
        return run(lightning, name, tmp_path_factory.mktemp(name))[0]

    return plain


def run(lightning: Any, name: str, folder: Path, *ours: Any, first: bool = False) -> tuple[Facts, str]:
    """Trains a script; returns all that it leaves, and the warnings of can-train."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Whatever it ends with is compared.
        facts = train(lightning, name, folder, *ours, first=first, catches=(Exception, SystemExit))
    told = [str(one.message) for one in caught if "can_train" in one.filename]
    return facts, "\n".join(told)


def split(lightning: Any, name: str, folder: Path, how: str) -> tuple[Facts, str]:
    """Trains a script whose batches do not fit."""
    limits = FITS if how == "limits" else None
    callback = MicroBatchCallback(LoopSettings(learn=False, limits=limits))
    with room_for(float("inf") if limits else FITS, "forward" if limits else how):
        return run(lightning, name, folder, callback)


def compared(one: Facts, other: Facts, tolerance: float, left_out: tuple[str, ...] = ()) -> list[str]:
    found = [*differences(one.numbers, other.numbers, tolerance), *differences(one.exact, other.exact)]
    return [line for line in found if not any(name in line.partition(":")[0] for name in left_out)]


# The callback is the first of half of the scripts, and the last of the others.
@pytest.mark.parametrize(("name", "first"), [(name, number % 2 == 0) for number, name in enumerate(SCRIPTS)])
def test_a_script_whose_batches_fit_is_the_plain_program(
    lightning: ModuleType, plainly: Any, tmp_path: Path, name: str, first: bool
) -> None:
    plain = plainly(name)
    facts, told = run(lightning, name, tmp_path, MicroBatchCallback(LoopSettings(learn=False)), first=first)
    assert facts.error == plain.error
    assert compared(facts, plain, 0.0) == []
    assert facts.attributes == plain.attributes, "nothing of the callback is on the module"
    assert told == ""


# Each script is split by limits, and where memory runs out at one of three moments.
@pytest.mark.parametrize(("name", "how"), [(name, how) for number, name in enumerate(SPLIT)
                                           for how in (SPLITS[0], SPLITS[1 + number % 3])])  # fmt: skip
def test_a_script_whose_batches_are_split_ends_as_the_plain_program(
    lightning: ModuleType, plainly: Any, tmp_path: Path, name: str, how: str
) -> None:
    plain = plainly(name)
    facts, told = split(lightning, name, tmp_path, how)
    assert facts.error is plain.error is None
    left_out = LEFT_OUT.get(name, ())
    if name == "logger_in_the_step" and how == "backward":
        left_out = ("logger",)
    assert compared(facts, plain, ROUND_OFF, left_out) == []
    assert facts.attributes == plain.attributes, "nothing of the callback is on the module"
    assert told == ""


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_whose_batches_cannot_be_split_runs_whole_where_they_fit(
    lightning: ModuleType, plainly: Any, tmp_path: Path, name: str
) -> None:
    facts, _ = split(lightning, name, tmp_path, "limits")
    assert facts.error is None
    tolerance = ROUND_OFF if name == "hidden_state" else 0.0  # Its batches are split
    assert compared(facts, plainly(name), tolerance) == []


def test_limits_that_a_script_cannot_keep_are_said_once(
    lightning: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    split(lightning, "gan", tmp_path, "limits")
    lines = [line for line in caplog.messages if "in spite of limits" in line]
    assert lines == ["Batches are not split, in spite of limits: its training_step has 2 optimizers."]


@pytest.mark.parametrize("how", SPLITS[1:])
@pytest.mark.parametrize("name", REFUSED)
def test_a_script_whose_batches_cannot_be_split_is_refused_with_a_remedy_of_its_own(
    lightning: ModuleType, plainly: Any, tmp_path: Path, name: str, how: str
) -> None:
    if name == "module_without_parameters" and how != "forward":
        pytest.skip("it has no backward pass")
    facts, _ = split(lightning, name, tmp_path, how)
    if name == "hidden_state" and how != "second":
        # Its first batch shows that the state has a row for each sample.
        assert facts.error is None
        assert compared(facts, plainly(name), ROUND_OFF) == []
        return
    fact, remedy = REFUSED[name]
    assert facts.error is not None
    kind, text = facts.error
    assert kind == "DoesNotFitError"
    assert re.search(f"Memory ran out for a batch that is not split: .*{fact}", text)
    assert remedy in text


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("name", TOLD)
def test_a_script_whose_split_changes_its_training_is_told(
    lightning: ModuleType, tmp_path: Path, name: str, how: str
) -> None:
    facts, told = split(lightning, name, tmp_path, how)
    assert facts.error is None
    assert re.search(TOLD[name], told)
    assert len(told.splitlines()) == 1, "it is told once"


def test_a_loss_that_is_logged_after_a_manual_step_is_that_of_the_whole_batch(
    lightning: ModuleType, plainly: Any, tmp_path: Path
) -> None:
    name = "manual_log_after_the_step"
    plain, (facts, _) = plainly(name), split(lightning, name, tmp_path, "limits")
    for key, value in plain.numbers["callback"].items():
        if not key.startswith("share"):
            torch.testing.assert_close(facts.numbers["callback"][key], value, rtol=0, atol=ROUND_OFF)
    assert not list(differences(facts.numbers["weights"], plain.numbers["weights"], ROUND_OFF))


@pytest.mark.parametrize("how", SPLITS[:2])
@pytest.mark.parametrize("name", sorted(FAILING - {"error_in_a_step", "interrupted"}))
def test_an_error_of_lightning_has_its_own_words_in_a_split_batch(
    lightning: ModuleType, plainly: Any, tmp_path: Path, name: str, how: str
) -> None:
    facts, _ = split(lightning, name, tmp_path, how)
    assert facts.error == plainly(name).error


def test_an_error_in_a_part_that_the_whole_batch_raises_too_is_the_error_of_the_script(
    lightning: ModuleType, plainly: Any, tmp_path: Path
) -> None:
    facts, _ = split(lightning, "error_in_a_step", tmp_path, "limits")
    assert facts.error == plainly("error_in_a_step").error == ("ValueError", "nothing left")


@pytest.mark.parametrize("how", SPLITS[:2])
def test_mixed_precision_keeps_the_format_of_the_loss_and_rounds_as_its_parts_do(
    lightning: ModuleType, plainly: Any, tmp_path: Path, how: str
) -> None:
    facts, told = split(lightning, "bf16_mixed", tmp_path, how)
    assert (facts.error, told) == (None, "")
    assert compared(facts, plainly("bf16_mixed"), 0.05, ("optimizers", "gradient", "before", "values")) == []


def test_a_simulated_gpu_keeps_the_format_and_the_bits_of_a_loss_in_mixed_precision(
    lightning: ModuleType, plainly: Any, tmp_path: Path
) -> None:
    callback = MicroBatchCallback(LoopSettings(learn=False, device="sim:1GiB"))
    facts, told = run(lightning, "bf16_mixed", tmp_path, callback)
    assert (facts.error, told) == (None, "")
    assert facts.numbers["logged"]["loss_step"].dtype == torch.float32
    assert compared(facts, plainly("bf16_mixed"), 0.0) == []


def test_the_callback_can_be_pickled_for_processes_that_are_spawned(lightning: ModuleType) -> None:
    assert pickle.loads(pickle.dumps(MicroBatchCallback(LoopSettings(learn=False)))).loop is None


def test_a_comparison_of_records_sees_a_single_bit() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
    assert not list(differences({"a": [one, 1]}, {"a": [other, 1]}))
    other[1] = torch.nextafter(other[1], torch.tensor(3.0))
    assert list(differences({"a": [one, 1]}, {"a": [other, 1]}))
    assert not list(differences({"a": [one, 1]}, {"a": [other, 1]}, ROUND_OFF))
    assert list(differences({"a": [one, 1]}, {"a": [other, 2]}, ROUND_OFF))
