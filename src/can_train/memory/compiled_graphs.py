"""Runs the graphs that PyTorch's compiler makes of a module, while their allocations are recorded. TorchInductor makes
kernels of them, which takes a GPU and minutes; how it fuses them is bounded from both sides.

Without fusion, each operation of a graph writes its result to memory. With full fusion, element-wise operations and
reads by index write nothing: the operations that use them compute them again. Only inputs of products, convolutions
and other calls of libraries, results of reductions, and results of the graph are in memory.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

if TYPE_CHECKING:
    from torch import Tensor

_aten: Final = torch.ops.aten
_prims: Final = torch.ops.prims
# Values that a kernel computes from the position alone.
_GENERATED: Final = ("full", "ones", "zeros", "full_like", "ones_like", "zeros_like", "scalar_tensor", "arange", "rand")
# Operations beside element-wise ones that compute one number of their result at a time.
_BY_POSITION: Final = (
    "cat", "clone", "constant_pad_nd", "embedding", "expand", "gather", "index", "index_select", "_to_copy", "randn",
)  # fmt: skip
_REDUCTIONS: Final = (
    "sum", "mean", "amax", "amin", "var", "var_mean", "argmax", "argmin", "any", "all", "prod", "max", "min",
)  # fmt: skip
# They add to a result that is in memory, whatever the values come from.
_SCATTERED: Final = ("index_put", "scatter", "scatter_add", "scatter_reduce")


class GraphRunner:
    """Runs a graph: operations whose results are in memory by PyTorch's dispatch, which is recorded, and the others
    `unseen`, by a function that runs an operation without a record. `count` takes tensors into the record, and `label`
    is told each operation and its modules, by their `id`, innermost last.
    """

    def __init__(
        self,
        graph: GraphModule,
        *,
        fused: bool,
        unseen: Callable[[Callable[[], Any]], Any],
        count: Callable[[Sequence[Tensor]], None],
        label: Callable[[Any, Sequence[int]], None],
    ) -> None:
        self._graph, self._fused = graph, fused
        self._unseen, self._count, self._label = unseen, count, label
        self._nodes = list(graph.graph.nodes)
        self._in_memory = _in_memory(self._nodes) if fused else set(self._nodes)
        self._dying = _dying(self._nodes, self._in_memory)

    def __call__(self, arguments: list[Any]) -> Any:
        """Returns the results of the graph. `arguments` is emptied, and each one is freed when it was last used."""
        values: dict[Node, Any] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                values[node] = arguments.pop(0)
            elif node.op == "output":
                self._label(None, ())
                return map_arg(node.args[0], values.__getitem__)
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(self._graph)
            else:
                self._compute(node, values)
            for dead in self._dying[node]:
                values.pop(dead, None)
        raise AssertionError("a graph ends with its results")

    def _compute(self, node: Node, values: dict[Node, Any]) -> None:
        self._label(node.target, _modules(node))
        assert callable(node.target), "a graph of operations calls nothing by name"
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        compute: Callable[[], Any] = partial(node.target, *args, **kwargs)
        del args, kwargs
        if node in self._in_memory and not (self._fused and _is_fused(node)):
            values[node] = compute()
            return
        values[node] = self._unseen(compute)
        del compute
        if node in self._in_memory and not _is_view(node):
            # A kernel writes its result where an input was that nothing else uses.
            for dead in self._dying[node]:
                if dead is not node:
                    values.pop(dead, None)
            self._count([values[node]])


def _modules(node: Node) -> tuple[int, ...]:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return tuple(int(key) for key in stack if str(key).isdecimal())


@cache
def _named(names: tuple[str, ...]) -> frozenset[Any]:
    packets = [getattr(space, name) for name in names for space in (_aten, _prims) if hasattr(space, name)]
    return frozenset(packets)


def _is(node: Node, names: tuple[str, ...]) -> bool:
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in _named(names)


def _is_view(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


def _is_fused(node: Node) -> bool:
    """Tells whether an operation is computed inside the kernel of another one where that is of use."""
    if not isinstance(node.target, OpOverload):
        return False
    is_pointwise = torch.Tag.pointwise in node.target.tags or _is(node, ("convert_element_type", "iota"))
    return is_pointwise or _is_view(node) or _is(node, _GENERATED) or _is(node, _BY_POSITION)


def _in_memory(nodes: Sequence[Node]) -> set[Node]:
    """Returns the operations whose results full fusion leaves in memory."""
    found: set[Node] = set()
    for node in reversed(nodes):
        read: Sequence[Node] = ()
        if node.op == "output":
            read = node.all_input_nodes
        elif not _is_fused(node):
            found.add(node)
            if node.op == "call_function" and not _is(node, (*_REDUCTIONS, *_SCATTERED)):
                read = node.all_input_nodes
        for source in read:
            found |= _with_viewed(source, found)
    return found


def _with_viewed(node: Node, found: Container[Node]) -> set[Node]:
    """Returns an operation that is read from memory, and those whose memory it is a view of, unless they are found or
    generated where they are used.
    """
    new: set[Node] = set()
    while node not in found and not _is(node, (*_GENERATED, "iota")):
        new.add(node)
        if not _is_view(node):
            break
        node = node.all_input_nodes[0]
    return new


def _dying(nodes: Sequence[Node], in_memory: set[Node]) -> dict[Node, list[Node]]:
    """Returns the values that each operation uses last. A value that is computed inside other kernels uses its inputs
    as long as it is used itself.
    """
    place = {node: number for number, node in enumerate(nodes)}
    last: dict[Node, int] = {}
    for node in reversed(nodes):
        is_computed = node in in_memory and not _is_view(node)
        end = place[node] if is_computed else max(place[node], last.get(node, -1))
        for source in node.all_input_nodes:
            last[source] = max(last.get(source, -1), end)
    dying = defaultdict[Node, list[Node]](list)
    for node in nodes:
        if node.op != "output":
            dying[nodes[last.get(node, place[node])]].append(node)
    return dying


def record_compiled(make_runner: Callable[[GraphModule], Callable[[list[Any]], Any]]) -> Callable[[], int]:
    """Lets `torch.compile` with TorchInductor run what `make_runner` makes of the graphs, for good: the process must be
    a child. Returns a function that counts the graphs so far.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs = 0

    def compiled(graph: GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        nonlocal graphs
        graphs += 1
        runner = make_runner(graph)

        def run(arguments: list[Any]) -> Any:
            return runner(arguments)

        # Arguments are handed over, so that the backward pass frees each saved tensor when it was last used.
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(inductor: Any, graph: GraphModule, inputs: Any, **_options: Any) -> Any:
        partition = partial(min_cut_rematerialization_partition, compiler="inductor")
        make = aot_autograd(
            fw_compiler=compiled, bw_compiler=compiled, partition_fn=partition, decompositions=select_decomp_table()
        )
        return make(graph, inputs)

    wrapper: Any = torch._TorchCompileInductorWrapper
    wrapper.__call__ = backend
    # Programs may be predicted in a process that keeps the compiler off.
    torch.compiler.set_stance("default")
    return lambda: graphs
