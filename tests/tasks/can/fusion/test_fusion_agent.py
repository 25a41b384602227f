"""The agent's networks, its choices, and that it learns which score to believe."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from can_train.fit.random_state import Snapshot
from can_train.tasks.can.fusion.agent import FusionAgent, MixingProblem, ReplayBatch, act, exploration
from can_train.tasks.can.settings import FusionAgentSettings
from fakes.mixing_worlds import WEIGHTS, WINDOWS, divided_problem, mean_reward, remember_at_random, small_agent

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
    assert (chosen == problem.best_actions(agent, ROWS)).all()


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
    agreed = float((chosen == problem.best_actions(agent, rows)).mean())
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
    learned = mean_reward(unseen, ROWS, unseen.best_actions(agent, ROWS))
    everything_right = mean_reward(unseen, ROWS, np.where(unseen.scores.errors[:, 2] > 0.5, 0, WEIGHTS - 1))
    assert constant < 0.8
    assert learned > (constant + everything_right) / 2
    weights = unseen.weights[unseen.best_actions(agent, ROWS)]
    autoencoder_knows = unseen.scores.errors[:, 2] > 0.5
    assert weights[autoencoder_knows].mean() < 0.4
    assert weights[~autoencoder_knows].mean() > 0.6
