"""Tokens with logprobs, of a vocabulary that has no others."""

from charonia.core.logprobs import Logprobs, TokenLogprob, TokenPiece, TokenPieces


def scored(
    token: int,
    text: str,
    logprob: float,
    *top: tuple[int, str, float],
    rank: int = 0,
    width: int | None = None,
) -> TokenLogprob:
    """`top`: the likeliest tokens, as (id, text, logprob)."""
    texts = {token: text} | {likely: other for likely, other, _ in top}
    pieces = TokenPieces(lambda number: TokenPiece(texts[number], texts[number].encode()))
    scores = Logprobs(logprob, [likely for likely, _, _ in top], [value for _, _, value in top], rank)
    return TokenLogprob(token, scores, pieces, width)
