"""Settings of the server, under tritonserver's names. Free of any server: the command line reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from ..api.size_limits import MAX_RAW_BYTES
from ..telemetry.log_settings import LogSettings

PortFlag: TypeAlias = Annotated[int, Parameter(validator=Number(gte=0, lte=65535))]
_WORDS = ("true", "false", "1", "0")


def _boolean(hint: Any, tokens: Sequence[Token]) -> str:
    word = tokens[0].value.lower()
    if word not in _WORDS:
        raise ValueError(f'unable to read "{tokens[0].value}". Choose from: {", ".join(_WORDS)}.')
    return word


def _level(hint: Any, tokens: Sequence[Token]) -> int:
    """tritonserver takes a boolean where it wants a level."""
    word = tokens[0].value.lower()
    return int(word == "true") if word in ("true", "false") else int(word)


BooleanFlag: TypeAlias = Annotated[Literal["true", "false", "1", "0"], Parameter(converter=_boolean)]
"""As tritonserver takes them: `--flag=false`, `--flag false` and `--flag False` alike."""


def is_true(flag: BooleanFlag) -> bool:
    return flag in ("true", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Settings of the server, under tritonserver's names."""

    id: str = "triton"
    """Name of the server in its metadata."""
    allow_http: BooleanFlag = "true"
    """Serve HTTP."""
    http_address: str = "0.0.0.0"
    """Address to listen on."""
    http_port: PortFlag = 8000
    """Port of the v2 and OpenAI protocols over HTTP."""
    reuse_http_port: BooleanFlag = "false"
    """Let other servers listen on the port too: each gets some of the connections."""
    http_server_cert: Path | None = None
    """Certificate to encrypt HTTP with, PEM."""
    http_server_key: Path | None = None
    """The certificate's private key, PEM."""
    allow_metrics: BooleanFlag = "true"
    """Serve metrics."""
    metrics_address: str = ""
    """Address to serve metrics on, when it is not --http-address."""
    metrics_port: PortFlag = 8002
    """Port of Prometheus metrics."""
    metrics_config: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """What is measured of latencies, as NAME=VALUE; may be given several times."""
    allow_cpu_metrics: BooleanFlag = "true"
    """Measure the host's CPUs and memory too."""
    allow_gpu_metrics: BooleanFlag = "true"
    """Measure the host's GPUs too."""
    metrics_names: Literal["charonia", "vllm"] = "charonia"
    """Names of what Triton has no name for; vllm: vLLM's names beside ours."""
    max_loop_lag_secs: Annotated[float, Parameter(validator=Number(gt=0))] = 10
    """Delay of the frontend's event loop from which on nothing is ready."""
    http_max_input_size: Annotated[int, Parameter(validator=Number(gte=1))] = 64 * 1024 * 1024
    """Largest request body in JSON, in bytes."""
    max_raw_input_size: Annotated[int, Parameter(validator=Number(gte=1, lte=2**31 - 1))] = MAX_RAW_BYTES
    """Largest request with raw tensors, over HTTP and gRPC, in bytes."""
    strict_readiness: BooleanFlag = "true"
    """Ready only when every known model is."""
    exit_on_error: BooleanFlag = "true"
    """End if a model fails to load at the start."""
    exit_timeout_secs: Annotated[float, Parameter(validator=Number(gte=0))] = 30
    """How long running requests may take to finish on SIGTERM or SIGINT."""
    log_info: BooleanFlag = "true"
    """Log what informs: loads, requests."""
    log_warning: BooleanFlag = "true"
    """Log warnings."""
    log_error: BooleanFlag = "true"
    """Log errors."""
    log_verbose: Annotated[int, Parameter(converter=_level, validator=Number(gte=0))] = 0
    """Above 0: a line for every HTTP request too, health and lookups included, in the web server's words."""
    log_format: Literal["default", "ISO8601", "json"] = "default"
    """Format of times in the log; json: every record is a line of JSON."""
    log_file: str = ""
    """File to log to, at its end; without it, the standard error."""
    allow_client_shm: BooleanFlag = "false"
    """Let clients register regions of system shared memory."""
    trace_config: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """A setting of traces, as `level=TIMESTAMPS`, `rate=100`, `count=-1`, or `triton,file=PATH` and
    `triton,log-frequency=N`; may be given several times."""
    otlp_traces_endpoint: str = ""
    """Where to send the spans of requests, by OTLP over HTTP; without it OTEL_EXPORTER_OTLP_ENDPOINT says."""

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
