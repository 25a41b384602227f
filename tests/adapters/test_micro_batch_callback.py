"""MicroBatchCallback in real Lightning trainings: the weights that a training ends with are those of whole batches."""

import gc
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from can_train import LoopSettings, MicroBatchCallback, get_safety_factor_db, simulated_gpu
from can_train.errors import DoesNotFitError
from fakes.lightning_warnings import QUIET_LIGHTNING

EXACT = 1e-12

pytestmark = [pytest.mark.slow, QUIET_LIGHTNING]


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    return import_module("lightning.pytorch")


def network(lightning: Any) -> Any:
    """A user's module: a mean loss over samples, logged."""

    class Network(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("validation_loss", F.cross_entropy(self.layers(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    return Network()


def data(size: int = 13) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 6, generator=drawn, dtype=torch.float64), torch.randint(3, (40,), generator=drawn)
    return DataLoader(TensorDataset(x, y), batch_size=size)


def fit(lightning: Any, folder: Path, module: Any, *callbacks: Any, **settings: Any) -> Any:
    loaders = settings.pop("data", [data(), data(20)])
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **({"max_epochs": 3} | settings),
    )
    trainer.fit(module, *loaders)
    return trainer


def weights(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_batches_cut_by_a_limit_lead_to_the_same_weights_and_logs(lightning: ModuleType, tmp_path: Path) -> None:
    plain, cut = network(lightning), network(lightning)
    before = fit(lightning, tmp_path, plain)
    after = fit(lightning, tmp_path, cut, MicroBatchCallback(LoopSettings(limits=5)))
    torch.testing.assert_close(weights(cut), weights(plain), rtol=0, atol=EXACT)
    assert after.callback_metrics.keys() == before.callback_metrics.keys()
    for name, value in before.callback_metrics.items():
        torch.testing.assert_close(after.callback_metrics[name], value, rtol=0, atol=1e-6)


WIDTH, LAYERS = 64, 16
GPU = "64MiB"


def wide(lightning: Any) -> Any:
    """A module whose larger batches need more than the simulated GPU has."""

    class Wide(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
            self.layers = nn.Sequential(nn.Linear(6, WIDTH), *hidden, nn.Linear(WIDTH, 3)).double()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self.layers(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("validation_loss", F.cross_entropy(self.layers(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Wide()


def many(size: int = 7000) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(9000, 6, generator=drawn, dtype=torch.float64), torch.randint(3, (9000,), generator=drawn)
    return DataLoader(TensorDataset(x, y), batch_size=size)


def on_simulated_gpu(folder: Path, **settings: Any) -> MicroBatchCallback:
    return MicroBatchCallback(LoopSettings(device=f"sim:{GPU}", state_dir=folder / "state", **settings))


def fit_many(lightning: Any, folder: Path, module: Any, *callbacks: Any, **settings: Any) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu", callbacks=list(callbacks), logger=False, enable_checkpointing=False, max_epochs=1,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, **settings,
    )  # fmt: skip
    trainer.fit(module, many(), many())
    return trainer


def test_a_training_that_needs_more_than_a_gpu_has_ends_with_the_weights_of_whole_batches(
    lightning: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, adopted = wide(lightning), wide(lightning)
    with simulated_gpu(GPU, plain), pytest.raises(torch.OutOfMemoryError):
        fit_many(lightning, tmp_path, plain)
    plain = wide(lightning)
    before = fit_many(lightning, tmp_path, plain)
    caplog.set_level("INFO")
    after = fit_many(lightning, tmp_path, adopted, on_simulated_gpu(tmp_path))
    assert "Batches are computed in parts that are predicted to peak at 90% of the 64.0 MiB of sim-64mib" in caplog.text
    torch.testing.assert_close(weights(adopted), weights(plain), rtol=0, atol=1e-10)
    assert float(after.callback_metrics["validation_loss"]) == pytest.approx(
        float(before.callback_metrics["validation_loss"]), rel=1e-9
    )


def test_what_a_training_has_taught_is_what_the_next_one_begins_with(lightning: ModuleType, tmp_path: Path) -> None:
    class Counting(type(wide(lightning))):  # type: ignore[misc]
        whole = 0

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.whole += len(batch[0]) == 7000
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            steps.append(len(steps))

    whole, steps = [], list[int]()
    for _ in range(3):
        module = Counting()
        seen = []
        module.layers[0].register_forward_hook(lambda layer, inputs, output, seen=seen: seen.append(len(output)))
        fit_many(lightning, tmp_path, module, on_simulated_gpu(tmp_path, key="wide"), limit_val_batches=0)
        whole.append(seen.count(7000))
    assert whole == [1, 0, 0], "only the first training tries a whole batch"
    assert len(steps) == 3 * 2
    (summary,) = get_safety_factor_db(tmp_path / "state").of_key("wide")
    assert [run.outcome for run in summary.runs] == ["ok"] * 3
    assert all(run.ooms_rescued == 0 and run.largest_micro_batch < run.logical_batch for run in summary.runs)
    first, *_, last = summary.runs
    assert first.factor_reason.startswith("from the steps so far")
    assert last.factor_reason.startswith("learned from 2 runs")
    # The largest batch is the first one, which runs before the optimizer has its state: the prediction includes it.
    assert last.peak_allocated_bytes <= last.predicted_peak_bytes <= 1.1 * last.peak_allocated_bytes


def test_a_loop_that_is_not_to_learn_leaves_nothing(lightning: ModuleType, tmp_path: Path) -> None:
    fit_many(lightning, tmp_path, wide(lightning), on_simulated_gpu(tmp_path, learn=False))
    assert not (tmp_path / "state").exists()


def test_a_training_that_fails_is_recorded_as_failed(lightning: ModuleType, tmp_path: Path) -> None:
    module = wide(lightning)
    module.on_train_batch_end = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit_many(lightning, tmp_path, module, on_simulated_gpu(tmp_path, key="wide"))
    (summary,) = get_safety_factor_db(tmp_path / "state").of_key("wide")
    assert [run.outcome for run in summary.runs] == ["error"]
    assert "training_step" not in vars(module), "the module has its own steps again"


def sentences(lightning: Any, *, tells: bool) -> Any:
    """A module whose loss is a mean over tokens, of which samples have different numbers."""

    class Sentences(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.head = nn.Embedding(9, 8, dtype=torch.float64), nn.Linear(8, 3, dtype=torch.float64)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            logits, labels = self.head(self.words(batch[0])), batch[1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            self.log("train_loss", loss, on_epoch=True, batch_size=len(labels))
            return {"loss": loss, "denominator": (labels != -100).sum()} if tells else loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    return Sentences()


def tokens() -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(2)
    words, labels = torch.randint(9, (40, 12), generator=drawn), torch.randint(3, (40, 12), generator=drawn)
    lengths = torch.randint(1, 13, (40, 1), generator=drawn)
    labels[torch.arange(12) >= lengths] = -100
    return DataLoader(TensorDataset(words, labels), batch_size=13)


@pytest.mark.parametrize("tells", [True, False])
def test_a_mean_over_tokens_is_exact_where_its_denominator_is_told(
    lightning: ModuleType, tmp_path: Path, tells: bool
) -> None:
    plain, cut = sentences(lightning, tells=tells), sentences(lightning, tells=tells)
    before = fit(lightning, tmp_path, plain, data=[tokens()])
    callback = MicroBatchCallback(LoopSettings(limits=5))
    if tells:
        after = fit(lightning, tmp_path, cut, callback, data=[tokens()])
        torch.testing.assert_close(weights(cut), weights(plain), rtol=0, atol=EXACT)
        assert float(after.callback_metrics["train_loss_epoch"]) == pytest.approx(
            float(before.callback_metrics["train_loss_epoch"]), rel=1e-5
        )
    else:
        with pytest.warns(UserWarning, match=r'Batches are not split: cutting one changes its gradient.*"denominator"'):
            fit(lightning, tmp_path, cut, callback, data=[tokens()])
        assert torch.equal(weights(cut), weights(plain))


def by_hand(lightning: Any, *, clears_last: bool = False) -> Any:
    """A module in manual optimization that clips and schedules, too."""

    class ByHand(type(network(lightning))):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            loss = F.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("train_loss", loss, on_epoch=True)
            if not clears_last:
                optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            schedule.step()
            if clears_last:
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    return ByHand()


@pytest.mark.parametrize("clears_last", [False, True])
def test_manual_optimization_is_split_too(lightning: ModuleType, tmp_path: Path, clears_last: bool) -> None:
    plain, cut = (by_hand(lightning, clears_last=clears_last) for _ in range(2))
    before = fit(lightning, tmp_path, plain)
    after = fit(lightning, tmp_path, cut, MicroBatchCallback(LoopSettings(limits=5)))
    torch.testing.assert_close(weights(cut), weights(plain), rtol=0, atol=EXACT)
    assert after.global_step == before.global_step == 12
    for name, value in before.callback_metrics.items():
        torch.testing.assert_close(after.callback_metrics[name], value, rtol=0, atol=1e-6)


def test_gradients_that_are_accumulated_by_hand_over_batches_stay(lightning: ModuleType, tmp_path: Path) -> None:
    def module() -> Any:
        class EverySecond(type(network(lightning))):  # type: ignore[misc]
            automatic_optimization = False

            def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
                self.manual_backward(F.cross_entropy(self.layers(batch[0]), batch[1]))
                if batch_idx % 2:
                    self.optimizers().step()
                    self.optimizers().zero_grad()

        return EverySecond()

    plain, cut = module(), module()
    fit(lightning, tmp_path, plain)
    fit(lightning, tmp_path, cut, MicroBatchCallback(LoopSettings(limits=5)))
    torch.testing.assert_close(weights(cut), weights(plain), rtol=0, atol=EXACT)


def test_gradients_that_a_step_clears_take_no_memory_in_its_backward_pass(
    lightning: ModuleType, tmp_path: Path
) -> None:
    class Watching(type(network(lightning))):  # type: ignore[misc]
        def on_train_batch_end(self, *arguments: Any) -> None:
            gradients[:] = [ref(parameter.grad) for parameter in self.parameters()]

        def on_before_backward(self, loss: Tensor) -> None:
            loss.register_hook(lambda _: alive.append(sum(gradient() is not None for gradient in gradients)))

    gradients, alive = list[Any](), list[int]()
    fit(lightning, tmp_path, Watching(), MicroBatchCallback(), max_epochs=1)
    assert alive == [0] * 4


def test_batches_are_freed_without_a_collection_of_garbage(lightning: ModuleType, tmp_path: Path) -> None:
    class Watching(type(network(lightning))):  # type: ignore[misc]
        def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
            alive.append(sum(earlier() is not None for earlier in batches))
            batches.append(ref(batch[0]))

    batches, alive = list[Any](), list[int]()
    gc.disable()
    try:
        fit(lightning, tmp_path, Watching(), MicroBatchCallback(), max_epochs=1, data=[data(4), data()])
    finally:
        gc.enable()
    assert max(alive) == 1, "the last batch, until the next step begins"


def of_two_passes(lightning: Any, *, schedules: bool = False, perturbs: bool = False) -> Any:
    """A module whose step calls `manual_backward` twice; as SAM does, where it perturbs."""

    class Twice(type(by_hand(lightning))):  # type: ignore[misc]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            for number in range(2):
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(self.layers(batch[0]), batch[1]))
                moves = [parameter.grad.clone() for parameter in self.parameters()] if perturbs else ()
                with torch.no_grad():
                    for parameter, move in zip(self.parameters(), moves, strict=False):
                        parameter.add_(move, alpha=0.1 if number == 0 else -0.1)
                if number or not perturbs:
                    optimizer.step()
            if schedules:
                self.lr_schedulers().step()

    return Twice()


@pytest.mark.parametrize("options", [{}, {"schedules": True}, {"perturbs": True}], ids=["plain", "schedule", "SAM"])
def test_a_step_with_two_backward_passes_is_not_split(
    lightning: ModuleType, tmp_path: Path, options: dict[str, bool]
) -> None:
    plain, whole, cut = (of_two_passes(lightning, **options) for _ in range(3))
    before = fit(lightning, tmp_path, plain)
    fit(lightning, tmp_path, whole, MicroBatchCallback(LoopSettings(limits=13)))
    assert torch.equal(weights(whole), weights(plain))
    with pytest.warns(UserWarning, match="Batches are not split: its training_step calls manual_backward more") as told:
        after = fit(lightning, tmp_path, cut, MicroBatchCallback(LoopSettings(limits=5)))
    assert len([one for one in told if "not split" in str(one.message)]) == 1
    assert torch.equal(weights(cut), weights(plain))
    assert after.global_step == before.global_step
    assert cut.optimizers().param_groups[0]["lr"] == plain.optimizers().param_groups[0]["lr"]


def test_a_manual_step_that_compares_samples_is_undone_and_not_split(lightning: ModuleType, tmp_path: Path) -> None:
    def contrastive() -> Any:
        class Contrastive(type(by_hand(lightning))):  # type: ignore[misc]
            def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
                z = self.layers(batch[0])
                self.optimizers().zero_grad()
                self.manual_backward(F.cross_entropy(z @ z.T, torch.arange(len(z))))
                self.optimizers().step()
                self.lr_schedulers().step()

        return Contrastive()

    plain, cut = contrastive(), contrastive()
    fit(lightning, tmp_path, plain)
    with pytest.warns(UserWarning, match="Batches are not split: cutting one changes its gradient by"):
        fit(lightning, tmp_path, cut, MicroBatchCallback(LoopSettings(limits=5)))
    assert torch.equal(weights(cut), weights(plain))


def move_in_place(old: Tensor, new: Tensor) -> None:
    old.lerp_(new, 0.1)


def move_data(old: Tensor, new: Tensor) -> None:
    old.data.mul_(0.9).add_(new.data, alpha=0.1)


def replace_data(old: Tensor, new: Tensor) -> None:
    old.data = old.data * 0.9 + new.data * 0.1


def teaching(lightning: Any, move: Any, first: int = 0) -> Any:
    """A module whose step moves a teacher, from a batch on."""

    class Teaching(type(network(lightning))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.moves = nn.Linear(6, 3).double().requires_grad_(False), 0
            self.net = nn.Linear(6, 3).double()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx >= first:
                with torch.no_grad():
                    for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                        move(old, new)
            out = self.net(batch[0])
            loss: Tensor = F.cross_entropy(out, batch[1]) + F.mse_loss(out, self.teacher(batch[0]))
            return loss

    return Teaching()


@pytest.mark.parametrize("move", [move_in_place, move_data, replace_data])
def test_a_step_that_moves_a_teacher_is_not_split(lightning: ModuleType, tmp_path: Path, move: Any) -> None:
    plain, cut = teaching(lightning, move), teaching(lightning, move)
    fit(lightning, tmp_path, plain)
    with pytest.warns(UserWarning, match="Batches are not split: its step changes parameters by itself") as told:
        fit(lightning, tmp_path, cut, MicroBatchCallback(LoopSettings(limits=5)))
    assert len([one for one in told if "not split" in str(one.message)]) == 1
    assert torch.equal(weights(cut), weights(plain))


def test_a_teacher_that_begins_to_move_later_is_told(lightning: ModuleType, tmp_path: Path) -> None:
    module = teaching(lightning, move_in_place, first=2)
    with pytest.warns(UserWarning, match="has changed parameters by itself, in every part of this batch"):
        fit(lightning, tmp_path, module, MicroBatchCallback(LoopSettings(limits=5)), max_epochs=1)


def test_metrics_count_a_sample_once_though_its_part_ran_out_of_memory(lightning: ModuleType, tmp_path: Path) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    def module(fails: bool) -> Any:
        class Measured(type(network(lightning))):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.accuracy, self.failed = MulticlassAccuracy(3, average="micro"), not fails

            def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
                logits = self.layers(batch[0])
                self.accuracy.update(logits, batch[1])
                self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
                self.log("train_loss", F.cross_entropy(logits, batch[1]), on_epoch=True)
                if len(batch[0]) > 5 and not self.failed and batch_idx == 1:
                    self.failed = True
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                return F.cross_entropy(logits, batch[1])

        return Measured()

    before = fit(lightning, tmp_path, module(False), max_epochs=1)
    settings = LoopSettings(limits=lambda size: [size], state_dir=tmp_path / "state")
    after = fit(lightning, tmp_path, module(True), MicroBatchCallback(settings), max_epochs=1)
    for name, value in before.callback_metrics.items():
        torch.testing.assert_close(after.callback_metrics[name], value, rtol=0, atol=1e-6)


def test_trial_steps_leave_nothing_behind(lightning: ModuleType, tmp_path: Path) -> None:
    from torchmetrics import MeanMetric

    class Counting(type(network(lightning))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen = MeanMetric()
            self.register_buffer("drawn", torch.zeros(1, dtype=torch.float64))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.seen.update(torch.ones(len(batch[0])))
            self.drawn += torch.rand(1, dtype=torch.float64)
            return super().training_step(batch, batch_idx)

        def on_train_end(self) -> None:
            self.counted = float(self.seen.weight)

    plain, adopted = Counting(), Counting()
    torch.manual_seed(3)
    fit(lightning, tmp_path, plain)
    torch.manual_seed(3)
    fit(lightning, tmp_path, adopted, MicroBatchCallback(LoopSettings(state_dir=tmp_path / "state")))
    assert torch.equal(weights(adopted), weights(plain))
    assert torch.equal(adopted.drawn, plain.drawn)
    assert adopted.counted == plain.counted == 120


def test_callbacks_are_given_the_outputs_of_whole_batches_and_none_of_trial_steps(
    lightning: ModuleType, tmp_path: Path
) -> None:
    class Telling(type(network(lightning))):  # type: ignore[misc]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
            return {"loss": super().training_step(batch, batch_idx), "labels": batch[1]}

    class Outputs(lightning.Callback):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self.labels: list[Tensor] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.labels.append(outputs["labels"])

    plain, cut = Outputs(), Outputs()
    fit(lightning, tmp_path, Telling(), plain)
    fit(lightning, tmp_path, Telling(), cut, MicroBatchCallback(LoopSettings(limits=5)))
    torch.testing.assert_close(cut.labels, plain.labels, rtol=0, atol=0)


@pytest.mark.parametrize("limits", [5, 20])
@pytest.mark.parametrize("accumulated", [1, 2, 3])
def test_gradients_of_accumulated_batches_and_a_backward_of_ones_own_are_kept(
    lightning: ModuleType, tmp_path: Path, accumulated: int, limits: int
) -> None:
    class Own(type(network(lightning))):  # type: ignore[misc]
        def backward(self, loss: Tensor) -> None:
            (2 * loss).backward()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    plain, cut = Own(), Own()
    fit(lightning, tmp_path, plain, accumulate_grad_batches=accumulated)
    callback = MicroBatchCallback(LoopSettings(limits=limits))
    fit(lightning, tmp_path, cut, callback, accumulate_grad_batches=accumulated)
    torch.testing.assert_close(weights(cut), weights(plain), rtol=0, atol=EXACT if limits < 13 else 0)


def test_batches_of_a_loader_of_the_module_and_of_a_batch_sampler_are_split(
    lightning: ModuleType, tmp_path: Path
) -> None:
    batches = [[0, 5, 7], list(range(8, 30)), [30, 2, 1, 3, 4, 6, 31], [39]]

    class WithLoader(type(network(lightning))):  # type: ignore[misc]
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(data().dataset, batch_sampler=batches)

    plain, cut = WithLoader(), WithLoader()
    fit(lightning, tmp_path, plain, data=[None, data(20)])
    fit(lightning, tmp_path, cut, MicroBatchCallback(LoopSettings(limits=5)), data=[None, data(20)])
    torch.testing.assert_close(weights(cut), weights(plain), rtol=0, atol=EXACT)


def test_predictions_are_those_of_the_whole_batch(lightning: ModuleType, tmp_path: Path) -> None:
    class Predicting(type(network(lightning))):  # type: ignore[misc]
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
            return {"logits": self.layers(batch[0]), "names": [str(int(one)) for one in batch[1]]}

    module, quiet = Predicting(), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = lightning.Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet).predict(module, data())
    callback = MicroBatchCallback(LoopSettings(limits=5))
    cut = lightning.Trainer(accelerator="cpu", callbacks=callback, **quiet).predict(module, data())
    for one, other in zip(cut, plain, strict=True):
        torch.testing.assert_close(one["logits"], other["logits"], rtol=0, atol=EXACT)
        assert one["names"] == other["names"]


def test_mixed_precision_rounds_as_parts_do(lightning: ModuleType, tmp_path: Path) -> None:
    plain, cut = (network(lightning).float() for _ in range(2))
    x, y = data().dataset[:]
    single = DataLoader(TensorDataset(x.float(), y), batch_size=13)
    fit(lightning, tmp_path, plain, precision="bf16-mixed", max_epochs=1, data=[single, single])
    seen = []
    cut.layers[0].register_forward_hook(lambda module, inputs, output: seen.append((len(output), output.dtype)))
    callback = MicroBatchCallback(LoopSettings(limits=5))
    fit(lightning, tmp_path, cut, callback, precision="bf16-mixed", max_epochs=1, data=[single, single])
    assert seen[:3] == [(5, torch.bfloat16), (4, torch.bfloat16), (4, torch.bfloat16)]
    torch.testing.assert_close(weights(cut), weights(plain), rtol=0, atol=0.03)


def test_a_compiled_module_is_split(lightning: ModuleType, tmp_path: Path) -> None:
    plain, cut = network(lightning), network(lightning)
    fit(lightning, tmp_path, plain, max_epochs=1)
    cut.layers = torch.compile(cut.layers, backend="eager")
    fit(lightning, tmp_path, cut, MicroBatchCallback(LoopSettings(limits=5)), max_epochs=1)
    torch.testing.assert_close(weights(cut), weights(plain), rtol=0, atol=EXACT)


ON_TWO_RANKS = """
import sys
from importlib import import_module

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from can_train import LoopSettings, MicroBatchCallback

lightning = import_module(sys.argv[1])


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        # Its momentum must not move it where no rank uses it.
        self.first = nn.Linear(6, 3).double()

    def training_step(self, batch, batch_idx):
        used = self.first(batch[0]) if "unused" not in sys.argv[2] or batch_idx == 0 else 0
        return F.cross_entropy(self.layers(batch[0]) + used, batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def train(*callbacks):
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 6, generator=drawn, dtype=torch.float64), torch.arange(40) % 3)
    module = Network()
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=sys.argv[2], devices=int(sys.argv[3]), callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, max_epochs=2, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=7))
    return trainer, torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


_, whole = train()
# The ranks cut their batches into different parts.
trainer, cut = train(MicroBatchCallback(LoopSettings(limits=lambda size: [3, size - 3] if size > 3 else [size])))
_, searched = train(MicroBatchCallback(LoopSettings(device="sim:64MiB", learn=False)))
difference = max(float((one - whole).abs().max()) for one in (cut, searched))
# In one write: `print` makes several where Python does not buffer, and the ranks share one pipe.
sys.stdout.write(f"difference {difference} ranks {trainer.world_size}\\n")
sys.stdout.flush()
"""


@pytest.mark.parametrize(
    ("package", "strategy", "ranks"),
    [
        ("pytorch_lightning", "ddp", 2),
        ("lightning.pytorch", "ddp_find_unused_parameters_true", 2),
    ],
)
def test_ranks_and_both_names_of_lightning_are_served(tmp_path: Path, package: str, strategy: str, ranks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(ON_TWO_RANKS)
    command = [sys.executable, str(script), package, strategy, str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    # Ranks may write into each other's lines.
    differences = re.findall(r"difference (\d\S*) ranks (\d)", done.stdout)
    assert len(differences) == ranks
    assert all((float(difference) < EXACT, int(world)) == (True, ranks) for difference, world in differences)


def test_a_gpu_without_room_for_the_optimizer_is_one_clear_error(lightning: ModuleType, tmp_path: Path) -> None:
    module = network(lightning)
    module.layers = nn.Sequential(nn.Linear(6, WIDTH**2 // 4), nn.Linear(WIDTH**2 // 4, WIDTH**2 // 4)).double()
    settings = LoopSettings(device="sim:44MiB", state_dir=tmp_path / "state")
    with pytest.raises(DoesNotFitError, match="The optimizer's step must fit beside weights and gradients"):
        fit(lightning, tmp_path, module, MicroBatchCallback(settings), max_epochs=1)


@pytest.mark.filterwarnings("ignore:A few samples could not be computed both at once and split")
@pytest.mark.parametrize("limits", [None, 50])
def test_a_loop_that_keeps_the_graphs_of_its_steps_is_named(
    lightning: ModuleType, tmp_path: Path, limits: int | None
) -> None:
    class Leaking(type(wide(lightning))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Tensor] = []

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.outputs.append(self.layers(batch[0]))
            return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

    loader = DataLoader(many().dataset, batch_size=100)
    with pytest.raises(DoesNotFitError) as raised:
        fit(lightning, tmp_path, Leaking(), on_simulated_gpu(tmp_path, limits=limits), data=[loader, loader])
    assert re.fullmatch(r"The memory in use before a batch has grown by [\d.]+ MiB in \d+ steps; 'outputs' keeps \d+ "
                        r"tensors with the graphs of their steps", raised.value.rule)  # fmt: skip
    assert "loss.detach()" in raised.value.remedy


def test_a_search_that_is_asked_for_runs_on_a_copy_of_the_module(
    lightning: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Counting(type(wide(lightning))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.sizes.append(len(batch[0]))
            self.log("size", float(len(batch[0])), reduce_fx="max", on_epoch=True)
            return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

    plain, adopted = Counting(), Counting()
    before = fit_many(lightning, tmp_path, plain)
    caplog.set_level("INFO")
    after = fit_many(lightning, tmp_path, adopted, on_simulated_gpu(tmp_path, search=True))
    assert "7000 samples a step are computed in 2 micro-batches of up to 3500" in caplog.text
    assert adopted.sizes == [3500 + 3500, 2000], "each batch fills the list once"
    torch.testing.assert_close(weights(adopted), weights(plain), rtol=0, atol=1e-10)
    assert before.global_step == after.global_step


def test_a_module_whose_copy_cannot_be_trained_is_trained_without_a_search(
    lightning: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Reaching(type(wide(lightning))):  # type: ignore[misc]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            assert self.trainer.max_epochs == 1
            return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

    plain, adopted = Reaching(), Reaching()
    fit_many(lightning, tmp_path, plain)
    caplog.set_level("INFO")
    fit_many(lightning, tmp_path, adopted, on_simulated_gpu(tmp_path, search=True))
    assert "No limits were searched for: a copy of the model cannot be trained." in caplog.text
    torch.testing.assert_close(weights(adopted), weights(plain), rtol=0, atol=1e-10)


def test_a_validation_in_parts_fills_lists_and_metrics_as_a_whole_one_does(
    lightning: ModuleType, tmp_path: Path
) -> None:
    from torchmetrics import MeanMetric

    class Evaluating(type(network(lightning))):  # type: ignore[misc]
        def __init__(self, most: int) -> None:
            super().__init__()
            self.mean, self.losses, self.labels, self.most = MeanMetric(), list[Tensor](), list[Tensor](), most

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            loss = F.cross_entropy(self.layers(batch[0]), batch[1])
            self.mean.update(self.layers(batch[0])[:, 0])
            self.losses.append(loss)
            self.labels.append(batch[1])
            if len(batch[0]) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    results = []
    for most, callbacks in ((99, []), (6, [MicroBatchCallback(LoopSettings(learn=False))])):
        module = Evaluating(most)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(accelerator="cpu", callbacks=callbacks, default_root_dir=tmp_path, **quiet)
        trainer.validate(module, data(13), verbose=False)
        results.append([module.mean.compute(), *module.losses, *module.labels])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=0)


def test_a_step_that_changes_its_batch_in_place_is_not_computed_again(lightning: ModuleType, tmp_path: Path) -> None:
    class Changing(type(network(lightning))):  # type: ignore[misc]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            batch[0].mul_(2)
            if len(batch[0]) > 6:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

    with pytest.raises(DoesNotFitError, match="a step that cannot be undone: it has changed its batch in place"):
        fit(lightning, tmp_path, Changing(), MicroBatchCallback(LoopSettings(learn=False)))


def test_a_callback_that_is_used_again_forgets_why_the_batches_of_another_module_were_not_split(
    lightning: ModuleType, tmp_path: Path
) -> None:
    class Adversarial(type(network(lightning))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(self.layers(batch[0]), batch[1]))
                optimizer.step()

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.layers(batch[0])

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    class Evaluated(type(network(lightning))):  # type: ignore[misc]
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("loss", F.cross_entropy(self.layers(batch[0]), batch[1]))
            if len(batch[0]) > 6:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    callback = MicroBatchCallback(LoopSettings(learn=False))
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    quiet |= {"enable_checkpointing": False, "num_sanity_val_steps": 0}
    for module in (Adversarial(), Evaluated()):
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], default_root_dir=tmp_path,
                                    **quiet)  # fmt: skip
        trainer.fit(module, data(13), data(13))
    assert trainer.callback_metrics["loss"] > 0


@pytest.mark.parametrize("accumulated", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_accumulated_gradients_and_state_that_an_optimizer_makes_late_are_no_leak(
    lightning: ModuleType, tmp_path: Path, optimizer: type[torch.optim.Optimizer], accumulated: int
) -> None:
    class Growing(type(network(lightning))):  # type: ignore[misc]
        """A module whose gradients and state take a tenth of the GPU and more; its eighth batch fits nowhere."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 3)).double()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 7:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self.parameters(), lr=0.01)  # type: ignore[call-arg]  # as all of PyTorch's take it

    loader = DataLoader(many().dataset, batch_size=4)
    with pytest.raises(DoesNotFitError, match="for samples that may not be split further"):
        fit(lightning, tmp_path, Growing(), on_simulated_gpu(tmp_path, learn=False), data=[loader, loader],
            accumulate_grad_batches=accumulated)  # fmt: skip


def test_sparse_gradients_are_counted(lightning: ModuleType, tmp_path: Path) -> None:
    class Sparse(type(network(lightning))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 6, sparse=True).double()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            words = self.words(batch[1]) + batch[0]
            return F.cross_entropy(self.layers(words), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plain, adopted = Sparse(), Sparse()
    fit(lightning, tmp_path, plain, max_epochs=1)
    fit(lightning, tmp_path, adopted, on_simulated_gpu(tmp_path, learn=False), max_epochs=1)
    assert torch.equal(weights(adopted), weights(plain))
