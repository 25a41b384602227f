"""Commands of many options: the options are the fields of a dataclass, and the command is made of it."""

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_type_hints

import typer

from can_train.config import settings
from can_train.config.overrides import ALIASES, canonical_name, split_list
from can_train.config.settings import TrainingSettings
from can_train.config.task_settings import load_task_settings, task_names
from can_train.errors import ConfigError

if TYPE_CHECKING:
    from can_train.config.compose import RunRequest
    from can_train.config.resolved import ResolvedRun

_Request = TypeVar("_Request")


def command_of(request: type[_Request], act: Callable[[_Request], None]) -> Callable[..., None]:
    """Makes a command for Typer.

    Args:
        request: A dataclass whose fields are annotated as parameters of a command would be.
        act: Does what is asked for; its docstring is the command's help.
    """

    def command(**given: Any) -> None:
        act(request(**given))

    hints = get_type_hints(request, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(request)  # type: ignore[arg-type]
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = act.__doc__
    return command


_METAVARS: Final = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT"}
"""What help shows for a value. It is passed on as text: composition converts it, and names value and setting if it
cannot."""


_ON: Final = frozenset(("true", "yes", "on", "1"))


_OFF: Final = frozenset(("false", "no", "off", "0"))


def training_parameters() -> list[inspect.Parameter]:
    """Makes a Typer parameter of every scalar field of `TrainingSettings`; absent flags are None."""
    texts = field_texts(Path(settings.__file__), "TrainingSettings")
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_flag(_type_name(field.type), f"{texts[field.name]} [{field.default}]"),
        )
        for field in fields(TrainingSettings)
    ]


def _flag(type_name: str, help_text: str) -> Any:
    if type_name == "bool":
        return Annotated[bool | None, typer.Option(help=help_text, show_default=False)]
    return Annotated[str | None, typer.Option(help=help_text, metavar=_METAVARS[type_name], show_default=False)]


def role_texts() -> dict[str, str]:
    """Lists the roles that finished runs have for the tasks' modes, each with its flag's help."""
    needed = [one for task in task_names() for one in load_task_settings(task).prerequisites]
    return {one.role: f"Run that is {one.what}, by name or folder. [the newest that fits]" for one in needed}


def field_texts(module: Path, class_name: str) -> dict[str, str]:
    """Reads the docstrings under a class's fields, which Python itself does not keep."""
    tree = ast.parse(module.read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    texts = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


def canonical_arguments(arguments: Sequence[str]) -> list[str]:
    """Rewrites flags to their canonical spelling: `_` becomes `-`, an alias becomes its setting.

    Raises:
        ConfigError: Two spellings of one setting are given with different values, or a switch with neither yes nor no.
    """
    rewritten: list[str] = []
    seen: dict[str, tuple[str, str]] = {}
    for position, argument in enumerate(arguments):
        if argument == "--":
            return rewritten + list(arguments[position:])
        if not argument.startswith("--"):
            rewritten.append(argument)
            continue
        spelling, equals, value = argument.partition("=")
        flag = _canonical_flag(spelling)
        rewritten.append(_switched(flag, value) if equals and _is_switch(flag) else f"{flag}{equals}{value}")
        given = value if equals else next(iter(arguments[position + 1 : position + 2]), "")
        earlier, earlier_value = seen.setdefault(flag, (spelling, given))
        if earlier != spelling and earlier_value != given:
            given_twice = f"{earlier} {earlier_value} and {spelling} {given}"
            raise ConfigError(f"{flag} has two different values", value=given_twice, remedy="Give it once")
    return rewritten


def _is_switch(flag: str) -> bool:
    name = flag.removeprefix("--").replace("-", "_")
    return any(field.name == name and _type_name(field.type) == "bool" for field in fields(TrainingSettings))


def _switched(flag: str, value: str) -> str:
    """Takes the values that a preset has for a switch: the option's table writes it as true or false."""
    if value.lower() in _ON:
        return flag
    if value.lower() in _OFF:
        return flag.replace("--", "--no-", 1)
    raise ConfigError(f"{flag} is on or off", value=value, remedy=f"Give {flag}, or {flag.replace('--', '--no-', 1)}")


def _canonical_flag(spelling: str) -> str:
    name = spelling.removeprefix("--")
    known = canonical_name(name) if name.replace("-", "_") in ALIASES else name
    return "--" + known.replace("_", "-")


def _type_name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else annotation.__name__


Flags = dict[str, Any]
"""What Typer makes of a line: each parameter's value by name, None where it was not given."""


PATHS: Final = ("runs_dir", "data_root", "state_dir")


JOB: Final = (
    "partition", "account", "qos", "time", "nodes", "gpus", "cpus", "mem", "constraint", "gres", "max_parallel",
)  # fmt: skip
"""Flags that set a setting of the cluster's of the same name."""


SUBMITTING: Final = ("cluster", *JOB, "after", "force")
"""Flags that mean nothing where nothing is submitted."""


OPTIONS: Final[dict[str, tuple[Any, Any, str]]] = {
    "model": (str | None, None, "Model: gat, vgae or fusion. Several: gat,vgae."),
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
    "after": (str | None, None, "With --submit: wait until this run has finished. Several: RUN,RUN."),
    "force": (bool, False, "With --submit: submit also what is queued, running or finished already."),
    "dry_run": (bool, False, "Print configuration and plan, write nothing, and stop."),
    "target_gpu": (str | None, None, "With --dry-run: the GPU to plan for: h100-80gb. Several: a100-40gb,t4."),
    "target_memory": (str | None, None, "With --dry-run: plan for another GPU of this whole memory: 16GiB."),
    "json": (bool, False, "With --dry-run or --submit: print JSON."),
    "model_args": (str, "", "Settings of the model or the training: hidden=32,lr=0.01."),
    "set": (list[str] | None, None, "Any setting, in Hydra's grammar: dataset.window=50. Repeatable."),
    "baselines": (bool | None, None, "Judge the model beside simple detectors. [yes]"),
    "runs_dir": (str | None, None, "Folder of run folders. [runs]"),
    "data_root": (str | None, None, "Folder of the published data sets. [$CAN_TRAIN_DATA, else data]"),
    "state_dir": (str | None, None, "Folder of observations and caches. [$CAN_TRAIN_HOME, else the user's]"),
}  # fmt: skip


_LINE_METAVARS: Final = {"set": "GROUP.KEY=VALUE", "model_args": "K=V,K=V", "after": "RUN"}
"""What help shows for values that are not called as their flag is."""


def options_but(names: Iterable[str]) -> dict[str, tuple[Any, Any, str]]:
    """Returns the options without some of them."""
    left_out = {*names}
    return {name: option for name, option in OPTIONS.items() if name not in left_out}


def parameters(options: Mapping[str, tuple[Any, Any, str]]) -> list[inspect.Parameter]:
    """Makes Typer's parameters of options: type, default and help by name."""
    return [
        inspect.Parameter(
            "set_" if name == "set" else name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[
                kind,
                typer.Option(*_declaration(name), help=text, metavar=_metavar(name, kind), show_default=bool(default)),
            ],
        )
        for name, (kind, default, text) in options.items()
    ]


def role_parameters() -> list[inspect.Parameter]:
    """Makes the parameters that name the finished runs that modes build on."""
    return [
        inspect.Parameter(
            role,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(help=text, metavar="RUN", show_default=False)],
        )
        for role, text in role_texts().items()
    ]


def check_given(flags: Flags) -> None:
    """Checks that flags that were given have values, and that those of a submission come with one.

    Raises:
        ConfigError: They do not.
    """
    for name, value in flags.items():
        # An unset variable of a script; `--model-args` may well be empty.
        if value == "" and name != "model_args":
            raise ConfigError(f"--{name.replace('_', '-')} is empty", remedy="Give a value, or leave the flag out")
    for name in SUBMITTING:
        if flags.get(name) and not flags["submit"]:
            raise ConfigError(f"--{name.replace('_', '-')} is for a run that is submitted", remedy="Add --submit")


def make_request(flags: Flags, *, model: str, dataset: str, mode: str | None, size: str | None) -> "RunRequest":
    """Makes what one run is asked to be: the options say all that is not given here."""
    from can_train.config.compose import RunRequest

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
        values=_values(flags),
    )


def split_names(text: str) -> Sequence[str]:
    """Splits a listed flag; a path that exists is one value, commas and all."""
    return split_list(text, existing=[text] if Path(text).expanduser().exists() else [])


def settled_runs(requests: Sequence["RunRequest"], awaited: Sequence[str] = ()) -> list["ResolvedRun"]:
    """Resolves runs, and finds and checks the finished ones that they build on; says which these are.

    Args:
        requests: Of one state folder.
        awaited: Runs that they will not start before, by any of their names.

    Raises:
        CanTrainError: One is not as it should be.
    """
    # Composition imports Hydra: a line that is wrong before it does not pay for it.
    from can_train.config.compose import resolve
    from can_train.config.resolved import state_dir, with_absolute_paths
    from can_train.slurm.prerequisites import PastRuns, settled_prerequisites

    runs = [with_absolute_paths(resolve(request)) for request in requests]
    if not any(run.prerequisites for run in runs):
        return runs
    past = PastRuns(state_dir(runs[0].paths), runs[0].runs_dir, awaited)
    found = [settled_prerequisites(run, request, past) for run, request in zip(runs, requests, strict=True)]
    for notice in dict.fromkeys(notice for _, notices in found for notice in notices):
        print(f"note: {notice}", file=sys.stderr)
    return [run for run, _ in found]


def _values(flags: Flags) -> dict[str, Any]:
    """Returns the settings that flags give, by their dotted names."""
    values = {f"training.{p.name}": flags[p.name] for p in training_parameters()}
    values |= {f"paths.{name}": flags[name] for name in PATHS} | {"mode.baselines": flags["baselines"]}
    values |= {f"cluster.{name}": flags[name] for name in JOB if name in flags}
    values |= {f"mode.{role}": flags[role] for role in role_texts() if role in flags}
    return {key: value for key, value in values.items() if value is not None}


def _declaration(name: str) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [f"{flag}/--no-{name}"] if name == "baselines" else [flag]


def _metavar(name: str, kind: Any) -> str | None:
    """What help shows for a flag's value; None leaves it to Typer, which knows switches."""
    if kind in (bool, bool | None):
        return None
    return _LINE_METAVARS.get(name, name.upper().replace("_", "-"))
