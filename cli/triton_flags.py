"""Flags of tritonserver that go by another name here, mean nothing here, or ask for what is not served.

A command line that was written for tritonserver is accepted as it is: flags without effect are warned of, those that
would change results are refused. Free of any server: the command line reads it.
"""

import logging
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal, TypeAlias

from cyclopts import Group, Parameter

from ..core.errors import Unsupported
from .options import BooleanFlag, ServeOptions, is_true

log = logging.getLogger(__name__)

_FORMER = Group("Former names of tritonserver's flags")
_IDLE = Group("Flags of tritonserver without effect")
_REFUSED = Group("Flags of tritonserver for what is not served")

_Former: TypeAlias = Annotated[str, Parameter(group=_FORMER)]
_Idle: TypeAlias = Annotated[tuple[str, ...], Parameter(group=_IDLE, negative=())]


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonFlags:
    """All flags of tritonserver that are not flags of this server."""

    strict_model_config: Annotated[BooleanFlag, Parameter(group=_FORMER)] = "false"
    """true: --disable-auto-complete-config."""
    trace_file: _Former = ""
    """--trace-config triton,file=..."""
    trace_level: _Former = ""
    """--trace-config level=..."""
    trace_rate: _Former = ""
    """--trace-config rate=..."""
    trace_count: _Former = ""
    """--trace-config count=..."""
    log_frequency: _Former = ""
    """--trace-config triton,log-frequency=..."""
    response_cache_byte_size: _Former = ""
    """--cache-config local,size=..."""

    repoagent_directory: _Idle = ()
    """No repository agents are run."""
    cache_directory: _Idle = ()
    """The cache is part of the package."""
    model_load_thread_count: _Idle = ()
    """As many models load at once as there are cores, at most four."""
    model_load_retry_count: _Idle = ()
    """A load is tried once."""
    model_load_gpu_limit: _Idle = ()
    """--gpu-memory-limit says what models may hold."""
    http_thread_count: _Idle = ()
    """All requests are one event loop's."""
    grpc_infer_thread_count: _Idle = ()
    """All requests are one event loop's."""
    grpc_infer_allocation_pool_size: _Idle = ()
    """There are no pools of messages."""
    grpc_max_response_pool_size: _Idle = ()
    """There are no pools of messages."""
    buffer_manager_thread_count: _Idle = ()
    """Instances copy their own tensors."""
    metrics_interval_ms: _Idle = ()
    """Gauges are read at each scrape."""
    pinned_memory_pool_byte_size: _Idle = ()
    """There is no pool of pinned memory."""
    cuda_memory_pool_byte_size: _Idle = ()
    """There is no pool of GPU memory."""
    cuda_virtual_address_size: _Idle = ()
    """States do not grow in place."""
    min_supported_compute_capability: _Idle = ()
    """Backends say which GPUs they can use."""
    enable_peer_access: _Idle = ()
    """Backends copy between GPUs as they like."""
    host_policy: _Idle = ()
    """Instances are not bound to cores or NUMA nodes."""
    rate_limit_resource: _Idle = ()
    """There is no rate limiter."""
    sagemaker_safe_port_range: _Idle = ()
    """There is one port."""
    sagemaker_thread_count: _Idle = ()
    """All requests are one event loop's."""
    vertex_ai_thread_count: _Idle = ()
    """All requests are one event loop's."""

    model_namespacing: Annotated[BooleanFlag, Parameter(group=_REFUSED)] = "false"
    """Names of models are unique over all repositories."""
    rate_limit: Annotated[Literal["off", "execution_count"], Parameter(group=_REFUSED)] = "off"
    """Instances wait for no resources."""

    @property
    def without_effect(self) -> list[str]:
        """The flags that were given and have no effect."""
        return [_flag(field.name) for field in fields(self) if field.default == () and getattr(self, field.name)]

    def check(self) -> None:
        """Warn of flags that have no effect; raises `Unsupported` for one that would be missed."""
        for name in ("model_namespacing", "rate_limit"):
            value = getattr(self, name)
            if value not in ("false", "0", "off"):
                raise Unsupported(f"{_flag(name)} {value} is not served")
        if self.without_effect:
            log.warning("flags of tritonserver that have no effect here: %s", ", ".join(self.without_effect))

    def completed(self, options: ServeOptions) -> ServeOptions:
        """`options`, completed by the former names; the present names win."""
        traces = {
            "triton,file": self.trace_file,
            "level": self.trace_level,
            "rate": self.trace_rate,
            "count": self.trace_count,
            "triton,log-frequency": self.log_frequency,
        }
        words = (f"{name}={value}" for name, value in traces.items() if value)
        server = replace(options.server, trace_config=(*words, *options.server.trace_config))
        repository, size = options.repository, self.response_cache_byte_size
        cache = repository.cache_config or ((f"local,size={size}",) if size not in ("", "0") else ())
        strict = repository.configs.disable_auto_complete_config or is_true(self.strict_model_config)
        configs = replace(repository.configs, disable_auto_complete_config=strict)
        return replace(options, server=server, repository=replace(repository, cache_config=cache, configs=configs))


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
