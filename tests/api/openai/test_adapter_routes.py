"""Adapters as OpenAI's endpoints and vLLM's show them: the names of models, and how they come and go."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from charonia.api.app import build_app
from charonia.api.http.rules import HttpRules
from charonia.api.metadata import ServerInfo
from charonia.core.adapter import Adapter
from charonia.core.errors import LONGEST_MESSAGE, InvalidArgument, shorten
from charonia.core.gateway import ServedAdapter

from ..conftest import LLM, FakeGateway

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SQL = ServedAdapter("sql", LLM, Adapter("sql", "/loras/sql", "0" * 64, 8, 1000))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of two adapters, beside which there is another."""
    for name in ("root/sql", "root/team/poet", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/file").write_text("")
    return tmp_path / "root"


@pytest.fixture
async def changing(gateway: FakeGateway, root: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that lets requests load adapters."""
    app = build_app(gateway, ServerInfo(), rules=HttpRules(lora_root=root))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as client:
        yield client


async def test_an_adapter_is_listed_with_its_directory_and_its_model(
    client: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.served_adapters.append(SQL)
    card = {"id": "sql", "object": "model", "created": 1700000000, "owned_by": "charonia"}
    card |= {"root": "/loras/sql", "parent": "llm", "max_model_len": None}
    assert (await client.get("/v1/models")).json()["data"][-1] == card
    assert (await client.get("/v1/models/llm")).json()["id"] == "llm"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ],
)
@pytest.mark.parametrize("name", ["sql", "llm:sql"])
async def test_answers_have_the_name_of_the_adapter_that_gave_them(
    client: httpx.AsyncClient, gateway: FakeGateway, path: str, body: dict[str, object], name: str
) -> None:
    gateway.served_adapters.append(SQL)
    assert (await client.post(path, json=body | {"model": name})).json()["model"] == "sql"
    assert gateway.contexts[-1].adapter == "sql"
    assert (await client.post(path, json=body | {"model": "llm"})).json()["model"] == "llm"
    assert gateway.contexts[-1].adapter == ""


@pytest.mark.parametrize("path", ["sql", "team/poet", "./team/../sql"])
async def test_an_adapter_is_loaded_from_within_the_root(
    changing: httpx.AsyncClient, gateway: FakeGateway, root: Path, path: str
) -> None:
    for given in (path, str(root / path)):
        response = await changing.post(LOAD, json={"lora_name": "a", "lora_path": given})
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert gateway.loads[-1] == ("a", str((root / path).resolve()), "", False)
    again = {"lora_name": "a", "lora_path": path, "load_inplace": True, "base_model_name": "llm"}
    assert (await changing.post(LOAD, json=again)).status_code == 200
    assert gateway.loads[-1][2:] == ("llm", True)


@pytest.mark.parametrize(
    "path", ["../elsewhere", "/etc", "link", "file", "none", "a\0b", "x" * 5000, "~", "team/../.."]
)
async def test_no_other_directory_is_and_nothing_is_told_of_it(
    changing: httpx.AsyncClient, gateway: FakeGateway, path: str
) -> None:
    response = await changing.post(LOAD, json={"lora_name": "a", "lora_path": path})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "lora_path")
    assert error["message"] == shorten(f"lora_path '{path}' is no directory inside --lora-root", LONGEST_MESSAGE)
    assert gateway.loads == []


async def test_what_is_unloaded_must_be_there(changing: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.served_adapters.append(SQL)
    response = await changing.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": None})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    response = await changing.post(UNLOAD, json={"lora_name": "sql"})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "The lora adapter 'sql' cannot be found."


@pytest.mark.parametrize(
    ("path", "body", "text", "field"),
    [
        (LOAD, {"lora_name": "a"}, "Both 'lora_name' and 'lora_path' must be provided.", "lora_path"),
        (LOAD, {"lora_path": "sql"}, "Both 'lora_name' and 'lora_path' must be provided.", "lora_name"),
        (LOAD, {"lora_name": "a", "lora_path": "sql", "lora_nam": 1}, "unknown field: lora_nam", "lora_nam"),
        (LOAD, {"lora_name": 1, "lora_path": "sql"}, "lora_name must be a string", "lora_name"),
        (UNLOAD, {}, "'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name"),
        (UNLOAD, {"lora_name": "sql", "lora_int_id": 3}, "lora_int_id is not supported", "lora_int_id"),
    ],
)
async def test_bodies_that_say_too_little_or_too_much(
    changing: httpx.AsyncClient, path: str, body: dict[str, object], text: str, field: str
) -> None:
    response = await changing.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(text)


async def test_what_is_wrong_with_an_adapter_is_told(changing: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.error = InvalidArgument("adapter_config.json: use_dora is not supported", field="lora_path")
    response = await changing.post(LOAD, json={"lora_name": "a", "lora_path": "sql"})
    assert (response.status_code, response.json()["error"]["message"]) == (400, gateway.error.message)


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_requests_change_nothing_unless_the_server_lets_them(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={"lora_name": "a", "lora_path": "sql"})
    assert response.status_code == 404
    assert "--allow-runtime-lora" in response.json()["error"]["message"]
