"""`can-train signals LOG`: the fields of each CAN ID's payload, found from the log alone or named by a database (DBC).

Shapes: M frames of an ID, B payload bytes, F fields with values, T moments of a grid.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from can_train.cli.output import print_aside, print_json, print_note, print_tables, working
from can_train.errors import CanTrainError, ConfigError, unknown_name
from can_train.reporter import COLUMNS, TextTable, wrapped

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from can_train.reporter import Reporter
    from can_train_tasks.can.data.database import Database, DatabaseMessage, DatabaseSignal
    from can_train_tasks.can.data.dataset import CanData
    from can_train_tasks.can.data.graphs import Floats, Frames
    from can_train_tasks.can.data.payload_fields import Field
    from can_train_tasks.can.settings import CanDatasetSettings

GRID_S: Final = 0.1  # seconds between moments at which values of different IDs are compared
LEAST_MOMENTS: Final = 100
TIED: Final = 0.9  # least correlation of two values that are told to move together
MOST_NAMED: Final = 8  # IDs that a sentence names
ROUNDING: Final = 1e-6  # raw units by which a value may exceed its declared range
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
    can_ids: Annotated[
        list[str] | None,
        typer.Option("--id", help="Only this CAN ID, in hexadecimal: 1A0; may be given several times.", metavar="ID"),
    ] = None,
    dbc: Annotated[
        Path | None, typer.Option(help="Show the signals of this database (DBC), in physical units.", metavar="FILE")
    ] = None,
    channel: Annotated[str | None, typer.Option(help="Only the frames of one interface: can0.", metavar="NAME")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the signals of a log: counters, checksums, values.

    No database is needed: how often each bit flips tells where a field begins and ends.
    """
    wanted = [_parse_id(each) for each in can_ids or ()]
    # Imported late: --help must not wait for NumPy and the readers.
    from can_train_tasks.can.data.database import Database

    database = None if dbc is None else (Database.read(dbc), dbc.name)
    with working("Reading the logs"):
        read = [_benign_frames(log, channel or "") for log in logs]
        frames = [each for each, _ in read]
        report = report_signals(frames, wanted) if database is None else report_declared(frames, wanted, *database)
    for sentence in [sentence for _, sentences in read for sentence in sentences]:
        print_note(sentence)
    if as_json:
        print_json(report.plain)
        return
    print_tables([report.table])
    for sentence in report.asides:
        print_aside(wrapped(sentence, COLUMNS, hang="  "))


class SignalReport(NamedTuple):
    """The signals of logs, as a table and as plain values."""

    table: TextTable
    asides: Sequence[str]  # sentences below the table
    plain: Any  # strict JSON


def report_signals(logs: Sequence[Frames], wanted: Collection[int] = ()) -> SignalReport:
    """Finds the fields of the IDs of several logs, or of the IDs `wanted` if there are any.

    Raises:
        ConfigError: The logs lack an ID.
    """
    from can_train.io.units import counted

    messages = _messages(logs)
    found = [signal for signal in _signals(messages) if not wanted or signal.can_id in wanted]
    ids = _chosen_ids(messages, wanted)
    rows = [row for each in ids for row in _rows(messages[each], each, found)]
    without = sum(not any(signal.can_id == each for signal in found) for each in ids)
    told = f"{counted(without, 'ID', 'have')} constant payloads or fewer than 20 frames: see --json"
    return SignalReport(TextTable(f"Signals of {counted(len(ids), 'CAN ID')}", _COLUMNS, tuple(rows), _LEGEND),
                        [told] if without else [], [_plain(messages[each], each, found) for each in ids])  # fmt: skip


def training_signals(dataset: CanDatasetSettings, data_root: Path, cache: Path, reporter: Reporter) -> SignalReport:
    """Finds the signals of the benign frames that a run was trained on; its database names them, if it has one.

    Raises:
        DataError: A log cannot be read.
    """
    from can_train_tasks.can.data.database import Database, packed_name
    from can_train_tasks.can.data.dataset import load_data

    frames = _training_frames(load_data(dataset, data_root, cache, reporter), dataset)
    if not dataset.dbc:
        return report_signals(frames)
    return report_declared(frames, (), Database.unpack(dataset.dbc), packed_name(dataset.dbc))


def _training_frames(data: CanData, dataset: CanDatasetSettings) -> list[Frames]:
    """Reads the frames of the benign training windows of each log again."""
    import numpy as np

    from can_train_tasks.can.data.graphs import Frames
    from can_train_tasks.can.data.reading import LogReader, decide_bases

    flat, rows = data.flat, data.split.train[data.flat.label[data.split.train] == 0]
    paths = [Path(source.path) for source in flat.sources]
    settings, _ = decide_bases(paths, dataset)
    logs = []
    for source in np.unique(flat.source[rows]).tolist():
        frames = Frames.concatenate(list(LogReader(paths[source], settings[paths[source]]).blocks()))
        first = flat.first_frame[rows[flat.source[rows] == source]]
        chosen = np.zeros(len(frames), np.bool_)
        chosen[(first[:, None] + np.arange(flat.window)).ravel()] = True
        logs.append(frames[chosen])
    return logs


def _chosen_ids(ids: Iterable[int], wanted: Collection[int]) -> list[int]:
    from can_train_tasks.can.data.graphs import id_text

    known = set(ids)
    if not known:
        raise ConfigError("The logs have no benign frames", remedy="Name other logs")
    for each in {*wanted} - known:
        raise unknown_name("CAN ID", id_text(each), map(id_text, known), more="; without --id all are shown")
    return sorted({*wanted} or known)


_LEGEND: Final = (
    "bits: counted from 0, the first byte's most significant bit",
    "opaque: changes without measure, as a cipher or an unknown checksum",
    "little-endian: the least significant byte comes first",
    "as: the value of another ID that moves alike, with the correlation",
)
_DECLARED_LEGEND: Final = (_LEGEND[0], "outside: share of the frames with a value outside the declared range")
_DECLARED_COLUMNS: Final = ("signal", "unit", "from", "to", "declared", "notes")


def report_declared(logs: Sequence[Frames], wanted: Collection[int], database: Database, name: str) -> SignalReport:
    """Decodes the signals that a database (called `name`) declares for the IDs of several logs.

    Raises:
        ConfigError: The logs lack an ID of `wanted`.
    """
    import numpy as np

    from can_train.io.units import counted
    from can_train_tasks.can.data.graphs import Frames, id_text

    frames = Frames.concatenate(logs)
    ids = _chosen_ids(np.unique(frames.can_id).tolist(), wanted)
    messages = {each: message for each in ids if (message := database.message(each)) is not None}
    plain = [_declared(logs, can_id, message) for can_id, message in messages.items()]
    unknown = [{"id": id_text(each), "frames": int(np.count_nonzero(frames.can_id == each))}
               for each in ids if each not in messages]  # fmt: skip
    seen = {message.can_id for message in messages.values()}
    unseen = [{"id": id_text(each.can_id), "message": each.name}
              for each in database.messages if not wanted and each.can_id not in seen]  # fmt: skip
    asides = []
    if unknown:
        listed = _listed([str(each["id"]) for each in unknown])
        asides.append(f"{counted(len(unknown), 'ID', 'are')} not in {name}: {listed}")
    if unseen:
        listed = _listed([f"{each['id']} {each['message']}" for each in unseen])
        verb = "occurs" if len(unseen) == 1 else "occur"
        asides.append(f"{counted(len(unseen), 'message')} of {name} never {verb}: {listed}")
    title = f"Signals of {counted(len(messages), 'CAN ID')}, as {name} declares them"
    rows = tuple(row for each in plain for row in _declared_rows(each))
    whole = {"dbc": name, "messages": plain, "unknown_ids": unknown, "unseen_messages": unseen}
    return SignalReport(TextTable(title, _DECLARED_COLUMNS, rows, _DECLARED_LEGEND), asides, whole)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (", …" if len(names) > MOST_NAMED else "")


def _declared(logs: Sequence[Frames], can_id: int, message: DatabaseMessage) -> dict[str, Any]:
    """Decodes the frames of an ID: for each signal its range, and the share of frames outside the declared range."""
    import numpy as np

    from can_train_tasks.can.data.graphs import Frames, id_text

    own = [frames[frames.can_id == can_id] for frames in logs]
    gaps = np.concatenate([np.diff(part.timestamp) for part in own])
    frames = Frames.concatenate(own)
    signals, covered = [], np.zeros_like(frames.payload)
    for signal, where, values in message.decode(frames.payload, frames.length):
        covered[where] |= np.packbits(np.isin(np.arange(8 * covered.shape[1]), signal.bits))
        finite = values[np.isfinite(values)]
        if len(finite):
            signals.append(_observed(signal, finite, int(np.count_nonzero(where))))
    return {"id": id_text(can_id), "message": message.name, "frames": len(frames),
            "period_s": float(np.median(gaps)) if len(gaps) else None, "signals": signals,
            "moving_bits_without_signal": _moving(frames, covered)}  # fmt: skip


def _observed(signal: DatabaseSignal, values: Floats, frames: int) -> dict[str, Any]:
    import numpy as np

    low, high = float(values.min()), float(values.max())
    # Rounding of a declared limit is no violation.
    slack = abs(signal.scale) * ROUNDING
    below = signal.low is not None and values < signal.low - slack
    above = signal.high is not None and values > signal.high + slack
    return {"name": signal.name, "unit": signal.unit, "frames": frames, "from": low, "to": high,
            "declared_from": signal.low, "declared_to": signal.high,
            "outside": round(float(np.mean(below | above)), 6),
            "multiplexer": signal.multiplexer or None, "pages": list(signal.pages)}  # fmt: skip


def _moving(frames: Frames, covered: NDArray[Any]) -> list[int]:
    """Returns the bits that change among the frames in which no signal covers them."""
    import numpy as np

    there = np.where(np.arange(covered.shape[1]) < frames.length[:, None], ~covered, 0).astype(np.uint8)
    ones, zeros = (np.bitwise_or.reduce(bits & there, axis=0) for bits in (frames.payload, ~frames.payload))
    moving: list[int] = np.flatnonzero(np.unpackbits(ones & zeros)).tolist()
    return moving


def _declared_rows(message: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields a row for a message, and below it a row for each signal."""
    period = [] if message["period_s"] is None else [f"every {1000 * message['period_s']:.3g} ms"]
    moving = _runs(message["moving_bits_without_signal"])
    without = [f"no signal for moving bits {moving}"] if moving else []
    yield f"{message['id']} {message['message']}", "", "", "", "", ", ".join([*period, *without])
    for signal in message["signals"]:
        declares = signal["declared_from"] is not None
        declared = f"{signal['declared_from']:,.6g}..{signal['declared_to']:,.6g}" if declares else ""
        pages = ", ".join(map(str, signal["pages"]))
        notes = [f"if {signal['multiplexer']} is {pages}"] if signal["multiplexer"] else []
        notes += ["never moves"] if signal["from"] == signal["to"] else []
        notes += [f"{_share(signal['outside'])} outside"] if signal["outside"] else []
        yield (f"  {signal['name']}", signal["unit"], f"{signal['from']:,.6g}", f"{signal['to']:,.6g}", declared,
               ", ".join(notes))  # fmt: skip


def _share(share: float) -> str:
    return "all" if share == 1 else f"{max(100 * share, 0.1):.3g} %"


def _runs(bits: Sequence[int]) -> str:
    """Writes ascending numbers, with successive numbers as ranges: 3, 8-15."""
    firsts = [bit for bit in bits if bit - 1 not in bits]
    lasts = [bit for bit in bits if bit + 1 not in bits]
    return ", ".join(f"{first}-{last}" if first < last else str(first)
                     for first, last in zip(firsts, lasts, strict=True))  # fmt: skip


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


def _benign_frames(log: Path, channel: str) -> tuple[Frames, list[str]]:
    """Reads the benign frames of a log; also returns sentences about its faults.

    Raises:
        ConfigError: There is no such log.
        DataError: The log cannot be read.
    """
    from can_train_tasks.can.data.graphs import Frames
    from can_train_tasks.can.data.reading import LogReader
    from can_train_tasks.can.settings import CanDatasetSettings

    if not log.is_file():
        rule = "A log is a file, and this is a folder" if log.is_dir() else "There is no such log"
        raise ConfigError(rule, value=str(log), remedy="Name a file that candump or a logger wrote")
    try:
        reader = LogReader(log, CanDatasetSettings(path=str(log), channel=channel))
        blocks = list(reader.blocks())
    except CanTrainError as error:
        # `signals` takes no settings of a data set.
        if "--set" in error.remedy:
            error.remedy = "Save the log in one of these formats, as candump -l does"
        raise
    if not blocks:
        raise ConfigError("The log has no frames", value=str(log), remedy="Name another log")
    frames = Frames.concatenate(blocks)
    return frames[frames.label == 0], reader.report.summary()


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
