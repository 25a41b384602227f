"""The parts of a peak: labelled allocations of small networks of many kinds, whose sizes add up to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from can_train import PeakPrediction, predict_peak
from can_train.memory import allocation_trace
from can_train.memory.allocation_trace import (
    BATCH,
    GRADIENTS,
    KINDS,
    OPTIMIZER_STATE,
    OUTSIDE,
    ROUNDING,
    SAVED,
    TEMPORARIES,
    WEIGHTS,
    AllocationRecorder,
)
from can_train.memory.cuda_dispatch import compute_on_cuda
from can_train.memory.cuda_library import NoCudaDispatchError, compiled_library
from can_train.memory.cuda_workspaces import AMPERE
from can_train.memory.simulated.allocator import PLAIN

BATCH_SIZE = 16


@pytest.fixture(autouse=True)
def dispatched() -> None:
    try:
        compiled_library()
    except NoCudaDispatchError as error:
        pytest.skip(f"CUDA's dispatch cannot be had here: {error.value}")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.down = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + self.down(x))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.relu(self.down(x))
        coarse = F.relu(self.middle(F.max_pool2d(fine, 2)))
        return self.out(torch.cat([fine, self.up(coarse)], dim=1))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0])


class LlamaBlock(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + self.o(F.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Static routing: each expert has its share of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        parts = [expert(part) for expert, part in zip(self.experts, x.chunk(4), strict=True)]
        return torch.cat(parts) * weights.sum(-1, keepdim=True)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return F.cosine_similarity(self.tower(x), self.tower(x.flip(0)), dim=-1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def vectors(*shape: int) -> Tensor:
    return torch.zeros(BATCH_SIZE, *shape)


def words(length: int = 5) -> Tensor:
    return torch.zeros(BATCH_SIZE, length, dtype=torch.int64)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of a critic with a gradient penalty, which has a graph of its gradients."""
    x = x.to("cuda").requires_grad_()
    scores: Tensor = model(x)
    (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.mean() + (slopes.norm(dim=1) - 1).square().mean()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


Build = Callable[[], nn.Module]
MODELS: dict[str, tuple[Build, Callable[[], Tensor]]] = {
    "perceptron": (perceptron, lambda: vectors(16)),
    "CNN": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)),
            lambda: vectors(3, 8, 8)),
    "ResNet": (Residual, lambda: vectors(3, 8, 8)),
    "U-Net": (UNet, lambda: vectors(3, 8, 8)),
    "LSTM": (lambda: Recurrent(nn.LSTM(8, 16, batch_first=True)), lambda: vectors(5, 8)),
    "GRU": (lambda: Recurrent(nn.GRU(8, 16, batch_first=True)), lambda: vectors(5, 8)),
    "transformer": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
                    lambda: vectors(5, 16)),
    "Llama": (lambda: nn.Sequential(nn.Embedding(10, 16), LlamaBlock(), LlamaBlock(), nn.Linear(16, 10)), words),
    "experts": (Experts, lambda: vectors(16)),
    "VAE": (Variational, lambda: vectors(16)),
    "autoencoder": (lambda: nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 16)), lambda: vectors(16)),
    "siamese": (Siamese, lambda: vectors(16)),
    "3-D": (lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.Conv3d(4, 1, 3)), lambda: vectors(1, 6, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), lambda: vectors(3, 8, 8)),
    "bags of words": (lambda: nn.Sequential(nn.EmbeddingBag(10, 16), nn.Linear(16, 1)), words),
    "batch norm": (lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)), lambda: vectors(16)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)), lambda: vectors(3, 8, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(16, 32), nn.Dropout(), nn.Linear(32, 1)), lambda: vectors(16)),
    "checkpointed": (Checkpointed, lambda: vectors(16)),
    "LoRA": (Lora, lambda: vectors(16)),
}  # fmt: skip


def predicted(model: nn.Module, x: Tensor, loss: Callable[..., Tensor] = squares, **options: Any) -> PeakPrediction:
    return predict_peak(model, BATCH_SIZE, loss_of=lambda rows: loss(model, x[rows]), target="t4", **options)


def by_kind(found: PeakPrediction) -> dict[str, float]:
    return {kind: sum(part.num_bytes for part in found.parts if part.kind == kind) for kind in KINDS}


def check(found: PeakPrediction, model: nn.Module) -> None:
    assert not found.notices, found.notices
    assert sum(part.num_bytes for part in found.parts) == found.peak_bytes
    sizes = [part.num_bytes for part in found.parts]
    assert sizes == sorted(sizes, reverse=True)
    kinds = by_kind(found)
    assert sum(kinds.values()) == found.peak_bytes
    assert kinds[ROUNDING] >= 0
    assert kinds[WEIGHTS] == sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert kinds[OPTIMIZER_STATE] == 2 * trained
    assert kinds[GRADIENTS] <= trained
    names = {name or type(model).__name__ for name, _ in model.named_modules()}
    assert {part.module for part in found.parts if part.kind in (WEIGHTS, GRADIENTS, OPTIMIZER_STATE)} <= names


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_a_peak_add_up_to_it(name: str) -> None:
    build, inputs = MODELS[name]
    model = build()
    check(predicted(model, inputs()), model)


def test_the_parts_of_a_critic_with_a_gradient_penalty_add_up() -> None:
    model = perceptron()
    found = predicted(model, vectors(16), penalty)
    check(found, model)
    modules = {part.module for part in found.parts if part.kind in (SAVED, TEMPORARIES)}
    assert {"0", "2"} <= modules


@pytest.mark.parametrize("options", [
    {"precision": "bf16"}, {"zero_grad": "after"}, {"accumulation_steps": 2}, {"keep_gradients": True},
    {"allocator": "expandable_segments:True"}, {"allocator": "roundup_power2_divisions:4"},
])  # fmt: skip
def test_the_parts_add_up_in_any_loop_and_with_any_allocator(options: dict[str, Any]) -> None:
    model = perceptron()
    check(predicted(model, vectors(16), **options), model)


def test_gradients_that_are_kept_are_a_part_of_their_own() -> None:
    model = perceptron()
    found = predicted(model, vectors(16), keep_gradients=True)
    assert by_kind(found)[GRADIENTS] == sum(parameter.nbytes for parameter in model.parameters())
    assert by_kind(found)[BATCH] == BATCH_SIZE * 16 * 4


class Wide(nn.Module):
    """Of whose operations the middle one saves most."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.middle, self.after = nn.Linear(16, 4096), nn.Tanh(), nn.Linear(4096, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.middle(self.before(x)))
        return out


def labelled(model: nn.Module, run: Callable[[], object]) -> dict[str, set[tuple[str, str]]]:
    """Modules and operations of a recording's allocations, by kind."""

    def compute(gpu: Any) -> Any:
        run()
        return gpu.trace

    trace = compute_on_cuda(model, compute, generation="ampere")
    assert trace.labels.keys() == {number for number, size in trace.events if size}
    labels: dict[str, set[tuple[str, str]]] = {}
    for label in trace.labels.values():
        labels.setdefault(label.kind, set()).add((label.module, label.operation))
    return labels


def test_an_activation_has_the_module_and_the_operation_that_made_it() -> None:
    model = Wide()
    labels = labelled(model, lambda: squares(model, vectors(16)).backward())
    assert ("middle", "tanh") in labels[SAVED]
    assert ("before", "addmm") not in labels[SAVED]  # freed once its tangent is there
    # In the backward pass it is the module whose forward pass made the node.
    assert ("middle", "tanh_backward") in labels[TEMPORARIES]
    assert ("after", "mm") in labels[TEMPORARIES]


def test_a_recomputed_activation_is_one_of_its_module() -> None:
    model = Checkpointed()
    labels = labelled(model, lambda: squares(model, vectors(16)).backward())
    assert ("blocks.2.1", "gelu") in labels[SAVED]


def test_the_cpu_labels_as_the_recorder_of_a_card_does() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    recorder = AllocationRecorder(model, cuda=AMPERE)
    recorder.seed_resident(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with recorder, recorder.following():
        for _ in range(2):
            squares(model, vectors(512)).backward()
            optimizer.step()
            optimizer.zero_grad()
    parts = recorder.trace.parts(PLAIN)
    kinds = {kind: sum(part.num_bytes for part in parts if part.kind == kind) for kind in KINDS}
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert (kinds[WEIGHTS], kinds[GRADIENTS]) == (size, size)
    assert kinds[OPTIMIZER_STATE] == pytest.approx(2 * size, rel=0.001)
    assert all(part.module == "AdamW" for part in parts if part.kind == TEMPORARIES)


# Mutants: the tests above must fail where labels are lost.


def test_an_allocation_without_a_label_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = allocation_trace.Labels.made

    def forgetful(self: Any, number: int, event: int, operation: Any, **options: Any) -> None:
        if "tanh" not in str(operation):
            made(self, number, event, operation, **options)

    monkeypatch.setattr(allocation_trace.Labels, "made", forgetful)
    with pytest.raises((AssertionError, KeyError)):
        test_an_activation_has_the_module_and_the_operation_that_made_it()


def test_a_label_that_is_lost_in_the_backward_pass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation_trace.Labels, "_module_of", lambda self, node: OUTSIDE)
    with pytest.raises(AssertionError):
        test_an_activation_has_the_module_and_the_operation_that_made_it()


def test_a_block_that_is_counted_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    at_peak = allocation_trace.AllocationTrace._at_peak
    monkeypatch.setattr(allocation_trace.AllocationTrace, "_at_peak",
                        lambda self, settings: list(at_peak(self, settings))[1:])  # fmt: skip
    with pytest.raises(AssertionError):
        test_the_parts_of_a_peak_add_up_to_it("perceptron")
