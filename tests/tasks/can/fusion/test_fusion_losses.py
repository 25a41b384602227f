"""The agent's loss is a sum over remembered choices: cut anywhere, it gives the gradient of the whole logical batch."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.tasks.can.fusion.agent import FusionAgent, MixingProblem, PolicyBatch, ReplayBatch
from can_train.tasks.can.fusion.scores import NO_WINDOW
from fakes.mixing_worlds import divided_problem, mean_reward, remember_at_random, small_agent
from fakes.split_gradients import gradient, relative_error

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
    assert loss == pytest.approx(-mean_reward(problem, rows, problem.best_actions(agent, rows)))
    assert batch.denominators == {"value": 100.0}
