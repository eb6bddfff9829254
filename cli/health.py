"""The health check of a container: `python -m charonia.cli.health` exits with 0 where the server is ready, else with 1.

Asks the URL in the file that CHARONIA_URL_FILE names, which the server writes: whatever its port is, and whether it is
encrypted. Standard library alone: it runs every few seconds.
"""

import os
import socket
import ssl
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

VARIABLE = "CHARONIA_URL_FILE"
_SECONDS = 4


def check_health(url: str) -> None:
    """Raises `OSError` unless what serves at `url` is ready. Where health is told to those alone who have a header, and
    where there is no HTTP, a server that answers is taken to be ready."""
    parts = urlsplit(url)
    if parts.scheme == "grpc":
        socket.create_connection((parts.hostname or "", parts.port or 0), _SECONDS).close()
        return
    own_certificate = ssl._create_unverified_context() if parts.scheme == "https" else None  # its name is another one
    try:
        urlopen(f"{url}/v2/health/ready", timeout=_SECONDS, context=own_certificate).close()
    except HTTPError as error:
        error.close()
        if error.code not in (401, 403):
            raise


def main() -> int:
    path = os.environ.get(VARIABLE, "")
    try:
        check_health(Path(path).read_text().strip())
    except OSError as error:
        print(f"not ready: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
