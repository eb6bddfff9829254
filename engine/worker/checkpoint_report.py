"""What serving a checkpoint would be like on this machine: found without reading its weights."""

import torch

from ..checkpoint.build_context import BuildContext
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.model_spec import ModelSpec
from ..models.registry import checkpoint_builder
from .roofline import measure_roofline

_META = torch.device("meta")


def describe_checkpoint(model: str) -> list[str]:
    """Lines for people: the model, what becomes of its matrices on a CPU, memory, and the bound of this machine.

    Raises:
        CheckpointError: it can't be served.
    """
    checkpoint = open_checkpoint(model)
    found = checkpoint_builder(checkpoint)
    built = found.build(BuildContext(getattr(torch, found.dtype), _META, 1))
    shape, served = built.shape, built.served
    cache = 2 * len(shape.attention) * shape.kv_heads * shape.head_dim * getattr(torch, found.dtype).itemsize
    if served is None or not isinstance(shape, ModelSpec):
        return [f"computed by transformers in {found.dtype}; {cache / 1e3:.0f} KB of KV cache for a token"]
    lines = [f"{shape.architecture}, {shape.layers} layers, texts to {found.max_position} tokens", *served.lines()]
    if not served.quantised:
        lines.append(f"all matrices are stored as {found.dtype}; --quantization can make them smaller")
    full = cache * found.default_length
    lines.append(
        f"memory: {served.bytes / 1e6:.0f} MB of weights, {cache / 1e3:.0f} KB of KV cache for a token,"
        f" {full / 1e6:.0f} MB for a text of {found.default_length} tokens"
    )
    bound = measure_roofline(shape, found.dtype, served)
    return [*lines, "speed: the weights stay in this machine's caches" if bound is None else f"speed: {bound}"]
