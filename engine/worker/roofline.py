"""What a machine makes of a model: the bound that memory sets on decoding, and what serving a checkpoint would be like,
found without reading its weights."""

import time
from typing import NamedTuple

import torch

from ..attention.layer_places import groups_of, token_room
from ..checkpoint.build_context import BuildContext
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.model_spec import DecoderShape, ModelSpec
from ..checkpoint.served_forms import ServedForms
from ..layers.int4 import BYTES
from ..models.calibration import HIGHER_SHARE
from ..models.registry import checkpoint_builder

CACHED = 1 << 26
"""Weights of fewer bytes may stay in the processor's caches: memory does not bound them."""

_SAMPLE = 1 << 27
"""Bytes that are read to measure the memory's speed."""

_READS = 4
"""How often they are read."""


class Roofline(NamedTuple):
    """The bound of memory on decoding: on a CPU each token of a lone sequence reads every weight it goes through once.
    `weights`: bytes read for a token, kept as `kind`; `bandwidth`: bytes a second."""

    weights: int
    kind: str
    bandwidth: float

    def __str__(self) -> str:
        return (
            f"memory read at {self.bandwidth / 1e9:.0f} GB/s now, {self.weights / 1e6:.0f} MB of {self.kind} weights"
            f" a token: one sequence decodes at most {self.bandwidth / self.weights:.0f} tokens/s"
        )


def measure_roofline(shape: DecoderShape, kind: str, served: ServedForms | None = None) -> Roofline | None:
    """The bound of a model whose matrices are kept as `kind`, or, of a quantised file, as they are `served`; measures
    the memory, for less than 0.2 s. None where no model of ours computes, or memory is not what bounds it."""
    weights = 0
    if isinstance(shape, ModelSpec) and served is not None and served.quantised:
        weights = int(token_weights(shape) * served.bits / 8)
        kind = f"{served.bits:.1f}-bit"
    elif isinstance(shape, ModelSpec):
        weights = token_bytes(shape, kind)
    if weights < CACHED:
        return None
    return Roofline(weights, kind, read_bandwidth())


def token_bytes(spec: ModelSpec, kind: str) -> int:
    """Bytes of the matrices that one token goes through; int4 has a head, and some layers, in int8."""
    weights = token_weights(spec)
    if kind != "int4":
        return weights * (1 if kind in ("int8", "fp8") else getattr(torch, kind).itemsize)
    head = spec.vocab_size * spec.hidden_size
    return head + int((weights - head) * (HIGHER_SHARE + (1 - HIGHER_SHARE) * BYTES))


def token_weights(spec: ModelSpec) -> int:
    """Numbers in the matrices that one token goes through; of a mixture, in those of the experts it is routed to."""
    return spec.mixer_weights + spec.feed_forward_weights + spec.vocab_size * spec.hidden_size


def read_bandwidth() -> float:
    """Bytes a second that torch's threads read from memory, the best of a few times."""
    sample = torch.ones(_SAMPLE // 4)
    seconds = []
    for _ in range(_READS):
        begin = time.perf_counter()
        sample.sum()
        seconds.append(time.perf_counter() - begin)
    return _SAMPLE / min(seconds)


_META = torch.device("meta")


def describe_checkpoint(model: str) -> list[str]:
    """Lines for people: the model, what becomes of its matrices on a CPU, memory, and the bound of this machine.

    Raises:
        CheckpointError: it can't be served.
    """
    checkpoint = open_checkpoint(model)
    builder = checkpoint_builder(checkpoint)
    built = builder.build(BuildContext(getattr(torch, builder.dtype), _META, 1))
    shape = built.shape
    served = built.served
    cache = shape.token_numbers * getattr(torch, builder.dtype).itemsize
    if served is None or not isinstance(shape, ModelSpec):
        return [f"computed by transformers in {builder.dtype}; {_short(cache / 1e3)} KB of KV cache for a token"]
    reason = f", {builder.length_reason}" if builder.length_reason else ""
    title = f"{shape.architecture}, {shape.layers} layers, texts to {builder.max_position} tokens{reason}"
    lines = [title, *served.lines()]
    if not served.quantised:
        lines.append(f"all matrices are stored as {builder.dtype}; --quantization can make them smaller")
    groups = groups_of(shape, builder.default_length)
    full = cache * builder.default_length
    if groups.sliding:
        kept = groups.full * builder.default_length + groups.sliding * groups.window
        full = cache * token_room(shape, groups, builder.default_length) * kept // shape.token_numbers
    memory = (
        f"memory: {_short(served.bytes / 1e6)} MB of weights, {_short(cache / 1e3)} KB of KV cache for a token,"
        f" {_short(full / 1e6)} MB for a text of {builder.default_length} tokens"
    )
    state_bytes = sum(
        state.bytes(getattr(torch, builder.dtype).itemsize) for state in shape.states if state is not None
    )
    if state_bytes:
        memory += f", and {_short(state_bytes / 1e6)} MB of states for each"
    if groups.sliding:
        memory += f", of which sliding layers keep the last {groups.window}"
    lines.append(memory)
    bound = measure_roofline(shape, builder.dtype, served)
    return [*lines, "speed: the weights stay in this machine's caches" if bound is None else f"speed: {bound}"]


def _short(number: float) -> str:
    """A size of which people want two digits at least."""
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
