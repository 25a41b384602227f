"""`can-train export RUN FILE`: the model of a finished run as a file that other programs read."""

from typing import TYPE_CHECKING, Annotated

import typer

from can_train.cli import output
from can_train.cli.output import Verbosity
from can_train.cli.run_locator import AsJson, Run, RunDataRoot, RunLocator, RunsDir, StateDir, TrustCode, WeightsFile
from can_train.reporter import TextTable

if TYPE_CHECKING:
    from can_train.training.export import Exported
    from can_train.training.exported_program import Program


def export(  # noqa: PLR0913 - Typer makes an option of each argument
    run: Run,
    file: Annotated[
        str,
        typer.Argument(
            help="The file, whose ending is the format: .safetensors, .pt, .pt2 or .onnx. A folder, which ends with /, "
            "gets a model of transformers.",
            metavar="FILE",
        ),
    ],
    *,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="The format, for a file of another ending, and for a folder.",
            metavar="safetensors|pt|pt2|onnx|huggingface",
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(help="The part of the model that a .pt2 or .onnx file computes. [the model]", metavar="NAME"),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Most that a .pt2 or .onnx file may differ, as a share of the largest result.", min=0)
    ] = 1e-5,
    dataset: Annotated[
        str | None, typer.Option(help="Data on which a .pt2 or .onnx file is compared with the model. [the run's]")
    ] = None,
    weights: WeightsFile = "",
    trust_code: TrustCode = False,
    as_json: AsJson = False,
    quiet: output.Quiet = False,
    data_root: RunDataRoot = None,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Write the model of a finished run as a file: the weights that validation chose, or a program with them.

    A program is compared with the model on samples of the run's data before it is written. A file of that name is
    replaced.
    """
    verbosity = Verbosity.of(quiet=quiet, verbose=False)
    locator = RunLocator(runs_dir, state_dir)
    record = locator.find_ended(run)
    output.print_starting(verbosity)
    from can_train.config.resolved import PathSettings
    from can_train.io.records import expanded
    from can_train.training.export import HUGGINGFACE, ExportRequest
    from can_train.training.export import export as export_run

    request = ExportRequest(
        run=record.folder.path,
        file=expanded(file),
        format=format_ or (HUGGINGFACE if file.endswith("/") or expanded(file).is_dir() else None),
        part=part,
        tolerance=tolerance,
        data=dataset,
        paths=PathSettings(data_root=data_root or "", state_dir=state_dir or ""),
        weights=weights,
        trust=locator.trust(trusts_all=trust_code),
    )
    exported = export_run(request, output.make_reporter(verbosity))
    if as_json:
        output.print_json({"file": str(request.file), **exported.to_plain()})
        return
    output.print_text(f"Model: {request.file}")
    output.print_wrapped(_weights_text(exported))
    if exported.program is not None:
        _print_program(exported.program, exported.difference)


def _weights_text(exported: "Exported") -> str:
    from can_train.io.units import size_text

    counted = f"{exported.tensors:,} tensors with {exported.numbers:,} numbers, {size_text(exported.size_bytes)}"
    checked = "; read back, they are equal" if exported.program is None else ""
    return f"Weights of run {exported.description['run_id']}, {exported.description['weights']}: {counted}{checked}"


def _print_program(program: "Program", difference: float) -> None:
    slots = [("input", program.inputs), ("output", program.outputs)]
    rows = [(kind, slot.name, slot.dtype, " × ".join(map(str, slot.shape)) or "a number")
            for kind, those in slots for slot in those]  # fmt: skip
    part = f"{program.part}, a part of the model" if program.part else "The model"
    sizes = ", ".join(str(call.samples) for call in program.calls[1:])
    note = (
        f"Compared with the model on {program.calls[0].samples} samples, with which it was traced, and on batches of "
        f"{sizes}: the largest difference is {difference:.1g} of the largest result"
    )
    output.print_tables([TextTable(f"{part} as a program", ("", "name", "type", "shape"), rows, [note])])
