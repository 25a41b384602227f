"""Compares gradients and weights of training in micro-batches with those of training with whole batches, on sentences
of different lengths: can-train's, those of plain loops, and those of Lightning, accelerate and transformers. Those
tools are installed into an environment of their own on first use.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Final

import torch
from torch import Tensor

from bench.equivalence_loops import (
    EPOCHS,
    MICRO_BATCH,
    NOT_COUNTED,
    Errors,
    Loop,
    NextWord,
    Settings,
    Trained,
    by_hand,
    collate,
    divided,
    draw_sentences,
    errors,
    whole,
)
from bench.peers import run_peers, say
from bench.results_file import environment, markdown, write_section
from can_train import MicroBatcher

OWN: Final = "can-train"
"""What the names of can-train's rows begin with."""
RESCUED: Final = 3
"""In every third batch memory runs out, in the row that says so, where a micro-batch has more than HELD sentences."""
HELD: Final = 5

EXACT: Final = 1e-12
"""Goal: largest relative error of can-train's gradients and weights, in float64."""

COLUMNS: Final = ("loop", "gradient, mean", "gradient, worst", "weights", "of their change", "CPU ms a step")

NOTES: Final = """\
308 sentences of 3 to 60 words, most of them short, the long ones with other words than the short; the loss is the mean
over all tokens of a batch. Batches have 32 sentences, an epoch's last one 20, and are computed 8 sentences at a time
(the last loader batch has 4). A small GRU, SGD, float64, no shuffling. The errors are relative L2 differences from
training with whole batches: of gradients over the batches of an epoch, at the same weights; of the weights after 50
steps, over the weights and over what training changed of them.

The tools ran themselves, as in their documentation, with their defaults but for clipping, decay of the rate and
shuffling. A mean of means weighs the tokens of short micro-batches too much; Lightning and `accumulate()` divide an
epoch's last, smaller batch by 4 like the others. Two peers are as exact as can-train: the loop that accelerate's guide
has for such data, and transformers' Trainer with models that take `num_items_in_batch`, as its own do.

What can-train asks for: the loss is written as a sum with its denominator, and the whole batch's denominator is known
before. What it costs: a step in micro-batches takes longer than a whole batch in each of these loops, and one in which
memory runs out longer still, and so do the next ones, whose micro-batches are smaller for a while. Times are of one
thread on a machine with other work."""


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if can-train is not exact."""
    parser = argparse.ArgumentParser(prog="scripts/bench/equivalence", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 steps instead of 50; leaves RESULTS.md as it is")
    options = parser.parse_args()
    epochs = 1 if options.quick else EPOCHS
    torch.set_num_threads(1)
    say("plain loops, can-train")
    measured = measure_own(draw_sentences(), epochs)
    peers = run_peers("equivalence_peers", str(epochs))
    measured |= {name: Errors(*fields) for name, fields in peers["errors"].items()}
    text = "\n\n".join([environment(peers["versions"]), table(measured), NOTES])
    print(text)
    if not options.quick:
        write_section("equivalence", "Micro-batches against whole batches (`scripts/bench/equivalence`)", text)
    if missed := missed_goals(measured):
        sys.exit("scripts/bench/equivalence: can-train misses:\n  " + "\n  ".join(missed))


def measure_own(sentences: Sequence[Tensor], epochs: int) -> dict[str, Errors]:
    """Measures the plain loops and can-train's."""
    plain = partial(by_hand, sentences)
    reference = partial(plain, accumulate=whole)
    loops: dict[str, Loop] = {
        "whole batches": reference,
        f"{OWN}, `MicroBatcher`": partial(own_loop, sentences),
        f"{OWN}, memory runs out in every third step": partial(own_loop, sentences, fails_every=RESCUED),
        "plain loop, means divided by 4": partial(plain, accumulate=partial(divided, always=True)),
        "plain loop, means divided by their number": partial(plain, accumulate=partial(divided, always=False)),
    }
    return {name: errors(loop, reference, epochs) for name, loop in loops.items()}


def own_loop(sentences: Sequence[Tensor], settings: Settings, *, fails_every: int = 0) -> Trained:
    """Trains with can-train's MicroBatcher; memory runs out in every so many batches, 0: in none."""
    made: list[MicroBatcher] = []
    numbers = count(1)

    def accumulate(model: NextWord, batch: Sequence[Tensor]) -> None:
        if not made:
            made.append(MicroBatcher(model, limits=MICRO_BATCH))
        held = HELD if fails_every and next(numbers) % fails_every == 0 else len(batch)
        tokens = sum(len(sentence) - 1 for sentence in batch)
        made[0].run(losses_of(model, batch, held), len(batch), denominators={"loss": tokens})
        made[0].stepped()

    return by_hand(sentences, settings, accumulate)


def losses_of(
    model: NextWord, batch: Sequence[Tensor], held: int
) -> Callable[[int, int], dict[str, tuple[Tensor, float]]]:
    """Returns the function that computes a part; memory runs out for one of more than `held` sentences."""

    def losses(start: int, stop: int) -> dict[str, tuple[Tensor, float]]:
        part = collate(batch[start:stop])
        total = model.token_loss(**part, reduction="sum")
        if stop - start > held:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return {"loss": (total, float(part["labels"].ne(NOT_COUNTED).sum()))}

    return losses


def table(measured: Mapping[str, Errors]) -> str:
    """Returns the table of all loops."""
    return markdown([COLUMNS, *([name, *cells(found)] for name, found in measured.items())])


def cells(found: Errors) -> list[str]:
    """Returns the cells of a loop's row, without its name."""
    shares = (found.mean_gradient, found.worst_gradient, found.weights, found.change)
    return [*map(share_text, shares), f"{found.step_ms:.0f}"]


def share_text(share: float) -> str:
    """Writes a relative error."""
    if share > EXACT:
        return f"{share:.1%}"
    return f"{share:.0e}" if share else "0"


def missed_goals(measured: Mapping[str, Errors]) -> list[str]:
    """Returns what of can-train is not exact."""
    own = {name: max(found[:-1]) for name, found in measured.items() if name.startswith(OWN)}
    return [f"{name}: {worst:.1e} > {EXACT:.0e}" for name, worst in own.items() if not worst <= EXACT]


if __name__ == "__main__":
    main()
