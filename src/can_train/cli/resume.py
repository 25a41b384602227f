"""`can-train resume RUN`: continues a run where its last checkpoint is, bit by bit."""

from pathlib import Path
from typing import Annotated

import typer


def resume(
    run: Annotated[str, typer.Argument(help="Run id, an unambiguous beginning of it, or its folder.", metavar="RUN")],
    runs_dir: Annotated[str, typer.Option(help="Folder of run folders.")] = "runs",
) -> None:
    """Continue a run from its last checkpoint."""
    from can_train.cli.attempt import go_on
    from can_train.training.run_folder import RunFolder

    go_on(RunFolder.find(Path(runs_dir), run))
