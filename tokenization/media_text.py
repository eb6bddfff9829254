"""Where media stand in the text of a prompt: between the parts of a message, and then as the text that the model's
processor puts in place of the template's one token.

Knows nothing of files and encoders.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument
from ..core.request import ChatMessage, Conversation, TextWithMedia


class MediaText(NamedTuple):
    """What stands for the media of one prompt in its text."""

    token: str
    """The text that a chat template has for a medium."""
    placeholders: tuple[str, ...]
    """What comes in its place, one for each medium, in order."""
    adds_special: bool = False
    """Whether a rendered chat gets what the tokenizer adds to a text, unless it begins with that: processors of images
    add it, and templates that are made for them may count on it."""


def message_parts(message: ChatMessage) -> list[dict[str, Any]]:
    """A message's content as chat templates for media expect it: texts, and media between them."""
    parts: list[dict[str, Any]] = []
    begin = 0
    for medium in message.media:
        if medium.offset > begin:
            parts.append({"type": "text", "text": message.content[begin : medium.offset]})
            begin = medium.offset
        parts.append({"type": medium.kind})
    if begin < len(message.content):
        parts.append({"type": "text", "text": message.content[begin:]})
    return parts


def text_with_tokens(message: ChatMessage, token: str) -> str:
    """A message's content for a template that takes texts alone: each medium is a line with its token."""
    pieces = [part.get("text") or f"{token}\n" for part in message_parts(message)]
    return "".join(pieces).rstrip("\n") if message.media and not message.content else "".join(pieces)


def text_with_places(prompt: TextWithMedia, media: MediaText | None) -> str:
    """Its text with a token for each medium, where it has none itself in front."""
    if media is None:
        return prompt.text
    return prompt.text if media.token in prompt.text else media.token * len(prompt.media) + prompt.text


def check_texts(conversation: Conversation, media: MediaText) -> None:
    """Raises `InvalidArgument` if a text of a conversation with media has the token of a medium: it would be taken for
    one."""
    if not media.placeholders:
        return
    for index, message in enumerate(conversation.messages):
        if media.token in message.content or media.token in message.reasoning:
            field = f"messages[{index}].content"
            raise InvalidArgument(f"{field} has {media.token}, which stands for a medium", field=field)


def expand_media(text: str, media: MediaText, field: str) -> str:
    """The text of a prompt with the placeholders in place of tokens. Raises `InvalidArgument` by `field` unless it has
    one token for each medium."""
    if not media.placeholders:
        return text
    pieces = text.split(media.token)
    if len(pieces) - 1 != len(media.placeholders):
        message = f"the prompt has {len(pieces) - 1} places {media.token} for {len(media.placeholders)} media"
        raise InvalidArgument(f"{field}: {message}", field=field)
    ends: Sequence[str] = (*media.placeholders, "")
    return "".join(piece + end for piece, end in zip(pieces, ends, strict=True))
