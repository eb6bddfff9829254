"""A checkpoint's own generation parameters: where a text ends, and the defaults of sampling."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument, shorten
from ..core.sampling import SamplingParams
from .checkpoint_files import read_json
from .gguf_file import read_gguf
from .gguf_tokenizer import read_gguf_generation
from .tokenizer import Tokenizer

log = logging.getLogger(__name__)

_SAMPLING = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}


class GenerationDefaults(NamedTuple):
    """The model's defaults: `eos` tokens end a text; the others replace sampling parameters that are None."""

    eos: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    decoder_start: tuple[int, ...] = ()
    """What a decoder that writes while an encoder reads the prompt begins with."""
    suppressed: tuple[int, ...] = ()
    """Tokens that such a decoder never chooses."""

    def limited_to(self, vocab_size: int) -> "GenerationDefaults":
        """These defaults without `eos` tokens beyond the vocabulary, which are logged."""
        eos = tuple(token for token in self.eos if 0 <= token < vocab_size)
        strange = ", ".join(str(token) for token in self.eos if token not in eos)
        if strange:
            log.warning("eos_token_id %s is outside the vocabulary of %d tokens and ends no text", strange, vocab_size)
        return self._replace(eos=eos)


def read_generation_defaults(directory: Path, tokenizer: Tokenizer) -> GenerationDefaults:
    """Read generation_config.json, or a GGUF file's metadata. If it lacks eos, that is config.json's; the tokenizer's
    counts besides, unless an encoder reads the prompt. Raises `InvalidArgument` for a value of the wrong kind or range.
    """
    if directory.is_file():
        file = directory
        generation = read_gguf_generation(read_gguf(directory), tokenizer.added_tokens(tokenizer.size))
    else:
        file = directory / "generation_config.json"
        generation = read_json(file)
    config = {} if directory.is_file() else read_json(directory / "config.json")
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    own = tokenizer.token_id("eos_token")
    try:
        ids = tuple(map(int, [eos] if isinstance(eos, int) else eos or ()))
        values = {name: kind(value) for name, kind in _SAMPLING.items() if (value := generation.get(name)) is not None}
    except (TypeError, ValueError, OverflowError) as error:
        where = f"{file}, or the eos_token_id of config.json"
        raise InvalidArgument(f"{where}: a field has a value of the wrong kind: {error}") from error
    if invalid := [token for token in ids if not 0 <= token < 1 << 31]:
        raise InvalidArgument(f"{file}, or config.json: eos_token_id {shorten(repr(invalid[0]))} is no token's number")
    if own is not None and own not in ids and not (ids and config.get("is_encoder_decoder")):
        ids = (*ids, own)
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        SamplingParams(**values)
    except InvalidArgument as error:
        raise InvalidArgument(f"{file}: {error.message}") from None
    start, suppressed = _decoder_tokens(directory, config, generation)
    return GenerationDefaults(ids, **values)._replace(decoder_start=start, suppressed=suppressed)


def _decoder_tokens(
    directory: Path, config: dict[str, Any], generation: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`decoder_start` and `suppressed` of a model whose decoder writes while an encoder reads."""
    if not config.get("is_encoder_decoder"):
        return (), ()
    known = {**config, **{name: value for name, value in generation.items() if value is not None}}
    start = known.get("decoder_start_token_id")
    begins = [known.get("bos_token_id") if start is None else start, known.get("forced_bos_token_id")]
    words = known.get("bad_words_ids") or []
    banned = [*(known.get("suppress_tokens") or []), *(word[0] for word in words if len(word) == 1)]
    for token in (*begins, *banned):
        if token is not None and type(token) is not int:
            message = f"{directory}: decoder_start_token_id, forced_bos_token_id, suppress_tokens or bad_words_ids"
            raise InvalidArgument(f"{message}: {shorten(repr(token))} is no token's number")
    return tuple(token for token in begins if token is not None), tuple(token for token in banned if token >= 0)
