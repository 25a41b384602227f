"""Writes the model of a finished run as a file that other programs read: the weights that validation chose, or a
program that computes the model with them.
"""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from can_train import __version__
from can_train.config.compose import evaluation_dataset
from can_train.config.resolved import (
    EvaluationData,
    FinishedModel,
    PathSettings,
    data_root,
    flat_settings,
    with_folders_of,
)
from can_train.config.task_settings import load_object
from can_train.errors import ConfigError, RunError, StateError, unknown_name
from can_train.io.records import place_refusal, write_bytes_atomic, write_json_atomic
from can_train.reporter import Reporter
from can_train.runs.run_state import best_text
from can_train.runs.trust import CodeTrust
from can_train.training.evaluate import Evaluation
from can_train.training.exported_call import Call, record_call
from can_train.training.exported_program import (
    METADATA,
    ROUNDING,
    Program,
    import_package,
    largest_difference,
    onnx_program,
    torch_program,
    trace,
)
from can_train.training.loading import finished_model, load_finished, with_cache

T = TypeVar("T")

SAFETENSORS: Final = "safetensors"
STATE_DICT: Final = "pt"
PROGRAM: Final = "pt2"
ONNX: Final = "onnx"
HUGGINGFACE: Final = "huggingface"
ENDINGS: Final = (SAFETENSORS, STATE_DICT, PROGRAM, ONNX)
"""Formats by the ending of a file in them."""
FORMATS: Final = (*ENDINGS, HUGGINGFACE)
"""And the format of a folder."""

_SIZES: Final = (3, 5, 1, 4, 2, 6)  # samples of the batches that a program is traced with and compared for

# Names that wrappers of PyTorch put before the names of the model's own weights, anywhere. DataParallel and
# DistributedDataParallel put `module`, which a part of a model may also have: it is left out where all weights have it.
_WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_PARALLEL: Final = "module."


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """A finished run whose model is written.

    Attributes:
        run: Folder of the run.
        file: The file, or the folder.
        format: One of `FORMATS`; None: the ending of the file.
        part: Name of the part of the model that a program computes; None: the model, or the first part that is called.
        weights: File of weights, as `epoch-0010`; empty: the weights that the run ended with.
        tolerance: Largest difference between a program and its model, as a share of the largest result.
        data: Data on which a program is compared with its model; None: the run's own.
        paths: Folders; empty ones are the run's, if they are on this machine.
        trust: Decides whether the run's code may run.
    """

    run: Path
    file: Path
    format: str | None = None
    part: str | None = None
    weights: str = ""
    tolerance: float = ROUNDING
    data: str | None = None
    paths: PathSettings = field(default_factory=PathSettings)
    trust: CodeTrust = field(default_factory=CodeTrust)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written.

    Attributes:
        description: The description of the run that the file has.
        tensors: Number of weights.
        numbers: Numbers in them.
        size_bytes: Size of the file.
        program: The program in the file; None: there is none.
        difference: Largest difference between the program and its model, as a share of the largest result.
    """

    format: str
    description: Mapping[str, Any]
    tensors: int
    numbers: int
    size_bytes: int
    program: Program | None = None
    difference: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        """Returns the facts of the file, and the description in it."""
        figures = {"format": self.format, "bytes": self.size_bytes, "tensors": self.tensors, "numbers": self.numbers}
        compared = {} if self.program is None else {"largest_difference": self.difference}
        return {**figures, **compared, **self.description}


def export(request: ExportRequest, reporter: Reporter) -> Exported:
    """Writes the model of a finished run, after the file has been compared with the model.

    Raises:
        ConfigError: The file has no format, or cannot be written.
        CheckpointError: The run has not finished.
        RunError: The model cannot be exported in this format, or a program differs from it.
    """
    chosen = choose_format(request.file, request.format)
    check_place(request.file, is_folder=chosen == HUGGINGFACE)
    finished = load_finished(request.run, request.trust.config, request.weights)
    weights = plain_weights(finished.weights)
    about = {**description(finished), "weights": request.weights or best_text(finished.result)}
    program, difference = None, 0.0
    with _writing(request.file):
        if chosen == HUGGINGFACE:
            size_bytes = write_pretrained(finished, request, about, reporter)
        else:
            if chosen in _WRITERS:
                data = _WRITERS[chosen](weights, about)
            else:
                program, data, difference = _compared_program(
                    finished, replace(request, format=chosen), about, reporter
                )
            write_bytes_atomic(request.file, data)
            size_bytes = len(data)
    numbers = sum(weight.numel() for weight in weights.values())
    return Exported(format=chosen, description=about, tensors=len(weights), numbers=numbers, size_bytes=size_bytes,
                    program=program, difference=difference)  # fmt: skip


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError("The model cannot be written", value=f"{place}: {error.strerror or error}",
                         remedy="Make room there, or name another file") from error  # fmt: skip


def _compared_program(
    finished: FinishedModel, request: ExportRequest, about: dict[str, Any], reporter: Reporter
) -> tuple[Program, bytes, float]:
    """Returns a program, its file, and its difference from the model; adds its inputs and outputs to `about`."""
    with reporter.stage("tracing the model"):
        program = trace(with_evaluation(finished, request, reporter, partial(record_calls, part=request.part)))
    about |= {"part": program.part, "inputs": list(map(asdict, program.inputs)),
              "outputs": list(map(asdict, program.outputs))}  # fmt: skip
    with reporter.stage("writing and comparing the program"):
        data, compute = (torch_program if request.format == PROGRAM else onnx_program)(program, about)
        difference = largest_difference(program, compute)
    if not difference <= request.tolerance:
        raise RunError("The exported program does not compute the model's results",
                       value=f"it differs by {difference:.1e} of the largest result, more than "
                             f"{request.tolerance:.0e}",
                       remedy=f"Allow it with --tolerance {2 * difference:.0e}, or write its weights alone: "
                              "model.safetensors")  # fmt: skip
    return program, data, difference


def with_evaluation(
    finished: FinishedModel, request: ExportRequest, reporter: Reporter, use: Callable[[Evaluation], T]
) -> T:
    """Calls `use` with a finished model and the data of the request."""
    run = finished.run
    paths = with_folders_of(run, request.paths)
    dataset = evaluation_dataset(run, request.data, ())

    def opened(cache: Path) -> T:
        options = load_object(run.task_settings.evaluation)()
        data = EvaluationData(dataset=dataset, own=request.data is None, data_root=data_root(paths), cache=cache,
                              reporter=reporter, options=options)  # fmt: skip
        evaluation: Evaluation = load_object(run.task_settings.evaluator)(finished, partial(finished_model, run), data)
        evaluation.model.requires_grad_(False)
        return use(evaluation)

    return with_cache(paths, reporter, opened)


def record_calls(evaluation: Evaluation, *, part: str | None) -> list[Call]:
    """Records the calls of a finished model, or of a part of it, for batches of several sizes."""
    calls, first = [], 0
    for size in _SIZES:
        # Where there are fewer samples, some come twice.
        rows = np.resize(np.roll(evaluation.rows, -first), size)
        first += size
        calls.append(record_call(evaluation.model, partial(evaluation.call_model, rows), part, size))
    return calls


def write_pretrained(
    finished: FinishedModel, request: ExportRequest, about: Mapping[str, Any], reporter: Reporter
) -> int:
    """Writes a model of transformers as a folder of `save_pretrained`; returns its size in bytes.

    Raises:
        ConfigError: The run's model has no such model in it, or several.
    """
    model = with_evaluation(finished, request, reporter, lambda evaluation: evaluation.model)
    pretrained = pretrained_model(model, request.part)
    # Beside its final place, so that it can be renamed to it.
    scratch = Path(mkdtemp(prefix=f".{request.file.name}-", dir=request.file.absolute().parent))
    try:
        pretrained.save_pretrained(scratch)
        _check_equal(type(pretrained).from_pretrained(scratch).state_dict(), pretrained.state_dict())
        write_json_atomic(scratch / f"{METADATA}.json", about)
        size_bytes = sum(file.stat().st_size for file in scratch.iterdir())
        # A folder of mkdtemp is its owner's alone.
        scratch.chmod(0o777 & ~_umask())
        # Replaces an empty folder.
        scratch.rename(request.file)
    finally:
        rmtree(scratch, ignore_errors=True)
    return size_bytes


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def pretrained_model(model: nn.Module, part: str | None) -> Any:
    """Returns the model of transformers in a model, which may be the model itself."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    names = [name for name, module in model.named_modules() if isinstance(module, kind)]
    # An encoder and its decoder are parts of one model.
    outermost = [name for name in names if not any(name.startswith(f"{other}." if other else "") and name != other
                                                   for other in names)]  # fmt: skip
    if part is not None and part not in names:
        raise unknown_name("model of transformers in the run's model", part, names)
    if part is None and len(outermost) != 1:
        value = ", ".join(outermost) or type(model).__name__
        remedy = "Choose one: --part NAME" if outermost else "Write its weights: model.safetensors"
        count = f"{len(outermost)} models" if outermost else "no model"
        raise ConfigError(f"The run's model has {count} of transformers in it", value=value, remedy=remedy)
    return model.get_submodule(outermost[0] if part is None else part)


def choose_format(file: Path, name: str | None) -> str:
    """Returns the format of a file: the one that is named, else its ending.

    Raises:
        ConfigError: There is no such format, or the ending is that of another one.
    """
    endings, ending = ", ".join(f".{each}" for each in ENDINGS), file.suffix.lower().lstrip(".")
    if name is not None and name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    if name is None and ending not in ENDINGS:
        raise ConfigError(f"{file} has no ending that names a format", remedy=f"Name a file that ends in {endings}; "
                          "or a folder, with --format huggingface")  # fmt: skip
    if name is not None and ending in ENDINGS and ending != name:
        raise ConfigError(f"--format {name} does not go with the ending of the file", value=str(file),
                          remedy=f"Leave --format out, or name a file that ends in .{name}")  # fmt: skip
    return name or ending


def check_place(file: Path, *, is_folder: bool = False) -> None:
    """Makes sure, before anything is computed, that a file, or a new folder, can be written."""
    if is_folder and (file.is_file() or (file.is_dir() and any(file.iterdir()))):
        why = "is a file" if file.is_file() else "is not empty"
        raise ConfigError(f"{file} {why}: a model of transformers needs a folder of its own",
                          remedy="Name a new one")  # fmt: skip
    if refusal := place_refusal(file, as_folder=is_folder):
        kind = "folder" if is_folder else "file"
        raise ConfigError(f"{refusal}: a model needs a {kind} in a writable folder",
                          remedy=f"Make the folder, or name another {kind}")  # fmt: skip


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
    package = import_package("safetensors.torch")
    # `format` tells other readers that PyTorch wrote the file.
    data: bytes = package.save(dict(weights), {"format": "pt", METADATA: json.dumps(about)})
    _check_equal(package.load(data), weights)
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
