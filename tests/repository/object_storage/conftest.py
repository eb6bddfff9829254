"""An S3 server on loopback, and our proxy before it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia.bench.proofs.fault_proxy import FaultProxy
from charonia.repository.backend_registry import OnProgress
from charonia.repository.object_storage import download
from charonia.repository.object_storage.bucket_repository import BucketRepository, ModelDirectory
from charonia.repository.object_storage.object_cache import ObjectCache

moto_server = pytest.importorskip("moto.server")
pytest.importorskip("s3fs")

BUCKET = "models"


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The URL of moto's server."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret-of-the-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")


class Bucket:
    """A bucket that a test fills."""

    def __init__(self, url: str) -> None:
        boto3: Any = pytest.importorskip("boto3")
        self._client = boto3.client("s3", endpoint_url=url)
        self._client.create_bucket(Bucket=BUCKET)

    def put(self, key: str, content: bytes | str) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def put_tree(self, directory: Path, prefix: str = "") -> None:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}{path.relative_to(directory)}", path.read_bytes())

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=key)

    def empty(self) -> None:
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for entry in page.get("Contents", ()):
                self.delete(entry["Key"])
        self._client.delete_bucket(Bucket=BUCKET)
        self._client.close()


@pytest.fixture
def bucket(s3: str, credentials: None) -> Iterator[Bucket]:
    made = Bucket(s3)
    yield made
    made.empty()


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """What the servers of a test see; parts are small, and pauses short."""
    monkeypatch.setattr(download, "PART_BYTES", 1000)
    monkeypatch.setattr(download, "_FIRST_PAUSE", 0.01)
    with FaultProxy(s3) as running:
        yield running


def ignore(phase: str, fraction: float, seconds: float, detail: str) -> None: ...


class Opened:
    """A repository over a cache, as one server has them."""

    def __init__(self, url: str, cache: Path, budget: int | None = None) -> None:
        self.cache = ObjectCache(cache, budget)
        self.repository = BucketRepository(url, self.cache)

    def fetch(self, name: str = "m", on_progress: OnProgress = ignore) -> ModelDirectory:
        return self.repository.fetch(name, None, "", on_progress)


@pytest.fixture
def opened(proxy: FaultProxy, tmp_path: Path) -> Iterator[Any]:
    """`opened(budget=None, path="")`: another server, over the same cache."""
    made: list[Opened] = []

    def open_another(budget: int | None = None, path: str = "") -> Opened:
        made.append(Opened(f"s3://{proxy.url}/{BUCKET}{path}", tmp_path / "cache", budget))
        return made[-1]

    yield open_another
    for each in made:
        each.cache.close()
        each.repository.close()
