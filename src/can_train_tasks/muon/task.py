"""The muon task: a conditional WGAN-GP that generates the muons of air showers.

Shapes: B events, V variables of a muon, C conditions, n or M muons, S showers.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import DataError
from can_train.io.records import sketch
from can_train.task import Feature, Phase
from can_train.training.sample_task import TEST, TRAIN, VALIDATION, Losses, Task, TaskContext
from can_train_tasks.muon.point_sets import (
    CONDITIONS,
    Drawn,
    MuonBatch,
    MuonEvent,
    MuonGan,
    MuonGenerator,
    SetCritic,
    collate_events,
)
from can_train_tasks.muon.primaries import Primaries, open_hdf5, read_primaries
from can_train_tasks.muon.settings import VARIABLES, MuonGanSettings, MuonSettings, ShowerDatasetSettings
from can_train_tasks.muon.shower_metrics import (
    nearest_events,
    normal_events,
    sliced_energy_distance,
    wasserstein_distances,
)
from can_train_tasks.muon.showers import (
    DEPTH,
    ENERGY,
    EVENT,
    PRIMARY,
    VARIABLE_COLUMNS,
    ZENITH,
    Showers,
    read_showers,
    shower_files,
    showers_of_columns,
    write_events,
)
from can_train_tasks.muon.synthetic_showers import showers_in_file, simulate_showers, synthetic_files

_PEV_GEV: Final = 1e6
_KM_G_CM2: Final = 1000.0  # Unit of normalised depth
_POSITION_M: Final = 500.0  # Unit of normalised x and y
_DELAY_NS: Final = 1.0  # Added to a delay before its logarithm: the first muon's delay is 0
_UNITS: Final = {"x": _POSITION_M, "y": _POSITION_M, "energy": 1.0, "time": 1.0}
_METRICS: Final = {"x": "w1_x_m", "y": "w1_y_m", "energy": "w1_log10_energy", "time": "w1_log10_delay"}
# With fewer showers than this, sets consist of events, even parts of one shower, instead of whole showers.
_FEW_SHOWERS: Final = 10
_EVENTS: Final = 128  # Events, in total, that few showers are cut into
_SAMPLED: Final = 200  # Simulated showers that a plan looks at
_RIDGE: Final = 1e-6  # Penalty of the line through ln n: conditions that never vary get no slope
# Seed of the cut into events and sets. It does not follow the run's seed, so that runs with other seeds are comparable.
_CUT_SEED: Final = 0
_POISSON_SPREADS: Final = 3.0  # Standard deviations added to an event's bound, for events of few muons
_CRITIC, _GENERATOR = "critic", "generator"
_VARIABLES, _PARTS = "variables", "parts"  # Names in the state
_PROTON_ID: Final = 14


_Event = tuple[Tensor, Tensor, tuple[float, ...]]  # Conditions, muons and primary


@dataclass(frozen=True, kw_only=True, eq=False)
class _Moments:
    """Moments of the training events: the scale of the generator's muons, and the expected multiplicity."""

    expectation: NDArray[np.float64]  # [1 + C] coefficients of the line through ln n
    mean: NDArray[np.float64]  # [V] mean of the muons
    deviation: NDArray[np.float64]  # [V] standard deviation of the muons


class MuonTask(Task):
    """Generates muons of air showers from the energy, direction and mass of the primary and the observer's depth."""

    Settings = MuonSettings
    DatasetSettings = ShowerDatasetSettings
    prediction_formats = {"h5": open_hdf5, "hdf5": open_hdf5}  # noqa: RUF012 - as declared by the base class

    def __init__(self, context: TaskContext | None = None) -> None:
        super().__init__(context or TaskContext(settings=MuonSettings(), dataset=ShowerDatasetSettings(),
                                                model=MuonGanSettings()))  # fmt: skip
        self._cut = ""
        self._told = list[str]()  # Sentences about the files

    @classmethod
    def files(cls, dataset: Any, data_root: Path) -> Sequence[Path]:
        """Lists the files of a data set; the list is empty for simulated showers."""
        return shower_files(dataset, data_root)

    def datasets(self) -> Mapping[str, Sequence[MuonEvent]]:
        """Returns the events of each set."""
        files = shower_files(self.dataset, self.context.data_root)
        if self.dataset.is_synthetic:
            files = synthetic_files(self.context.cache, self.dataset.synthetic, self.context.reporter)
        showers = self._known(read_showers(files, self._as_trained))
        return self._sets_of(self._within_limit(showers, files))

    @property
    def _as_trained(self) -> ShowerDatasetSettings:
        """The data set's settings, with the variables that a finished run has learned."""
        learned = self.context.state.get(_VARIABLES)
        settings: ShowerDatasetSettings = replace(self.dataset, variables=list(learned)) if learned else self.dataset
        return settings

    def _known(self, showers: Showers) -> Showers:
        if showers.empty:
            self._told.append(
                f"Events without a muon are left out: {showers.empty:,} of {len(showers) + showers.empty:,}"
            )
        if not self.dataset.variables and (missing := [name for name in VARIABLES if name not in showers.muons]):
            self._told.append(
                f"The files have no {' and no '.join(missing)} of muons: {', '.join(showers.muons)} are learned"
            )
        return showers

    def _within_limit(self, showers: Showers, files: Sequence[Path]) -> Showers:
        """Leaves out showers of too many muons, and writes them to a file."""
        most = self.dataset.max_muons_per_event
        if not most or (showers.counts <= most).all():
            return showers
        is_kept = showers.counts <= most
        if not is_kept.any():
            raise DataError("dataset.max_muons_per_event leaves no shower",
                            value=f"{most}; the smallest shower has {showers.counts.min()} muons",
                            remedy=f"Give at least {int(np.quantile(showers.counts, 0.9))}")  # fmt: skip
        outliers = showers.select(~is_kept)
        told = f"Showers of more than {most:,} muons are left out: {len(outliers):,} of {len(showers):,}"
        if not self.context.sampling:
            path = Path(self.dataset.outliers) if self.dataset.outliers else self._outliers_path(files)
            if not self.dataset.outliers:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_events(path, outliers)
            told += f". They are in {path}, a data set for a larger card"
        self._told.append(told)
        return showers.select(is_kept)

    def _outliers_path(self, files: Sequence[Path]) -> Path:
        identity = f"{self.dataset.max_muons_per_event} {sketch(files)}"
        return self.context.cache / f"outliers-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.parquet"

    def sample_datasets(self) -> Mapping[str, Sequence[MuonEvent]]:
        """Returns the events of each set; simulated showers are only the first of file 0, and no file is written."""
        settings = self.dataset.synthetic
        if not self.dataset.is_synthetic:
            return self.datasets()
        number = min(showers_in_file(settings, 0), _SAMPLED)
        sets = self._sets_of(showers_of_columns(simulate_showers(settings, 0, number), self.dataset))
        self.estimated_train_rows = round(len(sets[TRAIN]) * settings.showers / number)
        self.sample_note = f"{number:,} of {settings.showers:,} simulated showers were looked at"
        return sets

    def _sets_of(self, showers: Showers) -> Mapping[str, Sequence[MuonEvent]]:
        few = len(showers) < _FEW_SHOWERS
        parts = self._parts = self.dataset.parts or (-(-_EVENTS // len(showers)) if few else 1)
        rng = np.random.default_rng(_CUT_SEED)
        variables = []
        self._variables = [*showers.muons]
        for name in self._variables:
            values = np.log10(showers.muons[name]) if name == "energy" else showers.muons[name]
            variables.append(np.log10(values + _DELAY_NS) if name == "time" else values / _UNITS[name])
        muons = np.stack(variables, axis=1)  # [M, V] normalised
        starts = np.cumsum(showers.counts) - showers.counts
        # Muons are dealt out at random: each part is a thinned copy of the shower.
        part_of = rng.integers(0, parts, len(muons)) if parts > 1 else np.zeros(len(muons), np.int64)
        conditions = _conditions(showers)
        events, owners = list[_Event](), []
        primaries = np.stack([np.arange(1.0, len(showers) + 1), showers.energy_gev, showers.zenith_rad,
                              _primary_ids(showers.mass), showers.depth_g_cm2], axis=1).tolist()  # fmt: skip
        for shower, (start, count) in enumerate(zip(starts, showers.counts, strict=True)):
            of_shower, dealt = muons[start : start + count], part_of[start : start + count]
            for part in np.unique(dealt):
                of_part = torch.from_numpy(of_shower[dealt == part]).float()
                events.append((conditions[shower], of_part, tuple(primaries[shower])))
                owners.append(len(events) - 1 if few else shower)
        if parts > 1:
            self._cut = (f"{len(showers):,} showers are cut into {len(events):,} events of"
                         f" {len(muons) / len(events):,.0f} muons: dataset.parts {parts}")  # fmt: skip
        return self._split(events, np.asarray(owners), rng)

    def _split(
        self, events: list[_Event], owners: NDArray[np.int64], rng: np.random.Generator
    ) -> Mapping[str, Sequence[MuonEvent]]:
        """Splits events into sets; events with the same owner stay together."""
        groups = int(owners.max()) + 1
        chosen = self._groups_of_sets(groups, rng)
        if len(chosen) < len((TRAIN, VALIDATION, TEST)):
            raise DataError("Training, validation and test take an event each at least", value=f"{groups} events",
                            remedy="Give more data, or --set dataset.parts=128")  # fmt: skip
        rows = {name: np.flatnonzero(np.isin(owners, of_set)) for name, of_set in chosen.items()}
        if not self._is_trained:
            self._moments = _moments([events[row] for row in rows[TRAIN]])
        return {name: [self._event(*events[row]) for row in rows[name]] for name in rows}

    def _groups_of_sets(self, groups: int, rng: np.random.Generator) -> Mapping[str, NDArray[np.int64]]:
        """Divides showers, or events of few showers, among the sets; there are none where they are too few."""
        kept = [max(1, round(share * groups)) for share in (self.dataset.validation_share, self.dataset.test_share)]
        if groups - sum(kept) < 1:
            return {}
        shuffled = rng.permutation(groups)
        edges = np.cumsum([0, *kept])
        chosen = {TRAIN: shuffled[edges[2] :], VALIDATION: shuffled[: edges[1]], TEST: shuffled[edges[1] : edges[2]]}
        return {name: np.sort(of_set) for name, of_set in chosen.items()}

    @property
    def _is_trained(self) -> bool:
        """Whether the state of a finished run is there."""
        return bool(self.context.state)

    def samples_to_predict(self) -> "PrimariesToDraw":
        """Reads primaries, which need no muons."""
        files = shower_files(self.dataset, self.context.data_root)
        primaries = read_primaries(files, self.dataset.depth_g_cm2)
        # As `evaluate` numbers the showers of as many.
        sets = self._groups_of_sets(len(primaries), np.random.default_rng(_CUT_SEED))
        order = np.concatenate([*sets.values()]) if sets else np.arange(len(primaries))
        return PrimariesToDraw(self, primaries, np.argsort(order), int(self.context.state[_PARTS]))

    def columns(self, samples: Sequence[MuonEvent], predictions: Sequence[Any]) -> Mapping[str, Any]:
        """Returns a row for each muon, in physical units, with its shower's primary."""
        counts = [len(muons) for muons in predictions]
        primaries = np.repeat([sample.primary for sample in samples], counts, axis=0)
        muons = torch.cat(list(predictions)).double().numpy()
        return {
            **dict(zip((EVENT, ENERGY, ZENITH, PRIMARY, DEPTH), primaries.T, strict=True)),
            **{VARIABLE_COLUMNS[name]: _in_units(name, values)
               for name, values in zip(self._variables, muons.T, strict=True)},
        }  # fmt: skip

    def state(self) -> Mapping[str, Any]:
        """Returns the moments of the training events, the variables of muons, and the events of a shower."""
        moments = {name: values.tolist() for name, values in vars(self._moments).items()}
        return {**moments, _VARIABLES: self._variables, _PARTS: self._parts}

    @cached_property
    def _variables(self) -> list[str]:
        """Variables of muons; set with the sets where nothing is trained yet."""
        return list(self.context.state[_VARIABLES])

    @cached_property
    def _moments(self) -> _Moments:
        """Moments of the training events; set with the sets where nothing is trained yet."""
        saved = self.context.state
        return _Moments(**{each.name: np.asarray(saved[each.name]) for each in fields(_Moments)})

    def _event(self, conditions: Tensor, muons: Tensor, primary: tuple[float, ...]) -> MuonEvent:
        model, line = self.model_settings, self._moments.expectation
        logarithm = line[0] + line[1:] @ conditions.double().numpy()
        expected = float(np.exp(min(logarithm, np.log(model.max_generated))))
        bound = int(np.ceil(model.bound * expected + _POISSON_SPREADS * np.sqrt(expected)))
        bound = max(2, min(bound, model.max_generated))
        return MuonEvent(conditions=conditions, muons=muons, bound=bound, primary=primary)

    def notices(self) -> Sequence[str]:
        """Returns the notices of every task, and how showers are left out and cut into events."""
        _ = self.sets
        return (*super().notices(), *self._told, *([self._cut] if self._cut else []))

    def model(self) -> nn.Module:
        """Makes generator and critic."""
        if not self._is_trained:
            _ = self.sets
        moments, settings = self._moments, self.model_settings
        line, mean, deviation = (torch.from_numpy(values).float()
                                 for values in (moments.expectation, moments.mean, moments.deviation))  # fmt: skip
        return MuonGan(MuonGenerator(line, mean, deviation, settings), SetCritic(len(mean), settings))

    def phases(self) -> Sequence[Phase]:
        """Returns the critic's phase, of several steps, and the generator's."""
        return (
            Phase(name=_CRITIC, parameters=(_CRITIC,), loss=self.critic_loss, steps=self.settings.critic_steps),
            Phase(name=_GENERATOR, parameters=(_GENERATOR,), loss=self.generator_loss),
        )

    def features(self, sample: MuonEvent) -> Mapping[str | Feature, float]:
        """Counts all muons (real muons and the bound of generated muons), the bound, and the pairs of both kinds."""
        real, bound = len(sample.muons), sample.bound
        return {"muons": real + bound, "generated muons": bound, "pairs": min(real, bound)}

    def draw(self, samples: Sequence[MuonEvent], generator: torch.Generator) -> Sequence[MuonEvent]:
        """Draws the random numbers of each event: for as many muons as its bound, for the event itself, and its α."""
        if len(samples) == 1 and samples[0].seed is not None:
            generator.manual_seed(samples[0].seed)
        model, bounds = self.model_settings, [sample.bound for sample in samples]
        noise = torch.randn(sum(bounds), model.noise, generator=generator).split(bounds)
        of_events = torch.randn(len(samples), model.shower_noise + 1, generator=generator)
        alphas = torch.rand(len(samples), generator=generator).tolist()
        return [replace(sample, drawn=Drawn(noise=own, shower_noise=shared[1:], alpha=alpha,
                                            multiplicity_noise=float(shared[0])))
                for sample, own, shared, alpha in zip(samples, noise, of_events, alphas, strict=True)]  # fmt: skip

    def may_live_on_device(self) -> bool:
        """Returns True: random numbers are drawn beside the muons of an event."""
        return True

    def collate(self, samples: Sequence[MuonEvent]) -> MuonBatch:
        """Joins events into a batch without padding."""
        return collate_events(samples)

    def critic_loss(self, model: Any, batch: MuonBatch) -> Losses:
        """Computes the critic's loss: score of generated minus score of real sets, and the gradient penalty."""
        with torch.no_grad():
            generated, counts = model.generator(batch)
        real = model.critic(batch.real, batch.real_event, batch.counts, batch.conditions)
        difference = model.score(batch, generated, counts) - real
        penalty = self.settings.gradient_penalty * (model.gradient_norm(batch, generated, counts) - 1).square()
        return {"critic": (difference.sum(), len(batch.counts)), "penalty": (penalty.sum(), len(batch.counts))}

    def generator_loss(self, model: Any, batch: MuonBatch) -> Losses:
        """Computes the generator's loss: the critic's score of its sets, and the likelihood of the real multiplicities.

        The likelihood is needed because a multiplicity is a whole number, which has no gradient.
        """
        generated, counts = model.generator(batch)
        score = model.score(batch, generated, counts)
        unlikely = model.generator.multiplicity.negative_log_likelihood(batch.conditions, batch.counts)
        return {"generator": (-score.sum(), len(batch.counts)), "multiplicity": (unlikely.sum(), len(batch.counts))}

    def loss(self, model: Any, batch: MuonBatch) -> Losses:
        """Computes the generator's loss."""
        return self.generator_loss(model, batch)

    def validation_loss(self, model: Any, batch: MuonBatch) -> Losses:
        """Computes the distance between generated and real events; the losses of the phases do not measure it."""
        # All generated muons up to the bound are compared: at least two, and all from one distribution.
        generated, _ = model.generator(batch)
        distance = sliced_energy_distance(batch.real, batch.counts, generated, batch.bounds)
        of_counts = model.generator.multiplicity.distance(batch.conditions, batch.counts)
        return {"distance": (distance.sum(), len(batch.counts)), "multiplicity": (of_counts.sum(), len(batch.counts))}

    def predict(self, model: Any, batch: MuonBatch) -> Sequence[Tensor]:
        """Generates the normalised muons [n, V] of each event."""
        generated, counts = model.generator(batch)
        return [own[:count] for own, count in
                zip(generated.split(batch.bounds.tolist()), counts.tolist(), strict=True)]  # fmt: skip

    def measure(self, samples: Sequence[MuonEvent], predictions: Sequence[Any]) -> Mapping[str, float]:
        """Computes Wasserstein distances between real and generated events."""
        return self._distances(samples, [one.double().numpy() for one in predictions])

    def baselines(self, samples: Sequence[MuonEvent]) -> Mapping[str, Mapping[str, float]]:
        """Computes the distances of two methods without a network."""
        training = [self.sample(int(row)) for row in self.train_rows]
        methods = {"nearest training event": nearest_events, "normal distribution": normal_events}
        return {name: self._distances(samples, method(samples, training)) for name, method in methods.items()}

    def _distances(self, samples: Sequence[MuonEvent], made: Sequence[NDArray[np.float64]]) -> dict[str, float]:
        names = self._variables
        real = [sample.muons.double().numpy() for sample in samples]
        return wasserstein_distances(real, made, [_METRICS[name] for name in names], [_UNITS[name] for name in names])


class PrimariesToDraw(Sequence[MuonEvent]):
    """Events without muons, whose showers are drawn: `parts` events for each primary, as in training."""

    def __init__(self, task: MuonTask, primaries: Primaries, rows: NDArray[np.int64], parts: int) -> None:
        self._task, self._primaries, self._rows, self._parts = task, primaries, rows, parts
        self._conditions = _conditions(primaries)

    def __len__(self) -> int:
        return len(self._primaries) * self._parts

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        shower, part = divmod(number, self._parts)
        given = self._primaries
        columns = (given.event, given.energy_gev, given.zenith_rad, given.primary_id, given.depth_g_cm2)
        nothing, primary = torch.zeros(0, len(self._task._moments.mean)), tuple(float(each[shower]) for each in columns)
        return replace(self._task._event(self._conditions[shower], nothing, primary), seed=self._seed(shower, part))

    def _seed(self, shower: int, part: int) -> int:
        seed = self._task.settings.draw_seed
        # With a seed of its own, a shower stays the same where others follow it in the file.
        row = shower if seed else int(self._rows[shower])
        if not seed and not part:
            return row
        return int(np.random.SeedSequence([seed, row, part]).generate_state(1, np.uint32)[0])


def _conditions(showers: Showers | Primaries) -> Tensor:
    """Returns the normalised conditions [S, C]."""
    columns = (np.log10(showers.energy_gev / _PEV_GEV), np.cos(showers.zenith_rad), np.log10(showers.mass),
               showers.depth_g_cm2 / _KM_G_CM2)  # fmt: skip
    return torch.from_numpy(np.stack(columns, axis=1)).float()


def _primary_ids(mass: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns CORSIKA's numbers of nuclei with half of their nucleons protons; the number of nucleons is exact."""
    return np.where(mass == 1, _PROTON_ID, 100 * mass + mass // 2)


def _in_units(name: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns a normalised variable in m, GeV or ns."""
    if name == "energy":
        return 10.0**values
    return 10.0**values - _DELAY_NS if name == "time" else values * _UNITS[name]


def _moments(events: Sequence[_Event]) -> _Moments:
    conditions = np.stack([np.r_[1.0, conditions.double().numpy()] for conditions, *_ in events])
    logarithms = np.log([len(muons) for _, muons, _ in events])
    centre = conditions.mean(axis=0) * (np.arange(1 + CONDITIONS) > 0)
    from_centre = conditions - centre
    ridge = _RIDGE * len(events) * np.eye(1 + CONDITIONS)
    slopes = np.linalg.solve(from_centre.T @ from_centre + ridge, from_centre.T @ logarithms)
    slopes[0] -= slopes @ centre
    muons = torch.cat([muons for _, muons, _ in events]).double().numpy()
    deviation = np.maximum(muons.std(axis=0), np.finfo(np.float32).eps)
    return _Moments(expectation=slopes, mean=muons.mean(axis=0), deviation=deviation)
