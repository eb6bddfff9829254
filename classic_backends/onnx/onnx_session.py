"""onnxruntime's sessions: made as planned, one for all instances of a model, and what they say of a model's tensors.

Instances run one session at the same time: its weights are in memory once, and its threads are those of the host, not
as many times that as there are instances. Imported only where an ONNX model is loaded.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import onnxruntime

from ...core.errors import InvalidArgument, NotFound, Unsupported
from ...processes.host import map_large_blocks_separately
from ..config_completion import FoundModel, FoundTensor
from .session_plan import SessionPlan

log = logging.getLogger(__name__)

_TYPES = {
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
_pool_made = False


class Session:
    """One loaded model, which several threads may run at once."""

    def __init__(self, file: Path, plan: SessionPlan) -> None:
        _check_providers(plan)
        options = _session_options(plan)
        providers: Any = [(name, dict(settings)) for name, settings in plan.providers]
        try:
            self.session = onnxruntime.InferenceSession(str(file), options, providers=providers)
        except Exception as error:  # of a class of onnxruntime's own for each of its codes
            raise InvalidArgument(f"onnxruntime cannot load {file}: {error}") from error
        self._shrink = plan.shrink_arenas

    def run_options(self) -> Any:
        """Of one instance's runs; `terminate` in them ends the one that runs, before its next operator."""
        options = onnxruntime.RunOptions()
        if self._shrink:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", self._shrink)
        return options


def open_session(file: Path, plan: SessionPlan) -> Session:
    """The session of this file, as it is now, with this plan: the one that is open, or a new one.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it cannot be loaded.
        Unsupported: onnxruntime was built without what the plan wants.
    """
    key = (_identity(file), plan)
    with _lock:
        session = _sessions.get(key)
        if session is None:
            map_large_blocks_separately()
            session = _sessions[key] = Session(file, plan)
        return session


def describe_session(session: Session) -> FoundModel:
    """Raises `Unsupported` for inputs that are no tensors; outputs that are none are left out."""
    inside = session.session
    inputs = [*_found(inside.get_inputs(), False), *_found(inside.get_overridable_initializers(), True)]
    outputs = [each for each in inside.get_outputs() if _datatype(each)]
    for each in inside.get_inputs():
        if not _datatype(each):
            raise Unsupported(f"input '{each.name}' of the model is a {each.type}, which no client could send")
    return FoundModel(tuple(inputs), tuple(_found(outputs, False)))


def _found(nodes: Any, optional: bool) -> Iterator[FoundTensor]:
    for node in nodes:
        shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
        yield FoundTensor(node.name, _datatype(node), shape, optional)


def _datatype(node: Any) -> str:
    """Empty for what is no tensor of a type that v2 knows."""
    return _TYPES.get(node.type.removeprefix("tensor(").removesuffix(")"), "")


def _identity(file: Path) -> tuple[object, ...]:
    """Changes when the model's files do: weights may lie beside it."""
    if not file.is_file():
        raise NotFound(f"unable to find '{file}' for model '{file.parent.parent.name}'")
    beside = sorted(each for each in file.parent.iterdir() if each.is_file())
    states = ((each, each.stat()) for each in beside)
    return (file, *((each.name, state.st_ino, state.st_size, state.st_mtime_ns) for each, state in states))


def _check_providers(plan: SessionPlan) -> None:
    available = onnxruntime.get_available_providers()
    missing = [name for name, _ in plan.providers if name not in available]
    if missing:
        message = f"this onnxruntime was built without {missing[0]}; it has {', '.join(available)}"
        raise Unsupported(f"{message} (the package onnxruntime-gpu has those of GPUs)", field="instance_group.kind")


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
        _make_pool(plan)
    if _pool_made:  # then onnxruntime takes no other threads
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = plan.intra_op_threads
        options.inter_op_num_threads = plan.inter_op_threads
    return options


def _make_pool(plan: SessionPlan) -> None:
    """The first model says how many threads all share; onnxruntime makes them once, before anything else."""
    global _pool_made
    if _pool_made:
        return
    try:
        onnxruntime.set_global_thread_pool_sizes(plan.intra_op_threads, plan.inter_op_threads)
    except Exception as error:
        message = f"a global thread pool must be wanted by all ONNX models, as with --backend-config: {error}"
        raise InvalidArgument(message, field="enable-global-threadpool") from error
    _pool_made = True
