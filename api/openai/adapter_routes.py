"""/v1/load_lora_adapter and /v1/unload_lora_adapter of vLLM's API: adapters come and go while their models serve.

Translates between the protocol and the gateway, and keeps clients to the directories that they may name.
"""

import asyncio
import logging
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ...core.errors import InvalidArgument
from ...core.gateway import Administration
from ..http.error_responses import ApiError
from ..http.request_context import tenant_of
from .json_body import BodyFormat, field_error

log = logging.getLogger(__name__)

_REFUSED = "requests change no adapters of this server; it would have to run with --allow-runtime-lora"
_NO_ROUTE = 404
"""The status of vLLM, which has no such routes then."""


class LoadAdapterBody(msgspec.Struct, frozen=True):
    """`base_model_name`: of the model that it is for, where several take adapters. `load_inplace`: it takes the place
    of the one of that name."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool | None = None
    base_model_name: str | None = None


class UnloadAdapterBody(msgspec.Struct, frozen=True):
    lora_name: str = ""


_LOAD = BodyFormat(LoadAdapterBody, {"is_3d_lora_weight": (False,)})
_UNLOAD = BodyFormat(UnloadAdapterBody, {"lora_int_id": (0,)})


class AdapterRoutes:
    """The endpoints and their handlers. `root`: the directory that adapters are loaded from; None where requests load
    none."""

    def __init__(self, administration: Administration, root: Path | None, max_input_size: int) -> None:
        self._administration = administration
        self._root = root
        self._max_input_size = max_input_size

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        root = self._allowed_root()
        body = await _LOAD.read(request, self._max_input_size)
        if not (body.lora_name and body.lora_path):
            field = "lora_path" if body.lora_name else "lora_name"
            raise InvalidArgument("Both 'lora_name' and 'lora_path' must be provided.", field=field)
        path = await asyncio.to_thread(path_inside, root, body.lora_path)
        inplace = bool(body.load_inplace)
        adapter = await self._administration.load_adapter(
            body.lora_name, str(path), body.base_model_name or "", inplace
        )
        tenant = tenant_of(request.scope).name
        log.info("tenant %r loaded adapter '%s' from %s, digest %s", tenant, body.lora_name, path, adapter.digest)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        self._allowed_root()
        body = await _UNLOAD.read(request, self._max_input_size)
        if not body.lora_name:
            raise InvalidArgument("'lora_name' needs to be provided to unload a LoRA adapter.", field="lora_name")
        gone = await self._administration.unload_adapter(body.lora_name)
        tenant = tenant_of(request.scope).name
        log.info("tenant %r unloaded adapter '%s', digest %s", tenant, body.lora_name, gone.adapter.digest)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _allowed_root(self) -> Path:
        if self._root is None:
            raise ApiError(_REFUSED, _NO_ROUTE)
        return self._root


def path_inside(root: Path, name: str) -> Path:
    """The directory that a client names, by its path in `root` or the whole one; links are followed.

    Raises:
        InvalidArgument: it is no directory, or not inside `root`. One message for both: what is elsewhere is not told.
    """
    try:
        path = (root / name).resolve()
        if path.is_dir() and path.is_relative_to(root.resolve()):
            return path
    except (OSError, ValueError, RuntimeError):  # too long, with a NUL in it, a circle of links
        pass
    raise field_error("lora_path", f"'{name}' is no directory inside --lora-root")
