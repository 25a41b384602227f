"""Finds the finished runs that a run builds on (a teacher, an autoencoder) and checks that they fit.

It reads only the files of runs and imports no torch, so a login node can do it before anything is submitted. Whether
the weights are intact is seen when they are loaded.
"""

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from can_train.config.compose import RunRequest
from can_train.config.resolved import ResolvedRun, state_dir
from can_train.config.task_settings import Prerequisite, load_task_settings
from can_train.errors import CheckpointError, ConfigError, RunError
from can_train.io.atomic import is_file
from can_train.slurm.run_state import FINISHED
from can_train.slurm.status import KnownRun, find_run, known_runs, run_statuses
from can_train.training.run_folder import CONFIG, Registry, RunFolder

_NEWEST: Final = "the newest finished run that fits"
_AWAITED: Final = "the run that is waited for"


class PastRuns:
    """The runs that a new run may build on. Each configuration is read once, however many runs of a sweep ask.

    Args:
        state: The state folder.
        runs_dir: The folder of run folders.
        awaited: Runs that the new run waits for (`--after`). They need not have finished.

    Raises:
        RunError: A run in `awaited` does not exist.
    """

    def __init__(self, state: Path, runs_dir: Path, awaited: Sequence[str] = ()) -> None:
        self.registry = Registry(state)
        self.known = known_runs(self.registry, runs_dir)
        self.awaited = [find_run(self.known, name) for name in awaited]
        self._configs: dict[str, Mapping[str, Any]] = {}

    def config(self, known: KnownRun) -> Mapping[str, Any]:
        """Returns a run's configuration, empty if it is damaged."""
        if known.run_id not in self._configs:
            try:
                self._configs[known.run_id] = known.folder.config()
            except RunError:
                self._configs[known.run_id] = {}
        return self._configs[known.run_id]

    def newest(self, run: ResolvedRun, needed: Prerequisite) -> KnownRun | None:
        """Returns the newest run that has finished and fits."""
        for known in self.known:
            # Cheap checks first: of hundreds of runs most are of another kind or have not finished.
            if not (_may_fit(known, needed) and is_file(known.folder.result_path)):
                continue
            if not misfits(self.config(known), run, needed) and is_whole(known.folder):
                return known
        return None

    def waited_for(self, run: ResolvedRun, needed: Prerequisite) -> KnownRun | None:
        """Returns the first run in `awaited` that fits."""
        return next((known for known in self.awaited if not misfits(self.config(known), run, needed)), None)


def settled_prerequisites(
    run: ResolvedRun, request: RunRequest, past: PastRuns, *, later: Collection[str] = ()
) -> tuple[ResolvedRun, list[str]]:
    """Chooses the runs that a run builds on: the named one, else an awaited one, else the newest that fits.

    Args:
        run: The new run. The mode's setting of each role names a run in any way, or is empty.
        request: The command line behind the run, for the commands in error messages.
        past: The existing runs.
        later: Roles whose runs do not exist yet; they are left alone.

    Returns:
        The run, with absolute folders in the mode's settings, and sentences that say what was chosen.

    Raises:
        ConfigError: A run does not fit, or none exists. The message has the command that makes one.
        RunError: A run is unknown or unreadable, or has not finished.
        CheckpointError: A run has lost its weights.
    """
    folders, notices = {}, []
    for needed in (one for one in run.prerequisites if one.role not in later):
        name = getattr(run.mode, needed.role)
        if name:
            folders[needed.role] = _named(name, needed, run, request, past).folder.path
            continue
        awaited = past.waited_for(run, needed)
        found = awaited or past.newest(run, needed)
        if found is None and needed.required:
            raise _missing(needed, run, request)
        if found is not None:
            folders[needed.role] = found.folder.path
            notices.append(chosen(needed, found, _AWAITED if awaited else _NEWEST))
    return with_folders(run, folders), notices


def chosen(needed: Prerequisite, known: KnownRun, why: str = _NEWEST) -> str:
    """Returns a sentence about the run that was chosen for a role."""
    return f"{_words(needed)}: {known.run_id} ({why})"


def with_folders(run: ResolvedRun, folders: Mapping[str, Path]) -> ResolvedRun:
    """Returns the run with the mode's settings of some roles set to absolute folders."""
    absolute = {role: str(path.resolve()) for role, path in folders.items()}
    return replace(run, mode=replace(run.mode, **absolute))


def misfits(config: Mapping[str, Any], run: ResolvedRun, needed: Prerequisite) -> list[str]:
    """Lists the settings in which a configuration differs from what a run needs to build on it."""
    of_task = {"task": (config.get("task"), (run.task,)), "model": (config.get("model_name"), needed.models)}
    of_mode = {"mode": (_group(config, "mode").get("name"), needed.modes)}
    sizes = needed.sizes or ((run.size,) if needed.same_model else ())
    of_size = {"size": (config.get("size"), sizes)} if sizes else {}
    found = [
        f"{name} is {theirs}, not {' or '.join(possible)}"
        for name, (theirs, possible) in {**of_task, **of_mode, **of_size}.items()
        if theirs not in possible
    ]
    if needed.same_model and not found:
        found += _differences("model", _group(config, "model"), run.config["model"])
    mine = {name: run.config["dataset"][name] for name in load_task_settings(run.task).inputs}
    return found + _differences("dataset", _group(config, "dataset"), mine)


def command_for(needed: Prerequisite, run: ResolvedRun, request: RunRequest) -> str:
    """Returns the command that trains a run which `run` could build on, on the same data and in the same folders."""
    size = needed.sizes[0] if needed.sizes else run.size if needed.same_model else ""
    words = ["can-train", "--model", needed.models[0], "--dataset", request.dataset, "--mode", needed.modes[0]]
    words += ["--size", size] if size else []
    words += ["--task", request.task] if request.task else []
    groups = ("dataset.", "model.") if needed.same_model else ("dataset.",)
    for text in request.sets:
        words += ["--set", text] if text.strip().startswith(groups) else []
    words += ["--device", request.device] if request.device != RunRequest.device else []
    for key, value in request.values.items():
        group, _, name = key.partition(".")
        words += [f"--{name.replace('_', '-')}", str(value)] if group == "paths" else []
    return shlex.join(words)


def _may_fit(known: KnownRun, needed: Prerequisite) -> bool:
    """Returns False if the run's key rules it out. A folder that was renamed has its name in place of a key."""
    key, modes = f"_{known.record.key}_", tuple(f"_{mode}_" for mode in needed.modes)
    right_kind = any(f"_{model}_" in key for model in needed.models) and key.endswith(modes)
    return right_kind or known.record.key == known.run_id


def is_whole(folder: RunFolder) -> bool:
    """Returns whether a run has finished, with a readable result and its weights."""
    try:
        return folder.result() is not None and _has_weights(folder)
    except RunError:
        return False


def _has_weights(folder: RunFolder) -> bool:
    return is_file(folder.checkpoints_path / "manifest.json")


def _named(name: str, needed: Prerequisite, run: ResolvedRun, request: RunRequest, past: PastRuns) -> KnownRun:
    known = find_run(past.known, _run_name(name, needed))
    different = misfits(known.folder.config(), run, needed)
    if different:
        raise ConfigError(
            f"The {_words(needed)} does not fit this run",
            value=f"{known.run_id}: {'; '.join(different)}",
            remedy=_remedy("This makes one that does", needed, run, request, named=True),
        )
    if known.run_id in {one.run_id for one in past.awaited}:
        return known
    if known.folder.result() is None:
        raise _unfinished(known, needed, past)
    if not _has_weights(known.folder):
        raise CheckpointError(
            "The run to build on has lost its weights",
            value=str(known.folder.checkpoints_path),
            remedy=_remedy("This makes another", needed, run, request, named=True),
        )
    return known


def _unfinished(known: KnownRun, needed: Prerequisite, past: PastRuns) -> RunError:
    state = run_statuses([known], past.registry)[0].state
    # The folder is found from anywhere, whatever --runs-dir and --state-dir are.
    name = shlex.quote(str(known.folder.path.resolve()))
    remedy = f"Continue it:\n  can-train resume {name}\nThen give the same line again"
    if state.live:
        remedy = f"Wait for its end: can-train logs {name} -f; or submit with --after {name}"
    # A folder that was copied while the run was still training has no result, though the run has finished by now.
    value = f"{known.run_id} is {state.state}" if state.state != FINISHED else f"{known.run_id} has no result"
    return RunError(f"Only a finished run can be {needed.what}", value=value, remedy=remedy)


def _missing(needed: Prerequisite, run: ResolvedRun, request: RunRequest) -> ConfigError:
    return ConfigError(
        f"Mode {run.mode.name} builds on {needed.what}, and no finished run fits",
        value=f"looked in {run.runs_dir} and {state_dir(run.paths)}",
        remedy=_remedy("This makes one", needed, run, request),
    )


def _remedy(what: str, needed: Prerequisite, run: ResolvedRun, request: RunRequest, *, named: bool = False) -> str:
    # A line that names a run would name the same unsuitable run again.
    then = f"Then give the same line without the run that it names: the newest {_words(needed)} that fits is taken"
    # The command stands on a line of its own, without a full stop, because it will be pasted.
    return f"{what}:\n  {command_for(needed, run, request)}\n{then if named else 'Then give the same line again'}"


def _run_name(name: str, needed: Prerequisite) -> str:
    """Returns the run's folder if `name` is a path inside one, otherwise `name` as it is.

    Raises:
        RunError: The path exists but belongs to no run.
    """
    path = Path(name).expanduser()
    try:
        if not path.exists():
            return name
        run = next((each for each in (path, *path.absolute().parents[:2]) if (each / CONFIG).is_file()), None)
    except OSError as error:
        raise RunError(
            f"The folder of {needed.what} cannot be read",
            value=f"{name}: {error.strerror}",
            remedy="Change its permissions, or name another run",
        ) from error
    if run is None and os.sep in name:
        raise RunError(
            f"{needed.what.capitalize()} must be a run: its id, its folder, or a file in it. A checkpoint alone "
            "does not say what it was trained on",
            value=f"{name} is not in the folder of a run",
            remedy=f"Name a folder that has a {CONFIG}",
        )
    return name if run is None else str(run)


def _words(needed: Prerequisite) -> str:
    return needed.role.replace("_", " ")


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = config.get(name)
    return group if isinstance(group, Mapping) else {}


def _differences(name: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Lists the settings in `mine` that differ in `theirs`, nested ones by their dotted names."""
    found = []
    for key, value in mine.items():
        other = theirs.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            found += _differences(f"{name}.{key}", other, value)
        elif key not in theirs:
            found.append(f"{name}.{key} is not set, not {value}")
        elif other != value:
            found.append(f"{name}.{key} is {other}, not {value}")
    return found
