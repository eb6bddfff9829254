"""The page about the endpoints at `/docs`, and the description that it shows."""

import re
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from charonia.api.api_keys import Keyring, Tenant
from charonia.api.app import all_routes, build_app, build_worker_app, control_routes
from charonia.api.extensions import ForwardedRoute, RouteExtensions
from charonia.api.header_rules import RequiredHeader, restricted_api_of
from charonia.api.http.rules import HttpRules
from charonia.api.metadata import ServerInfo
from charonia.api.openai.audio_routes import TRANSCRIPTIONS, TRANSLATIONS
from charonia.api.openapi import BODIES
from charonia.core.extension_contracts import RoutesPlan, ServedRoutes

INFO = ServerInfo("triton", "9.9")
RULES = HttpRules(api_docs=True)
PATHS = ("/docs", "/openapi.json")


async def get(app: Any, path: str, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        return await client.get(path)


@pytest.fixture
async def document(gateway: Any) -> Any:
    return (await get(build_app(gateway, INFO, rules=RULES), "/openapi.json")).json()


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_is_there_unless_a_flag_asks_for_it(gateway: Any, path: str) -> None:
    assert (await get(build_app(gateway, INFO), path)).status_code == 404


async def test_the_page_shows_the_description(gateway: Any) -> None:
    page = await get(build_app(gateway, INFO, rules=RULES), "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "swagger-ui" in page.text
    assert "url: 'openapi.json'" in page.text  # beside the page, also where a proxy serves both below a path


async def test_every_endpoint_is_described(document: Any, gateway: Any) -> None:
    assert (document["openapi"], document["info"]) == ("3.1.0", {"title": "triton", "version": "9.9"})
    expected = {
        (re.sub(r":\w+\}", "}", route.path), method.lower())
        for route in all_routes(gateway, INFO, RULES)
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert described == expected
    assert BODIES.keys() <= document["paths"].keys()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert [parameter["name"] for parameter in operation["parameters"]] == re.findall(r"\{(\w+)\}", path)


def test_a_body_of_an_endpoint_has_its_fields(document: Any) -> None:
    schemas = document["components"]["schemas"]
    content = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    names = [part["$ref"].rpartition("/")[2] for part in content["application/json"]["schema"]["allOf"]]
    fields = {field for name in names for field in schemas[name]["properties"]}
    assert {"messages", "tools", "stream", "temperature", "top_p", "response_format"} <= fields
    assert schemas["ChatBody"]["required"] == ["messages"]
    content = document["paths"]["/v2/models/{model}/infer"]["post"]["requestBody"]["content"]
    assert content["application/json"]["schema"] == {"type": "object"}
    [parameter] = document["paths"]["/v2/models/{model}/versions/{version}/infer"]["post"]["parameters"][1:]
    assert (parameter["in"], parameter["required"], parameter["schema"]) == ("path", True, {"type": "integer"})


def test_a_sound_is_sent_in_a_form(document: Any) -> None:
    for path in (TRANSCRIPTIONS, TRANSLATIONS):
        body = document["paths"][path]["post"]["requestBody"]
        [(media_type, content)] = body["content"].items()
        reference, form = content["schema"]["allOf"]
        assert (body["required"], media_type) == (True, "multipart/form-data")
        assert reference == {"$ref": "#/components/schemas/TranscriptionBody"}
        assert form["properties"]["file"] == {"type": "string", "format": "binary"}
        assert form["required"] == ["file"]


def test_every_reference_leads_somewhere(document: Any) -> None:
    references = set(re.findall(r"'\$ref': '#/components/schemas/(\w+)'", repr(document)))
    assert references <= document["components"]["schemas"].keys()


async def test_fastapi_describes_what_it_made_of_a_function(gateway: Any) -> None:
    router = APIRouter()

    @router.post("/sum", tags=["numbers"])
    async def add_numbers(one: int, other: int) -> dict[str, int]:
        """Adds two numbers."""
        return {"sum": one + other}

    @router.get("/version")
    async def own_version() -> str:
        return "1"

    extensions = RouteExtensions([RoutesPlan(serve=lambda _: ServedRoutes(routes=router.routes))])
    app = build_app(gateway, INFO, rules=RULES, extensions=extensions)
    document = (await get(app, "/openapi.json")).json()
    operation = document["paths"]["/sum"]["post"]
    assert (operation["tags"], operation["description"]) == (["numbers"], "Adds two numbers.")
    assert [parameter["name"] for parameter in operation["parameters"]] == ["one", "other"]
    assert {"HTTPValidationError", "ChatBody"} <= document["components"]["schemas"].keys()
    assert document["paths"]["/version"]["get"]["summary"] == "Own Version"  # it is tried before the server's


async def test_it_needs_no_key_and_may_be_restricted(gateway: Any) -> None:
    app = build_app(gateway, INFO, Keyring([("secret", Tenant("alpha"))]), RULES)
    paths = (*PATHS, "/docs/a", "/docsx", "/openapixjson", "/version")
    assert [(await get(app, path)).status_code for path in paths] == [200, 200, 401, 401, 401, 401]
    keyed = build_app(gateway, INFO, Keyring([("secret", Tenant("alpha"))]))
    assert [(await get(keyed, path)).status_code for path in PATHS] == [401, 401]
    assert [restricted_api_of(path) for path in PATHS] == ["metadata", "metadata"]
    rules = HttpRules(required_headers={"metadata": RequiredHeader("x-pass", "v")}, api_docs=True)
    app = build_app(gateway, INFO, rules=rules)
    assert [(await get(app, path)).status_code for path in PATHS] == [403, 403]


async def test_a_worker_forwards_both(gateway: Any) -> None:
    async def forward(request: Request) -> Response:
        return PlainTextResponse("forwarded")

    routes = [ForwardedRoute.of(route).answered_by(forward) for route in control_routes(gateway, INFO, RULES)]
    app = build_worker_app(gateway, INFO, None, RULES, routes)
    assert [(await get(app, path)).text for path in PATHS] == ["forwarded", "forwarded"]
