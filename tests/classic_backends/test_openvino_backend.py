"""OpenVINO's models: what they compute beside numpy, what their files tell, and what is refused."""

import gc
import signal
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from charonia.classic_backends.isolated.isolated_runtime import OPENVINO as ISOLATABLE
from charonia.classic_backends.openvino_backend import OPENVINO
from charonia.core.errors import Internal, InvalidArgument, NotFound, Unsupported
from charonia.core.model import ModelConfig
from charonia.core.runtime import Arrays, InstancePlacement, Runtime

if find_spec("openvino") is None:
    pytest.skip("needs openvino", allow_module_level=True)

Describe = Callable[[Mapping[str, Any]], ModelConfig]

TYPES = {
    "BOOL": (TensorProto.BOOL, np.array([[True, False]])),
    "UINT8": (TensorProto.UINT8, np.array([[0, 255]], np.uint8)),
    "INT32": (TensorProto.INT32, np.array([[-(2**31), 1]], np.int32)),
    "INT64": (TensorProto.INT64, np.array([[-(2**31), 1]], np.int64)),
    "FP16": (TensorProto.FLOAT16, np.array([[0.5, -2]], np.float16)),
    "FP32": (TensorProto.FLOAT, np.array([[0.5, -np.inf]], np.float32)),
    "FP64": (TensorProto.DOUBLE, np.array([[0.5, 1e300]])),
    "BF16": (TensorProto.BFLOAT16, np.array([[0x3F80, 0xC000]], np.uint16)),
}


def run(runtime: Runtime, wanted: list[str], **inputs: Any) -> Arrays:
    (made,) = runtime.execute(inputs, wanted)
    return made


def described_by_file(directory: Path, **raw: Any) -> dict[str, Any]:
    return dict(OPENVINO.complete(directory, {"name": "model", "max_batch_size": 0, **raw}, {}))


def load(directory: Path, described: Describe, raw: Mapping[str, Any], **parameters: str) -> Runtime:
    return OPENVINO.load(directory, described({**raw, "backend": "openvino"}), InstancePlacement(), parameters)


def held(version: Path) -> int:
    """Compiled models of the version that something holds."""
    keys: Any = [*OPENVINO._models]
    return sum(file == version / "model.xml" for (file, *_), *_ in keys)


def write_ir(file: Path) -> None:
    """TWICE is X twice, as OpenVINO's own files have it."""
    import openvino
    import openvino.opset13 as ops

    given = ops.parameter([-1, 3], np.float32, name="X")
    given.output(0).set_names({"X"})
    made = ops.multiply(given, ops.constant(np.float32(2)))
    made.output(0).set_names({"TWICE"})
    file.parent.mkdir(parents=True, exist_ok=True)
    openvino.save_model(openvino.Model([made], [given], "twice"), str(file), compress_to_fp16=False)


def test_openvinos_own_files(version: Path, described: Describe) -> None:
    write_ir(version / "model.xml")
    raw = described_by_file(version)
    assert raw["max_batch_size"] == 4
    assert raw["input"] == [{"name": "X", "data_type": "TYPE_FP32", "dims": [3]}]
    batch = np.arange(6, dtype=np.float32).reshape(2, 3)
    batch.flags.writeable = False  # as a view of a request's body is
    assert run(load(version, described, raw), ["TWICE"], X=batch)["TWICE"].tolist() == (2 * batch).tolist()


def test_an_onnx_model_computes_as_numpy_does(version: Path, onnx_models: ModuleType, described: Describe) -> None:
    (first, bias), (second, other) = onnx_models.write_mlp(version / "model.onnx", [5, 7, 3])
    raw = described_by_file(version, default_model_filename="model.onnx")
    batch = np.random.default_rng(1).random((4, 5), np.float32)
    expected = np.maximum(batch @ first + bias, 0) @ second + other
    exact = run(load(version, described, raw, INFERENCE_PRECISION_HINT="f32"), ["OUTPUT"], INPUT=batch)
    np.testing.assert_allclose(exact["OUTPUT"], expected, rtol=1e-5)
    made = run(load(version, described, raw), ["OUTPUT"], INPUT=batch)
    np.testing.assert_allclose(made["OUTPUT"], expected, atol=0.02)  # it may compute in bf16


@pytest.mark.parametrize("datatype", TYPES)
def test_every_datatype_goes_through_and_is_found_in_the_file(
    version: Path, onnx_models: ModuleType, described: Describe, datatype: str
) -> None:
    element, value = TYPES[datatype]
    onnx_models.write_identity(version / "model.onnx", element)
    raw = described_by_file(version, default_model_filename="model.onnx")
    assert raw["input"] == [{"name": "X", "data_type": f"TYPE_{datatype}", "dims": [-1]}]
    made = run(load(version, described, raw), ["Y"], X=value)["Y"]
    assert made.dtype == value.dtype
    assert made.tolist() == value.tolist()


def test_outputs_outlive_the_next_execution(version: Path, described: Describe) -> None:
    write_ir(version / "model.xml")
    runtime = load(version, described, described_by_file(version))
    first = run(runtime, ["TWICE"], X=np.ones((1, 3), np.float32))["TWICE"]
    run(runtime, ["TWICE"], X=np.zeros((1, 3), np.float32))
    assert first.tolist() == [[2, 2, 2]]


def test_signals_are_handled_when_another_thread_drops_the_last_model(version: Path, described: Describe) -> None:
    write_ir(version / "model.xml")
    runtime = load(version, described, described_by_file(version))
    dropping = threading.Thread(target=runtime.close)
    dropping.start()
    dropping.join()
    assert not held(version)
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


def test_instances_share_what_is_compiled_and_run_at_once(version: Path, described: Describe) -> None:
    write_ir(version / "model.xml")
    raw = described_by_file(version)
    runtimes = [load(version, described, raw) for _ in range(2)]
    assert held(version) == 1
    results: list[float] = []

    def work(runtime: Runtime, value: int) -> None:
        for _ in range(200):
            made = run(runtime, ["TWICE"], X=np.full((2, 3), value, np.float32))
            results.append(float(made["TWICE"][1, 2]) / value)

    threads = [threading.Thread(target=work, args=(each, at + 1)) for at, each in enumerate(runtimes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [2.0] * 400
    for runtime in runtimes:
        runtime.close()
    del runtimes, runtime, threads
    gc.collect()
    assert held(version) == 0


def test_a_run_that_is_interrupted_fails_and_the_next_one_does_not(version: Path, described: Describe) -> None:
    write_ir(version / "model.xml")
    runtime = load(version, described, described_by_file(version))
    assert runtime.traits.interrupt is not None
    runtime.traits.interrupt("it took too long")
    assert run(runtime, ["TWICE"], X=np.ones((1, 3), np.float32))["TWICE"].tolist() == [[2, 2, 2]]


def test_shapes_that_do_not_fit_are_the_models_error(version: Path, described: Describe) -> None:
    write_ir(version / "model.xml")
    runtime = load(version, described, described_by_file(version))
    with pytest.raises(Internal, match="OpenVINO error: "):
        run(runtime, ["TWICE"], X=np.ones((1, 4), np.float32))
    assert run(runtime, ["TWICE"], X=np.ones((1, 3), np.float32))["TWICE"].tolist() == [[2, 2, 2]]


def test_a_process_of_its_own(version: Path, described: Describe) -> None:
    write_ir(version / "model.xml")
    parameters = {"execution": "isolated"}
    raw = ISOLATABLE.complete(version, {"name": "model", "max_batch_size": 0}, parameters)
    runtime = ISOLATABLE.load(version, described({**raw, "backend": "openvino"}), InstancePlacement(), parameters)
    try:
        assert run(runtime, ["TWICE"], X=np.ones((1, 3), np.float32))["TWICE"].tolist() == [[2, 2, 2]]
    finally:
        runtime.close()


def test_memory_is_counted_once_for_all_instances(version: Path) -> None:
    write_ir(version / "model.xml")
    needs = OPENVINO.needs(version, {"instance_group": [{"kind": "KIND_CPU", "count": 3}]}, {})
    assert sum(need.size for need in needs) == (version / "model.bin").stat().st_size


WRONG = {
    "INFERENCE_NUM_THREADS": "x",
    "NUM_STREAMS": "-1",
    "PERFORMANCE_HINT": "FAST",
    "TARGET_DEVICE": "NPU",
    "INFERENCE_PRECISION_HINT": "i4",
}


@pytest.mark.parametrize(("name", "value"), WRONG.items())
def test_wrong_parameters_are_refused_by_name(version: Path, described: Describe, name: str, value: str) -> None:
    write_ir(version / "model.xml")
    with pytest.raises(InvalidArgument, match=f"parameter '{name}' must be") as refused:
        load(version, described, described_by_file(version), **{name: value})
    assert refused.value.field == name


def test_gpus_of_cuda_are_refused(version: Path, described: Describe) -> None:
    write_ir(version / "model.xml")
    config = described(described_by_file(version))
    with pytest.raises(Unsupported, match="OpenVINO computes on its TARGET_DEVICE, and on no GPU of CUDA: KIND_CPU"):
        OPENVINO.load(version, config, InstancePlacement("KIND_GPU"), {})


def test_files_that_are_no_models_are_refused(version: Path, described: Describe) -> None:
    with pytest.raises(NotFound, match=r"unable to find .*model\.xml"):
        described_by_file(version)
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.xml").write_text("<net/>")
    with pytest.raises(InvalidArgument, match=r"OpenVINO cannot load .*model\.xml: "):
        described_by_file(version)


def test_strings_are_refused_by_name(version: Path, onnx_models: ModuleType) -> None:
    onnx_models.write_identity(version / "model.onnx", TensorProto.STRING)
    with pytest.raises(Unsupported, match="tensor 'X' of the model is of OpenVINO's type string"):
        described_by_file(version, default_model_filename="model.onnx")


def test_a_config_that_does_not_fit_is_refused(version: Path, described: Describe) -> None:
    write_ir(version / "model.xml")
    raw = described_by_file(version)
    raw["input"] = [{"name": "X", "data_type": "TYPE_FP32", "dims": [7]}]
    with pytest.raises(InvalidArgument, match=r"'X' has shape \[-1, 7\] in the configuration, \[-1, 3\] in the model"):
        load(version, described, raw)
