"""Published EEG data sets as their readmes draw them: small generated files with the names, channels and annotations of
real ones.
"""

import struct
from collections.abc import Sequence
from pathlib import Path

import mne
import numpy as np

Event = tuple[float, float, str]


def write(path: Path, seconds: float, hz: float, channels: Sequence[str], events: Sequence[Event], seed: int) -> None:
    drawn = np.random.default_rng(seed).normal(0, 20e-6, (len(channels), round(seconds * hz)))
    raw = mne.io.RawArray(drawn, mne.create_info([*channels], hz, "eeg"), verbose="error")
    raw.set_annotations(mne.Annotations(*zip(*events, strict=True)))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".fif"):
        raw.save(path, verbose="error")
    else:
        mne.export.export_raw(path, raw, physical_range=(-200e-6, 200e-6), verbose="error")


def mmidb(root: Path) -> None:
    """Five subjects with the runs 3 and 4, and one that the preset leaves out."""
    for number in (1, 2, 3, 4, 5, 88):
        for run in (3, 4):
            events = [(at, 4.1, ("T0", "T1", "T0", "T2")[at // 4 % 4]) for at in range(0, 60, 4)]
            name = f"S{number:03}"
            write(root / "eegmmidb" / name / f"{name}R{run:02}.edf", 62, 160, ["Fc5.", "Cz..", "Oz.."], events, number)


def write_gdf(path: Path, seconds: int, hz: int, channels: Sequence[str], events: Sequence[tuple[int, int]]) -> None:
    """Writes GDF 1.25: 16-bit integers that are tenths of a microvolt, and a table of events (sample, type)."""
    size = len(channels)
    texts = [channels, [""] * size, ["uV"] * size]
    limits = [struct.pack(f"<{size}d", *[limit] * size) for limit in (-3276.8, 3276.7)]
    limits += [struct.pack(f"<{size}q", *[limit] * size) for limit in (-32768, 32767)]
    header = [b"GDF 1.25", b" " * 160, b"2005011910000000", struct.pack("<q", 256 * (1 + size)), bytes(44),
              struct.pack("<qIII", seconds, 1, 1, size),
              *(text.ljust(width).encode() for names, width in zip(texts, (16, 80, 8), strict=True) for text in names),
              *limits, b" " * (80 * size), struct.pack(f"<{size}i", *[hz] * size),
              struct.pack(f"<{size}i", *[3] * size), bytes(32 * size)]  # fmt: skip
    values = np.random.default_rng(0).integers(-200, 200, (seconds, size, hz)).astype("<i2")
    table = struct.pack("<B3BI", 1, hz, 0, 0, len(events))
    table += struct.pack(f"<{len(events)}I", *(sample + 1 for sample, _ in events))
    table += struct.pack(f"<{len(events)}H", *(kind for _, kind in events))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(header) + values.tobytes() + table)


def bci_iv_2a(root: Path) -> None:
    """Nine subjects, with a session whose classes (783) are not in the file, which the preset leaves out."""
    for number in range(1, 10):
        for session in "TE":
            events = [(0, 276), *((800 * at + 400, 769 + at % 4 if session == "T" else 783) for at in range(8))]
            write_gdf(
                root / "bci_iv_2a" / f"A0{number}{session}.gdf", 68, 100, ["EEG-Fz", "EEG-Cz", "EOG-left"], events
            )


def ern(root: Path) -> None:
    """Eight subjects whose classes are in TrainLabels.csv, and two tested subjects with TestLabels.csv."""
    tables: dict[str, list[str]] = {"Train": ["IdFeedBack,Prediction"], "Test": ["IdFeedBack,Prediction"]}
    for number in (2, 6, 7, 11, 12, 13, 14, 16, 1, 3):
        name, kind = f"S{number:02}_Sess01", "Test" if number in (1, 3) else "Train"
        feedback = np.zeros(200 * 30, int)
        feedback[300::400] = 1
        signal = np.random.default_rng(number).normal(0, 20, (len(feedback), 3))
        path = root / "ern" / kind.lower() / f"Data_{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(path, np.column_stack([np.arange(len(feedback)) / 200, signal, feedback]), delimiter=",",
                   header="Time,Fp1,Cz,EOG,FeedBackEvent", comments="", fmt="%.3f")  # fmt: skip
        tables[kind] += [f"{name}_FB{at + 1:03},{int(at % 3 > 0)}" for at in range(int(feedback.sum()))]
    for kind, lines in tables.items():
        (root / "ern" / f"{kind}Labels.csv").write_text("\n".join(lines) + "\n")
    (root / "ern" / "ChannelsLocation.csv").write_text("Number,Labels\n1,Fp1\n")


STAGES = ("W", "1", "2", "3", "4", "R")


def sleep_edf(root: Path) -> None:
    names = ["EEG Fpz-Cz", "EEG Pz-Oz", "EOG horizontal", "Resp oro-nasal", "EMG submental", "Temp rectal",
             "Event marker"]  # fmt: skip
    for number in range(10):
        folder = root / "sleep-edfx" / "sleep-cassette"
        # A night begins awake, and ends with a movement, which is of no class.
        stages = [*("W" * 4), *STAGES, *STAGES]
        events = [*((30.0 * at, 30.0, f"Sleep stage {stage}") for at, stage in enumerate(stages)),
                  (30.0 * len(stages), 30.0, "Movement time")]  # fmt: skip
        seconds = 30.0 * (len(stages) + 1)
        write(folder / f"SC4{number:02}1E0-PSG.edf", seconds, 20, names, [(0.0, 1.0, "x")], number)
        write(folder / f"SC4{number:02}1EC-Hypnogram.edf", seconds, 20, names[:1], events, number)
    write(root / "sleep-edfx" / "sleep-telemetry" / "ST7011J0-PSG.edf", 60, 20, names[:2], [(0.0, 1.0, "x")], 0)


def erpbci(root: Path) -> None:
    for number in range(1, 13):
        flashes = [(3 + 0.15 * at, 0.1, ("AGMSY5", "ABCDEF", "BHNTZ6", "GHIJKL")[at % 4]) for at in range(100)]
        events = [(0.5, 0.1, "#TgtB_A"), (1.0, 0.1, "#start"), *flashes, (20.0, 0.1, "#end")]
        write(root / "erpbci" / f"s{number:02}" / "rc01.edf", 22, 256, ["Fz", "Cz", "EXG1"], events, number)
