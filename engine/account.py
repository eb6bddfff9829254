"""The account of one request: when what happened to it, how much it used, and the one record that ends it.

Knows nothing of protocols. Written by the event loop that serves the request; a chunk costs less than a microsecond.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..core.errors import CharoniaError, Code, QueueFull, RequestTimeout
from ..core.metrics import QUEUE_FULL, End, LlmMetrics, Outcome
from ..core.request import FinishReason

log = logging.getLogger("charonia.requests")

_CANCELLED = End(Outcome.CANCELLED)
_REFUSALS = (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.UNSUPPORTED)
"""Codes that blame the request, whenever they come."""

_OUTCOMES = {FinishReason.ABORT.value: Outcome.CANCELLED}
"""Finish reasons whose outcome is called otherwise."""


class RequestRecord(NamedTuple):
    """What is logged of a request, once, when it ended: each field is an attribute of the `logging` record too.

    Times that never came, and what was never counted, are None.
    """

    request_id: str
    model: str
    version: str
    tenant: str
    outcome: str
    reason: str
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int
    queue_ms: float | None
    ttft_ms: float | None
    e2e_ms: float

    def __str__(self) -> str:
        said = ((name, value) for name, value in self._asdict().items() if value not in (None, ""))
        return " ".join(f"{name}={value}" for name, value in said)


class Account:
    """Times are of `time.monotonic`, in the order of the attributes; None until then.

    `arrived`: the model got it; `submitted`: the engine did; `begun`: its first step began; `first` and `last`:
    tokens came; `ended`.
    """

    __slots__ = (
        "arrived",
        "begun",
        "cached",
        "end",
        "ended",
        "finish_reason",
        "first",
        "generated",
        "id",
        "last",
        "metrics",
        "prompt",
        "submitted",
        "tenant",
        "tokens",
    )

    def __init__(self, metrics: LlmMetrics, request_id: str = "") -> None:
        self.metrics = metrics
        self.id = request_id
        self.name_tenant("")
        self.arrived = time.monotonic()
        self.submitted: float | None = None
        self.begun: float | None = None
        self.first: float | None = None
        self.last = self.arrived
        self.ended: float | None = None
        self.prompt: int | None = None
        self.cached: int | None = None
        self.generated = 0
        self.finish_reason: FinishReason | None = None
        self.end: End | None = None

    def name_tenant(self, tenant: str) -> None:
        self.tenant = tenant
        self.tokens = self.metrics.tenant(tenant)

    def submit(self, prompt: int) -> None:
        """The engine has it, with that many prompt tokens."""
        self.prompt = prompt
        self.submitted = time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the engine has it."""
        return time.monotonic() - (self.submitted or self.arrived)

    def begin(self, cached: int, at: float) -> None:
        """Its first step began, at about `at`."""
        submitted = self.arrived if self.submitted is None else self.submitted
        self.begun = max(at, submitted)
        self.cached = cached
        self.tokens.prompt += self.prompt or 0
        self.metrics.queue.observe(self.begun - submitted)

    def receive(self, count: int, at: float) -> None:
        """That many tokens came."""
        self.generated += count
        self.tokens.generated += count
        if self.first is None:
            self._receive_first(at)
        else:
            self.metrics.inter_token.observe((at - self.last) / count, count)
        self.last = at

    def _receive_first(self, at: float) -> None:
        self.first = at
        self.metrics.first_token.observe(at - self.arrived)
        if self.begun is not None:
            self.metrics.prefill.observe(at - self.begun)

    def finish(self, reason: FinishReason) -> None:
        """The last token is on its way to the client."""
        self.finish_reason = reason
        self._end(End(_OUTCOMES.get(reason.value) or Outcome(reason.value)))

    def cancel(self) -> None:
        """The reader left; after the last token that changes nothing."""
        if self.end is None:
            self._end(_CANCELLED)

    def fail(self, error: Exception) -> None:
        self._end(self._failure(error))

    def _failure(self, error: Exception) -> End:
        if isinstance(error, QueueFull):
            return QUEUE_FULL
        if isinstance(error, RequestTimeout):
            return End(Outcome.TIMEOUT)
        code = error.code if isinstance(error, CharoniaError) else Code.INTERNAL
        refused = code in _REFUSALS or (code is Code.UNAVAILABLE and self.submitted is None)
        return End(Outcome.REJECTED if refused else Outcome.ERROR, code.value.lower())

    def _end(self, end: End) -> None:
        self.end = end
        self.ended = time.monotonic()


class Accounts:
    """Opens the accounts of one model's requests and closes them: into the instruments, and into the log."""

    def __init__(self, model: str, version: str, metrics: LlmMetrics) -> None:
        self._model = model
        self._version = version
        self._metrics = metrics

    @contextmanager
    def open(self, request_id: str) -> Iterator[Account]:
        """One request; whatever ends the block ends it: a reader that leaves before the last token has cancelled it."""
        account = Account(self._metrics, request_id)
        try:
            yield account
        except Exception as error:
            account.fail(error)
            raise
        finally:
            account.cancel()
            self._close(account)

    def _close(self, account: Account) -> None:
        assert account.end is not None
        self._metrics.ended[account.end] += 1
        if account.end.outcome.answered:
            self._measure(account)
        if log.isEnabledFor(logging.INFO):
            record = self._record(account, account.end)
            log.info("%s", record, extra=record._asdict())

    def _measure(self, account: Account) -> None:
        """An answered request: its phases, and Triton's sums of them."""
        metrics, ended = self._metrics, account.ended or account.last
        submitted = account.submitted or account.arrived
        begun = account.begun or submitted
        first = account.first or account.last
        metrics.request.observe(ended - account.arrived)
        metrics.decode.observe(account.last - first)
        metrics.prompt_length.observe(account.prompt or 0)
        metrics.generation_length.observe(account.generated)
        spent = metrics.durations
        spent.request += _microseconds(ended - account.arrived)
        spent.compute_input += _microseconds(submitted - account.arrived)
        spent.queue += _microseconds(begun - submitted)
        spent.compute_infer += _microseconds(account.last - begun)
        spent.compute_output += _microseconds(ended - account.last)

    def _record(self, account: Account, end: End) -> RequestRecord:
        begun = None if account.begun is None or account.submitted is None else account.begun - account.submitted
        return RequestRecord(
            request_id=account.id,
            model=self._model,
            version=self._version,
            tenant=account.tenant,
            outcome=end.outcome.value,
            reason=end.reason,
            finish_reason=None if account.finish_reason is None else account.finish_reason.value,
            prompt_tokens=account.prompt,
            cached_tokens=account.cached,
            generated_tokens=account.generated,
            queue_ms=_milliseconds(begun),
            ttft_ms=_milliseconds(None if account.first is None else account.first - account.arrived),
            e2e_ms=round(1e3 * ((account.ended or account.last) - account.arrived), 3),
        )


def _microseconds(seconds: float) -> int:
    return int(max(seconds, 0.0) * 1e6)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
