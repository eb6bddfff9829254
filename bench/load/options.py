"""The flags that describe a server and a load, and the load made from them. Asks a server for its model name alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from ...core.errors import InvalidArgument
from ..server_process import GRPC_PORT, ServerAddress, first_model, require_open
from .driver import LoopMode
from .endpoints import EndpointName, RequestOptions
from .plan import Form, PlannedRequest, Prompts, due_within, poisson, read_trace, uniform_jobs
from .worker import LoadRun, LoadTarget

ENDLESS = 100_000
"""Requests of a closed loop that only its duration is to end."""

_Positive = Parameter(validator=Number(gt=0))
_Switch = Parameter(negative=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """Whom to ask, and where."""

    model_repository: Path | None = None
    """Start a server of our own over this repository."""
    checkpoint: Path | None = None
    """Start a server of our own over this checkpoint."""
    server_args: str = ""
    """More arguments of `charonia serve` for a server of our own."""
    model: str = ""
    """The model to ask; by default the server's first."""
    door: EndpointName = "completions"
    """The protocol: OpenAI's completions or chat, v2's generate_stream, or gRPC's ModelStreamInfer."""
    grpc_port: int = GRPC_PORT
    """The gRPC door's port, of a server given by its URL."""
    allow_remote: Annotated[bool, _Switch] = False
    """Allow a server that is not this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """The load. Give one of rate, trace and concurrency."""

    rate: Annotated[float | None, _Positive] = None
    """Open loop: requests per second on average, arriving at random (Poisson)."""
    trace: Path | None = None
    """Open loop: a CSV with arrived_at, num_prefill_tokens, num_decode_tokens."""
    concurrency: Annotated[int | None, _Positive] = None
    """Closed loop: requests at a time."""
    speedup: Annotated[float, _Positive] = 1.0
    """How much faster than recorded a trace is played."""
    limit: Annotated[int | None, _Positive] = None
    """Only the first rows of a trace."""
    longest: Annotated[int | None, Parameter(validator=Number(gte=2))] = None
    """Cut a trace's prompts so that no request exceeds this many tokens."""
    requests: Annotated[int | None, _Positive] = None
    """How many requests."""
    duration: Annotated[float | None, _Positive] = None
    """Seconds after which no request begins."""
    prompt: Annotated[int, _Positive] = 128
    """Tokens of each prompt."""
    new: Annotated[int, _Positive] = 64
    """New tokens of each request."""
    form: Form | None = None
    """Prompts as token ids or as text; chat is always text."""
    vocab: Annotated[int, _Positive] = 256
    """Token ids of prompts are below this."""
    shared_prefix: int = 0
    """Tokens at the beginning that all prompts share."""
    temperature: float = 0.0
    """Sampling temperature."""
    stop_at_eos: Annotated[bool, _Switch] = False
    """Let the model end before all new tokens are there."""
    seed: int = 0
    """Of arrivals and prompts."""
    timeout: Annotated[float, _Positive] = 600.0
    """Seconds a request may take."""
    warmup: int = 1
    """Requests of each generator process before the start, in no figure."""
    processes: Annotated[int, _Positive] = 1
    """Generator processes."""


def build_load(place: ServerAddress, server: ServerFlags, work: LoadFlags) -> LoadRun:
    grpc = server.door == "grpc"
    if grpc:
        require_open(place, place.grpc_port, "the gRPC door")
    manner = RequestOptions(server.model or first_model(place), work.temperature, not work.stop_at_eos)
    port = place.grpc_port if grpc else place.http_port
    return LoadRun(
        target=LoadTarget(host=place.host, port=port, door=server.door, manner=manner),
        jobs=plan_requests(work),
        prompts=Prompts(form=_form(server, work), vocab=work.vocab, shared=work.shared_prefix, seed=work.seed),
        pace=LoopMode(concurrency=work.concurrency or 0, duration=work.duration, timeout=work.timeout),
        warm_up=work.warmup,
    )


def plan_requests(work: LoadFlags) -> list[PlannedRequest]:
    """The requests of a load.

    Raises:
        InvalidArgument: it has no pace, or several, or no end; or the trace cannot be read.
    """
    if sum(each is not None for each in (work.rate, work.trace, work.concurrency)) != 1:
        raise InvalidArgument("give one of --rate, --trace and --concurrency")
    if work.trace is not None:
        limit = min(filter(None, (work.limit, work.requests)), default=None)
        jobs = read_trace(work.trace, speedup=work.speedup, limit=limit, longest=work.longest)
        return due_within(jobs, work.duration)
    if work.requests is None and work.duration is None:
        raise InvalidArgument("give --requests or --duration, or both: else it never ends")
    if work.rate is None:
        return uniform_jobs([0.0] * (work.requests or ENDLESS), work.prompt, work.new)
    count = work.requests or round(2 * work.rate * (work.duration or 0)) + 100
    return due_within(uniform_jobs(poisson(work.rate, count, work.seed), work.prompt, work.new), work.duration)


def _form(server: ServerFlags, work: LoadFlags) -> Form:
    if server.door == "chat" and work.form == "ids":
        raise InvalidArgument("a chat takes no token ids")
    return work.form or ("text" if server.door == "chat" else "ids")


def describe_load(server: ServerFlags, work: LoadFlags) -> dict[str, Any]:
    return {**msgspec.to_builtins(server, enc_hook=str), **msgspec.to_builtins(work, enc_hook=str)}
