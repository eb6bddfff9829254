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


class Roofline(NamedTuple):
    """The least time of a language model's step on its machine: bytes of weights that a step reads, of keys and values
    for each token in the cache, and operations for each token that it computes; the machine's bytes and operations a
    second."""

    weight_bytes: float
    token_bytes: float
    token_ops: float
    read: float
    peak: float

    def reading_seconds(self, context: float) -> float:
        return (self.weight_bytes + context * self.token_bytes) / self.read

    def arithmetic_seconds(self, tokens: float) -> float:
        return tokens * self.token_ops / self.peak
