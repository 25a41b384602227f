"""`can-train top`: the runs that train or wait, redrawn in a terminal until q; in a pipe, a line for each."""

import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from can_train.cli.output import full_screen, print_json, print_note, print_text
from can_train.cli.run_locator import AsJson, RunLocator, RunsDir, StateDir
from can_train.errors import printable, with_command_name
from can_train.io.records import parse_object
from can_train.io.units import counted, duration, number_or_none
from can_train.report.run_facts import head_facts, listed_json, next_commands, seconds_of
from can_train.report.run_list import RunFilter, RunList
from can_train.runs.run_folder import short_name
from can_train.runs.run_state import LIVE, RUNNING, live_row
from can_train.runs.status import RunStatus, read_tail
from can_train.slurm import client as slurm

if TYPE_CHECKING:
    from rich.console import RenderableType

_INTERVAL_S: Final = 5.0  # between two questions to SLURM, whose controller everybody shares
_FRAME: Final = 4  # lines of a screen that are no runs
_LEAST_ROWS: Final = 3
_ESCAPE_S: Final = 0.05  # after which a lone escape character is no key's beginning
_KEYS: Final = {"\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down",
                "\r": "open", "\n": "open", "\x1b": "back", "q": "quit", "\x03": "quit"}  # fmt: skip
_COLUMNS: Final = ("run", "state", "step", "steps/s", "loss", "mem", "left", "what")
_UNKNOWN: Final = "-"


def top(
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=1.0)] = _INTERVAL_S,
    as_json: AsJson = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Watch all runs that train or wait: progress, speed, loss, memory and time left. Arrows choose a run, Enter opens
    it, q ends. In a pipe: a line for each run.
    """
    locator = RunLocator(runs_dir, state_dir)
    locator.check_folder()
    if as_json:
        print_json([listed_json(status) for status in live_runs(locator)])
        return
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        rows = [*map(make_row, live_runs(locator))]
        for row in rows:
            print_text("  ".join(row))
        if not rows:
            print_note("No run trains or waits")
        return
    with suppress(KeyboardInterrupt):
        _watch(locator, interval)


def live_runs(locator: RunLocator) -> list[RunStatus]:
    """Returns the runs that train or wait, the newest first."""
    listed = RunList(locator.runs(), locator.state_folder, slurm).select(RunFilter(states=LIVE))
    return listed.statuses(listed.runs)


def make_row(status: RunStatus) -> tuple[str, ...]:
    """Writes the cells of a run, in the order of `_COLUMNS`."""
    progress, seconds, record = status.progress, seconds_of(status), status.known.record
    step, steps = progress.step, progress.steps
    is_running = status.state.state == RUNNING
    rate = step / seconds if is_running and step and seconds else None
    left_s = (steps - step) / rate if rate and steps and step is not None else None
    last = parse_object(read_tail(status.known.folder.path / "steps.jsonl").rstrip().rpartition("\n")[2])
    loss = number_or_none(last.get("loss"))
    what = status.known.label or record.key
    # The word of SLURM, which has room in the list; the opened run has the sentence.
    row = live_row(status.facts)
    what = f"{row.reason}: {what}" if not is_running and row and row.reason else what
    return (
        short_name(record.run_id),
        status.state.label,
        f"{step or 0}/{steps}" if steps else f"{step or 0}",
        f"{rate:.3g}" if rate else _UNKNOWN,
        f"{loss:.4g}" if loss is not None else _UNKNOWN,
        f"{progress.peak_share:.0%}" if progress.peak_share is not None else _UNKNOWN,
        duration(left_s) if left_s is not None else _UNKNOWN,
        what,
    )


@dataclass
class _View:
    """What the screen shows."""

    statuses: Sequence[RunStatus] = ()
    chosen: str = ""  # id of the chosen run
    is_open: bool = False

    @property
    def place(self) -> int:
        ids = [status.known.run_id for status in self.statuses]
        return ids.index(self.chosen) if self.chosen in ids else 0

    def press(self, key: str) -> bool:
        """Acts on a key: moves in the list, opens a run, goes back; returns whether the screen goes on."""
        if key in ("up", "down") and self.statuses:
            place = min(max(0, self.place + (1 if key == "down" else -1)), len(self.statuses) - 1)
            self.chosen = self.statuses[place].known.run_id
        elif key == "open":
            self.is_open = not self.is_open and bool(self.statuses)
        elif key == "back" and self.is_open:
            self.is_open = False
        elif key in ("quit", "back"):
            return False
        return True

    def draw(self, height: int) -> "RenderableType":
        """Draws the list, or the chosen run."""
        if self.is_open and self.statuses:
            return _draw_run(self.statuses[self.place])
        return _draw_list(self.statuses, self.place, height)


def _draw_list(statuses: Sequence[RunStatus], place: int, height: int) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    running = sum(status.state.state == RUNNING for status in statuses)
    title = f"{counted(running, 'run')} running, {len(statuses) - running} waiting  {time.strftime('%H:%M:%S')}"
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=True, header_style="bold")
    for name in _COLUMNS:
        is_text = name in ("run", "state", "what")
        is_last = name == _COLUMNS[-1]
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True,
                         overflow="ellipsis" if is_last else "crop", ratio=1 if is_last else None)  # fmt: skip
    rows = max(_LEAST_ROWS, height - _FRAME)
    first = max(0, min(place - rows // 2, len(statuses) - rows))
    for index, status in enumerate(statuses[first : first + rows], start=first):
        cells = [Text(printable(cell)) for cell in make_row(status)]
        table.add_row(*cells, style="reverse" if index == place else "")
    more = len(statuses) - rows
    keys = "↑↓ choose  Enter open  q quit" + (f"  ({more} more)" if more > 0 else "")
    return Group(Text(title, style="bold"), table, Text(keys, style="dim"))


def _draw_run(status: RunStatus) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    cells = zip(_COLUMNS[2:], make_row(status)[2:], strict=True)
    facts = [*head_facts(status, status.known.config), *cells]
    lines = [f"{name:<9}{text}" for name, text in facts]
    lines += ["", *(f"  {line}" for line in next_commands(status)), "", "Enter back  q quit"]
    return Group(*(Text(printable(with_command_name(line))) for line in lines))


def _watch(locator: RunLocator, interval: float) -> None:
    """Redraws the terminal until a person ends it."""
    view = _View(live_runs(locator))
    with _keys() as keys, full_screen(view.draw) as redraw:
        looked = time.monotonic()
        while True:
            for key in keys.wait(max(0.0, looked + interval - time.monotonic())):
                if not view.press(key):
                    return
            if time.monotonic() >= looked + interval:
                view.statuses, looked = live_runs(locator), time.monotonic()
            redraw()


class _Keys:
    """The keys that are pressed in a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> list[str]:
        """Waits for a key at most so many seconds; returns the meanings of those that were pressed."""
        text = self._read(seconds)
        # The rest of a key's sequence may arrive a moment later.
        if text.endswith("\x1b"):
            text += self._read(_ESCAPE_S)
        keys = []
        while text:
            key = next((key for key in sorted(_KEYS, key=len, reverse=True) if text.startswith(key)), text[0])
            keys.append(_KEYS.get(key, ""))
            text = text[len(key) :]
        return keys

    def _read(self, seconds: float) -> str:
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return ""
        # The end of the input is the end of the terminal.
        return os.read(self._descriptor, 1024).decode(errors="replace") or "q"


@contextmanager
def _keys() -> Iterator[_Keys]:
    """Reads keys without waiting for the end of a line; the terminal is put back after the block."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before: Any = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
