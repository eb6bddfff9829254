"""The models of one server without its endpoints: the gateway, and what loads, follows and closes them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..core.extension_contracts import ObserverExtension
from ..core.request_context import RequestContext
from ..processes.child_process import drop_prepared_children
from ..repository.gateway import InProcessGateway
from ..telemetry.host_metrics import Gpus, HostMetrics
from ..telemetry.shared_state import SharedState
from .model_selection import ModelSelection
from .options import ServerOptions, is_true

if TYPE_CHECKING:
    from ..api.prometheus import MetricsSource

_NO_GPUS = "TRITON_SERVER_CPU_ONLY"
"""The environment variable that, set to anything, turns the gauges of GPUs off, as in tritonserver."""


class ModelHost:
    """The selected models behind a gateway, in the running event loop. `serve` puts endpoints before it, a program that
    embeds the server asks it itself. The last three arguments are those of `InProcessGateway`."""

    def __init__(
        self,
        selection: ModelSelection,
        shared: SharedState,
        observers: Sequence[ObserverExtension],
        strict: bool,
        healthy: Callable[[], bool],
        end_listeners: Sequence[Callable[[RequestContext], None]],
    ) -> None:
        self.selection = selection
        self.gateway = InProcessGateway(strict, healthy, end_listeners, shared, selection.builder)
        for extension in observers:
            self.gateway.routes.add_observer(extension.observe(self.gateway), extension.route_fields)
        self.watcher = selection.create_watcher(self.gateway)

    @property
    def sources(self) -> "tuple[MetricsSource, ...]":
        """What is measured of the models."""
        return self.gateway.measurements, self.selection.catalog.measure

    async def close(self) -> None:
        """Refuse new requests, unload everything, and drop children that wait for loads."""
        self.gateway.begin_exit()
        await self.gateway.lifecycle.close()
        drop_prepared_children()
        self.selection.catalog.close()


def machine_metric_sources(
    options: ServerOptions, environment: Mapping[str, str] = os.environ
) -> "Iterator[MetricsSource]":
    """The sources of the machine's metrics that `options` ask for."""
    if is_true(options.allow_cpu_metrics):
        yield HostMetrics().measure
    if is_true(options.allow_gpu_metrics) and _NO_GPUS not in environment:
        yield Gpus().measure
