"""Responses over HTTP/1.0, which has no chunks: a body of unknown length ends where its connection does.

Knows nothing of requests.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class UnchunkedCycle(RequestResponseCycle):
    """Sends a body whose length no header tells as it comes."""

    _measured = True

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._measured = any(name.lower() == b"content-length" for name, _ in message["headers"])
            self.chunked_encoding = None if self._measured else False
        elif not self._measured:
            self.expected_content_length = len(message["body"])  # uvicorn compares
        await super().send(message)
