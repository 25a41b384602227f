"""Compares gradients and weights of training in micro-batches with training in whole batches, on sentences of different
lengths: by can-train, by plain loops, and by Lightning, accelerate and transformers. Those tools are installed into an
environment of their own on first use, where this module is imported, too. Then it trains scripts of several kinds with
each of can-train's doors.

Shapes: B sentences of a batch, T tokens of the longest, V words, H hidden.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from statistics import mean
from typing import Any, Final, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.harness import Benchmark, call_apart, markdown, run_peers, say
from can_train import MicroBatcher

SENTENCES: Final = 308
"""Nine batches of 32 and one of 20 in an epoch."""
MICRO_BATCH: Final = 8
"""Sentences that are computed at once. An epoch's last loader batch has 4."""
PARTS: Final = 4
"""Micro-batches of a batch: it has 32 sentences."""
EPOCHS: Final = 5
"""50 steps of the optimizer."""

WORDS: Final = 50
HIDDEN: Final = 16
MEDIAN_LENGTH: Final = 8
LONGEST: Final = 60
NOT_COUNTED: Final = -100
"""Label of padding, PyTorch's default of `ignore_index`."""
LEARNING_RATE: Final = 0.5


class Batch(TypedDict):
    """The sentences that a model computes at once."""

    tokens: Tensor  # [B, T]
    labels: Tensor  # [B, T]


class Settings(NamedTuple):
    """How a loop trains."""

    epochs: int
    lr: float


class Trained(NamedTuple):
    """A training's gradients, one for each optimizer step, and its weights, each as one vector."""

    gradients: list[Tensor]
    weights: Tensor


class Errors(NamedTuple):
    """How far a loop is from the one that computes each batch whole: relative L2 differences.

    Attributes:
        mean_gradient: Over the batches of an epoch, at the initial weights.
        worst_gradient: The largest of them.
        weights: After the training.
        change: The difference of the weights over their change by the reference's training.
        step_ms: Processor time of a step.
    """

    mean_gradient: float
    worst_gradient: float
    weights: float
    change: float
    step_ms: float


Loop = Callable[[Settings], Trained]


def draw_sentences(sentences: int = SENTENCES) -> list[Tensor]:
    """Draws sentences of different lengths, most of them short. Long ones use other words than short ones."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN_LENGTH), 0.9, sentences), 3, LONGEST).astype(int)
    return [torch.from_numpy((rng.integers(0, WORDS // 2, length + 1) + length) % WORDS) for length in lengths]


def collate(sentences: Sequence[Tensor]) -> Batch:
    """Pads sentences to the longest of them; each token's label is the one after it."""
    tokens = nn.utils.rnn.pad_sequence([sentence[:-1] for sentence in sentences], batch_first=True)
    labels = [sentence[1:] for sentence in sentences]
    return {"tokens": tokens, "labels": nn.utils.rnn.pad_sequence(labels, True, NOT_COUNTED)}


class NextWord(nn.Module):
    """Predicts each sentence's next words; padding does not change earlier predictions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.recurrent = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.words = nn.Linear(HIDDEN, WORDS)
        self.double()

    def token_loss(self, tokens: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """Returns the cross-entropy over the tokens that count: [B, T] twice → a number."""
        states, _ = self.recurrent(self.embedding(tokens))
        logits = self.words(states)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction, ignore_index=NOT_COUNTED)


class RecordingSGD(torch.optim.SGD):
    """SGD that keeps the gradient of each step, whoever calls it."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.gradients: list[Tensor] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the closure, where a tool passes its passes as one, before the gradient is read."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.gradients.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        super().step()
        return loss


def trained(model: nn.Module, optimizer: RecordingSGD) -> Trained:
    """Returns the gradients and weights of a training."""
    return Trained(optimizer.gradients, nn.utils.parameters_to_vector(model.parameters()).detach().clone())


def batches(sentences: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Returns the sentences of each optimizer step of an epoch."""
    size = PARTS * MICRO_BATCH
    return [sentences[start : start + size] for start in range(0, len(sentences), size)]


def by_hand(sentences: Sequence[Tensor], settings: Settings, accumulate: Callable[..., object]) -> Trained:
    """Trains in a plain loop; `accumulate(model, batch)` adds a batch's gradient to `.grad`."""
    model = NextWord()
    optimizer = RecordingSGD(model.parameters(), lr=settings.lr)
    for _ in range(settings.epochs):
        for batch in batches(sentences):
            optimizer.zero_grad()
            accumulate(model, batch)
            optimizer.step()
    return trained(model, optimizer)


def whole(model: NextWord, batch: Sequence[Tensor]) -> None:
    """Computes a batch at once."""
    model.token_loss(**collate(batch)).backward()


def divided(model: NextWord, batch: Sequence[Tensor], *, always: bool) -> None:
    """Divides each micro-batch's mean by 4, `always`, or by the number of micro-batches that the batch has."""
    parts = [batch[start : start + MICRO_BATCH] for start in range(0, len(batch), MICRO_BATCH)]
    for part in parts:
        (model.token_loss(**collate(part)) / (PARTS if always else len(parts))).backward()


def errors(loop: Loop, reference: Loop, epochs: int = EPOCHS) -> Errors:
    """Measures a loop against the reference."""
    standing = Settings(epochs=1, lr=0.0)
    pairs = zip(loop(standing).gradients, reference(standing).gradients, strict=True)
    gradients = [relative(*pair) for pair in pairs]
    training = Settings(epochs, LEARNING_RATE)
    begin = time.process_time()
    result = loop(training)
    seconds = time.process_time() - begin
    wanted = reference(training).weights
    difference = float((result.weights - wanted).norm())
    changed = float((wanted - reference(standing).weights).norm())
    step_ms = 1_000 * seconds / len(result.gradients)
    return Errors(mean(gradients), max(gradients), difference / float(wanted.norm()), difference / changed, step_ms)


def relative(result: Tensor, wanted: Tensor) -> float:
    """Returns the L2 norm of a difference over the norm of the wanted value."""
    return float((result - wanted).norm() / wanted.norm())


BENCHMARK: Final = Benchmark(__name__, quick="10 steps instead of 50")
OWN: Final = "can-train"
"""Prefix of can-train's rows."""
RESCUED: Final = 3
"""In every third batch memory runs out, in the row that says so, where a micro-batch has more than HELD sentences."""
HELD: Final = 5

EXACT: Final = 1e-12
"""Goal: largest relative error of can-train's gradients and weights, in float64."""

BITWISE: Final = "bitwise"
"""Cell of a training that is, bit by bit, the training without can-train."""
TOLD: Final = "told"
REFUSED: Final = "refused"
DOORS_EXACT: Final = 1e-10
"""Goal: largest relative difference of weights in a script whose batches are split, unless it is told or refused."""
DOORS: Final = ("script", "`MicroBatcher`", "split", "Lightning callback", "split", "Trainer mixin", "split")

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
    say("doors")
    scripts = call_apart("bench.equivalence_doors", "main")
    doors = markdown([DOORS, *([name, *chain(*pairs)] for name, pairs in scripts.items())])
    missed = [*missed_goals(measured), *missed_by_doors(scripts)]
    BENCHMARK.finish(options, missed, versions=peers["versions"], table=table, doors=doors)


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


def missed_by_doors(scripts: Mapping[str, Sequence[Sequence[str]]]) -> list[str]:
    """Names the cells of scripts where something changes although nothing is split, or where a split changes the
    weights and nobody is told.
    """
    missed = []
    for name, pairs in scripts.items():
        for door, (unsplit, split) in zip(DOORS[1::2], pairs, strict=True):
            is_told = TOLD in split or split.startswith(REFUSED)
            if unsplit != BITWISE or not (is_told or (not split.endswith("%") and float(split) <= DOORS_EXACT)):
                missed.append(f"{name}, {door}: {unsplit}, {split}")
    return missed
