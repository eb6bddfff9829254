"""Computes in this process, on one thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import torch

from ...core.errors import InvalidArgument
from ...core.host import available_memory, cores
from ...scheduler.plan import StepPlan, StepResult
from ..attention.base import Attention, CacheSpec
from ..attention.registry import Wanted, attention_backend, check_backend
from ..checkpoint import open_checkpoint
from ..config import CacheConfig, EngineConfig
from ..kernels import library
from ..layers.group import Alone
from ..models.base import Place
from ..models.registry import recipe
from ..roof import roof
from ..rows import Rows
from ..runner import Runner
from ..spec import DTYPES, Shape
from .base import Capacity, Progress


class InlineExecutor:
    """One rank in this process.

    Everything that touches torch runs on one worker thread, in order: torch's thread pool and its settings belong
    to the thread that uses them. What a step raises is raised by its future.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._engine: _Engine | None = None

    def load(self, progress: Progress) -> Capacity:
        """Load the weights; `progress` is called on the caller's thread.

        Raises:
            CheckpointError: the checkpoint is broken or not supported.
            InvalidArgument: the configuration does not fit it or the machine.
        """
        reports: SimpleQueue[tuple[str, float] | None] = SimpleQueue()
        loading = self._worker.submit(self._load, lambda fraction: reports.put(("weights", fraction)))
        loading.add_done_callback(lambda _: reports.put(None))
        while report := reports.get():
            progress(*report)
        return loading.result()

    def allocate(self, blocks: int) -> None:
        self._worker.submit(self._loaded.runner.allocate, blocks).result()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        return self._worker.submit(self._loaded.runner.step, plan)

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)
        self._engine = None

    @property
    def _loaded(self) -> "_Engine":
        if self._engine is None:
            raise RuntimeError("the executor is not loaded")
        return self._engine

    def _load(self, progress: Callable[[float], None]) -> Capacity:
        torch.set_num_threads(self._config.threads or cores().threads)
        device = _device(self._config.device)
        self._engine = _build(self._config, device, progress)
        shape, _, max_tokens, attention, _ = self._engine
        free = _free_memory(device) - _working_memory(shape, self._config)
        machine = _machine(self._engine) if device.type == "cpu" else ""
        return Capacity(shape.vocab_size, max_tokens, attention.block_bytes, max(free, 0), machine)


class _Engine(NamedTuple):
    """What loading makes."""

    shape: Shape
    kept: torch.dtype
    max_tokens: int
    attention: Attention
    runner: Runner


def _build(config: EngineConfig, device: torch.device, progress: Callable[[float], None]) -> _Engine:
    found, block_size = recipe(open_checkpoint(config.model)), config.cache.block_size
    dtype, max_tokens = _dtype(config.dtype, found.dtype), _max_tokens(config.max_model_len, found.max_position)
    check_backend(config.attention, Wanted(device, dtype, block_size, config.cache.dtype))
    quantized = _quantized(config.quantization, device)
    decoder, shape = found.build(Place(dtype, device, Alone(), max_tokens, progress, quantized))
    progress(1.0)
    attention = attention_backend(config.attention, _cache(shape, config.cache, dtype, device))
    rows = Rows(max_tokens, block_size, device)
    kept = torch.int8 if quantized else dtype
    return _Engine(shape, kept, max_tokens, attention, Runner(decoder, attention, rows, device))


def _machine(engine: _Engine) -> str:
    """Cores, threads, and the bound that memory sets, for people."""
    threads, bound = torch.get_num_threads(), roof(engine.shape, engine.kept)
    said = f"{cores()}; {threads} thread{'s' if threads > 1 else ''}; {library.described()}"
    return said if bound is None else f"{said}; {bound}"


def _cache(shape: Shape, cache: CacheConfig, dtype: torch.dtype, device: torch.device) -> CacheSpec:
    heads = shape.heads, shape.kv_heads, shape.head_dim
    return CacheSpec(shape.views, *heads, cache.block_size, dtype, device, cache.dtype)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgument(f"device {name!r} is unknown: auto, cpu and cuda are not", field="device") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise InvalidArgument(f"device {name!r} is not on this machine; supported: auto, cpu, cuda", field="device")
    return device


def _dtype(name: str, stored: str) -> torch.dtype:
    name = stored if name == "auto" else name
    if name not in DTYPES:
        raise InvalidArgument(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}", field="dtype")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _quantized(name: str, device: torch.device) -> bool:
    if name not in ("none", "int8"):
        raise InvalidArgument(f"quantization must be none or int8, got {name!r}", field="quantization")
    if name == "int8" and device.type != "cpu":
        raise InvalidArgument(f"quantization int8 computes on the cpu only, not on {device}", field="quantization")
    return name == "int8"


def _max_tokens(wanted: int | None, own: int) -> int:
    if wanted is not None and not 1 <= wanted <= own:
        raise InvalidArgument(
            f"max_model_len must be between 1 and the checkpoint's {own}, got {wanted}", field="max_model_len"
        )
    return wanted or own


def _free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def _working_memory(shape: Shape, config: EngineConfig) -> int:
    """Bytes a step may take beside weights and cache: activations of its tokens, logits of its rows (float32,
    three times: logits, probabilities, their sums)."""
    scheduler = config.scheduler
    activations = scheduler.max_num_batched_tokens * (8 * shape.hidden_size + 4 * shape.intermediate_size) * 4
    return activations + scheduler.max_num_seqs * shape.vocab_size * 12
