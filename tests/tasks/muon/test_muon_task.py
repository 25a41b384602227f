"""What the muon task makes of showers: events, sets, networks, distances and baselines."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from can_train.errors import ConfigError, DataError
from can_train.reporter import SilentReporter
from can_train.training.sample_task import SampleBatch
from can_train_tasks.muon.point_sets import MuonBatch, MuonGan
from can_train_tasks.muon.settings import FORMATS, ShowerDatasetSettings, SyntheticShowerSettings
from can_train_tasks.muon.shower_metrics import _directions, sliced_energy_distance, wasserstein_distances
from can_train_tasks.muon.showers import read_showers
from can_train_tasks.muon.synthetic_showers import synthetic_files
from can_train_tasks.muon.task import MuonTask
from fakes.muon_tasks import FEW, REAL, muon_task

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> MuonTask:
    return muon_task(tmp_path_factory.mktemp("cache"))


def collated(task: MuonTask, size: int) -> MuonBatch:
    batch = task.logical_batch(task.train_rows[:size], CPU, torch.float64, torch.Generator().manual_seed(1))
    assert isinstance(batch, SampleBatch)
    found = batch.collated(0, size)
    assert isinstance(found, MuonBatch)
    return found


# Simulated showers


def test_both_formats_hold_the_same_showers_and_are_written_once(tmp_path: Path) -> None:
    read = {}
    for kind in FORMATS:
        files = synthetic_files(tmp_path, SyntheticShowerSettings(showers=20, files=3, format=kind), SilentReporter())
        assert len(files) == 3
        times = [path.stat().st_mtime_ns for path in files]
        again = synthetic_files(tmp_path, SyntheticShowerSettings(showers=20, files=3, format=kind), SilentReporter())
        assert [path.stat().st_mtime_ns for path in again] == times
        read[kind] = read_showers(files, ShowerDatasetSettings())
    one, other = read.values()
    assert len(one) == 20
    assert one.counts.tolist() == other.counts.tolist()
    assert all(np.array_equal(one.muons[name], other.muons[name]) for name in one.muons)
    assert len(list(tmp_path.iterdir())) == 2


def test_multiplicity_grows_with_energy_and_mass_and_falls_with_slant_depth(tmp_path: Path) -> None:
    showers = read_showers(synthetic_files(tmp_path, SyntheticShowerSettings(showers=3000, files=1, muons_per_pev=50),
                                           SilentReporter()), ShowerDatasetSettings())  # fmt: skip
    slant = showers.depth_g_cm2 / np.cos(showers.zenith_rad)
    known = np.stack([np.ones(3000), np.log(showers.energy_gev), np.log(showers.mass), slant / 1500.0], axis=1)
    _, of_energy, of_mass, of_depth = np.linalg.lstsq(known, np.log(showers.counts), rcond=None)[0]
    assert of_energy == pytest.approx(0.9, abs=0.03)
    assert of_mass == pytest.approx(0.1, abs=0.02)
    assert of_depth == pytest.approx(-1.0, abs=0.1)
    radius = np.hypot(showers.muons["x"], showers.muons["y"])
    assert 150 < np.median(radius) < 500
    energy = np.log(showers.muons["energy"])
    assert np.corrcoef(np.log(radius + 1), energy)[0, 1] < -0.3


# Events and sets


def test_events_are_normalised(tmp_path: Path) -> None:
    lines = ["event,primary_id,primary_E_GeV,primary_zenith_rad,depth_g_cm2,muon_E_GeV,x_m,y_m,t_ns"]
    lines += [f"{event},5626,1e7,1.0471975511965976,700,100,250,-1000,{t}" for event in range(12) for t in (50, 149)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    task = muon_task(tmp_path, name="a", path=str(tmp_path / "a.csv"))
    event = task.sample(0)
    assert event.conditions.tolist() == pytest.approx([1.0, 0.5, np.log10(56), 0.7], rel=1e-6)
    assert event.muons.tolist() == pytest.approx(np.array([[0.5, -2.0, 2.0, 0.0], [0.5, -2.0, 2.0, 2.0]]), rel=1e-6)
    assert {name: len(rows) for name, rows in task.set_rows.items()} == {"train": 9, "validation": 1, "test": 2}


def test_a_single_shower_is_cut_into_events_that_hold_all_of_its_muons(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"1,14,1e5,0,{x},{y}" for x, y in rng.normal(0, 300, (1500, 2))]
    header = "event,primary_id,primary_E_GeV,primary_zenith_rad,x_m,y_m"
    (tmp_path / "a.csv").write_text("\n".join([header, *rows]))
    task = muon_task(tmp_path, name="a", path=str(tmp_path / "a.csv"), variables=["x", "y"])
    events = [task.sample(row) for row in range(sum(map(len, task.sets.values())))]
    assert sum(len(event.muons) for event in events) == 1500
    assert len(events) == 128
    assert "1 showers are cut into 128 events" in task.notices()[0]
    assert len(task.set_rows["test"]) == 26
    whole = muon_task(tmp_path, name="a", path=str(tmp_path / "a.csv"), variables=["x", "y"], parts=1)
    with pytest.raises(DataError, match="parts"):
        _ = whole.sets


def test_parts_of_a_shower_stay_in_one_set_where_there_are_enough_showers(tmp_path: Path) -> None:
    task = muon_task(tmp_path, parts=3)
    showers = {name: {tuple(task.sample(int(row)).conditions.tolist()) for row in rows}
               for name, rows in task.set_rows.items()}  # fmt: skip
    assert sum(map(len, showers.values())) == len(set.union(*showers.values())) == FEW.showers


def test_a_plan_looks_at_showers_without_writing(tmp_path: Path) -> None:
    task = muon_task(tmp_path)
    sampled = task.sample_datasets()
    assert not list(tmp_path.iterdir())
    written = task.datasets()
    assert list(tmp_path.iterdir())
    first = {tuple(event.conditions.tolist()) for events in written.values() for event in events}
    assert {tuple(event.conditions.tolist()) for event in sampled["train"]} <= first
    assert task.estimated_train_rows == 2 * len(sampled["train"])


@pytest.mark.parametrize("variables", [["x"], ["y", "x"], ["x", "y", "time", "energy"], ["x", "y", "spin"]])
def test_variables_that_cannot_be_learned_are_refused(variables: list[str]) -> None:
    with pytest.raises(ConfigError, match="variable"):
        ShowerDatasetSettings(variables=variables)


# Networks


def test_neither_the_order_of_muons_nor_other_events_change_a_score(task: MuonTask) -> None:
    model, batch = task.build_model().double(), collated(task, 5)
    assert isinstance(model, MuonGan)
    scores = model.critic(batch.real, batch.real_event, batch.counts, batch.conditions)
    order = torch.randperm(len(batch.real))
    mixed = model.critic(batch.real[order], batch.real_event[order], batch.counts, batch.conditions)
    assert torch.allclose(mixed, scores, rtol=1e-12)
    one = batch.real_event == 3
    alone = model.critic(batch.real[one], batch.real_event[one] * 0, batch.counts[3:4], batch.conditions[3:4])
    assert torch.allclose(alone, scores[3:4], rtol=1e-12)


def test_muons_beyond_an_event_s_count_score_nothing(task: MuonTask) -> None:
    model, batch = task.build_model().double(), collated(task, 5)
    assert isinstance(model, MuonGan)
    generated, counts = model.generator(batch)
    assert bool((counts < batch.bounds).all())
    changed = torch.where((batch.slot >= counts[batch.noise_event])[:, None], 1e3, generated)
    assert torch.equal(model.score(batch, changed, counts), model.score(batch, generated, counts))
    assert torch.equal(model.gradient_norm(batch, changed, counts), model.gradient_norm(batch, generated, counts))


def test_the_penalized_gradient_is_that_of_each_event_alone(task: MuonTask) -> None:
    model, batch = task.build_model().double(), collated(task, 5)
    assert isinstance(model, MuonGan)
    generated, counts = model.generator(batch)
    norms = model.gradient_norm(batch, generated, counts).detach()
    for event in range(5):
        real, made = batch.real[batch.real_event == event], generated[batch.noise_event == event]
        m = min(len(real), int(counts[event]))
        mixed = batch.alpha[event] * real[:m] + (1 - batch.alpha[event]) * made[:m]
        mixed = mixed.detach().requires_grad_()
        index, count = torch.zeros(m, dtype=torch.int64), torch.tensor([m])
        score = model.critic(mixed, index, count, batch.conditions[event : event + 1])
        (own,) = torch.autograd.grad(score.sum(), mixed)
        assert float(norms[event]) == pytest.approx(float((m * own.square().sum()).sqrt()), rel=1e-12)


# Distances and baselines


@given(counts=st.lists(st.tuples(st.integers(1, 6), st.integers(2, 6)), min_size=1, max_size=4), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_the_distance_of_events_is_the_mean_over_all_pairs(counts: list[tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, m = (torch.tensor([pair[k] for pair in counts]) for k in range(2))
    # With equal values among them.
    x, y = (torch.randint(0, 4, (int(k.sum()), 2), generator=generator).double() for k in (n, m))
    found = sliced_energy_distance(x, n, y, m)
    directions = _directions(2).double()
    for event, (a, b) in enumerate(zip(x.split(n.tolist()), y.split(m.tolist()), strict=True)):
        a, b = a @ directions, b @ directions
        between = (a[:, None] - b[None]).abs().mean((0, 1))
        within = [(one[:, None] - one[None]).abs().sum((0, 1)) / max(len(one) * (len(one) - 1), 1) for one in (a, b)]
        assert float(found[event]) == pytest.approx(float((2 * between - within[0] - within[1]).mean()), abs=1e-9)


def test_the_distance_is_nothing_on_average_for_the_same_distribution_and_grows_with_the_shift() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.full((4000,), 3)
    x, y = (torch.randn(12_000, 2, generator=generator) for _ in range(2))
    # A generator that spreads less is not preferred, as it is by the Wasserstein distance of so few.
    means = [float(sliced_energy_distance(x, counts, made, counts).mean()) for made in (y, 0.6 * y, y + 0.5, y + 1)]
    assert abs(means[0]) < 0.02
    assert means[0] < min(means[1:])
    assert means[2] < means[3]


def test_distances_are_in_their_units() -> None:
    real = [np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 2.0]])] * 3
    made = [np.array([[0.5, 0.0, 1.0], [1.5, 0.0, 2.0]])] * 2 + [np.tile([0.5, 0.0, 1.0], (4, 1))]
    found = wasserstein_distances(real[:2], made[:2], ["x_m", "y_m", "e"], [500.0, 500.0, 1.0])
    assert (found["x_m"], found["y_m"], found["e"], found["w1_multiplicity"]) == (250.0, 0.0, 0.0, 0.0)
    found = wasserstein_distances(real, made, ["x_m", "y_m", "e"], [500.0, 500.0, 1.0])
    assert found["w1_multiplicity"] == pytest.approx(2 / 3)
    assert found["multiplicity_error"] == pytest.approx(np.log(2) / 3)


def test_a_single_shower_has_a_mean_distance_of_its_variables() -> None:
    real, made = [np.array([[0.0, 0.0], [2.0, 4.0]])], [np.array([[1.0, 2.0], [3.0, 6.0], [2.0, 4.0]])]
    found = wasserstein_distances(real, made, ["x_m", "y_m"], [1.0, 1.0])
    assert found["w1_mean"] == pytest.approx((found["x_m"] / 1 + found["y_m"] / 2) / 2)


def test_real_events_are_at_no_distance_from_themselves_and_baselines_are_farther(task: MuonTask) -> None:
    samples = [task.sample(int(row)) for row in task.set_rows["test"]]
    own = task.measure(samples, [sample.muons for sample in samples])
    assert set(own.values()) == {0.0}
    baselines = task.baselines(samples)
    assert set(baselines) == {"nearest training event", "normal distribution"}
    assert all(set(found) == set(own) for found in baselines.values())
    of_nearest, of_normal = (found["w1_mean"] for found in baselines.values())
    assert 0 < of_nearest < of_normal
    assert baselines == task.baselines(samples)


def test_an_untrained_generator_is_about_as_far_as_the_normal_distribution(task: MuonTask) -> None:
    rows = task.set_rows["test"]
    samples = [task.sample(int(row)) for row in rows]
    torch.manual_seed(0)
    with torch.no_grad():
        batch = task.logical_batch(rows, CPU, torch.float32, None)
        assert isinstance(batch, SampleBatch)
        made = task.predict(task.build_model(), batch.collated(0, len(rows)))
    assert [len(one) <= sample.bound for one, sample in zip(made, samples, strict=True)] == [True] * len(rows)
    found, normal = task.measure(samples, made), task.baselines(samples)["normal distribution"]
    assert found["w1_mean"] < 1.5 * normal["w1_mean"]
    # Conditions say much of how many muons there are.
    assert found["multiplicity_error"] < normal["multiplicity_error"]


def test_the_real_sample_becomes_events() -> None:
    if not REAL.is_dir():
        pytest.skip("the real sample is not there")
    task = muon_task(Path("unused"), name="corsika", path=str(REAL / "corsika_1_2.h5"))
    assert {name: len(events) for name, events in task.sets.items()} == {"train": 89, "validation": 13, "test": 26}
    events = [event for events in task.sets.values() for event in events]
    assert sum(len(event.muons) for event in events) == 1729
    assert events[0].conditions.tolist() == pytest.approx([-1.0, 1.0, 0.0, 1.036])
