"""Compares can-train's factor policies with a proportional one and with an oracle: 40 simulated runs under each of the
same random memory laws.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean, median
from typing import Final, NamedTuple

import numpy as np

from bench.harness import Benchmark, Table
from bench.policy_laws import (
    FOREIGN_RUNS,  # noqa: F401 - the section names it
    TARGET,
    UNCHANGED_RUNS,  # noqa: F401
    Array,
    Law,
    NextFactor,
    Oracle,
    draw_laws,
    simulate_all,
    varied,
    with_hidden,
)
from can_train.factors.policies import DEFAULT_PRIOR, AffinePolicy, FactorPoint, MomentumPolicy

LAWS: Final = 400
QUICK_LAWS: Final = 20
BENCHMARK: Final = Benchmark(__name__, packages=("numpy",), quick=f"{QUICK_LAWS} laws, too few to judge")
RUNS: Final = 40
FIRST_RUNS: Final = 10
"""Runs that a mean peak leaves out: a policy still learns in them."""

BEND: Final = 0.15
NOISE: Final = 0.02
NOISES: Final = (NOISE, 0.05, 0.08)
OVERSTATED: Final = (0.0, 0.11)
CEILINGS: Final = (0.82, 0.94)
CEILING_SD: Final = 0.01
TAIL_NOISE: Final = 0.025
TAILS: Final = 3
DRIFT: Final = 0.06
CHANGE: Final = 0.1
OTHER: Final = (0.03, 0.12)
OTHER_SHARE: Final = (0.2, 0.8)
FOREIGN: Final = 0.1
BATCH: Final = (1.0, 6.0)
HIDDEN: Final = 0.12
SET_BY_HAND: Final = "hidden constant"
"""The kind whose first run is not the policy's. It does not count in the means."""

HARD: Final = ("5% noise", "8% noise", "heavy tails", "two populations", "foreign memory", "5% noise, fragmented")
"""The kinds under which an oracle, too, runs out of memory."""

MARGINS: Final = ((2.36, 0.017), (2.58, 0.017), (2.58, 0.022), (2.75, 0.017), (3.0, 0.017))
MARGIN_LAWS: Final = 100
MARGIN_SEED: Final = 3
"""Margins that are compared, as standard deviations and the noise that is assumed before any run: the first is what the
policy had before, and other laws than the first table's decide.
"""

RISK: Final = 0.005
"""The risk of the oracle that decides whether the target can be reached."""

NEAR: Final = 0.02
STAYS: Final = 0.05
STAYS_RUNS: Final = 10
"""A target is reached by a peak within NEAR of it, if the next STAYS_RUNS peaks are within STAYS of it."""

MOST_OOMS: Final = 0.2
MOST_GAP: Final = 0.02
MOST_RUNS: Final = 4
"""Goals of the affine policy, over all kinds of laws: out-of-memory errors in 40 runs, distance of its mean peak below
the oracle's at an equal risk, as a share of the capacity, and median runs to the target where it can be reached."""


@dataclass(frozen=True)
class ProportionalPolicy:
    """The rule of thumb: scale the factor by target ÷ peak, and reduce it by a fifth after an out-of-memory error."""

    target: float = TARGET

    def next_factor(self, history: Sequence[FactorPoint], *, first: float) -> float:
        """Returns the factor after the history."""
        factor = first
        for point in history:
            factor = 0.8 * factor if point.peak is None else factor * self.target / point.peak
            factor = min(max(factor, 0.05), 1.0)
        return factor


POLICIES: Final[Mapping[str, NextFactor]] = {
    "affine": AffinePolicy(),
    "momentum": MomentumPolicy(),
    "proportional": ProportionalPolicy(),
}


class Judged(NamedTuple):
    """A policy on one kind of laws."""

    runs: tuple[float, ...]  # to the target, for laws whose target can be reached; infinite if it was not reached
    ooms: float
    peak: float
    gap: float

    def cells(self) -> list[str]:
        """Returns the cells of a row, without its names."""
        reached = f"{fmean(run < inf for run in self.runs):.0%}" if self.runs else ""
        runs = f"{median(self.runs):.0f}" if self.runs and median(self.runs) < inf else ""
        return [reached, runs, f"{self.ooms:.2f}", f"{self.peak:.1%}", f"{100 * self.gap:+.1f}"]


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if a goal is missed."""
    parser = BENCHMARK.parser()
    parser.add_argument("--laws", type=int, help="another number of laws; writes nothing")
    parser.add_argument("--seed", type=int, help="other laws; writes nothing")
    options = parser.parse_args()
    count = QUICK_LAWS if options.quick else options.laws or LAWS
    table = Table("laws", "policy", "reached", "runs", "OOMs", "peak", "gap", f"oracle, {RISK:.1%}")
    judged: dict[str, list[Judged]] = {name: [] for name in POLICIES}
    hard: dict[str, list[Judged]] = {name: [] for name in POLICIES}
    seed = options.seed or 0
    for kind, laws in kinds(count, seed=seed).items():
        oracle = Oracle(laws, RUNS)
        peaks = oracle.peaks(RISK)
        for name, policy in POLICIES.items():
            result = judge(policy, oracle, seed)
            table.add(kind, name, *result.cells(), f"{oracle.ooms(peaks):.2f}, {late(peaks):.1%}")
            if kind != SET_BY_HAND:
                judged[name].append(result)
            if kind in HARD:
                hard[name].append(result)
    for name, results in hard.items():
        table.add("**hard kinds**", name, *mean(results).cells(), "")
    means = {name: mean(results) for name, results in judged.items()}
    for name, result in means.items():
        table.add("**mean**", name, *result.cells(), "")
    write = options.laws is None and options.seed is None
    missed = [] if options.quick else misses(means["affine"])
    BENCHMARK.finish(options, missed, write=write, table=table,
                     margins=margins_table(QUICK_LAWS if options.quick else MARGIN_LAWS))  # fmt: skip


def margins_table(count: int) -> Table:
    """Returns the table of more and less cautious policies under laws of the hard kinds."""
    table = Table("deviations", "noise assumed", "OOMs", "peak", "runs, 2% noise")
    drawn = kinds(count, seed=MARGIN_SEED)
    for z, noise in MARGINS:
        policy = AffinePolicy(z=z, prior=replace(DEFAULT_PRIOR, noise=noise))
        hard = [simulate_all(policy, drawn[kind], runs=RUNS, seed=MARGIN_SEED) for kind in HARD]
        easy = simulate_all(policy, drawn[f"{NOISE:.0%} noise"], runs=RUNS, seed=MARGIN_SEED)
        peak = fmean(late(np.array([each.peaks for each in laws])) for laws in hard)
        ooms = fmean(each.ooms for laws in hard for each in laws)
        runs = median(runs_to(np.array(each.peaks), np.array([TARGET])) for each in easy)
        table.add(f"{z:.2f}", f"{noise:.1%}", f"{ooms:.2f}", f"{peak:.1%}", f"{runs:.0f}")
    return table


def kinds(count: int, *, seed: int) -> dict[str, list[Law]]:
    """Returns the laws of each kind."""
    drawn = {
        noise: varied(draw_laws(count, noise=noise, bend=BEND, seed=seed), seed=seed, overstated=OVERSTATED)
        for noise in (*NOISES, TAIL_NOISE)
    }
    laws = drawn[NOISE]
    return {
        **{f"{noise:.0%} noise": drawn[noise] for noise in NOISES},
        "heavy tails": [replace(law, tails=TAILS) for law in drawn[TAIL_NOISE]],
        "drift": varied(laws, seed=seed, drift=(-DRIFT / RUNS, DRIFT / RUNS)),
        "regime change": varied(laws, seed=seed, change=(-CHANGE, CHANGE)),
        "two populations": varied(laws, seed=seed, other=OTHER, other_share=OTHER_SHARE),
        "foreign memory": [replace(law, foreign=FOREIGN) for law in laws],
        "quantised splits": varied(laws, seed=seed, batch=BATCH),
        **{
            f"{noise:.0%} noise, fragmented": [
                replace(law, ceiling_sd=CEILING_SD) for law in varied(drawn[noise], seed=seed, ceiling=CEILINGS)
            ]
            for noise in NOISES[:2]
        },
        SET_BY_HAND: with_hidden(laws, hidden=HIDDEN),
    }


def judge(policy: NextFactor, oracle: Oracle, seed: int) -> Judged:
    """Runs a policy under the oracle's laws and compares it with the oracle."""
    simulated = simulate_all(policy, oracle.laws, runs=RUNS, seed=seed)
    peaks, best = np.array([each.peaks for each in simulated]), oracle.peaks(RISK)
    reachable = np.abs(best - oracle.peaks(1.0))[:, 0] <= NEAR
    # The expected out-of-memories at its peaks, not the counted ones: the oracle's figures are expectations, too.
    equal = oracle.peaks(oracle.risk_of(oracle.ooms(peaks)))
    runs = tuple(map(runs_to, peaks[reachable], best[reachable]))
    return Judged(runs, fmean(each.ooms for each in simulated), late(peaks), late(equal) - late(peaks))


def runs_to(peaks: Array, best: Array) -> float:
    """Returns the first run, counted from 1, that is near the oracle's first peak, if the next runs stay there."""
    away = np.abs(peaks - best[0])
    reached = (run for run in range(len(away)) if away[run] <= NEAR and (away[run : run + STAYS_RUNS] <= STAYS).all())
    return next((run + 1.0 for run in reached), inf)


def late(peaks: Array) -> float:
    """Returns the mean peak after the first runs."""
    return float(peaks[:, FIRST_RUNS:].mean())


def mean(judged: Sequence[Judged]) -> Judged:
    """Returns the means over the kinds, each with equal weight, with the runs of all laws."""
    return Judged(
        tuple(run for kind in judged for run in kind.runs),
        fmean(kind.ooms for kind in judged),
        fmean(kind.peak for kind in judged),
        fmean(kind.gap for kind in judged),
    )


def misses(result: Judged) -> list[str]:
    """Returns the goals that were not met."""
    goals = {
        f"{result.ooms:.2f} out-of-memories": result.ooms <= MOST_OOMS,
        f"{100 * result.gap:.1f} points below the oracle": result.gap <= MOST_GAP,
        f"{median(result.runs):.0f} runs": median(result.runs) <= MOST_RUNS,
    }
    return [goal for goal, met in goals.items() if not met]
