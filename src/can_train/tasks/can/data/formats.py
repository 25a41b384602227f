"""The log formats: how rows of text become numbers."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train.errors import DataError, unknown_name
from can_train.tasks.can.data.graphs import MAX_PAYLOAD_BYTES, Floats, Ints

if TYPE_CHECKING:
    from can_train.tasks.can.settings import CanDatasetSettings, ColumnSettings

MAX_CAN_ID: Final = 0x1FFF_FFFF  # 29 bits, the extended identifier of CAN 2.0B

# Building blocks of the patterns, in Rust's dialect of regular expressions (polars).
NUMBER: Final = "[-+.0-9eE]+"  # wider than a number: the cast to float64 refuses what is none
DIGITS: Final = "[0-9]+"
HEX: Final = "[0-9A-Fa-f]+"
BYTE: Final = "[0-9A-Fa-f]{2}"
CELL: Final = "[0-9A-Fa-f]{0,2}"
_BLANKS: Final = r"[ \t]*"
_GAP: Final = r"[ \t]+"
_WORD: Final = "[0-9A-Za-z_ -]*"
_END: Final = r"\r?$"  # files written on Windows
_SPACED_BYTES: Final = f"(?P<data>(?:{BYTE}{_BLANKS})*)"

NO_MATCH: Final = "the row is truncated or not of this format"
BAD_TIMESTAMP: Final = "the timestamp is not a number"
BAD_ID: Final = "the ID is not a number"
BAD_PAYLOAD: Final = "the payload is not made of whole hexadecimal bytes"


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """How one row is written.

    Attributes:
        name: The format's name.
        pattern: Regular expression of a whole row. Its groups are `timestamp`, `id`, `data` (or `data_0`, `data_1`, ...
            for one column per byte) and, where the format has them, `dlc`, `label`, `kind` (the attack's name beside
            the label), `remote` (present in a remote frame) and `fd` (present in a CAN FD frame).
        separators: Characters that may stand between payload bytes.
        labels: The labels that the format allows; empty where it allows any text.
        several_labels: Whether the label is a list of words, any of which may mark an attack.
        id_base: 16 or 10.
        byte_columns: Number of groups `data_0`, ...; 0 where the payload is the one group `data`.
        any_character: Character class of any field's content. With it, a malformed row is searched for its wrong field.
        header: The line above the rows; empty where there is none.
        assumption: A guess that may be wrong, as a sentence for the user; empty if there was none.
    """

    # A pattern in which each character allows only one way on is matched two to three times as fast as others. Hence
    # the payload groups swallow the separators behind each byte.
    name: str
    pattern: str
    separators: str = ""
    labels: tuple[str, ...] = ()
    several_labels: bool = False
    id_base: int = 16
    byte_columns: int = 0
    any_character: str = r"[^\s,]"
    header: str = ""
    assumption: str = ""

    def has(self, group: str) -> bool:
        """Returns whether the pattern has a group of this name."""
        return f"(?P<{group}>" in self.pattern


@dataclass(frozen=True, kw_only=True, eq=False)
class ParsedRows:
    """The rows of one block of text: M well-formed ones, and the malformed ones."""

    position: Ints  # [M] index of the row's line in the block
    timestamp: Floats  # [M] seconds
    can_id: NDArray[np.uint32]  # [M]
    length: NDArray[np.uint8]  # [M] payload bytes
    payload: NDArray[np.uint8]  # [M, 8] bytes
    label: pl.Series | None  # [M] texts; None where the format has no labels
    kind: pl.Series | None  # [M] texts; None where the format does not name attacks beside the label
    malformed: pl.DataFrame  # `position`, `line` and `reason`; without blank lines, comments and headers


def parse_rows(lines: pl.Series, grammar: Grammar) -> ParsedRows:
    """Parses lines, of which empty ones are null."""
    padded = pl.col("digits").str.pad_end(2 * MAX_PAYLOAD_BYTES, "0")
    rows = (
        pl.LazyFrame({"line": lines})
        .with_row_index("position")
        .with_columns(groups=pl.col("line").str.extract_groups(grammar.pattern))
        .unnest("groups")
        # A column of their own: polars would strip the separators once for each expression that uses the digits.
        .with_columns(digits=_payload_digits(grammar))
        .select(
            "position",
            "line",
            pl.col("timestamp").is_not_null().alias("matched"),
            pl.col("timestamp").cast(pl.Float64, strict=False),
            pl.col("id").str.to_integer(base=grammar.id_base, dtype=pl.UInt64, strict=False),
            (pl.col("digits").str.len_bytes() // 2).alias("length"),  # in bytes
            # A big-endian number with zeros behind the payload.
            padded.str.to_integer(base=16, dtype=pl.UInt64, strict=False).alias("payload"),
            *([pl.col("dlc").cast(pl.UInt32, strict=False)] if grammar.has("dlc") else []),
            *(pl.col(group) for group in ("label", "kind", "remote", "fd") if grammar.has(group)),
        )
        # The in-memory engine matches on one core only.
        .collect(engine="streaming")
    )
    rules = _rules(grammar)
    holds = rows.select(pl.all_horizontal([rule for rule, _ in rules]).fill_null(False)).to_series()
    good = rows if holds.all() else rows.filter(holds)
    return ParsedRows(
        position=good["position"].to_numpy().astype(np.int64),
        timestamp=good["timestamp"].to_numpy(),
        can_id=good["id"].to_numpy().astype(np.uint32),
        length=good["length"].to_numpy().astype(np.uint8),
        payload=good["payload"].to_numpy().astype(">u8").view(np.uint8).reshape(-1, MAX_PAYLOAD_BYTES),
        label=good["label"] if grammar.has("label") else None,
        kind=good["kind"] if grammar.has("kind") else None,
        malformed=_malformed(rows.filter(~holds), rules, grammar),
    )


def first_row(lines: pl.Series) -> tuple[int, str]:
    """Returns position and text of the first line that is neither blank nor a comment; (0, "") if there is none."""
    rows = pl.DataFrame({"line": lines}).with_row_index("position").filter(_is_row(pl.col("line")))
    return (rows["position"][0], rows["line"][0].strip()) if len(rows) else (0, "")


def _is_row(line: pl.Expr) -> pl.Expr:
    text = line.fill_null("").str.strip_chars()
    return (text != "") & ~text.str.starts_with("#")


def _payload_digits(grammar: Grammar) -> pl.Expr:
    if grammar.byte_columns:
        cells = [pl.col(f"data_{i}") for i in range(grammar.byte_columns)]
        # Dots stand for an empty cell: those behind the payload are dropped, one inside it makes the number unreadable.
        return pl.concat_str(
            pl.when(cell == "").then(pl.lit("..")).otherwise(cell.str.zfill(2)) for cell in cells
        ).str.strip_chars_end(".")
    digits = pl.col("data").fill_null("")
    for separator in grammar.separators:
        digits = digits.str.replace_all(separator, "", literal=True)
    # A remote frame asks for data: its DLC is the length of the answer, and it has no payload of its own.
    return pl.when(pl.col("remote").is_null()).then(digits).otherwise(pl.lit("")) if grammar.has("remote") else digits


def _rules(grammar: Grammar) -> list[tuple[pl.Expr, str]]:
    """The rules for a row's columns, each with the reason given where it is the first to be broken."""
    length, dlc = pl.col("length"), pl.col("dlc")
    rules = [(pl.col("matched"), NO_MATCH)]
    if grammar.has("fd"):
        rules.append((pl.col("fd").is_null(), "CAN FD frames are not supported"))
    rules += [
        (pl.col("timestamp").is_finite(), BAD_TIMESTAMP),
        (pl.col("id") <= MAX_CAN_ID, "the ID does not fit into 29 bits"),
        (length <= MAX_PAYLOAD_BYTES, f"the payload is longer than {MAX_PAYLOAD_BYTES} bytes"),
        (pl.col("payload").is_not_null(), BAD_PAYLOAD),
    ]
    if grammar.has("dlc"):
        agrees = dlc.is_null() | (dlc == length)
        if grammar.has("remote"):
            agrees |= pl.col("remote").is_not_null()
        rules.append((agrees, "the DLC disagrees with the payload"))
    if grammar.has("label"):
        rules.append((pl.col("label").is_not_null(), "the label is missing"))
    if grammar.labels:
        rules.append((pl.col("label").is_in(grammar.labels), "the label is unknown in this format"))
    return rules


def _malformed(rows: pl.DataFrame, rules: list[tuple[pl.Expr, str]], grammar: Grammar) -> pl.DataFrame:
    """Returns position, line and reason of rows that broke a rule; repeated headers are left out."""
    line = pl.col("line")
    rows = rows.filter(_is_row(line), line.str.strip_chars() != grammar.header)
    reason = pl.lit(None, dtype=pl.String)
    for rule, sentence in reversed(rules):
        reason = pl.when(rule.fill_null(False)).then(reason).otherwise(pl.lit(sentence))
    broken = rows.select("position", "line", reason=reason)
    # The same pattern with any content of timestamp, ID and payload: where it matches, one of the three is wrong.
    pattern = grammar.pattern.replace(CELL, f"{grammar.any_character}*")
    for token in (BYTE, HEX, NUMBER, DIGITS):
        pattern = pattern.replace(token, f"{grammar.any_character}+")
    fields = broken["line"].str.extract_groups(pattern).struct.unnest()
    wrong_field = fields.select(
        pl.when(pl.col("timestamp").is_null()).then(pl.lit(NO_MATCH))
        .when(~pl.col("timestamp").str.contains(f"^{NUMBER}$")).then(pl.lit(BAD_TIMESTAMP))
        .when(~pl.col("id").str.contains(f"^{HEX if grammar.id_base == 16 else DIGITS}$")).then(pl.lit(BAD_ID))
        .otherwise(pl.lit(BAD_PAYLOAD))
    ).to_series()  # fmt: skip
    return broken.with_columns(reason=pl.when(pl.col("reason") == NO_MATCH).then(wrong_field).otherwise("reason"))


def _car_hacking(label: str) -> Grammar:
    # `1478198376.389427,0316,8,05,21,68,09,21,21,00,6f,R`: no header, and as many columns as the DLC says. Copies that
    # went through a spreadsheet are padded with empty cells before the label.
    payload = f"(?:,(?P<data>,*(?:{BYTE},*)*){label})?"
    row = f"^(?P<timestamp>{NUMBER}),(?P<id>{HEX}),(?P<dlc>{DIGITS}){payload}{_BLANKS}{_END}"
    return Grammar(name="car_hacking", pattern=row, separators=",", labels=("R", "T") if label else ())


# HCRL's field of three digits behind the ID; the first digit 1 marks a remote transmission request.
_FLAGS: Final = "(?:(?P<remote>1)|[02-9])[0-9]{2}"

# `(ts) can0 12A#00F0` as `candump -l` writes it, and `(ts)  can0  12A   [2]  00 F0` as it prints. `##` is CAN FD.
_CANDUMP_FRAME: Final = (
    rf"^{_BLANKS}\((?P<timestamp>{NUMBER})\){_GAP}[!-~]+{_GAP}(?P<id>{HEX})"
    rf"(?:#(?P<fd>#[0-9A-Fa-f])?|{_GAP}\[(?P<dlc>{DIGITS})\]){_BLANKS}"
    f"(?:(?P<remote>R[0-9A-F]?|remote request){_BLANKS}|{_SPACED_BYTES})"
)
_TRUTH: Final = "(?i:true|false|[01])"

# The formats without a header.
LINE_GRAMMARS: Final = (
    # The label is R (regular) or T (injected). Any letter that is no hexadecimal digit is taken for one, so that a
    # wrong label is named as such and a row without one is told from a row that was cut off.
    _car_hacking("(?P<label>[G-Zg-z])?"),
    _car_hacking(""),
    Grammar(
        # `Timestamp: 1479121434.850202  ID: 0350  000  DLC: 8  05 28 84 …`: HCRL's attack-free logs and OTIDS.
        name="hcrl_text",
        pattern=(
            f"^{_BLANKS}Timestamp:{_BLANKS}(?P<timestamp>{NUMBER}){_GAP}ID:{_BLANKS}(?P<id>{HEX}){_GAP}{_FLAGS}{_GAP}"
            f"DLC:{_BLANKS}(?P<dlc>[0-9]){_BLANKS}{_SPACED_BYTES}{_END}"
        ),
        separators=" \t",
    ),
    Grammar(name="candump", pattern=f"{_CANDUMP_FRAME}{_END}", separators=" \t"),
    Grammar(
        # One word for each detector or attack that was running: a frame is an attack if any of them is true.
        name="candump_labelled",
        pattern=f"{_CANDUMP_FRAME}(?:{_GAP}(?P<label>{_TRUTH}(?:{_GAP}{_TRUTH})*))?{_BLANKS}{_END}",
        separators=" \t",
        several_labels=True,
    ),
    Grammar(
        # `1483093132.049669  0380  000  2  30 bb`
        name="whitespace",
        pattern=(
            f"^{_BLANKS}(?P<timestamp>{NUMBER}){_GAP}(?P<id>{HEX}){_GAP}(?:{_FLAGS}{_GAP})?"
            f"(?P<dlc>[0-9])(?:{_GAP}{_SPACED_BYTES})?{_END}"
        ),
        separators=" \t",
    ),
)

# can-train-and-test has no DLC; its payload has 0 to 16 digits without separators.
_THREE_COLUMNS: Final = f"^(?P<timestamp>{NUMBER}),(?P<id>{HEX}),(?P<data>(?:{BYTE})*)"

# The published formats that are recognised by their exact header. Their IDs are hexadecimal even where all look
# decimal.
PUBLISHED_CSV_GRAMMARS: Final = (
    Grammar(
        name="can_train_and_test",
        pattern=f"{_THREE_COLUMNS},(?P<label>{_WORD}){_END}",
        labels=("0", "1"),
        header="timestamp,arbitration_id,data_field,attack",
    ),
    Grammar(name="can_train_and_test", pattern=f"{_THREE_COLUMNS}{_END}", header="timestamp,arbitration_id,data_field"),
    Grammar(
        name="hcrl_challenge",
        pattern=(
            f"^(?P<timestamp>{NUMBER}),(?P<id>{HEX}),(?P<dlc>{DIGITS}),{_SPACED_BYTES},"
            f"(?P<label>{_WORD}),(?P<kind>{_WORD}){_END}"
        ),
        separators=" ",
        labels=("Normal", "Attack"),
        header="Timestamp,Arbitration_ID,DLC,Data,Class,SubClass",
    ),
)

_DELIMITERS: Final = ",;\t"
_REQUIRED_ROLES: Final = ("timestamp", "id", "data")
# Names of columns, the most specific first, in lower case and without anything but letters and digits.
_COLUMN_NAMES: Final = {
    "timestamp": ("timestamp", "timestamps", "time", "times", "ts", "epoch", "seconds"),
    "id": ("canid", "arbitrationid", "arbid", "canidentifier", "identifier", "messageid", "msgid", "id", "aid"),
    "dlc": ("dlc", "length", "len", "datalength", "datalen"),
    "data": ("data", "datafield", "payload", "databytes", "datahex"),
    "label": ("label", "labels", "attack", "class", "flag", "isattack", "anomaly"),
}
# A column of one payload byte, such as `data_0`, `DATA[0]` or `byte 1`.
_BYTE_COLUMN: Final = re.compile(r"(?:data|databyte|byte|payload|d|b)(\d)")
_DATA_SEPARATORS: Final = " :._-"
# The content of a column, without the blanks and quotes around it.
_CONTENT: Final = {
    "timestamp": f"(?P<timestamp>{NUMBER})",
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
    ids = sample.str.extract_groups(_row_pattern(header, roles, _ID_WITH_PREFIX)).struct.field("id").drop_nulls()
    decimal = id_base == "dec" or (id_base == "auto" and not looks_hexadecimal(ids))
    guessed = id_base == "auto" and decimal and not too_large_for_hexadecimal(ids)
    return Grammar(
        name="columns",
        pattern=_row_pattern(header, roles, _DECIMAL_ID if decimal else _CONTENT["id"]),
        separators=_DATA_SEPARATORS,
        id_base=10 if decimal else 16,
        byte_columns=len(roles["data"]) if len(roles["data"]) > 1 else 0,
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
    plain = [re.sub("[^a-z0-9]", "", name.casefold()) for name in names]
    for synonym in _COLUMN_NAMES[role]:
        if synonym in plain:
            return [plain.index(synonym)]
    if role != "data":
        return []
    # One column per byte: their numbers count from 0 or 1, without a hole.
    column_by_number = {int(match[1]): i for i, name in enumerate(plain) if (match := _BYTE_COLUMN.fullmatch(name))}
    numbers = sorted(column_by_number)
    whole = any(numbers == list(range(first, first + len(numbers))) for first in (0, 1))
    return [column_by_number[number] for number in numbers] if whole else []
