"""Holds a run to the companions that it began with: what is trained in a teacher's folder meanwhile, or put there,
would change the run between two steps without a word.
"""

import json
from typing import Final

from can_train.errors import RunError
from can_train.state.atomic import write_json_atomic
from can_train.training.companions import companions_of
from can_train.training.run_folder import RunFolder
from can_train.training.task import Task

BUILT_ON: Final = "built_on.json"
"""In a run's folder: the digest of each companion, by role."""


def hold_to_companions(folder: RunFolder, task: Task) -> None:
    """Writes down what a task's companions are; in a later attempt, makes sure that they are the same.

    Raises:
        RunError: One of them is another by now.
    """
    path = folder.path / BUILT_ON
    now = {companion.role: companion.digest for companion in companions_of(task)}
    try:
        before = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        if now:
            write_json_atomic(path, now)
        return
    changed = [each for each in companions_of(task) if before.get(each.role, now[each.role]) != now[each.role]]
    if changed:
        named = ", ".join(f"the {each.role.replace('_', ' ')} {each.name}" for each in changed)
        raise RunError("A run goes on with the models that it began with, on the same data",
                       value=f"{named} has other weights by now, or is asked about other windows",
                       remedy="Bring back what was there, or train anew")  # fmt: skip
