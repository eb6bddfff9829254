"""How a request wants its tokens chosen: names, ranges, defaults, and how many fit into a model's length."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from .errors import ContextLengthExceeded, InvalidArgument
from .logprobs import MAX_LOGPROBS

MAX_LISTED_TOKENS = 1024
"""The most tokens that a request may name to stop at, or to bias."""

_MAX_STOP_STRINGS = 64
_MAX_STOP_STRING_LENGTH = 256


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens. None is the default of the model's generation_config, unless the field says otherwise.

    Raises:
        InvalidArgument: a value is out of range; `field` names it.
    """

    max_tokens: int | None = 16
    """None means up to the model's length; 0 computes the prompt alone."""
    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    """0 and -1 are off."""
    top_p: float | None = None
    """1 is off."""
    seed: int | None = None
    """None and -1 let the engine draw one."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float | None = None
    """0 is off."""
    repetition_penalty: float | None = None
    """Counts prompt and output."""
    presence_penalty: float = 0.0
    """Counts the output alone."""
    frequency_penalty: float = 0.0
    """Counts the output alone."""
    logit_bias: dict[int, float] = {}
    """Numbers added to the logits of token ids."""
    bad_words: tuple[str, ...] = ()
    """Words that are never generated."""
    min_tokens: int = 0
    """No stop token or `stop` string ends a shorter text."""
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    """Whether a stop string stays in the text."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be chosen."""
    truncate_prompt_tokens: int | None = None
    """How many of the prompt's last tokens to keep, -1 for as many as fit; None keeps all."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    spaces_between_special_tokens: bool = True
    """Whether special tokens in the text have the tokenizer's spaces between them."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside each chosen one; None reports no logprobs."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each token of the prompt."""

    def __post_init__(self) -> None:
        check_range("max_tokens", self.max_tokens, "at least 0", lambda v: v >= 0)
        check_range("temperature", self.temperature, "a finite number of at least 0", lambda v: 0 <= v < float("inf"))
        check_range("top_k", self.top_k, "-1, 0 (both off) or a positive number", lambda v: v >= -1)
        check_range("top_p", self.top_p, "above 0 and at most 1", lambda v: 0 < v <= 1)
        check_range("seed", self.seed, "between -2**63 and 2**64 - 1", lambda v: -(2**63) <= v < 2**64)
        for name in ("stop_token_ids", "logit_bias"):
            tokens = getattr(self, name)
            check_range(name, tokens, f"at most {MAX_LISTED_TOKENS} tokens", lambda v: len(v) <= MAX_LISTED_TOKENS)
        for token in self.stop_token_ids:
            check_range("stop_token_ids", token, "made of numbers of at least 0", lambda v: v >= 0)
        truncated = self.truncate_prompt_tokens
        check_range("truncate_prompt_tokens", truncated, "-1 or at least 1", lambda v: v == -1 or v >= 1)
        check_range("min_p", self.min_p, "between 0 and 1", lambda v: 0 <= v <= 1)
        check_range(
            "repetition_penalty", self.repetition_penalty, "a finite number above 0", lambda v: 0 < v < float("inf")
        )
        check_range("presence_penalty", self.presence_penalty, "between -2 and 2", lambda v: -2 <= v <= 2)
        check_range("frequency_penalty", self.frequency_penalty, "between -2 and 2", lambda v: -2 <= v <= 2)
        for token, bias in self.logit_bias.items():
            check_range("logit_bias", token, "given for token ids of at least 0", lambda v: v >= 0)
            check_range("logit_bias", bias, "between -100 and 100", lambda v: -100 <= v <= 100)
        allowed = self.allowed_token_ids
        check_range("allowed_token_ids", allowed, "at least one token", len)
        check_range("allowed_token_ids", min(allowed or (0,)), "made of numbers of at least 0", lambda v: v >= 0)
        most = float("inf") if self.max_tokens is None else self.max_tokens
        check_range("min_tokens", self.min_tokens, "between 0 and max_tokens", lambda v: 0 <= v <= most)
        for name in ("logprobs", "prompt_logprobs"):
            check_range(name, getattr(self, name), f"between 0 and {MAX_LOGPROBS}", lambda v: 0 <= v <= MAX_LOGPROBS)
        _check_words("stop", self.stop)
        _check_words("bad_words", self.bad_words)

    @property
    def chosen_seed(self) -> int | None:
        return None if self.seed == -1 else self.seed


class TokenLimit(NamedTuple):
    """The most tokens of a text. `subject` begins the error message, up to the number."""

    tokens: int
    subject: str = "this model's maximum context length is"

    def error(self, what: str, field: str) -> ContextLengthExceeded:
        """The error for a longer text, whose length `what` describes."""
        return ContextLengthExceeded(f"{self.subject} {self.tokens} tokens: {what}", field=field)

    def check_sequence(self, prompt: int, new: int, prompt_field: str = "prompt") -> None:
        """Raises `ContextLengthExceeded` if the prompt's and the new tokens together exceed the limit; its `field` is
        the parameter to change, `prompt_field` that of the prompt."""
        if prompt + new <= self.tokens:
            return
        if prompt < self.tokens:
            raise self.error(f"a prompt of {prompt} with max_tokens {new} exceeds it", "max_tokens")
        raise self.error(f"a prompt of {prompt} leaves no room for an answer", prompt_field)


def check_range(name: str, value: Any, must_be: str, holds: Callable[[Any], object]) -> None:
    """Raises `InvalidArgument` for a value, other than None, that does not hold; `field` is the name."""
    if value is not None and not holds(value):
        got = len(value) if isinstance(value, tuple | dict) else repr(value)
        raise InvalidArgument(f"{name} must be {must_be}, got {got}", field=name)


def _check_words(name: str, words: tuple[str, ...]) -> None:
    if len(words) > _MAX_STOP_STRINGS or not all(0 < len(word) <= _MAX_STOP_STRING_LENGTH for word in words):
        message = f"{name} must be at most {_MAX_STOP_STRINGS} strings of 1 to {_MAX_STOP_STRING_LENGTH} characters"
        raise InvalidArgument(message, field=name)
