"""/v1/files and /v1/batches over HTTP, without a model."""

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from charonia.api.api_keys import Keyring, Tenant
from charonia.api.app import build_app
from charonia.api.extensions import RouteExtensions
from charonia.api.metadata import ServerInfo
from charonia.api.openapi import describe_routes
from charonia.core.extension_contracts import ExtensionHost, RoutesPlan, ServedRoutes, ServerFacts
from charonia.extras.batches import uploads
from charonia.extras.batches.endpoints import BATCH_ENDPOINTS, BatchRoutes
from charonia.extras.batches.extension import plan_batches
from charonia.extras.batches.options import FilesOptions
from charonia.extras.batches.runner import BatchRunner
from charonia.extras.batches.store import FILE_CHARGE

KEYS = Keyring([("a", Tenant("alpha")), ("b", Tenant("beta"))])
BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}
PURPOSE = {"purpose": "batch"}


@pytest.fixture
async def runner(store: Any, gateway: Any) -> AsyncIterator[BatchRunner]:
    made = BatchRunner(store, gateway, 4)
    yield made
    await made.pause()


@pytest.fixture
async def client(runner: BatchRunner, gateway: Any) -> AsyncIterator[httpx.AsyncClient]:
    def serve(host: ExtensionHost) -> ServedRoutes:
        runner.endpoints = {path: host.endpoints[path] for path in BATCH_ENDPOINTS}
        return ServedRoutes(routes=BatchRoutes(host.administration, runner).routes())

    extensions = RouteExtensions([RoutesPlan(serve=serve)])
    app = build_app(gateway, ServerInfo(max_input_size=2000), KEYS, extensions=extensions)
    headers = {"authorization": "Bearer a"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers=headers) as connected:
        yield connected


async def upload(client: httpx.AsyncClient, content: bytes = b"{}\n", **fields: str) -> httpx.Response:
    return await client.post("/v1/files", data=PURPOSE | fields, files={"file": ("in.jsonl", content)})


def test_an_upload_is_described_as_a_form(gateway: Any) -> None:
    paths = describe_routes(BatchRoutes(gateway, None).routes(), ServerInfo())["paths"]
    content = paths["/v1/files"]["post"]["requestBody"]["content"]
    assert content["multipart/form-data"]["schema"]["allOf"][1]["required"] == ["file"]
    assert [*paths["/v1/batches"]["post"]["requestBody"]["content"]] == ["application/json"]


async def test_without_the_flag_the_endpoints_name_it(gateway: Any) -> None:
    facts = ServerFacts(serves_http=True, http_address="", host_names=(), tenants=0)
    extensions = RouteExtensions([plan_batches(FilesOptions(), facts)])
    transport = httpx.ASGITransport(build_app(gateway, ServerInfo(), extensions=extensions))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for method, path in (("POST", "/v1/files"), ("GET", "/v1/batches"), ("DELETE", "/v1/files/x")):
            response = await client.request(method, path)
            assert response.status_code == 404
            assert "--files-dir" in response.json()["error"]["message"]


async def test_a_file_comes_and_goes(client: httpx.AsyncClient, store: Any) -> None:
    content = b"".join(b'{"n":%d}\n' % number for number in range(10_000))
    made = await upload(client, content, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    file = made.json()
    assert (file["bytes"], file["filename"], file["purpose"]) == (len(content), "in.jsonl", "batch")
    assert file["expires_at"] == file["created_at"] + 3600
    assert (await client.get(f"/v1/files/{file['id']}")).json() == file
    got = await client.get(f"/v1/files/{file['id']}/content")
    assert got.content == content
    assert store.used == len(content)
    assert (await client.delete(f"/v1/files/{file['id']}")).json() == {
        "id": file["id"],
        "object": "file",
        "deleted": True,
    }
    assert (await client.get(f"/v1/files/{file['id']}/content")).status_code == 404
    assert store.used == 0
    assert not list((store.directory / "files").iterdir())


async def test_lists_go_by_pages(client: httpx.AsyncClient) -> None:
    ids = [(await upload(client)).json()["id"] for _ in range(5)]

    async def listed(**query: Any) -> Any:
        return (await client.get("/v1/files", params=query)).json()

    assert [each["id"] for each in (await listed())["data"]] == ids[::-1]
    page = await listed(order="asc", limit=2, after=ids[0], purpose="batch")
    assert [each["id"] for each in page["data"]] == ids[1:3] == [page["first_id"], page["last_id"]]
    assert page["has_more"]
    assert not (await listed(order="asc", after=ids[2]))["has_more"]
    assert (await listed(purpose="batch_output"))["data"] == []
    for wrong in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "file-x"}):
        assert (await client.get("/v1/files", params=wrong)).status_code == 400


async def test_tenants_know_nothing_of_each_other(client: httpx.AsyncClient, runner: BatchRunner) -> None:
    file = (await upload(client)).json()["id"]
    batch = (await client.post("/v1/batches", json=BATCH | {"input_file_id": file})).json()["id"]
    client.headers["authorization"] = "Bearer b"
    answers = [
        await client.get(f"/v1/files/{file}"),
        await client.get(f"/v1/files/{file}/content"),
        await client.delete(f"/v1/files/{file}"),
        await client.get(f"/v1/batches/{batch}"),
        await client.post(f"/v1/batches/{batch}/cancel"),
        await client.post("/v1/batches", json=BATCH | {"input_file_id": file}),
    ]
    assert [answer.status_code for answer in answers] == [404] * 6
    for path in ("/v1/files", "/v1/batches"):
        assert (await client.get(path)).json()["data"] == []
    client.headers["authorization"] = "Bearer c"
    assert (await client.get("/v1/files")).status_code == 401


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"surprise": "x"}, "surprise"),
        ({"expires_after[seconds]": "3600"}, "expires_after.anchor"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "1e9"}, "expires_after.seconds"),
    ],
)
async def test_fields_that_mean_nothing_are_named(
    client: httpx.AsyncClient, store: Any, fields: dict[str, str], param: str
) -> None:
    response = await upload(client, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    await clean(store)


async def clean(store: Any) -> None:
    """Nothing of any upload is left, once threads are done."""
    async with asyncio.timeout(10):
        while list((store.directory / "files").iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert store.used == 0


PART = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
FILE = PART % (b"file", b'; filename="f"', b"{}")
BATCHED = PART % (b"purpose", b"", b"batch")


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"{}", "application/json", "multipart/form-data"),
        (b"{}", "multipart/form-data", "boundary"),
        (b"{}", "multipart/form-data; boundary=" + "b" * 71, "boundary"),
        (b"no form at all", "multipart/form-data; boundary=b", "not valid multipart"),
        (FILE + BATCHED, "multipart/form-data; boundary=b", "cut off"),
        (b"", "multipart/form-data; boundary=b", "cut off"),
        (BATCHED + b"--b--\r\n", "multipart/form-data; boundary=b", "file is missing"),
        (FILE + b"--b--\r\n", "multipart/form-data; boundary=b", "purpose is missing"),
        (FILE + FILE + BATCHED + b"--b--\r\n", "multipart/form-data; boundary=b", "two parts 'file'"),
        (BATCHED * 3, "multipart/form-data; boundary=b", "two fields 'purpose'"),
        (BATCHED * 17, "multipart/form-data; boundary=b", "two fields"),
        (b"--b\r\n" + b"A: b\r\n" * 1000 + b"\r\n", "multipart/form-data; boundary=b", "header"),
        (b"--b\r\nA: " + b"b" * 100_000, "multipart/form-data; boundary=b", "header"),
        (b"--b\r\n" + b"A" * 100_000, "multipart/form-data; boundary=b", "header"),
        (PART % (b"purpose", b"", b"b" * 2000), "multipart/form-data; boundary=b", "too long"),
        (PART % (b"file", b'; filename="f"', b"") + BATCHED + b"--b--\r\n", "multipart/form-data; boundary=b", "empty"),
        (b"\r\n" * 100_000, "multipart/form-data; boundary=b", "cut off"),
    ],
)
async def test_forms_that_are_none_are_refused_and_leave_nothing(
    client: httpx.AsyncClient, store: Any, body: bytes, kind: str, said: str
) -> None:
    response = await client.post("/v1/files", content=body, headers={"content-type": kind})
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]
    await clean(store)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("../../etc/passwd", "passwd"), ("a\\b\x07c.jsonl", "bc.jsonl"), ("x" * 999, "x" * 255), ("/", "file.jsonl")],
)
async def test_a_client_s_name_is_a_word_and_no_path(
    client: httpx.AsyncClient, store: Any, name: str, shown: str
) -> None:
    assert uploads.shown_name(name.encode()) == shown
    body = PART % (b"file", b'; filename="%s"' % name.replace("\\", "\\\\").encode(), b"{}") + BATCHED + b"--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    made = (await client.post("/v1/files", content=body, headers=headers)).json()
    assert made["filename"] == shown
    assert {path.name for path in (store.directory / "files").iterdir()} == {made["id"], made["id"] + ".json"}


async def test_files_have_a_size_and_all_files_too(client: httpx.AsyncClient, store: Any) -> None:
    async def pieces(size: int) -> AsyncIterator[bytes]:
        yield BATCHED + PART[:-2] % (b"file", b'; filename="f"', b"x" * size) + b"\r\n--b--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=b"}
    most = store.limits.file_bytes
    for size, status in ((most, 200), (most + 1, 413), (10 * most, 413)):
        response = await client.post("/v1/files", content=pieces(size), headers=headers)
        assert response.status_code == status
    assert response.json()["error"]["code"] == "file_too_large"
    assert (await upload(client, b"x" * (most + 100_000))).status_code == 413  # by its length alone
    while (last := await upload(client, b"x")).status_code == 200:
        pass
    assert (last.status_code, last.json()["error"]["code"]) == (413, "storage_quota_exceeded")
    assert last.headers["x-should-retry"] == "false"
    assert store.used == most + FILE_CHARGE * (len(store.list_files("alpha")) - 1) <= store.limits.total_bytes


async def test_a_full_disk_is_told_and_leaves_nothing(
    client: httpx.AsyncClient, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    response = await upload(client)
    assert (response.status_code, response.json()["error"]["code"]) == (507, "storage_full")
    monkeypatch.undo()
    await clean(store)


async def test_an_upload_that_drips_is_given_up(
    client: httpx.AsyncClient, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drip() -> AsyncIterator[bytes]:
        yield FILE
        await asyncio.Event().wait()

    monkeypatch.setattr(uploads, "MAX_UPLOAD_SECONDS", 0.01)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    response = await client.post("/v1/files", content=drip(), headers=headers)
    assert response.status_code == 408
    await clean(store)


async def test_who_leaves_in_the_middle_leaves_nothing(client: httpx.AsyncClient, store: Any) -> None:
    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        raise AssertionError("nobody listens")

    first = {"type": "http.request", "body": BATCHED + FILE[:-2] + b"x" * uploads.PIECE_BYTES, "more_body": True}
    messages = iter([first, {"type": "http.disconnect"}])
    kind = (b"content-type", b"multipart/form-data; boundary=b")
    request: Any = uploads.Request({"type": "http", "headers": [kind]}, receive, send)
    store.limits = store.limits._replace(file_bytes=10**6)
    with pytest.raises(uploads.ClientDisconnected):
        await uploads.receive_file(request, store, "")
    await clean(store)


@pytest.mark.parametrize(
    ("members", "status", "param"),
    [
        ({"endpoint": "/v1/rerank"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-x"}, 404, "id"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
        ({"output_expires_after": {"since": 1}}, 400, "output_expires_after"),
        ({"endpoints": 1}, 400, "endpoints"),
        ({"endpoint": None}, 400, "endpoint"),
    ],
)
async def test_batches_that_cannot_be_are_refused(
    client: httpx.AsyncClient, store: Any, members: dict[str, Any], status: int, param: str
) -> None:
    file = (await upload(client)).json()["id"]
    response = await client.post("/v1/batches", json=BATCH | {"input_file_id": file} | members)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert not store.unfinished


async def test_the_input_of_a_batch_stays_while_it_runs(
    client: httpx.AsyncClient, runner: BatchRunner, line: Any, gateway: Any
) -> None:
    gateway.hang = True
    file = (await upload(client, line(0))).json()["id"]
    runner.start()
    batch = (await client.post("/v1/batches", json=BATCH | {"input_file_id": file, "metadata": {"k": "v"}})).json()
    assert (batch["status"], batch["metadata"]) == ("validating", {"k": "v"})
    await asyncio.wait_for(gateway.waiting.wait(), 10)
    response = await client.delete(f"/v1/files/{file}")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "file_in_use")
    cancelled = await client.post(f"/v1/batches/{batch['id']}/cancel")
    assert cancelled.json()["status"] in ("cancelling", "cancelled")  # it may have ended while that was stored
    async with asyncio.timeout(10):
        while (shown := (await client.get(f"/v1/batches/{batch['id']}")).json())["status"] != "cancelled":  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert gateway.open_streams == 0
    told = json.loads((await client.get(f"/v1/files/{shown['error_file_id']}/content")).content)
    assert (told["custom_id"], told["error"]["code"]) == ("r0", "batch_cancelled")
    assert (await client.delete(f"/v1/files/{file}")).status_code == 200
    assert (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()["status"] == "cancelled"


async def test_a_tenant_has_so_many_batches_at_a_time(client: httpx.AsyncClient, store: Any) -> None:
    file = (await upload(client)).json()["id"]
    for _ in range(100):
        assert (await client.post("/v1/batches", json=BATCH | {"input_file_id": file})).status_code == 200
    response = await client.post("/v1/batches", json=BATCH | {"input_file_id": file})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "batch_limit_exceeded")
    page = (await client.get("/v1/batches", params={"limit": 100})).json()
    assert len(page["data"]) == 100
