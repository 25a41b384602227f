"""`can-train detect RUN`: a finished run watches a CAN bus."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from can_train.cli.output import print_aside, print_text, print_wrapped
from can_train.cli.run_locator import Run, RunLocator, RunsDir, StateDir, TrustCode
from can_train.errors import ConfigError, with_command_name
from can_train.reporter import COLUMNS, wrapped
from can_train_tasks.can.evaluation.alarm_command import AlarmCommand, alarm_argv
from can_train_tasks.can.evaluation.options import AlarmRule, AlarmsPerHour, Calibrate, HoldOption, Threshold

if TYPE_CHECKING:
    from can_train_tasks.can.evaluation.live import LiveEvent, LiveRun

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def detect(  # noqa: PLR0913 - Typer makes an option of each argument
    run: Run,
    *,
    input_: Annotated[
        str,
        typer.Option("--input", help="- is standard input (candump); a CAN interface: can0; or a log.", metavar="WHAT"),
    ] = "-",
    threshold: Threshold = None,
    calibrate: Calibrate = None,
    alarms_per_hour: AlarmsPerHour = None,
    hold: HoldOption = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Name the CAN IDs that drove each alarm, and their properties.")
    ] = False,
    channel: Annotated[
        str | None,
        typer.Option(help="Watch one interface of an input that has several: can0. [each by itself]", metavar="NAME"),
    ] = None,
    alarm_command: Annotated[
        str | None,
        typer.Option(
            help="Start this for each alarm and its end, with the event as JSON on standard input.", metavar="COMMAND"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto.")] = "cpu",
    trust_code: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each event.")] = False,
    runs_dir: RunsDir = "runs",
    state_dir: StateDir = None,
) -> None:
    """Watch a bus live with a finished run: candump can0 | …

    Alarms are printed as they are raised, until the input ends or Ctrl-C.
    """
    with _stopping_at_signals():
        for name, value in {"input": input_, "device": device, "channel": channel}.items():
            if value == "":
                raise ConfigError(f"--{name} is empty", remedy="Give a value, or leave the flag out")
        argv = None if alarm_command is None else alarm_argv(alarm_command)
        rule = AlarmRule(threshold=threshold, calibrate_s=calibrate, alarms_per_hour=alarms_per_hour, hold=hold)
        locator = RunLocator(runs_dir, state_dir)
        record = locator.find(run)
        # Imported late: an error in the command line must not wait for Hydra and torch.
        from can_train_tasks.can.evaluation.live import DetectionRequest, LiveRun

        request = DetectionRequest(run=record.folder.path, source=input_, channel=channel or "", rule=rule,
                                   explain=explain, device=device,
                                   trust=locator.trust(trusts_all=trust_code))  # fmt: skip
        live = LiveRun(request)
        command = None if argv is None else AlarmCommand(argv, _tell)
        try:
            print_aside(f"Run {record.run_id} watches {'standard input' if input_ == '-' else input_}")
            _watch(live, command, as_json=as_json)
        except BrokenPipeError:
            # The reader of standard output has gone. Typer would exit with 1.
            raise SystemExit(128 + signal.SIGPIPE) from None
        finally:
            for sentence in [*live.summary(), *(command.summary() if command is not None else [])]:
                _tell(sentence)
            live.close()


def _watch(live: LiveRun, command: AlarmCommand | None, *, as_json: bool) -> None:
    """Prints the events of an input, and hands them to the alarm command."""
    try:
        _print_events(live.events(), command, as_json=as_json)
    finally:
        try:
            # The alarms that are raised also end when Ctrl-C stops the loop.
            _print_events(live.finish(), command, as_json=as_json)
        finally:
            if command is not None:
                command.close()


def _tell(sentence: str) -> None:
    """Prints a sentence to standard error, whose reader a second Ctrl-C may have ended."""
    with suppress(BrokenPipeError):
        print_aside(wrapped(f"{sentence}.", COLUMNS, hang="  "))


def _print_events(events: Iterable[LiveEvent], command: AlarmCommand | None, *, as_json: bool) -> None:
    for event in events:
        if command is not None:
            command.see(event.record)
        if as_json:
            print_text(json.dumps(event.record, allow_nan=False))
        elif sys.stdout.isatty():
            print_wrapped(event.text)
        else:
            # A program that reads the events gets one event on each line.
            print_text(with_command_name(event.text))


@contextmanager
def _stopping_at_signals() -> Iterator[None]:
    """Turns SIGINT and SIGTERM into an exit with 128 + the signal's number."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {}
    # Only the main thread may set signal handlers.
    with suppress(ValueError):
        before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
