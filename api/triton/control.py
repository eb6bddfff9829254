"""The routes of v2 over HTTP for control: configs, statistics, the model repository, settings of logs and traces.

Translates between the protocol and the gateway. The extensions are described at
https://github.com/triton-inference-server/server/tree/main/docs/protocol.
"""

import base64
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import InvalidArgument, Unavailable, Unsupported
from ...core.gateway import RepositoryIndexEntry
from ...core.statistics import ModelStatistics
from ...telemetry.logging_setup import parse_log_format
from ...telemetry.shared_state import ServerGateway
from ...telemetry.trace_settings import TraceSettingsChange
from ..chunked_json import read_whole_json_object
from ..http.connection import offload_if_large, read_json_body
from ..http.error_responses import json_response
from ..json_values import JsonObject, as_array, as_boolean, as_object, as_string, as_unsigned
from ..metadata import model_stats_json
from .endpoints import model_and_version

_MODEL = "/v2/models/{model}"
_VERSION = _MODEL + "/versions/{version:int}"
_FILE = "file:"
_PIECE = 1 << 16
"""Characters of base64 that are decoded at a time."""


class ControlEndpoints:
    """The handlers. Bodies have at most `max_size` bytes."""

    def __init__(self, gateway: ServerGateway, max_size: int) -> None:
        self._gateway = gateway
        self._max_size = max_size

    def routes(self) -> list[Route]:
        load, unload = "models/{model}/load", "models/{model}/unload"
        return [
            # Before anything that may take "stats" for a model.
            Route("/v2/models/stats", self.statistics, methods=["GET"]),
            *[Route(f"{path}/stats", self.statistics, methods=["GET"]) for path in (_MODEL, _VERSION)],
            *[Route(f"{path}/config", self.config, methods=["GET"]) for path in (_MODEL, _VERSION)],
            *_repositories("index", self.index),
            *_repositories(load, self.load),
            *_repositories(unload, self.unload),
            Route("/v2/logging", self.log_settings, methods=["GET", "POST"]),
            *[Route(f"{at}/trace/setting", self.trace_settings, methods=["GET", "POST"]) for at in ("/v2", _MODEL)],
        ]

    # Models

    async def config(self, request: Request) -> Response:
        return json_response(dict(self._gateway.model_config(*model_and_version(request)).raw))

    async def statistics(self, request: Request) -> Response:
        found = self._gateway.model_statistics(*model_and_version(request))
        return json_response({"model_stats": [_statistics(each) for each in found]})

    # Repository

    async def index(self, request: Request) -> Response:
        document = await self._document(request)
        if not isinstance(document.get("ready", False), bool):
            raise InvalidArgument(
                "Invalid value for 'ready': expected a boolean, attempt to access JSON non-boolean as boolean",
                field="ready",
            )
        return json_response([_entry(each) for each in self._gateway.repository_index(document.get("ready", False))])

    async def load(self, request: Request) -> Response:
        _refuse_repository(request)
        parameters = _parameters(await self._document(request))
        config, files = None, {}
        for key, value in parameters.items():
            if key == "config":
                config = as_string(key, value)
            elif key.startswith(_FILE):
                text = as_string(key, value)
                files[key.removeprefix(_FILE)] = await offload_if_large(len(text), _decoded, key, text)
            else:
                raise InvalidArgument(f"unrecognized load parameter '{key}'", field=key)
        await self._gateway.load_model(request.path_params["model"], config, files)
        return Response()

    async def unload(self, request: Request) -> Response:
        _refuse_repository(request)
        for key, value in _parameters(await self._document(request)).items():
            if key != "unload_dependents":
                raise InvalidArgument(f"unrecognized unload parameter '{key}'", field=key)
            as_boolean(key, value)  # no model has dependents: ensembles are not served
        await self._gateway.unload_model(request.path_params["model"])
        return Response()

    # Settings

    async def log_settings(self, request: Request) -> Response:
        """The settings; a body changes some first."""
        logs = self._gateway.shared_state.logs
        changed = {name: _log_setting(name, value) for name, value in (await self._document(request)).items()}
        return json_response(asdict(logs.update(replace(logs.settings, **changed)) if changed else logs.settings))

    async def trace_settings(self, request: Request) -> Response:
        """The settings; a body changes some first."""
        model, traces = self._traced_model(request), self._gateway.shared_state.traces
        change: TraceSettingsChange = {
            name: _trace_setting(name, value) for name, value in (await self._document(request)).items()
        }
        return json_response(
            _traces((traces.update(change, model) if change else traces.settings(model)).as_v2_texts())
        )

    def _traced_model(self, request: Request) -> str:
        model: str = request.path_params.get("model", "")
        if model and not self._gateway.is_model_ready(model):
            raise InvalidArgument(f"Request for unknown model : {model}", field="model")
        return model

    async def _document(self, request: Request) -> JsonObject:
        body = await read_json_body(request, self._max_size) if request.method == "POST" else b""
        return await read_whole_json_object(body) if body else {}


def _repositories(path: str, handler: Callable[[Request], Any]) -> list[Route]:
    """The routes of a path, with and without the name of a repository."""
    return [Route(f"/v2/repository/{each}{path}", handler, methods=["POST"]) for each in ("", "{repository}/")]


def _statistics(statistics: ModelStatistics) -> JsonObject:
    members, reasons = model_stats_json(statistics), statistics.statistics.explain
    return {**members, "explain": dict(reasons)} if reasons else members


def _entry(entry: RepositoryIndexEntry) -> JsonObject:
    """The members that are not empty: of a model that was never loaded the name alone."""
    members = {"name": entry.name, "version": entry.version, "state": entry.state and entry.state.value}
    if entry.state is not None and entry.reason:
        members["reason"] = entry.reason
    return {key: value for key, value in members.items() if value}


def _refuse_repository(request: Request) -> None:
    if "repository" in request.path_params:
        raise Unsupported("'repository_name' specification is not supported", field="repository_name")


def _parameters(document: JsonObject) -> JsonObject:
    return as_object("parameters", document["parameters"]) if "parameters" in document else {}


def _decoded(key: str, text: str) -> bytes:
    """The bytes of a file, whose base64 NVIDIA's C++ client breaks into lines. Decoded in pieces: each call keeps the
    interpreter's lock."""
    parts, rest, padded = [], "", False
    try:
        for begin in range(0, len(text), _PIECE):
            rest += "".join(text[begin : begin + _PIECE].split())
            if padded and rest:
                raise ValueError
            whole = len(rest) // 4 * 4
            parts.append(base64.b64decode(rest[:whole], validate=True))
            padded, rest = padded or rest[:whole].endswith("="), rest[whole:]
        return b"".join((*parts, base64.b64decode(rest, validate=True)))
    except ValueError:
        raise InvalidArgument(f"load parameter '{key}' is not base64", field=key) from None


def _log_setting(name: str, value: Any) -> Any:
    if name == "log_format":
        try:
            return parse_log_format(as_string(name, value), "--log_format")
        except InvalidArgument as error:
            raise Unavailable(error.message, field=name) from None  # 503, as Triton has it here
    if name == "log_verbose_level":
        return as_unsigned(name, value)
    if name == "log_file":
        return as_string(name, value)
    if name in ("log_info", "log_warning", "log_error"):
        return as_boolean(name, value)
    raise InvalidArgument(f"unknown log setting '{name}'", field=name)


def _trace_setting(name: str, value: Any) -> tuple[str, ...] | None:
    """A setting's values; None, from null, to take back what was set. Levels are a list, all else is one text."""
    if value is None:
        return None
    if name == "trace_level":
        return tuple(as_string(name, level) for level in as_array(name, value))
    return (as_string(name, value),)


def _traces(texts: dict[str, tuple[str, ...]]) -> JsonObject:
    return {name: list(values) if name == "trace_level" else ",".join(values) for name, values in texts.items()}
