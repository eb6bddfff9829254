"""The way of a request from the middleware to its endpoint: past FastAPI where it is a POST to a plain route, whose own
middleware would cost a third of a short request, and something for every event of a stream."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache, partial
from inspect import iscoroutinefunction
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import CharoniaError, shutdown_error
from ...core.extension_contracts import EndpointFunction
from .connection import CLIENT_LEFT, ClientDisconnected, EventStreamResponse
from .error_responses import error_response
from .request_context import answer_headers, record_error
from .request_cycle import add_response_header, response_started, send_response

_CACHED_PATHS = 256
_LONGEST_CACHED = 256
"""The number and the length of the paths whose routes are cached."""

READING = frozenset({"GET", "HEAD"})
"""Methods of requests that change nothing."""


class PostRouter:
    """Calls the endpoint of a POST request to one of `routes`, if that is a plain one with a coroutine function; all
    other requests go to `app`, and so do those to functions that want a thread, to routes that FastAPI made of a
    function with parameters, and to applications."""

    def __init__(self, routes: Sequence[BaseRoute], app: ASGIApp) -> None:
        self._app = app
        self._ending: defaultdict[str, list[tuple[Route, ASGIApp]]] = defaultdict(list)
        for route in routes:
            if not isinstance(route, Route) or isinstance(route, APIRoute):
                continue
            if "POST" in (route.methods or ()) and iscoroutinefunction(route.endpoint):
                answer: ASGIApp = partial(_answer, route.endpoint)
                if isinstance(route.app, SettledApp):
                    answer = SettledApp(answer, route.app.settle)
                self._ending[_last(route.path)].append((route, answer))
        self._find = lru_cache(_CACHED_PATHS)(self._search)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            path = scope["path"]
            match = self._find(path) if len(path) < _LONGEST_CACHED else self._search(path)
            if match is not None:
                answer, scope["path_params"] = match
                return await answer(scope, receive, send)
        # FastAPI's libraries compare tasks by identity: from here on it is the real one, not an eager start's.
        await asyncio.sleep(0)
        return await self._app(scope, receive, send)

    def _search(self, path: str) -> tuple[ASGIApp, dict[str, Any]] | None:
        """What answers a path, and the path's parameters, which are cached: they must not be changed."""
        for route, answer in self._ending.get(_last(path), ()):
            if match := route.path_regex.match(path):
                convert = route.param_convertors
                return answer, {key: convert[key].convert(text) for key, text in match.groupdict().items()}
        return None


def _last(path: str) -> str:
    """The last part of a path, in which no two paths of a route differ."""
    return path.rpartition("/")[2]


def _with_answer_headers(scope: Scope, send: Send) -> Send:
    for header in answer_headers(scope):
        send = add_response_header(scope, send, *header)
    return send


async def _answer(endpoint: EndpointFunction, scope: Scope, receive: Receive, send: Send) -> None:
    try:
        response = await endpoint(Request(scope, receive))
        # A stream begins later, with warnings that there are then.
        sender = send if isinstance(response, EventStreamResponse) else _with_answer_headers(scope, send)
        await response(scope, receive, sender)
    except CharoniaError as error:
        record_error(scope, error.with_traceback(None))  # its frames may hold large tensors
        await send_response(error_response(error, scope["path"]), scope, receive, _with_answer_headers(scope, send))
    except ClientDisconnected:
        await Response(status_code=CLIENT_LEFT)(scope, receive, send)
    except asyncio.CancelledError as cancelled:
        exiting = shutdown_error(cancelled)
        if exiting is None or response_started(scope):
            raise
        record_error(scope, exiting)
        await error_response(exiting, scope["path"])(scope, receive, send)


class SettledApp:
    """Sends what `app` answers, an error too, after `settle`, unless the request only reads."""

    def __init__(self, app: ASGIApp, settle: Callable[[], Awaitable[None]]) -> None:
        self._app = app
        self.settle = settle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_settled(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self.settle()
            await send(message)

        await self._app(scope, receive, send if scope["method"] in READING else send_settled)
