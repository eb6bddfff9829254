"""The flags of `charonia analyze`, `calibrate` and `simulate`. Light to import: the command line reads them."""

import re
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from ...core.errors import InvalidArgument

DEFAULT_CONCURRENCY = 16
_SEVERAL = Parameter(consume_multiple=True, negative=())
_MOST_SECONDS, _LEAST_SECONDS = 10.0, 0.4
_TURNS_IN_BUDGET = 40
"""Full measurements that a budget is to have room for, unless they would be too short for anything."""
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_HOUR_MS = 3_600_000

_Positive = Annotated[int | None, Parameter(validator=Number(gt=0))]
_Share = Annotated[float, Parameter(validator=Number(gt=0, lte=1))]
_Seconds = Annotated[float, Parameter(validator=Number(gte=0))]


def parse_budget(text: str) -> float:
    """Seconds as in 90, 90s, 10m or 2h. Raises `InvalidArgument` for another form."""
    match = re.fullmatch(r"(\d*\.?\d+)([smh]?)", text)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds < inf:
        raise InvalidArgument(f"--budget must be a time as in 90s, 10m or 2h, got '{text}'", field="budget")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelOptions:
    """The load."""

    concurrency: Annotated[tuple[int, ...], _SEVERAL] = ()
    """Levels of load: requests at a time, in a closed loop; 16 where nothing else is given."""
    rate: Annotated[tuple[float, ...], _SEVERAL] = ()
    """Levels of load: requests a second, arriving at random."""
    trace: Path | None = None
    """A load from a CSV with arrived_at, num_prefill_tokens, num_decode_tokens; classic models take its times alone."""
    speedup: float = 1.0
    """How much faster than recorded the trace is played."""
    prompt: int = 128
    """Tokens of each prompt."""
    new: int = 32
    """New tokens of each request."""
    shared_prefix: int = 0
    """Tokens at the beginning that all prompts share."""
    batch: int = 1
    """Items in each request to a classic model."""
    shape: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Dimensions of an input where its config leaves them free, as NAME:8,128; may be given several times."""
    seed: int = 0
    """The seed of arrivals and prompts."""
    timeout: float = 60.0
    """Seconds a request may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What is searched, for what, and how long."""

    model: str = ""
    """The model of a repository that takes the load; of a checkpoint, its name."""
    sweep: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """A knob and the values to try, as KNOB=VALUE,VALUE; may be given several times. Unset: what changes no answer."""
    search: Literal["quick", "exhaustive", "optuna"] = "quick"
    """quick: a fifth of the time of exhaustive, which tries everything; optuna: its sampler, if it is installed."""
    objective: str = "throughput"
    """What is to be best: throughput, memory, or a latency as in e2e_p99, ttft_p95, itl_mean."""
    constraint: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Bounds, as in e2e_p99=20ms,memory=2GiB; may be given several times."""
    budget: str = "10m"
    """Time for all measurements, those of a run that was broken off included."""
    seconds: float | None = None
    """Seconds of load of a full measurement, at each level; unset: a fortieth of the budget, at most 10."""
    report: Path = Path("analysis.html")
    """The report; the results lie beside it, in a file that ends with .jsonl."""
    server_args: Annotated[str, Parameter(allow_leading_hyphen=True)] = ""
    """More arguments of `charonia serve`, for the servers that are measured."""
    url: str = ""
    """Measure the server there at every level, and search nothing."""
    api_key: str = ""
    """With --url: the key to show."""
    allow_remote: Annotated[bool, Parameter(negative=())] = False
    """Allow --url to be another machine's."""

    def full_seconds(self) -> float:
        """The seconds of load of a full measurement. Raises `InvalidArgument` if it is no time."""
        budget = parse_budget(self.budget)
        if self.seconds is None:
            return min(_MOST_SECONDS, max(_LEAST_SECONDS, budget / _TURNS_IN_BUDGET))
        if not 0 < self.seconds < float("inf"):
            raise InvalidArgument(f"seconds must be above 0, got {self.seconds:g}", field="seconds")
        return self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShares:
    """What of a device's limits a step is supposed to reach; of --roofline alone."""

    read_share: _Share = 0.65
    """With --roofline: share of the bandwidth at which weights and cache are read."""
    peak_share: _Share = 0.5
    """With --roofline: share of the peak at which products are computed."""
    attention_share: _Share = 0.3
    """With --roofline: share of the peak at which prompts attend."""
    memory_share: _Share = 0.9
    """With --roofline: share of the memory that weights and cache may have."""
    step_ms: _Seconds = 1.0
    """With --roofline: milliseconds that a step takes beside, for launching and sampling."""
    arrival_ms: _Seconds = 2.0
    """With --roofline: milliseconds that a request takes until it is in the engine."""

    def __str__(self) -> str:
        shares = f"{self.read_share:.0%} of reading, {self.peak_share:.0%} of products, {self.attention_share:.0%} of"
        return f"{shares} attention, {self.memory_share:.0%} of memory, {self.step_ms:g} ms a step beside"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """What is measured, and for how long."""

    output: Path = Path("machine.json")
    """The file to write."""
    budget: str = "3m"
    """Time to measure in, as in 90s or 10m; what starts an engine or a server comes on top."""
    engine_alone: Annotated[bool, Parameter(negative=())] = False
    """Leave out what a server adds to its engine's steps."""
    url: str = ""
    """Measure a server instead, as its client, by http://HOST:PORT; it should have nothing else to do."""
    model: str = ""
    """With --url: the model to ask; by default the server's first that is no pipeline."""
    api_key: str = ""
    """With --url: the key to show."""
    allow_remote: Annotated[bool, Parameter(negative=())] = False
    """With --url: allow a server that is not this machine."""
    roofline: str = ""
    """Measure nothing: estimate from the sizes in config.json and the limits of a device, h100 or h200."""
    shares: Annotated[DeviceShares, Parameter("*")] = DeviceShares()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """The load: a trace, or requests that are described."""

    trace: Path | None = None
    """A CSV with arrived_at, num_prefill_tokens, num_decode_tokens. With --rate, only its lengths count."""
    speedup: float = 1.0
    """How much faster than recorded a trace is played."""
    rate: float | None = None
    """Requests per second on average, arriving at random."""
    burstiness: float = 1.0
    """Deviation of the time between arrivals over its mean: 0 is even, 1 Poisson, more comes in bursts."""
    prompt: str = "512"
    """Tokens of prompts: a number, a range as in 100-900, or median~sigma (lognormal), as in 1020~0.9."""
    new: str = "128"
    """New tokens, likewise."""
    longest: int | None = None
    """Cut prompts so that no request exceeds this many tokens; unset: as long as the model takes."""
    shared_prefix: int = 0
    """Tokens at the beginning of prompts that requests share."""
    prefixes: int = 1
    """How many different such beginnings there are."""
    tenant: tuple[str, ...] = ()
    """A tenant as NAME=SHARE[,WEIGHT[,PRIORITY]], SHARE being its part of the requests; may be given several times."""
    retain: float = 0.0
    """Seconds for which the sessions of a trace ask to retain their cache after each answer; see --retained-blocks."""
    requests: int | None = None
    """How many requests."""
    duration: float | None = None
    """Seconds after which no request begins."""
    seed: int = 0
    """The seed of arrivals, lengths, prefixes and tenants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngineOptions:
    """Settings of each replica's engine; unset ones are those that the machine was calibrated with."""

    max_model_len: _Positive = None
    """Longest sequence, prompt included."""
    max_num_seqs: _Positive = None
    """Sequences that run at once."""
    max_num_batched_tokens: _Positive = None
    """Tokens computed in one step."""
    target_ttft_ms: Annotated[float | None, Parameter(validator=Number(gt=0, lte=_HOUR_MS))] = None
    """Milliseconds to the first token that are wanted."""
    target_itl_ms: Annotated[float | None, Parameter(validator=Number(gte=0, lte=_HOUR_MS))] = None
    """Milliseconds between tokens that are wanted; 0 is no limit."""
    ahead: Annotated[int | None, Parameter(validator=Number(gte=0, lte=8))] = None
    """Steps scheduled before the last result is there."""
    admission: Literal["optimistic", "no_evict"] | None = None
    """Admit what fits now, or only what fits to its last token."""
    kv_cache_bytes: _Positive = None
    """Size of the KV cache in bytes."""
    kv_cache_blocks: _Positive = None
    """Size of the KV cache in blocks."""
    host_blocks: _Positive = None
    """Blocks in the host's memory for what the cache has no room for."""
    retained_blocks: _Positive = None
    """Blocks of the cache that sessions may retain together."""
    prefix_caching: bool | None = None
    """Share the cache of equal prompt beginnings."""
    max_queued_requests: _Positive = None
    """Requests that may wait; more are refused."""
    max_queued_tokens: _Positive = None
    """Prompt tokens that may wait, over all requests; more are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """How many replicas, and what is told of them."""

    replicas: Annotated[int, Parameter(validator=Number(gt=0))] = 1
    """Replicas behind one queue."""
    slo: str = ""
    """Look for the fewest replicas that keep these, as in ttft_p95=1s,itl_p99=100ms,rejected=1%."""
    most_replicas: Annotated[int, Parameter(validator=Number(gt=0))] = 256
    """With --slo: more are not tried."""
    slower: Annotated[float, Parameter(validator=Number(gt=0, lte=1000))] = 1.0
    """Let every step take so many times as long as the file says."""
    json: Annotated[bool, Parameter(negative=())] = False
    """Print an object instead of tables."""
    plot: Path | None = None
    """Draw the latencies, or with --slo what each fleet keeps, into this .svg or .html."""
