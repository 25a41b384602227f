"""`can-train --model … --dataset …`: trains here, submits, or says what would be done."""

import inspect
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from can_train.cli.dry_run import check_planning_flags, print_dry_runs
from can_train.cli.flags import training_parameters
from can_train.config.assignments import split_list
from can_train.errors import ConfigError

if TYPE_CHECKING:
    from can_train.config.compose import RunRequest
    from can_train.config.resolved import ResolvedRun

_PATHS: Final = ("runs_dir", "data_root", "state_dir")

_JOB: Final = (
    "partition", "account", "qos", "time", "nodes", "gpus", "cpus", "mem", "constraint", "gres", "max_parallel",
)  # fmt: skip
"""Flags that set a setting of the cluster's of the same name."""

_SUBMITTING: Final = ("cluster", *_JOB, "after", "force")
"""Flags that mean nothing where nothing is submitted."""

_OPTIONS: Final[dict[str, tuple[Any, Any, str]]] = {
    "model": (str | None, None, "Model: gat or vgae. Several: gat,vgae."),
    "dataset": (str | None, None, "synthetic, a published data set (hcrl_ch, set_01, ...), a log or a folder of logs."),
    "mode": (str | None, None, "Training mode. [the model's first]"),
    "size": (str | None, None, "teacher or student. [teacher]"),
    "device": (str, "auto", "auto, cpu, cuda, cuda:1, or a simulated GPU: sim:2GiB."),
    "memory": (str | None, None, "Preset of what is done about memory: tight, muon or tracknet."),
    "task": (str | None, None, "Task, where several are installed."),
    "submit": (bool, False, "Train in the background: a job of SLURM, or as --cluster says."),
    "cluster": (str | None, None, "Where --submit sends the run: slurm, local, debug or another preset. [slurm]"),
    "partition": (str | None, None, "With --submit: partition. [the cluster's default]"),
    "account": (str | None, None, "With --submit: account that is charged."),
    "qos": (str | None, None, "With --submit: quality of service."),
    "time": (str | None, None, "With --submit: time limit, as 90 (minutes), 1:30:00, 2-12 or 12h. [a day]"),
    "nodes": (str | None, None, "With --submit: nodes. [1]"),
    "gpus": (str | None, None, "With --submit: GPUs of each node, one rank each: 2, or a100:2. [auto]"),
    "cpus": (str | None, None, "With --submit: processors of each rank. [a share of the node]"),
    "mem": (str | None, None, "With --submit: memory of each node, as 16G. [a share of the node]"),
    "constraint": (str | None, None, "With --submit: features that nodes must have."),
    "gres": (str | None, None, "With --submit: generic resources of each node, as SLURM writes them."),
    "max_parallel": (str | None, None, "With --submit: jobs of a sweep that run at once. [all]"),
    "after": (str | None, None, "With --submit: wait until this run has finished."),
    "force": (bool, False, "With --submit: submit also what is queued, running or finished already."),
    "dry_run": (bool, False, "Print configuration and plan, write nothing, and stop."),
    "target_gpu": (str | None, None, "With --dry-run: the GPU to plan for: h100-80gb. Several: a100-40gb,t4."),
    "target_memory": (str | None, None, "With --dry-run: plan for another GPU of this whole memory: 16GiB."),
    "json": (bool, False, "With --dry-run or --submit: print JSON."),
    "model_args": (str, "", "Settings of the model or the training: hidden=32,lr=0.01."),
    "set": (list[str] | None, None, "Any setting, in Hydra's grammar: dataset.window=50. Repeatable."),
    "floors": (bool | None, None, "Judge the model beside simple detectors. [yes]"),
    "runs_dir": (str | None, None, "Folder of run folders. [runs]"),
    "data_root": (str | None, None, "Folder of the published data sets. [$CAN_TRAIN_DATA, else data]"),
    "state_dir": (str | None, None, "Folder of observations and caches. [$CAN_TRAIN_HOME, else the user's]"),
}  # fmt: skip


def make_train_command() -> Callable[..., None]:
    """Makes the command; its signature is made of the options above and the training settings."""

    def train(**flags: Any) -> None:
        _train(flags)

    parameters = [
        inspect.Parameter(
            "set_" if name == "set" else name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[
                kind, typer.Option(*_declaration(name), help=text, metavar=_metavar(name), show_default=bool(default))
            ],
        )
        for name, (kind, default, text) in _OPTIONS.items()
    ]
    train.__signature__ = inspect.Signature([*parameters, *training_parameters()])  # type: ignore[attr-defined]
    return train


def _declaration(name: str) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [f"{flag}/--no-{name}"] if name == "floors" else [flag]


def _metavar(name: str) -> str | None:
    """What help shows for a flag's value; None leaves it to Typer, which knows switches."""
    kind = _OPTIONS[name][0]
    if kind in (bool, bool | None):
        return None
    return {"set": "GROUP.KEY=VALUE", "model_args": "K=V,K=V"}.get(name, name.upper().replace("_", "-"))


def _train(flags: dict[str, Any]) -> None:
    for name in ("model", "dataset"):
        if not flags[name]:
            raise ConfigError(f"--{name} is missing", remedy="Try: can-train --model gat --dataset synthetic")
    for name, value in flags.items():
        # An unset variable of a script; `--model-args` may well be empty.
        if value == "" and name != "model_args":
            raise ConfigError(f"--{name.replace('_', '-')} is empty", remedy="Give a value, or leave the flag out")
    _check_submitting_flags(flags)
    check_planning_flags(flags)
    # Composition imports Hydra, training imports torch: neither is paid for by a line that is wrong before them.
    from can_train.config.compose import resolve
    from can_train.training.folders import settled_paths

    runs = [settled_paths(resolve(request)) for request in _requests(flags)]
    if flags["dry_run"]:
        print_dry_runs(runs, flags)
        return
    if flags["submit"]:
        _submit(runs, flags)
        return
    for run in runs:
        _run_here(run)


def _check_submitting_flags(flags: dict[str, Any]) -> None:
    for name in _SUBMITTING:
        if flags[name] and not flags["submit"]:
            raise ConfigError(f"--{name.replace('_', '-')} is for a run that is submitted", remedy="Add --submit")


def _requests(flags: dict[str, Any]) -> list["RunRequest"]:
    """Spells out the combinations of listed models, data sets and modes."""
    from can_train.config.compose import RunRequest

    modes = _split(flags["mode"]) if flags["mode"] else [None]
    values = {f"training.{p.name}": flags[p.name] for p in training_parameters()}
    values |= {f"paths.{name}": flags[name] for name in _PATHS} | {"mode.floors": flags["floors"]}
    values |= {f"cluster.{name}": flags[name] for name in _JOB}
    return [
        RunRequest(
            model=model,
            dataset=dataset,
            mode=mode,
            task=flags["task"],
            size=flags["size"],
            cluster=flags["cluster"] or ("slurm" if flags["submit"] else "local"),
            memory=flags["memory"],
            device=flags["device"],
            sets=tuple(flags["set_"] or ()),
            model_args=flags["model_args"],
            values={key: value for key, value in values.items() if value is not None},
        )
        for model, dataset, mode in product(_split(flags["model"]), _split(flags["dataset"]), modes)
    ]


def _split(text: str) -> Sequence[str]:
    """Splits a listed flag; a path that exists is one value, commas and all."""
    return split_list(text, existing=[text] if Path(text).expanduser().exists() else [])


def _run_here(run: "ResolvedRun") -> None:
    from can_train.cli.attempt import start

    start(run)


def _submit(runs: Sequence["ResolvedRun"], flags: dict[str, Any]) -> None:
    from can_train.cli.submit import submit_runs
    from can_train.launch.order import Wanted

    submit_runs(runs, Wanted(after=flags["after"] or "", force=flags["force"]), as_json=flags["json"])
