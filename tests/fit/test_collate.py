"""Which samples a collated batch has, and the batch of some of them."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from can_train import simulated_gpu
from can_train.errors import DataError
from can_train.fit.collate import (
    _outline,
    host_copies,
    is_plain,
    leaves,
    numbers_in,
    pad_and_stack,
    replace_leaves,
    samples_in,
    select_samples,
    to_device,
)

N = 50
X, Y = torch.arange(N * 3.0).reshape(N, 3), torch.arange(N)
RAGGED = [torch.full((1 + number % 4,), float(number)) for number in range(N)]


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested")
        return torch.nested.nested_tensor([X[:2], X[:3]], layout=layout)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_counted_as_the_tensors_in_it(layout: torch.layout) -> None:
    assert [leaf.shape for leaf in leaves((X, {"y": nested(layout)}))] == [X.shape, (2, 3), (3, 3)]
    assert not is_plain(nested(layout))
    assert _outline((X, nested(layout))) is None


class Pair(NamedTuple):
    x: Any
    y: Any


def listed(*tensors: Tensor) -> list[list[Tensor]]:
    return [list(tensor) for tensor in tensors]


BATCHES: dict[str, Any] = {
    "columns": (X, Y),
    "columns by name": {"x": X, "y": Y, "scale": 2.0, "names": ["a"] * N},
    "columns of columns": [[X, X], [Y, Y]],
    "columns and numbers of the batch": {"x": X, "weights": [torch.tensor(0.1), torch.tensor(0.9)]},
    "two lists": listed(X, Y),
    "two tuples": (tuple(X), tuple(Y)),
    "two lists of like tensors": listed(X, X),
    "lists of a named tuple": Pair(list(X), list(Y)),
    "a list beside a tensor": (RAGGED, Y),
    "an array beside a list": {"x": RAGGED, "y": Y.numpy()},
    "a list of dicts beside a list": (RAGGED, [{"box": tensor[:, None], "label": tensor[0]} for tensor in RAGGED]),
    "a list alone": list(X),
    "a list of dicts alone": [{"x": tensor, "y": tensor[0]} for tensor in RAGGED],
    "a ragged list alone": RAGGED,
    "many columns and labels": [*(X[:, 0] for _ in range(60)), Y],
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_has_its_samples_however_it_is_collated(name: str) -> None:
    batch = BATCHES[name]
    assert samples_in(batch) == N
    each = numbers_in(batch)
    assert each.shape == (N,)
    assert each.sum() == pytest.approx(sum(leaf.numel() for leaf in leaves(batch)))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("rows", [slice(7, 19), np.arange(7, 19)], ids=["a slice", "positions"])
def test_a_part_has_the_samples_that_were_asked_for(name: str, rows: Any) -> None:
    batch = BATCHES[name]
    parts = [select_samples(batch, rows), select_samples(batch, slice(0, 7)), select_samples(batch, slice(19, N))]
    assert type(parts[0]) is type(batch)
    whole = sum(leaf.double().sum() for leaf in leaves(batch) if leaf.dim())
    sums = [sum(leaf.double().sum() for leaf in leaves(part) if leaf.dim()) for part in parts]
    torch.testing.assert_close(torch.stack(sums).sum(), whole)
    again = select_samples(batch, np.arange(7, 19))
    assert all(torch.equal(one, other) for one, other in zip(leaves(parts[0]), leaves(again), strict=True))


def test_lists_of_few_samples_are_cut_by_samples_where_they_hold_single_numbers() -> None:
    batch = listed(torch.ones(4, 3), torch.arange(4))
    assert samples_in(batch) == 4
    assert select_samples(batch, slice(1, 3))[1] == [torch.tensor(1), torch.tensor(2)]


def test_a_default_collation_is_cut_by_columns() -> None:
    samples = [((torch.ones(3) * number, torch.zeros(3)), {"a": number}) for number in range(2)]
    batch = default_collate(samples)
    assert samples_in(batch) == 2
    (first, second), named = select_samples(batch, slice(1, 2))
    assert first.tolist() == [[1.0] * 3]
    assert (second.shape, named["a"].tolist()) == ((1, 3), [1])


def test_memory_of_ragged_samples_is_counted_by_sample() -> None:
    assert numbers_in((RAGGED, Y)).tolist() == [len(tensor) + 1 for tensor in RAGGED]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (X.to_sparse, "sparse_coo"),
        (X.to_sparse_csr, "sparse_csr"),
        (lambda: torch.nested.nested_tensor(RAGGED, layout=torch.jagged), "nested"),
    ],
    ids=["COO", "CSR", "nested"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state", "ignore:The PyTorch API of nested")
def test_rows_of_tensors_that_are_not_dense_are_not_taken(make: Callable[[], Tensor], kind: str) -> None:
    tensor = make()
    for use in (samples_in, numbers_in, lambda batch: select_samples(batch, slice(1))):
        with pytest.raises(DataError, match=rf"a tensor is {kind}\.\nGive .*LoopSettings\(select=..., counts=...\)"):
            use((tensor, Y))


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((X, Y[:-1]), "tensors of 49, 50"),
        ({"x": RAGGED, "y": X[:30]}, "tensors of 1, 2, 3, 4, 30"),
        ({"a": [X, Y[:-1]]}, "tensors of 2, 49, 50"),
        (listed(X[:8], X[:8]), "a list of 8 may hold either"),
        ((list(torch.ones(8, 8)), torch.ones(8)), "a list of 8 may hold either"),
        ("text", "no tensor in a str"),
        (torch.tensor(3.0), "no tensor in a Tensor"),
        ([], "no tensor in a list"),
    ],
    ids=str,
)
def test_samples_that_nobody_knows_are_told_with_what_to_give(batch: Any, found: str) -> None:
    with pytest.raises(DataError, match=rf"{found}.*\nGive .*select=..., counts="):
        samples_in(batch)


def test_the_numbers_of_graphs_have_the_format_of_the_run() -> None:
    data = pytest.importorskip("torch_geometric.data")
    graph = data.Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([1]))
    batch = data.Batch.from_data_list([graph, graph])
    moved, weights = to_device((batch, torch.ones(2)), torch.device("cpu"), torch.float64)
    assert moved.x.dtype == weights.dtype == torch.float64
    assert moved.edge_index.dtype == moved.y.dtype == torch.int64


def test_copies_on_the_host_keep_no_part_of_the_device() -> None:
    with simulated_gpu("64MiB") as gpu:
        weight = torch.full((1000, 256), 2.0, requires_grad=True)
        whole = weight.exp()
        before = gpu.allocated_bytes()
        copied = host_copies([{"corner": whole[0, :2], "name": "a"}, {"corner": whole[1, :2], "name": "b"}])
        assert gpu.allocated_bytes() == before
        whole_bytes = whole.nbytes
        del whole
        assert gpu.allocated_bytes() <= before - whole_bytes
    assert [one["name"] for one in copied] == ["a", "b"]
    assert all(
        one["corner"].tolist() == pytest.approx([7.389056] * 2) and not one["corner"].requires_grad for one in copied
    )


@pytest.mark.parametrize(
    ("samples", "value"),
    [
        ([{"x": 1}, {"x": 1, "extra": 2}], "sample['extra'] is there in sample 1 of the batch, and not in sample 0"),
        ([{"x": 1, "z": 2}] * 3 + [{"x": 1}], "sample['z'] is there in sample 0 of the batch, and not in sample 3"),
        ([{"x": [1, 2]}, {"x": [1]}], "sample['x'] has 2 members in sample 0 of the batch, and 1 in sample 1"),
        ([(X, [{"y": 1}]), (X, [{"z": 1}])], "sample[1][0]['"),
        ([(X, 1), (X, None)], "type of sample[1] is int in sample 0 of the batch, and None in sample 1"),
        ([(X, 1), (X, "a")], "type of sample[1] is int in sample 0 of the batch, and str in sample 1"),
        ([X, None], "type of sample is Tensor in sample 0 of the batch, and None in sample 1"),
        ([Pair(X, 1), X], "type of sample is Pair in sample 0 of the batch, and Tensor in sample 1"),
        ([{"x": X}, {"x": X[:, :2]}], "sample['x'] has shapes (50, 2), (50, 3)"),
        ([X.numpy(), 3], "type of sample is ndarray in sample 0 of the batch, and int in sample 1"),
        ([X[0], X[0, 0]], "sample has shapes (), (3,)"),
        ([(X, nested(torch.strided))] * 2, "sample[1] is a nested tensor"),
        ([(X, nested(torch.jagged))] * 2, "sample[1] is a nested tensor"),
    ],
)  # fmt: skip
def test_samples_that_are_not_built_alike_are_told_with_their_place(samples: list[Any], value: str) -> None:
    with pytest.raises(DataError) as raised:
        pad_and_stack(samples)
    assert value in str(raised.value)
    assert "Write Task.collate" in str(raised.value)


@pytest.mark.parametrize(
    "changed",
    [lambda row: row[::-1], lambda row: row.astype(">f4"), lambda row: row.astype(np.longdouble),
     lambda row: np.broadcast_to(row[:1], 3), lambda row: row.astype(">c8")],
    ids=["reversed", "big-endian", "long double", "without strides", "big-endian complex"],
)  # fmt: skip
def test_arrays_that_pytorch_does_not_read_as_they_are_become_tensors(changed: Callable[[Any], Any]) -> None:
    rows = [np.arange(3, dtype=np.float32) + start for start in (0, 5)]
    samples = [(changed(row), 1) for row in rows]
    assert [tensor.tolist() for sample in samples for tensor in leaves(sample)] == [changed(r).tolist() for r in rows]
    assert pad_and_stack(samples)[0].tolist() == [changed(row).tolist() for row in rows]


@pytest.mark.parametrize(
    "values", [["id"], [{"a": 1}], np.array(["2020-01-01"], "M8[D]")], ids=["text", "dicts", "days"]
)
def test_arrays_without_numbers_are_kept_as_a_list(values: Any) -> None:
    samples = [{"x": X[0], "of": np.array(values)}] * 2
    assert [tensor.shape for tensor in leaves(samples[0])] == [X[0].shape]
    batch = pad_and_stack(samples)
    assert [each.tolist() for each in batch["of"]] == [np.array(values).tolist()] * 2
    assert replace_leaves(samples[0], iter([7]))["x"] == 7


def test_numbers_of_several_kinds_become_the_widest() -> None:
    assert pad_and_stack([1, 2.5]).tolist() == [1.0, 2.5]
    # No number is rounded before the run's precision is known.
    assert pad_and_stack([0.1, 16777217]).tolist() == [0.1, 16777217.0]
    assert pad_and_stack([True, np.int64(3)]).tolist() == [1, 3]
    assert pad_and_stack([True, np.bool_(False)]).dtype == torch.bool
    ragged = [torch.tensor([1, 2]), np.array([0.5], np.float32), torch.tensor([300], dtype=torch.int16)]
    assert pad_and_stack(ragged).tolist() == [[1.0, 2.0], [0.5, 0.0], [300.0, 0.0]]
    assert pad_and_stack([np.array([60_000], np.uint16), np.array([-1], np.int32)]).tolist() == [[60_000], [-1]]
