"""Finds the finished runs that a run builds on and checks that they fit, before anything is trained, submitted or
planned: from the files of runs alone, without torch. Whether their weights are whole, the training sees.
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
    """The runs that a new one may build on, each read once however many runs ask.

    Args:
        state: State folder.
        runs_dir: Folder of run folders.
        awaited: Runs, by any of their names, that are waited for; they need not have finished.

    Attributes:
        registry: Of the state folder.
        known: All of them, the newest first.
        awaited: Those that are waited for.

    Raises:
        RunError: A run that is waited for is unknown.
    """

    def __init__(self, state: Path, runs_dir: Path, awaited: Sequence[str] = ()) -> None:
        self.registry = Registry(state)
        self.known = known_runs(self.registry, runs_dir)
        self.awaited = [find_run(self.known, name) for name in awaited]
        self._configs: dict[str, Mapping[str, Any]] = {}

    def config(self, known: KnownRun) -> Mapping[str, Any]:
        """Reads a run's configuration; one that is damaged has no settings."""
        if known.run_id not in self._configs:
            try:
                self._configs[known.run_id] = known.folder.config()
            except RunError:
                self._configs[known.run_id] = {}
        return self._configs[known.run_id]

    def newest(self, run: ResolvedRun, needed: Prerequisite) -> KnownRun | None:
        """Finds the newest run that has finished and fits; None: there is none."""
        return next(
            (
                known
                for known in self.known
                # Cheap before dear: of hundreds of runs most are of another kind, or have not finished.
                if _may_fit(known, needed)
                and is_file(known.folder.result_path)
                and not misfits(self.config(known), run, needed)
                and is_whole(known.folder)
            ),
            None,
        )

    def waited_for(self, run: ResolvedRun, needed: Prerequisite) -> KnownRun | None:
        """Finds a run that is waited for and fits; None: there is none."""
        return next((known for known in self.awaited if not misfits(self.config(known), run, needed)), None)


def settled_prerequisites(
    run: ResolvedRun, request: RunRequest, past: PastRuns, *, later: Collection[str] = ()
) -> tuple[ResolvedRun, list[str]]:
    """Finds the finished runs that a run builds on: those that it names, else those that it waits for, else the newest
    that fit.

    Args:
        run: Its paths are settled. The setting of each role names a run as a person does, or is empty.
        request: What the run was made of.
        past: The runs there are.
        later: Roles of runs that are not known yet: they stay as they are.

    Returns:
        The run, the folder of each of them absolute in the mode's setting of its role; and what was chosen, as
        sentences.

    Raises:
        ConfigError: A run does not fit, or there is none and it is needed; the message has the command that makes it.
        RunError: A run is unknown, unreadable, or has not finished.
        CheckpointError: A run no longer has its weights.
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
    """Says which run was chosen for a role, and why."""
    return f"{_words(needed)}: {known.run_id} ({why})"


def with_folders(run: ResolvedRun, folders: Mapping[str, Path]) -> ResolvedRun:
    """Writes the folders of the runs that a run builds on into its settings, by role."""
    absolute = {role: str(path.resolve()) for role, path in folders.items()}
    return replace(run, mode=replace(run.mode, **absolute))


def misfits(config: Mapping[str, Any], run: ResolvedRun, needed: Prerequisite) -> list[str]:
    """Says setting by setting what keeps a run from being built on; nothing where it fits.

    Args:
        config: Its configuration.
        run: The run that would build on it.
        needed: As what.
    """
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
    """Writes the command line that makes a run which another one can build on.

    Args:
        needed: What it is to be.
        run: The run that is to build on it.
        request: What that one was made of: the data and the folders are the same.
    """
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
    """Whether a run's name does not rule it out; a folder that was renamed says nothing."""
    key = f"_{known.record.key}_"
    of_kind = any(f"_{model}_" in key for model in needed.models) and key.endswith(
        tuple(f"_{m}_" for m in needed.modes)
    )
    return of_kind or known.record.key == known.run_id


def is_whole(folder: RunFolder) -> bool:
    """Tells whether a run has finished, its result can be read, and its weights are there."""
    try:
        return folder.result() is not None and _has_weights(folder)
    except RunError:
        return False


def _has_weights(folder: RunFolder) -> bool:
    return is_file(folder.checkpoints_path / "manifest.json")


def _named(name: str, needed: Prerequisite, run: ResolvedRun, request: RunRequest, past: PastRuns) -> KnownRun:
    """Finds a run by its name, its folder, or a file of its checkpoints, and checks that it can be built on."""
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
        raise CheckpointError("A run is built on for its weights, and this one's are gone",
                              value=str(known.folder.checkpoints_path),
                              remedy=_remedy("This makes another", needed, run, request, named=True))  # fmt: skip
    return known


def _unfinished(known: KnownRun, needed: Prerequisite, past: PastRuns) -> RunError:
    state = run_statuses([known], past.registry)[0].state
    # By its folder, which is found from anywhere, whatever --runs-dir and --state-dir are.
    name = shlex.quote(str(known.folder.path.resolve()))
    remedy = f"Go on with it:\n  can-train resume {name}\nThen give the same line again"
    if state.live:
        remedy = f"Wait for its end: can-train logs {name} -f; or submit with --after {name}"
    # What says that it has finished may be elsewhere, as in a folder that was copied while it was at work.
    value = f"{known.run_id} is {state.state}" if state.state != FINISHED else f"{known.run_id} has no result"
    return RunError(f"Only a finished run can be {needed.what}", value=value, remedy=remedy)


def _missing(needed: Prerequisite, run: ResolvedRun, request: RunRequest) -> ConfigError:
    return ConfigError(
        f"Mode {run.mode.name} builds on {needed.what}, and no finished run fits",
        value=f"looked in {run.runs_dir} and {state_dir(run.paths)}",
        remedy=_remedy("This makes one", needed, run, request),
    )


def _remedy(what: str, needed: Prerequisite, run: ResolvedRun, request: RunRequest, *, named: bool = False) -> str:
    # A line that names a run would name the same one again.
    then = f"Then give the same line without the run that it names: the newest {_words(needed)} that fits is taken"
    # On a line of its own, without a full stop after it: it is to be pasted.
    return f"{what}:\n  {command_for(needed, run, request)}\n{then if named else 'Then give the same line again'}"


def _run_name(name: str, needed: Prerequisite) -> str:
    """Names the run that a file or a folder in its folder belongs to; anything else stays as it is.

    Raises:
        RunError: There is something of this name, and it is of no run.
    """
    path = Path(name).expanduser()
    try:
        if not path.exists():
            return name
        run = next((each for each in (path, *path.absolute().parents[:2]) if (each / CONFIG).is_file()), None)
    except OSError as error:
        raise RunError(f"The folder of {needed.what} must be readable", value=f"{name}: {error.strerror}",
                       remedy="Mend its permissions, or name another run") from error  # fmt: skip
    if run is None and os.sep in name:
        raise RunError(f"A run is named by its id, its folder, or a file in that: as {needed.what}, a checkpoint alone "
                       "does not say what it was trained on", value=f"{name} is in no folder of a run",
                       remedy=f"Name a folder that has a {CONFIG}")  # fmt: skip
    return name if run is None else str(run)


def _words(needed: Prerequisite) -> str:
    return needed.role.replace("_", " ")


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = config.get(name)
    return group if isinstance(group, Mapping) else {}


def _differences(name: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Says which of my settings are others in theirs, groups within groups by their dotted names."""
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
