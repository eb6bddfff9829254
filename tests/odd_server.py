"""Something that listens and is no server of ours."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NO_SERVERS_OF_OURS = (
    b"SSH-2.0-OpenSSH_9.0\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n[1, 2]",
    b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"data":[1]}',
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 14\r\n\r\n<html>\n</html>",
    b"",
)


@contextmanager
def answering(raw: bytes) -> Iterator[str]:
    """The URL of what says this to every request, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    with listening.accept()[0] as connection:
                        connection.recv(65536)
                        connection.sendall(raw)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(5)
