"""Sounds that are written down: what is asked of a model that hears, and what it says."""

from collections.abc import Mapping

import msgspec

from .errors import InvalidArgument
from .media import MediaSource

_CODES_AND_NAMES = """
en english zh chinese de german es spanish ru russian ko korean fr french ja japanese pt portuguese tr turkish pl polish
ca catalan nl dutch ar arabic sv swedish it italian id indonesian hi hindi fi finnish vi vietnamese he hebrew
uk ukrainian el greek ms malay cs czech ro romanian da danish hu hungarian ta tamil no norwegian th thai ur urdu
hr croatian bg bulgarian lt lithuanian la latin mi maori ml malayalam cy welsh sk slovak te telugu fa persian
lv latvian bn bengali sr serbian az azerbaijani sl slovenian kn kannada et estonian mk macedonian br breton eu basque
is icelandic hy armenian ne nepali mn mongolian bs bosnian kk kazakh sq albanian sw swahili gl galician mr marathi
pa punjabi si sinhala km khmer sn shona yo yoruba so somali af afrikaans oc occitan ka georgian be belarusian tg tajik
sd sindhi gu gujarati am amharic yi yiddish lo lao uz uzbek fo faroese ht haitian_creole ps pashto tk turkmen nn nynorsk
mt maltese sa sanskrit lb luxembourgish my myanmar bo tibetan tl tagalog mg malagasy as assamese tt tatar haw hawaiian
ln lingala ha hausa ba bashkir jw javanese su sundanese yue cantonese
"""
_WORDS = _CODES_AND_NAMES.split()

LANGUAGE_NAMES: Mapping[str, str] = {
    code: name.replace("_", " ") for code, name in zip(_WORDS[::2], _WORDS[1::2], strict=True)
}
"""The English names of the languages that such models know, by the codes in their vocabularies."""

_CODES = {name: code for code, name in LANGUAGE_NAMES.items()}


def language_code(text: str) -> str:
    """The code of a language that is given by its code or its English name, however written; empty for none. Raises
    `InvalidArgument`."""
    language = text.strip().lower()
    code = _CODES.get(language, language)
    if code and code not in LANGUAGE_NAMES:
        message = f"language must be a code of ISO 639-1, such as en, or an English name, got {text!r}"
        raise InvalidArgument(message, field="language")
    return code


class Speech(msgspec.Struct, frozen=True):
    """A sound to write down."""

    sound: MediaSource
    language: str = ""
    """A code of `LANGUAGE_NAMES`; empty: the model tells which one is spoken."""
    translate: bool = False
    """Whether it is written down in English, whatever is spoken."""
    context: str = ""
    """A text whose words and style the transcript follows, as if it had come before."""
    timestamps: bool = False
    """Whether the parts of the transcript have times within the sound."""
    no_speech: bool = False
    """Whether they have the probability that nobody speaks."""
    words: bool = False
    """Whether their words have times, too; only with `timestamps`."""


class TranscriptWord(msgspec.Struct, frozen=True):
    """A word with the punctuation beside it, or a character of a language that has no spaces."""

    text: str
    """As it stands in the segment, with the space before it."""
    start: float
    """Seconds from the beginning of the sound, as `end` is."""
    end: float


class TranscriptSegment(msgspec.Struct, frozen=True):
    """A part of a transcript."""

    start: float
    """Seconds from the beginning of the sound, as `end` is."""
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    """The temperature at which it was heard."""
    mean_logprob: float
    """The mean of the tokens of its window."""
    compression: float
    """How many times smaller zlib makes the text of its window."""
    no_speech: float
    """The probability that nobody speaks in its window; 0 where nobody asked for it."""
    window: float
    """The second at which its window begins."""
    words: tuple[TranscriptWord, ...] = ()
    """Where they were asked for."""


class Transcript(msgspec.Struct, frozen=True):
    """A transcript, or what was added to it."""

    language: str
    """The code of the language that is spoken."""
    duration: float
    """Seconds of the whole sound."""
    segments: tuple[TranscriptSegment, ...] = ()
