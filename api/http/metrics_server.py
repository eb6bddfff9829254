"""Serves metrics on a port of their own while the doors are open. Knows neither models nor readings."""

import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from ...cli.announcement import base_url
from ...cli.server_options import ServerOptions, is_true
from ...telemetry.gpus import Gpus
from ...telemetry.host_metrics import HostMetrics
from ..prometheus import MetricsApp, MetricsSource
from .server import HttpServer

_NO_GPUS = "TRITON_SERVER_CPU_ONLY"
"""Set to anything, it turns tritonserver's gauges of GPUs off."""


def machine_metric_sources(
    options: ServerOptions, environment: Mapping[str, str] = os.environ
) -> Iterator[MetricsSource]:
    """Who measures the machine, as far as `options` ask for it."""
    if is_true(options.allow_cpu_metrics):
        yield HostMetrics().measure
    if is_true(options.allow_gpu_metrics) and _NO_GPUS not in environment:
        yield Gpus().measure


@asynccontextmanager
async def serve_metrics(registry: CollectorRegistry | None, sock: socket.socket | None) -> AsyncIterator[None]:
    """Serve what `registry` collects during the block; without both nobody wants it."""
    if registry is None or sock is None:
        yield
        return
    server = HttpServer(MetricsApp(registry), sock, access_log=False)
    await server.start()
    print(f"Metrics on {base_url(*sock.getsockname()[:2])}/metrics")
    try:
        yield
    finally:
        await server.stop(force=True)
