"""A compiled model trains as it would without the compiler, and without the compiler where that one fails."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from can_train.errors import DoesNotFitError
from can_train.fit.compiled import CompiledModel, compiler_limits
from can_train.fit.micro_batcher import MicroBatcher
from can_train.fit.rescue import Ladder
from can_train.fit.rungs import SPLIT_ALONE, Rung
from can_train.memory.meters import CpuMeter

# PyTorch's tracer looks at tensors that are no leaves; it is silent elsewhere, and tests turn warnings into errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Counting:
    """A compiler that runs the operations as they are, counts its graphs and their runs, and fails as told."""

    def __init__(self, error: Exception | None = None, *, above: int = 10**9) -> None:
        self.error, self.above, self.graphs, self.runs = error, above, 0, 0

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        if self.error is not None:
            raise self.error
        self.graphs += 1

        def run(*values: Any) -> Any:
            self.runs += 1
            if any(isinstance(value, Tensor) and len(value.shape) and value.shape[0] > self.above for value in values):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return graph(*values)

        return run


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def losses_of(model: Any) -> Callable[[int, int], Any]:
    return lambda start, stop: {"loss": (model(X[start:stop]).square().sum(), float(stop - start))}


def compiled(model: nn.Module, backend: Any, notices: list[str] | None = None) -> CompiledModel:
    made = CompiledModel(model, "default", [].append if notices is None else notices.append, backend)
    made.compile_called(lambda: model(X[:7]))
    return made


def gradients(model: nn.Module, backend: Any = None, *, limits: Any = None, notices: Any = None) -> list[Tensor]:
    """The gradients of a batch, computed by a compiled model, or as it is where there is no compiler."""
    batcher = MicroBatcher(model, meter="cpu", limits=limits)
    if backend is not None:
        batcher.compiled = compiled(model, backend, notices)
    torch.manual_seed(3)
    batcher.run(losses_of(model), 40)
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_the_modules_that_a_loss_calls_are_compiled_in_place() -> None:
    model, backend = net(), Counting()
    names, expected = [*model.state_dict()], gradients(net())
    assert_same(gradients(model, backend), expected)
    assert (backend.graphs, backend.runs) == (1, 1)
    assert [*model.state_dict()] == names


def test_of_a_model_that_is_not_called_itself_the_parts_are_compiled() -> None:
    model = nn.ModuleDict({"critic": net(), "generator": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    made = CompiledModel(model, "default", print, backend := Counting())
    made.compile_called(lambda: model["critic"](model["generator"](X)))
    made.attempt(lambda: model["critic"](model["generator"](X)))
    assert backend.graphs == 2
    assert model["unused"]._compiled_call_impl is None
    made.stop()
    assert all(module._compiled_call_impl is None for module in model.modules())


@pytest.mark.parametrize("error", [RuntimeError("no g++ here\nmore"), torch.OutOfMemoryError("no g++ here")], ids=type)
def test_where_the_compiler_fails_the_model_is_computed_as_it_is_and_the_reason_is_told_once(error: Exception) -> None:
    model, notices = net(), list[str]()
    assert_same(gradients(model, Counting(error), notices=notices), gradients(net()))
    failed = "training.compile: the model is computed as it is from here on, for the compiler failed"
    assert notices == [f"{failed}: {type(error).__name__}: no g++ here"]


def test_a_batch_that_does_not_fit_is_split_and_the_model_stays_compiled() -> None:
    model, backend, notices = net(), Counting(above=10), list[str]()
    batcher = MicroBatcher(model, meter="cpu")
    batcher.compiled = compiled(model, backend, notices)
    torch.manual_seed(3)
    result = batcher.run(losses_of(model), 40)
    assert result.micro_batches == (10,) * 4
    assert not batcher.compiled.is_given_up
    assert not notices
    # Two failed with 40 and 20 samples before the four.
    assert backend.runs >= 6
    rescued = [parameter.grad for parameter in model.parameters()]
    assert_same(rescued, gradients(net(), Counting(), limits=10))  # type: ignore[arg-type]


class Replayed:
    """A compiler whose gradients lie where the next run writes its own, as those of a CUDA graph do."""

    def __init__(self, above: int = 10**9) -> None:
        self.above = above
        self._memory: dict[int, Tensor] = {}

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        return aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)(graph, inputs)

    def _forward(self, graph: Any, inputs: Any) -> Any:
        def run(*values: Any) -> Any:
            if any(isinstance(value, Tensor) and value.shape[:1] > (self.above,) for value in values):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return graph(*values)

        return make_boxed_func(run)

    def _backward(self, graph: Any, inputs: Any) -> Any:
        def run(*values: Any) -> Any:
            results = graph(*values)
            for place, result in enumerate(results):
                if isinstance(result, Tensor):
                    self._memory.setdefault(place, torch.empty_like(result)).copy_(result)
            # Tensors of their own, which autograd takes over without a copy.
            return [None if result is None else self._memory[place].detach() for place, result in enumerate(results)]

        return make_boxed_func(run)


def graphed(model: nn.Module, backend: Any, notices: list[str]) -> CompiledModel:
    made = CompiledModel(model, "cudagraphs", notices.append, backend)
    made.compile_called(lambda: model(X[:7]))
    return made


def test_a_replay_of_cuda_graphs_does_not_overwrite_the_gradients_of_the_part_before() -> None:
    model, notices = net().eval(), list[str]()
    batcher = MicroBatcher(model, meter="cpu", limits=10)
    batcher.compiled = graphed(model, Replayed(), notices)
    batcher.run_share(losses_of(model), 40, denominators=None)
    assert not notices
    torch.testing.assert_close(
        [parameter.grad for parameter in model.parameters()], gradients(net().eval(), limits=10), rtol=1e-5, atol=1e-6
    )


def test_memory_that_runs_out_in_cuda_graphs_ends_their_use() -> None:
    model, notices = net().eval(), list[str]()
    batcher = MicroBatcher(model, meter="cpu")
    batcher.compiled = graphed(model, Replayed(above=10), notices)
    result = batcher.run(losses_of(model), 40)
    assert batcher.compiled.is_given_up
    assert result.micro_batches == (40,)
    (notice,) = notices
    assert "CUDA out of memory" in notice


def test_an_error_of_the_model_is_raised_and_not_taken_for_the_compilers() -> None:
    class Wrong(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and len(x) == 40:
                raise ValueError("a mistake in forward")
            return super().forward(x)

    model, notices = Wrong(4, 1), list[str]()
    with pytest.raises(ValueError, match="a mistake in forward"):
        gradients(model, Counting(), notices=notices)
    assert not notices


def test_an_error_that_says_what_is_wrong_is_raised_at_once() -> None:
    model, calls = net(), list[int]()
    made = compiled(model, Counting())

    def compute() -> None:
        calls.append(1)
        raise DoesNotFitError("Gradients are added up wholly or not at all", remedy="")

    with pytest.raises(DoesNotFitError):
        made.attempt(compute)
    assert len(calls) == 1
    assert not made.is_given_up


def test_a_model_that_is_compiled_again_and_again_is_computed_as_it_is() -> None:
    class Counted(nn.Linear):
        calls = ""

        def forward(self, x: Tensor) -> Tensor:
            self.calls += "."
            return super().forward(x) * len(self.calls)

    model, notices = Counted(4, 1), list[str]()
    made = compiled(model, backend := Counting(), notices)
    with compiler_limits():
        for _ in range(40):
            made.attempt(lambda: model(X))
    assert 1 < backend.graphs < 20
    (notice,) = notices
    assert "recompile limit" in notice


def test_a_gradient_of_a_gradient_is_computed_without_the_compiler() -> None:
    model, notices = net().eval(), list[str]()
    made = compiled(model, "aot_eager", notices)

    def penalty() -> Tensor:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return model[0].weight.grad  # type: ignore[index, union-attr, return-value]

    found = made.attempt(penalty)
    assert found.abs().sum() > 0
    (notice,) = notices
    assert "requires create_graph=" in notice


def test_a_step_that_is_measured_does_not_end_the_compilation() -> None:
    model = net()
    made = compiled(model, backend := Counting())
    with CpuMeter().measuring(model.parameters()):
        made.attempt(lambda: model(X))
    assert backend.runs == 0
    made.attempt(lambda: model(X))
    assert backend.runs == 1


def test_batches_of_other_sizes_need_no_other_version() -> None:
    model = net()
    made = compiled(model, backend := Counting())
    for size in (19, 11, 2, 40, 33):
        made.attempt(lambda size=size: model(X[:size]))  # type: ignore[misc]
    assert backend.graphs == 1


class Outputs:
    """A compiler that runs the operations as they are, and counts the tensors that forward passes compute and return:
    the result, and activations for the backward pass.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.backend = aot_autograd(
            fw_compiler=self._forward, bw_compiler=lambda graph, _: make_boxed_func(graph),
            partition_fn=min_cut_rematerialization_partition,
        )  # fmt: skip

    def _forward(self, graph: Any, inputs: Any) -> Any:
        returned = graph.graph.output_node().args[0]
        self.counts.append(sum(getattr(node, "op", "") == "call_function" for node in returned))
        return make_boxed_func(graph)


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), *[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])


def trained_within(budget: float) -> tuple[int, list[Tensor]]:
    """Computes the gradients of a batch by code that keeps a share of its activations; returns how much it keeps."""
    model, outputs = deep(), Outputs()
    batcher = MicroBatcher(model, meter="cpu")
    with compiler_limits():
        made = batcher.compiled = CompiledModel(model, "default", print, outputs.backend, memory_budget=budget)
        batcher.ladder = Ladder((RECOMPUTED if budget < 1 else SPLIT_ALONE,))
        made.compile_called(lambda: model(X[:7]))
        # PyTorch's compiler fails where modules are computed again by `checkpoint` with a state of its own.
        assert made.on_rung(batcher.ladder.rung) == SPLIT_ALONE
        batcher.run(losses_of(model), 40)
        made.stop()
        assert made.on_rung(RECOMPUTED) == RECOMPUTED
    torch._dynamo.reset()
    return max(outputs.counts), [one.grad for one in model.parameters()]  # type: ignore[misc]


RECOMPUTED = Rung(recompute=tuple(str(number) for number in range(1, 9)))


def test_compiled_code_computes_activations_again_within_its_budget_with_the_same_gradients() -> None:
    before = torch._functorch.config.activation_memory_budget
    (few, one), (many, other) = trained_within(0.1), trained_within(1.0)
    assert few < many
    for each, gradient, alone in zip(one, other, gradients(deep()), strict=True):
        torch.testing.assert_close(each, alone, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, alone, rtol=1e-5, atol=1e-6)
    assert torch._functorch.config.activation_memory_budget == before
