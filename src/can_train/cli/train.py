"""`can-train --model … --dataset …`: trains here, submits, or says what would be done."""

import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from can_train.cli.dry_run import check_planning_flags, print_dry_runs
from can_train.cli.flags import training_parameters
from can_train.cli.line import (
    OPTIONS,
    Flags,
    check_given,
    make_request,
    parameters,
    role_parameters,
    settled_runs,
    split_names,
)
from can_train.errors import CanTrainError, ConfigError, RunError

if TYPE_CHECKING:
    from can_train.config.compose import RunRequest
    from can_train.config.resolved import ResolvedRun


def make_train_command() -> Callable[..., None]:
    """Makes the command; its signature is made of the options and the training settings."""

    def train(**flags: Any) -> None:
        _train(flags)

    ours = [*parameters(OPTIONS), *role_parameters(), *training_parameters()]
    train.__signature__ = inspect.Signature(ours)  # type: ignore[attr-defined]
    return train


def _train(flags: Flags) -> None:
    for name in ("model", "dataset"):
        if not flags[name]:
            raise ConfigError(f"--{name} is missing", remedy="Try: can-train --model gat --dataset synthetic")
    check_given(flags)
    check_planning_flags(flags)
    # Composition imports Hydra, training imports torch: neither is paid for by a line that is wrong before them.
    from can_train.config.sweeps import expand

    awaited = split_names(flags["after"]) if flags["after"] else ()
    runs = settled_runs(expand(_requests(flags)), awaited)
    if flags["dry_run"]:
        print_dry_runs(runs, flags, awaited)
    elif flags["submit"]:
        _submit(runs, flags, awaited)
    else:
        _run_here(runs)


def _requests(flags: Flags) -> list["RunRequest"]:
    """Spells out the combinations of listed models, data sets and modes."""
    modes = split_names(flags["mode"]) if flags["mode"] else [None]
    return [
        make_request(flags, model=model, dataset=dataset, mode=mode, size=flags["size"])
        for model, dataset, mode in product(split_names(flags["model"]), split_names(flags["dataset"]), modes)
    ]


def _run_here(runs: Sequence["ResolvedRun"]) -> None:
    """Trains one run after another; one that fails does not keep the others from being trained.

    Raises:
        CanTrainError: The only run failed, or some of several.
    """
    from can_train.cli.attempt import start

    if len(runs) == 1:
        start(runs[0])
        return
    failed = []
    for number, run in enumerate(runs, start=1):
        print(f"run {number} of {len(runs)}: {run.key}", file=sys.stderr)
        try:
            start(run)
        except CanTrainError as error:
            print(f"error: {error}", file=sys.stderr)
            failed.append(number)
    if failed:
        raise RunError("Some runs failed", value=f"{', '.join(map(str, failed))} of {len(runs)}",
                       remedy="Their errors stand above")  # fmt: skip


def _submit(runs: Sequence["ResolvedRun"], flags: Flags, awaited: Sequence[str]) -> None:
    from can_train.cli.submit import submit_runs
    from can_train.launch.order import Wanted

    submit_runs(runs, Wanted(after=awaited, force=flags["force"]), as_json=flags["json"])
