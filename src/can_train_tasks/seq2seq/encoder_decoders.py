"""The two models, an attentive LSTM and a transformer, and the beam search that writes targets with them.

A model reads a source, and features where an encoder of their own reads them. For each position of the target it
computes the logits of the next symbol from the symbols before that position.

Shapes: N pairs, S symbols of the longest source, F features of the pair that has most, T symbols of the longest
target; B hypotheses for each target, L symbols written so far; V symbols of the vocabulary; E width of the embeddings,
H hidden units. M positions that the decoder attends to: S + F where features have an encoder of their own, else S.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from can_train_tasks.seq2seq.pair_tables import END, PAD, START, UNKNOWN
from can_train_tasks.seq2seq.settings import LstmSettings, TransformerSettings

_LONGEST_WAVE: Final = 10_000.0  # wavelength of the slowest position sine, in units of 2π, as in Vaswani et al. 2017


class Encoded(NamedTuple):
    """The encoders' output for a batch of sources and features."""

    memory: Tensor  # [N, M, …] encoded symbols and features, which the decoder attends to
    mean: Tensor  # [N, …] mean of the encoder's output; means of two encoders are added
    padded: Tensor  # [N, M] whether the position is padding behind the end of a source or of features


class Seq2seqModel(nn.Module, ABC):
    """Reads sources and writes targets. A subclass has at least `encode` and `decode`."""

    @abstractmethod
    def encode(self, source: Tensor) -> Encoded:
        """Reads sources [N, S], padded with `PAD`. A model with an encoder of features takes features [N, F], too."""

    @abstractmethod
    def decode(self, encoded: Encoded, target: Tensor) -> Tensor:
        """Returns [N, T, V]: after each symbol of targets [N, T], the logits of the next one."""

    def begin(self, encoded: Encoded, width: int) -> Any:
        """Returns the decoder's state before the first symbol, with `width` hypotheses for each source.

        By default the state is the written symbols [N, B, 0], and `step` decodes them anew. A decoder that remembers
        more writes its own `begin`, `step` and `chosen`.
        """
        return encoded.padded.new_zeros((len(encoded.memory), width, 0), dtype=torch.int64)

    def step(self, encoded: Encoded, state: Any, last: Tensor) -> tuple[Tensor, Any]:
        """Returns the logits [N, B, V] of the symbols that follow `last` [N, B], and the next state."""
        written = torch.cat([state, last[..., None]], dim=-1)
        width = written.shape[1]
        copies = Encoded(*(part.repeat_interleave(width, dim=0) for part in encoded)) if width > 1 else encoded
        logits = self.decode(copies, written.flatten(0, 1))[:, -1]
        return logits.unflatten(0, written.shape[:2]), written

    def chosen(self, state: Any, beams: Tensor) -> Any:
        """Reorders hypotheses: hypothesis b of source n gets the state of hypothesis `beams`[n, b], for [N, B]."""
        return state.gather(1, beams[..., None].expand_as(state))

    def forward(self, source: Tensor, target: Tensor, features: Tensor | None = None) -> Tensor:
        """Returns [N, T, V]: after each symbol of targets [N, T], the logits of the next one."""
        return self.decode(self.read(source, features), target)

    def read(self, source: Tensor, features: Tensor | None) -> Encoded:
        """Reads sources [N, S], and features [N, F] where the model has an encoder for them."""
        # A model without such an encoder need not know of features.
        return self.encode(source) if features is None else self.encode(source, features)  # type: ignore[call-arg]


def reversed_sources(values: Tensor, lengths: Tensor) -> Tensor:
    """Reverses each padded sequence [N, S, …] within its length [N]; the padding keeps its place."""
    steps = torch.arange(values.shape[1], device=values.device)
    turned = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    return values.gather(1, turned[..., None].expand_as(values))


def mean_of(values: Tensor, padded: Tensor) -> Tensor:
    """Returns the means [N, …] of sequences [N, S, …] over the symbols that are not `padded` [N, S]."""
    shares = (~padded).to(values.dtype) / (~padded).sum(dim=1, keepdim=True)
    return torch.bmm(shares[:, None], values).squeeze(1)


class BidirectionalLstm(nn.Module):
    """One LSTM layer that reads padded sequences in both directions.

    The backward direction starts at each sequence's last symbol, so that padding never reaches a state. PyTorch's
    packed sequences do this too, but with other kernels, whose memory differs from a padded batch's memory.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.ahead = nn.LSTM(width, hidden, batch_first=True)
        self.back = nn.LSTM(width, hidden, batch_first=True)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        """Reads sequences [N, S, width] with lengths [N]; returns [N, S, 2H]."""
        back, _ = self.back(reversed_sources(values, lengths))
        return torch.cat([self.ahead(values)[0], reversed_sources(back, lengths)], dim=-1)


class AttentiveLstm(Seq2seqModel):
    """An LSTM encoder and decoder with attention.

    Each decoder step attends to the source with its hidden state, and reads the attended context together with the last
    symbol. One vector of H numbers for each source symbol serves as both key and value of the attention. With separate
    values of 2H numbers, every step of a backward pass would add up the gradients of all symbols while the decoder's
    activations are in memory; that sum would set the peak of memory where sources are longer than targets.

    Source: Bahdanau et al. 2015, with the product of Luong et al. 2015 as the score.
    """

    def __init__(self, settings: LstmSettings, symbols: int) -> None:
        super().__init__()
        hidden, memory = settings.hidden, 2 * settings.hidden
        self.embedding = nn.Embedding(symbols, settings.embedding, padding_idx=PAD)
        self.of_targets = None if settings.share_embeddings else _like(self.embedding)
        self.dropout = nn.Dropout(settings.dropout)
        widths = [settings.embedding, *[memory] * (settings.layers - 1)]
        self.encoder = nn.ModuleList(BidirectionalLstm(width, hidden) for width in widths)
        self.narrow = nn.Linear(memory, hidden)
        self.first = nn.Linear(memory, 2 * hidden)
        self.cell = nn.LSTMCell(settings.embedding + hidden, hidden)
        self.join = nn.Linear(2 * hidden, hidden)
        self.output = nn.Linear(hidden, symbols)
        self.of_features = BidirectionalLstm(settings.embedding, hidden) if settings.features_encoder else None

    def encode(self, source: Tensor, features: Tensor | None = None) -> Encoded:
        """Reads sources [N, S], and features [N, F]."""
        memory, padded = self._read(self.encoder, source)
        mean, memory = mean_of(memory, padded), self.narrow(memory)
        if features is not None and self.of_features is not None:
            read, absent = self._read([self.of_features], features)
            mean = mean + mean_of(read, absent)
            memory, padded = _joined((memory, padded), (self.narrow(read), absent))
        return Encoded(memory, mean, padded)

    def _read(self, layers: Iterable[nn.Module], symbols: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the encoded symbols [N, S, 2H], and where they are padding."""
        padded = symbols == PAD
        lengths = (~padded).sum(dim=1)
        memory = self.dropout(self.embedding(symbols))
        for layer in layers:
            memory = self.dropout(layer(memory, lengths))
        return memory, padded

    def decode(self, encoded: Encoded, target: Tensor) -> Tensor:
        """Returns [N, T, V] logits."""
        state, found = self.begin(encoded, 1), []
        embedded = self.dropout(self._of_targets(target))
        for position in range(target.shape[1]):
            joined, state = self._advance(encoded, state, embedded[:, position : position + 1])
            found.append(joined)
        return self._logits(torch.cat(found, dim=1))

    def begin(self, encoded: Encoded, width: int) -> tuple[Tensor, Tensor]:
        """Returns the hidden state and the cell state, each [N, B, H], computed from the mean of the source."""
        hidden, cell = self.first(encoded.mean)[:, None].expand(-1, width, -1).chunk(2, dim=-1)
        return torch.tanh(hidden), cell.contiguous()

    def step(self, encoded: Encoded, state: Any, last: Tensor) -> tuple[Tensor, Any]:
        """Returns [N, B, V] logits, and the next state."""
        joined, state = self._advance(encoded, state, self.dropout(self._of_targets(last)))
        return self._logits(joined), state

    def chosen(self, state: Any, beams: Tensor) -> Any:
        """Reorders the hypotheses of the hidden state and the cell state, [N, B, H] each."""
        hidden, cell = (part.gather(1, beams[..., None].expand(-1, -1, part.shape[-1])) for part in state)
        return hidden, cell

    @property
    def _of_targets(self) -> nn.Embedding:
        return self.embedding if self.of_targets is None else self.of_targets

    def _advance(
        self, encoded: Encoded, state: tuple[Tensor, Tensor], embedded: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Reads embedded symbols [N, B, E]; returns hidden state and context joined, [N, B, 2H], and the next state."""
        hidden, cell = state
        scores = torch.bmm(hidden, encoded.memory.transpose(1, 2)) * hidden.shape[-1] ** -0.5
        weights = scores.masked_fill(encoded.padded[:, None], -torch.inf).softmax(dim=-1)
        context = torch.bmm(weights, encoded.memory)
        size = hidden.shape[:2]
        flat = (hidden.flatten(0, 1), cell.flatten(0, 1))
        hidden, cell = self.cell(torch.cat([embedded, context], dim=-1).flatten(0, 1), flat)
        hidden, cell = hidden.unflatten(0, size), cell.unflatten(0, size)
        return torch.cat([hidden, context], dim=-1), (hidden, cell)

    def _logits(self, joined: Tensor) -> Tensor:
        logits: Tensor = self.output(self.dropout(torch.tanh(self.join(joined))))
        return logits


class Transformer(Seq2seqModel):
    """An encoder-decoder transformer.

    It normalises before each sublayer and therefore trains without a warm-up.

    Source: Vaswani et al. 2017; Xiong et al. 2020 for the normalisation.
    """

    def __init__(self, settings: TransformerSettings, symbols: int) -> None:
        super().__init__()
        width = settings.embedding
        self.embedding = nn.Embedding(symbols, width, padding_idx=PAD)
        self.of_targets = None if settings.share_embeddings else _like(self.embedding)
        self.dropout = nn.Dropout(settings.dropout)
        common: dict[str, Any] = {"dim_feedforward": settings.hidden, "dropout": settings.dropout, "batch_first": True,
                  "norm_first": True}  # fmt: skip

        def encoder() -> nn.TransformerEncoder:
            layer = nn.TransformerEncoderLayer(width, settings.heads, **common)
            # Nested tensors save no memory that grows with the batch, and the memory model cannot count their memory.
            return nn.TransformerEncoder(layer, settings.layers, nn.LayerNorm(width), enable_nested_tensor=False)

        self.encoder = encoder()
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(width, settings.heads, **common), settings.layers, nn.LayerNorm(width)
        )
        self.output = nn.Linear(width, symbols)
        self.of_features = encoder() if settings.features_encoder else None
        for table in (self.embedding, self.of_targets):
            if table is not None:
                nn.init.normal_(table.weight, std=width**-0.5)
        for name, weight in self.named_parameters():
            if weight.ndim > 1 and name.startswith(("encoder.", "decoder.", "of_features.")):
                nn.init.xavier_uniform_(weight)

    def encode(self, source: Tensor, features: Tensor | None = None) -> Encoded:
        """Reads sources [N, S], and features [N, F], whose order has no meaning."""
        padded = source == PAD
        memory = self.encoder(self._embedded(self.embedding, source), src_key_padding_mask=padded)
        mean = mean_of(memory, padded)
        if features is not None and self.of_features is not None:
            absent = features == PAD
            read = self.of_features(self._scaled(self.embedding, features), src_key_padding_mask=absent)
            mean = mean + mean_of(read, absent)
            memory, padded = _joined((memory, padded), (read, absent))
        return Encoded(memory, mean, padded)

    def decode(self, encoded: Encoded, target: Tensor) -> Tensor:
        """Returns [N, T, V] logits."""
        length = target.shape[1]
        # Padding follows all symbols of a target, so the mask for later symbols hides padding too.
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        embedded = self._embedded(self._of_targets, target)
        found = self.decoder(embedded, encoded.memory, tgt_mask=later, tgt_is_causal=True,
                             memory_key_padding_mask=encoded.padded)  # fmt: skip
        logits: Tensor = self.output(found)
        return logits

    @property
    def _of_targets(self) -> nn.Embedding:
        return self.embedding if self.of_targets is None else self.of_targets

    def _embedded(self, table: nn.Embedding, symbols: Tensor) -> Tensor:
        return self._scaled(table, symbols, positions(symbols.shape[1], table.embedding_dim, self))

    def _scaled(self, table: nn.Embedding, symbols: Tensor, added: Tensor | float = 0.0) -> Tensor:
        embedded: Tensor = self.dropout(table(symbols) * table.embedding_dim**0.5 + added)
        return embedded


def _like(table: nn.Embedding) -> nn.Embedding:
    """Makes a second table of embeddings of the same size."""
    return nn.Embedding(table.num_embeddings, table.embedding_dim, padding_idx=table.padding_idx)


def _joined(source: tuple[Tensor, Tensor], features: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Joins encoded sources [N, S, …] and features [N, F, …], each with its padding, to what a decoder attends to."""
    memory, padded = (torch.cat(parts, dim=1) for parts in zip(source, features, strict=True))
    return memory, padded


def positions(length: int, width: int, like: nn.Module) -> Tensor:
    """Returns [length, width] sines and cosines of positions, in the dtype and on the device of `like`'s weights."""
    weight = next(like.parameters())
    rates = _LONGEST_WAVE ** -torch.arange(0, 1, 2 / width, device=weight.device, dtype=weight.dtype)
    angles = torch.arange(length, device=weight.device, dtype=weight.dtype)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class Written(NamedTuple):
    """The hypotheses of each source, the best first."""

    symbols: Tensor  # [N, B, L] each up to `END`, then padding
    log_likelihood: Tensor  # [N, B] natural logarithm of the probability of a target and its end


def write(  # noqa: PLR0913 - a sentence's inputs, and the limits of the search
    model: Seq2seqModel,
    source: Tensor,
    features: Tensor | None = None,
    *,
    width: int,
    longest: int,
    symbols: int | None = None,
) -> Written:
    """Writes targets for each source by beam search.

    Hypotheses are compared by the logarithm of their probability. At the end it is divided by their length: otherwise
    the shortest hypothesis would win. With one hypothesis the search is greedy.

    Args:
        model: In evaluation mode.
        source: [N, S] padded sources.
        features: [N, F] padded features, if an encoder of their own reads them.
        width: Hypotheses that are kept for each target.
        longest: Symbols after which a target ends at the latest.
        symbols: Symbols that can be written are below this number; None: all.
    """
    encoded = model.read(source, features)
    count, device = len(source), source.device
    state = model.begin(encoded, width)
    written = torch.full((count, width, 1), START, device=device)
    # At first all hypotheses of a source are equal: only hypothesis 0 counts, or the beam would hold copies.
    scores = torch.full((count, width), -torch.inf, device=device)
    scores[:, 0] = 0.0
    for _ in range(longest):
        ended = (written == END).any(dim=-1)
        if bool(ended.all()):
            break
        logits, state = model.step(encoded, state, written[..., -1])
        scores, beams, added = _continued(scores, _gains(logits, scores.dtype, ended, symbols))
        state = model.chosen(state, beams)
        before = written.gather(1, beams[..., None].expand_as(written))
        written = torch.cat([before, added[..., None]], dim=-1)
    lengths = ((written != PAD).sum(dim=-1) - 1).clamp(min=1)
    places = (scores / lengths).topk(width, dim=1).indices
    return Written(written.gather(1, places[..., None].expand(-1, -1, written.shape[-1]))[..., 1:],
                   scores.gather(1, places))  # fmt: skip


def _gains(logits: Tensor, dtype: torch.dtype, ended: Tensor, symbols: int | None) -> Tensor:
    """Returns [N, B, V]: the logarithm of the probability of each next symbol of hypotheses, of which some have ended
    [N, B]; -inf for a symbol that is not written.
    """
    gains = logits.to(dtype).log_softmax(dim=-1)
    gains[..., [PAD, START]] = -torch.inf
    if symbols is not None:
        # A hypothesis with a symbol that has no text would have the text of another hypothesis.
        gains[..., UNKNOWN] = gains[..., symbols:] = -torch.inf
    # A hypothesis that has ended is continued by padding alone, which leaves its score as it is.
    only_padding = torch.full_like(gains[0, 0], -torch.inf)
    only_padding[PAD] = 0.0
    return torch.where(ended[..., None], only_padding, gains)


def _continued(scores: Tensor, gains: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses the B best continuations of a source's hypotheses, by their scores [N, B] and the gains [N, B, V].

    Returns:
        [N, B] each: the score of a continuation, the hypothesis that it continues, and the symbol that it adds.
    """
    width, size = gains.shape[1:]
    best, places = (scores[..., None] + gains).flatten(1).topk(width, dim=1)
    return best, places // size, places % size
