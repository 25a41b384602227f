"""The muon task: a conditional WGAN-GP that generates the muons of air showers.

Shapes: B events, V variables of a muon, C conditions, n or M muons, S showers.
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.errors import DataError
from can_train.io.records import sketch
from can_train.io.units import counted
from can_train.task import Feature, Phase
from can_train.training.sample_task import Task, TaskContext
from can_train.training.task_values import TEST, TRAIN, VALIDATION, Losses
from can_train_tasks.muon.event_table import UNITS, Events, EventTable, Moments, as_moments, conditions_of, in_units
from can_train_tasks.muon.point_sets import (
    Drawn,
    MuonBatch,
    MuonEvent,
    MuonGan,
    MuonGenerator,
    SetCritic,
    collate_events,
)
from can_train_tasks.muon.primaries import PrimaryFile, open_hdf5
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
    ShowerReader,
    Showers,
    joined,
    shower_files,
    showers_of_columns,
    write_events,
)
from can_train_tasks.muon.synthetic_showers import showers_in_file, simulate_showers, synthetic_files

_METRICS: Final = {"x": "w1_x_m", "y": "w1_y_m", "energy": "w1_log10_energy", "time": "w1_log10_delay"}
# With fewer showers than this, sets consist of events, even parts of one shower, instead of whole showers.
_FEW_SHOWERS: Final = 10
_EVENTS: Final = 128  # Events, in total, that few showers are cut into
_SAMPLED: Final = 200  # Simulated showers that a plan looks at
# Seed of the cut into events and sets. It does not follow the run's seed, so that runs with other seeds are comparable.
_CUT_SEED: Final = 0
# Predictions of more showers number them as the files do: numbers as `evaluate` has them take memory for each shower.
_MOST_NUMBERED: Final = 1_000_000
_CRITIC, _GENERATOR = "critic", "generator"
_VARIABLES, _PARTS = "variables", "parts"  # Names in the state


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
        reader = ShowerReader(files, self._as_trained)
        table = self._read_within_limit(reader, files)
        return self._sets_of(table)

    @property
    def _as_trained(self) -> ShowerDatasetSettings:
        """The data set's settings, with the variables that a finished run has learned."""
        learned = self.context.state.get(_VARIABLES)
        settings: ShowerDatasetSettings = replace(self.dataset, variables=list(learned)) if learned else self.dataset
        return settings

    def _read_within_limit(self, reader: ShowerReader, files: Sequence[Path]) -> EventTable:
        """Reads showers into flat arrays. Showers of too many muons are left out, and written to a file."""
        table, outliers = EventTable(reader.variables), list[Showers]()
        most = self.dataset.max_muons_per_event or sys.maxsize
        for part in reader:
            is_kept = part.counts <= most
            table.append(part if is_kept.all() else part.select(is_kept))
            if not is_kept.all():
                outliers.append(part.select(~is_kept))
        self._tell_of(reader, len(table) + sum(map(len, outliers)))
        if outliers:
            self._leave_out(outliers, len(table), files)
        return table

    def _tell_of(self, reader: ShowerReader, showers: int) -> None:
        if reader.empty:
            self._told.append(f"Events without a muon are left out: {reader.empty:,} of {showers + reader.empty:,}")
        if reader.returning:
            self._told.append(
                f"{counted(reader.returning, 'event number')} of a file stand in rows apart, first at "
                f"{reader.returns_at}: rows of one number are taken for one shower"
            )
        if not self.dataset.variables and (missing := [name for name in VARIABLES if name not in reader.variables]):
            self._told.append(
                f"The files have no {' and no '.join(missing)} of muons: {', '.join(reader.variables)} are learned"
            )

    def _leave_out(self, outliers: Sequence[Showers], kept: int, files: Sequence[Path]) -> None:
        most, counts = self.dataset.max_muons_per_event, np.concatenate([part.counts for part in outliers])
        if not kept:
            raise DataError("dataset.max_muons_per_event leaves no shower",
                            value=f"{most}; the smallest shower has {counts.min()} muons",
                            remedy=f"Give at least {int(np.quantile(counts, 0.9))}")  # fmt: skip
        told = f"Showers of more than {most:,} muons are left out: {len(counts):,} of {kept + len(counts):,}"
        if not self.context.sampling:
            path = Path(self.dataset.outliers) if self.dataset.outliers else self._outliers_path(files)
            if not self.dataset.outliers:
                path.parent.mkdir(parents=True, exist_ok=True)
            write_events(path, joined(outliers))
            told += f". They are in {path}, a data set for a larger card"
        self._told.append(told)

    def _outliers_path(self, files: Sequence[Path]) -> Path:
        identity = f"{self.dataset.max_muons_per_event} {sketch(files)}"
        return self.context.cache / f"outliers-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.parquet"

    def sample_datasets(self) -> Mapping[str, Sequence[MuonEvent]]:
        """Returns the events of each set; simulated showers are only the first of file 0, and no file is written."""
        settings = self.dataset.synthetic
        if not self.dataset.is_synthetic:
            return self.datasets()
        number = min(showers_in_file(settings, 0), _SAMPLED)
        showers = showers_of_columns(simulate_showers(settings, 0, number), self.dataset)
        table = EventTable([*showers.muons])
        table.append(showers)
        sets = self._sets_of(table)
        self.estimated_train_rows = round(len(sets[TRAIN]) * settings.showers / number)
        self.sample_note = f"{number:,} of {settings.showers:,} simulated showers were looked at"
        return sets

    def _sets_of(self, table: EventTable) -> Mapping[str, Sequence[MuonEvent]]:
        showers, self._variables = len(table), table.variables
        few = showers < _FEW_SHOWERS
        parts = self._parts = self.dataset.parts or (-(-_EVENTS // showers) if few else 1)
        rng = np.random.default_rng(_CUT_SEED)
        table.deal(parts, rng)
        if parts > 1:
            self._cut = (f"{showers:,} showers are cut into {len(table):,} events of"
                         f" {len(table.muons) / len(table):,.0f} muons: dataset.parts {parts}")  # fmt: skip
        # Events with the same owner stay together.
        owners = np.arange(len(table)) if few else table.showers
        groups = int(owners[-1]) + 1
        chosen = self._groups_of_sets(groups, rng)
        if len(chosen) < len((TRAIN, VALIDATION, TEST)):
            raise DataError("Training, validation and test take an event each at least", value=f"{groups} events",
                            remedy="Give more data, or --set dataset.parts=128")  # fmt: skip
        rows = {name: np.flatnonzero(np.isin(owners, of_set)) for name, of_set in chosen.items()}
        if not self._is_trained:
            self._moments = table.moments(rows[TRAIN])
        table.set_bounds(self._moments, self.model_settings)
        return {name: Events(table, rows[name]) for name in rows}

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
        primaries = [PrimaryFile(path, self.dataset.depth_g_cm2) for path in files]
        showers, rows = sum(map(len, primaries)), None
        if not self.settings.draw_seed and showers <= _MOST_NUMBERED:
            # As `evaluate` numbers the showers of as many.
            sets = self._groups_of_sets(showers, np.random.default_rng(_CUT_SEED))
            rows = np.argsort(np.concatenate([*sets.values()])) if sets else None
        return PrimariesToDraw(self, primaries, rows, int(self.context.state[_PARTS]))

    def columns(self, samples: Sequence[MuonEvent], predictions: Sequence[Any]) -> Mapping[str, Any]:
        """Returns a row for each muon, in physical units, with its shower's primary."""
        counts = [len(muons) for muons in predictions]
        # Each column by itself: numbers of events may be whole numbers of 64 bits.
        primaries = [np.repeat(np.asarray(values), counts)
                     for values in zip(*(sample.primary for sample in samples), strict=True)]  # fmt: skip
        muons = torch.cat(list(predictions)).double().numpy()
        return {
            **dict(zip((EVENT, ENERGY, ZENITH, PRIMARY, DEPTH), primaries, strict=True)),
            **{VARIABLE_COLUMNS[name]: in_units(name, values)
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
    def _moments(self) -> Moments:
        """Moments of the training events; set with the sets where nothing is trained yet."""
        return as_moments(self.context.state)

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
        return wasserstein_distances(real, made, [_METRICS[name] for name in names], [UNITS[name] for name in names])


class PrimariesToDraw:
    """A stream of events without muons, whose showers are drawn: `parts` events for each primary, as in training.

    Args:
        task: Of the finished run.
        files: Files of primaries, which are read part by part.
        rows: Number of each shower among those that `evaluate` tests; None: its number in the files.
        parts: Events of a primary.
    """

    def __init__(
        self, task: MuonTask, files: Sequence[PrimaryFile], rows: NDArray[np.int64] | None, parts: int
    ) -> None:
        self._task, self._files, self._rows, self._parts = task, files, rows, parts

    def __len__(self) -> int:
        return sum(map(len, self._files)) * self._parts

    def __iter__(self) -> Iterator[MuonEvent]:
        moments, model, shower = self._task._moments, self._task.model_settings, 0
        nothing = torch.zeros(0, len(moments.mean))
        for given in chain.from_iterable(self._files):
            conditions = conditions_of(given)
            bounds = moments.bounds(conditions, model).tolist()
            columns = (given.energy_gev, given.zenith_rad, given.primary_id, given.depth_g_cm2)
            # Numbers of events keep their type: Python's whole numbers above 2^63 would become floating-point.
            for row, primary in enumerate(zip(given.event, *(column.tolist() for column in columns), strict=True)):
                event = MuonEvent(conditions=torch.from_numpy(conditions[row]), muons=nothing, bound=bounds[row],
                                  primary=primary)  # fmt: skip
                yield from (replace(event, seed=self._seed(shower, part)) for part in range(self._parts))
                shower += 1

    def _seed(self, shower: int, part: int) -> int:
        seed = self._task.settings.draw_seed
        # With a seed of its own, a shower stays the same where others follow it in the file.
        row = shower if self._rows is None else int(self._rows[shower])
        if not seed and not part:
            return row
        return int(np.random.SeedSequence([seed, row, part]).generate_state(1, np.uint32)[0])
