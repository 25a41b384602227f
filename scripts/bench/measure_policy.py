"""Compares can-train's factor policies with a proportional one and with an oracle: 40 simulated runs under each of the
same random memory laws.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import inf
from statistics import fmean, median
from typing import Final, NamedTuple

import numpy as np

from bench.policy_laws import (
    FOREIGN_RUNS,
    TARGET,
    UNCHANGED_RUNS,
    Array,
    Law,
    NextFactor,
    Oracle,
    draw_laws,
    simulate_all,
    varied,
    with_hidden,
)
from bench.results_file import environment, markdown, write_section
from can_train.factors.policies import AffinePolicy, FactorPoint, MomentumPolicy

LAWS: Final = 400
QUICK_LAWS: Final = 20
RUNS: Final = 40
FIRST_RUNS: Final = 10
"""Runs that a mean peak leaves out: a policy still learns in them."""

BEND: Final = 0.15
NOISE: Final = 0.02
NOISES: Final = (NOISE, 0.05, 0.08)
OVERSTATED: Final = (0.0, 0.04)
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

RISK: Final = 0.005
"""The risk of the oracle that says where the target can be reached."""

NEAR: Final = 0.02
STAYS: Final = 0.05
STAYS_RUNS: Final = 10
"""A target is reached by a peak within NEAR of it, if those of the next runs, so many, are within STAYS."""

MOST_OOMS: Final = 0.2
MOST_GAP: Final = 0.01
MOST_RUNS: Final = 3
"""Goals of the affine policy, over all kinds of laws: out-of-memory errors in 40 runs, share of the capacity by which
its mean peak is below that of the oracle of the same risk, and median runs to the target where it can be reached."""

NOTES: Final = f"""\
{LAWS} laws of each kind, {RUNS} runs of each law. Weights take 5 to 40 % of the capacity, the tuned limit is 10 % too
small to 10 % too large, curvature is up to {BEND:.0%}, the first factor comes from an experience table. Noise is
relative, normal, and {NOISE:.0%} where nothing else is said. Allocated ÷ reserved at a peak is up to
{OVERSTATED[1]:.0%} below the ceiling, by the law.

- *Heavy tails*: noise of {TAIL_NOISE:.1%} times Student's with {TAILS} degrees of freedom.
- *Drift*: every peak shifts by up to {DRIFT:.0%} of the capacity over the runs, up or down.
- *Regime change*: after {UNCHANGED_RUNS} runs every peak shifts by up to {CHANGE:.0%} of the capacity, up or down, as
  another version of a library may shift it.
- *Two populations*: a fifth to four fifths of the runs peak {OTHER[0]:.0%} to {OTHER[1]:.0%} of the capacity above the
  others, with the same key.
- *Foreign memory*: in {FOREIGN_RUNS:.0%} of the runs another process holds up to {FOREIGN:.0%} of the capacity, unseen.
- *Quantised splits*: a logical batch of {BATCH[0]:g} to {BATCH[1]:g} tuned limits is cut into equal micro-batches.
- *Fragmented*: memory runs out at {CEILINGS[0]:.0%} to {CEILINGS[1]:.0%} of the capacity, by the law, and
  ± {CEILING_SD:.0%} from run to run.
- *Hidden constant*: {HIDDEN:.0%} of the capacity that the cost model does not include. The first run is the one for
  which that model predicts {TARGET:.0%}, so it runs out of memory, is rescued and goes on with half as much. That run
  is not the policy's: the kind is in no mean.

The *oracle* knows line, changes and distributions, but not what a run will draw: it takes the used share whose
noise-free peak is the target, or the largest whose risk of an out-of-memory error is small enough. *Reached*: share of
the laws in which the policy's noise-free peak gets within {NEAR:.0%} of the oracle's ({RISK:.1%} risk) and stays within
{STAYS:.0%} for {STAYS_RUNS} runs, of the laws in which that risk does not hold the oracle back by more than {NEAR:.0%}.
*Runs*: the median number until then, counted from the first run, of all those laws. *OOMs*: mean in {RUNS} runs.
*Peak*: noise-free mean after the first {FIRST_RUNS} runs. *Gap*: the peak of the oracle that is tuned to as many
out-of-memory errors as the policy has on the same laws, less the policy's, in points of the capacity; where no risk
gives the oracle as many, because it stays at the target, the target's. The last column has the oracle of {RISK:.1%}
risk: OOMs, peak. The means count every kind the same; their runs are those of all laws."""


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

    runs: tuple[float, ...]  # to the target, of the laws where it can be reached; infinite where it was not
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
    parser = argparse.ArgumentParser(prog="scripts/bench/policy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LAWS} laws, too few to judge; writes nothing")
    parser.add_argument("--laws", type=int, help="another number of laws; writes nothing")
    parser.add_argument("--seed", type=int, help="other laws; writes nothing")
    options = parser.parse_args()
    laws_of_a_kind = QUICK_LAWS if options.quick else options.laws or LAWS
    rows = [["laws", "policy", "reached", "runs", "OOMs", "peak", "gap", f"oracle, {RISK:.1%}"]]
    judged: dict[str, list[Judged]] = {name: [] for name in POLICIES}
    for kind, laws in kinds(laws_of_a_kind, seed=options.seed or 0).items():
        oracle = Oracle(laws, RUNS)
        peaks = oracle.peaks(RISK)
        for name, policy in POLICIES.items():
            found = judge(policy, oracle)
            rows.append([kind, name, *found.cells(), f"{oracle.ooms(peaks):.2f}, {late(peaks):.1%}"])
            print(" | ".join(rows[-1]), flush=True)
            if kind != SET_BY_HAND:
                judged[name].append(found)
    means = {name: mean(found) for name, found in judged.items()}
    rows += [["**mean**", name, *found.cells(), ""] for name, found in means.items()]
    print(*(" | ".join(row) for row in rows[-len(POLICIES) :]), sep="\n")
    if options.quick:
        return
    if options.laws is None and options.seed is None:
        text = "\n\n".join([environment({"numpy": version("numpy")}), markdown(rows), NOTES])
        write_section("policy", "Factor policies (`scripts/bench/policy`)", text)
    if missed := misses(means["affine"]):
        sys.exit(f"missed: {'; '.join(missed)}")


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


def judge(policy: NextFactor, oracle: Oracle) -> Judged:
    """Runs a policy under the oracle's laws and compares it with the oracle."""
    simulated = simulate_all(policy, oracle.laws, runs=RUNS)
    peaks, best = np.array([one.peaks for one in simulated]), oracle.peaks(RISK)
    reachable = np.abs(best - oracle.peaks(1.0))[:, 0] <= NEAR
    # What its peaks are expected to cost, not what these runs happened to: the oracle's figures are of the same sort.
    equal = oracle.peaks(oracle.risk_of(oracle.ooms(peaks)))
    runs = tuple(runs_to(own, of_best) for own, of_best in zip(peaks[reachable], best[reachable], strict=True))
    return Judged(runs, fmean(one.ooms for one in simulated), late(peaks), late(equal) - late(peaks))


def runs_to(peaks: Array, best: Array) -> float:
    """Returns the first run, counted from 1, that is near the oracle's first peak, if the next ones stay there."""
    away = np.abs(peaks - best[0])
    reached = (run for run in range(len(away)) if away[run] <= NEAR and (away[run : run + STAYS_RUNS] <= STAYS).all())
    return next((run + 1.0 for run in reached), inf)


def late(peaks: Array) -> float:
    """Returns the mean peak after the first runs."""
    return float(peaks[:, FIRST_RUNS:].mean())


def mean(judged: Sequence[Judged]) -> Judged:
    """Returns the means over the kinds, each counting the same; the runs are those of all laws."""
    return Judged(
        tuple(run for one in judged for run in one.runs),
        fmean(one.ooms for one in judged),
        fmean(one.peak for one in judged),
        fmean(one.gap for one in judged),
    )


def misses(found: Judged) -> list[str]:
    """Returns the goals that were not met."""
    goals = {
        f"{found.ooms:.2f} out-of-memories": found.ooms <= MOST_OOMS,
        f"{100 * found.gap:.1f} points below the oracle": found.gap <= MOST_GAP,
        f"{median(found.runs):.0f} runs": median(found.runs) <= MOST_RUNS,
    }
    return [goal for goal, met in goals.items() if not met]


if __name__ == "__main__":
    main()
