"""Files and batches as an extension of the server's routes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from ...core.extension_contracts import (
    ExtensionHost,
    PathAccess,
    RoutesExtension,
    RoutesPlan,
    ServedRoutes,
    ServerFacts,
)
from ...core.metrics import MetricFamily
from .options import FilesOptions

if TYPE_CHECKING:
    from .runner import BatchRunner
    from .store import FileStore

FAMILIES = (
    MetricFamily("charonia_batch_requests_total", "counter", "Requests of batches by how they ended, or were repeated"),
    MetricFamily("charonia_batches_unfinished", "gauge", "Batches that have not ended, by status"),
    MetricFamily("charonia_files_bytes", "gauge", "What files of clients and of batches hold of --files-total-bytes"),
)


def plan_batches(options: FilesOptions, server: ServerFacts) -> RoutesPlan:
    """Without `--files-dir` there are the routes alone, which say that it lacks. Raises `InvalidArgument` as
    `open_store`."""
    store = None
    if options.files_dir is not None:
        from .store import open_store

        store = open_store(options.files_dir, options.limits(server.tenants))
    return RoutesPlan(
        serve=partial(serve_batches, store, options.batch_concurrency),
        access=[PathAccess(path, is_private=True) for path in ("/v1/files", "/v1/batches")],
        listed={"batches": "/v1/files, /v1/batches"},
        metrics=FAMILIES,
    )


def serve_batches(store: "FileStore | None", concurrency: int, host: ExtensionHost) -> ServedRoutes:
    from .endpoints import BATCH_ENDPOINTS, BatchRoutes
    from .runner import BatchRunner

    if store is None:
        return ServedRoutes(routes=BatchRoutes(host.administration, None).routes())
    endpoints = {path: endpoint for path, endpoint in host.endpoints.items() if path in BATCH_ENDPOINTS}
    runner = BatchRunner(store, host.administration, concurrency, endpoints)
    routes = BatchRoutes(host.administration, runner).routes()
    return ServedRoutes(routes=routes, running=partial(_running, runner), measure=runner.measure)


@asynccontextmanager
async def _running(runner: "BatchRunner") -> AsyncIterator[None]:
    """Go on with the batches that earlier servers left, and take new ones; at the end give up what is under way, with
    which the next server goes on."""
    runner.start()
    try:
        yield
    finally:
        await runner.pause()


EXTENSION = RoutesExtension(FilesOptions, "Files and batches", plan_batches)
