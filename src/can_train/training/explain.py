"""Explains the memory of a run: the parts of a step's peak, and changes that would shrink it, each of them recorded."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from can_train.errors import CanTrainError
from can_train.fit.prediction import TaskStep
from can_train.fit.rungs import SPLIT_ALONE, Rung, candidates, rungs_of
from can_train.fit.search import pack_worst_case
from can_train.io.records import text_or_nothing, write_json_atomic
from can_train.io.units import counted, size_text
from can_train.memory.allocation_trace import DATA, KINDS, ROUNDING, SAVED, MemoryPart
from can_train.memory.catalogue import Card, find_card
from can_train.memory.cuda_library import NoCudaDispatchError
from can_train.memory.out_of_memory import CatchOutOfMemory
from can_train.reporter import Reporter, TextTable
from can_train.training.loading import nothing_left_behind, sample_task
from can_train.training.report import part_lines

if TYPE_CHECKING:
    from can_train.config.resolved import ResolvedRun
    from can_train.config.settings import TrainingSettings
    from can_train.fit.packing import BatchCosts
    from can_train.fit.run_plan import RunPlan
    from can_train.memory.catalogue import UsableMemory
    from can_train.memory.meters import Meter
    from can_train.runs.run_folder import RunFolder
    from can_train.task import BatchTask
    from can_train.training.dry_run import CardPlan

_CHILD_TIMEOUT_S: Final = 120.0  # a process that records starts anew, and reads a sample of the data
_RUNGS_S: Final = 30.0  # of CPU, after which no further rung is recorded: the process ends in time
_OFFLOAD: Final = "--fit offload"
_OFFLOAD_OPTIMIZER: Final = "--fit offload-optimizer"
_RECOMPUTE: Final = "--fit recompute"
_DATA_ON_HOST: Final = "--set training.data_on_device=off"
_LARGEST: Final = 5  # modules whose recomputation is tried
_CHUNKS: Final = 8  # of a cross entropy
_LOGARITHMS: Final = ("_log_softmax", "nll_loss")  # operations of a cross entropy
_FUSED: Final = ("adamw", "adam", "sgd")  # optimizers that are fused where no argument says otherwise
_SHOWN: Final = 12  # rows of the table
_LIST_ITEM: Final = re.compile(r"(.*\.|^)(\d+)(?=\.|$)")  # a dotted name up to its first number
_SAME_COST: Final = 0.01  # Relative difference up to which a micro-batch is the costliest of a plan
_PACKINGS: Final = 16  # that are compared, each without some of the longest samples
_MIB: Final = 2**20
_LEAST_SAVED_BYTES: Final = 0.005 * _MIB  # A smaller saving is written as 0.00 MiB


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A change that makes the peak smaller."""

    change: str  # a flag of the command line, or what to do in the model
    num_bytes: float  # that it saves, recorded with it
    keeps_gradient: bool  # whether the training stays the same


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The parts of the peak of a run's step on one device."""

    device: str
    samples: int  # of the micro-batch
    num_parts: int  # micro-batches of a step
    parts: tuple[MemoryPart, ...]  # largest first
    savings: tuple[Saving, ...]  # largest first
    basis: str  # a clause
    notices: tuple[str, ...] = ()  # sentences without a full stop
    # Of the plan for the device; None where it was not made here, the first two also where nothing predicts them.
    whole_batch_peak_bytes: float | None = None
    largest_batch: int | None = None
    fits: bool | None = None
    rungs: Mapping[str, float] = field(default_factory=dict)  # Peak on further rungs, where no plan fits
    rung: Rung = SPLIT_ALONE  # That the plan computes the step on; of shards, the parts belong to the whole model
    rung_is_asked: bool = False  # The settings name it; else it is the first rung that fits

    @property
    def peak_bytes(self) -> float:
        """The sum of the parts."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def by_kind(self) -> dict[str, float]:
        """Bytes of each kind that there is."""
        sizes: Counter[str] = Counter()
        for part in self.parts:
            sizes[part.kind] += part.num_bytes  # type: ignore[assignment]  # of small batches they are no whole numbers
        ordered = [*KINDS, *(kind for kind in sizes if kind not in KINDS)]
        return {kind: sizes[kind] for kind in ordered if sizes[kind]}

    def to_plain(self) -> dict[str, Any]:
        """Returns strict JSON values."""
        return {
            "device": self.device, "samples": self.samples, "micro_batches": self.num_parts, "basis": self.basis,
            "peak_bytes": self.peak_bytes, "whole_batch_peak_bytes": self.whole_batch_peak_bytes,
            "largest_batch": self.largest_batch, "fits": self.fits,
            "kinds": self.by_kind, "rungs": dict(self.rungs), "parts": [vars(part) for part in self.parts],
            "savings": [vars(saving) for saving in self.savings], "notices": list(self.notices),
            "ranks": self.rung.ranks, "rung": self.rung.name, "rung_is_asked": self.rung_is_asked,
            "computed": self.rung.describe(),
        }  # fmt: skip

    def write(self, folder: RunFolder) -> None:
        """Writes the explanation into the folder of its run, where a report finds it; not if it cannot be written."""
        with suppress(OSError):
            write_json_atomic(folder.memory_parts_path, self.to_plain())

    @property
    def lines(self) -> list[str]:
        """The largest parts as lines, below a line that names the peak."""
        return part_lines(self.to_plain())


def explain_planned(run: ResolvedRun, dry: CardPlan, reporter: Reporter) -> list[str]:
    """Returns the largest parts of a planned step as lines; none where it cannot be explained."""
    # The plan stands without them, whatever a task's code raises.
    try:
        with nothing_left_behind():
            return explain(run, sample_task(run, reporter), dry.target, dry.plan, (), changes=False).lines
    except Exception:  # noqa: BLE001
        return []


def explain_attempt(run: ResolvedRun, folder: RunFolder, task: BatchTask, meter: Meter) -> list[str]:
    """Explains the step of a run that is at work, by the plan in its folder, and writes the parts there.

    Nothing is run on a GPU: its step is recorded in another process, which takes seconds.

    Returns:
        The largest parts as lines; none where the step cannot be explained.
    """
    # This is about an error, or a detail: no failure of its own may end the run.
    try:
        if meter.device.type != "cpu":
            return _explain_elsewhere(folder, meter.key)
        with nothing_left_behind(), meter.host():
            plan = _plan_in(folder)
            explained = _on_host(_step(run, task, plan), meter.key, (), changes=False, fits=plan is not None)
            explained = _beside_data(explained, plan, changes=False)
            explained.write(folder)
            return explained.lines
    except Exception:  # noqa: BLE001
        return []


def _explain_elsewhere(folder: RunFolder, device_key: str) -> list[str]:
    """Explains the step of a run's plan in a process that sees no GPU."""
    command = [sys.executable, "-P", "-m", "can_train", "explain", str(folder.path), "--target-gpu", device_key,
               "--no-changes", "--json", "--quiet", "--trust-code"]  # fmt: skip
    # The code of the run is what this process runs.
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_CHILD_TIMEOUT_S,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})  # fmt: skip
    return part_lines(json.loads(done.stdout))


def _plan_in(folder: RunFolder) -> RunPlan | None:
    from can_train.fit.run_plan import RunPlan

    text = text_or_nothing(folder.plan_path)
    return RunPlan.from_plain(json.loads(text)) if text else None


def _step(run: ResolvedRun, task: BatchTask, plan: RunPlan | None) -> TaskStep:
    """Returns the step of a plan's costliest micro-batch; of the costliest sample where there is no plan."""
    step = TaskStep(task=task, batch=_largest_micro_batch(run, task, plan), training=run.training)
    if plan is None:
        return step
    return replace(step, num_parts=plan.fullest.phase_plan.most_parts, rung=plan.fullest.rung)


def explain(  # noqa: PLR0913 - the step, and whether its changes are recorded
    run: ResolvedRun,
    task: BatchTask,
    target: UsableMemory,
    plan: RunPlan | None,
    notices: Sequence[str],
    *,
    changes: bool,
) -> Explanation:
    """Explains the costliest micro-batch of a plan on a device; of the costliest sample where there is no plan."""
    return _beside_data(_explain_step(_step(run, task, plan), target, plan, notices, changes=changes), plan,
                        changes=changes)  # fmt: skip


def _beside_data(explained: Explanation, plan: RunPlan | None, *, changes: bool) -> Explanation:
    """Adds the data that live on the device by the plan: a step is recorded with a batch from the host."""
    if plan is None or not plan.data.on_device:
        return explained
    num_bytes = plan.data.num_bytes
    parts = (*explained.parts, MemoryPart(kind=DATA, module="", operation="", num_bytes=num_bytes))
    savings = explained.savings
    if changes:
        savings = (*savings, Saving(change=_DATA_ON_HOST, num_bytes=num_bytes, keeps_gradient=True))
    return replace(explained, parts=tuple(sorted(parts, key=lambda part: -part.num_bytes)),
                   savings=tuple(sorted(savings, key=lambda saving: -saving.num_bytes)))  # fmt: skip


def _explain_step(
    step: TaskStep, target: UsableMemory, plan: RunPlan | None, notices: Sequence[str], *, changes: bool
) -> Explanation:
    if target.resident_threads:
        card = find_card(target.key)
        try:
            found = step.on_card(card)
            basis = "recorded as CUDA would allocate it"
        except NoCudaDispatchError as error:
            notices = [*notices, f"{error.rule}: {error.value}"]
            return _on_host(step, target.key, notices, changes=changes, fits=plan is not None)
        peak_of = partial(_peak_on_card, card=card)
        savings = _savings(step, found.parts, peak_of) if changes else ()
        rungs = {} if plan is not None else _on_rungs(step, target.key, peak_of)
        return Explanation(device=target.key, samples=len(step.batch), num_parts=step.num_parts, parts=found.parts,
                           savings=savings, basis=basis, notices=(*notices, *found.notices), rungs=rungs,
                           rung=step.rung)  # fmt: skip
    return _on_host(step, target.key, notices, changes=changes, fits=plan is not None)


def _on_host(step: TaskStep, device_key: str, notices: Sequence[str], *, changes: bool, fits: bool) -> Explanation:
    step = replace(step, device=torch.device("cpu"))
    parts = step.parts_on_host()
    savings = _savings(step, parts, _peak_on_host) if changes else ()
    if device_key.startswith("cpu-"):
        # Tensors that would wait on the host are there.
        savings = tuple(saving for saving in savings if saving.change != _OFFLOAD)
    return Explanation(
        device=device_key, samples=len(step.batch), num_parts=step.num_parts, parts=parts,
        savings=savings, rungs={} if fits else _on_rungs(step, device_key, _peak_on_host),
        basis="run on the CPU, as the simulated GPU counts it", notices=tuple(notices), rung=step.rung,
    )  # fmt: skip


def _on_rungs(step: TaskStep, device_key: str, peak_of: Callable[[TaskStep], float]) -> dict[str, float]:
    """Records a step on the rungs that go further than splitting, and returns their peaks by the rungs' names."""
    further = rungs_of(step.model, "auto", is_host=device_key.startswith("cpu-"), state_can_leave=True)
    peaks, started = dict[str, float](), time.process_time()
    # Of rungs with the same name, the last one goes furthest.
    for name, rung in {rung.name: rung for rung in further if rung != SPLIT_ALONE}.items():
        if time.process_time() - started > _RUNGS_S:
            break
        # A rung that fails takes nobody further.
        with suppress(CanTrainError, RuntimeError, TypeError, ValueError), CatchOutOfMemory():
            peaks[name] = peak_of(replace(step, rung=rung))
    return peaks


def _peak_on_card(step: TaskStep, card: Card) -> float:
    return step.on_card(card).peak_bytes


def _peak_on_host(step: TaskStep) -> float:
    return sum(part.num_bytes for part in step.parts_on_host())


def _largest_micro_batch(run: ResolvedRun, task: BatchTask, plan: RunPlan | None) -> NDArray[np.int64]:
    """Returns the rows of the costliest micro-batch of a plan; of the costliest sample where there is none."""
    rows: NDArray[np.int64] = np.asarray(task.train_rows, dtype=np.int64)
    if plan is None:
        counts = task.batch_features(task.train_rows)
        return rows[[int(np.argmax(counts.sum(axis=1)))]]
    phase = plan.fullest
    costs = phase.training_costs(task, rows)
    if phase.limits is None or phase.phase_plan.safety_factor is None:
        # The size was given.
        ranked = np.argsort(-costs.each(), kind="stable")
        return np.resize(rows[ranked], phase.phase_plan.largest_micro_batch)
    largest_cost = phase.phase_plan.largest_cost
    planned, cost = _planned_micro_batch(run.training, task, phase)
    # A plan with another rung beside its own, or of other data, has other micro-batches.
    if abs(cost - largest_cost) > _SAME_COST * largest_cost:
        planned = rows[_packed(costs, largest_cost)]
    return planned if len(planned) else rows[[int(np.argmax(costs.each()))]]


def _planned_micro_batch(training: TrainingSettings, task: BatchTask, plan: RunPlan) -> tuple[NDArray[np.int64], float]:
    """Cuts the epochs of a plan as it does; returns the rows of the costliest micro-batch, and its cost."""
    from can_train.fit.epochs import planned_orders
    from can_train.fit.plan import costliest_micro_batch
    from can_train.fit.planner import plan_request

    request, most = plan_request(training, ranks=plan.ranks), (np.arange(0), 0.0)
    for rows in planned_orders(task, plan.skipped, seed=training.seed, epochs=training.epochs):
        positions, cost = costliest_micro_batch(request, plan.phase_plan, plan.training_costs(task, rows))
        most = max(most, (rows[positions], cost), key=itemgetter(1))
    return most


def _packed(costs: BatchCosts, limit: float) -> NDArray[np.int64]:
    """Packs samples into a batch close to a cost: where samples are padded, many shorter ones may cost more
    than the few longest that fit.
    """
    ranked, packings = np.argsort(-costs.each(), kind="stable"), []
    for start in np.unique(np.linspace(0, len(ranked) - 1, _PACKINGS).astype(np.int64)):
        left = ranked[start:]
        packings.append(left[pack_worst_case(costs.chosen(left), limit)])
        if costs.chosen(packings[-1]).total >= (1 - _SAME_COST) * limit:
            return packings[-1]
    return max(packings, key=lambda positions: costs.chosen(positions).total)


def _savings(step: TaskStep, parts: Sequence[MemoryPart], peak_of: Any) -> tuple[Saving, ...]:
    """Records each change, and returns those that save memory, the largest saving first."""
    peak, savings = sum(part.num_bytes for part in parts), []
    for change, changed, keeps_gradient in _changes(step, parts):
        # A change that fails saves nothing.
        try:
            with CatchOutOfMemory():
                saved = peak - peak_of(changed)
                if saved >= _LEAST_SAVED_BYTES:
                    savings.append(Saving(change=change, num_bytes=saved, keeps_gradient=keeps_gradient))
        except (CanTrainError, RuntimeError, TypeError, ValueError):
            continue
    return tuple(sorted(savings, key=lambda saving: -saving.num_bytes))


def _changes(step: TaskStep, parts: Sequence[MemoryPart]) -> Iterator[tuple[str, TaskStep, bool]]:
    """Yields changes to a step, each with its name, and whether the gradient stays."""
    training, size = step.training, len(step.batch)
    if size > 1:
        half = size // 2
        yield f"--micro-batch-size {half}", replace(step, batch=step.batch[:half], num_parts=2), True
    for flags, names in _to_recompute(step, parts).items():
        yield flags, replace(step, rung=replace(step.rung, recompute=names)), True
    if not step.rung.offload:
        yield _OFFLOAD, replace(step, rung=replace(step.rung, offload=True)), True
    if not step.rung.offload_optimizer:
        yield _OFFLOAD_OPTIMIZER, replace(step, rung=replace(step.rung, offload_optimizer=True)), True
    if any(part.operation.startswith(_LOGARITHMS) for part in parts[:_SHOWN]):
        yield f"cross entropy in {_CHUNKS} chunks (docs/explain.md)", replace(step, loss_chunks=_CHUNKS), True
    if line := _update_in_place(training):
        args = {**training.optimizer_args, **line}
        flags = " ".join(f"--set training.optimizer_args.{key}={str(value).lower()}" for key, value in line.items())
        yield flags, replace(step, training=replace(training, optimizer_args=args)), True
    if training.precision == "fp32":
        yield "--precision bf16", replace(step, training=replace(training, precision="bf16")), False
    if training.optimizer != "sgd":
        yield "--optimizer sgd", replace(step, training=replace(training, optimizer="sgd", optimizer_args={})), False


def _update_in_place(training: TrainingSettings) -> dict[str, bool]:
    """Returns the arguments with which an optimizer may copy less; none where its step copies nothing already."""
    if training.optimizer not in _FUSED:
        return {"foreach": False}
    return {"foreach": False, "fused": True} if {"foreach", "fused"} & training.optimizer_args.keys() else {}


def _to_recompute(step: TaskStep, parts: Sequence[MemoryPart]) -> dict[str, tuple[str, ...]]:
    """Returns the modules to compute again by flags: all that are worth it, and the blocks of each list that save most
    where there are several lists.
    """
    names = [*candidates(step.model)]
    if not names or step.rung.recompute:
        return {}
    lists: dict[str, list[str]] = {}
    for name in names:
        block = _LIST_ITEM.match(name)
        # A segment of a sequence has no pattern.
        if "[" not in name and name:
            lists.setdefault(f"{block[1]}*" if block else name, []).append(name)
    saved = {pattern: _saved_in(inside, parts) for pattern, inside in lists.items()}
    largest = sorted(saved, key=lambda pattern: -saved[pattern])[:_LARGEST] if len(lists) > 1 else ()
    by_list = {f"{_RECOMPUTE} --recompute {shlex.quote(pattern)}": tuple(lists[pattern]) for pattern in largest}
    return {_RECOMPUTE: tuple(names), **by_list}


def _saved_in(names: Sequence[str], parts: Sequence[MemoryPart]) -> float:
    inside = tuple(f"{name}." for name in names)
    return sum(part.num_bytes for part in parts if part.kind == SAVED and f"{part.module}.".startswith(inside))


def explanation_tables(explanation: Explanation) -> list[TextTable]:
    """Writes kinds, the largest parts, and the changes that save memory as tables."""
    peak = explanation.peak_bytes
    several = f", {explanation.num_parts} a step" if explanation.num_parts > 1 else ""
    title = (f"{explanation.device}: peak of {size_text(peak)}, micro-batch of "
             f"{counted(explanation.samples, 'sample')}{several}")  # fmt: skip
    kinds = [(kind, _mib(size), _share(size, peak)) for kind, size in explanation.by_kind.items()]
    named = [part for part in explanation.parts if part.kind != ROUNDING]
    rest = sum(part.num_bytes for part in named[_SHOWN:])
    computed = [f"It is on rung {explanation.rung.name}: {explanation.rung.describe()}."] if explanation.rung else []
    largest = [(part.kind, _short(part.module), _short(part.operation), _mib(part.num_bytes))
               for part in named[:_SHOWN]]  # fmt: skip
    if rest:
        largest.append(("", f"{len(named) - _SHOWN} smaller parts", "", _mib(rest)))
    tables = [
        TextTable(
            title,
            ("kind", "MiB", "share"),
            [*kinds, ("peak", _mib(peak), "100.0%")],
            notes=[f"The step was {explanation.basis}.", *computed],
        ),
        TextTable("Largest parts", ("kind", "module", "operation", "MiB"), largest),
    ]
    if explanation.savings:
        rows = [(saving.change, f"-{_mib(saving.num_bytes)}", "the same" if saving.keeps_gradient else "another")
                for saving in explanation.savings]  # fmt: skip
        tables.append(TextTable("Changes, each recorded", ("change", "MiB", "gradient"), rows))
    return tables


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / _MIB:,.2f}"


def _share(size: float, of: float) -> str:
    return f"{size / of:.1%}"


_CELL: Final = 26  # characters of a module's or an operation's name


def _short(name: str) -> str:
    """Shortens a name at its beginning: the end of a dotted name says most."""
    return name if len(name) <= _CELL else f"…{name[-_CELL + 1 :]}"
