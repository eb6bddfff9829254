"""The one log record that ends every request."""

import json
import logging
import re
import time
from functools import lru_cache
from typing import NamedTuple

from ..core.request_context import RequestContext, RequestEnd, RequestSummary

log = logging.getLogger("charonia.requests")

_PLAIN_WORD = re.compile(r"[\w.,:/@+-]+", re.ASCII)

_MAX_NAME_LENGTH = 256
"""Characters shown of a name that a client made up."""

_CACHE_SIZE = 256
"""Texts that are remembered."""


class RequestLogFields(NamedTuple):
    """What is logged of a request: each field is an attribute of the `logging` record too.

    Tokens are those of all answers, `choices` of them. Times that never came, and what was never counted, are None.
    `x_request_id`: what the header of that name says, unless `request_id` ends with it.
    """

    request_id: str
    x_request_id: str
    trace_id: str
    door: str
    model: str
    version: str
    tenant: str
    outcome: str
    reason: str
    finish_reason: str | None
    choices: int
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int
    queue_ms: float | None
    ttft_ms: float | None
    e2e_ms: float

    def __str__(self) -> str:
        return " ".join(
            [
                f"{name}={_as_word(value) if type(value) is str else value}"
                for name, value in zip(_NAMES, self, strict=True)
                if value is not None and value != ""
            ]
        )


_NAMES = RequestLogFields._fields


_EMPTY_RECORD = vars(logging.LogRecord(log.name, logging.INFO, __file__, 0, "%s", (), None))
"""The attributes with which every record begins; finding out the line of code that logs would cost more than the
rest."""


class RequestLogRecord(logging.LogRecord):
    """The log record of a request. Its text and fields are made only when a handler asks for them."""

    name = log.name
    levelno = logging.INFO
    levelname = "INFO"

    def __init__(self, exchange: RequestContext) -> None:
        self.created = time.time()
        self._exchange = exchange
        self._filled = False

    def line(self) -> str:
        """The text of the record, made without its fields."""
        return request_log_line(self._exchange)

    def fields(self) -> dict[str, object]:
        """The fields of the record by their names."""
        return request_log_fields(self._exchange)._asdict()

    def getMessage(self) -> str:
        self._fill()
        return super().getMessage()

    def __getattr__(self, name: str) -> object:
        if not self._fill():
            raise AttributeError(name)
        return getattr(self, name)

    def _fill(self) -> bool:
        """Make all attributes; False where that was done before."""
        if self.__dict__.get("_filled", True):
            return False
        record = request_log_fields(self._exchange)
        self.__dict__ |= {
            **_EMPTY_RECORD,
            "created": self.created,
            "args": (record,),
            **record._asdict(),
            "_filled": True,
        }
        return True


def log_request(exchange: RequestContext) -> None:
    """Log an exchange that was closed."""
    if log.isEnabledFor(logging.INFO):
        log.handle(RequestLogRecord(exchange))


def request_log_fields(exchange: RequestContext) -> RequestLogFields:
    assert exchange.end is not None
    summary = exchange.summary
    return RequestLogFields(
        request_id=exchange.id[:_MAX_NAME_LENGTH],
        x_request_id=_x_request_id(exchange),
        trace_id=exchange.trace_id,
        door=exchange.endpoint,
        model=exchange.model[:_MAX_NAME_LENGTH],
        version=exchange.version[:_MAX_NAME_LENGTH],
        tenant=exchange.tenant,
        outcome=exchange.end.outcome.value,
        reason=exchange.end.reason,
        finish_reason=_finish_reason(exchange),
        choices=summary.choices,
        prompt_tokens=summary.prompt,
        cached_tokens=summary.cached,
        generated_tokens=summary.generated,
        queue_ms=_queue_ms(summary),
        ttft_ms=None if summary.first is None else _milliseconds(summary.first - exchange.arrived_at),
        e2e_ms=_milliseconds(exchange.ended_at - exchange.arrived_at),
    )


def request_log_line(exchange: RequestContext) -> str:
    """The text of its `request_log_fields`. Without parts most of it is that of many others, and is remembered."""
    if exchange.sequences or exchange.end is None:
        return str(request_log_fields(exchange))
    model, version = exchange.model[:_MAX_NAME_LENGTH], exchange.version[:_MAX_NAME_LENGTH]
    common = _common_part(exchange.endpoint, model, version, exchange.tenant, exchange.end)
    whole = f"{common}{_milliseconds(exchange.ended_at - exchange.arrived_at)}"
    if exchange.trace_id:
        whole = f"trace_id={exchange.trace_id} {whole}"
    if other := _x_request_id(exchange):
        whole = f"x_request_id={_as_word(other)} {whole}"
    return f"request_id={_as_word(exchange.id[:_MAX_NAME_LENGTH])} {whole}" if exchange.id else whole


def _x_request_id(exchange: RequestContext) -> str:
    return "" if exchange.id.endswith(exchange.client_id) else exchange.client_id[:_MAX_NAME_LENGTH]


@lru_cache(_CACHE_SIZE)
def _common_part(door: str, model: str, version: str, tenant: str, end: RequestEnd) -> str:
    exchange = RequestContext(door)
    exchange.model, exchange.version, exchange.tenant, exchange.end = model, version, tenant, end
    return str(request_log_fields(exchange)).removesuffix("0.0")


def _finish_reason(exchange: RequestContext) -> str | None:
    """The finish reasons of all sequences, each once."""
    if len(exchange.sequences) == 1:
        only = exchange.sequences[0].finish_reason
        return None if only is None else only.value
    reasons = {part.finish_reason.value for part in exchange.sequences if part.finish_reason is not None}
    return ",".join(sorted(reasons)) or None


def _queue_ms(summary: RequestSummary) -> float | None:
    if summary.begun is None or summary.submitted is None:
        return None
    return _milliseconds(summary.begun - summary.submitted)


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3)


@lru_cache(_CACHE_SIZE)
def _as_word(text: str) -> str:
    """One word: what clients call things must not look like another field, or another record."""
    return text if _PLAIN_WORD.fullmatch(text) else json.dumps(text)
