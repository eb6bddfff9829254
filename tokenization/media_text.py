"""Where media stand in the text of a prompt: between the parts of a message, and then as the text that the model's
processor puts in place of the template's one token.

Knows nothing of files and encoders.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..core.errors import InvalidArgument
from ..core.media import MediaKind, plural_nouns
from ..core.request import ChatMessage, Conversation, TextWithMedia


class MediaText(NamedTuple):
    """What stands for the media of one prompt in its text."""

    tokens: Mapping[MediaKind, str]
    """The text that a chat template has for a medium of each kind."""
    placeholders: tuple[tuple[MediaKind, str], ...]
    """What comes in its place, one for each medium, in order; empty where the prompt itself has it."""
    adds_special: bool = False
    """Whether a rendered chat gets what the tokenizer adds to a text, unless it begins with that: processors of images
    add it, and templates that are made for them may count on it."""


def message_parts(message: ChatMessage) -> list[dict[str, Any]]:
    """A message's content as chat templates for media expect it: texts, and media between them."""
    places = [(medium.offset, medium.kind) for medium in message.media] + [(at, "") for at in message.breaks]
    parts: list[dict[str, Any]] = []
    begin = 0
    for offset, kind in sorted(places, key=lambda place: place[0]):
        if offset > begin:
            parts.append({"type": "text", "text": message.content[begin:offset]})
        begin = offset
        if kind:
            parts.append({"type": kind})
        else:
            begin += 1  # the newline
    if begin < len(message.content):
        parts.append({"type": "text", "text": message.content[begin:]})
    return parts


def text_with_tokens(message: ChatMessage, tokens: Mapping[MediaKind, str]) -> str:
    """The content of a message with media for a template that takes texts alone: each medium is a line with its
    token."""
    parts = message_parts(replace(message, breaks=()))
    pieces = [part.get("text") or f"{tokens.get(part['type'], '')}\n" for part in parts]
    return "".join(pieces).rstrip("\n") if not message.content else "".join(pieces)


def text_with_places(prompt: TextWithMedia, media: MediaText | None) -> str:
    """Its text with a token for each medium, where it has none itself in front."""
    if media is None or any(token in prompt.text for token in media.tokens.values()):
        return prompt.text
    return "".join(media.tokens[medium.kind] for medium in prompt.media) + prompt.text


def check_texts(conversation: Conversation, media: MediaText) -> None:
    """Raises `InvalidArgument` if a text of a conversation with media has the token of a medium: it would be taken for
    one."""
    if not media.placeholders:
        return
    for index, message in enumerate(conversation.messages):
        for token in media.tokens.values():
            if token in message.content or token in message.reasoning:
                field = f"messages[{index}].content"
                raise InvalidArgument(f"{field} has {token}, which stands for a medium", field=field)


def expand_media(text: str, media: MediaText, field: str) -> str:
    """The text of a prompt with the placeholders in place of tokens. Raises `InvalidArgument` by `field` unless it has
    one token for each medium, where these have any."""
    if not media.placeholders:
        return text
    left: dict[str, Iterator[str]] = {}
    for kind, token in media.tokens.items():
        own = [placeholder for of_kind, placeholder in media.placeholders if of_kind == kind]
        if own and not any(own):
            if field == "messages":
                message = "rows of an image need the image_grid_thw that leads to them: other texts stand between them"
                raise InvalidArgument(f"{field}: {message}", field=field)
            continue
        if not all(own):
            message = f"{plural_nouns((kind,))} that come as rows can't stand beside others in prompts of this model"
            raise InvalidArgument(f"{field}: {message}", field=field)
        places = text.count(token)
        if len(own) != places == sum(placeholder.count(token) for placeholder in own):
            continue  # the prompt has them written out
        if places != len(own):
            message = f"the prompt has {places} places {token} for {len(own)} {plural_nouns((kind,))}"
            raise InvalidArgument(f"{field}: {message}", field=field)
        left[token] = iter(own)
    return re.sub("|".join(map(re.escape, left)), lambda match: next(left[match[0]]), text) if left else text
