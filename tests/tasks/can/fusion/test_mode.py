"""The fusion mode as training sees it: what it asks of two finished models, what it refuses, and real runs, whole and
killed.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import FinishedModel, ResolvedRun
from can_train.errors import ConfigError, DataError, RunError
from can_train.reporter import SilentReporter
from can_train_tasks.can.fusion.agent import FinishedFusion, FusionAgent, FusionTask, PolicyBatch, ReplayBatch
from can_train_tasks.can.task import make_task
from fakes.bitwise import assert_ends_like
from fakes.killed_runs import finish, finish_killed, only_run
from fakes.random_bus import random_frames, write_log

CPU = torch.device("cpu")
WINDOW, WINDOWS = 20, 200
MADE_BY = {"autoencoder": "vgae", "classifier": "gat"}
UNITS, ANOMALY_THRESHOLD, ATTACK_THRESHOLD = [2.0, 4.0, 8.0, 1.0, 1.0], 1.5, -0.25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fusion")
    write_log(path / "drive.csv", random_frames(WINDOWS * WINDOW))
    return path


def run_of(folder: Path, model: str, **settings: Any) -> ResolvedRun:
    values = {"dataset.window": WINDOW, "dataset.stride": WINDOW, "mode.baselines": False}
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    return resolve(RunRequest(model=model, size="student", dataset=str(folder / "drive.csv"), values=values))


def finished_of(folder: Path, role: str) -> FinishedModel:
    """A model that knows nothing, with a result that says how it is to be read."""
    run = run_of(folder, MADE_BY[role])
    torch.manual_seed(0)
    model = make_task(run, {}, folder, folder / "cache", SilentReporter()).build_model()
    threshold = ANOMALY_THRESHOLD if role == "autoencoder" else ATTACK_THRESHOLD
    result = {"judgement": {"threshold": threshold, "error_units": UNITS}}
    return FinishedModel(run_id="untrained", run=run, weights=model.state_dict(), result=result, sha256="0")


def task_of(folder: Path, **settings: Any) -> Any:
    finished = {role: finished_of(folder, role) for role in MADE_BY}
    return make_task(run_of(folder, "fusion", **settings), finished, folder, folder / "cache", SilentReporter())


def tell(task: FusionTask, role: str, said: NDArray[np.float64]) -> None:
    """Has a model say something of every window of the data set."""
    output = {"autoencoder": "errors", "classifier": "score"}[role]
    task.bind_outputs(role, lambda rows: {output: torch.from_numpy(said[rows]).float()})


def told(folder: Path, **settings: Any) -> FusionTask:
    """A task to which both models have told what they really say."""
    task: FusionTask = task_of(folder, **settings)
    for reference_model in task.reference_models():
        with torch.no_grad():
            said = reference_model.outputs(reference_model.model, np.arange(WINDOWS), CPU, torch.float32)[
                reference_model.output
            ]
        tell(task, reference_model.role, said.double().numpy())
    return task


def choices(task: FusionTask, agent: FusionAgent, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        task.before_step(agent, task.train_rows[: 30 + step], step / steps, generator)


def test_what_the_models_say_is_read_by_their_own_units_and_thresholds(folder: Path) -> None:
    task = task_of(folder)
    tell(task, "autoencoder", np.tile([3.0, 6.0, 12.0, 0.0, 0.0], (WINDOWS, 1)))
    tell(task, "classifier", np.full((WINDOWS, 1), ATTACK_THRESHOLD))
    states = task._problem.scores.states(task.validation_rows)
    # Each term is 1.5 units, and so is the anomaly score: exactly its threshold.
    np.testing.assert_allclose(states, np.tile([0.5, 0.5, 0.0, 0.0, 0.6, 0.6, 0.6], (len(states), 1)), atol=1e-6)


def test_every_window_that_trains_validates_or_is_judged_is_asked_about(folder: Path) -> None:
    task = task_of(folder)
    asked: list[int] = []

    def answers(rows: NDArray[np.int64]) -> dict[str, Tensor]:
        asked.extend(rows.tolist())
        return {"errors": torch.ones(len(rows), 5)}

    task.bind_outputs("autoencoder", answers)
    split = task._data.split
    assert sorted(asked) == sorted([*split.train, *split.validation, *np.concatenate([*split.test.values()])])
    assert all(reference_model.placements == ("cache",) for reference_model in task.reference_models())


@pytest.mark.parametrize("role", MADE_BY)
def test_what_is_no_number_is_refused_with_its_run(folder: Path, role: str) -> None:
    task = task_of(folder)
    said = np.ones((WINDOWS, 5 if role == "autoencoder" else 1))
    said[task.train_rows[3], -1] = np.nan
    with pytest.raises(RunError, match=rf"score of the {role} must be a finite number: 1 of \d+ are not, by untrained"):
        tell(task, role, said)


def test_a_log_without_attacks_cannot_train_an_agent(folder: Path, tmp_path: Path) -> None:
    frames = random_frames(WINDOWS * WINDOW)
    write_log(tmp_path / "drive.csv", replace(frames, label=np.zeros_like(frames.label)))
    finished = {role: finished_of(folder, role) for role in MADE_BY}
    with pytest.raises(DataError, match="one-sided: no attack window"):
        make_task(run_of(tmp_path, "fusion"), finished, tmp_path, tmp_path / "cache", SilentReporter())


def test_an_agent_does_not_start_from_another_ones_memory(folder: Path) -> None:
    with pytest.raises(ConfigError, match="starts with a memory of its own"):
        task_of(folder, training__start_from="runs/other")


def test_the_preset_takes_small_batches_and_many_steps(folder: Path) -> None:
    run = run_of(folder, "fusion")
    assert (run.training.batch_size, run.training.epochs) == (64, 60)
    assert run_of(folder, "fusion", training__epochs=2).training.epochs == 2


def test_acting_fills_the_memory_alike_wherever_it_happens(folder: Path) -> None:
    task = told(folder)
    torch.manual_seed(0)
    one, other = task.build_model(), task.build_model()
    other.load_state_dict(one.state_dict())
    for agent in (one, other):
        choices(task, agent, 5)
    assert len(one.memory) == sum(range(30, 35))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert one.memory.rows[:30].tolist() == task.train_rows[:30].tolist()


def test_a_task_plans_before_anybody_has_said_anything(folder: Path) -> None:
    task = task_of(folder)
    agent = task.build_model()
    batch = task.logical_batch(task.train_rows[:8], CPU, torch.float32, torch.Generator().manual_seed(0))
    assert isinstance(batch, ReplayBatch)
    assert set(batch.losses(agent, 2, 5)) == set(task.loss_weights)
    assert task.batch_features(task.train_rows[:8]).tolist() == [[1.0]] * 8


def test_training_sees_memories_and_validation_windows(folder: Path) -> None:
    task = told(folder)
    agent = task.build_model()
    choices(task, agent, 3)
    validation = task.logical_batch(task.validation_rows, CPU, torch.float32, None)
    assert isinstance(validation, PolicyBatch)
    loss, count = validation.losses(agent, 0, len(task.validation_rows))["value"]
    assert -1.5 <= float(loss) / count <= 1.3


def test_what_comes_next_stays_within_the_training_windows(folder: Path) -> None:
    task = told(folder)
    following = task._problem.following
    assert set(following[following >= 0].tolist()) <= set(task.train_rows.tolist())
    assert (following[task.train_rows] >= 0).sum() > len(task.train_rows) / 2


def test_judging_never_looks_at_training_windows(folder: Path) -> None:
    task = told(folder)
    agent, asked = task.build_model().eval(), set[int]()

    def score(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        asked.update(rows.tolist())
        return task.scores(agent, rows, CPU, torch.float32).numpy()

    judgement = task.judge(score)
    assert not asked & set(task.train_rows.tolist())
    table, _ = task.tables(judgement)
    assert [row[0] for row in table.rows] == ["model", "autoencoder", "classifier", "even_mix", "best_mix"]
    for name, one in task.predictions(judgement, score).items():
        model, hits = judgement["test"][name]["model"], int((one.flagged & one.positive).sum())
        assert (len(one.score), hits / int(one.positive.sum())) == (model["windows"], model["recall"])


def test_a_finished_agent_scores_windows_as_it_did_in_training(folder: Path) -> None:
    task = told(folder)
    agent = task.build_model().eval()
    finished = FinishedModel(
        run_id="agent", run=run_of(folder, "fusion"), weights=agent.state_dict(), result={}, sha256="0"
    )
    fusion = FinishedFusion(finished, task._data.flat, {role: finished_of(folder, role) for role in MADE_BY})
    rows = task.validation_rows[::-1].copy()
    with torch.inference_mode():
        alone = fusion.scores(fusion.model, rows, CPU, torch.float32)
    torch.testing.assert_close(alone[:, :2], task.scores(agent, rows, CPU, torch.float32), rtol=1e-4, atol=1e-5)
    assert fusion.combine(alone.numpy(), rows).shape == (len(rows),)


DATA = ("--dataset", "synthetic", "--set", "dataset.synthetic.seconds=5", "--size", "student", "--no-baselines")
TRAINING = ("--epochs", "6", "--checkpoint-every", "3", "--set", "mode.target_every=7", "--set", "mode.replay_size=900")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two finished runs; the state is beside them."""
    folder = tmp_path_factory.mktemp("pair")
    for role, model in MADE_BY.items():
        finish(folder / role, folder / "state", "--model", model, *DATA, "--epochs", "1", "--device", "cpu")
    return {role: only_run(folder / role) for role in MADE_BY}


def state_of(pair: dict[str, Path]) -> Path:
    return pair["classifier"].parents[2] / "state"


def fusion(pair: dict[str, Path], *more: str) -> tuple[str, ...]:
    named = [word for role, path in pair.items() for word in ("--set", f"mode.{role}={path}")]
    return ("--model", "fusion", *named, *DATA, *TRAINING, *more)


@pytest.mark.slow
def test_a_fusion_killed_at_any_step_ends_with_the_same_weights_and_memory(
    tmp_path: Path, pair: dict[str, Path]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(whole, state_of(pair), *fusion(pair, "--device", "cpu"))
    finish_killed(cut, state_of(pair), fusion(pair, "--device", "cpu"), at=(3, 42))
    assert_ends_like(only_run(cut), only_run(whole))


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["64", "600"])
def test_the_peak_of_a_fusion_is_predicted(tmp_path: Path, pair: dict[str, Path], batch: str) -> None:
    """Of small batches too, where gradients and the optimizer decide it."""
    finish(tmp_path, state_of(pair), *fusion(pair, "--device", "sim:64MiB", "--batch-size", batch))
    result = json.loads((only_run(tmp_path) / "result.json").read_text())
    assert result["peak_memory_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.03)
    assert result["ooms_rescued"] == 0
