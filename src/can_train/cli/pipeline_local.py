"""Trains the stages of a pipeline on this machine, each in a process of its own, one after another. A stage that fails
stops those that build on it; Ctrl-C stops the one at work, which saves itself, and with it the pipeline.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from can_train.cli.looking import told
from can_train.cli.pipeline_tables import StageResult
from can_train.cli.reporters import make_reporter
from can_train.errors import RunError
from can_train.launch.child import run_line
from can_train.launch.pipeline import AT_WORK, REUSED, Step
from can_train.launch.prerequisites import is_whole, with_folders
from can_train.launch.survey import find_run, known_runs, survey
from can_train.state.registry import Registry
from can_train.training.folders import state_dir
from can_train.training.new_run import make_run
from can_train.training.run_folder import RunFolder


def train_steps(steps: Sequence[Step], output: TextIO | None) -> list[StageResult]:
    """Trains what has not been trained.

    Args:
        steps: The stages, each after those that it builds on.
        output: Where the results of each training go; None: to standard output.

    Returns:
        What has become of them.

    Raises:
        RunError: A stage is at work already, in another process.
        SystemExit: A signal came; what was trained is saved.
    """
    _check_nobody_works(steps)
    folders: dict[str, RunFolder] = {}
    lost: dict[str, str] = {}
    for number, step in enumerate(steps, start=1):
        missing = [name for name in dict.fromkeys(step.sources.values()) if name in lost]
        if missing:
            lost[step.name] = f"not trained: it builds on {' and '.join(missing)}"
            _say(f"stage {number} of {len(steps)}: {step.stage.title}: {lost[step.name]}")
            continue
        folders[step.name] = _folder(step, folders)
        _say(f"stage {number} of {len(steps)}: {step.stage.title}: {step.what}, run {folders[step.name].run_id}")
        if step.what != REUSED and not _trained(folders[step.name], step, output):
            lost[step.name] = "failed"
    return _results(steps, folders, lost)


def what_there_is(steps: Sequence[Step]) -> list[StageResult]:
    """Finds out what has become of stages so far."""
    folders = {step.name: step.known.folder for step in steps if step.known is not None}
    said = {step.name: told(step.state) if step.state is not None else "not trained yet" for step in steps}
    return _results(steps, folders, said)


def _check_nobody_works(steps: Sequence[Step]) -> None:
    for step in steps:
        if step.what == AT_WORK and step.known is not None and step.state is not None:
            run = step.known.run_id
            raise RunError(f"Stage {step.name} is being trained already", value=f"{run}, {told(step.state)}",
                           remedy=f"Wait for its end (can-train logs {run} -f) and give the same line again, "
                                  f"or end it: can-train cancel {run}")  # fmt: skip


def _folder(step: Step, before: Mapping[str, RunFolder]) -> RunFolder:
    """Finds or makes the folder of a stage's run, now that those of the runs that it builds on are there."""
    if step.known is not None:
        return step.known.folder
    run = with_folders(step.run, {role: before[name].path for role, name in step.sources.items()})
    return make_run(run, make_reporter())


def _trained(folder: RunFolder, step: Step, output: TextIO | None) -> bool:
    """Trains a run to its end; tells whether it finished.

    Raises:
        SystemExit: It was stopped.
    """
    places = ("--runs-dir", step.run.paths.runs_dir, "--state-dir", step.run.paths.state_dir)
    ended = run_line(["resume", str(folder.path.resolve()), "--here", *places], output)
    if ended.stopped:
        _say(f"Stopped in stage {step.name}. The same line again goes on from there.")
        raise SystemExit(ended.status)
    return ended.status == 0 and is_whole(folder)


def _results(steps: Sequence[Step], folders: Mapping[str, RunFolder], said: Mapping[str, str]) -> list[StageResult]:
    """Finds out about the runs of stages; what is said of a stage holds where its run has not finished."""
    paths = steps[0].run.paths
    registry = Registry(state_dir(paths))
    known = known_runs(registry, Path(paths.runs_dir))
    results = []
    for step in steps:
        folder = folders.get(step.name)
        found = survey([find_run(known, str(folder.path))], registry)[0] if folder is not None else None
        finished = found is not None and found.evidence.result is not None
        results.append(StageResult(step=step, found=found, told="" if finished else said.get(step.name, "")))
    return results


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
