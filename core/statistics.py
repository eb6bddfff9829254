"""Statistics of a model's version since it was loaded, with the names of v2's statistics extension."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class StatisticDuration:
    """A count of events and the nanoseconds that they took together."""

    count: int = 0
    ns: int = 0


NO_DURATION = StatisticDuration()


class InferenceStatistics(NamedTuple):
    """Statistics of requests: a successful one counts in `success`, `queue` and, unless a cache had it, `compute_*`."""

    success: StatisticDuration = NO_DURATION
    fail: StatisticDuration = NO_DURATION
    queue: StatisticDuration = NO_DURATION
    compute_input: StatisticDuration = NO_DURATION
    compute_infer: StatisticDuration = NO_DURATION
    compute_output: StatisticDuration = NO_DURATION
    cache_hit: StatisticDuration = NO_DURATION
    cache_miss: StatisticDuration = NO_DURATION


class BatchStatistics(NamedTuple):
    """Statistics of the executions with `batch_size` requests' items together."""

    batch_size: int
    compute_input: StatisticDuration = NO_DURATION
    compute_infer: StatisticDuration = NO_DURATION
    compute_output: StatisticDuration = NO_DURATION


class ResponseStatistics(NamedTuple):
    """Statistics of the responses at one place of a decoupled model's streams: the first ones, the second ones..."""

    compute_infer: StatisticDuration = NO_DURATION
    compute_output: StatisticDuration = NO_DURATION
    success: StatisticDuration = NO_DURATION
    fail: StatisticDuration = NO_DURATION
    empty_response: StatisticDuration = NO_DURATION
    cancel: StatisticDuration = NO_DURATION


class MemoryUsage(NamedTuple):
    """Bytes that a model holds. `type`: GPU, CPU or CPU_PINNED; `id`: of the device."""

    type: str
    id: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class VersionStatistics:
    """Statistics of a version. `last_inference`: milliseconds since the epoch, 0 if there was none. `inference_count`
    counts the items of batches, `execution_count` the batches. `responses` by their place, as a string. `explain`: how
    often requests that might have shared an execution did not, by the reason."""

    last_inference: int = 0
    inference_count: int = 0
    execution_count: int = 0
    inference: InferenceStatistics = field(default_factory=InferenceStatistics)
    batches: tuple[BatchStatistics, ...] = ()
    responses: Mapping[str, ResponseStatistics] = field(default_factory=dict)
    memory: tuple[MemoryUsage, ...] = ()
    explain: Mapping[str, int] = field(default_factory=dict)


class ModelStatistics(NamedTuple):
    """The statistics of one version of a model."""

    name: str
    version: str
    statistics: VersionStatistics
