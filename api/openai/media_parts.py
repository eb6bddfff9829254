"""Images and sounds between the texts of a chat's messages, and what becomes of them with a model that takes none."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ...core.errors import InvalidArgument
from ...core.media import KIND_NOUNS, MediaKind, MediaSource
from ...core.model import ModelConfig
from ...core.request import ChatMessage, Conversation, Prompt, prompt_media
from ...core.structured_outputs import json_text
from .json_body import convert_fields, field_error, shortened
from .known_fields import Shape, shape_of

UNSEEN = "[{}: it is here, but this model cannot read it]"
"""Stands where something was that is no text: an agent goes on, and its model knows why."""
UNSEEN_WARNING = "this model takes none; the text says that there was one: {}"
UNSERVED_FILE_WARNING = "file_id is not served; the text says that there was one: {}"
_VIDEOS = ("video_url", "input_video", "video")
_LONGEST_TYPE = 100
_LONGEST_UUID, _LONGEST_FORMAT, _LONGEST_OPTIONS = 256, 16, 1000
_OPTIONS = "mm_processor_kwargs"


class _ImageUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    detail: str | None = None


class _ImagePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's part with vLLM's `uuid`; `detail` changes nothing, for the model's own processor decides on the size."""

    type: str
    image_url: str | _ImageUrl | None = None
    detail: str | None = None
    uuid: str | None = None


class _Rows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    image_embeds: str
    image_grid_thw: list[int] | None = None


class _RowsPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's part for what an encoder elsewhere made of an image: a file of safetensors or `.npy`, in base64."""

    type: str
    image_embeds: str | _Rows | None = None
    uuid: str | None = None


class _SoundFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    data: str
    format: str | None = None


class _SoundUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str


class _SoundPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's part with a file in base64, whose content tells its format, or vLLM's with a URL; with vLLM's `uuid`."""

    type: str
    input_audio: _SoundFile | None = None
    audio_url: str | _SoundUrl | None = None
    uuid: str | None = None


_IMAGE_SHAPE = shape_of(_ImagePart, {"image_url": shape_of(_ImageUrl)})
_SOUND_SHAPE = shape_of(_SoundPart, {"input_audio": shape_of(_SoundFile), "audio_url": shape_of(_SoundUrl)})
_ROWS_SHAPE = shape_of(_RowsPart, {"image_embeds": shape_of(_Rows)})
MEDIA_SHAPES: Mapping[str, Shape] = {
    "image_embeds": _ROWS_SHAPE,
    "image_url": _IMAGE_SHAPE,
    "input_image": _IMAGE_SHAPE,
    "input_audio": _SOUND_SHAPE,
    "audio_url": _SOUND_SHAPE,
}
"""By their types, the parts that are media."""


def read_medium(where: str, part: Mapping[str, Any], offset: int) -> MediaSource:
    """The medium of the part at `where`, behind `offset` characters of the text. Raises `InvalidArgument` for one that
    says nothing of where it is."""
    shape = MEDIA_SHAPES[part["type"]]
    read = _read_sound if shape is _SOUND_SHAPE else _read_rows if shape is _ROWS_SHAPE else _read_image
    medium = read(where, part, offset)
    if len(medium.uuid) > _LONGEST_UUID:
        raise field_error(f"{where}.uuid", f"may have at most {_LONGEST_UUID} characters")
    return medium


def _read_image(where: str, part: Mapping[str, Any], offset: int) -> MediaSource:
    image = convert_fields(part, _ImagePart, where)
    url = image.image_url.url if isinstance(image.image_url, _ImageUrl) else image.image_url or ""
    if not (url or image.uuid):
        raise field_error(f"{where}.image_url", "must be a URL, or an object with one")
    return MediaSource("image", url=url, uuid=image.uuid or "", field=f"{where}.image_url", offset=offset)


def _read_rows(where: str, part: Mapping[str, Any], offset: int) -> MediaSource:
    image = convert_fields(part, _RowsPart, where)
    field = f"{where}.image_embeds"
    rows = image.image_embeds or ""
    rows = _Rows(image_embeds=rows) if isinstance(rows, str) else rows
    if not (rows.image_embeds or image.uuid):
        raise field_error(field, "must be a file of safetensors or .npy in base64, or an object with one")
    grid = rows.image_grid_thw
    if grid is not None and (len(grid) != 3 or min(grid) < 1):
        raise field_error(f"{field}.image_grid_thw", "must be three positive whole numbers")
    time, height, width = grid or (0, 0, 0)
    url = f"data:;base64,{rows.image_embeds}" if rows.image_embeds else ""
    return MediaSource("image", b"", url, image.uuid or "", field, offset, True, (time, height, width))


def _read_sound(where: str, part: Mapping[str, Any], offset: int) -> MediaSource:
    sound = convert_fields(part, _SoundPart, where)
    field = f"{where}.{'audio_url' if sound.audio_url is not None else 'input_audio'}"
    if sound.audio_url is not None and sound.input_audio is not None:
        raise field_error(field, "must not be there beside input_audio")
    url = sound.audio_url.url if isinstance(sound.audio_url, _SoundUrl) else sound.audio_url or ""
    if sound.input_audio is not None:
        form = sound.input_audio.format
        if form is not None and (len(form) > _LONGEST_FORMAT or not form.isalnum()):
            raise field_error(f"{field}.format", "must be the name of a format, such as wav")
        url = f"data:{'' if form is None else f'audio/{form}'};base64,{sound.input_audio.data}"
    if not (url or sound.uuid):
        raise field_error(field, "must be a URL, or a file as {data, format}")
    return MediaSource("audio", url=url, uuid=sound.uuid or "", field=field, offset=offset)


def processor_options(given: Mapping[str, Any] | None) -> str:
    """vLLM's `mm_processor_kwargs`, as of `MediaSource.options`. Raises `InvalidArgument` for a long one."""
    written = json_text(dict(sorted(given.items())), _OPTIONS) if given else ""
    if len(written) > _LONGEST_OPTIONS:
        raise field_error(_OPTIONS, f"may have at most {_LONGEST_OPTIONS} characters")
    return written


def with_options(messages: tuple[ChatMessage, ...], options: str) -> tuple[ChatMessage, ...]:
    """The messages with what their request says of the processor, if it does, at each file of an image. Raises
    `InvalidArgument` if all their media are others."""
    if not options:
        return messages
    media = [medium for message in messages for medium in message.media]
    if media and not any(map(_is_image_file, media)):
        other = "an image that was encoded elsewhere" if media[0].encoded else f"a {KIND_NOUNS[media[0].kind]}"
        raise field_error(_OPTIONS, f": it is about files of images, and the messages have none: they have {other}")
    return tuple(_with_options(message, options) if message.media else message for message in messages)


def _is_image_file(medium: MediaSource) -> bool:
    return medium.kind == "image" and not medium.encoded


def _with_options(message: ChatMessage, options: str) -> ChatMessage:
    media = (replace(medium, options=options) if _is_image_file(medium) else medium for medium in message.media)
    return replace(message, media=tuple(media))


def unused_options(given: Mapping[str, Any] | None, prompt: Prompt) -> tuple[str, ...]:
    """The warning of a request that says how large its images become, and has none."""
    return (f"{_OPTIONS}: without effect, for there is no image",) if given and not prompt_media(prompt) else ()


def part_complaint(kind: Any, allowed: Iterable[str]) -> str:
    """What is wrong with a part of the type `kind`, where it may be one of those that are `allowed`."""
    if kind in _VIDEOS:
        return f": {shortened(kind)} is not supported: no model here takes videos; frames may come as images"
    return f"must be one of {', '.join(allowed)}, got {shortened(kind)}"


def refuse_unseen(media: Iterable[MediaSource], config: ModelConfig) -> None:
    """Raises `InvalidArgument` for a medium that the model cannot see or hear."""
    for medium in media:
        if medium.kind not in config.media:
            takes = " and ".join(("text", *sorted(config.media)))
            message = f"{medium.field}: model '{config.name}' takes no {medium.kind}: it reads {takes} alone"
            reason = config.refused_media.get(medium.kind, "")
            raise InvalidArgument(f"{message} ({reason})" if reason else message, field=medium.field)


class SeenPrompt(NamedTuple):
    """A prompt without what its model cannot see or hear, and warnings of that."""

    prompt: Prompt
    warnings: tuple[tuple[str, str], ...] = ()
    """Where the first of each kind was, and what its client is told."""


def describe_unseen(prompt: Prompt, config: ModelConfig) -> SeenPrompt:
    """The prompt, with a text where a medium stood that the model cannot see or hear."""
    unseen = [medium for medium in prompt_media(prompt) if medium.kind not in config.media]
    if not unseen or not isinstance(prompt, Conversation):
        return SeenPrompt(prompt)
    messages = tuple(_described(message, config.media) if message.media else message for message in prompt.messages)
    firsts = {medium.kind: medium.field.rpartition(".")[0] for medium in reversed(unseen)}
    warnings = tuple((firsts[kind], UNSEEN_WARNING.format(kind)) for kind in sorted(firsts))
    return SeenPrompt(replace(prompt, messages=messages), warnings)


def _described(message: ChatMessage, seen: frozenset[MediaKind]) -> ChatMessage:
    """The message with a line for each medium that is not of the kinds that are `seen`."""
    lines, media, begin = [""], [], 0
    for medium in message.media:
        lines[-1] += message.content[begin : medium.offset]
        begin = medium.offset
        if medium.kind in seen:
            media.append(replace(medium, offset=len("\n".join(filter(None, lines)))))
        else:
            lines += [UNSEEN.format(_described_kind(medium)), ""]
    lines[-1] += message.content[begin:]
    return replace(message, content="\n".join(filter(None, lines)), media=tuple(media), breaks=())


def _described_kind(medium: MediaSource) -> str:
    """The kind of a medium and, if its URL tells, the type of its file."""
    scheme, _, kind = medium.url[: _LONGEST_TYPE + len("data:")].partition(";")[0].partition(":")
    return f"{medium.kind}, {kind}" if scheme == "data" and kind else medium.kind
