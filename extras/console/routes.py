"""The static files of the console, on /console.

The page tells nothing of the server: what it shows it asks of the other endpoints, with the key and the headers that
its user types. Knows neither models nor keys.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from ...api.http.error_responses import ApiError
from ...api.http.rules import ANY, HostPort, is_loopback, parse_host_names, plain_name
from ...core.errors import NotFound

_FOLDER = Path(__file__).parent / "page"
_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def parse_console_hosts(names: Iterable[str], http_address: str) -> frozenset[str]:
    """The names that the console is served under, beside those of the loopback: the address that the server listens on,
    and those of --console-host. Raises as `parse_host_names`."""
    return parse_host_names(names, "--console-host") | {plain_name(http_address)}


class ConsoleRoutes:
    """The routes and their handlers. `hosts`: as `parse_console_hosts` has them.

    A page from elsewhere whose name is made to lead to this address (DNS rebinding) would be of one origin with the
    console: so that is served under names that are this server's own.
    """

    def __init__(self, hosts: Collection[str]) -> None:
        self._hosts = hosts
        self._files = {file.name: file.read_bytes() for file in _FOLDER.iterdir() if file.suffix in _MEDIA_TYPES}

    def routes(self) -> list[Route]:
        return [
            Route("/console", self.page, methods=["GET"]),
            Route("/console/{file}", self.file, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        self._check_host(request.scope)
        if request.scope["raw_path"].endswith(b"/"):  # from there the page's links would lead one folder too deep
            return RedirectResponse("../console", 308)
        return self._answer(_INDEX)

    async def file(self, request: Request) -> Response:
        self._check_host(request.scope)
        name = request.path_params["file"]
        if name not in self._files or name == _INDEX:
            raise NotFound(f"the console has no file '{name}'")
        return self._answer(name)

    def _answer(self, name: str) -> Response:
        return Response(self._files[name], headers=_HEADERS, media_type=_MEDIA_TYPES[Path(name).suffix])

    def _check_host(self, scope: Scope) -> None:
        shown = Headers(scope=scope).getlist("host")
        name = HostPort.of_header(shown[0].encode("latin-1")).name if len(shown) == 1 else ""
        local = plain_name((scope.get("server") or ("",))[0])  # the end of this connection: one that is listened on
        if not name or not (name in self._hosts or ANY in self._hosts or name == local or is_loopback(name)):
            message = f"the console is not served under the host name '{name}'; --console-host NAME adds one"
            raise ApiError(message, 403)
