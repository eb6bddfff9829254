"""The requests of a worker that have not ended, as the hub has them, with their calls."""

import asyncio
from collections.abc import AsyncGenerator

from ..core.gateway import ResponseStream
from ..core.request import GenerateChunk, TokenizeRequest, Usage
from ..core.request_context import RequestContext
from ..engine.client.admission import QueueTicket
from ..repository.model_handle import LoadedModelHandle
from .messages import CountedText, ResponseNotes, TextCall

_WINDOW = 16
"""Responses of one stream that may be on their way, unread."""


class OpenRequest:
    """A request of a worker that has not ended, with its calls. `tickets`: places in the queue of sequences that are
    not submitted yet."""

    __slots__ = ("calls", "context", "finding", "handle", "reported_warnings", "tickets")

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.handle: LoadedModelHandle | None = None
        self.tickets: list[QueueTicket] = []
        self.finding: asyncio.Task[None] | None = None
        self.calls: dict[int, OpenCall] = {}
        self.reported_warnings = 0

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks of the request that still run."""
        tasks = [self.finding, *(call.task for call in self.calls.values())]
        return [task for task in tasks if task is not None and not task.done()]

    def release_tickets(self) -> None:
        while self.tickets:
            self.tickets.pop().release()

    def notes(self) -> ResponseNotes | None:
        """The notes for the next message, if there is news."""
        context = self.context
        if not (context.warnings or context.all_sequences or context.route):
            return None
        warnings, self.reported_warnings = context.warnings[self.reported_warnings :], len(context.warnings)
        text = None
        if context.all_sequences:
            usage = context.usage
            reasons = [
                sequence.finish_reason for sequence in context.all_sequences if sequence.finish_reason is not None
            ]
            reason = reasons[-1].value if reasons else ""
            text = CountedText(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, reason)
        model, version = (context.model, context.version) if context.route else ("", "")
        return ResponseNotes(warnings, model, version, text)


class OpenCall:
    """A call of a model that is being answered. `credit`: responses that may be sent before some were read."""

    __slots__ = ("_more", "credit", "task")

    def __init__(self) -> None:
        self.credit = _WINDOW
        self.task: asyncio.Task[None] | None = None
        self._more: asyncio.Event | None = None

    def add_credit(self, count: int) -> None:
        self.credit += count
        if self._more is not None:
            self._more.set()

    async def wait_for_reader(self) -> None:
        """Return when another response may be sent, and count it."""
        while not self.credit:
            self._more = asyncio.Event()
            await self._more.wait()
        self.credit -= 1


def text_chunks(handle: LoadedModelHandle, call: TextCall) -> ResponseStream[GenerateChunk]:
    """The chunks that answer a call."""
    if call.generation is not None:
        return handle.generate(call.generation)
    assert call.prompt is not None
    return _prompt_tokens(handle, call.prompt)


async def _prompt_tokens(handle: LoadedModelHandle, prompt: TokenizeRequest) -> AsyncGenerator[GenerateChunk, None]:
    ids = (await handle.tokenize(prompt)).ids
    yield GenerateChunk(text="", token_ids=(), prompt_ids=tuple(ids), usage=Usage(len(ids), 0))
