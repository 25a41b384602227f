"""`can_train.plan`: the plan of a training line or of a task, for devices that need not be at hand, from Python."""

import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from can_train.config.settings import TrainingSettings
from can_train.errors import ArgumentError, ConfigError, check_kinds

if TYPE_CHECKING:
    import torch

    from can_train.config.resolved import ResolvedRun
    from can_train.task import BatchTask
    from can_train.training.dry_run import Plans
    from can_train.training.sample_task import Task

_COMMANDS: Final = ("can-train", "./can-train")  # that a line may begin with
_HELP: Final = ("-h", "--help", "--help-all")
# Flags that start, or send, something else than the training that is planned.
_OTHERS: Final = ("submit", "trials", "show_config")


def plan(
    task_or_line: "BatchTask | type[Task] | str | Sequence[str]",
    targets: "Sequence[str | torch.device]" = (),
    *,
    training: "TrainingSettings | None" = None,
) -> "Plans":
    """Plans a training for devices that need not be at hand: batch, micro-batches and predicted peak.

    The figures are those of `can-train --dry-run --json`. Nothing is trained, and no file is written.

    Args:
        task_or_line: A training line as it is typed, `"--task my_file.py:Digits --batch-size 64"`, or its words; or a
            task: a class, whose data are sampled, or an instance.
        targets: Names of GPUs (`"h100-80gb"`, `"a100_3g.40gb"`), memory of others (`"16GiB"`), simulated GPUs
            (`"sim:2GiB"`), devices here (`"cuda:0"`, or a `torch.device`). Without any: the devices that the line
            names, else the device here.
        training: For a task: settings of its training; None: the defaults of its class.

    Returns:
        The plans, one for each device in `cards`; `fits` tells whether the training fits any of them.

    Raises:
        ArgumentError: An argument has the wrong type, or the line is for several runs or no training.
        CanTrainError: The line, the task or a name is at fault, as on the command line.
    """
    if isinstance(targets, str):
        raise ArgumentError("Targets are a list of names", value=repr(targets), remedy=f"Give [{targets!r}]")
    check_kinds("a list of names", Iterable, 'Give targets=["t4", "16GiB"]', targets=targets)
    from can_train.memory.meters import device_name

    names = [device_name(target, '"t4", "16GiB" or "cuda:0"') for target in targets]
    if isinstance(task_or_line, str):
        return _plan_line(_words_of(task_or_line), names, training)
    if isinstance(task_or_line, Sequence):
        return _plan_line([str(word) for word in task_or_line], names, training)
    from can_train.reporter import SilentReporter
    from can_train.task import BatchTask
    from can_train.training.dry_run import plans_of_task

    cls = task_or_line if isinstance(task_or_line, type) else type(task_or_line)
    if not issubclass(cls, BatchTask):
        remedy = 'Write class MyTask(can_train.Task), or a line, "--task my_file.py:MyTask"'
        raise ArgumentError("plan takes a training line, or a task", value=repr(task_or_line), remedy=remedy)
    if training is not None:
        check_kinds("a TrainingSettings", TrainingSettings, "Give training=TrainingSettings(batch_size=64)",
                    training=training)  # fmt: skip
    return plans_of_task(task_or_line, names, training, SilentReporter())


def _words_of(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ArgumentError("A training line is split into words as a shell does it", value=f"{line!r:.80}: {error}",
                            remedy="Close the quotes, or give the line's words in a list") from error  # fmt: skip


def _plan_line(words: Sequence[str], targets: Sequence[str], training: Any) -> "Plans":
    if training is not None:
        raise ArgumentError("The settings of a line are in the line", value="training", remedy="Add --set training.…")
    run, named = resolve_line(words)
    from can_train.reporter import SilentReporter
    from can_train.training.dry_run import dry_plans, find_targets
    from can_train.training.loading import nothing_left_behind

    reporter = SilentReporter()
    with nothing_left_behind():
        return dry_plans(run, find_targets(run, [*targets] or named, reporter), reporter)


def resolve_line(words: Sequence[str]) -> "tuple[ResolvedRun, list[str]]":
    """Resolves the run of a training line; returns also the names of the devices that the line plans for.

    Raises:
        ConfigError: The line is wrong, or it is not for one training.
    """
    from can_train.cli.main import make_parser
    from can_train.cli.train import make_train_command, target_names

    line = list(words[1:] if {*words[:1]} & {*_COMMANDS} else words)
    if not line or not line[0].startswith("-") or {*_HELP} & {*line}:
        raise ArgumentError("This is no training line, which begins with an option", value=shlex.join(words),
                            remedy='Write it as it is typed: "--task my_file.py:MyTask --batch-size 64"')  # fmt: skip
    resolved: list[tuple[list[ResolvedRun], dict[str, Any]]] = []

    def resolve(resolve_runs: Any, flags: dict[str, Any]) -> None:
        for name in _OTHERS:
            if flags[name]:
                raise ConfigError("A plan is for a training line alone", value=f"--{name.replace('_', '-')}",
                                  remedy="Leave it out")  # fmt: skip
        resolved.append((resolve_runs(flags, ()), flags))

    quiet = [*(word for word in line if word not in ("-v", "--verbose")), *([] if "-q" in line else ["--quiet"])]
    make_parser(make_train_command(quiet, resolve))(quiet, prog_name="can-train", standalone_mode=False)
    ((runs, flags),) = resolved
    if len(runs) != 1:
        raise ArgumentError("A plan is for a line of one run", value=f"{len(runs)} runs",
                            remedy="Plan each of them by itself")  # fmt: skip
    return runs[0], target_names(flags)
