"""MicroBatchTrainerMixin in real trainings with transformers: the weights are those of whole batches."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train import CanTrainError, LoopSettings, MicroBatchTrainerMixin, simulated_gpu
from can_train.adapters import transformers_trainer
from can_train.adapters.framework_loop import FrameworkLoop
from can_train.adapters.trainer_batches import why_whole
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
    monkeypatch.setattr(transformers_trainer._TrainingParts, "weight", lambda self, part, largest: part.share)
    trainer_of(transformers, tmp_path, cut, LoopSettings(limits=3, learn=False)).train()
    assert difference(plain, cut) > 1e3 * EXACT


def sample_mean(outputs: Mapping[str, Tensor], labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses = F.cross_entropy(outputs["logits"].transpose(1, 2), labels, reduction="none").sum(1)
    return (losses / labels.ne(-100).sum(1)).mean()


def weighted_mean(outputs: Mapping[str, Tensor], labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A mean over classes with weights."""
    of_classes = torch.ones(WORDS, dtype=torch.float64)
    of_classes[3] = 10
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), weight=of_classes)


class Rare(Sentences):
    """Sentences whose class with a weight is in one of them alone, after the first batch."""

    def __init__(self) -> None:
        super().__init__()
        for words in self.words:
            words[words == 3] = 4
        self.words[12][0] = 3


@pytest.mark.parametrize("fits", [8, 3])
def test_weights_of_classes_are_noticed_though_one_sample_has_the_class(
    transformers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: int
) -> None:
    """Where memory ran out earlier, no more samples than have fitted are compared."""
    monkeypatch.setattr(FrameworkLoop, "may_have_room", fits == 8)

    def in_order(trainer: Any, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(trainer.train_dataset)

    base = type("InOrder", (transformers.Trainer,), {"_get_train_sampler": in_order})
    options = {"compute_loss_func": weighted_mean, "train_dataset": Rare(), "base": base}
    plain, whole = Tagger(), Tagger()
    trainer_of(transformers, tmp_path, plain, **options).train()
    with pytest.warns(UserWarning, match=r"cutting one changes its gradient by \d+\.\d%"):
        trainer_of(transformers, tmp_path, whole, LoopSettings(limits=3, learn=False), **options).train()
    assert difference(plain, whole) <= EXACT


class Queueing(Tagger):
    """A tagger that keeps a queue of its latest outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.ones(16, WORDS, dtype=torch.float64))
        self.place = 0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels, **options)
        places = (self.place + torch.arange(len(input_ids))) % 16
        similar = found["logits"].mean(1) @ self.get_buffer("queue").clone().T
        self.get_buffer("queue")[places] = found["logits"].detach().mean(1)
        self.place = int(places[-1]) + 1
        return {**found, "loss": similar.square().mean()}


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


def test_a_mean_over_something_else_is_not_split_and_told_once_with_what_makes_it_exact(
    transformers: ModuleType, tmp_path: Path
) -> None:
    plain, whole = Tagger(), Tagger()
    trainer_of(transformers, tmp_path, plain, compute_loss_func=input_mean).train()
    settings = LoopSettings(limits=3, learn=False)
    with pytest.warns(UserWarning, match=r"cutting one changes its gradient by \d+\.\d%") as caught:
        trainer_of(transformers, tmp_path, whole, settings, compute_loss_func=input_mean).train()
    assert len(caught) == 1
    assert "compute_loss_func=lambda outputs, labels, num_items_in_batch" in str(caught[0].message)
    assert torch.equal(weights(plain), weights(whole))


class Teaching(Tagger):
    """A tagger that a teacher follows."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WORDS).double().requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        for old, new in zip(self.teacher.parameters(), self.layers[2].parameters(), strict=True):
            old.data.lerp_(new.data, 0.1)
        found = super().forward(input_ids, labels, **options)
        return {
            **found,
            "loss": found["loss"] + (found["logits"] - self.teacher(self.words(input_ids))).square().mean(),
        }


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Queueing, "'queue', which its step keeps"), (Teaching, "its step changes parameters by itself")],
)
def test_a_model_whose_step_moves_a_queue_or_a_teacher_is_not_split(
    transformers: ModuleType, tmp_path: Path, model: type[Tagger], reason: str
) -> None:
    plain, whole = model(), model()
    trainer_of(transformers, tmp_path, plain).train()
    with pytest.warns(UserWarning, match=f"Batches are not split: {reason}") as caught:
        trainer_of(transformers, tmp_path, whole, LoopSettings(limits=3, learn=False)).train()
    assert len(caught) == 1
    assert torch.equal(weights(plain), weights(whole))
    assert all(map(torch.equal, plain.buffers(), whole.buffers()))


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


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_samples_that_depend_on_each_other_through_batch_norm_are_split_and_told(
    transformers: ModuleType, tmp_path: Path, limit: int
) -> None:
    trainer = trainer_of(transformers, tmp_path, Normalised(), LoopSettings(limits=limit, learn=False))
    sizes: list[int] = []
    trainer.model.words.register_forward_hook(lambda _module, inputs, _output: sizes.append(len(inputs[0])))
    through = r"through layers\.1\.layer: micro-batches change the gradient of loss by \d+\.\d%"
    with pytest.warns(UserWarning, match=through) as caught:
        trainer.train()
    assert len(caught) == 1
    # Of batches of 8, each comparison computes the whole with BatchNorm, without it, and twice each to see whether the
    # loss draws numbers, or has nothing but round-off. With a limit of one, two batches of 2 are compared as well.
    assert sizes.count(8) == 6 * (2 if limit == 1 else 3)


def test_where_one_sample_fits_in_a_step_more_are_compared_without_a_backward_pass(
    transformers: ModuleType, tmp_path: Path
) -> None:
    def run_out(module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and len(inputs[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        sizes.append(len(inputs[0]))

    sizes: list[int] = []
    trainer = trainer_of(transformers, tmp_path, Normalised(), LoopSettings(learn=False), num_train_epochs=1)
    trainer.model.words.register_forward_hook(run_out)
    with pytest.warns(UserWarning, match=r"through layers\.1\.layer: micro-batches change the gradient"):
        trainer.train()
    assert sizes[:5] == [1, 8, 3, 5, 8]


class TaggerByRoot(Tagger):
    """A tagger whose loss is divided by the root of the number of tokens in the batch."""

    def loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        root = None if num_items_in_batch is None else num_items_in_batch**0.5
        return super().loss(logits, labels, root)


@pytest.mark.parametrize("kind", [Tagger, TaggerWithoutNumber, TaggerByRoot])
def test_where_one_sample_fits_at_all_its_loss_shows_whether_it_is_divided_by_the_items_of_the_batch(
    transformers: ModuleType, tmp_path: Path, kind: type[Tagger]
) -> None:
    def run_out(module: nn.Module, inputs: Any, output: Any) -> None:
        if len(inputs[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    plain, cut = kind(), kind()
    trainer_of(transformers, tmp_path, plain).train()
    trainer = trainer_of(transformers, tmp_path, cut, LoopSettings(learn=False))
    cut.words.register_forward_hook(run_out)
    if kind is TaggerByRoot:
        refused = "its loss depends on num_items_in_batch, but is not divided by it"
        told = pytest.warns(UserWarning, match=f"Batches are not split: {refused}")
        with told, pytest.raises(CanTrainError, match=refused):
            trainer.train()
        return
    adds = "added up" if kind is Tagger else "averaged over their labels"
    with pytest.warns(UserWarning, match=f"is not known. The losses of its parts are {adds}"):
        trainer.train()
    assert difference(plain, cut) <= EXACT


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
    # Eight samples are also computed whole and in two parts, to find out how losses add up.
    assert set(found) == {(size, torch.bfloat16) for size in (2, 3, 5, 8)}
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
def test_limits_of_what_is_not_split_are_refused(
    transformers: ModuleType, tmp_path: Path, change: Any, found: str
) -> None:
    trainer = trainer_of(transformers, tmp_path, Tagger(), LoopSettings(limits=3))
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
        assert plain[1].min() > 0


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


# Nothing changes until memory runs out


def counting(base: Any) -> Any:
    """A user's Trainer that counts, keeps lists, and looks at gradients in its own step."""

    class Counting(base):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.steps, self.losses, self.samples = 0, [], []
            self.gradients: list[float] = []
            self.tokens = {"train": {"seen": [0]}}

        def training_step(self, *arguments: Any, **options: Any) -> Tensor:
            self.steps += 1
            loss = super().training_step(*arguments, **options)
            self.gradients.append(float(sum(one.grad.norm() for one in self.model.parameters())))
            return loss

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            self.samples.append(len(inputs["input_ids"]))
            self.tokens["train"]["seen"][0] += inputs["input_ids"].numel()
            loss = super().compute_loss(model, inputs, *arguments, **options)
            self.losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
            return loss

    return Counting


def counted(trainer: Any) -> list[Any]:
    return [trainer.steps, trainer.losses, trainer.samples, trainer.gradients, trainer.tokens]


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_of_ones_own_runs_once_a_batch_as_it_is_written(
    transformers: Any, tmp_path: Path, size: int, steps: int
) -> None:
    base = counting(transformers.Trainer)
    trainers = []
    for settings in (None, LoopSettings(device="sim:64MiB", state_dir=tmp_path)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "base": base}
        trainer = trainer_of(transformers, tmp_path, Tagger(), settings, **options)
        trainer.train()
        trainers.append(trainer)
    plain, adopted = trainers
    assert counted(plain) == counted(adopted)
    assert plain.steps == 2 * -(-26 // size)
    assert torch.equal(weights(plain.model), weights(adopted.model))


class Schedule(torch.optim.SGD):
    """An optimizer that is in training mode or not, as schedule-free ones are, and may be made once."""

    made = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        Schedule.made += 1
        self.modes: list[str] = []

    def train(self) -> None:
        self.modes.append("train")

    def eval(self) -> None:
        self.modes.append("eval")


def test_an_optimizer_with_modes_is_made_once_and_sees_no_trial(transformers: Any, tmp_path: Path) -> None:
    found = []
    for settings in (None, LoopSettings(device="sim:64MiB", state_dir=tmp_path)):
        model, Schedule.made = Tagger(), 0
        optimizer = Schedule(model.parameters(), lr=0.1)
        trainer_of(transformers, tmp_path, model, settings, optimizers=(optimizer, None)).train()
        found.append((optimizer.modes, Schedule.made, weights(model)))
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])


# The comparisons


def test_the_first_second_and_fourth_split_batch_are_compared_with_all_samples(
    transformers: Any, tmp_path: Path
) -> None:
    base, settings = counting(transformers.Trainer), LoopSettings(limits=3, learn=False)
    trainer = trainer_of(transformers, tmp_path, Tagger(), settings, base=base, num_train_epochs=2)
    sizes: list[int] = []
    trainer.model.words.register_forward_hook(lambda _module, inputs, _output: sizes.append(len(inputs[0])))
    trainer.train()
    # Eight samples whole, and in parts of three and five.
    compared, parts = [3, 8, 3, 5, 3, 2], [3, 3, 2]
    first, second = [*compared, *compared, *parts, 2], [*compared, *parts, *parts, 2]
    assert sizes == [*first, *second]
    # The counts have no trace of it.
    assert trainer.samples == [*parts, *parts, *parts, 2] * 2
    assert trainer.tokens["train"]["seen"][0] == sum_of_tokens(transformers, tmp_path)


def sum_of_tokens(transformers: Any, folder: Path) -> int:
    trainer = trainer_of(transformers, folder, Tagger(), base=counting(transformers.Trainer))
    trainer.train()
    return trainer.tokens["train"]["seen"][0]


class Pointer(Tagger):
    """A model whose labels have a name of their own, and that takes no number of items."""

    accepts_loss_kwargs = False

    def forward(self, input_ids: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
        return super().forward(input_ids, target)


def with_target(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = padded(samples)
    return {"input_ids": batch["input_ids"], "target": batch["labels"]}


def test_labels_of_another_name_are_counted(transformers: Any, tmp_path: Path) -> None:
    models, losses = (Pointer(), Pointer()), []
    options = {"label_names": ["target"], "data_collator": with_target, "per_device_eval_batch_size": 26}
    options["remove_unused_columns"] = False
    for model, settings in zip(models, (None, LoopSettings(limits=3, learn=False)), strict=True):
        trainer = trainer_of(transformers, tmp_path, model, settings, **options)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert difference(*models) <= EXACT
    assert losses[1] == pytest.approx(losses[0], abs=EXACT)


class Contrastive(nn.Module):
    """Each sample is compared with all others of its batch."""

    def __init__(self, normalises: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH).double()
        self.norm = nn.BatchNorm1d(WIDTH).double() if normalises else nn.Identity()

    def forward(self, input_ids: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
        first, second = (
            self.norm(self.words(ids).mean(1)) for ids in (input_ids, labels.clamp(min=0).cumsum(1) % WORDS)
        )
        return {"loss": F.cross_entropy(first @ second.T, torch.arange(len(first))), "scores": first @ second.T}


@pytest.mark.parametrize(("limit", "normalises"), [(1, False), (2, False), (3, False), (2, True), (3, True)])
def test_in_batch_negatives_are_not_split_and_told_once(
    transformers: Any, tmp_path: Path, limit: int, normalises: bool
) -> None:
    plain, whole = Contrastive(normalises), Contrastive(normalises)
    trainer_of(transformers, tmp_path, plain, remove_unused_columns=False).train()
    settings = LoopSettings(limits=limit, learn=False)
    with pytest.warns(UserWarning, match=r"not split: cutting one changes its \w+ by \d+\.\d%") as caught:
        trainer_of(transformers, tmp_path, whole, settings, remove_unused_columns=False).train()
    assert len(caught) == 1
    assert torch.equal(weights(plain), weights(whole))


def test_in_batch_negatives_that_do_not_fit_end_with_what_can_help(transformers: Any, tmp_path: Path) -> None:
    settings = LoopSettings(device="sim:21MiB", learn=False)
    trainer = trainer_of(transformers, tmp_path, Heavy(Contrastive()), settings, per_device_train_batch_size=26)
    with pytest.warns(UserWarning, match="not split"), pytest.raises(CanTrainError, match="not split") as caught:
        trainer.train()
    remedy = caught.value.remedy
    assert "per_device_train_batch_size=13" in remedy
    assert not {word for word in ("--optimizer", "select=", "larger") if word in str(caught.value)}


class Heavy(nn.Module):
    """Keeps a MiB a sample for the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.unit = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        kept = (torch.ones(len(input_ids), 2**16, dtype=torch.float64) * self.unit).square()
        outputs = self.inner(input_ids, labels, **options)
        if "loss" in outputs:
            outputs["loss"] = outputs["loss"] + 0 * kept.mean()
        return outputs


class Noisy(Tagger):
    """Draws a little noise in the step."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        logits = self.layers(self.words(input_ids) + 0.01 * self.noise([*input_ids.shape, WIDTH]))
        found = {"logits": logits}
        return found if labels is None else {**found, "loss": self.loss(logits, labels, **options)}

    def noise(self, shape: list[int]) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)


class NoisyByNumpy(Noisy):
    def noise(self, shape: list[int]) -> Tensor:
        return torch.from_numpy(np.random.default_rng().standard_normal(shape))


@pytest.mark.parametrize("loss", [None, sample_mean])
def test_a_loss_that_draws_noise_adds_up_as_without_it_and_is_told(
    transformers: Any, tmp_path: Path, loss: Any
) -> None:
    options = {"max_steps": 1, "max_grad_norm": 0.0, "optim": "sgd", "compute_loss_func": loss}
    plain, cut = Noisy(), Noisy()
    before = weights(plain).detach().clone()
    trainer_of(transformers, tmp_path, plain, **options).train()
    with pytest.warns(UserWarning, match="The step draws random numbers, and others for micro-batches") as caught:
        trainer_of(transformers, tmp_path, cut, LoopSettings(limits=3, learn=False), **options).train()
    assert len(caught) == 1
    change = weights(plain) - before
    # Three parts would make three times the change.
    assert float((weights(cut) - before - change).norm() / change.norm()) < 0.1


def test_noise_that_cannot_be_replaced_is_not_split_and_told(transformers: Any, tmp_path: Path) -> None:
    sizes: list[int] = []
    model = NoisyByNumpy()
    trainer = trainer_of(transformers, tmp_path, model, LoopSettings(limits=3, learn=False), max_steps=2)
    model.words.register_forward_hook(lambda _module, inputs, _output: sizes.append(len(inputs[0])))
    with pytest.warns(
        UserWarning, match="not split: its step draws random numbers that can-train cannot repeat"
    ) as caught:
        trainer.train()
    assert len(caught) == 1
    assert sizes[-2:] == [8, 8]


# Rows that are no samples


class DataCollatorForPreference:
    """Named as TRL's: rows of the preferred sentences stand above those of the others."""

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        first, second = padded(samples)["input_ids"], padded(samples)["input_ids"].flip(1)
        margins = torch.tensor([float(len(one["input_ids"])) for one in samples])
        return {"input_ids": torch.cat([first, second]), "margin": margins}


class Preferring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH).double(), nn.Linear(WIDTH, 1).double()

    def forward(self, input_ids: Tensor, margin: Tensor) -> dict[str, Tensor]:
        chosen, rejected = self.head(self.words(input_ids).cumsum(1).tanh().mean(1)).chunk(2)
        return {"loss": -F.logsigmoid(chosen - rejected - margin[:, None]).mean()}


def test_stacked_views_are_split_by_sample(transformers: Any, tmp_path: Path) -> None:
    plain, cut = Preferring(), Preferring()
    options = {"data_collator": DataCollatorForPreference(), "remove_unused_columns": False, "optim": "sgd"}
    trainer_of(transformers, tmp_path, plain, **options).train()
    sizes: list[int] = []
    cut.words.register_forward_hook(lambda _module, inputs, _output: sizes.append(len(inputs[0])))
    trainer_of(transformers, tmp_path, cut, LoopSettings(limits=3, learn=False), **options).train()
    assert sizes[:4] == [6, 16, 6, 10]
    assert difference(plain, cut) <= EXACT


class Views(nn.Module):
    """Compares stacked views that nobody knows of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH).double(), nn.Linear(WIDTH, 1).double()

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        chosen, rejected = self.head(self.words(input_ids).cumsum(1).tanh().mean(1)).tensor_split(2)
        return {"loss": -F.logsigmoid(chosen[: len(rejected)] - rejected[: len(chosen)]).mean()}


def views_only(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"input_ids": DataCollatorForPreference()(samples)["input_ids"]}


def test_stacked_views_that_nothing_tells_of_are_not_split(transformers: Any, tmp_path: Path) -> None:
    plain, whole = Views(), Views()
    options = {"data_collator": views_only, "remove_unused_columns": False}
    trainer_of(transformers, tmp_path, plain, **options).train()
    with pytest.warns(UserWarning, match="not split: cutting one changes its gradient"):
        trainer_of(transformers, tmp_path, whole, LoopSettings(limits=3, learn=False), **options).train()
    assert torch.equal(weights(plain), weights(whole))


def packed(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One row of all sentences."""
    ids = torch.cat([one["input_ids"] for one in samples])[None]
    starts = torch.cat([torch.arange(len(one["input_ids"])) for one in samples])[None]
    return {"input_ids": ids, "labels": ids.flip(1), "position_ids": starts}


class Packed(Tagger):
    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, **options: Any) -> dict[str, Tensor]:
        return super().forward(input_ids, labels, **options)


def test_packed_rows_run_whole(transformers: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, whole = Packed(), Packed()
    options = {"data_collator": packed, "remove_unused_columns": False}
    trainer_of(transformers, tmp_path, plain, **options).train()
    trainer_of(transformers, tmp_path, whole, LoopSettings(limits=3, learn=False), **options).train()
    assert torch.equal(weights(plain), weights(whole))


def test_packed_rows_that_do_not_fit_name_no_way_to_take_samples_out(transformers: Any, tmp_path: Path) -> None:
    class Wide(Packed):
        def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, **options: Any) -> Any:
            wide = (torch.ones(2**20, dtype=torch.float64) * self.words.weight[0, 0]).square()
            outputs = super().forward(input_ids, labels, position_ids, **options)
            return {**outputs, "loss": outputs["loss"] + 0 * wide.mean()}

    settings = LoopSettings(device="sim:12MiB", learn=False)
    options = {"data_collator": packed, "remove_unused_columns": False}
    with pytest.raises(CanTrainError, match="several sequences") as caught:
        trainer_of(transformers, tmp_path, Wide(), settings, **options).train()
    assert "per_device_train_batch_size=4" in caught.value.remedy
    assert "select=" not in str(caught.value)


def test_batches_without_tensors_run_whole(transformers: Any, tmp_path: Path) -> None:
    class Generating(transformers.Trainer):
        """Makes its tensors in the step, as reinforcement learning does."""

        def _prepare_inputs(self, inputs: Any) -> Any:
            return padded(inputs) if isinstance(inputs, list) else super()._prepare_inputs(inputs)

        def floating_point_ops(self, inputs: Any) -> int:
            return 0

        def _track_num_input_tokens(self, inputs: Any) -> None:
            """Counts nothing."""

    plain, whole = TaggerWithoutNumber(), TaggerWithoutNumber()
    options = {"data_collator": list, "base": Generating, "remove_unused_columns": False}
    trainer_of(transformers, tmp_path, plain, **options).train()
    trainer_of(transformers, tmp_path, whole, LoopSettings(limits=3, learn=False), **options).train()
    assert torch.equal(weights(plain), weights(whole))


# Memory that runs out


@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_that_ran_out_of_memory_leaves_no_trace(transformers: Any, tmp_path: Path, steps: int) -> None:
    base, trainers = counting(transformers.Trainer), []
    for settings in (None, LoopSettings(device="sim:21MiB", learn=False)):
        options = {"per_device_train_batch_size": 13, "gradient_accumulation_steps": steps, "base": base}
        trainer = trainer_of(transformers, tmp_path, Heavy(Tagger()), settings, **options)
        trainer.train()
        trainers.append(trainer)
    plain, cut = trainers
    assert len(cut.samples) > len(plain.samples)
    assert sum(cut.samples) == sum(plain.samples)
    assert difference(plain.model, cut.model) <= EXACT
    assert cut.tokens == plain.tokens


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_what_a_step_logs_of_trials_and_failed_tries_reaches_nobody(
    transformers: Any, tmp_path: Path, stage: str
) -> None:
    class Logging(transformers.Trainer):
        seen = 0

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            self.log({"samples": len(inputs["input_ids"])})
            return super().compute_loss(model, inputs, *arguments, **options)

        def prediction_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            self.seen += len(inputs["input_ids"])
            return super().prediction_step(model, inputs, *arguments, **options)

    class Tracking(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.logged: list[int] = []

        def on_log(self, *_: Any, logs: dict[str, int], **options: Any) -> None:
            self.logged += [logs["samples"]] if "samples" in logs else []

    found = []
    for settings in (None, LoopSettings(device="sim:21MiB", learn=False)):
        size = {"per_device_train_batch_size": 13, "per_device_eval_batch_size": 26, "num_train_epochs": 1}
        trainer, tracker = (
            trainer_of(transformers, tmp_path, Heavy(Tagger()), settings, base=Logging, **size),
            Tracking(),
        )
        trainer.add_callback(tracker)
        getattr(trainer, stage)()
        found.append((sum(tracker.logged), len(tracker.logged), trainer.seen))
    assert found[1] == found[0]
    assert found[0][0] == 26


def logging(base: Any) -> Any:
    """Logs by itself, as scripts do with auxiliary losses."""

    class Logging(base):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(model, inputs, *arguments, **options)
            words, labels = inputs["input_ids"], inputs["labels"]
            right = (words == labels)[labels.ne(-100)].double()
            self.log({"own_loss": float(loss.detach()), "right": right.mean(), "most": int(words.sum(1).max())})
            self.log({"samples": len(words), "kind": "words", "first": np.float64(words[:, 0].double().mean())})
            if len(words) > 1:
                self.log({"samples": len(words)})
            return loss

    return Logging


@pytest.mark.parametrize("model", [Tagger, TaggerWithoutNumber])
@pytest.mark.parametrize("steps", [1, 3])
def test_what_a_step_logs_by_itself_is_logged_once_a_batch(
    transformers: Any, tmp_path: Path, model: type[Tagger], steps: int
) -> None:
    found = []
    for settings in (None, LoopSettings(limits=3, learn=False)):
        options = {"base": logging(transformers.Trainer), "num_train_epochs": 1, "gradient_accumulation_steps": steps}
        trainer = trainer_of(transformers, tmp_path, model(), settings, **options)
        trainer.train()
        found.append([row for row in trainer.state.log_history if "train_runtime" not in row])
    plain, cut = found
    assert [list(row) for row in cut] == [list(row) for row in plain]
    for before, after in zip(plain, cut, strict=True):
        assert {name: float(value) for name, value in after.items() if name != "kind"} == pytest.approx(
            {name: float(value) for name, value in before.items() if name != "kind"}, rel=1e-9
        )
        assert after.get("kind") == before.get("kind")


class WithCentres(nn.Module):
    """A loss with parameters of its own, as sentence-transformers has."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.ones(WORDS, dtype=torch.float64))


def with_loss(base: Any) -> Any:
    class WithLoss(base):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.loss = WithCentres()
            super().__init__(*arguments, **options)

        def create_optimizer(self, *_: Any) -> Any:
            parameters = [*self.model.parameters(), *self.loss.parameters()]
            self.optimizer = torch.optim.SGD(parameters, lr=0.05)
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
            outputs = model(inputs["input_ids"])
            labels = inputs["labels"]
            logits = outputs["logits"] * self.loss.centres
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return WithLoss


@pytest.mark.parametrize(
    "settings", [LoopSettings(limits=3, learn=False), LoopSettings(device="sim:21MiB", learn=False)]
)
def test_parameters_of_a_loss_are_trained_alike(transformers: Any, tmp_path: Path, settings: LoopSettings) -> None:
    trainers = []
    for one in (None, settings):
        options = {"base": with_loss(transformers.Trainer), "per_device_train_batch_size": 13}
        options |= {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
        trainer = trainer_of(transformers, tmp_path, Wide(Tagger()), one, **options)
        trainer.train()
        trainers.append(trainer)
    plain, cut = trainers
    assert difference(plain.model, cut.model) <= EXACT
    assert difference(plain.loss, cut.loss) <= EXACT
    assert float((plain.loss.centres.detach() - 1).abs().max()) > 1e-3


class Wide(Heavy):
    """Keeps memory in the logits."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        kept = (torch.ones(len(input_ids), 2**16, dtype=torch.float64) * self.unit).square()
        outputs = self.inner(input_ids, labels, **options)
        outputs["logits"] = outputs["logits"] + 0 * kept.mean()
        return outputs


def test_a_step_that_runs_backward_by_itself_is_weighed(transformers: Any, tmp_path: Path) -> None:
    class Own(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            loss.backward()
            return loss.detach()

    plain, cut = TaggerWithoutNumber(), TaggerWithoutNumber()
    trainer_of(transformers, tmp_path, plain, base=Own).train()
    trainer_of(transformers, tmp_path, cut, LoopSettings(limits=3, learn=False), base=Own).train()
    assert difference(plain, cut) <= EXACT


def test_a_step_above_the_mixin_sees_the_gradient_of_the_whole_batch(transformers: Any, tmp_path: Path) -> None:
    class MicroBatchTrainer(MicroBatchTrainerMixin, transformers.Trainer):
        pass

    norms = []
    for base in (transformers.Trainer, MicroBatchTrainer):
        options = {"loop_settings": LoopSettings(limits=3, learn=False)} if base is MicroBatchTrainer else {}
        trainer = trainer_of(
            transformers,
            tmp_path,
            Tagger(),
            base=lambda base=base, options=options, **given: counting(base)(**given, **options),
        )
        trainer.train()
        norms.append((trainer.steps, trainer.gradients))
    assert norms[0][0] == norms[1][0]
    assert norms[1][1] == pytest.approx(norms[0][1], abs=EXACT)


def collecting(base: Any) -> Any:
    """Collects metrics as the Trainers of TRL do."""

    class Collecting(base):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._metrics: dict[str, dict[str, list[float]]] = {"train": {}}

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            words = inputs["input_ids"]
            metrics = self._metrics["train"]
            metrics.setdefault("first", []).append(float(words[:, 0].double().mean()))
            metrics.setdefault("max_first", []).append(float(words[:, 0].max()))
            return super().compute_loss(model, inputs, *arguments, **options)

    return Collecting


def test_metrics_that_a_trainer_collects_have_one_entry_a_batch(transformers: Any, tmp_path: Path) -> None:
    found = []
    for settings in (None, LoopSettings(limits=3, learn=False)):
        trainer = trainer_of(transformers, tmp_path, Tagger(), settings, base=collecting(transformers.Trainer))
        trainer.train()
        found.append(trainer._metrics["train"])
    assert found[1]["max_first"] == found[0]["max_first"]
    assert found[1]["first"] == pytest.approx(found[0]["first"], abs=EXACT)


def test_hooks_that_step_in_the_midst_of_backward_run_as_written(transformers: Any, tmp_path: Path) -> None:
    def hooked(model: nn.Module) -> nn.Module:
        def step(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.01)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        return model

    plain, adopted, dying = (hooked(Heavy(Tagger())) for _ in range(3))
    options = {"per_device_train_batch_size": 26, "max_grad_norm": 0.0}
    trainer_of(transformers, tmp_path, plain, **options).train()
    trainer_of(transformers, tmp_path, adopted, LoopSettings(learn=False), **options).train()
    assert torch.equal(weights(plain), weights(adopted))
    with simulated_gpu("21MiB", dying), pytest.raises(CanTrainError, match="not split: a hook that sees gradients"):
        trainer_of(transformers, tmp_path, dying, LoopSettings(learn=False), **options).train()


# Evaluation


def accuracy(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids
    return {"accuracy": float((prediction.predictions.argmax(-1) == labels)[labels != -100].mean())}


class Verbose(Tagger):
    """Returns half a MiB of outputs a sample."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        outputs = super().forward(input_ids, labels, **options)
        room = torch.zeros(len(input_ids), 9, 7000, dtype=torch.float64)
        room[:, : input_ids.shape[1], :WORDS] = outputs["logits"]
        return {**outputs, "logits": room}


def test_outputs_that_pile_up_on_the_device_move_to_the_host(transformers: Any, tmp_path: Path) -> None:
    options = {"per_device_eval_batch_size": 2, "compute_metrics": accuracy}
    plain = trainer_of(transformers, tmp_path, Verbose(), **options).predict(Sentences())
    dying = Verbose()
    with simulated_gpu("8MiB", dying), pytest.raises(torch.OutOfMemoryError):
        trainer_of(transformers, tmp_path, dying, **options).predict(Sentences())
    settings = LoopSettings(device="sim:8MiB", learn=False)
    kept = trainer_of(transformers, tmp_path, Verbose(), settings, **options).predict(Sentences())
    assert (kept.predictions == plain.predictions).all()
    assert kept.metrics["test_accuracy"] == plain.metrics["test_accuracy"]
    assert kept.metrics["test_loss"] == plain.metrics["test_loss"]


def test_an_evaluation_that_ran_out_of_memory_is_split_with_the_same_loss(transformers: Any, tmp_path: Path) -> None:
    losses = []
    for settings in (None, LoopSettings(device="sim:24MiB", learn=False)):
        model = Crowded(TaggerWithoutNumber())
        trainer = trainer_of(transformers, tmp_path, model, settings, per_device_eval_batch_size=26)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=EXACT)


class Crowded(Heavy):
    """Takes a MiB a sample for a moment."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
        torch.ones(len(input_ids), 2**17, dtype=torch.float64)
        return self.inner(input_ids, labels, **options)


def test_an_evaluation_that_depends_on_its_whole_batch_is_not_split(transformers: Any, tmp_path: Path) -> None:
    options = {"per_device_eval_batch_size": 26, "remove_unused_columns": False}
    plain = trainer_of(transformers, tmp_path, Contrastive(), **options).evaluate()
    settings = LoopSettings(limits=3, learn=False)
    with pytest.warns(UserWarning, match="not split: cutting one changes its loss"):
        whole = trainer_of(transformers, tmp_path, Contrastive(), settings, **options).evaluate()
    assert whole["eval_loss"] == plain["eval_loss"]
    settings = LoopSettings(device="sim:24MiB", learn=False)
    trainer = trainer_of(transformers, tmp_path, Crowded(Contrastive()), settings, **options)
    with (
        pytest.warns(UserWarning, match="not split"),
        pytest.raises(CanTrainError, match="per_device_eval_batch_size=13"),
    ):
        trainer.evaluate()


def test_outputs_without_a_row_for_each_sample_are_not_joined(transformers: Any, tmp_path: Path) -> None:
    class Scoring(Tagger):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
            outputs = super().forward(input_ids, labels, **options)
            flat = outputs["logits"].mean((1, 2))
            return {**outputs, "logits": flat[:, None] * flat}

    options = {"per_device_eval_batch_size": 13}
    plain = trainer_of(transformers, tmp_path, Scoring(), **options).predict(Sentences())
    with pytest.warns(UserWarning, match="no row for each sample"):
        whole = trainer_of(transformers, tmp_path, Scoring(), LoopSettings(limits=3), **options).predict(Sentences())
    assert (whole.predictions == plain.predictions).all()


# Several processes


def spread(**changes: Any) -> Any:
    arguments = SimpleNamespace(n_gpu=1, optim="sgd")
    trainer = SimpleNamespace(
        args=arguments, model=nn.Linear(1, 1), accelerator=SimpleNamespace(), is_fsdp_enabled=False,
        is_fsdp_xla_enabled=False, is_deepspeed_enabled=False,
    )  # fmt: skip
    vars(arguments).update({name: changes.pop(name) for name in ("n_gpu", "optim") if name in changes})
    vars(trainer).update(changes)
    return trainer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_gpu": 2}, "n_gpu=2, on which DataParallel"),
        ({"is_fsdp_enabled": True}, "FSDP"),
        ({"is_deepspeed_enabled": True}, "DeepSpeed"),
        ({"accelerator": SimpleNamespace(parallelism_config=1)}, "parallelism_config"),
        ({"optim": "adalomo"}, "optim='adalomo'"),
    ],
)
def test_a_model_that_is_spread_over_devices_runs_as_written(changes: Any, reason: str) -> None:
    assert reason in why_whole(spread(**changes))
    assert not why_whole(spread())


def test_a_part_on_one_of_several_ranks_gathers_nothing(transformers: Any, tmp_path: Path) -> None:
    """Another rank has other parts, and would wait for ever."""

    class Gathering(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            self.accelerator.gather_for_metrics(torch.ones(1))
            return super().compute_loss(model, inputs, *arguments, **options)

    trainer = trainer_of(transformers, tmp_path, Tagger(), LoopSettings(limits=3, learn=False), base=Gathering)
    trainer.train()
    trainer.model = model = Tagger()
    kept = transformers_trainer._TrainingParts.compute
    parts = pytest.MonkeyPatch()
    parts.setattr(
        transformers_trainer._TrainingParts, "compute", lambda self, *, is_parallel: kept(self, is_parallel=True)
    )
    with parts.context(), pytest.raises(CanTrainError, match="gathers numbers of all ranks"):
        trainer_of(transformers, tmp_path, model, LoopSettings(limits=3, learn=False), base=Gathering).train()
    parts.undo()
    assert "gather_for_metrics" not in vars(trainer.accelerator)


class ScheduleFree(torch.optim.SGD):
    """Keeps other weights for training than for evaluation."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.param_groups[0]["train_mode"] = False

    def _switch(self, is_training: bool) -> None:
        group = self.param_groups[0]
        if group["train_mode"] is not is_training:
            with torch.no_grad():
                for parameter in group["params"]:
                    parameter.mul_(2.0 if is_training else 0.5)
            group["train_mode"] = is_training

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)


def test_weights_that_an_optimizer_changes_before_the_step_stay_changed(transformers: Any, tmp_path: Path) -> None:
    models = Heavy(Tagger()), Heavy(Tagger())
    for model, settings in zip(models, (None, LoopSettings(device="sim:21MiB", learn=False)), strict=True):
        optimizer = ScheduleFree(model.parameters(), lr=0.1)
        options = {"per_device_train_batch_size": 13, "eval_strategy": "steps", "eval_steps": 1}
        options |= {"per_device_eval_batch_size": 2, "max_steps": 3}
        trainer_of(transformers, tmp_path, model, settings, optimizers=(optimizer, None), **options).train()
    assert difference(*models) <= EXACT


class FailsOnce(torch.autograd.Function):
    """Runs out of memory in the backward pass of the second batch, once the layers above have their gradients."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        FailsOnce.calls += 1
        if FailsOnce.calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return gradients[0]


class Interrupted(Tagger):
    def forward(self, input_ids: Tensor, labels: Tensor, **options: Any) -> dict[str, Tensor]:
        logits = self.layers(FailsOnce.apply(self.words(input_ids)))
        return {"loss": self.loss(logits, labels, **options), "logits": logits}


def test_gradients_of_earlier_batches_outlive_a_backward_pass_that_ran_out_of_memory(
    transformers: Any, tmp_path: Path
) -> None:
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 13, "optim": "sgd"}
    plain, cut = Tagger(), Interrupted()
    trainer_of(transformers, tmp_path, plain, **options).train()
    FailsOnce.calls = 0
    trainer_of(transformers, tmp_path, cut, LoopSettings(learn=False), **options).train()
    assert FailsOnce.calls > 4
    assert difference(plain, cut) <= EXACT


def test_limits_are_searched_for_with_a_copy_of_the_model_where_that_is_asked_for(
    transformers: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, trainers = counting_steps(transformers.Trainer), []
    caplog.set_level("INFO", "can_train")
    for settings in (None, LoopSettings(device="sim:24MiB", state_dir=tmp_path, search=True)):
        options = {"per_device_train_batch_size": 26, "base": base, "max_steps": 2}
        trainer = trainer_of(transformers, tmp_path, Heavy(Tagger()), settings, **options)
        trainer.train()
        trainers.append(trainer)
    plain, cut = trainers
    assert plain.steps == 2
    assert cut.steps > 2
    assert "26 samples a step are computed in" in caplog.text
    assert difference(plain.model, cut.model) <= EXACT


def counting_steps(base: Any) -> Any:
    class CountingSteps(base):
        steps = 0

        def training_step(self, *arguments: Any, **options: Any) -> Tensor:
            self.steps += 1
            return super().training_step(*arguments, **options)

    return CountingSteps


def test_a_loss_of_the_trainers_own_is_not_searched_with(
    transformers: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "can_train")
    settings = LoopSettings(device="sim:64MiB", learn=False, search=True)
    plain, adopted = Tagger(), Tagger()
    trainer_of(transformers, tmp_path, plain, compute_loss_func=token_sum).train()
    trainer_of(transformers, tmp_path, adopted, settings, compute_loss_func=token_sum).train()
    assert "The loss is computed by the Trainer" in caplog.text
    assert torch.equal(weights(plain), weights(adopted))
