"""Real processes that train together: they end where one would, and whatever happens to one of them ends all alike."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from can_train.factors.observations import read_records
from can_train.runs.recording import read_steps
from fakes.sample_tasks import MeanOfRare, RareClass
from fakes.several_ranks import error_text, run_ranks
from fakes.training_ranks import fit_line, fit_samples, messages_of_steps, train_windows

pytestmark = pytest.mark.slow

EXACT = {"precision": "fp64", "batch_size": 20, "micro_batch_size": 20, "epochs": 4, "scheduler": "constant"}
DROPPING = {**EXACT, "dropout": 0.3, "checkpoint_every": 2}


def fitted(folder: Path, ranks: int, **options: Any) -> list[dict[str, Any]]:
    """Returns what each of so many ranks came to."""
    folder.mkdir(exist_ok=True)
    assert run_ranks(ranks, fit_line, folder, **options) == [0] * ranks
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks)]


def ended(folder: Path, ranks: int, **options: Any) -> list[int]:
    """Returns the exit codes of ranks to which something happened."""
    folder.mkdir(exist_ok=True)
    return run_ranks(ranks, fit_line, folder, **options)


def relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in next(folder.glob("runs/*/metrics.jsonl")).read_text().splitlines()]


def losses(record: dict[str, Any]) -> dict[str, float]:
    return record["train"] if "train" in record else {"validation_loss": record["validation_loss"]}


def checkpoint(folder: Path) -> dict[str, Any]:
    manifest = next(folder.glob("runs/*/checkpoints/manifest.json"))
    newest = json.loads(manifest.read_text())["checkpoints"][0]["file"]
    state: dict[str, Any] = torch.load(manifest.parent / newest)
    return state


def outcomes(folder: Path) -> dict[int, str]:
    return {one.rank: one.outcome for one in read_records(folder / "state").finished}


@pytest.fixture(scope="module")
def alone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training in one process."""
    folder = tmp_path_factory.mktemp("alone")
    fitted(folder, 1, **EXACT)
    return folder


@pytest.fixture(scope="module")
def alone(alone_folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = torch.load(alone_folder / "rank-0.pt")
    return told


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A training of two ranks with dropout to which nothing happens."""
    return fitted(tmp_path_factory.mktemp("undisturbed"), 2, **DROPPING)


def test_three_ranks_train_the_weights_of_one_process(
    tmp_path: Path, alone: dict[str, Any], alone_folder: Path
) -> None:
    several = fitted(tmp_path / "several", 3, **EXACT)
    assert relative_error(several[0]["weights"], alone["weights"]) <= 1e-10
    assert all(torch.equal(rank["weights"], several[0]["weights"]) for rank in several)
    assert [bool(rank["best"]) for rank in several] == [True, False, False]
    assert sum(rank["validated"] for rank in several) == alone["validated"] == EXACT["epochs"] * 20, (
        "as many training samples are compared"
    )
    for one, other in zip(records(tmp_path / "several"), records(alone_folder), strict=True):
        assert one.keys() == other.keys()
        assert losses(one) == pytest.approx(losses(other), rel=1e-10)
    observed = read_records(tmp_path / "several" / "state").finished
    assert {(one.rank, one.attempt, one.outcome) for one in observed} == {(0, 1, "ok"), (1, 1, "ok"), (2, 1, "ok")}
    [run], [alone_run] = (list((folder / "runs").iterdir()) for folder in (tmp_path / "several", alone_folder))
    assert {path.name for path in run.glob("steps*")} == {"steps.jsonl", "steps-rank-1.jsonl", "steps-rank-2.jsonl"}
    steps, others = read_steps(run)[0], read_steps(alone_run)[0]
    assert [one.step for one in steps] == [one.step for one in others]
    assert [one.loss for one in steps] == pytest.approx([one.loss for one in others], abs=1e-6)


def test_more_ranks_than_samples_of_a_batch_train_the_same_weights(tmp_path: Path) -> None:
    settings = {**EXACT, "batch_size": 2, "micro_batch_size": 2, "epochs": 1}
    (alone,), several = fitted(tmp_path / "alone", 1, **settings), fitted(tmp_path / "several", 4, **settings)
    assert relative_error(several[3]["weights"], alone["weights"]) <= 1e-10


@pytest.mark.parametrize(
    "training", [{"precision": "fp16", "batch_size": 2, "micro_batch_size": 2}, {"precision": "bf16"}]
)
def test_mixed_precision_trains_on_ranks_of_which_some_have_nothing_to_do(
    tmp_path: Path, training: dict[str, Any]
) -> None:
    several = fitted(tmp_path / "several", 3, **{**EXACT, "epochs": 1, **training})
    assert all(torch.equal(rank["weights"], several[0]["weights"]) for rank in several)


def test_an_out_of_memory_on_one_rank_changes_nothing_but_its_micro_batches(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    several = fitted(tmp_path / "several", 3, fault=(1, "little memory", 2), **EXACT)
    assert relative_error(several[2]["weights"], alone["weights"]) <= 1e-10
    assert [rank["ooms"][0] > 0 for rank in several] == [False, True, False]
    assert several[0]["ooms"] == (0, several[1]["ooms"][0])
    assert "memory ran out" in "\n".join(several[0]["notices"])


def test_samples_that_do_not_fit_on_one_rank_end_all_after_a_checkpoint(tmp_path: Path) -> None:
    codes = ended(tmp_path, 3, fault=(1, "no memory", 5), **{**DROPPING, "oom_retries": 0})
    assert codes == [3, 3, 3]
    assert error_text(tmp_path, 1).startswith("DoesNotFitError: Memory ran out for samples that may not be split")
    assert "point" in error_text(tmp_path, 1)
    for rank in (0, 2):
        assert error_text(tmp_path, rank).startswith("RankFailedError: Every process of a run must get through: rank 1")
    assert checkpoint(tmp_path)["progress"]["step"] == 4
    assert outcomes(tmp_path) == {0: "interrupted", 1: "oom", 2: "interrupted"}
    undisturbed = fitted(tmp_path / "undisturbed", 3, **DROPPING)
    assert torch.equal(fitted(tmp_path, 3, **DROPPING)[2]["weights"], undisturbed[2]["weights"])


def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    assert ended(tmp_path, 2, fault=(1, "signal", 5), **DROPPING) == [143, 143]
    assert checkpoint(tmp_path)["progress"]["step"] == 5
    assert outcomes(tmp_path) == {0: "interrupted", 1: "interrupted"}
    resumed = fitted(tmp_path, 2, **DROPPING)
    assert all(torch.equal(resumed[rank]["weights"], undisturbed[rank]["weights"]) for rank in (0, 1))
    assert "Continuing at step 5" in resumed[0]["notices"]
    assert {one.attempt for one in read_records(tmp_path / "state").finished} == {1, 2}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_takes_the_others_along_and_the_run_goes_on_bit_by_bit(
    tmp_path: Path, victim: int, undisturbed: list[dict[str, Any]]
) -> None:
    codes = ended(tmp_path, 2, fault=(victim, "kill", 6), **DROPPING)
    assert (codes[victim], codes[1 - victim]) == (-9, 3)
    text = error_text(tmp_path, 1 - victim)
    assert "another one has ended" in text
    assert ".cc" not in text
    assert checkpoint(tmp_path)["progress"]["step"] == 4
    resumed = fitted(tmp_path, 2, **DROPPING)
    assert all(torch.equal(resumed[rank]["weights"], undisturbed[rank]["weights"]) for rank in (0, 1))


def test_an_error_of_the_task_on_one_rank_ends_all(tmp_path: Path) -> None:
    assert ended(tmp_path, 2, fault=(1, "bug", 3), **EXACT) == [3, 1]
    assert "rank 1: ValueError: a bug" in error_text(tmp_path, 0)
    assert outcomes(tmp_path) == {0: "interrupted", 1: "error"}


def test_a_loss_that_is_not_finite_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    assert ended(tmp_path, 2, **{**EXACT, "precision": "fp32", "lr": 1e30, "optimizer": "sgd", "epochs": 9}) == [3, 3]
    assert error_text(tmp_path, 0) == error_text(tmp_path, 1)
    assert "no longer finite" in error_text(tmp_path, 0)


def test_ranks_drop_different_units(tmp_path: Path) -> None:
    one, other = fitted(tmp_path / "several", 2, **{**DROPPING, "epochs": 1})
    assert not torch.equal(one["drawn"], other["drawn"])
    (alone,) = fitted(tmp_path / "alone", 1, **{**DROPPING, "epochs": 1})
    assert torch.equal(one["drawn"], alone["drawn"])


def test_the_plan_of_several_ranks_says_that_dropout_makes_losses_differ_and_without_it_they_do_not(
    tmp_path: Path,
) -> None:
    rates = {"on": {**DROPPING, "micro_batch_size": 0, "epochs": 1}, "off": {**EXACT, "epochs": 1}}
    for name, options in rates.items():
        (tmp_path / name).mkdir()
        (alone,), (first, _) = (fitted(tmp_path / name / str(ranks), ranks, **options) for ranks in (1, 2))
        said = [
            "Dropout draws other masks on each of 2 processes" in "\n".join(one["notices"]) for one in (alone, first)
        ]
        assert said == [False, name == "on"]
        one, other = (losses(records(tmp_path / name / str(ranks))[0]) for ranks in (1, 2))
        assert (other == pytest.approx(one, rel=1e-10)) == (name == "off")


def test_with_another_number_of_ranks_the_batch_stays(tmp_path: Path, alone: dict[str, Any]) -> None:
    settings = {**EXACT, "checkpoint_every": 2}
    assert ended(tmp_path, 3, fault=(0, "signal", 5), **settings) == [143] * 3
    resumed = fitted(tmp_path, 2, **settings)
    assert relative_error(resumed[0]["weights"], alone["weights"]) <= 1e-10
    assert any("2 processes in place of 3" in text for text in resumed[0]["notices"])
    assert [rank["plan"]["ranks"] for rank in resumed] == [2, 2]
    assert [rank["plan"]["plan"]["logical_batch"] for rank in resumed] == [20, 20]


def test_the_device_that_holds_least_decides_a_batch_for_all(tmp_path: Path) -> None:
    settings = {"find_batch_size": "max", "lr_batch_size": 2, "min_steps_per_epoch": 1, "epochs": 2}
    first = fitted(tmp_path, 2, capacities_mib=(80, 40), **settings)
    plans = [rank["plan"]["plan"] for rank in first]
    (alone,) = fitted(tmp_path / "alone", 1, capacities_mib=(40,), **settings)
    assert plans[0]["logical_batch"] == plans[1]["logical_batch"] == 2 * alone["plan"]["plan"]["logical_batch"]
    assert plans[0]["binding_limit"] == plans[1]["binding_limit"] == "memory"
    assert plans[0]["rules"]["tuned_limit"] > 1.5 * plans[1]["rules"]["tuned_limit"]
    assert plans[0]["lr_factor"] == plans[1]["lr_factor"] == pytest.approx((plans[0]["logical_batch"] / 2) ** 0.5)
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "plan-rank-1.json").read_text()) == first[1]["plan"]
    assert all(rank["asked in planning"] > 0 for rank in first)
    again = fitted(tmp_path, 2, capacities_mib=(80, 40), **settings)
    assert [rank["asked in planning"] for rank in again] == [0, 0]
    third = fitted(tmp_path, 3, capacities_mib=(80, 40, 40), **settings)
    assert [rank["plan"]["plan"]["logical_batch"] for rank in third] == [plans[0]["logical_batch"]] * 3


def test_ranks_whose_devices_price_samples_differently_share_them_alike(tmp_path: Path) -> None:
    settings = {**EXACT, "find_batch_size": "opt", "micro_batch_size": 0}
    (alone,) = fitted(tmp_path / "alone", 1, **settings)
    several = fitted(tmp_path / "several", 2, capacities_mib=(80, 80), odd=True, **settings)
    coefficients = [rank["plan"]["limits"]["training"]["model"]["coefficients"] for rank in several]
    assert coefficients[0] != pytest.approx(coefficients[1], rel=0.5)
    assert relative_error(several[0]["weights"], alone["weights"]) <= 1e-10


def test_a_plan_that_one_rank_lacks_is_made_for_it_alone(tmp_path: Path) -> None:
    settings = {"batch_size": 30, "find_batch_size": "opt"}
    first = fitted(tmp_path, 2, capacities_mib=(80, 80), **settings)
    (folder,) = (tmp_path / "runs").iterdir()
    (folder / "plan-rank-1.json").unlink()
    again = fitted(tmp_path, 2, capacities_mib=(80, 80), **settings)
    assert [rank["asked in planning"] > 0 for rank in again] == [False, True]
    assert again[1]["plan"]["plan"]["logical_batch"] == first[1]["plan"]["plan"]["logical_batch"] == 30


def test_running_statistics_are_those_of_rank_0(tmp_path: Path) -> None:
    one, other = fitted(tmp_path, 2, **{**EXACT, "epochs": 1, "norm": True})
    assert (
        one["buffers"].keys() == other["buffers"].keys() == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    )
    assert all(torch.equal(one["buffers"][name], other["buffers"][name]) for name in one["buffers"])
    assert checkpoint(tmp_path)["model"]["0.running_mean"].abs().sum() > 0


@pytest.mark.parametrize("model", ["gat", "vgae"])
def test_a_whole_training_on_two_ranks_ends_as_on_one(tmp_path: Path, model: str, prepared: Path) -> None:
    for name, ranks in (("alone", 1), ("several", 2)):
        (tmp_path / name).mkdir()
        places = {"state": tmp_path / name / "state", "cache": prepared}
        codes = run_ranks(ranks, train_windows, tmp_path / name, model=model, **places)
        assert codes == [0] * ranks
    (one,), (other,) = (list((tmp_path / name).glob("runs/*/result.json")) for name in ("several", "alone"))
    shared, alone = json.loads(one.read_text()), json.loads(other.read_text())
    assert shared["best_validation_loss"] == pytest.approx(alone["best_validation_loss"], rel=1e-9)
    for name, weight in checkpoint(tmp_path / "several")["best"].items():
        assert torch.allclose(weight, checkpoint(tmp_path / "alone")["best"][name], rtol=1e-7, atol=1e-9), name
    summary, said = torch.load(tmp_path / "several" / "outcome-1.pt")
    assert (summary, said) == ("rank 1 trained; rank 0 judges", [])
    assert outcomes(tmp_path / "several") == {0: "ok", 1: "ok"}


@pytest.mark.parametrize(("norm", "messages"), [(False, 2), (True, 3)])
def test_a_step_takes_one_message_beside_the_tensors(norm: bool, messages: int, tmp_path: Path) -> None:
    """One call for the gradients, and with batch norm one for its buffers."""
    assert run_ranks(2, messages_of_steps, tmp_path, norm=norm, **EXACT) == [0, 0]
    for rank in range(2):
        assert (tmp_path / f"messages-{rank}.txt").read_text().split() == [str(messages)] * 3


def test_an_optimizer_that_fails_on_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    assert ended(tmp_path, 2, **DROPPING, fault=(1, "optimizer", 4)) == [3, 1]
    assert "rank 1: ValueError: a bug of the optimizer" in error_text(tmp_path, 0)
    assert checkpoint(tmp_path)["progress"]["step"] == 3


def test_dependences_and_means_that_ranks_find_in_their_shares_are_told_on_all(tmp_path: Path) -> None:
    options = {"batch_size": 40, "micro_batch_size": 3, "precision": "fp64", "epochs": 8}
    (tmp_path / "weighted").mkdir()
    assert run_ranks(2, fit_samples, tmp_path / "weighted", kind=RareClass, **options) == [0, 0]
    told = torch.load(tmp_path / "weighted" / "rank-0.pt")["notices"]
    assert len([text for text in told if "change the gradient of class by" in text]) == 1
    (tmp_path / "mean").mkdir()
    assert run_ranks(2, fit_samples, tmp_path / "mean", kind=MeanOfRare, **options) != [0, 0]
    texts = [error_text(tmp_path / "mean", rank) for rank in range(2)]
    assert any("The sum of 'rare' that" in text and "is a mean" in text for text in texts)
