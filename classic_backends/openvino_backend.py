"""The `openvino` backend: models of OpenVINO (`model.xml` beside its `model.bin`), and ONNX models, run by OpenVINO.

Instances run requests of one compiled model: its weights are in memory once. openvino is an extra
(`openvino`), imported when the first such model is loaded. Source:
https://github.com/triton-inference-server/openvino_backend.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import Internal, InvalidArgument, Unsupported
from ..core.model import MemoryNeed, ModelConfig, RawConfig
from ..core.runtime import Arrays, InstancePlacement, Parameters, Runtime, RuntimeTraits
from ..processes.host import release_free_memory, usable_cores
from .backend_config import (
    FoundModel,
    FoundTensor,
    check_config_matches,
    complete_config,
    declares_tensors,
    memory_shared_by_instances,
    read_choice,
    read_thread_count,
    warn_unknown_parameters,
)
from .library_models import SharedModelLoader, import_library

_DATATYPES = {
    "boolean": "BOOL",
    "bf16": "BF16",
    "f16": "FP16",
    "f32": "FP32",
    "f64": "FP64",
    **{f"i{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
}
"""OpenVINO's names of element types -> v2's."""

_PRECISIONS = ("f32", "bf16", "f16")
_HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")
_THREADS = "INFERENCE_NUM_THREADS"
_STREAMS = "NUM_STREAMS"
_HINT = "PERFORMANCE_HINT"
_DEVICE = "TARGET_DEVICE"
_PRECISION = "INFERENCE_PRECISION_HINT"
_KNOWN_PARAMETERS = {_THREADS, _STREAMS, _HINT, _DEVICE, _PRECISION, "default-max-batch-size"}


def import_openvino() -> Any:
    """The module. Raises `Unsupported` where it is not installed."""
    return import_library("openvino", "OpenVINO models", "openvino")


@cache
def _core() -> Any:
    """OpenVINO's own object, one for as long as the process runs: what it loads for a processor gives the thread that
    comes first a stack for signals, frees that in whichever thread drops it, and the next signal would end the
    process."""
    return import_openvino().Core()


class CompileSettings(NamedTuple):
    """How a model is compiled. `properties`: OpenVINO's, by name."""

    device: str
    properties: tuple[tuple[str, str], ...]


class OpenVinoModel:
    """One compiled model, of which several threads may run requests at once. `tensors`: those that its file declares.
    Raises `InvalidArgument` if it cannot be read or compiled, and `Unsupported` for a tensor of a type that no client
    could send."""

    def __init__(self, file: Path, settings: CompileSettings) -> None:
        try:
            model = _core().read_model(str(file))
            self._compiled = _core().compile_model(model, settings.device, dict(settings.properties))
        except RuntimeError as error:
            raise InvalidArgument(f"OpenVINO cannot load {file}: {_one_line(error)}") from error
        self.tensors = FoundModel(_found(self._compiled.inputs), _found(self._compiled.outputs))

    def new_request(self) -> Any:
        """An object of OpenVINO's that runs the model, one batch at a time."""
        return self._compiled.create_infer_request()


def _found(ports: Sequence[Any]) -> tuple[FoundTensor, ...]:
    return tuple(_found_tensor(port) for port in ports)


def _found_tensor(port: Any) -> FoundTensor:
    name = port.get_any_name()
    kind = port.get_element_type().get_type_name()
    if kind not in _DATATYPES:
        raise Unsupported(f"tensor '{name}' of the model is of OpenVINO's type {kind}, which v2 does not have")
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return FoundTensor(name, _DATATYPES[kind], None)
    return FoundTensor(name, _DATATYPES[kind], tuple(-1 if dim.is_dynamic else dim.get_length() for dim in shape))


class OpenVinoLoader(SharedModelLoader[CompileSettings, OpenVinoModel]):
    """Loads `model.xml`, `model.onnx` or the `default_model_filename`. Triton's parameters: INFERENCE_NUM_THREADS,
    NUM_STREAMS, PERFORMANCE_HINT, TARGET_DEVICE; ours: INFERENCE_PRECISION_HINT, for a processor with bf16 computes in
    it otherwise."""

    def __init__(self) -> None:
        super().__init__(OpenVinoModel)

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        if placement.gpu is not None:
            message = f"model '{config.name}': OpenVINO computes on its {_DEVICE}, and on no GPU of CUDA: KIND_CPU"
            raise Unsupported(message, field="instance_group.kind")
        warn_unknown_parameters(config.name, parameters, _KNOWN_PARAMETERS)
        model = self.open_model(_model_file(directory, config.raw), _read_settings(parameters))
        check_config_matches(config, model.tensors)
        return OpenVinoRuntime(model)

    def needs(self, directory: Path, raw: RawConfig, parameters: Parameters) -> tuple[MemoryNeed, ...]:
        file = _model_file(directory, raw)
        weights = file.with_suffix(".bin")
        return memory_shared_by_instances(raw, weights if weights.is_file() else file)

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        if declares_tensors(raw):
            return raw
        model = self.open_for_config(_model_file(directory, raw), _read_settings(parameters))
        return complete_config(raw, model.tensors, parameters)


def _model_file(directory: Path, raw: RawConfig) -> Path:
    return directory / (raw.get("default_model_filename") or "model.xml")


def _read_settings(parameters: Parameters) -> CompileSettings:
    """Raises `InvalidArgument` for a wrong parameter; `field` names it."""
    device = parameters.get(_DEVICE, "CPU")
    available = _core().available_devices
    if device.partition(":")[0] not in (*available, "AUTO"):
        message = f"parameter '{_DEVICE}' must be a device that OpenVINO has here ({', '.join(available)})"
        raise InvalidArgument(f"{message}, got '{device}'", field=_DEVICE)
    properties = {_THREADS: str(read_thread_count(parameters, _THREADS) or usable_cores().threads)}
    properties[_HINT] = read_choice(parameters, _HINT, _HINTS, "LATENCY")
    if _PRECISION in parameters:
        properties[_PRECISION] = read_choice(parameters, _PRECISION, _PRECISIONS, "f32")
    if streams := read_thread_count(parameters, _STREAMS):
        properties[_STREAMS] = str(streams)
    return CompileSettings(device, tuple(properties.items()))


class OpenVinoRuntime(Runtime):
    """One instance: a request of a compiled model that it shares with the others until it is closed."""

    def __init__(self, model: OpenVinoModel) -> None:
        self._model: OpenVinoModel | None = model
        self._request: Any = model.new_request()
        tensors = (*model.tensors.inputs, *model.tensors.outputs)
        self._datatypes = {tensor.name: tensor.datatype for tensor in tensors}
        self._interrupted = ""
        self.traits = RuntimeTraits(interrupt=self._interrupt)

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        self._interrupted = ""
        values = {name: self._to_value(name, array) for name, array in inputs.items()}
        try:
            self._request.start_async(values)  # it copies
            self._request.wait()
        except (RuntimeError, TypeError, ValueError) as error:
            raise Internal(self._interrupted or f"OpenVINO error: {_one_line(error)}") from error
        yield {name: self._to_array(name) for name in output_names}

    def _to_value(self, name: str, array: NDArray[Any]) -> Any:
        """An input as OpenVINO takes it. BF16, which numpy does not have, is uint16 here."""
        if self._datatypes[name] == "BF16":
            openvino = import_openvino()
            return openvino.Tensor(np.ascontiguousarray(array), list(array.shape), openvino.Type.bf16)
        return array

    def _to_array(self, name: str) -> NDArray[Any]:
        tensor = self._request.get_tensor(name)
        data: NDArray[Any] = np.array(tensor.data)  # the next execution writes there
        return data.view(np.uint16) if self._datatypes[name] == "BF16" else data

    def _interrupt(self, reason: str) -> None:
        self._interrupted = f"OpenVINO error: the run was ended: {reason}"
        self._request.cancel()

    def close(self) -> None:
        self._request = self._model = None
        release_free_memory()


def _one_line(error: Exception) -> str:
    """OpenVINO's messages name the places in its sources that an error passed, a line each; the last line is what is
    wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


OPENVINO = OpenVinoLoader()
