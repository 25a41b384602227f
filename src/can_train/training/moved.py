"""Finds the runs that a run builds on again: folders of runs are moved, and copied to other machines, as a whole."""

from dataclasses import replace
from pathlib import Path

from can_train.config.resolved import ResolvedRun
from can_train.state.folders import is_file
from can_train.training.run_folder import CONFIG


def found_beside(run: ResolvedRun, folder: Path) -> ResolvedRun:
    """Looks beside a run for those that it builds on and that are no longer where they were.

    Args:
        run: As it was made.
        folder: Where its folder is now.
    """
    moved = {}
    for needed in run.prerequisites:
        path = Path(getattr(run.mode, needed.role))
        beside = folder.resolve().parent / path.name
        if path.name and not is_file(path / CONFIG) and is_file(beside / CONFIG):
            moved[needed.role] = str(beside)
    return replace(run, mode=replace(run.mode, **moved)) if moved else run


def without_the_gone(run: ResolvedRun) -> tuple[ResolvedRun, list[str]]:
    """Leaves out of a run what it can do without and is gone.

    Returns:
        The run; and what is gone, as sentences.
    """
    named = {needed.role: getattr(run.mode, needed.role) for needed in run.prerequisites if not needed.required}
    gone = {role: name for role, name in named.items() if name and not is_file(Path(name) / CONFIG)}
    notices = [f"{role.replace('_', ' ')}: {name} is gone, so the run goes on without" for role, name in gone.items()]
    return replace(run, mode=replace(run.mode, **dict.fromkeys(gone, ""))) if gone else run, notices
