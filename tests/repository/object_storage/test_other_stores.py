"""Google's and Azure's stores, at emulators on loopback behind a proxy that spoils, where these are installed."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from charonia.repository.object_storage.bucket_repository import BucketRepository
from charonia.repository.object_storage.object_cache import ObjectCache
from charonia.repository.object_storage.stores import StoreRefused

from ...proofs.fault_proxy import Fault, FaultProxy
from .conftest import ignore


class Emulated(NamedTuple):
    """A repository's URL, what puts an object into its bucket, and the proxy that the repository asks."""

    url: str
    put: Callable[[str, bytes], None]
    proxy: FaultProxy


ACCOUNT, KEY = (
    "devstoreaccount1",
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
)
"""Azurite's, which its documentation tells."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    emulator: Any = pytest.importorskip("gcp_storage_emulator.server")
    pytest.importorskip("gcsfs")
    port = free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="models")
    server.start()
    url = f"http://127.0.0.1:{port}"

    def put(key: str, content: bytes) -> None:
        asked = {"uploadType": "media", "name": key}
        httpx.post(f"{url}/upload/storage/v1/b/models/o", params=asked, content=content).raise_for_status()

    with FaultProxy(url) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        yield Emulated("gs://models/in", put, proxy)
    server.stop()


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Emulated]:
    azurite = shutil.which("azurite-blob")
    if azurite is None:
        pytest.skip("azurite is not installed")
    pytest.importorskip("adlfs")
    blobs: Any = pytest.importorskip("azure.storage.blob")
    port = free_port()
    command = [azurite, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(tmp_path / "azurite")]
    process = subprocess.Popen([*command, "--skipApiVersionCheck", "--silent"])
    url = f"http://127.0.0.1:{port}"

    def connection(host: str) -> str:
        account = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY}"
        return f"{account};BlobEndpoint={host}/{ACCOUNT};"

    deadline = time.monotonic() + 30
    while True:
        try:
            httpx.get(url)
            break
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    with blobs.BlobServiceClient.from_connection_string(connection(url)) as client, FaultProxy(url) as proxy:
        client.create_container("models")
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection(proxy.url))

        def put(key: str, content: bytes) -> None:
            client.get_blob_client("models", key).upload_blob(content, overwrite=True)

        yield Emulated(f"as://{ACCOUNT}/models/in", put, proxy)
    process.terminate()
    process.wait(30)


@pytest.mark.parametrize("store", ["google", "azure"])
def test_models_are_listed_read_and_read_anew(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url, put, _ = request.getfixturevalue(store)
    put("in/m/config.pbtxt", b'backend: "toy"')
    put("in/m/1/weights", b"1" * 3000)
    cache = ObjectCache(tmp_path / "cache")
    repository = BucketRepository(url, cache)
    try:
        assert repository.model_names() == ["m"]
        assert (repository.fetch("m", None, "", ignore).path / "1/weights").read_bytes() == b"1" * 3000
        put("in/m/2/we ights#2", b"2" * 3000)
        repository.refresh()
        fetched = repository.fetch("m", None, "", ignore)
        assert (fetched.path / "2/we ights#2").read_bytes() == b"2" * 3000
        stale = repository.stamps("m")
        put("in/m/2/we ights#2", b"3" * 3000)
        cache.files.entry(repository._store, stale[-1]).unlink()
        fetched.drop()
        changed = repository.fetch("m", None, "", ignore)  # as it was listed it is not there any more
        assert (changed.path / "2/we ights#2").read_bytes() == b"3" * 3000
    finally:
        cache.close()
        repository.close()


@pytest.mark.parametrize("store", ["google", "azure"])
def test_what_may_not_be_listed_or_read_is_refused_by_name(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url, put, proxy = request.getfixturevalue(store)
    put("in/m/config.pbtxt", b'backend: "toy"')
    put("in/m/1/weights", b"1" * 3000)
    cache = ObjectCache(tmp_path / "cache")
    try:
        with proxy.fault(Fault(status=403)), pytest.raises(StoreRefused, match=r"the store refuses it \(403"):
            BucketRepository(url, cache)
        repository = BucketRepository(url, cache)
        reading = Fault(lambda request: "weights" in request.path and not request.is_listing, status=403)
        with proxy.fault(reading), pytest.raises(StoreRefused, match="object 'm/1/weights': the store refuses it"):
            repository.fetch("m", None, "", ignore)
        assert (repository.fetch("m", None, "", ignore).path / "1/weights").read_bytes() == b"1" * 3000
        with proxy.fault(Fault(status=403)):
            assert not repository.refresh()
        assert repository.refresh()
        repository.close()
    finally:
        cache.close()


def test_a_bucket_that_is_not_there_is_refused(google: Emulated, tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "cache")
    try:
        with pytest.raises(StoreRefused, match="there is no such bucket"):
            BucketRepository("gs://nowhere", cache)
    finally:
        cache.close()
