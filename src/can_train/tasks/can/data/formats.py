"""The log formats: CSV files with any header, and how a log's format is recognised by its first lines."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import polars as pl

from can_train.errors import DataError, unknown_name
from can_train.tasks.can.data.clocks import TICKS_PER_SECOND, guess_unit, plain_name, unit_of_name
from can_train.tasks.can.data.grammar import (
    BYTE,
    CELL,
    DATE,
    DIGITS,
    HEX,
    MAX_CAN_ID,
    NUMBER,
    TIMESTAMP,
    Grammar,
    ParsedRows,
    first_row,
    parse_rows,
)
from can_train.tasks.can.data.line_formats import LINE_GRAMMARS, PUBLISHED_CSV_GRAMMARS, dated, line_grammars

if TYPE_CHECKING:
    from can_train.tasks.can.settings import CanDatasetSettings, ColumnSettings

RECOGNISED_LINES: Final = 1000  # enough to outvote damaged rows, parsed by all grammars in milliseconds
RECOGNISED_SHARE: Final = 0.5  # of those rows must be well-formed: with fewer, the grammar matches by accident

_DELIMITERS: Final = ",;\t"
_REQUIRED_ROLES: Final = ("timestamp", "id", "data")
# Names of columns, the most specific first, in lower case and without anything but letters and digits.
_COLUMN_NAMES: Final = {
    "timestamp": ("timestamp", "time", "ts", "epoch", "timestampepoch", "datetime", "date"),
    "id": ("canid", "arbitrationid", "arbid", "canidentifier", "identifier", "messageid", "msgid", "id", "aid"),
    "dlc": ("dlc", "length", "len", "datalength", "datalen"),
    "data": ("data", "datafield", "payload", "databytes", "datahex"),
    "label": ("label", "labels", "attack", "class", "flag", "isattack", "anomaly"),
    "channel": ("channel", "iface", "interface", "bus", "canchannel", "caninterface", "canbus", "busid", "buschannel"),
}
# A column of one payload byte, such as `data_0`, `DATA[0]` or `byte 1`.
_BYTE_COLUMN: Final = re.compile(r"(?:data|databyte|byte|payload|d|b)(\d\d?)")
_DATA_SEPARATORS: Final = " :._-"
# The content of a column, without the blanks and quotes around it.
_CONTENT: Final = {
    "timestamp": TIMESTAMP,
    "dlc": "(?P<dlc>[0-9]*)",
    "id": f"(?:0[xX])?(?P<id>{HEX})",
    "data": f"(?:0[xX])?(?P<data>(?:{BYTE}[{_DATA_SEPARATORS}]*)*)",
}
_DECIMAL_ID: Final = f"(?P<id>{DIGITS})"
_ID_WITH_PREFIX: Final = f"(?P<id>(?:0[xX])?{HEX})"
_DECIMAL_ASSUMPTION: Final = (
    "CAN IDs were read as decimal numbers, because none has a letter or a leading zero; if they are hexadecimal, use "
    "`--set dataset.id_base=hex`"
)


_MOST: Final = 0.9  # of the times have at most as many digits
_CHANNEL_GROUP: Final = re.compile(r"\(\?P<channel>[^()]*\)")
_SHOWN_CHARACTERS: Final = 80  # of a malformed row


class _Header(NamedTuple):
    line: str  # the first one of a CSV file
    delimiter: str
    names: list[str]


def header_grammars(sample: pl.Series, settings: CanDatasetSettings) -> list[Grammar]:
    """Makes the grammars that a log's first line allows, if it is a CSV header; a published format comes first.

    Args:
        sample: The log's first lines, null where empty.
        settings: The columns and the ID base that the user chose.

    Raises:
        ConfigError: The header lacks a column that the user named.
        DataError: The user asked for columns, and one that is needed is neither named nor recognised.
    """
    _, line = first_row(sample)
    delimiter = max(_DELIMITERS, key=line.count)
    try:
        names = next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:  # A cell beyond the parser's limit: no header.
        names = []
    header = _Header(line, delimiter, [name.strip() for name in names])
    asked = any(asdict(settings.columns).values())
    published = [] if asked else [grammar for grammar in PUBLISHED_CSV_GRAMMARS if grammar.header == header.line]
    roles = _find_roles(header.names, settings.columns)
    missing = [role for role in _REQUIRED_ROLES if role not in roles]
    if not missing:
        return [*published, _columns_grammar(header, roles, sample, settings.id_base)]
    if asked or settings.format == "columns":
        raise DataError(f"A CSV file with a header must have a column for each of {', '.join(_REQUIRED_ROLES)}",
                        value=f"no {missing[0]} column among {', '.join(header.names)}",
                        remedy=f"Name it with `--set dataset.columns.{missing[0]}=NAME`")  # fmt: skip
    return published


def _columns_grammar(header: _Header, roles: Mapping[str, list[int]], sample: pl.Series, id_base: str) -> Grammar:
    any_time = f"(?P<timestamp>{NUMBER}|{DATE})"
    pattern = _row_pattern(header, roles, _ID_WITH_PREFIX).replace(TIMESTAMP, any_time)
    ids = sample.str.extract_groups(pattern).struct.field("id").drop_nulls()
    unit = unit_of_name(header.names[roles["timestamp"][0]], _COLUMN_NAMES["timestamp"])
    decimal = id_base == "dec" or (id_base == "auto" and not looks_hexadecimal(ids))
    guessed = id_base == "auto" and decimal and not too_large_for_hexadecimal(ids)
    return Grammar(
        name="columns",
        pattern=_row_pattern(header, roles, _DECIMAL_ID if decimal else _CONTENT["id"]),
        separators=_DATA_SEPARATORS,
        id_base=10 if decimal else 16,
        byte_columns=len(roles["data"]) if len(roles["data"]) > 1 else 0,
        fd_groups=("timestamp",),
        ticks_per_second=TICKS_PER_SECOND.get(unit or "", 1),
        unit_known=bool(unit),
        any_character=f'[^"{header.delimiter}]',
        header=header.line,
        assumption=_DECIMAL_ASSUMPTION if guessed else "",
    )


def looks_hexadecimal(ids: pl.Series) -> bool:
    """Returns whether any ID, as text, has a letter (as in `0x` too) or a leading zero, which no decimal number has."""
    return bool(ids.str.contains("[A-Za-z]|^0[0-9]").any())


def too_large_for_hexadecimal(ids: pl.Series) -> bool:
    """Returns whether any ID would have more than 29 bits if it were hexadecimal, so that all must be decimal."""
    return bool((ids.str.to_integer(base=16, dtype=pl.UInt64, strict=False) > MAX_CAN_ID).any())


def _row_pattern(header: _Header, roles: Mapping[str, list[int]], id_content: str) -> str:
    # Quotes around the delimiter, doubled quotes inside quotes: both are runs of unquoted and quoted text.
    any_cell = f'(?:[^"{header.delimiter}]|"[^"]*")*'
    cells = [any_cell for _ in header.names]
    for role, columns in roles.items():
        for i, column in enumerate(columns):
            if role == "label":
                cells[column] = f"(?P<label>{any_cell})"
            elif role == "channel":
                cells[column] = f'[ "]*(?P<channel>[^"{header.delimiter}]*?)[ "]*'
            elif len(columns) > 1:
                cells[column] = f'[ "]*(?:0[xX])?(?P<data_{i}>{CELL})[ "]*'
            else:
                cells[column] = f'[ "]*{id_content if role == "id" else _CONTENT[role]}[ "]*'
    return f"^{header.delimiter.join(cells)}[ \\r]*$"


def _find_roles(names: list[str], columns: ColumnSettings) -> dict[str, list[int]]:
    """Returns the columns of each role. A column that the user named has no second role."""
    named = {}
    for role, name in asdict(columns).items():
        if name:
            wanted = name.split() if role == "data" and name not in names else [name]
            if unknown := [one for one in wanted if one not in names]:
                raise unknown_name(f"column (dataset.columns.{role})", unknown[0], names)
            named[role] = [names.index(one) for one in wanted]
    taken = [column for found in named.values() for column in found]
    if len(set(taken)) < len(taken):
        raise DataError("A column of a log holds one thing",
                        value=f"{names[max(taken, key=taken.count)]!r} was named for several",
                        remedy="Name a different column for each: `--set dataset.columns.id=NAME`")  # fmt: skip
    free = ["" if column in taken else name for column, name in enumerate(names)]
    recognised = {role: _recognised_columns(free, role) for role in _COLUMN_NAMES if role not in named}
    return {role: found for role, found in (named | recognised).items() if found}


def _recognised_columns(names: list[str], role: str) -> list[int]:
    plain = [plain_name(name) for name in names]
    for synonym in _COLUMN_NAMES[role]:
        if synonym in plain:
            return [plain.index(synonym)]
    if role == "timestamp":
        units = [unit_of_name(name, _COLUMN_NAMES[role]) for name in names]
        return [column for column, unit in enumerate(units) if unit is not None][:1]
    if role != "data":
        return []
    # One column per byte: their numbers count from 0 or 1, without a hole.
    column_by_number = {int(match[1]): i for i, name in enumerate(plain) if (match := _BYTE_COLUMN.fullmatch(name))}
    numbers = sorted(column_by_number)
    whole = any(numbers == list(range(first, first + len(numbers))) for first in (0, 1))
    return [column_by_number[number] for number in numbers] if whole else []


class Recognised(NamedTuple):
    """How a log is written."""

    grammar: Grammar
    narrow: Grammar | None  # the same for rows of `channel` without a label, which is faster; None where it is not
    channel: str  # of all of the first rows


def recognise(sample: pl.Series, settings: CanDatasetSettings, path: Path) -> Recognised:
    """Returns the grammar that reads most of a log's first rows.

    Raises:
        ConfigError: The log lacks a column that the user named.
        DataError: The log is of no known format, or has no rows.
    """
    known = dated([*header_grammars(sample, settings), *line_grammars(sample)], sample)
    grammars = [grammar for grammar in known if settings.format in ("auto", grammar.name)]
    if not grammars:
        raise _unrecognised(settings.format, path, *first_row(sample))
    first = sample.head(RECOGNISED_LINES)
    # Most formats read no row; a look at each takes a tenth of the time of parsing.
    grammars = [grammar for grammar in grammars if first.str.contains(grammar.pattern).any()] or grammars[:1]
    parsed = [parse_rows(first, grammar) for grammar in grammars]
    num_good = [len(rows.position) for rows in parsed]
    # Another grammar may take an error frame for one without a payload.
    left_out = [rows.error_frames + rows.xl_frames for rows in parsed]
    rarely = [_is_rarely_labelled(grammar, rows, settings) for grammar, rows in zip(grammars, parsed, strict=True)]
    best = int(np.argmax([good + left - rare / 2 for good, left, rare in zip(num_good, left_out, rarely, strict=True)]))
    num_rows = num_good[best] + len(parsed[best].malformed)
    if num_rows == 0:
        raise DataError("A log must hold frames", value=f"{path} holds no rows", remedy="Give another log")
    if num_good[best] < RECOGNISED_SHARE * num_rows:
        if settings.format == "auto" and not grammars[best].header:
            raise _unrecognised(settings.format, path, *first_row(sample))
        raise _unrecognised(settings.format, path, *parsed[best].malformed.row(0)[:3])
    grammar = with_unit(grammars[best], settings.time_unit, parsed[best], first)
    return _narrowed(grammar, parsed[best])


def _is_rarely_labelled(grammar: Grammar, rows: ParsedRows, settings: CanDatasetSettings) -> bool:
    """Returns whether a grammar needs a label in each row although none of the first rows has a benign one: attacks
    alone may be labelled, and the log may begin with some.
    """
    if rows.label is None or grammar.unlabelled_rows:
        return False
    benign = {value.casefold() for value in settings.benign_values}
    words = {word.casefold() for label in rows.label.unique().to_list() for word in (label.split() or [""])}
    return not words & benign


def with_unit(grammar: Grammar, wanted: str, rows: ParsedRows, sample: pl.Series) -> Grammar:
    """Sets the unit of a grammar's times: `wanted`, or the guessed one (auto) where the grammar does not know it.

    Args:
        grammar: The grammar.
        wanted: The setting `dataset.time_unit`.
        rows: What the grammar reads of the first lines.
        sample: The first lines, null where empty.
    """
    if grammar.dated or (wanted == "auto" and grammar.unit_known):
        return grammar
    if wanted != "auto":
        return replace(grammar, ticks_per_second=TICKS_PER_SECOND[wanted], unit_known=True)
    times = sample.str.extract_groups(grammar.pattern).struct.field("timestamp").drop_nulls()
    decimals = times.str.extract(r"\.([0-9]*)").str.len_chars().fill_null(0).quantile(_MOST)
    unit, note = guess_unit(rows.timestamp, rows.can_id, int(decimals or 0))
    assumption = ". ".join(filter(None, (grammar.assumption, note)))
    return replace(grammar, ticks_per_second=TICKS_PER_SECOND[unit], unit_known=True, assumption=assumption)


def _narrowed(grammar: Grammar, rows: ParsedRows) -> Recognised:
    unlabelled = rows.label is None or rows.label.null_count() == len(rows.label)
    pattern = grammar.usual if grammar.usual and unlabelled else grammar.pattern
    channel = ""
    if rows.channel is not None and rows.channel.n_unique() == 1 and rows.channel[0] is not None:
        channel = str(rows.channel[0])
        pattern = _CHANNEL_GROUP.sub(lambda _: re.escape(channel), pattern)
    narrow = replace(grammar, pattern=pattern) if pattern != grammar.pattern else None
    return Recognised(grammar, narrow, channel)


def _unrecognised(wanted: str, path: Path, position: int, line: str, reason: str = "") -> DataError:
    names = dict.fromkeys(grammar.name for grammar in (*PUBLISHED_CSV_GRAMMARS, *LINE_GRAMMARS))
    all_formats = f"one of the formats {', '.join(names)}, columns"
    return DataError(
        f"A CAN log must be in {all_formats if wanted == 'auto' else f'the format {wanted}, as was asked for'}",
        value=f"{path}:{position + 1}: {shortened(line)!r}" + (f": {reason}" if reason else ""),
        remedy=(
            "If it is a CSV file with a header, name its columns: `--set dataset.columns.id=NAME` (the same for "
            "timestamp, data, dlc, label); or choose the format: `--set dataset.format=FORMAT`"
        ),
    )


def shortened(text: str) -> str:
    """Cuts a row to a length that fits into a message."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
