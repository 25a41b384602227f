"""Plans from a sample of a task's data."""

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

from can_train.config.compose import RunRequest, resolve
from can_train.errors import ConfigError
from can_train.memory.catalogue import ROCM_CAVEAT, UNKNOWN_CAVEAT, UsableMemory, find_card, other_card, usable
from can_train.reporter import SilentReporter
from can_train.training.dry_run import CardPlan, find_targets, plans_of_sample
from can_train.training.loading import sample_task
from fakes.line_fit import LineTask, Notices, line_run

TARGETS = [usable(find_card(name)) for name in ("v100-16gb", "h100-80gb")]


class WideTask(LineTask):
    """Points on a line, and a model of a million weights."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 512), *[nn.Linear(512, 512) for _ in range(4)], nn.Linear(512, 1))


class Repeated(nn.Module):
    """Returns its input; a sample takes several arrays of 1 MiB meanwhile."""

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, 2**18).sin().mean(1, keepdim=True)


class WideTaskOfLargeSamples(LineTask):
    """Points on a line, a model of two million weights, and samples of a few MiB."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 512), *[nn.Linear(512, 512) for _ in range(8)], nn.Linear(512, 1), Repeated())


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


def targets(folder: Path, *names: str) -> list[UsableMemory]:
    return find_targets(line_run(folder), names, SilentReporter())


def test_several_gpus_of_a_kind_are_one_target(tmp_path: Path) -> None:
    found = targets(tmp_path, "2xrtx-4090", "8×h100-80gb", "2 x 16GiB", "3xsim:1GiB", "rtx-4090", "a100_3g.40gb")
    assert [target.count for target in found] == [2, 8, 2, 3, 1, 1]
    assert [target.label for target in found[:2]] == ["2xrtx-4090-24gb", "8xh100-80gb"]
    assert found[4].label == found[0].key


def test_a_model_is_sharded_over_several_gpus_where_one_cannot_hold_it(tmp_path: Path) -> None:
    several = targets(tmp_path, "2xsim:16MiB", "sim:16MiB", "2xsim:60MiB")
    run = line_run(tmp_path, batch_size=4, epochs=1)
    sharded, alone, whole = plans_of_sample(run, WideTask(), several, Notices())
    assert sharded.plan is not None
    assert (sharded.plan.rung.name, sharded.plan.rung.ranks) == ("shard", 2)
    assert alone.plan is not None
    assert alone.plan.rung.ranks == 1
    assert whole.plan is not None
    assert whole.plan.rung.ranks == 1
    # Also where no larger target explores the whole model.
    (by_itself,) = plans_of_sample(run, WideTask(), targets(tmp_path, "8xsim:10MiB"), Notices())
    assert by_itself.plan is not None, by_itself.error
    assert by_itself.plan.rung.ranks == 8


def test_a_model_is_sharded_where_one_gpu_holds_it_but_no_sample_beside_it(tmp_path: Path) -> None:
    run = line_run(tmp_path, batch_size=4, epochs=1, optimizer="sgd", optimizer_args={"momentum": 0.0})
    several = targets(tmp_path, "2xsim:20MiB", "sim:20MiB", "2xsim:40MiB", "2xsim:12MiB")
    sharded, alone, whole, none = plans_of_sample(run, WideTaskOfLargeSamples(), several, Notices())
    assert sharded.plan is not None
    assert sharded.plan.rung.ranks == 2
    assert whole.plan is not None
    assert whole.plan.rung.ranks == 1
    assert alone.error is not None
    assert "--fit shard" not in str(alone.error)
    assert none.error is not None
    assert "--fit shard" in str(none.error)


def test_the_ranks_of_a_job_share_the_model_of_its_plan(tmp_path: Path) -> None:
    (plan,) = plans_of_sample(line_run(tmp_path, fit="shard"), LineTask(), TARGETS[:1], Notices(), ranks=8)
    assert plan.plan is not None
    assert plan.plan.rung.ranks == 8


def test_one_gpu_cannot_be_shared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="several GPUs"):
        plans_of_sample(line_run(tmp_path, fit="shard"), LineTask(), TARGETS[:1], Notices())


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


def test_drives_are_simulated_anew_for_other_settings_only(tmp_path: Path) -> None:
    counts = []
    for window in (100, 50, 50):
        values = {"dataset.window": window, "paths.state_dir": str(tmp_path)}
        run = resolve(RunRequest(model="gat", dataset="synthetic", values=values))
        counts.append(len(sample_task(run, SilentReporter()).train_rows))
    assert counts[0] < counts[1] == counts[2]


class OneWeightTask(LineTask):
    """Points on a line, and a model whose largest weight has 2 MiB."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 512), nn.Linear(512, 1))


def test_weights_whose_pages_do_not_fit_are_refused_before_a_training_is(tmp_path: Path) -> None:
    small, large = targets(tmp_path, "sim:16MiB", "sim:64MiB")
    plans = plans_of_sample(line_run(tmp_path, batch_size=20), OneWeightTask(), [small, large], Notices())
    refused, planned = (plan.error for plan in plans)
    assert planned is None
    assert refused is not None
    assert refused.value == "they take 2.0 MiB, 22.0 MiB in pages of the allocator, the device has 16.0 MiB"
