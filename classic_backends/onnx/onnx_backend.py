"""The `onnxruntime` backend: ONNX models on the CPU, or on what else onnxruntime was built for.

Instances run one session at the same time: its weights are in memory once, and its threads are the host's, not as many
for each instance. onnxruntime is the extra `onnx`, imported when the first such model is loaded. Source:
https://github.com/triton-inference-server/onnxruntime_backend.
"""

import ctypes
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...core.errors import CharoniaError, Internal, InvalidArgument, Unsupported
from ...core.model import MemoryNeed, ModelConfig, RawConfig
from ...core.runtime import Arrays, InstancePlacement, Parameters, Runtime, RuntimeTraits
from ...core.tensor import NUMPY_TYPES
from ...processes.host import map_large_blocks_separately, release_free_memory
from ..backend_config import (
    FoundModel,
    FoundTensor,
    check_config_matches,
    complete_config,
    declares_tensors,
    memory_shared_by_instances,
    model_dims,
    read_placements,
    warn_unknown_parameters,
)
from ..library_models import SharedModelLoader, import_library
from .session_plan import KNOWN_PARAMETERS, SessionPlan, read_session_plan

_DATATYPES = {np.dtype(dtype).name: datatype for datatype, dtype in NUMPY_TYPES.items()}
_DATATYPES |= {"uint16": "UINT16", "float": "FP32", "double": "FP64", "string": "BYTES", "bfloat16": "BF16"}

_BFLOAT16 = 16
"""onnx.TensorProto.BFLOAT16"""

Shape: TypeAlias = tuple[int, ...]

_has_global_pool = False


def import_onnxruntime() -> Any:
    """The module. Raises `Unsupported` where it is not installed."""
    # Its wheels send telemetry otherwise, from the import on.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return import_library("onnxruntime", "ONNX models", "onnx")


class Session:
    """One loaded model, which several threads may run at once. `tensors`: those that its file declares; an output that
    is no tensor is left out. Raises `InvalidArgument` if it cannot be loaded, and `Unsupported` if onnxruntime was
    built without what the plan needs, or an input is no tensor."""

    def __init__(self, file: Path, plan: SessionPlan) -> None:
        map_large_blocks_separately()
        onnxruntime = import_onnxruntime()
        available = onnxruntime.get_available_providers()
        missing = [name for name, _ in plan.providers if name not in available]
        if missing:
            message = f"this onnxruntime was built without {missing[0]}; it has {', '.join(available)}"
            raise Unsupported(f"{message} (the package onnxruntime-gpu has those of GPUs)", field="instance_group.kind")
        options = _session_options(plan)
        providers: Any = [(name, dict(settings)) for name, settings in plan.providers]
        try:
            self._session = onnxruntime.InferenceSession(str(file), options, providers=providers)
        except Exception as error:  # onnxruntime has a class for each of its codes
            raise InvalidArgument(f"onnxruntime cannot load {file}: {error}") from error
        # One whose libraries are missing is left out without an error, and the CPU computes.
        lost = [name for name, _ in plan.providers if name not in self._session.get_providers()]
        if lost:
            message = f"onnxruntime could not start {lost[0]} for {file}: libraries that it needs may be missing"
            raise Unsupported(message, field="instance_group.kind")
        self._shrink_arenas = plan.shrink_arenas
        self.tensors = _find_tensors(self._session)
        tensors = (*self.tensors.inputs, *self.tensors.outputs)
        self._texts = {tensor.name for tensor in tensors if tensor.datatype == "BYTES"}
        self._bfloat16 = {tensor.name for tensor in tensors if tensor.datatype == "BF16"}

    def run_options(self) -> Any:
        """The options of one instance's runs; `terminate` in them ends the current run before its next operator."""
        options = import_onnxruntime().RunOptions()
        if self._shrink_arenas:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", self._shrink_arenas)
        return options

    def run(self, inputs: Arrays, output_names: Sequence[str], options: Any) -> Sequence[NDArray[Any]]:
        """The outputs in the order of their names. Strings, which are text to onnxruntime, and BF16, which numpy does
        not have, are converted."""
        if self._texts:
            inputs = {name: _decode(name, array) if name in self._texts else array for name, array in inputs.items()}
        outputs: Sequence[NDArray[Any]]
        if self._bfloat16:
            values = {name: _to_value(array, name in self._bfloat16) for name, array in inputs.items()}
            output_values = self._session.run_with_ort_values(list(output_names), values, options)
            outputs = [_to_array(value) for value in output_values]
        else:
            outputs = self._session.run(output_names, inputs, options)
        if self._texts:
            outputs = [
                _objects((item.encode() for item in array.flat), array.shape) if name in self._texts else array
                for name, array in zip(output_names, outputs, strict=True)
            ]
        return outputs


def _find_tensors(session: Any) -> FoundModel:
    for node in session.get_inputs():
        if not _datatype(node):
            raise Unsupported(f"input '{node.name}' of the model is a {node.type}, which no client could send")
    inputs = [_found(node) for node in session.get_inputs()]
    inputs += [_found(node, optional=True) for node in session.get_overridable_initializers()]
    return FoundModel(tuple(inputs), tuple(_found(node) for node in session.get_outputs() if _datatype(node)))


def _found(node: Any, optional: bool = False) -> FoundTensor:
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
    return FoundTensor(node.name, _datatype(node), shape, optional)


def _datatype(node: Any) -> str:
    """The v2 datatype; empty for any other type."""
    return _DATATYPES.get(node.type.removeprefix("tensor(").removesuffix(")"), "")


def _to_value(array: NDArray[Any], bfloat16: bool) -> Any:
    contiguous = np.ascontiguousarray(array)
    values = import_onnxruntime().OrtValue
    if bfloat16:
        return values.ortvalue_from_numpy_with_onnx_type(contiguous, _BFLOAT16)
    return values.ortvalue_from_numpy(contiguous)


def _to_array(value: Any) -> NDArray[Any]:
    if value.element_type() != _BFLOAT16:
        return value.numpy()  # type: ignore[no-any-return]
    shape = tuple(value.shape())
    bits = ctypes.string_at(value.data_ptr(), 2 * int(np.prod(shape)))
    return np.frombuffer(bits, np.uint16).reshape(shape)


def _decode(name: str, array: NDArray[Any]) -> NDArray[Any]:
    try:
        return _objects((item.decode() for item in array.flat), array.shape)
    except UnicodeDecodeError as error:
        message = f"input '{name}' of an ONNX model must be UTF-8: {error}"
        raise InvalidArgument(message, field=name) from None


def _objects(items: Iterable[object], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.array(list(items), dtype=object).reshape(shape)


def _session_options(plan: SessionPlan) -> Any:
    global _has_global_pool
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, plan.optimization_level)
    options.execution_mode = getattr(onnxruntime.ExecutionMode, plan.execution_mode)
    options.enable_cpu_mem_arena = plan.memory_arena
    options.enable_mem_pattern = plan.memory_pattern
    options.log_severity_level = 3
    for name, value in plan.config_entries:
        options.add_session_config_entry(name, value)
    if plan.global_thread_pool and not _has_global_pool:
        # The threads that all models share are made once, by the first one, before anything else.
        try:
            onnxruntime.set_global_thread_pool_sizes(plan.intra_op_threads, plan.inter_op_threads)
        except Exception as error:
            message = f"a global thread pool must be wanted by all ONNX models, as with --backend-config: {error}"
            raise InvalidArgument(message, field="enable-global-threadpool") from error
        _has_global_pool = True
    if _has_global_pool:  # then onnxruntime takes no other threads
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = plan.intra_op_threads
        options.inter_op_num_threads = plan.inter_op_threads
    return options


_ERROR = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


class OnnxLoader(SharedModelLoader[SessionPlan, Session]):
    """Loads `model.onnx`, or the `default_model_filename`; either may be a directory with a file of that name in
    it."""

    def __init__(self) -> None:
        super().__init__(Session)

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        import_onnxruntime()
        warn_unknown_parameters(config.name, parameters, KNOWN_PARAMETERS)
        plan = read_session_plan(config.raw, placement, parameters)
        session = self.open_model(_model_file(directory, config.raw), plan)
        scalars = _scalar_dims(config, session.tensors)
        check_config_matches(config, _with_dims(session.tensors, scalars))
        return OnnxRuntime(session, scalars)

    def needs(self, directory: Path, raw: RawConfig, parameters: Parameters) -> tuple[MemoryNeed, ...]:
        file = _model_file(directory, raw)
        return memory_shared_by_instances(raw, file if file.parent == directory else file.parent)

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        if declares_tensors(raw):
            return raw
        import_onnxruntime()
        plan = read_session_plan(raw, read_placements("", raw)[0], parameters)
        session = self.open_for_config(_model_file(directory, raw), plan)
        return complete_config(raw, session.tensors, parameters)

    def uses_gpus(self) -> bool:
        return "CUDAExecutionProvider" in import_onnxruntime().get_available_providers()


def _scalar_dims(config: ModelConfig, model: FoundModel) -> dict[str, Shape]:
    """The dims that a config gives to tensors that have none in the model: as in Triton any number of ones."""
    scalars = {tensor.name for tensor in (*model.inputs, *model.outputs) if tensor.shape == ()}
    tensors = [*config.raw.get("input", ()), *config.raw.get("output", ())] if not config.max_batch_size else []
    dims = {tensor["name"]: model_dims(tensor) for tensor in tensors if tensor["name"] in scalars}
    return {name: ones for name, ones in dims.items() if set(ones) == {1}}


def _with_dims(model: FoundModel, dims: Mapping[str, Shape]) -> FoundModel:
    inputs, outputs = (
        tuple(tensor._replace(shape=dims.get(tensor.name, tensor.shape)) for tensor in tensors) for tensors in model
    )
    return FoundModel(inputs, outputs)


def _model_file(directory: Path, raw: RawConfig) -> Path:
    """The model's file; in a directory of that name it lies beside its weights."""
    name = raw.get("default_model_filename") or "model.onnx"
    return directory / name / name if (directory / name).is_dir() else directory / name


class OnnxRuntime(Runtime):
    """One instance: a session that it shares with the others until it is closed. `scalars`: see `_scalar_dims`."""

    def __init__(self, session: Session, scalars: Mapping[str, Shape]) -> None:
        self._session: Session | None = session
        self._scalars = scalars
        self._options = session.run_options()
        self._interrupted = ""
        self.traits = RuntimeTraits(ragged=True, interrupt=self._interrupt)

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        assert self._session is not None
        if self._interrupted:
            self._interrupted = ""
            self._options.terminate = False
        try:
            if self._scalars:
                inputs = {name: array.reshape(()) if name in self._scalars else array for name, array in inputs.items()}
            outputs = self._session.run(inputs, output_names, self._options)
        except CharoniaError:
            raise
        except Exception as error:
            raise Internal(self._interrupted) if self._interrupted else _in_tritons_words(error) from error
        by_name = dict(zip(output_names, outputs, strict=True))
        for name, dims in self._scalars.items():
            if name in by_name:
                by_name[name] = by_name[name].reshape(dims)
        yield by_name

    def _interrupt(self, reason: str) -> None:
        self._interrupted = f"onnx runtime error: the run was ended: {reason}"
        self._options.terminate = True

    def close(self) -> None:
        self._session = None
        release_free_memory()


def _in_tritons_words(error: Exception) -> CharoniaError:
    if isinstance(error, UnicodeDecodeError):  # onnxruntime returns strings as text alone
        return Internal(f"onnx runtime error: an output of the model is not UTF-8: {error}")
    if isinstance(error, ValueError):  # an input that is optional in the config alone
        return InvalidArgument(str(error))
    match = _ERROR.match(str(error))
    return Internal(f"onnx runtime error {match[1]}: {match[2]}" if match else f"onnx runtime error: {error}")


ONNX = OnnxLoader()
