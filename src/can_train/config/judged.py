"""Which data a finished run is asked to judge: its own, or others that are read as its own were, as far as a model is
bound to that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from can_train.config.assignments import from_set
from can_train.config.changes import changed
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import ResolvedRun
from can_train.config.task_settings import load_task_settings
from can_train.errors import ConfigError
from can_train.reporter import Reporter

_READING = "dataset."
"""Beginning of the settings that say how data are read."""


@dataclass(frozen=True, kw_only=True)
class JudgedData:
    """Data that a finished run is asked to judge.

    Attributes:
        dataset: The task's settings of them.
        own: Whether they are what the run was trained on, wherever that lies by now.
        data_root: Folder of the published data sets.
        cache: Folder of prepared data.
        reporter: Where progress and notices go.
    """

    dataset: Any
    own: bool
    data_root: Path
    cache: Path
    reporter: Reporter


def judged_dataset(run: ResolvedRun, dataset: str | None, sets: Sequence[str]) -> Any:
    """Settings of the data that a finished run is asked to judge.

    Args:
        run: The finished run.
        dataset: Name of a preset, or a path; None: the run's own.
        sets: `dataset.key=value`, in Hydra's grammar.

    Returns:
        The task's data-set settings.

    Raises:
        ConfigError: An unknown name, a value that does not fit, or a setting that has nothing to do with data.
    """
    for text in sets:
        if not from_set(text).key.startswith(_READING):
            raise ConfigError("A finished run is what it is: only how data are read can be set", value=f"--set {text}",
                              remedy="Give --set dataset.KEY=VALUE")  # fmt: skip
    plain = dict(run.config)
    if dataset is not None:
        request = RunRequest(
            task=run.task, model=run.model_name, mode=run.mode.name, size=run.size or None, dataset=dataset
        )
        carried = {name: plain["dataset"][name] for name in load_task_settings(run.task).carried}
        plain["dataset"] = {**resolve(request).config["dataset"], **carried}
    return changed(plain, sets, {}).dataset
