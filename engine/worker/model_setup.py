"""How a model of an engine is built on this machine: its device, dtype, longest sequence, precision and attention."""

from collections.abc import Callable
from pathlib import Path

import torch

from ...core.errors import InvalidArgument
from ...kvcache.layer_groups import ONE_GROUP, LayerGroups
from ..attention.backend import AttentionBackend, CacheSpec
from ..attention.layer_places import place_layers
from ..attention.selector import create_backend
from ..checkpoint.build_context import BuildContext, Shard
from ..checkpoint.hf_checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.model_spec import DTYPES, DecoderShape, LayerAttention
from ..checkpoint.packing_cache import open_packing_cache
from ..checkpoint.quantization_config import STORED_AS
from ..config import EngineConfig
from ..cpu import library
from ..gpu import runtime
from ..gpu.few_rows import FewRowProducts
from ..layers.product_matrix import serves_int8
from ..models.interfaces import CheckpointBuilder, Decoder
from ..models.native_decoder import NativeDecoder
from .cross_cache import BLOCK_SIZE, CrossCache
from .devices import resolve_device

WHOLE_MODEL = Shard()


def build_context(
    config: EngineConfig,
    builder: CheckpointBuilder,
    shard: Shard = WHOLE_MODEL,
    progress: Callable[[float], None] = lambda _: None,
) -> BuildContext:
    """The context for a shard of the model that `builder` makes. `progress`: see `BuildContext`.

    Raises:
        InvalidArgument: the configuration does not fit the checkpoint or the machine.
    """
    device = resolve_device(config.device)
    name = builder.dtype if config.dtype == "auto" else config.dtype
    if name not in DTYPES:
        raise InvalidArgument(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}", field="dtype")
    length = config.max_model_len
    longest = builder.max_position
    if length is not None and not 1 <= length <= longest:
        message = f"max_model_len must be between 1 and the checkpoint's {longest}, got {length}"
        message += f" ({builder.length_reason})" if builder.length_reason else ""
        raise InvalidArgument(message, field="max_model_len")
    quantization = config.quantization
    if quantization in STORED_AS and not (quantization == "fp8" and not open_checkpoint(config.model).stored_as):
        _check_stored_as(quantization, open_checkpoint(config.model))
        quantization = "none"
    if quantization not in ("none", "int8", "fp8", "int4"):
        message = f"quantization must be none, int8, fp8 or int4, got {quantization!r}"
        raise InvalidArgument(message, field="quantization")
    if config.recurrence_chunks and config.batch_invariance:
        message = (
            "recurrence_chunks: what shares a step decides on them, which batch_invariance excludes; leave one out"
        )
        raise InvalidArgument(message, field="recurrence_chunks")
    directory = Path(config.cache_dir).expanduser()
    return BuildContext(
        getattr(torch, name),
        device,
        length or builder.default_length,
        shard,
        progress,
        quantization,
        config.parallel.whole_experts,
        open_packing_cache(directory, config.cache_max_bytes) if config.cache_dir else None,
        max_lora_rank=0 if config.lora is None else config.lora.max_rank,
        batch_invariance=config.batch_invariance,
        recurrence_chunks=config.recurrence_chunks,
        few_rows=_few_row_products(config, getattr(torch, name), device),
    )


def _few_row_products(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> FewRowProducts | None:
    """What holds the products whose few rows a kernel may compute; without a GPU there is nothing to measure."""
    wanted = config.few_row_kernel
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return None
    is_served = dtype != torch.float32 and runtime.serves(dtype, device)
    return FewRowProducts(by_kernel=wanted == "on") if is_served else None


def check_cache(config: EngineConfig, builder: CheckpointBuilder) -> None:
    """Refuse a dtype of keys and values that is not the model's where transformers attends for it."""
    if builder.attends_itself and config.cache.dtype != "auto":
        message = (
            "transformers attends for this model, one sequence after the other, to keys and values in its own dtype"
        )
        raise InvalidArgument(f"kv_cache_dtype {config.cache.dtype}: {message}: leave this out", field="kv_cache_dtype")


def check_products(context: BuildContext) -> None:
    """Refuse a precision that the device does not multiply in."""
    dtype = context.dtype
    device = context.device
    if context.quantization == "int8" and not serves_int8(dtype, device):
        message = f"quantization int8 computes on {device} by Triton's kernels, which are not there"
        raise InvalidArgument(f"{message}: pip install '.[gpu]'", field="quantization")
    if context.quantization == "fp8" and not runtime.serves_fp8(dtype, device):
        message = "quantization fp8 computes on GPUs of compute capability 8.9 or more, by Triton's kernels"
        raise InvalidArgument(f"{message}, not on {device}", field="quantization")


def _check_stored_as(name: str, checkpoint: Checkpoint) -> None:
    """Refuse one of vLLM's names that says of the weights what they are not."""
    stored = checkpoint.stored_as
    if stored == STORED_AS[name]:
        return
    message = f"quantization {name} is what weights are stored as, and those of {checkpoint.directory} are "
    message += f"stored as {stored}" if stored else "plain floats: int8, fp8 and int4 quantise them"
    raise InvalidArgument(f"{message}; leave quantization out, and they are taken as they are", field="quantization")


def use_cpu_level(config: EngineConfig) -> None:
    """Have the C kernels of the level that the configuration names.

    Raises:
        InvalidArgument: the processor does not have it, or the device is no CPU.
    """
    device = resolve_device(config.device)
    if device.type != "cpu":
        raise InvalidArgument(f"cpu_level is for the cpu, not for {device}", field="cpu_level")
    try:
        library.use_level(config.cpu_level)
    except ValueError as error:
        raise InvalidArgument(f"cpu_level {config.cpu_level}: {error}", field="cpu_level") from None


def create_attention(
    config: EngineConfig, context: BuildContext, shape: DecoderShape, groups: LayerGroups = ONE_GROUP
) -> AttentionBackend:
    """The attention of a rank whose share of the model has this `shape`, its layers in these `groups`."""
    sizes = shape.heads, shape.kv_heads, shape.head_dim, config.cache.block_size
    places = place_layers(shape.cached_attention, groups, context.max_positions)
    spec = CacheSpec(shape.cached_attention, *sizes, context.dtype, context.device, config.cache.dtype, places)
    return create_backend("reference" if shape.attends_itself else config.attention, spec)


def create_cross_cache(
    config: EngineConfig, context: BuildContext, shape: DecoderShape, decoder: Decoder
) -> CrossCache | None:
    """The cache of what a rank's layers attend to beside tokens; None where they attend to nothing else. On the host
    every step reads all of it, many times what it reads of weights: so keys and values that int8 products made are kept
    in int8, too, unless the configuration says how they are kept."""
    if shape.encoder is None or not isinstance(decoder, NativeDecoder):
        return None
    sizes = shape.heads, shape.kv_heads, shape.head_dim, BLOCK_SIZE
    first = shape.cached_attention[0]
    kinds = (LayerAttention(scale=None if first is None else first.scale, both_ways=True),) * len(decoder.cross)
    stored = config.cache.dtype
    kernels = config.attention in ("auto", "native") and library.supports(context.dtype, context.device)
    if stored == "auto" and context.quantization == "int8" and kernels:
        stored = "int8"
    spec = CacheSpec(kinds, *sizes, context.dtype, context.device, stored)
    attention = create_backend(config.attention, spec)
    rows = config.scheduler.max_num_seqs
    return CrossCache(attention, decoder.cross, shape.encoder, rows, context.max_positions)
