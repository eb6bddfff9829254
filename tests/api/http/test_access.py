"""What a browser is told before a page of another origin may ask, and with the answer."""

from typing import Any

import httpx
import pytest

from charonia.api.api_keys import Keyring, Tenant
from charonia.api.app import build_app
from charonia.api.header_rules import RequiredHeader
from charonia.api.http.request_context import RequestContextMiddleware
from charonia.api.http.rules import HttpRules, parse_allowed_origins
from charonia.api.metadata import ServerInfo
from charonia.core.errors import InvalidArgument

INFO = ServerInfo("triton", "0", 1 << 20)
PAGE = "https://app.example"
CHAT = {"model": "llm", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ((), ()),
        (("*",), ("*",)),
        ((PAGE, "http://localhost:3000"), (PAGE, "http://localhost:3000")),
        (('["https://a.example", "*"]',), ("https://a.example", "*")),
        (("chrome-extension://abc", "http://[::1]:80"), ("chrome-extension://abc", "http://[::1]:80")),
    ],
)
def test_origins(given: tuple[str, ...], meant: tuple[str, ...]) -> None:
    assert parse_allowed_origins(given) == meant


@pytest.mark.parametrize("wrong", [f"{PAGE}/", f"{PAGE}/app", "app.example", "https://*.example", "", "[1", "[5]"])
def test_what_no_browser_would_say_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--allowed-origins: '.*' is no origin"):
        parse_allowed_origins([wrong])


def client(gateway: Any, *origins: str) -> httpx.AsyncClient:
    app = build_app(gateway, INFO, Keyring([("secret", Tenant("alpha"))]), HttpRules(allowed_origins=origins))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def asking(origin: str, method: str = "POST") -> dict[str, str]:
    headers = "authorization, content-type, inference-header-content-length"
    return {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}


async def test_a_page_asks_without_a_key_whether_it_may(gateway: Any) -> None:
    async with client(gateway, PAGE) as browser:
        allowed = await browser.options("/v1/chat/completions", headers=asking(PAGE))
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert allowed.headers["access-control-allow-headers"] == asking(PAGE)["access-control-request-headers"]
        other = await browser.options("/v1/chat/completions", headers=asking("https://other.example"))
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_for_the_page_also_where_it_is_a_refusal(gateway: Any, stream: bool) -> None:
    async with client(gateway, PAGE) as browser:
        for key, status in (("secret", 200), ("wrong", 401)):
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            answer = await browser.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
            assert "retry-after" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-origin" not in (await browser.get("/v2", headers={"origin": "null"})).headers


async def test_without_the_flag_nothing_stands_in_the_way(gateway: Any) -> None:
    assert isinstance(build_app(gateway, INFO), RequestContextMiddleware)
    async with client(gateway) as browser:
        assert (await browser.options("/v2", headers=asking(PAGE))).status_code == 401
        assert "access-control-allow-origin" not in (await browser.get("/v2/health/live", headers=asking(PAGE))).headers


MESSAGE = {"model": "llm", "max_tokens": 5, "messages": CHAT["messages"]}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/messages", [("x-api-key", "secret")], 200),
        ("/v1/messages/count_tokens", [("x-api-key", "secret")], 200),
        ("/v1/messages", [("authorization", "Bearer secret")], 200),
        ("/v1/messages", [("x-api-key", "secret"), ("authorization", "bearer  secret")], 200),
        ("/v1/messages", [("x-api-key", "secret"), ("authorization", "Bearer other")], 400),
        ("/v1/messages", [("x-api-key", "other"), ("authorization", "Bearer secret")], 400),
        ("/v1/messages", [("x-api-key", "secret"), ("x-api-key", "secret")], 400),
        ("/v1/messages", [("x-api-key", "other")], 401),
        ("/v1/messages", [("x-api-key", "")], 401),
        ("/v1/messages", [], 401),
        ("/v1/chat/completions", [("x-api-key", "secret")], 401),
    ],
)
async def test_anthropic_s_header_is_a_key_on_its_paths(
    gateway: Any, path: str, headers: list[tuple[str, str]], status: int
) -> None:
    async with client(gateway) as asking:
        answer = await asking.post(path, json=MESSAGE, headers=headers)
    assert answer.status_code == status, answer.text
    assert gateway.contexts[0].tenant == ("alpha" if status == 200 else "")
    kind = {200: None, 400: "invalid_request_error", 401: "authentication_error"}[status]
    if path.startswith("/v1/messages") and kind:
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)


async def test_a_restricted_endpoint_answers_in_anthropic_s_form(gateway: Any) -> None:
    rules = HttpRules(required_headers={"inference": RequiredHeader("x-pass", "v")})
    transport = httpx.ASGITransport(build_app(gateway, INFO, rules=rules))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as asking:
        refused = await asking.post("/v1/messages", json=MESSAGE)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert (await asking.post("/v1/messages", json=MESSAGE, headers={"x-pass": "v"})).status_code == 200
