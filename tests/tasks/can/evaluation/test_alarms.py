"""Alarms without a network: contributions are given, and what is told of them is looked up in windows made by hand."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from can_train_tasks.can.contributions import CHECKSUM, COUNTER, FRAMES, GAP, NEIGHBOURS, PROPERTIES, SILENCE
from can_train_tasks.can.data.behaviour import WORDS
from can_train_tasks.can.data.database import Database, DatabaseMessage, DatabaseSignal
from can_train_tasks.can.data.graphs import FlatGraphs, id_text
from can_train_tasks.can.evaluation.alarms import (
    LEAST_USUAL_WINDOWS,
    USUAL_WINDOWS,
    Cause,
    Explainer,
    FlaggedLog,
    NamedSignals,
    Property,
    id_value,
    usual_windows,
)
from fakes.windows_by_hand import source_file, windows_of

A, B, C, NEW = 0x100, 0x18F00F03, 0x300, 0x400
FEW = LEAST_USUAL_WINDOWS


def explainer_of(flat: FlatGraphs, weights: Mapping[int, float], usual: Sequence[int] = ()) -> Explainer:
    """Contributions come from numbers of frames, weighted by ID; training has seen A, B and C."""

    def contribute(rows: Any) -> Any:
        ids = [flat.ids[flat.node_code[flat.node_ptr[row] : flat.node_ptr[row + 1]]] for row in rows]
        found = np.zeros((sum(map(len, ids)), len(PROPERTIES)))
        nodes = [
            id_value(flat, row, node, FRAMES) for row, own in zip(rows, ids, strict=True) for node in range(len(own))
        ]
        found[:, PROPERTIES.index(FRAMES)] = nodes
        return found * np.array([weights.get(can_id, 0.0) for can_id in np.concatenate(ids)])[:, None]

    return Explainer(flat=flat, contribute=contribute, vocabulary=np.array([A, C, B]), usual_rows=np.array(usual, int))


def test_what_an_id_usually_contributes_is_no_reason() -> None:
    flat = windows_of([*[[A, B, A, A, A, A]] * FEW, [A, B, B, B, A, A]])
    (causes,) = explainer_of(flat, {A: 9.0, B: 1.0}, usual=range(FEW)).causes(np.array([FEW]))
    assert [cause.can_id for cause in causes] == [B, A]
    assert (causes[0].share, causes[0].frames.value, causes[0].frames.usual) == (1.0, 3.0, 1.0)
    (causes,) = explainer_of(flat, {A: 9.0, B: 1.0}).causes(np.array([FEW]))
    assert [cause.can_id for cause in causes] == [A, B]


def test_an_id_that_training_never_saw_is_not_usual_on_a_bus_that_it_knows() -> None:
    flat = windows_of([[A, B, C, NEW, NEW]] * (FEW + 1))
    (causes,) = explainer_of(flat, {A: 1.0, NEW: 1.0}, usual=range(FEW)).causes(np.array([FEW]))
    assert (causes[0].can_id, causes[0].known, causes[0].frames.usual) == (NEW, False, None)
    assert causes[0].text(decimal=False) == "ID 400, not in benign training data: 2 frames in 1 s"


def test_on_a_bus_of_unknown_ids_the_usual_counts() -> None:
    flat = windows_of([*[[NEW, NEW + 1, NEW, NEW + 2]] * FEW, [NEW, NEW + 1, NEW + 1, NEW + 2]])
    (causes,) = explainer_of(flat, {NEW: 9.0, NEW + 1: 1.0}, usual=range(FEW)).causes(np.array([FEW]))
    assert causes[0].can_id == NEW + 1


def test_an_id_is_written_as_in_logs_and_in_decimal_beside_it_where_the_log_does() -> None:
    assert (id_text(0x7F), id_text(A), id_text(B)) == ("07F", "100", "18F00F03")
    flat = windows_of([[A, B, B]])
    (causes,) = explainer_of(flat, {B: 1.0}).causes(np.array([0]))
    assert causes[0].text(decimal=True) == f"ID 18F00F03 (in the log: {B}): 2 frames in 1 s"


def test_a_property_that_looks_usual_is_not_told() -> None:
    properties = [Property(name="byte_2", value=255.2, usual=254.9), Property(name=GAP, value=1.2, usual=3.4)]
    frames = Property(name=FRAMES, value=1, usual=1)
    cause = Cause(can_id=A, known=True, share=1.0, seconds=0.1, frames=frames, properties=properties)
    said = "ID 100: 1 frame in 0.1 s (usually 1); 1.2 ms from the frames beside it (usually 3.4 ms)"
    assert cause.text(decimal=False) == said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("jump_3-4", "payload bytes 3-4 jump by 2,013 (usually 12)"),
        ("jump_4-3", "payload bytes 3-4 (little-endian) jump by 2,013 (usually 12)"),
        ("jump_3", "payload byte 3 jumps by 2,013 (usually 12)"),
        ("context_3-4", "payload bytes 3-4 are 2,013 (12 expected from other IDs)"),
        ("context_3", "payload byte 3 is 2,013 (12 expected from other IDs)"),
    ],
)
def test_a_value_that_jumps_or_disagrees_is_told_with_its_bytes(name: str, said: str) -> None:
    assert Property(name=name, value=2013.0, usual=12.0).text() == said


def signal(name: str, *bits: int, **more: Any) -> DatabaseSignal:
    return DatabaseSignal(name=name, bits=bits, **more)


SPEED = signal("Speed", *range(16, 32), scale=0.25, offset=-9.0, unit="rpm")
CAR = Database(messages=[DatabaseMessage(can_id=A, name="Engine", signals=[
    SPEED,
    signal("Load", *range(40, 48), *range(32, 40), scale=-0.5, signed=True),
    signal("Heat", *range(8), scale=0.5, offset=-40.0, unit="°C"),
    signal("Slope", *range(8, 16), signed=True),
    signal("Gear", *range(48, 52)),
    signal("Lamp", 53),
    signal("Paged", *range(56, 64), multiplexer="Gear", pages=(1,)),
])])  # fmt: skip


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("jump_3-4", "Speed jumps by 503 rpm (usually 3)"),
        ("jump_4-3", "payload bytes 3-4 (little-endian) of Speed jump by 2,013 (usually 12)"),
        ("jump_3", "payload byte 3 of Speed jumps by 2,013 (usually 12)"),
        ("jump_6-5", "Load jumps by 1,006 (usually 6)"),
        ("jump_2", "Slope jumps by 2,013 (usually 12)"),
        ("jump_6-7", "payload bytes 6-7 of Load, Gear, Lamp jump by 2,013 (usually 12)"),
        ("jump_8", "payload byte 8 of Paged jumps by 2,013 (usually 12)"),
        ("context_3-4", "Speed is 494 rpm (-6 expected from other IDs)"),
        ("context_2", "payload byte 2 of Slope is 2,013 (12 expected from other IDs)"),
        ("byte_1", "Heat averages 966 °C (usually -34)"),
        ("byte_2", "payload byte 2 of Slope averages 2013 (usually 12)"),
        (GAP, "2.01e+03 ms from the frames beside it (usually 12 ms)"),
    ],
)
def test_a_database_names_the_signal_of_bytes_and_its_physical_values(name: str, said: str) -> None:
    signals = NamedSignals.of(CAR.message(A), name, (2013.0, 12.0))
    assert Property(name=name, value=2013.0, usual=12.0, signals=signals).text() == said
    assert Property(name=name, value=2013.0, usual=None, signals=signals).text() == re.sub(
        r" \((usually|\S+ expected).*", "", said
    )


def test_a_record_has_the_message_and_the_signal_only_with_a_database() -> None:
    signals = NamedSignals.of(CAR.message(A), "jump_3-4", (2013.0, None))
    told = [Property(name="jump_3-4", value=2013.0, usual=None, signals=each) for each in (signals, None)]
    of_signal = {"names": ["Speed"], "unit": "rpm", "value": 503.25, "usual": None}
    record = {"name": "jump_3-4", "value": 2013.0, "usual": None}
    assert [each.plain() for each in told] == [{**record, "signal": of_signal}, record]


def test_properties_are_what_the_window_shows() -> None:
    flat = windows_of([[A, B, A, C, C]])
    position = [*flat.ids[flat.node_code]].index(A)
    assert id_value(flat, 0, position, NEIGHBOURS) == 2
    assert id_value(flat, 0, position, FRAMES) == 2
    assert id_value(flat, 0, position, GAP) == 1
    flat.jumps[position, WORDS.index("2-1")] = 300
    assert id_value(flat, 0, position, "jump_2-1") == 300
    flat.payload[position] = int.from_bytes(bytes([1, 2, 3, 4, 5, 6, 7, 255]), "little", signed=True)
    values = [id_value(flat, 0, position, f"context_{word}") for word in ("1-2", "2-1", "8")]
    assert values == [0x0102, 0x0201, 255]


def test_a_broken_counter_and_a_wrong_checksum_are_told_in_words() -> None:
    flat = windows_of([[A, B]])
    told = [Property(name=name, value=id_value(flat, 0, 0, name), usual=None) for name in (COUNTER, CHECKSUM)]
    frames = Property(name=FRAMES, value=2.0, usual=1.0)
    cause = Cause(can_id=A, known=True, seconds=0.05, frames=frames, share=1.0, properties=told)
    assert cause.text(decimal=False).partition(": ")[2] == (
        "2 frames in 0.05 s (usually 1); its counter misses a step; its checksum is wrong"
    )


@pytest.mark.parametrize(("calm", "chosen"), [(0, 0), (FEW - 1, 0), (FEW, FEW), (5 * USUAL_WINDOWS, USUAL_WINDOWS)])
def test_usual_windows_are_many_or_none_and_none_is_flagged(calm: int, chosen: int) -> None:
    flagged = np.tile([True, False], calm)
    found = usual_windows(np.arange(2 * calm), flagged)
    assert len(found) == chosen
    assert not flagged[found].any()


def log_of(flagged: Sequence[bool], first_frames: Sequence[int], *, labelled: bool = True) -> FlaggedLog:
    sources = (source_file("drive.csv", labelled=labelled),)
    flat = windows_of([[A, B]] * len(flagged), label=[0, 1, *[0] * (len(flagged) - 2)], sources=sources)
    flat.first_frame[:] = first_frames
    rows, first = np.arange(len(flagged)), np.array(first_frames)
    causes = explainer_of(flat, {A: 1.0}).causes(rows)
    return FlaggedLog(
        flat=flat, rows=rows, score=rows.astype(float), flagged=np.array(flagged), threshold=0.5,
        lines=np.stack([first + 2, first + 3]), causes=dict(zip(rows.tolist(), causes, strict=True)), decimal=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flagged", "first_frames", "alarms"),
    [
        ([True, True, False, True], [0, 2, 4, 6], [(0, 3, 2), (6, 7, 1)]),
        ([True, True, True, True], [0, 1, 2, 3], [(0, 4, 4)]),  # overlapping windows
        ([True, True, True, True], [0, 2, 90, 92], [(0, 3, 2), (90, 93, 2)]),  # a part of the log is not judged
        ([False, False, False, False], [0, 2, 4, 6], []),
    ],
)
def test_flagged_windows_that_follow_one_another_are_one_alarm(
    flagged: list[bool], first_frames: list[int], alarms: list[tuple[int, int, int]]
) -> None:
    found = [alarm.record for alarm in log_of(flagged, first_frames).alarms()]
    assert [(each["first_frame"], each["last_frame"], each["windows"]) for each in found] == alarms


def test_an_alarm_says_whether_it_was_an_attack_only_where_the_log_does() -> None:
    attack, benign = log_of([True, True, False, True], [0, 2, 4, 6]).alarms()
    assert attack.place == "lines 2-5, 0.000000-2.000000 s, 2 windows, score 1 (> 0.5), attack (DoS)"
    assert benign.place.endswith("1 window, score 3 (> 0.5), benign")
    assert [alarm.record["label"] for alarm in (attack, benign)] == ["attack", "benign"]
    unlabelled = log_of([True, True, False, True], [0, 2, 4, 6], labelled=False).alarms()
    assert [alarm.record["label"] for alarm in unlabelled] == [None, None]
    assert unlabelled[1].place.endswith("score 3 (> 0.5)")


def test_an_alarm_names_the_ids_that_drove_its_windows_together() -> None:
    log = log_of([True, True], [0, 2])
    first, second = ([replaced(log.causes[0][0], can_id, share) for can_id, share in pairs]
                     for pairs in ([(B, 0.6), (A, 0.4)], [(A, 0.9), (C, 0.1)]))  # fmt: skip
    (alarm,) = FlaggedLog(**{**vars(log), "causes": {0: first, 1: second}}).alarms()
    assert [reason["id"] for reason in alarm.record["reasons"]] == [id_text(A), id_text(B), id_text(C)]
    assert [text.partition(":")[0] for text in alarm.reason.split(". ")] == ["ID 100", "ID 18F00F03"]


def replaced(cause: Cause, can_id: int, share: float) -> Cause:
    return Cause(**{**vars(cause), "can_id": can_id, "share": share})


def test_an_id_that_is_missing_is_told_with_its_silence() -> None:
    flat = windows_of([*[[A, B, A, B]] * FEW, [B, B, B, B]])
    absent = replace(
        flat,
        absent_ptr=np.array([*[0] * (FEW + 1), 1], np.int64),
        absent_code=np.array([np.searchsorted(flat.ids, A)], np.int32),
        absent_silence=np.array([-2.0], np.float32),
    )

    def contribute(rows: Any) -> Any:
        found = np.zeros((int(absent.num_ids[rows].sum()), len(PROPERTIES)))
        found[-1, PROPERTIES.index(SILENCE)] = 8.0 if FEW in rows else 0.0
        return found

    explainer = Explainer(
        flat=absent, contribute=contribute, vocabulary=np.array([A, B]), usual_rows=np.arange(FEW, dtype=np.int64)
    )
    (causes,) = explainer.causes(np.array([FEW]))
    assert causes[0].text(decimal=False) == (
        "ID 100: 0 frames in 1 s (usually 2); silent for 250 ms at the end (usually 1e+03 ms)"
    )
    assert causes[0].share == 1
