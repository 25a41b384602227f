"""Schedules of the learning rate against their formulas, and against PyTorch's own."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from can_train.config.settings import CHOICES, TrainingSettings
from can_train.errors import ConfigError, DataError, TaskError
from can_train.fit import schedules
from can_train.fit.optimizer import Optimization, make_optimization
from can_train.fit.schedules import Plateau, schedule

LENGTHS = st.integers(1, 400)
SHARES = st.floats(0, 1)


def shares(ticks: int, **settings: Any) -> list[float]:
    """Lists the shares of a schedule from its first tick to some ticks past its end."""
    share = schedule(TrainingSettings(**{"warmup_share": 0.0} | settings), ticks)
    return [share(tick) for tick in range(ticks + 3)]


@given(ticks=LENGTHS, warmup_share=SHARES)
def test_cosine_and_constant_are_bit_by_bit_those_of_version_0_1(ticks: int, warmup_share: float) -> None:
    warmup = round(ticks * warmup_share)

    def before(name: str, tick: int) -> float:
        if tick < warmup:
            return (tick + 1) / (warmup + 1)
        if name == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * min((tick - warmup) / max(ticks - warmup, 1), 1.0)))

    for name in ("cosine", "constant"):
        expected = [before(name, tick) for tick in range(ticks + 3)]
        assert shares(ticks, scheduler=name, warmup_share=warmup_share) == expected


@given(ticks=LENGTHS, warmup_share=SHARES)
def test_linear_falls_to_zero_by_equal_steps(ticks: int, warmup_share: float) -> None:
    actual, warmup = shares(ticks, scheduler="linear", warmup_share=warmup_share), round(ticks * warmup_share)
    expected = [1 - (tick - warmup) / max(ticks - warmup, 1) for tick in range(warmup, ticks)]
    assert actual[warmup:ticks] == pytest.approx(expected)
    assert ticks == warmup or actual[ticks:] == [0.0] * 3


def by_torch(ticks: int, rise: float, first: float, last: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    cycle = OneCycleLR(
        optimizer, max_lr=1.0, total_steps=ticks, pct_start=rise, div_factor=first, final_div_factor=last
    )
    rates = []
    for tick in range(ticks):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if tick + 1 < ticks:
            cycle.step()
    return rates


def one_cycle(ticks: int, rise: float, first: float, last: float) -> list[float]:
    return shares(ticks, scheduler="one-cycle", schedule_rise_share=rise, schedule_start_divisor=first,
                  schedule_end_divisor=last)  # fmt: skip


@given(ticks=st.integers(2, 400), rise=st.floats(0.01, 0.99), first=st.floats(1, 100), last=st.floats(1, 1e5))
def test_one_cycle_is_that_of_torch(ticks: int, rise: float, first: float, last: float) -> None:
    # Where the rise ends at the first tick, PyTorch divides by zero.
    assume(abs(ticks * rise - 1) > 0.01)
    actual = one_cycle(ticks, rise, first, last)
    assert actual[:ticks] == pytest.approx(by_torch(ticks, rise, first, last), rel=1e-9)
    assert actual[ticks:] == [actual[ticks - 1]] * 3


def test_a_one_cycle_along_lines_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_half_cosine", lambda first, last, done: first + (last - first) * min(done, 1.0))
    assert one_cycle(40, 0.3, 25, 1e4)[:40] != pytest.approx(by_torch(40, 0.3, 25, 1e4), rel=1e-9)


@pytest.mark.parametrize("rise", [0.0, 0.25, 1.0])
def test_a_rise_of_one_tick_or_of_all_ticks_has_a_rate_at_each(rise: float) -> None:
    assert max(one_cycle(4, rise, 25, 1e4)) == pytest.approx(1.0, abs=0.5)


@given(per_epoch=st.integers(1, 20), epochs=st.integers(1, 20), each=st.integers(1, 8), factor=st.floats(0.01, 1))
def test_step_lowers_the_rate_after_whole_epochs(per_epoch: int, epochs: int, each: int, factor: float) -> None:
    actual = shares(per_epoch * epochs, scheduler="step", epochs=epochs, schedule_epochs=each, schedule_factor=factor)
    expected = [factor ** (tick // per_epoch // each) for tick in range(per_epoch * epochs)]
    assert actual[: len(expected)] == expected
    assert actual[len(expected) :] == [expected[-1]] * 3


@given(ticks=LENGTHS, decay_share=SHARES)
def test_wsd_is_constant_and_then_falls_to_zero_by_equal_steps(ticks: int, decay_share: float) -> None:
    actual = shares(ticks, scheduler="wsd", schedule_decay_share=decay_share)
    decay = max(round(ticks * decay_share), 1)
    assert actual[: ticks - decay + 1] == [1.0] * (ticks - decay + 1)
    assert actual[ticks - decay : ticks] == pytest.approx([1 - gone / decay for gone in range(decay)])
    assert actual[ticks:] == [0.0] * 3


@pytest.mark.parametrize("name", CHOICES["scheduler"])
@given(ticks=st.integers(1, 200), warmup_share=SHARES)
def test_each_schedule_is_a_share_and_its_warm_up_rises_to_its_first_one(
    name: str, ticks: int, warmup_share: float
) -> None:
    actual, warmup = shares(ticks, scheduler=name, warmup_share=warmup_share), round(ticks * warmup_share)
    assert all(0 <= share <= 1 for share in actual)
    rise = [(tick + 1) / (warmup + 1) * actual[warmup] for tick in range(warmup)]
    assert actual[:warmup] == rise == sorted(rise)


def plateaus(losses: list[int], patience: int) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    # PyTorch counts the validations that are allowed, and rounds a rate that hardly changes any more.
    theirs = ReduceLROnPlateau(optimizer, factor=0.5, patience=patience - 1, threshold=0.0, eps=0.0,
                               threshold_mode="abs")  # fmt: skip
    plateau, actual, expected = Plateau(factor=0.5, patience=patience), [], []
    for loss in losses:
        theirs.step(loss)
        plateau.validated(loss)
        actual.append(plateau.share)
        expected.append(optimizer.param_groups[0]["lr"])
    return actual, expected


@given(losses=st.lists(st.integers(-5, 5), max_size=40), patience=st.integers(1, 5))
def test_plateau_lowers_the_rate_when_torch_does(losses: list[int], patience: int) -> None:
    actual, expected = plateaus(losses, patience)
    assert actual == expected


def test_a_plateau_that_waits_for_ever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plateau, "validated", lambda self, loss: None)
    actual, expected = plateaus([1, 2, 2, 2], 2)
    assert (actual, expected) == ([1.0] * 4, [1.0, 1.0, 0.5, 0.5])


@pytest.mark.parametrize("cut", range(6))
def test_a_restored_plateau_goes_on_as_it_would_have(cut: int) -> None:
    def made() -> Any:
        settings = TrainingSettings(scheduler="plateau", warmup_share=0.0, schedule_factor=0.5)
        return make_optimization(nn.Linear(2, 1), settings, lr=0.1, total_steps=20)

    losses, whole, first, second = [3.0, 4.0, 4.0, 2.0, 5.0, 5.0], made(), made(), made()
    for loss in losses:
        whole.validated(loss)
    for loss in losses[:cut]:
        first.validated(loss)
    second.load_state_dict(first.state_dict())
    second.follow_schedule()
    assert second.lr == first.lr
    for loss in losses[cut:]:
        second.validated(loss)
    assert second.lr == whole.lr == pytest.approx(0.1 / 4)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("schedule_factor", 0.0), ("schedule_factor", 1.5), ("schedule_epochs", 0), ("schedule_patience", 0),
     ("schedule_decay_share", 1.1), ("schedule_rise_share", -0.1), ("schedule_start_divisor", 0.5),
     ("schedule_end_divisor", 0.0), ("grad_clip_value", -1.0)],
)  # fmt: skip
def test_a_setting_of_a_schedule_out_of_its_range_is_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"training.{setting} must be"):
        TrainingSettings(**{setting: value})


class Noted(LRScheduler):
    """Has a state that no checkpoint can hold."""

    def get_lr(self) -> list[float | Tensor]:
        self.notes = {1, 2}
        return [0.1]


LAYER = nn.Linear(2, 1)
OF_OTHERS = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("schedule_of", "error", "message"),
    [
        (lambda optimizer, steps: 0.1, DataError, "returned neither a scheduler of PyTorch nor a function"),
        (lambda optimizer, steps: OneCycleLR, DataError, "returned neither a scheduler of PyTorch nor a function"),
        (lambda optimizer, steps: LinearLR(OF_OTHERS), DataError, "a scheduler of another optimizer"),
        (lambda optimizer, steps: Noted(optimizer), DataError, "notes has a set in it"),
        (lambda optimizer, steps: lambda step: "fast", DataError, "no factor of the learning rate: 'fast' at step 0"),
        (lambda optimizer, steps: lambda step: -1.0, DataError, "no factor of the learning rate: -1.0 at step 0"),
        (lambda optimizer, steps: steps / 0, TaskError, "failed: ZeroDivisionError"),
    ],
)  # fmt: skip
def test_a_schedule_of_a_task_that_is_none_is_refused(schedule_of: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_optimization(LAYER, TrainingSettings(), lr=0.1, total_steps=20, schedule_of=schedule_of)


@pytest.mark.parametrize(
    "schedule_of",
    [
        lambda optimizer, steps: lambda step: 1 - step / steps,
        lambda optimizer, steps: OneCycleLR(optimizer, 0.1, total_steps=steps + 1),
        CosineAnnealingLR,
    ],
)
def test_a_run_that_is_longer_by_now_has_the_schedule_of_its_length(schedule_of: Any) -> None:
    def made(steps: int) -> Optimization:
        return make_optimization(LAYER, TrainingSettings(), lr=0.1, total_steps=steps, schedule_of=schedule_of)

    short, longer, whole = made(10), made(20), made(20)
    for _ in range(10):
        short.optimizer.step()
        short.move_schedule()
        whole.optimizer.step()
        whole.move_schedule()
    longer.load_state_dict(short.state_dict())
    longer.follow_schedule()
    for _ in range(10):
        assert longer.lr == whole.lr
        longer.optimizer.step()
        longer.move_schedule()
        whole.move_schedule()
    assert short.lr != whole.lr or short.lr == pytest.approx(0.0, abs=1e-6)
