"""PyTorch models: TorchScript and exported programs, names by convention, parameters, and what does not fit."""

import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from charonia.classic_backends.torch.model_files import open_model_file
from charonia.classic_backends.torch.torch_backend import (
    PYTORCH,
    InferenceModes,
    argument_positions,
    choose_device,
    indexed_positions,
)
from charonia.core.errors import Internal, InvalidArgument, NotFound, Unsupported
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest
from charonia.core.runtime import Arrays, InstancePlacement, Runtime
from charonia.core.tensor import Tensor

from ..asking import answers, serving
from ..sequences.sequence_subjects import control

Describe = Callable[[Mapping[str, Any]], ModelConfig]


class Mix(torch.nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return left - right, left.add_(right)


class Named(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"DOUBLE": value * 2, "HALF": value / 2}


class Same(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


class Wrong(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> int:
        return int(value.sum().item())


class Rows(torch.nn.Module):
    """Adds up for itself what comes in each row of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4, 1))

    def forward(self, value: torch.Tensor, start: torch.Tensor, ready: torch.Tensor) -> torch.Tensor:
        before = self.sums[: value.shape[0]]
        self.sums[: value.shape[0]] = torch.where(ready, before * (1 - start) + value, before)
        return self.sums[: value.shape[0]].clone()


def script(module: torch.nn.Module, file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module).save(str(file))


def export(module: torch.nn.Module, file: Path, *tensors: torch.Tensor, **named: torch.Tensor) -> None:
    free = torch.export.Dim("batch")
    shapes = tuple({0: free} for _ in tensors), {name: {0: free} for name in named}
    names = ("left", "right")[: len(tensors)]
    dynamic = dict(zip(names, shapes[0], strict=True)) | shapes[1]
    torch.export.save(torch.export.export(module, tensors, named, dynamic_shapes=dynamic), file)


def raw_config(inputs: list[str], outputs: list[str], datatype: str = "TYPE_FP32") -> dict[str, Any]:
    def tensors(names: list[str]) -> list[dict[str, Any]]:
        return [{"name": name, "data_type": datatype, "dims": [2]} for name in names]

    return {"max_batch_size": 4, "input": tensors(inputs), "output": tensors(outputs)}


def load(version: Path, config: ModelConfig, **parameters: str) -> Runtime:
    return PYTORCH.load(version, config, InstancePlacement(), parameters)


def run(runtime: Runtime, wanted: list[str], **inputs: Any) -> Arrays:
    (made,) = runtime.execute(inputs, wanted)
    return made


TEN, ONE = np.full((1, 2), 10, np.float32), np.ones((1, 2), np.float32)
TEN.flags.writeable = ONE.flags.writeable = False


@pytest.mark.parametrize(
    ("left", "right"), [("left", "right"), ("INPUT__0", "INPUT__1"), ("A", "B")], ids=["names", "indices", "order"]
)
@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
def test_tensors_find_their_places(version: Path, described: Describe, left: str, right: str, suffix: str) -> None:
    file = version / f"model{suffix}"
    script(Mix(), file) if suffix == ".pt" else export(Mix(), file, torch.zeros(3, 2), torch.zeros(3, 2))
    names = [left, right] if left == "A" else [right, left]
    outputs = ["minus", "plus"] if left == "A" else ["OUTPUT__1", "OUTPUT__0"]
    runtime = load(version, described(raw_config(names, outputs)))
    made = run(runtime, sorted(outputs), **{left: TEN, right: ONE})
    minus, plus = (made[name].tolist() for name in sorted(outputs))
    assert (minus, plus) == ([[9, 9]], [[11, 11]])


def test_a_model_that_writes_to_its_arguments_leaves_the_clients_memory_alone(
    version: Path, described: Describe
) -> None:
    script(Mix(), version / "model.pt")
    region = np.full((2, 2), 10, np.float32)
    runtime = load(version, described(raw_config(["left", "right"], ["a", "b"])))
    assert run(runtime, ["b"], left=region[:1], right=ONE)["b"].tolist() == [[11, 11]]
    assert region.tolist() == [[10, 10], [10, 10]]


def test_results_by_name(version: Path, described: Describe) -> None:
    script(Named(), version / "model.pt")
    made = run(load(version, described(raw_config(["value"], ["HALF", "DOUBLE"]))), ["HALF", "DOUBLE"], value=TEN)
    assert (made["HALF"].tolist(), made["DOUBLE"].tolist()) == ([[5, 5]], [[20, 20]])


@pytest.mark.parametrize(
    "value",
    [
        np.array([[True, False]]),
        np.array([[0, 255]], np.uint8),
        np.array([[-128, 127]], np.int8),
        np.array([[-1, 2**15 - 1]], np.int16),
        np.array([[-1, 2**62]], np.int64),
        np.array([[0.5, np.inf]], np.float16),
        np.array([[0.5, 1e300]]),
    ],
    ids=lambda value: str(value.dtype),
)
def test_datatypes_go_through(version: Path, described: Describe, value: Any) -> None:
    script(Same(), version / "model.pt")
    made = run(load(version, described(raw_config(["value"], ["same"]))), ["same"], value=value)["same"]
    assert (made.dtype, made.tolist()) == (value.dtype, value.tolist())


async def test_a_model_may_keep_the_state_of_its_sequences_itself(version: Path, described: Describe) -> None:
    script(Rows(), version / "model.pt")
    controls = [
        control("START__1", "START", int32_false_true=[0, 1]),
        control("READY__2", "READY", bool_false_true=[False, True]),
    ]
    tensors = {"data_type": "TYPE_FP32", "dims": [1]}
    settings = described(
        {
            "max_batch_size": 4,
            "input": [tensors | {"name": "INPUT__0"}],
            "output": [tensors | {"name": "SUM__0"}],
            "sequence_batching": {"control_input": controls},
        }
    )
    async with serving(PYTORCH, settings, directory=version) as model:
        sums = []
        for name, value, flag in (("a", 1, "start"), ("b", 10, "start"), ("a", 2, ""), ("b", 20, ""), ("a", 4, "end")):
            given = Tensor.from_values("INPUT__0", "FP32", [[value]])
            parameters = {"sequence_id": name} | ({f"sequence_{flag}": True} if flag else {})
            [response] = await answers(model, InferRequest(inputs={"INPUT__0": given}, parameters=parameters))
            sums.append(response.outputs[0].scalar)
    assert sums == [1, 10, 3, 30, 7]


def test_bfloat16_goes_through_as_its_bits(version: Path, described: Describe) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(Doubled(), torch.ones(1, 2, dtype=torch.bfloat16))
        traced.save(str(version / "model.pt"))
    one, two = 0x3F80, 0x4000
    runtime = load(version, described(raw_config(["value"], ["twice"], "TYPE_BF16")))
    made = run(runtime, ["twice"], value=np.array([[one, two]], np.uint16))["twice"]
    assert (made.dtype, made[0, 0]) == (np.uint16, two)


def test_an_exported_program_tells_its_tensors(version: Path) -> None:
    export(Mix(), version / "model.pt2", torch.zeros(3, 2), torch.zeros(3, 2))
    found = PYTORCH.complete(version, {"name": "model"}, {"default-max-batch-size": "8"})
    assert found["max_batch_size"] == 8
    assert [(each["name"], each["data_type"], each["dims"]) for each in found["input"]] == [
        ("left", "TYPE_FP32", [2]),
        ("right", "TYPE_FP32", [2]),
    ]
    assert [each["name"] for each in found["output"]] == ["OUTPUT__0", "OUTPUT__1"]


def test_an_exported_program_may_have_keywords(version: Path, described: Describe) -> None:
    export(Mix(), version / "model.pt2", torch.zeros(3, 2), right=torch.zeros(3, 2))
    runtime = load(version, described(raw_config(["right", "left"], ["minus", "plus"])))
    assert run(runtime, ["minus"], left=TEN, right=ONE)["minus"].tolist() == [[9, 9]]


def test_torchscript_tells_nothing(version: Path, described: Describe) -> None:
    script(Same(), version / "model.pt")
    assert PYTORCH.complete(version, {"name": "model"}, {}) == {"name": "model"}
    with pytest.raises(InvalidArgument, match="must have its inputs in its config"):
        load(version, described({}))


def test_a_config_that_does_not_fit_an_exported_program(version: Path, described: Describe) -> None:
    export(Mix(), version / "model.pt2", torch.zeros(3, 2), torch.zeros(3, 2))
    wrong = raw_config(["left", "right"], ["a", "b"])
    wrong["input"][1]["dims"] = [3]
    with pytest.raises(
        InvalidArgument, match=r"'right' has shape \[-1, 3\] in the configuration, \[-1, 2\] in the model"
    ):
        load(version, described(wrong))
    with pytest.raises(InvalidArgument, match="configuration expects 1 inputs, model provides 2"):
        load(version, described(raw_config(["left"], ["a"])))


@pytest.mark.parametrize(
    "names", [["INPUT__0", "INPUT__0"], ["INPUT__1", "INPUT__2"], ["INPUT__0", "INPUT__1", "INPUT__2"]]
)
def test_inputs_without_an_argument_are_refused(names: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        argument_positions("model", names, ["left", "right"])
    assert caught.value.field == "input"


def test_outputs_may_leave_out_results() -> None:
    assert indexed_positions("model", "output", ["OUTPUT__2", "OUTPUT__0"]) == (2, 0)


def test_files_that_are_not_there_or_no_models(version: Path, described: Describe) -> None:
    config = described(raw_config(["value"], ["same"]))
    with pytest.raises(NotFound, match=r"unable to find '.*model\.pt' for model 'model'"):
        load(version, config)
    for name in ("model.pt", "model.pt2"):
        (version / name).write_bytes(b"not a model")
        with pytest.raises(InvalidArgument, match=rf"PyTorch cannot load .*{name}"):
            load(version, described({**config.raw, "default_model_filename": name}))


def test_strings_are_refused(version: Path, described: Describe) -> None:
    script(Same(), version / "model.pt")
    with pytest.raises(Unsupported, match="'value' of model 'model' is TYPE_STRING"):
        load(version, described(raw_config(["value"], ["same"], "TYPE_STRING")))


def test_results_that_are_not_there_or_no_tensors(version: Path, described: Describe) -> None:
    script(Same(), version / "model.pt")
    with pytest.raises(Internal, match="made 1 outputs, and none in the place 1 of 'OUTPUT__1'"):
        run(load(version, described(raw_config(["value"], ["OUTPUT__1"]))), ["OUTPUT__1"], value=TEN)
    script(Wrong(), version / "model.pt")
    with pytest.raises(Internal, match="the model made a int where a tensor was expected"):
        run(load(version, described(raw_config(["value"], ["sum"]))), ["sum"], value=TEN)


def test_parameters_are_tritons(version: Path, described: Describe) -> None:
    asked = {"INFERENCE_MODE": "false", "DISABLE_OPTIMIZED_EXECUTION": "true", "DISABLE_CUDNN": "true"}
    modes = []
    script(Same(), version / "model.pt")
    threads: list[int] = []

    def alone() -> None:
        """Threads are counted for the one that sets them."""
        runtime = load(version, described(raw_config(["value"], ["same"])), INTRA_OP_THREAD_COUNT="1", **asked)
        modes.append(runtime._modes)  # type: ignore[attr-defined]
        threads.append(torch.get_num_threads())
        assert run(runtime, ["same"], value=TEN)["same"].tolist() == [[10, 10]]

    before = torch.get_num_threads()
    thread = threading.Thread(target=alone)
    thread.start()
    thread.join(30)
    torch.set_num_threads(before)
    assert threads == [1]
    assert modes == [InferenceModes(inference_mode=False, optimized_execution=False, cudnn=False)]
    with pytest.raises(InvalidArgument) as caught:
        load(version, described(raw_config(["value"], ["same"])), INTRA_OP_THREAD_COUNT="many")
    assert caught.value.field == "INTRA_OP_THREAD_COUNT"


def test_unloading_gives_back_what_torch_keeps_of_a_gpu(
    version: Path, described: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the weights are gone, and not before."""
    script(Same(), version / "model.pt")
    runtime: Any = load(version, described(raw_config(["INPUT__0"], ["OUTPUT__0"])))
    left: list[object] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(runtime._opened))
    runtime.close()
    assert left == [None]


def test_gpus_that_torch_does_not_have_are_refused(
    version: Path, described: Describe, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(Same(), version / "model.pt")
    config = described(raw_config(["INPUT__0"], ["OUTPUT__0"]))
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for gpu in (2, 0):
        with pytest.raises(Unsupported, match=f"there is no GPU {gpu} for this torch, which is built ") as refused:
            PYTORCH.load(version, config, InstancePlacement("KIND_GPU", gpu), {})
        assert refused.value.field == "instance_group.kind"
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert chosen == []


def test_an_instance_s_gpu_is_the_current_one_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that makes tensors on "cuda" makes them there."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    places = [InstancePlacement("KIND_GPU", 1), InstancePlacement("KIND_CPU"), InstancePlacement("KIND_MODEL")]
    assert [choose_device("m", place) for place in places] == ["cuda:1", "cpu", None]
    assert chosen == [1]


def test_a_compiled_package_for_another_device_is_refused(version: Path) -> None:
    file = version / "model.pt2"
    with ZipFile(file, "w") as package:
        package.writestr("model/data/aotinductor/model/x.wrapper_metadata.json", '{"AOTI_DEVICE_KEY": "cpu"}')
    with pytest.raises(Unsupported, match="was compiled for cpu, and its instance is on cuda:0"):
        open_model_file(file, "cuda:0")
