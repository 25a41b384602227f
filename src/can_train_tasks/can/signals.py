"""`can-train signals LOG`: the fields of each CAN ID's payload, found from the log alone.

Shapes: M frames of an ID, B payload bytes, F fields with values, T moments of a grid.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from can_train.cli.output import print_aside, print_json, print_tables, working
from can_train.errors import ConfigError
from can_train.reporter import TextTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from can_train_tasks.can.data.graphs import Floats, Frames
    from can_train_tasks.can.data.payload_fields import Field

GRID_S: Final = 0.1  # seconds between moments at which values of different IDs are compared
LEAST_MOMENTS: Final = 100
TIED: Final = 0.9  # least correlation of two values that are told to move together
_COLUMNS: Final = ("ID", "every ms", "bits", "page", "kind", "from", "to", "notes")


@dataclass(frozen=True, kw_only=True)
class PayloadSignal:
    """A field of an ID, and the value of another ID that it follows most closely."""

    can_id: int
    field: Field
    tied_to: str = ""
    correlation: float = 0.0


def signals(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Logs of one vehicle, in any format.")],
    *,
    can_id: Annotated[
        str | None, typer.Option("--id", help="Only this CAN ID, in hexadecimal: 1A0.", metavar="ID")
    ] = None,
    channel: Annotated[str | None, typer.Option(help="Only the frames of one interface: can0.", metavar="NAME")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the signals of a log: counters, checksums, values.

    No database is needed: how often each bit flips tells where a field begins and ends.
    """
    wanted = None if can_id is None else _parse_id(can_id)
    # Imported late: --help must not wait for NumPy and the readers.
    from can_train_tasks.can.data.graphs import counted, id_text

    with working("Reading the logs"):
        frames = [_benign_frames(log, channel or "") for log in logs]
        messages = _messages(frames)
        found = [signal for signal in _signals(messages) if wanted in (None, signal.can_id)]
    ids = sorted({each for each in messages if wanted in (None, each)})
    if not ids:
        raise ConfigError("The logs have no such CAN ID" if wanted is not None else "The logs have no frames",
                          value="" if wanted is None else id_text(wanted),
                          remedy="Leave out --id: all IDs are listed")  # fmt: skip
    if as_json:
        print_json([_plain(messages[each], each, found) for each in ids])
        return
    rows = [row for each in ids for row in _rows(messages[each], each, found)]
    print_tables([TextTable(f"Signals of {counted(len(ids), 'CAN ID')}", _COLUMNS, tuple(rows), _LEGEND)])
    without = sum(not any(signal.can_id == each for signal in found) for each in ids)
    if without:
        print_aside(f"{counted(without, 'ID', 'have')} constant payloads or fewer than 20 frames: see --json")


_LEGEND: Final = (
    "bits: counted from 0, the first byte's most significant bit",
    "opaque: changes without measure, as a cipher or an unknown checksum",
    "little-endian: the least significant byte comes first",
    "as: the value of another ID that moves alike, with the correlation",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedMessage:
    """The frames of one ID in several logs."""

    times_s: Sequence[Floats]  # [M] of each log
    payloads: Sequence[Any]  # [M, B] of each log
    period_s: float  # median time between frames; NaN for a single frame


def _parse_id(text: str) -> int:
    try:
        return int(text.strip().lower().removeprefix("0x"), 16)
    except ValueError:
        raise ConfigError("--id is no hexadecimal CAN ID", value=repr(text), remedy="Write it like --id 1A0") from None


def _benign_frames(log: Path, channel: str) -> Frames:
    from can_train_tasks.can.data.graphs import Frames
    from can_train_tasks.can.data.reading import LogReader
    from can_train_tasks.can.settings import CanDatasetSettings

    if not log.is_file():
        rule = "A log is a file, and this is a folder" if log.is_dir() else "There is no such log"
        raise ConfigError(rule, value=str(log), remedy="Name a file that candump or a logger wrote")
    blocks = list(LogReader(log, CanDatasetSettings(path=str(log), channel=channel)).blocks())
    if not blocks:
        raise ConfigError("The log has no frames", value=str(log), remedy="Name another log")
    frames = Frames.concatenate(blocks)
    return frames[frames.label == 0]


def _messages(logs: Sequence[Frames]) -> Mapping[int, LoggedMessage]:
    """Sorts frames by ID. Of an ID with payloads of several lengths, the most frequent length is taken."""
    import numpy as np

    messages = {}
    for can_id in np.unique(np.concatenate([frames.can_id for frames in logs])).tolist():
        own = [frames[frames.can_id == can_id] for frames in logs]
        length = int(np.bincount(np.concatenate([part.length for part in own])).argmax())
        own = [part[part.length == length] for part in own]
        gaps = np.concatenate([np.diff(part.timestamp) for part in own])
        messages[can_id] = LoggedMessage(
            times_s=[part.timestamp for part in own],
            payloads=[part.payload[:, :length] for part in own],
            period_s=float(np.median(gaps)) if len(gaps) else float("nan"),
        )
    return messages


def _signals(messages: Mapping[int, LoggedMessage]) -> list[PayloadSignal]:
    import numpy as np

    from can_train_tasks.can.data.graphs import id_text
    from can_train_tasks.can.data.payload_fields import VALUE, find_fields

    plain = [PayloadSignal(can_id=can_id, field=field)
             for can_id, message in messages.items() if message.payloads[0].shape[1]
             for field in find_fields(message.payloads)]  # fmt: skip
    values = [signal for signal in plain if signal.field.kind == VALUE and signal.field.page is None]
    grid = _on_grid(messages, values)
    if len(values) < 2 or grid.shape[0] < LEAST_MOMENTS:
        return plain
    spread = grid.std(axis=0)
    table = np.where(spread > 0, (grid - grid.mean(axis=0)) / np.where(spread > 0, spread, 1), 0.0)
    correlation = table.T @ table / len(table)
    owner = np.array([signal.can_id for signal in values])
    correlation[owner[:, None] == owner] = 0.0
    tied = dict(zip(values, values, strict=True))
    for place, signal in enumerate(values):
        best = int(np.abs(correlation[place]).argmax())
        if abs(correlation[place, best]) >= TIED:
            other = values[best]
            name = f"{id_text(other.can_id)}:{other.field.start}-{other.field.stop - 1}"
            tied[signal] = replace(signal, tied_to=name, correlation=round(float(correlation[place, best]), 3))
    return [tied.get(signal, signal) for signal in plain]


def _on_grid(messages: Mapping[int, LoggedMessage], values: Sequence[PayloadSignal]) -> Floats:
    """Returns the latest values [T, F] at each moment, less their mean in each log."""
    import numpy as np

    parts = [np.empty((0, len(values)))]
    for log in range(len(next(iter(messages.values())).times_s) if values else 0):
        times = [messages[signal.can_id].times_s[log] for signal in values]
        if any(not len(each) for each in times):
            continue
        moments = np.arange(max(each[0] for each in times), min(each[-1] for each in times), GRID_S)
        columns = [signal.field.read(messages[signal.can_id].payloads[log])[np.searchsorted(each, moments, "right") - 1]
                   for signal, each in zip(values, times, strict=True)]  # fmt: skip
        table = np.stack(columns, axis=1).astype(np.float64)
        parts.append(table - table.mean(axis=0) if len(table) else table)
    return np.concatenate(parts)


def _rows(message: LoggedMessage, can_id: int, found: Sequence[PayloadSignal]) -> list[tuple[str, ...]]:
    from can_train_tasks.can.data.graphs import id_text

    rows: list[tuple[str, ...]] = []
    for signal in found:
        if signal.can_id != can_id:
            continue
        field = signal.field
        order = ["little-endian"] * field.little_endian + ["signed"] * field.signed
        tie = [f"as {signal.tied_to} {signal.correlation:.2f}"] if signal.tied_to else []
        first = not rows
        rows.append((id_text(can_id) if first else "", f"{1000 * message.period_s:.3g}" if first else "",
                     f"{field.start}-{field.stop - 1}", "" if field.page is None else str(field.page), field.kind,
                     f"{field.low:,}", f"{field.high:,}",
                     ", ".join([*filter(None, [field.note]), *order, *tie])))  # fmt: skip
    return rows


def _plain(message: LoggedMessage, can_id: int, found: Sequence[PayloadSignal]) -> dict[str, Any]:
    from can_train_tasks.can.data.graphs import id_text

    fields = [
        {**asdict(signal.field), "as": signal.tied_to or None, "correlation": signal.correlation or None}
        for signal in found
        if signal.can_id == can_id
    ]
    period_s = None if message.period_s != message.period_s else message.period_s
    return {"id": id_text(can_id), "frames": sum(map(len, message.payloads)), "period_s": period_s,
            "bytes": int(message.payloads[0].shape[1]), "fields": fields}  # fmt: skip
