import json
from pathlib import Path
from typing import Any

import pytest
import torch

from can_train.errors import CanTrainError
from can_train.state.factor_store import FactorChoice
from can_train.training import loop
from can_train.training.loop import Session
from can_train.training.session import make_session
from line_fit import LineTask, Notices, line_parts

HALF = FactorChoice(0.5, "for a test")


def trained(folder: Path, task: LineTask | None = None, **training: Any) -> Session:
    session = make_session(line_parts(folder, task, **training), HALF)
    loop.train(session)
    return session


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in next(folder.glob("runs/*/metrics.jsonl")).read_text().splitlines()]


def weights(session: Session) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in session.model.parameters()])


def test_training_lowers_the_loss_and_keeps_the_best_weights(tmp_path: Path) -> None:
    session = trained(tmp_path, epochs=12, lr=0.02)
    losses = [record["validation_loss"] for record in records(tmp_path) if "validation_loss" in record]
    assert losses[-1] < losses[0] / 2
    assert session.progress.best_loss == min(losses)
    session.model.load_state_dict(session.best)
    assert loop.validation_loss(session) == pytest.approx(min(losses))


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_weights_do_not_depend_on_the_micro_batches(tmp_path: Path, limit: int) -> None:
    whole = trained(tmp_path / "whole", batch_size=20, precision="fp64", micro_batch_size=20, epochs=5)
    split = trained(tmp_path / "split", batch_size=20, precision="fp64", micro_batch_size=limit, epochs=5)
    assert len(split.plan.micro_batches) == -(-20 // limit)
    assert torch.linalg.vector_norm(weights(split) - weights(whole)) <= 1e-10 * torch.linalg.vector_norm(weights(whole))


def test_the_last_batch_of_an_epoch_has_its_true_weight(tmp_path: Path) -> None:
    session = trained(tmp_path, batch_size=25, find_batch_size="off", epochs=1)
    assert session.progress.step == 3
    assert records(tmp_path)[0]["train"]["error"] > 0


def test_patience_ends_a_training_that_no_longer_gains(tmp_path: Path) -> None:
    session = trained(tmp_path, epochs=50, lr=1e-12, patience=2, weight_decay=0.0, seed=1)
    assert session.progress.epoch < 50
    assert "stopping after" in " ".join(notices(session))


def notices(session: Session) -> list[str]:
    assert isinstance(session.reporter, Notices)
    return session.reporter.texts


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_every_precision_trains(tmp_path: Path, precision: str) -> None:
    assert trained(tmp_path, precision=precision, epochs=2, grad_clip_norm=0.5).progress.trained


def test_deterministic_algorithms_give_the_same_weights_again(tmp_path: Path) -> None:
    assert torch.equal(weights(trained(tmp_path / "a")), weights(trained(tmp_path / "b")))


def test_a_loss_that_is_not_finite_is_an_error_with_remedies(tmp_path: Path) -> None:
    with pytest.raises(CanTrainError, match=r"no longer finite.*\n.*training.lr"):
        trained(tmp_path, lr=1e30, optimizer="sgd", epochs=9)


def test_validation_may_be_rarer_than_epochs_and_always_ends_the_training(tmp_path: Path) -> None:
    trained(tmp_path, epochs=5, val_interval=3)
    assert [record["epoch"] for record in records(tmp_path) if "validation_loss" in record] == [3, 5]


def test_a_peak_is_measured_even_in_a_run_of_few_steps(tmp_path: Path) -> None:
    assert trained(tmp_path, epochs=1, batch_size=60).peak_bytes > 0
