"""Compares gradients and weights of training in micro-batches with training in whole batches, on sentences of different
lengths: by can-train, by plain loops, and by Lightning, accelerate and transformers. Those tools are installed into an
environment of their own on first use.
"""

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
from bench.harness import Benchmark, markdown, run_peers, say
from can_train import MicroBatcher

BENCHMARK: Final = Benchmark(__name__, quick="10 steps instead of 50")
OWN: Final = "can-train"
"""Prefix of can-train's rows."""
RESCUED: Final = 3
"""In every third batch memory runs out, in the row that says so, where a micro-batch has more than HELD sentences."""
HELD: Final = 5

EXACT: Final = 1e-12
"""Goal: largest relative error of can-train's gradients and weights, in float64."""

COLUMNS: Final = ("loop", "gradient, mean", "gradient, worst", "weights", "of their change", "CPU ms a step")


def main() -> None:
    """Measures, prints the table and writes it into RESULTS.md; exit status 1 if can-train is not exact."""
    options = BENCHMARK.parser().parse_args()
    epochs = 1 if options.quick else EPOCHS
    torch.set_num_threads(1)
    say("plain loops, can-train")
    measured = measure_own(draw_sentences(), epochs)
    peers = run_peers("equivalence_peers", str(epochs))
    measured |= {name: Errors(*fields) for name, fields in peers["errors"].items()}
    table = markdown([COLUMNS, *([name, *cells(errors)] for name, errors in measured.items())])
    BENCHMARK.finish(options, missed_goals(measured), versions=peers["versions"], table=table)


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


def cells(errors: Errors) -> list[str]:
    """Returns the cells of a loop's row, without its name."""
    return [*map(share_text, errors[:-1]), f"{errors.step_ms:.0f}"]


def share_text(share: float) -> str:
    """Writes a relative error."""
    if share > EXACT:
        return f"{share:.1%}"
    return f"{share:.0e}" if share else "0"


def missed_goals(measured: Mapping[str, Errors]) -> list[str]:
    """Names can-train's loops that are not exact."""
    own = {name: max(errors[:-1]) for name, errors in measured.items() if name.startswith(OWN)}
    return [f"{name}: {worst:.1e} > {EXACT:.0e}" for name, worst in own.items() if not worst <= EXACT]
