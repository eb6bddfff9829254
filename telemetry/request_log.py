"""The log record at the end of every request."""

import json
import logging
import re
import time
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from ..core.request_context import Outcome, RequestContext, RequestEnd

log = logging.getLogger("charonia.requests")

LoggedRequests: TypeAlias = Literal["all", "llm", "errors"]
"""The requests that are logged: failed ones; besides them those that generated text; or all."""

_FAILED = (Outcome.ERROR, Outcome.TIMEOUT, Outcome.REJECTED)

_PLAIN_WORD = re.compile(r"[\w.,:/@+-]+", re.ASCII)

_MAX_NAME_LENGTH = 256
"""The most characters shown of a name that a client chose."""

_CACHE_SIZE = 256
"""The number of cached texts."""


class RequestLogFields(NamedTuple):
    """The logged fields of a request, which are attributes of the `logging` record too. Tokens are those of all answers
    together. Values that never came, or that only text has, are None."""

    request_id: str
    x_request_id: str
    """The header X-Request-Id, unless `request_id` ends with it."""
    session: str
    """The header X-Session-Id, where a gateway's is believed."""
    trace_id: str
    client: str
    door: str
    """The endpoint."""
    route: str
    model: str
    version: str
    adapter: str
    tenant: str
    outcome: str
    reason: str
    finish_reason: str | None
    choices: int | None
    """The number of answers."""
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int | None
    queue_ms: float | None
    ttft_ms: float | None
    e2e_ms: float

    def __str__(self) -> str:
        return " ".join(
            [f"{name}={_as_word(value) if type(value) is str else value}" for name, value in self.known().items()]
        )

    def known(self) -> dict[str, str | int | float]:
        """The fields that have a value."""
        return {name: value for name, value in zip(_NAMES, self, strict=True) if value is not None and value != ""}


_NAMES = RequestLogFields._fields


_EMPTY_RECORD = vars(logging.LogRecord(log.name, logging.INFO, __file__, 0, "%s", (), None))
"""The attributes of every record. Finding the logging line of code would cost more than the rest."""


class RequestLogRecord(logging.LogRecord):
    """The log record of a request. Our formatters read only its `context`; other attributes are made when another
    handler asks for one, since that takes longer than writing the line."""

    name = log.name
    levelno = logging.INFO
    levelname = "INFO"

    def __init__(self, context: RequestContext) -> None:
        self.created = time.time()
        self.context = context

    def __getattr__(self, name: str) -> object:
        attributes = self.__dict__
        if "args" in attributes or "context" not in attributes:  # there is none of that name, or this is an empty copy
            raise AttributeError(name)
        fields = request_log_fields(self.context)
        attributes |= {**_EMPTY_RECORD, "created": self.created, "args": (fields,), **fields._asdict()}
        return getattr(self, name)


class RequestLogFilter:
    """The requests that are logged, of those that end: `requests`. Asked before there is a record, which costs more."""

    requests: LoggedRequests = "all"

    def passes(self, context: RequestContext) -> bool:
        """Whether an ended request is logged. One that a model made counts as text only if it generated text itself."""
        if self.requests == "all" or (context.end is not None and context.end.outcome in _FAILED):
            return True
        return self.requests == "llm" and bool(context.sequences if context.depth else context.all_sequences)


request_filter = RequestLogFilter()
"""The filter of this process; `logging_setup` says what passes."""


def logs_all() -> bool:
    """Whether requests are logged whatever they were, and however they ended."""
    return request_filter.requests == "all" and log.isEnabledFor(logging.INFO)


def log_request(context: RequestContext) -> None:
    if not context.logged and request_filter.passes(context) and log.isEnabledFor(logging.INFO):
        log.handle(RequestLogRecord(context))


def request_log_fields(context: RequestContext) -> RequestLogFields:
    assert context.end is not None
    summary = context.summary
    return RequestLogFields(
        request_id=context.id[:_MAX_NAME_LENGTH],
        x_request_id=_x_request_id(context),
        session=context.hints.session,
        trace_id=context.trace_id,
        client=context.client,
        door=context.endpoint,
        route=context.route,
        model=context.model[:_MAX_NAME_LENGTH],
        version=context.version[:_MAX_NAME_LENGTH],
        adapter=context.adapter[:_MAX_NAME_LENGTH],
        tenant=context.tenant,
        outcome=context.end.outcome.value,
        reason=context.end.reason,
        finish_reason=_finish_reason(context),
        choices=summary.choices or None,
        prompt_tokens=summary.prompt,
        cached_tokens=summary.cached,
        generated_tokens=summary.generated if summary.choices else None,
        queue_ms=_milliseconds(summary.submitted, summary.begun),
        ttft_ms=_milliseconds(context.arrived_at, summary.first),
        e2e_ms=round(1e3 * (context.ended_at - context.arrived_at), 3),
    )


def request_log_line(context: RequestContext) -> str:
    """The text of its `request_log_fields`. For requests without sequences most of it is cached."""
    if context.sequences or context.end is None:
        return str(request_log_fields(context))
    model = context.model[:_MAX_NAME_LENGTH]
    version = context.version[:_MAX_NAME_LENGTH]
    common = _common_part(context.endpoint, context.route, model, version, context.tenant, context.end)
    whole = f"{common}{round(1e3 * (context.ended_at - context.arrived_at), 3)}"
    if context.client:
        whole = f"client={_as_word(context.client)} {whole}"
    if context.trace_id:
        whole = f"trace_id={context.trace_id} {whole}"
    if context.hints.session:
        whole = f"session={_as_word(context.hints.session)} {whole}"
    if other := _x_request_id(context):
        whole = f"x_request_id={_as_word(other)} {whole}"
    return f"request_id={_as_word(context.id[:_MAX_NAME_LENGTH])} {whole}" if context.id else whole


def _x_request_id(context: RequestContext) -> str:
    return "" if context.id.endswith(context.client_id) else context.client_id[:_MAX_NAME_LENGTH]


@lru_cache(_CACHE_SIZE)
def _common_part(door: str, route: str, model: str, version: str, tenant: str, end: RequestEnd) -> str:
    context = RequestContext(door)
    context.route = route
    context.model = model
    context.version = version
    context.tenant = tenant
    context.end = end
    return str(request_log_fields(context)).removesuffix("0.0")


def _finish_reason(context: RequestContext) -> str | None:
    """The finish reasons of all sequences, each once."""
    reasons = {sequence.finish_reason.value for sequence in context.sequences if sequence.finish_reason is not None}
    return ",".join(sorted(reasons)) or None


def _milliseconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(1e3 * (end - start), 3)


@lru_cache(_CACHE_SIZE)
def _as_word(text: str) -> str:
    """The text as one word, so that a client's name cannot look like another field or record."""
    return text if _PLAIN_WORD.fullmatch(text) else json.dumps(text)
