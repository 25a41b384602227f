"""`can-train export RUN FILE`: the model of a finished run as a file that other programs read."""

from pathlib import Path
from typing import Annotated

import typer

from can_train.cli import output
from can_train.cli.output import Verbosity
from can_train.cli.run_locator import AsJson, Run, RunLocator, RunsDir, StateDir, TrustCode


def export(  # noqa: PLR0913 - Typer makes an option of each argument
    run: Run,
    file: Annotated[
        Path, typer.Argument(help="The file, whose ending is the format: .safetensors or .pt.", metavar="FILE")
    ],
    *,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="The format, for a file of another ending.", metavar="safetensors|pt"),
    ] = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
    quiet: output.Quiet = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Write the model of a finished run as a file: the weights that validation chose.

    A file of that name is replaced.
    """
    locator = RunLocator(runs_dir, state_dir)
    record = locator.find(run)
    output.print_starting(Verbosity.of(quiet=quiet, verbose=False))
    from can_train.io.records import expanded
    from can_train.io.units import size_text
    from can_train.training.export import ExportRequest
    from can_train.training.export import export as export_run

    path = expanded(file)
    exported = export_run(
        ExportRequest(
            run=record.folder.path, file=path, format=format_, trust=locator.trust(trusts_all=trust_code)
        )
    )  # fmt: skip
    if as_json:
        output.print_json(
            {
                "file": str(path),
                "format": exported.format,
                "bytes": exported.size_bytes,
                "tensors": exported.tensors,
                "numbers": exported.numbers,
                **exported.description,
            }
        )
        return
    output.print_text(f"Model: {path}")
    output.print_wrapped(
        f"Weights of run {exported.description['run_id']}, as validation chose them: {exported.tensors:,} tensors "
        f"with {exported.numbers:,} numbers, {size_text(exported.size_bytes)}; read back, they are equal"
    )
