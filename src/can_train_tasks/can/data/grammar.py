"""The grammars of the rows of text formats, and the conversion of rows into numbers by polars.

Shapes: M rows that are frames, P payload bytes (8, or 64 where a block has CAN FD frames).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from can_train_tasks.can.data.payload_fields import FD_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from can_train_tasks.can.data.graphs import Floats, Ints

MAX_CAN_ID: Final = 0x1FFF_FFFF  # 29 bits, the extended identifier of CAN 2.0B
FD_LENGTHS: Final = (*range(9), 12, 16, 20, 24, 32, 48, 64)  # payload bytes by DLC
MAX_TIME_S: Final = 1e11  # the year 5138: a larger number is no time, and its square would not stay finite
MAX_TICKS_PER_SECOND: Final = 10**9

# Building blocks of the patterns, in Rust's dialect of regular expressions (polars).
NUMBER: Final = "[-+.0-9eE]+"  # wider than a number: the cast to float64 refuses other texts
CLOCK: Final = "[0-9]{1,3}:[0-9]{1,2}:[0-9]{1,2}(?:[.,:][0-9]{1,9})?"
_DAY: Final = r"(?:[0-9]{4}[-/.][0-9]{1,2}[-/.][0-9]{1,2}|[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{4})"
DATE: Final = f"{_DAY}[T ]+{CLOCK}(?:Z|[-+][0-9]{{2}}:?[0-9]{{2}})?"
# Notations of times, the values of `Grammar.time_code`.
NUMBER_CODE: Final = "number"
COMMA_CODE: Final = "comma"
DATE_CODE: Final = "date"
CLOCK_CODE: Final = "clock"
DIGITS: Final = "[0-9]+"
HEX: Final = "[0-9A-Fa-f]+"
BYTE: Final = "[0-9A-Fa-f]{2}"
CELL: Final = "[0-9A-Fa-f]{0,2}"
DECIMAL_CELL: Final = "[0-9]{0,3}"
BASE64: Final = "[0-9A-Za-z+/]*={0,2}"
BLANKS: Final = r"[ \t]*"
GAP: Final = r"[ \t]+"
END: Final = r"\r?$"  # files written on Windows
SPACED_BYTES: Final = f"(?P<data>(?:{BYTE}{BLANKS})*)"
TIMESTAMP: Final = f"(?P<timestamp>{NUMBER})"
_TIMES: Final = {NUMBER_CODE: NUMBER, COMMA_CODE: "[-+]?[0-9]+,[0-9]+", DATE_CODE: DATE, CLOCK_CODE: CLOCK}
_FRACTION: Final = "[.,:]"  # separators before the fraction of a second
_ID: Final = f"(?P<id>{HEX})"
_MARKED_ID: Final = f"(?:0[xX])?{_ID}[xXhH]?"
_PARTS: Final = "parts of the time"
_MOMENT: Final = (
    r"^(?:(?P<year>[0-9]{4})[-/.](?P<month>[0-9]+)[-/.](?P<day>[0-9]+)[T ]+|"
    r"(?P<day_first>[0-9]+)\.(?P<then_month>[0-9]+)\.(?P<then_year>[0-9]{4})[T ]+)?"
    r"(?P<hour>[0-9]+):(?P<minute>[0-9]+):(?P<second>[0-9]+)(?:[.,:](?P<fraction>[0-9]+))?"
    r"(?P<offset>[-+][0-9]{2}:?[0-9]{2})?"
)

_NUMBERS_OF_ROWS: Final = ("position", "timestamp", "can_id", "length", "payload")  # fields of `ParsedRows`
_TEXTS_OF_ROWS: Final = ("label", "kind", "channel", "direction")
_TEXTS: Final = (*_TEXTS_OF_ROWS, "remote", "request", "fd")  # groups that stay texts

SECONDS_A_DAY: Final = 86_400
_LARGEST_WORD: Final = 2**16 - 1

NO_MATCH: Final = "the row is truncated or not of this format"
BAD_TIMESTAMP: Final = "the timestamp is not a number"
BAD_ID: Final = "the ID is not a number"
BAD_PAYLOAD: Final = "the payload is not made of whole hexadecimal bytes"
BAD_DECIMALS: Final = "the payload is not made of decimal numbers up to 255"
BAD_SIGNALS: Final = "the payload is not made of numbers"
LATE_TIMESTAMP: Final = "the timestamp is beyond any clock"
_BAD_PAYLOADS: Final = {"decimal": BAD_DECIMALS, "signals": BAD_SIGNALS}


# Labels that mark an attack without naming it.
ATTACK_WORDS: Final = frozenset(
    {"1", "t", "true", "yes", "y", "attack", "attacked", "anomaly", "anomalous", "malicious", "injected"}
)
# Between words of a label, and a noun behind a word: `attack_free`, `Normal message`.
_JOINTS: Final = re.compile(r"(?<=[^\W_])[-_\s]+(?=[^\W_])")
_LABELLED_NOUN: Final = re.compile(
    r"(?<=[^\W_]) (?:state|messages?|frames?|packets?|traffic|data|driving|operation|behaviou?r|class)$"
)


def canonical_label(text: str) -> str:
    """Removes differences of letter case, quotes and blanks, and between 1.0, 0x1 and 1."""
    word = text.strip(' \t\r"').casefold()
    try:
        number = float(int(word, 16)) if word.startswith("0x") else float(word)
    except ValueError:
        return word
    return str(int(number)) if number.is_integer() else word


def label_word(text: str) -> str:
    """Returns the words of a label that tell an attack, as `settings.BENIGN_WORDS` and `ATTACK_WORDS` have them."""
    return _LABELLED_NOUN.sub("", _JOINTS.sub(" ", canonical_label(text)))


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The grammar of one row.

    Attributes:
        name: The format's name.
        pattern: Regular expression of a whole row. Its groups are `timestamp`, `id`, `data` (or `data_0`, `data_1`, ...
            for one column per byte) and, where the format has them, `dlc`, `label`, `kind` (the attack's name in
            addition to the label), `channel` (the interface), `remote` or `request` (present in a remote frame), `fd`
            (present in a CAN FD frame), `direction` (received or sent) and `code` (the DLC of a classical frame as its
            code in the IDs' base: 9 to 15 are 8 bytes).
        usual: Regular expression for most rows without a label, which is matched faster; empty: no such expression.
        separators: Characters that may stand between payload bytes.
        labels: The labels that the format allows; empty where it allows any text.
        unlabelled_rows: Whether a row may lack the label, and is benign then.
        several_labels: Whether the label is a list of words, where any word may mark an attack.
        id_base: 16 or 10.
        byte_columns: Number of groups `data_0`, ...; 0 where the payload is the group `data`.
        payload_code: Notation of the payload: `hex`, `base64`, `decimal` numbers, or `signals` from 0 to 1, each of
            which is written into two bytes.
        cut_to_dlc: Whether other fields that look like bytes may follow the payload.
        padded: Whether padding bytes may follow the bytes of the DLC: they are cut off, and the rows are counted.
        fd_groups: Groups; a row that has any of these groups may have a CAN FD frame's payload.
        ticks_per_second: Unit of the timestamps.
        unit_known: Whether the format or the user has named the unit.
        time_code: Notation of the timestamps: `number`, `comma` (a number with a decimal comma), `date` (ISO 8601, or
            day, month and year with points between), or `clock` (the time of day, which begins anew at midnight).
        relative: Whether a timestamp counts from the previous line.
        session: Pattern of a line that begins a recording inside the log, with its date and time in the groups `date`
            (day, month and year with colons between) and `clock`; empty: no such line.
        from_midnight: Whether times count from the last midnight before a recording, and not from its beginning.
        error_frame: Pattern of the rows of error frames, which carry no data.
        xl_frame: Pattern of the rows of CAN XL frames, which have a priority in place of an ID.
        no_row: Pattern of other lines that are neither frames nor malformed.
        any_character: Character class for the content of any field, to find the wrong field of a malformed row.
        header: The line above the rows; empty without such a line.
        late_labels: Whether the label is a cell behind the last column that the header names.
        assumption: A guess that may be wrong, as a sentence for the user; empty without a guess.
    """

    # A pattern that never has two ways to match a character is matched two to three times as fast as other patterns.
    # Hence the payload groups include the separators after each byte.
    name: str
    pattern: str
    usual: str = ""
    separators: str = ""
    labels: tuple[str, ...] = ()
    unlabelled_rows: bool = False
    several_labels: bool = False
    id_base: int = 16
    byte_columns: int = 0
    payload_code: str = "hex"
    cut_to_dlc: bool = False
    padded: bool = False
    fd_groups: tuple[str, ...] = ()
    ticks_per_second: int = 1
    unit_known: bool = False
    time_code: str = NUMBER_CODE
    relative: bool = False
    session: str = ""
    from_midnight: bool = False
    error_frame: str = ""
    xl_frame: str = ""
    no_row: str = ""
    any_character: str = r"[^\s,]"
    header: str = ""
    late_labels: bool = False
    assumption: str = ""

    def has(self, group: str) -> bool:
        """Returns whether the pattern has a group of this name."""
        return f"(?P<{group}>" in self.pattern

    @property
    def dated(self) -> bool:
        """Whether the timestamps are dates or times of day, which have no unit."""
        return self.time_code in (DATE_CODE, CLOCK_CODE)

    def with_times(self, code: str) -> Grammar:
        """Returns the grammar for rows with another notation of times (see `time_code`)."""
        token = f"(?P<timestamp>{_TIMES[code]})"
        _, _, behind = self.pattern.partition(TIMESTAMP)
        if behind.removeprefix('[ "]*').startswith(","):
            # Between commas, a decimal comma stands inside quotes.
            token = f'"{token}"' if code == COMMA_CODE else token.replace(_FRACTION, "[.:]")
        pattern, usual = (each.replace(TIMESTAMP, token) for each in (self.pattern, self.usual))
        changed = replace(self, pattern=pattern, usual=usual, time_code=code)
        return replace(changed, unit_known=True, ticks_per_second=1) if changed.dated else changed

    def with_marked_ids(self) -> Grammar:
        """Returns the grammar for rows whose IDs may be marked as hexadecimal: `0x110`, `110h` or `18FEF100x`."""
        pattern, usual = (each.replace(_ID, _MARKED_ID) for each in (self.pattern, self.usual))
        return replace(self, pattern=pattern, usual=usual)


@dataclass(frozen=True, kw_only=True, eq=False)
class ParsedRows:
    """The rows of one block of a log: M well-formed rows, and the malformed rows."""

    position: Ints  # [M] index of the row's line in the block
    timestamp: Floats  # [M] seconds, where the grammar's unit is known
    can_id: NDArray[np.uint32]  # [M]
    length: NDArray[np.uint8]  # [M] payload bytes
    payload: NDArray[np.uint8]  # [M, P] bytes
    label: pl.Series | None  # [M] texts, null in rows without a label; None where the format has no labels
    kind: pl.Series | None  # [M] texts; None where the format has no second column that names attacks
    channel: pl.Series | None  # [M] texts; None where the grammar does not capture channels
    # Columns `position`, `line`, `reason`; `id` and `label`, null where unknown. No blank lines, comments or headers.
    malformed: pl.DataFrame
    error_frames: int  # rows of error frames that are left out; not malformed
    direction: pl.Series | None = None  # [M] texts; None where the grammar does not capture directions
    xl_frames: int = 0  # CAN XL frames that are left out
    cut: int = 0  # well-formed rows whose payload was longer than the DLC and was cut
    requests: int = 0  # rows that ask to send a frame which another row has, and are left out

    def select(self, chosen: NDArray[np.bool_]) -> ParsedRows:
        """Returns the well-formed rows where `chosen` [M] is True, and all malformed rows."""
        parts: dict[str, Any] = {}
        for name in (*_NUMBERS_OF_ROWS, *_TEXTS_OF_ROWS):
            column = getattr(self, name)
            parts[name] = column.filter(pl.Series(chosen)) if isinstance(column, pl.Series) else column
            if isinstance(column, np.ndarray):
                parts[name] = column[chosen]
        return replace(self, **parts)


def parse_rows(lines: pl.Series, grammar: Grammar) -> ParsedRows:
    """Parses lines; an empty line is null."""
    rows, num_cut = _columns(lines, grammar), 0
    if grammar.padded and grammar.has("dlc") and (rows["length"] > rows["dlc"]).any():
        rows, num_cut = _cut_to_dlc(_columns(lines, grammar, "digits"), fd=bool(grammar.fd_groups))
    if grammar.several_labels and grammar.has("label"):
        rows = rows.with_columns(label=_words(pl.col("label")))
    rules = _rules(grammar, has_long=bool((rows["length"] > MAX_PAYLOAD_BYTES).any()))
    holds = rows.select(pl.all_horizontal([rule for rule, _ in rules]).fill_null(False)).to_series()
    good = rows if holds.all() else rows.filter(holds)
    bad = rows.filter(~holds)
    num_bad = len(bad)
    if grammar.xl_frame:
        bad = bad.filter(~pl.col("line").str.contains(grammar.xl_frame).fill_null(False))
    malformed, error_frames = _malformed(bad, rules, grammar)
    return ParsedRows(
        position=good["position"].to_numpy().astype(np.int64),
        timestamp=good["timestamp"].to_numpy() / grammar.ticks_per_second,
        can_id=good["id"].to_numpy().astype(np.uint32),
        length=good["length"].to_numpy().astype(np.uint8),
        payload=_payload_bytes(good),
        **{name: good[name] if grammar.has(name) else None for name in _TEXTS_OF_ROWS},
        malformed=malformed,
        error_frames=error_frames,
        xl_frames=num_bad - len(bad),
        cut=num_cut,
        requests=0,
    )


def _columns(lines: pl.Series, grammar: Grammar, *more: str) -> pl.DataFrame:
    """Matches lines and turns their fields into numbers; `more` names other columns that are kept."""
    time = pl.col("timestamp")
    number = time.str.replace(",", ".", literal=True) if grammar.time_code == COMMA_CODE else time
    return (
        pl.LazyFrame({"line": lines})
        .with_row_index("position")
        .with_columns(groups=pl.col("line").str.extract_groups(grammar.pattern))
        .unnest("groups")
        # A separate column: polars would strip the separators once for each expression that uses the digits.
        .with_columns(moment_parts(time) if grammar.dated else [], digits=_payload_digits(grammar))
        .select(
            "position",
            "line",
            time.is_not_null().alias("matched"),
            (moment_seconds() if grammar.dated else number.cast(pl.Float64, strict=False)).alias("timestamp"),
            pl.col("id").str.to_integer(base=grammar.id_base, dtype=pl.UInt64, strict=False),
            *_payload_columns(pl.col("digits"), fd=bool(grammar.fd_groups)),
            *more,
            *_dlc(grammar),
            *(pl.col(group) for group in _TEXTS if grammar.has(group)),
        )
        # The in-memory engine matches on one core only.
        .collect(engine="streaming")
    )


def first_row(lines: pl.Series) -> tuple[int, str]:
    """Returns position and text of the first line that is neither blank nor a comment; (0, "") if there is none."""
    rows = pl.DataFrame({"line": lines}).with_row_index("position").filter(_is_row(pl.col("line")))
    return (rows["position"][0], rows["line"][0].strip()) if len(rows) else (0, "")


def _is_row(line: pl.Expr) -> pl.Expr:
    text = line.fill_null("").str.strip_chars()
    return (text != "") & ~text.str.starts_with("#")


def moment_parts(text: pl.Expr) -> pl.Expr:
    """Splits dates and times of day into a column, the input of `moment_seconds`.

    A separate expression: polars would otherwise match once for each part.
    """
    return text.str.extract_groups(_MOMENT).alias(_PARTS)


def moment_seconds() -> pl.Expr:
    """Computes seconds from the column of `moment_parts`.

    Dates like `2026-01-31T12:00:00.5+01:00` and `31.01.2026 12:00:00,5` give seconds since 1970, in UTC without an
    offset; times like `12:00:00.5` and `12:00:00:5` give seconds since midnight.
    """
    parts = pl.col(_PARTS).struct

    def number(name: str) -> pl.Expr:
        return parts.field(name).cast(pl.Int64, strict=False)

    hour, minute, second = number("hour"), number("minute"), number("second")
    offset = parts.field("offset")
    offset_s = offset.str.slice(1, 2).cast(pl.Int64) * 3600 + offset.str.tail(2).cast(pl.Int64) * 60
    ahead_s = pl.when(offset.str.starts_with("-")).then(-offset_s).otherwise(offset_s).fill_null(0)
    days = [("year", "month", "day"), ("then_year", "then_month", "day_first")]
    day = pl.coalesce(pl.concat_str([parts.field(name) for name in names], separator="-") for names in days)
    whole_days = day.str.to_date("%Y-%m-%d", strict=False).cast(pl.Int32).cast(pl.Int64)
    has_day = parts.field("year").is_not_null() | parts.field("then_year").is_not_null()
    midnight_s = pl.when(has_day).then(whole_days * SECONDS_A_DAY).otherwise(0)
    whole_s = midnight_s + hour * 3600 + minute * 60 + second - ahead_s
    # Joined as text, so that the number is rounded once, as in logs that hold seconds.
    seconds = pl.concat_str(whole_s.cast(pl.String), pl.lit("."), parts.field("fraction").fill_null("0"))
    # A recording that counts from its beginning may be longer than a day.
    is_time = ((hour < 24) | ~has_day) & (minute < 60) & (second <= 60) & (whole_s >= 0)
    return pl.when(is_time).then(seconds.cast(pl.Float64, strict=False))


def _payload_digits(grammar: Grammar) -> pl.Expr:
    if grammar.byte_columns:
        cells = [pl.col(f"data_{i}").fill_null("") for i in range(grammar.byte_columns)]
        codes = [_CELL_CODES[grammar.payload_code](cell) for cell in cells]
        # Dots stand for an empty cell: dots after the payload are dropped, dots inside it make the number unreadable.
        bytes_ = (
            pl.when(cell == "").then(pl.lit("..")).otherwise(code) for cell, code in zip(cells, codes, strict=True)
        )
        return pl.concat_str(bytes_).str.strip_chars_end(".")
    digits = pl.col("data").fill_null("")
    if grammar.payload_code == "base64":
        digits = digits.str.decode("base64", strict=False).bin.encode("hex")
    elif grammar.payload_code == "decimal":
        digits = digits.str.extract_all(DIGITS).list.eval(_decimal_byte(pl.element())).list.join("")
    for separator in grammar.separators:
        digits = digits.str.replace_all(separator, "", literal=True)
    if grammar.cut_to_dlc:
        digits = digits.str.head(2 * _dlc(grammar)[0].fill_null(0))
    # A remote frame asks for data: its DLC is the length of the answer, and it has no payload.
    return pl.when(pl.col("remote").is_null()).then(digits).otherwise(pl.lit("")) if grammar.has("remote") else digits


def _hex_byte(text: pl.Expr) -> pl.Expr:
    return text.str.zfill(2)


def _decimal_byte(text: pl.Expr) -> pl.Expr:
    # A number over 255 is not in the table, and makes the payload unreadable.
    return _digits_of_byte(text.cast(pl.UInt8, strict=False))


def _signal_word(text: pl.Expr) -> pl.Expr:
    """Writes a signal as a word of 16 bits: 0 as 0000, 1 and more as ffff."""
    word = (text.cast(pl.Float64, strict=False).clip(0.0, 1.0) * _LARGEST_WORD).round().cast(pl.Int32, strict=False)
    return pl.concat_str(_digits_of_byte(word // 256), _digits_of_byte(word % 256))


def _digits_of_byte(byte: pl.Expr) -> pl.Expr:
    return byte.cast(pl.Int32).replace_strict({value: f"{value:02x}" for value in range(256)}, default="xx")


_CELL_CODES: Final = {"hex": _hex_byte, "decimal": _decimal_byte, "signals": _signal_word}


def _payload_columns(digits: pl.Expr, *, fd: bool) -> list[pl.Expr]:
    padded, size = digits.str.pad_end(2 * MAX_PAYLOAD_BYTES, "0"), digits.str.len_bytes()
    return [
        (size // 2).alias("length"),  # in bytes
        # A big-endian number with zeros after the payload.
        padded.str.to_integer(base=16, dtype=pl.UInt64, strict=False).alias("payload"),
        *([pl.when(size > 2 * MAX_PAYLOAD_BYTES).then(digits).alias("long")] if fd else []),
    ]


def _dlc(grammar: Grammar) -> list[pl.Expr]:
    """Returns the column of payload lengths in bytes that the rows tell."""
    parts = [pl.col("dlc").cast(pl.UInt32, strict=False)] if grammar.has("dlc") else []
    if grammar.has("code"):
        code = pl.col("code").str.to_integer(base=grammar.id_base, dtype=pl.UInt32, strict=False)
        parts.append(code.clip(upper_bound=MAX_PAYLOAD_BYTES))
    return [pl.coalesce(parts).alias("dlc")] if parts else []


def _cut_to_dlc(rows: pl.DataFrame, *, fd: bool) -> tuple[pl.DataFrame, int]:
    """Cuts padding bytes after the bytes of the DLC; also returns the number of rows with padding."""
    dlc, digits = pl.col("dlc"), pl.col("digits")
    # CAN FD's code for its lengths, or the length itself.
    coded = dlc.replace_strict(dict(enumerate(FD_LENGTHS)), default=None)
    is_filled = ((pl.col("length") > dlc) & (pl.col("length") != coded)).fill_null(False)
    num_cut = int(rows.select(is_filled.sum()).item())
    length = pl.when(dlc.is_in(FD_LENGTHS)).then(dlc).otherwise(coded)
    rows = rows.with_columns(digits=pl.when(is_filled).then(digits.str.head(2 * length)).otherwise(digits))
    return rows.with_columns(_payload_columns(digits, fd=fd)), num_cut


def _words(label: pl.Expr) -> pl.Expr:
    """Returns the words after a row; null without words."""
    return pl.when(label.str.strip_chars() != "").then(label.str.strip_chars())


def _payload_bytes(rows: pl.DataFrame) -> NDArray[np.uint8]:
    """Returns the payloads of well-formed rows [M, P]."""
    short = rows["payload"].fill_null(0).to_numpy().astype(">u8").view(np.uint8).reshape(-1, MAX_PAYLOAD_BYTES)
    if "long" not in rows.columns or (is_long := rows["long"].is_not_null()).sum() == 0:
        return short
    payload = np.zeros((len(rows), FD_PAYLOAD_BYTES), np.uint8)
    payload[:, :MAX_PAYLOAD_BYTES] = short
    whole = rows["long"].drop_nulls().str.pad_end(2 * FD_PAYLOAD_BYTES, "0").str.decode("hex")
    payload[is_long.to_numpy()] = np.frombuffer(b"".join(whole), np.uint8).reshape(-1, FD_PAYLOAD_BYTES)
    return payload


def _rules(grammar: Grammar, *, has_long: bool) -> list[tuple[pl.Expr, str]]:
    """Returns the rules for a row's columns, in order; a malformed row gets the reason of the first broken rule.

    Args:
        grammar: Grammar of the rows.
        has_long: Whether any payload is longer than a classical frame's.
    """
    timestamp, length = pl.col("timestamp"), pl.col("length")
    most_ticks = MAX_TIME_S * (grammar.ticks_per_second if grammar.unit_known else MAX_TICKS_PER_SECOND)
    rules = [
        (pl.col("matched"), NO_MATCH),
        (timestamp.is_finite(), BAD_TIMESTAMP),
        (timestamp.abs() <= most_ticks, LATE_TIMESTAMP),
        (pl.col("id") <= MAX_CAN_ID, "the ID does not fit into 29 bits"),
        *_payload_rules(grammar.fd_groups if has_long else ()),
    ]
    if grammar.has("dlc") or grammar.has("code"):
        # CAN FD's code for its lengths, or the length itself.
        dlc = pl.col("dlc")
        agrees = dlc.is_null() | (dlc == length)
        if grammar.fd_groups and has_long:
            agrees |= dlc.replace_strict(dict(enumerate(FD_LENGTHS)), default=None) == length
        if grammar.padded or grammar.has("fd"):
            # The DLC of a classical frame may be 9 to 15: it has 8 bytes.
            classical = pl.col("fd").is_null() if grammar.has("fd") else pl.lit(True)
            agrees |= classical & dlc.is_between(MAX_PAYLOAD_BYTES + 1, 15) & (length == MAX_PAYLOAD_BYTES)
        for group in ("remote", "request"):
            if grammar.has(group):
                agrees |= pl.col(group).is_not_null()
        rules.append((agrees, "the DLC disagrees with the payload"))
    label = pl.col("label")
    may_lack = label.is_null() if grammar.unlabelled_rows else pl.lit(False)
    if grammar.has("label"):
        rules.append((label.is_not_null() | may_lack, "the label is missing"))
    if grammar.labels:
        rules.append((label.is_in(grammar.labels) | may_lack, "the label is unknown in this format"))
    return rules


def _payload_rules(fd_groups: Sequence[str]) -> list[tuple[pl.Expr, str]]:
    length, is_short = pl.col("length"), pl.col("length") <= MAX_PAYLOAD_BYTES
    whole = pl.col("payload").is_not_null()
    if not fd_groups:
        return [(is_short, f"the payload is longer than {MAX_PAYLOAD_BYTES} bytes"), (whole, BAD_PAYLOAD)]
    may_be_long = pl.any_horizontal(pl.col(group).is_not_null() for group in fd_groups)
    has_digits = pl.col("long").str.decode("hex", strict=False).is_not_null()
    return [
        (is_short | may_be_long, f"the payload is longer than {MAX_PAYLOAD_BYTES} bytes"),
        (is_short | (length <= FD_PAYLOAD_BYTES), f"the payload is longer than {FD_PAYLOAD_BYTES} bytes"),
        (is_short | length.is_in(FD_LENGTHS), "no CAN FD frame has a payload of this length"),
        (pl.when(is_short).then(whole).otherwise(has_digits), BAD_PAYLOAD),
    ]


_NONE_MALFORMED: Final = pl.DataFrame(
    schema={"position": pl.get_index_type(), "line": pl.String, "reason": pl.String, "id": pl.UInt64,
            "label": pl.String}
)  # fmt: skip


def _malformed(rows: pl.DataFrame, rules: list[tuple[pl.Expr, str]], grammar: Grammar) -> tuple[pl.DataFrame, int]:
    """Returns position, line and reason of malformed rows, without repeated headers; and the number of error frames.

    A row that breaks a rule is malformed unless it is an error frame or a repeated header.
    """
    line = pl.col("line")
    rows = rows.filter(_is_row(line), line.str.strip_chars() != grammar.header)
    num_rows = len(rows)
    if not num_rows:
        # In most blocks: polars would take longer for the columns of no row than for the columns of all rows.
        return _NONE_MALFORMED, 0
    if grammar.error_frame:
        rows = rows.filter(~line.str.contains(grammar.error_frame))
    error_frames = num_rows - len(rows)
    if grammar.no_row:
        rows = rows.filter(~line.str.contains(grammar.no_row))
    reason = pl.lit(None, dtype=pl.String)
    for rule, sentence in reversed(rules):
        reason = pl.when(rule.fill_null(False)).then(reason).otherwise(pl.lit(sentence))
    label = pl.col("label") if grammar.has("label") else pl.lit(None, dtype=pl.String)
    broken = rows.select("position", "line", reason=reason, id="id", label=label)
    fields = _fields(broken["line"], grammar)
    unmatched = pl.col("reason") == NO_MATCH
    broken = broken.hstack([column.alias(f"other_{column.name}") for column in fields.get_columns()]).select(
        "position",
        "line",
        pl.when(unmatched).then("other_reason").otherwise("reason")
        .replace({BAD_PAYLOAD: _BAD_PAYLOADS.get(grammar.payload_code, BAD_PAYLOAD)}).alias("reason"),
        pl.coalesce("id", "other_id").alias("id"),
        pl.coalesce("label", "other_label").alias("label"),
    )  # fmt: skip
    return broken, error_frames


def _fields(lines: pl.Series, grammar: Grammar) -> pl.DataFrame:
    """Finds the wrong field, the `id` and the `label` of rows that do not match; null where they are not known."""
    # The pattern with any content of timestamp, ID and payload: where it matches, one of the three fields is wrong.
    pattern, time = grammar.pattern, _TIMES[grammar.time_code]
    if grammar.time_code != NUMBER_CODE:
        for token in (time, time.replace(_FRACTION, "[.:]")):
            pattern = pattern.replace(token, r"[^,;\t]+?")
    for token in (CELL, DECIMAL_CELL):
        pattern = pattern.replace(token, f"{grammar.any_character}*")
    for token in (BYTE, HEX, NUMBER, DIGITS):
        pattern = pattern.replace(token, f"{grammar.any_character}+")
    fields = lines.str.extract_groups(pattern).struct.unnest()
    # A row that was cut off has a complete ID only if another field begins after it.
    begin = grammar.pattern.index("(?P<id>")
    prefix = grammar.pattern[: grammar.pattern.index(")", begin) + 1]
    ids = lines.str.extract_groups(f"{prefix}[^0-9A-Za-z]").struct.field("id")
    label = pl.col("label") if grammar.has("label") else pl.lit(None, dtype=pl.String)
    label = _words(label) if grammar.several_labels else label
    is_id = pl.col("id").str.contains(f"^{HEX if grammar.id_base == 16 else DIGITS}$")
    return fields.select(
        pl.when(pl.col("timestamp").is_null()).then(pl.lit(NO_MATCH))
        .when(~pl.col("timestamp").str.contains(f"^{time}$")).then(pl.lit(BAD_TIMESTAMP))
        .when(~is_id).then(pl.lit(BAD_ID))
        .otherwise(pl.lit(BAD_PAYLOAD)).alias("reason"),
        pl.coalesce(pl.when(is_id).then("id"), pl.lit(ids))
        .str.to_integer(base=grammar.id_base, dtype=pl.UInt64, strict=False).alias("id"),
        label.alias("label"),
    )  # fmt: skip
