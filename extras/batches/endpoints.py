"""/v1/files and /v1/batches of OpenAI's API, for one server's own models.

https://platform.openai.com/docs/api-reference/files and .../batch. Without `--files-dir` every request to them is
refused with a message that says so.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from ...api.http.error_responses import ApiError, json_response
from ...api.http.forms import FormRoute
from ...api.http.request_context import tenant_of
from ...api.openai.json_body import BodyFormat
from ...core.errors import InvalidArgument, ServerExiting
from ...core.gateway import ModelLookup
from .records import BatchRecord, BatchStatus, FilePurpose, StoredFile, lifetime_of, new_id
from .runner import BatchRunner
from .uploads import receive_file

_Handler: TypeAlias = Callable[[Request, BatchRunner], Awaitable[Response]]

BATCH_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
)
"""Paths that a batch may ask, where they are served."""

_WINDOWS = {"24h": 86_400}
_MAX_BODY_BYTES = 1 << 20
_MAX_UNFINISHED = 100
"""Batches of a tenant that have not ended: each holds its input's offsets in memory."""

_MAX_BATCHES = 100_000
"""Batches of a tenant that are kept, ended ones until they expire."""

_MAX_METADATA, _METADATA_KEY, _METADATA_VALUE = 16, 64, 512

Listed = TypeVar("Listed", StoredFile, BatchRecord)


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


_BATCH = BodyFormat(BatchBody)


class BatchRoutes:
    """The endpoints and their handlers. `runner`: None where they are off."""

    def __init__(self, gateway: ModelLookup, runner: BatchRunner | None) -> None:
        self._gateway = gateway
        self._runner = runner

    def routes(self) -> list[Route]:
        return [
            self._route("/v1/files", self.upload, "POST", FormRoute),
            self._route("/v1/files", self.list_files, "GET"),
            self._route("/v1/files/{id}", self.file, "GET"),
            self._route("/v1/files/{id}", self.delete, "DELETE"),
            self._route("/v1/files/{id}/content", self.content, "GET"),
            self._route("/v1/batches", self.create, "POST"),
            self._route("/v1/batches", self.list_batches, "GET"),
            self._route("/v1/batches/{id}", self.batch, "GET"),
            self._route("/v1/batches/{id}/cancel", self.cancel, "POST"),
        ]

    def _route(self, path: str, handler: _Handler, method: str, kind: type[Route] = Route) -> Route:
        async def endpoint(request: Request) -> Response:
            if self._runner is None:
                text = "files and batches are off: start the server with --files-dir DIRECTORY"
                raise ApiError(f"{request.method} {request.url.path}: {text}", 404)
            return await handler(request, self._runner)

        return kind(path, endpoint, methods=[method])

    # Files

    async def upload(self, request: Request, runner: BatchRunner) -> Response:
        self._refuse_at_exit()
        file = await receive_file(request, runner.store, tenant_of(request.scope).name)
        return json_response(file.view())

    async def list_files(self, request: Request, runner: BatchRunner) -> Response:
        files = runner.store.list_files(tenant_of(request.scope).name)
        if purpose := request.query_params.get("purpose"):
            files = [file for file in files if file.purpose.value == purpose]
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidArgument(f"order must be asc or desc, got {order[:20]!r}", field="order")
        return _page(request, files if order == "asc" else files[::-1], 10_000, 10_000)

    async def file(self, request: Request, runner: BatchRunner) -> Response:
        return json_response(_file_of(request, runner).view())

    async def delete(self, request: Request, runner: BatchRunner) -> Response:
        file = _file_of(request, runner)
        if runner.store.in_use(file.id):
            text = f"file {file.id} is the input of a batch that has not ended: cancel the batch first"
            raise ApiError(text, 409, "file_in_use", field="id")
        runner.store.forget_file(file)
        await runner.store.in_thread(runner.store.write_file_away, file.id)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request, runner: BatchRunner) -> Response:
        file = _file_of(request, runner)
        return FileResponse(runner.store.path(file.id), media_type="application/octet-stream", filename=file.filename)

    # Batches

    async def create(self, request: Request, runner: BatchRunner) -> Response:
        self._refuse_at_exit()
        store, tenant = runner.store, tenant_of(request.scope)
        body = await _BATCH.read(request, _MAX_BODY_BYTES)
        check_batch(body, runner.endpoints)
        after = body.output_expires_after or {}
        field = "output_expires_after"
        output_seconds = lifetime_of(after.get("anchor"), after.get("seconds"), store.limits.seconds, field)
        if store.find_file(tenant.name, body.input_file_id).purpose is not FilePurpose.BATCH:
            raise InvalidArgument("the input file must have been uploaded with purpose=batch", field="input_file_id")
        unfinished = [batch for batch in store.unfinished.values() if batch.tenant == tenant.name]
        if len(unfinished) >= _MAX_UNFINISHED or len(store.list_batches(tenant.name)) >= _MAX_BATCHES:
            raise ApiError(f"{len(unfinished)} batches have not ended: wait for some", 429, "batch_limit_exceeded")
        made = store.time_ns()
        record = BatchRecord(
            id=new_id("batch_"),
            tenant=tenant.name,
            tenant_weight=tenant.weight,
            made=made,
            input_file_id=body.input_file_id,
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            expires_at=made // 10**9 + _WINDOWS[body.completion_window],
            output_id=new_id("file-"),
            error_id=new_id("file-"),
            output_seconds=output_seconds,
            metadata=body.metadata,
        )
        store.add_batch(record)  # from here on its input stays
        try:
            await store.in_thread(store.write_batch, record.id, msgspec.json.encode(record))
        except BaseException:
            store.forget_batch(record)
            raise
        runner.launch(record)
        return json_response(record.view())

    async def list_batches(self, request: Request, runner: BatchRunner) -> Response:
        return _page(request, runner.store.list_batches(tenant_of(request.scope).name)[::-1], 20, 100)

    async def batch(self, request: Request, runner: BatchRunner) -> Response:
        return json_response(_batch_of(request, runner).view())

    async def cancel(self, request: Request, runner: BatchRunner) -> Response:
        record = _batch_of(request, runner)
        if record.status.ended and record.status is not BatchStatus.CANCELLED:
            text = f"batch {record.id} cannot be cancelled: it is {record.status.value}"
            raise ApiError(text, 409, "batch_ended", field="id")
        await runner.cancel(record)
        return json_response(record.view())

    def _refuse_at_exit(self) -> None:
        if self._gateway.exiting():
            raise ServerExiting


def check_batch(body: BatchBody, endpoints: Collection[str]) -> None:
    """Raises `InvalidArgument` for a batch that asks for what there is not; `field` names it."""
    if body.endpoint not in endpoints:
        message = f"endpoint must be one of {', '.join(endpoints)}, got {body.endpoint[:100]!r}"
        raise InvalidArgument(message, field="endpoint")
    if body.completion_window not in _WINDOWS:
        message = f"completion_window must be {' or '.join(_WINDOWS)}, got {body.completion_window[:20]!r}"
        raise InvalidArgument(message, field="completion_window")
    metadata = body.metadata or {}
    fits = all(len(key) <= _METADATA_KEY and len(value) <= _METADATA_VALUE for key, value in metadata.items())
    if len(metadata) > _MAX_METADATA or not fits:
        message = f"metadata may have {_MAX_METADATA} pairs, of keys up to {_METADATA_KEY} characters and values up to"
        raise InvalidArgument(f"{message} {_METADATA_VALUE}", field="metadata")
    unknown = (body.output_expires_after or {}).keys() - {"anchor", "seconds"}
    if unknown:
        raise InvalidArgument(f"unknown field: output_expires_after.{min(unknown)}", field="output_expires_after")


def _file_of(request: Request, runner: BatchRunner) -> StoredFile:
    return runner.store.find_file(tenant_of(request.scope).name, request.path_params["id"])


def _batch_of(request: Request, runner: BatchRunner) -> BatchRecord:
    return runner.store.find_batch(tenant_of(request.scope).name, request.path_params["id"])


def _page(request: Request, items: Sequence[Listed], default: int, most: int) -> Response:
    """The page of a list that the query asks for: `limit` items behind `after`."""
    limit_text = request.query_params.get("limit", str(default))
    if not (limit_text.isascii() and limit_text.isdigit() and len(limit_text) < 8 and 1 <= int(limit_text) <= most):
        raise InvalidArgument(f"limit must be an integer from 1 to {most}, got {limit_text[:20]!r}", field="limit")
    start, limit = 0, int(limit_text)
    if after := request.query_params.get("after"):
        start = next((place + 1 for place, item in enumerate(items) if item.id == after), -1)
        if start < 0:
            raise InvalidArgument(f"after: there is no {after[:100]!r} in this list", field="after")
    page = items[start : start + limit]
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    more = len(items) > start + limit
    return json_response({"object": "list", "data": [record.view() for record in page], **ends, "has_more": more})
