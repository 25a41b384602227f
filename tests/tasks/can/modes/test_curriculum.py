"""The curriculum: its schedule, the windows and the prior of each epoch, and a run that is killed between epochs."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.errors import RunError
from can_train.fit.micro_batcher import Losses
from can_train.reporter import SilentReporter
from can_train_tasks.can.losses import ClassifierBatch
from can_train_tasks.can.modes.curriculum import Curriculum, CurriculumTask, RatioSchedule
from can_train_tasks.can.task import make_task
from fakes.bitwise import assert_ends_like
from fakes.killed_runs import finish, finish_killed, only_run
from fakes.random_bus import random_frames, write_log
from fakes.split_gradients import gradient, relative_error

DEFAULT = RatioSchedule(start=1.0, end=10.0, warmup=0.1, smoothing=0.9)

schedules = st.builds(
    lambda start, rise, warmup, smoothing: RatioSchedule(
        start=start, end=start + rise, warmup=warmup, smoothing=smoothing
    ),
    start=st.floats(0.01, 100),
    rise=st.floats(0, 1000),
    warmup=st.floats(0, 0.9),
    smoothing=st.floats(0, 0.99),
)


@given(schedule=schedules, epochs=st.integers(1, 120))
def test_the_ratio_never_falls_and_ends_where_it_should(schedule: RatioSchedule, epochs: int) -> None:
    ratios = [schedule.ratio(epoch, epochs) for epoch in range(epochs)]
    assert all(one <= next_ + 1e-9 * schedule.end for one, next_ in pairwise(ratios))
    assert schedule.start <= min(ratios)
    assert ratios[-1] == pytest.approx(schedule.end, rel=1e-12)


@given(schedule=schedules, epochs=st.integers(2, 120))
def test_the_ratio_does_not_rise_during_the_warm_up(schedule: RatioSchedule, epochs: int) -> None:
    warm = [epoch for epoch in range(epochs) if epoch / (epochs - 1) <= schedule.warmup]
    assert {schedule.ratio(epoch, epochs) for epoch in warm} == {schedule.start}


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 0.9, 0.99])
def test_the_ratio_is_a_moving_average_tick_by_tick(smoothing: float) -> None:
    schedule = RatioSchedule(start=1.0, end=10.0, warmup=0.1, smoothing=smoothing)
    average, averages = 0.0, [0.0] * 101
    for tick in range(1, 901):
        average = smoothing * average + (1 - smoothing) * tick
        averages.append(average)
    expected = [1 + 9 * value / averages[-1] for value in averages]
    assert [schedule.ratio(tick, 1001) for tick in range(1001)] == pytest.approx(expected, rel=1e-9)


def test_smoothing_delays_the_ratio_by_about_a_hundredth_of_the_training() -> None:
    plain = RatioSchedule(start=1.0, end=10.0, warmup=0.1, smoothing=0.0)
    behind = [plain.ratio(epoch, 101) - DEFAULT.ratio(epoch, 101) for epoch in range(101)]
    assert 0.03 < max(behind) < 0.1


@pytest.mark.parametrize("epochs", [1, 2, 3, 10])
def test_few_epochs_reach_the_end_too(epochs: int) -> None:
    assert DEFAULT.ratio(epochs - 1, epochs) == 10.0


def curriculum(difficulty: list[float], is_attack: list[bool]) -> Curriculum:
    return Curriculum(np.arange(100, 100 + len(is_attack)), np.array(is_attack), np.array(difficulty))


def test_every_attack_is_there_and_the_hardest_benign_windows_beside_it() -> None:
    windows = curriculum([0.1, 5.0, 2.0, 7.0, 0.0], [False, True, False, False, True, False, False])
    shown = [windows.with_ratio(ratio).rows.tolist() for ratio in (0.5, 1.0, 1.5)]
    assert shown == [[101, 104, 105], [101, 102, 104, 105], [101, 102, 103, 104, 105]]
    assert windows.with_ratio(10.0).rows.tolist() == list(range(100, 107))


def test_of_equally_hard_windows_the_first_come_first() -> None:
    windows = curriculum([1.0, 2.0, 1.0, 2.0, 1.0], [False] * 5 + [True] * 3)
    assert windows.with_ratio(1.0).rows.tolist() == [100, 101, 103, 105, 106, 107]


data = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=60)


@given(data=data, ratios=st.tuples(st.floats(0.01, 30), st.floats(0.01, 30)))
def test_a_higher_ratio_adds_windows_and_takes_none_away(
    data: list[tuple[bool, int]], ratios: tuple[float, float]
) -> None:
    is_attack = np.array([attack for attack, _ in data])
    difficulty = np.array([float(hard) for attack, hard in data if not attack])
    windows = Curriculum(np.arange(len(data)), is_attack, difficulty)
    fewer, more = (windows.with_ratio(ratio) for ratio in sorted(ratios))
    assert set(fewer.rows) <= set(more.rows)
    assert set(np.flatnonzero(is_attack)) <= set(fewer.rows)
    for shown in (fewer, more):
        assert (shown.benign, shown.attacks) == (int((~is_attack[shown.rows]).sum()), int(is_attack.sum()))
        assert len(shown.rows) == len(set(shown.rows)) == shown.benign + shown.attacks
    left_out = np.setdiff1d(np.flatnonzero(~is_attack), more.rows)
    hard = dict(zip(np.flatnonzero(~is_attack), difficulty, strict=True))
    there = [hard[row] for row in more.rows if not is_attack[row]]
    assert not len(left_out) or max(hard[row] for row in left_out) <= min(there)


def test_the_prior_is_that_of_the_windows_shown() -> None:
    windows = curriculum([float(i) for i in range(9)], [True] * 3 + [False] * 9)
    assert windows.with_ratio(1.0).log_prior == 0.0
    assert windows.with_ratio(2.0).log_prior == pytest.approx(math.log(2))
    assert windows.with_ratio(10.0).log_prior == pytest.approx(math.log(3))


def test_a_sample_without_attacks_shows_all_that_is_benign() -> None:
    assert len(curriculum([1.0, 2.0, 3.0], [False] * 3).with_ratio(1.0).rows) == 3


CPU = torch.device("cpu")
WINDOW, WINDOWS, EPOCHS = 20, 400, 5
ROLE = "autoencoder"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("curriculum")
    write_log(path / "drive.csv", random_frames(WINDOWS * WINDOW))
    return path


def run_of(folder: Path, model: str, mode: str | None, **settings: Any) -> ResolvedRun:
    values = {"dataset.window": WINDOW, "dataset.stride": WINDOW, "mode.baselines": False, "model.dropout": 0.0}
    values |= {"training.epochs": EPOCHS} | {name.replace("__", "."): value for name, value in settings.items()}
    log = str(folder / "drive.csv")
    return resolve(RunRequest(model=model, mode=mode, size="student", dataset=log, values=values))


def finished(folder: Path) -> FinishedModel:
    run = run_of(folder, "vgae", None)
    model = make_task(run, {}, folder, folder / "cache", SilentReporter()).build_model()
    result = {"judgement": {"error_units": [1.0] * 5}}
    return FinishedModel(run_id="untrained", run=run, weights=model.state_dict(), result=result, sha256="0")


def task_of(folder: Path, mode: str = "curriculum", **settings: Any) -> Any:
    given = {ROLE: finished(folder)}
    return make_task(run_of(folder, "gat", mode, **settings), given, folder, folder / "cache", SilentReporter())


def told(task: CurriculumTask, difficulty: Callable[[NDArray[np.int64]], Any]) -> CurriculumTask:
    """Tells a task how hard windows are, by the node error alone."""

    def answers(rows: NDArray[np.int64]) -> dict[str, Tensor]:
        errors = torch.zeros(len(rows), 5)
        errors[:, 0] = torch.as_tensor(difficulty(rows), dtype=torch.float32)
        return {"errors": errors}

    task.bind_outputs(ROLE, answers)
    return task


def test_epochs_have_all_attacks_and_ever_more_of_the_hardest_windows(folder: Path) -> None:
    task = told(task_of(folder, mode__end_ratio=3.0), lambda rows: rows)
    train = task_of(folder, "normal").train_rows
    attack = task._data.flat.label[train] > 0
    epochs = [task.in_epoch(epoch, EPOCHS) for epoch in range(EPOCHS)]
    for epoch in epochs:
        assert np.isin(train[attack], epoch.train_rows).all()
        benign = np.setdiff1d(epoch.train_rows, train[attack])
        assert benign.tolist() == train[~attack][-len(benign) :].tolist()
    ratios = [len(epoch.train_rows) / attack.sum() - 1 for epoch in epochs]
    assert ratios == sorted(ratios)
    assert (ratios[0], ratios[-1]) == (pytest.approx(1.0, abs=0.02), pytest.approx(3.0, abs=0.02))
    assert task.train_rows.tolist() == epochs[-1].train_rows.tolist()


def test_before_the_autoencoder_is_asked_a_plan_sees_as_many_windows(folder: Path) -> None:
    task = task_of(folder, mode__end_ratio=3.0)
    before = [len(task.in_epoch(epoch, EPOCHS).train_rows) for epoch in range(EPOCHS)]
    planned = (len(task.train_rows), task.estimated_train_rows)
    told(task, lambda rows: rows)
    assert [len(task.in_epoch(epoch, EPOCHS).train_rows) for epoch in range(EPOCHS)] == before
    assert (len(task.train_rows), task.estimated_train_rows) == planned


def test_a_ratio_that_the_data_do_not_have_is_said_and_not_waited_for(folder: Path) -> None:
    task = told(task_of(folder), lambda rows: rows)
    assert task.train_rows.tolist() == task_of(folder, "normal").train_rows.tolist()
    assert "benign windows for each attack: the ratio rises to that, not to mode.end_ratio=10" in task.notices()[0]
    sizes = [len(task.in_epoch(epoch, EPOCHS).train_rows) for epoch in range(EPOCHS)]
    assert sizes[-2] < sizes[-1] == len(task.train_rows)
    assert task_of(folder, mode__end_ratio=2.0).notices() == ()


def test_an_error_that_is_not_finite_is_named(folder: Path) -> None:
    with pytest.raises(RunError, match=r"finite number: 1 of \d+ are not, by untrained"):
        told(task_of(folder), lambda rows: np.where(rows == rows[3], np.nan, 1.0))


def logits_of(constant: tuple[float, float]) -> nn.Module:
    class Constant(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            return torch.tensor([constant], dtype=torch.float64).expand(batch.num_graphs, 2)

    return Constant()


@pytest.mark.parametrize("epoch", range(EPOCHS))
def test_a_model_that_knows_nothing_is_told_the_prior_of_the_epoch(folder: Path, epoch: int) -> None:
    task = told(task_of(folder, mode__end_ratio=3.0), lambda rows: rows)
    view = task.in_epoch(epoch, EPOCHS)
    rows = view.train_rows
    batch = view.logical_batch(rows, CPU, torch.float64, torch.Generator())
    total, count = batch.losses(logits_of((0.3, 0.3)), 0, len(rows))["classification"]
    share = (task._data.flat.label[rows] > 0).mean()
    assert count == batch.denominators["classification"] == len(rows)
    # The entropy of the classes: no constant does better, so nothing is left to learn but what windows say.
    assert float(total) / count == pytest.approx(-share * math.log(share) - (1 - share) * math.log(1 - share))


def test_validation_is_that_of_the_plain_classifier_in_every_epoch(folder: Path) -> None:
    task, plain = told(task_of(folder), lambda rows: rows), task_of(folder, "normal")
    assert task.validation_rows.tolist() == plain.validation_rows.tolist()
    network, rows = plain.build_model().double().eval(), plain.validation_rows
    task.in_epoch(3, EPOCHS)
    mine, its = (one.logical_batch(rows, CPU, torch.float64, None) for one in (task, plain))
    assert mine.denominators == its.denominators
    losses = [one.losses(network, 0, len(rows))["classification"] for one in (mine, its)]
    assert torch.equal(losses[0][0], losses[1][0])
    assert torch.equal(*(one.scores(network, rows, CPU, torch.float64) for one in (task, plain)))


CUTS = (3, 11, 1, 8)


@pytest.fixture(scope="module")
def exact(folder: Path) -> tuple[nn.Module, ClassifierBatch, NDArray[np.bool_]]:
    """A model, a logical batch of the last epoch, and which of its windows are attacks."""
    task = told(task_of(folder, mode__end_ratio=3.0), lambda rows: rows)
    rows = np.random.default_rng(0).permutation(task.train_rows)[: sum(CUTS)]
    batch = task.in_epoch(EPOCHS - 1, EPOCHS).logical_batch(rows, CPU, torch.float64, torch.Generator())
    return task.build_model().double(), batch, task._data.flat.label[rows] > 0


def test_a_split_batch_has_the_gradient_of_the_whole(exact: tuple[nn.Module, ClassifierBatch, Any]) -> None:
    model, batch, _ = exact
    assert relative_error(gradient(model, batch, CUTS), gradient(model, batch, (sum(CUTS),))) <= 1e-12


def test_means_of_the_parts_by_number_of_parts_give_another_gradient(
    exact: tuple[nn.Module, ClassifierBatch, Any],
) -> None:
    model, batch, _ = exact

    class Mutant:
        denominators = batch.denominators

        @staticmethod
        def losses(model: nn.Module, start: int, stop: int) -> Losses:
            total, own = batch.losses(model, start, stop)["classification"]
            return {"classification": (total / own * batch.denominators["classification"] / len(CUTS), own)}

    assert relative_error(gradient(model, Mutant(), CUTS), gradient(model, batch, (sum(CUTS),))) > 1e-3


def test_a_prior_of_each_part_is_another_gradient(exact: tuple[nn.Module, ClassifierBatch, Any]) -> None:
    model, batch, is_attack = exact

    class Mutant:
        denominators = batch.denominators

        @staticmethod
        def losses(model: nn.Module, start: int, stop: int) -> Losses:
            attacks = max(int(is_attack[start:stop].sum()), 1)
            offset = math.log(max(stop - start - attacks, 1) / attacks)
            own = ClassifierBatch(batch.rows, batch.gather, batch.weights, benign_offset=offset)
            return own.losses(model, start, stop)

    whole = gradient(model, batch, (sum(CUTS),))
    assert relative_error(gradient(model, Mutant(), CUTS), whole) > 1e-3


def learned_difference(benign: list[int], attacks: list[int], *, offset: float | None = None) -> Tensor:
    """Fits the logits of windows of two kinds under a prior; returns attack − benign."""
    prior = math.log(sum(benign) / sum(attacks)) if offset is None else offset
    logits = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([benign, attacks], dtype=torch.float64).T
    optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-15)

    def closure() -> Tensor:
        optimizer.zero_grad()
        shifted = logits + torch.tensor([prior, 0.0], dtype=torch.float64)
        loss: Tensor = -(counts * shifted.log_softmax(dim=1)).sum() / counts.sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return (logits[:, 1] - logits[:, 0]).detach()


def test_what_is_learned_does_not_depend_on_how_many_windows_are_benign() -> None:
    few, many = learned_difference([30, 10], [4, 36]), learned_difference([300, 100], [4, 36])
    likelihood_ratio = torch.tensor([0.1 / 0.75, 0.9 / 0.25], dtype=torch.float64).log()
    assert torch.allclose(few, likelihood_ratio, atol=1e-5)
    assert torch.allclose(many, likelihood_ratio, atol=1e-5)
    without = [learned_difference(benign, [4, 36], offset=0.0) for benign in ([30, 10], [300, 100])]
    assert torch.allclose(without[0] - without[1], torch.full((2,), math.log(10), dtype=torch.float64), atol=1e-4)


SETTINGS = ("--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5", "--size", "student", "--no-baselines")


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished autoencoder; the state is beside its runs."""
    folder = tmp_path_factory.mktemp("autoencoder")
    finish(folder, folder / "state", "--model", "vgae", *SETTINGS, "--epochs", "1", "--device", "cpu")
    (run,) = (folder / "runs").iterdir()
    return run


def curriculum_words(autoencoder: Path, *more: str) -> tuple[str, ...]:
    chosen = ("--model", "gat", "--mode", "curriculum", "--set", f"mode.autoencoder={autoencoder}")
    return (*chosen, *SETTINGS, "--epochs", "3", "--checkpoint-every", "4", *more)


@pytest.mark.slow
def test_a_curriculum_killed_in_any_epoch_ends_with_the_same_weights(tmp_path: Path, autoencoder: Path) -> None:
    state, whole, cut = autoencoder.parent.parent / "state", tmp_path / "whole", tmp_path / "cut"
    words = curriculum_words(autoencoder, "--device", "cpu", "--batch-size", "16")
    said = finish(whole, state, *words)
    assert "the ratio rises to that" in " ".join(said.split())
    finish_killed(cut, state, words, at=(4, 16, 32))
    assert_ends_like(only_run(cut), only_run(whole))


@pytest.mark.slow
def test_the_peak_of_a_curriculum_is_predicted(tmp_path: Path, autoencoder: Path) -> None:
    state = autoencoder.parent.parent / "state"
    finish(tmp_path, state, *curriculum_words(autoencoder, "--device", "sim:64MiB", "--find-batch-size", "max",
                                              "--min-steps-per-epoch", "12"))  # fmt: skip
    result = json.loads((only_run(tmp_path) / "result.json").read_text())
    assert result["peak_memory_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.03)
    assert result["ooms_rescued"] == 0
