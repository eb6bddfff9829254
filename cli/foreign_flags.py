"""Flags of tritonserver and vLLM that are no options here, and the messages for unknown flags.

A flag that means the same there and here is an option, by their name. A command line that was written for tritonserver
is accepted: flags without effect are warned of, those that would change results are refused. Free of any server.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import Annotated, TypeAlias

from cyclopts import CycloptsPanel, Group, Parameter
from cyclopts.exceptions import CycloptsError, UnknownCommandError, UnknownOptionError

from ..core.errors import InvalidArgument, Unsupported, did_you_mean
from ..core.extensions import absent_extensions, describe_absent
from ..engine.vllm.arguments import ELSEWHERE, WITHOUT_EFFECT
from .options import BooleanFlag, ServeOptions, is_true
from .other_servers import OTHER_COMMANDS, VLLM_FLAGS, other_server_of

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
        return [_flag(field.name) for field in fields(self) if field.default == () and getattr(self, field.name)]

    def check(self) -> None:
        """Warn of flags that have no effect; raises `Unsupported` for one that would be missed."""
        if is_true(self.model_namespacing):
            raise Unsupported(f"{_flag('model_namespacing')} {self.model_namespacing} is not served")
        if self.without_effect:
            log.warning("flags of tritonserver that have no effect here: %s", ", ".join(self.without_effect))

    def completed(self, options: ServeOptions) -> ServeOptions:
        """`options`, completed by the former names; the present names win.

        Raises:
            InvalidArgument: --response-cache-byte-size is given beside --cache-config, as on tritonserver.
        """
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
        if size and repository.cache_config:
            raise InvalidArgument("--response-cache-byte-size and --cache-config set the same cache: give one of them")
        cache = repository.cache_config if size in ("", "0") else (f"local,size={size}",)
        strict = repository.configs.disable_auto_complete_config or is_true(self.strict_model_config)
        configs = replace(repository.configs, disable_auto_complete_config=strict)
        return replace(options, server=server, repository=replace(repository, cache_config=cache, configs=configs))


_VLLM = Group("Flags of vLLM by other names here")
_SO = Group("Flags of vLLM for what is so anyway")

_Switch: TypeAlias = Annotated[bool, Parameter(group=_SO, negative=())]
_Value: TypeAlias = Annotated[str, Parameter(group=_SO)]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFlags:
    """Flags of vLLM that a command line may have, though they are called otherwise here, or ask for what is so anyway.
    Others are refused, with our name or the reason: `other_servers`."""

    model: Annotated[str, Parameter(group=_VLLM)] = ""
    """What to serve: here the argument without a flag."""
    host: Annotated[str, Parameter(group=_VLLM)] = ""
    """--http-address and --grpc-address, where these are not given."""
    enable_prefix_caching: Annotated[bool | None, Parameter(group=_VLLM)] = None
    """--prefix-caching, which is on by default."""
    disable_log_requests: Annotated[bool, Parameter(group=_VLLM, negative=())] = False
    """--log-requests errors."""
    enable_log_requests: Annotated[bool | None, Parameter(group=_VLLM)] = None
    """--log-requests llm, which is the default; with no- in front: errors."""

    enable_chunked_prefill: Annotated[bool | None, Parameter(group=_SO)] = None
    """Prompts are always computed in pieces."""
    disable_log_stats: _Switch = False
    """Statistics are metrics, not lines of the log."""
    disable_uvicorn_access_log: _Switch = False
    """Lines of the web server come with --log-verbose alone."""
    enable_request_id_headers: _Switch = False
    """Every answer has x-request-id."""
    enable_prompt_tokens_details: _Switch = False
    """Every answer counts the tokens of its prompt that were cached."""
    fully_sharded_loras: _Switch = False
    """Ranks hold their slices of an adapter."""
    disable_frontend_multiprocessing: _Switch = False
    """The engine is a process of its own, and --frontends says how many read requests."""
    disable_custom_all_reduce: _Switch = False
    """Ranks use the library's."""
    seed: _Value = ""
    """A request's seed counts."""
    swap_space: _Value = ""
    """What has no room is computed again."""
    scheduling_policy: _Value = ""
    """A request's priority always counts."""
    compilation_config: _Value = ""
    """Nothing is compiled."""
    max_log_len: _Value = ""
    """Prompts are never in the log."""
    max_logprobs: _Value = ""
    """Up to 20."""
    load_format: _Value = ""
    """auto, safetensors or pt: safetensors, else torch's .bin."""
    tokenizer_mode: _Value = ""
    """auto, hf or fast: a tokenizer.json is read."""
    generation_config: _Value = ""
    """auto: the checkpoint's generation_config.json gives the defaults."""
    lora_dtype: _Value = ""
    """auto: adapters are computed with in the model's type."""

    @property
    def named(self) -> list[str]:
        """The flags that were given, but for those that have an effect."""
        idle = (field for field in fields(self) if field.name not in ("model", "host"))
        return [_flag(field.name) for field in idle if getattr(self, field.name) not in ("", False, None)]

    def check(self) -> None:
        """Warn of flags that ask for what is so anyway; raises `Unsupported` for one whose value asks for something
        else."""
        for name, served in _SERVED_VALUES.items():
            value = getattr(self, name)
            if value and value.lower() not in served:
                raise Unsupported(f"{_flag(name)} {value} is not served: {(ELSEWHERE | WITHOUT_EFFECT)[name]}")
        if self.enable_chunked_prefill is False:
            raise Unsupported(f"--no-enable-chunked-prefill is not served: {WITHOUT_EFFECT['enable_chunked_prefill']}")
        if self.named:
            log.warning("flags of vLLM for what is so anyway, or called otherwise here: %s", ", ".join(self.named))

    def completed(self, options: ServeOptions) -> ServeOptions:
        """`options`, completed by what is called otherwise there; their own names win."""
        engine, server = options.engine, options.server
        if engine.prefix_caching is None:
            engine = replace(engine, prefix_caching=self.enable_prefix_caching)
        if self.disable_log_requests or self.enable_log_requests is False:
            server = replace(server, log_requests="errors") if server.log_requests == "llm" else server
        return replace(options, engine=engine, server=server)


_SERVED_VALUES = {
    "max_logprobs": {str(count) for count in range(21)},
    "load_format": {"auto", "safetensors", "pt"},
    "tokenizer_mode": {"auto", "hf", "fast"},
    "generation_config": {"auto"},
    "lora_dtype": {"auto"},
}
"""The values that ask for what is so anyway, of flags that have others too."""


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


_FLAG = re.compile(r"-{1,2}[A-Za-z]")


def format_usage_error(error: CycloptsError) -> object:
    """The panel that is printed for a command line that cannot be read; of unknown flags it names all."""
    if isinstance(error, UnknownCommandError):
        [command, *_] = error.unused_tokens or [""]
        return CycloptsPanel(_unknown_command(command, [name for name in error.app or () if not name.startswith("-")]))
    if not isinstance(error, UnknownOptionError):
        return CycloptsPanel(error)
    known = [name for argument in error.argument_collection for name in argument.names]
    flags = _unknown_flags(error) or [(error.token.keyword or error.token.value).partition("=")[0]]
    return CycloptsPanel("\n".join(unknown_flag(flag, known) for flag in flags))


def _unknown_command(command: str, known: Sequence[str]) -> str:
    if (package := absent_extensions("charonia.commands").get(command)) is not None:
        return f"{command} is a command of {package}, which this installation lacks"
    if (ours := OTHER_COMMANDS.get(command)) is not None:
        return f"{command} is a command of other servers; here: {ours}"
    return f"Unknown command: {command}{did_you_mean(command, known)}\nThere are {', '.join(sorted(known))}."


def unknown_flag(flag: str, known: Iterable[str]) -> str:
    """What is to be said of a flag that is none of `known`."""
    if (other := other_server_of(flag)) is not None:
        server, ours = other
        return f"{flag} is {server}'s; here: {ours}"
    similar = did_you_mean(flag.replace("_", "-"), [*known, *VLLM_FLAGS])
    return f"Unknown option: {flag}{describe_absent('charonia.routes')}{similar}"


def _unknown_flags(error: UnknownOptionError) -> list[str]:
    """The flags of the command line that its command does not have, each once, in order."""
    unknown: dict[str, None] = {}
    for word in takewhile(lambda word: word != "--", error.root_input_tokens or ()):
        flag = word.partition("=")[0]
        try:
            error.argument_collection.match(flag)
        except ValueError:
            unknown |= {flag: None} if _FLAG.match(flag) else {}
    return list(unknown)
