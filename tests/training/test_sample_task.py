"""A task that is described by its samples is trained, split, resumed and judged as every other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import WeightedRandomSampler

from can_train import Feature, Phase, Task, predict_peak, simulated_gpu
from can_train.config.settings import TrainingSettings
from can_train.errors import ConfigError, DataError, DoesNotFitError, Stopped, TaskError
from can_train.fit.epochs import epoch_shares
from can_train.fit.explore import Explorer
from can_train.fit.run_plan import limits_notices
from can_train.memory.meters import SimulatedMeter
from can_train.training.judgement import validation_loss
from can_train.training.sample_task import _CALLED_IF_WRITTEN, tables
from can_train.training.session import Session
from can_train.training.train import make_session, train
from fakes.line_fit import fixed, line_parts
from fakes.sample_tasks import Losses, RareTerm, TwoPhases, TwoTerms, Words
from fakes.streams import streamed


def trained(folder: Path, task: Task, **training: Any) -> Session:
    settings = {"precision": "fp64", "batch_size": 16, "find_batch_size": "off", **training}
    session = make_session(line_parts(folder, task, **settings), fixed(0.5))  # type: ignore[arg-type]
    train(session)
    return session


def weights(session: Session) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in session.model.parameters()])


@pytest.mark.parametrize("kind", [Words, TwoTerms, RareTerm])
def test_a_split_batch_has_the_gradient_of_the_whole_though_only_the_loss_knows_its_denominators(
    kind: type[Task], tmp_path: Path
) -> None:
    whole = trained(tmp_path / "whole", kind())
    split = trained(tmp_path / "split", kind(), micro_batch_size=3)
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-13)
    assert split.engine.run_plan.phase_plan.most_parts == 6


def test_a_term_that_a_part_leaves_out_counts_as_nothing_there(tmp_path: Path) -> None:
    sessions = [trained(tmp_path / f"{size}", RareTerm(), micro_batch_size=size) for size in (1, 3, 16)]
    whole = sessions[-1]
    for session in sessions[:-1]:
        torch.testing.assert_close(weights(session), weights(whole), rtol=1e-12, atol=1e-13)
        assert session.progress.epoch_means == pytest.approx(whole.progress.epoch_means, rel=1e-12)
        assert validation_loss(session) == pytest.approx(validation_loss(whole), rel=1e-12)


def test_its_gradient_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    session = trained(tmp_path, Words(), epochs=1, optimizer="sgd", scheduler="constant", warmup_share=0.0)
    task = Words()
    torch.manual_seed(session.training.seed)
    model = task.build_model().double()
    optimizer = torch.optim.SGD(
        model.parameters(), session.training.lr, 0.9, weight_decay=session.training.weight_decay
    )
    for rows in session.epochs.steps(0):
        total, count = task.loss(model, task.collate([task.sample(int(row)) for row in rows]))["error"]
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    plain = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(weights(session), plain, rtol=1e-12, atol=1e-13)


def test_samples_of_different_length_count_their_lengths_padded_and_summed() -> None:
    task = Words()
    lengths = (Feature("length", 1), Feature("length", 2), Feature("length", 0))
    assert task.memory_features == (*lengths, Feature("samples"))
    lengths = [len(task.sample(row)) for row in range(5)]
    assert task.batch_features(np.arange(5))[:, 0].tolist() == lengths


class OwnCount(Words):
    """Counts something beside what samples count without an override."""

    def features(self, sample: Any) -> Any:
        return super().features(sample) | {"vowels": 1.0}


def test_an_override_of_features_may_add_to_the_lengths() -> None:
    lengths = (Feature("length", 1), Feature("length", 2), Feature("length", 0))
    assert OwnCount().memory_features == (*lengths, Feature("vowels"), Feature("samples"))


class Packed(Words):
    """Computes its words as packed sequences: padding takes no memory."""

    def model(self) -> nn.Module:
        return nn.LSTM(2, 16, batch_first=True)

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        values, lengths = batch
        packed = pack_padded_sequence(values.to(torch.float32), lengths, batch_first=True, enforce_sorted=False)
        return {"size": (model(packed)[0].data.square().sum(), len(lengths))}


class Concatenated(Words):
    """Collates its words one after another."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))

    def collate(self, samples: Sequence[Any]) -> Any:
        return torch.cat([*samples]).to(torch.float32), len(samples)

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        return {"size": (model(batch[0]).square().sum(), batch[1])}


class NextWord(Words):
    """Predicts each word from the one before, so that the last of each sentence is no input."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        values = batch[0].to(torch.float32)
        return {"error": ((model(values[:, :-1]) - values[:, 1:]).square().sum(), batch[1].sum())}


@pytest.mark.parametrize("kind", [Packed, Concatenated, NextWord])
def test_the_memory_of_sequences_follows_the_part_of_their_lengths_that_is_computed(kind: type[Words]) -> None:
    task = kind()
    meter = SimulatedMeter(64 * 2**20)
    explorer = Explorer(task=task, model=task.build_model(), training=TrainingSettings(), meter=meter,
                        rows=task.train_rows)  # fmt: skip
    with meter.active():
        limits = explorer.explore(lambda costs: float(costs.each().sum()))
    assert limits.training.model.explains
    assert not [notice for notice in limits_notices(limits) if "padded to a fixed length" in notice]


def test_a_micro_batch_is_padded_to_its_own_longest_sample() -> None:
    task = Words()
    rows = task.train_rows
    batch = task.logical_batch(rows, torch.device("cpu"), torch.float64, torch.Generator())
    for row in range(4):
        assert batch.collated(row, row + 1)[0].shape[1] == len(task.sample(int(rows[row])))  # type: ignore[attr-defined]


def test_a_tenth_of_the_training_samples_validates_where_a_task_names_no_set_for_it() -> None:
    class Single(Words):
        def datasets(self) -> Mapping[str, Sequence[Any]]:
            return {"train": super().datasets()["train"]}

    task = Single()
    assert len(task.train_rows) == 36
    assert sorted([*task.train_rows, *task.validation_rows]) == list(range(40))
    assert "4 of 40" in task.notices()[0]


def test_an_error_of_the_task_says_what_it_was_asked_for_and_shows_its_own_lines() -> None:
    class Broken(Words):
        def loss(self, model: nn.Module, batch: Any) -> Losses:
            raise ValueError("no labels")

    task = Broken()
    batch = task.logical_batch(task.train_rows[:2], torch.device("cpu"), torch.float64, torch.Generator())
    with pytest.raises(TaskError, match=r"Broken\.loss failed: ValueError: no labels") as caught:
        batch.losses(task.build_model(), 0, 2)
    assert caught.value.traceback.splitlines()[0].startswith("Traceback")
    assert "test_sample_task.py" in caught.value.traceback.splitlines()[1]


def test_a_task_that_exits_has_failed_and_a_signal_in_its_code_has_not() -> None:
    class Ending(Words):
        stop: BaseException = SystemExit(0)

        def loss(self, model: nn.Module, batch: Any) -> Losses:
            raise self.stop

    task = Ending()
    batch = task.logical_batch(task.train_rows[:2], torch.device("cpu"), torch.float64, torch.Generator())
    with pytest.raises(TaskError, match=r"Ending\.loss failed: SystemExit: 0"):
        batch.losses(task.build_model(), 0, 2)
    task.stop = Stopped(143)
    with pytest.raises(Stopped):
        batch.losses(task.build_model(), 0, 2)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({}, "{term: (sum, denominator)}: {}"),
        (torch.zeros(()), "{term: (sum, denominator)}: a tensor of shape ()"),
        ({"error": 3.0}, "a scalar tensor and a number for each term: 'error' is 3.0"),
        ({"error": (torch.zeros(2), 2)},
         "a scalar tensor and a number for each term: 'error' is (a tensor of shape (2,), 2)"),
    ],
)  # fmt: skip
def test_a_loss_that_is_no_sum_with_its_denominator_is_refused(returned: Any, said: str) -> None:
    class Wrong(Words):
        def loss(self, model: nn.Module, batch: Any) -> Losses:
            return returned  # type: ignore[no-any-return]

    task = Wrong()
    batch = task.logical_batch(task.train_rows[:2], torch.device("cpu"), torch.float64, torch.Generator())
    with pytest.raises(DataError) as raised:
        batch.losses(task.build_model(), 0, 2)
    assert str(raised.value) == f"Wrong.loss did not return {said}.\nReturn {{'loss': (losses.sum(), len(losses))}}."


def test_phases_are_split_without_changing_what_any_of_them_sees(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", TwoPhases())
    split = trained(tmp_path / "split", TwoPhases(), micro_batch_size=5)
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-13)
    assert [engine.optimization.scheduler.last_epoch for engine in split.engines] == [12, 6]
    assert [engine.optimization.optimizer.__class__.__name__ for engine in split.engines] == ["AdamW", "SGD"]


def test_phases_that_redraw_by_part_would_not_pass_that_test(tmp_path: Path) -> None:
    class Redrawn(TwoPhases):
        def generator_loss(self, model: Any, batch: Any) -> Losses:
            values, lengths = batch
            return super().generator_loss(model, (values + torch.randn_like(values), lengths))

    whole = trained(tmp_path / "whole", Redrawn())
    split = trained(tmp_path / "split", Redrawn(), micro_batch_size=5)
    assert float((weights(split) - weights(whole)).norm()) > 1e-6


def test_a_phase_whose_loss_is_an_average_of_its_part_is_refused(tmp_path: Path) -> None:
    class Averaged(TwoPhases):
        def generator_loss(self, model: Any, batch: Any) -> Losses:
            total, size = super().generator_loss(model, batch)["generator"]
            return {"generator": (total / size, 1.0)}

    with pytest.raises(DataError, match=r"Averaged\.generator_loss returns is a mean"):
        trained(tmp_path, Averaged())


def test_each_phase_is_planned_by_its_own_cost_with_room_for_the_others_optimizers(tmp_path: Path) -> None:
    session = trained(tmp_path, TwoPhases(), find_batch_size="opt", epochs=1)
    assert [plan.phase for plan in session.own_plan.phases] == ["critic", "generator"]
    assert len({plan.phase_plan.logical_batch for plan in session.own_plan.phases}) == 1
    states = [planner.explorer.optimizer_memory().state_bytes for planner in session.planners.phases]
    assert [planner.explorer.others_state_bytes for planner in session.planners.phases] == [states[1], states[0]]


def test_a_plan_with_phases_is_read_back(tmp_path: Path) -> None:
    session = trained(tmp_path, TwoPhases(), find_batch_size="opt", epochs=1)
    plan = session.own_plan
    assert type(plan).from_plain(plan.to_plain()) == plan


def test_a_run_that_fails_between_two_phases_goes_on_there_bitwise(tmp_path: Path) -> None:
    undisturbed = trained(tmp_path / "one", TwoPhases())
    parts = line_parts(tmp_path / "two", TwoPhases(), precision="fp64", batch_size=16, find_batch_size="off")  # type: ignore[arg-type]
    session = make_session(parts, fixed(0.5))

    def fail() -> None:
        if session.progress.step == 2:
            raise DoesNotFitError("There is no room for the optimizer", remedy="")

    session.engines[1].reserve.before_step = fail  # type: ignore[method-assign]
    with pytest.raises(DoesNotFitError):
        train(session)
    again = make_session(replace(parts), fixed(0.5))
    assert (again.progress.step, again.progress.updates) == (2, 2)
    train(again)
    assert torch.equal(weights(again), weights(undisturbed))


def test_frozen_parts_are_thawed_and_train_with_rates_of_their_own(tmp_path: Path) -> None:
    seen: list[tuple[bool, ...]] = []

    class Watched(Words):
        def loss(self, model: nn.Module, batch: Any) -> Losses:
            if torch.is_grad_enabled():
                seen.append(tuple(parameter.requires_grad for parameter in model.parameters()))
            return super().loss(model, batch)

    session = trained(tmp_path, Watched(), freeze=["0"], thaw_epoch=1, lr_factors=["2=0.5"], no_decay=["*.bias"])
    assert seen[0] == (False, False, True, True)
    assert seen[-1] == (True,) * 4
    groups = session.engine.optimization.optimizer.param_groups
    rates = {(round(group["initial_lr"] / session.training.lr, 6), group["weight_decay"]) for group in groups}
    assert rates == {(1.0, 1e-4), (1.0, 0.0), (0.5, 1e-4), (0.5, 0.0)}


def test_a_frozen_part_that_the_model_does_not_have_is_an_error_with_the_nearest_names(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"training\.freeze.*'3'"):
        trained(tmp_path, Words(), freeze=["3"])


def test_scores_are_a_table_of_sets_or_one_a_set_where_there_are_many_metrics() -> None:
    judgement = {"validation": {"a": 1.0}, "test": {"test": {"model": {"a": 2.0}, "baselines": {"mean": {"a": 0.5}}}}}
    (one,) = tables(judgement)
    assert one.rows == [("validation", "model", "1"), ("test", "model", "2"), ("test", "mean", "0.5")]
    many = dict.fromkeys("abcdef", 1.0)
    by_set = tables({"validation": many, "test": {"test": {"model": many, "baselines": {"mean": {"a": 0.5}}}}})
    assert [table.title for table in by_set] == ["Scores on validation", "Scores on test"]
    assert by_set[1].columns == ("", "model", "mean")
    assert by_set[1].rows[:2] == [("a", "1", "0.5"), ("b", "1", "–")]


def test_what_a_task_took_from_its_training_data_is_saved_with_the_weights(tmp_path: Path) -> None:
    class Counting(Words):
        def state(self) -> Mapping[str, Any]:
            return {"samples": len(self.train_rows)}

    session = trained(tmp_path, Counting())
    saved = session.checkpoints.newest()
    assert saved is not None
    assert saved["task"] == {"samples": 40}


class Forces(Words):
    """Learns an energy by its gradient, which validation, metrics and predictions need, too."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forces(self, model: nn.Module, batch: Any) -> Tensor:
        values = batch[0].requires_grad_(True)
        return torch.autograd.grad(model(values).sum(), values, create_graph=True)[0]

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        nothing = 0 * torch.rand(())
        forces = self.forces(model, batch)
        return {"force": ((forces + nothing + batch[0].detach()).square().sum(), batch[1].sum())}

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        return {"force": (self.forces(model, batch).abs().sum(), batch[1].sum())}

    def predict(self, model: nn.Module, batch: Any) -> Sequence[Any]:
        return [force[:length] for force, length in zip(self.forces(model, batch), batch[1], strict=True)]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_task_that_takes_gradients_itself_is_validated_and_judged(precision: str, tmp_path: Path) -> None:
    session = trained(tmp_path, Forces(), epochs=2, precision=precision)
    task, model = Forces(), session.model
    rows = task.validation_rows
    batch = task.logical_batch(rows, torch.device("cpu"), session.precision.dtype, None)
    with session.precision.context(torch.device("cpu")):
        losses = batch.losses(model, 0, len(rows))
    before = torch.get_rng_state()
    total, count = (float(torch.as_tensor(number).detach()) for number in losses["force"])
    assert validation_loss(session) == pytest.approx(total / count, rel=1e-9)
    with torch.no_grad(), session.precision.context(torch.device("cpu")):
        torch.set_rng_state(before)
        judged = Forces().outcome(model, rows, torch.device("cpu"), session.precision.dtype)
        again = torch.rand(())
    assert judged.predictions is not None
    assert [len(each) for each in judged.predictions] == [len(task.sample(int(row))) for row in rows]
    assert not any(each.requires_grad for each in judged.predictions)
    # The first try of each method, without gradients, leaves no trace in the random generators.
    torch.set_rng_state(before)
    torch.rand(())
    assert torch.equal(again, torch.rand(()))


class Table(nn.Module):
    """Keeps a table of positions, which a longer sequence makes anew, in an attribute or in a buffer."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layers, self.place, self.table = nn.Linear(2, 1), place, torch.zeros(0)
        if place:
            self.register_buffer("positions", torch.zeros(0), persistent=place == "saved")

    def forward(self, values: Tensor) -> Tensor:
        table = self.get_buffer("positions") if self.place else self.table
        if len(table) < values.shape[1]:
            table = torch.arange(values.shape[1]) / 8.0
            if self.place:
                self.register_buffer("positions", table, persistent=self.place == "saved")
            self.table = table
        return self.layers(values) * table[: values.shape[1], None].to(values)


class Positions(Words):
    """The longest sequences are in validation."""

    place = ""

    def datasets(self) -> Mapping[str, Sequence[Any]]:
        sets = {name: list(samples) for name, samples in super().datasets().items()}
        return {**sets, "validation": [*sets["validation"], torch.ones(12, 2, dtype=torch.float64)]}

    def model(self) -> nn.Module:
        return Table(self.place)


class Sparse(Words):
    """Its samples are sparse tensors, which only a collate of its own stacks."""

    def datasets(self) -> Mapping[str, Sequence[Any]]:
        samples = list(torch.randn(40, 4, 2, generator=torch.Generator().manual_seed(0)).relu().to_sparse())
        return {"train": samples, "validation": samples[:10]}

    def collate(self, samples: Sequence[Any]) -> Any:
        return torch.stack(list(samples)).to_dense(), torch.full((len(samples),), 4)


@pytest.mark.parametrize("find", ["off", "opt"])
@pytest.mark.parametrize("kind", [
    Positions, type("Buffered", (Positions,), {"place": "unsaved"}), type("Saved", (Positions,), {"place": "saved"}),
    Sparse,
])  # fmt: skip
def test_validation_makes_nothing_that_training_cannot_use(kind: type[Task], find: str, tmp_path: Path) -> None:
    session = trained(tmp_path, kind(), epochs=2, find_batch_size=find)
    assert session.progress.epoch == 2
    assert validation_loss(session) > 0


def test_the_first_call_of_a_method_in_validation_takes_no_more_memory_than_the_next() -> None:
    task, meter, peaks = Words(), SimulatedMeter(64 * 2**20), []
    with meter.active(), torch.no_grad():
        model, batch = nn.Linear(2, 1), (torch.zeros(3, 4, 2), torch.tensor([4, 4, 4]))
        for _ in range(2):
            meter.reset_peak()
            task.losses_of(model, batch, validating=True)
            peaks.append(meter.peak_bytes())
    assert peaks[0] == peaks[1]


class FixedLength(Words):
    """Pads every batch to the longest sample of all, so that short samples gain nothing."""

    def collate(self, samples: Sequence[Any]) -> Any:
        values, lengths = super().collate(samples)
        return nn.functional.pad(values, (0, 0, 0, 400 - values.shape[1])), lengths


@pytest.mark.parametrize(("kind", "told"), [(Words, False), (FixedLength, True)])
def test_padding_to_a_fixed_length_is_noticed_by_the_probes_and_told(
    kind: type[Task], told: bool, tmp_path: Path
) -> None:
    session = trained(tmp_path, kind(), find_batch_size="opt", epochs=1)
    assert any("padded to a fixed length" in notice for notice in session.own_plan.all_notices) == told


def test_the_peak_of_a_task_with_phases_is_that_of_the_phase_which_takes_most() -> None:
    class First(TwoPhases):
        def phases(self) -> Sequence[Phase]:
            return super().phases()[:1]

    class Second(TwoPhases):
        def phases(self) -> Sequence[Phase]:
            return super().phases()[1:]

    both, *each = (predict_peak(task(), 2_000).peak_bytes for task in (TwoPhases, First, Second))
    assert both >= max(each)
    assert both == pytest.approx(max(each), rel=0.05)


def test_data_that_are_drawn_at_random_are_the_same_each_time() -> None:
    class Drawn(Words):
        def datasets(self) -> Mapping[str, Sequence[Any]]:
            return {"train": list(torch.rand(4)), "test": list(np.random.rand(2))}  # noqa: NPY002

    one, other = Drawn(), Drawn()
    torch.manual_seed(1)
    assert [one.sample(row) for row in range(6)] == [other.sample(row) for row in range(6)]


@pytest.mark.parametrize("draws", [False, True])
def test_samples_wait_on_the_host_for_their_batch(draws: bool) -> None:
    class Made(Sequence[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: Any) -> Any:
            return torch.full((2**16,), float(index))

    class Making(Words):
        def datasets(self) -> Mapping[str, Sequence[Any]]:
            return {"train": Made()}

        def collate(self, samples: Sequence[Any]) -> Tensor:
            return torch.stack([*samples])

    class Drawing(Making):
        def draw(self, samples: Sequence[Any], generator: torch.Generator) -> Sequence[Any]:
            return [sample + torch.rand(len(sample), generator=generator) for sample in samples]

    with simulated_gpu("64MiB") as meter:
        task = Drawing() if draws else Making()
        batch = task.logical_batch(np.arange(4), meter.device, torch.float32, torch.Generator())
        collated = batch.collated(0, 2)
        assert meter.peak_bytes() == collated.nbytes


def test_a_single_sample_cannot_train_and_validate() -> None:
    class Single(Words):
        def datasets(self) -> Mapping[str, Sequence[Any]]:
            return {"train": super().datasets()["train"][:1]}

    with pytest.raises(DataError, match="at least two samples"):
        _ = Single().train_rows


class Sampled(Words):
    """Words with a sampler of choice."""

    def __init__(self, choose: Callable[[int], Any]) -> None:
        super().__init__()
        self.choose = choose

    def datasets(self) -> Mapping[str, Sequence[Any]]:
        sets = super().datasets()
        return {"test": sets["test"], "train": sets["train"]}

    def sampler(self, epoch: int) -> Any:
        return self.choose(epoch)


def order_of(choose: Callable[[int], Any], epoch: int = 0, seed: int = 5) -> list[int]:
    """Returns the numbers of an epoch in the set `train`, which begins at row 10."""
    task = Sampled(choose)
    return (task.epoch_order(task.train_rows, seed=seed, epoch=epoch) - 10).tolist()


def test_a_sampler_decides_which_samples_an_epoch_trains_and_in_which_order() -> None:
    kept = (Sampled(lambda epoch: None).validation_rows - 10).tolist()
    assert len(kept) == 4
    assert order_of(lambda epoch: [3, 1, 3, *kept]) == [number for number in [3, 1, 3] if number not in kept]
    assert order_of(lambda epoch: torch.arange(40)) == [number for number in range(40) if number not in kept]
    plain = order_of(lambda epoch: None)
    assert sorted(plain) == [number for number in range(40) if number not in kept]
    assert plain != sorted(plain)


def test_weights_decide_how_often_a_sample_is_drawn() -> None:
    weights = torch.zeros(40)
    weights[5], weights[7] = 1.0, 3.0
    for choose in (lambda epoch: weights, lambda epoch: WeightedRandomSampler(weights.tolist(), 36)):
        drawn = [number for epoch in range(20) for number in order_of(choose, epoch)]
        assert set(drawn) == {5, 7}
        assert 2 < drawn.count(7) / drawn.count(5) < 4.5
        assert order_of(choose, 1) == order_of(choose, 1)
        assert order_of(choose, 1) != order_of(choose, 2)
        assert order_of(choose, 1) != order_of(choose, 1, seed=6)


@pytest.mark.parametrize(
    ("chosen", "value"),
    [([0, 40], "numbers from 0 to 40"), ([-1], "numbers from -1 to -1"), (torch.ones(39), "39 numbers from 1 to 1"),
     (torch.full((40,), -1.0), "40 numbers from -1 to -1"), (["a"], "array(['a'], dtype='<U1')")],
)  # fmt: skip
def test_a_sampler_that_chooses_other_samples_is_told(chosen: Any, value: str) -> None:
    with pytest.raises(DataError) as raised:
        order_of(lambda epoch: chosen)
    assert str(raised.value) == (
        f"Task.sampler did not return the numbers of training samples, nor a weight for each: {value}.\n"
        "Return numbers from 0 to 39, or 40 weights that are not negative."
    )


def test_a_sampler_that_chooses_nothing_is_told() -> None:
    with pytest.raises(DataError, match="weight of 0 for each"):
        order_of(lambda epoch: torch.zeros(40))
    kept = (Sampled(lambda epoch: None).validation_rows - 10).tolist()
    with pytest.raises(DataError, match="no training sample that is not kept"):
        order_of(lambda epoch: kept)


def test_epochs_have_as_many_steps_as_their_sampler_asks_for(tmp_path: Path) -> None:
    task = Sampled(lambda epoch: range(8 + 16 * epoch))
    session = trained(tmp_path, task, epochs=2, batch_size=8)
    sizes = [sum(map(len, session.epochs.steps(epoch))) for epoch in (0, 1)]
    kept = set((task.validation_rows - 10).tolist())
    assert sizes == [len(set(range(8)) - kept), len(set(range(24)) - kept)]
    counts = [len(session.epochs.steps(epoch)) for epoch in (0, 1)]
    assert session.progress.step == session.total_steps == sum(counts)
    plan = session.engine.run_plan.phase_plan
    assert [plan.fewest_steps_per_epoch, plan.steps_per_epoch] == counts
    assert plan.mean_steps_per_epoch == sum(counts) / 2
    assert any(notice.startswith("The shortest epoch has only 1 optimizer step:") for notice in plan.notices)


def test_the_size_of_late_epochs_of_a_sampler_is_told_by_the_last_one() -> None:
    asked = list[int]()

    class Long(Growing):
        def sampler(self, epoch: int) -> list[int]:
            asked.append(epoch)
            return [*range(min(10 + epoch, 30))]

    shares = epoch_shares(Long(), (), seed=0, epochs=10**6)
    assert (shares[0], shares[-1]) == (1.0, 3.0)
    assert asked[-1] == 10**6 - 1
    assert len(asked) < 10**4


class Growing(Words):
    """Another number of samples in each epoch."""

    def sampler(self, epoch: int) -> list[int]:
        return [*range(10 + 3 * epoch)]


@pytest.mark.parametrize(("kind", "has_size"), [(Words, True), (Growing, False), (streamed(), True)])
def test_the_size_of_an_epoch_is_that_of_its_order(kind: type[Task], has_size: bool) -> None:
    task = kind()
    orders = [task.epoch_order(task.train_rows, seed=1, epoch=epoch) for epoch in range(3)]
    assert task.epoch_size(task.train_rows) == (len(orders[0]) if has_size else None)
    assert len({*map(len, orders)}) == (1 if has_size else 3)


def test_a_task_may_have_methods_and_attributes_of_any_private_name() -> None:
    own = {name.removeprefix("_Task"): 0 for name in vars(Task) if name.startswith("_Task__")}
    private = {name[1:]: (lambda self, path: path) for name in own}  # As `_read` for `__read`

    class Private(Words):
        def datasets(self) -> Mapping[str, Sequence[Any]]:
            self._reader, self._phase, self._resident = iter("a"), 3, None
            return super().datasets()

    for name, method in private.items():
        setattr(Private, name, method)
    task = Private()
    assert "_read" in private
    assert len(task.train_rows) == len(Words().train_rows)
    assert str(task.sample(0)) == str(Words().sample(0))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("tables", lambda self: (), r"Helper.tables does not take the arguments .* it with: tables\(judgement\)"),
        ("loss", lambda self, batch: {}, r"Helper.loss does not take the arguments .* it with: loss\(model, batch\)"),
        ("loss", staticmethod(lambda batch: {}), r"loss\(model, batch\)"),
        ("epoch_order", lambda self, rows, seed: rows, r"epoch_order\(rows, seed, epoch\)"),
        ("files", lambda self: (), r"files\(dataset, data_root\)"),
        ("loss", nn.MSELoss(), "Helper.loss takes the place of can_train.Task.loss"),
        ("labels", ["a", "b"], "Helper.labels takes the place"),
        ("sets", lambda self: {}, "Helper.sets takes the place of can_train.Task.sets"),
        ("models", lambda self: {}, "Helper.models takes the place"),
        ("dataset", lambda self: {}, "Helper.dataset takes the place"),
        ("settings", property(lambda self: {}), "Helper.settings takes the place"),
        ("_Task__read", lambda self, path: path, "A class named Task has a private name of can_train.Task: __read"),
    ],
)
def test_a_helper_with_the_name_of_a_method_that_can_train_calls_is_refused(name: str, value: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        type("Helper", (Words,), {name: value})
    mixin = type("Mixin", (), {name: value})
    with pytest.raises(ConfigError, match=error):
        type("Helper", (mixin, Words), {})
    # The method of the task comes first.
    type("Beside", (Words, mixin), {})


def passed_on(method: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a method an argument, as `mock.patch` does."""

    @wraps(method)
    def call(self: Task, *arguments: Any) -> Any:
        return method(self, 2.0, *arguments)

    return call


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", lambda self, model, batch, weight=1.0: {}),
        ("loss", staticmethod(lambda model, batch: {})),
        ("loss", passed_on(lambda self, weight, model, batch: {})),
        ("collate", lambda self, *samples: samples),
        ("collate", staticmethod(torch.stack)),
        ("collate", partial(torch.stack, dim=0)),
        ("collate", property(lambda self: torch.stack)),
        ("files", classmethod(lambda cls, dataset, data_root: ())),
        ("in_order", property(lambda self: True)),
        ("in_order", True),
    ],
)
def test_a_method_that_takes_the_arguments_of_the_task_is_no_helper(name: str, value: Any) -> None:
    type("Own", (Words,), {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("columns", ["a"]), ("loss", nn.MSELoss()), ("stream", [1]), ("sets", {}), ("loss", lambda batch: {})],
)
def test_a_value_of_an_object_with_the_name_of_a_method_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Words.{name} "):
        setattr(Words(), name, value)


def test_data_of_an_object_may_have_the_name_of_a_method_that_the_class_does_not_have(tmp_path: Path) -> None:
    class Keeps(TwoTerms):
        def datasets(self) -> Mapping[str, Sequence[Any]]:
            for name in _CALLED_IF_WRITTEN:
                if getattr(TwoTerms, name) is getattr(Task, name):
                    setattr(self, name, [name])
            return super().datasets()

    plain, keeps = trained(tmp_path / "plain", TwoTerms()), trained(tmp_path / "keeps", Keeps())
    assert torch.equal(weights(plain), weights(keeps))
    assert keeps.task.labels == ["labels"]  # type: ignore[attr-defined]


def test_a_function_takes_the_place_of_a_method_in_an_object() -> None:
    task = Words()
    task.collate = len  # type: ignore[method-assign, assignment]
    assert task.collate([1, 2]) == 2
    task.loss = lambda model, batch: {}  # type: ignore[method-assign, assignment]
