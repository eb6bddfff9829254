"""Answers of /v1/messages, as one JSON body or as typed events: https://docs.anthropic.com/en/api/messages-streaming.

Both come from the same content blocks. Knows nothing of where the chunks come from.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import orjson

from ...core.errors import CharoniaError
from ...core.logprobs import TokenLogprob
from ...core.request import FinishReason, GenerateChunk, ToolCallDelta, Usage
from ..http.connection import sse_event
from ..http.error_responses import anthropic_error_body
from ..http.response_parts import TextEncoder
from .message_turns import JsonObject
from .messages_request import ParsedMessages

BlockKind: TypeAlias = Literal["thinking", "text", "tool_use"]

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TIMEOUT: "pause_turn",
    FinishReason.CACHE_THRESHOLD: "pause_turn",
}
_DELTAS: dict[BlockKind, tuple[str, str]] = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By the kind of a block: the type of its deltas, and their member that has the text."""


class BlockPiece(NamedTuple):
    """A piece of a content block, from one chunk; it begins the block if it `opens` one. `call`: of a tool_use."""

    kind: BlockKind
    text: str
    opens: bool
    call: ToolCallDelta | None = None


class BlockSplitter:
    """Parts the chunks of an answer into pieces of content blocks, one after the other."""

    def __init__(self) -> None:
        self._open: tuple[BlockKind, int] | None = None

    def split(self, chunk: GenerateChunk) -> list[BlockPiece]:
        pieces: list[tuple[BlockKind, str, ToolCallDelta | None]] = []
        if chunk.reasoning:
            pieces.append(("thinking", chunk.reasoning, None))
        if chunk.text:
            pieces.append(("text", chunk.text, None))
        pieces += [("tool_use", call.arguments, call) for call in chunk.tool_calls]
        if len(pieces) > 1:
            # Nobody knows the order: what is open goes on first, for a block that has ended cannot.
            opened = self._open
            pieces.sort(key=lambda piece: _block_of(piece[0], piece[2]) != opened)
        return [self._piece(*piece) for piece in pieces]

    def text_piece(self, text: str) -> BlockPiece:
        """The one piece of a chunk that is nothing but text."""
        return self._piece("text", text)

    def _piece(self, kind: BlockKind, text: str, call: ToolCallDelta | None = None) -> BlockPiece:
        block = _block_of(kind, call)
        opens, self._open = block != self._open, block
        return BlockPiece(kind, text, opens, call)


def _block_of(kind: BlockKind, call: ToolCallDelta | None) -> tuple[BlockKind, int]:
    return kind, -1 if call is None else call.index


class AnthropicMessageWriter:
    """Writes the answer to one request. Either `message` is called once, or, as an encoder of events, `encode_item` for
    each chunk and then one of the others."""

    def __init__(self, parsed: ParsedMessages, model: str) -> None:
        self._parsed = parsed
        self._model = model
        self._splitter = BlockSplitter()
        self._last: GenerateChunk | None = None
        self._index = -1
        self._open: BlockKind | None = None
        self._called = False
        self._signature = sha256()
        self._before = self._after = b""

    def message(self, chunks: Sequence[GenerateChunk]) -> JsonObject:
        """The body of an answer that is not streamed."""
        blocks: list[tuple[BlockPiece, list[str]]] = []
        for piece in (piece for chunk in chunks for piece in self._splitter.split(chunk)):
            if piece.opens:
                blocks.append((piece, []))
            blocks[-1][1].append(piece.text)
        self._last, self._called = chunks[-1], any(chunk.tool_calls for chunk in chunks)
        content = [self._block(piece, "".join(texts)) for piece, texts in blocks]
        return self._head(content) | self._end() | {"usage": _usage(chunks[-1].usage)}

    def encode_item(self, chunk: GenerateChunk) -> bytes:
        events = []
        if self._last is None:
            begun = msgspec.structs.replace(chunk.usage, completion_tokens=0, reasoning_tokens=0)
            message = self._head([]) | {"stop_reason": None, "stop_sequence": None, "usage": _usage(begun)}
            events.append(_event("message_start", message=message))
        self._last, self._called = chunk, self._called or bool(chunk.tool_calls)
        return b"".join([*events, *self._grow(self._splitter.split(chunk))])

    def _grow(self, pieces: Iterable[BlockPiece]) -> Iterator[bytes]:
        for piece in pieces:
            if piece.opens:
                yield self._close()
                yield self._begin(piece)
            if piece.text:
                yield self._delta(piece)

    @property
    def encode_text(self) -> TextEncoder:
        return self._encode_text

    def _encode_text(self, text: str, tokens: int, logprob: TokenLogprob | None) -> bytes:
        if not text:
            return b""
        if self._open == "text":
            return self._before + orjson.dumps(text) + self._after
        return b"".join(self._grow([self._splitter.text_piece(text)]))

    def encode_end(self) -> bytes:
        usage = _usage(Usage(0, 0) if self._last is None else self._last.usage)
        return self._close() + _event("message_delta", delta=self._end(), usage=usage) + _event("message_stop")

    def encode_error(self, error: CharoniaError) -> bytes:
        return sse_event(orjson.dumps(anthropic_error_body(error)), "error")

    def _head(self, content: list[JsonObject]) -> JsonObject:
        name = self._parsed.chat.requests[0].id
        return {"id": name, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _block(self, piece: BlockPiece, text: str) -> JsonObject:
        """A whole content block."""
        if piece.call is not None:
            return _tool_use(piece.call, _input_of(text))
        if piece.kind == "text":
            return {"type": "text", "text": text, "citations": None}
        signature = sha256(text.encode(errors="replace")).hexdigest()
        return {"type": "thinking", "thinking": text if self._parsed.shows_thinking else "", "signature": signature}

    def _begin(self, piece: BlockPiece) -> bytes:
        self._index, self._open = self._index + 1, piece.kind
        kind, member = _DELTAS[piece.kind]
        delta = {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, member: None}}
        # The JSON around the text of a block's deltas is encoded once for all of them.
        event = sse_event(orjson.dumps(delta), "content_block_delta")
        self._before, self._after = event.split(b"null")
        block: JsonObject = {"type": piece.kind, piece.kind: ""}
        if piece.call is not None:
            block = _tool_use(piece.call, {})
        elif piece.kind == "thinking":
            block["signature"], self._signature = "", sha256()
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, piece: BlockPiece) -> bytes:
        if piece.kind == "thinking":
            self._signature.update(piece.text.encode(errors="replace"))
            if not self._parsed.shows_thinking:
                return b""
        return self._before + orjson.dumps(piece.text) + self._after

    def _close(self) -> bytes:
        """The events that end the open block."""
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature.hexdigest()}
            signed = _event("content_block_delta", index=self._index, delta=delta)
        self._open = None
        return signed + _event("content_block_stop", index=self._index)

    def _end(self) -> JsonObject:
        """The members that say why the answer ended."""
        last = self._last
        if last is None or last.finish_reason is None:
            return {"stop_reason": "end_turn", "stop_sequence": None}
        if last.finish_reason is FinishReason.STOP and self._called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if last.finish_reason is FinishReason.STOP and isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        full = last.finish_reason is FinishReason.LENGTH and last.usage.completion_tokens < self._parsed.max_tokens
        reason = "model_context_window_exceeded" if full else _STOP_REASONS.get(last.finish_reason, "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}


def _tool_use(call: ToolCallDelta, arguments: Any) -> JsonObject:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _input_of(arguments: str) -> JsonObject:
    """The arguments of a call. What is no JSON object, such as one that a limit cut, is told as Anthropic's docs want a
    model to be told of it."""
    try:
        members = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        members = None
    return members if isinstance(members, dict) else {"INVALID_JSON": arguments}


def _usage(usage: Usage) -> JsonObject:
    """Tokens as Anthropic counts them: those out of the prefix cache are apart from the others of the prompt."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _event(kind: str, **members: Any) -> bytes:
    return sse_event(orjson.dumps({"type": kind, **members}), kind)
