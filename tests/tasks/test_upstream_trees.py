"""The lines of docs/datasets.md train on data sets as their authors' readmes draw them: folders, names and formats."""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import polars
import pytest
from PIL import Image

from can_train.cli.main import main
from can_train_tasks.can.data.graphs import Frames
from fakes.published_eeg import bci_iv_2a, ern, erpbci, mmidb, sleep_edf
from fakes.random_bus import INJECTED, injected_frames, write_log

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "datasets.md"
LINES: Final = [shlex.split(line) for line in re.findall(r"^can-train (.+)$", PAGE.read_text("utf-8"), re.MULTILINE)]
SMALL: Final = {
    "can": ["--size", "student", "--model-args", "hidden=4,layers=1,heads=1", "--batch-size", "32"],
    "vgae": ["--size", "student", "--model-args", "hidden=[4]", "--batch-size", "32"],
    "seq2seq": ["--set", "model.hidden=16", "--set", "model.embedding=8"],
    "tracknet": ["--precision", "fp32", "--batch-size", "4", "--set", "dataset.width=32", "--set", "dataset.height=18",
                 "--set", "model.width=4", "--set", "model.levels=2", "--set", "model.groups=2"],
    "muon": ["--batch-size", "8", "--set", "model.hidden=8"],
    "bendr": ["--set", "model.hidden=8", "--set", "model.layers=1", "--set", "model.heads=2", "--set",
              "model.feedforward=8", "--set", "model.groups=2", "--set", "model.position_kernel=5"],
}  # fmt: skip
"""Flags by which a training of a task, or of one of its models, takes seconds."""
FRAMES: Final = 4_000


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def benign(frames: Frames) -> Frames:
    kept = frames.label == 0
    return Frames(**{name: values[kept] for name, values in vars(frames).items()})


# CAN


def car_hacking(folder: Path) -> None:
    """Comma-separated frames with R and T; the normal run is text, and has no labels."""
    for number, kind in enumerate(("DoS", "Fuzzy", "gear", "RPM")):
        frames = injected_frames(FRAMES, number)
        rows = zip(frames.timestamp, frames.can_id, frames.payload, frames.label, strict=True)
        text = "".join(f"{1478198376 + time:.6f},{can_id:04x},8,{bytes(data).hex(',')},{'RT'[label]}\n"
                       for time, can_id, data, label in rows)  # fmt: skip
        write(folder / f"{kind}_dataset.csv", text)
    frames = benign(injected_frames(FRAMES, 4))
    rows = zip(frames.timestamp, frames.can_id, frames.payload, strict=True)
    text = "".join(f"Timestamp: {1479121434 + time:.6f}        ID: {can_id:04x}    000    DLC: 8    "
                   f"{bytes(data).hex(' ')}\n" for time, can_id, data in rows)  # fmt: skip
    write(folder / "normal_run_data.txt", text)


def road(folder: Path) -> None:
    """Logs of candump, with metadata that say when and what was injected; and tables of signals, which are no logs."""
    ambient: dict[str, Any] = {}
    attacks: dict[str, Any] = {}
    for number, name in enumerate(("basic_long", "basic_short", "highway_street_driving_long")):
        candump(folder / "ambient" / f"ambient_dyno_drive_{name}.log", benign(injected_frames(FRAMES, number)))
        ambient[f"ambient_dyno_drive_{name}"] = {"elapsed_sec": 2.0, "on_dyno": True, "description": "driving"}
    for number, name in enumerate(("correlated_signal_attack_1", "max_speedometer_attack_1_masquerade"), start=3):
        frames = injected_frames(FRAMES, number)
        candump(folder / "attacks" / f"{name}.log", frames)
        seconds = (frames.timestamp - frames.timestamp[0])[frames.label > 0]
        attacks[name] = {"injection_id": f"0x{INJECTED:x}", "injection_data_str": "XXXXXXXXXXXXXXXX",
                         "injection_interval": [seconds.min() - 1e-4, seconds.max() + 1e-4]}  # fmt: skip
    attacks["accelerator_attack_drive_1"] = {"injection_id": None, "injection_interval": None}
    candump(folder / "attacks" / "accelerator_attack_drive_1.log", injected_frames(FRAMES, 9))
    write(folder / "ambient" / "capture_metadata.json", json.dumps(ambient))
    write(folder / "attacks" / "capture_metadata.json", json.dumps(attacks))
    signals = "Label,Time,ID,Signal_1_of_ID,Signal_2_of_ID\n" + "".join(f"0,{n / 10},208,{n},\n" for n in range(50))
    for part in ("ambient/ambient_dyno_drive_basic_long", "attacks/correlated_signal_attack_1_masquerade"):
        write(folder / "signal_extractions" / f"{part}.csv", signals)
    write(folder / "data_table.csv", "capture,elapsed_sec,description\nambient_dyno_drive_basic_long,2.0,driving\n")
    write(folder / "readme.md", "# ROAD\n")


def candump(path: Path, frames: Frames) -> None:
    rows = zip(frames.timestamp, frames.can_id, frames.payload, strict=True)
    write(path, "".join(f"({1030000000 + time:.6f}) can0 {can_id:03X}#{bytes(data).hex().upper()}\n"
                        for time, can_id, data in rows))  # fmt: skip


def can_mirgu(folder: Path) -> None:
    """Logs of candump, and one file of metadata for all attacks, which has trailing commas."""
    for day in (1, 2, 3):
        candump(folder / "Benign" / f"Day_{day}" / f"Benign_day{day}_file1.log", benign(injected_frames(FRAMES, day)))
    entries = []
    kinds = {"Masquerade_attacks": "Break_warning_masquerade_attack", "Real_attacks": "Break_warning_attack"}
    for number, (place, name) in enumerate(kinds.items(), start=4):
        frames = injected_frames(FRAMES, number)
        candump(folder / "Attacks" / place / f"{name}.log", frames)
        times = 1030000000 + frames.timestamp[frames.label > 0]
        what = "masquerade" if "masquerade" in name else "injection"
        interval = f"[{times.min() - 1e-4:.6f}, {times.max() + 1e-4:.6f}]"
        entries.append(f'"{name}": {{"injection_id": "0x{INJECTED:x}", "{what}_interval": {interval},}},')
    write(folder / "Attacks" / "Attacks_metadata.json", "{" + "\n".join(entries) + "}")


def x_canids(folder: Path) -> None:
    """Parquet files as pandas writes them: the times since the beginning of a file are the index."""
    names = ("dump1", "dump2", "dump3", "dump6-fabr-123h", "dump6-fuzz-123h")
    for number, name in enumerate(names, start=1):
        frames = injected_frames(FRAMES, number) if "-" in name else benign(injected_frames(FRAMES, number))
        table = polars.DataFrame({
            "arbitration_id": frames.can_id.astype(np.int64), "dlc": frames.length.astype(np.int64),
            "data": [bytes(data) for data in frames.payload], "label": frames.label.astype(np.int64),
            "timestamp": polars.Series((frames.timestamp * 1e9).astype(np.int64)).cast(polars.Duration("ns")),
        })  # fmt: skip
        for part in ("raw", "signal"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        table.write_parquet(folder / "raw" / f"{name}.parquet")
        table.drop("arbitration_id", "data").write_parquet(folder / "signal" / f"{name}.parquet")


def syncan(folder: Path) -> None:
    """Rows of signals, times in milliseconds. Training files but the first have no names of columns."""
    columns = "Signal1,Signal2,Signal3,Signal4"
    headers = {"train_1": f"Label,Time,ID,{columns}\n", "train_2": "", "train_3": "", "train_4": ""}
    headers |= dict.fromkeys(("test_normal", "test_plateau", "test_flooding"),
                             f"Label,Time,ID,{columns.replace(',', '_of_ID,')}_of_ID\n")  # fmt: skip
    for number, (name, header) in enumerate(headers.items()):
        frames = injected_frames(FRAMES, number)
        frames = frames if name in ("test_plateau", "test_flooding") else benign(frames)
        rows = zip(frames.timestamp, frames.can_id % 10, frames.payload / 40, frames.label, strict=True)
        text = "".join(f"{label},{1000 * time},id{can_id + 1},{data[0]},{data[1]},,\n"
                       for time, can_id, data, label in rows)  # fmt: skip
        write(folder / f"{name}.csv", header + text)
    write(folder / "README.md", "# SynCAN Dataset\n")


def can_train_and_test(folder: Path) -> None:
    """Sets with training and test folders, and logs of each kind in them."""
    place = folder / "set_01"
    for number in (1, 2, 3):
        write_log(place / "train_01_attack_free" / f"attack-free-{number}.csv", benign(injected_frames(FRAMES, number)))
    tests = ("test_01_known_vehicle_known_attack", "test_02_unknown_vehicle_known_attack")
    for number, part in enumerate(("train_02_with_attacks", *tests), start=4):
        write_log(place / part / "DoS-1.csv", injected_frames(FRAMES, number))


# seq2seq


def inflected(count: int, seed: int) -> list[tuple[str, str, str]]:
    """Lemmas of an invented language, their forms and features."""
    drawn = np.random.default_rng(seed)
    lemmas = ["".join(drawn.choice([*"kelamnit"], drawn.integers(3, 7))) for _ in range(count)]
    endings = {"N;NOM;SG": "", "N;ACC;SG": "u", "N;NOM;PL": "ler"}
    features = drawn.choice([*endings], count)
    return [(lemma, lemma + endings[tags], tags) for lemma, tags in zip(lemmas, features, strict=True)]


def write_tables(paths: Sequence[Path], order: Sequence[int], *, covered: bool = False) -> None:
    """Writes a training, a development and a test table; `order` has the columns, `covered` leaves out the targets."""
    for number, path in enumerate(paths):
        columns = [column for column in order if column != 1 or number < 2 or not covered]
        rows = inflected((60, 20, 20)[number], number)
        write(path, "".join("\t".join(row[column] for column in columns) + "\n" for row in rows))


def conll2018(folder: Path) -> None:
    place = folder / "task1" / "all"
    names = [f"turkish-{name}" for name in ("train-low", "dev", "covered-test")]
    write_tables([place / name for name in names], (0, 1, 2), covered=True)
    write_tables([place / f"turkish-{name}" for name in ("train-medium", "dev", "test")], (0, 1, 2))


def task0_data(folder: Path) -> None:
    place = folder / "DEVELOPMENT-LANGUAGES" / "austronesian"
    for language in ("ceb", "tgl"):
        write_tables([place / f"{language}.{part}" for part in ("trn", "dev", "tst")], (0, 1, 2), covered=True)


def task0_2021(folder: Path) -> None:
    place = folder / "part1" / "development_languages"
    write_tables([place / f"tur.{part}" for part in ("train", "dev", "test")], (0, 1, 2), covered=True)


def inflection_2022(folder: Path) -> None:
    place = folder / "part1" / "development_languages"
    for size in ("large", "small"):
        write_tables([place / f"ang_{size}.train", place / "ang.dev", place / "ang.test"], (0, 1, 2), covered=True)


def inflection_2023(folder: Path) -> None:
    write_tables([folder / "part1" / "data" / f"tur.{part}" for part in ("trn", "dev", "tst")], (0, 2, 1))


def letters_to_sounds(folder: Path) -> None:
    """Words, and their sounds with a blank between two sounds."""
    for number, part in enumerate(("train", "dev", "test")):
        rows = [f"{lemma}\t{' '.join(form)}\n" for lemma, form, _ in inflected((60, 20, 20)[number], number)]
        write(folder / "task1" / "data" / part / f"ice_{part}.tsv", "".join(rows))


# tracknet


def picture(number: int) -> Image.Image:
    pixels = np.full((36, 64, 3), 80, np.uint8)
    pixels[16:19, 3 * number : 3 * number + 3] = 255
    return Image.fromarray(pixels)


def tracknet_v3(folder: Path) -> None:
    """Three sets of matches, each with labels and pictures; the medians of the preprocessing lie beside them."""
    for match in ("train/match1", "train/match2", "train/match24", "val/match1", "test/match1"):
        for rally in ("1_01_00", "1_02_00"):
            rows = "".join(f"{number},1,{3 * number + 1},17\n" for number in range(8))
            write(folder / match / "csv" / f"{rally}_ball.csv", "Frame,Visibility,X,Y\n" + rows)
            for number in range(8):
                save(folder / match / "frame" / rally / f"{number}.png", picture(number))
        np.savez(folder / match / "median.npz", median=np.asarray(picture(0)))


def tracknet(folder: Path) -> None:
    """Games of clips, with labels beside JPEG pictures."""
    for game in ("game1", "game2", "game3", "game10"):
        for clip in ("Clip1", "Clip2"):
            rows = "".join(f"{number:04d}.jpg,1,{3 * number + 1},17,0\n" for number in range(6))
            place = folder / game / clip
            write(place / "Label.csv", "file name,visibility,x-coordinate,y-coordinate,status\n" + rows)
            for number in range(6):
                save(place / f"{number:04d}.jpg", picture(number))


def save(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


# muon


def cr_muons(folder: Path) -> None:
    """Parquet files of events, as lists of numbers; and an HDF5 file of arrays."""
    place = folder / "0000000-0000999"
    place.mkdir(parents=True)
    for number in range(2):
        primaries, muons = events(30, number)
        columns: dict[str, Any] = {"primary": primaries, "muons": muons}
        numbers = polars.List(polars.Float64)
        frame = polars.DataFrame(columns, {"primary": numbers, "muons": polars.List(numbers)})
        frame.write_parquet(place / f"DAT{number:06d}.parquet")
    primaries, muons = events(30, 2)
    with h5py.File(place / "events.h5", "w") as file:
        file["primaries"], file["counts"] = primaries, [len(each) for each in muons]
        file["muons"] = np.concatenate([np.array(each) for each in muons])


def events(count: int, seed: int) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Primaries [energy, zenith, mass, depth], and muons [energy, x, y] of each."""
    drawn = np.random.default_rng(seed)
    primaries = [[float(10 ** drawn.uniform(5, 6)), float(drawn.uniform(0, 1)), float(drawn.choice([1, 4, 56])),
                  1800.0] for _ in range(count)]  # fmt: skip
    muons = [[[float(10 ** drawn.uniform(1, 3)), *drawn.normal(0, 100, 2).tolist()]
              for _ in range(drawn.integers(1, 9))] for _ in range(count)]  # fmt: skip
    return primaries, muons


# bendr


def eeg(folder: Path) -> None:
    for write_tree in (mmidb, bci_iv_2a, ern, sleep_edf, erpbci):
        write_tree(folder)


TREES: Final[dict[str, Callable[[Path], None]]] = {
    "car_hacking": car_hacking,
    "road": road,
    "CAN-MIRGU": can_mirgu,
    "X-CANIDS": x_canids,
    "SynCAN": syncan,
    "can-train-and-test-v1.5": can_train_and_test,
    "conll2018": conll2018,
    "task0-data": task0_data,
    "2021Task0": task0_2021,
    "2022InflectionST": inflection_2022,
    "2023InflectionST": inflection_2023,
    "2020": letters_to_sounds,
    "TrackNetV3/data": tracknet_v3,
    "TrackNet/Dataset": tracknet,
    "cr_muons": cr_muons,
    "eeg": eeg,
}
"""Writers of the trees, by their place below `path/to`."""


def tree_of(line: Sequence[str]) -> str:
    (place,) = {word.removeprefix("path/to/") for word in line if word.startswith("path/to/")}
    return next(name for name in TREES if f"{place}/".startswith(f"{name}/"))


def test_each_line_of_the_page_has_a_tree_and_each_tree_a_line() -> None:
    assert {tree_of(line) for line in LINES} == {*TREES}


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES, ids=shlex.join)
def test_a_published_tree_trains_by_its_line(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAN_TRAIN_HOME", str(tmp_path / "state"))
    name = tree_of(line)
    TREES[name](tmp_path / "path" / "to" / name)
    small = next(flags for kind, flags in reversed(SMALL.items()) if kind in line or kind == "can")
    # Nothing is searched for: what fits is no question of the tree.
    plain = ("--epochs", "1", "--device", "cpu", "--find-batch-size", "off", "--quiet")
    status = main([*line, *small, *plain])
    assert status == 0, capsys.readouterr().err
    (run,) = (tmp_path / "runs").iterdir()
    judged = json.loads((run / "result.json").read_text())["judgement"]
    assert judged["test"]
