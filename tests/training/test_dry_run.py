"""Plans from a sample of a task's data."""

from pathlib import Path

import numpy as np
import pytest

from can_train.memory.catalogue import ROCM_CAVEAT, UNKNOWN_CAVEAT, UsableMemory, find_card, other_card, usable
from can_train.training.dry_run import CardPlan, plans_of_sample
from fakes.line_fit import LineTask, Notices, line_run

TARGETS = [usable(find_card(name)) for name in ("v100-16gb", "h100-80gb")]


class SampledTask(LineTask):
    """Sixty of ten thousand points."""

    sample_note = "sixty points were read"
    estimated_train_rows = 10_000


def test_an_epoch_of_a_plan_is_as_long_as_the_data_set(tmp_path: Path) -> None:
    plans = plans_of_sample(line_run(tmp_path, batch_size=20), SampledTask(), TARGETS, Notices())
    assert [plan.num_samples for plan in plans] == [10_000] * 2
    assert [plan.plan.phase_plan.steps_per_epoch for plan in plans if plan.plan is not None] == [500] * 2


def test_a_task_that_holds_all_of_its_data_is_planned_as_it_is(tmp_path: Path) -> None:
    (plan,) = plans_of_sample(line_run(tmp_path, batch_size=20), LineTask(), TARGETS[:1], Notices())
    assert plan.num_samples == 60


def test_planning_leaves_the_task_as_it_was(tmp_path: Path) -> None:
    task = SampledTask()
    before = dict(vars(task))
    plans_of_sample(line_run(tmp_path, batch_size=20), task, TARGETS, Notices())
    assert vars(task).keys() == before.keys()
    assert all(vars(task)[name] is value for name, value in before.items())
    assert np.array_equal(task.train_rows, np.arange(60))


@pytest.mark.parametrize(
    ("target", "warnings"),
    [
        (usable(find_card("mi300x")), [ROCM_CAVEAT]),
        (usable(find_card("a100_3g.40gb")), []),
        (usable(other_card(2**34)), [UNKNOWN_CAVEAT]),
        (UsableMemory(key="cpu-2gb", name="CPU", total_bytes=2**31, subtracted=(), source="simulated"), []),
    ],
    ids=["amd", "slice", "by memory", "processor"],
)
def test_what_is_not_known_of_a_gpu_is_said_in_its_plan(target: UsableMemory, warnings: list[str]) -> None:
    plan = CardPlan(target=target, plan=None, error=None, num_samples=1, sample_note="")
    assert plan.warnings == warnings
