"""Which rows of a Trainer's batches are samples: stacked views, packed rows, batches without tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from can_train import CanTrainError
from can_train.adapters.framework_loop import sample_counts
from can_train.adapters.trainer_batches import TrainerRows, remedy_of, remedy_of_sample
from can_train.fit.packing import counts_of


class DataCollatorForPreference:
    """Named as the collator of TRL is: rows of the chosen answers stand above those of the rejected ones."""


class DataCollatorForTriplePreference:
    def __init__(self, include_reference: bool) -> None:
        self.include_reference = include_reference


def rows_of(collator: Any = None, **attributes: Any) -> TrainerRows:
    return TrainerRows(SimpleNamespace(data_collator=collator, **attributes), sample_counts)


def samples(rows: TrainerRows, batch: Any) -> int:
    return len(counts_of(rows.counts(batch))[1])


def stacked(samples: int, views: int) -> dict[str, Any]:
    return {
        "input_ids": torch.arange(samples * views * 3).view(-1, 3),
        "margin": torch.arange(float(samples)),
        "use_cache": False,
    }


@pytest.mark.parametrize(
    ("collator", "views"),
    [
        (DataCollatorForPreference(), 2),
        (type("Mine", (DataCollatorForPreference,), {})(), 2),
        (DataCollatorForTriplePreference(True), 3),
        (DataCollatorForTriplePreference(False), 2),
    ],
)
def test_samples_of_stacked_views_are_taken_with_all_their_views(collator: Any, views: int) -> None:
    rows, batch = rows_of(collator), stacked(4, views)
    part = rows.select(batch, slice(1, 3))
    expected = torch.cat([torch.arange(view * 4 + 1, view * 4 + 3) for view in range(views)])
    assert torch.equal(part["input_ids"], batch["input_ids"][expected])
    assert torch.equal(part["margin"], torch.tensor([1.0, 2.0]))
    assert part["use_cache"] is False
    assert samples(rows, batch) == 4


def test_the_name_of_a_trainer_tells_of_stacked_views_too() -> None:
    trainer = type("DPOTrainer", (SimpleNamespace,), {})(data_collator=None)
    assert TrainerRows(trainer, sample_counts).views(stacked(4, 2)) == 2


def test_a_tensor_for_each_view_has_a_row_for_each_sample() -> None:
    batch = {"chosen_input_ids": torch.zeros(4, 3), "rejected_input_ids": torch.ones(4, 2)}
    rows = rows_of(DataCollatorForPreference())
    assert samples(rows, batch) == 4
    assert rows.select(batch, slice(0, 1))["rejected_input_ids"].shape == (1, 2)


def test_rows_that_no_number_of_views_explains_are_not_samples() -> None:
    batch = {"input_ids": torch.zeros(8, 3), "pixel_values": torch.zeros(40, 3)}
    with pytest.raises(CanTrainError, match="40 rows, 2 views"):
        rows_of(DataCollatorForPreference()).counts(batch)


PACKED = {"input_ids": torch.zeros(1, 6), "labels": torch.zeros(1, 6)}


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({**PACKED, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, "several sequences (position_ids)"),
        ({**PACKED, "cu_seq_lens_q": torch.tensor([0])}, "several sequences (cu_seq_lens_q)"),
        ({**PACKED, "seq_idx": torch.zeros(1, 6)}, "several sequences (seq_idx)"),
        ({"input_ids": torch.zeros(3, 6), "position_ids": torch.zeros(3, 3, 6)}, "several sequences (position_ids)"),
        ([{"prompt": "a"}, {"prompt": "b"}], "no tensors (a list)"),
        ({"input_ids": torch.zeros(4, 6), "KL_input_ids": torch.zeros(4, 6)}, "KL_input_ids"),
    ],
)
def test_a_batch_whose_samples_cannot_be_told_apart_says_why(batch: Any, reason: str) -> None:
    assert reason in rows_of().reason(batch)
    with pytest.raises(CanTrainError):
        rows_of().counts(batch)


def test_positions_that_run_through_each_row_are_of_samples() -> None:
    assert not rows_of().reason({**PACKED, "position_ids": torch.arange(6)[None]})
    several = {"input_ids": torch.zeros(2, 6), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)}
    assert not rows_of().reason(several)


def test_a_loss_that_sorts_the_batch_is_known_by_its_name() -> None:
    batch = stacked(4, 2)
    assert "aot" in rows_of(DataCollatorForPreference(), loss_types=["sigmoid", "aot"]).reason(batch)
    assert not rows_of(DataCollatorForPreference(), loss_types=["sigmoid"]).reason(batch)


def trainer_with(**arguments: Any) -> Any:
    sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 4}
    model = SimpleNamespace(supports_gradient_checkpointing=True)
    return SimpleNamespace(args=SimpleNamespace(**{**sizes, **arguments}), model=model, compute_loss_func=None)


def test_a_remedy_names_arguments_of_the_installed_transformers() -> None:
    old, new = trainer_with(gradient_checkpointing=False), trainer_with(activation_checkpointing=False)
    smaller = "choose per_device_train_batch_size=4"
    assert remedy_of(old) == f"Give the TrainingArguments gradient_checkpointing=True, or {smaller}"
    assert remedy_of(new) == f"Give the TrainingArguments activation_checkpointing=True, or {smaller}"
    assert remedy_of(trainer_with(activation_checkpointing=True)) == "Choose per_device_train_batch_size=4"
    assert remedy_of(new, trains=False) == "Choose per_device_eval_batch_size=2"


def test_a_sample_that_does_not_fit_may_be_cut_or_recomputed() -> None:
    trainer = trainer_with(activation_checkpointing=False, max_length=512)
    found = remedy_of_sample(trainer, "Take a larger device")
    expected = "Give the TrainingArguments activation_checkpointing=True, or give them max_length=256"
    assert found == f"{expected}, or take a larger device"
    for options in ({"trains": False}, {"recomputes": True}):
        found = remedy_of_sample(trainer, "Take a larger device", **options)
        assert found == "Choose max_length=256, or take a larger device"
