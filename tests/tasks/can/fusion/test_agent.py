"""The agent: its memory, rewards, choices and losses, and that it learns which score to trust."""

import io
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.fit.pass_state import Snapshot
from can_train_tasks.can.fusion.agent import (
    FusionAgent,
    MixingProblem,
    PolicyBatch,
    ReplayBatch,
    ReplayMemory,
    act,
    exploration,
    rewards,
)
from can_train_tasks.can.fusion.mixing import NO_WINDOW
from can_train_tasks.can.settings import FusionAgentSettings
from fakes.fusion_problems import WEIGHTS, WINDOWS, divided_problem, mean_reward, remember_at_random, small_agent
from fakes.split_gradients import gradient, relative_error

ROWS = np.arange(WINDOWS)


def same(agent: FusionAgent) -> bool:
    pairs = zip(agent.target.buffers(), agent.online.parameters(), strict=True)
    return all(torch.equal(buffer, parameter) for buffer, parameter in pairs)


def move(agent: FusionAgent) -> None:
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.01)


@pytest.mark.parametrize(
    ("hidden", "layers", "parameters"), [(160, 2, 30_421), (576, 3, 681_429)], ids=["student", "teacher"]
)
def test_the_two_sizes_are_those_that_users_know(hidden: int, layers: int, parameters: int) -> None:
    settings = FusionAgentSettings(hidden=hidden, layers=layers)
    agent = FusionAgent(settings, mixing_weights=WEIGHTS, replay_size=10)
    assert sum(parameter.numel() for parameter in agent.parameters()) == parameters
    assert agent(torch.zeros(5, 7)).shape == (5, WEIGHTS)


def test_the_target_network_begins_as_a_copy_with_weights_of_its_own() -> None:
    agent = small_agent()
    assert same(agent)
    move(agent)
    assert not same(agent)


@given(st.integers(1, 6), st.integers(1, 20))
def test_the_target_network_is_renewed_every_so_many_steps(every: int, steps: int) -> None:
    agent = small_agent(hidden=2)
    renewed = []
    for _ in range(steps):
        move(agent)
        agent.begin_step(every)
        renewed.append(same(agent))
    assert renewed == [step % every == 0 for step in range(steps)]


def test_what_a_step_did_to_memory_and_target_is_undone_with_it() -> None:
    problem, agent = divided_problem(), small_agent()
    remember_at_random(agent, problem, 30)
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    snapshot = Snapshot(agent, torch.device("cpu"))
    remember_at_random(agent, problem, 990, seed=1)
    for buffer in agent.target.buffers():
        buffer.add_(1.0)
    agent.begin_step(1)
    snapshot.restore()
    assert all(torch.equal(before[name], value) for name, value in agent.state_dict().items())


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_exploration_falls_from_its_start_to_its_end(progress: float, one: float, other: float) -> None:
    end, start = sorted((one, other))
    assert end - 1e-12 <= exploration(progress, start=start, end=end) <= start + 1e-12
    assert exploration(0.0, start=start, end=end) == start
    assert exploration(1.0, start=start, end=end) == pytest.approx(end)


def test_without_exploration_the_agent_chooses_what_it_values_most() -> None:
    problem, agent = divided_problem(), small_agent()
    chosen = act(agent, problem, ROWS, 0.0, np.random.default_rng(0))
    assert (chosen == agent.best_actions(problem.scores, ROWS)).all()


def test_exploring_all_the_time_it_chooses_every_weight_alike() -> None:
    rows = np.resize(ROWS, 21_000)
    chosen = act(small_agent(), divided_problem(), rows, 1.0, np.random.default_rng(0))
    counts = np.bincount(chosen, minlength=WEIGHTS)
    assert counts.min() > 800
    assert counts.max() < 1200


def test_the_share_of_random_choices_is_the_one_asked_for() -> None:
    problem, agent = divided_problem(), small_agent()
    rows = np.resize(ROWS, 20_000)
    chosen = act(agent, problem, rows, 0.4, np.random.default_rng(0))
    # A random choice is the valued one once in 21 times.
    agreed = float((chosen == agent.best_actions(problem.scores, rows)).mean())
    assert agreed == pytest.approx(0.6 + 0.4 / WEIGHTS, abs=0.02)


def trained(problem: MixingProblem, steps: int = 600, size: int = 64) -> FusionAgent:
    agent = small_agent(replay_size=5000)
    optimizer = torch.optim.AdamW(agent.parameters(), lr=1e-3)
    rng = np.random.default_rng(1)
    for step in range(steps):
        agent.begin_step(50)
        rows = rng.integers(len(problem.is_attack), size=size)
        epsilon = exploration(step / steps, start=0.9, end=0.2)
        agent.memory.push(rows, act(agent, problem, rows, epsilon, rng))
        batch = ReplayBatch.draw(problem, size, torch.Generator().manual_seed(step))
        total, denominator = batch.losses(agent, 0, size)["value"]
        optimizer.zero_grad()
        (total / denominator).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return agent


def test_an_agent_learns_which_score_to_believe_where_no_constant_mix_can() -> None:
    agent, unseen = trained(divided_problem()), divided_problem(seed=7)
    constant = max(mean_reward(unseen, ROWS, np.full(WINDOWS, action)) for action in range(WEIGHTS))
    learned = mean_reward(unseen, ROWS, agent.best_actions(unseen.scores, ROWS))
    everything_right = mean_reward(unseen, ROWS, np.where(unseen.scores.errors[:, 2] > 0.5, 0, WEIGHTS - 1))
    assert constant < 0.8
    assert learned > (constant + everything_right) / 2
    weights = unseen.weights[agent.best_actions(unseen.scores, ROWS)]
    autoencoder_knows = unseen.scores.errors[:, 2] > 0.5
    assert weights[autoencoder_knows].mean() < 0.4
    assert weights[~autoencoder_knows].mean() > 0.6


PUSHES = st.lists(st.integers(0, 30), max_size=8)


def filled(capacity: int, sizes: list[int]) -> tuple[ReplayMemory, list[int]]:
    """A memory into which windows 1, 2, … were pushed, each with three times its number; and all that were."""
    memory, pushed = ReplayMemory(capacity), []
    for size in sizes:
        rows = np.arange(len(pushed) + 1, len(pushed) + 1 + size)
        memory.push(rows, 3 * rows)
        pushed += rows.tolist()
    return memory, pushed


def everything(memory: ReplayMemory) -> list[int]:
    uniform = (np.arange(len(memory)) + 0.5) / max(len(memory), 1)
    rows, actions = memory.recall(uniform)
    assert (actions == 3 * rows).all()
    return sorted(rows.tolist())


@given(st.integers(1, 12), PUSHES)
def test_the_newest_choices_are_remembered_and_no_others(capacity: int, sizes: list[int]) -> None:
    memory, pushed = filled(capacity, sizes)
    assert len(memory) == min(capacity, len(pushed))
    if pushed:
        assert everything(memory) == pushed[-capacity:]


@given(st.integers(1, 12), PUSHES, st.lists(st.floats(0, 1, exclude_max=True), min_size=1))
def test_what_is_recalled_was_pushed(capacity: int, sizes: list[int], uniform: list[float]) -> None:
    memory, pushed = filled(capacity, sizes)
    rows, _ = memory.recall(np.array(uniform))
    assert set(rows.tolist()) <= (set(pushed) or {0})


def test_a_number_just_below_one_names_the_last_choice() -> None:
    memory, _ = filled(2**17 + 1, [2**17 + 1])
    rows, _ = memory.recall(np.array([np.nextafter(1.0, 0.0)]))
    assert rows.tolist() == [2**17 + 1]


def test_a_memory_goes_through_a_checkpoint() -> None:
    memory, _ = filled(5, [3, 4])
    buffer = io.BytesIO()
    torch.save(memory.state_dict(), buffer)
    buffer.seek(0)
    other = ReplayMemory(5)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for one in (memory, other):
        one.push(np.array([100, 101]), np.array([300, 303]))
    assert everything(other) == everything(memory) == [5, 6, 7, 100, 101]


SCORES = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=20)


@given(SCORES)
def test_right_is_worth_one_and_more_and_wrong_costs_one_and_more(scores: list[tuple[float, bool]]) -> None:
    fused, truth = np.array([score for score, _ in scores]), np.array([is_attack for _, is_attack in scores])
    earned = rewards(fused, truth)
    right = (fused > 0.5) == truth
    assert ((earned >= 1) == right).all()
    assert ((earned <= -1) == ~right).all()
    assert (np.abs(earned) <= 1.5).all()


@given(st.floats(1e-9, 0.5), st.floats(1e-9, 0.5), st.booleans(), st.booleans())
def test_confidence_raises_what_is_at_stake(one: float, other: float, above: bool, is_attack: bool) -> None:
    near, far = sorted((one, other))
    side = 1 if above else -1
    doubtful, firm = rewards(np.array([0.5 + side * near, 0.5 + side * far]), np.array([is_attack] * 2))
    assert abs(firm) >= abs(doubtful)
    assert np.sign(firm) == np.sign(doubtful)


@pytest.mark.parametrize(
    ("fused", "is_attack", "earned"),
    [(1.0, True, 1.5), (0.75, True, 1.25), (0.0, False, 1.5), (0.5, False, 1.0), (0.0, True, -1.3), (1.0, False, -1.3)],
)
def test_rewards_are_those_of_the_settings_table(fused: float, is_attack: bool, earned: float) -> None:
    assert rewards(np.array([fused]), np.array([is_attack])) == pytest.approx(earned)


SAMPLES = 40
CUTS = (3, 19, 1, 17)


def world() -> tuple[FusionAgent, MixingProblem, ReplayBatch]:
    """An agent whose target network is another one, so that what it says of next windows counts."""
    problem, agent = divided_problem(), small_agent().double()
    agent.target.load_state_dict(small_agent(seed=1).online.state_dict())
    remember_at_random(agent, problem, 500)
    return agent, problem, ReplayBatch.draw(problem, SAMPLES, torch.Generator().manual_seed(0))


def test_a_split_batch_has_the_gradient_of_the_whole() -> None:
    agent, _, batch = world()
    whole = gradient(agent, batch, (SAMPLES,))
    assert whole.norm() > 0
    assert relative_error(gradient(agent, batch, CUTS), whole) <= 1e-12


class PartMeans(ReplayBatch):
    """Mutant: each part is averaged by itself, and counts the same."""

    def losses(self, model: nn.Module, start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        total, own = super().losses(model, start, stop)["value"]
        return {"value": (total / own * self.denominators["value"] / len(CUTS), own)}


class DrawnAgain(ReplayBatch):
    """Mutant: each part draws choices of its own."""

    def losses(self, model: nn.Module, start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        again = ReplayBatch.draw(self.problem, stop - start, torch.Generator().manual_seed(stop - start))
        return again.losses(model, 0, stop - start)


class PushedBetween(ReplayBatch):
    """Mutant: something is remembered between the parts, so that the same share of the memory is another choice."""

    def losses(self, model: nn.Module, start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        assert isinstance(model, FusionAgent)
        remember_at_random(model, self.problem, 50, seed=start)
        return super().losses(model, start, stop)


@pytest.mark.parametrize("mutant", [PartMeans, DrawnAgain, PushedBetween])
def test_mutants_give_another_gradient(mutant: type[ReplayBatch]) -> None:
    agent, problem, batch = world()
    whole = gradient(agent, batch, (SAMPLES,))
    broken = mutant(problem=problem, uniform=batch.uniform)
    assert relative_error(gradient(agent, broken, CUTS), whole) > 1e-3


def test_denominators_are_the_sums_of_the_parts() -> None:
    agent, _, batch = world()
    parts = [batch.losses(agent, 0, 9), batch.losses(agent, 9, SAMPLES)]
    assert sum(part["value"][1] for part in parts) == batch.denominators["value"] == SAMPLES


def errors_one_by_one(agent: FusionAgent, problem: MixingProblem, batch: ReplayBatch) -> Tensor:
    """Each sample's error, by the textbook."""
    rows, actions = agent.memory.recall(batch.uniform)
    errors = []
    for row, action in zip(rows, actions, strict=True):
        like = next(agent.parameters())
        aim = torch.tensor(problem.rewards(np.array([row]), np.array([action]))[0])
        following = problem.following[row]
        if following != NO_WINDOW:
            aim = aim + problem.discount * agent.target(problem.states(np.array([following]), like)).max()
        value = agent.online(problem.states(np.array([row]), like))[0, action]
        errors.append(F.smooth_l1_loss(value, aim.detach()))
    return torch.stack(errors)


def test_a_choice_is_valued_by_its_reward_and_the_best_of_the_next_window() -> None:
    agent, problem, batch = world()
    # Some choices about windows that are followed by none.
    ends = np.flatnonzero(problem.following == NO_WINDOW)
    agent.memory.push(np.resize(ends, 500), np.arange(500) % 21)
    rows, _ = agent.memory.recall(batch.uniform)
    assert 0 < np.isin(rows, ends).sum() < len(rows)
    total, _ = batch.losses(agent, 0, SAMPLES)["value"]
    torch.testing.assert_close(total, errors_one_by_one(agent, problem, batch).sum())


def test_a_last_window_that_borrows_from_the_first_one_is_another_loss() -> None:
    agent, problem, batch = world()
    agent.memory.push(np.resize(np.flatnonzero(problem.following == NO_WINDOW), 1000), np.arange(1000) % 21)
    problem.following[problem.following == NO_WINDOW] = 0
    with_none = errors_one_by_one(agent, divided_problem(), batch).sum().detach()
    borrowed = batch.losses(agent, 0, SAMPLES)["value"][0].detach()
    assert abs(borrowed / with_none - 1) > 1e-3


def test_only_the_online_network_is_trained() -> None:
    agent, _, _ = world()
    assert {name.split(".")[0] for name, _ in agent.named_parameters()} == {"online"}
    assert not any(buffer.requires_grad for buffer in agent.buffers())


def test_a_memory_of_nothing_can_be_planned_with() -> None:
    problem, agent = divided_problem(), small_agent()
    batch = ReplayBatch.draw(problem, SAMPLES, torch.Generator().manual_seed(0))
    total, denominator = batch.losses(agent, 0, SAMPLES)["value"]
    total.backward()  # type: ignore[no-untyped-call]
    assert denominator == SAMPLES


def test_what_validation_minimises_is_the_reward_forgone() -> None:
    agent, problem, _ = world()
    rows = np.arange(100, 200)
    batch = PolicyBatch(problem=problem, rows=rows)
    parts: list[Mapping[str, tuple[Tensor, float]]] = [batch.losses(agent, 0, 30), batch.losses(agent, 30, 100)]
    loss = sum(float(part["value"][0]) for part in parts) / sum(part["value"][1] for part in parts)
    assert loss == pytest.approx(-mean_reward(problem, rows, agent.best_actions(problem.scores, rows)))
    assert batch.denominators == {"value": 100.0}
