"""Log-probabilities of tokens as OpenAI's endpoints show them, with vLLM's extra fields."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import mod
from typing import Any

import orjson

from ...core.logprobs import PromptToken, TokenLogprob, TokenPiece, json_entry

JsonObject = dict[str, Any]

_by_id = "token_id:{}".format


def logprob_columns(
    prompt: Sequence[PromptToken], tokens: Sequence[TokenLogprob], offset: int, most: int, as_ids: bool
) -> tuple[JsonObject, int]:
    """The columns of completions, over the tokens of an echoed prompt and those generated, and the offset behind them.
    `offset`: characters that the tokens before wrote; `most`: likeliest tokens beside each; `as_ids`: with their ids in
    place of their text."""
    names: list[str] = []
    logprobs: list[float | None] = []
    likeliest: list[dict[str, float] | None] = []
    offsets: list[int] = []
    scored: list[PromptToken | TokenLogprob] = [*prompt, *tokens]
    for token in scored:
        given = token if type(token) is TokenLogprob else token.given
        text = token.text if given is None else given.pieces.text(token.id)
        names.append(_by_id(token.id) if as_ids else text)
        logprobs.append(None if given is None else given.scores.chosen)
        likeliest.append(None if given is None else _by_name(given, most, as_ids))
        offsets.append(offset)
        offset += len(text) if token.width is None else token.width
    columns = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets}
    return columns, offset


def _by_name(token: TokenLogprob, most: int, as_ids: bool) -> dict[str, float]:
    scores = token.scores
    name = _by_id if as_ids else token.pieces.text
    values = scores.values
    named: dict[str, float] = {}
    ids = scores.ids
    rank = 0
    while rank < most and rank < len(ids):  # `zip` would cost as much as all of the loop
        text = name(ids[rank])
        if text not in named:  # of several tokens with the same text, the likeliest is named
            named[text] = values[rank]
        rank += 1
    own = name(token.id)
    if own not in named:
        named[own] = scores.chosen
    return named


def one_column(token: TokenLogprob, offset: int, most: int, as_ids: bool) -> bytes:
    """The JSON of `logprob_columns` for a single token."""
    named = _by_name(token, most, as_ids)
    own = _by_id(token.id) if as_ids else token.pieces.text(token.id)
    columns = {
        "tokens": [own],
        "token_logprobs": [token.scores.chosen],
        "top_logprobs": [named],
        "text_offset": [offset],
    }
    return orjson.dumps(columns)


def token_entries(tokens: Sequence[TokenLogprob], as_ids: bool = False) -> list[orjson.Fragment]:
    """The logprobs of tokens as chat and responses show them; `as_ids`: with their ids in place of their text, for, in
    vLLM's words, not every token is a text of its own."""
    return [orjson.Fragment(token_entry(token, as_ids)) for token in tokens]


def token_entry(token: TokenLogprob, as_ids: bool = False) -> bytes:
    """The JSON of one of `token_entries`."""
    scores, pieces = token.scores, token.pieces
    entry = partial(_entry_by_id, pieces.piece) if as_ids else pieces.entry
    own = entry(token.id) % orjson.dumps(scores.chosen)
    top = b",".join(map(mod, map(entry, scores.ids), map(orjson.dumps, scores.values)))
    return b'%b,"top_logprobs":[%b]}' % (own[:-1], top)


def _entry_by_id(piece: Callable[[int], TokenPiece], token: int) -> bytes:
    return json_entry(_by_id(token), piece(token).data)


def prompt_entries(prompt: Sequence[PromptToken], most: int) -> list[JsonObject | None]:
    """vLLM's `prompt_logprobs`: for each token an object by token id, the prompt's own token first, then the `most`
    likeliest; None for the first token of all."""
    return [None if token.given is None else token.given.by_id(token.rank, most) for token in prompt]
