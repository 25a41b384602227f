"""Which way of adding up losses holds: measured with a few samples, computed whole and in two parts."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from can_train.adapters.loss_ways import SAMPLES, SUM, Comparison, ComparisonResult, Items, Numbers, Rows, Way

LABELS = torch.tensor([[1, 2, 3, -100], [1, -100, -100, -100], [1, 2, -100, -100], [1, 2, 3, 1], [2, 2, -100, -100]])
X = torch.linspace(-1, 1, 5 * 4 * 3, dtype=torch.float64).view(5, 4, 3).sin()
WAYS = [SUM, Way("labels"), Way("labels", but_first=True), SAMPLES]


def token_losses(model: nn.Module, rows: Rows) -> Tensor:
    return F.cross_entropy(model(X[rows]).transpose(1, 2), LABELS[rows], reduction="none")


def mean_of_labels(model: nn.Module, rows: Rows) -> Tensor:
    return token_losses(model, rows).sum() / LABELS[rows].ne(-100).sum()


def mean_of_later_labels(model: nn.Module, rows: Rows) -> Tensor:
    return token_losses(model, rows)[:, 1:].sum() / LABELS[rows][:, 1:].ne(-100).sum()


def mean_of_samples(model: nn.Module, rows: Rows) -> Tensor:
    return token_losses(model, rows).sum(1).mean()


def share_of_a_sum(model: nn.Module, rows: Rows) -> Tensor:
    return token_losses(model, rows).sum() / 12


def in_batch_negatives(model: nn.Module, rows: Rows) -> Tensor:
    embedded = model(X[rows]).sum(1)
    return F.cross_entropy(embedded @ embedded.T, torch.arange(len(rows)))


def drawn(model: nn.Module, rows: Rows) -> Tensor:
    noisy = X[rows] + torch.randn(len(rows), 4, 3, dtype=torch.float64)
    return F.cross_entropy(model(noisy).transpose(1, 2), LABELS[rows], reduction="none").sum(1).mean()


def drawn_mean_of_labels(model: nn.Module, rows: Rows) -> Tensor:
    noise, step = torch.randn(len(rows), 4, 3, dtype=torch.float64), torch.randint(1, 4, (len(rows), 1, 1))
    losses = F.cross_entropy(model(X[rows] * step + noise).transpose(1, 2), LABELS[rows], reduction="none")
    return losses.sum() / LABELS[rows].ne(-100).sum()


def drawn_share_of_a_sum(model: nn.Module, rows: Rows) -> Tensor:
    return drawn_mean_of_labels(model, rows) * LABELS[rows].ne(-100).sum() / 12


def drawn_negatives(model: nn.Module, rows: Rows) -> Tensor:
    embedded = model(X[rows] + torch.randn(len(rows), 4, 3, dtype=torch.float64)).sum(1)
    return F.cross_entropy(embedded @ embedded.T, torch.arange(len(rows)))


def drawn_by_numpy(model: nn.Module, rows: Rows) -> Tensor:
    noise = torch.from_numpy(np.random.default_rng().standard_normal((len(rows), 4, 3)))
    return F.cross_entropy(model(X[rows] + noise).transpose(1, 2), LABELS[rows])


def masked(model: nn.Module, rows: Rows) -> Tensor:
    kept = torch.rand(len(rows), 4) < 0.3
    return (token_losses(model, rows) * kept).sum() / 12


def mean_of_masked(model: nn.Module, rows: Rows, share: float) -> Tensor:
    """The numbers decide what the loss is a mean over."""
    kept = torch.rand(len(rows), 4) < share
    return (token_losses(model, rows) * kept).sum() / kept.sum() + mean_of_samples(model, rows)


def drawn_for_each_label(model: nn.Module, rows: Rows) -> Tensor:
    """No size tells which numbers are a sample's."""
    noise = torch.randn(int(LABELS[rows].ne(-100).sum()), dtype=torch.float64)
    return (token_losses(model, rows)[LABELS[rows] != -100] * noise).sum() / 12


def dropped(model: nn.Module, rows: Rows) -> Tensor:
    return F.dropout(token_losses(model, rows).sum(1)).mean()


def result_of(
    loss_of: Callable[[Any, Rows], Tensor], model: nn.Module | None = None, **options: Any
) -> ComparisonResult:
    torch.manual_seed(0)
    model = model or nn.Linear(3, 4)
    model = model.double()

    def gradients(rows: Rows) -> Numbers:
        found = torch.autograd.grad(loss_of(model, rows), list(model.parameters()))
        return [one.numpy() for one in found]

    seed = torch.get_rng_state()
    comparison = Comparison(compute=gradients, seeded=lambda: torch.set_rng_state(seed), model=model, **options)
    items = Items({"labels": LABELS}, ["labels"], 5, shifts_labels=False)
    return comparison.result(items, WAYS, items.telling(5))


@pytest.mark.parametrize(
    ("loss_of", "way"),
    [
        (share_of_a_sum, WAYS[0]),
        (mean_of_labels, WAYS[1]),
        (mean_of_later_labels, WAYS[2]),
        (mean_of_samples, WAYS[3]),
        (dropped, WAYS[3]),
    ],
)
def test_the_way_that_holds_is_the_only_one(loss_of: Any, way: Way) -> None:
    assert result_of(loss_of).ways == (way,)


def test_samples_that_are_compared_with_each_other_hold_in_no_way() -> None:
    result = result_of(in_batch_negatives)
    assert result.is_known
    assert not result.ways
    assert not result.through
    assert result.difference > 0.1


@pytest.mark.parametrize(
    ("loss_of", "way"),
    [
        (drawn_share_of_a_sum, WAYS[0]),
        (drawn_mean_of_labels, WAYS[1]),
        (drawn, WAYS[3]),
        (masked, WAYS[0]),
        (drawn_for_each_label, WAYS[0]),
    ],
)
def test_a_sample_is_compared_with_the_numbers_that_it_has_in_the_whole_batch(loss_of: Any, way: Way) -> None:
    result = result_of(loss_of)
    assert result.ways == (way,)
    assert result.draws


def test_noise_hides_no_comparison_of_samples_with_each_other() -> None:
    result = result_of(drawn_negatives)
    assert result.is_known
    assert not result.ways
    assert result.difference > 0.1


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_mean_over_what_drawn_numbers_keep_holds_in_no_way(share: float) -> None:
    result = result_of(partial(mean_of_masked, share=share))
    assert result.is_known
    assert not result.ways


def test_a_loss_whose_numbers_cannot_be_repeated_is_not_known() -> None:
    result = result_of(drawn_by_numpy)
    assert not result.is_known
    assert result.draws


def test_a_gradient_that_is_nothing_but_round_off_holds_in_each_way() -> None:
    torch.manual_seed(1)
    student = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    teacher = copy.deepcopy(student)

    def kl(model: nn.Module, rows: Rows) -> Tensor:
        targets = teacher(X[rows]).detach().softmax(-1)
        return F.kl_div(model(X[rows]).log_softmax(-1), targets, reduction="batchmean")

    result = result_of(kl, student)
    assert result.ways == tuple(WAYS)
    assert result.difference == 0


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).flatten(0, 1)).view(len(x), 4, 4)


def test_batch_norm_is_named_where_it_is_the_only_reason() -> None:
    result = result_of(mean_of_samples, Wrapped(Normalised()))
    assert result.through == ("inner.norm",)
    assert result.ways == (SAMPLES,)
    assert not result_of(in_batch_negatives, Wrapped(Normalised())).ways


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(1))
        # The parameters of a layer that is left out have no gradient.
        inner.norm.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale

    def parameters(self, recurse: bool = True) -> Any:
        return (one for one in super().parameters(recurse) if one.requires_grad)


def test_a_step_in_single_precision_has_the_round_off_of_single_precision() -> None:
    def single(model: nn.Module, rows: Rows) -> Tensor:
        return token_losses(model, rows).float().sum(1).mean().double()

    assert result_of(single).ways == (SAMPLES,)


def test_losses_are_compared_more_strictly_than_gradients() -> None:
    items = Items({"labels": LABELS}, ["labels"], 5, shifts_labels=False)

    def almost(rows: Rows) -> Numbers:
        return [np.array([4.0 + 4e-5 * len(rows)])]

    ways = [SAMPLES]
    of_losses = Comparison(compute=almost, seeded=lambda: None, model=nn.Linear(1, 1), is_of_losses=True)
    assert not of_losses.result(items, ways, np.arange(5)).ways
    of_gradients = Comparison(compute=almost, seeded=lambda: None, model=nn.Linear(1, 1))
    assert of_gradients.result(items, ways, np.arange(5)).ways


def test_labels_are_counted_under_the_names_of_the_trainer_across_views() -> None:
    batch = {"target": torch.cat([LABELS, LABELS]), "labels": torch.zeros(5)}
    items = Items(batch, ["target", "labels"], 5, shifts_labels=False)
    assert items.means == [Way("target"), Way("target", but_first=True), SAMPLES]
    assert items.weight(items.means[0], slice(0, 2)) == pytest.approx(8 / 24)
    assert items.weight(items.means[1], slice(0, 2)) == pytest.approx(4 / 14)
    assert items.weight(SAMPLES, slice(0, 2)) == pytest.approx(2 / 5)


def test_samples_that_tell_the_ways_apart_have_few_and_many_labels() -> None:
    items = Items({"labels": LABELS}, ["labels"], 5, shifts_labels=False)
    assert items.telling(2).tolist() == [1, 3]
    assert items.telling(5).tolist() == [1, 2, 4, 0, 3]
    assert not items.agree(items.means, slice(0, 1))
    assert items.agree([SAMPLES, SAMPLES], slice(0, 1))


def test_a_part_without_labels_has_no_weight() -> None:
    labels = torch.tensor([[-100, -100], [1, 2]])
    items = Items({"labels": labels}, ["labels"], 2, shifts_labels=False)
    assert items.weight(Way("labels"), slice(0, 1)) == 0.0
    assert items.telling(2).tolist() == [0, 1]


def test_single_precision_on_a_gpu_may_have_the_round_off_of_tf32() -> None:
    items = Items({"labels": LABELS}, ["labels"], 5, shifts_labels=False)

    def rounded(rows: Rows) -> Numbers:
        return [np.array([1.0 + 1e-3 * len(rows)])]

    for is_on_gpu in (False, True):
        comparison = Comparison(compute=rounded, seeded=lambda: None, model=nn.Linear(1, 1), is_on_gpu=is_on_gpu)
        assert bool(comparison.result(items, [SAMPLES], np.arange(5)).ways) is is_on_gpu


def test_the_samples_that_are_compared_have_all_labels_of_the_batch() -> None:
    labels = torch.zeros(64, dtype=torch.long)
    labels[torch.tensor([20, 41, 63])] = torch.tensor([1, 2, 1])
    items = Items({"labels": labels}, ["labels"], 64, shifts_labels=False)
    for most in (3, 8, 64):
        rows = items.telling(most)
        assert len(set(rows.tolist())) == most
        # The first of two unequal parts has the rare ones.
        assert set(labels[rows[: max(most * 3 // 8, 2)]].tolist()) >= {1, 2}
    of_tokens = torch.zeros(64, 5, dtype=torch.long)
    of_tokens[40, 2] = 1
    items = Items({"labels": of_tokens}, ["labels"], 64, shifts_labels=False)
    assert 40 in items.telling(4)
