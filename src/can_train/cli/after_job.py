"""`can-train after-job`: what the batch script of a job calls when the job's processes have ended. No person does."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def after_job(
    state_dir: Annotated[Path, typer.Option(help="State folder, where the registry is.")],
    status: Annotated[int, typer.Option(help="Exit status of the job step.")],
) -> None:
    """Record how a job ended, and have its run go on where that makes sense.

    Standard input has the variables that the job began with.
    """
    from can_train.cli.attempt import go_on_in_job
    from can_train.launch.after import after_job as look_after
    from can_train.launch.environment import remembered_environment

    began_with = remembered_environment(sys.stdin.buffer.read())
    said = look_after(go_on_in_job, state_dir, status=status, began_with=began_with)
    if said:
        print(f"can-train: {said}", flush=True)
