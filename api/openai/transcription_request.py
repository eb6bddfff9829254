"""The forms of /v1/audio/transcriptions and /v1/audio/translations, and the requests that they become."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from ...core.media import MediaSource
from ...core.request import GenerateRequest
from ...core.sampling import SamplingParams
from ...core.speech import Speech, language_code
from ..http.forms import Form
from .json_body import IGNORED_FIELDS, NoOpValues, body_shape, convert_fields, field_error, reject_unsupported
from .known_fields import known_members

TranscriptFormat: TypeAlias = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity: TypeAlias = Literal["segment", "word"]
_TIMED: frozenset[TranscriptFormat] = frozenset(("srt", "verbose_json", "vtt"))
_STREAMED: frozenset[TranscriptFormat] = frozenset(("json", "text"))


class TranscriptionBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a form, but for its file."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: TranscriptFormat | None = None
    temperature: float | None = None
    timestamp_granularities: list[Granularity] = []
    stream: bool = False
    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


_LISTS = frozenset(("timestamp_granularities", "include", "languages", "keywords", "known_speaker_names"))
_NO_OPS: NoOpValues = {
    "chunking_strategy": ("auto",),
    "include": ([],),
    "languages": ([],),
    "keywords": ([],),
    "known_speaker_names": ([],),
    "known_speaker_references": ([],),
}
"""Fields that would change a transcript, and are not served. Sounds are always cut where they are silent."""
_FIELDS = frozenset(TranscriptionBody.__struct_fields__)
_SHAPE = body_shape(TranscriptionBody.__struct_fields__, _NO_OPS)


class ParsedTranscription(NamedTuple):
    """A form, read."""

    model: str | None
    request: GenerateRequest
    format: TranscriptFormat
    granularities: frozenset[Granularity]
    """What verbose_json has of the transcript's parts."""
    stream: bool
    members: Mapping[str, Any]
    """Its fields as a JSON body would have them, which routes may go by."""
    warning: str = ""


def parse_transcription(form: Form, request_id: str, translate: bool) -> ParsedTranscription:
    """Raises `InvalidArgument` for a form without a sound, and for a field that is wrong or not served; `field` names
    it."""
    file = form.files.get("file")
    if file is None:
        raise field_error("file", "is missing: send the sound as the part 'file', with a filename")
    if stray := next((name for name in form.files if name != "file"), ""):
        raise field_error(stray, "is a file; the form takes one, and its name is 'file'")
    if not file:
        raise field_error("file", "is empty")
    members, warning = known_members(_members(form), _SHAPE)
    reject_unsupported(members, _FIELDS | IGNORED_FIELDS, _NO_OPS, "")
    filled = {name: value for name, value in members.items() if name in _FIELDS and value != ""}
    body = convert_fields(filled, TranscriptionBody, strict=False)
    kind = body.response_format or "json"
    _check(body, kind, translate)
    speech = Speech(
        MediaSource("audio", file, field="file"),
        language=language_code(body.language or ""),
        translate=translate,
        context=body.prompt or "",
        timestamps=kind in _TIMED,
        no_speech=kind == "verbose_json",
        words="word" in body.timestamp_granularities,
    )
    request = GenerateRequest(
        id=f"transcription-{request_id}",
        speech=speech,
        sampling=SamplingParams(temperature=body.temperature, seed=body.seed),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    granularities = frozenset(body.timestamp_granularities or ("segment",))
    return ParsedTranscription(body.model, request, kind, granularities, body.stream, members, warning)


def _members(form: Form) -> dict[str, Any]:
    """The texts of a form by their names, those of lists without the brackets that some clients add."""
    members: dict[str, Any] = {}
    for written, texts in form.texts.items():
        name = written.removesuffix("[]")
        if name in _LISTS:
            members.setdefault(name, []).extend(texts)
        elif len(texts) > 1:
            raise field_error(name, f"comes {len(texts)} times")
        else:
            members[name] = texts[0]
    return members


def _check(body: TranscriptionBody, kind: TranscriptFormat, translate: bool) -> None:
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        raise field_error("temperature", f"must be between 0 and 1, got {body.temperature:g}")
    if "word" in body.timestamp_granularities and translate:
        raise field_error("timestamp_granularities", ": times of words are of transcriptions alone")
    if body.timestamp_granularities and kind != "verbose_json":
        raise field_error("timestamp_granularities", "needs the response_format verbose_json")
    if body.stream and kind not in _STREAMED:
        raise field_error("stream", f"needs a response_format of {' or '.join(sorted(_STREAMED))}, got {kind}")
    if translate and body.stream:
        raise field_error("stream", "is of transcriptions alone")
