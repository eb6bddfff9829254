"""Bodies of other protocols that become a chat: they are parsed and answered as one, and their errors name the fields
that the client sent."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from ...core.direct_stream import DirectStream, relay
from ...core.errors import CharoniaError
from ...core.gateway import ModelHandle, ModelLookup, ResponseStream
from ...core.request import GenerateChunk, TokenizeRequest
from ..http.connection import CancelOnDisconnect
from ..http.request_context import context_of
from .json_body import model_field
from .media_parts import describe_unseen
from .request_parsing import ParsedCompletion, parse_chat
from .tensor_models import generate_from_tensors, read_tensor_request


class FieldNames:
    """The names of a chat body's fields in the body that it was made of; `names` makes them when there is an error."""

    def __init__(self, names: Callable[[], Mapping[str, str]]) -> None:
        self._names = names

    def rename(self, error: CharoniaError) -> None:
        """Let an error name the field that the client sent."""
        path = error.field or ""
        name, own_name = self._longest(path)
        if name:
            error.field = own_name + path.removeprefix(name)
            error.message = error.message.replace(path, error.field).replace(name, own_name, 1)
            error.args = (error.message,)

    def renamed(self, path: str) -> str:
        """The path of a field that the client sent."""
        name, own_name = self._longest(path)
        return own_name + path.removeprefix(name)

    def _longest(self, path: str) -> tuple[str, str]:
        """The longest known beginning of a path, and its name: what is in a field may come from another place than the
        rest of it. Both are empty if there is none."""
        for name, own_name in sorted(self._names().items(), key=lambda pair: -len(pair[0])):
            if path == name or path.startswith((f"{name}.", f"{name}[")):
                return name, own_name
        return "", ""


class TranslatedChat(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed body that was made a chat."""

    chat: ParsedCompletion
    names: FieldNames
    warnings: tuple[str, ...]
    """The parts that were left out, for the client."""


def parse_translated(members: Mapping[str, Any], names: FieldNames, request_id: str) -> ParsedCompletion:
    """Parse the chat body that another one was made into; a member that is None is left out.

    Raises `InvalidArgument` as `parse_chat` does, with the field as `names` has it.
    """
    try:
        return parse_chat({name: value for name, value in members.items() if value is not None}, request_id)
    except CharoniaError as error:
        names.rename(error)
        raise


async def acquire_for(parsed: TranslatedChat, lookup: ModelLookup, request: Request) -> ModelHandle:
    """The model that a body names. Raises `NotFound`, and what the lookup does."""
    with model_field():
        return await lookup.acquire(context_of(request.scope), parsed.chat.response.model)


async def count_prompt_tokens(parsed: TranslatedChat, model: ModelHandle, request: Request) -> int:
    prompt, unseen = describe_unseen(parsed.chat.requests[0].prompt, model.config)
    for field, warning in unseen:
        context_of(request.scope).warn(f"{parsed.names.renamed(field)}: {warning}")
    async with CancelOnDisconnect(request.receive):
        try:
            tokenized = await model.tokenize(TokenizeRequest(prompt=prompt))
        except CharoniaError as error:
            parsed.names.rename(error)
            raise
        return len(tokenized.ids)


def answer_chat(
    parsed: TranslatedChat, model: ModelHandle, request: Request, limit: int
) -> ResponseStream[GenerateChunk]:
    """The one answer of a model to a body, whose warnings are noted for the client.

    Raises, and lets the stream raise, what the model does. `limit`: see `generate_from_tensors`.
    """
    context, names = context_of(request.scope), parsed.names
    chunks: ResponseStream[GenerateChunk]
    chat = parsed.chat
    prompt, unseen = describe_unseen(chat.requests[0].prompt, model.config)
    if unseen:
        chat = msgspec.structs.replace(chat, requests=(msgspec.structs.replace(chat.requests[0], prompt=prompt),))
    if model.config.openai_api:
        try:
            tensors = read_tensor_request(model.config, "chat", chat)
        except CharoniaError as error:
            names.rename(error)
            raise
        chunks = generate_from_tensors(model, tensors, context, limit)
    else:
        chunks = model.generate(chat.requests[0])
    for field, warning in unseen:
        context.warn(f"{names.renamed(field)}: {warning}")
    for warning in parsed.warnings:
        context.warn(warning)
    return DirectStream(partial(_rename_errors, chunks, names))


async def _rename_errors(
    chunks: ResponseStream[GenerateChunk], names: FieldNames, output: DirectStream[GenerateChunk]
) -> AsyncGenerator[GenerateChunk, None]:
    async with aclosing(relay(chunks, lambda chunk: chunk, output, text_is_kept=True)) as relayed:
        try:
            async for chunk in relayed:
                yield chunk
        except CharoniaError as error:
            names.rename(error)
            raise
