"""The flags of the server, under tritonserver's names or vLLM's. Free of any server: the command line reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from ..api.size_limits import BODY_TIMEOUT, MAX_JSON_BYTES, MAX_RAW_BYTES, MAX_RESPONSE_BYTES
from ..engine.options import EngineOptions
from ..repository.config_options import ConfigOptions
from ..telemetry.logging_setup import LogSettings
from ..telemetry.request_log import LoggedRequests
from .extensions import extension_options, spread

_MOST_FRONTENDS = 64
_BOOLEANS = ("true", "false", "1", "0")


def _boolean(hint: Any, tokens: Sequence[Token]) -> str:
    word = tokens[0].value.lower()
    if word not in _BOOLEANS:
        raise ValueError(f'unable to read "{tokens[0].value}". Choose from: {", ".join(_BOOLEANS)}.')
    return word


def _level(hint: Any, tokens: Sequence[Token]) -> int:
    """A number; tritonserver takes a boolean too."""
    word = tokens[0].value.lower()
    return int(word == "true") if word in ("true", "false") else int(word)


BooleanFlag: TypeAlias = Annotated[Literal["true", "false", "1", "0"], Parameter(converter=_boolean)]
"""A boolean as tritonserver takes it: `--flag=false`, `--flag false` and `--flag False` alike."""
_Port: TypeAlias = Annotated[int, Parameter(validator=Number(gte=0, lte=65535))]
_Count: TypeAlias = Annotated[int, Parameter(validator=Number(gte=0, lte=2**31 - 1))]
_MemoryLimit: TypeAlias = Annotated[int | None, Parameter(validator=Number(gt=0))]
_Texts: TypeAlias = Annotated[tuple[str, ...], Parameter(negative=())]


def _check_frontends(hint: Any, count: int | str) -> None:
    if isinstance(count, int) and not 1 <= count <= _MOST_FRONTENDS:
        raise ValueError(f"Must be 1 to {_MOST_FRONTENDS}, or auto.")


def is_true(flag: BooleanFlag) -> bool:
    return flag in ("true", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemandOptions:
    """Models that their first request loads, and that make room for others."""

    load_on_demand: Annotated[bool, Parameter(negative=())] = False
    """Load each model of the repositories when it is asked for, and unload others for it when memory lacks."""
    model_idle_secs: Annotated[float, Parameter(validator=Number(gte=0))] = 60
    """Seconds without a request after which a model makes room for another."""
    min_resident_secs: Annotated[float, Parameter(validator=Number(gte=0))] = 30
    """Seconds that a model stays in memory at least."""
    on_demand_loads: Annotated[int, Parameter(validator=Number(gt=0))] = 1
    """Models that requests load at once."""
    on_demand_wait_secs: Annotated[float, Parameter(validator=Number(gt=0))] = 60
    """Seconds that a request waits for its model, before 503."""
    on_demand_waiting: Annotated[int, Parameter(validator=Number(gt=0))] = 256
    """Requests that wait for models at once; more get 503."""
    on_demand_tenant_waiting: Annotated[int, Parameter(validator=Number(gt=0))] = 64
    """Requests of one tenant that wait for models at once; more get 503."""
    spare_cores: Annotated[int, Parameter(validator=Number(gte=0))] = 0
    """Engine processes that wait with their libraries imported, so that a language model is back sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """Which models to serve."""

    model_repository: Annotated[
        tuple[str, ...], Parameter(name=("--model-repository", "--model-store"), negative=())
    ] = ()
    """Directory of models, or s3://, gs:// or as:// and a path; may be given several times."""
    model_cache_dir: Path | None = None
    """Where models of object storage are kept; without it, charonia/models in the user's cache."""
    model_cache_bytes: Annotated[int | None, Parameter(validator=Number(gt=0))] = None
    """What may be kept there; without it, what the disk has room for."""
    served_model_name: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = ()
    """Names of a single checkpoint, instead of its directory's: several one after the other, or with commas. Answers
    show the first."""
    revision: str = ""
    """Branch, tag or commit of a hub id."""
    download_dir: Path | None = None
    """Where models of the hub are kept, in place of HF_HUB_CACHE."""
    backend: str = ""
    """What serves a single checkpoint, instead of what its files say: charonia, encoder, or what a package brings."""
    model_control_mode: Literal["none", "poll", "explicit"] = "none"
    """Who changes what is served: nobody, the repository's files, or requests."""
    load_model: _Texts = ()
    """Model to load at the start in mode explicit; may be given several times, * is all."""
    allow_uploaded_code: Annotated[bool, Parameter(negative=())] = False
    """Take Python code that comes with a load request, in mode explicit."""
    allow_pipelines: Annotated[bool, Parameter(negative=())] = False
    """Let requests load pipelines, in mode explicit, where neither keys nor restrictions protect that."""
    drafter: tuple[Path, ...] = ()
    """Python file of a drafter that models' speculative_config may name; may be given several times."""
    repository_poll_secs: Annotated[float, Parameter(validator=Number(gt=0))] = 15
    """Seconds between looks at the repository in mode poll."""
    state_dir: Path | None = None
    """Directory to keep what requests change of routes, this server's alone; without it, they may not."""
    configs: Annotated[ConfigOptions, Parameter("*")] = ConfigOptions()  # noqa: RUF009
    execution_timeout_secs: Annotated[float, Parameter(validator=Number(gte=0))] = 0
    """Seconds after which an execution of a classic model is ended, if it can be; 0 is never."""
    restart_pause: Annotated[float, Parameter(validator=Number(gte=0))] = 0.1
    """Seconds before a process of a classic model that has ended is replaced; doubled while it serves nothing."""
    rate_limit: Literal["off", "execution_count"] = "off"
    """Let instances of classic models take turns at the resources that their configs name: execution_count."""
    rate_limit_resource: _Texts = ()
    """What there is of a resource, as NAME:COUNT or NAME:COUNT:DEVICE; may be given several times."""
    cache_config: _Texts = ()
    """Keep answers of models whose configs have response_cache, as local,size=BYTES."""
    memory_limit: _MemoryLimit = None
    """Bytes of the host's memory that all models may hold together; without it, what is free."""
    gpu_memory_limit: _MemoryLimit = None
    """Bytes of each GPU's memory that all models may hold together; without it, what is free."""
    on_demand: Annotated[OnDemandOptions, Parameter("*")] = OnDemandOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """LoRA adapters: those of the start, and those that requests may load."""

    lora_modules: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = ()
    """Adapters of a single checkpoint, as NAME=DIRECTORY or as vLLM's JSON; several one after the other."""
    allow_runtime_lora: Annotated[bool, Parameter(negative=())] = False
    """Let requests load adapters of --lora-root, and unload any."""
    lora_root: Path | None = None
    """Directory that requests may load adapters from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Settings of the server."""

    config: Path | None = None
    """YAML file of flags, by their names. What the command line says wins over the variable CHARONIA_<FLAG>, which wins
    over the file."""
    id: str = "triton"
    """Name of the server in its metadata."""
    allow_http: BooleanFlag = "true"
    """Serve HTTP."""
    http_address: str = "0.0.0.0"
    """Address to listen on."""
    http_port: Annotated[_Port, Parameter(name=("--http-port", "--port"))] = 8000
    """Port of the v2 and OpenAI protocols over HTTP."""
    reuse_http_port: BooleanFlag = "false"
    """Let other servers listen on the port too: each gets some of the connections."""
    http_server_cert: Path | None = None
    """Certificate to encrypt HTTP with, PEM."""
    http_server_key: Path | None = None
    """The certificate's private key, PEM."""
    url_file: Path | None = None
    """File to write the server's URL to while it listens, for scripts and health checks."""
    allow_metrics: BooleanFlag = "true"
    """Serve metrics."""
    metrics_address: str = ""
    """Address to serve metrics on, when it is not --http-address."""
    metrics_port: _Port = 8002
    """Port of Prometheus metrics."""
    metrics_config: _Texts = ()
    """What is measured of latencies, as NAME=VALUE; may be given several times."""
    allow_cpu_metrics: BooleanFlag = "true"
    """Measure the host's CPUs and memory too."""
    allow_gpu_metrics: BooleanFlag = "true"
    """Measure the host's GPUs too."""
    metrics_names: Literal["charonia", "vllm"] = "charonia"
    """Names of what Triton has no name for; vllm: vLLM's names beside ours."""
    machine: _Texts = ()
    """What `charonia calibrate` wrote of a language model, as NAME=FILE, for its explanations; may be given several
    times."""
    frontends: Annotated[int | Literal["auto"], Parameter(validator=_check_frontends)] = "auto"
    """Processes that read requests and write answers, over one that has the models; each takes 110 MB and tokenizers.
    1: that one does both; auto: it does, and on more than four cores it starts two to four when it is busy."""
    max_loop_lag_secs: Annotated[float, Parameter(validator=Number(gt=0))] = 10
    """Delay of the frontend's event loop from which on nothing is ready."""
    http_max_input_size: Annotated[int, Parameter(validator=Number(gte=1))] = MAX_JSON_BYTES
    """Largest request body in JSON, in bytes."""
    max_raw_input_size: Annotated[int, Parameter(validator=Number(gte=1, lte=2**31 - 1))] = MAX_RAW_BYTES
    """Largest request with raw tensors, over HTTP and gRPC, in bytes."""
    max_response_bytes: Annotated[int, Parameter(validator=Number(gte=1))] = MAX_RESPONSE_BYTES
    """Largest response of a model of tensors, in bytes of its outputs; a quarter of it where they become JSON."""
    strict_readiness: BooleanFlag = "true"
    """Ready when each model of the start has served, as long as all in memory are ready; false: at once."""
    exit_on_error: BooleanFlag = "true"
    """End if a model fails to load at the start."""
    drain_secs: Annotated[float, Parameter(validator=Number(gte=0))] = 0
    """Seconds on SIGTERM or SIGINT in which the server is not ready and still takes requests, before the exit."""
    exit_timeout_secs: Annotated[float, Parameter(validator=Number(gte=0))] = 30
    """How long running requests may take to finish on SIGTERM or SIGINT."""
    log_info: BooleanFlag = "true"
    """Log what informs: loads, requests."""
    log_warning: BooleanFlag = "true"
    """Log warnings."""
    log_error: BooleanFlag = "true"
    """Log errors."""
    log_requests: LoggedRequests = "llm"
    """Requests that have a record in the log: all; those of language models, and all that failed; those that failed."""
    log_verbose: Annotated[int, Parameter(converter=_level, validator=Number(gte=0))] = 0
    """Above 0: a line for every HTTP request too, health and lookups included, in the web server's words."""
    log_format: Literal["default", "ISO8601", "json"] = "default"
    """Format of times in the log; json: every record is a line of JSON."""
    log_file: str = ""
    """File to log to, at its end; without it, the standard error."""
    allow_client_shm: BooleanFlag = "false"
    """Let clients register regions of system shared memory."""
    trace_config: _Texts = ()
    """A setting of traces, as `level=TIMESTAMPS`, `rate=100`, `count=-1`, or `triton,file=PATH` and
    `triton,log-frequency=N`; may be given several times."""
    otlp_traces_endpoint: str = ""
    """Where to send the spans of requests, by OTLP over HTTP; without it OTEL_EXPORTER_OTLP_ENDPOINT says."""
    enable_auto_tool_choice: Annotated[bool, Parameter(negative=())] = False
    """Without effect, for command lines of vLLM: tools may always be called."""

    @property
    def log_settings(self) -> LogSettings:
        return LogSettings(
            log_file=self.log_file,
            log_info=is_true(self.log_info),
            log_warning=is_true(self.log_warning),
            log_error=is_true(self.log_error),
            log_verbose_level=self.log_verbose,
            log_format=self.log_format,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Settings of HTTP."""

    http_restricted_api: _Texts = ()
    """Parts of the API that only those may use whose request has this header, as `<api>[,<api>]:<key>=<value>`; may
    be given several times."""
    http_body_timeout_secs: Annotated[float, Parameter(validator=Number(gt=0))] = BODY_TIMEOUT
    """Silence within a request's body after which it is given up, with 408."""
    http_header_forward_pattern: str = ""
    """Regular expression; headers whose name has a part that matches become parameters of `infer`."""
    allowed_origins: Annotated[
        tuple[str, ...], Parameter(name=("--allowed-origins", "--cors-origins"), negative=())
    ] = ()
    """Origin of web pages that may ask, or * for all; may be given several times, or as a JSON list."""
    allowed_hosts: _Texts = ()
    """Name under which requests without keys may change this server, or * for any, beside localhost, addresses and
    names within a network; may be given several times."""
    trust_gateway_headers: _Texts = ()
    """Headers of a gateway in front that are believed, over gRPC too: names apart by commas, or all."""
    gateway_objectives: _Texts = ()
    """Priority classes of a gateway's objectives, as NAME=CLASS, apart by commas; 0 is the most urgent one."""
    api_docs: Annotated[bool, Parameter(negative=())] = False
    """Serve a page about all endpoints at /docs, and their description (OpenAPI) at /openapi.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptions:
    """API keys. Without any, every client may ask."""

    api_key: _Texts = field(default=(), repr=False)
    """A key clients must show, as `key`, `name:key` or `name:key:weight`; may be given several times. Other users of
    the machine can see it: prefer --api-key-file, or CHARONIA_API_KEYS with keys apart by commas or spaces."""
    api_key_file: Path | None = None
    """File of such keys, one a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """Settings of the gRPC endpoint."""

    allow_grpc: BooleanFlag = "true"
    """Serve gRPC."""
    grpc_address: str = "0.0.0.0"
    """Address to listen on for gRPC."""
    grpc_port: _Port = 8001
    """Port of the v2 protocol over gRPC."""
    reuse_grpc_port: BooleanFlag = "false"
    """Let other servers listen on the port too: each gets some of the connections."""
    grpc_use_ssl: BooleanFlag = "false"
    """Encrypt gRPC."""
    grpc_use_ssl_mutual: BooleanFlag = "false"
    """Encrypt gRPC and let in only clients with a certificate of --grpc-root-cert."""
    grpc_server_cert: Path | None = None
    """The server's certificate, PEM."""
    grpc_server_key: Path | None = None
    """The certificate's private key, PEM."""
    grpc_root_cert: Path | None = None
    """Certificates of those who may sign a client's, PEM."""
    grpc_keepalive_time: _Count = 7_200_000
    """Milliseconds of silence after which a client is pinged."""
    grpc_keepalive_timeout: _Count = 20_000
    """Milliseconds a pinged client may take to answer."""
    grpc_keepalive_permit_without_calls: BooleanFlag = "false"
    """Ping clients that have no call open."""
    grpc_http2_max_pings_without_data: _Count = 2
    """Pings in a row without data in between."""
    grpc_http2_min_recv_ping_interval_without_data: _Count = 300_000
    """Least milliseconds between pings of a client that sends no data."""
    grpc_http2_max_ping_strikes: _Count = 2
    """Pings that come too early before the connection is closed; 0 never closes it."""
    grpc_max_connection_age: _Count = 0
    """Milliseconds after which a connection is closed; 0 never does."""
    grpc_max_connection_age_grace: _Count = 0
    """Milliseconds more that its calls may take then; 0 is no limit."""
    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] = "none"
    """How to compress responses, for clients that take it; low: deflate, the others: gzip."""
    grpc_restricted_protocol: _Texts = ()
    """Parts of the protocol that only those may use whose metadata has `triton-grpc-protocol-<key>`, as
    `<protocol>[,<protocol>]:<key>=<value>`; may be given several times."""
    grpc_header_forward_pattern: str = ""
    """Regular expression; metadata whose name has a part that matches become parameters of requests."""
    grpc_reflection: BooleanFlag = "false"
    """Tell clients such as grpcurl the messages of the service; needs package grpcio-reflection."""

    @property
    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """The flags that grpc has options for, by its names."""
        ages = (
            ("grpc.max_connection_age_ms", self.grpc_max_connection_age),
            ("grpc.max_connection_age_grace_ms", self.grpc_max_connection_age_grace),
        )
        return (
            ("grpc.so_reuseport", int(is_true(self.reuse_grpc_port))),  # grpc's own default is to share
            ("grpc.keepalive_time_ms", self.grpc_keepalive_time),
            ("grpc.keepalive_timeout_ms", self.grpc_keepalive_timeout),
            ("grpc.keepalive_permit_without_calls", int(is_true(self.grpc_keepalive_permit_without_calls))),
            ("grpc.http2.max_pings_without_data", self.grpc_http2_max_pings_without_data),
            ("grpc.http2.min_ping_interval_without_data_ms", self.grpc_http2_min_recv_ping_interval_without_data),
            ("grpc.http2.max_ping_strikes", self.grpc_http2_max_ping_strikes),
            *(option for option in ages if option[1]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudOptions:
    """Settings of the endpoints for clouds."""

    allow_sagemaker: BooleanFlag = "false"
    """Serve what SageMaker asks of a container; its variables say which model."""
    sagemaker_port: _Port = 8080
    """Port of SageMaker's endpoint."""
    allow_vertex_ai: BooleanFlag = "false"
    """Serve what Vertex AI asks of a container; its variables say on which paths."""
    vertex_ai_port: _Port | None = None
    """Port of Vertex AI's endpoint; without it AIP_HTTP_PORT says, or 8080."""
    vertex_ai_default_model: str = ""
    """Model that Vertex AI asks; may be left out where there is one."""


_HEADINGS = {
    "Models": 1,
    "Language models": 2,
    "Adapters": 3,
    "Server": 4,
    "HTTP": 5,
    "Keys": 6,
    "gRPC": 7,
    "Clouds": 9,
}
"""Their places in the help."""

_OF_EXTENSIONS = 8


def _heading(name: str) -> Parameter:
    """The flags of one class, under a heading in the help."""
    return Parameter("*", group=Group(name, sort_key=_HEADINGS.get(name, _OF_EXTENSIONS)))


if TYPE_CHECKING:
    ExtensionOptions: TypeAlias = Any
else:
    ExtensionOptions = extension_options(_heading)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """All flags of `charonia serve` but those that only tritonserver has."""

    repository: Annotated[RepositoryOptions, _heading("Models")] = RepositoryOptions()
    engine: Annotated[EngineOptions, _heading("Language models")] = EngineOptions()  # noqa: RUF009
    adapters: Annotated[AdapterOptions, _heading("Adapters")] = AdapterOptions()
    server: Annotated[ServerOptions, _heading("Server")] = ServerOptions()
    http: Annotated[HttpOptions, _heading("HTTP")] = HttpOptions()
    keys: Annotated[KeyOptions, _heading("Keys")] = KeyOptions()
    grpc: Annotated[GrpcOptions, _heading("gRPC")] = GrpcOptions()
    cloud: Annotated[CloudOptions, _heading("Clouds")] = CloudOptions()
    extensions: Annotated[ExtensionOptions, spread(ExtensionOptions)] = ExtensionOptions()  # noqa: RUF009
