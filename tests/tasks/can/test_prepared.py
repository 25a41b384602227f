"""Inputs that are prepared with the graphs: the same bits as inputs that are computed in the step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from can_train_tasks.can.data.batches import Gatherer, PreparedBatch
from can_train_tasks.can.data.graphs import FlatGraphs
from can_train_tasks.can.inputs import InputEncoder, InputStatistics
from can_train_tasks.can.prepared import PreparedGraphs, prepare_graphs, prepared_bytes
from can_train_tasks.can.settings import BEHAVIOUR_FEATURES, CanDatasetSettings
from fakes.random_bus import cached_graphs, random_blocks

WINDOWS = 60
CHOSEN = np.arange(7, 50)
ROWS = np.array([31, 7, 49, 7, 20])
HIDDEN = torch.tensor([True, False, True, True, False])


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> FlatGraphs:
    return cached_graphs(tmp_path_factory.mktemp("graphs"), [random_blocks(WINDOWS)])


def encoder_without(flat: FlatGraphs, can_id: int, **settings: object) -> InputEncoder:
    """Makes an encoder to which `can_id` is an unknown ID."""
    fitted = InputStatistics.fit(flat, np.arange(WINDOWS))
    place = int(np.searchsorted(fitted.vocabulary, can_id))
    fitted = fitted._replace(vocabulary=np.delete(fitted.vocabulary, place))
    tables = {name: np.delete(getattr(fitted, name), place + 1, axis=0) for name in ("id_mean", "id_std", "id_silence")}
    dataset = CanDatasetSettings(**settings)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return InputEncoder(fitted._replace(**tables), embedding=4, dataset=dataset)


def tensors(batch: PreparedBatch) -> dict[str, Tensor]:
    parts = {**vars(batch), **(vars(batch.reconstructed) if batch.reconstructed else {})}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


@pytest.mark.parametrize("features", ["behaviour", "classic"])
@pytest.mark.parametrize("identity", [True, False])
@pytest.mark.parametrize("reconstructs", [True, False])
@pytest.mark.parametrize("hides", [True, False])
def test_prepared_inputs_have_the_bits_of_inputs_that_the_step_computes(
    flat: FlatGraphs, *, features: str, identity: bool, reconstructs: bool, hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("can_train_tasks.can.prepared._WINDOWS_AT_A_TIME", 10)
    inputs = encoder_without(flat, int(flat.ids[2]), features=features, identity=identity)
    prepared = prepare_graphs(flat, CHOSEN, inputs, hides=hides, reconstructs=reconstructs)(ROWS)
    raw = Gatherer(flat)(ROWS)
    if hides:
        prepared, raw = (replace(batch, hidden=HIDDEN) for batch in (prepared, raw))  # type: ignore[type-var]
    computed = inputs.prepared(raw, reconstructs=reconstructs)
    assert tensors(prepared).keys() == tensors(computed).keys()
    for name, part in tensors(computed).items():
        assert torch.equal(part, tensors(prepared)[name]), name
    assert torch.equal(inputs(prepared), inputs(computed))
    if features == BEHAVIOUR_FEATURES and identity:
        assert (computed.node[:, -1] > 0).any()


@pytest.mark.parametrize("reconstructs", [True, False])
@pytest.mark.parametrize("hides", [True, False])
def test_inputs_gathered_on_the_device_have_the_bits_of_inputs_gathered_on_the_host(
    flat: FlatGraphs, *, reconstructs: bool, hides: bool
) -> None:
    inputs = encoder_without(flat, int(flat.ids[2]))
    graphs = prepare_graphs(flat, CHOSEN, inputs, hides=hides, reconstructs=reconstructs)
    expected = tensors(graphs.to(ROWS, torch.device("cpu"), torch.float32))
    # Copies, so that the arrays on the host could be changed unseen.
    graphs.on_device = {name: torch.from_numpy(array.copy()) for name, array in graphs.arrays.items()}
    graphs.node[:] = 0
    gathered = tensors(graphs.to(ROWS, torch.device("cpu"), torch.float32))
    assert gathered.keys() == expected.keys()
    for name, part in expected.items():
        assert (gathered[name].dtype, gathered[name].is_contiguous()) == (part.dtype, part.is_contiguous()), name
        assert torch.equal(gathered[name], part), name


def test_windows_that_were_not_prepared_are_not_gathered(flat: FlatGraphs) -> None:
    inputs = encoder_without(flat, int(flat.ids[2]))
    with pytest.raises(ValueError, match="not prepared"):
        prepare_graphs(flat, CHOSEN, inputs, hides=True, reconstructs=True)(np.array([7, 50]))


def test_columns_of_a_hidden_id_are_those_of_an_unknown_bus(flat: FlatGraphs) -> None:
    inputs = encoder_without(flat, int(flat.ids[2]))
    batch = Gatherer(flat)(ROWS)
    is_hidden = HIDDEN[batch.batch]
    strangers = replace(batch, can_id=torch.where(is_hidden, 4000 + batch.can_id, batch.can_id))
    unknown, known = (inputs(inputs.prepared(replace(each, hidden=hidden)))
                      for each, hidden in ((strangers, None), (batch, HIDDEN)))  # fmt: skip
    assert torch.equal(unknown, known)


def test_memory_of_prepared_inputs_is_foretold(flat: FlatGraphs) -> None:
    inputs = encoder_without(flat, int(flat.ids[2]))
    for kinds in ({"hides": True, "reconstructs": True}, {"hides": False, "reconstructs": False}):
        prepared = prepare_graphs(flat, CHOSEN, inputs, **kinds)
        foretold = prepared_bytes(flat, CHOSEN, inputs, **kinds)
        assert bytes_of(prepared) <= foretold <= 1.1 * bytes_of(prepared)


def bytes_of(prepared: PreparedGraphs) -> int:
    return sum(array.nbytes for array in vars(prepared).values() if isinstance(array, np.ndarray))
