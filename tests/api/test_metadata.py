"""Statistics as v2's messages have them: names, order, and what protobuf takes."""

from tritonclient.grpc import service_pb2 as pb

from charonia.api.metadata import model_stats_json
from charonia.core.metrics import (
    BatchStatistics,
    InferenceStatistics,
    MemoryUsage,
    ModelStatistics,
    ResponseStatistics,
    StatisticDuration,
    VersionStatistics,
)

STATISTICS = VersionStatistics(
    last_inference=5,
    inference_count=4,
    execution_count=2,
    inference=InferenceStatistics(success=StatisticDuration(3, 30), cache_miss=StatisticDuration(1, 2)),
    batches=(BatchStatistics(2, compute_infer=StatisticDuration(1, 9)),),
    responses={"0": ResponseStatistics(success=StatisticDuration(1, 7))},
    memory=(MemoryUsage("GPU", 1, 512),),
    explain={"shapes_differ": 2},
)


def test_every_field_stands_in_v2s_order() -> None:
    shown = model_stats_json(ModelStatistics("m", "1", STATISTICS))
    assert list(shown) == [
        "name",
        "version",
        "last_inference",
        "inference_count",
        "execution_count",
        "inference_stats",
        "response_stats",
        "batch_stats",
        "memory_usage",
    ]
    assert list(shown["inference_stats"]) == list(InferenceStatistics._fields)
    assert shown["inference_stats"]["success"] == {"count": 3, "ns": 30}
    assert shown["response_stats"]["0"]["success"] == {"count": 1, "ns": 7}
    [batch] = shown["batch_stats"]
    never = {"count": 0, "ns": 0}
    assert batch == {
        "batch_size": 2,
        "compute_input": never,
        "compute_infer": {"count": 1, "ns": 9},
        "compute_output": never,
    }
    assert shown["memory_usage"] == [{"type": "GPU", "id": 1, "byte_size": 512}]


def test_protobuf_knows_every_name() -> None:
    from google.protobuf.json_format import ParseDict

    shown = model_stats_json(ModelStatistics("m", "1", STATISTICS))
    message = ParseDict({"model_stats": [shown]}, pb.ModelStatisticsResponse())
    [read] = message.model_stats
    assert read.inference_stats.success.ns == 30
    assert read.response_stats["0"].success.ns == 7
    assert read.batch_stats[0].compute_infer.count == 1
