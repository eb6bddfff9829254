"""Object stores on loopback, and buckets that a test fills."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

BUCKET = "models"


@cache
def s3_client(url: str) -> Any:
    """One for all tests that fill buckets there: it takes longer to make than most of them ask it for."""
    boto3: Any = pytest.importorskip("boto3")
    return boto3.client("s3", endpoint_url=url)


class Bucket:
    """An S3 bucket at the server of this URL."""

    def __init__(self, url: str) -> None:
        self._client = s3_client(url)
        self._client.create_bucket(Bucket=BUCKET)

    def put(self, key: str, content: bytes | str) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def put_tree(self, directory: Path) -> None:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                self.put(str(path.relative_to(directory)), path.read_bytes())

    def delete(self, prefix: str) -> None:
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
            for entry in page.get("Contents", ()):
                self._client.delete_object(Bucket=BUCKET, Key=entry["Key"])

    def close(self) -> None:
        self.delete("")
        self._client.delete_bucket(Bucket=BUCKET)


def set_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as no store of tests looks at."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret-of-the-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")


@contextmanager
def serving_s3() -> Iterator[str]:
    """The URL of moto's server, in this process."""
    moto: Any = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
