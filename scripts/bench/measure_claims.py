"""Measures the claims of the five described systems: each on a simulated GPU scaled from its case, beside its own
algorithm if that is simple.
"""

import io
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bench.harness import Benchmark, markdown, render
from bench.policy_laws import draw_laws, simulate
from can_train.cli.main import main as can_train
from can_train.config.compose import RunRequest, resolve
from can_train.config.resolved import ResolvedRun
from can_train.factors.policies import AffinePolicy, MomentumPolicy
from can_train.fit.packing import solve_accumulation
from can_train.memory.simulated.gpu import SimulatedGpu
from can_train.reporter import SilentReporter
from can_train.training.loading import load_task
from can_train.training.split_gradients import compare_gradients

OUT_OF_MEMORY: Final = 3  # exit status
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The outcome of a training."""

    died: bool  # of out-of-memory
    steps: int  # done
    samples_per_second: float  # median; 0 where no step was done
    parts: tuple[int, ...]  # micro-batches of each step
    peaks: tuple[int, ...]  # allocated bytes of each step
    result: Mapping[str, Any]  # result.json; empty where the run died

    @property
    def outcome(self) -> str:
        """The outcome as a cell of a table."""
        return f"dies in step {self.steps + 1:,}" if self.died else f"finishes ({self.steps:,} steps)"


def plain(batch: int) -> list[str]:
    """Returns words that turn the engine off: each batch is computed whole, and an out-of-memory ends the run."""
    return ["--micro-batch-size", str(batch), "--set", "training.adaptive_micro_batch=false"]


def train(folder: Path, words: Sequence[str]) -> Trained:
    """Trains with a command line's words in a new folder below `folder`; data are cached for all.

    Raises:
        RuntimeError: It ended with another error than out-of-memory.
    """
    runs, printed = folder / f"runs-{next(_numbers)}", io.StringIO()
    # A state folder of its own: knowledge of a device would help the next run.
    place = ["--runs-dir", str(runs), "--state-dir", str(runs / "state")]
    with redirect_stdout(printed), redirect_stderr(printed):
        status = can_train([*words, *place])
    if status not in (0, OUT_OF_MEMORY):
        raise RuntimeError(f"can-train {' '.join(words)}\n{printed.getvalue()}")
    (run,) = (path.parent for path in runs.glob("*/config.yaml"))
    lines = [line for line in json_lines(run / "metrics.jsonl") if "train" in line]
    steps = [line for line in json_lines(run / "steps.jsonl") if "step" in line]
    return Trained(
        died=status == OUT_OF_MEMORY,
        steps=max((line["step"] for line in steps), default=0),
        samples_per_second=median([line["samples_per_second"] for line in lines] or [0.0]),
        parts=tuple(line["micro_batches"] for line in steps),
        peaks=tuple(line["allocated_bytes"] for line in steps),
        result={} if status else json.loads((run / "result.json").read_text()),
    )


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines; returns no lines if it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compose(folder: Path, task: str, *sets: str, dataset: str = "synthetic") -> ResolvedRun:
    """Composes a run of a task with settings, for the CPU; its caches lie in `folder`."""
    values = {"paths.state_dir": str(folder / "state")}
    return resolve(RunRequest(task=task, dataset=dataset, device="cpu", sets=sets, values=values))


class FinderResult(NamedTuple):
    """The result of a search for a batch size."""

    size: int
    trials: int


def doubling_finder(fits: Callable[[int], bool], *, upper: int) -> FinderResult:
    """Doubles from 2 until memory runs out or the data end; returns the last size that fitted, 0 if none did.

    >>> doubling_finder(lambda size: size <= 100, upper=1000)
    FinderResult(size=64, trials=7)
    """
    size, last, trials = 2, 0, 0
    while size <= upper:
        trials += 1
        if not fits(size):
            break
        last, size = size, 2 * size
    return FinderResult(last, trials)


def described_divisor(batch: int, largest: int) -> tuple[int, int]:
    """Returns the size of a part and their number: the largest divisor up to, and by its off-by-one, one above.

    >>> [described_divisor(batch, 64) for batch in (128, 127, 130)]
    [(64, 2), (1, 127), (65, 2)]
    """
    size = next(size for size in range(min(largest + 1, batch), 0, -1) if batch % size == 0)
    return size, batch // size


def remainder_weight(samples: int, loaded: int, accumulated: int) -> float:
    """Returns the weight of an epoch's last step if each of its micro-batches is divided by their usual number; 1 is
    right.

    >>> remainder_weight(80, 8, 4)
    0.5
    """
    batches = -(-samples // loaded)
    return (batches % accumulated or accumulated) / accumulated


def batches_to_oom(peaks: NDArray[np.float64], limit: float) -> float:
    """Returns the mean number of random batches until one needs more than a limit; infinite if no batch does.

    >>> batches_to_oom(np.array([1.0, 2.0, 3.0, 4.0]), 3.5)
    4.0
    """
    share = float((peaks > limit).mean())
    return 1 / share if share else float("inf")


def lost_share(batches: Sequence[tuple[int, bool]]) -> float:
    """Returns the share of samples in batches that do not fit, from each batch's size and whether it fits.

    >>> lost_share([(30, True), (10, False)])
    0.25
    """
    return sum(size for size, fits in batches if not fits) / sum(size for size, _ in batches)


def mean_or_dash(values: Sequence[float], form: str) -> str:
    """Writes the mean of some values; a dash for no values."""
    return format(fmean(values), form) if values else "–"


BENCHMARK: Final = Benchmark(__name__, packages=("torch", "numpy"), quick="less of everything, in under a minute")
MIB: Final = 2**20
CPU: Final = torch.device("cpu")
AMPLE: Final = "sim:1GiB"
Rows = list[list[str]]
Fields = dict[str, object]
"""Fields of a system's template: `sections/claims-NAME.md`."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured."""

    showers: int = 100
    density: float = 300  # muons per PeV
    epochs: int = 2  # of a muon training
    draws: int = 200_000  # random batches of showers
    cards: int = 3  # of the batch finders
    orders: int = 2  # shuffled epochs for each size that a finder returns
    laws: int = 100
    frames: int = 12  # of a clip
    cards_of_pictures: int = 2
    recordings: int = 4  # presets of the EEG task
    frozen_epochs: int = 1  # of a ball tracker's training; an equal number follows with all thawed
    words: int = 1000  # of the simulated language
    pairs: str = ""  # training table; empty: simulated


QUICK: Final = Scale(showers=50, density=50, epochs=1, draws=20_000, cards=1, orders=1, laws=10, cards_of_pictures=1,
                     recordings=1, frozen_epochs=1, words=200)  # fmt: skip

# --- muon

ALONE: Final = ("--find-batch-size", "off", "--set", "training.adaptive_micro_batch=false")
"""As the described system: only the settings decide, and an out-of-memory ends the run."""
SHOWERS: Final = 32  # of a batch, by default
SMALL_CARD: Final = 0.65  # of the peak of the largest batch, computed whole
CLAIMED_OOM: Final = 3_700  # batches until memory runs out, as the described system says
GROWN: Final = (1, 2, 4, 8)


def muon_words(scale: Scale, device: str, epochs: int) -> list[str]:
    """Returns the words of a muon training."""
    sets = [word for setting in shower_sets(scale) for word in ("--set", setting)]
    return ["--task", "muon", "--dataset", "synthetic", *sets,
            "--epochs", str(epochs), "--device", device]  # fmt: skip


def shower_sets(scale: Scale) -> list[str]:
    """Returns the settings of the simulated showers."""
    return [f"dataset.synthetic.showers={scale.showers}", f"dataset.synthetic.muons_per_pev={scale.density}"]


def muon(folder: Path, scale: Scale) -> Fields:
    """Compares the described ways to accumulate: memory, speed and result; outcomes on a small card; batches to OOM."""
    task = load_task(compose(folder, "muon", *shower_sets(scale)), SilentReporter())
    counts: NDArray[np.float64] = task.batch_features(task.train_rows)  # [events, features]
    draws = random_batches(len(counts), SHOWERS, scale.draws)
    middle = float(np.median(counts[draws, 0].sum(axis=1)))
    whole = train(folder, [*muon_words(scale, AMPLE, scale.epochs), *plain(SHOWERS)])
    target = max(1, int(0.6 * max(whole.peaks) / MIB))
    splits = ("--set", "training.accumulation_splits=2")
    ways: dict[str, Sequence[str]] = {
        "never": plain(SHOWERS),
        "always 2": (*ALONE, *splits),
        "above a threshold": (*ALONE, *splits, "--set", f"training.accumulation_threshold={middle:.0f}"),
        "adaptive": ("--set", f"training.accumulation_target_mib={target}"),
    }
    rows = [["accumulation", "peak, MiB", "against never", "samples/s", "against never", "Wasserstein distance"]]
    done: dict[str, Trained] = {"never": whole}
    speeds: dict[str, float] = {}
    for name, words in ways.items():
        if name not in done:
            done[name] = train(folder, [*muon_words(scale, AMPLE, scale.epochs), *words])
        speeds[name] = train(folder, [*muon_words(scale, "cpu", scale.epochs), *words]).samples_per_second
        rows.append([name, *muon_cells(done[name], whole, speeds[name], speeds["never"])])
    card = f"sim:{SMALL_CARD * max(whole.peaks) / MIB:.1f}MiB"
    small = {
        name: train(folder, [*muon_words(scale, card, 1), *words])
        for name, words in {**ways, "can-train's default": ()}.items()
    }
    outcomes = [["accumulation", f"on a card of {card[4:]}", "rescued"]]
    outcomes += [[name, run.outcome, str(run.result.get("ooms_rescued", "–"))] for name, run in small.items()]
    return {"ways": markdown(rows), "middle": middle, "target": target, "steps": whole.steps,
            "small": markdown(outcomes), **muon_oom(counts, done["adaptive"], middle, scale)}  # fmt: skip


def muon_cells(run: Trained, whole: Trained, speed: float, whole_speed: float) -> list[str]:
    """Returns the cells of one way to accumulate."""
    peak, distance = max(run.peaks), run.result["judgement"]["test"]["test"]["model"]["w1_mean"]
    return [f"{peak / MIB:.1f}", f"{peak / max(whole.peaks) - 1:+.0%}", f"{speed:.0f}",
            f"{speed / whole_speed - 1:+.0%}", f"{distance:.6f}"]  # fmt: skip


def random_batches(events: int, size: int, draws: int) -> NDArray[np.int64]:
    """Draws batches of events: [draws, size]."""
    return np.random.default_rng(0).integers(0, events, (draws, size))


def muon_oom(counts: NDArray[np.float64], trained: Trained, threshold: float, scale: Scale) -> Fields:
    """Returns a table of the mean number of random batches until memory runs out, as batches grow."""
    plans = [trained.result["plan"], *trained.result["plan"]["later"]]
    laws = [plan["limits"]["training"]["model"] for plan in plans]

    def peaks(totals: NDArray[np.float64]) -> NDArray[np.float64]:
        each = [law["base_bytes"] + totals @ np.array(law["coefficients"]) for law in laws]
        largest: NDArray[np.float64] = np.maximum.reduce(each)
        return largest

    draws = random_batches(len(counts), SHOWERS, scale.draws)
    card = float(np.quantile(peaks(counts[draws].sum(axis=1)), 1 - 1 / CLAIMED_OOM))
    rows = [["batch", "never", "always 2", "above a threshold", "can-train: most parts"]]
    for grown in GROWN:
        batches = counts[random_batches(len(counts), SHOWERS * grown, scale.draws // grown)]
        whole, halves = batches.sum(axis=1), np.array_split(batches, 2, axis=1)
        split = np.max([peaks(half.sum(axis=1)) for half in halves], axis=0)
        above = np.where(whole[:, 0] > threshold, split, peaks(whole))
        # Sums of a batch grow with its events: its excess over the base, in units of the room of one part.
        base = max(law["base_bytes"] for law in laws)
        most = int(np.ceil((peaks(whole).max() - base) / (card - base - (peaks(counts).max() - base))))
        until = [never_or_count(batches_to_oom(each, card)) for each in (peaks(whole), split, above)]
        rows.append([str(SHOWERS * grown), *until, str(most)])
    return {"until_oom": markdown(rows), "draws": scale.draws, "card": card / MIB}


def never_or_count(batches: float) -> str:
    """Writes a number of batches."""
    return "never" if np.isinf(batches) else f"{batches:,.0f}"


# --- tracknet

TRACKNET: Final = ("--task", "tracknet", "--dataset", "synthetic", "--precision", "fp32",
                   "--set", "dataset.synthetic.games=3", "--set", "dataset.width=128", "--set", "dataset.height=72",
                   "--set", "model.width=8", "--set", "model.levels=2", "--set", "model.groups=2")  # fmt: skip
PRESET_BATCH: Final = 16


def tracknet(folder: Path, scale: Scale) -> Fields:
    """Trains on cards that are too small for the preset's batch, frozen or thawed."""
    words = [*TRACKNET, "--set", f"dataset.synthetic.frames={scale.frames}", "--epochs", str(2 * scale.frozen_epochs),
             "--set", f"training.thaw_epoch={scale.frozen_epochs}"]  # fmt: skip
    whole = train(folder, [*words, *plain(PRESET_BATCH), "--device", AMPLE])
    half = whole.steps // 2
    frozen, thawed = max(whole.peaks[:half]), max(whole.peaks[half:])
    cards = {"fits frozen, not thawed": 0.99 * thawed, "fits neither": 0.6 * frozen}
    rows = [["card", "engine off", "described: halve, restart", "engine on", "parts frozen, thawed", "rescued"]]
    for name, size in list(cards.items())[-scale.cards_of_pictures :]:
        device = ("--device", f"sim:{size / MIB:.2f}MiB")
        off, on = train(folder, [*words, *plain(PRESET_BATCH), *device]), train(folder, [*words, *device])
        parts = f"{max(on.parts[:half])}, {max(on.parts[half:])}" if not on.died else "–"
        rows.append([f"{size / MIB:.1f} MiB: {name}", off.outcome, halve_and_restart(folder, [*words, *device]),
                     on.outcome, parts, str(on.result.get("ooms_rescued", "–"))])  # fmt: skip
    return {"table": markdown(rows), "frozen": frozen / MIB, "thawed": thawed / MIB}


def halve_and_restart(folder: Path, words: Sequence[str]) -> str:
    """Runs the described search: halves the micro-batch until a first step succeeds, and keeps it. Returns the end."""
    size = PRESET_BATCH
    while size:
        run = train(folder, [*words, *plain(size)])
        if run.steps:
            return f"{size}: {run.outcome}"
        size //= 2
    return "dies in step 1"


# --- seq2seq

SEQ2SEQ: Final = ("model.hidden=32", "model.embedding=16")
DESIRED: Final = (128, 100, 127, 130, 134, 1009)
MOST: Final = 64
CARDS: Final = (24.0, 60.0)  # MiB: the smallest and the largest


def seq2seq(folder: Path, scale: Scale) -> Fields:
    """Compares the described finder with `max`, and its divisor with `opt`."""
    words = f"dataset.synthetic.words={scale.words}"
    run = compose(folder, "seq2seq", *SEQ2SEQ, words, dataset=scale.pairs or "synthetic")
    task = load_task(run, SilentReporter())
    epoch = Pairs(task)
    sizes = np.geomspace(*CARDS, scale.cards)
    judged = [finders(folder, epoch, float(size), scale) for size in sizes]
    rows = [["finder", "trials", "size", "on each card", "fits the longest", "batches that run out", "samples in them"]]
    for column, name in enumerate(("described: doubling, random probes", "can-train, `max`")):
        finder = [pair[column] for pair in judged]
        batches = [batch for card in finder for batch in card.batches]
        rows.append([
            name,
            mean_or_dash([card.trials for card in finder], ".1f"),
            mean_or_dash([card.size for card in finder], ".0f"),
            ", ".join(str(card.size) for card in finder),
            f"{sum(card.longest for card in finder)} of {len(finder)}",
            f"{sum(not fits for _, fits in batches)} of {len(batches)}",
            f"{lost_share(batches):.1%}",
        ])  # fmt: skip
    source = "Turkish inflection, 1,000 pairs" if scale.pairs else "the simulated language"
    return {"finders": markdown(rows), "divisors": markdown(divisors()), "source": source, "cards": scale.cards,
            "orders": scale.orders, "too_many": MOST + 1}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The size that a finder returns on one card, and how well it fits."""

    trials: int
    size: int
    longest: bool  # whether a batch of the longest pairs fits
    batches: Sequence[tuple[int, bool]]  # of epochs: size, and whether it fits


class Pairs:
    """Steps with batches of pairs on simulated GPUs."""

    def __init__(self, task: Any) -> None:
        torch.manual_seed(0)
        self.task, self.model = task, task.build_model().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        features = task.batch_features(task.train_rows)
        # Longest target first: the decoder's states weigh most.
        self.longest = task.train_rows[np.lexsort((-features[:, 0], -features[:, 1]))]
        self.run(task.train_rows[:2])

    def run(self, rows: NDArray[np.int64]) -> None:
        """Does one step with a batch."""
        self.optimizer.zero_grad()
        batch = self.task.logical_batch(rows, CPU, torch.float32, torch.Generator().manual_seed(0))
        (total, symbols), *_ = batch.losses(self.model, 0, len(rows)).values()
        (total / symbols).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fits(self, rows: NDArray[np.int64], card_mib: float) -> bool:
        """Tells whether a batch runs on a card."""
        self.optimizer.zero_grad()
        state = [value for each in self.optimizer.state.values() for value in each.values()
                 if isinstance(value, torch.Tensor)]  # fmt: skip
        resident = [*self.model.parameters(), *state]
        try:
            with SimulatedGpu(int(card_mib * MIB), resident=resident):
                self.run(rows)
        except torch.OutOfMemoryError:
            return False
        return True


def finders(folder: Path, pairs: Pairs, card: float, scale: Scale) -> tuple[Judged, Judged]:
    """Judges the described finder and can-train's on one card."""
    draw, rows = np.random.default_rng(int(card)), pairs.task.train_rows
    size, trials = doubling_finder(
        lambda size: pairs.fits(draw.choice(rows, size, replace=False), card), upper=len(rows)
    )
    orders = [draw.permutation(rows) for _ in range(scale.orders)]
    shuffled = [order[start : start + size] for order in orders for start in range(0, len(rows), size)] if size else []
    theirs = Judged(trials=trials, size=size, longest=pairs.fits(pairs.longest[:size], card),
                    batches=[(len(batch), pairs.fits(batch, card)) for batch in shuffled])  # fmt: skip
    settings = (*SEQ2SEQ, "training.min_steps_per_epoch=1", f"dataset.synthetic.words={scale.words}")
    sets = [word for setting in settings for word in ("--set", setting)]
    words = ["--task", "seq2seq", "--dataset", scale.pairs or "synthetic", *sets, "--epochs", "1",
             "--find-batch-size", "max", "--device", f"sim:{card:.2f}MiB"]  # fmt: skip
    run = train(folder, words)
    plan, limit = run.result["plan"]["plan"], run.result["plan"]["limits"]["training"]
    micro = plan["largest_micro_batch"]
    batch, rescued = plan["logical_batch"], run.result["ooms_rescued"]
    batches = [*[(batch, True)] * (run.steps - rescued), *[(batch, False)] * rescued]
    return theirs, Judged(trials=limit["trials"], size=micro, longest=pairs.fits(pairs.longest[:micro], card),
                          batches=batches)  # fmt: skip


def divisors() -> Rows:
    """Returns the table of the described `opt` beside can-train's accumulation."""
    rows = [["batch", "described: parts", "can-train: parts"]]
    for batch in DESIRED:
        (size, parts), ours = described_divisor(batch, MOST), solve_accumulation(batch, MOST)
        verdict = " (does not fit)" if size > MOST else ""
        rows.append([str(batch), f"{parts} × {size}{verdict}", f"{len(ours)} of {max(ours)} or {min(ours)}"])
    return rows


# --- bendr

RECORDINGS: Final = (
    ("8 channels, 1 s, 16 × 2", 8, 1.0, 16, 2),
    ("14 channels, 2 s, 8 × 4", 14, 2.0, 8, 4),
    ("20 channels, 4 s, 4 × 8", 20, 4.0, 4, 8),
    ("32 channels, 2 s, 2 × 16", 32, 2.0, 2, 16),
)
CLAIMED_GRADIENT: Final = 0.016
CLAIMED_LOSS: Final = 0.0039


def bendr(folder: Path, scale: Scale) -> Fields:
    """Compares gradients of accumulation by ÷N with can-train's, for four presets."""
    rows = [["recordings, batch", "÷N: gradient", "÷N: loss", "÷N, unequal parts: gradient",
             "÷N: weight of a remainder",
             "can-train: gradient"]]  # fmt: skip
    for name, channels, window, loaded, accumulated in RECORDINGS[: scale.recordings]:
        sets = (f"dataset.synthetic.channels={channels}", f"dataset.window_s={window}", f"training.batch_size={loaded}",
                f"training.gradient_accumulation_steps={accumulated}")  # fmt: skip
        run = compose(folder, "bendr", *sets)
        compared = compare_gradients(run, SilentReporter())
        equal = compared.averaged[(loaded,) * accumulated]
        unequal = next(error for sizes, error in compared.averaged.items() if len(sizes) == 2 and sizes[0] != sizes[1])
        samples = len(load_task(run, SilentReporter()).train_rows)
        rows.append([name, f"{equal.gradient:.3f}", f"{equal.loss:.4f}", f"{unequal.gradient:.3f}",
                     f"{remainder_weight(samples, loaded, accumulated):.2f}",
                     f"{max(error.gradient for error in compared.errors.values()):.0e}"])  # fmt: skip
    return {"table": markdown(rows)}


# --- CAN

CLAIMED_RUNS: Final = "5–7"
RUNS: Final = 120  # of each law


def can(_: Path, scale: Scale) -> Fields:
    """Counts the runs until the peak is within 90 ± 2 % by the described rule and by can-train's."""
    rows = [["noise of a run's peak", "policy", f"reached in {RUNS} runs", "runs: 10 %, median, 90 %", "within 7",
             "OOMs"]]  # fmt: skip
    for noise in (0.0, 0.02):
        laws = draw_laws(scale.laws, noise=noise, bend=0.0)
        for name, policy in (("described", MomentumPolicy()), ("can-train", AffinePolicy())):
            runs = [simulate(policy, law, runs=RUNS, seed=index) for index, law in enumerate(laws)]
            judged = [(each.runs_to_target(0.90), each.ooms) for each in runs]
            rows.append([f"{noise:.0%}", name, *runs_cells(judged)])
    return {"table": markdown(rows), "laws": scale.laws}


def runs_cells(simulated: Sequence[tuple[int | None, int]]) -> list[str]:
    """Returns the cells of a policy from the runs to the target (None: not reached) and the out-of-memories of each.

    >>> runs_cells([(2, 0), (4, 0), (None, 1), (12, 1)])
    ['75%', '2, 4, 10', '50%', '0.50']
    """
    runs = [run for run, _ in simulated if run is not None]
    spread = ", ".join(f"{value:.0f}" for value in np.quantile(runs, [0.1, 0.5, 0.9])) if runs else "–"
    return [f"{len(runs) / len(simulated):.0%}", spread, f"{sum(run <= 7 for run in runs) / len(simulated):.0%}",
            mean_or_dash([ooms for _, ooms in simulated], ".2f")]  # fmt: skip


SYSTEMS: Final[dict[str, Callable[[Path, Scale], Fields]]] = {
    "muon": muon, "tracknet": tracknet, "seq2seq": seq2seq, "bendr": bendr, "can": can,
}  # fmt: skip


def main() -> None:
    """Measures, prints the tables and writes them into RESULTS.md."""
    parser = BENCHMARK.parser()
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="systems; writes nothing")
    parser.add_argument("--pairs", default="", help="training table of seq2seq (default: simulated)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scale = QUICK if options.quick else Scale(pairs=options.pairs)
    with tempfile.TemporaryDirectory() as folder:
        systems = [render(f"claims-{name}", globals() | SYSTEMS[name](Path(folder), scale)) for name in options.only]
    write = set(options.only) == set(SYSTEMS)
    BENCHMARK.finish(options, write=write, systems="\n\n".join(systems))
