"""Grammars of CSV files with a header: which column holds what, as the person named it or as its name tells, and
whether IDs are decimal or hexadecimal.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import polars as pl

from can_train.errors import DataError, unknown_name
from can_train.tasks.can.formats import (
    BYTE,
    CELL,
    DIGITS,
    HEX,
    MAX_CAN_ID,
    NUMBER,
    PUBLISHED_CSV_GRAMMARS,
    Grammar,
    first_row,
)
from can_train.tasks.can.settings import CanDatasetSettings, ColumnSettings

DELIMITERS: Final = ",;\t"

SYNONYMS: Final = {
    "timestamp": ("timestamp", "timestamps", "time", "times", "ts", "epoch", "seconds"),
    "id": ("canid", "arbitrationid", "arbid", "canidentifier", "identifier", "messageid", "msgid", "id", "aid"),
    "dlc": ("dlc", "length", "len", "datalength", "datalen"),
    "data": ("data", "datafield", "payload", "databytes", "datahex"),
    "label": ("label", "labels", "attack", "class", "flag", "isattack", "anomaly"),
}
"""What a column's name may be, most telling first, in lower case and without anything but letters and digits."""

_BYTE_COLUMN: Final = re.compile(r"(?:data|databyte|byte|payload|d|b)(\d)")
"""A column of one payload byte, such as `data_0`, `DATA[0]` or `byte 1`."""

_REQUIRED: Final = ("timestamp", "id", "data")

_DATA_SEPARATORS: Final = " :._-"

_CONTENT: Final = {
    "timestamp": f"(?P<timestamp>{NUMBER})",
    "dlc": "(?P<dlc>[0-9]*)",
    "id": f"(?:0[xX])?(?P<id>{HEX})",
    "data": f"(?:0[xX])?(?P<data>(?:{BYTE}[{_DATA_SEPARATORS}]*)*)",
}
"""What stands in a column, without the blanks and quotes around it."""

_DECIMAL_ID: Final = f"(?P<id>{DIGITS})"
_WRITTEN_ID: Final = f"(?P<id>(?:0[xX])?{HEX})"

_ID_ASSUMPTION: Final = (
    "CAN IDs were read as decimal numbers, for want of any sign of hexadecimal; if they are hexadecimal, say "
    "`--set dataset.id_base=hex`"
)


@dataclass(frozen=True)
class _Header:
    """The first line of a CSV file.

    Attributes:
        line: As it stands in the file.
        delimiter: What stands between two cells.
        names: The cells.
    """

    line: str
    delimiter: str
    names: list[str]


def header_grammars(sample: pl.Series, settings: CanDatasetSettings) -> list[Grammar]:
    """Makes the grammars that a log's first line allows, if it is a CSV header; a published layout comes first.

    Args:
        sample: The log's first lines, null where empty.
        settings: Which columns hold what, as far as the person said.

    Raises:
        ConfigError: A column was named that the header does not have.
        DataError: Columns were asked for, and one that is needed is neither named nor recognised.
    """
    header = _read_header(sample)
    asked = settings.columns != ColumnSettings()
    published = [] if asked else [grammar for grammar in PUBLISHED_CSV_GRAMMARS if grammar.header == header.line]
    roles = _find_roles(header.names, settings.columns)
    missing = [role for role in _REQUIRED if role not in roles]
    if not missing:
        return [*published, _columns_grammar(header, roles, sample, settings.id_base)]
    if asked or settings.format == "columns":
        raise DataError(
            f"A CSV file with a header must have a column for each of {', '.join(_REQUIRED)}",
            value=f"no {missing[0]} column among {', '.join(header.names)}",
            remedy=f"Name it with `--set dataset.columns.{missing[0]}=...`",
        )
    return published


def _read_header(sample: pl.Series) -> _Header:
    _, line = first_row(sample)
    delimiter = max(DELIMITERS, key=line.count)
    try:
        names = next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:  # A cell beyond the parser's limit: no header.
        names = []
    return _Header(line, delimiter, [name.strip() for name in names])


def _columns_grammar(header: _Header, roles: Mapping[str, list[int]], sample: pl.Series, id_base: str) -> Grammar:
    ids = sample.str.extract_groups(_row_pattern(header, roles, id_content=_WRITTEN_ID)).struct.field("id").drop_nulls()
    decimal = id_base == "dec" or (id_base == "auto" and not looks_hexadecimal(ids))
    return Grammar(
        name="columns",
        pattern=_row_pattern(header, roles, id_content=_DECIMAL_ID if decimal else _CONTENT["id"]),
        separators=_DATA_SEPARATORS,
        id_base=10 if decimal else 16,
        byte_columns=len(roles["data"]) if len(roles["data"]) > 1 else 0,
        anything=f'[^"{header.delimiter}]',
        header=header.line,
        assumption=_ID_ASSUMPTION if id_base == "auto" and decimal and not surely_decimal(ids) else "",
    )


def looks_hexadecimal(ids: pl.Series) -> bool:
    """Tells whether any ID, as text, has a letter (as in `0x` too) or a leading zero: decimal numbers have neither."""
    return bool(ids.str.contains("[A-Za-z]|^0[0-9]").any())


def surely_decimal(ids: pl.Series) -> bool:
    """Tells whether any ID would have more than 29 bits if it were hexadecimal."""
    return bool((ids.str.to_integer(base=16, dtype=pl.UInt64, strict=False) > MAX_CAN_ID).any())


def _row_pattern(header: _Header, roles: Mapping[str, list[int]], *, id_content: str = _CONTENT["id"]) -> str:
    """Builds the regular expression of a row with as many cells as the header has."""
    # Quotes around the delimiter, doubled quotes inside quotes: both are runs of unquoted and quoted text.
    anything = f'(?:[^"{header.delimiter}]|"[^"]*")*'
    cells = [anything for _ in header.names]
    for role, columns in roles.items():
        for i, column in enumerate(columns):
            if role == "label":
                cells[column] = f"(?P<label>{anything})"
            elif len(columns) > 1:
                cells[column] = f'[ "]*(?:0[xX])?(?P<data_{i}>{CELL})[ "]*'
            else:
                cells[column] = f'[ "]*{id_content if role == "id" else _CONTENT[role]}[ "]*'
    return f"^{header.delimiter.join(cells)}[ \\r]*$"


def _find_roles(names: list[str], columns: ColumnSettings) -> dict[str, list[int]]:
    """Finds the columns of each role; what the person named is not taken for anything else."""
    named = {role: _named(names, name, role) for role, name in asdict(columns).items() if name}
    taken = [column for found in named.values() for column in found]
    if len(set(taken)) < len(taken):
        raise DataError(
            "A column of a log holds one thing", value=f"{names[max(taken, key=taken.count)]!r} was named for several"
        )
    free = ["" if column in taken else name for column, name in enumerate(names)]
    recognised = {role: _recognised(free, role) for role in SYNONYMS if role not in named}
    return {role: found for role, found in (named | recognised).items() if found}


def _named(names: list[str], name: str, role: str) -> list[int]:
    wanted = name.split() if role == "data" and name not in names else [name]
    for one in wanted:
        if one not in names:
            raise unknown_name(f"column (dataset.columns.{role})", one, names)
    return [names.index(one) for one in wanted]


def _recognised(names: list[str], role: str) -> list[int]:
    plain = [re.sub("[^a-z0-9]", "", name.casefold()) for name in names]
    for synonym in SYNONYMS[role]:
        if synonym in plain:
            return [plain.index(synonym)]
    return _byte_columns(plain) if role == "data" else []


def _byte_columns(plain: list[str]) -> list[int]:
    """Columns of one payload byte each, in the order of their numbers, which count from 0 or 1."""
    column_by_number = {int(match[1]): i for i, name in enumerate(plain) if (match := _BYTE_COLUMN.fullmatch(name))}
    numbers = sorted(column_by_number)
    if not numbers or numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return []
    return [column_by_number[number] for number in numbers]
