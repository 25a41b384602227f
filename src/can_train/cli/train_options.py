"""The options of a training command, which `train` and `pipeline` accept, and the request that they make."""

import ast
import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from can_train.cli.output import print_note, with_default
from can_train.cli.run_locator import flag_values
from can_train.config import resolved, settings
from can_train.config.settings import ClusterSettings, TrainingSettings, split_list
from can_train.config.task_settings import TaskSettings, described_tasks, load_task_settings, locate
from can_train.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from can_train.config.compose import RunRequest
    from can_train.config.resolved import ResolvedRun

Flags = dict[str, Any]
"""The value of each parameter by name; None if the flag was not given."""

_MOST_REPEATED: Final = 3  # runs that a notice names
_ONLY_WITH_SUBMIT: Final = ("cluster", *resolved.CLUSTER_FLAGS, "after", "force")

Option = tuple[Any, Any, str]
"""Type, default and help of an option."""

OPTIONS: Final[dict[str, Option]] = {
    "model": (str | None, None, "{models}. Several: a,b."),
    "dataset": (str | None, None, "{datasets}or the path of your data."),
    "mode": (str | None, None, "How the model is trained. [the model's first mode]"),
    "size": (str | None, None, "Size of the model: {sizes}."),
    "device": (str, "auto", "auto, cpu, cuda, cuda:1; a simulated GPU: sim:2GiB."),
    "memory": (str | None, None, "Preset of memory settings: {memory}."),
    "task": (str | None, None, "Installed task, or your own: my_file.py:MyTask. [the one in configs/config.yaml]"),
    "config_dir": (str | None, None, "Folder of your own presets."),
    "submit": (bool, False, "Train in the background: as a SLURM job, or as --cluster says."),
    "cluster": (str | None, None, "Where --submit sends the run: slurm, local, debug or another preset. [slurm]"),
    "after": (str | None, None, "Start when this run has finished. Several: RUN,RUN."),
    "force": (bool, False, "Submit even if an identical run is queued, running or finished."),
    "yes": (bool, False, "With --partition auto: submit without a question."),
    "dry_run": (bool, False, "Print the plan, write nothing, and stop."),
    "show_config": (bool, False, "With --dry-run: print the resolved configuration too."),
    "target_gpu": (str | None, None, "With --dry-run: the GPU to plan for: h100-80gb. Several: a100-40gb,2xt4."),
    "target_memory": (str | None, None, "With --dry-run: plan for a GPU with this much memory in total: 16GiB."),
    "json": (bool, False, "Print the result as JSON, and nothing else on standard output."),
    "quiet": (bool, False, "Print only the result, and errors."),
    "verbose": (bool, False, "Print also every baseline, and what the plan rests on."),
    "model_args": (str, "", "Settings of model or training: hidden=32,lr=0.01."),
    "set": (list[str] | None, None, "Any setting, in Hydra's grammar: training.lr=0.01. Repeatable."),
    "baselines": (bool | None, None, "Compare the model with simple detectors. [yes]"),
    "runs_dir": (str | None, None, "Folder of run folders. [runs]"),
    "data_root": (str | None, None, "Folder of the published data sets. [$CAN_TRAIN_DATA, else data]"),
    "tracker": (str | None, None, "Show runs in tensorboard, mlflow or wandb. Several: mlflow,wandb. [off]"),
    "cache": (str | None, None, "Folder for prepared data. [$CAN_TRAIN_CACHE]"),
    "state_dir": (str | None, None, "Folder of observations. [$CAN_TRAIN_HOME, else the user's]"),
}  # fmt: skip
"""In place of the names in braces, those that the task has are listed."""

Groups = Sequence[tuple[str, str, str]]

GROUPS: Final[Groups] = (
    ("What is trained", "model dataset mode size set model_args",
     "trials search asha task config config_dir start_from baselines"),
    ("How it is trained", "epochs batch_size lr precision seed",
     """lr_batch_size lr_scale lr_factors optimizer optimizer_args betas weight_decay no_decay freeze thaw_epoch
     grad_clip_norm grad_clip_value grad_noise grad_noise_decay scheduler scheduler_interval warmup_share
     schedule_epochs schedule_patience schedule_factor schedule_decay_share schedule_rise_share
     schedule_start_divisor schedule_end_divisor patience best_by keep ema ema_start max_time val_interval order
     num_workers log_splits checkpoint_every deterministic"""),
    ("Device and memory", "device find_batch_size",
     """memory fit recompute micro_batch micro_batch_size min_micro_batch_size adaptive_micro_batch backoff_factor
     oom_retries regrow oversize accumulation accumulation_splits accumulation_threshold accumulation_target_mib
     accumulation_max_splits gradient_accumulation_steps preflight_threshold min_steps_per_epoch steps_per_epoch
     find_batch_size_steps_per_trial data_on_device tf32 channels_last compile cuda_empty_cache_interval
     cuda_empty_cache_threshold_mib use_adaptive_batch_size_factor graph_memory_safety_factor"""),
    ("Plan and output", "dry_run target_gpu quiet verbose",
     "target_memory show_config json tracker runs_dir data_root state_dir cache"),
    ("SLURM, with --submit", "submit partition gpus mem time",
     f"cluster {' '.join(resolved.CLUSTER_FLAGS)} after force yes"),
)  # fmt: skip
"""Title of each group of options in the help: the everyday options, and those that only --help-all shows."""

_LISTED: Final = 3  # data sets that help names
_NOT_SETTINGS: Final = {
    "set_",
    "trials",
    "search",
    "asha",
    "run",
    "config",
    "changes",
    "stages",
    "show",
    "preset",
}  # parameters that name no setting
# The value in the help. Values are passed on as text; composition checks their types and names the setting.
_METAVARS: Final = {
    "set": "GROUP.KEY=VALUE",
    "model_args": "K=V,K=V",
    "optimizer_args": "K=V,K=V",
    "after": "RUN",
    "config": "FILE",
    "older_than": "AGE",
    "trials": "N",
    "betas": "BETA,BETA",
    "lr_factors": "NAME=FACTOR",
}
_METAVARS_OF_TYPES: Final[dict[Any, str]] = {
    int: "INTEGER", float: "NUMBER", str: "TEXT", list[str]: "NAME,NAME",
}  # fmt: skip


def named_task(words: Sequence[str]) -> tuple[str, TaskSettings]:
    """Returns the name and the description of the task that a command line names, else of the default one."""
    name = flag_values(words).get("--task") or resolved.default_task()
    return name, load_task_settings(*locate(name))


def make_command(
    options: Mapping[str, Option],
    act: Callable[[Flags], None],
    *,
    words: Sequence[str] | None = None,
    run: Any = None,
    groups: Groups = GROUPS,
) -> Callable[..., None]:
    """Makes a command for Typer, with all training settings as options.

    Args:
        options: Its other options by name.
        act: Gets the values by parameter name. Its docstring is the command's help.
        words: The command line. Its task decides the help, and the options for finished runs that modes build on.
            None: the command has no such options.
        run: Annotation of the argument that names a run; None: the command takes none.
        groups: The groups of options in its help.
    """
    task_name, task = named_task(words or ())
    # The task of an existing run is not known yet, so a command on a run has the options of every task.
    tasks = [task] if run is None else [load_task_settings(name) for name in described_tasks()]
    roles = {} if words is None else {needed.role: needed.what for each in tasks for needed in each.prerequisites}
    places: dict[str, tuple[int, dict[str, Any]]] = {
        name: (number, {"rich_help_panel": title, "hidden": not is_everyday})
        for number, (title, everyday, rest) in [(0, (groups[0][0], "", " ".join(roles))), *enumerate(groups, 1)]
        for is_everyday, names in ((False, rest), (True, everyday))
        for name in names.split()
    }
    described = {**_described(options, task_name, task), **_options_of(TrainingSettings)}
    described |= _options_of(ClusterSettings, resolved.CLUSTER_FLAGS) if "submit" in options else {}
    # A command that makes no arrays of jobs has no runs that wait for others either.
    if "after" not in options:
        described.pop("max_parallel", None)
        described.pop("pack", None)
    described |= {role: (str | None, None, f"Run that is {what}, by name or folder. [the newest that fits]")
                  for role, what in roles.items()}  # fmt: skip
    if not any(field.name == "baselines" for each in tasks for mode in each.modes.values() for field in fields(mode)):
        described.pop("baselines", None)
    has_sizes = any(model.sizes for model in task.models.values())
    for name, has_choice in {"model": any(task.models), "mode": len(task.modes) > 1, "size": has_sizes}.items():
        if name in described and not has_choice:
            described[name] = (*described[name][:2], "This task has one.")
            places[name] = (places[name][0], {**places[name][1], "hidden": True})
    # Options that only one command has come first, in no group.
    order = sorted(described, key=lambda name: places.get(name, (0, {}))[0])
    metavars = {**{field.name: _METAVARS_OF_TYPES.get(field.type) for field in fields(TrainingSettings)},
                **dict.fromkeys(roles, "RUN"), **_METAVARS}  # fmt: skip
    parameters = [_parameter(name, described[name], metavars, places.get(name, (0, {}))[1]) for name in order]
    if run is not None:
        parameters.insert(0, inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=run))

    def command(**flags: Any) -> None:
        act(flags)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = act.__doc__
    return command


def with_request_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the flags of a job's request to a command, whose argument `request` gets those that were given."""
    options = _options_of(ClusterSettings, resolved.CLUSTER_FLAGS)
    place = {"rich_help_panel": "The job of a run on SLURM", "hidden": False}
    # No default is shown: a flag that is not given leaves the run's request as it is.
    flags = [_parameter(name, (kind, None, text.partition(" [")[0]), {}, place)
             for name, (kind, _, text) in options.items() if name not in ("max_parallel", "pack")]  # fmt: skip
    own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != "request"]

    def with_request(**given: Any) -> None:
        named = {flag.name: given.pop(flag.name) for flag in flags}
        command(**given, request={name: value for name, value in named.items() if value is not None})

    with_request.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    with_request.__doc__ = command.__doc__
    return with_request


def _parameter(
    name: str, option: Option, metavars: Mapping[str, str | None], place: Mapping[str, Any]
) -> inspect.Parameter:
    kind, default, text = option
    flag = f"--{name.replace('_', '-')}"
    spellings = {"quiet": (flag, "-q"), "verbose": (flag, "-v")}.get(name, (flag,))
    if kind == bool | None:
        spellings = (f"{flag}/--no-{flag[2:]}",)
    metavar = None if kind in (bool, bool | None) else metavars.get(name, flag[2:].upper())
    info = typer.Option(*spellings, help=text, metavar=metavar, show_default=bool(default), **place)
    # `set` is a builtin, which the functions that take the flags would hide.
    return inspect.Parameter("set_" if name == "set" else name, inspect.Parameter.KEYWORD_ONLY, default=default,
                             annotation=Annotated[kind, info])  # fmt: skip


def _options_of(kind: type, names: Sequence[str] = ()) -> dict[str, Option]:
    """Makes an option of each field of a class of settings, or of named fields; flags that are not given are None."""
    tree = ast.parse(Path(settings.__file__).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    # The docstrings below the fields, which Python does not store.
    texts = {
        field.target.id: " ".join(str(ast.literal_eval(text.value)).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }
    defaults = {name: ",".join(map(str, value)) or "none" if isinstance(value, list | dict) else value
                for name, value in vars(kind()).items()}  # fmt: skip
    return {
        field.name: (bool | None if field.type is bool else str | None, None,
                     _with_default(texts[field.name], defaults[field.name]))
        for field in fields(kind) if not names or field.name in names
    }  # fmt: skip


def _with_default(text: str, default: Any) -> str:
    # "Nodes; empty: all." says in words what an empty value, or 0, does.
    words = re.fullmatch(r"(.*); (?:empty|0): (.*)\.", text)
    if words is not None and default in ("", 0):
        return f"{words[1]}. [{words[2]}]"
    return text if default == "" else with_default(text, default)


def _described(options: Mapping[str, Option], name: str, task: TaskSettings) -> dict[str, Option]:
    """Writes models, data sets, sizes and memory presets of a task into the help of options."""
    datasets = resolved.presets("dataset", resolved.preset_folders(task.derived_from or name, task.configs))
    more = ", ..." if len(datasets) > _LISTED else ""
    names = {
        "models": _listed(task.models),
        "datasets": f"{', '.join(datasets[:_LISTED])}{more}, " if datasets else "Name of a preset, ",
        "sizes": _listed(dict.fromkeys(size for model in task.models.values() for size in model.sizes)),
        "memory": _listed(resolved.presets("memory")),
    }
    return {option: (kind, default, text.format(**names)) for option, (kind, default, text) in options.items()}


def _listed(names: Iterable[str]) -> str:
    *before, last = [name for name in names if name] or [""]
    return f"{', '.join(before)} or {last}" if before else last


def check_flags(flags: Flags) -> None:
    """Raises ConfigError if a flag does not go with the others, or is a list of nothing."""
    for name in ("model", "dataset", "mode", "tracker"):
        # A comma alone is a list of nothing: nothing would be trained, or shown anywhere.
        text = flags.get(name) or ""
        names = split_names(text)
        if text and not names:
            raise ConfigError(f"--{name} names nothing", value=repr(text), remedy="Name one, or several: a,b")
        if text and ",".join(names) != text:
            raise ConfigError(f"--{name} has a comma too many", value=repr(text),
                              remedy=f"Write it as --{name} {shlex.quote(','.join(names))}")  # fmt: skip
    for name in _ONLY_WITH_SUBMIT:
        if flags.get(name) and not flags.get("submit"):
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --submit", remedy="Add --submit")
    if flags.get("submit") and not flags.get("dry_run") and (flags.get("quiet") or flags.get("verbose")):
        name = "--quiet" if flags["quiet"] else "--verbose"
        raise ConfigError(f"{name} has no effect with --submit: a job prints into its log", remedy=f"Leave {name} out")


def check_targets(text: str | None) -> None:
    """Raises ConfigError if a value of --target-gpu names no GPU, or one that the catalogue does not have."""
    # msgspec, which `can-train --help` does not need, comes with the catalogue.
    from can_train.memory.catalogue import split_count, target_card

    names = split_list(text or "")
    if text is not None and not names:
        raise ConfigError("--target-gpu names no GPU", value=repr(text), remedy="Name one: --target-gpu h100-80gb")
    for _, name in map(split_count, names):
        # The size of a simulated GPU is read where it is opened.
        if not name.startswith("sim:"):
            target_card(name)


def make_request(
    flags: Flags, *, model: str | None, dataset: str | None, mode: str | None, size: str | None
) -> "RunRequest":
    """Makes the request for one run from the arguments and the other flags."""
    # Composition imports Hydra, which a command line that is wrong does not wait for.
    from can_train.config.compose import RunRequest

    groups = {field.name: "training" for field in fields(TrainingSettings)}
    groups |= dict.fromkeys(("tracker", *resolved.PATH_FLAGS), "paths")
    groups |= dict.fromkeys(resolved.CLUSTER_FLAGS, "cluster")
    # Any other flag is a role of a finished run, or a setting of the task's modes.
    groups |= dict.fromkeys(flags.keys() - groups.keys() - OPTIONS.keys() - _NOT_SETTINGS | {"baselines"}, "mode")
    file, cluster = resolved.user_file(), flags["cluster"] or "local"
    if flags["submit"] and not flags["cluster"]:
        cluster = file.values.get("cluster", "slurm")
        if cluster not in resolved.presets("cluster"):
            raise unknown_name(f"cluster in {file.path}", cluster, resolved.presets("cluster"))
    return RunRequest(
        model=model,
        dataset=dataset,
        mode=mode,
        task=flags["task"],
        config_dir=flags.get("config_dir") or "",
        size=size,
        cluster=cluster,
        memory=flags["memory"],
        device=flags["device"],
        sets=tuple(flags["set_"] or ()),
        model_args=flags.get("model_args", ""),
        values={f"{group}.{name}": flags[name] for name, group in groups.items() if flags.get(name) is not None},
        user_file=file,
    )


def split_names(text: str) -> Sequence[str]:
    """Splits a comma-separated flag; the path of an existing file is one value, commas and all."""
    from can_train.io.records import expanded  # brings msgspec, which `can-train --help` does not need

    return split_list(text, existing=[text] if expanded(text).exists() else [])


def resolve_runs(flags: Flags, after: Sequence[str]) -> list["ResolvedRun"]:
    """Resolves one run for each combination of listed and swept values, and the finished runs that they build on."""
    # Composition imports Hydra: a command line that is wrong before it does not wait for that.
    from can_train.config.compose import expand, resolve
    from can_train.config.resolved import state_dir, with_absolute_paths
    from can_train.runs.past_runs import PastRuns, resolve_prerequisites
    from can_train.slurm import client as slurm

    models, datasets, modes = ([*split_names(flags[name])] if flags[name] else [None]
                               for name in ("model", "dataset", "mode"))  # fmt: skip
    requests = expand([make_request(flags, model=model, dataset=dataset, mode=mode, size=flags["size"])
                       for model, dataset, mode in product(models, datasets, modes)])  # fmt: skip
    runs, requests = without_repeats([with_absolute_paths(resolve(request)) for request in requests], requests, flags)
    if len(folders := {run.paths.code_dir for run in runs} - {""}) > 1:
        raise ConfigError("The runs of a sweep have their code from one folder", value=", ".join(sorted(folders)),
                          remedy="Start a command for each")  # fmt: skip
    if not any(run.prerequisites or run.training.start_from for run in runs):
        return runs
    past = PastRuns(state_dir(runs[0].paths), runs[0].runs_dir, slurm, after)
    complete = [resolve_prerequisites(run, request, past) for run, request in zip(runs, requests, strict=True)]
    # A sweep's runs mostly build on the same one, which is said once.
    for notice in () if flags.get("quiet") else dict.fromkeys(notice for _, notices in complete for notice in notices):
        print_note(notice)
    return [run for run, _ in complete]


def without_repeats(
    runs: Sequence["ResolvedRun"], requests: Sequence["RunRequest"], flags: Flags
) -> tuple[list["ResolvedRun"], list["RunRequest"]]:
    """Leaves out runs of a line that have the settings of an earlier one, with a notice that names their values.

    Args:
        runs: The runs of the line.
        requests: The request of each run.
        flags: The flags of the line.
    """
    # Settings and not their texts: 0.1 and 1e-1 are one rate. The runs of a line have their settings in one order.
    first: dict[str, tuple[ResolvedRun, RunRequest]] = {}
    repeated = []
    for run, request in zip(runs, requests, strict=True):
        if first.setdefault(repr(run.config), (run, request))[1] is not request:
            repeated.append(_listed_values(request, flags))
    if repeated and not flags.get("quiet"):
        names = [*dict.fromkeys(repeated)]
        more = f"; and {len(names) - _MOST_REPEATED} more" if len(names) > _MOST_REPEATED else ""
        print_note(f"Given more than once, trained once: {'; '.join(names[:_MOST_REPEATED])}{more}")
    return [run for run, _ in first.values()], [request for _, request in first.values()]


def _listed_values(request: "RunRequest", flags: Flags) -> str:
    """Writes the values of a run among those that a line lists."""
    presets = {name: getattr(request, name) for name in ("model", "dataset", "mode")}
    chosen = [f"--{name} {preset}" for name, preset in presets.items() if preset and preset != flags.get(name)]
    return " ".join([*chosen, *(text for text in request.sets if text not in (flags["set_"] or ()))])
