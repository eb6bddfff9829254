"""The sequences of a worker's requests in the hub's engines: submitted, read, reported once a turn of the event loop.

Nothing waits for a worker that does not read: its tokens stay in their streams, and merge.
"""

import asyncio
import logging
import time
from contextlib import ExitStack
from functools import partial

from msgspec.structs import replace

from ..api.http.eager import start_eagerly
from ..api.http.error_responses import INTERNAL_SERVER_ERROR
from ..core.adapter import LoraTask
from ..core.errors import CharoniaError, SentError
from ..core.request import GenerateRequest
from ..core.request_context import RequestContext
from ..core.sampling import SamplingParams
from ..engine.client.admission import QueueTicket
from ..engine.client.llm import LlmModel
from ..engine.client.sequence_stats import SequenceStats
from ..engine.client.token_stream import TokenStream
from .hub_link import HubLink
from .sequence_messages import SequenceSteps, SubmitSequence

log = logging.getLogger(__name__)

_PROMPT_ONLY = SamplingParams(max_tokens=0)


class RelayedSequence:
    """A sequence of a worker. `resources`: its place in the queue, its adapter and its stream, once it has them."""

    def __init__(self, stats: SequenceStats) -> None:
        self.stats = stats
        self.resources = ExitStack()
        self.stream: TokenStream | None = None
        self.starting: asyncio.Task[None] | None = None
        self.reported_start = False
        self.reported_drafts = 0

    def close(self) -> None:
        if self.starting is not None:
            self.starting.cancel()
        self.resources.close()


class TokenRelay:
    """The sequences of one worker, by the keys that it gave them."""

    def __init__(self, link: HubLink) -> None:
        self._link = link
        self._sequences: dict[int, RelayedSequence] = {}
        self._unread: list[int] = []
        self._failed: list[tuple[int, SentError]] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def submit(
        self, message: SubmitSequence, context: RequestContext, model: LlmModel, ticket: QueueTicket | None
    ) -> None:
        """Give it to the engine of `model`; what the engine refuses is told as the end of the sequence. `ticket`: its
        place in the queue, if it has one already."""
        stats = SequenceStats(model.metrics, context=context)
        stats.opened, stats.choice = message.opened, message.choice
        if not message.tokens_wanted:
            stats.sampling = _PROMPT_ONLY
        context.add_sequence(stats)
        sequence = self._sequences[message.key] = RelayedSequence(stats)
        if ticket is not None:
            sequence.resources.enter_context(ticket)
        starting = start_eagerly(self._start(message, sequence, context, model, ticket))
        if starting is not None:
            sequence.starting = starting

    async def _start(
        self,
        message: SubmitSequence,
        sequence: RelayedSequence,
        context: RequestContext,
        model: LlmModel,
        ticket: QueueTicket | None,
    ) -> None:
        enter = sequence.resources.enter_context
        add = message.add
        request = _request_of(message)
        try:
            if ticket is None:
                ticket = enter(model.client.admit(request, context.tenant))
            else:
                ticket.serve(request.prompt_count, request.choice_count)
            if request.adapter or request.lora_task:
                digest = enter(await model.adapters.use(request, sequence.stats, context))
                add = replace(add, spec=replace(add.spec, adapter=digest))
            sequence.stream = enter(model.client.open_stream(add, sequence.stats, ticket))
        except CharoniaError as error:
            self._fail(message.key, error)
        except Exception:
            log.exception("a sequence could not begin")
            self._fail(message.key, INTERNAL_SERVER_ERROR)
        else:
            sequence.stream.listen(partial(self._on_unread, message.key))
        finally:
            sequence.starting = None

    def abort(self, key: int) -> None:
        """End a sequence whose reader left, unless it has ended."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            sequence.close()

    def close(self) -> None:
        """End all sequences: the worker is gone."""
        for key in list(self._sequences):
            self.abort(key)

    def _on_unread(self, key: int) -> None:
        self._unread.append(key)
        self._link.schedule()

    def _fail(self, key: int, error: CharoniaError) -> None:
        self._failed.append((key, SentError.of(error)))
        self.abort(key)
        self._link.schedule()

    def tell(self) -> None:
        """Send all that is unread in one message."""
        if self._link.congested or not (self._unread or self._failed):
            return
        unread, self._unread = self._unread, []
        steps = SequenceSteps(time.monotonic())
        for key in unread:
            sequence = self._sequences.get(key)
            if sequence is not None and sequence.stream is not None:
                self._read(key, sequence, sequence.stream, steps)
        if steps.logprobs:
            steps.logprobs.extend([None] * (len(steps.tokens) - len(steps.logprobs)))
        steps.failed.extend(self._failed)
        self._failed = []
        self._link.send(steps)

    def _read(self, key: int, sequence: RelayedSequence, stream: TokenStream, steps: SequenceSteps) -> None:
        stats = sequence.stats
        if not sequence.reported_start and stream.started:
            sequence.reported_start = True
            steps.started.append((key, stats.cached or 0, stats.begun or 0.0))
            if stats.held is not None:
                steps.held.append((key, stats.held))
        try:
            delta = stream.take()
        except CharoniaError as error:
            steps.failed.append((key, SentError.of(error)))
            self.abort(key)
            return
        steps.keys.append(key)
        steps.counts.append(len(delta.token_ids))
        if delta.logprobs:
            steps.logprobs.extend([None] * (len(steps.tokens) - len(steps.logprobs)))
            steps.logprobs.extend(delta.logprobs)
        steps.tokens.extend(delta.token_ids)
        if delta.scores:
            steps.prompt_logprobs.append((key, list(delta.scores)))
        if len(stats.drafts) > sequence.reported_drafts:
            steps.drafts.append((key, stats.drafts[sequence.reported_drafts :]))
            sequence.reported_drafts = len(stats.drafts)
        if delta.finish_reason is not None:
            steps.finished.append((key, delta.finish_reason.value))
            self.abort(key)


def _request_of(message: SubmitSequence) -> GenerateRequest:
    """The request of a sequence, as far as it matters to who admits it."""
    task = message.lora_task
    lora = None
    if task is not None:
        weights, config = (None if sent is None else sent.tensor().data for sent in (task.weights, task.config))
        lora = LoraTask(task.number, weights, config)
    return GenerateRequest(
        id="",
        prompt=(),
        choice=message.choice,
        choice_count=message.choice_count,
        prompt_count=message.prompt_count,
        adapter=message.add.spec.adapter,
        lora_task=lora,
        timeout=message.add.timeout,
    )
