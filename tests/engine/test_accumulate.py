"""Accumulated gradients are those of the whole batch; dividing them otherwise is not."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.engine.accumulate import Losses, accumulate_gradients

EXACT = 1e-12
"""Relative L2 error in float64 up to which gradients are the same."""

SIZES = (7, 22, 4, 17)
SAMPLES = sum(SIZES)


class Batch:
    """Samples with weights and different numbers of parts, as graphs have nodes: two terms, two denominators."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
        self.weight = torch.rand(SAMPLES, generator=generator, dtype=torch.float64) * 20
        self.parts = torch.randint(1, 50, (SAMPLES,), generator=generator)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.denominators = {"weighted": float(self.weight.sum()), "parts": float(self.parts.sum())}

    def losses(self, start: int, stop: int) -> Losses:
        part = slice(start, stop)
        out = self.model(self.x[part])
        weighted = (F.softplus(out[:, 0]) * self.weight[part]).sum()
        parts = (out[:, 1].square() * self.parts[part]).sum()
        own = (float(self.weight[part].sum()), float(self.parts[part].sum()))
        return {"weighted": (weighted, own[0]), "parts": (parts, own[1])}

    def gradient(self, sizes: Sequence[int], losses: Callable[[int, int], Losses] | None = None) -> Tensor:
        self.model.zero_grad()
        accumulate_gradients(losses or self.losses, sizes, self.denominators, {"weighted": 1.0, "parts": 0.1})
        return torch.cat(
            [parameter.grad.flatten() for parameter in self.model.parameters() if parameter.grad is not None]
        )


def relative_error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@given(st.lists(st.integers(1, SAMPLES), min_size=1, max_size=SAMPLES))
def test_any_split_has_the_gradient_of_the_whole_batch(sizes: list[int]) -> None:
    batch = Batch()
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    cut = [min(size, SAMPLES - start) for size, start in zip(sizes, starts, strict=True) if start < SAMPLES]
    cut += [SAMPLES - sum(cut)] if sum(cut) < SAMPLES else []
    assert relative_error(batch.gradient(cut), batch.gradient([SAMPLES])) <= EXACT


def divided_by_the_number_of_parts(batch: Batch) -> Callable[[int, int], Losses]:
    def losses(start: int, stop: int) -> Losses:
        terms = batch.losses(start, stop)
        return {
            term: (total / own * batch.denominators[term] / len(SIZES), own) for term, (total, own) in terms.items()
        }

    return losses


def weighted_by_samples(batch: Batch) -> Callable[[int, int], Losses]:
    def losses(start: int, stop: int) -> Losses:
        terms = batch.losses(start, stop)
        share = (stop - start) / SAMPLES
        return {term: (total / own * batch.denominators[term] * share, own) for term, (total, own) in terms.items()}

    return losses


@pytest.mark.parametrize("mutant", [divided_by_the_number_of_parts, weighted_by_samples])
def test_a_mean_of_the_parts_means_is_another_gradient(mutant: Callable[[Batch], Callable[[int, int], Losses]]) -> None:
    batch = Batch()
    assert relative_error(batch.gradient(SIZES, mutant(batch)), batch.gradient([SAMPLES])) > 1e-2


def test_the_means_returned_are_those_of_the_whole_batch() -> None:
    batch = Batch()
    weights = {"weighted": 1.0, "parts": 0.1}
    split = accumulate_gradients(batch.losses, SIZES, batch.denominators, weights)
    assert split == pytest.approx(accumulate_gradients(batch.losses, [SAMPLES], batch.denominators, weights))


def test_a_term_with_nothing_in_the_batch_adds_nothing() -> None:
    batch = Batch()

    def losses(start: int, stop: int) -> Losses:
        return batch.losses(start, stop) | {"absent": (batch.model[0].weight.sum() * 0, 0.0)}

    weights = {"weighted": 1.0, "parts": 0.1, "absent": 1.0}
    means = accumulate_gradients(losses, SIZES, batch.denominators | {"absent": 0.0}, weights)
    assert means["absent"] == 0.0


def test_the_scale_reaches_the_gradient() -> None:
    batch = Batch()
    plain = batch.gradient([SAMPLES])
    batch.model.zero_grad()
    weights = {"weighted": 1.0, "parts": 0.1}
    accumulate_gradients(batch.losses, SIZES, batch.denominators, weights, lambda loss: loss * 1024)
    scaled = torch.cat([p.grad.flatten() for p in batch.model.parameters() if p.grad is not None])
    assert relative_error(scaled / 1024, plain) <= EXACT
