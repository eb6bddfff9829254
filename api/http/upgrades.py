"""Offers to speak something else: they are not taken up, and their requests are answered like any other.

JDK's HTTP client offers h2c with the first request of every connection. The parser takes such an offer for accepted,
and what follows, the body first, for something else: so it gets the request once more, without the offer. Knows nothing
of what is asked.
"""

from collections.abc import Iterator

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from .protocol_errors import ErrorAnsweringProtocol

_OFFER = {b"upgrade", b"http2-settings"}


class UpgradeDecliningProtocol(ErrorAnsweringProtocol):
    """Whoever overrides `on_headers_complete` leaves out requests that `offer`."""

    @property
    def offers_upgrade(self) -> bool:
        """This request comes again."""
        return self.parser.should_upgrade()

    def _should_upgrade(self) -> bool:
        return True  # uvicorn then waits for the other protocol, and takes nothing for the request's end

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except HttpParserError as error:
            self.answer_parser_error(error)

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while True:
            try:
                return self.parser.feed_data(rest)
            except HttpParserUpgrade as offer:
                head, rest = self._declined(), rest[offer.args[0] :]
                self.parser = HttpRequestParser(self)
                self.parser.feed_data(head)

    def _declined(self) -> bytes:
        """The request up to its body, without the offer. CONNECT is one by itself."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise HttpParserError
        lines = b"".join(b"%b: %b\r\n" % header for header in _without_offer(self.headers))
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, lines)


def _without_offer(headers: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    for name, value in headers:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            yield name, b", ".join(token for token in tokens if token.lower() not in _OFFER)
        elif name not in _OFFER:
            yield name, value
