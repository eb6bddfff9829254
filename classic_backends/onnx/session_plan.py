"""The options of an ONNX model's session, read from Triton's parameters and `optimization` of its config.

Source: https://github.com/triton-inference-server/onnxruntime_backend#readme. Defaults differ where Triton's do not
suit a process that shares its cores with a server: as many threads as the host has cores for us, and none spins while
it waits. Imports no onnxruntime.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from ...core.errors import InvalidArgument
from ...core.model import RawConfig
from ...core.runtime import InstancePlacement, Parameters
from ...processes.host import usable_cores
from ..backend_config import read_choice, read_flag, read_thread_count

Provider: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""An execution provider of onnxruntime and its sorted options."""

_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
_MODES = {"0": "ORT_SEQUENTIAL", "1": "ORT_PARALLEL"}
_CUDA_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "gpu_mem_limit": {},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "do_copy_in_default_stream": {},
    "enable_cuda_graph": {},
}
"""Parameters that are options of the CUDA provider -> its names for Triton's values, where they differ."""

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
    *_CUDA_PARAMETERS,
}


class SessionPlan(NamedTuple):
    """The options of a session. Equal plans for one file make equal sessions."""

    providers: tuple[Provider, ...]
    """By precedence: an operator runs on the first that has it."""
    intra_op_threads: int
    inter_op_threads: int
    optimization_level: str = "ORT_ENABLE_ALL"
    execution_mode: str = "ORT_SEQUENTIAL"
    memory_arena: bool = True
    memory_pattern: bool = True
    global_thread_pool: bool = False
    """Threads are shared with every model that wants that."""
    config_entries: tuple[tuple[str, str], ...] = ()
    """onnxruntime's session config entries."""
    shrink_arenas: str = ""
    """The arenas that give back memory after each run, such as "cpu:0"; empty for none."""


def read_session_plan(raw: RawConfig, placement: InstancePlacement, parameters: Parameters) -> SessionPlan:
    """Raises `InvalidArgument` for a wrong parameter or optimization; `field` names it."""
    spins = read_flag(parameters, "session_thread_pool_allow_spinning", False)
    entries = {"session.intra_op.allow_spinning": spins, "session.inter_op.allow_spinning": spins}
    if read_flag(parameters, "session.use_device_allocator_for_initializers", False):
        entries["session.use_device_allocator_for_initializers"] = True
    optimization: RawConfig = raw.get("optimization", {})
    level = int(optimization.get("graph", {}).get("level", 0))
    if level not in _LEVELS:
        message = f"optimization.graph.level must be one of {sorted(_LEVELS)}, got {level}"
        raise InvalidArgument(message, field="optimization.graph.level")
    return SessionPlan(
        providers=_read_providers(optimization.get("execution_accelerators", {}), placement, parameters),
        intra_op_threads=read_thread_count(parameters, "intra_op_thread_count") or usable_cores().threads,
        inter_op_threads=read_thread_count(parameters, "inter_op_thread_count") or usable_cores().threads,
        optimization_level=_LEVELS[level],
        execution_mode=_MODES[read_choice(parameters, "execution_mode", _MODES, "0")],
        memory_arena=read_flag(parameters, "enable_mem_arena", True),
        memory_pattern=read_flag(parameters, "enable_mem_pattern", True),
        global_thread_pool=read_flag(parameters, "enable-global-threadpool", False),
        config_entries=tuple((name, str(int(value))) for name, value in entries.items()),
        shrink_arenas=parameters.get("memory.enable_memory_arena_shrinkage", ""),
    )


def _read_providers(
    accelerators: RawConfig, placement: InstancePlacement, parameters: Parameters
) -> tuple[Provider, ...]:
    """The providers by precedence: an operator runs on the first that has it, and the CPU has all."""
    on_gpu = placement.kind == "KIND_GPU"
    device = {"device_id": str(placement.device)}
    side = "gpu_execution_accelerator" if on_gpu else "cpu_execution_accelerator"
    providers: list[tuple[str, dict[str, str]]] = []
    for accelerator in accelerators.get(side, ()):
        options = dict(accelerator.get("parameters", {}))
        match on_gpu, accelerator.get("name", ""):
            case False, "openvino":
                providers.append(("OpenVINOExecutionProvider", options))
            case True, "cuda":
                providers.append(("CUDAExecutionProvider", _cuda_options(options) | device))
            case True, "tensorrt":
                providers.append(("TensorrtExecutionProvider", _tensorrt_options(options) | device))
            case _, name:
                message = f"unknown {side} '{name}'; known are tensorrt and cuda on GPU, openvino on CPU"
                raise InvalidArgument(message, field=f"optimization.execution_accelerators.{side}")
    if on_gpu and all(name != "CUDAExecutionProvider" for name, _ in providers):
        providers.append(("CUDAExecutionProvider", _cuda_options(parameters) | device))
    providers.append(("CPUExecutionProvider", {}))
    return tuple((name, tuple(sorted(options.items()))) for name, options in providers)


def _tensorrt_options(options: Mapping[str, str]) -> dict[str, str]:
    """Triton's names in onnxruntime's words; onnxruntime's own pass as they are."""
    precision = options.get("precision_mode", "FP32")
    named = {_TENSORRT.get(name, name): value for name, value in options.items() if name != "precision_mode"}
    return named | ({f"trt_{precision.lower()}_enable": "1"} if precision in ("FP16", "INT8") else {})


def _cuda_options(parameters: Parameters) -> dict[str, str]:
    return {
        name: values.get(parameters[name], parameters[name])
        for name, values in _CUDA_PARAMETERS.items()
        if name in parameters
    }
