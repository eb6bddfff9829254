"""onnxruntime's sessions: one for all instances of a model on a device, and the tensors that a model's file declares.

Instances run one session at the same time: its weights are in memory once, and its threads are the host's, not as many
for each instance. Imported only where an ONNX model is loaded.
"""

from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import onnxruntime

from ...core.errors import InvalidArgument, NotFound, Unsupported
from ...processes.host import map_large_blocks_separately
from ..config_completion import FoundModel, FoundTensor
from .session_plan import SessionPlan

_DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float": "FP32",
    "double": "FP64",
    "string": "BYTES",
    "bfloat16": "BF16",
}

_Key: TypeAlias = tuple[tuple[object, ...], SessionPlan]

_sessions: "WeakValueDictionary[_Key, Session]" = WeakValueDictionary()
_lock = Lock()
_has_global_pool = False


class Session:
    """One loaded model, which several threads may run at once."""

    def __init__(self, file: Path, plan: SessionPlan) -> None:
        available = onnxruntime.get_available_providers()
        missing = [name for name, _ in plan.providers if name not in available]
        if missing:
            message = f"this onnxruntime was built without {missing[0]}; it has {', '.join(available)}"
            raise Unsupported(f"{message} (the package onnxruntime-gpu has those of GPUs)", field="instance_group.kind")
        options = _session_options(plan)
        providers: Any = [(name, dict(settings)) for name, settings in plan.providers]
        try:
            self.session = onnxruntime.InferenceSession(str(file), options, providers=providers)
        except Exception as error:  # onnxruntime has a class for each of its codes
            raise InvalidArgument(f"onnxruntime cannot load {file}: {error}") from error
        self._shrink_arenas = plan.shrink_arenas

    def run_options(self) -> Any:
        """The options of one instance's runs; `terminate` in them ends the current run before its next operator."""
        options = onnxruntime.RunOptions()
        if self._shrink_arenas:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", self._shrink_arenas)
        return options


def open_session(file: Path, plan: SessionPlan) -> Session:
    """The session of this file with this plan: an open one if the file has not changed, or a new one.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it cannot be loaded.
        Unsupported: onnxruntime was built without what the plan needs.
    """
    if not file.is_file():
        raise NotFound(f"unable to find '{file}' for model '{file.parent.parent.name}'")
    # Weights may lie beside the file.
    states = [(each.name, each.stat()) for each in sorted(file.parent.iterdir()) if each.is_file()]
    identity = (file, *((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states))
    key = (identity, plan)
    with _lock:
        session = _sessions.get(key)
        if session is None:
            map_large_blocks_separately()
            session = _sessions[key] = Session(file, plan)
        return session


def describe_session(session: Session) -> FoundModel:
    """The tensors that the file declares; an output that is no tensor is left out.

    Raises:
        Unsupported: an input is no tensor.
    """
    inputs, outputs = session.session.get_inputs(), session.session.get_outputs()
    for each in inputs:
        if not _datatype(each):
            raise Unsupported(f"input '{each.name}' of the model is a {each.type}, which no client could send")
    with_defaults = session.session.get_overridable_initializers()
    found = (*(_found(each) for each in inputs), *(_found(each, optional=True) for each in with_defaults))
    return FoundModel(found, tuple(_found(each) for each in outputs if _datatype(each)))


def _found(node: Any, optional: bool = False) -> FoundTensor:
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
    return FoundTensor(node.name, _datatype(node), shape, optional)


def _datatype(node: Any) -> str:
    """The v2 datatype; empty for any other type."""
    return _DATATYPES.get(node.type.removeprefix("tensor(").removesuffix(")"), "")


def _session_options(plan: SessionPlan) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, plan.optimization_level)
    options.execution_mode = getattr(onnxruntime.ExecutionMode, plan.execution_mode)
    options.enable_cpu_mem_arena = plan.memory_arena
    options.enable_mem_pattern = plan.memory_pattern
    options.log_severity_level = 3
    for name, value in plan.config_entries:
        options.add_session_config_entry(name, value)
    if plan.global_thread_pool:
        _make_global_pool(plan)
    if _has_global_pool:  # then onnxruntime takes no other threads
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = plan.intra_op_threads
        options.inter_op_num_threads = plan.inter_op_threads
    return options


def _make_global_pool(plan: SessionPlan) -> None:
    """Set the threads that all models share: by the first one, since onnxruntime makes them once, before anything
    else."""
    global _has_global_pool
    if _has_global_pool:
        return
    try:
        onnxruntime.set_global_thread_pool_sizes(plan.intra_op_threads, plan.inter_op_threads)
    except Exception as error:
        message = f"a global thread pool must be wanted by all ONNX models, as with --backend-config: {error}"
        raise InvalidArgument(message, field="enable-global-threadpool") from error
    _has_global_pool = True
