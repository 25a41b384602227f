"""Loads the parts of a run: its task with the data, its model, its checkpoints, which survive a kill at any moment,
and the finished models that it builds on.
"""

import hashlib
import io
import json
import os
import re
import shlex
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from can_train.config.compose import from_plain
from can_train.config.resolved import FinishedModel, PathSettings, ResolvedRun, cache_folder, data_root
from can_train.config.task_settings import import_from, load_object
from can_train.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    OutOfMemoryDetails,
    RunError,
    StateError,
    unknown_name,
)
from can_train.fit.collate import leaves
from can_train.fit.optimizer import check_sparse, freeze, phase_training
from can_train.fit.pass_state import load_weights
from can_train.fit.precision import Precision, convert, is_inexact, use_channels_last
from can_train.fit.random_state import capture_generators, restore_generators, seed_everything
from can_train.io.records import (
    parse_object,
    read_bytes,
    read_text,
    text_or_nothing,
    write_bytes_atomic,
    write_json_atomic,
)
from can_train.memory.meters import AbsentGpuMeter, Meter, is_on_meta
from can_train.memory.out_of_memory import CatchOutOfMemory, headline, is_host_memory
from can_train.reporter import Reporter, TextTable
from can_train.runs.run_folder import BEGUN_WITH, CONFIG, INPUTS, RunFolder, relocate_prerequisites
from can_train.runs.trust import CodeTrust
from can_train.task import BatchTask

_MAX_NAMED: Final = 5  # weights, or lines about them, that an error has before it stops

_FORMAT_VERSION: Final = 1  # of checkpoints

# The newest checkpoint, and the previous one in case the newest is damaged on disk.
_MAX_FILES: Final = 2

_EPOCH_DIGITS: Final = 4  # in names of files of weights

# Where torch puts compiled code; where it is not set, torch makes a folder and sets it.
_TORCH_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"

_REMEDY: Final = "Copy the run once more from where it was trained, or train anew"

T = TypeVar("T")


def load_task(run: ResolvedRun, reporter: Reporter) -> BatchTask:
    """Makes the task of a run with all of its data prepared."""
    factory: Callable[..., BatchTask] = load_object(run.task_settings.factory)
    import_from(run.paths.code_dir)
    finished = finished_models(run)
    return with_cache(run.paths, reporter, lambda cache: factory(run, finished, data_root(run.paths), cache, reporter))


def sample_task(run: ResolvedRun, reporter: Reporter) -> BatchTask:
    """Makes the task of a run from a bounded sample of its data, for a plan; writes nothing."""
    sampler: Callable[..., BatchTask] = load_object(run.task_settings.sampler)
    import_from(run.paths.code_dir)
    return sampler(run, finished_models(run), data_root(run.paths), cache_folder(run.paths), reporter)


def data_signals(folder: RunFolder, reporter: Reporter) -> tuple[TextTable, Sequence[str], Any]:
    """Finds the signals in the data that a run was trained on (see `TaskSettings.signals`).

    Raises:
        MissingDataError: The data are gone.
        RunError: The data are others than the run's.
    """
    run = from_plain(folder.config())
    task, root = run.task_settings, data_root(run.paths)
    # Simulated data are always the same.
    if task.data_files(run.dataset, root):
        trained = parse_object(text_or_nothing(folder.path / INPUTS)).get("data")
        if trained is not None and trained != load_object(task.digest)(run.dataset, root, reporter):
            raise RunError("The data have changed since the run was trained on them", value=run.dataset.path,
                           remedy="Put back the files that it was trained on")  # fmt: skip
    find = load_object(task.signals)
    found: tuple[TextTable, Sequence[str], Any] = with_cache(
        run.paths, reporter, lambda cache: find(run.dataset, root, cache, reporter)
    )
    return found


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Opens a block that plans: what it changes for the whole process is as before afterwards. Libraries get a
    temporary folder, which is removed: torch_geometric leaves the source of each kind of layer in it, torch an empty
    cache.
    """
    generators, threads = capture_generators(), torch.get_num_threads()
    with TemporaryDirectory(prefix="can-train-", ignore_cleanup_errors=True) as folder:
        before, had_cache = tempfile.tempdir, _TORCH_CACHE in os.environ
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            if not had_cache:
                os.environ.pop(_TORCH_CACHE, None)
            torch.set_num_threads(threads)
            restore_generators(generators)


def with_cache(paths: PathSettings, reporter: Reporter, make: Callable[[Path], T]) -> T:
    """Calls `make` with the folder of prepared data; with a temporary one where the cache cannot be written."""
    try:
        return make(cache_folder(paths))
    except StateError as error:
        try:
            scratch = TemporaryDirectory(prefix="can-train-")
        except OSError:
            raise error from None
        reporter.notice(f"Prepared data are not kept. {error}")
    # The task maps the files that it reads: they stay readable after they are deleted.
    with scratch as folder:
        return make(Path(folder))


_COMPARED: Final = 8  # samples that ranks compare


def describe_data(task: BatchTask) -> dict[str, object]:
    """Describes a task's data, for ranks to compare: how many samples there are, and the content of a few; None where
    that is another one each time that it is read.
    """
    rows = np.concatenate([task.train_rows, task.validation_rows])
    described: dict[str, object] = {
        "training samples": len(task.train_rows), "validation samples": len(task.validation_rows)
    }  # fmt: skip
    # A stream is read once, in its order.
    if task.in_order or not len(rows):
        return described
    some = rows[np.unique(np.linspace(0, len(rows) - 1, _COMPARED).astype(np.int64))]
    digests = [_digest_of(task, some) for _ in range(2)]
    return {**described, f"digest of {len(some)} samples": digests[0] if digests[0] == digests[1] else None}


def _digest_of(task: BatchTask, rows: NDArray[np.int64]) -> str:
    digest = hashlib.sha256(np.ascontiguousarray(task.batch_features(rows)).tobytes())
    read = getattr(task, "sample", None)
    for tensor in (leaf for row in rows if read is not None for leaf in leaves(read(int(row)))):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]


def check_inputs_unchanged(folder: RunFolder, task: BatchTask) -> None:
    """Writes the digests of a run's inputs; in a later attempt, makes sure that they are the same.

    A log that grew, or a teacher that was trained on meanwhile, would change the run between two steps.

    Raises:
        RunError: The data or a reference model changed.
    """
    path = folder.path / INPUTS
    models = task.reference_models()
    digests = {model.role: model.digest for model in models} | {"data": task.data_digest()}
    now = {role: digest for role, digest in digests.items() if digest}
    # A damaged file is written anew: it proves nothing about the inputs.
    try:
        before = json.loads(read_text(path))
    except (FileNotFoundError, ValueError):
        write_json_atomic(path, now)
        return
    changed = [role for role, digest in now.items() if before.get(role, digest) != digest]
    # A reference model's digest depends on the data too, so changed data are the only cause that is named.
    if "data" in changed:
        raise RunError(BEGUN_WITH, value="they have other contents by now",
                       remedy="Bring the earlier files back, or train anew")  # fmt: skip
    if changed:
        named = ", ".join(f"the {model.role.replace('_', ' ')} {model.name}" for model in models
                          if model.role in changed)  # fmt: skip
        raise RunError("A run goes on with the models that it began with",
                       value=f"{named} has other weights by now, or is asked about other samples",
                       remedy="Bring the earlier files back, or train anew")  # fmt: skip


def fresh_model(run: ResolvedRun, task: BatchTask, meter: Meter, *, on_host: bool = False) -> nn.Module:
    """Makes the model of a run on its device, or on the host; generators start from the run's seed."""
    # Preparing data may or may not have drawn random numbers (a cache): weights start from here.
    seed_everything(run.training.seed)
    try:
        device = torch.device("cpu") if on_host else meter.device
        model = task.build_model()
        if is_on_meta(model):
            device = _without_values(meter)
        model = convert(model, Precision.named(run.training.precision).dtype, device)
        freeze(model, run.training, epoch=0)
        for phase in task.phases():
            # A phase of some parameters may have an optimizer for sparse ones.
            if not phase.parameters:
                check_sparse(model, phase_training(run.training, phase))
        return use_channels_last(model) if run.training.channels_last else model
    except RuntimeError as error:
        if not is_host_memory(error):
            raise
        raise DoesNotFitError("The model must fit into memory", value=headline(error),
                              remedy="Choose a smaller model by its settings (--set)",
                              details=OutOfMemoryDetails(of_host=True)) from error  # fmt: skip


def _without_values(meter: Meter) -> torch.device:
    """Returns the device of a model that has no values: a dry run for a card plans it without its memory."""
    if isinstance(meter, AbsentGpuMeter) and meter.target.resident_threads:
        return torch.device("meta")
    raise ConfigError("The weights of a model have values", value="parameters on meta",
                      remedy="Plan it for a card with --dry-run --target-gpu, or build it on the CPU")  # fmt: skip


@dataclass(kw_only=True)
class ResidentData:
    """The data of a task that live on the device, where its plan says so.

    Attributes:
        tensors: Everything that stays on the device beside the model; the data are added.
    """

    task: BatchTask
    meter: Meter
    tensors: list[Tensor]
    _data: list[Tensor] = field(default_factory=list, init=False)

    @property
    def is_there(self) -> bool:
        """Whether the data are on the device."""
        return bool(self._data)

    def move_to_device(self) -> bool:
        """Copies the data to the device, for batches that are gathered there; returns whether there was room."""
        with CatchOutOfMemory():
            data = {name: _copied(array, self.meter.device) for name, array in self.task.resident_data().items()}
            self._data = [*data.values()]
            self.tensors += self._data
            self.task.bind_data(data)
        if not self._data:
            self.meter.release()
        return self.is_there

    def move_to_host(self) -> None:
        """Frees the data's memory on the device; batches are gathered on the host again."""
        self.task.bind_data({})
        moved = {id(tensor) for tensor in self._data}
        # In place, since plans and the monitor share the list.
        self.tensors[:] = [tensor for tensor in self.tensors if id(tensor) not in moved]
        self._data = []
        self.meter.release()


def _copied(array: NDArray[Any], device: torch.device) -> Tensor:
    with warnings.catch_warnings():
        # Prepared data are mapped, and nothing writes into them.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        host = torch.from_numpy(np.ascontiguousarray(array))
    return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(host)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    file: str
    sha256: str
    step: int
    epochs_begun: int = 0


class Checkpoints:
    """The checkpoints of one run, in a folder that is made at the first save.

    A manifest lists them with their digests, the newest first. It is replaced after the file that it names is written:
    a process that is killed in between leaves a file that nothing names.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = folder / "manifest.json"

    def save(self, state: dict[str, Any], *, step: int, epochs_begun: int = 0) -> None:
        """Writes a checkpoint and makes it the newest.

        Args:
            state: Tensors, numbers, text, and lists, tuples and dicts of them.
            step: Optimizer steps done.
            epochs_begun: Epochs that have at least one step done.

        Raises:
            CheckpointError: It could not be written; the previous one is untouched.
        """
        # Serialized in memory first, so that the digest is of the intended bytes, whatever reaches the disk.
        data = _serialized({"format": _FORMAT_VERSION, **state})
        entries = self._entries()
        # Never the name of a file that the manifest still needs, even when the same step is saved twice.
        taken = {entry.file for entry in entries}
        name = next(n for n in (f"step-{step:08d}{suffix}.pt" for suffix in ("", "-b", "-c")) if n not in taken)
        digest = hashlib.sha256(data).hexdigest()
        entries = [_Entry(file=name, sha256=digest, step=step, epochs_begun=epochs_begun), *entries][:_MAX_FILES]
        with _writing("The checkpoint", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(self._folder / name, data)
            self._write_manifest(entries)
            # Only now, when the manifest no longer names them: a kill at any point leaves a whole checkpoint.
            for path in self._folder.glob("step-*.pt"):
                if path.name not in {entry.file for entry in entries}:
                    path.unlink(missing_ok=True)

    def load(
        self, reporter: Reporter, *, check: Callable[[Mapping[str, Any]], None] = lambda _: None, skip: int = 0
    ) -> dict[str, Any] | None:
        """Reads the newest undamaged checkpoint, and drops damaged ones; None where there is none.

        Args:
            reporter: Is told of damaged ones.
            check: Raises an error for a content that is damaged, too.
            skip: The newest that are not looked at.

        Raises:
            CheckpointError: Every checkpoint is damaged, or is of another version.
        """
        entries = self._entries()
        for position, entry in enumerate(entries[skip:]):
            if (state := self._read(entry)) is not None and _passes(check, state):
                if position > 0 and not skip:
                    # Else the next save would keep the damaged one as its previous, and drop this one.
                    self._write_manifest(entries[position:])
                return state
            reporter.notice(f"Checkpoint {entry.file} is damaged; going back to the one before it")
        if entries:
            remedy = "Start the run again from the beginning"
            raise CheckpointError("No checkpoint of this run is whole", value=str(self._folder), remedy=remedy)
        return None

    def drop(self, count: int) -> None:
        """Drops the newest checkpoints, whose content turned out to be damaged."""
        self._write_manifest(self._entries()[count:])

    def newest(self) -> dict[str, Any] | None:
        """Reads the newest checkpoint without changing anything; None where there is none.

        Raises:
            CheckpointError: It is damaged, or of another version.
        """
        for entry in self._entries():
            state = self._read(entry)
            if state is None:
                damaged = str(self._folder / entry.file)
                raise CheckpointError("The last checkpoint of this run is damaged", value=damaged, remedy=_REMEDY)
            return state
        return None

    def _entries(self) -> list[_Entry]:
        try:
            return msgspec.convert(json.loads(read_text(self._manifest))["checkpoints"], list[_Entry])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            manifest = str(self._manifest)
            raise CheckpointError("The checkpoint manifest cannot be read", value=manifest, remedy=_REMEDY) from error

    def _write_manifest(self, entries: list[_Entry]) -> None:
        write_json_atomic(self._manifest, {"checkpoints": [vars(entry) for entry in entries]})

    def _read(self, entry: _Entry) -> dict[str, Any] | None:
        """Reads a checkpoint; None where its file is missing or damaged."""
        try:
            data = read_bytes(self._folder / entry.file)
        except OSError:
            return None
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            return None
        try:
            state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        # Bytes that are not a checkpoint raise whatever they lead the reader to: no list of errors would be complete.
        except Exception as error:
            rule = "A checkpoint holds tensors and plain values only, and no code is run that is in it"
            raise CheckpointError(rule, value=entry.file, remedy=_REMEDY) from error
        found = state.get("format") if isinstance(state, dict) else "unknown"
        if found != _FORMAT_VERSION:
            versions = f"{entry.file}: format {found}, this version reads {_FORMAT_VERSION}"
            raise CheckpointError("The checkpoint is of another version", value=versions, remedy=_REMEDY)
        return dict(state)


def write_epoch_weights(folder: RunFolder, epoch: int, kind: str, weights: Mapping[str, Any]) -> None:
    """Writes weights after an epoch as a file of their own, which `torch.load` reads with `weights_only=True`.

    Args:
        folder: The run's.
        epoch: Counted from 1.
        kind: `trained` or `averaged`.
        weights: State of the model by name.

    Raises:
        CheckpointError: The file could not be written; the run goes on from its last checkpoint.
    """
    path = folder.weights_path / f"epoch-{epoch:0{_EPOCH_DIGITS}d}{'' if kind == 'trained' else f'-{kind}'}.pt"
    data = _serialized(dict(weights))
    with _writing("The weights of an epoch", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path, data)


def _serialized(value: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@contextmanager
def _writing(noun: str, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "Make room or mend the folder's permissions, then resume the run"
        raise CheckpointError(f"{noun} cannot be written", value=f"{place}: {error.strerror}",
                              remedy=remedy) from error  # fmt: skip


def _epoch_weights(folder: RunFolder, name: str) -> dict[str, Any]:
    """Reads a file of weights by its name, in which leading zeros may be missing: `epoch-4`, `epoch-0004-averaged`."""
    files = {file.stem: file for file in sorted(folder.weights_path.glob("epoch-*.pt"))}
    stem = re.sub(r"\d+", lambda digits: digits[0].zfill(_EPOCH_DIGITS), name.removesuffix(".pt"))
    if stem not in files:
        unknown = unknown_name("file of weights", name, files)
        remedy = unknown.remedy if files else "Train with --keep N, which writes the weights of every N-th epoch"
        raise CheckpointError(unknown.rule, value=f"{name} in {folder.weights_path}", remedy=remedy)
    try:
        weights = torch.load(files[stem], map_location="cpu", weights_only=True)
    # Bytes that are no weights raise whatever they lead the reader to.
    except Exception as error:
        raise CheckpointError("A file of weights is damaged", value=str(files[stem]), remedy=_REMEDY) from error
    return dict(weights) if isinstance(weights, Mapping) else {}


def _passes(check: Callable[[Mapping[str, Any]], None], state: Mapping[str, Any]) -> bool:
    try:
        check(state)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _trusted_config(folder: RunFolder) -> Mapping[str, Any]:
    return CodeTrust().config(folder)


def load_finished(
    path: Path, read_config: Callable[[RunFolder], Mapping[str, Any]] = _trusted_config, weights_file: str = ""
) -> FinishedModel:
    """Reads the model that the run in a folder has trained.

    Args:
        path: The folder.
        read_config: Returns the configuration of the run once its code may run.
        weights_file: Name of a file of weights that `training.keep` wrote, as `epoch-0010`; empty: the weights that
            the run ended with.

    Raises:
        RunError: There is no run, or its files cannot be read.
        CheckpointError: It has not finished, its weights are damaged, or there is no such file.
    """
    folder = RunFolder(path)
    if not (path / CONFIG).exists():
        raise RunError("A run that is built on stays where it was, or lies beside the run that builds on it",
                       value=f"{path} is gone", remedy="Bring its folder back to either place")  # fmt: skip
    config = read_config(folder)
    result, state, weights = _read_finished(folder, weights_file)
    # Of names, types and shapes too: weights of equal bytes may belong to different models.
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().view(-1).numpy().tobytes() if value.numel() else b"")
    run = relocate_prerequisites(from_plain(config), path)
    return FinishedModel(run_id=folder.run_id, run=run, weights=weights, result=result, sha256=digest.hexdigest(),
                         state=state.get("task", {}), made_buffers=state.get("made_buffers", ()))  # fmt: skip


def _ran_out_in_judgement(folder: RunFolder) -> bool:
    """Tells whether the device ran out of memory after the last training step: it would do so again."""
    starts = folder.attempts.starts()
    end = folder.attempts.end(starts[-1].attempt) if starts else None
    if end is None or end.ending != "gpu_oom":
        return False
    with suppress(CheckpointError):
        return bool((Checkpoints(folder.checkpoints_path).newest() or {}).get("progress", {}).get("trained"))
    return False


def _read_finished(
    folder: RunFolder, weights_file: str = ""
) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Tensor]]:
    """Reads the result, the last checkpoint and the weights of a finished run; raises as `load_finished` does."""
    if (result := folder.result()) is None:
        line, what = ["can-train", "resume", str(folder.path)], "Finish it first"
        if _ran_out_in_judgement(folder):
            line, what = [*line, "--device", "cpu"], "Training is complete; this judges it on the host"
        raise CheckpointError("Only a finished run has a model", value=str(folder.path),
                              remedy=f"{what}: {shlex.join(line)}")  # fmt: skip
    state = Checkpoints(folder.checkpoints_path).newest()
    weights = {} if state is None else state.get("best")
    if weights_file:
        weights = _epoch_weights(folder, weights_file)
    if not isinstance(weights, dict) or not weights or not all(isinstance(each, Tensor) for each in weights.values()):
        why = "there are none" if state is None else "its last checkpoint holds others"
        raise CheckpointError("A finished run has weights", value=f"{folder.checkpoints_path}: {why}", remedy=_REMEDY)
    broken = [name for name, value in weights.items() if is_inexact(value) and not value.isfinite().all()]
    if broken:
        raise CheckpointError("The weights of a finished run are finite numbers",
                              value=f"{folder.run_id}: {', '.join(broken[:_MAX_NAMED])}", remedy=_REMEDY)  # fmt: skip
    return result, state or {}, weights


def finished_models(run: ResolvedRun) -> dict[str, FinishedModel]:
    """Reads the finished models that a run builds on, by role; raises as `finished_model` does."""
    wanted = [one.role for one in run.prerequisites if one.required or getattr(run.mode, one.role)]
    return {role: finished_model(run, role) for role in wanted}


def finished_model(run: ResolvedRun, role: str) -> FinishedModel:
    """Reads the finished model of a role that a run builds on.

    Raises:
        ConfigError: Its run is not named.
        RunError: Its run is gone, or is of another task.
        CheckpointError: Its run has not finished.
    """
    path = getattr(run.mode, role)
    if not path:
        what = next(needed.what for needed in run.prerequisites if needed.role == role)
        raise ConfigError(f"Mode {run.mode.name} needs {what}", remedy=f"Name its run: --{role.replace('_', '-')}")

    def read_config(folder: RunFolder) -> Mapping[str, Any]:
        config = folder.config()
        if config.get("task") != run.task:
            raise RunError("A run builds on runs of its own task", value=f"{folder.path} is of {config.get('task')}",
                           remedy=f"Name a run of {run.task}")  # fmt: skip
        # The code is the code of this run, wherever the other one had it.
        places = {name: getattr(run.paths, name) for name in ("code_dir", "config_dir")}
        return {**config, "paths": {**dict(config.get("paths") or {}), **places}}

    return load_finished(Path(path), read_config)


def start_from(model: nn.Module, run_path: Path) -> None:
    """Gives a fresh model the best weights of the finished run in a folder.

    Raises:
        RunError: The result of the run cannot be read.
        CheckpointError: The run has not finished, its weights are damaged, or its model is another; the error names
            the difference.
    """
    folder = RunFolder(run_path)
    _, state, weights = _read_finished(folder)
    try:
        load_weights(model, weights, state.get("made_buffers", ()))
    except RuntimeError as error:
        differences = [line.strip() for line in str(error).splitlines()[1:]]
        more = f" And {len(differences) - _MAX_NAMED} more" if len(differences) > _MAX_NAMED else ""
        raise CheckpointError("The run that training starts from must have the same model",
                              value=f"{folder.run_id}: {' '.join(differences[:_MAX_NAMED])}{more}",
                              remedy="Choose a run of the same model, size, features and data") from error  # fmt: skip
