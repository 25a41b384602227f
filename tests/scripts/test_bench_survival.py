"""What `scripts/bench/survival` judges tools by: its graphs, its modelled machine, what it counts, and its goals."""

from collections.abc import Iterator
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch

from bench.measure_survival import BY_COST, OWN, cells, missed_goals, modelled_table
from bench.survival_tools import by_plan, by_prediction, by_search, filled, fixed, look, next_fit, of_size, sweep
from bench.survival_world import (
    BASE_BYTES,
    CAPACITY_BYTES,
    EDGE_BYTES,
    NODE_BYTES,
    NODE_S,
    PASS_S,
    RELEASE_S,
    Choice,
    Graphs,
    Machine,
    ModelledMachine,
    Outcome,
    Replay,
    draw_graphs,
    measure,
    replay,
    shuffled,
    simulated,
)

GRAPHS = draw_graphs(2_000, median_nodes=100, most_nodes=12_000)
SMALL = draw_graphs(300, median_nodes=30, most_nodes=1_000)


def equal_graphs(count: int, share: float) -> Graphs:
    """Graphs of which each takes a share of the modelled room, without edges."""
    nodes = int(share * (CAPACITY_BYTES - BASE_BYTES) / NODE_BYTES)
    return Graphs(np.full(count, nodes), np.zeros(count, np.int64))


def outcome(**changes: object) -> Outcome:
    good = Outcome("512 graphs", True, 8, 2, 0.9, 0, 0, 0, 0, 3, 0.75, 95.0)
    return good._replace(**changes)


def test_graphs_have_a_heavy_tail_and_the_same_seed_draws_the_same() -> None:
    assert 90 < np.median(GRAPHS.nodes) < 110
    assert GRAPHS.nodes.max() == 12_000
    ratio = GRAPHS.edges / GRAPHS.nodes
    assert 1.4 < ratio.min() < 2
    assert 9 < ratio.max() <= 10
    assert all(map(np.array_equal, GRAPHS, draw_graphs(2_000, median_nodes=100, most_nodes=12_000)))


def test_every_single_graph_fits() -> None:
    largest = (NODE_BYTES * GRAPHS.nodes + EDGE_BYTES * GRAPHS.edges).max()
    assert largest < 0.6 * (CAPACITY_BYTES - BASE_BYTES)


def test_epochs_have_every_graph_once_but_for_an_incomplete_last_batch() -> None:
    batches = list(islice(shuffled(GRAPHS, 300), 12))
    assert {len(batch) for batch in batches} == {300}
    epochs = [np.concatenate(batches[:6]), np.concatenate(batches[6:])]
    assert all(len(set(epoch.tolist())) == 1_800 for epoch in epochs)
    assert not np.array_equal(*epochs)


def test_a_modelled_pass_fits_below_the_capacity_and_raises_above_it() -> None:
    machine = ModelledMachine(equal_graphs(4, 0.4))
    assert machine.compute(np.arange(2)) == pytest.approx(BASE_BYTES + 0.8 * (CAPACITY_BYTES - BASE_BYTES), rel=0.1)
    with pytest.raises(torch.OutOfMemoryError):
        machine.compute(np.arange(3))
    counted = machine.new_tally()
    assert (counted.graphs, len(counted.fills), counted.ooms) == (2, 1, 1)
    nodes = 5 * machine.graphs.nodes[0]
    assert counted.seconds == pytest.approx(2 * PASS_S + RELEASE_S + nodes * NODE_S)
    assert machine.tally.seconds == 0


def test_a_run_that_ends_is_counted_and_goes_on_with_the_next_batch() -> None:
    machine = ModelledMachine(equal_graphs(4, 0.4))
    sizes = [2, 3, 2, 3]
    went = replay(machine, (np.arange(size) for size in sizes), len(sizes))
    assert went == Replay(ends=2, first_end=2)
    assert machine.tally.graphs == 4


def test_steps_that_are_computed_again_count_as_time_and_not_as_graphs() -> None:
    def choose(machine: Machine) -> Choice:
        machine.compute(np.arange(1))

        def train(steps: int) -> Replay:
            replay(machine, shuffled(machine.graphs, 2), steps)
            return Replay(restarts=1, repeated=steps - 1, wasted=2 * (steps - 1), size="2 to 1")

        return Choice("2", train)

    found = measure(ModelledMachine(equal_graphs(4, 0.4)), choose, 5)
    assert (found.size, found.trials, found.trial_ooms, found.restarts, found.repeated) == ("2 to 1", 1, 0, 1, 4)
    whole = measure(ModelledMachine(equal_graphs(4, 0.4)), partial(of_size, size=2), 5)
    assert found.rate == pytest.approx(whole.rate / 5)


def test_sizes_by_hand_follow_from_the_law() -> None:
    read = look(ModelledMachine(GRAPHS), 0.9)
    assert read.node_bytes == pytest.approx(NODE_BYTES, rel=0.1)
    assert read.edge_bytes == pytest.approx(EDGE_BYTES, rel=0.1)
    size = read.graphs(GRAPHS)
    mean = NODE_BYTES * GRAPHS.nodes.mean() + EDGE_BYTES * GRAPHS.edges.mean()
    assert BASE_BYTES + size * mean == pytest.approx(0.9 * CAPACITY_BYTES, rel=0.05)
    assert read.most(GRAPHS, "node") == pytest.approx(size * GRAPHS.nodes.mean(), abs=1)
    assert read.most(GRAPHS, "edge") == pytest.approx(size * GRAPHS.edges.mean(), abs=1)


def test_next_fit_fills_up_to_the_limit_and_leaves_nothing_out() -> None:
    costs = np.array([3.0, 4.0, 2.0, 9.0, 1.0, 1.0])
    batches = [batch.tolist() for batch in next_fit(iter([np.arange(6)]), costs, 7.0)]
    assert batches == [[0, 1], [2], [3], [4, 5]]


def test_the_sweep_takes_the_fastest_that_never_runs_out_of_memory() -> None:
    best = sweep(GRAPHS, 300)
    assert len(best) == 2
    assert all(found.ooms == 0 for found in best.values())
    fastest = best["the best fill by the law"]
    for share in (0.7, 0.8, 0.99):
        other = measure(ModelledMachine(GRAPHS), partial(filled, share=share), 300)
        assert other.ooms or other.rate <= fastest.rate


@pytest.mark.parametrize("choose", [by_plan, by_search])
def test_no_run_of_can_train_ends_where_a_size_by_hand_does(choose) -> None:
    own = measure(ModelledMachine(GRAPHS), partial(choose, logical=512), 60)
    assert (own.ends, own.restarts, own.keeps_batch) == (0, 0, True)
    assert own.trials > 3
    by_hand = measure(ModelledMachine(GRAPHS), partial(fixed, share=0.9), 60)
    assert by_hand.ends > 3


@pytest.fixture
def steps() -> Iterator[Machine]:
    with simulated(SMALL) as machine:
        yield machine


def test_real_steps_have_a_peak_that_grows_and_run_out_of_memory(steps: Machine) -> None:
    small, large = (steps.compute(np.arange(size)) for size in (20, 60))
    assert small < large < steps.capacity_bytes
    before = [parameter.detach().clone() for parameter in steps.model.parameters()]
    with pytest.raises(torch.OutOfMemoryError):
        steps.compute(np.resize(np.arange(300), 900))
    assert all(map(torch.equal, before, steps.model.parameters()))
    counted = steps.new_tally()
    assert (counted.graphs, len(counted.fills), counted.ooms) == (80, 2, 1)


def test_a_backward_pass_that_runs_out_of_memory_changes_no_weight_and_is_counted_once(steps: Machine) -> None:
    def full(gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    before = [parameter.detach().clone() for parameter in steps.model.parameters()]
    steps.model.first.weight.register_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        steps.compute(np.arange(20))
    assert all(parameter.grad is None for parameter in steps.model.parameters())
    assert all(map(torch.equal, before, steps.model.parameters()))
    counted = steps.new_tally()
    assert (counted.graphs, counted.ooms) == (0, 1)


def test_the_last_pass_of_a_training_counts(steps: Machine) -> None:
    steps.loss(np.arange(20)).backward()
    counted = steps.new_tally()
    assert (counted.graphs, len(counted.fills), steps.tally.graphs) == (20, 1, 0)


def test_can_train_computes_real_steps_in_parts_within_what_it_predicted(steps: Machine) -> None:
    own = measure(steps, partial(by_prediction, logical=280), 2)
    assert (own.ends, own.keeps_batch) == (0, True)
    assert 0.2 < own.fill < 1


def test_missed_goals_are_named() -> None:
    swept = {"the best": outcome(rate=100.0)}
    assert missed_goals({BY_COST: outcome()}, swept, {f"{OWN}, another": outcome()}) == []
    assert missed_goals({BY_COST: outcome(rate=80.0)}, swept, {}) == [f"{BY_COST}: 80.0% of the fastest, less than 90%"]
    for bad in (outcome(ends=1), outcome(restarts=1), outcome(keeps_batch=False)):
        assert len(missed_goals({BY_COST: bad}, swept, {})) == 1
        assert len(missed_goals({BY_COST: outcome()}, swept, {f"{OWN}, another": bad})) == 1
        assert missed_goals({BY_COST: outcome(), "a peer": bad}, swept, {}) == []


def test_the_tables_say_when_a_run_ended_and_what_was_repeated() -> None:
    assert cells(outcome(ends=1_733, first_end=2, restarts=22, repeated=20_159)) == [
        "512 graphs", "yes", "8/2", "1,733 (step 2)", "22 (20,159)", "3", "75.0%",
    ]  # fmt: skip
    assert cells(outcome(ends=3, first_end=1))[3:5] == ["3 (step 1)", "0"]
    assert cells(outcome(restarts=4))[3:5] == ["0", "4 (0)"]
    table = modelled_table({"one": outcome()}, {"best": outcome(rate=100.0)})
    assert [line.split(" | ")[-2:] for line in table.splitlines()[2:]] == [["95.0%", "0.9 |"], ["100.0%", "0.9 |"]]
