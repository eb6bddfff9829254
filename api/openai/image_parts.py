"""Images between the texts of a chat's messages, and what becomes of them with a model that reads text alone."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from ...core.errors import InvalidArgument
from ...core.media import MediaSource
from ...core.model import ModelConfig
from ...core.request import ChatMessage, Conversation, Prompt, prompt_media
from .json_body import convert_fields, field_error
from .known_fields import Shape, shape_of

UNSEEN = "[{}: it is here, but this model reads text alone and cannot see it]"
"""Stands where something was that is no text: an agent goes on, and its model knows why."""
UNSEEN_WARNING = "this model reads text alone; the text says that there was one: {}"
_LONGEST_TYPE = 100
_LONGEST_UUID = 256


class _ImageUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    detail: str | None = None


class _ImagePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's part with vLLM's `uuid`; `detail` changes nothing, for the model's own processor decides on the size."""

    type: str
    image_url: str | _ImageUrl | None = None
    detail: str | None = None
    uuid: str | None = None


IMAGE_PART_SHAPE: Shape = shape_of(_ImagePart, {"image_url": shape_of(_ImageUrl)})
IMAGE_PARTS = ("image_url", "input_image")
"""The types of parts that are images."""


def read_image(where: str, part: Mapping[str, Any], offset: int) -> MediaSource:
    """The image of the part at `where`, behind `offset` characters of the text. Raises `InvalidArgument` for one that
    says nothing of where it is."""
    image = convert_fields(part, _ImagePart, where)
    url = image.image_url.url if isinstance(image.image_url, _ImageUrl) else image.image_url or ""
    if len(image.uuid or "") > _LONGEST_UUID:
        raise field_error(f"{where}.uuid", f"may have at most {_LONGEST_UUID} characters")
    if not (url or image.uuid):
        raise field_error(f"{where}.image_url", "must be a URL, or an object with one")
    return MediaSource("image", url=url, uuid=image.uuid or "", field=f"{where}.image_url", offset=offset)


def refuse_unseen(media: Iterable[MediaSource], config: ModelConfig) -> None:
    """Raises `InvalidArgument` for a medium that the model cannot see."""
    for medium in media:
        if medium.kind not in config.media:
            message = f"{medium.field}: model '{config.name}' takes no {medium.kind}: it reads text alone"
            raise InvalidArgument(message, field=medium.field)


class SeenPrompt(NamedTuple):
    """A prompt without what its model cannot see, and warnings of that."""

    prompt: Prompt
    warnings: tuple[tuple[str, str], ...] = ()
    """Where the first of a kind was, and what its client is told."""


def describe_unseen(prompt: Prompt, config: ModelConfig) -> SeenPrompt:
    """The prompt, with a text where a medium stood that the model cannot see."""
    unseen = [medium for medium in prompt_media(prompt) if medium.kind not in config.media]
    if not unseen or not isinstance(prompt, Conversation):
        return SeenPrompt(prompt)
    messages = tuple(_described(message) if message.media else message for message in prompt.messages)
    warning = unseen[0].field.rpartition(".")[0], UNSEEN_WARNING.format(unseen[0].kind)
    return SeenPrompt(msgspec.structs.replace(prompt, messages=messages), (warning,))


def _described(message: ChatMessage) -> ChatMessage:
    lines: list[str] = []
    begin = 0
    for medium in message.media:
        lines += [message.content[begin : medium.offset], UNSEEN.format(_described_kind(medium))]
        begin = medium.offset
    lines.append(message.content[begin:])
    return msgspec.structs.replace(message, content="\n".join(filter(None, lines)), media=())


def _described_kind(medium: MediaSource) -> str:
    """The kind of a medium and, if its URL tells, the type of its file."""
    head = medium.url[: _LONGEST_TYPE + len("data:")].partition(";")[0]
    return f"{medium.kind}, {head.removeprefix('data:')}" if head.startswith("data:") else medium.kind
