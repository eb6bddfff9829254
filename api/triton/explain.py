"""The route that explains what limits a model: two readings of the server's own metrics, and what they say."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import InvalidArgument, Unavailable
from ...telemetry.bottlenecks import explain
from ...telemetry.scrape import Interval, Scrape, read_scrape
from ...telemetry.shared_state import ServerAdministration
from ..http.error_responses import json_response
from .endpoints import model_and_version

_LEAST, _MOST = 0.1, 30.0
"""Seconds that a request may ask to be watched."""

_SECONDS = 1.0
"""Seconds of a request that says nothing, unless there was one not longer ago than _RECENT and longer than this."""

_RECENT = 60.0
_MOST_WAITING = 16
"""Requests that watch at a time: each holds a reading of all metrics."""


class MetricsReading(NamedTuple):
    at: float
    scrape: Scrape


class ExplainEndpoint:
    """The handler; `registry` collects what the server measures, all of it whatever `/metrics` shows. The readings are
    taken in the event loop, as a scrape's are, and judged beside it."""

    def __init__(
        self,
        administration: ServerAdministration,
        registry: CollectorRegistry | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._administration = administration
        self._registry = registry
        self._clock = clock
        self._last: MetricsReading | None = None
        self._waiting = 0

    def routes(self) -> list[Route]:
        models = "/v2/models/{model}", "/v2/models/{model}/versions/{version:int}"
        return [Route(f"{path}/explain", self.answer, methods=["GET"]) for path in models]

    async def answer(self, request: Request) -> Response:
        """Query: `seconds` between the readings."""
        name, version = model_and_version(request)
        self._administration.model_config(name, version)
        interval = await self._watch(_read_seconds(request.query_params.get("seconds")))
        reports = await asyncio.to_thread(explain, interval, self._administration.shared_state.rooflines, name)
        reports = [report for report in reports if version in ("", report.version)]
        if not reports:
            raise InvalidArgument(f"'{name}' has no metrics of its own: explain the models that serve for it")
        return json_response({"reports": msgspec.to_builtins(reports)})

    async def _watch(self, seconds: float | None) -> Interval:
        """The readings of so many seconds from now on; for None, since the last request if that is recent."""
        last, now = self._last, self._clock()
        if seconds is not None or last is None or not _SECONDS <= now - last.at <= _RECENT:
            if self._waiting >= _MOST_WAITING:
                raise Unavailable(f"{self._waiting} requests for an explanation wait already")
            last = self._read()
            self._waiting += 1
            try:
                await asyncio.sleep(_SECONDS if seconds is None else seconds)
            finally:
                self._waiting -= 1
        self._last = self._read()
        return Interval(last.scrape, self._last.scrape)

    def _read(self) -> MetricsReading:
        if self._registry is None:
            raise Unavailable("this server measures nothing")
        return MetricsReading(self._clock(), read_scrape(self._registry.collect()))


def _read_seconds(text: str | None) -> float | None:
    try:
        seconds = None if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if seconds is not None and not _LEAST <= seconds <= _MOST:
        raise InvalidArgument(f"seconds must be from {_LEAST} to {_MOST:g}, got '{text}'", field="seconds")
    return seconds
