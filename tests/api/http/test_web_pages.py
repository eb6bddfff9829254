"""What web pages may do to a server without keys, and that nobody else is in the way of the rules."""

import re
from typing import Any

import httpx
import pytest

from charonia.api.api_keys import Keyring, Tenant
from charonia.api.app import all_routes, build_app
from charonia.api.header_rules import RequiredHeader
from charonia.api.http.access import is_protected
from charonia.api.http.rules import HttpRules, parse_allowed_hosts
from charonia.api.metadata import ServerInfo
from charonia.core.errors import InvalidArgument
from charonia.core.extension_contracts import PathAccess

INFO = ServerInfo("triton", "0", 1 << 20)
PAGE = "https://app.example"
LOAD, CHAT = "/v2/repository/models/m/unload", "/v1/chat/completions"
BODY = b'{"model": "llm", "messages": [{"role": "user", "content": "hi"}]}'
RULES = HttpRules()
EXTENDED = HttpRules(extensions=(PathAccess("/v1/files", is_private=True),))
FORM = {"content-type": "application/x-www-form-urlencoded"}


async def status(
    gateway: Any, path: str, headers: dict[str, str], rules: HttpRules = RULES, keys: Keyring | None = None
) -> int:
    """Of a POST to a server on port 8000 without access to what it controls: 403 and 415 are the rules' own."""
    transport = httpx.ASGITransport(build_app(gateway, INFO, keys, rules), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
        answer = await client.post(path, content=BODY, headers=headers)
    return answer.status_code


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example", "content-type": "text/plain"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "https://localhost:8000@evil.example"},
        {"origin": "http://[::1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "evil.example:8000"},
        {"host": "evil.example"},
        {"host": "evil.example:8000", "origin": "http://evil.example:8000", "sec-fetch-site": "same-origin"},
        {"host": "local.evil.example"},
        {"host": "evil.example:123456"},
    ],
)
async def test_a_page_from_elsewhere_or_under_another_name_changes_nothing(
    gateway: Any, headers: dict[str, str]
) -> None:
    for path in (LOAD, "/v1/unload_lora_adapter", "/v2/logging", "/v1/files", "/v2/models/m/trace/setting"):
        assert await status(gateway, path, headers, EXTENDED) == 403, path
    for rules in (HttpRules(required_headers={"model-repository": RequiredHeader("x-pass", "v")}), RULES):
        keys = None if rules.required_headers else Keyring([("secret", Tenant("alpha"))])
        shown = headers | {"authorization": "Bearer secret", "x-pass": "v"}
        assert await status(gateway, LOAD, shown, rules, keys) != 403, "credentials protect"


@pytest.mark.parametrize(
    ("headers", "rules"),
    [
        ({}, RULES),
        (FORM, RULES),
        ({"content-type": "text/plain; charset=utf-8"}, RULES),
        ({"host": "10.1.2.3:8000"}, RULES),
        ({"host": "[fd00::7]:8000"}, RULES),
        ({"host": "charonia:8000"}, RULES),
        ({"host": "charonia.models.svc.cluster.local:8000"}, RULES),
        ({"host": "charonia.models.svc:8000"}, RULES),
        ({"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}, RULES),
        ({"origin": "https://gpu-box", "host": "gpu-box"}, RULES),
        ({"origin": PAGE}, HttpRules(allowed_origins=(PAGE,))),
        ({"host": "LLM.example.com."}, HttpRules(allowed_hosts=parse_allowed_hosts(["a.example,llm.example.com"]))),
        ({"origin": "https://llm.example.com"}, HttpRules(allowed_hosts=parse_allowed_hosts(["llm.example.com"]))),
        ({"origin": PAGE, "x-forwarded-host": "app.example"}, RULES),
        ({"host": "any.example"}, HttpRules(allowed_hosts=parse_allowed_hosts(["*"]))),
        ({"host": "llm.example.com"}, HttpRules(allowed_hosts={"llm.example.com"})),
    ],
)
async def test_all_others_control_it_as_they_did(gateway: Any, headers: dict[str, str], rules: HttpRules) -> None:
    assert await status(gateway, LOAD, headers, rules) not in (403, 415)
    assert await status(gateway, CHAT, headers, rules) == 200


async def test_pages_ask_only_where_they_may_and_clients_as_they_like(gateway: Any) -> None:
    json = {"content-type": "application/json"}
    for form in ("text/plain;charset=UTF-8", FORM["content-type"], "multipart/form-data; boundary=x", ""):
        assert await status(gateway, CHAT, {"origin": PAGE, "content-type": form}) == 415
        assert await status(gateway, CHAT, {"sec-fetch-site": "cross-site", "content-type": form}) == 415
        for origins in (("*",), (PAGE,)):
            allowed = HttpRules(allowed_origins=origins)
            assert await status(gateway, CHAT, {"origin": PAGE, "content-type": form}, allowed) == 200
    assert await status(gateway, LOAD, {"origin": PAGE} | json, HttpRules(allowed_origins=("*",))) == 403
    assert await status(gateway, CHAT, {"origin": "chrome-extension://abc"} | json) == 200, "it may ask without CORS"
    evil = {"origin": "http://evil.example:8000", "host": "evil.example:8000"} | json
    assert await status(gateway, CHAT, evil) == 403
    behind_proxy = {"origin": PAGE, "host": "app.example"} | json
    assert await status(gateway, CHAT, behind_proxy) == 200
    assert await status(gateway, CHAT, {"host": "gpu.example.com:8000"}) == 200


def test_every_route_that_is_not_only_read_is_known_to_ask_or_to_change(gateway: Any) -> None:
    asking = re.compile(
        r"/v2/models/.*/(infer|generate|generate_stream)|/v2/repository/(.*/)?index|/v2/rerank|/rerank|/score|/classify"
        r"|/pooling|/invocations|/ping|/(de)?tokenize|/v1/(chat/)?completions|/v1/messages(/count_tokens)?|/v1/responses(/.*)?"
        r"|/v1/embeddings|/v1/rerank|/v1/score|/v1/classify|/v1/audio/(transcriptions|translations)|/v1/release_retention"
    )
    paths = {route.path for route in all_routes(gateway, INFO, RULES) if (route.methods or set()) - {"GET", "HEAD"}}
    assert {path for path in paths if not is_protected("POST", path)} == set(filter(asking.fullmatch, paths))


@pytest.mark.parametrize("wrong", ["https://app.example", "a:80", "a,,b", ""])
def test_what_no_browser_sends_as_a_host_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--allowed-hosts: '.*' is no host's name"):
        parse_allowed_hosts([wrong])
