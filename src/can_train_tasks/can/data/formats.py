"""The log formats: CSV files with any header, and how a log's format is recognised by its first lines."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import polars as pl

from can_train.errors import DataError, unknown_name
from can_train_tasks.can.data.clocks import TICKS_PER_SECOND, guess_unit, plain_name, unit_of_name
from can_train_tasks.can.data.grammar import (
    ATTACK_WORDS,
    BAD_DECIMALS,
    BAD_ID,
    BAD_PAYLOAD,
    BAD_TIMESTAMP,
    BYTE,
    CELL,
    CLOCK,
    DATE,
    DECIMAL_CELL,
    DIGITS,
    HEX,
    MAX_CAN_ID,
    NUMBER,
    TIMESTAMP,
    Grammar,
    ParsedRows,
    first_row,
    label_word,
    parse_rows,
)
from can_train_tasks.can.data.line_formats import (
    LINE_GRAMMARS,
    PUBLISHED_CSV_GRAMMARS,
    RESAVED_CAR_HACKING,
    line_grammars,
    variants,
)
from can_train_tasks.can.data.payload_fields import MAX_PAYLOAD_BYTES
from can_train_tasks.can.settings import BENIGN_WORDS, MISSING_WORDS

if TYPE_CHECKING:
    from can_train_tasks.can.settings import CanDatasetSettings, ColumnSettings

NO_ROWS: Final = "The log holds no rows"
RECOGNISED_LINES: Final = 1000  # enough to outvote damaged rows, parsed by all grammars in milliseconds
RECOGNISED_SHARE: Final = 0.5  # least share of well-formed rows: with a smaller share, the grammar matches by accident

_FEW_IDS: Final = 8  # fewer IDs than any vehicle's bus has
_COMMENT: Final = "^[ \\t]*#"
_CUT_OFF_SHARE: Final = 0.01  # share of the rows that may have lost their label
_DELIMITERS: Final = ",;\t"
_REQUIRED_ROLES: Final = ("timestamp", "id", "data")
# Names of columns whose true cells mark benign frames.
_BENIGN_COLUMNS: Final = ("isbenign", "isnormal", "islegitimate", "benign", "normal", "legitimate")
# Names of columns, the most specific first: only letters and digits, in lower case.
_COLUMN_NAMES: Final = {
    "timestamp": ("timestamp", "time", "ts", "epoch", "timestampepoch", "datetime", "date"),
    "id": ("canid", "arbitrationid", "arbid", "canidentifier", "identifier", "messageid", "msgid", "address", "addr",
           "id", "aid"),
    # The length in bytes goes before CAN FD's code for it, which CANedge loggers write too.
    "dlc": ("datalength", "datalen", "dlc", "length", "len", "messagelength"),
    "data": ("data", "datafield", "payload", "databytes", "datahex", "message"),
    "label": ("label", "labels", "attack", "class", "isattack", "anomaly", "attacklabel", "labelattack", "isanomaly",
              "ismalicious", "malicious", "isinjected", "injected", "isintrusion", "intrusion", "attacked",
              "groundtruth", "attackflag", "classlabel", "attackclass", "attacktype", "flag", "target", "category",
              *_BENIGN_COLUMNS),
    "remote": ("rtr", "remote", "isremote", "isremoteframe", "remoteframe"),
    "error": ("iserrorframe", "errorframe", "iserror", "error"),
    "channel": ("channel", "iface", "interface", "bus", "canchannel", "caninterface", "canbus", "busid", "buschannel"),
}  # fmt: skip
# Names of columns of labels, and of other columns, too: their cells decide.
_UNSURE_LABELS: Final = frozenset({"flag", "target", "category"})
_UNSURE_LETTERS: Final = frozenset({"flag"})  # R and T are labels, as in Car-Hacking; X and S are kinds of frames
# Columns of known tools that are neither read nor labels.
_OTHER_NAMES: Final = {
    "index", "unnamed0", "no", "nr", "number", "counter", "count", "ide", "extended", "isextended", "isextendedid",
    "isfd", "fd", "fdf", "edl", "brs", "esi", "dir", "direction", "rxtx", "flags", "name",
    "sender", "comment", "interval", "ascii", "crc", "ack", "vehicle", "source",
}  # fmt: skip
# A column of one payload byte, such as `data_0`, `DATA[0]` or `byte 1`.
_BYTE_COLUMN: Final = re.compile(r"(?:data|databyte|byte|payload|d|b)(\d\d?)")
_DATA_SEPARATORS: Final = " :._-"
_LIST_SEPARATORS: Final = " ,"
# The content of a column, without the blanks and quotes around it.
_CONTENT: Final = {
    "timestamp": TIMESTAMP,
    "dlc": r"(?P<dlc>[0-9]*)(?:\.0)?",
    "id": f"(?:0[xX])?(?P<id>{HEX})[xXhH]?",
    "data": f"(?:0[xX])?(?P<data>(?:{BYTE}[{_DATA_SEPARATORS}]*)*)",
}
_HEX, _DEC = "hex", "dec"
_WORDS: Final = {_HEX: "hexadecimal", _DEC: "decimal"}
_NUMBERS: Final = {"id_base": "CAN IDs", "byte_base": "payload bytes"}  # by the setting of their base
# Reasons for a base that neither the numbers nor the training data tell.
_WHY: Final = {_DEC: "because none has a letter or a leading zero",
               _HEX: "as CAN IDs are, although none has a letter or a leading zero"}  # fmt: skip
# This many different numbers of two digits or more without a letter are decimal: in hexadecimal numbers, three in eight
# digits are letters.
_MANY: Final = 20
# Columns of a log from CANedge's converter: all numbers except lengths and times are hexadecimal.
_CANEDGE_COLUMNS: Final = {"timestampepoch", "buschannel", "databytes"}
# A label after the last column, where the header names no label column.
_LATE_LABEL: Final = '[ "]*(?P<label>[01]|[A-Za-z_][0-9A-Za-z_ -]*?)?[ "]*'
_LATE_LABEL_OF_BYTES: Final = '[ "]*(?P<label>[A-Za-z_][0-9A-Za-z_ -]{2,}?)?[ "]*'  # a shorter text may be a byte


# The column to blame for a malformed row.
_ROLES_OF_REASONS: Final = {BAD_TIMESTAMP: "timestamp", BAD_ID: "id", BAD_PAYLOAD: "data", BAD_DECIMALS: "data"}
# The look of cells that hold a frame's time, ID or payload.
_LOOKS: Final = {
    "timestamp": re.compile(f"{NUMBER}|{DATE}|{CLOCK}|[0-9]+,[0-9]+"),
    "id": re.compile("(?:0[xX])?[0-9A-Fa-f]{1,9}[xXhH]?"),
    "data": re.compile(f"(?:0[xX])?(?:{BYTE}[{_DATA_SEPARATORS}]*)*|(?:[0-9]{{1,3}}[{_DATA_SEPARATORS}]*)*"),
}
_TRUE: Final = "(?:1|(?i:true|yes))"
_FALSE: Final = "(?:0|(?i:false|no))"
_TRUTH_VALUE: Final = re.compile(f"(?:{_TRUE}|{_FALSE})?")
_CAR_HACKING_COLUMNS: Final = 3 + MAX_PAYLOAD_BYTES  # time, ID, DLC and bytes; most logs have a label, too
_HYDRA_WORDS: Final = frozenset({"true", "false", "null", "inf", "nan"})
_SHOWN_COLUMNS: Final = 6  # columns that a note names
_SHOWN_CHARACTERS: Final = 80  # characters of a malformed row that a message shows


class _Header:
    """The header of a CSV file, in its first lines; a log of another format may have one by accident.

    Attributes:
        line: The line.
        delimiter: The delimiter of cells.
        names: The names of the columns.
        roles: The columns of each role; a column that the user named for one role has no second role.
        missing: The roles that a log needs, and the header lacks.

    Raises:
        ConfigError: The header lacks a column that the user named.
        DataError: The user named a column twice.
    """

    def __init__(self, sample: pl.Series, columns: ColumnSettings) -> None:
        _, self.line = first_row(sample)
        self.delimiter = max(_DELIMITERS, key=self.line.count)
        names = []
        with suppress(csv.Error):  # a cell beyond the parser's limit: no header
            names = next(csv.reader([self.line], delimiter=self.delimiter), [])
        self.names = names = [name.strip() for name in names]
        named = {}
        for role, text in asdict(columns).items():
            wanted = text.split() if role == "data" and text not in names else [text]
            if text and (unknown := [name for name in wanted if name not in names]):
                raise unknown_name(f"column (dataset.columns.{role})", unknown[0], names)
            if text:
                named[role] = [names.index(name) for name in wanted]
        taken = [column for columns in named.values() for column in columns]
        if len(set(taken)) < len(taken):
            raise DataError(f"The column {names[max(taken, key=taken.count)]!r} was named twice",
                            remedy="Name a different column for each: `--set dataset.columns.id=NAME`")  # fmt: skip
        free = ["" if column in taken else name for column, name in enumerate(names)]
        recognised = {role: _recognised_columns(free, role) for role in _COLUMN_NAMES if role not in named}
        self.cells = _first_cells(sample, self.delimiter, len(names))
        if of_ids := recognised.get("id"):
            # The numbers of rows grow from row to row, as CAN IDs never do.
            recognised["id"] = [next((column for column in of_ids if not _grows(self.cells[column])), of_ids[0])]
        if of_labels := recognised.get("label"):
            labels = [column for column in of_labels if self._has_labels(column)]
            # A column without any label stands beside another in some published tables.
            recognised["label"] = sorted(labels, key=lambda column: not self._is_filled(column))[:1]
        # Other tools have counts or texts of errors in such a column.
        recognised["error"] = [column for column in recognised.get("error", ())
                               if self._has_truth_values(column)]  # fmt: skip
        self.roles = {role: columns for role, columns in (named | recognised).items() if columns}
        self.missing = [role for role in _REQUIRED_ROLES if role not in self.roles]
        taken = [column for columns in self.roles.values() for column in columns]
        self.unrecognised = {column: name for column, name in enumerate(names) if name and column not in taken}

    def _has_labels(self, column: int) -> bool:
        """Returns whether the cells of a column look like labels, where its name leaves that open."""
        name, told = plain_name(self.names[column]), not self.cells[column]
        if name in _BENIGN_COLUMNS:
            return self._has_truth_values(column)
        if name not in _UNSURE_LABELS:
            return True
        words = {label_word(cell) for cell in self.cells[column]} - MISSING_WORDS
        known = words & (ATTACK_WORDS | {*BENIGN_WORDS})
        if name in _UNSURE_LETTERS:
            return told or (bool(known) and all(len(word) > 2 and not word.isdecimal() for word in words - known))
        return told or any(len(word) > 2 for word in known)

    @property
    def has_lists(self) -> bool:
        """Whether the payloads are lists with commas."""
        columns = self.roles.get("data", ())
        return len(columns) == 1 and any(cell[:1] in ("[", "(") and "," in cell for cell in self.cells[columns[0]])

    def _has_truth_values(self, column: int) -> bool:
        return all(map(_TRUTH_VALUE.fullmatch, self.cells[column]))

    def _is_filled(self, column: int) -> bool:
        return any(label_word(cell) not in MISSING_WORDS for cell in self.cells[column])

    @property
    def benign_column(self) -> str:
        """Name of the column whose true cells mark benign frames; empty where the labels mark attacks."""
        name = self.name_of("label") if "label" in self.roles else ""
        if plain_name(name) not in _BENIGN_COLUMNS:
            return ""
        return name if self._has_truth_values(self.roles["label"][0]) else ""

    @property
    def other_names(self) -> list[str]:
        """Names of the columns that may have labels: columns without a role that no known tool writes."""
        known = _OTHER_NAMES | {name for role, names in _COLUMN_NAMES.items() if role != "label" for name in names}
        return [name for column, name in self.unrecognised.items()
                if plain_name(name) not in known and not _grows(self.cells[column])]  # fmt: skip

    @property
    def any_cell(self) -> str:
        """The pattern of a cell of any content."""
        # Quotes around the delimiter, doubled quotes inside quotes: both are runs of unquoted and quoted text.
        return f'(?:[^"{self.delimiter}]|"[^"]*")*'

    @property
    def error_frame(self) -> str:
        """The pattern of the rows of error frames; empty where no column marks them."""
        if "error" not in self.roles:
            return ""
        (column,) = self.roles["error"]
        before = column * f"{self.any_cell}{self.delimiter}"
        return f'^{before}[ "]*{_TRUE}[ "]*(?:{self.delimiter}|[ \\r]*$)'

    def name_of(self, role: str) -> str:
        """Returns the name of a role's column, the first of several."""
        return self.names[self.roles[role][0]]

    def join(self, cells: Sequence[str], late: str = "") -> str:
        """Returns the pattern of a row with these cells, and perhaps a cell `late` after them."""
        end = f"(?:{self.delimiter}{late})?" if late else ""
        return f"^{self.delimiter.join(cells)}{end}[ \\r]*$"


def column_roles(sample: pl.Series, columns: ColumnSettings) -> dict[str, list[str]]:
    """Returns the names of a CSV log's columns by their roles; raises as `header_grammars` does.

    Args:
        sample: The log's first lines, null where empty.
        columns: The columns that the user named.
    """
    header = _Header(sample, columns)
    if header.missing:
        raise _no_column(header)
    return {role: [header.names[column] for column in of_role] for role, of_role in header.roles.items()}


def header_grammars(sample: pl.Series, settings: CanDatasetSettings) -> list[Grammar]:
    """Makes the grammars that a log's first line allows, if it is a CSV header; a published format comes first.

    Args:
        sample: The log's first lines, null where empty.
        settings: The columns and the ID base that the user chose.

    Raises:
        ConfigError: The header lacks a column that the user named.
        DataError: The user asked for columns, and a needed column is neither named nor recognised.
    """
    header = _Header(sample, settings.columns)
    asked = any(asdict(settings.columns).values())
    published = [] if asked else [grammar for grammar in PUBLISHED_CSV_GRAMMARS if grammar.header == header.line]
    if not asked and _is_car_hacking(header):
        published += [replace(grammar, header=header.line) for grammar in RESAVED_CAR_HACKING]
    if not header.missing:
        return [*published, *_columns_grammars(header, sample, settings)]
    if asked or settings.format == "columns":
        raise _no_column(header)
    return published


def _no_column(header: _Header) -> DataError:
    return DataError(f"The log has no {header.missing[0]} column", value=f"among {', '.join(header.names)}",
                     remedy=f"Name it with `--set dataset.columns.{header.missing[0]}=NAME`")  # fmt: skip


def _is_car_hacking(header: _Header) -> bool:
    """Returns whether pandas wrote a Car-Hacking log: its columns, numbered or named, may follow the row number."""
    plain = [plain_name(name) for name in header.names]
    plain = plain[1:] if plain[:1] in ([""], ["index"], ["unnamed0"]) else plain
    if header.delimiter != "," or len(plain) < _CAR_HACKING_COLUMNS:
        return False
    roles = zip(plain, ("timestamp", "id", "dlc"), strict=False)
    is_named = all(name in _COLUMN_NAMES[role] for name, role in roles)
    matches = [_BYTE_COLUMN.fullmatch(name) for name in plain[3:_CAR_HACKING_COLUMNS]]
    numbers = [int(match[1]) if match else -1 for match in matches]
    # In another order, the columns are read by their numbers.
    in_order = numbers[0] >= 0 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    return (is_named and in_order) or plain == [str(i) for i in range(len(plain))]


def _columns_grammars(header: _Header, sample: pl.Series, settings: CanDatasetSettings) -> list[Grammar]:
    """Makes the grammar of a CSV file's rows; if the label is the last cell, also a grammar for rows without label."""
    texts = NumberTexts.of(header, settings).read(sample)
    decided, roles = texts.decided(), header.roles
    id_content = _CONTENT["id"] if decided.id_base == _HEX else f"(?P<id>{DIGITS})"
    decimal_bytes = decided.byte_base == _DEC
    each_byte, payload = _DECIMAL_DATA if decimal_bytes else _HEX_DATA
    if header.has_lists:
        payload = _DECIMAL_LIST if decimal_bytes else _HEX_LIST
    cells = _row_cells(header, id_content, (each_byte, payload))
    unit = unit_of_name(header.name_of("timestamp"), _COLUMN_NAMES["timestamp"])
    grammar = Grammar(
        name="columns",
        pattern=header.join(cells),
        separators=_LIST_SEPARATORS if header.has_lists else _DATA_SEPARATORS,
        id_base=16 if decided.id_base == _HEX else 10,
        byte_columns=len(roles["data"]) if len(roles["data"]) > 1 else 0,
        payload_code="decimal" if decimal_bytes else "hex",
        padded=True,
        fd_groups=("timestamp",),
        ticks_per_second=TICKS_PER_SECOND.get(unit or "", 1),
        unit_known=bool(unit),
        any_character=f'[^"{header.delimiter}]',
        header=header.line,
        error_frame=header.error_frame,
        assumption=". ".join(map(str, texts.notes())),
    )
    if "label" not in roles:
        late = _LATE_LABEL_OF_BYTES if grammar.byte_columns else _LATE_LABEL
        return [replace(grammar, pattern=header.join(cells, late), unlabelled_rows=True, late_labels=True)]
    if roles["label"] != [len(cells) - 1]:
        return [grammar]
    return [grammar, replace(grammar, pattern=header.join(cells[:-1], cells[-1]), unlabelled_rows=True)]


class BaseNote(NamedTuple):
    """A note that numbers were read in a base that may be wrong."""

    setting: str  # `id_base` or `byte_base`
    base: str
    fact: str

    @property
    def other_base(self) -> str:
        """The base that was not used."""
        return _DEC if self.base == _HEX else _HEX

    @property
    def doubt(self) -> str:
        """The condition under which the other base is right."""
        return f"if they are {_WORDS[self.other_base]}"

    def __str__(self) -> str:
        return f"{self.fact}; {self.doubt}, use `--set dataset.{self.setting}={self.other_base}`"


@dataclass(frozen=True, kw_only=True)
class NumberTexts:
    """The different texts of the CAN IDs and the payload bytes of CSV logs, which decide their bases.

    Attributes:
        header: The line above the rows.
        pattern: Regular expression of a row with any content.
        settings: Settings, with the bases that the user chose or that a finished run's training data have.
        header_base: The base that the header tells; empty where it tells no base.
        ids: Texts of IDs.
        numbers: Texts of payload bytes; a text longer than a byte is cut to its first digits.
        in_columns: Whether each byte has a separate column.
        separated: Whether any payload in one column has several numbers.
    """

    header: str
    pattern: str
    settings: CanDatasetSettings
    header_base: str
    ids: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    in_columns: bool = False
    separated: bool = False

    @classmethod
    def of(cls, header: _Header, settings: CanDatasetSettings) -> NumberTexts:
        """Begins without texts."""
        base = next((base for base in (_HEX, _DEC) if plain_name(header.name_of("id")).endswith(base)), "")
        if {plain_name(name) for name in header.names} >= _CANEDGE_COLUMNS:
            base = _HEX
        any_number = f'[^"{header.delimiter}]*?'
        any_payload = r"(?:[\[(][^\])]*[\])])?" if header.has_lists else any_number
        data = (f"(?P<data_N>{any_number})", f"(?P<data>{any_payload})")
        cells = _row_cells(header, f"(?P<id>{any_number})", data)
        needed = 1 + max(*header.roles["id"], *header.roles["data"])  # later cells may be missing
        pattern = f"^{header.delimiter.join(cells[:needed])}(?:{header.delimiter}|[ \\r]*$)"
        # Between commas, a decimal comma stands inside quotes.
        any_time = f'(?: *"[-+0-9]+,[0-9]+"|[ "]*{any_number}[ "]*)'
        pattern = pattern.replace(f'[ "]*{TIMESTAMP}[ "]*', any_time)
        return cls(header=header.line, pattern=pattern, settings=settings, header_base=base,
                   in_columns=len(header.roles["data"]) > 1)  # fmt: skip

    def read(self, lines: pl.Series) -> NumberTexts:
        """Adds the texts of lines."""
        rows = lines.filter(lines.str.strip_chars() != self.header)
        fields = rows.str.extract_groups(self.pattern).struct.unnest()
        ids = fields["id"].drop_nulls().unique()
        cells = pl.concat([fields[name] for name in fields.columns if name.startswith("data")]).unique().drop_nulls()
        numbers = cells.str.extract_all(r"\b[0-9A-Fa-fxX]+(?:\.0)?\b")
        # Four digits are more than a byte has; pandas writes three as `171.0`.
        texts = numbers.explode().drop_nulls().str.head(5).unique().to_list()
        return replace(
            self,
            ids=self.ids | {*ids.filter(ids.str.contains("^(?:0[xX])?[0-9A-Fa-f]+[xXhH]?$")).to_list()},
            numbers=self.numbers | {*texts},
            separated=self.separated or bool((numbers.list.len() > 1).any()),
        )

    def joined(self, other: NumberTexts) -> NumberTexts:
        """Adds the texts of another log."""
        return replace(
            self,
            header_base=self.header_base or other.header_base,
            ids=self.ids | other.ids,
            numbers=self.numbers | other.numbers,
            separated=self.separated or other.separated,
        )

    def decided(self) -> CanDatasetSettings:
        """Returns the settings with both bases: the user's, else the texts', else the training data's."""
        settings = self.settings
        id_base = self.id_base() or _trained_base(settings.id_base) or _DEC
        byte_base = self.byte_base() or self.usual_byte_base()
        return replace(
            settings,
            id_base=id_base if _is_open(settings.id_base) else settings.id_base,
            byte_base=byte_base if _is_open(settings.byte_base) else settings.byte_base,
        )

    def certain_id_base(self) -> str:
        """Returns the only possible base of the CAN IDs; empty where both bases are possible."""
        ids = pl.Series([*self.ids], dtype=pl.String)
        if self.header_base or ids.str.contains("[A-Za-z]").any():
            return self.header_base or _HEX
        return _DEC if too_large_for_hexadecimal(ids) else ""

    def id_base(self) -> str:
        """Returns the base of CAN IDs; empty where it is not certain."""
        if certain := self.certain_id_base():
            return certain
        if looks_hexadecimal(pl.Series([*self.ids], dtype=pl.String)):
            return _HEX
        several = [text for text in self.ids if len(text) > 1 and text.isdecimal()]
        # As hexadecimal numbers, standard IDs have three digits.
        small = any(len(text) > 3 and int(text) <= 0x7FF for text in several)
        many = len(several) >= _MANY and not _trained_base(self.settings.id_base)
        return _DEC if small or many else ""

    def byte_base(self) -> str:
        """Returns the base of payload bytes; empty where it is not certain, or makes no difference."""
        if self.header_base == _HEX or (not self.in_columns and not self.separated):
            return _HEX
        whole = {text.removesuffix(".0") for text in self.numbers}
        if any(not text.isdecimal() or (len(text) > 3 and not self.in_columns) for text in whole):
            return _HEX
        if whole != self.numbers or any(len(text) > 2 for text in whole):
            return _DEC
        if any(len(text) == 2 and text.startswith("0") for text in whole):
            return _HEX
        many = len([text for text in whole if len(text) > 1]) >= _MANY
        return _DEC if many and not _trained_base(self.settings.byte_base) else ""

    def usual_byte_base(self) -> str:
        """Returns the likely base of payload bytes, for a base that is not certain."""
        # In one column, hexadecimal numbers have two digits.
        if not self.in_columns and any(len(text) == 1 for text in self.numbers):
            return _DEC
        trained_ids, trained_bytes = map(_trained_base, (self.settings.id_base, self.settings.byte_base))
        # A log whose IDs have another base than in training comes from another program.
        if trained_bytes and self.id_base() in ("", trained_ids):
            return trained_bytes
        return _HEX if not self.in_columns or (self.id_base() or trained_ids) == _HEX else _DEC

    def notes(self) -> list[BaseNote]:
        """Names the bases that are assumed, and the bases that differ from the training data."""
        # Numbers of one digit are equal in both bases, and a payload without separators is always hexadecimal.
        differ = any(len(text) > 1 for text in self.numbers) and (self.in_columns or self.separated)
        notes, decided = [], self.decided()
        for setting, told in {"id_base": self.id_base(), **({"byte_base": self.byte_base()} if differ else {})}.items():
            wanted, taken = getattr(self.settings, setting), getattr(decided, setting)
            trained = _trained_base(wanted)
            if not _is_open(wanted) or (told and trained in ("", told)):
                continue
            why = "as in the training data, because the log does not tell" if taken == trained else _WHY[taken]
            if told:
                why = f"as the log tells, although those of the training data are {_WORDS[trained]}"
            fact = f"{_NUMBERS[setting]} were read as {_WORDS[taken]} numbers, {why}"
            notes.append(BaseNote(setting, taken, fact))
        return notes


def number_texts(sample: pl.Series, settings: CanDatasetSettings) -> NumberTexts | None:
    """Returns the texts of numbers in a log's first lines; None for a log that is no CSV file with an unknown base.

    Raises:
        ConfigError: The header lacks a column that the user named.
        DataError: A column that is needed is neither named nor recognised.
    """
    grammars = header_grammars(sample, settings)
    if not grammars or grammars[0].name != "columns":
        return None
    return NumberTexts.of(_Header(sample, settings.columns), settings).read(sample)


def _is_open(base: str) -> bool:
    return base.startswith("auto")


def _trained_base(base: str) -> str:
    return base.removeprefix("auto").removeprefix("_") if _is_open(base) else ""


def looks_hexadecimal(ids: pl.Series) -> bool:
    """Returns whether any ID, as text, has a letter (as in `0x` too) or a leading zero, which no decimal number has."""
    return bool(ids.str.contains("[A-Za-z]|^0[0-9]").any())


def too_large_for_hexadecimal(ids: pl.Series) -> bool:
    """Returns whether any ID would have more than 29 bits if it were hexadecimal, so that all must be decimal."""
    return bool((ids.str.to_integer(base=16, dtype=pl.UInt64, strict=False) > MAX_CAN_ID).any())


# Patterns of a column with one byte, whose number stands for N, and of a column with the payload.
_HEX_DATA: Final = (f"(?:0[xX])?(?P<data_N>{CELL})", _CONTENT["data"])
_DECIMAL_DATA: Final = (
    f"(?P<data_N>{DECIMAL_CELL})(?:\\.0|(?i:nan))?",  # as pandas writes numbers beside empty cells
    rf"[\[(]?(?P<data>(?:[0-9]{{1,3}}[{_DATA_SEPARATORS}]*)*)[\])]?",
)
# A list with commas, which is one cell since it is quoted: "[1, 16, 255]".
_HEX_LIST: Final = rf"(?:[\[(] *(?P<data>(?:{BYTE}[{_LIST_SEPARATORS}]*)*)[\])])?"
_DECIMAL_LIST: Final = rf"(?:[\[(] *(?P<data>(?:[0-9]{{1,3}}[{_LIST_SEPARATORS}]*)*)[\])])?"


def _row_cells(header: _Header, id_content: str, data_content: tuple[str, str]) -> list[str]:
    any_cell = header.any_cell
    contents = {
        **_CONTENT,
        "id": id_content,
        "data": data_content[1],
        "remote": f'(?:(?P<remote>{_TRUE})|[^"{header.delimiter}]*?)',
        "error": f"{_FALSE}?",
        "channel": f'(?P<channel>[^"{header.delimiter}]*?)',
    }
    cells = [any_cell for _ in header.names]
    for role, columns in header.roles.items():
        for i, column in enumerate(columns):
            content = contents.get(role, "") if len(columns) == 1 else data_content[0].replace("data_N", f"data_{i}")
            cells[column] = f"(?P<label>{any_cell})" if role == "label" else f'[ "]*{content}[ "]*'
    return cells


def _first_cells(sample: pl.Series, delimiter: str, columns: int) -> list[list[str]]:
    """Returns the cells of the first rows, column by column; rows of another length are left out."""
    rows: list[list[str]] = []
    texts = sample.cast(pl.String)
    lines = texts.filter(~texts.str.contains(_COMMENT)).head(RECOGNISED_LINES).to_list()
    with suppress(csv.Error):  # a cell beyond the parser's limit: no header
        rows += csv.reader(lines, delimiter=delimiter)
    rows = [row for row in rows if len(row) == columns][1:]
    return [[row[column].strip() for row in rows] for column in range(columns)]


def _grows(cells: list[str]) -> bool:
    numbers = [int(cell.removesuffix(".0")) for cell in cells if cell.removesuffix(".0").isdecimal()]
    return len(numbers) == len(cells) > 1 and all(before < after for before, after in pairwise(numbers))


def _numbers_rows(header: _Header, name: str) -> bool:
    """Tells whether a column has the numbers of the rows: no time grows by one from row to row."""
    cells = header.cells[header.names.index(name)]
    return _grows(cells) and all(float(after) - float(before) == 1 for before, after in pairwise(cells))


def _recognised_columns(names: list[str], role: str) -> list[int]:
    """Returns the columns of a role. Several may hold the ID or the label: the first is the most likely one."""
    plain = [plain_name(name) for name in names]
    synonyms = [f"{synonym}{base}" for synonym in _COLUMN_NAMES[role] for base in ("", _HEX, _DEC)]
    if named := [plain.index(name) for name in synonyms if name in plain]:
        return named if role in ("id", "label") else named[:1]
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
    """The grammar that a log is written in."""

    grammar: Grammar
    narrow: Grammar | None  # a faster grammar for rows of `channel` without a label; None: no faster grammar
    channel: str  # channel of all first rows
    other_columns: str  # sentence about columns that may have labels; empty where the label is recognised
    benign_column: str = ""  # name of the column of labels, if its true cells mark benign frames


def recognise(sample: pl.Series, settings: CanDatasetSettings, path: Path) -> Recognised:
    """Returns the grammar that reads most of a log's first rows.

    Raises:
        ConfigError: The log lacks a column that the user named.
        DataError: The log is of no known format, or has no rows.
    """
    header, of_header = _Header(sample, settings.columns), header_grammars(sample, settings)
    # The rows of a CSV file may also fit a format without a header.
    if not of_header and settings.format == "auto" and header.unrecognised:
        _refuse_missing_column(header, path)
    grammars = [grammar for grammar in variants([*of_header, *line_grammars(sample)], sample)
                if settings.format in ("auto", grammar.name)]  # fmt: skip
    if not grammars:
        raise _unrecognised(sample, settings.format, path, first_row(sample))
    first = sample.head(RECOGNISED_LINES)
    best, parsed = _best_of(grammars, first, settings)
    if not len(parsed.position) and len(first) < len(sample):
        first = _from_first_frame(sample, grammars)
        best, parsed = _best_of(grammars, first, settings)
    num_rows = len(parsed.position) + len(parsed.malformed)
    if num_rows == 0 or (not len(parsed.position) and first.null_count() > len(first) / 2):
        raise DataError(NO_ROWS, value=str(path), remedy="Give another log")
    if len(parsed.position) < RECOGNISED_SHARE * num_rows:
        if settings.format == "auto" and not best.header:
            _refuse_missing_column(header, path)
            # A row that the likeliest format reads says nothing.
            row = parsed.malformed.row(0)[:3] if len(parsed.position) else first_row(sample)
            raise _unrecognised(sample, settings.format, path, row)
        position, line, reason = bad = parsed.malformed.row(0)[:3]
        role = _ROLES_OF_REASONS.get(reason, "")
        if role not in header.roles:
            raise _unrecognised(sample, settings.format, path, bad)
        raise DataError(f"The column {header.name_of(role)!r} does not hold the {role} of the CSV log's frames",
                        value=f"{path}:{position + 1}: {shortened(line)!r}: {reason}",
                        remedy=_name_column(header, role))  # fmt: skip
    # The periods of IDs tell the unit. A log may begin with a flood: few IDs among the first lines need more lines.
    is_told = len(np.unique(parsed.can_id)) >= _FEW_IDS
    lines, timed = (first, parsed) if is_told else (sample, parse_rows(sample, best))
    grammar, rows = with_unit(best, settings.time_unit, timed, lines), parsed
    unlabelled = rows.label is None or rows.label.null_count() == len(rows.label)
    pattern, channel = grammar.usual if grammar.usual and unlabelled else grammar.pattern, ""
    if rows.channel is not None and rows.channel.n_unique() == 1 and rows.channel[0] is not None:
        channel = str(rows.channel[0])
        pattern = re.sub(r"\(\?P<channel>[^()]*\)", lambda _: re.escape(channel), pattern)
    narrow = replace(grammar, pattern=pattern) if pattern != grammar.pattern else None
    if best.name != "columns":
        return Recognised(grammar, narrow, channel, "")
    return Recognised(grammar, narrow, channel, _told_columns(header), header.benign_column)


def _told_columns(header: _Header) -> str:
    names = header.other_names
    if "label" in header.roles or not names:
        return ""
    listed = ", ".join(map(repr, names[:_SHOWN_COLUMNS])) + (", …" if len(names) > _SHOWN_COLUMNS else "")
    columns = f"column {listed} is" if len(names) == 1 else f"columns {listed} are"
    option = set_option("dataset.columns.label", names[0] if len(names) == 1 else "NAME")
    return f"it has no column of labels, and its {columns} not recognised; a column of labels is named by `{option}`"


def _from_first_frame(sample: pl.Series, grammars: Sequence[Grammar]) -> pl.Series:
    """Returns the first lines of a log that begins with many lines that are no frames, which become null."""
    left_out = sample.str.contains(_COMMENT).fill_null(True)
    for pattern in {grammar.no_row for grammar in grammars} - {""}:
        # ASC takes every line that begins with a letter for no row; it may be a row of another format.
        left_out |= sample.str.contains(pattern) & ~sample.str.contains("^[ \\t]*[A-Za-z]")
    for pattern in {pattern for grammar in grammars for pattern in (grammar.error_frame, grammar.xl_frame)} - {""}:
        left_out |= sample.str.contains(pattern)
    left_out = left_out.fill_null(True)
    num_lines = int(((~left_out).cum_sum() <= RECOGNISED_LINES).sum())
    return sample.set(left_out, None).head(num_lines)


def _best_of(grammars: Sequence[Grammar], first: pl.Series, settings: CanDatasetSettings) -> tuple[Grammar, ParsedRows]:
    """Returns the grammar that reads most of the first rows, the earlier of two that read as many; and these rows."""
    num_lines = len(first) - first.null_count()
    # Most formats match no row; a look at the first rows takes a tenth of the time of parsing.
    matched = {grammar: int(first.str.contains(grammar.pattern).sum()) for grammar in grammars}
    best, rows, most = grammars[0], None, float("-inf")
    for grammar in [grammar for grammar in grammars if matched[grammar]] or grammars[:1]:
        # Another grammar may read an error frame as a frame without a payload.
        most_left_out = num_lines - matched[grammar] if grammar.error_frame or grammar.xl_frame else 0
        if rows is not None and sum((matched[grammar], most_left_out, _CUT_OFF_SHARE * matched[grammar])) <= most:
            continue
        read = parse_rows(first, grammar)
        left_out = read.error_frames + read.xl_frames
        num_read = sum((len(read.position), left_out, _lead_of_labels(grammar, read, settings)))
        if num_read > most:
            best, rows, most = grammar, read, num_read
    assert rows is not None
    return best, rows


def _lead_of_labels(grammar: Grammar, rows: ParsedRows, settings: CanDatasetSettings) -> float:
    """Returns the lead of a grammar that needs a label or a direction in each row, over a grammar that does not.

    The lead is the number of rows that it may read less. A few rows may be cut off and lack the label. Where no row has
    a benign label, only attacks are labelled, and the log may begin with attacks.
    """
    if grammar.has("direction"):
        return _CUT_OFF_SHARE * len(rows.position)
    if rows.label is None or grammar.unlabelled_rows:
        return 0.0
    benign = {label_word(value) for value in settings.benign_values} | MISSING_WORDS
    words = {label_word(word) for label in rows.label.unique().to_list() for word in (label, *label.split())}
    return _CUT_OFF_SHARE * len(rows.position) if words & benign else -0.5


def with_unit(grammar: Grammar, wanted: str, rows: ParsedRows, sample: pl.Series) -> Grammar:
    """Sets the unit of a grammar's times: `wanted`; or, for auto, a guess if the format does not tell the unit.

    Args:
        grammar: The grammar.
        wanted: The setting `dataset.time_unit`.
        rows: The rows that the grammar reads from the first lines.
        sample: The first lines, null where empty.
    """
    if grammar.dated or (wanted == "auto" and grammar.unit_known):
        return grammar
    if wanted != "auto":
        return replace(grammar, ticks_per_second=TICKS_PER_SECOND[wanted], unit_known=True)
    times = sample.str.extract_groups(grammar.pattern).struct.field("timestamp").drop_nulls()
    decimals = times.str.extract(r"\.([0-9]*)").str.len_chars().fill_null(0).quantile(0.9)
    unit, note = guess_unit(rows.timestamp, rows.can_id, int(decimals or 0))
    assumption = ". ".join(filter(None, (grammar.assumption, note)))
    return replace(grammar, ticks_per_second=TICKS_PER_SECOND[unit], unit_known=True, assumption=assumption)


def _refuse_missing_column(header: _Header, path: Path) -> None:
    """Raises DataError for a CSV file whose header names all needed columns but one."""
    if len(header.missing) != 1:
        return
    lacking, names = header.missing[0], ", ".join(map(repr, header.unrecognised.values()))
    has = ", ".join(f"{role} in {header.name_of(role)!r}" for role in _REQUIRED_ROLES if role in header.roles)
    told = f" among {', '.join(map(repr, header.names))}"
    if names:
        told = f"; {names} {'is' if len(header.unrecognised) == 1 else 'are'} not recognised"
    raise DataError(f"The CSV log has no {lacking} column", value=f"{path} has {has}, and no {lacking}{told}",
                    remedy=_name_column(header, lacking))  # fmt: skip


def _name_column(header: _Header, role: str) -> str:
    """Writes the setting that names a role's column: the column without a role that looks most like it."""
    cells = {name: {*header.cells[column]} for column, name in header.unrecognised.items()}
    fitting = [name for name, texts in cells.items()
               if texts and all(map(_LOOKS[role].fullmatch, texts)) and not _numbers_rows(header, name)]  # fmt: skip

    def likeness(name: str) -> tuple[bool, int]:
        return role == "timestamp" and "time" in plain_name(name), len(cells[name])

    name = max(fitting, key=likeness, default="NAME")
    setting = set_option(f"dataset.columns.{role}", name)
    return f"{'Name the column' if fitting else 'Correct the log, or name the column'}: `{setting}`"


def _unrecognised(sample: pl.Series, wanted: str, path: Path, row: tuple[int, str] | tuple[int, str, str]) -> DataError:
    """Makes the error for a log of no known format; `row` is a malformed row, with its reason if known."""
    protocol = next(iter(sample.str.extract(r"^[^*]?\*\*\*PROTOCOL ([^*]+)\*").drop_nulls()), "CAN")
    if protocol != "CAN":
        return DataError(f"The BUSMASTER log is of the protocol {protocol}", value=str(path),
                         remedy="Log the bus as CAN, whose rows are whole frames")  # fmt: skip
    names = dict.fromkeys(grammar.name for grammar in (*PUBLISHED_CSV_GRAMMARS, *LINE_GRAMMARS))
    formats = f"none of the formats {', '.join(names)}, columns"
    return DataError(
        f"The log is in {formats if wanted == 'auto' else f'another format than {wanted}, which was asked for'}",
        value=": ".join([f"{path}:{row[0] + 1}", repr(shortened(row[1])), *row[2:]]),
        remedy="If it is a CSV file with a header, name its columns: `--set dataset.columns.id=NAME` (the same for "
        "timestamp, data, dlc, label); or choose the format: `--set dataset.format=FORMAT`",
    )


def set_option(name: str, value: str | Sequence[str]) -> str:
    """Writes the option that sets a name, a text or a list of texts, as it is typed in a shell."""
    # In Hydra's quoted texts, backslashes count only before a quote.
    texts = [re.sub(r'(\\*)("|$)', _escaped, text) for text in ([value] if isinstance(value, str) else value)]
    quoted = ",".join(f'"{text}"' for text in texts)
    if not isinstance(value, str):
        quoted = f"[{quoted}]"
    # A word that Hydra would read as a number or a truth value is quoted, too.
    elif re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", value) and value.casefold() not in _HYDRA_WORDS:
        quoted = value
    return f"--set {shlex.quote(f'{name}={quoted}')}"


def _escaped(match: re.Match[str]) -> str:
    """Doubles the backslashes before a quote or the end, and escapes the quote."""
    return 2 * match[1] + ('\\"' if match[2] else "")


def shortened(text: str) -> str:
    """Cuts a row to a length that fits into a message."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
