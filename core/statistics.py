"""What a model's version did since it was loaded, in the words of v2's statistics.

Plain numbers; knows neither who counts them nor how a protocol writes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Duration:
    """How often something happened, and how long that took in all."""

    count: int = 0
    ns: int = 0


NEVER = Duration()


class InferenceStatistics(NamedTuple):
    """Of requests: a successful one counts in `success` and `queue`, and in the computes unless a cache had it."""

    success: Duration = NEVER
    fail: Duration = NEVER
    queue: Duration = NEVER
    compute_input: Duration = NEVER
    compute_infer: Duration = NEVER
    compute_output: Duration = NEVER
    cache_hit: Duration = NEVER
    cache_miss: Duration = NEVER


class BatchStatistics(NamedTuple):
    """Of executions with `batch_size` requests' items together."""

    batch_size: int
    compute_input: Duration = NEVER
    compute_infer: Duration = NEVER
    compute_output: Duration = NEVER


class ResponseStatistics(NamedTuple):
    """Of the responses in one place of a decoupled model's streams: the first ones, the second ones, and so on."""

    compute_infer: Duration = NEVER
    compute_output: Duration = NEVER
    success: Duration = NEVER
    fail: Duration = NEVER
    empty_response: Duration = NEVER
    cancel: Duration = NEVER


class MemoryUsage(NamedTuple):
    """Bytes that a model holds. `type`: GPU, CPU or CPU_PINNED; `id`: of the device."""

    type: str
    id: int
    byte_size: int


_NOTHING = InferenceStatistics()


@dataclass(frozen=True, slots=True)
class Statistics:
    """`last_inference`: milliseconds since the epoch, 0 if there was none. `inference_count` counts the items of
    batches, `execution_count` the batches. `responses` by their place, as a string. `explain`: how often requests
    that might have shared an execution did not, by the reason."""

    last_inference: int = 0
    inference_count: int = 0
    execution_count: int = 0
    inference: InferenceStatistics = _NOTHING
    batches: tuple[BatchStatistics, ...] = ()
    responses: Mapping[str, ResponseStatistics] = field(default_factory=dict)
    memory: tuple[MemoryUsage, ...] = ()
    explain: Mapping[str, int] = field(default_factory=dict)


class ModelStatistics(NamedTuple):
    """The statistics of one version of a model."""

    name: str
    version: str
    statistics: Statistics
