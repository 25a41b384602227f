"""Sends the stages of a pipeline to SLURM as a chain: each waits for the jobs of those that it builds on, and SLURM
ends it where one of them fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from can_train.cli.pipeline_tables import SentStage
from can_train.cli.submit import make_group, note, start_group, submit_again
from can_train.config.resolved import ResolvedRun
from can_train.errors import RunError
from can_train.launch.cluster_info import NoControllerError, Partition, read_partitions
from can_train.launch.code import Code, code_of, describe, keep, read_code
from can_train.launch.order import Order, Wanted, make_order
from can_train.launch.pipeline import AT_WORK, REUSED, Step
from can_train.launch.prerequisites import with_folders
from can_train.launch.submission import Submission
from can_train.state.registry import JobRecord
from can_train.training.folders import state_dir
from can_train.training.run_folder import RunFolder


def submit_steps(steps: Sequence[Step]) -> list[SentStage]:
    """Submits what has not been trained and is not at work; what SLURM would refuse is found before anything is sent.

    Args:
        steps: The stages, each after those that it builds on.

    Returns:
        What has been sent of each.

    Raises:
        CanTrainError: A stage cannot be submitted; those before it have been, and the same line again goes on.
    """
    chain = _Chain(state=state_dir(steps[0].run.paths), code=read_code(), partitions=_partitions())
    left = [step.run for step in steps if chain.is_to_be_sent(step)]
    if left:
        note(chain.order(left))
        keep(chain.code, chain.state)
    return [chain.send(step) for step in steps]


def _partitions() -> list[Partition]:
    try:
        return read_partitions()
    except NoControllerError as error:
        # Its own remedy is another --cluster, which would not chain the stages.
        raise NoControllerError(
            error.rule, value=error.value,
            remedy="Submit from a login node of the cluster; or leave out --submit: the stages then train here, one "
                   "after another",
        ) from error  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Chain:
    """What the stages of a chain have in common, and the folders of those that have been looked at."""

    state: Path
    code: Code
    partitions: Sequence[Partition]
    folders: dict[str, RunFolder] = field(default_factory=dict)
    waits: set[str] = field(default_factory=set)

    def is_to_be_sent(self, step: Step) -> bool:
        return step.what not in (REUSED, AT_WORK)

    def order(self, runs: Sequence[ResolvedRun], after: Sequence[str] = ()) -> Order:
        """Settles and checks runs; whether they are there already has been decided."""
        return make_order(runs, Wanted(after=after, force=True), self.code.digest, self.partitions)

    def send(self, step: Step) -> SentStage:
        """Submits a stage that is to wait for those before it, unless it has finished or is at work."""
        if not self.is_to_be_sent(step):
            assert step.known is not None, "it is somewhere"
            self.folders[step.name] = step.known.folder
            if step.what == AT_WORK:
                self.waits.add(step.name)
            return SentStage(step=step, run_id=step.known.run_id, job=None, after=())
        after = [name for name in dict.fromkeys(step.sources.values()) if name in self.waits]
        run = with_folders(step.run, {role: self.folders[name].path for role, name in step.sources.items()})
        order = self.order([run], [self.folders[name].run_id for name in after])
        job = self._again(step.known.folder, order) if step.known else self._anew(order)
        self.folders[step.name] = RunFolder(step.known.folder.path if step.known else run.runs_dir / job.run_id)
        self.waits.add(step.name)
        return SentStage(step=step, run_id=job.run_id, job=job, after=after)

    def _anew(self, order: Order) -> JobRecord:
        (ordered,) = order.groups
        return start_group(make_group(ordered, order, self.state), order, self.code)[0]

    def _again(self, folder: RunFolder, order: Order) -> JobRecord:
        """Submits a run that was interrupted, with the code that it began with where it was submitted."""
        ((ordered,),) = order.groups
        folder = RunFolder(folder.path.resolve())
        try:
            code_of(folder.path)
        except RunError:
            describe(self.code, self.state, folder.path)
        submission = Submission(
            name=ordered.run.key, state_dir=self.state, dependency=order.dependency, reason="resumed"
        )
        return submit_again(folder, ordered.run, submission)
