"""The tokens of queries and documents for late interaction: marks, mask tokens behind queries, and which count."""

from collections.abc import Sequence
from typing import NamedTuple

from ...core.encoder_tensors import QUERY
from ...core.errors import InvalidArgument
from ...tokenization.tokenizer_json import EncoderTokenizer, read_special_tokens
from .late_interaction_files import LateInteractionFiles


class MarkedText(NamedTuple):
    """A text's tokens, the first `attended` of which others see, and the indices of those whose vectors count."""

    ids: Sequence[int]
    segments: Sequence[int]
    attended: int
    counted: Sequence[int]


class MarkedTokenizer:
    """Tokenizes queries and documents. Raises `InvalidArgument` if the tokenizer has no token to fill queries up, or
    the model does not take as many as they are filled up to."""

    def __init__(self, files: LateInteractionFiles) -> None:
        self._files = files
        most = files.tokenization.max_tokens
        query = files.query_length or most
        if files.expansion:
            length = files.expansion.length
            if not 1 <= length <= most:
                message = f"queries are to be filled up to {length} tokens, and the model takes 1 to {most}"
                raise InvalidArgument(f"{files.directory}: {message}")
            query = length if files.expansion.cuts else max(query, length)
        self._query = self._load(min(query, most))
        self._document = self._load(min(files.document_length or most, most))
        self._skipped = {self._document.token_id(word) for word in files.skipped_words} - {None}
        unknown = read_special_tokens(files.directory).get("unk_token")
        if unknown is not None and unknown not in files.skipped_words:
            self._skipped.discard(self._document.token_id(unknown))
        self._filler = self._find_filler() if files.expansion else 0

    def encode(self, texts: Sequence[str], roles: Sequence[str]) -> list[MarkedText]:
        """The tokens of texts, each with its role: `query`, or the name of another prompt, with which it is a
        document. Raises as `EncoderTokenizer.encode`."""
        lowercase = self._files.tokenization.lowercase
        prompts = self._files.tokenization.prompts
        marked = [
            prompts[role] + (text.lower() if lowercase else text) for text, role in zip(texts, roles, strict=True)
        ]
        rows = [index for index, role in enumerate(roles) if role == QUERY]
        others = [index for index, role in enumerate(roles) if role != QUERY]
        queries = self._query.encode([marked[index] for index in rows])
        documents = self._document.encode([marked[index] for index in others])
        encoded = dict(zip((*rows, *others), (*queries, *documents), strict=True))
        return [self._mark(list(encoded[index].ids), role == QUERY) for index, role in enumerate(roles)]

    def _mark(self, ids: list[int], is_query: bool) -> MarkedText:
        expansion = self._files.expansion if is_query else None
        skipped = self._skipped if not is_query or self._files.skips_in_queries else set()
        length = len(ids)
        if expansion:
            ids += [self._filler] * (expansion.length - length)
        counted = [index for index, token in enumerate(ids) if index >= length or token not in skipped]
        attended = len(ids) if expansion and expansion.attended else length
        return MarkedText(ids, [0] * len(ids), attended, counted)

    def _load(self, length: int) -> EncoderTokenizer:
        marks = self._files.tokenization.prompts.values() if self._files.marks else ()
        return EncoderTokenizer.load(self._files.directory, length, marks=[*marks])

    def _find_filler(self) -> int:
        """As PyLate: the mask token, or that which ends a text."""
        special = read_special_tokens(self._files.directory)
        expansion = self._files.expansion
        own = expansion.token if expansion else None
        names = [own] if own else [special.get("mask_token"), special.get("eos_token")]
        for name in filter(None, names):
            if (token := self._query.token_id(name)) is not None:
                return token
        tried = ", ".join(filter(None, names)) or "neither mask_token nor eos_token is declared"
        raise InvalidArgument(f"{self._files.directory}: no token to fill queries up: {tried}")
