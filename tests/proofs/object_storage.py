"""Models of a bucket, whatever its store does: `python -m tests.proofs.object_storage`.

moto's S3 server on loopback, behind a proxy of ours that counts requests and spoils answers. First a model of 200
versions, a thousand objects: how many requests its start takes, with an empty cache and with a full one. Then rounds of
uploads while servers read: answers fail, break off, come late or are another object's, the store goes away, caches are
too small. What a server gets must be one upload, whole; else an error that says so. Needs the extra `dev`.
"""

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.progress import Progress

from charonia.core.errors import CharoniaError
from charonia.repository.object_storage.bucket_repository import BucketRepository
from charonia.repository.object_storage.object_cache import ObjectCache

from .fault_proxy import Fault, FaultProxy

VERSIONS, OBJECTS = 200, 5
MOST_LISTINGS = 3
_BUCKET = "models"

app = App(name="python -m tests.proofs.object_storage", help=__doc__)


@contextmanager
def store() -> Iterator[tuple[FaultProxy, Any]]:
    """A proxy before an S3 server, and a client of the server."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "proof", "AWS_SECRET_ACCESS_KEY": "proof", "AWS_DEFAULT_REGION": "us-east-1"}
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = import_module("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        client: Any = import_module("boto3").client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket=_BUCKET)
        with FaultProxy(f"http://{host}:{port}") as proxy:
            yield proxy, client
        client.close()
    finally:
        server.stop()


@contextmanager
def repository(proxy: FaultProxy, cache: Path, budget: int | None = None) -> Iterator[BucketRepository]:
    """The bucket as one more server has it."""
    kept = ObjectCache(cache, budget)
    try:
        opened = BucketRepository(f"s3://{proxy.url}/{_BUCKET}", kept)
        yield opened
        opened.close()
    finally:
        kept.close()


def count_requests(proxy: FaultProxy, client: Any, folder: Path, versions: int) -> list[tuple[int, int]]:
    """Listings and reads of a start with an empty cache, and of one with a full one."""
    for version in range(1, versions + 1):
        for number in range(OBJECTS):
            client.put_object(Bucket=_BUCKET, Key=f"many/{version}/{number}", Body=f"{version} {number}")
    client.put_object(Bucket=_BUCKET, Key="many/config.pbtxt", Body='backend: "python" version_policy { all {} }')
    counts = []
    for _ in range(2):
        proxy.requests.clear()
        with repository(proxy, folder) as opened:
            fetched = opened.fetch("many", None, "", _ignore)
            assert sum(path.is_file() for path in fetched.path.rglob("*")) == versions * OBJECTS + 1
        counts.append((proxy.listings, proxy.reads))
    return counts


def _ignore(phase: str, fraction: float, seconds: float, detail: str) -> None: ...


class Uploads:
    """A model of three files of `size` bytes, each of which says which upload it is of."""

    def __init__(self, client: Any, size: int) -> None:
        self._client, self._size = client, size
        self.number = 0

    def next(self) -> None:
        self.number += 1
        content = f"{self.number:>9}\n".encode() * (self._size // 10)
        for name in ("labels.txt", "1/first", "1/second"):
            self._client.put_object(Bucket=_BUCKET, Key=f"m/{name}", Body=content)

    def read(self, directory: Path) -> int:
        """Which upload a directory is. Raises `AssertionError` if it is several, or not whole."""
        files = [directory / name for name in ("labels.txt", "1/first", "1/second")]
        lines = [line for file in files for line in file.read_bytes().splitlines()]
        assert Counter(lines) == {lines[0]: 3 * (self._size // 10)}
        return int(lines[0])


def run_rounds(
    proxy: FaultProxy, client: Any, folder: Path, rounds: int, seed: int = 0, tell: Callable[[], None] = lambda: None
) -> Counter[str]:
    """How the rounds ended: with an upload, or by which error."""
    client.put_object(Bucket=_BUCKET, Key="m/config.pbtxt", Body='backend: "python"')
    random, uploads, ends = Random(seed), Uploads(client, 40_000), Counter[str]()
    uploads.next()
    for _ in range(rounds):
        faults = [_fault(random, uploads) for _ in range(random.randrange(3))]
        budget = random.choice((None, None, 200_000, 30_000))
        proxy.faults[:] = faults
        before = uploads.number
        try:
            with repository(proxy, folder, budget) as opened:
                fetched = opened.fetch("m", None, "", _ignore)
                assert uploads.read(fetched.path) >= before or not opened.reachable
                ends["an upload"] += 1
        except CharoniaError as error:
            ends[type(error).__name__] += 1
        proxy.faults.clear()
        if random.random() < 0.5:
            uploads.next()
        tell()
    return ends


def _fault(random: Random, uploads: Uploads) -> Fault:
    times = random.choice((1, 2, 50))
    share, seed = random.random(), random.randrange(1 << 30)
    chooser = Random(seed)
    fault = Fault(lambda request: chooser.random() < share, times)
    match random.randrange(6):
        case 0:
            fault.status = random.choice((500, 503, 403))
        case 1:
            fault.cut = random.randrange(5000)
        case 2:
            fault.delay = 0.02
        case 3:
            fault.etag = "0" * 32
        case _:
            fault.times, fault.before = 1, uploads.next
    return fault


@app.default
def main(rounds: int = 400, versions: int = VERSIONS) -> int:
    """Print what was counted; 1 where a start takes too many requests, or a round broke."""
    console = Console(highlight=False)
    logging.disable(logging.WARNING)  # of plain HTTP, by every server
    with TemporaryDirectory(prefix="charonia-proof-") as folder, store() as (proxy, client):
        cold, warm = count_requests(proxy, client, Path(folder) / "many", versions)
        objects = versions * OBJECTS
        console.print(f"{versions} versions, {objects} objects: (listings, reads) {cold} at first, then {warm}")
        with Progress(console=console) as progress:
            task = progress.add_task("rounds", total=rounds)
            ends = run_rounds(proxy, client, Path(folder) / "rounds", rounds, tell=lambda: progress.advance(task))
        console.print(f"{rounds} rounds: {dict(ends)}")
    return 0 if warm[0] <= MOST_LISTINGS and not warm[1] else 1


if __name__ == "__main__":
    sys.exit(app())
