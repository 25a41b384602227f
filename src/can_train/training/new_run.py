"""Makes the folder of a new run and enters it into the registry, where `runs` and `status` find it from anywhere."""

from can_train.config.resolved import ResolvedRun
from can_train.errors import StateError
from can_train.reporter import Reporter
from can_train.state.documents import utc_now
from can_train.state.registry import Registry, RunRecord
from can_train.training.folders import state_dir
from can_train.training.run_folder import RunFolder


def make_run(run: ResolvedRun, reporter: Reporter) -> RunFolder:
    """Makes a run that trains here and now; where the registry cannot be written, with a notice.

    Raises:
        RunError: The folder cannot be written.
    """
    folder = RunFolder.create(run.runs_dir, run.key, run.config)
    try:
        enter(run, folder)
    except StateError as error:
        reporter.notice(f"This run is not listed by `can-train runs`. {error}")
    return folder


def enter(run: ResolvedRun, folder: RunFolder, *, identity: str = "", after: str = "", sweep: str = "") -> None:
    """Enters a run into the registry.

    Raises:
        StateError: The registry cannot be written.
    """
    record = RunRecord(
        run_id=folder.run_id,
        path=str(folder.path.resolve()),
        key=run.key,
        time=utc_now(),
        identity=identity,
        after=after,
        sweep=sweep,
    )
    Registry(state_dir(run.paths)).add(record)
