"""Changing logits before a token is chosen, for the rows that ask for it.

In the order of transformers and vLLM: bias, bans (bad words, stops before the minimum of tokens), repetition penalty,
presence and frequency penalties, tokens that are not allowed; temperature, top-k, top-p and min-p follow in
`sampling.py`. No state but what a row asked for: its history is its token ids, which stand on the device anyway,
sampled ones included. So a row that was preempted, or is scheduled ahead, cannot count wrongly.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.plan import IntArray, LogitsParams, LongArray

FloatArray = NDArray[np.float32]

_ANY = -1
"""Stands in `PreparedLogitsParams.heads` before words that are shorter than the longest."""


class TokenBiases(NamedTuple):
    """`ids` [B] get `values` [B] added, minus infinity for what cannot be chosen."""

    ids: LongArray
    values: FloatArray


class PreparedLogitsParams(NamedTuple):
    """One row's `asked`, made ready. `prompt`: the length of its prompt.

    `early` is added while new tokens are fewer than the minimum, `later` from then on: biases and bad words of one
    token. Of the W longer bad words, `heads` [W, H] are all tokens but the last, at the right end, and `lasts` [W] the
    last ones. `allowed`: the only tokens there are, empty for all.
    """

    params: LogitsParams
    prompt: int
    early_biases: TokenBiases
    later_biases: TokenBiases
    bad_word_heads: LongArray
    bad_word_lasts: LongArray
    allowed: LongArray

    def biases_at(self, position: int) -> TokenBiases:
        """What is added for the token at `position`."""
        return self.early_biases if position - self.prompt < self.params.min_tokens else self.later_biases


class LogitsProcessors:
    """What the rows ask for that ask for something."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shapes: dict[int, PreparedLogitsParams] = {}

    def add_row(self, row: int, prompt: int, asked: LogitsParams) -> None:
        """A sequence with that many prompt tokens takes the row."""
        self._shapes[row] = _prepare(asked, prompt)

    def remove_row(self, row: int) -> None:
        """Its sequence is gone, if it had one that asked for something."""
        self._shapes.pop(row, None)

    def processed_places(self, rows: IntArray) -> LongArray:
        """Where in `rows` are those that ask for something."""
        if not self._shapes:
            return np.zeros(0, np.int64)
        return np.array([place for place, row in enumerate(rows.tolist()) if row in self._shapes], np.int64)

    def apply(self, logits: Tensor, rows: LongArray, positions: LongArray, tokens: Tensor) -> None:
        """Change float32 `logits` [S, vocabulary] of `rows` [S], all of which ask for something, in place.

        `positions` [S] are those of the tokens to be chosen; `tokens` [all rows, length] holds the ids before them.
        """
        shapes = [self._shapes[row] for row in rows.tolist()]
        history = _TokenHistory(tokens, rows, positions, self._device)
        _add_biases(logits, shapes, positions)
        _forbid_last_tokens(logits, shapes, history)
        _penalise_repetition(logits, shapes, history)
        _penalise_output(logits, shapes, history)
        _forbid_others(logits, shapes, history)


class _TokenHistory:
    """The tokens of S rows before their `positions` [S]."""

    def __init__(self, tokens: Tensor, rows: LongArray, positions: LongArray, device: torch.device) -> None:
        self._tokens, self._rows, self._positions, self.device = tokens, rows, positions, device

    def since(self, places: LongArray, begins: LongArray) -> tuple[Tensor, Tensor]:
        """Ids [places, longest] from position `begins` on, and which of them are there: what is not, repeats the id
        at `begins`."""
        ends, first = self._positions[places], self.to(begins).unsqueeze(-1)
        at = first + torch.arange(int((ends - begins).max()), device=self.device)
        there = at < self.to(ends).unsqueeze(-1)
        rows = self.to(self._rows[places]).unsqueeze(-1)
        return self._tokens[rows, torch.where(there, at, first)].long(), there

    def end_with(self, places: LongArray, heads: LongArray) -> Tensor:
        """bool [W]: whether row `places[i]` ends with `heads[i]`; heads is [W, H]."""
        at = self._positions[places][:, None] + np.arange(-heads.shape[1], 0)
        found = self._tokens[self.to(self._rows[places][:, None]), self.to(at.clip(0))]
        there = self.to((at >= 0) & (heads != _ANY))
        return ((found == self.to(heads)) & there | self.to(heads == _ANY)).all(-1)

    def to(self, column: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(column)).to(self.device)


def _prepare(asked: LogitsParams, prompt: int) -> PreparedLogitsParams:
    single = [word[0] for word in asked.bad_words if len(word) == 1]
    longer = [word for word in asked.bad_words if len(word) > 1]
    return PreparedLogitsParams(
        asked,
        prompt,
        early_biases=_additions(asked.logit_bias, [*single, *asked.stop_token_ids]),
        later_biases=_additions(asked.logit_bias, single),
        bad_word_heads=_stack([np.array([word[:-1]], np.int64) for word in longer]),
        bad_word_lasts=np.array([word[-1] for word in longer], np.int64),
        allowed=np.array(asked.allowed_token_ids, np.int64),
    )


def _additions(bias: Iterable[tuple[int, float]], banned: Sequence[int]) -> TokenBiases:
    pairs = [*bias, *((token, -np.inf) for token in banned)]
    ids, values = (np.array([pair[side] for pair in pairs]) for side in (0, 1))
    return TokenBiases(ids.astype(np.int64), values.astype(np.float32))


def _stack(heads: Sequence[LongArray]) -> LongArray:
    """Arrays [w, h] of different widths as one, moved to the right end."""
    width = max((head.shape[1] for head in heads), default=0)
    padded = [np.pad(head, ((0, 0), (width - head.shape[1], 0)), constant_values=_ANY) for head in heads]
    return np.concatenate(padded) if padded else np.zeros((0, 0), np.int64)


def _add_biases(logits: Tensor, shapes: Sequence[PreparedLogitsParams], positions: LongArray) -> None:
    """Biases, bad words of one token, and stops that would come too early, all as numbers to add."""
    due = [shape.biases_at(position) for shape, position in zip(shapes, positions.tolist(), strict=True)]
    owners = np.repeat(np.arange(len(due)), [len(each.ids) for each in due])
    if len(owners):
        values = torch.from_numpy(np.concatenate([each.values for each in due])).to(logits.device)
        _add(logits, owners, np.concatenate([each.ids for each in due]), values)


def _forbid_last_tokens(logits: Tensor, shapes: Sequence[PreparedLogitsParams], history: _TokenHistory) -> None:
    """The last token of a bad word, where all others of it have just been."""
    owners = np.repeat(np.arange(len(shapes)), [len(shape.bad_word_lasts) for shape in shapes])
    if not len(owners):
        return
    begun = history.end_with(owners, _stack([shape.bad_word_heads for shape in shapes if len(shape.bad_word_heads)]))
    values = torch.zeros(len(owners), device=history.device).masked_fill_(begun, -torch.inf)
    _add(logits, owners, np.concatenate([shape.bad_word_lasts for shape in shapes]), values)


def _penalise_repetition(logits: Tensor, shapes: Sequence[PreparedLogitsParams], history: _TokenHistory) -> None:
    """Divide what speaks for a token that occurred, multiply what speaks against it."""
    penalties = np.array([shape.params.repetition_penalty for shape in shapes], np.float32)
    places = np.flatnonzero(penalties != 1)
    if not len(places):
        return
    ids, _ = history.since(places, np.zeros_like(places))
    at, penalty = history.to(places).unsqueeze(-1), history.to(penalties[places]).unsqueeze(-1)
    before = logits[at, ids]
    # A token that occurred twice is written twice, the same both times.
    logits[at, ids] = torch.where(before > 0, before / penalty, before * penalty)


def _penalise_output(logits: Tensor, shapes: Sequence[PreparedLogitsParams], history: _TokenHistory) -> None:
    """Subtract for each time a token was generated, and once for having been."""
    asked = [(shape.params.presence_penalty, shape.params.frequency_penalty) for shape in shapes]
    penalties = np.array(asked, np.float32)
    places = np.flatnonzero((penalties != 0).any(-1))
    if not len(places):
        return
    at, (presence, frequency) = history.to(places).unsqueeze(-1), history.to(penalties[places].T).unsqueeze(-1)
    ids, there = history.since(places, np.array([shapes[place].prompt for place in places.tolist()]))
    logits.index_put_((at, ids), -frequency * there, accumulate=True)
    logits[at, ids] = logits[at, ids] - presence * there.any(-1, keepdim=True)


def _forbid_others(logits: Tensor, shapes: Sequence[PreparedLogitsParams], history: _TokenHistory) -> None:
    """All but the allowed tokens; of which those are equal that are all forbidden by something else."""
    for place, shape in enumerate(shapes):
        if len(shape.allowed):
            ids = history.to(shape.allowed)
            kept = logits[place, ids]
            logits[place] = -torch.inf
            logits[place, ids] = torch.where((kept == -torch.inf).all(), 0.0, kept)


def _add(logits: Tensor, places: LongArray, ids: NDArray[Any], values: Tensor) -> None:
    at = (torch.from_numpy(column.astype(np.int64)).to(logits.device) for column in (places, ids))
    logits.index_put_(tuple(at), values, accumulate=True)
