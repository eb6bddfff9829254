"""An S3 server on loopback, and our proxy before it."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from charonia.core.backends import OnProgress
from charonia.repository.object_storage import download, stores
from charonia.repository.object_storage.bucket_repository import BucketRepository, ModelDirectory
from charonia.repository.object_storage.object_cache import ObjectCache

from ...object_stores import BUCKET, Bucket, serving_s3, set_credentials
from ...proofs.fault_proxy import FaultProxy


@pytest.fixture(scope="module", autouse=True)
def kept_descriptions() -> Iterator[None]:
    """What the stores' clients read of S3 when they are made, megabytes of JSON, is read once."""
    loaders: Any = pytest.importorskip("botocore.loaders")
    with pytest.MonkeyPatch.context() as patch:
        load = cache(loaders.JSONFileLoader().load_file)
        patch.setattr(loaders.JSONFileLoader, "load_file", lambda loader, path: load(path))
        yield


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    with serving_s3() as url:
        yield url


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    set_credentials(monkeypatch)
    made = Bucket(s3)
    yield made
    made.close()


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """What the servers of a test see; parts are small, and pauses short."""
    monkeypatch.setattr(download, "PART_BYTES", 1000)
    monkeypatch.setattr(stores, "FIRST_PAUSE", 0.01)
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
