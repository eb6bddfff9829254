"""How a sequence's tokens are chosen, every default resolved: the engine's client makes it of `SamplingParams`, and its
sampler reads it."""

from typing import NamedTuple


class TimestampRules(NamedTuple):
    """When a transcript's next token must be a time, must not be one, and which times it may be: those of arXiv
    2212.04356, as transformers' `WhisperTimeStampLogitsProcessor` has them. The times are the vocabulary's last tokens,
    ascending."""

    begin: int
    """The first token that is a time."""
    end: int
    """The token that ends the text."""
    no_timestamps: int
    """The token that says in a prompt that no times are wanted: never chosen."""
    most_initial: int | None = None
    """The first time is no later than so many tokens behind `begin`; None: any."""


class LogitsParams(NamedTuple):
    """How a row's logits are changed before a token is chosen; the defaults change nothing. Few rows have any."""

    repetition_penalty: float = 1.0
    """Counts prompt and output."""
    presence_penalty: float = 0.0
    """Counts the output alone, as `frequency_penalty` does."""
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, added) pairs."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences never to be completed; they may begin in the prompt."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Cannot be chosen until there are `min_tokens` new tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """No other token can be chosen, unless it is empty. Where the other parameters leave none of them, one is chosen
    all the same."""
    suppressed: tuple[int, ...] = ()
    """Never chosen."""
    suppressed_first: tuple[int, ...] = ()
    """Not chosen as the first new token."""
    timestamps: TimestampRules | None = None
    reported: bool = False
    """Whether log-probabilities are those of the changed logits, and not the model's own."""


class ResolvedSampling(NamedTuple):
    """How one row's tokens are chosen, every default resolved. Its plain floats and ints are the table that the
    sampler's array and C structure are made from, see `engine/step_batch.py`.

    The token at absolute position p of choice c depends on the logits and on (seed, c, p) alone.
    """

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    """1 is off."""
    seed: int = 0
    choice: int = 0
    min_p: float = 0.0
    """0 is off."""
    logits: LogitsParams | None = None
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside each chosen one; None reports nothing."""
    prompt_logprobs: int | None = None
    """In the same way, beside each token of the prompt but the first."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens that are reported behind the likeliest ones, however likely they are; with `logprobs` alone."""
