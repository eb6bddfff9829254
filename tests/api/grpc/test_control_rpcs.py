"""gRPC besides inference: models, repository, shared memory, settings; every text and status a client may rely on."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from charonia.core.errors import Internal, Unavailable
from charonia.core.gateway import ModelState, RepositoryIndexEntry
from charonia.core.metrics import (
    BatchStatistics,
    InferenceStatistics,
    MemoryUsage,
    ModelStatistics,
    ResponseStatistics,
    StatisticDuration,
    VersionStatistics,
)
from charonia.processes.client_shared_memory import SharedMemoryRegistry
from charonia.telemetry.logging_setup import LogControl, LogSettings
from charonia.telemetry.shared_state import SharedState
from charonia.telemetry.trace_settings import TraceControl, TraceSettings

from ..grpc_serving import refused, serving

DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
REPOSITORY = "'repository_name' specification is not supported"


@pytest.fixture
async def stub(gateway: Any) -> AsyncIterator[Any]:
    async with serving(gateway) as server:
        yield server.stub


async def test_config(stub: Any) -> None:
    said = (await stub.ModelConfig(pb.ModelConfigRequest(name="numbers", version="3"))).config
    assert (said.name, said.max_batch_size, said.input[0].name) == ("numbers", 4, "MATRIX")
    assert said.input[0].data_type == model_config_pb2.TYPE_FP32
    assert await refused(stub.ModelConfig(pb.ModelConfigRequest(name="no"))) == (
        StatusCode.NOT_FOUND,
        "Request for unknown model: 'no' is not found",
    )


async def test_statistics(stub: Any, gateway: Any) -> None:
    inference = InferenceStatistics(*(StatisticDuration(count, 10 * count) for count in range(8)))
    full = VersionStatistics(
        last_inference=2**40,
        inference_count=2,
        execution_count=1,
        inference=inference,
        batches=(BatchStatistics(2, StatisticDuration(1, 5), StatisticDuration(1, 6), StatisticDuration(1, 7)),),
        responses={"1": ResponseStatistics(success=StatisticDuration(3, 4))},
        memory=(MemoryUsage("CPU", 0, 2**33),),
    )
    gateway.counted = [ModelStatistics("a", "1", full), ModelStatistics("b", "2", VersionStatistics())]
    [said] = (await stub.ModelStatistics(pb.ModelStatisticsRequest(name="a", version="1"))).model_stats
    assert (said.name, said.version, said.last_inference) == ("a", "1", 2**40)
    assert (said.inference_count, said.execution_count) == (2, 1)
    counted = [(value.count, value.ns) for _, value in said.inference_stats.ListFields()]
    assert counted == [(count, 10 * count) for count in range(8)]
    [batch] = said.batch_stats
    assert (batch.batch_size, batch.compute_infer.ns, batch.compute_output.ns) == (2, 6, 7)
    assert said.response_stats["1"].success == pb.StatisticDuration(count=3, ns=4)
    assert [(used.type, used.id, used.byte_size) for used in said.memory_usage] == [("CPU", 0, 2**33)]
    assert len((await stub.ModelStatistics(pb.ModelStatisticsRequest())).model_stats) == 2


async def test_index(stub: Any, gateway: Any) -> None:
    gateway.indexed = [
        RepositoryIndexEntry("a", "1", ModelState.READY),
        RepositoryIndexEntry("b", "2", ModelState.UNAVAILABLE, "unloaded"),
        RepositoryIndexEntry("c"),
    ]
    said = (await stub.RepositoryIndex(pb.RepositoryIndexRequest())).models
    assert [(each.name, each.version, each.state, each.reason) for each in said] == [
        ("a", "1", "READY", ""),
        ("b", "2", "UNAVAILABLE", "unloaded"),
        ("c", "", "", ""),
    ]
    assert [model.name for model in (await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models] == ["a"]


Value = pb.ModelRepositoryParameter


async def test_load_and_unload(stub: Any, gateway: Any) -> None:
    parameters = {"config": Value(string_param="{}"), "file:1/model.onnx": Value(bytes_param=b"\0\1")}
    await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="a"))
    await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="b", parameters=parameters))
    await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="a"))
    dependents = {"unload_dependents": Value(bool_param=True)}
    await stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="b", parameters=dependents))
    assert gateway.loads == [("a", None, {}), ("b", "{}", {"1/model.onnx": b"\0\1"}), ("a", False), ("b", True)]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"config": Value(bytes_param=b"")}, "invalid value type for load parameter 'config', expected string_param."),
        (
            {"config": Value(string_param="{}"), "file:1/m": Value(string_param="")},
            "invalid value type for load parameter 'file:1/m', expected bytes_param.",
        ),
        ({"wondrous": Value(string_param="")}, "unrecognized load parameter 'wondrous'"),
    ],
)
async def test_wrong_load_parameters(stub: Any, gateway: Any, parameters: Any, text: str) -> None:
    call = stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="a", parameters=parameters))
    assert await refused(call) == (StatusCode.INVALID_ARGUMENT, text)
    assert gateway.loads == []


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"unload_dependents": Value(string_param="yes")},
            "invalid value type for 'unload_dependents' parameter, expected bool_param.",
        ),
        ({"wondrous": Value(bool_param=True)}, "unrecognized unload parameter 'wondrous'"),
    ],
)
async def test_wrong_unload_parameters(stub: Any, gateway: Any, parameters: Any, text: str) -> None:
    call = stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="a", parameters=parameters))
    assert await refused(call) == (StatusCode.INVALID_ARGUMENT, text)
    assert gateway.loads == []


async def test_one_repository_has_no_name(stub: Any) -> None:
    for call in (
        stub.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="r")),
        stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(repository_name="r", model_name="a")),
        stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(repository_name="r", model_name="a")),
    ):
        assert await refused(call) == (StatusCode.UNIMPLEMENTED, REPOSITORY)


@pytest.mark.parametrize(
    ("error", "code"),
    [(Unavailable("polling"), StatusCode.UNAVAILABLE), (Internal("not there"), StatusCode.INTERNAL)],
)
async def test_what_loading_raises(stub: Any, gateway: Any, error: Any, code: StatusCode) -> None:
    gateway.error = error
    call = stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="a"))
    assert await refused(call) == (code, error.message)


async def test_shared_memory_is_off_by_default(stub: Any) -> None:
    for call in (
        stub.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest(name="a", key="/k", byte_size=1)),
        stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest()),
        stub.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest(name="a")),
        stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest()),
    ):
        assert await refused(call) == (StatusCode.UNIMPLEMENTED, DISABLED)
    assert not (await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions
    assert not (await stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())).regions


async def test_shared_memory(stub: Any, gateway: Any, shared_memory: str) -> None:
    gateway.shared_state = SharedState(shared_memory=SharedMemoryRegistry(allowed=True))
    register = pb.SystemSharedMemoryRegisterRequest(name="a", key=shared_memory, offset=8, byte_size=100)
    await stub.SystemSharedMemoryRegister(register)
    assert await refused(stub.SystemSharedMemoryRegister(register)) == (
        StatusCode.ALREADY_EXISTS,
        "shared memory region 'a' already in manager",
    )
    said = (await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name="a"))).regions
    assert [(key, each.name, each.key, each.offset, each.byte_size) for key, each in said.items()] == [
        ("a", "a", shared_memory, 8, 100)
    ]
    assert await refused(stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name="b"))) == (
        StatusCode.NOT_FOUND,
        "Unable to find system shared memory region: 'b'",
    )
    register.name, register.key = "b", "/charonia_no_such_key"
    assert await refused(stub.SystemSharedMemoryRegister(register)) == (
        StatusCode.INTERNAL,
        "Unable to open shared memory region: '/charonia_no_such_key'",
    )
    await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="a"))
    assert not (await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions


async def test_memory_of_gpus(stub: Any, gateway: Any, gpu_regions: SharedMemoryRegistry, on_gpu: Any) -> None:
    gateway.shared_state = SharedState(shared_memory=gpu_regions)
    register = pb.CudaSharedMemoryRegisterRequest(name="h", raw_handle=on_gpu.handle, device_id=1, byte_size=8)
    await stub.CudaSharedMemoryRegister(register)
    said = (await stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())).regions
    assert sorted((key, each.name, each.device_id, each.byte_size) for key, each in said.items()) == [
        ("g", "g", 0, 4096),
        ("h", "h", 1, 8),
    ]
    assert await refused(stub.CudaSharedMemoryRegister(register)) == (
        StatusCode.ALREADY_EXISTS,
        "shared memory region 'h' already in manager",
    )
    register.name, register.device_id = "i", -1
    code, text = await refused(stub.CudaSharedMemoryRegister(register))
    assert (code, text.rpartition(": ")[2]) == (StatusCode.INVALID_ARGUMENT, "there is no GPU -1")
    await stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name="g"))
    assert list((await stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())).regions) == ["h"]
    await stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest())
    assert not (await stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())).regions


async def test_machines_without_gpus(stub: Any, gateway: Any) -> None:
    gateway.shared_state = SharedState(shared_memory=SharedMemoryRegistry(allowed=True))
    assert await refused(stub.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest(name="g"))) == (
        StatusCode.INVALID_ARGUMENT,
        "failed to register CUDA shared memory region: 'g', GPUs not supported",
    )
    assert await refused(stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(name="g"))) == (
        StatusCode.NOT_FOUND,
        "Unable to find cuda shared memory region: 'g'",
    )
    await stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name="g"))


def traced(said: Any) -> dict[str, list[str]]:
    return {name: list(setting.value) for name, setting in said.settings.items()}


def trace_request(model: str = "", **settings: list[str]) -> Any:
    entries = {name: pb.TraceSettingRequest.SettingValue(value=values) for name, values in settings.items()}
    return pb.TraceSettingRequest(model_name=model, settings=entries)


async def test_trace_settings(stub: Any, gateway: Any) -> None:
    gateway.shared_state = SharedState(traces=TraceControl(TraceSettings(trace_file="t.json")))
    defaults = {
        "trace_level": ["OFF"],
        "trace_rate": ["1000"],
        "trace_count": ["-1"],
        "log_frequency": ["0"],
        "trace_file": ["t.json"],
        "trace_mode": ["triton"],
    }
    assert traced(await stub.TraceSetting(trace_request())) == defaults
    changed = await stub.TraceSetting(trace_request("numbers", trace_level=["TIMESTAMPS"], trace_rate=["5"]))
    assert traced(changed) == defaults | {"trace_level": ["TIMESTAMPS"], "trace_rate": ["5"]}
    assert traced(await stub.TraceSetting(trace_request())) == defaults
    cleared = await stub.TraceSetting(trace_request("numbers", trace_level=[], trace_rate=[]))
    assert traced(cleared) == defaults


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (
            trace_request(trace_file=["x"]),
            StatusCode.UNIMPLEMENTED,
            "trace file location can not be updated through network protocol",
        ),
        (trace_request(trace_rate=["x"]), StatusCode.INVALID_ARGUMENT, "Unable to parse 'trace_rate', got: x"),
        (
            trace_request(trace_level=["OFF", "TIMESTAMPS"]),
            StatusCode.INVALID_ARGUMENT,
            "Expect only one trace level 'OFF' is specified",
        ),
        (
            trace_request(trace_count=["1", "2"]),
            StatusCode.INVALID_ARGUMENT,
            "expect only 1 value for 'trace_count'",
        ),
        (trace_request("no"), StatusCode.INVALID_ARGUMENT, "Request for unknown model : no"),
    ],
)
async def test_wrong_trace_settings(stub: Any, request_: Any, code: StatusCode, text: str) -> None:
    assert await refused(stub.TraceSetting(request_)) == (code, text)


def log_request(**settings: Any) -> Any:
    kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    entries = {
        name: pb.LogSettingsRequest.SettingValue(**{kinds[type(value)]: value}) for name, value in settings.items()
    }
    return pb.LogSettingsRequest(settings=entries)


def logged(said: Any) -> dict[str, Any]:
    return {name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in said.settings.items()}


async def test_log_settings(stub: Any, gateway: Any) -> None:
    made: list[LogSettings] = []
    gateway.shared_state = SharedState(logs=LogControl(LogSettings(), made.append))
    defaults = {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    assert logged(await stub.LogSettings(log_request())) == defaults
    assert made == []
    changes = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert logged(await stub.LogSettings(log_request(**changes))) == defaults | changes
    assert made == [LogSettings(log_info=False, log_verbose_level=2, log_format="ISO8601")]


@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        ({"log_info": "yes"}, StatusCode.INVALID_ARGUMENT, "expect boolean for 'log_info'"),
        ({"log_error": 1}, StatusCode.INVALID_ARGUMENT, "expect boolean for 'log_error'"),
        ({"log_verbose_level": True}, StatusCode.INVALID_ARGUMENT, "expect int32 for 'log_verbose_level'"),
        ({"log_format": 1}, StatusCode.INVALID_ARGUMENT, "expect string for 'log_format'"),
        ({"log_format": "loud"}, StatusCode.INVALID_ARGUMENT, "invalid argument for log_format, got: loud"),
        ({"log_volume": 1}, StatusCode.INVALID_ARGUMENT, "unknown log setting 'log_volume'"),
        (
            {"log_file": "x", "log_info": False},
            StatusCode.UNIMPLEMENTED,
            "log file location can not be updated through network protocol",
        ),
    ],
)
async def test_wrong_log_settings(
    stub: Any, gateway: Any, settings: dict[str, Any], code: StatusCode, text: str
) -> None:
    assert await refused(stub.LogSettings(log_request(**settings))) == (code, text)
    assert gateway.shared_state.logs.settings == LogSettings()
