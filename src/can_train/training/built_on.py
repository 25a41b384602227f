"""Holds a run to what it began with: a log that grows, or a teacher that is trained on meanwhile, would change the run
between two steps without a word.
"""

import json
from typing import Final

from can_train.errors import RunError
from can_train.state.atomic import write_json_atomic
from can_train.training.companions import companions_of
from can_train.training.run_folder import RunFolder
from can_train.training.task import Task

BUILT_ON: Final = "built_on.json"
"""In a run's folder: the digests of its data and of each companion, by role."""

_DATA: Final = "data"


def hold_to_beginning(folder: RunFolder, task: Task) -> None:
    """Writes down what a run is trained on; in a later attempt, makes sure that it is the same.

    Raises:
        RunError: It is another by now.
    """
    path = folder.path / BUILT_ON
    now = {companion.role: companion.digest for companion in companions_of(task)}
    if data := getattr(task, "data_digest", ""):
        now[_DATA] = data
    try:
        before = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        write_json_atomic(path, now)
        return
    # A companion's digest is also of what it is asked about, so other data are said alone.
    changed = [role for role, digest in now.items() if before.get(role, digest) != digest]
    if _DATA in changed:
        raise RunError("A run goes on with the data that it began with", value="its logs have other contents by now",
                       remedy="Bring back what was there, or train anew")  # fmt: skip
    others = ", ".join(f"the {one.role.replace('_', ' ')} {one.name}" for one in companions_of(task)
                       if one.role in changed)  # fmt: skip
    if others:
        raise RunError("A run goes on with the models that it began with",
                       value=f"{others} has other weights by now, or is asked about other windows",
                       remedy="Bring back what was there, or train anew")  # fmt: skip
