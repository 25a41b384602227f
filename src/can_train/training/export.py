"""Writes the model of a finished run as a file that other programs read: the weights that validation chose."""

import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from can_train import __version__
from can_train.config.resolved import FinishedModel, flat_settings
from can_train.errors import ConfigError, StateError, unknown_name
from can_train.io.records import write_bytes_atomic
from can_train.runs.trust import CodeTrust
from can_train.training.loading import load_finished

SAFETENSORS: Final = "safetensors"
STATE_DICT: Final = "pt"
FORMATS: Final = (SAFETENSORS, STATE_DICT)
"""Formats by the ending of a file in them."""

METADATA: Final = "can_train"
"""Key of the run's description in the metadata of a file."""

# Names that wrappers of PyTorch put before those of the model's own weights, anywhere; and that of DataParallel and
# DistributedDataParallel, which a part of a model may also have: it is left out where all weights have it.
_WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_PARALLEL: Final = "module."


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """A finished run whose model is written.

    Attributes:
        run: Folder of the run.
        file: The file.
        format: One of `FORMATS`; None: the ending of the file.
        trust: Decides whether the run's code may run.
    """

    run: Path
    file: Path
    format: str | None = None
    trust: CodeTrust = field(default_factory=CodeTrust)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written.

    Attributes:
        description: The description of the run that the file has.
        tensors: Number of weights.
        numbers: Numbers in them.
        size_bytes: Size of the file.
    """

    format: str
    description: Mapping[str, Any]
    tensors: int
    numbers: int
    size_bytes: int


def export(request: ExportRequest) -> Exported:
    """Writes the model of a finished run, after it has been read back from the bytes that are written.

    Raises:
        ConfigError: The file has no format, or cannot be written.
        CheckpointError: The run has not finished.
    """
    chosen = choose_format(request.file, request.format)
    check_place(request.file)
    finished = load_finished(request.run, request.trust.config)
    weights, about = plain_weights(finished.weights), description(finished)
    data = _WRITERS[chosen](weights, about)
    try:
        write_bytes_atomic(request.file, data)
    except OSError as error:
        raise StateError("The model cannot be written", value=f"{request.file}: {error.strerror or error}",
                         remedy="Make room there, or name another file") from error  # fmt: skip
    numbers = sum(weight.numel() for weight in weights.values())
    return Exported(format=chosen, description=about, tensors=len(weights), numbers=numbers, size_bytes=len(data))


def choose_format(file: Path, name: str | None) -> str:
    """Returns the format of a file: the one that is named, else its ending.

    Raises:
        ConfigError: There is no such format, or the ending is that of another one.
    """
    endings, ending = ", ".join(f".{each}" for each in FORMATS), file.suffix.lower().lstrip(".")
    if name is not None and name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    if name is None and ending not in FORMATS:
        raise ConfigError(f"{file} has no ending that names a format", remedy=f"Name a file that ends in {endings}")
    if name is not None and ending in FORMATS and ending != name:
        raise ConfigError(f"--format {name} does not go with the ending of the file", value=str(file),
                          remedy=f"Leave --format out, or name a file that ends in .{name}")  # fmt: skip
    return name or ending


def check_place(file: Path) -> None:
    """Makes sure, before anything is computed, that a file can be written."""
    folder = file.parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "is a folder" if file.is_dir() else "cannot be written" if folder.is_dir() else "is not there"
        raise ConfigError(f"{file if file.is_dir() else folder} {why}: a model needs a file in a writable folder",
                          remedy="Make it, or name another file")  # fmt: skip


def description(finished: FinishedModel) -> dict[str, Any]:
    """Describes a run for the users of its model, as strict JSON."""
    run = finished.run
    return {
        "run_id": finished.run_id,
        "task": run.task,
        "model": run.model_name,
        "size": run.size,
        "mode": run.mode.name,
        "key": run.key,
        "weights_sha256": finished.sha256,
        "settings": flat_settings(run.config),
        # Figures of the training data that the model depends on: a vocabulary, statistics.
        "state": dict(finished.state),
        "versions": {"can_train": __version__, "torch": torch.__version__, "python": sys.version.partition(" ")[0]},
    }


def plain_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights, contiguous and each with memory of its own, by their names without those of wrappers."""
    names = {name: _without(name, _WRAPPERS) for name in weights}
    if all(name.startswith(_PARALLEL) for name in names.values()):
        names = {name: plain.removeprefix(_PARALLEL) for name, plain in names.items()}
    if len(set(names.values())) < len(names):
        names = {name: name for name in names}
    return {names[name]: weight.detach().clone(memory_format=torch.contiguous_format)
            for name, weight in weights.items()}  # fmt: skip


def _without(name: str, parts: tuple[str, ...]) -> str:
    for part in parts:
        name = name.replace(part, "")
    return name


def _safetensors(weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    packages = import_packages("safetensors.torch")
    # `format` tells other readers that PyTorch wrote the file.
    data: bytes = packages.save(dict(weights), {"format": "pt", METADATA: json.dumps(about)})
    _check_equal(packages.load(data), weights)
    return data


def _state_dict(weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(weights), file)
    file.seek(0)
    _check_equal(torch.load(file, weights_only=True), weights)
    return file.getvalue()


_WRITERS: Final[Mapping[str, Callable[[Mapping[str, Tensor], Mapping[str, Any]], bytes]]] = {
    SAFETENSORS: _safetensors,
    STATE_DICT: _state_dict,
}


def _check_equal(read: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    changed = [
        name for name, weight in weights.items()
        if name not in read or read[name].dtype != weight.dtype or not torch.equal(read[name], weight)
    ]  # fmt: skip
    if changed or len(read) != len(weights):
        raise StateError("The weights are read back as others than were written", value=", ".join(changed[:5]),
                         remedy="Write them in another format")  # fmt: skip


def import_packages(name: str) -> Any:
    """Imports a module of the extra `export`."""
    from importlib import import_module

    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError("The package that writes this format is not installed", value=str(error.name),
                          remedy="Install it: pip install 'can-train[export]'") from error  # fmt: skip
