"""The options of a training command, which `train` and `pipeline` accept, and the request that they make."""

import ast
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from can_train.config import settings
from can_train.config.overrides import split_list
from can_train.config.settings import TrainingSettings
from can_train.config.task_settings import load_task_settings, task_names
from can_train.errors import ConfigError

if TYPE_CHECKING:
    from can_train.config.compose import RunRequest

Flags = dict[str, Any]
"""The value of each parameter by name; None if the flag was not given."""

# Flags that set the setting of the same name in `paths` and `cluster`.
_PATHS: Final = ("runs_dir", "data_root", "state_dir")
_CLUSTER: Final = (
    "partition", "account", "qos", "time", "nodes", "gpus", "cpus", "mem", "constraint", "gres", "max_parallel",
)  # fmt: skip

_ONLY_WITH_SUBMIT: Final = ("cluster", *_CLUSTER, "after", "force")

OPTIONS: Final[dict[str, tuple[Any, Any, str]]] = {
    "model": (str | None, None, "Model to train: gat, vgae or fusion. Several: gat,vgae."),
    "dataset": (str | None, None, "synthetic, a published data set (hcrl_ch, set_01, ...), a log or a folder of logs."),
    "mode": (str | None, None, "How the model is trained. [the model's first mode]"),
    "size": (str | None, None, "Size of the model: teacher or student. [teacher]"),
    "device": (str, "auto", "auto, cpu, cuda, cuda:1, or a simulated GPU: sim:2GiB."),
    "memory": (str | None, None, "Preset of memory settings: tight, muon or tracknet."),
    "task": (str | None, None, "Task that the model belongs to. [the one in configs/config.yaml]"),
    "submit": (bool, False, "Train in the background: as a SLURM job, or as --cluster says."),
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
    "max_parallel": (str | None, None, "With --submit: jobs of a sweep that run at the same time. [all]"),
    "after": (str | None, None, "With --submit: start when this run has finished. Several: RUN,RUN."),
    "force": (bool, False, "With --submit: submit even if an identical run is queued, running or finished."),
    "dry_run": (bool, False, "Print configuration and plan, write nothing, and stop."),
    "target_gpu": (str | None, None, "With --dry-run: the GPU to plan for: h100-80gb. Several: a100-40gb,t4."),
    "target_memory": (str | None, None, "With --dry-run: plan for a GPU with this much memory in total: 16GiB."),
    "json": (bool, False, "With --dry-run or --submit: print JSON."),
    "model_args": (str, "", "Settings of the model or the training: hidden=32,lr=0.01."),
    "set": (list[str] | None, None, "Any setting, in Hydra's grammar: dataset.window=50. Repeatable."),
    "baselines": (bool | None, None, "Compare the model with simple detectors. [yes]"),
    "runs_dir": (str | None, None, "Folder of run folders. [runs]"),
    "data_root": (str | None, None, "Folder of the published data sets. [$CAN_TRAIN_DATA, else data]"),
    "state_dir": (str | None, None, "Folder of observations and caches. [$CAN_TRAIN_HOME, else the user's]"),
}  # fmt: skip
"""Type, default and help of each option."""

# What help shows as the value; it is passed on as text, and composition names value and setting if it does not fit.
_METAVARS: Final = {"set": "GROUP.KEY=VALUE", "model_args": "K=V,K=V", "after": "RUN"}
_TYPE_METAVARS: Final = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT"}


def option_parameters(options: Mapping[str, tuple[Any, Any, str]]) -> list[inspect.Parameter]:
    """Makes Typer's parameters of options (type, default and help by name)."""
    parameters = []
    for name, (kind, default, text) in options.items():
        flag = f"--{name.replace('_', '-')}"
        flag = f"{flag}/--no-{name}" if kind == bool | None else flag
        metavar = None if kind in (bool, bool | None) else _METAVARS.get(name, name.upper().replace("_", "-"))
        option = typer.Option(flag, help=text, metavar=metavar, show_default=bool(default))
        # `set` is a builtin, which the dataclasses and functions that take the flags would hide.
        parameters.append(_parameter("set_" if name == "set" else name, Annotated[kind, option], default))
    return parameters


def training_parameters() -> list[inspect.Parameter]:
    """Makes a Typer parameter of every field of `TrainingSettings`; flags that are not given are None."""
    texts = _field_docs(Path(settings.__file__), "TrainingSettings")
    parameters = []
    for field in fields(TrainingSettings):
        kind = field.type if isinstance(field.type, str) else field.type.__name__
        text = f"{texts[field.name]} [{field.default}]"
        option = typer.Option(help=text, metavar=_TYPE_METAVARS.get(kind), show_default=False)
        parameters.append(_parameter(field.name, Annotated[bool | None if kind == "bool" else str | None, option]))
    return parameters


def prerequisite_parameters() -> list[inspect.Parameter]:
    """Makes the parameters that name the finished runs that modes build on."""
    parameters = []
    for role, what in _roles().items():
        text = f"Run that is {what}, by name or folder. [the newest that fits]"
        parameters.append(_parameter(role, Annotated[str | None, typer.Option(help=text, metavar="RUN")]))
    return parameters


def check_flags(flags: Flags) -> None:
    """Raises ConfigError if a flag has an empty value, or needs --submit, which is not given."""
    for name, value in flags.items():
        # An unset variable of a script gives an empty value; `--model-args` may well have one.
        if value == "" and name != "model_args":
            raise ConfigError(f"--{name.replace('_', '-')} is empty", remedy="Give a value, or leave the flag out")
    for name in _ONLY_WITH_SUBMIT:
        if flags.get(name) and not flags["submit"]:
            raise ConfigError(f"--{name.replace('_', '-')} is for a run that is submitted", remedy="Add --submit")


def make_request(flags: Flags, *, model: str, dataset: str, mode: str | None, size: str | None) -> "RunRequest":
    """Makes the request for one run; the flags decide what the arguments do not."""
    # Composition imports Hydra, which a command line that is wrong does not wait for.
    from can_train.config.compose import RunRequest

    keys = {parameter.name: "training" for parameter in training_parameters()} | dict.fromkeys(_PATHS, "paths")
    keys |= dict.fromkeys(_CLUSTER, "cluster") | dict.fromkeys(("baselines", *_roles()), "mode")
    return RunRequest(
        model=model,
        dataset=dataset,
        mode=mode,
        task=flags["task"],
        size=size,
        cluster=flags["cluster"] or ("slurm" if flags["submit"] else "local"),
        memory=flags["memory"],
        device=flags["device"],
        sets=tuple(flags["set_"] or ()),
        model_args=flags.get("model_args", ""),
        values={f"{group}.{name}": flags[name] for name, group in keys.items() if flags.get(name) is not None},
    )


def options_without(names: Iterable[str]) -> dict[str, tuple[Any, Any, str]]:
    """Returns the options without some of them."""
    return {name: option for name, option in OPTIONS.items() if name not in {*names}}


def split_names(text: str) -> Sequence[str]:
    """Splits a comma-separated flag; the path of an existing file is one value, commas and all."""
    return split_list(text, existing=[text] if Path(text).expanduser().exists() else [])


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _roles() -> dict[str, str]:
    """Lists the roles of finished runs in all tasks, each with its description."""
    return {one.role: one.what for task in task_names() for one in load_task_settings(task).prerequisites}


def _field_docs(module: Path, class_name: str) -> dict[str, str]:
    """Reads the docstrings below a class's fields, which Python does not store."""
    tree = ast.parse(module.read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    texts = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts
