"""Reference models: their outputs with each placement, the memory for them, and their cache on disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from can_train.config.settings import TrainingSettings
from can_train.fit.precision import Precision
from can_train.memory.meters import Meter, open_meter
from can_train.training.reference_models import (
    LIMIT_SHARE,
    CachedOutputs,
    ComputedOutputs,
    ReferenceModelPlan,
    ReferenceModels,
    read_plans,
    write_plans,
)
from fakes.line_fit import Notices
from fakes.small_reference_models import VALUES_PER_ROW, ReferenceLineTask, SmallReferenceModel

CPU = torch.device("cpu")
MIB = 2**20


def desk(folder: Path, task: ReferenceLineTask, meter: Meter | None = None, **training: Any) -> ReferenceModels:
    return ReferenceModels(
        task=task, training=TrainingSettings(**training), meter=meter or open_meter("cpu"), reporter=Notices(),
        cache=folder / "cache",
    )  # fmt: skip


def planned(placement: str, role: str = "oracle") -> ReferenceModelPlan:
    return ReferenceModelPlan(role=role, name=SmallReferenceModel.name, placement=placement)


def assert_answers(task: ReferenceLineTask, oracle: SmallReferenceModel, rows: Any) -> None:
    rows = np.asarray(rows)
    torch.testing.assert_close(task.outputs_of_role["oracle"](rows)["word"], oracle.truth(rows))


@pytest.mark.parametrize("placement", ["device", "cache", "offload"])
@pytest.mark.parametrize("device", ["cpu", "sim:64MiB"])
def test_answers_are_the_reference_models_own_wherever_they_come_from(
    tmp_path: Path, placement: str, device: str
) -> None:
    oracle, meter = SmallReferenceModel(), open_meter(device)
    task = ReferenceLineTask(oracle)
    with meter.active():
        desk(tmp_path, task, meter).bind_outputs([planned(placement)])
        assert_answers(task, oracle, [5, 3, 3, 69, 0, 8])
        assert_answers(task, oracle, [4])


@pytest.mark.parametrize("placement", ["device", "cache", "offload"])
def test_a_reference_model_of_double_precision_answers_wherever_it_is_asked(tmp_path: Path, placement: str) -> None:
    oracle = SmallReferenceModel()
    rows = np.array([5, 3])
    oracle.model.double()
    task = ReferenceLineTask(oracle)
    desk(tmp_path, task, precision="fp64").bind_outputs([planned(placement)])
    expected = oracle.model(torch.from_numpy(np.repeat(rows, rows % 4)).double()[:, None])
    torch.testing.assert_close(task.outputs_of_role["oracle"](rows)["word"].double(), expected, rtol=1e-6, atol=1e-6)


@given(rows=st.lists(st.integers(0, 69), min_size=1, max_size=20))
def test_a_table_finds_each_samples_own_rows(rows: list[int]) -> None:
    oracle = SmallReferenceModel()
    table = {"word": oracle.truth(oracle.rows).numpy()}
    answers = CachedOutputs(oracle, CPU, table)(np.asarray(rows))
    torch.testing.assert_close(answers["word"], oracle.truth(np.asarray(rows)))


def test_a_blank_table_has_the_shape_of_the_answers_and_takes_no_memory() -> None:
    oracle = SmallReferenceModel()
    blank = CachedOutputs.blank(oracle, CPU)
    assert blank(np.array([7, 6]))["word"].tolist() == [[0.0] * 3] * 5
    assert blank.table["word"].strides == (0, 0)


def test_what_was_answered_once_is_not_asked_again(tmp_path: Path) -> None:
    first = SmallReferenceModel()
    desk(tmp_path, ReferenceLineTask(first)).bind_outputs([planned("cache")])
    assert first.num_requested > 0
    again = SmallReferenceModel()
    again.model.load_state_dict(first.model.state_dict())
    task = ReferenceLineTask(again)
    told, resident = desk(tmp_path, task).bind_outputs([planned("cache")])
    assert (again.num_requested, resident, told[0].peak_bytes) == (0, [], None)
    assert_answers(task, again, [5, 3])


def test_other_weights_are_asked_anew(tmp_path: Path) -> None:
    desk(tmp_path, ReferenceLineTask(SmallReferenceModel())).bind_outputs([planned("cache")])
    other = SmallReferenceModel()
    desk(tmp_path, ReferenceLineTask(other)).bind_outputs([planned("cache")])
    assert other.num_requested > 0


def test_damaged_answers_are_said_and_made_again(tmp_path: Path) -> None:
    oracle = SmallReferenceModel()
    desk(tmp_path, ReferenceLineTask(oracle)).bind_outputs([planned("cache")])
    (file,) = tmp_path.glob("cache/outputs/*/word.npy")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    task = ReferenceLineTask(oracle)
    here = desk(tmp_path, task)
    here.bind_outputs([planned("cache")])
    assert any("are damaged and are computed again" in text for text in here.reporter.texts)  # type: ignore[attr-defined]
    assert_answers(task, oracle, range(70))


def test_where_answers_cannot_be_kept_the_run_has_them_nevertheless(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    oracle = SmallReferenceModel()
    task = ReferenceLineTask(oracle)
    here = desk(tmp_path, task)
    here.bind_outputs([planned("cache")])
    assert any("are not cached" in text for text in here.reporter.texts)  # type: ignore[attr-defined]
    assert_answers(task, oracle, range(70))


def test_asking_takes_what_was_predicted(tmp_path: Path) -> None:
    meter, oracle = open_meter("sim:64MiB"), SmallReferenceModel(values_per_row=2**18)

    class Watching(Notices):
        def stage(self, name: str, **more: Any) -> Any:
            assert name == "computing the oracle"
            meter.reset_peak()
            return super().stage(name, **more)

    with meter.active():
        here = replace(desk(tmp_path, ReferenceLineTask(oracle), meter), reporter=Watching())
        (told,), _ = here.bind_outputs([planned("cache")])
    assert told.peak_bytes is not None
    assert 32 * MIB < told.peak_bytes <= LIMIT_SHARE * 64 * MIB
    assert meter.peak_bytes() == pytest.approx(told.peak_bytes, rel=0.03)


@pytest.mark.parametrize(("placement", "there"), [("device", True), ("cache", False), ("offload", False)])
def test_only_a_reference_model_on_the_device_stays_there(tmp_path: Path, placement: str, there: bool) -> None:
    meter, oracle = open_meter("sim:64MiB"), SmallReferenceModel()
    with meter.active():
        before = meter.allocated_bytes()
        _, resident = desk(tmp_path, ReferenceLineTask(oracle), meter).bind_outputs([planned(placement)])
        meter.release()
        assert bool(resident) == there
        assert (meter.allocated_bytes() > before) == there


@pytest.mark.parametrize(("on_host", "grows"), [(False, True), (True, False)])
def test_what_the_host_computes_with_takes_nothing_of_the_device(on_host: bool, grows: bool) -> None:
    meter, oracle, rows = open_meter("sim:64MiB"), SmallReferenceModel(), np.arange(70)
    with meter.active():
        answers = ComputedOutputs(oracle, meter, Precision.named("fp32"), on_host=on_host)
        meter.reset_peak()
        answers(rows)
        assert (meter.peak_bytes() > VALUES_PER_ROW * 4 * 70) == grows


def test_with_a_choice_each_way_is_measured_and_one_is_taken(tmp_path: Path) -> None:
    meter, oracle = open_meter("sim:64MiB"), SmallReferenceModel(placements=("device", "cache", "offload"))
    task = ReferenceLineTask(oracle)
    here = desk(tmp_path, task, meter)
    with meter.active():
        model = task.build_model()
        (plan,) = here.decide(model)
    cost = {one.placement: one for one in plan.costs}
    assert list(cost) == ["device", "cache", "offload"]
    assert cost["device"].sample_bytes > 4 * VALUES_PER_ROW > cost["cache"].sample_bytes
    assert cost["cache"].once_seconds > 0 == cost["device"].once_seconds
    assert cost["cache"].disk_bytes == oracle.truth(oracle.rows).nbytes
    assert plan.placement in cost
    assert plan.on(cost["offload"].base_bytes + cost["offload"].largest_bytes + 1, samples=60).placement != "device"


def test_a_reference_model_that_does_not_fit_on_the_device_is_not_put_there(tmp_path: Path) -> None:
    meter, oracle = open_meter("sim:4MiB"), SmallReferenceModel(placements=("device", "offload"), values_per_row=2**19)
    task = ReferenceLineTask(oracle)
    with meter.active():
        (plan,) = desk(tmp_path, task, meter).decide(task.build_model())
    assert [cost.placement for cost in plan.costs] == ["offload"] == [plan.placement]


@pytest.mark.parametrize("width", [1, 2**20])
def test_a_reference_model_that_does_not_fit_on_the_device_is_asked_on_the_host(tmp_path: Path, width: int) -> None:
    meter, oracle = open_meter("sim:2MiB"), SmallReferenceModel(values_per_row=2**19 if width == 1 else 1)
    oracle.model.extra = torch.nn.Linear(1, width).requires_grad_(False)
    task = ReferenceLineTask(oracle)
    here = desk(tmp_path, task, meter)
    with meter.active():
        here.bind_outputs([planned("cache")])
        assert_answers(task, oracle, range(70))
        expected = oracle.model(torch.tensor([[3.0]])).double().numpy()
        np.testing.assert_allclose(here.score("oracle", np.array([3])), expected, rtol=1e-6)
        assert meter.allocated_bytes() < 2**20
    assert [text for text in here.reporter.texts if "computes on the host" in text]  # type: ignore[attr-defined]


def test_deciding_draws_no_random_number(tmp_path: Path) -> None:
    oracle = SmallReferenceModel(placements=("device", "offload"))
    task = ReferenceLineTask(oracle)
    model, before = task.build_model(), torch.get_rng_state()
    desk(tmp_path, task).decide(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_reference_model_scores_in_parts_that_fit(tmp_path: Path) -> None:
    meter, oracle = open_meter("sim:64MiB"), SmallReferenceModel()
    rows = np.array([9, 2, 2])
    with meter.active():
        scores = desk(tmp_path, ReferenceLineTask(oracle), meter).score("oracle", rows)
    expected = oracle.model(torch.from_numpy(rows).float()[:, None])
    np.testing.assert_allclose(scores, expected.double().numpy(), rtol=1e-6)


def test_plans_are_kept_for_the_reference_models_that_they_are_of(tmp_path: Path) -> None:
    oracle = SmallReferenceModel(placements=("device", "offload"))
    task = ReferenceLineTask(oracle)
    plans = desk(tmp_path, task).decide(task.build_model())
    write_plans(tmp_path / "reference_models.json", plans)
    assert read_plans(tmp_path / "reference_models.json", task) == plans
    assert (
        read_plans(tmp_path / "reference_models.json", ReferenceLineTask(SmallReferenceModel(role="another"))) is None
    )
    assert read_plans(tmp_path / "nothing.json", task) is None
