"""How an ONNX model is to be run: Triton's parameters and `optimization`, read from a config. Imports no onnxruntime.

model-config.md section 8. Our own defaults where Triton's suit a process that shares its cores with a server: as many
threads as the host has cores for us, and none of them spins while it waits.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from ...core.errors import InvalidArgument
from ...core.model import ConfigDocument
from ...processes.host import usable_cores
from ..backend_parameters import read_choice, read_flag, read_thread_count
from ..runtime import InstancePlacement

Provider: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""An execution provider of onnxruntime and its options."""

_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
_MODES = {"0": "ORT_SEQUENTIAL", "1": "ORT_PARALLEL"}
_CUDA = (
    "cudnn_conv_algo_search",
    "gpu_mem_limit",
    "arena_extend_strategy",
    "do_copy_in_default_stream",
    "enable_cuda_graph",
)
"""Parameters that the CUDA provider takes as they are."""

_ALGORITHMS = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
_STRATEGIES = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}
_TENSORRT = {"max_workspace_size_bytes": "trt_max_workspace_size", "minimum_segment_size": "trt_min_subgraph_size"}

KNOWN_PARAMETERS = {
    "intra_op_thread_count",
    "inter_op_thread_count",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
    "memory.enable_memory_arena_shrinkage",
    "session.use_device_allocator_for_initializers",
    "session_thread_pool_allow_spinning",
    "enable-global-threadpool",
    "default-max-batch-size",
    *_CUDA,
}


class SessionPlan(NamedTuple):
    """What a session is made with; equal plans for one file make equal sessions.

    `threads`, `branches`: how many compute one operator, and how many operators at once. `common_pool`: threads are
    shared with every model that wants that. `entries`: onnxruntime's session config entries. `shrink`: arenas to give
    back memory after each run, empty for none.
    """

    providers: tuple[Provider, ...]
    intra_op_threads: int
    inter_op_threads: int
    optimization_level: str = "ORT_ENABLE_ALL"
    execution_mode: str = "ORT_SEQUENTIAL"
    memory_arena: bool = True
    memory_pattern: bool = True
    global_thread_pool: bool = False
    config_entries: tuple[tuple[str, str], ...] = ()
    shrink_arenas: str = ""


def read_session_plan(document: ConfigDocument, place: InstancePlacement, parameters: Mapping[str, str]) -> SessionPlan:
    """Raises `InvalidArgument` for a parameter that is wrong; `field` names it."""
    spins = read_flag(parameters, "session_thread_pool_allow_spinning", False)
    entries = {"session.intra_op.allow_spinning": spins, "session.inter_op.allow_spinning": spins}
    if read_flag(parameters, "session.use_device_allocator_for_initializers", False):
        entries["session.use_device_allocator_for_initializers"] = True
    return SessionPlan(
        providers=_providers(document, place, parameters),
        intra_op_threads=read_thread_count(parameters, "intra_op_thread_count") or usable_cores().threads,
        inter_op_threads=read_thread_count(parameters, "inter_op_thread_count") or usable_cores().threads,
        optimization_level=_level(document),
        execution_mode=_MODES[read_choice(parameters, "execution_mode", _MODES, "0")],
        memory_arena=read_flag(parameters, "enable_mem_arena", True),
        memory_pattern=read_flag(parameters, "enable_mem_pattern", True),
        global_thread_pool=read_flag(parameters, "enable-global-threadpool", False),
        config_entries=tuple((name, str(int(value))) for name, value in entries.items()),
        shrink_arenas=parameters.get("memory.enable_memory_arena_shrinkage", ""),
    )


def _level(document: ConfigDocument) -> str:
    graph: ConfigDocument = document.get("optimization", {}).get("graph", {})
    level = int(graph.get("level", 0))
    if level not in _LEVELS:
        message = f"optimization.graph.level must be one of {sorted(_LEVELS)}, got {level}"
        raise InvalidArgument(message, field="optimization.graph.level")
    return _LEVELS[level]


def _providers(
    document: ConfigDocument, place: InstancePlacement, parameters: Mapping[str, str]
) -> tuple[Provider, ...]:
    """The first that can run an operator does; the CPU runs all."""
    accelerators: ConfigDocument = document.get("optimization", {}).get("execution_accelerators", {})
    side = "gpu_execution_accelerator" if place.kind == "KIND_GPU" else "cpu_execution_accelerator"
    wanted = [_accelerator(side, each, place) for each in accelerators.get(side, ())]
    if place.kind == "KIND_GPU" and all(name != "CUDAExecutionProvider" for name, _ in wanted):
        wanted.append(("CUDAExecutionProvider", _cuda(place, parameters)))
    return (*wanted, ("CPUExecutionProvider", ()))


def _accelerator(side: str, asked: ConfigDocument, place: InstancePlacement) -> Provider:
    name, options = asked.get("name", ""), dict(asked.get("parameters", {}))
    if side == "cpu_execution_accelerator" and name == "openvino":
        return "OpenVINOExecutionProvider", _options(options)
    if side == "gpu_execution_accelerator" and name == "cuda":
        return "CUDAExecutionProvider", _cuda(place, options)
    if side == "gpu_execution_accelerator" and name == "tensorrt":
        return "TensorrtExecutionProvider", _options(_tensorrt(options) | {"device_id": str(place.device)})
    field = f"optimization.execution_accelerators.{side}"
    raise InvalidArgument(f"unknown {side} '{name}'; known are tensorrt and cuda on GPU, openvino on CPU", field=field)


def _tensorrt(options: Mapping[str, str]) -> dict[str, str]:
    """Triton's old names in onnxruntime's words; new names pass as they are."""
    precision = options.get("precision_mode", "FP32")
    named = {_TENSORRT.get(name, name): value for name, value in options.items() if name != "precision_mode"}
    return named | ({f"trt_{precision.lower()}_enable": "1"} if precision in ("FP16", "INT8") else {})


def _cuda(place: InstancePlacement, parameters: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    options = {name: parameters[name] for name in _CUDA if name in parameters}
    for name, words in (("cudnn_conv_algo_search", _ALGORITHMS), ("arena_extend_strategy", _STRATEGIES)):
        if name in options:
            options[name] = words.get(options[name], options[name])
    return _options(options | {"device_id": str(place.device)})


def _options(options: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(options.items()))
