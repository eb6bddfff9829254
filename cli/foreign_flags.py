"""Flags of tritonserver and vLLM that go by another name here, mean nothing here, or ask for what is not served, and
the messages for unknown flags. Where a flag means the same it has vLLM's name and is an option; those here are not.

A command line that was written for tritonserver is accepted as it is: flags without effect are warned of, those that
would change results are refused. Free of any server: the command line reads it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, TypeAlias

from cyclopts import CycloptsPanel, Group, Parameter
from cyclopts.exceptions import CycloptsError, UnknownOptionError

from ..core.errors import Unsupported, did_you_mean
from ..engine.vllm.arguments import NOT_SERVED, WITHOUT_EFFECT
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
    sagemaker_safe_port_range: _Idle = ()
    """There is one port."""
    sagemaker_thread_count: _Idle = ()
    """All requests are one event loop's."""
    vertex_ai_thread_count: _Idle = ()
    """All requests are one event loop's."""

    model_namespacing: Annotated[BooleanFlag, Parameter(group=_REFUSED)] = "false"
    """Names of models are unique over all repositories."""

    @property
    def without_effect(self) -> list[str]:
        """The flags that were given and have no effect."""
        return [_flag(field.name) for field in fields(self) if field.default == () and getattr(self, field.name)]

    def check(self) -> None:
        """Warn of flags that have no effect; raises `Unsupported` for one that would be missed."""
        if is_true(self.model_namespacing):
            raise Unsupported(f"{_flag('model_namespacing')} {self.model_namespacing} is not served")
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


_NO_EFFECT = "leave it out: "
_NOT_SERVED = "not served: "


def _flags(arguments: Mapping[str, str], kind: str) -> dict[str, str]:
    return {f"--{name.replace('_', '-')}": kind + reason for name, reason in arguments.items()}


VLLM_FLAGS: Mapping[str, str] = {
    **_flags({name: why for name, why in WITHOUT_EFFECT.items() if name != "enable_auto_tool_choice"}, _NO_EFFECT),
    **_flags(NOT_SERVED, _NOT_SERVED),
    "--host": "--http-address, --grpc-address and --metrics-address",
    "--port": "--http-port; gRPC has --grpc-port, metrics --metrics-port",
    "--model": "the first argument: charonia serve MODEL",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "--gpu-memory-utilization": "--kv-cache-memory-fraction, of what weights leave free; --gpu-memory-limit, in bytes",
    "--kv-cache-memory-bytes": "--kv-cache-bytes",
    "--num-gpu-blocks-override": "--kv-cache-blocks",
    "--enable-prefix-caching": "--prefix-caching, which is on by default",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--async-scheduling": "--ahead 1",
    "--hf-token": "the variable HF_TOKEN",
    "--max-cpu-loras": "--max-lora-bytes: adapters are counted by what they take",
    "--lora-dtype": f"{_NO_EFFECT}adapters are computed with in the model's type",
    "--fully-sharded-loras": f"{_NO_EFFECT}ranks hold their slices of an adapter",
    "--ssl-certfile": "--http-server-cert",
    "--ssl-keyfile": "--http-server-key",
    "--ssl-ca-certs": "--grpc-root-cert, for gRPC alone",
    "--root-path": f"{_NOT_SERVED}let the proxy take the prefix away",
    "--uvicorn-log-level": "--log-info, --log-warning, --log-error, --log-verbose",
    "--enable-log-requests": "--log-info, which is on by default",
    "--disable-log-requests": "--log-info=false",
    "--no-enable-log-requests": "--log-info=false",
    "--disable-uvicorn-access-log": f"{_NO_EFFECT}they come with --log-verbose alone",
    "--enable-request-id-headers": f"{_NO_EFFECT}every answer has x-request-id",
    "--allowed-methods": f"{_NO_EFFECT}--allowed-origins lets pages use all of them",
    "--allowed-headers": f"{_NO_EFFECT}--allowed-origins lets pages send all of them",
}
"""By vLLM's name: the name here, or the reason why there is none."""


def format_usage_error(error: CycloptsError) -> object:
    """The panel that is printed for a command line that cannot be read."""
    if not isinstance(error, UnknownOptionError):
        return CycloptsPanel(error)
    flag, _, _ = (error.token.keyword or error.token.value).partition("=")
    if flag in VLLM_FLAGS:
        return CycloptsPanel(f"{flag} is vLLM's; here: {VLLM_FLAGS[flag]}")
    known = [name for argument in error.argument_collection for name in argument.names]
    return CycloptsPanel(f"Unknown option: {flag}{did_you_mean(flag.replace('_', '-'), [*known, *VLLM_FLAGS])}")


def vllm_flag_table() -> str:
    """`VLLM_FLAGS` as a table in text."""
    width = max(map(len, VLLM_FLAGS))
    flags = sorted(VLLM_FLAGS.items(), key=lambda row: row[0].lstrip("-"))
    return "\n".join(
        ["vLLM's flags that are called otherwise here:", *(f"  {flag:{width}}  {here}" for flag, here in flags)]
    )
