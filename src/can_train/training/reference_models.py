"""Reference models in a training: where their outputs come from, as measurements of each way decide, and their
scores.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.settings import TrainingSettings
from can_train.errors import DoesNotFitError, StateError
from can_train.fit.cost_model import DeviceLimits
from can_train.fit.explore import Explorer, Search, Workload, find_limit, probe, seconds_per_sample
from can_train.fit.micro_batcher import MicroBatcher
from can_train.fit.packing import BatchCosts, MicroBatchLimit, members
from can_train.fit.precision import Precision
from can_train.fit.random_state import capture_generators, restore_generators
from can_train.io.arrays import ArrayWriter, FolderDamageError, discard_folder, read_arrays
from can_train.io.records import read_text, write_json_atomic
from can_train.memory.meters import CpuMeter, Meter
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.reporter import Reporter
from can_train.task import BatchTask, ReferenceModel
from can_train.training import inference
from can_train.training.distributed import Ranks
from can_train.training.inference import BatchedInference, InferenceDevice, Rows

LIMIT_SHARE: Final = 0.9
"""Share of the tuned limit that a part may cost while outputs are computed for the cache."""

# Relative difference of two times that says nothing: they were measured on a machine that does other things too.
_SAME_SPEED: Final = 0.05

# Mean samples of such a part beyond which it gains no more speed: a processor's caches are full long before.
_WORTHWHILE_SAMPLES: Final = 512

_BLOCK_SAMPLES: Final = 4096  # whose outputs wait in memory for the disk

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PlacementCost:
    """The cost of one way of getting a reference model's outputs."""

    placement: str  # `device`, `cache` or `offload`
    base_bytes: float  # on the device beside a batch: weights, gradients, optimizer state, and the reference model
    sample_bytes: float  # of the mean sample of a micro-batch
    largest_bytes: float  # of the largest sample
    step_seconds: float  # of a step, for one sample
    once_seconds: float = 0.0  # of the work that is done once, before training
    disk_bytes: int = 0  # size of the cache on disk


def choose_placement(costs: Sequence[PlacementCost], *, capacity_bytes: float, samples: int) -> PlacementCost:
    """Chooses the fastest placement that fits, the first of those about as fast; the smallest where none fits.

    >>> near = PlacementCost(placement="device", base_bytes=80, sample_bytes=1, largest_bytes=9, step_seconds=1.0)
    >>> disk = PlacementCost(placement="cache", base_bytes=8, sample_bytes=1, largest_bytes=2, step_seconds=0.5,
    ...                      once_seconds=40.0)
    >>> [choose_placement([near, disk], capacity_bytes=100, samples=n).placement for n in (10, 1000)]
    ['device', 'cache']
    >>> choose_placement([near, disk], capacity_bytes=20, samples=10).placement
    'cache'

    Args:
        costs: At least one.
        capacity_bytes: Of the device.
        samples: Samples that the training sees, repetitions counted.
    """
    # By itself, the largest sample must fit.
    fitting = [cost for cost in costs if cost.base_bytes + cost.largest_bytes <= capacity_bytes]
    if not fitting:
        return min(costs, key=lambda cost: cost.base_bytes + cost.largest_bytes)
    seconds = [cost.once_seconds + cost.step_seconds * samples for cost in fitting]
    return next(cost for cost, each in zip(fitting, seconds, strict=True) if each <= min(seconds) * (1 + _SAME_SPEED))


@dataclass(frozen=True, kw_only=True)
class ReferenceModelPlan:
    """Where the outputs of a reference model come from."""

    role: str  # the model's role in the task
    name: str  # the run that trained it
    placement: str
    costs: tuple[PlacementCost, ...] = ()  # of each way that was measured
    peak_bytes: float | None = None  # predicted peak of filling the cache; None where this run does not fill it

    def on(self, capacity_bytes: float, *, samples: int) -> "ReferenceModelPlan":
        """Returns the plan for a device of another capacity (see `choose_placement`)."""
        if not self.costs:
            return self
        chosen = choose_placement(self.costs, capacity_bytes=capacity_bytes, samples=samples)
        return replace(self, placement=chosen.placement)


def write_plans(path: Path, plans: Sequence[ReferenceModelPlan]) -> None:
    """Writes plans for later attempts of the run."""
    write_json_atomic(path, [asdict(plan) for plan in plans])


def read_plans(path: Path, task: BatchTask) -> list[ReferenceModelPlan] | None:
    """Reads the plans of an earlier attempt; None where there are none, or of other reference models."""
    try:
        plans = msgspec.json.decode(read_text(path), type=list[ReferenceModelPlan])
    # Damaged or of another version: placements are decided again, which changes no result.
    except (FileNotFoundError, ValueError):
        return None
    expected = [(model.role, model.name) for model in task.reference_models() if model.placements]
    return plans if [(plan.role, plan.name) for plan in plans] == expected else None


class ComputedOutputs:
    """Outputs that a reference model computes when they are needed, on the device or on the host.

    Args:
        reference_model: The reference model.
        meter: Of the device that the outputs are needed on.
        precision: Of the weights on the device. On the host they stay as their run trained them: weights of double
            precision take no features of single precision.
        on_host: Whether the model stays, and computes, on the host.

    Attributes:
        model: The reference model, or its copy on the device.
        resident: Tensors that stay on the device.
    """

    def __init__(
        self, reference_model: ReferenceModel, meter: Meter, precision: Precision, *, on_host: bool = False
    ) -> None:
        self._reference_model = reference_model
        self._meter = meter
        self._on_host = on_host
        self.model = reference_model.model
        self.resident: Sequence[Tensor] = ()
        if on_host:
            self._device, self._dtype = torch.device("cpu"), next(self.model.parameters()).dtype
        else:
            self._device, self._dtype = meter.device, precision.dtype
            with meter.active():
                self.model = inference.copy_to_device(self.model, InferenceDevice(meter=meter, precision=precision))
            self.resident = [*self.model.parameters(), *self.model.buffers()]

    def __call__(self, rows: Rows) -> Mapping[str, Tensor]:
        """Computes in full precision, so that outputs are the same wherever they come from."""
        span = self._meter.host() if self._on_host else nullcontext()
        # Not inference mode: training saves these tensors for its backward pass.
        with span, torch.no_grad(), torch.autocast(self._meter.device.type, enabled=False):
            outputs = self._reference_model.outputs(self.model, rows, self._device, self._dtype)
        # Outside the host's span, so that a simulated GPU counts the tensors that arrive on it.
        return {name: output.to(self._meter.device, copy=self._on_host) for name, output in outputs.items()}


class CachedOutputs:
    """Outputs that are looked up in a table: by output, one line after another for each of the model's rows."""

    resident: Sequence[Tensor] = ()

    def __init__(
        self, reference_model: ReferenceModel, device: torch.device, table: Mapping[str, NDArray[np.float32]]
    ) -> None:
        self._reference_model = reference_model
        self._device = device
        self.table = table
        lengths = reference_model.lengths(reference_model.rows)
        self._ptr = {name: np.concatenate([[0], np.cumsum(count)]) for name, count in lengths.items()}

    @classmethod
    def blank(cls, reference_model: ReferenceModel, device: torch.device) -> "CachedOutputs":
        """Returns outputs of the right shape that are all zero, for planning before the cache is filled."""
        lengths = reference_model.lengths(reference_model.rows)
        # One zero that is seen everywhere: no memory is taken.
        table = {name: np.broadcast_to(np.float32(0), (int(lengths[name].sum()), width))
                 for name, width in reference_model.widths.items()}  # fmt: skip
        return cls(reference_model, device, table)

    def __call__(self, rows: Rows) -> Mapping[str, Tensor]:
        """Looks up the outputs for some of the reference model's rows."""
        positions = np.searchsorted(self._reference_model.rows, rows)
        lines = {name: table.take(members(self._ptr[name], positions).positions, axis=0)
                 for name, table in self.table.items()}  # fmt: skip
        return {name: torch.from_numpy(line).to(self._device, copy=True) for name, line in lines.items()}

    def same_on_all(self, ranks: Ranks) -> "CachedOutputs":
        """Returns rank 0's outputs where another rank has others.

        Where the cache cannot be written for all, each rank computes its own, and devices differ by rounding. Tasks
        that choose samples by these outputs would then train on different ones.
        """
        # The table may take gigabytes: ranks exchange its checksum, and the table only where that differs.
        checksum = 0
        for name in sorted(self.table):
            checksum = zlib.crc32(np.ascontiguousarray(self.table[name]).data, checksum)
        if len(set(ranks.gather(lambda: checksum))) == 1:
            return self
        return CachedOutputs(self._reference_model, self._device, ranks.on_rank0(lambda: self.table))


OutputSource = ComputedOutputs | CachedOutputs


@dataclass(kw_only=True)
class ReferenceModels:
    """The reference models of a task on one device."""

    task: BatchTask  # receives their outputs
    training: TrainingSettings
    meter: Meter
    reporter: Reporter
    cache: Path  # folder where outputs are stored for later runs
    verify: bool = True  # whether the device is at hand; else all is predicted and no output is computed
    ranks: Ranks = field(default_factory=Ranks)
    plans: Sequence[ReferenceModelPlan] = ()  # where the outputs of each come from, once `prepare` has decided
    _scoring: dict[str, BatchedInference] = field(default_factory=dict)

    def __post_init__(self) -> None:
        precision = Precision.named(self.training.precision)
        self._device = InferenceDevice(meter=self.meter, precision=precision)

    def prepare(self, model: nn.Module, path: Path) -> list[Tensor]:
        """Binds the outputs of all reference models, placed as an earlier attempt placed them or as rank 0 decides.

        Args:
            model: That is to be trained, on the device.
            path: Where an earlier attempt wrote its plans, and these are written.

        Returns:
            The tensors that stay on the device.
        """
        # The placement must fit on every rank; work that is done once serves one rank's share.
        least_bytes = min(self.ranks.gather(lambda: self.meter.capacity_bytes))
        samples = -(-len(self.task.train_rows) * self.training.epochs // self.ranks.size)

        def decide() -> list[ReferenceModelPlan]:
            plans = read_plans(path, self.task)
            return plans or [plan.on(least_bytes, samples=samples) for plan in self.decide(model)]

        self.plans, resident = self.bind_outputs(self.ranks.on_rank0(decide))
        if self.plans:
            self.ranks.on_rank0(lambda: write_plans(path, self.plans))
        return resident

    def decide(self, model: nn.Module) -> list[ReferenceModelPlan]:
        """Decides where the outputs of each come from; measures steps of the model where there is a choice."""
        # Timed steps draw random numbers; training begins with the same ones whether steps were timed or not.
        generators = capture_generators()
        plans = [self._decide(one, model) for one in self.task.reference_models() if one.placements]
        restore_generators(generators)
        return plans

    def bind_outputs(self, plans: Sequence[ReferenceModelPlan]) -> tuple[list[ReferenceModelPlan], list[Tensor]]:
        """Hands the outputs to the task, from where the plans say, on all ranks.

        Returns:
            The plans, with the predicted peak of filling a cache; and the tensors that stay on the device.
        """
        # The other ranks need not compute outputs that rank 0 has written to the cache.
        sources = self.ranks.on_rank0_first(lambda: [self._fill(plan) for plan in plans])
        if self.ranks.size > 1:
            sources = [(plan, source.same_on_all(self.ranks) if isinstance(source, CachedOutputs) else source)
                       for plan, source in sources]  # fmt: skip
        return [plan for plan, _ in sources], self.ranks.on_every_rank(lambda: self._bind(sources))

    def bind_placeholders(self, plans: Sequence[ReferenceModelPlan]) -> list[Tensor]:
        """Hands outputs to the task for planning alone, zeros for the cache; returns the tensors that stay on the
        device.
        """
        return self._bind([(plan, self._source(self._named(plan.role), plan.placement)) for plan in plans])

    def score(self, role: str, rows: Rows) -> NDArray[np.float64]:
        """Scores samples with a reference model, in parts that fit."""
        reference_model = self._named(role)
        if role in self._scoring:
            return self._scoring[role].scores(reference_model, rows)

        def use(device: InferenceDevice) -> NDArray[np.float64]:
            self._scoring[role] = BatchedInference.of_copy(reference_model.model, device, self.training)
            return self._scoring[role].scores(reference_model, rows)

        return self._with_host_fallback(role, use)

    def _named(self, role: str) -> ReferenceModel:
        return next(one for one in self.task.reference_models() if one.role == role)

    def _bind(self, sources: Sequence[tuple[ReferenceModelPlan, OutputSource]]) -> list[Tensor]:
        for plan, source in sources:
            self.task.bind_outputs(plan.role, source)
        return [tensor for _, source in sources for tensor in source.resident]

    def _source(self, reference_model: ReferenceModel, placement: str) -> OutputSource:
        """Makes the source of outputs in one way; from the cache, zeros."""
        if placement == "cache":
            return CachedOutputs.blank(reference_model, self.meter.device)
        return ComputedOutputs(reference_model, self.meter, self._device.precision, on_host=placement == "offload")

    def _decide(self, reference_model: ReferenceModel, model: nn.Module) -> ReferenceModelPlan:
        # On the host itself a reference model that stays there is one that stays on the device.
        placements = [one for one in reference_model.placements if one != "offload" or not self.meter.is_host]
        placements = placements or list(reference_model.placements)
        plan = ReferenceModelPlan(role=reference_model.role, name=reference_model.name, placement=placements[0])
        if len(placements) == 1:
            return plan
        costs: list[PlacementCost] = []
        with self.reporter.stage(f"placing the {reference_model.role}", unit="ways") as stage:
            for placement in placements:
                # One way that does not fit is no error as long as another does.
                with CatchOutOfMemory(), suppress(DoesNotFitError):
                    costs.append(self._measure(reference_model, placement, model))
                self.meter.release()
                stage.advance(1)
        if not costs:
            # Planning reports why the way that needs least does not fit.
            return replace(plan, placement="cache" if "cache" in placements else plan.placement)
        samples = len(self.task.train_rows) * self.training.epochs
        return replace(plan, costs=tuple(costs)).on(self.meter.capacity_bytes, samples=samples)

    def _measure(self, reference_model: ReferenceModel, placement: str, model: nn.Module) -> PlacementCost:
        """Measures memory and time of training with the outputs placed in one way."""
        source, rows = self._source(reference_model, placement), self.task.train_rows
        self.task.bind_outputs(reference_model.role, source)
        explorer = Explorer(
            task=self.task, model=model, training=self.training, meter=self.meter, rows=rows,
            verify=self.verify, reference_tensors=source.resident,
        )  # fmt: skip
        cost_model, seconds = explorer.step_cost()
        each = self.task.batch_features(rows) @ np.asarray(cost_model.coefficients)
        once_seconds, disk_bytes = 0.0, 0
        if placement == "cache":
            lengths = reference_model.lengths(reference_model.rows)
            disk_bytes = sum(4 * width * int(lengths[name].sum()) for name, width in reference_model.widths.items())
            # An earlier run may have filled the cache.
            if not self._folder(reference_model).is_dir():
                work = _work(reference_model, ComputedOutputs(reference_model, self.meter, self._device.precision))
                once_seconds = seconds_per_sample(work, probe(work, self.meter).model, self.meter)
                # A dry run knows a part of the data, and the training rows of all.
                once_seconds *= max(len(reference_model.rows), len(rows))
        return PlacementCost(
            placement=placement, base_bytes=cost_model.base_bytes, sample_bytes=float(each.mean()),
            largest_bytes=float(each.max()), step_seconds=seconds, once_seconds=once_seconds, disk_bytes=disk_bytes,
        )  # fmt: skip

    def _folder(self, reference_model: ReferenceModel) -> Path:
        return self.cache / "outputs" / reference_model.digest

    def _fill(self, plan: ReferenceModelPlan) -> tuple[ReferenceModelPlan, OutputSource]:
        """Makes the source of outputs that a plan says; fills the cache where it is empty."""
        reference_model = self._named(plan.role)
        if plan.placement != "cache":
            return plan, self._source(reference_model, plan.placement)
        folder, peak_bytes = self._folder(reference_model), plan.peak_bytes
        table: Mapping[str, Any] | None = None
        try:
            if folder.is_dir():
                table, _ = read_arrays(folder, list(reference_model.widths))
        except FolderDamageError as damage:
            what = f"The outputs of the {reference_model.role} in {folder}"
            self.reporter.notice(f"{what} are damaged and are computed again: {damage}")
            discard_folder(folder)
        if table is None:
            try:
                table, peak_bytes = self._compute(folder, reference_model)
            except StateError as error:
                self.reporter.notice(f"The outputs of the {reference_model.role} are not cached. {error}")
                # The table is mapped: it stays readable after its files are gone.
                with TemporaryDirectory(prefix="can-train-") as scratch:
                    table, peak_bytes = self._compute(Path(scratch) / folder.name, reference_model)
        return replace(plan, peak_bytes=peak_bytes), CachedOutputs(reference_model, self.meter.device, table)

    def _compute(self, folder: Path, reference_model: ReferenceModel) -> tuple[Mapping[str, Any], float]:
        """Computes all outputs into a folder; returns them, mapped, and the predicted peak of the largest part."""
        computed = self._with_host_fallback(
            reference_model.role, lambda device: self._compute_on(device, folder, reference_model)
        )
        self.meter.release()
        return computed

    def _with_host_fallback(self, role: str, use: Callable[[InferenceDevice], T]) -> T:
        """Uses a model on the device, or on the host where it does not fit there."""
        with CatchOutOfMemory(), suppress(DoesNotFitError):
            return use(self._device)
        # After the block, where nothing that failed holds memory any more.
        self.meter.release()
        self.reporter.notice(f"The {role} does not fit on the device and computes on the host")
        host = InferenceDevice(meter=CpuMeter(), precision=self._device.precision, span=self.meter.host)
        with host.span():
            return use(host)

    def _compute_on(
        self, device: InferenceDevice, folder: Path, reference_model: ReferenceModel
    ) -> tuple[Mapping[str, Any], float]:
        source = ComputedOutputs(reference_model, device.meter, device.precision)
        meter, peak_bytes = device.meter, 0.0

        try:
            share = _WORTHWHILE_SAMPLES / LIMIT_SHARE
            work = _work(reference_model, source)
            limit = find_limit(work, meter, lambda costs: float(costs.each().mean()) * share, Search())
        finally:
            meter.release()
            meter.reset_peak()
        limits = DeviceLimits(device_key=meter.key, capacity_bytes=meter.capacity_bytes, training=limit,
                              evaluation=limit, optimizer_peak_bytes=0)  # fmt: skip

        def costs_of(rows: Rows) -> BatchCosts:
            return BatchCosts.priced(limit.model, reference_model.batch_features(rows))

        batcher = MicroBatcher(source.model, meter=meter, limits=limits)
        batched = BatchedInference(batcher=batcher, model=source.model, device=device, costs_of=costs_of,
                                   limit=MicroBatchLimit(cost=LIMIT_SHARE * limit.tuned_limit))  # fmt: skip

        def compute(part: Rows) -> Mapping[str, Tensor]:
            nonlocal peak_bytes
            peak_bytes = max(peak_bytes, limit.peak_bytes(costs_of(part).cost(0, len(part))))
            return source(part)

        rows = reference_model.rows
        kinds = {name: ("float32", (width,)) for name, width in reference_model.widths.items()}
        stage = self.reporter.stage(f"computing the {reference_model.role}", total=len(rows), unit="samples")
        with ArrayWriter(folder, kinds) as writer, stage as shown:
            # By the block, since the outputs of a whole data set need not fit in the host's memory.
            for start in range(0, len(rows), _BLOCK_SAMPLES):
                block = rows[start : start + _BLOCK_SAMPLES]
                for outputs in batched.run(block, compute):
                    writer.append({name: output.float().cpu().numpy() for name, output in outputs.items()})
                shown.advance(len(block))
            return writer.finish({}), peak_bytes


def _work(reference_model: ReferenceModel, source: ComputedOutputs) -> Workload:
    """Describes the computation of outputs for the exploration of the device."""

    def run(rows: Rows) -> None:
        source(rows)

    rows, features = reference_model.rows, reference_model.features
    counts = reference_model.batch_features(rows)
    return Workload(run=run, rows=rows, counts=counts, features=features, resident=source.resident)
