"""Statistics of models as the JSON of the statistics extension, the same over HTTP and gRPC.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
"""

from collections.abc import Iterable
from typing import Any

from ..core.statistics import BatchStatistics, ModelStatistics, StatisticDuration


def model_stats_json(of: Iterable[ModelStatistics]) -> list[dict[str, Any]]:
    """The `model_stats` of a response. The extension has no field for `explanations`."""
    return [_model(each) for each in of]


def explanations(of: ModelStatistics) -> dict[str, int]:
    """How often batches were executed with fewer requests than fit, by the reason."""
    return dict(of.statistics.explain)


def _model(each: ModelStatistics) -> dict[str, Any]:
    said = each.statistics
    return {
        "name": each.name,
        "version": each.version,
        "last_inference": said.last_inference,
        "inference_count": said.inference_count,
        "execution_count": said.execution_count,
        "inference_stats": _durations(said.inference),
        "response_stats": {place: _durations(response) for place, response in said.responses.items()},
        "batch_stats": [_batch(batch) for batch in said.batches],
        "memory_usage": [usage._asdict() for usage in said.memory],
    }


def _batch(batch: BatchStatistics) -> dict[str, Any]:
    return {"batch_size": batch.batch_size, **_durations(batch[1:], batch._fields[1:])}


def _durations(times: Any, names: tuple[str, ...] = ()) -> dict[str, dict[str, int]]:
    return {name: _duration(time) for name, time in zip(names or times._fields, times, strict=True)}


def _duration(time: StatisticDuration) -> dict[str, int]:
    return {"count": time.count, "ns": time.ns}
