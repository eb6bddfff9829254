"""The routes of v2 over HTTP for control: metadata, statistics, the repository, shared memory, logs and traces.

Translates between the protocol and the gateway. The extensions are described at
https://github.com/triton-inference-server/server/tree/main/docs/protocol.
"""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import InvalidArgument, Unavailable, Unsupported
from ...core.gateway import RepositoryIndexEntry
from ...processes.client_shared_memory import CudaMemoryRegion, SharedMemoryRegistry
from ...telemetry.logging_setup import parse_log_format
from ...telemetry.shared_state import ServerAdministration
from ..chunked_json import check_config_size, read_whole_json_object
from ..http.connection import offload_if_large, read_json_body
from ..http.error_responses import json_response
from ..json_tensors import JsonObject, NestedTooDeeply, as_array, as_boolean, as_object, as_string, as_unsigned
from ..metadata import cuda_region_json, model_metadata, model_stats_json
from .endpoints import model_and_version

_MODEL = "/v2/models/{model}"
_VERSION = _MODEL + "/versions/{version:int}"
_SYSTEM_MEMORY, _CUDA_MEMORY = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
_FILE = "file:"
_CONTROL = "x-charonia-model-control"
"""The header of an index that says whether requests may load and unload models."""
_NESTED_READY = re.compile(rb'"ready"\s*:\s*[\[{]')
_PIECE = 1 << 16
"""Characters of base64 that are decoded at a time."""


def _as_log_format(name: str, value: Any) -> str:
    try:
        return parse_log_format(as_string(name, value), "--log_format")
    except InvalidArgument as error:
        raise Unavailable(error.message, field=name) from None  # 503, as Triton has it here


_LOG_SETTINGS: Mapping[str, Callable[[str, Any], Any]] = {
    "log_file": as_string,
    "log_info": as_boolean,
    "log_warning": as_boolean,
    "log_error": as_boolean,
    "log_verbose_level": as_unsigned,
    "log_format": _as_log_format,
}


class ControlEndpoints:
    """The handlers. Bodies have at most `max_size` bytes."""

    def __init__(self, administration: ServerAdministration, max_size: int) -> None:
        self._administration = administration
        self._max_size = max_size

    def routes(self) -> list[Route]:
        routes = [
            # Before anything that may take "stats" for a model.
            Route("/v2/models/stats", self.statistics, methods=["GET"]),
            *[Route(f"{path}/stats", self.statistics, methods=["GET"]) for path in (_MODEL, _VERSION)],
            *[Route(path, self.metadata, methods=["GET"]) for path in (_MODEL, _VERSION)],
            *[Route(f"{path}/ready", self.model_ready, methods=["GET"]) for path in (_MODEL, _VERSION)],
            *[Route(f"{path}/config", self.config, methods=["GET"]) for path in (_MODEL, _VERSION)],
            *_repositories("index", self.index),
            *_repositories("models/{model}/load", self.load),
            *_repositories("models/{model}/unload", self.unload),
            Route("/v2/logging", self.log_settings, methods=["GET", "POST"]),
            *[Route(f"{at}/trace/setting", self.trace_settings, methods=["GET", "POST"]) for at in ("/v2", _MODEL)],
        ]
        for root, status, register, unregister in (
            (_SYSTEM_MEMORY, self.memory_status, self.register_memory, self.unregister_memory),
            (_CUDA_MEMORY, self.cuda_memory_status, self.register_cuda_memory, self.unregister_cuda_memory),
        ):
            region = root + "/region/{region}"
            routes += [
                *[Route(f"{path}/status", status, methods=["GET"]) for path in (root, region)],
                Route(f"{region}/register", register, methods=["POST"]),
                *[Route(f"{path}/unregister", unregister, methods=["POST"]) for path in (root, region)],
            ]
        return routes

    # Models

    async def metadata(self, request: Request) -> Response:
        return json_response(model_metadata(self._administration, *model_and_version(request)))

    async def model_ready(self, request: Request) -> Response:
        reason = await self._administration.unready_reason(*model_and_version(request))
        return json_response({"error": reason}, 400) if reason else Response()

    async def config(self, request: Request) -> Response:
        return json_response(dict(self._administration.model_config(*model_and_version(request)).raw))

    async def statistics(self, request: Request) -> Response:
        models = self._administration.model_statistics(*model_and_version(request))
        stats = []
        for model in models:
            explained = {"explain": dict(model.statistics.explain)} if model.statistics.explain else {}
            arm = {"arm": model.arm} if model.arm else {}
            stats.append(model_stats_json(model) | explained | arm)
        return json_response({"model_stats": stats})

    # Repository

    async def index(self, request: Request) -> Response:
        body = await self._body(request)
        try:
            ready = (await _read_document(body)).get("ready", False)
        except NestedTooDeeply:
            if not _NESTED_READY.search(body):
                raise
            ready = None
        if not isinstance(ready, bool):
            raise InvalidArgument(
                "Invalid value for 'ready': expected a boolean, attempt to access JSON non-boolean as boolean",
                field="ready",
            )
        control = {_CONTROL: "explicit" if self._administration.loads_on_request else "none"}
        return json_response(
            [_entry(entry) for entry in await self._administration.repository_index(ready)], headers=control
        )

    async def load(self, request: Request) -> Response:
        _refuse_repository(request)
        config, files = None, {}
        for key, value in (await self._parameters(request)).items():
            if key == "config":
                config = as_string(key, value)
                await check_config_size(config)
            elif key.startswith(_FILE):
                text = as_string(key, value)
                files[key.removeprefix(_FILE)] = await offload_if_large(len(text), _decoded, key, text)
            else:
                raise InvalidArgument(f"unrecognized load parameter '{key}'", field=key)
        await self._administration.load_model(request.path_params["model"], config, files)
        return Response()

    async def unload(self, request: Request) -> Response:
        _refuse_repository(request)
        dependents = False
        for key, value in (await self._parameters(request)).items():
            if key != "unload_dependents":
                raise InvalidArgument(f"unrecognized unload parameter '{key}'", field=key)
            dependents = as_boolean(key, value)
        await self._administration.unload_model(request.path_params["model"], dependents)
        return Response()

    # Shared memory of clients

    @property
    def _regions(self) -> SharedMemoryRegistry:
        return self._administration.shared_state.shared_memory

    async def memory_status(self, request: Request) -> Response:
        return json_response([region._asdict() for region in self._regions.status(_named(request))])

    async def register_memory(self, request: Request) -> Response:
        document = await self._document(request)
        key = as_string("key", _required(document, "key"))
        offset = as_unsigned("offset", document.get("offset", 0))
        self._regions.register(_named(request), key, offset, as_unsigned("byte_size", _required(document, "byte_size")))
        return Response()

    async def unregister_memory(self, request: Request) -> Response:
        self._regions.unregister(_named(request))
        return Response()

    async def cuda_memory_status(self, request: Request) -> Response:
        return json_response([cuda_region_json(region) for region in self._regions.status_cuda(_named(request))])

    async def register_cuda_memory(self, request: Request) -> Response:
        document = await self._document(request)
        handle = as_object("raw_handle", _required(document, "raw_handle"))
        try:
            raw = base64.b64decode(as_string("b64", _required(handle, "b64")), validate=True)
        except ValueError:
            raise InvalidArgument("'b64' of 'raw_handle' is not base64", field="raw_handle") from None
        device = as_unsigned("device_id", document.get("device_id", 0))
        size = _required(document, "byte_size")
        region = CudaMemoryRegion(_named(request), raw, device, as_unsigned("byte_size", size))
        await self._regions.register_cuda(region)
        return Response()

    async def unregister_cuda_memory(self, request: Request) -> Response:
        self._regions.unregister_cuda(_named(request))
        return Response()

    # Settings

    async def log_settings(self, request: Request) -> Response:
        """The settings; a body changes some first."""
        logs, changed = self._administration.shared_state.logs, {}
        for name, value in (await self._document(request)).items():
            if name not in _LOG_SETTINGS:
                raise InvalidArgument(f"unknown log setting '{name}'", field=name)
            changed[name] = _LOG_SETTINGS[name](name, value)
        return json_response(asdict(logs.update(replace(logs.settings, **changed)) if changed else logs.settings))

    async def trace_settings(self, request: Request) -> Response:
        """The settings; a body changes some first, or takes back what was set with null. Levels are a list."""
        model: str = request.path_params.get("model", "")
        if model and not self._administration.is_model_ready(model):
            raise InvalidArgument(f"Request for unknown model : {model}", field="model")
        change: dict[str, Sequence[str] | None] = {}
        for name, value in (await self._document(request)).items():
            if value is None:
                change[name] = None
            elif name == "trace_level":
                change[name] = tuple(as_string(name, level) for level in as_array(name, value))
            else:
                change[name] = (as_string(name, value),)
        traces = self._administration.shared_state.traces
        texts = (traces.update(change, model) if change else traces.settings(model)).as_v2_texts()
        shown = {name: list(values) if name == "trace_level" else ",".join(values) for name, values in texts.items()}
        return json_response(shown)

    async def _body(self, request: Request) -> bytes | bytearray:
        return await read_json_body(request, self._max_size) if request.method == "POST" else b""

    async def _document(self, request: Request) -> JsonObject:
        return await _read_document(await self._body(request))

    async def _parameters(self, request: Request) -> JsonObject:
        return as_object("parameters", (await self._document(request)).get("parameters", {}))


async def _read_document(body: bytes | bytearray) -> JsonObject:
    """An empty body is an empty object."""
    return await read_whole_json_object(body) if body else {}


def _repositories(path: str, handler: Callable[[Request], Any]) -> list[Route]:
    """The routes of a path, with and without the name of a repository."""
    return [Route(f"/v2/repository/{name}{path}", handler, methods=["POST"]) for name in ("", "{repository}/")]


def _entry(entry: RepositoryIndexEntry) -> JsonObject:
    """The members that are not empty: of a model that was never loaded the name alone."""
    members = {"name": entry.name, "version": entry.version, "state": entry.state and entry.state.value}
    if entry.state is not None and entry.reason:
        members["reason"] = entry.reason
    return {key: value for key, value in members.items() if value}


def _refuse_repository(request: Request) -> None:
    if "repository" in request.path_params:
        raise Unsupported("'repository_name' specification is not supported", field="repository_name")


def _decoded(key: str, text: str) -> bytes:
    """The bytes of a file, whose base64 NVIDIA's C++ client breaks into lines. Decoded in pieces: each call keeps the
    interpreter's lock."""
    parts = []
    rest = ""
    padded = False
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


def _named(request: Request) -> str:
    name: str = request.path_params.get("region", "")
    return name


def _required(document: JsonObject, key: str) -> Any:
    if key not in document:
        raise InvalidArgument(f"Shared memory register request has no '{key}' field", field=key)
    return document[key]
