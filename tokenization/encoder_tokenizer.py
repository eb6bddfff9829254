"""Tokenizes texts and pairs of texts for encoders: with special tokens and segments, cut to the model's length."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers

from ..core.errors import InvalidArgument
from .tokenizer_json import read_tokenizer_json


class EncodedText(NamedTuple):
    """The tokens of one text or pair; `segments` tells the two of a pair apart, as BERT's models want it."""

    ids: Sequence[int]
    segments: Sequence[int]


class EncoderTokenizer:
    """A checkpoint's tokenizer.json, cutting what is longer than `length` tokens, special ones included. Of a pair, the
    longer one is cut first. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, length: int, lowercase: bool = False) -> None:
        self._backend = backend
        self._lowercase = lowercase
        backend.no_padding()
        backend.enable_truncation(length, strategy="longest_first")

    @classmethod
    def load(cls, directory: Path, length: int, lowercase: bool = False) -> "EncoderTokenizer":
        """Read a checkpoint directory; raises as `read_tokenizer_json` does."""
        backend, _ = read_tokenizer_json(directory)
        return cls(backend, length, lowercase)

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[EncodedText]:
        """The tokens of each text, or of each text and the one in the same place of `pairs`.

        Raises `InvalidArgument` if one is not Unicode.
        """
        if self._lowercase:
            texts = [text.lower() for text in texts]
            pairs = pairs and [text.lower() for text in pairs]
        given = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        try:
            made = self._backend.encode_batch(given)
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates
            raise InvalidArgument("a text is not valid Unicode", field="input") from error
        return [EncodedText(each.ids, each.type_ids) for each in made]
