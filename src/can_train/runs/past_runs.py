"""The earlier runs that a new run depends on: prerequisites (a teacher, an autoencoder), with the check that they fit,
and duplicates, which have the same identity.

The module reads only the files of runs and imports no torch, so a login node can check a run before it is submitted.
Weights are verified when they are loaded.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from can_train.config.resolved import ResolvedRun, data_root, flat, state_dir
from can_train.config.task_settings import Prerequisite
from can_train.errors import CheckpointError, ConfigError, RunError
from can_train.io.records import is_file
from can_train.runs.registry import Registry
from can_train.runs.run_folder import RunFolder
from can_train.runs.run_state import FINISHED
from can_train.runs.scheduler import Scheduler
from can_train.runs.status import KnownRun, RunStatus, find_run, known_runs, run_statuses

if TYPE_CHECKING:
    from can_train.config.compose import RunRequest

_LOCATIONS: Final = ("paths", "cluster")
"""Groups of settings that have no effect on the result of a run."""
_IDENTITY_DIGITS: Final = 32


class PastRuns:
    """The runs that a new run may build on. Each configuration is read once for all runs of a sweep.

    Args:
        state: The state folder.
        runs_dir: The folder of run folders.
        scheduler: The scheduler of the jobs of unfinished runs.
        awaited: Runs that the new run waits for (`--after`). They need not have finished.

    Raises:
        RunError: A run in `awaited` does not exist.
    """

    def __init__(self, state: Path, runs_dir: Path, scheduler: Scheduler, awaited: Sequence[str] = ()) -> None:
        self.scheduler = scheduler
        self.registry = Registry(state)
        self.known = known_runs(self.registry, runs_dir)
        self.awaited = [find_run(self.known, name, self.registry.set_aside) for name in awaited]
        self.awaited_ids = {known.run_id for known in self.awaited}

    def newest(self, run: ResolvedRun, needed: Prerequisite) -> KnownRun | None:
        """Returns the newest finished run that fits; None if there is none."""
        modes = tuple(f"_{mode}_" for mode in needed.modes)
        for known in self.known:
            key = f"_{known.record.key}_"
            # The name of a task's only model is empty, and is in no key.
            is_of_kind = any(not model or f"_{model}_" in key for model in needed.models) and key.endswith(modes)
            # Cheap checks first: most of hundreds of runs are of another kind or unfinished. A renamed folder has its
            # name in place of a key.
            if not ((is_of_kind or known.record.key == known.run_id) and is_file(known.folder.result_path)):
                continue
            if not misfits(known.config, run, needed) and is_whole(known.folder):
                return known
        return None


def resolve_prerequisites(
    run: ResolvedRun, request: "RunRequest", past: PastRuns, *, later: Collection[str] = ()
) -> tuple[ResolvedRun, list[str]]:
    """Finds the runs that a run builds on: for each role the named run, else an awaited run, else the newest that fits
    where such a run is looked for.

    Args:
        run: The new run. The mode's setting of each role, and `training.start_from`, name a run or are empty.
        request: The command line behind the run, for the commands in error messages.
        past: The existing runs.
        later: Roles whose runs do not exist yet; these roles are skipped.

    Returns:
        The run, with absolute folders in these settings, and a sentence about each run that was found.

    Raises:
        ConfigError: A run does not fit, or no run exists. The message has the command that makes one.
        RunError: A run is unknown or unreadable, or has not finished.
        CheckpointError: A run has lost its weights.
    """
    notices, folders, missing = [], {}, []
    if run.training.start_from:
        start = find_run(past.known, run.training.start_from, past.registry.set_aside)
        if start.folder.result() is None and start.run_id not in past.awaited_ids:
            remedy = f"Finish it first: can-train resume {shlex.quote(str(start.folder.path))}"
            raise RunError(
                "The run to start from has not finished", value=f"{start.run_id} has no result", remedy=remedy
            )
        run = replace(run, training=replace(run.training, start_from=str(start.folder.path.resolve())))
        notices = [f"weights to start from: {start.run_id}"]
    for needed in run.prerequisites:
        if needed.role in later:
            continue
        name = getattr(run.mode, needed.role)
        if name:
            folders[needed.role] = _find_named(name, needed, run, request, past).folder.path
            continue
        awaited = next((known for known in past.awaited if not misfits(known.config, run, needed)), None)
        source = awaited or (past.newest(run, needed) if needed.looked_for else None)
        if source is not None:
            folders[needed.role] = source.folder.path
            notices.append(source_notice(needed, source, is_awaited=awaited is not None))
        elif needed.required:
            missing.append(needed)
    if missing:
        names = " and ".join(needed.what for needed in missing)
        makes = "This makes one" if len(missing) == 1 else "These make them"
        raise ConfigError(f"Mode {run.mode.name} builds on {names}, and no finished run fits",
                          value=f"looked in {run.runs_dir} and {state_dir(run.paths)}",
                          remedy=_remedy(makes, [_line(needed, run, request) for needed in missing]))  # fmt: skip
    return with_folders(run, folders), notices


def source_notice(needed: Prerequisite, known: KnownRun, *, is_awaited: bool = False) -> str:
    """Returns a sentence about the run that was found for a role."""
    why = "the run that is waited for" if is_awaited else "the newest finished run that fits"
    return f"{_words(needed)}: {known.run_id} ({why})"


def with_folders(run: ResolvedRun, folders: Mapping[str, Path]) -> ResolvedRun:
    """Returns the run with the mode's settings of some roles set to absolute folders."""
    absolute = {role: str(path.resolve()) for role, path in folders.items()}
    return replace(run, mode=replace(run.mode, **absolute))


def misfits(config: Mapping[str, Any], run: ResolvedRun, needed: Prerequisite) -> list[str]:
    """Lists the settings in which a configuration differs from the needs of a run that would build on it."""
    sizes = needed.sizes or ((run.size,) if needed.same_model else ())
    wanted = [("task", config.get("task"), (run.task,)), ("model", config.get("model_name"), needed.models),
              ("mode", _group(config, "mode").get("name"), needed.modes)]  # fmt: skip
    wanted += [("size", config.get("size"), sizes)] if sizes else []
    differences = [f"{name} is {theirs}, not {' or '.join(possible)}"
                   for name, theirs, possible in wanted if theirs not in possible]  # fmt: skip
    if needed.same_model and not differences:
        differences += _differences("model", _group(config, "model"), run.config["model"])
    # A setting without a value is decided by the data, and fits each value.
    mine = {name: value for name in run.task_settings.inputs if (value := run.config["dataset"][name]) is not None}
    return differences + _differences("dataset", _group(config, "dataset"), mine)


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = config.get(name)
    return group if isinstance(group, Mapping) else {}


def _differences(name: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Lists the settings in `mine` that differ in `theirs`, with dotted names."""
    values = dict(flat(theirs))
    differing = [(key, value) for key, value in flat(mine) if key not in values or values[key] != value]
    return [f"{name}.{key} is {values.get(key, 'not set')}, not {value}" for key, value in differing]


def is_whole(folder: RunFolder) -> bool:
    """Returns whether a run has finished, with a readable result and its weights."""
    with suppress(RunError):
        return folder.result() is not None and _has_weights(folder)
    return False


def _has_weights(folder: RunFolder) -> bool:
    return is_file(folder.checkpoints_path / "manifest.json")


def _find_named(name: str, needed: Prerequisite, run: ResolvedRun, request: "RunRequest", past: PastRuns) -> KnownRun:
    known, line = find_run(past.known, name, past.registry.set_aside), _line(needed, run, request)
    different = misfits(known.folder.config(), run, needed)
    if different:
        raise ConfigError(f"The {_words(needed)} does not fit this run",
                          value=f"{known.run_id}: {'; '.join(different)}",
                          remedy=_remedy("This makes one that does", [line], _unnamed(needed)))  # fmt: skip
    if known.run_id in past.awaited_ids:
        return known
    if known.folder.result() is None:
        state = run_statuses([known], past.registry, past.scheduler)[0].state
        # The folder is found from anywhere, whatever --runs-dir and --state-dir are.
        path = shlex.quote(str(known.folder.path.resolve()))
        remedy = f"Continue it:\n  can-train resume {path}\nThen give the same line again"
        if state.live:
            remedy = f"Wait for its end: can-train logs {path} -f; or submit with --after {path}"
        # A folder that was copied while the run was still training has no result, though the run has finished by now.
        value = f"{known.run_id} is {state.state}" if state.state != FINISHED else f"{known.run_id} has no result"
        raise RunError(f"An unfinished run cannot be {needed.what}", value=value, remedy=remedy)
    if not _has_weights(known.folder):
        raise CheckpointError("The run to build on has lost its weights", value=str(known.folder.checkpoints_path),
                              remedy=_remedy("This makes another", [line], _unnamed(needed)))  # fmt: skip
    return known


def _remedy(what: str, lines: Sequence[str], then: str = "Then give the same line again") -> str:
    # Each command stands on a line of its own, without a full stop, because it will be pasted.
    return "\n  ".join([f"{what}:", *lines]) + f"\n{then}"


def _unnamed(needed: Prerequisite) -> str:
    # A line that names a run would name the same unsuitable run again.
    return f"Then give the same line without the run that it names: the newest {_words(needed)} that fits is taken"


def _line(needed: Prerequisite, run: ResolvedRun, request: "RunRequest") -> str:
    """Returns the command that trains a run which `run` could build on, on the same data and in the same folders."""
    size = needed.sizes[0] if needed.sizes else run.size if needed.same_model else ""
    dataset = ["--dataset", request.dataset] if request.dataset else []
    words = ["can-train", "--model", needed.models[0], *dataset, "--mode", needed.modes[0]]
    words += ["--size", size] if size else []
    words += ["--task", request.task] if request.task else []
    groups = ("dataset.", "model.") if needed.same_model else ("dataset.",)
    for text in request.sets:
        words += ["--set", text] if text.strip().startswith(groups) else []
    words += ["--device", request.device] if request.device != type(request).device else []
    for key, value in request.values.items():
        group, _, name = key.partition(".")
        words += [f"--{name.replace('_', '-')}", str(value)] if group == "paths" else []
    return shlex.join(words)


def _words(needed: Prerequisite) -> str:
    return needed.role.replace("_", " ")


# Duplicates


def find_duplicate_run(digest: str, statuses: Sequence[RunStatus]) -> RunStatus | None:
    """Returns the first run of an identity that is queued, running or finished; None if there is none."""
    same = (status for status in statuses if status.known.record.identity == digest)
    return next((status for status in same if status.state.live or status.state.state == FINISHED), None)


def identity(run: ResolvedRun, code: str, files: Sequence[Path]) -> str:
    """Computes the digest of settings, code digest and data files. Equal runs have equal digests."""
    config = identity_config(run.config, [needed.role for needed in run.prerequisites])
    common = Path(os.path.commonpath([file.parent for file in files])) if files else Path()
    # Size and modification time stand for the content, which may be gigabytes.
    stats = [(file.relative_to(common).as_posix(), file.stat()) for file in files]
    data = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    text = json.dumps([config, code, data], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_IDENTITY_DIGITS]


def identity_config(config: Mapping[str, Any], roles: Iterable[str]) -> dict[str, Any]:
    """Returns a configuration without settings that have no effect on the result.

    Args:
        config: Plain values.
        roles: Settings of the mode that are folders of other runs; their run ids take the place of the paths.
    """
    mode = dict(config.get("mode") or {})
    for role in filter(mode.get, roles):
        path, result = Path(mode[role]), None
        with suppress(RunError, OSError):
            result = RunFolder(path).result()
        # A copied folder may have any name; the result in it keeps the run's.
        mode[role] = str(result["run_id"]) if result and "run_id" in result else path.name
    return {name: value for name, value in config.items() if name not in _LOCATIONS} | {"mode": mode}


def data_files(run: ResolvedRun) -> list[Path]:
    """Lists the files of a run's data set.

    Raises:
        MissingDataError: They do not exist.
    """
    return run.task_settings.data_files(run.dataset, data_root(run.paths))
