"""The published formats: those of lines without a header, and CSV files that are recognised by their exact header."""

from __future__ import annotations

import re
from typing import Final

import polars as pl

from can_train.tasks.can.data.grammar import (
    BASE64,
    BLANKS,
    BYTE,
    DIGITS,
    END,
    GAP,
    HEX,
    SPACED_BYTES,
    TIMESTAMP,
    Grammar,
)

_WORD: Final = "[0-9A-Za-z_ -]*"
_REST: Final = r"[^\r\n]*"


def _car_hacking(label: str) -> Grammar:
    # `1478198376.389427,0316,8,05,21,68,09,21,21,00,6f,R`: no header, and as many columns as the DLC says. Copies that
    # went through a spreadsheet are padded with empty cells before the label.
    payload = f"(?:,(?P<data>,*(?:{BYTE},*)*){label})?"
    row = f"^{TIMESTAMP},(?P<id>{HEX}),(?P<dlc>{DIGITS}){payload}{BLANKS}{END}"
    return Grammar(name="car_hacking", pattern=row, separators=",", labels=("R", "T") if label else ())


# HCRL's field of three digits behind the ID; the first digit 1 marks a remote transmission request.
_FLAGS: Final = "(?:(?P<remote>1)|[02-9])[0-9]{2}"

# `(ts) can0 12A#00F0` as `candump -l` writes it, newer ones with R or T for the direction, and
# `(ts)  can0  12A   [2]  00 F0` as it prints: with `-x` the direction is before the ID, with `-a` characters are behind
# the payload. `##` is CAN FD.
_CANDUMP_START: Final = rf"^{BLANKS}\({TIMESTAMP}\){GAP}(?P<channel>[!-~]+){GAP}(?:(?:RX|TX){GAP}[B-]{GAP}[E-]{GAP})?"
# The blanks are part of the payload, so that each character allows only one way on: an R behind `#` asks for data, one
# behind a blank is the direction.
_CANDUMP_FRAME: Final = (
    rf"{_CANDUMP_START}(?P<id>{HEX})(?:#(?P<fd>#[0-9A-Fa-f])?|{GAP}\[(?P<dlc>{DIGITS})\])"
    rf"(?:(?P<remote>R[0-9A-F]?)(?:{GAP}(?:[RT]{BLANKS})?)?|"
    rf"(?:(?P<data>(?:[ \t]|{BYTE})+)(?:[RT]{BLANKS}|(?P<request>remote request){BLANKS}|'[^\r\n]*)?)?)"
)
# Bit 29 of SocketCAN's identifiers. `-e` writes what it means on lines below.
_CANDUMP_ERROR: Final = (
    rf"^{BLANKS}\([^)]*\){GAP}[!-~]+{GAP}(?:(?:RX|TX){GAP}[B-]{GAP}[E-]{GAP})?[23][0-9A-Fa-f]{{7}}(?:#|{GAP}\[)"
)
_CANDUMP_REMARK: Final = r"^\t+[a-z][a-z-]*(?:[{,]|$)|^DROPCOUNT:"
_TRUTH: Final = "(?i:true|false|[01])"


def _candump(name: str, label: str) -> Grammar:
    return Grammar(
        name=name,
        pattern=f"{_CANDUMP_FRAME}{label}{END}",
        separators=" \t",
        # One word for each detector or attack that was running: a frame is an attack if any of them is true.
        several_labels=bool(label),
        fd_groups=("fd", "dlc"),
        error_frame=_CANDUMP_ERROR,
        no_row=_CANDUMP_REMARK,
    )


# Vector: `0.001000 1  123  Rx   d 8 01 02 …  Length = 240000 …`, and CAN FD:
# `0.001000 CANFD   1 Rx        123  name  1 0 8  8 01 02 …   130000  130 …`, whose last fields look like bytes.
_ASC_ID: Final = f"(?P<id>{HEX})[xX]?{GAP}"
_ASC_DIRECTION: Final = f"(?:Rx|Tx|TxRq){GAP}"
_ASC_ERROR: Final = rf"^{BLANKS}[0-9.]+{GAP}(?:CANFD{GAP})?[0-9]+{GAP}(?:(?:Rx|Tx){GAP})?(?i:ErrorFrame)"
# Its header, triggers, and the other events of a bus: their second word is one, or follows the channel.
_ASC_EVENT: Final = (
    rf"^{BLANKS}(?:[A-Za-z/]|[0-9.]+{GAP}(?:[ABD-Zabd-z/]|[Cc](?:[B-Zb-z]|AN[^F])|"
    rf"(?:CANFD{GAP})?[0-9]+{GAP}(?:Statistic|OverloadFrame|Status)))"
)


_ASC_SETTINGS: Final = r"(?i)^base +(?P<base>hex|dec)(?: +timestamps +(?P<timestamps>absolute|relative))?"


def _asc(base: int = 16, *, relative: bool = False) -> Grammar:
    number = BYTE if base == 16 else "[0-9]{1,3}"
    # CAN FD has the direction before the ID, then a name, two flags and the DLC's code.
    flags = f"(?:[A-Za-z_][!-~]*{GAP})?[01]{GAP}[01]{GAP}[0-9A-Fa-f]{GAP}"
    return Grammar(
        name="asc",
        pattern=(
            f"^{BLANKS}{TIMESTAMP}{GAP}(?:(?P<fd>CANFD){GAP})?(?P<channel>[0-9]+){GAP}(?:{_ASC_DIRECTION})?"
            f"(?P<id>{HEX})[xX]?{GAP}(?:{_ASC_DIRECTION})?(?:[dD]{GAP}|(?P<remote>[rR]){BLANKS}|{flags})"
            f"(?P<dlc>{DIGITS})?{BLANKS}(?P<data>(?:{number}(?:[ ]|$|\r))*){_REST}{END}"
        ),
        separators=" \r",
        id_base=base,
        payload_code="hex" if base == 16 else "decimal",
        cut_to_dlc=True,
        fd_groups=("fd",),
        unit_known=True,
        relative=relative,
        error_frame=_ASC_ERROR,
        no_row=_ASC_EVENT,
    )


# PEAK, versions 1.x: `1)  1059.900  Rx  0300  8  00 01 …`, from 1.2 on with the bus before the direction, in 1.3 with a
# reserved field behind the ID, and in 1.0 without a direction. Times are milliseconds in all versions.
_TRC_STATUS: Final = r"^[ \t]*;|^[ \t]*[0-9]+\)?[ \t]+[0-9.]+[ \t]+(?:[0-9]+[ \t]+)?(?:Warng|ST|EC|EV)\b"
_TRC_ERROR: Final = r"^[ \t]*[0-9]+\)?[ \t]+[0-9.]+[ \t]+(?:[0-9]+[ \t]+)?(?:Error\b|ER\b|FFFFFFFF\b)"
_TRC_BYTES: Final = f"(?:{GAP}(?:(?P<remote>RTR){BLANKS}|{SPACED_BYTES}))?"
_TRC_1: Final = (
    rf"^{BLANKS}[0-9]+\){GAP}{TIMESTAMP}{GAP}(?:(?:(?P<channel>[0-9]+){GAP})?(?:Rx|Tx){GAP})?"
    rf"(?P<id>{HEX}){GAP}(?:-{GAP})?(?P<dlc>{DIGITS}){_TRC_BYTES}{END}"
)
# Versions 2.x name their columns.
_TRC_COLUMNS: Final = r"^;\$COLUMNS=(?P<columns>[A-Za-z](?:,[A-Za-z])*)"
_TRC_2_COLUMNS: Final = "N,O,T,B,I,d,R,L,D"  # of version 2.1; 2.0 has neither bus nor reserved field
_TRC_CELLS: Final = {
    "N": DIGITS,
    "O": TIMESTAMP,
    "T": "(?:DT|(?P<fd>FD|FB|FE|BI)|(?P<remote>RR))",
    "B": "(?P<channel>[-0-9]+)",
    "I": f"(?P<id>{HEX})",
    "d": "(?:Rx|Tx)",
    "L": f"(?P<dlc>{DIGITS})",
    "l": f"(?P<dlc>{DIGITS})",
}


def _trc(pattern: str) -> Grammar:
    return Grammar(
        name="trc",
        pattern=pattern,
        separators=" \t",
        fd_groups=("fd",) if "<fd>" in pattern else (),
        ticks_per_second=1000,
        unit_known=True,
        error_frame=_TRC_ERROR,
        no_row=_TRC_STATUS,
    )


def _trc_2(columns: str) -> Grammar:
    cells = [_TRC_CELLS.get(column, "[!-~]+") for column in columns.split(",") if column != "D"]
    return _trc(f"^{BLANKS}{GAP.join(cells)}(?:{GAP}{SPACED_BYTES})?{BLANKS}{END}")


def _are_columns(columns: str) -> bool:
    """Returns whether columns have what a frame needs, and nothing twice: the line may be damaged."""
    cells = columns.replace("l", "L").split(",")
    return {"O", "I"} <= {*cells} and len({*cells}) == len(cells)


_FIXED_GRAMMARS: Final = (
    # The label is R (regular) or T (injected). Any letter that is no hexadecimal digit is taken for one, so that a
    # wrong label is named as such and a row without one is told from a row that was cut off.
    _car_hacking("(?P<label>[G-Zg-z])?"),
    _car_hacking(""),
    Grammar(
        # `Timestamp: 1479121434.850202  ID: 0350  000  DLC: 8  05 28 84 …`: HCRL's attack-free logs and OTIDS.
        name="hcrl_text",
        pattern=(
            f"^{BLANKS}Timestamp:{BLANKS}{TIMESTAMP}{GAP}ID:{BLANKS}(?P<id>{HEX}){GAP}{_FLAGS}{GAP}"
            f"DLC:{BLANKS}(?P<dlc>[0-9]){BLANKS}{SPACED_BYTES}{END}"
        ),
        separators=" \t",
    ),
    _candump("candump", ""),
    _candump("candump_labelled", f"(?:{GAP}(?P<label>{_TRUTH}(?:{GAP}{_TRUTH})*))?{BLANKS}"),
    Grammar(
        # `1483093132.049669  0380  000  2  30 bb`
        name="whitespace",
        pattern=(
            f"^{BLANKS}{TIMESTAMP}{GAP}(?P<id>{HEX}){GAP}(?:{_FLAGS}{GAP})?(?P<dlc>[0-9])(?:{GAP}{SPACED_BYTES})?{END}"
        ),
        separators=" \t",
    ),
)
# The formats without a header.
LINE_GRAMMARS: Final = (*_FIXED_GRAMMARS, _asc(), _trc(_TRC_1), _trc_2(_TRC_2_COLUMNS))


def line_grammars(sample: pl.Series) -> list[Grammar]:
    """Returns the grammars of formats without a header, as the first lines of a log say that it was written."""
    lines = sample.drop_nulls()
    found = next(iter(lines.filter(lines.str.contains(_ASC_SETTINGS))), "base hex")
    asc = re.match(_ASC_SETTINGS, found)
    found = next(iter(lines.filter(lines.str.contains(_TRC_COLUMNS))), "")
    trc = re.match(_TRC_COLUMNS, found)
    columns = trc["columns"] if trc and _are_columns(trc["columns"]) else _TRC_2_COLUMNS
    assert asc is not None
    base = 10 if asc["base"].lower() == "dec" else 16
    relative = (asc["timestamps"] or "").lower() == "relative"
    return [*_FIXED_GRAMMARS, _asc(base, relative=relative), _trc(_TRC_1), _trc_2(columns)]


# can-train-and-test has no DLC; its payload has 0 to 16 digits without separators.
_THREE_COLUMNS: Final = f"^{TIMESTAMP},(?P<id>{HEX}),(?P<data>(?:{BYTE})*)"

_PYTHON_CAN: Final = "timestamp,arbitration_id,extended,remote,error,dlc,data"


def _python_can(label: str) -> Grammar:
    # The payload is written in base64. A row of an error frame has a 1 before the DLC.
    row = f"^{TIMESTAMP},0x(?P<id>{HEX}),[01],(?:0|(?P<remote>1)),0,(?P<dlc>{DIGITS}),(?P<data>{BASE64})"
    return Grammar(
        name="python_can",
        pattern=f"{row}{f',(?P<label>{_WORD})' if label else ''}{END}",
        payload_code="base64",
        fd_groups=("timestamp",),
        unit_known=True,
        error_frame="^[^,]*,[^,]*,[01],[01],1,",
        header=_PYTHON_CAN + label,
    )


def _savvycan(direction: str) -> Grammar:
    # Microseconds; a comma follows each byte, the last one too.
    row = f"^{TIMESTAMP},(?:0x)?(?P<id>{HEX}),(?i:true|false|0|1),{'(?:Rx|Tx)?,' if direction else ''}"
    return Grammar(
        name="savvycan",
        pattern=f"{row}(?P<channel>[0-9]*),(?P<dlc>{DIGITS}),?(?P<data>(?:{BYTE}?,*)*){END}",
        separators=",",
        fd_groups=("dlc",),
        ticks_per_second=1_000_000,
        unit_known=True,
        header=f"Time Stamp,ID,Extended,{direction}Bus,LEN,D1,D2,D3,D4,D5,D6,D7,D8",
    )


# The published formats that are recognised by their exact header. Their IDs are hexadecimal even where all look
# decimal.
PUBLISHED_CSV_GRAMMARS: Final = (
    Grammar(
        name="can_train_and_test",
        pattern=f"{_THREE_COLUMNS},(?P<label>{_WORD}){END}",
        labels=("0", "1"),
        header="timestamp,arbitration_id,data_field,attack",
    ),
    Grammar(name="can_train_and_test", pattern=f"{_THREE_COLUMNS}{END}", header="timestamp,arbitration_id,data_field"),
    Grammar(
        name="hcrl_challenge",
        pattern=(
            f"^{TIMESTAMP},(?P<id>{HEX}),(?P<dlc>{DIGITS}),{SPACED_BYTES},(?P<label>{_WORD}),(?P<kind>{_WORD}){END}"
        ),
        separators=" ",
        labels=("Normal", "Attack"),
        header="Timestamp,Arbitration_ID,DLC,Data,Class,SubClass",
    ),
    _python_can(""),
    _python_can(",label"),
    _savvycan("Dir,"),
    _savvycan(""),
)


def dated(grammars: list[Grammar], sample: pl.Series) -> list[Grammar]:
    """Adds grammars for dates in place of seconds if there are any in the first lines of a log."""
    has_dates = sample.str.contains("[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}").any()
    return [*grammars, *(grammar.with_dates() for grammar in grammars)] if has_dates else grammars
