"""Programs of models: recorded calls, dynamic sizes, and results as the model's, in PyTorch and in ONNX Runtime."""

import io
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Batch as GraphBatch
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv, global_mean_pool
from transformers import BatchEncoding

from can_train.errors import CanTrainError
from can_train.training.exported_call import Call, TensorCall, axis_names, check_alike, record_call
from can_train.training.exported_program import (
    Program,
    _searchsorted,
    largest_difference,
    onnx_program,
    torch_program,
    trace,
)

SIZES = (3, 5, 1, 4)

Batch = Callable[[int], Any]


def calls(model: nn.Module, batch: Batch, use: Callable[[nn.Module, Any], object] | None = None) -> list[Call]:
    torch.manual_seed(0)
    model.eval().requires_grad_(False)
    use = use or (lambda network, each: network(each))
    batches = [batch(size) for size in SIZES]
    return [record_call(model, lambda each=each: use(model, each), None, size)
            for each, size in zip(batches, SIZES, strict=True)]  # fmt: skip


def checked(model: nn.Module, batch: Batch, use: Callable[[nn.Module, Any], object] | None = None) -> Program:
    """The program of a model, after both of its files have been compared with the model."""
    program = trace(calls(model, batch, use))
    for write in (torch_program, onnx_program):
        _, compute = write(program, {})
        assert largest_difference(program, compute) < 1e-5
        # The comparison would notice another result.
        assert largest_difference(program, lambda tensors, one=compute: [value + 1 for value in one(tensors)]) > 1e-5
    return program


class Odd(nn.Module):
    """Takes a dict whose names are no names of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        hidden = self.layer(batch["class"]) * batch["2 weights"][0].mean(1, keepdim=True)
        return {"log its": hidden, "class": hidden.sum()}


def odd_batch(size: int) -> dict[str, Any]:
    return {"class": torch.randn(size, 4), "2 weights": (torch.rand(size, size + 2), 3.0), "label": torch.ones(size)}


def test_a_dict_with_odd_names_becomes_inputs_with_names() -> None:
    program = checked(Odd(), odd_batch)
    assert [(slot.name, slot.dtype, slot.shape) for slot in program.inputs] == [
        ("input_class", "float32", ["batch", 4]),
        ("batch_2_weights_0", "float32", ["batch", "batch_2_weights_0_length"]),
    ]
    assert [(slot.name, slot.shape) for slot in program.outputs] == [("log_its", ["batch", 2]), ("output_class", [])]


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """Nodes [N, 3] of B graphs, and their edges [2, E]."""

    nodes: Tensor
    edges: Tensor
    graph: Tensor
    label: Tensor
    hidden: Tensor | None = None


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("known", torch.tensor([1, 4, 9]))

    def forward(self, batch: Graphs) -> dict[str, Tensor]:
        source, target = batch.edges
        place = torch.searchsorted(self.known, batch.graph)
        hidden = self.layer(batch.nodes) + place[:, None]
        hidden = hidden.index_add(0, target, hidden[source])
        return {"nodes": hidden, "graphs": hidden.new_zeros(batch.label.shape[0], 2).index_add(0, batch.graph, hidden)}


def graphs(size: int) -> Graphs:
    nodes, edges = 2 * size + 3, 3 * size + 1
    return Graphs(nodes=torch.randn(nodes, 3), edges=torch.randint(nodes, (2, edges)),
                  graph=torch.arange(nodes) % size, label=torch.zeros(size))  # fmt: skip


def test_a_dataclass_of_graphs_becomes_flat_tensors_in_the_order_of_its_fields() -> None:
    program = checked(GraphNet(), graphs)
    assert [(slot.name, slot.shape) for slot in program.inputs] == [
        ("nodes", ["nodes_rows", 3]), ("edges", [2, "edges_length"]), ("graph", ["nodes_rows"]), ("label", ["batch"]),
    ]  # fmt: skip
    # ONNX has one space of names for inputs and outputs.
    assert [slot.name for slot in program.outputs] == ["nodes_output", "graphs"]


class Convolutions(nn.Module):
    """Layers of torch_geometric over its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = GraphConv(3, 4)

    def forward(self, batch: Any) -> Tensor:
        hidden = self.layer(batch.x, batch.edge_index).relu()
        return global_mean_pool(hidden, batch.batch, size=batch.ptr.shape[0] - 1)


def test_a_batch_of_torch_geometric_becomes_flat_tensors() -> None:
    def batch(size: int) -> Any:
        return GraphBatch.from_data_list([
            Data(x=torch.randn(4 + number, 3), edge_index=torch.randint(4, (2, 6 + number)), y=torch.tensor(1))
            for number in range(size)
        ])  # fmt: skip

    program = checked(Convolutions(), batch)
    assert {slot.name: slot.shape for slot in program.inputs} == {
        "x": ["x_rows", 3], "edge_index": [2, "edge_index_length"], "batch": ["x_rows"], "ptr": ["ptr_rows"],
    }  # fmt: skip
    assert [len(slot.shape) for slot in program.outputs] == [2]


class Counting(nn.Module):
    """Changes a buffer when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def test_a_model_that_counts_its_calls_is_exported() -> None:
    program = checked(Counting(), lambda size: torch.randn(size, 2))
    assert [slot.name for slot in program.outputs] == ["output"]


class Changing(nn.Module):
    """Changes its input and a buffer in each call, and returns what depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.full((), 5.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x.mul_(2.0)) + self.calls


def test_a_model_that_changes_itself_and_its_input_is_exported_as_it_was() -> None:
    model = Changing()
    batches = {size: torch.randn(size, 2) for size in SIZES}
    program = trace(calls(model, lambda size: batches[size].clone()))
    data, compute = torch_program(program, {})
    assert largest_difference(program, compute) < 1e-5
    assert float(model.calls) == 5.0
    loaded = torch.export.load(io.BytesIO(data))
    assert float(loaded.state_dict["called.calls"]) == 5.0
    (result,) = loaded.module()(batches[3].clone())
    assert torch.allclose(result, model.layer(2 * batches[3]) + 6.0)


def test_padded_places_of_an_encoder_are_compared_as_the_program_computes_them() -> None:
    def padded(size: int) -> Tensor:
        tokens = torch.randint(1, 10, (size, size + 4))
        tokens[0, size:] = 0
        return tokens

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 8)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)

    checked(Encoder(), padded)


class Attention(nn.Module):
    """Attention over padded sequences; the second argument is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, input_ids: Tensor, *, mask: Tensor) -> Tensor:
        return self.layer(self.embedding(input_ids), src_key_padding_mask=mask)


def test_the_length_of_padded_sequences_is_dynamic() -> None:
    program = checked(Attention(), lambda size: torch.randint(1, 10, (size, size + 4)),
                      lambda model, each: model(each, mask=each == 0))  # fmt: skip
    assert [(slot.name, slot.dtype, slot.shape) for slot in program.inputs] == [
        ("input_ids", "int64", ["batch", "input_ids_length"]), ("mask", "bool", ["batch", "input_ids_length"]),
    ]  # fmt: skip
    assert program.outputs[0].shape == ["batch", "input_ids_length", 8]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(2, 3), nn.Linear(3, 1)


def test_a_part_is_exported_where_the_model_is_not_called_and_another_one_where_it_is_named() -> None:
    model = Two().eval()

    def use() -> None:
        model.critic(model.generator(torch.ones(2, 2)))

    assert record_call(model, use, None, 2).part == "generator"
    assert record_call(model, use, "critic", 2).part == "critic"
    with pytest.raises(CanTrainError, match=r"Unknown part of the model: 'critics'\.\nValid, nearest first: critic"):
        record_call(model, use, "critics", 2)
    with pytest.raises(CanTrainError, match=r"Two is not called .* no part is called\.\nCall it in Task\.call_model"):
        record_call(model, lambda: None, None, 2)
    assert not model.generator._forward_pre_hooks


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum(0) / len(x)


def test_a_model_that_fixes_its_batch_is_refused_with_the_input_and_the_way_out() -> None:
    with pytest.raises(CanTrainError, match=r"dimension 0 of x is \d\.\nIn forward, write x\.shape\[0\] in place of"):
        trace(calls(Fixed(), lambda size: torch.randn(size, 2)))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.sum()) > 0 else x


def test_a_model_that_looks_at_its_data_is_refused_with_the_line_of_its_code() -> None:
    with pytest.raises(CanTrainError, match=r"cannot be exported for PyTorch: .*return self\.layer\(x\) if float"):
        trace(calls(Branching(), lambda size: torch.randn(size, 2)))


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_y0(self.layer(x).abs() + 1)


def test_an_operator_that_onnx_does_not_have_is_named() -> None:
    program = trace(calls(Unknown(), lambda size: torch.randn(size, 2)))
    with pytest.raises(CanTrainError, match=r"cannot be exported for ONNX: .*bessel_y0"):
        onnx_program(program, {})
    _, compute = torch_program(program, {})
    assert largest_difference(program, compute) < 1e-5


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
        assert state is not None
        return state[0]


def test_a_model_that_loops_over_a_length_is_refused_until_lengths_are_padded() -> None:
    with pytest.raises(CanTrainError, match=r"dimension 1 of x is \d"):
        trace(calls(Looping(), lambda size: torch.randn(size, size + 3, 2)))
    checked(Looping(), lambda size: nn.functional.pad(torch.randn(size, size + 3, 2), (0, 0, 0, 9 - size)))


def test_numbers_that_depend_on_the_batch_and_objects_that_are_no_tensors_are_refused() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor, size: Any) -> Tensor:
            return x

    given = calls(Sized(), lambda size: (torch.ones(size), size), lambda model, each: model(*each))
    with pytest.raises(CanTrainError, match=r"a number that depends on the batch: size is 3 and 5"):
        check_alike(given)
    given = calls(Sized(), lambda size: (torch.ones(size), object()), lambda model, each: model(*each))
    with pytest.raises(CanTrainError, match="with tensors, and size is none: object"):
        check_alike(given)
    given = calls(Sized(), lambda size: (size, 1), lambda model, each: model(*each))
    with pytest.raises(CanTrainError, match="is called without a tensor"):
        check_alike(given)


def test_a_result_that_is_no_number_equals_only_one_that_is_none() -> None:
    class Logarithm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log()

    program = trace(calls(Logarithm(), lambda size: torch.randn(size, 7)))
    _, compute = torch_program(program, {})
    assert largest_difference(program, compute) == 0
    assert largest_difference(program, lambda tensors: [compute(tensors)[0].nan_to_num(1.0)]) == float("inf")


class Rounding(nn.Module):
    """Loses digits in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.tensor([300.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.large) - self.large


def test_a_program_may_be_more_exact_than_its_model_but_not_less() -> None:
    program = trace(calls(Rounding(), lambda size: torch.rand(size, 4)))
    assert largest_difference(program, lambda tensors: [tensors[0]]) < 1e-7
    assert largest_difference(program, lambda tensors: [tensors[0] * 1.0001]) == pytest.approx(1e-4, rel=0.1)


def test_no_sample_of_the_data_is_in_the_file() -> None:
    program = trace(calls(nn.Sequential(nn.Linear(1, 1)), lambda size: torch.full((size, 1), 1234.5)))
    value = torch.full((3,), 1234.5).numpy().tobytes()
    for write in (torch_program, onnx_program):
        assert value not in write(program, {})[0]


Pair = namedtuple("Pair", ["left", "right"])

VALUES = st.recursive(
    st.sampled_from(["tensor", 1, None, "text"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from(["a", "b c", "class", "0"]), inner, max_size=3),
        st.builds(BatchEncoding, st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2)),
    ),
    max_leaves=8,
)  # fmt: skip


class Echo(nn.Module):
    def forward(self, value: Any) -> Any:
        return value


def filled(value: Any) -> Any:
    """A value with a tensor of its own in each place of `tensor`."""
    if value == "tensor":
        return torch.rand(2)
    if isinstance(value, BatchEncoding):
        return BatchEncoding({name: filled(inner) for name, inner in value.items()})
    if isinstance(value, dict):
        return {name: filled(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [filled(inner) for inner in value]
        return Pair(*parts) if isinstance(value, Pair) else type(value)(parts)  # type: ignore[call-arg]
    return value


@given(VALUES)
def test_any_nested_arguments_are_taken_apart_and_put_together_again(value: Any) -> None:
    model, nested = Echo(), filled(value)
    call = record_call(model, lambda: model(nested), None, 2)
    names = list(call.inputs())
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)
    other = [torch.rand(2) for _ in names]
    returned = TensorCall(call, names).compute(other)
    assert len(returned) == len(other)
    assert all(left is right for left, right in zip(returned, other, strict=True))


@given(st.lists(st.integers(-5, 5), max_size=6).map(sorted), st.lists(st.integers(-6, 6), max_size=5), st.booleans())
def test_places_in_a_sorted_sequence_are_those_of_pytorch(ordered: list[int], values: list[int], right: bool) -> None:
    sequence, wanted = torch.tensor(ordered, dtype=torch.int64), torch.tensor(values, dtype=torch.int64)
    expected = torch.searchsorted(sequence, wanted, right=right)
    assert torch.equal(_searchsorted(sequence, wanted, right=right), expected)
    assert torch.equal(_searchsorted(sequence, wanted, side="right" if right else "left"), expected)


def test_sizes_that_always_agree_have_one_name() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x

    given = calls(Joined(), lambda size: (torch.ones(size, size + 9), torch.ones(size + 9, 2, size)),
                  lambda model, each: model(*each))  # fmt: skip
    assert axis_names(given) == {"x": {0: "batch", 1: "x_length"}, "y": {0: "x_length", 2: "batch"}}
