"""Trains the stages of a pipeline, here one after another or on SLURM as a chain of jobs."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from can_train.cli.attempt import continue_in_job
from can_train.cli.output import make_reporter
from can_train.cli.pipeline_tables import (
    SentStage,
    StageResult,
)
from can_train.cli.submit import make_group, note, start_group, submit_again
from can_train.config.resolved import ResolvedRun, state_dir
from can_train.errors import RunError
from can_train.slurm.client import NoControllerError, Partition, read_partitions
from can_train.slurm.pipeline import REUSED, RUNNING_ALREADY, PlannedStage
from can_train.slurm.prerequisites import is_whole, with_folders
from can_train.slurm.snapshot import Code, code_of, describe, keep, read_code
from can_train.slurm.status import find_run, known_runs, run_statuses
from can_train.slurm.submission_plan import SubmissionPlan, SubmitOptions, plan_submission
from can_train.slurm.submit import Submission, run_line
from can_train.training.run_folder import JobRecord, Registry, RunFolder, make_run


def train_stages(steps: Sequence[PlannedStage], output: TextIO | None) -> list[StageResult]:
    """Trains the stages that need it, each in a process of its own.

    A stage that fails stops those that build on it. Ctrl-C stops the current one, which saves itself, and the pipeline.

    Args:
        steps: The stages; each follows those that it builds on.
        output: Where results are printed; None for standard output.

    Raises:
        RunError: Another process is training a stage already.
        SystemExit: A signal arrived; what was trained is saved.
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


def current_results(steps: Sequence[PlannedStage]) -> list[StageResult]:
    """Returns the current results of all stages; trains nothing."""
    folders = {step.name: step.known.folder for step in steps if step.known is not None}
    said = {step.name: str(step.state) if step.state is not None else "not trained yet" for step in steps}
    return _results(steps, folders, said)


def _check_nobody_works(steps: Sequence[PlannedStage]) -> None:
    for step in steps:
        if step.what == RUNNING_ALREADY and step.known is not None and step.state is not None:
            run = step.known.run_id
            raise RunError(f"Stage {step.name} is being trained already", value=f"{run}, {step.state}",
                           remedy=f"Wait for its end (can-train logs {run} -f) and give the same line again, "
                                  f"or end it: can-train cancel {run}")  # fmt: skip


def _folder(step: PlannedStage, before: Mapping[str, RunFolder]) -> RunFolder:
    if step.known is not None:
        return step.known.folder
    run = with_folders(step.run, {role: before[name].path for role, name in step.sources.items()})
    return make_run(run, make_reporter())


def _trained(folder: RunFolder, step: PlannedStage, output: TextIO | None) -> bool:
    """Trains a run and returns whether it finished.

    Raises:
        SystemExit: It was stopped.
    """
    places = ("--runs-dir", step.run.paths.runs_dir, "--state-dir", step.run.paths.state_dir)
    ended = run_line(["resume", str(folder.path.resolve()), "--here", *places], output)
    if ended.stopped:
        _say(f"Stopped in stage {step.name}. The same line again goes on from there.")
        raise SystemExit(ended.status)
    return ended.status == 0 and is_whole(folder)


def _results(
    steps: Sequence[PlannedStage], folders: Mapping[str, RunFolder], said: Mapping[str, str]
) -> list[StageResult]:
    """Collects the results of stages. `said` has the text for those that have not finished."""
    paths = steps[0].run.paths
    registry = Registry(state_dir(paths))
    known = known_runs(registry, Path(paths.runs_dir))
    results = []
    for step in steps:
        folder = folders.get(step.name)
        found = run_statuses([find_run(known, str(folder.path))], registry)[0] if folder is not None else None
        finished = found is not None and found.facts.result is not None
        results.append(StageResult(step=step, found=found, told="" if finished else said.get(step.name, "")))
    return results


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def submit_stages(steps: Sequence[PlannedStage]) -> list[SentStage]:
    """Submits the stages that have not been trained and are not running. All are checked before the first is sent.

    Args:
        steps: The stages; each follows those that it builds on.

    Raises:
        CanTrainError: A stage cannot be submitted. Those before it have been, and the same line continues after them.
    """
    chain = _Chain(state=state_dir(steps[0].run.paths), code=read_code(), partitions=_partitions())
    left = [step.run for step in steps if chain.is_to_be_sent(step)]
    if left:
        note(chain.plan(left))
        keep(chain.code, chain.state)
    return [chain.send(step) for step in steps]


def _partitions() -> list[Partition]:
    try:
        return read_partitions()
    except NoControllerError as error:
        # The error's own remedy is another --cluster, but only SLURM can chain the stages.
        remedy = "Submit from a login node of the cluster, or leave out --submit to train the stages here"
        raise NoControllerError(error.rule, value=error.value, remedy=remedy) from error


@dataclass(frozen=True, kw_only=True)
class _Chain:
    """A chain of jobs. `folders` has the run folders so far, `live` the stages whose jobs have not ended."""

    state: Path
    code: Code
    partitions: Sequence[Partition]
    folders: dict[str, RunFolder] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)

    def is_to_be_sent(self, step: PlannedStage) -> bool:
        return step.what not in (REUSED, RUNNING_ALREADY)

    def plan(self, runs: Sequence[ResolvedRun], after: Sequence[str] = ()) -> SubmissionPlan:
        return plan_submission(runs, SubmitOptions(after=after, force=True), self.code.digest, self.partitions)

    def send(self, step: PlannedStage) -> SentStage:
        """Submits a stage, waiting for those that it builds on; does nothing if it has finished or is running."""
        if not self.is_to_be_sent(step):
            assert step.known is not None, "it is somewhere"
            self.folders[step.name] = step.known.folder
            if step.what == RUNNING_ALREADY:
                self.live.add(step.name)
            return SentStage(step=step, run_id=step.known.run_id, job=None, after=())
        after = [name for name in dict.fromkeys(step.sources.values()) if name in self.live]
        run = with_folders(step.run, {role: self.folders[name].path for role, name in step.sources.items()})
        plan = self.plan([run], [self.folders[name].run_id for name in after])
        job = self._again(step.known.folder, plan) if step.known else self._anew(plan)
        self.folders[step.name] = RunFolder(step.known.folder.path if step.known else run.runs_dir / job.run_id)
        self.live.add(step.name)
        return SentStage(step=step, run_id=job.run_id, job=job, after=after)

    def _anew(self, plan: SubmissionPlan) -> JobRecord:
        (group,) = plan.groups
        return start_group(continue_in_job, make_group(group, plan, self.state), plan, self.code)[0]

    def _again(self, folder: RunFolder, plan: SubmissionPlan) -> JobRecord:
        """Submits an interrupted run again, with the snapshot of its code if it has one."""
        ((planned,),) = plan.groups
        folder = RunFolder(folder.path.resolve())
        try:
            code_of(folder.path)
        except RunError:
            describe(self.code, self.state, folder.path)
        run = planned.run
        submission = Submission(name=run.key, state_dir=self.state, dependency=plan.dependency, reason="resumed")
        return submit_again(continue_in_job, folder, run, submission)
