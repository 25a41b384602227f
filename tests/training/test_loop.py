import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.settings import MonitorSettings
from can_train.errors import RUN_FAILED, CanTrainError
from can_train.fit.micro_batcher import MOVES_WEIGHTS, MicroBatcher
from can_train.training import train as training_loop
from can_train.training.judgement import validation_loss
from can_train.training.session import Session
from can_train.training.train import make_session
from fakes.line_fit import (
    SAMPLES,
    LineBatch,
    LineTask,
    Notices,
    StoppedTask,
    fixed,
    line_parts,
    train_line,
)
from fakes.sample_tasks import MeanOfRare, RareClass

HALF = fixed(0.5)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in next(folder.glob("runs/*/metrics.jsonl")).read_text().splitlines()]


def weights(session: Session) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in session.model.parameters()])


def test_training_lowers_the_loss_and_keeps_the_best_weights(tmp_path: Path) -> None:
    session = train_line(tmp_path, epochs=12, lr=0.02, batch_size=1)
    losses = [record["validation_loss"] for record in records(tmp_path) if "validation_loss" in record]
    assert losses[-1] < losses[0] / 2
    assert session.progress.best_loss == min(losses)
    session.model.load_state_dict(session.best)
    assert validation_loss(session) == pytest.approx(min(losses))


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_weights_do_not_depend_on_the_micro_batches(tmp_path: Path, limit: int) -> None:
    whole = train_line(tmp_path / "whole", batch_size=20, precision="fp64", micro_batch_size=20, epochs=5)
    split = train_line(tmp_path / "split", batch_size=20, precision="fp64", micro_batch_size=limit, epochs=5)
    assert split.engine.run_plan.phase_plan.most_parts == -(-20 // limit)
    assert split.engine.largest_micro_batch == -(-20 // -(-20 // limit))
    assert torch.linalg.vector_norm(weights(split) - weights(whole)) <= 1e-10 * torch.linalg.vector_norm(weights(whole))


def test_the_last_batch_of_an_epoch_has_its_true_weight(tmp_path: Path) -> None:
    session = train_line(tmp_path, batch_size=25, find_batch_size="off", epochs=1)
    assert session.progress.step == 3
    assert records(tmp_path)[0]["train"]["error"] > 0


def test_patience_ends_a_training_that_no_longer_gains(tmp_path: Path) -> None:
    for interval, unit in ((1, "epochs"), (2, "validations")):
        still = {"lr": 1e-12, "weight_decay": 0.0, "val_interval": interval}
        session = train_line(tmp_path / unit, epochs=50, patience=2, seed=1, **still)
        assert session.progress.epoch < 50
        said = f"No better validation loss in 2 {unit}: stopping after epoch {session.progress.epoch}"
        assert said in " ".join(notices(session))


def notices(session: Session) -> list[str]:
    assert isinstance(session.reporter, Notices)
    return session.reporter.texts


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_every_precision_trains(tmp_path: Path, precision: str) -> None:
    assert train_line(tmp_path, precision=precision, epochs=2, grad_clip_norm=0.5).progress.trained


def test_deterministic_algorithms_give_the_same_weights_again(tmp_path: Path) -> None:
    assert torch.equal(weights(train_line(tmp_path / "a")), weights(train_line(tmp_path / "b")))


def test_a_loss_that_is_not_finite_is_an_error_with_remedies(tmp_path: Path) -> None:
    with pytest.raises(
        CanTrainError, match=r"no longer finite.*\nTrain anew .*--lr 0.1, .*--grad-clip-norm 1"
    ) as error:
        train_line(tmp_path, lr=1e30, optimizer="sgd", epochs=9)
    assert error.value.exit_code == RUN_FAILED


class TokenBatch(LineBatch):
    """Points of a thousand tokens each; only computing the losses tells their number."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x, 10**9)
        self.denominators: Any = None

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[torch.Tensor, float]]:
        total, points = super().losses(model, start, stop)["error"]
        return {"error": (1000 * total, 1000 * points)}


class TokenTask(LineTask):
    """Points of a thousand tokens each."""

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        return TokenBatch(self._x[rows].to(device, dtype))


def test_in_half_precision_a_split_batch_skips_no_more_steps_than_the_whole_one(tmp_path: Path) -> None:
    scales = [
        train_line(
            tmp_path / f"{limit}", TokenTask(), batch_size=20, precision="fp16", micro_batch_size=limit
        ).engine.optimization.scaler.get_scale()
        for limit in (20, 5)
    ]
    assert scales[0] == scales[1] > 1000


def test_an_epoch_without_a_step_for_overflowing_gradients_is_told(tmp_path: Path) -> None:
    told = [
        notices(train_line(tmp_path / precision, TokenTask(), epochs=1, batch_size=60, precision=precision))
        for precision in ("fp16", "fp32")
    ]
    overflow = "All gradients of epoch 1 left the range of float16, and no step was taken"
    assert [overflow in text for text in map("\n".join, told)] == [True, False]


class UncountedBatch(LineBatch):
    """Squared errors whose denominator counts no point; only computing the losses tells it where `is_known` is False"""

    def __init__(self, x: torch.Tensor, *, is_known: bool) -> None:
        super().__init__(x, 10**9)
        self.denominators: Any = {"error": 0.0} if is_known else None

    def losses(self, model: nn.Module, start: int, stop: int) -> Mapping[str, tuple[torch.Tensor, float]]:
        return {"error": (super().losses(model, start, stop)["error"][0], 0.0)}


class UncountedTask(LineTask):
    """Points; no point of the training batches that have point 7 is counted, or of the validation."""

    def __init__(self, *, is_known: bool = False, in_validation: bool = False) -> None:
        super().__init__()
        self._is_known, self._in_validation = is_known, in_validation

    def logical_batch(
        self, rows: NDArray[np.int64], device: torch.device, dtype: torch.dtype, generator: torch.Generator | None
    ) -> LineBatch:
        is_uncounted = rows.min() >= SAMPLES if self._in_validation else 7 in rows
        x = self._x[rows].to(device, dtype)
        return UncountedBatch(x, is_known=self._is_known) if is_uncounted else LineBatch(x, 10**9)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_sum_without_a_denominator_is_the_same_error_in_a_batch_that_is_split(tmp_path: Path, is_known: bool) -> None:
    texts = set()
    for limit in (20, 5):
        with pytest.raises(CanTrainError, match=r"'error' has the sum \S+ in step \d, whose batch .* point") as error:
            train_line(tmp_path / f"{limit}", UncountedTask(is_known=is_known), batch_size=20, precision="fp64",
                       micro_batch_size=limit)  # fmt: skip
        texts.add(str(error.value))
    assert len(texts) == 1


def test_a_sum_without_a_denominator_is_an_error_in_validation(tmp_path: Path) -> None:
    with pytest.raises(CanTrainError, match=r"'error' has the sum \S+ in 10 samples from point 60 on"):
        train_line(tmp_path, UncountedTask(in_validation=True))


def test_validation_may_be_rarer_than_epochs_and_always_ends_the_training(tmp_path: Path) -> None:
    train_line(tmp_path, epochs=5, val_interval=3)
    assert [record["epoch"] for record in records(tmp_path) if "validation_loss" in record] == [3, 5]


def test_a_peak_is_measured_even_in_a_run_of_few_steps(tmp_path: Path) -> None:
    assert train_line(tmp_path, epochs=1, batch_size=60).monitor.peak_bytes > 0


def test_before_the_first_measured_step_no_peak_is_claimed(tmp_path: Path) -> None:
    train_line(tmp_path, epochs=9, batch_size=20)
    peaks = [record["peak_memory_pct"] for record in records(tmp_path) if "train" in record]
    assert peaks[0] is None
    assert peaks[-1] is not None


def test_on_the_cpu_cost_and_peak_are_those_of_the_measured_steps(tmp_path: Path) -> None:
    session = train_line(tmp_path, epochs=1, batch_size=25)
    costs = [session.engine.run_plan.training_costs(session.task, rows) for rows in session.epochs.steps(0)]
    first, second, last = [cost.cost(0, len(cost)) for cost in costs]
    assert session.engine.run_plan.phase_plan.most_parts == 1
    assert session.fullest.largest_cost == session.fullest.cost_after_rescue == last < max(first, second)


def test_the_monitor_has_the_rhythm_that_was_set(tmp_path: Path) -> None:
    parts = line_parts(tmp_path, epochs=3, batch_size=20)
    run = replace(parts.run, monitor=MonitorSettings(interval=3, warmup=2))
    session = make_session(replace(parts, run=run), HALF)
    due: list[int] = []
    step = session.engine.optimization.step

    def noted(*position: int) -> bool:
        # Within a step the next one's turn is told already.
        due.extend([session.progress.step + 1] * session.monitor.due)
        return step(*position)

    session.engine.optimization.step = noted  # type: ignore[method-assign]
    training_loop.train(session)
    assert due == [2, 5, 8]


class DroppingTask(StoppedTask):
    """Draws from the global generator at every step."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(super().build_model(), nn.Dropout(0.3))


@pytest.mark.parametrize(
    "training",
    [{}, {"precision": "fp16", "grad_clip_norm": 0.1}, {"scheduler_interval": "epoch", "optimizer": "sgd"}],
    ids=["plain", "scaled and clipped", "schedule by epoch"],
)
@pytest.mark.parametrize("step", [1, 3, 5, 9], ids=["first", "ends an epoch", "inside an epoch", "last"])
def test_a_run_stopped_at_any_step_goes_on_as_if_it_had_not_been(
    tmp_path: Path, training: dict[str, Any], step: int
) -> None:
    settings = {"batch_size": 25, "micro_batch_size": 10, "epochs": 3} | training
    whole = train_line(tmp_path / "whole", DroppingTask(after=0), **settings)
    with pytest.raises(SystemExit) as stop:
        train_line(tmp_path / "cut", DroppingTask(after=step), **settings)
    assert stop.value.code == 143
    cut = train_line(tmp_path / "cut", DroppingTask(after=0), **settings)
    assert torch.equal(weights(cut), weights(whole))
    assert cut.engine.optimization.state_dict()["scaler"] == whole.engine.optimization.state_dict()["scaler"]
    assert cut.engine.optimization.lr == whole.engine.optimization.lr
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def losses(folder: Path) -> list[Any]:
    names = ("step", "epoch", "lr", "train", "validation_loss")
    return [[record.get(name) for name in names] for record in records(folder)]


def test_generators_that_are_not_restored_give_other_weights(tmp_path: Path) -> None:
    settings = {"batch_size": 25, "micro_batch_size": 10, "epochs": 3}
    whole = train_line(tmp_path / "whole", DroppingTask(after=0), **settings)
    with pytest.raises(SystemExit):
        train_line(tmp_path / "cut", DroppingTask(after=2), **settings)
    resumed = make_session(line_parts(tmp_path / "cut", DroppingTask(after=0), **settings), HALF)
    torch.manual_seed(1)
    training_loop.train(resumed)
    assert not torch.equal(weights(resumed), weights(whole))


def test_a_gradient_is_clipped_once_a_step_whatever_the_micro_batches(tmp_path: Path) -> None:
    settings = {"batch_size": 20, "precision": "fp64", "grad_clip_norm": 0.01, "epochs": 3, "optimizer": "sgd"}
    whole = train_line(tmp_path / "whole", micro_batch_size=20, **settings)
    split = train_line(tmp_path / "split", micro_batch_size=3, **settings)
    assert torch.linalg.vector_norm(weights(split) - weights(whole)) <= 1e-10 * torch.linalg.vector_norm(weights(whole))


RARE = {"batch_size": 20, "micro_batch_size": 7, "precision": "fp64", "epochs": 4}


class Dropping(LineTask):
    """Points, by a model that may have dropout."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self._dropout = dropout

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(self._dropout), nn.Tanh(), nn.Linear(8, 1))


def test_a_dependence_on_a_rare_class_is_told_once_though_the_plan_has_not_seen_it(tmp_path: Path) -> None:
    session = train_line(tmp_path, RareClass(), **RARE)
    assert not session.engine.planner.batch_dependence.terms
    assert isinstance(session.reporter, Notices)
    told = [text for text in session.reporter.texts if "depend on the rest of their batch" in text]
    assert len(told) == 1
    assert re.match(r"step \d+: samples depend on .*: micro-batches change the gradient of class by [1-9]", told[0])


def test_a_mean_that_the_plan_has_not_seen_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(CanTrainError, match=r"The sum of 'rare' that MeanOfRare\.loss returns is a mean"):
        train_line(tmp_path, MeanOfRare(), **RARE)


def test_a_mean_that_a_later_step_shows_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[Any]()

    def compared_late(batcher: MicroBatcher, result: Any) -> bool:
        steps.append(result)
        return len(steps) > 1

    monkeypatch.setattr(MicroBatcher, "is_compared", compared_late)
    session = train_line(tmp_path, MeanOfRare(), **RARE)
    assert isinstance(session.reporter, Notices)
    assert len([text for text in session.reporter.texts if "the sum of 'rare' is a mean" in text]) == 1
    assert session.progress.step == len(steps) == 8


class KeyEncoder(nn.Module):
    """Moves a copy of its layer in each forward pass, as momentum contrast does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)

    def forward(self, points: Tensor) -> Tensor:
        self.key.weight.data = 0.9 * self.key.weight.data + 0.1 * self.query.weight.data
        self.key.bias.data.lerp_(self.query.bias.data, 0.1)
        made: Tensor = self.query(points) - self.key(points)
        return made


class Remembering(RareClass):
    """Draws from a generator of its own, counts samples, and moves a copy of its model."""

    generator = np.random.default_rng(0)
    count = 0

    def model(self) -> nn.Module:
        return KeyEncoder()

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, float | Tensor]]:
        points, classes = batch
        self.count += len(points)
        factor = 1 + 0.1 * float(self.generator.standard_normal()) + 100 / (100 + self.count)
        return {"loss": (factor * model(points).square().sum(), len(classes))}


def test_comparisons_change_no_bit_of_a_training_whose_task_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    for name in ("compared", "plain"):
        Remembering.generator = np.random.default_rng(0)
        trained.append(train_line(tmp_path / name, Remembering(), **RARE))
        assert (trained[-1].engine.batcher.batch_dependence is None) is (name == "plain")
        monkeypatch.setattr(MicroBatcher, "is_compared", lambda batcher, result: False)
    assert torch.equal(*map(weights, trained))
    figures = [[one.get("validation_loss") for one in records(tmp_path / name)] for name in ("compared", "plain")]
    assert figures[0] == figures[1]


class Clamped(RareClass):
    """Clamps its weights as it computes the loss."""

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, float | Tensor]]:
        with torch.no_grad():
            for weight in model.parameters():
                weight.clamp_(-1, 1)
        points, classes = batch
        return {"loss": (model(points).square().sum(), len(classes))}


def test_weights_that_a_loss_changes_are_told_once(tmp_path: Path) -> None:
    session = train_line(tmp_path, Clamped(), **RARE)
    assert isinstance(session.reporter, Notices)
    told = [text for text in session.reporter.texts if "no further batch is compared" in text]
    assert told == [f"step 0: {MOVES_WEIGHTS[0].lower()}{MOVES_WEIGHTS[1:]}"]


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}], ids=["plain", "dropout"])
def test_comparisons_change_no_bit_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Mapping[str, float]
) -> None:
    compared, measure = list[bool](), MicroBatcher.measure_dependence

    def noted(batcher: MicroBatcher, *arguments: Any, **keywords: Any) -> Any:
        compared.append(keywords.get("has_room", False))
        return measure(batcher, *arguments, **keywords)

    monkeypatch.setattr(MicroBatcher, "measure_dependence", noted)
    trained = train_line(tmp_path / "compared", Dropping(**options), **RARE)
    # Of 12 steps, the first, second, fourth and eighth; with parts first, and then whole.
    assert compared == [False, True] * 4
    monkeypatch.setattr(MicroBatcher, "is_compared", lambda batcher, result: False)
    plain = train_line(tmp_path / "plain", Dropping(**options), **RARE)
    assert len(compared) == 8
    assert torch.equal(weights(trained), weights(plain))
    figures = [[one.get("validation_loss") for one in records(tmp_path / name)] for name in ("compared", "plain")]
    assert figures[0] == figures[1]
