"""The causes that may limit a model, and their claims to its requests' time."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Cause(StrEnum):
    QUEUE = "queue"
    BATCHING = "batching"
    CACHE_FULL = "cache_full"
    PREEMPTIONS = "preemptions"
    NO_SNAPSHOT = "no_snapshot"
    MEMORY_BANDWIDTH = "memory_bandwidth"
    ARITHMETIC = "arithmetic"
    COMPUTATION = "computation"
    FRONTEND = "frontend"
    SLOW_CLIENT = "slow_client"
    TENANT = "tenant"
    COLD_START = "cold_start"
    IDLE = "idle"


class TimeClaim(NamedTuple):
    cause: Cause
    seconds: float
    symptom: str
    """What happens, as a main clause."""
    why: str
    """The evidence in words."""
    turn: str
    """The flag or setting to change, or what else to do."""
    evidence: Mapping[str, float] = {}
    """The evidence in numbers."""


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
