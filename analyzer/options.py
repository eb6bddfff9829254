"""The flags of `charonia analyze`. Light to import: the command line reads them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ..core.errors import InvalidArgument
from ..planning.budget import parse_budget

DEFAULT_CONCURRENCY = 16
_SEVERAL = Parameter(consume_multiple=True, negative=())
_MOST_SECONDS, _LEAST_SECONDS = 10.0, 0.4
_TURNS_IN_BUDGET = 40
"""Full measurements that a budget is to have room for, unless they would be too short for anything."""


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
    """Of arrivals and prompts."""
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
        """Of load of a full measurement. Raises `InvalidArgument` if it is no time."""
        budget = parse_budget(self.budget)
        if self.seconds is None:
            return min(_MOST_SECONDS, max(_LEAST_SECONDS, budget / _TURNS_IN_BUDGET))
        if not 0 < self.seconds < float("inf"):
            raise InvalidArgument(f"seconds must be above 0, got {self.seconds:g}", field="seconds")
        return self.seconds
