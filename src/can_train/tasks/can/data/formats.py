"""The log formats: how rows of text become numbers."""

import csv
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train.errors import DataError, unknown_name
from can_train.tasks.can.data.frames import MAX_PAYLOAD_BYTES
from can_train.tasks.can.settings import CanDatasetSettings, ColumnSettings

MAX_CAN_ID: Final = 0x1FFF_FFFF
"""The largest 29-bit identifier."""


NUMBER: Final = "[-+.0-9eE]+"


DIGITS: Final = "[0-9]+"


HEX: Final = "[0-9A-Fa-f]+"


BYTE: Final = "[0-9A-Fa-f]{2}"


CELL: Final = "[0-9A-Fa-f]{0,2}"


_BLANKS: Final = r"[ \t]*"


_GAP: Final = r"[ \t]+"


_WORD: Final = "[0-9A-Za-z_ -]*"


_END: Final = r"\r?$"


NO_SHAPE: Final = "the row is truncated or not of this format"


BAD_TIMESTAMP: Final = "the timestamp is not a number"


BAD_ID: Final = "the ID is not a number"


BAD_PAYLOAD: Final = "the payload is not made of whole hexadecimal bytes"


ID_TOO_LARGE: Final = "the ID does not fit into 29 bits"


PAYLOAD_TOO_LONG: Final = f"the payload is longer than {MAX_PAYLOAD_BYTES} bytes"


LENGTH_DISAGREES: Final = "the DLC disagrees with the payload"


CAN_FD: Final = "CAN FD frames are not supported"


NO_LABEL: Final = "the label is missing"


UNKNOWN_LABEL: Final = "the label is unknown in this format"


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """How one row is written.

    The pattern's groups are `timestamp`, `id`, `data` (or `data_0`, `data_1`, ... for a column a byte), and where the
    format has them `dlc`, `label`, `kind` (the attack's name beside the label), `remote` (present: a remote frame) and
    `fd` (present: a CAN FD frame). A pattern in which each character allows only one way on is matched two to three
    times as fast as others: hence payload groups that swallow the separators behind each byte.

    Attributes:
        name: The format's name.
        pattern: Regular expression (Rust dialect) of a whole row.
        separators: Characters that may stand between payload bytes.
        labels: The only label texts there are; empty where any text may be one.
        several_labels: Whether the label is a list of words, any of which may tell of an attack.
        id_base: 16 or 10.
        byte_columns: Number of groups `data_0`, ...; 0 where the payload is the one group `data`.
        anything: Character class of a field's content, whatever it is; tells which field of a bad row is wrong.
        header: The line above the rows, which is no row; empty where there is none.
        assumption: What was taken for granted and may be wrong, as a sentence; empty if nothing was.
    """

    name: str
    pattern: str
    separators: str = ""
    labels: tuple[str, ...] = ()
    several_labels: bool = False
    id_base: int = 16
    byte_columns: int = 0
    anything: str = r"[^\s,]"
    header: str = ""
    assumption: str = ""

    def has(self, group: str) -> bool:
        """Tells whether the pattern has a group of this name."""
        return f"(?P<{group}>" in self.pattern

    @property
    def loose(self) -> str:
        """The same pattern with anything for the content of timestamp, ID and payload."""
        pattern = self.pattern.replace(CELL, f"{self.anything}*")
        for token in (BYTE, HEX, NUMBER, DIGITS):
            pattern = pattern.replace(token, f"{self.anything}+")
        return pattern


@dataclass(frozen=True, kw_only=True, eq=False)
class ParsedRows:
    """The rows of one block of text.

    Attributes:
        position: [M] which of the block's lines each well-formed row was.
        timestamp: [M] seconds.
        can_id: [M].
        length: [M] payload bytes.
        payload: [M, 8] bytes.
        label: [M] texts, or None where the format has no labels.
        kind: [M] texts, or None where the format does not name attacks beside the label.
        malformed: The other rows (blank lines, comments and headers are none): `position`, `line`, `reason`.
    """

    position: NDArray[np.int64]
    timestamp: NDArray[np.float64]
    can_id: NDArray[np.uint32]
    length: NDArray[np.uint8]
    payload: NDArray[np.uint8]
    label: pl.Series | None
    kind: pl.Series | None
    malformed: pl.DataFrame


def parse_rows(lines: pl.Series, grammar: Grammar) -> ParsedRows:
    """Turns lines into numbers.

    Args:
        lines: [R] texts, null for an empty line.
        grammar: How they are written.
    """
    rows = (
        pl.LazyFrame({"line": lines})
        .with_row_index("position")
        .with_columns(groups=pl.col("line").str.extract_groups(grammar.pattern))
        .unnest("groups")
        # A column of their own: polars would strip the separators once for each expression that uses the digits.
        .with_columns(digits=_payload_digits(grammar))
        .select("position", "line", *_number_columns(grammar))
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
    """Finds the first line that is neither blank nor a comment: its position and its text ("" if there is none)."""
    rows = pl.DataFrame({"line": lines}).with_row_index("position").filter(_is_row(pl.col("line")))
    return (rows["position"][0], rows["line"][0].strip()) if len(rows) else (0, "")


def _is_row(line: pl.Expr) -> pl.Expr:
    """Tells lines that should be rows from blank ones and comments."""
    text = line.fill_null("").str.strip_chars()
    return (text != "") & ~text.str.starts_with("#")


def _number_columns(grammar: Grammar) -> list[pl.Expr]:
    """The columns made of a row's groups: `length` in bytes, `payload` as a big-endian number with zeros behind it."""
    padded = pl.col("digits").str.pad_end(2 * MAX_PAYLOAD_BYTES, "0")
    return [
        pl.col("timestamp").is_not_null().alias("matched"),
        pl.col("timestamp").cast(pl.Float64, strict=False),
        pl.col("id").str.to_integer(base=grammar.id_base, dtype=pl.UInt64, strict=False),
        (pl.col("digits").str.len_bytes() // 2).alias("length"),
        padded.str.to_integer(base=16, dtype=pl.UInt64, strict=False).alias("payload"),
        *([pl.col("dlc").cast(pl.UInt32, strict=False)] if grammar.has("dlc") else []),
        *(pl.col(group) for group in ("label", "kind", "remote", "fd") if grammar.has(group)),
    ]


def _payload_digits(grammar: Grammar) -> pl.Expr:
    """The payload's hexadecimal digits with nothing between them; a remote frame has none."""
    if grammar.byte_columns:
        cells = [pl.col(f"data_{i}") for i in range(grammar.byte_columns)]
        # Dots stand for an empty cell: those behind the payload are dropped, one inside it makes the number unreadable.
        return pl.concat_str(
            pl.when(cell == "").then(pl.lit("..")).otherwise(cell.str.zfill(2)) for cell in cells
        ).str.strip_chars_end(".")
    digits = pl.col("data").fill_null("")
    for separator in grammar.separators:
        digits = digits.str.replace_all(separator, "", literal=True)
    return pl.when(pl.col("remote").is_null()).then(digits).otherwise(pl.lit("")) if grammar.has("remote") else digits


def _rules(grammar: Grammar) -> list[tuple[pl.Expr, str]]:
    """What must hold of a row's columns, and what to say where it does not; the first broken rule is the one told."""
    length = pl.col("length")
    rules = [(pl.col("matched"), NO_SHAPE)]
    if grammar.has("fd"):
        rules.append((pl.col("fd").is_null(), CAN_FD))
    rules += [
        (pl.col("timestamp").is_finite(), BAD_TIMESTAMP),
        (pl.col("id") <= MAX_CAN_ID, ID_TOO_LARGE),
        (length <= MAX_PAYLOAD_BYTES, PAYLOAD_TOO_LONG),
        (pl.col("payload").is_not_null(), BAD_PAYLOAD),
    ]
    if grammar.has("dlc"):
        agrees = pl.col("dlc").is_null() | (pl.col("dlc") == length)
        rules.append((agrees | pl.col("remote").is_not_null() if grammar.has("remote") else agrees, LENGTH_DISAGREES))
    if grammar.has("label"):
        rules.append((pl.col("label").is_not_null(), NO_LABEL))
    if grammar.labels:
        rules.append((pl.col("label").is_in(grammar.labels), UNKNOWN_LABEL))
    return rules


def _malformed(rows: pl.DataFrame, rules: list[tuple[pl.Expr, str]], grammar: Grammar) -> pl.DataFrame:
    """Says of each row that broke a rule which one; rows that need not be frames are left out."""
    line = pl.col("line")
    rows = rows.filter(_is_row(line), line.str.strip_chars() != grammar.header)
    reason = pl.lit(None, dtype=pl.String)
    for rule, sentence in reversed(rules):
        reason = pl.when(rule.fill_null(False)).then(reason).otherwise(pl.lit(sentence))
    told = rows.select("position", "line", reason=reason)
    shapeless = _closest_shape(told["line"], grammar)
    return told.with_columns(reason=pl.when(pl.col("reason") == NO_SHAPE).then(shapeless).otherwise("reason"))


def _closest_shape(lines: pl.Series, grammar: Grammar) -> pl.Series:
    """Says of rows that do not match the pattern which field is wrong, where everything else would match."""
    fields = lines.str.extract_groups(grammar.loose).struct.unnest()
    number_of_id = HEX if grammar.id_base == 16 else DIGITS
    reason = (
        pl.when(pl.col("timestamp").is_null()).then(pl.lit(NO_SHAPE))
        .when(~pl.col("timestamp").str.contains(f"^{NUMBER}$")).then(pl.lit(BAD_TIMESTAMP))
        .when(~pl.col("id").str.contains(f"^{number_of_id}$")).then(pl.lit(BAD_ID))
        .otherwise(pl.lit(BAD_PAYLOAD))
    )  # fmt: skip
    return fields.select(reason).to_series()


def _car_hacking(label: str) -> Grammar:
    row = (
        f"^(?P<timestamp>{NUMBER}),(?P<id>{HEX}),(?P<dlc>{DIGITS})(?:,(?P<data>,*(?:{BYTE},*)*){label})?{_BLANKS}{_END}"
    )
    return Grammar(name="car_hacking", pattern=row, separators=",", labels=("R", "T") if label else ())


_CAR_HACKING: Final = _car_hacking("(?P<label>[G-Zg-z])?")


_CAR_HACKING_UNLABELLED: Final = _car_hacking("")


_SPACED_BYTES: Final = f"(?P<data>(?:{BYTE}{_BLANKS})*)"


_FLAGS: Final = "(?:(?P<remote>1)|[02-9])[0-9]{2}"
"""HCRL's field of three digits behind the ID; its first digit is the remote transmission request."""


_HCRL_TEXT: Final = Grammar(
    name="hcrl_text",
    pattern=(
        f"^{_BLANKS}Timestamp:{_BLANKS}(?P<timestamp>{NUMBER}){_GAP}ID:{_BLANKS}(?P<id>{HEX}){_GAP}{_FLAGS}{_GAP}"
        f"DLC:{_BLANKS}(?P<dlc>[0-9]){_BLANKS}{_SPACED_BYTES}{_END}"
    ),
    separators=" \t",
)


_WHITESPACE: Final = Grammar(
    name="whitespace",
    pattern=(
        f"^{_BLANKS}(?P<timestamp>{NUMBER}){_GAP}(?P<id>{HEX}){_GAP}(?:{_FLAGS}{_GAP})?"
        f"(?P<dlc>[0-9])(?:{_GAP}{_SPACED_BYTES})?{_END}"
    ),
    separators=" \t",
)


_CANDUMP_FRAME: Final = (
    rf"^{_BLANKS}\((?P<timestamp>{NUMBER})\){_GAP}[!-~]+{_GAP}(?P<id>{HEX})"
    rf"(?:#(?P<fd>#[0-9A-Fa-f])?|{_GAP}\[(?P<dlc>{DIGITS})\]){_BLANKS}"
    f"(?:(?P<remote>R[0-9A-F]?|remote request){_BLANKS}|{_SPACED_BYTES})"
)
"""`(ts) can0 12A#00F0` and `(ts)  can0  12A   [2]  00 F0`."""


_CANDUMP: Final = Grammar(name="candump", pattern=f"{_CANDUMP_FRAME}{_END}", separators=" \t")


_TRUTH: Final = "(?i:true|false|[01])"


_CANDUMP_LABELLED: Final = Grammar(
    name="candump_labelled",
    pattern=f"{_CANDUMP_FRAME}(?:{_GAP}(?P<label>{_TRUTH}(?:{_GAP}{_TRUTH})*))?{_BLANKS}{_END}",
    separators=" \t",
    several_labels=True,
)


LINE_GRAMMARS: Final = (
    _CAR_HACKING, _CAR_HACKING_UNLABELLED, _HCRL_TEXT, _CANDUMP, _CANDUMP_LABELLED, _WHITESPACE,
)  # fmt: skip
"""The grammars of formats without a header."""


_THREE_COLUMNS: Final = f"^(?P<timestamp>{NUMBER}),(?P<id>{HEX}),(?P<data>(?:{BYTE})*)"


PUBLISHED_CSV_GRAMMARS: Final = (
    Grammar(
        name="can_train_and_test",
        pattern=f"{_THREE_COLUMNS},(?P<label>{_WORD}){_END}",
        labels=("0", "1"),
        header="timestamp,arbitration_id,data_field,attack",
    ),
    Grammar(
        name="can_train_and_test",
        pattern=f"{_THREE_COLUMNS}{_END}",
        header="timestamp,arbitration_id,data_field",
    ),
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
"""The grammars of published formats that are known by the exact header; IDs and payloads are hexadecimal."""


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
        assumption=_ID_ASSUMPTION if id_base == "auto" and decimal and not too_large_for_hexadecimal(ids) else "",
    )


def looks_hexadecimal(ids: pl.Series) -> bool:
    """Tells whether any ID, as text, has a letter (as in `0x` too) or a leading zero: decimal numbers have neither."""
    return bool(ids.str.contains("[A-Za-z]|^0[0-9]").any())


def too_large_for_hexadecimal(ids: pl.Series) -> bool:
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
