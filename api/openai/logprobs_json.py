"""Logprobs as JSON: of completions, of chat, and vLLM's of prompts; and the selection of the best choices by them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ...core.logprobs import PromptToken, TokenLogprob
from ...core.request import GenerateChunk

JsonObject = dict[str, Any]


def completion_logprobs(
    prompt: Sequence[PromptToken], tokens: Sequence[TokenLogprob], offset: int, most: int
) -> JsonObject:
    """The `logprobs` of a completion: columns over the tokens of an echoed prompt, if any, and those generated.

    `offset`: characters that the tokens before wrote; `most`: likeliest tokens beside each.
    """
    given = [*(each.given for each in prompt), *tokens]
    texts = [*(each.text for each in prompt), *(each.text for each in tokens)]
    return {
        "tokens": texts,
        "token_logprobs": [None if each is None else each.logprob for each in given],
        "top_logprobs": [None if each is None else _by_text(each, most) for each in given],
        "text_offset": list(accumulate(map(len, texts), initial=offset))[:-1],
    }


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> JsonObject:
    """The `logprobs` of a chat message: an entry for each token."""
    content = [_entry(each) | {"top_logprobs": [_entry(other) for other in each.top]} for each in tokens]
    return {"content": content, "refusal": None}


def prompt_logprobs(prompt: Sequence[PromptToken], most: int) -> list[JsonObject | None]:
    """vLLM's `prompt_logprobs`: for each token an object by token id, the prompt's own token first, then the `most`
    likeliest; None for the first token of all."""
    return [None if each.given is None else _by_id(each.given, each.rank, most) for each in prompt]


def select_best(answers: Sequence[GenerateChunk], choices: int, kept: int) -> list[GenerateChunk]:
    """The `kept` answers with the highest mean logprob of each prompt's `choices` answers, the highest first.

    Where all are kept they stay in their order.
    """
    if kept == choices:
        return list(answers)
    groups = (answers[at : at + choices] for at in range(0, len(answers), choices))
    return [answer for group in groups for answer in sorted(group, key=_per_token, reverse=True)[:kept]]


def _per_token(answer: GenerateChunk) -> float:
    return sum(each.logprob for each in answer.logprobs) / max(len(answer.logprobs), 1)


def _entry(token: TokenLogprob) -> JsonObject:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def _by_text(token: TokenLogprob, most: int) -> dict[str, float]:
    # Of several tokens with the same text, the likeliest is named.
    named: dict[str, float] = {}
    for each in (*token.top[:most], token):
        named.setdefault(each.text, each.logprob)
    return named


def _by_id(token: TokenLogprob, rank: int, most: int) -> JsonObject:
    ranked = ((token, rank), *((each, place) for place, each in enumerate(token.top[:most], start=1)))
    return {
        str(each.id): {"logprob": each.logprob, "rank": place, "decoded_token": each.text} for each, place in ranked
    }
