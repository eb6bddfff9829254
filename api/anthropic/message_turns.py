"""The turns of a body of /v1/messages become the messages of a chat body.

https://docs.anthropic.com/en/api/messages. Knows nothing of models and templates.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from ...core.structured_outputs import json_text
from ..openai.json_body import convert_fields, field_error, reject_unsupported, shortened
from ..openai.known_fields import Shape, ShapeByType, shape_of
from ..openai.media_parts import UNSEEN, UNSEEN_WARNING, UNSERVED_FILE_WARNING

JsonObject: TypeAlias = dict[str, Any]

_BILLING = "x-anthropic-billing-header:"
"""The beginning of a system block that Claude Code changes with every request. It is not for the model, and would part
every prompt from the prefix cache."""

_FAILED = "Error: "
"""Stands before the result of a call that has failed: chat templates have no other word for it."""


class _ContentBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    cache_control: Any = None


class TextBlock(_ContentBlock, frozen=True, kw_only=True):
    text: str
    citations: Any = None


class ThinkingBlock(_ContentBlock, frozen=True, kw_only=True):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_ContentBlock, frozen=True, kw_only=True):
    data: str


class ToolUseBlock(_ContentBlock, frozen=True, kw_only=True):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: None = None


class ToolResultBlock(_ContentBlock, frozen=True, kw_only=True):
    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None
    toolset_name: None = None


class ImageBlock(_ContentBlock, frozen=True, kw_only=True):
    source: dict[str, Any]


class DocumentBlock(_ContentBlock, frozen=True, kw_only=True):
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: Any = None


class SearchResultBlock(_ContentBlock, frozen=True, kw_only=True):
    source: str
    title: str
    content: list[Any]
    citations: Any = None


class ToolReferenceBlock(_ContentBlock, frozen=True, kw_only=True):
    """A tool that a search for tools has found."""

    tool_name: str


class ForeignBlock(_ContentBlock, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The account of one of Anthropic's own tools, in an answer of its API."""


BlockKinds: TypeAlias = Mapping[str, type[_ContentBlock]]

_TEXTS: BlockKinds = {"text": TextBlock}
_SHOWN: BlockKinds = {
    **_TEXTS,
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
_RESULTS: BlockKinds = {**_SHOWN, "tool_reference": ToolReferenceBlock}
_FOREIGN: BlockKinds = dict.fromkeys(
    (
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
        "compaction",
    ),
    ForeignBlock,
)
_BLOCKS: Mapping[str, BlockKinds] = {
    "user": {**_SHOWN, "tool_result": ToolResultBlock, "container_upload": ForeignBlock},
    "assistant": {
        **_TEXTS,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
        **_FOREIGN,
    },
    "system": _TEXTS,
}
"""By the role of a turn: the blocks that it may have."""


def _shapes() -> ShapeByType:
    kinds = {kind: struct for kinds in (*_BLOCKS.values(), _RESULTS) for kind, struct in kinds.items()}
    shapes = {kind: shape_of(struct) for kind, struct in kinds.items() if struct is not ForeignBlock}
    inside = ShapeByType(dict(shapes))
    for kind in ("tool_result", "search_result"):
        shapes[kind] = shapes[kind]._replace(inner={"content": inside})
    return ShapeByType(shapes)


BLOCK_SHAPE = _shapes()
TURN_SHAPE = Shape(frozenset(("role", "content")), {"content": BLOCK_SHAPE})


class _Turn:
    """A message that is put together. `answers`: the call that it is the result of."""

    def __init__(self, role: str, answers: str = "") -> None:
        self.role = role
        self.parts: list[str | JsonObject] = []
        """Texts, and images in the form of a chat's parts."""
        self.thoughts: list[str] = []
        self.calls: list[JsonObject] = []
        self.answers = answers

    def message(self) -> JsonObject:
        """The message of a chat, without what it has not."""
        parts = [part for part in self.parts if part]
        texts = [part for part in parts if isinstance(part, str)]
        content: str | list[JsonObject] = "\n".join(texts)
        if len(texts) < len(parts):
            content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        members = {"role": self.role, "content": content, "tool_calls": self.calls}
        members |= {"reasoning": "\n".join(self.thoughts), "tool_call_id": self.answers}
        return {name: value for name, value in members.items() if value or name == "content"}


class ChatTurns:
    """The messages that turns become, in order: one for the turns of a role that follow each other, one for each result
    of a call."""

    def __init__(self) -> None:
        self.origins: dict[str, str] = {}
        """By the path of a message, or of a part of it: the path of what it was made of."""
        self.warnings: list[str] = []
        """The parts that were left out, for the client."""
        self._turns: list[_Turn] = []
        self._called: set[str] = set()
        self._noted: set[str] = set()

    def messages(self) -> list[JsonObject]:
        return [turn.message() for turn in self._turns]

    @property
    def answerable(self) -> bool:
        """Whether anybody but the system has said something."""
        return any(turn.role != "system" for turn in self._turns)

    def add_system(self, system: str | list[Any]) -> None:
        """Add what the body's `system` says. Raises `InvalidArgument` for a block that is no text."""
        texts = [system] if isinstance(system, str) else [block.text for block in _text_blocks(system, "system")]
        instructions = [text for text in texts if text and not text.startswith(_BILLING)]
        if instructions:
            self._turn("system", "system").parts += instructions

    def add_turn(self, members: Mapping[str, Any], where: str) -> None:
        """Add one of the body's messages, which lies at `where`. Raises `InvalidArgument` for one that cannot be read;
        `field` is its path."""
        reject_unsupported(members, frozenset(("role", "content")), {}, f"{where}.")
        role, content = members.get("role"), members.get("content")
        if not isinstance(role, str) or role not in _BLOCKS:
            raise field_error(f"{where}.role", f"must be one of {', '.join(_BLOCKS)}")
        if not isinstance(content, str | list):
            raise field_error(f"{where}.content", "must be a string or a list of content blocks")
        if isinstance(content, str):
            self._turn(role, where).parts.append(content)
            return
        for index, part in enumerate(content):
            place = f"{where}.content[{index}]"
            self._add_block(role, _block(part, _BLOCKS[role], place), where, place)

    def continues(self) -> bool:
        """Whether the answer goes on with the last message. Raises `InvalidArgument` if that can't be."""
        last, origin = self._turns[-1], self.origins[f"messages[{len(self._turns) - 1}]"]
        if last.role != "assistant":
            return False
        if last.calls:
            raise field_error(origin, ": there is no tool_result after its tool_use")
        if not any(part.strip() for part in last.parts if isinstance(part, str)):
            raise field_error(f"{origin}.content", ": there is no text for the answer to go on with")
        return True

    def _add_block(self, role: str, block: _ContentBlock, where: str, place: str) -> None:
        """`where` and `place`: the paths of the turn and of the block."""
        match block:
            case TextBlock():
                self._turn(role, where).parts.append(block.text)
            case ThinkingBlock():
                self._turn(role, where).thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                self.warnings.append(f"{place}: redacted thinking cannot be read here, and is left out")
            case ForeignBlock():
                self._note(f"{block.type} is of Anthropic's own tools, and is left out", place)
            case ImageBlock() | DocumentBlock() | SearchResultBlock():
                self._turn(role, where)
                self._add_part(self._shown_part(block, place), place)
            case ToolUseBlock():
                self._add_call(block, where, place)
            case ToolResultBlock():
                self._add_result(block, place)

    def _add_call(self, block: ToolUseBlock, where: str, place: str) -> None:
        calls = self._turn("assistant", where).calls
        path = f"messages[{len(self._turns) - 1}].tool_calls[{len(calls)}]"
        self.origins |= {path: place, f"{path}.function": place}
        arguments = json_text(block.input, f"{place}.input")
        calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
        self._called.add(block.id)

    def _add_result(self, block: ToolResultBlock, place: str) -> None:
        if block.tool_use_id not in self._called:
            field = f"{place}.tool_use_id"
            raise field_error(
                field, f": no message of the assistant before it has a tool_use {shortened(block.tool_use_id)}"
            )
        self._add(_Turn("tool", block.tool_use_id), place)
        content = block.content or ""
        if isinstance(content, str):
            self._turns[-1].parts.append(_FAILED + content if block.is_error else content)
            return
        blocks = self._blocks(content, _RESULTS, f"{place}.content")
        if not any(isinstance(inner, ImageBlock) for inner, _ in blocks):
            text = "\n".join(self._shown_text(inner, path) for inner, path in blocks)
            self._turns[-1].parts.append(_FAILED + text if block.is_error else text)
            return
        failed = _FAILED if block.is_error else ""
        for inner, path in blocks:
            part = self._shown_part(inner, path)
            if failed and not isinstance(part, str):
                self._turns[-1].parts.append(failed.rstrip())
            self._add_part(failed + part if isinstance(part, str) else part, path)
            failed = ""

    def _add_part(self, part: str | JsonObject, place: str) -> None:
        """Add to the last turn what the block at `place` is."""
        parts = self._turns[-1].parts
        if not isinstance(part, str):
            path = f"messages[{len(self._turns) - 1}].content[{sum(map(bool, parts))}]"
            self.origins |= {path: place, f"{path}.image_url": f"{place}.source"}
        parts.append(part)

    def _blocks(self, parts: list[Any], kinds: BlockKinds, where: str) -> list[tuple[_ContentBlock, str]]:
        """Blocks, each with its path."""
        places = [f"{where}[{index}]" for index in range(len(parts))]
        return [(_block(part, kinds, place), place) for part, place in zip(parts, places, strict=True)]

    def _texts(self, parts: list[Any], kinds: BlockKinds, where: str) -> str:
        """The text of blocks, a line each at least."""
        return "\n".join(self._shown_text(block, place) for block, place in self._blocks(parts, kinds, where))

    def _shown_part(self, block: _ContentBlock, place: str) -> str | JsonObject:
        """An image as a chat's part, if its source is in the request or has a URL; else what `_shown_text` makes of the
        block."""
        source = block.source if isinstance(block, ImageBlock) else {}
        kind, media, data, url = (source.get(name) for name in ("type", "media_type", "data", "url"))
        if kind == "base64" and isinstance(media, str) and isinstance(data, str):
            return {"type": "image_url", "image_url": f"data:{media};base64,{data}"}
        if kind == "url" and isinstance(url, str):
            return {"type": "image_url", "image_url": url}
        if isinstance(block, ImageBlock) and kind != "file":
            raise field_error(f"{place}.source", "must be {type: base64, media_type, data}, or {type: url, url}")
        return self._shown_text(block, place)

    def _shown_text(self, block: _ContentBlock, place: str) -> str:
        """The text of a block or, where there is none in it, one that says what a reader of text alone misses."""
        match block:
            case TextBlock():
                return block.text
            case ToolReferenceBlock():
                return f"[tool: {block.tool_name}]"
            case SearchResultBlock():
                return "\n".join((block.title, block.source, self._texts(block.content, _TEXTS, f"{place}.content")))
            case DocumentBlock():
                head = [text for text in (block.title, block.context) if text]
                return "\n".join((*head, self._document_text(block, place)))
        source = block.source if isinstance(block, ImageBlock) else {}
        return self._unseen("image", source, place)

    def _document_text(self, block: DocumentBlock, place: str) -> str:
        source = block.source
        kind = source.get("type")
        media = source.get("media_type")
        data = source.get("data")
        if kind == "text" and isinstance(data, str):
            return data
        if kind == "base64" and isinstance(media, str) and media.startswith("text/") and isinstance(data, str):
            try:
                return base64.b64decode(data, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                pass  # then it is no text
        content = source.get("content")
        if kind == "content" and isinstance(content, list):
            return self._texts(content, _SHOWN, f"{place}.source.content")
        return content if kind == "content" and isinstance(content, str) else self._unseen("document", source, place)

    def _unseen(self, what: str, source: Mapping[str, Any], place: str) -> str:
        media = source.get("media_type")
        warning = UNSERVED_FILE_WARNING if source.get("type") == "file" else UNSEEN_WARNING
        self._note(warning.format(what), place)
        return UNSEEN.format(f"{what}, {media}" if isinstance(media, str) and len(media) <= 100 else what)

    def _note(self, warning: str, place: str) -> None:
        """Warn once of what was left out, at its first place."""
        if warning not in self._noted:
            self._noted.add(warning)
            self.warnings.append(f"{place}: {warning}")

    def _turn(self, role: str, where: str) -> _Turn:
        """The message of the role that goes on, or a new one."""
        if not self._turns or self._turns[-1].role != role:
            self._add(_Turn(role), where)
        return self._turns[-1]

    def _add(self, turn: _Turn, origin: str) -> None:
        self.origins[f"messages[{len(self._turns)}]"] = origin
        self._turns.append(turn)


def _text_blocks(parts: list[Any], where: str) -> list[TextBlock]:
    blocks = [_block(part, _TEXTS, f"{where}[{index}]") for index, part in enumerate(parts)]
    return [block for block in blocks if isinstance(block, TextBlock)]


def _block(part: Any, kinds: BlockKinds, where: str) -> _ContentBlock:
    if not isinstance(part, dict):
        raise field_error(where, "must be a content block")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise field_error(f"{where}.type", f": {shortened(kind)} is not supported here, only {', '.join(kinds)}")
    return convert_fields(part, kinds[kind], where)
