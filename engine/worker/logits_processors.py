"""Changing logits before a token is chosen, for the rows that ask for it.

Processors keep no state: a row's history is its token ids, which stand on the device anyway, sampled ones included. So
a row that was preempted, or is scheduled ahead, cannot count wrongly.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.resolved_sampling import LogitsParams, TimestampRules
from ...scheduler.plan import LongArray
from ..step_batch import to_device

_ANY = -1
"""Fills `PreparedLogitsParams.bad_word_heads` before words that are shorter than the longest."""


class TokenBiases(NamedTuple):
    """`ids` [B] get `values` [B], float32, added; minus infinity forbids a token."""

    ids: LongArray
    values: NDArray[np.float32]


class PreparedLogitsParams(NamedTuple):
    """One row's `params` as arrays."""

    params: LogitsParams
    prompt: int
    """The length of the row's prompt."""
    first_biases: TokenBiases
    """Biases and bans of one token, added to the logits of the first new token."""
    early_biases: TokenBiases
    """The same, added while new tokens are fewer than the minimum."""
    later_biases: TokenBiases
    """The same, added from then on."""
    bad_word_heads: LongArray
    """[W, H] of the W longer bad words all tokens but the last, at the right end."""
    bad_word_lasts: LongArray
    """[W] the last token of each."""
    allowed: LongArray
    """The only tokens that can be chosen; empty for all."""


class _TokenHistory:
    """The tokens of S rows before their `positions` [S], out of `tokens` [all rows, length]."""

    def __init__(self, tokens: Tensor, rows: LongArray, positions: LongArray) -> None:
        self._tokens = tokens
        self._rows = rows
        self.positions = positions
        self.device = tokens.device

    def since(self, places: LongArray, begins: LongArray) -> tuple[Tensor, Tensor]:
        """Ids [places, longest] from position `begins` on, and which of them are tokens; others repeat the first."""
        ends = self.positions[places]
        first = self.to(begins).unsqueeze(-1)
        at = first + torch.arange(int((ends - begins).max()), device=self.device)
        is_token = at < self.to(ends).unsqueeze(-1)
        rows = self.to(self._rows[places]).unsqueeze(-1)
        return self._tokens[rows, torch.where(is_token, at, first)].long(), is_token

    def lists(self, places: LongArray, begins: LongArray) -> list[list[int]]:
        """The ids from position `begins` on, on the host."""
        if not (self.positions[places] > begins).any():
            return [[] for _ in begins]
        ids, is_token = self.since(places, begins)
        counts = is_token.sum(-1).tolist()
        return [row[:count] for row, count in zip(ids.tolist(), counts, strict=True)]

    def end_with(self, places: LongArray, heads: LongArray) -> Tensor:
        """bool [W]: whether row `places[i]` ends with `heads[i]`; heads is [W, H]."""
        at = self.positions[places][:, None] + np.arange(-heads.shape[1], 0)
        last_tokens = self._tokens[self.to(self._rows[places][:, None]), self.to(at.clip(0))]
        is_token = self.to((at >= 0) & (heads != _ANY))
        return ((last_tokens == self.to(heads)) & is_token | self.to(heads == _ANY)).all(-1)

    def to(self, column: NDArray[Any]) -> Tensor:
        return to_device(column, self.device)


LogitsProcessor: TypeAlias = Callable[[Tensor, Sequence[PreparedLogitsParams], _TokenHistory], None]
"""Changes float32 logits [S, vocabulary] in place, as the parameters [S] of their rows ask."""


def _add_biases(logits: Tensor, rows: Sequence[PreparedLogitsParams], history: _TokenHistory) -> None:
    """Biases, bad words of one token, and tokens that are banned here, all as numbers to add."""
    biases = [_biases_at(position, row) for row, position in zip(rows, history.positions.tolist(), strict=True)]
    owners = np.repeat(np.arange(len(biases)), [len(bias.ids) for bias in biases])
    if len(owners):
        values = history.to(np.concatenate([bias.values for bias in biases]))
        ids = history.to(np.concatenate([bias.ids for bias in biases]))
        logits.index_put_((history.to(owners), ids), values, accumulate=True)


def _biases_at(position: int, row: PreparedLogitsParams) -> TokenBiases:
    if position == row.prompt:
        return row.first_biases
    return row.early_biases if position - row.prompt < row.params.min_tokens else row.later_biases


def _ban_words(logits: Tensor, rows: Sequence[PreparedLogitsParams], history: _TokenHistory) -> None:
    """The last token of a bad word, where all others of it have just been."""
    owners = np.repeat(np.arange(len(rows)), [len(row.bad_word_lasts) for row in rows])
    if not len(owners):
        return
    begun = history.end_with(owners, _stack([row.bad_word_heads for row in rows if len(row.bad_word_heads)]))
    values = torch.zeros(len(owners), device=history.device).masked_fill_(begun, -torch.inf)
    lasts = history.to(np.concatenate([row.bad_word_lasts for row in rows]))
    logits.index_put_((history.to(owners), lasts), values, accumulate=True)


def _penalise_repetition(logits: Tensor, rows: Sequence[PreparedLogitsParams], history: _TokenHistory) -> None:
    """Divide positive logits of tokens that occurred, multiply negative ones."""
    penalties = np.array([row.params.repetition_penalty for row in rows], np.float32)
    places = np.flatnonzero(penalties != 1)
    if not len(places):
        return
    ids, _ = history.since(places, np.zeros_like(places))
    at = history.to(places).unsqueeze(-1)
    penalty = history.to(penalties[places]).unsqueeze(-1)
    before = logits[at, ids]
    # A token that occurred twice is written twice, the same both times.
    logits[at, ids] = torch.where(before > 0, before / penalty, before * penalty)


def _penalise_output(logits: Tensor, rows: Sequence[PreparedLogitsParams], history: _TokenHistory) -> None:
    """Subtract for each time a token was generated, and once for having been."""
    penalties = np.array([(row.params.presence_penalty, row.params.frequency_penalty) for row in rows], np.float32)
    places = np.flatnonzero((penalties != 0).any(-1))
    if not len(places):
        return
    at = history.to(places).unsqueeze(-1)
    presence, frequency = history.to(penalties[places].T).unsqueeze(-1)
    ids, is_token = history.since(places, np.array([rows[place].prompt for place in places.tolist()]))
    logits.index_put_((at, ids), -frequency * is_token, accumulate=True)
    logits[at, ids] = logits[at, ids] - presence * is_token.any(-1, keepdim=True)


def _keep_time(logits: Tensor, rows: Sequence[PreparedLogitsParams], history: _TokenHistory) -> None:
    """The rules of times in transcripts."""
    timed = [place for place, row in enumerate(rows) if row.params.timestamps is not None]
    if not timed:
        return
    prompts = np.array([rows[place].prompt for place in timed])
    for place, tokens in zip(timed, history.lists(np.array(timed), prompts), strict=True):
        rules = rows[place].params.timestamps
        assert rules is not None
        _keep_time_of(logits[place], tokens, rules)


def _keep_time_of(logits: Tensor, tokens: list[int], rules: TimestampRules) -> None:
    """Forbid in `logits` [vocabulary] what may not follow the new `tokens`: times come in pairs, but for the first and
    the last, and never go back; and where they are together likelier than any other token, there is one."""
    begin = rules.begin
    logits[rules.no_timestamps] = -torch.inf
    last_timed = bool(tokens) and tokens[-1] >= begin
    both_timed = last_timed and (len(tokens) < 2 or tokens[-2] >= begin)
    if both_timed:
        logits[begin:] = -torch.inf
    elif last_timed:
        logits[: rules.end] = -torch.inf
    times = [token for token in tokens if token >= begin]
    if times:  # a pair may begin with the time that the one before ended with
        logits[begin : times[-1] + (not last_timed or both_timed)] = -torch.inf
    if not tokens:
        logits[:begin] = -torch.inf
        if rules.most_initial is not None:
            logits[begin + rules.most_initial + 1 :] = -torch.inf
    log_probabilities = logits.log_softmax(-1)
    timed = log_probabilities[begin:].logsumexp(-1) > log_probabilities[:begin].max()
    logits[:begin].masked_fill_(timed, -torch.inf)  # a condition would wait for the device


def _allow_only(logits: Tensor, rows: Sequence[PreparedLogitsParams], history: _TokenHistory) -> None:
    """Forbid all but the allowed tokens; where something else forbids all of these, they become equal."""
    for place, row in enumerate(rows):
        if len(row.allowed):
            ids = history.to(row.allowed)
            kept = logits[place, ids]
            logits[place] = -torch.inf
            logits[place, ids] = torch.where((kept == -torch.inf).all(), 0.0, kept)


PROCESSORS: tuple[LogitsProcessor, ...] = (
    _add_biases,
    _ban_words,
    _penalise_repetition,
    _penalise_output,
    _keep_time,
    _allow_only,
)
"""In the order in which they run, which is that of transformers and vLLM; temperature, top-k, top-p and min-p follow in
`sampler.py`. A new parameter of `LogitsParams` is a function in this list."""


def prepare_logits_params(prompt: int, params: LogitsParams) -> PreparedLogitsParams:
    """The `params` of a row whose sequence has that many prompt tokens."""
    banned = [*(word[0] for word in params.bad_words if len(word) == 1), *params.suppressed]
    early = [*banned, *params.stop_token_ids]
    longer = [word for word in params.bad_words if len(word) > 1]
    return PreparedLogitsParams(
        params,
        prompt,
        first_biases=_biases(params.logit_bias, [*(early if params.min_tokens else banned), *params.suppressed_first]),
        early_biases=_biases(params.logit_bias, early),
        later_biases=_biases(params.logit_bias, banned),
        bad_word_heads=_stack([np.array([word[:-1]], np.int64) for word in longer]),
        bad_word_lasts=np.array([word[-1] for word in longer], np.int64),
        allowed=np.array(params.allowed_token_ids, np.int64),
    )


def process_logits(
    logits: Tensor, params: Sequence[PreparedLogitsParams], rows: LongArray, positions: LongArray, tokens: Tensor
) -> None:
    """Change float32 `logits` [S, vocabulary] in place as `params` [S] of `rows` [S] say. `positions` [S] are those of
    the tokens to be chosen; `tokens` [all rows, length] holds the ids before them."""
    history = _TokenHistory(tokens, rows, positions)
    for process in PROCESSORS:
        process(logits, params, history)


def _biases(bias: Iterable[tuple[int, float]], banned: Sequence[int]) -> TokenBiases:
    pairs = [*bias, *((token, -np.inf) for token in banned)]
    ids, values = (np.array([pair[side] for pair in pairs]) for side in (0, 1))
    return TokenBiases(ids.astype(np.int64), values.astype(np.float32))


def _stack(heads: Sequence[LongArray]) -> LongArray:
    """Arrays [w, h] of different widths as one, moved to the right end."""
    width = max((head.shape[1] for head in heads), default=0)
    padded = [np.pad(head, ((0, 0), (width - head.shape[1], 0)), constant_values=_ANY) for head in heads]
    return np.concatenate(padded) if padded else np.zeros((0, 0), np.int64)
