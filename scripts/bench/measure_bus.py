"""Compares the simulated bus with logged ones: periods, payloads, IDs, lengths of drives, how rare attacks are, and how
tightly different IDs are tied.
Then looks for flaws of the simulation: how well a decision tree finds each attack from figures of a window alone.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import matthews_corrcoef, roc_auc_score
from sklearn.tree import DecisionTreeClassifier

from bench.harness import REAL_LOGS, Benchmark, Table, markdown
from bench.ties import Ties, ties
from can_train_tasks.can.data.graphs import Bools, Floats, Frames, Ints
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.settings import CanDatasetSettings, SyntheticSettings
from can_train_tasks.can.synthetic.attacks import ATTACKS, FIRST_ATTACKS
from can_train_tasks.can.synthetic.traffic import SECOND_US, Traffic
from can_train_tasks.can.synthetic.vehicles import MAX_STANDARD_ID, NUM_VEHICLES
from can_train_tasks.can.synthetic.writing import ATTACK_FREE, GENERATORS, PlannedDrive, plan_drives, simulate

BENCHMARK: Final = Benchmark(__name__, packages=("numpy", "scikit-learn"))
SEEDS: Final = (0, 1, 2)
WINDOW: Final = 100  # frames, as `dataset.window`
MIN_FRAMES: Final = 10  # fewest frames of an ID that is measured
LOGGED: Final = {"spread": (0.0002, 0.0068), "same": (0.23, 0.96), "bits": (0.2, 1.9), "static": (0.42, 0.81)}
"""Range of each figure over four real logs; one log is not kept."""
PUBLISHED: Final = (36, 927)
"""Benign frames for each attack frame in the sets of can-train-and-test: fewest and most."""
HEAD: Final = ("bus", "IDs", "29-bit", "frames/s", "s a drive", "spread", "as before", "bits", "static",
               "attack windows", "attack frames")  # fmt: skip
TIED: Final = {"counted": (0.013, 0.2), "checked": (0.0, 0.171), "tie": (0.683, 0.899), "strong": (0.25, 0.484),
               "levels": (28.5, 45)}  # fmt: skip
"""Range of each figure of `Ties` over three real logs: a car and two of a truck."""
TIES_HEAD: Final = ("bus", "counters", "checksums", "tie", "tied >= 0.9", "lag, s", "levels")
EXTRA_DRIVES: Final = 10_000  # positions in the plan beyond its own drives
TREE_DRIVES: Final = 6  # of each known vehicle; two thirds of them train the tree


class Figures(NamedTuple):
    """Figures of one log."""

    ids: float
    extended: float
    rate: float
    seconds: float
    spread: float
    same: float
    bits: float
    static: float


def main() -> None:
    """Measures, prints the tables and writes them into RESULTS.md; exit status 1 if a figure is out of range."""
    parser = BENCHMARK.parser()
    parser.add_argument("--logs", type=Path, default=REAL_LOGS, help="folder of real logs")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    options = parser.parse_args()
    logs = sorted(options.logs.glob("*.*")) if options.logs.is_dir() else []
    if not logs:
        print(f"skipped: there are no real logs in {options.logs}", file=sys.stderr)
    table = Table(*HEAD)
    for log in logs:
        table.add(*logged_row(log))
    table.add("in four logs", "", "", "", "", *(f"{low:g} to {high:g}" for low, high in LOGGED.values()), "", "")
    table.add("can-train-and-test", *[""] * 9, f"1 : {PUBLISHED[0]} to 1 : {PUBLISHED[1]}")
    missed = []
    for number, seed in [(1, options.seeds[0]), *((2, seed) for seed in options.seeds)]:
        settings = SyntheticSettings(version=number, seed=seed)
        vehicles = [figures(*columns(benign_drive(settings, vehicle))) for vehicle in range(1, NUM_VEHICLES + 1)]
        windows, frames = attacked(settings)
        table.add(f"version {number}, seed {seed}", *cells(vehicles), ratio(windows), ratio(frames))
        missed += out_of_range(vehicles, windows, seed) if number == 2 else []
    seeds = ", ".join(map(str, options.seeds))
    tied = Table(*TIES_HEAD)
    for log in logs:
        tied.add(log.name, *tie_cells([ties(*logged_columns(log))]))
    for number in (2, 3):
        for seed in options.seeds:
            settings = SyntheticSettings(version=number, seed=seed)
            drives = [ties(*columns(benign_drive(settings, vehicle))) for vehicle in range(1, NUM_VEHICLES + 1)]
            tied.add(f"version {number}, seed {seed}", *tie_cells(drives))
            missed += not_tied(drives, seed) if number == 3 else []
    BENCHMARK.finish(options, missed, table=table, ties=tied, seeds=seeds, tree=tree_table(options.seeds))


def logged_columns(path: Path) -> tuple[Floats, Ints, Ints, NDArray[np.uint8]]:
    """Returns the arguments of `figures` for a real log."""
    frames = logged_frames(path)
    return frames.timestamp, frames.can_id.astype(np.int64), frames.length.astype(np.int64), frames.payload


def logged_frames(path: Path) -> Frames:
    """Reads a real log."""
    return Frames.concatenate(list(LogReader(path, CanDatasetSettings(), kind="attack").blocks()))


def tie_cells(logs: Sequence[Ties]) -> list[str]:
    """Returns the cells of figures of several logs: their median, and their range."""
    formats = ("{:.0%}", "{:.0%}", "{:.2f}", "{:.0%}", "{:.2f}", "{:.0f}")
    return spread_cells(formats, [_known(values) for values in zip(*logs, strict=True)])


def _known(values: Sequence[float]) -> Sequence[float]:
    return [value for value in values if not math.isnan(value)] or [math.nan]


def not_tied(drives: Sequence[Ties], seed: int) -> list[str]:
    """Names the figures of `TIED` whose median over the vehicles is out of real logs' range."""
    medians = {name: float(np.median([getattr(drive, name) for drive in drives])) for name in TIED}
    return [f"{name} {medians[name]:.3f} with seed {seed}" for name, (low, high) in TIED.items()
            if not low <= medians[name] <= high]  # fmt: skip


def logged_row(path: Path) -> list[str]:
    """Returns the cells of a real log."""
    log, is_attack = figures(*logged_columns(path)), logged_frames(path).label > 0
    return [path.name, *cells([log]), ratio(windows_of(is_attack)), ratio(is_attack)]


def benign_drive(settings: SyntheticSettings, vehicle: int) -> Traffic:
    """Simulates a drive without an attack that is not in the data set."""
    drive = PlannedDrive("train_01_attack_free", ATTACK_FREE, vehicle)
    design = GENERATORS[settings.version].make_vehicles(settings.seed)[vehicle - 1]
    return simulate(drive, EXTRA_DRIVES + vehicle, design, settings)


def columns(log: Traffic) -> tuple[Floats, Ints, Ints, NDArray[np.uint8]]:
    """Returns the arguments of `figures` for a simulated log."""
    return log.time_us / SECOND_US, log.can_id, log.length, log.payload


def figures(time_s: Floats, can_id: Ints, length: Ints, payload: NDArray[np.uint8]) -> Figures:
    """Measures a log."""
    ids = np.unique(can_id)
    by_id = []
    for each_id in ids:
        rows = np.flatnonzero(can_id == each_id)
        if len(rows) >= MIN_FRAMES:
            gaps, mine, num_bytes = np.diff(time_s[rows]), payload[rows], length[rows].max()
            spread = np.median(np.abs(gaps - np.median(gaps))) / np.median(gaps)
            same = (mine[1:] == mine[:-1]).all(axis=1).mean()
            bits = np.unpackbits(mine[1:] ^ mine[:-1]).sum() / len(gaps)
            static = (mine == mine[0]).all(axis=0)[:num_bytes].mean() if num_bytes else np.nan
            by_id.append((spread, same, bits, static))
    seconds = float(time_s[-1] - time_s[0])
    extended = float((ids > MAX_STANDARD_ID).mean())
    middle = [*np.median(by_id, axis=0)[:3].tolist(), float(np.nanmean(by_id, axis=0)[3])]
    return Figures(len(ids), extended, len(time_s) / seconds, seconds, *middle)


def cells(logs: Sequence[Figures]) -> list[str]:
    """Returns the cells of figures of several logs: their median, and their range."""
    formats = ("{:.0f}", "{:.0%}", "{:.0f}", "{:.0f}", "{:.4f}", "{:.2f}", "{:.2f}", "{:.2f}")
    return spread_cells(formats, list(zip(*logs, strict=True)))


def spread_cells(formats: Sequence[str], columns: Sequence[Sequence[float]]) -> list[str]:
    """Returns the median and the range of each column; the median alone where the range is one value."""
    cells = []
    for form, values in zip(formats, columns, strict=True):
        low, middle, high = (form.format(value) for value in (min(values), np.median(values), max(values)))
        cells.append(middle if low == high else f"{middle} ({low} to {high})")
    return cells


def windows_of(attack: Bools) -> Bools:
    """Returns which windows have an attack frame."""
    return np.asarray(attack[: len(attack) // WINDOW * WINDOW].reshape(-1, WINDOW).any(axis=1), np.bool_)


def attacked(settings: SyntheticSettings) -> tuple[Bools, Bools]:
    """Returns which windows and which frames of the whole data set are attacks."""
    designs = GENERATORS[settings.version].make_vehicles(settings.seed)
    drives = enumerate(plan_drives(settings.version))
    logs = [simulate(drive, position, designs[drive.vehicle - 1], settings).attack for position, drive in drives]
    return np.concatenate([windows_of(log) for log in logs]), np.concatenate(logs)


def ratio(is_attack: Bools) -> str:
    """Returns the number of benign items for each attack, in the form of published figures."""
    return f"1 : {(~is_attack).sum() / is_attack.sum():.1f}" if is_attack.any() else "none"


def out_of_range(vehicles: Sequence[Figures], windows: Bools, seed: int) -> list[str]:
    """Names the figures whose median over the vehicles is out of real logs' range, and attacks that are not rare."""
    medians = {name: float(np.median([getattr(vehicle, name) for vehicle in vehicles])) for name in LOGGED}
    wrong = [f"{name} {medians[name]:.4f} with seed {seed}" for name, (low, high) in LOGGED.items()
             if not low <= medians[name] <= high]  # fmt: skip
    return wrong if (~windows).sum() >= PUBLISHED[0] * windows.sum() else [*wrong, f"{ratio(windows)} with seed {seed}"]


def tree_table(seeds: Sequence[int]) -> str:
    """Trains a decision tree for each kind of attack. Returns a table of how well the trees find the attacks."""
    rows = [["attack", "MCC", "ROC-AUC"]]
    for kind in sorted(ATTACKS, key=lambda kind: (kind not in FIRST_ATTACKS, kind)):
        scores = np.mean([tree_finds(kind, SyntheticSettings(seed=seed)) for seed in seeds], axis=0)
        rows.append([kind, *(f"{score:.2f}" for score in scores)])
    return markdown(rows)


def tree_finds(kind: str, settings: SyntheticSettings) -> tuple[float, float]:
    """Returns MCC and area under the ROC curve of a decision tree on unseen drives."""
    designs = GENERATORS[settings.version].make_vehicles(settings.seed)
    parts: dict[bool, list[tuple[Floats, Bools]]] = {True: [], False: []}
    for number in range(TREE_DRIVES * (NUM_VEHICLES - 1)):
        repetition, vehicle = divmod(number, NUM_VEHICLES - 1)
        drive = PlannedDrive("train_02_with_attacks", kind, vehicle + 1)
        log = simulate(drive, EXTRA_DRIVES + 100 + number, designs[vehicle], settings)
        parts[3 * repetition < 2 * TREE_DRIVES].append((window_figures(log), windows_of(log.attack)))
    (features, labels), (unseen, truth) = (map(np.concatenate, zip(*parts[key], strict=True)) for key in (True, False))
    tree = DecisionTreeClassifier(max_depth=6, min_samples_leaf=5, class_weight="balanced", random_state=0)
    scores = tree.fit(features, labels).predict_proba(unseen)[:, 1]
    return float(matthews_corrcoef(truth, scores > 0.5)), float(roc_auc_score(truth, scores))


def window_figures(log: Traffic) -> Floats:
    """Returns figures of each window, from its intervals and changed bits relative to the IDs' usual values."""
    interval, bits = np.zeros(len(log)), np.zeros(len(log))
    for each_id in np.unique(log.can_id):
        rows = np.flatnonzero(log.can_id == each_id)
        gaps = np.diff(log.time_us[rows]).clip(min=1)
        if len(gaps):
            interval[rows[1:]] = np.log2(gaps / np.median(gaps))
            changed = np.unpackbits(log.payload[rows[1:]] ^ log.payload[rows[:-1]], axis=1).sum(axis=1)
            bits[rows[1:]] = changed - changed.mean()
    whole = len(log) // WINDOW * WINDOW
    columns = (interval, bits, np.diff(log.time_us, prepend=0))
    per_frame = [column[:whole].reshape(-1, WINDOW) for column in columns]
    per_window = [reduce(column, axis=1) for column in per_frame for reduce in (np.min, np.max, np.mean, np.std)]
    more = [column[:whole].reshape(len(per_window[0]), -1).mean(axis=1) for column in (log.payload, log.length)]
    return np.column_stack([*per_window, *more])
