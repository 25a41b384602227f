"""Which results of a compiled graph are in memory, and for how long, without and with full fusion."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from can_train.memory.compiled_graphs import GraphRunner
from can_train.memory.simulated.gpu import LiveStorageTracker

SIZE = 2**20
X, W = torch.zeros(SIZE // 16, 4), torch.zeros(4, 4)  # X takes 1 MiB
OPERATIONS: list[Any] = []


def run(graph: GraphModule, arguments: Sequence[Tensor], *, fused: bool) -> int:
    """Returns the peak of the graph's own memory, in units of X."""
    tracker = LiveStorageTracker(2**40, arguments, cuda=None)

    def unseen(compute: Callable[[], Any]) -> Any:
        with _disable_current_modes():
            return compute()

    runner = GraphRunner(
        graph, fused=fused, unseen=unseen, count=tracker.seed_resident, label=lambda *made: OPERATIONS.append(made)
    )
    given = list(arguments)
    with tracker:
        results = runner(given)
    assert not given
    del results
    return round((tracker.peak_bytes - sum(each.nbytes for each in arguments)) / SIZE)


def chain(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin().cos().tanh()


def product_of_a_view(x: Tensor, w: Tensor) -> Tensor:
    return (x + 1).t() @ x.sin()


def normalized(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return (y - y.mean(0)) * y.var(0)


def read_by_index(x: Tensor, w: Tensor) -> Tensor:
    return (x[torch.zeros(SIZE // 16, dtype=torch.long)] * 2).sum()


@pytest.mark.parametrize(
    ("program", "fused", "unfused"),
    [
        # The product is overwritten by the result.
        (chain, 1, 2),
        # Both operands must be in memory.
        (product_of_a_view, 2, 2),
        (normalized, 1, 2),
        (read_by_index, 0, 2),
    ],
)
def test_full_fusion_writes_only_what_libraries_reductions_and_results_need(
    program: Callable[..., Tensor], fused: int, unfused: int
) -> None:
    graph = make_fx(program)(X, W)
    assert run(graph, (X, W), fused=True) == fused
    assert run(graph, (X, W), fused=False) == unfused


def test_an_input_is_freed_when_it_was_last_used() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return ((x + 1) @ w).sum() * (w + 1)

    def arguments() -> Iterator[Tensor]:
        yield torch.zeros_like(X)
        yield torch.zeros_like(W)

    graph = make_fx(program)(X, W)
    tracker = LiveStorageTracker(2**40, cuda=None)
    with tracker:
        given = list(arguments())
        GraphRunner(graph, fused=False, unseen=lambda compute: compute(), count=lambda _: None, label=lambda *_: None)(
            given
        )
    # The input, the sum; then the sum, the product.
    assert round(tracker.peak_bytes / SIZE) == 2


def test_operations_are_told_with_their_modules() -> None:
    OPERATIONS.clear()
    graph = make_fx(chain)(X, W)
    for node in graph.graph.nodes:
        if "sin" in node.name:
            node.meta["nn_module_stack"] = {"1": ("a", "A"), "23": ("a.b", "B"), "named": ("c", "C")}
    run(graph, (X, W), fused=True)
    assert [modules for operation, modules in OPERATIONS if operation is torch.ops.aten.sin.default] == [(1, 23)]
    # Whatever follows the graph is not a part of it.
    assert OPERATIONS[-1] == (None, ())
