"""The causes that may limit a model, and the claim of one to a part of its requests' time."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Cause(StrEnum):
    """What limits a model."""

    QUEUE = "queue"
    BATCHING = "batching"
    CACHE_FULL = "cache_full"
    PREEMPTIONS = "preemptions"
    MEMORY_BANDWIDTH = "memory_bandwidth"
    ARITHMETIC = "arithmetic"
    COMPUTATION = "computation"
    FRONTEND = "frontend"
    SLOW_CLIENT = "slow_client"
    TENANT = "tenant"
    COLD_START = "cold_start"
    IDLE = "idle"


class TimeClaim(NamedTuple):
    """A cause's claim to `seconds` of all requests' time. `what` happens, as a main clause; `why` is its evidence in
    words, `evidence` in numbers; `turn`: the flag or setting to turn, or what else to do."""

    cause: Cause
    seconds: float
    what: str
    why: str
    turn: str
    evidence: Mapping[str, float] = {}


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
