"""The settings that `can-train resume` may change: a run's epochs, its time, its device, and the place of its data.
Imports no torch: a run may go on in a job that is submitted from a login node.
"""

import math
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from can_train.config.compose import changed_settings, from_plain, with_changes
from can_train.config.resolved import ResolvedRun, data_root
from can_train.config.task_settings import load_object
from can_train.errors import CanTrainError, ConfigError, MissingDataError, RunError
from can_train.io.records import expanded, parse_object, sketch, text_or_nothing, this_host, write_bytes_atomic
from can_train.io.units import parse_device, time_text
from can_train.reporter import Reporter
from can_train.runs.run_folder import BEGUN_WITH, CONFIG, EPOCHS, INPUTS, MAX_TIME, RunFolder, name_to_type

_PATH: Final = "dataset.path"
_REFUSED: Final = 2  # exit code of an error before the first step
# The configuration before the record of its change, as a kill in between must leave a run that can go on.
_UNDONE: Final = (
    CONFIG,
    "changed_settings.json",
    "changes.json",
    "plan*.json",
    "reference_models.json",
    "memory_parts.json",
    "result*.json",
)


def change_run(  # noqa: PLR0913 - the flags of `resume`
    folder: RunFolder,
    reporter: Reporter,
    *,
    epochs: str | None = None,
    max_time: str | None = None,
    device: str | None = None,
    dataset: str | None = None,
) -> list[str]:
    """Changes how a run goes on, which its configuration and `RunFolder.changes` say afterwards.

    Everything is checked first: a refusal leaves the run as it was. A setting that is None stays.

    Returns:
        A sentence for each setting that changed.

    Raises:
        ConfigError: More epochs are done than asked for, the time of training is up, or a value does not fit.
        RunError: The data are not those that the run began with, or another process trains the run.
    """
    path = None if dataset is None else str(expanded(dataset).absolute())
    given = {EPOCHS: epochs, MAX_TIME: max_time, "device": device, _PATH: path}
    request = {name: value for name, value in given.items() if value is not None}
    if not request:
        return []
    before = folder.config()
    run = with_changes(before, (), request)
    with folder.locked():
        step, begun = _newest_checkpoint(folder)
        result = folder.result()
        done = begun if result is None else _count(result.get("epochs"))
        # One that stopped early, for want of a better loss, may go on for as long as it was to be trained at first.
        goes_on = epochs is not None and run.training.epochs > done
        if epochs is not None and run.training.epochs < done:
            anew = f"can-train resubmit {name_to_type(folder)} --epochs {epochs}"
            raise ConfigError("A run goes on for no fewer epochs than it has done",
                              value=f"--epochs {epochs}, and {done} are done",
                              remedy=f"With fewer it is a new run:\n  {anew}\nHere give {done} or more")  # fmt: skip
        if result is not None:
            goes_on = _check_time(folder, run, result, goes_on=goes_on, is_given=max_time is not None)
        if device is not None:
            _check_device(device, is_over=result is not None and not goes_on)
        if dataset is not None:
            _check_data(folder, run, reporter)
        values = {name: {"before": _value(before, name), "after": _value(run.config, name)} for name in request}
        is_extended = result is not None and goes_on
        changed = {name: each for name, each in values.items()
                   if each["before"] != each["after"] or (name == EPOCHS and is_extended)}  # fmt: skip
        if changed:
            folder.change(run.config, changed, step=step, changed=changed_settings(run.config))
    return _in_words(changed)


class ChangeUndo:
    """Puts a run back as it was before `change_run`, where an attempt is refused before it trains: what a device has no
    room for is known only when the attempt plans.

    Args:
        folder: The run, before it is changed.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._before = _texts(folder)
        self._steps = _newest_checkpoint(folder)
        self._attempts = folder.attempts.starts()

    @contextmanager
    def if_refused(self, *, is_alone: bool) -> Iterator[None]:
        """Undoes the change where the attempt in the block raises the error of a configuration.

        Args:
            is_alone: Whether this process is the only one of the run. Of several, another one may record the attempt's
                end later, so the attempt stays.
        """
        changed = _texts(self._folder)
        try:
            yield
        except CanTrainError as error:
            # The error of a run that has begun to train has another exit code.
            if error.exit_code == _REFUSED and self._steps == _newest_checkpoint(self._folder):
                # Another process that trains the run by now goes on with the changed settings.
                with suppress(RunError), self._folder.locked():
                    self._undo(changed, is_alone=is_alone)
            raise

    def _undo(self, changed: Mapping[Path, bytes], *, is_alone: bool) -> None:
        path, now = self._folder.path / CONFIG, _texts(self._folder)
        begun = self._folder.attempts.starts()[len(self._attempts) :]
        is_own = all((start.host, start.pid) == (this_host(), os.getpid()) for start in begun)
        if now.get(path) != changed.get(path) or not is_own:
            return
        for path, text in self._before.items():
            if now.get(path) != text:
                write_bytes_atomic(path, text)
        for path in now.keys() - self._before.keys():
            path.unlink()
        if is_alone:
            for start in begun:
                self._folder.attempts.forget(start.attempt)


def _texts(folder: RunFolder) -> dict[Path, bytes]:
    """Reads the files of a run that `RunFolder.change` and a plan write."""
    paths = (path for pattern in _UNDONE for path in sorted(folder.path.glob(pattern)))
    return {path: path.read_bytes() for path in paths}


def change_request(folder: RunFolder, settings: Mapping[str, Any]) -> list[str]:
    """Changes settings of a run's job, by dotted name; returns a sentence for each setting that changed.

    Raises:
        ConfigError: A value does not fit.
        RunError: Another process trains the run.
    """
    before = folder.config()
    run = with_changes(before, (), settings)
    values = {name: {"before": _value(before, name), "after": _value(run.config, name)} for name in settings}
    changed = {name: each for name, each in values.items() if each["before"] != each["after"]}
    with folder.locked():
        if changed:
            step, _ = _newest_checkpoint(folder)
            folder.change(run.config, changed, step=step, changed=changed_settings(run.config))
    return _in_words(changed)


def _in_words(changed: Mapping[str, Mapping[str, Any]]) -> list[str]:
    # A setting of a job that is 0, no, or empty is not set.
    return [f"{name} is {each['after'] or 'not set'} from here on, in place of {each['before'] or 'none'}"
            for name, each in changed.items()]  # fmt: skip


def _newest_checkpoint(folder: RunFolder) -> tuple[int, int]:
    """Reads the steps and the begun epochs of a run's newest checkpoint, 0 where there is none; a damaged list of them
    is refused by the training.
    """
    entries = parse_object(text_or_nothing(folder.checkpoints_path / "manifest.json")).get("checkpoints")
    newest = entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}
    return _count(newest.get("step")), _count(newest.get("epochs_begun"))


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _check_time(
    folder: RunFolder, run: ResolvedRun, result: Mapping[str, Any], *, goes_on: bool, is_given: bool
) -> bool:
    """Checks the time that a finished run may train for from now on; returns whether the run goes on.

    Args:
        folder: The run's folder, with the settings before the change.
        run: The run with the changed settings.
        result: The run's result.
        goes_on: Whether the run goes on for more epochs.
        is_given: Whether a time is given.
    """
    before = from_plain(folder.config()).training
    if not result.get("time_is_up"):
        if is_given and not goes_on:
            raise ConfigError("A run that was not ended by its time goes on for more epochs only",
                              value=f"--max-time {run.training.max_time}",
                              remedy=f"{longer_line(folder, result)} trains it for longer")  # fmt: skip
        return goes_on
    if run.training.max_seconds > before.max_seconds:
        return True
    if is_given or goes_on:
        raise ConfigError("The run's time of training is up", value=f"{before.max_time}, over all attempts",
                          remedy=f"{longer_line(folder, result)} trains it for longer")  # fmt: skip
    return False


def longer_line(folder: RunFolder, result: Mapping[str, Any]) -> str:
    """Returns a line that trains a finished run for longer: for twice the time where its time was up, else for twice
    the epochs.
    """
    training = from_plain(folder.config()).training
    longer = f"--epochs {2 * training.epochs}"
    if result.get("time_is_up"):
        longer = f"--max-time {time_text(math.ceil(2 * training.max_seconds / 60))}"
    return f"can-train resume {name_to_type(folder)} {longer}"


def _check_device(device: str, *, is_over: bool) -> None:
    if is_over:
        raise ConfigError("A run that has finished trains on no device", value=f"--device {device}",
                          remedy="Go on for longer with --epochs N, or leave --device out")  # fmt: skip
    parse_device(device)


def _check_data(folder: RunFolder, run: ResolvedRun, reporter: Reporter) -> None:
    """Raises RunError unless the data set at the run's path is the one that the run began with."""
    task, root = run.task_settings, data_root(run.paths)
    with suppress(MissingDataError):
        if not task.data_files(from_plain(folder.config()).dataset, root):
            raise ConfigError("The data of this run are simulated, and lie nowhere",
                              value=f"--dataset {run.dataset.path}", remedy="Leave --dataset out")  # fmt: skip
    files = task.data_files(run.dataset, root)
    digest = load_object(task.digest)(run.dataset, root, reporter) if task.digest else sketch(files)
    began_with = parse_object(text_or_nothing(folder.path / INPUTS)).get("data", digest)
    if digest != began_with:
        anew = f"can-train resubmit {name_to_type(folder)} --dataset {shlex.quote(run.dataset.path)}"
        raise RunError(BEGUN_WITH, value=f"{run.dataset.path} has other contents",
                       remedy=f"On these it is a new run:\n  {anew}\nThis one takes the same data only")  # fmt: skip


def _value(config: Mapping[str, Any], name: str) -> Any:
    for key in name.split("."):
        config = config[key]
    return config
