"""Another way into the HTTP application: a cloud's requests become v2's, and the answers to them the cloud's."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import CharoniaError
from ..http.error_responses import error_response
from .clouds import CloudEndpoint, ListModels

_LENGTH = b"inference-header-content-length"
_TYPE = b"content-type"


class CloudMiddleware:
    """`app` as `cloud` wants it."""

    def __init__(self, app: ASGIApp, cloud: CloudEndpoint, models: ListModels) -> None:
        self._app = app
        self._cloud = cloud
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            asked = self._cloud.to_v2(scope, self._models)
        except CharoniaError as error:
            await error_response(error, "/v2")(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            await send(self._told(message))

        path = {"method": asked.method, "path": asked.path, "raw_path": asked.path.encode(), "query_string": b""}
        await self._app({**scope, **path, "headers": self._headers(scope)}, receive, sent)

    def _headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The length of the JSON in front of raw tensors stands in the type of the body."""
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        media = dict(headers).get(_TYPE, b"").replace(b" ", b"")
        if media.startswith(self._cloud.binary_media_type):
            headers.append((_LENGTH, media.removeprefix(self._cloud.binary_media_type)))
        return headers

    def _told(self, message: Message) -> Message:
        """And so it does in an answer."""
        headers = dict(message.get("headers", ()))
        if message["type"] != "http.response.start" or _LENGTH not in headers:
            return message
        headers[_TYPE] = self._cloud.binary_media_type + headers.pop(_LENGTH)
        return {**message, "headers": list(headers.items())}
