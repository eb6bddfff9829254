"""The tokens of a target and those of a draft model of another vocabulary: which of them are the same text."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
import torch
from torch import Tensor

from ...core.errors import InvalidArgument, NotFound
from ...scheduler.plan import IntArray, MaskArray
from ...tokenization.bounded_encoder import BoundedEncoder
from ...tokenization.checkpoint_files import locate_checkpoint
from ...tokenization.tokenizer_json import read_tokenizer
from ..config import EngineConfig
from ..grammars.vocabulary import token_bytes

LEAST_SHARED = 0.5
"""The share of a draft model's tokens that its target has to have."""


class VocabularyMap(NamedTuple):
    """`own` int32 [target's tokens]: the draft model's token for each, of the same text, or of the end of its text
    where it has no such token. `theirs` int32 [draft's tokens]: the target's token of the same text, -1 for none;
    `mask` int32 [1, words]: those that have one, as in the masks of grammars."""

    own: Tensor
    theirs: IntArray
    mask: MaskArray


def map_vocabularies(target: Path, draft: Path, tokens: int, own_tokens: int) -> VocabularyMap:
    """The map between two checkpoints' vocabularies, of `tokens` and of `own_tokens` logits. Tokens are the same that
    decode to the same bytes; special ones that are written the same, and those that begin and end a text. Of equal ones
    the first counts.

    Raises:
        InvalidArgument: too few of the draft's tokens are in both.
        NotFound: one has no tokenizer.
    """
    backend, roles = read_tokenizer(target)
    own_backend, own_roles = read_tokenizer(draft)
    texts = _texts(backend, tokens)
    own_texts = _texts(own_backend, own_tokens)
    theirs = _places(texts, own_texts)
    own = _places(own_texts, texts)
    for role in roles.keys() & own_roles.keys() & {"bos_token", "eos_token"}:
        one = backend.token_to_id(roles[role])
        other = own_backend.token_to_id(own_roles[role])
        if one is not None and other is not None and one < tokens and other < own_tokens:
            theirs[other], own[one] = one, other
    known = sum(text is not None for text in own_texts)
    shared = int((theirs >= 0).sum())
    if shared < LEAST_SHARED * known:
        share = f"{shared} of its {known} tokens are in both, and at least {LEAST_SHARED:.0%} must be"
        message = f"speculative_config: {draft} has another vocabulary than {target}: {share}"
        raise InvalidArgument(message, field="speculative_config")
    lacking = np.flatnonzero(own < 0)
    own[lacking] = _last_pieces(own_backend, [texts[at] or "" for at in lacking.tolist()])
    bits = np.zeros(-(-own_tokens // 32) * 32, np.uint8)
    bits[: len(theirs)] = theirs >= 0
    mask = np.packbits(bits, bitorder="little").view(np.int32)[None]
    return VocabularyMap(torch.from_numpy(own), theirs, mask)


def _texts(backend: tokenizers.Tokenizer, size: int) -> list[bytes | str | None]:
    """What each token adds to a text; how it is written, if it is special or adds nothing."""
    pieces = enumerate(token_bytes(backend, size))
    texts: list[bytes | str | None] = [data or backend.id_to_token(token) for token, data in pieces]
    for token, added in backend.get_added_tokens_decoder().items():
        if token < size:
            texts[token] = added.content
    return texts


def _places(among: Sequence[bytes | str | None], texts: Sequence[bytes | str | None]) -> IntArray:
    """[texts] where each first stands in `among`; -1 for none."""
    first = {text: at for at, text in reversed([*enumerate(among)])}
    return np.array([-1 if text is None else first.get(text, -1) for text in texts], np.int32)


def _last_pieces(backend: tokenizers.Tokenizer, texts: Sequence[bytes | str]) -> list[int]:
    """The last token of each text, the first of all for an empty one."""
    backend.no_truncation()
    backend.no_padding()
    written = [text if isinstance(text, str) else text.decode(errors="replace") for text in texts]
    encoded = BoundedEncoder(backend, "tokenizer.json").encode(written, special=False)
    return [encoding.ids[-1] if encoding.ids else 0 for encoding in encoded]


def map_draft_vocabulary(config: EngineConfig, draft: str, tokens: int, own_tokens: int) -> VocabularyMap | None:
    """How the tokens of the draft model at `draft` become the target's; None where they are the same, but for the last
    ones of one of them. A checkpoint without a tokenizer is believed if it has as many tokens. Raises as
    `map_vocabularies`."""
    target = locate_checkpoint(config.tokenizer or config.model)
    own = locate_checkpoint(draft)
    try:
        vocabularies = [read_tokenizer(checkpoint)[0].get_vocab() for checkpoint in (target, own)]
    except NotFound:
        if tokens == own_tokens:
            return None
        message = f"speculative_config: {draft} has another number of tokens than {config.model}, and no tokenizer"
        raise InvalidArgument(message, field="speculative_config") from None
    shared = min(tokens, own_tokens, *map(len, vocabularies))
    first, second = ({text: token for text, token in ids.items() if token < shared} for ids in vocabularies)
    if first == second:
        return None
    if config.speculation is not None and config.speculation.use_heterogeneous_vocab is False:
        message = f"speculative_config: {draft} has another vocabulary than {config.model}"
        raise InvalidArgument(f"{message}, and use_heterogeneous_vocab is false", field="speculative_config")
    return map_vocabularies(target, own, tokens, own_tokens)
