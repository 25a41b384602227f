"""However a logical batch is cut, its gradient is the whole batch's; what would make it another one is shown to."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from can_train.errors import ArgumentError
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.packing import BatchCosts, SplitRules
from fakes.ragged import OBJECTIVES, Ragged, RaggedNet, cut_at

SAMPLES = 50
UNEVEN = (7, 22, 4, 1, 16)
CLIP_NORM = 0.01
EXACT = {torch.float64: 1e-12, torch.float32: 1e-6}

every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def net(dtype: torch.dtype = torch.float64) -> RaggedNet:
    torch.manual_seed(0)
    return RaggedNet().to(dtype)


def accumulate(model: RaggedNet, name: str, data: Ragged, sizes: Sequence[int]) -> tuple[int, ...]:
    """Adds the batch's gradient to the model's, in micro-batches of these sizes."""
    objective = OBJECTIVES[name]
    costs, rules = cut_at(sizes)
    batcher = MicroBatcher(model, rules=rules)
    result = batcher.run(
        lambda start, stop: objective.losses(model, data, start, stop), costs, denominators=objective.denominators(data)
    )
    return result.micro_batches


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def relative_error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def split_gradient(name: str, data: Ragged, sizes: Sequence[int]) -> Tensor:
    model = net(data.x.dtype)
    assert accumulate(model, name, data, sizes) == tuple(sizes)
    return gradient(model)


def mutant_gradient(name: str, data: Ragged, loss_of: Callable[[Losses, int], Tensor], **changed: Tensor) -> Tensor:
    """Accumulates with another rule; what the whole batch draws once is drawn again for each part where given."""
    model, start = net(data.x.dtype), 0
    for size in UNEVEN:
        for attribute, values in changed.items():
            setattr(data, attribute, values[torch.randperm(len(values))])
        loss_of(OBJECTIVES[name].losses(model, data, start, start + size), size).backward()
        start += size
    return gradient(model)


@every_objective
@pytest.mark.parametrize("dtype", EXACT, ids=["fp64", "fp32"])
def test_uneven_micro_batches_have_the_gradient_of_the_whole_batch(name: str, dtype: torch.dtype) -> None:
    data = Ragged.draw(SAMPLES, dtype)
    whole = split_gradient(name, data, (SAMPLES,))
    assert whole.norm() > 0
    assert relative_error(split_gradient(name, data, UNEVEN), whole) <= EXACT[dtype]


@every_objective
@settings(max_examples=15)  # for each objective
@given(stops=st.sets(st.integers(1, SAMPLES - 1)), seed=st.integers(0, 9))
def test_any_cut_has_the_gradient_of_the_whole_batch(name: str, stops: set[int], seed: int) -> None:
    data = Ragged.draw(SAMPLES, torch.float64, seed)
    edges = [0, *sorted(stops), SAMPLES]
    sizes = [b - a for a, b in pairwise(edges)]
    # Equal parts of equal cost are the solver's to cut; their sizes are its own.
    model = net()
    accumulate(model, name, data, sizes)
    assert relative_error(gradient(model), split_gradient(name, data, (SAMPLES,))) <= EXACT[torch.float64]


@every_objective
def test_means_divided_by_the_number_of_micro_batches_are_another_gradient(name: str) -> None:
    data = Ragged.draw(SAMPLES, torch.float64)

    def mean(losses: Losses, size: int) -> Tensor:
        return torch.stack([total / (own or 1) / len(UNEVEN) for total, own in losses.values()]).sum()

    assert relative_error(mutant_gradient(name, data, mean), split_gradient(name, data, (SAMPLES,))) > 1e-3


@pytest.mark.parametrize("name", ["node mean", "class-weighted mean", "masked mean", "token mean", "vgae"])
def test_means_weighted_by_samples_are_another_gradient(name: str) -> None:
    data = Ragged.draw(SAMPLES, torch.float64)

    def mean(losses: Losses, size: int) -> Tensor:
        return torch.stack([total / (own or 1) * size / SAMPLES for total, own in losses.values()]).sum()

    assert relative_error(mutant_gradient(name, data, mean), split_gradient(name, data, (SAMPLES,))) > 1e-3


@pytest.mark.parametrize(("name", "drawn"), [("vgae", "noise"), ("gradient penalty", "alpha")])
def test_randomness_drawn_again_for_each_micro_batch_is_another_gradient(name: str, drawn: str) -> None:
    data = Ragged.draw(SAMPLES, torch.float64)
    whole = split_gradient(name, data, (SAMPLES,))
    denominators = OBJECTIVES[name].denominators(data)

    def exact(losses: Losses, size: int) -> Tensor:
        return torch.stack([total / denominators[term] for term, (total, _) in losses.items()]).sum()

    assert relative_error(mutant_gradient(name, data, exact), whole) <= EXACT[torch.float64]
    assert relative_error(mutant_gradient(name, data, exact, **{drawn: getattr(data, drawn)}), whole) > 1e-3


STEPS = 15


def trained_weights(name: str, sizes: Sequence[int], *, clip_each: bool = False) -> Tensor:
    """Takes some steps; a part's gradient is clipped where the whole batch's should be, for the mutant."""
    model, data = net(), Ragged.draw(SAMPLES, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if clip_each:
            start = 0
            for size in sizes:
                (total, _) = OBJECTIVES[name].losses(model, data, start, start + size)["node"]
                (total / len(data.x)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
                start += size
        else:
            accumulate(model, name, data, sizes)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
    return weights(model)


@every_objective
def test_weights_after_many_steps_do_not_depend_on_the_micro_batches(name: str) -> None:
    whole = trained_weights(name, (SAMPLES,))
    assert relative_error(whole, weights(net())) > 1e-2
    assert relative_error(trained_weights(name, UNEVEN), whole) <= 1e-10


def test_clipping_every_micro_batch_leads_elsewhere() -> None:
    whole = trained_weights("node mean", (SAMPLES,))
    assert relative_error(trained_weights("node mean", UNEVEN, clip_each=True), whole) > 1e-3


def test_an_accumulated_gradient_adds_to_what_is_there() -> None:
    data, model = Ragged.draw(SAMPLES, torch.float64), net()
    accumulate(model, "node mean", data, UNEVEN)
    once = gradient(model).clone()
    accumulate(model, "node mean", data, UNEVEN)
    assert relative_error(gradient(model), 2 * once) <= 1e-12


def test_means_are_those_of_the_whole_batch_whatever_the_split() -> None:
    data, model, objective = Ragged.draw(SAMPLES, torch.float64), net(), OBJECTIVES["vgae"]
    results = []
    for sizes in ((SAMPLES,), UNEVEN):
        costs, rules = cut_at(sizes)
        batcher = MicroBatcher(model, rules=rules)
        results.append(
            batcher.run(
                lambda start, stop: objective.losses(model, data, start, stop),
                costs,
                denominators=objective.denominators(data),
            )
        )
    assert results[0].means == pytest.approx(results[1].means, rel=1e-12)
    assert results[0].loss == pytest.approx(sum(results[0].means.values()))


def linear_batch(denominator: float) -> tuple[MicroBatcher, Callable[[int, int], Losses]]:
    model = nn.Linear(2, 1)
    x = torch.ones(6, 2)
    batcher = MicroBatcher(model, rules=SplitRules(samples=4))
    return batcher, lambda start, stop: {"error": (model(x[start:stop]).square().sum(), denominator * (stop - start))}


def test_denominators_that_do_not_add_up_are_an_error() -> None:
    batcher, losses_of = linear_batch(2.0)
    with pytest.raises(ArgumentError, match="denominators of 'error' must add up to the whole batch's: 12 against 6"):
        batcher.run(losses_of, 6)


def test_a_sum_whose_denominator_is_zero_is_an_error_and_a_term_without_items_is_none() -> None:
    batcher, losses_of = linear_batch(0.0)
    with pytest.raises(ArgumentError, match=r"denominator is 0 .* sum 0: 'error' has the sum [\d.]+ in a batch of 6"):
        batcher.run(losses_of, 6, denominators={"error": 0.0})
    empty = batcher.run(lambda start, stop: {"error": (losses_of(start, stop)["error"][0] * 0, 0.0)}, 6,
                        denominators={"error": 0.0})  # fmt: skip
    assert empty.loss == 0.0


def test_a_negative_denominator_is_an_error() -> None:
    batcher, losses_of = linear_batch(-1.0)
    with pytest.raises(ArgumentError, match="denominator of a loss term must not be negative: 'error' has -6 in a bat"):
        batcher.run(losses_of, 6, denominators={"error": -6.0})


def test_weights_of_terms_scale_their_gradient() -> None:
    batcher, losses_of = linear_batch(1.0)
    batcher.run(losses_of, 6)
    once = gradient(batcher._model).clone()
    batcher._model.zero_grad()
    batcher.run(losses_of, 6, weights={"error": 3.0})
    assert relative_error(gradient(batcher._model), 3 * once) <= 1e-6


def test_a_part_in_which_nothing_counts_adds_nothing() -> None:
    model, x = nn.Linear(2, 1), torch.ones(6, 2)
    batcher = MicroBatcher(model, rules=SplitRules(samples=3))

    def losses_of(start: int, stop: int) -> Losses:
        counts = torch.arange(start, stop) < 3
        return {"error": ((model(x[start:stop]).squeeze(1).square() * counts).sum(), float(counts.sum()))}

    result = batcher.run(losses_of, BatchCosts.uniform(6), denominators={"error": 3.0})
    assert result.micro_batches == (3, 3)
    assert result.means["error"] == pytest.approx(model(x[:1]).detach().square().item())
