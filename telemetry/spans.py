"""The spans of a request, made from the times and counts of its context. Knows nothing of how spans travel.

Names: OpenTelemetry's semantic conventions for generative AI, and vLLM's where those
have none (https://opentelemetry.io/docs/specs/semconv/gen-ai/). Holds no text of prompts and answers.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from ..core.request_context import Outcome, RequestContext, SequenceRecord

Value: TypeAlias = str | bool | int | float | tuple[str, ...]
Attributes: TypeAlias = Mapping[str, Value]

_OPERATIONS = {"chat": "chat", "tokenize": "tokenize", "detokenize": "detokenize"}
_DEFAULT_OPERATION = "text_completion"
"""The operation of every other endpoint."""

_SERVER_ERRORS = (Outcome.ERROR, Outcome.TIMEOUT)
"""Outcomes that are a server's error; a refusal is the client's."""

_SAMPLING = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_k": "gen_ai.request.top_k",
    "top_p": "gen_ai.request.top_p",
    "seed": "gen_ai.request.seed",
}


class Span(NamedTuple):
    """Times are of `time.monotonic`. `is_error`: its end is an error of the server."""

    name: str
    start: float
    end: float
    attributes: Attributes = {}
    is_error: bool = False


def request_span(context: RequestContext) -> Span:
    """The span of a closed context: from its arrival to its end."""
    assert context.end is not None
    outcome, reason = context.end
    operation = _OPERATIONS.get(context.endpoint, _DEFAULT_OPERATION)
    names = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "charonia",
        "charonia.door": context.endpoint,
        "gen_ai.request.model": context.model,
        "gen_ai.request.id": context.id,
        "gen_ai.response.id": context.id,
        "charonia.tenant": context.tenant,
        "charonia.model.version": context.version,
        "charonia.outcome": outcome.value,
    }
    attributes: dict[str, Value] = {key: name for key, name in names.items() if name}
    if outcome in _SERVER_ERRORS or outcome is Outcome.REJECTED:
        attributes["error.type"] = reason or outcome.value
    if context.sequences:
        attributes.update(_sampling_attributes(context.sequences))
        attributes.update(_usage_attributes(context))
        attributes.update(_latency_attributes(context))
    name = f"{operation} {context.model}".rstrip()
    return Span(name, context.arrived_at, context.ended_at, attributes, outcome in _SERVER_ERRORS)


def phase_spans(context: RequestContext) -> Iterator[Span]:
    """The phases of each sequence of a request that were begun; one that was cut off lasts to the request's end."""
    several = len(context.sequences) > 1
    for index, sequence in enumerate(context.sequences):
        attributes: Attributes = {"charonia.choice": index} if several else {}
        names = ("tokenize", "queue", "prefill", "decode")
        times = (sequence.opened, sequence.submitted, sequence.begun, sequence.first, sequence.last)
        for name, (start, end) in zip(names, pairwise(times), strict=True):
            if start is not None:
                yield Span(name, start, context.ended_at if end is None else end, attributes)


def _sampling_attributes(sequences: list[SequenceRecord]) -> Iterator[tuple[str, Value]]:
    sampling = sequences[0].sampling
    for field, name in _SAMPLING.items():
        value = getattr(sampling, field)
        if value is not None:
            # Clients may ask for integers that no span can hold.
            yield name, value if abs(value) < 2**63 else float(value)
    if sampling.stop:
        yield "gen_ai.request.stop_sequences", sampling.stop
    choices = 1 + max(sequence.choice for sequence in sequences)
    yield "gen_ai.request.n", choices
    if choices > 1:
        yield "gen_ai.request.choice.count", choices


def _usage_attributes(context: RequestContext) -> Iterator[tuple[str, Value]]:
    summary = context.summary
    yield "gen_ai.usage.num_sequences", summary.choices
    yield "gen_ai.usage.output_tokens", summary.generated
    if summary.prompt is not None:
        yield "gen_ai.usage.input_tokens", summary.prompt
    if summary.cached is not None:
        yield "gen_ai.usage.cache_read.input_tokens", summary.cached
    reasons = tuple(each.finish_reason.value for each in context.sequences if each.finish_reason is not None)
    if reasons:
        yield "gen_ai.response.model", context.model
        yield "gen_ai.response.finish_reasons", reasons


def _latency_attributes(context: RequestContext) -> Iterator[tuple[str, Value]]:
    """Seconds; those of phases that were never over are left out."""
    submitted, begun, first, last = context.summary[-4:]
    periods = {
        "time_in_queue": (submitted, begun),
        "time_to_first_token": (context.arrived_at, first),
        "time_in_model_prefill": (begun, first),
        "time_in_model_decode": (first, last),
        "time_in_model_inference": (begun, last),
        "e2e": (context.arrived_at, context.ended_at),
    }
    for name, (start, end) in periods.items():
        if start is not None and end is not None:
            yield f"gen_ai.latency.{name}", end - start
