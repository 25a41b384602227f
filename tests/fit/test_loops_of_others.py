"""`MicroBatcher` in loops that people have: however a batch is cut, and wherever memory runs out, its gradient is the
whole batch's, or the loop is told that it is not.

Shapes: R samples, F features, T steps, H hidden, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from can_train.errors import ArgumentError
from can_train.fit.batch_dependence import BatchDependence
from can_train.fit.micro_batcher import BatchResult, Losses, MicroBatcher
from fakes.ragged import cut_at

SAMPLES = 13
SIZES = (5, 1, 4, 3)
"""Uneven parts, one of a single sample."""
FEATURES, STEPS, HIDDEN, CLASSES, WORDS = 6, 5, 8, 3, 20
EXACT = 1e-12
DRAWN = torch.Generator().manual_seed(1)
X = torch.randn(SAMPLES, FEATURES, generator=DRAWN, dtype=torch.float64)
IMAGES = torch.randn(SAMPLES, 3, 8, 8, generator=DRAWN, dtype=torch.float64)
SEQUENCES = torch.randn(SAMPLES, STEPS, FEATURES, generator=DRAWN, dtype=torch.float64)
NOISE = torch.randn(SAMPLES, FEATURES, generator=DRAWN, dtype=torch.float64)
ALPHA = torch.rand(SAMPLES, 1, generator=DRAWN, dtype=torch.float64)
TOKENS = torch.randint(WORDS, (SAMPLES, STEPS), generator=DRAWN)
LENGTHS = torch.randint(1, STEPS + 1, (SAMPLES,), generator=DRAWN)
LABELS = torch.randint(CLASSES, (SAMPLES,), generator=DRAWN)
MASKED = torch.arange(SAMPLES).remainder(7) == 6
"""Samples that a masked term counts: some parts have none."""


class Residual(nn.Module):
    """Two convolutions with norms, around which the input passes."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1), norm(), nn.ReLU(), nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1), norm()
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


def resnet(norm: Callable[[], nn.Module]) -> nn.Module:
    blocks = [Residual(norm) for _ in range(2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(HIDDEN, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, HIDDEN, 3, padding=1), norm(), nn.ReLU(), *blocks, *head)


def resnet_with_group_norm() -> nn.Module:
    return resnet(lambda: nn.GroupNorm(2, HIDDEN))


def resnet_with_batch_norm() -> nn.Module:
    return resnet(lambda: nn.BatchNorm2d(HIDDEN))


class ViT(nn.Module):
    """Patches, a class token, and an encoder."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, 4, stride=4)
        self.first = nn.Parameter(torch.randn(1, 1, HIDDEN))
        self.position = nn.Parameter(torch.randn(1, 5, HIDDEN))
        layer = nn.TransformerEncoderLayer(HIDDEN, 2, 16, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), patches], dim=1) + self.position
        logits: Tensor = self.head(self.encoder(tokens)[:, 0])
        return logits


def classify(model: nn.Module, start: int, stop: int, *, inputs: Tensor = IMAGES) -> Losses:
    logits = model(inputs[start:stop])
    return {"class": (F.cross_entropy(logits, LABELS[start:stop], reduction="sum"), stop - start)}


class Recurrent(nn.Module):
    """Recurrent layers over packed sequences of different lengths."""

    def __init__(self, kind: Callable[..., nn.RNNBase], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = kind(FEATURES, HIDDEN, num_layers=2, dropout=dropout, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        logits: Tensor = self.head(self.layers(packed)[0].data)
        return logits


def tokens_of(model: nn.Module, start: int, stop: int) -> Losses:
    logits = model(SEQUENCES[start:stop], LENGTHS[start:stop])
    return {"token": (logits.logsumexp(dim=1).square().sum(), len(logits))}


class Mixture(nn.Module):
    """Experts, of which a router chooses the best for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, CLASSES)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, HIDDEN) for _ in range(CLASSES))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shares = self.router(x).softmax(dim=1)
        chosen = shares.argmax(dim=1)
        hidden = torch.stack([expert(x) for expert in self.experts], dim=1)[torch.arange(len(x)), chosen]
        return self.head(torch.tanh(hidden * shares.amax(dim=1, keepdim=True))), shares, chosen


def balanced(model: nn.Module, start: int, stop: int, *, whole: bool = False) -> Losses:
    """The loss of a Switch Transformer, whose second term is over the batch; with `whole`, its counts are of all."""
    logits, shares, chosen = model(X[start:stop])
    if whole:
        with torch.no_grad():
            counts = torch.bincount(model(X)[2], minlength=CLASSES) / SAMPLES
    else:
        counts = torch.bincount(chosen, minlength=CLASSES) / (stop - start)
    balance = CLASSES * (counts * shares.sum(dim=0)).sum()
    task = F.cross_entropy(logits, LABELS[start:stop], reduction="sum")
    return {"task": (task, stop - start), "balance": (balance, stop - start)}


def contrastive(model: nn.Module, start: int, stop: int) -> Losses:
    """InfoNCE: each sample against the others of its part."""
    pairs = F.normalize(model(X[start:stop]), dim=1) @ F.normalize(model(NOISE[start:stop]), dim=1).T
    return {"contrast": (F.cross_entropy(pairs / 0.1, torch.arange(stop - start), reduction="sum"), stop - start)}


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in the backward pass, dropout included."""

    def __init__(self, *, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)
        )
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        logits: Tensor = self.head(hidden)
        return logits


class LanguageModel(nn.Module):
    """Predicts the next word with the weights that embed it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.words(tokens))[0])
        return logits


def next_words(model: nn.Module, start: int, stop: int) -> Losses:
    tokens = TOKENS[start:stop]
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return {"word": (F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), len(logits))}


def embedding_bag() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, HIDDEN, sparse=True), nn.Flatten(), nn.Linear(STEPS * HIDDEN, CLASSES))


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), *layers, nn.Linear(HIDDEN, CLASSES))


def masked(model: nn.Module, start: int, stop: int) -> Losses:
    """Two terms, of which the second is a constant where nothing of a part is masked."""
    logits, counted = model(X[start:stop]), MASKED[start:stop]
    term = logits[counted].square().sum() if counted.any() else torch.zeros((), dtype=torch.float64)
    return {**classify(model, start, stop, inputs=X), "masked": (term, int(counted.sum()))}


class TwoHeads(nn.Module):
    """A trunk with two heads, of which each sample trains one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, HIDDEN)
        self.heads = nn.ModuleList(nn.Linear(HIDDEN, 1) for _ in range(2))


def by_head(model: nn.Module, start: int, stop: int) -> Losses:
    """A head without samples in a part has no gradient in it."""
    assert isinstance(model, TwoHeads)
    hidden = torch.tanh(model.trunk(X[start:stop]))
    totals = [head(hidden[MASKED[start:stop] == index]).square() for index, head in enumerate(model.heads)]
    return {"heads": (torch.cat([total for total in totals if len(total)]).sum(), stop - start)}


def frozen_backbone() -> nn.Module:
    model = mlp(nn.Linear(HIDDEN, HIDDEN))
    assert isinstance(model, nn.Sequential)
    model[0].requires_grad_(False)
    return model


@dataclass(frozen=True)
class Loop:
    """A model and what somebody's loop computes of a batch."""

    model: Callable[[], nn.Module]
    losses_of: Callable[[nn.Module, int, int], Losses]
    denominators: Mapping[str, float] | None = None
    of: tuple[str, ...] = field(default=())
    """Terms whose gradient a split changes."""

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model().double()

    def run(
        self, model: nn.Module, sizes: Sequence[int] = SIZES, *, measured: bool = True
    ) -> tuple[MicroBatcher, BatchResult]:
        """Adds the batch's gradient to the model's, in parts of these sizes."""
        costs, rules = cut_at(sizes)
        batcher = MicroBatcher(model, rules=rules)
        batcher.compares = measured
        return batcher, batcher.run(partial(self.losses_of, model), costs, denominators=self.denominators)

    def whole_gradient(self) -> Tensor:
        """Computed without can-train, of all samples at once."""
        model = self.make()
        torch.stack([total / own for total, own in self.losses_of(model, 0, SAMPLES).values()]).sum().backward()
        return gradient(model)


def gradient(model: nn.Module) -> Tensor:
    grads = [one.grad.to_dense() for one in model.parameters() if one.grad is not None]
    return torch.cat([grad.flatten() for grad in grads])


def weights(*models: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten().clone() for model in models for one in model.parameters()])


def relative_error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def over_x(model: nn.Module, start: int, stop: int) -> Losses:
    return classify(model, start, stop, inputs=X)


LOOPS = {
    "ResNet with GroupNorm": Loop(resnet_with_group_norm, classify),
    "ViT": Loop(ViT, classify),
    "packed GRU": Loop(partial(Recurrent, nn.GRU), tokens_of, {"token": int(LENGTHS.sum())}),
    "MoE with the batch's counts": Loop(Mixture, partial(balanced, whole=True)),
    "reentrant checkpoints": Loop(partial(Checkpointed, reentrant=True), over_x),
    "checkpoints": Loop(partial(Checkpointed, reentrant=False), over_x),
    "tied weights": Loop(LanguageModel, next_words, {"word": SAMPLES * (STEPS - 1)}),
    "sparse embedding": Loop(embedding_bag, partial(classify, inputs=TOKENS)),
    "masked term": Loop(partial(mlp), masked, {"class": SAMPLES, "masked": int(MASKED.sum())}),
    "heads without samples": Loop(TwoHeads, by_head),
    "weight norm": Loop(lambda: mlp(weight_norm(nn.Linear(HIDDEN, HIDDEN))), over_x),
    "frozen backbone": Loop(frozen_backbone, over_x),
}
EVERY_LOOP = pytest.mark.parametrize("name", LOOPS)


@EVERY_LOOP
def test_a_split_batch_has_the_gradient_of_the_whole_batch(name: str) -> None:
    loop = LOOPS[name]
    model, whole = loop.make(), loop.whole_gradient()
    batcher, result = loop.run(model)
    assert result.micro_batches == SIZES
    assert relative_error(gradient(model), whole) <= EXACT
    assert batcher.batch_dependence is not None
    assert batcher.batch_dependence.measured


@EVERY_LOOP
def test_another_rule_for_a_batchs_mean_is_another_gradient(name: str) -> None:
    loop, start = LOOPS[name], 0
    model, whole = loop.make(), loop.whole_gradient()
    for size in SIZES:
        losses = loop.losses_of(model, start, start + size).values()
        torch.stack([total / (own or 1) / len(SIZES) for total, own in losses]).sum().backward()
        start += size
    assert relative_error(gradient(model), whole) > 1e-3


class FullAt(TorchDispatchMode):
    """Memory runs out once, in the n-th operation that takes some, forward or backward."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.seen, self._fails_at = 0, fails_at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What writes into memory that is there, or looks at it, takes none.
        if not (func._schema.is_mutable or func.is_view):
            self.seen += 1
            if self.seen == self._fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


PLACES = 7
"""Operations of a pass in which memory runs out, evenly spread."""

RANDOM_LOOPS = {
    "ViT with dropout": Loop(partial(ViT, 0.3), classify),
    "packed LSTM with dropout": Loop(partial(Recurrent, nn.LSTM, 0.3), tokens_of, {"token": int(LENGTHS.sum())}),
    "reentrant checkpoints with dropout": Loop(partial(Checkpointed, reentrant=True, dropout=0.3), over_x),
    "checkpoints with dropout": Loop(partial(Checkpointed, reentrant=False, dropout=0.3), over_x),
    "ResNet with BatchNorm": Loop(resnet_with_batch_norm, classify),
    "spectral norm": Loop(lambda: mlp(spectral_norm(nn.Linear(HIDDEN, HIDDEN))), over_x),
}


@pytest.mark.parametrize("name", [*LOOPS, *RANDOM_LOOPS])
def test_a_rescued_batch_has_the_gradient_and_buffers_of_the_same_parts_bit_by_bit(name: str) -> None:
    loop = {**LOOPS, **RANDOM_LOOPS}[name]
    sizes = (9, 4)
    model = loop.make()
    with FullAt(0) as counted:
        loop.run(model, sizes, measured=False)
    places = {1 + counted.seen * place // PLACES for place in range(PLACES)}
    for place in sorted(places):
        model, planned = loop.make(), loop.make()
        torch.manual_seed(2)
        with FullAt(place):
            _, result = loop.run(model, sizes, measured=False)
        assert result.ooms_rescued == 1
        torch.manual_seed(2)
        loop.run(planned, result.micro_batches, measured=False)
        assert torch.equal(gradient(model), gradient(planned)), f"operation {place}"
        for (where, one), other in zip(model.state_dict().items(), planned.state_dict().values(), strict=True):
            assert torch.equal(one, other), f"{where} after operation {place}"


TOLD = {
    "ResNet with BatchNorm": Loop(resnet_with_batch_norm, classify, of=("class",)),
    "spectral norm": Loop(lambda: mlp(spectral_norm(nn.Linear(HIDDEN, HIDDEN))), over_x, of=("class",)),
    "MoE": Loop(Mixture, balanced, of=("balance",)),
    "InfoNCE": Loop(mlp, contrastive, of=("contrast",)),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_loop_whose_samples_depend_on_each_other_is_told(name: str) -> None:
    loop = TOLD[name]
    model, whole = loop.make(), loop.whole_gradient()
    with pytest.warns(UserWarning, match="Samples depend on the rest of their batch") as told:
        batcher, _ = loop.run(model, (5, 4, 4))
    assert len(told) == 1
    assert batcher.batch_dependence is not None
    assert tuple(batcher.batch_dependence.terms) == loop.of
    assert relative_error(gradient(model), whole) > 1e-7


@pytest.mark.parametrize("name", ["ViT with dropout", "packed LSTM with dropout", "checkpoints with dropout"])
def test_dropout_is_seen_and_the_rest_of_the_gradient_is_exact(name: str) -> None:
    loop = RANDOM_LOOPS[name]
    batcher, _ = loop.run(loop.make())
    assert batcher.batch_dependence is not None
    assert (batcher.batch_dependence.terms, batcher.batch_dependence.drops) == ({}, True)


class Adversaries:
    """A critic with gradient penalty and a generator, each with a batcher and an optimizer of its own (WGAN-GP)."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.critic, self.generator = mlp().double(), nn.Linear(FEATURES, FEATURES).double()
        self.batchers = [MicroBatcher(model) for model in (self.critic, self.generator)]
        self.optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in (self.critic, self.generator)]

    def critic_losses(self, start: int, stop: int) -> Losses:
        real, fake, alpha = X[start:stop], self.generator(NOISE[start:stop]).detach(), ALPHA[start:stop]
        between = (alpha * real + (1 - alpha) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().sum()
        wasserstein = self.critic(fake).mean(dim=1).sum() - self.critic(real).mean(dim=1).sum()
        return {"wasserstein": (wasserstein, stop - start), "penalty": (penalty, stop - start)}

    def generator_losses(self, start: int, stop: int) -> Losses:
        return {"generator": (-self.critic(self.generator(NOISE[start:stop])).mean(dim=1).sum(), stop - start)}

    def step(self, which: int, sizes: Sequence[int], fails_at: int = 0) -> BatchResult:
        """Steps one of the two; the generator's backward pass leaves gradients in the critic."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        costs, self.batchers[which].rules = cut_at(sizes)
        with FullAt(fails_at):
            result = self.batchers[which].run((self.critic_losses, self.generator_losses)[which], costs)
        self.optimizers[which].step()
        self.batchers[which].stepped()
        return result

    def weights(self) -> Tensor:
        return weights(self.critic, self.generator)


def test_a_gan_with_gradient_penalty_is_trained_alike_however_its_batches_are_cut() -> None:
    trained = []
    for sizes in ((SAMPLES,), SIZES):
        adversaries = Adversaries()
        for _ in range(5):
            for which in (0, 0, 1):
                assert adversaries.step(which, sizes).micro_batches == sizes
        trained.append(adversaries.weights())
    assert relative_error(trained[0], Adversaries().weights()) > 1e-2
    assert relative_error(trained[1], trained[0]) <= 1e-10


@pytest.mark.parametrize("places", [(20, 5), (50, 15), (75, 21)])
def test_a_gan_that_runs_out_of_memory_is_trained_as_with_the_same_parts(places: tuple[int, int]) -> None:
    rescued, planned = Adversaries(), Adversaries()
    for which, fails_at in enumerate(places):
        result = rescued.step(which, (9, 4), fails_at)
        assert result.ooms_rescued == 1
        planned.step(which, result.micro_batches)
    assert torch.equal(rescued.weights(), planned.weights())


Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[str, Optimizers]] = {
    "LBFGS": ("ViT", lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)),
    "LBFGS with line search": (
        "packed GRU",
        lambda model: torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe"),
    ),
    "AdamW, foreach": ("tied weights", lambda model: torch.optim.AdamW(model.parameters(), foreach=True)),
    "AdamW, fused": ("masked term", lambda model: torch.optim.AdamW(model.parameters(), fused=True)),
}


def train(loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sequence[int]) -> Tensor:
    """Takes steps by a closure, as LBFGS needs one."""
    costs, rules = cut_at(sizes)
    batcher = MicroBatcher(model, rules=rules)

    def closure() -> float:
        optimizer.zero_grad()
        return batcher.run(partial(loop.losses_of, model), costs, denominators=loop.denominators).loss

    for _ in range(3):
        optimizer.step(closure)
        batcher.stepped()
    return weights(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_by_a_closure_lead_to_the_same_weights_however_batches_are_cut(name: str) -> None:
    loop_name, make_optimizer = OPTIMIZERS[name]
    loop = LOOPS[loop_name]
    trained = []
    for sizes in ((SAMPLES,), SIZES):
        model = loop.make()
        trained.append(train(loop, model, make_optimizer(model), sizes))
    assert relative_error(trained[0], weights(loop.make())) > 1e-3
    assert relative_error(trained[1], trained[0]) <= 1e-9


def test_sparse_gradients_are_stepped_by_sparse_adam() -> None:
    trained = []
    for sizes in ((SAMPLES,), SIZES):
        model = LOOPS["sparse embedding"].make()
        assert isinstance(model, nn.Sequential)
        sparse = torch.optim.SparseAdam(model[0].parameters(), lr=1e-2)
        _, result = LOOPS["sparse embedding"].run(model, sizes)
        assert result.micro_batches == tuple(sizes)
        assert model[0].weight.grad.is_sparse
        sparse.step()
        trained.append(weights(model))
    assert relative_error(trained[1], trained[0]) <= EXACT
    assert not torch.equal(trained[0], weights(LOOPS["sparse embedding"].make()))


def test_two_models_that_share_parameters_have_the_gradients_of_both() -> None:
    def gradients(sizes: Sequence[int], fails_at: int = 0) -> Tensor:
        torch.manual_seed(0)
        trunk = nn.Linear(FEATURES, HIDDEN)
        models = [nn.Sequential(trunk, nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double() for _ in range(2)]
        costs, rules = cut_at(sizes)
        for model in models:
            batcher = MicroBatcher(model, rules=rules)
            batcher.compares = False
            with FullAt(fails_at):
                result = batcher.run(partial(over_x, model), costs)
            assert result.ooms_rescued == (fails_at > 0)
        return torch.cat([gradient(model) for model in models])

    whole = gradients((SAMPLES,))
    assert relative_error(gradients(SIZES), whole) <= EXACT
    for fails_at in (3, 13, 23):
        assert relative_error(gradients(SIZES, fails_at), whole) <= EXACT


def test_a_compiled_model_has_the_gradient_of_the_whole_batch() -> None:
    torch._dynamo.reset()
    gradients = []
    for sizes in ((SAMPLES,), SIZES):
        torch.manual_seed(0)
        model = mlp(nn.LayerNorm(HIDDEN)).double()
        compiled = torch.compile(model, backend="aot_eager")
        costs, rules = cut_at(sizes)
        batcher = MicroBatcher(compiled, rules=rules)
        batcher.run(partial(over_x, compiled), costs)
        gradients.append(gradient(model))
    assert relative_error(gradients[1], gradients[0]) <= EXACT
    assert batcher.batch_dependence == BatchDependence(terms={}, modules=(), drops=False)


BF16_EPSILON = 2**-8
"""Relative spacing of bfloat16's numbers."""


def under_bf16(model: nn.Module, start: int, stop: int) -> Losses:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return classify(model, start, stop, inputs=X.float())


def test_under_autocast_a_split_rounds_a_gradient_as_bfloat16_does() -> None:
    def run(sizes: Sequence[int]) -> tuple[Tensor, MicroBatcher]:
        torch.manual_seed(0)
        model = mlp(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN))
        costs, rules = cut_at(sizes)
        batcher = MicroBatcher(model, rules=rules)
        batcher.run(partial(under_bf16, model), costs)
        return gradient(model), batcher

    whole, _ = run((SAMPLES,))
    split, batcher = run(SIZES)
    assert 0 < relative_error(split, whole) <= 2 * BF16_EPSILON
    assert batcher.batch_dependence == BatchDependence(terms={}, modules=(), drops=False)


def scaled_step(sizes: Sequence[int], fails_at: int = 0) -> tuple[Tensor, BatchResult]:
    """A step of a loop with a gradient scaler that clips what it unscaled."""
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    costs, rules = cut_at(sizes)
    batcher = MicroBatcher(model, rules=rules)
    batcher.compares = False
    with FullAt(fails_at):
        result = batcher.run(partial(over_x, model), costs, scale=scaler.scale)
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0.1
    scaler.step(optimizer)
    scaler.update()
    return weights(model), result


def test_a_scaled_and_clipped_step_is_that_of_the_whole_batch() -> None:
    whole, result = scaled_step((SAMPLES,))
    split, of_split = scaled_step(SIZES)
    assert relative_error(split, whole) <= EXACT
    assert of_split.loss == pytest.approx(result.loss, rel=1e-12)


@pytest.mark.parametrize("fails_at", [3, 15, 20])
def test_a_scaled_step_that_runs_out_of_memory_is_that_of_the_same_parts_bit_by_bit(fails_at: int) -> None:
    rescued, result = scaled_step((9, 4), fails_at)
    assert result.ooms_rescued == 1
    assert torch.equal(rescued, scaled_step(result.micro_batches)[0])


class HalfAndWhole(nn.Module):
    """Under autocast, the gradient of `linear` is of float16, and the gradient of `gain` of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1, bias=False)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.linear(x).sum() * factor + (x * self.gain).sum()


@pytest.mark.parametrize(
    ("size", "factor", "is_taken"),
    # The mean of the gradients is 64 · size · factor in the linear layer, and 64 · size in gain.
    [(1.1, 1.0, True), (1100.1, 1.0, False), (1100.1, 0.01, True)],
    ids=["within float16", "beyond float16", "beyond float16 in float32 alone"],
)
def test_a_scaled_step_is_skipped_where_that_of_the_whole_batch_is(size: float, factor: float, is_taken: bool) -> None:
    scales = []
    for sizes in ((SAMPLES,), SIZES):
        model, scaler = HalfAndWhole(), torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        costs, rules = cut_at(sizes)
        batcher = MicroBatcher(model, rules=rules)
        batcher.compares = False

        def losses_of(start: int, stop: int, model: HalfAndWhole = model) -> Losses:
            with torch.autocast("cpu", torch.float16):
                return {"loss": (model(torch.full((stop - start, 4), size), factor), stop - start)}

        batcher.run(losses_of, costs, scale=scaler.scale)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [64.0 if is_taken else 32.0] * 2


def test_a_model_in_ddp_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(mlp())
        with pytest.raises(ArgumentError, match=r"model\.module.*run_share"):
            MicroBatcher(model)
    finally:
        dist.destroy_process_group()


def test_a_part_in_which_no_term_counts_anything_adds_nothing() -> None:
    """Masked pretraining: a part without a masked sample has a loss that is a constant."""

    def losses_of(model: nn.Module, start: int, stop: int) -> Losses:
        counted = MASKED[start:stop]
        if not counted.any():
            return {"masked": (torch.zeros((), dtype=torch.float64), 0)}
        return {"masked": (model(X[start:stop][counted]).square().sum(), int(counted.sum()))}

    loop = Loop(mlp, losses_of, {"masked": int(MASKED.sum())})
    model = loop.make()
    _, result = loop.run(model)
    assert result.micro_batches == SIZES
    assert relative_error(gradient(model), loop.whole_gradient()) <= EXACT


@pytest.mark.parametrize("sizes", [(SAMPLES,), SIZES])
def test_a_batch_without_any_gradient_is_one_clear_error(sizes: Sequence[int]) -> None:
    loop = Loop(mlp, over_x)
    model = loop.make()
    with pytest.raises(ArgumentError, match=r"At least one loss term needs a gradient"), torch.no_grad():
        loop.run(model, sizes)
    with pytest.raises(ArgumentError, match="needs a gradient"):
        loop.run(model.requires_grad_(False), sizes)


@pytest.mark.parametrize("fails_at", [0, 12, 20, 26])
def test_parameters_outside_the_model_have_their_gradient_once(fails_at: int) -> None:
    """A head and a learned temperature that the model does not hold: gradients of a pass that failed stayed in them."""

    def gradients(sizes: Sequence[int], fails_at: int = 0) -> Tensor:
        torch.manual_seed(0)
        model, head = nn.Linear(FEATURES, HIDDEN).double(), nn.Linear(HIDDEN, CLASSES).double()
        temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

        def losses_of(start: int, stop: int) -> Losses:
            return over_x(lambda x: head(torch.tanh(model(x))) * temperature.exp(), start, stop)  # type: ignore[arg-type]

        costs, rules = cut_at(sizes)
        batcher = MicroBatcher(model, rules=rules)
        batcher.compares = False
        with FullAt(fails_at):
            result = batcher.run(losses_of, costs)
        assert result.ooms_rescued == (fails_at > 0)
        assert temperature.grad is not None
        return torch.cat([gradient(model), gradient(head), temperature.grad.flatten()])

    assert relative_error(gradients((9, 4), fails_at), gradients((SAMPLES,))) <= EXACT


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize("fails_at", [0, 12, 20, 26, 32])
def test_a_latent_code_of_each_step_has_its_gradient_once(fails_at: int, compares: bool) -> None:
    """A batch of one part, and two that are split, each with a code of its own that the model does not hold."""

    def gradients(sizes: Sequence[Sequence[int]], fails_at: int = 0) -> Tensor:
        torch.manual_seed(0)
        model, codes = mlp().double(), [nn.Parameter(torch.ones(FEATURES, dtype=torch.float64)) for _ in sizes]
        batcher = MicroBatcher(model)
        batcher.compares = compares
        with FullAt(fails_at):
            for code, of_batch in zip(codes, sizes, strict=True):
                costs, batcher.rules = cut_at(of_batch)
                batcher.run(lambda start, stop, code=code: over_x(lambda x: model(x + code), start, stop), costs)
        return torch.cat([gradient(model), *(code.grad for code in codes if code.grad is not None)])

    whole = gradients([(SAMPLES,)] * 3)
    assert relative_error(gradients([(SAMPLES,), (9, 4), (9, 4)], fails_at), whole) <= EXACT


def with_codes(trains: Sequence[Callable[[int], bool]], sizes: Sequence[int], *fails_at: int) -> tuple[Tensor, int]:
    """The gradient of some batches that are cut into parts of these sizes, and how often memory ran out; `trains` tells
    for each batch whether the part that begins at a sample trains a code that the model does not hold.
    """
    torch.manual_seed(0)
    # At the output, so that its gradient is there first.
    model, code = mlp().double(), nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))
    costs, rules = cut_at(sizes)
    batcher, ooms = MicroBatcher(model, rules=rules), 0
    batcher.compares = False
    with ExitStack() as failures:
        for place in fails_at:
            failures.enter_context(FullAt(place))
        for is_trained in trains:

            def losses_of(start: int, stop: int, is_trained: Callable[[int], bool] = is_trained) -> Losses:
                shift = code if is_trained(start) else code.detach()
                return over_x(lambda x: model(x) + shift, start, stop)  # type: ignore[arg-type]

            ooms += batcher.run(losses_of, costs).ooms_rescued
    return torch.cat([gradient(model), torch.zeros(CLASSES) if code.grad is None else code.grad]), ooms


NEVER, ALWAYS, LATER = lambda start: False, lambda start: True, lambda start: start >= SIZES[0]


@pytest.mark.parametrize(
    ("trains", "sizes"),
    [
        ([ALWAYS, ALWAYS], (SAMPLES,)),
        ([NEVER, ALWAYS], (SAMPLES,)),
        ([LATER], SIZES),
        ([LATER, LATER], SIZES),
        ([NEVER, ALWAYS], SIZES),
    ],
    ids=[
        "in two unsplit batches",
        "in an unsplit batch",
        "in later parts",
        "in later parts twice",
        "from the second batch on",
    ],
)
def test_a_code_that_only_some_parts_train_has_its_gradient_once(
    trains: Sequence[Callable[[int], bool]], sizes: Sequence[int]
) -> None:
    expected, _ = with_codes(trains, sizes)
    places, found = iter(range(1, 1000, 3)), 1
    while found:
        computed, found = with_codes(trains, sizes, next(places))
        assert relative_error(computed, expected) <= EXACT


@pytest.mark.parametrize("apart", [12, 20])
def test_a_code_that_is_new_in_a_part_that_fails_twice_has_its_gradient_once(apart: int) -> None:
    expected, _ = with_codes([NEVER, LATER], SIZES)
    places, found = iter(range(1, 1000, 5)), 2
    while found:
        first = next(places)
        computed, found = with_codes([NEVER, LATER], SIZES, first, first + apart)
        assert relative_error(computed, expected) <= EXACT


def test_leaves_of_earlier_batches_are_not_looked_after() -> None:
    model, codes = mlp().double(), [nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64)) for _ in range(5)]
    batcher = MicroBatcher(model, limits=5)
    for code in codes:
        batcher.run(lambda start, stop, code=code: over_x(lambda x: model(x + code), start, stop), SAMPLES)
    assert [leaf() for leaf in batcher._outside] == [codes[-1]]


def test_the_comparison_leaves_gradients_of_inputs_as_they_were() -> None:
    model, inputs = mlp().double(), X.clone().requires_grad_()
    inputs.grad = torch.full_like(X, 2.0)
    measured = MicroBatcher(model).measure_dependence(
        lambda start, stop: over_x(lambda x: model(inputs[start:stop]), start, stop), SIZES
    )
    assert measured.measured
    assert inputs.grad.eq(2.0).all()


def test_a_hook_that_is_registered_later_is_refused_before_it_steps() -> None:
    model, calls = mlp(), []
    batcher = MicroBatcher(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    with pytest.raises(ArgumentError, match=r"would run in each micro-batch.*a hook of 0.weight"):
        batcher.run(partial(over_x, model), SAMPLES)
    assert not calls


def test_an_evaluation_keeps_no_graph() -> None:
    model = mlp().double()
    computed = MicroBatcher(model, limits=4).evaluate(lambda start, stop: model(X[start:stop]), SAMPLES)
    assert len(computed) > 1
    assert not any(part.requires_grad for part in computed)


@pytest.mark.parametrize("total", [0.0, torch.ones(3, requires_grad=True)], ids=["a float", "three numbers"])
def test_a_term_is_a_tensor_of_one_number(total: Any) -> None:
    model = mlp()
    with pytest.raises(ArgumentError, match=r"losses_of returns .*'aux' is"):
        MicroBatcher(model).run(lambda start, stop: {**over_x(model.double(), start, stop), "aux": (total, 1)}, SAMPLES)


@pytest.mark.parametrize("layer", [nn.LazyLinear(HIDDEN), nn.LazyBatchNorm1d()], ids=["parameters", "buffers"])
def test_a_lazy_layer_without_its_shape_is_refused(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.LazyLinear(CLASSES)).double()
    with pytest.raises(ArgumentError, match="Parameters of lazy modules are there once the model has run"):
        MicroBatcher(model)
    model(X)
    assert MicroBatcher(model).run(partial(over_x, model), SAMPLES).micro_batches == (SAMPLES,)
