import io
import logging
import random
import threading
import weakref
from argparse import Namespace
from array import array
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from can_train.fit import pass_state
from can_train.fit.pass_state import Generators, HeldState, Snapshot, buffer_shapes, load_weights

CPU = torch.device("cpu")


def paired_draws() -> tuple[float, float, list[float]]:
    # Normal variates come in pairs: of one of them, the second waits in the generator.
    return random.gauss(), np.random.normal(), torch.randn(3).tolist()  # noqa: NPY002


class Replacing(nn.Module):
    """Replaces its buffers instead of writing into them; one is made in the first pass."""

    mean: Tensor
    cache: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
        self.cache = x.detach()
        return x - self.mean


def test_the_generators_draw_the_same_again() -> None:
    paired_draws()
    snapshot = Snapshot(nn.Linear(1, 1), CPU)
    first = paired_draws()
    assert paired_draws() != first
    snapshot.restore()
    assert paired_draws() == first
    snapshot.restore()
    assert paired_draws() == first


def test_running_statistics_are_as_before_bit_by_bit() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model(torch.randn(8, 3))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    snapshot = Snapshot(model, CPU)
    model(torch.full((8, 3), torch.inf))
    assert not all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    snapshot.restore()
    assert len(before) == 3
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_buffer_that_was_replaced_is_the_same_tensor_again() -> None:
    model = Replacing()
    mean, snapshot = model.mean, Snapshot(model, CPU)
    model(torch.ones(2, 3))
    mean.add_(5)
    snapshot.restore()
    assert model.mean is mean
    assert mean.tolist() == [0, 0, 0]


def test_a_buffer_that_was_made_in_the_pass_is_gone_again() -> None:
    model = Replacing()
    snapshot = Snapshot(model, CPU)
    model(torch.ones(2, 3))
    assert model.cache is not None
    snapshot.restore()
    assert model.cache is None
    assert "cache" not in model.state_dict()


class Observer(nn.Module):
    """Resizes its buffer in the first pass, as observers of `torch.ao.quantization` do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        least = self.get_buffer("least")
        least.resize_(x.shape[1]).copy_(x.detach().amin(dim=0))
        return x


def test_a_buffer_that_a_pass_has_resized_has_its_shape_again() -> None:
    model = nn.Sequential(Observer())
    least, snapshot = model.get_buffer("0.least"), Snapshot(model, CPU)
    for values, size in (([1.0, 2.0, 3.0], 3), ([4.0, 5.0], 2)):
        model(torch.ones(2, size))
        snapshot.restore()
        assert model.get_buffer("0.least") is least
        assert least.shape == (0,)
        model(torch.tensor([values]))
        later = Snapshot(model, CPU)
        model(torch.ones(2, 5))
        later.restore()
        assert least.tolist() == values


def test_a_buffer_that_a_pass_has_resized_is_loaded_into_a_new_model_alone() -> None:
    model, fresh = nn.Sequential(Observer(), nn.BatchNorm1d(3)), nn.Sequential(Observer(), nn.BatchNorm1d(3))
    declared = buffer_shapes(model).items()
    model(torch.ones(2, 3))
    made = [name for name, _ in buffer_shapes(model).items() - declared]
    assert made == ["0.least"]
    load_weights(fresh, model.state_dict(), made)
    assert fresh.get_buffer("0.least").tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.least"):
        load_weights(nn.Sequential(Observer(), nn.BatchNorm1d(3)), model.state_dict())


class Registering(nn.Module):
    """Registers a buffer in its first pass."""

    def __init__(self, declared: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        if declared:
            self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "seen", None) is None:
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen += len(x)
        return self.layer(x)


def test_a_buffer_that_was_registered_in_the_pass_is_gone_again() -> None:
    model = nn.Sequential(Registering())
    snapshot = Snapshot(model, CPU)
    model(torch.ones(2, 3))
    snapshot.restore()
    assert buffer_shapes(model) == {}
    model(torch.ones(5, 3))
    assert model.get_buffer("0.seen") == 5
    released = Snapshot(model, CPU)
    released.release()
    released.restore()
    assert buffer_shapes(model) == {"0.seen": ()}


@pytest.mark.parametrize("declared", [False, True])
def test_a_buffer_that_the_first_pass_makes_is_loaded_into_a_new_model(declared: bool) -> None:
    model = nn.Sequential(Registering(declared))
    model(torch.ones(5, 3))
    fresh = nn.Sequential(Registering(declared))
    load_weights(fresh, model.state_dict(), made=[] if declared else ["0.seen"])
    assert fresh.state_dict().keys() == model.state_dict().keys()
    assert fresh.get_buffer("0.seen") == 5
    fresh(torch.ones(1, 3))
    assert (fresh.get_buffer("0.seen"), model.get_buffer("0.seen")) == (6, 5)


@pytest.mark.parametrize("name", ["0.seen", "1.seen", "0.layer.scale"])
def test_weights_that_a_model_does_not_have_are_refused(name: str) -> None:
    model = nn.Sequential(Registering())
    with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{name}"'):
        load_weights(model, {**model.state_dict(), name: torch.zeros(())})


def test_buffers_that_are_not_saved_are_restored_too() -> None:
    model = nn.Module()
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
    snapshot = Snapshot(model, CPU)
    steps = model.get_buffer("steps")
    steps += 1
    snapshot.restore()
    assert steps.item() == 0


def test_parameters_are_left_alone() -> None:
    model = nn.Linear(3, 3)
    snapshot = Snapshot(model, CPU)
    with torch.no_grad():
        model.weight.fill_(7)
    snapshot.restore()
    assert bool((model.weight == 7).all())


@pytest.mark.parametrize("restored", [True, False])
def test_a_pass_that_is_run_again_is_the_same_only_where_the_snapshot_was_restored(restored: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    x = torch.randn(8, 3)
    snapshot = Snapshot(model, CPU)
    first, buffers = model(x), [buffer.clone() for buffer in model.buffers()]
    if restored:
        snapshot.restore()
    assert torch.equal(model(x), first) is restored
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), buffers, strict=True)) is restored


@pytest.mark.parametrize("drawn", [0, 1, 2, 3])
def test_a_later_snapshot_restores_what_was_drawn_since_an_earlier_one(drawn: int) -> None:
    """Numbers of a normal distribution are drawn in pairs: of an odd one, the second is kept."""
    model = nn.Linear(1, 1)
    np.random.seed(0)  # noqa: NPY002
    earlier = Snapshot(model, CPU)
    np.random.normal(size=drawn)  # noqa: NPY002
    later = Snapshot(model, CPU, since=earlier)
    latest = Snapshot(model, CPU, since=later)
    expected = np.random.normal(size=3).tolist()  # noqa: NPY002
    for snapshot in (later, latest):
        snapshot.restore()
        assert np.random.normal(size=3).tolist() == expected  # noqa: NPY002
    earlier.restore()
    np.random.normal(size=drawn)  # noqa: NPY002
    assert np.random.normal(size=3).tolist() == expected  # noqa: NPY002


def test_a_kept_normal_number_that_was_used_is_noticed() -> None:
    model = nn.Linear(1, 1)
    np.random.seed(0)  # noqa: NPY002
    np.random.normal()  # noqa: NPY002
    earlier = Snapshot(model, CPU)
    np.random.normal()  # noqa: NPY002 - the kept one: no word of the state changes
    later = Snapshot(model, CPU, since=earlier)
    expected = np.random.normal()  # noqa: NPY002
    later.restore()
    assert np.random.normal() == expected  # noqa: NPY002


def test_a_snapshot_that_is_released_holds_no_copies() -> None:
    model = nn.BatchNorm1d(3)
    snapshot = Snapshot(model, CPU)
    assert len(snapshot.copies) == 3
    snapshot.release()
    assert snapshot.copies == []


def test_modules_and_parameters_come_in_pytorchs_order_each_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(nn.BatchNorm1d(2), shared, nn.LSTM(2, 2)), nn.Linear(2, 2, bias=False))
    model.add_module("empty", None)
    model[2].weight = shared.weight
    model.register_parameter("none", None)
    assert pass_state.modules_of(model) == list(model.modules())
    assert list(map(id, pass_state.parameters_of(model))) == list(map(id, model.parameters()))


class Noting(nn.Module):
    """A module that keeps results and counts in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.seen, self.words = 0, [0], {"a": 1}
        self.hidden: Tensor | None = None
        self.map = torch.zeros(2**15)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.seen.append(self.passes)
        self.last = x
        self.hidden = x * 2
        self.map = torch.full((2**15,), float(self.passes))
        return self.hidden


def test_attributes_that_a_pass_changes_are_as_before() -> None:
    module, x = Noting(), torch.ones(3, requires_grad=True)
    module(x)
    before = module.hidden
    snapshot = Snapshot(module, CPU)
    for _ in range(2):
        module(2 * x)
        snapshot.restore()
        assert (module.passes, module.seen) == (1, [0, 1])
        assert torch.equal(module.hidden, before.detach())
        assert module.hidden.grad_fn is None
    del module.last
    Snapshot(module, CPU, since=snapshot).restore()
    assert not hasattr(module, "last")


def test_code_that_a_pass_attaches_to_a_module_stays() -> None:
    module = Noting()
    snapshot = Snapshot(module, CPU)
    module._compiled_call_impl = module.hook = len
    module.new = 3
    snapshot.restore()
    assert module._compiled_call_impl is module.hook is len
    assert not hasattr(module, "new")


def test_a_large_tensor_that_a_pass_replaces_is_not_kept_for_the_state() -> None:
    module = Noting()
    large = weakref.ref(module.map)
    snapshot = Snapshot(module, CPU)
    module(torch.ones(3))
    assert large() is None
    snapshot.restore()
    assert module.map[0] == 1


@pytest.mark.parametrize("kind", [dict, OrderedDict, list, set, deque])
def test_nothing_is_written_into_a_container_that_has_not_changed(kind: type) -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = kind([("a", 1), ("b", 2)])

    module = Watched()
    for changes in (False, True):
        snapshot = Snapshot(module, CPU)
        walk = iter(module.words)
        next(walk)
        if changes:
            module.words.clear()
        snapshot.restore()
        assert len(module.words) == 2
        if not changes:
            # An iterator of another thread would fail where the container was filled anew.
            assert len([*walk]) == 1


def test_containers_with_many_items_in_all_are_no_state() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few, self.table = [1], [[number] * 900 for number in range(100)]

    module = Looked()
    snapshot = Snapshot(module, CPU)
    assert len(snapshot._python._contents) < 20
    module.few.append(2)
    snapshot.restore()
    assert module.few == [1]


def test_a_reading_shares_the_state_of_pythons_generator_until_it_draws() -> None:
    earlier = Generators(CPU)
    assert Generators(CPU, since=earlier)._of_host._python is earlier._of_host._python
    random.gauss(0, 1)  # Draws two numbers, and keeps the second
    drawn = Generators(CPU, since=earlier)
    assert drawn._of_host._python is not earlier._of_host._python
    expected = random.gauss(0, 1)
    kept = Generators(CPU, since=drawn)
    assert kept._of_host._python is not drawn._of_host._python, "the second number was used"
    drawn.restore()
    assert random.gauss(0, 1) == expected
    earlier.restore()
    assert Generators(CPU)._of_host._python == earlier._of_host._python


def test_the_words_that_are_compared_tell_any_two_states_of_a_generator_apart() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    python, numpy = set(), set()
    for draws in (0, 1, 621, 1, 1, 1, 623, 624, 625):  # A generator makes 624 words at once
        for _ in range(draws):
            random.getrandbits(32)
            np.random.bytes(4)  # noqa: NPY002
        python.add(pass_state._python_words())
        numpy.add(pass_state._numpy_words())
    for seed in range(1, 300):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        python.add(pass_state._python_words())
        numpy.add(pass_state._numpy_words())
    assert len(python) == len(numpy) == 9 + 299
    assert all(words for words, _ in python)
    assert all(numpy)


calls = 0


class Counts:
    """Counts, and keeps its last number only once it has one."""

    def __init__(self) -> None:
        self.count, self.seen = 0, list[int]()

    def __call__(self, number: int) -> None:
        self.count += number
        self.seen.append(number)
        self.last = number


class Reads(Counts):
    """Counts the numbers that it takes from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(100))

    def __call__(self, number: int) -> None:
        super().__call__(next(self.numbers))


def test_a_call_of_a_function_is_undone_in_all_that_the_function_holds() -> None:
    rows, counts, norm, means = 0, Counts(), nn.BatchNorm1d(3), {"mean": torch.zeros(())}
    weight = nn.Parameter(torch.ones(3))

    def function() -> None:
        global calls  # noqa: PLW0603 - as in a script
        nonlocal rows
        calls += 1
        rows += 2
        counts(4)
        norm(torch.rand(4, 3))
        means["mean"] += 1
        means["new"] = torch.ones(())

    held, state = HeldState([function], nn.Linear(1, 1), CPU), torch.get_rng_state()
    function()
    with torch.no_grad():
        weight += 1
    held.restore()
    assert (calls, rows, counts.count, counts.seen, hasattr(counts, "last")) == (0, 0, 0, [], False)
    assert norm.num_batches_tracked == 0
    assert not norm.running_mean.any()
    assert means == {"mean": torch.zeros(())}
    assert torch.equal(torch.get_rng_state(), state)
    assert weight.eq(2).all()


def test_an_object_whose_place_in_an_iterator_cannot_be_put_back_is_left_as_it_is() -> None:
    reads, parts = Reads(), Reads()
    reader = partial(lambda first, second: (first(0), second(0)), reads, second=parts)
    held = HeldState([reader], nn.Linear(1, 1), CPU)
    for _ in range(3):
        reader()
    held.restore()
    assert not held.is_whole
    assert reads.last == parts.last == next(reads.numbers) - 1
    assert (reads.count, len(reads.seen)) == (3, 3)


@dataclass(slots=True)
class Slotted:
    """Has its attributes in slots."""

    count: int = 0


@dataclass
class Guarded:
    """Counts beside objects that are no state of a loop."""

    count: int = 0
    seen: list[int] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)
    logger: Any = field(default_factory=lambda: logging.getLogger("loop"))
    optimizer: Any = field(default_factory=lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))]))

    def add(self) -> None:
        """Counts once more."""
        self.count += 1
        self.seen.append(self.count)


class OfClass:
    """Counts in the class."""

    count = 0


class Own(dict[str, int]):
    """Is derived from a dictionary."""


def plus_one(held: Any) -> None:
    """Adds 1 to a count of that name."""
    if hasattr(held, "count") and not isinstance(held, (bytearray, array)):
        held.count += 1
    else:
        held["count"] += 1


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "slots": (Slotted, plus_one, lambda held: held.count),
    "lock, logger and optimizer": (Guarded, Guarded.add, lambda held: (held.count, len(held.seen))),
    "class": (lambda: OfClass, plus_one, lambda held: held.count),
    "namespace": (lambda: SimpleNamespace(count=0), plus_one, lambda held: held.count),
    "arguments": (lambda: Namespace(count=0), plus_one, lambda held: held.count),
    "counter": (Counter, lambda held: held.update("a"), lambda held: held["a"]),
    "derived dictionary": (lambda: Own(count=0), plus_one, dict),
    "user's dictionary": (lambda: UserDict(count=0), plus_one, lambda held: held["count"]),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a"), list),
    "bytes": (bytearray, lambda held: held.extend(b"a"), len),
    "array": (lambda: array("d"), lambda held: held.append(1), len),
    "matrix": (lambda: np.zeros((300, 300)), lambda held: held.__iadd__(1), lambda held: held[0, 0]),
    "tensor": (lambda: torch.zeros(300, 300), lambda held: held.add_(1), lambda held: float(held[0, 0])),
    "through data": (lambda: torch.zeros(3), lambda held: held.data.add_(1), lambda held: float(held[0])),
    "other memory": (lambda: torch.zeros(3), lambda held: setattr(held, "data", held + 1), lambda held: float(held[0])),
}


@pytest.mark.parametrize("name", STATES)
def test_state_is_put_back_of_all_that_loops_count_in(name: str) -> None:
    make, change, read = STATES[name]
    counted = make()
    before, held = read(counted), HeldState([lambda: change(counted)], nn.Linear(1, 1), CPU)
    change(counted)
    assert read(counted) != before
    held.restore()
    assert read(counted) == before
    assert held.is_whole


def test_weights_that_are_not_trained_are_put_back_and_others_noticed() -> None:
    for trained in (False, True):
        model = nn.Linear(2, 2).requires_grad_(trained)
        before, held = model.weight.detach().clone(), HeldState([model], model, CPU)
        with torch.no_grad():
            model.weight.mul_(2)
        held.restore()
        assert torch.equal(model.weight, before) is not trained
        assert held.is_whole is not trained
        assert held.has_moved is trained


class Full(HeldState):
    """Runs out of memory as it copies an array."""

    def _read_array(self, array: Any) -> None:
        raise torch.OutOfMemoryError


def test_copies_are_freed_with_the_state_and_where_memory_runs_out() -> None:
    counts, model = Counts(), nn.BatchNorm1d(2)
    held = HeldState([counts], model, CPU)
    alive = weakref.ref(held)
    held.restore()
    del held
    assert alive() is None
    made = Full.__new__(Full)
    alive = weakref.ref(made)
    with suppress(torch.OutOfMemoryError):
        made.__init__([torch.ones(2), np.ones(2)], model, CPU)  # type: ignore[misc]
    del made
    assert alive() is None


def test_objects_of_another_thread_are_left_alone() -> None:
    guarded, ahead, counts, ends = Guarded(), [0], Counts(), threading.Event()
    thread = threading.Thread(target=ends.wait, daemon=True)
    thread.start()
    held = HeldState([lambda: (guarded, ahead, counts)], nn.Linear(1, 1), CPU)
    assert not held.is_whole
    guarded.add()
    ahead.append(1)
    counts(1)
    held.restore()
    ends.set()
    thread.join()
    assert (guarded.count, guarded.seen, ahead, counts.count) == (1, [1], [0, 1], 0)


def test_objects_of_cells_are_put_back_while_threads_of_a_notebook_run() -> None:
    losses, ends = [0.0], threading.Event()

    class HistorySavingThread(threading.Thread):
        __module__ = "IPython.core.history"

        def __init__(self) -> None:
            super().__init__(daemon=True)
            self.user_ns = {"losses": losses}

        def run(self) -> None:
            ends.wait()

    thread = HistorySavingThread()
    thread.start()
    held = HeldState([lambda: losses], nn.Linear(1, 1), CPU)
    losses.append(1.0)
    held.restore()
    ends.set()
    thread.join()
    assert (losses, held.is_whole) == ([0.0], True)


def test_the_thread_of_a_progress_bar_keeps_no_state_from_being_put_back() -> None:
    with pytest.importorskip("tqdm").tqdm(file=io.StringIO()) as bar:
        assert isinstance(bar.monitor, threading.Thread)
        guarded = Guarded()
        held = HeldState([guarded.add], nn.Linear(1, 1), CPU)
        guarded.add()
        held.restore()
    assert (guarded.count, guarded.seen) == (0, [])
    assert held.is_whole


class Points(Dataset[int]):
    """Counts the samples that are read."""

    def __init__(self) -> None:
        self.read_samples, self.iterator = 0, iter(range(3))


def test_data_sets_and_objects_that_are_left_out_are_left_as_they_are() -> None:
    points, counts, other = Points(), Counts(), Counts()
    held = HeldState([lambda: (points, counts, other)], nn.Linear(1, 1), CPU, left_out=[counts])
    points.read_samples, counts.count, other.count = 1, 1, 1
    held.restore()
    assert held.is_whole
    assert (points.read_samples, counts.count, other.count) == (1, 1, 0)


def test_state_that_an_object_keeps_to_itself_is_noticed() -> None:
    counts = Counts()
    assert HeldState([counts], nn.Linear(1, 1), CPU).is_whole
    vars(counts)["last"] = pytest.importorskip("polars").DataFrame({"a": [1]})
    assert not HeldState([counts], nn.Linear(1, 1), CPU).is_whole


def test_objects_that_hold_themselves_and_large_data_are_read_once() -> None:
    data, endless = torch.zeros(2**20), list[object]()
    endless.append(endless)
    counts = Counts()
    vars(counts)["owner"] = counts

    def function() -> None:
        counts(1)
        endless.append(data)

    held = HeldState([function], nn.Linear(1, 1), CPU)
    assert held.is_whole
    function()
    held.restore()
    assert len(endless) == 1
    assert counts.count == 0


def test_a_buffer_that_is_expanded_is_restored() -> None:
    model, scale = nn.Linear(2, 2), torch.ones(1, 3)
    model.register_buffer("scales", scale.expand(4, 3))
    snapshot = Snapshot(model, CPU)
    scale.add_(1)
    snapshot.restore()
    assert scale.eq(1).all()


def test_an_object_that_cannot_be_written_to_keeps_no_other_from_being_put_back() -> None:
    counts, grows, temperature = Counts(), np.zeros(2), torch.ones(1)
    expanded = temperature.expand(4)

    def function() -> None:
        grows.resize(grows.size + 1, refcheck=False)
        temperature.mul_(expanded[0] * 2)
        counts(1)

    held = HeldState([function], nn.Linear(1, 1), CPU)
    function()
    held.restore()
    assert (counts.count, float(temperature), len(grows)) == (0, 1.0, 3)
