"""The published formats: lines without a header, and CSV files with an exact header."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Final

import numpy as np
import polars as pl

from can_train_tasks.can.data.grammar import (
    BASE64,
    BLANKS,
    BYTE,
    CLOCK,
    CLOCK_CODE,
    COMMA_CODE,
    DATE_CODE,
    DIGITS,
    END,
    GAP,
    HEX,
    NUMBER,
    SPACED_BYTES,
    TIMESTAMP,
    Grammar,
    ParsedRows,
)

_WORD: Final = "[0-9A-Za-z_ -]*"
_REST: Final = r"[^\r\n]*"


def _car_hacking(*, unlabelled_rows: bool) -> Grammar:
    # `1478198376.389427,0316,8,05,21,68,09,21,21,00,6f,R`: no header, and as many byte columns as the DLC says. Copies
    # from a spreadsheet are padded with empty cells before the label.
    # The label is R (regular) or T (injected). The pattern takes any letter that is no hexadecimal digit for a label,
    # so that a wrong label is reported, and a row without a label differs from a row that was cut off.
    payload = f"(?:,(?P<data>,*(?:{BYTE},*)*)(?P<label>[G-Zg-z])?)?"
    return Grammar(
        name="car_hacking",
        pattern=f"^{TIMESTAMP},(?P<id>{HEX}),(?P<dlc>{DIGITS}){payload}{BLANKS}{END}",
        separators=",",
        labels=("R", "T"),
        unlabelled_rows=unlabelled_rows,
        padded=True,
        # HCRL's CAN FD logs are written alike.
        fd_groups=("dlc",),
    )


def _resaved_car_hacking(*, unlabelled_rows: bool) -> Grammar:
    # The notation of pandas for such a log: the row's number comes first, and rows are padded with empty cells, which
    # follow the label in a short row.
    empty = "(?:(?i:nan)?,)*"
    payload = f"(?:,{empty}(?P<data>(?:{BYTE},*)*){empty}(?P<label>[G-Zg-z])?(?:,(?i:nan)?)*)?"
    return replace(
        _car_hacking(unlabelled_rows=unlabelled_rows),
        pattern=rf"^(?:[0-9]+,)?{TIMESTAMP},(?P<id>{HEX}),(?P<dlc>{DIGITS})(?:\.0)?{payload}{BLANKS}{END}",
    )


RESAVED_CAR_HACKING: Final = (_resaved_car_hacking(unlabelled_rows=False), _resaved_car_hacking(unlabelled_rows=True))

# HCRL's field of three digits after the ID; a first digit of 1 marks a remote transmission request.
_FLAGS: Final = "(?:(?P<remote>1)|[02-9])[0-9]{2}"

# Bytes between blanks, and the label after the bytes in some rows: a word, or a digit that is no half of a byte.
_WORDED_BYTES: Final = f"(?P<data>(?:{GAP}(?:{BYTE})+)*)"
_LABEL: Final = "(?:[01G-Zg-z]|[0-9A-Za-z_][0-9A-Za-z_.-]+)"
_LABELLED_BYTES: Final = f"{_WORDED_BYTES}(?:{GAP}(?P<label>{_LABEL}))?{BLANKS}"

# `candump -l` writes `(ts) can0 12A#00F0`, newer versions with R or T for the direction. candump prints
# `(ts)  can0  12A   [2]  00 F0`: with `-x` the direction is before the ID, with `-a` characters are after the payload.
# `##` is CAN FD. `_E` and `{E}` are the DLC of a frame of 8 bytes.
_CANDUMP_START: Final = (
    rf"^{BLANKS}\({TIMESTAMP}\){GAP}(?P<channel>[!-~]+){GAP}(?:(?:RX|TX){GAP}[B-]{GAP}[E-]{GAP})?(?P<id>{HEX})"
)
_CANDUMP_WRITTEN: Final = (
    f"#(?:(?P<remote>R[0-9A-F]?(?:_[9A-F])?)|(?P<fd>#[0-9A-Fa-f])?(?P<data>(?:{BYTE})*)(?:_[9A-F])?)"
)
_CANDUMP_PRINTED: Final = (
    rf"{GAP}(?:\[(?P<dlc>{DIGITS})\]|\{{(?P<code>[0-9A-F])\}})"
    rf"(?:{GAP}(?P<remote>remote request)|{_WORDED_BYTES}(?:{GAP}'[^\r\n]*')?)"
)
# R and T after all rows are the direction; after some rows only, they are labels.
_CANDUMP_DIRECTION: Final = f"{GAP}(?P<direction>[RT]x?)"
# The blanks are part of the payload, so that the pattern never has two ways to match a character.
_CANDUMP_USUALLY_PRINTED: Final = (
    rf"{GAP}\[(?P<dlc>{DIGITS})\](?:(?P<data>(?:[ \t]|{BYTE})+)(?:(?P<remote>remote request){BLANKS}|'[^\r\n]*)?)?"
)
# Bit 29 of SocketCAN's identifiers marks an error frame. With `-e`, the next lines explain the frame.
_CANDUMP_ERROR: Final = (
    rf"^{BLANKS}\([^)]*\){GAP}[!-~]+{GAP}(?:(?:RX|TX){GAP}[B-]{GAP}[E-]{GAP})?[23][0-9A-Fa-f]{{7}}(?:#|{GAP}\[)"
)
_CANDUMP_REMARK: Final = r"^\t+[a-z][a-z-]*(?:[{,]|$)|^DROPCOUNT:"
# A priority of three digits, after the two digits of a virtual network: flags, type and acceptance field follow.
_CANDUMP_XL: Final = (
    rf"^{BLANKS}\([^)]*\){GAP}[!-~]+{GAP}(?:(?:RX|TX){GAP}[B-]{GAP}[E-]{GAP})?"
    r"(?:[0-9A-Fa-f]{5}#[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}:|[0-9A-Fa-f]{3}[ \t]+\[[0-9]{4}\] \()"
)


def _candump(frame: str, usual: str, *, unlabelled_rows: bool, direction: str = "") -> Grammar:
    # One word for each detector or attack that was running: a frame is an attack if any word is true.
    words = rf"(?:{GAP}(?P<label>{_LABEL}(?:{GAP}{_LABEL})*))?"
    return Grammar(
        name="candump" if unlabelled_rows else "candump_labelled",
        pattern=f"{_CANDUMP_START}{frame}{direction}{words}{BLANKS}{END}",
        usual=f"{_CANDUMP_START}{usual}{direction}{BLANKS}{END}",
        separators=" \t",
        unlabelled_rows=unlabelled_rows,
        several_labels=True,
        fd_groups=("fd",) if "<fd>" in frame else ("dlc",),
        error_frame=_CANDUMP_ERROR,
        xl_frame=_CANDUMP_XL,
        no_row=_CANDUMP_REMARK,
    )


# Vector: `0.001000 1  123  Rx   d 8 01 02 …  Length = 240000 …`, and CAN FD:
# `0.001000 CANFD   1 Rx        123  name  1 0 8  8 01 02 …   130000  130 …`, whose last fields look like bytes.
_ASC_DIRECTION: Final = f"(?:Rx|Tx|TxRq){GAP}"
_ASC_TIME: Final = rf"^{BLANKS}[0-9.]+{GAP}"
_ASC_ERROR: Final = rf"{_ASC_TIME}(?:CANFD{GAP})?[0-9]+{GAP}(?:(?:Rx|Tx){GAP})?(?i:ErrorFrame)"
# Headers and triggers begin with a letter. An event that is no frame has a word in place of the channel, or after the
# channel a word that is no ID, since no direction and type of a frame follow.
_ASC_NO_DIRECTION: Final = r"(?:[^RT\s]|[RT](?:[^x\s]|\s|$)|[RT]x[^R\s])"
_ASC_NO_ID: Final = r"[0-9A-Fa-f]*(?:[xX][!-~]|[!-/:-@G-WYZ\[-`g-wyz{-~])[!-~]*"
_ASC_EVENT: Final = (
    rf"^{BLANKS}(?:[A-Za-z/]|[0-9.]+{GAP}(?:"
    r"[!-/:-@ABD-Z\[-`abd-z{-~]|[Cc](?:[^A]|A(?:[^N]|N(?:[^FX]|F[^D]|X[^L])))|"
    rf"CANFD{GAP}[0-9]+{GAP}{_ASC_NO_DIRECTION}|[0-9]+{GAP}{_ASC_NO_ID}(?:{BLANKS}\r?$|{GAP}{_ASC_NO_DIRECTION})))"
)
_ASC_XL: Final = rf"{_ASC_TIME}CANXL{GAP}"


# The row of a frame up to its direction.
_ASC_UP_TO_DIRECTION: Final = rf"{_ASC_TIME}(?:CANFD{GAP})?[0-9]+{GAP}(?:{HEX}[xX]?{GAP})?"


class TransmitRequests:
    """Leaves out the requests of an ASC log (TxRq) to send frames that the log has as sent (Tx), too: each of these
    frames was on the bus once. Requests of an ID that is never logged as sent stand for the frames.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._is_asc = grammar.name == "asc"
        self._sent = np.zeros(0, np.uint32)  # IDs of frames that were logged as sent, so far

    def of(self, rows: ParsedRows, lines: pl.Series) -> ParsedRows:
        """Returns the rows of the next block of lines, without the requests of IDs that are logged as sent so far."""
        if not self._is_asc or not lines.str.contains("TxRq", literal=True).any():
            return rows
        of_rows = lines.gather(rows.position)
        requested, sent = (
            of_rows.str.contains(f"{_ASC_UP_TO_DIRECTION}{word}{GAP}").to_numpy() for word in ("TxRq", "Tx")
        )
        self._sent = np.union1d(self._sent, rows.can_id[sent])
        left_out = requested & np.isin(rows.can_id, self._sent)
        return replace(rows.select(~left_out), requests=int(np.count_nonzero(left_out)))


_ASC_SETTINGS: Final = r"(?i)^base +(?P<base>hex|dec)(?: +timestamps +(?P<timestamps>absolute|relative))?"


def _asc(base: int = 16, *, relative: bool = False) -> Grammar:
    number = BYTE if base == 16 else "[0-9]{1,3}"
    code = "[0-9A-Fa-f]" if base == 16 else "[0-9]{1,2}"
    # CAN FD has the direction before the ID, then a name, two flags and the DLC's code before the length.
    flags = f"(?:[A-Za-z_][!-~]*{GAP})*[01]{GAP}[01]{GAP}(?:[0-9A-Fa-f]|1[0-5]){GAP}"
    return Grammar(
        name="asc",
        pattern=(
            f"^{BLANKS}{TIMESTAMP}{GAP}(?:(?P<fd>CANFD){GAP})?(?P<channel>[0-9]+){GAP}(?:{_ASC_DIRECTION})?"
            f"(?P<id>{HEX})[xX]?{GAP}(?:{_ASC_DIRECTION})?"
            rf"(?:(?:[dD]|(?P<remote>[rR]))(?:{GAP}(?P<code>{code}))?|{flags}(?P<dlc>{DIGITS}))(?:{GAP}|\r?$)"
            f"(?P<data>(?:{number}(?:[ ]|$|\r))*){_REST}{END}"
        ),
        separators=" \r",
        id_base=base,
        payload_code="hex" if base == 16 else "decimal",
        cut_to_dlc=True,
        fd_groups=("fd",),
        unit_known=True,
        relative=relative,
        error_frame=_ASC_ERROR,
        xl_frame=_ASC_XL,
        no_row=_ASC_EVENT,
    )


# PEAK, versions 1.x: `1)  1059.900  Rx  0300  8  00 01 …`, from 1.2 on with the bus before the direction, in 1.3 with a
# reserved field after the ID, and in 1.0 without a direction. Times are milliseconds in all versions.
_TRC_STATUS: Final = r"^[ \t]*;|^[ \t]*[0-9]+\)?[ \t]+[0-9.]+[ \t]+(?:[0-9]+[ \t]+)?(?:Warng|ST|EC|EV)\b"
_TRC_ERROR: Final = r"^[ \t]*[0-9]+\)?[ \t]+[0-9.]+[ \t]+(?:[0-9]+[ \t]+)?(?:Error\b|ER\b|FFFFFFFF\b)"
_TRC_BYTES: Final = f"(?:{GAP}(?:(?P<remote>RTR){BLANKS}|{SPACED_BYTES}))?"
_TRC_1: Final = (
    rf"^{BLANKS}[0-9]+\){GAP}{TIMESTAMP}{GAP}(?:(?:(?P<channel>[0-9]+){GAP})?(?:Rx|Tx){GAP})?"
    rf"(?P<id>{HEX}){GAP}(?:-{GAP})?(?P<dlc>{DIGITS}){_TRC_BYTES}{END}"
)
# Versions 2.x name their columns.
_TRC_COLUMNS: Final = r"^;\$COLUMNS=(?P<columns>[A-Za-z](?:,[A-Za-z])*)"
_TRC_2_COLUMNS: Final = "N,O,T,B,I,d,R,L,D"  # columns of version 2.1; 2.0 has neither bus nor reserved field
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


# `11:49:12:9420 Rx 1 0x023 s 1 40`: the last number of a time is the fraction of a second. Types are s and x for IDs of
# 11 and 29 bits, with an r for remote frames and -fd for CAN FD. IDs and bytes are decimal under `***DEC***`.
_BUSMASTER_MARK: Final = r"^[^*]?\*\*\*"
_BUSMASTER_SETTINGS: Final = rf"{_BUSMASTER_MARK}(DEC|RELATIVE MODE|SYSTEM MODE)\*\*\*"
_BUSMASTER_SESSION: Final = (
    rf"{_BUSMASTER_MARK}START DATE AND TIME (?P<date>[0-9]+:[0-9]+:[0-9]+) (?P<clock>[0-9]+:[0-9]+:[0-9]+:[0-9]+)\*"
)
_BUSMASTER_HEAD: Final = f"{GAP}(?i:[RT]x){GAP}(?P<channel>[0-9]+){GAP}"


def _busmaster(settings: Collection[str] = ()) -> Grammar:
    base = 10 if "DEC" in settings else 16
    can_id = f"(?P<id>{DIGITS})" if base == 10 else f"(?:0[xX])?(?P<id>{HEX})"
    number = "[0-9]{1,3}" if base == 10 else BYTE
    return Grammar(
        name="busmaster",
        pattern=(
            f"^{BLANKS}(?P<timestamp>{CLOCK}){_BUSMASTER_HEAD}{can_id}{GAP}(?i:[sx](?:(?P<remote>r)|(?P<fd>-fd))?)"
            f"{GAP}(?P<dlc>{DIGITS})(?P<data>(?:{GAP}{number})*){BLANKS}{END}"
        ),
        separators=" \t",
        id_base=base,
        payload_code="hex" if base == 16 else "decimal",
        fd_groups=("fd",),
        unit_known=True,
        time_code=CLOCK_CODE,
        relative="RELATIVE MODE" in settings,
        session=_BUSMASTER_SESSION,
        from_midnight="SYSTEM MODE" in settings,
        error_frame=f"^{BLANKS}{CLOCK}{_BUSMASTER_HEAD}(?:[0-9A-Fa-fxX]+{GAP})?ERR",
        # The header with the names of databases in it, and the footer.
        no_row=rf"{_BUSMASTER_MARK}|^[A-Za-z]:[\\/]",
    )


# `0,5.06,id10,0.5,0.25,,`: SynCAN has up to four signals from 0 to 1 in place of a payload, and times in milliseconds.
# Only the first training file and the test files have a header.
_SYNCAN: Final = Grammar(
    name="syncan",
    pattern=(
        f"^(?P<label>[01]),{TIMESTAMP},id(?P<id>{DIGITS}),(?P<data_0>{NUMBER})"
        f"{''.join(f'(?:,(?P<data_{signal}>(?:{NUMBER})?))?' for signal in (1, 2, 3))}{END}"
    ),
    labels=("0", "1"),
    id_base=10,
    byte_columns=4,
    payload_code="signals",
    ticks_per_second=1000,
    unit_known=True,
)


_HCRL_TEXT: Final = (
    f"^{BLANKS}Timestamp:{BLANKS}{TIMESTAMP}{GAP}ID:{BLANKS}(?P<id>{HEX}){GAP}{_FLAGS}{GAP}DLC:{BLANKS}(?P<dlc>[0-9])"
)
_WHITESPACE: Final = f"^{BLANKS}{TIMESTAMP}{GAP}(?P<id>{HEX}){GAP}(?:{_FLAGS}{GAP})?(?P<dlc>[0-9])"
_FIXED_GRAMMARS: Final = (
    _car_hacking(unlabelled_rows=False),
    _car_hacking(unlabelled_rows=True),
    Grammar(
        # `Timestamp: 1479121434.850202  ID: 0350  000  DLC: 8  05 28 84 …`: HCRL's attack-free logs and OTIDS.
        name="hcrl_text",
        pattern=f"{_HCRL_TEXT}{_LABELLED_BYTES}{END}",
        usual=f"{_HCRL_TEXT}{BLANKS}{SPACED_BYTES}{END}",
        separators=" \t",
        unlabelled_rows=True,
        padded=True,
    ),
    # Grammars that need a label in each row come first: a row that was cut off must not count as benign.
    *(
        _candump(_CANDUMP_WRITTEN, _CANDUMP_WRITTEN, unlabelled_rows=unlabelled_rows, direction=_CANDUMP_DIRECTION)
        for unlabelled_rows in (False, True)
    ),
    _candump(_CANDUMP_WRITTEN, _CANDUMP_WRITTEN, unlabelled_rows=False),
    _candump(_CANDUMP_PRINTED, _CANDUMP_USUALLY_PRINTED, unlabelled_rows=False),
    _candump(_CANDUMP_WRITTEN, _CANDUMP_WRITTEN, unlabelled_rows=True),
    _candump(_CANDUMP_PRINTED, _CANDUMP_USUALLY_PRINTED, unlabelled_rows=True),
    Grammar(
        # `1483093132.049669  0380  000  2  30 bb`
        name="whitespace",
        pattern=f"{_WHITESPACE}{_LABELLED_BYTES}{END}",
        usual=f"{_WHITESPACE}(?:{GAP}{SPACED_BYTES})?{END}",
        separators=" \t",
        unlabelled_rows=True,
        padded=True,
    ),
    *RESAVED_CAR_HACKING,
    _SYNCAN,
)
# The formats without a header.
LINE_GRAMMARS: Final = (*_FIXED_GRAMMARS, _asc(), _trc(_TRC_1), _trc_2(_TRC_2_COLUMNS), _busmaster())


def line_grammars(sample: pl.Series) -> list[Grammar]:
    """Returns the grammars of formats without a header, adapted to the first lines of a log."""
    lines = sample.drop_nulls()
    asc = re.match(_ASC_SETTINGS, next(iter(lines.filter(lines.str.contains(_ASC_SETTINGS))), "base hex"))
    assert asc is not None
    base = 10 if asc["base"].lower() == "dec" else 16
    relative = (asc["timestamps"] or "").lower() == "relative"
    columns = next(iter(lines.str.extract(_TRC_COLUMNS).drop_nulls()), "")
    cells = columns.replace("l", "L").split(",")
    if not {"O", "I"} <= {*cells} or len({*cells}) < len(cells):  # the line is missing or damaged
        columns = _TRC_2_COLUMNS
    busmaster = lines.str.extract(_BUSMASTER_SETTINGS).drop_nulls().to_list()
    return [*_FIXED_GRAMMARS, _asc(base, relative=relative), _trc(_TRC_1), _trc_2(columns), _busmaster(busmaster)]


def _with_labels(grammar: Grammar, label: str) -> tuple[Grammar, Grammar]:
    """Makes the grammars with labels after all rows, and with labels after some rows."""
    row = grammar.pattern.removesuffix(END)
    every = replace(grammar, pattern=f"{row},{label}{END}")
    return every, replace(grammar, pattern=f"{row}(?:,{label})?{END}", unlabelled_rows=True)


_CELL_OF_LABEL: Final = f"(?P<label>{_WORD})"
# No DLC; the payload has 0 to 16 digits without separators.
_CAN_TRAIN_AND_TEST: Final = Grammar(
    name="can_train_and_test",
    pattern=f"^{TIMESTAMP},(?P<id>{HEX}),(?P<data>(?:{BYTE})*){END}",
    labels=("0", "1"),
    header="timestamp,arbitration_id,data_field",
)
# The payload is written in base64. A row of an error frame has a 1 before the DLC.
_PYTHON_CAN: Final = Grammar(
    name="python_can",
    pattern=(f"^{TIMESTAMP},0x(?P<id>{HEX}),[01],(?:0|(?P<remote>1)),0,(?P<dlc>{DIGITS}),(?P<data>{BASE64}){END}"),
    payload_code="base64",
    fd_groups=("timestamp",),
    unit_known=True,
    error_frame="^[^,]*,[^,]*,[01],[01],1,",
    header="timestamp,arbitration_id,extended,remote,error,dlc,data",
)


def _savvycan(direction: str) -> Grammar:
    # Times are microseconds; a comma follows each byte, also the last byte.
    row = f"^{TIMESTAMP},(?:0x)?(?P<id>{HEX}),(?i:true|false|0|1),{'(?:Rx|Tx)?,' if direction else ''}"
    return Grammar(
        name="savvycan",
        pattern=f"{row}(?P<channel>[0-9]*),(?P<dlc>{DIGITS}),?(?P<data>(?:{BYTE}?,*)*){END}",
        separators=",",
        fd_groups=("dlc",),
        padded=True,
        ticks_per_second=1_000_000,
        unit_known=True,
        header=f"Time Stamp,ID,Extended,{direction}Bus,LEN,D1,D2,D3,D4,D5,D6,D7,D8",
    )


# The published formats that are recognised by their exact header. IDs are hexadecimal even where all IDs look decimal.
PUBLISHED_CSV_GRAMMARS: Final = (
    *_with_labels(replace(_CAN_TRAIN_AND_TEST, header=f"{_CAN_TRAIN_AND_TEST.header},attack"), _CELL_OF_LABEL),
    _with_labels(_CAN_TRAIN_AND_TEST, _CELL_OF_LABEL)[1],
    *_with_labels(
        Grammar(
            name="hcrl_challenge",
            pattern=f"^{TIMESTAMP},(?P<id>{HEX}),(?P<dlc>{DIGITS}),{SPACED_BYTES}{END}",
            separators=" ",
            labels=("Normal", "Attack"),
            padded=True,
            header="Timestamp,Arbitration_ID,DLC,Data,Class,SubClass",
        ),
        f"{_CELL_OF_LABEL},(?P<kind>{_WORD})",
    ),
    _with_labels(_PYTHON_CAN, _CELL_OF_LABEL)[1],
    *_with_labels(replace(_PYTHON_CAN, header=f"{_PYTHON_CAN.header},label"), _CELL_OF_LABEL),
    _savvycan("Dir,"),
    _savvycan(""),
    *(replace(_SYNCAN, header=f"Label,Time,ID,{','.join(f'Signal{signal}{of}' for signal in (1, 2, 3, 4))}")
      for of in ("_of_ID", "")),
)  # fmt: skip


_MARKED_IDS: Final = r"(?i)(?:^|[^0-9a-z])(?:0x[0-9a-f]+|[0-9a-f]+h|[0-9a-f]+x)(?:[^0-9a-z]|$)"
# Patterns of times that are not plain numbers.
_TIME_MARKS: Final = {
    DATE_CODE: r"[0-9][-/.][0-9]{1,2}[-/.][0-9]{1,4}[T ]+[0-9]{1,2}:[0-9]{1,2}:[0-9]",
    CLOCK_CODE: r"[0-9]{1,3}:[0-9]{1,2}:[0-9]",
    COMMA_CODE: r"(?:^|[;\t\"(])[ \t]*[-+]?[0-9]+,[0-9]+",
}


def variants(grammars: list[Grammar], sample: pl.Series) -> list[Grammar]:
    """Adds grammars for marked IDs, dates, times of day and decimal commas that the first lines of a log have."""
    if sample.str.contains(_MARKED_IDS).any():
        grammars = [*grammars, *(grammar.with_marked_ids() for grammar in grammars)]
    codes = [code for code, mark in _TIME_MARKS.items() if sample.str.contains(mark).any()]
    timed = [grammar for grammar in grammars if TIMESTAMP in grammar.pattern]
    return [*grammars, *(grammar.with_times(code) for code in codes for grammar in timed)]
