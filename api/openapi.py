"""The page at `/docs`, and the description of all endpoints at `/openapi.json` (OpenAPI 3.1), which it shows.

FastAPI describes the routes that it made of functions with parameters, as extensions add them. This module describes
plain routes, whose endpoints read their requests themselves: path, methods, and the fields of bodies that are structs.
Any other body is an object.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .anthropic.messages_request import MessagesBody
from .http.error_responses import json_response
from .http.forms import FormRoute
from .metadata import ServerInfo
from .openai.adapter_routes import LoadAdapterBody, UnloadAdapterBody
from .openai.audio_routes import TRANSCRIPTIONS, TRANSLATIONS
from .openai.embeddings import EmbeddingsBody, RerankBody
from .openai.responses_request import ResponsesBody
from .openai.retention_routes import ReleaseRetentionBody
from .openai.schemas import ChatBody, CompletionBody, DetokenizeBody, SamplingFields, TokenizeBody
from .openai.scoring import ClassifyBody, PoolingBody, ScoreBody
from .openai.transcription_request import TranscriptionBody

PAGE, DESCRIPTION = "/docs", "/openapi.json"

_PATHS: dict[tuple[type[msgspec.Struct], ...], tuple[str, ...]] = {
    (CompletionBody, SamplingFields): ("/v1/completions",),
    (ChatBody, SamplingFields): ("/v1/chat/completions",),
    (ResponsesBody,): ("/v1/responses", "/v1/responses/input_tokens"),
    (MessagesBody,): ("/v1/messages", "/v1/messages/count_tokens"),
    (EmbeddingsBody,): ("/v1/embeddings",),
    (TranscriptionBody,): (TRANSCRIPTIONS, TRANSLATIONS),
    (RerankBody,): ("/v1/rerank", "/v2/rerank", "/rerank"),
    (ScoreBody,): ("/score", "/v1/score"),
    (ClassifyBody,): ("/classify",),
    (PoolingBody,): ("/pooling",),
    (TokenizeBody,): ("/tokenize",),
    (DetokenizeBody,): ("/detokenize",),
    (LoadAdapterBody,): ("/v1/load_lora_adapter",),
    (UnloadAdapterBody,): ("/v1/unload_lora_adapter",),
    (ReleaseRetentionBody,): ("/v1/release_retention",),
}
"""By the structs that together have the fields of a body: the paths whose endpoints read it."""

BODIES = {path: structs for structs, paths in _PATHS.items() for path in paths}
_FILE = {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}, "required": ["file"]}
_SCHEMAS = "#/components/schemas/{name}"
_NAME = re.compile(r"\{(?P<name>\w+)(:(?P<kind>\w+))?\}")
_KEY = {"key": {"type": "http", "scheme": "bearer", "description": "A key of --api-key, where there are some."}}


class DocsRoutes:
    """The page and the description, which are of the application that answers the request for them."""

    def __init__(self, info: ServerInfo) -> None:
        self._info = info

    def routes(self) -> list[Route]:
        return [
            Route(PAGE, self.page, methods=["GET"]),
            Route(DESCRIPTION, self.description, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        """Swagger UI, which the browser loads from where FastAPI says; the address is relative, for proxies' paths."""
        return get_swagger_ui_html(openapi_url=DESCRIPTION.removeprefix("/"), title=f"{self._info.name}: endpoints")

    async def description(self, request: Request) -> Response:
        app = request.app
        assert isinstance(app, FastAPI)
        return json_response(describe_routes(app.routes, self._info))


def describe_routes(routes: Iterable[BaseRoute], info: ServerInfo) -> dict[str, Any]:
    """The OpenAPI document of `routes`; mounted applications are left out."""
    routes = list(routes)
    document = get_openapi(
        title=info.name, version=info.version, routes=[route for route in routes if isinstance(route, APIRoute)]
    )
    components = document.setdefault("components", {})
    # A client with a key may show it, and one without need not, where none are set.
    components["securitySchemes"] = _KEY
    document["security"] = [{"key": []}, {}]
    structs = sorted({struct for body in BODIES.values() for struct in body}, key=lambda struct: struct.__name__)
    _, schemas = msgspec.json.schema_components(structs, ref_template=_SCHEMAS)
    components["schemas"] = schemas | components.get("schemas", {})
    for route in routes:
        if isinstance(route, Route) and not isinstance(route, APIRoute):
            path = _NAME.sub(r"{\g<name>}", route.path)
            # What stands first answers.
            document["paths"][path] = _operations(route, path) | document["paths"].get(path, {})
    return document


def _operations(route: Route, path: str) -> dict[str, Any]:
    """The operations of a plain route, by their methods in lower case; they are grouped by the endpoint's folder."""
    *_, folder, _ = ("", *route.endpoint.__module__.split("."))
    parameters = [
        {"name": match["name"], "in": "path", "required": True, "schema": {"type": _type_of(match["kind"])}}
        for match in _NAME.finditer(route.path)
    ]
    operations: dict[str, Any] = {}
    for method in sorted((route.methods or set()) - {"HEAD"}):
        operation: dict[str, Any] = {
            "summary": route.name.replace("_", " "),
            "tags": [folder],
            "parameters": parameters,
        }
        if method in ("POST", "PUT"):
            operation["requestBody"] = _request_body(route, path)
        operations[method.lower()] = operation | {"responses": {"200": {"description": "OK"}}}
    return operations


def _type_of(converter: str | None) -> str:
    return "integer" if converter == "int" else "string"


def _request_body(route: Route, path: str) -> dict[str, Any]:
    schema = _body_schema(path)
    if not isinstance(route, FormRoute):
        return {"content": {"application/json": {"schema": schema}}}
    return {"content": {"multipart/form-data": {"schema": {"allOf": [schema, _FILE]}}}, "required": True}


def _body_schema(path: str) -> dict[str, Any]:
    references = [{"$ref": _SCHEMAS.format(name=struct.__name__)} for struct in BODIES.get(path, ())]
    if not references:
        return {"type": "object"}
    return references[0] if len(references) == 1 else {"allOf": references}
