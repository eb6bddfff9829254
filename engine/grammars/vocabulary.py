"""The tokens of a model as the library of grammars needs them: their bytes, and which are special or end a text."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tokenizers
from llguidance import LLTokenizer, TokenizerWrapper

from ...core.errors import Internal
from ...core.native_calls import NativeCall
from ...tokenization.bounded_encoder import BoundedEncoder
from ...tokenization.checkpoint_files import locate_checkpoint
from ...tokenization.generation_defaults import read_generation_defaults
from ...tokenization.tokenizer import Tokenizer, read_token_piece
from ...tokenization.tokenizer_json import read_tokenizer


class Vocabulary(NamedTuple):
    """A model's vocabulary."""

    tokenizer: LLTokenizer
    tokens: Sequence[bytes]
    """The bytes of each token."""
    special: Mapping[str, int]
    """Added tokens by their text, which are never part of other text."""
    ends: tuple[int, ...]
    """The tokens that end a text."""
    size: int
    """The number of the model's logits."""

    def ends_in_special(self, text: str) -> bool:
        """Whether a special token ends `text`, whatever stands before it."""
        return any(text.endswith(token) for token in self.special)


def read_vocabulary(model: str, tokenizer_of: str, size: int) -> Vocabulary:
    """The vocabulary of a checkpoint, with another's tokenizer if `tokenizer_of` names one. Raises as `read_tokenizer`
    and `read_generation_defaults`."""
    directory = locate_checkpoint(model)
    backend, named = read_tokenizer(locate_checkpoint(tokenizer_of) if tokenizer_of else directory)
    ends = read_generation_defaults(directory, Tokenizer(backend, named, {})).eos
    return build_vocabulary(backend, size, tuple(token for token in ends if 0 <= token < size))


def build_vocabulary(backend: tokenizers.Tokenizer, size: int, ends: tuple[int, ...]) -> Vocabulary:
    """The vocabulary of a tokenizer, for a model of `size` logits. A token that only one of them has cannot be chosen.
    Without end tokens the last token counts as one."""
    backend.no_truncation()
    backend.no_padding()
    added = backend.get_added_tokens_decoder()
    special = {token.content: number for number, token in added.items() if number < size}
    tokens = _Tokens(backend, special, ends or (size - 1,), size)
    wrapped = TokenizerWrapper(tokens)
    tokenizer = LLTokenizer(wrapped, eos_token=list(tokens.ends), slices=LLTokenizer.json_slices())
    return Vocabulary(tokenizer, tokens.tokens, special, tokens.ends, size)


class _Tokens:
    """A tokenizer as `TokenizerWrapper` wants it. It encodes without added tokens: what spells one in a schema is
    text."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special: Mapping[str, int], ends: tuple[int, ...], size: int
    ) -> None:
        self.ends = ends
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.special_token_ids = sorted({*special.values(), *ends})
        self.tokens = token_bytes(backend, size)
        for text, token in special.items():
            self.tokens[token] = text.encode()
        self._plain = BoundedEncoder(_without_added(backend), "tokenizer.json")

    def __call__(self, text: str) -> list[int]:
        return [*self._plain.encode([text], special=False)[0].ids]


def token_bytes(backend: tokenizers.Tokenizer, size: int) -> list[bytes]:
    """The bytes that each token adds to a text; none for tokens that the tokenizer lacks."""
    known = min(size, backend.get_vocab_size())
    try:
        with NativeCall("the library of grammars failed"):
            decode = LLTokenizer(backend.to_str(), slices=[]).decode_bytes
            tokens = [decode([token]) for token in range(known)]
    except (ValueError, RuntimeError, Internal):  # a kind of tokenizer that the library does not know
        tokens = [read_token_piece(backend, token).data for token in range(known)]
    return tokens + [b""] * (size - known)


def _without_added(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    plain = json.loads(backend.to_str())
    plain["added_tokens"], plain["post_processor"] = [], None
    return tokenizers.Tokenizer.from_str(json.dumps(plain))
