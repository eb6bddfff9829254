"""Log-probabilities of tokens as OpenAI's endpoints show them, with vLLM's extra fields."""

from collections.abc import Sequence
from typing import Any

from ...core.logprobs import PromptToken, TokenLogprob

JsonObject = dict[str, Any]


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
        given = token.given if isinstance(token, PromptToken) else token
        names.append(f"token_id:{token.id}" if as_ids else token.text)
        logprobs.append(None if given is None else given.logprob)
        likeliest.append(None if given is None else _by_name(given, most, as_ids))
        offsets.append(offset)
        offset += len(token.text) if token.width is None else token.width
    columns = {"tokens": names, "token_logprobs": logprobs, "top_logprobs": likeliest, "text_offset": offsets}
    return columns, offset


def _by_name(token: TokenLogprob, most: int, as_ids: bool) -> dict[str, float]:
    # Of several tokens with the same text, the likeliest is named.
    named: dict[str, float] = {}
    for likely in (*token.top[:most], token):
        named.setdefault(f"token_id:{likely.id}" if as_ids else likely.text, likely.logprob)
    return named


def token_entries(tokens: Sequence[TokenLogprob], as_ids: bool = False) -> list[JsonObject]:
    """The logprobs of tokens as chat and responses show them; `as_ids`: with their ids in place of their text, for, in
    vLLM's words, not every token is a text of its own."""
    return [
        _entry(token, as_ids) | {"top_logprobs": [_entry(likely, as_ids) for likely in token.top]} for token in tokens
    ]


def _entry(token: TokenLogprob, as_id: bool) -> JsonObject:
    name = f"token_id:{token.id}" if as_id else token.text
    return {"token": name, "logprob": token.logprob, "bytes": [*token.data]}


def prompt_entries(prompt: Sequence[PromptToken], most: int) -> list[JsonObject | None]:
    """vLLM's `prompt_logprobs`: for each token an object by token id, the prompt's own token first, then the `most`
    likeliest; None for the first token of all."""
    return [None if token.given is None else _by_id(token.given, token.rank, most) for token in prompt]


def _by_id(token: TokenLogprob, rank: int, most: int) -> JsonObject:
    ranked = [(token, rank), *((likely, place) for place, likely in enumerate(token.top[:most], start=1))]
    return {
        str(likely.id): {"logprob": likely.logprob, "rank": place, "decoded_token": likely.text}
        for likely, place in ranked
    }
