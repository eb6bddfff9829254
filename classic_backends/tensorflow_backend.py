"""The `tensorflow` backend: SavedModels (`model.savedmodel`), run by TensorFlow on the CPU, or on GPUs where asked to.

tensorflow is the extra `tensorflow`, which processes of its own import alone. When a config is completed a
model's tensors are read from its file, without its weights. Source:
https://github.com/triton-inference-server/tensorflow_backend.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import Internal, InvalidArgument, NotFound, Unsupported
from ..core.model import MemoryNeed, ModelConfig, RawConfig
from ..core.regular_files import read_regular
from ..core.runtime import Arrays, InstancePlacement, Parameters, Runtime, RuntimeLoader
from .backend_config import (
    FoundModel,
    FoundTensor,
    check_config_matches,
    complete_config,
    declares_tensors,
    memory_per_instance,
    read_thread_count,
    threads_per_instance,
    warn_unknown_parameters,
)
from .library_models import import_library

_DATATYPES = {
    "bool": "BOOL",
    "string": "BYTES",
    "bfloat16": "BF16",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
}
"""TensorFlow's names of types -> v2's."""

_INTRA = "TF_NUM_INTRA_THREADS"
_INTER = "TF_NUM_INTER_THREADS"
_TAG = "TF_GRAPH_TAG"
_SIGNATURE = "TF_SIGNATURE_DEF"
_OF_SESSIONS = ("TF_USE_PER_SESSION_THREADS", "MAX_SESSION_SHARE_COUNT")
_OF_THE_BACKEND = ("default-max-batch-size", "version", "allow-soft-placement", "gpu-memory-fraction")
_KNOWN_PARAMETERS = {_INTRA, _INTER, _TAG, _SIGNATURE, *_OF_SESSIONS, *_OF_THE_BACKEND}
_MOST_GRAPH_BYTES = 1 << 31
_USUAL_TAG = "serve"
_USUAL_SIGNATURE = "serving_default"
_INIT_SIGNATURE = "__saved_model_init_op"


def import_tensorflow() -> Any:
    """The module. It sees no GPU but one that `show_gpu` shows it, and logs errors alone. Raises `Unsupported` where it
    is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    tensorflow = import_library("tensorflow", "TensorFlow's models", "tensorflow")
    tensorflow.config.set_visible_devices([], "GPU")
    return tensorflow


def show_gpu(tensorflow: Any, number: int) -> None:
    """Let TensorFlow, before it computes anything, take that GPU, and of its memory what it needs. Raises `Unsupported`
    if it has no such GPU."""
    gpus = tensorflow.config.list_physical_devices("GPU")
    if number >= len(gpus):
        message = f"TensorFlow finds {len(gpus)} GPUs here, and none with the number {number}"
        raise Unsupported(f"{message}: install tensorflow[and-cuda], or set KIND_CPU", field="instance_group.kind")
    tensorflow.config.experimental.set_memory_growth(gpus[number], True)
    tensorflow.config.set_visible_devices([gpus[number]], "GPU")


class Signature(NamedTuple):
    """One of the functions of a SavedModel. `tags`: of the graph that has it."""

    name: str
    tags: tuple[str, ...]
    tensors: FoundModel


def read_signature(directory: Path, parameters: Parameters) -> Signature:
    """The signature that the parameters choose, without the model's weights.

    Raises:
        NotFound: there is no such SavedModel.
        InvalidArgument: it is none, or has no such signature.
        Unsupported: it is a graph by itself, or a tensor is of a kind that no client could send.
    """
    file = directory / "saved_model.pb"
    if directory.suffix == ".graphdef":
        message = f"'{directory}' is a graph without signatures, which are not run: make an ONNX model of it"
        raise Unsupported(f"{message} (python -m tf2onnx.convert --graphdef FILE --inputs ... --outputs ...)")
    if not file.is_file():
        raise NotFound(f"unable to find '{file}' for model '{directory.parent.parent.name}'")
    tensorflow = import_tensorflow()
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    model = SavedModel()
    try:
        model.ParseFromString(read_regular(file, _MOST_GRAPH_BYTES))
    except DecodeError as error:
        raise InvalidArgument(f"TensorFlow cannot load {directory}: {error}") from error
    tag = parameters.get(_TAG, _USUAL_TAG)
    graphs = {tuple(graph.meta_info_def.tags): graph for graph in model.meta_graphs}
    tags = _chosen(_TAG, {name: tags for tags in graphs for name in tags}, tag)
    signatures = {name: signature for name, signature in graphs[tags].signature_def.items() if name != _INIT_SIGNATURE}
    name = parameters.get(_SIGNATURE, _USUAL_SIGNATURE)
    if _SIGNATURE not in parameters and name not in signatures and len(signatures) == 1:
        [name] = signatures
    signature = _chosen(_SIGNATURE, signatures, name)
    tensors = FoundModel(_found(tensorflow, signature.inputs), _found(tensorflow, signature.outputs))
    return Signature(name, tags, tensors)


def _chosen(parameter: str, known: Mapping[str, Any], name: str) -> Any:
    if name not in known:
        message = f"the model has no '{name}', but {', '.join(sorted(known)) or 'none at all'}"
        raise InvalidArgument(f"parameter '{parameter}': {message}", field=parameter)
    return known[name]


def _found(tensorflow: Any, tensors: Mapping[str, Any]) -> tuple[FoundTensor, ...]:
    """By name: a file has them in no order."""
    return tuple(_found_tensor(tensorflow, name, tensors[name]) for name in sorted(tensors))


def _found_tensor(tensorflow: Any, name: str, info: Any) -> FoundTensor:
    kind = tensorflow.as_dtype(info.dtype).name if info.WhichOneof("encoding") == "name" else "of several parts"
    if kind not in _DATATYPES:
        raise Unsupported(f"tensor '{name}' of the model is of TensorFlow's type {kind}, which v2 does not have")
    shape = None if info.tensor_shape.unknown_rank else tuple(int(dim.size) for dim in info.tensor_shape.dim)
    return FoundTensor(name, _DATATYPES[kind], shape)


class TensorFlowLoader(RuntimeLoader):
    """Loads `model.savedmodel`, or the `default_model_filename`, and runs a signature of it. Triton's parameters:
    threads, TF_GRAPH_TAG and TF_SIGNATURE_DEF; those of sessions have no effect."""

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        warn_unknown_parameters(config.name, parameters, _KNOWN_PARAMETERS)
        signature = read_signature(_model_directory(directory, config.raw), parameters)
        check_config_matches(config, signature.tensors)
        threads = read_thread_count(parameters, _INTRA) or threads_per_instance(config.raw)
        tensorflow = import_tensorflow()
        if placement.gpu is not None:
            show_gpu(tensorflow, placement.gpu)
        tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
        tensorflow.config.threading.set_inter_op_parallelism_threads(read_thread_count(parameters, _INTER) or threads)
        return TensorFlowRuntime(tensorflow, _model_directory(directory, config.raw), signature)

    def needs(self, directory: Path, raw: RawConfig, parameters: Parameters) -> tuple[MemoryNeed, ...]:
        return memory_per_instance(raw, _model_directory(directory, raw))

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        if declares_tensors(raw):
            return raw
        signature = read_signature(_model_directory(directory, raw), parameters)
        return complete_config(raw, signature.tensors, parameters)


def _model_directory(directory: Path, raw: RawConfig) -> Path:
    return directory / (raw.get("default_model_filename") or "model.savedmodel")


class TensorFlowRuntime(Runtime):
    """One instance: a signature of a model that it has loaded. Raises `InvalidArgument` if it cannot be loaded."""

    def __init__(self, tensorflow: Any, directory: Path, signature: Signature) -> None:
        self._tensorflow = tensorflow
        try:
            self._model = tensorflow.saved_model.load(str(directory), tags=signature.tags)
        except (tensorflow.errors.OpError, OSError, RuntimeError, TypeError, ValueError, KeyError) as error:
            raise InvalidArgument(f"TensorFlow cannot load {directory}: {_one_line(error)}") from error
        self._run = self._model.signatures[signature.name]
        tensors = (*signature.tensors.inputs, *signature.tensors.outputs)
        self._datatypes = {tensor.name: tensor.datatype for tensor in tensors}

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        try:
            outputs = self._run(**{name: self._to_tensor(name, array) for name, array in inputs.items()})
        except (self._tensorflow.errors.OpError, TypeError, ValueError) as error:
            raise Internal(f"TensorFlow error: {_one_line(error)}") from error
        yield {name: self._to_array(name, outputs[name]) for name in output_names}

    def _to_tensor(self, name: str, array: NDArray[Any]) -> Any:
        match self._datatypes[name]:
            case "BYTES":
                return self._tensorflow.constant(array, self._tensorflow.string)
            case "BF16":  # uint16 here
                return self._tensorflow.constant(array.view(self._tensorflow.bfloat16.as_numpy_dtype))
        return self._tensorflow.constant(array)

    def _to_array(self, name: str, tensor: Any) -> NDArray[Any]:
        match self._datatypes[name]:
            case "BYTES":
                return np.asarray(tensor.numpy(), object)
            case "BF16":
                return np.asarray(tensor.numpy()).view(np.uint16)
        return np.asarray(tensor.numpy())


def _one_line(error: Exception) -> str:
    """The line of what TensorFlow says that tells what is wrong: of a graph's error the last, after the names of nodes
    and calls."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.strip().startswith("[[")]
    return lines[-1 if lines[0].startswith("Graph execution error") else 0] if lines else type(error).__name__


TENSORFLOW = TensorFlowLoader()
