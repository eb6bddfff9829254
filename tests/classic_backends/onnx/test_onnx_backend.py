"""ONNX models: what they compute beside numpy, what their file tells, which configs do not fit them, and parameters."""

import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
from onnx import TensorProto, helper

from charonia.classic_backends.isolated.isolated_runtime import ONNX as ISOLATED
from charonia.classic_backends.onnx import onnx_backend
from charonia.classic_backends.onnx.onnx_backend import ONNX
from charonia.classic_backends.onnx.session_plan import read_session_plan
from charonia.core.errors import CharoniaError, Internal, InvalidArgument, NotFound, Unsupported
from charonia.core.model import Model, ModelConfig
from charonia.core.request import InferRequest
from charonia.core.request_context import RequestContext
from charonia.core.runtime import Arrays, InstancePlacement, Runtime
from charonia.core.tensor import Tensor
from charonia.repository.builder import ModelBuilder
from charonia.repository.model_source import read_model
from charonia.telemetry.shared_state import ModelServices

Describe = Callable[[Mapping[str, Any]], ModelConfig]

MLP = {
    "max_batch_size": 8,
    "input": [{"name": "INPUT", "data_type": "TYPE_FP32", "dims": [5]}],
    "output": [{"name": "OUTPUT", "data_type": "TYPE_FP32", "dims": [3]}],
}
TYPES = {
    "BOOL": (TensorProto.BOOL, np.array([[True, False]])),
    "UINT8": (TensorProto.UINT8, np.array([[0, 255]], np.uint8)),
    "UINT16": (TensorProto.UINT16, np.array([[0, 65535]], np.uint16)),
    "UINT32": (TensorProto.UINT32, np.array([[0, 2**32 - 1]], np.uint32)),
    "UINT64": (TensorProto.UINT64, np.array([[0, 2**64 - 1]], np.uint64)),
    "INT8": (TensorProto.INT8, np.array([[-128, 127]], np.int8)),
    "INT16": (TensorProto.INT16, np.array([[-(2**15), 1]], np.int16)),
    "INT32": (TensorProto.INT32, np.array([[-(2**31), 1]], np.int32)),
    "INT64": (TensorProto.INT64, np.array([[-(2**63), 1]], np.int64)),
    "FP16": (TensorProto.FLOAT16, np.array([[0.5, -np.inf]], np.float16)),
    "FP32": (TensorProto.FLOAT, np.array([[0.5, -np.inf]], np.float32)),
    "FP64": (TensorProto.DOUBLE, np.array([[0.5, 1e300]])),
    "BF16": (TensorProto.BFLOAT16, np.array([[0x3F80, 0xC000]], np.uint16)),
    "BYTES": (TensorProto.STRING, np.array([["Grüße".encode(), b""]], object)),
}


def run(runtime: Runtime, wanted: list[str], **inputs: Any) -> Arrays:
    (made,) = runtime.execute(inputs, wanted)
    return made


def load(version: Path, config: ModelConfig, **parameters: str) -> Runtime:
    return ONNX.load(version, config, InstancePlacement(), parameters)


def test_a_batch_is_computed_as_numpy_does(version: Path, onnx_models: ModuleType, described: Describe) -> None:
    (first, bias), (second, other) = onnx_models.write_mlp(version / "model.onnx", [5, 7, 3])
    batch = np.random.default_rng(1).random((4, 5), np.float32)
    batch.flags.writeable = False  # as a view of a request's body is
    made = run(load(version, described(MLP)), ["OUTPUT"], INPUT=batch)
    expected = np.maximum(batch @ first + bias, 0) @ second + other
    np.testing.assert_allclose(made["OUTPUT"], expected, rtol=1e-5)


@pytest.mark.parametrize("datatype", TYPES)
def test_every_datatype_goes_through_and_is_found_in_the_file(
    version: Path, onnx_models: ModuleType, described: Describe, datatype: str
) -> None:
    element, value = TYPES[datatype]
    onnx_models.write_identity(version / "model.onnx", element)
    raw = ONNX.complete(version, {"name": "model", "max_batch_size": 0}, {})
    name = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    assert raw["input"] == [{"name": "X", "data_type": name, "dims": [-1]}]
    made = run(load(version, described(raw)), ["Y"], X=value)["Y"]
    assert made.dtype == value.dtype
    assert made.tolist() == value.tolist()


def test_text_that_is_not_utf8_is_refused(version: Path, onnx_models: ModuleType, described: Describe) -> None:
    onnx_models.write_identity(version / "model.onnx", TensorProto.STRING)
    runtime = load(version, described(ONNX.complete(version, {}, {})))
    with pytest.raises(InvalidArgument, match="input 'X' of an ONNX model must be UTF-8"):
        run(runtime, ["Y"], X=np.array([[b"\xff"]], object))


def test_text_that_is_not_utf8_cannot_be_given_back(
    version: Path, onnx_models: ModuleType, described: Describe
) -> None:
    text = helper.make_tensor("text", TensorProto.STRING, [1], [b"\xff"])
    nodes = [helper.make_node("Constant", [], ["text"], value=text), helper.make_node("Add", ["X", "X"], ["Z"])]
    nodes.append(helper.make_node("Identity", ["text"], ["Y"]))
    made = {"Y": (TensorProto.STRING, [1]), "Z": (TensorProto.FLOAT, ["n"])}
    onnx_models.write_model(version / "model.onnx", nodes, {"X": (TensorProto.FLOAT, ["n"])}, made)
    runtime = load(version, described(ONNX.complete(version, {"max_batch_size": 0}, {})))
    with pytest.raises(Internal, match=r"onnx runtime error: an output of the model is not UTF-8: .*0xff"):
        run(runtime, ["Y"], X=np.ones(1, np.float32))
    assert run(runtime, ["Z"], X=np.ones(1, np.float32))["Z"].tolist() == [2]


@pytest.mark.parametrize(
    ("tensor", "fits"),
    [
        ({"dims": [2]}, False),
        ({"dims": [1]}, True),
        ({"dims": [1, 1]}, True),
        ({"dims": [1, 2]}, False),
        ({"dims": [-1, 2]}, False),
        ({"dims": [-1]}, True),
        ({"dims": [1], "reshape": {"shape": []}}, True),
        ({"dims": [1], "reshape": {"shape": [1]}}, True),
        ({"dims": [2], "reshape": {"shape": [2]}}, False),
    ],
)
def test_a_tensor_of_rank_0_has_dims_of_ones_or_none(
    version: Path, onnx_models: ModuleType, described: Describe, tensor: dict[str, Any], fits: bool
) -> None:
    onnx_models.write_identity(version / "model.onnx", TensorProto.FLOAT, ())
    sides = {
        side: [{"name": name, "data_type": "TYPE_FP32", **tensor}] for side, name in (("input", "X"), ("output", "Y"))
    }
    if fits:
        load(version, described(sides)).close()
        return
    with pytest.raises(InvalidArgument, match=r"'X' has shape \[.*\] in the configuration, \[\] in the model"):
        load(version, described(sides))


def test_a_model_with_free_first_dimensions_batches(version: Path, onnx_models: ModuleType) -> None:
    onnx_models.write_mlp(version / "model.onnx", [5, 3])
    found = ONNX.complete(version, {"name": "model"}, {})
    assert found["max_batch_size"] == 4
    assert found["input"] == MLP["input"]
    assert found["output"] == MLP["output"]
    assert ONNX.complete(version, {}, {"default-max-batch-size": "16"})["max_batch_size"] == 16
    assert ONNX.complete(version, {"max_batch_size": 2}, {})["max_batch_size"] == 2


def test_a_model_with_fixed_dimensions_does_not(version: Path, onnx_models: ModuleType) -> None:
    onnx_models.write_identity(version / "model.onnx", TensorProto.FLOAT, (2, "m"))
    found = ONNX.complete(version, {"name": "model"}, {})
    assert (found["max_batch_size"], found["input"][0]["dims"]) == (0, [2, -1])
    with pytest.raises(InvalidArgument, match="autofill failed for model 'model': model does not support batching"):
        ONNX.complete(version, {"name": "model", "max_batch_size": 4}, {})


def test_what_the_config_says_is_kept(version: Path, onnx_models: ModuleType) -> None:
    onnx_models.write_mlp(version / "model.onnx", [5, 3])
    whole = {**MLP, "max_batch_size": 0}
    assert ONNX.complete(version, whole, {}) == whole
    with_batch = {"input": [{"name": "INPUT", "data_type": "TYPE_FP32", "dims": [-1, 5]}]}
    found = ONNX.complete(version, with_batch, {})
    assert found["max_batch_size"] == 0
    assert found["input"] == with_batch["input"]
    assert found["output"][0]["dims"] == [-1, 3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_batch_size": 0}, r"'INPUT' has shape \[5\] in the configuration, \[-1, 5\] in the model"),
        (
            {"input": [{"name": "INPUT", "data_type": "TYPE_FP32", "dims": [-1]}]},
            r"\[-1, -1\] .*, \[-1, 5\] in the model; its first dimension is the batch",
        ),
        (
            {"input": [{"name": "INPUT", "data_type": "TYPE_FP16", "dims": [5]}]},
            "TYPE_FP16 in the configuration, TYPE_FP32",
        ),
        (
            {"output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [3]}]},
            "output 'OUT', allowed outputs are: OUTPUT",
        ),
        ({"input": []}, "configuration expects 0 inputs, model provides 1: 'INPUT' is missing"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    version: Path, onnx_models: ModuleType, described: Describe, change: dict[str, Any], said: str
) -> None:
    onnx_models.write_mlp(version / "model.onnx", [5, 3])
    with pytest.raises(InvalidArgument, match=f"unable to load model 'model': .*{said}"):
        load(version, described(MLP | change))


def test_a_reshaped_input_fits_by_what_the_model_sees(
    version: Path, onnx_models: ModuleType, described: Describe
) -> None:
    onnx_models.write_identity(version / "model.onnx", TensorProto.FLOAT, ("n",))
    scalar = {"data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}}
    found = ONNX.complete(version, {}, {})
    assert found["input"] == [{"name": "X", **scalar}]
    assert run(load(version, described(found)), ["Y"], X=np.ones(3, np.float32))["Y"].shape == (3,)


def built(version: Path, dims: str) -> Model:
    """A model whose input and output have these `dims` in its config, or no config without any."""
    if dims:
        sides = ("input", "X"), ("output", "Y")
        tensors = (f'{side} {{ name: "{name}" data_type: TYPE_FP32 {dims} }}' for side, name in sides)
        (version.parent / "config.pbtxt").write_text(f'backend: "onnxruntime" {" ".join(tensors)}')
    source, nothing = read_model(version.parent), cast(Any, None)
    factory = ModelBuilder().prepare(source, source.versions[0], ModelServices(nothing, nothing))
    return factory.build(lambda *_: None)


@pytest.mark.parametrize("dims", ["", "dims: 1 reshape { shape: [] }", "dims: 1", "dims: [ 1, 1 ]"])
async def test_a_tensor_without_dimensions(version: Path, onnx_models: ModuleType, dims: str) -> None:
    onnx_models.write_identity(version / "model.onnx", TensorProto.FLOAT, ())
    model = built(version, dims)
    await model.load()
    data = np.full((1, 1) if dims == "dims: [ 1, 1 ]" else (1,), 7, np.float32)
    request = InferRequest(inputs={"X": Tensor("X", "FP32", data.shape, data)})
    [response] = [response async for response in model.infer(request, RequestContext("test"))]
    [output] = response.outputs
    assert (output.shape, output.data.tolist()) == (data.shape, data.tolist())
    await model.unload()


def test_an_input_with_a_default_may_be_left_out(version: Path, onnx_models: ModuleType, described: Describe) -> None:
    tensors = {"X": (TensorProto.FLOAT, ["n", 2]), "BIAS": (TensorProto.FLOAT, [2])}
    node, bias = helper.make_node("Add", ["X", "BIAS"], ["Y"]), np.array([1, 2], np.float32)
    onnx_models.write_model(version / "model.onnx", [node], tensors, {"Y": tensors["X"]}, {"BIAS": bias})
    raw = ONNX.complete(version, {}, {})
    assert [each.get("optional", False) for each in raw["input"]] == [False, True]
    runtime = load(version, described(raw))
    batch = np.zeros((1, 2), np.float32)
    assert run(runtime, ["Y"], X=batch)["Y"].tolist() == [[1, 2]]
    assert run(runtime, ["Y"], X=batch, BIAS=-bias)["Y"].tolist() == [[-1, -2]]


def test_what_only_the_config_calls_optional_is_missed(
    version: Path, onnx_models: ModuleType, described: Describe
) -> None:
    onnx_models.write_mlp(version / "model.onnx", [5, 3])
    with pytest.raises(InvalidArgument, match="INPUT"):
        run(load(version, described(MLP)), ["OUTPUT"])


def test_what_the_model_refuses_is_said_as_triton_does(
    version: Path, onnx_models: ModuleType, described: Describe
) -> None:
    onnx_models.write_mlp(version / "model.onnx", [5, 3])
    with pytest.raises(Internal, match=r"(?s)^onnx runtime error 2: .*Got: 4 Expected: 5"):
        run(load(version, described(MLP)), ["OUTPUT"], INPUT=np.zeros((1, 4), np.float32))


def test_a_model_in_a_directory_and_under_another_name(
    version: Path, onnx_models: ModuleType, described: Describe
) -> None:
    onnx_models.write_mlp(version / "net.onnx" / "net.onnx", [5, 3])
    runtime = load(version, described(MLP | {"default_model_filename": "net.onnx"}))
    assert run(runtime, ["OUTPUT"], INPUT=np.zeros((2, 5), np.float32))["OUTPUT"].shape == (2, 3)


def test_files_that_are_not_there_or_no_models(version: Path, described: Describe) -> None:
    with pytest.raises(NotFound, match=r"unable to find '.*model\.onnx' for model 'model'"):
        load(version, described(MLP))
    (version / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(InvalidArgument, match=r"onnxruntime cannot load .*model\.onnx"):
        load(version, described(MLP))


def test_instances_share_one_session_until_the_last_is_closed(
    version: Path, onnx_models: ModuleType, described: Describe
) -> None:
    gc.collect()  # what earlier tests did not close
    onnx_models.write_mlp(version / "model.onnx", [5, 3])
    first, second = load(version, described(MLP)), load(version, described(MLP))
    (session,) = (weakref.ref(value) for value in onnx_backend.ONNX._models.values())
    onnx_models.write_mlp(version / "model.onnx", [5, 3], seed=1)
    changed = load(version, described(MLP))
    assert len(onnx_backend.ONNX._models) == 2
    batch = np.ones((1, 5), np.float32)
    before, after = (run(each, ["OUTPUT"], INPUT=batch)["OUTPUT"] for each in (first, changed))
    assert (before != after).all()
    first.close()
    gc.collect()
    assert session() is not None
    assert (run(second, ["OUTPUT"], INPUT=batch)["OUTPUT"] == before).all()
    second.close()
    changed.close()
    gc.collect()
    assert session() is None
    assert not onnx_backend.ONNX._models


def test_instances_run_at_the_same_time(version: Path, onnx_models: ModuleType, described: Describe) -> None:
    onnx_models.write_mlp(version / "model.onnx", [5, 64, 3])
    instances = [load(version, described(MLP)) for _ in range(2)]
    batch = np.random.default_rng(1).random((8, 5), np.float32)
    expected = run(instances[0], ["OUTPUT"], INPUT=batch)["OUTPUT"]
    same: list[bool] = []

    def many(runtime: Runtime) -> None:
        made = [run(runtime, ["OUTPUT"], INPUT=batch)["OUTPUT"] for _ in range(50)]
        same.append(all(np.allclose(each, expected) for each in made))

    threads = [threading.Thread(target=many, args=(runtime,)) for runtime in instances]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert same == [True, True]


def test_a_ragged_batch_is_one_flat_tensor(version: Path, onnx_models: ModuleType, described: Describe) -> None:
    nodes = [
        helper.make_node("CumSum", ["VALUES", "axis"], ["sums"]),
        helper.make_node("Sub", ["ENDS", "one"], ["places"]),
        helper.make_node("Gather", ["sums", "places"], ["REACHED"]),
    ]
    flat = {"VALUES": (TensorProto.FLOAT, ["all"]), "ENDS": (TensorProto.INT32, ["n"])}
    weights = {"axis": np.array(0, np.int32), "one": np.array(1, np.int32)}
    onnx_models.write_model(version / "model.onnx", nodes, flat, {"REACHED": (TensorProto.FLOAT, ["n"])}, weights)
    raw = {
        "max_batch_size": 4,
        "input": [{"name": "VALUES", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True}],
        "output": [{"name": "REACHED", "data_type": "TYPE_FP32", "dims": [1], "reshape": {"shape": []}}],
        "batch_input": [
            {"kind": "BATCH_ACCUMULATED_ELEMENT_COUNT", "target_name": ["ENDS"], "data_type": "TYPE_INT32"},
        ],
    }
    runtime = load(version, described(raw))
    assert runtime.traits.ragged
    made = run(runtime, ["REACHED"], VALUES=np.arange(1, 6, dtype=np.float32), ENDS=np.array([3, 5], np.int32))
    assert made["REACHED"].tolist() == [6, 15]


def test_parameters_reach_the_plan() -> None:
    plan = read_session_plan(
        {"optimization": {"graph": {"level": 1}}},
        InstancePlacement(),
        {
            "intra_op_thread_count": "3",
            "inter_op_thread_count": "2",
            "execution_mode": "1",
            "enable_mem_arena": "0",
            "enable_mem_pattern": "false",
            "session_thread_pool_allow_spinning": "1",
            "memory.enable_memory_arena_shrinkage": "cpu:0",
            "enable-global-threadpool": "1",
        },
    )
    assert (plan.intra_op_threads, plan.inter_op_threads, plan.execution_mode, plan.optimization_level) == (
        3,
        2,
        "ORT_PARALLEL",
        "ORT_ENABLE_EXTENDED",
    )
    assert (plan.memory_arena, plan.memory_pattern, plan.shrink_arenas, plan.global_thread_pool) == (
        False,
        False,
        "cpu:0",
        True,
    )
    assert ("session.intra_op.allow_spinning", "1") in plan.config_entries


def test_a_model_runs_with_every_parameter(version: Path, onnx_models: ModuleType, described: Describe) -> None:
    onnx_models.write_mlp(version / "model.onnx", [5, 3])
    batch = np.ones((1, 5), np.float32)
    plain = run(load(version, described(MLP)), ["OUTPUT"], INPUT=batch)["OUTPUT"]
    for parameters in (
        {"execution_mode": "1", "inter_op_thread_count": "2"},
        {"enable_mem_arena": "0", "enable_mem_pattern": "0"},
        {"memory.enable_memory_arena_shrinkage": "cpu:0"},
        {"session.use_device_allocator_for_initializers": "1"},
    ):
        np.testing.assert_allclose(
            run(load(version, described(MLP), **parameters), ["OUTPUT"], INPUT=batch)["OUTPUT"], plain
        )


@pytest.mark.parametrize("level", [-1, 0, 1, 2])
def test_graph_levels_are_tritons(level: int) -> None:
    names = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
    assert (
        read_session_plan({"optimization": {"graph": {"level": level}}}, InstancePlacement(), {}).optimization_level
        == names[level]
    )


@pytest.mark.parametrize(
    ("raw", "parameters", "field"),
    [
        ({}, {"intra_op_thread_count": "two"}, "intra_op_thread_count"),
        ({}, {"intra_op_thread_count": "1025"}, "intra_op_thread_count"),
        ({}, {"inter_op_thread_count": "-1"}, "inter_op_thread_count"),
        ({}, {"execution_mode": "2"}, "execution_mode"),
        ({}, {"enable_mem_arena": "maybe"}, "enable_mem_arena"),
        ({"optimization": {"graph": {"level": 3}}}, {}, "optimization.graph.level"),
        (
            {"optimization": {"execution_accelerators": {"cpu_execution_accelerator": [{"name": "tensorrt"}]}}},
            {},
            "optimization.execution_accelerators.cpu_execution_accelerator",
        ),
    ],
)
def test_wrong_parameters_are_named(raw: dict[str, Any], parameters: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_session_plan(raw, InstancePlacement(), parameters)
    assert caught.value.field == field


def test_accelerators_of_a_gpu_come_before_the_cpu() -> None:
    accelerators = {"gpu_execution_accelerator": [{"name": "tensorrt", "parameters": {"precision_mode": "FP16"}}]}
    place = InstancePlacement("KIND_GPU", device=1)
    plan = read_session_plan(
        {"optimization": {"execution_accelerators": accelerators}}, place, {"arena_extend_strategy": "1"}
    )
    assert plan.providers == (
        ("TensorrtExecutionProvider", (("device_id", "1"), ("trt_fp16_enable", "1"))),
        ("CUDAExecutionProvider", (("arena_extend_strategy", "kSameAsRequested"), ("device_id", "1"))),
        ("CPUExecutionProvider", ()),
    )


def test_what_this_onnxruntime_cannot_do_is_refused(
    version: Path, onnx_models: ModuleType, described: Describe
) -> None:
    onnx_models.write_mlp(version / "model.onnx", [5, 3])
    accelerators = {"cpu_execution_accelerator": [{"name": "openvino"}]}
    wanted = described(MLP | {"optimization": {"execution_accelerators": accelerators}})
    with pytest.raises(Unsupported, match="built without OpenVINOExecutionProvider"):
        load(version, wanted)


def test_a_provider_that_does_not_start_is_not_replaced_by_the_cpu(
    version: Path, onnx_models: ModuleType, described: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    onnx_models.write_mlp(version / "model.onnx", [5, 3])
    available = onnxruntime.get_available_providers()
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [*available, "CUDAExecutionProvider"])
    with (
        pytest.warns(UserWarning, match="'CUDAExecutionProvider' is not in available provider names"),
        pytest.raises(Unsupported, match="onnxruntime could not start CUDAExecutionProvider") as refused,
    ):
        ONNX.load(version, described(MLP), InstancePlacement("KIND_GPU"), {})
    assert refused.value.field == "instance_group.kind"


def test_unknown_parameters_are_reported(
    version: Path, onnx_models: ModuleType, described: Describe, caplog: pytest.LogCaptureFixture
) -> None:
    onnx_models.write_mlp(version / "model.onnx", [5, 3])
    with caplog.at_level(logging.WARNING):
        load(version, described(MLP), intra_op_threads="2")
    assert "model 'model': parameters that its backend does not know have no effect: intra_op_threads" in caplog.text


def test_without_onnxruntime_the_model_says_what_to_install(
    version: Path, described: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(CharoniaError, match=r"pip install '\.\[onnx\]'"):
        load(version, described(MLP))


def test_a_file_is_read_once_to_be_completed_and_loaded(
    version: Path, onnx_models: ModuleType, described: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx_models.write_mlp(version / "model.onnx", [4, 2])
    opened = []
    make = onnx_backend.Session.__init__

    def counted(session: Any, *arguments: Any) -> None:
        opened.append(weakref.ref(session))
        make(session, *arguments)

    monkeypatch.setattr(onnx_backend.Session, "__init__", counted)
    parameters = {"intra_op_thread_count": "1"}
    raw = ONNX.complete(version, {"name": "model"}, parameters)
    runtimes = [ONNX.load(version, described(raw), InstancePlacement(), parameters) for _ in range(2)]
    [only] = opened
    for runtime in runtimes:
        runtime.close()
    assert only() is None


def test_an_instance_may_be_a_process(version: Path, onnx_models: ModuleType, described: Describe) -> None:
    layers = onnx_models.write_mlp(version / "model.onnx", [4, 3])
    raw = ISOLATED.complete(version, {"name": "model"}, {"EXECUTION": "isolated"})
    assert raw == ONNX.complete(version, {"name": "model"}, {})
    runtime = ISOLATED.load(version, described(raw), InstancePlacement(name="m_0"), {"EXECUTION": "isolated"})
    batch = np.random.default_rng(1).random((2, 4), np.float32)
    [(weights, bias)] = layers
    np.testing.assert_allclose(run(runtime, ["OUTPUT"], INPUT=batch)["OUTPUT"], batch @ weights + bias, rtol=1e-5)
    with pytest.raises(Internal, match="onnx runtime error 2: "):
        run(runtime, ["OUTPUT"], INPUT=batch[:, :3])
    runtime.close()


def test_a_run_without_end_is_ended_and_the_next_one_is_not(
    version: Path, onnx_models: ModuleType, described: Describe
) -> None:
    onnx_models.write_loop(version / "model.onnx")
    config = described(ONNX.complete(version, {"name": "model", "max_batch_size": 0}, {}))
    instances = [load(version, config) for _ in range(2)]
    one = np.ones(1, np.float32)
    end, over = instances[0].traits.interrupt, threading.Event()
    assert end is not None

    def end_it() -> None:
        while not over.wait(0.01):
            end("of old age")

    ending = threading.Thread(target=end_it)
    ending.start()
    with pytest.raises(Internal, match=r"^onnx runtime error: the run was ended: of old age$"):
        run(instances[0], ["Y"], GO=np.array([True]), X=one)
    over.set()
    ending.join()
    for instance in instances:
        assert run(instance, ["Y"], GO=np.array([False]), X=one)["Y"] == 1
