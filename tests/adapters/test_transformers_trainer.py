"""MicroBatchTrainerMixin in real trainings with transformers: the weights are those of whole batches."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train import CanTrainError, LoopSettings, MicroBatchTrainerMixin, simulated_gpu
from can_train.adapters import transformers_trainer
from can_train.adapters.framework_loop import FrameworkLoop
from fakes.processes import TIMEOUT_S, quick_context
from fakes.several_ranks import free_port
from fakes.transformers_trainers import (
    WIDTH,
    WORDS,
    Sentences,
    Tagger,
    TaggerWithoutNumber,
    difference,
    padded,
    trained_on_ranks,
    trainer_of,
    weights,
)

EXACT = 1e-10

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return import_module("transformers")


@pytest.mark.parametrize("kind", [Tagger, TaggerWithoutNumber])
@pytest.mark.parametrize("steps", [1, 2])
def test_batches_cut_by_a_limit_lead_to_the_same_weights(
    transformers: ModuleType, tmp_path: Path, kind: type[Tagger], steps: int
) -> None:
    plain, cut = kind(), kind()
    before = trainer_of(transformers, tmp_path, plain, gradient_accumulation_steps=steps).train()
    settings = LoopSettings(limits=3, learn=False)
    after = trainer_of(transformers, tmp_path, cut, settings, gradient_accumulation_steps=steps).train()
    assert difference(plain, cut) <= EXACT
    assert after.training_loss == pytest.approx(before.training_loss, rel=1e-6)


def test_a_part_weighed_by_its_share_of_samples_leads_to_other_weights(
    transformers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, cut = Tagger(), Tagger()
    trainer_of(transformers, tmp_path, plain).train()
    monkeypatch.setattr(transformers_trainer._Items, "weight", lambda self, way, part: part.share)
    trainer_of(transformers, tmp_path, cut, LoopSettings(limits=3, learn=False)).train()
    assert difference(plain, cut) > 1e3 * EXACT


def sample_mean(outputs: Mapping[str, Tensor], labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses = F.cross_entropy(outputs["logits"].transpose(1, 2), labels, reduction="none").sum(1)
    return (losses / labels.ne(-100).sum(1)).mean()


def token_sum(outputs: Mapping[str, Tensor], labels: Tensor, num_items_in_batch: Any) -> Tensor:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


def input_mean(outputs: Mapping[str, Tensor], labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A mean over something that the Trainer does not count: odd labels."""
    odd = labels.where(labels % 2 == 1, -100)
    return F.cross_entropy(outputs["logits"].flatten(0, 1), odd.flatten())


@pytest.mark.parametrize("loss", [sample_mean, token_sum])
def test_a_loss_function_of_ones_own_is_exact_as_sum_and_as_mean(
    transformers: ModuleType, tmp_path: Path, loss: Any
) -> None:
    plain, cut = Tagger(), Tagger()
    trainer_of(transformers, tmp_path, plain, compute_loss_func=loss).train()
    trainer_of(transformers, tmp_path, cut, LoopSettings(limits=3, learn=False), compute_loss_func=loss).train()
    assert difference(plain, cut) <= EXACT


def test_a_mean_over_something_else_is_told_once_with_what_makes_it_exact(
    transformers: ModuleType, tmp_path: Path
) -> None:
    settings = LoopSettings(limits=3, learn=False)
    with pytest.warns(UserWarning, match="neither the sum") as caught:
        trainer_of(transformers, tmp_path, Tagger(), settings, compute_loss_func=input_mean).train()
    assert len(caught) == 1
    assert "compute_loss_func=lambda outputs, labels, num_items_in_batch" in str(caught[0].message)


class Normalised(Tagger):
    """One whose samples depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WORDS), Rows(nn.BatchNorm1d(WORDS))).double()


class Rows(nn.Module):
    """Calls a layer with the tokens of all samples."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).view(x.shape)


def test_samples_that_depend_on_each_other_are_told(transformers: ModuleType, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"through layers\.1\.layer: micro-batches change the gradient"):
        trainer_of(transformers, tmp_path, Normalised(), LoopSettings(limits=3, learn=False)).train()


def test_a_training_that_ran_out_of_memory_fits_with_the_same_weights(transformers: ModuleType, tmp_path: Path) -> None:
    wide = 512
    plain, dying, cut = Tagger(wide), Tagger(wide), Tagger(wide)
    options = {"per_device_train_batch_size": 26, "num_train_epochs": 3}
    trainer_of(transformers, tmp_path, plain, **options).train()
    with simulated_gpu("22MiB", dying), pytest.raises(torch.OutOfMemoryError):
        trainer_of(transformers, tmp_path, dying, **options).train()
    trainer = trainer_of(transformers, tmp_path, cut, LoopSettings(device="sim:22MiB", state_dir=tmp_path), **options)
    trainer.train()
    assert trainer.loop is None
    assert difference(plain, cut) <= EXACT
    assert len(list(tmp_path.rglob("*transformers_tagger*.json"))) == 1


@pytest.mark.parametrize("kind", [Tagger, TaggerWithoutNumber])
def test_evaluation_in_parts_returns_what_the_trainer_does(
    transformers: ModuleType, tmp_path: Path, kind: type[Tagger]
) -> None:
    plain = trainer_of(transformers, tmp_path, kind(), per_device_eval_batch_size=26)
    cut = trainer_of(transformers, tmp_path, kind(), LoopSettings(limits=3), per_device_eval_batch_size=26)
    # The last part has no labels.
    data = [*Sentences(24), *(without_labels(one) for one in Sentences(2))]
    before, after = plain.predict(data), cut.predict(data)
    assert cut.loop is None
    torch.testing.assert_close(after.predictions, before.predictions, rtol=0, atol=EXACT)
    assert (after.label_ids == before.label_ids).all()
    assert after.metrics["test_loss"] == pytest.approx(before.metrics["test_loss"], abs=EXACT)


def masked_mean(outputs: Mapping[str, Tensor], labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A mean whose gradient is not a number, either, where there is nothing to take it over."""
    mask = labels.ne(-100)
    return (outputs["logits"].square().sum(2) * mask).sum() / mask.sum()


def test_a_part_without_labels_adds_nothing(transformers: ModuleType, tmp_path: Path) -> None:
    data = [*Sentences(6)]
    data[2:4] = [without_labels(one) for one in data[2:4]]
    models, losses = (Tagger(), Tagger()), []
    for model, settings in zip(models, (None, LoopSettings(limits=2, learn=False)), strict=True):
        trainer = trainer_of(transformers, tmp_path, model, settings, compute_loss_func=masked_mean)
        trainer.train_dataset = data
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
        losses.append(trainer.train().training_loss)
    assert difference(*models) <= EXACT
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def without_labels(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**sample, "labels": torch.full_like(sample["labels"], -100)}


def test_a_batch_that_fits_is_computed_as_without_the_mixin_bit_by_bit(
    transformers: ModuleType, tmp_path: Path
) -> None:
    plain, adopted = Tagger(), Tagger()
    before = trainer_of(transformers, tmp_path, plain).train()
    after = trainer_of(transformers, tmp_path, adopted, LoopSettings(learn=False)).train()
    assert torch.equal(weights(plain), weights(adopted))
    assert before.training_loss == after.training_loss


@pytest.mark.parametrize(
    "options",
    [{}, {"activation_checkpointing": True}, {"label_smoothing_factor": 0.1}, {"gradient_accumulation_steps": 2}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_a_language_model_of_transformers_ends_with_the_same_weights(
    transformers: ModuleType, tmp_path: Path, options: dict[str, Any]
) -> None:
    plain, cut = (language_model(transformers) for _ in range(2))
    options = {"optim": "sgd", "max_steps": 4, **options}
    before = trainer_of(transformers, tmp_path, plain, **options).train()
    after = trainer_of(transformers, tmp_path, cut, LoopSettings(limits=3, learn=False), **options).train()
    assert difference(plain, cut) <= 1e-6
    assert difference(plain, language_model(transformers)) > 1e-3
    assert after.training_loss == pytest.approx(before.training_loss, rel=1e-5)


def language_model(transformers: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": WORDS}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False
        )
    )


def test_a_language_model_is_evaluated_in_parts(transformers: ModuleType, tmp_path: Path) -> None:
    options = {"per_device_eval_batch_size": 26}
    plain = trainer_of(transformers, tmp_path, language_model(transformers), **options).evaluate()
    cut = trainer_of(transformers, tmp_path, language_model(transformers), LoopSettings(limits=3), **options).evaluate()
    assert cut["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)


def later_words_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)


def test_an_evaluation_weighs_its_parts_as_the_training_before_it(transformers: ModuleType, tmp_path: Path) -> None:
    options = {"per_device_eval_batch_size": 26, "compute_loss_func": later_words_mean}
    losses = []
    for settings in (None, LoopSettings(limits=3, learn=False)):
        trainer = trainer_of(transformers, tmp_path, language_model(transformers).double(), settings, **options)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_bf16_autocast_is_on_in_the_parts(transformers: ModuleType, tmp_path: Path) -> None:
    plain, cut = (language_model(transformers) for _ in range(2))
    options = {"optim": "sgd", "max_steps": 4, "bf16": True}
    trainer_of(transformers, tmp_path, plain, **options).train()
    found: list[tuple[int, torch.dtype]] = []
    cut.lm_head.register_forward_hook(lambda _module, _inputs, scores: found.append((len(scores), scores.dtype)))
    trainer_of(transformers, tmp_path, cut, LoopSettings(limits=3, learn=False), **options).train()
    # Five samples are computed at once to find out how losses add up.
    assert set(found) == {(2, torch.bfloat16), (3, torch.bfloat16), (5, torch.bfloat16)}
    # Of weights up to 1; bf16 keeps 8 bits.
    assert difference(plain, cut) <= 1e-3


def test_a_gradient_scaler_scales_each_part(transformers: ModuleType, tmp_path: Path) -> None:
    plain, cut = Tagger().float(), Tagger().float()
    options = {"max_grad_norm": 0.0, "optim": "sgd"}
    trainers = [
        trainer_of(transformers, tmp_path, plain, **options),
        trainer_of(transformers, tmp_path, cut, LoopSettings(limits=3, learn=False), **options),
    ]
    for trainer in trainers:
        # Accelerate makes one for a GPU only.
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        trainer.train()
    assert difference(plain, cut) <= 1e-5


def test_a_compiled_model_is_computed_in_parts(transformers: ModuleType, tmp_path: Path) -> None:
    plain, cut = Tagger(), Tagger()
    trainer_of(transformers, tmp_path, plain, max_steps=2).train()
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2}
    trainer_of(transformers, tmp_path, cut, LoopSettings(limits=3, learn=False), **compiled).train()
    assert difference(plain, cut) <= EXACT


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda one: setattr(one.args, "auto_find_batch_size", True), "auto_find_batch_size=True"),
        (lambda one: setattr(one.args, "_n_gpu", 2), "n_gpu=2"),
        (lambda one: setattr(one, "is_fsdp_enabled", True), "FSDP"),
        (lambda one: setattr(one, "is_deepspeed_enabled", True), "DeepSpeed"),
        (lambda one: setattr(one.accelerator, "state", SimpleNamespace(parallelism_config=1)), "parallelism_config"),
        (lambda one: setattr(one.args, "optim", "lomo"), "optim='lomo'"),
    ],
)
def test_what_cannot_be_exact_is_refused(transformers: ModuleType, tmp_path: Path, change: Any, found: str) -> None:
    trainer = trainer_of(transformers, tmp_path, Tagger(), LoopSettings())
    change(trainer)
    with pytest.raises(CanTrainError, match="whole batch") as caught:
        trainer.train()
    assert caught.value.value.startswith(found)
    assert caught.value.remedy


def test_steps_outside_a_training_are_the_trainers_own(transformers: ModuleType, tmp_path: Path) -> None:
    batch, found = padded([*Sentences(8)]), []
    for settings in (None, LoopSettings(limits=3)):
        trainer = trainer_of(transformers, tmp_path, Tagger(), settings)
        trainer.create_optimizer()
        loss = trainer.training_step(trainer.model, batch, batch["labels"].ne(-100).sum())
        gradients = [one.grad for one in trainer.model.parameters()]
        found.append([loss, *gradients, *trainer.prediction_step(trainer.model, batch, False)])
    assert getattr(trainer, "loop", None) is None
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_mixin_behind_the_trainer_is_refused(transformers: ModuleType) -> None:
    with pytest.raises(CanTrainError, match=r"class Late\(Trainer, MicroBatchTrainerMixin\)"):
        type("Late", (transformers.Trainer, MicroBatchTrainerMixin), {})


def test_a_training_that_fails_is_recorded_and_leaves_the_device(transformers: Any, tmp_path: Path) -> None:
    class Stopping(transformers.TrainerCallback):
        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            raise KeyboardInterrupt

    trainer = trainer_of(transformers, tmp_path, Tagger(), LoopSettings(device="sim:64MiB", state_dir=tmp_path))
    trainer.add_callback(Stopping)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    (record,) = tmp_path.rglob("*transformers_tagger*.json")
    assert json.loads(record.read_text())["outcome"] == "interrupted"
    assert trainer.loop is None
    trainer.remove_callback(Stopping)
    trainer.train()


def test_ranks_of_ddp_cut_their_batches_differently_and_end_with_the_same_weights(tmp_path: Path) -> None:
    context, port = quick_context(), free_port()
    processes = [context.Process(target=trained_on_ranks, args=(rank, 2, port, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    for steps in (1, 2):
        names = [f"{name}-{steps}-{rank}.pt" for name in ("plain", "cut") for rank in (0, 1)]
        plain, *others = (torch.load(tmp_path / name) for name in names)
        for other in others:
            torch.testing.assert_close(other, plain, rtol=0, atol=EXACT)


def test_room_is_made_before_each_step_of_the_optimizer(
    transformers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def make_room(self: FrameworkLoop) -> None:
        nonlocal made
        made += 1

    monkeypatch.setattr(FrameworkLoop, "before_optimizer_step", make_room)
    trainer = trainer_of(transformers, tmp_path, Tagger(), LoopSettings(learn=False), max_steps=3)
    for _ in range(2):
        trainer.train()
    assert made == 6
