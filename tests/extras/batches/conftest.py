"""A store in a directory of its own, and the endpoints over it, without a model."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from charonia.extras.batches.options import FileLimits
from charonia.extras.batches.store import FileStore, open_store

LIMITS = FileLimits(file_bytes=200_000, total_bytes=1 << 20, tenant_bytes=1 << 20, lines=50, seconds=30 * 86_400)


@pytest.fixture
def limits() -> FileLimits:
    return LIMITS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    opened = open_store(tmp_path / "files", LIMITS)
    yield opened
    opened.close()


@pytest.fixture
def line() -> Callable[..., bytes]:
    """`line(7)` is request 7 of an input file; named members replace its own."""

    def write(number: int, body: Any = None, **members: Any) -> bytes:
        body = {"model": "llm", "prompt": f"p{number}"} if body is None else body
        request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body} | members
        return json.dumps(request).encode() + b"\n"

    return write
