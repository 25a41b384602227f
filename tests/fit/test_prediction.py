"""Peaks predicted from tiny batches, against those measured of batches many times as large."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import pack_padded_sequence

from can_train.config.settings import TrainingSettings
from can_train.errors import ArgumentError, CanTrainError, ConfigError, TaskError
from can_train.fit import recorded_limits
from can_train.fit.cost_model import Spread
from can_train.fit.explore import Explorer
from can_train.fit.packing import BatchCosts
from can_train.fit.peak_prediction import (
    ATTENTION,
    DENSE_CONVOLUTIONS,
    NOT_RECORDED,
    OTHER_CONVOLUTIONS,
    PRODUCTS,
    RECURRENT,
    SPREADS,
    PeakPrediction,
    loaded_kernels,
    operations_of,
    price_trace,
)
from can_train.fit.prediction import LossOf, predict_peak
from can_train.fit.recorded_limits import predict_limits
from can_train.memory import value_sizes
from can_train.memory.allocation_trace import SAVED, WEIGHTS, AllocationTrace
from can_train.memory.catalogue import UsableMemory, find_card, other_card, usable
from can_train.memory.cuda_library import NoCudaDispatchError, compiled_library
from can_train.memory.cuda_workspaces import CUDNN
from can_train.memory.meters import AbsentGpuMeter
from can_train.memory.simulated.allocator import PLAIN
from can_train.memory.simulated.gpu import LiveStorageTracker
from can_train.task import Feature
from fakes.line_fit import LineTask

ENDLESS = 2**62
GIB = 2**30
MIB = 2**20


def measured(model: nn.Module, loss_of: LossOf, rows: NDArray[np.int64], make: Callable[..., Any]) -> int:
    """The peak of a warm training step on the whole batch."""
    optimizer = make(list(model.parameters()))
    for group in optimizer.param_groups:
        group["foreach"] = True  # As on a GPU
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    optimizer.zero_grad()
    tracker = LiveStorageTracker(ENDLESS, [*model.parameters(), *model.buffers(), *state])
    with tracker:
        loss_of(rows).backward()
        optimizer.step()
    return tracker.peak_bytes


class Tokens(nn.Module):
    """Embeds items and sums each sample's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.outer = nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(64, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.outer(torch.relu(self.inner(self.embedding(tokens))))
        return hidden.sum()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(576, 128),
        nn.Linear(128, 10),
    )


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("build", [perceptron, convolutions])
@pytest.mark.parametrize("size", [2_000, 20_000])
def test_a_uniform_batch_is_predicted_within_three_per_cent(
    build: Callable[[], nn.Module], make: Callable[..., Any], size: int
) -> None:
    model, x = build(), torch.randn(64, 64)

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        out: Tensor = model(x[rows % 64])
        return out.square().sum()

    found = predict_peak(model, size, loss_of=loss_of, optimizer=make)
    assert found.peak_bytes == pytest.approx(measured(model, loss_of, np.arange(size), make), rel=0.03)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("size", [30, 200, 500, 1_600, 40_000])
@pytest.mark.parametrize("width", [256, 1024])
def test_neither_large_weights_nor_small_batches_lead_a_prediction_astray(
    width: int, size: int, make: Callable[..., Any]
) -> None:
    model, x = nn.Sequential(nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)), torch.randn(64, 64)

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        out: Tensor = model(x[rows % 64])
        return out.square().sum()

    found = predict_peak(model, size, loss_of=loss_of, optimizer=make)
    assert found.peak_bytes == pytest.approx(measured(model, loss_of, np.arange(size), make), rel=0.01)


def test_a_ragged_batch_is_predicted_from_its_counts() -> None:
    model, lengths = Tokens(), np.random.default_rng(0).integers(1, 60, size=3_000)

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        loss: Tensor = model(torch.zeros(int(lengths[rows].sum()), dtype=torch.int64))
        return loss

    found = predict_peak(model, lengths, loss_of=loss_of)
    peak = measured(model, loss_of, np.arange(len(lengths)), torch.optim.AdamW)
    assert found.explains
    assert found.peak_bytes == pytest.approx(peak, rel=0.01)
    assert found.fits(peak * 1.1)
    assert not found.fits(peak * 0.9)


class Sentences(nn.Module):
    """A transformer's layer on padded sentences, of whose tokens every one attends to all of its sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(50, 32), nn.Linear(32, 64)

    def forward(self, lengths: NDArray[np.int64]) -> Tensor:
        hidden = self.inner(self.embedding(torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)))
        return (torch.softmax(hidden @ hidden.transpose(1, 2), dim=2) @ hidden).square().sum()


LENGTHS = np.random.default_rng(0).integers(2, 60, size=2_000)
PADDED = {Feature("tokens", padding=1): LENGTHS, Feature("pairs", padding=2): LENGTHS}


def test_padded_sentences_are_predicted_by_padded_features() -> None:
    model = Sentences()
    found = predict_peak(model, PADDED, loss_of=lambda rows: model(LENGTHS[rows]))
    peak = measured(model, lambda rows: model(LENGTHS[rows]), np.arange(len(LENGTHS)), torch.optim.AdamW)
    assert found.explains
    assert found.peak_bytes == pytest.approx(peak, rel=0.03)
    assert found.fits(1.1 * peak) is True


def test_sums_do_not_explain_padded_sentences_and_say_so() -> None:
    model = Sentences()
    found = predict_peak(model, LENGTHS, loss_of=lambda rows: model(LENGTHS[rows]))
    assert not found.explains
    assert found.fits(2**50) is None


def test_a_loss_that_compares_all_pairs_of_a_batch_is_noticed() -> None:
    model, x = perceptron(), torch.randn(64, 64)

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        codes = model(x[rows % 64])
        return torch.logsumexp(codes @ codes.T, dim=1).sum()

    assert predict_peak(model, 10_000, loss_of=loss_of).fits(2**50) is None


def test_where_the_optimizer_takes_most_its_step_is_the_peak() -> None:
    model = nn.Linear(1000, 1000)
    found = predict_peak(model, 1, loss_of=lambda rows: model(torch.zeros(len(rows), 1000)).sum())
    assert found.peak_bytes > 4.9 * 4 * 1000 * 1000


def test_the_model_is_left_as_it_was() -> None:
    model = perceptron()
    model[0].weight.grad = torch.ones(256, 64)
    before, generator = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    predict_peak(model, 100, loss_of=lambda rows: model(torch.randn(len(rows), 64)).sum())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(model[0].weight.grad, torch.ones(256, 64))
    assert model[3].weight.grad is None


def test_a_task_is_predicted_from_its_own_samples() -> None:
    task = LineTask()
    few, many = predict_peak(task, 10), predict_peak(task, 10_000)
    assert few.peak_bytes < many.peak_bytes
    assert predict_peak(task, task.train_rows[:10]).explains
    assert not few.notices


@pytest.mark.parametrize(
    "batch", [0, -1, True, 2.5, "many", [], [[1.0, float("nan")]], [-1.0], {}, {"nodes": []}, {"a": [1], "b": [1, 2]}]
)
def test_a_batch_that_is_none_is_refused(batch: Any) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ArgumentError, match=r"A batch is a number|A batch has at least one sample"):
        predict_peak(model, batch, loss_of=lambda rows: model(torch.zeros(len(rows), 1)).sum())


def test_a_model_needs_its_loss() -> None:
    with pytest.raises(ArgumentError, match="loss_of"):
        predict_peak(nn.Linear(1, 1), 8)


def sparse_or_dense(*, sparse: bool, target: str | None = None) -> PeakPrediction:
    model, words = nn.Sequential(nn.Embedding(10_000, 64, sparse=sparse), nn.Linear(64, 1)), torch.arange(400)
    loss_of: LossOf = lambda rows: model(words[torch.as_tensor(rows)]).square().sum()  # noqa: E731
    return predict_peak(model, 400, loss_of=loss_of, optimizer=torch.optim.SGD, target=target)


def test_sparse_gradients_are_in_the_interval_and_told() -> None:
    found, dense = sparse_or_dense(sparse=True), sparse_or_dense(sparse=False)
    weight_bytes = 10_000 * 64 * 4
    assert found.peak_bytes > 2 * weight_bytes
    assert found.tensors.least_bytes == pytest.approx(weight_bytes, abs=0.01 * weight_bytes)
    assert found.notices == ("Sparse gradients are predicted as dense ones: they may take 2.4 MiB less",)
    assert not dense.notices


@pytest.mark.parametrize("steps", [1, 3])
def test_sparse_gradients_that_are_added_up_grow_with_the_batches(steps: int) -> None:
    model = nn.Sequential(nn.EmbeddingBag(5000, 32, sparse=True), nn.Linear(32, 10))
    items = torch.randint(0, 5000, (256, 10), generator=torch.Generator().manual_seed(0))

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        loss: Tensor = model(items[rows]).square().sum()
        return loss

    found = predict_peak(model, 2000, loss_of=loss_of, optimizer="torch.optim.SGD", accumulation_steps=steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tracker = LiveStorageTracker(ENDLESS, list(model.parameters()))
    with tracker:
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(steps):
                loss_of(np.arange(2000) % 256).backward()
            optimizer.step()
    assert found.peak_bytes == pytest.approx(tracker.peak_bytes, rel=0.01)


class Bilinear(nn.Module):
    """Products of pairs: from some size on, the peak is at an instant whose memory grows faster."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((16, 16, 32), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,ijk,btj->btk", x, self.weight, x)


@pytest.mark.parametrize("size", [300, 2000, 20_000])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_peak_that_grows_faster_above_the_probes_is_predicted(size: int, precision: str) -> None:
    model, x = Bilinear(), torch.ones(256, 10, 16)

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss: Tensor = model(x[rows % 256]).square().sum()
        return loss

    found = predict_peak(model, size, loss_of=loss_of, precision=precision)
    peak = measured(model, loss_of, np.arange(size), torch.optim.AdamW)
    assert found.explains
    assert found.peak_bytes == pytest.approx(peak, rel=0.01)
    assert (found.fits(0.98 * peak), found.fits(1.02 * peak)) == (False, True)


def test_a_batch_of_a_billion_samples_is_predicted_from_few() -> None:
    model, x, sizes = nn.Sequential(nn.Linear(16, 64), nn.Tanh()), torch.ones(256, 16), list[int]()

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        sizes.append(len(rows))
        loss: Tensor = model(x[rows]).square().sum()
        return loss

    small, large = (predict_peak(model, size, loss_of=loss_of) for size in (10**6, 10**9))
    assert large.explains
    assert large.peak_bytes == pytest.approx(1000 * small.peak_bytes, rel=0.01)
    assert max(sizes) * 64 * 4 <= 2 * 64 * 2**20


def test_sparse_gradients_are_recorded_for_a_card(dispatched: None) -> None:
    found, dense = sparse_or_dense(sparse=True, target="t4"), sparse_or_dense(sparse=False, target="t4")
    assert found.tensors.most_bytes < dense.tensors.least_bytes - 0.8 * 10_000 * 64 * 4
    assert not found.notices


def test_the_entries_of_a_sparse_gradient_are_recorded_until_the_gradient_ends(dispatched: None) -> None:
    tables = nn.ModuleList(nn.Embedding(10_000, 64, sparse=True) for _ in range(4))
    tokens = torch.randint(0, 10_000, (64, 100))
    found = predict_peak(tables, 64, loss_of=lambda rows: sum(table(tokens[rows]).mul(2).sum() for table in tables),
                         optimizer=partial(torch.optim.SGD, lr=0.1), target="t4")  # fmt: skip
    # Four tables, and the gradients of all.
    assert found.tensors.least_bytes > 4 * (10_000 + 64 * 100) * 64 * 4
    assert not found.notices


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_that_cannot_be_measured_is_told(optimizer: Any) -> None:
    model = nn.Linear(8, 1)
    with pytest.raises(ArgumentError, match="steps on dense gradients, without a closure"):
        predict_peak(model, 4, loss_of=lambda rows: model(torch.ones(len(rows), 8)).sum(), optimizer=optimizer)


DATA = torch.zeros(64, 64)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, momentum=0.9)


class NeedsRate(torch.optim.SGD):
    """An optimizer without a default learning rate, as many packages have them."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ("adamw", torch.optim.AdamW),
        ("torch.optim.Adam", torch.optim.Adam),
        ("NAdam", torch.optim.NAdam),
        ("sgd", lambda p: torch.optim.SGD(p, momentum=0.9)),
        ("torch.optim.SGD", torch.optim.SGD),
        ("torch.optim.adagrad.Adagrad", torch.optim.Adagrad),
        ("lion.py:Lion", torch.optim.RMSprop),
        ("folder/lion.py:make", rmsprop),
        (NeedsRate, lambda p: torch.optim.SGD(p, momentum=0.9)),
    ],
)
@pytest.mark.parametrize("target", [None, "t4"], ids=["on the CPU", "for a card"])
def test_an_optimizer_is_given_by_its_name_its_class_or_a_function(
    given: Any, same: Any, target: str | None, dispatched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    for file in (tmp_path / "lion.py", tmp_path / "folder" / "lion.py"):
        file.write_text(
            "import torch\nclass Lion(torch.optim.RMSprop): ...\n"
            "def make(parameters): return torch.optim.RMSprop(parameters, momentum=0.9)\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    model = nn.Linear(64, 64)
    named, expected = (of_target(model, 4, optimizer=optimizer, target=target) for optimizer in (given, same))
    assert named.peak_bytes == expected.peak_bytes
    assert not named.notices


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    decayed = {id(each) for each in model.parameters() if each.dim() > 1}
    groups = [[each for each in model.parameters() if (id(each) in decayed) is chosen] for chosen in (True, False)]
    return torch.optim.AdamW([{"params": group, "weight_decay": 0.1 * len(group)} for group in groups])


def marked(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in parameters if each.is_marked])


@pytest.mark.parametrize("target", [None, "t4"], ids=["on the CPU", "for a card"])
def test_a_function_makes_an_optimizer_of_the_models_own_parameters(target: str | None, dispatched: None) -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 10))
    for each in model.parameters():
        each.is_marked = True  # type: ignore[attr-defined]
    weights = list(model.parameters())
    expected = of_target(model, 4, target=target)
    for make in (lambda _: groups_of(model), marked):
        found = of_target(model, 4, optimizer=make, target=target)
        # A group of biases is stepped by itself.
        assert found.tensors.num_bytes == pytest.approx(expected.tensors.num_bytes, rel=0.01)
        assert found.notices == expected.notices
    assert all(map(is_, model.parameters(), weights))


@pytest.mark.parametrize("target", [None, "t4"], ids=["on the CPU", "for a card"])
def test_an_optimizer_of_other_parameters_is_refused(target: str | None, dispatched: None) -> None:
    model = nn.Linear(64, 64)
    earlier = torch.optim.AdamW(nn.Linear(64, 64).parameters())
    with pytest.raises(ArgumentError, match=r"(?s)or that the model has then: it steps none of them\..*lambda param"):
        of_target(model, 4, optimizer=lambda _: earlier, target=target)


@pytest.mark.parametrize("target", [None, "t4"], ids=["on the CPU", "for a card"])
def test_a_module_beside_the_model_is_on_the_gpu_too(target: str | None, dispatched: None) -> None:
    student, teacher = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 64))
    teacher.eval().requires_grad_(False)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = student, teacher

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = teacher(x)
            error: Tensor = (student(x) - wanted).square().sum()
            return error

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        return Both.forward(both, DATA[rows % 64])

    both = Both()
    beside = predict_peak(student, 2000, loss_of=loss_of, target=target)
    inside = predict_peak(both, 2000, loss_of=lambda rows: both(DATA[rows % 64]), target=target)
    # In one module, the batch goes to the GPU once.
    assert beside.tensors.num_bytes == pytest.approx(inside.tensors.num_bytes, abs=2 * 2000 * 64 * 4)
    assert not teacher._forward_pre_hooks
    if target:
        weights = {part.module for part in beside.parts if part.kind == WEIGHTS}
        assert weights == {"Linear", "Sequential.0", "Sequential.1", "Sequential.2"}


@pytest.mark.parametrize("target", [None, "t4"], ids=["on the CPU", "for a card"])
def test_parameters_that_hooks_step_in_the_backward_pass_keep_no_gradients(
    target: str | None, dispatched: None
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(64)))
    plain = of_target(model, 4, optimizer="torch.optim.SGD", target=target)
    steps = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step(parameter: Tensor) -> None:
        steps[parameter].step()  # type: ignore[index]
        steps[parameter].zero_grad()  # type: ignore[index]

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    before = [each.detach().clone() for each in model.parameters()]
    found = of_target(model, 4, optimizer="torch.optim.SGD", target=target)
    size = sum(each.nbytes for each in model.parameters())
    assert found.peak_bytes < plain.peak_bytes - 0.9 * size
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("target", [None, "t4"], ids=["on the CPU", "for a card"])
def test_a_parameter_of_no_module_is_counted_and_named(target: str | None, dispatched: None) -> None:
    model, scale = nn.Linear(64, 64), nn.Parameter(torch.ones(64, 4096))
    scale.grad = torch.ones_like(scale)
    alone = of_target(model, 8)
    found = predict_peak(model, 8, loss_of=lambda rows: (model(DATA[rows % 64]) @ scale).square().sum(), target=target)
    # The parameter and its gradient.
    assert found.tensors.num_bytes >= alone.tensors.num_bytes + 1.9 * scale.nbytes
    told = "cannot be recorded as CUDA would run it: RuntimeError: the loss trains a parameter of shape 64x4096"
    assert any(told in notice for notice in found.notices) is (target is not None)
    assert torch.equal(scale.grad, torch.ones_like(scale))


def test_hooks_of_tensors_run_for_a_card(dispatched: None) -> None:
    model, made = nn.Linear(64, 1024), list[Tensor]()
    plain = of_target(model, 4, optimizer="torch.optim.SGD", target="t4")
    model.weight.register_hook(lambda gradient: made.append(gradient.clone()))
    found = of_target(model, 4, optimizer="torch.optim.SGD", target="t4")
    assert found.tensors.num_bytes >= plain.tensors.num_bytes + model.weight.nbytes


@pytest.mark.parametrize("target", [None, "t4"], ids=["on the CPU", "for a card"])
def test_parameters_without_a_gradient_have_no_state_of_the_optimizer(target: str | None, dispatched: None) -> None:
    used, unused = nn.Linear(64, 64), nn.Linear(1024, 1024)
    whole = nn.ModuleDict({"used": used, "unused": unused})
    alone, found = (
        predict_peak(model, 4, loss_of=lambda rows: used(DATA[rows % 64]).square().sum(), target=target)
        for model in (used, whole)
    )
    size = sum(each.nbytes for each in unused.parameters())
    assert found.tensors.num_bytes == pytest.approx(alone.tensors.num_bytes + size, abs=4096)
    told = [notice for notice in found.notices if "4.0 MiB get no gradient in small batches" in notice]
    assert bool(told) is (target is None)


class NormSGD(torch.optim.SGD):
    """Reads the norm of a gradient before it steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if float(self.param_groups[0]["params"][0].grad.norm()) < 1e9:
            super().step()


@pytest.mark.parametrize(
    ("optimizer", "same"),
    [
        ("torch.optim.Adafactor", None),
        ("torch.optim.ASGD", None),
        (lambda parameters: NormSGD(parameters, momentum=0.9), lambda p: torch.optim.SGD(p, momentum=0.9)),
    ],
    ids=["Adafactor", "ASGD", "a norm"],
)
def test_an_optimizer_that_reads_numbers_is_recorded_for_a_card(optimizer: Any, same: Any, dispatched: None) -> None:
    model = nn.Linear(64, 4096)
    found = of_target(model, 4, optimizer=optimizer, target="t4")
    expected = of_target(model, 4, optimizer=same or optimizer, target="t4" if same else None)
    assert found.tensors.num_bytes == pytest.approx(expected.tensors.num_bytes, rel=0.02)
    assert not found.notices
    assert any("reads numbers from tensors on the GPU, which are taken as 1" in told for told in found.assumptions)


def test_a_packed_sequence_is_recorded_for_a_card(dispatched: None) -> None:
    model, x = nn.LSTM(64, 128, batch_first=True), torch.zeros(32, 20, 64)

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        lengths = torch.tensor([20 - int(row) % 5 for row in rows])
        packed = pack_padded_sequence(x[rows % 32], lengths, batch_first=True, enforce_sorted=False)
        total: Tensor = model(packed)[0].data.square().sum()
        return total

    found = predict_peak(model, 256, loss_of=loss_of, target="t4")
    assert not found.notices
    assert found.parts


class Flex(nn.Module):
    """Flex attention: as it is, or with a mask that is on the host."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.inner, self.bias, self.mask = nn.Linear(64, 192), nn.Parameter(torch.zeros(4)), None
        if masked:
            self.mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inner(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        attended: Tensor = flex_attention(query, key, value, lambda score, b, h, q, k: score + self.bias[h], self.mask)
        return attended.square().sum()


def test_flex_attention_is_recorded_without_scores(dispatched: None) -> None:
    model, x = Flex(masked=False), torch.zeros(8, 256, 64)
    found = predict_peak(model, 64, loss_of=lambda rows: model(x[rows % 8]), target="a100-40gb")
    assert found.tensors.num_bytes < 64 * 4 * 256 * 256 * 4
    assert "Flex attention is computed by the kernels that torch.compile makes of it" in found.assumptions[-1]


def test_a_step_that_runs_neither_for_a_card_nor_on_the_cpu_is_told_in_two_lines(dispatched: None) -> None:
    model, x = Flex(masked=True), torch.zeros(8, 256, 64)
    with pytest.raises(ArgumentError) as caught:
        predict_peak(model, 64, loss_of=lambda rows: model(x[rows % 8]), target="a100-40gb")
    fact, remedy = str(caught.value).splitlines()
    assert "on the same device but got cuda:0 and cpu; FlexAttention does not support backward on CPU" in fact
    assert "device" in remedy


def test_a_failure_that_has_nothing_to_do_with_values_does_not_blame_them(dispatched: None) -> None:
    model = nn.Linear(64, 64)

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        loss: Tensor = model(DATA[rows % 64]).square().sum()
        if loss.is_cuda:
            raise ValueError("no kernel")
        return loss

    found = predict_peak(model, 4, loss_of=loss_of, target="t4")
    assert found.notices[0].endswith("The program cannot be recorded as CUDA would run it: ValueError: no kernel")


WRONG: tuple[Any, ...] = (3, "x", 2.5, [], {"a": 1}, torch.ones(3), torch.device("cpu"), object())
ARGUMENTS = ("task_or_model", "loss_of", "optimizer", "training", "precision", "memory_format", "zero_grad",
             "accumulation_steps", "keep_gradients", "compile", "target", "allocator")  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_wrong_argument_of_a_prediction_is_told(name: str) -> None:
    model = nn.Linear(8, 2)
    good = {"task_or_model": model, "batch": 8, "loss_of": lambda rows: model(torch.ones(len(rows), 8)).sum()}
    if name == "allocator":
        good["target"] = "t4"
    for wrong in WRONG[name == "accumulation_steps" :]:
        with pytest.raises(CanTrainError, match=r"\n"):
            predict_peak(**{**good, name: wrong})


@pytest.mark.parametrize(
    ("loss_of", "message"),
    [
        (lambda computed: computed, r"a tensor of one number: a tensor of shape \(4, 2\)"),
        (lambda computed: 3.0, "a tensor of one number: 3.0"),
        (lambda computed: None, "a tensor of one number: None"),
        (lambda computed: computed.sum().detach(), "has a gradient: it needs none"),
    ],
    ids=["several numbers", "float", "None", "detached"],
)
@pytest.mark.parametrize("target", [None, "t4"], ids=["on the CPU", "for a card"])
def test_a_loss_without_a_gradient_is_told(loss_of: Any, message: str, target: str | None) -> None:
    model = nn.Linear(8, 2)
    with pytest.raises(ArgumentError, match=message):
        predict_peak(model, 4, loss_of=lambda rows: loss_of(model(torch.ones(len(rows), 8))), target=target)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), "has parameters: ReLU"),
        (nn.Sequential(nn.LazyLinear(3)), r"once the model has run: Sequential\.\nRun it on one sample before"),
        (nn.Linear(8, 2).requires_grad_(False), r"frozen\.\nThaw some"),
        (LineTask, "a model, or a task: .*an instance of a task"),
    ],
    ids=["no parameters", "lazy", "frozen", "class of a task"],
)
def test_a_model_that_cannot_be_trained_is_told(model: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"(?s){message}"):
        predict_peak(model, 8, loss_of=lambda rows: model(torch.ones(len(rows), 8)).sum())


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_precision_may_be_a_dtype(name: str, dtype: torch.dtype) -> None:
    model = perceptron()
    by_name, by_dtype = (of_target(model, 100, precision=precision) for precision in (name, dtype))
    assert by_name.peak_bytes == by_dtype.peak_bytes


def test_weights_of_64_bits_need_no_autocast() -> None:
    model = nn.Linear(64, 64).double()
    peaks = {
        predict_peak(
            model, 100, loss_of=lambda rows: model(torch.ones(len(rows), 64).double()).sum(), precision=precision
        ).peak_bytes
        for precision in ("fp32", "fp64", torch.float64)
    }
    assert len(peaks) == 1
    for wrong in (torch.float64, torch.int8, torch.float8_e5m2):
        with pytest.raises(ArgumentError, match="fp32, bf16, fp16; convert the weights"):
            of_target(perceptron(), 10, precision=wrong)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"precision": "bf16"}, r"precision is a setting of its training: 'bf16'\.\nGive training=.*precision="),
        ({"memory_format": torch.channels_last}, r"memory_format is a setting .*\n.*channels_last=True"),
        ({"loss_of": lambda rows: 1}, "computes its loss by itself: .*\nLeave loss_of out"),
        ({"training": {"precision": "bf16"}}, "training is a TrainingSettings"),
    ],
)
def test_an_argument_that_a_task_would_ignore_is_refused(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        predict_peak(LineTask(), 4, **argument)


def test_the_settings_of_a_task_are_refused_for_a_model() -> None:
    with pytest.raises(ArgumentError, match=r"A model has no settings of a training.*\nGive optimizer="):
        of_target(perceptron(), 10, training=TrainingSettings(precision="bf16"))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adamv", r"value of optimizer: 'adamv'\.\nNearest of 12: .*adamw"),
        ("lbfgs", r"optimizer cannot be lbfgs: .*\.\nTry optimizer='adamw'\.$"),
        ("no_such_package.Lion", "optimizer needs a package that is not installed: no_such_package"),
        ("no_such_file.py:Lion", r"(?s)no such file: .*optimizer='my_file.py:MyOptimizer'"),
        ("torch.nn.Linear", "torch.nn.Linear does not derive from torch.optim.Optimizer"),
        (3, "a name, a class, or a function that makes one from parameters: 3"),
        (int, "derives from torch.optim.Optimizer: int"),
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))]), r"a function .*: SGD \("),
    ],
    ids=str,
)
def test_what_is_no_optimizer_is_refused_with_what_to_give(optimizer: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        of_target(nn.Linear(64, 64), 4, optimizer=optimizer)
    assert "--optimizer" not in str(caught.value)


def test_a_function_that_makes_no_optimizer_is_told() -> None:
    with pytest.raises(ArgumentError, match=r"A function that makes an optimizer returns it: None\.\nGive "):
        of_target(nn.Linear(64, 64), 4, optimizer=lambda parameters: None)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "adagrad"])
def test_a_fused_optimizer_of_a_task_is_recorded_for_a_card(optimizer: str, dispatched: None) -> None:
    found = predict_peak(LineTask(), 4, training=TrainingSettings(optimizer=optimizer), target="t4")
    assert found.parts
    assert not [notice for notice in found.notices if "recorded" in notice]


def test_the_optimizer_of_a_task_is_one_of_its_settings() -> None:
    with pytest.raises(ArgumentError, match=r"training=TrainingSettings\(optimizer="):
        predict_peak(LineTask(), 4, optimizer="sgd")


def of_target(model: nn.Module, size: int, **others: Any) -> PeakPrediction:
    return predict_peak(model, size, loss_of=lambda rows: model(DATA[rows % 64]).square().sum(), **others)


@pytest.fixture
def dispatched() -> None:
    try:
        compiled_library()
    except NoCudaDispatchError as error:
        pytest.skip(f"CUDA's dispatch cannot be had here: {error.value}")


@pytest.mark.parametrize("size", [30, 20_000])
def test_a_plain_network_takes_of_a_card_what_it_takes_on_the_cpu(size: int, dispatched: None) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    found = of_target(model, size, target="rtx3090")

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        out: Tensor = model(DATA[rows % 64])
        return out.square().sum()

    assert found.tensors.num_bytes == pytest.approx(
        measured(model, loss_of, np.arange(size), torch.optim.AdamW), rel=0.03
    )
    assert not found.notices
    assert found.fits_card


def test_terms_add_up_and_lie_in_their_intervals(dispatched: None) -> None:
    found = of_target(perceptron(), 20_000, target="a100-40gb")
    least, most = found.interval_bytes
    assert least < found.peak_bytes + found.context.num_bytes <= found.device_bytes < most
    assert found.device_bytes == found.reserved_bytes + found.context.num_bytes
    for term in found.terms:
        assert term.least_bytes <= term.num_bytes <= term.most_bytes


def test_a_model_on_meta_is_predicted_for_a_card_and_refused_without_one(dispatched: None) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 10))

    with torch.device("meta"):
        model = build()
    assert of_target(model, 5_000, target="rtx3090") == of_target(build(), 5_000, target="rtx3090")
    with pytest.raises(ArgumentError, match="on meta has no memory"):
        of_target(model, 5_000)


def test_autocast_for_cuda_inside_the_loss_counts_as_much_as_the_precision(dispatched: None) -> None:
    model = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 10))

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            out: Tensor = model(DATA[rows % 64])
            return out.square().sum()

    inside = predict_peak(model, 20_000, loss_of=loss_of, target="rtx3090")
    assert inside == of_target(model, 20_000, target="rtx3090", precision="amp-fp16")
    assert inside.peak_bytes < 0.7 * of_target(model, 20_000, target="rtx3090").peak_bytes


def test_a_scripted_model_is_predicted_from_small_batches(dispatched: None) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    found = of_target(torch.jit.script(model), 20_000, target="rtx3090")
    assert "hook is not supported on ScriptModules" in found.notices[0]
    # TorchScript's own backward pass keeps more than PyTorch's.
    plain_bytes = of_target(model, 20_000).peak_bytes
    assert plain_bytes <= found.peak_bytes < 2 * plain_bytes


def test_both_predictions_are_read_alike(dispatched: None) -> None:
    model = perceptron()
    for found in (of_target(model, 20_000), of_target(model, 20_000, target="rtx3090")):
        least, most = found.interval_bytes
        assert least < sum(term.num_bytes for term in found.terms) == found.device_bytes < most
        assert found.fits(most)
        assert not found.fits(found.peak_bytes)
        assert "between" in str(found)
        assert sum(part.num_bytes for part in found.parts) == found.peak_bytes


def test_no_limits_follow_from_the_prediction_for_a_card(dispatched: None) -> None:
    found = of_target(perceptron(), 20_000, target="rtx3090")
    with pytest.raises(ArgumentError, match="Leave target out of predict_peak"):
        found.on_device("cpu-1gb", 2**30, 2**30)


def test_a_batch_that_is_too_large_for_a_card_does_not_fit_it(dispatched: None) -> None:
    model = nn.Linear(64, 2048)
    rows = 24 * 2**30 // (2048 * 4)
    assert of_target(model, rows // 6, target="rtx3090").fits_card
    assert not of_target(model, rows // 2, target="rtx3090").fits_card


def priced(sizes: Sequence[int], workspace: int = 0) -> PeakPrediction:
    """Of tensors of so many MiB, and then a workspace of cuDNN."""
    events = [(number, size * MIB) for number, size in enumerate(sizes)]
    used = [(len(events), workspace * MIB), (len(events), 0)] if workspace else []
    trace = AllocationTrace(events=[*events, *used], workspaces={len(events): CUDNN})
    return price_trace(trace, find_card("rtx3090"), PLAIN)


def test_memory_that_runs_out_takes_the_cache_and_not_the_tensors() -> None:
    card, events = find_card("a100-40gb"), []
    # Blocks that grow leave a cache that is of no use to the next one.
    for number, gib in enumerate((8, 9, 10, 11, 12)):
        events += [(number, gib * GIB), (number, 0)]
    found = price_trace(AllocationTrace(events=events, workspaces={}), card, PLAIN)
    assert found.fits_card
    assert found.peak_bytes == 12 * GIB
    assert found.device_bytes <= card.total_bytes


@pytest.mark.parametrize("operations", SPREADS)
def test_the_interval_of_a_card_is_the_spread_of_what_was_measured(operations: str) -> None:
    trace = AllocationTrace(events=[(0, 1000 * MIB), (1, 40 * MIB)], workspaces={1: CUDNN})
    found = price_trace(trace, find_card("a100-40gb"), PLAIN, operations=operations)
    spread = SPREADS[operations]
    least, most = (end - context for end, context in zip(
        found.interval_bytes, (found.context.least_bytes, found.context.most_bytes), strict=True
    ))  # fmt: skip
    reserved, unit = 1040 * MIB, (1040 + 32) * MIB
    scratch = 40 * MIB if operations == RECURRENT else 0
    assert least == pytest.approx(reserved - spread.less * unit - scratch)
    assert most == pytest.approx(reserved + spread.more * unit + 2 * scratch)
    assert sum(term.num_bytes for term in found.terms) == found.device_bytes
    assert f"networks whose memory {operations} decide" in str(found)


@pytest.mark.parametrize(
    ("build", "shape", "precision", "is_widened"),
    [
        (lambda: nn.Conv2d(8, 8, 3, padding=1), (8, 32, 32), "fp32", False),
        (lambda: nn.Conv2d(8, 8, 3, padding=1), (8, 32, 32), "fp16", True),
        (lambda: nn.Conv3d(8, 8, 3, padding=1), (8, 8, 16, 8), "fp32", True),
        (lambda: nn.Linear(32, 8), (8, 32, 32), "fp16", False),
    ],
)
def test_workspaces_that_nobody_has_measured_widen_the_interval(
    build: Callable[[], nn.Module], shape: tuple[int, ...], precision: str, is_widened: bool, dispatched: None
) -> None:
    model = build()
    found = predict_peak(
        model, 64, loss_of=lambda rows: model(torch.zeros(len(rows), *shape)).float().sum(), target="t4",
        precision=precision,
    )  # fmt: skip
    _, more = SPREADS[operations_of(model)].around(found.reserved_bytes)
    # Three times the largest result of the convolution.
    wider = 3 * 64 * 8 * 1024 * (2 if precision == "fp16" else 4) if is_widened else 0
    assert found.spread.most_bytes == pytest.approx(more + wider)
    assert ("not measured" in str(found)) == is_widened


@pytest.mark.parametrize(("card", "is_widened"), [("h100-80gb", True), ("a100-40gb", False)])
def test_attention_of_cudnn_is_not_measured_where_pytorch_prefers_it(
    card: str, is_widened: bool, dispatched: None
) -> None:
    model = Attention()
    found = predict_peak(
        model, 16, loss_of=lambda rows: model(torch.zeros(len(rows), 64)).float().sum(), target=card,
        precision="bf16",
    )  # fmt: skip
    assert ("cuDNN's attention" in str(found)) == is_widened
    assert (found.spread.most_bytes > SPREADS[ATTENTION].around(found.reserved_bytes)[1]) == is_widened


def vision_transformer() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), *(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)))


@pytest.mark.parametrize(
    ("build", "operations"),
    [
        (perceptron, PRODUCTS),
        (vision_transformer, ATTENTION),
        (lambda: nn.Sequential(nn.Embedding(8, 8), nn.GRU(8, 8), nn.Linear(8, 8)), RECURRENT),
        (lambda: nn.LSTMCell(8, 8), RECURRENT),
        # The first layer has a single channel, and the classes have most of the weights.
        (lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 900)), DENSE_CONVOLUTIONS),
        (lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1), nn.Linear(8, 9)), OTHER_CONVOLUTIONS),
    ],
)
def test_the_spread_follows_the_operations_of_a_network(build: Callable[[], nn.Module], operations: str) -> None:
    assert operations_of(build()) == operations


def test_what_fits_only_beside_the_context_that_is_assumed_does_not_surely_fit() -> None:
    assert priced([22_300]).fits_card
    assert not priced([22_600]).fits_card


def test_padded_lengths_may_decide_shapes_for_a_card(dispatched: None) -> None:
    model = Sentences()
    found = predict_peak(model, PADDED, loss_of=lambda rows: model(LENGTHS[rows]), target="rtx3090")
    peak = measured(model, lambda rows: model(LENGTHS[rows]), np.arange(len(LENGTHS)), torch.optim.AdamW)
    assert not found.notices
    assert found.tensors.num_bytes == pytest.approx(peak, rel=0.05)


def test_without_a_compiler_the_cpu_predicts_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    model = perceptron()
    found = of_target(model, 20_000, target="rtx3090")
    assert "small batches on the CPU" in found.notices[0]
    assert found.tensors.num_bytes == of_target(model, 20_000).peak_bytes
    assert found.interval_bytes[0] < 0.9 * found.device_bytes
    with torch.device("meta"), pytest.raises(ArgumentError, match="from the allocations of CUDA"):
        of_target(nn.Linear(64, 64), 100, target="rtx3090")


def test_precisions_and_targets_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ArgumentError, match="fp32, bf16, fp16"):
        of_target(perceptron(), 10, precision="fp64")
    with pytest.raises(ConfigError, match="target='16GiB'"):
        of_target(perceptron(), 10, target="rtx30900")


def test_a_card_may_be_named_by_its_memory(dispatched: None) -> None:
    assert of_target(perceptron(), 10, target="16GiB").card.total_bytes == 16 * 2**30


class Attention(nn.Module):
    """Attends in bf16, for which older generations have no fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).view(len(x), 1, 1, 64).expand(-1, 1, 256, 64)
        return nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)


def test_a_card_named_by_its_memory_takes_as_much_as_the_worst_generation(dispatched: None) -> None:
    found, t4, h100 = (
        of_target(Attention(), 200, precision="bf16", target=name) for name in ("15GiB", "t4", "h100-80gb")
    )
    assert t4.peak_bytes > 1.5 * h100.peak_bytes
    assert found.peak_bytes >= t4.peak_bytes
    assert found.tensors.least_bytes <= h100.tensors.num_bytes
    assert found.tensors.most_bytes >= t4.tensors.num_bytes
    told = found.assumptions[1]
    assert told.startswith("A GPU that is named by its memory may be of any generation: ")
    assert told.endswith(" less")


def test_a_slice_takes_as_much_as_its_gpu_and_has_less_room(dispatched: None) -> None:
    part, whole = (of_target(perceptron(), 500, target=target) for target in ("a100_1g.5gb", "a100-40gb"))
    assert part.tensors == whole.tensors
    assert part.card.total_bytes < whole.card.total_bytes / 8


def test_an_amd_gpu_is_predicted_from_small_batches_and_says_why() -> None:
    found = of_target(perceptron(), 500, target="mi300x")
    assert found.card.key == "amd-instinct-mi300x-192gb"
    assert "ROCm's kernels" in found.notices[0]
    assert found.context.what.startswith("HIP")


def test_a_precision_counts_without_a_target_too() -> None:
    model = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 10))
    assert of_target(model, 20_000, precision="bf16").peak_bytes < 0.7 * of_target(model, 20_000).peak_bytes


class ReadsNumbers(nn.Linear):
    """Goes on with the samples whose first output is positive, which NumPy finds."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found[torch.from_numpy(found[:, 0].detach().numpy() > 0)]


def test_what_reads_values_outside_of_torch_is_predicted_on_the_cpu_and_says_so(dispatched: None) -> None:
    model = ReadsNumbers(8, 8)
    found = predict_peak(model, 500, loss_of=lambda rows: model(torch.ones(len(rows), 8)).sum(), target="t4")
    assert "small batches on the CPU" in found.notices[0]
    assert found.tensors.least_bytes < found.tensors.num_bytes < found.tensors.most_bytes


class Experts(nn.Module):
    """Sends each token to the best two of four networks, by boolean masks, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(32, 4) for _ in range(2))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(2 * 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        for layer, gate in enumerate(self.gates):
            weights, chosen = gate(tokens).softmax(-1).topk(2)
            mixed = torch.zeros_like(tokens)
            for number in range(4):
                mask = chosen == number
                has_token = mask.any(-1)
                if has_token.any():
                    weight = (weights * mask).sum(-1)[has_token, None]
                    mixed[has_token] += weight * self.experts[4 * layer + number](tokens[has_token])
            tokens = tokens + mixed
        return tokens


class Detector(nn.Module):
    """Classifies the places of an image that score best, image by image and then all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.ReLU())
        self.score, self.box, self.classes = nn.Conv2d(32, 1, 1), nn.Linear(32, 4), nn.Linear(32, 400)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images)
        scores = self.score(features).squeeze(1)
        boxes = []
        for number in range(len(images)):
            rows, columns = (scores[number] > scores[number].mean()).nonzero(as_tuple=True)
            boxes.append(self.box(features[number][:, rows, columns].T))
        kept = torch.cat(boxes)
        image, row, column = torch.where(scores > scores.mean())
        count = int((scores > scores.mean()).sum())
        return self.classes(features[image, :, row, column]).square().sum() / count + kept.square().mean()


# As torchvision's `nms`: the size of its result depends on values, and it has no tag that says so.
_operators = torch.library.Library("can_train_tests", "DEF")
_operators.define("above_mean(Tensor scores) -> Tensor")
_operators.impl("above_mean", lambda scores: (scores > scores.mean()).nonzero().squeeze(1), "CPU")


@torch.library.register_fake("can_train_tests::above_mean", lib=_operators)
def _above_mean(scores: Tensor) -> Tensor:
    return scores.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


class Proposals(nn.Module):
    """Classifies 32 places of each image in two stages, as torchvision's R-CNN does: both choose by the same lines."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = nn.Conv2d(3, 32, 5, stride=2, padding=2), nn.Conv2d(32, 1, 1)
        self.first, self.second = nn.Linear(32, 400), nn.Linear(32, 400)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images).flatten(2).transpose(1, 2)
        scores = self.score(self.body(images)).flatten(1)
        first = [each[self.chosen(score)] for each, score in zip(features, scores, strict=True)]
        kept = [torch.ops.can_train_tests.above_mean(score.detach()) for score in scores]
        second = [
            each[places][self.chosen(score[places])] for each, score, places in zip(features, scores, kept, strict=True)
        ]
        return self.first(torch.cat(first)).square().mean() + self.second(torch.cat(second)).square().mean()

    def chosen(self, score: Tensor) -> Tensor:
        picked = torch.zeros(len(score), dtype=torch.bool, device=score.device)
        picked[(score > score.mean()).nonzero().squeeze(1)[:32]] = True
        return picked.nonzero().squeeze(1)


class SortedExperts(Experts):
    """Sorts the tokens by their experts, whose numbers of tokens it reads as a list."""

    def __init__(self) -> None:
        super().__init__()
        # One layer.
        del self.gates[1], self.experts[4:]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gates[0](tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=4).tolist()
        parts = tokens[order // 2].split(counts)
        mixed = torch.cat([expert(part) for expert, part in zip(self.experts[:4], parts, strict=True)])
        return torch.zeros_like(tokens).index_add(0, order // 2, mixed * weights.flatten()[order, None])


_drawn = torch.Generator().manual_seed(0)
TOKENS, IMAGES = torch.randn(64, 20, 32, generator=_drawn), torch.randn(64, 3, 24, 24, generator=_drawn)
CHOOSING: dict[str, Callable[[], tuple[nn.Module, LossOf]]] = {
    "experts": lambda: (model := Experts(), lambda rows: model(TOKENS[rows]).square().sum()),
    "sorted experts": lambda: (model := SortedExperts(), lambda rows: model(TOKENS[rows]).square().sum()),
    "detector": lambda: (model := Detector(), lambda rows: model(IMAGES[rows])),
    "proposals": lambda: (model := Proposals(), lambda rows: model(IMAGES[rows])),
}


def choosing(name: str) -> tuple[PeakPrediction, int]:
    """The prediction of a model whose sizes depend on values, and its peak with these values."""
    torch.manual_seed(0)
    model, loss_of = CHOOSING[name]()
    found = predict_peak(model, 64, loss_of=loss_of, target="t4")
    return found, measured(model, loss_of, np.arange(64), torch.optim.AdamW)


@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.parametrize(("seconds", "step"), [(60.0, 64), (0.0, 4)])
def test_sizes_that_depend_on_values_are_those_of_a_step_on_the_cpu(
    name: str, seconds: float, step: int, dispatched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_limits, "_READ_S", seconds)
    found, peak = choosing(name)
    assert not found.notices
    assert f"sizes of a step of {step} samples on the CPU" in found.assumptions[1]
    assert ("in proportion" in found.assumptions[1]) == (step < 64)
    # The first 4 samples choose somewhat less or more than all of them.
    assert found.tensors.num_bytes == pytest.approx(peak, rel=0.01 if step == 64 else 0.05)
    assert found.tensors.least_bytes < peak < found.tensors.most_bytes


def test_sizes_of_another_loop_over_samples_are_noticed(dispatched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_limits, "_READ_S", 0.0)
    monkeypatch.setattr(value_sizes, "_like", lambda uses, numel, index: (uses[index % len(uses)],) * 2)
    found, peak = choosing("proposals")
    assert found.notices or found.tensors.num_bytes != pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("name", [name for name in CHOOSING if name != "proposals"])
def test_sizes_that_are_not_scaled_are_noticed(name: str, dispatched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_limits, "_READ_S", 0.0)
    monkeypatch.setattr(value_sizes, "_count", lambda first, second, places: second)
    found, peak = choosing(name)
    assert found.notices or found.tensors.num_bytes != pytest.approx(peak, rel=0.05)


class Gated(nn.Module):
    """A wide network computes the tokens that a gate chooses, which the bias decides: all of them, or none."""

    def __init__(self, bias: float, chosen: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.gate, self.wide = nn.Linear(32, 64), nn.Linear(64, 1), nn.Linear(64, 1024)
        nn.init.constant_(self.gate.bias, bias)
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x).flatten(0, 1)
        return torch.tanh(self.wide(hidden[self.chosen(self.gate(hidden)[:, 0])])).sum() + hidden.sum()


MANY_TOKENS = torch.randn(1024, 16, 32, generator=_drawn)
# Masks, positions, and numbers that no operation returns.
CHOOSING_TOKENS: dict[str, Callable[[Tensor], Any]] = {
    "mask": lambda scores: scores > 4,
    "positions": lambda scores: (scores > 4).nonzero()[:, 0],
    "number": lambda scores: slice(int((scores > 4).sum())),
    "list": lambda scores: [place for place, score in enumerate(scores.tolist()) if score > 4],
    "array": lambda scores: slice(int((scores.detach().numpy() > 4).sum())),
}


@pytest.mark.parametrize("name", CHOOSING_TOKENS)
@pytest.mark.parametrize("bias", [6.0, -6.0])
def test_sizes_that_depend_on_values_are_computed_without_a_card(name: str, bias: float) -> None:
    torch.manual_seed(0)
    model = Gated(bias, CHOOSING_TOKENS[name])

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        loss: Tensor = model(MANY_TOKENS[rows])
        return loss

    found = predict_peak(model, 1024, loss_of=loss_of)
    peak = measured(model, loss_of, np.arange(1024), torch.optim.AdamW)
    assert found.peak_bytes == pytest.approx(peak, rel=0.02)
    assert found.assumptions[0].startswith("Some sizes depend on values")
    assert not {"tolist", "numpy"} & vars(Tensor).keys()
    least, most = found.interval_bytes
    assert most - least > 0.15 * peak


def test_sizes_of_a_task_that_depend_on_values_are_computed_without_a_card() -> None:
    class GatedTask(PositiveTask):
        def build_model(self) -> nn.Module:
            first = nn.Linear(4, 64)
            nn.init.constant_(first.bias, 100.0)
            return nn.Sequential(nn.Linear(4, 2**15), nn.Linear(2**15, 4), first, Chosen(), nn.Linear(64, 1))

    assert "small batches that are computed" in predict_peak(GatedTask(), 60).assumptions[0]


def test_sizes_of_masks_that_are_data_are_drawn_beside() -> None:
    mask, model = MANY_TOKENS[..., 0] > 0, nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        is_real = mask[rows]
        assert is_real.any()
        loss: Tensor = model(MANY_TOKENS[rows])[is_real].square().sum()
        return loss if MANY_TOKENS[rows].sum().item() else 2 * loss

    found = predict_peak(model, 1024, loss_of=loss_of)
    assert not any("values" in told for told in found.assumptions)
    peak = measured(model, loss_of, np.arange(1024), torch.optim.AdamW)
    assert found.peak_bytes == pytest.approx(peak, rel=0.05)


class PositiveTask(LineTask):
    """Goes on with the points whose first hidden number is positive."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), Chosen(), nn.Linear(64, 1))


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self._chosen(x)
        except Exception as error:
            # As the code of a task is run.
            raise TaskError("It failed", error) from error

    def _chosen(self, x: Tensor) -> Tensor:
        # Every other number is as before. A branch depends on a value, too.
        if not (x[:, 0] > 0).any():
            return x
        return x.index_put((x[:, 0] > 0,), x[x[:, 0] > 0].exp())


def test_sizes_of_a_task_depend_on_values(dispatched: None) -> None:
    found = predict_peak(PositiveTask(), 60, target="t4")
    assert "sizes of a step of 60 samples on the CPU" in found.assumptions[1]
    assert not found.notices


def test_counts_are_in_proportion_constant_or_on_a_line() -> None:
    count = value_sizes._count
    assert count(60, 130, (2, 4, 64)) == 130 * 16
    assert count(8, 8, (2, 4, 64)) == 8
    # Two more with each sample, which no noise of 3 standard deviations makes of a proportion.
    assert count(10_004, 10_008, (2, 4, 64)) == 10_128
    assert count(5, 5, (4, 4, 4)) == 5
    assert count(0, 0, (2, 4, 64)) == 0


def test_what_cudnn_keeps_of_a_recurrent_layer_is_a_saved_activation_and_its_scratch_an_interval(
    dispatched: None,
) -> None:
    model, outputs = nn.LSTM(64, 64), 500 * 50 * 64 * 4
    found = predict_peak(model, 500, loss_of=lambda rows: model(torch.zeros(50, len(rows), 64))[0].sum(), target="t4")
    assert not found.notices
    (cudnn,) = (term for term in found.workspaces if term.what == CUDNN)
    # Of one layer cuDNN keeps 5 numbers for each number of the output, beside the output, and the states before and
    # after it.
    saved = sum(part.num_bytes for part in found.parts if (part.kind, part.module) == (SAVED, "LSTM"))
    assert saved == (5 + 1) * outputs + 4 * 500 * 64 * 4
    # It works with 6, and with memory that does not grow with the batch.
    of_any_batch = 8 * 2**20 + sum(parameter.nbytes for parameter in model.parameters())
    assert cudnn.num_bytes == pytest.approx(6 * outputs + of_any_batch, rel=0.01)
    # Only that is uncertain: bytes that are kept are no part of the interval.
    assert found.tensors.least_bytes == found.tensors.num_bytes > saved
    assert cudnn.least_bytes == 0
    assert cudnn.num_bytes < cudnn.most_bytes < 3 * (6 * outputs + of_any_batch) * 1.01


@pytest.mark.parametrize("batch", [20_000, [3] * 20_000], ids=["a number", "rows"])
def test_a_task_is_predicted_for_a_card(batch: Any, dispatched: None) -> None:
    task = LineTask()
    found, near = predict_peak(task, batch, target="t4"), predict_peak(task, batch)
    assert not found.notices
    assert found.tensors.num_bytes == pytest.approx(near.peak_bytes, rel=0.02)
    for either in (found, near):
        assert sum(part.num_bytes for part in either.parts) == either.peak_bytes


def test_a_compiled_step_is_predicted_as_it_is_from_small_batches_with_an_interval_that_reaches_lower() -> None:
    plain = predict_peak(LineTask(), 30)
    found = predict_peak(LineTask(), 30, training=TrainingSettings(compile="default"))
    assert found.peak_bytes == plain.peak_bytes
    assert found.interval_bytes[0] == pytest.approx(plain.interval_bytes[0] - 0.2 * plain.tensors.least_bytes)
    assert found.interval_bytes[1] == plain.interval_bytes[1]
    assert "compiled, it takes up to 20% less" in found.notices[-1]


class Waves(nn.Module):
    """Functions of a product: eager PyTorch saves what each of them needs, and compiled code computes it again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.linear(x)
        return product.sin().cos().tanh()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("how", ["asked for", "in place", "wrapped", "a part"])
def test_the_graphs_of_a_compiled_model_are_recorded_for_a_card(how: str, dispatched: None) -> None:
    size, model = 50_000, Waves()
    model.compile() if how == "in place" else None
    called: Any = torch.compile(model) if how == "wrapped" else model
    if how == "a part":
        called = nn.Sequential(model)
        model.compile()

    def predict(**options: Any) -> PeakPrediction:
        return predict_peak(
            called, size, loss_of=lambda rows: called(torch.zeros(len(rows), 64)).sum(), target="t4", **options
        )

    found = predict(compile=True) if how == "asked for" else predict()
    each = size * 64 * 4
    # The input, the product, the result, which the backward pass uses, and its gradient.
    assert found.tensors.least_bytes == pytest.approx(4 * each, rel=0.01)
    # Eager PyTorch saves the sine, too.
    assert found.tensors.most_bytes >= 5 * each
    assert found.tensors.least_bytes < found.tensors.num_bytes <= found.tensors.most_bytes
    assert any(sentence.startswith("torch.compile's graphs peak at ") for sentence in found.assumptions)
    assert not found.notices
    assert sum(part.num_bytes for part in found.parts) == found.peak_bytes
    if how == "asked for":
        plain = predict()
        assert plain.tensors.least_bytes == plain.tensors.num_bytes >= 5 * each
        assert model._compiled_call_impl is None


def test_a_task_that_is_compiled_is_recorded_for_a_card(dispatched: None) -> None:
    plain = predict_peak(LineTask(), 20_000, target="t4")
    found = predict_peak(LineTask(), 20_000, training=TrainingSettings(compile="default"), target="t4")
    assert found.tensors.least_bytes <= plain.tensors.num_bytes <= found.tensors.most_bytes
    assert any("torch.compile's graphs peak at" in sentence for sentence in found.assumptions)
    assert not found.notices


def test_a_task_is_compiled_by_its_settings() -> None:
    with pytest.raises(ArgumentError, match=r'compiled by a setting of its training[^"]*compile="default"'):
        predict_peak(LineTask(), 30, compile=True)


@pytest.mark.parametrize("target", [None, "t4"], ids=["on the CPU", "for a card"])
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["wrapped", "in place"])
def test_a_compiled_model_of_a_loop_is_predicted_as_it_is_and_stays_compiled(
    target: str | None,
    is_wrapped: bool,
    dispatched: None,
) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sin()

    plain, compiled, x = Net(64, 64), Net(64, 64), torch.zeros(128, 64)
    called: Any = torch.compile(compiled, backend=backend) if is_wrapped else compiled
    if not is_wrapped:
        compiled.compile(backend=backend)
    found, expected = (
        predict_peak(model, 128, loss_of=lambda rows, model=model: model(x[rows]).sum(), target=target)
        for model in (called, plain)
    )
    assert found.peak_bytes == expected.peak_bytes
    assert "compiled" in found.notices[-1]
    assert not graphs
    called(x)
    assert len(graphs) == 1


@pytest.mark.parametrize("target", [None, "t4"], ids=["on the CPU", "for a card"])
@pytest.mark.parametrize(
    ("layer", "memory_format"), [(nn.Conv2d, torch.channels_last), (nn.Conv3d, torch.channels_last_3d)]
)
def test_images_and_volumes_have_the_format_that_is_asked_for(
    layer: Any, memory_format: torch.memory_format, target: str | None, dispatched: None
) -> None:
    formats = []

    class Seen(layer):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            formats.append(x.is_contiguous(memory_format=memory_format))
            found: Tensor = super().forward(x)
            # A child process has its own list.
            assert formats[-1]
            assert layer is nn.Conv3d or found.is_contiguous(memory_format=memory_format)
            return found

    model, images = Seen(8, 8, 3), torch.zeros(16, 8, *[12] * (2 if layer is nn.Conv2d else 3))
    found = predict_peak(
        model, 16, loss_of=lambda rows: model(images[rows]).sum(), memory_format=memory_format, target=target
    )
    assert all(formats)
    assert bool(formats) == (target is None)
    assert not found.notices
    assert model(images.contiguous(memory_format=memory_format)).shape[1] == 8
    assert not model._forward_pre_hooks


def test_images_are_left_as_they_are_where_a_format_of_volumes_is_asked_for() -> None:
    model, images = nn.Conv2d(4, 8, 3), torch.zeros(8, 4, 16, 16)
    found, plain = (
        predict_peak(model, 8, loss_of=lambda rows: model(images[rows]).sum(), memory_format=memory_format)
        for memory_format in (torch.channels_last_3d, torch.preserve_format)
    )
    assert found.peak_bytes == plain.peak_bytes


def in_loop(
    model: nn.Module, loss_of: LossOf, rows: NDArray[np.int64], zero_grad: str, steps: int, keep: bool
) -> tuple[int, float]:
    """The peak of a loop with SGD, and the bytes of its gradients."""
    optimizer, parameters = torch.optim.SGD(model.parameters(), foreach=True), list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.zero_grad(set_to_none=not keep)
    tracker = LiveStorageTracker(ENDLESS, [*parameters, *model.buffers()])
    with tracker:
        for _ in range(2):
            if zero_grad == "before":
                optimizer.zero_grad(set_to_none=not keep)
            for number in range(steps):
                loss = loss_of(rows)
                if zero_grad == "after" and not number:
                    optimizer.zero_grad(set_to_none=not keep)
                loss.backward()
            optimizer.step()
    return tracker.peak_bytes, sum(parameter.nbytes for parameter in parameters)


LOOPS = [("before", 1, False), ("after", 1, False), ("before", 3, False), ("after", 3, False), ("before", 1, True)]


@pytest.mark.parametrize(("zero_grad", "steps", "keep"), LOOPS)
@pytest.mark.parametrize("target", [None, "t4"], ids=["on the CPU", "for a card"])
@pytest.mark.parametrize(("size", "repeats"), [(160, 15), (6_000, 15), (160, 0)])
def test_gradients_are_alive_as_in_the_callers_loop(
    zero_grad: str, steps: int, keep: bool, target: str | None, size: int, repeats: int, dispatched: None
) -> None:
    model = nn.Sequential(
        nn.Linear(64, 256, bias=False), nn.Linear(256, 256, bias=False), nn.Linear(256, 64, bias=False), nn.ReLU()
    )

    def loss_of(rows: NDArray[np.int64]) -> Tensor:
        out: Tensor = model(DATA[rows % 64])
        # With a large metric beside the loss, the peak is in the forward pass.
        metric = out.detach().repeat(1, repeats).sum()
        return out.square().sum() + metric

    loop: dict[str, Any] = {"zero_grad": zero_grad, "accumulation_steps": steps, "keep_gradients": keep}
    found = predict_peak(model, size, loss_of=loss_of, optimizer=torch.optim.SGD, target=target, **loop)
    peak, gradient_bytes = in_loop(model, loss_of, np.arange(size), zero_grad, steps, keep)
    tensors = found.tensors.num_bytes
    assert tensors == pytest.approx(peak, rel=0.01)
    plain_bytes, _ = in_loop(model, loss_of, np.arange(size), "before", 1, False)
    assert plain_bytes <= peak <= plain_bytes + gradient_bytes
    # Gradients that are cleared after the forward pass are not alive in the backward pass.
    assert (peak == plain_bytes) is ((zero_grad, steps, keep) in LOOPS[: 1 if repeats else 2])


def test_the_loop_is_told_where_gradients_matter() -> None:
    def told(size: int, **loop: Any) -> tuple[str, ...]:
        return of_target(nn.Linear(64, 1024), size, **loop).assumptions

    (plain,) = told(100)
    assert "zero_grad='after'" in plain
    assert plain.endswith("takes up to 260 KiB more")
    assert told(100, zero_grad="after", accumulation_steps=4) == (
        "Gradients of 260 KiB are alive in the forward pass (zero_grad='after', accumulation_steps=4)",
    )
    assert told(50_000) == told(50_000, zero_grad="after") == ()
    assert f"{plain}." in str(of_target(nn.Linear(64, 1024), 100))


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ({"zero_grad": "never"}, "before the forward pass of a step, or after it: zero_grad='never'.\nGive \"before\""),
        ({"accumulation_steps": 0}, "one batch or more: accumulation_steps=0"),
        ({"accumulation_steps": 1.5}, "one batch or more: accumulation_steps=1.5"),
        ({"allocator": "expandable_segments:True"}, "count for a card: .*\nGive one, target="),
        ({"allocator": "max_split_size_mb:soon", "target": "t4"}, "max_split_size_mb:soon.\nGive allocator="),
    ],
)
def test_a_loop_or_allocator_that_cannot_be_is_refused(loop: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        of_target(nn.Linear(64, 64), 10, **loop)


def test_a_task_has_the_loop_of_can_train() -> None:
    with pytest.raises(ArgumentError, match="can-train's loop: zero_grad='after'"):
        predict_peak(LineTask(), 10, zero_grad="after")


VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDING = "expandable_segments:True"


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_allocator_of_a_callers_loop_has_the_settings_of_its_environment(
    dispatched: None, unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(**others: Any) -> PeakPrediction:
        return of_target(perceptron(), 20_000, target="t4", **others)

    plain, expanding = found(), found(allocator=EXPANDING)
    # Segments of 20 MiB, or of one large tensor each, against one that grows.
    assert plain.reserved_bytes != expanding.reserved_bytes
    assert (
        plain.assumptions[0] == "PyTorch's allocator has its default settings, as $PYTORCH_CUDA_ALLOC_CONF is not set"
    )
    assert expanding.assumptions[0] == f"PyTorch's allocator has the settings {EXPANDING}, as given"
    assert f"{plain.assumptions[0]}." in str(plain).splitlines()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", EXPANDING)
    from_environment = found()
    assert from_environment.reserved_bytes == expanding.reserved_bytes
    assert from_environment.assumptions[0].endswith("from $PYTORCH_ALLOC_CONF")
    assert found(allocator="").reserved_bytes == plain.reserved_bytes
    with pytest.raises(ArgumentError, match="Unknown setting of PyTorch's allocator: 'future_setting'"):
        found(allocator="future_setting:3")
    assert "backend:cudaMallocAsync" in found(allocator="backend:cudaMallocAsync").notices[0]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "future_setting:3")
    assert "future_setting:3" in found().notices[0]


def test_the_launcher_predicts_with_the_settings_that_it_sets(
    dispatched: None, unset: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told,) = predict_peak(LineTask(), 10, target="t4").assumptions
    assert told == f"PyTorch's allocator has the settings {EXPANDING}, which can-train sets"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    (told,) = predict_peak(LineTask(), 10, target="t4").assumptions
    assert told == "PyTorch's allocator has its default settings, from $PYTORCH_CUDA_ALLOC_CONF"


def test_small_batches_leave_more_room_for_gaps_where_segments_do_not_expand(dispatched: None, unset: None) -> None:
    model = torch.jit.script(nn.Linear(64, 256))
    plain, expanding = (of_target(model, 10_000, target="t4", allocator=text) for text in ("", EXPANDING))
    assert plain.notices
    assert plain.interval_bytes[1] > expanding.interval_bytes[1]


def test_trials_of_cudnn_are_said(dispatched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_target(perceptron(), 10, target="t4").notices == ()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    (notice,) = of_target(perceptron(), 10, target="t4").notices
    assert "benchmark" in notice


@pytest.mark.parametrize(
    ("model", "most_mib"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 1429),
        (nn.LSTM(4, 4), 1679),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), 1679),
        (nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)), 1721),
        (nn.BatchNorm2d(4), 1721),
    ],
    ids=["vectors", "recurrent", "convolution", "convolution and batch norm", "batch norm of images"],
)
def test_a_context_of_an_a100_is_what_the_libraries_of_a_model_were_seen_to_take(
    model: nn.Module, most_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    trace, card = AllocationTrace(events=[(0, MIB), (0, 0)], workspaces={}), find_card("a100-40gb")
    context = price_trace(trace, card, PLAIN, loaded_kernels(model)).context
    assert context.most_bytes == most_mib * MIB
    assert (context.least_bytes, context.num_bytes) == (270 * MIB, most_mib * MIB)
    assert ("cuDNN" in context.what) == (most_mib > 1429)


def test_a_prediction_for_a_card_names_the_libraries_of_its_context(dispatched: None) -> None:
    found = of_target(perceptron(), 10, target="a100-40gb")
    assert found.context.what == "CUDA context with cuBLAS"
    assert found.context.most_bytes == 1429 * MIB


class Clamped(nn.Linear):
    """Clamps its outputs where their mean is large: a branch that depends on values, which NumPy reads."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.clamp(-1, 1) if y.detach().numpy().mean() > 1 else y


class ImageTask(LineTask):
    """Points that a network draws as small images. Its activation saves a tensor on the CPU that CUDA's does not."""

    def __init__(self, *, needs_values: bool = False) -> None:
        super().__init__()
        self.memory_features = (Feature("points"),)
        self._needs_values = needs_values

    def build_model(self) -> nn.Module:
        last = Clamped(32 * 14 * 14, 1) if self._needs_values else nn.Linear(32 * 14 * 14, 1)
        return nn.Sequential(
            nn.Linear(4, 3 * 16 * 16),
            nn.Unflatten(1, (3, 16, 16)),
            nn.Conv2d(3, 32, 3),
            nn.LogSigmoid(),
            nn.Flatten(),
            last,
        )

    def batch_features(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.ones((len(rows), 1))


def explorer_of(task: LineTask, target: UsableMemory) -> Explorer:
    return Explorer(
        task=task, model=task.build_model(), training=TrainingSettings(), meter=AbsentGpuMeter(target),
        rows=np.resize(task.train_rows, 5000), verify=False,
    )  # fmt: skip


def whole_epoch(costs: BatchCosts) -> float:
    return float(costs.each().sum())


@pytest.mark.parametrize("card", ["t4", "h100-80gb"])
def test_a_plans_limits_are_corrected_by_batches_recorded_as_cuda_would_run_them(card: str, dispatched: None) -> None:
    task, target = ImageTask(), usable(find_card(card))
    recorded = predict_limits(explorer_of(task, target), whole_epoch)
    probed = explorer_of(task, target).explore(whole_epoch)
    assert recorded.recorded
    assert not probed.recorded
    whole = predict_peak(task, 4000, target=card)
    peak = whole.tensors.num_bytes + sum(term.num_bytes for term in whole.workspaces if term.what == CUDNN)
    of_probes, of_recorder = (
        limits.step_peak_bytes(limits.training.model.cost(np.ones((4000, 1))), 0.0) for limits in (probed, recorded)
    )
    assert of_recorder == pytest.approx(peak, rel=0.01)
    assert of_probes != pytest.approx(peak, rel=0.01)
    # Evaluation is corrected by a batch of its own.
    assert recorded.evaluation.measured_ratio != recorded.training.measured_ratio
    # The plan states the interval that measured peaks have around predictions for cards.
    assert (recorded.spread, probed.spread) == (SPREADS[operations_of(task.build_model())], Spread())
    least, most = recorded.peak_interval(GIB, 0.0)
    assert (least - GIB, most - GIB) == pytest.approx(recorded.spread.around(GIB))


class AttentionTask(ImageTask):
    """Points that attend to themselves in bf16."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), Attention(), nn.Flatten(), nn.Linear(256 * 64, 1))


def test_a_plan_for_an_unknown_generation_holds_on_the_worst(dispatched: None) -> None:
    def peak(target: UsableMemory) -> float:
        explorer = explorer_of(AttentionTask(), target)
        explorer.training = TrainingSettings(precision="bf16")
        limits = predict_limits(explorer, whole_epoch)
        assert limits.recorded
        return limits.step_peak_bytes(limits.training.model.cost(np.ones((200, 1))), 0.0)

    t4, h100 = (peak(usable(find_card(name))) for name in ("t4", "h100-80gb"))
    assert peak(usable(other_card(15 * 2**30))) >= 0.99 * t4 > 1.5 * h100


@pytest.mark.parametrize(("task", "recorded"), [(ImageTask(), 1), (AttentionTask(), 5)])
def test_generations_are_recorded_where_kernels_differ(
    task: ImageTask, recorded: int, dispatched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations: list[list[str]] = []
    of_generations = recorded_limits.on_generations

    def count(*args: Any, **kwargs: Any) -> Mapping[str, Any]:
        results = of_generations(*args, **kwargs)
        generations.append(list(results))
        return results

    monkeypatch.setattr(recorded_limits, "on_generations", count)
    limits = predict_limits(explorer_of(task, usable(other_card(15 * 2**30))), whole_epoch)
    assert limits.recorded
    assert {len(each) for each in generations} == {recorded}


def test_a_recording_leaves_model_and_generators_as_they_were(dispatched: None) -> None:
    explorer = explorer_of(ImageTask(), usable(find_card("t4")))
    before, state = {name: value.clone() for name, value in explorer.model.state_dict().items()}, torch.get_rng_state()
    predict_limits(explorer, whole_epoch)
    assert all(torch.equal(value, before[name]) for name, value in explorer.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert explorer.meter.device.type == "cpu"


def test_limits_of_a_model_that_cannot_be_recorded_rest_on_small_batches_and_say_why(dispatched: None) -> None:
    limits = predict_limits(explorer_of(ImageTask(needs_values=True), usable(find_card("t4"))), whole_epoch)
    assert not limits.recorded
    assert "cannot be recorded on tensors without values" in limits.not_recorded_because
    assert limits.not_recorded_because.endswith("; let no shape and no branch of the model depend on a tensor's values")
    assert limits.training.measured_ratio == limits.evaluation.measured_ratio == 1
    assert limits.spread == NOT_RECORDED


class ChoosingTask(ImageTask):
    """Goes on with the points whose first number is positive, and has no other number of points."""

    def build_model(self) -> nn.Module:
        # The weights decide how many points are positive.
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 512), Chosen(), nn.Linear(512, 1))


def test_limits_follow_from_batches_whose_sizes_depend_on_values(dispatched: None) -> None:
    task = ChoosingTask()
    limits = predict_limits(explorer_of(task, usable(find_card("t4"))), whole_epoch)
    assert (limits.recorded, limits.not_recorded_because) == (True, "")
    assert limits.samples_of_sizes >= 64
    whole = predict_peak(task, 4000, target="t4")
    peak = limits.step_peak_bytes(limits.training.model.cost(np.ones((4000, 1))), 0.0)
    assert peak == pytest.approx(whole.tensors.num_bytes, rel=0.1)


def test_a_plan_does_not_claim_a_recording_where_no_sample_costs_anything() -> None:
    task = ImageTask()
    task.batch_features = lambda rows: np.zeros((len(rows), 1))
    limits = predict_limits(explorer_of(task, usable(find_card("t4"))), whole_epoch)
    assert (limits.recorded, limits.not_recorded_because) == (False, "")


def test_a_device_that_is_no_gpu_of_the_catalogue_is_not_recorded() -> None:
    target = UsableMemory(key="cpu-2gb", name="CPU", total_bytes=2**31, subtracted=(), source="as the job asks for")
    limits = predict_limits(explorer_of(ImageTask(), target), whole_epoch)
    assert (limits.recorded, limits.not_recorded_because, limits.spread) == (False, "", Spread())
    of_amd = predict_limits(explorer_of(ImageTask(), usable(find_card("mi300x"))), whole_epoch)
    assert (of_amd.recorded, of_amd.spread) == (False, NOT_RECORDED)
