"""Measures the data path from a log to batches: parsing a generated HCRL Car-Hacking log, building graphs, preparing
and batching, each next to an alternative where there is one. Times are the best of several rounds, which other work on
the machine disturbs least.
"""

import importlib.util
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.harness import Benchmark, Table, best_time, call_apart, run_python, say
from can_train.reporter import SilentReporter
from can_train_tasks.can.data.dataset import prepare
from can_train_tasks.can.data.graphs import FlatGraphs, Frames, GraphBuilder
from can_train_tasks.can.data.layout import LOG, LogFile
from can_train_tasks.can.data.reading import LogReader
from can_train_tasks.can.settings import CanDatasetSettings

BENCHMARK: Final = Benchmark(__name__, packages=("Python", "torch", "torch_geometric", "polars", "numpy"))
MESSAGES: Final = 4_000_000
SMALL_SHARE: Final = 4
"""Messages of the long log over the messages of the short log, whose memory is compared."""

BATCH: Final = 512
"""Graphs in a batch."""
COLLATED_GRAPHS: Final = 20 * BATCH
"""Graphs to draw batches from. Few, because torch_geometric needs an object for each."""

PANDAS_MISSING: Final = (
    "pandas is not installed, so it is not measured; can-train does not need it: to see it, install it elsewhere "
    "(pip install --target FOLDER pandas) and put that folder on PYTHONPATH"
)

ROUNDS: Final = 3
PERIODS_MS: Final = (10,) * 17 + (20,) * 3 + (100,) * 4 + (1000,) * 3
"""The period of each ID's messages: about 2,000 messages a second from 27 IDs, as on the car that HCRL recorded."""
SHORT_PAYLOADS: Final = {20: 5, 21: 6, 22: 2}
"""Payload sizes other than 8 bytes, by the index of the message in PERIODS_MS."""
ATTACK_EVERY_S: Final = 60.0
ATTACK_LENGTH_S: Final = 4.0
ATTACK_GAP_S: Final = 3e-4
"""Every ATTACK_EVERY_S seconds, ID 0 floods the bus for a few seconds."""
ROWS_AT_A_TIME: Final = 200_000


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md."""
    parser = BENCHMARK.parser()
    parser.add_argument("--messages", type=int, default=MESSAGES, help="rows of the log (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        BENCHMARK.finish(options, table=measure(Path(folder), options.messages))


def measure(folder: Path, num_messages: int) -> Table:
    """Makes the logs in `folder`, and measures."""
    say(f"writing {num_messages:,} HCRL rows")
    short, long = folder / "short.csv", folder / "long.csv"
    write_hcrl_log(short, num_messages // SMALL_SHARE)
    write_hcrl_log(long, num_messages)
    table = Table("measured", "can-train", "beside it", "ratio")
    table.add(*parsing_row(long, num_messages))
    table.add(*graph_row(long, num_messages))
    for row in memory_rows(short, long, num_messages, folder):
        table.add(*row)
    table.add(*batch_row(short, folder))
    table.add(*start_row())
    return table


def parsing_row(log: Path, num_messages: int) -> tuple[str, ...]:
    """Parses the log with can-train and with pandas."""
    say("parsing")
    ours = num_messages / best_time(lambda: sum(map(len, read_frames(log))), ROUNDS)
    if importlib.util.find_spec("pandas") is None:
        say(PANDAS_MISSING)
        return "parsing, M messages/s", f"{ours / 1e6:.2f}", "pandas: not installed", ""
    say("parsing with pandas")
    theirs = num_messages / best_time(lambda: read_with_pandas(log), rounds=1)
    return "parsing, M messages/s", f"{ours / 1e6:.2f}", f"pandas {theirs / 1e6:.2f}", f"{ours / theirs:.1f} ×"


def graph_row(log: Path, num_messages: int) -> tuple[str, ...]:
    """Builds graphs from frames in memory."""
    say("building graphs")
    blocks = list(read_frames(log))
    rate = num_messages / best_time(lambda: build_all(blocks), ROUNDS)
    return "graphs (window 100, stride 100), M messages/s", f"{rate / 1e6:.2f}", "", ""


def memory_rows(short: Path, long: Path, num_messages: int, folder: Path) -> list[tuple[str, ...]]:
    """Prepares a short and a long log, each in a process of its own, and compares peak memory."""
    say("preparing")
    short_mib = call_apart(__name__, "peak_of_preparing", str(short), str(folder / "short"))
    begin = time.perf_counter()
    long_mib = call_apart(__name__, "peak_of_preparing", str(long), str(folder / "long"))
    seconds = time.perf_counter() - begin
    few, many = num_messages // SMALL_SHARE, num_messages
    return [
        ("peak memory of the whole preparation, MiB", f"{many:,} messages: {long_mib:.0f}",
         f"{few:,} messages: {short_mib:.0f}", f"{long_mib / short_mib:.2f} ×"),
        ("whole preparation, process start included, M messages/s", f"{many / seconds / 1e6:.2f}", "", ""),
    ]  # fmt: skip


def batch_row(log: Path, folder: Path) -> tuple[str, ...]:
    """Makes batches of shuffled graphs with can-train and with torch_geometric's DataLoader."""
    say("batching")
    from can_train_tasks.can.data.batches import Gatherer

    flat = prepare_log(log, folder / "short")
    num_graphs = min(COLLATED_GRAPHS, len(flat)) // BATCH * BATCH
    order = np.random.default_rng(0).permutation(num_graphs).reshape(-1, BATCH)
    gather = Gatherer(flat)
    # torch_geometric goes first: it frees arrays so large that malloc raises its threshold and keeps freed memory from
    # then on, as in any training process.
    theirs = pyg_seconds(flat, num_graphs) / num_graphs
    ours = best_time(lambda: one_by_one(map(gather, order)), rounds=3 * ROUNDS) / num_graphs
    name = f"batches of {BATCH} graphs, µs a graph"
    return name, f"{ours * 1e6:.1f}", f"torch_geometric DataLoader {theirs * 1e6:.1f}", f"{theirs / ours:.1f} ×"


def start_row() -> tuple[str, ...]:
    """Times `can-train --help` next to the import of Typer alone."""
    say("starting")
    ours = best_time(lambda: run_python("-m", "can_train", "--help"), rounds=3 * ROUNDS)
    theirs = best_time(lambda: run_python("-c", "import typer"), rounds=3 * ROUNDS)
    return "`can-train --help`, s", f"{ours:.2f}", f"`import typer` {theirs:.2f}", f"{ours / theirs:.1f} ×"


def write_hcrl_log(path: Path, num_messages: int) -> None:
    """Writes periodic traffic with jitter and a few floods, in the format of HCRL Car-Hacking."""
    rng = np.random.default_rng(0)
    timestamp, message = bus_schedule(rng, num_messages)
    ids = [f"{can_id:04x}" for can_id in [*np.sort(rng.choice(0x7FF, len(PERIODS_MS), replace=False) + 1), 0]]
    flood = len(PERIODS_MS)
    with path.open("w", encoding="ascii") as file:
        for begin in range(0, num_messages, ROWS_AT_A_TIME):
            part = slice(begin, begin + ROWS_AT_A_TIME)
            payload = rng.integers(0, 256, (len(message[part]), 8), dtype=np.uint8)
            columns = zip(timestamp[part].tolist(), message[part].tolist(), payload, strict=True)
            for time_s, index, data in columns:
                size = SHORT_PAYLOADS.get(index, 8)
                flag = "T" if index == flood else "R"
                file.write(f"{time_s:.6f},{ids[index]},{size},{data[:size].tobytes().hex(',')},{flag}\n")


def bus_schedule(rng: np.random.Generator, num_messages: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each message's time in seconds and its index in PERIODS_MS. Floods have the index after the last."""
    seconds = num_messages / sum(1000 / period for period in PERIODS_MS)  # enough without the floods
    times, numbers = [], []
    for number, period_ms in enumerate(PERIODS_MS):
        ticks = np.arange(rng.uniform(0, period_ms / 1000), seconds, period_ms / 1000)
        times.append(ticks + rng.normal(0, period_ms * 2e-5, len(ticks)))
        numbers.append(np.full(len(ticks), number))
    for begin in np.arange(ATTACK_EVERY_S / 2, seconds, ATTACK_EVERY_S):
        flood = np.arange(begin, begin + ATTACK_LENGTH_S, ATTACK_GAP_S)
        times.append(flood)
        numbers.append(np.full(len(flood), len(PERIODS_MS)))
    order = np.argsort(np.concatenate(times))[:num_messages]
    return 1_478_198_376.0 + np.concatenate(times)[order], np.concatenate(numbers)[order]


def read_frames(log: Path) -> Iterator[Frames]:
    """Reads a log with can-train's reader."""
    return LogReader(log, CanDatasetSettings()).blocks()


def read_with_pandas(log: Path) -> tuple[Any, ...]:
    """Reads the same columns with pandas, without a loop over rows.

    IDs and bytes are read as text, because pandas would take some hexadecimal numbers for decimal ones. The flag is the
    last token of a row, whose length varies.
    """
    import pandas as pd

    data = [f"byte_{index}" for index in range(8)]
    table = pd.read_csv(log, header=None, names=["timestamp", "id", "dlc", *data, "flag"], dtype=str)
    tokens = table[[*data, "flag"]].to_numpy()
    dlc = table["dlc"].astype(int).to_numpy()
    flag = tokens[np.arange(len(table)), dlc] == "T"
    tokens[np.arange(9) >= dlc[:, None]] = "00"
    value = {f"{byte:02x}": byte for byte in range(256)}
    payload = np.stack([pd.Series(tokens[:, index]).map(value).to_numpy(np.uint8) for index in range(8)], axis=1)
    can_id = table["id"].map(lambda text: int(text, 16)).to_numpy(np.uint32)
    return table["timestamp"].astype(float).to_numpy(), can_id, dlc, payload, flag


def build_all(blocks: list[Frames]) -> int:
    """Builds all graphs and returns their number."""
    builder = GraphBuilder(100, 100)
    return sum(len(block) for frames in blocks for block in builder.feed(frames))


def prepare_log(log: Path, cache: Path) -> FlatGraphs:
    """Prepares a log for training and returns its graphs."""
    source = LogFile(path=log, role=LOG, group=log.name, kind="DoS")
    return prepare(CanDatasetSettings(path=str(log)), [source], cache, SilentReporter()).flat


def peak_of_preparing(log: str, cache: str) -> float:
    """Prepares a log, and returns this process's peak memory in MiB."""
    prepare_log(Path(log), Path(cache))
    # getrusage would include the peak from before exec.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak) / 1024


def pyg_seconds(flat: FlatGraphs, num_graphs: int) -> float:
    """Times one shuffled pass of torch_geometric's DataLoader over graphs in memory."""
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    graphs = []
    for g in range(num_graphs):
        nodes = slice(flat.node_ptr[g], flat.node_ptr[g + 1])
        edges = slice(flat.edge_ptr[g], flat.edge_ptr[g + 1])
        graphs.append(
            Data(
                x=torch.tensor(flat.node_features[nodes]),
                edge_index=torch.tensor(flat.edge_index[:, edges], dtype=torch.int64),
                edge_attr=torch.tensor(flat.edge_features[edges]),
                can_id=torch.tensor(flat.ids[flat.node_code[nodes]]),
                y=torch.tensor([int(flat.label[g] > 0)]),
            )
        )
    loader = DataLoader(graphs, batch_size=BATCH, shuffle=True)
    return best_time(lambda: one_by_one(loader), ROUNDS)


def one_by_one(batches: Iterable[object]) -> None:
    """Consumes batches like a training loop, which holds a batch until it has the next."""
    for _ in batches:
        pass
