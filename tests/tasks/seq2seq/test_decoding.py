import math
from typing import Any

import pytest
import torch
from torch import Tensor

from can_train_tasks.seq2seq.encoder_decoders import Encoded, Seq2seqModel, write
from can_train_tasks.seq2seq.pair_tables import END, PAD, START
from can_train_tasks.seq2seq.task import Batch
from tasks.seq2seq.conftest import MODELS, MakeTask

A, B = 4, 5
LONGEST = 8


class Table(Seq2seqModel):
    """Tells next symbols by a table of probabilities for each text so far."""

    def __init__(self, table: dict[tuple[int, ...], dict[int, float]]) -> None:
        super().__init__()
        self.table = table

    def encode(self, source: Tensor) -> Encoded:
        return Encoded(source[..., None].float(), source.float(), source == PAD)

    def decode(self, encoded: Encoded, target: Tensor) -> Tensor:
        raise NotImplementedError

    def begin(self, encoded: Encoded, width: int) -> Any:
        return torch.empty(len(encoded.memory), width, 0, dtype=torch.int64)

    def step(self, encoded: Encoded, state: Any, last: Tensor) -> tuple[Tensor, Any]:
        state = torch.cat([state, last[..., None]], dim=-1)
        logits = torch.full((*last.shape, 6), -30.0)
        for n, b in torch.cartesian_prod(*map(torch.arange, last.shape)).tolist():
            for symbol, share in self.table.get(tuple(state[n, b, 1:].tolist()), {END: 1.0}).items():
                logits[n, b, symbol] = math.log(share)
        return logits, state

    def chosen(self, state: Any, beams: Tensor) -> Any:
        return state.gather(1, beams[..., None].expand_as(state))


# The likeliest first symbol leads to unlikely texts.
GARDEN_PATH = Table({(): {A: 0.6, B: 0.4}, (A,): {A: 0.3, B: 0.3, END: 0.4}, (B,): {B: 1.0}, (B, B): {END: 1.0}})


@pytest.mark.parametrize(("width", "expected"), [(1, [A, END]), (2, [B, B, END]), (6, [B, B, END])])
def test_a_beam_finds_what_the_greedy_search_passes_by(width: int, expected: list[int]) -> None:
    found = write(GARDEN_PATH, torch.tensor([[A]]), width=width, longest=LONGEST).symbols[0, 0].tolist()
    assert [symbol for symbol in found if symbol != PAD] == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_step_tells_what_the_whole_target_tells(make_task: MakeTask, name: str) -> None:
    task = make_task(name)
    model = task.build_model().double().eval()
    assert isinstance(model, Seq2seqModel)
    batch: Batch = task.collate([task.sample(int(row)) for row in task.train_rows[:5]])
    encoded = model.read(batch.source, batch.features)
    whole = model.decode(encoded, batch.before)
    state = model.begin(encoded, 3)
    for position in range(batch.before.shape[1]):
        logits, state = model.step(encoded, state, batch.before[:, position, None].expand(-1, 3))
        assert torch.allclose(logits, whole[:, position, None].expand_as(logits), atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_greedy_search_takes_the_likeliest_symbol_at_every_step(make_task: MakeTask, name: str) -> None:
    task = make_task(name)
    model = task.build_model().double().eval()
    assert isinstance(model, Seq2seqModel)
    batch = task.collate([task.sample(int(row)) for row in task.train_rows[:5]])
    found = write(model, batch.source, batch.features, width=1, longest=LONGEST).symbols[:, 0]
    before = torch.cat([torch.full((5, 1), START), found[:, :-1]], dim=1)
    logits = model(batch.source, before, batch.features)
    logits[..., [PAD, START]] = -torch.inf
    ended = (before == END).cumsum(dim=1) > 0
    assert torch.equal(found, logits.argmax(dim=-1).masked_fill(ended, PAD))


@pytest.mark.parametrize("name", MODELS)
def test_a_wider_beam_never_finds_less_likely_texts_of_one_batch_than_of_single_sources(
    make_task: MakeTask, name: str
) -> None:
    task = make_task(name, beam_width=3)
    model = task.build_model().double().eval()
    samples = [task.sample(int(row)) for row in task.train_rows[:6]]
    together = [str(written) for written in task.predict(model, task.collate(samples))]
    assert together == [str(task.predict(model, task.collate([sample]))[0]) for sample in samples]
