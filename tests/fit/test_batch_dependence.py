import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from can_train.errors import ArgumentError
from can_train.fit.batch_dependence import (
    SPLIT,
    BatchDependence,
    Comparisons,
    DrawnNumbers,
    NoDropout,
    draws_numbers,
    measure_batch_dependence,
)
from can_train.fit.micro_batcher import Losses, MicroBatcher
from can_train.fit.packing import SplitRules

SAMPLES = sum(SPLIT)
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
X = torch.randn(SAMPLES, 4, 6, generator=torch.Generator().manual_seed(0))


class Computes(nn.Module):
    """A linear layer, and something done with what it gives."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self._then = then

    def forward(self, x: Tensor) -> Tensor:
        return self._then(self.linear(x))


class Recurrent(nn.Module):
    """Two layers with dropout between them, on padded or on packed sequences."""

    def __init__(self, kind: Callable[..., nn.RNNBase], *, dropout: float, packed: bool) -> None:
        super().__init__()
        self.layers = kind(6, 5, num_layers=2, dropout=dropout, batch_first=True)
        self._packed = packed

    def forward(self, x: Tensor) -> Tensor:
        if not self._packed:
            return self.layers(x)[0]  # type: ignore[no-any-return]
        lengths = torch.full((len(x),), x.shape[1])
        return self.layers(pack_padded_sequence(x, lengths, batch_first=True))[0].data  # type: ignore[no-any-return]


class Attending(nn.Module):
    """Self-attention, as a layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]  # type: ignore[no-any-return]


def measured(model: nn.Module, *, half: bool = False) -> BatchDependence:
    """Of the mean square of what a model computes."""

    def losses(start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        return {"square": (model(X[start:stop]).square().sum(), float(stop - start))}

    return measure_batch_dependence(model, losses, {"square": float(SAMPLES)}, half=half)


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(24, 8), *layers, nn.Tanh(), nn.Linear(8, 2))


def test_independent_samples_have_no_batch_dependence() -> None:
    assert measured(mlp()) == BatchDependence(terms={}, modules=(), drops=False)
    assert measured(mlp(nn.LayerNorm(8), nn.Dropout(0.0))) == BatchDependence(terms={}, modules=(), drops=False)
    assert measured(nn.Sequential(nn.InstanceNorm1d(4), mlp())).terms == {}


def test_batch_normalisation_is_named() -> None:
    found = measured(mlp(nn.BatchNorm1d(8)))
    assert found.modules == ("2",)
    assert found.terms["square"] > 0.01
    assert found.sentences(split=False) == [
        (
            "Samples depend on the rest of their batch through 2: micro-batches change the gradient of "
            f"square by {found.terms['square']:.1%}"
        )
    ]
    (slight,) = replace(found, terms={"square": 8e-6}).sentences(split=False)
    assert slight.endswith("the gradient of square by less than 0.1%")
    (of_ranks,) = found.sentences(split=False, ranks=4)
    assert "micro-batches, and the shares of 4 processes, change the gradient of square" in of_ranks


def test_frozen_batch_normalisation_has_no_batch_dependence() -> None:
    assert measured(mlp(nn.BatchNorm1d(8).eval())) == BatchDependence(terms={}, modules=(), drops=False)
    assert measured(mlp(nn.BatchNorm1d(8).eval(), nn.BatchNorm1d(8))).modules == ("3",)


@pytest.mark.parametrize(
    "dependent",
    [lambda h: h - h.mean(dim=0), lambda h: h.softmax(dim=0), lambda h: h / (1 + h.norm()), lambda h: h * len(h)],
    ids=["mean", "softmax", "norm", "count"],
)
def test_the_batch_dependence_of_a_function_is_found_though_no_layer_can_be_named(
    dependent: Callable[[Tensor], Tensor],
) -> None:
    found = measured(Computes(dependent))
    assert found.terms["square"] > 0.01
    assert found.modules == ()


WIDE = torch.randn(SAMPLES, 1024, generator=torch.Generator().manual_seed(1))


class Large(nn.Module):
    """A model whose products are folded, and something done with features between them."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        # Widths that fold evenly and unevenly, and one that stays. With random weights, one feature sometimes says too
        # little.
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.before, self.after = nn.Linear(1024, 4500), nn.Linear(4500, 1300)
            self.last, self._then = nn.Linear(1300, 8), then

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.after(self._then(self.before(x)).tanh()).tanh())  # type: ignore[no-any-return]


def measured_large(model: nn.Module, loss: Callable[[Tensor], Tensor] = lambda y: y.square().sum()) -> BatchDependence:
    def losses(start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        return {"loss": (loss(model(WIDE[start:stop])), float(stop - start))}

    return measure_batch_dependence(model, losses, {"loss": float(SAMPLES)})


def in_last_feature(h: Tensor) -> Tensor:
    return torch.cat([h[:, :-1], h[:, -1:] - h[:, -1:].mean(dim=0)], dim=1)


def in_opposite_features(h: Tensor) -> Tensor:
    """Adds a mean of the batch to half of the features, and takes it from the others: sums over the groups that are
    folded, of 60 features, are as they were.
    """
    mean = h[:, :2250].mean(dim=0)
    return h + torch.cat([mean, -mean])


def across_samples(h: Tensor) -> Tensor:
    # With sharper attention each sample would attend to itself alone.
    return F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None], scale=1e-4)[0, 0]


def contrast(y: Tensor) -> Tensor:
    similar = F.normalize(y) @ F.normalize(y).T
    return F.cross_entropy(similar, torch.arange(len(y)), reduction="sum")


@pytest.mark.parametrize(
    "model",
    [
        Large(nn.BatchNorm1d(4500)),
        *map(Large, (lambda h: h.softmax(dim=0), across_samples, in_last_feature, in_opposite_features)),
    ],
    ids=["batch norm", "softmax", "attention", "one feature", "opposite features"],
)
def test_a_large_model_whose_products_are_folded_shows_its_batch_dependence(model: nn.Module) -> None:
    assert measured_large(model).terms["loss"] > 1e-3


@pytest.mark.parametrize("loss", [contrast, lambda y: (y - y.mean(dim=0)).square().sum(), lambda y: y.std(dim=0).sum()])
def test_a_loss_of_a_whole_batch_is_found_in_a_large_model(loss: Callable[[Tensor], Tensor]) -> None:
    assert measured_large(Large(torch.tanh), loss).terms["loss"] > 1e-3


def test_independent_samples_of_a_large_model_have_no_batch_dependence_and_a_mean_is_a_fault() -> None:
    model = Large(nn.LayerNorm(4500))
    assert measured_large(model) == BatchDependence(terms={}, modules=(), drops=False)
    assert measured_large(model, lambda y: y.square().mean()).faults["loss"].is_mean


def test_products_of_a_large_model_are_folded_and_of_a_small_one_computed() -> None:
    def products(model: nn.Module) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        for name, module in model.named_children():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(
                    lambda module, args, result, name=name: seen.update({name: result - args[0] @ module.weight.T})
                )
        measured_large(model)
        return {name: apart - module.bias for (name, apart), module in zip(seen.items(), model.children(), strict=False)
                if isinstance(module, nn.Linear)}  # fmt: skip

    large = products(Large(torch.tanh))
    small = products(nn.Sequential(nn.Linear(1024, 256), nn.Linear(256, 8)))
    assert large["before"].abs().max() > 0.1
    assert large["after"].abs().max() > 0.1
    # Few features, of few weights, stay.
    assert large["last"].abs().max() < 1e-4
    assert max(apart.abs().max() for apart in small.values()) < 1e-4


@pytest.mark.parametrize("rows", [(0, 1), (4, 7), (2, 5)], ids=["the first part", "the second part", "both parts"])
@pytest.mark.parametrize("known", [False, True])
def test_a_term_that_a_part_leaves_out_counts_as_nothing_there(rows: tuple[int, int], known: bool) -> None:
    model, has = nn.Linear(6, 1), torch.zeros(SAMPLES, dtype=torch.bool)
    has[slice(*rows)] = True

    def losses(start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        y, there = model(X[start:stop]), has[start:stop]
        terms = {"sum": (y.square().sum(), float(stop - start))}
        return {**terms, "some": (y[there].sum(), float(there.sum()))} if there.any() else terms

    found = measure_batch_dependence(model, losses, {"sum": SAMPLES, "some": float(has.sum())} if known else None)
    assert (dict(found.terms), dict(found.faults)) == ({}, {})


@pytest.mark.parametrize("known", [False, True])
def test_a_term_that_only_small_batches_have_is_no_error_by_itself(known: bool) -> None:
    model = nn.Linear(6, 1)

    def losses(start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        y = model(X[start:stop])
        terms = {"sum": (y.square().sum(), float(stop - start))}
        return terms if stop - start == SAMPLES else {**terms, "small": (y.sum(), float(stop - start))}

    found = measure_batch_dependence(model, losses, {"sum": SAMPLES} if known else None)
    assert "sum" not in found.terms


def test_the_mean_of_a_term_that_a_part_leaves_out_is_found() -> None:
    model = nn.Linear(6, 1)

    def losses(start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        y = model(X[start:stop])
        terms = {"sum": (y.square().sum(), float(stop - start))}
        return {**terms, "late": (y[1:].square().mean(), float(stop - start))} if stop > 3 else terms

    assert {*measure_batch_dependence(model, losses, None).terms} == {"late"}


def test_only_the_terms_with_a_batch_dependence_are_named() -> None:
    model = nn.Linear(6, 1)

    def losses(start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        y = model(X[start:stop])
        mean_of_means = y.square().mean() * 1.0
        spread = (y - y.mean(dim=0)).square().sum()
        return {"sum": (y.square().sum(), 4.0 * (stop - start)), "mean": (mean_of_means, 1.0), "spread": (spread, 1.0)}

    found = measure_batch_dependence(model, losses, {"sum": 4.0 * SAMPLES, "mean": 1.0, "spread": 1.0})
    assert set(found.terms) == {"spread"}
    assert set(found.faults) == {"mean"}


@pytest.mark.parametrize(
    "model",
    [
        mlp(nn.Dropout(0.5)),
        mlp(nn.Dropout(0.5, inplace=True)),
        mlp(nn.AlphaDropout(0.5)),
        nn.Sequential(nn.Dropout1d(0.5), mlp()),
        Computes(lambda h: F.dropout(h, 0.5)),
        Computes(lambda h: F.dropout(h, p=0.5, training=True)),
        Computes(lambda h: torch.dropout(h, 0.5, True)),
        Computes(lambda h: F.alpha_dropout(h, 0.5, training=True)),
        Computes(lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.5)),
        Computes(lambda h: F.scaled_dot_product_attention(h, h, h, None, 0.5)),
        Attending(0.5),
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True),
        *(Recurrent(kind, dropout=0.5, packed=packed) for kind in RECURRENT for packed in (False, True)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_dropout_is_seen_and_does_not_count_as_batch_dependence(model: nn.Module) -> None:
    found = measured(model)
    assert found == BatchDependence(terms={}, modules=(), drops=True)
    assert found.sentences(split=False) == []
    assert "Dropout draws other masks" in found.sentences(split=True)[0]
    assert "losses differ from those of one" in found.sentences(split=False, ranks=2)[0]


@pytest.mark.parametrize(
    "model",
    [
        mlp(nn.Dropout(0.5).eval()),
        Computes(lambda h: F.dropout(h, 0.5, training=False)),
        Computes(lambda h: F.alpha_dropout(h, 0.5)),
        Computes(lambda h: F.scaled_dot_product_attention(h, h, h)),
        Attending(0.0),
        Recurrent(nn.LSTM, dropout=0.0, packed=False),
    ],
    ids=lambda model: type(model).__name__,
)
def test_dropout_that_is_off_is_not_seen(model: nn.Module) -> None:
    assert not measured(model).drops


class Masked(nn.Module):
    """Masks samples as speech models of transformers do: with numbers of NumPy, unless its configuration says no."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.config = SimpleNamespace(apply_spec_augment=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.apply_spec_augment and self.training:
            x = x * torch.from_numpy(np.random.default_rng().random(len(x)) > 0.5)[:, None, None]
        return self.layers(x)


def test_masks_of_speech_models_are_dropout() -> None:
    model = Masked()
    assert measured(model) == BatchDependence(terms={}, modules=(), drops=True)
    assert model.config.apply_spec_augment
    model.config.apply_spec_augment = False
    assert measured(model) == BatchDependence(terms={}, modules=(), drops=False)
    assert not model.config.apply_spec_augment


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", RECURRENT)
def test_without_dropout_a_pass_is_what_it_is_without_it(kind: Callable[..., nn.RNNBase], packed: bool) -> None:
    torch.manual_seed(0)
    with_dropout = Recurrent(kind, dropout=0.5, packed=packed)
    without = Recurrent(kind, dropout=0.0, packed=packed)
    without.load_state_dict(with_dropout.state_dict())
    assert not torch.equal(with_dropout(X), without(X))
    with NoDropout(with_dropout):
        assert torch.equal(with_dropout(X), without(X))


def test_without_dropout_attention_is_what_it_is_without_it() -> None:
    with_dropout, without = Attending(0.5), Attending(0.0)
    without.load_state_dict(with_dropout.state_dict())
    assert not torch.allclose(with_dropout(X), without(X))
    with NoDropout(with_dropout):
        assert torch.allclose(with_dropout(X), without(X))


@pytest.mark.parametrize(
    "attend",
    [
        lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
        lambda q: F.scaled_dot_product_attention(q, q, q, None, 0.5),
    ],
    ids=["by name", "by position"],
)
def test_without_dropout_attention_as_a_function_is_what_it_is_without_it(attend: Callable[[Tensor], Tensor]) -> None:
    plain = F.scaled_dot_product_attention(X, X, X)
    assert not torch.allclose(attend(X), plain)
    with NoDropout(nn.Identity()):
        assert torch.allclose(attend(X), plain)


def test_half_precision_has_a_tolerance_of_its_own() -> None:
    slightly = Computes(lambda h: h * (1 + 0.001 * len(h)))
    assert measured(slightly).terms != {}
    assert measured(slightly, half=True).terms == {}


def test_a_model_is_left_bit_by_bit_as_it_was() -> None:
    torch.manual_seed(0)
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.RReLU())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = [*model.state_dict().values(), *(parameter.grad for parameter in model.parameters())]
    kept = [tensor.clone() for tensor in before if tensor is not None]
    state = torch.get_rng_state()
    measured(model)
    after = [*model.state_dict().values(), *(parameter.grad for parameter in model.parameters())]
    assert all(torch.equal(now, then) for now, then in zip(after, kept, strict=True) if now is not None)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_frozen_parameters_and_terms_without_gradient_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 1), nn.Linear(1, 1))

    def losses(start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        hidden = model[1](model[0](X[start:stop]))
        return {"square": (hidden.square().sum(), 1.0), "constant": (torch.ones(()), 0.0)}

    found = measure_batch_dependence(model, losses, {"square": 1.0, "constant": 0.0})
    assert found.terms == {}


def contrastive(model: nn.Module, start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
    """InfoNCE: each sample against the others of its micro-batch."""
    codes = F.normalize(model(X[start:stop]), dim=1)
    pairs = codes @ F.normalize(X[start:stop, 0, :2], dim=1).T
    return {"contrast": (F.cross_entropy(pairs / 0.1, torch.arange(stop - start), reduction="sum"), stop - start)}


class Sizes(SimpleQueue[int]):
    """Sizes of the parts that were computed, in comparisons, too: a list is put back after a comparison."""

    def all(self) -> list[int]:
        return [self.get() for _ in range(self.qsize())]


def squares(model: nn.Module, start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
    return {"square": (model(X[start:stop]).square().sum(), stop - start)}


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize(
    ("model", "losses", "term"),
    [(mlp(nn.BatchNorm1d(8)), squares, "square"), (mlp(), contrastive, "contrast")],
    ids=["BatchNorm", "InfoNCE"],
)
def test_the_first_batch_that_is_split_in_ones_own_loop_is_measured_and_warned_of(
    model: nn.Module, losses: Callable[..., Losses], term: str, size: int
) -> None:
    batcher = MicroBatcher(model, rules=SplitRules(samples=size))
    with pytest.warns(UserWarning, match=f"Samples depend on the rest of their batch.*gradient of {term} by [1-9]"):
        batcher.run(lambda start, stop: losses(model, start, stop), SAMPLES)
    assert batcher.batch_dependence is not None
    assert batcher.batch_dependence.terms[term] > 0.01
    batcher.run(lambda start, stop: losses(model, start, stop), SAMPLES)  # A second warning would be an error


def test_measuring_leaves_gradients_buffers_and_random_numbers_as_the_parts_left_them() -> None:
    found = []
    for compares in (True, False):
        torch.manual_seed(0)
        model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.5))
        batcher = MicroBatcher(model, rules=SplitRules(samples=3))
        batcher.compares = compares
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batcher.run(lambda start, stop, model=model: squares(model, start, stop), SAMPLES)
        found.append([*(one.grad for one in model.parameters()), *model.buffers(), torch.rand(3)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_nothing_is_measured_before_a_batch_is_split_and_nothing_said_where_samples_are_independent() -> None:
    model = mlp(nn.Dropout(0.5))
    batcher = MicroBatcher(model)
    batcher.run(lambda start, stop: squares(model, start, stop), SAMPLES)
    assert batcher.batch_dependence is None
    batcher.rules = SplitRules(samples=3)
    batcher.run(lambda start, stop: squares(model, start, stop), SAMPLES)
    assert batcher.batch_dependence == BatchDependence(terms={}, modules=(), drops=True)


def test_what_cannot_be_measured_is_said() -> None:
    model = mlp()

    def losses(start: int, stop: int) -> Losses:
        if stop - start > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return squares(model, start, stop)

    with pytest.warns(UserWarning, match="is not known"):
        MicroBatcher(model).run(losses, SAMPLES)


def test_the_comparison_takes_no_more_samples_than_have_fitted() -> None:
    model, sizes = mlp(nn.BatchNorm1d(8)), Sizes()

    def losses(start: int, stop: int) -> Losses:
        sizes.put(stop - start)
        if stop - start > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return squares(model, start, stop)

    with pytest.warns(UserWarning, match="Samples depend on the rest of their batch"):
        MicroBatcher(model).run(losses, 8)
    assert [size for size in sizes.all() if size > 4] == [8]


def test_the_whole_batch_is_compared_where_memory_never_ran_out() -> None:
    model, sizes = mlp(), Sizes()

    def losses(start: int, stop: int) -> Losses:
        sizes.put(stop - start)
        return squares(model, start, stop)

    MicroBatcher(model, limits=4).run(losses, 12)
    assert 12 in sizes.all()


TOKENS = torch.tensor([1.0, 3.0, 2.0, 0.0, 3.0, 1.0, 1.0, 2.0])


class Noisy(nn.Module):
    """Adds noise, as a variational autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + torch.randn_like(x))  # type: ignore[no-any-return]


def mean(model: nn.Module, start: int, stop: int) -> Tensor:
    return model(X[start:stop]).square().mean()  # type: ignore[no-any-return]


def over_tokens(model: nn.Module, start: int, stop: int) -> tuple[Tensor, float]:
    """The sum over samples of different lengths, of which one has nothing but padding, and their number of tokens."""
    there = (torch.arange(4) < TOKENS[start:stop, None]).float()
    each = torch.stack([model(X[start:stop] * (1 + step)).square().sum(1) for step in range(4)], dim=1)
    return (each * there).sum(), float(there.sum())


def penalty(model: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


WRONG: dict[str, Callable[[nn.Module, int, int], Losses]] = {
    "mean, n": lambda model, start, stop: {"a": (mean(model, start, stop), stop - start)},
    "mean, 1": lambda model, start, stop: {"a": (mean(model, start, stop), 1)},
    "mean of tokens, n": lambda model, start, stop: {
        "a": ((total := over_tokens(model, start, stop))[0] / total[1], total[1])
    },
    "mean of tokens, 1": lambda model, start, stop: {
        "a": ((total := over_tokens(model, start, stop))[0] / total[1], 1)
    },
    "mean of tokens, samples": lambda model, start, stop: {
        "a": ((total := over_tokens(model, start, stop))[0] / total[1], stop - start)
    },
    "sum, 1": lambda model, start, stop: {"a": (model(X[start:stop]).square().sum(), 1)},
    "second of two": lambda model, start, stop: {
        **squares(model, start, stop), "a": (mean(model, start, stop), stop - start)
    },
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: mlp(nn.Dropout(0.5)),
    "BatchNorm": lambda: mlp(nn.BatchNorm1d(8)),
    "noise": Noisy,
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_term_that_is_no_sum_with_its_count_is_a_fault_and_no_batch_dependence(wrong: str, model: str) -> None:
    torch.manual_seed(0)
    made = MODELS[model]()
    found = measure_batch_dependence(made, lambda start, stop: WRONG[wrong](made, start, stop), None)
    assert set(found.faults) == {"a"}
    assert "a" not in found.terms
    assert found.faults["a"].is_mean == (wrong != "sum, 1")


def contrastive_of_all(model: nn.Module, start: int, stop: int) -> Losses:
    total, count = contrastive(model, start, stop)["contrast"]
    return {"contrast": (total / count, 1)}


RIGHT: dict[str, Callable[[nn.Module, int, int], Losses]] = {
    "sum": squares,
    "constant": lambda model, start, stop: {
        "a": ((model(X[start:stop]) - model(X[start:stop]).detach() + 1).sum(), 2 * (stop - start))
    },
    "tokens": lambda model, start, stop: {"a": over_tokens(model, start, stop)},
    "mean times n": lambda model, start, stop: {"a": (mean(model, start, stop) * (stop - start), stop - start)},
    "penalty": lambda model, start, stop: {**squares(model, start, stop), "size": (penalty(model), 1)},
    "number to show": lambda model, start, stop: {**squares(model, start, stop), "rate": (torch.tensor(0.1), 1)},
    "of the whole batch": contrastive_of_all,
    "of the whole batch, n": contrastive,
    "nothing": lambda model, start, stop: {"a": (0.0 * model(X[start:stop]).sum(), 0)},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("right", RIGHT)
def test_no_sum_with_its_count_and_no_loss_of_a_whole_batch_is_a_fault(right: str, model: str) -> None:
    torch.manual_seed(0)
    made = MODELS[model]()
    found = measure_batch_dependence(made, lambda start, stop: RIGHT[right](made, start, stop), None)
    assert found.faults == {}
    assert found.trains
    if "whole" in right:
        assert found.terms["contrast"] > 0.01
    elif model == "plain":
        assert found.terms == {}


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: model(x).detach().square().sum(),
        lambda model, x: (model(x) > 0).float().sum(),
        lambda model, x: x.clone().requires_grad_().sum(),
    ],
    ids=["detached", "compared", "of something else"],
)
def test_a_loss_without_a_gradient_of_any_parameter_is_seen(loss: Callable[..., Tensor]) -> None:
    model = mlp()
    found = measure_batch_dependence(model, lambda start, stop: {"a": (loss(model, X[start:stop]), stop - start)}, None)
    assert not found.trains


def test_the_gradient_of_a_reentrant_checkpoint_is_seen() -> None:
    model, x = mlp(nn.BatchNorm1d(8)), X.clone().requires_grad_()

    def losses(start: int, stop: int) -> Losses:
        return {"square": (checkpoint(model, x[start:stop], use_reentrant=True).square().sum(), stop - start)}

    assert measure_batch_dependence(model, losses, None).terms["square"] > 0.01


def test_the_rounding_of_a_loss_in_half_precision_is_no_dependence() -> None:
    model = mlp(nn.LayerNorm(8))

    def losses(start: int, stop: int) -> Losses:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return squares(model, start, stop)

    batcher = MicroBatcher(model, rules=SplitRules(samples=3))
    batcher.run(losses, SAMPLES)
    assert batcher.batch_dependence == BatchDependence(terms={}, modules=(), drops=False)


def test_a_hook_that_steps_in_each_backward_pass_is_refused() -> None:
    model = mlp()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ArgumentError, match=r"a hook of 1\.weight"):
        MicroBatcher(model)


@pytest.mark.parametrize("draws", [False, True])
def test_buffers_that_a_pass_moves_are_no_random_numbers(draws: bool) -> None:
    model = mlp()
    model.register_buffer("centers", torch.zeros(2))

    def losses_of(start: int, stop: int) -> Losses:
        out = model(torch.ones(stop - start, 24))
        noise = torch.randn(()) if draws else 1.0
        loss = noise * (out - model.centers).square().sum()
        model.centers += 0.5
        return {"loss": (loss, float(stop - start))}

    assert draws_numbers(model, losses_of, 6) == draws
    assert not model.centers.any()


def test_batches_are_compared_ever_less_often_and_anew_for_another_kind_and_a_new_term() -> None:
    comparisons = Comparisons()
    assert [number for number in range(1, 70) if comparisons.is_due("a", ["one"])] == [1, 2, 4, 8, 16, 32, 64]
    assert comparisons.is_due("a", ["one", "two"])
    assert not comparisons.is_due("a", ["two"])
    assert [number for number in range(1, 5) if comparisons.is_due("b", ["two"])] == [1, 2, 4]


def test_a_loop_whose_batches_are_all_of_other_kinds_compares_few_of_them() -> None:
    comparisons = Comparisons()
    assert sum(comparisons.is_due(kind, ["one"]) for kind in range(1000)) < 30


ROWS = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def nce(z: Tensor) -> Tensor:
    rows = F.normalize(z)
    return F.cross_entropy(5 * rows @ rows.T, torch.arange(len(z)), reduction="sum")


def after_batches(batcher: MicroBatcher, losses: Callable[[int, int], Losses], number: int) -> None:
    for _ in range(number):
        batcher.run(losses, len(ROWS))


def test_a_batch_norm_that_is_thawed_later_is_told() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    model[:2].requires_grad_(False)
    model[1].eval()
    batcher = MicroBatcher(model, limits=7)

    def losses(start: int, stop: int) -> Losses:
        return {"loss": (model(ROWS[start:stop]).square().sum(), stop - start)}

    after_batches(batcher, losses, 4)
    assert batcher.batch_dependence == BatchDependence(terms={}, modules=(), drops=False)
    model[1].train()
    with pytest.warns(UserWarning, match="depend on the rest of their batch through 1: .* of loss by [1-9]") as told:
        batcher.run(losses, len(ROWS))
    assert told[0].filename == __file__
    assert batcher.batch_dependence is not None
    assert batcher.batch_dependence.terms["loss"] > 0.01
    model[0].requires_grad_(True)
    after_batches(batcher, losses, 5)  # A second warning would be an error


@pytest.mark.parametrize("batches", [1, 4])
def test_terms_that_begin_later_are_compared_as_they_begin(batches: int) -> None:
    model, late = nn.Linear(6, 4).double(), set[str]()
    batcher = MicroBatcher(model, limits=7)

    def losses(start: int, stop: int) -> Losses:
        z = model(ROWS[start:stop])
        every = {"rec": z.square().sum(), "nce": nce(z), "mean": z.abs().mean()}
        return {term: (total, stop - start) for term, total in every.items() if term == "rec" or term in late}

    after_batches(batcher, losses, batches)
    late.add("nce")
    with pytest.warns(UserWarning, match="micro-batches change the gradient of nce by [1-9]"):
        batcher.run(losses, len(ROWS))
    late.add("mean")
    # A loop is not ended for it after hours.
    with pytest.warns(UserWarning, match=r"'mean' is a mean, .* of a part as of the whole batch"):
        batcher.run(losses, len(ROWS))
    assert [*batcher.batch_dependence.faults] == ["mean"]
    after_batches(batcher, losses, 5)  # A second warning would be an error


def test_a_mean_over_samples_that_the_first_batch_lacks_is_found_in_a_later_one() -> None:
    model, weights = nn.Linear(6, 2).double(), torch.tensor([1.0, 20.0], dtype=torch.float64)
    batcher = MicroBatcher(model, limits=7)

    def losses(start: int, stop: int) -> Losses:
        loss = F.cross_entropy(model(ROWS[start:stop]), labels[start:stop], weight=weights)
        return {"loss": (loss * (stop - start), stop - start)}

    labels = torch.zeros(len(ROWS), dtype=torch.int64)
    batcher.run(losses, len(ROWS))
    labels[5] = 1
    with pytest.warns(UserWarning, match="micro-batches change the gradient of loss by [1-9]"):
        batcher.run(losses, len(ROWS))


def test_the_gradient_of_a_head_outside_the_model_is_compared() -> None:
    model, head = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
    batcher = MicroBatcher(model, limits=7)

    def losses(start: int, stop: int) -> Losses:
        z = model(ROWS[start:stop])
        return {"rec": (z.square().sum(), stop - start), "nce": (nce(head(z.detach())), stop - start)}

    with pytest.warns(UserWarning, match="micro-batches change the gradient of nce by [1-9]"):
        batcher.run(losses, len(ROWS))


def test_inputs_that_each_pass_asks_for_a_gradient_are_not_compared() -> None:
    model = nn.Linear(6, 1).double()
    batcher = MicroBatcher(model, limits=7)

    def losses(start: int, stop: int) -> Losses:
        x = ROWS[start:stop].clone().requires_grad_()
        return {"loss": (model(x).square().sum(), stop - start)}

    batcher.run(losses, len(ROWS))
    assert batcher.batch_dependence == BatchDependence(terms={}, modules=(), drops=False)


def test_a_head_is_compared_though_the_model_is_frozen() -> None:
    model, head = nn.Linear(6, 8).double().requires_grad_(False), nn.Linear(8, 4).double()
    batcher = MicroBatcher(model, limits=7)
    with pytest.warns(UserWarning, match="micro-batches change the gradient of nce by [1-9]"):
        batcher.run(lambda i, j: {"nce": (nce(head(model(ROWS[i:j]))), j - i)}, len(ROWS))


def test_the_rounding_of_gradients_that_cancel_each_other_is_no_dependence() -> None:
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    y = torch.randn(24, 1, generator=torch.Generator().manual_seed(2))
    model = nn.Linear(6, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x.double(), y.double()).solution.T)
    batcher = MicroBatcher(model, limits=7)
    batcher.run(lambda i, j: {"loss": ((model(x[i:j]) - y[i:j]).square().sum(), j - i)}, 24)
    assert batcher.batch_dependence == BatchDependence(terms={}, modules=(), drops=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(2))
def test_a_gradient_that_is_nothing_but_round_off_shows_no_dependence(dtype: torch.dtype, seed: int) -> None:
    """The student of a distillation is its teacher at first."""
    torch.manual_seed(seed)
    student = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)).to(dtype)
    teacher, x = copy.deepcopy(student), torch.randn(200, 16, dtype=dtype)

    def losses(i: int, j: int) -> dict[str, tuple[Tensor, int]]:
        outputs, targets = student(x[i:j]).log_softmax(-1), teacher(x[i:j]).detach().softmax(-1)
        near = outputs - teacher(x[i:j]).detach().log_softmax(-1)
        return {
            "kl": (F.kl_div(outputs, targets, reduction="sum"), j - i),
            "square": (near.square().sum(), j - i),
            "cross": (1e-6 * F.nll_loss(outputs, x[i:j].argmax(-1) % 8, reduction="sum"), j - i),
        }

    before = [parameter.detach().clone() for parameter in student.parameters()]
    versions = [parameter._version for parameter in student.parameters()]
    batcher = MicroBatcher(student, limits=120)
    batcher.run(losses, 200)
    assert batcher.batch_dependence == BatchDependence(terms={}, modules=(), drops=False)
    assert all(map(torch.equal, before, student.parameters()))
    assert versions == [parameter._version for parameter in student.parameters()]


def test_a_small_gradient_that_depends_on_its_batch_is_found() -> None:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    teacher, x = copy.deepcopy(student), torch.randn(64, 6, dtype=torch.float64)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1 + 1e-9)

    def losses(i: int, j: int) -> dict[str, tuple[Tensor, int]]:
        near = student(x[i:j]) - teacher(x[i:j]).detach()
        return {"apart": ((near - near.mean(0)).square().sum(), j - i)}

    batcher = MicroBatcher(student, limits=40)
    with pytest.warns(UserWarning, match="Samples depend on the rest of their batch"):
        batcher.run(losses, 64)
    assert batcher.batch_dependence is not None
    assert batcher.batch_dependence.terms["apart"] > 0.01


def test_a_dependence_of_weights_in_bfloat16_is_no_round_off() -> None:
    """Another last place moves the gradient of twelve layers by a fifth."""
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU())]
    model, x = nn.Sequential(*layers, nn.Linear(64, 8)).bfloat16(), torch.randn(8, 64).bfloat16()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_normal_(parameter)

    def losses(i: int, j: int) -> dict[str, tuple[Tensor, int]]:
        outputs = model(x[i:j]).float()
        total = F.cross_entropy(outputs, torch.arange(i, j), reduction="sum")
        return {"spread": (total + 0.3 * (j - i) * (1 - outputs.std(0)).relu().sum(), j - i)}

    assert measure_batch_dependence(model, losses, None).terms["spread"] > 0.1


def test_noise_that_cannot_be_repeated_is_no_round_off() -> None:
    model, x = nn.Linear(6, 3).double(), torch.randn(24, 6, dtype=torch.float64)

    def losses(i: int, j: int) -> dict[str, tuple[Tensor, int]]:
        noise = torch.from_numpy(np.random.default_rng().standard_normal((j - i, 6)))
        return {"noisy": (model(x[i:j] + noise).square().sum(), j - i)}

    batcher = MicroBatcher(model, limits=7)
    with pytest.warns(UserWarning, match="Samples depend on the rest of their batch"):
        batcher.run(losses, 24)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [(lambda n: (n, 3), 0), (lambda n: (4 * n,), 0), (lambda n: (2, n), 1)],
    ids=["rows", "flat", "last"],
)
def test_a_part_has_the_numbers_of_its_samples(shape: Callable[[int], tuple[int, ...]], dim: int) -> None:
    numbers, drawn, shared = DrawnNumbers(5), list[Tensor](), list[Tensor]()
    with NoDropout(nn.Identity(), numbers):
        for start, stop in ((0, 5), (0, 2), (2, 5)):
            numbers.begin(start, stop)
            drawn.append(torch.rand(shape(stop - start)))
            shared.append(torch.randn(3))
    whole, *parts = drawn
    assert not numbers.fall_back()
    assert torch.equal(torch.cat(parts, dim), whole)
    assert torch.equal(shared[0], shared[2])


def test_padding_that_a_part_lacks_has_no_numbers() -> None:
    numbers = DrawnNumbers(5)
    with NoDropout(nn.Identity(), numbers):
        numbers.begin(0, 5)
        whole = torch.rand(5, 7)
        numbers.begin(2, 5)
        assert torch.equal(torch.rand(3, 4), whole[2:, :4])


def test_where_sizes_do_not_tell_the_numbers_of_a_part_all_are_a_constant() -> None:
    numbers = DrawnNumbers(5)
    with NoDropout(nn.Identity(), numbers):
        numbers.begin(0, 5)
        torch.rand(7)
        numbers.begin(0, 2)
        torch.rand(3)
        assert numbers.fall_back()
        assert not numbers.fall_back()
        numbers.begin(0, 5)
        assert torch.rand(7).unique().numel() == 1


class Meter:
    """Keeps a mean, as meters in training scripts do."""

    def __init__(self) -> None:
        self.total, self.count, self.each = 0.0, 0, list[float]()

    def update(self, value: float, samples: int) -> None:
        self.total, self.count = self.total + value, self.count + samples
        self.each.append(value)


def test_a_comparison_leaves_no_trace_in_objects_that_the_loss_updates() -> None:
    model, outside = nn.Linear(6, 3).double(), nn.Sequential(nn.BatchNorm1d(6)).double()
    batcher = MicroBatcher(model, limits=12)
    metric = pytest.importorskip("torchmetrics").MeanMetric()
    meter, rows, table = Meter(), 0, np.zeros(3)
    generator = torch.Generator().manual_seed(3)

    def losses(start: int, stop: int) -> Losses:
        nonlocal rows
        rows += stop - start
        table[0] += stop - start
        torch.rand((), generator=generator)
        each = model(outside(ROWS[start:stop])).square().sum(1)
        metric.update(each.detach())
        meter.update(float(each.detach().sum()), stop - start)
        return {"loss": (each.sum(), stop - start)}

    with pytest.warns(UserWarning, match="depend on the rest"):
        batcher.run(losses, len(ROWS))
    assert outside[0].num_batches_tracked == 2
    assert (rows, int(metric.weight), meter.count, len(meter.each), table[0]) == (24, 24, 24, 2, 24)
    assert torch.rand((), generator=generator) == torch.rand(3, generator=torch.Generator().manual_seed(3))[2]


def test_a_loss_whose_state_cannot_all_be_put_back_is_compared_once() -> None:
    model, numbers = nn.Linear(6, 1).double(), itertools.count()

    def losses(start: int, stop: int) -> Losses:
        next(numbers)
        return {"loss": (model(ROWS[start:stop]).square().sum(), stop - start)}

    batcher = MicroBatcher(model, limits=12)
    for _ in range(9):
        batcher.run(losses, len(ROWS))
    assert next(numbers) == 2 * 9 + 3


def test_a_small_loss_in_half_precision_is_compared_as_its_scaler_scales_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    points, classes, scaler = torch.randn(64, 16), torch.randint(3, (64,)), torch.amp.GradScaler("cpu")

    def losses(start: int, stop: int) -> Losses:
        with torch.autocast("cpu", dtype=torch.float16):
            made = model(points[start:stop])
        loss = F.cross_entropy(made.float(), classes[start:stop], reduction="sum")
        return {"loss": (1e-5 * loss, stop - start)}

    batcher = MicroBatcher(model, limits=24)
    batcher.run(losses, len(points), scale=scaler.scale)  # A warning would be an error
    assert batcher.batch_dependence == BatchDependence(terms={}, modules=(), drops=False)


def test_a_mean_is_found_though_the_scale_is_too_large_at_first() -> None:
    model = nn.Linear(6, 1)
    rows = ROWS.float()
    with pytest.raises(ArgumentError, match="The sum of 'loss' is a mean"):
        MicroBatcher(model, limits=12).run(
            lambda i, j: {"loss": (model(rows[i:j]).square().mean(), j - i)},
            len(rows),
            scale=lambda loss: loss * 2.0**126 * 2.0**10,
        )


def test_a_loss_that_moves_trained_weights_is_compared_once_and_told() -> None:
    model, numbers = nn.Linear(6, 1, bias=False).double(), Sizes()

    def losses(start: int, stop: int) -> Losses:
        numbers.put(stop - start)
        with torch.no_grad():
            model.weight.clamp_(-1, 1)
        return {"loss": (model(ROWS[start:stop]).square().sum(), stop - start)}

    batcher = MicroBatcher(model, limits=12)
    with pytest.warns(UserWarning, match="changes trained weights .* no further batch is compared") as told:
        batcher.run(losses, len(ROWS))
    assert told[0].filename == __file__
    batcher.run(losses, len(ROWS))  # A second warning would be an error
    assert len(numbers.all()) == 2 + 3 + 2


def test_a_comparison_compiles_nothing() -> None:
    model, shapes = nn.Linear(6, 2).double(), list[int]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        shapes.append(len(inputs))
        return graph.forward

    compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    batcher = MicroBatcher(model, limits=12)
    batcher.run(lambda i, j: {"loss": (compiled(ROWS[i:j]).square().sum(), j - i)}, len(ROWS))
    assert batcher.batch_dependence is not None
    assert batcher.batch_dependence.measured
    assert len(shapes) == 1


def test_gradients_that_the_loss_writes_by_itself_are_there_once() -> None:
    gradients = []
    for compares in (True, False):
        model = nn.Linear(6, 4, bias=False).double()
        nn.init.ones_(model.weight)
        outer, inner = MicroBatcher(model, limits=12), MicroBatcher(model, limits=6)
        outer.compares = compares

        def losses(start: int, stop: int, model: nn.Module = model, inner: MicroBatcher = inner) -> Losses:
            rows = ROWS[start:stop]
            inner.run(lambda i, j: {"inner": (model(rows[i:j]).abs().sum(), j - i)}, len(rows))
            return {"outer": (model(rows).square().sum(), stop - start)}

        outer.run(losses, len(ROWS))
        gradients.append(model.weight.grad)
    assert torch.equal(*gradients)


def test_gradients_are_there_though_objects_cannot_be_put_back() -> None:
    model, grows, temperature = nn.Linear(6, 4).double(), np.zeros(2), torch.ones(1)
    expanded = temperature.expand(4)

    def losses(start: int, stop: int) -> Losses:
        grows.resize(grows.size + 1, refcheck=False)
        temperature.mul_(0.999)
        return {"loss": (model(ROWS[start:stop]).square().sum() + 0 * expanded.sum(), stop - start)}

    MicroBatcher(model, limits=12).run(losses, len(ROWS))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert float(temperature) == pytest.approx(0.999**2)


def shared(losses: Callable[[Tensor], tuple[Tensor, float]], model: nn.Module) -> MicroBatcher:
    """Runs a rank's share of a batch of 48 samples."""
    batcher = MicroBatcher(model, limits=7)
    batcher.run_share(lambda i, j: {"loss": losses(ROWS[i:j])}, len(ROWS), denominators={"loss": 48.0})
    return batcher


def test_a_share_of_a_batch_is_judged_as_a_batch_is() -> None:
    model = nn.Linear(6, 4).double()
    with pytest.raises(ArgumentError, match="The sum of 'loss' is a mean"):
        shared(lambda x: (model(x).square().mean(), len(x)), model)
    with pytest.raises(ArgumentError, match="The denominators of 'loss' do not add up"):
        shared(lambda x: (model(x).square().sum(), 1), model)
    with pytest.raises(ArgumentError, match=r"whose denominator is 0 must have the sum 0.*in a share of 24 samples"):
        shared(lambda x: (model(x).square().sum(), 0), model)
    with pytest.raises(ArgumentError, match=r"must not be negative: 'loss' has -24 in a share of 24 samples"):
        shared(lambda x: (model(x).square().sum(), -len(x)), model)
    with pytest.raises(ArgumentError, match="At least one loss term needs a gradient"):
        shared(lambda x: (model(x).square().sum().detach(), len(x)), model)
    with pytest.warns(UserWarning, match="micro-batches change the gradient of loss by [1-9]") as told:
        batcher = shared(lambda x: (nce(model(x)), len(x)), model)
    assert told[0].filename == __file__
    assert batcher.batch_dependence is not None
    assert batcher.batch_dependence.terms["loss"] > 0.1


def test_a_share_of_sums_with_their_counts_is_no_fault() -> None:
    model = nn.Linear(6, 4).double()
    batcher = shared(lambda x: (model(x).square().sum(), len(x)), model)
    assert batcher.batch_dependence == BatchDependence(terms={}, modules=(), drops=False)
    assert model.weight.grad is not None


def test_comparisons_stay_few() -> None:
    model, sizes = nn.Linear(6, 1).double(), Sizes()

    def losses(start: int, stop: int) -> Losses:
        sizes.put(stop - start)
        return {"loss": (model(ROWS[start:stop]).square().sum(), stop - start)}

    batcher, passes = MicroBatcher(model, limits=12), []
    for _ in range(20):
        batcher.run(losses, len(ROWS))
        passes.append(len(sizes.all()))
    assert [number for number, count in enumerate(passes, 1) if count != 2] == [1, 2, 4, 8, 16]
    assert max(passes) == 5
