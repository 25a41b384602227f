"""Programs that compute a model without its source: for PyTorch (`torch.export`) and for ONNX, each compared with the
model on batches of other sizes than the traced one.
"""

import io
import json
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from can_train.errors import CanTrainError, ConfigError, RunError, StateError, first_sentence, without_positions
from can_train.training.exported_call import Call, TensorCall, axis_names, check_alike, unchanged

METADATA: Final = "can_train"
"""Key of the run's description in the metadata of a file."""

ROUNDING: Final = 1e-5
"""Largest difference between a program and its model, as a share of the largest result: roundings of float32."""

_LEAST_SIZE: Final = 2  # of a dynamic dimension when it is traced: PyTorch takes 0 and 1 for fixed sizes
_ONNX_BYTES: Final = 2**31 - 1  # most of a protobuf message
_OPERATOR: Final = re.compile(
    r"OpOverload\(op='([\w.:]+)', overload='(\w+)'\)|\b((?:aten|torchvision)(?:\.|::)\w[\w.]*)"
)
_AXIS: Final = re.compile(r"\bs\d+\b")

Compute = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """An input or an output of a program: sizes are numbers, or names where batches differ."""

    name: str
    dtype: str
    shape: Sequence[int | str]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A traced call.

    Attributes:
        part: Name of the called part of the model; empty: the model.
        calls: The calls that the program is compared for, each with the inputs that the program has.
        axes: Names of PyTorch's symbols for dynamic sizes.
    """

    part: str
    calls: Sequence[Call]
    exported: Any
    module: TensorCall
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    axes: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of its inputs."""
        return [slot.name for slot in self.inputs]

    def tensors(self, call: Call) -> list[Tensor]:
        """Returns the inputs of the program for a call."""
        given = call.inputs()
        return [given[name] for name in self.names]


def trace(calls: Sequence[Call]) -> Program:
    """Traces a model with the sizes of calls for several batches; sizes that differ between batches are dynamic.

    Raises:
        DataError: The calls differ in more than sizes.
        RunError: PyTorch cannot trace the model, or the model fixes a size that differs.
    """
    check_alike(calls)
    names, axes = list(calls[0].inputs()), axis_names(calls)
    call = max(calls, key=lambda each: _least_dynamic(each, names, axes))
    whole = _traced(call, names, axes)
    used = [name for name, node in zip(names, _placeholders(whole[0]), strict=True) if node.users]
    refuses = _refuses(whole[0], names, {name: axes[name] for name in used if name in axes}, calls)
    traced: tuple[Any, TensorCall] | None = whole
    if len(used) < len(names):
        # Tensors of a batch that the model does not read, as its labels.
        names = used
        call = max(calls, key=lambda each: _least_dynamic(each, names, axes))
        # A trace that would refuse the same sizes again is left out: it takes seconds.
        traced = None if refuses else _traced(call, names, axes)
        refuses = traced is None or _refuses(traced[0], names, axes, calls)
    if refuses:
        # PyTorch has taken 1 for a special size, as if it could be expanded to others; where that is wrong, the
        # comparison with the model tells.
        with suppress(RunError), _without_special_sizes():
            traced = _traced(call, names, axes)
    exported, module = traced or _traced(call, names, axes)
    symbols = _symbols(exported, names, axes)
    inputs = [_slot(name, node.meta["val"], symbols)
              for name, node in zip(names, _placeholders(exported), strict=True)]  # fmt: skip
    nodes = {node.name: node for node in exported.graph.nodes}
    results = [nodes[name] for name in exported.graph_signature.user_outputs]
    # ONNX has one space of names for both.
    output_names = [f"{name}_output" if name in names else name for name in module.output_names]
    outputs = [
        _slot(name, node.meta["val"], symbols) for name, node in zip(output_names, results, strict=True)
    ]  # fmt: skip
    return Program(part=call.part, calls=[call, *(each for each in calls if each is not call)], exported=exported,
                   module=module, inputs=inputs, outputs=outputs, axes=symbols)  # fmt: skip


def _least_dynamic(call: Call, names: Sequence[str], axes: Mapping[str, Mapping[int, str]]) -> int:
    given = call.inputs()
    sizes = [given[name].shape[axis] for name in names for axis in axes.get(name, ())]
    return min([_LEAST_SIZE, *sizes])


def _traced(call: Call, names: Sequence[str], axes: Mapping[str, Mapping[int, str]]) -> tuple[Any, TensorCall]:
    module, given = TensorCall(call, names).eval(), call.inputs()
    dynamic = {name: dict.fromkeys(axes[name], torch.export.Dim.AUTO) if name in axes else None for name in names}
    with _quietly(), torch.no_grad(), exporting("PyTorch"):
        exported = torch.export.export(
            module, tuple(given[name] for name in names), dynamic_shapes=tuple(dynamic.values())
        )
        # Tracing forgets whatever a module notes.
        with unchanged(call.module):
            module.compute([given[name].clone() for name in names])
    return exported, module


def _refuses(exported: Any, names: Sequence[str], axes: Mapping[str, Mapping[int, str]], calls: Sequence[Call]) -> bool:
    """Returns whether a program refuses small sizes of some calls."""
    least = {str(symbol): limits.lower for symbol, limits in exported.range_constraints.items()}
    return any(
        bool(least.get(str(node.meta["val"].shape[axis]), 0) > min(call.inputs()[name].shape[axis] for call in calls))
        for name, node in zip(names, _placeholders(exported), strict=True)
        for axis in axes.get(name, ())
    )


def _without_special_sizes() -> AbstractContextManager[Any]:
    """Lets PyTorch trace sizes of 0 and 1 as any others, where its version can."""
    config = import_module("torch.fx.experimental._config")
    return config.patch(backed_size_oblivious=True) if hasattr(config, "backed_size_oblivious") else nullcontext()


def _placeholders(exported: Any) -> list[Any]:
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    return [nodes[name] for name in exported.graph_signature.user_inputs]


def _symbols(exported: Any, names: Sequence[str], axes: Mapping[str, Mapping[int, str]]) -> dict[str, str]:
    """Returns the name of each dynamic size by PyTorch's symbol of it; raises RunError where the size is fixed."""
    symbols, fixed = dict[str, str](), list[str]()
    for name, node in zip(names, _placeholders(exported), strict=True):
        for axis, axis_name in axes.get(name, {}).items():
            # A size that the model has fixed may still be an object of PyTorch's, which is written as its number.
            size = str(node.meta["val"].shape[axis])
            if size.isdigit():
                fixed.append(f"dimension {axis} of {name} is {size}")
            symbols.setdefault(size, axis_name)
    if fixed:
        remedy = (
            "In forward, write x.shape[0] in place of len(x), and operations on tensors in place of a loop over a "
            f"length; or pad batches to one length in Task.call_model. {_WEIGHTS}"
        )
        raise RunError(
            "The model fixes a size that differs between batches when it is traced", value="; ".join(fixed),
            remedy=remedy,
        )  # fmt: skip
    return symbols


def _slot(name: str, value: Any, symbols: Mapping[str, str]) -> Slot:
    shape = [int(size) if size.isdigit() else _renamed(size, symbols) for size in map(str, value.shape)]
    return Slot(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=shape)


def _renamed(size: str, symbols: Mapping[str, str]) -> str:
    return _AXIS.sub(lambda symbol: symbols.get(symbol[0], symbol[0]), size)


# Files


def torch_program(program: Program, about: Mapping[str, Any]) -> tuple[bytes, Compute]:
    """Returns a `.pt2` file, and the function that the file computes."""
    file = io.BytesIO()
    exported = program.exported
    with _quietly(), exporting("PyTorch"):
        # Samples of the run's data do not belong into a model's file.
        exported.example_inputs = None
        torch.export.save(exported, file, extra_files={f"{METADATA}.json": json.dumps(about)})
        data = file.getvalue()
        loaded = torch.export.load(io.BytesIO(data))

    def compute(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        module: Any = loaded.module()
        with unchanged(module):
            results: tuple[Tensor, ...] = module(*tensors)
        return results

    return data, compute


def onnx_program(program: Program, about: Mapping[str, Any]) -> tuple[bytes, Compute]:
    """Returns an `.onnx` file, and the function that the file computes with ONNX Runtime."""
    runtime = import_package("onnxruntime")
    for package in ("onnx", "onnxscript"):
        import_package(package)
    with _quietly(), exporting("ONNX"):
        exported, searches = program.exported, torch.ops.aten.searchsorted.Tensor
        # It traces the model once more.
        graphs = [part.graph for part in exported.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
        if any(node.target is searches for graph in graphs for node in graph.nodes):
            exported = exported.run_decompositions({searches: _searchsorted})
        made = torch.onnx.export(
            exported, dynamo=True, verbose=False,
            input_names=program.names, output_names=[slot.name for slot in program.outputs],
        )  # fmt: skip
        assert made is not None
        model: Any = made.model_proto
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = _renamed(size.dim_param, program.axes)
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA, json.dumps(about)
    if model.ByteSize() > _ONNX_BYTES:
        raise StateError("An ONNX file holds at most 2 GiB", value=f"{model.ByteSize():,} bytes",
                         remedy="Write a .pt2 file")  # fmt: skip
    data: bytes = model.SerializeToString()
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    with exporting("ONNX"):
        session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    needed = {each.name for each in session.get_inputs()}

    def compute(tensors: Sequence[Tensor]) -> list[Tensor]:
        given = {slot.name: tensor.numpy() for slot, tensor in zip(program.inputs, tensors, strict=True)}
        results = session.run(None, {name: value for name, value in given.items() if name in needed})
        return [torch.from_numpy(result) for result in results]

    return data, compute


def _searchsorted(  # noqa: PLR0913 - the operator's arguments
    sorted_sequence: Tensor, self: Tensor, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Computes `torch.searchsorted` for one sorted sequence by comparisons: ONNX has no such operator."""
    if sorted_sequence.ndim != 1 or sorter is not None:
        raise NotImplementedError("aten.searchsorted.Tensor of several sequences")
    values = self.unsqueeze(-1)
    is_before = sorted_sequence <= values if right or side == "right" else sorted_sequence < values
    return is_before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


# The comparison with the model


def largest_difference(program: Program, compute: Compute) -> float:
    """Compares a program with the model on all of its calls.

    Returns:
        The largest difference of a result, as a share of the largest number in the results of that name and call. Where
        it is above `ROUNDING`, the difference from the model in double precision counts, if that is smaller.

    Raises:
        RunError: The program cannot be computed for a batch, or its results have other shapes.
    """
    largest = 0.0
    for call in program.calls:
        tensors = program.tensors(call)
        with torch.no_grad(), unchanged(call.module):
            expected = TensorCall(call, program.names).compute([tensor.clone() for tensor in tensors])
            try:
                results = compute([tensor.clone() for tensor in tensors])
            except Exception as error:
                raise RunError(f"The exported program fails on a batch of {call.samples}, and the model does not",
                               value=first_sentence(error), remedy=_WEIGHTS) from error  # fmt: skip
        for slot, right, result in zip(program.outputs, expected, results, strict=True):
            if right.shape != result.shape or right.dtype != result.dtype:
                raise RunError(f"The exported program returns {slot.name} in another form than the model",
                               value=f"{_form(result)} for {_form(right)}", remedy=_WEIGHTS)  # fmt: skip
        differences = list(map(_difference, expected, results))
        if max(differences, default=0.0) > ROUNDING and (exact := _in_double(call, program, tensors)) is not None:
            # Deep networks of single precision differ by their own roundings, whoever computes them.
            differences = list(map(min, differences, map(_difference, exact, results)))
        largest = max(largest, *differences)
    return largest


def _in_double(call: Call, program: Program, tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """Computes a call in double precision; None: the model is bound to another number format."""
    precise = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    try:
        with unchanged(call.module):
            return TensorCall(replace(call, module=deepcopy(call.module).double()), program.names).compute(precise)
    except (RuntimeError, TypeError):
        return None


_LONGEST: Final = 300  # characters of an exporter's error
_WEIGHTS: Final = "Its weights alone always work: model.safetensors"


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _difference(right: Tensor, result: Tensor) -> float:
    right, result = right.double(), result.double()
    is_same = (right == result) | (right.isnan() & result.isnan())
    if bool(is_same.all()):
        return 0.0
    difference = (right - result).abs().where(~is_same, 0.0).max()
    scale = right.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(torch.finfo(torch.float32).tiny)
    # A number in place of none, or the reverse, is no difference that may be allowed.
    return float((difference / scale).nan_to_num(torch.inf))


# Errors


def import_package(name: str) -> Any:
    """Imports a module of the extra `export`."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError("The package that writes this format is not installed", value=str(error.name),
                          remedy="Install it: pip install 'can-train[export]'") from error  # fmt: skip


@contextmanager
def exporting(system: str) -> Iterator[None]:
    """Turns an error of an exporter, in the block, into an error that names the operator or the line of code."""
    try:
        yield
    except CanTrainError:
        raise
    except Exception as error:
        chain = [*_chain(error)]
        operator = next((found for each in reversed(chain) if (found := _operator(str(each)))), "")
        subject = operator or _line_of_code(error)
        last = " ".join(without_positions(str(chain[-1]).partition("\n\n")[0]).split()) or type(chain[-1]).__name__
        value = f"{subject}: {last}" if subject and subject not in last else last
        raise RunError(
            f"The model cannot be exported for {system}", value=value[:_LONGEST].rstrip("."), remedy=_WEIGHTS
        ) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _operator(text: str) -> str:
    found = _OPERATOR.search(text)
    if found is None:
        return ""
    return ".".join(found.groups()[:2]) if found[1] else str(found[3]).replace("::", ".")


def _line_of_code(error: BaseException) -> str:
    """Returns the place in a model's own code that was last called before an error; empty: there is none."""
    here, library = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    for each in _chain(error):
        for frame in reversed(traceback.extract_tb(each.__traceback__)):
            if not frame.filename.startswith((here, library, "<")):
                return f"{Path(frame.filename).name} line {frame.lineno}, {(frame.line or '').strip()}"
    return ""


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppresses the warnings of the exporters, which are about the exporters' own code."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
