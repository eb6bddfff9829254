"""How a request ended, whoever learnt of it; and who is told."""

import asyncio
from dataclasses import dataclass, field

import pytest

from charonia.core.errors import (
    Cancelled,
    CharoniaError,
    InvalidArgument,
    QueueFull,
    RequestTimeout,
    Unauthenticated,
    Unavailable,
)
from charonia.core.request import FinishReason, Usage
from charonia.core.request_context import Outcome, RequestContext, RequestEnd, end_for_error
from charonia.core.sampling import SamplingParams

REJECTED = Outcome.REJECTED
STOP = RequestEnd(Outcome.STOP)


@dataclass
class Done:
    """A record of a sequence that is over."""

    end: RequestEnd | None = STOP
    choice: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    opened: float = 1.0
    submitted: float | None = 2.0
    begun: float | None = 3.0
    first: float | None = 4.0
    last: float | None = 5.0
    prompt: int | None = 7
    cached: int | None = 4
    generated: int = 3
    finish_reason: FinishReason | None = FinishReason.STOP


def ended(*parts: Done) -> RequestEnd:
    context = RequestContext("test")
    context.sequences.extend(parts)
    return context.close()


@pytest.mark.parametrize(
    ("error", "submitted", "end"),
    [
        (QueueFull("full", retry_after=1), False, RequestEnd(REJECTED, "queue_full_requests")),
        (QueueFull("full", retry_after=1, limit="tokens"), False, RequestEnd(REJECTED, "queue_full_tokens")),
        (InvalidArgument("no"), True, RequestEnd(REJECTED, "invalid_argument")),
        (Unauthenticated("who"), False, RequestEnd(REJECTED, "unauthenticated")),
        (Unavailable("not yet"), False, RequestEnd(REJECTED, "unavailable")),
        (Unavailable("no longer"), True, RequestEnd(Outcome.ERROR, "unavailable")),
        (RequestTimeout(), True, RequestEnd(Outcome.TIMEOUT)),
        (Cancelled("not by you"), True, RequestEnd(Outcome.CANCELLED)),
        (CharoniaError("what"), True, RequestEnd(Outcome.ERROR, "unknown")),
        (ZeroDivisionError(), False, RequestEnd(Outcome.ERROR, "internal")),
    ],
)
def test_what_an_error_means(error: Exception, submitted: bool, end: RequestEnd) -> None:
    assert end_for_error(error, submitted) == end


def test_the_worst_part_is_the_whole() -> None:
    assert ended(Done(), Done(RequestEnd(Outcome.LENGTH)), Done()) == RequestEnd(Outcome.LENGTH)
    assert ended(Done(RequestEnd(REJECTED, "queue_full_tokens")), Done(None)) == RequestEnd(
        REJECTED, "queue_full_tokens"
    )
    assert ended(Done(), Done(None)) == RequestEnd(Outcome.CANCELLED)
    assert ended(Done(RequestEnd(Outcome.ERROR, "internal")), Done(RequestEnd(REJECTED, "x"))) == RequestEnd(
        Outcome.ERROR, "internal"
    )


@pytest.mark.parametrize("outcome", Outcome)
def test_any_part_is_worse_or_better_than_another(outcome: Outcome) -> None:
    end = RequestEnd(outcome)
    assert ended(Done(end), Done(RequestEnd(Outcome.DONE))) == end
    assert ended(Done(RequestEnd(Outcome.ERROR)), Done(end)) == RequestEnd(Outcome.ERROR)


def test_without_parts_it_is_what_was_said_and_leaving_says_nothing() -> None:
    assert ended() == RequestEnd(Outcome.CANCELLED)
    context = RequestContext("test")
    context.finish()
    assert context.close() == RequestEnd(Outcome.DONE)


def test_a_fault_behind_the_last_token_is_a_fault() -> None:
    context = RequestContext("test")
    context.sequences.append(Done())
    with pytest.raises(ZeroDivisionError), context:
        raise ZeroDivisionError
    assert context.end == RequestEnd(Outcome.ERROR, "internal")


@pytest.mark.parametrize("gone", [asyncio.CancelledError(), GeneratorExit()])
def test_who_leaves_has_cancelled(gone: BaseException) -> None:
    context = RequestContext("test")
    with pytest.raises(type(gone)), context:
        raise gone
    assert context.end == RequestEnd(Outcome.CANCELLED)


def test_parts_add_up_and_a_prompt_counts_once() -> None:
    context = RequestContext("test")
    context.sequences.extend([Done(), Done(choice=1, first=3.5, last=9.0), Done(prompt=1, cached=None, submitted=None)])
    summary = context.summary
    assert (summary.choices, summary.prompt, summary.cached, summary.generated) == (3, 8, 4, 9)
    assert (summary.submitted, summary.begun, summary.first, summary.last) == (2.0, 3.0, 3.5, 9.0)


def test_nothing_that_came_is_none() -> None:
    summary = RequestContext("test").summary
    assert set(summary) == {0, None}
    assert (summary.choices, summary.generated, summary.prompt) == (0, 0, None)


def test_listeners_hear_of_the_end_once_the_last_one_first() -> None:
    heard: list[tuple[str, RequestEnd | None]] = []
    with RequestContext("test") as context:
        context.on_end(lambda ended: heard.append(("first", ended.end)))
        context.on_end(lambda ended: heard.append(("second", ended.end)))
        context.finish()
        assert heard == []
    context.close()
    assert heard == [("second", RequestEnd(Outcome.DONE)), ("first", RequestEnd(Outcome.DONE))]


def test_a_listener_that_raises_keeps_the_end_from_no_other() -> None:
    heard: list[str] = []

    def fail(_: RequestContext) -> None:
        raise ZeroDivisionError

    context = RequestContext("test")
    for listener in (lambda _: heard.append("first"), fail, lambda _: heard.append("third")):
        context.on_end(listener)
    with pytest.raises(ZeroDivisionError):
        context.close()
    assert heard == ["third", "first"]
    assert context.closed


def test_usage_is_that_of_the_whole_family() -> None:
    context = RequestContext("test", tenant="ann", tenant_weight=2.0)
    context.add_sequence(Done())
    child, asked = context.child("ensemble"), RequestContext("python")
    child.adopt(asked)
    asked.add_sequence(Done(prompt=1, cached=None))
    asked.add_sequence(Done(choice=1))
    assert context.usage == Usage(8, 9, 4)
    assert [len(each.sequences) for each in (context, child, asked)] == [1, 0, 2]
    assert (asked.tenant, asked.tenant_weight) == ("ann", 2.0)


async def test_only_its_own_limit_is_a_timeout_of_the_request() -> None:
    async def fail() -> None:
        raise TimeoutError("the encoder's own")

    context = RequestContext("test")
    for limit in (0, 60):
        with pytest.raises(TimeoutError, match="the encoder's own"):
            await context.in_time(fail(), limit)
    with pytest.raises(RequestTimeout):
        await context.in_time(asyncio.Event().wait(), 1e-9)
