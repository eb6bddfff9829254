"""A rank built from a configuration: model, attention, rows and runner, and the memory left for its cache.

Every executor builds its ranks here. Knows nothing of threads, processes, or how ranks reach each other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from ...core.errors import InvalidArgument
from ...processes.host import available_memory, own_anonymous_memory, usable_cores
from ..attention.backend import AttentionBackend, CacheSpec
from ..attention.selector import CacheRequirements, capable_backends, create_backend
from ..checkpoint.build_context import BuildContext, Shard
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.model_spec import DTYPES, DecoderShape
from ..config import CacheConfig, EngineConfig
from ..cpu import library
from ..models.interfaces import CheckpointBuilder
from ..models.registry import checkpoint_builder
from .device import resolve_device
from .executor import Capacity
from .logprobs import LOGITS_PIECE
from .model_runner import ModelRunner
from .roofline import measure_roofline
from .row_states import RowStates

WHOLE_MODEL = Shard()


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank that is ready to compute; `shape` is the whole model's."""

    config: EngineConfig
    context: BuildContext
    shape: DecoderShape
    attention: AttentionBackend
    runner: ModelRunner

    def capacity(self, neighbours: int = 1) -> Capacity:
        """Sizes of this rank, and the memory left for its cache when all `neighbours` that share it have loaded."""
        left = _free_memory(self.context.device, neighbours, self.config)
        free = left - _working_memory(self.shape, self.config)
        machine = self._machine() if self.context.device.type == "cpu" else ""
        sizes = self.shape.vocab_size, self.context.max_positions, self.attention.block_bytes
        return Capacity(*sizes, max(free, 0), machine)

    def _machine(self) -> str:
        """Cores, threads, and the bound that memory sets a rank that is alone, for people."""
        threads = torch.get_num_threads()
        said = f"{usable_cores()}; {threads} thread{'s' if threads > 1 else ''}; {library.describe()}"
        kept = torch.int8 if self.context.quantized else self.context.dtype
        bound = measure_roofline(self.shape, kept) if self.context.shard.is_whole else None
        return said if bound is None else f"{said}; {bound}"


def load_rank(
    config: EngineConfig, shard: Shard = WHOLE_MODEL, progress: Callable[[float], None] = lambda _: None
) -> LoadedRank:
    """Load this rank's share of the model. `progress` is told the fraction of its bytes read so far.

    Computes on torch's threads as they are set; ranks of a stage must have the same number of them, for each chooses
    tokens by itself.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        InvalidArgument: the configuration does not fit it, its split or the machine.
    """
    found, block_size = checkpoint_builder(open_checkpoint(config.model)), config.cache.block_size
    context = _build_context(config, found, shard, progress)
    capable_backends(config.attention, CacheRequirements(context.device, context.dtype, block_size, config.cache.dtype))
    decoder, shape = found.build(context)
    progress(1.0)
    attention = create_backend(config.attention, _cache(shard.local_shape(shape), config.cache, context))
    rows = RowStates(context.max_positions, block_size, context.device)
    return LoadedRank(config, context, shape, attention, ModelRunner(decoder, attention, rows, context.device))


def check_rank_config(config: EngineConfig) -> str:
    """Refuse everything that `load_rank` would, short of reading weights; returns what only the weights can show, if
    anything. The devices of this machine are not looked at: the model may be served elsewhere.

    Raises:
        CheckpointError: as `load_rank`.
        InvalidArgument: the configuration does not fit the checkpoint.
    """
    found = checkpoint_builder(open_checkpoint(config.model))
    context = _build_context(msgspec.structs.replace(config, device="cpu"), found, WHOLE_MODEL, lambda _: None)
    return found.dry_run(context, config.parallel)


def _build_context(
    config: EngineConfig, found: CheckpointBuilder, shard: Shard, progress: Callable[[float], None]
) -> BuildContext:
    device, dtype = resolve_device(config.device), _dtype(config.dtype, found.dtype)
    max_tokens = _max_tokens(config.max_model_len, found)
    quantized, whole_experts = _quantized(config.quantization, device), config.parallel.whole_experts
    return BuildContext(dtype, device, max_tokens, shard, progress, quantized, whole_experts)


def _cache(shape: DecoderShape, cache: CacheConfig, context: BuildContext) -> CacheSpec:
    heads = shape.heads, shape.kv_heads, shape.head_dim
    return CacheSpec(shape.attention, *heads, cache.block_size, context.dtype, context.device, cache.dtype)


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


def _max_tokens(wanted: int | None, found: CheckpointBuilder) -> int:
    own = found.max_position
    if wanted is not None and not 1 <= wanted <= own:
        raise InvalidArgument(
            f"max_model_len must be between 1 and the checkpoint's {own}, got {wanted}", field="max_model_len"
        )
    return wanted or found.default_length


def _free_memory(device: torch.device, neighbours: int, config: EngineConfig) -> int:
    """Bytes left to each of `neighbours`. Other replicas may be loading still, and other models have been promised
    memory: this engine has no more than was granted to it, what its ranks have taken already included."""
    if device.type == "cuda":
        free, granted = torch.cuda.mem_get_info(device)[0], config.gpu_memory
        taken = torch.cuda.memory_reserved(device) if granted is not None else 0
    else:
        free, granted, taken = available_memory(), config.host_memory, own_anonymous_memory()
    return free // neighbours if granted is None else min(free // neighbours, granted // neighbours - taken)


def _working_memory(shape: DecoderShape, config: EngineConfig) -> int:
    """Bytes a step may take beside weights and cache: activations of its tokens, logits of its rows or of a piece of a
    prompt (float32, three times: logits, probabilities, their sums)."""
    scheduler = config.scheduler
    activations = scheduler.max_num_batched_tokens * (8 * shape.hidden_size + 4 * shape.intermediate_size) * 4
    return activations + max(scheduler.max_num_seqs, LOGITS_PIECE) * shape.vocab_size * 12
