"""The sentences and the model of `scripts/bench/equivalence`, the loop that computes each batch whole, and how far
another loop's gradients and weights are from its. Also imported in the environment of the other tools.

Shapes: B sentences of a batch, T tokens of the longest, V words, H hidden.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import Any, Final, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    """What a model computes at once."""

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
        mean_gradient: Over the batches of an epoch, at the weights from which training starts.
        worst_gradient: The largest of them.
        weights: After the training.
        change: The same difference over what the reference's training changed of the weights.
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
    """Predicts each sentence's next words; padding changes nothing of what comes before it."""

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
    """Returns what a training left."""
    return Trained(optimizer.gradients, nn.utils.parameters_to_vector(model.parameters()).detach().clone())


def batches(sentences: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Returns the sentences of each optimizer step of an epoch."""
    size = PARTS * MICRO_BATCH
    return [sentences[start : start + size] for start in range(0, len(sentences), size)]


def by_hand(sentences: Sequence[Tensor], settings: Settings, accumulate: Callable[..., object]) -> Trained:
    """Trains in a plain loop, in which `accumulate(model, batch)` adds a batch's gradient to `.grad`."""
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


def relative(found: Tensor, wanted: Tensor) -> float:
    """Returns the L2 norm of a difference over that of what was wanted."""
    return float((found - wanted).norm() / wanted.norm())
