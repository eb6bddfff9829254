"""The special tokens of a model that writes down sounds, and which tokens its checkpoint never wants."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument
from ..core.speech import LANGUAGE_NAMES
from .checkpoint_files import read_json
from .tokenizer import Tokenizer

_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
SECONDS_A_TIME = 0.02
"""Between a token that is a time and the next."""


class SpeechTokens(NamedTuple):
    """The ids that Whisper's decoding goes by."""

    start: int
    """Begins a transcript."""
    end: int
    """Ends one. All ids of text are lower, all of special tokens and times are higher."""
    no_timestamps: int
    """Says in a prompt that no times are wanted; the times follow it in the vocabulary."""
    no_speech: int
    """As likely behind `start` as it is that nobody speaks."""
    previous: int | None
    """Begins what came before the transcript."""
    languages: Mapping[str, int]
    """By code; none of a model that knows English alone."""
    transcribe: int | None
    translate: int | None
    suppressed: tuple[int, ...] = ()
    """Never chosen."""
    suppressed_first: tuple[int, ...] = ()
    """Not chosen as a transcript's first token."""
    most_initial: int | None = None
    """The first time is no later than so many times behind 0."""

    @property
    def first_time(self) -> int:
        return self.no_timestamps + 1


def read_speech_tokens(directory: Path, tokenizer: Tokenizer, vocab_size: int) -> SpeechTokens:
    """Read generation_config.json, and of the tokenizer what that does not say. Raises `InvalidArgument` for a
    checkpoint that lacks a token, or whose lists of them are none."""
    file = directory / "generation_config.json"
    generation = read_json(file)
    added = tokenizer.added_tokens(vocab_size)

    def named(field: str, *names: str) -> int | None:
        value = generation.get(field)
        return value if isinstance(value, int) else next((added[name] for name in names if name in added), None)

    def needed(field: str, *names: str) -> int:
        token = named(field, *names)
        if token is None or not 0 <= token < vocab_size:
            raise InvalidArgument(f"{directory} has no token {names[0]}, which transcripts need")
        return token

    no_timestamps = needed("no_timestamps_token_id", "<|notimestamps|>")
    no_speech = named("", *_NO_SPEECH)
    most_initial = generation.get("max_initial_timestamp_index")
    return SpeechTokens(
        start=needed("decoder_start_token_id", "<|startoftranscript|>"),
        end=needed("eos_token_id", "<|endoftext|>"),
        no_timestamps=no_timestamps,
        no_speech=no_timestamps - 1 if no_speech is None else no_speech,
        previous=named("prev_sot_token_id", "<|startofprev|>"),
        languages=_languages(generation, added),
        transcribe=named("", "<|transcribe|>"),
        translate=named("", "<|translate|>"),
        suppressed=_ids(generation, "suppress_tokens", vocab_size),
        suppressed_first=_ids(generation, "begin_suppress_tokens", vocab_size),
        most_initial=most_initial if isinstance(most_initial, int) else None,
    )


def _languages(generation: Mapping[str, Any], added: Mapping[str, int]) -> dict[str, int]:
    if generation.get("is_multilingual") is False:
        return {}
    named = generation.get("lang_to_id")
    known = named if isinstance(named, dict) else added
    ids = {code: known.get(f"<|{code}|>") for code in LANGUAGE_NAMES}
    return {code: token for code, token in ids.items() if isinstance(token, int)}


def _ids(generation: Mapping[str, Any], field: str, vocab_size: int) -> tuple[int, ...]:
    ids = generation.get(field) or ()
    if not isinstance(ids, list | tuple) or not all(isinstance(token, int) for token in ids):
        raise InvalidArgument(f"generation_config.json: {field} must be a list of token ids")
    return tuple(token for token in ids if 0 <= token < vocab_size)
