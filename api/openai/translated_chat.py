"""Answers to a chat that was made of another body: errors name the fields of the one that the client sent."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from ...core.errors import CharoniaError
from ...core.gateway import ModelHandle, ResponseStream
from ...core.request import GenerateChunk
from ...core.request_context import RequestContext
from .request_parsing import ParsedCompletion
from .tensor_models import generate_from_tensors, read_tensor_request


class FieldNames:
    """`names` of a chat body's fields, as the body that it was made of calls them; asked for when there is an error."""

    def __init__(self, names: Callable[[], Mapping[str, str]]) -> None:
        self._names = names

    def rename(self, error: CharoniaError) -> None:
        """Let an error name the field that the client sent."""
        path = error.field or ""
        # The longest first: what is in a field may come from another place than the rest of it.
        for name, here in sorted(self._names().items(), key=lambda pair: -len(pair[0])):
            if path == name or path.startswith((f"{name}.", f"{name}[")):
                error.field = here + path.removeprefix(name)
                error.message = error.message.replace(path, error.field).replace(name, here, 1)
                error.args = (error.message,)
                return


def answer_chat(
    model: ModelHandle, chat: ParsedCompletion, names: FieldNames, context: RequestContext, limit: int
) -> ResponseStream[GenerateChunk]:
    """The one answer of a model to `chat`. `limit`: see `generate_from_tensors`. Raises, and lets the stream raise,
    what the model does."""
    if not model.config.openai_api:
        return _rename_errors(model.generate(chat.requests[0]), names)
    try:
        asked = read_tensor_request(model.config, "chat", chat)
    except CharoniaError as error:
        names.rename(error)
        raise
    return _rename_errors(generate_from_tensors(model, asked, context, limit), names)


async def _rename_errors(
    chunks: ResponseStream[GenerateChunk], names: FieldNames
) -> AsyncGenerator[GenerateChunk, None]:
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except CharoniaError as error:
            names.rename(error)
            raise
