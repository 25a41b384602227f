"""`can-train logs RUN [-f]`: prints the log of a run, or follows it to the end of the run."""

import codecs
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from can_train.cli.output import print_aside, print_log
from can_train.cli.run_locator import RunLocator, RunOrSweep, RunsDir, StateDir
from can_train.errors import RUN_FAILED, ConfigError, RunError
from can_train.io.records import open_regular
from can_train.reporter import COLUMNS, wrapped
from can_train.runs.run_folder import short_name
from can_train.runs.run_state import FINISHED, RunFacts
from can_train.runs.status import KnownRun, RunStatus, read_tail, run_logs, run_statuses
from can_train.runs.sweep_runs import has_failed
from can_train.slurm import client as slurm

_READ_INTERVAL_S: Final = 0.5
_STATUS_INTERVAL_S: Final = 5.0  # between two questions to SLURM, whose controller everybody shares
_READ_BYTES: Final = 2**20
_END_LINES: Final = 5  # of the log of each run of a sweep
_CUT_OFF: Final = re.compile(r"(?:\r|\x1b(?:\[[\d;:]{0,64})?)\Z")
# Lines by which submitit tells how it loads and ends a job's function; they do not belong to the run's output.
_OF_SUBMITIT: Final = re.compile(r"^submitit INFO \([^)\n]*\) - .*\n?", re.MULTILINE)
_OF_SUBMITIT_BEGIN: Final = "submitit INFO ("
_RANK: Final = re.compile(r"_(\d+)_log\.(out|err)$")  # submitit's names of logs end in the rank


def logs(
    run: RunOrSweep,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    rank: Annotated[int, typer.Option(help="Process of a run that has several.", min=0)] = 0,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Print the log of a run; with -f, follow it across requeues and new jobs. Of a sweep, the end of each log."""
    locator = RunLocator(runs_dir, state_dir)
    sweep, (known_run, *others) = locator.find_any(run)
    if sweep:
        if follow or rank:
            raise ConfigError(f"{'-f' if follow else '--rank'} goes with a single run", value=sweep,
                              remedy="Name one of its runs: can-train status lists the failed ones")  # fmt: skip
        _print_ends(run_statuses([known_run, *others], locator.registry, slurm))
        return
    if known_run.label:
        _note(f"Run {known_run.run_id}: {known_run.label}")
    if follow:
        state = _follow(locator, known_run, rank).state
        _note(f"Run {known_run.run_id}: {state}")
        raise typer.Exit(0 if state.state == FINISHED else RUN_FAILED)
    status = locator.status(known_run)
    *earlier, newest = log_paths(status.facts, known_run, rank)
    if not _print_new(GrowingLog(newest)):
        waits = f". can-train logs {run} -f waits for it" if status.state.live else ""
        _note(f"There is no log of this run, or it is empty ({status.state}){waits}")
    for path in earlier:
        _note(f"The log of an earlier job: {path}")


def _print_ends(statuses: Sequence[RunStatus]) -> None:
    """Prints the last lines of the log of each run, the failed runs last, where a terminal shows them."""
    for status in sorted(statuses, key=has_failed):
        known = status.known
        log = run_logs(status.facts, known)[-1]
        _note(f"{short_name(known.run_id)} {known.label}: {status.state}")
        print_log("".join(f"{line}\n" for line in _OF_SUBMITIT.sub("", read_tail(log)).splitlines()[-_END_LINES:]))


class GrowingLog:
    """A file that another process appends to; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        # A read may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def new_text(self) -> str:
        """Returns the text appended since the last call, at most 1 MiB.

        Lines of submitit are left out. A control sequence that a read cuts off comes with its rest or, at the end
        of the file, as it is.
        """
        try:
            with open_regular(self.path) as handle:
                handle.seek(self._position)
                data = handle.read(_READ_BYTES)
        except OSError:
            return ""
        self._position += len(data)
        text = self._held + self._decoder.decode(data)
        cut = _cut_off(text) if data else len(text)
        self._held = text[cut:]
        shown = _OF_SUBMITIT.sub("", text[:cut])
        return shown or (self.new_text() if data else "")


def _cut_off(text: str) -> int:
    """Returns where an unfinished end of a text begins: a control sequence, or a line that may be submitit's."""
    sequence = _CUT_OFF.search(text)
    last = text.rfind("\n") + 1
    begins, line = _OF_SUBMITIT_BEGIN, text[last:]
    is_open = bool(line) and (line.startswith(begins) or begins.startswith(line))
    return min(sequence.start() if sequence else len(text), last if is_open else len(text))


def log_paths(facts: RunFacts, known_run: KnownRun, rank: int) -> list[Path]:
    """Lists the logs of one rank of a run, the oldest first.

    Raises:
        RunError: This rank has written none.
    """
    paths = run_logs(facts, known_run)
    if not rank:
        return paths
    # The logs of the ranks lie beside the log of rank 0.
    ranks = [0] if paths[-1].is_file() else []
    if (match := _RANK.search(paths[-1].name)) is not None:
        prefix = paths[-1].name[: match.start()]
        names = [path.name for path in paths[-1].parent.glob("*_log.*") if path.name.startswith(f"{prefix}_")]
        # Array element 7_3 has logs 7_3_RANK_log.out; logs of element 7_30 match the glob, but not the expression.
        matches = [_RANK.fullmatch(name.removeprefix(prefix)) for name in names]
        ranks = sorted({int(match[1]) for match in matches if match})
    if rank not in ranks:
        listed = ", ".join(map(str, ranks)) or "0"
        raise RunError(f"Rank {rank} has written no log yet", remedy=f"Ranks with a log: {listed}")
    return [path.with_name(_RANK.sub(rf"_{rank}_log.\2", path.name)) for path in paths]


def _follow(locator: RunLocator, known_run: KnownRun, rank: int) -> RunStatus:
    """Prints the newest log as it grows, switches to the log of a new job, and returns when the run has ended."""
    log, is_noted = None, False
    while True:
        status = locator.status(known_run)
        try:
            paths = log_paths(status.facts, known_run, rank)
        except RunError:
            # Ranks begin one after another: those after the first may yet write theirs.
            if not rank or not status.state.live:
                raise
            time.sleep(_READ_INTERVAL_S)
            paths = []
        if paths and (log is None or log.path != paths[-1]):
            if log is not None:
                _print_new(log)
                _note(f"The run goes on in another log: {paths[-1]}")
            log = GrowingLog(paths[-1])
        end = time.monotonic() + (_STATUS_INTERVAL_S if status.state.live else 0.0)
        printed = log is not None and _print_new(log)
        while log is not None and time.monotonic() < end:
            time.sleep(_READ_INTERVAL_S)
            printed = _print_new(log) or printed
        if not status.state.live:
            # The process prints its last lines after it has written the result, with which the run ends.
            is_quiet = log is None
            while log is not None and not is_quiet:
                time.sleep(_READ_INTERVAL_S)
                is_quiet = not _print_new(log)
            return status
        if not printed and not is_noted:
            _note(f"Waiting ({status.state})")
        is_noted = True


def _print_new(log: GrowingLog) -> bool:
    printed = False
    while text := log.new_text():
        print_log(text)
        printed = True
    return printed


def _note(text: str) -> None:
    # Not into standard output, which is the log's.
    print_aside(wrapped(text, COLUMNS))
