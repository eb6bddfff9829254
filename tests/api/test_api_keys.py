"""Keys: how they are written, who they let in over HTTP, and whose request it is then."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from charonia.api.api_keys import ANONYMOUS, ENVIRONMENT, Keyring, Tenant, load_keyring
from charonia.api.app import build_app
from charonia.api.metadata import ServerInfo
from charonia.cli.options import KeyOptions
from charonia.core.errors import InvalidArgument, Unauthenticated

CHAT = {"model": "llm", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def _no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_three_sources_and_three_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nbeta:in-file:2.5  # twice and a half\nbeta:rotated:2.5\n")
    monkeypatch.setenv(ENVIRONMENT, "gamma:in-environment, bare")
    keys = load_keyring(("alpha:on-line",), file)
    assert keys.authenticate("Bearer on-line") == Tenant("alpha", 1.0)
    assert keys.authenticate("bearer  in-file ") == Tenant("beta", 2.5)
    assert keys.authenticate("Bearer rotated") == Tenant("beta", 2.5)
    assert keys.authenticate("Bearer in-environment") == Tenant("gamma", 1.0)
    name = keys.authenticate("Bearer bare").name
    assert name.startswith("key-")
    assert "bare" not in name


@pytest.mark.parametrize(
    "shown", [None, "", "on-line", "Basic on-line", "Bearer", "Bearer ", "Bearer on-lin", "Bearer é"]
)
def test_nothing_else_is_let_in(shown: str | None) -> None:
    with pytest.raises(Unauthenticated, match="API key"):
        Keyring([("on-line", Tenant("alpha"))]).authenticate(shown)


def test_without_keys_everybody_is_nobody() -> None:
    assert Keyring().authenticate(None) is ANONYMOUS
    assert not Keyring()


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (("a:b:c:d",), "--api-key 1 must be key, name:key or name:key:weight"),
        (("good", ":secret"), "--api-key 2 has an empty name"),
        (("a:",), "must have a key"),
        (("a:se cret",), "must have a key"),
        (("a:secret:0",), "weight"),
        (("a:secret:heavy",), "weight"),
        (("a:secret:nan",), "weight"),
        (("a:secret", "b:secret"), "--api-key 2 repeats another key"),
        (("a:secret:1", "a:other:2"), "another weight"),
    ],
)
def test_a_malformed_key_is_named_by_its_place_and_not_shown(keys: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        load_keyring(keys)
    assert complaint in refused.value.message
    assert "secret" not in refused.value.message


def test_keys_do_not_show() -> None:
    options = KeyOptions(api_key=("alpha:hidden",))
    assert "hidden" not in repr(options)
    assert "hidden" not in repr(vars(load_keyring(options.api_key)))


@pytest.fixture
async def guarded(gateway: Any) -> AsyncIterator[httpx.AsyncClient]:
    keys = Keyring([("k-a", Tenant("alpha")), ("k-b", Tenant("beta", 3.0))])
    transport = httpx.ASGITransport(build_app(gateway, ServerInfo("triton", "9.9"), keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://charonia") as connected:
        yield connected


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/llm/ready"])
async def test_health_is_for_everybody(guarded: httpx.AsyncClient, path: str) -> None:
    assert (await guarded.get(path)).status_code == 200


@pytest.mark.parametrize("path", ["/v2", "/v2/models/llm", "/v2/models/llm/generate", "/v2/health/live/x", "/nowhere"])
async def test_v2_says_no_in_its_own_shape(guarded: httpx.AsyncClient, path: str) -> None:
    answer = await guarded.get(path, headers=bearer("k-c"))
    assert (answer.status_code, answer.json()) == (401, {"error": "incorrect API key"})
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v1/nowhere"])
async def test_openai_says_no_in_its_own_shape(guarded: httpx.AsyncClient, gateway: Any, path: str) -> None:
    answer = await guarded.post(path, json=CHAT)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (401, "invalid_request_error", "invalid_api_key")
    assert not gateway.asked


async def test_the_tenant_reaches_the_gateway_by_both_doors(guarded: httpx.AsyncClient, gateway: Any) -> None:
    await guarded.post("/v1/chat/completions", json=CHAT, headers=bearer("k-a"))
    await guarded.post("/v2/models/llm/generate", json={"text_input": "hi"}, headers=bearer("k-b"))
    await guarded.post("/v2/models/llm/generate_stream", json={"text_input": "hi"}, headers=bearer("k-b"))
    asked = [(context.tenant, context.tenant_weight) for context in gateway.contexts]
    assert asked == [("alpha", 1.0), ("beta", 3.0), ("beta", 3.0)]
